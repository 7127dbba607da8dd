"""Why a run hangs: who is expected where, and where they are instead."""

from __future__ import annotations

import ast
import linecache
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .job import Job
from .mismatch import SAME_TENSORS, first_mismatch, odd_ones, say_mismatch
from .places import call, detail, exit_of, pending, rows, said_of, what
from .report import Cause, Collective, Frame, Kind, Outcome, RankReport, Topic
from .result import Run, latest
from .words import names, one_or_more

SAME_ORDER = "Ranks must call the same collectives in the same order."
PAIRS = "Every send needs its receive, and the other way round."
LEFT_ALONE = "Left alone this would have waited 30 minutes (gloo's default timeout)."
Finding = tuple[str, Sequence[int], Sequence[str]]
"""The headline, the ranks at fault, and what else to say."""


def hang(run: Run, job: Job) -> Cause:
    """The cause of a hang. Its ranks are those that differ from most: whom the others wait for."""
    members = latest(run.workers) if job.launcher else list(run.ranks)
    if job.launcher and run.ranks[0].outcome is Outcome.HUNG:  # The launcher is a rank too.
        members = latest([*run.workers, run.ranks[0]])
    waiting = [report for report in members if report.outcome is Outcome.HUNG]
    headline, at_fault, notes = _find(members, waiting)
    branch, line = _branch(waiting)
    said = [f"{note} {branch}" if branch and note == SAME_ORDER else note for note in notes]
    if any(report.stack and report.stack.threads for report in waiting):
        idle = names(report.rank for report in waiting if report.stack and report.stack.threads)
        said.append(f"A thread of {idle} might still have done something; it did not for {job.idle_limit:g} s.")
    if not any(detail(report).get("init_method") for report in waiting):
        said.append(LEFT_ALONE)
    table = rows(members, at_fault if len(at_fault) < len(members) else ())
    # The last call of a rank that has finished is not where it went wrong: its exit is, or where the others wait.
    frames = {report.rank: row.frame for report, row in zip(members, table, strict=True) if report in waiting}
    frames |= {report.rank: exit_of(report) for report in members if report not in waiting}
    frame = next((frames[rank] for rank in at_fault if frames.get(rank)), None)
    frame = frame or next((found for found in frames.values() if found), None)
    return Cause(Kind.HANG, headline, tuple(at_fault), frame, table, tuple(said), topic=Topic.HANGS, branch=line)


def _find(members: list[RankReport], waiting: list[RankReport]) -> Finding:
    in_init = [report for report in waiting if call(report) == "init_process_group"]
    if in_init:
        return _rendezvous(members, in_init)
    operations = {report.rank: pending(report) for report in waiting}
    finished = [report for report in members if report.outcome is not Outcome.HUNG]
    if any(operation and operation.is_point_to_point for operation in operations.values()):
        return _point_to_point(waiting, finished, operations)
    mismatch = first_mismatch(members)
    earlier: list[str] = []
    if mismatch is not None and len({collective.kind for collective in mismatch.values()}) == 1:
        if any(operation in mismatch.values() for operation in operations.values()):
            return f"{say_mismatch(mismatch)}.", odd_ones(mismatch), [SAME_TENSORS]
        earlier = [f"Before that, {say_mismatch(mismatch)}, which gloo does not notice."]
    headline, at_fault, notes = _collectives(members, waiting, finished, operations)
    return headline, at_fault, [*notes, *earlier]


