"""A rendezvous that nobody completes: the host asks its own store again and again, so it never stands still."""

import pytest

from lockstep import ranks
from lockstep.ranks import Outcome

ELSEWHERE = """\
import os, torch.distributed as dist
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # nobody listens there
dist.init_process_group("gloo")
"""
# Like a launcher that sets an address and nothing else: rank 0 hosts the store.
HOSTED = """\
import os, time, torch.distributed as dist
rank = int(os.environ["RANK"])
place = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 0:
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place.set("port", str(probe.getsockname()[1]))
os.environ.update(MASTER_PORT=place.get("port").decode(), TORCHELASTIC_USE_AGENT_STORE="False")
"""


def run(text: str, size: int = 2) -> ranks.Run:
    """A deadline far beyond the verdict, so that reaching it is a failure and no luck."""
    return ranks.run(ranks.Source(text), size, deadline=90)


def test_address_changed() -> None:
    """The first line says where they wait, and what the launcher had set."""
    result = run(ELSEWHERE)
    assert result.outcomes == [Outcome.HUNG] * 2
    assert result.cause is not None and result.cause.kind == "hang"
    assert "localhost:1," in result.cause.headline and "the launcher had set 127.0.0.1:" in result.cause.headline
    assert result.cause.frame is not None and result.cause.frame.line == 3


def test_a_rank_never_comes() -> None:
    """The host waits for a rank that has finished without joining."""
    result = run(HOSTED + "if rank == 0:\n    dist.init_process_group('gloo')\n")
    assert result.outcomes == [Outcome.HUNG, Outcome.RETURNED]
    assert result.cause is not None and result.cause.ranks == (1,)
    assert result.cause.headline == "rank 1 finished without init_process_group; rank 0 waits there."


@pytest.mark.parametrize(
    "what",
    [
        "time.sleep(8)",
        pytest.param("end = time.monotonic() + 8\nwhile time.monotonic() < end: pass", marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_is_no_hang(what: str) -> None:
    """Whoever still computes or sleeps may come yet."""
    late = "if rank == 1:\n" + "\n".join(f"    {line}" for line in what.splitlines())
    result = run(HOSTED + late + "\ndist.init_process_group('gloo')\ndist.barrier()\nprint('met')\n")
    assert result.ok, result.cause
    assert [report.stdout for report in result.ranks] == ["met\n"] * 2
