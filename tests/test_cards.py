"""A run's cause and a grading as cards: what is marked, what is folded, what stays text, and that nothing is markup."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from IPython.core.error import UsageError
from IPython.display import Markdown
from support import ROOT
from support.tiny_course import make_course

from lockstep.authoring import book, chapters
from lockstep.course import Course, progress
from lockstep.course.hints import code_of, solution, to_compare
from lockstep.course.outline import outlines
from lockstep.grading.text import report_text
from lockstep.grading.verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.notebook import checking, exercise
from lockstep.notebook import contract as contracts
from lockstep.notebook.cards import UNSAVED, Card, report_card, run_card, unwritten_card
from lockstep.ranks import Kind, Run, text
from lockstep.ranks.cards import said, table
from lockstep.ranks.report import Cause, Error, Frame, Topic, Waiting
from lockstep.ranks.text import CodeLine, Row

SCRIPT = """import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() != 2:
    dist.all_reduce(t)  # <b>
dist.barrier()
"""
HOSTILE = "</pre><script>alert(1)</script><b>"


def shown(card: Card) -> BeautifulSoup:
    bundle = card._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"} and bundle["text/plain"] == repr(card)
    return BeautifulSoup(bundle["text/html"], "html.parser")


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Rank 2 took another way than the others. The notebook is a chapter's neighbor."""
    monkeypatch.chdir(ROOT / "chapters")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    inside, outside = Frame(str(file), 5), Frame(str(file), 6)
    rows = (
        Waiting(0, "all_reduce #1", "1 × float32", 1.0, inside),
        Waiting(1, "all_reduce #1", "1 × float32", 1.0, inside),
        Waiting(2, "barrier #1", "", 1.0, outside, differs=True),
    )
    said = "rank 2 never joined all_reduce #1."
    cause = Cause(Kind.HANG, said, (2,), outside, rows, ("It waits.",), topic=Topic.HANGS, branch=4)
    return Run(3, "cpu", [], cause=cause, seconds=1.5)


def test_a_hang_is_a_card(hang: Run) -> None:
    card = run_card(hang)
    assert repr(card).startswith("HANG after 1.5 s at train.py:6: rank 2 never joined all_reduce #1.\n")
    page = shown(card)
    headline = page.select_one(".ls-bad > p.ls-red")
    assert headline and headline.get_text() == text.headline(hang)
    rows = [row.get_text(" ") for row in page.select("tbody tr")]
    odd = [row.get_text(" ") for row in page.select("tbody tr.ls-odd")]
    assert len(rows) == 3 and odd == [rows[2]] and "barrier #1" in odd[0]
    code = [" ".join(line.get_text(" ").split()) for line in page.select(".ls-code > div")]
    assert code == [
        "3 dist.init_process_group(\"gloo\")",
        "4 if dist.get_rank() != 2: the ranks part here",
        "5 dist.all_reduce(t) # <b> ← ranks 0 and 1",
        "6 dist.barrier() ← rank 2",
    ]  # fmt: skip
    assert [line.get_text(" ").split()[0] for line in page.select(".ls-branch")] == ["4"]
    (link,) = page.select("a")
    assert link["href"] == "03_debugging.ipynb#Hangs" and "It waits." in page.get_text()


def test_the_code_of_a_card_has_the_branch_and_what_it_does(hang: Run) -> None:
    assert hang.cause is not None and hang.cause.frame is not None
    file = Path(hang.cause.frame.file).with_name("loop.py")
    file.write_text("for step, batch in enumerate(data):\n    if step == batches:\n        break\n" + "    step += 1\n" * 20
                    + "    dist.all_reduce(t)\n")  # fmt: skip
    there = Waiting(0, "all_reduce #6", "4 × float32", 1.0, Frame(str(file), 24))
    gone = Waiting(1, "finished after all_reduce #5", differs=True, waits=False)
    hang.cause = replace(hang.cause, rows=(there, gone), frame=there.frame, branch=2)
    code = [" ".join(line.get_text(" ").split()) for line in shown(run_card(hang)).select(".ls-code > div")]
    assert code == ["2 if step == batches: the ranks part here", "3 break", "…", "24 dist.all_reduce(t) ← rank 0"]


