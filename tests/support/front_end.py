"""JupyterLab as `./lockstep lab` starts it, on a copy of the course, and what a person does in it with a browser."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from . import ROOT

START_SECONDS = 180
CELL_SECONDS = 180
SCREENSHOTS = os.environ.get("LOCKSTEP_SCREENSHOTS")


@dataclass
class Lab:
    """A running server. `course` is its own copy of the course, as a learner gets it: no exercise is written."""

    course: Path
    address: str
    token: str

    def url(self, notebook: str) -> str:
        """Where a notebook of `chapters/` is opened, in a fresh arrangement of windows."""
        return f"{self.address}lab/tree/chapters/{notebook}?token={self.token}&reset"

    def said(self) -> list[str]:
        """The lines in the terminal in which `./lockstep lab` was typed."""
        return (self.course.parent / "lab.log").read_text(encoding="utf-8").splitlines()

    def progress(self) -> dict[str, Any]:
        """What has been recorded of the learner."""
        file = self.course / ".lockstep" / "progress.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


@contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """Start the server on a copy of the course in `folder`, on a free port; end it and all that it started."""
    course = folder / "course"
    for part in ("autograder", "chapters", "exercises"):
        shutil.copytree(ROOT / part, course / part, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    (folder / "home").mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "JUPYTER"))}
    environment |= {
        "HOME": str(folder / "home"),
        "LOCKSTEP_COURSE": str(course),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "lockstep", "lab", "--no-browser", "--ServerApp.port=0"]
    command += ["--allow-root"] if os.geteuid() == 0 else []
    with open(folder / "lab.log", "w+", encoding="utf-8") as log:
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
        server = subprocess.Popen(
            command, cwd=course, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        signal.signal(signal.SIGINT, usual)
        try:
            said = wait_for(lambda: _announced(folder / "lab.log", server), START_SECONDS, "JupyterLab does not start")
            yield Lab(course, *said)
        finally:
            os.killpg(server.pid, signal.SIGINT)  # as Ctrl-C
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):  # JupyterLab may hang in its own end, and outlive the command
                os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=20)
        assert "Shut down" not in (folder / "lab.log").read_text(encoding="utf-8"), "Ctrl-C stops it, and asks nothing"


def _announced(log: Path, server: subprocess.Popen[bytes]) -> tuple[str, str] | None:
    text = log.read_text(encoding="utf-8")
    assert server.poll() is None, f"./lockstep lab ended: {text}"
    found = re.search(r"^(http://\S+?/)lab/tree/start\.ipynb\?token=(\w+)$", text, re.MULTILINE)
    return (found[1], found[2]) if found else None


def wait_for(answer: Callable[[], Any], seconds: float, complaint: str) -> Any:
    """The first answer that is true. Fails with the complaint when there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = answer()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{complaint} within {seconds:.0f} s")


class Notebook:
    """An open notebook."""

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name
        page.set_default_timeout(120_000)
        page.goto(lab.url(name))
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.panel.locator(".jp-Cell").first.wait_for()
        # What is asked before the kernel has answered for the first time is dropped without a word.
        page.locator(".jp-StatusBar-TextItem, .jp-StatusBar-GroupItem", has_text="| Idle").first.wait_for()

    @property
    def file(self) -> Path:
        """Where it is saved: a chapter's is the learner's copy."""
        own = self.lab.course / "chapters" / self.name
        return next(own.parent.glob(f"mine/{own.stem}.*"), own)

    def menu(self, *names: str) -> None:
        """Choose an entry of the menu bar: `menu("Run", "Run All Cells")`."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{names[0]}$")).click()
        for name in names[1:]:
            self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(name)}$")).last.click()

    def cell(self, text: str) -> Any:
        """The cell that contains this text, scrolled into view."""
        found = self.panel.locator(".jp-Cell", has_text=text).first
        found.scroll_into_view_if_needed()
        return found

    def start(self, cell: Any) -> None:
        """Press Shift+Enter in a cell."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, cell: Any) -> str:
        """Run a cell and wait until it is through. Returns the text of its output."""
        prompt = cell.locator(".jp-InputArea-prompt")
        before = prompt.inner_text()
        self.start(cell)
        now = lambda: prompt.inner_text()  # noqa: E731
        wait_for(lambda: now() != before and re.search(r"\[\d+\]", now()), CELL_SECONDS, "the cell is not through")
        area = cell.locator(".jp-Cell-outputArea")
        return str(area.inner_text()) if area.count() else ""

    def run_all(self, seconds: float) -> list[Any]:
        """Run the notebook top to bottom and save it. Returns its code cells as they are on disk then."""
        self.menu("Edit", "Clear Outputs of All Cells")
        self.menu("Run", "Run All Cells")

        def through() -> list[Any] | None:
            self.page.keyboard.press("Control+s")
            self.page.wait_for_timeout(2000)
            try:
                notebook = nbformat.read(self.file, as_version=4)
            except nbformat.reader.NotJSONError:
                return None  # JupyterLab is in the middle of writing it
            cells = [one for one in notebook.cells if one.cell_type == "code"]
            failed = [one for one in cells if any(output.output_type == "error" for output in one.outputs)]
            done = all(one.execution_count for one in cells)
            return cells if done or failed else None

        return list(wait_for(through, seconds, f"{self.file.name} is not through"))


def picture(target: Any, name: str) -> None:
    """Keep a picture of what the page or a part of it shows, where LOCKSTEP_SCREENSHOTS names a folder."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        getattr(target, "page", target).wait_for_timeout(1500)  # until what moves has come to rest
        target.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))
