"""`course_map("02_setup")`: where you stand in the course, and the box that says that a chapter is complete.

Its stored HTML is the map as it was when the cell ran; its stored text and Markdown, which are compared, are the same
for every learner.
"""

from __future__ import annotations

import html
import os
from typing import Any

from ipywidgets import HTML, Button, Checkbox, HBox, Layout

from ..course import CourseError, progress
from ..course import course as courses
from ..course.standing import ChapterStanding, CourseStanding, Standing, mark, standing
from .stored import Stored

STYLE = """<style>
.lockstep-map { color: var(--jp-content-font-color1, inherit); font-size: var(--jp-content-font-size1, 14px);
  line-height: 1.5; max-width: 46em }
.lockstep-map.lockstep-map ol { list-style: none; margin: 0; padding: 0 }
.lockstep-map.lockstep-map ol ol { margin: 2px 0 6px 30px }
.lockstep-map .lockstep-number { display: inline-block; width: 22px; height: 22px; margin: 2px 8px 2px 0;
  line-height: 20px; text-align: center; border: 1px solid var(--jp-brand-color1, #1976d2); border-radius: 50% }
.lockstep-map .lockstep-complete { background: var(--jp-brand-color1, #1976d2); color: var(--jp-layout-color0, #fff) }
.lockstep-map small { color: var(--jp-content-font-color2, gray); margin-left: 8px }
.lockstep-map .lockstep-here { font-weight: 600 } .lockstep-map .lockstep-state { display: inline-block; width: 1.4em }
</style>"""


class CourseMap(Stored):
    """The map, unfolded at one chapter; without one, where the learner is. Its repr says only which chapter that is."""

    key = "map"

    def __init__(self, chapter: str = "") -> None:
        self.course = courses.find()
        self.chapter = chapter
        self._map = HTML()
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
        self._map.value = self._drawn(now)

    def _drawn(self, now: CourseStanding) -> str:
        return as_html(now, self.chapter or (now.here[0] if now.here else ""))

    def _on_complete(self, change: Any) -> None:
        mark(self.course, self.chapter, bool(change["new"]))
        self.show()


def course_map(chapter: str = "") -> CourseMap:
    """The map as the value of a cell. Raises CourseError for a chapter that does not exist."""
    names = [one.name for one in courses.find().chapters]
    if chapter and chapter not in names:
        raise CourseError(f"there is no chapter {chapter!r}. There are: {', '.join(names)}")
    return CourseMap(chapter)


def as_html(now: CourseStanding, unfolded: str) -> str:
    """The chapters with what is done in each; below the unfolded one, its sections."""
    chapters = "".join(_chapter(one, now, one.outline.name == unfolded) for one in now.chapters)
    return f'{STYLE}<div class="lockstep-map"><ol>{chapters}</ol></div>'


def _chapter(one: ChapterStanding, now: CourseStanding, unfolded: bool) -> str:
    kind = "lockstep-number lockstep-complete" if one.complete else "lockstep-number"
    counts = f"questions {one.answered} of {one.questions} · exercises {one.passed} of {one.exercises}"
    complete = " · complete" if one.complete else ""
    folded_here = " · you are here" if now.here and now.here[0] == one.outline.name and not unfolded else ""
    sections = "".join(_section(part, now.here == (one.outline.name, part.section.title)) for part in one.sections)
    return (
        f'<li><span class="{kind}">{one.outline.number}</span>{html.escape(one.outline.title)}'
        f"<small>{counts}{complete}{folded_here}</small>{f'<ol>{sections}</ol>' if unfolded else ''}</li>"
    )


def _section(part: Standing, here: bool) -> str:
    state = "✓" if part.is_done else "◐" if part.done else "○" if part.of else ""
    count = f"<small>{part.done} of {part.of}</small>" if part.of > 1 else ""
    title = html.escape(part.section.title.replace("`", ""))
    you = '<span class="lockstep-here">' + title + "</span><small>you are here</small>" if here else title
    return f'<li><span class="lockstep-state">{state}</span>{you}{count}</li>'


__all__ = ["CourseMap", "as_html", "course_map"]
