"""The timeline of any run: what is exposed and what is hidden, the picture's bars and their numbers, the page and the trace."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.accessibility import violations
from support.browser import faults

from lockstep import ranks
from lockstep.commands import run as command
from lockstep.notebook.timeline import timeline
from lockstep.ranks.messages import OWN_MARK
from lockstep.ranks.report import Collective, Mark, Outcome, RankReport, Wait
from lockstep.ranks.timeline import AT_ONCE, Timeline, verdict, whole
from lockstep.ranks.timeline_picture import inline, page, picture

SVG = "{http://www.w3.org/2000/svg}"


def call(
    rank: int, number: int, kind: str, begin: float, end: float | None, inside: str, nbytes: int = 2048
) -> Collective:
    return Collective(rank, number, kind, "0", number, nbytes, (4,), "float32", begin, inside=inside, end=end)


def made(prefix: str = "", steps: int = 1, ddp: bool = True) -> ranks.Run:
    """Two ranks: bucket 1 is hidden for 2 of its 3 ms, bucket 2 is exposed; a reduce is waited for all its time."""
    reports = []
    for rank in range(2):
        report = RankReport(rank, Outcome.RETURNED, ended=9.0)
        report.collectives.append(call(rank, 0, "all_gather", -0.001, -0.0005, "DDP()" if ddp else ""))
        for step in range(steps):
            at, n = step * 0.02, step * 10
            for number, name, ms in (
                (1, "forward", 0),
                (2, "backward", 2),
                (7, "after backward", 8),
                (8, "step", 10),
                (9, "end", 11),
            ):
                report.marks.append(Mark(rank, n + number, prefix + name, at + ms / 1000))
            report.collectives += [
                call(rank, n + 3, "all_reduce", at + 0.003, at + 0.006, "backward"),
                call(rank, n + 4, "all_reduce", at + 0.005, at + 0.007, "backward", 3 << 20),
                call(rank, n + 8, "reduce", at + 0.0085, at + 0.0095, ""),
            ]
            report.waits.append(Wait(n + 8, at + 0.0084, at + 0.0096))
        reports.append(report)
    return ranks.Run(2, "cpu", reports)


def labels(drawn: ElementTree.Element) -> list[str]:
    return [bar.get("aria-label") or "" for bar in drawn.iter(f"{SVG}g") if bar.get("tabindex") == "0"]


def test_exposed_is_when_the_code_stands_still() -> None:
    for run in (made(), made(OWN_MARK)):
        panel = whole(run)
        one = panel.steps[0][1]
        assert [phase.name for phase in one.phases] == ["forward", "backward", "after backward", "step"]
        spent = [
            (round(item.exposed_seconds * 1000, 3), round(item.hidden_seconds * 1000, 3)) for item in one.collectives
        ]
        assert spent == [(1, 2), (2, 0), (1, 0)]
        assert panel.lanes(1)[0] == (0, 1, 0)


def seen(spans: Any) -> list[tuple[float, float]]:
    return [(round(a * 1000, 3), round(b * 1000, 3)) for a, b in spans]


def test_a_phase_waits_while_communication_is_exposed_and_only_then() -> None:
    """Backward computes until the last gradient, waits for what is still sent, and goes on when that has come."""
    one = whole(made()).steps[0][1]
    waits = {phase.name: seen(phase.waits) for phase in one.phases}
    assert waits == {"forward": [], "backward": [(5, 7)], "after backward": [(8.5, 9.5)], "step": []}
    run = made()
    for report in run.ranks:  # DDP launches the last bucket a little after its last gradient, and computes until then
        report.marks.append(Mark(report.rank, 3, "ready weight", 0.0045))
    one = whole(run).steps[0][0]
    assert seen(one.phases[1].waits) == [(5, 7)] and seen(one.buckets[0].exposed) == [(5, 6)]
    run = made()
    for report in run.ranks:  # a hook of the user's blocks in backward: backward computes again after it
        report.collectives.insert(1, call(report.rank, 2, "all_reduce", 0.0022, 0.0026, ""))
        report.waits.append(Wait(2, 0.0022, 0.0027))
    assert seen(whole(run).steps[0][0].phases[1].waits) == [(2.2, 2.6), (5, 7)]


def test_what_ddp_sends_in_backward_ends_with_it() -> None:
    """DDP waits for each bucket before backward returns, and torch's thread may say later that one has ended."""
    run = made()
    for report in run.ranks:
        report.collectives[2] = call(report.rank, 4, "all_reduce", 0.005, 0.0083, "backward", 3 << 20)
    late = whole(run).steps[0][0].buckets[1]
    assert (late.end, late.hidden_seconds) == (0.008, 0) and seen(late.exposed) == [(5, 8)]
    for report in run.ranks:  # one of the user's, which backward does not wait for
        report.collectives[2] = call(report.rank, 4, "all_reduce", 0.005, 0.0083, "", 3 << 20)
    assert whole(run).steps[0][0].buckets[1].end == 0.0083


