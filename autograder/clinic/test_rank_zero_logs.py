"""Case `rank_zero_logs`: a log line gathers the losses of all ranks, on the one host that is told to log."""

from __future__ import annotations

import re

import pytest
import torch
from clinic.case import cases, draw, judge_diagnosis, judge_equal, treat_widely, unmended
from clinic.retrain import Batch, Job, batch, cut, start
from clinic.support import clinic_data
from clinic.trained import judge_training

from lockstep.grading import Cause, Collective, Diagnosis, Grader, Run, names, one_or_more

CASE = cases()["rank_zero_logs"]
RECORDS, BATCH, EVERY, FEWER = 32, 4, 4, 2
LOGGING = r"if .*losses_of_all || losses_of_all\(loss\) || if .*log || % 4 || all_gather || def main"
LOG = r"log\.append || losses_of_all\(loss\) || \"log\" || def main"
REFUTED = {
    "different-settings": "The hosts' settings do differ, and may: one is meant to log. Ask what the one that logs calls, and who answers.",
    "uneven-data": "Every rank has 32 records and 8 batches.",
    "different-order": "What one rank waits in, the others never call at all: it is not a matter of order.",
    "slow-rank": "No rank is slow: the ranks wait in different calls, and will still wait there tomorrow.",
}


def _shares(world_size: int) -> list[list[Batch]]:
    parts = cut(range(RECORDS), BATCH)
    return [[batch(clinic_data.Records(RECORDS, seed=rank), part) for part in parts] for rank in range(world_size)]


JOB = Job(start, 0.1, _shares)


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Still waiting: who called the gathering, and who did not."""
    calls = [_besides_training(made) for made in run.collectives]
    if len(set(calls)) == 1:
        return None
    few = [rank for rank, count in enumerate(calls) if count == min(calls)]
    many = [rank for rank, count in enumerate(calls) if count == max(calls)]
    seen = (
        f"{names(many).capitalize()} called {_counted(max(calls))} of the job's own while training, {names(few)} "
        f"{_counted(min(calls))}: {cause.headline}"
    )
    return unmended(grader, run, seen, LOGGING, many)


def _counted(calls: int) -> str:
    return f"{calls} collective{'s' * (calls > 1)}" if calls else "none"


def _besides_training(calls: list[Collective]) -> int:
    """How many collectives a rank called between its first backward and the last barrier that were not DDP's."""
    first = next((at for at, call in enumerate(calls) if call.inside == "backward"), len(calls))
    return sum(not call.inside and call.kind != "barrier" for call in calls[first:])


def test_diagnosis(grader: Grader) -> None:
    """the diagnosis names the cause and the rank"""
    judge_diagnosis(grader, CASE, REFUTED)


def test_it_ends(grader: Grader) -> None:
    """the job ends, whichever host logs, and on 2 ranks too"""
    _runs(grader)


@pytest.mark.needs("test_it_ends")
def test_equal(grader: Grader) -> None:
    """all ranks end with the same model, trained on the records of all"""
    for _, run in _runs(grader):
        judge_equal(grader, run, "It ends, but {tensor} of {ranks} is no longer that of rank 0.", LOGGING)
        judge_training(grader, run, JOB)