@pytest.mark.parametrize(("between", "reached"), [(3, True), (4, False)])
def test_the_code_of_a_card_reaches_a_mistake_that_is_named_near(hang: Run, between: int, reached: bool) -> None:
    assert hang.cause is not None and hang.cause.frame is not None
    file = Path(hang.cause.frame.file).with_name(f"near_{between}.py")
    file.write_text("dist.all_reduce(t)\n" + "x += 1\n" * between + "dist.all_reduce(loss)  # BUG: only rank 0\n")
    there = Waiting(0, "all_reduce #1", "4 × float32", 1.0, Frame(str(file), 1))
    hang.cause = replace(hang.cause, rows=(there,), frame=there.frame, branch=None)
    numbers = [line.get_text(" ").split()[0] for line in shown(run_card(hang)).select(".ls-code > div")]
    assert numbers == (["1", "2", "3", "4", "5"] if reached else ["1", "2"])


def test_on_a_narrow_screen_each_rank_says_what_it_waits_in_and_its_place_is_below(
    browser: Any, hang: Run, tmp_path: Path
) -> None:
    assert hang.cause is not None
    rows = (
        *hang.cause.rows,
        replace(hang.cause.rows[2], rank=3, what="finished after barrier #1", since=None, waits=False),
    )
    hang.cause = replace(hang.cause, rows=rows)
    (tmp_path / "page.html").write_text(run_card(hang)._repr_mimebundle_()["text/html"], encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"file://{tmp_path}/page.html")
    said = page.evaluate("""() => [...document.querySelectorAll("tbody tr")].map((row) => {
      const [rank, what, ...more] = [...row.cells].filter((cell) => cell.textContent);
      const below = what.getBoundingClientRect().top + what.getClientRects()[0].height;
      return [getComputedStyle(what, "::before").content,
        more.every((cell) => cell.getBoundingClientRect().top >= below - 1),
        Math.round(more[0].getBoundingClientRect().left)] })""")
    call, none = '"waits in "', "none"
    assert [one[0] for one in said] == [call, call, call, none]
    assert all(one[1] for one in said) and len({one[2] for one in said}) == 1, said


def test_short_cells_are_not_broken_where_there_is_place_for_their_words(browser: Any, tmp_path: Path) -> None:
    code = "dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=all_of_them)"
    rows = (
        Row("0", "finished after all_reduce #2", waits=False, differs=True),
        Row("1", "all_reduce #3", "3×5 float32", "0.7 s", at="average_gradients.py:35", code=code),
        Row("2", "has said nothing since 12:00:00, when it was in a call of its own making", waits=False),
    )
    (tmp_path / "page.html").write_text(said(f'<div class="ls-card">{table(rows)}</div>'), encoding="utf-8")
    for width in (1000, 700, 650, 500):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto(f"file://{tmp_path}/page.html")
        lines = page.evaluate("""() => [...document.querySelectorAll("tr:not(:last-child) td:not(:last-child)")].filter(
          (cell) => cell.textContent).map((cell) => { const all = document.createRange();
            all.selectNodeContents(cell); return [cell.textContent, all.getClientRects().length] })""")
        assert (len(lines) == 6 and all(count == 1 for _, count in lines)) or width < 600, lines
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


def test_a_rank_that_has_finished_stands_nowhere(hang: Run) -> None:
    assert hang.cause is not None
    *waiting, other = hang.cause.rows
    finished = replace(other, what="finished after barrier #1", since=None, waits=False)
    hang.cause = replace(hang.cause, rows=(*waiting, finished), branch=None)
    page = shown(run_card(hang))
    code = page.select_one(".ls-code")
    assert code and "ranks 0 and 1" in code.get_text() and "rank 2" not in code.get_text()
    assert "finished after barrier #1" in page.get_text()


def test_an_error_is_a_card_and_no_markup() -> None:
    error = Error("ValueError", HOSTILE, (), f"Traceback\n{HOSTILE}")
    page = shown(run_card(Run(2, "cpu", [], cause=Cause(Kind.RAISED, HOSTILE, (1,), error=error))))
    assert not page.select("script, b") and page.get_text().count("<script>alert(1)</script>") == 2