def test_a_group_runs_two_at_once_and_the_others_queue() -> None:
    """In order, whichever of the two ends first; another group has its own two, and messages queue for nobody."""
    run = made()
    spans = [(0.0, 0.004), (0.0, 0.002), (0.001, 0.005), (0.0015, 0.006), (0.0055, 0.007)]
    for report in run.ranks:
        del report.waits[:], report.collectives[1:]
        report.collectives += [call(report.rank, 3 + n, "all_reduce", a, b, "") for n, (a, b) in enumerate(spans)]
        report.collectives.append(replace(call(report.rank, 8, "reduce", 0.001, 0.002, ""), group="1"))
        report.collectives.append(call(report.rank, 8, "send", 0.001, 0.002, ""))
    items = whole(run).steps[0][0].collectives
    assert [round(1000 * (one.runs - one.launch), 3) for one in items] == [0, 0, 1, 2.5, 0, 0, 0]
    drawn = picture(Timeline((whole(run),)))
    assert drawn.count('class="tl-queue"') == 2 * 2 + 1  # of each rank's five two, and the legend's
    assert "queued for 2.50 ms of them" in drawn and "queued, while 2 others run" in drawn
    assert "tl-queue" not in picture(Timeline((whole(made()),))).partition("</style>")[2]
    events = Timeline((whole(run),)).trace()["traceEvents"]
    assert [one["args"]["queued_us"] for one in events if "queued_us" in one.get("args", ())][:4] == [0, 0, 1000, 2500]


def test_who_has_waited_knows_that_it_has_ended() -> None:
    """gloo's reduce_scatter never says so: without that it would last to the run's end, and hold one of the two places."""
    run = made()
    for report in run.ranks:
        del report.waits[:], report.collectives[1:]
        for n, at in enumerate((0.0, 0.002, 0.004)):
            report.collectives.append(call(report.rank, 3 + n, "reduce_scatter", at, None, ""))
            report.waits.append(Wait(3 + n, at, at + 0.001))
        report.collectives.append(call(report.rank, 8, "all_reduce", 0.006, 0.007, ""))
    items = whole(run).steps[0][0].collectives
    assert [(one.done, one.runs, round(one.end - one.launch, 6)) for one in items] == [
        (True, one.launch, 0.001) for one in items
    ]
    for report in run.ranks:
        del report.waits[:]
    items = whole(run).steps[0][0].collectives
    assert [one.done for one in items] == [False] * 3 + [True]
    assert all(one.runs == one.launch for one in items), "what is not known to have ended holds no place"


ENDS = """
import datetime, time, torch, torch.distributed as dist
from lockstep.ranks import mark, observe
dist.init_process_group("gloo")
rank, size, tensor = dist.get_rank(), dist.get_world_size(), torch.ones(4)
mark("forward")
dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
dist.monitored_barrier()
dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
if rank == 1:
    time.sleep(0.5)
work = dist.all_reduce(tensor, async_op=True)
try:
    work.wait(datetime.timedelta(milliseconds=100))
except RuntimeError:
    observe("gave up", rank)
while not work.is_completed():
    time.sleep(0.01)
mark("end")
"""


def test_calls_that_end_have_an_end_and_a_wait_that_gives_up_is_none() -> None:
    run = ranks.run(ranks.Source(ENDS), 2, timeline=True)
    assert run.ok and run.observed("gave up")[0] == 0, run.cause
    step = whole(run).steps[0][0]
    assert [one.kind for one in step.collectives] == [
        "reduce_scatter_tensor",
        "monitored_barrier",
        "send",
        "all_reduce",
    ]
    assert all(one.done and one.runs == one.launch for one in step.collectives)
    ends = [one.end for one in step.collectives]
    assert ends == sorted(ends) and ends[-1] > run.ranks[1].collectives[-1].start, "the other rank called it later"


