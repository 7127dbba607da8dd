"""The operating system's side: which processes belong to a run, whether they move, and how they are all ended.

Linux gives everything wanted here: a subreaper, which inherits whatever its ranks detach, and counters of how often
each thread was given the processor. Elsewhere (macOS) the same functions answer with less: `movement` returns None,
"cannot tell", and hang detection falls back on the ranks' own word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_GET_NAME = 16
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_DUMPABLE = 4
HELPER_NAME = "lockstep-helper"
CROWD = 64  # So many processes are ended by groups: whoever looks at one after the other is slower than they multiply
BREEDING_SECONDS = 20.0
PRECEDENCE = -15
ACCELERATORS = ("/dev/nvidia-uvm", "/dev/kfd")


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prctl(option: int, value: int | bytes | ctypes.Array[ctypes.c_char]) -> None:
    if LINUX:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, detached ones included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def close_to_others(closed: bool) -> None:
    """Keep, or stop keeping, other processes of the same user from reading this one's memory and open files (ptrace(2)).

    It is inherited by a fork. While it is on, the process cannot make a user namespace of its own.
    """
    _prctl(_PR_SET_DUMPABLE, int(not closed))


def give_precedence(pid: int) -> None:
    """Have the process, the leader of a session, served before others, where the system lets us (root).

    Who watches others must be served though they multiply. It holds for all that it forks, as long as they stay in its
    session: the kernel shares out the processor by sessions first (autogroup in sched(7)).
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(PRECEDENCE, os.getpriority(os.PRIO_PROCESS, pid)))
        Path(f"/proc/{pid}/autogroup").write_text(str(PRECEDENCE))


def take_the_processor() -> None:
    """Have this thread served before everybody else from now on, where the system lets it (root): `sched(7)`, SCHED_FIFO.

    Who ends processes that multiply must be faster than all of them together, and each of their sessions counts as much
    as his own (`give_precedence`). What is forked from here is not served so.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def queue_up(niceness: int) -> None:
    """Be served among others again, with this `niceness` (see nice(1)), in a session of one's own."""
    os.setsid()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        Path("/proc/self/autogroup").write_text(str(niceness))


def threads() -> int:
    """How many threads there are on this machine, or in a sandbox as a rule there too; 0 where that is not told."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])
    return 0


def limit_threads_in_sandbox(more: int) -> None:
    """In a sandbox, let this process and its children have so many threads, which are what the kernel counts, more than now.

    A last barrier, for nothing that forks shall fill the machine before it is stopped. Elsewhere there is none: the kernel
    counts all threads of a user, those in other containers too, and nobody can say how many of them are this run's. It
    does not hold root. Before Linux 5.14 a sandbox's threads were counted together with those outside: no limit there.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if not LINUX or os.geteuid() == 0 or release is None or (int(release[1]), int(release[2])) < (5, 14):
        return
    alone = False
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/uid_map") as file:
        alone = file.read().split()[2] == "1"  # the sandbox's namespace knows one user
    if not alone:
        return
    import resource

    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = count + more if hard == resource.RLIM_INFINITY else min(hard, count + more)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def call_helper() -> None:
    """Give this process the name by which a supervisor knows the runtime's own helpers."""
    _prctl(_PR_SET_NAME, HELPER_NAME.encode())


def parents() -> dict[int, int]:
    """The parent of every living process: {pid: parent's pid}. Empty where /proc is missing."""
    return {pid: one.parent for pid, one in _living().items()}


class _Process(NamedTuple):
    """The numbers of its parent, its process group and its session."""

    parent: int
    group: int
    session: int


def _living() -> dict[int, _Process]:
    """Every living process.

    A process lives as long as one of its threads does. Its first one may have ended: while a killed process is dying, or
    because it wanted to look dead; its children are still its own then.
    """
    found: dict[int, _Process] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                state, parent, group, session, *rest = _stat(int(name))
                if state != b"Z" or int(rest[13]) > 1:  # num_threads in proc(5)
                    found[int(name)] = _Process(int(parent), int(group), int(session))
            except (OSError, ValueError, IndexError):
                continue
    return found


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on. Raises OSError or ValueError when the process is gone.

    A watcher reads it of every process many times a second: not with `open`, which takes three times as long.
    """
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.read(file, 4096)
    finally:
        os.close(file)
    return stat[stat.rindex(b")") + 2 :].split()


def descendants(root: int, known: dict[int, int] | None = None) -> list[int]:
    """Process ids of all living descendants of `root`, nearest first, among those of `known` (default: `parents()`)."""
    children: dict[int, list[int]] = {}
    for pid, parent in (parents() if known is None else known).items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def memory_kills() -> int:
    """How many processes the kernel has ended on this machine, ever, because memory ran out: the machine's, or that of a
    container or job (`oom_kill` in /proc/vmstat). 0 where it doesn't tell.
    """
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each process; those already gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the process's main thread, where any thread of it might be chosen otherwise; if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        try:
            sent = ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, number) == 0
        except (OSError, AttributeError):
            sent = False
        if not sent:
            os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """True when a signal (SIGSTOP, Ctrl-Z) holds the process until another lets it go on."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _stat(pid)[0] in b"Tt"
    return False


