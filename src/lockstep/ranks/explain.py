"""From what the ranks did to why the run ended: the root cause first, its echoes after it.

Pure functions over a finished `Run`. A peer's death makes its neighbors fail with "Connection closed by peer", so the
loudest error is seldom the cause; a hang has no error at all (`hangs`). What each rank had begun tells them apart.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from .branches import branch, placed, stands
from .divergence import Divergence, called_from, first_divergence, parted_at, reached, say
from .hangs import SAME_ORDER, group_timeout, groups_apart, hang, met_by_join
from .job import Job, TargetKind
from .mismatch import (
    MISMATCHED,
    SAME_OP,
    SAME_ROOT,
    SAME_TENSORS,
    apart_from_most,
    first_mismatch,
    kinds_of,
    mismatch_cause,
    mismatch_rows,
)
from .missed import missed_turn
from .places import IN_DDP, STOOD, call, dumped, is_users, line_in, part_of, pending, place, rows, said_of, what
from .report import OWN_CODE, Cause, Error, Frame, Kind, Outcome, RankReport, RunEnd, Topic, Why
from .result import Run, latest
from .skipped import skipped
from .words import at, duration, first_line, line, names, one_or_more, size

ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Application timeout caused pair closure|Broken pipe"
    r"|Socket closed|connection was (closed|aborted)|remote process (exited|has terminated)"
    r"|NCCL communicator was aborted",
    re.IGNORECASE,
)
TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|Operation timed out!|Timed out after \d+ seconds|failed to pass monitoredBarrier"
    r"|Watchdog caught",
    re.IGNORECASE,
)
SIZE_MISMATCH = re.compile(r"EnforceNotMet.*|Received data size doesn't match", re.IGNORECASE)
GROUPS = re.compile(ECHO.pattern + "|" + TIMEOUT.pattern + "|gloo|connect", re.IGNORECASE)
SLOW_DEATH = 0.5
"""Seconds. A killed process closes its connections before it is gone, and others may be quicker to leave because of it."""
RAN = "kept running"
MOST_FATES = 3
MOST_CODE = 40
CLOSED = (
    "When a call runs into its time limit, gloo closes the group's connections: no further call of the group works."
)
HELP = (
    (r"EOF when reading a line", "A rank has no keyboard: input() finds nothing to read."),
    (r"EADDRINUSE|Address already in use",
     "Another run has this port, or one that has just ended. torchrun chooses a free port; your own launcher can bind "
     "port 0 and read which port it got."),
    (r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected"
     r"|^KeyError: '(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
     "torchrun sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process. Your own launcher must "
     "set them, or pass rank= and world_size= to init_process_group."),
    (r"Default process group has not been initialized",
     "Call init_process_group before the first collective, and destroy_process_group after the last."),
    (r"initialize the default process group twice",
     "This process already has a group. Call destroy_process_group() before you call init_process_group again."),
    (r"Application timeout caused pair closure",
     f"An earlier call had run into its time limit, and the error was caught. {CLOSED}"),
    (r"before the current process has finished its bootstrapping phase",
     'Each spawned process imports this file again. Start processes only below `if __name__ == "__main__":`.'),
)  # fmt: skip


def cause(run: Run, job: Job, end: RunEnd) -> Cause | None:
    """Why `run` did not end well, or None when it did."""
    found = _cause(run, job, end)
    return replace(found, notes=(*found.notes, *_dead_threads(run))) if found else None


def _cause(run: Run, job: Job, end: RunEnd) -> Cause | None:
    if end.why is Why.INTERRUPTED:
        return _interrupted(run, end)
    if end.why is Why.NODE_LOST:
        return _node_lost(run, end)
    if end.why is Why.HANG:
        return hang(run, job)
    if end.why in (Why.DEADLINE, Why.CPU, Why.IDLE):
        return _timed_out(run, job, end)
    if job.launcher:
        return launched(run, job)
    bad = [report for report in run.ranks if _is_bad(report, job)]
    return _failure(run, bad) if bad else None


DEAD_THREAD = re.compile(
    r"^Exception in thread .+:\n(Traceback \(most recent call last\):\n(?:  .*\n)+\w[\w.]*(?:: .*)?)$", re.MULTILINE
)


def _dead_threads(run: Run) -> list[str]:
    """The errors that ended threads of the ranks: Python prints them, and the program goes on without what they should do."""
    dead = [
        (report.rank, parse(one)) for report in run.ranks for one in DEAD_THREAD.findall(report.stderr)[:MOST_FATES]
    ]
    return [f"A thread of rank {rank} ended with {_short(error)}{at(error.frame)}." for rank, error in dead]


# Failures --------------------------------------------------------------------------------------------------------


def _failure(run: Run, bad: Sequence[RankReport]) -> Cause:
    echoes = [report for report in bad if _is_echo(report)]
    causes = sorted((report for report in bad if report not in echoes), key=lambda report: report.ended)
    if not causes:
        quiet = [report for report in run.ranks if report.outcome in (Outcome.EXITED, Outcome.RETURNED)]
        caught = _caught_before(run, echoes)
        if caught and all(report.rank in caught.ranks for report in quiet):
            return caught
        if quiet:
            return _left_early(run, quiet, echoes)
        causes, echoes = sorted(echoes, key=lambda report: report.ended), []
    first = causes[0]
    if first.outcome is Outcome.EXITED:  # because of another's death, which was seen only after it?
        killed = [one for one in causes if one.code == -signal.SIGKILL and one.ended - first.ended < SLOW_DEATH]
        causes = [*killed, *(one for one in causes if one not in killed)]
        first = causes[0]
    mixed = any(
        SIZE_MISMATCH.search(report.stderr + (report.error.message if report.error else "")) for report in causes
    )
    confused = groups_apart(run.ranks) if first.error and GROUPS.search(first.error.message) else None
    if mixed and confused is None:
        confused = met_by_join(run.ranks)
    if confused:
        frame = next((confused.where[rank] for rank in confused.at_fault if confused.where[rank]), None)
        return Cause(
            Kind.MISMATCH,
            confused.headline,
            tuple(confused.at_fault),
            frame,
            notes=tuple(confused.notes),
            topic=Topic.HANGS,
            error=first.error,
        )
    if mixed:
        mismatch, parted = first_mismatch(run.ranks), first_divergence(run.ranks)
        if mismatch and parted:
            found = mismatch_cause(mismatch, run.ranks, parted.odd)
            skip, met = missed_turn(run.ranks) or (skipped(parted.calls, run.ranks), parted.calls)
            if skip:
                frame, place, parting = skip.at, skip.branch, skip.parting
                parting = placed(parting, place, frame.file) if place else parting
                notes = (f"{SAME_ORDER} {parting}".rstrip(), *(note for note in found.notes if note not in MISMATCHED))
                found = replace(
                    found, headline=skip.headline, frame=frame, notes=notes,
                    branch=line_in(place, frame), own=(parting,) if parting else (),
                    rows=mismatch_rows(met, parted.odd if {*met} == {*skip.at_fault} else skip.at_fault), topic=Topic.HANGS,
                )  # fmt: skip
            elif parted.calls != mismatch or len(kinds_of(mismatch)) > 1:
                found = _parted(parted, found, run.world_size)
            elif (named := branch(parted_at(parted.calls), size=run.world_size)) and (place := named[1]):
                file = found.frame.file if found.frame else place.file
                said = placed(named[0], place, file)
                notes = tuple(f"{note} {said}" if note in (SAME_TENSORS, SAME_OP) else note for note in found.notes)
                found = replace(found, notes=notes, branch=line_in(place, found.frame or place), own=(said,))
            came = tuple(reached(met))
            return replace(found, notes=(*found.notes, *came), own=found.own or came, cited=called_from(met))
    if first.outcome is Outcome.RAISED and first.error is not None and TIMEOUT.search(first.error.message):
        return _own_timeout(run.ranks, first)
    found = _describe(run, first, causes)
    told = {*found.ranks, *found.echoes, *(one.rank for one in echoes)}
    notes = (*found.notes, *_echo_note(echoes), *_fates([one for one in run.ranks if one.rank not in told]))
    return replace(found, echoes=(*found.echoes, *(report.rank for report in echoes)), notes=notes)


def _parted(parted: Divergence, found: Cause, size: int) -> Cause:
    """The cause of a mismatch, told from where the ranks' code parted."""
    at_fault = parted.odd or sorted(parted.calls)
    parting, branch_at = branch(stands(parted.places), size=size)
    if not branch_at:
        parting, branch_at = branch(parted_at(parted.calls), size=size)
    frame = parted.places[at_fault[0]]
    if branch_at and frame:
        parting = placed(parting, branch_at, frame.file)
    order = f"{SAME_ORDER} {parting}".rstrip()
    notes = tuple(order if note in (SAME_TENSORS, SAME_ROOT, SAME_OP) else note for note in found.notes)
    return replace(
        found, headline=say(parted), ranks=tuple(at_fault), frame=frame, rows=mismatch_rows(parted.calls, parted.odd),
        notes=notes, branch=line_in(branch_at, frame),
        own=(parting,) if branch_at else (),
    )  # fmt: skip


