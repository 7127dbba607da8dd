"""A report as Gradescope's `results.json`, and what `run_autograder` calls to make it.

The format is the one of Gradescope's autograder specification: `tests`, each with `name`, `score`, `max_score`,
`status`, `output` and `visibility`; the sum of their scores is the submission's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...course import Course, CourseError, find, leaf
from ...course.files import write
from ...course.hints import suffixes
from ..classroom import Learner
from ..policy import Grade
from ..verdict import CheckOutcome, CheckResult, Report, from_json

SHOWN = {"output_format": "text", "visibility": "visible", "stdout_visibility": "hidden"}
SECONDS = 30 * 60
MAX_OUTPUT = 10_000  # characters of one check


def results(report: Report) -> dict[str, Any]:
    """`results.json` as data. Raises ValueError for a report with faults of ours: those must not cost points."""
    if report.faults:
        raise ValueError(f"a check broke, so this grading does not count: {report.faults[0]}")
    return {
        "output": f"Seed {report.seed}: `./lockstep check --seed {report.seed}` repeats this grading.",
        **SHOWN,
        "execution_time": round(sum(exercise.seconds for exercise in report.exercises)),
        "tests": [_test(exercise.name, check) for exercise in report.exercises for check in exercise.checks],
    }


def class_results(learner: Learner, grade: Grade) -> dict[str, Any]:
    """`results.json` of one learner of a class. Raises ValueError after a fault of ours.

    The grade's points are the submission's `score`, which Gradescope takes instead of the sum over the checks, and the
    output has the policy's explanations. When nothing could be graded it says why.
    """
    said = "\n".join((*grade.said, *learner.handed.refused, *learner.handed.notes)).strip()
    if learner.report is None:
        return {"score": float(grade.score or 0), "output": said, **SHOWN}
    data = results(learner.report)
    output = f"{data['output']}\n\n{grade.score} of {grade.most} points\n{said}".strip()
    return {**data, "score": float(grade.score or 0), "output": output}


def _test(exercise: str, check: CheckResult) -> dict[str, Any]:
    passed = check.outcome is CheckOutcome.PASSED
    text = f"Not run, and not counted: {check.reason}" if check.lacking else check.reason
    if check.diagnosis is not None:
        found = check.diagnosis
        read = f"Read {found.read}." if found.read else ""
        text = "\n\n".join(part for part in (found.message, found.proof.shown(), read) if part)
    return {
        "name": f"{exercise}: {check.name}",
        "score": int(passed),
        "max_score": int(not check.lacking),
        "status": "passed" if passed or check.lacking else "failed",
        "output": "" if passed else text[:MAX_OUTPUT],
        "output_format": "text",  # never HTML: parts of it come from the submission
        "visibility": "visible",
    }


def gather(course: Course, submission: Path, into: Path) -> None:
    """Each exercise's files: what was handed in, flat or in folders, or else the stub."""
    for file in (f"{name}{suffix}" for name in course.names for suffix in suffixes(course, name)):
        target = into / file
        target.parent.mkdir(parents=True, exist_ok=True)
        places = [submission / file, submission / "exercises" / file, submission / leaf(file)]
        handed_in = [place for place in places if place.is_file() and not place.is_symlink()]
        shutil.copyfile(handed_in[0] if handed_in else course.autograder / "stubs" / file, target)


def main(arguments: list[str] | None = None) -> int:
    """Grade a submission: 0 with results written, 3 without any when something of ours broke."""
    parser = argparse.ArgumentParser(prog="gradescope")
    parser.add_argument("--submission", type=Path, required=True, help="the folder that was handed in")
    parser.add_argument("--results", type=Path, required=True, help="where the results go")
    options = parser.parse_args(arguments)
    try:
        data = results(graded_apart(find(), options.submission))
    except (CourseError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"lockstep: nothing was graded: {error}", file=sys.stderr)
        return 3
    write(options.results, (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode())
    return 0


def graded_apart(course: Course, submission: Path) -> Report:
    """All exercises of a submission, graded in a process of their own with a deadline.

    Raises OSError, ValueError or subprocess.SubprocessError when there is no report.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        gather(course, submission, Path(folder))
        command = [sys.executable, "-m", "lockstep", "check", "--all", "--isolated", "--json", "--submission", folder]
        environment = {**os.environ, "LOCKSTEP_WARM": "0", "LOCKSTEP_COURSE": str(course.root)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
    return from_json(json.loads(done.stdout))


if __name__ == "__main__":
    sys.exit(main())
