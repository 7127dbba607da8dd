"""Why a run hangs: who is expected where, and where they are instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from .branches import branch, placed, stands
from .divergence import Divergence, called_from, first_divergence, parted_at, reached, say
from .job import Job
from .mismatch import (
    MISMATCHED,
    OTHER_ORDER,
    SAME_OP,
    SAME_TENSORS,
    SKIPPED,
    apart_from_most,
    first_mismatch,
    kinds_of,
    rules,
    say_mismatch,
)
from .missed import missed_turn
from .places import IN_STEP, call, detail, exit_of, groups, in_group, line_in, part_of, pending, rows, said_of, what
from .report import Cause, Collective, Frame, Group, Kind, Outcome, RankReport, Topic, Waiting
from .result import Run, latest
from .skipped import MAY_SKIP, Skip, first_skipped, may_part, may_skip, skipped
from .words import duration, names, one_or_more, wait

SAME_ORDER = "Ranks must call the same collectives in the same order."
PAIRS = "Every send needs its receive, and the other way round."
WAIT_LATER = "Or start all messages before you wait for any: isend and irecv, or batch_isend_irecv."
ALL_MAKE_GROUPS = (
    "Every rank must call new_group for every group, in the same order, also for those that it doesn't belong to."
)
GLOOS_DEFAULT = 1800.0  # Seconds: torch's default_pg_timeout
SAME_STEPS = (
    "With DDP, every rank must take the same number of steps. DistributedSampler deals them the same number of batches; "
    "`with model.join():` lets a rank finish early."
)
IN_JOIN = (
    "At the end of `with join():` a rank that is out of batches answers DDP's calls, and no others. Make calls of your own after "
    "the block."
)
CAME_OUT = "In that call"
PARTED = (SAME_ORDER, SAME_TENSORS, SAME_OP)
"""Rules after which it is said what parted the ranks."""
RULES = (SAME_ORDER, PAIRS, ALL_MAKE_GROUPS, SAME_STEPS, IN_JOIN)
JOINS = ("torch.distributed.algorithms",)


@dataclass(frozen=True)
class Finding:
    """The headline, the ranks at fault, what else to say, and where each went wrong, if that is not where it waits."""

    headline: str
    at_fault: Sequence[int]
    notes: Sequence[str]
    where: Mapping[int, Frame | None] = field(default_factory=dict)
    calls: Mapping[int, Collective] = field(default_factory=dict)
    """... and the calls that it is about, if those are not the ones that are waited for."""
    topic: Topic = Topic.HANGS
    counts: Sequence[str] = ()


def hang(run: Run, job: Job) -> Cause:
    """The cause of a hang. Its ranks are those that differ from most: whom the others wait for."""
    members = latest(run.workers) if job.launcher else list(run.ranks)
    if job.launcher and run.ranks[0].outcome is Outcome.HUNG:  # The launcher is a rank too.
        members = latest([*run.workers, run.ranks[0]])
    stopped = [report.rank for report in members if report.outcome is Outcome.STOPPED]
    members = [report for report in members if report.outcome is not Outcome.STOPPED]
    waiting = [report for report in members if report.outcome is Outcome.HUNG]
    found = _find(members, waiting, first_divergence(members))
    found, parting, place, calls = _parting(found, members, waiting)
    at_fault = found.at_fault
    table = rows(members, at_fault if len(at_fault) < len(members) else ())
    table = tuple(_at_the_call(row, pending(report), found) for row, report in zip(table, members, strict=True))
    # The last call of a rank that has finished is not where it went wrong: its exit is, or where the others wait.
    frames = {report.rank: row.frame for report, row in zip(members, table, strict=True) if report in waiting}
    frames |= {report.rank: exit_of(report) for report in members if report not in waiting}
    frames |= found.where
    frame = next((frames[rank] for rank in at_fault if frames.get(rank)), None)
    frame = frame or next((one for one in frames.values() if one), None)
    came = reached(calls)  # if from different places, the line that they share is not what differs
    notes = [SKIPPED if came and note == OTHER_ORDER else note for note in found.notes]
    place = place if {*PARTED} & {*notes} else None
    if place and frame:
        parting = placed(parting, place, frame.file)
        notes = [note for note in notes if not note.startswith(MAY_SKIP)]
    untold = [note for note in notes if note.startswith(MAY_SKIP)]
    maybe = next((may_part(one) for note in untold for one in calls.values() if may_skip(one) == [note]), None)
    said = [f"{note} {parting}" if parting and note in PARTED else note for note in notes]
    own = [parting] if place else came
    if found.topic is not Topic.MISMATCHES:
        own = [*own, *(note for note in notes if note not in RULES)]
    said += [*found.counts, *came]
    if any(report.stack and report.stack.threads for report in waiting):
        idle = names(report.rank for report in waiting if report.stack and report.stack.threads)
        said.append(f"A thread of {idle} might still have done something; it did not for {job.idle_limit:g} s.")
    if stopped:
        said.append(
            f"{names(stopped).capitalize()} might still have continued; Lockstep ended {one_or_more(stopped, 'it', 'them')}."
        )
    if left_alone := _left_alone(members, waiting):
        said.append(left_alone)
    headline = " ".join([found.headline, *_handled(waiting)])
    return Cause(
        Kind.HANG, headline, tuple(at_fault), frame, table, tuple(said), topic=found.topic,
        branch=line_in(place, frame), may_part=line_in(maybe, frame),
        own=tuple(own), cited=called_from(calls),
    )  # fmt: skip


def _parting(
    found: Finding, members: list[RankReport], waiting: list[RankReport]
) -> tuple[Finding, str, Frame | None, Mapping[int, Collective]]:
    """What parted the ranks, in words and its place, with the calls that it is about, and what else is known then."""
    inner = _innermost(members, waiting)
    calls = found.calls or _calls(waiting, inner)
    skip = skipped(calls, members)
    if skip is not None and not found.calls and len(skip.call.members) > len(inner):
        wider = _calls(waiting, skip.call.members)
        if of_all := skipped(wider, members):
            skip, calls = of_all, wider
    missed = missed_turn(members) if {*PARTED} & {*found.notes} else None
    if earlier := missed or (first_skipped(members) if skip is None and found.counts else None):
        skip, calls = earlier
    if skip is not None:
        return _skipped(found, skip, calls, waiting), skip.parting, skip.branch, calls
    concerned = [report for report in members if report.rank in inner]
    return found, *_branch(found, concerned, calls, len(members)), calls


def _handled(waiting: Sequence[RankReport]) -> list[str]:
    """Who waits in the `except` or `finally` of an error that nobody may have seen; nothing if all do."""
    said: dict[str, list[int]] = {}
    for report in waiting:
        if error := detail(report).get("handles"):
            place = Frame.of(detail(report).get("raised_at"))
            said.setdefault(f"{error}{f', raised at {place.short}' if place else ''}", []).append(report.rank)
    if sum(map(len, said.values())) == len(waiting):
        return []
    return [
        f"{names(ranks).capitalize()} {one_or_more(ranks, 'makes its call while it handles', 'make their call while they handle')} {error}."
        for error, ranks in said.items()
    ]


def _skipped(found: Finding, skip: Skip, calls: Mapping[int, Collective], waiting: Sequence[RankReport]) -> Finding:
    """The same, of calls that met only because ranks had skipped one."""
    here = {report.rank for report in waiting if pending(report) == calls.get(report.rank)}
    passed = [one for rank, one in calls.items() if rank not in here]
    notes = [
        note
        for note in found.notes
        if note not in (SAME_ORDER, SAME_STEPS, *MISMATCHED) and not note.startswith((MAY_SKIP, CAME_OUT))
    ]
    notes = [*dict.fromkeys([SAME_ORDER, *notes, *(_came_out(calls, passed) or _mixed_up(skip, passed))])]
    told = skip.usual or found.topic is Topic.MISMATCHES or {*found.at_fault} != {*skip.without} or bool(found.counts)
    if skip.call.is_point_to_point:  # nobody else need make it
        return replace(found, at_fault=skip.at_fault, notes=notes, topic=Topic.HANGS)
    if not told:
        return replace(found, notes=notes, topic=Topic.HANGS)
    where = dict.fromkeys(calls, skip.at)
    return replace(found, headline=skip.headline, at_fault=skip.at_fault, notes=notes, where=where, topic=Topic.HANGS)


def _mixed_up(skip: Skip, passed: Sequence[Collective]) -> list[str]:
    """The same of tensors that look alike."""
    came = {one.rank for one in passed}
    if not skip.call.tensor or came.isdisjoint(skip.made) or came.isdisjoint(skip.without):
        return []
    return [
        f"The call of {names(skip.made)} met the next one of {names(skip.without)} without an error. Trust neither result, "
        "nor any number computed from it."
    ]


def _branch(
    found: Finding, members: list[RankReport], calls: Mapping[int, Collective], size: int
) -> tuple[str, Frame | None]:
    """The statement that parted the ranks, as they stand or, if that's in different functions, where these were called.

    A rank that stands nowhere in the user's code has left it, as one that has finished.
    """
    stood = found.where or {
        report.rank: report.stack.frame if report.stack and report.outcome is Outcome.HUNG else None
        for report in members
        if report.stack or report.outcome is not Outcome.HUNG
    }
    gone = [rank for rank, frame in stood.items() if frame is None]
    sides: dict[object, set[int]] = {}
    kinds = {one.kind for one in calls.values()}
    for rank, one in calls.items():
        sides.setdefault((one.kind if len(kinds) > 1 else rank) if found.calls else _counted(one), set()).add(rank)
    together = sides.values() if len(sides) > 1 or gone else ()
    chains = {(one.frame, *one.callers) for one in calls.values() if one.frame is not None}
    alike = chains.pop() if gone and len(chains) == 1 else ()
    past = bool(found.calls)
    callers = [one for one in alike[1:] if one]
    named = branch(stands(stood), gone, size=size, callers=callers, past=past, together=together)
    return named if named[1] or len(calls) < 2 else branch(parted_at(calls), size=size, past=past, together=together)


def _calls(waiting: Sequence[RankReport], ranks: Collection[int]) -> dict[int, Collective]:
    """What these of the ranks wait in."""
    return {report.rank: one for report in waiting if report.rank in ranks and (one := pending(report)) is not None}


def _innermost(members: Sequence[RankReport], waiting: Sequence[RankReport]) -> tuple[int, ...]:
    """The ranks of the smallest group that waits for one of its own; all ranks if that is no part of them.

    What went wrong is among these: others may wait for one of them, and know nothing of it.
    """
    everyone = tuple(report.rank for report in members)
    calls = [one for one in _calls(waiting, everyone).values() if not one.is_point_to_point and one.rank in one.members]
    met = Counter(map(_counted, calls))
    stuck = [one.members for one in calls if met[_counted(one)] < len(one.members)]
    smallest = min(stuck, key=len, default=everyone)
    return smallest if {*smallest} < {*everyone} else everyone


def _at_the_call(row: Waiting, operation: Collective | None, found: Finding) -> Waiting:
    """A rank may wait further down than it called. If its call is what went wrong, the row has the call's line."""
    called = operation.frame if operation else None
    return replace(row, frame=called) if called is not None and found.where.get(row.rank) == called else row