def _is_bad(report: RankReport, job: Job) -> bool:
    if report.outcome is Outcome.EXITED:
        return report.code != 0 or job.is_function
    return report.outcome not in (Outcome.RETURNED, Outcome.STOPPED, Outcome.LOST)


def _is_echo(report: RankReport) -> bool:
    error = _own_error(report)
    return error is not None and bool(ECHO.search(error.message))


def _own_error(report: RankReport) -> Error | None:
    """What it has raised; or has caught, and then left with a status."""
    return {Outcome.RAISED: report.error, Outcome.EXITED: report.because}.get(report.outcome)


def _echo_note(echoes: Sequence[RankReport]) -> tuple[str, ...]:
    error = _own_error(echoes[0]) if echoes else None
    if error is None:
        return ()
    matched = ECHO.search(error.message)
    text = matched.group(0) if matched else "a connection error"
    who = names(report.rank for report in echoes).capitalize()
    places = {one.frame for report in echoes if (one := _own_error(report))}
    where = at(places.pop()) if len(places) == 1 else ""
    return (f'{who} then failed with "{text}"{where}: an echo, not the cause.',)


def _fates(others: Sequence[RankReport]) -> tuple[str, ...]:
    """What the other ranks did when one failed, and who ended them; ranks with the same fate are named together."""
    fates: dict[str, dict[str, list[int]]] = {}
    for report in others:
        did, by = _fate(report)
        fates.setdefault(by, {}).setdefault(did, []).append(report.rank)
    said = []
    for by, ranks in fates.items():
        everyone = [rank for some in ranks.values() for rank in some]
        listed = ranks.items() if not by or len(ranks) <= MOST_FATES else [(RAN, everyone)]
        did = ", ".join(f"{names(some)} {what}" for what, some in listed)
        ended = f"; {by} ended {one_or_more(everyone, 'it', 'them')}" if by else ""
        said.append(f"{did[0].upper()}{did[1:]}{ended}.")
    return (" ".join(said),) if said else ()


