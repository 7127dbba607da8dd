"""What `train` has to do: the whole script.

    main(arguments) -> Result(steps, of, loss, accuracy)

The script runs on the digits once; for the rest its data set and its model are exchanged for small ones that count. The
starts of one job are runs of their own: one rank is killed by SIGKILL, others are sent a signal, and the next start
finds in the folder what the one before has left. `train.sbatch` starts ranks that count on a SLURM cluster of its
own.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from judging import train as model
from judging.checkpoint import judge_durable, judge_writers
from judging.judge_batch import Judge, begun
from judging.resumed import Job, Lines, read_loading, share, together
from judging.train import (
    AN_EPOCH,
    BATCH,
    EPOCHS,
    EVALUATION,
    LARGEST,
    LOG_EVERY,
    ORDER,
    SAVE_EVERY,
    STEP,
    TESTED,
    TOTAL,
    TRAIN,
    arguments,
    data,
    drawn_seed,
)  # fmt: skip
from judging.train_batch import Batch

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Outcome, Run, Tolerance, cluster, equal

OWN_GPUS = True  # `join` takes the GPU with the number of the rank on its node
WORLD = 2
WANTED = 0.95
LOOSE, CLOSE = Tolerance(1e-3, 1e-5), Tolerance(0.0, 1e-4)

LOADING = r"= load\( || def load\( || " + TRAIN
STOPPING = r"StopRequest\(|stop || " + TRAIN
RESULT = r"return Result || " + TRAIN
LINES = Lines(
    order=ORDER,
    batch=r"batch_size // || " + ORDER,
    loading=LOADING,
    saving=r"save_every || save\( || " + TRAIN,
    counting=r"\bstep \+= || \bstep\b.*= || " + TRAIN,
    stopping=STOPPING,
    handler=STOPPING,
)


def job(grader: Grader) -> Job:
    """What there is to know of the job."""
    return Job(grader, TOTAL, AN_EPOCH, BATCH, LINES)


def through(grader: Grader, world_size: int = WORLD, *more: str) -> Run:
    """A start that nobody disturbs."""
    return grader.run("start", world_size, arguments=arguments(grader, *more), **data(grader))


def start(grader: Grader, **more: Any) -> Run:
    """Another start of that job, however it ends."""
    return grader.attempt("start", WORLD, arguments=arguments(grader), **data(grader), **more)


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    for report in run.ranks:
        told, met = (report.observations.get(key) for key in ("told", "met at"))
        if told and met and told not in met:
            where = f"The launcher had said that the ranks meet at {told}; rank {report.rank} went to {met}"
            what = f"{where}, which is a different place on each host, or none."
            at = r"MASTER_ADDR || init_method || init_process_group"
            return grader.diagnosis("overwrites-launcher-environment", what, of=[report.rank], at=at)
    return read_loading(grader, run, LOADING)


def counted(grader: Grader, run: Run, what: str, steps: int) -> None:
    """What each rank's Result says of the steps."""
    says = [[result["steps"], result["of"]] for result in run.observed("result")]
    what = f"{what} Steps and of in the Result"
    grader.explain(what, says, [steps, TOTAL], otherwise="wrong-count-returned", at=RESULT)


# The training --------------------------------------------------------------------------------------------------------


def judge_samples(grader: Grader, world: int, run: Run | None = None) -> None:
    """What the steps were made of, in this run or in one on one host."""
    run, seed = run or through(grader, world), drawn_seed(grader)
    job(grader).deals(run)
    mistakes = [
        Hypothesis("ignores-seed", "That is the order for seed 0.", model.order(0, world)),
        Hypothesis("no-shuffle", "Nothing was shuffled.", model.order(seed, world, shuffle=False)),
    ]
    seen = [[together(run, step) for step in range(TOTAL)]] * world
    what, right = "Of the samples of all ranks, step by step, one", model.order(seed, world)
    grader.explain(what, seen, right, mistakes, otherwise="loses-its-place", at=ORDER)
    counted(grader, run, f"{TOTAL} steps were made.", TOTAL)


