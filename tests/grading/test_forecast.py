"""How long a class takes is said before it begins, and learned while it is graded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.commands import grade_class
from lockstep.course import Course
from lockstep.grading import bulk
from lockstep.grading.classroom import Learner
from lockstep.grading.forecast import PRIOR, SECONDS_A_CHECK, Forecast, about
from lockstep.grading.intake import Handed
from lockstep.grading.isolation import tier
from lockstep.grading.store import Plan, Store
from lockstep.grading.verdict import Report


def learner(id: str, seconds: float, faults: tuple[str, ...] = ()) -> Learner:
    return Learner(Handed(id, id, Path("/nowhere"), ()), Report(7, (), faults=faults), 7, seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "less than a minute"), (59, "less than a minute"), (61, "about 1 minute"), (130, "about 2 minutes"), (2400, "about 40 minutes"),
     (2520, "about 40 minutes"), (5399, "about 90 minutes"), (7200, "about 2 hours"), (9100, "about 2.5 hours")],
)  # fmt: skip
def test_a_time_is_said_roughly(seconds: float, said: str) -> None:
    assert about(seconds) == said


def test_the_work_is_shared_and_the_longest_part_stays() -> None:
    one = Forecast({"ada": 10, "bob": 20, "cy": 30}, 1)
    assert one.left == 60 * SECONDS_A_CHECK
    assert Forecast(one.checks, 2).left == one.left / 2
    assert Forecast(one.checks, 8).left == 30 * SECONDS_A_CHECK, "one submission is not shared"
    assert Forecast({}, 4).left == 0


def test_it_learns_from_those_that_are_graded() -> None:
    found = Forecast({f"id-{n}": 20 for n in range(10)}, 2)
    usual = found.left
    found.count(learner("id-0", 3 * 20 * SECONDS_A_CHECK))
    assert len(found.waiting) == 9 and found.left == 2 * 0.9 * usual, "as much weight as the usual ones"
    found.count(learner("id-1", 600, faults=("broke",)))
    assert len(found.waiting) == 8 and found.left == 2 * 0.8 * usual, "a fault's time says nothing"
    assert PRIOR == 20


def test_what_is_known_of_a_class_counts(course: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next download of the same class: who is graded is not waited for, and says how long the others take."""
    ada, bob, cy = (Handed(id, id, tmp_path, files) for id, files in
                    (("ada", ("setup_ddp.py",)), ("bob", ("setup_ddp.py", "train_ddp.py")), ("cy", ())))  # fmt: skip
    grading = bulk.Grading(course, Store(tmp_path), Plan(7, None, "cpu", "", {}), (ada, bob, cy), tier())
    monkeypatch.setattr(bulk.Grading, "known", lambda self, one: learner("ada", 100) if one is ada else None)
    setup, train = course.count_checks("setup_ddp"), course.count_checks("train_ddp")
    fresh = Forecast.of(grading, [ada, bob, cy], 1)
    assert fresh.waiting == {"ada": setup, "bob": setup + train, "cy": 0} and fresh.left == 2 * setup + train
    assert Forecast.of(grading, [bob], 1).waiting == {"bob": setup + train}, "with --only, nobody else"
    later = Forecast.of(grading, [bob, cy], 1)
    assert later.waiting == {"bob": setup + train, "cy": 0}
    assert later.left == pytest.approx((setup + train) * (PRIOR * SECONDS_A_CHECK + 100) / (PRIOR + setup))


def test_progress_says_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """One line in ten, and none when the rest is short."""
    ids = [f"id-{n}" for n in range(20)]
    with grade_class._shown(20, 0, Forecast(dict.fromkeys(ids, 60), 1)) as listen:
        for id in ids:
            listen(learner(id, 60 * SECONDS_A_CHECK))
    lines = capsys.readouterr().out.splitlines()
    assert [one.partition("  ")[0] for one in lines[:4]] == ["1/20", "2/20", lines[2], "3/20"]
    assert re.fullmatch(r"about 20 minutes left, until (\w+, )?\d\d:\d\d", lines[2])
    assert sum(" left, until " in one for one in lines) == 9, "at 2, 4, … 18 of 20; the last has nothing left"
