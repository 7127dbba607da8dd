"""`lockstep lab`: the course in JupyterLab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def open_lab(course: Course, arguments: list[str]) -> int:
    """Start JupyterLab in the course's folder at its first page, and wait until it ends."""
    page = first_page(course)
    settings = course.workspace / "jupyter"
    overrides = settings / "settings"
    for name, text in SETTINGS.items():
        file = overrides / name
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "LOCKSTEP_COURSE": str(course.root)}
    environment.setdefault("JUPYTERLAB_SETTINGS_DIR", str(overrides))
    source = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={course.root}"]
    if page is not None:
        command.append(f"--LabApp.default_url=/lab/tree/{page.relative_to(course.root)}")
    try:
        return subprocess.call([*command, *arguments], env=environment, cwd=course.root)
    except KeyboardInterrupt:
        return 0
