"""Explains a job that is gone from what it has left: per process group, the first call at which its ranks diverge.

The numbers in a dump are those of its group: calls with the same number meet. So which call a rank never made is known here,
and need not be guessed from where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from ..ranks import text
from ..ranks.explain import ECHO, TIMEOUT
from ..ranks.mismatch import first_mismatch, mismatch_rows, odd_ones, rules, say_mismatch
from ..ranks.places import said_of
from ..ranks.report import Cause, Collective, Frame, Kind, RankReport, Waiting
from ..ranks.words import at, first_line, located, names, wait
from . import attach, jobs
from .leftovers import Failed, Leftovers
from .stacks import Thread, main_thread
from .watch import Seen

SAME_ORDER = "Ranks that share several groups must call the groups' collectives in the same order."
NOT_NUMBERED = "Stacks alone don't number the calls, and one stack of each rank doesn't tell whether it moved."
WHOLE = "default_pg"  # What torch calls the group of all ranks


@dataclass(frozen=True)
class Group:
    """One process group. `members` are the ranks that belong to it, as far as is known: all of them if `complete`.

    `calls` has, for each member with a dump, its collectives by their number in the group; `open` the first of them that had
    not ended, `transfers` the first send or receive that had not.
    """

    title: str
    members: tuple[int, ...]
    complete: bool
    calls: dict[int, dict[int, Collective]]
    open: dict[int, Collective] = field(default_factory=dict)
    transfers: dict[int, Collective] = field(default_factory=dict)

    @property
    def of(self) -> str:
        """` of tensor_parallel`, or nothing for the group of all."""
        return "" if self.title == WHOLE else f" of {self.title}"

    def last(self, rank: int) -> int:
        """The number of this rank's latest call."""
        return max(self.calls[rank], default=0)


def explain(found: Leftovers) -> list[Cause]:
    """Every cause that these files show, the root first."""
    groups = _groups(found)
    crossed = _crossed(groups)
    pairs = [
        (cause, group)
        for group in groups
        if crossed is None or group not in crossed
        for cause in (_mismatch(group, found) or _hang(group, groups, found), _transfer(group, found))
        if cause is not None
    ]
    # A rank that is late in one group because it waits in another is not the root.
    waiting = {rank for group in groups for rank in (*group.open, *group.transfers)}
    pairs.sort(
        key=lambda pair: (pair[0].kind is not Kind.MISMATCH, len(waiting.intersection(pair[0].ranks)), _since(pair[1]))
    )
    causes = [cause for cause, _ in pairs]
    if crossed is not None:
        causes.insert(0, _say_crossed(*crossed))
    if not found.dumps and found.stacks:
        causes = _of_stacks(found.stacks)
    return _with_errors(causes, sorted(found.errors.values(), key=lambda one: (one.at, one.rank)))


def missing(found: Leftovers) -> list[int]:
    """Ranks that must exist and of which there is no dump, or, without any dump, no stack."""
    known = {*found.dumps, *found.stacks, *found.errors}
    known |= {rank for dump in found.dumps.values() for ranks in dump.members.values() for rank in ranks}
    of = found.dumps or found.stacks
    return sorted(set(range(max(known, default=-1) + 1)) - set(of)) if of else []


def _groups(found: Leftovers) -> list[Group]:
    everybody = {*found.dumps, *missing(found)} if found.dumps else set()
    # Groups that were split off may share a name: their members tell them apart.
    keys = {
        (call.group, call.members): dump.titles.get(call.group, "")
        for dump in found.dumps.values()
        for call in (*dump.collectives, *dump.transfers)
    }
    groups = []
    for (name, ranks), title in sorted(keys.items()):
        members = set(ranks) or (everybody if title == WHOLE else set())
        calls: dict[int, dict[int, Collective]] = {}
        group = Group(title if title not in ("", "undefined") else f"group {name}", (), bool(ranks), calls)
        for rank, dump in sorted(found.dumps.items()):
            own = [one for one in dump.collectives if (one.group, one.members) == (name, ranks)]
            sent = [one for one in dump.transfers if (one.group, one.members) == (name, ranks)]
            if rank in members or own or sent:
                calls[rank] = {one.group_number: one for one in own}
                for mine, first in ((own, group.open), (sent, group.transfers)):
                    if (one := next((one for one in mine if one.number not in dump.ended), None)) is not None:
                        first[rank] = one
        groups.append(replace(group, members=tuple(sorted(members | set(calls)))))
    return groups


