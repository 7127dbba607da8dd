"""What `train_ddp` has to do.

    train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1) -> nn.Module

The ranks report which samples each batch held; from these the whole training is computed again here, in one process on
the joined batches, and compared with what the ranks came back with. Each rank's model is a little different, in a way
that the rank alone knows: its gradients can only come from it. When the two differ, the usual mistakes are
computed as well: the one that gives the submission's own numbers is the diagnosis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Run
from lockstep.ranks.explain import names
from lockstep.ranks.text import evidence as told

# BATCH and WORLD differ, so that a sum over the one is not mistaken for a sum over the other.
NODES = 2
WORLD, SAMPLES, EPOCHS, BATCH, RATE = 4, 96, 3, 6, 0.25
UNEVEN_WORLD, UNEVEN_SAMPLES = 3, 55  # shares of 19, 18 and 18: four batches or three
LOSS_LINE = re.compile(r"^epoch (\d+): loss (-?\d+\.\d{4})$")
TRAIN_CALL = r"\btrain_ddp\(.*(?<!:)$ || def train_ddp"
LOOP = r"for epoch in || for .* in range\( || def train_ddp"
LOADER = r"DataLoader\( || Sampler\( || def train_ddp"
WRAP = r"= *(\w+\.)*(DDP|DistributedDataParallel)\( || def train_ddp"
PRINT = r"print\( || def train_ddp"


# What the runs share -----------------------------------------------------------------------------------------------


def dataset(grader: Grader, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbered samples of a task that a small net can learn; drawn anew for every seed."""
    generator = torch.Generator().manual_seed(grader.random("data").randrange(1 << 30))
    features = torch.randn(count, 6, generator=generator)
    labels = (features @ torch.randn(6, 3, generator=generator)).argmax(1)
    return torch.cat([torch.arange(count).float()[:, None], features], 1), labels


@dataclass
class Training:
    """One training as the ranks reported it."""

    run: Run
    x: torch.Tensor
    y: torch.Tensor
    epochs: int
    batch_size: int
    rate: float
    sharpness: list[float]

    @property
    def batches(self) -> list[list[list[int]]]:
        """batches[rank][step] is the list of sample numbers of that batch."""
        return self.run.observed("batches")

    def order(self, rank: int) -> list[list[int]]:
        """order(rank)[epoch] is the order in which the rank saw its samples."""
        flat = [sample for batch in self.batches[rank] for sample in batch]
        each = len(flat) // self.epochs
        return [flat[epoch * each : (epoch + 1) * each] for epoch in range(self.epochs)]


def train(grader: Grader, world: int, count: int, nodes: int = 1, **options: object) -> Training:
    """Run the submission on `world` ranks, which are told that they are spread over so many nodes."""
    x, y = dataset(grader, count)
    drawn = grader.random(f"ranks of {world}")
    own = [{"sharpness": drawn.uniform(0.5, 1.5), "seed": drawn.randrange(1 << 30)} for _ in range(world)]
    each = [{"own": one} for one in own]
    run = grader.run("trains", world, nodes=nodes, each=each, x=x, y=y, epochs=EPOCHS, options=options)
    sharpness = [one["sharpness"] for one in own]
    return Training(run, x, y, EPOCHS, int(options.get("batch_size", 32)), float(options.get("lr", 0.1)), sharpness)


