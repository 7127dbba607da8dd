"""The reference `MiniDDP` behind the interface of Stanford's CS336 (2025): construct, forward, finish.

That course's tests call a class through adapters that the student fills in. Here they take one line each.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep import ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

BODY = """\
import copy, sys
sys.path.insert(0, SOLUTIONS)
import torch
import torch.distributed as dist
from mini_ddp import MiniDDP

# The adapter: three functions, three lines.
get_ddp_bucketed = lambda module, bucket_size_mb: MiniDDP(module, bucket_size_mb)
ddp_bucketed_on_after_backward = lambda ddp_model, optimizer: ddp_model.finish_gradient_synchronization()
ddp_bucketed_on_train_batch_start = lambda ddp_model, optimizer: None

# As that course uses it: each rank half of a batch, against one model on the whole batch.
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
plain = torch.nn.Sequential(torch.nn.Linear(10, 20, bias=False), torch.nn.ReLU(), torch.nn.Linear(20, 5))
plain[2].bias.requires_grad_(False)
for tensor in plain.state_dict().values():
    dist.broadcast(tensor, 0)
ddp = get_ddp_bucketed(copy.deepcopy(plain), 0.0004)
one = torch.optim.SGD(plain.parameters(), lr=0.1)
two = torch.optim.SGD(ddp.parameters(), lr=0.1)
torch.manual_seed(42)
x, y = torch.randn(20, 10), torch.randn(20, 5)
for _ in range(5):
    ddp_bucketed_on_train_batch_start(ddp, two)
    one.zero_grad()
    two.zero_grad()
    torch.nn.functional.mse_loss(plain(x), y).backward()
    one.step()
    half = slice(rank * 10, rank * 10 + 10)
    torch.nn.functional.mse_loss(ddp(x[half]), y[half]).backward()
    ddp_bucketed_on_after_backward(ddp, two)
    two.step()
    for a, b in zip(plain.parameters(), ddp.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
"""


def test_cs336_interface_fits() -> None:
    """Construct, forward and finish train as one process does on the joined batch."""
    run = ranks.run(ranks.Source(BODY.replace("SOLUTIONS", repr(os.fspath(ROOT / "solutions")))), 2, deadline=60)
    assert run.ok, run.cause
