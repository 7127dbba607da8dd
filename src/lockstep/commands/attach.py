"""`lockstep attach`: a job that hangs now is explained from outside, without a restart."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..outside import attach, jobs, machines
from ..outside.attach import Explained
from ..outside.stacks import NoSampler, NotPermitted
from .console import room, show_text

NOT_RUN = 4


def main(pids: Sequence[int], seconds: float, as_json: bool, slurm: str = "", hosts: Sequence[str] = ()) -> int:
    """Explain the jobs of these processes, or all of this user's: here, on a SLURM job's nodes, or on `hosts`.

    Exit codes: 0 something moves in each job, 1 a job is stuck, 2 there is no such job, 4 it may not be read here.
    """
    try:
        if slurm or hosts:
            found = _elsewhere(machines.over_slurm(slurm, seconds) if slurm else machines.over_ssh(hosts, seconds))
        else:
            found = [attach.attach(job, seconds) for job in jobs.find(pids)]
    except (jobs.NoJob, machines.Unreachable) as error:
        print(f"lockstep attach: {error}", file=sys.stderr)
        return 2
    except (NotPermitted, NoSampler) as missing:
        print(f"not run: {missing}", file=sys.stderr)
        return NOT_RUN
    if as_json:
        print(json.dumps([attach.to_json(one) for one in found]))
    else:
        for number, one in enumerate(found):
            said = attach.describe(one, room())
            if len(found) > 1:
                said = f"Job {number + 1} of {len(found)}, {one.job.world_size} ranks\n{said}"
            show_text(("\n" if number else "") + said)
    return 1 if any(one.still for one in found) else 0


def _elsewhere(answers: Sequence[machines.Answer]) -> list[Explained]:
    problems = tuple(f"{one.node} was not looked at: {one.problem}" for one in answers if one.problem)
    try:
        looks = machines.put_together(answers)
    except jobs.NoJob:
        if problems:
            raise machines.Unreachable("; ".join(problems)) from None
        raise
    found = [attach.explain(look.job, look.positions) for look in looks]
    return [replace(one, notes=(*one.notes, *problems)) for one in found]
