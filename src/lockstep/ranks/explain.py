"""From what the ranks did to why the run ended: the root cause first, its echoes after it.

Pure functions over a finished `Run`. A peer's death makes its neighbours fail with "Connection closed by peer", so the
loudest error is seldom the cause; a hang has no error at all. Both are told apart here by what each rank had begun.
"""

from __future__ import annotations

import ast
import re
import signal
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .job import Job
from .report import Cause, Collective, Frame, Outcome, RankReport, Run, Waiting

ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Application timeout caused pair closure|Broken pipe"
    r"|Socket closed|connection was (closed|aborted)|remote process (exited|has terminated)|NCCL communicator was aborted",
    re.IGNORECASE,
)
TIMEOUT = re.compile(r"Timed out waiting \d+ms|Timed out after \d+ seconds|failed to pass monitoredBarrier|Watchdog caught",
                     re.IGNORECASE)  # fmt: skip
SIZE_MISMATCH = re.compile(r"EnforceNotMet.*|Received data size doesn't match", re.IGNORECASE)
SAME_ORDER = "Ranks must call the same collectives in the same order."
FREE_SIZES = ("scatter", "gather", "all_to_all", "all_to_all_single", "send", "recv", "monitored_barrier")
HANGS = 'chapter 3, "Hangs"'
FAILURES = 'chapter 3, "Failures"'
_PYTHON = sysconfig.get_paths()["stdlib"]
_HERE = str(Path(__file__).parent)


def cause(run: Run, job: Job, reason: str) -> Cause | None:
    """Why `run` did not end well, or None when it did."""
    if reason == "interrupted":
        return _interrupted(run)
    if reason == "hang":
        return _hang(run)
    if reason.startswith(("deadline", "cpu", "idle")):
        return _timed_out(run, reason)
    return _failure(run, job)


# Failures --------------------------------------------------------------------------------------------------------


def _failure(run: Run, job: Job) -> Cause | None:
    bad = [report for report in run.ranks if _is_bad(report, job)]
    if not bad:
        return None
    echoes = [report for report in bad if _is_echo(report)]
    causes = sorted((report for report in bad if report not in echoes), key=lambda report: report.ended)
    if not causes:
        quiet = [report for report in run.ranks if report.outcome in (Outcome.EXITED, Outcome.RETURNED)]
        if quiet:
            return _left_early(run, quiet, echoes)
        causes, echoes = sorted(echoes, key=lambda report: report.ended), []
    first = causes[0]
    mismatch = _size_mismatch(run, causes)
    if mismatch is not None:
        return mismatch
    if first.outcome is Outcome.RAISED and first.error is not None and TIMEOUT.search(first.error.message):
        return _own_timeout(run, first)
    found = _describe_failure(run, first, causes)
    note = _echo_note(echoes)
    return replace(found, echoes=tuple(report.rank for report in echoes), notes=(*found.notes, *note))


def _is_bad(report: RankReport, job: Job) -> bool:
    if report.outcome is Outcome.EXITED:
        return report.code != 0 or job.is_function
    return report.outcome not in (Outcome.RETURNED, Outcome.STOPPED)


def _is_echo(report: RankReport) -> bool:
    return report.outcome is Outcome.RAISED and report.error is not None and bool(ECHO.search(report.error.message))


def _echo_note(echoes: Sequence[RankReport]) -> tuple[str, ...]:
    if not echoes or echoes[0].error is None:
        return ()
    matched = ECHO.search(echoes[0].error.message)
    text = matched.group(0) if matched else "a connection error"
    return (f'{names(report.rank for report in echoes)} then failed with "{text}": an echo, not the cause.',)


