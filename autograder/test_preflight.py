"""What `preflight` has to do.

    preflight(timeout=10.0, backend=None) -> list[str]

One thing at a time is broken: a variable, a port, a rank that does not come, a collective that lies. The lines that
come back must name it, on every rank that is there. A call that never comes back is found as a hang, not by a clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import pytest
from judging.preflight import CASES, mentions, mentions_rank, names_backend, situation, variable

from lockstep.grading import Cause, Diagnosis, Grader, Play, Run, ending, evidence, names, one_or_more

OWN_GPUS = True  # preflight rightly names a rank that has none
WORLD = 3
SECONDS = 1.2  # where somebody is waited for until the deadline
TOGETHER = 2.5  # ... and the others need time to meet: more on a busy machine (`time_to_meet`)
SLOWER = 8.0  # Many cases are played at the same time, each so much slower than one that is played alone
LONGEST = 15.0  # ... as much as the scenario keeps a waiting rank from being taken to hang
PATIENT = 30.0  # where nobody should have to wait
HOSTED = 7.0  # ... unless nobody hosts the store, which must be told before the wait is taken for a hang

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

MISSING = [1, 2, 4, 5, 7, 8]  # so many that somebody who waits for each in turn is late
WAITING: dict[str, tuple[list[int], int, dict[str, str | None]]] = {  # the odd ranks, how many there are, changes
    "missing": (MISSING, 9, {}),
    "given, missing": ([1], WORLD, {}),
    "garbled": ([1], WORLD, {"RANK": "one", "LOCAL_RANK": None}),
    "doubled": ([2], WORLD, {"RANK": "1", "LOCAL_RANK": None}),
    "duplicate": ([2], WORLD, {"RANK": "1", "LOCAL_RANK": "1"}),
    "world size": ([1], WORLD, {"WORLD_SIZE": "4"}),
    "no group": ([1], WORLD, {}),
    "local rank": ([1], 2, {"LOCAL_RANK": None}),
}
PORTS = ("nobody", "taken", "foreign", "dropped")


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    case = next((one for one in run.observed("case") if one is not None), None)
    if case is None or cause.kind not in ("hang", "timed out", "mismatch"):
        return None
    said = f"{situation(case)}, and preflight never came back.{ending(cause)}"
    at = cause.frame or next((row.frame for row in cause.rows if row.frame is not None), None) or STORE
    return grader.diagnosis("no-deadline", said, evidence=evidence(run), of=cause.ranks, at=at)


def returned(grader: Grader, found: dict[str, Any], what: str, rank: int = 0, at: str = FUNCTION) -> list[str]:
    """The lines of one call, which returned what it should."""
    said = f"{what}, and preflight ended in {found['raised']}. Return problems as lines: if one rank raises, the others don't learn of it."
    grader.fail_on([rank] if found["raised"] else [], "raises-instead", said, at=at)
    if found["type"]:
        said = f"preflight returned a {found['type']} on rank {rank}, not a list of lines."
        grader.fail("returns-no-list", said, at=r"return")
    lines: list[str] = found["lines"]
    return lines


def unchanged(grader: Grader, found: dict[str, Any], what: str) -> None:
    """No variable has another value than before."""
    if changed := found["changed"]:
        said = f"{what}. After it {', '.join(changed[:3])} had another value."
        at = r"environ\[[^\]]*\] *=(?!=)|environ\.(setdefault|update)|putenv || environ\b"
        grader.fail("changes-environment", said, at=at)


def time_to_meet(grader: Grader) -> float:
    """A timeout in which the ranks of this submission meet on this machine: it has shown how long it takes when all is well."""
    found = together(grader, "well", [], PATIENT).observed("found")
    slowest = max((one.get("seconds", 0.0) for one in found), default=0.0)
    return min(max(TOGETHER, round(SLOWER * slowest, 1)), LONGEST)


def waited(grader: Grader, case: str) -> Run:
    """A case in which the ranks may wait for each other until the deadline: all of those are played at the same time."""
    how: dict[str, dict[str, Any]] = {
        name: {"scenario": "together", "world_size": world, "case": name, "odd": odd, "changes": changes}
        for name, (odd, world, changes) in WAITING.items()
    }
    how["forsaken"] = {"scenario": "forsaken", "world_size": WORLD}
    seconds = time_to_meet(grader)
    grader.play_ahead(Play.of(**one, timeout=seconds) for one in how.values())
    return grader.run(**how[case], timeout=seconds)


def together(
    grader: Grader, case: str, odd: list[int], seconds: float, world: int = WORLD, **changes: str | None
) -> Run:
    """All ranks call it; something is different on the ranks `odd`."""
    return grader.run("together", world, case=case, odd=odd, changes=changes, timeout=seconds)


def everybody(
    grader: Grader, run: Run, what: str, absent: Collection[int] = (), at: str = FUNCTION,
    overlooked: str = "says-all-is-well", odd: Collection[int] = (),
) -> dict[int, list[str]]:  # fmt: skip
    """The lines on each rank that was there; none of them may be empty. If all are, `odd` have what was `overlooked`."""
    found = {rank: one for rank, one in enumerate(run.observed("found")) if rank not in absent}
    lines = {rank: returned(grader, one, what, rank, at) for rank, one in found.items()}
    empty = [rank for rank, own in lines.items() if not own]
    if empty and len(empty) == len(lines):
        said = f"{what}, and preflight returned an empty list on every rank."
        grader.fail(overlooked, said, of=odd or empty, at=at)
    if empty:
        told = next(rank for rank in lines if rank not in empty)
        said = f"{what}. Rank {told} was told: {lines[told][0][:140]!r}. On {names(empty)} the list was empty, and the job continues."
        grader.fail("ranks-left-in-the-dark", said, of=empty, at=SHARED)
    return lines


def everybody_says(grader: Grader, lines: dict[int, list[str]], says: Callable[[list[str]], bool], what: str) -> None:
    """The ranks don't agree on something, and every rank's lines have to say on what."""
    silent = [rank for rank, own in lines.items() if not says(own)]
    if silent:
        said = f"{what}. Every rank's lines must say so; {names(silent)} got {lines[silent[0]][0][:200]!r}"
        grader.fail("disagreement-overlooked", said, of=silent, at=SHARED)


def group_as_before(grader: Grader, run: Run, case: str) -> None:
    """A group that was there still is, and one that was not is gone."""
    odd = [rank for rank, one in enumerate(run.observed("found")) if one and one["group"]]
    if case.startswith("given"):
        what = "A group existed before the call, and none after it on {ranks}."
        grader.fail_on(odd, "destroys-given-group", what, at=r"destroy_process_group")
    what = f"{situation(case)}. After preflight there was a process group on {{ranks}}."
    what += " The job's own init_process_group raises then."
    grader.fail_on(odd, "leaves-its-group", what, at=r"destroy_process_group || " + GROUP)


def in_time(grader: Grader, run: Run, case: str, absent: list[int]) -> None:
    """Whether the others had returned by far in time, by the clock of one that did not call it."""
    if run.observed("late")[absent[0]]:
        what = f"{situation(case)}. With timeout={time_to_meet(grader):g}, the others had not returned after three times as long."
        grader.fail("no-deadline", what, of=[rank for rank in range(run.world_size) if rank not in absent], at=ROLL)


# The checks ----------------------------------------------------------------------------------------------------------


def test_well(grader: Grader) -> None:
    """returns an empty list when all is well, on one rank and on three, and after a restart"""
    for world, case in ((1, "well"), (WORLD, "well"), (2, "restarted")):
        run = together(grader, case, [], PATIENT, world)
        if case == "restarted" and any(run.observed("left")):
            continue  # was not called again; `test_leaves_nothing` says why
        for rank, found in enumerate(run.observed("found")):
            lines = returned(grader, found, f"All was well on {world} rank{'s' if world > 1 else ''}", rank)
            if lines:
                what = "All was well" if case == "well" else f"{situation(case)}. Otherwise all was well"
                said = f"{what}, and rank {rank} was told: {lines[0][:200]!r}"
                grader.fail("cries-wolf", said, of=[rank], at=FUNCTION)


@pytest.mark.needs("test_well")
def test_leaves_nothing(grader: Grader) -> None:
    """leaves no process group and no changed variable behind, and the job can start"""
    run = together(grader, "well", [], PATIENT)
    group_as_before(grader, run, "well")
    for one in run.observed("found"):
        unchanged(grader, one, "preflight was called")
    for rank, left in enumerate(run.observed("left")):
        if left:
            said = f"After preflight rank {rank} finds the key {left[0]!r} in the job's store. The job's own group uses it."
            grader.fail("leaves-its-addresses", said, of=[rank], at=GROUP)
    if any(one != [6.0, True] for one in run.observed("sum")):
        grader.fail("leaves-its-group", "After preflight the job's own group gave a wrong sum.", at=GROUP)


@pytest.mark.needs("test_well")
def test_hosts(grader: Grader) -> None:
    """hosts the store on rank 0 if no agent does, and leaves it to the job"""
    for well in (True, False):
        run = grader.run("hosted", WORLD, well=well, timeout=HOSTED)
        for rank, found in reversed([*enumerate(run.observed("found"))]):  # rank 0 called last, and knows least
            lines = returned(grader, found, situation("hosted"), rank, STORE)
            if well and lines:
                none = " No store answered at MASTER_PORT: rank 0 did not host one." if any(run.observed("job")) else ""
                what = f"{situation('hosted')}.{none} Rank {rank} was told: {lines[0][:200]!r}"
                grader.fail("cries-wolf", what, of=[rank], at=r"TORCHELASTIC_USE_AGENT_STORE || " + STORE)
        errors = run.observed("job")
        cut = [rank for rank, error in enumerate(errors) if error]
        who = "the job's rank 0 could not open it" if cut == [0] else f"{names(cut)} could not reach it"
        what = f"Rank 0 hosted the store{'' if well else ', and rank 1 had another version of torch'}. After preflight {who}: "
        grader.fail_on(cut, "store-kept-from-the-job", what + repr("".join(errors)[:160]), at=STORE)


@pytest.mark.needs("test_well")
def test_barrier(grader: Grader) -> None:
    """calls monitored_barrier in the group, on every rank"""
    run = together(grader, "well", [], PATIENT)
    without = [
        rank for rank, one in enumerate(run.ranks) if "monitored_barrier" not in [c.kind for c in one.collectives]
    ]
    what = "All was well, and {ranks} never called monitored_barrier."
    grader.fail_on(without, "no-monitored-barrier", what, at=r"barrier\( || " + GROUP)


@pytest.mark.needs("test_well")
def test_given_group(grader: Grader) -> None:
    """tries a group that exists already, and leaves it as it is"""
    run = together(grader, "given", [], PATIENT)
    for rank, found in enumerate(run.observed("found")):
        lines = returned(grader, found, situation("given"), rank, GROUP)
        if lines:
            told = f"{situation('given')}; rank {rank} was told: {lines[0][:200]!r}"
            grader.fail("cries-wolf", told, of=[rank], at=GROUP)
        unchanged(grader, found, situation("given"))
    group_as_before(grader, run, "given")
    if any(one != [6.0, True] for one in run.observed("sum")):
        grader.fail("destroys-given-group", "After preflight the group that existed gave a wrong sum.", at=GROUP)


def test_variables(grader: Grader) -> None:
    """names each variable that is missing, no integer or impossible"""
    changes: list[dict[str, str | None]] = [{name: value} for name, value in CASES]
    changes[-1]["TORCHELASTIC_USE_AGENT_STORE"] = None  # a store that rank 0 opens at port 0 is open at any free port
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
        unchanged(grader, found, what)


@pytest.mark.needs("test_variables")
def test_address(grader: Grader) -> None:
    """names an address that does not resolve"""
    addresses = {"no-such-host.invalid": ("no-such-host", "MASTER_ADDR"), "node..cluster": ("",)}  # any line will do
    run = grader.run("alone", 1, cases=[{"MASTER_ADDR": address} for address in addresses], timeout=SECONDS)
    for (address, words), found in zip(addresses.items(), run.observed("found")[0], strict=True):
        what = f"MASTER_ADDR was {address!r}"
        lines = returned(grader, found, what, at=STORE)
        grader.fail_on([0] * (not lines), "port-overlooked", f"{what}, and preflight returned no line.", at=STORE)
        said = f"{what}; preflight says {''.join(lines[:1])[:200]!r}, without the address."
        named = any(word in line for line in lines for word in words)
        grader.fail_on([] if named else [0], "names-no-address", said, at=STORE)


@pytest.mark.needs("test_variables")
def test_ports(grader: Grader) -> None:
    """names a port where nothing listens, and one that is taken"""
    grader.play_ahead(Play.of("ports", 1, kind=kind, timeout=SECONDS) for kind in PORTS)
    for kind in PORTS:
        run = grader.run("ports", 1, kind=kind, timeout=SECONDS)
        port = run.observed("port")[0]
        lines = returned(grader, run.observed("found")[0][0], situation(kind), at=STORE)
        what = f"{situation(kind)} ({port})"
        if not lines:
            grader.fail("port-overlooked", f"{what}, and preflight returned an empty list.", at=STORE)
        if not any(str(port) in line for line in lines):
            grader.fail("names-no-port", f"{what}; preflight says {lines[0][:200]!r}, without the port.", at=STORE)


def on_devices(grader: Grader, gpus: int, local_rank: int, backend: str | None = None, seconds: float = SECONDS) -> Run:
    """Called on a machine that seems to have so many GPUs."""
    return grader.run("devices", 1, gpus=gpus, local_rank=local_rank, backend=backend, timeout=seconds)


def judge_device(grader: Grader, run: Run, says: Callable[[list[str]], bool], what: str, at: str) -> None:
    """What a process was told of a device or backend that does not fit."""
    lines = returned(grader, run.observed("found")[0][0], what, at=at)
    if not says(lines):
        told = f"says {lines[0][:160]!r}" if lines else "returned an empty list"
        grader.fail("device-overlooked", f"{what}, and preflight {told}.", at=at)


@pytest.mark.needs("test_variables")
def test_devices(grader: Grader) -> None:
    """takes nccl where there are GPUs; names a local rank without a GPU, and a backend that is not there"""
    what = "LOCAL_RANK was 2 on a node with 2 GPUs"
    judge_device(grader, on_devices(grader, 2, 2), lambda lines: mentions("LOCAL_RANK", lines), what, DEVICE)
    if grader.device == "cuda":
        return
    for backend, wanted in ((None, "nccl"), ("gloo", "gloo")):
        asked = on_devices(grader, 2, 1, backend, LONGEST).observed("asked for")[
            0
        ]  # it must get there on a busy machine
        given = "no backend given" if backend is None else 'backend="gloo"'
        what = f"On a node with GPUs, and {given}, preflight asked for "
        what += f"{' and '.join(asked) or 'no group'}; a group with {wanted} was expected."
        right = any("nccl" in one for one in asked) == (wanted == "nccl")
        grader.fail_on(() if right else [0], "takes-another-backend", what, at=BACKEND)
    run, what = on_devices(grader, 0, 0, "nccl"), 'backend="nccl" was asked for on a machine without a GPU'
    judge_device(grader, run, lambda lines: any("nccl" in line.lower() for line in lines), what, BACKEND)


@pytest.mark.needs("test_well")
def test_missing_rank(grader: Grader) -> None:
    """names the missing ranks, on all the others, and doesn't wait for longer than it was told"""
    for case, absent, at in (("missing", MISSING, ROLL), ("given, missing", [1], GROUP), ("forsaken", [0], ROLL)):
        run = waited(grader, case)
        lines = everybody(grader, run, situation(case), absent, at=at)
        if case == "missing":
            judge_missing(grader, lines, absent)
        in_time(grader, run, case, absent)


