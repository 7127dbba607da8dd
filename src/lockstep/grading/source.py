"""Reading what a stranger wrote as source: bounded in length and depth, and it never raises.

The judge parses a submission, searches it for the line that a diagnosis is about, and quotes that line. A source can be
written to make each of these overflow a stack or take hours. So only so much of it is looked at: far more than anybody
writes by hand. What is beyond is as if it were not there, and the submission's own run says what is wrong with it.
"""

from __future__ import annotations

import ast
import re

MOST_PARSED = 200_000  # Characters of a file that is parsed at all
MOST_LINES, MOST_COLUMNS = 5_000, 300  # The part of a file in which a line is searched and quoted


def parse(source: str | bytes) -> ast.Module | None:
    """The syntax tree; None for what is no Python, or is too long or nested too deeply to be read."""
    text = source if isinstance(source, str) else source.decode("utf-8-sig", "replace")
    if len(text) > MOST_PARSED:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def docstring_lines(source: str) -> set[int]:
    """The lines of all docstrings: they speak of what the code does not do."""
    tree = parse(source)
    strings = (
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def body_lines(source: str, function: str) -> range:
    """The lines of the body of the first function of this name; none where there is no such function."""
    tree = parse(source)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    return range(0)


def searched_lines(source: str) -> list[str]:
    """The lines in which anything is searched and from which anything is quoted, each cut to what can be shown."""
    return [line[:MOST_COLUMNS] for line in source.splitlines()[:MOST_LINES]]


def without_path(text: str, inner: re.Pattern[str]) -> str:
    """The text without any path that has `inner` in it, up to where `inner` ends. Takes time in proportion to its
    length, which one pattern for the whole path would not.
    """
    kept, end = [], 0
    for found in inner.finditer(text):
        start = found.start()
        while start > end and (text[start - 1] in "/.-_" or text[start - 1].isalnum()):
            start -= 1
        start = text.find("/", start)  # a path begins with its first slash
        kept.append(text[end:start])
        end = found.end()
    return "".join((*kept, text[end:]))
