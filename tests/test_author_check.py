"""The contributor's walk: CONTRIBUTING.md's own example, followed step by step in a copy of the course.

Before each step `author check` names what the step brings; after the last it finds nothing.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from lockstep.authoring import chapters, claims
from lockstep.authoring.review import Lack, review
from lockstep.authoring.stubs import write_canaries, write_stubs
from lockstep.grading.course import Course, find

ROOT = Path(__file__).resolve().parents[1]
NAME = "rank_sum"
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
RIGHT = {
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
def copy(tmp_path: Path) -> Course:
    """A copy of what the course's own files are, without learners' work or builds."""
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


def test_the_walk(copy: Course) -> None:
    """Each step takes its lines away, and the last one all."""
    files = blocks()
    assert len(files) == 7
    where = {lack.where for lack in lacks(copy)}
    assert where == {
        "autograder/course.toml", f"solutions/{NAME}.py", f"autograder/test_{NAME}.py", f"autograder/hints/{NAME}.md",
        f"tests/submissions/wrong/{NAME}", f"tests/submissions/right/{NAME}",
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
    assert {lack.where for lack in lacks(copy)} == {f"tests/submissions/{kind}/{NAME}" for kind in ("wrong", "right")}

    for path in (path for path in files if path.startswith("tests/")):
        write(copy, path, files[path])
    for kind, bodies in (("wrong", MISTAKES), ("right", RIGHT)):
        for label, body in bodies.items():
            head = "# diagnosis: wrong-rank-sum\n" if kind == "wrong" else ""
            write(copy, f"tests/submissions/{kind}/{NAME}/{label}.py", head + SHAPE.format(body=body))
    assert lacks(copy, with_bank=True) == []


def test_gradings_are_looked_at(copy: Course) -> None:
    """A solution that fails, a stub that passes and a bank with wrong verdicts are each named."""
    test_the_walk(copy)
    solution, checks = copy.solutions / f"{NAME}.py", copy.autograder / f"test_{NAME}.py"
    good = solution.read_text()
    solution.write_text(good.replace("dist.all_reduce(total)", "total += 1"), encoding="utf-8")
    (only,) = lacks(copy)
    assert only.text.startswith("the solution does not pass: “every rank gets the sum of all values”: rank 0 got")
    solution.write_text(good, encoding="utf-8")

    write(copy, f"tests/submissions/wrong/{NAME}/nothing.py", "# diagnosis: raised\n" + SHAPE.format(body="0.0"))
    write(
        copy,
        f"tests/submissions/wrong/{NAME}/minimum.py",
        "# diagnosis: raised\n" + SHAPE.format(body=RIGHT["all_reduce"]),
    )
    write(copy, f"tests/submissions/right/{NAME}/all_reduce.py", SHAPE.format(body="value"))
    found = {Path(lack.where).stem: lack.text for lack in lacks(copy, with_bank=True)}
    assert found.keys() == {"nothing", "minimum", "all_reduce"}
    assert found["nothing"] == "it is told wrong-rank-sum, not raised" and found["minimum"] == "it is wrong and passes"
    assert found["all_reduce"].startswith("it is right and does not pass: ")

    checks.write_text(
        'from lockstep.grading import Grader\n\n\ndef test_sum(grader: Grader) -> None:\n    """anything goes"""\n'
    )
    assert [lack.text for lack in lacks(copy)] == ["the untouched stub passes “anything goes”"]


def test_a_claim_that_no_cell_shows(copy: Course) -> None:
    """A claim without a cell, and one that is not there, are each named; so is a ledger that cannot be read."""
    ledger = copy.root / "chapters" / "claims.toml"
    good = ledger.read_text(encoding="utf-8")
    where = claims.read(copy.root).claims[0].places[0]
    assert list(review(copy, [])) == []
    ledger.write_text(good.replace(f"'{where.section}'", "'Nowhere'", 1), encoding="utf-8")
    (only,) = review(copy, [])
    assert only.where == "chapters/claims.toml" and only.text.startswith("A01: ") and "no sections" in only.text
    ledger.write_text(good.replace("[claims.A01]", "[claims.A99]"), encoding="utf-8")
    assert "A01: this claim is not in the ledger" in [lack.text for lack in review(copy, [])]
    ledger.write_text("[claims", encoding="utf-8")
    (only,) = review(copy, [])
    assert only.text.startswith("claims.toml cannot be read: ")


def test_files_that_cannot_be_read(copy: Course) -> None:
    """A solution or check that is no Python is a line, not a traceback."""
    write(copy, f"solutions/{NAME}.py", "# --- solution: x ---\n")
    write(copy, f"autograder/test_{NAME}.py", "def (:\n")
    texts = [lack.text for lack in lacks(copy)]
    assert any("has no end" in text for text in texts) and any("the checks are no Python" in text for text in texts)
