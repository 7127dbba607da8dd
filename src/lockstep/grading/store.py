"""The folder of a class's grading, and what makes it survive a kill at any instant.

    DIR/grading.json        what it is made with: seed, exercises, checks, versions (`Plan`)
    DIR/roster.json         who handed in what
    DIR/submissions/ID/     what was taken of it
    DIR/results/ID.json     what counts: points and diagnoses. It depends on submission, seed and checks alone: no
    times,
                            paths or ports, keys sorted, so that a regrade gives the same bytes
    DIR/details/ID.json     all that was seen: messages, evidence, output, seconds, attempts

Theory of operation. A file is written under another name, flushed to the disk and renamed. Details are written before
their result. A result counts when it is byte for byte what its details give for the submission that is there now. So at
whatever instant a kill comes, a learner is either graded or not, and the next run continues with those who are not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..course import CourseError
from ..course.files import write
from .classroom import Learner, digest_of, seed_of, was_handed_in
from .intake import Handed
from .verdict import CheckResult, ExerciseResult, from_json

SCHEMA: Literal[1] = 1


@dataclass(frozen=True)
class Plan:
    """What a grading is made with. `exercises` are those asked for, None for whatever each learner handed in.

    `checks` is a hash of the checks, the solutions and the machinery: gradings under different ones are not comparable.
    """

    seed: int
    exercises: tuple[str, ...] | None
    device: str
    checks: str
    versions: dict[str, str]
    schema: Literal[1] = SCHEMA


@dataclass(frozen=True)
class _Details:
    """`details/ID.json`, with the report as its own schema has it."""

    learner: str
    report: dict[str, Any] | None
    attempts: int
    seconds: float
    isolation: str
    missing: tuple[str, ...]
    schema: Literal[1] = SCHEMA


class Store:
    """The files of one grading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submissions = folder / "submissions"
        self.results = folder / "results"
        self.details = folder / "details"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process alone.

        Raises CourseError when another grading is at work in it, or when it has other things in it.
        """
        made = self.folder.is_dir() and any(not name.startswith(".") for name in os.listdir(self.folder))
        if made and not (self.folder / "grading.json").is_file():
            raise CourseError(f"{self.folder} has other things in it: give --out a new folder, or that of a grading")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise CourseError(f"{self.folder} cannot be written: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CourseError(f"another grading is at work in {self.folder}: wait for it, or end it") from None
            except OSError:  # a file system without locks
                pass
            yield

    # What it is made with ----------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """What this folder's grading was begun with; None in a new one. Raises CourseError when it cannot be read."""
        file = self.folder / "grading.json"
        if not file.is_file():
            return None
        try:
            return msgspec.convert(json.loads(file.read_bytes()), Plan)
        except (OSError, ValueError):
            raise CourseError(f"{file} cannot be read: give --out a new folder") from None

    def begin(self, plan: Plan) -> None:
        write(self.folder / "grading.json", pretty(plan))

    def make_folders(self) -> None:
        for folder in (self.submissions, self.results, self.details):
            folder.mkdir(exist_ok=True)

    def withdraw(self) -> None:
        """Undo `begin` and `make_folders`: there was nothing to grade, and the next request may be a different one."""
        for folder in (self.submissions, self.results, self.details):
            shutil.rmtree(folder, ignore_errors=True)
        (self.folder / "grading.json").unlink(missing_ok=True)

    def forget(self, ids: Iterable[str] | None = None) -> None:
        """Drop what is known of these learners; of all of them by default."""
        for id in self.graded() if ids is None else ids:
            for folder in (self.results, self.details):  # the result goes first: it is what counts
                (folder / f"{id}.json").unlink(missing_ok=True)

    def put_roster(self, roster: Iterable[Handed]) -> None:
        """Record who handed in what, and drop all other folders."""
        kept = {one.id for one in roster}
        for folder in self.submissions.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        write(self.folder / "roster.json", pretty([replace(one, folder=Path(one.folder.name)) for one in roster]))

    def roster(self) -> list[Handed]:
        """Who handed in what, as recorded. Raises CourseError when nothing is."""
        try:
            raw = json.loads((self.folder / "roster.json").read_bytes())
            return msgspec.convert(raw, list[Handed], dec_hook=lambda path, name: self.submissions / name)
        except (OSError, ValueError):
            raise CourseError(f"{self.folder} has no readable roster.json: run the whole grading again") from None

    # Who is graded -----------------------------------------------------------------------------------------------

    def graded(self) -> list[str]:
        """The ids that have a result, whatever it is worth."""
        if not self.results.is_dir():
            return []
        return sorted(p.stem for p in self.results.glob("*.json") if not p.name.startswith("."))

    def put(self, plan: Plan, learner: Learner) -> None:
        report = learner.report.to_json() if learner.report is not None else None
        details = _Details(learner.id, report, learner.attempts, learner.seconds, learner.isolation, learner.missing)
        write(self.details / f"{learner.id}.json", pretty(details))
        write(self.results / f"{learner.id}.json", result_bytes(plan, learner))

    def get(self, plan: Plan, handed: Handed) -> Learner | None:
        """A learner's grading; None where there is none under this plan of what was handed in now."""
        digest = digest_of(handed)
        try:
            told = msgspec.convert(json.loads((self.details / f"{handed.id}.json").read_bytes()), _Details)
            report = from_json(told.report) if told.report is not None else None
            found = (self.results / f"{handed.id}.json").read_bytes()
        except (OSError, ValueError):
            return None
        seed = seed_of(plan.seed, handed.id, digest)
        learner = Learner(handed, report, seed, digest, told.attempts, told.seconds, told.isolation, told.missing)
        return learner if found == result_bytes(plan, learner) else None


def pretty(record: Any) -> bytes:
    """JSON with sorted keys, for people as well. (json's escapes keep text that is no valid Unicode.)"""
    plain = msgspec.to_builtins(record, enc_hook=str)
    return (json.dumps(plain, ensure_ascii=True, indent=1, sort_keys=True) + "\n").encode()


def result_bytes(plan: Plan, learner: Learner) -> bytes:
    """`results/ID.json`: schema 1. Names in it stay; new ones may come."""
    return pretty({
        "schema": SCHEMA,
        "learner": learner.id,
        "name": learner.handed.shown,
        "outcome": learner.outcome,
        "score": learner.score,
        "max_score": None if learner.faulty else learner.max_score,
        "exercises": [_exercise(result) for result in learner.exercises],
        "refused": learner.handed.refused,
        "notes": learner.handed.notes,
        "digest": learner.digest,
        "seed": learner.seed,
        "device": plan.device,
        "checks": plan.checks,
        "versions": plan.versions,
    })  # fmt: skip


def _exercise(result: ExerciseResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "handed_in": was_handed_in(result),
        "passed": result.passed,
        "score": result.score,
        "max_score": result.max_score,
        "checks": [_check(check) for check in result.checks],
    }


def _check(check: CheckResult) -> dict[str, Any]:
    """What of a check is the same each time; ports and seconds in a diagnosis's message and evidence are not."""
    found = check.diagnosis
    return {
        "id": check.id,
        "name": check.name,
        "outcome": check.outcome,
        "reason": check.reason,
        "lacking": check.lacking,
        "diagnosis": found and {"id": found.id, "line": found.line, "read": found.read},
    }