def judge_missing(grader: Grader, lines: dict[int, list[str]], absent: list[int]) -> None:
    """The missing ranks are named on all the others."""
    silent = [rank for rank, own in lines.items() if not all(mentions_rank(one, own) for one in absent)]
    if silent:
        knows = [rank for rank in lines if rank not in silent]
        were = f"{names(silent).capitalize()} {one_or_more(silent, 'was', 'were')}"
        said = f"{situation('missing')}. {were} told: {lines[silent[0]][0][:160]!r}"
        said += f"; only {names(knows)} named all of them." if knows else ", which does not name all of them."
        grader.fail("missing-rank-not-named", said, of=silent, at=ROLL)


@pytest.mark.needs("test_missing_rank")
def test_broken_rank(grader: Grader) -> None:
    """tells all ranks of the one whose variables are wrong"""
    what = situation("garbled")
    lines = everybody(grader, waited(grader, "garbled"), what, at=ROLL)
    if not mentions("RANK", lines[1]):
        said = f"{what}; there preflight says {lines[1][0][:160]!r}."
        grader.fail("names-no-variable", said, of=[1], at=INTEGER)
    for rank in (0, 2):
        if not (mentions_rank(1, lines[rank]) or mentions("RANK", lines[rank])):
            said = f"{what}, so it could not join. Rank {rank} was told: {lines[rank][0][:160]!r}"
            grader.fail("missing-rank-not-named", said, of=[rank], at=ROLL)
    for case, odd in (("local rank", 1), ("garbled", 1), ("doubled", 2)):
        run = waited(grader, case)
        lines = everybody(grader, run, situation(case), at=ROLL)
        if run.observed("met")[odd] and not mentions("LOCAL_RANK", lines[0]):
            said = f"{situation(case)}. That process reached the store, and no line on rank 0 names LOCAL_RANK: the first is {lines[0][0][:160]!r}"
            grader.fail("ranks-left-in-the-dark", said, of=[0], at=SHARED)


