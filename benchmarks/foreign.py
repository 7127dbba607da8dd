"""The foreign bank: of each bug, is the cause told, the rank and the line? See `tests/support/foreign.py`.

    python benchmarks/foreign.py [WORD ...] [--torchrun SECONDS] [--show]

Prints a line for each bug whose name has a WORD in it: right, partly or not, and what is missing; at the end the sums.
With `--torchrun`, each is played under torchrun too, for so long at most, with the rank that it names as the first to fail.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from support import foreign  # noqa: E402


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("words", nargs="*")
    options.add_argument("--torchrun", type=float, metavar="SECONDS")
    options.add_argument("--show", action="store_true", help="print the explanations that are not right")
    given = options.parse_args()
    counts: Counter[str] = Counter()
    wrongly = 0
    for bug in foreign.bugs():
        if given.words and not any(word in str(bug) for word in given.words):
            continue
        if why := foreign.lacking(bug):
            counts["skipped"] += 1
            print(f"skipped {bug}: {why}", flush=True)
            continue
        told = foreign.play(bug)
        verdict = foreign.judge(bug, told)
        counts[verdict.word] += 1
        wrongly += verdict.wrongly
        missing = [part for part in ("cause", "ranks", "line") if not getattr(verdict, part)]
        accused = f" (accuses {sorted(told.accused)})" if verdict.wrongly else ""
        beside = f"   torchrun: {torchrun(bug, given.torchrun)}" if given.torchrun and not bug.spawns else ""
        lacks = f": {', '.join(missing)}{accused}" if missing else ""
        print(f"{verdict.word:7} {told.seconds:5.1f} s  {bug}{lacks}{beside}", flush=True)
        if given.show and missing:
            print(
                "    " + told.text.strip().replace("\n", "\n    ") + f"\n    (expected lines {sorted(bug.lines())})\n",
                flush=True,
            )
    judged = counts["right"] + counts["partly"] + counts["not"]
    print(f"\nOf {judged}: {counts['right']} right, {counts['partly']} partly, {counts['not']} not; "
          f"{wrongly} accuse a wrong rank; {counts['skipped']} skipped")  # fmt: skip
    return 0 if counts["right"] == judged else 1


def torchrun(bug: foreign.Bug, seconds: float) -> str:
    """What torchrun makes of the same job within so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{bug.job}.py")
        script.write_text(bug.script())
        command = ["timeout", "-k", "5", str(seconds), sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={bug.n}", str(script)]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, env={**os.environ, "OUT": folder, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True,
        )  # fmt: skip
    took = f"{time.monotonic() - began:.0f} s"
    first = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(\S+)", done.stderr, re.DOTALL)
    if done.returncode in (124, 137):
        return f"nothing in {took}"
    return f"{took}, rank {first[1]}, exit code {first[2]}" if first else f"{took}, status {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
