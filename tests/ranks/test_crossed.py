"""Two collectives in opposite order on one rank: nothing fails. It is told if it is sure, and no healthy job is accused."""

import ast
from unittest import mock

import pytest

from lockstep import ranks
from lockstep.notebook.magic import RanksMagic
from lockstep.ranks import crossed, text

PRELUDE = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
loss, count = torch.ones(1) * rank, torch.ones(1)
"""
HELPERS = """
def mean(value):
    dist.all_reduce(value)
    return value / size

def reduce_loss():
    dist.all_reduce(loss)

def reduce_count():
    dist.all_reduce(count)

def evaluate(data):
    correct = data.sum()
    dist.all_reduce(correct)
"""
ROLES = """
def roles(of, a, b):
    if rank == 0:
        return a, b
    return b, a
a, b = torch.zeros(1), torch.zeros(1)
mine, theirs = {}
if rank == 0:
    dist.all_reduce(mine)
    dist.all_reduce(theirs)
else:
    dist.all_reduce(theirs)
    dist.all_reduce(mine)
"""
CROSSED = {
    "in two arms": """
if rank == 1:
    dist.all_reduce(count)
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.all_reduce(count)
""",
    "around a call that all make": """
for step in range(3):
    dist.all_reduce(torch.ones(1))
    if rank != 1:
        dist.all_reduce(loss)
    dist.all_reduce(count)
    if rank == 1:
        dist.all_reduce(loss)
""",
    "of a helper": """
if rank == 1:
    count = mean(count)
loss = mean(loss)
if rank != 1:
    count = mean(count)
""",
    "of two helpers": """
if rank == 1:
    reduce_count()
    reduce_loss()
else:
    reduce_loss()
    reduce_count()
""",
    "after an epoch on the rank's own samples": """
def epoch(rank, model, inputs):
    loss, samples = torch.zeros(1), 0
    for number in range(rank, len(inputs), size):
        loss += (model(inputs[number]) ** 2).sum().detach()
        samples += 1
    count = torch.tensor([float(samples)])
    if rank == 1:
        dist.all_reduce(count)
        dist.all_reduce(loss)
    else:
        dist.all_reduce(loss)
        dist.all_reduce(count)
    return loss / count
epoch(rank, torch.nn.Linear(2, 1), torch.ones(8, 2))
""",
    "of one line in a function": """
def average(metrics):
    for name in sorted(metrics, reverse=rank != 1):
        dist.all_reduce(metrics[name])
metrics = {"loss": loss, "count": count}
average(metrics)
""",
    "of one line": """
model = {"loss": loss, "count": count}
for name in sorted(model, reverse=rank != 1):
    dist.all_reduce(model[name])
""",
    "of the pairs of a dictionary": """
for name, value in {0: {"loss": loss, "count": count}, 1: {"count": count, "loss": loss}}[rank % 2].items():
    dist.all_reduce(value)
""",
    "of a dictionary that one arm of a choice makes": """
stats = {"loss": loss, "count": count} if rank != 1 else {"count": count, "loss": loss}
for name, value in stats.items():
    dist.all_reduce(value)
""",
    "of a dictionary that each arm of a branch makes": """
if rank != 1:
    stats = {"loss": loss, "count": count}
else:
    stats = {"count": count, "loss": loss}
for name in stats:
    dist.all_reduce(stats[name])
""",
    "of three entries": """
stats = {"loss": loss, "half": loss / 2, "count": count}
for name in sorted(stats, reverse=rank != 1):
    dist.all_reduce(stats[name])
""",
    "of parameters that are registered in another order": """
net = torch.nn.Module()
for part in sorted(("loss", "count"), reverse=rank != 1):
    net.register_parameter(part, torch.nn.Parameter(torch.zeros(2)))
    getattr(net, part).grad = torch.ones(2)
for name, parameter in net.named_parameters():
    dist.all_reduce(parameter.grad)
