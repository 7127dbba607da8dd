"""The contract ledgers: each one there is holds, and everything that can be wrong with one is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ROOT
from support.tiny_course import make_course

from lockstep.authoring import bank, contracts
from lockstep.authoring.release import _goes
from lockstep.authoring.review import review
from lockstep.course import Course
from lockstep.course.stubs import make_stub
from lockstep.grading.stamp import stamp

COURSE = Course(ROOT)
LEDGERS = sorted((COURSE.autograder / "contracts").rglob("*.toml"))


def test_every_exercise_has_its_ledger() -> None:
    assert [name for name in COURSE.names if "/" not in name and not contracts.place(COURSE, name).is_file()] == []


def test_every_ledger_is_of_an_exercise() -> None:
    of = [path.relative_to(COURSE.autograder / "contracts").with_suffix("").as_posix() for path in LEDGERS]
    assert set(of) <= set(COURSE.names)


def test_every_ledger_holds() -> None:
    exam = bank.read(ROOT)
    found = [
        f"{name}: {text}. {remedy}" for name in COURSE.names for text, remedy in contracts.problems(COURSE, name, exam)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [name for name in COURSE.names if "/" not in name])
def test_every_exercise_has_docstrings_to_hold(name: str) -> None:
    """The module's, and that of something to write."""
    told = contracts.docstrings(make_stub((COURSE.solutions / f"{name}.py").read_text(encoding="utf-8"), name))
    assert "" in told and len(told) >= 2, told


# A tiny ledger -------------------------------------------------------------------------------------------------------

