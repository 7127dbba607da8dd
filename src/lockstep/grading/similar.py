"""Submissions that share what no others have: pairs that a teacher should look at, never a verdict.

Theory of operation. A source becomes a sequence of symbols, its syntax tree in order. Comments, formatting, docstrings,
annotations, imports and the file's own names leave no trace; what it calls and the numbers that it uses do. Each run of
`GRAM` symbols is hashed, and from each window of `WINDOW` hashes the smallest is kept. So no common passage of
`GRAM + WINDOW - 1` symbols (four or five lines) is missed, and two files meet in an index instead of being compared
(Schleimer, Wilkerson and Aiken, "Winnowing: Local Algorithms for Document Fingerprinting", SIGMOD 2003).

What is in the stub or in the reference solution does not count, since everybody has it. The rest counts less the more
learners have it: log(n / holders) / log(n / 2), which is 1 for two holders and 0 for all.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice, product
from pathlib import Path

from ..course import Course
from .apart import read_apart
from .classroom import ClassResult
from .source import parse
from .submission import MAX_BYTES

GRAM = 18  # symbols in a fingerprint: about three lines
WINDOW = 6  # fingerprints of which one is kept
SHARE = 0.5  # of the smaller file's own part: a pair is shown from here on
EVIDENCE = 8.0  # weight of what is shared: less is a line or two
IDIOM = 8  # what more learners than this and than a quarter of the class have is no sign of copying
MOST_SYMBOLS = 20_000  # of one file; the rest is not looked at
MOST_PARSED = 100_000  # characters; a longer file is taken word by word
MOST_PAIRS = 200  # of one exercise
LONGEST_NUMBER = 1_000  # bits of one that is told from others
TICKET = "clinic/ticket.txt"
SOLVED = 0.7  # of the reference solution's own part; of independent solutions in the bank none has more than 0.52
PASSAGES = 40  # common fingerprints of a pair from which its longest passage is grown


@dataclass(frozen=True)
class LineRange:
    """A part of a source, from its first to its last line, counted from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"line {self.first}" if self.first == self.last else f"lines {self.first} to {self.last}"


@dataclass(frozen=True)
class Pair:
    """Two learners' files for an exercise that have much in common.

    `share` (0 to 1) is how much of the smaller one's own part is also in the other. `one_lines` and `other_lines` are
    the longest passage that both have; `passage` is its text in the first.
    """

    exercise: str
    one: str
    other: str
    share: float
    one_lines: LineRange
    other_lines: LineRange
    passage: str


@dataclass(frozen=True)
class Findings:
    """What is alike in a class. `solved` are exercises, and the learners whose file is the reference solution or nearly
    so, whatever its names are.
    """

    pairs: tuple[Pair, ...]
    solved: tuple[tuple[str, tuple[str, ...]], ...]


def in_class(graded: ClassResult, course: Course) -> Findings:
    """Of all exercises of a class, in the course's order, from the files that the learners handed in."""
    found: list[Pair] = []
    solved = []
    for name in graded.exercises:
        stubs = [folder / f"{name}.py" for folder in (course.autograder / "stubs", course.exercises)]
        stubs, solution = [path for path in stubs if path.is_file()], course.solutions / f"{name}.py"
        given = [_Code.of(path.read_text(encoding="utf-8")) for path in (*stubs, solution) if path.is_file()]
        codes = {learner: _Code.of_stranger(text) for learner, text in sorted(_sources(graded, name).items())}
        found += _pairs(codes, given, name)
        if "/" not in name and stubs and solution.is_file() and (held := _holders(codes, given[-1], given[0])):
            solved.append((name, held))
    return Findings(tuple(found), tuple(solved))


def _holders(codes: Mapping[str, _Code], solution: _Code, stub: _Code) -> tuple[str, ...]:
    """The learners who have the solution. Cases of a group such as the clinic are not asked for: their fix is a few
    lines, and everybody finds the same.
    """
    own = set(solution.fingerprints({mark for _, mark in stub.grams()}))
    common = {id: len(own.intersection(mark for _, mark in code.grams())) for id, code in codes.items() if own}
    return tuple(id for id, count in common.items() if count >= SOLVED * len(own))


