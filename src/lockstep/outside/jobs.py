"""Finds the processes of a job that is running: its ranks, from the variables that every launcher sets for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ranks.processes import descendants, environment, is_janitor, parents

_SAME_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_LOOPBACK = ("localhost", "127.", "::1")


class NoJob(Exception):
    """There is no such job here. The message says what was looked for."""


@dataclass(frozen=True)
class Job:
    """The ranks of one job on this machine, by number: {rank: process id}.

    `expected` are the ranks that should be here; `guessed` tells that the processes do not say which rank they are. `key`
    is the same on all machines of a job: address and port of its store, number of ranks, torchrun's id.
    """

    processes: dict[int, int]
    world_size: int
    expected: frozenset[int]
    guessed: bool = False
    key: tuple[str, ...] = ()

    @property
    def missing(self) -> list[int]:
        """Ranks that should be on this machine and have no process (any more)."""
        return sorted(self.expected - set(self.processes))

    @property
    def remote(self) -> list[int]:
        """Ranks that run on other machines, as far as is known."""
        return sorted(set(range(self.world_size)) - self.expected - set(self.processes))


def find(pids: Sequence[int] = (), within: Mapping[str, str] | None = None) -> list[Job]:
    """The jobs of this user; with `pids`, those that these processes or their descendants are ranks of. Raises NoJob.

    `within` are variables that the ranks must have.
    """
    known = parents()
    if gone := [pid for pid in pids if pid not in known]:
        raise NoJob(f"there is no process {gone[0]}")
    chosen = {one for pid in pids for one in (pid, *descendants(pid, known))} if pids else set(known)
    told = {pid: environment(pid) for pid in chosen}
    ranks = {
        pid: variables
        for pid, variables in told.items()
        if _is_rank(variables) and (within or {}).items() <= variables.items()
    }
    leaders = {pid for pid in ranks if not _same_rank_above(pid, ranks, known)}
    # torchrun below SLURM has a rank's variables too, those of the task that it is: its ranks are what counts.
    leaders -= {
        pid
        for pid in leaders
        if any(one in leaders and not _alike(ranks[one], ranks[pid]) for one in descendants(pid, known))
    }
    jobs: dict[tuple[str, ...], list[int]] = {}
    for pid in sorted(leaders):
        jobs.setdefault(_key(ranks[pid]), []).append(pid)
    if jobs:
        return [_job({pid: ranks[pid] for pid in members}, known) for members in jobs.values()]
    if not pids:
        raise NoJob(
            "no distributed job of yours runs here: no process has RANK, WORLD_SIZE and MASTER_ADDR, which torchrun sets. "
            "Of ranks that were started without torchrun, give the process ids"
        )
    return [_nameless(pids, known)]


def _is_rank(variables: Mapping[str, str]) -> bool:
    return "MASTER_ADDR" in variables and all(variables.get(name, "").isdigit() for name in ("RANK", "WORLD_SIZE"))


def _key(variables: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(variables.get(name, "") for name in _SAME_JOB)


def _alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return _key(one) == _key(other)


def _same_rank_above(pid: int, ranks: Mapping[int, Mapping[str, str]], known: Mapping[int, int]) -> bool:
    """True for what a rank has started: it has inherited the rank's variables."""
    mine = ranks[pid]
    while (pid := known.get(pid, 0)) in ranks:
        if _alike(ranks[pid], mine) and ranks[pid]["RANK"] == mine["RANK"]:
            return True
    return False


def _job(members: Mapping[int, Mapping[str, str]], known: dict[int, int]) -> Job:
    processes = {int(variables["RANK"]): _python(pid, known) for pid, variables in members.items()}
    first = next(iter(members.values()))
    world_size = int(first["WORLD_SIZE"])
    expected = set(processes)
    for variables in members.values():
        local, count = variables.get("LOCAL_RANK", ""), variables.get("LOCAL_WORLD_SIZE", "")
        if local.isdigit() and count.isdigit():
            start = int(variables["RANK"]) - int(local)
            expected |= set(range(start, min(start + int(count), world_size)))
        elif variables["MASTER_ADDR"].startswith(_LOOPBACK):
            expected |= set(range(world_size))
    return Job(dict(sorted(processes.items())), world_size, frozenset(expected), key=_key(first))


def _python(pid: int, known: dict[int, int]) -> int:
    """The rank itself, where a shell or another program was started in its place."""
    while "python" not in os.path.basename(_executable(pid)):
        children = [child for child, parent in known.items() if parent == pid]
        if len(children) != 1:
            break
        pid = children[0]
    return pid


def _executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return "python"


def _nameless(pids: Sequence[int], known: dict[int, int]) -> Job:
    """Processes that set their variables themselves, which nobody sees from outside: what `mp.spawn` starts, in order."""
    found = list(pids)
    if len(pids) == 1:
        found = sorted(pid for pid, parent in known.items() if parent == pids[0] and not is_janitor(pid)) or found
    return Job(dict(enumerate(found)), len(found), frozenset(range(len(found))), guessed=True)