def _describe_failure(run: Run, first: RankReport, causes: Sequence[RankReport]) -> Cause:
    rank = f"rank {first.rank}"
    match first.outcome:
        case Outcome.RAISED:
            return _raised(run, first, causes)
        case Outcome.EXITED:
            return _exited(run, first)
        case Outcome.CRASHED:
            return _crashed(first)
        case Outcome.OUT_OF_MEMORY:
            return Cause("out of memory", f"{rank} was stopped when it held {_size(first.peak_memory)} of memory.",
                         (first.rank,), _place(first), read=FAILURES)
        case Outcome.TOO_MUCH_OUTPUT:
            return Cause("too much output", f"{rank} was stopped because it printed without end.", (first.rank,),
                         _place(first), read=FAILURES)
    return Cause(first.outcome.value, f"{rank}: {first.outcome.value}.", (first.rank,), _place(first))


def _raised(run: Run, first: RankReport, causes: Sequence[RankReport]) -> Cause:
    error = first.error
    assert error is not None
    same = [report for report in causes if report.error and report.error.type == error.type]
    who = "every rank" if len(same) == run.world_size > 1 else names(report.rank for report in same)
    notes: list[str] = []
    if error.type == "EOFError":
        notes.append("A rank has no keyboard: input() finds nothing to read.")
    short = error.message.strip().splitlines()
    text = f"{error.type}: {short[0]}" if short else error.type
    return Cause("raised", f"{who} raised {text}", tuple(report.rank for report in same), error.frame, (), tuple(notes),
                 read=FAILURES, error=error)


def _exited(run: Run, report: RankReport) -> Cause:
    frame = report.error.frame if report.error else None
    how = "sys.exit" if frame else "os._exit"
    said = f': "{report.error.message}"' if report.error and report.error.type == "" and report.error.message else ""
    others = [one.rank for one in run.ranks if one.rank != report.rank and one.outcome is Outcome.STOPPED]
    note = (f"{names(others).capitalize()} still worked, and had to be stopped.",) if others else ()
    return Cause("exited", f"rank {report.rank} left with status {report.code} (by {how}){said} before its work was done.",
                 (report.rank,), frame, (), note, read=FAILURES)


def _left_early(run: Run, quiet: Sequence[RankReport], echoes: Sequence[RankReport]) -> Cause:
    """Ranks left in good order, and the others lost their connection to them."""
    last = quiet[0].last_collective
    after = f" after {last.title}" if last else " without any collective"
    waiting = echoes[0].last_collective
    expected = f" while {names(report.rank for report in echoes)} still waited in {waiting.title}" if waiting else ""
    verb = "has" if len(quiet) == 1 else "have"
    return Cause("exited", f"{names(report.rank for report in quiet)} {verb} finished{after}{expected}.",
                 tuple(report.rank for report in quiet), last.frame if last else None, rows=_rows(run, list(run.ranks)),
                 notes=(SAME_ORDER, *_echo_note(echoes)), echoes=tuple(report.rank for report in echoes), read=HANGS)


def _crashed(report: RankReport) -> Cause:
    number = -(report.code or 0)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    notes: list[str] = []
    guess = ""
    if name == "SIGKILL":
        guess = f" (out of memory? it held {_size(report.peak_memory)})" if report.peak_memory > 1 << 30 else ""
    frame = _place(report)
    what = re.search(r"what\(\):\s*(.+)", report.stderr)
    if what:
        notes.append(what.group(1).strip())
    last = report.last_collective
    if last is not None:
        notes.append(f"The last call that it began was {last.title}{_at(last.frame)}.")
    return Cause("crashed", f"rank {report.rank} was killed by {name}{guess}.", (report.rank,), frame, (), tuple(notes),
                 read=FAILURES)


def _place(report: RankReport) -> Frame | None:
    """Where a process stood when it was ended: from its crash dump, or its last collective."""
    found = re.findall(r'File "(.+?)", line (\d+) in (\S+)', report.fault)
    for file, line, function in found:
        if not file.startswith((_PYTHON, _HERE, "<frozen")) and "site-packages" not in file:
            return Frame(file, int(line), function)
    if report.stack is not None and report.stack.frame is not None:
        return report.stack.frame
    return report.last_collective.frame if report.last_collective and not found else None


