"""What `train.sbatch` has to do, judged from what came of it on a SLURM cluster (`train_batch`)."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any, NoReturn

from lockstep.grading import Grader

from .rehearsal import ARRAY, FAILED, JOB, TASK, rehearse
from .train_batch import DEAF_STEPS, LOCAL, Batch, OneJob, Refused

RANKS_AND_NODES = ["node0", "node1"]
SRUN = r"\bsrun\b || \btorchrun\b || \bpython"
MEETING = r"rdzv[-_]endpoint || master[-_]addr || rdzv || port= || MASTER_ADDR || " + SRUN
PORT = r"\bport=|PORT= || " + MEETING
FOLDER = r"\bfolder= || --folder || " + SRUN
ASKING = r"#SBATCH.*--signal || \btrap\b || " + SRUN
REQUEUE = r"scontrol requeue || ^trap || ^wait || " + SRUN
KILLING = r"^(?!\s*#).*\bkill +(?!-0|-KILL|-9)"
SHORT = {"t": "time"}


def options(script: str) -> dict[str, str]:
    """What the `#SBATCH` lines ask for, by the option's long name."""
    found: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", script, re.MULTILINE):
        words = re.sub(r"\s#.*", "", line).split()
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if match := re.fullmatch(r"--([\w-]+)(?:=(.*))?", word):
                found[match[1]] = match[2] if match[2] is not None else following
            elif match := re.fullmatch(r"-(\w)(.*)", word):
                found[SHORT.get(match[1], match[1])] = match[2] or following
    return found


