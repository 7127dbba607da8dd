"""What `train` has to do: the whole script.

    main(arguments) -> Result(steps, of, loss, accuracy)

The script runs on the digits once; for the rest its data set and its model are exchanged for small ones that count. The
starts of one job are runs of their own: one rank is killed by SIGKILL, another is sent a signal, and the next start finds
in the folder what the one before has left. `train.sbatch` starts ranks that count on a SLURM cluster of its own.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judge_batch import Judge
from resumed import apart, read_loading
from train_batch import Batch, OneJob, Refused

from lockstep import cluster
from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Outcome, Run

SAMPLES, TESTED, BATCH, EPOCHS = 40, 13, 12, 3
AN_EPOCH = SAMPLES // BATCH
TOTAL = AN_EPOCH * EPOCHS
SAVE_EVERY = 5
WORLD = 2
WANTED = 0.95

TRAIN = r"def train\("
LOADING = r"= load\( || def load\( || " + TRAIN
ORDER = r"def batches || Sampler\( || " + TRAIN
STEP = r"def train_step || \.backward\( || " + TRAIN
EVALUATION = r"def evaluate || " + TRAIN
STOPPING = r"StopRequest\(|stop || " + TRAIN


def data(grader: Grader) -> dict[str, Any]:
    """Training and test set, drawn anew for every seed."""
    generator = torch.Generator().manual_seed(grader.random("data").randrange(1 << 30))

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)

    return {"train": some(SAMPLES), "test": some(TESTED)}


def arguments(grader: Grader, *more: str) -> list[str]:
    """The command line."""
    seed = grader.random("seed").randrange(999)
    usual = {"--epochs": EPOCHS, "--batch-size": BATCH, "--save-every": SAVE_EVERY, "--log-every": 2, "--seed": seed}
    usual |= {"--clip": 1000, "--lr": 0.05}
    return [str(word) for pair in usual.items() for word in pair] + list(more)


def through(grader: Grader, world_size: int = WORLD, *more: str) -> Run:
    """A start that nobody disturbs."""
    return grader.run("start", world_size, arguments=arguments(grader, *more), **data(grader))


def start(grader: Grader, **more: Any) -> Run:
    """Another start of that job, however it ends."""
    return grader.attempt("start", WORLD, arguments=arguments(grader), **data(grader), **more)


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    for report in run.ranks:
        told, met = (report.observations.get(key) for key in ("told", "met at"))
        if told and met and told not in met:
            return grader.diagnosis(
                "overwrites-launcher-environment",
                f"The launcher had said that the ranks meet at {told}; rank {report.rank} went to {met}, which on each host is "
                "another place or none.",
                of=[report.rank],
                at=r"MASTER_ADDR || init_method || init_process_group",
            )
    return read_loading(grader, run, LOADING)


def together(run: Run, step: int) -> list[int]:
    """The samples of a step of this start, of all ranks."""
    every = run.observed("steps")
    return sorted(n for one in every if step < len(one) for micro in one[step]["samples"] for n in micro)


def parts(weights: torch.Tensor) -> list[torch.Tensor]:
    """The small model's parameters, from all in one."""
    shapes = [(10, 6), (10,), (3, 10), (3,)]
    return [part.reshape(shape) for part, shape in zip(weights.split([60, 10, 30, 3]), shapes, strict=True)]


