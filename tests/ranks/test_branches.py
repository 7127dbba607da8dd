"""The statement that parted the ranks, named from where they stand: of a source, without a run.

`# at 0 1` is where ranks 0 and 1 wait; the others of two ranks, or of three, have finished. `# HERE` is the line to
name; without one, nothing may be said. `# from` is a call that led all of them to where they wait, `# through 0` one that
led rank 0 there.
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
    "a name that is another number below": """
batches = read(rank)
if batches > 0:  # HERE
    dist.all_reduce(t)  # at 0
batches = 7
dist.broadcast(t, 0)  # at 1
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
for step in range(steps):
    if loss < 0.1:  # HERE
        break
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "a range that is left, and the rank has finished": """
for step in range(steps):
    dist.all_reduce(t)  # at 0
    if step > 3:
        if loss < 0.1:  # HERE
            break
""",
    "a range that is left in a caller, and the rank has finished": """
def epoch(bad):
    if bad > 2:
        return None
    dist.all_reduce(t)  # at 0
    return bad

for e in range(10):
    state = epoch(bad)  # from
    if state is None:  # HERE
        break
""",
    "a range that is left in a function": """
def train(patience):
    for step in range(100):
        dist.all_reduce(t)  # at 0
        if bad > patience:  # HERE
            return step
    return step

last = train(3)  # through 0
dist.barrier()  # at 1
""",
    "a loop that is left, or runs out": """
for batch in loader:  # HERE
    if loss < 0.1:
        break
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "in a function, not where it's called": """
def evaluate(model):
    if rank == 0:  # HERE
        dist.all_reduce(accuracy)  # at 0

for step in range(5):
    dist.all_reduce(t)  # at 1
    if step == 3:
        evaluate(model)  # through 0
""",
    "in a function that returns early": """
def save(epoch):
    if rank != 0:  # HERE
        return
    dist.barrier()  # at 0

for epoch in range(3):
    dist.all_reduce(t)  # at 1
    if epoch % EVERY == 0:
        save(epoch)  # through 0
EVERY = 2
""",
    "in a function of a function": """
def wait():
    dist.barrier()  # at 0

def save(master):
    if master:  # HERE
        wait()  # through 0

for epoch in range(3):
    dist.all_reduce(t)  # at 1
    save(rank == 0)  # through 0
""",
    "where it's called": """
def evaluate(model):
    dist.all_reduce(accuracy)  # at 0

for step in range(5):
    dist.all_reduce(t)  # at 1
    if loss < best:  # HERE
        evaluate(model)  # through 0
""",
    "left in an else": """
for step in range(steps):  # HERE
    if loss > 0.1:
        print(loss)
    else:
        break
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "an inner loop is left too": """
for step in range(steps):
    for batch in loader:
        if batch is None:
            break
    if loss < 0.1:  # HERE
        break
    dist.all_reduce(t)  # at 0
dist.barrier()  # at 1
""",
    "in a function, and the others in a branch": """
def evaluate(model):
    if rank == 0:  # HERE
        dist.all_reduce(accuracy)  # at 0

for step in range(5):
    if step % 2 == 0 or late():
        dist.barrier()  # at 1
    evaluate(model)  # through 0
""",
    "in a function that the other hasn't reached": """
def evaluate(model):
    if rank == 0:
        dist.all_reduce(accuracy)  # at 0

if late():  # HERE
    dist.barrier()  # at 1
evaluate(model)  # through 0
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
    "a range that is left in two ways": """
for step in range(steps):
    dist.all_reduce(t)  # at 0
    if loss < 0.1:
        break
    if time.time() > limit:
        sys.exit()
""",
    "before the call": """
def evaluate(model):
    if careful():
        dist.all_reduce(accuracy)  # at 0

dist.barrier()  # at 1
evaluate(model)  # through 0
""",
    "the others may have skipped the next call": """
def sync(g):
    if g.sum() < 5:
        dist.all_reduce(g)  # at 0

for step in range(4):
    sync(g)  # through 0
    if late():
        continue
    dist.all_reduce(t)  # at 1
""",
    "one of two functions": """
def wait():
    if careful():
        dist.barrier()  # at 0

def save():
    if best():
        wait()  # through 0

for epoch in range(3):
    dist.all_reduce(t)  # at 1
    save()  # through 0
""",
    "a turn that all come to": """
for step in range(9):
    dist.all_reduce(t)  # at 1
    if step % 3 == 0:
        dist.barrier()  # at 0
""",
    "one of two, in a function or where it's called": """
def evaluate(model):
    if careful():
        dist.all_reduce(accuracy)  # at 0

for step in range(5):
    dist.all_reduce(t)  # at 1
    if loss < best:
        evaluate(model)  # through 0
""",
    "a loop over data, in a function or where it's called": """
def evaluate(model):
    for batch in loader:
        dist.all_reduce(accuracy)  # at 0

for step in range(5):
    dist.all_reduce(t)  # at 1
    if loss < best:
        evaluate(model)  # through 0
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
    chains: dict[int, list[Frame]] = {}
    callers, expected = [], None
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(r"# (?:at|through) ([\d ]+)$", line):
            for rank in found[1].split():  # A function is written above its calls.
                chains[int(rank)] = [Frame(str(file), number), *chains.get(int(rank), [])]
        callers += [Frame(str(file), number)] if line.endswith("# from") else []
        expected = number if line.endswith("# HERE") else expected
    size = 3 if "three" in file.name else 2
    finished = [rank for rank in range(size) if rank not in chains]
    callers = sorted(callers, key=lambda frame: frame.line)
    said, place = branch(chains, finished, size=size, callers=callers)
    line_named = place and place.line
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
    assert branch({0: [Frame(str(file), 2)]}, [1], size=2, callers=[called])[1] == Frame(str(file), 4)
    assert branch({0: [Frame(str(file), 2)]}, [1], size=2, callers=[elsewhere, called]) == ("", None)


@pytest.mark.parametrize("case", SILENT)
def test_what_may_not_be_it_is_not_named(case: str, tmp_path: Path) -> None:
    said, line, _ = name(SILENT[case], tmp_path / f"{case}.py")
    assert (said, line) == ("", None)
