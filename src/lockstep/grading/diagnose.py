"""From a run that ended badly to a diagnosis, for any exercise: what an exercise's own reading leaves over."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .. import ranks
from ..course import leaf
from ..ranks import Kind, text
from ..ranks.mismatch import SAME_ROOT
from ..ranks.words import names, one_or_more, wait
from .submission import Submission
from .verdict import UNWRITTEN, nothing_written

IDS = {
    Kind.HANG: "hang",
    Kind.MISMATCH: "mismatched-collectives",
    Kind.EXITED: "exited-early",
    Kind.CRASHED: "crashed",
    Kind.TIMED_OUT: "timed-out",
    Kind.OUT_OF_MEMORY: "out-of-memory",
    Kind.TOO_MUCH_OUTPUT: "too-much-output",
    Kind.INTERRUPTED: "broke-the-run",  # by a signal of its own: a person who interrupts a grading ends it
    Kind.TOO_MANY_PROCESSES: "too-many-processes",
}
JOINS_OUTSIDE = r"^(?!def |from |import )\S.*\b(init_process_group|setup_ddp)\( || \binit_process_group\("
NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")


@dataclass(frozen=True)
class Finding:
    """A diagnosis's id, what was seen, and its place: a frame, or patterns to look for (`Submission.line`)."""

    id: str
    message: str
    at: ranks.Frame | str | None
    evidence: text.Evidence = field(default_factory=text.Evidence)


def sentence(headline: str, more: str = "") -> str:
    """The headline with a capital letter; if `more` follows, with one full stop between them."""
    told = headline[:1].upper() + headline[1:]
    return f"{told.rstrip('.')}. {more}" if more else told


def general(submission: Submission, run: ranks.Run) -> Finding:
    """What the run's cause says, with its place in the submission and the evidence."""
    cause = run.cause
    assert cause is not None
    message = sentence(submission.to_original(cause.headline))
    id = IDS.get(cause.kind, "raised")
    if cause.error is not None and cause.kind is Kind.RAISED:
        if cause.error.type == "GroupOnImport":
            message = f"Importing {submission.shown} joined a process group: this runs outside of any function."
            return Finding("group-on-import", message, JOINS_OUTSIDE)
        id, message = _read_error(submission, cause.error, message)
    frame = _innermost(cause, str(submission.file))
    proof = text.Evidence() if id in (UNWRITTEN, "syntax-error") else evidence(run)  # the line says all
    return Finding(id, _left_behind(cause) or message, frame, proof)


def evidence(run: ranks.Run, of: Iterable[int] | None = None) -> text.Evidence:
    """The ranks' table or traceback, and what is known of this run alone; the rules are in the diagnosis's `why`.

    Each note is a line: who shows it breaks it. Marked, in table and code, are the ranks `of` which a check knows that
    they are at fault, or those of the run's cause.
    """
    if of is not None and run.cause is not None:
        at_fault = set(of)
        rows = tuple(replace(row, differs=row.rank in at_fault) for row in run.cause.rows)
        run = replace(run, cause=replace(run.cause, rows=rows))
    return text.evidence(run, width=sys.maxsize, own=True)


def ending(cause: ranks.Cause) -> str:
    """How the run ended, as a sentence to stand after another; empty if the evidence has a table that says it."""
    in_table = cause.kind in text.TABLED and len({(row.what, row.tensor) for row in cause.rows}) > 1
    if in_table and SAME_ROOT not in cause.notes:  # the table has no roots
        return ""
    return f" {sentence(cause.headline).rstrip('.')}."


def _read_error(submission: Submission, error: ranks.Error, message: str) -> tuple[str, str]:
    name, shown = submission.name, submission.shown
    if error.type == "NotImplementedError":  # torch raises it too, but a stub's message begins with its name
        stub, _, todo = error.message.partition(": ")
        if stub in ("", name, leaf(name)):
            return UNWRITTEN, nothing_written(todo)
        if todo and stub.isidentifier() and (submission.folder / f"{stub}.py").is_file():
            return UNWRITTEN, f"{name} uses {stub}, where nothing is written yet.\nTo do there: {todo}."
    if error.type in NOT_PYTHON:
        return "syntax-error", f"Python cannot read {shown}: {error.message}"
    if error.type in ("ImportError", "ModuleNotFoundError"):
        return "import-error", f"{shown} cannot be imported: {error}"
    missing = re.search(r"module '\w+' has no attribute '(\w+)'", error.message)
    if missing and not error.frames:
        why = "" if submission.text.strip() else ": the file is empty"
        return "import-error", f"{shown} does not define {missing.group(1)}{why}"
    signature = re.search(r"^(\w+)\(\) (missing|takes|got)", error.message)
    if error.type == "TypeError" and signature and not error.frames:
        return "wrong-signature", f"{error.message}: keep the stub's signature"
    return "raised", message


def _left_behind(cause: ranks.Cause) -> str:
    """The first line for a hang in which some ranks wait in the submission and all others have left it. The collective
    in which those others wait is the check's own and means nothing to a learner. Empty for any other end.
    """
    inside = [row for row in cause.rows if row.differs]
    out = [row for row in cause.rows if not row.differs]
    if cause.kind is not Kind.HANG or not inside or not out:
        return ""
    if any(row.frame for row in out) or not all(row.frame for row in inside):
        return ""
    return (
        f"{wait(row.rank for row in inside).capitalize()} in {inside[0].what}, "
        f"where nobody else comes: {names(row.rank for row in out)} {one_or_more(out, 'has', 'have')} left your code."
    )


def _innermost(cause: ranks.Cause, file: str) -> ranks.Frame | None:
    """The innermost frame that lies in the submission itself."""
    raised = list(reversed(cause.error.frames)) if cause.error else []
    others = [cause.frame, *(row.frame for row in cause.rows)]
    return next((frame for frame in (*raised, *others) if frame is not None and frame.file == file), None)