def test_a_run_without_steps_has_a_picture() -> None:
    run = ranks.run(ranks.Source("import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
                                 "dist.all_reduce(torch.ones(4))"), 2, timeline=True)  # fmt: skip
    assert "all_reduce, rank 1" in page(Timeline((whole(run),)), "a page")


def test_the_fastest_step_is_told_without_its_number_which_differs_in_each_run() -> None:
    run = made(steps=3)
    for report in run.ranks:
        report.marks = [replace(mark, at=0.0305) if mark.number == 19 else mark for mark in report.marks]
    shown = timeline(run, step="fastest")
    assert shown.panels[0].numbers == (1,) and "step 1" in picture(shown)
    assert (
        repr(shown) == "Timeline(2 ranks; fastest step: 2 all-reduces, 0 launched before the last gradient was ready)"
    )
    assert "fastest" not in repr(timeline(run, step=1))


def test_gloo_has_as_many_threads_as_the_picture_says() -> None:
    text = (
        "import torch, torch.distributed as dist\nfrom lockstep.ranks import observe\ndist.init_process_group('gloo')\n"
        "observe('threads', dist.group.WORLD._get_backend(torch.device('cpu')).options._threads)"
    )
    run = ranks.run(ranks.Source(text), 1)
    assert run.observed("threads") == [AT_ONCE], run.cause


def test_the_picture_shows_which_part_of_backward_waits() -> None:
    drawn = ElementTree.fromstring(picture(Timeline((whole(made()),))))
    bar = next(one for one in drawn.iter(f"{SVG}g") if (one.get("aria-label") or "").startswith("backward, rank 1"))
    assert bar.get("aria-label") == "backward, rank 1, step 0, 6.00 ms, computes 4.00 ms, waits 2.00 ms"
    (whole_bar,), (waiting,) = ([r for r in bar if r.get("class") == f"tl-{kind}"] for kind in ("backward", "waits"))
    wide = [float(one.get("width") or 0) for one in (whole_bar, waiting)]
    assert wide[0] == pytest.approx(3 * wide[1], abs=0.3)
    hatched = bar.find(f"{SVG}path")
    assert hatched is not None and hatched.get("class") == "tl-hatch tl-backward"
    places = [float(x) for x in re.findall(r"[ML]([\d.]+)", hatched.get("d") or "")]
    left = float(waiting.get("x") or 0)
    assert left - 0.1 <= min(places) and max(places) <= left + wide[1] + 0.1
    assert "the rank waits" in [one.text for one in drawn.iter(f"{SVG}text")]  # the legend
    run = made()
    for report in run.ranks:
        report.collectives[1:] = report.collectives[1:3]
        del report.waits[:]
    assert "backward waits" in picture(Timeline((whole(run),)))


def test_who_marks_the_steps_is_not_marked_again() -> None:
    run = made()
    for report in run.ranks:
        report.marks += [
            Mark(report.rank, 12 + n, OWN_MARK + name, 0.012 + n / 1000) for n, name in enumerate(("forward", "end"))
        ]
    assert whole(run).of == 1


def test_bars_come_in_order_and_say_their_numbers() -> None:
    drawn = ElementTree.fromstring(picture(Timeline((whole(made()),))))
    mine = [one for one in labels(drawn) if "rank 1" in one]
    assert mine == [
        "forward, rank 1, step 0, 2.00 ms",
        "backward, rank 1, step 0, 6.00 ms, computes 4.00 ms, waits 2.00 ms",
        "after backward, rank 1, step 0, 2.00 ms, computes 1.00 ms, waits 1.00 ms",
        "optimizer, rank 1, step 0, 1.00 ms",
        "bucket 1 (all_reduce), rank 1, step 0, 2.0 KiB, 3.00 ms, exposed 1.00 ms, hidden 2.00 ms",
        "reduce, rank 1, step 0, 2.0 KiB, 1.00 ms, exposed: the rank waited",
        "bucket 2 (all_reduce), rank 1, step 0, 3.0 MiB, 2.00 ms, exposed: the rank waited",
    ]
    assert len(labels(drawn)) == 14
    bar = next(one for one in drawn.iter(f"{SVG}g") if "bucket 1" in (one.get("aria-label") or ""))
    hidden, exposed = (
        float(next(r for r in bar if r.get("class") == f"tl-{kind}").get("width") or 0)
        for kind in ("hidden", "exposed")
    )
    assert hidden == pytest.approx(3 * exposed, abs=0.3), "the exposed part lies over the whole bar"
    assert sum(path.get("class") == "tl-step" for path in drawn.iter(f"{SVG}path")) == 2  # ranks