ADD = '''\
"""Exercise add: adds."""


def given():
    """Nobody writes this."""


class Adder:
    """What adds."""

    def add(self):
        """It adds too.

        Returns:
            A sum, never
            negative. As told.
        """
        # --- solution: add ---
        return 0 + 1
        # --- end ---

    def also_given(self):
        """Nor this."""


def add(a, b):
    """Add `a` and `b`: the sum. Prints nothing. As told."""
    # --- solution: add ---
    return a + b
    # --- end ---
'''
LEDGER = """\
[[promise]]
says = "It adds too."
held_by = ["test_agrees_on_both_ranks"]
breached_by = ["minus"]

[[promise]]
says = "A sum, never negative."
held_by = ["test_agrees_on_both_ranks"]
breached_by = ["minus", "loud"]

[[promise]]
says = "Add `a` and `b`: the sum."
held_by = ["test_agrees_on_both_ranks"]
breached_by = ["minus"]

[[promise]]
says = "Prints nothing."
held_by = ["test_is_quiet"]
breached_by = ["loud"]

[[context]]
says = "Exercise add: adds."

[[context]]
says = "What adds."

[[context]]
says = "As told."
of = "add"

[[context]]
says = "As told."
of = "Adder.add"

[[equivalent]]
change = "number: return 0 + 1 → return 1 + 1"
why = "nobody looks"
"""
WRONG = """\
[minus]
diagnosis = "raised"
check = "test_agrees_on_both_ranks"
why = "subtracts"
change = '''
-    return a + b
+    return a - b
'''

[loud]
diagnosis = "raised"
check = "test_is_quiet"
why = "prints"
change = '''
-    return a + b
+    return print("x") or a + b
'''
"""
ERRORS = {
    "sentence left out": (
        '[[promise]]\nsays = "Prints nothing."\nheld_by = ["test_is_quiet"]\nbreached_by = ["loud"]\n',
        "",
        "no entry has “Prints nothing.” (the docstring of add)",
    ),
    "module left out": ("Exercise add: adds.", "Exercise add:", "no entry has “adds.” (the module's docstring)"),
    "part left out": ("A sum, never negative.", "A sum,", "no entry has “never negative.” (the docstring of Adder.add)"),
    "not said": ("Prints nothing.", "Prints something.", "no docstring says “Prints something.”"),
    "says nothing": ("What adds.", "", "no docstring says “”"),
    "said twice": ('of = "add"', "", "the docstrings say “As told.” 2 times"),
    "of nothing": ('of = "add"', 'of = "subtract"', "no docstring is of 'subtract'"),
    "no check": ('held_by = ["test_is_quiet"]', "", "the promise “Prints nothing.” has no check"),
    "unknown check": ("test_is_quiet", "test_is_loud", "the promise “Prints nothing.” is held by 'test_is_loud', which is no check"),
    "no breach": ('breached_by = ["loud"]', "", "the promise “Prints nothing.” is breached by no wrong submission"),
    "unknown breach": (
        '["minus", "loud"]',
        '["minus", "right"]',
        "the promise “A sum, never negative.” is breached by 'right', which is no wrong submission of the bank",
    ),
    "no such mutant": ("return 1 + 1", "return 2 + 1", "there is no mutant “number: return 0 + 1 → return 2 + 1”"),
    "no reason": ("nobody looks", " ", "nothing says why “number: return 0 + 1 → return 1 + 1” is equivalent"),
    "mutant twice": (
        "[[equivalent]]",
        '[[equivalent]]\nchange = "number: return 0 + 1 → return 1 + 1"\nwhy = "so"\n[[equivalent]]',
        "the mutant “number: return 0 + 1 → return 1 + 1” is entered 2 times",
    ),
    "a misspelt field": ("held_by = [\"test_is_quiet\"]", "held = []", "Object contains unknown field `held` - at `$.promise[3]`"),
    "not TOML": ("[[promise]]", "[[promise", "add.toml cannot be read: "),
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Course:
    """A course whose first exercise has a ledger that is complete."""
    course = make_course(tmp_path / "course")
    (course.solutions / "add.py").write_text(ADD)
    for path, text in (
        (contracts.place(course, "add"), LEDGER),
        (tmp_path / "course" / bank.FOLDER / "wrong" / "add.toml", WRONG),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return course


def problems(course: Course) -> list[str]:
    """What is wrong with the ledger of `add`."""
    found = list(contracts.problems(course, "add", bank.read(course.root)))
    assert all(remedy.endswith(".") for _, remedy in found)
    return [text for text, _ in found]


def test_a_complete_ledger(tiny: Course) -> None:
    """What is given to the learner needs no entry."""
    assert problems(tiny) == []
    assert contracts.equivalents(tiny, "add") == {"number: return 0 + 1 → return 1 + 1": "nobody looks"}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_with_a_ledger(case: str, tiny: Course) -> None:
    old, new, said = ERRORS[case]
    assert old in LEDGER
    contracts.place(tiny, "add").write_text(
        LEDGER.replace(old, new, 1) if case != "unknown check" else LEDGER.replace(old, new)
    )
    found = problems(tiny)
    assert any(said in text for text in found), found
    if case not in ("of nothing", "not said", "says nothing", "said twice"):  # there a sentence is left over too
        assert len(found) == 1, found


def test_a_docstring_that_has_changed(tiny: Course) -> None:
    file = tiny.solutions / "add.py"
    file.write_text(ADD.replace("Prints nothing.", "Prints nothing. Raises nothing."))
    assert problems(tiny) == ["no entry has “Raises nothing.” (the docstring of add)"]
    file.write_text(ADD.replace("Prints nothing. ", ""))
    assert problems(tiny) == ["no docstring says “Prints nothing.”"]
    file.write_text(ADD.replace("0 + 1", "1 + 0"))
    assert problems(tiny) == ["there is no mutant “number: return 0 + 1 → return 1 + 1”"]


def test_author_check_names_a_missing_ledger(tiny: Course) -> None:
    """In one line for each exercise."""
    at = [(lack.exercise, lack.where) for lack in review(tiny, ["add", "times"]) if "contracts" in lack.where]
    assert at == [("times", "autograder/contracts/times.toml")]


def test_a_wrong_submission_that_its_check_passes(tiny: Course) -> None:
    """`author check --bank` compares who is said to notice with who does."""
    entries = [entry for entry in bank.read(tiny.root).entries if entry.exercise == "add"]
    assert contracts.breached(tiny, "add", entries[0]) == [
        ("It adds too.", {"test_agrees_on_both_ranks"}),
        ("A sum, never negative.", {"test_agrees_on_both_ranks"}),
        ("Add `a` and `b`: the sum.", {"test_agrees_on_both_ranks"}),
    ]
    from lockstep.authoring.review import _bank_gradings

    assert [lack.text for lack in _bank_gradings(tiny, "add", entries)] == [
        "add/loud breaches “A sum, never negative.”, and passes test_agrees_on_both_ranks"
    ]


def test_learners_and_gradings_never_see_a_ledger(tiny: Course) -> None:
    """It quotes solutions. And a class that is being graded isn't held up by a new one."""
    assert not _goes(tiny, "autograder/contracts/add.toml", ["add"])
    assert not _goes(tiny, "autograder/contracts/clinic/early_stop.toml", ["add"])
    before = stamp(tiny)
    contracts.place(tiny, "times").write_text("")
    assert stamp(tiny) == before