""",
    "on several lines each": """
if rank == 1:
    dist.all_reduce(
        count,
    )
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.all_reduce(
        count,
    )
""",
}
HEALTHY = {
    "a source and its receivers": """
for source in range(size):
    if rank == source:
        dist.broadcast(loss, source)
    else:
        dist.broadcast(count, source)
""",
    "zeros without a batch": """
for step in range(4):
    if (step + rank) % 2:
        dist.all_reduce(loss)
    else:
        dist.all_reduce(count)
""",
    "the same by function": """
for step in range(4):
    (reduce_loss if (step + rank) % 2 else reduce_count)()
""",
    "a source that has the others' names the other way round": """
if rank == 0:
    dist.broadcast(loss, 0)
    dist.broadcast(count, 0)
else:
    dist.broadcast(count, 0)
    dist.broadcast(loss, 0)
""",
    "a rank without data": """
if rank == 1:
    dist.all_reduce(torch.zeros(1))
    dist.all_reduce(torch.zeros(1))
else:
    dist.all_reduce(loss)
    dist.all_reduce(count)
""",
    "two ranks that give each other a tensor": """
if size == 2:
    mine, theirs = loss, count
    if rank == 0:
        dist.broadcast(mine, rank)
        dist.broadcast(theirs, 1 - rank)
    else:
        dist.broadcast(theirs, 1 - rank)
        dist.broadcast(mine, rank)
""",
    "names that mean another tensor on each rank": """
mine, theirs = (loss, count) if rank == 0 else (count, loss)
if rank == 0:
    dist.all_reduce(mine)
    dist.all_reduce(theirs)
else:
    dist.all_reduce(theirs)
    dist.all_reduce(mine)
""",
    "the data in another order": """
one, other = torch.ones(4), torch.ones(8)
if rank == 0:
    evaluate(one)
    evaluate(other)
else:
    evaluate(other)
    evaluate(one)
""",
    "files in another order": """
for name in sorted(["one", "other"], reverse=rank == 1):
    total = torch.ones(1) * len(name)
    dist.all_reduce(total)
""",
    "a ring's parts": """
parts = [torch.ones(1) for _ in range(size)]
for step in range(size):
    for part in [(rank + step) % size]:
        dist.all_reduce(parts[part])
""",
    "a wire to and from each rank": """
class Link:
    def __init__(self, rank):
        wires = [torch.zeros(1), torch.zeros(1)]
        self.sent, self.heard = wires[rank % 2], wires[1 - rank % 2]
    def exchange(self):
        if rank == 0:
            dist.all_reduce(self.sent)
            dist.all_reduce(self.heard)
        else:
            dist.all_reduce(self.heard)
            dist.all_reduce(self.sent)
Link(rank).exchange()
""",
    "a slot of each rank in a dictionary": """
slots = torch.zeros(2, 1)
box = {"mine": slots[rank % 2], "theirs": slots[1 - rank % 2]}
for which in ["mine", "theirs"] if rank == 0 else ["theirs", "mine"]:
    dist.all_reduce(box[which])
""",
    "a dictionary that is filled by rank": """
box = {"mine": loss, "theirs": loss}
box["mine" if rank == 0 else "theirs"] = count
for which in ["mine", "theirs"] if rank == 0 else ["theirs", "mine"]:
    dist.all_reduce(box[which])
""",
    "a dictionary that has another tensor under the same name on each rank": """
a, b = torch.zeros(1), torch.zeros(1)
box = {"mine": a, "theirs": b} if rank == 0 else {"theirs": a, "mine": b}
for which in box:
    dist.all_reduce(box[which])
""",
    "files in another order, three of them": """
for name in sorted(["one", "other", "third"], reverse=rank == 1):
    total = torch.ones(1) * len(name)
    dist.all_reduce(total)
""",
    "roles from a function that gets the rank": ROLES.format("roles(rank, a, b)"),
    "roles from a function that asks for the rank": ROLES.format("roles(dist, a, b)"),
    "roles of an object that a function fills": """
