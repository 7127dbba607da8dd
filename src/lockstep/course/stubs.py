"""A stub is its solution with the marked parts taken out.

`solutions/NAME.py` is what authors write. Comments, each alone on its line, say what a learner does not get:

    # --- solution: join the process group ---    becomes  raise NotImplementedError("NAME: join the process group")
    # --- solution-only ---                       begins a part that goes
    # --- end ---                                 ends either
    import traceback  # solution-only             goes

A broken job, which the learner fixes, has both states in its solution:

    # --- mended: take as many steps as the others ---    what follows is the solution's
    # --- was ---                                         what follows, each line after "# ", is the stub's
    # --- end ---

A batch script, `solutions/NAME.sbatch`, belongs to the exercise NAME and has the same markers. What is taken out of it
becomes a line that says what to write, and ends the script.

A solution ends with its canary, a comment that is in no stub and in nothing that a learner is shown: wherever it turns
up, a solution has leaked. `author stubs` writes it.

Stubs are made from the solutions; what a learner wrote in `exercises/` is never read here.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SOLUTION = re.compile(r"^(?P<indent> *)# --- solution: (?P<task>.+?) ---$")
SOLUTION_ONLY = re.compile(r"^ *# --- solution-only ---$")
SOLUTION_ONLY_LINE = re.compile(r"^.*\S  # solution-only$")
MENDED = re.compile(r"^ *# --- mended: (?P<what>.+?) ---$")
WAS = re.compile(r"^ *# --- was ---$")
END = re.compile(r"^ *# --- end ---$")
ANY_MARKER = re.compile(r"^\s*#\s*-{2,}\s*(solution|mended|was|end)\b")
CANARY = re.compile(r"^ *# lockstep-canary: [0-9a-f]+$")
SCRIPT = ".sbatch"
NOT_WRITTEN = 64  # The exit status of a batch script's stub at a part that is still to be written


class MarkerError(ValueError):
    """A solution's markers do not pair up, or are misspelt. The message names the line."""


def make_stub(solution_text: str, name: str) -> str:
    """The stub of the exercise `name`, given the text of its solution.

    Raises MarkerError when there is no marked part, or a marker has no partner.
    """
    stub: list[str] = []
    was = False  # inside the part of a broken job that the stub has
    opened = 0  # the line of the marker whose part is being left out; 0 outside
    blank_before: int | None = None  # how many blank lines stood before a part that has gone
    tasks = 0
    lines = solution_text.splitlines()
    for number, line in enumerate(lines, 1):
        task = SOLUTION.match(line)
        if task or SOLUTION_ONLY.match(line) or MENDED.match(line):
            if opened:
                raise MarkerError(f"{name}, line {number}: the part that began in line {opened} has not ended")
            opened = number
            if task:
                tasks += 1
                stub.append(task["indent"] + _not_written(name, task["task"]))
            elif MENDED.match(line):
                tasks += 1
            else:
                blank_before = _blank_lines(stub)
        elif WAS.match(line):
            if not opened or not MENDED.match(lines[opened - 1]):
                raise MarkerError(f"{name}, line {number}: nothing was mended above")
            was = True
        elif END.match(line):
            if not opened:
                raise MarkerError(f"{name}, line {number}: there is nothing that this could end")
            if MENDED.match(lines[opened - 1]) and not was:
                raise MarkerError(f"{name}, line {opened}: the part does not say what it was")
            opened, was = 0, False
        elif was:
            stub.append(_uncommented(line, f"{name}, line {number}"))
        elif ANY_MARKER.match(line):
            raise MarkerError(f"{name}, line {number}: no such marker is known: {line.strip()}")
        elif not opened and not SOLUTION_ONLY_LINE.match(line) and not CANARY.match(line):
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


