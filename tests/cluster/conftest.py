"""What every test of the cluster has to prove besides: nothing is left on the machine when it is over."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
from support import ROOT
from support.leftovers import MARK
from support.machine import remains

from lockstep import ranks


@pytest.fixture(scope="session", autouse=True)
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Others may use this machine at the same time, so what belongs to these tests has to be told by its marks."""
    ranks.stop()
    name, value = MARK.split("=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield
        ranks.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(marked: None) -> Iterator[None]:
    """After each test: no process, namespace, link, mount, queue, file or name that was not there before."""
    before = remains()
    yield
    give_up = time.monotonic() + 5
    while (new := remains() - before) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not new, f"left: {sorted(new)}"


NOBODY = 65534


@functools.cache
def _nobody_cannot() -> str:
    """Why an ordinary user could not run this Python; empty when they can."""
    if os.getuid():
        return "this is an ordinary user already"
    code = "import torch, lockstep.ranks"
    try:
        tried = subprocess.run([sys.executable, "-c", code], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
                               env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)  # fmt: skip
        can = tried.returncode == 0
    except OSError:
        can = False
    return "" if can else "an ordinary user cannot read this Python, or this checkout"


@pytest.fixture(params=["this user", "an ordinary user"])
def python(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Run Python code in a process of its own, as this user and, where this is root, as an ordinary one.

    Returns what it printed; `wrapped` comes before the command.
    """
    ordinary = request.param != "this user"
    if ordinary and (why := _nobody_cannot()):
        pytest.skip(f"not run: {why}")
    folder = tempfile.mkdtemp(dir="/var/tmp")
    os.chmod(folder, 0o777)
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", folder]))

    def run(code: str, *wrapped: str, status: int = 0) -> str:
        as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if ordinary else {}
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": folder, "HOME": folder}
        done = subprocess.run([*wrapped, sys.executable, "-c", code], cwd=folder, env=environment, timeout=120,
                              capture_output=True, text=True, **as_user)  # type: ignore[call-overload]  # fmt: skip
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    return run
