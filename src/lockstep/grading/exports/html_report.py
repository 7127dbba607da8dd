"""One learner's report as an HTML page that needs no network, runs nothing, and shows a submission's words as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup, escape

from ...course.outline import page_anchor
from ...ranks.cards import proof
from ...ranks.text import Evidence
from ..classroom import GradingOutcome, Learner, was_handed_in
from ..isolation import TIERS
from ..policy import Grade
from ..text import MARKS, Worth, awaited, is_unwritten, not_run, visible, waits
from ..verdict import NOT_HANDED_IN, CheckOutcome, CheckResult, ExerciseResult
from .markdown import rendered
from .pages import MOST_NAME, cut, render, without_folders

KINDS = {CheckOutcome.PASSED: "pass", CheckOutcome.FAILED: "fail", CheckOutcome.NOT_RUN: "skip"}
STATES = {CheckOutcome.PASSED: "passed", CheckOutcome.FAILED: "failed", CheckOutcome.NOT_RUN: "skipped"}
MOST_MESSAGE = 4_000  # characters


REFERENCE = re.compile(r'chapter (\d+), "([^"]+)"')


def html_report(learner: Learner, grade: Grade, linked: Callable[[str], str] = str) -> str:
    """The page. Texts are shown without the grader's folder of the submission: a learner knows only their own file.

    `linked` makes HTML of where to read on.
    """
    report = learner.report
    fault, nothing = learner.outcome is GradingOutcome.FAULT, learner.outcome is GradingOutcome.NOTHING
    exercises = [_exercise(learner, one, n, grade, linked) for n, one in enumerate(learner.exercises, 1)]
    checks = [check for one in learner.exercises for check in one.checks]
    ends = {check.outcome for one in learner.exercises if was_handed_in(one) for check in one.checks}
    graded = [one.name for one in learner.exercises if was_handed_in(one)]
    return render(
        "learner.html",
        name=cut(learner.handed.shown, MOST_NAME) or learner.id,
        score=None if nothing else grade.score,
        most=grade.most,
        percent=_percent(grade),
        passed=sum(check.outcome is CheckOutcome.PASSED for check in checks),
        checks=len(checks),
        legend=", ".join(f"{MARKS[one]} {one.value}" for one in CheckOutcome if one in ends),
        faults=[without_folders(_own(learner, cut(line))) for line in report.faults] if report else [],
        nothing=nothing,
        lines=() if fault else grade.lines,
        comments=[{"on": name, "text": rendered(text)} for name, text in grade.comments],
        exercises=exercises,
        refused=reasons(learner),
        notes=learner.handed.notes,
        handed_in=handed_in(learner),
        day=day(learner),
        seed=learner.seed,
        repeat=f"./lockstep check {' '.join(graded)} --seed {learner.seed}" if graded and not fault else "",
        isolation="" if nothing else isolation_said(learner.isolation),
        made_with=" · ".join(f"{name} {version}" for name, version in report.versions.items()) if report else "",
    )


def in_the_book(address: str, chapters: Sequence[str]) -> Callable[[str], str]:
    """Makes a link to a book of `chapter 3, "Hangs"`; without an address, text. `chapters` are its pages' names."""

    def linked(said: str) -> Markup:
        shown, end = Markup(), 0
        for found in REFERENCE.finditer(said):
            number = int(found[1]) - 1
            if 0 <= number < len(chapters):
                shown += escape(said[end : found.start()])
                shown += Markup('<a href="{}/{}.html#{}">{}</a>').format(
                    address, chapters[number], page_anchor(found[2]), found[0]
                )
                end = found.end()
        return shown + escape(said[end:])

    return linked if address else str


def _exercise(
    learner: Learner, result: ExerciseResult, number: int, grade: Grade, linked: Callable[[str], str]
) -> dict[str, Any]:
    worth = Worth()
    written = [check for check in result.checks if worth(check) and not is_unwritten(check)]
    own = grade.of(result.name)
    return {
        "name": result.name,
        "number": number,
        "missing": not was_handed_in(result),
        "points": own.points if own else "does not count",
        "most": own.most if own else "",
        "seconds": f"{result.seconds:.1f}",
        "marks": [(KINDS[check.outcome], MARKS[check.outcome]) for check in result.checks],
        "stubs": _stubs(learner, result),
        "checks": [_check(learner, result.name, check, linked) for check in written],
        "awaited": awaited([check for check in written if waits(check)]),
        "not_run": [
            f"{len(names)} not run: {why}"
            for why, names in not_run(check for check in written if not waits(check)).items()
            if why
        ],
        "wrong": result.wrong,
    }


