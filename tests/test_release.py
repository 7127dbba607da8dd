"""A learner's copy: it works by itself, has nothing of any solution, and comes out the same every time."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import warm

from lockstep.authoring import cut
from lockstep.authoring.release import contents, find_leaks, release
from lockstep.course import Course, CourseError, find
from lockstep.course.outline import outlines
from lockstep.course.stubs import canary, make_stub, solved, with_canary, without_markers
from lockstep.grading.exports import gradescope
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def course() -> Course:
    return find(ROOT)


@pytest.fixture(scope="module")
def copy(course, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "course"
    release(course, folder=folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def learners(copy, tmp_path_factory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy that a learner works in, and an environment in which one process grades for all its commands."""
    here = tmp_path_factory.mktemp("learner") / "course"
    shutil.copytree(copy, here)
    with warm(tmp_path_factory.mktemp("w")) as environment:
        yield here, environment


def lockstep(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """`./lockstep` in that folder, which must not see the checkout around these tests."""
    dropped = ("PYTHONPATH", "LOCKSTEP_COURSE", "LOCKSTEP_SUBMISSION")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {"LOCKSTEP_PYTHON": sys.executable, "LOCKSTEP_WARM": "0", "OMP_NUM_THREADS": "1", **more}
    command = ["./lockstep", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def test_every_solution_has_its_own_canary_which_no_stub_and_no_reader_sees(course):
    words = set()
    for name, path in solved(course.solutions).items():
        text = path.read_text(encoding="utf-8")
        word = canary(name)
        assert text.count(word) == 1, f"{name}: ./lockstep author stubs puts the canary in"
        assert with_canary(text, name) == text
        assert word not in make_stub(text, name) + without_markers(text)
        assert "canary" not in make_stub(text, name) + without_markers(text)
        words.add(word)
    assert len(words) >= len(course.names)


def test_a_copied_solutions_canary_is_replaced_and_not_doubled():
    text = with_canary(with_canary("x = 1\n", "one"), "two")
    assert text.count("lockstep-canary") == 1
    assert canary("two") in text


def test_the_copy_has_no_canary_and_nothing_of_teachers(course, copy):
    files = files_of(copy)
    assert {path.split("/")[0] for path in files} == {
        ".gitignore", "LICENSE", "README.md", "autograder", "chapters", "docs", "environment.yml", "exercises", "lockstep",
        "pyproject.toml", "requirements.lock", "src",
    }  # fmt: skip
    assert not [path for path in files if path.startswith("chapters/source/") or "__pycache__" in path]
    for name in solved(course.solutions):
        assert not [path for path, content in files.items() if canary(name).encode() in content], name
    assert "exercises/clinic/clinic_data.py" in files
    readme = files["README.md"].decode()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert "## For learners" in readme and "## For teachers" not in readme
    assert not [link for link in links if "://" not in link and link not in files]
    assert os.access(copy / "lockstep", os.X_OK)


def test_stubs_come_from_the_solutions_and_not_from_what_lies_in_exercises(course, copy):
    for name in course.names:
        stub = make_stub((course.solutions / f"{name}.py").read_text(encoding="utf-8"), name)
        assert (copy / "exercises" / f"{name}.py").read_text(encoding="utf-8") == stub
        assert (copy / "autograder" / "stubs" / f"{name}.py").read_text(encoding="utf-8") == stub
    scripts = sorted(course.solutions.glob("*.sbatch"))
    for script in scripts:
        stub = make_stub(script.read_text(encoding="utf-8"), script.name)
        for folder in ("exercises", "autograder/stubs"):
            assert (copy / folder / script.name).read_text(encoding="utf-8") == stub
    assert scripts and len(list(copy.rglob("*.sbatch"))) == 2 * len(scripts)


def test_the_copy_checks_resets_and_hints_by_itself(course, learners):
    here, environment = learners
    stub = (here / "exercises/average_gradients.py").read_bytes()
    failed = lockstep(here, "check", "average_gradients", "--json", **environment)
    assert failed.returncode == 1, failed.stderr
    assert not json.loads(failed.stdout)["passed"]
    shutil.copyfile(course.solutions / "average_gradients.py", here / "exercises/average_gradients.py")
    passed = lockstep(here, "check", "average_gradients", "--json", **environment)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert json.loads(passed.stdout)["passed"]
    assert lockstep(here, "reset", "average_gradients").returncode == 0
    assert (here / "exercises/average_gradients.py").read_bytes() == stub
    assert lockstep(here, "reset", "clinic/short_shard").returncode == 0
    assert "Hint 1 of" in lockstep(here, "hint", "average_gradients").stdout
    assert "average_gradients" in lockstep(here, "status").stdout
    answer = lockstep(here, "solution", "-y", "average_gradients")
    assert (answer.returncode, answer.stderr) == (2, "lockstep: this copy of the course has no solutions\n")
    answer = lockstep(here, "check", "--submission", "average_gradients/never_divides")
    assert (answer.returncode, answer.stderr.split(" average")[0]) == (2, "lockstep: there is no file or folder")


@pytest.mark.slow
def test_an_exercise_that_imports_another_takes_the_learners_own(course, learners):
    here, environment = learners
    shutil.copyfile(course.solutions / "train_ddp.py", here / "exercises/train_ddp.py")
    imported = re.search(r"^from (\w+) import", (here / "exercises/train_ddp.py").read_text(), re.M)
    needed = [name for name in course.names if f"from {name} import" in (here / "exercises/train_ddp.py").read_text()]
    assert imported and needed, "train_ddp imports no exercise any more: take another"
    assert lockstep(here, "check", "train_ddp", "--json", **environment).returncode == 1  # what it imports is a stub
    for name in needed:
        shutil.copyfile(course.solutions / f"{name}.py", here / f"exercises/{name}.py")
    done = lockstep(here, "check", "train_ddp", "--json", **environment)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_two_releases_are_the_same_bytes(course, copy, tmp_path):
    release(course, folder=tmp_path / "again", gradescope=tmp_path / "one.zip")
    release(course, gradescope=tmp_path / "two.zip")
    assert files_of(tmp_path / "again") == files_of(copy)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    assert {path.stat().st_mtime for path in (tmp_path / "again").rglob("*")} == {315532800.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "one.zip", "two.zip"]


def test_only_some_exercises_with_what_they_import(course, tmp_path):
    done = release(course, ["train_ddp"], folder=tmp_path / "few")
    assert "train_ddp" in done.exercises and done.added == ("setup_ddp",)
    files = files_of(tmp_path / "few")
    here = Course(tmp_path / "few")
    assert here.names == done.exercises == ("setup_ddp", "train_ddp")
    assert [chapter.name for chapter in here.chapters] == [chapter.name for chapter in course.chapters]
    for part in ("autograder/", "exercises/"):
        for other in set(course.names) - set(done.exercises):
            shape = rf"{part}(.*/)?(test_)?{other}\.(py|md)"
            assert not [path for path in files if re.fullmatch(shape, path)], other
    assert not [path for path in files if "clinic" in path and not path.startswith(("src/", "chapters/"))]
    assert lockstep(tmp_path / "few", "status").returncode == 0


THREE = ["setup_ddp", "train_ddp", "launch_distributed"]
PATHS = re.compile(r"(?<![\w./])(?:exercises|chapters|docs|solutions)/[\w./-]*\w")


def test_a_release_of_three_exercises_is_a_course_of_three_exercises(course, tmp_path):
    release(course, THREE, folder=tmp_path / "three")
    files = files_of(tmp_path / "three")
    assert [path for path in files if path.endswith(".ipynb")] == ["chapters/02_setup.ipynb"]
    assert [path for path in files if "quizzes/" in path] == ["chapters/quizzes/02_setup.toml"]
    assert "chapters/pictures/deal.svg" in files and "chapters/pictures/requeue.svg" not in files
    (chapter,) = outlines(Course(tmp_path / "three"))
    (before,) = (one for one in outlines(course) if one.name == "02_setup")
    assert (chapter.number, chapter.sections, chapter.minutes) == (2, before.sections, before.minutes)
    says = re.findall(r"(?m)^read = .*chapter (\d)", files["autograder/diagnoses.toml"].decode())
    assert set(says) == {"2"}
    readme = files["README.md"].decode()
    assert re.findall(r"(?m)^\| (\d) ", readme) == ["2"]
    assert "Reading takes about 70 minutes, the exercises about 55." in readme
    for gone in ("clinic", "lockstep solution", "lockstep test", "train.sbatch", "194"):
        assert gone not in readme
    status = lockstep(tmp_path / "three", "status")
    assert status.returncode == 0 and "How DDP works inside" not in status.stdout


def test_the_readme_of_any_copy_names_what_is_in_it(course, copy, tmp_path):
    some = [["accumulate", "clinic/short_shard"], ["clinic/short_shard"], ["ring_all_reduce"], ["train"]]
    for number, names in enumerate(some):
        release(course, names, folder=tmp_path / str(number))
    for folder in (copy, *(tmp_path / str(number) for number in range(len(some)))):
        files = files_of(folder)
        readme = files["README.md"].decode()
        assert set(PATHS.findall(readme)) <= {*files, *(path.rpartition("/")[0] for path in files)}
        assert "## Two commands" not in readme and "## Start" in readme, "one of them is the teacher's"
        assert "**To hand in**" in readme
        assert readme.count("```") % 2 == 0 and not re.search(r":\n\n(?!```)", readme)
        named = set(re.findall(r"%(?:check|hint) (\S+) +\./lockstep (?:check|hint) (\S+) ", readme))
        assert len(named) == 1 and {*named.pop()} <= {*Course(folder).names}


@pytest.mark.parametrize(
    ("names", "minutes", "titles"),
    [
        (["train_ddp", "setup_ddp"], (70, 40), {"implement setup_ddp", "implement train_ddp"}),
        (["mini_ddp"], (85, 35), {"implement mini_ddp"}),
        (["preflight"], (80, 75), {"implement preflight"}),
        (["preflight", "clinic/short_shard"], (80, 90), {"implement preflight", "The clinic"}),
        (["exact_resume"], (95, 30), {"implement exact_resume"}),
    ],
    ids=lambda value: "-".join(value).replace("/", "-") if isinstance(value, list) else "",
)
def test_a_chapter_without_the_exercises_of_others(course, names, minutes, titles):
    data = (course.root / "chapters" / f"{course.chapter_of(names[0]).name}.ipynb").read_bytes()
    before, book = json.loads(data)["cells"], json.loads(cut.chapter(data, names))
    text = "\n".join("".join(cell["source"]) for cell in book["cells"])
    assert set(re.findall(r"(?m)^#{2,3} (?:Exercise: |Capstone: )?(implement \w+|The clinic)$", text)) == titles
    assert {name for line in re.findall(r"(?m)^%check (.+)", text) for name in line.split()} == {*names}
    reading, writing = minutes
    assert f"About {reading + writing} minutes: {reading} to read and run, {writing} for the exercises." in text
    assert len(book["cells"]) < len(before) and book["cells"][-1]["source"] == before[-1]["source"]
    lost = "".join("".join(cell["source"]) for cell in before).count("quiz(") - text.count("quiz(")
    assert lost == (names == ["preflight"]), "the clinic has a question"


@pytest.mark.slow
def test_a_group_brings_what_its_exercises_share(course, tmp_path):
    release(course, ["clinic/short_shard"], folder=tmp_path / "clinic")
    shutil.copyfile(course.solutions / "clinic/short_shard.py", tmp_path / "clinic/exercises/clinic/short_shard.py")
    report = json.loads(lockstep(tmp_path / "clinic", "check", "clinic/short_shard", "--json").stdout)
    assert not report["faults"]
    assert [item["name"] for item in report["exercises"]] == ["clinic/short_shard"]


def _notebook(text: str) -> bytes:
    cell = {"cell_type": "code", "outputs": [{"data": {"text/plain": text.splitlines(keepends=True)}}]}
    return json.dumps({"cells": [cell]}).encode()


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("chapters/01_internals.ipynb", _notebook),
        ("autograder/hints/checkpoint.md", lambda text: f"Like this:\n\n{text}".encode()),
        ("chapters/quizzes/01_internals.toml", lambda text: f"why = '''\n{text}'''\n".encode()),
        ("src/lockstep/notes.py", lambda text: "".join(f"# {line}\n" for line in text.splitlines()).encode()),
    ],
    ids=["output", "hint", "quiz", "comment"],
)
def test_a_planted_leak_is_found(course, path, shape):
    text = (course.solutions / "average_gradients.py").read_text(encoding="utf-8")
    files = contents(course, list(course.names))
    assert find_leaks(course, files) == []
    whole = find_leaks(course, files | {path: shape(text)})
    assert f"{path} has the canary of average_gradients" in whole
    lines = find_leaks(course, files | {path: shape(without_markers(text))})
    assert len(lines) == 1 and re.match(
        rf"{re.escape(path)} has \d+ lines of the solution of average_gradients, ", lines[0]
    )


