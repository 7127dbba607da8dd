"""Stands where `train.py` stands when `train.sbatch` is checked: ranks that count, meet, save and hear, and need no
torch.

Each rank notes in a journal who it is, where it runs and what it was given. In every step the ranks exchange over a
socket, as an all-reduce would, whether one of them was asked to stop; then all stop behind the same step, and rank 0
saves. The job is complete when the file `finish` beside this one names it, in that start of it or a later one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
JOURNAL = HERE / "journal"
STEP_SECONDS = 0.05
SAVE_EVERY = 10
MEETING_SECONDS = 120.0
GO_ON, STOP, COMPLETE = b"\0", b"\1", b"\2"

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TASK = os.environ.get("SLURM_ARRAY_TASK_ID")
JOB = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{TASK}" if TASK else os.environ.get("SLURM_JOB_ID", "")
START = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
MEETING = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
ROUND = f"{JOB}-{START}-{MEETING}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

asked: list[int] = []


def note(event: str, **more: Any) -> None:
    """A line in the journal, which all ranks of all jobs write."""
    line = {"event": event, "job": JOB, "start": START, "round": ROUND, "rank": RANK, **more}
    with open(JOURNAL, "a") as journal:
        journal.write(json.dumps(line) + "\n")


def leave(status: int) -> NoReturn:
    """End at once."""
    sys.stdout.flush()
    os._exit(status)


def meet() -> list[socket.socket]:
    """Connections to all other ranks, on rank 0; to rank 0, on the others."""
    place = HERE / f"meeting-{ROUND}"
    if RANK == 0:
        with socket.create_server(("", 0), backlog=WORLD_SIZE) as door:
            door.settimeout(MEETING_SECONDS)
            unfinished = HERE / f"{place.name}.new"
            unfinished.write_text(str(door.getsockname()[1]))
            os.replace(unfinished, place)
            return [door.accept()[0] for _ in range(WORLD_SIZE - 1)]
    give_up = time.monotonic() + MEETING_SECONDS
    while not place.exists():
        if time.monotonic() > give_up:
            leave(1)
        time.sleep(0.02)
    return [socket.create_connection((os.environ["MASTER_ADDR"], int(place.read_text())), MEETING_SECONDS)]


def may_finish() -> bool:
    """Whether the checks have said that this start of the job is to complete."""
    try:
        return f"{JOB} {START}" in (HERE / "finish").read_text().splitlines()
    except OSError:
        return False


def exchange(others: list[socket.socket]) -> bytes:
    """What all ranks do next; the same on all. Leaves when one of them is gone."""
    mine = STOP if asked else GO_ON
    try:
        if RANK:
            others[0].sendall(mine)
            answer = others[0].recv(1)
        else:
            said = [mine, *(other.recv(1) for other in others)]
            answer = b"" if b"" in said else max(said)
            if answer == GO_ON and may_finish():
                answer = COMPLETE
            for other in others:
                other.sendall(answer)
    except OSError:
        answer = b""
    if not answer:
        note("lost a rank")
        leave(1)
    return answer


def main() -> None:
    """One start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/train"))
    parser.add_argument("--seed", type=int, default=0)
    given, rest = parser.parse_known_args()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    checkpoint = given.folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    note("begins", host=socket.gethostname(), local=int(os.environ.get("LOCAL_RANK", -1)), world=WORLD_SIZE, step=step,
         folder=str(given.folder.absolute()), seed=given.seed, rest=rest, meeting=MEETING)  # fmt: skip
    others = meet()
    for other in others:
        other.settimeout(MEETING_SECONDS)
    if RANK == 0:
        print(f"start {START} of job {JOB} begins at step {step}", flush=True)
    told = False
    while True:
        time.sleep(STEP_SECONDS)
        if asked and not told:
            told = True
            note("asked", signal=asked[0], step=step)
        answer = exchange(others)
        step += 1
        if RANK == 0:
            if answer != GO_ON or step % SAVE_EVERY == 0:
                given.folder.mkdir(parents=True, exist_ok=True)
                unfinished = checkpoint.with_suffix(".new")
                unfinished.write_text(str(step))
                os.replace(unfinished, checkpoint)
                note("saved", step=step)
            else:
                note("step", step=step)
        if answer != GO_ON:
            note("complete" if answer == COMPLETE else "stopped", step=step)
            leave(0)


if __name__ == "__main__":
    main()
