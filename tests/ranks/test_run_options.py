"""torchrun's command line: each option has its effect in `lockstep run`, or is refused with what to do instead."""

import argparse
import re
from pathlib import Path

import pytest
from support import ROOT

from lockstep.commands import run
from lockstep.commands.run_options import REFUSED, are_elsewhere, meeting_of, nodes_of, parser, remarks
from lockstep.commands.run_slurm import fill_in

ENVIRONMENT = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME TORCHELASTIC_RUN_ID CUDA_VISIBLE_DEVICES"
print(*(f"{name}={os.environ.get(name)}" for name in names.split()))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "shows.py"
    path.write_text(ENVIRONMENT)
    return str(path)


def test_every_option_of_torchrun_is_known() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = {name for action in parser("lockstep run")._actions for name in action.option_strings}
    assert not theirs - ours


def test_every_option_of_torchrun_is_documented() -> None:
    from torch.distributed.run import get_args_parser

    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    names = {name for action in get_args_parser()._actions for name in action.option_strings if "-" in name[2:]}
    assert not [name for name in names if f"`{name}" not in page]


REFUSALS = [
    ["--node-rank=1"],
    ["--nnodes=2", "--node-rank=2"],
    ["--nnodes=2", "--rdzv-backend=c10d"],
    ["--nnodes=2", "--rdzv-endpoint=node0:port"],
    ["--nnodes=2", "--rdzv-endpoint=node0:29500", "--rdzv-backend=etcd-v2"],
    ["--nnodes=1:2", "--rdzv-endpoint=node0:29500"],
    ["--nnodes=1:2", "--rdzv-id=job"],
    ["--nnodes=2", "--node-rank=0", "--max-restarts=1"],
    ["--nnodes=2", "--node-rank=0", "--hosts"],
    ["--nnodes=2", "--node-rank=0", "--timeline=steps.html"],
    ["--rdzv-endpoint", "node0:29500"],
    ["--rdzv-backend=etcd-v2"],
    ["--master-addr=10.0.0.7"],
    ["--local-addr=10.0.0.7"],
    ["--rdzv-conf=timeout=3"],
    ["--log-dir=/tmp/logs"],
    ["--tee", "3"],
    ["-t3"],
    ["-r", "1"],
    ["--logs-specs=mine"],
    ["--event-log-handler=console"],
    ["--numa-binding=node"],
    ["--monitor-interval=5"],
    ["--duplicate-stdout-filters=loss"],
    ["--signals-to-handle=SIGUSR1"],
    ["--no-python", "-m"],
    ["--local-ranks-filter=2"],
    ["--nnodes=2:1"],
    ["--spawns"],  # beside -n 2
]


@pytest.mark.parametrize("options", REFUSALS, ids=" ".join)
def test_what_can_have_no_effect_is_refused_and_nothing_runs(
    options: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["-n", "2", *options, script])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert not said.out
    first, rest = said.err.split("\n", 1)
    assert first.startswith("lockstep run: ") and re.search("leave|must be", first), first
    assert rest == "All options: lockstep run --help\n"
    assert "As torchrun" not in said.err


def test_a_variable_of_torchruns_counts_as_its_option(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    with pytest.raises(SystemExit):
        run.main([script])
    assert "--node-rank 1 is for a job on several machines" in capsys.readouterr().err


ONE_NODE = [
    [],
    ["--standalone"],
    ["--nnodes=1"],
    ["--nnodes=1:1"],
    ["--nnodes=1:2"],
    ["--standalone", "--rdzv-endpoint=node0:29500"],
    ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    ["--node-rank=0", "--master-addr=127.0.0.1", "--master_port=29501"],
    ["--redirects=0", "--start-method=spawn", "--run-path"],
]


@pytest.mark.parametrize("options", ONE_NODE, ids=" ".join)
def test_one_node_on_this_machine_runs(options: list[str], script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["-n", "1", *options, script]) == 0
    said = capsys.readouterr()
    assert "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1" in said.out
    assert ("MASTER_PORT" in said.err) == any("port=" in option for option in options)


EFFECTS = {
    "--role trainer": "ROLE_NAME=trainer",
    "--rdzv-id job7": "TORCHELASTIC_RUN_ID=job7",
    "--nnodes 2": "GROUP_RANK=1 GROUP_WORLD_SIZE=2",
    "--local-ranks-filter 1": "RANK=1",
}


@pytest.mark.parametrize("options", EFFECTS)
def test_an_option_has_its_effect(options: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["-n", "2", *options.split(), script]) == 0
    said = capsys.readouterr()
    assert EFFECTS[options] in said.out
    assert ("[rank 0] " in said.out) == ("filter" not in options)
    assert ("2 nodes are on this machine" in said.err) == ("nnodes" in options)


def test_with_virtual_local_ranks_each_rank_sees_its_own_gpu(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert run.main(["-n", "2", "--virtual-local-rank", "--device", "cuda", script]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    for line, rank, gpu in zip(lines, (0, 1), (5, 7), strict=True):
        assert f" RANK={rank} LOCAL_RANK=0 " in " " + line.partition("] ")[2]
        assert line.endswith(f"CUDA_VISIBLE_DEVICES={gpu}")


def test_any_program_can_be_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["-n", "2", "--no-python", "sh", "-c", "echo I am $RANK"]) == 0
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]
    assert "its collectives are not seen" in said.err
    assert run.main(["-n", "2", "--no-python", "sh", "-c", "exit $((RANK * 3))"]) == 1
    assert "rank 1 left with status 3" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run.main(["--no-python", str(tmp_path / "nothing")])
    assert ended.value.code == 2


SPAWNS = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, store, how):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    total = torch.ones(2)
    if how == "hang" and rank == 1:
        dist.broadcast(total, 0)
    dist.all_reduce(total)
    print("sum", total.tolist(), flush=True)

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[2], sys.argv[1]), nprocs=2)
    print("trained")
