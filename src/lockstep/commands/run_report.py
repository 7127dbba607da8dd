"""What a run has to say to programs and pages: `--json`, `--report`, and the annotations of GitHub Actions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from typing import Any

from .. import ranks
from ..ranks import cards, text
from ..ranks.report import Frame
from ..ranks.words import located


def to_json(run: ranks.Run, status: int, read_on: text.ReadOn) -> dict[str, Any]:
    """One object: `outcome` is `ok`, `replicas differ`, or the cause's kind; `lines` is what a terminal shows."""
    cause = run.cause
    said = [text.describe(run, read_on)] if cause else []
    said += [text.replicas(run)] if run.replicas else []
    return {
        "outcome": cause.kind.value if cause else "replicas differ" if status else "ok",
        "exit_status": status,
        "seconds": round(run.seconds, 3),
        "world_size": run.world_size,
        "hosts": list(run.hosts),
        "cause": {
            "headline": cause.headline,
            "ranks": list(cause.ranks),
            "echoes": list(cause.echoes),
            "at": located(cause.frame),
            "rows": [
                {"rank": row.rank, "waits_in": row.what, "tensor": row.tensor, "since": row.since, "node": row.node,
                 "at": located(row.frame), "differs": row.differs}
                for row in cause.rows
            ],
            "error": None if cause.error is None else {
                "type": cause.error.type, "message": cause.error.message, "traceback": cause.error.traceback},
            "notes": list(cause.notes),
        } if cause else None,
        "ranks": [
            {"rank": one.rank, "outcome": one.outcome.value, "code": one.code, "calls": len(one.collectives),
             "last_call": one.last_collective.title if one.last_collective else None,
             "at": located(one.stack.frame if one.stack else one.error.frame if one.error else None)}
            for one in run.members
        ],
        "lines": "\n".join(said).splitlines(),
    }  # fmt: skip


def page(run: ranks.Run, script: str, read_on: text.ReadOn) -> str:
    """The explanation as a page of its own."""
    count = len(run.members)
    parts = [f"<p>{escape(line)}</p>" for line in (text.replicas(run).splitlines() if run.replicas else ())]
    parts.append(cards.card(run, read_on) if run.cause else f"<p>{text.ended_well(run)}</p>")
    return cards.page(f"{script} on {count} {'rank' if count == 1 else 'ranks'}", cards.said("".join(parts)))


def workflow_commands(run: ranks.Run) -> Iterator[str]:
    """In GitHub Actions: what marks the line in the pull request that ended the run, or made replicas differ."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    if run.cause is not None:
        yield _annotation(run.cause.frame, text.TITLES[run.cause.kind], text.headline(run))
    found = run.replicas
    for one in (found.blowup, found.drift) if found is not None else ():
        if one is not None:
            yield _annotation(one.frame, "REPLICAS", text.replicas(run))


def _annotation(frame: Frame | None, title: str, message: str) -> str:
    where = {"title": title}
    if frame is not None and not frame.is_cell:
        root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
        inside = os.path.commonpath([os.path.abspath(root), os.path.abspath(frame.file)]) == os.path.abspath(root)
        where |= {"file": os.path.relpath(frame.file, root) if inside else frame.file, "line": str(frame.line)}
    given = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in where.items())
    return f"::error {given}::{_escaped(message)}"


def _escaped(value: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        value = value.replace(character, f"%{ord(character):02X}")
    return value
