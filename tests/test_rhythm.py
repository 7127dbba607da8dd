"""Every chapter has the same rhythm: goals, minutes, what is needed, text and experiments, quizzes, what to keep."""

from __future__ import annotations

import re

import pytest

from lockstep.authoring import chapters, claims

# Sections that end without a question, being lists themselves.
NO_QUIZ = ("Checklist", "Take it with you", "What to read next")

each_chapter = pytest.mark.parametrize("name", chapters.names())


def opening(name: str) -> str:
    """The text before the first section, joined to one line."""
    cells = chapters.read_source(name).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return " ".join(text.partition("\n## ")[0].split())


def top_sections(name: str) -> dict[str, str]:
    """The sections of the second level, with everything in them as one text."""
    found: dict[str, str] = {}
    for section in claims.sections(chapters.read_source(name)):
        found[section.heading] = section.text + "\n".join(cell["source"] for cell in section.cells)
    merged: dict[str, str] = {}
    text = "\n".join(c.source for c in chapters.read_source(name).cells if c.cell_type == "markdown")
    top = set(
        re.findall(r"^## (.+)$", re.sub(r"^```$.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    )
    current = ""
    for heading, body in found.items():
        current = heading if heading in top else current
        merged[current] = merged.get(current, "") + body
    merged.pop("", None)
    return merged


@each_chapter
def test_a_chapter_opens_with_goals_minutes_and_what_is_needed(name: str) -> None:
    text = opening(name)
    goals = re.findall(r"- [^-]*?\*\*", text.partition("you can ")[2])
    assert len(goals) >= 5, "goals: a list behind 'you can', each with its verb in bold"
    assert "You need " in text and "GPU" in text
    assert re.search(r"About (\d+) minutes: (\d+) to read and run, (\d+) for ", text)


@each_chapter
def test_the_minutes_add_up_and_were_counted(name: str) -> None:
    minutes = re.search(r"About (\d+) minutes: (\d+) to read and run, (\d+) for ", opening(name))
    assert minutes
    total, reading, exercises = map(int, minutes.groups())
    assert total == reading + exercises
    counted = chapters.length(chapters.read_source(name)).minutes
    assert abs(reading - counted) <= 8, f"{counted:.0f} minutes of text and code, and it says {reading}"
    text = "\n".join(cell.source for cell in chapters.read_source(name).cells)
    promised = sum(map(int, re.findall(r"^\*\w+, (\d+) minutes", text, re.MULTILINE)))
    assert promised <= exercises <= promised + 20, f"the exercises say {promised} together"


@each_chapter
def test_every_section_ends_with_a_question_or_is_a_task(name: str) -> None:
    for heading, body in top_sections(name).items():
        if not heading.startswith(("Exercise:", "Capstone:", *NO_QUIZ)):
            assert f'quiz("{name}/' in body, f"no quiz in {heading!r}"


@each_chapter
def test_a_chapter_has_exercises_with_their_check_and_ends_with_what_to_keep(name: str) -> None:
    sections = top_sections(name)
    tasks = [body for heading, body in sections.items() if "%check " in body and "minutes" in body]
    assert len(tasks) >= 3
    assert list(sections)[-2:] == ["Take it with you", "What to read next"]
    assert sections["Take it with you"].count("\n- ") >= 5 and "In an interview" in sections["Take it with you"]
    assert "pytorch.org" in sections["What to read next"]
