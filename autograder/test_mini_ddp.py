"""What `MiniDDP` has to do.

    MiniDDP(module, bucket_cap_mb=25), called like the module
    finish_gradient_synchronization(), no_sync(), state_dict(), load_state_dict(state)

The checks are in stages, in the order in which the chapter builds the class: each needs the stages before it, and none
after it. torch's own DDP runs beside it on the same batches: on two ranks every gradient and parameter must be the same to the
last bit. That it overlaps is read from the order of what happened: gradients ready, collectives launched, waits.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from judging.mini_ddp import (
    BUFFERS,
    CAP,
    FLAGS,
    FROZEN,
    LARGE,
    STEPS,
    WORLD,
    Step,
    Tensors,
    Trained,
    events,
    inputs,
    judge_launches,
    judge_three_ranks,
    judge_waits,
    name_of,
    sent,
    train,
)

from lockstep.grading import (
    EXACT,
    Cause,
    Diagnosis,
    Each,
    Grader,
    Hypothesis,
    Run,
    difference,
    ending,
    equal,
    evidence,
    fitting,
    say_mismatch,
    wrong_ranks,
)

LAYERS, PER_BUCKET = 13, 5  # the last bucket has three
LAYER = 32 * 32 * 8  # bytes

CLASS = r"class MiniDDP"
BROADCAST = r"broadcast\( || def __init__ || " + CLASS
REDUCE = r"all_reduce\( || " + CLASS
HOOK = r"def .*(hook|ready) || register_post_accumulate_grad_hook || register_hook || " + CLASS
FINISH = r"def finish_gradient_synchronization"
DIVIDE = r"/= || div || / || AVG || " + REDUCE
TYPE = r"dtype || torch\.(zeros|empty)\( || " + REDUCE
BUCKET = r"cap || bucket || " + CLASS
MISSING = r"grad is None || is not None || " + FINISH
NO_SYNC = r"def no_sync || " + HOOK

# What a learner writes in each stage, and the section that explains it.
COPY = pytest.mark.stage("copy rank 0's values, call the module, return its state", 'chapter 1, "What is copied when"')
AVERAGE = pytest.mark.stage("average after backward", 'chapter 1, "The mean"')
HOOKS = pytest.mark.stage("launch in a hook", 'chapter 1, "An all-reduce in each hook"')
HANDLES = pytest.mark.stage("wait after backward", 'chapter 1, "Launch in the hook, wait after backward"')
BUCKETS = pytest.mark.stage("fill buckets", 'chapter 1, "DDP\'s buckets"')
MISSING_GRADIENTS = pytest.mark.stage("launch incomplete buckets", 'chapter 1, "A branch that a rank doesn\'t use"')
ACCUMULATE = pytest.mark.stage("exchange nothing in no_sync", 'chapter 1, "no_sync: accumulate first, exchange once"')


def main_run(grader: Grader) -> Trained:
    """Every rank uses every trainable parameter."""
    return train(grader, "main", [[True, True]] * STEPS)


def idle_run(grader: Grader) -> Trained:
    """No rank ever uses the layer `never`."""
    return train(grader, "idle", [[True, True]] * 2, idle=True)


def unused_run(grader: Grader) -> Trained:
    """No rank ever uses `never`; the side branch is used by rank 0, by rank 1, by nobody, by both."""
    return train(grader, "unused", [[True, False], [False, True], [False, False], [True, True]], idle=True)


def overlap_run(grader: Grader) -> Run:
    """Equal layers of float64, of which PER_BUCKET fill a bucket exactly."""
    return grader.run("overlaps", WORLD, layers=LAYERS, per_bucket=PER_BUCKET)


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    known = (("that doesn't require gradient", "hooks-frozen", HOOK), ("None", "trips-over-none", MISSING))
    if found := grader.read_error(run, known):
        return found
    if cause.kind not in ("hang", "mismatch", "crashed"):
        return None
    sizes = [[call.nbytes for call in calls if call.kind == "all_reduce"] for calls in run.collectives]
    brought = "; ".join(f"rank {rank}: {len(own)}" for rank, own in enumerate(sizes))
    shortest = min(map(len, sizes))
    id, said, at = (
        ("order-differs", "The ranks' all-reduces differ in order or size:", HOOK)
        if len({tuple(own[:shortest]) for own in sizes}) > 1
        else ("bucket-never-launched", "One rank did not use the side branch in this step. All-reduces seen:", FINISH)
    )
    return grader.diagnosis(id, f"{said} {brought}.{ending(cause)}", evidence=evidence(run), of=cause.ranks, at=at)


# Values --------------------------------------------------------------------------------------------------------------


def gradients_of_mistakes(ranks: list[Step], rank: int, name: str, idle: bool, before: list[Step]) -> list[Hypothesis]:
    """What the usual mistakes give for one parameter; `rank` is the one it is asked for.

    With `idle` no rank used the trainable layer `never`. `before` are the ranks of the step before, if there was one.
    """
    right, own = ranks[rank]["theirs"][name], [one["alone"].get(name) for one in ranks]
    here, same = ranks[rank], ranks[0]["mine"].get(name)
    averaged = [
        other for other, mean in here["theirs"].items()
        if idle and None not in own and equal(here["mine"].get(other), mean, EXACT) and not equal(here["alone"].get(other), mean)
    ]  # fmt: skip
    partly = f"It is that rank's own gradient, although {averaged[0] if averaged else ''} is averaged. No rank used never.weight: its bucket was never complete."
    shares = [None if gradient is None else gradient / WORLD for gradient in own]
    having = [gradient for gradient in own if gradient is not None]
    alike = all(equal(one["mine"].get(name), same) for one in ranks)
    of_some = f"All ranks have the sum divided by {len(having)}, the number of ranks with a gradient for it; expected divided by {WORLD}."
    alone = [one for one, share in enumerate(shares) if alike and len(having) == WORLD and equal(same, share)]
    too_early = "share alone: the other ranks launched their all-reduce before their gradient was ready."
    old = before[rank]["mine"].get(name) if before else None
    kept = "A rank without a gradient for it contributed what its bucket held from the step before, not zeros."
    return [
        *[Hypothesis("wrong-mean", kept, lambda: right + old * own.count(None) / WORLD, MISSING)] * (old is not None),
        Hypothesis("missing-stays-missing", "Another rank used it, but here its grad is still None.", None, MISSING),
        *[Hypothesis("bucket-never-launched", partly, Each(own), FINISH)] * bool(averaged),
        *[Hypothesis("mean-of-some", of_some, lambda: torch.stack(having).mean(0))] * (alike and 0 < len(having) < WORLD),
        *[Hypothesis("wrong-mean", f"It is rank {one}'s {too_early}", same, HOOK) for one in alone],
        Hypothesis("not-averaged", "It is that rank's own gradient.", Each(own), FINISH),
        Hypothesis("never-divides", f"It is the sum over the ranks, {WORLD} times too large.", right * WORLD, REDUCE),
        Hypothesis("divides-twice", f"It is {WORLD} times too small.", right / WORLD, DIVIDE),
        Hypothesis("never-waits", "It is that rank's own share: the sum had not arrived.", Each(shares), FINISH),
        *[Hypothesis("wrong-mean", "All ranks have the same.", same)] * alike,
    ]  # fmt: skip


def judge_gradients(grader: Grader, trained: Trained, idle: bool = False) -> None:
    """Every gradient of every step against DDP's; fails with what it is instead."""
    met = trained.run.silent_mismatch
    if met:
        grader.fail("order-differs", f"In one all-reduce {say_mismatch(met)}.", of=met, at=HOOK)
    judge_waits(grader, trained.run, len(trained.sides), FINISH)
    for step, (before, ranks) in enumerate(pairwise([[], *trained.steps])):
        for name, right in ranks[0]["theirs"].items():
            seen = [one["mine"].get(name) for one in ranks]
            for rank in wrong_ranks(seen, Each([one["theirs"][name] for one in ranks]), EXACT)[:1]:
                why = fitting(seen, gradients_of_mistakes(ranks, rank, name, idle, before), of=[rank])
                why = why or Hypothesis("wrong-mean", "", None)
                away = difference(seen[rank], right, EXACT)
                far = "missing" if seen[rank] is None or away is None else f"up to {away.distance:.2g} away from DDP's"
                said = f"In step {step} {name}.grad on rank {rank} is {far}. {why.says}".rstrip()
                grader.fail(why.id, said, of=[rank], at=why.at or REDUCE)
        for rank, one in enumerate(ranks):
            for name in sorted(set(one["mine"]) - set(one["theirs"])):
                said = f"In step {step} no rank used {name}, and rank {rank} has a gradient for it; DDP has None."
                grader.fail("invents-gradients", said, of=[rank], at=MISSING)


