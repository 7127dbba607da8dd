"""What HTML pages share: templates in which no text from others is markup, and a policy that lets nothing run.

There are three defences. `finalize` makes control and direction characters visible; Jinja escapes every value that a
template shows (`autoescape`); and the page's Content-Security-Policy allows nothing but the style sheet with this hash:
no script, no picture, no frame, no request.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...ranks import cards
from ..text import visible

MOST_CHARACTERS = 16_000  # of one text
MOST_NAME = 200  # of a name
COURSE = "Lockstep: distributed training with PyTorch DDP"


def render(template: str, **values: Any) -> str:
    """A page from `templates/`, ending with a newline. The same values give the same bytes."""
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    csp = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _environment().get_template(template).render(style=Markup(style), csp=csp, course=COURSE, **values) + "\n"


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, or its beginning and its end where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    left = len(text) - most
    return f"{text[: most // 2]}\n… {left} characters left out …\n{text[len(text) - (most - most // 2) :]}"


def plural(number: int, one: str) -> str:
    """`1 learner`, `2 learners`."""
    return f"{number} {one if number == 1 else one + 's'}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lockstep.grading.exports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters["breakable"] = _breakable
    return environment


@cache
def _style() -> str:
    return (files(__package__) / "templates" / "style.css").read_text(encoding="utf-8") + cards.style("cards.css")


def _breakable(value: object) -> Markup:
    """A file's or a check's name, which may go on in the next line after `/` or `_` and is never cut."""
    return Markup(cards.breakable(str(_harmless(value))))


def _harmless(value: object) -> object:
    if isinstance(value, Markup):
        return value
    text = cut(str(value), 2 * MOST_CHARACTERS).replace("\r\n", "\n")
    return text if text.isprintable() else visible(text, keep="\n\t")


def without_folders(text: str) -> str:
    """The text with only the last part of each absolute path: a learner has no use for the grader's folders."""
    return _FOLDERS.sub("", text)


_FOLDERS = re.compile(r"(?<![\w.:/-])(?:/[^\s/'\"<>:]+)+/")
