"""The three kinds of target, the environment that each rank gets, and the two ways to start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import ranks
from lockstep.ranks import Outcome, client

BODIES = Path(__file__).with_name("bodies.py")


def test_a_function_is_called_with_its_arguments_and_observed() -> None:
    run = ranks.run(ranks.Function(BODIES, "total", {"start": 10.0}), 4)
    assert run.outcomes == [Outcome.RETURNED] * 4
    assert run.observed("returned") == [46.0] * 4


@pytest.mark.parametrize(("how", "kind"), [("exit", "exited"), ("raise", "raised")])
def test_a_function_that_leaves_early_has_not_returned(how: str, kind: str) -> None:
    run = ranks.run(ranks.Function(BODIES, "leave", {"how": how}), 2)
    assert run.cause is not None and run.cause.kind == kind
    assert run.cause.ranks == (1,)
    assert run.cause.frame is not None and run.cause.frame.file == str(BODIES)
    assert run.cause.frame.text.startswith("sys.exit(0)" if how == "exit" else "raise ValueError")


def test_a_script_is_main_and_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, helper\n"
        "if __name__ == '__main__':\n    print(sys.argv[1:], helper.VALUE, __file__)\n"
        "    raise SystemExit(0)\n"
    )
    run = ranks.run(ranks.Script(script, ("--epochs", "2")), 2)
    assert run.ok and run.outcomes == [Outcome.EXITED] * 2
    assert run.ranks[1].stdout == f"['--epochs', '2'] 7 {script}\n"


STATE = """
import json, os, signal, sys, threading, warnings
import torch
def annotated(x: int): pass
print(json.dumps({
    "main": sorted(name for name in globals() if name.startswith("__")),
    "types": [type(one).__name__ for one in (__builtins__, __loader__, __spec__, __doc__, __cached__)],
    "annotations": repr((annotated.__annotations__, __annotations__)),
    "threads": [thread.name for thread in threading.enumerate()],
    "warnings": sorted(one for one in map(repr, warnings.filters) if "sympy" not in one),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile(), sys.getrecursionlimit()],
    "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
    "shell": [os.umask(18), os.nice(0), sys.dont_write_bytecode, sys.flags.optimize],
}))
"""


def test_a_script_finds_what_plain_python_gives_it(tmp_path: Path) -> None:
    """Of each difference that was found here once, a right program had failed."""
    script = tmp_path / "train.py"
    script.write_text(STATE)
    plain = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    run = ranks.run(ranks.Script(script), 1)
    assert run.ok and json.loads(run.ranks[0].stdout) == json.loads(plain.stdout)


ALONE = {
    "it joins all other threads": "for one in threading.enumerate():\n    one is threading.main_thread() or one.join()",
    "it closes what it has inherited": "os.closerange(3, 256)",
    "a thread takes a signal that is blocked elsewhere":
        "def wait(): signal.sigwait([signal.SIGUSR1])\nthread = threading.Thread(target=wait)\nthread.start()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nthread.join()",
}  # fmt: skip


@pytest.mark.parametrize("does", ALONE)
def test_a_script_is_alone_in_its_process(does: str) -> None:
    """As far as it can see: our thread and our files are none of its."""
    text = (
        "import os, signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n" + ALONE[does] +
        "\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(1))\n"
    )  # fmt: skip
    run = ranks.run(ranks.Source(text), 2, deadline=60)
    assert run.ok, run.cause


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        ranks.run(ranks.Script("nowhere.py"), 2)


def test_a_syntax_error_has_a_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nprint(\n")
    run = ranks.run(ranks.Script(script), 2)
    assert run.cause is not None and "SyntaxError" in run.cause.headline
    assert run.cause.frame is not None and run.cause.frame.line == 2


def test_source_text_is_named_and_shown() -> None:
    run = ranks.run(ranks.Source("x = 1\nraise KeyError('x')", "<cell 3>"), 2)
    assert run.cause is not None and run.cause.frame is not None
    assert run.cause.frame.is_cell and run.cause.frame.line == 2
    assert run.cause.frame.text == "raise KeyError('x')"


def test_the_environment_is_torchruns() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    text = f"import os\nprint(*(os.environ[name] for name in {names}))"
    run = ranks.run(ranks.Source(text), 4, nodes=2)
    assert [report.stdout.split() for report in run.ranks] == [
        ["0", "0", "4", "2", "0", "1"],
        ["1", "1", "4", "2", "0", "1"],
        ["2", "0", "4", "2", "1", "1"],
        ["3", "1", "4", "2", "1", "1"],
    ]
    with pytest.raises(ValueError, match="evenly"):
        ranks.run(ranks.Source("pass"), 3, nodes=2)


def test_the_client_folder_is_not_on_a_scripts_path(tmp_path: Path) -> None:
    """Started by torchrun, a script sees its own folder, not the one that its starter stood in."""
    script = tmp_path / "train.py"
    script.write_text("import sys, os\nassert os.getcwd() not in sys.path, sys.path\n")
    assert ranks.run(ranks.Script(script), 1).ok


def test_random_states_differ_between_ranks() -> None:
    text = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
    run = ranks.run(ranks.Source(text), 2)
    first, second = (report.stdout.split() for report in run.ranks)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_many_ranks() -> None:
    run = ranks.run(ranks.Function(BODIES, "total"), 8)
    assert run.ok, run.cause
    assert run.observed("returned") == [28.0] * 8


def test_a_ddp_wrapper_that_outlives_its_group_never_hangs() -> None:
    """Claim X29: 1 in 10 or so deadlocks when a rank is left to itself."""
    for repeat in range(30):
        run = ranks.run(ranks.Function(BODIES, "train_and_return_the_module"), 2)
        assert run.ok, (repeat, run.cause)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_START_METHOD", "spawn")


@pytest.mark.usefixtures("spawned")
class TestSpawned:
    """Where there is no fork from a warm process: slower, with the same results."""

    def test_a_function(self) -> None:
        run = ranks.run(ranks.Function(BODIES, "total"), 2)
        assert run.ok, run.cause
        assert run.observed("returned") == [1.0, 1.0]
        assert [len(calls) for calls in run.collectives] == [1, 1]

    def test_a_hang(self) -> None:
        text = (
            "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
            "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))"
        )
        run = ranks.run(ranks.Source(text), 2)
        assert run.cause is not None and run.cause.kind == "hang" and run.cause.ranks == (1,)

    def test_a_crash(self) -> None:
        text = "import ctypes, os\nif os.environ['RANK'] == '1':\n    ctypes.string_at(0)"
        run = ranks.run(ranks.Source(text), 2)
        assert run.cause is not None and "rank 1 was killed by SIGSEGV" in run.cause.headline
        assert run.cause.frame is not None and run.cause.frame.text == "ctypes.string_at(0)"

    def test_a_launcher(self) -> None:
        run = ranks.run(ranks.Function(BODIES, "launch"), 1, launcher=True)
        assert run.ok, run.cause
        assert len(run.workers) in (0, 2)


def test_two_runs_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        runs = list(
            pool.map(lambda start: ranks.run(ranks.Function(BODIES, "total", {"start": start}), 2), [0.0, 100.0, 200.0])
        )
    assert [run.observed("returned") for run in runs] == [[1.0] * 2, [201.0] * 2, [401.0] * 2]
    assert os.environ.get("RANK") is None


def test_what_a_script_asks_for_at_its_end_is_done() -> None:
    text = (
        "import atexit, tempfile, threading, time\natexit.register(print, 'at exit')\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    )
    run = ranks.run(ranks.Source(text), 1)
    assert run.ranks[0].stdout.split("\n") == ["thread", "at exit", ""]
    assert run.left_files == []


def test_what_torch_asked_for_before_the_fork_is_not() -> None:
    text = (
        "import weakref\nprint(sum(one.atexit for one in weakref.finalize._registry), len(weakref.finalize._registry))"
    )
    due, known = ranks.run(ranks.Source(text), 1).ranks[0].stdout.split()
    assert due == "0" and int(known) > 50  # torch's libraries, each of which takes its operators apart


def test_each_run_has_the_debug_level_of_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable when it is imported, and that was in the process from which all runs are forked."""
    text = "import torch.distributed as dist\nprint(dist.get_debug_level().name)"
    levels = []
    with client.served_by(client.Server()):
        for level in ("DETAIL", None, "INFO"):
            monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
            if level:
                monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
            levels.append(ranks.run(ranks.Source(text), 1).ranks[0].stdout.strip())
    assert levels == ["DETAIL", "OFF", "INFO"]
