"""`lockstep run` typed on two hosts, as on a real cluster: they train together, and what ends a run on one is told on both."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machine import needs, wait_all

from lockstep import cluster
from lockstep.cluster.nodes import own_environment

pytestmark = [needs("hosts"), pytest.mark.slow]
SECONDS = 150
TRAIN = """
import os, socket, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
print("ready", socket.gethostname(), os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], rank, total.item())
if sys.argv[1] == "hang" and rank == 3:
    dist.broadcast(total, 0)
if sys.argv[1] == "work":
    time.sleep(300)
dist.all_reduce(total)
"""


@pytest.fixture
def nodes() -> Iterator[cluster.Nodes]:
    with cluster.Nodes(2) as both:
        yield both


def start(
    nodes: cluster.Nodes, folder: Path, how: str, *options: str, meet: str = "--rdzv-endpoint=node0:29500"
) -> list[cluster.Process]:
    (folder / "train.py").write_text(TRAIN)
    environment = {**own_environment(), "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--nnodes", "2", meet, *options]
    numbers = ([], []) if "--rdzv-backend=c10d" in options else (["--node-rank", "0"], ["--node-rank", "1"])
    return [
        nodes.run(node, [*command, *numbers[node], "train.py", how], cwd=folder, env=environment) for node in range(2)
    ]


def until(process: cluster.Process, said: str, count: int = 1) -> None:
    give_up = time.monotonic() + SECONDS
    while len(re.findall(said, process.output)) < count and time.monotonic() < give_up:
        time.sleep(0.05)
    assert len(re.findall(said, process.output)) >= count, process.output


def test_they_train_together_and_a_hang_is_explained(nodes: cluster.Nodes, tmp_path: Path) -> None:
    both = start(nodes, tmp_path, "hang", "--rdzv-backend=c10d")
    assert wait_all(both, SECONDS) == [1, 1], [one.output for one in both]
    for node, process in enumerate(both):
        seen = sorted(re.findall(r"\[rank \d\] ready (.*)", process.output))
        assert seen == [f"node{node} {node} {local} {2 * node + local} 1111.0" for local in (0, 1)], process.output
        assert "rank 3 called broadcast #1; ranks 0, 1 and 2 did not, and" in " ".join(process.output.split())
    assert re.search(r"rank 3 ← +waits in broadcast #1\n.*node 1 \(node1\)\n.*train\.py:8", both[0].output)
    assert "The terminal of node 0 (node0) shows the evidence." in both[1].output


def test_who_cannot_reach_node_0_says_so_and_ctrl_c_on_one_ends_both(nodes: cluster.Nodes, tmp_path: Path) -> None:
    nodes.block_all_but(0)
    both = start(nodes, tmp_path, "work", meet="--master-addr=node0")
    until(both[1], "Waiting for node 0 at node0:29500: it doesn't answer")
    until(both[0], "1 of 2 nodes is here")
    nodes.unblock(0)
    for process in both:
        until(process, "ready", 2)
    both[1].send_signal(signal.SIGINT)
    assert wait_all(both, SECONDS) == [130, 130], [one.output for one in both]
    for process in both:
        assert "Interrupted on node 1 (node1): ranks 0, 1, 2 and 3 were still running." in process.output


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("all killed", "is gone: its connection has ended"),
        ("command killed", "is gone: its connection has ended"),
        ("unreachable", "has not answered for 10 s"),
    ],
)
def test_a_dead_node_and_an_unreachable_one_end_the_run(
    how: str, said: str, nodes: cluster.Nodes, tmp_path: Path
) -> None:
    both = start(nodes, tmp_path, "work")
    for process in both:
        until(process, "ready", 2)
    began = time.monotonic()
    cut = how == "unreachable"
    if cut:
        for node in range(2):
            nodes.block_all_but(node)
    elif how == "command killed":
        both[1].kill()
    else:
        nodes.kill(1)
    assert both[0].wait(SECONDS) == 1
    assert time.monotonic() - began < SECONDS / 2  # gloo itself would wait 30 minutes
    assert f"NODE LOST: node 1 (node1) {said}" in both[0].output
    assert both[1].wait(SECONDS) == (1 if cut else -signal.SIGKILL)
    assert not cut or f"NODE LOST: node 0 (node0) {said}" in both[1].output
