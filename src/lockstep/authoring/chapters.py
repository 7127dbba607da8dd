"""A chapter's source and its notebook: `chapters/source/NAME.py` <-> `chapters/NAME.ipynb`.

People write and review the source (jupytext's py:percent). Learners open the notebook, which holds the outputs, so
that it can be read without running it and so that `pytest --nbval chapters` can tell when a claim has become false.

    python -m lockstep.authoring.chapters build 02_setup     run the source, write the notebook
    python -m lockstep.authoring.chapters update 02_setup    take over into the source what was edited in JupyterLab
    python -m lockstep.authoring.chapters stale              name the notebooks that their source has overtaken

A build is reproducible to the byte. Cell ids come from the cells' text; execution counts are renumbered (nbval takes a cell
without one for a cell that was not run); widgets are stored as the text beside them, since their models live in a kernel.
What remains are the few things that differ in every run (`chapters/nbval_sanitize.cfg`: how long a hang was watched, a
port). Those are real readings and stay as they were, as long as the output says the same apart from them (`fresh` takes
this run's).
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from ..grading.course import CourseError

ROOT = Path(__file__).resolve().parents[3]
CELL_TIMEOUT_SECONDS = 240  # chapter 5 checks a batch script on a SLURM cluster of its own
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
WIDGET = "application/vnd.jupyter.widget-view+json"
SOURCE_FORMAT = "py:percent"
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


class BuildError(CourseError):
    """A chapter that does not run through; the message names the cell."""


@dataclass(frozen=True)
class Length:
    """How much there is to read: words of text, and lines of code that are neither empty nor imports nor magics."""

    words: int
    code_lines: int

    @property
    def minutes(self) -> float:
        """At 200 words and 20 lines a minute: the pace by which the chapters' minutes were counted."""
        return self.words / 200 + self.code_lines / 20


def length(notebook: NotebookNode) -> Length:
    """How much a chapter gives to read."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    lines = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    return Length(
        sum(len(text.split()) for text in texts),
        sum(bool(line.strip()) and not line.startswith(("import ", "from ", "%")) for line in lines),
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
    """The cell at which a run of this notebook ended, and how: the last one that began."""
    began = [
        (number, cell)
        for number, cell in enumerate(notebook.cells)
        if cell.get("execution_count") or cell.get("outputs")
    ]
    number, cell = began[-1] if began else (0, notebook.cells[0])
    first = next((line for line in cell.source.splitlines() if line.strip()), "")
    if isinstance(error, CellExecutionError):
        how = f"{error.ename}: {error.evalue}"
    elif isinstance(error, CellTimeoutError):
        how = f"it did not end within {CELL_TIMEOUT_SECONDS} s"
    else:
        how = f"{type(error).__name__}: the kernel has died"
    return f"chapters/source/{name}.py: the cell {first!r} (number {number}, counted from 0) failed. {how}"


def update_sources(chosen: Iterable[str] | None = None, root: Path = ROOT) -> list[Path]:
    """Take over into the sources what was edited in the notebooks. Returns the paths of the sources that changed."""
    changed = []
    for name in chosen or names(root):
        notebook = nbformat.read(notebook_path(name, root), as_version=4)
        target = source_path(name, root)
        text = source_text(notebook)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            changed.append(target)
    return changed


def stale(chosen: Iterable[str] | None = None, root: Path = ROOT) -> list[str]:
    """The chapters whose notebook is missing or holds other cells than their source."""
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
    taken: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, taken)
    return notebook


def source_text(notebook: NotebookNode) -> str:
    """The notebook as a source file: the cells as they are, under the one header that every source has."""
    settings = {"comment_magics": True, "notebook_metadata_filter": "-all"}
    plain = nbformat.v4.new_notebook(metadata={"jupytext": settings})
    for cell in notebook.cells:
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        plain.cells.append(make(cell.source, metadata=_kept_metadata(cell)))
    body = str(jupytext.writes(plain, fmt=SOURCE_FORMAT))
    return HEADER + re.sub(r"\A# ---\n.*?\n# ---\n\n", "", body, flags=re.DOTALL)


def execute(notebook: NotebookNode, root: Path = ROOT, timing: bool = False) -> None:
    """Run all cells in one kernel whose folder is `chapters/`, as JupyterLab does. The outputs land in the notebook, with
    `timing` also when each cell began and ended.
    """
    environment = dict(os.environ)
    os.environ.update(reference_environment(root))
    try:
        NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_SECONDS,
            kernel_name=KERNEL["name"],
            store_widget_state=False,
            record_timing=timing,
            resources={"metadata": {"path": str(root / "chapters")}},
        ).execute()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def reference_environment(root: Path = ROOT) -> dict[str, str]:
    """What a chapter's kernel is told when the outputs are to be the same everywhere.

    Ranks print in the order of their ranks, and `%check` grades the reference instead of what a learner has written.
    """
    return {
        "LOCKSTEP_ORDERED": "1",
        "LOCKSTEP_SUBMISSION": str(root / "solutions"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


class Rules:
    """What may differ between two runs of the same cell, from `nbval_sanitize.cfg`."""

    def __init__(self, file: Path) -> None:
        # The two lines of a rule exactly as nbval reads them (get_sanitize_patterns), so that both agree.
        pairs = re.findall(r"^regex: (.*)$\n^replace: (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        self.pairs = [(re.compile(pattern), replacement) for pattern, replacement in pairs]

    def apply(self, text: str) -> str:
        """The text with everything that may differ replaced by its rule's word."""
        for pattern, replacement in self.pairs:
            text = pattern.sub(replacement, text)
        return text


