"""The contract ledger: `autograder/contracts/NAME.toml` says for every sentence of a stub's docstrings what holds it.

    [[promise]]
    says = "After `cleanup_ddp` it may be called again."      # a piece of a docstring, word for word, in one line
    held_by = ["test_can_be_repeated"]                        # checks that fail when it is breached
    breached_by = ["destroys_twice"]                          # wrong submissions of the bank that breach it

    [[context]]
    says = "Chapter 2, \"The process group\"."                # what promises and forbids nothing

    [[equivalent]]
    change = "number: return x[0] → return x[1]"              # a mutant, as `author mutants` calls it
    why = "both elements are the same"                        # why no check can notice it

The docstrings are those of the module, of each function that a learner writes and of each class that has one. A
piece that stands in two of them also says `of = "cleanup_ddp"`. Every word belongs to a promise or is context, except
headings such as `Args:`. The cases of a group (the clinic) have no contract: their ledgers hold equivalent mutants.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..course import Course, CourseError
from ..course.stubs import make_stub
from ..course.toml import read_toml
from . import bank
from .mutants import mutants

HEADING = re.compile(r"(Args|Returns|Raises|Yields):")
LONGEST = 100
Named = ast.FunctionDef | ast.ClassDef


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a docstring, `of` the function or class whose docstring it is."""

    says: str
    of: str = ""

    @property
    def folded(self) -> str:
        """Its words in one line."""
        return " ".join(self.says.split())


class Promise(Piece, frozen=True):
    """What a learner's file must keep."""

    held_by: tuple[str, ...] = ()
    breached_by: tuple[str, ...] = ()


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mutant that does the same as the solution."""

    change: str
    why: str


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One exercise's ledger."""

    promise: tuple[Promise, ...] = ()
    context: tuple[Piece, ...] = ()
    equivalent: tuple[Equivalent, ...] = ()


def place(course: Course, name: str) -> Path:
    """The ledger of an exercise."""
    return course.autograder / "contracts" / f"{name}.toml"


def read(course: Course, name: str) -> Contract:
    """An exercise's ledger, empty when there is none. Raises CourseError when it cannot be read."""
    return read_toml(place(course, name), Contract) if place(course, name).is_file() else Contract()


def equivalents(course: Course, name: str) -> dict[str, str]:
    """The mutants that no check can notice, each with the reason."""
    return {one.change: one.why for one in read(course, name).equivalent}


def breached(course: Course, name: str, entry: bank.Entry) -> list[tuple[str, set[str]]]:
    """The promises that a wrong submission is said to breach, each with the checks that hold it."""
    own = entry.label.removeprefix(f"{name}/")
    return [(one.folded, set(one.held_by)) for one in read(course, name).promise if own in one.breached_by]


def docstrings(stub: str) -> dict[str, str]:
    """The docstrings that tell a learner what to write, folded, by function or class; the module's under ""."""
    tree = ast.parse(stub)
    found = {"": ast.get_docstring(tree) or ""}

    def look(nodes: list[ast.stmt], within: str) -> None:
        for node in nodes:
            if isinstance(node, Named) and _is_written(node):
                found[within + node.name] = ast.get_docstring(node) or ""
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{node.name}.")

    look(tree.body, "")
    return {name: " ".join(text.split()) for name, text in found.items() if text}


def _is_written(node: Named) -> bool:
    """Whether a learner writes it, or a part of it: something in it is still to be implemented."""
    private = node.name.startswith("_") and not node.name.startswith("__")
    return not private and any(isinstance(one, ast.Name) and one.id == "NotImplementedError" for one in ast.walk(node))


# Is it complete? -----------------------------------------------------------------------------------------------------