def main_run(grader: Grader) -> Training:
    """The run that most checks look at: everything divides evenly, and local ranks are not the ranks."""
    return train(grader, WORLD, SAMPLES, nodes=NODES, batch_size=BATCH, lr=RATE)


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    rows = [row for row in cause.rows if row.frame is not None]
    source = grader.submission.text.splitlines()
    evidence = told(run)
    if cause.kind in ("hang", "mismatch"):
        lines = {row.frame.line for row in rows if row.frame and row.frame.file == str(grader.submission.file)}
        guarded = next((line for line in sorted(lines) if _under_rank_condition(source, line)), None)
        steps = [len(counted) for counted in _backward_calls(run)]
        if guarded is not None:
            return grader.diagnosis(
                "rank-conditional-collective",
                f"{_sentence(cause.headline)} Line {guarded} runs on some ranks only, and a "
                "collective is a matter for all of them.",
                evidence=evidence,
                of=cause.ranks,
                at=f"^{re.escape(source[guarded - 1])}$",
            )
        if len(set(steps)) > 1:
            counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
            sampled = grader.line("DistributedSampler") is not None
            return grader.diagnosis(
                "uneven-data-hang",
                f"The ranks took different numbers of steps (backward passes: {counts}), and the one "
                f"with more comes to a call that nobody answers. {_sentence(cause.headline)}",
                evidence=evidence,
                of=cause.ranks,
                at=(r"^\s+(continue|break)\b || " if sampled else "") + LOADER,
            )
    if cause.error is not None and "mutually exclusive with shuffle" in cause.error.message:
        return grader.diagnosis(
            "sampler-and-shuffle", f"{names(cause.ranks).capitalize()} raised {cause.error}", of=cause.ranks, at=LOADER
        )
    if cause.error is not None and "NCCL" in cause.error.message:
        return grader.diagnosis(
            "hard-coded-backend", f"{cause.headline}", evidence=evidence, of=cause.ranks, at=r"nccl"
        )
    return None


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _backward_calls(run: Run) -> list[list[object]]:
    return [[c for c in rank if c.kind == "all_reduce" and c.inside == "backward"] for rank in run.collectives]


def _under_rank_condition(source: list[str], line: int) -> bool:
    """True when the line lies in the body of an `if` that looks at the rank."""
    import ast

    try:
        tree = ast.parse("\n".join(source))
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        condition = ast.unparse(node.test)
        asks_the_rank = "rank" in condition and "world_size" not in condition
        if asks_the_rank and any(part.lineno <= line <= (part.end_lineno or part.lineno) for part in node.body):
            return True
    return False


# The checks --------------------------------------------------------------------------------------------------------


def test_trains_on_every_rank(grader: Grader) -> None:
    """trains on every rank and returns the module itself"""
    training = main_run(grader)
    run = training.run
    idle = [rank for rank, seen in enumerate(training.batches) if not seen]
    if idle:
        grader.fail(
            "no-training", f"{names(idle).capitalize()} never called the model on a batch.", of=idle, at=TRAIN_CALL
        )
    for rank, wrapped in enumerate(run.observed("is_wrapped")):
        kind = run.observed("type")[rank]
        if wrapped:
            grader.fail(
                "wrapped-model-returned",
                f"Rank {rank} got back a {kind}. Its state_dict has keys like "
                "'module.first.weight', which a plain model cannot load.",
                of=[rank],
                at=r"return .*(ddp|model|net) || return",
            )
        if not run.observed("is_module")[rank]:
            grader.fail(
                "nothing-returned",
                f"Rank {rank} got back {kind} instead of the trained module.",
                of=[rank],
                at=r"def train_ddp",
            )


