"""The contributor's walk: CONTRIBUTING.md's own example, followed step by step in a copy of the course.

Before each step `author check` names what the step brings; after the last it finds nothing.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from lockstep.authoring import chapters, claims
from lockstep.authoring.mutant_grading import examine
from lockstep.authoring.review import Lack, review
from lockstep.commands.bank import commands
from lockstep.course import Course, find
from lockstep.course.stubs import write_canaries, write_stubs

ROOT = Path(__file__).resolve().parents[1]
NAME = "rank_sum"
LEDGER = f"autograder/contracts/{NAME}.toml"
WRONG, RIGHT = f"tests/submissions/wrong/{NAME}.toml", f"tests/submissions/right/{NAME}"
MISTAKES = {
    "own_value_twice": "2 * value",
    "nothing": "0.0",
    "times_the_world": "value * dist.get_world_size()",
    "maximum": "reduced(value, dist.ReduceOp.MAX)",
    "minimum": "reduced(value, dist.ReduceOp.MIN)",
    "product": "reduced(value, dist.ReduceOp.PRODUCT)",
    "mean": "reduced(value) / dist.get_world_size()",
    "own_left_out": "reduced(value) - value",
    "own_counted_twice": "reduced(value) + value",
    "reduced_twice": "reduced(reduced(value))",
    "half_precision": "reduced(value + 0.001)",
}
OTHER_STYLES = {
    "all_reduce": "reduced(value)",
    "minus_twice": "reduced(-value) * -1.0",
    "mean_times_world": "reduced(value) / dist.get_world_size() * dist.get_world_size()",
}
SHAPE = """import torch
import torch.distributed as dist


def reduced(value: float, op=dist.ReduceOp.SUM) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, op=op)
    return total.item()


def rank_sum(value: float) -> float:
    return {body}
