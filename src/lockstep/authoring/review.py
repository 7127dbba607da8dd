"""`author check`: what an exercise still lacks, line by line, each with what to do.

Looks at the files first, which takes no time. Then it grades: the stub must fail as a stub, and the solution must pass.
With `bank`, every submission of the bank must get its verdict too. Last come the chapters of the exercises and the
ledger of claims.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..course import Course, CourseError, hints, leaf
from ..course.stubs import MarkerError, make_stub, with_canary
from ..grading.grade import grade
from ..grading.request import GradeRequest
from ..grading.verdict import CheckOutcome, Report
from . import bank, chapters, claims, contracts, form

ID_POSITION = {"fail": 0, "diagnosis": 0, "Hypothesis": 0, "fail_on": 1}
"""Calls that name a diagnosis, and which of their arguments it is."""


@dataclass(frozen=True)
class Lack:
    """Something that is missing or wrong. `where` is the file, `remedy` what to do there."""

    exercise: str
    where: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.exercise}: {self.text} ({self.where}). {self.remedy}"


def review(course: Course, names: list[str], with_bank: bool = False) -> Iterator[Lack]:
    """What these exercises lack, files before gradings. Names may be new to the course."""
    exam = bank.read(course.root)
    for name in names:
        found = list(_files(course, name, exam))
        yield from found
        yield from _contract(course, name, exam, complete=not found)
        if not found:
            yield from _gradings(course, name)
            if with_bank:
                yield from _bank_gradings(course, name, exam.entries)
    yield from _book(course, names)


# Files ---------------------------------------------------------------------------------------------------------------


def _files(course: Course, name: str, exam: bank.Exam) -> Iterator[Lack]:
    if name not in [one for chapter in course.chapters for one in chapter.exercises]:
        remedy = "Add it to the exercises of the chapter it belongs to."
        yield Lack(name, "autograder/course.toml", "no chapter lists it", remedy)
    yield from _solution(course, name)
    yield from _checks(course, name)
    yield from _hints(course, name)
    yield from _bank(course, name, exam)
    yield from _chapter(course, name)


def _solution(course: Course, name: str) -> Iterator[Lack]:
    solution, stub = course.solutions / f"{name}.py", course.exercises / f"{name}.py"
    where = f"solutions/{name}.py"
    if not solution.is_file():
        remedy = "Write it whole, and mark what a learner writes (src/lockstep/course/stubs.py)."
        yield Lack(name, where, "there is no solution", remedy)
        return
    text = solution.read_text(encoding="utf-8")
    try:
        made = make_stub(text, name)
        docstring = ast.get_docstring(ast.parse(made))
    except MarkerError as error:
        yield Lack(name, where, f"no stub can be made of it: {error}", "Fix the markers.")
        return
    except SyntaxError as error:
        yield Lack(name, where, f"its stub is no Python: {error.msg} in line {error.lineno}", "Fix the marked parts.")
        return
    if not docstring:
        yield Lack(name, where, "the stub says nothing about its task", "Begin the solution with a docstring.")
    if text != with_canary(text, name):
        yield Lack(name, where, "its canary is missing", "./lockstep author stubs puts it there.")
    if not stub.is_file() or stub.read_text(encoding="utf-8") != made:
        remedy = "./lockstep author stubs makes it."
        yield Lack(name, f"exercises/{name}.py", "the stub is not that of the solution", remedy)


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
            remedy = "Its docstring's first line is shown to them."
            yield Lack(name, where, f"{test.name} has no name for learners", remedy)
    for id in sorted(_ids(tree) - set(course.catalogue)):
        remedy = "Add it with title, why and what to read."
        yield Lack(name, "autograder/diagnoses.toml", f"the diagnosis {id!r} is unknown", remedy)
    if not course.scenario(name).is_file():
        wanted = course.scenario(name).relative_to(course.root).as_posix()
        yield Lack(name, wanted, "nothing runs on the ranks", "Write the scenarios that the checks play.")


def _ids(tree: ast.Module) -> set[str]:
    """The diagnoses that the checks name literally: of a failure, of a hypothesis, or as `otherwise`."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ID_POSITION:
                found += node.args[ID_POSITION[name] : ID_POSITION[name] + 1]
            found += [keyword.value for keyword in node.keywords if keyword.arg == "otherwise"]
    return {one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _ids_of(course: Course, name: str) -> set[str]:
    """The diagnoses that this exercise's checks name, as far as they can be read."""
    try:
        return _ids(ast.parse(course.checks(name).read_text(encoding="utf-8")))
    except (OSError, SyntaxError):
        return set()


def _hints(course: Course, name: str) -> Iterator[Lack]:
    where = f"autograder/hints/{name}.md"
    try:
        every = hints.hints(course, name)
    except CourseError:
        remedy = "Write them, from a nudge to almost the answer, between lines of ---."
        yield Lack(name, where, "there are no hints", remedy)
        return
    titles = course.titles(name)
    known = {*titles, *course.catalogue}
    for id in dict.fromkeys(id for hint in every for id in hint.checks if id not in known):
        remedy = f"There are: {', '.join(titles)}." if titles else "Write the checks first."
        yield Lack(name, where, f"a hint is for {id}, and no check or diagnosis has this name", remedy)
    count = len(every)
    if count < hints.FEWEST:
        few = f"{count} hints are too few" if count != 1 else "one hint is too few"
        yield Lack(name, where, few, f"Give at least {hints.FEWEST}, between lines of ---.")


def _bank(course: Course, name: str, exam: bank.Exam) -> Iterator[Lack]:
    own = [entry for entry in exam.entries if entry.exercise == name]
    wrong = (bank.FOLDER / "wrong" / f"{name}.toml").as_posix()
    for problem in exam.problems:
        if problem.exercise == name:
            yield Lack(name, wrong, problem.text, "src/lockstep/authoring/bank.py explains the form.")
    for right, most, kind in zip((False, True), bank.wanted(name), ("wrong", "right"), strict=True):
        where = (bank.FOLDER / "right" / name).as_posix() if right else wrong
        for script in (False, True) if course.has_script(name) else (False,):
            count = sum(entry.right is right and entry.script is script for entry in own)
            what = f"{kind} batch scripts" if script else f"{kind} submissions"
            if count < most:
                remedy = (
                    "Each a whole file in another style."
                    if right
                    else f"./lockstep author bank add {name} FILE takes them."
                )
                yield Lack(name, where, f"{count} {what}, and {most} are needed", remedy)
    for entry in own:
        if entry.mistake and entry.mistake.diagnosis not in course.catalogue:
            what = f"the diagnosis {entry.mistake.diagnosis!r} of {entry.label} is unknown"
            yield Lack(name, wrong, what, "Add it to autograder/diagnoses.toml.")
    told = {id for entry in exam.entries if entry.mistake for id in (entry.mistake.diagnosis, *entry.mistake.also)}
    for path in sorted((course.root / bank.FOLDER / "hostile").rglob("*.py")):
        verdict = re.search(r"^# verdict: *(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        told |= set(re.split(r", *", verdict[1])) if verdict else set()
    for id in sorted(_ids_of(course, name) - told) if own and not exam.problems else ():
        yield Lack(
            name,
            wrong,
            f"no wrong submission of any exercise shows the diagnosis {id!r}",
            "Write one, or take the diagnosis out of the checks.",
        )


def _contract(course: Course, name: str, exam: bank.Exam, complete: bool) -> Iterator[Lack]:
    """The ledger of its docstrings; looked into when the files that it speaks of are `complete`."""
    where = contracts.place(course, name).relative_to(course.root).as_posix()
    if "/" not in name and not contracts.place(course, name).is_file():
        remedy = "CONTRIBUTING.md, “The contract ledger”, has its form."
        yield Lack(name, where, "no ledger says which check holds which sentence of the docstrings", remedy)
    for problem, remedy in contracts.problems(course, name, exam) if complete else ():
        yield Lack(name, where, problem, remedy)


def _chapter(course: Course, name: str) -> Iterator[Lack]:
    chapter = course.chapter_of(name)
    if chapter is None:
        return
    source = course.root / "chapters" / "source" / f"{chapter.name}.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    told = rf"%check {re.escape(name)}\b" if "/" not in name else rf"\b{re.escape(name.partition('/')[0])}\b"
    if not re.search(told, text):
        remedy = f"Add a cell with %check {name} where it is to be done."
        yield Lack(name, f"chapters/source/{chapter.name}.py", "the chapter does not lead to it", remedy)


# Gradings ------------------------------------------------------------------------------------------------------------


def _gradings(course: Course, name: str) -> Iterator[Lack]:
    solution = course.solutions / f"{name}.py"
    report = grade(course, GradeRequest((name,), solution))
    where = f"solutions/{name}.py"
    failure = _failure(report)
    if failure:
        yield Lack(name, where, f"the solution does not pass: {failure}", "Fix the solution or the check.")
    with tempfile.TemporaryDirectory(prefix="lockstep-author-") as folder:
        stub = Path(folder) / f"{leaf(name)}.py"
        stub.write_text(make_stub(solution.read_text(encoding="utf-8"), name), encoding="utf-8")
        (stub.parent / "ticket.txt").write_text("1\n", encoding="utf-8")
        report = grade(course, GradeRequest((name,), stub))
    for check in report.exercises[0].checks if report.exercises else ():
        if check.outcome is CheckOutcome.PASSED:
            where = course.checks(name).relative_to(course.root).as_posix()
            remedy = "Let the check ask for what is to be written."
            yield Lack(name, where, f"the untouched stub passes “{check.name}”", remedy)


def _bank_gradings(course: Course, name: str, entries: list[bank.Entry]) -> Iterator[Lack]:
    for entry in entries:
        if entry.exercise != name:
            continue
        where = entry.place.relative_to(course.root).as_posix()
        missing = entry.missing()
        if missing:
            yield Lack(name, where, f"{entry.label} was not graded here: {missing}", "Grade it on a machine that can.")
            continue
        with tempfile.TemporaryDirectory(prefix="lockstep-author-") as folder:
            report = grade(course, GradeRequest((name,), entry.hand_in(course, Path(folder)), checks=entry.checks))
        found = [diagnosis.id for exercise in report.exercises for diagnosis in exercise.diagnoses]
        failure = _failure(report, without_script=not entry.script)
        if entry.mistake is None and failure:
            yield Lack(name, where, f"{entry.label} is right and does not pass: {failure}", "Fix the check.")
        elif entry.mistake and not failure:
            remedy = f"No check finds {entry.mistake.diagnosis}: write one."
            yield Lack(name, where, f"{entry.label} is wrong and passes", remedy)
        elif entry.mistake and found[:1] != [entry.mistake.diagnosis]:
            what = f"{entry.label} gets the diagnosis {found[0] if found else 'nothing'}, not {entry.mistake.diagnosis}"
            yield Lack(name, where, what, "Look at the order of the checks and of their findings.")
        failed = [check.id for one in report.exercises for check in one.checks if check.diagnosis is not None]
        if entry.mistake and failed and failed[0] != entry.mistake.check:
            said = entry.mistake.check or "nothing"
            remedy = f'Write check = "{failed[0]}" into the entry, or fix the check that should have noticed it.'
            yield Lack(name, where, f"{entry.label} is noticed by {failed[0]} first; its check says {said}", remedy)
        for said, held_by in contracts.breached(course, name, entry) if failed else ():
            if held_by.isdisjoint(failed):
                what = f"{entry.label} breaches “{said}”, and passes {', '.join(sorted(held_by))}"
                yield Lack(name, where, what, "Let that check notice it, or correct held_by or breached_by.")


def _failure(report: Report, without_script: bool = False) -> str:
    """What failed first of all that this machine can run; empty when all of it has passed."""
    if report.faults:
        return " ".join(line.strip() for line in report.faults[0].splitlines()[-3:] if line.strip())
    check = bank.shortfall(report, without_script)
    if check is not None and check.diagnosis is not None:
        return f"“{check.name}”: {check.diagnosis.message.splitlines()[0]}"
    if check is not None:
        return f"“{check.name}” was not run: {check.reason}"
    return "" if report.exercises else "no check ran"


# The book ------------------------------------------------------------------------------------------------------------


def _book(course: Course, names: list[str]) -> Iterator[Lack]:
    """The chapters of these exercises: their form, and whether they were run as they stand; then the ledger."""
    found = {chapter.name for chapter in map(course.chapter_of, names) if chapter is not None}
    sources = sorted(found & set(chapters.names(course.root)))
    for name in sources:
        for problem in form.problems(name, course.root):
            yield Lack(name, f"chapters/source/{name}.py", problem, "src/lockstep/authoring/form.py has the rules.")
    for name in chapters.stale(sources, course.root):
        remedy = f"./lockstep author chapters {name} runs the source and writes it."
        yield Lack(name, f"chapters/{name}.ipynb", "the notebook holds other cells than its source", remedy)
    remedy = "Name the section and a cell that asserts or whose output is compared, or the reason why none can."
    try:
        problems = claims.problems(claims.read(course.root), course.root)
    except CourseError as error:
        problems = [str(error)]
    for problem in problems:
        yield Lack("claims", "chapters/claims.toml", problem, remedy)