def test_no_two_labels_of_a_line_overlap() -> None:
    run = made()
    for report in run.ranks:
        gaps = ((0.0, 0.0005), (0.003, 0.0055), (0.0058, 0.0063))  # the first has room for one label, not two
        report.collectives[1:] = [
            call(report.rank, 3 + n, "all_reduce", a, b, "backward") for n, (a, b) in enumerate(gaps)
        ]
    drawn = ElementTree.fromstring(picture(Timeline((whole(run),))))
    spans: dict[str, list[tuple[float, float]]] = {}
    for text in drawn.findall(f"{SVG}text"):
        if (text.text or "").startswith("bucket"):
            x, wide = float(text.get("x") or 0), 6.9 * len(text.text or "")
            begin = x - wide if text.get("text-anchor") == "end" else x
            spans.setdefault(text.get("y") or "", []).append((begin, begin + wide))
    assert len(spans) == 2
    for line in spans.values():
        assert len(line) >= 2 and all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(line)))


@pytest.mark.parametrize(("begin", "said"), [(0.002, ["bucket 1", "2", "3", "bucket 4"]), (0.0, ["bucket 4"])])
def test_a_number_alone_follows_a_name_that_it_counts(begin: float, said: list[str]) -> None:
    """There is room for a name before the first bar, or none."""
    run = made()
    edges = [begin, begin + 0.0003, begin + 0.0006, begin + 0.0009, 0.0102]
    for report in run.ranks:
        del report.waits[:]
        report.collectives[1:] = [
            call(report.rank, 3 + n, "all_reduce", a, b, "backward")
            for n, (a, b) in enumerate(itertools.pairwise(edges))
        ]
    texts = ElementTree.fromstring(picture(Timeline((whole(run),)))).findall(f"{SVG}text")
    line = next(text.get("y") for text in texts if text.text == "bucket 4")
    assert [text.text for text in texts if text.get("y") == line] == said


def test_only_ddp_has_buckets_and_a_sum_by_hand_is_an_all_reduce() -> None:
    """Also one in a hook, which backward calls too."""
    for ddp in (True, False):
        run = made(ddp=ddp)
        for report in run.ranks:
            report.marks.append(Mark(report.rank, 2, "ready weight", 0.0025))
        said = picture(Timeline((whole(run),)))
        for words in (">bucket 1<", "its bucket is full", 'class="tl-ready"'):
            assert (words in said) == ddp, words
        assert (">all_reduce<" in said) == (not ddp)
        assert repr(Timeline((whole(run),))).startswith("Timeline(2 ranks; step 0: 2 all-reduces, 0 launched")


def test_bars_that_follow_at_once_can_be_counted_and_a_label_without_room_beside_is_in_its_bar() -> None:
    run = made()
    for report in run.ranks:
        del report.waits[:], report.collectives[1:]
        edges = [0.0, 0.0005, 0.001, 0.006, 0.011]
        report.collectives += [
            call(report.rank, 3 + n, "reduce", a, b, "") for n, (a, b) in enumerate(itertools.pairwise(edges))
        ]
    drawn = ElementTree.fromstring(picture(Timeline((whole(run),))))
    bars = [one.find(f"{SVG}rect") for one in drawn.iter(f"{SVG}g") if "reduce" in (one.get("aria-label") or "")]
    spans = [(float(one.get("x") or 0), float(one.get("width") or 0)) for one in bars if one is not None][:4]
    assert len(spans) == 4 and min(b[0] - sum(a) for a, b in itertools.pairwise(spans)) >= 2
    inside = [one for one in drawn.findall(f"{SVG}text") if one.get("class") == "tl-in"]
    assert [one.text for one in inside] == ["reduce"] * 4
    assert {round(float(one.get("x") or 0) - 4, 1) for one in inside} == {round(x, 1) for x, _ in spans[2:]}


