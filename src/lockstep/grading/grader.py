"""What a check works with: run the submission on ranks, look at what they observed, conclude."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import ranks
from ..course import Course, leaf
from ..ranks.channel import encode
from ..ranks.crossed import over_a_set
from ..ranks.text import Evidence
from ..ranks.words import names
from . import diagnose
from .hypotheses import ROUNDING, Each, Hypothesis, Predicted, Tolerance, difference, fitting, on_ranks, wrong_ranks
from .isolation import Tier
from .submission import Submission
from .text import cut, harmless
from .verdict import Diagnosis

DEADLINE_SECONDS = 90.0
CPU_SECONDS = 8.0
IDLE_SECONDS = 6.0
MEMORY_BYTES = 3 << 30
OUTPUT_BYTES = 1 << 20
REPORT_BYTES = 32 << 20  # The judge keeps what the ranks of all runs report; right submissions report less than 1 MB
PROCESSES = 150
MAX_MESSAGE, MAX_EVIDENCE, MAX_LINE, MAX_LINES = 20_000, 60_000, 2_000, 400
ENDLESS = (ranks.Kind.TIMED_OUT, ranks.Kind.TOO_MUCH_OUTPUT, ranks.Kind.TOO_MANY_PROCESSES, ranks.Kind.OUT_OF_MEMORY)
"""Ends that cost so much time or memory that nobody should wait for them twice."""
PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
    "OMP_NUM_THREADS", "VIRTUAL_ENV", "SYSTEMROOT", "TORCH_SHOW_CPP_STACKTRACES",
)  # fmt: skip

Reader = Callable[["Grader", ranks.Run, ranks.Cause], Diagnosis | None]
"""An exercise's own reading of a run that failed of this cause; None leaves it to the general one."""


class Failed(Exception):
    """A check's conclusion: the submission does not do what was asked."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.message)
        self.diagnosis = diagnosis


class CheckNotRun(Exception):
    """A check could not be tried; the message says why."""


class Lacking(CheckNotRun):
    """This machine, or the place where it grades, lacks what the check needs: nobody's mistake, and no point lost."""


Spoiled = Callable[[ranks.Run], bool]
"""Whether something else than the submission decided how a run ended."""


@dataclass(frozen=True)
class Play:
    """A scenario and how it is played: what `Grader.run` and `Grader.attempt` take. See `of`."""

    scenario: str
    world_size: int
    launcher: bool
    nodes: int
    network: ranks.Function | None
    environment: dict[str, str]
    each: tuple[dict[str, Any], ...]
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        scenario: str,
        world_size: int = 4,
        *,
        launcher: bool = False,
        nodes: int = 1,
        network: ranks.Function | None = None,
        environment: dict[str, str] | None = None,
        each: Sequence[dict[str, Any]] = (),
        **arguments: Any,
    ) -> Play:
        """`scenario` is a function of `autograder/scenarios/NAME.py`. It is called with the submission's module and
        `arguments` on each of `world_size` ranks, spread over `nodes`.

        `each[rank]` are further arguments, for that rank alone: what has to cross between the ranks before all of them
        know it. With `launcher` one process is started, which starts the ranks itself. `network` has the ranks stand in
        a network made for them, such as `cluster.slow_link("1gbit")`. `environment` is added to the ranks' own.
        """
        ordered = dict(sorted(arguments.items()))
        return cls(scenario, world_size, launcher, nodes, network, environment or {}, tuple(each), ordered)

    @functools.cached_property
    def key(self) -> str:
        """The same for the same play, and for no other: of a tensor every bit counts."""
        trees, blobs = zip(*(encode(given) for given in (self.arguments, *self.each)), strict=True)
        how = (self.scenario, self.world_size, self.launcher, self.nodes, self.network, self.environment, trees)
        return hashlib.sha256(repr(how).encode() + b"".join(blobs)).hexdigest()


