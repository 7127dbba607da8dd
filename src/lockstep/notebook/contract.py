"""Show what an exercise asks for: signatures and docstrings, from the learner's file."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from html import escape
from pathlib import Path

from IPython.display import display

from ..course import find
from ..grading.exports.markdown import rendered
from .cards import Card, opened

SECTION = re.compile(r"[A-Z]\w*:")
LISTED = ("Args:", "Attributes:", "Raises:")  # Each entry is a name and what is said of it
ENTRY = re.compile(r"(.+?): (.*)", re.DOTALL)
NAME = re.compile(r"[*\w.]+(?:(?:, | or | and )[*\w.]+)*")


def contract(exercise: str, *functions: str) -> None:
    """Show the contract of `functions` (default: the one named like the exercise) from `exercises/<exercise>.py`.

    A class is shown with those of its methods that have a docstring and no private name. A notebook shows it as a card,
    a terminal as it is in the file.
    """
    text = _file(exercise).read_text(encoding="utf-8")
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    asked: list[ast.FunctionDef | ast.ClassDef] = []
    for name in functions or (exercise,):
        node = defined[name]
        asked.append(node)
        if isinstance(node, ast.ClassDef):
            asked += [one for one in node.body if isinstance(one, ast.FunctionDef) and _is_asked_for(one)]
    file = f"exercises/{exercise}.py"
    plain = "\n".join([file, *(line for node in asked for line in ("", *_head(text, node)))])
    body = "".join(_shown(text, node) for node in asked)
    display(Card(f'<div class="ls-card ls-contract"><p>{opened(file, None)}</p>{body}</div>', plain))


def _is_asked_for(method: ast.FunctionDef) -> bool:
    private = method.name.startswith("_") and not method.name.startswith("__")
    return not private and ast.get_docstring(method) is not None


def _first(node: ast.FunctionDef | ast.ClassDef) -> int:
    """The line of the name, or of the first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _head(text: str, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """The lines from the name (or its decorators) to the end of the docstring."""
    return text.splitlines()[_first(node) - 1 : node.body[0].end_lineno]


# As HTML --------------------------------------------------------------------------------------------------------------


def _shown(text: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    signature = "\n".join(text.splitlines()[_first(node) - 1 : node.body[0].lineno - 1])
    blocks = re.split(r"\n\n+", ast.get_docstring(node) or "")
    return f"<pre>{escape(textwrap.dedent(signature))}</pre>{''.join(map(_block, blocks))}"


def _block(block: str) -> str:
    """A paragraph, a list or indented code; a section has its name above its entries."""
    if all(line.startswith("    ") for line in block.splitlines()):
        return f"<pre>{escape(textwrap.dedent(block))}</pre>"
    title, _, inner = block.partition("\n")
    if not SECTION.fullmatch(title) or not inner:
        return str(rendered(block))
    inner = textwrap.dedent(inner)
    if title not in LISTED:
        return f'<p class="ls-name">{escape(title)}</p>{rendered(inner)}'
    entries = "".join(f"<li>{_entry(entry)}</li>" for entry in re.split(r"\n(?!\s)", inner))
    return f'<p class="ls-name">{escape(title)}</p><ul>{entries}</ul>'


def _entry(entry: str) -> str:
    found = ENTRY.fullmatch(entry)
    name, said = (found[1], found[2]) if found else ("", entry)
    shown = f"<code>{escape(name)}</code>" if NAME.fullmatch(name) else str(_line(name))
    return f"{shown}: {_line(said)}" if name else _line(said)


def _line(said: str) -> str:
    """Text that has no paragraphs and lists, as HTML that goes on in its line."""
    return str(rendered(" ".join(said.split()))).removeprefix("<p>").removesuffix("</p>")


def _file(exercise: str) -> Path:
    """The learner's file; when outputs are compared, the reference, whose contract is the same."""
    return Path(os.environ.get("LOCKSTEP_SUBMISSION") or find().exercises) / f"{exercise}.py"
