"""How much faster three buckets are than one on the throttled link: the lab of chapter 4, from the chapter's own cells.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/overlap.py [--runs 10]

Each run is the cell's: two ranks, a rate chosen from the measured backward, steps with three buckets and with one in
turns, the fastest of nine. Beside it stands the same ratio without a throttle, which has next to nothing to hide.
Exits with 0 when every run reached the wanted ratio, with 1 when one did not, with 4 when this machine has no link to
throttle.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

from lockstep import cluster, ranks

CHAPTER = Path(__file__).resolve().parents[1] / "chapters" / "source" / "04_optimization.py"
FILES = ("fastest.py", "overlap_lab.py")
WANTED = 1.15


def cells(source: str) -> dict[str, str]:
    """The files that a chapter's cells write, by name."""
    found = {}
    for cell in re.split(r"^# %%(?: .*)?\n", source, flags=re.MULTILINE):
        first, _, rest = cell.partition("\n")
        if named := re.fullmatch(r"# %%writefile (\S+)", first):
            found[named[1]] = rest
    return found


def main() -> int:
    """Run the lab so many times and print each run's ratios."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--runs", type=int, default=10, help="how many (default 10)")
    runs = options.parse_args().runs
    written = cells(CHAPTER.read_text(encoding="utf-8"))
    reached = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            (Path(folder) / name).write_text(written[name], encoding="utf-8")
        lab = ranks.Script(str(Path(folder) / "overlap_lab.py"))
        for number in range(1, runs + 1):
            try:
                run = ranks.run(lab, 2, network=cluster.slow_link(None), deadline=120)
            except ranks.NotRun as missing:
                print(f"not run: {missing}")
                return 4
            if run.cause is not None:
                print(ranks.text.describe(run))
                return 3
            (three, one), (fast_three, fast_one) = (run.observed(name)[0] for name in ("slow", "fast"))
            reached += one / three >= WANTED
            print(
                f"run {number}: {run.observed('rate')[0]} Mbit/s, three buckets against one {one / three:.2f}x; "
                f"without a throttle {fast_one / fast_three:.2f}x; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(f"at least {WANTED}x on the throttled link: {reached} of {runs} runs")
    return 0 if reached == runs else 1


if __name__ == "__main__":
    sys.exit(main())
