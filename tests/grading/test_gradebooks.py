"""What goes back to an LMS is what its importer takes; each rule below is read from Moodle's and Canvas's sources."""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from lockstep.course import Course
from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.exports.gradebooks import canvas_csv, canvas_feedback, moodle_csv, moodle_feedback
from lockstep.grading.exports.items import checks_csv
from lockstep.grading.intake import Handed, take_in
from lockstep.grading.policy import Accommodation, Grades, Policy, Rounding, apply
from lockstep.grading.policy_file import parse
from lockstep.grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from lockstep.grading.writers import write_all

HALF = ExerciseResult(
    "train_ddp",
    (CheckResult("a", "test_a", CheckOutcome.PASSED), CheckResult("b", "test_b", CheckOutcome.FAILED)),
)
WHOLE = ExerciseResult("setup_ddp", (CheckResult("c", "test_c", CheckOutcome.PASSED),) * 2)


def learner(id: str, shown: str, account: str, *results: ExerciseResult, faults: tuple[str, ...] = ()) -> Learner:
    handed = Handed(id, shown, Path("/nowhere"), (), account=account, refused=() if results else ("no <file>",))
    return Learner(handed, Report(7, results, faults=faults) if results or faults else None, 7)


def some(system: str) -> tuple[ClassResult, Grades]:
    people = (
        learner("ada", "Ada_Lovelace", f"{system} 11", HALF, WHOLE),
        learner("bob", "=Bob", f"{system} 12", HALF, WHOLE),
        learner("cy", "../Cy <b>", f"{system} 13"),
        learner("di", "Di", f"{system} 14", faults=("broke",)),
        learner("eve", "Eve", f"{system} 15", HALF, WHOLE),
        learner("fay", "Fay", f"{system} 15", HALF, WHOLE),  # one of them claims what is not theirs
        learner("gus", "Gus", "", HALF),
        learner("hal", "Hal", f"{system} 18", HALF, WHOLE),
    )
    graded = ClassResult(7, ("setup_ddp", "train_ddp"), people, max_scores={"setup_ddp": 2, "train_ddp": 2})
    known = Policy(
        learners={
            "bob": Accommodation(exempt=frozenset({"setup_ddp"}), comment="<i>see me</i>"),
            "hal": Accommodation(exempt=frozenset({"setup_ddp", "train_ddp"})),
        }
    )
    return graded, apply(known, graded)


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_moodles_worksheet() -> None:
    head, *body = rows(moodle_csv(*some("moodle"), Rounding()))
    assert {"Identifier", "Grade", "Last modified (grade)", "Feedback comments"} <= set(head)
    assert head[0] == "Identifier", "Moodle takes a column's index of 0 for none where it looks for feedback"
    found = {row[0]: dict(zip(head, row, strict=True)) for row in body}
    # substr(…, strlen('Participant ')) is the number
    assert {key: Decimal(row["Grade"]) for key, row in found.items()} == {
        "Participant 11": 3, "Participant 12": 2, "Participant 13": 0,
    }  # fmt: skip
    assert all(row["Maximum Grade"] == "4" for row in found.values())
    assert "no &lt;file&gt;" in found["Participant 13"]["Feedback comments"]
    assert found["Participant 12"]["Full name"] == "'=Bob"
    assert "&lt;i&gt;see me" in found["Participant 12"]["Feedback comments"], "Moodle shows it as HTML"


def test_moodles_feedback_zip() -> None:
    """`explode('_', name, 5)`: number, plugin's type and name, and the file, in this order."""
    graded, _ = some("moodle")
    pages = {one.id: one.id.encode() for one in graded.learners}
    data = moodle_feedback(graded, pages)
    assert data == moodle_feedback(graded, pages)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {}
        for name in archive.namelist():
            assert "/" not in name and not name.startswith((".", "~"))
            person, number, kind, plugin, file = name.split("_", 4)
            assert person and (kind, plugin, file) == ("assignsubmission", "file", "report.html")
            found[int(number)] = archive.read(name)
    assert found == {11: b"ada", 12: b"bob", 13: b"cy", 18: b"hal"}


