"""A chapter's source and its notebook: `chapters/source/NAME.py` <-> `chapters/NAME.ipynb`.

People write and review the source (jupytext's py:percent). Learners open the notebook, where the name of a section in
quotes is a link, and which holds the outputs, so that it can be read without running it and so that
`pytest --nbval chapters` can tell when a claim has become false.

    ./lockstep author chapters 02_setup           run the source, write the notebook
    ./lockstep author chapters --back 02_setup    take what was edited in JupyterLab into the source

A build is reproducible byte for byte. Cell ids come from the cells' text. Execution counts are renumbered (nbval
takes a cell without one for a cell that was not run). Widgets are stored as the text beside them, since their models
live in a kernel. What remains are the few things that differ in every run (`chapters/nbval_sanitize.cfg`: how long a
hang was watched, a port). Those are real readings and stay as they were, as long as the output is otherwise the same
(`fresh` takes this run's). A chapter's pictures of times are of one run: if one has to change, all do.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from ..course import Course, CourseError, unused
from ..course.copies import chapter_file
from .references import headings, linked, unlinked

ROOT = Path(__file__).resolve().parents[3]
CELL_TIMEOUT_SECONDS = 240  # chapter 5 checks a batch script on a SLURM cluster of its own
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
NEVER_READY = "before replying to kernel_info"
"""Of a kernel that died before its first cell: another process may have taken the port that was chosen for it."""
WIDGET = "application/vnd.jupyter.widget-view+json"
SOURCE_FORMAT = "py:percent"
PREDICT = re.compile(r"^(?!- ).*\*\*Predict\b", re.MULTILINE)
HEADING = re.compile(r"^#", re.MULTILINE)
MEASURED = "data-measured"  # In the outputs of a cell whose picture shows times
HEADER = """# ---
# jupyter:
#   jupytext:
#     comment_magics: true
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

"""


Rules = Callable[[str], str]


class BuildError(CourseError):
    """A chapter that does not run to its end; the message names the cell."""


@dataclass(frozen=True)
class Length:
    """How much there is to read: words, lines of code that are neither empty, imports nor magics, and cells to run."""

    words: int
    code_lines: int
    cells: int

    @property
    def minutes(self) -> float:
        """At 150 words and 15 lines a minute, and 15 seconds for what a cell shows: how chapters count their minutes.

        At 200 words and 20 lines, without outputs, readers of whole chapters found the minutes half of what they took.
        """
        return self.words / 150 + self.code_lines / 15 + self.cells / 4


def length(notebook: NotebookNode) -> Length:
    """How much there is to read in a chapter."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    lines = [line for source in code for line in source.splitlines()]
    return Length(
        sum(len(text.split()) for text in texts),
        sum(bool(line.strip()) and not line.startswith(("import ", "from ", "%")) for line in lines),
        len(code),
    )


def names(root: Path = ROOT) -> list[str]:
    """The chapters that have a source, in order."""
    return sorted(path.stem for path in (root / "chapters" / "source").glob("*.py"))


def build(chosen: Iterable[str] | None = None, root: Path = ROOT, fresh: bool = False) -> list[Path]:
    """Run these chapters (default: all) and write their notebooks. Returns the paths of those that changed.

    `fresh` stores this run's times and other readings as well, also where an output says the same as before.
    Raises BuildError when a cell fails that is not marked `raises-exception`, or does not end.
    """
    changed = []
    for name in chosen or names(root):
        notebook = read_source(name, root)
        try:
            execute(notebook, root)
        except (CellControlSignal, DeadKernelError) as error:
            raise BuildError(_what_failed(name, notebook, error)) from error
        target = notebook_path(name, root)
        before = target.read_text(encoding="utf-8") if target.exists() else ""
        _tidy(notebook, nbformat.reads(before, as_version=4) if before and not fresh else None, rules(root))
        after = nbformat.writes(notebook) + "\n"
        if after != before:
            target.write_text(after, encoding="utf-8")
            changed.append(target)
    return changed


def _what_failed(name: str, notebook: NotebookNode, error: Exception) -> str:
    """The last cell that started in a run of this notebook, and how it ended."""
    started = [n for n, cell in enumerate(notebook.cells) if cell.get("execution_count") or cell.get("outputs")]
    number = started[-1] if started else 0
    cell = notebook.cells[number]
    first = next((line for line in cell.source.splitlines() if line.strip()), "")
    if isinstance(error, CellExecutionError):
        how = f"{error.ename}: {error.evalue}"
    elif isinstance(error, CellTimeoutError):
        how = f"it did not end within {CELL_TIMEOUT_SECONDS} s"
    else:
        how = f"{type(error).__name__}: the kernel has died"
    return f"chapters/source/{name}.py: the cell {first!r} (number {number}, counted from 0) failed. {how}"


def update_sources(chosen: Iterable[str] | None = None, root: Path = ROOT) -> list[Path]:
    """Take what was edited in the notebooks (in `./lockstep lab`: in their copies) into the sources.

    Returns the paths of the sources that changed.
    """
    changed = []
    for name in chosen or names(root):
        notebook = nbformat.read(chapter_file(Course(root), name), as_version=4)
        target = source_path(name, root)
        text = source_text(notebook)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            changed.append(target)
    return changed


def stale(chosen: Iterable[str] | None = None, root: Path = ROOT) -> list[str]:
    """The chapters whose notebook is missing or has other cells than their source."""
    return [name for name in chosen or names(root) if not _agrees(name, root)]


def source_path(name: str, root: Path = ROOT) -> Path:
    """Where people write the chapter."""
    return root / "chapters" / "source" / f"{name}.py"


