"""`lockstep lab`: the course in JupyterLab."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .. import authoring  # noqa: F401  it makes the import of nbformat a second shorter
from ..bootstrap import Trouble, refuse_root
from ..course import Course, CourseError
from ..course.copies import chapter_file, set_aside
from ..course.standing import standing
from ..ranks.client import child_environment

LOOKS = Path(__file__).with_name("jupyterlab")
SETTINGS = {  # JupyterLab asks nobody for news; an exercise stands beside its chapter, in half a window
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "fileeditor-extension/plugin": {"editorConfig": {"lineNumbers": True, "lineWrap": True}},
}
"""What a course's JupyterLab starts with, by the setting's file. Learners can change it: a file that is there stays."""


def pages(course: Course) -> list[Path]:
    """The notebooks of the chapters that are there, in order."""
    return [page for chapter in course.chapters if (page := course.page(chapter.name)).is_file()]


def first_page(course: Course) -> Path | None:
    """The chapter in which the learner goes on; the first one before the first try, and where they cannot be read."""
    there = pages(course)
    with contextlib.suppress(CourseError):
        if (now := standing(course)).upcoming is not None:
            return now.upcoming[0].file
    return next(iter(there), None)


def start_page(course: Course) -> Path | None:
    """The page with the map, as it is now; where none can be written, the chapter in which the learner goes on."""
    from ..notebook.start_page import write_start_page

    with contextlib.suppress(OSError):
        return write_start_page(course)
    return first_page(course)


def trust(notebooks: list[Path]) -> None:
    """Sign the course's notebooks as `jupyter trust` does. JupyterLab hides the stored pictures of a notebook that is
    not signed, and these are as much the course's own as the code that is about to start. If nothing can be signed,
    the pictures appear when their cells are run.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    with contextlib.suppress(OSError, sqlite3.Error):
        notary: Any = NotebookNotary()  # type: ignore[no-untyped-call]
        for page in notebooks:
            with contextlib.suppress(OSError, nbformat.reader.NotJSONError, nbformat.ValidationError):
                notebook = nbformat.read(page, as_version=4)  # type: ignore[no-untyped-call]
                if not notary.check_signature(notebook):
                    notary.sign(notebook)


def open_lab(course: Course, arguments: list[str]) -> int:
    """Start JupyterLab in the course's folder, at the page with the map, and wait until it ends."""
    from jupyter_core.paths import jupyter_config_dir

    try:
        refuse_root(arguments)
    except Trouble as refusal:
        raise CourseError(str(refusal)) from None
    with contextlib.suppress(OSError):
        for name, kept in set_aside(course):
            print(f"{name} has been updated. The one that you ran is kept as chapters/{kept.name}.")
    page = start_page(course)
    if page is not None:
        trust([page])
    overrides = course.workspace / "jupyter" / "settings"
    for name, values in SETTINGS.items():
        file = overrides / "@jupyterlab" / f"{name}.jupyterlab-settings"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values), encoding="utf-8")
    environment = {**child_environment(), "LOCKSTEP_COURSE": str(course.root)}
    environment.setdefault("JUPYTERLAB_SETTINGS_DIR", str(overrides))
    # Kernels that know the course's magics before the first cell has run.
    environment["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(LOOKS), environment.get("JUPYTER_PATH")]))
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={course.root}"]
    # Without encryption each kernel warns in this terminal.
    command += ["--Application.log_level=CRITICAL", "--KernelManager.transport_encryption=auto"]
    # Jupyter prints three addresses; `_announce` prints the one of the course.
    quiet = {"filters": {"quiet": {"()": f"{__package__}.contents.WithoutAddress"}}}
    command.append(f"--ServerApp.logging_config={quiet | {'handlers': {'console': {'filters': ['quiet']}}}}")
    # The file browser without the course's machinery; exercises that open beside a chapter.
    command += [f"--ServerApp.contents_manager_class={__package__}.contents.CourseFiles"]
    # Ctrl-C stops it, and it asks nothing.
    command += ["--LabApp.expose_app_in_browser=True", "--ServerApp.answer_yes=True"]
    if not (Path(jupyter_config_dir()) / "custom" / "custom.css").is_file():  # theirs, if they have one
        looks = {"static_custom_path": [str(LOOKS)]}
        command += ["--LabApp.custom_css=True", f"--ServerApp.tornado_settings={looks}"]
    if page is not None:
        command.append(f"--LabApp.default_url=/lab/tree/{page.relative_to(course.root)}")
    server = subprocess.Popen([*command, *arguments], env=environment, cwd=course.root)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: server.terminate())
    there = page.relative_to(course.root) if page else None
    threading.Thread(target=_announce, args=(course, server, there), daemon=True).start()
    try:
        return server.wait()
    except KeyboardInterrupt:  # the server has received it too, and ends by itself
        try:
            return server.wait(timeout=10) and 0
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            server.terminate()
            return 0
    finally:
        if server.poll() is None:
            server.terminate()


def _announce(course: Course, server: subprocess.Popen[bytes], page: Path | None) -> None:
    """Do what can be done while the server starts; then print where it is, once it has written its own note of that."""
    from jupyter_core.paths import jupyter_runtime_dir

    trust([chapter_file(course, page.stem) for page in pages(course)])
    note = Path(jupyter_runtime_dir()) / f"jpserver-{server.pid}.json"
    for _ in range(600):
        if server.poll() is not None:
            return
        try:
            found = json.loads(note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            time.sleep(0.1)
            continue
        token = f"?token={found['token']}" if found.get("token") else ""
        where = f"lab/tree/{page}" if page else "lab"
        print("JupyterLab is at this address (Ctrl-C stops it):", flush=True)
        print(f"{found['url']}{where}{token}", flush=True)  # unbroken on its own line, a terminal makes it a link
        if found["hostname"] in ("0.0.0.0", "::"):  # a container's own name means nothing outside of it
            print(f"{found['url'].replace(f'//{socket.gethostname()}:', '//localhost:')}{where}{token}", flush=True)
        return
