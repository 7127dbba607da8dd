"""What `setup_ddp` and `cleanup_ddp` have to do.

    setup_ddp(rank, world_size) -> None
    cleanup_ddp() -> None

They are tried as torchrun calls them, as a launcher built on mp.spawn calls them, on two nodes, and on a machine that
seems to have GPUs. What counts is the group that comes out, and that the launcher's variables are left alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Run
from lockstep.ranks.explain import names

INIT = r"init_process_group\( || def setup_ddp"
DESTROY = r"destroy_process_group || def cleanup_ddp"


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    error = cause.error
    if error is not None and error.type == "AddressChanged":
        name, old, new = error.message.split("|")
        port = new if new.isdigit() else new.rsplit(":", 1)[-1]
        fixed = port.isdigit() and grader.line(rf"\b{port}\b") is not None
        message = (
            f"{names(cause.ranks).capitalize()} changed {name} from {old!r}, which the launcher had set, to {new!r}. "
            "Under torchrun nobody listens there, and every rank waits; beside a second job the place is taken."
        )
        if fixed and name != "MASTER_ADDR":
            return grader.diagnosis("hard-coded-port", message, of=cause.ranks, at=rf"\b{port}\b")
        return grader.diagnosis("overwrites-launcher-environment", message, of=cause.ranks, at=rf"{name} || MASTER_")
    if error is not None and ("NCCL" in error.message or "nccl" in error.message):
        return grader.diagnosis(
            "hard-coded-backend",
            f"{names(cause.ranks).capitalize()} asked for nccl on a machine without a GPU: {error}",
            of=cause.ranks,
            at=r"nccl",
        )
    if error is not None and ("CUDA" in error.message or "NVIDIA" in error.message):
        return grader.diagnosis(
            "hard-coded-backend",
            f"{names(cause.ranks).capitalize()} used CUDA on a machine without a "
            f"GPU: {error.type}: {error.message.splitlines()[0]}",
            of=cause.ranks,
            at=r"cuda",
        )
    if error is not None and "KeyError" in error.type:
        return grader.diagnosis(
            "needs-launcher-variable",
            f"{names(cause.ranks).capitalize()} raised {error}: a launcher built on mp.spawn does not set it.",
            of=cause.ranks,
            at=error.frame,
        )
    if error is not None and "environment variable" in error.message:
        return grader.diagnosis(
            "needs-launcher-variable",
            f"{names(cause.ranks).capitalize()}: {error.message} A launcher built "
            "on mp.spawn does not set it: pass rank and world_size on.",
            of=cause.ranks,
            at=INIT,
        )
    return None


def numbers(grader: Grader, world: int) -> list[float]:
    """A number for every rank, which no other rank knows: their sum can only come out of the group."""
    drawn = grader.random(f"numbers {world}")
    return [float(drawn.randrange(1, 1000)) for _ in range(world)]


def play(grader: Grader, scenario: str, world: int, **options: Any) -> Run:
    """Run the scenario, with each rank's own number."""
    return grader.run(scenario, world, each=[{"number": number} for number in numbers(grader, world)], **options)


def look_at_group(grader: Grader, run: Run, label: str = "first") -> None:
    """The group that came out, on every rank."""
    world = run.world_size
    for rank, seen in enumerate(run.observed(label)):
        if not seen["initialized"]:
            grader.fail("no-group", f"After setup_ddp rank {rank} belongs to no process group.", of=[rank], at=INIT)
        if seen["world_size"] == 1 and world > 1:
            grader.fail(
                "own-process-group",
                f"Rank {rank} is alone in a group of its own: world size 1 instead of {world}.",
                of=[rank],
                at=INIT,
            )
        if (seen["rank"], seen["world_size"]) != (rank, world):
            grader.fail(
                "wrong-rank-or-world-size",
                f"setup_ddp({rank}, {world}) made rank {seen['rank']} of {seen['world_size']}.",
                of=[rank],
                at=INIT,
            )
        wanted = sum(numbers(grader, world))
        if seen["sum"] != wanted:
            grader.fail(
                "own-process-group",
                f"The ranks' numbers were summed with all_reduce, and on rank {rank} the sum came out as {seen['sum']:g}; "
                f"{wanted:g} was expected. Not all ranks are in one group.",
                of=[rank],
                at=INIT,
            )


def look_at_environment(grader: Grader, run: Run) -> None:
    """The launcher's variables, after."""
    for rank, changed in enumerate(run.observed("changed")):
        for name, (old, new) in changed.items():
            grader.fail(
                "overwrites-launcher-environment",
                f"Rank {rank} changed {name} from {old!r}, which the launcher had set, to {new!r}.",
                of=[rank],
                at=rf"{name}",
            )


def test_joins_under_torchrun(grader: Grader) -> None:
    """joins all ranks under torchrun, and leaves what it set alone"""
    run = play(grader, "joins", 4, nodes=2, under="torchrun")
    look_at_group(grader, run)
    look_at_environment(grader, run)


def test_joins_under_spawn(grader: Grader) -> None:
    """joins all ranks under mp.spawn, from its arguments alone"""
    run = play(grader, "joins", 2, under="spawn")
    look_at_group(grader, run)
    look_at_environment(grader, run)


@pytest.mark.needs("test_joins_under_torchrun")
def test_leaves(grader: Grader) -> None:
    """cleanup_ddp leaves the group"""
    run = play(grader, "joins", 4, nodes=2, under="torchrun")
    still = [rank for rank, left in enumerate(run.observed("open_after_cleanup")) if left]
    if still:
        grader.fail(
            "cleanup-missing",
            f"After cleanup_ddp {names(still)} still belonged to the process group.",
            of=still,
            at=DESTROY,
        )