def test_each_kind_of_bar_has_its_own_look() -> None:
    drawn = ElementTree.fromstring(picture(Timeline((whole(made()),))))
    kinds = [one.get("class") for one in drawn.findall(f"{SVG}rect")][1:]  # the legend's, after the ground
    assert len(kinds) == len(set(kinds)) and {"tl-code", "tl-optimizer"} <= {*kinds}


def slow(*late_ms: float, steps: int = 4, hidden: bool = False) -> ranks.Run:
    """Steps of 60 ms, in which each rank spends so long in its own code before forward, and then waits for the others."""
    reports = []
    for rank, late in enumerate(late_ms):
        report = RankReport(rank, Outcome.RETURNED, ended=9.0)
        report.collectives.append(call(rank, 0, "all_gather", -0.001, -0.0005, "DDP()"))
        for step in range(steps):
            at, n, end = step * 0.06 + late / 1000, step * 10, step * 0.06 + 0.05
            times = ((1, "forward", at), (2, "backward", at), (7, "step", end), (8, "end", end))
            report.marks += [Mark(rank, n + number, name, when) for number, name, when in times]
            report.collectives.append(call(rank, n + 3, "all_reduce", at, end, "" if hidden else "backward"))
        reports.append(report)
    return ranks.Run(len(late_ms), "cpu", reports)


def test_the_verdict_names_a_rank_only_if_the_steps_show_it() -> None:
    for run, said in (
        (slow(0, 20, 40), "Rank 2 is the slowest: in a typical step of about 60 ms, ranks 0 and 1 wait for it for 20 to 40 ms."),
        (slow(30, 0), "Rank 0 is the slowest: in a typical step of about 60 ms, rank 1 waits for it for 30 ms."),
        (slow(0, 38, 40), "Rank 2 is the slowest: in a typical step of about 60 ms, rank 0 waits for it for 40 ms."),
        (slow(1, 0, 2), "All ranks are about as fast. 0% of the communication is hidden behind computation."),
        (slow(1, 0, 2, hidden=True), "All ranks are about as fast. 100% of the communication is hidden behind computation."),
        (slow(0, 20, 40, steps=2), ""),
        (slow(0, 9), ""),  # neither slow nor equal
        (slow(0), ""),
    ):  # fmt: skip
        assert verdict(whole(run)) == said
    other = slow(0, 20, 40)
    del other.ranks[1].collectives[-1]  # the ranks did not make the same calls
    assert verdict(whole(other)) == ""
    clocks = slow(0, 20, 40)
    clocks.ranks[2].collectives = [
        call(2, one.number, one.kind, one.start + 1, (one.end or 0) + 1, one.inside)
        for one in clocks.ranks[2].collectives
    ]
    assert verdict(whole(clocks)) == ""
    turns = slow(0, 0)
    for step, report in enumerate((*turns.ranks, *turns.ranks)):  # now one is late, now the other
        late = report.collectives[step + 1]
        report.collectives[step + 1] = call(late.rank, late.number, late.kind, late.start + 0.03, late.end, late.inside)
    assert verdict(whole(turns)) == ""


def test_the_time_between_steps_is_the_ranks_own_without_what_it_waits() -> None:
    run = slow(0, 20, 40)
    run.ranks[0].collectives.append(call(0, 9, "barrier", 0.052, 0.056, ""))
    run.ranks[0].waits.append(Wait(9, 0.052, 0.056))
    panel = whole(run, 3)
    spans = [[(round(a * 1000), round(b * 1000)) for a, b in panel.own(rank)] for rank in range(3)]
    assert spans == [[(110, 120), (170, 180)], [(60, 80), (110, 140), (170, 200)], [(60, 100), (110, 160), (170, 220)]]
    spans = [(round(a * 1000), round(b * 1000)) for a, b in whole(run).own(0)]
    assert spans == [(50, 52), (56, 60), (110, 120), (170, 180)]
    said = labels(ElementTree.fromstring(picture(Timeline((panel,)))))
    assert "own code, rank 2, 40.00 ms" in said and not any(one.startswith("own code, rank 0") for one in said)


