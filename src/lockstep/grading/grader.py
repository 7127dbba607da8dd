"""What a check works with: run the submission on ranks, look at what they observed, conclude."""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from .. import ranks
from ..ranks import text
from .course import Course, leaf
from .isolation import Tier
from .submission import Submission
from .verdict import Diagnosis

DEADLINE_SECONDS = 90.0
CPU_SECONDS = 8.0
IDLE_SECONDS = 6.0
MEMORY_BYTES = 3 << 30
OUTPUT_BYTES = 1 << 20
PROCESSES = 150
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
        **kwargs: Any,
    ) -> ranks.Run:
        """Play a scenario on so many ranks and return the run, which ended well.

        A run that did not is a failed check, diagnosed from its cause. The same scenario with the same arguments runs
        once: a second check that needs a run which failed is *not run*, so that one mistake is told once.
        """
        key = repr((scenario, world_size, launcher, nodes, network, environment, sorted(kwargs.items(), key=str)))
        known = self._played.get(key)
        if isinstance(known, Diagnosis):
            raise NotRun("needs a run that failed above")
        if known is not None:
            return known
        result = self.attempt(
            scenario, world_size, launcher=launcher, nodes=nodes, network=network, environment=environment, **kwargs
        )
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
        **kwargs: Any,
    ) -> ranks.Run:
        """Play a scenario and return the run, however it ended.

        `network` is where the ranks stand, such as `cluster.slow_link("1gbit")`; raises NotRun where this machine
        cannot make it.
        """
        if self._endless:
            raise NotRun("the submission came to no end above")
        target = ranks.Function("lockstep.grading.on_rank", "play", {
            "scenario_file": str(self._stage), "scenario": scenario, "submission": str(self.submission.file),
            "kwargs": kwargs,
        })  # fmt: skip
        try:
            result = ranks.run(
                target, world_size, device=self.device, launcher=launcher, nodes=nodes, network=network,
                deadline=DEADLINE_SECONDS, cpu_limit=CPU_SECONDS, idle_limit=IDLE_SECONDS, memory_limit=MEMORY_BYTES,
                output_limit=OUTPUT_BYTES, own_directory=True, process_limit=PROCESSES, hidden=[self._stage.parent],
                environment=self._environment(environment), on_interrupt="raise",
            )  # fmt: skip
        except ranks.NotRun as missing:
            raise NotRun(str(missing)) from None
        self.output += _printed(result)
        self._endless = result.cause is not None and result.cause.kind in ENDLESS
        return result

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
        self, id: str, message: str, *, evidence: str = "", of: Iterable[int] = (), at: ranks.Frame | str | None = None
    ) -> NoReturn:
        """Conclude that the check failed. `at` is a frame, or patterns to look for in the submission (see `line`)."""
        raise Failed(self.diagnosis(id, message, evidence=evidence, of=of, at=at))

    def diagnosis(
        self, id: str, message: str, *, evidence: str = "", of: Iterable[int] = (), at: ranks.Frame | str | None = None
    ) -> Diagnosis:
        """A diagnosis of the catalogue with what was seen. Raises KeyError for an id that is not in it."""
        entry = self.course.catalogue[id]
        line = self.line(at) if isinstance(at, str) else self._own_line(at)
        source = self.submission.text.splitlines()[line - 1].strip() if line else ""
        return Diagnosis(
            id,
            self.submission.to_original(message),
            self.submission.to_original(evidence),
            tuple(sorted(of)),
            self.submission.shown,
            line,
            entry.read,
            entry.why,
            source,
        )

    def line(self, patterns: str) -> int | None:
        """The first line of the submission that matches; several patterns, tried in order, are separated by ` || `."""
        lines = self.submission.text.splitlines()
        prose = _docstring_lines(self.submission.text)
        for pattern in patterns.split(" || "):
            for number, line in enumerate(lines, 1):
                if number not in prose and re.search(pattern, line.split("#")[0]):
                    return number
        return None

    def _own_line(self, frame: ranks.Frame | None) -> int | None:
        return frame.line if frame is not None and frame.file == str(self.submission.file) else None

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
            id, message = self._read_error(cause.error, message)
        return self.diagnosis(id, message, evidence=evidence, of=cause.ranks, at=frame)

    def _read_error(self, error: ranks.Error, message: str) -> tuple[str, str]:
        name = self.submission.name
        if error.type == "NotImplementedError":
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


_GENERAL = {
    "hang": "hang",
    "mismatch": "mismatched-collectives",
    "exited": "exited-early",
    "crashed": "crashed",
    "timed out": "timed-out",
    "out of memory": "out-of-memory",
    "too much output": "too-much-output",
    "too many processes": "too-many-processes",
}

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
              "OMP_NUM_THREADS", "VIRTUAL_ENV", "SYSTEMROOT", "TORCH_SHOW_CPP_STACKTRACES")  # fmt: skip


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
            lines += [f"[rank {report.rank}] {line}" for line in stream.splitlines()]
    return "\n".join(lines[:400]) + ("\n" if lines else "")
