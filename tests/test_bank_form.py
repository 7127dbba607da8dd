"""The bank's form: what an entry says, what is wrong with one, and that files go in and come out as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.authoring.bank import Entry, WrongSubmissions, entries, find, read
from lockstep.authoring.bank_writing import MOST_LINES, add
from lockstep.commands.bank import commands
from lockstep.course import Course, CourseError

ROOT = Path(__file__).resolve().parents[1]
SOLUTION = '''"""Exercise double."""


def double(x):
    """Twice x."""
    # --- solution: double it ---
    y = x + x
    print(y)
    return y
    # --- end ---
'''
PRODUCT = "def double(x):\n    return 2 * x\n"
BY_PRODUCT = f"# style: multiplies\n{PRODUCT}"
WRONG = '''# Wrong submissions.

[no_sum]
diagnosis = "wrong-sum"
why = "returns x"
change = """
-    y = x + x
+    y = x
"""

# What follows prints.
[prints_twice]
diagnosis = "speaks"
why = 'says "twice"'
also = ["wrong-sum"]
change = """
     print(y)
+    print(y)
"""
'''
DRAFT = "# diagnosis: {}\n# why: it does\ndef double(x):\n    return {}\n"


def put(root: Path, path: str, text: str) -> Path:
    """Write a file below `root`."""
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    return place


@pytest.fixture
def small(tmp_path: Path) -> Course:
    """A course of one exercise with two wrong submissions."""
    put(tmp_path, "autograder/course.toml", '[[chapter]]\nname = "one"\ntitle = "One"\nexercises = ["double"]\n')
    diagnoses = "".join(f'[{id}]\ntitle = "t"\nwhy = "w"\n' for id in ("wrong-sum", "speaks", "raised"))
    put(tmp_path, "autograder/diagnoses.toml", diagnoses)
    put(tmp_path, "solutions/double.py", SOLUTION)
    put(tmp_path, "tests/submissions/right/double/by_product.py", BY_PRODUCT)
    put(tmp_path, "tests/submissions/wrong/double.toml", WRONG)
    return Course(tmp_path)


def bank_file(course: Course) -> Path:
    """Where the wrong submissions of the one exercise are."""
    return WrongSubmissions(course.root, "double").file


def entry(course: Course, label: str) -> Entry:
    """The entry of this label, which is there."""
    found = find(course.root, label)
    assert found is not None
    return found


def test_an_entry_is_its_head_and_its_changed_base(small: Course) -> None:
    first, second, right = entries(small.root)
    assert first.text == (
        '# diagnosis: wrong-sum\n# why: returns x\n"""Exercise double."""\n\n\n'
        'def double(x):\n    """Twice x."""\n    y = x\n    print(y)\n    return y\n'
    )
    assert second.text.startswith('# diagnosis: speaks\n# why: says "twice"\n# also: wrong-sum\n"""')
    assert (right.label, right.text, right.mistake) == ("double/by_product", BY_PRODUCT, None)
    assert find(small.root, "double/other") is None and find(small.root, "nothing/no_sum") is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("-    y = x + x", "-    y = 2 * x", "double/no_sum: its change is not in the text:\n    -    y = 2 * x\n"),
        ("-    y = x + x", "-    y = 2 * x", "the nearest place there:\n         y = x + x\n  The base is 'solution'"),
        ("-    y = x + x", '-    y = x\n"""\nbase = """stub', "double/no_sum: "),
        ("     print(y)", " \n+", "double/prints_twice: its change fits in 2 places"),
        ("also =", 'base = "by_sum"\nalso =', "there is no base 'by_sum'. There are: solution, stub, by_product"),
        (
            'also = ["wrong-sum"]',
            'also = "wrong-sum"',
            "double/prints_twice: Expected `array`, got `str` - at `$.also`",
        ),
        ('why = "returns x"', "", "double/no_sum: Object missing required field `why`"),
        ("diagnosis =", "diagnose =", "double/no_sum: Object contains unknown field `diagnose`"),
        ("# Wrong submissions.", "basis = 'stub'", "double/basis: an entry is a table"),
        ("# Wrong submissions.", "[", "tests/submissions/wrong/double.toml cannot be read: "),
    ],
)
def test_what_is_broken_is_named(small: Course, old: str, new: str, said: str) -> None:
    text = bank_file(small).read_text(encoding="utf-8")
    assert old in text
    bank_file(small).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CourseError) as error:
        entries(small.root)
    assert said in str(error.value)


def test_a_base_that_changed_breaks_what_changed_it_and_nothing_else(small: Course) -> None:
    put(small.root, "solutions/double.py", SOLUTION.replace("x + x", "2 * x"))
    exam = read(small.root)
    assert [one.label for one in exam.entries] == ["double/prints_twice", "double/by_product"]
    (problem,) = exam.problems
    assert problem.label == "double/no_sum" and "y = 2 * x" in problem.text
    assert entry(small, "double/prints_twice").script is False
    with pytest.raises(CourseError, match=r"^double/no_sum: "):
        find(small.root, "double/no_sum")
    bank_file(small).write_text("[", encoding="utf-8")
    with pytest.raises(CourseError, match=r"^tests/submissions/wrong/double.toml cannot be read"):
        find(small.root, "double/prints_twice")


