"""The all-reduce stepper: how N ranks get the sum of what they have, one step at a time.

`stepper.js` is given who sends what to whom as data, so there is one schedule: the one that `tests/test_pictures.py`
proves. The page is a sandboxed iframe without any outside resource, so it works in JupyterLab without internet and in a
static page. For places where no script runs (GitHub's preview), `authoring.pictures` draws the same steps side by side.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from ..course.all_reduce import NUMBER_BYTES, Schedule, bounds, brought, bytes_sent, naive, ring

LARGEST = 8
LENGTHS = (3, 5, 8, 12, 16)
HEIGHT = 570  # Of the frame until its page has said how high it is; it never has where no script may run around it

LISTENS = """
window.lockstepHeights ??= (addEventListener("message", ({ source, data }) => {
  if (!(data?.lockstepHeight > 0)) return;
  for (const frame of document.querySelectorAll("iframe.lockstep-picture"))
    if (frame.contentWindow === source) frame.style.height = `${data.lockstepHeight}px`;
}), true);
"""


STYLE = """
.lockstep-picture { width: 100%; max-width: 780px; border: 0 }
.lockstep-dark, [data-jp-theme-light=false] .lockstep-light, .vscode-dark .lockstep-light { display: none }
[data-jp-theme-light=false] .lockstep-dark, .vscode-dark .lockstep-dark { display: inline }
@media (prefers-color-scheme: dark) {
  body:not([data-jp-theme-light], [class*=vscode]) .lockstep-light { display: none }
  body:not([data-jp-theme-light], [class*=vscode]) .lockstep-dark { display: inline }
}"""


class Stepper:
    """The page, as the value of a cell. `ranks` and `length` are what it shows first."""

    def __init__(self, ranks: int = 4, length: int = 8) -> None:
        if not 2 <= ranks <= LARGEST or length not in LENGTHS:
            raise ValueError(f"the stepper knows 2 to {LARGEST} ranks and the lengths {LENGTHS}")
        self.ranks, self.length = ranks, length

    def __repr__(self) -> str:
        sent = max(bytes_sent(ring(self.ranks), self.length))
        return f"Stepper({self.ranks} ranks, {self.length} numbers, ring: {sent} bytes a rank)"

    def page(self, theme: str = "auto") -> str:
        """The whole document, for an iframe or a file. `theme` is `auto` (as the system), `light` or `dark`."""
        script = (Path(__file__).with_name("stepper.js")).read_text(encoding="utf-8")
        data = json.dumps(self._data(), separators=(",", ":"), sort_keys=True)
        head = f"<html lang=en data-theme={theme}><meta charset=utf-8><title>All-reduce, step by step</title>"
        mount = f"<script>{script}\nmount(document.getElementById('stepper'), {data});</script>"
        main = "<main><h1>All-reduce, step by step</h1><div id=stepper></div></main>"
        return f"<!doctype html>{head}<body>{main}{mount}</body></html>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        # A sandboxed frame cannot see JupyterLab's theme, so there is one for each. The frame that is not shown is not
        # loaded.
        style = f"<style>{STYLE}</style>"
        frames = [
            f'<iframe class="lockstep-picture lockstep-{theme}" title="All-reduce, step by step" loading="lazy" '
            f'sandbox="allow-scripts" height="{HEIGHT}" srcdoc="{html.escape(self.page(theme))}"></iframe>'
            for theme in ("light", "dark")
        ]
        script = f"<script>{LISTENS}</script>"
        return {"text/html": style + script + "".join(frames), "text/plain": repr(self)}

    def _data(self) -> dict[str, Any]:
        schedules = [make(ranks) for ranks in range(2, LARGEST + 1) for make in (ring, naive)]
        return {
            "first": {"ranks": self.ranks, "length": self.length},
            "largest": LARGEST,
            "lengths": LENGTHS,
            "numberBytes": NUMBER_BYTES,
            "values": {str(length): brought(LARGEST, length) for length in LENGTHS},
            "bounds": {
                f"{length}/{chunks}": bounds(length, chunks) for length in LENGTHS for chunks in range(1, LARGEST + 1)
            },
            "schedules": {f"{one.name}/{one.ranks}": _plain(one) for one in schedules},
        }


def _plain(schedule: Schedule) -> dict[str, Any]:
    steps = [
        {"phase": step.phase, "moves": [[m.sender, m.receiver, m.chunk, m.how.value] for m in step.moves]}
        for step in schedule.steps
    ]
    return {"ranks": schedule.ranks, "chunks": schedule.chunks, "steps": steps}