def test_a_long_line_of_a_traceback_breaks_between_words(browser: Any, tmp_path: Path) -> None:
    """JupyterLab breaks the lines of an output anywhere."""
    error = Error("ValueError", "", (), "parameters " * 40)
    card = run_card(Run(2, "cpu", [], cause=Cause(Kind.RAISED, "It raised.", (1,), error=error)))
    page = (
        f"<style>.jp pre {{ word-break: break-all }}</style><div class=jp>{card._repr_mimebundle_()['text/html']}</div>"
    )
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    window = browser.new_page(viewport={"width": 390, "height": 800})
    window.goto(f"file://{tmp_path}/page.html")
    parts = window.evaluate("""() => { const text = document.querySelector(".ls-card pre").firstChild;
      return [...text.data.matchAll(/parameters/g)].map(({index}) => {
        const word = document.createRange(); word.setStart(text, index); word.setEnd(text, index + 10);
        return word.getClientRects().length }) }""")
    assert parts == [1] * 40


def check(name: str, outcome: CheckOutcome, found: Diagnosis | None = None, reason: str = "") -> CheckResult:
    return CheckResult(name, name, outcome, found, reason)


def test_a_failure_comes_first_and_what_passed_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "chapters")
    why, read = "Because " + HOSTILE, 'chapter 1, "The mean"'
    rows = (
        Row("0", "barrier", at="add.py:3", code="reduce(<b>)", differs=True),
        Row("1", "finished after barrier #1", waits=False),
        Row("2", HOSTILE),
    )
    more = f"One.\n\n{HOSTILE}"
    wrong = Diagnosis(
        "raised", f"It is 3.\n{HOSTILE}", more, (0,), "solutions/train_ddp.py", 7, read, why, HOSTILE, rows
    )
    report = Report(0, (ExerciseResult("train_ddp", (
        check("adds", CheckOutcome.PASSED), check("keeps", CheckOutcome.PASSED),
        check("means", CheckOutcome.FAILED, wrong), check("on a GPU", CheckOutcome.NOT_RUN, reason="there is none"),
    ), 1.0),), faults=(HOSTILE,))  # fmt: skip
    card = report_card(report)
    assert repr(card) == report_text(report, "%hint") and "%hint train_ddp" in repr(card)
    page = shown(card)
    assert not page.select("script, b")
    said = page.get_text(" ")
    assert said.index("means") < said.index("2 passed") < said.index("1 not run")
    assert [one.get_text() for one in page.select("summary")] == ["✓ 2 passed", "– 1 not run: there is none"]
    assert not page.select("details[open]")
    assert [one.get_text() for one in page.select("details li")] == ["adds", "keeps", "on a GPU"]
    cells = [[cell.get_text() for cell in row.select("td")] for row in page.select("tbody tr")]
    assert cells[:2] == [["0", "barrier", "add.py:3 reduce(<b>)"], ["1", "finished after barrier #1", ""]]
    assert [cell.get_text() for cell in page.select("th")] == ["rank", "waits in, or ended", "at"]
    assert cells[2:] == [["2", HOSTILE, ""]]
    assert [row.get_text() for row in page.select("tr.ls-odd")] == ["0 barrier add.py:3 reduce(<b>)"]
    assert [cell.get_text() for cell in page.select("td.ls-in")][:1] == ["barrier"] and len(
        page.select("tr .ls-in")
    ) == 2
    assert [one.get_text() for one in page.select("td code")] == ["reduce(<b>)"]
    assert more in [one.get_text() for one in page.select("p")], "beside a table it is sentences"
    assert [link["href"] for link in page.select("a")] == [
        "../solutions/train_ddp.py#L7",
        "01_internals.ipynb#The-mean",
    ]


def test_backticks_become_code_and_no_markup(hang: Run) -> None:
    said = "Call `loss.<b>()`, not one ` alone."
    wrong = Diagnosis("raised", f"{said}\n{said}", why=said)
    assert hang.cause is not None
    hang.cause = replace(hang.cause, headline=said, notes=(said,))
    report = report_card(Report(0, (ExerciseResult("add", (check("adds", CheckOutcome.FAILED, wrong),), 1.0),)))
    for card, count in ((report, 3), (run_card(hang), 2)):
        page = shown(card)
        assert [one.get_text() for one in page.select("p code")].count("loss.<b>()") == count and not page.select("b")
        assert "not one ` alone." in page.get_text()


