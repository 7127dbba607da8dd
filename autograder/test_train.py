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

import pytest
from judging import train as model
from judging.checkpoint import judge_durable, judge_writers
from judging.judge_batch import Judge, begun
from judging.resumed import read_loading
from judging.train import (
    EVALUATION,
    LOADING,
    SAVE_EVERY,
    STEP,
    TOTAL,
    TRAIN,
    WORLD,
    arguments,
    data,
    job,
    start,
    through,
)
from judging.train_batch import Batch

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Outcome, Run, Tolerance, cluster, equal

OWN_GPUS = True  # `join` takes the GPU with the number of the rank on its node
WANTED = 0.95
CLOSE = Tolerance(0.0, 1e-4)


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    for report in run.ranks:
        told, met = (report.observations.get(key) for key in ("told", "met at"))
        if told and met and told not in met:
            what = f"The launcher had said that the ranks meet at {told}; rank {report.rank} went to {met}, which is a different place on each host, or none."
            at = r"MASTER_ADDR || init_method || init_process_group"
            return grader.diagnosis("overwrites-launcher-environment", what, of=[report.rank], at=at)
    return model.read_helpers(grader, run, cause) or read_loading(grader, run, LOADING)


# The training --------------------------------------------------------------------------------------------------------


def test_samples(grader: Grader) -> None:
    """on two ranks: as many steps as asked for, each on the whole batch, no sample twice in an epoch"""
    model.judge_samples(grader, WORLD)


@pytest.mark.needs("test_samples")
def test_other_worlds(grader: Grader) -> None:
    """the same on one rank and on four"""
    model.judge_samples(grader, 1)
    model.judge_samples(grader, 4)


@pytest.mark.needs("test_samples")
def test_start(grader: Grader) -> None:
    """the weights come from the seed, and AdamW learns at the rate of the step"""
    seed, steps = model.drawn_seed(grader), through(grader).observed("steps")
    began, at = [one[0]["weights"] for one in steps], r"manual_seed || " + TRAIN
    zero = [Hypothesis("ignores-seed", "They are those of seed 0.", model.initial(0), at)]
    what = f"Of the first weights, for --seed {seed}, one"
    grader.explain(what, began, model.initial(seed), zero, otherwise="start-not-seeded", at=at)
    learned, at = [[step["rate"] for step in one] for one in steps], model.RATE
    mistakes, id = model.rate_mistakes(model.LARGEST, learned[0]), "rate-of-another-step"
    what = "Of the learning rates of all steps, one"
    grader.explain(what, learned, model.rates(model.LARGEST), mistakes, otherwise=id, at=at)
    wanted, grouped, others = model.optimizers(began[0], steps[0][0]["gradient"], model.rates(model.LARGEST)[0])
    moved, at = [steps[0][1]["weights"]], r"optimizer = || optim\. || " + TRAIN
    what, id = "After the first step a weight", "wrong-optimizer"
    right = grouped if equal(moved[0], grouped, model.LOOSE) else wanted  # weight decay is often for matrices only
    grader.explain(what, moved, right, others, otherwise=id, at=at, tolerance=model.LOOSE)


@pytest.mark.needs("test_samples")
def test_step(grader: Grader) -> None:
    """a step takes the gradient of the mean over all ranks' samples"""
    model.judge_gradient(grader, through(grader))


@pytest.mark.needs("test_step")
def test_accumulate(grader: Grader) -> None:
    """with --accumulate it is the mean over the micro-batches too, averaged over the ranks once"""
    run = through(grader, WORLD, "--accumulate", "3")
    model.judge_gradient(grader, run, accumulate=3)
    model.judge_samples(grader, WORLD, run)
    size = 4 * model.initial(0).numel()
    for rank, report in enumerate(run.ranks):
        times = [mark.at for mark in report.marks if mark.name == "step"]
        large = [c for c in report.collectives if c.kind == "all_reduce" and c.nbytes >= 64]
        moved = [sum(c.nbytes for c in large if a < c.start < b) for a, b in pairwise(times)]
        what = f"Before step {moved.index(max(moved)) + 2} {{ranks}} averaged {max(moved)} bytes of gradients; the model has {size}. Only the last of 3 micro-batches needs to."
        at = r"no_sync || " + STEP
        grader.fail_on([rank] * (max(moved) > 1.5 * size), "syncs-every-micro-batch", what, at=at)