def test_samples(grader: Grader) -> None:
    """on two ranks: as many steps as asked for, each on the whole batch, no sample twice in an epoch"""
    judge_samples(grader, WORLD)


@pytest.mark.needs("test_samples")
def test_other_worlds(grader: Grader) -> None:
    """the same on one rank and on four"""
    judge_samples(grader, 1)
    judge_samples(grader, 4)


@pytest.mark.needs("test_samples")
def test_start(grader: Grader) -> None:
    """the weights come from the seed, and AdamW learns at the rate of the step"""
    seed, steps = drawn_seed(grader), through(grader).observed("steps")
    began, at = [one[0]["weights"] for one in steps], r"manual_seed || " + TRAIN
    zero = [Hypothesis("ignores-seed", "They are those of seed 0.", model.initial(0), at)]
    what = f"Of the first weights, for --seed {seed}, one"
    grader.explain(what, began, model.initial(seed), zero, otherwise="start-not-seeded", at=at)
    learned, at = [[step["rate"] for step in one] for one in steps], r"rate\( || \blr\b || " + TRAIN
    mistakes, id = model.rate_mistakes(LARGEST, learned[0]), "rate-of-another-step"
    what = "Of the learning rates of all steps, one"
    grader.explain(what, learned, model.rates(LARGEST), mistakes, otherwise=id, at=at)
    wanted, grouped, others = model.optimizers(began[0], steps[0][0]["gradient"], model.rates(LARGEST)[0])
    moved, at = [steps[0][1]["weights"]], r"optimizer = || optim\. || " + TRAIN
    what, id = "After the first step a weight", "wrong-optimizer"
    right = grouped if equal(moved[0], grouped, LOOSE) else wanted  # weight decay is often for matrices only
    grader.explain(what, moved, right, others, otherwise=id, at=at, tolerance=LOOSE)


def judge_gradient(grader: Grader, run: Run, accumulate: int = 1, clip: float = 1000.0) -> None:
    """What the optimizer was given, against the gradient of the mean over the whole batch."""
    for number in range(2):
        parts = [len(one[number]["samples"]) for one in run.observed("steps")]
        what = f"With --accumulate {accumulate} the number of parts of step {number + 1}"
        grader.explain(what, parts, accumulate, otherwise="one-big-batch", at=r"accumulate || " + STEP)
        wanted, mistakes = model.gradients(run, number, data(grader)["train"], accumulate, clip)
        got = [one[number]["gradient"] for one in run.observed("steps")]
        what = f"Of the gradient that the optimizer was given in step {number + 1}, the number"
        id = "wrong-gradient-of-the-batch"
        grader.explain(what, got, wanted, mistakes, otherwise=id, at=STEP, tolerance=LOOSE)


@pytest.mark.needs("test_samples")
def test_step(grader: Grader) -> None:
    """a step takes the gradient of the mean over all ranks' samples"""
    judge_gradient(grader, through(grader))


@pytest.mark.needs("test_step")
def test_accumulate(grader: Grader) -> None:
    """with --accumulate it is the mean over the micro-batches too, averaged over the ranks once"""
    run = through(grader, WORLD, "--accumulate", "3")
    judge_gradient(grader, run, accumulate=3)
    size = 4 * model.initial(0).numel()
    for rank, report in enumerate(run.ranks):
        times = [mark.at for mark in report.marks if mark.name == "step"]
        large = [c for c in report.collectives if c.kind == "all_reduce" and c.nbytes >= 64]
        moved = [sum(c.nbytes for c in large if a < c.start < b) for a, b in pairwise(times)]
        what = f"Before step {{}} {{ranks}} averaged {max(moved)} bytes of gradients; the model has {size}."
        what = what.replace("{}", str(moved.index(max(moved)) + 2)) + " Only the last of 3 micro-batches needs to."
        at = r"no_sync || " + STEP
        grader.fail_on([rank] * (max(moved) > 1.5 * size), "syncs-every-micro-batch", what, at=at)


