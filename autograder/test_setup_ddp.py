"""What `setup_ddp` and `cleanup_ddp` have to do.

    setup_ddp(rank, world_size) -> None
    cleanup_ddp() -> None

They are tried as torchrun calls them, as a launcher built on mp.spawn calls them, on two nodes, alone, and on a machine
that seems to have GPUs. What counts is the group that comes out, and that the launcher's variables are left alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from judging.launch_distributed import port_was_taken

from lockstep.grading import Cause, Diagnosis, Frame, Grader, Run, names, wrong_ranks

INIT = r"init_process_group\( || def setup_ddp"
DESTROY = r"destroy_process_group || def cleanup_ddp"
SETUP = r"def setup_ddp"

# What is to be refused, how, and what the call was.
REFUSED = {
    "rank too large": ("ValueError", "rank {world} or higher, in a world of {world}"),
    "negative rank": ("ValueError", "rank -1"),
    "no ranks": ("ValueError", "rank 0 in a world of 0"),
    "RANK contradicts": ("ValueError", "a rank that isn't the launcher's RANK"),
    "WORLD_SIZE contradicts": ("ValueError", "a world_size that isn't the launcher's WORLD_SIZE"),
    "WORLD_SIZE contradicts a single rank": ("ValueError", "rank 0 in a world of 1 and WORLD_SIZE {world} set"),
    "no MASTER_ADDR": ("ValueError or RuntimeError", "{world} ranks and no MASTER_ADDR"),
    "no MASTER_PORT": ("ValueError or RuntimeError", "{world} ranks and no MASTER_PORT"),
}
ALONE = {
    "alone": "without any variable",
    "alone with its rank": "with RANK and WORLD_SIZE alone",
    "alone with an address": "with MASTER_ADDR alone",
}
# What an error of a run that failed has in it, the diagnosis, what it means, and the line to show.
ERRORS = (
    (r"NCCL", "hard-coded-backend", "asked for nccl on a machine without a GPU", r"nccl"),
    (r"nccl", "hard-coded-backend", "asked for nccl on a machine without a GPU", r"nccl"),
    (r"CUDA", "hard-coded-backend", "used CUDA on a machine without a GPU", r"cuda"),
    (r"NVIDIA", "hard-coded-backend", "used CUDA on a machine without a GPU", r"cuda"),
    (r"KeyError", "needs-launcher-variable", "needed a variable that a launcher built on mp.spawn does not set", r"environ\["),
    (r"environment variable", "needs-launcher-variable", "was not told what a launcher built on mp.spawn passes as rank and "
     "world_size, and sets no variable for", INIT),
)  # fmt: skip


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    error = cause.error
    if cause.kind == "hang" and (alone := raised_alone(grader, run)):  # the ranks' next groups have other numbers
        return grader.diagnosis("needs-launcher-variable", **alone)
    if error is None:
        return None
    who = names(cause.ranks).capitalize()
    if error.type == "AddressChanged":
        name, old, new = error.message.split("|")
        port = new if new.isdigit() else new.rsplit(":", 1)[-1]
        fixed = port.isdigit() and grader.line(rf"\b{port}\b") is not None and name != "MASTER_ADDR"
        message = (
            f"{who} changed {name} from {old!r}, which the launcher had set, to {new!r}. "
            "Under torchrun no store listens there, so every rank waits; next to a second job the address is taken."
        )
        id, at = (
            ("hard-coded-port", rf"\b{port}\b") if fixed else ("overwrites-launcher-environment", rf"{name} || MASTER_")
        )
        return grader.diagnosis(id, message, of=cause.ranks, at=at)
    for word, id, meaning, at in ERRORS:
        if word in f"{error.type}: {error.message}":
            place = error.frame if word == "KeyError" else at
            return grader.diagnosis(id, f"{who} {meaning}: {error}", of=cause.ranks, at=place)
    return None


def raised_alone(grader: Grader, run: Run) -> dict[str, Any] | None:
    """What two single ranks, each in a process of its own at the same time, raised: the message, the ranks and the line."""
    for label, having in ALONE.items():
        errors = run.observed(f"{label} raised")
        if raised := [rank for rank, error in enumerate(errors) if error]:
            at = Frame.of((grader.submission.file, run.observed(f"{label} raised at")[raised[0]] or None, ""))
            error = errors[raised[0]].rstrip(".")
            said = f"setup_ddp(0, 1) {having} raised {error}."
            if port_was_taken(error):
                said = f"Two processes called setup_ddp(0, 1) at once, {having}. One raised {error}: the other had the port."
            return {"message": said, "of": raised, "at": at or INIT}
    return None


def numbers(grader: Grader, world: int) -> list[float]:
    """A number for every rank, which no other rank knows: their sum can only come out of the group."""
    drawn = grader.random(f"numbers {world}")
    return [float(drawn.randrange(1, 1000)) for _ in range(world)]


def play(grader: Grader, scenario: str, world: int, **options: Any) -> Run:
    """Run the scenario, with each rank's own number."""
    return grader.run(scenario, world, each=[{"number": number} for number in numbers(grader, world)], **options)