def _left_alone(members: Sequence[RankReport], waiting: Sequence[RankReport]) -> str:
    """What would have come of it, if that is sure: gloo notices if the process that it waits for has ended, and no process
    that waits.
    """
    finished = {report.rank for report in members if report not in waiting}
    begun = {report.rank: {_counted(one) for one in report.collectives} for report in members}
    calls = {report.rank: one for report in waiting if (one := pending(report)) is not None}
    awaited = {rank: _awaited(one) for rank, one in calls.items()}
    woken: dict[int, set[int]] = {}
    for rank, others in awaited.items():  # Who has begun the call, and finished, may have done its part.
        missing = {other for other in others if _counted(calls[rank]) not in begun.get(other, ())} or others
        if missing and missing <= finished:
            woken[rank] = missing
    timeouts = {_timeout(report, calls.get(report.rank)) for report in waiting}
    if woken and all(group_timeout(report, calls[report.rank]) for report in waiting if report.rank in woken):
        gone = {*chain.from_iterable(woken.values())}
        return f'Without Lockstep, {names(woken)} would have failed with gloo\'s "Connection closed by peer" once {names(gone)} had ended.'
    if None in timeouts or any(others & finished for others in awaited.values()):
        return ""
    seconds = min(one for one in timeouts if one is not None)
    by = "gloo's default timeout" if seconds == GLOOS_DEFAULT else "the timeout that the program set"
    return f"Without Lockstep, it would have waited {duration(seconds)} ({by})."