@pytest.mark.needs("test_equal")
def test_log(grader: Grader) -> None:
    """the host that logs still logs the losses of all ranks"""
    runs = _runs(grader)
    logging = {draw(ticket, CASE.name, CASE.ranks): _logs(run) for ticket, run in runs if run.world_size == CASE.ranks}
    for ticket, run in runs:
        size, expected = run.world_size, _losses(run.world_size)
        host = draw(ticket, CASE.name, size)
        log = (run.observed("result")[host] or {}).get("log")
        if not log:
            rest = [rank for rank, ranks in logging.items() if rank in ranks]
            told = "It ends because no rank logs any more: the log"
            if rest or _logs(run):
                told = f"Only {names(rest or _logs(run))} logs, whichever host's settings ask for it: the log"
            grader.fail(
                "symptom-hidden",
                f"{told} of rank {host}, whose settings ask for one, is {log!r}.",
                of=[host],
                at=LOG,
            )
        if _close(log, [[sum(step) / len(step)] for step in expected]) or not _close(log, expected):
            told = [[round(float(one), 3) for one in step] for step in log] if _numbers(log) else log
            right = [[round(one, 3) for one in step] for step in expected]
            grader.fail(
                "another-illness",
                f"The log of rank {host} says {told}; the losses of the {size} ranks at steps 4 and 8 were {right}.{_because(log, size)}",
                of=[host],
                at=LOG,
            )
        others = [rank for rank in range(size) if rank != host]
        too = [rank for rank in others if rank in _logs(run) or _prints(run, rank, expected)]
        if too:
            what = f"{names(too).capitalize()} {one_or_more(too, 'logs', 'log')} the losses as well; only the settings of rank {host} ask for it."
            grader.fail("another-illness", what, of=too, at=LOG)
        if not _prints(run, host, expected):
            what = f"Rank {host} returns the losses of all ranks, and no longer prints them."
            grader.fail("another-illness", what, of=[host], at=LOG)


def _runs(grader: Grader) -> list[tuple[int, Run]]:
    """(ticket, run) under the learner's ticket and another; rank 0 logs under one of the two, and another rank under one; and a run on fewer ranks."""

    def other(grader: Grader, mine: int) -> int:
        numbers, ticket = grader.random(f"{CASE.name}/log"), mine
        while (draw(ticket, CASE.name, CASE.ranks) == 0) == (draw(mine, CASE.name, CASE.ranks) == 0):
            ticket = numbers.randrange(1_000_000)
        return ticket

    return treat_widely(grader, CASE, FEWER, choose=other)


def _logs(run: Run) -> list[int]:
    """The ranks that returned a log with something in it."""
    return [rank for rank, result in enumerate(run.observed("result")) if (result or {}).get("log")]


def _prints(run: Run, rank: int, expected: list[list[float]]) -> bool:
    """Whether each of these losses is among the numbers that this rank printed, to two places."""
    report = run.ranks[rank]
    said = [float(one) for one in re.findall(r"\d+\.\d+", report.stdout + report.stderr)]
    return all(any(abs(one - loss) < 0.01 for one in said) for step in expected for loss in step)


def _numbers(log: object) -> bool:
    return isinstance(log, list) and all(
        isinstance(step, list) and all(isinstance(one, (int, float)) for one in step) for step in log
    )


def _close(log: object, expected: list[list[float]]) -> bool:
    if (
        not isinstance(log, list)
        or not _numbers(log)
        or [len(step) for step in log] != [len(step) for step in expected]
    ):
        return False
    return all(abs(a - b) < 1e-3 for one, two in zip(log, expected, strict=True) for a, b in zip(one, two, strict=True))


def _losses(world_size: int) -> list[list[float]]:
    """What the ranks' losses are at steps 4 and 8, computed in one process."""
    return _all_losses(world_size)[EVERY - 1 :: EVERY]


def _all_losses(world_size: int) -> list[list[float]]:
    """Of each step, the ranks' losses."""
    return [list(step) for step in zip(*(one.losses for one in JOB.train(world_size)), strict=True)]


def _because(log: object, world_size: int) -> str:
    """Which other steps, or what else of the steps 4 and 8, would give such a log."""
    losses = _all_losses(world_size)
    for first in range(EVERY - 1):
        if _close(log, losses[first::EVERY]):
            return f" It has those of steps {first + 1} and {first + 1 + EVERY}."
    if _close(log, losses):
        return f" It has those of all {len(losses)} steps."
    if _close(log, [[sum(step) / world_size] * world_size for step in _losses(world_size)]):
        return " It repeats the mean of the ranks."
    after = []
    for step in range(EVERY - 1, len(losses), EVERY):
        model = start()
        model.load_state_dict(JOB.state(world_size, steps=step + 1))
        now = [share[step] for share in _shares(world_size)]
        after.append([torch.nn.functional.cross_entropy(model(features), classes).item() for features, classes in now])
    return " It has the losses of these batches after the step instead of before." if _close(log, after) else ""
