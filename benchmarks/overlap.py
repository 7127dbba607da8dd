"""How much faster many buckets are than one on a throttled link: the GPT step of chapter 4, from the chapter's own cells.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/overlap.py [--runs 10]

Two ranks train the chapter's GPT. The rate is chosen from the measured backward, so that sending takes about as long.
Steps with buckets of 0.5 MiB and with one bucket alternate, and the fastest of nine counts. Beside it: the same ratio
without a throttle, where there is next to nothing to hide.
Exits with 0 when every run reached the wanted ratio, with 1 when one did not, with 4 when this machine has no link to
throttle.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from lockstep import cluster, ranks

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"
FILES = ("gpt.py", "gpt_step.py", "measuring.py")
WANTED = 1.15
LAB = """
from gpt_step import *
from lockstep.cluster import set_bandwidth
from lockstep.ranks import observe
from measuring import fastest

many, optimizer, batch = start(bucket_cap_mb=0.5)
one = DDP(GPT(), bucket_cap_mb=1000)

def step_many():
    loss_of(many, batch).backward()

def step_one():
    loss_of(one, batch).backward()

def alone():
    with many.no_sync():
        step_many()

fastest([step_many, step_one, alone], 2)
backward = fastest([alone], 3)[0] * 2 / 3
bits = sum(p.numel() * 32 for p in many.parameters())
rate = int(2 * bits / backward / 1e6)
observe("rate", rate)
set_bandwidth(f"{rate}mbit")
observe("slow", fastest([step_many, step_one], 9))
set_bandwidth(None)
observe("fast", fastest([step_many, step_one], 4))
"""


def cells(source: str) -> dict[str, str]:
    """The files that a chapter's cells write, by name."""
    found: dict[str, str] = {}
    for cell in re.split(r"^# %%(?: .*)?\n", source, flags=re.MULTILINE):
        first, _, rest = cell.partition("\n")
        if named := re.fullmatch(r"# %%writefile (--append )?(\S+)", first):
            found[named[2]] = (found.get(named[2], "") if named[1] else "") + rest
    return found


def main() -> int:
    """Run the lab as often as asked and print each run's ratios."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--runs", type=int, default=10, help="how many (default 10)")
    runs = options.parse_args().runs
    written = cells((CHAPTERS / "source" / "04_optimization.py").read_text(encoding="utf-8"))
    reached = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            (Path(folder) / name).write_text(written[name], encoding="utf-8")
        shutil.copy(CHAPTERS / "step_table.py", folder)
        (Path(folder) / "lab.py").write_text(LAB, encoding="utf-8")
        lab = ranks.Script(str(Path(folder) / "lab.py"))
        for number in range(1, runs + 1):
            try:
                run = ranks.run(lab, 2, network=cluster.slow_link(None), deadline=120)
            except ranks.NotRun as missing:
                print(f"not run: {missing}")
                return 4
            if run.cause is not None:
                print(ranks.text.describe(run))
                return 3
            (many, one), (fast_many, fast_one) = (run.observed(name)[0] for name in ("slow", "fast"))
            reached += one / many >= WANTED
            print(
                f"run {number}: {run.observed('rate')[0]} Mbit/s, many buckets against one {one / many:.2f}x; "
                f"without a throttle {fast_one / fast_many:.2f}x; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(f"at least {WANTED}x on the throttled link: {reached} of {runs} runs")
    return 0 if reached == runs else 1


if __name__ == "__main__":
    sys.exit(main())
