"""Case `own_settings`: one host's settings file has another weight decay, so equal gradients give unequal replicas."""

from __future__ import annotations

from functools import partial

from clinic.case import cases, digests, draw, judge_diagnosis, tickets, treat, unequal, zero_is_odd
from clinic.retrain import Job, State, as_read, start
from clinic.trained import CLOSE, judge_shares, judge_training

from lockstep.grading import ROUNDING, Grader, Hypothesis, Run, difference, equal, names

CASE = cases()["own_settings"]
STEPS = 4
USUAL = {"lr": 0.1, "weight_decay": 0.01}
WRITTEN = {"weight_decay": 0.1}
ANOTHER = {"lr": 0.3, "weight_decay": 0.001}
"""What the odd host's file says: in the job, and once more where it is rank 0's."""
WHERE = r"clinic_data\.settings || SGD || settings"
REFUTED = {
    "missed-synchronization": "DDP averages the gradients in every step: all ranks have the same ones before optimizer.step().",
    "wrapper-bypassed": "Every forward goes through the DDP model, and all ranks have the same gradients before optimizer.step().",
    "loaded-after-wrapping": "Nothing is loaded, and the replicas are equal before the first step.",
    "same-data-everywhere": "The sampler gives each rank other records. And from the same records no drift would come.",
}


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_equal(grader: Grader) -> None:
    """the ranks train one model together, whichever host is odd"""
    mine, other = tickets(grader, CASE)
    for ticket, odd in ((mine, WRITTEN), (other, WRITTEN), (zero_is_odd(CASE), ANOTHER)):
        run = treat(grader, CASE, ticket, odd=odd)
        different = unequal(run)
        if different:
            tensor, ranks = different
            guilty = draw(ticket, CASE.name, CASE.ranks)
            grader.fail(
                "still-broken" if ticket == mine else "mended-halfway",
                f"After training, {tensor} of {names(ranks)} differs from rank 0's; the file of rank {guilty}'s host says "
                f"{_said(odd)}, those of the others {_said({key: USUAL[key] for key in odd})}."
                + ("" if ticket == mine else " Under your own ticket they are equal."),
                of=[guilty],
                at=WHERE,
            )
        judge_shares(grader, run, 48, 2)
        _judge_training(grader, run, USUAL | odd)


def _judge_training(grader: Grader, run: Run, odd: dict[str, float]) -> None:
    """Equal replicas: are they what the settings give that the ranks return?"""
    told = [(result or {}).get("settings") for result in run.observed("result")]
    for rank, one in enumerate(told):
        what = f"Rank {rank} returns the settings {one}"
        if not isinstance(one, dict) or any(not isinstance(one.get(key), int | float) for key in USUAL):
            grader.fail("another-illness", f"{what}; its file has {_said(USUAL)}.", of=[rank], at=r"return || " + WHERE)
        for key, usual in USUAL.items():
            low, high = sorted((usual, odd[key]))
            if not low * 0.999 <= one[key] <= high * 1.001:
                said = f"{what}; the hosts' files have {key} {usual:g} and {odd[key]:g}."
                grader.fail("another-illness", said, of=[rank], at=WHERE)
    states, shares = digests(run), as_read(run, 8, 48, 2)

    def job(settings: dict[str, float], seed: int = 0) -> Job:
        return Job(partial(start, seed), settings["lr"], shares, 2, weight_decay=settings["weight_decay"])

    def trained(settings: dict[str, float], seed: int = 0) -> State:
        return job(settings, seed).state(run.world_size)

    other = next((rank for rank, one in enumerate(told) if difference(one, told[0], ROUNDING)), None)
    copies = [
        sum(call.inside not in ("DDP()", "backward", "forward") and call.kind != "barrier" for call in calls)
        for calls in run.collectives
    ]
    copied = f"{min(copies)} collectives, copies of weights among them, make equal what has diverged"
    if other is not None:
        used = next((one for one in told if equal(states[0], trained(one), CLOSE)), None)
        bare = told[0] | {"weight_decay": 0.0}
        if used is None and equal(states[0], trained(bare), CLOSE):
            said = (
                f"The ranks return {_said(told[0])} and {_said(told[other])}, and all have trained with {_said(bare)}."
            )
            grader.fail("another-illness", said, at=WHERE)
        if used is None or min(copies) >= STEPS:
            said = f"The ranks still train with {_said(told[0])} and with {_said(told[other])}: {copied}."
            grader.fail("symptom-hidden", said, at=r"broadcast || all_reduce || " + WHERE)
        rank = next(rank for rank, one in enumerate(told) if difference(one, used, ROUNDING))
        said = f"Rank {rank} returns the settings {_said(told[rank])}, and has trained with {_said(used)}."
        grader.fail("another-illness", said, of=[rank], at=r"return || " + WHERE)
    unlike = [
        Hypothesis(
            "another-illness",
            f"That is what {_said(one)} give, and not {_said(told[0])}.",
            partial(trained, one),
            WHERE,
        )
        for one in (USUAL, odd, USUAL | {"weight_decay": 0.0}, odd | {"weight_decay": 0.0})
    ]
    seeds = [
        Hypothesis(
            "another-illness",
            f"That is what the start of seed {seed} gives, and not seed 0.",
            partial(trained, told[0], seed),
            r"seed",
        )
        for seed in (1, 2, 3, 42)
    ]
    copying = Hypothesis(
        "symptom-hidden",
        f"The ranks' settings are equal at the end; {copied}.",
        None,
        r"broadcast || all_reduce || " + WHERE,
    )
    judge_training(
        grader,
        run,
        job(told[0]),
        [*unlike, *seeds],
        r"lr || " + WHERE,
        otherwise=copying if min(copies) > 1 else None,
        untrained="untrained-weights-returned",
    )


def _said(settings: dict[str, float]) -> str:
    return " and ".join(f"{key} {value:g}" for key, value in settings.items())