def _size_mismatch(run: Run, causes: Sequence[RankReport]) -> Cause | None:
    """Ranks that met in a collective with tensors that do not fit: gloo ends the process, with no Python error."""
    if not any(SIZE_MISMATCH.search(report.stderr + (report.error.message if report.error else "")) for report in causes):
        return None
    found = first_mismatch(run.ranks)
    if not found:
        return None
    return _mismatch_cause(found, run)


def _mismatch_cause(found: dict[int, Collective], run: Run) -> Cause:
    ranks = sorted(found)
    usual = Counter(_signature(found[rank]) for rank in ranks).most_common(1)[0][0]
    odd = [rank for rank in ranks if _signature(found[rank]) != usual] or ranks[:1]
    other = next(rank for rank in ranks if rank not in odd)
    mine, theirs = found[odd[0]], found[other]
    if mine.kind != theirs.kind:
        text = f"rank {odd[0]} called {mine.title} where rank {other} called {theirs.title}"
    elif mine.reduce_op != theirs.reduce_op and mine.tensor == theirs.tensor:
        text = f"in {mine.title} rank {odd[0]} reduces by {mine.reduce_op}, rank {other} by {theirs.reduce_op}"
    else:
        text = f"in {mine.title} rank {odd[0]} brought {mine.tensor}, rank {other} {theirs.tensor}"
    rows = tuple(Waiting(rank, found[rank].title, found[rank].tensor, None, found[rank].frame, rank in odd) for rank in ranks)
    stopped = [report for report in run.ranks if report.outcome in (Outcome.CRASHED, Outcome.RAISED)]
    note = ("gloo cannot match them and ends the process: no Python error, exit by SIGABRT.",) if any(
        report.outcome is Outcome.CRASHED for report in stopped) else ()
    return Cause("mismatch", f"{text}.", tuple(odd), mine.frame, rows,
                 ("Ranks must call the same collective with tensors of the same size and type.", *note), read=HANGS)


def _signature(collective: Collective) -> tuple[object, ...]:
    sized = collective.kind not in FREE_SIZES
    return (collective.kind, collective.nbytes if sized else None, collective.dtype if sized else None,
            collective.reduce_op)


def first_mismatch(ranks: Sequence[RankReport]) -> dict[int, Collective] | None:
    """The first collective in which two ranks met with different calls, sizes, types or reductions: {rank: its call}.

    Not all of these fail by themselves. gloo mixes unrelated tensors of equal size without a word (claims X09, X11).
    """
    by_group: dict[str, dict[int, dict[int, Collective]]] = {}
    for report in ranks:
        for collective in report.collectives:
            if not collective.is_point_to_point:
                by_group.setdefault(collective.group, {}).setdefault(collective.group_number, {})[report.rank] = collective
    for numbered in by_group.values():
        for number in sorted(numbered):
            met = numbered[number]
            if len(met) > 1 and len({_signature(collective) for collective in met.values()}) > 1:
                return met
    return None


# Hangs -----------------------------------------------------------------------------------------------------------


def _hang(run: Run) -> Cause:
    members = list(run.workers) if run.workers and run.ranks[0].outcome is not Outcome.HUNG else list(run.ranks)
    waiting = [report for report in members if report.outcome is Outcome.HUNG]
    rows = _rows(run, members)
    headline, at_fault, notes = _say_hang(members, waiting)
    seconds = run.quiet_seconds or 0.0
    branch = _branch_note(waiting)
    if branch:
        notes = [branch if note == SAME_ORDER else note for note in notes]
        notes = [f"{SAME_ORDER} {branch}" if note == branch else note for note in notes]
    if not any(_detail(report).get("init_method") for report in waiting):
        notes.append("Left alone this would have waited 30 minutes (gloo's default timeout).")
    rows = tuple(replace(row, differs=row.rank in at_fault and len(at_fault) < len(members)) for row in rows)
    frame = next((row.frame for row in rows if row.rank in at_fault and row.frame), None)
    frame = frame or next((row.frame for row in rows if row.frame), None)
    del seconds
    return Cause("hang", headline, tuple(at_fault), frame, rows, tuple(notes), read=HANGS)