def _stubs(learner: Learner, result: ExerciseResult) -> list[dict[str, Any]]:
    """What is still as it was handed out, once for each file: its lines, and the checks that wait for it."""
    worth = Worth()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    last: dict[str, Any] | None = None
    for check in result.checks:
        shown = worth(check)
        if check.diagnosis is not None and is_unwritten(check):
            said = (
                _own(learner, cut(check.diagnosis.message, MOST_MESSAGE)).strip().partition("\n")[0].removesuffix(".")
            )
            file = _file(check.diagnosis.file or "", result.name)
            last = found.setdefault((said, file), {"said": said, "file": file, "lines": [], "names": []})
            if check.diagnosis.line and check.diagnosis.line not in last["lines"]:
                last["lines"].append(check.diagnosis.line)
            last["names"].append(cut(check.name, 2 * MOST_NAME))
        elif not shown and last is not None:
            last["names"].append(cut(check.name, 2 * MOST_NAME))
    return list(found.values())


def _check(learner: Learner, exercise: str, check: CheckResult, linked: Callable[[str], str]) -> dict[str, Any]:
    found = check.diagnosis
    shown: dict[str, Any] = {
        "name": cut(check.headline, 2 * MOST_NAME),
        "outcome": check.outcome.value,
        "mark": MARKS[check.outcome],
        "kind": KINDS[check.outcome],
        "state": STATES[check.outcome],
        "waits": waits(check),
        "reason": check.reason if check.reason != NOT_HANDED_IN else "",
        "output": _own(learner, cut(check.output)).strip("\n"),
        "id": cut(found.id, MOST_NAME) if found else "",
        "finding": found is not None,
    }
    if found is not None:
        first, _, rest = _own(learner, cut(found.message, MOST_MESSAGE)).strip().partition("\n")
        shown |= {
            "first": first,
            "rest": rest.strip(),
            "file": _file(found.file or "", exercise),
            "line": found.line,
            "source": "" if found.code else cut(found.source, MOST_MESSAGE),
            "proof": Markup(proof(_shown(learner, found.proof))),
            "why": found.why,
            "read": linked(found.read) if found.read else "",
        }
    return shown


def _shown(learner: Learner, found: Evidence) -> Evidence:
    def shown(text: str, keep: str = "") -> str:
        return visible(_own(learner, cut(text)), keep)

    return found.mapped(lambda text: shown(text, keep="\n\t"), shown)


def _file(path: str, exercise: str) -> str:
    """`exercises/train_ddp.py`: where the learner has the file."""
    return f"exercises/{exercise}.py" if path.endswith(f"{exercise.rpartition('/')[2]}.py") else path.rpartition("/")[2]


def _own(learner: Learner, text: str) -> str:
    return text.replace(f"{learner.handed.folder}/", "exercises/")


def handed_in(learner: Learner) -> str:
    """When, and whether the download marks it as late; empty when nothing is known."""
    when = learner.handed.handed_in
    shown = f"{when:%Y-%m-%d %H:%M} {when.tzname() or ''}".strip() if when else ""
    return " · ".join(part for part in (shown, "marked as late" if learner.handed.marked_late else "") if part)


def day(learner: Learner) -> str:
    """The day on which it was handed in, "" if that is not known. When it was graded is not in a result."""
    when = learner.handed.handed_in
    return f"{when:%Y-%m-%d}" if when else ""


def reasons(learner: Learner) -> list[str]:
    """Why what was handed in, or a part of it, was not taken; below a title that says so."""
    return [one.removeprefix("nothing to grade: ") for one in learner.handed.refused]


def isolation_said(name: str) -> str:
    """A tier's name as one plain line; any other text unchanged."""
    return next((tier.said for tier in TIERS if tier.name == name), name)


def _percent(grade: Grade) -> str:
    """How far the bar goes, 0 to 100."""
    share = float(grade.score / grade.most) if grade.score is not None and grade.most else None
    return "0" if share is None else f"{100 * max(0.0, min(1.0, share)):.1f}"