def _fate(report: RankReport) -> tuple[str, str]:
    """What a rank did when another failed, and who ended it: empty when it ended by itself."""
    match report.outcome:
        case Outcome.STOPPED:
            return _did(report), "the launcher" if report.code == -signal.SIGTERM else "Lockstep"
        case Outcome.RAISED if report.error is not None:
            return f"raised {_short(report.error)}{at(report.error.frame)}", ""
        case Outcome.EXITED if report.code:
            return f"left with status {report.code}", ""
        case Outcome.CRASHED:
            return f"died by {signal_name(report.code)}", ""
        case Outcome.RETURNED | Outcome.EXITED:
            return "finished", ""
    return f"ended too ({report.outcome.value})", ""


def _did(report: RankReport) -> str:
    """`waited in all_reduce #3 at train.py:14`; of a rank that wasn't asked, its last call."""
    frame, last = report.stack.frame if report.stack else None, report.last_collective
    operation = pending(report)
    if operation is not None or call(report) not in ("", "backward", *IN_DDP):
        return f"waited in {what(report)}{at(frame or (operation.frame if operation else None))}"
    if frame is not None:
        return f"had reached {frame.short} ({_cut(frame.text)})" if frame.text else f"had reached {frame.short}"
    return f"had last called {last.title}{at(last.frame)}" if last else RAN


