"""A run's cause as plain text: the same words wherever it is shown, as wide as there is room."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .crossed import first_crossed, over_a_set
from .hangs import SAME_ORDER, groups_apart, met_by_join
from .mismatch import kinds_of, mismatch_rows, odd_ones, rules, say_mismatch, two_sides
from .report import OWN_CODE, Blowup, Cause, Frame, Kind, Topic, Waiting
from .result import Run
from .words import MANY, at, names, spans

MOST_LINES = 14  # of code
REACH = 3  # lines beyond the first and the last, to a "# BUG"
WIDTH = 96
CODE_WIDTH = 40
RANKS_WIDTH = 30
COLUMNS = ("rank", "waits in", "tensor", "for", "node", "at", "")  # What is above the cells of a `Row`
CALLED, ENDED = "call", "ended"  # ... of ranks of which none waits
GAP = "   "
ODD = " ←"  # Behind the number of a rank that differs from the others
TITLES = {kind: kind.value.upper() for kind in Kind} | {
    Kind.RAISED: "ERROR",
    Kind.EXITED: "ENDED EARLY",
    Kind.CRASHED: "CRASH",
    Kind.TIMED_OUT: "NO END",
}

TABLED = (Kind.HANG, Kind.MISMATCH)  # Their table says all of the headline
UNEVEN = {"all_gather", "reduce_scatter"}  # Collectives for which NCCL allows each rank a size of its own

ReadOn = Mapping[Topic | None, str]  # Where a reader finds more about a topic
NOWHERE: ReadOn = MappingProxyType({})


@dataclass(frozen=True)
class Row:
    """A row of a table as it is shown: a rank, or `ranks` that wait in the same call at the same place; `code` is the line
    there. For `waits`, `differs` and `called`, see `Waiting`.
    """

    ranks: str
    what: str
    tensor: str = ""
    seconds: str = ""
    node: str = ""
    at: str = ""
    code: str = ""
    waits: bool = field(default=True, kw_only=True)
    differs: bool = field(default=False, kw_only=True)
    called: bool = field(default=False, kw_only=True)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.ranks, self.what, self.tensor, self.seconds, self.node, self.at, self.code

    def mapped(self, function: Callable[[str], str]) -> Row:
        """The same with each cell as `function` has it."""
        return Row(*map(function, self.cells), waits=self.waits, differs=self.differs, called=self.called)


@dataclass(frozen=True)
class CodeLine:
    """A line of the code where ranks stand. `note` says which do, or that they part here (`branch`)."""

    number: int
    source: str
    note: str = ""
    branch: bool = field(default=False, kw_only=True)
    differs: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Evidence:
    """What stands under a headline: the ranks' table, and other text. `code` is drawn where there is place for it: as
    text, the table has the lines.
    """

    rows: tuple[Row, ...] = ()
    text: str = ""
    code: tuple[CodeLine, ...] = ()

    def mapped(self, text: Callable[[str], str], cell: Callable[[str], str]) -> Evidence:
        """The same with its text as `text` has it, and each cell and line of code as `cell` has it."""
        code = tuple(replace(line, source=cell(line.source)) for line in self.code)
        return Evidence(tuple(row.mapped(cell) for row in self.rows), text(self.text), code)

    def shown(self, width: int | None = None) -> str:
        """As text. With a `width`, no line is longer, and a table that does not fit becomes a few lines for each rank."""
        return "\n\n".join(filter(None, (table(self.rows, width), fit(self.text, width))))


def describe(run: Run, read_on: ReadOn = NOWHERE, width: int | None = None) -> str:
    """Why the run did not end well, in full: headline, the ranks' table or traceback, notes. Empty when it did.

    `width` is as for `Evidence.shown`.
    """
    if run.cause is None:
        return ""
    sentences = min(width or WIDTH, WIDTH)
    parts = [_wrapped(headline(run), sentences), evidence(run, read_on, sentences).shown(width)]
    return "\n\n".join(filter(None, parts))


def evidence(run: Run, read_on: ReadOn = NOWHERE, width: int = WIDTH, *, own: bool = False) -> Evidence:
    """What stands under the headline: the ranks' table or traceback, and the notes. Beside a table, with `own`, only those
    that are about this run: who shows it has said the rules.
    """
    if run.cause is None:
        return Evidence()
    parts = []
    if run.cause.error is not None and run.cause.error.traceback:
        parts.append(run.cause.error.traceback.rstrip())
    elif run.cause.frame is not None and not run.cause.rows:
        parts.append(f"  {place(run.cause.frame)}")
    closing = list(run.cause.own if own and run.cause.rows and run.cause.kind in TABLED else run.cause.notes)
    if run.cause.topic in read_on:
        closing.append(f"Read: {read_on[run.cause.topic]}")
    if closing:
        parts.append("\n".join(_wrapped(line, width) for line in closing))
    return Evidence(rows(run.cause.rows), "\n\n".join(parts), code_around(run.cause))


def code_around(cause: Cause) -> tuple[CodeLine, ...]:
    """The lines where the ranks of a hang stand, with the branch that parted them; none if they are in several files."""
    standing = [row for row in cause.rows if not _has_finished(row)]  # the frame of others is a last call
    frames = [(row, row.frame) for row in standing if row.frame is not None]
    if not frames or len({frame.file for _, frame in frames}) > 1:
        return ()
    file = frames[0][1].file
    at: dict[int, list[int]] = {}
    for row, frame in frames:
        at.setdefault(frame.line, []).append(row.rank)
    odd = {frame.line for row, frame in frames if row.differs}
    cited = {frame.line for frame in cause.cited if frame.file == file}
    parted = cause.branch or cause.may_part
    branch = {parted, parted + 1} if parted else set()  # and what it does
    known = sorted({*at, *cited, *branch})
    near = {number for line in known for number in range(line - 1 - REACH, line + 2 + REACH)}
    named = {number for number in near if "# BUG" in linecache.getline(file, number)}
    first, last = min({max(1, known[0] - 1), *named}), max({known[-1] + 1, *named})
    # too far apart: only the lines themselves, with a gap between them
    wanted: Sequence[int] = range(first, last + 1) if last - first < MOST_LINES else sorted({*known, *named})
    shown = []
    for number in wanted:
        source = linecache.getline(file, number).rstrip()
        if source or number not in (first, last):
            part = number == parted
            here = "the ranks part here" if cause.branch else "ranks may part here"
            note = f"← {names(at[number])}" if number in at else here if part else ""
            shown.append(CodeLine(number, source, note, branch=part, differs=number in odd))
    return tuple(shown)


def explained(headline: str, waiting: Sequence[Waiting], more: Iterable[str], width: int | None = None) -> str:
    """A headline, the ranks' table and `more` paragraphs; `width` is as for `Evidence.shown`."""
    found = Evidence(rows(waiting), "\n\n".join(filter(None, more)))
    return "\n\n".join(filter(None, (fit(headline, width), found.shown(width))))


