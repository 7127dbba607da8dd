"""Submission → observations → verdict → report."""

from __future__ import annotations

from .course import Course, CourseError, find
from .grader import Failed, Grader, NotRun
from .verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report

__all__ = [
    "CheckOutcome", "CheckResult", "Course", "CourseError", "Diagnosis", "ExerciseResult", "Failed", "Grader", "NotRun",
    "Report", "find",
]  # fmt: skip
