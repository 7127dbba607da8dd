"""The course's ledger of claims: `chapters/claims.toml`, and whether the chapters keep what it says.

The ledger lists every claim of the texts that this course started from, says whether it is true, and names the place
where the reader sees it: a chapter, the heading of a section, and a piece of text that only one cell of that section
has. A claim that not every machine can run (its reason is one of the ledger's `[reasons]`) names the sentence that says
so instead. Below the claims come facts that the course adds, what else the texts contain (sections, pitfalls,
checklists, quiz questions, …), and topics that they lack. Each has its places too.

    [claims.C57]
    claim = "DDP synchronizes in optimizer.step()"
    verdict = "false"
    places = [["04_optimization", "Accumulation", 'print("every backward:"']]
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..course.toml import read_toml

VERDICTS = ("true", "conditional", "outdated", "false", "unproven")
IGNORED = ("nbval-ignore-output", "nbval-skip")


class Place(NamedTuple):
    """A cell, or a sentence: the one in this section of this chapter that holds `mark`. No mark: the section itself."""

    chapter: str
    section: str
    mark: str = ""

    def __str__(self) -> str:
        return f'{self.chapter}, "{self.section}"' + (f", {self.mark!r}" if self.mark else "")


@dataclass(frozen=True)
class LedgerEntry:
    """One claim, fact or topic. `not_run` names a reason when no cell can show it."""

    claim: str
    places: tuple[Place, ...]
    verdict: str = ""
    not_run: str = ""


@dataclass(frozen=True)
class Ledger:
    """The whole file. `expected` has, for each letter, how many claims the texts make: A1 … An."""

    expected: dict[str, int]
    reasons: dict[str, str]
    claims: dict[str, LedgerEntry]
    facts: dict[str, LedgerEntry]
    contents: dict[str, LedgerEntry]
    topics: dict[str, LedgerEntry]


@dataclass
class Section:
    """The text under one heading, up to the next one, and its code cells."""

    heading: str
    level: int
    text: str = ""
    cells: list[dict[str, Any]] = field(default_factory=list)


def read(root: Path) -> Ledger:
    """The ledger of the course at `root`. Raises CourseError when it is missing or malformed."""
    return read_toml(root / "chapters" / "claims.toml", Ledger)


def sections(notebook: Mapping[str, Any]) -> list[Section]:
    """A notebook cut at its headings, of any depth, without what comes before the first one."""
    found: list[Section] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            if found:
                found[-1].cells.append(cell)
            continue
        fenced = False
        for line in source.splitlines():
            fenced ^= line.startswith("```")
            heading = None if fenced else re.match(r"(#+) (.+)", line)
            if heading:
                found.append(Section(heading[2].strip(), len(heading[1])))
            elif found:
                found[-1].text += line + "\n"
    return found


def shows_something(cell: Mapping[str, Any]) -> bool:
    """Would a test notice if what this code cell shows became false?

    True when nbval compares a stored output of it, when it asserts, or when it says how its ranks are to end.
    """
    source = "".join(cell["source"])
    if set(cell["metadata"].get("tags", ())) & set(IGNORED) or source.startswith("%%writefile"):
        return False
    said = "".join(_texts(cell.get("outputs", [])))
    if said.startswith("not run:"):
        return False
    return bool(said.strip()) or bool(re.search(r"^\s*assert |--expect (?!anything)", source, re.MULTILINE))


def problems(ledger: Ledger, root: Path) -> list[str]:
    """What is wrong with the ledger, or with the chapters that it points to: one line each."""
    found = []
    wanted = [f"{letter}{number:02}" for letter, count in ledger.expected.items() for number in range(1, count + 1)]
    found += [f"{name}: this claim is not in the ledger" for name in wanted if name not in ledger.claims]
    found += [f"{name}: no such claim is expected" for name in sorted(ledger.claims.keys() - set(wanted))]
    chapters: dict[str, list[Section] | None] = {}
    for part in (ledger.claims, ledger.facts, ledger.contents, ledger.topics):
        for name, entry in part.items():
            if part is ledger.claims and entry.verdict not in VERDICTS:
                found.append(f"{name}: the verdict {entry.verdict!r} is none of {', '.join(VERDICTS)}")
            needs_a_cell = part is ledger.claims or part is ledger.facts
            own = _of_entry(entry, needs_a_cell, ledger.reasons, root, chapters)
            found += [f"{name}: {problem}" for problem in own]
    return found


def share(ledger: Ledger) -> str:
    """One line: how many claims a cell shows, and why the others are only stated."""
    told = Counter(entry.not_run for entry in ledger.claims.values() if entry.not_run)
    reasons = ", ".join(f"{count} {ledger.reasons[reason].split(':')[0]}" for reason, count in told.most_common())
    shown = len(ledger.claims) - told.total()
    line = f"Claims: {shown} of {len(ledger.claims)} shown by a cell"
    return f"{line}, {told.total()} told with their reason ({reasons})" if told else line


def _of_entry(
    entry: LedgerEntry,
    needs_a_cell: bool,
    reasons: Mapping[str, str],
    root: Path,
    chapters: dict[str, list[Section] | None],
) -> Iterator[str]:
    """What is wrong with one entry. Claims and facts need a cell or a reason; contents and topics a section."""
    if entry.not_run and not reasons.get(entry.not_run):
        yield f"{entry.not_run!r} is not among the ledger's reasons"
    if not entry.places:
        yield "it has no place"
    shown = False
    for place in entry.places:
        if place.chapter not in chapters:
            file = root / "chapters" / f"{place.chapter}.ipynb"
            chapters[place.chapter] = sections(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
        problem, is_cell = _of_place(place, chapters[place.chapter], told=bool(entry.not_run))
        shown |= is_cell and not problem
        if problem:
            yield f"{place}: {problem}"
    if needs_a_cell and entry.places and not shown and not entry.not_run:
        yield "no cell shows it, and no reason says why"


def _of_place(place: Place, chapter: list[Section] | None, told: bool) -> tuple[str, bool]:
    """What is wrong with a place ("" when nothing is), and whether it is a code cell."""
    if chapter is None:
        return "there is no such chapter", False
    found = [section for section in chapter if section.heading == place.section]
    if len(found) != 1:
        return f"{len(found) or 'no'} sections have this heading", False
    if not place.mark:
        return "", False
    cells = [cell for cell in found[0].cells if place.mark in "".join(cell["source"])]
    if len(cells) == 1:
        return "" if shows_something(cells[0]) else "the cell shows nothing that a test would compare", True
    if len(cells) > 1:
        return f"{len(cells)} cells of the section hold this mark", True
    if place.mark in " ".join(found[0].text.split()):
        return ("", False) if told else ("a sentence, and a claim without `not_run` needs a cell", False)
    return "neither a cell nor the text of the section holds this mark", False


def _texts(outputs: list[Any]) -> Iterator[str]:
    """What the stored outputs of a cell say, as text."""
    for output in outputs:
        for value in (output.get("text", ""), *output.get("data", {}).values(), output.get("evalue", "")):
            yield value if isinstance(value, str) else "".join(value) if isinstance(value, list) else str(value)
