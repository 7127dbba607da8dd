"""A run's cause as plain text: the same words wherever it is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from types import MappingProxyType

from .report import Blowup, Frame, Kind, Topic, Waiting
from .result import Run
from .words import names

WIDTH = 96
CODE_WIDTH = 40
TITLES = {
    Kind.HANG: "HANG",
    Kind.MISMATCH: "MISMATCH",
    Kind.RAISED: "ERROR",
    Kind.EXITED: "ENDED EARLY",
    Kind.CRASHED: "CRASH",
    Kind.TIMED_OUT: "NO END",
    Kind.OUT_OF_MEMORY: "OUT OF MEMORY",
    Kind.TOO_MUCH_OUTPUT: "TOO MUCH OUTPUT",
    Kind.TOO_MANY_PROCESSES: "TOO MANY PROCESSES",
    Kind.INTERRUPTED: "INTERRUPTED",
}

ReadOn = Mapping[Topic | None, str]
"""Where a reader finds more about a topic."""
NOWHERE: ReadOn = MappingProxyType({})


def describe(run: Run, read_on: ReadOn = NOWHERE) -> str:
    """Why the run did not end well, in full: headline, the ranks' table or traceback, notes. Empty when it did."""
    if run.cause is None:
        return ""
    return "\n\n".join(filter(None, [_wrapped(headline(run)), evidence(run, read_on)]))


def evidence(run: Run, read_on: ReadOn = NOWHERE) -> str:
    """What stands under the headline: the ranks' table or traceback, and the notes."""
    if run.cause is None:
        return ""
    parts = []
    if run.cause.rows:
        parts.append(table(run.cause.rows))
    if run.cause.error is not None and run.cause.error.traceback:
        parts.append(run.cause.error.traceback.rstrip())
    elif run.cause.frame is not None and not run.cause.rows:
        parts.append(f"  {place(run.cause.frame)}")
    closing = list(run.cause.notes)
    if run.cause.topic in read_on:
        closing.append(f"Read: {read_on[run.cause.topic]}")
    if closing:
        parts.append("\n".join(_wrapped(line) for line in closing))
    return "\n\n".join(parts)


def headline(run: Run) -> str:
    """The first line, which is enough for the one who knows."""
    cause = run.cause
    assert cause is not None
    after = f" after {run.seconds:.1f} s" if cause.kind in (Kind.HANG, Kind.TIMED_OUT) else ""
    after += f" at {cause.frame.short}" if cause.frame else ""
    if cause.kind is Kind.INTERRUPTED:
        return cause.headline[0].upper() + cause.headline[1:]
    return f"{TITLES[cause.kind]}{after}: {cause.headline}"


def replicas(run: Run) -> str:
    """What watching the replicas found: a line when all was well, the first step that differed when not."""
    found = run.replicas
    if found is None:
        return "No optimizer took a step, so there were no replicas to compare."
    steps = "every step" if found.compared > 1 else "the only step"
    said = [f"Replicas: equal bit for bit after {steps} that all ranks took ({found.compared})."]
    if found.drift is not None:
        drift = found.drift
        when = f"at step {drift.step}" if drift.step else "before the first step"
        amount = f", by {drift.amount:.2g} in the values sampled" if drift.amount else ""
        others = [rank for rank in range(run.world_size) if rank not in drift.ranks]
        where = f"on {names(drift.ranks)} is not that of {names(others)}" if others else "is another on every rank"
        at = f" ({drift.frame.short})" if drift.frame else ""
        said = [f"DRIFT {when}{at}: {drift.tensor} {where}{amount}: {drift.reason}."]
        if drift.tensors > 1:
            said.append(f"{drift.tensors} of {drift.of} parameters differed then.")
    elif found.blowup is None and found.same_work and found.same_work == found.compared:
        said = [f"SAME WORK: at all {found.compared} steps every rank brought the same gradients to DDP's average. They are fed "
                "the same samples: together they do what one rank does alone."]  # fmt: skip
    if found.blowup is not None:
        said = [*_blowup(run, found.blowup), *([] if found.drift is None else said)]
    if found.statistics and found.drift is None:
        said.append(f"{', '.join(found.statistics[:3])} differed between ranks: running statistics are of each rank's own "
                    "batches until DDP copies rank 0's before the next forward.")  # fmt: skip
    if len(set(found.steps)) > 1:
        taken = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(found.steps))
        said.append(f"The ranks did not take equally many steps: {taken}.")
    return "\n".join(_wrapped(line) for line in said)


def _blowup(run: Run, found: Blowup) -> list[str]:
    """The first NaN or infinity: when, where and on which ranks, and where it came from."""
    at_line = f" ({found.frame.short})" if found.frame else ""
    who = "every rank" if len(found.ranks) == run.world_size > 1 else names(found.ranks)
    if not found.step:
        return [f"{found.value} before the first step{at_line}: {found.tensor} on {who} holds {found.value}."]
    said = [f"{found.value} at step {found.step}{at_line}: {found.tensor} on {who} holds {found.value} after it."]
    if not found.gradient:
        said.append("Its gradient was finite: the optimizer made it (the learning rate, its state?).")
    elif found.brought is None:
        said.append(f"Its gradient held {found.gradient} when the step began.")
    elif not found.brought:
        said.append(
            f"Its gradient held {found.gradient}, though every rank had brought finite gradients to DDP's average."
        )
    elif len(found.brought) == run.world_size:
        said.append(f"Its gradient held {found.gradient} on every rank before DDP averaged them.")
    else:
        said.append(
            f"Its gradient held {found.gradient} on {names(found.brought)} alone; DDP's average brought it to every rank."
        )
    return said


def table(rows: tuple[Waiting, ...]) -> str:
    """One line a rank: what it waits in, with what tensor, since when, and where. An arrow marks the odd one."""
    cells = [["rank", "waits in", "tensor", "since", "at", ""]]
    for row in rows:
        cells.append([
            str(row.rank) + (" ←" if row.differs else ""),
            row.what,
            row.tensor,
            f"{row.since:.1f} s" if row.since is not None else "",
            _short(row.frame),
            _code(row.frame),
        ])  # fmt: skip
    used = [column for column in range(6) if column in (0, 1) or any(line[column] for line in cells[1:])]
    widths = {column: max(len(line[column]) for line in cells) for column in used}
    return "\n".join(
        "  " + "   ".join(line[column].ljust(widths[column]) for column in used).rstrip() for line in cells
    )


def place(frame: Frame) -> str:
    """`cell line 6   dist.all_reduce(t)`."""
    return f"{_short(frame)}   {frame.text}".rstrip()


def _code(frame: Frame | None) -> str:
    """The source line without its comment, cut where a narrow window would wrap it."""
    if frame is None:
        return ""
    text = frame.text.split("  #")[0].rstrip()
    return text if len(text) <= CODE_WIDTH else text[: CODE_WIDTH - 1] + "…"


def _wrapped(text: str) -> str:
    """A sentence over several lines; lines that were broken already (a traceback) stay."""
    return "\n".join(textwrap.fill(line, WIDTH) if len(line) > WIDTH else line for line in text.splitlines())


def _short(frame: Frame | None) -> str:
    if frame is None:
        return ""
    return frame.short
