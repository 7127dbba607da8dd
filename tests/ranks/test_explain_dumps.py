"""`lockstep explain`: what a job has left tells which rank diverged at which call, and no dump is able to run anything."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call

from lockstep.outside import dumps, explain, leftovers
from lockstep.ranks.report import Cause, Kind

WHOLE = ("0", "default_pg")
PAIR = ("1", "pair")
OTHER = ("2", "other")
HERE = "/home/me/train.py"
C10D = "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


@dataclass(frozen=True)
class Call:
    """An entry of a dump. `seq` None: the next number of its group."""

    kind: str
    size: tuple[int, ...] = (4,)
    group: tuple[str, str] = WHOLE
    done: bool = True
    dtype: str = "Float"
    line: int = 7
    seq: int | None = None


def dump(
    calls: list[Call], members: dict[tuple[str, str], list[int]], version: str = "2.10", library: str = "nccl"
) -> dict[str, Any]:
    """A rank's dump as torch writes it, with the keys that this version of the format has."""
    seen: dict[tuple[tuple[str, str], bool], int] = {}
    entries = []
    for number, one in enumerate(calls):
        between_two = one.kind.startswith(("send", "recv")) or one.kind == "coalesced"
        key = (one.group, between_two)
        seen[key] = seen.get(key, 0) + 1 if one.seq is None else one.seq
        entry: dict[str, Any] = {
            "record_id": number,
            "pg_id": int(one.group[0]),
            "process_group": one.group,
            "collective_seq_id": 0 if between_two else seen[key],
            "p2p_seq_id": seen[key] if between_two else 0,
            "op_id": number + 1,
            "profiling_name": f"{library}:{one.kind}",
            "time_created_ns": 1_800_000_000_000_000_000 + number,
            "input_sizes": [] if one.kind.endswith("barrier") else [list(one.size)],
            "input_dtypes": [] if one.kind.endswith("barrier") else [one.dtype],
            "output_sizes": [] if one.kind.endswith("barrier") else [list(one.size)],
            "output_dtypes": [] if one.kind.endswith("barrier") else [one.dtype],
            "state": "scheduled" if library == "gloo" else "completed" if one.done else "started",  # gloo's never changes
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": one.done,
            "timeout_ms": 600000,
            "is_p2p": between_two,
            "frames": [
                {"name": one.kind, "filename": C10D, "line": 9},
                {"name": "main", "filename": HERE, "line": one.line},
            ],
        }  # fmt: skip
        if version == "2.10":
            entry |= {"thread_id": "1", "thread_name": "python"}
        entries.append(entry)
    groups = {name: {"name": name, "desc": title, "ranks": str(ranks)} for (name, title), ranks in members.items()}
    return {"version": version, "pg_config": groups, "pg_status": {}, "comm_lib_version": "2.27", "entries": entries}


def write(folder: Path, ranks: dict[int, list[Call]], groups: dict[tuple[str, str], list[int]] | None = None,
          version: str = "2.10") -> Path:  # fmt: skip
    """A file for each of these ranks."""
    for rank, calls in ranks.items():
        own = {name: of for name, of in (groups or {WHOLE: sorted(ranks)}).items() if rank in of}
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump(calls, own, version), 2))
    return folder


def explained(folder: Path) -> list[Cause]:
    return explain.explain(leftovers.read([folder]))


def torchs_verdict(folder: Path) -> tuple[str, int, set[int]] | None:
    """The first call that torch's own tool finds fault with: ("missing" or "mismatch", its number, the ranks that it names)."""
    from torch.distributed.flight_recorder.components import builder, config_manager, loader

    arguments = config_manager.JobConfig().parse_args([str(folder), "--prefix", "trace_", "--allow-incomplete-ranks"])
    try:
        details, version = loader.read_dir(arguments)  # switches the garbage collector off
        found = builder.build_db(details, arguments, version)
    finally:
        gc.enable()
    for one in found.collectives:
        if one.missing_ranks:
            return "missing", one.collective_seq_id, one.missing_ranks
        if one.mismatch_collectives:
            return "mismatch", one.collective_seq_id, set(one.mismatch_collectives)
    return None


