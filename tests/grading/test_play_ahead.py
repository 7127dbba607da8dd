"""Plays: `Grader.play_ahead` has those that wait played at the same time, and each is played once, whoever asks for it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import ranks
from lockstep.grading import Failed, Play
from lockstep.grading.grader import Grader

NAMES = ("one", "two", "three")


@pytest.fixture
def grader(tmp_path: Path) -> Any:
    """Plays nothing: notes what it would have played, and waits until all of NAMES are being played."""
    scenario = tmp_path / "scenario.py"
    scenario.touch()
    course: Any = SimpleNamespace(scenario=lambda name: scenario)
    submission: Any = SimpleNamespace(name="example", file=scenario, folder=tmp_path, text="", script=None)
    grader: Any = Grader(course, submission, tmp_path, seed=0, device="cpu")
    meeting, grader.played = threading.Barrier(len(NAMES)), []

    def carry_out(play: Play) -> ranks.Run:
        grader.played.append(play.scenario)
        if play.scenario in NAMES:
            meeting.wait(60)  # one after the other they would never meet
        if play.scenario == "three":
            raise Failed(SimpleNamespace(id="broke-the-run", message="", line=None))  # type: ignore[arg-type]
        return ranks.Run(play.world_size, "cpu", [])

    grader._carry_out = carry_out
    return grader


def test_they_are_played_at_the_same_time_and_once(grader: Any) -> None:
    grader.play_ahead(Play.of(name, 2, timeout=1.0) for name in NAMES)
    assert sorted(grader.played) == sorted(NAMES)
    first = grader.run("one", 2, timeout=1.0)
    assert first.world_size == 2 and grader.run("two", 2, timeout=1.0) is not first
    grader.play_ahead([Play.of("one", 2, timeout=1.0)])
    assert grader.run("one", 2, timeout=1.0) is first
    assert sorted(grader.played) == sorted(NAMES)
    grader.run("another", 2)
    assert grader.played[-1] == "another"


def test_an_attempt_is_played_once_and_once_more_if_spoiled(grader: Any) -> None:
    first = grader.attempt("another", 1)
    assert grader.attempt("another", 1) is first is grader.run("another", 1)
    grader.attempt("spoiled", 1, spoiled=lambda run: True)
    grader.attempt("fine", 1, spoiled=lambda run: False)
    assert grader.played == ["another", "spoiled", "spoiled", "fine"]


def test_what_went_wrong_is_told_when_it_is_asked_for(grader: Any) -> None:
    grader.play_ahead(Play.of(name) for name in NAMES)
    assert grader.run("one")
    with pytest.raises(Failed, match=r"^$"):
        grader.run("three")


def test_a_play_is_known_by_every_bit_of_what_it_is_given() -> None:
    """Printed, these tensors look the same: torch shows four digits, and leaves out the middle of a long one."""
    near = torch.full((2000,), 0.1)
    other = near.clone()
    other[1000] = torch.nextafter(near[1000], torch.tensor(1.0))
    plays = [Play.of("one", given=given) for given in (near, near.clone(), other)]
    assert repr(plays[0]) == repr(plays[2])
    assert plays[0].key == plays[1].key != plays[2].key
    apart = [Play.of("one", each=[{"given": given}, {"given": near}]).key for given in (near, other)]
    assert apart[0] != apart[1]
    assert Play.of("one", a=1).key != Play.of("one", a="1").key != Play.of("two", a="1").key


@pytest.mark.parametrize(("device", "own", "gpus", "used"), [
    ("cuda", True, 1, "cpu"), ("cuda", True, 2, "cuda"), ("cuda", False, 1, "cuda"), ("cpu", True, 2, "cpu")])  # fmt: skip
def test_ranks_that_cannot_share_a_gpu_take_the_cpu(
    device: str, own: bool, gpus: int, used: str, grader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    asked = []
    monkeypatch.setattr(ranks, "run", lambda target, world_size, **how: asked.append(how["device"]))
    grader.device, grader.own_gpus = device, own
    Grader._carry_out(grader, Play.of("one", 2))
    assert asked == [used]