def _cut(code: str) -> str:
    return textwrap.shorten(code, MOST_CODE, placeholder=" …")


def _describe(run: Run, first: RankReport, causes: Sequence[RankReport]) -> Cause:
    rank = f"rank {first.rank}"
    match first.outcome:
        case Outcome.RAISED:
            return _raised(run, first, causes)
        case Outcome.EXITED:
            return _exited(first)
        case Outcome.CRASHED:
            return _crashed(run, first, causes)
        case Outcome.OUT_OF_MEMORY if first.code == -signal.SIGKILL:
            return _crashed(run, first, causes)
    said = {
        Outcome.OUT_OF_MEMORY: f"{rank} was stopped when it held {size(first.peak_memory)} of memory.",
        Outcome.TOO_MUCH_OUTPUT: f"{rank} was stopped because it never stopped printing.",
        Outcome.TOO_MANY_PROCESSES: f"{rank} was stopped because it had started too many processes.",
    }.get(first.outcome, f"{rank}: {first.outcome.value}.")
    return Cause(Kind(first.outcome.value), said, (first.rank,), place(first), topic=Topic.FAILURES)


def _raised(run: Run, first: RankReport, causes: Sequence[RankReport]) -> Cause:
    assert first.error is not None
    same = [report for report in causes if report.error and report.error.type == first.error.type]
    # Ranks that fail alike in one line do so in no order: the lowest speaks for them, in every run.
    in_order = sorted(same, key=lambda report: report.rank)
    here = [one for one in in_order if one.error and one.error.frame == first.error.frame]
    error = here[0].error or first.error
    if told := _told_of_others(same, error):
        return replace(told, echoes=tuple(one.rank for one in in_order if one.rank not in told.ranks))
    lists = _unused_on_each(in_order)
    ranks = [report.rank for report in (in_order if lists else here)]
    who = "every rank" if len(ranks) == run.world_size > 1 else names(ranks)
    cause = _raised_by(who, ranks, error)
    if lists:
        return replace(cause, headline=f"{who} raised {error.type}: {AWAITED}: {lists}")
    words = {one.rank: _short(one.error) for one in here if one.error}
    if len({*words.values()}) == 1:
        return cause
    said: dict[str, list[int]] = {}
    for rank, own in words.items():
        said.setdefault(NUMBER.sub("#", own), []).append(rank)
    others = (f"{names(some).capitalize()} raised {words[some[0]].rstrip('.')}." for some in [*said.values()][1:])
    return replace(cause, headline=f"{cause.headline} (as rank {ranks[0]} has it)", notes=(*cause.notes, *others))


def _told_of_others(same: Sequence[RankReport], error: Error) -> Cause | None:
    """PyTorch has compared the ranks, or gathered their errors, and raises on all of them because of some."""
    models = {report.rank: MODEL.search(report.error.message) for report in same if report.error}
    sizes = {rank: int(found[1]) for rank, found in models.items() if found}
    if len(sizes) == len(same) > 1:
        odd = apart_from_most(sizes)
        have = ", ".join(f"rank {rank}: {size}" for rank, size in sorted(sizes.items()))
        said = f"the ranks' models have different numbers of parameters, and DDP needs the same on all ({have})"
        if odd:
            usual = next(size for rank, size in sizes.items() if rank not in odd)
            said = f"{names(odd)} gave DDP a model with {sizes[odd[0]]} parameters, the others one with {usual}"
        return replace(_raised_by(names(odd), odd or sorted(sizes), error), headline=f"{said}.")
    gathered = GATHERED.search(error.message)
    if gathered:
        ranks = [int(number) for number in gathered[1].split(",")]
        last = [text for text in error.message.splitlines() if text and not text.startswith((" ", "Traceback"))][-1]
        return replace(
            _raised_by(names(ranks), ranks, error), headline=f"{names(ranks)} failed in a checkpoint: {last}"
        )
    lists = LISTS.search(error.message)
    if lists:
        ranks, kind = [report.rank for report in same], lists[1].replace("allg", "all_g")
        said = f"{names(ranks)} called {kind} with a tensor of shape ({lists[2]}) and a list of tensors of shape ({lists[3]})."
        found = _raised_by(names(ranks), ranks, error)
        return replace(found, headline=said, notes=(SAME_SHAPES.format(kind),), topic=Topic.MISMATCHES)
    return None