from types import SimpleNamespace
def halves(rank, whole):
    parts = list(whole.chunk(2))
    if rank:
        parts.reverse()
    return SimpleNamespace(own=parts[0], other=parts[1])
mine = halves(rank, torch.zeros(2))
if rank == 0:
    dist.all_reduce(mine.own)
    dist.all_reduce(mine.other)
else:
    dist.all_reduce(mine.other)
    dist.all_reduce(mine.own)
""",
    "names that a rank swaps": """
for _ in range(rank % 2):
    loss, count = count, loss
if rank == 0:
    dist.all_reduce(loss)
    dist.all_reduce(count)
else:
    dist.all_reduce(count)
    dist.all_reduce(loss)
""",
    "arguments that each rank gives in its own order": """
def share(mine, theirs):
    if rank == 0:
        dist.all_reduce(mine)
        dist.all_reduce(theirs)
    else:
        dist.all_reduce(theirs)
        dist.all_reduce(mine)
if rank == 0:
    share(loss, count)
else:
    share(count, loss)
""",
    "recursion": """
def tree(depth):
    if depth:
        if (depth + rank) % 2:
            dist.all_reduce(loss)
            tree(depth - 1)
        else:
            tree(depth - 1)
            dist.all_reduce(loss)
tree(4)
""",
    "stages of a pipeline": """
pairs = [dist.new_group([0, 1]), dist.new_group([0, 1])]
for step in range(3):
    if rank == 0:
        dist.send(loss, 1)
        dist.recv(count, 1)
    elif rank == 1:
        dist.recv(loss, 0)
        dist.send(count, 0)
    if rank < 2:
        dist.all_reduce(loss, group=pairs[0])
        dist.all_reduce(count, group=pairs[1])
""",
    "groups of their own": """
pairs = [dist.new_group([0, 1]), dist.new_group([0, 1])]
if rank == 0:
    first = dist.all_reduce(loss, group=pairs[0], async_op=True)
    second = dist.all_reduce(count, group=pairs[1], async_op=True)
elif rank == 1:
    second = dist.all_reduce(count, group=pairs[1], async_op=True)
    first = dist.all_reduce(loss, group=pairs[0], async_op=True)
if rank < 2:
    first.wait(), second.wait()