@dataclass(eq=False)
class Grader:
    """One exercise's submission under test."""

    course: Course
    submission: Submission
    scratch: Path
    seed: int
    device: str
    tier: Tier | None = None
    reader: Reader | None = None
    own_gpus: bool = False
    """A GPU can't be shared in this exercise. Where there are fewer than ranks, the ranks take the CPU."""
    output: str = ""
    _played: dict[str, ranks.Run] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    _ahead: dict[str, Future[ranks.Run]] = field(default_factory=dict)
    _told: set[tuple[str, int | None]] = field(default_factory=set)
    _endless: bool = False

    def __post_init__(self) -> None:
        """Copy the scenario under a module name of its own, importable by processes that the submission starts.

        What was handed in is read now: where it isn't in a sandbox, a rank may put a pipe in its place.
        """
        for file in filter(None, (self.submission, self.submission.script)):
            file.text  # noqa: B018
        stage = self.scratch / f"{self.submission.name.replace('/', '-')}-stage"
        stage.mkdir(parents=True, exist_ok=True)
        self._stage = stage / f"scenario_{leaf(self.submission.name)}.py"
        shutil.copyfile(self.course.scenario(self.submission.name), self._stage)

    # Running ---------------------------------------------------------------------------------------------------

    def run(self, scenario: str, world_size: int = 4, *, spoiled: Spoiled | None = None, **how: Any) -> ranks.Run:
        """Play a scenario (`Play.of` explains `how`, `attempt` `spoiled`) and return the run, which ended well.

        A run that did not is a failed check, diagnosed from its cause. A second check that needs a run which failed is
        *not run*, so that one mistake is told once.
        """
        play = Play.of(scenario, world_size, **how)
        if play.key in self._failed:
            raise CheckNotRun("needs a run that failed above")
        result = self._attempt(play, spoiled)
        diagnosis = self.diagnose(result) if result.cause is not None else self._over_a_set(result)
        if diagnosis is None:
            return result
        self._failed.add(play.key)
        if (diagnosis.id, diagnosis.line) in self._told:
            raise CheckNotRun("fails in the same place as above")
        self._told.add((diagnosis.id, diagnosis.line))
        raise Failed(diagnosis)

    def attempt(self, scenario: str, world_size: int = 4, *, spoiled: Spoiled | None = None, **how: Any) -> ranks.Run:
        """Play a scenario (`Play.of` explains `how`) and return the run, however it ended.

        The same scenario with the same arguments runs once, and once more if the run is `spoiled`: something else than
        the submission decided how it ended. Raises Lacking when this machine cannot make the network.
        """
        return self._attempt(Play.of(scenario, world_size, **how), spoiled)

    def play_ahead(self, plays: Iterable[Play]) -> None:
        """Play these at the same time, as they wait more than they work; `run` and `attempt` take what came out."""
        new = [play for play in plays if play.key not in self._played and play.key not in self._ahead]
        if new and not self._endless:
            with ThreadPoolExecutor(len(new)) as threads:
                self._ahead |= {play.key: threads.submit(self._carry_out, play) for play in new}

    def require(self, run: ranks.Run) -> ranks.Run:
        """The same run, which ended well; one that did not is a failed check, diagnosed from its cause."""
        diagnosis = self.diagnose(run) if run.cause is not None else self._over_a_set(run)
        if diagnosis is not None:
            raise Failed(diagnosis)
        return run

    def random(self, name: str) -> random.Random:
        """Random numbers for one purpose, the same for the same seed."""
        return random.Random(zlib.crc32(f"{self.seed}/{name}".encode()))

    def generator(self, name: str) -> torch.Generator:
        """The same for tensors."""
        return torch.Generator().manual_seed(self.random(name).randrange(1 << 30))

    def _attempt(self, play: Play, spoiled: Spoiled | None = None) -> ranks.Run:
        if play.key in self._played:
            return self._played[play.key]
        if self._endless:
            raise CheckNotRun("the submission came to no end above")
        try:
            played = self._ahead.pop(play.key, None)
            result = played.result() if played is not None else self._carry_out(play)
            if spoiled is not None and spoiled(result):
                result = self._carry_out(play)
        except ranks.NotRun as missing:
            raise Lacking(str(missing)) from None
        self.output += _printed(result)
        self._endless = result.cause is not None and result.cause.kind in ENDLESS
        if not self._endless:
            self._played[play.key] = result
        return result

    def _carry_out(self, play: Play) -> ranks.Run:
        """Run it. A run that breaks twice, though one without the submission works, was broken from within."""
        given = {
            "scenario_file": str(self._stage), "scenario": play.scenario, "submission": str(self.submission.file),
            "kwargs": play.arguments,
        }  # fmt: skip
        each = tuple({"kwargs": play.arguments | own} for own in play.each)
        target = ranks.Function("lockstep.grading.on_rank", "play", given, each)
        for last in (False, True):
            # Another at the second try: what the first has given out may have been kept somewhere.
            secret = hashlib.sha256(f"{self.seed}/{self.submission.name}/{play.key}/{last}".encode()).hexdigest()
            warm = ranks.client.warm_process()
            try:
                return ranks.run(
                    target, play.world_size, device=self._device(play), launcher=play.launcher, nodes=play.nodes,
                    network=play.network, deadline=DEADLINE_SECONDS, cpu_limit=CPU_SECONDS, idle_limit=IDLE_SECONDS,
                    memory_limit=MEMORY_BYTES, output_limit=OUTPUT_BYTES, report_limit=REPORT_BYTES,
                    own_directory=True, process_limit=PROCESSES,
                    hidden=[self._stage.parent], environment=self._environment() | play.environment,
                    on_interrupt="raise", sources=[str(self.submission.folder)],
                    count_bytes=True, secret=secret,
                )  # fmt: skip
            except ranks.RanksError as broken:
                ranks.client.renew(warm)  # an earlier run may have made its sandbox useless
                if not _can_run():
                    raise
                said = f"Twice the process that watches the ranks was ended from within the run ({broken})."
                if last:
                    self._endless = True
                    raise Failed(self.diagnosis("broke-the-run", said)) from None
        raise AssertionError("unreachable")

    def _device(self, play: Play) -> str:
        crowded = self.device == "cuda" and self.own_gpus and torch.cuda.device_count() < play.world_size
        return "cpu" if crowded else self.device

    def _environment(self) -> dict[str, str]:
        """An allow-list: the tier's, if there is one."""
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        known = self.tier.environment() if self.tier is not None and self.tier.keeps_apart else passed_on
        return known | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}

    # Concluding ------------------------------------------------------------------------------------------------

    def fail(self, id: str, message: str, **seen: Any) -> NoReturn:
        """Conclude that the check failed, with this diagnosis: `diagnosis` explains `seen`."""
        raise Failed(self.diagnosis(id, message, **seen))

    def fail_on(self, bad: Iterable[int], id: str, message: str, **seen: Any) -> None:
        """Conclude that the check failed if there are any `bad` ranks. `{ranks}` in the message becomes their names."""
        if of := sorted(bad):
            self.fail(id, message.replace("{ranks}", names(of)), of=of, **seen)

    def explain(
        self,
        what: str,
        seen: Sequence[Any],
        right: Predicted,
        hypotheses: Iterable[Hypothesis] = (),
        *,
        otherwise: str,
        at: str = "",
        tolerance: Tolerance = ROUNDING,
    ) -> None:
        """Conclude from what each rank saw, `seen[rank]`; return if it is right on all of them.

        The message says `what` ("The gradient"), the first wrong rank with both values, and the sentence of the first
        hypothesis that predicts what all wrong ranks saw. `otherwise` is the id if none does, `at` the line of those
        hypotheses that name none. `right` is for every rank, or `Each`.
        """
        values = on_ranks(right, len(seen))
        wrong = wrong_ranks(seen, Each(values), tolerance)
        if not wrong:
            return
        first = wrong[0]
        where = difference(seen[first], values[first])
        others = f" (wrong on {names(wrong)})" if len(wrong) > 1 else ""
        found = fitting(seen, hypotheses, tolerance, wrong) or Hypothesis(otherwise, "", None)
        message = f"{what} on rank {first} is {where}{others}. {found.says}".rstrip()
        self.fail(found.id, message, of=wrong, at=found.at or at or None)

    def read_error(
        self, run: ranks.Run, known: Iterable[tuple[str, str, ranks.Frame | str | None]]
    ) -> Diagnosis | None:
        """What a failed run's error means: the first of `known` with words of the message, an id, and where to look.

        Case doesn't matter. The line that raised it, if it is the submission's, comes before `where to look`.
        """
        cause = run.cause
        if cause is None or cause.error is None:
            return None
        for words, id, at in known:
            if words.lower() in cause.error.message.lower():
                told = f"{names(cause.ranks).capitalize()} raised {cause.error}"
                return self.diagnosis(id, told, of=cause.ranks, at=cause.error.frame or at)
        return None

    def diagnosis(
        self,
        id: str,
        message: str,
        *,
        evidence: Evidence | str = "",
        of: Iterable[int] = (),
        at: ranks.Frame | str | None = None,
        script: bool = False,
    ) -> Diagnosis:
        """A diagnosis of the catalogue with what was seen, on the ranks `of`.

        `at` is a frame, or patterns to look for in the submission (`Submission.line`), with `script` in its batch
        script. Raises KeyError for an id that is not in the catalogue.
        """
        entry = self.course.catalogue[id]
        file = (self.submission.script if script else None) or self.submission
        if isinstance(at, str):
            line = file.line(at)
        else:
            line = at.line if at is not None and at.file == str(self.submission.file) else None
        proof = Evidence(text=evidence) if isinstance(evidence, str) else evidence
        proof = replace(proof, code=file.own(proof.code)).mapped(
            lambda text: file.reported(text, MAX_EVIDENCE), lambda cell: file.reported(cell, MAX_LINE)
        )
        return Diagnosis(
            id,
            file.reported(message, MAX_MESSAGE),
            proof.text,
            tuple(sorted(of)),
            file.shown,
            line,
            entry.read,
            entry.why,
            file.source_line(line),
            proof.rows,
            proof.code,
        )

    def line(self, patterns: str) -> int | None:
        """As `Submission.line`."""
        return self.submission.line(patterns)

    def diagnose(self, run: ranks.Run) -> Diagnosis:
        """From a run that ended badly to a diagnosis: the exercise's own reading first, then the general one."""
        assert run.cause is not None
        if self.reader is not None and (own := self.reader(self, run, run.cause)) is not None:
            return own
        found = diagnose.general(self.submission, run)
        return self.diagnosis(found.id, found.message, evidence=found.evidence, of=run.cause.ranks, at=found.at)

    def _over_a_set(self, run: ranks.Run) -> Diagnosis | None:
        """What no run shows, because its ranks share a hash seed: the order of their calls under torchrun."""
        if run.world_size == 1 or not (found := over_a_set(run.ranks)):
            return None
        call, through, said = found
        return self.diagnosis(
            "loops-over-a-set", f"`{said}` is called in a loop over the set `{through}`.", at=call.frame
        )

    def unreadable(self, error: BaseException) -> Diagnosis:
        """The diagnosis for reports of the ranks on which a check breaks."""
        said = f"{type(error).__name__}: {cut(str(error), 300)}"
        return self.diagnosis(
            "unreadable", f"What the ranks reported is not what the check's own code on them reports ({said})."
        )


def _can_run() -> bool:
    """Whether a run of nobody's code ends well on this machine now."""
    try:
        return ranks.run(ranks.Source("pass"), 1, own_directory=True).ok
    except (ranks.RanksError, OSError):
        return False


def _printed(run: ranks.Run) -> str:
    lines = [
        f"[rank {report.rank}] {cut(harmless(line), MAX_LINE)}"
        for report in run.ranks
        for stream in (report.stdout, report.stderr)
        for line in stream.splitlines()
    ]
    return "\n".join(lines[:MAX_LINES]) + ("\n" if lines else "")
