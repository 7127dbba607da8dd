"""`quiz("02_setup/set_epoch")`: one multiple-choice question in a cell.

It is a box of plain ipywidgets, so that it works with the keyboard and takes JupyterLab's colours, light or dark.
Without a kernel (the next day, GitHub, a page made by nbconvert), its stored form shows the question as text. Feedback
goes into an HTML widget, never an output area, which nbval would compare.
"""

from __future__ import annotations

from typing import Any

from ipywidgets import HTML, Button, Layout, RadioButtons

from ..course import find, progress
from ..course.quizzes import Question, QuizError, quiz_file, read, rich
from .stored import Stored

STYLE = """<style>
.lockstep-quiz { border-left: 3px solid var(--jp-brand-color1, #1976d2); padding: 4px 12px; max-width: 46em }
.lockstep-quiz .widget-html-content, .lockstep-quiz label { line-height: 1.5; white-space: normal; height: auto;
  color: var(--jp-content-font-color1, inherit); font-size: var(--jp-content-font-size1, 14px) }
.lockstep-quiz .widget-radio-box label { display: flex; flex-direction: row-reverse; justify-content: flex-end;
  align-items: center; gap: 8px; margin: 3px 0 }
.lockstep-quiz .widget-radio-box label input { position: static; margin: 0; flex: none; align-self: center }
.lockstep-quiz .lockstep-right { border-left: 3px solid var(--jp-success-color1, #388e3c); padding-left: 8px }
.lockstep-quiz .lockstep-wrong { border-left: 3px solid var(--jp-warn-color1, #f57c00); padding-left: 8px }
</style>"""


class Quiz(Stored):
    """The question as a widget. Its repr says only which question it is, so that outputs can be compared."""

    def __init__(self, question: Question) -> None:
        self.question, self.key = question, question.key
        self._choices = RadioButtons(
            options=[(choice.text, index) for index, choice in enumerate(question.choices)],
            value=None,
            layout=Layout(width="auto"),
        )
        self._button = Button(description="Check", disabled=True, tooltip="Check this answer")
        self._feedback = HTML()
        super().__init__([HTML(STYLE + f"<b>{rich(question.text)}</b>"), self._choices, self._button, self._feedback])
        self.add_class("lockstep-quiz")
        self._choices.observe(self._on_choice, names="value")
        self._button.on_click(self._on_check)
        if progress.load().quizzes.get(question.key) == progress.RIGHT:
            self._feedback.value = "You have answered this one before."

    def __repr__(self) -> str:
        return f"Quiz({self.question.key})"

    def stored_html(self) -> str:
        """The question without its answer."""
        choices = "".join(f"<li>{rich(choice.text)}</li>" for choice in self.question.choices)
        again = "Run this cell (Shift+Enter) to answer."
        return (
            f'<div class="ls-card"><p><b>Question.</b> {rich(self.question.text)}</p><ul>{choices}</ul>'
            f'<p class="ls-soft">{again}</p></div>'
        )

    def stored_markdown(self) -> str:
        """The same, folded."""
        return as_text(self.question)

    def _on_choice(self, _: Any) -> None:
        self._button.disabled = self._choices.value is None
        self._feedback.value = ""

    def _on_check(self, _: Any) -> None:
        if self._choices.value is None:
            return
        choice = self.question.choices[self._choices.value]
        verdict, style = ("Right.", "lockstep-right") if choice.right else ("Not so.", "lockstep-wrong")
        # role=status: a screen reader reads the feedback out without the focus leaving the button
        self._feedback.value = f'<div role="status" class="{style}"><b>{verdict}</b> {rich(choice.why)}</div>'
        with progress.change() as known:
            if known.quizzes.get(self.question.key) != progress.RIGHT:
                known.quizzes[self.question.key] = progress.RIGHT if choice.right else progress.WRONG


def quiz(key: str) -> Quiz:
    """The question `<chapter>/<name>`, as the value of a cell. Raises QuizError, which names what there is instead."""
    chapter, _, name = key.partition("/")
    questions = read(quiz_file(find().root, chapter))
    if name not in questions:
        raise QuizError(f"there is no question {key!r}. There are: {', '.join(one.key for one in questions.values())}")
    return Quiz(questions[name])


def as_text(question: Question) -> str:
    """The question in Markdown, folded, without its answer."""
    choices = "\n".join(f"<li>{rich(choice.text)}</li>" for choice in question.choices)
    return (f"<details><summary><b>Question.</b> {rich(question.text)}</summary>\n<ul>\n{choices}\n</ul>\n"
            "Run this cell in JupyterLab to answer it.\n</details>")  # fmt: skip


__all__ = ["Quiz", "QuizError", "as_text", "quiz"]
