"""The foreign bank: small jobs that use the libraries of real ones, each broken in a few lines, under `lockstep run`.

`tests/foreign/jobs/NAME.py` is a job, `NAME.toml` its bugs:

    n = 3                        # ranks, for the whole file or for one bug; 3 if nothing is said
    needs = "accelerate"         # a library; without it the file's bugs are skipped
    spawns = true                # the script starts its ranks itself

    [[bug]]
    name = "a rank raises"
    old = "optimizer.step()"     # one line of the script, the only one that is so without its indentation
    new = '''...'''              # what stands there instead
    more = [["old", "new"]]      # other such changes
    flags = ["--watch-replicas"]
    stuck = true                 # the run goes on for ever: it is judged by what is said meanwhile, and then ended
    cause = ["ValueError: no"]   # patterns that the explanation must contain, each of them
    ranks = [1]                  # whom it must accuse; [] is nobody, [[0], [1, 2]] the one or the others
    at = "raise ValueError()"    # the line that it must name first; a list is one of several; "text#2" the second such line

What must be said was written from the bug, not from what is said.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from lockstep.commands import run as command
from lockstep.ranks import text as words

from . import ROOT

JOBS = ROOT / "tests/foreign/jobs"
DEADLINE = 90.0
"""Seconds. Nothing that is explained needs as long, on any machine."""
AFTER_NOTICE = 1.0
HEAD = rf"^({'|'.join(words.TITLES.values())}|MIXED UP|DRIFT|SAME WORK|NaN|inf)\b"
GOES_ON = "The run goes on."
ENVIRONMENT = {"OUT": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "200"}


@dataclass(frozen=True)
class Bug:
    """One change to a job, and what has to be said of it."""

    job: str
    name: str
    changes: tuple[tuple[str, str], ...]
    cause: tuple[str, ...]
    ranks: tuple[frozenset[int], ...]
    at: tuple[str, ...]
    n: int
    flags: tuple[str, ...]
    stuck: bool
    spawns: bool
    needs: str

    def __str__(self) -> str:
        return f"{self.job}: {self.name}"

    def script(self) -> str:
        """The job with this bug in it."""
        return changed((JOBS / f"{self.job}.py").read_text(), self.changes)

    def lines(self) -> set[int]:
        """The numbers of the lines that may be named first."""
        source = [line.strip() for line in self.script().splitlines()]
        found: set[int] = set()
        for wanted in self.at:
            text, _, which = wanted.partition("#") if re.search(r"#\d+$", wanted) else (wanted, "", "")
            numbers = [number for number, line in enumerate(source, 1) if line == text]
            if not numbers:
                raise ValueError(f"{self}: no line is {text!r}")
            found |= {numbers[int(which) - 1]} if which else set(numbers)
        return found


@dataclass(frozen=True)
class Told:
    """What was said of a run: whom it accuses (every rank and no rank are the same), and which line it names first."""

    text: str
    accused: frozenset[int]
    line: int | None
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What is right of what was told."""

    cause: bool
    ranks: bool
    line: bool
    wrongly: bool

    @property
    def word(self) -> str:
        """right, partly or not."""
        if self.cause and self.ranks and self.line:
            return "right"
        return "partly" if not self.wrongly and (self.cause or (self.ranks and self.line)) else "not"


def bugs() -> Iterator[Bug]:
    """The whole bank."""
    for file in sorted(JOBS.glob("*.toml")):
        table = tomllib.loads(file.read_text())
        for entry in table["bug"]:
            yield _bug(file.stem, table, entry)


def _bug(job: str, table: dict[str, Any], entry: dict[str, Any]) -> Bug:
    ranks, at = entry["ranks"], entry["at"]
    return Bug(
        job=job,
        name=entry["name"],
        changes=((entry["old"], entry["new"]), *((old, new) for old, new in entry.get("more", []))),
        cause=tuple(entry["cause"]),
        ranks=tuple(map(frozenset, ranks)) if ranks and isinstance(ranks[0], list) else (frozenset(ranks),),
        at=tuple(at) if isinstance(at, list) else (at,) if at else (),
        n=entry.get("n", table.get("n", 3)),
        flags=tuple(entry.get("flags", ())),
        stuck=entry.get("stuck", False),
        spawns=table.get("spawns", False),
        needs=table.get("needs", ""),
    )


