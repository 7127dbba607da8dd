"""What is broken for `preflight`, in words, and whether the lines that come back speak of it."""

from __future__ import annotations

import re
from typing import Any

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CASES: list[tuple[str, str | None]] = [
    *((name, None) for name in VARIABLES),
    *((name, "") for name in ("RANK", "MASTER_ADDR")),
    *((name, "two") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
    ("RANK", "0.0"),
    ("WORLD_SIZE", "1.0"),
    ("LOCAL_RANK", "0.5"),
    ("RANK", "1"),  # in a world of one
    ("RANK", "-1"),
    ("WORLD_SIZE", "0"),
    ("LOCAL_RANK", "-1"),
    ("MASTER_PORT", "65536"),
    ("MASTER_PORT", "0"),  # the last: there rank 0 has to host the store
]
SITUATIONS = {
    "nobody": "Nothing listens at MASTER_PORT",
    "taken": "Rank 0 has to host the store, and another program has the port",
    "dropped": "At MASTER_PORT nothing answers, as behind a firewall that drops packets",
    "foreign": "At MASTER_PORT a program listens that is no store, and says nothing",
    "devices": "The device or backend does not fit",
    "missing": "Of 9 ranks only 0, 3 and 6 came",
    "given, missing": "A group existed already, and rank 1 never called preflight",
    "hosted": "No agent hosted the store (TORCHELASTIC_USE_AGENT_STORE was 'False'), and rank 0 called last",
    "gpus": "Rank 1 had GPUs, and the others had none",
    "duplicate": "Two processes had RANK=1, and none RANK=2",
    "world size": "WORLD_SIZE was 4 on rank 1 and 3 on the others",
    "version": "Rank 1 had another version of torch than the others",
    "lie": "The all-reduce gave rank 1 a sum that was 1 too large",
    "given lie": "A group existed already, and its all-reduce counted rank 2 twice and rank 0 not at all, on rank 1",
    "garbled": "RANK was 'one' and LOCAL_RANK not set on rank 1",
    "doubled": "Two processes had RANK=1, and LOCAL_RANK was not set on the first that called preflight",
    "restarted": "Torchrun had restarted 2 ranks (TORCHELASTIC_RESTART_COUNT was 1), and its agent had kept the store",
    "no group": "The ranks met in the store, and init_process_group raised on rank 1",
    "no sum": "The process group had formed, and all_reduce raised",
    "local rank": "LOCAL_RANK was not set on rank 1",
    "forsaken": "Rank 0 hosted the store, and died when the others had written there",
    "given and wrong": "A group of 3 existed already, in which rank 2 had RANK=0",
    "given": "A group existed already, no variable was set, and all was well",
    "well": "All was well",
}
"""What is broken in each of the other cases."""


def situation(case: Any) -> str:
    """What was broken, in words."""
    return variable(*CASES[case]) if isinstance(case, int) else SITUATIONS[case]


def variable(name: str, value: str | None) -> str:
    """`RANK was not set`."""
    return f"{name} was not set" if value is None else f"{name} was {value!r}"


def mentions(name: str, lines: list[str]) -> bool:
    """Whether some line names this variable, and not only a longer one that ends in it."""
    return any(re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z_])", line) for line in lines)


def mentions_rank(number: int, lines: list[str]) -> bool:
    """Whether some line speaks of this rank: `rank 1`, `ranks 0, 1`, `ranks 0 and 1`, `RANK=1`, `ranks … twice: [0, 1]`."""
    beside = rf"(?i)\branks?\b(?:[^a-z\n]|\b(?:and|or)\b)*(?<!\d){number}(?!\d)"
    listed = rf"(?i)\branks?\b.*[\[{{](?:\d+, *)*{number}(?:, *\d+)*[\]}}]"
    return any(re.search(pattern, line) for line in lines for pattern in (beside, listed))


def names_backend(name: str, lines: list[str]) -> bool:
    """Whether some line names it, other than in the path of a file."""
    return any(re.search(rf"(?<![\w/]){name}(?![\w/])", line) for line in lines)