def test_no_label_lies_over_the_line_at_which_a_step_begins() -> None:
    run = slow(0, 20, 40, 44)
    for report in run.ranks:  # a bucket comes a little after its step's line, and to its right there is no room
        report.collectives[1:] = [
            call(one.rank, one.number + more, kind, begin, end, inside)
            for one in report.collectives[1:]
            for more, kind, begin, end, inside in (
                (0, one.kind, one.start + 0.001, one.end or 0, one.inside),
                (6, "barrier", one.end or 0, (one.end or 0) + 0.001, ""),
            )
        ]
    drawn = ElementTree.fromstring(picture(Timeline((whole(run),))))
    lines = [one.get("d") or "" for one in drawn.iter(f"{SVG}path") if one.get("class") == "tl-step"]
    steps = [tuple(map(float, re.findall(r"[\d.]+", line))) for line in lines]
    found = [one for one in drawn.findall(f"{SVG}text") if (one.text or "").startswith(("bucket", "barrier"))]
    assert len(found) > 8
    for one in found:
        x, y, wide = float(one.get("x") or 0), float(one.get("y") or 0), 6.9 * len(one.text or "") + 8
        begin = x - wide + 8 if one.get("text-anchor") == "end" else x
        assert not [line for line in steps if begin < line[0] < begin + wide and line[1] < y < line[2]], one.text


def test_text_is_escaped_and_a_failed_run_is_drawn_to_its_end() -> None:
    run = made()
    run.ranks[0].collectives.append(call(0, 11, "<b>", 0.015, None, ""))
    one = whole(run).steps[0][0]
    assert len(one.collectives) == 3, "what comes after the last step is no step's"
    run.ranks[0].marks = run.ranks[0].marks[:-1]  # cut off
    last = whole(run).steps[0][0].collectives[-1]
    assert not last.done and last.end == 9.0
    html = page(Timeline((whole(run),)), "a <script> & b")
    assert "<script" not in html and "<b>" not in html and "&lt;b&gt;" in html
    for said in (timeline, lambda run: whole(ranks.Run(1, "cpu", [RankReport(0)]))):
        with pytest.raises(ValueError):
            said(run)


def test_only_the_last_steps_are_drawn_and_all_are_traced() -> None:
    panel = whole(made(steps=6), 4)
    assert panel.numbers == (2, 3, 4, 5) and panel.of == 6
    events = Timeline((whole(made(steps=6)),)).trace()["traceEvents"]
    bars = [one for one in events if one["ph"] == "X" and one["pid"] == 1]
    assert len(bars) == 6 * (4 + 3) and [one["ts"] for one in bars if one["name"] == "forward"] == [
        20000.0 * n for n in range(6)
    ]
    first = next(one for one in bars if one["name"] == "all_reduce")
    assert (first["ts"], first["dur"], first["args"]["exposed_us"], first["args"]["hidden_us"]) == (
        3000,
        3000,
        1000,
        2000,
    )


TRAIN = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(3))
    functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD) + 1
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["html", "json"])
def test_the_command_draws_a_script_that_marks_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    out = tmp_path / f"out.{kind}"
    assert command.main(["--device=cpu", "--timeline", str(out), str(tmp_path / "train.py")]) == 0
    assert f"Timeline: {out} (step 0 to step 2, of 3)" in capsys.readouterr().err
    if kind == "json":
        events = json.loads(out.read_text())["traceEvents"]
        mine: list[dict[str, Any]] = [one for one in events if one["ph"] == "X" and one["pid"] == 1]
        assert [one["name"] for one in mine if one["tid"] == 0] == [
            "forward", "backward", "after backward", "forward", "backward", "after backward", "step"] * 3  # fmt: skip
        sent = [one["args"]["nbytes"] for one in mine if one["name"] == "all_reduce"]
        assert sent == [288, 12, 20] * 3
        parts = [
            (one["dur"], one["args"]["exposed_us"] + one["args"]["hidden_us"])
            for one in mine
            if one["name"] == "all_reduce"
        ]
        assert all(whole == pytest.approx(both) for whole, both in parts), parts
        return
    drawn = re.search(r'<svg data-measured="" class.*?</svg>', out.read_text(), re.DOTALL)
    assert drawn and sum("all_reduce" in one for one in labels(ElementTree.fromstring(drawn[0]))) == 2 * 9


def test_each_wait_is_recorded_with_its_collective(tmp_path: Path) -> None:
    """That of a call that blocks, and of a functional one, whose number isn't known. DDP waits for its buckets in C++."""
    (tmp_path / "train.py").write_text(TRAIN)
    run = ranks.run(ranks.Script(str(tmp_path / "train.py")), world_size=2, timeline=True)
    for report in run.ranks:
        numbers = {one.number: one.nbytes for one in report.collectives if one.kind == "all_reduce"}
        seen = [numbers.get(wait.number) for wait in report.waits if wait.number in {0, *numbers}]
        assert seen == [12, None] * 3 and all(wait.begin <= wait.end for wait in report.waits)


