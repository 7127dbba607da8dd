"""What `elastic_training` has to do.

    train(folder, make, dataset, *, steps, batch_size, save_every, seed) -> int

The starts of one job are runs of their own: each has new processes, and finds in its folder what the one before has
left there. One of them is killed by SIGKILL, others are sent a signal at a drawn step. What they did is compared with a
job of the same submission that nobody has disturbed, and that one with the sums of the definition.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judging.resumed import Job, Lines, apart, read_loading, together

from lockstep.grading import (
    EXACT,
    Cause,
    Diagnosis,
    Grader,
    Hypothesis,
    Outcome,
    Run,
    Tolerance,
    equal,
    factor_of,
    wrong_ranks,
)

SAMPLES, BATCH = 71, 12  # an epoch has five steps; those left over, with one padded to them, are enough for a sixth
TOTAL, SAVE_EVERY = 11, 4
WORLD, OTHER_WORLD = 2, 3
LOOSE = Tolerance(1e-4, 1e-6)
OTHER_SUMS = Tolerance(1e-3, 1e-4)  # what another order of the sums explains

TRAIN = r"def train\("
LOADING = r"load_latest\( || " + TRAIN
RETURN = r"^    return \w+$ || return || " + TRAIN
ORDER = r"randperm || Sampler\( || set_epoch || " + TRAIN
HANDLER = r"signal\.signal\(|sigaction || SIGTERM || SIGUSR1 || " + TRAIN
LINES = Lines(
    order=ORDER,
    batch=r"batch_size || " + ORDER,
    loading=LOADING,
    saving=r"save_checkpoint\( || " + TRAIN,
    counting=r"(for|while) .*step || \bstep \+= || \bstep\b.*= || " + TRAIN,
    stopping=r"ReduceOp\.MAX || all_reduce || all_gather || stop || " + HANDLER,
    handler=HANDLER,
)


def given(grader: Grader, **other: int) -> dict[str, Any]:
    """What train is called with, drawn for every seed."""
    generator = grader.generator("data")
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    options = {
        "steps": TOTAL,
        "batch_size": BATCH,
        "save_every": SAVE_EVERY,
        "seed": grader.random("seed").randrange(9999),
    }
    return {"x": x, "y": y, "options": options | other}


def job(grader: Grader) -> Job:
    """What there is to know of the job."""
    return Job(grader, TOTAL, SAMPLES // BATCH, BATCH, LINES, SAMPLES)


def through(grader: Grader) -> Run:
    """The job that nobody disturbs."""
    return grader.run("start", WORLD, **given(grader))


def start(grader: Grader, world_size: int = WORLD, **more: Any) -> Run:
    """Another start of the job, however it ends."""
    return grader.attempt("start", world_size, **given(grader), **more)


def resumed(grader: Grader, left: dict[str, torch.Tensor], **more: Any) -> Run:
    """The next start."""
    return grader.require(start(grader, left=left, **more))


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    return read_loading(grader, run, LOADING)


# The training --------------------------------------------------------------------------------------------------------


def test_trains(grader: Grader) -> None:
    """without interruption, it takes `steps` steps on whole batches, and no sample twice in an epoch"""
    run = through(grader)
    job(grader).deals(run)
    what = f"All {TOTAL} steps were made. What train returned"
    grader.explain(what, run.observed("done"), TOTAL, otherwise="wrong-count-returned", at=RETURN)


@pytest.mark.needs("test_trains")
def test_gradient(grader: Grader) -> None:
    """each step takes the gradient of the mean over the whole batch"""
    run, data = through(grader), given(grader)
    steps = run.observed("steps")
    modes = [rank for rank, one in enumerate(steps) if not all(step["training"] for step in one)]
    grader.fail_on(modes, "trains-in-eval-mode", "`make` returned a model in training mode; {ranks} trained it in eval mode.",
                   at=r"\.eval\(|\.train\( || " + TRAIN)  # fmt: skip
    for number in range(3):
        began, mine = steps[0][number], together(run, number)
        shapes = [(256, 6), (256,), (3, 256), (3,)]
        cut = zip(began["weights"].split([1536, 256, 768, 3]), shapes, strict=True)
        a, b, c, d = (part.reshape(shape).requires_grad_() for part, shape in cut)
        loss = F.cross_entropy(F.relu(data["x"][mine] @ a.T + b) @ c.T + d, data["y"][mine])
        gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, [a, b, c, d])])
        got = [one[number + 1]["moments"] - 0.9 * began["moments"] for one in steps]
        bad = wrong_ranks(got, gradient, LOOSE)
        factor = factor_of(got[bad[0]], gradient, LOOSE) if bad else None
        long = f" It is {factor:.2f} times as long." if factor else ""
        what = f"In step {number + 1} the optimizer of {{ranks}} got a gradient that differs from that of the mean over the"
        what = f"{what} {BATCH} samples by up to {apart(got[bad[0]] if bad else gradient, gradient)}.{long}"
        at = r"DistributedDataParallel\(|DDP\( || backward || " + TRAIN
        grader.fail_on(bad, "wrong-gradient-of-the-batch", what, at=at)


# Killed --------------------------------------------------------------------------------------------------------------


def kill(grader: Grader, done: int, world_size: int = WORLD) -> dict[str, torch.Tensor]:
    """Kill one rank while that many steps have been done; returns what lies in the folder then."""
    victim = grader.random("victim").randrange(world_size)
    told = {"number": int(signal.SIGKILL), "ranks": [victim], "step": done, "place": "forward"}
    killed = start(grader, world_size, signals=told)
    one = killed.ranks[victim]
    if one.outcome is not Outcome.CRASHED or one.code != -signal.SIGKILL:
        grader.require(killed)
    return one.observations.get("files", {})


@pytest.mark.needs("test_trains")
def test_killed(grader: Grader) -> None:
    """a rank killed by SIGKILL costs the steps since the last checkpoint, and nothing else"""
    done = grader.random("kill").choice([5, 6, 7])
    left = kill(grader, done)
    after = f"A rank was killed in step {done + 1}."
    run = resumed(grader, left, restart=1)
    job(grader).goes_on(run, through(grader), SAVE_EVERY, after, left)
    job(grader).ends_alike(run, through(grader), SAVE_EVERY, after)
    what = f"{after} The next start made the steps from {SAVE_EVERY + 1} to {TOTAL}. What it returned"
    grader.explain(what, run.observed("done"), TOTAL, otherwise="wrong-count-returned", at=RETURN)


RESTARTS = {
    2: (1, 0, "before the first checkpoint. The restart (TORCHELASTIC_RESTART_COUNT=1, and no checkpoint)"),
    9: (
        0,
        8,
        "and the job was put back into SLURM's queue. The start (TORCHELASTIC_RESTART_COUNT=0, and a checkpoint)",
    ),
}


@pytest.mark.needs("test_killed")
def test_restart_count(grader: Grader) -> None:
    """what lies in the folder decides, and not how often torchrun has restarted"""
    for done, (restart, saved, how) in RESTARTS.items():
        run = start(grader, left=kill(grader, done), restart=restart)
        made = len(run.observed("steps")[0]) if run.cause is None else -1
        if made != TOTAL - saved:
            went = f"it made {made}" if made >= 0 else "it failed"
            what = f"A rank was killed in step {done + 1}, {how} should have made {TOTAL - saved} steps; {went}."
            evidence = grader.diagnose(run).message if run.cause is not None else ""
            at = r"RESTART_COUNT || " + LOADING
            grader.fail("restart-count-decides", what, evidence=evidence, of=range(WORLD), at=at)


ALL_AGAIN = Hypothesis("starts-over", "It did all of them again.", TOTAL)


@pytest.mark.needs("test_killed", "test_restart_count")
def test_complete(grader: Grader) -> None:
    """a job that is complete makes no further step"""
    run = resumed(grader, next(files for files in through(grader).observed("files") if files))
    what = f"All {TOTAL} steps were done. Started again,"
    made, at = [len(one) for one in run.observed("steps")], LINES.saving
    grader.explain(f"{what} the number of steps", made, 0, [ALL_AGAIN], otherwise="trains-on-after-the-end", at=at)
    grader.explain(f"{what} what it returned", run.observed("done"), TOTAL, otherwise="wrong-count-returned", at=RETURN)


# Asked to stop -------------------------------------------------------------------------------------------------------


PLACES = {
    "make": "while `make` built the model, before step {}",
    "forward": "in step {}, in the forward pass",
    "update": "in step {}, just after the update of the weights",
}


@pytest.mark.needs("test_killed", "test_restart_count")
def test_asked(grader: Grader) -> None:
    """asked to stop, by SIGUSR1 on one rank or SIGTERM on all, all stop after the same step, saved; the next start continues"""
    chance = grader.random("asked")
    done, left, after = 0, None, ""
    # Ranks that agree only in every third step, or a later one, are too late at one of these places. And no save is due
    # there: the other rank's would look as if it had been written in the handler. Where every step is saved, none is left
    # for a job that stops only without a save.
    for number, ranks, step, place, every in (
        (signal.SIGUSR1, [WORLD - 1], 0, chance.choice(["forward", "update"]), SAVE_EVERY),
        (signal.SIGTERM, [0, 1], 4, "forward", 1),
        (signal.SIGUSR1, [0], None, "make", SAVE_EVERY),
    ):
        early, step = step is None, done if step is None else step
        told = {"number": int(number), "ranks": ranks, "step": step - done, "place": place, "again": early}
        run = grader.attempt("start", WORLD, **given(grader, save_every=every), signals=told, left=left)
        if after and run.cause is None and (run.observed("steps")[0] or not early):  # first, where it went on
            job(grader).goes_on(run, through(grader), done, after, left, stopped=True)
            job(grader).ends_alike(run, through(grader), done, after)
        where = PLACES[place].format(step + 1) + (", with save_every=1" if every == 1 else "")
        done, after = job(grader).stops(run, number, ranks, step, where, first=not early)
        grader.explain(
            f"{after} What train returned", run.observed("done"), done, otherwise="wrong-count-returned", at=RETURN
        )
        left = run.observed("files")[0]
    last = resumed(grader, left or {}, earlier=True)
    job(grader).goes_on(last, through(grader), done, after, left, stopped=True)
    made = len(last.observed("steps")[0])
    early = f"Rank 0 was asked to stop in a first call of train. The second call, in the same processes, had {TOTAL - done} steps to make, and stopped after {made}."
    grader.fail_on(range(WORLD) if made < TOTAL - done else (), "stops-for-an-earlier-call", early, at=LINES.handler)
    job(grader).ends_alike(last, through(grader), done, after)
    wanted = [step for step in range(done + 1, TOTAL) if step % SAVE_EVERY == 0]
    saved = [done + step for step in last.observed("saves")[0] if done + step < TOTAL]  # the last: test_complete
    if saved != wanted:
        expected, made = (", ".join(map(str, steps)) or "none" for steps in (wanted, saved))
        what = f"{after} With save_every={SAVE_EVERY}, the next start should save after steps {expected}; it saved after {made}."
        fails = "saves-too-seldom" if set(wanted) - set(saved) else "saves-too-often"
        grader.fail(fails, what, of=[0], at=LINES.saving)


# Another number of ranks ---------------------------------------------------------------------------------------------


@pytest.mark.needs("test_killed", "test_gradient")
def test_other_world_size(grader: Grader) -> None:
    """restarted on three ranks instead of two, it continues with the same batches"""
    run, full = resumed(grader, kill(grader, 6), world_size=OTHER_WORLD, restart=1), through(grader)
    after, everyone = f"Killed on {WORLD} ranks in step 7, and started again on {OTHER_WORLD}.", range(OTHER_WORLD)
    other, left = "order-depends-on-world-size", TOTAL - SAVE_EVERY
    made = [len(one) for one in run.observed("steps")]
    grader.explain(f"{after} The number of steps", made, left, otherwise=other, at=ORDER)
    for number in range(left):
        got, wanted = together(run, number), together(full, SAVE_EVERY + number)
        step = f"{after} In step {SAVE_EVERY + number + 1} they trained on the samples"
        many = f"{step} {got}, {len(got)} together; batch_size is {BATCH}."
        grader.fail_on(everyone if len(got) != BATCH else (), "global-batch-wrong", many, at=LINES.batch)
        grader.fail_on(
            everyone if got != wanted else (), other, f"{step} {got}; on {WORLD} ranks it had {wanted}.", at=ORDER
        )
    weights, right = run.observed("weights"), full.observed("weights")[0]
    far = f"{after} At the end the weights of {{ranks}} are up to {apart(weights[0], right)} away: more than a different order of the sums explains."
    grader.fail_on(wrong_ranks(weights, right, OTHER_SUMS), "resumed-run-differs", far, at=LOADING)


@pytest.mark.needs("test_trains")
def test_refuses(grader: Grader) -> None:
    """a batch that cannot be divided evenly is refused, even by a job that is complete"""
    left = next(files for files in through(grader).observed("files") if files)
    run = grader.run("refuses", WORLD, **given(grader, batch_size=9), left=left)
    at = r"batch_size.*world || raise || " + TRAIN
    for folder, has in ("empty", "an empty folder"), ("run", f"a folder with all {TOTAL} steps"):
        what = f"batch_size=9 on {WORLD} ranks, {has}: what was raised"
        grader.explain(what, run.observed(folder), "ValueError", otherwise="uneven-batch-accepted", at=at)


@pytest.mark.needs("test_asked", "test_other_world_size")
def test_three_ranks(grader: Grader) -> None:
    """killed and restarted on three ranks, it ends with the same bits, where the order of a sum shows"""
    left = kill(grader, 6, OTHER_WORLD)
    run = resumed(grader, left, world_size=OTHER_WORLD, restart=1)
    full = grader.run("start", OTHER_WORLD, **given(grader))
    seen, right = run.observed("weights"), full.observed("weights")
    begun, same = ([one["steps"][0][what] for what in ("weights", "moments")] for one in (
        {"steps": run.observed("steps")[0]}, {"steps": full.observed("steps")[0][SAVE_EVERY:]}))  # fmt: skip
    after = f"Killed in step 7 on {OTHER_WORLD} ranks, and started again on {OTHER_WORLD}."
    drift = f"After the last step the weights are {apart(seen[0], right[0])} away."
    alike = f"{after} Step {SAVE_EVERY + 1} started with the same weights, moments and samples, and ended with others. {drift}"
    bad = range(OTHER_WORLD) if not equal(seen, right, EXACT) else ()
    if equal(begun, same, EXACT):
        grader.fail_on(bad, "buckets-in-another-order", alike, at=r"= *(DDP|DistributedDataParallel)\( || " + TRAIN)
    grader.fail_on(bad, "resumed-run-differs", f"{after} {drift}", at=LOADING)


@pytest.mark.needs("test_trains")
def test_seed(grader: Grader) -> None:
    """a different seed, a different order"""
    data = given(grader, seed=given(grader)["options"]["seed"] + 1, steps=1)
    run = grader.run("start", WORLD, **data | {"x": data["x"].double()})  # and a model of the same type
    first = together(run, 0)
    same = first == together(through(grader), 0)
    what = f"With two different seeds the first step had the same samples, {first}."
    grader.fail_on(range(WORLD * same), "ignores-seed", what, at=r"seed || " + ORDER)
