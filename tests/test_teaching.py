"""What the teacher's page says of exercises, minutes, sections and settings is so."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.course import Course
from lockstep.course.outline import outlines
from lockstep.grading.policy_file import parse

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")


def test_the_table_of_minutes_is_the_chapters() -> None:
    course = Course(ROOT)
    wanted = {}
    for chapter in outlines(course):
        for section in chapter.sections:
            for name in (one for one in section.exercises if "/" not in one):
                (minutes,) = re.findall(r"(\d+) minutes", section.effort)[:1]
                wanted[name] = (str(chapter.number), minutes)
    said = {
        name: (number, minutes)
        for number, row in re.findall(r"(?m)^\| (\d) \| (.+) \|$", PAGE)
        for name, minutes in re.findall(r"`(\w+)` (\d+)", row)
    }
    assert said == wanted and len(said) == sum("/" not in name for name in course.names)


def test_the_workshops_sections_are_in_chapter_2_in_this_order() -> None:
    plan = PAGE.partition("A workshop of two hours, for")[2].partition("## Slides")[0]
    (chapter,) = (one for one in outlines(Course(ROOT)) if one.number == 2)
    titles = [section.title for section in chapter.sections]
    rows = re.findall(r"(?m)^\| (\d):(\d\d) \|(.*)$", plan)
    named = [title for *_, row in rows[1:] for title in re.findall(r'"([^"]+)"', row)]
    text = (ROOT / "chapters/source/02_setup.py").read_text(encoding="utf-8")
    assert named and set(named) <= set(titles) and "### When the numbers are wrong" in text
    shown = [title for *_, row in rows[1:] for title in re.findall(r'"([^"]+)"', row.split("|")[1])]
    assert [titles.index(one) for one in shown] == sorted(titles.index(one) for one in shown)
    starts = [60 * int(hour) + int(minute) for hour, minute, _ in rows]
    assert starts == sorted(starts) and starts[-1] < 120


def test_the_settings_that_the_page_quotes_can_be_used() -> None:
    assert '`assignment = "Homework 4 (123)"` under\n  `[canvas]`' in PAGE
    assert parse('[canvas]\nassignment = "Homework 4 (123)"', ()).canvas_assignment == "Homework 4 (123)"