def rules(root: Path = ROOT) -> Rules:
    """The rules of this checkout."""
    return Rules(root / "chapters" / "nbval_sanitize.cfg")


def _agrees(name: str, root: Path) -> bool:
    target = notebook_path(name, root)
    if not target.exists():
        return False
    stored = nbformat.read(target, as_version=4)
    return _text(stored) == _text(read_source(name, root))


def _text(notebook: NotebookNode) -> list[tuple[str, str, str]]:
    return [(cell.cell_type, cell.source, repr(sorted(_kept_metadata(cell).items()))) for cell in notebook.cells]


def _kept_metadata(cell: NotebookNode) -> dict[str, Any]:
    """A cell's metadata apart from what JupyterLab adds while people look at it."""
    passing = ("execution", "collapsed", "scrolled", "jupyter", "trusted", "editable", "slideshow")
    return {key: value for key, value in cell.metadata.items() if key not in passing}


def _cell_id(cell: NotebookNode, taken: set[str]) -> str:
    """An id that a cell keeps when cells are put before it, and loses when its text changes."""
    base = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
    made, number = base, 1
    while made in taken:
        number += 1
        made = f"{base}-{number}"
    taken.add(made)
    return made


def _tidy(notebook: NotebookNode, before: NotebookNode | None, same: Rules) -> None:
    """Make what a run leaves in the notebook independent of the run."""
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL))
    known = {cell.id: cell for cell in before.cells} if before else {}
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if "data" in output and len(output.data) > 1:
                output.data.pop(WIDGET, None)
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}"]
        stored = known.get(cell.id)
        if stored is not None and _canonical(stored.outputs, same) == _canonical(cell.outputs, same):
            for output in stored.outputs:
                if "execution_count" in output:
                    output.execution_count = count
            cell.outputs = stored.outputs


def _joined(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """The outputs with the pieces of one stream put together: how they were cut is a matter of timing."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            first = next((one for one in joined if one.output_type == "stream" and one.name == output.name), None)
            if first is not None:
                first.text += output.text
                continue
        joined.append(output)
    return joined


def _canonical(value: Any, same: Rules) -> Any:
    """Outputs with everything that may differ between two runs taken out, text by text, as nbval does it."""
    if isinstance(value, str):
        return same.apply(value)
    if isinstance(value, dict):
        return {key: _canonical(item, same) for key, item in value.items() if key != "execution_count"}
    if isinstance(value, list):
        return [_canonical(item, same) for item in value]
    return value


def main(arguments: Sequence[str]) -> int:
    """The command line, until the CLI of Lockstep takes over."""
    action, *chosen = arguments or ["stale"]
    if action in ("build", "update"):
        for path in (build if action == "build" else update_sources)(chosen or None):
            print(f"written: {path.relative_to(ROOT)}")
        return 0
    if action == "stale":
        overtaken = stale(chosen or None)
        for name in overtaken:
            print(f"chapters/{name}.ipynb is older than its source: python -m lockstep.authoring.chapters build {name}")
        return 1 if overtaken else 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
