"""What a learner has done so far: one JSON file in the workspace, written atomically, never lost to a bad write."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import course as courses
from .course import Course
from .verdict import ExerciseResult

FILE = "progress.json"


def _path(course: Course | None) -> Path:
    return (course or courses.find()).workspace / FILE


def load(course: Course | None = None) -> dict[str, Any]:
    """Everything recorded, by section. An unreadable file is set aside as `progress.json.broken-N`, and its backup
    used."""
    path = _path(course)
    for candidate in (path, path.with_suffix(".json.backup")):
        try:
            raw = json.loads(candidate.read_text(encoding="utf-8"))
            if isinstance(raw, dict):
                return raw
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                candidate.rename(candidate.with_name(f"{candidate.name}.broken-{time.time_ns()}"))
    return {}


def update(section: str, key: str, value: Any, course: Course | None = None) -> None:
    """Record one value. A folder that cannot be written is no reason to fail: the record is then dropped."""
    path = _path(course)
    with contextlib.suppress(OSError), _locked(path):
        everything = load(course)
        everything.setdefault(section, {})[key] = value
        _replace(path, everything)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, everything: dict[str, Any]) -> None:
    if path.is_file():
        backup = path.with_suffix(".json.backup")
        with contextlib.suppress(OSError):
            backup.write_bytes(path.read_bytes())
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".progress-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def record(course: Course, result: ExerciseResult) -> None:
    """Note an exercise's grading: best score, attempts, and whether it has ever passed."""
    known = load(course).get("exercises", {}).get(result.name, {})
    update("exercises", result.name, {
        **known,
        "passed": bool(known.get("passed")) or result.passed,
        "best": max(int(known.get("best", 0)), result.score),
        "max_score": result.max_score,
        "attempts": int(known.get("attempts", 0)) + 1,
        "last": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }, course)  # fmt: skip


def note(course: Course, name: str, **values: Any) -> None:
    """Note something else about an exercise: hints taken, solution seen."""
    known = load(course).get("exercises", {}).get(name, {})
    update("exercises", name, {**known, **values}, course)


def of(course: Course, name: str) -> dict[str, Any]:
    """What is recorded of an exercise; empty when it was never tried."""
    found = load(course).get("exercises", {}).get(name, {})
    return found if isinstance(found, dict) else {}
