"""What `lockstep run` says to programs: `--json`, `--report`, annotations of GitHub Actions, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import only

from lockstep.commands import run

HANGS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(2)
print("begins")
if dist.get_rank() == 1:
    dist.broadcast(total, 0)
dist.all_reduce(total)
"""
DRIFTS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""

UNUSED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
class Net(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.frozen, self.layers = torch.nn.Linear(2, 2), torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))
        self.frozen.requires_grad_(False)
    def forward(self, x): return self.layers[0](self.frozen(x))
dist.init_process_group("gloo")
model = DistributedDataParallel(Net({layers}))
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    file = tmp_path / "train.py"
    file.write_text(HANGS)
    return file


def test_json_is_all_that_stdout_holds(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run.main(["-n", "2", "--json", str(script)]) == 1
    said = capsys.readouterr()
    found = only(said.out)
    assert found["outcome"] == "hang" and found["exit_status"] == 1 and found["world_size"] == 2
    assert {row["rank"]: (row["waits_in"], row["at"][1]) for row in found["cause"]["rows"]} == {
        0: ("all_reduce #1", 8), 1: ("broadcast #1", 7)
    }  # fmt: skip
    assert [one["outcome"] for one in found["ranks"]] == ["hung", "hung"]
    assert [one["at"] for one in found["ranks"]] == [[str(script), 8], [str(script), 7]]
    assert found["lines"][0].startswith("HANG after") and found["lines"][0] in said.err
    assert said.err.count("begins") == 2 and "::error" not in said.err  # of the ranks' own output, nothing is lost


def test_json_of_a_run_that_ends_well(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("print('done')")
    assert run.main(["-n", "1", "--json", str(script)]) == 0
    found = only(capsys.readouterr().out)
    assert found["outcome"] == "ok" and found["exit_status"] == 0 and found["cause"] is None and found["lines"] == []


def test_a_page(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = script.parent / "report.html"
    assert run.main(["-n", "2", "--report", str(page), str(script)]) == 1
    written = page.read_text()
    assert f"Report: {page}" in capsys.readouterr().err
    assert "<title>" in written and "dist.broadcast(total, 0)" in written and "← rank 1" in written
    assert "<script" not in written and "http" not in written  # it stands alone
    for bad in ("report.txt", str(script.parent / "none" / "report.html")):
        with pytest.raises(SystemExit) as ended:
            run.main(["--report", bad, str(script)])
        assert ended.value.code == 2


def test_github_marks_the_line(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(script.parent))
    assert run.main(["-n", "2", str(script)]) == 1
    commands = [line for line in capsys.readouterr().err.splitlines() if line.startswith("::")]
    assert len(commands) == 1
    assert commands[0].startswith("::error title=HANG,file=train.py,line=") and "broadcast #1" in commands[0]
    script.write_text(DRIFTS)
    assert run.main(["-n", "2", "--watch-replicas", "--json", str(script)]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["outcome"] == "replicas differ"
    assert "::error title=REPLICAS,file=train.py,line=7::DRIFT at step 1" in said.err
    assert "%0A" in said.err or said.err.count("::error") == 1


@pytest.mark.parametrize(
    "layers, told",
    [
        (2, "still waits for them: layers.1.weight, layers.1.bias"),
        (
            5,
            "layers.1.weight, layers.1.bias, layers.2.weight, layers.2.bias, layers.3.weight, layers.3.bias and 2 more",
        ),
    ],
)
def test_parameters_without_a_gradient_by_name(
    script: Path, capsys: pytest.CaptureFixture[str], layers: int, told: str
) -> None:
    """torch says their numbers, counted without the frozen ones."""
    script.write_text(UNUSED.format(layers=layers))
    assert run.main(["-n", "2", "--json", str(script)]) == 1
    assert only(capsys.readouterr().out)["cause"]["headline"].endswith(f"{told}")


LOADS = """
import torch, torch.distributed as dist
class Images(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        raise {raised}
dist.init_process_group("gloo")
for batch in torch.utils.data.DataLoader(Images(), num_workers=1): pass
"""


@pytest.mark.parametrize("raised, told", [
    ('OSError("image 0 is cut off")', "OSError in DataLoader worker process 0: image 0 is cut off"),
    ("IndexError", "IndexError in DataLoader worker process 0"),
])  # fmt: skip
def test_what_a_worker_of_a_loader_raised(
    script: Path, capsys: pytest.CaptureFixture[str], raised: str, told: str
) -> None:
    """Of torch's two tracebacks the inner one has the line."""
    script.write_text(LOADS.format(raised=raised))
    assert run.main(["-n", "1", "--json", str(script)]) == 1
    cause = only(capsys.readouterr().out)["cause"]
    assert cause["headline"] == f"rank 0 raised {told}" and cause["at"] == [str(script), 6], cause


def test_a_call_after_a_timeout_that_was_caught(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("""
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try: dist.irecv(torch.ones(1), 1).wait(datetime.timedelta(seconds=1))
    except RuntimeError: pass
dist.all_reduce(torch.ones(1))
""")
    assert run.main(["-n", "2", "--json", str(script)]) == 1
    cause = only(capsys.readouterr().out)["cause"]
    assert any("time limit" in note for note in cause["notes"]), cause


@pytest.mark.parametrize("then", ["dist.barrier()", "raise SystemExit(3)", "os._exit(0)"])
def test_the_error_that_ended_a_thread_is_told(script: Path, capsys: pytest.CaptureFixture[str], then: str) -> None:
    """Whatever became of its rank."""
    script.write_text(f"""
import os, threading, torch, torch.distributed as dist
dist.init_process_group("gloo")
def work():
    raise KeyError("label")
if dist.get_rank() == 1:
    thread = threading.Thread(target=work); thread.start(); thread.join()
    {then}
else:
    dist.recv(torch.ones(1), 1)
""")
    assert run.main(["-n", "2", "--json", str(script)]) == 1
    cause = only(capsys.readouterr().out)["cause"]
    assert f"A thread of rank 1 ended with KeyError: 'label' at {script.name}:5." in cause["notes"], cause


CAUGHT = """
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
short = dist.new_group(timeout=datetime.timedelta(seconds={limit}))
if dist.get_rank() == 0:
    try: dist.all_reduce(torch.ones(1), group=short)
    except RuntimeError: pass
    {then}
elif dist.get_rank() == 1:
    time.sleep(2)
    {second}
else:
    time.sleep(4)
dist.all_reduce(torch.ones(1), group=short)
"""


@pytest.mark.parametrize("then", ["raise SystemExit", "dist.barrier()"])
def test_a_peer_that_has_caught_its_timeout_is_named(
    script: Path, capsys: pytest.CaptureFixture[str], then: str
) -> None:
    """Whether it has ended since, or waits elsewhere: the other rank's error speaks only of a closed connection."""
    script.write_text(CAUGHT.format(limit=1, then=then, second="pass"))
    assert run.main(["-n", "2", "--json", str(script)]) == 1
    cause = only(capsys.readouterr().out)["cause"]
    said = f"rank 0 caught the error of its all_reduce #1; all_reduce #1 of rank 1 at {script.name}:14 then found"
    assert cause["headline"].startswith(said), cause
    assert cause["at"] == [str(script), 6] and any("time limit" in note for note in cause["notes"]), cause


def test_a_peer_that_has_caught_an_echo_is_no_cause(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(CAUGHT.format(limit=50, then="time.sleep(9)", second="import os; os._exit(0)"))
    assert run.main(["-n", "3", "--json", str(script)]) == 1
    headline = only(capsys.readouterr().out)["cause"]["headline"]
    assert headline.startswith("rank 1 left by os._exit"), headline