def _timeout(report: RankReport, call_: Collective | None) -> float | None:
    """After how many seconds its wait would have failed; None when that isn't sure."""
    told = detail(report)
    if "limit" in told or "init_method" in told:
        return None
    if call_ is not None:
        return group_timeout(report, call_)
    meets = call(report) == "init_process_group" and not _moved(report)
    return GLOOS_DEFAULT if meets and told.get("backend", "gloo") == "gloo" else None


def group_timeout(report: RankReport, call_: Collective) -> float | None:
    """Seconds after which a call of this group fails; None where that isn't known."""
    return next((group.timeout for group in reversed(report.groups) if group.name == call_.group), None)


def _counted(call_: Collective) -> tuple[object, ...]:
    """The same for the calls of a collective that belong together; a message's belong to none."""
    return (call_.group, call_.group_number, call_.kind) if not call_.is_point_to_point else (call_.rank, call_.number)


def _awaited(call_: Collective) -> set[int]:
    """The ranks whose part this rank needs; of a message from any rank, none is known.

    gloo's broadcast and reduce go from rank to rank, not only to the root.
    """
    others = {*call_.members} - {call_.rank}
    if call_.is_point_to_point or (call_.kind in ("gather", "scatter") and call_.named != call_.rank):
        return others & {call_.named}
    return others


