"""`solutions/train.py` among faults: an exception on one rank, another number of ranks, a folder that is taken or of no
use, a loss that is no number. What kills it from outside is in `autograder/test_train.py` and `tests/cluster`."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

import pytest
import torch

from lockstep import ranks

SOLUTION = Path(__file__).resolve().parents[1] / "solutions" / "train.py"
STEPS = 16  # an epoch: 96 samples, 6 a step
BEGIN = f"""
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("train_reference", {str(SOLUTION)!r})
train = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
draw = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 64, generator=draw), torch.randint(10, (96,), generator=draw)
train.datasets = lambda task: (train.TensorDataset(x, y), train.TensorDataset(x[:7], y[:7]))
def start(*options):
    usual = "--batch-size", "6", "--save-every", "5", "--log-every", "4", "--folder", "run", "--epochs", "1"
    return train.main([*usual, *options])
def refused(*options):
    try:
        start(*options)
    except (RuntimeError, FloatingPointError) as error:
        print("refused:", error, flush=True)
"""
FAILS = """
given = train.train_step
calls = 0
def train_step(*arguments):
    global calls
    calls += 1
    if calls == 9 and train.dist.get_rank() == 1:
        raise ValueError("a broken sample")
    return given(*arguments)
train.train_step = train_step
"""


def run(folder: Path, body: str, world_size: int = 2) -> ranks.Run:
    """A start in this folder."""
    script = folder / "script.py"
    script.write_text(BEGIN + body)
    return ranks.run(ranks.Script(str(script)), world_size, deadline=120, directory=folder)


def lines(result: ranks.Run) -> list[list[str]]:
    """What each rank printed."""
    assert result.cause is None, result.cause
    return [rank.stdout.splitlines() for rank in result.ranks]


def model(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a complete job."""
    state = torch.load(folder / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == STEPS and len(state["random"]) == 3
    return state["model"]


def test_after_an_exception_on_one_rank_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """On three ranks, where the order of sums shows: what `--exact` is for."""
    undisturbed, failed = tmp_path / "undisturbed", tmp_path / "failed"
    undisturbed.mkdir(), failed.mkdir()
    lines(run(undisturbed, "start('--exact')", 3))
    cause = run(failed, FAILS + "start('--exact')", 3).cause
    assert cause is not None and cause.ranks == (1,) and cause.error is not None
    assert cause.error.message == "a broken sample"
    assert lines(run(failed, "start('--exact')", 3))[0][0] == f"3 ranks, cpu; 5 of {STEPS} steps are done"
    first, second = model(undisturbed), model(failed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    lines(run(tmp_path, "start()", 2))
    told, *others = lines(run(tmp_path, "start('--epochs', '2')", 3))
    assert told[0] == f"3 ranks, cpu; {STEPS} of {2 * STEPS} steps are done" and not any(others)
    assert told[-1].startswith("epoch 2/2")


def test_a_folder_has_one_job_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # only a lock of its own alone is refused then
        said = lines(run(tmp_path, "refused()"))
    assert said == [["refused: another job works in run: give each its own --folder"]] * 2
    assert len(lines(run(tmp_path, "start()"))[0]) > 1  # the lock has gone with the job


@pytest.mark.parametrize("fault", ["a file in its way", "a checkpoint that cannot be read"])
def test_without_a_usable_folder_every_rank_refuses(tmp_path: Path, fault: str) -> None:
    if fault == "a file in its way":
        (tmp_path / "run").write_text("")
    else:
        (tmp_path / "run" / "checkpoint.pt").mkdir(parents=True)
    said = lines(run(tmp_path, "refused()"))
    assert len(said[0]) == 1 and said[0] == said[1]
    assert re.match(
        r"refused: (run cannot be used|no whole checkpoint: run/checkpoint\.pt cannot be read): ", said[0][0]
    )


def test_a_loss_that_is_no_number_ends_the_job_on_every_rank(tmp_path: Path) -> None:
    """Before the checkpoint of that step, so the last one is of use."""
    said = lines(run(tmp_path, "x[:] = float('nan'); refused('--save-every', '4')"))
    assert said[0][-1] == said[1][-1] == "refused: step 4: loss nan, gradient norm nan; the last checkpoint is older"
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_the_log_is_for_machines_too(tmp_path: Path) -> None:
    told = lines(run(tmp_path, "start('--workers', '1')"))[0]
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged] == [4, 8, 12, 16]
    for one, line in zip(logged, [line for line in told if line.startswith("step ")], strict=True):
        assert line.startswith(f"step {one['step']}/{STEPS}  loss {one['loss']:.4f}  ")
        assert one["gradient_norm"] > 0 and one["samples_per_second"] > 0 and 0 <= one["waiting_for_data"] <= 1