@pytest.mark.needs("test_trains_on_every_rank")
def test_each_sample_on_one_rank(grader: Grader) -> None:
    """each sample is seen by one rank only, and every sample by somebody"""
    training = main_run(grader)
    seen = [sorted(set(training.order(rank)[0])) for rank in range(WORLD)]
    counts = [sum(len(batch) for batch in rank) for rank in training.batches]
    share = SAMPLES // WORLD
    if len(set(map(tuple, seen))) == 1 and len(seen[0]) < SAMPLES and counts[0] <= share * EPOCHS:
        grader.fail(
            "same-shard",
            f"All {WORLD} ranks saw the same {len(seen[0])} samples: {_list(seen[0])}. The other "
            f"{SAMPLES - len(seen[0])} were never used.",
            of=range(WORLD),
            at=LOADER,
        )
    if all(count >= SAMPLES for count in counts) and all(
        len({sample for batch in rank for sample in batch}) == SAMPLES for rank in training.batches
    ):
        grader.fail(
            "no-sampler",
            f"Every rank walked through all {SAMPLES} samples; a shard is {share}. The work is done "
            f"{WORLD} times over.",
            of=range(WORLD),
            at=LOADER,
        )
    if len(set(counts)) > 1 or counts[0] != share * EPOCHS:
        each = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        if counts[0] == share and len(set(counts)) == 1:
            grader.fail(
                "fixed-epochs",
                f"epochs={EPOCHS} was asked for, and each rank saw its {share} samples once.",
                of=range(WORLD),
                at=LOOP,
            )
        if counts[0] and counts[0] % share == 0 and len(set(counts)) == 1:
            grader.fail(
                "fixed-epochs",
                f"epochs={EPOCHS} was asked for, and each rank walked through its shard {counts[0] // share} times.",
                of=range(WORLD),
                at=LOOP,
            )
        grader.fail(
            "drops-samples",
            f"In {EPOCHS} epochs a rank's shard of {share} samples makes {share * EPOCHS}; seen were {each}.",
            of=range(WORLD),
            at=LOADER,
        )
    for epoch in range(EPOCHS):
        owners: dict[int, list[int]] = {}
        for rank in range(WORLD):
            for sample in training.order(rank)[epoch]:
                owners.setdefault(sample, []).append(rank)
        shared = {sample: ranks for sample, ranks in owners.items() if len(ranks) > 1}
        if shared:
            sample, ranks = next(iter(sorted(shared.items())))
            a_node = WORLD // NODES
            if all(seen[rank] == seen[rank % a_node] for rank in range(WORLD)):
                grader.fail(
                    "same-shard",
                    f"On {NODES} nodes with {a_node} ranks each, rank {a_node} saw the samples of rank 0: both are local rank 0 "
                    f"of their nodes. {SAMPLES - len(owners)} samples were seen by nobody. The part of the data goes by the "
                    "global rank.",
                    of=[rank for rank in range(WORLD) if rank % a_node == 0],
                    at=r"LOCAL_RANK|local_rank || " + LOADER,
                )
            grader.fail(
                "seed-per-rank-sampler",
                f"In epoch {epoch} {len(shared)} samples were seen by more than one rank "
                f"(sample {sample} by {names(ranks)}) and {SAMPLES - len(owners)} by nobody: the ranks do not cut "
                "the same permutation.",
                of=ranks,
                at=r"seed || " + LOADER,
            )


@pytest.mark.needs("test_each_sample_on_one_rank")
def test_batch_size(grader: Grader) -> None:
    """each rank's batches have batch_size samples"""
    training = main_run(grader)
    sizes = sorted({len(batch) for rank in training.batches for batch in rank})
    if sizes != [BATCH]:
        grader.fail(
            "ignores-batch-size",
            f"batch_size={BATCH} was asked for, per rank; batches of {_list(sizes)} were seen.",
            at=r"batch_size || " + LOADER,
        )


@pytest.mark.needs("test_each_sample_on_one_rank")
def test_reshuffles(grader: Grader) -> None:
    """every epoch is shuffled anew"""
    orders = main_run(grader).order(0)
    if all(order == sorted(order) for order in orders):
        grader.fail(
            "no-shuffle", f"Rank 0 saw its samples in order, {_list(orders[0])}, in every epoch.", of=[0], at=LOADER
        )
    if all(order == orders[0] for order in orders[1:]):
        grader.fail(
            "missing-set-epoch",
            f"Rank 0 saw the samples {_list(orders[0])} in epoch 0, and the same order in epochs "
            "1 and 2. The sampler shuffles with seed + epoch, and nobody told it the epoch.",
            of=[0],
            at=LOOP,
        )


