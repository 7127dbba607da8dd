"""What `exact_resume` has to do.

    train(folder, make, dataset, *, epochs, batch_size, save_every, seed, stop_after=None) -> nn.Module

The submission is measured by itself: one training runs through, others are interrupted and resumed, and every step of
the two is compared, to the bit. The parts that `make` builds note what each step began with: the samples, the numbers
that the generators gave, weights, buffers, the optimizer's moments, the rate and the scale. The first of these that
differs is what the submission has not restored.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from resumed import read_loading

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Outcome, Run

SAMPLES, EPOCHS = 36, 4
WORLD, BATCH = 2, 5  # 18 samples a rank: batches of 5, 5, 5 and 3
ODD_WORLD, ODD_BATCH = 3, 3  # 12 samples a rank: four batches of 3
STEPS = 4  # an epoch, either way
TOTAL = STEPS * EPOCHS
SAVE_EVERY = 5

TRAIN = r"def train\("
LOADING = r"load_latest\( || " + TRAIN
SAVING = r"save_checkpoint\( || " + TRAIN
RANDOM = r"set_rng_state || setstate || set_state || manual_seed || " + LOADING
ORDER = r"set_epoch || Sampler\( || for .* in || " + TRAIN

Step = dict[str, Any]


def data(grader: Grader) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and classes, drawn anew for every seed."""
    generator = torch.Generator().manual_seed(grader.random("data").randrange(1 << 30))
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)


def options(grader: Grader, batch: int = BATCH, save_every: int = SAVE_EVERY) -> dict[str, int]:
    """What train is called with."""
    return {
        "epochs": EPOCHS,
        "batch_size": batch,
        "save_every": save_every,
        "seed": grader.random("seed").randrange(9999),
    }


def stops(grader: Grader) -> dict[str, int]:
    """Where the training is interrupted, in steps: within an epoch, at its end, after the first step, after the last."""
    chance = grader.random("stops")
    return {
        "within an epoch": STEPS * chance.randint(1, 2) + STEPS // 2,  # a step from there is not where an epoch begins
        "at the end of an epoch": STEPS * chance.randint(1, 2),
        "after the first step": 1,
        "after the last step": TOTAL,
    }


def two(grader: Grader) -> Run:
    """Two ranks: through, and interrupted at four places."""
    x, y = data(grader)
    return grader.run("resumes", WORLD, x=x, y=y, options=options(grader), stops=list(stops(grader).values()))


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    return read_loading(grader, run, LOADING)


# One training --------------------------------------------------------------------------------------------------------


def test_trains(grader: Grader) -> None:
    """it trains: every sample once an epoch, in a new order, with random numbers of each rank's own"""
    through = two(grader).observed("through")
    for rank, call in enumerate(through):
        if len(call["steps"]) != TOTAL:
            grader.fail(
                "wrong-number-of-steps-trained",
                f"{SAMPLES} samples on {WORLD} ranks in batches of {BATCH} are {STEPS} steps an epoch, {TOTAL} in {EPOCHS} "
                f"epochs; rank {rank} made {len(call['steps'])}.",
                of=[rank],
                at=ORDER,
            )
    for epoch in range(EPOCHS):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        seen = sorted(sample for call in through for step in call["steps"][part] for sample in step["samples"])
        if seen != list(range(SAMPLES)):
            often = [n for n in range(SAMPLES) if seen.count(n) > 1]
            never = [n for n in range(SAMPLES) if n not in seen]
            grader.fail(
                "loses-its-place",
                f"Without any interruption, in epoch {epoch} the samples {often or 'none'} came more than once, and "
                f"{never or 'none'} not at all.",
                of=range(WORLD),
                at=ORDER,
            )
    first, second = ([step["samples"] for step in through[0]["steps"][e * STEPS : (e + 1) * STEPS]] for e in (0, 1))
    if first == second:
        grader.fail(
            "missing-set-epoch",
            f"Rank 0 saw the samples {', '.join(map(str, first[0]))}, … in epoch 0, and the same order in epoch 1.",
            of=range(WORLD),
            at=ORDER,
        )
    draws = [call["steps"][0]["draws"] for call in through]
    for at, generator in enumerate(("random", "numpy.random", "torch")):
        if torch.equal(draws[0][:, at], draws[1][:, at]):
            grader.fail(
                "same-random-numbers-everywhere",
                f"The first number that {generator} gave was {draws[0][0, at]:.6f} on rank 0, and on rank 1 as well.",
                of=range(WORLD),
                at=r"seed\( || " + TRAIN,
            )


