"""The bank: submissions with known verdicts, the grader's own exam.

A right one is a whole file, `tests/submissions/right/EXERCISE/NAME.py`, each in a different style. A wrong one is a
base with one mistake, and only the mistake is stored, in `tests/submissions/wrong/EXERCISE.toml`:

    [no_set_epoch]
    diagnosis = "missing-set-epoch"     # the first failed check must name it
    check = "test_shuffles"             # that check
    why = "never calls set_epoch, so every epoch has the same order"
    also = ["…"]                        # diagnoses that may stand beside it
    needs = ["hosts"]                   # what this machine must have to show it
    base = "classic"                    # a file of right/EXERCISE, "solution" or "stub"
    change = '''
    -            sampler.set_epoch(epoch)
    '''

`check`, `also`, `needs` and `base` are optional. The tests grade most entries by their `check` alone, and those that
they draw by all checks. Without `base` an entry changes the file's default, which a line `base = "…"`
above all entries sets; without that, the solution as a reader sees it (no markers). `patch.py` explains `change`. An
entry that no longer fits its base is an error as soon as the bank is read.

A batch script (`["no_srun.sbatch"]`, whose bases are scripts too) is handed in beside the reference, and graded by the
checks whose ids contain "batch", if there is SLURM.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .. import cluster
from ..course import Course, CourseError, leaf
from ..course.stubs import SCRIPT, MarkerError, make_stub, without_markers
from ..course.toml import tomllib
from ..grading.verdict import CheckOutcome, CheckResult, Report
from . import patch

FOLDER = Path("tests") / "submissions"
WRONG_AND_RIGHT = (12, 4)
IN_A_GROUP = (3, 1)
"""How many an exercise must have at least. A case of a group is smaller, and there are many of them."""

SOLUTION, STUB = "solution", "stub"
TICKET = "ticket.txt"
HEAD = re.compile(r"# (style|diagnosis|check|why|also|needs): *(.+)")


class BankError(CourseError):
    """An entry of the bank that cannot be read or made. The message names it and says what to do."""


@dataclass(frozen=True)
class Mistake:
    """What is wrong: the diagnosis that the submission must get, why, which other diagnoses may come `also`, and the
    `check` that must give the first; empty where the entry doesn't say.
    """

    diagnosis: str
    why: str
    check: str = ""
    also: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """The comment lines that say it in a file."""
        said = {"diagnosis": self.diagnosis, "why": self.why, "check": self.check}
        said |= {"also": ", ".join(self.also), "needs": ", ".join(self.needs)}
        return "".join(f"# {key}: {text}\n" for key, text in said.items() if text)


@dataclass(frozen=True)
class Entry:
    """One submission of the bank, whole: `text` is what is graded. A right one has no `mistake`."""

    exercise: str
    name: str
    script: bool
    text: str
    place: Path
    mistake: Mistake | None = None

    @property
    def right(self) -> bool:
        """Whether it must pass."""
        return self.mistake is None

    @property
    def label(self) -> str:
        """`train_ddp/no_set_epoch`, or `train/no_srun.sbatch`."""
        return f"{self.exercise}/{self.name}{SCRIPT if self.script else ''}"

    @property
    def checks(self) -> str:
        """The checks that grade it: those whose ids contain this."""
        return "batch" if self.script else ""

    def missing(self) -> str | None:
        """Why it cannot be graded on this machine; None where it can."""
        needs = ("slurm",) if self.script else self.mistake.needs if self.mistake else ()
        return next((str(lack) for lack in map(cluster.available, needs) if lack is not None), None)  # type: ignore[arg-type]

    def hand_in(self, course: Course, folder: Path) -> Path:
        """Write it into this folder, with the files that a learner has beside it. Returns what to grade."""
        group = self.exercise.rpartition("/")[0]
        if group and (course.solutions / group / TICKET).is_file():
            shutil.copyfile(course.solutions / group / TICKET, folder / TICKET)
        if self.script:
            shutil.copyfile(course.solutions / f"{self.exercise}.py", folder / f"{leaf(self.exercise)}.py")
            (folder / f"{leaf(self.exercise)}{SCRIPT}").write_text(self.text, encoding="utf-8")
            return folder
        file = folder / f"{self.name}.py"
        file.write_text(self.text, encoding="utf-8")
        return file


def entries(root: Path) -> list[Entry]:
    """All submissions of the bank, the wrong ones first. Raises BankError, which names every broken entry."""
    exam = read(root)
    if exam.problems:
        raise BankError("\n".join(problem.text for problem in exam.problems))
    return exam.entries


@dataclass(frozen=True)
class Problem:
    """Why an entry, or, without a `label`, all of an exercise's, cannot be read."""

    exercise: str
    text: str
    label: str | None = None


