"""Every chapter has the same rhythm and cells that can be seen whole, and whatever departs from it is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.authoring import chapters, form

NAME = "02_setup"


@pytest.mark.parametrize("name", chapters.names())
def test_a_chapter_has_its_form(name: str) -> None:
    assert form.problems(name) == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The source of a chapter, in a copy."""
    for place in (f"source/{NAME}.py", f"quizzes/{NAME}.toml"):
        (tmp_path / "chapters" / place).parent.mkdir(parents=True)
        shutil.copyfile(chapters.ROOT / "chapters" / place, tmp_path / "chapters" / place)
    return chapters.source_path(NAME, tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("**", "", "it opens with 0 goals"),
        ("You need ", "Bring ", "what is needed"),
        ("About 125 minutes: ", "About 124 minutes: ", "do not add up"),
        ("minutes: 70 to read and run", "minutes: 10 to read and run", "10 minutes to read and run"),
        ("About ", "In ", "does not open with its minutes"),
        (", 15 minutes.*", ", 95 minutes.*", "minutes for its exercises"),
        ('quiz("02_setup/exit_status")', "3", "the section “Cleanup” has no question"),
        ('quiz("02_setup/exit_status")', 'quiz("02_setup/nowhere")', "there is no question 'nowhere'"),
        ("%check ", "%checked ", "0 exercises with a check"),
        ("# ## What to read next", "# ## Read", "does not end with"),
        ("In an interview", "At a party", "In an interview"),
        ("pytorch.org", "example.org", "PyTorch's own pages"),
        ('quiz("02_setup/exit_status")', "\n".join(["x = 1"] * 26), "has 26 lines"),
        ('quiz("02_setup/exit_status")', f'x = "{"x" * 100}"', "is 106 columns wide"),
        ('quiz("02_setup/exit_status")', "\n".join(["x = 1  # BUG"] * 13), "a mistake in 13 lines"),
        ("# %% [markdown]\n# ## Cleanup", '# %% tags=["nbval-skip"]\n7\n\n# %% [markdown]\n# ## Cleanup', "does not say why"),
        ("# %%\n", '# %% tags=["nbval-skip"]\n', "which is more than 5 %"),
        ("# %%\n", '# %% tags=["whole-program"]\n', "and one may be"),
        ("You need ", "You need 2(N -\n# 1) ", "“1) "),
    ],
)  # fmt: skip
def test_what_departs_from_it_is_named(source: Path, before: str, after: str, said: str) -> None:
    text = source.read_text(encoding="utf-8")
    assert before in text
    source.write_text(text.replace(before, after), encoding="utf-8")
    found = form.problems(NAME, source.parents[2])
    assert any(said in problem for problem in found), found
