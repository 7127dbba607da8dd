"""The course: what it consists of, where a learner is in it, and what a learner can ask for besides a verdict.

Nothing here runs a submission. It needs the standard library and msgspec, so `lockstep status` works without torch.
"""

from __future__ import annotations

from .course import CatalogueEntry, Chapter, Course, find, leaf, nearest, short, unused
from .toml import CourseError

__all__ = ["CatalogueEntry", "Chapter", "Course", "CourseError", "find", "leaf", "nearest", "short", "unused"]