@pytest.mark.needs("test_step")
def test_clip(grader: Grader) -> None:
    """the gradient is clipped after it has been averaged"""
    judge_gradient(grader, through(grader, WORLD, "--clip", "0.05"), clip=0.05)


@pytest.mark.needs("test_step")
def test_amp(grader: Grader) -> None:
    """with --amp it computes in bfloat16, and keeps its weights in float32"""
    at = r"amp || autocast || " + STEP
    for how, more, wanted, id in (
        ("Without", (), "torch.float32", "casts-the-model"),
        ("With", ("--amp",), "torch.bfloat16", "no-autocast"),
    ):
        run = through(grader, WORLD, *more)
        grader.explain(f"{how} --amp the precision", run.observed("precision"), [wanted], otherwise=id, at=at)
        kept = run.observed("kept in")
        grader.explain(f"{how} --amp the weights' type", kept, ["torch.float32"], otherwise="casts-the-model", at=at)


@pytest.mark.needs("test_other_worlds", "test_step")
def test_evaluation(grader: Grader) -> None:
    """evaluation counts every sample once, on two ranks and on four, and all know the result"""
    for world in (WORLD, 4):
        run = through(grader, world)
        right, otherwise, mistakes = model.metrics(run, data(grader)["test"])
        got = [[result["loss"], result["accuracy"]] for result in run.observed("result")]
        what = f"Of {world} ranks, loss and accuracy ({got[0]}; over the {TESTED} samples of the test set {right}): one"
        grader.explain(what, got, right, mistakes, otherwise=otherwise, at=EVALUATION, tolerance=CLOSE)
        looked = [{n for batch in one for n in batch} for one in run.observed("tested")]
        what = f"Each of the {world} ranks evaluated all {TESTED} samples of the test set."
        grader.fail_on(
            range(world) if all(len(one) == TESTED for one in looked) else (), "work-not-shared", what, at=EVALUATION
        )
        wrapped = [rank for rank, kinds in enumerate(run.observed("evaluated")) if "DistributedDataParallel" in kinds]
        what = "On {ranks} evaluate was given the DDP wrapper."
        grader.fail_on(wrapped, "evaluates-the-wrapper", what, at=r"evaluate\( || " + EVALUATION)


@pytest.mark.needs("test_step")
def test_loss(grader: Grader) -> None:
    """train_step returns the mean loss of this rank's micro-batches before the step, without a graph"""
    seed, of = drawn_seed(grader), data(grader)["train"]
    order = grader.random("parts").sample(range(model.SAMPLES), 18)
    parts = [[order[start : start + 3] for start in (9 * rank, 9 * rank + 3, 9 * rank + 6)] for rank in range(WORLD)]
    run = grader.run("steps_once", WORLD, train=of, samples=parts, seed=seed)
    weights = model.initial(seed)
    right = [model.loss(weights, of, [n for part in own for n in part]).item() for own in parts]
    last = [model.loss(weights, of, own[-1]).item() for own in parts]
    every = [model.loss(weights, of, [n for own in parts for part in own for n in part]).item()] * WORLD
    id, at = "wrong-loss-returned", r"return || " + STEP
    mistakes = [
        Hypothesis(id, "It is that of the last micro-batch alone.", Each(last)),
        Hypothesis(id, "It is the sum over the micro-batches.", Each([3 * one for one in right])),
        Hypothesis(id, "It is the mean over all ranks.", Each(every)),
    ]
    what = "Of the losses that train_step returned for 3 micro-batches, one"
    grader.explain(what, run.observed("loss"), Each(right), mistakes, otherwise=id, at=at, tolerance=CLOSE)
    kept = [rank for rank, graph in enumerate(run.observed("graph")) if graph]
    what = "The loss that train_step returned on {ranks} still requires a gradient."
    grader.fail_on(kept, "loss-keeps-its-graph", what, at=at)