def under_torchrun(grader: Grader) -> Run:
    """Two nodes with two ranks each: the local rank is not the rank."""
    return play(grader, "joins", 4, nodes=2, under="torchrun")


def look_at_group(grader: Grader, run: Run, label: str = "first") -> None:
    """The group that came out, on every rank."""
    world, groups = run.world_size, run.observed(label)
    none = [rank for rank, seen in enumerate(groups) if not (seen and seen["initialized"])]
    grader.fail_on(none, "no-group", "After setup_ddp {ranks} belonged to no process group.", at=INIT)
    alone = [rank for rank, seen in enumerate(groups) if seen["world_size"] == 1 < world]
    said = f"Expected one group of {world} ranks; after setup_ddp {{ranks}} had a group of one."
    grader.fail_on(alone, "own-process-group", said, at=INIT)
    seen_as = [(seen["rank"], seen["world_size"]) for seen in groups]
    others = [rank for rank, seen in enumerate(seen_as) if seen != (rank, world)]
    said = "".join(f"setup_ddp({r}, {world}) made rank {seen_as[r][0]} of {seen_as[r][1]}." for r in others[:1])
    grader.fail_on(others, "wrong-rank-or-world-size", said, at=INIT)
    total, sums = sum(numbers(grader, world)), [seen["sum"] for seen in groups]
    apart = wrong_ranks(sums, total)
    said = "".join(
        f"Expected {total:g} from an all_reduce of the ranks' numbers; rank {r} got {sums[r]:g}. " for r in apart[:1]
    )
    grader.fail_on(apart, "own-process-group", f"{said}The ranks are not all in one group.", at=INIT)


def look_at_environment(grader: Grader, run: Run, label: str = "written") -> None:
    """The launcher's variables are read, and never written, not even with the value that they have."""
    for rank, written in enumerate(run.observed(label)):
        for name, value in written.items():
            did = f"removed {name}" if value is None else f"set {name} to {value!r}"
            said = f"Rank {rank} {did}. Read the launcher's variables; never write them."
            grader.fail("overwrites-launcher-environment", said, of=[rank], at=name)


def test_joins_under_torchrun(grader: Grader) -> None:
    """joins all ranks under torchrun, without changing its variables"""
    look_at_group(grader, under_torchrun(grader))
    look_at_environment(grader, under_torchrun(grader))


def test_joins_under_spawn(grader: Grader) -> None:
    """joins all ranks under mp.spawn, from its arguments alone"""
    run = play(grader, "joins", 3, under="spawn")
    look_at_group(grader, run)
    look_at_environment(grader, run)


@pytest.mark.needs("test_joins_under_torchrun")
def test_leaves(grader: Grader) -> None:
    """cleanup_ddp leaves the group"""
    left_open(grader, under_torchrun(grader), "open_after_cleanup")


def left_open(grader: Grader, run: Run, label: str) -> None:
    """Whether a group was there after cleanup_ddp."""
    still = [rank for rank, left in enumerate(run.observed(label)) if left]
    grader.fail_on(
        still, "cleanup-missing", "After cleanup_ddp {ranks} still belonged to the process group.", at=DESTROY
    )


