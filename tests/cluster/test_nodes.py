"""Nodes: hosts of their own, on which commands and ranks run, links that break on demand, and nothing that stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.leftovers import marked_processes, wait_until_gone
from support.machine import needs, networks, wait_all

from lockstep import cluster, ranks
from lockstep.cluster import tools
from lockstep.ranks.processes import descendants

pytestmark = needs("hosts")
SECONDS = 60  # for what takes a tenth of one on a machine that has nothing else to do

# Says what it hears on a port, one line a connection, until it is ended.
LISTEN = """
import socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    while True:
        connection, peer = server.accept()
        print(peer[0], flush=True)
        while connection.recv(1 << 16):
            pass
"""
# Connects to host and port, sends so many bytes, and says how that ended.
SEND = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as connection:
        connection.sendall(bytes(int(sys.argv[3])))
    print("sent")
except TimeoutError:
    print("silence")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[cluster.Nodes]:
    """Two nodes, shared by the tests that leave them as they were."""
    with cluster.Nodes(2) as both:
        yield both


def script(text: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", text, *map(str, arguments)]


def until(process: cluster.Process, text: str) -> None:
    """Wait until a command has printed this."""
    give_up = time.monotonic() + SECONDS
    while text not in process.output and time.monotonic() < give_up:
        time.sleep(0.01)
    assert text in process.output, process.output


def listen(nodes: cluster.Nodes, node: int, port: int) -> cluster.Process:
    """A listener on a node, ready."""
    process = nodes.run(node, script(LISTEN, port))
    until(process, "listening")
    return process


def send(nodes: cluster.Nodes, node: int, to: str, port: int, nbytes: int = 1, patience: float = 0.7) -> str:
    """What a sender on a node says; a connection that is not answered is given up after so many seconds."""
    process = nodes.run(node, script(SEND, to, port, nbytes, patience))
    assert process.wait(SECONDS) == 0, process.output
    return process.output.strip()


# What they are ----------------------------------------------------------------------------------------------------


def test_each_has_its_name_its_address_and_knows_the_others(nodes: cluster.Nodes) -> None:
    text = ("import socket\nnames = [name for _, name in socket.if_nameindex()]\n"
            "print(socket.gethostname(), socket.gethostbyname('node0'), socket.gethostbyname('node1'), *names)")  # fmt: skip
    said = [nodes.run(where, script(text)) for where in (0, 1, None)]
    assert wait_all(said, SECONDS) == [0, 0, 0]
    assert nodes.names == ["node0", "node1"] and nodes.addresses == ["10.77.0.100", "10.77.0.101"]
    assert said[0].output.split() == ["node0", *nodes.addresses, "lo", "eth0"]
    assert said[1].output.split() == ["node1", *nodes.addresses, "lo", "eth0"]
    assert said[2].output.split()[:3] == ["login", *nodes.addresses]


def test_a_command_is_this_user_in_this_folder_with_this_environment(nodes: cluster.Nodes, tmp_path: Path) -> None:
    """Its files are this machine's, and belong to whoever ran it."""
    text = "import os\nopen('made', 'w').write(os.environ['COLOUR'])\nprint(os.getuid(), os.getpgid(0) == os.getpid())"
    process = nodes.run(0, script(text), env={**os.environ, "COLOUR": "blue"}, cwd=tmp_path)
    assert process.wait(SECONDS) == 0
    assert process.output.split() == [str(os.getuid()), "True"]
    assert (tmp_path / "made").read_text() == "blue" and (tmp_path / "made").stat().st_uid == os.getuid()


def test_how_a_command_ends(nodes: cluster.Nodes, tmp_path: Path) -> None:
    assert nodes.run(0, ["sh", "-c", "exit 3"]).wait(SECONDS) == 3
    missing = nodes.run(0, ["no-such-command"])
    assert missing.wait(SECONDS) == 127 and "No such file" in missing.output
    sleeper = nodes.run(1, ["sleep", "300"])
    assert sleeper.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.05)
    sleeper.terminate()
    assert sleeper.wait(SECONDS) == -signal.SIGTERM
    sleeper.kill()  # it is gone: nobody else is hit
    with (tmp_path / "out").open("w") as out:
        assert nodes.run(0, ["echo", "there"], stdout=out).wait(SECONDS) == 0
    assert (tmp_path / "out").read_text() == "there\n"
    with pytest.raises(IndexError, match="no node 2"):
        nodes.run(2, ["true"])