@pytest.mark.needs("test_trains_on_every_rank")
def test_training_mode(grader: Grader) -> None:
    """the model is in training mode while it trains"""
    modes = main_run(grader).run.observed("modes")
    late = [rank for rank, seen in enumerate(modes) if not all(seen)]
    if late:
        step = modes[late[0]].index(False)
        grader.fail(
            "trains-in-eval-mode",
            f"On {names(late)} the model was in evaluation mode in step {step}: dropout would be "
            "off, and batch norm would not learn its statistics.",
            of=late,
            at=r"\.eval\( || " + LOOP,
        )


@pytest.mark.needs("test_trains_on_every_rank")
def test_parameters(grader: Grader) -> None:
    """parameters are equal on all ranks, and as one process would have them on the joined batches"""
    training = main_run(grader)
    states = training.run.observed("state")
    calls = [len(rank) for rank in _backward_calls(training.run)]
    apart = _first_difference(states)
    if apart is not None:
        rank, name, distance = apart
        _diagnose_drift(grader, training, rank, name, distance)
    steps = min(len(rank) for rank in training.batches)
    wanted = replay(training, "right")
    if _close(states[0], wanted):
        return
    name, distance = _largest(states[0], wanted)
    for mistake, (id, text, at) in MISTAKES.items():
        if _close(states[0], replay(training, mistake)):
            if mistake == "summed" and grader.line(SCALED_RATE):  # the same numbers, for another reason
                id, text, at = SCALES_LR
            grader.fail(
                id,
                f"After {steps} steps {name} is {distance:.2g} away from what one process gets on the joined "
                f"batches. {text}",
                at=at,
            )
    grader.fail(
        "different-weights",
        f"After {steps} steps {name} is {distance:.2g} away from what one process gets on the "
        f"joined batches with SGD, lr={RATE} and cross-entropy ({calls[0]} gradient all-reduces were seen).",
        at=r"\.backward\( || " + LOOP,
    )


def _diagnose_drift(grader: Grader, training: Training, rank: int, name: str, distance: float) -> None:
    run = training.run
    wraps = any(c.inside == "DDP()" for c in run.collectives[0])
    reduced = [len(calls) for calls in _backward_calls(run)]
    apart = f"{name} differs between rank 0 and rank {rank} by {distance:.2g}"
    if not wraps and not any(c.kind == "all_reduce" and c.nbytes > 64 for c in run.collectives[0]):
        grader.fail(
            "not-wrapped",
            f"{apart}: no gradient was ever exchanged, each rank trained a model of its own.",
            of=[0, rank],
            at=r"model_class\( || def train_ddp",
        )
    moved = _moved_after_wrapping(run)
    if wraps and not any(reduced) and moved is not None:
        grader.fail(
            "cast-after-wrapping",
            f"{apart}: rank {moved} moved or cast the model after it was wrapped, and DDP's "
            "hooks were lost without a word.",
            of=[moved],
            at=WRAP,
        )
    if wraps and not any(reduced):
        grader.fail(
            "bypasses-ddp",
            f"{apart}: the model was wrapped, but no backward pass exchanged a gradient. Was the "
            "forward pass called on the wrapper?",
            of=[0, rank],
            at=r"\.module\( || \.backward\( || " + LOOP,
        )
    if all(reduced):
        grader.fail(
            "different-learning-rate-per-rank",
            f"{apart}, though the gradients were averaged {reduced[0]} times: "
            "the ranks did not make the same update with them.",
            of=[0, rank],
            at=r"optim\. || SGD\(",
        )
    grader.fail("drift", f"{apart}.", of=[0, rank], at=r"\.backward\( || " + LOOP)


