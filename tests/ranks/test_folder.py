"""The folder of a run goes with it, also when whoever removes it is killed on the way."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.ranks import folder

STEPS = ("rename", "unlink", "rmdir", "chmod", "open")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs make their folders. Its path is short: a socket's path has a limit, and a run goes elsewhere beyond it."""
    folder = tmp_path_factory.mktemp("f")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def filled() -> str:
    """The folder of a run whose ranks have left something."""
    made = folder.make_folder()
    (Path(made) / "tmp" / "deep").mkdir()
    for name in ("socket", "tmp/left.txt", "tmp/deep/left.txt"):
        (Path(made) / name).write_text("left")
    return made


def remove_and_die(step: int) -> bool:
    """In a child: make such a folder, and be killed before the `step`th change of the disk; False when it came through."""
    child = os.fork()
    if not child:
        left = step

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def change(*args: object, **kwargs: object) -> object:
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*args, **kwargs)

            return change

        made = filled()
        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        folder.remove_run_folder(made)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_whoever_removes_a_folder_may_be_killed_at_any_step(place: Path) -> None:
    step = 0
    while remove_and_die(step):
        assert os.listdir(place), "it was killed, and has left nothing?"
        folder.remove_left_folders()
        assert os.listdir(place) == [], f"killed before step {step}"
        step += 1
    assert os.listdir(place) == []
    assert step > 10


def test_a_folder_in_use_stays(place: Path) -> None:
    made = filled()
    folder.remove_left_folders()
    assert os.path.isfile(os.path.join(made, "tmp", "left.txt"))
    folder.remove_run_folder(made)
    assert os.listdir(place) == []


def test_a_folder_of_a_killed_process_goes_at_the_next_start_and_one_in_use_stays(place: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with folder.held_folder() as made:
            (Path(made) / "submission.py").write_text("x = 1")
            os.write(writing, b"ready")
            signal.pause()
    assert os.read(reading, 5) == b"ready"
    with folder.held_folder() as mine:
        folder.remove_left_folders()
        assert len(os.listdir(place)) == 2
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        folder.remove_left_folders()
        assert os.listdir(place) == [Path(mine).name]
    assert os.listdir(place) == []