def problems(course: Course, name: str, exam: bank.Exam) -> Iterator[tuple[str, str]]:
    """What is wrong with an exercise's ledger, each with what to do. Nothing when there is no ledger."""
    if not place(course, name).is_file():
        return
    try:
        ledger = read(course, name)
    except CourseError as error:
        yield str(error), "src/lockstep/authoring/contracts.py explains the form."
        return
    text = (course.solutions / f"{name}.py").read_text(encoding="utf-8")
    if "/" not in name:
        yield from _of_text(ledger, docstrings(make_stub(text, name)))
    tests = [one.name for one in ast.parse(course.checks(name).read_bytes()).body if isinstance(one, ast.FunctionDef)]
    wrong = {entry.label.removeprefix(f"{name}/") for entry in exam.entries if entry.exercise == name and entry.mistake}
    yield from _of_promises(ledger, {test for test in tests if test.startswith("test_")}, wrong)
    yield from _of_equivalents(ledger, {mutant.id for mutant in mutants(text)} if ledger.equivalent else set())


def _of_text(ledger: Contract, told: dict[str, str]) -> Iterator[tuple[str, str]]:
    left = {name: [True] * len(text) for name, text in told.items()}
    for piece in (*ledger.promise, *ledger.context):
        among = {name: text for name, text in told.items() if piece.of in ("", name)}
        if not among:
            yield f"no docstring is of {piece.of!r}", f"There are: {', '.join(filter(None, told))}."
            continue
        found = [(one, at.start()) for one, text in among.items() for at in re.finditer(re.escape(piece.folded), text)]
        if not piece.folded or not found:
            remedy = "Copy the sentence from the docstring, or take the entry out if the docstring lost it."
            yield f"no docstring says {_short(piece.says)}", remedy
        elif len(found) > 1:
            remedy = "Quote more of it, or name the function with `of`."
            yield f"the docstrings say {_short(piece.says)} {len(found)} times", remedy
        else:
            one, start = found[0]
            left[one][start : start + len(piece.folded)] = [False] * len(piece.folded)
    for name, text in told.items():
        for heading in HEADING.finditer(text):
            left[name][heading.start() : heading.end()] = [False] * len(heading[0])
        rest = "".join(character if open_ else "\0" for character, open_ in zip(text, left[name], strict=True))
        for part in re.split("\0+", rest):
            if re.search(r"\w", part):
                where = f"the docstring of {name}" if name else "the module's docstring"
                yield f"no entry has {_short(part)} ({where})", "Enter it as a [[promise]] or as [[context]]."


def _of_promises(ledger: Contract, checks: set[str], wrong: set[str]) -> Iterator[tuple[str, str]]:
    for promise in ledger.promise:
        said = f"the promise {_short(promise.says)}"
        if not promise.held_by:
            yield f"{said} has no check", "Write one and name it in held_by, or take the promise out of the docstring."
        if not promise.breached_by:
            remedy = "Write one that breaches this and nothing else, and name it in breached_by."
            yield f"{said} is breached by no wrong submission", remedy
        for id in sorted(set(promise.held_by) - checks):
            yield f"{said} is held by {id!r}, which is no check", f"There are: {', '.join(sorted(checks))}."
        for one in sorted(set(promise.breached_by) - wrong):
            remedy = "./lockstep author bank list shows their names."
            yield f"{said} is breached by {one!r}, which is no wrong submission of the bank", remedy


def _of_equivalents(ledger: Contract, known: set[str]) -> Iterator[tuple[str, str]]:
    for change, count in Counter(one.change for one in ledger.equivalent).items():
        if count > 1:
            yield f"the mutant {_short(change)} is entered {count} times", "Keep one of the entries."
        if change not in known:
            remedy = "./lockstep author mutants --list shows their names; take the entry out if the code has changed."
            yield f"there is no mutant {_short(change)}", remedy
    for one in ledger.equivalent:
        if not one.why.strip():
            yield f"nothing says why {_short(one.change)} is equivalent", "Give the reason in why."


def _short(text: str) -> str:
    folded = " ".join(text.split())
    return f"“{folded if len(folded) <= LONGEST else folded[: LONGEST - 2] + ' …'}”"