@pytest.mark.needs("test_trains")
def test_same_start(grader: Grader) -> None:
    """the same seed gives the same training"""
    run = two(grader)
    through = run.observed("through")
    for stop in stops(grader).values():
        for rank, call in enumerate(run.observed(f"until {stop}")):
            for number, (step, same) in enumerate(zip(call["steps"], through[rank]["steps"], strict=False)):
                for what, how in (("weights", "weights"), ("draws", "random numbers"), ("loss", "loss")):
                    if not equal(step[what], same[what]):
                        grader.fail(
                            "start-not-seeded",
                            f"Two trainings with the same seed, both from the start: on rank {rank} the {how} of step "
                            f"{number + 1} are not the same (loss {same['loss']:.6f}, then {step['loss']:.6f}).",
                            of=[rank],
                            at=r"seed\( || make\(\) || " + TRAIN,
                        )


@pytest.mark.needs("test_same_start")
def test_stops(grader: Grader) -> None:
    """it stops where it is told to, and not before or behind"""
    run = two(grader)
    for stop in stops(grader).values():
        for rank, call in enumerate(run.observed(f"until {stop}")):
            if len(call["steps"]) != stop:
                grader.fail(
                    "ignores-stop-after",
                    f"With stop_after={stop} rank {rank} made {len(call['steps'])} steps.",
                    of=[rank],
                    at=r"(if|while) .*stop_after || " + TRAIN,
                )
            if call["returned"] != "the model":
                grader.fail(
                    "wrong-thing-returned",
                    f"train returned {call['returned']} on rank {rank}; it should be the very model that make() gave.",
                    of=[rank],
                    at=r"return .*(ddp|wrap|model|None) || " + TRAIN,
                )


# Resumed -------------------------------------------------------------------------------------------------------------


def equal(one: Any, other: Any) -> bool:
    """To the last bit."""
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def drift(through: list[dict[str, Any]], resumed: list[dict[str, Any]], start: int) -> str:
    """What the difference has become: the first loss that differs, and how far the weights are apart in the end."""
    first = min(
        (
            start + at + 1
            for rank, call in enumerate(resumed)
            for at, step in enumerate(call["steps"])
            if start + at < TOTAL and step["loss"] != through[rank]["steps"][start + at]["loss"]
        ),
        default=None,
    )
    apart = (resumed[0]["weights"] - through[0]["weights"]).abs().max().item()
    said = f"the loss differs from step {first} on" if first else "no loss differs"
    end = f"max |Δw| is {apart:.1e}" if apart else "the weights are equal"
    return f"Against the training that ran through, {said}, and at the end {end}."