@pytest.mark.needs("test_joins_under_spawn", "test_leaves")
def test_can_be_repeated(grader: Grader) -> None:
    """cleanup_ddp may be called without a group and twice, and setup_ddp again after it"""
    run = play(grader, "twice", 2)
    for rank, errors in enumerate(run.observed("errors")):
        for step, error in errors.items():
            cleans = "cleanup" in step
            why = " Cleanup often runs after another error and must not raise its own." if cleans else ""
            id, at = ("cleanup-not-idempotent", DESTROY) if cleans else ("setup-not-repeatable", INIT)
            if error.startswith("AddressChanged: "):
                _, now, used = error.removeprefix("AddressChanged: ").split("|")
                said = f"On rank {rank} the second setup_ddp used {used}, but by then MASTER_PORT was {now}. Read the address again in each call."
                grader.fail(id, said, of=[rank], at=r"cache || store is None || init_method *= || MASTER_ || " + INIT)
            grader.fail(id, f"On rank {rank} {step} raised {error}.{why}", of=[rank], at=at)
    left_open(grader, run, "open_between")
    for report in run.ranks:
        begins, ends = (mark.number for mark in report.marks if mark.name in ("cleanup", "cleaned up"))
        for call in (call for call in report.collectives if begins < call.number <= ends):
            said = f"cleanup_ddp called {call.kind} on rank {report.rank}, which waits until all ranks have called it. After an error the others may not clean up."
            grader.fail("cleanup-waits", said, of=[report.rank], at=call.frame or r"barrier || " + DESTROY)
    look_at_group(grader, run, "second")
    look_at_environment(grader, run, "written again")


@pytest.mark.needs("test_can_be_repeated")
def test_alone(grader: Grader) -> None:
    """a single rank needs no launcher and no variable"""
    run = play(grader, "limits", 2)
    if raised := raised_alone(grader, run):
        grader.fail("needs-launcher-variable", **raised)
    for label, having in ALONE.items():
        for rank, seen in enumerate(run.observed(label)):
            if seen["initialized"] is not True or (seen["rank"], seen["world_size"]) != (0, 1):
                said = f"setup_ddp(0, 1) {having} made {'another group' if seen['initialized'] else 'no group'}."
                grader.fail("no-group", said, of=[rank], at=INIT)
        look_at_environment(grader, run, f"written {label}")


@pytest.mark.needs("test_can_be_repeated")
def test_refuses_a_wrong_rank(grader: Grader) -> None:
    """refuses a rank outside the world, a rank that contradicts the launcher, and a missing address"""
    run = play(grader, "limits", 2)
    for label, (expected, call) in REFUSED.items():
        errors = [refused[label] for refused in run.observed("refused")]
        accepted = [rank for rank, error in enumerate(errors) if not set(expected.split(" or ")) & set(error.split())]
        told = {errors[rank].partition(" ")[0] for rank in accepted} - {"", "NotRefused"}
        seen = f"raised {', '.join(sorted(told))}" if told else "created the group"
        said = f"Expected {expected} from setup_ddp with {call.format(world=2)}; on {{ranks}} it {seen}."
        grader.fail_on(accepted, "no-validation", said, at=SETUP)


@pytest.mark.needs("test_can_be_repeated")
def test_keeps_the_callers_group(grader: Grader) -> None:
    """refuses to join where the caller has a group already, and leaves that group alone"""
    run = play(grader, "limits", 2)
    errors = run.observed("in a group")
    accepted = [rank for rank, error in enumerate(errors) if not {"ValueError", "RuntimeError"} & set(error.split())]
    said = "The caller already belonged to a process group, but setup_ddp raised neither ValueError nor RuntimeError on {ranks}."
    grader.fail_on(accepted, "second-group-accepted", said, at=SETUP)
    lost = [rank for rank, kept in enumerate(run.observed("kept")) if not kept]
    said = "setup_ddp was called in a process group that the caller had made, and on {ranks} that group is gone."
    grader.fail_on(lost, "second-group-accepted", said, at=DESTROY)
    still = [rank for rank, left in enumerate(run.observed("open after cleanup")) if left]
    said = "cleanup_ddp didn't leave a group that the caller had made without setup_ddp: {ranks} still belonged to it afterwards."
    grader.fail_on(still, "cleanup-missing", said, at=DESTROY)


@pytest.mark.needs("test_joins_under_torchrun", "test_can_be_repeated")
def test_says_nothing(grader: Grader) -> None:
    """prints nothing and returns None"""
    look_at_output(grader, under_torchrun(grader))
    look_at_output(grader, play(grader, "limits", 2))
    for report in under_torchrun(grader).ranks:
        if (returned := report.observations["returned_value"]) != "None":
            said = f"setup_ddp returned {returned} on rank {report.rank}."
            grader.fail("returns-something", said, of=[report.rank], at=r"^\s+return")


