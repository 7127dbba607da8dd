"""Where the ranks' code parted: from made-up records, as the ranks would have sent them."""

from dataclasses import replace

import pytest

from lockstep.ranks.divergence import first_divergence, reached, say
from lockstep.ranks.report import Collective, Frame, RankReport

TRAIN, HELPER = (
    "/nowhere/train.py",
    "/nowhere/helper.py",
)  # A file that is found, in any folder of sys.path, would be read


def record(lines: dict[int, str], members: tuple[int, ...] = ()) -> list[RankReport]:
    """A report for each rank: every letter of its text is a call, made at that letter's line; capitals are barriers."""
    members = members or tuple(lines)
    return [
        RankReport(rank, collectives=[
            Collective(
                rank, number, "barrier" if letter.isupper() else "all_reduce", "0", number, 16, (4,), "float32", start=number,
                frame=Frame(TRAIN, ord(letter)), members=members,
            )
            for number, letter in enumerate(text, 1)
        ])
        for rank, text in lines.items()
    ]  # fmt: skip


CASES = {
    "all make the same calls": ({0: "abab", 1: "abab", 2: "aba"}, None, []),
    "a branch of its own, and all goes on": ({0: "axbaxb", 1: "aybayb", 2: "aybayb"}, None, []),
    "each sends in turn": ({0: "abbcabbc", 1: "babcbabc", 2: "bbacbbac"}, None, []),
    "a branch of its own, then a loop of one line": (
        {0: "x" + "a" * 10, 1: "y" + "a" * 10, 2: "y" + "a" * 10},
        None,
        [],
    ),
    "one call more": ({0: "abab", 1: "abxab", 2: "abab"}, 3, [1]),
    "one call less": ({0: "abcabc", 1: "abcac", 2: "abcabc"}, 5, [1]),
    "a step less": ({0: "abcabcd", 1: "abcd", 2: "abcabcd"}, 4, [1]),
    "another kind": ({0: "abc", 1: "aBc", 2: "abc"}, 2, [1]),
    "the kind differs long after a call more": ({0: "abababA", 1: "xabababA", 2: "abababA"}, 1, [1]),
    "two of two": ({0: "ab", 1: "aB"}, 2, []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_call_that_differs(case: str) -> None:
    lines, number, odd = CASES[case]
    found = first_divergence(record(lines))
    if number is None:
        assert found is None
        return
    assert found is not None
    assert {call.group_number for call in found.calls.values()} == {number}
    assert found.odd == odd


def test_another_row_of_a_mesh_decides_between_two() -> None:
    """Ranks 0 and 1 disagree; ranks 2 and 3, a group like theirs, did what rank 1 did."""
    rows = [*record({0: "aB", 1: "ab"}), *record({2: "ab", 3: "ab"})]
    found = first_divergence(rows)
    assert found is not None and found.odd == [0]


def helped(callers: dict[int, str], via: tuple[str, ...] = ()) -> list[RankReport]:
    """As `record`, but every call is made in one line of a helper, which the letter's line has called, and that one line 99."""
    reports = record(callers)
    for report in reports:
        report.collectives = [
            replace(
                one,
                frame=Frame(HELPER, 4),
                callers=tuple(filter(None, (one.frame, Frame(TRAIN, 99)))),
                via=via,
                folded=9,
            )
            for one in report.collectives
        ]
    return reports


def test_calls_of_one_helper_are_told_apart_by_who_called_it() -> None:
    found = first_divergence(helped({0: "abxabab", 1: "ababab", 2: "ababab"}))
    assert found is not None and found.odd == [0]
    assert say(found) == "rank 0 called all_reduce #3 where ranks 1 and 2 called it at train.py:97."
    # What all have in common is left out: the line of the helper's caller is where they parted.
    assert reached(found.calls) == ["Rank 0 reached the call from train.py:120 (); ranks 1 and 2 from train.py:97 ()."]
    assert found.places[0] == Frame(TRAIN, 120)
    assert first_divergence(helped({0: "abxabab", 1: "abyabab", 2: "abyabab"})) is None


def test_the_frames_of_a_library_are_folded_into_a_line() -> None:
    calls = {report.rank: report.collectives[0] for report in helped({0: "a", 1: "a"}, ("accelerate",))}
    assert reached(calls) == ["Ranks 0 and 1 reached the call via 9 frames of accelerate."]
    assert reached({rank: replace(one, via=()) for rank, one in calls.items()}) == []
    calls[1] = replace(calls[1], via=())
    assert reached(calls) == ["On rank 1, your code made the call; on rank 0, accelerate made it."]
    calls[1] = replace(calls[1], inside="forward")
    assert reached(calls) == ["On rank 1, DDP's forward made the call; on rank 0, accelerate made it."]
