"""Who descends from whom, also where a process is half dead."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.ranks import processes


def kernel() -> tuple[int, ...]:
    """Linux's version, as far as two numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])


HALF_DEAD = """
import ctypes, os, threading, time
child = os.fork()
if not child:
    os.setsid()
    time.sleep(300)
threading.Thread(target=time.sleep, args=(300,)).start()
print(child, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(not processes.LINUX, reason="not run: needs /proc")
def test_a_process_whose_first_thread_has_ended_lives_and_has_its_children() -> None:
    """Such a process looks like a zombie. It is found, and so is what it has started; both can be ended."""
    started = subprocess.Popen([sys.executable, "-c", HALF_DEAD], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    try:
        give_up = time.monotonic() + 10
        while Path(f"/proc/{started.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < give_up, "its first thread has not ended"
            time.sleep(0.01)
        assert {started.pid, child} <= set(processes.descendants(os.getpid()))
        processes.kill([started.pid])
        assert started.wait(10) == -signal.SIGKILL
        assert started.pid not in processes.parents()
    finally:
        processes.kill([started.pid, child])
        started.stdout.close()


IN_HUGE_PAGES = """
import mmap, re
from lockstep.ranks import huge_pages

def huge():
    return int(re.search(r"AnonHugePages: +(\\d+) kB", open("/proc/self/smaps_rollup").read())[1]) << 10

held = mmap.mmap(-1, 8 * huge_pages.HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(held), mmap.PAGESIZE):
    held[at] = at // mmap.PAGESIZE % 251
before = huge()
huge_pages.collapse()
same = all(held[at] == at // mmap.PAGESIZE % 251 for at in range(0, len(held), mmap.PAGESIZE))
print(same, (huge() - before) // huge_pages.HUGE)
"""


BOMB = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        orphan = os.fork()
        if orphan:
            print(orphan, flush=True)
            os._exit(0)
    time.sleep(300)
time.sleep(300)
"""


def test_of_many_an_orphan_ends_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent has died, so it descends from nobody that is looked at; its session is still one of theirs."""
    monkeypatch.setattr(processes, "CROWD", 0)
    with subprocess.Popen([sys.executable, "-c", BOMB], stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        orphan = int(root.stdout.readline())
        until = time.monotonic() + 60
        while orphan in processes.descendants(root.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert len(processes.descendants(root.pid)) == 1 and Path(f"/proc/{orphan}").exists()
        assert processes.end_all(root.pid, patience=30) == []
        while Path(f"/proc/{orphan}/exe").exists() and time.monotonic() < until:
            time.sleep(0.01)
        left = Path(f"/proc/{orphan}/exe").exists()
        root.kill()
        processes.kill([orphan])
    assert not left


@pytest.mark.skipif(not processes.LINUX or kernel() < (6, 1), reason="not run: needs Linux 6.1 (MADV_COLLAPSE)")
def test_memory_goes_into_huge_pages_and_keeps_what_it_holds() -> None:
    done = subprocess.run([sys.executable, "-c", IN_HUGE_PAGES], capture_output=True, text=True, timeout=60)
    same, pages = done.stdout.split()
    assert same == "True" and int(pages) >= 7, done.stdout + done.stderr


NICE = """
from lockstep import ranks
run = ranks.run(ranks.Source("import os; print(os.getpriority(os.PRIO_PROCESS, 0))"), 2)
print(*[rank.stdout for rank in run.ranks])
"""


def test_ranks_are_as_nice_as_who_started_them() -> None:
    """The server is served first, and its ranks are not: `nice -n 7` of a command holds for them."""
    command = ["nice", "-n", "7", sys.executable, "-c", NICE]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 7
    assert said.split() == [str(niceness)] * 2
