"""From checks to grades: what exercises are worth, late days and accommodations, as `autograder/policy.toml` says.

All numbers are exact (`Fraction`) until they are rounded, and they are rounded only where a reader can follow: each
exercise's points, then what lateness takes off. So a row of grades adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import ROUND_HALF_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from enum import Enum
from fractions import Fraction

from ..course import nearest
from .classroom import ClassResult, GradingOutcome, Learner, was_handed_in
from .verdict import ExerciseResult

DAY = timedelta(days=1)
ABSENT = "–"  # An exercise that was not handed in


class Half(str, Enum):
    """Where a number goes that is halfway between two."""

    UP = "up"
    DOWN = "down"
    EVEN = "even"


_ROUNDING = {Half.UP: ROUND_HALF_UP, Half.DOWN: ROUND_HALF_DOWN, Half.EVEN: ROUND_HALF_EVEN}


@dataclass(frozen=True)
class Rounding:
    """To multiples of `to`, which is greater than 0."""

    to: Decimal = Decimal("0.01")
    half: Half = Half.UP

    def __call__(self, value: Fraction) -> Decimal:
        """The nearest multiple of `to`, shown without needless zeros."""
        steps = value / Fraction(self.to)
        # Compared as a Fraction: a Decimal of limited length could hide which side of the half it is on.
        whole = math.floor(steps)
        rest = steps - whole
        nudge = Decimal(whole) + (Decimal("0.5") if rest == Fraction(1, 2) else Decimal(rest > Fraction(1, 2)))
        rounded = nudge.quantize(Decimal(1), _ROUNDING[self.half]) * self.to
        return rounded.quantize(Decimal(1)) if rounded == rounded.to_integral_value() else rounded.normalize()


@dataclass(frozen=True)
class Late:
    """What a late hand-in costs: `percent_a_day` of the points reached, `most_percent` at most."""

    deadline: datetime | None = None
    grace: timedelta = timedelta(minutes=15)
    percent_a_day: Decimal = Decimal(0)
    most_percent: Decimal = Decimal(50)


@dataclass(frozen=True)
class Mark:
    """What a teacher says of one exercise: `points` instead of the checks', a comment, or that it is excused."""

    points: Decimal | None = None
    comment: str = ""
    excused: bool = False


@dataclass(frozen=True)
class Accommodation:
    """What is different for one learner, and what a teacher has entered by hand."""

    extra_days: Decimal = Decimal(0)
    deadline: datetime | None = None
    late: bool = True
    exempt: frozenset[str] = frozenset()
    late_days: int | None = None
    comment: str = ""
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def uncounted(self) -> frozenset[str]:
        """The exercises that count for nothing here."""
        return self.exempt | {name for name, mark in self.marks.items() if mark.excused}


@dataclass(frozen=True)
class Classroom50:
    """Where a class's points go in Classroom 50: the short names of a classroom and of an assignment."""

    classroom: str = "lockstep"
    assignment: str = "lockstep"


@dataclass(frozen=True)
class Team:
    """Learners who hand in together. `work` is the member whose files count where several handed in different ones."""

    members: tuple[str, ...]
    work: str = ""


@dataclass(frozen=True)
class Policy:
    """Everything that `policy.toml` says; without a file, one point a check and nothing taken off."""

    points: Mapping[str, Decimal] = field(default_factory=dict)
    partial: Mapping[str, bool] = field(default_factory=dict)
    partial_default: bool = True
    late: Late = Late()
    rounding: Rounding = Rounding()
    learners: Mapping[str, Accommodation] = field(default_factory=dict)
    classroom50: Classroom50 = Classroom50()
    canvas_assignment: str = "Lockstep"
    teams: Mapping[str, Team] = field(default_factory=dict)
    book: str = ""  # where learners find what `lockstep book` wrote


@dataclass(frozen=True)
class ExerciseGrade:
    """One exercise's points and the most that it gives; `line` explains what differs from one point a check."""

    name: str
    points: Decimal
    most: Decimal
    line: str = ""


@dataclass(frozen=True)
class Grade:
    """One learner's grade. `score` is None after a fault of ours; `lines` explain each thing taken off or left out.

    `by_hand` lists what a teacher entered for this learner, line by line. `comments` are Markdown, each with its
    exercise; that on the whole has an empty one.
    """

    learner: str
    exercises: tuple[ExerciseGrade, ...]
    score: Decimal | None
    most: Decimal
    late_days: int = 0
    taken_off: Decimal = Decimal(0)
    lines: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    comments: tuple[tuple[str, str], ...] = ()

    @property
    def said(self) -> tuple[str, ...]:
        """The lines and the comments as plain text, each on one line."""
        return (*self.lines, *(f"{on(name)}: {' '.join(text.split())}" for name, text in self.comments))

    def of(self, exercise: str) -> ExerciseGrade | None:
        return next((one for one in self.exercises if one.name == exercise), None)


