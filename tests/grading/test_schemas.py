"""What a class is exported as for Gradescope and Classroom 50 keeps to their documented formats."""

from __future__ import annotations

import copy
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lockstep.course import Course
from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.exports.gradescope import results
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Accommodation, Mark, Policy
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.grading.writers import write_all

SCHEMAS = Path(__file__).parent / "schemas"
FAILED = CheckResult("bad", "test_bad", CheckOutcome.FAILED, Diagnosis("hang", "a\x1b[0m <b>", "=1+1"))
CHECKS = (
    CheckResult("good", "test_good", CheckOutcome.PASSED),
    FAILED,
    CheckResult("left", "test_left", CheckOutcome.NOT_RUN, reason="needs “good”"),
    CheckResult("gpu", "test_gpu", CheckOutcome.NOT_RUN, reason="no GPU", lacking=True),
)
REPORT = Report(7, (ExerciseResult("train_ddp", CHECKS, 1.5), ExerciseResult("setup_ddp", CHECKS[:2], 0.2)))


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def exported(folder: Path, course: Course) -> list[Path]:
    """The files of a class: graded, graded by hand, excused, late, without a file, and with a fault of ours."""
    people = [
        Learner(Handed(id, id, Path("/nowhere"), (), marked_late=id == "late", refused=refused), report, 7)
        for id, report, refused in (
            ("ada", REPORT, ()),
            ("by-hand", REPORT, ()),
            ("excused", REPORT, ()),
            ("fault", Report(7, (), faults=("broke",)), ()),
            ("late", REPORT, ()),
            ("nothing", None, ("nothing to grade: <b>",)),
        )
    ]
    policy = Policy(
        learners={
            "by-hand": Accommodation(marks={"train_ddp": Mark(points=Decimal("1.5"), comment="*so*")}),
            "excused": Accommodation(exempt=frozenset({"train_ddp", "setup_ddp"})),
            "late": Accommodation(late_days=2),
        }
    )
    graded = ClassResult(7, ("setup_ddp", "train_ddp"), tuple(people), max_scores={"setup_ddp": 2, "train_ddp": 3})
    write_all(graded, folder, course, policy)
    return [*sorted(folder.glob("gradescope/*.json")), folder / "classroom50" / "scores.json"]


def test_a_classs_exports_keep_to_the_formats(tmp_path: Path, course: Course) -> None:
    *each, book = exported(tmp_path, course)
    assert [path.stem for path in each] == ["ada", "by-hand", "excused", "late", "nothing"]
    for path in each:
        validator("gradescope-results").validate(json.loads(path.read_bytes()))
    data = json.loads(book.read_bytes())
    validator("classroom50").validate(data)
    ((_, bucket),) = data["assignments"].items()
    assert [entry["owner"] for entry in bucket["entries"]] == ["ada", "by-hand", "excused", "late", "nothing"]
    for record in (entry["submissions"][0] for entry in bucket["entries"]):  # what a schema cannot say
        assert record["score"] <= record["max-score"]
        assert all(test["score"] <= test["max-score"] for test in record["tests"])
    assert r"a\x1b[0m <b>" in [test.get("message") for test in bucket["entries"][0]["submissions"][0]["tests"]]


def test_what_gradescopes_own_autograder_writes_keeps_to_it_too() -> None:
    validator("gradescope-results").validate(results(REPORT))


def _changed(data: Any, path: list[Any], value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["tests", 0, "score"], "1"),
        (["tests", 0, "status"], "ok"),
        (["tests", 0, "points"], 1),
        (["visibility"], "public"),
        (["tests", 0, "score"], None),
    ],
)
def test_the_schema_of_gradescope_refuses(path: list[Any], value: Any) -> None:
    good = results(REPORT)
    assert validator("gradescope-results").is_valid(good)
    assert not validator("gradescope-results").is_valid(_changed(good, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["score"], 1.5),
        (["max-score"], -1),
        (["datetime"], "2026-11-25 00:00:00"),
        (["submission"], "tag"),
        (["owner"], None),
        (["tests", 0, "passed"], "yes"),
    ],
)
def test_the_schema_of_classroom_50_refuses(path: list[Any], value: Any, tmp_path: Path, course: Course) -> None:
    good = json.loads(exported(tmp_path, course)[-1].read_bytes())
    inside: list[Any] = ["assignments", "lockstep", "entries", 0, "submissions", 0]
    assert validator("classroom50").is_valid(good)
    assert not validator("classroom50").is_valid(_changed(good, inside + path, value))