@pytest.mark.parametrize("count", [0, 33])
def test_impossible_numbers(count: int) -> None:
    with pytest.raises(ValueError, match="nodes"):
        cluster.Nodes(count)


def test_two_clusters_at_once_do_not_meet(nodes: cluster.Nodes) -> None:
    listener = listen(nodes, 0, 4000)
    with cluster.Nodes(1) as other:
        assert send(other, 0, "node0", 4000) == "Connection refused"
    assert send(nodes, 1, "node0", 4000, patience=SECONDS) == "sent"
    listener.kill()


def test_torchrun_meets_across_nodes(nodes: cluster.Nodes, tmp_path: Path) -> None:
    """c10d rendezvous at a host's name, two ranks on each of two hosts, as on any cluster."""
    train = tmp_path / "train.py"
    train.write_text(
        "import os, socket, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "tensor = torch.tensor([10.0 ** dist.get_rank()])\n"
        "dist.all_reduce(tensor)\n"
        'sys.stdout.write(f\'{socket.gethostname()} {os.environ["GROUP_RANK"]} {os.environ["LOCAL_RANK"]} {tensor.item():.0f}\\n\')\n'
        "dist.destroy_process_group()\nsys.stdout.flush()\nos._exit(0)\n"
    )
    command = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29500",
        train,
    ]
    agents = [nodes.run(node, command) for node in range(2)]
    codes = wait_all(agents, 2 * SECONDS)
    said = [line for agent in agents for line in agent.output.splitlines() if line.startswith("node")]
    assert codes == [0, 0], [agent.output for agent in agents]
    assert sorted(line.split()[0] for line in said) == ["node0", "node0", "node1", "node1"]
    assert sorted(line.split()[2] for line in said) == ["0", "0", "1", "1"]
    assert {line.split()[3] for line in said} == {"1111"}
    assert len({tuple(line.split()[:2]) for line in said}) == 2  # a host is one group, whichever came first


# Ranks on them ----------------------------------------------------------------------------------------------------

WHO = """
import os, socket, torch, torch.distributed as dist
from lockstep.ranks import observe
dist.init_process_group("gloo")
tensor = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(tensor)
observe("host", socket.gethostname())
observe("own", socket.gethostbyname(socket.gethostname()))
observe("master", os.environ["MASTER_ADDR"])
observe("groups", [os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]])
observe("sum", tensor.item())
"""


def test_ranks_of_a_node_are_on_its_host() -> None:
    run = ranks.run(ranks.Source(WHO), 6, nodes=3, network=cluster.own_hosts())
    assert run.ok, run.cause
    assert run.observed("host") == ["node0", "node0", "node1", "node1", "node2", "node2"]
    assert run.observed("own") == [f"10.77.0.10{node}" for node in (0, 0, 1, 1, 2, 2)]
    assert run.observed("master") == ["10.77.0.100"] * 6
    assert run.observed("groups") == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert run.observed("sum") == [111111.0] * 6


def test_a_rank_sets_what_its_own_node_sends() -> None:
    """By the same call as on a slow link; the other node's card, and its ranks' loopback interface, stay as they are."""
    text = ("import os\nimport torch.distributed as dist\nfrom lockstep.cluster import set_bandwidth, tools\n"
            "from lockstep.ranks import observe\ndist.init_process_group('gloo')\n"
            "if dist.get_rank() == 2:\n    set_bandwidth('7mbit')\ndist.barrier()\n"
            "observe('queues', tools.use('tc', 'qdisc', 'show'))\n")  # fmt: skip
    run = ranks.run(ranks.Source(text), 4, nodes=2, network=cluster.own_hosts("1gbit"))
    assert run.ok, run.cause
    rates = [[line.split("rate ")[1].split()[0] for line in queues.splitlines() if "rate" in line and "eth0" in line]
             for queues in run.observed("queues")]  # fmt: skip
    assert rates == [["1Gbit"]] * 2 + [["7Mbit"]] * 2
    assert all("dev lo root" not in queues.replace("noqueue 0: dev lo root", "") for queues in run.observed("queues"))


