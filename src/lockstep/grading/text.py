"""A grading as plain text; the terminal adds color, a notebook cell shows it unchanged.

A part that is still as it was handed out is named once, in one line; checks that wait for it are not listed.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

from ..ranks.text import fit
from .verdict import UNWRITTEN, CheckOutcome, CheckResult, ExerciseResult, Report

WIDTH = 100
HINT = "./lockstep hint"
WAITS = "each needs a check that did not pass"
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode's categories of characters that act or cannot be seen
BROKE = "A check broke. That is Lockstep's fault, not yours, and costs nothing. Please report it:"
MARKS = {CheckOutcome.PASSED: "✓", CheckOutcome.FAILED: "✗", CheckOutcome.NOT_RUN: "–"}


class Worth:
    """Which of an exercise's checks are worth a line; called with each, in order."""

    def __init__(self) -> None:
        self._parts: set[str] = set()
        self._hidden: set[str] = set()
        self._failed = False

    def __call__(self, check: CheckResult) -> bool:
        """False for a part that was named already as unwritten, and for a check that only waits for such a part."""
        if is_unwritten(check):
            assert check.diagnosis is not None
            part = check.diagnosis.place
            self._hidden.add(check.name)
            new = part not in self._parts
            self._parts.add(part)
            return new
        self._failed |= check.outcome is CheckOutcome.FAILED
        waits = check.reason.endswith("above") and bool(self._parts) and not self._failed
        waits |= any(check.reason == f"needs “{name}”" for name in self._hidden)
        if check.outcome is CheckOutcome.NOT_RUN and waits:
            self._hidden.add(check.name)
            return False
        return True


def is_unwritten(check: CheckResult) -> bool:
    """True for a check that failed because its part is still as it was handed out."""
    return check.diagnosis is not None and check.diagnosis.id == UNWRITTEN


def is_explained(check: CheckResult) -> bool:
    """True for a check of which more is said than one line: a blank line follows it."""
    return check.outcome is CheckOutcome.FAILED and not is_unwritten(check)


def not_run(checks: Iterable[CheckResult]) -> dict[str, list[str]]:
    """The checks that were not run, by their reasons; each name with what it needs, where that differs."""
    left = [check for check in checks if check.outcome is CheckOutcome.NOT_RUN]
    why = awaited([check for check in left if waits(check)])
    found: dict[str, list[str]] = {}
    for check in left:
        said = f"{check.name}: {check.reason}" if waits(check) and why == WAITS else check.name
        found.setdefault(why if waits(check) else check.reason, []).append(said)
    return found


def awaited(checks: Sequence[CheckResult]) -> str:
    """Why these checks, which wait for others, were not run."""
    needs = {check.reason for check in checks}
    return f"{'each ' * (len(checks) > 1)}{needs.pop()}" if len(needs) == 1 else WAITS


def waits(check: CheckResult) -> bool:
    """True for a check that was not run because another failed."""
    return check.outcome is CheckOutcome.NOT_RUN and check.reason.startswith("needs “")


def waiting_text(checks: list[CheckResult], width: int = WIDTH) -> str:
    """The checks that wait for others, in one line if there are several: what failed is to be read first."""
    if len(checks) == 1:
        return check_text(checks[0], width=width)
    return fit(f"  – {len(checks)} not run: {awaited(checks)}", width)


def report_text(report: Report, hint: str = HINT) -> str:
    """All exercises of a grading, and our own faults when there are any. `hint` is the command that gives one."""
    parts = [exercise_text(exercise, hint) for exercise in report.exercises]
    parts += [f"{BROKE}\n{textwrap.indent(fault, '    ')}" for fault in report.faults]
    return "\n\n".join(parts)


