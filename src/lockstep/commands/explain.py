"""`lockstep explain`: a job that is gone is explained from what it has left."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..outside import explain, leftovers
from ..ranks.words import names
from .console import room, show_text


def main(paths: Sequence[Path], as_json: bool) -> int:
    """Explain these files, and those in these folders.

    Exit codes: 0 no rank failed or waited, 1 something is explained, 2 a file, or all of them, can't be used.
    """
    found = leftovers.read(paths)
    for line in found.refused:
        print(f"lockstep explain: {line}", file=sys.stderr)
    causes = explain.explain(found)
    if as_json:
        print(json.dumps(explain.to_json(causes, found)))
    elif causes:
        show_text(explain.describe(causes, room()))
    elif found.dumps:
        print(f"NO HANG: {names(found.dumps)} made the same calls, and all of these have ended.")
    elif found.stacks:
        print(f"NO HANG: {names(found.stacks)} waited in no communication call.")
    elif not found.refused:
        print("lockstep explain: no flight-recorder dump, error file or py-spy dump is in there", file=sys.stderr)
    if not causes and not found.refused and (absent := explain.missing(found)) and not as_json:
        print(f"There is no dump of {names(absent)}.")
    if causes:
        return 1
    return 0 if (found.dumps or found.stacks) and not found.refused else 2