""",
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CROSSED)
def test_calls_in_opposite_order_are_told(name: str, size: int) -> None:
    run = ranks.run(ranks.Source(PRELUDE + HELPERS + CROSSED[name]), size)
    assert run.ok, run.cause
    said = text.silent_mismatch(run)
    assert said.startswith("MIXED UP at cell line ") and "in the opposite order" in " ".join(said.split()), said
    headline = " ".join(said.partition("\n\n")[0].split())
    assert "loss" in headline.partition(" before ")[0] and "count" in headline.partition(" before ")[2], said
    assert max(map(len, text.silent_mismatch(run, 70).splitlines())) <= 70


SETS = {
    "of a set": "for name in {'loss', 'count'}:\n    dist.all_reduce(stats[name])",
    "of keys without some": "for name in stats.keys() - {'half'}:\n    dist.all_reduce(stats[name])",
    "of a list of a set": "for name in list(set(stats)):\n    dist.all_reduce(stats[name])",
    "of what the name stands for": "for name in set(stats):\n    value = stats[name]\n    dist.all_reduce(value)",
    "in a function": "def average(stats, frozen):\n    names = set(stats) - frozen\n    for name in names:\n"
    "        dist.all_reduce(stats[name])\naverage(stats, {'half'})",
    "of an argument": "def average(names):\n    for name in names:\n        dist.all_reduce(stats[name])\naverage({'loss', 'count'})",
    "the other way round": "for name in reversed(list(set(stats))):\n    dist.all_reduce(stats[name])",
    "of a dictionary of a set": "for name in {one: 0 for one in set(stats)}:\n    dist.all_reduce(stats[name])",
    "of what others lack": "names = set(stats).difference({'half'})\nfor name in names:\n    dist.all_reduce(stats[name])",
    "of a list that is only read": "names = list(set(stats))\nprint(len(names))\nfor name in names:\n    dist.all_reduce(stats[name])",
}  # fmt: skip
IN_PLACE = "names = list(set(stats))\n{}\nfor name in names:\n    dist.all_reduce(stats[name])"
ORDERED = {
    "sorted in place": IN_PLACE.format("names.sort()"),
    "sorted by its parts": IN_PLACE.format("names[:] = sorted(names)"),
    "sorted under another name": IN_PLACE.format("others = names\nothers.sort()"),
    "sorted elsewhere": IN_PLACE.format("def order(names):\n    names.sort()\norder(names)"),
    "sorted in the function": "def average(names):\n    names.sort()\n    for name in names:\n        dist.all_reduce(stats[name])\n"
    "average(list(set(stats)))",
    "taken from rank 0": IN_PLACE.format("dist.broadcast_object_list(names, 0)"),
    "given by keyword": IN_PLACE.format("dist.broadcast_object_list(object_list=names, src=0)"),
    "another set": "class set(list): pass\nfor name in set(stats):\n    dist.all_reduce(stats[name])",
    "another list": "list = sorted\nfor name in list(set(stats)):\n    dist.all_reduce(stats[name])",
    "sorted": "for name in sorted({'loss', 'count'}):\n    dist.all_reduce(stats[name])",
    "a dictionary": "for name in stats:\n    dist.all_reduce(stats[name])",
    "numbers": "for name in {0, 1}:\n    dist.all_reduce([loss, count][name])",
    "one turn": "for name in {'loss'}:\n    dist.all_reduce(stats[name])",
    "what a function makes of the name": "for name in {'one', 'other'}:\n    total = torch.ones(1) * len(name)\n    dist.all_reduce(total)",
    "the same tensor in each turn": "for name in {'loss', 'count'}:\n    dist.all_reduce(count)",
    "assigned twice": "names = {'loss'}\nnames = sorted(names)\nfor name in names:\n    dist.all_reduce(stats[name])",
}
STATS = PRELUDE + "stats = {'loss': loss, 'half': loss / 2, 'count': count}\n"


@pytest.mark.parametrize("name", [*SETS, *ORDERED])
def test_a_loop_over_a_set_of_strings_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each rank has its own order; ranks that are forked from one process share one."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    run = ranks.run(ranks.Source(STATS + {**SETS, **ORDERED}[name]), 2)
    assert run.ok, run.cause
    said = " ".join(text.silent_mismatch(run).split())
    if name in ORDERED:
        assert said == ""
        return
    assert said.startswith("MIXED UP under torchrun at cell line") and "Loop over `sorted(" in said, said
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert text.silent_mismatch(run) == "", "then each process has the same order"


def test_the_two_calls_are_named_by_the_numbers_that_met() -> None:
    said = text.silent_mismatch(ranks.run(ranks.Source(PRELUDE + CROSSED["around a call that all make"]), 2))
    told = " ".join(said.split())
    assert "rank 0 called `dist.all_reduce(loss)` before `dist.all_reduce(count)`, rank 1 in the opposite" in told, told
    assert "all_reduce #2 combined `loss` of rank 0 with `count` of rank 1, and all_reduce #3 the other way" in told
    assert "No rank failed, but unless this is meant, both results are wrong." in told
    assert "cell line 9 dist.all_reduce(loss)" in told and "cell line 10 dist.all_reduce(count)" in told


def test_a_long_run_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is parsed once, and a pair of lines looked at once, however often its loop turns."""
    source = """
none, nothing = torch.zeros(1), torch.zeros(1)
for step in range(50):
    if rank == 0:
        dist.all_reduce(loss)
        dist.all_reduce(count)
    else:
        dist.all_reduce(none)
        dist.all_reduce(nothing)
"""
    run = ranks.run(ranks.Source(PRELUDE + source), 3)
    parsed, looked = mock.Mock(wraps=ast.parse), mock.Mock(return_value=None)
    monkeypatch.setattr(ast, "parse", parsed)
    monkeypatch.setattr(crossed._Search, "_words", looked)
    assert crossed.first_crossed(run.members) is None
    assert looked.call_count == 2, "within a step, and from its end to the next one's beginning"
    monkeypatch.undo()
    monkeypatch.setattr(ast, "parse", parsed)
    assert crossed.first_crossed(run.members) is None
    assert parsed.call_count == 1
    monkeypatch.setattr(crossed, "MOST_PAIRS", 0)
    assert crossed.first_crossed(run.members) is None
    assert parsed.call_count == 1, "no more pairs than that are looked up"