def ended_well(run: Run, whole: float | None = None) -> str:
    """`All 4 ranks ended well.`, and how long they ran; of `whole` seconds from the command on, also how long they took to
    start.
    """
    count, ran = len(run.members), run.seconds
    who = "The rank" if count == 1 else "Both ranks" if count == 2 else f"All {count} ranks"
    said = f"{who} ended well"
    if whole is None:
        return f"{said}, {ran:.1f} s after the start of the script."
    return f"{said} after {whole:.1f} s: {max(0.0, whole - ran):.1f} s to load torch, {ran:.1f} s in the script."


def headline(run: Run) -> str:
    """The first line, which is enough for the one who knows."""
    cause = run.cause
    assert cause is not None
    after = f" after {run.seconds:.1f} s" if cause.kind in (Kind.HANG, Kind.TIMED_OUT) else ""
    after += f" at {cause.frame.short}" if cause.frame else ""
    if cause.kind is Kind.INTERRUPTED:
        return cause.headline[0].upper() + cause.headline[1:]
    return f"{TITLES[cause.kind]}{after}: {cause.headline}"


def silent_mismatch(run: Run, width: int | None = None) -> str:
    """Of a run that ended well, though ranks met in one collective with different things; mostly nothing.

    `width` is as for `Evidence.shown`.
    """
    return mixed_text(found, width) if (found := mixed_up(run)) is not None else ""


