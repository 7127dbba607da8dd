"""The ledger of claims: every claim has its place, and a ledger or a chapter that breaks this is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from lockstep.authoring import chapters, claims
from lockstep.commands import testing
from lockstep.course import CourseError

ROOT = Path(__file__).resolve().parents[1]
LEDGER = """
[expected]
A = 2

[reasons]
gpu = "need GPUs: told from the documentation"

[claims.A01]
claim = "two and two are four"
verdict = "true"
places = [["01_sums", "Adding", "2 + 2"]]

[claims.A02]
claim = "a GPU adds faster"
verdict = "conditional"
places = [["01_sums", "Adding", "not run here"]]
not_run = "gpu"

[facts]
[contents]

[topics.T01]
claim = "sums"
places = [["01_sums", "Adding"]]
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of one chapter with its ledger."""
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "claims.toml").write_text(LEDGER)
    text = nbformat.v4.new_markdown_cell(
        "# Sums\n\n## Adding\n\nA GPU adds faster; not run\nhere.\n\n```\n# no heading\n```"
    )
    answer = nbformat.v4.new_output("execute_result", {"text/plain": "4"}, execution_count=1)
    cells = [text, nbformat.v4.new_code_cell("2 + 2", outputs=[answer], execution_count=1)]
    cells += [nbformat.v4.new_code_cell("x = 3"), nbformat.v4.new_markdown_cell("## Multiplying")]
    cells += [nbformat.v4.new_code_cell("assert 2 * 2 == 4")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "chapters" / "01_sums.ipynb")
    return tmp_path


def problems(course: Path) -> list[str]:
    return claims.problems(claims.read(course), course)


def change(course: Path, old: str, new: str, file: str = "claims.toml") -> None:
    path = course / "chapters" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


# The course's own ------------------------------------------------------------------------------------------------


def test_every_claim_of_the_ledger_has_its_place() -> None:
    assert claims.problems(claims.read(ROOT), ROOT) == []


def test_the_ledger_knows_all_claims_and_most_are_shown() -> None:
    ledger = claims.read(ROOT)
    assert sum(ledger.expected.values()) == len(ledger.claims) == 194 and len(ledger.topics) == 25
    shown = [entry for entry in ledger.claims.values() if not entry.not_run]
    assert len(shown) >= 167, claims.share(ledger)  # a claim once shown does not fall back to being told
    assert claims.share(ledger).startswith(f"Claims: {len(shown)} of 194 shown by a cell, {194 - len(shown)} told ")


def test_a_claim_is_one_short_sentence() -> None:
    for entry in claims.read(ROOT).claims.values():
        assert 10 < len(entry.claim) < 200, entry


@pytest.mark.parametrize("name", chapters.names())
def test_every_chapter_keeps_claims_and_each_place_is_exact(name: str) -> None:
    cited = [place for entry in claims.read(ROOT).claims.values() for place in entry.places if place.chapter == name]
    later = ("06_beyond_ddp",)  # none of the three texts that the course began from tells of its subject
    assert len(cited) > 20 or name in later
    assert all(place.mark for place in cited), "a claim's place is a cell or a sentence, never a whole section"


# What it notices -------------------------------------------------------------------------------------------------


def test_a_sound_ledger_has_no_problems(course: Path) -> None:
    assert problems(course) == []
    line = "Claims: 1 of 2 shown by a cell, 1 told with their reason (1 need GPUs)"
    assert claims.share(claims.read(course)) == line


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("A = 2", "A = 3", "A03: this claim is not in the ledger"),
        ("[claims.A02]", "[claims.B07]", "A02: this claim is not in the ledger"),
        ("A = 2", "A = 1", "A02: no such claim is expected"),
        ('"01_sums", "Adding", "2 + 2"', '"02_more", "Adding", "2 + 2"', "there is no such chapter"),
        ('"Adding", "2 + 2"', '"Subtracting", "2 + 2"', "no sections have this heading"),
        ('"Adding", "2 + 2"', '"no heading", "2 + 2"', "no sections have this heading"),
        ('"2 + 2"', '"2 + 3"', "neither a cell nor the text of the section holds this mark"),
        ('"Adding", "2 + 2"', '"Multiplying", "2 + 2"', "neither a cell nor the text"),
        ('"2 + 2"', '"x = 3"', "A01: 01_sums"),
        ('"2 + 2"', '"A GPU adds faster"', "a sentence, and a claim without `not_run` needs a cell"),
        ('"not run here"', '"never run here"', "neither a cell nor the text"),
        ('not_run = "gpu"', 'not_run = "no time"', "A02: 'no time' is not among the ledger's reasons"),
        ('gpu = "need GPUs: told from the documentation"', 'gpu = ""', "A02: 'gpu' is not among the ledger's reasons"),
        ('not_run = "gpu"', "", "a sentence, and a claim without `not_run` needs a cell"),
        ('places = [["01_sums", "Adding", "2 + 2"]]', "places = []", "A01: it has no place"),
        (', "2 + 2"]]', "]]", "A01: no cell shows it, and no reason says why"),
        ('verdict = "true"', 'verdict = "maybe"', "A01: the verdict 'maybe' is none of"),
        ('"Adding"]]\n', '"Dividing"]]\n', "T01: 01_sums"),
    ],
)
def test_a_broken_ledger_is_noticed(course: Path, old: str, new: str, problem: str) -> None:
    change(course, old, new)
    assert any(problem in line for line in problems(course)), problems(course)


@pytest.mark.parametrize(
    ("source", "tags", "output", "shows"),
    [
        ("2 + 2", [], "4", True),
        ("2 + 2", [], None, False),
        ("2 + 2", [], "not run: no network", False),
        ("2 + 2", ["nbval-ignore-output"], "4", False),
        ("2 + 2", ["nbval-skip"], "4", False),
        ("assert 2 + 2 == 4", [], None, True),
        ("print('assert 2 + 2')", [], None, False),
        ("%%ranks 2 --expect hang\n2 + 2", [], None, True),
        ("%%ranks 2 --expect anything\n2 + 2", [], None, False),
        ("%%writefile sums.py\n2 + 2\nassert 2 + 2 == 4", [], "Writing sums.py", False),
    ],
)
def test_a_cell_that_shows_nothing_is_noticed(
    course: Path, source: str, tags: list[str], output: str | None, shows: bool
) -> None:
    notebook = nbformat.read(course / "chapters" / "01_sums.ipynb", as_version=4)
    cell = notebook.cells[1]
    cell.source, cell.metadata.tags = source, tags
    cell.outputs = [] if output is None else [nbformat.v4.new_output("stream", text=output)]
    nbformat.write(notebook, course / "chapters" / "01_sums.ipynb")
    said = "the cell shows nothing that a test would compare"
    assert any(said in line for line in problems(course)) is not shows


def test_a_mark_that_two_cells_hold_is_noticed(course: Path) -> None:
    change(course, "x = 3", "x = 2 + 2", "01_sums.ipynb")
    assert any("2 cells of the section hold this mark" in line for line in problems(course))


@pytest.mark.parametrize("text", ["[claims", "[expected]\nA = 1", re.sub("claim = .*\n", "", LEDGER)])
def test_a_ledger_that_cannot_be_read_says_so(course: Path, text: str) -> None:
    (course / "chapters" / "claims.toml").write_text(text)
    with pytest.raises(CourseError, match=r"claims\.toml cannot be read: "):
        claims.read(course)


def test_a_course_without_a_ledger_says_so(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"claims\.toml is missing"):
        claims.read(tmp_path)


def test_lockstep_test_ends_with_the_share(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(testing, "_call", lambda command, root, environment: called.append(command) or 0)
    assert testing.run_tests(course, []) == 2 and not called  # a learner's copy has no tests
    assert "learner's copy" in capsys.readouterr().out
    (course / "tests").mkdir()
    assert testing.run_tests(course, ["--all"]) == 0 and called[-1][-3:] == ["--nbval", "chapters", "-q"]
    assert capsys.readouterr().out.splitlines()[-1] == claims.share(claims.read(course))
    change(course, '"2 + 2"', '"2 + 3"')
    testing.run_tests(course, [])
    assert capsys.readouterr().out.splitlines()[-1].endswith("; 2 problems, see tests/test_claims.py")
    (course / "chapters" / "claims.toml").unlink()
    testing.run_tests(course, [])
    assert "claims.toml is missing" in capsys.readouterr().out.splitlines()[-1]