"""


def blocks() -> dict[str, str]:
    """The files of CONTRIBUTING.md: what stands in a fence after a first line that is a path."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.findall(r"^```\w+\n# ((?:[\w.]+/)+[\w.]+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(found)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A copy of what the course's own files are, without learners' work or builds; the current folder."""
    monkeypatch.chdir(tmp_path)
    for part in ("autograder", "solutions", "exercises", "chapters/source", "chapters/quizzes"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for file in (*(ROOT / "chapters").glob("*.ipynb"), ROOT / "chapters" / "claims.toml"):
        shutil.copyfile(file, tmp_path / "chapters" / file.name)
    return find(tmp_path)


def lacks(course: Course, with_bank: bool = False) -> list[Lack]:
    """What the new exercise lacks, read anew from the files."""
    return list(review(Course(course.root), [NAME], with_bank))


def build(course: Course, chapter: str) -> None:
    """The chapter's notebook with the cells of its source; instead of a run, the outputs stay that it had."""
    before = {cell.id: cell for cell in nbformat.read(chapters.notebook_path(chapter, course.root), as_version=4).cells}
    notebook = chapters.read_source(chapter, course.root)
    notebook.cells = [before.get(cell.id, cell) for cell in notebook.cells]
    nbformat.write(notebook, chapters.notebook_path(chapter, course.root))


def write(course: Course, path: str, text: str) -> None:
    """Write a file of the course, with the folders it needs."""
    place = course.root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def draft(course: Course, label: str, diagnosis: str, body: str, check: str = "test_sum") -> None:
    """A wrong submission as a whole file, as its author has it before it is added."""
    head = f"# diagnosis: {diagnosis}\n# check: {check}\n# why: returns {body}\n"
    write(course, f"drafts/{label}.py", head + SHAPE.format(body=body))


def bank(*arguments: str) -> None:
    """`./lockstep author bank …` in the copy, which is the current folder."""
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 0, done.output + repr(done.exception)


@pytest.mark.slow
def test_the_walk(copy: Course) -> None:
    """Each step takes its lines away, and the last one all."""
    files = blocks()
    assert len(files) == 9
    where = {lack.where for lack in lacks(copy)}
    assert where == {
        "autograder/course.toml", f"solutions/{NAME}.py", f"autograder/test_{NAME}.py", f"autograder/hints/{NAME}.md",
        WRONG, RIGHT, LEDGER,
    }  # fmt: skip

    write(copy, f"solutions/{NAME}.py", files[f"solutions/{NAME}.py"])
    now = {lack.where: lack.text for lack in lacks(copy)}
    assert now[f"exercises/{NAME}.py"] == "the stub is not that of the solution"
    assert now[f"solutions/{NAME}.py"] == "its canary is missing"

    contents = copy.autograder / "course.toml"
    contents.write_text(contents.read_text().replace('"mini_ddp"', f'"mini_ddp", "{NAME}"'), encoding="utf-8")
    now = {lack.where: lack.text for lack in lacks(copy)}
    assert "autograder/course.toml" not in now
    assert now["chapters/source/01_internals.py"] == "the chapter does not lead to it"
    chapter = copy.root / "chapters/source/01_internals.py"
    chapter.write_text(chapter.read_text() + f"\n# %%\n# %check {NAME}\n", encoding="utf-8")
    now = {lack.where: lack.text for lack in lacks(copy)}
    assert now["chapters/01_internals.ipynb"] == "the notebook holds other cells than its source"
    build(copy, "01_internals")

    write(copy, f"autograder/test_{NAME}.py", files[f"autograder/test_{NAME}.py"])
    now = {lack.where: lack.text for lack in lacks(copy)}
    assert now["autograder/diagnoses.toml"] == "the diagnosis 'wrong-rank-sum' is unknown"
    assert now[f"autograder/scenarios/{NAME}.py"] == "nothing runs on the ranks"
    write(copy, f"autograder/scenarios/{NAME}.py", files[f"autograder/scenarios/{NAME}.py"])
    catalogue = copy.autograder / "diagnoses.toml"
    catalogue.write_text(catalogue.read_text() + "\n" + files["autograder/diagnoses.toml"], encoding="utf-8")
    write(copy, f"autograder/hints/{NAME}.md", files[f"autograder/hints/{NAME}.md"])
    write_canaries(copy.solutions)
    write_stubs(copy.solutions, copy.exercises)
    assert {lack.where for lack in lacks(copy)} == {WRONG, RIGHT, LEDGER}

    write(copy, f"{RIGHT}/gathers.py", files[f"{RIGHT}/gathers.py"])
    write(copy, "drafts/own_value.py", files["drafts/own_value.py"])
    bank("add", NAME, "drafts/own_value.py")
    assert (copy.root / WRONG).read_text(encoding="utf-8").endswith(f"\n\n{files[WRONG]}")
    for label, body in OTHER_STYLES.items():
        write(copy, f"{RIGHT}/{label}.py", SHAPE.format(body=body))
    for label, body in MISTAKES.items():
        draft(copy, label, "wrong-rank-sum", body)
        bank("add", NAME, f"drafts/{label}.py")
    assert [lack.where for lack in lacks(copy)] == [LEDGER]
    write(copy, LEDGER, files[LEDGER])
    assert lacks(copy, with_bank=True) == []


@pytest.mark.slow
def test_gradings_are_looked_at(copy: Course) -> None:
    """No mutant goes unnoticed, as the walk says. A solution that fails, a stub that passes and a bank with wrong
    verdicts are each named; so is a ledger that has gone astray.
    """
    test_the_walk(copy)
    (examined,) = examine(Course(copy.root), [NAME], 1)
    assert [mutant.id for mutant in examined.survivors] == [] and len(examined.mutants) == 4
    ledger = copy.root / LEDGER
    ledger.write_text(blocks()[LEDGER].replace("all ranks.", "some ranks.").replace("test_sum", "test_more", 1))
    assert [(lack.where, lack.text) for lack in lacks(copy)] == [
        (LEDGER, "no docstring says “The sum of `value` over some ranks.”"),
        (LEDGER, "no entry has “The sum of `value` over all ranks.” (the docstring of rank_sum)"),
        (LEDGER, "the promise “The sum of `value` over some ranks.” is held by 'test_more', which is no check"),
    ]
    ledger.write_text(blocks()[LEDGER])
    solution, checks = copy.solutions / f"{NAME}.py", copy.autograder / f"test_{NAME}.py"
    good = solution.read_text()
    solution.write_text(good.replace("dist.all_reduce(total)", "total += 1"), encoding="utf-8")
    (only,) = lacks(copy)
    assert only.text.startswith(
        "the solution does not pass: “every rank gets the sum of all values”: The sum on rank 0 is"
    )
    solution.write_text(good, encoding="utf-8")

    draft(copy, "nothing", "raised", "0.0")
    draft(copy, "minimum", "raised", "reduced(value) * 1.0")
    draft(copy, "own_value_twice", "wrong-rank-sum", MISTAKES["own_value_twice"], check="test_more")
    for label in ("nothing", "minimum", "own_value_twice"):
        bank("add", NAME, f"drafts/{label}.py", "--replace")
    write(copy, f"{RIGHT}/extra.py", SHAPE.format(body="value"))
    fails, passes, other, elsewhere = sorted(lacks(copy, with_bank=True), key=lambda lack: lack.text)
    assert (passes.where, passes.text) == (WRONG, f"{NAME}/minimum is wrong and passes")
    assert (other.where, other.text) == (WRONG, f"{NAME}/nothing gets the diagnosis wrong-rank-sum, not raised")
    assert elsewhere.text == f"{NAME}/own_value_twice is noticed by test_sum first; its check says test_more"
    assert fails.where == f"{RIGHT}/extra.py" and "extra is right and does not pass: " in fails.text
    (copy.root / RIGHT / "extra.py").unlink()

    gathers = copy.root / RIGHT / "gathers.py"
    gathers.write_text(gathers.read_text().replace("float(sum(values))", "sum(values)"), encoding="utf-8")
    broken = lacks(copy)
    assert [lack.where for lack in broken] == [WRONG, WRONG] and "11 wrong submissions" in broken[1].text
    assert broken[0].text.startswith(f"{NAME}/own_value: its change is not in the text:")
    assert (
        "nearest place there:\n         values = [None]" in broken[0].text
        and "         return sum(values)\n" in broken[0].text
    )
    write(copy, f"{RIGHT}/gathers.py", blocks()[f"{RIGHT}/gathers.py"])

    checks.write_text(
        'from lockstep.grading import Grader\n\n\ndef test_sum(grader: Grader) -> None:\n    """anything goes"""\n'
    )
    assert [lack.text for lack in lacks(copy)] == ["the untouched stub passes “anything goes”"]


def test_a_claim_that_no_cell_shows(copy: Course) -> None:
    """A claim without a cell, and one that is not there, are each named; so is a ledger that cannot be read."""
    ledger = copy.root / "chapters" / "claims.toml"
    good = ledger.read_text(encoding="utf-8")
    where = claims.read(copy.root).claims["A01"].places[0]
    assert list(review(copy, [])) == []
    ledger.write_text(good.replace(f"'{where.section}'", "'Nowhere'", 1), encoding="utf-8")
    gone, unshown = review(copy, [])  # its only place
    assert gone.where == "chapters/claims.toml" and gone.text.startswith("A01: ") and "no sections" in gone.text
    assert unshown.text.startswith("A01: no cell shows it")
    ledger.write_text(good.replace("[claims.A01]", "[claims.A99]"), encoding="utf-8")
    assert "A01: this claim is not in the ledger" in [lack.text for lack in review(copy, [])]
    ledger.write_text("[claims", encoding="utf-8")
    (only,) = review(copy, [])
    assert "claims.toml cannot be read: " in only.text


def test_files_that_cannot_be_read(copy: Course) -> None:
    """A solution or check that is no Python is a line, not a traceback."""
    write(copy, f"solutions/{NAME}.py", "# --- solution: x ---\n")
    write(copy, f"autograder/test_{NAME}.py", "def (:\n")
    texts = [lack.text for lack in lacks(copy)]
    assert any("has no end" in text for text in texts) and any("the checks are no Python" in text for text in texts)