def _say_hang(members: list[RankReport], waiting: list[RankReport]) -> tuple[str, list[int], list[str]]:
    """The headline, the ranks at fault, and what else to say."""
    in_init = [report for report in waiting if _call(report) == "init_process_group"]
    if in_init:
        return _say_rendezvous(members, waiting, in_init)
    finished = [report for report in members if report.outcome in (Outcome.RETURNED, Outcome.EXITED, Outcome.RAISED)]
    operations = {report.rank: _operation(report) for report in waiting}
    if any(operation and operation.is_point_to_point for operation in operations.values()):
        return _say_point_to_point(waiting, finished, operations)
    mismatch = first_mismatch(members)
    if mismatch is not None and len({collective.kind for collective in mismatch.values()}) == 1:
        found = _mismatch_cause(mismatch, Run(len(members), "cpu", members))
        return found.headline, list(found.ranks), [found.notes[0]]
    expected, there = _expected(waiting, operations)
    absent = [report.rank for report in waiting if report.rank not in there]
    if finished:
        last = finished[0].last_collective
        after = f" after {last.title}" if last else " without a single collective"
        also = f" ({names(absent)} waits elsewhere)" if absent else ""
        return (f"{names(r.rank for r in finished)} finished{after}; {names(there)} {_waits(there)} in {expected}{also}.",
                [r.rank for r in finished], [SAME_ORDER, *_counts(members)])
    if absent:
        if len(waiting) == 2:
            other = waiting[0] if waiting[0].rank in absent else waiting[1]
            headline = (f"rank {there[0]} waits in {expected}, rank {other.rank} in {_what(other)}: "
                        "they wait for each other.")
            return headline, [other.rank], [SAME_ORDER]
        return f"{names(absent)} never joined {expected}.", absent, [SAME_ORDER]
    return f"all ranks wait in {expected}, and nothing can complete it.", [], []


def _say_rendezvous(members: list[RankReport], waiting: list[RankReport],
                    in_init: list[RankReport]) -> tuple[str, list[int], list[str]]:
    wanted = {_detail(report).get("world_size") for report in in_init} - {None, -1}
    absent = [report.rank for report in members if report not in in_init]
    size = next(iter(wanted), None)
    if isinstance(size, int) and size != len(members):
        return (f"{names(r.rank for r in in_init)} {_waits(in_init)} in init_process_group for a group of {size}, "
                f"but {len(members)} ranks run.", [r.rank for r in in_init],
                [f"world_size={size} was given; the launcher started {len(members)}."])
    given = [(report.rank, _detail(report).get("rank")) for report in in_init]
    twice = [number for number, count in Counter(number for _, number in given).items()
             if count > 1 and isinstance(number, int) and number >= 0]
    if twice:
        same = [rank for rank, number in given if number == twice[0]]
        return (f"{names(same)} all call init_process_group with rank={twice[0]}.", same,
                ["Every rank needs a number of its own, 0 to world_size - 1."])
    if absent:
        done = [r.rank for r in members if r.rank in absent and r.outcome is not Outcome.HUNG]
        what = "finished without" if done == absent else "never reached"
        return (f"{names(absent)} {what} init_process_group; {names(r.rank for r in in_init)} {_waits(in_init)} there.",
                absent, ["init_process_group returns when all ranks of the group have come."])
    return ("all ranks wait in init_process_group, and nobody completes the group.", [],
            ["Do MASTER_ADDR and MASTER_PORT still say what the launcher set?"])


