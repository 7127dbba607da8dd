"""How things look in a terminal; rich does the work."""

from __future__ import annotations

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .doctor import Finding, State
from .grading import progress
from .grading.course import Course
from .grading.text import check_text
from .grading.verdict import CheckOutcome, CheckResult, ExerciseResult
from .standing import CourseStanding, standing

STYLES = {CheckOutcome.PASSED: "green", CheckOutcome.FAILED: "bold red", CheckOutcome.NOT_RUN: "dim"}


class _Console(Console):
    """A rich console that leaves it to its caller what a closed pipe means; rich itself ends the process."""

    def on_broken_pipe(self) -> None:
        """Called where the reader of a pipe has gone. Raises BrokenPipeError."""
        raise BrokenPipeError


def console() -> Console:
    """Where things are shown; the texts bring their own line breaks."""
    return _Console(highlight=False, soft_wrap=True)


def show_check(check: CheckResult, exercise: str) -> None:
    """One check, its first line coloured."""
    first, _, rest = check_text(check, exercise).partition("\n")
    console().print(Text(first, style=STYLES[check.outcome]))
    if rest:
        console().print(Text(rest))


def show_score(result: ExerciseResult) -> None:
    """The line under an exercise's checks."""
    style = "bold green" if result.passed else "bold"
    console().print(
        Text(f"\n{result.name}: {result.score} of {result.max_score} · {result.seconds:.1f} s", style=style)
    )


def show_markdown(text: str) -> None:
    """A hint."""
    Console(highlight=False, width=min(Console().width, 100)).print(Markdown(text))


def show_code(text: str, language: str = "python") -> None:
    """A solution: coloured for a person, as it is for a pipe."""
    if console().is_terminal:
        console().print(Syntax(text, language, background_color="default"))
    else:
        print(text, end="")


def show_finding(finding: Finding) -> None:
    """One line of the doctor's."""
    style = {State.GOOD: "green", State.ABSENT: "dim", State.BAD: "bold red"}[finding.state]
    line = Text(f"{finding.state.value} ", style=style)
    line.append(f"{finding.subject}: ", style="bold")
    line.append(finding.text, style="")
    if finding.remedy:
        line.append(f"  → {finding.remedy}", style="yellow")
    console().print(line)


def show_status(course: Course) -> None:
    """Where the learner stands in the course, then the exercises as a table."""
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
            mark = Text("✓", style="green") if done.get("passed") else Text("·" if done.get("attempts") else " ")
            score = f"{done['best']} of {done['max_score']}" if done.get("max_score") else ""
            table.add_row(shown, name, mark, score, str(done.get("attempts", "")), str(done.get("hints", "")))
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
