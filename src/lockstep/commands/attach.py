"""`lockstep attach`: a job that hangs now is explained from outside, without a restart."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from ..outside import attach, jobs
from ..outside.stacks import NoSampler, NotPermitted
from ..ranks import text
from .console import console, show_text, width

NOT_RUN = 4


def main(pids: Sequence[int], seconds: float, as_json: bool) -> int:
    """Explain the jobs that these processes belong to, or all of this user's.

    Exit codes: 0 something moves in each job, 1 a job is stuck, 2 there is no such job, 4 it may not be read here.
    """
    try:
        found = [attach.attach(job, seconds) for job in jobs.find(pids)]
    except jobs.NoJob as error:
        print(f"lockstep attach: {error}", file=sys.stderr)
        return 2
    except (NotPermitted, NoSampler) as missing:
        print(f"not run: {missing}", file=sys.stderr)
        return NOT_RUN
    if as_json:
        print(json.dumps([attach.to_json(one) for one in found]))
    else:
        room = width() if console().is_terminal else None
        for number, one in enumerate(found):
            said = attach.describe(one)
            if len(found) > 1:
                said = f"Job {number + 1} of {len(found)}, {one.job.world_size} ranks\n{said}"
            show_text(("\n" if number else "") + (text.fit(said, room) if room else said))
    return 1 if any(one.still for one in found) else 0
