"""The questions of the chapters, and the box that asks them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lockstep.authoring import chapters
from lockstep.grading import progress
from lockstep.notebook import quizfile
from lockstep.notebook.quiz import Quiz, quiz

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "chapters" / "quizzes").glob("*.toml"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's copy of the course, so that answers land there."""
    (tmp_path / "autograder").mkdir()
    shutil.copy(ROOT / "autograder" / "course.toml", tmp_path / "autograder")
    shutil.copytree(ROOT / "chapters" / "quizzes", tmp_path / "chapters" / "quizzes")
    monkeypatch.setenv("LOCKSTEP_COURSE", str(tmp_path))
    return tmp_path


def answer(box: Quiz, right: bool) -> str:
    """Choose a right or a wrong answer, press the button, return the feedback."""
    number = next(i for i, choice in enumerate(box.question.choices) if choice.is_right == right)
    box._choices.value = number
    box._button.click()
    return box._feedback.value


@each_file
def test_each_chapter_asks_every_question_once(file: Path) -> None:
    asked = re.findall(r'^quiz\("(.+)"\)', chapters.source_path(file.stem).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(asked) == sorted(question.key for question in quizfile.read(file).values())


@each_file
def test_the_file_gives_no_answer_away(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"^(right|because) =", text, re.MULTILINE), "seal it: see quizfile.py"
    for question in quizfile.read(file).values():
        for choice in question.choices:
            assert choice.because not in text


@each_file
def test_the_notebook_gives_no_answer_away(file: Path) -> None:
    text = chapters.notebook_path(file.stem).read_text(encoding="utf-8")
    for question in quizfile.read(file).values():
        assert f"Quiz({question.key})" in text
        assert not any(json.dumps(choice.because)[1:-1] in text for choice in question.choices)


@each_file
def test_the_right_answer_is_not_always_in_the_same_place(file: Path) -> None:
    places = [[choice.is_right for choice in question.choices].index(True) for question in quizfile.read(file).values()]
    assert len(set(places)) > 1


@each_file
def test_sealing_and_opening_lose_nothing(file: Path, tmp_path: Path) -> None:
    before = quizfile.read(file)
    other = tmp_path / file.name
    other.write_text(quizfile.unseal(before))
    assert quizfile.read(other) == before
    other.write_text(quizfile.seal(before))
    assert quizfile.read(other) == before
    assert other.read_text() == file.read_text(), "sealing again changed what nobody had edited"


def test_a_choice_changed_after_sealing_is_refused(course: Path) -> None:
    file = course / "chapters" / "quizzes" / "02_setup.toml"
    file.write_text(file.read_text().replace('text = "GPU 5"', 'text = "GPU 6"'))
    with pytest.raises(quizfile.QuizError, match=r"02_setup/local_rank.*'GPU 6' was changed after it was sealed"):
        quiz("02_setup/local_rank")


def test_an_unknown_question_names_the_known_ones(course: Path) -> None:
    with pytest.raises(quizfile.QuizError, match=r"no question '02_setup/nope'.*02_setup/set_epoch"):
        quiz("02_setup/nope")


def test_every_choice_is_explained_and_a_right_answer_is_remembered(course: Path) -> None:
    box = quiz("02_setup/set_epoch")
    assert box._button.disabled
    assert "Not so." in answer(box, right=False)
    assert progress.load()["quizzes"] == {"02_setup/set_epoch": "wrong"}
    feedback = answer(box, right=True)
    assert "Right." in feedback and "seed + epoch" in feedback
    assert "Not so." in answer(box, right=False)
    assert progress.load()["quizzes"] == {"02_setup/set_epoch": "right"}, "once right stays right"
    assert "answered this one before" in quiz("02_setup/set_epoch")._feedback.value


def test_the_output_is_the_same_whatever_was_answered(course: Path) -> None:
    def shown() -> dict[str, str]:
        bundle = quiz("02_setup/set_epoch")._repr_mimebundle_()
        return {kind: bundle[kind] for kind in ("text/plain", "text/markdown")}

    before = shown()
    assert before["text/plain"] == "Quiz(02_setup/set_epoch)"
    assert before["text/markdown"].startswith("<details>") and "set_epoch" in before["text/markdown"]
    answer(quiz("02_setup/set_epoch"), right=True)
    assert shown() == before
