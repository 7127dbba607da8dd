"""The reference of elastic_training under the real torchrun, which restarts it when a rank is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "solutions" / "elastic_training.py"
SECONDS = 120
TOTAL, SAVE_EVERY = 60, 5


class Job:
    """torchrun with two ranks, in a process group of its own; what it prints goes to a file."""

    def __init__(self, folder: Path, log: Path, *options: str, slow: bool) -> None:
        self.log = log
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder)]
        environment = {
            **os.environ,
            "SECONDS_A_SAMPLE": "0.02" if slow else "0",
            "OMP_NUM_THREADS": "1",
            # Else a restart may read the addresses of the ranks before it (PyTorch issue 135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, what: Callable[[], object]) -> None:
        give_up = time.monotonic() + SECONDS
        while not what():
            assert self.process.poll() is None and time.monotonic() < give_up, self.output
            time.sleep(0.01)

    def ranks(self) -> dict[tuple[int, int], int]:
        """(restart, rank) → process."""
        found = re.findall(r"rank (\d+), process (\d+), restart (\d+)", self.output)
        return {(int(restart), int(rank)): int(pid) for rank, pid, restart in found}

    def end(self) -> int:
        try:
            return self.process.wait(SECONDS)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def saved(folder: Path) -> list[str]:
    """The checkpoints, in the order in which they were saved."""
    return sorted(file.name for file in folder.glob("checkpoint-*.pt"))


def number(name: str) -> int:
    """The how manieth a checkpoint is."""
    return int(name.split("-")[1])


def test_torchrun_restarts_it_and_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    usual = ("--standalone", "--nproc-per-node=2", "--max-restarts=2")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    job = Job(straight, tmp_path / "straight.log", *usual, slow=False)
    assert job.end() == 0, job.output
    job = Job(killed, tmp_path / "killed.log", *usual, slow=True)
    try:
        for restart, victim in ((0, 1), (1, 0)):
            before = number(saved(killed)[-1]) if killed.exists() and saved(killed) else 0
            job.until(lambda restart=restart: len([key for key in job.ranks() if key[0] == restart]) == 2)
            job.until(lambda before=before: saved(killed) and number(saved(killed)[-1]) >= before + 2)
            os.kill(job.ranks()[restart, victim], signal.SIGKILL)
        assert job.end() == 0, job.output
    finally:
        job.end()
    assert sorted(job.ranks()) == [(restart, rank) for restart in range(3) for rank in range(2)]
    # Each checkpoint was saved once: no step behind one was done twice.
    assert number(saved(killed)[-1]) == number(saved(straight)[-1]) == TOTAL // SAVE_EVERY
    one, other = (torch.load(at / saved(at)[-1], weights_only=True) for at in (straight, killed))
    assert one["step"] == other["step"] == TOTAL
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    moments = one["optimizer"]["state"], other["optimizer"]["state"]
    assert moments[0].keys() == moments[1].keys() != set()
    for parameter, state in moments[0].items():
        assert all(torch.equal(state[name], moments[1][parameter][name]) for name in ("exp_avg", "exp_avg_sq"))


def test_asked_by_sigterm_it_leaves_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "asked"
    job = Job(folder, tmp_path / "first.log", "--standalone", "--nproc-per-node=2", slow=True)
    try:
        job.until(lambda: folder.exists() and saved(folder))
        os.kill(job.ranks()[0, 1], signal.SIGTERM)  # one rank alone
        assert job.end() == 0, job.output
    finally:
        job.end()
    done = [int(one) for one in re.findall(r": (\d+) of 60 steps are done", job.output)]
    assert len(done) == 2 and done[0] == done[1] < TOTAL
    job = Job(folder, tmp_path / "second.log", "--standalone", "--nproc-per-node=3", slow=False)
    assert job.end() == 0, job.output
    assert job.output.count("60 of 60 steps are done") == 3
    # What was saved when it was asked to leave, and then once for every multiple of SAVE_EVERY.
    extra = done[0] % SAVE_EVERY != 0
    assert number(saved(folder)[-1]) == TOTAL // SAVE_EVERY + extra