AR, OPEN = Call("all_reduce"), Call("all_reduce", done=False, line=9)
IN_PAIR, IN_OTHER = (Call("all_reduce", group=group, done=False) for group in (PAIR, OTHER))
THREE = {WHOLE: [0, 1, 2]}
PAIRS = {**THREE, PAIR: [0, 1], OTHER: [0, 1]}


@dataclass(frozen=True)
class Scene:
    """Three ranks' dumps: what `explain` says first, whom it accuses, and what torch's tool finds in them."""

    ranks: dict[int, list[Call]]
    said: str
    accused: tuple[int, ...] = ()
    torch: tuple[str, int, set[int]] | None = None
    groups: dict[tuple[str, str], list[int]] = field(default_factory=lambda: THREE)


def one_brings(other: Call, rank: int) -> dict[int, list[Call]]:
    return {one: [AR, other if one == rank else OPEN] for one in range(3)}


LATE = "ranks 0 and 2 wait in all_reduce #2, which rank 1 never called."
SCENES = {
    "late": Scene({0: [AR, OPEN], 1: [AR], 2: [AR, OPEN]}, LATE, (1,), ("missing", 2, {1})),
    "finished": Scene({0: [AR, AR, AR, OPEN], 1: [AR, AR], 2: [AR, AR, AR, OPEN]},
                      "ranks 0 and 2 called all_reduce #3, which rank 1 never called.", (1,), ("missing", 3, {1})),
    "never began": Scene({0: [OPEN], 1: [], 2: [OPEN]}, "ranks 0 and 2 wait in all_reduce #1, which rank 1 never called.",
                         (1,), ("missing", 1, {1})),
    "last call not yet noted as ended": Scene({0: [AR, OPEN], 1: [Call("all_reduce", done=False)], 2: [AR, OPEN]}, LATE, (1,),
                                              ("mismatch", 1, {1})),
    "size": Scene(one_brings(Call("all_reduce", (8,), done=False), 1),
                  "in all_reduce #2, rank 1 passed 8 × float32, and ranks 0 and 2 passed 4 × float32.", (1,), ("mismatch", 2, {1})),
    "size of rank 0": Scene(one_brings(Call("all_reduce", (8,), done=False), 0),
                            "in all_reduce #2, rank 0 passed 8 × float32, and ranks 1 and 2 passed 4 × float32.", (0,), ("mismatch", 2, {0})),
    "dtype": Scene(one_brings(Call("all_reduce", dtype="Half", done=False), 2),
                   "in all_reduce #2, rank 2 passed 4 × float16, and ranks 0 and 1 passed 4 × float32.", (2,), ("mismatch", 2, {2})),
    "kind": Scene(one_brings(Call("broadcast", done=False), 1), "rank 1 called broadcast #2 where ranks 0 and 2 called all_reduce #2.",
                  (1,), ("mismatch", 2, {1})),
    "subgroup": Scene({0: [AR, IN_PAIR], 1: [AR], 2: [AR]}, "rank 0 waits in all_reduce #1 of pair, which rank 1 never called.",
                      (1,), ("missing", 1, {1}), {**THREE, PAIR: [0, 1]}),
    "all wait": Scene({rank: [AR, OPEN] for rank in range(3)},
                      "all ranks wait in all_reduce #2: each has called it, with tensors of the same size, and it did not end."),
    "one device": Scene({0: [AR, OPEN], 1: [AR, AR], 2: [AR, AR]}, "rank 0 waits in all_reduce #2, which has ended on ranks 1 and 2.",
                        (), ("mismatch", 2, {0})),
    "receive": Scene({0: [AR], 1: [AR, Call("recv 1<-0", done=False)], 2: [AR]}, "rank 1 waits to receive from rank 0.", (0,),
                     ("missing", 0, {0, 2})),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_who_diverged_at_which_call_and_torchs_tool_agrees(name: str, tmp_path: Path) -> None:
    scene = SCENES[name]
    write(tmp_path, scene.ranks, scene.groups)
    cause = explained(tmp_path)[0]
    assert (cause.headline, cause.ranks) == (scene.said, scene.accused)
    assert {row.rank for row in cause.rows if row.differs} == set(scene.accused)
    theirs = torchs_verdict(tmp_path)
    if (
        theirs and theirs[0] == "mismatch" and scene.torch
    ):  # its reference is the rank whose file the system lists first
        assert theirs[:2] == scene.torch[:2] and theirs[2] in (scene.torch[2], set(range(3)) - scene.torch[2])
    else:
        assert theirs == scene.torch


CROSSED = {
    "blocking": {0: [IN_PAIR], 1: [IN_OTHER], 2: []},
    "not blocking": {0: [IN_PAIR, IN_OTHER], 1: [IN_OTHER, IN_PAIR], 2: []},
}


@pytest.mark.parametrize("how", CROSSED)
def test_two_groups_in_crossed_order(how: str, tmp_path: Path) -> None:
    """torch's tool names one of the ranks if the calls block, and nothing if they don't: it looks at one group at a time."""
    [cause] = explained(write(tmp_path, CROSSED[how], PAIRS))
    assert cause.headline.startswith(
        "rank 0 waits in all_reduce #1 of pair, rank 1 waits in all_reduce #1 of other: they call"
    )
    assert cause.ranks == () and cause.notes == (explain.SAME_ORDER,)
    # Which of the two it names depends on the file that the system lists first.
    assert torchs_verdict(tmp_path) in ([("missing", 1, {0}), ("missing", 1, {1})] if how == "blocking" else [None])


def test_calls_of_different_rounds_are_not_crossed(tmp_path: Path) -> None:
    """Rank 0 is a round behind in one group: its order there says nothing about the calls that rank 1 waits in."""
    done = Call("all_reduce", group=PAIR)
    causes = explained(write(tmp_path, {0: [IN_PAIR, IN_OTHER], 1: [done, IN_OTHER, IN_PAIR], 2: []}, PAIRS))
    assert causes and not any("different orders" in cause.headline for cause in causes)


def test_a_rank_that_is_late_because_it_waits_in_another_group_comes_second(tmp_path: Path) -> None:
    groups = {**THREE, PAIR: [1, 2]}
    causes = explained(write(tmp_path, {0: [OPEN], 1: [IN_PAIR], 2: []}, groups))
    assert [cause.ranks for cause in causes] == [(2,), (1, 2)]
    assert causes[1].notes[0] == "Rank 1 waits in all_reduce #1 of pair."


def test_nothing_is_said_of_calls_that_all_made(tmp_path: Path) -> None:
    assert explained(write(tmp_path, {rank: [AR, AR] for rank in range(3)})) == []
    assert torchs_verdict(tmp_path) is None


def test_a_shape_that_differs_is_no_mismatch_if_the_number_of_elements_does_not(tmp_path: Path) -> None:
    """NCCL and gloo see elements alone. torch's tool calls it a mismatch."""
    ranks = {rank: [Call("all_reduce", (2, 3) if rank else (3, 2)), OPEN][: 1 + (rank > 0)] for rank in range(3)}
    [cause] = explained(write(tmp_path, ranks))
    assert (
        cause.kind is Kind.HANG and cause.headline == "ranks 1 and 2 wait in all_reduce #2, which rank 0 never called."
    )
    theirs = torchs_verdict(tmp_path)
    assert theirs is not None and theirs[:2] == ("mismatch", 1)


def test_sizes_that_differ_and_hurt_nobody_are_not_the_cause(tmp_path: Path) -> None:
    ranks = {rank: [Call("all_gather", (rank + 1,)), AR, OPEN][: 2 if rank == 1 else 3] for rank in range(3)}
    [cause] = explained(write(tmp_path, ranks))
    assert cause.kind is Kind.HANG and cause.ranks == (1,) and "all_reduce #3" in cause.headline


@pytest.mark.parametrize("kind", ["all_gather_v", "reduce_scatter_v", "all_to_all_v_single"])
def test_collectives_that_allow_other_sizes(kind: str, tmp_path: Path) -> None:
    [cause] = explained(write(tmp_path, {rank: [Call(kind, (rank + 1,), done=False)] for rank in range(3)}))
    assert cause.kind is Kind.HANG


def test_numbers_that_are_not_recorded(tmp_path: Path) -> None:
    """With gloo a monitored barrier takes two numbers and is in no dump."""
    last = Call("all_reduce", seq=4, done=False)
    [cause] = explained(write(tmp_path, {0: [AR, last], 1: [AR], 2: [AR, last]}))
    assert cause.headline == "ranks 0 and 2 wait in all_reduce #4, which rank 1 never called."


def test_of_two_ranks_that_disagree_none_is_accused(tmp_path: Path) -> None:
    [cause] = explained(write(tmp_path, {0: [OPEN], 1: [Call("broadcast", done=False)]}))
    assert (cause.kind, cause.ranks) == (Kind.MISMATCH, ())


def test_a_ring_buffer_that_has_dropped_its_oldest_calls(tmp_path: Path) -> None:
    tail = [Call("all_reduce", seq=number) for number in range(90, 100)]
    last = Call("all_reduce", seq=100, done=False)
    [cause] = explained(write(tmp_path, {0: [*tail[5:], last], 1: tail, 2: [*tail[2:], last]}))
    assert cause.headline == "ranks 0 and 2 wait in all_reduce #100, which rank 1 never called."


def test_parts_of_a_coalesced_call_count_as_one(tmp_path: Path) -> None:
    """Only its last entry tells how it went: the parts stay as they were."""

    def batch(*parts: str, done: bool) -> list[Call]:
        return [*(Call(part, seq=1, done=False) for part in parts), Call("coalesced", (), seq=1, done=done)]

    ended = {0: batch("send 0->1", done=True), 1: batch("send 1->0", "recv 1<-0", done=True), 2: []}
    assert explained(write(tmp_path, ended, THREE)) == []
    [cause] = explained(write(tmp_path, {**ended, 1: batch("recv 1<-2", "send 1->0", done=False)}, THREE))
    assert (cause.headline, cause.ranks) == ("rank 1 waits to receive from rank 2.", (2,))


def test_group_ranks_of_a_transfer_are_said_as_ranks_of_the_job(tmp_path: Path) -> None:
    waits = Call("recv 0<-1", group=PAIR, done=False)
    [cause] = explained(write(tmp_path, {0: [], 1: [waits], 2: []}, {**THREE, PAIR: [1, 2]}))
    assert (cause.headline, cause.ranks) == ("rank 1 waits to receive from rank 2.", (2,))


def test_groups_that_were_split_off_may_share_a_name(tmp_path: Path) -> None:
    half = Call("all_reduce", group=PAIR, done=False)
    for rank, calls in enumerate(([half], [half], [Call("broadcast", group=PAIR)], [Call("broadcast", group=PAIR)])):
        own = {WHOLE: [0, 1, 2, 3], PAIR: [0, 1] if rank < 2 else [2, 3]}
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump(calls, own)))
    [cause] = explained(tmp_path)
    assert cause.headline.startswith("all ranks wait in all_reduce #1 of pair") and len(cause.rows) == 2


