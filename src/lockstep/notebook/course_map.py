"""`course_map("02_setup")`: where you stand in the course, and the box that says that a chapter is complete.

Its stored HTML is the map as it was when the cell ran; its stored text and Markdown, which are compared, are the same
for every learner.
"""

from __future__ import annotations

import html
import os
from typing import Any

from ipywidgets import Button, Checkbox, HBox, Layout, Output

from ..course import Course, CourseError, progress
from ..course import course as courses
from ..course.outline import Outline, Section
from ..course.standing import ChapterStanding, CourseStanding, Standing, mark, standing
from ..ranks.cards import said
from .stored import Stored

FEW = 3
"""The most exercises of a section that are linked; the clinic's cases are too many for a line."""
STYLE = """<style>
.ls-map > p { margin: 2px 0 8px; font-weight: 600 }
.lockstep-said .ls-map ol { list-style: none; margin: 0; padding: 0 }
.lockstep-said .ls-map ol ol { margin: 2px 0 8px 46px }
.ls-map summary { display: flex; flex-wrap: wrap; align-items: center; gap: 0 10px }
.lockstep-said .ls-map summary { color: inherit }
.ls-map summary::before { content: "▸"; width: 12px } .ls-map details[open] > summary::before { content: "▾" }
.ls-map summary::-webkit-details-marker { display: none }
.ls-map .ls-number { width: 22px; height: 22px; margin: 2px 0; line-height: 20px; text-align: center;
  border: 1px solid var(--ls-link); border-radius: 50% }
.ls-map .ls-complete { background: var(--ls-link); color: var(--jp-layout-color0, #fff) }
.ls-map progress { width: 90px; height: 8px; accent-color: var(--ls-link) }
.ls-map small { color: var(--ls-soft); margin-left: 8px } .ls-map summary small { margin: 0 }
.ls-map .ls-state { display: inline-block; width: 1.4em }
</style>"""


class CourseMap(Stored):
    """The map, unfolded at one chapter; without one, where the learner is. Its repr says only which chapter that is."""

    key = "map"

    def __init__(self, chapter: str = "") -> None:
        self.course = courses.find()
        self.chapter = chapter
        self._map = Output()  # JupyterLab opens the links of an output in itself, and those of an HTML widget elsewhere
        self._refresh = Button(description="Refresh", tooltip="Show what has been done since")
        self._complete = Checkbox(
            description="Mark this chapter as complete", indent=False, layout=Layout(width="auto")
        )
        super().__init__([self._map, HBox([self._complete, self._refresh] if chapter else [self._refresh])])
        self.show()
        self._complete.observe(self._on_complete, names="value")
        self._refresh.on_click(self.show)

    def __repr__(self) -> str:
        return f"CourseMap({self.chapter})"

    def stored_html(self) -> str:
        """The map of now; in the chapters as they are handed out, the map before anything is done."""
        known = progress.Progress() if os.environ.get("LOCKSTEP_SUBMISSION") else None
        return (
            self._drawn(standing(self.course, known))
            + '<p class="ls-soft">Run this cell to bring the map up to date.</p>'
        )

    def stored_markdown(self) -> str:
        """The chapters."""
        return "\n".join(f"{number}. {one.title}" for number, one in enumerate(self.course.chapters, 1))

    def show(self, *_: Any) -> None:
        """Draw the map as it is now."""
        now = standing(self.course)
        self._complete.value = any(one.complete for one in now.chapters if one.outline.name == self.chapter)
        self.html = self._drawn(now)
        shown = {"text/html": said(self.html), "text/plain": repr(self)}
        self._map.outputs = ({"output_type": "display_data", "data": shown, "metadata": {}},)

    def _drawn(self, now: CourseStanding) -> str:
        return as_html(self.course, now, self.chapter or (now.here[0] if now.here else ""))

    def _on_complete(self, change: Any) -> None:
        mark(self.course, self.chapter, bool(change["new"]))
        self.show()


def course_map(chapter: str = "") -> CourseMap:
    """The map as the value of a cell. Raises CourseError for a chapter that does not exist."""
    names = [one.name for one in courses.find().chapters]
    if chapter and chapter not in names:
        raise CourseError(f"there is no chapter {chapter!r}. There are: {', '.join(names)}")
    return CourseMap(chapter)


def as_html(course: Course, now: CourseStanding, unfolded: str) -> str:
    """Where to go on, and the chapters with what is done in each; the links are as seen from the current folder."""
    onward = ""
    if now.upcoming is not None:
        chapter, section = now.upcoming
        words = f"{'Continue' if now.here else 'Begin'}: chapter {chapter.number}, “{section.plain}”"
        onward = f"<p>{_link(chapter, section, words)}</p>"
    chapters = "".join(_chapter(course, one, now, one.outline.name == unfolded) for one in now.chapters)
    return f'{STYLE}<div class="ls-map">{onward}<ol>{chapters}</ol></div>'


def _chapter(course: Course, one: ChapterStanding, now: CourseStanding, unfolded: bool) -> str:
    kind = "ls-number ls-complete" if one.complete else "ls-number"
    done, of = one.answered + one.passed, one.questions + one.exercises
    counts = f"questions {one.answered} of {one.questions} · exercises {one.passed} of {one.exercises}"
    complete = " · complete" if one.complete else ""
    here = now.here is not None and now.here[0] == one.outline.name
    sections = "".join(
        _section(course, one.outline, part, now.here == (one.outline.name, part.section.title)) for part in one.sections
    )
    return (
        f'<li><details{" open" if unfolded else ""}><summary><span class="{kind}">{one.outline.number}</span>'
        f"<span>{html.escape(one.outline.title)}</span>"
        f'<progress value="{done}" max="{max(of, 1)}" aria-label="done in this chapter: {done} of {of}"></progress>'
        f"<small>{counts}{complete}{' · you are here' if here and not unfolded else ''}</small></summary>"
        f"<ol>{sections}</ol></details></li>"
    )


def _section(course: Course, chapter: Outline, part: Standing, here: bool) -> str:
    state = "✓" if part.is_done else "◐" if part.done else "○" if part.of else ""
    title = _link(chapter, part.section, part.section.plain)
    notes = [f"{part.done} of {part.of}"] if part.of > 1 else []
    if len(part.section.exercises) <= FEW:
        files = (course.exercises / f"{name}.py" for name in part.section.exercises)
        notes += [f'<a href="{html.escape(os.path.relpath(file))}">{file.name}</a>' for file in files if file.is_file()]
    notes += ["you are here"] if here else []
    said_of_it = f"<small>{' · '.join(notes)}</small>" if notes else ""
    return f'<li><span class="ls-state">{state}</span>{f"<b>{title}</b>" if here else title}{said_of_it}</li>'


def _link(chapter: Outline, section: Section, words: str) -> str:
    """To the section; JupyterLab opens it beside this notebook."""
    target = f"{os.path.relpath(chapter.file)}#{section.anchor}"
    return f'<a href="{html.escape(target)}">{html.escape(words)}</a>'


__all__ = ["CourseMap", "as_html", "course_map"]
