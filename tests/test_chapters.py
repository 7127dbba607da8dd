"""The chapters: source and notebook say the same, outputs compare on any machine, a changed number is noticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from msgspec import toml

from lockstep.authoring import chapters
from lockstep.commands import author
from lockstep.course import Course, CourseError
from lockstep.course.outline import outlines
from lockstep.notebook import NAMES
from lockstep.notebook.stepper import Stepper

ROOT = Path(__file__).resolve().parents[1]

each_chapter = pytest.mark.parametrize("name", chapters.names())


def notebook(name: str) -> nbformat.NotebookNode:
    return nbformat.read(chapters.notebook_path(name), as_version=4)


def code(name: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook(name).cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with one short chapter, built."""
    root = tmp_path_factory.mktemp("built")
    folder = root / "chapters"
    (folder / "source").mkdir(parents=True)
    for file in ("nbval_sanitize.cfg", "conftest.py"):
        shutil.copy(ROOT / "chapters" / file, folder / file)
    cells = "# %% [markdown]\n# # Counting\n\n"
    cells += '# %%\nimport time\nprint("HANG after %.1f s" % (time.monotonic() % 9))\n\n'
    cells += '# %%\n# %config Completer.use_jedi = False\nsum(range(5))\n\n# %% tags=["nbval-skip"] ignored_because="it is slow"\n7\n'
    chapters.source_path("10_count", root).write_text(chapters.HEADER + cells)
    chapters.build(["10_count"], root)
    return root


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """One of the test's own."""
    return Path(shutil.copytree(built, tmp_path, dirs_exist_ok=True))


@each_chapter
def test_the_notebook_holds_the_cells_of_its_source(name: str) -> None:
    assert chapters.stale([name]) == [], f"run: python -m lockstep.authoring.chapters build {name}"


@each_chapter
def test_the_way_back_changes_nothing_when_nothing_was_edited(name: str) -> None:
    assert chapters.source_text(notebook(name)) == chapters.source_path(name).read_text(encoding="utf-8")


@each_chapter
def test_the_stored_map_has_the_minutes_that_the_chapters_say(name: str) -> None:
    """A build keeps a stored card, whatever it says; `--fresh` makes a new one."""
    stored = [output.get("data", {}).get("text/html", "") for cell in code(name) for output in cell.outputs]
    maps = [found for page in stored if (found := re.findall(r"about ([\w ]+) ·", page))]
    said = [chapter.minutes for chapter in outlines(Course(ROOT))]
    assert maps and all(found == said for found in maps), f"run: ./lockstep author chapters --fresh {name}"


def test_the_stored_stepper_is_the_one_of_now() -> None:
    """nbval compares it too, in a run that takes an hour."""
    cells = [cell for cell in code("01_internals") if cell.source.splitlines()[-1].startswith("Stepper(")]
    shown = {"ranks": 4, "length": 8}
    assert [cell.source.splitlines()[-1] for cell in cells] == [
        "Stepper(ranks={ranks}, length={length})".format(**shown)
    ]
    now = Stepper(**shown)._repr_mimebundle_()
    assert cells[0].outputs[0].data == now, "run: ./lockstep author chapters 01_internals"


def test_a_file_that_a_chapter_prints_is_stored_as_it_stands() -> None:
    """As above. An exercise is the stub of the last commit, since it may have been done here."""
    prints = re.compile(r'print\(Path\("([\w./]+)"\)\.read_text\(\)\)')
    seen = 0
    for name in chapters.names():
        for cell in code(name):
            if found := prints.fullmatch(cell.source.strip()):
                path = (ROOT / "chapters" / found[1]).resolve()
                now = path.read_text()
                if path.parent.name == "exercises":
                    command = ["git", "show", f"HEAD:{path.relative_to(ROOT)}"]
                    now = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
                assert cell.outputs[0].text == now + "\n", f"run: ./lockstep author chapters {name}"
                seen += 1
    assert seen, "no chapter prints a file: does one still do it in these words?"