def test_why_a_check_was_not_run_is_read_without_a_click() -> None:
    checks = (
        check("adds", CheckOutcome.FAILED, Diagnosis("raised", "It raised.")),
        check("on a GPU", CheckOutcome.NOT_RUN, reason="there is no GPU"),
        check("keeps", CheckOutcome.NOT_RUN, reason="needs “adds”"),
        check("on two GPUs", CheckOutcome.NOT_RUN, reason="there is no GPU"),
        check("on a host <b>", CheckOutcome.NOT_RUN, reason="hosts need <root>"),
        check("without a word", CheckOutcome.NOT_RUN),
    )
    page = shown(report_card(Report(0, (ExerciseResult("add", checks, 1.0),))))
    assert [one.get_text() for one in page.select("summary")] == [
        "– 2 not run: there is no GPU",
        "– 1 not run: needs “adds”",
        "– 1 not run: hosts need <root>",
        "– 1 not run",
    ]
    listed = [[item.get_text() for item in one.select("li")] for one in page.select("details")]
    assert listed == [["on a GPU", "on two GPUs"], ["keeps"], ["on a host <b>"], ["without a word"]]


def test_a_stub_is_one_quiet_line() -> None:
    found = Diagnosis(UNWRITTEN, "Nothing is written here yet.\nTo do: add.", file="add.py", line=3, why="Because.")
    report = Report(0, (ExerciseResult("add", (
        check("adds", CheckOutcome.FAILED, found), check("keeps", CheckOutcome.NOT_RUN, reason="needs “adds”"),
    ), 1.0),))  # fmt: skip
    page = shown(report_card(report))
    assert [line.get_text() for line in page.select("p")] == [
        "✗ Nothing is written here yet (or not saved: Ctrl+S) ·\xa0add.py:3 ·\xa0%hint add"
    ], "no line ends with a dot"
    assert not page.select("details, .ls-bad, .ls-good")


def test_after_a_pass_a_link_leads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "chapters")
    report = Report(0, (ExerciseResult("setup_ddp", (check("joins", CheckOutcome.PASSED),)),))
    file = "../exercises/train_ddp.py"
    said = 'Next: train_ddp, chapter 2, "Exercise: implement train_ddp" · %check train_ddp'
    assert [link["href"] for link in shown(report_card(report, [said])).select("a")] == [
        file,
        "02_setup.ipynb#Exercise:-implement-train_ddp",
    ]
    said = 'Next: chapter 2, "Sharding" · then train_ddp: %check train_ddp'
    compare = "To compare: %solution setup_ddp"
    card = report_card(report, [said, compare])
    assert repr(card) == f"{report_text(report)}\n\n{said}\n{compare}"
    page = shown(card)
    assert page.select(".ls-card p")[-1].get_text() == said + compare, "within the card"
    assert [one.get_text() for one in page.select("summary")] == ["the checks"], "the head has counted them"
    assert [code.get_text() for code in page.select("p:last-of-type code")] == [
        "%check train_ddp",
        "%solution setup_ddp",
    ]
    assert [link["href"] for link in page.select("a")] == ["02_setup.ipynb#Sharding", file]


def test_a_pass_of_the_courses_solution_is_not_shown_as_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(0, (ExerciseResult("setup_ddp", (check("joins", CheckOutcome.PASSED),)),))
    card = report_card(report, of_solutions=True)
    assert repr(card).startswith("The course's solution:\n\nsetup_ddp ") and report_text(report) in repr(card)
    page = shown(card)
    head = page.select_one(".ls-row")
    assert head and head.get_text().startswith("The course's solution: setup_ddp1 of 1 checks passed")
    assert not page.select(".ls-good, .ls-row .ls-green") and [one.get_text() for one in page.select("li")] == ["joins"]
    assert "solution" not in repr(report_card(report))
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", str(ROOT / "chapters" / ".." / "solutions"))
    assert checking.are_solutions(Course(ROOT))
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", str(ROOT / "exercises"))
    assert not checking.are_solutions(Course(ROOT))


