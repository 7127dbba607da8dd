"""What `launch_distributed` has to do.

    launch_distributed(world_size, model_class, data, epochs) -> dict[str, Tensor]

It is called in a process of its own, as a script or a notebook would. The training that it launches is known, so the
weights that it must return can be computed here, and with them those that the usual mistakes return.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Run
from lockstep.ranks.text import evidence

IN_TURN = (1, 3)
WORLD, SAMPLES, EPOCHS, BATCH, RATE = 2, 96, 3, 32, 0.1
MODEL_BYTES = 4 * (6 * 3 + 3)
SPAWN = r"spawn\( || Process\( || elastic_launch || start_processes || def launch_distributed"
RETURN = r"^\s+return || def launch_distributed"
ERROR_FILES = re.compile(r"pytorch-errorfile-|torchelastic_|pymp-")


def dataset(grader: Grader) -> tuple[torch.Tensor, torch.Tensor]:
    """A task that a linear net can learn; drawn anew for every seed."""
    generator = torch.Generator().manual_seed(grader.random("data").randrange(1 << 30))
    features = torch.randn(SAMPLES, 6, generator=generator)
    return features, (features @ torch.randn(6, 3, generator=generator)).argmax(1)


def launched(grader: Grader, world: int = WORLD, epochs: int = EPOCHS) -> Run:
    """Call the submission once, with so many ranks."""
    x, y = dataset(grader)
    return grader.run("launches", 1, launcher=True, ranks=world, x=x, y=y, epochs=epochs)


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    error = cause.error
    text = f"{error.type}: {error.message}" if error else ""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return grader.diagnosis("hard-coded-port", f"The port was taken already: {last}", at=r"\b\d{4,5}\b")
    if "pickle" in text and "local object" in text:
        return grader.diagnosis(
            "raised",
            f"The function given to spawn must be importable by name, and is defined inside another: {last}",
            at=SPAWN,
        )
    if cause.kind == "hang" and len(run.workers) == 1 and "init_process_group" in cause.headline:
        return grader.diagnosis(
            "sequential-workers",
            "One process was started, and launch_distributed waits for its end before it starts the next one, while that "
            "process waits in init_process_group for the others.",
            evidence=evidence(run),
            of=[0],
            at=r"\.join\( || " + SPAWN,
        )
    return None


def workers(run: Run) -> list[dict[str, int]]:
    """Where the training ran: one entry for each process that trained."""
    found = [
        report.observations["trained_in"]
        for report in [*run.ranks, *run.workers]
        if "trained_in" in report.observations
    ]
    return sorted(found, key=lambda one: one["rank"])


def train(grader: Grader, world: int, epochs: int) -> dict[str, torch.Tensor]:
    """The weights of the reference training on `world` ranks: one process on the joined batches."""
    x, y = dataset(grader)
    data = TensorDataset(x, y)
    net = nn.Linear(6, 3)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-0.5, 0.5, 18).view(3, 6))
        net.bias.zero_()
    samplers = [DistributedSampler(data, world, rank) for rank in range(world)]
    for epoch in range(epochs):
        orders = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for start in range(0, len(orders[0]), BATCH):
            loss = sum(nn.functional.cross_entropy(net(x[order[start : start + BATCH]]), y[order[start : start + BATCH]])
                       for order in orders) / world  # fmt: skip
            gradients = torch.autograd.grad(loss, list(net.parameters()))  # type: ignore[arg-type]
            for value, gradient in zip(net.parameters(), gradients, strict=True):
                value.data -= RATE * gradient
    return {f"linear.{name}": value.detach() for name, value in net.state_dict().items()}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Equal up to the order of additions."""
    return set(one) == set(other) and all(
        torch.allclose(one[name].float(), other[name], rtol=1e-3, atol=1e-5) for name in other
    )


def test_starts_the_ranks(grader: Grader) -> None:
    """starts world_size processes that train together"""
    run = launched(grader)
    trained = workers(run)
    launcher = run.observed("launcher")[0]
    if any(one["pid"] == launcher for one in trained):
        grader.fail(
            "parent-trains",
            "The caller's own process trained: launch_distributed is to start processes for that.",
            at=r"train_ddp\( || def launch_distributed",
        )
    sizes = sorted({one["world_size"] for one in trained})
    if len(trained) != WORLD or sizes != [WORLD]:
        of = f", in groups of {sizes}" if sizes not in ([WORLD], []) else ""
        grader.fail(
            "wrong-world-size", f"world_size={WORLD} was asked for; {len(trained)} processes trained{of}.", at=SPAWN
        )
    for report in run.workers:
        moved = sum(call.nbytes for call in report.collectives)
        if "trained_in" in report.observations and moved < EPOCHS * MODEL_BYTES:
            grader.fail(
                "no-communication",
                f"Rank {report.rank} put {moved} bytes into {len(report.collectives)} communication calls in {EPOCHS} epochs; the "
                f"model's gradients alone are {MODEL_BYTES} bytes a step.",
                of=[report.rank],
                at=SPAWN,
            )