def mixed_text(found: Cause, width: int | None = None) -> str:
    """What `mixed_up` has found, as text."""
    sentences = min(width or WIDTH, WIDTH)
    notes = [_wrapped(one, sentences) for one in found.notes]
    return explained(_wrapped(found.headline, sentences), found.rows, notes, width)


def mixed_up(run: Run) -> Cause | None:
    """What `silent_mismatch` says, as the cause of a run that did not end well."""
    met, apart = run.silent_mismatch, groups_apart(run.ranks) or met_by_join(run.ranks)
    if apart is not None:
        frame = next((frame for frame in apart.where.values() if frame), None)
        said = f"MIXED UP{at(frame)}: {apart.headline} No rank failed, by luck."
        return Cause(Kind.MISMATCH, said, frame=frame, notes=tuple(apart.notes))
    if not met or any(call.failed for call in met.values()):  # an error has told the code
        return _crossed(run)
    if run.device != "cpu" and kinds_of(met) <= UNEVEN:
        return None
    said = f"MIXED UP{at(two_sides(met)[0].frame)}: {say_mismatch(met)}. No rank failed, but trust nothing that they got from it."
    return Cause(Kind.MISMATCH, said, rows=mismatch_rows(met, odd_ones(met)), notes=("\n".join(rules(met)),))


def _crossed(run: Run) -> Cause | None:
    """Of a run in which ranks made two calls that look alike in opposite order."""
    found = first_crossed(run.members)
    if found is None:
        return _over_a_set(run)
    frame = found.places[min(found.places)]
    said = f"MIXED UP{at(frame)}: {found.say()}"
    more = f"{SAME_ORDER} {found.why(run.world_size)}".rstrip()
    table = tuple(replace(row, frame=found.places[row.rank]) for row in mismatch_rows(found.met, []))
    return Cause(Kind.MISMATCH, said, rows=table, notes=(more,))


def _over_a_set(run: Run) -> Cause | None:
    """Of a run that is right only because its ranks, which are forked from one process, have the same hash seed."""
    found = over_a_set(run.ranks) if run.world_size > 1 and not os.environ.get("PYTHONHASHSEED", "").isdigit() else None
    if found is None:
        return None
    call, through, said = found
    return Cause(
        Kind.MISMATCH,
        f"MIXED UP under torchrun{at(call.frame)}: Python loops over a set of strings in a different order in each "
        f"process. Ranks that Lockstep starts have the same order, so this run was right. Under torchrun, `{said}` would combine what "
        "doesn't belong together.",
        frame=call.frame,
        notes=(f"Loop over `sorted({through})`.",),
    )