def is_asleep(pid: int) -> bool:
    """True when the process's main thread waits for something."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _stat(pid)[0] == b"S"
    return False


def catches(pid: int, number: int) -> bool:
    """True when the process has a handler for the signal, so that the signal does not end it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


def open_files(pid: int) -> Iterator[str]:
    """What the process has open: paths, and the like of `socket:[4711]`; nothing when it is gone or not ours to ask."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(entry.path)


def sockets(pid: int) -> set[int]:
    """The inodes of the process's sockets."""
    return {int(file[8:-1]) for file in open_files(pid) if file.startswith("socket:[")}


def command_line(pid: int) -> str:
    """The process's command line; empty when it is gone, or where /proc is missing."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(300).replace(bytes(1), b" ").decode(errors="replace").strip()
    return ""


def environment(pid: int) -> dict[str, str]:
    """The variables with which the process was started; empty where they cannot be read."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
    return {}


def is_helper(pid: int) -> bool:
    """True for a process that the runtime itself put beside a rank."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip() == HELPER_NAME
    return False


def is_janitor(pid: int) -> bool:
    """True for the helpers of Python and torch that remove shared memory when the process that made it has ended."""
    command = command_line(pid)
    return "multiprocessing.resource_tracker" in command or command.split(" ")[0].endswith("torch_shm_manager")


def reap(statuses: dict[int, int]) -> None:
    """Collect every child that has ended into `statuses`: process id to exit code, negative for a signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        statuses[pid] = os.waitstatus_to_exitcode(status)


def end_all(
    root: int, statuses: dict[int, int] | None = None, patience: float = 2.5, breeding: bool = False
) -> list[int]:
    """SIGKILL all descendants of `root` until none is left; returns those that would not go.

    Children of this process are collected into `statuses`. Janitors get a moment more than the others: they clean up and
    leave by themselves when the others are gone. Many, which may be `breeding`, are killed by process groups: that is one
    act, in which nobody gets away. As long as there are new ones, they are hunted, `BREEDING_SECONDS` at the most.
    """
    began = time.monotonic()
    known: set[int] = set()
    give_up = began + patience
    while True:
        looked = time.monotonic()
        if statuses is not None:
            reap(statuses)
        living = _living()
        known_parents = {pid: one.parent for pid, one in living.items()}
        # In the first, one whose parent has died meanwhile may be missing.
        left = descendants(root, known_parents) or descendants(root)
        now = time.monotonic()
        if not left:
            return []
        breeding = breeding or len(left) > CROWD
        new = not known.issuperset(left)
        if breeding and new:
            give_up = max(give_up, min(now + patience, began + BREEDING_SECONDS))
        if now > give_up:
            return left
        known.update(left)
        if breeding:
            _kill_groups(left, living, root)
        hurry = breeding or now - began > patience / 3
        kill(pid for pid in left if hurry or not is_janitor(pid))
        # Those that are dying need the processor, too.
        time.sleep(0.002 if new else max(0.002, 2 * (time.monotonic() - looked)))


def _kill_groups(pids: Iterable[int], living: dict[int, _Process], root: int) -> None:
    """SIGKILL the process groups of these descendants of `root`, each at once.

    A session that was made below `root` has nobody else in it, also where one's parent has died while we looked. In
    root's own session, only groups that consist of these processes alone are killed.
    """
    members = set(pids)
    groups = {living[pid].group for pid in members if pid in living} - {os.getpgrp()}
    outer = living[root].session if root in living else None
    groups -= {one.group for pid, one in living.items() if pid not in members and outer in (None, one.session)}
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


POLLERS = (b"gloo_tcp_loop",)
"""Threads that look for network events on a clock. They wake for nothing, so their turns say nothing; what they do for
somebody shows in the bytes that their process has read and written. Torch 2.13 gives gloo's thread this name; in 2.11 it has none of its own."""


@contextlib.contextmanager
def threads_named(name: bytes) -> Iterator[None]:
    """Give this thread another name for a while: a new thread has its maker's, unless it takes one of its own."""
    before = ctypes.create_string_buffer(16)
    _prctl(_PR_GET_NAME, before)
    _prctl(_PR_SET_NAME, name)
    try:
        yield
    finally:
        _prctl(_PR_SET_NAME, before.value)


