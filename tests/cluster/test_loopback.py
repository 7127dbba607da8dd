"""A run whose launcher says another name of this machine than 127.0.0.1."""

from __future__ import annotations

import time

import pytest

from lockstep import cluster, ranks
from lockstep.ranks import messages
from lockstep.ranks.channel import Channel

MEETS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print(os.environ["MASTER_ADDR"])
"""


def test_the_ranks_meet_at_the_name_that_they_are_told() -> None:
    run = ranks.run(ranks.Source(MEETS), 2, network=cluster.loopback("localhost"))
    assert run.cause is None
    assert [report.stdout.strip() for report in run.ranks] == ["localhost", "localhost"]


def test_an_address_of_another_machine_is_no_run() -> None:
    with pytest.raises(ranks.NotRun, match=r"nothing can listen at 192\.0\.2\.1"):
        ranks.run(ranks.Source(MEETS), 2, network=cluster.loopback("192.0.2.1"))


def test_a_client_that_still_sends_hears_why_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the supervisor has refused the run before the client has sent all of it."""
    send = Channel.send

    def late(self: Channel, message: object, blob: bytes = b"") -> None:
        if isinstance(message, messages.Arguments):
            time.sleep(0.5)
        send(self, message, blob)

    monkeypatch.setattr(Channel, "send", late)
    with pytest.raises(ranks.NotRun, match="nothing can listen at"):
        ranks.run(ranks.Source(MEETS), 2, network=cluster.loopback("192.0.2.1"))