@pytest.mark.needs("test_parameters")
def test_no_double_work(grader: Grader) -> None:
    """each gradient crosses the network once a step, and the model is moved before it is wrapped"""
    training = main_run(grader)
    state = training.run.observed("state")[0]
    gradient_bytes = sum(value.numel() * 4 for name, value in state.items() if name != "scale")
    for rank, calls in enumerate(training.run.collectives):
        steps = len(training.batches[rank])
        moved = sum(c.nbytes for c in calls if c.kind in ("all_reduce", "all_reduce_coalesced") and c.nbytes > 64)
        if moved > 1.5 * gradient_bytes * steps:
            second = next(
                (c for c in calls if c.kind == "all_reduce" and c.nbytes > 64 and c.inside != "backward"), None
            )
            grader.fail(
                "double-work",
                f"Rank {rank} all-reduced {moved:,} bytes in {steps} steps; the gradients are "
                f"{gradient_bytes * steps:,}. DDP has averaged them already when backward() returns.",
                of=[rank],
                at=second.frame if second else r"all_reduce",
            )
    late = _moved_after_wrapping(training.run)
    if late is not None:
        grader.fail(
            "moved-after-wrapping",
            f"Rank {late} moved the model after it was wrapped. Here that changes nothing; "
            "on a GPU DDP would have been built on the CPU's parameters.",
            of=[late],
            at=WRAP,
        )


def _moved_after_wrapping(run: Run) -> int | None:
    for report in run.ranks:
        wrapped = next((c.number for c in report.collectives if c.inside == "DDP()"), None)
        trained = next((c.number for c in report.collectives if c.inside == "backward"), 1 << 30)
        if wrapped is not None and any(wrapped < m.number < trained and m.name == "model moved" for m in report.marks):
            return report.rank
    return None


@pytest.mark.needs("test_each_sample_on_one_rank")
def test_rank_0_speaks(grader: Grader) -> None:
    """rank 0 alone prints, one line for each epoch"""
    training = main_run(grader)
    speakers = [report.rank for report in training.run.ranks if report.rank and report.stdout.strip()]
    if speakers:
        line = training.run.ranks[speakers[0]].stdout.strip().splitlines()[0]
        grader.fail(
            "every-rank-speaks", f"Rank {speakers[0]} printed {line!r}. Only rank 0 is to speak.", of=speakers, at=PRINT
        )
    printed = [match for line in training.run.ranks[0].stdout.splitlines() if (match := LOSS_LINE.match(line.strip()))]
    if [int(match[1]) for match in printed] != list(range(EPOCHS)):
        said = training.run.ranks[0].stdout.strip().splitlines()
        found = (
            f"Rank 0 printed {said[0]!r}" + (f" and {len(said) - 1} more lines" if len(said) > 1 else "")
            if said
            else ("Rank 0 printed nothing")
        )
        grader.fail(
            "wrong-loss-format" if said else "no-loss-line",
            f"{found}; expected are {EPOCHS} lines like 'epoch 0: loss 2.3021'.",
            of=[0],
            at=PRINT,
        )


@pytest.mark.needs("test_parameters", "test_rank_0_speaks")
def test_reports_global_loss(grader: Grader) -> None:
    """the loss that it prints is the mean over all ranks"""
    training = main_run(grader)
    printed = [match for line in training.run.ranks[0].stdout.splitlines() if (match := LOSS_LINE.match(line.strip()))]
    told = [float(match[2]) for match in printed]
    losses = epoch_losses(training)
    if all(abs(a - b) < 2e-3 for a, b in zip(told, losses["global"], strict=True)):
        return
    epoch = next(e for e in range(EPOCHS) if abs(told[e] - losses["global"][e]) >= 2e-3)
    seen = f"Rank 0 printed {told[epoch]:.4f} for epoch {epoch}; the mean over the {WORLD} ranks was {losses['global'][epoch]:.4f}."
    for kind, id, text in LOSS_MISTAKES:
        if all(abs(a - b) < 2e-3 for a, b in zip(told, losses[kind], strict=True)):
            grader.fail(id, f"{seen} {text}", of=[0], at=PRINT)
    grader.fail("wrong-loss", seen, of=[0], at=PRINT)


