"""What a check works with: run the submission on ranks, look at what they observed, conclude."""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import ranks
from ..ranks import text
from ..ranks.words import names, one_or_more
from .course import Course, leaf
from .isolation import Tier
from .submission import Submission
from .text import cut, harmless
from .verdict import Diagnosis

DEADLINE_SECONDS = 90.0
CPU_SECONDS = 8.0
IDLE_SECONDS = 6.0
MEMORY_BYTES = 3 << 30
OUTPUT_BYTES = 1 << 20
PROCESSES = 150
MAX_MESSAGE, MAX_EVIDENCE, MAX_LINE = 20_000, 60_000, 2_000
ENDLESS = ("timed out", "too much output", "too many processes", "out of memory")
"""Ends that cost so much time or memory that nobody should wait for them twice."""

Reader = Callable[[ranks.Run], Diagnosis | None]


class Failed(Exception):
    """A check's conclusion: the submission does not do what was asked."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.message)
        self.diagnosis = diagnosis


class NotRun(Exception):
    """A check could not be tried; the message says why."""


class Lacking(NotRun):
    """This machine, or the place where it grades, lacks what the check needs: nobody's mistake, and it costs no point."""


class Grader:
    """One exercise's submission under test."""

    def __init__(
        self, course: Course, submission: Submission, scratch: Path, seed: int, device: str, tier: Tier | None = None
    ) -> None:
        self.course = course
        self.submission = submission
        self.scratch = scratch
        self.seed = seed
        self.device = device
        self.tier = tier
        self.output = ""
        self._played: dict[str, ranks.Run | Diagnosis] = {}
        self._told: set[tuple[str, int | None]] = set()
        self._endless = False
        self._readers: list[Reader] = []
        self._stage = self._set_stage()

    # Running ---------------------------------------------------------------------------------------------------

    def run(
        self,
        scenario: str,
        world_size: int = 4,
        *,
        launcher: bool = False,
        nodes: int = 1,
        network: ranks.Function | None = None,
        environment: dict[str, str] | None = None,
        each: Sequence[dict[str, Any]] = (),
        **kwargs: Any,
    ) -> ranks.Run:
        """Play a scenario on so many ranks and return the run, which ended well.

        The scenario is given `kwargs`, and `each[rank]` on that rank alone: what must cross between ranks to be known on
        all of them. A run that did not end well is a failed check, diagnosed from its cause. The same scenario with the same arguments runs
        once: a second check that needs a run which failed is *not run*, so that one mistake is told once.
        """
        given = (sorted(kwargs.items(), key=str), each)
        key = repr((scenario, world_size, launcher, nodes, network, environment, given))
        known = self._played.get(key)
        if isinstance(known, Diagnosis):
            raise NotRun("needs a run that failed above")
        if known is not None:
            return known
        result = self.attempt(
            scenario, world_size, launcher=launcher, nodes=nodes, network=network, environment=environment, each=each,
            **kwargs,
        )  # fmt: skip
        if result.cause is not None:
            diagnosis = self.diagnose(result)
            self._played[key] = diagnosis
            if (diagnosis.id, diagnosis.line) in self._told:
                raise NotRun("fails in the same place as above")
            self._told.add((diagnosis.id, diagnosis.line))
            raise Failed(diagnosis)
        self._played[key] = result
        return result

    def attempt(
        self,
        scenario: str,
        world_size: int = 4,
        *,
        launcher: bool = False,
        nodes: int = 1,
        network: ranks.Function | None = None,
        environment: dict[str, str] | None = None,
        each: Sequence[dict[str, Any]] = (),
        **kwargs: Any,
    ) -> ranks.Run:
        """Play a scenario and return the run, however it ended.

        `network` is where the ranks stand, such as `cluster.slow_link("1gbit")`; raises NotRun where this machine
        cannot make it.
        """
        if self._endless:
            raise NotRun("the submission came to no end above")
        given = {"scenario_file": str(self._stage), "scenario": scenario, "submission": str(self.submission.file)}
        target = ranks.Function(
            "lockstep.grading.on_rank", "play", given | {"kwargs": kwargs},
            tuple({"kwargs": kwargs | own} for own in each),
        )  # fmt: skip
        try:
            result = self._carry_out(
                target, world_size, device=self.device, launcher=launcher, nodes=nodes, network=network,
                deadline=DEADLINE_SECONDS, cpu_limit=CPU_SECONDS, idle_limit=IDLE_SECONDS, memory_limit=MEMORY_BYTES,
                output_limit=OUTPUT_BYTES, own_directory=True, process_limit=PROCESSES, hidden=[self._stage.parent],
                environment=self._environment(environment), on_interrupt="raise",
            )  # fmt: skip
        except ranks.NotRun as missing:
            raise Lacking(str(missing)) from None
        self.output += _printed(result)
        self._endless = result.cause is not None and result.cause.kind in ENDLESS
        return result

    def require(self, run: ranks.Run) -> ranks.Run:
        """The same run, which ended well; one that did not is a failed check, diagnosed from its cause."""
        if run.cause is not None:
            raise Failed(self.diagnose(run))
        return run

    def _carry_out(self, target: ranks.Function, world_size: int, **options: Any) -> ranks.Run:
        """Run it. A run that breaks twice, where one without the submission does not, was broken from within."""
        for last in (False, True):
            try:
                return ranks.run(target, world_size, sources=[str(self.submission.folder)], **options)
            except ranks.RanksError as broken:
                if not _can_run():
                    raise
                said = f"Twice the process that watches the ranks was ended from within the run ({broken})."
                if last:
                    self._endless = True
                    raise Failed(self.diagnosis("broke-the-run", said)) from None
        raise AssertionError("unreachable")

    def _set_stage(self) -> Path:
        """The scenario under a module name of its own, importable by processes that the submission starts."""
        stage = self.scratch / f"{self._label}-stage"
        stage.mkdir(parents=True, exist_ok=True)
        copy = stage / f"scenario_{leaf(self.submission.name)}.py"
        shutil.copyfile(self.course.scenario(self.submission.name), copy)
        return copy

    def _environment(self, extra: dict[str, str] | None) -> dict[str, str]:
        """An allow-list: that of the tier where there is one."""
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        known = self.tier.environment() if self.tier is not None and self.tier.keeps_apart else passed_on
        return known | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"} | (extra or {})

    @property
    def _label(self) -> str:
        return self.submission.name.replace("/", "-")

    def random(self, name: str) -> random.Random:
        """Random numbers for one purpose, the same for the same seed."""
        return random.Random(zlib.crc32(f"{self.seed}/{name}".encode()))

    # Concluding ------------------------------------------------------------------------------------------------

    def fail(
        self,
        id: str,
        message: str,
        *,
        evidence: str = "",
        of: Iterable[int] = (),
        at: ranks.Frame | str | None = None,
        script: bool = False,
    ) -> NoReturn:
        """Conclude that the check failed. `at` is a frame, or patterns to look for in the submission (see `line`), or with
        `script` in its batch script.
        """
        raise Failed(self.diagnosis(id, message, evidence=evidence, of=of, at=at, script=script))

    def diagnosis(
        self,
        id: str,
        message: str,
        *,
        evidence: str = "",
        of: Iterable[int] = (),
        at: ranks.Frame | str | None = None,
        script: bool = False,
    ) -> Diagnosis:
        """A diagnosis of the catalogue with what was seen. Raises KeyError for an id that is not in it."""
        entry = self.course.catalogue[id]
        file = (self.submission.script if script else None) or self.submission
        line = _find_line(file.text, at) if isinstance(at, str) else self._own_line(at)
        lines = file.text.splitlines()
        source = lines[line - 1].strip() if line and line <= len(lines) else ""
        return Diagnosis(
            id,
            _shown(file, message, MAX_MESSAGE),
            _shown(file, evidence, MAX_EVIDENCE),
            tuple(sorted(of)),
            file.shown,
            line,
            entry.read,
            entry.why,
            source,
        )

    def line(self, patterns: str) -> int | None:
        """The first line of the submission that matches; several patterns, tried in order, are separated by ` || `."""
        return _find_line(self.submission.text, patterns)

    def _own_line(self, frame: ranks.Frame | None) -> int | None:
        return frame.line if frame is not None and frame.file == str(self.submission.file) else None

    def unreadable(self, error: BaseException) -> Diagnosis:
        """The diagnosis for reports of the ranks on which a check breaks."""
        said = f"{type(error).__name__}: {cut(str(error), 300)}"
        return self.diagnosis(
            "unreadable", f"What the ranks reported is not what the check's own code on them reports ({said})."
        )

    def reads(self, reader: Reader) -> None:
        """Register an exercise's own reading of runs that failed; the first that returns a diagnosis is taken."""
        self._readers.append(reader)

    def diagnose(self, run: ranks.Run) -> Diagnosis:
        """From a run that ended badly to a diagnosis: the exercise's own reading first, then the general one."""
        for reader in self._readers:
            found = reader(run)
            if found is not None:
                return found
        return self._general(run)

    def _general(self, run: ranks.Run) -> Diagnosis:
        cause = run.cause
        assert cause is not None
        frame = _innermost(cause, str(self.submission.file))
        evidence = text.evidence(run)
        message = self.submission.to_original(cause.headline)
        message = message[0].upper() + message[1:]
        id = _GENERAL.get(cause.kind, "raised")
        if cause.error is not None and cause.kind == "raised":
            if cause.error.type == "GroupOnImport":
                message = (
                    f"Importing {self.submission.shown} joined a process group: this runs outside of any function."
                )
                return self.diagnosis("group-on-import", message, of=cause.ranks, at=_JOINS_OUTSIDE)
            id, message = self._read_error(cause.error, message)
        return self.diagnosis(id, _left_behind(cause) or message, evidence=evidence, of=cause.ranks, at=frame)

    def _read_error(self, error: ranks.Error, message: str) -> tuple[str, str]:
        name = self.submission.name
        stubs = (f"{name}: ", f"{leaf(name)}: ")  # how a stub's message begins; torch raises NotImplementedError too
        if error.type == "NotImplementedError" and (not error.message or error.message.startswith(stubs)):
            return "not-implemented", f"{name} is still the stub: {error.message or 'not written yet'}"
        if error.type in ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"):
            return "import-error", f"{self.submission.shown} cannot be imported: {error}"
        missing = re.search(r"module '\w+' has no attribute '(\w+)'", error.message)
        if missing and not error.frames:
            return "import-error", f"{self.submission.shown} does not define {missing.group(1)}"
        signature = re.search(r"^(\w+)\(\) (missing|takes|got)", error.message)
        if error.type == "TypeError" and signature and not error.frames:
            return "wrong-signature", f"{error.message}: keep the stub's signature"
        return "raised", message


