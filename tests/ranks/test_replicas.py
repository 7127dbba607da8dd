"""Watched replicas: the first step at which they differ, the tensor, the ranks, and the reason; and no false alarm."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from lockstep import ranks
from lockstep.ranks import text

PRELUDE = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
x = torch.randn(8, 4)
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self, order="ab"):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(4, 4))
    def forward(self, x):
        return self.b(self.a(x).relu())
def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)
def train(model, optimizer, steps=3, call=None):
    for step in range(steps):
        optimizer.zero_grad()
        (call or model)(x).square().mean().backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Case:
    """A body after `PRELUDE`, and what has to be found; `step` is None where nothing drifts."""

    name: str
    body: str
    step: int | None
    odd: tuple[int, ...] = ()
    says: str = ""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("equal", "m = DDP(Net()); train(m, sgd(m))", None, says=r"equal bit for bit after every step that all ranks took \(3\)"),
    Case("adam and two optimizers", "m = DDP(Net()); o = torch.optim.Adam(m.parameters()); train(m, o); train(m, sgd(m))", None,
         says=r"\(6\)"),
    Case("lr of one rank", "m = DDP(Net()); train(m, sgd(m, 0.1 + 0.1 * (rank == 2)))", 1, (2,),
         "lr is 0.2 on rank 2 and 0.1 on rank 0"),
    Case("lr of one rank, later", "m = DDP(Net()); o = sgd(m); train(m, o)\nif rank == 1: o.param_groups[0]['lr'] = 0.5\n"
         "train(m, o)", 4, (1,), "lr is 0.5 on rank 1 and 0.1 on rank 0"),
    Case("no wrapper, other seeds", "torch.manual_seed(rank); m = Net(); train(m, sgd(m))", 0, (0, 1, 2), "before the first step"),
    Case("no wrapper", "m = Net(); train(m, sgd(m))", 1, (0, 1, 2), "no model is wrapped in DDP"),
    Case("loaded late", "m = DDP(Net())\nif rank == 0: nn.init.zeros_(m.module.a.weight)\ntrain(m, sgd(m))", 0, (0,),
         r"before the first step, though DDP\(\) had made all ranks equal at cell line"),
    Case("bypassed", "m = DDP(Net()); train(m, sgd(m), call=m.module)", 1, (0, 1, 2), "the forward did not go through it"),
    Case("cast after wrapping", "m = DDP(Net()); m.double(); x = x.double(); train(m, sgd(m))", 1, (0, 1, 2),
         "its hooks stayed silent, so the model was under no_sync, or was cast"),
    Case("tail without averaging", "m = DDP(Net()); o = sgd(m); train(m, o)\nwith m.no_sync(): train(m, o, 1)", 4, (0, 1, 2),
         "no rank averaged a gradient before that step"),
    Case("unknown to DDP", "m = DDP(Net(), find_unused_parameters=True); m.module.b = nn.Linear(4, 4)\ntrain(m, sgd(m))", 1, (0, 1, 2),
         "b.weight and b.bias had gradients of each rank's own, those of 2 others were averaged"),
    Case("another order", "m = DDP(Net('ba' if rank == 1 else 'ab')); train(m, sgd(m))", 0, (1,),
         "rank 1 registered its layers in another order"),
    Case("gradients changed afterwards", "m = DDP(Net()); o = sgd(m)\nfor step in range(2):\n    o.zero_grad()\n"
         "    m(x).square().mean().backward()\n    if rank == 1 and step: m.module.a.weight.grad.add_(1)\n    o.step()",
         2, (1,), "a.weight had gradients of each rank's own"),
    Case("same samples", "torch.manual_seed(5); x = torch.randn(8, 4)\nm = DDP(Net()); train(m, sgd(m))", None,
         says="SAME WORK: at all 3 steps"),
    Case("statistics", "m = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))); train(m, sgd(m))", None,
         says=r"1.running_mean, 1.running_var differed between ranks"),
    Case("fewer steps", "m = Net(); o = torch.optim.SGD(m.parameters(), lr=0.0); train(m, o, 3 + (rank == 1))", None,
         says="rank 0: 3, rank 1: 4, rank 2: 3"),
    Case("no optimizer", "dist.barrier()", None, says="No optimizer took a step"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_watching_finds(case: Case) -> None:
    run = ranks.run(ranks.Source(PRELUDE + case.body), 3, watch_replicas=True)
    said = text.replicas(run).replace("\n", " ")
    assert run.ok, text.describe(run)
    assert re.search(case.says, said), said
    drift = run.replicas.drift if run.replicas else None
    if case.step is None:
        assert drift is None, said
        return
    assert drift is not None, said
    assert (drift.step, drift.ranks) == (case.step, case.odd), said
    assert drift.frame is not None and drift.frame.text.endswith(("optimizer.step()", "o.step()")), drift.frame
    assert (drift.amount is not None and drift.amount > 0) == (case.step > 0), drift


BLOWUPS = {
    "loss = (m(x) * (float('nan') if rank == 1 and step == 2 else 1)).sum()": (
        3, "NaN", (0, 1, 2), "NaN", (1,), r"NaN at step 3 \(cell line \d+\): a.weight on every rank holds NaN after it. "
        "Its gradient held NaN only on rank 1; DDP's average spread it to every rank."),
    "loss = m(x).sum() * (float('inf') if step == 1 else 1)": (2, "NaN|inf", (0, 1, 2), "NaN|inf", (0, 1, 2), "on every rank before DDP averaged them"),
    "loss = m(x).sum(); o.param_groups[0]['lr'] = float('inf') if step == 1 else 0.0": (
        2, "NaN|inf", (0, 1, 2), "", (), "Its gradient was finite: the optimizer made it"),
    "m.module.b.bias.data.fill_(float('nan')); loss = m(x).sum()": (0, "NaN", (0, 1, 2), "", None, "NaN before the first step .*: b.bias on every rank holds NaN"),
}  # fmt: skip


@pytest.mark.parametrize("how", BLOWUPS)
def test_the_first_value_that_is_no_number(how: str) -> None:
    step, value, odd, gradient, brought, says = BLOWUPS[how]
    loop = f"m = DDP(Net()); o = sgd(m)\nfor step in range(4):\n    o.zero_grad()\n    {how}\n    loss.backward()\n    o.step()"
    run = ranks.run(ranks.Source(PRELUDE + loop), 3, watch_replicas=True)
    said = text.replicas(run).replace("\n", " ")
    assert run.replicas is not None and run.replicas.blowup is not None, said
    found = run.replicas.blowup
    assert (found.step, found.ranks) == (step, odd), said
    assert step == 0 or found.brought == brought, said
    assert re.fullmatch(value, found.value) and re.fullmatch(gradient, found.gradient)
    assert re.search(says, said), said
    assert "equal bit for bit" not in said
    assert found.frame is not None and found.frame.text.endswith("o.step()")


@pytest.mark.parametrize("body", [
    "m = Net(); m.mask = nn.Parameter(torch.full((4,), float('-inf')), requires_grad=False); m = DDP(m); train(m, sgd(m))",
    "m = DDP(Net()); o = sgd(m); train(m, o)\nif rank == 1: m.module.a.weight.grad.fill_(float('inf'))\no.param_groups[0]['lr'] = 0.0\n"
    "for p in m.parameters(): p.grad.nan_to_num_(0, 0, 0)\no.step()",
])  # fmt: skip
def test_what_is_no_number_and_meant_is_no_find(body: str) -> None:
    run = ranks.run(ranks.Source(PRELUDE + body), 2, watch_replicas=True)
    assert run.ok and run.replicas is not None and run.replicas.blowup is None
    assert "equal bit for bit" in text.replicas(run)


def test_watching_adds_no_collective_and_changes_no_value() -> None:
    body = (
        PRELUDE
        + "from lockstep.ranks import observe\nm = DDP(Net()); train(m, sgd(m)); observe('w', m.module.a.weight.detach())"
    )
    plain = ranks.run(ranks.Source(body), 2)
    watched = ranks.run(ranks.Source(body), 2, watch_replicas=True)
    calls = [[(one.kind, one.nbytes) for one in run.collectives[0]] for run in (plain, watched)]
    assert calls[0] == calls[1] and calls[0]
    assert all((a == b).all() for a, b in zip(plain.observed("w"), watched.observed("w"), strict=True))
    assert plain.replicas is None and watched.replicas is not None


def test_a_hang_still_tells_of_the_replicas() -> None:
    body = PRELUDE + "m = DDP(Net()); o = sgd(m, 0.1 + 0.1 * (rank == 1)); train(m, o, 2 + (rank == 0))"
    run = ranks.run(ranks.Source(body), 2, watch_replicas=True)
    assert run.cause is not None and run.cause.kind == "hang"
    assert run.replicas is not None and run.replicas.drift is not None and run.replicas.drift.step == 1
