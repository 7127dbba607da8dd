"""Ranks on a slow link: it is slow, it is theirs alone, its rate changes on the way, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leftovers import command, marked_processes, wait_until_gone
from support.machine import needs, network, networks

from lockstep import cluster, ranks
from lockstep.cluster import tools
from lockstep.ranks import Outcome
from lockstep.ranks.processes import descendants

PRELUDE = (
    "import torch, torch.distributed as dist\nfrom lockstep.ranks import observe\ndist.init_process_group('gloo')\n"
)

INTERLEAVED = (
    PRELUDE
    + """
import time
from lockstep.cluster import set_bandwidth
tensor = torch.full((2_000_000,), 1.0 + dist.get_rank())  # 8 MB
seconds = {"200mbit": [], "none": []}
for _ in range(3):
    for rate in seconds:
        set_bandwidth(None if rate == "none" else rate)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor.clone())
        dist.barrier()
        seconds[rate].append(time.perf_counter() - began)
result = tensor.clone()
dist.all_reduce(result)
observe("sum", result[-1].item())
observe("fastest", {rate: min(times) for rate, times in seconds.items()})
"""
)


@needs("bandwidth")
def test_the_throttled_link_is_slow_and_the_same_ranks_are_fast_without() -> None:
    run = ranks.run(ranks.Source(INTERLEAVED), 2, network=cluster.slow_link(None))
    assert run.ok, run.cause
    assert run.observed("sum") == [3.0, 3.0]
    for fastest in run.observed("fastest"):
        # 16 MB at 200 Mbit/s take 640 ms; without a throttle they take 10 ms. The margin is for a busy machine.
        assert fastest["200mbit"] > 3 * fastest["none"]
        assert fastest["200mbit"] > 0.9 * 2 * 8e6 * 8 / 200e6  # a link cannot pass more than its rate
    kinds = [(one.kind, one.nbytes) for one in run.ranks[0].collectives if one.kind == "all_reduce"]
    assert kinds == [("all_reduce", 8_000_000)] * 7


@needs("bandwidth")
def test_an_ordinary_user_can_do_it_and_so_can_root(python: Callable[..., str]) -> None:
    said = python(
        "import os\nfrom lockstep import cluster, ranks\n"
        f"run = ranks.run(ranks.Source({INTERLEAVED!r}), 2, network=cluster.slow_link('200mbit'))\n"
        "assert run.ok, run.cause\n"
        "ratios = [one['200mbit'] / one['none'] for one in run.observed('fastest')]\n"
        "assert cluster.available('bandwidth') is None and min(ratios) > 3, ratios\n"
        "print('done as', os.getuid())\n"
    )
    assert said.startswith("done as")


@needs("bandwidth")
def test_the_link_is_the_runs_own() -> None:
    text = ("import os, socket\nfrom lockstep.ranks import observe\n"
            "observe('links', [name for _, name in socket.if_nameindex()])\n"
            "observe('network', os.readlink('/proc/self/ns/net'))\n"
            "observe('user', os.getuid())\n")  # fmt: skip
    runs = [ranks.run(ranks.Source(text), 2, network=cluster.slow_link("1gbit")) for _ in range(2)]
    assert [run.observed("links") for run in runs] == [[["lo"]] * 2] * 2
    assert [run.observed("user") for run in runs] == [[os.getuid()] * 2] * 2
    mine = network()
    assert all(len(set(run.observed("network"))) == 1 and mine not in run.observed("network") for run in runs)


@needs("bandwidth")
def test_what_a_rank_starts_anew_may_change_the_rate_too() -> None:
    """A child by exec, as torchrun's ranks are; an ordinary user's capabilities have to come with it."""
    text = ("import subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'from lockstep.cluster import set_bandwidth\\n"
            "set_bandwidth(\"2mbit\")'], check=True)\n"
            "from lockstep.cluster import tools\nfrom lockstep.ranks import observe\n"
            "observe('queue', tools.use('tc', 'qdisc', 'show', 'dev', 'lo'))\n")  # fmt: skip
    run = ranks.run(ranks.Source(text), 1, network=cluster.slow_link("1gbit"))
    assert run.ok, run.cause
    assert "tbf 10c5: root" in run.observed("queue")[0] and "rate 2Mbit" in run.observed("queue")[0]


def test_the_machines_own_link_is_never_throttled() -> None:
    """Root could; `nothing_is_left` sees to it that nothing has changed."""
    with pytest.raises(RuntimeError, match="no throttled link"):
        cluster.set_bandwidth("1mbit")
    text = "from lockstep import cluster\ncluster.set_bandwidth('1mbit')"
    run = ranks.run(ranks.Source(text), 2)
    assert run.outcomes[0] is Outcome.RAISED and run.ranks[0].error is not None
    assert "--bandwidth" in run.ranks[0].error.message


@needs("bandwidth")
def test_slow_is_not_hung() -> None:
    """1 MB at 4 Mbit/s: the ranks sleep for seconds, with their bytes in the sockets' queues."""
    text = PRELUDE + "tensor = torch.ones(125_000)\ndist.all_reduce(tensor)\nobserve('sum', tensor[0].item())"
    run = ranks.run(ranks.Source(text), 2, network=cluster.slow_link("4mbit"))
    assert run.ok, run.cause
    assert run.observed("sum") == [2.0, 2.0]


