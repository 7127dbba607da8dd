"""`course_map("02_setup")`: where you stand in the course, and the box that says that a chapter is complete.

Its stored HTML is the map as it was when the cell ran; its stored text and Markdown, which are compared, are the same
for every learner.
"""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from ipywidgets import Button, Checkbox, HBox, Layout, Output

from ..course import Course, CourseError, progress
from ..course import course as courses
from ..course.outline import Outline, Section
from ..course.standing import ChapterStanding, CourseStanding, Standing, mark, standing
from ..ranks.cards import said
from .stored import Stored, is_handed_out

DOT = " ·&nbsp;"  # Stays with what follows: no line ends with it
FEW = 3  # The most exercises of a section that are linked; the clinic's cases are too many for a line
STYLE = """<style>
.ls-map > p { margin: 2px 0 10px; font-weight: 600; display: flex; flex-wrap: wrap; gap: 8px }
.lockstep-said .ls-map > p a { padding: 5px 15px; border: 1px solid var(--ls-link); border-radius: 6px;
  text-decoration: none; background: var(--ls-link); color: var(--ls-on) }
.lockstep-said .ls-map > p a + a { background: none; color: var(--ls-link) }
.lockstep-said .ls-map ol { list-style: none; margin: 0; padding: 0 }
.lockstep-said .ls-map ol ol { margin: 2px 0 8px 46px }
.ls-map { container-type: inline-size }
.ls-map summary { display: grid; gap: 0 10px; align-items: center;
  grid-template-columns: 12px 24px minmax(0, 21em) 90px minmax(0, 1fr) }
@container (max-width: 700px) {
  .ls-map summary { grid-template-columns: 12px 24px 90px minmax(0, 1fr); margin-bottom: 4px }
  .ls-map .ls-title { grid-column: 3 / -1 } .ls-map progress { grid-column: 3 }
  .lockstep-said .ls-map ol ol { margin-left: 24px }
}
@container (max-width: 380px) { .ls-map summary small { grid-column: 3 / -1 } }
.ls-map ol ol small a { white-space: nowrap }
.lockstep-said .ls-map summary { color: inherit }
.ls-map summary::before { content: "▸"; width: 12px } .ls-map details[open] > summary::before { content: "▾" }
.ls-map summary::-webkit-details-marker { display: none }
.ls-map .ls-number { width: 22px; height: 22px; margin: 2px 0; line-height: 20px; text-align: center;
  border: 1px solid var(--ls-link); border-radius: 50% }
.ls-map .ls-complete { background: var(--ls-link); color: var(--ls-on) }
.ls-map progress { width: 90px; height: 8px; accent-color: var(--ls-link) }
.ls-map small { color: var(--ls-soft); margin-left: 8px } .ls-map summary small { margin: 0 }
.ls-map ol ol li { padding-left: 1.4em; text-indent: -1.4em } .ls-map ol ol li > * { text-indent: 0 }
.ls-map .ls-state { display: inline-block; width: 1.4em }
.ls-map .ls-title + small { grid-column: 4 / -1 }
@container (max-width: 700px) { .ls-map .ls-title + small { grid-column: 3 / -1 } }
</style>"""
BESIDE = f"<script>\n{Path(__file__).with_name('beside.js').read_text(encoding='utf-8')}</script>"
"""What makes links open a section, or an exercise beside its chapter."""

RETURN = """<script>
window.lockstepReturn ??= (() => {
  const shell = window.jupyterapp?.shell;
  const refresh = () => {
    for (const one of shell?.currentWidget?.node.querySelectorAll("button.lockstep-refresh") ?? []) one.click();
  };
  shell?.currentChanged?.connect(refresh);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh() });
  return true;
})();
</script>"""
"""A map that is alive is up to date when its tab is chosen again, or the browser's."""

LEGEND = f"✓ all questions answered and exercises passed{DOT}◐&nbsp;some{DOT}○&nbsp;none&nbsp;yet"
REMARK = '<p class="ls-soft">Run this cell to bring the map up to date.</p>'


