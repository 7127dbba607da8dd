"""References to a section, written "Hangs" or chapter 3, "Hangs", are links in the notebook and in the book."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from ..course.outline import plain, section_anchor

REFERENCE = re.compile(r"(?:[Cc]hapter\s+(?P<number>\d+),\s+)?[\"“](?P<title>[^\"”]+)[\"”]")
PIECE = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)|^#{1,6} +(?P<heading>[^\n]+)"
    r"|(?P<ticks>`+)(?!`)(?:(?!\n\n).)*?(?<!`)(?P=ticks)(?!`)|\[[^\]]*\]\([^)]*\)|" + REFERENCE.pattern,
    re.DOTALL | re.MULTILINE,
)
"""Of a Markdown text, what is no reference (code, headings, links), and what may be one."""
LINK = re.compile(r"\[((?:[Cc]hapter\s+\d+,\s+)?\"[^\"]+\")\]\(\d\d_\w+\.ipynb#[^)\s]+\)")


def linked(text: str, own: str, titles: Mapping[str, set[str]]) -> str:
    """The Markdown `text` of the chapter `own` with its references as links.

    `titles` has the `headings` of each chapter by its name, such as 03_debugging.
    """

    def link(found: re.Match[str]) -> str:
        name = next((one for one in titles if int(one[:2]) == int(found["number"])), "") if found["number"] else own
        title = plain(found["title"] or "")
        if title not in titles.get(name, ()):
            return found[0]
        return f"[{found[0]}]({name}.ipynb#{quote(section_anchor(title))})"

    return PIECE.sub(link, text)


def unlinked(text: str) -> str:
    """The text as it was written: without the links that `linked` has made."""
    return LINK.sub(r"\1", text)


def headings(text: str) -> set[str]:
    """The headings of a Markdown text, of all levels, without their Markdown."""
    return {plain(found["heading"]) for found in PIECE.finditer(text) if found["heading"]}