def cases(grader: Grader) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Each interruption: where in words, after how many steps, and the calls that resumed, by rank."""
    run = two(grader)
    return [(where, stop, run.observed(f"after {stop}")) for where, stop in stops(grader).items()]


@pytest.mark.needs("test_stops")
def test_place(grader: Grader) -> None:
    """a resumed training goes on with the next sample: none twice, none left out"""
    through = two(grader).observed("through")
    for where, stop, resumed in cases(grader):
        for rank, call in enumerate(resumed):
            judge_place(grader, where, stop, rank, call, through, drift(through, resumed, stop))


def judge_place(
    grader: Grader, where: str, stop: int, rank: int, call: dict[str, Any], through: list[dict[str, Any]], cost: str
) -> None:
    """The samples of one resumed call, against those that were left."""
    batches = [step["samples"] for step in through[rank]["steps"]]
    seen = [step["samples"] for step in call["steps"]]
    if seen == batches[stop:]:
        return
    ended = f"Interrupted {where}, when {stop} of {TOTAL} steps were done,"
    if stop == TOTAL:
        grader.fail(
            "trains-on-after-the-end",
            f"All {TOTAL} steps were done. Called again, rank {rank} made {len(seen)} more.",
            of=[rank],
            at=r"for epoch || while || " + TRAIN,
        )
    epoch, place = divmod(stop, STEPS)
    if not seen:
        id = "loses-its-place"
        if stop + STEPS >= TOTAL:  # the last epoch
            id = "skips-rest-of-epoch" if place else "off-by-one-epoch"
        left = TOTAL - stop
        grader.fail(
            id,
            f"{ended} rank {rank} made no further step: {left} batch{'es' * (left > 1)} are never seen. {cost}",
            of=[rank],
            at=ORDER,
        )
    at = batches.index(seen[0]) if seen[0] in batches else None
    began = f"{ended} rank {rank} went on with the samples {', '.join(map(str, seen[0]))}"
    if not place and at is not None and at in (stop - STEPS, stop + STEPS) and not call["warned"]:
        done = "was done already" if at < stop else "is never done"
        which = epoch - 1 if at < stop else epoch
        grader.fail("off-by-one-epoch", f"{began}: epoch {which} {done}. {cost}", of=[rank], at=ORDER)
    if at == 0 and stop > 1:
        if call["warned"]:
            grader.fail(
                "state-cannot-be-loaded",
                f"{began}: step 1 of the whole training. load_latest had warned: {call['warned'][0][:300]}",
                of=[rank],
                at=SAVING,
            )
        if epoch or len(seen) == TOTAL:
            id = "starts-over" if epoch else "epoch-restarted"
            grader.fail(id, f"{began}: step 1 of the whole training. {cost}", of=[rank], at=LOADING)
    if place and at == epoch * STEPS:
        grader.fail(
            "epoch-restarted",
            f"{began}, with which epoch {epoch} had begun {place} step{'s' * (place > 1)} before: they are learned from "
            f"twice. {cost}",
            of=[rank],
            at=ORDER,
        )
    if place and at == (epoch + 1) * STEPS:
        grader.fail(
            "skips-rest-of-epoch",
            f"{began}, the first of the next epoch: {STEPS - place} batch{'es' * (STEPS - place > 1)} of epoch {epoch} "
            f"{'are' if STEPS - place > 1 else 'is'} never seen. {cost}",
            of=[rank],
            at=ORDER,
        )
    if at in (stop - 1, stop + 1):
        what = f"those of step {stop} again" if at == stop - 1 else f"and left out those of step {stop + 1}"
        grader.fail(
            "off-by-one-step", f"{began}, {what}. {cost}", of=[rank], at=r"\bstep \+= || \bstep\b.*= || " + ORDER
        )
    others = [other for other in range(EPOCHS) if batches[other * STEPS + place :][: len(seen[:1])] == seen[:1]]
    if others and others[0] != epoch:
        grader.fail(
            "resumes-in-another-order",
            f"{began}, the right place in the order of epoch {others[0]}; it is epoch {epoch}. {cost}",
            of=[rank],
            at=ORDER,
        )
    wrong = next((i for i, (a, b) in enumerate(zip(seen, batches[stop:], strict=False)) if a != b), None)
    behind = f"In step {stop + wrong + 1} it" if wrong else "It"
    grader.fail(
        "loses-its-place",
        f"{began}. {behind} should have had {batches[stop + (wrong or 0)] if stop + (wrong or 0) < TOTAL else 'nothing'}; "
        f"in all it made {len(seen)} steps, and {TOTAL - stop} were left. {cost}",
        of=[rank],
        at=ORDER,
    )


@pytest.mark.needs("test_place")
def test_state(grader: Grader) -> None:
    """weights, buffers, optimizer, scheduler and scaler are what they were"""
    through = two(grader).observed("through")
    for where, stop, resumed in cases(grader):
        cost = drift(through, resumed, stop)
        for rank, call in enumerate(resumed):
            for at, step in enumerate(call["steps"]):
                same = through[rank]["steps"][stop + at]
                began = f"Interrupted {where}, after step {stop}: in step {stop + at + 1} rank {rank}"
                if at == 0:
                    judge_first_step(grader, began, rank, step, same, through[rank]["steps"][0], cost)
                if step["rate"] != same["rate"]:
                    grader.fail(
                        "scheduler-forgotten",
                        f"{began} learned at a rate of {step['rate']:g}, where it had been {same['rate']:g}. {cost}",
                        of=[rank],
                        at=r"sched.*load_state_dict || load_state_dict || " + LOADING,
                    )
                if step["scale"] != same["scale"]:
                    grader.fail(
                        "scaler-forgotten",
                        f"{began} scaled its loss by {step['scale']:g}, where it had been {same['scale']:g}. {cost}",
                        of=[rank],
                        at=r"scaler.*load_state_dict || load_state_dict || " + LOADING,
                    )


def judge_first_step(grader: Grader, began: str, rank: int, step: Step, same: Step, start: Step, cost: str) -> None:
    """What the first step after the interruption began with, against the step that it repeats."""
    for what, id, label, at in (
        ("weights", "weights-not-restored", "the weights", r"model.*load_state_dict || load_state_dict || "),
        ("buffers", "buffers-forgotten", "batch norm's running statistics", r"parameters\(\) || load_state_dict || "),
        ("moments", "optimizer-forgotten", "the optimizer's moments", r"optim.*load_state_dict || load_state_dict || "),
    ):
        if not equal(step[what], same[what]):
            apart = (step[what] - same[what]).abs().max().item()
            now = ""
            if equal(step[what], start[what]):
                now = " They were zero again." if what == "moments" else " They were those of the very first step."
            grader.fail(
                id,
                f"{began} did not begin where it had been: {label} were up to {apart:.1e} away.{now} {cost}",
                of=[rank],
                at=at + LOADING,
            )


@pytest.mark.needs("test_place")
def test_random_numbers(grader: Grader) -> None:
    """every generator of every rank goes on where it was"""
    through = two(grader).observed("through")
    for where, stop, resumed in cases(grader):
        cost = drift(through, resumed, stop)
        for rank, call in enumerate(resumed):
            if not call["steps"]:
                continue
            step, same = call["steps"][0], through[rank]["steps"][stop]
            wrong = [at for at in range(3) if not torch.equal(step["draws"][:, at], same["draws"][:, at])]
            if not wrong:
                continue
            began = f"Interrupted {where}, after step {stop}: in step {stop + 1} rank {rank}"
            judge_draws(grader, began, rank, stop, wrong, step, through, cost)


def judge_draws(
    grader: Grader,
    began: str,
    rank: int,
    stop: int,
    wrong: list[int],
    step: Step,
    through: list[dict[str, Any]],
    cost: str,
) -> None:
    """Where the numbers come from that the first step after the interruption drew."""
    steps = through[rank]["steps"]
    generators = ("random", "numpy.random", "torch")
    at = wrong[0]
    who = generators[at]
    got = step["draws"][:, at]
    drew = f"{began} drew {got[0]:.6f} from {who}, where it had been {steps[stop]['draws'][0, at]:.6f}"
    for other, call in enumerate(through):
        if other != rank and torch.equal(got, call["steps"][stop]["draws"][:, at]):
            grader.fail(
                "rank-0-random-state-everywhere",
                f"{drew}. That is the number that rank {other} drew in this step: it has rank {other}'s state. {cost}",
                of=[rank],
                at=r"all_gather || gather || " + RANDOM,
            )
    stream = torch.cat([one["draws"][:, at] for one in steps])
    begins = [sum(len(one["samples"]) for one in steps[:number]) for number in range(len(steps) + 1)]
    found = next((i for i in range(len(stream) - 1) if torch.equal(stream[i : i + 2], got[:2])), None)
    if found == 0:
        left = [generators[i] for i in wrong]
        grader.fail(
            "random-state-forgotten",
            f"{drew}. It is the first number of the whole training again: {', '.join(left)} "
            f"{'was' if len(left) == 1 else 'were'} seeded, and not put back. {cost}",
            of=[rank],
            at=RANDOM,
        )
    moved = found - begins[stop] if found is not None and found > begins[stop] else None
    if moved is None and who == "torch":
        moved = numbers_later(steps[stop - 1]["stream"], got[:2])
    if moved:
        grader.fail(
            "random-state-moved-on",
            f"{drew}. {who} was put back, and then {moved} number{'s' * (moved > 1)} more had been drawn from it before "
            f"the first sample was fetched. {cost}",
            of=[rank],
            at=RANDOM,
        )
    if found is not None:
        which = max(number for number, begin in enumerate(begins) if begin <= found)
        grader.fail(
            "random-state-of-another-moment",
            f"{drew}. That number belongs to step {which + 1}: the state was taken before that step, and saved "
            f"after step {stop}. {cost}",
            of=[rank],
            at=r"get_rng_state || getstate || " + RANDOM,
        )
    left = [generators[i] for i in wrong]
    grader.fail(
        "random-state-forgotten",
        f"{drew}. {', '.join(left)} {'was' if len(left) == 1 else 'were'} not put back. {cost}",
        of=[rank],
        at=RANDOM,
    )


def numbers_later(state: torch.Tensor, wanted: torch.Tensor) -> int | None:
    """After how many draws from torch's generator in this state these numbers come; None when they don't."""
    generator = torch.Generator()
    generator.set_state(state)
    stream = torch.cat([torch.rand((), generator=generator).reshape(1) for _ in range(1500)])
    hits = (stream[:-1] == wanted[0]) & (stream[1:] == wanted[1]) if len(wanted) > 1 else stream[:-1] == wanted[0]
    return int(hits.nonzero()[0]) if hits.any() else None


@pytest.mark.needs("test_state", "test_random_numbers")
def test_bits(grader: Grader) -> None:
    """on two ranks it ends with the bits of a training that ran through"""
    through = two(grader).observed("through")
    for where, stop, resumed in cases(grader):
        judge_bits(grader, where, stop, resumed, through)


def judge_bits(
    grader: Grader, where: str, stop: int, resumed: list[dict[str, Any]], through: list[dict[str, Any]]
) -> None:
    """The end of a resumed training, on every rank."""
    for rank, call in enumerate(resumed):
        # After a step each rank has running statistics of its own; what counts, and is saved, are rank 0's.
        ended = ("weights", "buffers") if rank == 0 else ("weights",)
        same = all(equal(call[what], through[rank][what]) for what in ended)
        mode = next((i for i, step in enumerate(call["steps"]) if not step["training"]), None)
        if same and mode is None:
            continue
        why = f" The model was in evaluation mode in step {stop + mode + 1}." if mode is not None else ""
        grader.fail(
            "resumed-run-differs",
            f"Interrupted {where}, after step {stop}, and resumed.{why} {drift(through, resumed, stop)}",
            of=[rank],
            at=r"\.eval\(\) || " + LOADING,
        )


@pytest.mark.needs("test_bits")
def test_three_ranks(grader: Grader) -> None:
    """on three ranks as well, where the order of a sum shows in its last bit"""
    x, y = data(grader)
    places = {where: stop for where, stop in stops(grader).items() if stop not in (1, TOTAL)}
    run = grader.run("resumes", ODD_WORLD, x=x, y=y, options=options(grader, ODD_BATCH), stops=list(places.values()))
    through = run.observed("through")
    for where, stop in places.items():
        resumed = run.observed(f"after {stop}")
        step, same = resumed[0]["steps"][0], through[0]["steps"][stop]
        started_alike = all(
            equal(step[what], same[what]) for what in ("samples", "draws", "weights", "moments", "loss")
        )
        if started_alike and not equal(step["gradients"], same["gradients"]):
            apart = (step["gradients"] - same["gradients"]).abs().max().item()
            grader.fail(
                "buckets-in-another-order",
                f"Interrupted {where}, after step {stop}: step {stop + 1} began with the same weights, samples and random "
                f"numbers, every rank had the same loss, and yet the averaged gradients differ by up to {apart:.1e}. "
                f"{drift(through, resumed, stop)}",
                of=range(ODD_WORLD),
                at=r"= *(DDP|DistributedDataParallel)\( || " + TRAIN,
            )
        judge_bits(grader, where, stop, resumed, through)


@pytest.mark.needs("test_bits")
def test_killed(grader: Grader) -> None:
    """killed by SIGKILL within a step, it loses the steps since the last checkpoint and nothing else"""
    x, y = data(grader)
    every = 3
    die_at = grader.random("death").choice([6, 7, 9, 10])  # the last multiple of 3 is no end of an epoch
    chosen = options(grader, save_every=every)
    killed = grader.attempt("dies", WORLD, x=x, y=y, options=chosen, die_at=die_at)
    if not any(one.outcome is Outcome.CRASHED and one.code == -signal.SIGKILL for one in killed.ranks):
        found = grader.diagnose(killed)
        grader.fail(found.id, found.message, evidence=found.evidence, of=found.ranks, at=TRAIN)
    left = next((files for files in killed.observed("files") if files), {})
    run = grader.run("lives_on", WORLD, x=x, y=y, options=chosen, left=left)
    resumed, through = run.observed("after"), two(grader).observed("through")
    wanted = die_at // every * every
    began = TOTAL - len(resumed[0]["steps"])
    if began < wanted:
        grader.fail(
            "saves-too-seldom",
            f"With save_every={every}, all ranks were killed in step {die_at + 1}, when {die_at} were done. The resumed "
            f"training went on behind step {began}; a checkpoint of step {wanted} should have been there.",
            of=range(WORLD),
            at=SAVING,
        )
    for rank, call in enumerate(resumed):
        judge_place(grader, "by SIGKILL", began, rank, call, through, drift(through, resumed, began))
    judge_bits(grader, "by SIGKILL", began, resumed, through)