def judge_parameters(grader: Grader, trained: Trained) -> None:
    """The parameters after all steps against DDP's."""
    what, right = f"After {len(trained.sides)} steps a parameter", Each(trained.run.observed("theirs"))
    grader.explain(what, trained.run.observed("mine"), right, otherwise="different-weights", at=FINISH, tolerance=EXACT)


def judge_type(grader: Grader) -> None:
    """The mean in a float64 model, of gradients for which float32 has no room."""
    right = torch.full((3,), 1 / 3, dtype=torch.float64)
    seen = grader.run("slopes", WORLD, slope=1 / 3, dtype="float64").observed("gradient")
    says = "That is the mean rounded to float32: it went through a tensor whose type is not the parameter's."
    rounded = Hypothesis("mean-in-another-type", says, right.float().double())
    what = "Both ranks had a float64 gradient of 1/3. The mean"
    grader.explain(what, seen, right, [rounded], otherwise="wrong-mean", at=TYPE, tolerance=EXACT)


# The checks ----------------------------------------------------------------------------------------------------------


@COPY
def test_construction(grader: Grader) -> None:
    """all ranks start with rank 0's parameters and buffers, and a call returns the module's output"""
    initial, tokens = inputs(grader, "wraps", 1)
    each = [{"initial": own, "tokens": tokens[0, rank]} for rank, own in enumerate(initial)]
    run = grader.run("wraps", WORLD, each=each, cap=CAP)
    copied = [rank for rank, itself in enumerate(run.observed("itself")) if not itself]
    said = "On {ranks} self.module is not the module that MiniDDP was given. An optimizer made before has other parameters."
    grader.fail_on(copied, "wraps-a-copy", said, at=r"deepcopy || self\.module = || " + CLASS)
    judge_values(grader, initial, run.observed("constructed"))
    bad = wrong_ranks(run.observed("output"), Each(run.observed("plain")))
    said = "On {ranks} MiniDDP's forward doesn't return what the module returns for the same arguments."
    grader.fail_on(bad, "not-the-output", said, at=r"def forward || " + CLASS)