def _find(members: list[RankReport], waiting: list[RankReport], parted: Divergence | None) -> Finding:
    in_init = [report for report in waiting if call(report) == "init_process_group"]
    if in_init:
        return _rendezvous(members, in_init)
    if confused := groups_apart(members) or met_by_join(members):
        return confused
    operations = {report.rank: pending(report) for report in waiting}
    finished = [report for report in members if report.outcome is not Outcome.HUNG]
    apart = parted if parted is not None and not _is_one_call(parted) else None
    if apart is not None and any(operations.get(rank) != one for rank, one in apart.calls.items()):
        return _parted(apart, [one for rank, one in apart.calls.items() if operations.get(rank) != one])
    mismatch = first_mismatch(members)
    earlier: list[str] = []
    if mismatch is not None and len(kinds_of(mismatch)) == 1:
        if any(operation in mismatch.values() for operation in operations.values()):
            at_fault = (parted.odd if parted else []) or sorted(mismatch)
            where = {rank: one.frame for rank, one in mismatch.items()}
            passed = [one for rank, one in mismatch.items() if operations.get(rank) != one]
            notes = [*rules(mismatch), *_came_out(mismatch, passed)]
            return Finding(f"{say_mismatch(mismatch)}.", at_fault, notes, where, mismatch, Topic.MISMATCHES)
        earlier = [f"Before that, {say_mismatch(mismatch)}, which gloo does not notice."]
    if any(operation and operation.is_point_to_point for operation in operations.values()):
        return _point_to_point(waiting, finished, operations)
    found = _unlike_others(members, waiting, operations) or _collectives(members, waiting, finished, operations)
    if apart is not None and {*found.at_fault} != {*(apart.odd or apart.calls)}:
        return _parted(apart)
    return replace(found, notes=[*found.notes, *earlier])


