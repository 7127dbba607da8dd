"""What a run or a grading has to say, as a card in a notebook's output; a terminal and a comparison see its text.

A card is HTML with its own style, without a script: it survives saving and reopening, needs no kernel, and takes
JupyterLab's colors, VS Code's or the book's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..course import CourseError, find
from ..course.course import leaf
from ..course.hints import to_come
from ..course.runs import READ_ON
from ..grading.exports.markdown import rendered
from ..grading.text import BROKE, Worth, check_text, is_unwritten, not_run, report_text, stage_text
from ..grading.verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from ..ranks import Run, text
from ..ranks.cards import breakable, card, card_of, coded, proof, said

HINT = "%hint"
UNSAVED = "(or not saved: Ctrl+S)"
SOLUTIONS = "The course's solution:"
COMMAND = re.compile(r"(%(?:check|solution) [\w/]+)")
NEXT = re.compile(r"(?<=^Next: )[\w/]+(?=,)|(?<= · then )[\w/]+(?=:)")
REFERENCE = re.compile(r"chapter (\d+), &quot;(.+?)&quot;")  # In HTML


class Card:
    """An output with two forms: HTML, and the text that a terminal would have shown."""

    def __init__(self, body: str, plain: str) -> None:
        self.body, self.plain = body, plain

    def __repr__(self) -> str:
        return self.plain

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.plain, "text/html": said(self.body)}


# A run that did not end well ------------------------------------------------------------------------------------------


def run_card(run: Run) -> Card:
    """Why a run did not end well: headline, ranks, the code around the branch, what to know and to read."""
    return Card(card(run, READ_ON, _linked), text.describe(run, READ_ON))


def mixed_card(run: Run) -> Card | None:
    """For a run that ended well although ranks met with different things. None for all others."""
    found = text.mixed_up(run)
    return None if found is None else Card(card_of(found, found.headline), text.mixed_text(found))


def unwritten_card(run: Run) -> Card | None:
    """For a run that came to a stub which nobody has touched: one line, as its check has it. None for all others."""
    error = run.cause.error if run.cause is not None else None
    if error is None or error.type != "NotImplementedError" or error.frame is None:
        return None
    try:
        course = find()
    except CourseError:
        return None
    file = Path(error.frame.file).resolve()
    name = file.relative_to(course.exercises).with_suffix("").as_posix() if course.exercises in file.parents else ""
    if name not in course.names or not error.message.startswith(f"{leaf(name)}: "):
        return None
    shown = file.relative_to(course.root).as_posix()
    found = Diagnosis(UNWRITTEN, "Nothing is written here yet.", file=shown, line=error.frame.line)
    check = CheckResult(name, name, CheckOutcome.FAILED, found)
    return Card(f'<div class="ls-card">{_failed(check, name)}</div>', check_text(check, name, hint=HINT).strip())


# A grading ------------------------------------------------------------------------------------------------------------


def report_card(report: Report, onward: Sequence[str] = (), of_solutions: bool = False) -> Card:
    """A grading: what failed first, what passed and what was not run folded into a line each; then what to do next.

    `of_solutions` says that the course's own solutions were checked, so that no reader takes it for a pass.
    """
    lines = [COMMAND.sub(r'<code class="ls-keep">\1</code>', NEXT.sub(_following, _linked(line))) for line in onward]
    last = f"<p>{'<br>'.join(lines)}</p>" if lines else ""
    parts = [
        _exercise(exercise, of_solutions, last if exercise is report.exercises[-1] else "")
        for exercise in report.exercises
    ]
    parts += [f'<div class="ls-card"><p>{escape(BROKE)}</p><pre>{escape(fault)}</pre></div>' for fault in report.faults]
    whose = SOLUTIONS if of_solutions else ""
    return Card("".join(parts), "\n\n".join(filter(None, (whose, report_text(report, HINT), "\n".join(onward)))))


def _exercise(result: ExerciseResult, of_solution: bool, last: str) -> str:
    worth = Worth()
    checks = [check for check in result.checks if worth(check)]
    failed = [check for check in checks if check.outcome is CheckOutcome.FAILED]
    wrong = any(not is_unwritten(check) for check in failed)
    state = "ls-bad" if wrong else "ls-good" if result.passed and not of_solution else ""
    name = f'<span class="ls-name">{breakable(result.name)}</span>'
    head = f'<span class="ls-green">✓ {breakable(result.name)}</span>' if result.passed else name
    head = f"<span>{SOLUTIONS} {name}</span>" if of_solution else head
    score = f'<span class="ls-soft">{result.summary}</span>'
    ids = [check.diagnosis.id if check.diagnosis else "" for check in failed]
    parts = [f'<div class="ls-row">{head}{score}</div>']
    parts += [_failed(check, result.name, again=ids[at] in ids[:at]) for at, check in enumerate(failed)]
    parts += [f"<p>For a hint: {_hint(result.name)}</p>"] if result.wrong else []
    passed = [check.name for check in checks if check.outcome is CheckOutcome.PASSED]
    label = "the checks" if result.passed else f'<span class="ls-green">✓</span> {len(passed)} passed'
    parts.append(_folded(label, passed))
    parts += [
        _folded(f"– {len(names)} not run{escape(f': {why}' if why else '')}", names)
        for why, names in not_run(checks).items()
    ]
    parts += [f"<p>{_linked(stage_text(result))}</p>"] if result.stage else []
    return f'<div class="ls-card {state}">{"".join(parts)}{last}</div>'


def _folded(label: str, names: list[str]) -> str:
    if not names:
        return ""
    listed = "".join(f"<li>{breakable(name)}</li>" for name in names)
    return f"<details><summary>{label}</summary><ul>{listed}</ul></details>"


def _hint(exercise: str) -> str:
    return f"<code>{HINT} {breakable(exercise)}</code>"


def _failed(check: CheckResult, exercise: str, again: bool = False) -> str:
    """A failed check, with the reason of its diagnosis and where to read on, unless these stand above (`again`)."""
    found = check.diagnosis
    assert found is not None
    message, _, more = found.message.partition("\n")
    place = opened(found.file or "", found.line)
    if is_unwritten(check):
        return f"<p>✗ {escape(message.removesuffix('.'))} {UNSAVED} ·&nbsp;{place} ·&nbsp;{_hint(exercise)}</p>"
    name = f'<span class="ls-red">✗ {breakable(check.headline)}</span>'
    id = f'<code class="ls-soft">{escape(found.id)}</code>'
    parts = [
        f'<div class="ls-row">{name}{id}</div>',
        f"<p>{coded(message)}</p>",
        f"<p>{coded(more)}</p>" if more else "",
        f"<p>{place}{'' if found.code else f' &nbsp; <code>{escape(found.source)}</code>'}</p>" if found.line else "",
        proof(found.proof),
    ]
    if not again:
        parts.append(f"<p>{coded(found.why)}</p>" if found.why else "")
        parts.append(f"<p>Read: {_linked(found.read)}</p>" if found.read else "")
    return f'<div class="ls-one">{"".join(parts)}</div>'


def hint_card(exercise: str, taken: Sequence[str], of: int, why: str = "") -> Card:
    """The last hint taken and `why` it came, with those before it folded below; `of` is how many there are."""
    *earlier, text = taken
    title = f"Hint {len(taken)} of {of}" + (f", {why}" if why else "")
    more = to_come(len(taken), of, f"For the next hint, run this cell again or, in any other cell, `{HINT} {exercise}`")
    folded = "".join(
        f"<details><summary>Hint {number}</summary>{rendered(one)}</details>" for number, one in enumerate(earlier, 1)
    )
    shown = f'<p class="ls-soft">{coded(title)}</p>{rendered(text)}{folded}<p class="ls-soft">{coded(more)}</p>'
    return Card(f'<div class="ls-card ls-contract">{shown}</div>', f"{title}\n\n{text}\n\n{more}")


# Links ----------------------------------------------------------------------------------------------------------------


def opened(file: str, line: int | None, shown: str = "") -> str:
    """`exercises/train_ddp.py:64`, or what is `shown` for it, a link that opens the file where JupyterLab can."""
    shown = shown or f"<code>{breakable(f'{file}:{line}' if line else file)}</code>"
    with_link = file and not os.path.isabs(file) and (Path("..") / file).is_file()
    return f'<a href="../{escape(file)}{f"#L{line}" if line else ""}">{shown}</a>' if with_link else shown


def _following(named: re.Match[str]) -> str:
    """The next exercise's name, as a link that opens its file."""
    return opened(f"exercises/{named[0]}.py", None, breakable(named[0]))


def _linked(said: str) -> str:
    """`chapter 3, "Hangs"` as a link to that section, for a notebook beside that chapter's."""

    def link(found: re.Match[str]) -> str:
        try:
            page = f"{find().chapters[int(found[1]) - 1].name}.ipynb"
        except (CourseError, IndexError):
            return found[0]
        anchor = found[2].replace(" ", "-")
        return f'<a href="{escape(page)}#{anchor}">{found[0]}</a>' if Path(page).is_file() else found[0]

    return REFERENCE.sub(link, escape(said))
