"""What the grader's tests share: a warm process that grades, and the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import ROOT
from support.command_line import CommandLine, call

from lockstep.course import Course
from lockstep.grading.worker import Worker


@pytest.fixture(scope="session")
def course() -> Course:
    """This checkout."""
    return Course(ROOT)


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """A process that grades; its own crash would show as a fault in the report."""
    one = Worker()
    yield one
    one.stop()


@pytest.fixture
def lockstep() -> CommandLine:
    """Call `lockstep …` as a learner would, with a deadline."""
    return call
