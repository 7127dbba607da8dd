"""The statement that parted the ranks, named from where they stand: of a source, without a run.

`# at 0 1` is where ranks 0 and 1 wait; the others of two ranks, or of three, have finished. `# HERE` is the line to
name; without one, nothing may be said. `# from` is a call that led to where they wait.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.ranks.branches import branch
from lockstep.ranks.report import Frame

NAMED = {
    "break": """
batches = 5 if rank == 1 else 8
for step, batch in enumerate(data):
    if step == batches:  # HERE
        break
    dist.all_reduce(t)  # at 0
""",
    "break after the call": """
batches = 5 if dist.get_rank() == 1 else 8
for step, batch in enumerate(data):
    dist.all_reduce(t)  # at 0
    if step >= batches:  # HERE
        break
""",
    "while": """
rank = int(os.environ["RANK"])
most, step = 8 - 3 * rank, 0
while step < most:  # HERE
    dist.all_reduce(t)  # at 0
    step += 1
""",
    "range": """
def main(args):
    batches = 8
    if args.rank == 1:
        batches = 5
    for step in range(batches):  # HERE
        dist.all_reduce(t)  # at 0
""",
    "slice": """
rank = dist.get_rank()
count = len_of(data)
if rank == 1:
    count = 3
for batch in data[:count]:  # HERE
    dist.all_reduce(t)  # at 0
""",
    "shard": """
mine = data[dist.get_rank()::2]
for epoch in range(epochs):
    for batch in mine:  # HERE
        if batch is None:
            print("empty")
        dist.all_reduce(t)  # at 0
""",
    "an argument": """
def train(steps):
    for step in range(steps):  # HERE
        dist.all_reduce(t)  # at 0

train(8 - 3 * rank)  # from
""",
    "a loop in a caller": """
def step():
    dist.all_reduce(t)  # at 0

def train(steps):
    for one in range(steps):  # HERE
        step()  # from

train(steps=5 if rank else 8)  # from
""",
    "a flag": """
is_main = rank == 0
if is_main:  # HERE
    dist.barrier()  # at 0
""",
    "a function's answer": """
def is_main():
    return dist.get_rank() == 0

if is_main():  # HERE
    dist.barrier()  # at 0
""",
    "else": """
last = rank == 1
if last:  # HERE
    print("done")
else:
    dist.barrier()  # at 0
""",
    "of three": """
limit = 9 - rank // 2
for step in range(limit):  # HERE
    dist.all_reduce(t)  # at 0 1
""",
    "waiting elsewhere": """
batches = 5 if rank == 1 else 8
for step, batch in enumerate(data):
    if step == batches:  # HERE
        break
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "continue": """
skip = 2 if rank == 1 else -1
for step in range(4):
    if step == skip:  # HERE
        continue
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "the loop, as it is": """
for batch in loader:  # HERE
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "a range that is left": """
for step in range(steps):  # HERE
    if loss < 0.1:
        break
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "inside a nested function": """
def main(rank):
    most = 4 - rank
    def work():
        for one in range(most):  # HERE
            dist.all_reduce(t)  # at 0
    work()
""",
}

SILENT = {
    "nothing depends on the rank": """
for batch in data:
    dist.all_reduce(t)  # at 0
""",
    "either may be it": """
mine = shards[rank]
for batch in mine:
    if batch.isnan():
        continue
    dist.all_reduce(t)  # at 0
""",
    "a padded shard and a branch": """
for batch in shard(data, rank):
    if skipped(step):
        continue
    dist.all_reduce(t)  # at 0
""",
    "the wrong way round": """
batches = 8 if rank == 1 else 5
for step, batch in enumerate(data):
    if step == batches:
        break
    dist.all_reduce(t)  # at 0
""",
    "the same on both": """
batches = 5 if rank == 7 else 8
for step in range(batches):
    dist.all_reduce(t)  # at 0
""",
    "agreed on": """
left = torch.tensor(len(data[rank::2]))
dist.all_reduce(left)
for step in range(int(left)):
    dist.all_reduce(t)  # at 0
""",
    "a sampler that pads": """
sampler = DistributedSampler(data, rank=rank)
loader = DataLoader(data, sampler=sampler)
for batch in loader:
    dist.all_reduce(t)  # at 0
""",
    "a device": """
device = torch.device(rank)
model = DDP(model.to(device), device_ids=[rank])
for name in model.names():
    dist.all_reduce(t)  # at 0
""",
    "as many turns on all": """
for micro in range(accumulate):
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "only a print": """
if rank == 0:
    print("hello")
dist.all_reduce(t)  # at 0
""",
    "one of two guesses": """
mine = data[rank::2]
for batch in mine:
    if time.time() > limit:
        break
    dist.all_reduce(t)  # at 0
""",
    "a rank's number in a group": """
rank = dist.get_rank(group)
for step in range(3):
    if rank == 1:
        break
    dist.all_reduce(t)  # at 0
    if late():
        break
""",
    "far too much": "a0 = rank\n" + "".join(f"a{n} = {' + '.join([f'a{n - 1}'] * 60)}\n" for n in range(1, 8))
    + "for one in range(a7):\n    dist.all_reduce(t)  # at 1\n",
    "too deep": "n = " + "-" * 5000 + "rank\nfor one in range(n):\n    dist.all_reduce(t)  # at 0\n",
}  # fmt: skip


def name(source: str, file: Path) -> tuple[str, int | None, int | None]:
    """What is said of it, the line that is named, and the one to name."""
    file.write_text(source)
    stood: dict[int, Frame | None] = {}
    callers, expected = [], None
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(r"# at ([\d ]+)$", line):
            stood |= {int(rank): Frame(str(file), number) for rank in found[1].split()}
        callers += [Frame(str(file), number)] if line.endswith("# from") else []
        expected = number if line.endswith("# HERE") else expected
    size = 3 if "three" in file.name else 2
    finished = [rank for rank in range(size) if rank not in stood]
    callers = sorted(callers, key=lambda frame: frame.line)
    said, line_named = branch(stood, finished, size=size, callers=callers)
    return said, line_named, expected


@pytest.mark.parametrize("case", NAMED)
def test_what_parted_the_ranks_is_named(case: str, tmp_path: Path) -> None:
    said, line, expected = name(NAMED[case], tmp_path / f"{case}.py")
    assert line == expected is not None, (said, line, expected)
    assert f" at line {line} (" in said


def test_a_caller_in_another_file_is_not_looked_for_in_this_one(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def step():\n    dist.all_reduce(t)\n\nfor one in range(8 - rank):\n    step()\n")
    called, elsewhere = Frame(str(file), 5), Frame(str(tmp_path / "other.py"), 5)
    assert branch({0: Frame(str(file), 2)}, [1], size=2, callers=[called])[1] == 4
    assert branch({0: Frame(str(file), 2)}, [1], size=2, callers=[elsewhere, called]) == ("", None)


@pytest.mark.parametrize("case", SILENT)
def test_what_may_not_be_it_is_not_named(case: str, tmp_path: Path) -> None:
    said, line, _ = name(SILENT[case], tmp_path / f"{case}.py")
    assert (said, line) == ("", None)