"""


def test_a_script_that_starts_its_ranks_itself_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    assert run.main(["--spawns", str(script), "well", str(tmp_path / "well")]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["sum [2.0, 2.0]"] * 2 + ["trained"] and not said.err
    assert run.main(["--spawns", str(script), "hang", str(tmp_path / "hang")]) == 1
    said = capsys.readouterr()
    assert "trained" not in said.out
    assert re.search(r"HANG after .*spawns\.py", said.err) and "broadcast" in said.err and "all_reduce" in said.err
    assert 'Rank 1 took the branch at line 10 (if how == "hang" and rank == 1); rank' in " ".join(said.err.split())


OURS = ["--hosts", "--nnodes=2", "--watch-replicas", "--max-restarts=1", "--bandwidth=1gbit", "--virtual-local-rank"]


@pytest.mark.parametrize("option", OURS)
def test_what_is_for_ranks_of_ours_is_refused_beside_spawns(
    option: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--spawns", option, script])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err.startswith(f"lockstep run: {option.partition('=')[0]}: with --spawns"), said.err


SPAWNING = {
    "mp": "import torch.multiprocessing as mp\n# mp.spawn(work)\nif False:\n    mp.spawn(work, nprocs=2)\n",
    "in full": "import torch.multiprocessing\n\nif False:\n    torch.multiprocessing.start_processes(work)\n",
    "its name": "from torch.multiprocessing import spawn\n\nif False:\n    spawn(work)\n",
    "of torch": "from torch import multiprocessing\n\nif False:\n    print('go'); multiprocessing.spawn(work)\n",
}


@pytest.mark.parametrize("how", SPAWNING)
def test_who_calls_mp_spawn_without_spawns_is_told_of_it(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "both.py"
    script.write_text(SPAWNING[how])
    assert run.main(["-n", "1", str(script)]) == 0
    assert "both.py:4 calls mp.spawn" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['"""Not\nmp.spawn(work)\n"""', "import os.path as mp\nif False: mp.spawn(1)", "1 +", None]
)
def test_who_does_not_is_not(text: str | None, tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    if text is not None:
        script.write_text(text)
    options = parser("lockstep run").parse_args([str(script)])
    assert remarks(options, nodes_of("1")) == []


def test_with_spawns_the_script_says_where_its_ranks_meet(tmp_path: Path) -> None:
    for given in ("--master-port=29501", "--rdzv-endpoint=localhost:29500"):
        options = parser("lockstep run").parse_args(["--spawns", given, str(tmp_path / "none.py")])
        (said,) = remarks(options, nodes_of("1"))
        assert said.startswith("With --spawns the script itself says where its ranks meet")


def test_each_refused_option_says_what_to_do() -> None:
    for name, why in REFUSED.items():
        assert "leave" in why, name
    assert isinstance(parser("x"), argparse.ArgumentParser)


MEETINGS = {
    "--node-rank 1 --rdzv-endpoint alpha:29500": ("alpha", 29500, 1),
    "--rdzv-backend c10d --rdzv-endpoint alpha": ("alpha", 29400, None),
    "--node-rank 0 --master-addr alpha": ("alpha", 29500, 0),
    "--node-rank 0 --master-port 1234": ("127.0.0.1", 1234, 0),
    "--rdzv-endpoint [fe80::1]:7": ("fe80::1", 7, None),
}


@pytest.mark.parametrize("options", MEETINGS)
def test_where_nodes_meet(options: str, script: str) -> None:
    given = parser("lockstep run").parse_args(["--nnodes", "2", *options.split(), script])
    meeting = meeting_of(given)
    assert are_elsewhere(given) and (meeting.host, meeting.port, meeting.node) == MEETINGS[options]


TASK = {
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "2", "SLURM_JOB_ID": "10070", "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-09,11]",
}  # fmt: skip
UNDER_SRUN = {
    "": ("3", "gpu08:20167", "2", "10070"),
    "--nnodes 3 --rdzv-id mine": ("3", "gpu08:20167", "2", "mine"),
    "--rdzv-endpoint other:1": ("3", "other:1", None, None),
    "--standalone": (None, None, None, None),
    "--nnodes 1": ("1", None, None, None),
    "--spawns": (None, None, None, None),
}


@pytest.mark.parametrize("options", UNDER_SRUN)
def test_under_srun_slurm_says_what_the_command_line_does_not(options: str, script: str) -> None:
    given = parser("lockstep run").parse_args([*options.split(), script])
    said = fill_in(given, TASK)
    assert (given.nnodes, given.rdzv_endpoint, given.node_rank, given.rdzv_id) == UNDER_SRUN[options]
    assert bool(said) == (given.node_rank is not None)


@pytest.mark.parametrize(
    ("hosts", "first"), [("a1", "a1"), ("a1,b2", "a1"), ("x[3,5-6],y", "x3"), ("r[0-1]n[12,14]", "r0n12"), ("c-7-[01]", "c-7-01")]
)  # fmt: skip
def test_the_first_host_of_a_step(hosts: str, first: str, script: str) -> None:
    given = parser("lockstep run").parse_args([script])
    fill_in(given, {**TASK, "SLURM_STEP_NODELIST": hosts})
    assert given.rdzv_endpoint == f"{first}:20167"


def test_more_tasks_than_nodes_are_refused_and_one_task_is_left_alone(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parser("lockstep run").parse_args([script])
    assert (
        fill_in(given, {}) == fill_in(given, {**TASK, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) == ""
    )
    assert given.nnodes is None
    for name, value in {**TASK, "SLURM_STEP_NUM_TASKS": "12"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        run.main([script])
    assert stopped.value.code == 2
    assert "srun starts 12 tasks on 3 nodes" in capsys.readouterr().err


STARTS = {
    "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print)": 2,
    "from subprocess import Popen\n\nPopen(['true'])": 3,
    "import os\nif os.fork():\n    pass": 2,
    "import subprocess\nsubprocess.run(['git', 'log'])": None,
    "1 +": None,
}


@pytest.mark.parametrize("text", STARTS)
def test_with_one_rank_a_script_that_starts_processes_is_told_what_watches_them(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    for count in ("1", "2"):
        given = parser("lockstep run").parse_args(["-n", count, str(script)])
        said = [
            remark for remark in remarks(given, nodes_of("1")) if f"train.py:{STARTS[text]} starts processes" in remark
        ]
        assert len(said) == (count == "1" and STARTS[text] is not None)
        assert all("--spawns" in remark and "lockstep attach" in remark for remark in said)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_help_lists_every_option_once_under_its_title(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    said = parser("./lockstep run").format_help()
    assert max(map(len, said.splitlines())) <= columns
    usage, *rest = said.splitlines()
    assert usage == "usage: ./lockstep run [options] script ..."
    titles = [line for line in rest if re.fullmatch(r"\w[\w ]+:", line)]
    assert titles == ["For example:", "What to run:", "Launch:", "Hangs and failures:", "Output:"]
    heads = [line for line in rest if re.match(r"  -", line)]
    assert heads[0].startswith("  -n, --nproc-per-node N  ranks per node")
    listed = re.findall(r"(?<![\w-])--?[a-z][\w-]*", "\n".join(line[:26] for line in heads))
    assert len(listed) == len(set(listed)) > 25 and not any("_" in name for name in listed)
    under = dict(zip(titles, re.split(r"\n(?:\w[\w ]+:)\n", said)[1:], strict=True))
    assert (
        "--nnodes" in under["Launch:"] and "--deadline" in under["Hangs and failures:"] and "--json" in under["Output:"]
    )
    assert "--tee" not in said and parser("x").parse_args(["--nproc_per_node", "3", "t.py"]).nproc_per_node == "3"
