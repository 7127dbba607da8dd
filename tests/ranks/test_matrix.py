"""Every way in which a run may end, on 2 and on 4 ranks: each rank's outcome, and the cause that is named.

Rank 1 is the one that misbehaves, unless a case says otherwise. A case's text runs below `PRELUDE` on every rank.
"""

import dataclasses
import os
import re
import sys
from dataclasses import dataclass, field

import pytest

from lockstep import ranks
from lockstep.ranks import Outcome, explain
from lockstep.ranks.mismatch import OTHER_ORDER
from lockstep.ranks.report import Kind, Topic
from lockstep.ranks.text import code_around, silent_mismatch

PRELUDE = """\
import ctypes, os, signal, subprocess, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4) * rank
"""
ECHOES = {Outcome.RAISED, Outcome.STOPPED}
HUNG = {Outcome.HUNG}
DONE = {Outcome.RETURNED}


@dataclass(frozen=True)
class Case:
    """What happens (`text`), and what has to be found: the outcomes of rank 1 and of the others, and the cause."""

    name: str
    text: str
    one: set[Outcome]
    others: set[Outcome]
    kind: str = ""
    at_fault: tuple[int, ...] | None = (1,)
    says: tuple[str, ...] = ()
    line: str = ""
    limits: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("all return", "dist.all_reduce(t)", DONE, DONE),
    Case("one raises", "dist.all_reduce(t)\nif rank == 1:\n    raise ValueError('oops')\ndist.all_reduce(t)",
         {Outcome.RAISED}, ECHOES, "raised", says=("rank 1 raised ValueError: oops",), line="raise ValueError('oops')"),
    Case("all raise", "raise ValueError('oops')", {Outcome.RAISED}, {Outcome.RAISED, Outcome.STOPPED}, "raised", None,
         ("raised ValueError: oops",), "raise ValueError('oops')"),
    Case("sys.exit(0)", "if rank == 1:\n    sys.exit(0)\ndist.all_reduce(t)", {Outcome.EXITED}, HUNG, "hang",
         says=("in all_reduce #1, which rank 1 never called", "it has finished without a single collective"),
         line="sys.exit(0)"),
    Case("sys.exit(0) after a collective", "dist.all_reduce(t)\nif rank == 1:\n    sys.exit(0)\ndist.barrier()", {Outcome.EXITED},
         HUNG, "hang", says=("in barrier #1, which rank 1 never called: it has finished after all_reduce #1",), line="sys.exit(0)"),
    Case("the end after a collective", "dist.all_reduce(t)\nif rank != 1:\n    dist.barrier()", DONE, HUNG, "hang",
         says=("in barrier #1, which rank 1 never called: it has finished after all_reduce #1",), line="dist.barrier()"),
    Case("sys.exit(3)", "if rank == 1:\n    sys.exit(3)\ndist.all_reduce(t)", {Outcome.EXITED}, ECHOES, "exited",
         says=("rank 1 left with status 3 (by sys.exit)",), line="sys.exit(3)"),
    Case("os._exit(0)", "if rank == 1:\n    os._exit(0)\ndist.all_reduce(t)", {Outcome.EXITED}, ECHOES, "exited",
         says=("rank 1 left by os._exit",)),
    Case("SIGKILL", "dist.all_reduce(t)\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(t)",
         {Outcome.CRASHED}, ECHOES, "crashed", says=("rank 1 was killed by SIGKILL.",)),
    Case("SIGKILL, which others turn into a status", "dist.all_reduce(t)\nif rank == 1:\n    os.kill(os.getpid(), 9)\ntry:\n"
         "    dist.all_reduce(t)\nexcept RuntimeError:\n    sys.exit(1)", {Outcome.CRASHED}, {Outcome.EXITED, Outcome.STOPPED},
         "crashed", says=("rank 1 was killed by SIGKILL.",)),
    Case("an exception behind a status", "try:\n    if rank == 1:\n        raise ValueError('oops')\n    dist.all_reduce(t)\n"
         "except (ValueError, RuntimeError):\n    sys.exit(1)", {Outcome.EXITED}, {Outcome.EXITED, Outcome.STOPPED}, "exited",
         says=("rank 1 left with status 1 (by sys.exit), because of ValueError: oops",), line="raise ValueError('oops')"),
    Case("SIGTERM", "dist.all_reduce(t)\nif rank == 1:\n    os.kill(os.getpid(), 15)\ndist.all_reduce(t)",
         {Outcome.CRASHED}, ECHOES, "crashed", says=("rank 1 was killed by SIGTERM.",)),
    Case("segfault", "if rank == 1:\n    ctypes.string_at(0)\ndist.all_reduce(t)", {Outcome.CRASHED}, ECHOES, "crashed",
         says=("rank 1 was killed by SIGSEGV.",), line="ctypes.string_at(0)"),
    Case("another collective", "dist.all_reduce(t)\nif rank == 1:\n    dist.barrier()\ndist.all_reduce(t)", HUNG, HUNG,
         "hang", says=("rank 1 called barrier #1", "did not, and went on to"), line="dist.barrier()"),
    Case("only rank 0", "if rank == 0:\n    dist.all_reduce(t)", DONE, {Outcome.HUNG, Outcome.RETURNED}, "hang", None,
         ("rank 0 waits in all_reduce #1, which rank", "never called", "finished without a single collective")),
    Case("only rank 0, then all", "if rank == 0:\n    dist.all_reduce(t)\ndist.barrier()", HUNG, HUNG, "hang", None,
         ("all_reduce #1",)),
    Case("uneven batches", "m = DDP(torch.nn.Linear(4, 4))\nfor _ in range(5 - (rank == 1)):\n"
         "    m(t).sum().backward()", DONE, HUNG, "hang",
         says=("in backward (DDP's gradient all-reduce #5), which rank 1 never called",
               "it has finished after all_reduce #4"), line="m(t).sum().backward()"),
    Case("one constructs no DDP", "if rank != 1:\n    DDP(torch.nn.Linear(4, 4))\nelse:\n    dist.all_reduce(t)", HUNG,
         HUNG, "hang", None, ("DDP",)),
    Case("receive from each other", "dist.recv(t, src=rank ^ 1)", HUNG, HUNG, "hang", None,
         ("rank 0 waits to receive from rank 1", "rank 1 waits to receive from rank 0")),
    Case("receive from one who has left", "if rank == 0:\n    dist.recv(t, src=1)", DONE,
         {Outcome.HUNG, Outcome.RETURNED}, "hang", says=("rank 0 waits to receive from rank 1, which has finished",)),
    Case("busy loop", "if rank == 1:\n    while True: pass\ndist.barrier()", {Outcome.TIMED_OUT}, {Outcome.TIMED_OUT},
         "timed out", says=("rank 1 was still computing after 1.5 s of processor time", "waited in barrier #1"),
         line="while True: pass", limits={"cpu_limit": 1.5}),
    Case("busy loop on all", "while True: pass", {Outcome.TIMED_OUT}, {Outcome.TIMED_OUT}, "timed out", None,
         ("were still computing after 1.5 s of processor time, rank 0 at",), "while True: pass", {"cpu_limit": 1.5}),
    Case("long sleep", "if rank == 1:\n    time.sleep(100)\ndist.barrier()", {Outcome.TIMED_OUT}, {Outcome.TIMED_OUT},
         "timed out", says=("rank 1 did nothing for 1.5 s", "waited in barrier #1"), line="time.sleep(100)",
         limits={"idle_limit": 1.5}),
    Case("deadline", "while True: time.sleep(0.01)", {Outcome.TIMED_OUT}, {Outcome.TIMED_OUT}, "timed out", None,
         ("were still running after 1.5 s",), limits={"deadline": 1.5}),
    Case("stopped by a signal", "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()",
         {Outcome.TIMED_OUT}, {Outcome.TIMED_OUT}, "timed out",
         says=("rank 1 was held by a signal (SIGSTOP)", "waited in barrier #1"), limits={"idle_limit": 2}),
    Case("flood of output", "if rank == 1:\n    while True: print('x' * 1000)\ndist.barrier()",
         {Outcome.TOO_MUCH_OUTPUT}, ECHOES, "too much output", says=("rank 1 was stopped", "printing"),
         limits={"output_limit": 1 << 20}),
    Case("memory", "hoard = []\nif rank == 1:\n    while True: hoard.append(torch.ones(1 << 20))\ndist.barrier()",
         {Outcome.OUT_OF_MEMORY}, ECHOES, "out of memory", says=("rank 1 was stopped when it held", "of memory"),
         limits={"memory_limit": 400 << 20}),
    Case("input()", "input('name? ')", {Outcome.RAISED}, {Outcome.RAISED, Outcome.STOPPED}, "raised", None,
         ("raised EOFError",), "input('name? ')"),
    Case("a world of its own", "dist.destroy_process_group()\nos.environ.update(RANK='0', WORLD_SIZE='1')\n"
         "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
         "dist.all_reduce(torch.ones(rank + 1))\nprint(dist.get_world_size())", DONE, DONE),
    Case("a child that has detached itself", "code = 'import os, signal, time; signal.signal(15, signal.SIG_IGN); "
         "os.setsid(); os.fork() and os._exit(0); os.fork() and os._exit(0); time.sleep(300)'\n"
         "if rank == 1: subprocess.run([sys.executable, '-c', code])\ntime.sleep(0.1)\ndist.barrier()", DONE, DONE),
    Case("a fork that goes on as a copy", "if rank == 1 and not os.fork():\n    os.setsid(); time.sleep(300)\n"
         "dist.barrier()", DONE, DONE),
    Case("DETAIL and DDP", "DDP(torch.nn.Linear(2, 2))", {Outcome.CRASHED, Outcome.STOPPED, Outcome.RAISED},
         {Outcome.CRASHED, Outcome.STOPPED, Outcome.RAISED}, "crashed", None,
         ("killed by SIGSEGV: DDP() on gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL",)),
    Case("another shape than its list", "dist.all_gather([torch.empty(4) for _ in range(size)], t[rank == 1:])",
         {Outcome.RAISED}, ECHOES, "raised", (1,),
         ("rank 1 called all_gather with a tensor of shape (3) and a list of tensors of shape (4).",), "t[rank == 1:])"),
    Case("each rank leaves out other parameters", "layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))\n"
         "layers.forward = lambda x: layers[int(rank == 1)](x)\nm = DDP(layers)\nfor _ in range(2):\n    m(t).sum().backward()\n",
         {Outcome.RAISED}, {Outcome.RAISED}, "raised", None, ("waits for them: on rank", "1.weight; on rank 1 0.weight"), "m(t).sum().backward()"),
    Case("every rank leaves out the same parameter", "layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))\n"
         "layers.forward = lambda x: layers[0](x)\nm = DDP(layers)\nfor _ in range(2):\n    m(t).sum().backward()\n",
         {Outcome.RAISED}, {Outcome.RAISED}, "raised", None, ("still waits for them: 1.weight",), "m(t).sum().backward()"),
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_end_is_told(case: Case, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.name.startswith("DETAIL"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    limits = {"deadline": 120.0, **case.limits}
    run = ranks.run(ranks.Source(PRELUDE + case.text, case.name), size, **limits)  # type: ignore[arg-type]
    told = f"{run.cause}\n{[report.stderr for report in run.ranks]}"
    assert run.ranks[1].outcome in case.one, told
    assert {run.ranks[rank].outcome for rank in range(size) if rank != 1} <= case.others, told
    if not case.kind:
        assert run.cause is None, told
        return
    assert run.cause is not None
    assert run.cause.kind == case.kind, told
    for text in case.says:
        assert text in run.cause.headline, told
    if case.at_fault is not None:
        neither_knows = size == 2 and re.search("they wait for each other|did not, and went on to", run.cause.headline)
        assert set(run.cause.ranks) == (set(range(size)) if neither_knows else set(case.at_fault)), told
    if case.name.startswith("SIGKILL"):
        assert run.cause.frame is None, "its last call is not where it died"
    if case.line:
        assert run.cause.frame is not None, told
        assert run.cause.frame.text.endswith(case.line), told


RAISES = "if rank == 1:\n    raise ValueError('oops')\n"
WAITS = "waited in all_reduce #2 at fates:"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"dist.all_reduce(t)\n{RAISES}dist.all_reduce(t)", f"Ranks 0, 2 and 3 {WAITS}10; Lockstep ended them."),
        (f"m = DDP(torch.nn.Linear(4, 4))\n{RAISES}m(t).sum().backward()",
         "Ranks 0, 2 and 3 waited in backward (DDP's gradient all-reduce #1) at fates:10; Lockstep ended them."),
        (f"{RAISES}if rank == 2:\n    time.sleep(30)\nif rank != 3:\n    dist.barrier()",
         "Rank 0 waited in barrier #1 at fates:12, rank 2 had reached fates:10 (time.sleep(30)); Lockstep ended them. "
         "Rank 3 finished."),
        (f"{RAISES}if rank == 2:\n    time.sleep(0.3); raise KeyError('x')\nif rank == 3:\n    time.sleep(0.3); sys.exit(3)\nwhile True: pass",
         "Rank 0 had reached fates:13 (while True: pass); Lockstep ended it. Rank 2 raised KeyError: 'x' at fates:10, "
         "rank 3 left with status 3."),
        ("if rank == 1:\n    sys.exit(3)\ndist.barrier()",
         "Ranks 0, 2 and 3 waited in barrier #1 at fates:9; Lockstep ended them."),
    ],
    ids=["wait", "backward", "elsewhere", "fail too", "status"],
)  # fmt: skip
def test_a_failure_tells_what_became_of_the_other_ranks(text: str, told: str) -> None:
    run = ranks.run(ranks.Source(PRELUDE + text, "fates"), 4, deadline=60)
    assert run.cause is not None and "rank 1" in run.cause.headline, run.cause
    assert run.cause.notes == (told,)