@dataclass(frozen=True)
class Movement:
    """How often each thread of some processes was given the processor, and how many bytes each process has moved.

    Equal twice, with nobody awake, means that nothing happened in between. Keys are process id and thread id, with
    thread 0 for the bytes; `awake` and `pollers_awake` are process ids.
    """

    turns: dict[tuple[int, int], int]
    awake: frozenset[int]
    pollers_awake: frozenset[int]

    def still(self, later: Movement) -> bool:
        """True when every thread slept at both moments and none ran in between."""
        return not self.awake and not later.awake and self.turns == later.turns

    def settled(self, later: Movement) -> bool:
        """True when moreover no poller had anything to look at: nothing is on its way to anybody."""
        return self.still(later) and not self.pollers_awake and not later.pollers_awake

    def without(self, pid: int) -> Movement:
        """The same without one process."""
        turns = {key: count for key, count in self.turns.items() if key[0] != pid}
        return Movement(turns, self.awake - {pid}, self.pollers_awake - {pid})


def movement(pids: Iterable[int], ignore: Iterable[int] = ()) -> Movement | None:
    """Observe all threads of these processes but those in `ignore`; None where the system does not tell."""
    if not LINUX:
        return None
    turns: dict[tuple[int, int], int] = {}
    awake: set[int] = set()
    pollers_awake: set[int] = set()
    passed_over = set(ignore)
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for name in threads:
            thread = int(name)
            if thread in passed_over:
                continue
            try:
                with open(f"/proc/{pid}/task/{name}/status", "rb") as status:
                    text = status.read()
            except OSError:
                continue
            state, count, polls = _thread(text)
            if polls:
                if state != b"S":
                    pollers_awake.add(pid)
                continue
            turns[pid, thread] = count
            if state not in b"STtZXI":
                awake.add(pid)
        turns[pid, 0] = bytes_moved(pid)
    return Movement(turns, frozenset(awake), frozenset(pollers_awake))


def _thread(status: bytes) -> tuple[bytes, int, bool]:
    """State, turns and whether it is a poller, from a thread's status file."""
    state, count, polls = b"?", 0, False
    for line in status.split(b"\n"):
        if line.startswith(b"Name:"):
            polls = line[5:].strip() in POLLERS
        elif line.startswith(b"State:"):
            state = line.split()[1]
        elif b"voluntary_ctxt_switches:" in line:
            count += int(line.split()[1])
    return state, count, polls


def holds_accelerator(pid: int) -> bool:
    """True when the process has CUDA's or ROCm's memory device open: it may wait for work that the system doesn't see."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) in ACCELERATORS:
                    return True
    return False


def in_flight(pids: Iterable[int]) -> str:
    """`tcp` when one of these processes has sent or been sent what has not been taken yet, `udp` when it waits for an
    answer by UDP (a name server's), else empty.

    A process in flight may move though every thread sleeps. A slow link keeps its bytes in the sockets' queues.
    """
    found = ""
    for pid in pids:
        inodes = {str(inode) for inode in sockets(pid)}
        for protocol in ("tcp", "tcp6", "udp", "udp6") if inodes else ():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{protocol}") as table:
                for line in table:
                    fields = line.split()
                    if fields[9] not in inodes or fields[3] != "01":
                        continue
                    if protocol.startswith("udp"):
                        return "udp"
                    if fields[4] != "00000000:00000000":
                        found = "tcp"
    return found


def bytes_moved(pid: int) -> int:
    """Bytes that the process has read and written so far, sockets included; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/io", "rb") as file:
        return sum(int(line.split()[1]) for line in file.readlines()[:2])
    return 0


def private_memory(pid: int) -> int:
    """Bytes of memory that the process holds for itself: anonymous and shared-memory pages, not mapped files."""
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status", "rb") as status:
        for line in status:
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                total += int(line.split()[1]) << 10
    return total


def cpu_seconds(pid: int, alone: bool = False) -> float:
    """Processor seconds that the process has used, with the children it has waited for, or `alone`; 0.0 when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return sum(map(int, _stat(pid)[11 : 13 if alone else 15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def seconds_in_queue(pid: int) -> float:
    """For how long the process's main thread has waited for a processor so far; infinite where that is not told."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return float("inf")


def shared_memory_files(pids: Iterable[int]) -> set[str]:
    """Paths under /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
            for line in maps:
                at = line.find("/dev/shm/")
                if at >= 0 and "(deleted)" not in line:
                    found.add(line[at:].strip())
    return found