def _say_point_to_point(waiting: list[RankReport], finished: list[RankReport],
                        operations: dict[int, Collective | None]) -> tuple[str, list[int], list[str]]:
    sentences = []
    for report in waiting:
        operation = operations[report.rank]
        if operation is None or not operation.is_point_to_point or operation.peer is None:
            continue
        direction = "to receive from" if operation.kind == "recv" else "to send to"
        sentences.append((report.rank, operation, f"rank {report.rank} waits {direction} rank {operation.peer}"))
    first_rank, first, text = sentences[0]
    peer = next((report for report in [*waiting, *finished] if report.rank == first.peer), None)
    if peer is not None and peer in finished:
        return f"{text}, which has finished.", [peer.rank], ["Every send needs its receive, and the other way round."]
    if len(sentences) > 1:
        receiving = all(operation.kind == "recv" for _, operation, _ in sentences)
        note = "All of them wait to receive, so nobody sends." if receiving else "Each waits for the other."
        return "; ".join(text for _, _, text in sentences) + ".", [rank for rank, _, _ in sentences], [note]
    where = f", which waits in {_what(peer)}" if peer is not None else ""
    return f"{text}{where}.", [first.peer if first.peer is not None else first_rank], [
        "Every send needs its receive, and the other way round."]


def _expected(waiting: list[RankReport], operations: dict[int, Collective | None]) -> tuple[str, list[int]]:
    """What most of the ranks wait in, and which ranks those are. A tie goes to the earlier call."""
    places: dict[str, list[int]] = {}
    order: dict[str, float] = {}
    for report in waiting:
        operation = operations[report.rank]
        what = operation.title if operation else _call(report)
        places.setdefault(what, []).append(report.rank)
        order[what] = min(order.get(what, 1e18), operation.group_number if operation else 0)
    what = sorted(places, key=lambda key: (-len(places[key]), order[key], places[key]))[0]
    return what, places[what]


def _counts(members: list[RankReport]) -> list[str]:
    numbers = {report.rank: sum(not c.is_point_to_point for c in report.collectives) for report in members}
    if len(set(numbers.values())) == 1:
        return []
    return ["Collectives begun: " + ", ".join(f"rank {rank}: {number}" for rank, number in numbers.items()) + "."]


def _rows(run: Run, members: list[RankReport]) -> tuple[Waiting, ...]:
    rows = []
    for report in members:
        operation = _operation(report)
        if report.outcome in (Outcome.HUNG, Outcome.TIMED_OUT, Outcome.INTERRUPTED) and report.stack is not None:
            frame = report.stack.frame or (operation.frame if operation else None)
            since = max(0.0, report.ended - operation.start) if operation else None
            rows.append(Waiting(report.rank, _what(report), operation.tensor if operation else "", since, frame))
        else:
            last = report.last_collective
            what = {"returned": "finished", "exited": "finished"}.get(report.outcome.value, report.outcome.value)
            rows.append(Waiting(report.rank, f"{what} after {last.title}" if last else what, "", None,
                                last.frame if last else None))
    return tuple(rows)


def _operation(report: RankReport) -> Collective | None:
    if report.stack is None or report.stack.operation is None or _call(report) == "init_process_group":
        return None
    return next((c for c in report.collectives if c.number == report.stack.operation), None)


def _call(report: RankReport) -> str:
    return report.stack.call if report.stack is not None else ""


def _detail(report: RankReport) -> dict[str, object]:
    return report.stack.detail if report.stack is not None else {}


def _what(report: RankReport) -> str:
    operation = _operation(report)
    call = _call(report)
    if operation is None:
        return call or "its own code"
    return f"{operation.title} (backward)" if call == "backward" else (
        f"{operation.title} ({call})" if call in ("DDP()", "forward") else operation.title)


