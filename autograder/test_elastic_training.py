"""What `elastic_training` has to do.

    train(folder, make, dataset, *, steps, batch_size, save_every, seed) -> int

The starts of one job are runs of their own: each has new processes, and finds in its folder what the one before has
left there. One of them is killed by SIGKILL, another is sent a signal at a drawn step on a drawn rank. What they did is
compared with a job of the same submission that nobody has disturbed, and that one with the sums of the definition.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from resumed import apart, read_loading

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Outcome, Run

SAMPLES, BATCH = 40, 12
STEPS_AN_EPOCH = SAMPLES // BATCH
TOTAL, SAVE_EVERY = 11, 4
WORLD, OTHER_WORLD = 2, 3

TRAIN = r"def train\("
LOADING = r"load_latest\( || " + TRAIN
SAVING = r"save_checkpoint\( || " + TRAIN
HANDLER = r"signal\.signal\(|sigaction || SIGTERM || SIGUSR1 || " + TRAIN
RETURN = r"^    return \w+$ || return || " + TRAIN
ORDER = r"randperm || Sampler\( || set_epoch || " + TRAIN
STOPPING = r"ReduceOp\.MAX || all_reduce || all_gather || stop || " + HANDLER


def data(grader: Grader) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and classes, drawn anew for every seed."""
    generator = torch.Generator().manual_seed(grader.random("data").randrange(1 << 30))
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)


def options(grader: Grader) -> dict[str, int]:
    """What train is called with."""
    seed = grader.random("seed").randrange(9999)
    return {"steps": TOTAL, "batch_size": BATCH, "save_every": SAVE_EVERY, "seed": seed}


def through(grader: Grader, world_size: int = WORLD) -> Run:
    """The job that nobody disturbs."""
    x, y = data(grader)
    return grader.run("start", world_size, x=x, y=y, options=options(grader))


def start(grader: Grader, world_size: int = WORLD, **more: Any) -> Run:
    """Another start of the job, however it ends."""
    x, y = data(grader)
    return grader.attempt("start", world_size, x=x, y=y, options=options(grader), **more)


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    return read_loading(grader, run, LOADING)


