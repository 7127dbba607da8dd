"""Chapter 4's table: one row for each measured step. And the peak memory and the operations of a step.

Times differ in every run, so the picture is marked as measured and comparisons of outputs ignore it
(`nbval_sanitize.cfg`). Memory depends on when the interpreter frees it. So the table's text has only bytes sent and
all-reduces.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from html import escape
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.notebook.bars import COLOURS, legend
from lockstep.ranks import Run
from lockstep.ranks.cards import said
from lockstep.ranks.report import RankReport

CHANGE = "vs. first"
UNITS = {"tokens/s": "", CHANGE: "", "step": "ms", "exposed": "ms", "MFU": "", "sent": "MB", "memory": "MB"}
"""The columns, and what their numbers count."""
PARTS = {"alone": "computing", "exposed": "exposed communication"}  # Of a row, and how they are called
LEAD = 1.05  # A smaller one may be another row's in the next run


class StepTable:
    """The rows so far. As a cell's value: a picture with all columns, and a text without times."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self.peak = 0.0
        """Operations in a second: the most that a rank of the first row has measured. All rows are compared with it."""

    def add(self, name: str, run: Run | None) -> StepTable:
        """Add what `measure` reported on rank 0. `None`, from a machine without a slow link, adds nothing."""
        if run is None:
            print("not measured: this machine has no link to slow down")
            return self
        seen = run.observed("measured")[0]
        ranks = len(run.ranks)
        sent = sum(call.nbytes for call in _calls(run))
        operations = 6 * seen["parameters"] * seen["tokens"] / seen["step"]
        self.peak = self.peak or max(one["peak"] for one in run.observed("measured"))
        self.rows[name] = {
            "tokens/s": ranks * seen["tokens"] / seen["step"],
            "MFU": operations / self.peak,
            "memory": seen["memory"] / 1e6,
            "sent": sent / 1e6,
            "step": seen["step"] * 1e3,
            "exposed": (seen["step"] - seen["alone"]) * 1e3,
            "alone": seen["alone"] * 1e3,
            "calls": len(_calls(run)),
            "tokens": seen["tokens"],
        }
        return self

    def __repr__(self) -> str:
        lines = [f"{'':31}{'sent a step':>13}  all-reduces"]
        for name, row in self.rows.items():
            lines.append(f"{name:31}{row['sent']:10.1f} MB{row['calls']:13}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        columns = [name for name in UNITS if name != CHANGE or len(self.rows) > 1]
        head = "<td></td>" + "".join(f'<th scope="col">{column}</th>' for column in columns)
        speeds = {name: row["tokens/s"] for name, row in self.rows.items()}
        second, first = sorted([0.0, *speeds.values()])[-2:]
        slowest = min(speeds.values(), default=0.0)
        lines = []
        for number, (name, row) in enumerate(self.rows.items()):
            row = row | {CHANGE: row["tokens/s"] / next(iter(speeds.values())) - 1}
            shown = {column: _shown(column, row[column]) for column in columns if column != CHANGE or number}
            cells = "".join(
                f'<td data-name="{column}">{shown[column]}</td>' if column in shown else "<td></td>"
                for column in columns
            )
            best = row["tokens/s"] == first > LEAD * second > 0
            said_best = ' <b class="ls-green">fastest</b>' if best else ""
            whole = 100 * slowest / row["tokens/s"] / row["step"]  # the bar of a millisecond of this step, in percent
            bar = "".join(
                f'<i style="width: {max(0.0, row[part]) * whole:.1f}%; background-color: {color}"></i>'
                for part, color in zip(PARTS, COLOURS, strict=False)
            )
            lines.append(
                f'<tr{" class=ls-best" if best else ""}><th scope="row"><span>{escape(name)}{said_best}</span>'
                f'<div class="ls-share">{bar}</div></th>{cells}</tr>'
            )
        table = f'<table class="ls-numbers"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        keys = legend(PARTS.values(), "Time per token:")
        return said(f'<div class="ls-card ls-bars" data-measured="">{keys}{table}</div>')


def _calls(run: Run) -> list[Any]:
    """The gradient all-reduces of the step that `measure` marks."""
    marks = {mark.name: mark.number for mark in run.ranks[0].marks}
    between = range(marks["one step"], marks["end"])
    return [call for call in run.collectives[0] if call.inside == "backward" and call.number in between]


def _shown(column: str, value: float) -> str:
    unit = UNITS[column]
    if column in ("MFU", CHANGE):
        return f"{value:{'+' if column == CHANGE else ''}.0%}"
    return f"{value:,.1f} {unit}" if unit == "MB" else f"{value:,.0f} {unit}"


def in_order(report: RankReport) -> list[Any]:
    """A rank's collectives and marks in the order in which they happened; only marks have a `name`."""
    return sorted((*report.collectives, *report.marks), key=operator.attrgetter("number"))


class _Watch(TorchDispatchMode):
    """Counts the bytes of all tensors that come into being and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        if storage in self.known:
            return
        self.known[storage] = None
        self._change(storage.nbytes())
        weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def peak_memory(step: Callable[[], object]) -> int:
    """The most bytes that tensors made by this call take at one time. On a GPU: `max_memory_allocated`."""
    with _Watch() as watch:
        step()
    return watch.peak


class _Count(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def count_operations(step: Callable[[], object]) -> int:
    """How many operations on tensors this call makes."""
    with _Count() as count:
        step()
    return count.operations
