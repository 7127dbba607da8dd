"""`solutions/train.py` by `solutions/train.sbatch`, on a SLURM cluster of its own: two nodes, arrays, preemption."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.machine import needs

from lockstep import cluster

pytestmark = [pytest.mark.slow, needs("slurm")]
SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"
SECONDS = 240
EPOCHS = 6
SLOW = """
import os, time, train

def train_step(*given, step=train.train_step):
    time.sleep(0.5 * ("SLURM_RESTART_COUNT" not in os.environ))
    return step(*given)

train.train_step = train_step
train.record(train.main)()
"""
"""train.py, at two steps a second in a job's first start: whoever interrupts it has time to do so."""
AN_EPOCH = 1437 // 48


@pytest.fixture(scope="module")
def slurm() -> Iterator[cluster.Slurm]:
    """One cluster for all tests; jobs find torchrun where this Python is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}", prepend=":")
        with cluster.Slurm(2, grace=60) as two:
            yield two


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train.sbatch"):
        shutil.copy(SOLUTIONS / name, tmp_path / name)
    (tmp_path / "slow.py").write_text(SLOW)


def final(folder: str) -> dict[str, torch.Tensor]:
    """The weights of a complete job."""
    state = torch.load(Path("runs") / folder / "checkpoint.pt", weights_only=True)
    assert state["step"] == EPOCHS * AN_EPOCH
    return state["model"]


def wait_for(job: str, slurm: cluster.Slurm, pattern: str) -> None:
    """Until the job has printed it."""
    give_up = time.monotonic() + SECONDS
    while not re.search(pattern, slurm.job(job).output):
        assert time.monotonic() < give_up and not slurm.job(job).ended, slurm.job(job).output
        time.sleep(0.1)


def test_two_nodes_an_array_and_a_preemption(slurm: cluster.Slurm) -> None:
    """Each with the seed of its task: 0 is also that of a job without an array, so task 0 is that job undisturbed."""
    script = ("train.sbatch", "--epochs", str(EPOCHS), "--log-every", "1")
    # An array of two, each on both nodes with one rank on each.
    number = slurm.run("sbatch", "--parsable", "--array=0-1", "--export=ALL,RANKS_PER_NODE=1", *script).strip()
    slurm.wait(number, SECONDS)
    jobs = slurm.jobs(number)
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, [job.output for job in jobs]
    for job in jobs:
        assert job.nodes == "node[0-1]" and "2 ranks, cpu; 0 of" in job.output
        accuracy = float(re.findall(r"test accuracy ([\d.]+)", job.output)[-1])
        assert accuracy >= 0.9, job.output
        for rank in range(2):  # a file for each rank, and its lines in the job's output
            at = Path(f"runs/{job.id.replace('_', '-')}/logs/0/node{rank}")
            (file,) = at.glob("*/attempt_0/0/stdout.log")
            assert all(f"[{rank}] {line}\n" in job.output for line in file.read_text().splitlines())
            assert bool(file.read_text()) == (rank == 0)
    first, second = final(f"{number}-0"), final(f"{number}-1")
    assert not all(torch.equal(first[key], second[key]) for key in first)  # other seeds

    # The job with seed 0 again, but a more urgent one comes in between.
    again = slurm.run(
        "sbatch", "--parsable", "--exclusive", "--export=ALL,RANKS_PER_NODE=1,SCRIPT=slow.py", *script
    ).strip()
    wait_for(again, slurm, r"step 5/")
    urgent = slurm.sbatch("#!/bin/bash\ntrue", "--partition=urgent", "--nodes=2", "--exclusive")
    assert slurm.wait(urgent, SECONDS).state == "COMPLETED"
    done = slurm.wait(again, SECONDS, until=["COMPLETED"])
    assert done.restarts == 1
    stopped = re.search(r"asked to stop: saved after step (\d+) of", done.output)
    assert stopped, done.output
    assert f"; {stopped[1]} of {EPOCHS * AN_EPOCH} steps are done" in done.output  # and there it went on
    assert {one.name for one in Path(f"runs/{again}/logs").iterdir()} == {"0", "1"}  # a folder for each start
    resumed = final(again)
    assert all(torch.equal(first[key], resumed[key]) for key in first)


def test_the_signal_before_the_time_is_up(slurm: cluster.Slurm) -> None:
    """`--signal=B:USR1@60` is what scancel sends here: the batch script gets it, the ranks save, and the job requeues."""
    script = ("train.sbatch", "--epochs", "4", "--log-every", "1")
    job = slurm.run(
        "sbatch", "--parsable", "--nodes=1", "--export=ALL,RANKS_PER_NODE=2,SCRIPT=slow.py", *script
    ).strip()
    wait_for(job, slurm, r"step 2/")
    slurm.scancel(job, "--batch", "--signal=USR1")
    done = slurm.wait(job, SECONDS, until=["COMPLETED"])
    assert done.restarts == 1, done.output
    stopped = re.search(r"asked to stop: saved after step (\d+) of", done.output)
    assert stopped and f"; {stopped[1]} of {4 * AN_EPOCH} steps are done" in done.output, done.output
    assert torch.load(Path("runs") / job / "checkpoint.pt", weights_only=True)["step"] == 4 * AN_EPOCH


def test_an_exception_is_named_and_a_cancelled_job_stays_ended(slurm: cluster.Slurm) -> None:
    options = ("--parsable", "--export=ALL,RANKS_PER_NODE=1,NCCL_DEBUG=INFO")
    failing = slurm.run("sbatch", *options, "train.sbatch", "--batch-size", "47").strip()
    cancelled = slurm.run("sbatch", *options, "train.sbatch", "--epochs", "1000", "--workers", "1").strip()
    done = slurm.wait(failing, SECONDS)
    assert done.state == "FAILED" and done.restarts == 0
    why = "--batch-size 47 is no multiple of 2 (ranks times --accumulate)"
    assert re.search(rf"^\[[01]\] .*ValueError: {re.escape(why)}$", done.output, re.MULTILINE), done.output
    errors = Path(f"runs/{failing}/logs/0").glob(
        "node*/*/attempt_*/0/error.json"
    )  # what torchrun's summary is made from
    assert any(why in error.read_text() for error in errors)
    wait_for(cancelled, slurm, r"step 20/")
    slurm.scancel(cancelled)
    done = slurm.wait(cancelled, SECONDS)
    assert done.state == "CANCELLED" and done.restarts == 0, done