def notebook_path(name: str, root: Path = ROOT) -> Path:
    """Where learners open it."""
    return root / "chapters" / f"{name}.ipynb"


def read_source(name: str, root: Path = ROOT) -> NotebookNode:
    """The chapter as a notebook without outputs."""
    notebook: NotebookNode = jupytext.reads(source_path(name, root).read_text(encoding="utf-8"), fmt=SOURCE_FORMAT)
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL))
    titles = {one: headings(_comments(source_path(one, root))) for one in names(root)}
    taken: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, taken)
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, name, titles)
    return notebook


def _comments(source: Path) -> str:
    """The Markdown of a source: read so, all six take a hundredth of what jupytext takes."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("#"))


def source_text(notebook: NotebookNode) -> str:
    """The notebook as a source file: the cells as they are, under the one header that every source has."""
    settings = {"comment_magics": True, "notebook_metadata_filter": "-all"}
    plain = nbformat.v4.new_notebook(metadata={"jupytext": settings})
    for cell in notebook.cells:
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        plain.cells.append(make(unlinked(cell.source), metadata=_kept_metadata(cell)))
    body = str(jupytext.writes(plain, fmt=SOURCE_FORMAT))
    return HEADER + re.sub(r"\A# ---\n.*?\n# ---\n\n", "", body, flags=re.DOTALL)


def execute(notebook: NotebookNode, root: Path = ROOT, timing: bool = False) -> None:
    """Run all cells in one kernel whose folder is `chapters/`, as JupyterLab does. The outputs go into the notebook,
    with `timing` also each cell's start and end.
    """
    environment = dict(os.environ)
    os.environ.update(reference_environment(root))
    try:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_SECONDS,
            kernel_name=KERNEL["name"],
            store_widget_state=False,
            coalesce_streams=True,  # how its pieces were cut depends on timing
            record_timing=timing,
            resources={"metadata": {"path": str(root / "chapters")}},
        )
        try:
            client.execute()
        except RuntimeError as error:
            if NEVER_READY not in str(error):
                raise
            client.execute()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def reference_environment(root: Path = ROOT) -> dict[str, str]:
    """The environment of a chapter's kernel when the outputs are to be the same everywhere.

    Output is shown rank by rank, and `%check` grades the reference instead of what a learner has written.
    """
    return {
        "LOCKSTEP_ORDERED": "1",
        "LOCKSTEP_SUBMISSION": str(root / "solutions"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def rules(root: Path = ROOT) -> Rules:
    """A function that replaces what may differ between two runs of the same cell, as `nbval_sanitize.cfg` says."""
    # The two lines of a rule exactly as nbval reads them (get_sanitize_patterns), so that both agree.
    told = (root / "chapters" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    pairs = [(re.compile(a), b) for a, b in re.findall(r"^regex: (.*)$\n^replace: (.*)$", told, re.MULTILINE)]
    return lambda text: reduce(lambda kept, pair: pair[0].sub(pair[1], kept), pairs, text)


def _agrees(name: str, root: Path) -> bool:
    target = notebook_path(name, root)
    if not target.exists():
        return False
    stored = nbformat.read(target, as_version=4)
    return _text(stored) == _text(read_source(name, root))


def _text(notebook: NotebookNode) -> list[tuple[str, str, str]]:
    return [(cell.cell_type, cell.source, repr(sorted(_kept_metadata(cell).items()))) for cell in notebook.cells]


def _kept_metadata(cell: NotebookNode) -> dict[str, Any]:
    """A cell's metadata, without what JupyterLab adds when a notebook is looked at."""
    passing = ("execution", "collapsed", "scrolled", "jupyter", "trusted", "editable", "slideshow")
    return {key: value for key, value in cell.metadata.items() if key not in passing}


def _cell_id(cell: NotebookNode, taken: set[str]) -> str:
    """An id that a cell keeps when cells are inserted before it, and loses when its text changes."""
    return unused(hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8], taken)


def _tidy(notebook: NotebookNode, before: NotebookNode | None, same: Rules) -> None:
    """Make the stored outputs independent of the run that made them."""
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL))
    known = {cell.id: cell for cell in before.cells} if before else {}
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if "data" in output:
                output.data.pop(WIDGET, None)
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}"]
        cell.outputs = [output for output in cell.outputs if output.get("data", True)]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    alike = {
        cell.id: known[cell.id].outputs
        for cell in code
        if cell.id in known and _canonical(known[cell.id].outputs, same) == _canonical(cell.outputs, same)
    }
    measured = {cell.id for cell in code if MEASURED in str(cell.outputs)}
    if not measured <= alike.keys():  # pictures are read together: all of one run
        alike = {cell: outputs for cell, outputs in alike.items() if cell not in measured}
    for cell in code:
        if cell.id in alike:
            cell.outputs = alike[cell.id]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count
    cover(notebook)


def cover(notebook: NotebookNode) -> None:
    """Fold the outputs of the cells that answer a "Predict". JupyterLab unfolds one at a click, or when it runs."""
    asked = answered = False
    for cell in notebook.cells:
        if cell.cell_type != "code":
            asked = bool(PREDICT.search(cell.source)) or (asked and not answered and not HEADING.search(cell.source))
            answered = False
        elif asked:
            answered = True
            if cell.outputs and not cell.source.startswith("%%writefile"):
                cell.metadata["jupyter"] = {"outputs_hidden": True}


def _canonical(value: Any, same: Rules) -> Any:
    """Outputs without anything that may differ between two runs, text by text, as nbval does it."""
    if isinstance(value, str):
        return same(value)
    if isinstance(value, dict):
        return {key: _canonical(item, same) for key, item in value.items() if key != "execution_count"}
    if isinstance(value, list):
        return [_canonical(item, same) for item in value]
    return value