def _pairs(codes: Mapping[str, _Code], given: Iterable[_Code], exercise: str) -> list[Pair]:
    """Pairs among one exercise's files, by learner, that share more than chance: the greatest share first.

    `given` are texts that every learner has: the stub, the reference solution.
    """
    known = {mark for code in given for _, mark in code.grams()}
    own = {learner: code.fingerprints(known) for learner, code in codes.items()}
    holders: dict[bytes, list[str]] = defaultdict(list)
    for learner, marks in own.items():
        for mark in marks:
            holders[mark].append(learner)
    most = max(IDIOM, len(codes) // 4)
    weights = {mark: _weight(len(held), len(codes)) for mark, held in holders.items() if len(held) <= most}
    shared: dict[tuple[str, str], float] = defaultdict(float)
    for mark, weight in weights.items():
        for couple in combinations(holders[mark], 2):
            shared[couple] += weight
    total = {learner: sum(weights.get(mark, 0.0) for mark in marks) for learner, marks in own.items()}
    found = []
    for (one, other), weight in shared.items():
        share = weight / min(total[one], total[other])
        if weight >= EVIDENCE and share >= SHARE:
            found.append((round(share, 3), round(weight, 3), one, other))
    found.sort(key=lambda item: (-item[0], -item[1], *item[2:]))
    return [_pair(exercise, one, other, share, codes, own, weights) for share, _, one, other in found[:MOST_PAIRS]]


def same_tickets(graded: ClassResult) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Clinic tickets that more than one learner handed in: the ticket, and who has it.

    A ticket is drawn for each learner, so equal ones came from one copy of the course or, once in a million pairs, from
    chance.
    """
    holders: dict[str, list[str]] = defaultdict(list)
    for learner in graded.learners:
        if TICKET in learner.handed.files:
            holders[_read(learner.handed.folder / TICKET, 200).strip()].append(learner.id)
    return tuple((ticket, tuple(held)) for ticket, held in sorted(holders.items()) if ticket and len(held) > 1)


def groups(found: Iterable[Pair]) -> tuple[tuple[str, ...], ...]:
    """The learners whom pairs connect, each group sorted, the largest group first."""
    members: list[set[str]] = []
    for pair in found:
        joined = [group for group in members if not group.isdisjoint((pair.one, pair.other))]
        members = [group for group in members if group not in joined] + [{pair.one, pair.other}.union(*joined)]
    return tuple(sorted((tuple(sorted(group)) for group in members), key=lambda group: (-len(group), group)))


def _sources(graded: ClassResult, name: str) -> dict[str, str]:
    """By learner, the file handed in for this exercise."""
    handed_in = [one for one in graded.learners if f"{name}.py" in one.handed.files]
    return {one.id: _read(one.source(name), MAX_BYTES) for one in handed_in}


def _read(path: Path, most: int) -> str:
    """The text of what was handed in; empty when it is no longer there, since no grade depends on it."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def _weight(holders: int, learners: int) -> float:
    """What a fingerprint with so many holders counts; a small class is taken for one of 16."""
    size = max(learners, 16)
    return min(1.0, math.log(size / holders) / math.log(size / 2))


def _pair(
    exercise: str,
    one: str,
    other: str,
    share: float,
    codes: Mapping[str, _Code],
    own: Mapping[str, Mapping[bytes, list[int]]],
    weights: Mapping[bytes, float],
) -> Pair:
    common = sorted((mark for mark in own[one] if mark in own[other] and mark in weights), key=lambda m: own[one][m])
    best = (0, 0, 0)
    grown: dict[int, int] = {}  # how far the passage reaches whose places are so far apart
    for mark in common[:: max(1, len(common) // PASSAGES)]:
        for here, there in product(own[one][mark][:3], own[other][mark][:3]):
            if here >= grown.get(there - here, 0):
                run = _grow(codes[one].symbols, codes[other].symbols, here, there)
                grown[there - here] = run[0] - run[1]
                best = max(best, run)
    length, here, there = best[0], -best[1], -best[2]
    lines = codes[one].lines(here, length)
    passage = "\n".join(codes[one].text.splitlines()[lines.first - 1 : lines.last])
    return Pair(exercise, one, other, share, lines, codes[other].lines(there, length), passage)


def _grow(one: list[str], other: list[str], here: int, there: int) -> tuple[int, int, int]:
    """The common run around these two places: how long, and minus where it begins in each."""
    back = 0
    while back < min(here, there) and one[here - back - 1] == other[there - back - 1]:
        back += 1
    ahead = 0
    while here + ahead < len(one) and there + ahead < len(other) and one[here + ahead] == other[there + ahead]:
        ahead += 1
    return back + ahead, -(here - back), -(there - back)


@dataclass(frozen=True)
class _Code:
    """A source and its symbols, each with its line."""

    text: str
    stream: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, text: str) -> _Code:
        return cls(text, stream_of(text))

    @classmethod
    def of_stranger(cls, text: str) -> _Code:
        """Read in a process that may die; then it is taken word by word."""
        return cls(text, read_apart(stream_of, text, otherwise=()) or tuple(islice(_words(text), MOST_SYMBOLS)))

    @cached_property
    def symbols(self) -> list[str]:
        return [symbol for symbol, _ in self.stream]

    def grams(self) -> Iterator[tuple[int, bytes]]:
        """The hash of each run of GRAM symbols, and where it begins."""
        small = [hashlib.blake2b(s.encode("utf-8", "surrogatepass"), digest_size=4).digest() for s in self.symbols]
        for start in range(len(small) - GRAM + 1):
            yield start, hashlib.blake2b(b"".join(small[start : start + GRAM]), digest_size=8).digest()

    def fingerprints(self, known: set[bytes]) -> dict[bytes, list[int]]:
        """Of each window the smallest hash, the last of equals, and its places; those that are known left out."""
        marks = [(mark, -start) for start, mark in self.grams()]
        kept: dict[bytes, list[int]] = defaultdict(list)
        last = -1
        for start in range(max(1, len(marks) - WINDOW + 1) if marks else 0):
            mark, place = min(marks[start : start + WINDOW])
            if -place != last and mark not in known:
                kept[mark].append(-place)
            last = -place
        return dict(kept)

    def lines(self, start: int, length: int) -> LineRange:
        covered = [line for _, line in self.stream[start : start + length]] or [1]
        return LineRange(min(covered), max(covered))


def stream_of(text: str) -> tuple[tuple[str, int], ...]:
    """Its symbols and their lines. Never raises: what Python cannot read is taken word by word."""
    tree = parse(text) if len(text) <= MOST_PARSED else None
    return tuple(islice(_symbols(tree) if tree is not None else _words(text), MOST_SYMBOLS))


_PASSED_OVER = (ast.Import, ast.ImportFrom, ast.expr_context, ast.Pass, ast.type_ignore)


def _symbols(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The tree in the order of the source, without recursion: hostile code is nested deeply."""
    names = _own_names(tree)
    todo: list[tuple[ast.AST, int]] = [(node, node.lineno) for node in reversed(tree.body)]
    while todo:
        node, line = todo.pop()
        line = getattr(node, "lineno", line)
        if isinstance(node, _PASSED_OVER) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        yield _symbol(node, names), line
        children = []
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                children += [(one, line) for one in (value if isinstance(value, list) else [value])]
        todo += [(child, line) for child, line in reversed(children) if isinstance(child, ast.AST)]


def _symbol(node: ast.AST, names: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return "." + names.get("." + node.attr, node.attr)
    if isinstance(node, ast.keyword):
        return f"{node.arg}="
    if isinstance(node, ast.Constant):
        if isinstance(node.value, int) and node.value.bit_length() > LONGEST_NUMBER:
            return "number"  # Python refuses to write out those of thousands of digits
        return "text" if isinstance(node.value, str | bytes) else repr(node.value)
    if isinstance(node, ast.AnnAssign):
        return "Assign"
    return type(node).__name__


def _own_names(tree: ast.Module) -> dict[str, str]:
    """What the file's own names stand for: a module for its alias, `v` for whatever it defines."""
    found: dict[str, str] = {}
    aliases: dict[str, str] = {}
    selves: set[str] = set()
    stored: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                found[node.id] = "v"
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                stored.append((node.value.id, node.attr))
        elif isinstance(node, ast.arg):
            found[node.arg] = "v"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name], found["." + node.name] = "v", "v"
            if isinstance(node, ast.ClassDef):
                methods = [one.args for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                selves |= {one.arg for args in methods for one in (*args.posonlyargs, *args.args)[:1]}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found[node.name] = "v"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = alias.name.rpartition(".")[2]
    return found | {"." + attribute: "v" for owner, attribute in stored if owner in selves} | aliases


def _words(text: str) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        for word in re.findall(r"\w+|[^\w\s]", line.partition("#")[0]):
            yield word, number