@pytest.mark.parametrize("version", ["2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10"])
def test_every_version_of_the_format(version: str, tmp_path: Path) -> None:
    [cause] = explained(write(tmp_path, SCENES["late"].ranks, version=version))
    assert cause.headline == LATE and cause.frame is not None and cause.frame.line == 9


def test_json_dumps(tmp_path: Path) -> None:
    """As `_dump_fr_trace_json` writes them: without frames, pairs as lists."""
    for rank, calls in SCENES["late"].ranks.items():
        found = dump(calls, THREE)
        for entry in found["entries"]:
            del entry["frames"]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(found))
    assert explained(tmp_path)[0].headline == LATE


# What is not there, and what is hostile ------------------------------------------------------------------------------


def test_ranks_without_a_dump_are_named(tmp_path: Path) -> None:
    [cause] = explained(write(tmp_path, {0: [AR, OPEN], 2: [AR, OPEN]}, THREE))
    assert cause.headline == "ranks 0 and 2 wait in all_reduce #2; there is no dump of rank 1."
    assert cause.ranks == (1,) and cause.notes[-1].startswith("No dump of rank 1 could be read")


def test_one_rank_alone(tmp_path: Path) -> None:
    [cause] = explained(write(tmp_path, {0: [AR, OPEN]}, THREE))
    assert cause.headline == "rank 0 waits in all_reduce #2; there is no dump of ranks 1 and 2."