@dataclass
class Exam:
    """The bank as far as it can be read, and why the rest cannot."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read(root: Path) -> Exam:
    """The bank of the course at `root`, the wrong submissions first."""
    exam = Exam()
    top = root / FOLDER / "wrong"
    for file in sorted(top.rglob("*.toml")):
        own = WrongSubmissions(root, file.relative_to(top).with_suffix("").as_posix()).read()
        exam.entries += own.entries
        exam.problems += own.problems
    exam.entries += _right_ones(root)
    return exam


def find(root: Path, label: str) -> Entry | None:
    """The wrong submission of this label; None where there is none. Raises BankError when it is broken."""
    exam = WrongSubmissions(root, label.rpartition("/")[0]).read()
    for problem in exam.problems:
        if problem.label in (label, None):
            raise BankError(problem.text)
    return next((entry for entry in exam.entries if entry.label == label), None)


def split_head(text: str) -> tuple[dict[str, str], str]:
    """What the comment lines at the top of a file say, by their keys, and the file without them."""
    lines = text.splitlines(keepends=True)
    start = end = 1 if text.startswith("#!") else 0
    said = {}
    while end < len(lines) and (line := HEAD.fullmatch(lines[end].rstrip("\n"))):
        said[line[1]] = line[2].strip()
        end += 1
    return said, "".join(lines[:start] + lines[end:])


def _right_ones(root: Path) -> Iterator[Entry]:
    top = root / FOLDER / "right"
    for path in sorted([*top.rglob("*.py"), *top.rglob(f"*{SCRIPT}")]):
        exercise = path.parent.relative_to(top).as_posix()
        yield Entry(exercise, path.stem, path.suffix == SCRIPT, path.read_text(encoding="utf-8"), path)


# Wrong ones ----------------------------------------------------------------------------------------------------------


Said = Annotated[str, msgspec.Meta(pattern=r"\S")]


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    """An entry as the file has it."""

    diagnosis: Said
    why: Said
    change: Said
    check: str = ""
    also: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    base: str = ""


@dataclass
class WrongSubmissions:
    """The wrong submissions of one exercise, and what they are changes of."""

    root: Path
    exercise: str
    _bases: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Where they are written down."""
        return self.root / FOLDER / "wrong" / f"{self.exercise}.toml"

    def read(self) -> Exam:
        """All of them, in the file's order; none where there is no file."""
        exam = Exam()
        if not self.file.is_file():
            return exam
        try:
            raw = parse(self.file.read_text(encoding="utf-8"))
        except BankError as error:
            text = f"{self.file.relative_to(self.root).as_posix()} {error}"
            return Exam(problems=[Problem(self.exercise, text)])
        for key, item in raw.items():
            if key == "base":
                continue
            label = f"{self.exercise}/{key}"
            try:
                exam.entries.append(self._entry(key, item, raw.get("base", SOLUTION)))
            except BankError as error:
                exam.problems.append(Problem(self.exercise, f"{label}: {error}", label))
        return exam

    def base(self, name: str, suffix: str) -> str:
        """The text of a base, without the head that says its style. Raises BankError when there is no such base."""
        if name + suffix not in self._bases:
            self._bases[name + suffix] = self._base(name, suffix)
        return self._bases[name + suffix]

    def bases(self, suffix: str) -> list[str]:
        """The names of all bases for files with this suffix."""
        right = sorted((self.root / FOLDER / "right" / self.exercise).glob(f"*{suffix}"))
        own = [SOLUTION, STUB] if self._solution(suffix).is_file() else []
        return [*own, *(path.stem for path in right)]

    def _solution(self, suffix: str) -> Path:
        return self.root / "solutions" / f"{self.exercise}{suffix}"

    def _base(self, name: str, suffix: str) -> str:
        solution = self._solution(suffix)
        file = self.root / FOLDER / "right" / self.exercise / f"{name}{suffix}"
        try:
            if name == SOLUTION:
                return without_markers(solution.read_text(encoding="utf-8"))
            if name == STUB:
                stub_name = solution.name if suffix == SCRIPT else self.exercise
                return make_stub(solution.read_text(encoding="utf-8"), stub_name)
            return split_head(file.read_text(encoding="utf-8"))[1]
        except FileNotFoundError:
            known = ", ".join(self.bases(suffix)) or "none yet"
            raise BankError(f"there is no base {name!r}. There are: {known}") from None
        except MarkerError as error:
            raise BankError(f"no stub can be made of the solution: {error}") from None

    def _entry(self, key: str, item: object, default: str) -> Entry:
        if not isinstance(item, dict):
            raise BankError('an entry is a table; the only other key is base = "…", above all entries')
        try:
            told = msgspec.convert(item, _Written)
        except msgspec.ValidationError as error:
            raise BankError(str(error)) from None
        suffix = SCRIPT if key.endswith(SCRIPT) else ".py"
        base = told.base or default
        text = self.base(base, suffix)
        try:
            changed = patch.apply(told.change, text)
        except patch.PatchError as error:
            raise BankError(f"{error}\n  The base is {base!r}.") from None
        mistake = Mistake(told.diagnosis, told.why, told.check, told.also, told.needs)
        name = key.removesuffix(SCRIPT)
        return Entry(self.exercise, name, suffix == SCRIPT, with_head(mistake.head, changed), self.file, mistake)


