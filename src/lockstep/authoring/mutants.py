"""Mutants: a reference solution with one small mistake, made by rule. A check must notice each of them.

Only code between the solution's markers is changed (`course/stubs.py`), in one place a mutant:

    delete      a statement becomes `pass` (an assignment, a call, raise, break, continue, del, a bare return)
    negate      the condition of if, while, `a if b else c` or a comprehension: `not (…)`
    compare     < and <=, > and >=, == and !=, is and is not, in and not in are exchanged
    arithmetic  + and -, * and /, & and | are exchanged; // becomes /, % becomes //, ** becomes *; -x becomes x
    boolean     and and or are exchanged; `not x` becomes `x`
    number      a number becomes one more
    flip        True and False are exchanged
    keyword     a keyword argument of a call is left out
    element     one of several elements of a list, set or dict is left out, or of a tuple that is looped over or
                searched
    unwrap      `with x:` becomes `if True:`, and a decorator is left out
    none        `return x` becomes `return None`

Never changed, because no check could or should notice: docstrings, annotations, imports, assert (it is there for the
type checker), what an exception or an f-string says, logging and warnings. Strings stay as they are.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..course.stubs import solution_lines

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"), ast.Pow: (r"\*\*", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: (r"\|", "&"),
}  # fmt: skip
DELETED = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Break, ast.Continue, ast.Delete)
UNTOUCHED = (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)
LOGGING = re.compile(r"(logging|logger|log|warnings)\b")
ANNOTATIONS = ("annotation", "returns")
_Placed = ast.expr | ast.stmt | ast.keyword
LONGEST = 110  # Characters of a line, or of several joined, that a change shows


@dataclass(frozen=True)
class Mutant:
    """One changed solution. `line` is where, `change` shows the line before and after, `text` is the whole file."""

    operator: str
    line: int
    change: str
    text: str

    @property
    def id(self) -> str:
        """What it is called in files: stays the same when lines above it come or go."""
        return f"{self.operator}: {self.change}"


def mutants(solution: str) -> list[Mutant]:
    """All mutants of a solution's text, from top to bottom; those with the same code once."""
    source = _Source(solution)
    found, times = [], Counter[str]()
    known: dict[tuple[int, int], set[str]] = {}
    for edit in sorted(source.edits(source.tree), key=lambda edit: (edit.at or edit.start, edit.end)):
        place = source.statement(edit)
        if place not in known:
            known[place] = {ast.dump(ast.parse(source.bytes[slice(*place)]))}
        try:
            code = ast.dump(ast.parse(source.edited(edit, *place)))
        except SyntaxError:
            continue
        if code in known[place]:
            continue
        known[place].add(code)
        change = source.shown(edit)
        times[edit.operator + change] += 1
        if (count := times[edit.operator + change]) > 1:
            change += f" ({count})"
        found.append(Mutant(edit.operator, source.line(edit.at or edit.start), change, source.edited(edit)))
    return found