def test_a_rank_that_fails_because_of_another_tells_where() -> None:
    run = ranks.run(
        # a first one: else the group may not have formed yet on rank 0 when rank 1 dies
        ranks.Source(
            PRELUDE
            + "dist.all_reduce(t)\nif rank == 1:\n    time.sleep(0.5); os.kill(os.getpid(), 9)\ndist.all_reduce(t)",
            "fates",
        ),
        2,
    )
    assert run.cause is not None
    assert re.search(r'Rank 0 then failed with "Connection .*" at fates:10: an echo', " ".join(run.cause.notes))


def test_two_calls_that_meet_by_chance_are_told_apart() -> None:
    """A skipped call is the usual reason when a loss meets gradients; the sizes alone would mislead."""
    loop = "m = DDP(torch.nn.Linear(4, 4))\nfor step in range(5):\n    m(t).sum().backward()\n"
    run = ranks.run(
        ranks.Source(PRELUDE + loop + "    if rank == 0 or step != 3:\n        dist.all_reduce(t[:1])", "skips"), 2
    )
    assert run.cause is not None
    assert run.cause.headline == "rank 0 called all_reduce #8 when `step` was 3; rank 1 did not."
    assert any("took the branch" in note and "(if rank == 0 or step != 3)" in note for note in run.cause.notes)
    said = [row.what for row in run.cause.rows]
    assert len({row.frame for row in run.cause.rows}) == 2
    assert sum(one.startswith("backward (DDP's gradient all-reduce #") for one in said) == 1, said


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("extents", ["4 if rank else 3", "3 if rank else 4"])
def test_shapes_that_do_not_fit(size: int, extents: str) -> None:
    """gloo may abort, raise or leave the larger one waiting (claim X10); the cause is one and the same."""
    run = ranks.run(ranks.Source(PRELUDE + f"dist.all_reduce(torch.ones({extents}))"), size)
    assert run.cause is not None
    assert run.cause.kind in ("mismatch", "hang")
    assert "in all_reduce #1" in run.cause.headline and "passed" in run.cause.headline
    assert "4 × float32" in run.cause.headline and "3 × float32" in run.cause.headline
    assert run.cause.frame is not None and "dist.all_reduce" in run.cause.frame.text
    assert run.silent_mismatch[0].shape != run.silent_mismatch[1].shape


