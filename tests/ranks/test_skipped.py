"""A collective that some ranks skip: which statement let them, and programs in which that isn't certain.

Each program runs once for each rank, with collectives that only note from where they are called.
"""

from __future__ import annotations

import linecache
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.ranks.report import Collective, Frame, RankReport
from lockstep.ranks.skipped import Skip, may_part, may_skip, skipped

HELPER = """
def sync(g):
    if g > 5:  # HERE
        return
    dist.all_reduce(g)
"""
NAMED = {
    "an early return": """
for step in range(3):
    sync(9 if rank and step == 1 else 1)
    dist.all_reduce(loss)
""",
    "an early return, and another kind next": """
sync(9 * rank)
dist.barrier()
""",
    "an early return, and the same helper next": """
for step in range(3):
    sync(9 if rank and step == 1 else 1)
    sync(loss)
""",
    "the second of two": """
for step in range(3):
    dist.all_reduce(loss)
    sync(9 if rank and step == 1 else 1)
""",
    "a branch in a function of a helper": """
def sync(g):
    if g <= 5:  # HERE
        dist.all_reduce(g)

def outer(g):
    sync(g)

outer(9 * rank)
dist.all_reduce(loss)
""",
    "behind what is the same on all ranks": """
def sync(g):
    if dist.get_world_size() == 1 or not dist.is_initialized():
        return
    if g > 5:  # HERE
        return
    with torch.no_grad():
        dist.all_reduce(g)

for step in range(9):
    sync(9 if rank and step == 4 else 1)
    dist.all_reduce(loss)
""",
    "a method": """
def sync(g):
    return g

class Meter:
    def mean(self):
        if not self.seen:  # HERE
            return 0
        dist.all_reduce(self.seen)

for epoch in range(3):
    meter = Meter()
    meter.seen = 0 if rank and epoch == 1 else 1
    best = meter.mean()
    dist.all_reduce(best)
""",
    "continue": """
for step in range(3):
    dist.all_reduce(loss)
    if step + rank == 2:  # HERE
        continue
    dist.barrier()
""",
    "batches of an epoch": """
def epoch(number):
    for batch in loader:
        sync(9 if rank and number == 1 and batch == 1 else 1)
        dist.all_reduce(loss)

for number in range(3):
    epoch(number)
""",
    "now and then all return early": """
for step in range(4):
    sync(9 if step == 1 or (rank and step == 2) else 1)
    dist.all_reduce(loss)
""",
    "all have returned early before": """
def sync(g):
    if g > 5:
        return
    dist.all_reduce(g)

for step in range(4):
    sync(9 if step == 1 else 1)
    if step == 2 and rank == 0:  # HERE
        dist.all_reduce(loss)
    dist.all_reduce(loss)
""",
}
SILENT = {
    "either of two, by one if": """
for step in range(3):
    dist.barrier()
    if step + rank == 2:
        dist.all_reduce(loss)
        continue
    dist.all_reduce(loss)
""",
    "either of two, by one return": """
def once():
    dist.barrier()
    if rank:
        dist.all_reduce(loss)
        return
    dist.all_reduce(loss)

once()
""",
    "one turn more of a loop of its own": """
for step in range(3):
    dist.barrier()
    for turn in range(1 + rank):
        dist.all_reduce(loss)
    dist.all_reduce(loss)
""",
    "a turn without a call": """
for step in range(4):
    if step + rank != 2:
        dist.barrier()
    if step + rank != 3:
        dist.all_reduce(loss)
""",
    "one of two": """
def sync(g):
    if g is None:
        return
    if g > 5:
        return
    dist.all_reduce(g)

sync(9 * rank)
dist.all_reduce(loss)
""",
    "the other skipped the next call": """
for step in range(3):
    sync(loss)
    if not rank and step == 1:
        continue
    dist.all_reduce(loss)
""",
    "a step is skipped, and then all return early": """
for step in range(4):
    if step == 1 and rank:
        continue
    sync(9 if step == 2 else 1)
    dist.all_reduce(loss)
""",
    "an inner loop turns once more": """
for step in range(3):
    sync(loss)
    for once in extra(step):
        dist.all_reduce(loss)
""",
    "an epoch with a batch less, and then all return early": """
for number in range(3):
    for batch in range(3 - (rank and number == 1)):
        sync(9 if batch == 0 and number == 2 else 1)
        dist.all_reduce(loss)
""",
    "the loop of the helper is shorter": """
def sync(all):
    for g in all:
        if g > 5:
            return
        dist.all_reduce(g)

sync([1, 1][rank:])
dist.all_reduce(loss)
""",
    "two functions, called by one line": """
def other(g):
    if g > 5:
        return
    dist.barrier()
    dist.barrier()

(other if rank else sync)(loss)
dist.barrier()
""",
    "a loop that returns": """
def sync(g):
    for one in extra(1):
        if one:
            pass
        else:
            for turn in range(rank):
                return
    if g > 5:
        return
    dist.all_reduce(g)

sync(loss)
dist.all_reduce(loss)
""",
    "a short circuit": """
done = rank == 0 and sync(loss)
dist.all_reduce(loss)
""",
    "an exception on the way": """
def careful(g):
    try:
        if rank:
            raise OSError
        sync(g)
    except OSError:
        pass

careful(loss)
dist.all_reduce(loss)
""",
    "a suppressed exception": """
with suppress(OSError):
    fail(rank)
    sync(loss)
dist.all_reduce(loss)
""",
    "a block that may swallow an exception": """
with quietly(OSError):
    fail(rank)
    sync(loss)
dist.all_reduce(loss)
""",
    "another object with such a method": """
class Loud:
    def log(self, g):
        if g > 5:
            return
        dist.all_reduce(g)

class Trainer:
    def fit(self):
        self.logger.log(loss)
        dist.all_reduce(loss)

trainer = Trainer()
trainer.logger = loggers(Loud)
trainer.fit()
""",
    "another function of that name": """
def quiet(g):
    pass

sync = quiet if rank else sync
sync(loss)
dist.all_reduce(loss)
""",
    "each in a branch of its own": """
if len(extra(1)) > 1:
    dist.all_reduce(loss)
else:
    sync(loss)
dist.barrier()
""",
    "the other branch has a call of its own, which an error skips": """
if rank == 1:
    with suppress(OSError):
        fail(1)
        dist.barrier()
else:
    dist.barrier()
dist.all_reduce(loss)
""",
    "so has what leaves": """
def save():
    with suppress(OSError):
        fail(1)
        dist.barrier()

def sync(g):
    if g > 5:
        save()
        return
    dist.barrier()

sync(9 * rank)
dist.all_reduce(loss)
""",
    "a decorated function": """
@on_rank_zero
def log(g):
    if g > 5:
        return
    dist.all_reduce(g)

log(loss)
dist.all_reduce(loss)
""",
}  # fmt: skip


