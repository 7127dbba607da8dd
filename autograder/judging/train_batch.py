"""Runs a `train.sbatch` on a throw-away SLURM cluster and notes what comes of it. Nothing is judged here.

Four nodes. The script is submitted twice: as a job on the first two nodes, and as an array of two on the other two,
both tasks at the same time. In place of `train.py` it finds `scenarios/train_job.py`, whose ranks need no torch;
torchrun is the real one. When all are under way, a more urgent job takes the first two nodes, which sends the first
job the signal that it has asked for; one of the array's tasks is cancelled, and then a node of the other dies. The
cluster's jobs go back into the queue only if they say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.grading import OUTPUT_BYTES, CheckNotRun, Grader, Lacking, cluster, seconds_in_queue

DEADLINE_SECONDS = 240.0
POLL_SECONDS = 0.15
STILL_SECONDS = 6.0
STILL_CPU = 0.4
DEAF_STEPS = 100
GRACE_SECONDS = 120
PATIENCE_SECONDS = 4.0
LEAVING_SECONDS = 20.0
FIRST, SECOND = "node0,node1", "node2,node3"
NOISE = re.compile(r"^frame #|^Exception raised from|^<omitting|hostname of the client socket|^[ ^]+$")
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
LOCAL = ("localhost", "127.", "::1", "0.0.0.0", "[::1]")


@dataclass
class OneJob:
    """A job, or a task of the array: what SLURM said of it last, what its ranks noted, which torchruns were seen.

    `cut_off` is set when it would have gone on for ever: `still` when nothing in it moved any more, `deaf` when its
    ranks went on training long after SLURM had sent the signal. `signalled` is how many events there were when it was
    sent.
    """

    id: str
    job: cluster.Job
    events: list[dict[str, Any]] = field(default_factory=list)
    agents: dict[tuple[str, ...], cluster.slurm.Running] = field(default_factory=dict)
    cut_off: str = ""
    signalled: int | None = None

    def of(self, event: str, start: int | None = None) -> list[dict[str, Any]]:
        """What its ranks noted of this kind, in this start or in all."""
        return [one for one in self.events if one["event"] == event and start in (None, one["start"])]

    def worlds(self, start: int) -> list[list[dict[str, Any]]]:
        """The ranks that met in this start, in one list for each world that began to train."""
        trained = {one["round"] for one in self.events if one["event"] in ("step", "saved")}
        rounds = dict.fromkeys(one["round"] for one in self.of("begins", start) if one["round"] in trained)
        return [[one for one in self.of("begins", start) if one["round"] == round] for round in rounds]

    @property
    def steps_unheard(self) -> int:
        """How many steps were done after SLURM had sent the signal and before a rank was asked to stop."""
        events = self.events[self.signalled :] if self.signalled is not None else []
        asked = next((at for at, one in enumerate(events) if one["event"] == "asked"), len(events))
        return sum(one["event"] in ("step", "saved") for one in events[:asked])

    @property
    def under_way(self) -> bool:
        """Its first start trains."""
        return bool(self.worlds(0))

    @property
    def launchers(self) -> Counter[str]:
        """How many torchruns of the first start were seen on each node."""
        return Counter(node for node, _, _, start in self.agents if start == "0")

    @property
    def meeting(self) -> str:
        """Where its torchruns were told to meet, `host:port`, or without torchrun, where its ranks were."""
        begun = [one["meeting"] for one in self.of("begins")] if not self.agents else []
        return next(iter([*self.meetings, *begun]), "")

    @property
    def meetings(self) -> list[str]:
        """All the places where its torchruns were told to meet."""
        found = set()
        for agent in self.agents.values():
            words = " ".join(agent.command)
            endpoint = re.search(r"--rdzv[-_]endpoint[= ](\S+)", words)
            host, port = (re.search(rf"--master[-_]{what}[= ](\S+)", words) for what in ("addr", "port"))
            if endpoint:
                found.add(endpoint[1])
            elif host or port:
                found.add(f"{host[1] if host else 'localhost'}:{port[1] if port else 29500}")
        return sorted(found)

    @property
    def said(self) -> str:
        """The last lines of its output, without torch's C++ frames."""
        lines = (line for line in self.job.output.strip().splitlines() if line.strip() and not NOISE.search(line))
        return "\n".join(list(lines)[-12:])