@pytest.mark.needs("test_parameters", "test_each_sample_on_one_rank")
def test_uneven_data(grader: Grader) -> None:
    """data that does not divide evenly is trained to the end, each sample included"""
    training = train(grader, UNEVEN_WORLD, UNEVEN_SAMPLES, batch_size=BATCH)
    steps = [len(rank) for rank in training.batches]
    if len(set(steps)) > 1:
        each = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
        grader.fail(
            "uneven-steps",
            f"{UNEVEN_SAMPLES} samples on {UNEVEN_WORLD} ranks gave different numbers of steps ({each}).",
            at=LOADER,
        )
    for epoch in range(EPOCHS):
        missing = set(range(UNEVEN_SAMPLES)) - {s for rank in range(UNEVEN_WORLD) for s in training.order(rank)[epoch]}
        if missing:
            grader.fail(
                "drops-samples",
                f"In epoch {epoch} {len(missing)} of {UNEVEN_SAMPLES} samples were seen by nobody "
                f"({_list(sorted(missing))}).",
                at=r"drop_last || " + LOADER,
            )
    apart = _first_difference(training.run.observed("state"))
    if apart is not None:
        grader.fail(
            "drift",
            f"With {UNEVEN_SAMPLES} samples {apart[1]} differs between rank 0 and rank {apart[0]} by {apart[2]:.2g}.",
            of=[0, apart[0]],
            at=LOOP,
        )


@pytest.mark.needs("test_reports_global_loss", "test_uneven_data")
def test_loss_counts_samples(grader: Grader) -> None:
    """with batches of different sizes, each sample counts once in that mean"""
    training = train(grader, UNEVEN_WORLD, UNEVEN_SAMPLES, batch_size=BATCH)
    table: list[list[float]] = []
    replay(training, "right", table)
    each = len(table) // EPOCHS
    printed = [
        float(match[2])
        for line in training.run.ranks[0].stdout.splitlines()
        if (match := LOSS_LINE.match(line.strip()))
    ]
    for epoch, said in enumerate(printed):
        steps = range(epoch * each, (epoch + 1) * each)
        counted = [(table[s][r], len(training.batches[r][s])) for s in steps for r in range(UNEVEN_WORLD)]
        wanted = sum(loss * count for loss, count in counted) / sum(count for _, count in counted)
        if abs(said - wanted) > 5e-4:
            grader.fail(
                "batch-means-loss",
                f"Rank 0 printed {said:.4f} for epoch {epoch}; the mean over all {sum(count for _, count in counted)} samples was "
                f"{wanted:.4f}. The last batch has {len(training.batches[0][each - 1])} samples and the others {BATCH}: a mean of "
                "the batches' means counts its samples too much.",
                of=[0],
                at=PRINT,
            )


@pytest.mark.needs("test_uneven_data")
def test_learning_rate_and_defaults(grader: Grader) -> None:
    """lr and batch_size have the defaults of the signature, and one rank alone works as well"""
    training = train(grader, 1, SAMPLES)
    sizes = sorted({len(batch) for batch in training.batches[0]})
    if sizes != [32]:
        grader.fail(
            "ignores-batch-size",
            f"Without batch_size, batches of {_list(sizes)} were seen; the default is 32.",
            at=r"def train_ddp",
        )
    if not _close(training.run.observed("state")[0], replay(training, "right")):
        grader.fail(
            "ignores-lr", "Without lr, the weights are not those of SGD with the default lr=0.1.", at=r"SGD\( || lr"
        )


@pytest.mark.needs("test_trains_on_every_rank")
def test_leaves_the_group(grader: Grader) -> None:
    """the process group is closed afterwards"""
    still = [rank for rank, left in enumerate(main_run(grader).run.observed("group_open")) if left]
    if still:
        grader.fail(
            "group-left-open",
            f"After train_ddp returned, {names(still)} still belonged to the process group.",
            of=still,
            at=r"cleanup_ddp\( || ^\s+return || def train_ddp",
        )