def code_of(text: str) -> str:
    """A file's code without its docstrings and comments: what a change of words leaves as it is."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, and, as `module.name`, what it takes from them."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class _Edit:
    """Bytes `start` to `end` become `new`. `shown` and `at` are set when the whole lines would say less."""

    operator: str
    start: int
    end: int
    new: str
    shown: str = ""
    at: int = 0


class _Source:
    """A solution's text as bytes, as ast counts columns, and what can be changed in it."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.bytes = text.encode()
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.bare = self._without_comments(text)
        self.inside = solution_lines(text)
        self.conditions = {id(node) for node in ast.walk(self.tree) for node in _conditions(node)}

    def _without_comments(self, text: str) -> bytes:
        """The same bytes with spaces for comments."""
        bare = bytearray(self.bytes)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                start = self.starts[row - 1] + len(token.line[:column].encode())
                length = len(token.string.encode())
                bare[start : start + length] = b" " * length
        return bytes(bare)

    # Places --------------------------------------------------------------------------------------------------------

    def start(self, node: _Placed) -> int:
        """Where a node starts, in bytes."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: _Placed) -> int:
        """Where a node ends, in bytes."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def line(self, place: int) -> int:
        """The number of the line that has this byte."""
        return sum(start <= place for start in self.starts[:-1])

    def statement(self, edit: _Edit) -> tuple[int, int]:
        """From where to where the statement of the module goes that this edit is in; all of it, if it is in several."""
        starts = [0, *(self.starts[_first_line(one) - 1] for one in self.tree.body[1:]), len(self.bytes)]
        at = bisect.bisect(starts, edit.start) - 1
        return (starts[at], starts[at + 1]) if edit.end <= starts[at + 1] else (0, len(self.bytes))

    def edited(self, edit: _Edit, start: int = 0, end: int | None = None) -> str:
        """The text from byte `start` to `end`, with this edit in it."""
        return (self.bytes[start : edit.start] + edit.new.encode() + self.bytes[edit.end : end]).decode()

    def shown(self, edit: _Edit) -> str:
        """`if a < b → if a <= b`."""
        if edit.shown:
            return edit.shown
        first, last = self.starts[self.line(edit.start) - 1], self.starts[self.line(max(edit.start, edit.end - 1))]
        before = self.bare[first:last]
        after = self.bare[first : edit.start] + edit.new.encode() + self.bare[edit.end : last]
        return f"{_folded(before)} → {_folded(after) or 'left out'}"

    def _text(self, start: int, end: int) -> str:
        return self.bare[start:end].decode()

    # What can be changed -------------------------------------------------------------------------------------------

    def edits(self, node: ast.AST) -> Iterator[_Edit]:
        """Every change in a node and what it holds, inside the solution's markers."""
        if isinstance(node, UNTOUCHED) or self._only_speaks(node):
            return
        for edit in self._of(node):
            if {self.line(edit.start), self.line(max(edit.start, edit.end - 1))} <= self.inside:
                yield edit
        if isinstance(node, ast.Raise):
            return
        for name, value in ast.iter_fields(node):
            if name not in ANNOTATIONS:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.edits(child)

    def _only_speaks(self, node: ast.AST) -> bool:
        """Docstrings, `...`, logging and warnings."""
        if not isinstance(node, ast.Expr):
            return False
        return isinstance(node.value, ast.Constant) or bool(LOGGING.match(ast.unparse(node.value)))

    def _of(self, node: ast.AST) -> Iterator[_Edit]:
        if isinstance(node, DELETED) and not (isinstance(node, ast.AnnAssign) and node.value is None):
            yield self._replaced("delete", node, "pass")
        if isinstance(node, ast.Return):
            yield (
                self._replaced("delete", node, "pass")
                if node.value is None
                else self._replaced("none", node.value, "None")
            )
        for condition in _conditions(node):
            yield self._replaced("negate", condition, f"not ({self._source(condition)})")
        if isinstance(node, ast.Compare):
            yield from self._comparisons(node)
        elif isinstance(node, ast.BinOp) and not (_is_text(node.left) or _is_text(node.right)):
            yield from self._operator("arithmetic", node.left, node.right, *ARITHMETIC.get(type(node.op), ("", "")))
        elif isinstance(node, ast.AugAssign) and not _is_text(node.value):
            yield from self._operator("arithmetic", node.target, node.value, *ARITHMETIC.get(type(node.op), ("", "")))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            kind = "arithmetic" if isinstance(node.op, ast.USub) else "boolean"
            if id(node) not in self.conditions:
                yield self._replaced(kind, node, self._source(node.operand))
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator("boolean", left, right, rf"\b{old}\b", new)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._replaced("flip", node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield self._replaced("number", node, repr(node.value + 1))
        elif isinstance(node, ast.Call) and node.keywords:
            yield from self._left_out("keyword", [*node.args, *node.keywords], node.keywords)
        elif isinstance(node, ast.With) and not any(item.optional_vars for item in node.items):
            end = self.end(node.items[-1].context_expr)
            yield _Edit("unwrap", self.start(node), end, "if True")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                yield _Edit("unwrap", self.start(decorator) - 1, self.end(decorator), "")
        yield from self._elements(node)

    def _comparisons(self, node: ast.Compare) -> Iterator[_Edit]:
        ends = [node.left, *node.comparators]
        for left, operator, right in zip(ends, node.ops, ends[1:], strict=False):
            ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if ordered or id(node) not in self.conditions or len(node.ops) > 1:  # otherwise it is negated already
                yield from self._operator("compare", left, right, *COMPARISONS[type(operator)])

    def _elements(self, node: ast.AST) -> Iterator[_Edit]:
        several: list[ast.expr] = []
        if isinstance(node, ast.List | ast.Set) and not isinstance(getattr(node, "ctx", None), ast.Store):
            several = node.elts
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple):
            several = node.iter.elts
        elif isinstance(node, ast.Compare) and isinstance(node.comparators[-1], ast.Tuple):
            several = node.comparators[-1].elts if isinstance(node.ops[-1], ast.In | ast.NotIn) else []
        if isinstance(node, ast.Dict) and len(node.keys) > 1 and all(node.keys):
            pairs = [
                (self.start(key), self.end(value)) for key, value in zip(node.keys, node.values, strict=True) if key
            ]
            yield from self._cut("element", pairs, range(len(pairs)))
        elif len(several) > 1:
            yield from self._left_out("element", several, several, "" if isinstance(node, ast.List | ast.Set) else ",")

    # Kinds of change -----------------------------------------------------------------------------------------------

    def _source(self, node: ast.expr) -> str:
        return self.bytes[self.start(node) : self.end(node)].decode()

    def _replaced(self, operator: str, node: ast.expr | ast.stmt, new: str) -> _Edit:
        return _Edit(operator, self.start(node), self.end(node), new)

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[_Edit]:
        """The sign between two operands, where it stands."""
        start = self.end(left)
        between = self._text(start, self.start(right))
        sign = re.search(old, between) if old else None
        if sign:
            offset = start + len(between[: sign.start()].encode())
            yield _Edit(kind, offset, offset + len(sign[0].encode()), new)

    def _left_out(
        self, kind: str, among: Sequence[_Placed], which: Sequence[_Placed], last: str = ""
    ) -> Iterator[_Edit]:
        """Each of some arguments or elements."""
        ordered = sorted(among, key=self.start)
        spans = [(self.start(one), self.end(one)) for one in ordered]
        yield from self._cut(kind, spans, [ordered.index(one) for one in which], last)

    def _cut(self, kind: str, spans: list[tuple[int, int]], which: Iterable[int], last: str = "") -> Iterator[_Edit]:
        """The same list with each of these spans left out, one after the other. `last` ends what is left alone."""
        first, end = spans[0][0], spans[-1][1]
        for index in which:
            left = [self.bytes[start:stop].decode() for start, stop in spans[:index] + spans[index + 1 :]]
            one_line = self.line(first) == self.line(end)
            shown = "" if one_line else f"{_folded(self.bare[slice(*spans[index])])} → left out"
            yield _Edit(kind, first, end, ", ".join(left) + (last if len(left) == 1 else ""), shown, spans[index][0])


def _first_line(statement: ast.stmt) -> int:
    """The number of its first line; its decorators are above it."""
    lines = [statement.lineno]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        lines += [one.lineno for one in statement.decorator_list]
    return min(lines)


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _folded(piece: bytes) -> str:
    text = " ".join(piece.decode().split()).rstrip(":, ")
    return text if len(text) <= LONGEST else text[: LONGEST - 2] + " …"