ALONE = "<style>.jp-Cell:has(.ls-alone) .jp-Cell-inputWrapper { display: none }</style><div class=ls-alone></div>"
"""On the start page a newcomer sees the map, not the code that draws it."""


class Record(Enum):
    """Whether it is known what the learner has done."""

    KNOWN = "known"
    UNKNOWN = "unknown"


class CourseMap(Stored):
    """The map at the end of a chapter, unfolded there; without one, where the learner is. Its repr says which it is."""

    def __init__(self, chapter: str = "") -> None:
        self.course = courses.find()
        self.chapter = chapter
        self.html = ""
        self.key = f"map-{chapter}"  # the start page's map, alive in its own tab, hides no chapter's stored one
        self._map = Output()  # JupyterLab opens the links of an output in itself, and those of an HTML widget elsewhere
        self._refresh = Button(description="Refresh", tooltip="Show what has been done since")
        self._refresh.add_class("lockstep-refresh")
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
        """The map of now; in the chapters as they are handed out, a map that claims nothing of what is done."""
        if is_handed_out():
            return REMARK + self._drawn(standing(self.course, progress.Progress()), Record.UNKNOWN)
        return REMARK + self._drawn(standing(self.course))

    def stored_markdown(self) -> str:
        chapters = "\n".join(f"{number}. {one.title}" for number, one in enumerate(self.course.chapters, 1))
        seen = Seen(self.course, Path.cwd())
        return "".join(f"[{words}]({path})\n\n" for words, path in seen.after(self.chapter)) + chapters

    def show(self, *_: Any) -> None:
        now = standing(self.course)
        self._complete.value = any(one.complete for one in now.chapters if one.outline.name == self.chapter)
        drawn = self._drawn(now)
        if drawn == self.html:
            return  # what the reader has unfolded stays so
        self.html = drawn
        shown = {"text/html": said(self.html + RETURN), "text/plain": repr(self)}
        self._map.outputs = ({"output_type": "display_data", "data": shown, "metadata": {}},)
        self.update_stored()

    def _drawn(self, now: CourseStanding, record: Record = Record.KNOWN) -> str:
        drawn = as_html(self.course, now, self.chapter, record=record)
        return drawn if self.chapter else ALONE + drawn

    def _on_complete(self, change: Any) -> None:
        mark(self.course, self.chapter, bool(change["new"]))
        self.show()


def course_map(chapter: str = "") -> CourseMap:
    """The map as the value of a cell. Raises CourseError for a chapter that does not exist."""
    names = [one.name for one in courses.find().chapters]
    if chapter and chapter not in names:
        raise CourseError(f"there is no chapter {chapter!r}. There are: {', '.join(names)}")
    return CourseMap(chapter)


def as_html(
    course: Course,
    now: CourseStanding,
    chapter: str = "",
    folder: Path | None = None,
    record: Record = Record.KNOWN,
) -> str:
    """Where to go on, and the chapters with what is done in each; links as seen from `folder`, or the current one.

    At the end of a `chapter` a section of it that is open comes first, then the next chapter. Unfolded is that chapter,
    else the one where the learner is, at first chapter 1. Where nothing is known, it has only what the chapters ask.
    """
    seen = Seen(course, folder or Path.cwd())
    links = seen.after(chapter)
    known = record is Record.KNOWN
    if known and now.upcoming is not None and (now.here or not chapter):
        outline, section = now.upcoming
        continued = f"Continue: chapter {outline.number}, “{section.plain}”", seen.section(outline, section)
        begun = f"Begin: chapter {outline.number}, “{outline.title}”", seen.path(outline.file)
        if begun[1] not in [path for _, path in links]:
            links.insert(0 if outline.name == chapter else len(links), continued if now.here else begun)
    onward = "".join(f'<a href="{html.escape(path)}">{html.escape(words)}</a>' for words, path in links)
    onward = f"<p>{onward}</p>" if onward else ""
    unfolded = chapter or (now.here[0] if now.here else course.chapters[0].name)
    chapters = "".join(_chapter(seen, one, now, one.outline.name == unfolded, record) for one in now.chapters)
    legend = f'<p class="ls-soft">{LEGEND}</p>' if known else ""
    return f'{STYLE}<div class="ls-map">{onward}<ol>{chapters}</ol></div>{legend}{BESIDE}'


