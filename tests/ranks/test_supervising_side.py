"""When the supervising side goes: no rank outlives it by 3 s, nothing it has started stays, and the next run works."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.leftovers import MARK, marked_processes, remains, wait_until_gone

from lockstep import ranks
from lockstep.ranks import Outcome, client
from lockstep.ranks.channel import Channel
from lockstep.ranks.job import Described, Job, TargetKind
from lockstep.ranks.member import Member
from lockstep.ranks.messages import Hello, Mark, Notice, Observe, Observed, Role, ToClient, read
from lockstep.ranks.processes import descendants
from lockstep.ranks.supervisor import Supervisor

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="not run: there is no /proc to look in")

# Each rank detaches a process that ignores SIGTERM, makes shared memory and a temporary file, and stays.
STAY = """
import os, signal, subprocess, sys, tempfile, time
from multiprocessing import shared_memory
import torch, torch.distributed as dist
dist.init_process_group("gloo")
block = shared_memory.SharedMemory(create=True, size=100, name=f"{mark}_{dist.get_rank()}")
tempfile.mkdtemp()
if not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(300)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
CLIENT = f"""
import sys
from lockstep import ranks
text = {STAY!r}.replace("{{mark}}", sys.argv[1])
print("client", flush=True)
run = ranks.run(ranks.Source(text), 2, on_output=lambda *_: print("ready", flush=True), deadline=60)
print("outcomes", [outcome.value for outcome in run.outcomes], flush=True)
"""


