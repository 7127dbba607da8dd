"""How fast a class is graded, against the same checks done the naive way; how much memory it takes; whether it repeats.

Four parts, each printed when it is done:

1. `course`: the reference solutions of the whole course, as `./lockstep check --all` grades them, three at a time.
2. `class`: N generated submissions of three exercises through `lockstep grade`'s engine: a third right, a third wrong, a
   sixth hanging, a sixth hostile, all from `tests/submissions`. The naive way beside it, in the same run: for every run
   of ranks that a check needs, new processes that import torch (as `mp.spawn` starts them), no result shared between
   checks, no check held back because an earlier one failed, no hang found; a run ends by itself or after 30 s. (The
   ranks that a submission spawns itself are still forked for it, which favors the naive way.) It takes hours for a class, so it is measured on a sample of single checks, drawn for each kind of submission, and its mean is
   multiplied by the number of checks. What was measured and what was multiplied is printed.
3. `memory`: resident memory of the engine, of its worker and of the process that forks ranks, while one small submission
   after the other is graded by the same worker.
4. `same`: the same right submissions graded K times while other processes keep all cores busy; how many results are
   byte for byte the first one.

    python benchmarks/grading.py [--quick] [--parts course,class,memory,same] [--submissions N] [--jobs N] [--json]

`--quick` is for CI: one exercise, few submissions. Ranks run as the engine has them run here: in a sandbox where there is
one (LOCKSTEP_ISOLATION=none for the other figure). The naive way has none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.authoring.bank import Entry, entries
from lockstep.course import Course
from lockstep.grading import bulk, isolation, pool
from lockstep.grading.classroom import Learner
from lockstep.grading.request import GradeRequest
from lockstep.grading.side_by_side import grade_side_by_side
from lockstep.ranks.processes import descendants

ROOT = Path(__file__).resolve().parents[1]
BANK = ROOT / "tests" / "submissions"
TRIO = ("setup_ddp", "train_ddp", "launch_distributed")
KINDS = ("right", "right", "wrong", "wrong", "hanging", "hostile")
HANGS = ("hang", "uneven-data-hang", "hang-on-failure", "rank-conditional-collective")
NAIVE_SECONDS = 30.0


# Submissions -------------------------------------------------------------------------------------------------------


@cache
def bank(kind: str, name: str) -> list[str]:
    """The submissions of the bank that are of this kind and solve this exercise, in the order of their names."""
    if kind == "hostile":
        texts = [file.read_text(encoding="utf-8") for file in sorted((BANK / "hostile").rglob("*.py"))]
        return [text for text in texts if f"# exercise: {name}\n" in text]
    found = [entry for entry in sorted(exam(), key=lambda entry: entry.name) if entry.exercise == name]
    if kind == "right":
        return [entry.text for entry in found if entry.mistake is None]
    return [
        entry.text for entry in found if entry.mistake and (entry.mistake.diagnosis in HANGS) == (kind == "hanging")
    ]


@cache
def exam() -> list[Entry]:
    """All right and wrong submissions that are Python files."""
    return [entry for entry in entries(ROOT) if not entry.script]


def generate(folder: Path, number: int, names: tuple[str, ...], draw: random.Random) -> dict[str, str]:
    """So many learners' folders: id to kind. A hanging or hostile learner has one such file, and right ones beside it."""
    kinds = {}
    for index in range(number):
        kind, id = KINDS[index % len(KINDS)], f"learner-{index:04d}"
        kinds[id] = kind
        (folder / id).mkdir(parents=True)
        able = [name for name in names if bank(kind, name)]
        if not able:
            kinds[id] = kind = "wrong"  # the bank has none for these exercises
        odd = draw.choice(able) if able else ""
        for name in names:
            of = kind if kind in ("right", "wrong") or name == odd else "right"
            (folder / id / f"{name}.py").write_text(draw.choice(bank(of, name)), encoding="utf-8")
    return kinds


# 1: the course -----------------------------------------------------------------------------------------------------


def measure_course(course: Course, names: tuple[str, ...]) -> dict[str, Any]:
    """The reference solutions as `./lockstep check --all` grades them, from cold."""
    began = time.perf_counter()
    report = grade_side_by_side(course, GradeRequest(names, course.solutions, seed=1))
    seconds = time.perf_counter() - began
    if not report.passed:
        raise SystemExit(f"the reference solutions do not pass: {report.faults or report.exercises}")
    return {"exercises": len(names), "checks": sum(e.max_score for e in report.exercises), "seconds": seconds}


# 2: a class --------------------------------------------------------------------------------------------------------