def test_the_name_of_a_section_in_quotes_is_a_link_and_the_source_keeps_none(tmp_path: Path) -> None:
    folder = tmp_path / "chapters" / "source"
    folder.mkdir(parents=True)
    cells = {
        "10_one": '# %% [markdown]\n# # One\n#\n# ## The `mean`, (all)\n#\n# See "The `mean`,\n# (all)", and "the mean"; [see "One"](x.md);\n'
        '# `"One"`; chapter\n# 11, "Two".\n#\n# ```\n# "One"\n# # Three\n# ```\n#\n# Chapter 12, "Two", "Three".\n',
        "11_two": '# %% [markdown]\n# # Two\n#\n# "Two"\n\n# %%\n# # Four\n"Two"\n',
    }
    for name, text in cells.items():
        (folder / f"{name}.py").write_text(chapters.HEADER + text)
    one, two = (chapters.read_source(name, tmp_path) for name in cells)
    assert one.cells[0].source == (
        '# One\n\n## The `mean`, (all)\n\nSee ["The `mean`,\n(all)"](10_one.ipynb#The-mean%2C-%28all%29), and "the mean"; [see "One"](x.md);\n'
        '`"One"`; [chapter\n11, "Two"](11_two.ipynb#Two).\n\n```\n"One"\n# Three\n```\n\nChapter 12, "Two", "Three".'
    )
    assert [cell.source for cell in two.cells] == ['# Two\n\n["Two"](11_two.ipynb#Two)', '# # Four\n"Two"']
    assert [chapters.source_text(made) for made in (one, two)] == [chapters.HEADER + text for text in cells.values()]


@each_chapter
def test_every_cell_ran_in_order_and_has_an_id_of_its_own(name: str) -> None:
    ids = [cell.id for cell in notebook(name).cells]
    assert len(set(ids)) == len(ids)
    assert [cell.execution_count for cell in code(name)] == list(range(1, len(code(name)) + 1))


@each_chapter
def test_no_output_tells_of_this_machine(name: str) -> None:
    text = nbformat.writes(nbformat.v4.new_notebook(cells=code(name)))
    for place in (str(ROOT), str(Path.home()), "/tmp/", "site-packages", "0x"):
        assert place not in re.sub(r'"source": \[.*?\]', "", text, flags=re.DOTALL), place
    assert "widget-view" not in text, "a widget's model lives in a kernel; what is stored is its text"


@each_chapter
def test_no_cell_failed_that_was_not_meant_to(name: str) -> None:
    for cell in code(name):
        assert "raises-exception" in cell.metadata.get("tags", ()) or all(
            output.output_type != "error" for output in cell.outputs
        ), cell.source


@each_chapter
def test_folded_help_is_closed(name: str) -> None:
    for cell in notebook(name).cells:
        assert cell.source.count("<details>") == cell.source.count("</details>")


def headings(name: str) -> list[str]:
    text = "\n\n".join(cell.source for cell in notebook(name).cells if cell.cell_type == "markdown")
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def test_a_new_kernel_knows_the_names_that_chapters_import() -> None:
    """All but those of single cells, which import what they use."""
    first = re.compile(r"^from (lockstep[\w.]*) import (.+)$", re.MULTILINE)
    said = [cell.source for name in chapters.names() for cell in code(name) if "%load_ext lockstep" in cell.source]
    found = {one: module for text in said for module, ones in first.findall(text) for one in ones.split(", ")}
    assert len(said) == len(chapters.names()) and len(found) >= 4
    assert {one: NAMES.get(one) for one in found} == found


