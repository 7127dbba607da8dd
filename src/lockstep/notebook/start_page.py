"""The page that `./lockstep lab` opens: the course map, with where to go on.

It is a notebook, written when the lab starts and whenever JupyterLab reads it, so the map is there before a kernel is.
"""

from __future__ import annotations

import contextlib
import sys
from html import escape
from pathlib import Path

import nbformat
from nbformat import v4

from ..course import Course, CourseError
from ..course.standing import standing
from ..ranks.cards import said
from .course_map import ALONE, as_html

NAME = "start.ipynb"
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
LANGUAGE = {
    "name": "python", "version": ".".join(map(str, sys.version_info[:3])), "mimetype": "text/x-python",
    "codemirror_mode": {"name": "ipython", "version": 3}, "pygments_lexer": "ipython3", "nbconvert_exporter": "python",
    "file_extension": ".py",
}  # fmt: skip
"""What a kernel says of itself. A page without it is changed by being opened, and asks to be saved."""
HEAD = """# Lockstep

Distributed training with PyTorch DDP, taught by running it. The chapters are notebooks: read, run each cell with
**Shift+Enter**, and answer the questions. Your exercises are Python files in the folder `exercises`."""
CELL = "from lockstep.notebook.course_map import course_map\n\ncourse_map()"
FOOT = "In a terminal, `./lockstep status` shows the same, and `./lockstep --help` lists all commands."
"""Below the map: after the last cell of a notebook, Shift+Enter adds an empty one."""
STALE = "As it was when you started the lab. Click here and press Shift+Enter to bring it up to date."

ROOM = """<script>
window.jupyterapp?.restored.then(() => {
  const room = () => {
    if (innerWidth >= 900 || sessionStorage.lockstepRoom) return;
    sessionStorage.lockstepRoom = "made";
    jupyterapp.shell.collapseLeft();
  };
  setTimeout(room, 500);
  addEventListener("resize", room);
});
</script>"""
"""In a narrow window JupyterLab's file browser would leave half of it to the page. It is closed once a tab, also when
the window becomes narrow; who opens it again keeps it.
"""

FOLLOW = """<script>
if (window.jupyterapp) window.lockstepFollow ??= (() => {
  const shell = jupyterapp.shell;
  const drawn = (page) => [page.cells[1]?.outputs[0]?.data?.["text/html"]].flat().join("");
  const follow = async () => {
    const page = shell.currentWidget?.context;
    if (page?.path !== "start.ipynb" || page.model.dirty) return;
    const now = await jupyterapp.serviceManager.contents.get(page.path, { content: true });
    if (drawn(now.content) !== drawn(page.model.toJSON())) await page.revert();
  };
  shell.currentChanged.connect(follow);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) follow() });
  document.head.insertAdjacentHTML("beforeend", "<style>.ls-stale { display: none }</style>");
  return true;
})();
</script>"""
"""Where `./lockstep lab` lets a page speak to JupyterLab, it is read again when its tab or the browser's is chosen."""


def write_start_page(course: Course) -> Path:
    """Write it into the course's folder, if it isn't there as it is now. A chapter that cannot be read is named in the
    place of the map.
    """
    try:
        now = standing(course)
        shown = f'<p class="ls-soft ls-stale">{STALE}</p>{as_html(course, now, folder=course.root)}'
    except CourseError as unreadable:
        shown = f"<p>{escape(str(unreadable))}</p>"
    output = v4.new_output(
        "display_data", {"text/html": said(ALONE + shown + ROOM + FOLLOW), "text/plain": "CourseMap()"}
    )
    hidden = {"jupyter": {"source_hidden": True}}
    cells = [
        v4.new_markdown_cell(HEAD, id="head"),
        v4.new_code_cell(CELL, id="map", metadata=hidden, outputs=[output]),
        v4.new_markdown_cell(FOOT, id="foot"),
    ]
    file = course.root / NAME
    metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    text = nbformat.writes(v4.new_notebook(cells=cells, metadata=metadata)) + "\n"
    with contextlib.suppress(OSError):
        if file.read_text(encoding="utf-8") == text:
            return file
    file.write_text(text, encoding="utf-8")
    return file
