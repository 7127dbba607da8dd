"""What a teacher sees when a class is graded: everybody's points, what was found most often, where the files are."""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import mean, median

from ..course import short
from ..grading.classroom import GradingOutcome, Learner
from ..grading.exports.pages import plural
from ..grading.policy import ABSENT, Grade, points_of
from ..grading.writers import Marked
from ..ranks.text import fit

FEW = 30  # A larger class is a few numbers at the terminal; its table is in grades.csv
LOWEST = 5
FREQUENT = 5
MAIN = {
    "index.html": ("Class page", "open it in a browser"),
    "reports": ("Reports", "a page for each learner, to hand back"),
    "grades.csv": ("Gradebook", ""),
    "lms": ("Upload", "what Moodle or Canvas takes back"),
}


def points(marked: Marked, columns: int) -> list[str]:
    """Each learner's points, or those of a large class in a few numbers."""
    grades = [(one, marked.grades[one.id]) for one in marked.graded.learners]
    return _table(grades, marked.graded.exercises, columns) if len(grades) <= FEW else _numbers(grades, columns)


def _table(grades: list[tuple[Learner, Grade]], exercises: tuple[str, ...], columns: int) -> list[str]:
    """A row for each learner. Where the exercises have no room beside the points, the points alone."""
    rows = [["learner", "points", *exercises]]
    rows += [
        [one.id, _total(one, grade), *(points_of(one, grade, name) for name in exercises)] for one, grade in grades
    ]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(wide) + 2 * len(wide) > columns:
        rows, wide = [row[:2] for row in rows], wide[:2]
    lines = [
        "  ".join(
            ["", row[0].ljust(wide[0]), *(cell.rjust(n) for cell, n in zip(row[1:], wide[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
    absent = any(ABSENT in row for row in rows)
    return [*lines, f"  {ABSENT} not handed in"] if absent else lines


def _total(one: Learner, grade: Grade) -> str:
    return f"{grade.score} of {grade.most}" if one.outcome is GradingOutcome.GRADED else one.outcome.value


def _numbers(grades: list[tuple[Learner, Grade]], columns: int) -> list[str]:
    graded = [
        (float(grade.score), float(grade.most), one.id)
        for one, grade in grades
        if one.outcome is GradingOutcome.GRADED and grade.score is not None and grade.most
    ]
    if not graded:
        return []
    scores, most = [score for score, _, _ in graded], {most for _, most, _ in graded}
    if len(most) == 1:
        lines = [f"  mean {mean(scores):.3g}, median {median(scores):.4g} of {max(most):g} points"]
    else:
        shares = [100 * score / most for score, most, _ in graded]
        lines = [f"  mean {mean(shares):.0f} %, median {median(shares):.0f} % of the points"]
    full, none = sum(score >= most for score, most, _ in graded), sum(score <= 0 for score in scores)
    lines.append(f"  {full} with all points, {none} without a point")
    below = sorted((one for one in graded if one[0] < one[1]), key=lambda one: (one[0] / one[1], one[2]))
    named = (f"{id} {score:g}" + ("" if len(most) == 1 else f" of {of:g}") for score, of, id in below[:LOWEST])
    lines += [fit(f"  lowest: {' · '.join(named)}", columns)] if below else []
    return [*lines, "  everybody's points: grades.csv"]


def frequent(marked: Marked, columns: int) -> list[str]:
    """The most frequent diagnoses by their titles, each with how many learners have it."""
    found = marked.graded.frequent
    if not found:
        return []
    lines = ["Found most often:"]
    for id, number in found[:FREQUENT]:
        entry = marked.course.catalogue.get(id)
        lines.append(fit(f"  {entry.title if entry else id}: {plural(number, 'learner')}", columns))
    more = len(found) - FREQUENT
    return [*lines, f"  and {more} more, on the class page"] if more > 0 else lines


def files(written: list[Path], columns: int) -> list[str]:
    """Where to look next: the class page, the reports, the gradebook; the other files by name."""
    rows = []
    for path in written:
        if path.name in MAIN:
            name, said = MAIN[path.name]
            rows.append((name, short(path) + (f" · {said}" if said else "")))
    others = [path.name for path in written if path.name not in MAIN]
    rows += [("Also", ", ".join(others)), ("Again", "the same command with --only ID grades one learner again")]
    return [
        textwrap.fill(f"{name:<12}{said}", columns, subsequent_indent=" " * 12, break_long_words=False)
        for name, said in rows
    ]
