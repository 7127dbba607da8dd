"""The folder that a grading of a class lives in, and what makes it survive a kill at any instant.

    DIR/grading.json        what it is made with: seed, exercises, checks, versions (`Plan`)
    DIR/roster.json         who handed in what
    DIR/submissions/ID/     what was taken of it
    DIR/results/ID.json     what counts: points and diagnoses. A function of the submission, the seed and the checks alone:
                            no times, no paths, no ports, keys sorted, so that a regrade gives the same bytes
    DIR/details/ID.json     all that was seen: messages, evidence, output, seconds, attempts

Theory of operation. A file here is written under another name, flushed to the disk and renamed. Details are written before
their result; a result counts when it is byte for byte what its details give for the submission as it now lies there. So
whatever instant a kill chose, a learner is either graded or not, and the next run goes on with those who are not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..ranks.client import SOURCE
from .classroom import Learner, Outcome, digest_of, seed_of, was_handed_in
from .course import Course, CourseError
from .intake import Handed
from .verdict import CheckResult, Diagnosis, ExerciseResult, from_json

SCHEMA = 1
MACHINERY = ("ranks", "cluster", "grading")
NOT_JUDGING = ("exports",)
"""What of `grading` writes what was concluded, and so may change without anybody being graded again."""


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

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Plan:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema {raw['schema']}")
        asked = raw["exercises"]
        return cls(
            int(raw["seed"]),
            None if asked is None else tuple(map(str, asked)),
            str(raw["device"]),
            str(raw["checks"]),
            dict(raw["versions"]),
        )


class Store:
    """The files of one grading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submissions = folder / "submissions"
        self.results = folder / "results"
        self.details = folder / "details"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process alone. Raises CourseError when another grading is at work in it, or when it
        holds what is none of a grading's."""  # fmt: skip
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
            return Plan.of(json.loads(file.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            raise CourseError(f"{file} cannot be read: give --out a new folder") from None

    def begin(self, plan: Plan) -> None:
        """Record what the grading is made with."""
        write(self.folder / "grading.json", pretty(plan.to_json()))

    def make_folders(self) -> None:
        """Make those that are not there yet."""
        for folder in (self.submissions, self.results, self.details):
            folder.mkdir(exist_ok=True)

    def withdraw(self) -> None:
        """Undo `begin` and `make_folders`: there was nothing to grade, and the next order may be another."""
        for folder in (self.submissions, self.results, self.details):
            shutil.rmtree(folder, ignore_errors=True)
        (self.folder / "grading.json").unlink(missing_ok=True)

    def forget(self, ids: Iterable[str] | None = None) -> None:
        """Drop what is known of these learners; of all of them by default."""
        for id in self.graded() if ids is None else ids:
            for folder in (self.results, self.details):  # the result goes first: it is what counts
                (folder / f"{id}.json").unlink(missing_ok=True)

    def put_roster(self, roster: Iterable[Handed]) -> None:
        """Record who handed in what, and drop the folders of whoever did not."""
        kept = {one.id for one in roster}
        for folder in self.submissions.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        write(self.folder / "roster.json", pretty([_handed_json(one) for one in roster]))

    def roster(self) -> list[Handed]:
        """Who handed in what, as recorded. Raises CourseError when nothing is."""
        try:
            raw = json.loads((self.folder / "roster.json").read_bytes())
            return [_handed(one, self.submissions) for one in raw]
        except (OSError, ValueError, KeyError, TypeError):
            raise CourseError(f"{self.folder} has no readable roster.json: run the whole grading again") from None

    # Who is graded -----------------------------------------------------------------------------------------------

    def graded(self) -> list[str]:
        """The ids that have a result, whatever it is worth."""
        if not self.results.is_dir():
            return []
        return sorted(p.stem for p in self.results.glob("*.json") if not p.name.startswith("."))

    def put(self, plan: Plan, learner: Learner) -> None:
        """Record a learner's grading."""
        write(self.details / f"{learner.id}.json", pretty(_details_json(learner)))
        write(self.results / f"{learner.id}.json", result_bytes(plan, learner))

    def get(self, plan: Plan, handed: Handed) -> Learner | None:
        """A learner's grading; None where there is none under this plan of what was handed in now."""
        digest = digest_of(handed)
        try:
            raw = json.loads((self.details / f"{handed.id}.json").read_bytes())
            if raw["schema"] != SCHEMA:
                return None
            report = from_json(raw["report"]) if raw["report"] is not None else None
            learner = Learner(
                handed, report, seed_of(plan.seed, handed.id), digest, int(raw["attempts"]), float(raw["seconds"]),
                str(raw["isolation"]), tuple(map(str, raw["missing"])),
            )  # fmt: skip
            found = (self.results / f"{handed.id}.json").read_bytes()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return learner if found == result_bytes(plan, learner) else None


def write(path: Path, data: bytes) -> None:
    """Give a file this content, so that it has either its old content or all of the new, whatever happens meanwhile."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def pretty(data: Any) -> bytes:
    """JSON with sorted keys, for people as well. Text of a submission that is no text at all stays readable."""
    return (json.dumps(data, ensure_ascii=True, indent=1, sort_keys=True) + "\n").encode()


def stamp(course: Course) -> str:
    """A hash of everything that decides what a grading concludes: checks, solutions, machinery. Not of their places."""
    found = hashlib.sha256()
    package = Path(SOURCE) / "lockstep"
    for root, folders in ((course.root, (course.autograder, course.solutions)), (package, [package / name for name in MACHINERY])):  # fmt: skip
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if path.suffix in (".py", ".toml") and path.parent.name not in NOT_JUDGING and path.is_file():
                    content = path.read_bytes()
                    found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
                    found.update(content)
    return found.hexdigest()


# JSON ------------------------------------------------------------------------------------------------------------


def result_bytes(plan: Plan, learner: Learner) -> bytes:
    """`results/ID.json`: schema 1. Names in it stay; new ones may come."""
    faulty = learner.outcome is Outcome.FAULT
    return pretty({
        "schema": SCHEMA,
        "learner": learner.id,
        "name": learner.handed.shown,
        "outcome": learner.outcome.value,
        "score": learner.score,
        "max_score": None if faulty else learner.max_score,
        "exercises": [_exercise_json(result) for result in learner.exercises],
        "refused": list(learner.handed.refused),
        "notes": list(learner.handed.notes),
        "digest": learner.digest,
        "seed": learner.seed,
        "device": plan.device,
        "checks": plan.checks,
        "versions": plan.versions,
    })  # fmt: skip


def _exercise_json(result: ExerciseResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "handed_in": was_handed_in(result),
        "passed": result.passed,
        "score": result.score,
        "max_score": result.max_score,
        "checks": [_check_json(check) for check in result.checks],
    }


def _check_json(check: CheckResult) -> dict[str, Any]:
    return {
        "id": check.id,
        "name": check.name,
        "outcome": check.outcome.value,
        "reason": check.reason,
        "lacking": check.lacking,
        "diagnosis": _diagnosis_json(check.diagnosis),
    }


def _diagnosis_json(found: Diagnosis | None) -> dict[str, Any] | None:
    """What of a diagnosis is the same each time; ports and seconds in its message and evidence are not."""
    return None if found is None else {"id": found.id, "line": found.line, "read": found.read}


def _details_json(learner: Learner) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "learner": learner.id,
        "report": learner.report.to_json() if learner.report is not None else None,
        "attempts": learner.attempts,
        "seconds": round(learner.seconds, 3),
        "isolation": learner.isolation,
        "missing": list(learner.missing),
    }


def _handed_json(one: Handed) -> dict[str, Any]:
    moment = one.handed_in.isoformat() if one.handed_in is not None else None
    raw = {key: value for key, value in asdict(one).items() if key != "folder"}
    return {**raw, "handed_in": moment}


def _handed(raw: dict[str, Any], submissions: Path) -> Handed:
    moment = datetime.fromisoformat(raw["handed_in"]) if raw["handed_in"] is not None else None
    return Handed(raw["id"], raw["shown"], submissions / raw["id"], tuple(raw["files"]), moment, bool(raw["marked_late"]),
                  tuple(raw["refused"]), tuple(raw["notes"]))  # fmt: skip