def _collectives(
    members: list[RankReport],
    waiting: list[RankReport],
    finished: list[RankReport],
    operations: dict[int, Collective | None],
) -> Finding:
    expected, there, group = _expected(waiting, operations)
    concerned = [report for report in members if not group or report.rank in group]
    absent = [report.rank for report in waiting if report.rank not in there and report in concerned]
    gone = [report for report in finished if report in concerned]
    who = names(there)
    waits = one_or_more(there, "waits", "wait")
    if gone:
        ranks = [report.rank for report in gone]
        last = gone[0].last_collective
        after = f" after {last.title}" if last else " without a single collective"
        have = one_or_more(gone, "it has finished", "they have finished")
        also = ""
        if absent:
            elsewhere = next(report for report in waiting if report.rank in absent)
            also = f" {names(absent).capitalize()} {one_or_more(absent, 'waits', 'wait')} in {what(elsewhere)}."
        return (
            f"{who} {waits} in {expected}, which {names(ranks)} never called: {have}{after}.{also}",
            ranks,
            [SAME_ORDER, *_counts(members)],
        )
    if len(absent) == 1 and len(waiting) == 2:
        other = next(report for report in waiting if report.rank in absent)
        return (
            f"{who} waits in {expected}, rank {other.rank} in {what(other)}: they wait for each other.",
            [*absent, *there],  # who of the two is wrong, nobody but their author knows
            [SAME_ORDER],
        )
    if absent:
        elsewhere = next(report for report in waiting if report.rank in absent)
        return (
            f"{names(absent)} never joined {expected}: {one_or_more(absent, 'it waits', 'they wait')} in "
            f"{what(elsewhere)}.",
            absent,
            [SAME_ORDER],
        )
    return f"all ranks wait in {expected}, and nothing can complete it.", [], []


