"""The course cut to what is released: chapters without the others' exercises, a README of what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..course.outline import CHECK, EFFORT, with_group

FOR_LEARNERS = ("## Two commands", "## The course", "## For learners")
NOT_IN_A_COPY = (
    "git clone",
    "./lockstep test",
    "./lockstep release",
    "CONTRIBUTING.md",
    "./lockstep solution",
)
EXAMPLE = "train_ddp"
COURSES_OWN = re.compile(r"(?<![\w./])(?:solutions|exercises|chapters|docs)/(?:[\w./-]*\w)?")
HEADING = re.compile(r"^(?=#{2,3} )", re.MULTILINE)
MINUTES = re.compile(r"About \d+ minutes: (\d+) to read and run,\s+(\d+) for .+?\.(?=\sYou need)", re.DOTALL)
ROW = re.compile(r"^\| (\d)( [^|]*)\|([^|]*)\|[^|]*\|(.*)\n", re.MULTILINE)
TOTALS = re.compile(r" Reading takes about [^.]*\.")


def chapter(notebook: bytes, names: Collection[str]) -> bytes:
    """The notebook without the sections of exercises that are not among `names`, and with the minutes of the others."""
    book = json.loads(notebook)
    parts = [(cell, text) for cell in book["cells"] for text in _parts(cell)]
    levels = [len(text) - len(text.lstrip("#")) if HEADING.match(text) else 0 for _, text in parts] + [1]
    kept, at = [], 0
    while at < len(parts):
        end = next(after for after in range(at + 1, len(levels)) if levels[after])
        asked = CHECK.findall("\n".join(text for _, text in parts[at:end]))
        if levels[at] and asked and not any(with_group(one, names) for line in asked for one in line.split()):
            end = next(after for after in range(end, len(levels)) if 0 < levels[after] <= levels[at])
        else:
            kept += parts[at:end]
        at = end
    writing, whole = _minutes(kept), _minutes(parts)
    for cell in book["cells"]:
        source = "".join(text for owner, text in kept if owner is cell)
        if found := MINUTES.search(source):
            reading = int(found[1])
            if any("/" in name for name in names):  # the minutes of a group's exercises stand nowhere else
                writing += int(found[2]) - whole
            now = f"About {reading + writing} minutes: {reading} to read and run, {writing} for the exercises."
            source = source.replace(found[0], now)
        elif "course_map(" in source:
            cell["outputs"] = []  # it shows all chapters
        cell["source"] = source.splitlines(keepends=True)
    book["cells"] = [cell for cell in book["cells"] if cell["source"]]
    return (json.dumps(book, indent=1, ensure_ascii=False) + "\n").encode()


def _parts(cell: dict[str, Any]) -> list[str]:
    text = "".join(cell["source"])
    return [one for one in HEADING.split(text) if one] if cell["cell_type"] == "markdown" else [text]


def _minutes(parts: Iterable[tuple[Any, str]]) -> int:
    efforts = EFFORT.findall("\n".join(text for _, text in parts))
    return sum(int(number) for effort in efforts for number in re.findall(r"(\d+) minutes", effort))


def readme(text: str, files: Mapping[str, bytes], names: Sequence[str], whole: bool) -> str:
    """The README of a learner's copy with these files and exercises: of its parts for learners, what is true there.
    `whole` is true for all of the course.
    """
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    text = "".join((head, *(one for one in sections if one.startswith(FOR_LEARNERS))))
    text = "\n".join(line for line in text.splitlines() if not any(word in line for word in NOT_IN_A_COPY))
    text = text.replace("## Two commands", "## Start")
    if not whole:
        rows = {one[1]: _row(one, files, names) for one in ROW.finditer(text)}
        text = ROW.sub(lambda found: rows[found[1]][0], text)
        reading, writing = sum(row[1] for row in rows.values()), sum(row[2] for row in rows.values())
        text = TOTALS.sub(f"\nReading takes about {reading} minutes, the exercises about {writing}.", text)
    example = EXAMPLE if EXAMPLE in names else min(names, key=lambda name: "/" in name)
    longer = max(0, len(example) - len(EXAMPLE))
    found: list[str] = []
    whether = True
    for paragraph in _paragraphs(text):
        if "✗" not in paragraph:
            paragraph = re.sub(rf"{EXAMPLE}( {{{longer}}}(?= )|)", example, paragraph)
        there = all(_is_there(path, files) for path in COURSES_OWN.findall(paragraph))
        if paragraph.startswith(("**", "#")):  # what follows belongs to it
            whether = there
        if there and whether:
            found.append(paragraph)
        elif found:
            found[-1] = re.sub(r":\Z", ".", found[-1])
    return "\n\n".join(found) + "\n"


def _row(found: re.Match[str], files: Mapping[str, bytes], names: Sequence[str]) -> tuple[str, int, int]:
    """A chapter's row of the table, and its minutes of reading and writing; nothing for a chapter that is not there."""
    number, title, exercises, rest = found.groups()
    notebook = next((data for path, data in files.items() if path.startswith(f"chapters/0{number}_")), b"")
    minutes = re.search(rb"minutes: (\d+) to read and run, (\d+) for", notebook)
    if not minutes:
        return "", 0, 0
    reading, writing = int(minutes[1]), int(minutes[2])
    own = [f"`{name}`" for name in re.findall(r"`(\w+)`", exercises) if name in names]
    if cases := sum(f"exercises/{name.partition('/')[0]}`" in exercises for name in names):
        own.append(re.sub(r".*?\d+ cases", f"{cases} case{'s'[: cases > 1]}", exercises.strip()))
    return f"| {number}{title}| {', '.join(own)} | {reading} + {writing} |{rest}\n", reading, writing


def _paragraphs(text: str) -> list[str]:
    """Separated by blank lines; a fenced block is one of them."""
    found: list[str] = []
    for piece in text.split("\n\n"):
        if found and found[-1].count("```") % 2:
            found[-1] += f"\n\n{piece}"
        elif piece.strip():
            found.append(piece.strip("\n"))
    return found


def _is_there(path: str, files: Mapping[str, bytes]) -> bool:
    return path in files or any(one.startswith(f"{path.rstrip('/')}/") for one in files)
