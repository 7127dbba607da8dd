"""What a rank that means harm can do to those who watch it: nothing that does not end up as a line about that rank."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch

from lockstep import ranks
from lockstep.ranks.channel import HEADER, MAX_DEPTH, Channel, ChannelError, decode, whole
from lockstep.ranks.folder import remove_folder


def on_rank_0(text: str) -> ranks.Source:
    """Run this on rank 0; rank 1 waits."""
    body = "\n".join(f"    {line}" for line in text.strip().splitlines())
    return ranks.Source(f"import os\nif os.environ['RANK'] == '0':\n{body}\nelse:\n    import time; time.sleep(60)\n")


# Each rank's own arguments ---------------------------------------------------------------------------------------------

HUNT = """
import gc, sys
from lockstep.ranks import observe

def hunt(own, shared):
    frame, seen = sys._getframe(), ""
    while frame is not None:
        seen += repr(frame.f_locals)
        frame = frame.f_back
    seen += repr([one for one in gc.get_objects() if isinstance(one, (str, bytes, list, dict))])
    observe("own", own)
    observe("shared", shared)
    observe("found", [word for word in ("for-rank-" + str(r) for r in range(3)) if word in seen])
"""


def test_no_rank_has_what_another_is_given(tmp_path: Path) -> None:
    file = tmp_path / "hunts.py"
    file.write_text(HUNT)
    each = tuple({"own": f"for-rank-{rank}"} for rank in range(3))
    run = ranks.run(ranks.Function(file, "hunt", {"shared": 5}, each), 3)
    assert run.ok, run.cause
    assert run.observed("own") == ["for-rank-0", "for-rank-1", "for-rank-2"] and run.observed("shared") == [5] * 3
    assert run.observed("found") == [["for-rank-0"], ["for-rank-1"], ["for-rank-2"]]


def test_every_rank_or_none_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "hunts.py"
    file.write_text(HUNT)
    with pytest.raises(ValueError, match="2 ranks are given arguments of their own; there are 3"):
        ranks.run(ranks.Function(file, "hunt", {}, ({"own": 1}, {"own": 2})), 3)


# Messages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 100_000])
def test_a_message_has_a_bottom(depth: int) -> None:
    ours, theirs = socket.socketpair()
    raw = b'{"value":' + b"[" * depth + b"]" * depth + b"}"
    theirs.sendall(HEADER.pack(len(raw), 0) + raw)
    with pytest.raises(ChannelError):
        Channel(ours).wait()


def test_a_nested_message_of_an_honest_depth_arrives() -> None:
    ours, theirs = socket.socketpair()
    value = {"batches": [[[number] for number in range(100)] for _ in range(3)]}
    Channel(theirs).send(value)
    received = Channel(ours).wait()
    assert received is not None and received[0] == value


def test_a_tensor_has_all_its_bytes() -> None:
    note = {"dtype": "float32", "shape": [1 << 40], "at": 0, "bytes": 0}
    with pytest.raises(ChannelError, match="no bytes"):
        decode({"$tensor": note}, b"")


def test_tensors_do_not_share_bytes() -> None:
    note = {"dtype": "uint8", "shape": [100], "at": 0, "bytes": 100}
    assert torch.equal(decode([{"$tensor": note}], bytes(100))[0], torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ChannelError, match="larger than the message"):
        decode([{"$tensor": note}] * 2, bytes(100))


def test_half_a_character_is_made_whole() -> None:
    assert whole({"\ud800": ["a\udc80", "é 🚀", 3]}) == {"�": ["a�", "é 🚀", 3]}


def test_events_without_end_are_too_much() -> None:
    text = "from lockstep.ranks import mark\nlong = 'x' * (1 << 20)\nwhile True: mark(long)"
    run = ranks.run(on_rank_0(text), 2, deadline=60)
    assert run.cause is not None and (run.cause.kind, run.cause.ranks) == ("too much output", (0,))


def test_an_errors_texts_are_cut() -> None:
    text = """
from lockstep.ranks import recorder
recorder.current().send({"event": "raised", "type": "T" * 10**6, "message": "m" * 10**6, "frames": [["f", 1, "f"]] * 10**4,
                         "traceback": "t" * 10**6})