def points_of(learner: Learner, grade: Grade, exercise: str) -> str:
    """`3 of 4`; `ABSENT` for an exercise that was not handed in, nothing where nothing was graded."""
    if learner.outcome is not GradingOutcome.GRADED:
        return ""
    handed_in = any(one.name == exercise and was_handed_in(one) for one in learner.exercises)
    own = grade.of(exercise)
    return f"{own.points} of {own.most}" if handed_in and own is not None else ABSENT


@dataclass(frozen=True)
class Grades:
    """A class's grades by learner's id. `remarks` are for the teacher: accommodations for nobody in this class."""

    by_learner: Mapping[str, Grade]
    remarks: tuple[str, ...] = ()

    def __getitem__(self, learner: str) -> Grade:
        return self.by_learner[learner]


def apply(policy: Policy, graded: ClassResult, teams: Mapping[str, str] | None = None) -> Grades:
    """Everybody's grade. Pure: the same class and the same policy give the same grades.

    `teams` says of a learner whose work it was, where a group handed it in (`teams.share`).
    An exercise that nobody was asked for counts for those who handed it in and costs the others nothing.
    """
    known = {learner.id for learner in graded.learners}
    remarks = [
        f"the policy has an accommodation for {name!r}, who is not in this class"
        + (f": did you mean {near}?" if (near := nearest(name, known)) else "")
        for name in sorted(policy.learners)
        if name not in known
    ]
    for learner in graded.learners:
        counted = {result.name for result in learner.exercises}
        marks = policy.learners.get(learner.id, Accommodation()).marks
        unused = sorted(name for name in marks if name not in counted)
        if unused and learner.outcome is GradingOutcome.GRADED:
            remarks.append(f"{learner.id} has marks by hand for what was not graded here: {', '.join(unused)}")
        for one in _exercises(policy, graded, learner):
            points = marks.get(one.name, Mark()).points
            if points is not None and points > one.most:
                remarks.append(
                    f"{learner.id} has {points} points by hand for {one.name}, which gives {one.most} at most"
                )
    remarks += _graded_on_fewer(policy, graded)
    if policy.late.deadline is not None and policy.late.percent_a_day:
        timeless = [
            one.id
            for one in graded.learners
            if one.exercises
            and one.handed.handed_in is None
            and not one.handed.marked_late
            and (own := policy.learners.get(one.id, Accommodation())).late
            and own.late_days is None
        ]
        if timeless:
            untouched = "so nothing was taken off for lateness"
            remarks.append(f"the download does not say when these handed in, {untouched}: {_few(timeless)}")
    grades = {learner.id: _grade(policy, graded, learner) for learner in graded.learners}
    for id, line in (teams or {}).items():
        grades[id] = replace(grades[id], lines=(line, *grades[id].lines), by_hand=(line, *grades[id].by_hand))
    return Grades(grades, tuple(remarks))


def days_late(late: Late, handed_in: datetime | None, marked: bool, own: Accommodation) -> int:
    """How many days late, rounded up; 0 when in time, within the grace period, or when nothing is known."""
    if own.late_days is not None:
        return own.late_days
    deadline = own.deadline or late.deadline
    if deadline is None or not own.late:
        return 0
    if handed_in is None:
        return int(marked and not own.extra_days and own.deadline is None)
    over = handed_in - deadline - float(own.extra_days) * DAY
    return 0 if over <= late.grace else math.ceil(over / DAY)


def _graded_on_fewer(policy: Policy, graded: ClassResult) -> list[str]:
    """A line on learners whose missing exercises cost them nothing, because nobody said what was to be handed in."""
    fewer = []
    for learner in graded.learners:
        counted = {result.name for result in learner.exercises}
        missing = set(graded.exercises) - counted - policy.learners.get(learner.id, Accommodation()).uncounted
        if missing and learner.outcome is GradingOutcome.GRADED:
            fewer.append(learner.id)
    if not fewer:
        return []
    asked = ",".join(graded.exercises)
    return [
        f"exercises that these learners did not hand in cost them no points: {_few(fewer)}. "
        f"To count them as 0: --exercises {asked} --again"
    ]


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def on(exercise: str) -> str:
    """What a comment is called."""
    return f"comment on {exercise}" if exercise else "comment"


def _exercises(policy: Policy, graded: ClassResult, learner: Learner) -> tuple[ExerciseGrade, ...]:
    """What counts for this learner, with the points that a teacher has given."""
    own = policy.learners.get(learner.id, Accommodation())
    results = {result.name: result for result in learner.exercises}
    return tuple(
        _marked(_exercise(policy, graded, name, results.get(name)), own.marks.get(name, Mark()))
        for name in graded.exercises
        if name not in own.uncounted and (name in results or learner.outcome is not GradingOutcome.GRADED)
    )


