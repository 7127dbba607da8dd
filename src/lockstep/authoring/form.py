"""What every chapter has in common, and where one departs from it: one readable line each.

The rhythm: goals as verbs, minutes that were counted, what is needed, a question at the end of every section, exercises
with their check, what to keep, what to read next. And cells that can be seen whole, with short mistakes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

from ..course import CourseError
from ..course.quizzes import quiz_file, read
from . import claims
from .chapters import ROOT, length, read_source

NO_QUIZ = ("Exercise:", "Capstone:", "Checklist", "What to remember", "What to read next")
"""Sections without a question at the end: they are tasks or lists themselves."""
GOALS, EXERCISES, KEPT = 5, 3, 5
MINUTES_OFF = 8
MINUTES_SPARE = 20
LONGEST_CELL, LONGEST_PROGRAM, LONGEST_BUG = 25, 36, 12
WIDEST_LINE = 105  # What JupyterLab shows without scrolling on a screen of 1280 pixels
EXEMPT_SHARE = 0.05


def problems(name: str, root: Path = ROOT) -> list[str]:
    """What is missing in this chapter's source, in reading order of the rules."""
    notebook = read_source(name, root)
    return [*_opening(notebook), *_sections(name, notebook, root), *_paragraphs(notebook), *_cells(notebook)]


def _opening(notebook: NotebookNode) -> Iterator[str]:
    whole = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    text = " ".join(whole.partition("\n## ")[0].split())
    goals = len(re.findall(r"- [^-]*?\*\*", text.partition("you can ")[2]))
    if goals < GOALS:
        yield f"it opens with {goals} goals, and {GOALS} are needed: a list after “you can”, each with its verb in bold"
    if "You need " not in text or "GPU" not in text:
        yield "it does not open with what is needed: “You need …”, and whether a GPU"
    minutes = re.search(r"About (\d+) minutes: (\d+) to read and run, (\d+) for ", text)
    if minutes is None:
        yield "it does not open with its minutes: “About N minutes: N to read and run, N for …”"
        return
    total, reading, exercises = map(int, minutes.groups())
    if total != reading + exercises:
        yield f"its minutes do not add up: {reading} and {exercises} are not {total}"
    counted = length(notebook).minutes
    if abs(reading - counted) > MINUTES_OFF:
        yield f"it says {reading} minutes to read and run, and {counted:.0f} are counted"
    promised = sum(map(int, re.findall(r"^\*\w+, (\d+) minutes", whole, re.MULTILINE)))
    if not promised <= exercises <= promised + MINUTES_SPARE:
        yield f"it says {exercises} minutes for its exercises, which say {promised} together"


def _sections(name: str, notebook: NotebookNode, root: Path) -> Iterator[str]:
    sections = top_sections(notebook)
    try:
        questions = set(read(quiz_file(root, name)))
    except CourseError as error:
        questions = set()
        yield f"its questions cannot be read: {error}"
    for heading, body in sections.items():
        asked = re.findall(rf'quiz\("{name}/(\w+)"\)', body)
        if not asked and not heading.startswith(NO_QUIZ):
            yield f"the section “{heading}” has no question"
        yield from (f"there is no question {key!r}" for key in asked if key not in questions)
    tasks = [body for body in sections.values() if "%check " in body and "minutes" in body]
    if len(tasks) < EXERCISES:
        yield f"it has {len(tasks)} exercises with a check and their minutes, and {EXERCISES} are needed"
    if list(sections)[-2:] != ["What to remember", "What to read next"]:
        yield "it does not end with “What to remember” and “What to read next”"
        return
    kept = sections["What to remember"]
    if kept.count("\n- ") < KEPT or "In an interview" not in kept:
        yield f"“What to remember” needs {KEPT} points or more, and what to expect “In an interview”"
    if "pytorch.org" not in sections["What to read next"]:
        yield "“What to read next” does not lead to PyTorch's own pages"


def _paragraphs(notebook: NotebookNode) -> Iterator[str]:
    """Markdown takes a line that begins like an item for the start of a list, also in a wrapped `2(N - 1)`."""
    marker = re.compile(r"\d+[.)] |[-+*] ")
    for cell in notebook.cells:
        for above, line in itertools.pairwise(cell.source.splitlines() if cell.cell_type == "markdown" else ()):
            if marker.match(line) and re.match(r"\S", above) and not marker.match(above):
                yield f"“{line[:40]}” looks like an item of a list: leave a line free above it, or wrap elsewhere"


def _cells(notebook: NotebookNode) -> Iterator[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    programs = [cell for cell in cells if "whole-program" in cell.metadata.get("tags", ())]
    if len(programs) > 1:
        yield f"{len(programs)} cells are tagged whole-program, and one may be"
    for cell in cells:
        lines = cell.source.splitlines()
        where = f"the cell {next((line for line in lines if line.strip()), '')!r}"
        most = LONGEST_PROGRAM if cell in programs else LONGEST_CELL
        if len(lines) > most:
            yield f"{where} has {len(lines)} lines, and {most} can be seen at once"
        widest = max(map(len, lines), default=0)
        if widest > WIDEST_LINE:
            yield f"{where} is {widest} columns wide, and {WIDEST_LINE} can be seen"
        counted = [line for line in lines if line and not line.startswith(("%%", "import", "from"))]
        if "# BUG" in cell.source and len(counted) > LONGEST_BUG:
            yield f"{where} shows a mistake in {len(counted)} lines, and {LONGEST_BUG} are enough"
    exempt = [cell for cell in cells if set(cell.metadata.get("tags", ())) & set(claims.IGNORED)]
    if len(exempt) > EXEMPT_SHARE * len(cells):
        yield f"{len(exempt)} of {len(cells)} cells are exempt from comparison, which is more than 5 %"
    for cell in exempt:
        if len(cell.metadata.get("ignored_because", "")) <= 20:
            yield f"a cell is exempt from comparison and does not say why: {cell.source.splitlines()[0]!r}"


def top_sections(notebook: NotebookNode) -> dict[str, str]:
    """The second-level sections, each with everything in it as one text."""
    merged: dict[str, str] = {}
    current = ""
    for section in claims.sections(notebook):
        current = section.heading if section.level == 2 else current
        if current:
            body = section.text + "\n".join(cell["source"] for cell in section.cells)
            merged[current] = merged.get(current, "") + body
    return merged