def _unlike_others(
    members: Sequence[RankReport], waiting: Sequence[RankReport], operations: Mapping[int, Collective | None]
) -> Finding | None:
    """Ranks that have not come to a call of their group that all ranks of groups like it, the other rows of a mesh, have made."""
    begun = {report.rank: {_counted(one): one for one in report.collectives} for report in members}
    for report in waiting:
        one = operations[report.rank]
        if one is None or one.is_point_to_point or not 1 < len(one.members) < len(members):
            continue
        absent = [rank for rank in one.members if _counted(one) not in begun.get(rank, {})]
        beside: dict[tuple[int, ...], list[Collective]] = {}
        here = (one.group_number, one.kind, one.frame)
        for other in (other for calls in begun.values() for other in calls.values()):
            alike = len(other.members) == len(one.members) and {*other.members}.isdisjoint(one.members)
            if alike and (other.group_number, other.kind, other.frame) == here:
                beside.setdefault(other.members, []).append(other)
        if absent and beside and all(len(calls) == len(ranks) for ranks, calls in beside.items()):
            where = {other.rank: in_group(other, len(members)) for other in waiting if other.rank in absent}
            does = [f"{wait([rank])} in {place}" for rank, place in where.items()] if len(absent) > 1 else []
            does = does or [f"it waits in {place}" for place in where.values()] or ["it has finished"]
            return Finding(
                f"{names(absent)} never joined {said_of(one)}{part_of(one, len(members))}: {'; '.join(does)}.",
                absent,
                [SAME_ORDER],
            )
    return None


def groups_apart(members: Sequence[RankReport]) -> Finding | None:
    """Ranks that mean different ranks by what is one group to PyTorch: the n-th that each has made."""
    meant: dict[tuple[str, int], dict[int, Group]] = {}
    for report in members:
        made = Counter[str]()
        for one in report.groups:
            made[one.name] += 1
            meant.setdefault((one.name, made[one.name]), {})[report.rank] = one
    for made_by in meant.values():
        sides = {rank: one.members for rank, one in made_by.items()}
        if len({*sides.values()}) > 1:
            said = [
                f"{names(rank for rank, mine in sides.items() if mine == side)} called {'it' if n else 'new_group'} for {names(side)}"
                for n, side in enumerate(sorted({*sides.values()}))
            ]
            where = {rank: one.frame for rank, one in made_by.items()}
            at_fault = apart_from_most(sides) or sorted(sides)
            return Finding(f"{' where '.join(said)}.", at_fault, [ALL_MAKE_GROUPS], where)
    return None


def met_by_join(members: Sequence[RankReport]) -> Finding | None:
    """A call of the code's own that met a rank at the end of join(), which answers only DDP's."""
    for group in groups(members):
        for number in sorted(set.intersection(*map(set, group.values()))):
            met = {rank: calls[number] for rank, calls in group.items()}
            joined = [rank for rank, one in met.items() if one.via == JOINS and not one.inside]
            own = [rank for rank, one in met.items() if not one.via and not one.inside]
            if joined and own:
                call_ = said_of(met[own[0]])
                headline = f"{names(own)} called {call_}, which {names(joined)}, out of batches, cannot answer: {wait(joined)} in join()."
                where = {rank: one.frame for rank, one in met.items()}
                return Finding(headline, own, [IN_JOIN], where, {rank: met[rank] for rank in own})
    return None


