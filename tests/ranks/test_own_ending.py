"""A rank that is stopped ends as under torchrun: it is told by a signal, its handlers run, and only then it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from lockstep import ranks
from lockstep.commands import run as run_command
from lockstep.commands.run import Printer
from lockstep.ranks import Kind, Outcome

EVER = 1e6
"""A grace that no test waits for: who waits for it hangs."""
PRELUDE = """\
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def save(number, frame):
    time.sleep(0.5)
    os.write(1, f"saved {signal.Signals(number).name}\\n".encode())  # the signal may have come in the middle of a print
    sys.exit(0)
"""
FAILS = "dist.barrier()\nif rank == 0: raise ValueError('broken')\n"


def test_a_handler_runs_when_another_rank_has_failed() -> None:
    text = PRELUDE + "if rank: signal.signal(signal.SIGTERM, save)\n" + FAILS + "while True: time.sleep(0.1)"
    run = ranks.run(ranks.Source(text), 2, grace=EVER)
    assert run.ranks[1].stdout == "saved SIGTERM\n"
    assert run.outcomes == [Outcome.RAISED, Outcome.STOPPED]
    assert run.cause is not None and run.cause.kind is Kind.RAISED and run.cause.ranks == (0,)
    assert ranks.run(ranks.Source(text), 2).ranks[1].stdout == ""


def test_who_waits_for_a_failed_rank_fails_and_cleans_up() -> None:
    text = PRELUDE + FAILS + "try: dist.barrier()\nfinally: print('cleaned up', flush=True)"
    signals = "if rank: signal.signal(signal.SIGTERM, lambda *_: None)\n"
    run = ranks.run(ranks.Source(text.replace(FAILS, signals + FAILS)), 3, grace=EVER)
    assert [report.stdout for report in run.ranks] == ["", "cleaned up\n", "cleaned up\n"]
    assert run.cause is not None and run.cause.ranks == (0,)


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError('broken')", "signal.raise_signal(signal.SIGTERM)"])
def test_exit_functions_run_however_a_rank_ends(end: str) -> None:
    text = PRELUDE + "import atexit; atexit.register(lambda: (time.sleep(2), print('at exit', flush=True)))\n"
    text += f"signal.signal(signal.SIGTERM, save)\ndist.barrier()\n{end}"
    run = ranks.run(ranks.Source(text), 2, grace=EVER)
    assert [report.stdout.splitlines()[-1:] for report in run.ranks] == [["at exit"]] * 2


def test_the_grace_is_over_when_all_that_are_left_wait_for_each_other() -> None:
    """No handler of theirs would ever run."""
    text = PRELUDE + "signal.signal(signal.SIGTERM, save)\n" + FAILS + "dist.recv(torch.ones(1), 3 - rank)"
    run = ranks.run(ranks.Source(text), 3, grace=EVER)
    assert run.cause is not None and run.cause.ranks == (0,)
    assert run.outcomes[1:] == [Outcome.STOPPED] * 2


def test_who_does_not_end_is_killed_after_the_grace() -> None:
    text = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAILS + "while True: time.sleep(0.1)"
    said: list[str] = []
    run = ranks.run(ranks.Source(text), 2, grace=2, on_notice=said.append)
    assert run.outcomes[1] is Outcome.STOPPED
    assert said == ["Rank 1 got SIGTERM and has 2 s to end. Ctrl-C ends the run at once."]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_passes_on_the_signal_that_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        PRELUDE + f"signal.signal({int(number)}, save)\nprint('ready', flush=True)\nwhile True: time.sleep(0.1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert process.stdout is not None
    ready = {process.stdout.readline(), process.stdout.readline()}
    assert ready == {"[rank 0] ready\n", "[rank 1] ready\n"}
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"[rank {rank}] saved {number.name}" for rank in (0, 1)], (
        process.returncode,
        err,
    )
    assert process.returncode == 128 + number
    assert "Interrupted: ranks 0 and 1 were still running." in err


def test_temporary_files_and_caches_are_where_the_user_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch puts it there, whoever asks for the folder
    script = tmp_path / "shows.py"
    script.write_text(
        "import tempfile\nfrom torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(tempfile.gettempdir(), cache_dir())\n"
    )
    assert run_command.main(["-n", "1", "--no-prefix", str(script)]) == 0
    temporary, cache = capsys.readouterr().out.split()
    assert temporary == str(tmp_path)
    assert cache.startswith(str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert run_command.main(["-n", "1", "--no-prefix", str(script)]) == 0
    assert capsys.readouterr().out.split()[1] == str(tmp_path / "mine")


WRITTEN: dict[str, tuple[list[tuple[int, str]], list[str]]] = {
    "a bar is shown as it is written": ([(0, "\r10%"), (0, "\r20%"), (0, "\n")], ["0 10%", "\r0 20%", "\r0 20%\n"]),
    "a piece of a bar": ([(0, "\r1"), (0, "0%\r"), (0, "20%")], ["0 1", "\r0 10%", "\r0 20%"]),
    "bars of two ranks share a line": ([(0, "\r1%"), (1, "\r2%")], ["0 1%", "\r1 2%"]),
    "a line beside a bar": ([(0, "\r1%"), (1, "hello\n"), (0, "\r2%")], ["0 1%", "\n1 hello\n", "0 2%"]),
    "a line that is not complete waits": ([(0, "a"), (1, "b\n"), (0, "c\n")], ["", "1 b\n", "0 ac\n"]),
    "line ends of two characters": ([(0, "a\r\nb\r"), (0, "\nc\n")], ["0 a\n0 b", "\r0 b\n0 c\n"]),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_ranks_write_is_shown(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    written, shown = WRITTEN[case]
    printer = Printer(prefix=True)
    for (rank, chunk), expected in zip(written, shown, strict=True):
        printer.take(rank, "stdout", chunk)
        assert capsys.readouterr().out.replace("[rank ", "").replace("] ", " ") == expected


WAITED = "Without Lockstep, it would have waited {}."
CLOSED = 'Without Lockstep, {} would have failed with gloo\'s "Connection closed by peer" once {} had ended.'
DEFAULT = "30 minutes (gloo's default timeout)"
LEFT_ALONE: dict[str, tuple[str, list[str]]] = {
    "wait for one that has finished": ("if rank < 2: dist.all_reduce(t)", [CLOSED.format("ranks 0 and 1", "rank 2")]),
    "wait for each other": ("if rank < 2: dist.recv(t, 1 - rank)", [WAITED.format(DEFAULT)]),
    "wait for each other in a group": (
        "pair = dist.new_group([0, 1])\nif rank < 2: dist.all_reduce(t, group=pair) if rank else dist.broadcast(t, 0, group=pair)",
        [WAITED.format(DEFAULT)],
    ),
    "a group with a timeout of its own": (
        "pair = dist.new_group([0, 1], timeout=timedelta(seconds=90))\ndist.all_reduce(t, group=pair) if rank == 0 else dist.barrier()",
        [WAITED.format("90 seconds (the timeout that the program set)")],
    ),
    "a limit of the call's own": ("dist.irecv(t, (rank + 1) % 3).wait(timedelta(minutes=5))", []),
    "a message from any rank, and all have finished": ("dist.send(t, 0) if rank else [dist.recv(t) for _ in range(3)]", [WAITED.format(DEFAULT)]),
    "one waits for any rank, one in a barrier": (
        "dist.send(t, 0) if rank == 1 else dist.barrier() if rank else [dist.recv(t) for _ in range(2)]", []
    ),
    "only one waits for the finished one": ("if rank < 2: dist.recv(t, rank + 1)", [CLOSED.format("rank 1", "rank 2")]),
    "a leaf of a broadcast has finished": ("dist.broadcast(t, 0) if rank == 2 else dist.recv(t, 2) if rank == 0 else None", []),
    "a leaf of a gather has finished": (
        "dist.gather(t, None, 0) if rank == 2 else dist.recv(t, 2) if rank == 0 else None", [WAITED.format(DEFAULT)]
    ),
    "the root has finished": ("if rank: dist.gather(t, None, 0)", [CLOSED.format("ranks 1 and 2", "rank 0")]),
    "the other has finished after a call of another size": (
        "pair = dist.new_group([0, 1])\nif rank < 2: dist.all_reduce(torch.ones(2 + rank), group=pair)", [CLOSED.format("rank 1", "rank 0")]
    ),
    "monitored_barrier": ("if rank != 1: dist.monitored_barrier()", []),
}  # fmt: skip


def test_what_would_have_come_of_a_hang_knows_the_programs_timeout() -> None:
    begin = PRELUDE.replace('("gloo")', '("gloo", timeout=__import__("datetime").timedelta(minutes=1))')
    assert begin != PRELUDE
    run = ranks.run(ranks.Source(f"{begin}dist.recv(torch.ones(4), 1 - rank)"), 2)
    assert WAITED.format("1 minute (the timeout that the program set)") in run.cause.notes


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_would_have_come_of_a_hang_depends_on_who_is_waited_for(case: str) -> None:
    """Tried with torchrun: gloo tells a rank that waits for an ended process, and says nothing to two that wait for each other."""
    text, said = LEFT_ALONE[case]
    run = ranks.run(ranks.Source(f"{PRELUDE}from datetime import timedelta\nt = torch.ones(4)\n{text}"), 3)
    assert run.cause.kind is Kind.HANG
    assert [note for note in run.cause.notes if "Without Lockstep" in note] == said