def solution_lines(solution_text: str) -> set[int]:
    """The numbers of the lines that only the solution has: what lies between its markers, and not what it was."""
    found, inside = set(), False
    for number, line in enumerate(solution_text.splitlines(), 1):
        if SOLUTION.match(line) or SOLUTION_ONLY.match(line) or MENDED.match(line):
            inside = True
        elif WAS.match(line) or END.match(line):
            inside = False
        elif inside or SOLUTION_ONLY_LINE.match(line):
            found.add(number)
    return found


def _not_written(name: str, task: str) -> str:
    """A stub's line for a part that is to be written."""
    message = f"{name}: {task}".replace("\\", "\\\\").replace('"', '\\"')
    if name.endswith(SCRIPT):
        return 'echo "' + re.sub(r"[$`]", r"\\\g<0>", message) + f'" >&2; exit {NOT_WRITTEN}'
    return f'raise NotImplementedError("{message}")'


def _uncommented(line: str, where: str) -> str:
    bare = line.lstrip(" ")
    if bare and not bare.startswith("#"):
        raise MarkerError(f'{where}: a line of what it was has to begin with "# "')
    return (line[: len(line) - len(bare)] + bare.removeprefix("#").removeprefix(" ")).rstrip()


def without_markers(solution_text: str) -> str:
    """The solution as a reader sees it: whole, without markers, and without the broken job that it fixes."""
    shown, was = [], False
    for line in solution_text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        if END.match(bare):
            was = False
        elif WAS.match(bare):
            was = True
        elif not was and not ANY_MARKER.match(bare) and not CANARY.match(bare):
            shown.append(line.replace("  # solution-only", ""))
    return "".join(shown).rstrip() + "\n"


def canary(name: str) -> str:
    """The word that gives away a copy of this exercise's solution: 16 hex digits, always the same."""
    return hashlib.sha256(f"lockstep canary {name}".encode()).hexdigest()[:16]


def with_canary(solution_text: str, name: str) -> str:
    """The same solution, ending with the canary of this exercise and no other."""
    kept = "".join(line for line in solution_text.splitlines(keepends=True) if not CANARY.match(line.rstrip("\n")))
    return f"{kept.rstrip()}\n\n# lockstep-canary: {canary(name)}\n"


def write_canaries(solutions: Path) -> list[Path]:
    """Put its canary into every solution. Returns the files that changed."""
    changed = []
    for name, path in solved(solutions).items():
        changed += _write(path, with_canary(path.read_text(encoding="utf-8"), name))
    return changed


def _blank_lines(lines: list[str]) -> int:
    return next((count for count, line in enumerate(reversed(lines)) if line.strip()), len(lines))


def make_stubs(solutions: Path) -> dict[str, str]:
    """The stub of every solution in a folder and the folders in it, by the exercise's name."""
    return {name: make_stub(path.read_text(encoding="utf-8"), name) for name, path in solved(solutions).items()}


def solved(solutions: Path) -> dict[str, Path]:
    """Every solution by its exercise's name. In a group, a file without markers is shared code and no exercise."""
    found = {path.relative_to(solutions).with_suffix("").as_posix(): path for path in sorted(solutions.rglob("*.py"))}
    return {name: path for name, path in found.items() if "/" not in name or "# --- " in path.read_text("utf-8")}


def write_stubs(solutions: Path, exercises: Path) -> list[Path]:
    """Write the stub of every solution into `exercises`, over whatever is there. Returns the files that changed."""
    changed = []
    for name, text in make_stubs(solutions).items():
        changed += _write(exercises / f"{name}.py", text)
    for script in sorted(solutions.glob(f"*{SCRIPT}")):
        changed += _write(exercises / script.name, make_stub(script.read_text(encoding="utf-8"), script.name))
    return changed


def write_support(autograder: Path, *folders: Path) -> list[Path]:
    """Copy what the exercises of a group share (`autograder/GROUP/support`) into their folders.

    Returns the files that changed.
    """
    changed = []
    for source in sorted(autograder.glob("*/support/*.py")):
        for folder in folders:
            changed += _write(folder / source.parents[1].name / source.name, source.read_text(encoding="utf-8"))
    return changed


def _write(path: Path, text: str) -> list[Path]:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [path]