def test_a_call_that_blocks_hides_nothing(tmp_path: Path) -> None:
    """Not even while it is launched; one with a handle is waited for from `wait` on."""
    (tmp_path / "train.py").write_text("""
import time, torch, torch.distributed as dist
from lockstep.ranks import mark
dist.init_process_group("gloo")
mark("forward")
dist.all_reduce(torch.ones(3))
handle = dist.all_reduce(torch.ones(3), async_op=True)
time.sleep(0.05)
handle.wait()
mark("end")
""")
    run = ranks.run(ranks.Script(str(tmp_path / "train.py")), world_size=2, timeline=True)
    for one in whole(run).steps[0]:
        blocking, handle = one.collectives
        assert blocking.hidden_seconds == 0 < blocking.exposed_seconds and handle.hidden_seconds > 0


@pytest.mark.parametrize("wrong", [["out.png"], ["no/out.html"], ["out.html", "--no-python"]])
def test_a_timeline_that_cannot_be_is_refused(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        command.main(["--device=cpu", "--timeline", *wrong, "train.py"])
    assert ended.value.code == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pointing_and_focus_show_the_numbers_at_any_width(browser: Any, scheme: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(Timeline((whole(made()),)), "Two ranks"), encoding="utf-8")
    for width in (1400, 700, 360):
        seen = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
        errors = faults(seen)
        seen.goto(f"file://{tmp_path}/page.html")
        bars = seen.locator(":is(.tl-box, .tl-narrow):visible .tl-bar")
        assert bars.count() == 14
        assert seen.locator(".tl-tip:visible").count() == 0
        bars.nth(0).focus()
        seen.keyboard.press("Tab")
        tip = seen.locator(".tl-tip:visible")
        assert tip.count() == 1 and "6.00 ms" in (tip.text_content() or "")
        above = seen.locator(".lockstep-timeline").first.bounding_box()["y"]
        for number in (1, 4, 2, 0):  # what is around the picture may cut what stands out
            bars.nth(number).focus()
            assert tip.bounding_box()["y"] >= above, (width, number)
        bars.nth(4).hover()
        assert "exposed 1.00 ms, hidden 2.00 ms" in (bars.nth(4).locator(".tl-tip:visible").text_content() or "")
        assert seen.evaluate("document.documentElement.scrollWidth <= innerWidth")
        drawn = seen.locator(":is(.tl-box, .tl-narrow):visible > svg")
        scale, wide, room = drawn.evaluate(
            "one => [one.getScreenCTM().a, one.getBoundingClientRect().width, one.parentNode.clientWidth]"
        )
        assert 12 <= 13 * scale <= 18 and min(room, 1200) <= wide <= room, (width, scale, wide)
        assert seen.get_by_text("The picture is not shown here").is_hidden()
        assert violations(seen) == [] and errors == []


def test_the_legends_entries_stand_equally_far_apart(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(Timeline((whole(made()),)), "Two ranks"), encoding="utf-8")
    seen = browser.new_page(viewport={"width": 1000, "height": 800})
    seen.goto(f"file://{tmp_path}/page.html")
    gaps = seen.evaluate("""() => [...document.querySelectorAll(".tl-keys svg")].map((key) =>
      key.getBoundingClientRect().right - key.querySelector("text").getBoundingClientRect().right)""")
    assert len(gaps) > 5 and min(gaps) >= 8 and max(gaps) - min(gaps) <= 12, gaps


def test_without_its_styles_only_the_text_is_seen(browser: Any, tmp_path: Path) -> None:
    """JupyterLab takes the styles out of what it does not trust, and the tags of SVG, but not the text in them."""
    bare = re.sub(
        r"<style>.*?</style>|</?(?:svg|g|rect|path|text|title)\b[^>]*>",
        "",
        inline(Timeline((whole(made()),))),
        flags=re.DOTALL,
    )
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{bare}", encoding="utf-8")
    seen = browser.new_page()
    seen.goto(f"file://{tmp_path}/page.html")
    said = seen.locator("body").inner_text()
    assert said.startswith("Timeline(2 ranks;") and said.rstrip().endswith("The picture is not shown here.")