def test_a_leak_refuses_the_release_and_leaves_nothing(course, tmp_path):
    here = tmp_path / "teachers"
    for part in ("autograder", "chapters", "exercises", "solutions", "src"):
        shutil.copytree(course.root / part, here / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("lockstep", "README.md", "pyproject.toml", "requirements.lock", "LICENSE"):
        shutil.copyfile(course.root / name, here / name)
    with (here / "autograder/hints/checkpoint.md").open("a") as hints:
        hints.write((here / "solutions/average_gradients.py").read_text())
    place = tmp_path / "out" / "course"
    with pytest.raises(CourseError, match=r"(?s)nothing was released.*hints/checkpoint.md has the canary of average"):
        release(Course(here), folder=place, gradescope=tmp_path / "out" / "a.zip")
    assert not place.parent.exists()
    shutil.copyfile(course.autograder / "hints/checkpoint.md", here / "autograder/hints/checkpoint.md")
    release(Course(here), folder=place)  # without git, too
    assert (place / "exercises/checkpoint.py").is_file()
    solution = here / "solutions/checkpoint.py"
    solution.write_text(re.sub(r"\n# lockstep-canary.*", "", solution.read_text()))
    with pytest.raises(CourseError, match=r"solutions/checkpoint.py has no canary"):
        release(Course(here), folder=tmp_path / "third")


def test_nothing_is_written_over(course, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    (tmp_path / "a.zip").write_text("keep")
    with pytest.raises(CourseError, match="mine is not empty"):
        release(course, folder=tmp_path / "mine")
    with pytest.raises(CourseError, match=r"a\.zip is there already"):
        release(course, gradescope=tmp_path / "a.zip")
    assert sorted(files_of(tmp_path).values()) == [b"keep", b"keep"]
    with pytest.raises(CourseError, match=r"/proc/nowhere/copy could not be written: No such file"):
        release(course, ["average_gradients"], folder=Path("/proc/nowhere/copy"))


def test_the_template_for_classrooms_has_a_workflow(course, tmp_path):
    release(course, ["average_gradients"], classroom=tmp_path / "template")
    assert "./lockstep check --all" in (tmp_path / "template/.github/workflows/check.yml").read_text()


@pytest.mark.slow
def test_gradescope_from_zip_to_results(course, tmp_path):
    release(course, ["average_gradients", "ring_all_reduce"], gradescope=tmp_path / "autograder.zip")
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
        archive.extractall(tmp_path / "source")
    assert modes["setup.sh"] == modes["run_autograder"] == modes["course/lockstep"] == 0o755
    assert modes["course/README.md"] == 0o644
    handed_in = tmp_path / "submission"
    handed_in.mkdir()
    shutil.copyfile(course.solutions / "average_gradients.py", handed_in / "average_gradients.py")
    (handed_in / "conftest.py").write_text("raise SystemExit(0)\n")
    here = tmp_path / "source" / "course"
    command = [sys.executable, "-m", "lockstep.grading.exports.gradescope"]
    command += ["--submission", str(handed_in), "--results", str(tmp_path / "results.json")]
    done = subprocess.run(command, cwd=here, env={**os.environ, "PYTHONPATH": str(here / "src")}, timeout=180)
    assert done.returncode == 0
    tests = json.loads((tmp_path / "results.json").read_text())["tests"]
    right = [test for test in tests if test["name"].startswith("average_gradients: ")]
    missing = [test for test in tests if test["name"].startswith("ring_all_reduce: ")]
    assert right and all((test["score"], test["status"]) == (1, "passed") for test in right)
    assert missing and all((test["score"], test["status"]) == (0, "failed") for test in missing)
    assert all(test["output"] for test in missing)


def test_gradescope_takes_a_batch_script_too(course, copy, tmp_path):
    handed_in = tmp_path / "submission"
    (handed_in / "exercises").mkdir(parents=True)
    (handed_in / "exercises" / "train.sbatch").write_text("#!/bin/bash\n# mine\n")
    (handed_in / "short_shard.py").write_text("# mine\n")
    (tmp_path / "into").mkdir()
    gradescope.gather(Course(copy), handed_in, tmp_path / "into")
    assert (tmp_path / "into" / "train.sbatch").read_text() == "#!/bin/bash\n# mine\n"
    assert (tmp_path / "into" / "clinic" / "short_shard.py").read_text() == "# mine\n"
    stub = make_stub((course.solutions / "train.py").read_text(), "train")
    assert (tmp_path / "into" / "train.py").read_text() == stub


def test_gradescopes_results_never_count_a_fault_of_ours():
    diagnosis = Diagnosis("some-id", "rank 1 <b>hangs</b>", "a table", (1,), read="chapter 1")
    checks = (
        CheckResult("it sums", "test_a", CheckOutcome.PASSED),
        CheckResult("it waits", "test_b", CheckOutcome.FAILED, diagnosis),
        CheckResult("both", "test_c", CheckOutcome.NOT_RUN, reason="needs “it waits”"),
    )
    report = Report(7, (ExerciseResult("ring", checks, 1.6),))
    data = gradescope.results(report)
    assert [(test["name"], test["score"], test["max_score"]) for test in data["tests"]] == [
        ("ring: it sums", 1, 1),
        ("ring: it waits", 0, 1),
        ("ring: both", 0, 1),
    ]
    assert data["execution_time"] == 2 and "7" in data["output"]
    assert data["tests"][1]["output"] == "rank 1 <b>hangs</b>\n\na table\n\nRead chapter 1."
    assert {test["output_format"] for test in data["tests"]} == {"text"}
    with pytest.raises(ValueError, match="does not count"):
        gradescope.results(replace(report, faults=("boom",)))


def test_a_batch_scripts_lines_are_looked_for_too(course):
    files = contents(course, list(course.names))
    script = without_markers((course.solutions / "train.sbatch").read_text(encoding="utf-8"))
    found = find_leaks(course, files | {"chapters/preempted.py": script.encode()})
    assert len(found) == 1 and found[0].startswith("chapters/preempted.py has ") and "solution of train" in found[0]
