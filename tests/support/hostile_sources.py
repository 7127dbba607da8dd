"""Texts that were written to break or to stall whoever reads them, and random ones after their pattern.

`python hostile_sources.py SEED` reads them all as the judge does, and ends with 0 if nothing raised.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONG = 100_000
DRAWN = 25

DEEP = {
    "minus": "x = " + "-" * 4_000 + "1",
    "not": "x = " + "not " * 4_000 + "x",
    "lambda": "x = " + "lambda: " * 4_000 + "1",
    "sum": "x = " + "1+" * 20_000 + "1",
    "attributes": "x = a" + ".a" * 20_000,
    "ifs": "if rank:\n    pass\n" * 8_000,
    "calls": "x = a" + "()" * 20_000,
    "elif": "if a:\n    pass\n" + "elif b:\n    pass\n" * 20_000,
    "brackets": "x = " + "[" * 199,
    "deep condition": "if " + "-" * 900 + "rank:\n    all_reduce(x)\n",
}
LONG_ONES = {
    "rates": "lr*" * (LONG // 3),
    "sizes": "lr " + "world*" * (LONG // 6),
    "loops": "for " * (LONG // 4),
    "calls of train_ddp": "train_ddp(" * (LONG // 10),
    "folders": "/a" * (LONG // 2),
    "run folders": "/lockstep-run-a" * (LONG // 15),
    "colors": "\x1b[" * (LONG // 2),
    "files": 'File "' * (LONG // 6),
    "blank": "\n" * LONG,
    "spaces": " " * LONG,
    "digits": "1" * LONG,
    "one long line": "x = '" + "a" * ((1 << 20) - 10) + "'",
    "short lines": "lr*lr*world\n" * ((1 << 20) // 12),
    "a great number": "x = 0x" + "f" * 20_000,
    "unfinished": "Expected to have finished reduction in the prior iteration" * (LONG // 58),
}
ODD = {
    "null": "x = 1\0",
    "mark": "\ufeffx = 1",
    "cookie": "# -*- coding: punycode -*-\nx = 1",
    "surrogate": "x = '\udcff'",
    "pages": "x\x0c\x1c\u2028\x85" * 100,
}
CORPUS = DEEP | LONG_ONES | ODD
PIECES = (
    "lr", "*", "world_size", "rank", " ", "\n", "    ", "if ", "for ", "in range(", "(", ")", "[", "]", "{", "}", "'", '"', '"""',
    "\\", "/", "/tmp", "/lockstep-run-x", "/work", "\x1b[", "m", ".", ",", ":", "=", "-", "not ", "lambda: ", "0x", "f" * 5_000, "1" * 5_000,
    "def train_ddp", "print(", "#", "\0", "\r", "\x0c", "é", "\u202e", "\udc80", "Traceback (most recent call last):\n", 'File "',
)  # fmt: skip


def drawn(draw: random.Random) -> str:
    """A random text: pieces in any order, some of them many times over."""
    parts = [draw.choice(PIECES) * draw.choice((1, 1, 1, 2, 50, 3_000)) for _ in range(draw.randrange(1, 40))]
    return "".join(parts)[: 1 << 18]


def patterns() -> set[str]:
    """What the checks search a submission for: every text in them with a repetition of anything."""
    found = set()
    for file in sorted((ROOT / "autograder").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and ".*" in value and len(value) < 300 and "\n" not in value:
                found.add(value)
    return found


def read(text: str, searched: set[str], folder: Path) -> None:
    """All that the judge does to a text of a submission. Nothing of it may raise, or take long."""
    from judging.train_ddp import under_rank_condition

    from lockstep.grading import similar
    from lockstep.grading.source import MOST_COLUMNS, parse
    from lockstep.grading.submission import Submission, _defined, _imports
    from lockstep.ranks import explain
    from lockstep.ranks.report import Error

    file = folder / "train_ddp.py"
    file.write_text(text, encoding="utf-8", errors="surrogateescape" if "\udcff" in text else "replace")
    submission = Submission("train_ddp", file, file, "exercises/train_ddp.py")
    parse(text)
    _imports(file), _defined(file)
    for pattern in searched:
        submission.line(pattern)
    assert all(len(submission.source_line(line)) <= MOST_COLUMNS for line in (1, 2, 10**9))
    assert len(submission.reported(text, 20_000)) < 5 * 20_000 + 100  # an escaped character is longer than it was
    under_rank_condition(text, 2)
    similar._pairs({"ada": similar._Code.of(text), "bob": similar._Code.of(text + "\nx = 1")}, [], "")
    explain._short(Error("RuntimeError", text[:LONG]))
    explain.parse(text[:LONG])


def main(seed: int) -> None:
    """Read the corpus and random texts."""
    sys.path.insert(0, str(ROOT / "autograder"))
    searched = {pattern for pattern in patterns() if re.compile(pattern)}
    assert any("lr" in pattern for pattern in searched)
    draw = random.Random(seed)
    texts = CORPUS | {f"drawn {number} of seed {seed}": drawn(draw) for number in range(DRAWN)}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            print(name, flush=True)  # the last one is the one that broke it
            read(text, searched, Path(folder))


if __name__ == "__main__":
    main(int(sys.argv[1]))