@pytest.mark.needs("test_evaluation")
def test_evaluates_when(grader: Grader) -> None:
    """the test set is evaluated after each epoch, and no more often"""
    right, at = list(range(AN_EPOCH, TOTAL + 1, AN_EPOCH)), r"= evaluate\( || " + TRAIN
    looked = {step for steps in through(grader).observed("tested after") for step in steps}  # one rank may do it all
    after = sorted(looked - {0})  # how good it is before it learns may be asked, too
    id = "evaluates-too-seldom" if set(right) - set(after) else "evaluates-too-often"
    what = f"In {EPOCHS} epochs of {AN_EPOCH} steps, evaluations were expected after steps {right}; "
    what += f"the test set was evaluated after steps {after}." if after else "the test set was never evaluated."
    grader.fail_on([0] * (after != right), id, what, at=at)


def steps_told(grader: Grader, run: Run) -> list[str]:
    """The numbers of the steps, from 1, whose loss over all ranks rank 0 printed."""
    steps, of = run.observed("steps")[0], data(grader)["train"]
    losses = [model.loss(one["weights"], of, together(run, n)) for n, one in enumerate(steps)]
    return [str(n) for n, loss in enumerate(losses, 1) if model.prints(run.ranks[0].stdout, loss)]


@pytest.mark.needs("test_samples", "test_loss")
def test_speaks(grader: Grader) -> None:
    """rank 0 tells where it starts and how it goes, with the loss over all ranks; no other rank says anything"""
    run = through(grader)
    told, *others = [report.stdout for report in run.ranks]
    loud = [rank for rank, said in enumerate(others, 1) if said.strip()]
    printed = f"{{ranks}} printed: {''.join(others).strip().partition(chr(10))[0]}"
    grader.fail_on(loud, "every-rank-speaks", printed, at=r"print\( || " + TRAIN)
    at, lines = r"say\(|print\( || " + TRAIN, told.strip().splitlines()
    every = f"--log-every {LOG_EVERY}"
    what = f"In {TOTAL} steps and {EPOCHS} epochs, with {every}, rank 0 printed {len(lines)} lines."
    enough = len(lines) >= 1 + TOTAL // LOG_EVERY + EPOCHS and re.search(r"\d\.\d", told)
    grader.fail_on(() if enough else [0], "says-nothing", what, at=at)
    of, printed = data(grader)["train"], steps_told(grader, run)
    what = f"With {every}, rank 0 printed the losses of the steps {', '.join(printed)}."
    # One or two more may agree with another printed number by chance.
    grader.fail_on([0] * (len(printed) > TOTAL // LOG_EVERY + 2), "logs-too-often", what, at=r"log_every || " + at)
    logged = [set(range(start, TOTAL + 1, LOG_EVERY)) for start in (1, LOG_EVERY)]  # whether it counts from 0 or from 1
    if not any(one <= set(map(int, printed)) for one in logged):
        for number in (0, LOG_EVERY - 1):
            step = run.observed("steps")[0][number]
            whole, own = (model.loss(step["weights"], of, samples) for samples in (together(run, number), share(step)))
            what = f"In step {number + 1} the loss was {whole:.4f} over all ranks; rank 0 printed its own, {own:.4f}."
            mistaken = model.prints(told, own) and not model.prints(told, whole)
            grader.fail_on([0] * mistaken, "rank-local-loss", what, at=at)
        which = f"step {', '.join(printed)} only" if printed else "no step"
        what = f"With {every}, {{ranks}} printed the loss over all ranks of {which}."
        grader.fail_on([0], "rank-local-loss", what, at=at)
    told_of = steps_told(grader, through(grader, 1, "--log-every", "1"))
    what = f"In {TOTAL} steps on one rank, with --log-every 1, {{ranks}} printed the losses of {len(told_of)}."
    grader.fail_on([0] * (len(told_of) < TOTAL), "says-nothing", what, at=r"log_every || " + at)


# Saved ---------------------------------------------------------------------------------------------------------------


def test_saves(grader: Grader) -> None:
    """save replaces the file, on one rank and durably; all wait for it, and learn when it cannot be done"""
    run, at = grader.run("saves", WORLD), r"def save"
    judge_writers(grader, run.observed("operations"), at)
    early = [rank for rank, there in enumerate(run.observed("there")) if not there]
    grader.fail_on(early, "returns-before-the-file", "When save returned on {ranks}, the file was not there.", at=at)
    operations = max(run.observed("operations"), key=len)
    file, folder = run.observed("inodes")[0]
    judge_durable(grader, "The checkpoint", operations, [file], folder, r"fsync || replace || torch\.save || " + at)
    trusting = [rank for rank, trusts in enumerate(run.observed("trusting")) if trusts]
    grader.fail_on(
        trusting, "runs-code-from-a-file", "On {ranks} load called torch.load with weights_only=False.", at=LOADING
    )
    came, what = run.observed("loaded"), "After a save with step 7 on rank 0 and 8 on rank 1, what load returned"
    grader.explain(what, came, [7, [0.0]], otherwise="state-comes-back-changed", at=at)
    there, what = [came is not None for came in run.observed("nothing")], "Without a file, that load returned a state"
    grader.explain(what, there, False, otherwise="fails-without-checkpoints", at=LOADING)
    errors = run.observed("error")
    silent = [rank for rank, error in enumerate(errors) if not error]
    what = f"Where no file can be made save raised {[error for error in errors if error]}, and returned on {{ranks}}."
    id = "others-never-learn-of-it" if any(errors) else "swallows-a-failed-save"
    grader.fail_on(silent, id, what, at=r"except || raise || " + at)
    others = run.observed("another error")
    what = f"Where no file can be made save raised {''.join(others[:1])} on {{ranks}}; a RuntimeError was expected."
    grader.fail_on([rank for rank, other in enumerate(others) if other], "another-error", what, at=r"raise || " + at)


@pytest.mark.needs("test_samples")
def test_saves_when(grader: Grader) -> None:
    """a checkpoint is saved every --save-every steps, and no more often"""
    seen = through(grader).observed("checkpoints")[0]
    saved = [step for step, (before, after) in enumerate(pairwise(seen), 1) if before != after and step < TOTAL]
    right = list(range(SAVE_EVERY, TOTAL, SAVE_EVERY))
    id = "saves-too-seldom" if set(right) - set(saved) else "saves-too-often"
    what = f"In {TOTAL} steps with --save-every {SAVE_EVERY}, the saves expected before the last step are after steps {right}. "
    grader.fail_on(
        [0] * (saved != right), id, f"{what}{{ranks}} saved after {saved}.", at=r"save_every || save\( || " + TRAIN
    )


# Interrupted ---------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_step", "test_start")
def test_killed(grader: Grader) -> None:
    """a rank killed by SIGKILL costs the steps since the last checkpoint, and nothing else"""
    chance = grader.random("kill")
    done, victim = chance.choice([6, 7, 8]), chance.randrange(WORLD)
    killed = start(grader, signals={"number": int(signal.SIGKILL), "ranks": [victim], "step": done, "before": True})
    one = killed.ranks[victim]
    if one.outcome is not Outcome.CRASHED or one.code != -signal.SIGKILL:
        grader.require(killed)
    left = one.observations.get("files", {})
    after = f"Rank {victim} was killed in step {done + 1}."
    run, full = grader.require(start(grader, left=left)), through(grader)
    job(grader).goes_on(run, full, SAVE_EVERY, after, left)
    job(grader).ends_alike(run, full, SAVE_EVERY, after)


@pytest.mark.needs("test_killed")
def test_complete(grader: Grader) -> None:
    """a job that is complete makes no further step, and says how good it is"""
    left = next(files for files in through(grader).observed("files") if files)
    run, what = grader.require(start(grader, left=left)), f"All {TOTAL} steps were done. Started again,"
    made, at = [len(steps) for steps in run.observed("steps")], r"save\( || " + TRAIN
    grader.explain(f"{what} the number of steps", made, 0, otherwise="trains-on-after-the-end", at=at)
    results, same, at = (
        run.observed("result"),
        Each(through(grader).observed("result")),
        r"return Result || " + EVALUATION,
    )
    grader.explain(f"{what} its Result", results, same, otherwise="wrong-metric", at=at)


@pytest.mark.needs("test_killed")
def test_asked(grader: Grader) -> None:
    """asked to stop, by SIGUSR1 on one rank or SIGTERM on all, all save after the same step and end without an error"""
    chance = grader.random("asked")
    for number, ranks in ((signal.SIGUSR1, [WORLD - 1]), (signal.SIGTERM, [0, 1])):
        step, before = chance.choice([0, 1, 6]), chance.random() < 0.5
        run = start(grader, signals={"number": int(number), "ranks": ranks, "step": step, "before": before})
        where = "in the forward pass" if before else "just after the update of the weights"
        done, after = job(grader).stops(run, number, ranks, step, where)
        left = run.observed("files")[0]
        again = grader.require(start(grader, left=left))
        job(grader).goes_on(again, through(grader), done, after, left, stopped=True)
        job(grader).ends_alike(again, through(grader), done, after)
        counted(grader, run, after, done)


# Where it runs -------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_samples")
def test_two_nodes(grader: Grader) -> None:
    """on two nodes, a rank takes the GPU of its number on its node, before the group is made"""
    run = grader.run("joins", 4, nodes=2, devices=2)
    at, gpus = r"torch\.device\( || set_device || def join", [f"cuda:{rank % 2}" for rank in range(4)]
    last = [seen[-1] if seen else "cpu" for seen in run.observed("chosen")]
    for which, seen in (("that join returned", run.observed("device")), ("that is the current one", last)):
        what, mistakes = f"On two nodes with two GPUs each, the device {which}", model.device_mistakes(2, 4)
        grader.explain(what, seen, Each(gpus), mistakes, otherwise="no-device", at=at)
    before = [seen[-1:] for seen in run.observed("chosen before the group")]
    what, at = "On two nodes, the current device when the group was made", r"init_process_group || def join"
    grader.explain(what, before, Each([[gpu] for gpu in gpus]), otherwise="device-after-init", at=at)
    for devices, wanted in ((2, "nccl"), (0, "gloo")):
        backends = grader.run("joins", 4, nodes=2, devices=devices).observed("backend")
        bad = [rank for rank, backend in enumerate(backends) if backend and wanted not in backend]
        what = f"With {devices or 'no'} GPUs on its node {{ranks}} asked for {''.join(backends[:1])}; {wanted} was expected."
        grader.fail_on(bad, "hard-coded-backend", what, at=at)


@pytest.mark.needs("test_speaks", "test_two_nodes")
def test_two_hosts(grader: Grader) -> None:
    """on two hosts with different names and addresses it trains as on one, and one rank of all prints and writes"""
    world, given = 4, {"arguments": arguments(grader), **data(grader)}
    run = grader.run("on_hosts", world, nodes=2, network=cluster.own_hosts(), **given)
    where = "Ranks 0 and 1 are on {}, 2 and 3 on {}. {{ranks}}".format(*run.observed("host")[::2])
    at = r"LOCAL_RANK.*== *0 || LOCAL_RANK || print\( || def save || " + TRAIN
    for report in run.ranks[1:]:
        said, wrote = report.stdout.strip().splitlines()[:1], report.observations["wrote"]
        grader.fail_on([report.rank] * len(said), "every-rank-speaks", f"{where} printed: {''.join(said)}", at=at)
        others = f"{where} wrote {', '.join(wrote)} too."
        grader.fail_on([report.rank] * bool(wrote), "every-rank-writes", others, at=at)
    judge_samples(grader, world, run)


@pytest.mark.needs("test_samples")
def test_refuses(grader: Grader) -> None:
    """a batch that cannot be divided evenly is refused"""
    run = grader.run("refuses", WORLD, arguments=arguments(grader, "--accumulate", "5"))
    said = run.observed("refused")
    bad = [rank for rank, error in enumerate(said) if error == "nothing"]
    what = f"--batch-size {BATCH} and --accumulate 5 on {WORLD} ranks: {{ranks}} trained instead of raising ValueError."
    grader.fail_on(bad, "uneven-batch-accepted", what, at=r"accumulate || " + TRAIN)
    made = run.observed("made")
    late = [rank for rank, steps in enumerate(made) if steps]
    what = f"--batch-size {BATCH} and --accumulate 5 on {WORLD} ranks: {{ranks}} made {max(made)} steps before the ValueError."
    grader.fail_on(late, "uneven-batch-accepted", what, at=r"accumulate || " + TRAIN)
    others = [rank for rank, error in enumerate(said) if error != "ValueError"]
    what = f"--batch-size {BATCH} and --accumulate 5 on {WORLD} ranks: {{ranks}} raised {''.join(said[others[0]] if others else '')}; "
    grader.fail_on(others, "another-error", what + "a ValueError was expected.", at=r"raise || accumulate || " + TRAIN)


@pytest.mark.needs("test_evaluation", "test_step")
def test_learns(grader: Grader) -> None:
    """in 8 epochs on two ranks it reads handwritten digits, 95 of 100 right"""
    run = grader.run("digits", WORLD, arguments=["--epochs", "8", "--log-every", "100"])
    accuracy = [result["accuracy"] or 0.0 for result in run.observed("result")]
    bad = [rank for rank, reached in enumerate(accuracy) if reached < WANTED]
    what = f"After {run.observed('steps made')[0]} steps {{ranks}} had an accuracy of {min(accuracy)} on the test set; at least {WANTED}"
    grader.fail_on(bad, "learns-too-little", f"{what} was expected.", at=r"optimizer = || " + TRAIN)


# The batch script ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(grader: Grader) -> Iterator[Batch]:
    """The jobs that the batch script makes, all on one cluster."""
    one = Batch(grader)
    yield one
    one.close()


def test_batch_nodes(grader: Grader, batch: Batch) -> None:
    """train.sbatch: on a SLURM cluster it starts one torchrun on each of two nodes, and all ranks form one group"""
    job = begun(batch)[0]
    Judge(grader).started(job, ["node0", "node1"])


@pytest.mark.needs("test_batch_nodes")
def test_batch_array(grader: Grader, batch: Batch) -> None:
    """train.sbatch: the tasks of an array share a node, and nothing else"""
    Judge(grader).array(*begun(batch)[1:])


@pytest.mark.needs("test_batch_array")
def test_batch_signal(grader: Grader, batch: Batch) -> None:
    """train.sbatch: when SLURM's signal comes the job saves, goes back into the queue, and continues"""
    Judge(grader).asked(batch.disturbed[0])


@pytest.mark.needs("test_batch_array")
def test_batch_node_dies(grader: Grader, batch: Batch) -> None:
    """train.sbatch: when a node dies the job starts again, and resumes from its checkpoint"""
    Judge(grader).died(batch.disturbed[1])


@pytest.mark.needs("test_batch_array")
def test_batch_cancelled(grader: Grader, batch: Batch) -> None:
    """train.sbatch: a job that is cancelled ends, and stays ended"""
    Judge(grader).cancelled(batch.disturbed[2])