STUB = '''
class Adder:
    """Adds on *every* rank, `<b>` too. The
    second line.

        adder = Adder(2)
        adder.add(<b>)

    - One
      item.
    - Another `with_code`.

    Args:
        number: what to add, in a text
            of two lines.
        *others: `more`.

    Raises:
        ValueError or TypeError: it can't.
        RuntimeError (torch's <b>): a group.

    Returns:
        A `sum`: always.
    """

    def add(
        self,
    ) -> int:
        """Add <script>."""

    def _private(self) -> None:
        """Not asked for."""
'''


def test_a_contract_is_rendered_and_a_terminal_sees_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adder.py").write_text(STUB)
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", str(tmp_path))
    made: list[Card] = []
    monkeypatch.setattr(contracts, "display", made.append)
    contracts.contract("adder", "Adder")
    body, _, method = STUB.strip("\n").partition("\n\n    def add(")
    method = method.partition("\n\n    def _private")[0]
    assert repr(made[0]) == f"exercises/adder.py\n\n{body}\n\n    def add({method}"
    page = shown(made[0])
    assert [one.get_text() for one in page.select("pre")] == [
        "class Adder:", "adder = Adder(2)\nadder.add(<b>)", "def add(\n    self,\n) -> int:"]  # fmt: skip
    assert [one.get_text() for one in page.select("p")] == ["exercises/adder.py",
        "Adds on every rank, <b> too. The second line.", "Args:", "Raises:", "Returns:", "A sum: always.",
        "Add <script>."]  # fmt: skip
    assert [one.get_text() for one in page.select("li")] == ["One item.", "Another with_code.",
        "number: what to add, in a text of two lines.", "*others: more.", "ValueError or TypeError: it can't.",
        "RuntimeError (torch's <b>): a group."]  # fmt: skip
    assert [one.get_text() for one in page.select("li code, p code, em")] == [
        "exercises/adder.py", "every", "<b>", "with_code", "number", "*others", "more", "ValueError or TypeError", "sum"]  # fmt: skip
    assert not page.select("script, b")