def test_another_way_to_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warm process to fork from, each rank still goes to its host before it begins."""
    monkeypatch.setenv("LOCKSTEP_START_METHOD", "spawn")
    run = ranks.run(ranks.Source(WHO), 2, nodes=2, network=cluster.own_hosts("1gbit"))
    assert run.ok, run.cause
    assert run.observed("host") == ["node0", "node1"] and run.observed("sum") == [11.0, 11.0]


def test_the_wrong_interface_reaches_nobody() -> None:
    """What a learner sets has the last word, and lo leads no rank to another host."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    run = ranks.run(ranks.Source(WHO), 2, nodes=2, network=cluster.own_hosts(), environment=environment)
    assert run.cause is not None and run.cause.kind == "raised"
    assert "Connection refused" in str(run.cause.error)


def test_python_cell_and_command_put_them_there(python: Callable[..., str]) -> None:
    said = python("""
import sys
from IPython.core.interactiveshell import InteractiveShell
from lockstep.commands.run import main
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "lockstep")
text = "import socket; print(socket.gethostname())"
for options in ("2 --nodes 2", "2 --nodes 2 --hosts --bandwidth 1gbit", "2"):
    shell.run_cell_magic("ranks", options, text)
open("train.py", "w").write(text)
sys.stdout.flush()
sys.exit(main(["--nnodes", "2", "-n", "1", "--hosts", "--no-prefix", "train.py"]))
""").split("\n")
    name = os.uname().nodename
    assert said[:6] == ["[rank 0] node0", "[rank 1] node1"] * 2 + [f"[rank 0] {name}", f"[rank 1] {name}"]
    assert sorted(said[6:8]) == ["node0", "node1"]


# Faults -----------------------------------------------------------------------------------------------------------


def test_only_one_port_is_open(nodes: cluster.Nodes) -> None:
    """The rendezvous succeeds, and the ranks, at ports that the system chooses, cannot meet."""
    listeners = [listen(nodes, 0, 29500), listen(nodes, 0, 29501), listen(nodes, 1, 29501)]
    nodes.block_all_but(0, 29500)
    assert send(nodes, 1, "node0", 29500, patience=SECONDS) == "sent"
    assert send(nodes, 1, "node0", 29501) == "silence"
    assert send(nodes, 0, "node0", 29501, patience=SECONDS) == "sent"  # a firewall is between nodes
    assert send(nodes, 0, "node1", 29501) == "silence"  # the answer would come in from port 29501
    nodes.unblock(0)
    assert send(nodes, 0, "node1", 29501, patience=SECONDS) == "sent"
    with pytest.raises(ValueError, match="no port"):
        nodes.block_all_but(0, 70000)
    for listener in listeners:
        listener.kill()


def test_a_killed_node_says_goodbye_and_one_without_power_does_not(nodes: cluster.Nodes) -> None:
    connect = ("import socket, sys\nwith socket.create_connection((sys.argv[1], 4200), timeout=30) as connection:\n"
               "    print('connected', flush=True)\n    connection.settimeout(float(sys.argv[2]))\n"
               "    try:\n        print('read', connection.recv(1))\n"
               "    except TimeoutError:\n        print('silence')\n"
               "    except OSError as error:\n        print(error.strerror)\n")  # fmt: skip
    for power, patience, said in ((True, SECONDS, "read b''"), (False, 1, "silence")):
        # A listener that has left everything its command was, so that only the node itself still knows it.
        detached = nodes.run(1, ["sh", "-c", 'setsid "$0" -c "$1" 4200 &', sys.executable, LISTEN])
        until(detached, "listening")
        peer = nodes.run(0, script(connect, "node1", patience))
        until(peer, "connected")
        if not power:
            nodes.block_all_but(0)
        assert nodes.kill(1) >= 1
        assert peer.wait(2 * SECONDS) == 0
        assert said in peer.output
        nodes.unblock(0)
        assert nodes.run(1, ["true"]).wait(SECONDS) == 0  # it can be used again


def test_links_have_a_rate_each_way() -> None:
    with cluster.Nodes(2, bandwidth="20mbit") as nodes:
        ends = [(0, "eth0"), (1, "eth0"), (None, "port0"), (None, "port1")]
        said = [nodes.run(node, ["tc", "qdisc", "show", "dev", device]) for node, device in ends]
        assert wait_all(said, SECONDS) == [0] * 4
        assert all("rate 20Mbit" in one.output for one in said)


