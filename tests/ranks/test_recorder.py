"""What a rank did is recorded where PyTorch dispatches it: every call with kind, bytes, group and order."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep import ranks
from lockstep.ranks import Run, recorder, text

BODIES = Path(__file__).with_name("bodies.py")
PRELUDE = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
"""

# The call, then what one rank of two is to have recorded: kind and bytes that it put in, in order.
CALLS = {
    "dist.all_reduce(t)": [("all_reduce", 16)],
    "dist.all_reduce(t, async_op=True).wait()": [("all_reduce", 16)],
    "dist.all_reduce(torch.ones(2, 3, dtype=torch.float64))": [("all_reduce", 48)],
    "dist.broadcast(t, src=1)": [("broadcast", 16)],
    "dist.reduce(t, dst=0)": [("reduce", 16)],
    "dist.all_gather([torch.ones(4) for _ in range(2)], t)": [("all_gather", 16)],
    "dist.all_gather_into_tensor(torch.ones(8), t)": [("all_gather_into_tensor", 16)],
    "dist.gather(t, [torch.ones(4) for _ in range(2)] if rank == 0 else None)": [("gather", 16)],
    "dist.scatter(t, [torch.ones(4) for _ in range(2)] if rank == 0 else None)": [("scatter", None)],
    "dist.reduce_scatter_tensor(torch.ones(2), t)": [("reduce_scatter_tensor", 16)],
    "dist.reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)])": [("reduce_scatter", 16)],
    "dist.all_to_all_single(torch.ones(4), t)": [("all_to_all_single", 16)],
    "dist.barrier()": [("barrier", 0)],
    "dist.monitored_barrier()": [("monitored_barrier", 0)],
    "dist.send(t, 1) if rank == 0 else dist.recv(t, 0)": [("send recv", 16)],
    "dist.isend(t, 1).wait() if rank == 0 else dist.irecv(t, 0).wait()": [("send recv", 16)],
    "[w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1 - rank), "
    "dist.P2POp(dist.irecv, torch.ones(4), 1 - rank)])]": [("send", 16), ("recv", 16)],
    "with torch.inference_mode(): dist.all_reduce(torch.ones(4))": [("all_reduce", 16)],
    "with torch.no_grad(): dist.all_reduce(t)": [("all_reduce", 16)],
    "import torch.distributed._functional_collectives as f; f.all_reduce(t, 'sum', dist.group.WORLD).sum()":
        [("all_reduce", 16)],
    "import torch.distributed._functional_collectives as f; f.all_gather_tensor(t, 0, dist.group.WORLD).sum()":
        [("all_gather_into_tensor_coalesced", 16)],
    "import torch.distributed.nn.functional as f; f.all_reduce(t)": [("all_reduce", 16)],
    "dist.all_reduce(torch.ones(()))": [("all_reduce", 4)],
    "dist.all_reduce(torch.ones(4, 4)[:, :2].contiguous())": [("all_reduce", 32)],
}  # fmt: skip


def recorded(text: str, size: int = 2, **options: object) -> Run:
    run = ranks.run(ranks.Source(PRELUDE + text), size, **options)  # type: ignore[arg-type]
    assert run.ok, (run.cause, [report.stderr for report in run.ranks])
    return run


@pytest.mark.parametrize("call", CALLS)
def test_each_call_is_recorded_once(call: str) -> None:
    run = recorded(call)
    for rank, calls in enumerate(run.collectives):
        expected = CALLS[call]
        assert len(calls) == len(expected), calls
        for collective, (kind, nbytes) in zip(calls, expected, strict=True):
            kinds = kind.split()
            assert collective.kind == kinds[rank if len(kinds) > 1 else 0]
            assert nbytes is None or collective.nbytes == nbytes
            assert collective.frame is not None and collective.frame.line == 5
            assert collective.end is None
            assert collective.members == (0, 1)


def test_objects_are_two_collectives() -> None:
    run = recorded("objects = [None] * size; dist.all_gather_object(objects, {'rank': rank})")
    assert [call.kind for call in run.collectives[0]] == ["all_gather", "all_gather"]


def test_reductions_are_named() -> None:
    run = recorded("for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT): dist.all_reduce(t, op=op)")
    assert [call.reduce_op for call in run.collectives[1]] == ["SUM", "MAX", "PRODUCT"]


def test_only_reductions_are_taken_for_one() -> None:
    """torch's own functions have other things by the name of `op`, and a ReduceOp as text has its address."""
    run = recorded("""
with dist._coalescing_manager():
    for one in (torch.ones(2), torch.ones(4)): dist.all_gather_into_tensor(torch.ones(size * len(one)), one)
with dist._coalescing_manager():
    for one in (torch.ones(2), torch.ones(4)): dist.reduce_scatter_tensor(one, torch.ones(size * len(one)))
dist.all_reduce(t, op=dist.ReduceOp(dist.ReduceOp.MAX))
""")
    for calls in run.collectives:
        assert [call.reduce_op for call in calls] == ["", "", "MAX"]
    assert text.silent_mismatch(run) == ""