def _is_one_call(parted: Divergence) -> bool:
    """True when the ranks made the same call at the same line, and differ in what they brought."""
    return len(kinds_of(parted.calls)) == 1 and len(parted.first_side) == len(parted.calls)


def _parted(parted: Divergence, passed: Sequence[Collective] = ()) -> Finding:
    """They went on for a while after they had parted, or those did that have `passed` their calls there."""
    notes = [SAME_ORDER, *_came_out(parted.calls, passed)]
    return Finding(say(parted), parted.odd or sorted(parted.calls), notes, parted.places, parted.calls)


def _came_out(met: Mapping[int, Collective], passed: Sequence[Collective]) -> list[str]:
    """What the ranks that went on have from a call in which different tensors met."""
    tensors = {rank: one.tensor for rank, one in met.items()}
    if not passed or "" in tensors.values() or len({*tensors.values()}) == 1:
        return []
    brought = (
        f"{tensor} of {names(rank for rank in tensors if tensors[rank] == tensor)}"
        for tensor in dict.fromkeys(tensors.values())
    )
    who = names(one.rank for one in passed)
    return [
        f"{CAME_OUT}, {' met '.join(brought)} without an error. Trust neither what {who} got from it nor any number "
        "computed from that."
    ]


def _collectives(
    members: list[RankReport],
    waiting: list[RankReport],
    finished: list[RankReport],
    operations: dict[int, Collective | None],
) -> Finding:
    expected, there, group = _expected(waiting, operations, len(members))
    concerned = [report for report in members if not group or report.rank in group]
    away = [report for report in waiting if report.rank not in there and report in concerned]
    absent = [report.rank for report in away]
    gone = [report for report in finished if report in concerned]
    who = wait(there)
    if gone:
        ranks = [report.rank for report in gone]
        last = gone[0].last_collective
        after = f" after {last.title}" if last else " without a single collective"
        have = one_or_more(gone, "it has finished", "they have finished")
        first = operations[there[0]]
        also = ""
        if absent:
            also = f" {wait(absent).capitalize()} in {in_group(away[0], len(members))}."
        fewer = {one.frame for report in gone for one in report.collectives}
        steps = [SAME_STEPS] if first and first.inside in IN_STEP and first.frame in fewer else []
        most = len(gone) > len(there) + len(absent)
        return Finding(
            f"{who} in {expected}, which {names(ranks)} never called: {have}{after}.{also}",
            [*there, *absent] if most else ranks,
            [SAME_ORDER, *(may_skip(first) if first else []), *steps],
            counts=_counts(members),
        )
    elsewhere: dict[str, list[int]] = {}
    for report in away:
        elsewhere.setdefault(in_group(report, len(members)), []).append(report.rank)
    one_call = len({what(report) for report in away}) == 1
    if len(absent) == len(there) and len(waiting) == 2 * len(absent) and one_call:
        others = ", ".join(f"{names(ranks)} in {place}" for place, ranks in elsewhere.items())
        return Finding(
            f"{who} in {expected}, {others}: they wait for each other.",
            [*absent, *there],  # which of the two sides is wrong, nobody but their author knows
            [SAME_ORDER],
        )
    if absent:
        of_all = " of the default group" if any(one.startswith(f"{expected} of ") for one in elsewhere) else ""
        waits = [f"{wait(ranks)} in {place}" for place, ranks in elsewhere.items()]
        if len(elsewhere) == 1:
            waits = [f"{one_or_more(absent, 'it waits', 'they wait')} in {next(iter(elsewhere))}"]
        return Finding(f"{names(absent)} never joined {expected}{of_all}: {'; '.join(waits)}.", absent, [SAME_ORDER])
    return Finding(f"all ranks wait in {expected}, and nothing can complete it.", [], [])