@pytest.mark.needs("test_starts_the_ranks")
def test_returns_the_weights(grader: Grader) -> None:
    """returns the trained weights, by the plain model's names"""
    run = launched(grader)
    kind = run.observed("type")[0]
    if kind == "NoneType":
        grader.fail(
            "returns-none",
            "launch_distributed returned None. mp.spawn returns nothing: the weights lived in processes "
            "that have ended.",
            at=RETURN,
        )
    weights = run.observed("weights")[0]
    if not weights:
        grader.fail("wrong-return", f"launch_distributed returned a {kind} without a tensor in it.", at=RETURN)
    if any(name.startswith("module.") for name in weights):
        grader.fail(
            "prefixed-keys",
            f"The keys are {', '.join(map(repr, list(weights)[:2]))}: with the wrapper's prefix a plain "
            "model cannot load them.",
            at=r"state_dict || " + RETURN,
        )
    if close(weights, train(grader, WORLD, EPOCHS)):
        return
    if close(weights, train(grader, WORLD, 0)):
        grader.fail(
            "untrained-weights-returned",
            "The weights that came back are the first ones: what was trained in the other processes did not come back.",
            at=RETURN,
        )
    for epochs in (*range(1, 12), 20, 50, 100):
        if close(weights, train(grader, WORLD, epochs)):
            grader.fail(
                "drops-arguments", f"epochs={EPOCHS} was asked for, and the weights are those after {epochs}.", at=SPAWN
            )
    for world in (1, 3, 4):
        if close(weights, train(grader, world, EPOCHS)):
            grader.fail(
                "wrong-world-size",
                f"world_size={WORLD} was asked for, and the weights are those that {world} "
                f"{'rank gives' if world == 1 else 'ranks give'}.",
                at=SPAWN,
            )
    grader.fail(
        "different-weights",
        f"The weights are not those that {WORLD} ranks get from train_ddp in {EPOCHS} epochs.",
        at=RETURN,
    )


@pytest.mark.needs("test_starts_the_ranks", "test_returns_the_weights")
def test_other_sizes(grader: Grader) -> None:
    """works for one rank and for three, one after the other in one process"""
    x, y = dataset(grader)
    run = grader.run("launches_in_turn", 1, launcher=True, sizes=list(IN_TURN), x=x, y=y, epochs=2)
    returned = run.observed("in turn")[0]
    for number, world in enumerate(IN_TURN):
        if number and close(returned[number], train(grader, IN_TURN[number - 1], 2)):
            grader.fail(
                "returns-stale-file",
                f"After a launch of {IN_TURN[number - 1]} came one of {world}; the weights that came back are those of the "
                "launch before.",
                at=r"load\( || " + RETURN,
            )
        trained = sum(one["world_size"] == world for one in workers(run))
        if trained != world:
            grader.fail("wrong-world-size", f"world_size={world} was asked for; {trained} processes trained.", at=SPAWN)
        if close(returned[number], train(grader, world, 2)):
            continue
        grader.fail(
            "drops-arguments",
            f"With world_size={world} and epochs=2 the weights are not those that {world} ranks get in 2 epochs.",
            at=SPAWN,
        )


@pytest.mark.needs("test_starts_the_ranks")
def test_no_fixed_port(grader: Grader) -> None:
    """finds a free port for every launch"""
    ports = [workers(run)[0]["port"] for run in (launched(grader), launched(grader, 1, 2)) if workers(run)]
    fixed = [port for port in ports if port and grader.line(rf"\b{port}\b")]
    if fixed:
        grader.fail(
            "hard-coded-port",
            f"Port {fixed[0]} was used, and stands in the source. A second launch on this machine at the "
            "same time fails with EADDRINUSE.",
            at=rf"\b{fixed[0]}\b",
        )
    if len(ports) == 2 and ports[0] and ports[0] == ports[1]:
        grader.fail("hard-coded-port", f"Two launches used the same port, {ports[0]}.", at=r"[Pp]ort || MASTER_PORT")


@pytest.mark.needs("test_starts_the_ranks")
def test_failure_reaches_the_caller(grader: Grader) -> None:
    """a failing rank raises in the caller, with its own message"""
    x, y = dataset(grader)
    word = f"{grader.random('word').randrange(1 << 32):08x}"
    run = grader.attempt("breaks", 1, launcher=True, ranks=WORLD, x=x, y=y, epochs=EPOCHS, word=word)
    if run.cause is not None and run.cause.kind in ("hang", "timed out"):
        grader.fail(
            "hang-on-failure",
            f"Rank 1 raised ValueError, and launch_distributed never came back. {run.cause.headline}",
            evidence=evidence(run),
            of=[1],
            at=r"\.join\( || \.get\( || " + SPAWN,
        )
    if run.cause is not None:
        diagnosis = grader.diagnose(run)
        grader.fail(diagnosis.id, diagnosis.message, evidence=diagnosis.evidence, of=diagnosis.ranks)
    error = run.observed("error")[0]
    if error is None:
        grader.fail(
            "swallows-failure",
            "Rank 1 raised ValueError, and launch_distributed returned as if nothing had happened.",
            of=[1],
            at=r"except || \.join\( || " + SPAWN,
        )
    if word not in error:
        grader.fail(
            "error-without-message",
            f"Rank 1 raised 'ValueError: rank 1 ran out of luck ({word})'; what reached the caller "
            f"says nothing of it: {error.splitlines()[0][:160]}",
            of=[1],
            at=r"raise || exitcode || " + SPAWN,
        )


@pytest.mark.needs("test_starts_the_ranks")
def test_leaves_nothing(grader: Grader) -> None:
    """leaves no file, no process and no changed environment behind"""
    run = launched(grader)
    files = [name for name in run.left_files if not ERROR_FILES.search(name)]
    if files:
        grader.fail(
            "leaves-files",
            f"{_some(files)} {'was' if len(files) == 1 else 'were'} left behind.",
            at=r"save\( || mkstemp|mkdtemp|tempfile",
        )
    alive = run.observed("children")[0]
    if alive or run.left_running:
        grader.fail(
            "leaves-processes",
            f"{alive or len(run.left_running)} child processes were still running afterwards.",
            at=SPAWN,
        )
    changed = [name for name in run.observed("changed")[0] if not name.startswith("TORCHELASTIC")]
    if changed:
        grader.fail("leaves-environment", f"The caller's environment was changed: {_some(changed)}.", at=r"environ")


def _some(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