def _since(group: Group) -> float:
    return min((one.start for one in (*group.open.values(), *group.transfers.values())), default=float("inf"))


# One group ---------------------------------------------------------------------------------------------------------


def _mismatch(group: Group, found: Leftovers) -> Cause | None:
    """The first call in which two ranks met with different things, unless all went on: some collectives allow other sizes."""
    start = 0
    while True:
        later = {rank: [one for n, one in calls.items() if n > start] for rank, calls in group.calls.items()}
        met = first_mismatch([RankReport(rank, collectives=calls) for rank, calls in later.items()])
        if met is None:
            return None
        start = next(iter(met.values())).group_number
        same_kind = len({one.kind for one in met.values()}) == 1
        if not (same_kind and all(group.last(rank) > start for rank in met) and not _is_open(group, start)):
            break
    differ = odd_ones(met)
    frame = met[(differ or sorted(met))[0]].frame
    notes = (*rules(met), *_no_dump(group, found))
    rows = mismatch_rows(met, differ)
    return Cause(Kind.MISMATCH, f"{say_mismatch(met)}{group.of}.", tuple(differ), frame, rows, notes)


def _is_open(group: Group, number: int) -> bool:
    return any(one.group_number <= number for one in group.open.values())


def _hang(group: Group, groups: Sequence[Group], found: Leftovers) -> Cause | None:
    """The first call that some rank has not made, or that has not ended."""
    ends = {rank: group.last(rank) for rank in group.calls}
    number = min((one.group_number for one in group.open.values()), default=0)
    waits = [rank for rank, one in group.open.items() if one.group_number == number]
    if ends and min(ends.values()) < max(ends.values()):  # some have called what others have not
        # Not every number is recorded: a monitored barrier has none.
        never = min(n for calls in group.calls.values() for n in calls if n > min(ends.values()))
        late = {rank for rank, last in ends.items() if last < never}
        # torch notes a little late that a call has ended: a late rank whose last call ended elsewhere may just have left it.
        if not waits or never <= number or set(waits) <= late:
            number = never
            waits = [rank for rank, one in group.open.items() if one.group_number == number]
    if not number:
        return None
    made = {rank: calls[number] for rank, calls in group.calls.items() if number in calls}
    behind = [rank for rank, last in ends.items() if last < number]
    silent = _silent(group, found)
    first = made[(waits or sorted(made))[0]]
    what = f"{said_of(first)}{group.of}"
    who = f"{wait(waits)} in {what}"
    notes = []
    if behind:
        ended = [rank for rank in made if rank not in waits]
        said = f"{f'{names(made)} called {what}' if ended else who}, which {names(behind)} never called."
        if ended:
            notes.append(
                f"The call ended on {names(ended)}: by its timeout or another error, or the dumps are not of one moment."
            )
    elif silent:
        said = f"{who}; there is no dump of {names(silent)}."
    elif len(waits) < len(made):
        done = [rank for rank in made if rank not in waits]
        said = f"{who}, which has ended on {names(done)}."
        notes.append(f"Look at the devices of {names(waits)}, and at the network between these ranks and the others.")
    elif len(waits) == 1:
        said = f"{who}; no other rank's dump shows a call of it."
    else:
        who = "all ranks wait" if group.complete else f"{names(waits)} wait"
        said = f"{who} in {what}: each has called it, with tensors of the same size, and it did not end."
        notes.append("Look at the network and the devices, or for a rank that is stuck in an earlier kernel.")
    if not group.complete and not behind:
        notes.append(
            f"These dumps do not tell which ranks belong to {group.title}: one that left no dump may be missing here."
        )
    elsewhere = {rank: other for rank in behind for other in groups if rank in other.open}
    notes += [f"Rank {rank} waits in {said_of(other.open[rank])}{other.of}." for rank, other in elsewhere.items()]
    accused = tuple(behind or silent)
    rows = tuple(_row(rank, group, found, rank in accused) for rank in group.members)
    return Cause(Kind.HANG, said, accused, first.frame, rows, (*notes, *_no_dump(group, found)))


