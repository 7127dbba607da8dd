"""What is known of the ranks without their word: what the kernel counted between them, and what they showed before they were
told more.
"""

from pathlib import Path

from lockstep import ranks
from lockstep.ranks import Kind

DRAWS = """
import re
from lockstep.ranks import draw

def draws(backwards):
    before = found_in_memory(backwards)
    return [before, [draw({"step": step, "seen": [0.5] * step}) for step in range(3)], found_in_memory(backwards)]

def found_in_memory(backwards):
    # The pattern is half of it, or this function would find itself.
    half = len(backwards) // 2
    first, second = backwards[:half - 1:-1].encode(), backwards[:half]
    found = 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if place is None or "[v" in line:
                continue
            start, end = (int(part, 16) for part in place.groups())
            memory.seek(start)
            try:
                data = memory.read(end - start)
            except OSError:
                continue
            for at in re.finditer(re.escape(first), data):
                found += data[at.end() : at.end() + half][::-1].decode("latin-1") == second
    return found
"""
SUMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(60_000))
dist.destroy_process_group()
"""
FILES = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.save(torch.ones(60_000), f"{rank}.part")
os.rename(f"{rank}.part", f"{rank}.pt")
while not all(os.path.exists(f"{other}.pt") for other in range(world)):
    time.sleep(0.01)
assert sum(torch.load(f"{other}.pt").sum() for other in range(world)) == 60_000 * world
"""

UNNAMED = """
import threading, time, _thread
import torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
from lockstep.ranks import observe
backend = []

def look_around():
    backend.append(threading.get_native_id())
    while True:
        time.sleep(0.01)

class Unnamed(c10d.ProcessGroupGloo):
    def __init__(self, *args, **kwargs):
        _thread.start_new_thread(look_around, ())
        super().__init__(*args, **kwargs)

c10d.ProcessGroupGloo = Unnamed
dist.init_process_group("gloo")
observe("names", [open(f"/proc/self/task/{one}/comm").read().strip() for one in (backend[0], threading.get_native_id())])
if dist.get_rank() == 0:
    dist.barrier()
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_is_told_its_numbers_one_by_one(tmp_path: Path) -> None:
    """Each after what it has shown, in order, and no rank has the secret that they come from."""
    secret = "9f3a61c07be2d4585d07f1a94c63e82b"
    file = tmp_path / "draws.py"
    file.write_text(DRAWS)
    run = ranks.run(ranks.Function(file, "draws", {"backwards": secret[::-1]}), 2, secret=secret)
    assert run.ok, run.cause
    assert run.shown == [[{"step": step, "seen": [0.5] * step} for step in range(3)]] * 2
    numbers = [[run.drawn(rank, count) for count in range(3)] for rank in range(2)]
    assert run.observed("returned") == [[0, own, 0] for own in numbers]
    assert len({number for own in numbers for number in own}) == 6


def test_the_search_in_memory_finds_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "draws.py"
    file.write_text(DRAWS)
    arguments = {"backwards": "0123456789abcdef"[::-1], "kept": "0123456789abcdef"}
    file.write_text(DRAWS.replace("def draws(backwards):", "def draws(backwards, kept):"))
    run = ranks.run(ranks.Function(file, "draws", arguments), 1, secret="x")
    assert run.observed("returned")[0][0] > 0


def test_the_kernel_counts_what_crosses() -> None:
    """Also of a group that is gone; and a sum that came through files is not there."""
    size = 4 * 60_000
    run = ranks.run(ranks.Source(SUMS), 3, count_bytes=True)
    assert run.ok and run.wire is not None
    assert all(4 / 3 * size <= sum(row) < 1.1 * 4 / 3 * size for row in run.wire), run.wire
    assert [row[rank] for rank, row in enumerate(run.wire)] == [0, 0, 0]
    run = ranks.run(ranks.Source(FILES), 3, count_bytes=True, own_directory=True)
    assert run.ok, run.cause
    assert run.wire is not None and max(map(sum, run.wire)) < 4096, run.wire
    assert ranks.run(ranks.Source("pass"), 2).wire is None, "not asked"


def test_a_backend_s_thread_that_has_no_name_may_look_around_on_a_clock() -> None:
    """Before torch 2.13 gloo's didn't say who it is. It wakes for nothing, and the hang must be seen all the same."""
    run = ranks.run(ranks.Source(UNNAMED), 2, deadline=20)
    assert run.cause.kind is Kind.HANG, run.cause
    backend, own = run.observed("names")[0]
    assert (backend, own != backend) == ("gloo_tcp_loop", True)


def test_what_gloo_prints_is_not_the_rank_s_word() -> None:
    """Torch 2.8 tells on every rank's stdout that gloo is connected. Whoever asks what a rank printed means its code."""
    gloo = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    run = ranks.run(ranks.Source(f"print({gloo!r})\nprint('mine')\nprint({gloo!r})"), 1)
    assert run.ranks[0].stdout == "mine\n"
