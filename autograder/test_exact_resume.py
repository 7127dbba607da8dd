"""What `exact_resume` has to do.

    train(folder, make, dataset, *, epochs, batch_size, save_every, seed, stop_after=None) -> nn.Module

The submission is measured by itself: one training runs through, others are interrupted and resumed, and every step of
the two is compared, bit for bit. The parts that `make` builds note what each step began with: the samples, the numbers
that the generators gave, weights, buffers, the optimizer's moments, the rate and the scale. The first of these that
differs is what the submission has not restored.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from judging.exact_resume import (
    EPOCHS,
    GENERATORS,
    LOADING,
    ORDER,
    RANDOM,
    SAMPLES,
    SAVING,
    STEPS,
    TOTAL,
    TRAIN,
    Case,
    dealt,
    judge_made,
    judge_skipped,
    places,
    read_rate,
    sources,
)
from judging.resumed import read_loading

from lockstep.grading import (
    EXACT,
    Cause,
    CheckNotRun,
    Diagnosis,
    Each,
    Grader,
    Hypothesis,
    Outcome,
    Run,
    difference,
    equal,
    fitting,
)

WORLD, BATCH = 2, 5  # 18 samples a rank: batches of 5, 5, 5 and 3
ODD_WORLD, ODD_BATCH = 3, 3  # 12 samples a rank: four batches of 3
SAVE_EVERY = 5


def given(grader: Grader, batch: int = BATCH, save_every: int = SAVE_EVERY) -> dict[str, Any]:
    """What train is called with, drawn for every seed. On three ranks the seed is 0: NumPy takes none below it."""
    generator = grader.generator("data")
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    seed = 0 if batch == ODD_BATCH else grader.random("seed").randrange(1, 9999)
    return {"x": x, "y": y, "options": {"epochs": EPOCHS, "batch_size": batch, "save_every": save_every, "seed": seed}}


def stops(grader: Grader) -> dict[str, int]:
    """Where the training is interrupted, in steps."""
    chance = grader.random("stops")
    return {
        "within an epoch": STEPS * chance.randint(1, 2) + STEPS // 2,  # a step from there is not where an epoch begins
        "at the end of an epoch": STEPS * chance.randint(1, 2),
        "after the first step": 1,
    }


def two(grader: Grader) -> Run:
    """Two ranks: through, and interrupted at three places."""
    return grader.run("resumes", WORLD, stops=list(stops(grader).values()), **given(grader))


def cases(grader: Grader) -> list[Case]:
    """What became of each interruption."""
    run = two(grader)
    return [
        Case(where, stop, run.observed(f"after {stop}"), run.observed("through"))
        for where, stop in stops(grader).items()
    ]


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    return read_loading(grader, run, LOADING)


# One training --------------------------------------------------------------------------------------------------------


def test_trains(grader: Grader) -> None:
    """it trains: every sample once an epoch, in a new order, with random numbers of each rank's own"""
    through = two(grader).observed("through")
    seed = given(grader)["options"]["seed"]
    mistakes = [
        Hypothesis("wrong-number-of-steps-trained", "The smaller batch at the end of an epoch is left out.",
                   lambda: Each(dealt(seed, WORLD, BATCH, last=False))),
        Hypothesis("missing-set-epoch", "Every epoch has the order of the first: the sampler isn't told the epoch.",
                   lambda: Each(dealt(seed, WORLD, BATCH, epochs=False))),
        Hypothesis("ignores-seed", f"That is the order for seed 0; seed={seed} was asked for.",
                   lambda: Each(dealt(0, WORLD, BATCH))),
        Hypothesis("no-shuffle", "Nothing was shuffled.", lambda: Each(dealt(seed, WORLD, BATCH, shuffle=False))),
        Hypothesis("seed-per-rank-sampler", "Each rank cuts its share from its own permutation.",
                   lambda: Each(dealt(seed, WORLD, BATCH, own=1))),
    ]  # fmt: skip
    batches = [[step["samples"] for step in call["steps"]] for call in through]
    what = f"The list of samples in {TOTAL} steps"
    grader.explain(what, batches, Each(dealt(seed, WORLD, BATCH)), mistakes, otherwise="loses-its-place", at=ORDER)
    draws = [[call["steps"][0]["draws"] for call in through], [call["made"][None] for call in through]]
    for at, generator in enumerate(GENERATORS):
        for (one, other), where in zip(draws, ("", " within make"), strict=True):
            if equal(one[:, at], other[:, at], EXACT):
                judge_loading(grader)
                what = f"The first number that {generator} gave{where} was {one[0, at]:.6f} on rank 0, and on rank 1 as well."
                at_seed = (r"seed\(\w+\) || " if where else "") + r"seed\( || " + TRAIN
                grader.fail("same-random-numbers-everywhere", what, of=range(WORLD), at=at_seed)
    judge_steps(grader, through)