os._exit(1)
"""
    run = ranks.run(ranks.Source(f"import os\n{text}"), 1)
    assert run.cause is not None and run.cause.kind == "raised"
    error = run.ranks[0].error
    assert error is not None
    assert (len(error.type), len(error.message), len(error.traceback), len(error.frames)) == (200, 10**5, 10**5, 200)


# Places ----------------------------------------------------------------------------------------------------------------


def test_only_allowed_files_are_quoted(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "own.py").write_text("its own line\n")
    (tmp_path / "secret.py").write_text("the secret\n")
    (allowed / "link.py").symlink_to(tmp_path / "secret.py")
    os.mkfifo(allowed / "pipe.py")
    files = [tmp_path / "secret.py", allowed / "link.py", allowed / "pipe.py", Path("/dev/zero"), allowed / "own.py"]
    frames = json.dumps([[str(file), 1, "f"] for file in files])
    text = f"""
from lockstep.ranks import recorder
recorder.current().send({{"event": "raised", "type": "X", "message": "x", "frames": {frames}}})
"""
    run = ranks.run(ranks.Source(text), 1, sources=[str(allowed)])
    assert run.ranks[0].error is not None
    assert [frame.text for frame in run.ranks[0].error.frames] == ["its own line"]


# Those who watch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_ends_its_supervisor_leaves_nobody_waiting(signal: str) -> None:
    text = f"import signal, time\nos.kill(os.getppid(), signal.{signal})\ntime.sleep(60)"
    with pytest.raises(ranks.RanksError, match="supervisor"):
        ranks.run(on_rank_0(text), 2)
    assert ranks.run(ranks.Source("pass"), 2).ok


def test_a_rank_that_stops_the_server_leaves_nobody_waiting() -> None:
    text = """
import signal, time
with open(f"/proc/{os.getppid()}/stat") as stat:
    server = int(stat.read().rpartition(")")[2].split()[1])
os.kill(server, signal.SIGSTOP)
"""
    ranks.run(ranks.Source(f"import os\n{text}"), 1)
    with pytest.raises(ranks.RanksError, match="silent"):
        ranks.run(ranks.Source("pass"), 1)
    assert ranks.run(ranks.Source("pass"), 1).ok


def test_a_crash_dump_is_a_file() -> None:
    text = """
import glob, os, signal
for file in glob.glob(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "fault-*")):
    os.unlink(file)
    os.mkfifo(file)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = ranks.run(ranks.Source(text), 1)
    assert run.cause is not None and run.cause.kind == "crashed"


def test_what_a_child_takes_is_its_ranks() -> None:
    taking = "if not os.fork():\n    held = bytearray(b'x') * (600 << 20)\nimport time\ntime.sleep(60)"
    run = ranks.run(on_rank_0(taking), 2, memory_limit=500 << 20, process_limit=100)
    assert run.cause is not None and (run.cause.kind, run.cause.ranks) == ("out of memory", (0,))
    spinning = "if not os.fork():\n    while True: pass\nos.wait()"
    run = ranks.run(on_rank_0(spinning), 2, cpu_limit=1.0, process_limit=100)
    assert run.cause is not None and run.cause.kind == "timed out"


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    here = os.getcwd()
    top.mkdir()
    os.chdir(top)
    try:
        for _ in range(1100):  # deeper than Python's stack
            os.mkdir("deep")
            os.chdir("deep")
        os.close(os.open(b"\xff", os.O_CREAT))
    finally:
        os.chdir(here)
    (top / "link").symlink_to(outside)
    for name in ("a", "b", "c"):
        (top / "closed" / name / "inner").mkdir(parents=True)
    (top / "closed").chmod(0)
    remove_folder(str(top))
    assert not top.exists() and (outside / "kept").is_dir()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_folder(str(tmp_path / "link"))
    assert (tmp_path / "kept" / "inner").is_dir()


# The recorder ----------------------------------------------------------------------------------------------------------


def test_a_call_to_the_backend_itself_is_recorded() -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(8)
dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([tensor]).wait()
dist.all_reduce(tensor)
"""
    run = ranks.run(ranks.Source(text), 2)
    assert run.ok, run.cause
    assert [[(one.kind, one.nbytes, one.members) for one in calls] for calls in run.collectives] == [
        [("all_reduce", 32, (0, 1))] * 2
    ] * 2