def _raised_by(who: str, ranks: Sequence[int], error: Error) -> Cause:
    said = f"{who} raised {_short(error)}"
    return Cause(Kind.RAISED, said, tuple(ranks), error.frame, notes=_help(error), topic=Topic.FAILURES, error=error)


NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
MODEL = re.compile(r"DDP expects same model across all ranks, but Rank \d+ has (\d+) params")
GATHERED = re.compile(r"CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)")
LISTS = re.compile(
    r"ProcessGroupGloo::(allgather|gather): invalid tensor size at index \d+ \(expected \(([\d, ]*)\), got \(([\d, ]*)\)\)"
)
SAME_SHAPES = "Every rank must give {} a tensor of the same shape, and lists have tensors of that shape."
UNFINISHED = "Expected to have finished reduction in the prior iteration"
UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
CAUGHT = re.compile(r"Caught (\w+)( in DataLoader worker process \d+)\.\n")
NAMED = 6  # Parameters of a list that a headline has room for
AWAITED = "in the step before, some parameters got no gradient, and DDP still waits for them"


def _short(error: Error) -> str:
    said = first_line(error.message)
    if unused := _unused(error):  # Its first line is five lines of advice; what one needs to know stands at its end.
        said = f"{AWAITED}: {unused}"
    if caught := CAUGHT.match(error.message):
        what = error.message.rstrip().rpartition(f"\n{caught[1]}")[2].removeprefix(": ")
        return f"{caught[1]}{caught[2]}{': ' * bool(what)}{first_line(what)}"
    return f"{error.type}: {said}" if said else error.type


def _unused(error: Error) -> str:
    """The parameters that got no gradient on the rank that raised this error, by name where a rank could say it."""
    unused = UNUSED.search(error.message.partition(UNFINISHED)[2])
    if not unused:
        return ""
    named = re.search(r"Parameters which did not receive grad for rank \d+: (.+)", error.message)
    if named is None:
        return f"number {', '.join(unused.group(1).split())}"
    every = named.group(1).split(", ")
    return ", ".join(every[:NAMED]) + (f" and {len(every) - NAMED} more" if len(every) > NAMED else "")


def _unused_on_each(same: Sequence[RankReport]) -> str:
    """Each rank's parameters without a gradient, if they are not the same on all: every rank knows only its own."""
    by_list: dict[str, list[int]] = {}
    for report in same:
        by_list.setdefault(_unused(report.error) if report.error else "", []).append(report.rank)
    if len(by_list) == 1 or "" in by_list:
        return ""
    return "; ".join(f"on {names(ranks)} {unused}" for unused, ranks in by_list.items())


def _help(error: Error) -> tuple[str, ...]:
    text = str(error)
    return tuple(note for pattern, note in HELP if re.search(pattern, text))[:1]


def _exited(report: RankReport) -> Cause:
    frame = report.error.frame if report.error else None
    how = "sys.exit" if frame else "os._exit"
    said = f': "{report.error.message}"' if report.error and report.error.type == "" and report.error.message else ""
    left = f"left with status {report.code} (by {how}){said}"
    caught = report.because
    if caught is not None:
        left += f", because of {_short(caught)}"
    return Cause(
        Kind.EXITED,
        f"rank {report.rank} {left}{'' if caught else ' before its work was done.'}",
        (report.rank,),
        (caught.frame if caught else None) or frame,
        topic=Topic.FAILURES,
        error=caught,
    )


def _caught_before(run: Run, echoes: Sequence[RankReport]) -> Cause | None:
    """A call of another rank failed, its error was caught, and the next call of the group found no connection."""
    fine = [one for other in run.ranks if other not in echoes for one in other.collectives if one.failed]
    for report in sorted(echoes, key=lambda report: report.ended):
        last = report.last_collective
        failed = next((one for one in fine if last and one.group == last.group), None)
        if failed and last and report.error:
            said = (
                f"rank {failed.rank} caught the error of its {said_of(failed)}{part_of(failed, len(run.ranks))}; "
                f"{said_of(last)} of rank {report.rank}{at(last.frame)} then found the group's connections closed."
            )
            ranks = failed.rank, report.rank
            return Cause(
                Kind.RAISED, said, ranks, failed.frame, notes=(CLOSED,), topic=Topic.FAILURES, error=report.error
            )
    return None


