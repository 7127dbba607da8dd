"""`lockstep lab`: the course in JupyterLab."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .grading.course import Course

SETTINGS = {
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": '{"fetchNews": "false", "checkForUpdates": false}',
}


def first_page(course: Course) -> Path | None:
    """The first chapter that is there."""
    for chapter in course.chapters:
        page = course.root / "chapters" / f"{chapter.name}.ipynb"
        if page.is_file():
            return page
    return None


def trust_chapters(course: Course) -> None:
    """Sign the chapters as `jupyter trust` does: of a notebook that is not signed JupyterLab hides the stored pictures, and
    chapter 1 would begin with a line of text where they are to be seen. They are as much the course's own as the code that
    is about to be started. Where nothing can be kept, nothing is: the pictures come when a cell is run.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    with contextlib.suppress(OSError, sqlite3.Error):
        notary: Any = NotebookNotary()  # type: ignore[no-untyped-call]
        for chapter in course.chapters:
            page = course.root / "chapters" / f"{chapter.name}.ipynb"
            with contextlib.suppress(OSError, nbformat.reader.NotJSONError, nbformat.ValidationError):
                notebook = nbformat.read(page, as_version=4)  # type: ignore[no-untyped-call]
                if not notary.check_signature(notebook):
                    notary.sign(notebook)


def open_lab(course: Course, arguments: list[str]) -> int:
    """Start JupyterLab in the course's folder at its first page, and wait until it ends."""
    page = first_page(course)
    trust_chapters(course)
    settings = course.workspace / "jupyter"
    overrides = settings / "settings"
    for name, text in SETTINGS.items():
        file = overrides / name
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "LOCKSTEP_COURSE": str(course.root),
    }
    environment.setdefault("JUPYTERLAB_SETTINGS_DIR", str(overrides))
    source = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={course.root}", "--ServerApp.log_level=ERROR"]
    if page is not None:
        command.append(f"--LabApp.default_url=/lab/tree/{page.relative_to(course.root)}")
    server = subprocess.Popen([*command, *arguments], env=environment, cwd=course.root)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: server.terminate())
    threading.Thread(
        target=_announce, args=(server, page.relative_to(course.root) if page else None), daemon=True
    ).start()
    try:
        return server.wait()
    except KeyboardInterrupt:  # the server has got it as well, and asks or ends by itself
        try:
            return server.wait(timeout=10) and 0
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            server.terminate()
            return 0
    finally:
        if server.poll() is None:
            server.terminate()


def _announce(server: subprocess.Popen[bytes], page: Path | None) -> None:
    """Say where the server is, once it has written that down itself."""
    from jupyter_core.paths import jupyter_runtime_dir

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
        print(f"JupyterLab is at {found['url']}{where}{token}   (Ctrl-C stops it)", flush=True)
        return
