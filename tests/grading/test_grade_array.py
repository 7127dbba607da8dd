"""A class as a job array on a SLURM cluster that stands for these tests: the same grades, and a client that may die."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.tiny_course import CLASS, IDS, SECONDS, WAITING, command, files, make_course, moodle

from lockstep import cluster
from lockstep.course import Course

missing = cluster.available("slurm")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing is not None, reason=f"not run: {missing}")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return make_course(tmp_path_factory.mktemp("course"))


@pytest.fixture(autouse=True)
def nobody_may_go_on(tiny: Course) -> None:
    """What waits for `go` waits at the start of every test."""
    (tiny.root / "traps" / "go").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def slurm() -> Iterator[cluster.Slurm]:
    with cluster.Slurm(2) as two:
        yield two


def call(course: Course, *arguments: object) -> list[str]:
    """The command line that grades this course from the cluster's login node."""
    where = [
        "env",
        f"PYTHONPATH={ROOT / 'src'}",
        f"LOCKSTEP_COURSE={course.root}",
        "LOCKSTEP_ISOLATION=none",
        "OMP_NUM_THREADS=1",
    ]
    return [*where, sys.executable, "-m", "lockstep", "grade", *map(str, arguments), "--allow-unisolated", "--slurm"]


def test_an_array_gives_the_grades_that_one_machine_gives(slurm: cluster.Slurm, tiny: Course, tmp_path: Path) -> None:
    """Two tasks into one folder, one after the other learner; called once more, nobody is graded again."""
    source, out = moodle(tmp_path / "all.zip", CLASS), tmp_path / "array"
    said = slurm.run(*call(tiny, source, "--out", out, "--seed", 7, "-j", 2), cwd=tmp_path, timeout=2 * SECONDS)
    assert re.search(r"^SLURM job \d+: 2 tasks, output in ", said, re.MULTILINE), said
    assert "4/4" in said and "3 graded · 1 nothing to grade" in said
    local = command(tiny, source, "--out", tmp_path / "here", "--seed", 7, "--allow-unisolated")
    assert local.wait(SECONDS) == 0
    assert files(out) == files(tmp_path / "here")
    printed = {path.name.partition("_")[2]: path.read_text() for path in (out / "slurm").glob("*.out")}
    assert {name: [id for id in IDS if f"{id}: " in text] for name, text in printed.items()} == {"0.out": IDS[::2], "1.out": IDS[1::2]}  # fmt: skip
    assert not (out / "slurm.json").exists()
    again = slurm.run(*call(tiny, source, "--out", out), cwd=tmp_path, timeout=SECONDS)
    assert "4 graded before" in again and "SLURM job" not in again


def test_a_client_that_was_killed_finds_its_array_again(slurm: cluster.Slurm, tiny: Course, tmp_path: Path) -> None:
    """The array goes on without it; the same command waits for it, and sends no second one."""
    source, out = moodle(tmp_path / "all.zip", WAITING), tmp_path / "array"
    arguments = call(tiny, source, "--out", out, "--seed", 7, "-j", 2)
    client = slurm.nodes.run(None, arguments, env=slurm.environment, cwd=tmp_path)
    wait_for(out, ["ada-lovelace-1001", "hank-1003", "nobody-1004"])  # the first slice waits for its second learner
    client.kill()
    client.wait(20)
    with pytest.raises(
        cluster.ClusterError, match=r"SLURM job \d+ is at work on this grading: wait for it with --slurm"
    ):
        slurm.run(*arguments[:-1], cwd=tmp_path, timeout=SECONDS)
    taken = {path: path.stat().st_mtime_ns for path in (out / "submissions").rglob("*.py")}
    again = slurm.nodes.run(None, arguments, env=slurm.environment, cwd=tmp_path)
    while "is still at work" not in again.output:
        assert again.poll() is None, again.output
        time.sleep(0.05)
    (tiny.root / "traps" / "go").touch()
    assert again.wait(2 * SECONDS) == 0
    said = again.output
    assert "tasks, output in" not in said
    assert {path: path.stat().st_mtime_ns for path in taken} == taken, "what the tasks read is left alone"
    assert (out / "grades.csv").is_file() and len(files(out)) == 6


def test_ctrl_c_cancels_the_array(slurm: cluster.Slurm, tiny: Course, tmp_path: Path) -> None:
    """No task goes on, and the same command submits a new array for the rest."""
    source, out = moodle(tmp_path / "all.zip", WAITING), tmp_path / "array"
    arguments = call(tiny, source, "--out", out, "--seed", 7, "-j", 2)
    client = slurm.nodes.run(None, arguments, env=slurm.environment, cwd=tmp_path)
    wait_for(out, ["ada-lovelace-1001", "hank-1003", "nobody-1004"])
    client.send_signal(signal.SIGINT)
    assert client.wait(SECONDS) == 130 and "3 of 5 are graded and kept" in client.output
    number = json.loads((out / "slurm.json").read_text())["job"]
    first, *others = slurm.jobs(number)
    assert first.state == "CANCELLED" and all(job.ended for job in others)
    (tiny.root / "traps" / "go").touch()
    said = slurm.run(*arguments, cwd=tmp_path, timeout=2 * SECONDS)
    assert "3 graded before" in said and "2 tasks, output in" in said and len(files(out)) == 6


def test_where_there_is_no_slurm_it_says_so(tiny: Course, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    source = moodle(tmp_path / "all.zip", CLASS)
    process = command(tiny, source, "--out", tmp_path / "graded", "--allow-unisolated", "--slurm")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2 and err == "lockstep: there is no sbatch here: --slurm is for a cluster's login node; without it this machine grades\n"  # fmt: skip


def wait_for(out: Path, ids: list[str]) -> None:
    give_up = time.monotonic() + 2 * SECONDS
    while sorted(path.stem for path in (out / "results").glob("[!.]*.json")) != ids:
        assert time.monotonic() < give_up, [path.read_text() for path in (out / "slurm").glob("*.out")]
        time.sleep(0.05)
