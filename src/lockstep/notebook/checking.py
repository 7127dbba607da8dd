"""A `%check` while it goes on: its ticks in the output, as they come. The report takes their place when it is over.

There is one output, which is updated: what is saved is the report alone. Where outputs are compared (a chapter's build,
and nbval, which knows no updates) there is only the report.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from IPython.display import display

from ..course import Course
from ..grading.text import MARKS, Worth, is_unwritten
from ..grading.verdict import CheckOutcome, CheckResult
from .cards import Card

COLOURS = {CheckOutcome.PASSED: "ls-green", CheckOutcome.FAILED: "ls-red", CheckOutcome.NOT_RUN: "ls-soft"}
MOVING = """<style>
.lockstep-said .ls-moving { display: inline-block; animation: ls-turn 1s linear infinite }
@keyframes ls-turn { to { transform: rotate(360deg) } }
@media (prefers-reduced-motion: reduce) { .lockstep-said .ls-moving { animation: none } }
</style>"""


def is_compared() -> bool:
    """True where a chapter is built or compared: nothing may then depend on a learner or on time."""
    return bool(os.environ.get("LOCKSTEP_SUBMISSION"))


def are_solutions(course: Course) -> bool:
    """True where the course's solutions are checked, as in a chapter's build."""
    named = os.environ.get("LOCKSTEP_SUBMISSION")
    return bool(named) and Path(str(named)).resolve() == course.solutions.resolve()


class Checking:
    """The output of a grading of these exercises. Called with each check that has concluded."""

    def __init__(self, course: Course, names: Sequence[str]) -> None:
        self.of = {name: course.count_checks(name) for name in names}
        self.seen: dict[str, list[CheckResult]] = {}
        self.output: Any = None if is_compared() else display(self._card(), display_id=True)

    def __call__(self, exercise: str, check: CheckResult) -> None:
        self.seen.setdefault(exercise, []).append(check)
        self._show(self._card())

    def __enter__(self) -> Checking:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # Ctrl-C, say: what was seen stays, and nothing moves any more
            self._show(self._card(moves=False))

    def end(self, report: Card) -> None:
        """Show the report instead."""
        if self.output is None:
            display(report)
        else:
            self._show(report)

    def _show(self, card: Card) -> None:
        if self.output is not None:
            self.output.update(card)

    def _card(self, moves: bool = True) -> Card:
        *over, last = self.seen or [""]
        lines = [self._finished(name) for name in over]
        worth = Worth()
        lines += [_tick(check) for check in self.seen.get(last, []) if worth(check)]
        said = f"{sum(map(len, self.seen.values()))} of {sum(self.of.values())} checks"
        state = f'<span class="ls-moving">◌</span> {said}' if moves else f"{said}, then it was stopped"
        name = last or (next(iter(self.of)) if len(self.of) == 1 else f"{len(self.of)} exercises")
        head = f'<span class="ls-name">{escape(name)}</span><span class="ls-soft">{state}</span>'
        return Card(f'{MOVING}<div class="ls-card"><div class="ls-row">{head}</div>{"".join(lines)}</div>', said)

    def _finished(self, name: str) -> str:
        passed = sum(check.outcome is CheckOutcome.PASSED for check in self.seen[name])
        outcome = CheckOutcome.PASSED if passed == self.of[name] else CheckOutcome.FAILED
        return _line(outcome, f"{name}: {passed} of {self.of[name]}")


def _tick(check: CheckResult) -> str:
    if is_unwritten(check) and check.diagnosis is not None:
        return _line(check.outcome, check.diagnosis.message.partition("\n")[0])
    return _line(check.outcome, f"{check.name}: {check.reason}" if check.reason else check.headline)


def _line(outcome: CheckOutcome, said: str) -> str:
    return f'<div><span class="{COLOURS[outcome]}">{MARKS[outcome]}</span> {escape(said)}</div>'
