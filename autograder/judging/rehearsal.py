"""Rehearses a `train.sbatch` without SLURM: `srun`, `torchrun`, `scontrol` and `scancel` only note what they are told.

It shows in a second what takes a cluster minutes: a training that fails, and a task of an array. What a script does by
other means than these four commands isn't seen, and nothing is concluded from that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARRAY, TASK, JOB = "70", "3", "77"
FAILED = 3  # the status of a training that fails
STARTING_SECONDS, ENDING_SECONDS = 10.0, 15.0
NOTE = """#!/bin/bash
printf '%s\\0' "$@" >"$REHEARSAL/${0##*/}.$$"
"""
TORCHRUN = f"""{NOTE}[ "$REHEARSED" = fails ] && exit {FAILED}
for _ in {{1..300}}; do [ -e "$REHEARSAL/asked" ] && break; sleep 0.05; done
"""
COMMANDS = {
    "torchrun": TORCHRUN,
    "python": """#!/bin/bash
[[ " $* " == *" torch.distributed."* ]] && exec torchrun "$@"
exec "$(PATH=${PATH#*:} type -P "${0##*/}")" "$@"
""",
    "srun": """#!/bin/bash
while [[ $1 == -* ]] || { [ $# -gt 0 ] && ! type -P "$1" >/dev/null; }; do shift; done
for id in 0 1; do SLURM_NODEID=$id SLURM_PROCID=$id SLURMD_NODENAME=node$id "$@" & started+=($!); done
for one in "${started[@]}"; do wait "$one" || status=$?; done
exit ${status:-0}
""",
    "scontrol": f"""{NOTE}[[ $1 == show && $2 == hostname* ]] && printf 'node0\\nnode1\\n'
[ "$1" = requeue ] && touch "$REHEARSAL/asked"; true
""",
    "scancel": f'{NOTE}touch "$REHEARSAL/asked"\n',
}
"""`srun` runs its command, the first word that is one, as on two nodes at once. A job that is requeued is ended, so its
ranks are signaled.
"""


@dataclass(frozen=True)
class Rehearsal:
    """How it went. `status` is the script's, None where it didn't end; `told` has the words of each call by command."""

    status: int | None
    told: dict[str, list[list[str]]]

    @property
    def requeued(self) -> list[str]:
        """The jobs that it put back into the queue."""
        return [word for words in self.told["scontrol"] if "requeue" in words for word in words if word[:1].isdigit()]

    @property
    def log_folders(self) -> list[str]:
        """What each node's torchrun was given as --log-dir."""
        said = ["\0".join(words) for words in self.told["torchrun"]]
        return [found[1] for words in said if (found := re.search(r"--log[-_]dir[=\0]([^\0]+)", words))]


def rehearse(script: Path, folder: Path, request: str, how: str) -> Rehearsal:
    """Run the script in a new `folder` as task 3 of array 70, whose job has the number 77.

    `how` is "fails": the training ends with status 3 at once; or "asked": it goes on until it is signaled, and the script
    gets the signal of its --signal option, `request`.
    """
    commands = folder / "commands"
    commands.mkdir(parents=True)
    for name, text in [*COMMANDS.items(), ("python3", COMMANDS["python"])]:
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    copy = folder / "train.sbatch"
    shutil.copyfile(script, copy)
    copy.chmod(0o755)
    (folder / "train.py").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    nodes = {"SLURM_NNODES": "2", "SLURM_NODELIST": "node[0-1]", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "2"}
    nodes |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURMD_NODENAME": "node0"}
    job = {"SLURM_JOB_ID": JOB, "SLURM_JOBID": JOB, "SLURM_ARRAY_JOB_ID": ARRAY, "SLURM_ARRAY_TASK_ID": TASK}
    told = {"REHEARSAL": str(folder), "REHEARSED": how, "PATH": f"{commands}:{os.environ['PATH']}"}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen([str(copy), "--epochs", "1"], cwd=folder, env=kept | nodes | job | told, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)  # fmt: skip
    status = None
    try:
        if how == "asked":
            until = time.monotonic() + STARTING_SECONDS
            while time.monotonic() < until and process.poll() is None and len(list(_calls(folder, "torchrun"))) < 2:
                time.sleep(0.02)
            process.send_signal(_number(request))
        status = process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Rehearsal(status, {name: list(_calls(folder, name)) for name in COMMANDS})


def _calls(folder: Path, command: str) -> Iterator[list[str]]:
    for note in sorted(folder.glob(f"{command}.*[0-9]")):
        if words := note.read_text(errors="replace").split("\0")[:-1]:
            yield words


def _number(request: str) -> int:
    """Of the signal that --signal asks for: `B:USR1@60`, `SIGTERM`, `10`."""
    name = request.partition("@")[0].rpartition(":")[2].upper().removeprefix("SIG")
    return int(name) if name.isdigit() else getattr(signal, f"SIG{name}", signal.SIGUSR1)