def _rendezvous(members: list[RankReport], in_init: list[RankReport]) -> Finding:
    sizes = {report.rank: detail(report).get("world_size") for report in in_init}
    odd = {rank: size for rank, size in sizes.items() if isinstance(size, int) and size > 0 and size != len(members)}
    if odd:
        size = next(iter(odd.values()))
        return Finding(
            f"{wait(odd)} in init_process_group for a group of {size}, but there "
            f"{one_or_more(members, 'is', 'are')} {len(members)}.",
            list(odd),
            [f"world_size={size} was given; the launcher started {len(members)}."],
        )
    given = {report.rank: detail(report).get("rank") for report in in_init}
    counted = Counter(number for number in given.values() if isinstance(number, int) and number >= 0)
    twice = [number for number, count in counted.items() if count > 1]
    if twice:
        same = [rank for rank, number in given.items() if number == twice[0]]
        return Finding(
            f"{names(same)} all call init_process_group with rank={twice[0]}.",
            same,
            ["Every rank needs a number of its own, 0 to world_size - 1."],
        )
    again = [
        "This process has had a group before. Through one store, a second init_process_group may meet what the "
        "first has left there: set up once for each process, or use a store or port of its own."
    ]
    notes = again if any(detail(report).get("again") for report in in_init) else []
    absent = [report.rank for report in members if report not in in_init]
    if absent:
        done = [report.rank for report in members if report.rank in absent and report.outcome is not Outcome.HUNG]
        did = "finished without" if done == absent else "never reached"
        return Finding(
            f"{names(absent)} {did} init_process_group; {wait(report.rank for report in in_init)} there.",
            absent,
            [*notes, "With gloo, init_process_group returns only after every rank of the group has called it."],
        )
    elsewhere = [report for report in in_init if _moved(report)]
    if elsewhere:
        now, launchers = detail(elsewhere[0])["address"], detail(elsewhere[0])["launchers_address"]
        return Finding(
            f"{wait(report.rank for report in elsewhere)} in init_process_group for a store at {now}, where nothing "
            f"listens: the launcher had set {launchers}.",
            [report.rank for report in elsewhere],
            ["MASTER_ADDR and MASTER_PORT belong to the launcher: read them, never write them."],
        )
    return Finding(
        "all ranks wait in init_process_group, and the group is never complete.",
        [],
        notes or ["Do MASTER_ADDR and MASTER_PORT still say what the launcher set?"],
    )


def _moved(report: RankReport) -> bool:
    """True when the rank goes to another address than the one that its launcher had set."""
    launchers = str(detail(report).get("launchers_address") or ":")
    return launchers != ":" and detail(report).get("address") != launchers


def _point_to_point(
    waiting: list[RankReport], finished: list[RankReport], operations: dict[int, Collective | None]
) -> Finding:
    messages = {rank: one for rank, one in operations.items() if one is not None and one.is_point_to_point}
    sentences = {rank: _waits_for_message(rank, one) for rank, one in messages.items()}
    peers = {rank: one.named for rank, one in messages.items()}
    for report in finished:
        expecting = [rank for rank, peer in peers.items() if peer == report.rank]
        if expecting:
            return Finding(f"{sentences[expecting[0]]}, which has finished.", [report.rank], [PAIRS])
    offered = _offered(messages, peers)
    if len(offered) == 1:
        odd, by = next(iter(offered.items()))
        rest = [said for rank, said in sentences.items() if rank not in (odd, by)]
        return Finding("; ".join([f"{sentences[odd]}, but {sentences[by]}", *rest]) + ".", [odd], [PAIRS])
    elsewhere = [report for report in waiting if report.rank not in messages]
    waited_for = [report for report in elsewhere if report.rank in peers.values()]
    if waited_for:
        in_what = f"{wait(report.rank for report in waited_for)} in {what(waited_for[0])}"
        at_fault = [report.rank for report in waited_for]
        asking = [rank for rank, peer in peers.items() if peer in at_fault]
        if len(asking) <= len(at_fault):  # who of the two sides is wrong, nobody but their author knows
            at_fault = [*asking, *at_fault]
        return Finding("; ".join(sentences.values()) + f"; {in_what}.", at_fault, [PAIRS])
    ended = (
        f", and {names(one.rank for one in finished)} {one_or_more(finished, 'has', 'have')} finished"
        if finished
        else ""
    )
    return Finding("; ".join(sentences.values()) + f"{ended}.", list(messages), [_circle(messages.values())])