def _branch_note(waiting: list[RankReport]) -> str:
    """Name the branch that some ranks took and others did not, when one statement separates their lines."""
    frames = {report.rank: report.stack.frame for report in waiting if report.stack and report.stack.frame}
    files = {frame.file for frame in frames.values()}
    if len(files) != 1 or len({frame.line for frame in frames.values()}) < 2:
        return ""
    try:
        tree = ast.parse("".join(_lines(next(iter(files)))))
    except SyntaxError:
        return ""
    best: tuple[int, list[int], list[int], str] | None = None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.For, ast.While, ast.Try)):
            continue
        body_end = node.body[-1].end_lineno or node.lineno
        inside = [rank for rank, frame in frames.items() if node.body[0].lineno <= frame.line <= body_end]
        outside = [rank for rank in frames if rank not in inside]
        if inside and outside and (best is None or node.lineno > best[0]):
            word = "took the branch" if isinstance(node, ast.If) else "are inside the block"
            best = (node.lineno, inside, outside, word)
    if best is None:
        return ""
    line, inside, outside, word = best
    word = word if len(inside) > 1 or "took" in word else word.replace("are", "is")
    did = "did not" if "took" in word else ("is not" if len(outside) == 1 else "are not")
    return f"{names(inside).capitalize()} {word} at line {line}; {names(outside)} {did}."


def _lines(file: str) -> list[str]:
    import linecache

    return linecache.getlines(file)


# Deadlines, interrupts, timeouts -----------------------------------------------------------------------------------


def _own_timeout(run: Run, first: RankReport) -> Cause:
    """A collective that gave up by its own timeout: a hang with an end."""
    assert first.error is not None
    last = first.last_collective
    what = last.title if last else "init_process_group"
    others = [report for report in run.ranks if report.rank != first.rank]
    elsewhere = [report for report in others if report.last_collective is None or last is None
                 or report.last_collective.title != last.title]
    who = f": {names(report.rank for report in elsewhere)} never joined it" if elsewhere else ""
    return Cause("hang", f"rank {first.rank} gave up waiting in {what}{who}.",
                 tuple(report.rank for report in elsewhere) or (first.rank,), first.error.frame, _rows(run, list(run.ranks)),
                 (SAME_ORDER, f"{first.error.type}: {first.error.message.splitlines()[0]}"), read=HANGS, error=first.error)


def _timed_out(run: Run, reason: str) -> Cause:
    kind, _, limit = reason.partition(" ")
    members = [*run.ranks, *run.workers]
    late = [report for report in members if report.outcome is Outcome.TIMED_OUT]
    busy = [report for report in late if not _call(report)] or late
    waiting = [report for report in late if report not in busy]
    first = busy[0] if busy else run.ranks[0]
    frame = _place(first)
    where = f" at {frame}" if frame else ""
    text = f" ({frame.text})" if frame and frame.text else ""
    how = {
        "cpu": f"{names(r.rank for r in busy)} had computed for {limit} s of processor time and was still{where}{text}",
        "idle": f"{names(r.rank for r in busy)} stood still for {limit} s{where}{text}",
        "deadline": f"{names(r.rank for r in busy)} was still running after {limit} s{where}{text}",
    }[kind]
    if len(busy) > 1:
        how = how.replace(" was still", " were still")
    meanwhile = f"; {names(r.rank for r in waiting)} waited in {_what(waiting[0])}" if waiting else ""
    return Cause("timed out", f"{how}{meanwhile}.", tuple(report.rank for report in busy), frame,
                 _rows(run, members), (), read=HANGS)


def _interrupted(run: Run) -> Cause:
    members = list(run.workers) or list(run.ranks)
    alive = [report.rank for report in members if report.outcome is Outcome.INTERRUPTED]
    who = f"{names(alive)} {'was' if len(alive) == 1 else 'were'} still running" if alive else "nobody was running any more"
    return Cause("interrupted", f"interrupted: {who}.", tuple(alive), None, _rows(run, members))


def latest(workers: Sequence[RankReport]) -> list[RankReport]:
    """The workers of a launcher's last launch: for each rank the one that was started last."""
    return list({report.rank: report for report in workers}.values())


# Words -----------------------------------------------------------------------------------------------------------


def names(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`."""
    listed = [str(rank) for rank in sorted(ranks)]
    if len(listed) < 2:
        return f"rank {listed[0]}" if listed else "no rank"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def _waits(ranks: Sequence[object]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _at(frame: Frame | None) -> str:
    return f" at {frame}" if frame else ""


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
