"""Nodes that are machines of their own: two supervisors on this machine's loopback find each other and act as one run."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep import ranks
from lockstep.ranks import text
from lockstep.ranks.channel import Channel
from lockstep.ranks.hang_detector import HangDetector
from lockstep.ranks.job import Described, Job, TargetKind
from lockstep.ranks.member import Member, RunState
from lockstep.ranks.messages import Join, Pulse, Role

SECONDS = 60
BEGIN = """
import os, time, torch, torch.distributed as dist
from lockstep.ranks import observe
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
"""


@dataclass
class Node:
    """One of two: what it said while it ran, and its result."""

    result: Future[ranks.Run] = field(default_factory=Future)
    notices: list[str] = field(default_factory=list)

    def run(self) -> ranks.Run:
        return self.result.result(SECONDS)

    def said(self, what: str) -> bool:
        return any(what in notice for notice in self.notices)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(
    code: str, port: int, per_node: int = 2, numbers: tuple[int | None, ...] = (0, 1), **changed: Any
) -> list[Node]:
    """Both nodes, each as a `ranks.run` of its own; `changed` are arguments, or `{node: …}` of one of them."""
    nodes = [Node() for _ in numbers]
    pool = ThreadPoolExecutor(len(nodes))
    for index, node in enumerate(nodes):
        given = {name: value[index] if isinstance(value, dict) else value for name, value in changed.items()}
        meeting = ranks.Meeting(
            "127.0.0.1", port, numbers[index], given.pop("secret", ""), given.pop("patience", SECONDS)
        )
        size = given.pop("world_size", 2 * per_node)
        options = {"nodes": 2, "deadline": SECONDS, "meeting": meeting, "on_notice": node.notices.append, **given}
        node.result = pool.submit(ranks.run, ranks.Source(BEGIN + code, "train.py"), size, **options)
    pool.shutdown(wait=False)
    return nodes


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not true() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert true()


def test_they_train_together_with_torchruns_variables(port: int) -> None:
    names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE"
    nodes = start(f"observe('seen', [[os.environ[n] for n in {names!r}.split()], total.item()])", port)
    runs = [node.run() for node in nodes]
    assert [run.ok for run in runs] == [True, True], [run.cause for run in runs]
    assert [run.node for run in runs] == [0, 1]
    seen = [value for run in runs for value in run.observed("seen")[: 2 if run is runs[0] else None]]
    assert seen == [[[str(rank), str(rank % 2), str(rank // 2), "4", "2", "2"], 1111.0] for rank in range(4)]


def test_without_numbers_the_first_to_have_the_address_is_node_0(port: int) -> None:
    runs = [node.run() for node in start("", port, per_node=1, numbers=(None, None))]
    assert [run.ok for run in runs] == [True, True], [run.cause for run in runs]
    assert sorted(run.node for run in runs) == [0, 1]


def test_a_hang_across_nodes_is_told_by_node_0_with_the_nodes_named(port: int) -> None:
    began = time.monotonic()
    nodes = start("if rank == 3:\n    dist.broadcast(total, 0)\ndist.all_reduce(total)", port)
    first, second = (node.run() for node in nodes)
    assert time.monotonic() - began < SECONDS / 2  # found, not waited for
    assert first.cause is not None and first.cause.kind is ranks.Kind.HANG and first.cause.ranks == (3,)
    host = socket.gethostname()
    assert [row.node for row in first.cause.rows] == [f"0 ({host})"] * 2 + [f"1 ({host})"] * 2
    assert "rank 3 called broadcast #1; ranks 0, 1 and 2 did not, and went\non to" in text.describe(first)
    assert [report.outcome for report in first.ranks] == [ranks.Outcome.HUNG] * 4
    # The other node has the same first line, and says where the rest is.
    assert second.cause is not None and second.cause.headline == first.cause.headline
    assert "node 0" in second.cause.notes[0]


def test_a_failure_elsewhere_is_the_cause_and_what_follows_is_its_echo(port: int) -> None:
    nodes = start("if rank == 3:\n    raise ValueError('too hot')\ndist.all_reduce(total)", port)
    first, second = (node.run() for node in nodes)
    assert first.cause is not None and first.cause.kind is ranks.Kind.RAISED and first.cause.ranks == (3,)
    assert first.cause.error is not None and first.cause.error.message == "too hot" and first.cause.error.frame
    assert f"Rank 3: node 1 ({socket.gethostname()})." in first.cause.notes
    assert second.cause is not None and second.cause.headline == first.cause.headline


def test_a_killed_rank_of_another_node(port: int) -> None:
    first, _ = (
        node.run() for node in start("if rank == 2:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(total)", port)
    )
    assert first.cause is not None and first.cause.kind is ranks.Kind.CRASHED and first.cause.ranks == (2,)
    assert first.ranks[2].code == -signal.SIGKILL


def test_a_late_rank_of_another_node_ends_nothing(port: int, tmp_path: Any) -> None:
    file = tmp_path / "go"
    code = f"while rank == 3 and not os.path.exists({str(file)!r}):\n    time.sleep(0.05)\ndist.all_reduce(total)"
    nodes = start(code, port, late_after=0.5)
    until(lambda: nodes[0].said("have waited"))
    assert nodes[0].said("rank 3 on node 1 is at") and not nodes[1].said("have waited")
    file.touch()
    assert [node.run().ok for node in nodes] == [True, True]
    assert nodes[0].said("Rank 3 called all_reduce #2")


def test_what_differs_between_replicas_of_two_nodes_is_found(port: int) -> None:
    code = ("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))\n"
            "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n")  # fmt: skip
    first, _ = (node.run() for node in start(code, port, per_node=1, watch_replicas=True))
    assert first.replicas is not None and first.replicas.drift is not None and first.replicas.drift.step == 1


def test_only_what_other_machines_have_told_lately_counts_as_still() -> None:
    run = RunState(
        Job(4, Described(TargetKind.SOURCE), nodes=2), elsewhere=[Member(Role.RANK, rank, 0, node=1) for rank in (2, 3)]
    )
    detector = HangDetector(run, lambda members: None)
    detector.clock.since = now = time.monotonic() - 50
    assert detector.still_for() == 0  # node 1 has told nothing
    for told, pulse, still in ((50, Pulse(5.0), 5.0), (50, Pulse(0.0), 0.0), (40, Pulse(5.0), 0.0)):
        run.pulses[1] = (now + told, pulse)
        assert detector.still_for() == still


REFUSED = {
    "their numbers of nodes": (
        {"nodes": {0: 2, 1: 4}, "world_size": {0: 2, 1: 4}},
        "--nnodes 4, node 0 with --nnodes 2",
    ),
    "their numbers of ranks": ({"world_size": {0: 2, 1: 4}}, "2 ranks and node 0 1"),
    "their secrets": ({"secret": {0: "a", 1: "b"}}, "LOCKSTEP_SECRET"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_who_does_not_fit_is_told_why_and_node_0_too(case: str, port: int) -> None:
    changed, why = REFUSED[case]
    nodes = start("", port, per_node=1, patience={0: 3, 1: SECONDS}, **changed)
    with pytest.raises(ranks.NotRun, match="turned this node away"):
        nodes[1].run()
    until(lambda: nodes[0].said(why))
    with pytest.raises(ranks.NotRun, match="1 of 2 nodes is here"):
        nodes[0].run()


def test_who_talks_nonsense_changes_nothing(port: int) -> None:
    """A scanner, somebody without the secret, somebody who says nothing: the run begins when its nodes have come."""
    (first,) = start("", port, per_node=1, numbers=(0,))
    until(lambda: first.said("1 of 2 nodes"))
    silent = socket.create_connection(("127.0.0.1", port))
    with socket.create_connection(("127.0.0.1", port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        channel = Channel(stranger)
        channel.send(Join("guessed", "", 2, 1, "evil", 0, 1, 1))
        stranger.settimeout(SECONDS)
        answers = [channel.wait(), channel.wait()]
        assert answers[1] is not None and "secret" in answers[1][0]["why"]
    (second,) = start("", port, per_node=1, numbers=(1,))
    assert first.run().ok and second.run().ok
    silent.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_gone_ends_the_run_on_the_other(victim: int, port: int) -> None:
    began = time.monotonic()
    code = f"if rank == {victim}:\n    os.kill(os.getppid(), 9)\ntime.sleep(300)"
    nodes = start(code, port, per_node=1)
    with pytest.raises(ranks.RanksError):
        nodes[victim].run()
    left = nodes[1 - victim].run()
    assert time.monotonic() - began < SECONDS / 2
    assert left.cause is not None and left.cause.kind is ranks.Kind.NODE_LOST
    assert left.cause.headline == f"node {victim} ({socket.gethostname()}) is gone: its connection has ended."


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_told_to_end_ends_both(victim: int, port: int) -> None:
    code = f"if rank == {victim}:\n    os.kill(os.getppid(), 15)\ntime.sleep(300)"
    first, second = (node.run() for node in start(code, port, per_node=1))
    assert first.cause is not None and first.cause.kind is ranks.Kind.INTERRUPTED
    where = f" on node 1 ({socket.gethostname()})" if victim else ""
    assert first.cause.headline == f"interrupted{where}: ranks 0 and 1 were still running."
    assert second.cause is not None and second.cause.headline == first.cause.headline