def exercise_text(exercise: ExerciseResult, hint: str = HINT) -> str:
    """One exercise: its score, then its checks, with a blank line after each that explains a failure."""
    head = exercise.summary
    lines = [exercise.name.ljust(WIDTH - len(head)) + head, ""]
    worth = Worth()
    shown = [check for check in exercise.checks if worth(check)]
    for check in shown:
        if not waits(check):
            lines += [check_text(check, exercise.name, hint=hint), *([""] if is_explained(check) else [])]
    if waiting := [check for check in shown if waits(check)]:
        lines.append(waiting_text(waiting))
    below = [fit(f"  {line}", WIDTH) for line in (hint_text(exercise, hint), stage_text(exercise)) if line]
    return "\n\n".join(filter(None, ("\n".join(lines).rstrip(), "\n".join(below))))


def hint_text(exercise: ExerciseResult, hint: str = HINT) -> str:
    """The command that helps with what failed; empty if nothing did, or only what has no hint: see `wrong`."""
    return f"For a hint: {hint} {exercise.name}" if exercise.wrong else ""


def stage_text(exercise: ExerciseResult) -> str:
    """The stage to write next; empty if there is none."""
    return f"Next: {exercise.stage}" if exercise.stage else ""


def check_text(check: CheckResult, exercise: str = "", width: int = WIDTH, hint: str = HINT) -> str:
    """One check: a line, and for a failed one what was seen, where, why, and what to read."""
    first = f"  {MARKS[check.outcome]} {check.headline}"
    if is_unwritten(check):
        assert check.diagnosis is not None
        said = check.diagnosis.message.partition("\n")[0].removesuffix(".")
        todo = [f"{hint} {exercise}"] if exercise else []
        return "\n".join(_beside([f"  {MARKS[check.outcome]} {said}", check.diagnosis.place, *todo], width))
    if check.outcome is CheckOutcome.NOT_RUN:
        return _not_run(check, width)
    if check.diagnosis is None:
        return fit(first, width)
    diagnosis = check.diagnosis
    lines = [fit(first, width), f"      {diagnosis.id}"]
    lines += _wrapped(diagnosis.message, width)
    if diagnosis.line:
        lines.append(fit(f"      {diagnosis.place}   {diagnosis.source}", width))
    if proof := diagnosis.proof.shown(width - 6):
        lines += ["", textwrap.indent(proof, "      "), ""]
    lines += _wrapped(diagnosis.why, width)
    lines += [fit(f"      Read: {diagnosis.read}", width)] if diagnosis.read else []
    return "\n".join(lines)


def _beside(parts: list[str], width: int) -> list[str]:
    """The parts in one line; where they do not fit, the last, which is a command, has its own."""
    line = " · ".join(parts)
    if len(line) <= width or len(parts) == 1:
        return [fit(line, width)]
    return [*_beside(parts[:-1], width), f"      {parts[-1]}"]


def _not_run(check: CheckResult, width: int) -> str:
    """One line, as wide as the others: the check that it waits for is above it, and named only where there is room."""
    head = f"  {MARKS[check.outcome]} {check.name}"
    short = "needs a check above" if waits(check) else check.reason
    for reason in (check.reason, short):
        line = f"{head.ljust(60 if width >= WIDTH else 0)}  not run: {reason}"
        if len(line) <= width:
            return line
    return "\n".join([fit(head, width), *_wrapped(f"not run: {check.reason}", width)])


def visible(text: str, keep: str = "") -> str:
    """The text with control, direction and undecodable characters escaped, except for those in `keep`."""
    return "".join(
        c if c in keep or unicodedata.category(c) not in HIDDEN else c.encode("unicode_escape").decode() for c in text
    )


def harmless(text: str) -> str:
    """Without escape sequences, and with every other character that would act instead of being seen escaped."""
    return visible(_SEQUENCES.sub("", text.replace("\r\n", "\n")), keep="\n\t")


_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def cut(text: str, most: int) -> str:
    """The first `most` characters, and how many there were."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def _wrapped(text: str, width: int) -> list[str]:
    margin = " " * 6
    return [
        line
        for paragraph in text.strip().splitlines()
        for line in textwrap.wrap(
            paragraph,
            width - 6,
            initial_indent=margin,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
