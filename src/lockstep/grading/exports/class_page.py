"""The teacher's page: how the class did, the most frequent mistakes, and which learners to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from statistics import mean, median
from typing import Any
from urllib.parse import quote

from ..classroom import ClassResult, GradingOutcome, Learner, was_handed_in
from ..policy import Grade, Grades, on, points_of
from ..similar import Pair, groups
from ..text import MARKS
from ..verdict import UNWRITTEN, CheckOutcome
from .html_report import KINDS, day, handed_in, isolation_said, reasons
from .items import Item, items
from .markdown import rendered
from .pages import MOST_NAME, cut, plural, render

DIAGNOSES = 25  # rows
COLUMNS = 6  # So many exercises have their points beside each learner's
PAIRS = 50
FREQUENT = 3  # diagnoses of one check
BARS = 11  # ten tenths, and all points
MOST_PASSAGE = 3_000  # characters


def class_page(
    graded: ClassResult,
    grades: Grades,
    *,
    similar: Sequence[Pair] = (),
    tickets: Sequence[tuple[str, Sequence[str]]] = (),
    solved: Sequence[tuple[str, Sequence[str]]] = (),
    titles: Mapping[str, str] | None = None,
) -> str:
    """The page, with links to `reports/ID.html`.

    `similar` and `solved` come from `similar.in_class`, `tickets` from `similar.same_tickets`;
    `titles` are the diagnoses' titles by id.
    """
    learners = {learner.id: learner for learner in graded.learners}
    named = Counter(learner.handed.shown for learner in graded.learners)

    def person(learner: str) -> dict[str, Any]:
        shown = learners[learner].handed.shown if learner in learners else ""
        name = cut(shown, MOST_NAME) or learner
        twice = f" ({learner})" if shown and named[shown] > 1 else ""
        return {"link": f"reports/{quote(learner, safe='')}.html", "name": name + twice}

    given = {one.id: _points(one, grades[one.id]) for one in graded.learners}
    shares = [Fraction(score) / Fraction(most) for score, most in given.values() if score is not None and most]
    counted = Counter(learner.outcome for learner in graded.learners)
    checks = items(graded)
    columns = graded.exercises if len(graded.exercises) <= COLUMNS else ()
    pairs = [one for one in similar if one.one in learners and one.other in learners]
    return render(
        "class.html",
        headline=f"{plural(len(learners), 'learner')}, {plural(len(graded.exercises), 'exercise')}",
        handed_in=_days(graded),
        summary=_summary(counted),
        tiles=_tiles(graded, given, shares),
        remarks=grades.remarks,
        faults=[person(one.id) | {"text": _first_line(one), "attempts": one.attempts} for one in graded.faults],
        nothing=[person(one.id) | {"refused": reasons(one)} for one in _of(graded, GradingOutcome.NOTHING)],
        chart=_chart(shares) if shares else None,
        by_hand=[person(one.id) | said for one in graded.learners if (said := _by_hand(grades[one.id]))],
        exercises=_exercises(graded),
        checks=_checks(checks),
        matrix=[person(one.id) | {"cells": _cells(one, checks)} for one in graded.learners if one.exercises],
        diagnoses=_diagnoses(graded, titles or {}, person),
        more_diagnoses=max(0, len(graded.frequent) - DIAGNOSES),
        pairs=[_pair(one, person) for one in pairs[:PAIRS]],
        more_pairs=max(0, len(pairs) - PAIRS),
        groups=_groups(pairs, person),
        tickets=[{"ticket": ticket, "people": [person(one) for one in held]} for ticket, held in tickets],
        solved=[{"exercise": exercise, "people": [person(one) for one in held]} for exercise, held in solved],
        late=[person(one.id) | late for one in graded.learners if (late := _late(one, grades[one.id]))],
        columns=columns,
        learners=[
            person(one.id)
            | _row(one, *given[one.id])
            | {"own": [points_of(one, grades[one.id], name) for name in columns]}
            for one in graded.learners
        ],
        ids=any(person(one)["name"] != one for one in learners),
        seed=graded.seed,
        isolation=isolation_said(graded.isolation),
        device=graded.device,
        made_with=" · ".join(f"{name} {version}" for name, version in graded.versions.items()),
    )


Person = Callable[[str], dict[str, Any]]


def _of(graded: ClassResult, outcome: GradingOutcome) -> list[Learner]:
    return [learner for learner in graded.learners if learner.outcome is outcome]


def _points(learner: Learner, grade: Grade) -> tuple[Any, Any]:
    """Points and the most that there are; None instead of points where nothing was graded or the grader broke."""
    return (grade.score, grade.most) if learner.outcome is GradingOutcome.GRADED else (None, 0)


def _summary(counted: Counter[GradingOutcome]) -> str:
    nothing, faults = counted[GradingOutcome.NOTHING], counted[GradingOutcome.FAULT]
    parts = [f"{counted[GradingOutcome.GRADED]} graded"]
    parts += [f"{nothing} with nothing to grade"] if nothing else []
    parts += [plural(faults, "fault") + " of the grader"] if faults else []
    return " · ".join(parts)


def _days(graded: ClassResult) -> str:
    """The days on which the class handed in, from the first to the last that is known."""
    days = sorted(filter(None, map(day, graded.learners)))
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def _tiles(graded: ClassResult, given: Mapping[str, tuple[Any, Any]], shares: list[Fraction]) -> list[dict[str, str]]:
    if not shares:
        return []
    most = {float(one) for score, one in given.values() if score is not None}
    scores = [float(score) for score, _ in given.values() if score is not None]
    tiles = []
    if len(most) == 1:
        tiles.append({"value": f"{median(scores):.4g}", "label": f"median, of {max(most):.6g} points"})
        tiles.append({"value": f"{mean(scores):.3g}", "label": "mean"})
    else:
        tiles.append({"value": f"{100 * float(median(shares)):.0f} %", "label": "median share of the points"})
    tiles.append({"value": str(sum(share >= 1 for share in shares)), "label": "with all points"})
    refused = sum(bool(one.handed.refused) for one in _of(graded, GradingOutcome.GRADED))
    if refused:
        tiles.append({"value": str(refused), "label": "with a file that was not taken"})
    return tiles


def _chart(shares: list[Fraction]) -> dict[str, Any]:
    """Bars for each tenth of the points and for all of them, in a picture of 660 × 220 with its base line at 186."""
    count = Counter(max(0, min(BARS - 1, int(share * 10))) for share in shares)
    highest = max(count.values())
    bars = []
    for index in range(BARS):
        height = 160 * count[index] / highest
        x = index * 60 + 4
        place = {"x": x, "middle": x + 26, "y": f"{186 - height:.1f}", "above": f"{179 - height:.1f}"}
        bars.append({**place, "height": f"{height:.1f}", "count": count[index], "label": str(index * 10)})
    words = ", ".join(f"{count[index]} from {index * 10} percent" for index in range(BARS) if count[index])
    return {"bars": bars, "label": f"How many learners reached which share of the points: {words}"}


def _exercises(graded: ClassResult) -> list[dict[str, Any]]:
    rows = []
    for name in graded.exercises:
        results = [
            one for learner in graded.learners for one in learner.exercises if one.name == name and was_handed_in(one)
        ]
        failed = Counter(check.name for one in results for check in one.checks if check.outcome is CheckOutcome.FAILED)
        times = max(failed.values(), default=0)
        hardest = [check for check, count in failed.items() if count == times]
        shares = [one.score / one.max_score for one in results if one.max_score]
        empty = sum(any(found.id == UNWRITTEN for found in one.diagnoses) for one in results)
        row = {"name": name, "handed_in": len(results), "empty": empty, "passed": sum(one.passed for one in results)}
        share = f"{100 * mean(shares):.0f}" if shares else "0"
        rows.append({**row, "mean": share, "hardest": hardest, "failed": times})
    return rows


def _by_hand(grade: Grade) -> dict[str, Any] | None:
    if not (grade.by_hand or grade.comments):
        return None
    return {
        "lines": grade.by_hand,
        "comments": [{"on": on(name), "text": rendered(text)} for name, text in grade.comments],
    }


def _checks(checks: Sequence[Item]) -> list[dict[str, Any]]:
    """For each exercise its checks, numbered as they stand in the matrix."""
    found = []
    for name, of_it in groupby(checks, lambda one: one.exercise):
        listed = list(of_it)
        rows: list[dict[str, Any]] = [
            {
                "number": number,
                "name": cut(one.name, 2 * MOST_NAME),
                "passed": one.ends[CheckOutcome.PASSED],
                "percent": f"{100 * one.ends[CheckOutcome.PASSED] / max(1, one.handed_in):.0f}",
                "failed": one.ends[CheckOutcome.FAILED],
                "not_run": one.ends[CheckOutcome.NOT_RUN],
                "diagnoses": [(cut(id, MOST_NAME), count) for id, count in one.frequent[:FREQUENT]],
            }
            for number, one in enumerate(listed, 1)
        ]
        found.append({"name": name, "rows": rows, "handed_in": max(one.handed_in for one in listed)})
    return found


def _cells(learner: Learner, checks: Sequence[Item]) -> list[list[tuple[str, str]]]:
    """For each exercise the marks of its checks, those that are alike and adjacent together."""
    results = {one.name: one for one in learner.exercises if was_handed_in(one)}
    cells = []
    for name, listed in groupby(checks, lambda one: one.exercise):
        ends = {check.id: check.outcome for check in results[name].checks} if name in results else {}
        order = [ends.get(one.id, CheckOutcome.NOT_RUN) for one in listed if ends]
        cells.append([(KINDS[end], MARKS[end] * len(list(same))) for end, same in groupby(order)])
    return cells


def _diagnoses(graded: ClassResult, titles: Mapping[str, str], person: Person) -> list[dict[str, Any]]:
    rows = []
    for id, count in graded.frequent[:DIAGNOSES]:
        people = [person(one.id) for one in graded.learners if id in one.diagnoses]
        percent = f"{100 * count / len(graded.learners):.0f}"
        rows.append({"id": id, "title": titles.get(id, ""), "count": count, "percent": percent, "people": people})
    return rows


def _groups(pairs: Sequence[Pair], person: Person) -> list[dict[str, Any]]:
    """Three or more learners with similar files for one exercise."""
    exercises = dict.fromkeys(pair.exercise for pair in pairs)
    found = [(name, group) for name in exercises for group in groups(one for one in pairs if one.exercise == name)]
    return [{"exercise": name, "people": [person(one) for one in group]} for name, group in found if len(group) > 2]


def _pair(pair: Pair, person: Person) -> dict[str, Any]:
    return {
        "exercise": pair.exercise,
        "people": [person(pair.one), person(pair.other)],
        "share": f"{100 * pair.share:.0f}",
        "here": pair.one_lines,
        "there": pair.other_lines,
        "passage": cut(pair.passage, MOST_PASSAGE),
    }


def _late(learner: Learner, grade: Grade) -> dict[str, Any] | None:
    if not learner.handed.marked_late and not grade.late_days:
        return None
    return {"when": handed_in(learner), "days": grade.late_days or "–", "taken_off": grade.taken_off or "–"}


def _row(learner: Learner, score: Any, most: Any) -> dict[str, Any]:
    nothing = 0 if learner.outcome is GradingOutcome.NOTHING else "–"
    return {
        "id": learner.id,
        "outcome": learner.outcome.value,
        "points": nothing if score is None else score,
        "most": most,
    }


def _first_line(learner: Learner) -> str:
    faults = learner.report.faults if learner.report else ()
    return cut(faults[0].strip().splitlines()[-1] if faults and faults[0].strip() else "", 500)