def _left_early(run: Run, quiet: Sequence[RankReport], echoes: Sequence[RankReport]) -> Cause:
    """Ranks left in good order, and the others lost their connection to them."""
    who = names(report.rank for report in quiet)
    abrupt = all(report.outcome is Outcome.EXITED and report.error is None for report in quiet)
    left = "left by os._exit" if abrupt else "finished"
    last = quiet[0].last_collective
    after = f" after {last.title}" if last else " before any collective"
    still: dict[str, list[int]] = {}
    for report in echoes:
        if waiting := report.last_collective:
            still.setdefault(said_of(waiting), []).append(report.rank)
    waited = " and ".join(f"{names(some)} in {called}" for called, some in still.items())
    expected = f", while {waited.replace(' in ', ' still waited in ', 1)}" if waited else ""
    ranks = [report.rank for report in quiet]
    return Cause(
        Kind.EXITED,
        f"{who} {left}{after}{expected}.",
        tuple(ranks),
        last.frame if last else None,
        rows=rows(run.ranks, ranks),
        notes=(SAME_ORDER, *_echo_note(echoes)),
        echoes=tuple(report.rank for report in echoes),
        topic=Topic.HANGS,
    )


def _crashed(run: Run, report: RankReport, causes: Sequence[RankReport]) -> Cause:
    name = signal_name(report.code)
    same = [one for one in causes if one.outcome is report.outcome and one.code == report.code]
    who = "every rank" if len(same) == run.world_size > 1 else names(one.rank for one in same)
    was = one_or_more(same, "was", "were") if who != "every rank" else "was"
    why = ""
    notes: list[str] = []
    if report.outcome is Outcome.OUT_OF_MEMORY:
        why = f": the system was out of memory (it held {size(report.peak_memory)})"
        notes.append("Fewer ranks, fewer workers of DataLoaders and smaller batches need less.")
    elif name == "SIGKILL" and report.peak_memory > 1 << 30:
        why = f" (out of memory? it held {size(report.peak_memory)})"
    if name == "SIGSEGV" and "_ddp_init_helper" in report.fault:
        why = ": DDP() on gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL crashes, a bug of torch 2.13"
        notes.append(
            "Use TORCH_DISTRIBUTED_DEBUG=INFO with DDP. A level that is set after init_process_group avoids the crash, "
            "but torch then compares no calls in this group."
        )
    said = re.search(r"what\(\):\s*(.+)", report.stderr)
    if said:
        notes.append(said.group(1).strip())
    last = report.last_collective
    if last is not None:
        notes.append(f"Its last call was {last.title}{at(last.frame)}.")
    return Cause(
        Kind(report.outcome.value),
        f"{who} {was} killed by {name}{why}.",
        tuple(one.rank for one in same),
        place(report) if report.stack is not None or dumped(report.fault) else None,
        (),
        tuple(notes),
        topic=Topic.FAILURES,
    )


def signal_name(code: int | None) -> str:
    """The name of the signal in a negative exit code."""
    number = -(code or 0)
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# A launcher's failures -------------------------------------------------------------------------------------------


def launched(run: Run, job: Job) -> Cause | None:
    """Why a launcher's run failed: the worker at fault, rather than what the launcher was told of it."""
    launcher = run.ranks[0]
    workers = [_as_rank(worker) for worker in latest(run.workers)]
    error = launcher.error
    limits = (Outcome.OUT_OF_MEMORY, Outcome.TOO_MUCH_OUTPUT, Outcome.TOO_MANY_PROCESSES)
    broken = any(one.outcome in limits for one in workers)
    if not broken and not _is_bad(launcher, job):
        return None
    bad = [
        worker
        for worker in workers
        if _is_bad(worker, replace(job, target=replace(job.target, kind=TargetKind.SCRIPT)))
    ]
    by_a_worker = broken or (
        error is not None and error.type in ("ProcessRaisedException", "ProcessExitedException", "ChildFailedError")
    )
    if bad and by_a_worker:
        found = _failure(replace(run, ranks=workers, world_size=len(workers)), bad)
    elif error is not None and (
        told := re.search(r"Process (\d+) terminated with the following error:\n(.*)", error.message, re.DOTALL)
    ):
        number = int(told.group(1))
        found = _raised_by(f"rank {number}", [number], parse(told.group(2)))
    else:
        found = _describe(run, launcher, [launcher])
        said = re.sub(r"^(rank 0|every rank)", "the launcher", found.headline)
        return replace(found, headline=said, ranks=())
    note = f"The launcher learned of it from {error.type}." if error else "The launcher was stopped."
    return replace(found, notes=(*found.notes, note))


