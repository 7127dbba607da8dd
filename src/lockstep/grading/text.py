"""A grading as plain text; the terminal adds colour, a notebook cell shows it unchanged."""

from __future__ import annotations

import re
import textwrap
import unicodedata

from .verdict import CheckOutcome, CheckResult, ExerciseResult, Report

WIDTH = 100
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of characters that act or cannot be seen."""
BROKE = "A check broke. That is Lockstep's fault, not yours, and costs nothing. Please report it:"
MARKS = {CheckOutcome.PASSED: "✓", CheckOutcome.FAILED: "✗", CheckOutcome.NOT_RUN: "–"}


def report_text(report: Report) -> str:
    """All exercises of a grading, and our own faults when there are any."""
    parts = [exercise_text(exercise) for exercise in report.exercises]
    parts += [f"{BROKE}\n{textwrap.indent(fault, '    ')}" for fault in report.faults]
    return "\n\n".join(parts)


def exercise_text(exercise: ExerciseResult) -> str:
    """One exercise: its score, then its checks."""
    head = f"{exercise.score} of {exercise.max_score} · {exercise.seconds:.1f} s"
    lines = [exercise.name.ljust(WIDTH - len(head)) + head, ""]
    lines += [check_text(check, exercise.name) for check in exercise.checks]
    return "\n".join(lines)


def check_text(check: CheckResult, exercise: str = "") -> str:
    """One check: a line, and for a failed one what was seen, where, why, and what to read."""
    mark = MARKS[check.outcome]
    if check.outcome is CheckOutcome.NOT_RUN:
        return _not_run(check)
    if check.diagnosis is None:
        return f"  {mark} {check.name}"
    diagnosis = check.diagnosis
    lines = [f"  {mark} {check.name}".ljust(WIDTH - len(diagnosis.id) - 2) + "  " + diagnosis.id]
    lines += _wrapped(diagnosis.message)
    if diagnosis.line:
        lines.append(f"      {diagnosis.place}   {diagnosis.source}")
    if diagnosis.evidence:
        lines += ["", textwrap.indent(diagnosis.evidence, "      "), ""]
    lines += _wrapped(diagnosis.why)
    todo = [f"Read: {diagnosis.read}"] if diagnosis.read else []
    todo += [f"./lockstep hint {exercise}"] if exercise else []
    if todo:
        lines.append("      " + " · ".join(todo))
    return "\n".join(lines)


def _not_run(check: CheckResult) -> str:
    """One line, as wide as the others. What it needs is named above it, so a few words are enough."""
    head = f"  {MARKS[check.outcome]} {check.name}".ljust(60) + "  not run"
    room = WIDTH - len(head) - 2
    if len(check.reason) <= room:
        return f"{head}: {check.reason}"
    if not check.reason.startswith("needs “"):
        return "\n".join([head, *_wrapped(check.reason)])
    return f"{head}: {check.reason[: room - 2].rstrip()}…”" if room >= 20 else head


def visible(text: str, keep: str = "") -> str:
    """The text with control, direction and undecodable characters escaped, except for those in `keep`."""
    return "".join(c if c in keep or unicodedata.category(c) not in HIDDEN else _escaped(c) for c in text)


def harmless(text: str) -> str:
    """Without escape sequences, and with every other character that would act instead of being seen escaped."""
    return visible(_SEQUENCES.sub("", text.replace("\r\n", "\n")), keep="\n\t")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def cut(text: str, most: int) -> str:
    """The first `most` characters, and how many there were."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def _wrapped(text: str) -> list[str]:
    return [
        line
        for paragraph in text.strip().splitlines()
        for line in textwrap.wrap(paragraph, WIDTH - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)
    ]
