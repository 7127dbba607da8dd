"""What the exercises whose jobs come back have in common: how steps are dealt out, how a job stops, where it goes on."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.grading import EXACT, Diagnosis, Grader, Hypothesis, Outcome, Run, difference, equal, fitting, names


def read_loading(grader: Grader, run: Run, at: str) -> Diagnosis | None:
    """A run that failed because the model's state did not fit what was saved; `at` are patterns of lines that load."""
    cause = run.cause
    if cause is None or cause.error is None or "Error(s) in loading state_dict" not in cause.error.message:
        return None
    return grader.diagnosis(
        "weights-not-restored",
        f"{names(cause.ranks).capitalize()} raised {cause.error.type}: {' '.join(cause.error.message.split())[:200]}",
        of=cause.ranks,
        at=cause.error.frame or at,
    )


def apart(a: torch.Tensor, b: torch.Tensor) -> str:
    """The largest difference."""
    return f"{(a - b).abs().max().item():.1e}"


def share(step: dict[str, Any]) -> list[int]:
    """A rank's samples of a step, of all its micro-batches."""
    return [n for part in step["samples"] for n in (part if isinstance(part, list) else [part])]


def together(run: Run, step: int) -> list[int]:
    """The samples of a step, counted from this start's first, of all ranks."""
    return sorted(n for one in run.observed("steps") if step < len(one) for n in share(one[step]))


@dataclass(frozen=True)
class Lines:
    """The patterns of the lines to show, by what they do."""

    order: str
    batch: str
    loading: str
    saving: str
    counting: str
    stopping: str
    handler: str