def changed(source: str, changes: tuple[tuple[str, str], ...]) -> str:
    """The source with each line `old` replaced by the lines of `new`, indented as it was."""
    lines = source.splitlines()
    where = []
    for old, new in changes:
        found = [number for number, line in enumerate(lines) if line.strip() == old]
        if len(found) != 1:
            raise ValueError(f"{len(found)} lines are {old!r}")
        where.append((found[0], new))
    for number, new in sorted(where, reverse=True):
        margin = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines[number : number + 1] = [margin + line if line else "" for line in new.strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


def lacking(bug: Bug) -> str:
    """The reason why this bug can't be played here, or nothing."""
    return f"{bug.needs} is not installed" if bug.needs and importlib.util.find_spec(bug.needs) is None else ""


def play(bug: Bug) -> Told:
    """Run the job with its bug, as a user would. Only in the main thread, which gets the Ctrl-C."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{bug.job}.py")
        script.write_text(bug.script())
        said = run(script, bug.n, bug.flags, bug.spawns, bug.stuck)
    return read(said, bug, time.monotonic() - began)


def run(script: Path, n: int, flags: tuple[str, ...] = (), spawns: bool = False, stuck: bool = False) -> str:
    """What `lockstep run` says on stderr. If the run is `stuck`, it is ended by Ctrl-C once it was told so.

    The command is called in this process: the one that starts ranks imports torch once for the whole bank.
    """
    ranks = ["--spawns"] if spawns else ["-n", str(n)]
    arguments = [*ranks, "--deadline", str(DEADLINE), *flags, str(script)]
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT, OUT=str(script.parent))
    said = _Listener(stuck)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            command.main(arguments)
    finally:
        said.stop()
        signal.signal(signal.SIGINT, usual)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return said.getvalue()


class _Listener(io.StringIO):
    """Takes what is said, and presses Ctrl-C a moment after the notice that a run is stuck."""

    def __init__(self, stuck: bool) -> None:
        super().__init__()
        self.expected = stuck
        self.timer = threading.Timer(AFTER_NOTICE, os.kill, (os.getpid(), signal.SIGINT))

    def write(self, text: str) -> int:
        if self.expected and GOES_ON in text:
            self.expected = False
            self.timer.start()
        return super().write(text)

    def stop(self) -> None:
        """A run that ended by itself needs no Ctrl-C."""
        self.timer.cancel()


def read(said: str, bug: Bug, seconds: float) -> Told:
    """Whom the text accuses, and of which line it speaks first."""
    lines = [line for line in said.splitlines() if not re.match(r"\[rank \d+\] |As torchrun: ", line)]
    text = "\n".join(lines)
    if bug.stuck:
        text = text.partition("\nInterrupted")[0]
        waits = re.search(r"for (ranks? [\d, and]+)\. " + GOES_ON, text)
        line = re.search(r"(?:rank \d+|process \d+) is at \S+\.py:(\d+)(?!.*process \d+ is at)", text)
        return Told(
            text, _accused(_ranks(waits[1]) if waits else set(), bug.n), int(line[1]) if line else None, seconds
        )
    head = explanation(text)
    line = re.search(r"[\w.]+\.py:(\d+)", head)
    return Told(text, _accused(_blamed(head, text), bug.n), int(line[1]) if line else None, seconds)


def explanation(said: str) -> str:
    """The first sentences of what is said of a run; nothing if all is well."""
    found = re.search(HEAD, said, re.MULTILINE)
    return " ".join(said[found.start() :].partition("\n\n")[0].split()) if found else ""


def _blamed(head: str, text: str) -> set[int]:
    rows = re.findall(r"^ +(\d+)( ←)?  ", text, re.MULTILINE)
    if rows:
        return {int(rank) for rank, arrow in rows if arrow}
    if head.startswith(("NaN", "inf")):
        alone = re.search(r"only on (ranks? [\d, and]+);", head)
        return _ranks(alone[1]) if alone else set()
    if head.startswith("DRIFT"):
        on = re.search(r"on (ranks? [\d, and]+) differs", head)
        return _ranks(on[1]) if on else set()
    if sides := [_ranks(one) for one in re.findall(r"(ranks? [\d, and]+) called (?:new_group|it) for", head)]:
        few = min(map(len, sides))
        return set().union(*(one for one in sides if len(one) == few))
    named = re.search(r"ranks? [\d, and]+", head)
    return _ranks(named[0]) if named and "every rank" not in head else set()


def _ranks(named: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", named)}


def _accused(ranks: set[int], n: int) -> frozenset[int]:
    """Whom all are accused with, nobody is."""
    return frozenset(ranks) if len(ranks) < n else frozenset()


def judge(bug: Bug, told: Told) -> Verdict:
    """Compare what was told with what has to be."""
    flat = " ".join(told.text.split())
    expected = [_accused(set(ranks), bug.n) for ranks in bug.ranks]
    lines = bug.lines()
    return Verdict(
        cause=all(re.search(pattern, flat) for pattern in bug.cause),
        ranks=told.accused in expected,
        line=told.line in lines or not lines,
        wrongly=bool(told.accused) and not any(told.accused <= ranks for ranks in expected),
    )