def parse(text: str) -> dict[str, Any]:
    """The entries of a TOML file, and its base. Raises BankError."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        return raw
    except tomllib.TOMLDecodeError as error:
        raise BankError(f"cannot be read: {error}") from None


def with_head(head: str, text: str) -> str:
    """A file that begins with these comment lines, below `#!` where there is one."""
    lines = text.splitlines(keepends=True)
    start = 1 if text.startswith("#!") else 0
    return "".join([*lines[:start], head, *lines[start:]])


# Exam ----------------------------------------------------------------------------------------------------------------


def wanted(exercise: str) -> tuple[int, int]:
    """How many wrong and how many right submissions this exercise needs, and how many scripts where it has one."""
    return IN_A_GROUP if "/" in exercise else WRONG_AND_RIGHT


def shortfall(report: Report, without_script: bool = False) -> CheckResult | None:
    """The first check that did not pass, though it could have: None for one that is right as far as this machine can
    tell.

    A check could not where it needs SLURM or hosts and there are none, where it needs such a check, or, for what is
    handed in `without_script`, where it needs a batch script.
    """
    absent = [str(lack) for lack in (cluster.available("slurm"), cluster.available("hosts")) if lack is not None]
    for result in report.exercises:
        excused = (*absent, *([f"there is no {leaf(result.name)}{SCRIPT}"] if without_script else ()))
        held_back = set()
        for check in result.checks:
            if check.outcome is CheckOutcome.NOT_RUN and (
                check.reason.startswith(excused) or check.reason[7:-1] in held_back  # needs “…”
            ):
                held_back.add(check.name)
            elif check.outcome is not CheckOutcome.PASSED:
                return check
    return None
