"""The summary of a GitHub Actions job: Markdown in which nothing of a submission's text is markup."""

from __future__ import annotations

import string

from ..classroom import ClassResult, GradingOutcome, Learner
from ..policy import Grade, Grades
from ..text import visible

MOST_BYTES = 1_000_000  # GitHub drops a step's summary above 1 MiB
MOST_FREQUENT = 8


def class_md(graded: ClassResult, grades: Grades) -> str:
    """A class: how the gradings ended, the most frequent diagnoses, and a row for each learner."""
    count = {outcome: sum(one.outcome is outcome for one in graded.learners) for outcome in GradingOutcome}
    ends = " · ".join(f"{number} {outcome.value}" for outcome, number in count.items() if number)
    lines = ["## Lockstep", "", f"{len(graded.learners)} learners: {ends}. {plain(graded.isolation.rstrip('.'))}.", ""]
    for one in graded.faults:
        why = one.report.faults[0].strip().splitlines()[-1:] if one.report else []
        lines.append(f"- **Fault of the grader, costs no points:** {plain(one.id)}: {plain(''.join(why))}")
    lines += [""] if graded.faults else []
    if graded.frequent:
        said = ", ".join(f"{plain(id)} {number}" for id, number in graded.frequent[:MOST_FREQUENT])
        lines += [f"Most frequent: {said}.", ""]
    head = " | ".join(plain(name) for name in graded.exercises)
    lines += [f"| learner | points | {head} |", f"|---|---|{'---|' * len(graded.exercises)}"]
    size = len("\n".join(lines).encode())
    for number, one in enumerate(graded.learners):
        row = _row(one, graded.exercises, grades[one.id])
        size += len(row.encode()) + 1
        if size > MOST_BYTES - 200:
            lines += ["", f"{len(graded.learners) - number} more learners; grades.csv has them all."]
            break
        lines.append(row)
    return "\n".join([*lines, "", f"Seed {graded.seed}.", ""])


def _row(one: Learner, exercises: tuple[str, ...], grade: Grade) -> str:
    points = {own.name: own.points for own in grade.exercises}
    total = f"{grade.score} of {grade.most}" if one.outcome is GradingOutcome.GRADED else one.outcome.value
    cells = (f"{points[name]}" if name in points else "" for name in exercises)
    return f"| {plain(one.id)} | {plain(total)} | {' | '.join(map(plain, cells))} |"


def plain(text: str) -> str:
    """One line of text that Markdown and HTML leave unchanged: every punctuation mark becomes a character reference.

    By CommonMark's rules, a reference is never structure.
    """
    return "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in visible(" ".join(text.split())))