def test_gloos_dumps_do_not_say_who_belongs_to_a_group(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps(dump([AR, IN_PAIR], {}, library="gloo")))
    (tmp_path / "trace_1").write_bytes(pickle.dumps(dump([AR], {}, library="gloo")))
    [cause] = explained(tmp_path)
    assert cause.headline == "rank 0 waits in all_reduce #1 of pair; no other rank's dump shows a call of it."
    assert cause.ranks == () and cause.notes[-1].startswith("These dumps do not tell which ranks belong to pair")


class Hostile:
    """Unpickled by `pickle.load`, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_dump_runs_nothing(protocol: int, tmp_path: Path) -> None:
    made, folder = tmp_path / "made", tmp_path / "dumps"
    folder.mkdir()
    write(folder, {0: [AR, OPEN], 2: [AR, OPEN]}, THREE)
    hostile = {**dump([AR], THREE), "entries": Hostile(made)}
    (folder / "trace_1").write_bytes(pickle.dumps(hostile, protocol))
    done = call("explain", str(folder))
    assert not made.exists()
    assert done.returncode == 1 and "there is no dump of rank 1" in done.stdout
    assert (
        "trace_1: it holds more than plain data, or is broken: it asks for 'posix', 'mkdir'; nothing of it was run"
        in done.stderr
    )
    pickle.loads(pickle.dumps(hostile, protocol))
    assert made.exists(), "the dump was harmless, so this test shows nothing"


def test_a_dump_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(dump([AR], THREE), 2)
    assert dumps.parse(whole, 0).ended == {1}
    for length in range(1, len(whole) - 1, 7):
        with pytest.raises(dumps.NoDump):
            dumps.parse(whole[:length], 0)
    write(tmp_path, {0: [AR], 1: [AR]})
    (tmp_path / "trace_1").write_bytes(whole[:100])
    done = call("explain", str(tmp_path))
    assert done.returncode == 2 and "trace_1: it" in done.stderr, "an unreadable dump must not pass as a healthy one"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "what", [[], {"entries": 3}, {"version": "2.10", "entries": [{}]}, {"version": "2.10", "entries": [[1]]}]
)
def test_plain_data_that_is_no_dump(what: object) -> None:
    with pytest.raises(dumps.NoDump, match="it is no flight-recorder dump"):
        dumps.parse(pickle.dumps(what), 0)


def test_a_dump_can_not_steer_the_terminal_or_have_devices_read(tmp_path: Path) -> None:
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)
    found = dump([Call("all_reduce\x1b[2J", done=False)], {("0", "tp\x1b]0;x"): [0, 1]})
    found["entries"][0]["process_group"] = ("0", "tp\x1b]0;x")
    found["entries"][0]["frames"][1]["filename"] = str(pipe)
    (tmp_path / "trace_0").write_bytes(pickle.dumps(found))
    done = call("explain", str(tmp_path))
    assert done.returncode == 1 and "\x1b" not in done.stdout and "tp]0;x" in done.stdout


def test_a_folder_without_anything_in_it(tmp_path: Path) -> None:
    done = call("explain", str(tmp_path))
    assert done.returncode == 2 and "no flight-recorder dump" in done.stderr and not done.stdout
    (tmp_path / "notes.md").write_text("passed over in a folder, refused by name")
    assert call("explain", str(tmp_path / "notes.md")).stderr.startswith(
        f"lockstep explain: {tmp_path}/notes.md: it is no"
    )
    assert leftovers.read([tmp_path]).refused == []
    assert "there is no such file" in call("explain", str(tmp_path / "none")).stderr


def test_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    for run in "ab":
        (tmp_path / run).mkdir()
        write(tmp_path / run, {0: [AR]})
    [line] = leftovers.read([tmp_path]).refused
    assert "b/trace_0: there is another file of rank 0" in line


# The command, and what else a job leaves -------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path, SCENES["late"].ranks)
    done = call("explain", str(tmp_path))
    assert done.returncode == 1 and done.stdout.startswith(f"HANG at train.py:9: {LATE}\n") and not done.stderr
    done = call("explain", "--json", *(str(tmp_path / f"trace_{rank}") for rank in range(3)))
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["dumps"] == [0, 1, 2] and not said["refused"] and not said["missing"]
    [cause] = said["causes"]
    assert (cause["verdict"], cause["headline"], cause["ranks"], cause["at"]) == ("HANG", LATE, [1], [HERE, 9])
    assert [row["waits_in"] for row in cause["rows"]] == [
        "all_reduce #2",
        "nothing: all_reduce #1 has ended",
        "all_reduce #2",
    ]


def test_dumps_without_a_fault(tmp_path: Path) -> None:
    write(tmp_path, {0: [AR], 2: [AR]}, THREE)
    done = call("explain", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "NO HANG: ranks 0 and 2 made the same calls, and all of these have ended.\nThere is no dump of rank 1.\n"
    )


def error_file(folder: Path, rank: int, error: str, at: int) -> None:
    (folder / str(rank)).mkdir()
    printed = f'Traceback (most recent call last):\n  File "{HERE}", line {20 + rank}, in main\n    step()\n{error}\n'
    data = {"message": {"message": error, "extraInfo": {"py_callstack": printed, "timestamp": str(at)}}}
    (folder / str(rank) / "error.json").write_text(json.dumps(data))


def test_torchruns_error_files(tmp_path: Path) -> None:
    """The echo was written first: the cause is still the other one."""
    error_file(tmp_path, 0, "RuntimeError: [../third_party/gloo] Connection closed by peer [127.0.0.1]:1", 5)
    error_file(tmp_path, 2, "ValueError: a bad batch", 6)
    [cause] = explained(tmp_path)
    assert (cause.kind, cause.headline, cause.ranks) == (Kind.RAISED, "rank 2 raised ValueError: a bad batch", (2,))
    assert cause.frame is not None and cause.frame.short == "train.py:22"
    assert cause.notes[0].startswith("Rank 0 then failed with RuntimeError") and cause.notes[0].endswith(
        "not the cause."
    )
    done = call("explain", str(tmp_path))
    assert done.returncode == 1 and done.stdout.startswith("ERROR at train.py:22: rank 2 raised ValueError")


def test_error_files_beside_dumps(tmp_path: Path) -> None:
    write(tmp_path, SCENES["late"].ranks)
    error_file(tmp_path, 0, "RuntimeError: Timed out waiting 3000ms for recv operation to complete", 5)
    [hang] = explained(tmp_path)
    assert hang.headline == LATE and hang.notes[-1].startswith("Rank 0 then failed with RuntimeError: Timed out")
    error_file(tmp_path, 1, "KeyError: 'label'", 4)
    assert [cause.kind for cause in explained(tmp_path)] == [Kind.RAISED, Kind.HANG]


def test_a_real_error_file_of_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('a bad batch')\nmain()\n"
    )
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error_3.json")}
    subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, timeout=120)
    [cause] = explained(tmp_path)
    assert cause.headline == "rank 3 raised ValueError: a bad batch"
    assert cause.frame is not None and (cause.frame.short, cause.frame.text) == (
        "train.py:4",
        "raise ValueError('a bad batch')",
    )


SPY = """\
Process 7: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
{}
Thread 9 (idle): "Thread-1"
    wait (threading.py:320)
