"""The file with a chapter's questions: `chapters/quizzes/<chapter>.toml`.

    [set_epoch]
    question = "Why …?"

    [[set_epoch.choices]]
    text = "Because …"
    right = true
    why = "Shown to whoever chose this: why it is right, or why it is not."

Line breaks in a text count as spaces.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from .toml import CourseError, read_toml


@dataclass(frozen=True)
class Choice:
    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    """A question and its choices. `key` is `<chapter>/<name>`."""

    key: str
    text: str
    choices: tuple[Choice, ...]


class QuizError(CourseError):
    """A question that does not exist, or cannot be asked. The message says what to do."""


@dataclass(frozen=True)
class _Item:
    question: str
    choices: tuple[Choice, ...] = ()


def quiz_file(root: Path, chapter: str) -> Path:
    """Where the questions of a chapter are."""
    return root / "chapters" / "quizzes" / f"{chapter}.toml"


def read(file: Path) -> dict[str, Question]:
    """All questions of a chapter by their names. Raises CourseError when the file or a question cannot be used."""
    items = read_toml(file, dict[str, _Item])
    return {name: _question(f"{file.stem}/{name}", item) for name, item in items.items()}


def rich(text: str) -> str:
    """A question's text as HTML; `code` between backticks."""
    parts = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _question(key: str, item: _Item) -> Question:
    choices = tuple(Choice(_line(one.text), _line(one.why), one.right) for one in item.choices)
    if sum(choice.right for choice in choices) != 1 or len(choices) < 2:
        raise QuizError(f"{key} needs two choices or more, exactly one of them right")
    if not all(choice.why for choice in choices):
        raise QuizError(f"{key}: every choice needs its explanation (why)")
    return Question(key, _line(item.question), choices)


def _line(text: str) -> str:
    return " ".join(text.split())
