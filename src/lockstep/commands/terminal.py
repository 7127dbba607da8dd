"""How what the course has to say looks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..course import Course, progress
from ..course.standing import CourseStanding, next_up, standing
from ..grading.text import WIDTH, check_text, is_unwritten, stage_text
from ..grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from ..ranks.text import fit
from .console import console, painted, width

STYLES = {CheckOutcome.PASSED: "green", CheckOutcome.FAILED: "bold red", CheckOutcome.NOT_RUN: "dim"}


def show_check(check: CheckResult, exercise: str, on: Console) -> None:
    """One check, its mark and name coloured."""
    said = painted(check_text(check, exercise, min(width(), WIDTH)))
    end = len(said.plain) if is_unwritten(check) else (said.plain + "\n").index("\n")
    said.stylize(STYLES[check.outcome] if not is_unwritten(check) else "yellow", 0, end)
    on.print(said)


def show_score(result: ExerciseResult) -> None:
    """The line under an exercise's checks."""
    style = "bold green" if result.passed else "bold"
    line = f"{result.name}: {result.score} of {result.max_score} · {result.seconds:.1f} s"
    console().print(Text(line, style=style))
    if result.stage:
        console().print(painted(stage_text(result)))


def show_next(course: Course, report: Report) -> None:
    """After a pass, what comes next."""
    coming = next_up(course, report.exercises[-1].name) if report.passed else None
    if coming is not None:
        console().print(painted(fit(coming.said("./lockstep check"), width())))


def show_markdown(text: str) -> None:
    """A hint."""
    Console(highlight=False, width=min(Console().width, 100)).print(Markdown(text))


def show_code(text: str, language: str = "python") -> None:
    """A solution: coloured at a terminal, unchanged in a pipe."""
    if console().is_terminal:
        console().print(Syntax(text, language, background_color="default"))
    else:
        print(text, end="")


def show_status(course: Course) -> None:
    """Where the learner is in the course, then the exercises as a table."""
    _show_map(standing(course))
    table = Table(box=None, pad_edge=False)
    for title in ("chapter", "exercise", "", "checks", "tries", "hints"):
        table.add_column(title)
    for chapter in course.chapters:
        shown = chapter.title
        for name in chapter.exercises:
            if name not in course.names:
                continue
            done = progress.of(course, name)
            mark = Text("✓", style="green") if done.passed else Text("·" if done.attempts else " ")
            score = f"{done.best} of {done.max_score}" if done.max_score else ""
            table.add_row(shown, name, mark, score, str(done.attempts or ""), str(done.hints or ""))
            shown = ""
    console().print(table)


def _show_map(now: CourseStanding) -> None:
    if not now.chapters:
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    for one in now.chapters:
        table.add_row(
            Text("✓", style="green") if one.complete else Text(" "),
            f"{one.outline.number} {one.outline.title}",
            f"questions {one.answered}/{one.questions}",
            f"exercises {one.passed}/{one.exercises}",
        )
    console().print(table)
    if now.here:
        number = next(one.outline.number for one in now.chapters if one.outline.name == now.here[0])
        console().print(Text(f"You are in chapter {number}, “{now.here[1]}”.", style="bold"))
    console().print()