def _transfer(group: Group, found: Leftovers) -> Cause | None:
    """Sends and receives that have not ended."""
    waits = group.transfers
    if not waits:
        return None
    parts = [f"rank {rank} waits to {_to(one)}" for rank, one in sorted(waits.items())]
    absent = tuple(sorted({one.peer for one in waits.values() if one.peer is not None} - set(waits)))
    rows = tuple(_row(rank, group, found, rank in absent) for rank in group.members)
    first = waits[min(waits)]
    return Cause(Kind.HANG, f"{'; '.join(parts)}.", absent, first.frame, rows, _no_dump(group, found))


def _to(call: Collective) -> str:
    peer = "another rank" if call.peer is None else f"rank {call.peer}"
    return f"{'receive from' if call.kind == 'recv' else 'send to'} {peer}"


def _silent(group: Group, found: Leftovers) -> list[int]:
    return [rank for rank in group.members if rank not in found.dumps]


def _no_dump(group: Group, found: Leftovers) -> tuple[str, ...]:
    silent = _silent(group, found)
    if not silent:
        return ()
    return (
        f"No dump of {names(silent)} could be read: a killed rank writes none, and a file may lie on another machine.",
    )


def _row(rank: int, group: Group, found: Leftovers, differs: bool) -> Waiting:
    stood = _stood(rank, found)
    if rank not in found.dumps:
        return Waiting(rank, "no dump", frame=stood, differs=differs, waits=False)
    if one := group.open.get(rank):
        return Waiting(rank, said_of(one), one.tensor, frame=one.frame, differs=differs)
    if one := group.transfers.get(rank):
        return Waiting(rank, _to(one), one.tensor, frame=one.frame, differs=differs)
    if not group.calls[rank]:
        return Waiting(rank, "nothing: no call of this group", frame=stood, differs=differs, waits=False)
    one = group.calls[rank][group.last(rank)]
    return Waiting(rank, f"nothing: {one.title} has ended", frame=stood or one.frame, differs=differs, waits=False)


def _stood(rank: int, found: Leftovers) -> Frame | None:
    """Where a rank was, by its stacks."""
    main = main_thread(found.stacks.get(rank))
    return next(iter(main.users), None) if main else None


# Two groups --------------------------------------------------------------------------------------------------------


