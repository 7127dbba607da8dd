"""What takes long to import is imported, before the first rank, for the exercises that want it, and for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.course import Course
from lockstep.course.runs import DIGITS, PRELOADED, preloaded, warm
from lockstep.grading.isolation import TIERS
from lockstep.ranks import client

SLOW, *FEW = PRELOADED


class Server:
    """Notes with what it is started."""

    def __init__(self) -> None:
        self.preload: Any = ()
        self.running = False
        self.begun: list[list[str]] = []

    def start(self) -> None:
        if not self.running:
            self.begun.append(list(self.preload))
        self.running = True

    def stop(self) -> None:
        self.running = False


def test_it_is_known_who_wants_it(course: Course) -> None:
    solutions = {name: (course.solutions / f"{name}.py").read_text(encoding="utf-8") for name in course.names}
    assert {name for name, text in solutions.items() if SLOW in text} == {*DIGITS}


def test_the_warm_process_is_started_again_once_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr(client, "_server", server)
    monkeypatch.setenv("LOCKSTEP_START_METHOD", "fork")
    for exercises in (["mini_ddp"], ["checkpoint"], ["checkpoint", DIGITS[0]], ["mini_ddp"], [DIGITS[1]]):
        warm(exercises)
    assert server.begun == [FEW, [SLOW, *FEW]]


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_a_gradings_own_process_has_what_its_exercises_want(tier: Any, tmp_path: Path) -> None:
    for exercises in (("mini_ddp",), ("mini_ddp", DIGITS[0])):
        assert tier.server(tmp_path, exercises).preload == preloaded(exercises)
