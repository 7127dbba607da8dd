"""The file in which a chapter's questions lie: `chapters/quizzes/<chapter>.toml`.

    [set_epoch]
    question = "Why …?"

    [[set_epoch.choices]]
    text = "Because …"
    right = true
    because = "Shown whichever way the learner chose: why this is so, or why it is not."

That is how authors write it. `seal` turns it into what the course ships: `right` becomes a salted hash, `because` is
packed, and nobody reads an answer by opening the file. It keeps nobody out who wants in; the answers are not graded.

    python -m lockstep.notebook.quizfile seal chapters/quizzes/02_setup.toml
    python -m lockstep.notebook.quizfile open chapters/quizzes/02_setup.toml      to edit it again
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


@dataclass(frozen=True)
class Choice:
    """One answer to choose, sealed or open (see the module's docstring)."""

    text: str
    is_right: bool
    because: str


@dataclass(frozen=True)
class Question:
    """A question and its choices. `key` is `<chapter>/<name>`."""

    key: str
    text: str
    choices: tuple[Choice, ...]


class QuizError(Exception):
    """A question that does not exist, or cannot be asked. The message says what to do."""


def read(file: Path) -> dict[str, Question]:
    """All questions of a chapter by their names. Raises QuizError when the file or a question cannot be used."""
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuizError(f"there is no {file.name} in {file.parent}") from None
    except tomllib.TOMLDecodeError as error:
        raise QuizError(f"{file.name} cannot be read: {error}") from None
    return {name: _question(f"{file.stem}/{name}", item) for name, item in raw.items()}


def seal(questions: dict[str, Question]) -> str:
    """The text of a sealed file."""
    return _write(questions, sealed=True)


def unseal(questions: dict[str, Question]) -> str:
    """The text of an open file, for authors."""
    return _write(questions, sealed=False)


def rich(text: str) -> str:
    """A question's text as HTML; `code` between backticks."""
    parts = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _question(key: str, item: dict[str, Any]) -> Question:
    choices = tuple(_choice(key, one) for one in item.get("choices", ()))
    if sum(choice.is_right for choice in choices) != 1 or len(choices) < 2:
        raise QuizError(f"{key} needs two choices or more, of which exactly one is right")
    if not all(choice.because for choice in choices):
        raise QuizError(f"{key}: every choice needs its explanation")
    return Question(key, item["question"].strip(), choices)


def _choice(key: str, item: dict[str, Any]) -> Choice:
    text = item["text"].strip()
    if "mark" not in item:
        return Choice(text, bool(item.get("right", False)), item.get("because", "").strip())
    salt, _, digest = item["mark"].partition(":")
    known = {_digest(salt, key, text, is_right): is_right for is_right in (True, False)}
    if digest not in known:
        raise QuizError(f"{key}: the choice {text!r} was changed after it was sealed. Open the file, edit it, seal it.")
    packed = "".join(item["packed"].split())
    return Choice(text, known[digest], zlib.decompress(base64.b85decode(packed)).decode())


def _digest(salt: str, key: str, text: str, is_right: bool) -> str:
    return hashlib.sha256(f"{salt}|{key}|{text}|{is_right}".encode()).hexdigest()[:24]


def _write(questions: dict[str, Question], sealed: bool) -> str:
    lines: list[str] = []
    for question in questions.values():
        name = question.key.partition("/")[2]
        lines += [f"[{name}]", f"question = {_quoted(question.text)}", ""]
        for choice in question.choices:
            lines += [f"[[{name}.choices]]", f"text = {_quoted(choice.text)}"]
            if sealed:
                # From the words, so that sealing again changes nothing but what was edited.
                salt = hashlib.sha256(f"{question.key}|{choice.text}|{choice.because}".encode()).hexdigest()[:8]
                packed = base64.b85encode(zlib.compress(choice.because.encode(), 9)).decode()
                lines += [
                    f'mark = "{salt}:{_digest(salt, question.key, choice.text, choice.is_right)}"',
                    f"packed = '{packed}'" if "'" not in packed else f"packed = {_quoted(packed)}",
                    "",
                ]
            else:
                lines += ["right = true"] if choice.is_right else []
                lines += [f"because = {_quoted(choice.because)}", ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are all TOML's too."""
    return json.dumps(text, ensure_ascii=False)


def main(arguments: list[str]) -> int:
    """`seal FILE …` or `open FILE …`."""
    if len(arguments) < 2 or arguments[0] not in ("seal", "open"):
        print(__doc__)
        return 2
    for name in arguments[1:]:
        file = Path(name)
        questions = read(file)
        file.write_text(seal(questions) if arguments[0] == "seal" else unseal(questions), encoding="utf-8")
        print(f"{file}: {len(questions)} questions")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (QuizError, OSError) as error:
        sys.exit(f"quizfile: {error}")
