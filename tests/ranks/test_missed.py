"""A turn of a loop in which a rank made no call: told by the loop's variable, and only where the ranks' turns are the same."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep import ranks

PRELUDE = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
t = torch.ones(2)
"""
MODEL = """\
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(4, 1))
def bad(loss, step):
    return rank == 2 and step == 2
"""
SKIPPED = "rank 2 skipped all_reduce #{} when `step` was {}; ranks 0 and 1 called it."


@dataclass(frozen=True)
class Case:
    """What runs on three ranks; the headline; what a note must say. `{line}` is the line that ends with `# HERE`."""

    text: str
    headline: str
    says: str = ""


MISSED = {
    "a turn that is left early": Case(
        "for step, x in enumerate([t] * 6):\n    dist.all_reduce(t)\n    if rank == 2 and step == 3:  # HERE\n"
        "        continue\n    dist.all_reduce(t)\ndist.barrier()",
        SKIPPED.format(8, 3), "Rank 2 took the branch at line {line} (if rank == 2 and step == 3); ranks 0 and 1 did not."),
    "what is asked is in a function": Case(
        "def odd(x):\n    return bool(x.isnan().any())\nfor step, x in enumerate([t] * 6):\n    if rank == 2 and step == 1:\n"
        "        x = x * float('nan')\n    if odd(x):  # HERE\n        continue\n    dist.all_reduce(t)\ndist.barrier()",
        SKIPPED.format(2, 1), "Rank 2 took the branch at line {line} (if odd(x)); ranks 0 and 1 did not."),
    "the first turn of a later epoch": Case(
        "for epoch in range(3):\n    for step, x in enumerate([t] * 3):\n        if rank == 2 and (epoch, step) == (1, 0):  # HERE\n"
        "            continue\n        dist.all_reduce(t)\ndist.barrier()", SKIPPED.format(4, 0)),
    "backward": Case(
        MODEL + "for step in range(5):\n    loss = model(torch.ones(2, 4)).mean()\n    if bad(loss, step):  # HERE\n        continue\n"
        "    loss.backward()\ndist.all_reduce(torch.zeros(1))",
        "rank 2 skipped backward (DDP's gradient all-reduce #3) when `step` was 2; ranks 0 and 1 called it.",
        "Rank 2 took the branch at line {line} (if bad(loss, step)); ranks 0 and 1 did not."),
    "backward without sync": Case(
        "from contextlib import nullcontext\n" + MODEL + "for step in range(5):\n"
        "    with model.no_sync() if bad(0, step) else nullcontext():\n        model(torch.ones(2, 4)).mean().backward()\n"
        "dist.all_reduce(torch.zeros(1))",
        "rank 2 skipped DDP's gradient all-reduce #3 when `step` was 2; ranks 0 and 1 called it."),
    "in a function that the loop calls": Case(
        "def push(x):\n    if x.isnan().any():  # HERE\n        return\n    dist.all_reduce(t)\nfor step in range(5):\n"
        "    push(t * (float('nan') if rank == 2 and step == 3 else 1))\ndist.barrier()",
        SKIPPED.format(4, 3), "Rank 2 took the branch at line {line} (if x.isnan().any()); ranks 0 and 1 did not."),
    "an error that the loop catches": Case(
        "def push(step):\n    x = {0: t, 1: t}.get(rank, t if step != 2 else None)\n    dist.all_reduce(x + 0)\n"
        "for step in range(5):\n    try:\n        push(step)\n    except TypeError:  # HERE\n        print('skipped')\ndist.barrier()",
        SKIPPED.format(3, 2), "Rank 2 had an error, caught at line {line} (except TypeError); ranks 0 and 1 had none."),
    "the last turn": Case(
        "for x in [t, t * 2]:\n    dist.all_reduce(t)\n    if rank == 2 and x[0] == 2:  # HERE\n        continue\n"
        "    dist.all_reduce(t)\ndist.barrier()",
        "rank 2 skipped all_reduce #4, which ranks 0 and 1 called, and went on to FILE.",
        "Rank 2 took the branch at line {line} (if rank == 2 and x[0] == 2); ranks 0 and 1 did not."),
    "what comes after an inner loop": Case(
        "def report():\n    dist.all_reduce({0: t, 1: t}[rank])\nfor epoch in range(2):\n    for i in range(3):\n"
        "        dist.broadcast(t, 0)\n    try:\n        report()\n    except KeyError:  # HERE\n        pass",
        "rank 2 skipped all_reduce #1, which ranks 0 and 1 called, and went on to FILE.",
        "Rank 2 had an error, caught at line {line} (except KeyError); ranks 0 and 1 had none."),
    "only one rank calls, and a loop follows": Case(
        "if rank == 0:  # HERE\n    dist.broadcast(torch.ones(3), 0)\nfor x in [t, t]:\n    dist.all_reduce(x)",
        "rank 0 called broadcast #1; ranks 1 and 2 did not, and went on to FILE.",
        "Rank 0 took the branch at line {line} (if rank == 0); ranks 1 and 2 did not."),
    "one rank calls once more": Case(
        "for step in range(5):\n    if rank == 0 and step == 1:  # HERE\n        dist.all_reduce(t)\n    dist.all_reduce(t)\ndist.barrier()",
        "rank 0 called all_reduce #2; ranks 1 and 2 did not, and went on to FILE.",
        "Rank 0 took the branch at line {line} (if rank == 0 and step == 1); ranks 1 and 2 did not."),
    "the shapes do not fit": Case(
        "for step in range(5):\n    if rank == 2 and step == 1:  # HERE\n        continue\n    dist.all_reduce(torch.ones(step + 1))\n"
        "dist.barrier()",
        SKIPPED.format(2, 1), "Rank 2 took the branch at line {line} (if rank == 2 and step == 1); ranks 0 and 1 did not."),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_a_missed_turn_is_named(name: str) -> None:
    case = MISSED[name]
    text = PRELUDE + case.text
    cause = ranks.run(ranks.Source(text, "train"), 3).cause
    assert cause is not None
    assert re.sub(r"train:\d+", "FILE", cause.headline) == case.headline
    line = next((number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# HERE")), 0)
    assert case.says.format(line=line) in " ".join(cause.notes)


OTHER = {
    "the ranks' turns have other numbers":
        "for step in range(rank > 0, 9, 2):\n    dist.all_reduce(t)\nif rank:\n    dist.barrier()",
    "a rank is in another loop with the same variable":
        "for step in range(6):\n    if rank == 2 and step == 2:\n        break\n    dist.all_reduce(t)\nfor step in range(10, 14):\n"
        "    dist.all_reduce(t)",
    "a rank has more batches":
        "for epoch in range(2):\n    for step in range(4 if rank == 2 else 3):\n        dist.all_reduce(t)\ndist.barrier()",
    "a rank has more batches in one epoch":
        "for epoch in range(2):\n    for step in range(5 if epoch else 4 if rank == 2 else 3):\n        dist.all_reduce(t)\n"
        "dist.barrier()",
    "a rank tries its step again":
        "def step(i):\n    for k in range(2):\n        try:\n            dist.all_reduce(t)\n"
        "            assert rank < 2 or i != 1 or k\n            return\n        except AssertionError:\n            continue\n"
        "for i in range(4):\n    step(i)\ndist.barrier()",
    "two lines make one call, and a rank misses another":
        "for step in range(4):\n    if rank == 2:\n        dist.all_reduce(t)\n    else:\n        dist.all_reduce(t)\n"
        "    if rank == 2 and step == 1:\n        continue\n    dist.all_reduce(t)\ndist.barrier()",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_no_turn_is_named_where_turns_differ(name: str) -> None:
    cause = ranks.run(ranks.Source(PRELUDE + OTHER[name], "train"), 3).cause
    assert cause is not None and " when `step` was " not in cause.headline, cause.headline


CALLED_MORE = {
    "an inner loop has more turns":
        "for epoch in range(2):\n    for i in range(4 if rank == 2 else 3):\n        dist.broadcast(t, 0)\n"
        "    if t.sum() > 0:\n        dist.all_reduce(t)",
    "an inner loop counts otherwise":
        "for epoch in range(2):\n    for i in [3, 2, 1, 0][:4 if rank == 2 else 3]:\n        dist.broadcast(t, 0)\n"
        "    if t.sum() > 0:\n        dist.all_reduce(t)",
    "an inner loop counts down":
        "for epoch in range(2):\n    for i in range(3, -1 if rank == 2 else 0, -1):\n        dist.broadcast(t, 0)\n"
        "    if t.sum() > 0:\n        dist.all_reduce(t)",
    "an error ends the loop":
        "def last():\n    return t.sum() < 0\ntry:\n    for x in [t, t]:\n        dist.all_reduce(t)\n        x = {0: t, 1: t}[rank]\n"
        "        if last():\n            break\n        dist.all_reduce(t)\nexcept KeyError:\n    pass\ndist.barrier()",
    "a step is tried again": OTHER["a rank tries its step again"],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED_MORE)
def test_who_calls_more_has_not_skipped(name: str) -> None:
    cause = ranks.run(ranks.Source(PRELUDE + CALLED_MORE[name], "train"), 3).cause
    assert cause is not None and "skipped" not in cause.headline, cause.headline
    assert "took the branch" not in " ".join(cause.notes), cause.notes


def test_a_call_in_another_file_is_named_with_its_line(tmp_path: Path) -> None:
    """The `if` is in the program, the collective in a module that it imports, or the other way round."""
    (tmp_path / "shares.py").write_text(
        "import torch.distributed as dist\n\ndef mean(x):\n    if x.isnan().any():\n        return x\n    dist.all_reduce(x)\n"
    )
    text = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport shares\n{PRELUDE}t *= float('nan') if rank == 2 else 1\n"
    cause = ranks.run(ranks.Source(text + "shares.mean(t)\ndist.barrier()", "train"), 3).cause
    assert cause is not None and cause.headline.startswith("rank 2 skipped all_reduce #1, which ranks 0 and 1 called")
    assert "Rank 2 took the branch at shares.py:4 (if x.isnan().any()); ranks 0 and 1 did not." in " ".join(cause.notes)
