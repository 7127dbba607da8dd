"""A run whose launcher says another name of this machine than 127.0.0.1."""

from __future__ import annotations

import pytest

from lockstep import cluster, ranks

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