@pytest.mark.needs("test_leaves_the_group")
def test_leaves_the_group_after_an_error(grader: Grader) -> None:
    """an error in training reaches the caller, and the group is closed all the same"""
    x, y = dataset(grader, SAMPLES)
    run = grader.run("breaks", 2, x=x, y=y, epochs=EPOCHS, options={"batch_size": BATCH})
    for rank, error in enumerate(run.observed("error")):
        if "broke in its second step" not in error:
            seen = f"{error} came out" if error else "nothing came out"
            grader.fail(
                "swallows-errors",
                f"The model raised RuntimeError in its second step, and on rank {rank} {seen}.",
                of=[rank],
                at=r"except",
            )
    still = [rank for rank, left in enumerate(run.observed("group_open")) if left]
    if still:
        grader.fail(
            "cleanup-skipped-on-error",
            f"The model raised in its second step, and {names(still)} still belonged to the process group afterwards.",
            of=still,
            at=r"cleanup_ddp\( || def train_ddp",
        )


# One process on the joined batches, right and wrong ----------------------------------------------------------------

MISTAKES = {
    "summed": ("gradients-summed", "It is what the sum of the gradients gives; DDP's mean divides by the number of ranks.",
               r"all_reduce || \.backward\("),
    "averaged twice": ("double-averaging", "It is what dividing the averaged gradient by the world size once more gives.",
                       r"/ *=? *(world_size|dist\.get_world_size) || \.backward\("),
    "kept gradients": ("missing-zero-grad", "It is what comes out when each step's gradient is added to those before it.",
                       r"\.backward\("),
    "default rate": ("ignores-lr", f"It is what lr=0.1 gives; lr={RATE} was asked for.", r"SGD\( || lr"),
    "adam": ("wrong-optimizer", "It is what Adam gives; plain SGD was asked for.", r"optim\.Adam || Adam"),
    "adamw": ("wrong-optimizer", "It is what AdamW gives; plain SGD was asked for.", r"optim\.Adam || Adam"),
    "momentum": ("wrong-optimizer", "It is what SGD with momentum 0.9 gives; plain SGD was asked for.", r"momentum || SGD\("),
    "untouched": ("optimizer-on-stale-parameters", "No weight has moved at all: the optimizer does not hold the parameters of "
                  "the model that was trained, or never stepped.", r"optim\.|SGD\("),
    "summed loss": ("sum-not-mean-loss", "It is what the sum of the samples' losses gives instead of their mean.", r"reduction || CrossEntropy|cross_entropy"),
    "last step": ("steps-once-an-epoch", "It is what one update an epoch gives.", r"\.step\("),
}  # fmt: skip

SCALED_RATE = r"\blr\b.*\*.*\b(world|size|n)|\b(world|size|n)\w*(\(\))? *\* *\w*lr\b"
SCALES_LR = (
    "scales-lr",
    "It is what lr · world_size gives. That can be wise, but it is the caller's choice.",
    SCALED_RATE,
)

LOSS_MISTAKES = (
    ("rank 0", "rank-local-loss", "It is rank 0's own mean: what the other ranks saw is not in it."),
    ("last batch", "last-batch-loss", "It is the last batch's loss, not the epoch's mean."),
    ("last global batch", "last-batch-loss", "It is the last step's loss, not the epoch's mean."),
    ("sum over ranks", "sum-not-mean-loss", "It is the sum over the ranks: all_reduce adds, and nobody divided."),
    ("sum over batches", "sum-not-mean-loss", "It is a sum over the batches, not their mean."),
    ("rank 0 sum", "sum-not-mean-loss", "It is the sum over rank 0's batches, not their mean."),
    ("everything summed", "sum-not-mean-loss", "It is the sum over all ranks and batches, not their mean."),
    ("divided twice", "double-averaging-loss", "It is the mean divided by the world size once more."),
    ("after the update", "loss-after-update", "It is computed after the step, not on the way to it."),
)


OTHER_OPTIMIZERS = {
    "adam": lambda values, rate: torch.optim.Adam(values, rate),
    "adamw": lambda values, rate: torch.optim.AdamW(values, rate),
    "momentum": lambda values, rate: torch.optim.SGD(values, rate, momentum=0.9),
}