"""
IN_BARRIER = "    barrier (torch/distributed/distributed_c10d.py:5349)\n    wrapper (torch/distributed/c10d_logger.py:83)\n    <module> (train.py:9)"


def test_py_spys_texts(tmp_path: Path) -> None:
    (tmp_path / "stack_0.txt").write_text(SPY.format(IN_BARRIER))
    (tmp_path / "stack_1.txt").write_text(SPY.format("    load (data.py:3)\n    <module> (train.py:7)"))
    [cause] = explained(tmp_path)
    assert cause.headline == "rank 0 waits in barrier at train.py:9. Rank 1 is in no call at data.py:3."
    assert cause.ranks == (1,) and cause.notes[-1] == explain.NOT_NUMBERED


def test_py_spys_json(tmp_path: Path) -> None:
    for rank, frames in enumerate(([(C10D, 1, "barrier"), (HERE, 9, "main")], [(HERE, 4, "main")])):
        shown = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
        other = {"pid": 7, "os_thread_id": 9, "thread_name": "Thread-1", "frames": []}
        main = {"pid": 7, "os_thread_id": 7, "thread_name": "MainThread", "frames": shown}
        (tmp_path / f"stack_{rank}.json").write_text(json.dumps([other, main]))
    [cause] = explained(tmp_path)
    assert cause.headline == "rank 0 waits in barrier at train.py:9. Rank 1 is in no call at train.py:4."
    (tmp_path / "list_0.json").write_text("[1, 2]")
    assert leftovers.read([tmp_path]).refused == []


def test_stacks_tell_where_a_late_rank_was(tmp_path: Path) -> None:
    write(tmp_path, SCENES["late"].ranks)
    (tmp_path / "stack_1.txt").write_text(SPY.format("    load (data.py:3)\n    <module> (train.py:7)"))
    [cause] = explained(tmp_path)
    assert [row.frame.short for row in cause.rows if row.frame] == ["train.py:9", "data.py:3", "train.py:9"]


# Real dumps ----------------------------------------------------------------------------------------------------------

REAL = """\
import os, pickle, signal, sys, time
import torch, torch.distributed as dist
def late(rank):
    return [] if rank == 1 else [dist.all_reduce(torch.ones(4), async_op=True)]  # HERE late