def judge_values(grader: Grader, initial: list[Tensors], seen: list[Tensors]) -> None:
    """Every parameter and buffer after construction against rank 0's."""
    wrong = {name: wrong_ranks([one.get(name) for one in seen], right, EXACT) for name, right in initial[0].items()}
    wrong = {name: ranks for name, ranks in wrong.items() if ranks}
    if not wrong:
        return
    name, (rank, *_) = next(iter(wrong.items()))
    forgotten = [
        ("forgets-buffers", " state_dict does not name it.", {"unsaved"}),
        ("forgets-buffers", "", BUFFERS),
        ("forgets-frozen", "", FROZEN),
        ("no-broadcast" if rank else "wrong-source", "" if rank else " Rank 0's are what counts.", set(wrong)),
    ]
    id, says = next((id, says) for id, says, these in forgotten if set(wrong) <= these)
    instead = "still its own" if equal(seen[rank].get(name), initial[rank][name], EXACT) else "something else"
    if name == "count" and equal(seen[rank].get(name), torch.tensor(2**40), EXACT):
        id, instead, says = "copies-rounded", f"{2**40} instead of {2**40 + 1}", ""
    what = f"After MiniDDP(module) {name} on rank {rank} is not rank 0's; it is {instead}."
    grader.fail(id, what + says, of=[rank], at=BROADCAST)


@COPY
@pytest.mark.needs("test_construction")
def test_state_dict(grader: Grader) -> None:
    """state_dict and load_state_dict are those of the plain module"""
    run = grader.run("saves", WORLD)
    for rank in range(WORLD):
        plain, wrapped, error, loaded = (run.observed(what)[rank] for what in ("plain", "wrapped", "error", "loaded"))
        other = next((key for key in wrapped if key not in plain), "fewer of them")
        own = next((key for key in plain if key not in wrapped), plain[0])
        said = f"The plain module's state_dict has keys like {own!r}, MiniDDP's has {other!r}."
        at = r"def state_dict || " + CLASS
        grader.fail_on([rank] if plain != wrapped else [], "prefixed-state", said, at=at)
        said = "state_dict(keep_vars=True) returned tensors that don't require a gradient, as if it was not given."
        grader.fail_on([rank] * (not run.observed("attached")[rank]), "loses-arguments", said, at=at)
        instead = f"raised: {' '.join(error.split())[:160]}" if error else "changed nothing"
        said = f"load_state_dict with the plain module's keys {instead}"
        at = r"removeprefix || replace\( || def load_state_dict || " + CLASS
        grader.fail_on([rank] if error or not loaded else [], "cannot-load", said, at=at)
        strict = " ".join(run.observed("strict")[rank].split())[:160]
        copied = "" if run.observed("assigned")[rank] else "copied the tensor, as without assign=True."
        lost = f"raised: {strict}" if strict else copied
        said = f"load_state_dict(state, assign=True, strict=False) {lost}"
        grader.fail_on([rank] * bool(lost), "loses-arguments", said, at=r"def load_state_dict || " + CLASS)


