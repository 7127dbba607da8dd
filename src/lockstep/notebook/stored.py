"""Widgets that survive their kernel.

A widget's model lives in the kernel. A notebook that is opened without one would show "Error displaying widget", and
no front end falls back to another form of the same output. So such a value makes two outputs: the widget, and its
stored form, which hides itself as long as the widget is there, and hides the widget's error when it is not. What the
learner does afterwards can change it (`update_stored`).
"""

from __future__ import annotations

import os
import re
from typing import Any

from IPython.display import DisplayHandle, display
from ipywidgets import VBox

from ..ranks.cards import said

WIDGET = "application/vnd.jupyter.widget-view+json"


class Stored(VBox):
    """A box of widgets with a stored form. A subclass has a `key`, a repr and both forms of what is stored."""

    key = ""
    _shown: DisplayHandle | None = None

    def stored_html(self) -> str:
        """What is seen without a kernel."""
        raise NotImplementedError

    def stored_markdown(self) -> str:
        """The same where a notebook is shown without HTML."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget and its stored form as one, for a front end that asks for the value itself."""
        return {**dict(super()._repr_mimebundle_(**kwargs) or {}), **self._stored()}

    def _stored(self) -> dict[str, Any]:
        name = re.sub(r"\W", "-", self.key)
        self.add_class(f"lockstep-live-{name}")
        html = f'<style>{_hiding(name)}</style><div class="lockstep-stored-{name}">{self.stored_html()}</div>'
        return {"text/plain": repr(self), "text/markdown": self.stored_markdown(), "text/html": said(html)}

    def _ipython_display_(self) -> None:
        live = self._repr_mimebundle_().get(WIDGET)
        if live is not None:
            display({WIDGET: live}, raw=True)
        self._shown = display(self._stored(), raw=True, display_id=True)

    def update_stored(self) -> None:
        """Make what is stored anew, so that the notebook, once it is saved, keeps what is true now."""
        if self._shown is not None:
            self._shown.update(self._stored(), raw=True)


def is_handed_out() -> bool:
    """Whether the chapters are being made that everybody gets: nothing in them has been done yet."""
    return bool(os.environ.get("LOCKSTEP_SUBMISSION"))


def _hiding(name: str) -> str:
    live, stored = f".lockstep-live-{name}", f".lockstep-stored-{name}"
    dead = f".jp-OutputArea:has({stored}):not(:has({live})) .jp-OutputArea-child:has(> .jupyter-widgets)"
    return f"body:has({live}) {stored}, {dead} {{ display: none }}"
