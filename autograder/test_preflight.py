"""What `preflight` has to do.

    preflight(timeout=10.0, backend=None) -> list[str]

One thing at a time is broken: a variable, a port, a rank that does not come, a collective that lies. The lines that
come back must name it, on every rank that is there. A call that never comes back is found as a hang, not by a clock.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.grading import Diagnosis, Grader, Run, evidence, names

WORLD = 3
SECONDS = 1.2  # where somebody is waited for until the deadline
TOGETHER = 2.5  # ... and the others need time to meet
PATIENT = 30.0  # where nobody should have to wait

FUNCTION = r"def preflight"
ENVIRONMENT = r"environ|getenv || " + FUNCTION
INTEGER = r"int\(|isdigit|isdecimal || " + ENVIRONMENT
STORE = r"TCPStore\(|rendezvous\( || create_connection|connect || init_process_group\( || " + FUNCTION
GROUP = r"init_process_group\( || " + FUNCTION
ROLL = r"missing\w* (=|\+=) || monitored_barrier || \.wait\(|\.check\( || " + GROUP
SUM = r"all_reduce\( || " + FUNCTION
DEVICE = r"device_count || is_available || " + FUNCTION
BACKEND = r"is_nccl_available || is_available || nccl || " + FUNCTION
SHARED = r"all_gather|gather_object|broadcast_object || \.set\(|compare_set || " + FUNCTION

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CASES: list[tuple[str, str | None]] = [
    *((name, None) for name in VARIABLES),
    *((name, "") for name in ("RANK", "MASTER_ADDR")),
    *((name, "two") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
    ("RANK", "1.0"),
    ("RANK", "1"),  # in a world of one
    ("RANK", "-1"),
    ("WORLD_SIZE", "0"),
    ("LOCAL_RANK", "-1"),
    ("MASTER_PORT", "70000"),
    ("MASTER_PORT", "0"),
]


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    case = next((one for one in run.observed("case") if one is not None), None)
    if case is None:
        return None
    what = situation(case)
    if cause.kind in ("hang", "timed out", "mismatch"):
        headline = cause.headline[0].upper() + cause.headline[1:].rstrip(".")
        return grader.diagnosis(
            "no-deadline",
            f"{what}, and preflight never came back. {headline}.",
            evidence=evidence(run),
            of=cause.ranks,
            at=cause.frame or next((row.frame for row in cause.rows if row.frame is not None), None) or STORE,
        )
    return None


def situation(case: Any) -> str:
    """What was broken, in words."""
    if isinstance(case, int):
        return variable(*CASES[case])
    return {
        "nobody": "Nobody listens at MASTER_PORT",
        "taken": "Rank 0 has to host the store, and another program has the port",
        "foreign": "At MASTER_PORT a program listens that is no store, and says nothing",
        "devices": "The device or backend does not fit",
        "missing": "Rank 1 never came",
        "duplicate": "Two processes had RANK=1, and nobody RANK=2",
        "world size": "WORLD_SIZE was 4 on rank 1 and 3 on the others",
        "version": "Rank 1 had another version of torch than the others",
        "lie": "The all-reduce gave rank 1 a wrong sum",
        "garbled": "RANK was 'one' on rank 1",
        "given and wrong": "A group of 3 existed already, in which rank 2 had RANK=0",
        "given": "A group existed already, and all was well",
        "well": "All was well",
    }[case]


def variable(name: str, value: str | None) -> str:
    """`RANK was not set`."""
    return f"{name} was not set" if value is None else f"{name} was {value!r}"


def mentions(name: str, lines: list[str]) -> bool:
    """Whether some line names this variable, and not only a longer one that ends in it."""
    return any(re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z_])", line) for line in lines)


def mentions_rank(number: int, lines: list[str]) -> bool:
    """Whether some line speaks of this rank: `rank 1`, `ranks 0, 1`, `RANK=1`, `[1]`."""
    pattern = rf"(?i)\branks?\b[^a-z\n]*(?<!\d){number}(?!\d)"
    return any(re.search(pattern, line) for line in lines)


def returned(grader: Grader, found: dict[str, Any], what: str, rank: int = 0, at: str = FUNCTION) -> list[str]:
    """The lines of one call, which returned what it should."""
    if found["raised"]:
        grader.fail(
            "raises-instead",
            f"{what}, and preflight ended in {found['raised']}. What goes wrong belongs in the list: an error on one rank "
            "leaves the others without a word.",
            of=[rank],
            at=at,
        )
    if found["type"]:
        grader.fail(
            "returns-no-list",
            f"preflight returned a {found['type']} on rank {rank}, not a list of lines.",
            at=r"return",
        )
    lines: list[str] = found["lines"]
    return lines


def together(grader: Grader, case: str, odd: int, seconds: float, world: int = WORLD, **changes: str | None) -> Run:
    """All ranks call it; something is different on rank `odd`."""
    return grader.run("together", world, case=case, odd=odd, changes=changes, timeout=seconds)


def everybody(
    grader: Grader, run: Run, what: str, absent: int | None = None, at: str = FUNCTION
) -> dict[int, list[str]]:
    """The lines on each rank that was there; none of them may be empty."""
    found = {rank: one for rank, one in enumerate(run.observed("found")) if rank != absent}
    lines = {rank: returned(grader, one, what, rank, at) for rank, one in found.items()}
    empty = [rank for rank, own in lines.items() if not own]
    if empty and len(empty) == len(lines):
        grader.fail("says-all-is-well", f"{what}, and preflight returned an empty list on every rank.", of=empty, at=at)
    if empty:
        told = next(rank for rank in lines if rank not in empty)
        grader.fail(
            "ranks-left-in-the-dark",
            f"{what}. Rank {told} was told: {lines[told][0][:140]!r}. On {names(empty)} the list was empty, and the job goes on.",
            of=empty,
            at=SHARED,
        )
    return lines


# The checks ----------------------------------------------------------------------------------------------------------


def test_well(grader: Grader) -> None:
    """returns an empty list when all is well, on one rank and on three"""
    for world in (1, WORLD):
        run = together(grader, "well", 0, PATIENT, world)
        for rank, found in enumerate(run.observed("found")):
            lines = returned(grader, found, f"All was well on {world} rank{'s' if world > 1 else ''}", rank)
            if lines:
                grader.fail(
                    "cries-wolf", f"All was well, and rank {rank} was told: {lines[0][:200]!r}", of=[rank], at=FUNCTION
                )


@pytest.mark.needs("test_well")
def test_leaves_nothing(grader: Grader) -> None:
    """leaves no process group and no changed variable behind, and the job can start"""
    run = together(grader, "well", 0, PATIENT)
    found = run.observed("found")
    still = [rank for rank, one in enumerate(found) if one["group"]]
    if still:
        grader.fail(
            "leaves-its-group",
            f"After preflight there was a process group on {names(still)}. The job's own init_process_group raises then.",
            of=still,
            at=r"destroy_process_group || " + GROUP,
        )
    changed = sorted({name for one in found for name in one["changed"]})
    if changed:
        grader.fail(
            "changes-environment", f"After preflight {', '.join(changed[:3])} had another value.", at=r"environ"
        )
    if any(one != [6.0, True] for one in run.observed("sum")):
        grader.fail("leaves-its-group", "After preflight the job's own group gave a wrong sum.", at=GROUP)


@pytest.mark.needs("test_well")
def test_given_group(grader: Grader) -> None:
    """tries a group that exists already, and leaves it as it is"""
    run = together(grader, "given", 0, PATIENT)
    for rank, found in enumerate(run.observed("found")):
        lines = returned(grader, found, situation("given"), rank, GROUP)
        if lines:
            grader.fail(
                "cries-wolf",
                f"A group existed, all was well, and rank {rank} was told: {lines[0][:200]!r}",
                of=[rank],
                at=GROUP,
            )
        if found["group"]:
            grader.fail(
                "destroys-given-group",
                f"A group existed before the call, and none after it on rank {rank}.",
                of=[rank],
                at=r"destroy_process_group",
            )
    if any(one != [6.0, True] for one in run.observed("sum")):
        grader.fail("destroys-given-group", "After preflight the group that existed gave a wrong sum.", at=GROUP)


def test_variables(grader: Grader) -> None:
    """names each variable that is missing, no integer or impossible"""
    changes = [{name: value} for name, value in CASES]
    run = grader.run("alone", 1, cases=changes, timeout=SECONDS)
    for (name, value), found in zip(CASES, run.observed("found")[0], strict=True):
        what = variable(name, value)
        at = rf"{name} || " + (ENVIRONMENT if value is None else INTEGER)
        lines = returned(grader, found, what, at=at)
        if not lines:
            id = "variable-overlooked" if not value else "value-overlooked"
            grader.fail(id, f"{what}, and preflight returned an empty list.", at=at)
        if not mentions(name, lines):
            id = "value-overlooked" if re.fullmatch(r"-?\d+", value or "") else "names-no-variable"
            grader.fail(id, f"{what}; preflight says {lines[0][:200]!r}, without the variable's name.", at=at)


@pytest.mark.needs("test_variables")
def test_address(grader: Grader) -> None:
    """names an address that does not resolve"""
    run = grader.run("alone", 1, cases=[{"MASTER_ADDR": "no-such-host.invalid"}], timeout=SECONDS)
    what = "MASTER_ADDR was 'no-such-host.invalid'"
    lines = returned(grader, run.observed("found")[0][0], what, at=STORE)
    if not lines:
        grader.fail("port-overlooked", f"{what}, and preflight returned an empty list.", at=STORE)
    if not any("no-such-host" in line or "MASTER_ADDR" in line for line in lines):
        grader.fail("names-no-port", f"{what}; preflight says {lines[0][:200]!r}.", at=STORE)


@pytest.mark.needs("test_variables")
def test_ports(grader: Grader) -> None:
    """names a port where nothing listens, and one that is taken"""
    for kind in ("nobody", "taken", "foreign"):
        run = grader.run("ports", 1, kind=kind, timeout=SECONDS)
        port = run.observed("port")[0]
        lines = returned(grader, run.observed("found")[0][0], situation(kind), at=STORE)
        if not lines:
            grader.fail(
                "port-overlooked", f"{situation(kind)} ({port}), and preflight returned an empty list.", at=STORE
            )
        if not any(str(port) in line for line in lines):
            grader.fail(
                "names-no-port",
                f"{situation(kind)} ({port}); preflight says {lines[0][:200]!r}, without the port.",
                at=STORE,
            )


@pytest.mark.needs("test_variables")
def test_devices(grader: Grader) -> None:
    """names a local rank for which there is no GPU, and a backend that is not there"""
    run = grader.run("devices", 1, gpus=2, local_rank=2, backend=None, timeout=SECONDS)
    what = "LOCAL_RANK was 2 on a node with 2 GPUs"
    lines = returned(grader, run.observed("found")[0][0], what, at=DEVICE)
    if not mentions("LOCAL_RANK", lines):
        grader.fail(
            "device-overlooked",
            f"{what}, and preflight {f'says {lines[0][:160]!r}' if lines else 'returned an empty list'}.",
            at=DEVICE,
        )
    if grader.device == "cuda":
        return
    run = grader.run("devices", 1, gpus=0, local_rank=0, backend="nccl", timeout=SECONDS)
    what = 'backend="nccl" was asked for on a machine without a GPU'
    lines = returned(grader, run.observed("found")[0][0], what, at=BACKEND)
    if not any("nccl" in line.lower() for line in lines):
        grader.fail(
            "device-overlooked",
            f"{what}, and preflight {f'says {lines[0][:160]!r}' if lines else 'returned an empty list'}.",
            at=BACKEND,
        )


@pytest.mark.needs("test_well")
def test_missing_rank(grader: Grader) -> None:
    """names the missing rank, on all the others"""
    run = together(grader, "missing", 1, TOGETHER)
    lines = everybody(grader, run, situation("missing"), absent=1, at=ROLL)
    silent = [rank for rank, own in lines.items() if not mentions_rank(1, own)]
    if silent:
        knows = [rank for rank in lines if rank not in silent]
        grader.fail(
            "missing-rank-not-named",
            f"{situation('missing')}. {names(silent).capitalize()} {'was' if len(silent) == 1 else 'were'} told: "
            f"{lines[silent[0]][0][:160]!r}"
            + (f"; only {names(knows)} could say who." if knows else "; who it is nobody says."),
            of=silent,
            at=ROLL,
        )


@pytest.mark.needs("test_missing_rank")
def test_broken_rank(grader: Grader) -> None:
    """tells all ranks of the one whose variables are wrong"""
    run = together(grader, "garbled", 1, TOGETHER, RANK="one")
    lines = everybody(grader, run, situation("garbled"), at=ROLL)
    if not mentions("RANK", lines[1]):
        grader.fail(
            "names-no-variable",
            f"{situation('garbled')}; there preflight says {lines[1][0][:160]!r}.",
            of=[1],
            at=INTEGER,
        )
    for rank in (0, 2):
        if not (mentions_rank(1, lines[rank]) or mentions("RANK", lines[rank])):
            grader.fail(
                "missing-rank-not-named",
                f"{situation('garbled')}, so it could not join. Rank {rank} was told: {lines[rank][0][:160]!r}",
                of=[rank],
                at=ROLL,
            )


@pytest.mark.needs("test_missing_rank")
def test_duplicate_rank(grader: Grader) -> None:
    """names a rank that two processes have"""
    run = together(grader, "duplicate", 2, TOGETHER, RANK="1", LOCAL_RANK="1")
    lines = everybody(grader, run, situation("duplicate"), at=ROLL)
    for rank, own in lines.items():
        if not mentions_rank(1, own):
            grader.fail(
                "duplicate-rank-overlooked",
                f"{situation('duplicate')}. Rank {rank} was told: {own[0][:200]!r}",
                of=[rank],
                at=ROLL,
            )


@pytest.mark.needs("test_missing_rank")
def test_world_size(grader: Grader) -> None:
    """says that the ranks do not agree on WORLD_SIZE"""
    run = together(grader, "world size", 1, TOGETHER, WORLD_SIZE="4")
    lines = everybody(grader, run, situation("world size"), at=SHARED)
    silent = [rank for rank, own in lines.items() if not any(re.search(r"(?i)world.?size", line) for line in own)]
    if silent:
        grader.fail(
            "disagreement-overlooked",
            f"{situation('world size')}. {names(silent).capitalize()}: {lines[silent[0]][0][:200]!r}",
            of=silent,
            at=SHARED,
        )


@pytest.mark.needs("test_well")
def test_versions(grader: Grader) -> None:
    """says that the ranks do not have the same torch"""
    version = f"2.{grader.random('version').randrange(5, 9)}.1"
    run = together(grader, "version", 1, PATIENT, torch=version)
    found = {
        rank: returned(grader, one, situation("version"), rank, SHARED)
        for rank, one in enumerate(run.observed("found"))
    }
    if not any(found.values()):
        grader.fail(
            "disagreement-overlooked",
            f"{situation('version')}, {version}, and preflight returned an empty list on every rank.",
            of=[1],
            at=SHARED,
        )
    lines = everybody(grader, run, situation("version"), at=SHARED)
    silent = [rank for rank, own in lines.items() if not any(version in line for line in own)]
    if silent:
        grader.fail(
            "disagreement-overlooked",
            f"{situation('version')}, {version}. {names(silent).capitalize()}: {lines[silent[0]][0][:200]!r}",
            of=silent,
            at=SHARED,
        )


@pytest.mark.needs("test_well", "test_given_group")
def test_collective(grader: Grader) -> None:
    """sees that an all-reduce of the ranks' numbers gave something else"""
    for case, odd, changes in (("lie", 1, {}), ("given and wrong", 2, {"RANK": "0"})):
        run = together(grader, case, odd, PATIENT if case == "lie" else TOGETHER, **changes)
        found = [returned(grader, one, situation(case), rank, SUM) for rank, one in enumerate(run.observed("found"))]
        if not any(found):
            grader.fail(
                "collective-not-verified",
                f"{situation(case)}, and preflight returned an empty list on every rank.",
                of=[odd],
                at=SUM,
            )
        everybody(grader, run, situation(case), at=SUM)