def grade_class(
    course: Course, source: Path, out: Path, names: tuple[str, ...], jobs: int
) -> tuple[list[Learner], float]:
    """Everybody graded by the engine, from taking in to the last result; and the seconds that it took."""
    told: list[Learner] = []
    began = time.perf_counter()
    with bulk.opened(course, source, out, bulk.ClassRequest(exercises=names, seed=1, allow_unisolated=True)) as grading:
        bulk.carry_out(grading, grading.pending(), jobs, told.append)
    return told, time.perf_counter() - began


def measure_class(
    course: Course, folder: Path, number: int, names: tuple[str, ...], jobs: int, sample: int
) -> dict[str, Any]:
    """Throughput of the engine, and what the naive way would take, from a sample of its checks."""
    draw = random.Random(7)
    kinds = generate(folder / "class", number, names, draw)
    told, seconds = grade_class(course, folder / "class", folder / "graded", names, jobs)
    checks = {name: [check.id for check in _exercise(told[0], name)] for name in names}
    each = sum(len(ids) for ids in checks.values())
    naive: dict[str, list[float]] = {}
    for kind in dict.fromkeys(kinds.values()):
        learners = [id for id, its in kinds.items() if its == kind]
        for _ in range(sample):
            name = draw.choice(names)
            id = draw.choice(learners)
            naive.setdefault(kind, []).append(naively(folder / "class" / id, name, draw.choice(checks[name])))
            print(f"naively: a check of {name} on a {kind} submission took {naive[kind][-1]:.1f} s", file=sys.stderr)
    per_kind = {kind: sum(times) / len(times) * each for kind, times in naive.items()}
    whole = sum(per_kind[kind] for kind in kinds.values())
    return {
        "submissions": number,
        "kinds": {kind: list(kinds.values()).count(kind) for kind in dict.fromkeys(kinds.values())},
        "jobs": jobs,
        "seconds": seconds,
        "faults": sum(one.faulty for one in told),
        "per_submission": {k: _mean([o.seconds for o in told if kinds[o.id] == k]) for k in dict.fromkeys(kinds.values())},
        "checks_each": each,
        "naive_measured": {kind: [round(one, 2) for one in times] for kind, times in naive.items()},
        "naive_per_submission": per_kind,
        "naive_seconds": whole,
        "ratio": whole / seconds,
    }  # fmt: skip


def _exercise(learner: Learner, name: str) -> Any:
    return next(result.checks for result in learner.exercises if result.name == name)


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0


NAIVE = """
import sys, time
from pathlib import Path
from lockstep import ranks
from lockstep.grading import grader, plugin
from lockstep.course import Course
from lockstep.grading.grade import grade
from lockstep.grading.request import GradeRequest
from lockstep.ranks import fork_server

root, folder, name, check, seconds = sys.argv[1:]
import torch  # the judge is warm here, too: only its ranks are not

def setup(item):  # one check, whatever became of those before it
    if item.name != check:
        raise grader.CheckNotRun("not in the sample")

def run(*given, _run=ranks.run, **limits):
    limits |= {"deadline": float(seconds), "cpu_limit": None, "idle_limit": None, "patience": 1e9}
    return _run(*given, **limits)

plugin.pytest_runtest_setup = setup
ranks.run = run
began = time.perf_counter()
report = grade(Course(Path(root)), GradeRequest((name,), Path(folder), seed=1))
print(time.perf_counter() - began)
"""