def test_tensors_of_an_operation_that_was_waited_for_are_let_go() -> None:
    # gloo's reduce_scatter never says that it has completed, and so kept those of all later operations as well.
    run = recorded("""
import time
from lockstep import ranks
from torch.multiprocessing.reductions import StorageWeakRef
known = []
for _ in range(3):
    whole, own = torch.ones(300), torch.ones(150)
    known += [StorageWeakRef(one.untyped_storage()) for one in (whole, own)]
    dist.all_gather(list(whole.split(150)), own)
    dist.reduce_scatter(own, list(whole.split(150)))
del whole, own
for _ in range(1000):  # a thread of gloo's may be about to let go of its last operation
    if all(one.expired() for one in known):
        break
    time.sleep(0.01)
ranks.observe("kept", sum(not one.expired() for one in known))
""")
    assert run.observed("kept") == [0, 0]


LOOKED = """
import weakref
from lockstep.ranks import observe

class Large:
    pass

def train():
    dropped = []
    for name in ("first", "second"):
        large = Large()
        known = weakref.ref(large)
        dist.all_reduce(t)
        del large
        dropped.append(known() is None)
    return dropped

def config():
    kept = locals()
    before = sorted(kept)
    for name in ("first", "second"):
        dist.all_reduce(t)
    return before == sorted(kept)

observe("seen", [train(), config()])
"""


def test_who_asks_for_the_turn_of_a_loop_leaves_the_code_s_locals_alone() -> None:
    """Python keeps the dictionary of a function's locals, and with it all tensors that it has, if somebody asks for it."""
    run = recorded(LOOKED)
    assert run.observed("seen") == [[[True, True], True]] * 2
    assert [call.turn for call in run.collectives[0]] == [("name", "'first'"), ("name", "'second'"), None, None]


def test_numbers_and_groups() -> None:
    run = recorded(
        """
pair = dist.new_group([1, 3])
dist.all_reduce(t)
if rank in (1, 3):
    dist.all_reduce(t, group=pair); dist.barrier(group=pair); dist.all_reduce(t, group=pair)
dist.all_reduce(t)
""",
        4,
    )
    ours = [call for call in run.collectives[3] if call.members == (1, 3)]
    assert [(call.kind, call.group_number, call.title) for call in ours] == [
        ("all_reduce", 1, "all_reduce #1"),
        ("barrier", 2, "barrier #1"),
        ("all_reduce", 3, "all_reduce #2"),
    ]
    world = [call for call in run.collectives[0] if call.members == (0, 1, 2, 3) and call.kind == "all_reduce"]
    assert [call.title for call in world] == ["all_reduce #1", "all_reduce #2"]
    assert [call.number for call in run.collectives[0]] == list(range(1, len(run.collectives[0]) + 1))
    assert {call.group for call in ours}.isdisjoint({call.group for call in world})


DDP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]), bucket_cap_mb=0.5)
for step in range(3):
    ranks.mark(f"step {step}")
    model(torch.ones(2, 256)).sum().backward()
"""


def test_ddp_is_seen_from_below() -> None:
    run = recorded("from lockstep import ranks\n" + DDP, timeline=True)
    for report in run.ranks:
        inside = [call.inside for call in report.collectives]
        gradients = [call for call in report.collectives if call.inside == "backward"]
        parameters = 6 * (256 * 256 + 256) * 4
        assert inside[: inside.index("backward")].count("DDP()") >= 1
        marks = [mark.number for mark in report.marks] + [10**9]
        for step in range(3):
            in_step = [call for call in gradients if marks[step] < call.number < marks[step + 1]]
            assert sum(call.nbytes for call in in_step) == parameters
            assert {call.kind for call in in_step} == {"all_reduce"}
            assert (len(in_step) > 1) == (step > 0)  # the first step uses one bucket (claim A03)
        assert all(call.end is not None and call.end >= call.start for call in report.collectives)
        assert [mark.name for mark in report.marks] == ["step 0", "step 1", "step 2"]
        assert all(call.frame is not None and call.frame.text.startswith("model") for call in gradients)


def test_no_sync_records_nothing() -> None:
    run = recorded("""
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 4))
with model.no_sync():
    model(t).sum().backward()
