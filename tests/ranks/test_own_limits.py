"""A wait that the program itself has limited ends by itself; only what still waits afterwards hangs."""

import pytest

from lockstep import ranks
from lockstep.ranks import Kind

IMPORTS = """\
import socket
from datetime import timedelta
import torch, torch.distributed as dist
"""
PRELUDE = f"""{IMPORTS}
dist.init_process_group("gloo")
rank = dist.get_rank()
t, order = torch.ones(4), torch.zeros(1)
"""
TRIES = {
    "a wait": """
if rank == 0:
    work = dist.all_reduce(t, async_op=True)
    try: work.wait(timedelta(seconds=3))
    except RuntimeError: dist.send(order, 1)
    while not work.is_completed(): pass
else:
    dist.recv(order, 0)
    dist.all_reduce(t)
""",
    "monitored_barrier": """
watch = dist.new_group([0, 1])
if rank == 0:
    try: dist.monitored_barrier(watch, timeout=timedelta(seconds=3))
    except RuntimeError: dist.send(order, 1)
else:
    dist.recv(order, 0)
""",
}
COORDINATOR = """
nobody = socket.socket(); nobody.bind(("127.0.0.1", 0))
address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
try: dist.init_process_group("gloo", address, timedelta(seconds=3), rank=1, world_size=2)
except Exception: dist.init_process_group("gloo")
rank, t = dist.get_rank(), torch.ones(4)
dist.barrier()
"""
PROGRAMS = {
    **{case: PRELUDE + text + "dist.barrier()\n" for case, text in TRIES.items()},
    "init_process_group": IMPORTS + COORDINATOR,
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_that_catches_its_own_timeout_ends_well(case: str) -> None:
    run = ranks.run(ranks.Source(PROGRAMS[case]), 2)
    assert run.ok, run.cause


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_hangs_afterwards_is_explained(case: str) -> None:
    run = ranks.run(ranks.Source(f"{PROGRAMS[case]}dist.recv(t, 1 - rank)"), 2)
    assert run.cause is not None and run.cause.kind is Kind.HANG
    assert run.cause.headline.startswith("rank 0 waits to receive from rank 1; rank 1 waits to receive from rank 0")


OTHER_LIMITS = {
    "the group has a timeout": ('dist.init_process_group("gloo", timeout=timedelta(seconds=30))', "dist.recv(t, 1 - rank)"),
    "a wait of minutes": (
        'dist.init_process_group("gloo")', "dist.irecv(t, 1 - rank).wait(timedelta(minutes=2))",
    ),
    "a wait that is longer than a cell may do nothing": (
        'dist.init_process_group("gloo")', "dist.irecv(t, 1 - rank).wait(timedelta(seconds=30))",
    ),
    "the limit is 0, so the group's": ('dist.init_process_group("gloo")', "dist.irecv(t, 1 - rank).wait(timedelta(0))"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_LIMITS)
def test_no_other_timeout_keeps_a_hang_from_being_explained(case: str) -> None:
    begin, call = OTHER_LIMITS[case]
    run = ranks.run(ranks.Source(f"{IMPORTS}{begin}\nrank, t = dist.get_rank(), torch.ones(4)\n{call}"), 2)
    assert run.cause is not None and run.cause.kind is Kind.HANG


def test_a_hang_of_others_is_explained_without_those_that_may_go_on() -> None:
    """Rank 0's own wait takes longer than a cell may last; rank 1 waits for its orders."""
    text = """
if rank > 1: dist.recv(t, 5 - rank)
elif rank == 1: dist.recv(order, 0)
else: dist.irecv(t, 1, tag=1).wait(timedelta(seconds=60))
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 4, idle_limit=None, deadline=30)
    assert run.cause is not None and run.cause.kind is Kind.HANG
    assert run.cause.headline == "rank 2 waits to receive from rank 3; rank 3 waits to receive from rank 2."
    assert [row.rank for row in run.cause.rows] == [2, 3]
    assert "Ranks 0 and 1 might still have continued; Lockstep ended them." in run.cause.notes