@pytest.mark.needs("test_missing_rank")
def test_duplicate_rank(grader: Grader) -> None:
    """names a rank that two processes have"""
    what = situation("duplicate")
    for rank, own in everybody(grader, waited(grader, "duplicate"), what, at=ROLL).items():
        if not mentions_rank(1, own):
            said = f"{what}. Rank {rank} was told: {own[0][:200]!r}"
            grader.fail("duplicate-rank-overlooked", said, of=[rank], at=ROLL)
        if not mentions_rank(2, own):
            said = f"{what}. Rank {rank} was told: {'; '.join(own)[:240]!r}, which does not name rank 2."
            grader.fail("missing-rank-not-named", said, of=[rank], at=ROLL)


@pytest.mark.needs("test_missing_rank")
def test_world_size(grader: Grader) -> None:
    """says that the ranks do not agree on WORLD_SIZE"""
    what = situation("world size")
    lines = everybody(grader, waited(grader, "world size"), what, at=SHARED)
    everybody_says(grader, lines, lambda own: any(re.search(r"(?i)world.?size", line) for line in own), what)


@pytest.mark.needs("test_well")
def test_versions(grader: Grader) -> None:
    """says that the ranks do not have the same torch, or the same backend"""
    run = together(grader, "version", [1], PATIENT, patch=str(grader.random("version").randrange(11, 30)))
    version = run.observed("version")[1]
    what = f"{situation('version')}, {version}"
    lines = everybody(grader, run, what, at=SHARED, overlooked="disagreement-overlooked", odd=[1])
    everybody_says(grader, lines, lambda own: any(version in line for line in own), what)
    if grader.device == "cuda":
        return
    lines = everybody(grader, together(grader, "gpus", [1], time_to_meet(grader)), situation("gpus"), at=SHARED)
    what = f"{situation('gpus')}, so rank 1 took nccl and the others gloo"
    everybody_says(grader, lines, lambda own: all(names_backend(one, own) for one in ("gloo", "nccl")), what)


@pytest.mark.needs("test_well", "test_given_group")
def test_collective(grader: Grader) -> None:
    """sees that an all-reduce of the ranks' numbers gave something else"""
    runs = {
        "lie": together(grader, "lie", [1], PATIENT),
        "given lie": together(grader, "given lie", [1], PATIENT),
        "given and wrong": together(grader, "given and wrong", [2], time_to_meet(grader), RANK="0"),
        "no group": waited(grader, "no group"),
        "no sum": together(grader, "no sum", [0], PATIENT, 1),
    }
    for case, run in runs.items():
        odd = {"given and wrong": [2], "no sum": [0]}.get(case, [1])
        everybody(grader, run, situation(case), at=SUM, overlooked="collective-not-verified", odd=odd)
        group_as_before(grader, run, case)