def test_added_files_leave_the_rest_as_it_is(small: Course) -> None:
    """An entry is put below those with its diagnosis, and in the place of its own name; comments stay where they are."""
    added = add(small, "double", put(small.root, "square.py", DRAFT.format("wrong-sum", "x * x")))
    assert added.text == DRAFT.format("wrong-sum", "x * x") and added.label == "double/square"
    block = (
        '\n[square]\ndiagnosis = "wrong-sum"\nwhy = "it does"\nbase = "by_product"\n'
        "change = '''\n-    return 2 * x\n+    return x * x\n'''\n"
    )
    above, below = WRONG.split("\n# What follows")
    assert bank_file(small).read_text(encoding="utf-8") == f"{above}{block}\n# What follows{below}"

    add(small, "double", put(small.root, "no_sum.py", DRAFT.format("raised", "1 / 0")), replace=True)
    last = DRAFT.format("raised", '\'\'\' \\ """ \\t \x07\' + "ü"')
    assert add(small, "double", put(small.root, "odd.py", last)).text == last == entry(small, "double/odd").text
    text = bank_file(small).read_text(encoding="utf-8")
    assert text.startswith('# Wrong submissions.\n\n[no_sum]\ndiagnosis = "raised"\n') and text.count("[no_sum]") == 1
    assert f"{block}\n# What follows prints.\n[prints_twice]\n" in text
    assert [one.name for one in entries(small.root)] == ["no_sum", "odd", "square", "prints_twice", "by_product"]


def test_the_first_entry_begins_the_file(small: Course) -> None:
    bank_file(small).unlink()
    draft = put(
        small.root, "square.py", "# needs: hosts\n# why: it does\n# diagnosis: wrong-sum\n" + PRODUCT.replace("2", "3")
    )
    assert add(small, "double", draft).text == (
        "# diagnosis: wrong-sum\n# why: it does\n# needs: hosts\ndef double(x):\n    return 3 * x\n"
    )
    first = bank_file(small).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# Wrong submissions of double, each one mistake away")


@pytest.mark.parametrize(
    ("name", "text", "options", "said"),
    [
        ("new.py", DRAFT.format("wrong-sun", "x"), {}, "is not in autograder/diagnoses.toml. Did you mean wrong-sum?"),
        ("new.py", "# why: so\n" + PRODUCT, {}, "new.py must begin with the lines # diagnosis: ID and # why"),
        ("new.py", "# diagnosis: speaks\ndef double(x):\n    return x\n", {}, "there is no why"),
        ("no_sum.py", DRAFT.format("raised", "x"), {}, "there is an entry double/no_sum: --replace puts this one in"),
        ("new.py", DRAFT.format("raised", "x"), {"replace": True}, "there is no entry double/new: leave --replace out"),
        ("new.py", DRAFT.format("raised", "2 * x"), {}, "the file equals the base 'by_product' of double"),
        ("new.py", DRAFT.format("raised", "x\n" * MOST_LINES), {}, "Put the same design without the mistake into"),
        ("a b.py", DRAFT.format("raised", "x"), {}, "a b.py cannot be an entry's name"),
        ("base.py", DRAFT.format("raised", "x"), {}, "base.py cannot be an entry's name"),
        ("new.sbatch", DRAFT.format("raised", "x"), {}, "there is no solutions/double.sbatch"),
    ],
)
def test_what_is_not_taken_in(small: Course, name: str, text: str, options: dict[str, bool], said: str) -> None:
    with pytest.raises(CourseError) as error:
        add(small, "double", put(small.root, name, text), **options)
    assert said in str(error.value)
    assert bank_file(small).read_text(encoding="utf-8") == WRONG


def test_the_commands(small: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_COURSE", str(small.root))
    monkeypatch.chdir(small.root)

    def bank(*arguments: str) -> str:
        done = CliRunner().invoke(commands, arguments)
        if done.exit_code:
            assert isinstance(done.exception, CourseError), done.output
            return str(done.exception)
        return done.output

    assert bank("list", "double") == 'no_sum        wrong-sum  returns x\nprints_twice  speaks     says "twice"\n'
    assert bank("show", "double/no_sum") == entry(small, "double/no_sum").text
    assert bank("show", "double/no_sum", "--out", "mine.py") == ""
    assert Path("mine.py").read_text(encoding="utf-8") == entry(small, "double/no_sum").text
    assert bank("add", "double", "mine.py") == "double/mine is in tests/submissions/wrong/double.toml\n"
    assert bank("add", "double", "your.py") == "there is no file your.py"
    assert bank("show", "double/x") == "there is no entry 'double/x': ./lockstep author bank list double"
    assert (
        bank("list", "triple") == "there are no wrong submissions of 'triple': no tests/submissions/wrong/triple.toml"
    )
    put(small.root, "solutions/double.py", SOLUTION.replace("x + x", "2 * x"))
    assert bank("list", "double").startswith("double/no_sum: its change is not in the text")


@pytest.mark.slow
def test_every_entry_goes_out_and_in_again(tmp_path: Path) -> None:
    """Shown, and added in its own place, every entry of the bank is the same file, and so are all the others."""
    for part in ("autograder", "solutions", "tests/submissions"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "hostile"))
    course = Course(tmp_path)
    before = [one for one in entries(ROOT) if not one.right]
    assert len(before) > 800
    for one in before:
        file = tmp_path / (one.name + (".sbatch" if one.script else ".py"))
        file.write_text(one.text, encoding="utf-8")
        assert add(course, one.exercise, file, replace=True).text == one.text
    after = [one for one in entries(tmp_path) if not one.right]
    assert [(one.label, one.text) for one in after] == [(one.label, one.text) for one in before]
