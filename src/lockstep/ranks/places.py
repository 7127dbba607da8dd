"""Where each rank of a run stood: what it waited for, as a row of the report's table and in words."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from .calls import LIBRARIES
from .report import OWN_CODE, Collective, Frame, Outcome, RankReport, Waiting
from .words import at, names

STOOD = (Outcome.HUNG, Outcome.TIMED_OUT, Outcome.INTERRUPTED, Outcome.STOPPED)
"""Ranks that had not come to an end of their own, and were asked where they were."""
_PYTHON = sysconfig.get_paths()["stdlib"]
_HERE = str(Path(__file__).parent)
DUMPED = re.compile(r'File "(.+?)", line (\d+) in (\S+)')
IN_DDP = {"DDP()": "DDP()", "forward": "DDP's forward"}
"""What DDP does in calls of its own, as their caller knows it."""
IN_STEP = ("backward", "forward")


def rows(members: Sequence[RankReport], differs: Sequence[int] = ()) -> tuple[Waiting, ...]:
    """One row for each rank; `differs` are those to point at."""
    return tuple(_row(report, report.rank in differs, len(members)) for report in members)


def _row(report: RankReport, differs: bool, world_size: int) -> Waiting:
    operation = pending(report)
    if report.outcome in STOOD and report.stack is not None:
        frame = report.stack.frame or (operation.frame if operation else None)
        since = max(0.0, report.ended - operation.start) if operation else None
        tensor = operation.tensor if operation else ""
        return Waiting(
            report.rank, in_group(report, world_size), tensor, since, frame, differs, waits=not report.stopped
        )
    last, gone = report.last_collective, has_finished(report)
    said = "finished" if gone else report.outcome.value
    if report.stopped:
        said = "held by a signal (SIGSTOP)"
    # One that has finished is no longer at the line of its last call.
    frame = exit_of(report) or (last.frame if last and not gone else None)
    said = f"{said} after {last.title}" if last else said
    return Waiting(report.rank, said, frame=frame, differs=differs, waits=False)


def has_finished(report: RankReport) -> bool:
    """Its code came to an orderly end."""
    return report.outcome is Outcome.RETURNED or (report.outcome is Outcome.EXITED and not report.code)


def exit_of(report: RankReport) -> Frame | None:
    """Where its code has left by SystemExit; None when it came to its last line."""
    return report.error.frame if has_finished(report) and report.error is not None else None


def call(report: RankReport) -> str:
    """What PyTorch was doing for this rank when it was last asked; empty when it was in its own code."""
    return report.stack.call if report.stack is not None else ""


def detail(report: RankReport) -> dict[str, object]:
    return report.stack.detail if report.stack is not None else {}


def pending(report: RankReport) -> Collective | None:
    """The operation that this rank waited for."""
    if report.stack is None or report.stack.operation is None or call(report) == "init_process_group":
        return None
    return next((one for one in report.collectives if one.number == report.stack.operation), None)


def what(report: RankReport) -> str:
    """What this rank waited in: `all_reduce #2`, `backward (DDP's gradient all-reduce #5)`, `its own code`."""
    operation = pending(report)
    doing = call(report)
    if report.stopped:
        return "held by a signal (SIGSTOP)"
    if operation is None:
        held = held_in(detail(report))
        return IN_DDP.get(doing, doing) or OWN_CODE + (f": waits in {held}" if held else "")
    return said_of(operation, doing)


def held_in(detail: Mapping[str, object]) -> str:
    """What a rank's own code waits in: `Queue.get`, or `Thread.join` and where that thread is."""
    held, thread = str(detail.get("held") or ""), Frame.of(detail.get("thread_at"))
    return held + (f" for a thread{at(thread)}" if held and thread else "")


def in_group(report: RankReport, world_size: int) -> str:
    """The same with its group, unless it is the default one: `all_reduce #2 of ranks 0 and 1`."""
    operation = pending(report)
    if operation is None or len(operation.members) < 2:
        return what(report)
    alike = [*dict.fromkeys(one.name for one in report.groups if {*one.members} == {*operation.members})]
    if operation.group not in alike:
        return what(report) + part_of(operation, world_size)
    nth = f" in group {alike.index(operation.group) + 1}" if len(alike) > 1 and not operation.described else ""
    return f"{what(report)}{nth}{_of_members(operation)}"


def part_of(operation: Collective, world_size: int) -> str:
    """` of ranks 0 and 1 (tp)`, if its group isn't the world, with what the program calls it."""
    return _of_members(operation) if 1 < len(operation.members) < world_size else ""


def _of_members(operation: Collective) -> str:
    return f" of {names(operation.members)}" + (f" ({operation.described})" if operation.described else "")


def said_of(operation: Collective, doing: str = "") -> str:
    """The operation as its caller knows it: DDP's own are named by what they are for."""
    inside = operation.inside or doing
    if inside == "backward":
        return f"backward ({of_gradient(operation)})"
    if inside in IN_DDP:
        of_it = f"{operation.title} of {IN_DDP[inside]}"  # DDP's backward waits for what its forward has started
        return f"backward ({of_it})" if doing == "backward" else f"{IN_DDP[inside]} (its {operation.title})"
    library, _, backward = inside.partition("'s ")
    if library in LIBRARIES.values():
        said = f"{library}'s {operation.title}"
        return f"backward ({said})" if backward else said
    return operation.title


def of_gradient(operation: Collective) -> str:
    """`DDP's gradient all-reduce #5`: one of those that backward launches."""
    return f"DDP's gradient {operation.title.replace('_', '-')}"


def place(report: RankReport) -> Frame | None:
    """Where a process stood when it was ended: from its crash dump, where it was last asked, or its last collective."""
    if frame := dumped(report.fault):
        return frame
    if report.stack is not None and report.stack.frame is not None:
        return report.stack.frame
    return report.last_collective.frame if report.last_collective and not DUMPED.search(report.fault) else None


def line_in(place: Frame | None, shown: Frame | None) -> int | None:
    """The line of a place, if its file is the one that is shown."""
    return place.line if place and shown and place.file == shown.file else None


def dumped(stack: str) -> Frame | None:
    """The innermost of the user's frames in a stack that Python's fault handler has written."""
    found = (Frame.of(raw) for raw in DUMPED.findall(stack) if is_users(raw[0]))
    return next(filter(None, found), None)


def is_users(file: str) -> bool:
    """True for a file that is neither Python's, nor an installed library's, nor ours."""
    return not file.startswith((_PYTHON, _HERE, "<frozen", "<string>")) and not re.search(r"(site|dist)-packages", file)


def groups(members: Sequence[RankReport]) -> list[dict[int, dict[int, Collective]]]:
    """The collectives of each group in which ranks meet: for each rank, by their number."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Collective]]] = {}
    for report in members:
        for call in report.collectives:
            if not call.is_point_to_point and (
                not call.members or (len(call.members) > 1 and call.rank in call.members)
            ):
                found.setdefault((call.group, call.members), {}).setdefault(report.rank, {})[call.group_number] = call
    return [group for group in found.values() if len(group) > 1]
