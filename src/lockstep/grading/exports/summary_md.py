"""The summary of a GitHub Actions job: Markdown in which nothing of a submission's text is markup."""

from __future__ import annotations

import html
import string

from ..verdict import CheckOutcome, CheckResult, Report
from . import visible

MOST_BYTES = 1_000_000  # GitHub drops a step's summary above 1 MiB
MOST_EVIDENCE = 8_000
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
    size = len("\n".join(lines).encode())
    open_checks = [(e.name, c) for e in report.exercises for c in e.checks if c.outcome is not CheckOutcome.PASSED]
    for number, (name, check) in enumerate(open_checks):
        block = _check(name, check)
        size += len(block.encode()) + 1
        if size > MOST_BYTES - 200:
            lines += ["", f"{len(open_checks) - number} more checks did not pass; the report has them all."]
            break
        lines.append(block)
    return "\n".join([*lines, "", f"Seed {report.seed}.", ""])


def plain(text: str) -> str:
    """One line of text that Markdown and HTML leave as it is: every punctuation mark becomes a character reference.

    By CommonMark's rules a reference never stands for a mark of structure.
    """
    return "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in visible(" ".join(text.split())))


def _check(exercise: str, check: CheckResult) -> str:
    head = f"\n### {SIGNS[check.outcome]} {plain(exercise)}: {plain(check.name)}\n"
    if check.outcome is CheckOutcome.NOT_RUN:
        return f"{head}\nNot run: {plain(check.reason)}"
    found = check.diagnosis
    if found is None:
        return head
    where = f"{found.file}:{found.line}" if found.line else found.file
    parts = [head, plain(found.message[:MOST_EVIDENCE])]
    parts += [f"\nAt {plain(where)}."] if where else []
    parts += [f"\n{plain(found.why)}"] if found.why else []
    parts += [f"\nRead {plain(found.read)}."] if found.read else []
    if found.evidence:
        text = found.evidence
        cut = (
            text
            if len(text) <= MOST_EVIDENCE
            else f"{text[:MOST_EVIDENCE]}\n… {len(text) - MOST_EVIDENCE} characters more"
        )
        shown = html.escape(visible(cut, keep="\n\t"))
        parts.append(f"\n<details><summary>what was seen</summary>\n\n<pre>\n{shown}\n</pre>\n\n</details>")
    return "\n".join(parts)