def test_canvass_gradebook() -> None:
    head, possible, *body = rows(canvas_csv(*some("canvas"), Rounding(), "Lockstep"))
    assert len(head) > 3 and "Student" in head[0] and "ID" in head[1] and "Section" in head[2] and head[3] == "Lockstep"
    assert "Points Possible" in possible[0] and possible[3] == "4"
    assert {int(row[1]): row[3] for row in body} == {11: "3", 12: "2", 13: "0", 18: "EX"}, "EX is Canvas's excused"
    assert len({len(row) for row in (head, possible, *body)}) == 1


def test_canvass_column_is_the_one_that_the_policy_names(tmp_path: Path, course: Course) -> None:
    """Canvas finds an assignment by its heading in the gradebook, which ends with the assignment's number."""
    write_all(some("canvas")[0], tmp_path, course, parse('[canvas]\nassignment = "Homework 4 (123)"', ()))
    assert rows((tmp_path / "lms" / "canvas_grades.csv").read_text())[0][3] == "Homework 4 (123)"


def test_canvass_feedback_zip() -> None:
    """`split('_').grep(/^\\d+$/).take(2)`: the learner and a file that was handed in."""
    graded, _ = some("canvas")
    uploads = {"ada": " 901", "bob": " 902", "cy": "", "di": " 904", "eve": " 905", "fay": " 906", "hal": " 908"}
    people = [replace(one, handed=replace(one.handed, account=one.handed.account + uploads.get(one.id, ""),
                                          shown="99" if one.id == "hal" else one.handed.shown))
              for one in graded.learners]  # fmt: skip
    data = canvas_feedback(replace(graded, learners=tuple(people)), {one.id: one.id.encode() for one in people})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {tuple(int(part) for part in name.split("_") if part.isdigit()): name for name in archive.namelist()}
        assert {key: archive.read(name) for key, name in found.items()} == {
            (11, 901): b"ada", (12, 902): b"bob", (18, 908): b"hal",
        }  # fmt: skip


def test_a_table_of_all_checks() -> None:
    head, *body = rows(checks_csv(some("moodle")[0]))
    assert head == ["learner", "setup_ddp: test_c", "train_ddp: test_a", "train_ddp: test_b"]
    assert body[0] == ["ada", "passed", "passed", "failed"]
    assert body[2] == ["cy", "", "", ""] and body[-2] == ["gus", "", "passed", "failed"]


@pytest.mark.parametrize("system", ["moodle", "canvas", ""])
def test_only_what_the_submissions_came_from(tmp_path: Path, course: Course, system: str) -> None:
    graded, _ = some(system) if system else (ClassResult(7, ("train_ddp",), (learner("gus", "Gus", "", HALF),)), None)
    write_all(graded, tmp_path, course, Policy())
    wanted = {
        "moodle": {"moodle_grades.csv", "moodle_feedback.zip"},
        "canvas": {"canvas_grades.csv", "canvas_feedback.zip"},
    }.get(system, set())
    assert {path.name for path in tmp_path.glob("lms/*")} == wanted
    assert (tmp_path / "checks.csv").is_file()


def test_the_number_is_that_of_the_download(tmp_path: Path, course: Course) -> None:
    for name in ("Ada L_11_assignsubmission_file_/train_ddp.py", "Bob_12_assignsubmission_file_train_ddp.py"):
        (tmp_path / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / name).write_text("x = 1")
    (tmp_path / "class" / "eulerleo_LATE_88_500_train_ddp.py").write_text("x = 1")
    found = take_in(tmp_path / "class", tmp_path / "scratch", course)
    assert sorted(one.account for one in found) == ["canvas 88 500", "moodle 11", "moodle 12"]