def start_client(*, session: bool = True) -> subprocess.Popen[str]:
    """A client in a process of its own, with two ranks that stay; both are up when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, MARK[-12:]], stdout=subprocess.PIPE, text=True, start_new_session=session
    )
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        line = process.stdout.readline()
        assert line, "the client has ended"
        ready += line == "ready\n"
    return process


def family(process: subprocess.Popen[str]) -> list[int]:
    """Everything that has come from this client: its server, supervisor, ranks and what they have detached."""
    return [pid for pid in marked_processes() if pid != process.pid and pid in descendants(process.pid)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_client_is_killed(number: signal.Signals) -> None:
    process = start_client()
    theirs = family(process)
    assert len(theirs) >= 6  # server, supervisor, two ranks, and what each has detached
    process.send_signal(number)
    process.wait(10)
    process.stdout.close()  # type: ignore[union-attr]
    assert wait_until_gone(theirs) == []


def test_ctrl_c_in_a_terminal_reports_each_rank() -> None:
    process = start_client()
    theirs = family(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, _ = process.communicate(timeout=20)
    assert "outcomes ['interrupted', 'interrupted']" in out
    assert process.returncode == 0
    assert wait_until_gone(theirs) == []


def supervisors() -> list[int]:
    server = client._server._process
    assert server is not None
    return [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]


def in_background(text: str) -> tuple[threading.Thread, list[object]]:
    """A run in a thread; what it returns or raises is put into the list."""
    result: list[object] = []
    up: list[int] = []

    def go() -> None:
        try:
            result.append(ranks.run(ranks.Source(text), 2, deadline=60, on_output=lambda rank, *_: up.append(rank)))
        except ranks.RanksError as error:
            result.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    give_up = time.monotonic() + 60
    while len(up) < 2 and time.monotonic() < give_up:
        time.sleep(0.02)
    assert len(up) >= 2
    return thread, result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_supervisor_of_a_run_is_killed(number: signal.Signals) -> None:
    thread, result = in_background(STAY.replace("{mark}", MARK[-12:]))
    (supervisor,) = supervisors()
    theirs = descendants(supervisor)
    os.kill(supervisor, number)
    thread.join(20)
    assert wait_until_gone([supervisor, *theirs]) == []
    (end,) = result
    if number == signal.SIGKILL:
        assert isinstance(end, ranks.RanksError)
    else:
        assert isinstance(end, ranks.Run) and set(end.outcomes) == {Outcome.INTERRUPTED}
    assert ranks.run(ranks.Source("pass"), 2).ok  # the warm process goes on


def test_the_warm_process_is_killed() -> None:
    """The run goes on to its end; the next one starts a new warm process."""
    text = "import time\nprint('up', flush=True)\ntime.sleep(1)\nprint('end')"
    thread, result = in_background(text)
    server = client._server._process
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    thread.join(20)
    (end,) = result
    assert isinstance(end, ranks.Run) and end.ok
    assert ranks.run(ranks.Source("pass"), 2).ok
    assert client._server._process is not None and client._server._process.pid != server.pid


def test_warm_process_and_supervisor_are_killed() -> None:
    """Nobody is left to clean up but the kernel and the next warm process. The ranks hold the interpreter lock."""
    thread, result = in_background("import re\nprint('up', flush=True)\nre.match(r'(a+)+$', 'a' * 60 + 'b')")
    server = client._server._process
    assert server is not None
    (supervisor,) = supervisors()
    theirs = descendants(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    thread.join(20)
    assert isinstance(result[0], ranks.RanksError)
    assert wait_until_gone(theirs) == []
    assert any(entry.startswith("folder lockstep-run-") for entry in remains())
    assert ranks.run(ranks.Source("pass"), 1).ok  # removes what the other left


def test_an_interrupt_here_comes_back_as_a_report() -> None:
    """As in a notebook: the kernel gets SIGINT, the cell comes back and says where each rank was."""
    up: list[int] = []

    def press(rank: int, *_: object) -> None:
        up.append(rank)
        if len(up) % 2 == 0:  # both have printed, and are about to sleep
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    text = "import time\nprint('up', flush=True)\ntime.sleep(60)"
    run = ranks.run(ranks.Source(text, "cell"), 2, on_output=press)
    assert run.cause is not None and run.cause.kind == "interrupted"
    assert set(run.outcomes) == {Outcome.INTERRUPTED}
    assert [row.frame and row.frame.text for row in run.cause.rows] == ["time.sleep(60)"] * 2
    with pytest.raises(KeyboardInterrupt):
        ranks.run(ranks.Source(text), 2, on_output=press, on_interrupt="raise")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ranks_begin_with_the_usual_signals() -> None:
    text = (
        "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL"
    )
    run = ranks.run(ranks.Source(text), 2)
    assert run.ok, run.cause


def test_a_rank_may_remove_its_temporary_folder() -> None:
    text = (
        "import os, shutil, tempfile\nfolder = os.path.dirname(tempfile.gettempdir())\n"
        "assert os.path.basename(folder).startswith('lockstep-run-')\nshutil.rmtree(folder)"
    )
    assert ranks.run(ranks.Source(text), 1).ok
    text = "import os, tempfile\nos.makedirs(tempfile.gettempdir() + '/a/b')\nos.chmod(tempfile.gettempdir(), 0)"
    assert ranks.run(ranks.Source(text), 1).ok


def test_what_a_rank_leaves_is_listed() -> None:
    text = (
        "import subprocess, tempfile, time\nsubprocess.Popen(['sh', '-c', '(setsid sleep 301 &)'])\n"
        "open(tempfile.gettempdir() + '/left.txt', 'w').close()\ntime.sleep(0.2)"
    )
    run = ranks.run(ranks.Source(text), 1)
    assert run.ok
    assert any("sleep 301" in process for process in run.left_running)
    assert run.left_files == ["left.txt"]


def test_the_client_is_clean_under_w_error() -> None:
    """No ResourceWarning, no warning of any other kind, and no traceback at the end."""
    text = (
        "from lockstep import ranks\n"
        "assert ranks.run(ranks.Source('print(1)'), 2).ok\n"
        "import os, signal\nos.kill(ranks.client._server._process.pid, signal.SIGKILL)\n"
        "ranks.client._server._process.wait()\n"
        "assert ranks.run(ranks.Source('print(1)'), 2).ok\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", text], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_when_a_run_comes_back_its_processes_are_gone() -> None:
    """Not a moment later: the next cell may need the memory, and a check looks at what is on the disk."""
    text = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(300)\nprint('up')"
    earlier = marked_processes()  # of other tests, such as the process that tracks shared memory
    run = ranks.run(ranks.Source(text), 2)
    before, marked = supervisors(), marked_processes()  # in this order: one may be about to end
    alive = set(marked) - {*earlier, *before, *supervisors()}
    assert run.ok, run.cause
    assert client._server._process is not None
    assert alive <= {client._server._process.pid}


def test_who_attaches_is_asked_of_the_system() -> None:
    """A rank that says that it is another one, before that one has come, is not let in."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        supervisor = Supervisor(Channel(ours), Job(2, Described(TargetKind.SOURCE)))
        supervisor.run.members = [Member(Role.RANK, 0, os.getpid()), Member(Role.RANK, 1, 1)]
        supervisor.talk.arguments = [(None, b"")]
        supervisor.talk._admit(Channel(ours), Hello(Role.RANK, 1, 1))
        assert supervisor.run.ranks[1].channel is None
        supervisor.talk.selector.close()
        supervisor.talk.door.close()


def test_what_a_rank_does_once_it_was_told_as_hung_is_no_part_of_the_run() -> None:
    """Its peer is ended a moment earlier, so that its call fails: no check may read what it observes then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        supervisor, client_side = Supervisor(Channel(ours), Job(1, Described(TargetKind.SOURCE))), Channel(theirs)
        member = Member(Role.RANK, 0, os.getpid())
        supervisor.run.members = [member]
        for number, name in enumerate(("before", "after")):
            supervisor.talk.take(member, Observe(name, number), b"")
            supervisor.talk.take(member, Mark(number, name, 0), b"")
            member.stop_here(Outcome.HUNG, 1.0)
        supervisor.tell(Notice("the end"))
        heard = [read(ToClient, raw) for raw, _ in client_side.receive() or []]
        assert heard == [Observed(0, "before", 0), Notice("the end")]
        assert list(member.events) == [Mark(0, "before", 0)]
        supervisor.talk.selector.close()
        supervisor.talk.door.close()