class Judge:
    """Judges one submission's script."""

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        assert grader.submission.script is not None
        self.options = options(grader.submission.script.text)

    def fail(self, id: str, message: str, at: str, evidence: str = "") -> NoReturn:
        """The check has failed, because of a line of the script."""
        self.grader.fail(id, message, evidence=evidence, at=at, script=True)

    def refused(self, refusal: Refused) -> NoReturn:
        """sbatch did not take it."""
        self.fail("batch-script-refused", str(refusal).replace("sbatch: ", "").strip(), r"^#! || ^#SBATCH")

    # On its nodes ----------------------------------------------------------------------------------------------

    def started(self, one: OneJob, nodes: list[str]) -> None:
        """One torchrun on each node, and all their ranks in one world."""
        missing = re.search(r"^train\.sbatch: .*", one.job.output, re.MULTILINE)
        if one.job.exit_code == 64 and missing:
            self.fail(
                "not-implemented",
                f"Nothing is written here yet.\nThe script says: {missing[0]}",
                re.escape(missing[0][:40]),
            )
        launchers = one.launchers
        many = [node for node, count in sorted(launchers.items()) if count > 1]
        if many:
            self.fail(
                "launches-each-rank",
                f"On {many[0]} there were {launchers[many[0]]} torchruns. One on each node starts all ranks of the node.",
                r"#SBATCH.*--ntasks || --ntasks || " + SRUN,
                one.said,
            )
        worlds = one.worlds(0)
        reached = sorted({*launchers, *(rank["host"] for rank in one.of("begins", 0))})
        if len(reached) == 1:
            self.fail(
                "no-srun",
                f"SLURM gave the job {' and '.join(nodes)}; torchrun ran on {reached[0]} alone.",
                r"\btorchrun\b || \bpython",
                one.said,
            )
        if len(worlds) > 1:
            sizes = " and ".join(f"one of {len(world)} on {world[0]['host']}" for world in worlds)
            self.fail("trains-apart", f"The ranks met in {len(worlds)} worlds: {sizes}.", MEETING, one.said)
        if worlds:
            there = sorted({rank["host"] for rank in worlds[0]})
            if there != nodes:
                what = f"The ranks of {' and '.join(there)} trained, {worlds[0][0]['world']} in all, without the other node."
                self.fail("trains-apart", what, MEETING, one.said)
            return
        if one.meeting.startswith(LOCAL):
            what = f"{one.meeting}, which on each node is that node itself"
            self.fail(
                "meets-at-itself", f"The torchruns were told to meet at {what}. They never met.", MEETING, one.said
            )
        if len(one.meetings) > 1:
            what = " and at ".join(one.meetings)
            self.fail(
                "meets-at-itself", f"The torchruns were told to meet at {what}. They never met.", MEETING, one.said
            )
        self.stopped_early(one, "No rank started to train.")

    def stopped_early(self, one: OneJob, what: str) -> NoReturn:
        """It came to no good end, and none of the usual mistakes explains it."""
        if one.cut_off:
            waits = ", ".join(f"torchrun on {node}" for node in sorted(one.launchers)) or "the script"
            where = f" The torchruns were told to meet at {one.meeting}." if one.meeting else ""
            if one.cut_off == "loud":
                self.grader.fail("too-much-output", "The job printed more than 1 MiB.", at=SRUN, script=True)
            self.fail("batch-job-hangs", f"{what} Nothing moved any more: {waits} waited.{where}", SRUN, one.said)
        ended = f"by {signal.Signals(one.job.signal).name}" if one.job.signal else f"with status {one.job.exit_code}"
        self.fail("batch-job-fails", f"{what} The script ended {ended} ({one.job.state}).", SRUN, one.said)

    def array(self, first: OneJob, second: OneJob) -> None:
        """Two tasks on the same nodes at the same time, and neither in the other's way."""
        tasks = "Tasks 0 and 1 of the array"
        port = [one.meeting.rpartition(":")[2] for one in (first, second)]
        if port[0] and port[0] == port[1]:
            state = "" if first.under_way and second.under_way else " They did not start to train."
            self.fail("fixed-port", f"{tasks} both met at port {port[0]} of the same node.{state}", PORT, second.said)
        for one in (first, second):
            self.started(one, ["node2", "node3"])
        begun = [one.of("begins", 0)[0] for one in (first, second)]
        if begun[0]["folder"] == begun[1]["folder"]:
            self.fail(
                "array-shares-a-folder", f"{tasks} both keep their checkpoints in {self.folder(begun[0])}.", FOLDER
            )
        if begun[0]["seed"] == begun[1]["seed"]:
            self.fail(
                "array-repeats-itself",
                f"{tasks} were both started with --seed {begun[0]['seed']}: they train the same.",
                r"--seed || SLURM_ARRAY_TASK_ID || " + SRUN,
            )

    def folder(self, begun: dict[str, Any]) -> str:
        """A checkpoint folder, from where the job was submitted."""
        return str(begun["folder"]).partition("/train-batch/")[2] or str(begun["folder"])

    # Interrupted -----------------------------------------------------------------------------------------------

    def asked(self, one: OneJob) -> None:
        """SLURM sent the signal; the job saved, went back into the queue, and went on."""
        if "time" not in self.options:
            self.fail("no-time-limit", "No #SBATCH line says how long the job may run (--time).", r"^#SBATCH")
        wanted = self.options.get("signal")
        asked = one.of("asked", 0)
        if not wanted:
            came = f"its ranks got {signal.Signals(asked[0]['signal']).name}" if asked else "its ranks were not told"
            self.fail(
                "no-signal",
                f"No #SBATCH line asks for a signal before the job has to go (--signal). When a more urgent job came, {came}, "
                f"and it ended as {one.job.state} after {one.job.restarts} restarts.",
                r"^#SBATCH",
                one.said,
            )
        what = f"A more urgent job came, and SLURM sent the signal that --signal={wanted} asks for."
        if one.steps_unheard > DEAF_STEPS:
            then = "and were not asked to save" if not asked else "before they were asked to save"
            what = f"{what} The ranks made {one.steps_unheard} more steps {then}."
            self.fail("trap-waits-for-srun", what, r"^\s*srun || " + SRUN, one.said)
        if one.job.restarts == 0 and not wanted.startswith(("B:", "RB:")):
            what = f"{what} Without B: it goes to what srun has started, and not to this script. The job did not go back into "
            self.fail("signal-past-the-script", f"{what}the queue; it ended as {one.job.state}.", ASKING, one.said)
        if one.job.restarts == 0 and one.job.signal:
            died = f"{what} The script was killed by {signal.Signals(one.job.signal).name} ({one.job.state})."
            self.fail("script-dies-of-the-signal", died, r"\btrap\b || " + ASKING, one.said)
        ended = "srun: forcing job termination" in one.job.output and re.search(
            KILLING, self.grader.submission.script.text, re.MULTILINE
        )
        if ended and not one.of("stopped", 0):
            what = f"{what} The script sent the signal to srun, which ended the step at once; no rank saved."
            self.fail("signal-ends-srun", what, KILLING, one.said)
        if not asked:
            came = "went back into the queue" if one.job.restarts else f"ended as {one.job.state}"
            what = f"{what} The job {came}, and no rank was asked to save."
            self.fail("ends-before-the-save", what, REQUEUE, one.said)
        stopped = one.of("stopped", 0)
        what = f"{what} The ranks were asked by {signal.Signals(asked[0]['signal']).name} after step {asked[0]['step']}"
        if not stopped:
            self.fail("ends-before-the-save", f"{what}, and ended before they had saved.", REQUEUE, one.said)
        what = f"{what} and saved after step {stopped[0]['step']}."
        self._went_on(one, what, stopped[0]["step"])
        self.rehearsed()

    def rehearsed(self) -> None:
        """A training that fails, and a task of an array that is asked to leave."""
        script, wanted = self.grader.submission.script, self.options.get("signal", "")
        assert script is not None
        failed, asked = (
            rehearse(script.file, self.grader.scratch / f"rehearsed-{how}", wanted, how) for how in ("fails", "asked")
        )
        what = f"The training failed with status {FAILED}, without a signal."
        if failed.requeued:
            said = f"{what} The script put the job back into the queue, where it would fail again and again."
            self.fail("requeues-a-failure", said, REQUEUE)
        if failed.told["torchrun"] and failed.status not in (FAILED, None):
            self.fail(
                "status-lost", f"{what} The script ended with status {failed.status}.", r"^exit || ^wait || " + SRUN
            )
        if ARRAY in asked.requeued:
            said = f"Task {TASK} of array {ARRAY} is job {JOB}. When it was asked to leave, the script requeued {ARRAY}, which is every task."
            self.fail("requeues-the-array", said, REQUEUE)
        folders = asked.log_folders
        if len(folders) > 1 and len({Path(one) for one in folders}) == 1:
            said = f"On node0 and on node1, torchrun was told to write its logs into {folders[0]}."
            self.fail("one-log-folder", said, r"log[-_]dir || " + SRUN)

    def died(self, one: OneJob) -> None:
        """A node died; the job went back into the queue and went on."""
        saved = one.of("saved", 0)
        self._went_on(
            one, f"One of its nodes died. The last save was after step {saved[-1]['step']}.", saved[-1]["step"]
        )

    def cancelled(self, one: OneJob) -> None:
        """It was cancelled, and that was its end."""
        if one.job.restarts or one.of("begins", 1):
            what = f"scancel put the job back into the queue ({one.job.restarts} restarts) instead of ending it."
            self.fail("cancel-requeues", what, r"^\s*trap\b.*TERM || ^\s*trap\b || " + REQUEUE, one.said)
        if not one.job.ended or one.cut_off:
            self.stopped_early(one, "scancel was called, and the job did not end.")

    def _went_on(self, one: OneJob, what: str, step: int) -> None:
        again = [event for event in one.of("begins") if event["start"] > 0]
        if one.job.restarts == 0 and not again:
            allowed = "requeue" in self.options
            self.fail(
                "not-requeued" if allowed else "requeue-not-allowed",
                f"{what} The job did not go back into the queue; it ended as {one.job.state}.",
                REQUEUE if allowed else r"^#SBATCH",
                one.said,
            )
        if not again:
            self.stopped_early(one, f"{what} Started again, no rank started to train.")
        before = one.of("begins", 0)[0]
        if again[0]["folder"] != before["folder"]:
            self.fail(
                "new-folder-each-start",
                f"{what} The next start looked in {self.folder(again[0])}; the checkpoint is in {self.folder(before)}.",
                FOLDER,
                one.said,
            )
        if again[0]["step"] < step:
            self.fail("starts-over", f"{what} The next start was at step {again[0]['step']}.", FOLDER, one.said)
        if not one.of("complete") or one.job.state != "COMPLETED":
            self.stopped_early(one, f"{what} The next start continued, and the job was not completed.")
        lines = [int(start) for start in re.findall(r"\bstart (\d+) of job", one.job.output)]
        if 0 not in lines:
            self.fail(
                "log-overwritten",
                f"{what} The job's output no longer contains the first start.",
                r"#SBATCH.*--open-mode || #SBATCH.*--output || ^#SBATCH",
                one.said,
            )


def begun(batch: Batch) -> list[OneJob]:
    """The job and the array's two tasks, as far as they came undisturbed."""
    batch.require()
    try:
        return batch.begun
    except Refused as refusal:
        Judge(batch.grader).refused(refusal)