@pytest.mark.needs("test_accumulate")
def test_clip(grader: Grader) -> None:
    """the gradient is clipped after it has been averaged"""
    clipped = through(grader, WORLD, "--accumulate", "3", "--clip", "0.05")
    model.judge_gradient(grader, clipped, accumulate=3, clip=0.05)


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
        of = data(grader, world)["test"]
        right, otherwise, mistakes = model.metrics(run, of)
        got = [[result["loss"], result["accuracy"]] for result in run.observed("result")]
        model.judge_known(grader, got, right, CLOSE)
        what = f"Of {world} ranks, loss and accuracy ({got[0]}; over the {len(of[0])} samples of the test set {right}): one"
        grader.explain(what, got, right, mistakes, otherwise=otherwise, at=EVALUATION, tolerance=CLOSE)
        looked = [{n for batch in one for n in batch} for one in run.observed("tested")]
        what = f"Each of the {world} ranks evaluated all {len(of[0])} samples of the test set."
        alone = all(len(one) == len(of[0]) for one in looked)
        grader.fail_on(range(world) if alone else (), "work-not-shared", what, at=EVALUATION)
        wrapped = [rank for rank, kinds in enumerate(run.observed("evaluated")) if "DistributedDataParallel" in kinds]
        what = "On {ranks} evaluate was given the DDP wrapper."
        grader.fail_on(wrapped, "evaluates-the-wrapper", what, at=r"evaluate\( || " + EVALUATION)
        model.judge_modes(grader, run)


@pytest.mark.needs("test_step")
def test_loss(grader: Grader) -> None:
    """train_step returns the mean loss of this rank's micro-batches before the step, without a graph"""
    seed, of = model.drawn_seed(grader), data(grader)["train"]
    order = grader.random("parts").sample(range(model.SAMPLES), 18)
    parts = [[order[start : start + 3] for start in (9 * rank, 9 * rank + 3, 9 * rank + 6)] for rank in range(WORLD)]
    run = grader.run("steps_once", WORLD, train=of, samples=parts, seed=seed)
    weights = model.initial(seed)
    right = [model.loss(weights, of, [n for part in own for n in part]).item() for own in parts]
    last = [model.loss(weights, of, own[-1]).item() for own in parts]
    every = [model.loss(weights, of, [n for own in parts for part in own for n in part]).item()] * WORLD
    id, at = "wrong-loss-returned", r"in train_step: return || " + STEP
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
    right, at = list(range(model.AN_EPOCH, TOTAL + 1, model.AN_EPOCH)), r"= evaluate\( || " + TRAIN
    looked = {step for steps in through(grader).observed("tested after") for step in steps}  # one rank may do it all
    after = sorted(looked - {0})  # how good it is before it learns may be asked, too
    id = "evaluates-too-seldom" if set(right) - set(after) else "evaluates-too-often"
    what = f"In {model.EPOCHS} epochs of {model.AN_EPOCH} steps, evaluations were expected after steps {right}; "
    what += f"the test set was evaluated after steps {after}." if after else "the test set was never evaluated."
    grader.fail_on([0] * (after != right), id, what, at=at)


@pytest.mark.needs("test_samples", "test_loss")
def test_speaks(grader: Grader) -> None:
    """rank 0 tells where it starts and how it goes, with the loss over all ranks; no other rank says anything"""
    run = through(grader)
    told = run.ranks[0].stdout
    model.judge_quiet(grader, run)
    at, lines = r"say\(|print\( || " + TRAIN, told.strip().splitlines()
    every = f"--log-every {model.LOG_EVERY}"
    what = f"In {TOTAL} steps and {model.EPOCHS} epochs, with {every}, rank 0 printed {len(lines)} lines."
    enough = len(lines) >= 1 + TOTAL // model.LOG_EVERY + model.EPOCHS and re.search(r"\d\.\d", told)
    grader.fail_on(() if enough else [0], "says-nothing", what, at=at)
    printed = model.steps_told(grader, run)
    what = f"With {every}, rank 0 printed the losses of the steps {', '.join(printed)}."
    # One or two more may agree with another printed number by chance.
    often = len(printed) > TOTAL // model.LOG_EVERY + 2
    grader.fail_on([0] * often, "logs-too-often", what, at=r"log_every || " + at)
    model.judge_logged(grader, run, printed, at)
    told_of = model.steps_told(grader, through(grader, 1, "--log-every", "1"))
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
    trusted = "On {ranks} load called torch.load with weights_only=False."
    grader.fail_on(trusting, "runs-code-from-a-file", trusted, at=LOADING)
    came, what = run.observed("loaded"), "After a save with step 7 on rank 0 and 8 on rank 1, what load returned"
    grader.explain(what, came, [7, [0.0]], otherwise="state-comes-back-changed", at=at)
    there, what = [came is not None for came in run.observed("nothing")], "Without a file, that load returned a state"
    grader.explain(what, there, False, otherwise="fails-without-checkpoints", at=LOADING)
    model.judge_failed_saves(grader, run)