def logits(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the small model gives."""
    return F.relu(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]


# The training --------------------------------------------------------------------------------------------------------


def test_samples(grader: Grader) -> None:
    """on two ranks: so many steps, each on the whole batch, no sample twice in an epoch"""
    judge_samples(grader, WORLD)


@pytest.mark.needs("test_samples")
def test_other_worlds(grader: Grader) -> None:
    """the same on one rank and on four"""
    for world in (1, 4):
        judge_samples(grader, world)


def judge_samples(grader: Grader, world: int, run: Run | None = None) -> None:
    """What the steps were made of, in this run or in one on one host."""
    run = run or through(grader, world)
    everyone = range(world)
    steps = run.observed("steps")
    for rank, one in enumerate(steps):
        if len(one) != TOTAL:
            grader.fail(
                "wrong-number-of-steps-trained",
                f"{SAMPLES} samples in batches of {BATCH} are {AN_EPOCH} steps an epoch and {TOTAL} in {EPOCHS} epochs; "
                f"of {world} ranks rank {rank} made {len(one)}.",
                of=[rank],
                at=ORDER,
            )
    for number in range(TOTAL):
        shares = [[n for micro in one[number]["samples"] for n in micro] for one in steps]
        if any(sorted(share) == sorted(shares[0]) for share in shares[1:]):
            grader.fail(
                "same-shard",
                f"In step {number + 1} ranks trained on the same samples: {shares[0]}.",
                of=everyone,
                at=ORDER,
            )
        count = sum(map(len, shares))
        if count != BATCH:
            grader.fail(
                "global-batch-wrong",
                f"In step {number + 1} the {world} ranks trained on {count} samples together: --batch-size {BATCH} is what "
                "all of them have together.",
                of=everyone,
                at=r"batch_size // || " + ORDER,
            )
    for epoch in range(EPOCHS):
        inside = [n for at in range(AN_EPOCH) for n in together(run, epoch * AN_EPOCH + at)]
        often = sorted({n for n in inside if inside.count(n) > 1})
        if often:
            grader.fail(
                "loses-its-place", f"In epoch {epoch} the samples {often} came more than once.", of=everyone, at=ORDER
            )
    if together(run, 0) == together(run, AN_EPOCH):
        grader.fail(
            "missing-set-epoch",
            f"The first step of epoch 1 had the samples of the first of epoch 0: {together(run, 0)}.",
            of=everyone,
            at=ORDER,
        )
    for rank, result in enumerate(run.observed("result")):
        if (result["steps"], result["of"]) != (TOTAL, TOTAL):
            grader.fail(
                "wrong-count-returned",
                f"Rank {rank} made {TOTAL} steps of {TOTAL}; its Result says {result['steps']} of {result['of']}.",
                of=[rank],
                at=r"return Result || " + TRAIN,
            )


@pytest.mark.needs("test_samples")
def test_step(grader: Grader) -> None:
    """a step takes the gradient of the mean over all ranks' samples"""
    judge_gradient(grader, through(grader), 1, None)


@pytest.mark.needs("test_step")
def test_accumulate(grader: Grader) -> None:
    """with --accumulate it is the mean over the micro-batches too, averaged over the ranks once"""
    accumulate = 3
    run = through(grader, WORLD, "--accumulate", str(accumulate))
    judge_gradient(grader, run, accumulate, None)
    for rank, report in enumerate(run.ranks):
        one = run.observed("steps")[rank]
        size = sum(part.numel() for part in parts(one[0]["weights"])) * 4
        times = [mark.at for mark in report.marks if mark.name == "step"]
        for number in range(1, TOTAL):
            inside = [
                c for c in report.collectives if times[number - 1] < c.start < times[number] and c.kind == "all_reduce"
            ]
            moved = sum(c.nbytes for c in inside if c.nbytes >= 4 * 16)
            if moved > 1.5 * size:
                grader.fail(
                    "syncs-every-micro-batch",
                    f"Before step {number + 1} rank {rank} averaged {moved} bytes of gradients; the model has {size}. With "
                    f"--accumulate {accumulate}, only the last micro-batch needs to.",
                    of=[rank],
                    at=r"no_sync || " + STEP,
                )


def judge_gradient(grader: Grader, run: Run, accumulate: int, clip: float | None) -> None:
    """What the optimizer was given, against the gradient of the mean over the whole batch."""
    x, y = data(grader)["train"]
    steps = run.observed("steps")
    everyone = range(WORLD)
    for number in range(2):
        share = [[len(micro) for micro in one[number]["samples"]] for one in steps]
        if any(len(micros) != accumulate for micros in share):
            grader.fail(
                "one-big-batch",
                f"With --accumulate {accumulate} rank 0 worked through step {number + 1} in {len(share[0])} parts.",
                of=everyone,
                at=r"accumulate || " + STEP,
            )
        weights = [part.clone().requires_grad_() for part in parts(steps[0][number]["weights"])]

        def gradient(samples: list[int], of: list[torch.Tensor] = weights) -> torch.Tensor:
            got = torch.autograd.grad(F.cross_entropy(logits(of, x[samples]), y[samples]), of)
            return torch.cat([part.reshape(-1) for part in got])

        full = gradient(together(run, number))
        norm = full.norm().item()
        wanted = full * min(1.0, clip / norm) if clip else full
        for rank, one in enumerate(steps):
            got = one[number]["gradient"]
            if torch.allclose(got, wanted, rtol=1e-3, atol=1e-5):
                continue
            said = f"In step {number + 1} rank {rank}'s optimizer was given a gradient of norm {got.norm().item():.4f}"
            if clip and torch.allclose(got, full, rtol=1e-3, atol=1e-5):
                grader.fail("never-clips", f"{said} with --clip {clip}.", of=[rank], at=r"clip || " + STEP)
            if accumulate > 1 and torch.allclose(got, wanted * accumulate, rtol=1e-3, atol=1e-5):
                grader.fail(
                    "never-scales",
                    f"{said}, {accumulate} times too long: the sum over its {accumulate} micro-batches, not the mean.",
                    of=[rank],
                    at=r"backward || " + STEP,
                )
            own = gradient([n for micro in one[number]["samples"] for n in micro])
            if torch.allclose(got, own, rtol=1e-3, atol=1e-5):
                grader.fail(
                    "bypasses-ddp",
                    f"{said}: that of its own samples. It was not averaged over the ranks.",
                    of=[rank],
                    at=r"DDP\(|DistributedDataParallel\( || " + STEP,
                )
            grader.fail(
                "wrong-gradient-of-the-batch",
                f"{said}; that of the mean over the {BATCH} samples{' after clipping' if clip else ''} has "
                f"{wanted.norm().item():.4f}, and they differ by up to {apart(got, wanted)}.",
                of=[rank],
                at=STEP,
            )


@pytest.mark.needs("test_step")
def test_clip(grader: Grader) -> None:
    """the gradient is clipped after it has been averaged"""
    clip = 0.05
    judge_gradient(grader, through(grader, WORLD, "--clip", str(clip)), 1, clip)


@pytest.mark.needs("test_step")
def test_amp(grader: Grader) -> None:
    """with --amp it computes in bfloat16, and keeps its weights in float32"""
    for asked, wanted in (((), "torch.float32"), (("--amp",), "torch.bfloat16")):
        run = through(grader, WORLD, *asked)
        for rank, seen in enumerate(run.observed("precision")):
            if seen != [wanted]:
                grader.fail(
                    "no-autocast" if asked else "casts-the-model",
                    f"{'With' if asked else 'Without'} --amp rank {rank} computed in {' and '.join(seen)}; "
                    f"{wanted} was expected.",
                    of=[rank],
                    at=r"amp || autocast || " + STEP,
                )


@pytest.mark.needs("test_other_worlds", "test_step")
def test_evaluation(grader: Grader) -> None:
    """evaluation counts every sample once, on two ranks and on four, and all know the result"""
    for world in (WORLD, 4):
        judge_evaluation(grader, world)


def judge_evaluation(grader: Grader, world: int) -> None:
    """The test set's loss and accuracy, and what they were computed from."""
    run = through(grader, world)
    x, y = data(grader)["test"]
    weights = parts(run.observed("weights")[0])
    outputs = logits(weights, x)
    right = int((outputs.argmax(1) == y).sum())
    loss, accuracy = F.cross_entropy(outputs, y).item(), right / TESTED
    shares = [[-1 - n for batch in one for n in batch] for one in run.observed("tested")]
    last = [share[len(share) - len(share) // EPOCHS :] for share in shares]
    for rank, result in enumerate(run.observed("result")):
        got = result["loss"], result["accuracy"]
        if None not in got and abs(got[0] - loss) < 1e-4 and abs(got[1] - accuracy) < 1e-6:
            continue
        said = f"Of {world} ranks rank {rank} says loss {got[0]} and accuracy {got[1]}"
        should = (
            f"Over the {TESTED} samples of the test set they are {loss:.4f} and {accuracy:.4f} ({right} of {TESTED})."
        )
        mine = sorted(set(last[rank]))
        if mine and len(mine) < TESTED and got[1] is not None:
            own = (outputs[mine].argmax(1) == y[mine]).double().mean().item()
            if abs(got[1] - own) < 1e-6 and abs(got[0] - F.cross_entropy(outputs[mine], y[mine]).item()) < 1e-4:
                grader.fail(
                    "metric-of-one-rank",
                    f"{said}: those of its own {len(mine)} samples. {should}",
                    of=[rank],
                    at=EVALUATION,
                )
        everything = [n for share in last for n in share]
        twice = sorted({n for n in everything if everything.count(n) > 1})
        if twice and len(everything) < 2 * TESTED:
            grader.fail(
                "evaluates-padding",
                f"{said}: the samples {twice} of the test set were counted twice. {should}",
                of=[rank],
                at=EVALUATION,
            )
        missing = [n for n in range(TESTED) if n not in everything]
        if missing:
            grader.fail(
                "evaluation-misses-samples",
                f"{said}: the samples {missing} of the test set were never looked at. {should}",
                of=[rank],
                at=EVALUATION,
            )
        grader.fail("wrong-metric", f"{said}. {should}", of=[rank], at=EVALUATION)


@pytest.mark.needs("test_samples")
def test_speaks(grader: Grader) -> None:
    """rank 0 tells how it is going, and no other rank says anything"""
    run = through(grader)
    for report in run.ranks[1:]:
        if report.stdout.strip():
            grader.fail(
                "every-rank-speaks",
                f"Rank {report.rank} printed: {report.stdout.strip().splitlines()[0]}",
                of=[report.rank],
                at=r"print\( || " + TRAIN,
            )
    told = run.ranks[0].stdout
    lines = told.strip().splitlines()
    if len(lines) < TOTAL // 2 + EPOCHS or not re.search(r"\d\.\d", told):
        grader.fail(
            "says-nothing",
            f"In {TOTAL} steps and {EPOCHS} epochs, with --log-every 2, rank 0 printed {len(lines)} lines.",
            of=[0],
            at=r"say\(|print\( || " + TRAIN,
        )


# Interrupted ---------------------------------------------------------------------------------------------------------


def judge_resumed(grader: Grader, run: Run, wanted: int, after: str, left: Any, stopped: bool = False) -> None:
    """How a start went on behind an interruption, against the job that nobody has disturbed."""
    full = through(grader)
    steps, undisturbed = run.observed("steps"), full.observed("steps")
    drift = apart(run.observed("weights")[0], full.observed("weights")[0])
    told = f"{after} The next start should have gone on behind step {wanted}"
    first = together(run, 0)
    began = next((n for n in range(TOTAL) if together(full, n) == first), None)
    if not left or (began is not None and began < wanted and _at(run, undisturbed) == began and began > 0):
        grader.fail(
            "stops-without-saving" if stopped else "saves-too-seldom",
            f"{told}; it began behind step {began}: nothing newer had been saved.",
            of=range(WORLD),
            at=STOPPING if stopped else r"save_every || save\( || " + TRAIN,
        )
    if began == 0 and _at(run, undisturbed) in (0, None):
        grader.fail("starts-over", f"{told}. It began with step 1.", of=range(WORLD), at=LOADING)
    if began in (wanted - 1, wanted + 1):
        grader.fail(
            "off-by-one-step",
            f"{told}; its first samples were those of step {began + 1}.",
            of=range(WORLD),
            at=r"\bstep \+= || \bstep\b.*= || " + TRAIN,
        )
    if began is not None and began != wanted and began // AN_EPOCH == wanted // AN_EPOCH and began % AN_EPOCH == 0:
        grader.fail(
            "epoch-restarted",
            f"{told}; it began with the samples of step {began + 1}, the first of the epoch.",
            of=range(WORLD),
            at=ORDER,
        )
    if began != wanted or len(steps[0]) > TOTAL - wanted:
        known = f"those of step {began + 1}" if began is not None else "those of no step"
        grader.fail(
            "loses-its-place",
            f"{told}. Its first samples were {first}, {known}; it made {len(steps[0])} steps.",
            of=range(WORLD),
            at=ORDER,
        )
    for rank, one in enumerate(steps):
        same = undisturbed[rank][wanted]
        for what, id, label, at in (
            ("weights", "weights-not-restored", "its weights", r"model.*load_state_dict || "),
            ("moments", "optimizer-forgotten", "Adam's moments", r"optim.*load_state_dict || "),
        ):
            if not torch.equal(one[0][what], same[what]):
                grader.fail(
                    id,
                    f"{told}. In its first step rank {rank} had not what there had been: {label} were up to "
                    f"{apart(one[0][what], same[what])} away; at the end the weights are, by {drift}.",
                    of=[rank],
                    at=at + LOADING,
                )
        if one[0]["rate"] != same["rate"]:
            grader.fail(
                "scheduler-forgotten",
                f"{told}. There it had learned at a rate of {same['rate']:g}; now rank {rank} did at {one[0]['rate']:g}.",
                of=[rank],
                at=r"rate\( || lr || " + TRAIN,
            )
    if len(steps[0]) == TOTAL - wanted:
        for rank, weights in enumerate(run.observed("weights")):
            if not torch.equal(weights, full.observed("weights")[rank]):
                grader.fail(
                    "resumed-run-differs", f"{after} At the end the weights are {drift} away.", of=[rank], at=LOADING
                )


def _at(run: Run, undisturbed: list[Any]) -> int | None:
    """After how many steps of the undisturbed job the weights were those that this start began with."""
    first = run.observed("steps")[0][0]["weights"]
    return next((n for n in range(TOTAL) if torch.equal(undisturbed[0][n]["weights"], first)), None)


@pytest.mark.needs("test_step")
def test_killed(grader: Grader) -> None:
    """a rank killed by SIGKILL costs the steps since the last checkpoint, and nothing else"""
    chance = grader.random("kill")
    done, victim = chance.choice([6, 7, 8]), chance.randrange(WORLD)
    killed = start(grader, signals={"number": int(signal.SIGKILL), "rank": victim, "step": done, "before": True})
    one = killed.ranks[victim]
    if one.outcome is not Outcome.CRASHED or one.code != -signal.SIGKILL:
        grader.require(killed)
    left = one.observations.get("files", {})
    run = grader.require(start(grader, left=left))
    judge_resumed(grader, run, SAVE_EVERY, f"Rank {victim} was killed in step {done + 1}.", left)


@pytest.mark.needs("test_killed")
def test_complete(grader: Grader) -> None:
    """a job that is complete makes no further step, and says how good it is"""
    left = next(files for files in through(grader).observed("files") if files)
    run = grader.require(start(grader, left=left))
    wanted = through(grader).observed("result")
    for rank, steps in enumerate(run.observed("steps")):
        if steps:
            grader.fail(
                "trains-on-after-the-end",
                f"All {TOTAL} steps were done. Started again, rank {rank} made {len(steps)} steps.",
                of=[rank],
                at=r"save\( || " + TRAIN,
            )
        result = run.observed("result")[rank]
        if result != wanted[rank]:
            grader.fail(
                "wrong-metric",
                f"All {TOTAL} steps were done, with {wanted[rank]}. Started again, rank {rank} returned {result}.",
                of=[rank],
                at=r"return Result || " + EVALUATION,
            )


@pytest.mark.needs("test_killed")
def test_asked(grader: Grader) -> None:
    """asked to stop on one rank, by SIGUSR1 or SIGTERM, all save behind the same step and end without an error"""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        judge_asked(grader, number)


def judge_asked(grader: Grader, number: signal.Signals) -> None:
    """How the job stops for this signal, and goes on at the next start."""
    chance = grader.random(f"asked {number.name}")
    rank, step, before = chance.randrange(WORLD), chance.choice([0, 1, 6]), chance.random() < 0.5
    run = start(grader, signals={"number": int(number), "rank": rank, "step": step, "before": before})
    where = "in its forward pass" if before else "just after the update of its weights"
    what = f"Rank {rank} got {number.name} in step {step + 1}, {where}."
    one = run.ranks[rank]
    marks = [mark.name for mark in one.marks]
    if one.outcome is Outcome.CRASHED and one.code == -number:
        grader.fail("dies-of-the-signal", f"{what} It died of it.", of=[rank], at=STOPPING)
    if "signal" in marks and "signal over" not in marks and run.cause is not None:
        left_at_once = one.outcome in (Outcome.EXITED, Outcome.RAISED)
        grader.fail(
            "exits-on-the-signal" if left_at_once else "works-in-the-handler",
            f"{what} {'It left at once, in the middle of the step.' if left_at_once else 'Its handler called a collective.'}",
            of=[rank],
            at=r"exit || " + STOPPING,
        )
    if one.observations.get("wrote in the handler"):
        grader.fail("works-in-the-handler", f"{what} Its handler wrote a file at once.", of=[rank], at=STOPPING)
    if run.cause is not None and run.cause.kind in ("hang", "mismatch"):
        grader.fail(
            "stops-alone",
            f"{what} The ranks did not all stop behind the same step: {run.cause.headline}",
            of=run.cause.ranks,
            at=STOPPING,
        )
    if one.outcome in (Outcome.EXITED, Outcome.RAISED) and run.cause is not None:
        how = str(one.error) if one.error is not None else f"status {one.code}"
        grader.fail("exits-on-the-signal", f"{what} It ended by {how}.", of=[rank], at=r"exit|raise || " + STOPPING)
    grader.require(run)
    counts = [len(steps) for steps in run.observed("steps")]
    if len(set(counts)) > 1:
        grader.fail("stops-alone", f"{what} The ranks stopped behind the steps {counts}.", of=[rank], at=STOPPING)
    if counts[0] not in (step + 1, step + 2):
        id = "ignores-the-signal" if counts[0] == TOTAL else "stops-late"
        grader.fail(
            id, f"{what} The job went on to step {counts[0]}; {step + 2} is the latest.", of=[rank], at=STOPPING
        )
    left = run.observed("files")[0]
    after = f"Asked by {number.name}, the job stopped behind step {counts[0]}."
    again = grader.require(start(grader, left=left))
    judge_resumed(grader, again, counts[0], after, left, stopped=True)
    for r, result in enumerate(run.observed("result")):
        if (result["steps"], result["of"]) != (counts[0], TOTAL):
            grader.fail(
                "wrong-count-returned",
                f"{after} Rank {r}'s Result says {result['steps']} of {result['of']}.",
                of=[r],
                at=r"return Result || " + TRAIN,
            )


# Where it runs -------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_samples")
def test_two_nodes(grader: Grader) -> None:
    """on two nodes, a rank takes the GPU of its number on its node, before the group is made"""
    run = grader.run("joins", 4, nodes=2, devices=2)
    for rank, report in enumerate(run.ranks):
        seen = report.observations
        wanted = f"cuda:{seen['local rank']}"
        if seen["device"] != wanted or (seen["chosen"] and seen["chosen"][-1] != wanted):
            grader.fail(
                "device-by-global-rank" if seen["device"] == f"cuda:{rank}" else "no-device",
                f"Two nodes with two GPUs and two ranks each: rank {rank} is number {seen['local rank']} on its node, and "
                f"took {seen['device']} instead of {wanted}.",
                of=[rank],
                at=r"torch\.device\( || set_device || def join",
            )
        if not seen["chosen"]:
            grader.fail("no-device", f"Rank {rank} never called torch.cuda.set_device.", of=[rank], at=r"def join")
        if wanted not in seen["chosen before the group"]:
            grader.fail(
                "device-after-init",
                f"Rank {rank} made the group first and chose {wanted} after that.",
                of=[rank],
                at=r"init_process_group || def join",
            )
    for devices, wanted in ((2, "nccl"), (0, "gloo")):
        run = grader.run("joins", 4, nodes=2, devices=devices)
        for rank, backend in enumerate(run.observed("backend")):
            if backend and wanted not in backend:
                grader.fail(
                    "hard-coded-backend",
                    f"With {devices or 'no'} GPUs on its node rank {rank} asked for {backend}; {wanted} was expected.",
                    of=[rank],
                    at=r"init_process_group || def join",
                )


@pytest.mark.needs("test_speaks", "test_two_nodes")
def test_two_hosts(grader: Grader) -> None:
    """on two hosts with names and addresses of their own it trains as on one, and one rank of all speaks and writes"""
    world = 4
    run = grader.run(
        "on_hosts", world, nodes=2, network=cluster.own_hosts(), arguments=arguments(grader), **data(grader)
    )
    hosts = run.observed("host")
    for rank, report in enumerate(run.ranks[1:], 1):
        where = f"Ranks 0 and 1 are on {hosts[0]}, 2 and 3 on {hosts[2]}. Rank {rank}"
        if report.stdout.strip():
            grader.fail(
                "every-rank-speaks",
                f"{where} printed: {report.stdout.strip().splitlines()[0]}",
                of=[rank],
                at=r"LOCAL_RANK.*== *0 || LOCAL_RANK || print\( || " + TRAIN,
            )
        wrote = report.observations["wrote"]
        if wrote:
            grader.fail(
                "every-rank-writes",
                f"{where} wrote {', '.join(wrote)} too.",
                of=[rank],
                at=r"LOCAL_RANK.*== *0 || def save || " + TRAIN,
            )
    judge_samples(grader, world, run)


@pytest.mark.needs("test_samples")
def test_refuses(grader: Grader) -> None:
    """a batch that cannot be dealt out evenly is refused"""
    run = grader.run("refuses", WORLD, arguments=arguments(grader, "--accumulate", "5"))
    for rank, said in enumerate(run.observed("refused")):
        if said == "nothing":
            grader.fail(
                "uneven-batch-accepted",
                f"--batch-size {BATCH} and --accumulate 5 on {WORLD} ranks: rank {rank} trained all the same.",
                of=[rank],
                at=r"accumulate || " + TRAIN,
            )


@pytest.mark.needs("test_evaluation", "test_step")
def test_learns(grader: Grader) -> None:
    """in 8 epochs on two ranks it reads handwritten digits, 95 of 100 right"""
    run = grader.run("digits", WORLD, arguments=["--epochs", "8", "--log-every", "100"])
    for rank, result in enumerate(run.observed("result")):
        if (result["accuracy"] or 0) < WANTED:
            grader.fail(
                "learns-too-little",
                f"After {run.observed('steps made')[rank]} steps rank {rank} had an accuracy of {result['accuracy']} on the "
                f"test set; at least {WANTED} was expected.",
                of=[rank],
                at=r"optimizer = || " + TRAIN,
            )


# The batch script ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(grader: Grader) -> Iterator[Batch]:
    """The jobs that the batch script makes, all on one cluster."""
    one = Batch(grader)
    yield one
    one.close()


def begun(batch: Batch) -> tuple[OneJob, OneJob, OneJob]:
    """The job and the array's two tasks, as far as they came undisturbed."""
    batch.require()
    try:
        return batch.begun
    except Refused as refusal:
        Judge(batch.grader).refused(refusal)


def test_batch_nodes(grader: Grader, batch: Batch) -> None:
    """train.sbatch: on a SLURM cluster it starts one torchrun on each of two nodes, and all ranks meet"""
    job = begun(batch)[0]
    Judge(grader).started(job, ["node0", "node1"])


@pytest.mark.needs("test_batch_nodes")
def test_batch_array(grader: Grader, batch: Batch) -> None:
    """train.sbatch: the tasks of an array share a node, and nothing else"""
    Judge(grader).array(*begun(batch)[1:])


@pytest.mark.needs("test_batch_array")
def test_batch_signal(grader: Grader, batch: Batch) -> None:
    """train.sbatch: when SLURM's signal comes the job saves, goes back into the queue, and goes on"""
    Judge(grader).asked(batch.disturbed[0])


@pytest.mark.needs("test_batch_array")
def test_batch_node_dies(grader: Grader, batch: Batch) -> None:
    """train.sbatch: when a node dies the job begins again, and goes on from its checkpoint"""
    Judge(grader).died(batch.disturbed[1])