@AVERAGE
@pytest.mark.needs("test_construction")
def test_matches_ddp(grader: Grader) -> None:
    """gradients and parameters equal those of torch's DDP, bit for bit"""
    trained = main_run(grader)
    judge_gradients(grader, trained)
    judge_parameters(grader, trained)
    judge_type(grader)
    judge_three_ranks(grader, DIVIDE)


@AVERAGE
@pytest.mark.needs("test_matches_ddp")
def test_divides_first(grader: Grader) -> None:
    """gradients are scaled before the sum, so that it does not overflow"""
    slope = 3e38
    what = f"Both ranks had a gradient of {slope:g}, and the largest float32 is 3.4e+38. The mean"
    run = grader.run("slopes", WORLD, slope=slope, dtype="float32")
    seen, right = run.observed("gradient"), torch.full((3,), slope)
    summed = Hypothesis("divides-after-the-sum", "", torch.full((3,), torch.inf))
    grader.explain(what, seen, right, [summed], otherwise="wrong-mean", at=DIVIDE)


@HOOKS
@pytest.mark.needs("test_matches_ddp")
def test_overlap(grader: Grader) -> None:
    """the first all-reduce is launched while backward still computes"""
    run = overlap_run(grader)
    for rank in range(WORLD):
        seen = events(run, rank)
        marks, reductions = [name_of(event) for event in seen], sent(seen)
        ready = [index for index, mark in enumerate(marks) if mark.startswith("ready")]
        first, done = seen.index(reductions[0]), marks.index("backward done")
        full = f"Rank {rank} launched its first all-reduce when all {LAYERS} gradients were ready: "
        mistakes = [
            (first > done, "launches-after-backward", f"Rank {rank} launched its first all-reduce when backward had returned: all "
             f"{len(ready)} gradients were ready by then.", FINISH),
            (first > ready[-1] and len(reductions) == LAYERS, "launches-after-backward", f"{full}a parameter's hook waits for "
             "those of all others.", HOOK),
            (first > ready[-1] and len(reductions) == 1, "one-bucket", full + "everything is in one bucket.", BUCKET),
            (first > ready[-1], "forward-order", full + "the first bucket to be launched is the last to be complete.",
             r"parameters\( || " + BUCKET),
            (sum(one.nbytes for one in reductions) >= 2 * LAYERS * LAYER, "sends-twice", f"Rank {rank} made {len(reductions)} "
             f"all-reduces of {sum(one.nbytes for one in reductions)} bytes in all. The gradients have {LAYERS * LAYER}.", REDUCE),
        ]  # fmt: skip
        for is_so, id, said, at in mistakes:
            grader.fail_on([rank] if is_so else [], id, said, at=at)
    for step, when in (
        (0, "In a backward"),
        (2, "In a backward in eval()"),
        (1, "In a backward that completed the first bucket last,"),
    ):
        judge_launches(grader, run, step, when, "launches-after-backward", HOOK)


@HANDLES
@pytest.mark.needs("test_overlap")
def test_no_wait_in_hook(grader: Grader) -> None:
    """backward doesn't wait for an all-reduce"""
    run = overlap_run(grader)
    for rank in range(WORLD):
        marks = [name_of(event) for event in events(run, rank)]
        inside = marks[: marks.index("backward done")]
        ready = sum(mark.startswith("ready") for mark in inside[: inside.index("wait")]) if "wait" in inside else 0
        said = (
            f"Rank {rank} waited for an all-reduce {inside.count('wait')} times before backward had returned, first when "
            f"{ready} of {LAYERS} gradients were ready. Backward had to wait that long."
        )
        grader.fail_on([rank] * ("wait" in inside), "waits-in-hook", said, at=r"wait\( || " + HOOK)