@needs("bandwidth")
def test_a_hang_on_a_slow_link_is_explained() -> None:
    text = PRELUDE + "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(4))\nelse:\n    dist.barrier()"
    run = ranks.run(ranks.Source(text), 2, network=cluster.slow_link("1gbit"))
    assert run.cause is not None and run.cause.kind == "hang"


@needs("bandwidth")
def test_a_launchers_ranks_share_the_link(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(
        "import os, torch.multiprocessing as mp\n"
        "def work(rank, network):\n    assert os.readlink('/proc/self/ns/net') == network\n"
        "if __name__ == '__main__':\n    mp.spawn(work, (os.readlink('/proc/self/ns/net'),), nprocs=2)\n"
        "    from lockstep.ranks import observe\n    observe('network', os.readlink('/proc/self/ns/net'))\n"
    )
    run = ranks.run(ranks.Script(script), 2, launcher=True, network=cluster.slow_link("1gbit"))
    assert run.ok, run.cause
    assert run.observed("network")[0] != network()
    assert len(run.workers) == 2


# Rates ------------------------------------------------------------------------------------------------------------


def test_rates_are_bits_a_second_in_decimal_units() -> None:
    assert cluster.bits_per_second("1gbit") == 1_000_000_000
    assert cluster.bits_per_second("2.5 Gbit/s") == 2_500_000_000
    assert cluster.bits_per_second("1500kbit") == cluster.bits_per_second(1.5e6) == 1_500_000


@pytest.mark.parametrize("rate", ["1gb", "1gbps", "fast", "", "-1gbit", "1 mb/s", "100kbit", 999_999, "200gbit", 0])
def test_what_is_no_rate_is_refused_before_anything_starts(rate: str | int) -> None:
    for use in (cluster.bits_per_second, cluster.slow_link, cluster.set_bandwidth):
        with pytest.raises(ValueError, match="bandwidth"):
            use(rate)


# How it ends ------------------------------------------------------------------------------------------------------

CLIENT = f"""
from lockstep import cluster, ranks
text = {PRELUDE!r} + '''
import os, time
if not os.fork():  # somebody who detaches from everything
    os.setsid()
    time.sleep(300)
print("ready", flush=True)
time.sleep(300)
'''
NETWORK
run = ranks.run(ranks.Source(text), 2, nodes=nodes, network=network, idle_limit=None,
                on_output=lambda *_: print("ready", flush=True))
print("outcomes", [outcome.value for outcome in run.outcomes], flush=True)
"""


@pytest.mark.parametrize(
    ("network", "count"),
    [
        pytest.param("nodes, network = 1, cluster.slow_link('1gbit')", 1, id="slow link"),
        pytest.param("nodes, network = 2, cluster.own_hosts()", 2, id="hosts", marks=needs("hosts")),
    ],
)
@pytest.mark.parametrize("victim", ["client", "supervisor", "Ctrl-C"])
@needs("bandwidth")
def test_whatever_ends_it_the_network_goes(victim: str, network: str, count: int) -> None:
    program = [sys.executable, "-c", CLIENT.replace("NETWORK", network)]
    client = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert client.stdout is not None
    for _ in range(2):
        assert client.stdout.readline() == "ready\n"
    theirs = [pid for pid in marked_processes() if pid in descendants(client.pid)]
    assert len(networks(theirs)) == count
    inside = [pid for pid in descendants(client.pid) if networks([pid])]  # nearest first, so the supervisor
    match victim:
        case "client":
            os.kill(client.pid, signal.SIGKILL)
        case "supervisor":
            os.kill(inside[0], signal.SIGKILL)
        case "Ctrl-C":
            os.kill(client.pid, signal.SIGINT)
    client.wait(20)
    client.stdout.close()
    assert wait_until_gone(theirs) == []
    assert {pid: (command(pid), networks([pid])) for pid in marked_processes() if networks([pid])} == {}


# Where it is missing ----------------------------------------------------------------------------------------------

CLOSED = ("unshare", "--user", "--map-root-user", "sh", "-c",
          "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces; exec \"$@\"", "-")  # fmt: skip
WITHOUT_TC = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
              "for tc in $(which -a tc); do mount --bind /dev/null $tc; done; exec \"$@\"", "-")  # fmt: skip