def _as_rank(worker: RankReport) -> RankReport:
    """Launchers end the other workers with SIGTERM when one has failed: they have been stopped."""
    stopped = worker.outcome is Outcome.CRASHED and worker.code == -signal.SIGTERM
    return replace(worker, outcome=Outcome.STOPPED) if stopped else worker


def parse(printed: str) -> Error:
    """An exception from its printed traceback, the last of a chain."""
    last = printed.split("Traceback (most recent call last):")[-1]
    found = re.findall(r'File "([^"\n]+)", line (\d+), in (\S+)', last)
    frames = tuple(frame for raw in found if is_users(raw[0]) and (frame := Frame.of(raw)))
    said = re.search(
        r"^[ \t]*([A-Za-z_][\w.]*)(?:: (.*))?$(?!\n\s+File)", _after_frames(last), re.DOTALL | re.MULTILINE
    )
    if said is None:
        return Error("an error", first_line(last), frames, printed)
    return Error(said.group(1).rsplit(".", 1)[-1], (said.group(2) or "").strip(), frames, printed)


def _after_frames(printed: str) -> str:
    """What follows the last frame of a printed traceback: the exception's own lines."""
    lines = printed.splitlines()
    inside = [number for number, text in enumerate(lines) if re.match(r'\s*File "', text)]
    if not inside:
        return printed.strip()
    indent = len(lines[inside[-1]]) - len(lines[inside[-1]].lstrip())
    rest = lines[inside[-1] + 1 :]
    while rest and (not rest[0].strip() or len(rest[0]) - len(rest[0].lstrip()) >= indent):
        rest.pop(0)
    return "\n".join(rest).strip()


# Deadlines, interrupts, timeouts -----------------------------------------------------------------------------------


def _own_timeout(members: Sequence[RankReport], first: RankReport) -> Cause:
    """A collective that gave up by its own timeout: a hang with an end."""
    assert first.error is not None
    last = first.last_collective
    waited = said_of(last) if last else "init_process_group"
    there = {
        report.rank: one
        for report in members
        for one in reversed(report.collectives)
        if last and (one.group, one.group_number, one.kind) == (last.group, last.group_number, last.kind)
    }
    gave_up = [
        report.rank
        for report in members
        if report is first or (report.rank in there and report.error and TIMEOUT.search(report.error.message))
    ]
    elsewhere = [report for report in members if report is not first and report.rank not in there]
    absent = [report.rank for report in elsewhere]
    busy = [one for one in elsewhere if what(one).startswith(OWN_CODE) and one.stack is not None and one.stack.frame]
    where = f",{line(place(busy[0]))}," if busy and len(busy) == len(absent) else ""
    calls = {
        (what(report), place(report))
        for report in elsewhere
        if report.outcome in STOOD and not what(report).startswith(OWN_CODE)
    }
    waits = (
        f": {one_or_more(absent, 'it waits', 'they wait')} in {(one := calls.pop())[0]}{at(one[1])}"
        if len(calls) == 1 and not busy
        else ""
    )
    who = f": {names(absent)}{where} never joined it{waits}" if absent else ""
    told = re.search(r"Timed out waiting (\d+)ms|Timeout\(ms\)=(\d+)", first.error.message)
    seconds = round(int(told[1] or told[2]) / 1000, 1) if told else 0
    allowed = group_timeout(first, last) if last else None
    by_group = allowed is not None and round(allowed, 1) == seconds
    limit = f" after {duration(seconds)}" if told else ""
    notes = [] if busy else [SAME_ORDER]
    if by_group and busy:
        notes.append(
            f"The group allows each call {duration(seconds)} (its `timeout=`). Raise it if that work may take longer."
        )
    if not first.error.traceback:
        notes.append(f"{first.error.type}: {first_line(first.error.message)}")
    return Cause(
        Kind.HANG,
        f"{names(gave_up)} gave up waiting in {waited}{limit}{who}.",
        tuple(absent) or (first.rank,),
        first.error.frame,
        rows(members, absent),
        tuple(notes),
        topic=Topic.HANGS,
        error=first.error,
    )