def _left_behind(cause: ranks.Cause) -> str:
    """What a hang's first line says when some ranks wait in the submission, and all others have come out of it: the
    collective in which these wait is the check's own, and means nothing to a learner. Empty for any other end.
    """
    inside = [row for row in cause.rows if row.differs]
    out = [row for row in cause.rows if not row.differs]
    if (
        cause.kind != "hang"
        or not inside
        or not out
        or any(row.frame for row in out)
        or not all(r.frame for r in inside)
    ):
        return ""
    first = inside[0]
    return (
        f"{names(row.rank for row in inside).capitalize()} {one_or_more(inside, 'waits', 'wait')} in {first.what}, where "
        f"nobody else comes: {names(row.rank for row in out)} {one_or_more(out, 'has', 'have')} left your code."
    )


_GENERAL = {
    "hang": "hang",
    "mismatch": "mismatched-collectives",
    "exited": "exited-early",
    "crashed": "crashed",
    "timed out": "timed-out",
    "out of memory": "out-of-memory",
    "too much output": "too-much-output",
    "interrupted": "broke-the-run",  # by a signal of its own: who interrupts a grading ends it
    "too many processes": "too-many-processes",
}

_JOINS_OUTSIDE = r"^(?!def |from |import )\S.*\b(init_process_group|setup_ddp)\( || \binit_process_group\("

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
              "OMP_NUM_THREADS", "VIRTUAL_ENV", "SYSTEMROOT", "TORCH_SHOW_CPP_STACKTRACES")  # fmt: skip


