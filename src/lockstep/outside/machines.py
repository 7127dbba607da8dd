"""Looks at a job from all its machines: each is asked by ssh or srun for what it sees, and the answers become one."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from ..ranks.client import SOURCE
from . import attach, jobs
from .attach import Position
from .jobs import Job, NoJob
from .stacks import NoSampler, NotPermitted

PATIENCE = 60.0  # Seconds that a machine has to answer, besides those of the look itself
MARK = "lockstep-answer "
OF_SLURM = ("SLURM_JOB_ID", "SLURMD_NODENAME")


class Unreachable(Exception):
    """No machine has answered. The message says what the way there has said."""


@dataclass(frozen=True)
class Look:
    job: Job
    positions: tuple[Position, ...]


@dataclass(frozen=True)
class Answer:
    """All that one machine has seen, or the `problem` for which it has seen nothing."""

    node: str
    looks: tuple[Look, ...] = ()
    problem: str = ""


def answer(seconds: float) -> str:
    """What this machine says when it is asked: a line. Below srun it is about that job's ranks on that node."""
    node = os.environ.get(OF_SLURM[1]) or platform.node()
    try:
        found = jobs.find(within={name: os.environ[name] for name in OF_SLURM if name in os.environ})
        said = Answer(node, tuple(Look(job, tuple(attach.look(job, seconds))) for job in found))
    except NoJob:
        said = Answer(node)
    except (NotPermitted, NoSampler) as missing:
        said = Answer(node, problem=str(missing))
    return MARK + msgspec.json.encode(said).decode()


def over_ssh(hosts: Sequence[str], seconds: float) -> list[Answer]:
    """The answers of these hosts. One that cannot be reached is an answer with a problem."""
    way = ["ssh", "-o", "BatchMode=yes"]
    with ThreadPoolExecutor(len(hosts)) as pool:
        asked = pool.map(lambda host: _ask([*way, host, shlex.join(_command(seconds))], seconds), hosts)
        return [
            one
            for host, (answers, said) in zip(hosts, asked, strict=True)
            for one in (answers or [Answer(host, problem=f"ssh says: {said}")])
        ]


def over_slurm(job: str, seconds: float) -> list[Answer]:
    """The answers of this job's nodes, from a step beside those that run. Raises Unreachable."""
    count, said = _call(["squeue", "--noheader", "--states=RUNNING", "--format=%D", f"--jobs={job}"])
    if not count.strip().isdigit():
        raise Unreachable(f"job {job} doesn't run" + (f": squeue says: {said}" if said else ""))
    step = ["--overlap", f"--nodes={count.strip()}", "--ntasks-per-node=1"]
    answers, said = _ask(["srun", f"--jobid={job}", *step, *_command(seconds)], seconds)
    if not answers:
        raise Unreachable(f"the nodes of job {job} could not be asked: srun says: {said}")
    return answers


def put_together(answers: Iterable[Answer]) -> list[Look]:
    """One look for each job, with the ranks of all machines. Raises NoJob."""
    looks: dict[tuple[str, ...], Look] = {}
    for one in answers:
        for look in one.looks:
            here = Look(look.job, tuple(replace(position, node=one.node) for position in look.positions))
            known = looks.get(look.job.key)
            looks[look.job.key] = _both(known, here) if known else here
    if not looks:
        raise NoJob("no process of yours on these machines has RANK, WORLD_SIZE and MASTER_ADDR, which torchrun sets")
    return list(looks.values())


def _both(one: Look, other: Look) -> Look:
    positions = {position.rank: position for position in (*other.positions, *one.positions)}
    job = replace(
        one.job,
        processes=dict(sorted({**other.job.processes, **one.job.processes}.items())),
        expected=one.job.expected | other.job.expected,
    )
    return Look(job, tuple(position for _, position in sorted(positions.items())))


def _command(seconds: float) -> list[str]:
    """This program, with this Python and this package: the machines must have both at the same place."""
    arguments = ["attach", "--answer", f"--seconds={seconds}"]
    return ["env", f"PYTHONPATH={SOURCE}", sys.executable, "-m", "lockstep", *arguments]


def _ask(command: Sequence[str], seconds: float) -> tuple[list[Answer], str]:
    """What was answered, and the last thing that was said beside it."""
    printed, said = _call(command, seconds)
    lines = [line.partition(MARK)[2] for line in printed.splitlines() if MARK in line]
    return [msgspec.json.decode(line, type=Answer) for line in lines], said or "it ended without an answer"


def _call(command: Sequence[str], seconds: float = 0.0) -> tuple[str, str]:
    """What the command printed, and the last line of what it said on stderr, or why it said nothing."""
    if shutil.which(command[0]) is None:
        return "", f"there is no {command[0]} on this machine"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE + seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PATIENCE + seconds:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.stdout, lines[-1] if lines else ""
