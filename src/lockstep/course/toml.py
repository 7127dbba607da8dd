"""The course's TOML files, read into typed records: whatever is wrong with one is a line that says where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["CourseError", "read_toml", "tomllib"]

Record = TypeVar("Record")


class CourseError(Exception):
    """The course is not there, or something asked for is not in it. The message says what to do."""


def read_toml(path: Path, record: type[Record]) -> Record:
    """The file as a `record`. Raises CourseError when it is missing, is not TOML, or holds something else."""
    try:
        return msgspec.toml.decode(path.read_text(encoding="utf-8"), type=record)
    except FileNotFoundError:
        raise CourseError(f"{path} is missing: restore it with git checkout -- {path.name}") from None
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CourseError(f"{path} cannot be read: {error}") from None