@pytest.mark.parametrize(("each", "headlines"), [
    ("raise KeyError(('lr', 'lr', 'bs')[rank])",
     ("every rank raised KeyError: 'lr' (as rank 0 has it)", "rank 2 raised KeyError: 'bs'")),
    ("if rank == 1: raise KeyError('lr')\nif rank == 2: raise KeyError('lr')",
     ("rank 1 raised KeyError: 'lr'", "rank 2 raised KeyError: 'lr'")),
    ("raise ValueError(f'bad sample on {rank}')", ("every rank raised ValueError: bad sample on 0 (as rank 0 has it)",)),
    ("raise ValueError('bad')", ("every rank raised ValueError: bad",)),
])  # fmt: skip
def test_only_ranks_that_fail_alike_are_told_together(each: str, headlines: tuple[str, ...]) -> None:
    """The first speaks; of those that fail at the same time, any may be that."""
    cause = ranks.run(ranks.Source(f"{PRELUDE}dist.barrier()\n{each}\ndist.barrier()"), 3).cause
    assert cause is not None and cause.headline in headlines, cause
    others = [one for one in headlines if one != cause.headline]
    told = " ".join(cause.notes).lower()
    assert all(one.rpartition(" raised ")[2].lower() in told for one in others), told


@pytest.mark.parametrize("number", ["SIGUSR1", "SIGALRM"])
def test_a_signal_from_anywhere_has_no_line(number: str) -> None:
    text = f"import signal\nif rank == 1:\n    signal.raise_signal(signal.{number})\ndist.barrier()"
    cause = ranks.run(ranks.Source(PRELUDE + "dist.barrier()\n" + text), 2).cause
    assert cause is not None and cause.headline == f"rank 1 was killed by {number}." and cause.frame is None