MAY_BE_MEANT = {
    "the right edge of one is the left edge of the other": "{}, {} = torch.full((1,), 1.0 + rank), torch.full((1,), 9.0 - rank)",
    "tokens that nobody reads": "{}, {} = torch.zeros(1), torch.zeros(1)",
}


@pytest.mark.parametrize("name", MAY_BE_MEANT)
def test_what_may_be_meant_is_not_called_wrong(name: str) -> None:
    """The source alone can't tell these from a mistake: what is said is true of both."""
    source = MAY_BE_MEANT[name].format("loss", "count") + CROSSED["in two arms"]
    told = " ".join(text.silent_mismatch(ranks.run(ranks.Source(PRELUDE + source), 2)).split())
    combined = (
        "So all_reduce #1 combined `loss` of rank 0 with `count` of rank 1, and all_reduce #2 the other way round. "
    )
    assert combined + "No rank failed, but unless this is meant, both results are wrong." in told


@pytest.mark.parametrize(
    ("cell", "told"), [(CROSSED["around a call that all make"], True), (HEALTHY["a source and its receivers"], False)]
)
def test_a_notebook_tells_it_as_the_terminal_does(cell: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    RanksMagic(None).ranks("2", PRELUDE + HELPERS + cell)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("MIXED UP at cell line " in printed and "in the opposite order" in printed) is told, printed


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_lines_that_may_differ(name: str, size: int) -> None:
    run = ranks.run(ranks.Source(PRELUDE + HELPERS + HEALTHY[name]), size)
    assert run.ok, run.cause
    assert text.silent_mismatch(run) == ""


def test_tensors_of_a_loop_that_do_not_fit_have_their_turn() -> None:
    source = """
model = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
for name in sorted(model, reverse=rank == 1):
    dist.all_reduce(model[name])
"""
    cause = ranks.run(ranks.Source(PRELUDE + source), 2).cause
    assert cause is not None
    assert "At this call `name` was 'bias' on rank 0 and 'weight' on rank 1." in cause.notes


def test_a_number_from_calls_that_do_not_belong_together_is_called_wrong() -> None:
    """Rank 1 skips a reduction: its next one meets it, and gloo hands rank 0 a sum."""
    source = """
def mean_loss(seen):
    if seen > 0:
        dist.all_reduce(loss)
    return loss / size

weights = torch.ones(4)
seen = 3 if rank != 1 else 0
dist.all_reduce(weights)
print(mean_loss(seen))
dist.all_reduce(weights)
dist.all_reduce(weights)
"""
    cause = ranks.run(ranks.Source(PRELUDE + source), 2).cause
    assert cause is not None and cause.kind == "hang"
    said = " ".join(cause.notes)
    assert "1 × float32 of rank 0 met 4 × float32 of rank 1 without an error. Trust neither what rank 0 got" in said
    assert "`seen` is 3 on rank 0 and 0 on rank 1" in said
    assert said.count("without an error") == 1 and " ".join(cause.own).count("without an error") == 1
