"""How what the course has to say looks in a terminal."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from ..course import Chapter, Course, hints, progress
from ..course.outline import section_of
from ..course.standing import ChapterStanding, NextUp, next_up, standing
from ..grading.text import WIDTH, check_text, hint_text, is_explained, is_unwritten, stage_text, waiting_text
from ..grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from ..ranks.text import fit
from .console import console, painted, width

BESIDE = 78  # From this width on a chapter's counts stand beside its title
STYLES = {CheckOutcome.PASSED: "green", CheckOutcome.FAILED: "bold red", CheckOutcome.NOT_RUN: "dim"}


def show_check(check: CheckResult, exercise: str, on: Console) -> None:
    """One check, its mark and name colored."""
    said = painted(check_text(check, exercise, min(width(), WIDTH)))
    end = len(said.plain) if is_unwritten(check) else (said.plain + "\n").index("\n")
    said.stylize(STYLES[check.outcome] if not is_unwritten(check) else "yellow", 0, end)
    if check.diagnosis and is_explained(check):
        said.highlight_regex(rf"(?<=\n) +{re.escape(check.diagnosis.id)}(?=\n)", "dim")
    on.print(said)


def show_waiting(checks: list[CheckResult], on: Console) -> None:
    """The checks that wait for others."""
    on.print(Text(waiting_text(checks, min(width(), WIDTH)), style="dim"))


def show_score(result: ExerciseResult) -> None:
    """The line under an exercise's checks."""
    style = "bold green" if result.passed else "bold"
    console().print(Text(f"{result.name}: {result.summary}", style=style))
    for below in filter(None, (hint_text(result), stage_text(result))):
        console().print(painted(below))


def show_section(course: Course, exercise: str) -> None:
    """Where to read before an exercise is begun, and how long it takes."""
    if found := section_of(course, exercise):
        outline, section = found
        effort = f" ({section.effort})" if section.effort else ""
        console().print(painted(fit(f'Read: chapter {outline.number}, "{section.plain}"{effort}', width())))


def show_next(course: Course, report: Report) -> None:
    """After a pass, what comes next, and where the course's own solution is."""
    if not report.passed:
        return
    names = [one.name for one in report.exercises]
    coming = next_up(course, names[-1])
    compare = hints.to_compare(course, names, "./lockstep solution")
    if coming is not None:
        console().print(painted(next_text(coming, width())))
    if compare:
        console().print(painted(compare))


def next_text(coming: NextUp, columns: int) -> str:
    """What comes next, in lines of so many columns. The command is there to be copied, so no line breaks it."""
    said = coming.said("./lockstep check")
    if len(said) > columns:
        said = re.sub(r"(:| ·) (?=\./lockstep)", r"\1\n    ", said).replace(" ·\n", "\n")
    return fit(said, columns)


def show_markdown(text: str) -> None:
    theme = Theme({"markdown.code": "cyan"})
    Console(highlight=False, width=min(Console().width, 100), theme=theme).print(Markdown(text))


def show_code(text: str, language: str = "python") -> None:
    """A solution: colored at a terminal, unchanged in a pipe."""
    if console().is_terminal:
        console().print(Syntax(text, language, background_color="default"))
    else:
        print(text, end="")


def show_status(course: Course) -> None:
    """Where the learner is in the course; each chapter with what is passed, what is begun, and what is left."""
    now = standing(course)
    known = {one.outline.name: one for one in now.chapters}
    if now.here:
        number = known[now.here[0]].outline.number
        console().print(Text(fit(f"You are in chapter {number}, “{now.here[1]}”.", width()), style="bold"))
    coming = next_up(course)
    longest = max(map(len, course.names)) if width() >= BESIDE else 0
    for number, chapter in enumerate(course.chapters, 1):
        if chapter.name not in known and not set(chapter.exercises) & set(course.names):
            continue  # a course of some exercises has not all chapters
        _show_chapter(number, chapter, known.get(chapter.name))
        of = {name: progress.of(course, name) for name in chapter.exercises if name in course.names}
        passed = [name for name, done in of.items() if done.passed]
        begun = {name: done for name, done in of.items() if not done.passed and (done.attempts or done.hints)}
        _show_names("✓", passed, "green")
        rows = Table(box=None, pad_edge=False, show_header=False)
        for wide in (4, 1, longest, 13 if longest else 0, 0):  # the same in each chapter, so that all form one table
            rows.add_column(min_width=wide)
        for name, done in begun.items():
            score = f"best {done.best} of {done.max_score}" if done.max_score else ""
            counts = (_counted(done.attempts, "try", "tries"), _counted(done.hints, "hint", "hints"))
            rows.add_row("", "◐", name, score, Text(", ".join(filter(None, counts)), style="dim"), style="yellow")
        if begun:
            console().print(rows)
        _show_names("○", _not_tried([name for name in of if name not in passed and name not in begun], of), "dim")
    console().print(Text(fit("\n      ✓ passed  ◐ begun  ○ not tried yet", width()), style="dim"))
    if now.here is None and not any(one.complete for one in now.chapters):
        said = fit("\nStart with ./lockstep lab: it opens the first chapter.", width())
    else:
        said = "\n" + next_text(coming, width()) if coming is not None else ""
    if said:
        shown = painted(said)
        shown.stylize("bold")
        console().print(shown)


def _not_tried(names: list[str], of: Iterable[str]) -> list[str]:
    """The names; of a group, such as the clinic's cases, only how many there are."""
    left = Counter(name.partition("/")[0] for name in names if "/" in name)
    every = Counter(name.partition("/")[0] for name in of if "/" in name)
    groups = [f"{group} ({n} more)" if n < every[group] else f"{group} ({n})" for group, n in left.items()]
    return [*(name for name in names if "/" not in name), *groups]


def _show_names(mark: str, names: list[str], style: str) -> None:
    """Exercises of which no more is to be said, in one line if there is room."""
    if names:
        whole = ", ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
        begin, margin = f"      {mark}  ", " " * 9
        said = textwrap.fill(
            whole, width(), initial_indent=begin, subsequent_indent=margin, break_on_hyphens=False
        ).replace("\N{NO-BREAK SPACE}", " ")
        console().print(Text(said, style=style))


def _show_chapter(number: int, chapter: Chapter, one: ChapterStanding | None) -> None:
    """Its title, and beside or below it what is done in it."""
    line = Text("✓ " if one and one.complete else "  ", style="green")
    line.append(f"{number} {chapter.title}", "default bold")
    said = f"questions {one.answered}/{one.questions}  exercises {one.passed}/{one.exercises}" if one else ""
    beside = width() >= BESIDE
    if beside:
        line.pad_right(BESIDE - 34 - len(line.plain))
    console().print(Text("\n").append(line).append("  " if beside else "\n    ").append(said, "dim"))


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}" if count else ""