def test_the_diagnoses_name_sections_that_exist() -> None:
    file = ROOT / "autograder" / "diagnoses.toml"
    if not file.exists():
        pytest.skip("no autograder/diagnoses.toml here")
    named = {entry.get("read", "") for entry in toml.decode(file.read_text(encoding="utf-8")).values()}
    for file in sorted((ROOT / "src" / "lockstep" / "ranks").glob("*.py")):
        named |= set(re.findall(r"chapter \d, \"[^\"]+\"", file.read_text(encoding="utf-8")))
    built = {int(name[:2]): name for name in chapters.names()}
    for read in sorted(named):
        for number, title in re.findall(r'chapter (\d+), ["“]([^"”]+)["”]', read):
            if int(number) in built:
                plain = [heading.replace("`", "") for heading in headings(built[int(number)])]
                assert title in plain, f"{read}: there is no such heading"


@each_chapter
def test_what_is_to_be_predicted_is_folded(name: str) -> None:
    """An answer that is in view is not predicted. What a cell writes to a file is no answer."""
    stored = notebook(name)
    folded = [cell.id for cell in stored.cells if cell.metadata.get("jupyter", {}).get("outputs_hidden")]
    chapters.cover(stored)
    wanted = [cell.id for cell in stored.cells if cell.metadata.get("jupyter", {}).get("outputs_hidden")]
    assert folded == wanted, f"run: ./lockstep author chapters {name}"


# The builder -----------------------------------------------------------------------------------------------------


def test_building_again_changes_no_byte(copy: Path) -> None:
    file = chapters.notebook_path("10_count", copy)
    before = file.read_bytes()
    assert chapters.build(None, copy) == []
    assert file.read_bytes() == before


def test_a_fresh_build_takes_the_readings_of_this_run(copy: Path) -> None:
    file = chapters.notebook_path("10_count", copy)
    stored = file.read_text()
    file.write_text(re.sub(r"after \d\.\d s", "after 99.9 s", stored))
    assert file.read_text() != stored and chapters.build(None, copy) == [], "it says the same"
    assert chapters.build(None, copy, fresh=True) == [file] and "99.9" not in file.read_text()


def test_all_pictures_of_times_in_a_chapter_are_of_one_run(copy: Path) -> None:
    source, file = chapters.source_path("10_count", copy), chapters.notebook_path("10_count", copy)
    picture = "from time import monotonic\nfrom IPython.display import HTML\n"
    picture += """HTML(f'<svg data-measured="">{monotonic()}</svg>')"""
    cells = f"\n# %%\n{picture}\n\n# %%\n{picture}  # another\n"
    source.write_text(source.read_text() + cells)
    chapters.build(None, copy)
    assert chapters.build(None, copy) == [], "they say the same"

    def times() -> list[str]:
        return re.findall(r"data-measured=[^>]*>([\d.]+)<", file.read_text())

    before = times()
    assert len(before) == 2
    source.write_text(source.read_text().replace("# another", "# a third"))
    chapters.build(None, copy)
    assert not set(before) & set(times()), "one had to change, so both did"


def test_a_build_folds_the_answers_to_a_prediction_and_no_other_output(copy: Path) -> None:
    source = chapters.source_path("10_count", copy)
    cells = ["# **Predict** the sum.", "# Two ways:", "print(3)", "# %%writefile three.txt\n# 3", "guess = None", "print(4)",
             "# It is.", "print(5)", "# **Predict** this.", "# # Another section", "print(6)", "# - **Predict** first.", "print(7)"]  # fmt: skip
    kinds = [" [markdown]" if cell.startswith("# ") and "%%" not in cell else "" for cell in cells]
    added = "".join(f"\n# %%{kind}\n{cell}\n" for kind, cell in zip(kinds, cells, strict=True))
    source.write_text(source.read_text() + added)
    chapters.build(None, copy)
    stored = nbformat.read(chapters.notebook_path("10_count", copy), as_version=4)
    assert [cell.source for cell in stored.cells if cell.metadata.get("jupyter")] == ["print(3)", "print(4)"]
    assert chapters.stale(None, copy) == []