def _crossed(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    """Two groups whose ranks wait for each other: one called the first group's collective first, another the second's."""
    return next((pair for pair in combinations(groups, 2) if len({*_order(*pair).values()}) == 2), None)


def _order(one: Group, other: Group) -> dict[int, bool]:
    """For the ranks of both groups that wait in one's first open call: True if that is the first group's."""
    order = {}
    if one.open and other.open:
        here, there = (min(call.group_number for call in group.open.values()) for group in (one, other))
        for rank in one.calls.keys() & other.calls.keys():
            first, second = _waits(one, rank, here), _waits(other, rank, there)
            if first and second:
                order[rank] = first.number < second.number
            elif first and other.last(rank) < there:
                order[rank] = True
            elif second and one.last(rank) < here:
                order[rank] = False
    return order


def _waits(group: Group, rank: int, number: int) -> Collective | None:
    call = group.open.get(rank)
    return call if call and call.group_number == number else None


def _say_crossed(one: Group, other: Group) -> Cause:
    rows = []
    for rank, is_first in sorted(_order(one, other).items()):
        group = one if is_first else other
        call = group.open[rank]
        rows.append((Waiting(rank, f"{said_of(call)} of {group.title}", call.tensor, None, call.frame), is_first))
    sides = [[row for row, is_first in rows if is_first is side] for side in (rows[0][1], not rows[0][1])]
    said = [f"{wait(row.rank for row in side)} in {side[0].what}" for side in sides]
    headline = f"{said[0]}, {said[1]}: they call these two in different orders, and wait for each other."
    return Cause(Kind.HANG, headline, (), rows[0][0].frame, tuple(row for row, _ in rows), (SAME_ORDER,))


# Other files -------------------------------------------------------------------------------------------------------


def _of_stacks(stacks: dict[int, tuple[Thread, ...]]) -> list[Cause]:
    """Stacks alone: the same sentences as for a job that is running."""
    job = jobs.Job(dict.fromkeys(sorted(stacks), 0), len(stacks), frozenset(stacks))
    seen = attach.explain(
        job, [attach.Position(rank, 0, Seen(0, stacks[rank], False, "is in no call")) for rank in sorted(stacks)]
    )
    if not any(one.waits for one in seen.positions):
        return []
    late = tuple(one.rank for one in seen.late)
    notes = (*attach.details(seen), NOT_NUMBERED)
    return [Cause(Kind.HANG, seen.headline, late, None, attach.rows(seen), notes)]


def _with_errors(causes: list[Cause], failed: Sequence[Failed]) -> list[Cause]:
    """An error of a rank's own comes first: the others then wait for it. One that tells of another rank's end is a note."""
    own = [one for one in failed if not ECHO.search(one.error.message) and not TIMEOUT.search(one.error.message)]
    echoes = [one for one in failed if one not in own]
    notes = tuple(f"Rank {one.rank} then failed with {_short(one)}: an echo, not the cause." for one in echoes)
    raised = [
        Cause(Kind.RAISED, f"rank {one.rank} raised {_short(one)}", (one.rank,), one.error.frame, error=one.error)
        for one in own or (() if causes else echoes[:1])
    ]
    if not own and not causes:
        notes = notes[1:]
    all_ = [*raised, *causes]
    return [replace(all_[0], notes=(*all_[0].notes, *notes)), *all_[1:]] if all_ else []


def _short(one: Failed) -> str:
    error = one.error
    return f"{error.type}: {first_line(error.message)}" if error.message else error.type


# What is shown -----------------------------------------------------------------------------------------------------


def describe(causes: Iterable[Cause], width: int | None = None) -> str:
    """In full, one part for each cause; `width` is as for `text.Evidence.shown`."""
    return "\n\n".join(_describe(cause, width) for cause in causes)


def _describe(cause: Cause, width: int | None) -> str:
    traceback = ""
    if cause.error is not None and not cause.rows:
        traceback = cause.error.traceback.rstrip() or (f"  {text.place(cause.frame)}" if cause.frame else "")
    headline = f"{text.TITLES[cause.kind]}{at(cause.frame)}: {cause.headline}"
    return text.explained(headline, cause.rows, (traceback, "\n".join(cause.notes)), width)


def to_json(causes: Sequence[Cause], found: Leftovers) -> dict[str, Any]:
    return {
        "causes": [
            {
                "verdict": text.TITLES[cause.kind],
                "headline": cause.headline,
                "ranks": list(cause.ranks),
                "at": located(cause.frame),
                "rows": [
                    {"rank": row.rank, "waits_in": row.what, "tensor": row.tensor, "at": located(row.frame), "differs": row.differs}
                    for row in cause.rows
                ],
                "notes": list(cause.notes),
            }
            for cause in causes
        ],
        "dumps": sorted(found.dumps),
        "stacks": sorted(found.stacks),
        "errors": sorted(found.errors),
        "missing": missing(found),
        "refused": found.refused,
    }  # fmt: skip
