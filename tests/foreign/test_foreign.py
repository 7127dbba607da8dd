"""Broken jobs that use the libraries of real ones: `lockstep run` tells the cause, the rank and the line. See `support/foreign.py`."""

from pathlib import Path

import pytest
from support import foreign

BANK = {str(bug): bug for bug in foreign.bugs()}
QUICK = (
    "adversarial: one rank trains its critic once more",
    "collectives: a group made by one rank less",
    "collectives: another reduction on one rank",
    "collectives: another root of a broadcast",
    "collectives: a receive from another rank than the one that sends",
    "ddp_loop: a barrier on rank 0 only",
    "ddp_loop: a helper's mean once more on one rank",
    "ddp_loop: drift by clamping weights",
    "ddp_loop: one layer more on one rank",
    "mesh_2d: full_tensor on rank 0 only",
    "pipeline: one stage makes a step less",
    "trainer: an error becomes status 1",
)
"""One for each way of finding a cause; the others take minutes."""
UNTOLD = {
    "ddp_loop: an exception is swallowed": "an exception that the code catches leaves no trace: told is where the ranks part",
}
"""What isn't explained in full, and why. No rank is accused wrongly there either."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BANK])
def test_a_bug_is_explained(name: str) -> None:
    bug = BANK[name]
    if why := foreign.lacking(bug):
        pytest.skip(why)
    told = foreign.play(bug)
    verdict = foreign.judge(bug, told)
    assert not verdict.wrongly, f"accuses {sorted(told.accused)}:\n{told.text}"
    if name not in UNTOLD:
        assert verdict.word == "right", f"{verdict}\nexpected lines {sorted(bug.lines())}\n{told.text}"


@pytest.mark.parametrize("job", sorted(file.stem for file in foreign.JOBS.glob("*.py")))
def test_nothing_is_said_of_the_job_without_a_bug(job: str, tmp_path: Path) -> None:
    bug = next(bug for bug in BANK.values() if bug.job == job)
    if why := foreign.lacking(bug):
        pytest.skip(why)
    script = tmp_path / f"{job}.py"
    script.write_text((foreign.JOBS / f"{job}.py").read_text())
    said = foreign.run(script, bug.n, spawns=bug.spawns)
    assert not foreign.explanation(said), said


def test_quick_and_untold_are_in_the_bank() -> None:
    assert {*QUICK, *UNTOLD} <= {*BANK}


def test_a_change_needs_one_line() -> None:
    with pytest.raises(ValueError, match="2 lines are 'a'"):
        foreign.changed("a\n  a\n", (("a", "b"),))
    assert foreign.changed("if x:\n    a\n", (("a", "\nb\n  c\n"),)) == "if x:\n    b\n      c\n"
