"""A stub is its solution with the marked parts taken out.

`solutions/NAME.py` is what authors write. Comments, each alone on its line, say what a learner does not get:

    # --- solution: join the process group ---    becomes  raise NotImplementedError("NAME: join the process group")
    # --- solution-only ---                       begins a part that goes
    # --- end ---                                 ends either
    import traceback  # solution-only             goes

Stubs are made from the solutions and never read back: what a learner wrote in `exercises/` is looked at by nobody here.
"""

from __future__ import annotations

import re
from pathlib import Path

SOLUTION = re.compile(r"^(?P<indent> *)# --- solution: (?P<task>.+?) ---$")
SOLUTION_ONLY = re.compile(r"^ *# --- solution-only ---$")
SOLUTION_ONLY_LINE = re.compile(r"^.*\S  # solution-only$")
END = re.compile(r"^ *# --- end ---$")
ANY_MARKER = re.compile(r"^\s*#\s*-{2,}\s*(solution|end)\b")


class MarkerError(ValueError):
    """A solution's markers do not pair up, or are misspelt. The message names the line."""


def make_stub(solution_text: str, name: str) -> str:
    """The stub of the exercise `name`, given the text of its solution.

    Raises MarkerError when there is no marked part, or a marker has no partner.
    """
    stub: list[str] = []
    opened = 0  # the line of the marker whose part is being left out; 0 outside
    blank_before: int | None = None  # how many blank lines stood before a part that has gone
    tasks = 0
    for number, line in enumerate(solution_text.splitlines(), 1):
        task = SOLUTION.match(line)
        if task or SOLUTION_ONLY.match(line):
            if opened:
                raise MarkerError(f"{name}, line {number}: the part that began in line {opened} has not ended")
            opened = number
            if task:
                tasks += 1
                message = f"{name}: {task['task']}".replace("\\", "\\\\").replace('"', '\\"')
                stub.append(f'{task["indent"]}raise NotImplementedError("{message}")')
            else:
                blank_before = _blank_lines(stub)
        elif END.match(line):
            if not opened:
                raise MarkerError(f"{name}, line {number}: there is nothing that this could end")
            opened = 0
        elif ANY_MARKER.match(line):
            raise MarkerError(f"{name}, line {number}: no such marker is known: {line.strip()}")
        elif not opened and not SOLUTION_ONLY_LINE.match(line):
            if line.strip() and blank_before is not None:
                # Where a part has gone, the longer one of the two gaps around it is left.
                surplus = min(blank_before, _blank_lines(stub) - blank_before)
                stub = stub[: len(stub) - surplus]
                blank_before = None
            stub.append(line)
    if opened:
        raise MarkerError(f"{name}: the part that began in line {opened} has no end")
    if not tasks:
        raise MarkerError(f"{name}: no part is marked, so its stub would be the solution")
    return "\n".join(stub).rstrip() + "\n"


def _blank_lines(lines: list[str]) -> int:
    """How many blank lines the text ends with."""
    return next((count for count, line in enumerate(reversed(lines)) if line.strip()), len(lines))


def make_stubs(solutions: Path) -> dict[str, str]:
    """The stub of every solution in a folder, by the exercise's name."""
    found = sorted(solutions.glob("*.py"))
    return {path.stem: make_stub(path.read_text(encoding="utf-8"), path.stem) for path in found}


def write_stubs(solutions: Path, exercises: Path) -> list[Path]:
    """Write the stub of every solution into `exercises`, over whatever is there. Returns the files that changed."""
    exercises.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in make_stubs(solutions).items():
        path = exercises / f"{name}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
