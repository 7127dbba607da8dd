"""`solutions/train.py` among faults: an exception on one rank, a different number of ranks, a folder that is taken or of no
use, a loss that is no number, a signal during evaluation or to a loader's worker. What kills it from outside is in
`autograder/test_train.py` and `tests/cluster`."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
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
DROPOUT = """
nn = train.nn
train.build_model = lambda task: nn.Sequential(nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 10))
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


def model(folder: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The weights of a complete job."""
    state = torch.load(folder / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == steps
    return state["model"]


def test_after_an_exception_on_one_rank_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """On three ranks, where the order of sums shows: what `--exact` is for. With dropout, which draws random numbers."""
    undisturbed, failed = tmp_path / "undisturbed", tmp_path / "failed"
    undisturbed.mkdir(), failed.mkdir()
    lines(run(undisturbed, DROPOUT + "start('--exact')", 3))
    cause = run(failed, DROPOUT + FAILS + "start('--exact')", 3).cause
    assert cause is not None and cause.ranks == (1,) and cause.error is not None
    assert cause.error.message == "a broken sample"
    assert lines(run(failed, DROPOUT + "start('--exact')", 3))[0][0] == f"3 ranks, cpu; 5 of {STEPS} steps are done"
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
    why = "RuntimeError: another job works there; give each its own --folder"
    assert said == [[f"refused: rank 0 could not claim run: {why}"]] * 2
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
        r"refused: rank 0 could not (claim run: FileExistsError|load run/checkpoint\.pt: RuntimeError: .* is damaged): ",
        said[0][0],
    )


def test_a_loss_that_is_no_number_ends_the_job_on_every_rank(tmp_path: Path) -> None:
    """Also in a step that isn't logged, before its checkpoint would replace a usable one."""
    said = lines(run(tmp_path, "x[:] = float('nan'); refused('--save-every', '3')"))
    assert said[0][-1] == said[1][-1] == "refused: step 3: loss nan, gradient norm nan"
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


CLOCK = """
import types
now = 0.0
def perf_counter():  # each time it is asked a second later, and after ten times two seconds
    global now
    now += 1 if now < 10 else 2
    return now
train.time = types.SimpleNamespace(perf_counter=perf_counter)
"""


def test_the_log_is_for_machines_too(tmp_path: Path) -> None:
    """On this clock the first four steps of 6 samples take 9 s: two questions a step, one for the line. Loading takes 4 of
    them. The next four take twice as long, and the line tells of these alone."""
    told = lines(run(tmp_path, CLOCK + "start('--workers', '1')"))[0]
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged] == [4, 8, 12, 16]
    assert [one["samples_per_second"] for one in logged] == [24 / 9, 24 / 18, 24 / 18, 24 / 18]
    for one, line in zip(logged, [line for line in told if line.startswith("step ")], strict=True):
        assert line == f"step {one['step']}/{STEPS}  loss {one['loss']:.4f}  {one['samples_per_second']:.0f} samples/s"
        assert {*one} == {"step", "loss", "gradient_norm", "lr", "samples_per_second", "waiting_for_data"}
        assert one["gradient_norm"] > 0 and one["lr"] > 0 and one["waiting_for_data"] == 4 / 9


PRETENDS_A_GPU = """
from pathlib import Path
cuda = train.torch.cuda
cuda.is_available, cuda.get_device_name = lambda: True, lambda: "NVIDIA H100 80GB HBM3"
cuda.max_memory_allocated = lambda: 5_000_000_000
train.dist.get_world_size = lambda: 2
log = train.Log(Path(), 494_500_000_000)
log.samples = 2000
log.write(7, 9, loss=1.5)
"""


def test_on_a_gpu_the_log_tells_its_memory_and_how_busy_it_is(tmp_path: Path) -> None:
    """2,000 samples a second on two GPUs, at half an H100's 989e12 operations a second: MFU is 0.5."""
    (told,) = lines(run(tmp_path, CLOCK + PRETENDS_A_GPU, 1))
    assert told == ["step 7/9  loss 1.5000  2,000 samples/s  memory_gb 5.00  mfu 0.50"]
    logged = json.loads((tmp_path / "log.jsonl").read_text())
    assert (logged["memory_gb"], logged["mfu"]) == (5.0, 0.5)


EVALUATING = """
import os, signal
evaluate, loss_of, tested = train.evaluate, train.loss_of, 0
test_set = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])  # 97 samples: rank 0 has one batch more
train.datasets = lambda task: (train.TensorDataset(x, y), train.TensorDataset(*test_set))
train.evaluate = lambda *given, **more: evaluate(*given, batch_size=4, **more)
def counted(model, *given):
    global tested
    tested += not model.training
    if tested == last and train.dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss_of(model, *given)
train.loss_of = counted
"""


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_signal_during_evaluation_ends_it(tmp_path: Path, epochs: int) -> None:
    """In the second of 13 batches, or 12 on rank 1. In the middle of a job one more step is made and saved; at its end nothing is missing."""
    undisturbed, asked = tmp_path / "undisturbed", tmp_path / "asked"
    undisturbed.mkdir(), asked.mkdir()
    body = EVALUATING + f"result = start('--epochs', '{epochs}')\nprint(result.steps, tested, result.loss is not None)"
    whole = lines(run(undisturbed, "last = -1\n" + body))
    told, other = lines(run(asked, "last = 2\n" + body))
    stopped = STEPS + (epochs == 2)
    assert told[-1] == other[-1] == f"{stopped} 2 False"
    assert not any(line.startswith("epoch") for line in told)
    assert epochs == 1 or told[-2] == f"asked to stop: saved after step {stopped} of {2 * STEPS}"
    again = lines(run(asked, "last = -1\n" + body))
    assert again[0][0] == f"2 ranks, cpu; {stopped} of {epochs * STEPS} steps are done"
    assert again[0][-2:] == [whole[0][-2], f"{epochs * STEPS} 13 True"]  # loss and accuracy of the last epoch
    first, second = (model(folder, epochs * STEPS) for folder in (undisturbed, asked))
    assert all(torch.equal(first[name], second[name]) for name in first)


WORKERS = """
import multiprocessing, os, signal, subprocess
given, calls, seen = train.train_step, 0, set()
def train_step(*arguments):
    global calls
    calls += 1
    seen.update(child.pid for child in multiprocessing.active_children())
    if calls == 2 * 16 + 5:
        for child in multiprocessing.active_children():
            subprocess.run(["kill", str(child.pid)])  # not this process: a worker ends well when its parent asks
            child.join(1)
        os.kill(os.getpid(), signal.SIGTERM)
    return given(*arguments)
train.train_step = train_step
start("--epochs", "4", "--workers", "1")
print(len(seen), "worker")
"""


def test_workers_live_through_all_epochs_and_signals(tmp_path: Path) -> None:
    """torchrun's SIGTERM goes to them too. A worker that dies of it would end its rank before it has saved."""
    told, other = lines(run(tmp_path, WORKERS))
    assert told[-2:] == ["asked to stop: saved after step 37 of 64", "1 worker"] and other == ["1 worker"]


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_its_workers(tmp_path: Path) -> None:
    """They ignore the SIGTERM by which multiprocessing asks them to end, and it would wait for them without end."""
    script = tmp_path / "script.py"
    script.write_text(BEGIN + FAILS.replace("get_rank() == 1", "get_rank() == 0") + "start('--workers', '1')")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command, environment = [sys.executable, str(script)], {**os.environ, **alone}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1 and "ValueError: a broken sample" in done.stderr, done.stderr