@dataclass(frozen=True)
class Moment:
    """How far everything in the jobs was at one moment: processes, what each has used and has waited for a processor,
    and how much the journal held.
    """

    used: dict[int, float]
    queued: float
    noted: int

    @classmethod
    def of(cls, alive: list[cluster.slurm.Running], noted: int) -> Moment:
        """Now. A script's own naps do not count."""
        alive = [one for one in alive if Path(one.command[0]).name != "sleep"]
        queued = sum(seconds_in_queue(one.pid) for one in alive)
        return cls({one.pid: one.cpu for one in alive}, queued, noted)

    def like(self, before: Moment) -> bool:
        """The same processes, which meanwhile have done next to nothing, also where the machine has let them."""
        if self.noted != before.noted or self.used.keys() != before.used.keys():
            return False
        used = sum(self.used.values()) - sum(before.used.values())
        return used < STILL_CPU and self.queued - before.queued < STILL_SECONDS / 3


def is_torchrun(process: cluster.slurm.Running) -> bool:
    """Whether it is a torchrun, however it was called."""
    return any(Path(word).name in LAUNCHERS for word in process.command[:4])


class Refused(Exception):
    """sbatch did not take the script; the text is what it said."""


class Batch:
    """The submission's batch script on a cluster. The parts of the play happen when they are first asked for; without
    `array` only the job of its own is played.
    """

    def __init__(self, grader: Grader, array: bool) -> None:
        self.grader, self.array = grader, array
        self._slurm: cluster.Slurm | None = None
        self._read = 0
        self._jobs: dict[str, OneJob] = {}
        self._give_up = 0.0

    def close(self) -> None:
        """End the cluster and all that runs in it."""
        if self._slurm is not None:
            self._slurm.close()

    def require(self) -> None:
        """Raises CheckNotRun when no batch script was handed in, in a sandbox, or where there is no SLURM."""
        if self.grader.submission.script is None:
            raise CheckNotRun("there is no train.sbatch beside train.py (./lockstep reset train brings its stub back)")
        if self.grader.tier is not None and self.grader.tier.keeps_apart:
            raise Lacking("a stranger's batch script is not run: the SLURM cluster is outside the sandbox")
        missing = cluster.available("slurm")
        if missing is not None:
            raise Lacking(str(missing))

    @cached_property
    def slurm(self) -> cluster.Slurm:
        """The cluster."""
        self.require()
        self._slurm = cluster.Slurm(4, cpus=64, grace=GRACE_SECONDS, requeue=False)
        for variable in ("FOLDER", "SCRIPT", "RANKS_PER_NODE", "OMP_NUM_THREADS"):
            self._slurm.environment.pop(variable, None)
        return self._slurm

    @cached_property
    def folder(self) -> Path:
        """Where the jobs run."""
        folder = self.grader.scratch / "train-batch"
        folder.mkdir()
        assert self.grader.submission.script is not None
        shutil.copyfile(self.grader.submission.script.file, folder / "train.sbatch")
        shutil.copyfile(self.grader.course.autograder / "scenarios" / "train_job.py", folder / "train.py")
        return folder

    # The play --------------------------------------------------------------------------------------------------

    @cached_property
    def begun(self) -> list[OneJob]:
        """The job and the two tasks of the array, up to where all train, have ended, or do not move any more.

        Raises Refused, CheckNotRun.
        """
        self._give_up = time.monotonic() + DEADLINE_SECONDS
        plain = self.submit(f"--nodelist={FIRST}")[0]
        everyone = [plain, *(self.submit(f"--nodelist={SECOND}", "--array=0-1") if self.array else [])]
        self.watch(everyone, lambda: all(one.under_way or one.job.ended for one in everyone))
        return everyone

    @cached_property
    def disturbed(self) -> list[OneJob]:
        """The job that had to make room for an urgent one, the task whose node has died, and the one that was cancelled,
        up to where all have ended or will not.
        """
        everyone, slurm = self.begun, self.slurm
        plain, first, second = everyone if self.array else (*everyone, None, None)
        (self.folder / "finish").write_text("\n".join(f"{one.id} {start}" for one in everyone for start in range(1, 9)))
        self.watch(everyone, lambda: all(one.of("saved") or one.job.ended for one in everyone))
        if second and not second.job.ended:
            slurm.scancel(second.id)
        urgent = ("--partition=urgent", "--nodes=2", "--exclusive", f"--nodelist={FIRST}", "--output=/dev/null")
        slurm.sbatch("#!/bin/bash\ntrue", *urgent)
        node = "up"
        died = 0.0

        def over() -> bool:
            nonlocal node, died
            if plain.signalled is None and not plain.job.ended and "PreemptTime=2" in self._told(plain.id):
                plain.signalled = len(plain.events)
            if plain.steps_unheard > DEAF_STEPS and not plain.cut_off and not plain.of("asked"):
                self._cut_off(plain, "deaf")
            if node == "up" and second and second.job.ended:
                slurm.nodes.kill(3)
                slurm.run("scontrol", "update", "nodename=node3", "state=down", "reason=it died")
                node, died = "dead", time.monotonic()
            elif node == "dead" and first.job.state != "RUNNING":
                # Not before the old srun is gone: it would end the step of the same number in the new start. It waits for
                # a torchrun that may wait for the dead node's: SLURM would kill that one after KillWait, 20 s.
                late = time.monotonic() - died
                for process in slurm.processes(first.id) if late > PATIENCE_SECONDS else ():
                    if is_torchrun(process):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process.pid, signal.SIGKILL)
                if slurm.anything_left(first.id) and late < LEAVING_SECONDS:
                    return False
                slurm.boot(3)
                node = "booted"
            return all(one.job.ended for one in everyone)

        self.watch(everyone, over)
        return everyone

    def submit(self, *arguments: str) -> list[OneJob]:
        """Submit the script; an array's tasks are as many jobs. Raises Refused."""
        always = ("--nodes=2", "--partition=debug", "--mem=0")
        try:
            number = self.slurm.sbatch(self.folder / "train.sbatch", *always, *arguments, cwd=self.folder)
        except cluster.ClusterError as error:
            raise Refused(str(error)) from None
        tasks = range(2) if any(word.startswith("--array") for word in arguments) else [None]
        made = [OneJob(f"{number}_{task}" if task is not None else number, job) for task in tasks
                for job in self.slurm.jobs(number)[:1]]  # fmt: skip
        self._jobs |= {one.id: one for one in made}
        return made

    # Watching --------------------------------------------------------------------------------------------------

    def watch(self, jobs: list[OneJob], until: Callable[[], bool]) -> None:
        """Follow the jobs until it is so, they have all ended, or nothing in them moves any more."""
        since, before = time.monotonic(), None
        while True:
            alive = self._look(jobs)
            if until() or all(one.job.ended for one in jobs):
                return
            now, moment = time.monotonic(), Moment.of(alive, self._read)
            waiting = any(
                one.job.state != "RUNNING" for one in jobs if not one.job.ended
            )  # for SLURM, not for each other
            if before is None or waiting or not alive or not moment.like(before):
                since, before = now, moment
            elif now - since > STILL_SECONDS:
                return self._end(jobs, "still")
            if now > self._give_up:
                return self._end(jobs, "late")
            time.sleep(POLL_SECONDS)

    def _end(self, jobs: list[OneJob], why: str) -> None:
        for one in jobs:
            if not one.job.ended:
                self._cut_off(one, why)

    def _cut_off(self, one: OneJob, why: str) -> None:
        one.cut_off = why
        with contextlib.suppress(cluster.ClusterError):
            self.slurm.scancel(one.id)
            self.slurm.scancel(one.id, "--signal=KILL", "--full")

    def _look(self, jobs: list[OneJob]) -> list[cluster.slurm.Running]:
        """Bring what is known of the jobs up to date; returns their processes."""
        known = {
            one.id: one for number in {one.id.partition("_")[0] for one in jobs} for one in self.slurm.jobs(number)
        }
        alive = []
        # Not the one whose node has died: SLURM may still be ending its old step, and would end the new one of that number.
        self.slurm.hurry([one for one in known.values() if one.id == jobs[0].id])
        for one in jobs:
            one.job = known.get(one.id, one.job)
            for process in self.slurm.processes(one.id):
                alive.append(process)
                if is_torchrun(process):
                    told = process.environment.get
                    key = (process.node, told("SLURM_STEP_ID", "batch"), told("SLURM_PROCID", ""),
                           told("SLURM_RESTART_COUNT", "0"))  # fmt: skip
                    one.agents.setdefault(key, process)
            with contextlib.suppress(OSError):
                if Path(one.job.file).stat().st_size > OUTPUT_BYTES:
                    self._cut_off(one, "loud")
        for event in self._news():
            if event["job"] in self._jobs:
                self._jobs[event["job"]].events.append(event)
        return alive

    def _news(self) -> Iterator[dict[str, Any]]:
        """The journal's new lines."""
        with contextlib.suppress(OSError), open(self.folder / "journal", "rb") as journal:
            journal.seek(self._read)
            for line in journal:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def _told(self, job: str) -> str:
        return self.slurm.run("scontrol", "show", "job", "--oneliner", job)