def _grade(policy: Policy, graded: ClassResult, learner: Learner) -> Grade:
    own = policy.learners.get(learner.id, Accommodation())
    results = {result.name: result for result in learner.exercises}
    exercises = _exercises(policy, graded, learner)
    most = sum((one.most for one in exercises), Decimal(0))
    lines = [f"{name} does not count for this learner" for name in graded.exercises if name in own.uncounted]
    lines += [
        f"{one.name}: {one.line}"
        for one in exercises
        if one.line and (one.name in results or own.marks.get(one.name, Mark()).points is not None)
    ]
    by_hand = _by_hand(own, exercises)
    found = (*((name, mark.comment) for name, mark in own.marks.items()), ("", own.comment))
    comments = tuple((name, text) for name, text in found if text)
    if learner.outcome is GradingOutcome.FAULT:
        broke = "the grader broke here, so there is no grade and none is lost"
        return Grade(learner.id, (), None, most, lines=(broke,), by_hand=by_hand, comments=comments)
    reached = sum((one.points for one in exercises), Decimal(0))
    days = days_late(policy.late, learner.handed.handed_in, learner.handed.marked_late, own) if reached else 0
    percent = min(days * policy.late.percent_a_day, policy.late.most_percent)
    taken_off = policy.rounding(Fraction(reached) * Fraction(percent) / 100)
    if days:
        known = own.late_days is not None or learner.handed.handed_in is not None
        lines.append(_late_line(policy, days, percent, taken_off, known))
    if own.deadline or own.extra_days:
        lines.append("the deadline is a later one for this learner")
    return Grade(learner.id, exercises, reached - taken_off, most, days, taken_off, tuple(lines), by_hand, comments)


def _by_hand(own: Accommodation, exercises: tuple[ExerciseGrade, ...]) -> tuple[str, ...]:
    """What a teacher entered for one learner: points, excuses and other dates."""
    lines = [f"{one.name}: {one.line}" for one in exercises if own.marks.get(one.name, Mark()).points is not None]
    lines += [f"{name} does not count" for name in sorted(own.uncounted)]
    if own.late_days is not None:
        lines.append(f"counted as {_days(own.late_days)} late")
    if own.deadline:
        lines.append(f"deadline: {own.deadline:%Y-%m-%d %H:%M %Z}")
    if own.extra_days:
        lines.append(f"{own.extra_days:f} days more")
    return (*lines, *(() if own.late else ("nothing is taken off for lateness",)))


def _marked(counted: ExerciseGrade, mark: Mark) -> ExerciseGrade:
    """The points that a teacher has given, in place of those that the checks give, and a line that says so."""
    if mark.points is None:
        return counted
    points = mark.points.normalize() if mark.points % 1 else mark.points.quantize(Decimal(1))
    line = f"{points} of {counted.most} points, given by hand in place of {counted.points}"
    return ExerciseGrade(counted.name, points, counted.most, line)


def _exercise(policy: Policy, graded: ClassResult, name: str, result: ExerciseResult | None) -> ExerciseGrade:
    checks = graded.max_scores.get(name, result.max_score if result else 0)
    worth = policy.points.get(name, Decimal(checks))
    most = policy.rounding(Fraction(worth))
    if result is None or not result.max_score:
        return ExerciseGrade(name, Decimal(0), most)
    counted = result.max_score - result.lacking
    line = ""
    if result.lacking:
        line = f"{result.lacking} of {result.max_score} checks could not be run where this was graded, and do not count"
    if not counted:
        return ExerciseGrade(name, Decimal(0), Decimal(0), line)
    share = Fraction(result.score, counted)
    if share < 1 and not policy.partial.get(name, policy.partial_default):
        if share:
            line = f"{result.score} of {counted} checks passed, and it gives its points for all of them only"
        share = Fraction(0)
    points = policy.rounding(Fraction(worth) * share)
    if not line and name in policy.points:
        line = f"{result.score} of {counted} checks passed: {points} of {most} points"
    return ExerciseGrade(name, points, most, line)


def _late_line(policy: Policy, days: int, percent: Decimal, taken_off: Decimal, known: bool) -> str:
    said = f"{_days(days)} late" if known else "marked as late by the download, which gives no time: counted as 1 day"
    if not percent:
        return f"{said}: nothing taken off"
    capped = ", the most that is taken off" if days * policy.late.percent_a_day > policy.late.most_percent else ""
    return f"{said}: {percent:f} % of the points taken off{capped} (−{taken_off})"


def _days(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"
