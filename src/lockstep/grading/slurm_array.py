"""The class as a SLURM job array: each task grades a slice, all of them into one shared folder.

The script is written here, submitted, waited for and, on Ctrl-C, cancelled. Whatever happens to a task, what it has
graded is in its files. The job's number is kept, so that a client that was killed finds its array again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..course import CourseError
from ..course.files import write
from ..ranks.client import SOURCE
from .bulk import Grading, OnLearner
from .intake import Handed
from .store import pretty

TASKS = 8
POLL_SECONDS = 2.0
PATIENCE = 30  # How often in a row squeue may fail: a busy controller is no reason to give up a class
COMMAND_SECONDS = 60.0


class Unfinished(Exception):
    """The array has ended and has not graded everybody. The message says what its tasks said last."""


def carry_out(grading: Grading, pending: Sequence[Handed], tasks: int, on_learner: OnLearner) -> None:
    """Have these learners graded by an array of so many tasks, and wait for it; `on_learner` is called for each.

    An array of an earlier call that is still running (`at_work`) is waited for instead. A KeyboardInterrupt cancels the
    array. Raises CourseError when SLURM is missing or refuses, Unfinished when the array ends too early.
    """
    if shutil.which("sbatch") is None:
        raise CourseError(
            "there is no sbatch here: --slurm is for a cluster's login node; without it this machine grades"
        )
    job = at_work(grading.store.folder)
    if not job:
        grading.store.forget([handed.id for handed in pending])
        job = _submit(grading, pending, tasks)
    else:
        print(f"SLURM job {job} is still at work on this grading", flush=True)
    try:
        _wait(grading, pending, job, on_learner)
    except KeyboardInterrupt:
        cancel(job)
        raise
    (grading.store.folder / "slurm.json").unlink(missing_ok=True)


def slice_of(grading: Grading, part: str) -> list[Handed]:
    """Those of a slice `i/n` who are still to be graded. Raises CourseError for anything that is no slice."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    if not found or not int(found[1]) < int(found[2]):
        raise CourseError(f"--slice {part}: give I/N, with I from 0 to N − 1")
    mine = {handed.id for handed in grading.roster[int(found[1]) :: int(found[2])]}
    return [handed for handed in grading.pending() if handed.id in mine]


def _submit(grading: Grading, pending: Sequence[Handed], tasks: int) -> str:
    store = grading.store
    tasks = min(tasks, len(pending))
    (store.folder / "slurm").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lockstep", "grade", "--out", str(store.folder), "--jobs", "1"]
    if not grading.tier.keeps_apart:
        command.append("--allow-unisolated")
    script = "\n".join([
        "#!/bin/bash",
        "#SBATCH --job-name=lockstep-grade --open-mode=append --requeue",
        f"#SBATCH --array=0-{tasks - 1} --cpus-per-task=2",
        f"export PYTHONPATH={shlex.quote(SOURCE)} OMP_NUM_THREADS=1",
        f"export LOCKSTEP_COURSE={shlex.quote(str(grading.course.root))}",
        f"exec {shlex.join(command)} --slice $SLURM_ARRAY_TASK_ID/{tasks}",
        "",
    ])  # fmt: skip
    file = store.folder / "slurm" / "grade.sbatch"
    write(file, script.encode())
    said = _call("sbatch", "--parsable", f"--output={store.folder}/slurm/%A_%a.out", str(file))
    job = said.strip().splitlines()[-1].split(";")[0]
    write(store.folder / "slurm.json", pretty({"job": job, "tasks": tasks}))
    print(f"SLURM job {job}: {tasks} task{'s' if tasks > 1 else ''}, output in {store.folder / 'slurm'}", flush=True)
    return job


def at_work(folder: Path) -> str:
    """The number of the array that an earlier call submitted for the grading in this folder; empty after its end."""
    try:
        job = str(json.loads((folder / "slurm.json").read_bytes())["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return job if shutil.which("squeue") and _alive(job) else ""


def _wait(grading: Grading, pending: Sequence[Handed], job: str, on_learner: OnLearner) -> None:
    left = {handed.id: handed for handed in pending}
    deaf = 0
    while left:
        try:  # asked before the results are looked at: what it wrote last is not missed
            alive, deaf = _alive(job), 0
        except CourseError:
            alive, deaf = True, deaf + 1
            if deaf > PATIENCE:
                raise
        for id, handed in list(left.items()):
            learner = grading.known(handed)
            if learner is not None:
                del left[id]
                on_learner(learner)
        if left and not alive:
            raise Unfinished(
                f"SLURM job {job} has ended and {len(left)} are not graded ({_last_words(grading, job)}). "
                "The same command submits them again"
            )
        if left:
            time.sleep(POLL_SECONDS)


def _last_words(grading: Grading, job: str) -> str:
    outputs = sorted((grading.store.folder / "slurm").glob(f"{job}_*.out"), key=lambda path: path.stat().st_mtime)
    for path in reversed(outputs):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return f"{path.name}: {lines[-1][:200]}"
    return "its tasks have said nothing"


def _alive(job: str) -> bool:
    """Whether any task of it runs or waits. One that SLURM has forgotten does not."""
    try:
        return bool(_call("squeue", "--noheader", "--format=%T", f"--jobs={job}").strip())
    except CourseError as error:
        if "Invalid job id" in str(error):
            return False
        raise


def cancel(job: str) -> None:
    """End an array, and wait until it has ended."""
    try:
        _call("scancel", job)
        give_up = time.monotonic() + COMMAND_SECONDS
        while _alive(job) and time.monotonic() < give_up:
            time.sleep(0.2)
    except CourseError:
        pass


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=_environment())
    except FileNotFoundError:
        raise CourseError(f"there is no {command[0]} here") from None
    except subprocess.TimeoutExpired:
        raise CourseError(f"{command[0]} has not answered for {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise CourseError(f"{command[0]}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Without the variables of a job that this process may itself run in, which sbatch would take for options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
