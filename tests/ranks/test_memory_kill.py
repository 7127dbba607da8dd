"""A rank that the kernel ends because memory has run out is told as that, and one that somebody else kills is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

GROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
MOST = 2 << 30
HOLDS_MORE_AND_MORE = """\
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
held = []
for step in range(1000):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        held.append(torch.ones(1 << 24))
    if step == {killed_at}:
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose processes may together hold MOST bytes."""
    for parent, limit in GROUPS:
        made = parent / f"lockstep-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(MOST))
        except OSError:
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("not run: this user cannot make a control group that limits memory")


def said_of(script: Path, group: Path) -> str:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "3", str(script)]
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, "sh", *command], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"},
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_kernels_own_count_tells_it_apart(group: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOLDS_MORE_AND_MORE.format(killed_at=-1))
    said = said_of(script, group)
    assert "OUT OF MEMORY: rank 1 was killed by SIGKILL: the system was out of memory (it held " in said, said
    assert "smaller batches need less" in said and "Its last call was all_reduce #" in said, said
    script.write_text(HOLDS_MORE_AND_MORE.format(killed_at=1))
    said = said_of(script, group)
    assert "was killed by SIGKILL" in said and "memory" not in said.partition("CRASH: ")[2], said