@dataclass(frozen=True)
class Job:
    """A job of `total` steps, `epoch` of them an epoch, of `batch` samples on all ranks together."""

    grader: Grader
    total: int
    epoch: int
    batch: int
    lines: Lines
    samples: int = 0

    def deals(self, run: Run) -> None:
        """An undisturbed start made all steps, each on a whole batch, no sample twice in an epoch."""
        steps = run.observed("steps")
        everyone, fail, at = range(len(steps)), self.grader.fail, self.lines.order
        made = [len(one) for one in steps]
        self.grader.explain("The number of steps", made, self.total, otherwise="wrong-number-of-steps-trained", at=at)
        for number in range(self.total):
            shares = [sorted(share(one[number])) for one in steps]
            if shares[0] in shares[1:]:
                what = f"In step {number + 1} ranks trained on the same samples: {shares[0]}."
                fail("same-shard", what, of=[rank for rank in everyone if shares[rank] == shares[0]], at=at)
            sizes = [len(one) for one in shares]
            if sum(sizes) != self.batch or len(set(sizes)) > 1:
                each = f"In step {number + 1} the {len(steps)} ranks trained on {', '.join(map(str, sizes))} samples"
                what = (
                    f"{each}, {sum(sizes)} together: a batch of {self.batch} is what all have together, in equal parts."
                )
                fail("global-batch-wrong", what, of=everyone, at=self.lines.batch)
        first = {n for step in range(self.epoch + 1) for n in together(run, step)}
        if len(first) == self.samples:
            what = f"The first {self.epoch + 1} steps used all {self.samples} samples: an epoch should have {self.samples} // {self.batch} = {self.epoch} steps, and the samples left over should be dropped."
            fail("loses-its-place", what, of=everyone, at=at)
        orders = []
        for epoch in range(self.total // self.epoch):
            orders.append([together(run, epoch * self.epoch + step) for step in range(self.epoch)])
            seen = [sample for step in orders[-1] for sample in step]
            if often := sorted({sample for sample in seen if seen.count(sample) > 1}):
                what = f"Without any interruption, the samples {often} came more than once in epoch {epoch}."
                fail("loses-its-place", what, of=everyone, at=at)
            if orders[-1] in orders[:-1]:
                what = (
                    f"Epoch {epoch} had the order of epoch {orders.index(orders[-1])}: it started with {orders[-1][0]}."
                )
                fail("missing-set-epoch", what, of=everyone, at=at)

    def goes_on(self, run: Run, full: Run, wanted: int, after: str, left: Any = True, stopped: bool = False) -> None:
        """Where a start went on, against the job that nobody has disturbed.

        It should be after step `wanted`; `after` has ended the start before, and `left` the files in the folder.
        """
        steps, undisturbed = run.observed("steps"), full.observed("steps")
        everyone, lines = range(len(steps)), self.lines
        told = f"{after} The next start should have continued after step {wanted}"
        if not steps[0]:
            what = f"{told}; it made no step."
            return self.grader.fail_on(
                everyone if wanted < self.total else (), "loses-its-place", what, at=lines.loading
            )
        first, weights = together(run, 0), steps[0][0]["weights"]
        began = next((n for n in range(self.total) if together(full, n) == first), None)
        of = next((n for n in range(self.total) if equal(weights, undisturbed[0][n]["weights"], EXACT)), None)
        if began == wanted and len(steps[0]) <= self.total - wanted:
            return
        lost, at = ("stops-without-saving", lines.stopping) if stopped else ("saves-too-seldom", lines.saving)
        anew = "It started with step 1."
        of_both = [
            *([Hypothesis(lost, "It started with step 1: nothing had been saved.", (0, 0), at)] if not left else []),
            Hypothesis("starts-over", anew, (0, 0), lines.loading),
            Hypothesis("starts-over", anew, (0, None), lines.loading),
            *(
                Hypothesis(lost, f"It continued after step {n}: nothing newer had been saved.", (n, n), at)
                for n in range(wanted)
            ),
            *(
                Hypothesis(
                    "saves-too-often",
                    f"It continued after step {n}: a save that was not asked for.",
                    (n, n),
                    lines.saving,
                )
                for n in range(wanted + 1, self.total)
            ),
        ]
        begin = wanted // self.epoch * self.epoch
        if begin == 0 and len(steps[0]) <= self.total - wanted:
            begin = -1  # a counter of this start's steps, and not of the epoch's, looks the same
        of_samples = [
            Hypothesis("trains-on-after-the-end", f"It did, but took {len(steps[0])} steps, more than were left.", wanted, lines.counting),
            Hypothesis("off-by-one-step", f"It trained on the samples of step {wanted} again.", wanted - 1, lines.counting),
            Hypothesis("off-by-one-step", f"It left out the samples of step {wanted + 1}.", wanted + 1, lines.counting),
            Hypothesis("epoch-restarted", "It started with the first samples of the epoch.", begin, lines.order),
        ]  # fmt: skip
        known = f"those of step {began + 1}" if began is not None else "those of no step of the undisturbed job"
        elsewhere = f"The samples of its first step were {first}, {known}; it made {len(steps[0])} steps."
        found = (
            fitting([(began, of)], of_both)
            or fitting([began], of_samples)
            or Hypothesis("loses-its-place", elsewhere, None, lines.order)
        )
        self.grader.fail(found.id, f"{told}. {found.says}", of=everyone, at=found.at)

    def ends_alike(self, run: Run, full: Run, began: int, after: str) -> None:
        """The state at the first step, the samples of all, and the bits at the end."""
        steps, undisturbed, lines = run.observed("steps"), full.observed("steps"), self.lines
        drift = (
            f"At the end its weights are up to {apart(run.observed('weights')[0], full.observed('weights')[0])} away."
        )
        for rank, one in enumerate(steps):
            for what, id, label, at in (
                ("weights", "weights-not-restored", "the weights", r"model.*load_state_dict || "),
                ("moments", "optimizer-forgotten", "the optimizer's moments", r"optim.*load_state_dict || "),
                ("rate", "scheduler-forgotten", "the learning rate", r"rate\( || lr || "),
                (
                    "groups",
                    "optimizer-forgotten",
                    "the rate in the optimizer's param_groups",
                    r"optim.*load_state_dict || ",
                ),
                ("turns", "buffers-forgotten", "the model's buffer", r"model.*load_state_dict || "),
            ):
                seen, same = (of[0].get(what) if of else None for of in (one, undisturbed[rank][began:]))
                if one and (wrong := difference(seen, same)):
                    zero = " All were zero again." if what == "moments" and not seen.any() else ""
                    where = (
                        f"Rank {rank} started step {began + 1} in the wrong state. {label.capitalize()}: {wrong}.{zero}"
                    )
                    at = f"{at}load_state_dict || {lines.loading}"
                    self.grader.fail(id, f"{after} {where} {drift}", of=[rank], at=at)
        for number in range(len(steps[0])):
            seen, same = together(run, number), together(full, began + number)
            if seen != same:
                where = f"In step {began + number + 1} the samples were {seen}; undisturbed, they were {same}."
                self.grader.fail("loses-its-place", f"{after} {where} {drift}", of=range(len(steps)), at=lines.order)
        if len(steps[0]) == self.total - began:
            pairs = zip(run.observed("weights"), full.observed("weights"), strict=True)
            bad = [rank for rank, (weights, same) in enumerate(pairs) if not equal(weights, same, EXACT)]
            self.grader.fail_on(bad, "resumed-run-differs", f"{after} {drift}", at=lines.loading)

    def stops(
        self, run: Run, number: signal.Signals, of: list[int], step: int, where: str, first: int = 1
    ) -> tuple[int, str]:
        """How a start, whose ranks `of` got a signal in the step after `step`, or just before it, stopped. Returns after
        which step and the beginning of messages; `where` tells the place, and `first` is the first step more to end with.
        """
        grader, lines = self.grader, self.lines
        what = f"{names(of).capitalize()} got {number.name} {where}."
        kind = run.cause.kind if run.cause is not None else ""
        for rank in of:
            one = run.ranks[rank]
            marks = {mark.name for mark in one.marks}
            inside = kind and "signal" in marks and "signal over" not in marks
            left = one.outcome in (Outcome.EXITED, Outcome.RAISED)
            how = f"raised {one.error}" if one.error is not None else f"left by sys.exit, with status {one.code}"
            exits = r"sys\.exit|os\._exit|SystemExit || raise || " + lines.handler
            wrote = one.observations.get("wrote in the handler")
            ended = {one.rank for one in run.ranks if any(mark.name == "returned" for mark in one.marks)}
            calls = {one.rank: one.last_collective for one in run.ranks if one.rank not in ended}
            savers = [r for r, call in calls.items() if call and any("save" in frame.text for frame in call.chain)]
            for so, id, says, at in (
                (one.outcome is Outcome.CRASHED and one.code == -number and "signal again" in marks, "dies-of-the-signal",
                 "The same signal came again and killed it: after the first one, its handler was no longer set.", lines.handler),
                (one.outcome is Outcome.CRASHED and one.code == -number, "dies-of-the-signal",
                 "The signal killed it: no handler had been set.", lines.handler),
                (inside and left, "exits-on-the-signal",
                 f"It {how} at once, and the others waited for it.", exits),
                (inside and not left, "works-in-the-handler",
                 "Its handler called a collective and never came back: the other ranks were not in theirs.", lines.handler),
                (bool(wrote), "works-in-the-handler",
                 f"Its handler wrote {', '.join(wrote or [])} at once, in the middle of the step.", lines.handler),
                (kind in ("hang", "mismatch") and bool(savers) and bool(ended), "saves-alone",
                 f"{names(savers).capitalize()} called save_checkpoint; {names(sorted(ended))} stopped without it.", lines.saving),
                (kind in ("hang", "mismatch"), "stops-alone",
                 f"The ranks did not all stop after the same step: {run.cause.headline if run.cause else ''}", lines.stopping),
                (bool(kind) and left, "exits-on-the-signal", f"It {how}; being asked to stop is no failure.", exits),
            ):  # fmt: skip
                if so:
                    grader.fail(id, f"{what} {says}", of=[rank], at=at)
        grader.require(run)
        counts = [len(steps) for steps in run.observed("steps")]
        already = step - run.ranks[of[0]].observations["signal in"]
        ended = already + counts[0]
        for so, id, says in (
            (len(set(counts)) > 1, "stops-alone", f"The ranks stopped at different steps: they made {counts}."),
            (ended == self.total > step + 2, "ignores-the-signal", f"The job continued to the end, step {ended}."),
            (not step + first <= ended <= step + 2, "stops-late",
             f"The job stopped after step {ended}: it should have been {step + 1}, or {step + 2} at the latest."),
        ):  # fmt: skip
            grader.fail_on(of if so else (), id, f"{what} {says}", at=lines.stopping)
        return ended, f"Asked by {number.name}, the job stopped after step {ended}."