def _rendezvous(members: list[RankReport], in_init: list[RankReport]) -> Finding:
    here = names(report.rank for report in in_init)
    waits = one_or_more(in_init, "waits", "wait")
    sizes = {report.rank: detail(report).get("world_size") for report in in_init}
    odd = {rank: size for rank, size in sizes.items() if isinstance(size, int) and size > 0 and size != len(members)}
    if odd:
        size = next(iter(odd.values()))
        return (
            f"{names(odd)} {one_or_more(odd, 'waits', 'wait')} in init_process_group for a group of {size}, but there "
            f"{one_or_more(members, 'is', 'are')} {len(members)}.",
            list(odd),
            [f"world_size={size} was given; the launcher started {len(members)}."],
        )
    given = {report.rank: detail(report).get("rank") for report in in_init}
    twice = [number for number, count in Counter(given.values()).items() if count > 1 and _is_rank(number)]
    if twice:
        same = [rank for rank, number in given.items() if number == twice[0]]
        return (
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
        return (
            f"{names(absent)} {did} init_process_group; {here} {waits} there.",
            absent,
            [*notes, "init_process_group returns when all ranks of the group have come."],
        )
    elsewhere = [report for report in in_init if _moved(report)]
    if elsewhere:
        now, launchers = detail(elsewhere[0])["address"], detail(elsewhere[0])["launchers_address"]
        return (
            f"{names(report.rank for report in elsewhere)} {one_or_more(elsewhere, 'waits', 'wait')} in init_process_group "
            f"for a store at {now}, where nobody listens: the launcher had set {launchers}.",
            [report.rank for report in elsewhere],
            ["MASTER_ADDR and MASTER_PORT belong to the launcher: read them, never write them."],
        )
    return (
        "all ranks wait in init_process_group, and nobody completes the group.",
        [],
        notes or ["Do MASTER_ADDR and MASTER_PORT still say what the launcher set?"],
    )


def _moved(report: RankReport) -> bool:
    """True when the rank goes to another address than the one that its launcher had set."""
    launchers = str(detail(report).get("launchers_address") or ":")
    return launchers != ":" and detail(report).get("address") != launchers


def _is_rank(number: object) -> bool:
    return isinstance(number, int) and number >= 0


def _point_to_point(
    waiting: list[RankReport], finished: list[RankReport], operations: dict[int, Collective | None]
) -> Finding:
    sentences: list[tuple[int, Collective, str]] = []
    for report in waiting:
        operation = operations[report.rank]
        if operation is None or not operation.is_point_to_point:
            continue
        direction = "to receive from" if operation.kind == "recv" else "to send to"
        peer = "any rank" if operation.peer is None or operation.peer < 0 else f"rank {operation.peer}"
        sentences.append((report.rank, operation, f"rank {report.rank} waits {direction} {peer}"))
    first_rank, first, text = sentences[0]
    for report in finished:
        expecting = [rank for rank, operation, _ in sentences if operation.peer == report.rank]
        if expecting:
            said = next(sentence for rank, _, sentence in sentences if rank == expecting[0])
            return f"{said}, which has finished.", [report.rank], [PAIRS]
    if len(sentences) > 1:
        receiving = all(operation.kind == "recv" for _, operation, _ in sentences)
        note = "All of them wait to receive, so nobody sends." if receiving else "Each waits for the other."
        return "; ".join(said for _, _, said in sentences) + ".", [rank for rank, _, _ in sentences], [note]
    other = next((report for report in waiting if report.rank == first.peer), None)
    where = f", which waits in {what(other)}" if other is not None else ""
    return f"{text}{where}.", [first.peer if other is not None and first.peer is not None else first_rank], [PAIRS]


def _expected(
    waiting: list[RankReport], operations: dict[int, Collective | None]
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
    return (said_of(operation, call(first)) if operation else what(first)), there, group


def _counts(members: list[RankReport]) -> list[str]:
    numbers = {report.rank: sum(not one.is_point_to_point for one in report.collectives) for report in members}
    if len(set(numbers.values())) == 1:
        return []
    return ["Collectives begun: " + ", ".join(f"rank {rank}: {number}" for rank, number in numbers.items()) + "."]


LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def _skipped(tree: ast.Module, frames: dict[int, Frame]) -> tuple[ast.If, list[int]] | None:
    """A branch that leaves the rest of its block, such as `if rank == 1: continue`, and the ranks that took it.

    Whether a rank took it cannot be seen from where it is now. So only a condition on the rank counts, and only when
    the ranks for which it holds are those that are not in the rest.
    """
    for node in ast.walk(tree):
        blocks: list[Any] = [getattr(node, "body", None), getattr(node, "orelse", None)]
        for block in blocks:
            for number, one in enumerate(block if isinstance(block, list) else []):
                if not (isinstance(one, ast.If) and isinstance(one.body[-1], LEAVES) and not one.orelse):
                    continue
                after = block[number + 1 :]
                end = (after[-1].end_lineno or after[-1].lineno) if after else 0
                left = [rank for rank, frame in frames.items() if not (one.lineno < frame.line <= end)]
                if 0 < len(left) < len(frames) and left == [rank for rank in frames if _holds(one.test, rank)]:
                    return one, left
    return None


def _holds(test: ast.expr, rank: int) -> bool | None:
    """Whether a condition such as `rank == 1` or `dist.get_rank() > 0` holds on this rank; None for any other."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(test.operand, rank)
        return None if inner is None else not inner
    if ast.unparse(test) in ("rank", "dist.get_rank()"):
        return rank != 0
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and _holds(test.left, rank) is not None):
        return None
    number, compare = test.comparators[0], COMPARE.get(type(test.ops[0]))
    if compare is None or not (isinstance(number, ast.Constant) and isinstance(number.value, int)):
        return None
    return compare(rank, number.value)


def _branch(waiting: list[RankReport]) -> tuple[str, int | None]:
    """Name the statement that some ranks are inside of and others are not, when one separates their lines; its line."""
    frames = {report.rank: report.stack.frame for report in waiting if report.stack and report.stack.frame}
    files = {frame.file for frame in frames.values()}
    if len(files) != 1 or len({frame.line for frame in frames.values()}) < 2:
        return "", None
    try:
        tree = ast.parse("".join(linecache.getlines(files.pop())))
    except SyntaxError:
        return "", None
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    homes = {
        max((f.lineno for f in functions if f.lineno <= frame.line <= (f.end_lineno or f.lineno)), default=0)
        for frame in frames.values()
    }
    if len(homes) > 1:  # one may have been called from within the block that another stands in
        return "", None
    best: ast.If | ast.For | ast.While | ast.Try | None = None
    inside: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.For, ast.While, ast.Try)) and (best is None or node.lineno > best.lineno):
            end = node.body[-1].end_lineno or node.lineno
            within = [rank for rank, frame in frames.items() if node.body[0].lineno <= frame.line <= end]
            if within and len(within) < len(frames):
                best, inside = node, within
    best, inside = _skipped(tree, frames) or (best, inside)
    if best is None:
        return "", None
    outside = [rank for rank in frames if rank not in inside]
    if isinstance(best, ast.If):
        said = f"{names(inside).capitalize()} took the branch at line {best.lineno}; {names(outside)} did not."
        return said, best.lineno
    said = f"{names(inside).capitalize()} {one_or_more(inside, 'is', 'are')} inside the block at line {best.lineno}; "
    return said + f"{names(outside)} {one_or_more(outside, 'is', 'are')} not.", best.lineno
