"""A teacher's comment as HTML: the part of Markdown that a comment needs, and nothing that can act.

Paragraphs, lists, fenced code, `code`, **strong**, *emphasis* and [links](https://…). Whatever else is written stays
the text that it is, HTML, images and links to other schemes included: tags come from here alone, and all text is
escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from ..text import visible

# No part can contain its own mark, and each has an end: the time is linear, and nesting ends by itself.
_INLINE = re.compile(
    r"`(?P<code>[^`\n]{1,500})`"
    r"|\*\*(?P<strong>[^\s*](?:[^*]{0,500}[^\s*])?)\*\*"
    r"|(?<![\w*])(?:\*(?P<star>[^\s*](?:[^*]{0,500}[^\s*])?)\*|_(?P<line>[^\s_](?:[^_]{0,500}[^\s_])?)_)(?!\w)"
    r"|\[(?P<label>[^\[\]]{1,200})\]\((?P<to>https?://[^\s()<>\"'`]{1,500})\)"
)
_ITEM = re.compile(r"\s{0,3}[-*+]\s+(.*)")


def rendered(text: str) -> Markup:
    """The comment as HTML on one line: a line's end within code is a character reference."""
    blocks: list[Markup] = []
    for number, part in enumerate(re.split(r"(?m)^\s{0,3}```.*$", visible(text.replace("\r\n", "\n"), keep="\n\t"))):
        if number % 2:
            code = escape(part.strip("\n")).replace("\n", Markup("&#10;"))
            blocks.append(Markup('<pre tabindex="0">{}</pre>').format(code))
        else:
            blocks += (_block(block.split("\n")) for block in re.split(r"\n\s*\n", part) if block.strip())
    return Markup("").join(blocks)


def _block(lines: list[str]) -> Markup:
    """A paragraph, and the list that begins in it."""
    before: list[str] = []
    items: list[list[str]] = []
    for line in lines:
        if found := _ITEM.fullmatch(line):
            items.append([found[1]])
        else:
            (items[-1] if items else before).append(line)
    shown = Markup("<p>{}</p>").format(_joined(before)) if any(line.strip() for line in before) else Markup()
    listed = Markup("").join(Markup("<li>{}</li>").format(_joined(item)) for item in items)
    return shown + (Markup("<ul>{}</ul>").format(listed) if items else Markup())


def _joined(lines: Iterable[str]) -> Markup:
    return _inline(" ".join(line.strip() for line in lines).strip())


def _inline(text: str) -> Markup:
    parts, end = [], 0
    for found in _INLINE.finditer(text):
        parts += [escape(text[end : found.start()]), _marked(found)]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def _marked(found: re.Match[str]) -> Markup:
    if found["code"]:
        return Markup("<code>{}</code>").format(found["code"])
    if found["strong"]:
        return Markup("<strong>{}</strong>").format(_inline(found["strong"]))
    if found["label"]:
        return Markup('<a href="{}" rel="noreferrer">{}</a>').format(found["to"], found["label"])
    return Markup("<em>{}</em>").format(_inline(found["star"] or found["line"]))
