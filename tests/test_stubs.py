"""The stubs and the solutions belong together. What a learner writes in `exercises/` is never read here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import one_of

from lockstep.course.stubs import END, SOLUTION, SOLUTION_ONLY, SOLUTION_ONLY_LINE, MarkerError, make_stub, write_stubs

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = sorted((ROOT / "solutions").glob("*.py"))
SCRIPTS = [solution for solution in SOLUTIONS if "__main__" in solution.read_text(encoding="utf-8")]
every_solution = pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)


def taken_out(text: str) -> list[str]:
    """The lines that a stub has not."""
    lines, inside = [], False
    for line in text.splitlines():
        if END.match(line):
            inside = False
        elif SOLUTION.match(line) or SOLUTION_ONLY.match(line):
            inside = True
        elif (inside and line.strip()) or SOLUTION_ONLY_LINE.match(line):
            lines.append(line)
    return lines


@every_solution
def test_a_stub_compiles_and_gives_nothing_away(solution: Path) -> None:
    text = solution.read_text(encoding="utf-8")
    stub = make_stub(text, solution.stem)
    compile(stub, solution.name, "exec")
    assert "# solution-only" not in stub and "--- solution" not in stub and "--- end" not in stub
    # A line such as `try:` may stand in the rest of the file too; none may come from the part that was taken out.
    outside = text.splitlines()
    for line in taken_out(text):
        outside.remove(line)
    assert [line for line in taken_out(text) if line in stub.splitlines() and line not in outside] == []


@every_solution
def test_every_function_to_write_raises_and_names_its_exercise(solution: Path) -> None:
    text = solution.read_text(encoding="utf-8")
    tasks = [line for line in text.splitlines() if SOLUTION.match(line)]
    stub = ast.parse(make_stub(text, solution.stem))
    raising = 0
    for function in ast.walk(stub):
        if not isinstance(function, ast.FunctionDef) or not isinstance(function.body[-1], ast.Raise):
            continue
        raising += 1
        assert len(function.body) == 2 and ast.get_docstring(function), f"{function.name}: docstring, raise"
        assert function.returns is not None, f"{function.name} has no type for what it returns"
        assert (
            ast.unparse(function.body[-1]).replace('"', "'").startswith(f"raise NotImplementedError('{solution.stem}: ")
        )
    assert raising == len(tasks) > 0


@every_solution
def test_the_committed_stub_is_the_one_that_the_solution_gives(solution: Path) -> None:
    name = f"exercises/{solution.stem}.py"
    shown = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if shown.returncode:
        pytest.skip("no such file in git's HEAD (a copy without git, or a new exercise)")
    assert shown.stdout == make_stub(solution.read_text(encoding="utf-8"), solution.stem), (
        f"solutions/{solution.stem}.py gives another stub: render it with `lockstep author stubs`, commit both"
    )


@pytest.mark.parametrize("solution", one_of(SCRIPTS), ids=lambda path: path.stem)
def test_a_stub_starts_like_a_script(solution: Path, tmp_path: Path) -> None:
    """Run on its own it ends with the NotImplementedError, not with some other error before it."""
    write_stubs(solution.parent, tmp_path)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / solution.name)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    # Not the last line: gloo's threads now and then abort a process that ends with a group.
    errors = [line for line in ran.stderr.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
    assert errors and "NotImplementedError: " in errors[0], ran.stderr


def test_writing_tells_what_changed(tmp_path: Path) -> None:
    solutions, exercises = tmp_path / "solutions", tmp_path / "exercises"
    solutions.mkdir()
    (solutions / "one.py").write_text(
        "def f() -> int:\n    # --- solution: count ---\n    return 1\n    # --- end ---\n"
    )
    assert write_stubs(solutions, exercises) == [exercises / "one.py"]
    assert write_stubs(solutions, exercises) == []
    (exercises / "one.py").write_text("def f() -> int:\n    return 2\n")
    assert write_stubs(solutions, exercises) == [exercises / "one.py"]


WITH_GAPS = """\
import os
import re  # solution-only

# --- solution-only ---
X = 1
# --- end ---


def helper() -> None: ...


# --- solution-only ---
def another() -> None: ...


# --- end ---
def f() -> None:
    # --- solution: say "so" ---
    pass
    # --- end ---
"""

WITHOUT = """\
import os


def helper() -> None: ...


def f() -> None:
    raise NotImplementedError("n: say \\"so\\"")
"""


def test_the_gap_around_a_removed_part_is_the_longer_of_the_two() -> None:
    assert make_stub(WITH_GAPS, "n") == WITHOUT


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n", "no part is marked"),
        ("# --- solution: a ---\n", "has no end"),
        ("# --- end ---\n", "nothing that this could end"),
        ("# --- solution: a ---\n# --- solution-only ---\n# --- end ---\n", "has not ended"),
        ("# --- solution ---\n# --- end ---\n", "no such marker"),
    ],
)
def test_broken_markers_are_named(text: str, complaint: str) -> None:
    with pytest.raises(MarkerError, match=complaint):
        make_stub(text, "n")


@pytest.mark.parametrize("script", sorted((ROOT / "solutions").glob("*.sbatch")), ids=lambda path: path.name)
def test_a_batch_script_has_a_stub_that_says_what_to_write(script: Path, tmp_path: Path) -> None:
    text = script.read_text(encoding="utf-8")
    tasks = [match["task"] for line in text.splitlines() if (match := SOLUTION.match(line))]
    stub = tmp_path / script.name
    write_stubs(script.parent, tmp_path)
    assert [line for line in taken_out(text) if line in stub.read_text(encoding="utf-8").splitlines()] == []
    assert stub.read_text(encoding="utf-8").count("; exit 64") == len(tasks) > 0
    ran = subprocess.run(["bash", str(stub)], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (64, f"{script.name}: {tasks[0]}\n")
    shown = subprocess.run(
        ["git", "show", f"HEAD:exercises/{script.name}"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    if shown.returncode == 0:
        assert shown.stdout == stub.read_text(encoding="utf-8"), "render it with `lockstep author stubs`, commit both"


def test_a_task_is_told_as_it_is_written_in_a_shell_too(tmp_path: Path) -> None:
    task = 'say "$HOME", `pwd` and \\\\n'
    text = make_stub(f"# --- solution: {task} ---\ntrue\n# --- end ---\n", "a.sbatch")
    ran = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (64, f"a.sbatch: {task}\n")