def _still_waiting(waiting: list[RankReport], who: str) -> str:
    """`rank 1 was still waiting in barrier #2`; each call with its ranks, the one with the most of them first."""
    calls: dict[str, list[int]] = {}
    for report in waiting:
        calls.setdefault(what(report), []).append(report.rank)
    (call_of_most, most), *others = sorted(calls.items(), key=lambda item: -len(item[1]))
    who = names(most) if others else who
    said = f"{who} {'were' if who.startswith('ranks') else 'was'} still waiting in {call_of_most}"
    return said + "".join(f", {names(ranks)} in {one}" for one, ranks in others)


def _timed_out(run: Run, job: Job, end: RunEnd) -> Cause:
    limit = f"{end.limit:g}"
    members = run.members
    late = [report for report in members if report.outcome is Outcome.TIMED_OUT] or list(run.ranks)
    held = [report for report in late if report.stopped]
    waiting = [report for report in late if report not in held and call(report)]
    busy = [report for report in late if report not in held and report not in waiting]
    if end.why is Why.CPU and busy:
        most = max(busy, key=lambda report: report.cpu_seconds)
        busy = [report for report in busy if report is most or _same_loop(report, most)]
    many = held or busy or waiting
    first = many[0]
    frame = place(first)
    who, where = _who(run, job, many), line(frame)
    was = "were" if who.startswith("ranks") else "was"
    if len(many) > 1 and where:
        where = f", rank {first.rank}{where}"
    if held:
        said = f"{who} {was} held by a signal (SIGSTOP) and did nothing for {limit} s{where}"
    elif not busy:
        said = f"{_still_waiting(many, who)} after {limit} s{where}"
    elif end.why is Why.CPU:
        said = f"{who} {was} still computing after {limit} s of processor time{where}"
    elif end.why is Why.IDLE:
        said = f"{who} did nothing for {limit} s{where}"
    else:
        said = f"{who} {was} still running after {limit} s{where}"
    others = [report for report in waiting if report not in many]
    meanwhile = f"; {names(r.rank for r in others)} waited in {what(others[0])}" if others else ""
    at_fault = [report.rank for report in many]
    return Cause(
        Kind.TIMED_OUT,
        f"{said}{meanwhile}.",
        tuple(at_fault),
        frame,
        rows(members, at_fault if len(at_fault) < len(members) else ()),
        topic=Topic.HANGS,
    )


def _same_loop(one: RankReport, other: RankReport) -> bool:
    """They compute in the same function: which of them came to its limit first is chance."""
    here, there = place(one), place(other)
    return here is not None and there is not None and (here.file, here.function) == (there.file, there.function)


def _who(run: Run, job: Job, reports: Sequence[RankReport]) -> str:
    if job.launcher and any(report is run.ranks[0] for report in reports):
        return "the launcher"
    return names(report.rank for report in reports)


def _interrupted(run: Run, end: RunEnd) -> Cause:
    members = run.members
    alive = [report.rank for report in members if report.outcome is Outcome.INTERRUPTED]
    still = f"{names(alive)} {one_or_more(alive, 'was', 'were')} still running"
    who = still if alive else "no rank was still running"
    where = f" on {end.node}" if end.node else ""
    return Cause(Kind.INTERRUPTED, f"interrupted{where}: {who}.", tuple(alive), None, rows(members))


def _node_lost(run: Run, end: RunEnd) -> Cause:
    lost = tuple(report.rank for report in run.ranks if report.outcome is Outcome.LOST)
    return Cause(Kind.NODE_LOST, f"{end.node}.", lost, None, rows(run.ranks, lost), topic=Topic.FAILURES)
