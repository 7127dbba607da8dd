"""`author check`: what an exercise still lacks, line by line, each with what to do.

Looks at the files first, which takes no time. Then it grades: the stub must fail as what it is, and the solution must
pass. With `bank`, every submission of the bank must get its verdict too. Last come the chapters that lead to the
exercises, as they were run, and the ledger of claims.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..grading import help
from ..grading.course import Course, CourseError, leaf
from ..grading.run import grade
from ..grading.verdict import CheckOutcome, Report
from . import bank, chapters, claims, form
from .stubs import MarkerError, make_stub, with_canary

HINTS = 3
WITH_DIAGNOSIS = ("fail", "diagnosis")


@dataclass(frozen=True)
class Lack:
    """Something that is missing or wrong. `where` is the file to go to, `remedy` what to do there."""

    exercise: str
    where: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.exercise}: {self.text} ({self.where}). {self.remedy}"


def review(course: Course, names: list[str], with_bank: bool = False) -> Iterator[Lack]:
    """What these exercises lack, files before gradings; nothing when all is there. Names may be new to the course."""
    for name in names:
        found = list(_files(course, name))
        yield from found
        if not found:
            yield from _gradings(course, name)
            if with_bank:
                yield from _bank_gradings(course, name)
    yield from _book(course, names)


# Files ---------------------------------------------------------------------------------------------------------------


def _files(course: Course, name: str) -> Iterator[Lack]:
    listed = {one for chapter in course.chapters for one in chapter.exercises}
    if name not in listed:
        yield Lack(
            name,
            "autograder/course.toml",
            "no chapter lists it",
            "Add it to the exercises of the chapter it belongs to.",
        )
    yield from _solution(course, name)
    yield from _checks(course, name)
    yield from _hints(course, name)
    yield from _bank(course, name)
    yield from _chapter(course, name)


def _solution(course: Course, name: str) -> Iterator[Lack]:
    solution, stub = course.solutions / f"{name}.py", course.exercises / f"{name}.py"
    where = f"solutions/{name}.py"
    if not solution.is_file():
        yield Lack(
            name,
            where,
            "there is no solution",
            "Write it whole, and mark what a learner writes (src/lockstep/authoring/stubs.py).",
        )
        return
    text = solution.read_text(encoding="utf-8")
    try:
        made = make_stub(text, name)
        docstring = ast.get_docstring(ast.parse(made))
    except MarkerError as error:
        yield Lack(name, where, f"no stub can be made of it: {error}", "Mend the markers.")
        return
    except SyntaxError as error:
        yield Lack(name, where, f"its stub is no Python: {error.msg} in line {error.lineno}", "Mend the marked parts.")
        return
    if not docstring:
        yield Lack(name, where, "the stub says nothing about its task", "Begin the solution with a docstring.")
    if text != with_canary(text, name):
        yield Lack(name, where, "its canary is missing", "./lockstep author stubs puts it there.")
    if not stub.is_file() or stub.read_text(encoding="utf-8") != made:
        yield Lack(
            name, f"exercises/{name}.py", "the stub is not that of the solution", "./lockstep author stubs makes it."
        )


def _checks(course: Course, name: str) -> Iterator[Lack]:
    file = course.checks(name)
    where = file.relative_to(course.root).as_posix()
    if not file.is_file():
        yield Lack(name, where, "there are no checks", "Write tests that take the fixture `grader`.")
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:
        yield Lack(name, where, f"the checks are no Python: {error.msg}", f"Look at line {error.lineno}.")
        return
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    if not tests:
        yield Lack(name, where, "it has no test", "A check is a function test_… with the argument `grader`.")
    for test in tests:
        if not ast.get_docstring(test):
            yield Lack(
                name, where, f"{test.name} has no name for learners", "Its docstring's first line is shown to them."
            )
    for id in sorted(_ids(tree) - set(course.catalogue)):
        yield Lack(
            name,
            "autograder/diagnoses.toml",
            f"the diagnosis {id!r} is unknown",
            "Add it with title, why and what to read.",
        )
    if not course.scenario(name).is_file():
        wanted = course.scenario(name).relative_to(course.root).as_posix()
        yield Lack(name, wanted, "nothing runs on the ranks", "Write the scenarios that the checks play.")


def _ids(tree: ast.Module) -> set[str]:
    """The diagnoses that the checks name literally."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WITH_DIAGNOSIS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add(first.value)
    return found


def _ids_of(course: Course, name: str) -> set[str]:
    """The diagnoses that this exercise's checks name, as far as they can be read."""
    try:
        return _ids(ast.parse(course.checks(name).read_text(encoding="utf-8")))
    except (OSError, SyntaxError):
        return set()


def _hints(course: Course, name: str) -> Iterator[Lack]:
    where = f"autograder/hints/{name}.md"
    try:
        count = len(help.hints(course, name))
    except CourseError:
        yield Lack(
            name, where, "there are no hints", "Write them, from a nudge to almost the answer, between lines of ---."
        )
        return
    if count < HINTS:
        yield Lack(
            name,
            where,
            f"{count} hints are too few" if count != 1 else "one hint is too few",
            f"Give at least {HINTS}, between lines of ---.",
        )


