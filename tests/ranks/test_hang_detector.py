"""What proves a hang where the operating system does not see the work: on an accelerator."""

import time
from typing import Any, cast

import pytest

from lockstep.ranks import processes
from lockstep.ranks.hang_detector import DEADLOCK_STILL, TICK, UNPROVEN_STILL, HangDetector, each_waits_for_another
from lockstep.ranks.job import Described, Job, TargetKind
from lockstep.ranks.member import Member, RunState
from lockstep.ranks.messages import Begin, Role, StackReport

Calls = list[tuple[str, int, int | None]]
"""Kind, number within the group, and peer."""


def member(rank: int, calls: Calls, pending: list[int], call: str = "backward") -> Member:
    made = Member(Role.RANK, rank, 0, sample=StackReport(call=call, pending=pending))
    for number, (kind, in_group, peer) in enumerate(calls, 1):
        made.events.append(Begin(number, kind, "0", [0, 1], in_group, 1, 4, [1], "float32", 0, peer=peer))
    return made


REDUCED: Calls = [("all_reduce", 1, None)]
TWICE: Calls = [*REDUCED, ("all_reduce", 2, None)]
GATHERED: Calls = [*REDUCED, ("all_gather", 2, None)]
CASES: dict[str, tuple[Calls, list[int], Calls, list[int], bool]] = {
    "a long backward, nothing is open": (REDUCED, [], REDUCED, [], False),
    "all have begun what is open": (TWICE, [2], TWICE, [2], False),
    "one waits, the other computes": (TWICE, [2], REDUCED, [], False),
    "one waits, the other has work of both open": (TWICE, [2], REDUCED, [1], False),
    "different calls": (TWICE, [2], GATHERED, [2], True),
    "both receive": ([("recv", 1, 1)], [1], [("recv", 1, 0)], [1], True),
    "one sends, one receives": ([("send", 1, 1)], [1], [("recv", 1, 0)], [1], False),
    "both send, and nobody receives": ([("send", 1, 1)], [1], [("send", 1, 0)], [1], True),
}


@pytest.mark.parametrize("case", CASES)
def test_each_waits_for_a_call_that_another_has_not_begun(case: str) -> None:
    calls, pending, others, other_pending, hangs = CASES[case]
    members = [member(0, calls, pending), member(1, others, other_pending)]
    assert each_waits_for_another(members, members) is hangs


def test_one_waits_for_a_rank_that_has_finished() -> None:
    members = [member(0, TWICE, [2]), member(1, REDUCED, [])]
    assert each_waits_for_another(members[:1], members)


WAITS = {
    "in the call itself": ("all_reduce", 2, True),
    "for something that all have begun": ("wait", 1, False),
    "in a backward, which may begin more": ("backward", 2, False),
    "in DDP's constructor": ("DDP()", 2, False),
    "in a rendezvous, which ends when all have come": ("init_process_group", None, False),
}


@pytest.mark.parametrize("case", WAITS)
def test_on_an_accelerator_a_second_is_enough_where_both_can_only_wait(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the accelerator does meanwhile is unknown; a call that only waits cannot begin what the other waits for."""
    call, operation, proven = WAITS[case]
    members = [member(0, TWICE, [1, 2], call), member(1, GATHERED, [1, 2], "all_gather")]
    for one, number in zip(members, (operation, 2), strict=True):
        assert one.sample is not None
        one.sample.operation = number
        one.accelerated = True
        one.channel = cast(Any, object())
    assert each_waits_for_another(members, members) and each_waits_for_another(members, members, inside=True) is proven
    stacks = [(0, members[0].sample), (1, members[1].sample)]
    detector = HangDetector(RunState(Job(2, Described(TargetKind.SOURCE)), members), lambda asked: stacks)
    start = time.monotonic()
    now = [start]
    monkeypatch.setattr("lockstep.ranks.hang_detector.time.monotonic", lambda: now[0])
    found = None
    while found is None and now[0] < start + 100:
        now[0] += TICK
        found = detector.look()
    limit = DEADLOCK_STILL if proven else UNPROVEN_STILL
    assert found == members and limit <= now[0] - start < limit + 1.0


def test_the_system_is_asked_unless_a_rank_communicates_from_an_accelerator() -> None:
    """That a job may use a GPU is no reason to believe less: without one in use, the processor tells who works."""
    run = RunState(Job(1, Described(TargetKind.SOURCE), device="cuda"), [Member(Role.RANK, 0, 0)])
    detector = HangDetector(run, lambda members: None)
    detector.for_now()
    assert detector.clock.before is not None
    run.members[0].accelerated = True
    detector = HangDetector(run, lambda members: None)
    detector.for_now()
    assert detector.clock.before is None


def test_a_rank_that_holds_an_accelerator_may_sleep_while_its_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nccl does for seconds when it makes a communicator. Seen on an H100: one rank alone was said to hang in DDP()."""
    asked: list[int] = []
    monkeypatch.setattr(processes, "holds_accelerator", lambda pid: bool(asked.append(pid) or pid == 7))
    own, cpu = Member(Role.RANK, 0, 7, sample=StackReport(call="DDP()")), Member(Role.RANK, 1, 8)
    for device, members in (("cuda", [own]), ("cuda", [cpu]), ("cpu", [own])):
        own.accelerated = False
        detector = HangDetector(
            RunState(Job(1, Described(TargetKind.SOURCE), device=device), members), lambda ranks: []
        )
        detector.for_now()
        alone = members == [own] and device == "cuda"
        assert (detector.clock.before is None) is alone
        assert (detector.look_once_more() is None) is (alone or members == [cpu])
        detector.everyone.since = time.monotonic() - 10.0
        assert detector.seconds() == pytest.approx(2.0 if alone else 10.0, abs=0.5)
    assert asked == [7, 8], "a job on the CPU is not asked"
