"""Patches without line numbers, short enough to read and to write by hand.

     context
    -removed
    +added
    @@
    -first line of a long run to remove
    ...
    -its last line

`@@` separates hunks, which follow the order of the text. The context and removed lines of a hunk, taken together, must
occur in the text exactly once; an insertion therefore needs a line of context. `...` removes everything up to the next
place that matches the rest of the hunk. An empty line is empty context.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import pairwise

SEPARATOR = "@@"
RUN = "..."
LONG_RUN = 8  # More removed lines than this in a row are shortened with RUN
GAP = 2  # Changes with at most this many lines between them share a hunk

Change = tuple[int, int, int, int]  # `old[i1:i2]` becomes `new[j1:j2]`, as in difflib


class PatchError(ValueError):
    """A patch cannot be read, or does not fit the text. The message shows the hunk and the nearest place."""


def apply(patch: str, text: str) -> str:
    """The text with the patch applied, ending with a newline.

    Raises PatchError when a hunk is not found, is found more than once, or changes nothing.
    """
    old = _lines(text)
    new: list[str] = []
    done = 0
    hunks = list(_hunks(_lines(patch)))
    for number, hunk in enumerate(hunks, 1):
        name = f"hunk {number} of {len(hunks)}" if len(hunks) > 1 else "its change"
        places = _find_all(_check(hunk, name), old)
        if len(places) != 1:
            raise PatchError(f"{name} {_why_not_once(hunk, old, places)}")
        spans = iter(places[0])
        at, end = next(spans)
        if at < done:
            raise PatchError(f"{name} belongs before the hunk above it:\n{_shown(hunk)}")
        new += old[done:at]
        for line in hunk:
            if line == RUN:
                at, end = next(spans)
            elif line.startswith("+"):
                new.append(line[1:])
            else:
                if not line.startswith("-"):
                    new.append(old[at])
                at += 1
        done = end
    return "\n".join(new + old[done:]) + "\n"


def make(text: str, changed: str) -> str:
    """A short patch that makes `changed` of `text`. Both end with a newline, or PatchError is raised."""
    old, new = _lines(text), _lines(changed)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changes = [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]
    hunks = [_hunk(old, new, changes, first, end) for first, end in _spans(old, changes)]
    patch = f"{SEPARATOR}\n".join("".join(f"{line}\n" for line in hunk) for hunk in hunks)
    if apply(patch, text) != changed:
        raise PatchError("this change cannot be written as a patch")
    return patch


def size(patch: str) -> int:
    """The number of its lines."""
    return len(_lines(patch))


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


# Applying ------------------------------------------------------------------------------------------------------------


def _hunks(lines: list[str]) -> Iterator[list[str]]:
    hunk: list[str] = []
    for line in lines:
        if line == SEPARATOR:
            yield hunk
            hunk = []
        else:
            hunk.append(line)
    yield hunk


def _check(hunk: list[str], name: str) -> list[list[str]]:
    """The context and removed lines, in parts: each RUN starts a new part."""
    parts: list[list[str]] = [[]]
    for before, line in zip(["", *hunk], hunk, strict=False):
        if line and line != RUN and line[0] not in " -+":
            raise PatchError(f"{name} has a line that begins with none of “ ”, “-” and “+”: {line}")
        if line == RUN:
            if not parts[-1] or not before.startswith("-"):
                raise PatchError(f"{name} needs a removed line before {RUN}:\n{_shown(hunk)}")
            parts.append([])
        elif not line.startswith("+"):
            parts[-1].append(line[1:])
    if not all(parts):
        where = "" if len(parts) == 1 else f" after {RUN}"
        raise PatchError(f"{name} has no context and no removed line{where}, so its place is unknown:\n{_shown(hunk)}")
    if not any(line.startswith(("-", "+")) for line in hunk):
        raise PatchError(f"{name} changes nothing:\n{_shown(hunk)}")
    return parts


def _find_all(parts: list[list[str]], old: list[str]) -> list[list[tuple[int, int]]]:
    """Every place of these parts, as the span of each; a later part is looked for from the end of the one before."""
    found = []
    for start in _starts(parts[0], old):
        spans = [(start, start + len(parts[0]))]
        for part in parts[1:]:
            after = next(_starts(part, old, spans[-1][1]), None)
            if after is None:
                break
            spans.append((after, after + len(part)))
        else:
            found.append(spans)
    return found


def _starts(part: list[str], old: list[str], start: int = 0) -> Iterator[int]:
    for at in range(start, len(old) - len(part) + 1):
        if old[at] == part[0] and old[at : at + len(part)] == part:
            yield at


def _why_not_once(hunk: list[str], old: list[str], places: list[list[tuple[int, int]]]) -> str:
    if places:
        return f"fits in {len(places)} places; add a line of context:\n{_shown(hunk)}"
    parts = _check(hunk, "")
    part = next((one for one in parts if not any(_starts(one, old))), parts[0])
    first = max(range(max(1, len(old) - len(part) + 1)), key=lambda at: _likeness(part, old[at : at + len(part)]))
    there = "\n".join(f"     {line}" for line in old[first : first + len(part)])
    return f"is not in the text:\n{_shown(hunk)}\n  the nearest place there:\n{there}"


def _likeness(part: list[str], there: list[str]) -> float:
    return difflib.SequenceMatcher(None, "\n".join(part), "\n".join(there), autojunk=False).ratio()


def _shown(hunk: list[str]) -> str:
    return "\n".join(f"    {line}" for line in hunk)


# Making --------------------------------------------------------------------------------------------------------------


def _spans(old: list[str], changes: list[Change]) -> list[tuple[int, int]]:
    """Which lines of `old` each hunk spans: changes near each other, and the context that makes them unique."""
    groups = [(i1, i2) for i1, i2, _, _ in changes]
    while True:
        ends = [0, *(end for _, end in groups)]
        starts = [*(start for start, _ in groups), len(old)]
        widened = [_widened(old, *group, ends[n], starts[n + 1]) for n, group in enumerate(groups)]
        for number, ((_, end), (start, _)) in enumerate(pairwise(widened)):
            if start - end <= (GAP if widened[number : number + 2] == groups[number : number + 2] else 0):
                groups[number : number + 2] = [(groups[number][0], groups[number + 1][1])]
                break
        else:
            return widened


def _widened(old: list[str], first: int, end: int, least: int, most: int) -> tuple[int, int]:
    """`old[first:end]` with the least context that makes it unique, within `least` and `most`; lines above first."""
    for more in range(most - least - (end - first) + 1):
        for above in range(min(more, first - least), -1, -1):
            span = first - above, end + more - above
            if span[1] <= most and span[0] < span[1] and len(list(_starts(old[slice(*span)], old))) == 1:
                return span
    return least, most  # touches its neighbors, and is merged with one


def _hunk(old: list[str], new: list[str], changes: list[Change], first: int, end: int) -> list[str]:
    lines: list[str] = []
    at = first
    for i1, i2, j1, j2 in changes:
        if first <= i1 and i2 <= end:
            lines += [f" {line}" if line else "" for line in old[at:i1]]
            lines += [f"-{line}" for line in old[i1:i2]] + [f"+{line}" for line in new[j1:j2]]
            at = i2
    lines += [f" {line}" if line else "" for line in old[at:end]]
    return _shortened(lines, old)


def _shortened(lines: list[str], old: list[str]) -> list[str]:
    """The same hunk, with RUN in the middle of each long run of removed lines where that stays unambiguous."""
    at = 0
    while at < len(lines):
        length = 0
        while at + length < len(lines) and lines[at + length].startswith("-"):
            length += 1
        for kept in (1, 2, 3) if length > LONG_RUN else ():
            shorter = [*lines[: at + kept], RUN, *lines[at + length - kept :]]
            if _extent(shorter, old) == _extent(lines, old):
                lines, length = shorter, 2 * kept + 1
                break
        at += max(1, length)
    return lines


def _extent(hunk: list[str], old: list[str]) -> list[tuple[int, int]]:
    return [(spans[0][0], spans[-1][1]) for spans in _find_all(_check(hunk, ""), old)]