def test_every_contract_is_whole_as_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its words are there, and no mark of its text is left."""
    monkeypatch.delenv("LOCKSTEP_SUBMISSION", raising=False)
    made: list[Card] = []
    monkeypatch.setattr(contracts, "display", made.append)
    called = re.findall(
        r"^contract\((.*)\)$", "\n".join(f.read_text() for f in (ROOT / "chapters/source").glob("*.py")), re.M
    )
    for call in called:
        contracts.contract(*ast.literal_eval(f"({call},)"))
    assert len(made) == len(called) > 10
    for card in made:
        said = shown(card).select_one(".ls-card")
        assert said is not None
        words = re.sub(r"\*|`|\"\"\"|(?m:^ *- )", " ", repr(card)).split()
        assert re.sub(r"\*", " ", said.get_text(" ")).replace(" ", "").replace("\n", "").replace("\xa0", "") == "".join(
            words
        )
        assert "`" not in said.get_text()


def test_a_hint_names_the_command_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course = make_course(tmp_path)
    monkeypatch.setenv("LOCKSTEP_COURSE", str(course.root))
    (course.autograder / "hints").mkdir(exist_ok=True)
    (course.autograder / "hints" / "add.md").write_text("# One\n\nFirst.\n---\nSecond.\n")
    told: list[Card] = []
    monkeypatch.setattr(exercise, "display", told.append)
    for _ in range(2):
        exercise.ExerciseMagics().hint("add")
    first, last = map(repr, told)
    assert first.startswith("Hint 1 of 2\n\n**One**\n\nFirst.") and first.endswith(
        "in any other cell, `%hint add`. It is the last and gives away almost the whole answer."
    )
    assert last == "Hint 2 of 2\n\nSecond.\n\nThat was the last hint."
    folded = [shown(one).select("details") for one in told]
    assert [[one.get_text() for one in each] for each in folded] == [[], ["Hint 1OneFirst."]]
    assert shown(told[0]).strong.get_text() == "One" and "%hint add" in shown(told[0]).get_text()


def test_the_same_mistake_in_two_checks_is_explained_once() -> None:
    twice = [
        check(name, CheckOutcome.FAILED, Diagnosis(id, f"{name} did.", why=why, read=read))
        for name, id, why, read in (
            ("one", "a", "Because.", "page 1"), ("two", "a", "Because.", "page 1"), ("three", "b", "Since.", "page 2")
        )
    ]  # fmt: skip
    said = [one.get_text() for one in shown(report_card(Report(0, (ExerciseResult("add", tuple(twice)),)))).select("p")]
    assert said[:-1] == ["one did.", "Because.", "Read: page 1", "two did.", "three did.", "Since.", "Read: page 2"]


def test_a_solution_is_shown_after_a_pass_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course = make_course(tmp_path)
    monkeypatch.setenv("LOCKSTEP_COURSE", str(course.root))
    (course.solutions / "add.md").write_text("Why it is so.\n")
    told: list[Markdown] = []
    monkeypatch.setattr(exercise, "display", told.append)
    magics = exercise.ExerciseMagics(shell=None)  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match="add has not passed yet"):
        magics.solution("add")
    progress.record(course, "add", 1, 2)
    with pytest.raises(UsageError, match="add has not passed yet"):
        magics.solution("add")
    assert told == []
    progress.record(course, "add", 2, 2)
    magics.solution("add")
    code, whole, why = told[0].data.split("\n\n", 2)
    assert code == f"```python\n{code_of(solution(course, 'add'))}```" and why == "Why it is so.\n"
    assert whole.endswith("`./lockstep solution add` shows the whole file.")
    assert to_compare(course, ["add"], "%solution") == "To compare: %solution add"
    (course.solutions / "add.py").unlink()
    with pytest.raises(UsageError, match="no solutions"):
        magics.solution("add")
    assert to_compare(course, ["add"], "%solution") == "" == to_compare(course, ["add", "add"], "%solution")


def test_the_code_where_a_check_hung_is_in_its_card() -> None:
    """... with the branch; the table and the place don't say it again."""
    code = (
        CodeLine(6, "    if rank == 0:", "the ranks part here", branch=True),
        CodeLine(7, f"        reduce({HOSTILE})", "← rank 0", differs=True),
        CodeLine(9, "    barrier()", "← rank 1"),
    )
    rows = (Row("0", "barrier", at="add.py:7", code="reduce()", differs=True), Row("1", "finished"))
    hung = Diagnosis(
        "hang", "It hangs.", "Rank 0 took `if`.", (0,), "add.py", 7, source="reduce()", rows=rows, code=code
    )
    report = Report(0, (ExerciseResult("add", (check("adds", CheckOutcome.FAILED, hung),), 1.0),))
    page = shown(report_card(report))
    drawn = [
        [cell.get_text().replace("\xa0", " ") for cell in line.select("span")] for line in page.select(".ls-code > div")
    ]
    lines = [[str(line.number), line.source[4:], line.note] for line in code]
    assert drawn == [*lines[:2], ["…", "", ""], lines[2]], "without the common indent, a gap marked"
    assert [line.get_text()[:1] for line in page.select(".ls-code .ls-branch")] == ["6"]
    assert [cell.get_text() for cell in page.select(".ls-code .ls-red")] == ["← rank 0"]
    assert page.get_text().count("reduce()") == 0 and not page.select("pre, b")
    assert [one.get_text() for one in page.select("p")][:3] == ["It hangs.", "add.py:7", "Rank 0 took if."]
    assert page.get_text().count("%hint add") == 1


class Output:
    """Stands for an output of a notebook: what it held, one after another."""

    def __init__(self) -> None:
        self.held: list[Card] = []

    def display(self, card: Card, display_id: bool = False) -> Output:
        self.held.append(card)
        return self

    update = display

    @property
    def shown(self) -> str:
        return " ".join(shown(self.held[-1]).get_text(" ").replace("◌", "").split())


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    made = Output()
    monkeypatch.setattr(checking, "display", made.display)
    monkeypatch.delenv("LOCKSTEP_SUBMISSION", raising=False)
    return made


