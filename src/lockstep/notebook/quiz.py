"""`quiz("02_setup/set_epoch")`: one multiple-choice question in a cell.

It is a box of plain ipywidgets, so that it works with the keyboard and takes JupyterLab's colors, light or dark.
Without a kernel (the next day, GitHub, a page made by nbconvert), its stored form shows the question as text. Feedback
goes into an HTML widget, never an output area, which nbval would compare.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from ipywidgets import HTML, Button, Layout, RadioButtons

from ..course import find, progress
from ..course.quizzes import Choice, Question, QuizError, quiz_file, read, rich
from .stored import Stored, is_handed_out

STYLE = """<style>
.lockstep-quiz { border-left: 3px solid var(--jp-brand-color1, #1976d2); padding: 4px 12px; max-width: 46em }
.lockstep-quiz .widget-html-content, .lockstep-quiz label { line-height: 1.5; white-space: normal; height: auto;
  color: var(--jp-content-font-color1, inherit); font-size: var(--jp-content-font-size1, 14px) }
.lockstep-quiz .widget-radio-box label { display: flex; flex-direction: row-reverse; justify-content: flex-end;
  align-items: center; gap: 8px; margin: 1px 0; padding: 3px 8px; border: 1px solid transparent; border-radius: 6px }
.lockstep-quiz .widget-radio-box label input { position: static; margin: 0; flex: none; align-self: center }
.lockstep-quiz label code { font-family: var(--jp-code-font-family, monospace); font-size: .93em; padding: 1px 5px;
  background: var(--jp-layout-color2, transparent) }
.lockstep-quiz { --of: var(--jp-success-color1, #388e3c) }
.lockstep-quiz.lockstep-chose-wrong { --of: var(--jp-error-color1, #d32f2f) }
.lockstep-quiz:is(.lockstep-chose-right, .lockstep-chose-wrong) label:has(:checked) {
  border-color: var(--of); background: color-mix(in srgb, var(--of) 12%, transparent) }
.lockstep-quiz:is(.lockstep-chose-right, .lockstep-chose-wrong) label:has(:checked)::before {
  content: "✓"; margin-left: 8px; font-weight: 700 }
.lockstep-quiz.lockstep-chose-wrong label:has(:checked)::before { content: "✗" }
.lockstep-quiz :is(.lockstep-right, .lockstep-wrong) {
  border-left: 3px solid var(--of); padding-left: 10px; margin-top: 4px }
.lockstep-quiz .lockstep-count { opacity: .75; font-size: .93em }
</style>"""

GROUP = """
window.lockstepQuiz ??= (window.addEventListener("keydown", ({ key, target, shiftKey, ctrlKey }) =>
  target.matches?.(".lockstep-quiz input, .lockstep-quiz button") &&
  target.toggleAttribute("data-lm-suppress-shortcuts",
    !shiftKey && !ctrlKey && /^(Arrow|Enter| )/.test(key)), true), true);
const name = "quiz-" + Math.random();
let left = 200;
const soon = setInterval(() => {
  const quiz = this.closest(".lockstep-quiz"), box = quiz?.querySelector(".widget-radio-box");
  const told = quiz?.querySelector(".lockstep-feedback .widget-html-content");
  if (box && told) {
    const shown = JSON.parse(quiz.querySelector(".lockstep-question").dataset.choices);
    const group = () => { box.querySelectorAll("label:has(input)").forEach((label, index) => {
      label.querySelector("input").name = name;
      const plain = [...label.childNodes].find((one) => one.nodeType === Node.TEXT_NODE);
      if (!plain || shown[index] === undefined) return;
      const rich = document.createElement("span");
      rich.innerHTML = shown[index];
      plain.replaceWith(rich);
    }) };
    group();
    new MutationObserver(group).observe(box, { childList: true, subtree: true });
    box.setAttribute("role", "radiogroup");
    box.setAttribute("aria-label", quiz.querySelector(".lockstep-question").textContent);
    told.setAttribute("role", "status");
  }
  if (box && told || !--left) clearInterval(soon);
}, 50);
"""
"""What ipywidgets' radio buttons lack, because they have no name: one group, in which arrow keys choose, and feedback
that is read out while the focus stays on the button. JupyterLab would take these keys for itself (the next cell, edit
mode), so they are marked as not its own. The script runs when the question appears, perhaps before the rest of the box
does; ipywidgets may make the choices again, so those get the name as well. ipywidgets' labels are plain text; the
script sets their code as code.
"""


class Quiz(Stored):
    """The question as a widget. Its repr says only which question it is, so that outputs can be compared."""

    def __init__(self, question: Question) -> None:
        self.question, self.key = question, question.key
        self._choices = RadioButtons(
            options=[(choice.text.replace("`", ""), index) for index, choice in enumerate(question.choices)],
            value=None,
            layout=Layout(width="auto"),
        )
        self._button = Button(description="Check", disabled=True, tooltip="Choose an answer first")
        self._feedback = HTML()
        self._feedback.add_class("lockstep-feedback")
        labels = escape(json.dumps([rich(choice.text) for choice in question.choices]))
        asked = (
            f'<b class="lockstep-question" data-choices="{labels}">{rich(question.text)}</b>'
            f'<img hidden src="data:," onerror="{escape(GROUP)}">'
        )
        super().__init__([HTML(STYLE + asked), self._choices, self._button, self._feedback])
        self.add_class("lockstep-quiz")
        self._choices.observe(self._on_choice, names="value")
        self._button.on_click(self._on_check)
        self._told: Choice | None = None
        known = progress.Progress() if is_handed_out() else progress.load()
        if known.quizzes.get(question.key) == progress.RIGHT:
            self._choices.value = next(index for index, choice in enumerate(question.choices) if choice.right)
            self._tell(known)

    def __repr__(self) -> str:
        return f"Quiz({self.question.key})"

    def stored_html(self) -> str:
        """The question, without its answer until the learner has given one: then with that and what was said of it."""
        told, choices = self._told, ""
        for choice in self.question.choices:
            text = rich(choice.text)
            choices += f"<li>{f'<b>{text}</b> (your answer)' if choice is told else text}</li>"
        said = f"<p>{_verdict(told)}</p>" if told else ""
        again = "" if told and told.right else '<p class="ls-soft">Run this cell (Shift+Enter) to answer.</p>'
        return (
            f'<div class="ls-card"><p><b>Question.</b> {rich(self.question.text)}</p><ul>{choices}</ul>'
            f"{said}{again}</div>"
        )

    def stored_markdown(self) -> str:
        """The question folded, without its answer."""
        choices = "\n".join(f"<li>{rich(choice.text)}</li>" for choice in self.question.choices)
        return (f"<details><summary><b>Question.</b> {rich(self.question.text)}</summary>\n<ul>\n{choices}\n</ul>\n"
                "Run this cell in JupyterLab to answer it.\n</details>")  # fmt: skip

    def _on_choice(self, _: Any) -> None:
        chosen = self._choices.value is not None
        self._button.disabled, self._button.button_style = not chosen, "primary" if chosen else ""
        self._button.tooltip = "Check this answer" if chosen else "Choose an answer first"
        self._feedback.value = ""
        self._color("")

    def _color(self, verdict: str) -> None:
        """Mark the choice as right or wrong; with "" as neither."""
        for one in ("right", "wrong"):
            (self.add_class if one == verdict else self.remove_class)(f"lockstep-chose-{one}")

    def _on_check(self, _: Any) -> None:
        if self._choices.value is None:
            return
        with progress.change() as known:
            if known.quizzes.get(self.question.key) != progress.RIGHT:
                right = self.question.choices[self._choices.value].right
                known.quizzes[self.question.key] = progress.RIGHT if right else progress.WRONG
        self._tell(known)

    def _tell(self, known: progress.Progress) -> None:
        """Say whether the choice is right, and why."""
        self._told = choice = self.question.choices[self._choices.value]
        style = "right" if choice.right else "wrong"
        self._color(style)
        self._button.button_style = ""  # what was asked is answered
        said = f'{_verdict(choice)}<div class="lockstep-count">{self._count(known)}</div>'
        self._feedback.value = f'<div class="lockstep-{style}">{said}</div>'
        self.update_stored()

    def _count(self, known: progress.Progress) -> str:
        """How far the reader is with this chapter's questions."""
        chapter = self.question.key.partition("/")[0]
        keys = [one.key for one in read(quiz_file(find().root, chapter)).values()]
        right = sum(known.quizzes.get(key) == progress.RIGHT for key in keys)
        return f"{right} of this chapter's {len(keys)} questions answered correctly"


def _verdict(choice: Choice) -> str:
    return f"<b>{'Right.' if choice.right else 'Not quite.'}</b> {rich(choice.why)}"


def quiz(key: str) -> Quiz:
    """The question `<chapter>/<name>`, as the value of a cell. Raises QuizError, which names what there is instead."""
    chapter, _, name = key.partition("/")
    questions = read(quiz_file(find().root, chapter))
    if name not in questions:
        raise QuizError(f"there is no question {key!r}. There are: {', '.join(one.key for one in questions.values())}")
    return Quiz(questions[name])
