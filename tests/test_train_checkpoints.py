"""The three checkpoints of `solutions/train.py`: damaged ones are passed over, and a save killed at any point leaves a
whole one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep import ranks

SOLUTION = Path(__file__).resolve().parents[1] / "solutions" / "train.py"
BEGIN = f"""
import importlib.util, os, sys
from pathlib import Path
import torch, torch.distributed as dist
spec = importlib.util.spec_from_file_location("train_reference", {str(SOLUTION)!r})
train = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
train.join()
newest, older = Path("run/checkpoint.pt"), Path("run/checkpoint.old")
weight = torch.arange(1000.0)
def save(step): train.save(newest, {{"step": step, "weight": weight + step}})
def show():
    try:
        state = train.load(newest)
        whole = state is None or torch.equal(state["weight"], weight + state["step"])
        print("loaded", state and state["step"], whole, flush=True)
    except RuntimeError as error:
        print("refused", error, flush=True)
def cut(file): os.truncate(file, file.stat().st_size // 2)
def flip(file):
    data = bytearray(file.read_bytes())
    data[data.index((weight[500:510] + (1 if file == older else 2)).numpy().tobytes())] ^= 1
    file.write_bytes(data)
def on_rank_0(work, *arguments):
    if dist.get_rank() == 0:
        work(*arguments)
    dist.barrier()
"""
KILLED = """
class Killed(BaseException): pass
calls, last = 0, None
def counted(real):
    def operation(*arguments, **more):
        global calls
        calls += 1
        if calls == last:
            raise Killed
        return real(*arguments, **more)
    return operation
for place, names in ((os, ("fsync", "link", "replace", "unlink", "open")), (torch, ("save",))):
    for name in names:
        setattr(place, name, counted(getattr(place, name)))
steps, damages = 0, [lambda: None, lambda: cut(newest)]
for damage in damages:
    for at in range(1, 100):
        last = None
        save(1), save(2)
        damage()
        calls, last = 0, at
        try:
            save(3)
        except Killed:
            last = None
            show()
            save(4)  # what a killed save has left is in nobody's way
            assert train.load(newest)["step"] == 4
        else:
            break
    print("points", at - 1, flush=True)
"""


def run(tmp_path: Path, body: str, world_size: int = 2) -> list[str]:
    """What each rank printed."""
    script = tmp_path / "script.py"
    script.write_text(BEGIN + body)
    result = ranks.run(ranks.Script(str(script)), world_size, deadline=120, directory=tmp_path)
    assert result.cause is None, result.cause
    return [rank.stdout for rank in result.ranks]


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    first, second = run(tmp_path, f"show(), save(1), save(2), show(), on_rank_0({damage}, newest), show()")
    assert second.splitlines() == ["loaded None True", "loaded 2 True", "loaded 1 True"]
    *others, said, last = first.splitlines()
    assert [*others, last] == second.splitlines()
    assert said.startswith("run/checkpoint.pt is damaged: ") and said.endswith(". Continuing from run/checkpoint.old.")


def test_where_two_are_damaged_the_third_is_loaded(tmp_path: Path) -> None:
    body = "save(1), save(2), save(3), on_rank_0(cut, newest), on_rank_0(cut, older), show()"
    first, second = run(tmp_path, body)
    assert second.splitlines() == first.splitlines()[1:] == ["loaded 1 True"]
    assert re.match(
        r"run/checkpoint\.pt is damaged: .*; run/checkpoint\.old is damaged: .*\.older\.$", first.splitlines()[0]
    )


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_where_none_is_whole_every_rank_refuses(tmp_path: Path, damage: str) -> None:
    body = f"save(1), save(2), on_rank_0({damage}, newest), on_rank_0({damage}, older), show()"
    for printed in run(tmp_path, body):
        assert re.fullmatch(
            r"refused rank 0 could not load run/checkpoint\.pt: RuntimeError: run/checkpoint\.pt is damaged: .*; "
            r"run/checkpoint\.old is damaged: .*\n",
            printed,
        )


def test_a_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Also where the newest was damaged before: the older one keeps its name until the new one has its own."""
    (printed,) = run(tmp_path, KILLED, world_size=1)
    undamaged, damaged, rest = printed.split("points ")
    loaded = [re.findall(r"^loaded (\d) True$", part, re.MULTILINE) for part in (undamaged, damaged)]
    points = [int(part.split()[0]) for part in (damaged, rest)]
    assert min(points) >= 6 and [len(one) for one in loaded] == points
    assert set(loaded[0]) == {"2", "3"} and set(loaded[1]) == {"1", "3"}
    assert "refused" not in printed and "None" not in printed