@BUCKETS
@pytest.mark.needs("test_no_wait_in_hook")
def test_buckets(grader: Grader) -> None:
    """as many all-reduces as there are buckets of bucket_cap_mb"""
    run, wanted, cap = overlap_run(grader), -(-LAYERS // PER_BUCKET), PER_BUCKET * LAYER
    for rank in range(WORLD):
        sizes = [one.nbytes for one in sent(events(run, rank))]
        least = min(sizes[:-1], default=cap)
        what = (
            f"For {LAYERS} parameters of {LAYER} bytes and bucket_cap_mb={cap / 2**20:g} (so {PER_BUCKET} fill a bucket) rank "
            f"{rank} made {len(sizes)} all-reduces of {sum(sizes)} bytes in all; expected {wanted}."
        )
        mistakes = [
            (len(sizes) == LAYERS, "no-buckets", "", REDUCE),
            (sizes[0] == 2 * cap, "wrong-bucket-size", f" The first has {sizes[0]} bytes, twice the cap: an element of float64 has 8 "
             "bytes, and 4 were counted.", BUCKET),
            (len(sizes) != wanted, "wrong-bucket-size", f" The first has {sizes[0]} bytes.", BUCKET),
            (max(sizes) >= cap + LAYER, "wrong-bucket-size", f" The largest has {max(sizes)} bytes, above the {cap} of the cap.", BUCKET),
            (sizes[-1] > sizes[0], "forward-order", f" The first has {sizes[0]} bytes and the last {sizes[-1]}: the rest that "
             "fills no bucket is of the last parameters, not of the first.", r"parameters\( || " + BUCKET),
            (least < cap, "wrong-bucket-size", f" But one before the last has {least} bytes: another parameter fits.", BUCKET),
        ]  # fmt: skip
        for is_so, id, says, at in mistakes:
            grader.fail_on([rank] * is_so, id, what + says, at=at)
    for rank in range(WORLD):  # a model with parameters that are larger than the cap
        most = max(one.nbytes for one in sent(events(main_run(grader).run, rank)))
        said = f"A parameter of {LARGE} bytes is above the bucket_cap_mb of {CAP}, and rank {rank} sent it with others: {most} bytes."
        grader.fail_on([rank] * (most > LARGE + FLAGS), "wrong-bucket-size", said, at=BUCKET)


@MISSING_GRADIENTS
@pytest.mark.needs("test_buckets")
def test_unused(grader: Grader) -> None:
    """a branch that is used on some ranks, or on none, is handled as DDP does"""
    for trained in (idle_run(grader), unused_run(grader)):
        judge_gradients(grader, trained, idle=True)
        judge_parameters(grader, trained)
    seen = grader.run("pairs", WORLD, each=[{"slopes": [0.0]}, {"slopes": [None]}]).observed("gradient")
    what = "Rank 0 had a gradient of exactly zero for a parameter, and rank 1 had none. The mean"
    mistakes = [Hypothesis("missing-stays-missing", "A mean of zero is not a gradient of None.", None)]
    grader.explain(what, seen, torch.zeros(3), mistakes, otherwise="wrong-mean", at=MISSING)


@ACCUMULATE
@pytest.mark.needs("test_buckets")
def test_no_sync(grader: Grader) -> None:
    """no_sync() exchanges nothing, and the next backward exchanges the sums"""
    trained = train(grader, "no_sync", [[True, True]] * 2, micro=3)
    for rank in range(WORLD):
        each = [sent(events(trained.run, rank, "backward in no_sync done", n), 0) for n in range(4)]
        inside = [one for seen in each for one in seen]
        said = f"In backwards within no_sync() rank {rank} launched {len(inside)} all-reduces of {sum(one.nbytes for one in inside)} bytes."
        if not any(each[::2]):
            said += " Their forward had run before no_sync(), which doesn't matter: backward was inside."
        grader.fail_on([rank] if inside else [], "ignores-no-sync", said, at=NO_SYNC)
    seen = trained.steps[0]
    grader.explain(
        "After two micro-batches in no_sync() and one outside, a gradient", [one["mine"] for one in seen],
        Each([one["theirs"] for one in seen]),
        [Hypothesis("loses-accumulated", "All ranks still have their own.", Each([one["alone"] for one in seen]))],
        otherwise="loses-accumulated", at=NO_SYNC, tolerance=EXACT,
    )  # fmt: skip
    for raises, when in ((False, "one no_sync()"), (True, "an exception in no_sync()")):
        run = grader.run("overlaps", WORLD, layers=LAYERS, per_bucket=PER_BUCKET, quiet=1, raises=raises)
        id = "never-syncs-again" if raises else "launches-after-backward"
        judge_launches(grader, run, 0, f"In the backward after {when}", id, NO_SYNC)
    each = [{"slopes": [3.0, 1.0]}, {"slopes": [6.0, None]}]
    seen = grader.run("pairs", WORLD, each=each).observed("gradient")
    what = "Rank 0 had gradients of 3 in no_sync() and 1 outside, rank 1 had 6 in no_sync() and none outside. The mean"
    lost = Hypothesis(
        "loses-accumulated", "Rank 1 brought zeros: what it had from no_sync() was left out.", torch.full((3,), 2.0)
    )
    grader.explain(what, seen, torch.full((3,), 5.0), [lost], otherwise="loses-accumulated", at=MISSING)
    judge_three_ranks(grader, r"def forward || " + HOOK, second=True)