@pytest.mark.needs("test_samples")
def test_saves_when(grader: Grader) -> None:
    """a checkpoint is saved every --save-every steps, and no more often"""
    seen = through(grader).observed("checkpoints")[0]
    saved = [step for step, (before, after) in enumerate(pairwise(seen), 1) if before != after and step < TOTAL]
    right = list(range(SAVE_EVERY, TOTAL, SAVE_EVERY))
    id = "saves-too-seldom" if set(right) - set(saved) else "saves-too-often"
    what = f"In {TOTAL} steps with --save-every {SAVE_EVERY}, the saves expected before the last step are after steps {right}. "
    what += f"{{ranks}} saved after {saved}."
    grader.fail_on([0] * (saved != right), id, what, at=r"save_every || save\( || " + TRAIN)


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
    model.judge_complete(grader, run.observed("result"), through(grader).observed("result"), what)


@pytest.mark.needs("test_killed", "test_accumulate")
def test_asked(grader: Grader) -> None:
    """asked to stop, by SIGUSR1 on one rank or SIGTERM on all, all save after the same step and end without an error"""
    chance = grader.random("asked")
    for number, ranks, more in ((signal.SIGUSR1, [WORLD - 1], ()), (signal.SIGTERM, [0, 1], ("--accumulate", "3"))):
        step, before = chance.choice([0, 1, 6]), chance.random() < 0.5
        run = start(grader, *more, signals={"number": int(number), "ranks": ranks, "step": step, "before": before})
        where = f"in step {step + 1}, {'in the forward pass' if before else 'just after the update of the weights'}"
        full = through(grader, WORLD, *more)
        done, after = job(grader).stops(run, number, ranks, step, where)
        after = after.replace("the job", " ".join(("the job", "with", *more))) if more else after
        model.judge_quiet(grader, run, after)
        left = run.observed("files")[0]
        again = grader.require(start(grader, *more, left=left))
        job(grader).goes_on(again, full, done, after, left, stopped=True)
        job(grader).ends_alike(again, full, done, after)
        model.counted(grader, run, after, done)


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
    world, given = 4, {"arguments": arguments(grader), **data(grader, 4)}
    run = grader.run("on_hosts", world, nodes=2, network=cluster.own_hosts(), **given)
    where = "Ranks 0 and 1 are on {}, 2 and 3 on {}. {{ranks}}".format(*run.observed("host")[::2])
    at = r"LOCAL_RANK.*== *0 || LOCAL_RANK || print\( || def save || " + TRAIN
    for report in run.ranks[1:]:
        said, wrote = report.stdout.strip().splitlines()[:1], report.observations["wrote"]
        grader.fail_on([report.rank] * len(said), "every-rank-speaks", f"{where} printed: {''.join(said)}", at=at)
        too = f"{where} wrote {', '.join(wrote)} too."
        grader.fail_on([report.rank] * bool(wrote), "every-rank-writes", too, at=at)
    model.judge_samples(grader, world, run)


@pytest.mark.needs("test_samples")
def test_refuses(grader: Grader) -> None:
    """a batch that cannot be divided evenly is refused"""
    run = grader.run("refuses", WORLD, arguments=arguments(grader, "--accumulate", "5"))
    said, made, at = run.observed("refused"), run.observed("made"), r"accumulate || " + TRAIN
    bad = [rank for rank, error in enumerate(said) if error == "nothing"]
    late = [rank for rank, steps in enumerate(made) if steps]
    others = [rank for rank, error in enumerate(said) if error != "ValueError"]
    other = f"raised {''.join(said[others[0]] if others else '')}; a ValueError was expected."
    for which, id, how, where in (
        (bad, "uneven-batch-accepted", "trained instead of raising ValueError.", at),
        (late, "uneven-batch-accepted", f"made {max(made)} steps before the ValueError.", at),
        (others, "another-error", other, r"raise || " + at),
    ):
        what = f"--batch-size {model.BATCH} and --accumulate 5 on {WORLD} ranks: {{ranks}} {how}"
        grader.fail_on(which, id, what, at=where)


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
def batch(grader: Grader, request: pytest.FixtureRequest) -> Iterator[Batch]:
    """The jobs that the batch script makes, on one cluster; an array only where a check that is to be run looks at one."""
    needed = {"test_batch_array", "test_batch_node_dies", "test_batch_cancelled"}
    one = Batch(grader, array=not needed.isdisjoint(item.name for item in request.session.items))
    yield one
    one.close()


def test_batch_nodes(grader: Grader, batch: Batch) -> None:
    """train.sbatch: on a SLURM cluster it starts one torchrun on each of two nodes, and all ranks form one group"""
    job = begun(batch)[0]  # where there is no script, this says that the check is not run
    Judge(grader).started(job, ["node0", "node1"])


@pytest.mark.needs("test_batch_nodes")
def test_batch_array(grader: Grader, batch: Batch) -> None:
    """train.sbatch: the tasks of an array share a node, and nothing else"""
    Judge(grader).array(*begun(batch)[1:])


@pytest.mark.needs("test_batch_nodes")
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
