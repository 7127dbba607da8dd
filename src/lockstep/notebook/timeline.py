"""The timeline of your own run: what each rank computed and sent, drawn from the record of a cell.

    %%ranks 2 --timeline --into run        the cell says how far it is: mark("forward"), mark("backward"), mark("end"),
                                           and mark("ready NAME") from a hook when a gradient is ready
    timeline(run)                          draws all steps; `step=-1` the last one, `step="fastest"` the shortest
    timeline(run, mine, titles=("torch", "mine")).save_trace("trace.json")      ui.perfetto.dev opens it

The picture shows times, which differ in every run. Its text can be compared: ranks, all-reduces, and how many of them
were launched before the last gradient was ready, by the order of events and not by the clock.
"""

from __future__ import annotations

from typing import Any

from ..ranks import timeline as recorded
from ..ranks import timeline_picture
from ..ranks.result import Run


class Timeline(recorded.Timeline):
    """As a cell's value: a picture, and a text without times.

    The picture is HTML: JupyterLab shows `image/svg+xml` in an `<img>`, in which nothing can be pointed at or focused.
    """

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": timeline_picture.inline(self), "text/plain": repr(self)}


def timeline(*runs: Run | None, titles: tuple[str, ...] = (), step: int | str | None = None) -> Timeline:
    """The timeline of one run, or of several under each other. A run that is None was not made, and is left out.

    `step` is a step's number, or "fastest".

    Raises ValueError when a run was recorded without `--timeline` or has no marks to tell its steps by.
    """
    names = titles or tuple("" for _ in runs)
    if len(names) != len(runs):
        raise ValueError(f"{len(runs)} runs and {len(names)} titles")
    made = [(one, name) for one, name in zip(runs, names, strict=True) if one is not None]
    if not made:
        raise ValueError("no run to draw: run the cell above that makes it")
    return Timeline(tuple(recorded.panel_of(one, name, step) for one, name in made))