def _bank(course: Course, name: str) -> Iterator[Lack]:
    every = bank.entries(course.root)
    own = [entry for entry in every if entry.exercise == name]
    for right, most, kind in zip((False, True), bank.wanted(name), ("wrong", "right"), strict=True):
        where = (bank.FOLDER / kind / name).as_posix()
        for script in (False, True) if course.has_script(name) else (False,):
            count = sum(entry.right is right and entry.script is script for entry in own)
            what = f"{kind} batch scripts" if script else f"{kind} submissions"
            if count < most:
                yield Lack(
                    name,
                    where,
                    f"{count} {what}, and {most} are needed",
                    "Each a whole file, one idea away from another.",
                )
    for entry in own:
        said = entry.said("diagnosis")
        where = entry.path.relative_to(course.root).as_posix()
        if not entry.right and len(said) != 1:
            yield Lack(name, where, "it does not say its diagnosis", "Begin with a line `# diagnosis: ID`.")
        elif not entry.right and said[0] not in course.catalogue:
            yield Lack(name, where, f"its diagnosis {said[0]!r} is unknown", "Add it to autograder/diagnoses.toml.")
    told = {id for entry in every for key in ("diagnosis", "also") for id in entry.said(key)}
    hostile = sorted((course.root / bank.FOLDER / "hostile").glob("**/*.py"))
    told |= {id for path in hostile for id in bank.said(path, "verdict")}
    for id in sorted(_ids_of(course, name) - told) if own else ():
        yield Lack(
            name,
            (bank.FOLDER / "wrong" / name).as_posix(),
            f"no wrong submission of any exercise shows the diagnosis {id!r}",
            "Write one, or take the diagnosis out of the checks.",
        )


def _chapter(course: Course, name: str) -> Iterator[Lack]:
    chapter = course.chapter_of(name)
    if chapter is None:
        return
    source = course.root / "chapters" / "source" / f"{chapter.name}.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    told = rf"%check {re.escape(name)}\b" if "/" not in name else rf"\b{re.escape(name.partition('/')[0])}\b"
    if not re.search(told, text):
        where = f"chapters/source/{chapter.name}.py"
        yield Lack(
            name, where, "the chapter does not lead to it", f"Add a cell with %check {name} where it is to be done."
        )


# Gradings ------------------------------------------------------------------------------------------------------------


def _gradings(course: Course, name: str) -> Iterator[Lack]:
    solution = course.solutions / f"{name}.py"
    report = grade(course, [name], solution)
    where = f"solutions/{name}.py"
    if not _passed(report):
        yield Lack(
            name, where, f"the solution does not pass: {_first_failure(report)}", "Mend the solution or the check."
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-author-") as folder:
        stub = Path(folder) / f"{leaf(name)}.py"
        stub.write_text(make_stub(solution.read_text(encoding="utf-8"), name), encoding="utf-8")
        (stub.parent / "ticket.txt").write_text("1\n", encoding="utf-8")
        report = grade(course, [name], stub)
    for check in report.exercises[0].checks if report.exercises else ():
        if check.outcome is CheckOutcome.PASSED:
            where = course.checks(name).relative_to(course.root).as_posix()
            yield Lack(
                name, where, f"the untouched stub passes “{check.name}”", "Let the check ask for what is to be written."
            )


def _bank_gradings(course: Course, name: str) -> Iterator[Lack]:
    for entry in bank.entries(course.root):
        if entry.exercise != name:
            continue
        where = entry.path.relative_to(course.root).as_posix()
        missing = entry.missing()
        if missing:
            yield Lack(name, where, f"it was not graded here: {missing}", "Grade it on a machine that can.")
            continue
        with tempfile.TemporaryDirectory(prefix="lockstep-author-") as folder:
            report = grade(course, [name], entry.hand_in(course, Path(folder)), checks=entry.checks)
        found = [diagnosis.id for exercise in report.exercises for diagnosis in exercise.diagnoses]
        if entry.right and not _passed(report, not entry.script):
            yield Lack(
                name,
                where,
                f"it is right and does not pass: {_first_failure(report, not entry.script)}",
                "Mend the check.",
            )
        elif not entry.right and _passed(report, not entry.script):
            yield Lack(
                name, where, "it is wrong and passes", f"No check finds {entry.said('diagnosis')[0]}: write one."
            )
        elif not entry.right and found[:1] != entry.said("diagnosis"):
            said = found[0] if found else "nothing"
            wanted = entry.said("diagnosis")[0]
            yield Lack(
                name,
                where,
                f"it is told {said}, not {wanted}",
                "Look at the order of the checks and of their findings.",
            )


def _passed(report: Report, without_script: bool = False) -> bool:
    """Whether all has passed that this machine can run."""
    return bool(report.exercises) and not report.faults and bank.shortfall(report, without_script) is None


def _first_failure(report: Report, without_script: bool = False) -> str:
    if report.faults:
        return " ".join(line.strip() for line in report.faults[0].splitlines()[-3:] if line.strip())
    check = bank.shortfall(report, without_script)
    if check is not None and check.diagnosis is not None:
        return f"“{check.name}”: {check.diagnosis.message.splitlines()[0]}"
    if check is not None:
        return f"“{check.name}” was not run: {check.reason}"
    return "no check ran"


# The book ------------------------------------------------------------------------------------------------------------


def _book(course: Course, names: list[str]) -> Iterator[Lack]:
    """The chapters of these exercises: their form, and whether they were run as they stand; then the ledger."""
    found = {chapter.name for chapter in map(course.chapter_of, names) if chapter is not None}
    sources = sorted(found & set(chapters.names(course.root)))
    for name in sources:
        for problem in form.problems(name, course.root):
            yield Lack(name, f"chapters/source/{name}.py", problem, "src/lockstep/authoring/form.py has the rules.")
    for name in chapters.stale(sources, course.root):
        yield Lack(
            name,
            f"chapters/{name}.ipynb",
            "the notebook holds other cells than its source",
            f"./lockstep author chapters {name} runs the source and writes it.",
        )
    try:
        problems = claims.problems(claims.read(course.root), course.root)
    except claims.LedgerError as error:
        problems = [str(error)]
    for problem in problems:
        yield Lack(
            "claims",
            "chapters/claims.toml",
            problem,
            "Name the section and a cell that asserts or whose output is compared, or the reason why none can.",
        )