class Recorded:
    """Collectives of one rank of two, that only note where they are called."""

    def __init__(self, rank: int, file: str) -> None:
        self.rank, self.file = rank, file
        self.calls: list[Collective] = []

    def get_world_size(self) -> int:
        return 2

    def is_initialized(self) -> bool:
        return True

    def barrier(self) -> None:
        self.all_reduce(kind="barrier")

    def all_reduce(self, tensor: Any = None, kind: str = "all_reduce") -> None:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                frames.append(Frame(self.file, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        number = len(self.calls) + 1
        self.calls.append(
            Collective(self.rank, number, kind, "0", number, 4, (1,), "float32", number, frames[0], members=(0, 1),
                       callers=tuple(frames[1:]))
        )  # fmt: skip


def played(program: str, file: Path) -> Skip | None:
    """What is said of two ranks of this program, where the lines of their calls first differ."""
    file.write_text(program)
    linecache.checkcache(str(file))
    reports = []
    for rank in range(2):
        dist = Recorded(rank, str(file))

        class Quiet:
            def log(self, g: int) -> None:
                pass

        def fail(rank: int) -> None:
            if rank:
                raise OSError

        names: dict[str, Any] = {
            "dist": dist, "rank": rank, "loss": 1, "loader": range(3), "torch": SimpleNamespace(no_grad=nullcontext),
            "extra": lambda step, rank=rank: range(1 + (rank and step == 1)),
            "suppress": suppress, "quietly": suppress, "fail": fail,
            "loggers": lambda loud, rank=rank, quiet=Quiet: quiet() if rank else loud(),
            "on_rank_zero": lambda called, rank=rank: (lambda g: None) if rank else called,
        }  # fmt: skip
        exec(compile(program, str(file), "exec"), names)
        reports.append(RankReport(rank, collectives=dist.calls))
    met = next(
        pair for pair in zip(*(one.collectives for one in reports), strict=False) if pair[0].chain != pair[1].chain
    )
    return skipped(dict(enumerate(met)), reports)


def with_helper(program: str) -> str:
    return program if "def sync(" in program else HELPER + program


@pytest.mark.parametrize("case", NAMED)
def test_the_statement_that_let_a_rank_skip_a_call_is_named(case: str, tmp_path: Path) -> None:
    source = with_helper(NAMED[case])
    found = played(source, tmp_path / "train.py")
    assert found is not None and source.splitlines()[found.branch.line - 1].endswith("# HERE"), found
    assert found.without == [1]


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_named_that_may_not_be_it(case: str, tmp_path: Path) -> None:
    assert played(with_helper(SILENT[case]), tmp_path / "train.py") is None


@pytest.mark.parametrize(("before", "told"), [
    ("", []),
    ("if g == 0: continue", ["A rank that takes the branch at line 2 (if g == 0) skips this call."]),
    ("if dist.get_world_size() == 1: continue", []),
    ("if g == 0 or g > limit: break", []),
])  # fmt: skip
def test_what_may_skip_a_call_of_a_loop(before: str, told: list[str], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"for g in grads:\n    {before}\n    dist.all_reduce(g)\n")
    linecache.checkcache(str(file))
    call = Collective(0, 1, "all_reduce", "0", 1, 4, (1,), "float32", 0, Frame(str(file), 3), members=(0, 1))
    assert may_skip(call) == told
    place = may_part(call)
    assert (place.line if place else None) == (2 if told else None)
