"""Whom a hang's sentences are about: programs by somebody who did not know the code, of which something false was said once.

Each has what must be said, with its ranks and lines, and the arrows. `{line}` is the line that ends with `# HERE`.
"""

import re
from dataclasses import dataclass

import pytest

from lockstep import ranks

PRELUDE = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
t = torch.ones(2)
"""
PAIRS = "pairs = [dist.new_group([one, one + 1]) for one in range(0, world, 2)]\nmine = pairs[rank // 2]\n"


@dataclass(frozen=True)
class Case:
    """What runs on so many ranks; the headline, in full but for lines; what a note must say, and what none may; the arrows."""

    text: str
    size: int
    headline: str
    at_fault: tuple[int, ...]
    says: str = ""
    never: str = ""


CASES = {
    "a rank skips its group's call, and others wait for its partner": Case(
        PAIRS + "ready = rank != 3\nif ready:  # HERE\n    dist.all_reduce(t, group=mine)\ndist.all_reduce(t)", 4,
        "rank 3 never joined all_reduce #1 of ranks 2 and 3: it waits in all_reduce #1.", (3,),
        "Rank 2 took the branch at line {line} (if ready); rank 3 did not.", "ranks 0 and 1"),
    "a rank leaves its group's loop": Case(
        PAIRS + "for i in range(2):\n    if rank == 3 and i == 1:  # HERE\n        break\n    dist.all_reduce(t, group=mine)\n"
        "dist.barrier()", 4, "rank 3 never joined all_reduce #2 of ranks 2 and 3: it waits in barrier #1.", (3,),
        "Only rank 3 can take the branch at line {line}", "0, 1"),
    "one of many pairs": Case(
        PAIRS + "def sync(enabled):\n    if not enabled:  # HERE\n        return\n    dist.all_reduce(t, group=mine)\n"
        "for step in range(3):\n    sync(not (rank == 4 and step == 1))\ndist.barrier()", 6,
        "rank 4 skipped all_reduce #2 of ranks 4 and 5 when `step` was 1; rank 5 called it.", (4,),
        "Rank 4 took the branch at line {line} (if not enabled); rank 5 did not.", "ranks 0"),
    "a rank skips a call of all, and waits in its row": Case(
        PAIRS + "def step(i):\n    dist.all_reduce(t, group=mine)\n    if i == 2 and rank == 2:  # HERE\n        return\n"
        "    dist.all_reduce(t)\nfor i in range(4):\n    step(i)", 4,
        "rank 2 skipped all_reduce #3, which ranks 0, 1 and 3 called, and went on to FILE.", (2,),
        "Rank 2 took the branch at line {line} (if i == 2 and rank == 2); ranks 0, 1 and 3 did not."),
    "a group of which there is one": Case(
        "pair = dist.new_group([0, 1])\nfor i in range(3):\n    dist.all_reduce(t)\n    if rank == 1 and i == 1:  # HERE\n"
        "        dist.barrier(group=pair)", 3,
        "rank 1 called barrier #1 of ranks 0 and 1; rank 0 did not, and went on to FILE.", (0, 1),
        "Rank 1 took the branch at line {line} (if rank == 1 and i == 1); rank 0 did not.", "rank 2"),
    "all take the branch, and one continues within it": Case(
        "flag = world > 1\nfor d in [None if rank == 1 else 1.0]:\n    if flag:  # HERE\n        if d is None:\n            continue\n"
        "        dist.all_reduce(t)\ndist.barrier()", 3, "rank 1 never joined all_reduce #1: it waits in barrier #1.", (1,),
        "", "took the branch at line {line}"),
    "all take the branch, and one leaves it by an error": Case(
        "enabled = len('ab') == 2\ntry:\n    if enabled:  # HERE\n        t = t * {0: 1, 2: 1}[rank]\n        dist.all_reduce(t)\n"
        "except KeyError:\n    pass\ndist.broadcast(t, 0)", 3, "rank 1 never joined all_reduce #1: it waits in broadcast #1.", (1,),
        "Ranks 0 and 2 are inside the branch at line {line} (if enabled); rank 1 is not, or has left it.", "took the branch"),
    "both arms call what one returns from": Case(
        "def fetch(n):\n    if n == 0:\n        return\n    dist.all_reduce(t)\nn = 0 if rank == 2 else 5\n"
        "if rank % 2 == 0:  # HERE\n    fetch(n)\nelse:\n    fetch(n)\ndist.barrier()", 4,
        "rank 2 never joined all_reduce #1: it waits in barrier #1.", (2,), "", "the branch at line {line}"),
    "each calls something else": Case(
        "if rank == 0:\n    dist.barrier()\nelif rank == 1:\n    dist.all_reduce(t)\nelse:\n    dist.broadcast(t, 0)", 3,
        "rank 0 called barrier #1 at FILE where rank 1 called all_reduce #1 at FILE and rank 2 called broadcast #1 at FILE.",
        ()),
    "most call one kind at lines of their own": Case(
        "if rank == 0:\n    dist.broadcast(t, 0)\nelif rank == 1:\n    dist.broadcast(t, 0)\nelif rank == 2:\n"
        "    dist.broadcast(t, 0)\ndist.all_reduce(t * 2)", 4,
        "rank 3 called all_reduce #1 where rank 0 called broadcast #1 at FILE, rank 1 called broadcast #1 at FILE and rank 2 called "
        "broadcast #1 at FILE.", (3,), "", "took the branch"),
    "one makes calls that the others never make": Case(
        "for i in range(3):\n    dist.all_reduce(t)\n    if rank == 0:  # HERE\n        dist.all_reduce(t)", 3,
        "rank 0 called all_reduce #2 when `i` was 0; ranks 1 and 2 did not.", (0,),
        "Rank 0 took the branch at line {line} (if rank == 0); ranks 1 and 2 did not."),
    "two groups of the same ranks": Case(
        "one, other = (dist.new_group([0, 1, 2]) for _ in range(2))\ndist.all_reduce(t, group=other if rank == 1 else one)", 3,
        "rank 1 never joined all_reduce #1 in group 1 of ranks 0, 1 and 2: it waits in all_reduce #1 in group 2 of ranks 0, 1 and 2.",
        (1,)),
    "a group of all ranks beside the default one": Case(
        "also = dist.new_group()\ndist.all_reduce(t, group=also if rank == 1 else None)", 3,
        "rank 1 never joined all_reduce #1 of the default group: it waits in all_reduce #1 of ranks 0, 1 and 2.", (1,)),
    "two groups, one of which has a name": Case(
        "metrics = dist.new_group([0, 1], group_desc='metrics')\nother = dist.new_group([0, 1])\n"
        "dist.all_reduce(t, group=other if rank == 1 else metrics)", 2,
        "rank 0 waits in all_reduce #1 of ranks 0 and 1 (metrics), rank 1 in all_reduce #1 in group 2 of ranks 0 and 1: they wait "
        "for each other.", ()),
    "two groups wait for each other": Case(
        "first, second = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "dist.all_reduce(t, group=second if rank == 1 else first)", 2,
        "rank 0 waits in all_reduce #1 in group 1 of ranks 0 and 1, rank 1 in all_reduce #1 in group 2 of ranks 0 and 1: they wait "
        "for each other.", ()),
    "a dimension of a mesh": Case(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "tp = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp')).get_group('tp')\ndist.all_reduce(t, group=tp)\n"
        "if rank != 3:  # HERE\n    dist.all_reduce(t, group=tp)\ndist.barrier()", 4,
        "rank 3 never joined all_reduce #2 of ranks 2 and 3 (tp): it waits in barrier #1.", (3,),
        "Rank 2 took the branch at line {line} (if rank != 3); rank 3 did not."),
    "another tag": Case(
        "dist.send(t, 1, tag=2) if rank == 0 else dist.recv(t, 0, tag=3)", 2,
        "rank 0 waits to send to rank 1; rank 1 waits to receive from rank 0.", (),
        "their tags differ, or their groups", "reorder"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_true(name: str) -> None:
    case = CASES[name]
    text = PRELUDE + case.text
    cause = ranks.run(ranks.Source(text, "train"), case.size).cause
    assert cause is not None and cause.kind == "hang", cause
    assert re.sub(r"train:\d+", "FILE", cause.headline) == case.headline
    assert {row.rank for row in cause.rows if row.differs} == {*case.at_fault}
    line = next((number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# HERE")), 0)
    notes = " ".join(cause.notes)
    assert case.says.format(line=line) in notes, notes
    assert not case.never or case.never.format(line=line) not in notes, notes
