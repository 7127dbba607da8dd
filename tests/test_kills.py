"""The reference checkpoint is killed at more than 200 instants of a save, and its file is damaged in thousands of ways.

The scenario is the grader's own, with smaller pieces: each piece of a write is an operation, and before it and in its
middle a process of its own dies by SIGKILL. What is left on the disk is loaded, and saved to once more.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from lockstep import ranks
from lockstep.ranks.rank import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
AT_LEAST = 200


def play(scenario: str, submission: Path, folder: Path, **kwargs: object) -> ranks.Run:
    """One scenario of the exercise on one rank."""
    stage = ROOT / "autograder" / "scenarios" / "checkpoint.py"
    target = ranks.Function("lockstep.grading.on_rank", "play", {
        "scenario_file": str(stage), "scenario": scenario, "submission": str(submission), "kwargs": kwargs,
    })  # fmt: skip
    return ranks.run(target, 1, deadline=240, idle_limit=30, directory=folder)


def outcomes(run: ranks.Run) -> Counter[str]:
    """What load_latest gave after each kill."""
    found: Counter[str] = Counter()
    for one in run.observed("seen")[0]:
        numbers = one["loaded"]
        if one["error"] or not numbers:
            found["nothing"] += 1
        elif len(numbers) > 1:
            found["a mixture"] += 1
        else:
            found["the older" if numbers == [1.0] else "the new" if numbers == [2.0] else "another"] += 1
    return found


def test_the_reference_survives_every_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = play("kills", ROOT / "solutions" / "checkpoint.py", tmp_path, chunk=128, most=10_000)
    assert run.cause is None, run.cause
    instants, seen, ends = (run.observed(name)[0] for name in ("instants", "seen", "ends"))
    found = outcomes(run)
    with capsys.disabled():
        print(f"\n{ends.count('killed')} saves killed at {len(instants)} different instants: load_latest gave "
              f"the older checkpoint {found['the older']} times, the new one {found['the new']} times")  # fmt: skip
    assert len(instants) >= AT_LEAST and ends == ["killed"] * len(instants)
    assert [one["instant"] for one in seen] == list(range(len(instants)))
    assert set(found) == {"the older", "the new"}, found
    # Once the new one has been seen, nothing later brings the older one back.
    numbers = [one["loaded"] for one in seen]
    assert numbers == sorted(numbers)
    assert [one["again"]["loaded"] for one in seen] == [[3.0]] * len(seen)
    assert {len(one["afterwards"]) for one in seen} == {1}, "a killed save has left something for good"
    assert not any(one["warned"] for one in seen), "a torn file was met under a checkpoint's name"


def test_these_kills_break_what_is_written_in_place(tmp_path: Path) -> None:
    """The same kills, on a save without the temporary file: they are no formality."""
    text = (ROOT / "solutions" / "checkpoint.py").read_text(encoding="utf-8")
    plain = text.replace('NAME = re.compile(r"checkpoint-(?P<number>\\d{8,})-(?P<digest>[0-9a-f]{16})\\.pt")',
                         'NAME = re.compile(r"(?P<number>00000001)(?P<digest>)\\.pt")')  # fmt: skip
    plain = plain.replace('UNFINISHED = "unfinished.tmp"', 'UNFINISHED = "00000001.pt"')
    plain = plain.replace('folder / f"checkpoint-{number:08d}-{_digest(unfinished.read_bytes())}.pt"', "unfinished")
    plain = plain.replace('!= found["digest"]', '== "never"').replace("[*older, whole][:-keep]", "[]")
    assert plain.count("00000001") == 2 and "whole = unfinished" in plain
    broken = tmp_path / "checkpoint.py"
    broken.write_text(plain, encoding="utf-8")
    (tmp_path / "work").mkdir()
    run = play("kills", broken, tmp_path / "work", chunk=2048, most=10_000)
    assert run.cause is None, run.cause
    found = outcomes(run)
    assert found["nothing"] > len(run.observed("instants")[0]) / 2, found


def test_the_reference_notices_what_torch_load_does_not(tmp_path: Path) -> None:
    """A bit changed in every third byte, and the file cut at every tenth: never loaded. torch.load alone loads many."""
    reference = load(str(ROOT / "solutions" / "checkpoint.py"))
    torch.manual_seed(0)
    wanted = {"weight": torch.randn(400), "step": 3}
    reference._write(tmp_path, wanted, 1)
    (file,) = tmp_path.iterdir()
    assert reference._read(file)[1] is None
    data = file.read_bytes()
    chance = random.Random(0)
    silent = 0
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        assert reference._read(file)[1], f"a changed bit in byte {at} of {len(data)} was not noticed"
        with contextlib.suppress(Exception):
            found = torch.load(io.BytesIO(changed), weights_only=True)
            silent += not (torch.equal(found["weight"], wanted["weight"]) and found["step"] == wanted["step"])
    for length in range(0, len(data), 10):
        file.write_bytes(data[:length])
        assert reference._read(file)[1], f"a file cut to {length} of {len(data)} bytes was not noticed"
    assert silent > 400, "torch.load has begun to check: chapter 5 and the diagnosis bit-flip-unnoticed say it does not"