# In a changed root nobody may make a user namespace, and without capabilities no other: what a container is like.
FORBIDDEN = (
    "unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
    'here=$PWD; mount --rbind / /mnt; exec chroot /mnt sh -c \'cd "$0"; exec setpriv --bounding-set=-all "$@"\' "$here" "$@"',
    "-",
)  # fmt: skip
ASK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from lockstep import cluster, ranks
from lockstep.commands.run import main

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "lockstep")
open("train.py", "w").write("print('RAN')")
print(cluster.available("bandwidth"))
try:
    run = ranks.run(ranks.Source("print('RAN')"), 2, network=cluster.slow_link("1gbit"))
    print("ran", run.ok)
except ranks.NotRun as missing:
    print(missing)
shell.run_cell_magic("ranks", "2 --bandwidth 1gbit --into run", "print('RAN')")
print(shell.user_ns["run"])
sys.stdout.flush()
sys.exit(main(["--bandwidth", "1gbit", "train.py"]))
"""


@pytest.mark.parametrize(
    ("world", "why"),
    [
        pytest.param(CLOSED, "limit for namespaces", id="limit"),
        pytest.param(WITHOUT_TC, "no tc (sudo apt install", id="tool", marks=pytest.mark.slow),
        pytest.param(FORBIDDEN, "make namespaces", id="forbidden", marks=pytest.mark.slow),
    ],
)
@needs("bandwidth")
def test_where_it_is_missing_it_says_so_and_runs_nothing(
    world: tuple[str, ...], why: str, python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"] + os.pathsep + tools.SYSTEM_PATH)
    before, during, cell, kept = python(ASK, *world, status=4).splitlines()
    assert before.startswith("slow links: ") and why in before
    assert during == before
    assert cell == f"not run: {before}" and kept == "None"


@needs("bandwidth")
def test_python_cell_and_command_run_where_it_is_there(python: Callable[..., str]) -> None:
    before, during, *rest = python(ASK).splitlines()
    assert (before, during) == ("None", "ran True")
    assert sorted(line for line in rest if "RAN" in line and "Run(" not in line) == (
        ["[rank 0] RAN"] * 2 + ["[rank 1] RAN"] * 2
    )


@needs("bandwidth")
def test_another_way_to_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warm process to fork from, the ranks are new interpreters, and stand in the same network."""
    monkeypatch.setenv("LOCKSTEP_START_METHOD", "spawn")
    text = "import os\nfrom lockstep.ranks import observe\nobserve('network', os.readlink('/proc/self/ns/net'))"
    run = ranks.run(ranks.Source(text), 2, network=cluster.slow_link("1gbit"))
    assert run.ok and len(set(run.observed("network"))) == 1
    assert run.observed("network")[0] != network()