# How it ends ------------------------------------------------------------------------------------------------------

CLIENT = """
import time
from lockstep import cluster
with cluster.Nodes(2) as nodes:
    for node in range(2):  # somebody who stays, and somebody who has detached from everything and ignores signals
        nodes.run(node, ["sh", "-c", "trap '' TERM INT HUP; setsid sleep 300 & sleep 300"])
    print(nodes._namespace_host.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("victim", ["client", "namespace host", "its init", "client and namespace host", "Ctrl-C"])
def test_whatever_ends_it_nothing_stays(victim: str) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, start_new_session=True)  # fmt: skip
    assert client.stdout is not None
    host = int(client.stdout.readline())
    give_up = time.monotonic() + SECONDS
    while len(theirs := [pid for pid in marked_processes() if pid in descendants(client.pid)]) < 8:
        assert time.monotonic() < give_up, theirs  # the namespace host, its init, on each node a shell and two sleepers
        time.sleep(0.02)
    assert len(private := networks(theirs)) == 3
    init = min(pid for pid in descendants(host))
    for pid in {
        "client": [client.pid],
        "namespace host": [host],
        "its init": [init],
        "client and namespace host": [host, client.pid],
    }.get(victim, []):
        os.kill(pid, signal.SIGKILL)
    if victim == "Ctrl-C":
        os.kill(client.pid, signal.SIGINT)
    left = wait_until_gone([pid for pid in theirs if victim != "its init" or pid != host])
    client.kill()
    client.wait(20)
    client.stdout.close()
    assert left == []
    assert wait_until_gone(theirs) == []
    assert networks(marked_processes()) & private == set()


def test_mounts_stay_private_where_the_system_shares_them(python: Callable[..., str]) -> None:
    """Under systemd every mount is shared, so that root's would show up on the machine itself."""
    shared = ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "shared")
    said = python(
        """
from pathlib import Path
from lockstep import cluster, ranks
def mounts():
    return Path("/proc/self/mountinfo").read_text()
before = mounts()
assert "shared:" in before
with cluster.Nodes(2) as nodes:
    assert nodes.run(0, ["true"]).wait(60) == 0
    print(mounts() == before)
run = ranks.run(ranks.Source("pass"), 2, nodes=2, network=cluster.own_hosts())
print(run.ok, mounts() == before)
""",
        *shared,
    )
    assert said.split() == ["True", "True", "True"]


def test_a_cluster_that_is_gone_says_so() -> None:
    with cluster.Nodes(1) as nodes:
        process = nodes.run(0, ["sleep", "300"])
        nodes._namespace_host.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        with pytest.raises(cluster.ClusterError, match="gone"):
            nodes.run(0, ["true"])
    nodes.close()


# Where it is missing ----------------------------------------------------------------------------------------------


def test_where_it_is_missing_it_says_so_and_runs_nothing(
    python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `ip`: what asks for hosts is not run, what only says that there are nodes runs as ever."""
    monkeypatch.setenv("PATH", os.environ["PATH"] + os.pathsep + tools.SYSTEM_PATH)
    hidden = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
              "for ip in $(which -a ip); do mount --bind /dev/null $ip; done; exec \"$@\"", "-")  # fmt: skip
    said = python(
        """
import sys
from IPython.core.interactiveshell import InteractiveShell
from lockstep import cluster, ranks
from lockstep.commands.run import main
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "lockstep")
print(cluster.available("hosts"))
for attempt in (lambda: cluster.Nodes(2),
                lambda: ranks.run(ranks.Source("print('RAN')"), 2, nodes=2, network=cluster.own_hosts())):
    try:
        attempt()
    except ranks.NotRun as missing:
        print(missing)
shell.run_cell_magic("ranks", "2 --nodes 2 --hosts", "print('RAN')")
shell.run_cell_magic("ranks", "2 --nodes 2", "import os; print('here', os.environ['GROUP_RANK'])")
open("train.py", "w").write("print('RAN')")
sys.stdout.flush()
sys.exit(main(["--nnodes", "2", "-n", "1", "--hosts", "train.py"]))
""",
        *hidden,
        status=4,
    ).splitlines()
    line = "several nodes: no ip (sudo apt install iproute2)"
    assert said == [line, line, line, f"not run: {line}", "[rank 0] here 0", "[rank 1] here 1"]
