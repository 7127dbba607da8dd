"""The questions of the chapters, and the box that asks them."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from lockstep.authoring import chapters
from lockstep.course import CourseError, progress, quizzes
from lockstep.notebook import stored as stored_as
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
    number = next(i for i, choice in enumerate(box.question.choices) if choice.right == right)
    box._choices.value = number
    box._button.click()
    return box._feedback.value


@each_file
def test_each_chapter_asks_every_question_once(file: Path) -> None:
    asked = re.findall(r'^quiz\("(.+)"\)', chapters.source_path(file.stem).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(asked) == sorted(question.key for question in quizzes.read(file).values())


@each_file
def test_the_file_asks_learners_not_to_read_on(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and "answers" in first and "do not read on" in first


@each_file
def test_the_notebook_gives_no_answer_away(file: Path) -> None:
    text = chapters.notebook_path(file.stem).read_text(encoding="utf-8")
    for question in quizzes.read(file).values():
        assert f"Quiz({question.key})" in text
        assert not any(json.dumps(choice.why)[1:-1] in text for choice in question.choices)


@each_file
def test_the_right_answer_is_not_always_in_the_same_place(file: Path) -> None:
    places = [[choice.right for choice in question.choices].index(True) for question in quizzes.read(file).values()]
    assert len(set(places)) > 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("right = true", "right = false", "needs two choices or more, exactly one of them right"),
        ('why = "A sum', 'because = "A sum', r"missing required field `why` - at `\$\[...\].choices\[0\]`"),
        ('why = "A sum of sums is a sum."', 'why = " "', "every choice needs its explanation"),
        ("[one]", "[one", "cannot be read: "),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(course: Path, old: str, new: str, said: str) -> None:
    file = course / "chapters" / "quizzes" / "02_setup.toml"
    text = """[one]
question = "Which?"
choices = [
    { text = "This", right = true, why = "A sum of sums is a sum." },
    { text = "That", why = "A mean of means is none." },
]
"""
    file.write_text(text)
    assert [choice.right for choice in quizzes.read(file)["one"].choices] == [True, False]
    file.write_text(text.replace(old, new))
    with pytest.raises(CourseError, match=said):
        quiz("02_setup/one")


def test_an_unknown_question_names_the_known_ones(course: Path) -> None:
    with pytest.raises(quizzes.QuizError, match=r"no question '02_setup/nope'.*02_setup/set_epoch"):
        quiz("02_setup/nope")


def test_every_choice_is_explained_and_a_right_answer_is_remembered(course: Path) -> None:
    box = quiz("02_setup/set_epoch")
    assert box._button.disabled
    of = len(quizzes.read(course / "chapters" / "quizzes" / "02_setup.toml"))
    said = answer(box, right=False)
    assert "Not quite." in said and f"0 of this chapter's {of} questions answered correctly" in said
    assert progress.load().quizzes == {"02_setup/set_epoch": "wrong"}
    feedback = answer(box, right=True)
    assert f"1 of this chapter's {of} questions answered correctly" in feedback
    assert "Right." in feedback and "seed + epoch" in feedback
    assert "Not quite." in answer(box, right=False)
    assert progress.load().quizzes == {"02_setup/set_epoch": "right"}, "once right stays right"
    again = quiz("02_setup/set_epoch")
    assert again._feedback.value == feedback and "lockstep-chose-right" in again._dom_classes
    assert again.question.choices[again._choices.value].right
    assert "Not quite." in answer(again, right=False)


def test_what_is_stored_says_what_was_answered(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before an answer, and nothing in the chapters that everybody gets."""
    box = quiz("02_setup/set_epoch")
    whys = [html.unescape(quizzes.rich(choice.why)) for choice in box.question.choices]
    assert "your answer" not in box.stored_html() and not any(why in html.unescape(box.stored_html()) for why in whys)
    answer(box, right=False)
    assert "Not quite." in box.stored_html() and "Run this cell" in box.stored_html()
    answer(box, right=True)
    for one in (box, quiz("02_setup/set_epoch")):
        stored = one.stored_html()
        assert stored.count("(your answer)") == 1 and "Right." in stored and "Run this cell" not in stored
        assert "your answer" not in one.stored_markdown()
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", chapters.reference_environment(ROOT)["LOCKSTEP_SUBMISSION"])
    assert "your answer" not in quiz("02_setup/set_epoch").stored_html()


def test_a_choice_shows_no_markup(course: Path) -> None:
    """The label of a radio button is plain text."""
    box = quiz("01_internals/collectives")
    assert "`" in "".join(choice.text for choice in box.question.choices)
    assert "`" not in "".join(label for label, _ in box._choices.options)


def test_a_choice_has_its_code_for_the_script_that_shows_it(course: Path) -> None:
    box = quiz("01_internals/collectives")
    asked = BeautifulSoup(box.children[0].value, "html.parser").select_one(".lockstep-question")
    assert asked is not None and "<code>" not in asked.get_text()
    labels = json.loads(str(asked["data-choices"]))
    assert labels == [quizzes.rich(choice.text) for choice in box.question.choices]
    assert labels[0] == "<code>broadcast</code> with <code>src=0</code>"


def test_the_output_of_a_chapter_is_the_same_whatever_was_answered(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", chapters.reference_environment(ROOT)["LOCKSTEP_SUBMISSION"])

    def shown() -> dict[str, str]:
        bundle = quiz("02_setup/set_epoch")._repr_mimebundle_()
        return {kind: bundle[kind] for kind in ("text/plain", "text/markdown", "text/html")}

    before = shown()
    assert before["text/plain"] == "Quiz(02_setup/set_epoch)"
    assert before["text/markdown"].startswith("<details>") and "set_epoch" in before["text/markdown"]
    answer(quiz("02_setup/set_epoch"), right=True)
    assert shown() == before


def test_the_widget_and_its_stored_form_are_two_outputs(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No front end falls back to another form of an output whose widget is gone. The stored one gives no answer away."""
    outputs: list[dict[str, str]] = []
    monkeypatch.setattr("lockstep.notebook.stored.display", lambda data, raw, display_id=False: outputs.append(data))
    box = quiz("02_setup/set_epoch")
    box._ipython_display_()
    live, stored = outputs
    assert list(live) == [stored_as.WIDGET] and sorted(stored) == ["text/html", "text/markdown", "text/plain"]
    assert all(
        choice.text in html.unescape(re.sub("<[^>]+>|`", "", stored["text/html"]))
        for choice in box.question.choices
        if "`" not in choice.text
    )
    assert not any(choice.why in stored["text/html"] for choice in box.question.choices)
    assert (
        "lockstep-live-02_setup-set_epoch" in box._dom_classes
        and ".lockstep-live-02_setup-set_epoch" in stored["text/html"]
    )