def test_a_changed_source_is_noticed(copy: Path) -> None:
    source = chapters.source_path("10_count", copy)
    assert chapters.stale(None, copy) == []
    source.write_text(source.read_text().replace("range(5)", "range(6)"))
    assert chapters.stale(None, copy) == ["10_count"]


def test_an_edit_in_jupyterlab_goes_into_the_source(copy: Path) -> None:
    file = chapters.notebook_path("10_count", copy)
    edited = nbformat.read(file, as_version=4)
    edited.cells[2].source = "%config Completer.use_jedi = False\nsum(range(7))"
    edited.cells[2].metadata["scrolled"] = True
    nbformat.write(edited, file)
    assert chapters.update_sources(None, copy) == [chapters.source_path("10_count", copy)]
    text = chapters.source_path("10_count", copy).read_text()
    assert "# %%\n# %config Completer.use_jedi = False\nsum(range(7))\n" in text and "scrolled" not in text
    assert chapters.stale(None, copy) == [] and chapters.update_sources(None, copy) == []


def test_a_rule_covers_what_varies_and_no_more() -> None:
    same = chapters.rules()
    row = "  {}      all_reduce #1   4 × float32   {} s   cell line 6   dist.all_reduce(t)"
    assert same("HANG after 0.7 s: rank 2") == same("HANG after 1.1 s: rank 2") != same("HANG after 1.1 s: rank 1")
    assert same(row.format(0, "0.7")) == same(row.format(0, "12.1")) != same(row.format(1, "0.7"))
    head = "a_check   {} of 6 checks passed · {} s"
    assert same(head.format(4, "0.8")) == same(head.format(4, "10.8")) != same(head.format(5, "0.8"))
    assert same("it took 3.1 s") != same("it took 3.2 s")


def compare(file: Path, *options: str, passes: bool) -> str:
    """What `pytest --nbval` prints for this chapter of a copy."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=file.parents[1])
    assert (done.returncode == 0) is passes, done.stdout
    return done.stdout


@pytest.mark.slow
def test_nbval_notices_an_altered_number_and_nothing_else(copy: Path) -> None:
    file = chapters.notebook_path("10_count", copy)
    book = nbformat.read(file, as_version=4)
    altered = deepcopy(book.cells[2])
    altered.id = "altered"
    assert altered.outputs[0].data["text/plain"] == "10"  # sum(range(5))
    altered.outputs[0].data["text/plain"] = "11"
    book.cells.insert(3, altered)
    nbformat.write(book, file)
    said = compare(file, passes=False)
    assert "1 failed, 2 passed, 1 skipped" in said and said.startswith("..Fs"), said


def test_an_unknown_chapter_is_told_which_there_are() -> None:
    with pytest.raises(CourseError, match=r"^there is no chapter '06_more'\. There are: 01_internals, "):
        author.chapters(["06_more"], back=True)


SPREAD = ("--numprocesses=2", "--dist=loadfile")  # as only `./lockstep test --all` compares chapters


@pytest.mark.slow
@pytest.mark.parametrize("spread", [(), SPREAD])
def test_a_cell_that_needs_what_is_not_here_is_run_and_not_compared(copy: Path, spread: tuple[str, ...]) -> None:
    """In one process or several, the last lines say how many, and why."""
    conftest = copy / "chapters" / "conftest.py"
    missing = "\nimport lockstep.cluster\n\nlockstep.cluster.available = lambda feature: f'no {feature} here'\n"
    conftest.write_text(conftest.read_text() + missing)
    file = chapters.notebook_path("10_count", copy)
    book = nbformat.read(file, as_version=4)
    book.cells[2].metadata["tags"] = ["needs-slurm"]
    book.cells[2].outputs[0].data["text/plain"] = "11"  # it is 10
    nbformat.write(book, file)
    assert "1 cells not compared: no slurm here" in compare(file, *spread, passes=True)