def judge_steps(grader: Grader, calls: list[dict[str, Any]]) -> None:
    """Every batch goes through `train_step` once, on a model that averages its gradients."""
    gradients = [call["steps"][0]["gradients"] for call in calls]
    if apart := difference(gradients[1], gradients[0]):
        what = (
            f"In step 1 the gradients of ranks 0 and 1 differ by up to {apart.distance:.1e}: each stepped with its own."
        )
        grader.fail("bypasses-ddp", what, of=range(WORLD), at=r"train_step\( || " + TRAIN)
    for key, what, right in (
        ("scaled", "the number of losses that were scaled by the scaler", [1] * TOTAL),
        ("rate", "the learning rate", [0.02 * 0.6 ** (step // 4) for step in range(TOTAL)]),
        ("scale", "the scale of the loss", [3.0 * 1.3 ** (step // 3) for step in range(TOTAL)]),
    ):
        seen = [[float(step[key]) for step in call["steps"]] for call in calls]
        says = f"In {TOTAL} steps, {what}"
        at = r"train_step\( || \.step\(|\.backward\( || " + TRAIN
        grader.explain(says, seen, right, otherwise="not-by-train-step", at=at)


@pytest.mark.needs("test_trains")
def test_same_start(grader: Grader) -> None:
    """the same seed gives the same training"""
    run = two(grader)
    line = r"seed\( || make\(\) || " + TRAIN
    for stop in stops(grader).values():
        begun, through = run.observed(f"until {stop}"), run.observed("through")
        for what, of, steps in (
            ("first weights", lambda step: step["weights"], 1),
            *(
                (f"numbers from {who}", lambda step, at=at: step["draws"][:, at], stop)
                for at, who in enumerate(GENERATORS)
            ),
            ("weights", lambda step: step["weights"], stop),
            ("losses", lambda step: step["loss"], stop),
        ):
            bad = []
            for rank, (one, other) in enumerate(zip(begun, through, strict=True)):
                number = min(steps, len(one["steps"]))
                seen, same = ([of(step) for step in call["steps"][:number]] for call in (one, other))
                if not equal(seen, same, EXACT):
                    bad.append(rank)
            twice = f"Two trainings with the same seed, both from the start: on {{ranks}} the {what} are not the same."
            grader.fail_on(bad, "start-not-seeded", twice, at=line)


@pytest.mark.needs("test_same_start")
def test_stops(grader: Grader) -> None:
    """it stops where it is told to, and not before or after"""
    run = two(grader)
    for stop in stops(grader).values():
        calls = run.observed(f"until {stop}")
        made, returned = [len(call["steps"]) for call in calls], [call["returned"] for call in calls]
        what, at = f"With stop_after={stop} the number of steps", r"(if|while) .*stop_after || " + TRAIN
        grader.explain(what, made, stop, otherwise="ignores-stop-after", at=at)
        at = r"return .*(ddp|wrap|model|None) || " + TRAIN
        grader.explain("What train returned", returned, "the model", otherwise="wrong-thing-returned", at=at)


@pytest.mark.needs("test_stops")
def test_saves(grader: Grader) -> None:
    """it saves after every `save_every` steps of the whole training, where it stops, and after the last step"""
    run = two(grader)
    calls = [("A training that ran through", "through", 0, TOTAL)]
    for where, stop in stops(grader).items():
        calls += [
            (f"A training that stopped after step {stop}", f"until {stop}", 0, stop),
            (f"Interrupted {where} and resumed after step {stop}, it", f"after {stop}", stop, TOTAL),
        ]
    for who, name, began, ended in calls:
        call = run.observed(name)[0]
        if len(call["steps"]) != ended - began:
            continue  # test_place judges where it went on
        right = [step for step in range(began + 1, ended + 1) if step % SAVE_EVERY == 0 or step == ended]
        saved = [began + step for step in call["saves"]]
        if saved != right:
            what = f"With save_every={SAVE_EVERY}, the saves expected are after steps {listed(right)}. {who} saved after {listed(saved)}."
            fails = "saves-too-seldom" if set(right) - set(saved) else "saves-too-often"
            grader.fail(fails, what, of=[0], at=SAVING)


def listed(steps: list[int]) -> str:
    """The numbers of the steps, in words."""
    return ", ".join(map(str, steps)) or "none"


# Resumed -------------------------------------------------------------------------------------------------------------


def judge_place(grader: Grader, case: Case) -> None:
    """The samples of the resumed calls, against those that were left."""
    for rank, call in enumerate(case.calls):
        left = [step["samples"] for step in case.through[rank]["steps"]][case.stop :]
        seen = [step["samples"] for step in call["steps"]]
        if seen == left:
            continue
        where = f"It took {len(seen)} steps; {len(left)} were left. Its samples were {difference(seen, left)}."
        lost = Hypothesis("loses-its-place", where, None, ORDER)
        found = fitting([seen[:1]], places(case, rank)) or lost
        began = f"rank {rank} continued with {f'the samples {seen[0]}' if seen else 'nothing'}"
        grader.fail(
            found.id, f"{case.interrupted} of {TOTAL}, {began}. {found.says} {case.cost}", of=[rank], at=found.at
        )


@pytest.mark.needs("test_stops")
def test_place(grader: Grader) -> None:
    """a resumed training continues with the next sample: none twice, none left out"""
    ends = [("through", TOTAL), *((f"until {stop}", stop) for stop in stops(grader).values())]
    if any(two(grader).observed(name)[0]["saves"][-1:] != [end] for name, end in ends):
        raise CheckNotRun("needs a checkpoint that is missing above")
    for case in cases(grader):
        judge_place(grader, case)
    stop = next(iter(stops(grader).values()))
    goes_on, ignores = r"for epoch || while || " + TRAIN, r"(if|while|==) .*stop_after || " + TRAIN
    for name, done, how, id, at in (
        ("complete", TOTAL, "", "trains-on-after-the-end", goes_on),
        ("told again", stop, " with the same stop_after", "ignores-stop-after", ignores),
        ("told less", stop, " with stop_after=0", "ignores-stop-after", ignores),
        ("told more", TOTAL, " with a stop_after that is larger", "trains-on-after-the-end", goes_on),
    ):
        again = two(grader).observed(name)
        what = f"{done} steps were done. Called again{how}, the number of steps"
        grader.explain(what, [len(call["steps"]) for call in again], 0, otherwise=id, at=at)
        what, returns = f"{done} steps were done. What train returned when called again{how}", r"return || " + TRAIN
        grader.explain(
            what, [call["returned"] for call in again], "the model", otherwise="wrong-thing-returned", at=returns
        )
        ended = two(grader).observed("through" if done == TOTAL else f"until {stop}")
        for part, lacks in (("weights", "weights-not-restored"), ("buffers", "buffers-forgotten")):
            what = f"{done} steps were done. Of the {part} of the model that train returned when called again{how}, one"
            grader.explain(what, [again[0][part]], ended[0][part], otherwise=lacks, at=LOADING, tolerance=EXACT)


PARTS = {
    "weights": ("weights-not-restored", "the weights", r"model.*load_state_dict || "),
    "buffers": ("buffers-forgotten", "batch norm's running statistics", r"parameters\(\) || "),
    "moments": ("optimizer-forgotten", "the optimizer's moments", r"optim.*load_state_dict || "),
    "rate": ("scheduler-forgotten", "the learning rate", r"sched.*load_state_dict || "),
    "scale": ("scaler-forgotten", "the scale of the loss", r"scaler.*load_state_dict || "),
}


@pytest.mark.needs("test_place")
def test_state(grader: Grader) -> None:
    """weights, buffers, optimizer, scheduler and scaler are what they were"""
    for case in cases(grader):
        for rank, call in enumerate(case.calls):
            start = case.through[rank]["steps"][0]
            for key, (id, label, at) in PARTS.items():
                compared = (
                    len(call["steps"]) if key in ("rate", "scale") else 1
                )  # the others depend on the random numbers
                seen = [step[key] for step in call["steps"][:compared]]
                same = [step[key] for step in case.through[rank]["steps"][case.stop :][:compared]]
                if (wrong := difference(seen, same)) is None:
                    continue
                step = next(
                    n for n, (one, other) in enumerate(zip(seen, same, strict=True)) if not equal(one, other, EXACT)
                )
                first = " As in the very first step." if equal(seen[step], start[key], EXACT) else ""
                if key == "rate" and (known := read_rate(case, rank)):
                    id, at, first = known.id, known.at, f" {known.says}"
                began = f"step {case.stop + step + 1} did not start on rank {rank} where it had been"
                what = f"{case.interrupted}: {began}: {label} had {wrong.seen:g} instead of {wrong.right:g}.{first}"
                grader.fail(id, f"{what} {case.cost}", of=[rank], at=at + r"load_state_dict || " + LOADING)


@pytest.mark.needs("test_place")
def test_random_numbers(grader: Grader) -> None:
    """every generator of every rank continues where it was"""
    judge_loading(grader)
    for case in cases(grader):
        judge_random_numbers(grader, case)
    for case in cases(grader):
        judge_skipped(grader, case)
        judge_made(grader, case)


def judge_random_numbers(grader: Grader, case: Case) -> None:
    """The numbers of the first step after an interruption, on every rank."""
    for rank, call in enumerate(case.calls):
        got, right = call["steps"][0]["draws"], case.through[rank]["steps"][case.stop]["draws"]
        wrong = [at for at in range(len(GENERATORS)) if not equal(got[:, at], right[:, at], EXACT)]
        if not wrong:
            continue
        who = GENERATORS[wrong[0]]
        drew = f"rank {rank} drew {got[0, wrong[0]]:.6f} from {who}, where it had been {right[0, wrong[0]]:.6f}"
        left = Hypothesis(
            "random-state-forgotten", f"Not restored: {', '.join(GENERATORS[at] for at in wrong)}.", None, RANDOM
        )
        found = fitting([got[:2, wrong[0]]], sources(case, rank, wrong), EXACT) or left
        what = f"{case.interrupted}: in step {case.stop + 1} {drew}. {found.says} {case.cost}"
        grader.fail(found.id, what, of=[rank], at=found.at)


def judge_loading(grader: Grader) -> None:
    """A step's samples are fetched in this process, after the step before."""
    for rank, call in enumerate(two(grader).observed("through")):
        for number, step in enumerate(call["steps"], 1):
            if early := sorted(set(step["samples"]) - set(step["fetched"])):
                what = f"On rank {rank} the samples {early} of step {number} were not fetched between step {number - 1} and step {number}."
                grader.fail("fetches-ahead", what, of=[rank], at=r"DataLoader\( || dataset\[ || for .* in || " + TRAIN)


@pytest.mark.needs("test_state", "test_random_numbers")
def test_bits(grader: Grader) -> None:
    """on two ranks it ends bit for bit like an uninterrupted run"""
    for case in cases(grader):
        judge_bits(grader, case)


def judge_bits(grader: Grader, case: Case) -> None:
    """The end of a resumed training, on every rank."""
    for rank, (call, through) in enumerate(zip(case.calls, case.through, strict=True)):
        # After a step each rank has running statistics of its own; what counts, and is saved, are rank 0's.
        ended = ("weights", "buffers") if rank == 0 else ("weights",)
        evaluating = [n for n, step in enumerate(call["steps"], case.stop + 1) if not step["training"]]
        if evaluating or not all(equal(call[what], through[what], EXACT) for what in ended):
            mode = f" The model was in evaluation mode in step {evaluating[0]}." if evaluating else ""
            what = f"{case.interrupted}, and resumed.{mode} {case.cost}"
            grader.fail("resumed-run-differs", what, of=[rank], at=r"\.eval\(\) || " + LOADING)


@pytest.mark.needs("test_bits")
def test_three_ranks(grader: Grader) -> None:
    """on three ranks as well, where the order of a sum shows in its last bit, and with a different seed"""
    places = {where: stop for where, stop in stops(grader).items() if stop != 1}
    run = grader.run("resumes", ODD_WORLD, stops=list(places.values()), **given(grader, ODD_BATCH))
    through = run.observed("through")
    drawn = [one.observed("through")[0]["steps"][0]["draws"][0] for one in (run, two(grader))]
    for at, generator in enumerate(GENERATORS):
        if equal(drawn[0][at], drawn[1][at], EXACT):
            what = f"With two different seeds {generator} gave rank 0 the same first number, {drawn[0][at]:.6f}."
            grader.fail("ignores-seed", what, of=[0], at=r"seed\( || " + TRAIN)
    for where, stop in places.items():
        case = Case(where, stop, run.observed(f"after {stop}"), through)
        judge_place(grader, case)
        judge_random_numbers(grader, case)
        step, same = case.calls[0]["steps"][0], through[0]["steps"][stop]
        begun_alike = all(equal(step[what], same[what], EXACT) for what in ("draws", "weights", "moments", "loss"))
        if begun_alike and (apart := difference(step["gradients"], same["gradients"])):
            what = (
                f"{case.interrupted}: step {stop + 1} started with the same weights, samples and random numbers, every rank had "
                f"the same loss, and yet the averaged gradients differ by up to {apart.distance:.1e}. {case.cost}"
            )
            at = r"= *(DDP|DistributedDataParallel)\( || " + TRAIN
            grader.fail("buckets-in-another-order", what, of=range(ODD_WORLD), at=at)
        judge_bits(grader, case)


@pytest.mark.needs("test_bits")
def test_killed(grader: Grader) -> None:
    """killed by SIGKILL within a step, it loses the steps since the last checkpoint and nothing else"""
    every = 3
    die_at = grader.random("death").choice([6, 7, 9, 10])  # the last multiple of 3 is no end of an epoch
    chosen = given(grader, save_every=every)
    killed = grader.attempt("dies", WORLD, die_at=die_at, **chosen)
    if not any(one.outcome is Outcome.CRASHED and one.code == -signal.SIGKILL for one in killed.ranks):
        found = grader.diagnose(killed)
        grader.fail(found.id, found.message, evidence=found.proof, of=found.ranks, at=TRAIN)
    left = next((files for files in killed.observed("files") if files), {})
    after = grader.run("lives_on", WORLD, left=left, **chosen).observed("after")
    wanted, began = die_at // every * every, TOTAL - len(after[0]["steps"])
    lost = f"With save_every={every}, all ranks were killed in step {die_at + 1}. The resumed training continued after step {began}, not {wanted}."
    grader.fail_on(range(WORLD * (began < wanted)), "saves-too-seldom", lost, at=SAVING)
    case = Case("by SIGKILL", began, after, two(grader).observed("through"))
    judge_place(grader, case)
    judge_bits(grader, case)
