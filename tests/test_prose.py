"""What learners and teachers read is plain English: a list of tics, each with what to write instead, at zero.

Fenced blocks and inline code are left out: they quote programs and their output.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

from lockstep.course.toml import tomllib

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|<code>.*?</code>|<!--.*?-->", re.MULTILINE | re.DOTALL)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Tic(NamedTuple):
    """A pattern that reads as translated."""

    pattern: str
    instead: str
    example: str
    """A sentence that it must find."""
    fine: str
    """A sentence that it must leave alone."""


TICS = (
    Tic(r"\bmend(?:s|ed|ing)?\b", "fix", "The mend is one line.", "I recommend it; amend the commit."),
    Tic(r"\banew\b", "again, or a new …", "It is shuffled anew.", "It has a new order."),
    Tic(r"(?<!are )(?<!is )\ball the same(?=[.,;:)]|$)", "still, even so", "They call it all the same.", "All are the same."),
    Tic(r"(?<!look )(?<!looks )\balike\b", "the same, in the same way", "All ranks decide alike.", "The lines look alike."),
    Tic(r"\bto the (?:last )?bit\b", "exactly, bit for bit", "Equal to the bit.", "It differs in the last bit."),
    Tic(r"\bseldom\b", "rarely", "It is seldom full.", "It is rarely full."),
    Tic(r"\bwhoever\b", "name who", "Whoever calls it knows.", "The caller knows."),
    Tic(r"\b(?:nobody|somebody)\b", "no rank, another job: name who", "Nobody waits.", "No rank waits."),
    Tic(r"\beverybody\b(?! sends everything)", "all ranks", "Everybody gets it.", "“everybody sends everything” in the picture"),
    Tic(r"\bfor ever\b", "forever", "It waits for ever.", "for every rank"),
    Tic(r"\bbehind (?:(?:the|that|this|each|a)(?: same)? )?(?:step|epoch)\b", "after", "They stop behind step 3.", "hidden behind backward"),
    Tic(r"\bst(?:ands?|ood)\b(?!-in| in for| for)", "is, waits, stops", "The port stands in the code.", "`meta` stands in for a GPU."),
    Tic(r"\b(?:calls?|collectives?|tensors?|gradients?) (?:never )?(?:meets?|met)\b|\bmeets? in\b", "is matched with, calls", "The n-th call meets the others'.", "The launchers meet at port 29500."),
    Tic(r"\branks? (?:that )?(?:never |has |have )?(?:comes?|came)\b", "calls, joins, arrives", "a rank that never comes", "the gradients come from rank 0"),
    Tic(r"\b(?:is|are) through\b", "has finished", "The other ranks are through.", "It goes through forward."),
    Tic(r"\bbeg(?:in|ins|an|un)\b", "start", "Backward begins.", "at the beginning"),
    Tic(r"\balso (?:when|where|if|with)\b", "even when, even if", "It holds also when one fails.", "It also fails."),
    Tic(r"\bequally many\b", "the same number of", "equally many steps", "equally long parts"),
    Tic(r"\b(?:takes?|took|taking) part\b", "call, join", "Every rank takes part.", "It takes partial sums."),
    Tic(r"\bso many\b", "that many, or the number", "It has so many ranks.", "It has many ranks."),
    Tic(r"\bof (?:its|their|one's) own(?=[.,;:)]|$)", "its own …, a separate …", "It has a timeout of its own.", "GPUs 0 and 1 of their own node."),
    Tic(r"\bwithout a word\b|\bin silence\b", "silently", "They drift apart without a word.", "It fails silently."),
    Tic(r"\bbelongs? into\b", "belongs in, put it into", "It belongs into the checkpoint.", "It belongs in the checkpoint."),
    Tic(r"\blikewise\b", "also, in the same way", "Likewise the buffers.", "The buffers too."),
    Tic(r"\bdie[sd]? of\b|\bdying of\b", "is killed by", "It dies of the signal.", "The signal kills it."),
    Tic(r"\bone (?:thinks|wants|reads|knows|sees)\b", "you", "not what one thinks", "the one rank that waits"),
    Tic(r"\bsome say\b|\ba snippet that circulates\b", "state the fact, refute nobody", "Some say that it averages.", "It averages."),
    Tic(r"\b(?:is|are) told (?:so|as)\b", "reported as", "A fix that hides it is told so.", "It is told the epoch."),
    Tic(r"\b(?:go|goes|went) on\b", "continue", "Training goes on.", "It is going well on two ranks."),
    Tic(r"\btrains? on(?=[.,;:)]|$| and\b)", "keep training", "A finished job trains on.", "It trains on all samples."),
    Tic(r"\banother (?:kind|name|order|place|seed|shape|size|status|type|way)\b", "a different …", "It has another type.", "Another rank waits."),
    Tic(r"\bwhat does is\b", "name it", "What does is to leave.", "What it does is simple."),
)  # fmt: skip


@pytest.mark.parametrize("tic", TICS, ids=lambda tic: tic.instead)
def test_no_text_has_this_tic(tic: Tic) -> None:
    pattern = re.compile(tic.pattern, re.IGNORECASE)
    found = [
        f"{where}: …{text[max(0, hit.start() - 50) : hit.end() + 50]}…"
        for where, text in texts()
        for hit in pattern.finditer(text)
    ]
    assert not found, f"write “{tic.instead}”:\n" + "\n".join(found)


@pytest.mark.parametrize("tic", TICS, ids=lambda tic: tic.instead)
def test_a_tic_is_found_and_its_neighbor_is_not(tic: Tic) -> None:
    pattern = re.compile(tic.pattern, re.IGNORECASE)
    assert pattern.search(plain(tic.example))
    assert not pattern.search(plain(tic.fine))


def test_every_kind_of_text_is_read() -> None:
    places = {where for where, _ in texts()}
    for start in ("chapters/01", "chapters/quizzes/", "README.md", "docs/", "exercises/", "autograder/hints/clinic/"):
        assert any(place.startswith(start) for place in places), start
    catalogue = tomllib.loads((ROOT / "autograder/diagnoses.toml").read_text(encoding="utf-8"))
    assert {f"autograder/diagnoses.toml [{id}]" for id in catalogue} <= places
    assert any(place.startswith("autograder/test_train_ddp.py, test_") for place in places)
    assert {"exercises/mini_ddp.py, MiniDDP", "exercises/clinic/subgroup.py, module"} <= places
    assert any(place.startswith("autograder/clinic/test_subgroup.py:") for place in places)
    assert any("The signal killed it" in said for place, said in texts() if place.startswith("autograder/judging/"))


def test_code_is_not_read_and_a_line_break_hides_nothing() -> None:
    assert plain("a `mend`\n\n```\nmend\n```\nfor\n  ever") == "a for ever"


def plain(text: str) -> str:
    """A text without its code, on one line."""
    return " ".join(CODE.sub("", text).split())


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Every text, by where it is."""
    return tuple((where, plain(text)) for where, text in _texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "markdown":
                yield f"{_name(path)}, cell {number}", cell.source
    pages = [ROOT / "README.md", ROOT / "exercises/clinic/README.md"]
    for path in [*pages, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "autograder/hints").rglob("*.md"))]:
        yield _name(path), path.read_text(encoding="utf-8")
    catalogue = tomllib.loads((ROOT / "autograder/diagnoses.toml").read_text(encoding="utf-8"))
    for id, entry in catalogue.items():
        yield f"autograder/diagnoses.toml [{id}]", f"{entry['title']}. {entry['why']}"
    for path in sorted((ROOT / "chapters/quizzes").glob("*.toml")):
        yield from _strings(tomllib.loads(path.read_text(encoding="utf-8")), _name(path))
    for path in sorted((ROOT / "exercises").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED):
                yield f"{_name(path)}, {getattr(node, 'name', 'module')}", ast.get_docstring(node) or ""
    for path in sorted((ROOT / "autograder").rglob("*.py")):
        if path.parent.name != "scenarios":  # what runs on the ranks says nothing
            yield from _messages(path)


def _messages(path: Path) -> Iterator[tuple[str, str]]:
    """What checks say: their names, and the parts of their sentences. A pattern for the submission's code is no sentence."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (said := ast.get_docstring(node)) is not None:
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{_name(path)}, {node.name}", said.partition("\n")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings and _is_sentence(node.value):
            yield f"{_name(path)}:{node.lineno}", node.value


def _is_sentence(value: object) -> bool:
    return isinstance(value, str) and " " in value.strip() and "||" not in value


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(item, f"{where} {key}")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
