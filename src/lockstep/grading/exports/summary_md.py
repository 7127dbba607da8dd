"""The summary of a GitHub Actions job: Markdown in which nothing of a submission's text is markup."""

from __future__ import annotations

import html
import string

from ..classroom import ClassResult, GradingOutcome, Learner
from ..policy import Grade, Grades
from ..text import Worth, is_unwritten
from ..verdict import CheckOutcome, CheckResult, Report
from . import visible

MOST_BYTES = 1_000_000  # GitHub drops a step's summary above 1 MiB
MOST_EVIDENCE = 8_000
MOST_FREQUENT = 8
SIGNS = {CheckOutcome.PASSED: "✅", CheckOutcome.FAILED: "❌", CheckOutcome.NOT_RUN: "–"}


def summary_md(report: Report, title: str = "Lockstep") -> str:
    """A table of the exercises, then each check that did not pass with what was seen and what to read."""
    lines = [f"## {plain(title)}", ""]
    if report.faults:
        lines += ["**The grader itself broke: this costs no points.**", ""]
        lines += [f"- {plain(fault)}" for fault in report.faults] + [""]
    lines += ["| exercise | points | checks |", "|---|---|---|"]
    for exercise in report.exercises:
        signs = "".join(SIGNS[check.outcome] for check in exercise.checks)
        lines.append(f"| {plain(exercise.name)} | {exercise.score} of {exercise.max_score} | {signs} |")
    blocks = []
    for exercise in report.exercises:
        worth = Worth()
        checks = [check for check in exercise.checks if worth(check)]
        blocks += [_check(exercise.name, check) for check in checks if check.outcome is not CheckOutcome.PASSED]
    lines += _fitting(lines, blocks, "{} more checks did not pass; the report has them all.")
    return "\n".join([*lines, "", f"Seed {report.seed}.", ""])


def class_md(graded: ClassResult, grades: Grades | None = None) -> str:
    """A class: how the gradings ended, the most frequent diagnoses, and a row for each learner.

    With `grades`, points are those of the policy.
    """
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
    rows = [_row(one, graded.exercises, grades[one.id] if grades else None) for one in graded.learners]
    lines += _fitting(lines, rows, "{} more learners; grades.csv has them all.")
    return "\n".join([*lines, "", f"Seed {graded.seed}.", ""])


def _fitting(above: list[str], blocks: list[str], rest: str) -> list[str]:
    """The blocks that have room below these lines, and, if they are not all, a line that says how many are left."""
    size = len("\n".join(above).encode())
    for number, block in enumerate(blocks):
        size += len(block.encode()) + 1
        if size > MOST_BYTES - 200:
            return [*blocks[:number], "", rest.format(len(blocks) - number)]
    return blocks


def _row(one: Learner, exercises: tuple[str, ...], grade: Grade | None) -> str:
    points: dict[str, object] = {result.name: result.score for result in one.exercises}
    score, most = (one.score, one.max_score) if grade is None else (grade.score, grade.most)
    if grade is not None:
        points = {own.name: own.points for own in grade.exercises}
    total = f"{score} of {most}" if one.outcome is GradingOutcome.GRADED else one.outcome.value
    cells = (f"{points[name]}" if name in points else "" for name in exercises)
    return f"| {plain(one.id)} | {plain(total)} | {' | '.join(map(plain, cells))} |"


def plain(text: str) -> str:
    """One line of text that Markdown and HTML leave unchanged: every punctuation mark becomes a character reference.

    By CommonMark's rules, a reference is never structure.
    """
    return "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in visible(" ".join(text.split())))


def _check(exercise: str, check: CheckResult) -> str:
    head = f"\n### {SIGNS[check.outcome]} {plain(exercise)}: {plain(check.name)}\n"
    if check.outcome is CheckOutcome.NOT_RUN:
        return f"{head}\nNot run: {plain(check.reason)}"
    found = check.diagnosis
    if found is None:
        return head
    if is_unwritten(check):
        at = f" {plain(found.place)}" if found.place else ""
        return f"\n### {SIGNS[check.outcome]} {plain(exercise)}\n\n{plain(found.message.partition(chr(10))[0])}{at}"
    parts = [head, plain(found.message[:MOST_EVIDENCE])]
    parts += [f"\nAt {plain(found.place)}."] if found.place else []
    parts += [f"\n{plain(found.why)}"] if found.why else []
    parts += [f"\nRead {plain(found.read)}."] if found.read else []
    if proof := found.proof.shown():
        more = len(proof) - MOST_EVIDENCE
        text = proof[:MOST_EVIDENCE] + (f"\n… {more} characters more" if more > 0 else "")
        shown = html.escape(visible(text, keep="\n\t"))
        parts.append(f"\n<details><summary>what was seen</summary>\n\n<pre>\n{shown}\n</pre>\n\n</details>")
    return "\n".join(parts)