class Net(nn.Module):
    """The scenario's classifier, for one process."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(*reversed(state["first.weight"].shape))
        self.second = nn.Linear(*reversed(state["second.weight"].shape))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.load_state_dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 7) → (B, 3)."""
        return self.second(torch.tanh(self.first(x[:, 1:]))) * self.scale


def replay(training: Training, how: str, losses: list[list[float]] | None = None) -> dict[str, torch.Tensor]:
    """Train in one process on the batches that the ranks reported, rightly or with one known mistake.

    Returns the weights. `losses[step][rank]` is filled with each rank's mean loss before the step.
    """
    net = Net(training.run.observed("initial")[0])
    world = len(training.batches)
    steps = min(len(rank) for rank in training.batches)
    rate = 0.1 if how == "default rate" else training.rate
    trainable = [value for value in net.parameters() if value.requires_grad]
    optimizer = OTHER_OPTIMIZERS[how](trainable, rate) if how in OTHER_OPTIMIZERS else None
    kept = [torch.zeros_like(value) for value in trainable]
    each_epoch = max(1, steps // training.epochs)
    for step in range(steps):
        means = [
            nn.functional.cross_entropy(net(training.x[training.batches[rank][step]]) * training.sharpness[rank],
                                        training.y[training.batches[rank][step]],
                                        reduction="sum" if how == "summed loss" else "mean")
            for rank in range(world)
        ]  # fmt: skip
        if losses is not None:
            losses.append([float(mean) for mean in means])
        divisor = {"summed": 1, "averaged twice": world * world}.get(how, world)
        gradients = torch.autograd.grad(sum(means) / divisor, trainable)  # type: ignore[arg-type, type-var]
        kept = [a + b for a, b in zip(kept, gradients, strict=True)] if how == "kept gradients" else list(gradients)
        if how == "untouched" or (how == "last step" and (step + 1) % each_epoch):
            continue
        for value, gradient in zip(trainable, kept, strict=True):
            value.grad = gradient.clone()
            if optimizer is None:
                value.data -= rate * gradient
        if optimizer is not None:
            optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


def epoch_losses(training: Training) -> dict[str, list[float]]:
    """The mean loss of each epoch over all ranks, and what the usual mistakes print instead."""
    table: list[list[float]] = []
    replay(training, "right", table)
    each = len(table) // EPOCHS
    found: dict[str, list[float]] = {kind: [] for kind in ("global", *(kind for kind, _, _ in LOSS_MISTAKES))}
    for epoch in range(EPOCHS):
        steps = torch.tensor(table[epoch * each : (epoch + 1) * each])
        mean = float(steps.mean())
        found["global"].append(mean)
        found["rank 0"].append(float(steps[:, 0].mean()))
        found["last batch"].append(float(steps[-1, 0]))
        found["last global batch"].append(float(steps[-1].mean()))
        found["sum over ranks"].append(mean * WORLD)
        found["sum over batches"].append(mean * each)
        found["rank 0 sum"].append(float(steps[:, 0].sum()))
        found["everything summed"].append(float(steps.sum()))
        found["divided twice"].append(mean / WORLD)
        found["after the update"].append(float("nan"))
    return found


# Small words -------------------------------------------------------------------------------------------------------


def _close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].shape == other[name].shape
        and torch.allclose(one[name].float(), other[name].float(), rtol=1e-3, atol=2e-5)
        for name in other
    )


def _largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[str, float]:
    apart = {name: float((one[name].float() - other[name].float()).abs().max()) for name in other
             if name in one and one[name].shape == other[name].shape}  # fmt: skip
    return max(apart.items(), key=lambda item: item[1]) if apart else ("the state_dict", float("nan"))


def _first_difference(states: list[dict[str, torch.Tensor]]) -> tuple[int, str, float] | None:
    for rank, state in enumerate(states[1:], 1):
        name, distance = _largest(state, states[0])
        if not distance <= 1e-6:
            return rank, name, distance
    return None


def _list(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:6])
    return shown + (", …" if len(values) > 6 else "")