def replicas(run: Run, width: int = WIDTH) -> str:
    """What watching the replicas found: a line when all was well, the first step that differed when not."""
    found = run.replicas
    if found is None:
        return "No optimizer took a step, so there were no replicas to compare."
    steps = "every step" if found.compared > 1 else "the only step"
    said = [f"Replicas: equal bit for bit after {steps} that all ranks took ({found.compared})."]
    if found.drift is not None:
        drift = found.drift
        when = f"at step {drift.step}" if drift.step else "before the first step"
        amount = f" (by {drift.amount:.2g} or more)" if drift.amount else ""
        others = [rank for rank in range(run.world_size) if rank not in drift.ranks]
        where = (
            f"on {names(drift.ranks)} differs from that of {names(others)}" if others else "is different on every rank"
        )
        at = f" ({drift.frame.short})" if drift.frame else ""
        said = [f"DRIFT {when}{at}: {drift.tensor} {where}{amount}: {drift.reason}."]
        if drift.tensors > 1:
            said.append(f"{drift.tensors} of {drift.of} parameters differed then.")
    elif found.blowup is None and found.same_work and found.same_work == found.compared:
        said = [f"SAME WORK: at all {found.compared} steps every rank gave DDP the same gradients. All ranks train on the "
                "same samples, so together they do the work of one."]  # fmt: skip
    if found.blowup is not None:
        said = [*_blowup(run, found.blowup), *([] if found.drift is None else said)]
    if found.statistics and found.drift is None:
        said.append(f"{', '.join(found.statistics[:3])} differed between ranks: each rank updates its running statistics "
                    "from its own batches, and DDP copies rank 0's to all ranks before the next forward.")  # fmt: skip
    if len(set(found.steps)) > 1:
        taken = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(found.steps))
        said.append(f"The ranks took different numbers of steps: {taken}.")
    return "\n".join(_wrapped(line, width) for line in said)


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
            f"Its gradient held {found.gradient}, though every rank's own gradient was finite before DDP averaged them."
        )
    elif len(found.brought) == run.world_size:
        said.append(f"Its gradient held {found.gradient} on every rank before DDP averaged them.")
    else:
        said.append(
            f"Its gradient held {found.gradient} only on {names(found.brought)}; DDP's average spread it to every rank."
        )
    return said


def rows(waiting: Sequence[Waiting]) -> tuple[Row, ...]:
    """The table's rows. Of more than `MANY` ranks, those that differ only in rank and seconds have one together."""
    together: dict[Waiting, list[Waiting]] = {}
    for one in waiting:
        together.setdefault(replace(one, rank=0, since=None) if len(waiting) > MANY else one, []).append(one)
    return tuple(_row(first, same) for first, same in together.items())


def _row(first: Waiting, same: Sequence[Waiting]) -> Row:
    at, code = (first.frame.short, _code(first.frame)) if first.frame else ("", "")
    cells = ranks_of(same), first.what, first.tensor, waited(same), first.node, at, code
    return Row(*cells, waits=first.waits, differs=first.differs, called=first.called)


def ranks_of(rows: Sequence[Waiting]) -> str:
    """`3`, or `0–6, 8–119`, or `60 ranks` if that would be too wide."""
    listed = ", ".join(spans(row.rank for row in rows))
    return listed if len(listed) <= RANKS_WIDTH else f"{len(rows)} ranks"