def look_at_output(grader: Grader, run: Run) -> None:
    """Whether the submission printed anything."""
    for report in run.ranks:
        if said := report.stdout.strip():
            said = f"Rank {report.rank} printed {said.splitlines()[0]!r}."
            grader.fail("speaks", said, of=[report.rank], at=r"print\(")


@pytest.mark.needs("test_joins_under_torchrun")
def test_own_gpus(grader: Grader) -> None:
    """with a GPU for every rank: nccl, and the device of the local rank, chosen before the group is made"""
    run = play(grader, "with_devices", 2, devices=2, under="spawn")  # LOCAL_RANK is not set
    look_at_backend(grader, run, "nccl", "With 2 GPUs for 2 ranks")
    several = play(grader, "with_devices", 4, nodes=2, devices=3)  # more GPUs than ranks: rank % GPUs is no local rank
    look_at_backend(grader, several, "nccl", "With 3 GPUs for the 2 of 4 ranks that a node has")
    look_at_device(grader, several)
    look_at_device(grader, run)
    if all(run.observed("given alone")):  # where it raised, `test_alone` says so
        look_at_backend(grader, run, "nccl", "With a GPU for the only rank", "given alone")
    look_at_output(grader, run)


@pytest.mark.needs("test_own_gpus")
def test_shared_gpu(grader: Grader) -> None:
    """with fewer GPUs than ranks, or none: gloo"""
    run = play(grader, "with_devices", 6, nodes=2, devices=2)  # rank 3 is local rank 0
    look_at_backend(grader, run, "gloo", "With 2 GPUs for the 3 ranks of each node")
    look_at_device(grader, run, gpus=2)
    look_at_output(grader, run)
    run = play(grader, "with_devices", 3, devices=2, under="spawn")  # LOCAL_WORLD_SIZE is not set
    look_at_backend(grader, run, "gloo", "With 2 GPUs for 3 ranks, without LOCAL_WORLD_SIZE")
    look_at_device(grader, run, gpus=2)
    run = play(grader, "with_devices", 2, devices=0)
    look_at_backend(grader, run, "gloo", "Without a GPU")
    chosen = [rank for rank, one in enumerate(run.observed("chosen")) if one]
    said = "{ranks} selected a CUDA device on a machine without one."
    grader.fail_on(chosen, "hard-coded-backend", said, at=r"set_device")


def look_at_backend(grader: Grader, run: Run, wanted: str, where: str, label: str = "given") -> None:
    """Which backend was asked for. None is allowed: PyTorch then makes one for each kind of device."""
    asked = [str(given[0]["backend"] or wanted).lower() if given else "no group" for given in run.observed(label)]
    wrong = [rank for rank, one in enumerate(asked) if wanted not in one or (wanted == "gloo" and "nccl" in one)]
    said = "".join(f"{where}, {wanted} is expected; {{ranks}} asked for {asked[rank]}." for rank in wrong[:1])
    alone = r"process_group\([\"']gloo || " if label != "given" else ""
    places = r"nccl || \bbackend *= || " if wanted == "gloo" else r"\bbackend *= || nccl || "
    grader.fail_on(wrong, "hard-coded-backend", said, at=alone + places + INIT)


def look_at_device(grader: Grader, run: Run, gpus: int = 1 << 30) -> None:
    """Which device was chosen, and whether that came first."""
    for report in run.ranks:
        seen, rank = report.observations, report.rank
        by_argument = next((str(one["device_id"]) for one in seen["given"] if one["device_id"]), "")
        device = str(seen["chosen"][-1]) if seen["chosen"] else by_argument.rsplit(":", 1)[-1]
        right = seen["local_rank"] % gpus
        if not device:
            said = f"Rank {rank} selected no device: it would use GPU 0, like every other rank of its node."
            grader.fail("no-device", said, of=[rank], at=SETUP)
        if device != str(right):
            said = (
                f"Expected GPU {right} for rank {rank}, which is local rank {seen['local_rank']}; it selected {device}."
            )
            grader.fail("device-by-global-rank", said, of=[rank], at=r"set_device || device_id || def setup_ddp")
        order = seen["calls"]
        if seen["chosen"] and not by_argument and order.index("set_device") > order.index("init_process_group"):
            said = f"Rank {rank} created the group first and selected its device afterwards."
            grader.fail("device-after-init", said, of=[rank], at=r"set_device")