def test_a_hang_by_sizes_names_the_call_wherever_it_is_waited_for() -> None:
    """The headline's line stands in the table too, and the section to read is the one on mismatches."""
    called = "work = dist.all_reduce(torch.ones(2 + rank), async_op=True)"
    cause = ranks.run(ranks.Source(PRELUDE + f"{called}\ntime.sleep(0.1)\nwork.wait()"), 2).cause
    assert cause is not None and cause.kind == "hang" and "passed" in cause.headline
    assert cause.frame is not None and cause.frame.text == called
    assert cause.frame in [row.frame for row in cause.rows]
    assert cause.topic is Topic.MISMATCHES


@pytest.mark.parametrize("size", [2, 3])
def test_a_call_of_its_own_within_join_is_answered_by_nobody(size: int) -> None:
    """A rank that is out of batches answers DDP's calls alone: the next of them meets the program's own."""
    text = (
        "ddp = DDP(torch.nn.Linear(1, 1))\nwith ddp.join():\n    for _ in range(5 - 2 * (rank == 1)):\n"
        "        loss = ddp(torch.ones(1, 1)).sum()\n        loss.backward()\n        dist.all_reduce(loss.detach())"
    )
    cause = ranks.run(ranks.Source(PRELUDE + text), size).cause
    assert cause is not None and cause.kind == "hang" and cause.topic is Topic.HANGS
    others = "rank 0" if size == 2 else "ranks 0 and 2"
    said = rf"{others} called all_reduce #\d+, which rank 1, out of batches, cannot answer: rank 1 waits in join\(\)\."
    assert re.fullmatch(said, cause.headline), cause.headline
    assert cause.frame is not None and cause.frame.text == "dist.all_reduce(loss.detach())"
    first = cause.rows[0]  # the line beside a call is where the rank waits for it
    assert first.frame is not None and first.frame.text == "loss.backward()"
    assert re.fullmatch(
        r"backward \((all_reduce #\d+ of DDP's forward|DDP's gradient all-reduce #\d+)\)", first.what
    ), first