def waited(rows: Sequence[Waiting]) -> str:
    """How long these ranks have waited: `0.8 s`, or `0.7–0.9 s`; empty when it isn't known."""
    seconds = [f"{one:.1f}" for one in sorted(row.since for row in rows if row.since is not None)]
    return "–".join(dict.fromkeys([seconds[0], seconds[-1]])) + " s" if seconds else ""


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """One line a row: ranks, what they wait in, with what tensor, for how long, and where. An arrow marks the odd one.

    `width` is as for `Evidence.shown`.
    """
    if not rows:
        return ""
    cells = [heads(rows), *((row.ranks + ODD * row.differs, *row.cells[1:]) for row in rows)]
    columns = [column for n, column in enumerate(zip(*cells, strict=True)) if n < 2 or any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  " + GAP.join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]
    if width and max(map(len, lines)) > width:
        lines = [line for row in _alike(rows) for line in _stacked(row, width)]
    return "\n".join(lines)


def heads(rows: Sequence[Row]) -> tuple[str, ...]:
    """What is above the cells of these rows."""
    if any(row.waits for row in rows):
        doing = "is in" if any(is_in_its_own_code(row) for row in rows) else COLUMNS[1]
        return COLUMNS[0], f"{doing}, or ended" if any(map(_has_finished, rows)) else doing, *COLUMNS[2:]
    return COLUMNS[0], CALLED if all(row.called for row in rows) else ENDED, *COLUMNS[2:]


def _has_finished(row: Row | Waiting) -> bool:
    return row.what.startswith("finished")


def is_in_its_own_code(row: Row) -> bool:
    """Whether these ranks wait in no call of PyTorch's."""
    return row.what.startswith(OWN_CODE)


def fit(text: str, width: int | None) -> str:
    """The same text without a line that is longer than `width`, unless one word is.

    Indented lines go on indented. A sentence that was broken for a wider place is joined before it is broken again.
    """
    if width is None:
        return text
    lines: list[str] = []
    source = text.splitlines()
    while source:
        line = last = source.pop(0)
        margin = line[: len(line) - len(line.lstrip())]
        while source and _goes_on(last, source[0], width):
            last = source.pop(0)
            line += " " + last.strip()
        if len(line) <= width:
            lines.append(line)
            continue
        lines += _broken(line, width, margin + "    " if margin else "")
        if source and re.fullmatch(r"\s*[~^]+\s*", source[0]):  # a traceback's marks, which point at nothing now
            source.pop(0)
    return "\n".join(lines)


def _goes_on(line: str, following: str, width: int) -> bool:
    """True when a sentence was broken behind this line, which was as full as the usual width allows."""
    margin = len(line) - len(line.lstrip())
    same = following[: len(following) - len(following.lstrip())] == " " * margin
    word = following.split()[0] if following.strip() else ""
    full = WIDTH + margin - len(word) - 1 < len(line)
    return width < WIDTH + margin and bool(word) and same and full


def _alike(rows: Sequence[Row]) -> list[Row]:
    """One row for all ranks that differ only in how long they have waited."""
    same: dict[Row, list[Row]] = {}
    for row in rows:
        same.setdefault(replace(row, ranks="", seconds=""), []).append(row)
    merged = []
    for row, ones in same.items():
        seconds = sorted(
            {second for one in ones for second in one.seconds.removesuffix(" s").split("–")} - {""}, key=float
        )
        since = "–".join(dict.fromkeys([seconds[0], seconds[-1]])) + " s" if seconds else ""
        counted = len(ones) == 1 or any("ranks" in one.ranks for one in ones)
        merged += ones if counted else [replace(row, ranks=", ".join(one.ranks for one in ones), seconds=since)]
    return merged


def _stacked(row: Row, width: int) -> list[str]:
    """A row of a table that is too wide: a line, and below it what does not fit beside it."""
    alone, counted = row.ranks.isdigit(), "ranks" in row.ranks
    who = f"{'rank ' if alone else '' if counted else 'ranks '}{row.ranks}{ODD * row.differs}"
    waits = "" if not row.waits else "in " if is_in_its_own_code(row) else "waits in " if alone else "wait in "
    beside = (row.tensor, f"for {row.seconds}" if row.seconds else "", f"node {row.node}" if row.node else "")
    below = (" · ".join(filter(None, beside)), GAP.join(filter(None, (row.at, row.code))))
    lines = _broken(f"  {who}  {waits}{row.what}", width, " " * 6)
    return lines + [line for one in filter(None, below) for line in _broken(f"      {one}", width, " " * 10)]


def _broken(line: str, width: int, margin: str) -> list[str]:
    return textwrap.wrap(
        line.strip(), width, initial_indent=line[: len(line) - len(line.lstrip())], subsequent_indent=margin,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def place(frame: Frame) -> str:
    """`cell line 6   dist.all_reduce(t)`."""
    return f"{frame.short}   {frame.text}".rstrip()


def _code(frame: Frame) -> str:
    """The source line without its comment, cut where a narrow window would wrap it."""
    text = frame.text.split("  #")[0].rstrip()
    return text if len(text) <= CODE_WIDTH else text[: CODE_WIDTH - 1] + "…"


def _wrapped(text: str, width: int) -> str:
    """A sentence over several lines; lines that were broken already (a traceback) stay."""
    return "\n".join(
        textwrap.fill(line, width, break_on_hyphens=False) if len(line) > width else line for line in text.splitlines()
    )
