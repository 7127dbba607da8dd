"""What proves a hang where the operating system does not see the work: on an accelerator."""

import pytest

from lockstep.ranks.hang_detector import HangDetector, each_waits_for_another
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