@pytest.mark.needs("test_joins_under_spawn", "test_leaves")
def test_can_be_repeated(grader: Grader) -> None:
    """cleanup_ddp may be called without a group and twice, and setup_ddp again after it"""
    run = play(grader, "twice", 2)
    for rank, errors in enumerate(run.observed("errors")):
        for step, error in errors.items():
            if "cleanup" in step:
                grader.fail(
                    "cleanup-not-idempotent",
                    f"On rank {rank} {step} raised {error}. Cleaning up comes last, often after "
                    "another error, and must not add its own.",
                    of=[rank],
                    at=DESTROY,
                )
            grader.fail("setup-not-repeatable", f"On rank {rank} {step} raised {error}.", of=[rank], at=INIT)
    still = [rank for rank, left in enumerate(run.observed("open_between")) if left]
    if still:
        grader.fail(
            "cleanup-missing",
            f"After cleanup_ddp {names(still)} still belonged to the process group.",
            of=still,
            at=DESTROY,
        )
    look_at_group(grader, run, "second")


@pytest.mark.needs("test_joins_under_spawn")
def test_refuses_a_wrong_rank(grader: Grader) -> None:
    """refuses a rank that the world does not have, with ValueError"""
    run = grader.run("refuses", 2)
    for rank, error in enumerate(run.observed("error")):
        if error != "ValueError":
            told = (
                "went on to make the group, which nobody could ever complete"
                if error in ("", "NotRefused")
                else f"raised {error}"
            )
            grader.fail(
                "no-validation",
                f"setup_ddp({2 + rank}, 2) {told}. There is no rank {2 + rank} in a world of 2.",
                of=[rank],
                at=r"def setup_ddp",
            )


@pytest.mark.needs("test_joins_under_torchrun")
def test_says_nothing(grader: Grader) -> None:
    """prints nothing and returns None"""
    run = play(grader, "joins", 4, nodes=2, under="torchrun")
    for report in run.ranks:
        if report.stdout.strip():
            grader.fail(
                "speaks",
                f"Rank {report.rank} printed {report.stdout.strip().splitlines()[0]!r}.",
                of=[report.rank],
                at=r"print\(",
            )
        if report.observations["returned_value"] != "None":
            grader.fail(
                "returns-something",
                f"setup_ddp returned {report.observations['returned_value']} on rank {report.rank}.",
                of=[report.rank],
                at=r"^\s+return",
            )


@pytest.mark.needs("test_joins_under_torchrun")
def test_own_gpus(grader: Grader) -> None:
    """with a GPU for every rank: nccl, and the device of the local rank, chosen before the group is made"""
    run = play(grader, "with_devices", 4, nodes=2, devices=3)  # more GPUs than ranks: rank % GPUs is no local rank
    look_at_backend(grader, run, "nccl", "3 GPUs for the 2 ranks of a node")
    look_at_device(grader, run, {rank: run.ranks[rank].observations["local_rank"] for rank in range(4)})


@pytest.mark.needs("test_own_gpus")
def test_shared_gpu(grader: Grader) -> None:
    """with one GPU for several ranks, or none: gloo"""
    run = play(grader, "with_devices", 2, devices=1)
    look_at_backend(grader, run, "gloo", "one GPU for 2 ranks")
    run = play(grader, "with_devices", 2, devices=0)
    look_at_backend(grader, run, "gloo", "no GPU")
    chosen = [rank for rank, one in enumerate(run.observed("chosen")) if one]
    if chosen:
        grader.fail(
            "hard-coded-backend",
            f"{names(chosen).capitalize()} selected a CUDA device where there is none.",
            of=chosen,
            at=r"set_device",
        )


def look_at_backend(grader: Grader, run: Run, wanted: str, where: str) -> None:
    """Which backend was asked for. None is allowed: PyTorch then makes one for each kind of device."""
    for rank, given in enumerate(run.observed("given")):
        asked = str(given[0]["backend"] or wanted).lower() if given else ""
        fits = wanted in asked and (wanted == "nccl" or "nccl" not in asked)
        if not fits:
            grader.fail(
                "hard-coded-backend",
                f"With {where}, rank {rank} asked for {asked or 'no group'}; {wanted} was expected.",
                of=[rank],
                at=INIT if asked else r"def setup_ddp",
            )


def look_at_device(grader: Grader, run: Run, wanted: dict[int, int]) -> None:
    """Which device was chosen, and whether that came first."""
    for rank, chosen in enumerate(run.observed("chosen")):
        given = run.ranks[rank].observations["given"]
        by_argument = next((str(one["device_id"]) for one in given if one["device_id"]), "")
        device = chosen[-1] if chosen else by_argument.rsplit(":", 1)[-1]
        if not device:
            grader.fail(
                "no-device",
                f"Rank {rank} selected no device: it would work on GPU 0 like every other rank of its node.",
                of=[rank],
                at=r"def setup_ddp",
            )
        if device != str(wanted[rank]):
            grader.fail(
                "device-by-global-rank",
                f"Rank {rank} is local rank {wanted[rank]} of its node, and selected device {device}.",
                of=[rank],
                at=r"set_device || device_id || def setup_ddp",
            )
        order = run.ranks[rank].observations["calls"]
        if chosen and not by_argument and order.index("set_device") > order.index("init_process_group"):
            grader.fail(
                "device-after-init",
                f"Rank {rank} made the group first and selected its device after it.",
                of=[rank],
                at=r"set_device",
            )
