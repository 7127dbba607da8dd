"""How long a chapter takes to read and to run, and which of its cells take longest.

    python benchmarks/chapters.py [NAME …]

Reading: as the minutes in the chapters were counted (`lockstep.authoring.chapters.Length`). Running: all cells in
one fresh kernel, top to bottom, as `pytest --nbval chapters` and `Run All Cells` do; `%check` grades the reference.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime

from lockstep.authoring import chapters


def main(names: list[str]) -> None:
    """Measure and print."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    print(f"{'chapter':20} {'words':>6} {'code lines':>10} {'reading':>8} {'running':>8} {'cells':>5}  the slowest")
    for name in names or chapters.names():
        notebook = chapters.read_source(name)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        length = chapters.length(notebook)
        began = time.perf_counter()
        chapters.execute(notebook, timing=True)
        seconds = time.perf_counter() - began
        slowest = max(cells, key=_seconds)
        first = next(line for line in slowest.source.splitlines() if line.strip())
        print(
            f"{name:20} {length.words:6} {length.code_lines:10} {length.minutes:4.0f} min {seconds:6.0f} s {len(cells):5}  "
            f"{_seconds(slowest):.0f} s: {first[:60]}",
            flush=True,
        )


def _seconds(cell: chapters.NotebookNode) -> float:
    """How long the cell ran; nbclient notes when it began and when its answer came."""
    told = cell.metadata.get("execution", {})
    begin, end = (told.get(key) for key in ("iopub.execute_input", "shell.execute_reply"))
    if not begin or not end:
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


if __name__ == "__main__":
    main(sys.argv[1:])