def naively(folder: Path, name: str, check: str) -> float:
    """Seconds of one check of a submission, each of its runs in processes of its own that import torch."""
    environment = {**os.environ, "LOCKSTEP_START_METHOD": "spawn", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", NAIVE, str(ROOT), str(folder), name, check, str(NAIVE_SECONDS)],
        env=environment, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the naive way broke: {done.stderr.strip()}")
    return float(done.stdout.split()[-1])


# 3: memory ---------------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def measure_memory(course: Course, folder: Path, number: int) -> dict[str, Any]:
    """Memory over so many submissions, a tenth at a time: engine, and worker with what forks its ranks."""
    texts = [*bank("right", "average_gradients"), *bank("wrong", "average_gradients")]
    for index in range(number):
        file = folder / "many" / f"learner-{index:04d}" / "average_gradients.py"
        file.parent.mkdir(parents=True)
        file.write_text(texts[index % len(texts)], encoding="utf-8")
    engine: list[int] = []
    workers: list[int] = []

    def look(learner: Learner) -> None:
        engine.append(resident(os.getpid()))
        now = sum(resident(pid) for pid in descendants(os.getpid()))
        workers.append(now or workers[-1])  # the last one's worker may be gone already

    order = bulk.ClassRequest(seed=1, allow_unisolated=True)
    life, pool.LIFE = pool.LIFE, number + 1  # never a new worker: whatever grows would show
    try:
        with bulk.opened(course, folder / "many", folder / "many-graded", order) as grading:
            bulk.carry_out(grading, grading.pending(), 1, look)
    finally:
        pool.LIFE = life
    tenth = max(1, number // 10)
    steps = range(0, number, tenth)
    return {
        "submissions": number,
        "engine": [max(engine[at : at + tenth]) >> 20 for at in steps],
        "workers": [min(workers[at : at + tenth]) >> 20 for at in steps],  # without ranks that are only just leaving
    }


# 4: the same -------------------------------------------------------------------------------------------------------


def _burn() -> None:
    while True:
        sum(range(100_000))


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep the cores busy."""
    burners = [multiprocessing.get_context("fork").Process(target=_burn, daemon=True) for _ in range(processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def measure_same(course: Course, folder: Path, times: int, names: tuple[str, ...]) -> dict[str, Any]:
    """How many of so many gradings of one right learner give the bytes of the first."""
    (folder / "one" / "ada").mkdir(parents=True)
    for name in names:
        (folder / "one" / "ada" / f"{name}.py").write_text(bank("right", name)[0], encoding="utf-8")
    found: list[bytes] = []
    began = time.perf_counter()
    with load(2 * (os.cpu_count() or 1)):
        for number in range(times):
            out = folder / f"same-{number}"
            grade_class(course, folder / "one", out, names, 1)
            found.append((out / "results" / "ada.json").read_bytes())
    passed = sum(all(exercise["passed"] for exercise in json.loads(one)["exercises"]) for one in found)
    return {
        "gradings": times,
        "identical": found.count(found[0]),
        "passed": passed,
        "seconds": time.perf_counter() - began,
    }


# All of it ---------------------------------------------------------------------------------------------------------


def tell(part: str, found: dict[str, Any]) -> None:
    """Print a part's figures."""
    if part == "course":
        print(f"course   {found['exercises']} reference solutions, {found['checks']} checks: {found['seconds']:.1f} s")
    elif part == "class":
        kinds = ", ".join(f"{number} {kind}" for kind, number in found["kinds"].items())
        print(f"class    {found['submissions']} submissions ({kinds}), {found['jobs']} at once: {found['seconds']:.1f} s, "
              f"{found['seconds'] / found['submissions']:.1f} s each; faults of ours: {found['faults']}")  # fmt: skip
        for kind, seconds in found["per_submission"].items():
            sample = found["naive_measured"][kind]
            print(f"         {kind:<8} {seconds:7.1f} s each; naively {found['naive_per_submission'][kind]:7.0f} s "
                  f"(mean of {len(sample)} checks measured, {sum(sample) / len(sample):.1f} s, times {found['checks_each']})")  # fmt: skip
        print(
            f"         naively {found['naive_seconds']:.0f} s for the class, multiplied from the sample: {found['ratio']:.0f}× as long"
        )
    elif part == "memory":
        for what in ("engine", "workers"):
            print(
                f"memory   {what:<8} {' '.join(f'{one:4d}' for one in found[what])}  MiB, by tenths of {found['submissions']} submissions"
            )
    else:
        print(f"same     {found['gradings']} gradings under load: {found['identical']} identical, {found['passed']} passed, "
              f"{found['seconds'] / found['gradings']:.1f} s each")  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="CI's size")
    parser.add_argument("--parts", default="course,class,memory,same")
    parser.add_argument("--submissions", type=int, help="of the class (default 100, quick 6)")
    parser.add_argument("--jobs", type=int, default=bulk.default_jobs())
    parser.add_argument("--sample", type=int, help="naive checks measured for each kind (default 6, quick 1)")
    parser.add_argument("--memory", type=int, help="submissions of the memory part (default 1000, quick 20)")
    parser.add_argument("--repeats", type=int, help="gradings of the same (default 50, quick 3)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quick = given.quick
    names = ("train_ddp",) if quick else TRIO
    course = Course(ROOT)
    found: dict[str, Any] = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "isolation": isolation.tier().name}
    if not given.json:
        print(
            f"{found['cores']} cores, load {found['load']:.1f} at the start, isolation: {found['isolation']}",
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as place:
        folder = Path(place)
        parts = {
            "course": lambda: measure_course(course, TRIO if quick else course.names),
            "class": lambda: measure_class(
                course, folder, given.submissions or (6 if quick else 100), names, given.jobs, given.sample or (1 if quick else 6)
            ),
            "memory": lambda: measure_memory(course, folder, given.memory or (20 if quick else 1000)),
            "same": lambda: measure_same(course, folder, given.repeats or (3 if quick else 50), names),
        }  # fmt: skip
        for part in given.parts.split(","):
            found[part] = parts[part]()
            if not given.json:
                tell(part, found[part])
                sys.stdout.flush()
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