""")
    assert [call for call in run.collectives[0] if call.inside == "backward"] == []


def test_a_communication_hook_is_inside_backward() -> None:
    run = recorded("""
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model.register_comm_hook(None, fp16_compress_hook)
model(t).sum().backward()
""")
    (gradient,) = [call for call in run.collectives[0] if call.inside == "backward"]
    assert (gradient.nbytes, gradient.dtype) == (2 * 20, "float16")


def test_a_group_that_is_set_up_by_hand() -> None:
    """mini_ddp and the like: hooks that launch asynchronous all-reduces of the learner's own."""
    run = recorded(
        """
layer = torch.nn.Linear(4, 4)
works = []
for parameter in layer.parameters():
    parameter.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
layer(t).sum().backward()
[work.wait() for work in works]
""",
        timeline=True,
    )
    assert sorted(call.nbytes for call in run.collectives[0]) == [16, 64]
    assert all(call.end is not None for call in run.collectives[0])


def test_an_end_that_a_slow_thread_tells_is_not_lost() -> None:
    """The code may be at its end before torch's thread has had the interpreter to say that the last operation is."""
    run = recorded(
        """
import time
from lockstep.ranks.recorder import current
tell = current()._end
current()._end = lambda number: (time.sleep(0.5), tell(number))
if dist.get_rank() == 1:
    time.sleep(0.5)  # else rank 0's would have completed before anybody asked it to tell
dist.all_reduce(t, async_op=True).get_future().wait()  # as DDP's reducer waits
""",
        timeline=True,
    )
    assert [call.kind for call in run.collectives[0]][-1] == "all_reduce"
    assert all(call.end is not None for call in run.collectives[0])


def test_a_call_knows_who_has_called_its_function_and_the_library_between() -> None:
    run = recorded("""
import torch.distributed.nn.functional as library
def helper():
    library.all_reduce(t)
    dist.barrier()
helper()
for _ in range(2):
    helper()
""")
    calls = run.collectives[1]
    lines = [(one.frame.line, [caller.line for caller in one.callers]) for one in calls if one.frame]
    first = lines[0][0]
    assert lines == [(first + more, [first + by]) for by in (2, 4, 4) for more in (0, 1)]
    assert [one.via for one in calls] == [("torch.distributed.nn",), ()] * 3


def test_many_calls_are_kept_in_order() -> None:
    run = recorded("for _ in range(3000): dist.all_reduce(t)")
    assert [call.group_number for call in run.collectives[1]] == list(range(1, 3001))


def test_no_garbage_is_collected_while_a_rank_is_asked_where_it_stands() -> None:
    """Before Python 3.12 a collection there can wait for a lock, and the rank with it for ever (CPython gh-106883)."""
    text = """
import gc, sys, threading, time
from lockstep.ranks import recorder
own, asked = recorder.current(), []
stack = own.stack
def look():
    found = stack()
    asked.append(len(found.innermost))
    return found
own.stack = look
def note(phase, info):
    frame, inside = sys._getframe(), []
    while frame is not None:
        inside.append(frame.f_code.co_name)
        frame = frame.f_back
    if phase == "start" and "listen" in inside:
        collected.append("look" in inside)
collected = []
gc.callbacks.append(note)
gc.set_threshold(1)
while not asked:  # The other rank waits, so it is asked again and again.
    time.sleep(0.3)
dist.all_reduce(t)
assert gc.isenabled()
from lockstep.ranks import observe
observe("collected while it was asked", any(collected))
"""
    run = recorded(text)
    assert run.observed("collected while it was asked") == [False, False]


def test_a_child_of_a_rank_tells_nothing() -> None:
    """It makes a group of its own, whatever a thread of the rank was saying when it was forked."""
    run = ranks.run(
        ranks.Source(
            "import os, threading, torch.distributed as dist\n"
            "from lockstep.ranks import recorder\n"
            "held, free = threading.Event(), threading.Event()\n"
            "def say():\n"
            "    with recorder.current().channel._lock: held.set(); free.wait()\n"
            "sayer = threading.Thread(target=say); sayer.start(); held.wait()\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); os._exit(7)\n"
            "free.set(); sayer.join()\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        ),
        1,
    )
    assert run.ok, (run.cause, run.ranks)


def test_no_other_thread_runs_while_one_looks_at_frames() -> None:
    """For as long as a busy machine may stop the one who looks: a function that returned would leave its locals behind."""
    steps, over = 0, threading.Event()

    def work() -> None:
        nonlocal steps
        while not over.is_set():
            steps += 1

    worker = threading.Thread(target=work)
    usual = sys.getswitchinterval(), gc.isenabled()
    worker.start()
    try:
        for _ in range(3):
            with recorder.without_collections():
                before, until = steps, time.monotonic() + 0.1
                while time.monotonic() < until:
                    pass
                assert steps == before
    finally:
        over.set()
        worker.join()
    assert (sys.getswitchinterval(), gc.isenabled()) == usual


def test_a_child_that_is_forked_during_a_look_is_as_before() -> None:
    usual = sys.getswitchinterval()
    with recorder.without_collections():
        child = os.fork()
        if not child:
            os._exit(0 if sys.getswitchinterval() == usual and gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