def kind(rank):
    return [dist.barrier(async_op=True) if rank == 1 else dist.all_reduce(torch.ones(5), async_op=True)]  # HERE kind
def subgroup(rank):
    pair = dist.new_group([0, 1], group_desc="pair")
    if rank < 2:
        dist.barrier(pair)
    return [dist.all_reduce(torch.ones(4), group=pair, async_op=True)] if rank == 0 else []  # HERE subgroup
def fine(rank):
    dist.barrier()
    return []
def main(rank, folder, calls):
    signal.alarm(100)
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=3)
    dist.all_reduce(torch.ones(4))
    open_ = calls(rank)
    while True:  # that a call has ended is noted by another thread
        raw = torch._C._distributed_c10d._dump_fr_trace()
        if sum(not one["retired"] for one in pickle.loads(raw)["entries"]) == len(open_):
            break
        time.sleep(0.01)
    with open(f"{folder}/trace_{rank}", "wb") as file:
        file.write(raw)
    store = dist.distributed_c10d._get_default_store()
    store.add("written", 1)
    while store.add("written", 0) < 3:
        time.sleep(0.01)
    os._exit(0)
if __name__ == "__main__":
    for calls in (late, kind, subgroup, fine):
        folder = f"{sys.argv[1]}/{calls.__name__}"
        os.mkdir(folder)
        children = []
        for rank in range(3):
            children.append(os.fork())
            if not children[-1]:
                main(rank, folder, calls)
        for child in children:
            os.waitpid(child, 0)
