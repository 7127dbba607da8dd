"""A throw-away SLURM cluster: its own daemons, on hosts of their own, up in seconds and gone with them."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..ranks import NotRun, processes
from . import hosts
from .availability import available
from .nodes import ClusterError, Nodes, Process, own_environment

FOLDER = "/dev/shm/slurm"  # In the cluster's own memory: it goes with it
OTHERS = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")
"""Variables of another cluster, in a job of which this process may run."""
OWN = ("srun", "scontrol", "squeue", "scancel", "sbatch", "slurmstepd:", "slurmstepd")  # SLURM's own programs
START_SECONDS = 60.0
COMMAND_SECONDS = 60.0
POLL_SECONDS = 0.1
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STOPPED", "SIGNALING",
              "STAGE_OUT", "RESIZING", "REQUEUE_HOLD", "SPECIAL_EXIT")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What SLURM knows of a job, or of one task of a job array, at one moment.

    `state` is SLURM's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, …), `reason`
    why it waits, `restarts` how often it was requeued, `exit_code` the batch script's status and `signal` what ended
    it, 0 for none. `nodes` names the hosts it has or had. `file` is where its output goes.
    """

    id: str
    name: str
    state: str
    reason: str
    restarts: int
    exit_code: int
    signal: int
    nodes: str
    file: str

    @property
    def ended(self) -> bool:
        """It neither runs nor will."""
        return self.state not in UNFINISHED

    @property
    def output(self) -> str:
        try:
            return Path(self.file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


@dataclass(frozen=True)
class Running:
    """A process of a job at one moment, and none of SLURM's own: its number on this machine, the node that it is on, its
    command line, its environment, and the processor seconds that it and its ended children have used.
    """

    pid: int
    node: str
    command: tuple[str, ...]
    environment: dict[str, str]
    cpu: float


class Slurm:
    """A SLURM cluster of K nodes: `slurmctld` on the host `login`, one `slurmd` on each node.

        with cluster.Slurm(2) as slurm:
            job = slurm.wait(slurm.sbatch("train.sbatch"), 60)
            print(job.state, job.output)

    Jobs run as this user, in this folder, with this environment, and see this machine's files. There are two partitions:
    `debug`, the default, and `urgent`, for which jobs in `debug` are signalled, get `grace` seconds and are requeued.
    With `requeue` False a job goes back into the queue only if it has asked for it (`--requeue`), as many centers have it.
    Each node offers `cpus` processors, whatever the machine has. `slurm.nodes` are the hosts (`Nodes`), with their links
    and faults; a node whose `slurmd` was killed is DOWN after some 10 s and comes back by `boot`. `environment` is what
    commands need to find this cluster.

    Starting takes a few seconds. Raises `ranks.NotRun` where the machine cannot do it (see `available("slurm")`) and
    ClusterError when SLURM does not come up.
    """

    def __init__(self, nodes: int = 2, *, cpus: int = 4, grace: int = 10, requeue: bool = True) -> None:
        missing = available("slurm")
        if missing is not None:
            raise NotRun(str(missing))
        self._hurried: set[tuple[str, int]] = set()
        self.nodes = Nodes(nodes)
        mine = {key: value for key, value in own_environment().items() if not key.startswith(OTHERS)}
        self.environment = {**mine, "SLURM_CONF": f"{FOLDER}/slurm.conf"}
        try:
            self._configure(cpus, grace, requeue)
            self.controller = self.nodes.run(None, ["slurmctld", "-D"], env=self.environment, cwd="/")
            self.daemons = [self._daemon(node) for node in range(nodes)]
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the jobs, the daemons and the nodes. Twice is fine."""
        self.nodes.close()

    def boot(self, node: int) -> None:
        """Start a node's `slurmd` again, after `slurm.nodes.kill(node)`."""
        self.daemons[node].kill()
        self.daemons[node] = self._daemon(node)

    # Commands --------------------------------------------------------------------------------------------------

    def run(
        self,
        *command: str | os.PathLike[str],
        text: str = "",
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = COMMAND_SECONDS,
    ) -> str:
        """Run a command (`squeue`, `sinfo`, `srun …`, anything) on `login`, with `text` to read, and return what it
        printed. Raises ClusterError when it fails, subprocess.TimeoutExpired when it takes longer.
        """  # fmt: skip
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(text.encode())
            given.seek(0)
            process = self.nodes.run(None, command, env=self.environment, cwd=cwd, stdin=given, stdout=printed)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            said = os.pread(printed.fileno(), os.fstat(printed.fileno()).st_size, 0).decode(errors="replace")
        if code:
            raise ClusterError(f"{command[0]} ended with status {code}: {said.strip()}")
        return said

    def sbatch(self, script: str | os.PathLike[str], *arguments: str, cwd: str | os.PathLike[str] | None = None) -> str:
        """Submit a batch script and return the job's number. `script` is a file, or the text of one, which begins with
        `#!`. `arguments` are sbatch's options (`"--partition=urgent"`). Output goes to `slurm-NUMBER.out` in `cwd`, this
        process's folder by default, unless the script says otherwise. Raises ClusterError when SLURM refuses.
        """
        if isinstance(script, str) and script.lstrip().startswith("#!"):
            said = self.run("sbatch", "--parsable", *arguments, text=script.lstrip(), cwd=cwd)
        else:
            said = self.run("sbatch", "--parsable", *arguments, Path(script).absolute(), cwd=cwd)
        return said.strip().splitlines()[-1].split(";")[0]

    def scancel(self, job: str, *arguments: str) -> None:
        """Cancel a job, or with `"--signal=USR1"` and the like, signal it."""
        self.run("scancel", *arguments, job)

    def jobs(self, job: str) -> list[Job]:
        """What SLURM knows of a job: one entry, or one for each task of an array, in order."""
        lines = self.run("scontrol", "show", "job", "--oneliner", job).splitlines()
        return sorted((_job(line) for line in lines if line.strip()), key=lambda one: _order(one.id))

    def job(self, job: str) -> Job:
        return self.jobs(job)[0]

    def wait(self, job: str, timeout: float, until: Sequence[str] = ()) -> Job:
        """Wait until a job, with all tasks of an array, has ended, or is in one of these states; returns what is known
        of it then (see `jobs` for an array). Requeued ones are hurried (see there). Raises TimeoutError, saying how far it
        got, after so many seconds.
        """
        give_up = time.monotonic() + timeout
        while True:
            there = self.jobs(job)
            if any(one.state in until for one in there) or (not until and all(one.ended for one in there)):
                return there[0]
            if until and all(one.ended for one in there):
                last = there[0]
                how = f"{last.state} (status {last.exit_code}, signal {last.signal}, {last.reason}; it printed {last.output[-6000:]!r})"
                raise TimeoutError(f"job {job} has ended as {how} and will not be {' or '.join(until)}")
            self.hurry(there)
            if time.monotonic() > give_up:
                why = f" ({there[0].reason})" if there[0].reason not in ("", "None") else ""
                raise TimeoutError(f"job {job} is still {there[0].state}{why} after {timeout:g} s")
            time.sleep(POLL_SECONDS)

    def hurry(self, jobs: Sequence[Job]) -> None:
        """Let those of these jobs that were requeued, and wait for nothing but the time set for that, begin in the next
        second. SLURM gives a requeued job a begin time of `cred_expire` and one seconds later, here 6, by default 121: an
        `srun` of the former start that is still about would end the step of the same number in the new one. So nothing is
        done while a process of the job, SLURM's own included, is left.
        """
        for job in jobs:
            requeued = (job.id, job.restarts)
            if job.state != "PENDING" or job.reason != "BeginTime" or not job.restarts or requeued in self._hurried:
                continue
            if not self.anything_left(job.id):
                self._hurried.add(requeued)
                with contextlib.suppress(ClusterError):  # it has just begun, or was cancelled
                    self.run("scontrol", "update", f"jobid={job.id}", "starttime=now+1")

    def processes(self, job: str) -> list[Running]:
        """What a job's script and its steps have started and what of it lives. Of an array, name the task (`12_0`)."""
        return [one for one in self._of(job) if one.command and Path(one.command[0]).name not in OWN]

    def anything_left(self, job: str) -> bool:
        """Whether a process of the job lives, SLURM's own (`srun`) included."""
        return next(self._of(job), None) is not None

    def _of(self, job: str) -> Iterator[Running]:
        """All processes that have this job's number in their environment."""
        for pid in processes.descendants(self.nodes.pid):
            with contextlib.suppress(OSError):
                environment = processes.environment(pid)
                command = tuple(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1])
                task = environment.get("SLURM_ARRAY_TASK_ID", "")
                of = f"{environment.get('SLURM_ARRAY_JOB_ID')}_{task}" if task else environment.get("SLURM_JOB_ID")
                if of == job:
                    node = environment.get("SLURMD_NODENAME", "")
                    yield Running(pid, node, command, environment, processes.cpu_seconds(pid))

    # Starting --------------------------------------------------------------------------------------------------

    def _configure(self, cpus: int, grace: int, requeue: bool) -> None:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
        template = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")
        text = template.format(
            user=user, folder=FOLDER, login=hosts.LOGIN, login_address=f"{hosts.NETWORK}1", grace=grace, requeue=requeue
        )
        for name, address in zip(self.nodes.names, self.nodes.addresses, strict=True):
            text += (
                f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} RealMemory=1000 State=UNKNOWN\n"
            )
        spools = " ".join(f"{FOLDER}/spool-{name}" for name in self.nodes.names)
        make = f'umask 077; mkdir -p {FOLDER}/state {FOLDER}/log {spools} && cat > "$SLURM_CONF"'
        self.run("sh", "-c", make, text=text, cwd="/")

    def _daemon(self, node: int) -> Process:
        return self.nodes.run(node, ["slurmd", "-D", "-N", self.nodes.names[node]], env=self.environment, cwd="/")

    def _wait_until_up(self) -> None:
        give_up = time.monotonic() + START_SECONDS
        said = ""
        while time.monotonic() < give_up:
            ended = [one for one in (self.controller, *self.daemons) if one.poll() is not None]
            if ended:
                raise ClusterError(f"SLURM did not come up: {_last(ended[0].output)}")
            with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
                said = self.run("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%n %t", timeout=10)
                if [line.split()[1] for line in said.splitlines()] == ["idle"] * self.nodes.count:
                    return
            time.sleep(POLL_SECONDS / 2)
        raise ClusterError(
            f"SLURM's nodes are not idle after {START_SECONDS:g} s: {said} {_last(self.controller.output)}"
        )


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if "error" in line or "fatal" in line] or text.splitlines()
    return lines[-1] if lines else "it said nothing"


def _order(id: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", id))


def _job(line: str) -> Job:
    """From a line of `scontrol show job --oneliner`."""
    known = dict(re.findall(r"(\w+)=(\S*)", line))
    code, _, signal = known.get("ExitCode", "0:0").partition(":")
    task = known.get("ArrayTaskId", "")
    id = f"{known.get('ArrayJobId')}_{task}" if task else known["JobId"]
    return Job(id, known.get("JobName", ""), known["JobState"], known.get("Reason", ""), int(known.get("Restarts", "0")),
               int(code), int(signal or 0), known.get("NodeList", "").replace("(null)", ""), known.get("StdOut", ""))  # fmt: skip
