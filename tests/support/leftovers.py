"""What a test may have left on this machine: every test of the ranks proves that it is nothing."""

import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import ranks
from lockstep.ranks import client

# Every process that comes from a test inherits this, also one that has detached itself from everything else.
MARK = f"LOCKSTEP_TEST_MARK={uuid.uuid4().hex}"
LINUX = os.path.isdir("/proc/self")


@pytest.fixture(scope="session", autouse=True)
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Others may use this machine at the same time, so what belongs to these runs has to be told by its marks."""
    ranks.stop()  # A warm process from another test's days does not have them.
    name, value = MARK.split("=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield
        ranks.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(marked: None) -> Iterator[None]:
    """After each test: no process, no listening port, no folder, no shared memory that was not there before."""
    before = remains()
    yield
    if not LINUX:
        return
    give_up = time.monotonic() + 3
    while (new := remains() - before) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not new, f"left by the run: {sorted(new)}"


def remains() -> set[str]:
    """All that a run could leave. The warm process itself may stay, but it may not listen anywhere."""
    server = client._server._process
    warm = server.pid if server is not None else 0
    found = {f"process {pid} {command(pid)}" for pid in marked_processes() if pid != warm and not is_tracker(pid)}
    found |= {f"port {port} of {pid}" for pid in (warm, os.getpid()) for port in listening(pid)}
    found |= {f"folder {name}" for name in os.listdir(tempfile.gettempdir()) if not name.startswith("torchinductor_")}
    if os.path.isdir("/dev/shm"):
        found |= {f"shared memory {name}" for name in os.listdir("/dev/shm") if is_ours(name)}
    return found


def is_ours(name: str) -> bool:
    """Shared memory that a test has named, or that torch has named after a process which is no more."""
    made = re.match(r"torch_(\d+)_", name)
    return MARK[-12:] in name or (made is not None and not state(int(made.group(1))))


def marked_processes() -> list[int]:
    """All processes that have the mark in the environment they were started with."""
    found = []
    for name in os.listdir("/proc") if LINUX else []:
        if name.isdigit() and int(name) != os.getpid():
            try:
                if MARK.encode() in Path(f"/proc/{name}/environ").read_bytes() and state(int(name)) != "Z":
                    found.append(int(name))
            except OSError:
                continue
    return found


def state(pid: int) -> str:
    """The state letter of a process; empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:200]
    except OSError:
        return ""


def is_tracker(pid: int) -> bool:
    """This test process's own helper, not a run's."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return True
    return parent == os.getpid() and "resource_tracker" in command(pid)


def listening(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        table = Path(f"/proc/{pid}/net/tcp").read_text() + Path(f"/proc/{pid}/net/tcp6").read_text()
    except OSError:
        return []
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in table.splitlines()]
    return [int(row[1].rsplit(":", 1)[1], 16) for row in rows if len(row) > 9 and row[3] == "0A" and row[9] in inodes]


def wait_until_gone(pids: list[int], seconds: float = 3.0) -> list[int]:
    """Those of the processes that are still there after so long: the promise of the design is 3 s."""
    give_up = time.monotonic() + seconds
    while (left := [pid for pid in pids if state(pid) not in ("", "Z")]) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left