"""
REALLY = {
    "late": (LATE, 1),
    "kind": ("rank 1 called barrier #2 where ranks 0 and 2 called all_reduce #2.", 1),
    "subgroup": ("rank 0 waits in all_reduce #2 of pair, which rank 1 never called.", 1),
}


@pytest.mark.slow
def test_dumps_that_torch_has_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REAL)
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = leftovers.read([tmp_path / "fine"])
    assert sorted(found.dumps) == [0, 1, 2] and explain.explain(found) == [], done.stderr
    assert all(len(dump.collectives) == 2 for dump in found.dumps.values()), "these dumps show nothing"
    for name, (said, rank) in REALLY.items():
        [cause] = explained(tmp_path / name)
        here = next(number for number, line in enumerate(REAL.splitlines(), 1) if line.endswith(f"# HERE {name}"))
        assert (cause.headline, cause.ranks, cause.frame and cause.frame.line) == (said, (rank,), here)
    for name in ("late", "kind"):
        # torch's tool has to be told who belongs to the group: gloo does not write it.
        for file in (tmp_path / name).iterdir():
            whole = pickle.loads(file.read_bytes())
            whole["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
            file.write_bytes(pickle.dumps(whole))
        theirs = torchs_verdict(tmp_path / name)
        assert theirs is not None and theirs[1] == 2 and theirs[2] in ({1}, {0, 2})
        assert explained(tmp_path / name)[0].headline == REALLY[name][0]