@dataclass(frozen=True)
class Seen:
    """The course as seen from a folder: where the links of a notebook there lead."""

    course: Course
    folder: Path

    def path(self, file: Path) -> str:
        return Path(os.path.relpath(file, self.folder)).as_posix()

    def section(self, chapter: Outline, section: Section) -> str:
        """JupyterLab opens it beside this notebook."""
        return f"{self.path(chapter.file)}#{section.anchor}"

    def after(self, name: str) -> list[tuple[str, str]]:
        """Words and path of a link to the chapter after this one; none after the last one, or without a name."""
        there = [one for one in enumerate(self.course.chapters, 1) if self.course.page(one[1].name).is_file()]
        pairs = [(number, one) for (_, before), (number, one) in pairwise(there) if before.name == name]
        return [
            (f"Next: chapter {number}, “{one.title}”", self.path(self.course.page(one.name))) for number, one in pairs
        ]


def _chapter(seen: Seen, one: ChapterStanding, now: CourseStanding, unfolded: bool, record: Record) -> str:
    kind = "ls-number ls-complete" if one.complete else "ls-number"
    done, of = one.answered + one.passed, one.questions + one.exercises
    counts = f"questions {one.answered} of {one.questions} · exercises {one.passed} of {one.exercises}"
    bar = f'<progress value="{done}" max="{max(of, 1)}" aria-label="done in this chapter: {done} of {of}"></progress>'
    if record is Record.UNKNOWN:
        counts, bar = f"{one.questions} questions · {one.exercises} exercises", ""
    counts = f"about {html.escape(one.outline.minutes)} · {counts}" if one.outline.minutes else counts
    complete = " · complete" if one.complete else ""
    here = now.here is not None and now.here[0] == one.outline.name
    sections = "".join(
        _section(seen, one.outline, part, now.here == (one.outline.name, part.section.title), record)
        for part in one.sections
    )
    return (
        f'<li><details{" open" if unfolded else ""}><summary><span class="{kind}">{one.outline.number}</span>'
        f'<span class="ls-title">{html.escape(one.outline.title)}</span>'
        f"{bar}<small>{counts}{complete}{' · you are here' if here and not unfolded else ''}</small></summary>"
        f"<ol>{sections}</ol></details></li>"
    )


def _section(seen: Seen, chapter: Outline, part: Standing, here: bool, record: Record) -> str:
    known = record is Record.KNOWN
    glyph, told = ("✓", "done") if part.is_done else ("◐", "partly done") if part.done else ("○", "not done yet")
    state = f' role="img" aria-label="{told}" title="{told}">{glyph}' if part.of and known else ">"
    title = f'<a href="{html.escape(seen.section(chapter, part.section))}">{html.escape(part.section.plain)}</a>'
    notes = [html.escape(part.section.effort.lower())] if part.section.effort else []
    what = "questions and exercises done" if part.section.exercises else "questions answered"
    notes += [f"{part.done} of {part.of} {what}"] if part.of > 1 and known else []
    if len(part.section.exercises) <= FEW:
        files = (seen.course.exercises / f"{name}.py" for name in part.section.exercises)
        notes += [f'<a href="{html.escape(seen.path(file))}">{file.name}</a>' for file in files if file.is_file()]
        notes += [f"{best} of {of} checks passed" for best, of in part.begun]
    notes += ["you are here"] if here else []
    said_of_it = f"<small>{DOT.join(notes)}</small>" if notes else ""
    return f'<li><span class="ls-state"{state}</span>{f"<b>{title}</b>" if here else title}{said_of_it}</li>'