def test_ticks_appear_as_they_come_and_the_report_takes_their_place(output: Output) -> None:
    of = Course(ROOT).count_checks("average_gradients")
    found = Diagnosis("raised", "It is 3.")
    with checking.Checking(Course(ROOT), ["average_gradients"]) as going_on:
        seen = [output.shown]
        for one in (check("adds", CheckOutcome.PASSED), check("keeps <b>", CheckOutcome.FAILED, found)):
            going_on("average_gradients", one)
            seen.append(output.shown)
    assert seen == [
        f"average_gradients 0 of {of} checks",
        f"average_gradients 1 of {of} checks ✓ adds",
        f"average_gradients 2 of {of} checks ✓ adds ✗ keeps <b>",
    ]
    report = Card("over", "over")
    going_on.end(report)
    assert output.held[-1] is report and len(output.held) == 4


def test_of_many_exercises_the_last_is_shown_in_full(output: Output) -> None:
    going_on = checking.Checking(Course(ROOT), ["average_gradients", "setup_ddp"])
    assert output.shown.startswith("2 exercises 0 of ")
    going_on("average_gradients", check("adds", CheckOutcome.PASSED))
    going_on("setup_ddp", check("joins", CheckOutcome.NOT_RUN, reason="needs “adds”"))
    of = Course(ROOT).count_checks("average_gradients")
    assert output.shown.endswith(f" ✗ average_gradients: 1 of {of} – joins: needs “adds”")


def test_what_was_stopped_moves_no_longer(output: Output) -> None:
    with pytest.raises(KeyboardInterrupt), checking.Checking(Course(ROOT), ["setup_ddp"]) as going_on:
        going_on("setup_ddp", check("adds", CheckOutcome.PASSED))
        assert shown(output.held[-1]).select(".ls-moving")
        raise KeyboardInterrupt
    assert "then it was stopped" in output.shown and not shown(output.held[-1]).select(".ls-moving")


def test_where_outputs_are_compared_there_is_only_the_report(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", "solutions")
    with checking.Checking(Course(ROOT), ["setup_ddp"]) as going_on:
        going_on("setup_ddp", check("adds", CheckOutcome.PASSED))
    assert output.held == []
    report = Card("over", "over")
    going_on.end(report)
    assert output.held == [report]


def test_a_run_that_comes_to_a_stub_is_one_quiet_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises the same error, and one's own code may: then it is a failure."""
    course = make_course(tmp_path)
    monkeypatch.setenv("LOCKSTEP_COURSE", str(course.root))
    stub = course.root / "exercises" / "add.py"
    stub.parent.mkdir()
    stub.touch()

    def ran(message: str, file: Path) -> Card | None:
        error = Error("NotImplementedError", message, (Frame("cell", 3), Frame(str(file), 7)), "Traceback")
        return unwritten_card(Run(2, "cpu", [], cause=Cause(Kind.RAISED, message, (0, 1), error=error)))

    card = ran("add: add both", course.root / "chapters" / ".." / "exercises" / "add.py")
    assert card is not None and repr(card) == "✗ Nothing is written here yet · exercises/add.py:7 · %hint add"
    (line,) = shown(card).select("p")
    assert line.get_text().replace("\xa0", " ").replace(f" {UNSAVED}", "") == repr(card)
    assert ran("aten: an operator is missing", stub) is None
    assert ran("add: add both", course.solutions / "add.py") is None
    assert unwritten_card(Run(2, "cpu", [])) is None


def test_comparisons_see_the_text_and_not_the_card(hang: Run) -> None:
    """Times are in both; a rule covers the card whole, and the text's rules what may differ there."""
    same = chapters.rules(ROOT)
    bundles = []
    for seconds in (1.5, 12.75):
        hang.seconds = seconds
        bundles.append(run_card(hang)._repr_mimebundle_())
    first, second = ({kind: same(value) for kind, value in bundle.items()} for bundle in bundles)
    assert bundles[0] != bundles[1] and first == second and first["text/html"] == "A CARD"


def test_in_the_book_a_card_leads_to_the_book(hang: Run) -> None:
    body = BeautifulSoup(f"<p>{run_card(hang)._repr_mimebundle_()['text/html']}</p>", "html.parser")
    book._own_links(body)
    chapter = book.Rendered(outlines(Course(ROOT))[0], body, {}, {})
    book._link_references(chapter, {3: ("03_debugging", {"Hangs": "hangs"})})
    assert [link["href"] for link in body.select("a")] == ["03_debugging.html#hangs"]
