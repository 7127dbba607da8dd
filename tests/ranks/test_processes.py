"""Who descends from whom, also where a process is half dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.ranks import processes

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