def equal(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return a is not None and b is not None and torch.equal(a, b)


def together(run: Run, step: int) -> list[int]:
    """The samples of a step, counted from this start's first, of all ranks."""
    return sorted(sample for one in run.observed("steps") if step < len(one) for sample in one[step]["samples"])


# The training --------------------------------------------------------------------------------------------------------


def test_trains(grader: Grader) -> None:
    """undisturbed, it trains: so many steps, each on the whole batch, and no sample twice in an epoch"""
    run = through(grader)
    for rank, (steps, returned) in enumerate(zip(run.observed("steps"), run.observed("done"), strict=True)):
        if len(steps) != TOTAL:
            grader.fail(
                "wrong-number-of-steps-trained",
                f"With steps={TOTAL} rank {rank} made {len(steps)} steps.",
                of=[rank],
                at=r"(for|while) .*step || " + TRAIN,
            )
        if returned != TOTAL:
            grader.fail(
                "wrong-count-returned",
                f"Rank {rank} made {TOTAL} steps, and train returned {returned}.",
                of=[rank],
                at=RETURN,
            )
    judge_batches(grader, run, WORLD)


def judge_batches(grader: Grader, run: Run, world: int) -> None:
    """What the steps of an undisturbed job were made of."""
    steps = run.observed("steps")
    for number in range(TOTAL):
        shares = [one[number]["samples"] for one in steps]
        for rank in range(1, world):
            if shares[rank] == shares[0]:
                grader.fail(
                    "same-shard",
                    f"In step {number + 1} rank {rank} trained on the samples {shares[0]}, and so did rank 0.",
                    of=[0, rank],
                    at=ORDER,
                )
        count = sum(map(len, shares))
        if count != BATCH:
            each = ", ".join(str(len(share)) for share in shares)
            grader.fail(
                "global-batch-wrong",
                f"In step {number + 1} the {world} ranks trained on {each} samples, {count} together: "
                f"batch_size={BATCH} is what all of them have together.",
                of=range(world),
                at=r"batch_size || " + ORDER,
            )
    for epoch in range(TOTAL // STEPS_AN_EPOCH):
        inside = range(epoch * STEPS_AN_EPOCH, (epoch + 1) * STEPS_AN_EPOCH)
        all_seen = [sample for number in inside for sample in together(run, number)]
        often = sorted({sample for sample in all_seen if all_seen.count(sample) > 1})
        if often:
            grader.fail(
                "loses-its-place",
                f"Without any interruption, the samples {often} came more than once in epoch {epoch} "
                f"(steps {inside[0] + 1} to {inside[-1] + 1}).",
                of=range(world),
                at=ORDER,
            )
    if together(run, 0) == together(run, STEPS_AN_EPOCH):
        grader.fail(
            "missing-set-epoch",
            f"The first step of epoch 1 had the samples of the first of epoch 0: {together(run, 0)}.",
            of=range(world),
            at=ORDER,
        )


@pytest.mark.needs("test_trains")
def test_gradient(grader: Grader) -> None:
    """each step takes the gradient of the mean over the whole batch"""
    run = through(grader)
    x, y = data(grader)
    steps = run.observed("steps")
    shapes = [(256, 6), (256,), (3, 256), (3,)]
    for number in range(min(3, TOTAL - 1)):
        began = steps[0][number]["weights"]
        a, b, c, d = (part.reshape(shape) for part, shape in zip(began.split([1536, 256, 768, 3]), shapes, strict=True))
        parts = [part.clone().requires_grad_() for part in (a, b, c, d)]
        mine = together(run, number)
        F.cross_entropy(F.relu(x[mine] @ parts[0].T + parts[1]) @ parts[2].T + parts[3], y[mine]).backward()
        gradient = torch.cat([part.grad.reshape(-1) for part in parts if part.grad is not None])
        wanted = steps[0][number]["moments"] * 0.9 + gradient
        for rank, one in enumerate(steps):
            got = one[number + 1]["moments"]
            if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-6):
                part = (got - steps[0][number]["moments"] * 0.9) @ gradient / (gradient @ gradient)
                grader.fail(
                    "wrong-gradient-of-the-batch",
                    f"In step {number + 1} rank {rank}'s optimizer was given another gradient than that of the mean over "
                    f"the {BATCH} samples: up to {apart(got, wanted)} away, and {part.item():.2f} times as long in its "
                    "direction.",
                    of=[rank],
                    at=r"DistributedDataParallel\(|DDP\( || backward || " + TRAIN,
                )


# Killed --------------------------------------------------------------------------------------------------------------


def kill(grader: Grader, name: str, done: int, world_size: int = WORLD) -> dict[str, torch.Tensor]:
    """Kill one rank while so many steps have been done; returns what lies in the folder then."""
    victim = grader.random(name).randrange(world_size)
    killed = start(
        grader, world_size, signals={"number": int(signal.SIGKILL), "rank": victim, "step": done, "before": True}
    )
    one = killed.ranks[victim]
    if one.outcome is not Outcome.CRASHED or one.code != -signal.SIGKILL:
        grader.require(killed)
    return one.observations.get("files", {})


def resumed(grader: Grader, left: dict[str, torch.Tensor], **more: Any) -> Run:
    """The next start."""
    return grader.require(start(grader, left=left, **more))


def judge_start(grader: Grader, run: Run, wanted: int, after: str, left: Any, stopped: bool = False) -> None:
    """Behind which step it went on. `after` is what has ended the start before, `left` the files that it has left."""
    full = through(grader)
    every = [together(full, number) for number in range(TOTAL)]
    steps = run.observed("steps")
    if not steps[0]:
        if wanted < TOTAL:
            grader.fail("loses-its-place", f"{after} The next start made no step.", of=range(WORLD), at=LOADING)
        return
    first = together(run, 0)
    began = next((number for number, samples in enumerate(every) if samples == first), None)
    weights = steps[0][0]["weights"]
    of_step = next((n for n in range(TOTAL) if equal(weights, full.observed("steps")[0][n]["weights"])), None)
    told = f"{after} The next start should have gone on behind step {wanted}."
    if began == wanted and len(steps[0]) <= TOTAL - wanted:
        return
    if began == wanted:
        grader.fail(
            "trains-on-after-the-end",
            f"{after} The next start went on where it should, and then made {len(steps[0])} steps: only {TOTAL - wanted} of "
            f"{TOTAL} were left.",
            of=range(WORLD),
            at=r"(for|while) .*step || " + TRAIN,
        )
    if began == 0 and (of_step == 0 or of_step is None) and left:
        grader.fail("starts-over", f"{told} It began with step 1.", of=range(WORLD), at=LOADING)
    if began is not None and began < wanted and of_step == began:
        if stopped:
            grader.fail(
                "stops-without-saving",
                f"{told} It went on behind step {began}: the steps after it had been done, and were lost.",
                of=range(WORLD),
                at=STOPPING,
            )
        grader.fail(
            "saves-too-seldom",
            f"{told} With save_every={SAVE_EVERY}, it went on behind step {began}, and did {wanted - began} more again.",
            of=range(WORLD),
            at=SAVING,
        )
    if began in (wanted - 1, wanted + 1):
        what = (
            f"trained on the samples of step {wanted} again"
            if began == wanted - 1
            else f"left out the samples of step {wanted + 1}"
        )
        state = f" Its weights were those after step {of_step}." if of_step is not None else ""
        grader.fail(
            "off-by-one-step",
            f"{told} It {what}.{state}",
            of=range(WORLD),
            at=r"\bstep \+= || \bstep\b.*= || " + ORDER,
        )
    known = f"those of step {began + 1}" if began is not None else "those of no step of the undisturbed job"
    grader.fail(
        "loses-its-place",
        f"{told} The samples of its first step were {first}, {known}; it made {len(steps[0])} steps.",
        of=range(WORLD),
        at=ORDER,
    )


def judge_end(grader: Grader, run: Run, began: int, after: str) -> None:
    """State at the first step, samples, and the bits at the end."""
    full = through(grader).observed("steps")
    steps = run.observed("steps")
    drift = f"At the end its weights are up to {apart(run.observed('weights')[0], through(grader).observed('weights')[0])} away."
    for rank, one in enumerate(steps):
        if not one:
            continue
        for what, id, label, at in (
            ("weights", "weights-not-restored", "the weights", r"load_state_dict || "),
            (
                "moments",
                "optimizer-forgotten",
                "the optimizer's momentum",
                r"optim.*load_state_dict || load_state_dict || ",
            ),
        ):
            if not equal(one[0][what], full[rank][began][what]):
                zero = " It was zero again." if what == "moments" and not one[0][what].any() else ""
                grader.fail(
                    id,
                    f"{after} In step {began + 1} rank {rank} did not begin where it had been: {label} was up to "
                    f"{apart(one[0][what], full[rank][began][what])} away.{zero} {drift}".replace(
                        "weights was", "weights were"
                    ),
                    of=[rank],
                    at=at + LOADING,
                )
    for number in range(len(steps[0])):
        if together(run, number) != together(through(grader), began + number):
            grader.fail(
                "loses-its-place",
                f"{after} In step {began + number + 1} the samples were {together(run, number)}; undisturbed, they were "
                f"{together(through(grader), began + number)}. {drift}",
                of=range(WORLD),
                at=ORDER,
            )
    if len(steps[0]) < TOTAL - began:
        return
    for rank, weights in enumerate(run.observed("weights")):
        if not equal(weights, through(grader).observed("weights")[rank]):
            grader.fail("resumed-run-differs", f"{after} {drift}", of=[rank], at=LOADING)


@pytest.mark.needs("test_trains")
def test_killed(grader: Grader) -> None:
    """a rank killed by SIGKILL costs the steps since the last checkpoint, and nothing else"""
    done = grader.random("kill").choice([5, 6, 7])
    saved = done // SAVE_EVERY * SAVE_EVERY
    left = kill(grader, "victim", done)
    after = f"A rank was killed in step {done + 1}."
    run = resumed(grader, left, restart=1)
    judge_start(grader, run, saved, after, left)
    judge_end(grader, run, saved, after)
    for rank, returned in enumerate(run.observed("done")):
        if returned != TOTAL:
            grader.fail(
                "wrong-count-returned",
                f"{after} The next start made the steps from {saved + 1} to {TOTAL}, and rank {rank} returned {returned}.",
                of=[rank],
                at=RETURN,
            )


@pytest.mark.needs("test_killed")
def test_restart_count(grader: Grader) -> None:
    """what lies in the folder decides, and not how often torchrun has restarted"""
    left = kill(grader, "victim", 2)
    run = start(grader, left=left, restart=1)
    if run.cause is not None or len(run.observed("steps")[0]) != TOTAL:
        how = "failed" if run.cause is not None else f"made {len(run.observed('steps')[0])} steps"
        grader.fail(
            "restart-count-decides",
            f"A rank was killed in step 3, before the first checkpoint. The restart (TORCHELASTIC_RESTART_COUNT=1, and no "
            f"checkpoint) should have made all {TOTAL} steps; it {how}.",
            evidence=grader.diagnose(run).message if run.cause is not None else "",
            of=range(WORLD),
            at=r"RESTART_COUNT || " + LOADING,
        )
    saved = 2 * SAVE_EVERY
    left = kill(grader, "victim", saved + 1)
    run = resumed(grader, left, restart=0)
    if len(run.observed("steps")[0]) != TOTAL - saved:
        grader.fail(
            "restart-count-decides",
            f"The folder held the checkpoint of step {saved}, and TORCHELASTIC_RESTART_COUNT was 0, as in a job that SLURM "
            f"has put back into its queue. {TOTAL - saved} steps were left; it made {len(run.observed('steps')[0])}.",
            of=range(WORLD),
            at=r"RESTART_COUNT || " + LOADING,
        )


@pytest.mark.needs("test_killed", "test_restart_count")
def test_complete(grader: Grader) -> None:
    """a job that is complete makes no further step"""
    left = next(files for files in through(grader).observed("files") if files)
    run = resumed(grader, left)
    for rank, (steps, returned) in enumerate(zip(run.observed("steps"), run.observed("done"), strict=True)):
        if steps:
            id = "starts-over" if len(steps) == TOTAL else "trains-on-after-the-end"
            grader.fail(
                id,
                f"All {TOTAL} steps were done. Started again, rank {rank} made {len(steps)} steps.",
                of=[rank],
                at=SAVING,
            )
        if returned != TOTAL:
            grader.fail(
                "wrong-count-returned",
                f"All {TOTAL} steps were done. Started again, it returned {returned} on rank {rank}.",
                of=[rank],
                at=RETURN,
            )


# Asked to stop -------------------------------------------------------------------------------------------------------


def ask(
    grader: Grader,
    number: signal.Signals,
    rank: int,
    step: int,
    already: int,
    before: bool,
    after: str = "",
    **more: Any,
) -> Run:
    """Send a signal to one rank in the step after `step`; judge how the job stopped. Returns the run.

    Where it is not the first start, `after` says what has ended the one before.
    """
    told = {"number": int(number), "rank": rank, "step": step - already, "before": before}
    run = start(grader, signals=told, **more)
    place = "in its forward pass" if before else "just after the update of its weights"
    what = f"Rank {rank} got {number.name} in step {step + 1}, {place}."
    one = run.ranks[rank]
    marks = [mark.name for mark in one.marks]
    if one.outcome is Outcome.CRASHED and one.code == -number:
        grader.fail("dies-of-the-signal", f"{what} It died of it: no handler had been set.", of=[rank], at=HANDLER)
    if "signal" in marks and "signal over" not in marks and run.cause is not None:
        if one.outcome in (Outcome.EXITED, Outcome.RAISED):
            error = f" ({one.error.type})" if one.error is not None else ""
            grader.fail(
                "exits-on-the-signal",
                f"{what} It left at once{error}, in the middle of the step, and the others waited for it.",
                of=[rank],
                at=r"sys\.exit|os\._exit|SystemExit || raise || " + HANDLER,
            )
        grader.fail(
            "works-in-the-handler",
            f"{what} Its handler called a collective and never came back: the other ranks were not in theirs.",
            evidence=run.cause.headline,
            of=[rank],
            at=HANDLER,
        )
    wrote = one.observations.get("wrote in the handler")
    if wrote:
        grader.fail(
            "works-in-the-handler",
            f"{what} Its handler wrote {', '.join(wrote)} at once, in the middle of the step.",
            of=[rank],
            at=HANDLER,
        )
    if run.cause is not None and run.cause.kind in ("hang", "mismatch"):
        grader.fail(
            "stops-alone",
            f"{what} The ranks did not all stop behind the same step: {run.cause.headline}",
            of=run.cause.ranks,
            at=STOPPING,
        )
    if one.outcome is Outcome.EXITED:
        grader.fail(
            "exits-on-the-signal",
            f"{what} It left by sys.exit, with status {one.code}; train should return.",
            of=[rank],
            at=r"sys\.exit|os\._exit|SystemExit || " + HANDLER,
        )
    if one.outcome is Outcome.RAISED and one.error is not None and run.cause is not None:
        grader.fail(
            "exits-on-the-signal",
            f"{what} It raised {one.error}; train should return, for being asked to stop is no failure.",
            of=[rank],
            at=one.error.frames[-1] if one.error.frames else STOPPING,
        )
    grader.require(run)
    if after:
        judge_start(grader, run, already, after, more["left"], stopped=True)
        judge_end(grader, run, already, after)
    counts = [already + len(steps) for steps in run.observed("steps")]
    if len(set(counts)) > 1:
        each = ", ".join(f"rank {r} after step {count}" for r, count in enumerate(counts))
        grader.fail("stops-alone", f"{what} They stopped at different steps: {each}.", of=[rank], at=STOPPING)
    if counts[0] not in (step + 1, step + 2):
        if counts[0] == TOTAL:
            grader.fail(
                "ignores-the-signal", f"{what} The job went on to the end, step {TOTAL}.", of=[rank], at=STOPPING
            )
        grader.fail(
            "stops-late",
            f"{what} The job stopped behind step {counts[0]}: it should have been {step + 1}, or {step + 2} at the latest.",
            of=[rank],
            at=STOPPING,
        )
    for r, returned in enumerate(run.observed("done")):
        if returned != counts[0]:
            grader.fail(
                "wrong-count-returned",
                f"{what} The job stopped behind step {counts[0]}, and rank {r} returned {returned}.",
                of=[r],
                at=RETURN,
            )
    return run


@pytest.mark.needs("test_killed", "test_restart_count")
def test_asked(grader: Grader) -> None:
    """asked to stop by SIGUSR1 or SIGTERM on one rank, all stop behind the same step, saved; the next start goes on there"""
    chance = grader.random("asked")
    rank = chance.randrange(WORLD)
    first = ask(grader, signal.SIGUSR1, rank, 1, 0, chance.random() < 0.5)
    stopped = first.observed("done")[0]
    left = first.observed("files")[0]
    after = f"Asked by SIGUSR1, the job stopped behind step {stopped}."
    # The next start shows where it goes on before it is asked in turn, on the other rank.
    second = ask(grader, signal.SIGTERM, 1 - rank, 5, stopped, chance.random() < 0.5, after, left=left)
    stopped = second.observed("done")[0]
    after = f"Asked by SIGTERM, the job stopped behind step {stopped}."
    left = second.observed("files")[0]
    last = resumed(grader, left)
    judge_start(grader, last, stopped, after, left, stopped=True)
    judge_end(grader, last, stopped, after)


# Another number of ranks ---------------------------------------------------------------------------------------------


@pytest.mark.needs("test_killed", "test_gradient")
def test_other_world_size(grader: Grader) -> None:
    """restarted on three ranks instead of two, it goes on with the same batches"""
    left = kill(grader, "victim", 6)
    run = resumed(grader, left, world_size=OTHER_WORLD, restart=1)
    full = through(grader)
    after = f"Killed on {WORLD} ranks in step 7, and started again on {OTHER_WORLD}."
    steps = run.observed("steps")
    if len(steps[0]) != TOTAL - SAVE_EVERY:
        grader.fail(
            "order-depends-on-world-size",
            f"{after} {TOTAL - SAVE_EVERY} steps were left; it made {len(steps[0])}.",
            of=range(OTHER_WORLD),
            at=ORDER,
        )
    for number in range(len(steps[0])):
        got, wanted = together(run, number), together(full, SAVE_EVERY + number)
        if len(got) != BATCH:
            grader.fail(
                "global-batch-wrong",
                f"{after} In step {SAVE_EVERY + number + 1} they trained on {len(got)} samples together; batch_size is {BATCH}.",
                of=range(OTHER_WORLD),
                at=r"batch_size || " + ORDER,
            )
        if got != wanted:
            grader.fail(
                "order-depends-on-world-size",
                f"{after} In step {SAVE_EVERY + number + 1} their samples were {got}; on {WORLD} ranks the same step had "
                f"{wanted}.",
                of=range(OTHER_WORLD),
                at=ORDER,
            )
    for rank, weights in enumerate(run.observed("weights")):
        if not torch.allclose(weights, full.observed("weights")[0], rtol=1e-3, atol=1e-4):
            grader.fail(
                "resumed-run-differs",
                f"{after} At the end rank {rank}'s weights are up to {apart(weights, full.observed('weights')[0])} away: "
                "more than another order of the sums explains.",
                of=[rank],
                at=LOADING,
            )


@pytest.mark.needs("test_trains")
def test_refuses(grader: Grader) -> None:
    """a batch that cannot be dealt out evenly is refused"""
    x, y = data(grader)
    run = grader.run("refuses", WORLD, x=x, y=y, options={**options(grader), "batch_size": 9})
    for rank, said in enumerate(run.observed("refused")):
        if said != "ValueError":
            grader.fail(
                "uneven-batch-accepted",
                f"batch_size=9 on {WORLD} ranks: rank {rank} should have raised ValueError; instead, {said}.",
                of=[rank],
                at=r"batch_size.*world || raise || " + TRAIN,
            )


@pytest.mark.needs("test_asked", "test_other_world_size")
def test_three_ranks(grader: Grader) -> None:
    """killed and restarted on three ranks, it ends with the same bits, where the order of a sum shows"""
    left = kill(grader, "victim", 6, OTHER_WORLD)
    run = resumed(grader, left, world_size=OTHER_WORLD, restart=1)
    full = through(grader, OTHER_WORLD)
    same = [equal(a, b) for a, b in zip(run.observed("weights"), full.observed("weights"), strict=True)]
    if all(same):
        return
    after = f"Killed in step 7 on {OTHER_WORLD} ranks, and started again on as many."
    drift = apart(run.observed("weights")[0], full.observed("weights")[0])
    first, there = run.observed("steps")[0], full.observed("steps")[0][SAVE_EVERY:]
    if len(first) == len(there) and all(equal(first[0][what], there[0][what]) for what in ("weights", "moments")):
        grader.fail(
            "buckets-in-another-order",
            f"{after} Step {SAVE_EVERY + 1} began with the same weights, moments and samples, and ended with others; behind "
            f"the last step the weights are {drift} away.",
            of=range(OTHER_WORLD),
            at=r"= *(DDP|DistributedDataParallel)\( || " + TRAIN,
        )
    grader.fail(
        "resumed-run-differs",
        f"{after} Behind the last step the weights are {drift} away.",
        of=range(OTHER_WORLD),
        at=LOADING,
    )