def _can_run() -> bool:
    """Whether a run of nobody's code ends well on this machine now."""
    try:
        return ranks.run(ranks.Source("pass"), 1, own_directory=True).ok
    except (ranks.RanksError, OSError):
        return False


def _shown(file: Submission, text: str, most: int) -> str:
    """What a submission said, as far as it goes into a report: its own path, nothing that acts on a terminal."""
    return cut(harmless(file.to_original(text)), most)


def _find_line(source: str, patterns: str) -> int | None:
    prose = _docstring_lines(source)
    for pattern in patterns.split(" || "):
        for number, line in enumerate(source.splitlines(), 1):
            code = line if line.startswith("#SBATCH") else line.split("#")[0]
            if number not in prose and re.search(pattern, code):
                return number
    return None


def _docstring_lines(source: str) -> set[int]:
    """The lines of all docstrings: they speak of what the code does not do."""
    found: set[int] = set()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _innermost(cause: ranks.Cause, file: str) -> ranks.Frame | None:
    """The innermost frame that lies in the submission itself."""
    raised = list(reversed(cause.error.frames)) if cause.error else []
    others = [cause.frame, *(row.frame for row in cause.rows)]
    return next((frame for frame in (*raised, *others) if frame is not None and frame.file == file), None)


def _printed(run: ranks.Run) -> str:
    lines = []
    for report in run.ranks:
        for stream in (report.stdout, report.stderr):
            lines += [f"[rank {report.rank}] {cut(harmless(line), MAX_LINE)}" for line in stream.splitlines()]
    return "\n".join(lines[:400]) + ("\n" if lines else "")