@pytest.mark.parametrize(("first", "second"), [
    ("torch.ones(1)", "torch.ones(1, dtype=torch.int32)"),
    ("t, op=dist.ReduceOp.SUM", "t, op=dist.ReduceOp.MAX"),
])  # fmt: skip
def test_what_gloo_mixes_without_a_word_is_exposed(first: str, second: str) -> None:
    """Claims X09 and X11: nobody fails, the numbers are wrong."""
    text = f"if rank == 0:\n    dist.all_reduce({first})\nelse:\n    dist.all_reduce({second})"
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.ok, run.cause
    met = run.silent_mismatch
    assert set(met) == {0, 1}
    assert (met[0].dtype, met[0].reduce_op) != (met[1].dtype, met[1].reduce_op)


def test_a_mismatch_that_raised_is_not_told_as_one_that_nobody_noticed() -> None:
    """torch has compared the calls itself, and the program has caught its error: nothing was combined."""
    text = "try:\n    dist.all_reduce(torch.ones(4 + rank))\nexcept RuntimeError as error:\n    assert 'differ' in str(error)"
    run = ranks.run(ranks.Source(PRELUDE + text), 2, environment={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert run.ok, run.cause
    assert [call.failed for report in run.ranks for call in report.collectives] == [True, True]
    assert run.silent_mismatch and silent_mismatch(run) == ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="not run: this Python doesn't tell")
def test_a_hang_in_finally_names_the_error_that_nobody_has_seen() -> None:
    text = "try:\n    if rank == 1:\n        {}['bird']\n    dist.all_reduce(t)\nfinally:\n    dist.barrier()"
    run = ranks.run(ranks.Source(PRELUDE + text), 3)
    assert run.cause is not None and run.cause.kind is Kind.HANG
    line = PRELUDE.count("\n") + 3
    assert run.cause.headline.endswith(
        f"Rank 1 makes its call while it handles KeyError: 'bird', raised at cell line {line}."
    )
    text = "try:\n    {}['bird']\nexcept KeyError:\n    if rank:\n        dist.barrier()\n    dist.all_reduce(t)"
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None and "handles" not in run.cause.headline, "all do, so it parts nobody"


def test_the_text_of_an_error_of_the_users_own_is_not_made_meanwhile() -> None:
    text = (
        "class Own(Exception):\n    def __str__(self):\n        import time; time.sleep(60)\n"
        "try:\n    if rank == 1:\n        raise Own\n    dist.all_reduce(t)\nfinally:\n    dist.barrier()"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None and run.cause.kind is Kind.HANG


def test_an_honest_run_has_no_mismatch() -> None:
    text = """
m = DDP(torch.nn.Linear(4, 4)); m(t).sum().backward()
objects = [None] * size; dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
dist.gather(torch.ones(rank + 1), None) if False else dist.barrier()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
dist.all_reduce(torch.ones(1 + (rank > 1)), group=pairs[rank // 2])
"""
    run = ranks.run(ranks.Source(PRELUDE + text), 4)
    assert run.ok, run.cause
    assert run.silent_mismatch == {}


def test_a_hang_in_a_subgroup_names_only_its_members() -> None:
    text = "pair = dist.new_group([0, 1])\nif rank == 0:\n    dist.all_reduce(t, group=pair)"
    run = ranks.run(ranks.Source(PRELUDE + text), 4)
    assert run.cause is not None and run.cause.kind == "hang"
    assert run.cause.ranks == (1,)
    assert "which rank 1 never called" in run.cause.headline


SKIPS = {
    "continue": ("for step in range(3):\n    if rank == 1:\n        continue\n    dist.all_reduce(t)\ndist.barrier()", 2),
    "return": ("def work():\n    if rank:\n        return\n    dist.all_reduce(t)\n\nwork()\ndist.barrier()", 2),
    "by chance": ("for step in range(2 + rank):\n    if not t.numel():\n        continue\n    dist.all_reduce(t)\n"
                  "dist.barrier()", 0),
    "of another rank": ("for step in range(3 - rank):\n    if rank == 7:\n        continue\n    dist.all_reduce(t)\n"
                        "dist.barrier()", 0),
}  # fmt: skip


ONLY = {
    "and": ("for step in range(3):\n    if step == 1 and rank == 1:\n        continue\n    dist.all_reduce(t)\n"
            "dist.barrier()", "Rank 1 took the branch at line {} (if step == 1 and rank == 1); rank 0 did not.", 2),
    "and finished": ("for step in range(3):\n    if rank == 1 and step == 1:\n        continue\n    dist.all_reduce(t)",
                     "Rank 1 took the branch at line {} (if rank == 1 and step == 1); rank 0 did not.", 2),
    "finished": ("def work():\n    if rank == 1:\n        return\n    dist.all_reduce(t)\n\nwork()",
                 "Rank 1 took the branch at line {} (if rank == 1); rank 0 did not.", 2),
    "loop": ("for step in range(2 + rank):\n    dist.all_reduce(t)\ndist.barrier()",
             "Rank 1 is inside the loop at line {} (for step in range(2 + rank)); rank 0 is not.", 1),
    "try": ("try:\n    assert rank == 0\n    dist.all_reduce(t)\nexcept AssertionError:\n    pass\ndist.barrier()",
            "Rank 1 had an error, caught at line {} (except AssertionError); rank 0 had none.", 4),
    "not both": ("for step in range(3 - rank):\n    if not (step == 1 and rank == 1):\n        t += 1\n"
                 "    dist.all_reduce(t)", "Rank 0 is inside the loop at line {} (for step in range(3 - rank)); rank 1 is not.", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY)
def test_a_branch_on_the_rank_and_something_else_says_who_can_have_taken_it(name: str) -> None:
    text, says, line = ONLY[name]
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None and run.cause.kind == "hang"
    at = PRELUDE.count("\n") + line
    said = " ".join(run.cause.notes)
    assert says.format(at) in said and (" at line " in said) == bool(says), said
    assert run.cause.branch == (at if says else run.cause.branch)


def test_a_break_that_depends_on_the_rank_by_another_name_is_named_and_who_took_it_stands_nowhere() -> None:
    text = (
        "batches = 5 if rank == 1 else 8\nfor step in range(20):\n    if step == batches:\n        break\n"
        "    dist.all_reduce(t)"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    at = PRELUDE.count("\n") + 3
    said = (
        f"Rank 1 took the branch at line {at} (if step == batches); rank 0 did not. "
        f"`batches` is 8 on rank 0 and 5 on rank 1 (line {at - 2})."
    )
    assert run.cause is not None and run.cause.own == (said,) and run.cause.branch == at
    assert [row.frame and row.frame.line for row in run.cause.rows] == [at + 2, None]


def test_a_branch_that_may_have_parted_the_ranks_is_marked_as_no_more() -> None:
    """A rank may also have had fewer turns of the loop."""
    text = (
        "def average(grads):\n    for g in grads:\n        if g is not None:\n            dist.all_reduce(g)\n"
        "average([t, t if rank else None])"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    at = PRELUDE.count("\n") + 3
    assert run.cause is not None and (run.cause.branch, run.cause.may_part) == (None, at), run.cause
    assert any(note.startswith(f"A rank that does not take the branch at line {at}") for note in run.cause.notes)
    marked = [(line.number, line.note) for line in code_around(run.cause) if line.branch]
    assert marked == [(at, "ranks may part here")]


def test_a_crash_by_a_mismatch_names_the_branch_too() -> None:
    text = "if rank == 1:\n    dist.all_reduce(torch.ones(3))\ndist.broadcast(torch.ones(70000), 0)"
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None
    at = PRELUDE.count("\n") + 1
    assert f"Rank 1 took the branch at line {at} (if rank == 1); rank 0 did not." in " ".join(run.cause.notes), (
        run.cause
    )
    assert run.cause.branch == at


def test_a_mismatch_in_a_function_that_all_use_says_from_where_each_came() -> None:
    text = (
        "def mean(x):\n    dist.all_reduce(x)\n\ndef evaluate():\n    if rank == 1:\n        mean(torch.ones(3))\n\n"
        "for step in range(3):\n    mean(torch.ones(4))\n    evaluate()\n"
    )
    run = ranks.run(ranks.Source(PRELUDE + text, "shared"), 3)
    assert run.cause is not None and run.cause.kind == "hang" and run.cause.topic is Topic.HANGS
    at = PRELUDE.count("\n")
    assert run.cause.headline == "rank 1 called all_reduce #2 when `step` was 0; ranks 0 and 2 did not."
    tensors = {"all_reduce #2": {"4 × float32", "3 × float32"}, "all_reduce #3": {"4 × float32"}}
    assert all(row.tensor in tensors[row.what] for row in run.cause.rows), run.cause.rows
    said = " ".join(run.cause.notes)
    assert f"Rank 1 took the branch at line {at + 5} (if rank == 1); ranks 0 and 2 did not." in said
    came = rf"from shared:{at + 6} \(mean\(torch.ones\(3\)\)\), called from shared:{at + 10} \(evaluate\(\)\)"
    assert re.search(came, said), said
    assert OTHER_ORDER not in said


def test_a_mismatch_on_one_line_may_be_one_of_order() -> None:
    text = (
        "sums = [torch.ones(1), torch.ones(16)]\nfor one in reversed(sums) if rank == 1 else sums:\n"
        "    dist.all_reduce(one)\n"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None and run.cause.kind == "mismatch" and OTHER_ORDER in run.cause.notes
    text = "if rank == 1:\n    dist.all_reduce(torch.ones(16))\nelse:\n    dist.all_reduce(torch.ones(1))\n"
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None and OTHER_ORDER not in run.cause.notes


def test_where_ranks_parted_earlier_is_told_as_past() -> None:
    """Rank 1 has left the inner loop, and waits in it again: it has made one call in place of another."""
    text = (
        "for epoch in range(2):\n    for step in range(3 - rank):\n        dist.all_reduce(t)\n    dist.all_reduce(t)\n"
    )
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None
    line = PRELUDE.count("\n") + 2
    past = f"Rank 0 was inside the loop at line {line} (for step in range(3 - rank)); rank 1 was not."
    assert past in " ".join(run.cause.notes), run.cause


@pytest.mark.parametrize("name", SKIPS)
def test_a_branch_that_skips_the_call_is_named_only_if_its_condition_says_who_took_it(name: str) -> None:
    text, line = SKIPS[name]
    run = ranks.run(ranks.Source(PRELUDE + text), 2)
    assert run.cause is not None and run.cause.kind == "hang"
    said, at = " ".join(run.cause.notes), PRELUDE.count("\n") + line
    assert bool(re.search(rf"Rank 1 took the branch at line {at} \(if rank.*\); rank 0 did not\.", said)) == bool(
        line
    ), said
    assert ("took the branch" in said) == bool(line)


HINTS = {
    "bind": ("import torch.distributed as dist, socket\ns = socket.socket(); s.bind(('', 0)); s.listen()\n"
             "dist.TCPStore('127.0.0.1', s.getsockname()[1], 1, True)", "has this port"),
    "RANK": ("import os, torch.distributed as dist\nfor name in ('RANK', 'WORLD_SIZE'): os.environ.pop(name)\n"
             "dist.init_process_group('gloo')", "torchrun sets RANK"),
    "KeyError": ("import os\nos.environ.pop('LOCAL_RANK')\nint(os.environ['LOCAL_RANK'])", "torchrun sets RANK"),
    "no group": ("import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))", "before the first collective"),
    "twice": ("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.init_process_group('gloo')",
              "already has a group"),
    "input": ("input()", "no keyboard"),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_well_known_errors_come_with_one_note(name: str) -> None:
    text, expected = HINTS[name]
    run = ranks.run(ranks.Source(text), 2)
    assert run.cause is not None and run.cause.kind == "raised"
    assert sum(expected in note for note in run.cause.notes) == 1, run.cause


def test_a_second_group_through_the_same_store_is_explained() -> None:
    """Under torchrun it is a matter of luck too: the store still holds the first group's addresses."""
    text = (
        "import torch, torch.distributed as dist\nfor _ in range(10):\n    dist.init_process_group('gloo')\n"
        "    dist.all_reduce(torch.ones(1))\n    dist.destroy_process_group()\n"
    )
    run = ranks.run(ranks.Source(text), 3)
    if run.cause is not None and run.cause.kind == "hang" and "init_process_group" in run.cause.headline:
        assert any("has had a group before" in note for note in run.cause.notes)


KILLED = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except RuntimeError:
    os._exit(1)
"""


def test_who_leaves_because_another_was_killed_is_not_the_cause() -> None:
    """A killed process closes its connections before it is gone: the others may be seen to leave before it is."""
    run = ranks.run(ranks.Source(KILLED), 3)
    sooner = [dataclasses.replace(one, ended=one.ended - 0.3 * (one.rank != 1)) for one in run.ranks]
    for reports in (run.ranks, sooner):
        bad = [one for one in reports if one.outcome in (Outcome.EXITED, Outcome.CRASHED)]
        found = explain._failure(run, bad)
        assert found.ranks == (1,) and "SIGKILL" in found.headline


CIRCLES = {
    "dist.send(t, right)\ndist.recv(t, left)": "All of them wait to send, so none receives. In each circle of ranks, let one "
    "receive first.",
    "dist.recv(t, left)\ndist.send(t, right)": "All of them wait to receive, so none sends. In each circle of ranks, let one "
    "send first.",
    "dist.recv(t, 0) if rank == 2 else dist.send(t, right)": "No send meets its receive here: look at the order",
}


@pytest.mark.parametrize("text", CIRCLES)
def test_who_waits_in_a_circle_is_told_what_to_do(text: str) -> None:
    around = f"{PRELUDE}left, right = (rank - 1) % size, (rank + 1) % size\n"
    run = ranks.run(ranks.Source(around + text), world_size=3)
    assert run.cause is not None and run.cause.notes[0].startswith(CIRCLES[text])
    assert "batch_isend_irecv" in run.cause.notes[0]


def test_one_that_receives_first_frees_the_circle() -> None:
    text = (
        "left, right = (rank - 1) % size, (rank + 1) % size\n"
        "for call, peer in [(dist.send, right), (dist.recv, left)][:: 1 if rank else -1]:\n    call(t, peer)"
    )
    assert ranks.run(ranks.Source(PRELUDE + text), world_size=4).cause is None
