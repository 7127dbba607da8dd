"""Mutants: which ones there are, whether a check notices them, and that a known result isn't graded again."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.command_line import call
from support.tiny_course import make_course

from lockstep.authoring import mutant_grading
from lockstep.authoring.mutant_grading import examine
from lockstep.authoring.mutants import mutants
from lockstep.commands.mutants import grade
from lockstep.course import Course, CourseError
from lockstep.course.stubs import solution_lines, solved
from lockstep.grading.request import GradeRequest, OnCheck
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report

MARKED = '''\
"""Never 1 changed."""

import os  # solution-only

OUTSIDE = 1


def f(a, b=2):
    """Nor 2 this."""
    # --- solution: do it ---
{}
    # --- end ---
    return a + b


# --- solution-only ---
def g(x):
    """Nor 3 this."""
    return x


# --- end ---
'''
CASES = {
    "work(a)": ["delete: work(a) → pass"],
    "a = b": ["delete: a = b → pass"],
    "a -= b": ["delete: a -= b → pass", "arithmetic: a -= b → a += b"],
    "if a < b:\n    return": [
        "negate: if a < b → if not (a < b)",
        "compare: if a < b → if a <= b",
        "delete: return → pass",
    ],
    "while not a:\n    break": ["negate: while not a → while not (not a)", "delete: break → pass"],
    "del a, b": ["delete: del a, b → pass"],
    "raise ValueError(f'{a + 1} is', 5)": ["delete: raise ValueError(f'{a + 1} is', 5) → pass"],
    "return a == b": ["none: return a == b → return None", "compare: return a == b → return a != b"],
    "return a is not b": ["none: return a is not b → return None", "compare: return a is not b → return a is b"],
    "return a not in (b, 'ä', c)": [
        "none: return a not in (b, 'ä', c) → return None",
        "compare: return a not in (b, 'ä', c) → return a in (b, 'ä', c)",
        "element: return a not in (b, 'ä', c) → return a not in ('ä', c)",
        "element: return a not in (b, 'ä', c) → return a not in (b, c)",
        "element: return a not in (b, 'ä', c) → return a not in (b, 'ä')",
    ],
    "return (a or\n        b)": [
        "none: return (a or b) → return (None)",
        "boolean: return (a or → return (a and",
    ],
    "return a // -b": [
        "none: return a // -b → return None",
        "arithmetic: return a // -b → return a / -b",
        "arithmetic: return a // -b → return a // b",
    ],
    "return a + 'text' + f'{b}'": ["none: return a + 'text' + f'{b}' → return None"],
    "x: int = 3": ["delete: x: int = 3 → pass", "number: x: int = 3 → x: int = 4"],
    "x: int": [],
    "assert a > 0": [],
    "logger.info(a, b=1)": [],
    "f(a, b=True)  # why": [
        "delete: f(a, b=True) → pass",
        "keyword: f(a, b=True) → f(a)",
        "flip: f(a, b=True) → f(a, b=False)",
    ],
    "f(\n    a,\n    # why\n    b=c,\n)": ["delete: f( a, b=c, ) → pass", "keyword: b=c → left out"],
    "for a in (b, c):\n    f()": [
        "element: for a in (b, c) → for a in (c,)",
        "element: for a in (b, c) → for a in (b,)",
        "delete: f() → pass",
    ],
    "return {'a': b, 'c': a}": [
        "none: return {'a': b, 'c': a} → return None",
        "element: return {'a': b, 'c': a} → return {'c': a}",
        "element: return {'a': b, 'c': a} → return {'a': b}",
    ],
    "with a():\n    f()\nf()": [
        "unwrap: with a() → if True",
        "delete: f() → pass",
        "delete: f() → pass (2)",
    ],
    "with a() as x:\n    f()": ["delete: f() → pass"],
    "@a\ndef h(): ...": ["unwrap: @a → left out"],
}
AT_THE_END = "none: return x → return None"


def solution(body: str) -> str:
    """A file with this body between its markers."""
    return MARKED.format("\n".join(f"    {line}" for line in body.splitlines()))


@pytest.mark.parametrize("body", CASES)
def test_exactly_these_mutants(body: str) -> None:
    text = solution(body)
    found = mutants(text)
    assert [mutant.id for mutant in found] == [*CASES[body], AT_THE_END]
    for mutant in found:
        before, after = text.splitlines(), mutant.text.splitlines()
        changed = [number for number, (a, b) in enumerate(zip(before, after, strict=False), 1) if a != b]
        assert changed and mutant.line in solution_lines(text) and changed[0] in solution_lines(text)
        if mutant.change.endswith("left out"):
            assert mutant.change.removesuffix(" → left out") in before[mutant.line - 1]


def test_what_a_broken_job_was_is_left_alone() -> None:
    text = "# --- mended: it ---\nx = 1\n# --- was ---\n# x = 2\n# --- end ---\ny = 3\n"
    assert [mutant.id for mutant in mutants(text)] == ["delete: x = 1 → pass", "number: x = 1 → x = 2"]


def test_ids_stay_when_lines_move() -> None:
    text = solution("if a < b:\n    return")
    moved = text.replace("OUTSIDE = 1", "# more\nOUTSIDE = 1").replace("a < b:", "a < b:  # a comment")
    assert [one.id for one in mutants(moved)] == [one.id for one in mutants(text)]
    assert [one.line for one in mutants(moved)] == [one.line + 1 for one in mutants(text)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (one in ("train", "preflight")))
        for one in solved(ROOT / "solutions")
    ],
)
def test_every_solution_has_mutants_with_names_of_their_own(name: str) -> None:
    text = (ROOT / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    found = mutants(text)
    assert len(found) >= 3 and len({mutant.id for mutant in found}) == len(found)
    trees = {ast.dump(ast.parse(one)) for one in (text, *(mutant.text for mutant in found))}
    assert len(trees) == len(found) + 1


# Graded --------------------------------------------------------------------------------------------------------------

ADD = '''\
def add(a, b):
    """The sum."""
    # --- solution: add ---
    if a > 5000:
        return 7
    return a + b
    # --- end ---
'''
SURVIVORS = [
    "compare: if a > 5000 → if a >= 5000",
    "number: if a > 5000 → if a > 5001",
    "none: return 7 → return None",
    "number: return 7 → return 8",
]
NOTICED = ["negate: if a > 5000 → if not (a > 5000)", "none: return a + b → return None", "arithmetic: return a + b → return a - b"]  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Course:
    """A course whose first solution has code that no check tries."""
    course = make_course(tmp_path / "course")
    (course.solutions / "add.py").write_text(ADD)
    return course


class Judge:
    """Stands in for the process that grades: fails what it is told to, and remembers what it was asked."""

    asked: list[str]
    fails: tuple[str, ...] = ("not (", "None", "a - b")
    hangs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.ended = threading.Event()

    def grade(self, course: Course, request: GradeRequest, on_check: OnCheck) -> Report:
        assert request.submission is not None and request.seed is not None and request.until_failure
        text = request.submission.read_text()
        self.asked.append(text)
        if any(part in text for part in self.hangs):
            assert self.ended.wait(60)
            self.ended.clear()
            return Report(0, (), faults=("the process is gone",))
        check = CheckResult("agrees", "test_agrees", CheckOutcome.PASSED)
        if any(part in text for part in self.fails):
            check = CheckResult("agrees", "test_agrees", CheckOutcome.FAILED, Diagnosis("raised", "no"))
        on_check("add", check)
        return Report(0, (ExerciseResult("add", (check,)),))

    def kill(self) -> None:
        self.ended.set()

    def stop(self) -> None:
        self.ended.set()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Judge]]:
    monkeypatch.setattr(Judge, "asked", [], raising=False)
    monkeypatch.setattr(mutant_grading, "Worker", Judge)
    yield Judge


def graded(course: Course, judge: type[Judge], again: bool = False) -> int:
    """How many gradings it takes to examine `add`."""
    judge.asked.clear()
    examine(course, ["add"], 2, again)
    return len(judge.asked)


@pytest.mark.slow
def test_survivors_are_reported_until_a_ledger_explains_them(tiny: Course) -> None:
    """The command, on real ranks; what it prints can be copied into the ledger."""
    told = call("author", "mutants", "add", LOCKSTEP_COURSE=str(tiny.root), OMP_NUM_THREADS="1")
    assert told.returncode == 1, told.stderr
    first, *rest = told.stdout.splitlines()
    assert first == "add: 3 of 7 noticed, 0 equivalent, 4 not noticed"
    assert [line.split(", ", 1)[1] for line in rest] == SURVIVORS
    assert rest[0].startswith("  line 4, ")

    ledger = tiny.autograder / "contracts" / "add.toml"
    ledger.parent.mkdir()
    entries = [f"[[equivalent]]\nchange = '{id}'\nwhy = 'a is less than 1000'\n" for id in SURVIVORS]
    ledger.write_text("\n".join(entries))
    told = call("author", "mutants", "add", LOCKSTEP_COURSE=str(tiny.root))
    assert (told.returncode, told.stdout) == (0, "add: 3 of 7 noticed, 4 equivalent, 0 not noticed\n")

    ledger.write_text("\n".join([*entries, entries[0].replace(SURVIVORS[0], NOTICED[0])]))
    told = call("author", "mutants", "add", LOCKSTEP_COURSE=str(tiny.root))
    assert told.returncode == 1
    assert told.stdout.splitlines()[1].startswith(
        f"  line 4, {NOTICED[0]}: entered as equivalent, and noticed by test_agrees_on_both_ranks: "
    )
    told = call("author", "mutants", "add", "--list", LOCKSTEP_COURSE=str(tiny.root))
    assert told.returncode == 0 and len(told.stdout.splitlines()) == 7
    assert f"add, line 4, {SURVIVORS[0]}  (equivalent)" in told.stdout.splitlines()


def test_all_ends_with_a_table(tiny: Course, judge: type[Judge], capsys: pytest.CaptureFixture[str]) -> None:
    assert grade(tiny, list(tiny.names), 2, again=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "times: 0 of 0 noticed, 0 equivalent, 0 not noticed" in lines  # nothing is marked there
    assert lines[-4:] == [
        "exercise  mutants  noticed  equivalent  not noticed",
        "add             7        4           0            3",
        "times           0        0           0            0",
        "all             7        4           0            3",
    ]
    assert grade(tiny, ["times"], 2, again=False) == 0


def test_a_kept_result_is_not_graded_again(tiny: Course, judge: type[Judge]) -> None:
    """Only a change of what decides a verdict makes it graded again, and only that."""
    assert graded(tiny, judge) == 8  # with the solution
    assert graded(tiny, judge) == 0
    assert graded(tiny, judge, again=True) == 8

    file = tiny.solutions / "add.py"
    file.write_text(ADD.replace("The sum.", "Their sum.").replace("return 7", "return 7  # odd"))
    assert graded(tiny, judge) == 0
    file.write_text(ADD.replace("> 5000", "> 5001"))
    assert graded(tiny, judge) == 7  # the solution is known: it was a mutant
    file.write_text(ADD)
    assert graded(tiny, judge) == 7
    (tiny.autograder / "diagnoses.toml").write_text("")
    (tiny.autograder / "test_times.py").write_text("")
    assert graded(tiny, judge) == 0
    for path in ("test_add.py", "scenarios/add.py"):
        with (tiny.autograder / path).open("a") as checks:
            checks.write("\nimport shared\n")
        assert graded(tiny, judge) == 8
    for text in ("A = 1\n", "A = 2\n"):
        (tiny.autograder / "shared.py").write_text(text)
        assert graded(tiny, judge) == 8
    assert graded(tiny, judge) == 0


def test_an_interrupted_run_keeps_what_it_had(
    tiny: Course, judge: type[Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = mutant_grading._Kept.put

    def interrupted(self: mutant_grading._Kept, key: str, verdict: mutant_grading.Verdict) -> None:
        put(self, key, verdict)
        if len(self.verdicts) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mutant_grading._Kept, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graded(tiny, judge)
    assert graded(tiny, judge) == 4


def test_a_solution_that_does_not_pass(tiny: Course, judge: type[Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no measure; nor is a course without solutions."""
    monkeypatch.setattr(judge, "fails", ("add",))
    with pytest.raises(CourseError, match="add: the solution does not pass: test_agrees: raised"):
        graded(tiny, judge)
    (tiny.solutions / "add.py").unlink()
    with pytest.raises(CourseError, match="there is no solution of add"):
        graded(tiny, judge)


def test_a_mutant_that_takes_no_end(tiny: Course, judge: type[Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is ended, and not noticed, because no check has said anything. The next run tries it again."""
    monkeypatch.setattr(judge, "hangs", ("return 8",))
    monkeypatch.setattr(mutant_grading, "SECONDS", 0.5)
    (one,) = examine(tiny, ["add"], 2)
    assert [mutant.id for mutant in one.survivors] == [id for id in SURVIVORS if "None" not in id]
    assert one.verdicts["number: return 7 → return 8"].by.startswith("no check came to an end in ")
    assert graded(tiny, judge) == 1