def _circle(messages: Collection[Collective]) -> str:
    """What to do when each of these waits for another. Circles have any number of ranks, and there may be several."""
    if len(messages) == 1:
        return PAIRS
    kinds = {one.kind for one in messages}
    if len(kinds) > 1:
        pairs = [
            (one.rank, other.rank)
            for one in messages for other in messages
            if (one.kind, other.kind) == ("send", "recv") and (one.named, other.named) == (other.rank, one.rank)
        ]  # fmt: skip
        if pairs:
            (sender, receiver), *_ = pairs
            return (
                f"Rank {sender} sends to rank {receiver}, and rank {receiver} receives from rank {sender}, but the two do not "
                "meet: their tags differ, or their groups."
            )
        return f"No send meets its receive here: look at the order of the calls, and at the ranks that they name. {WAIT_LATER}"
    mine, others = ("receive", "send") if kinds == {"recv"} else ("send", "receive")
    return (
        f"All of them wait to {mine}, so none {others}s. In each circle of ranks, let one {others} first. {WAIT_LATER}"
    )


def _waits_for_message(rank: int, operation: Collective) -> str:
    direction = "to receive from" if operation.kind == "recv" else "to send to"
    return f"rank {rank} waits {direction} {'any rank' if operation.named is None else f'rank {operation.named}'}"


def _offered(messages: dict[int, Collective], peers: dict[int, int | None]) -> dict[int, int]:
    """Ranks that wait for a message with one rank, while another waits for one with them: {rank: that other}."""
    found: dict[int, int] = {}
    for rank, one in messages.items():
        counterpart = "send" if one.kind == "recv" else "recv"
        wanting = [other for other, peer in peers.items() if peer == rank and messages[other].kind == counterpart]
        if wanting and peers[rank] is not None and peers[rank] not in wanting:
            found[rank] = wanting[0]
    return found


def _expected(
    waiting: list[RankReport], operations: dict[int, Collective | None], size: int
) -> tuple[str, list[int], tuple[int, ...]]:
    """What most of the ranks wait in, which ranks those are, and its group. A tie goes to the earlier call."""
    places: dict[tuple[str, str], list[int]] = {}
    order: dict[tuple[str, str], float] = {}
    for report in waiting:
        operation = operations[report.rank]
        key = (operation.group, f"{operation.kind} {operation.group_number}") if operation else ("", call(report))
        places.setdefault(key, []).append(report.rank)
        order[key] = min(order.get(key, 1e18), operation.group_number if operation else 0)
    there = places[sorted(places, key=lambda key: (-len(places[key]), order[key], places[key]))[0]]
    operation = operations[there[0]]
    first = next(report for report in waiting if report.rank == there[0])
    group = operation.members if operation and operation.rank in operation.members else ()
    return in_group(first, size), there, group


def _counts(members: list[RankReport]) -> list[str]:
    numbers = {report.rank: sum(not one.is_point_to_point for one in report.collectives) for report in members}
    if len(set(numbers.values())) == 1:
        return []
    started: dict[int, list[int]] = {}
    for rank, number in numbers.items():
        started.setdefault(number, []).append(rank)
    counts = [f"{names(started[number])} called {number}" for number in sorted(started, reverse=True)]
    most, *fewer = counts
    collectives = one_or_more(range(max(started)), "collective", "collectives")
    return [f"{most[0].upper()}{most[1:]} {collectives}, {', '.join(fewer)}."]
