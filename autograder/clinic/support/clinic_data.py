"""What the broken jobs of the clinic share: data, settings, and your ticket. Nothing in here is broken.

Your ticket is a number in `ticket.txt` beside this file, drawn when the first job runs. In half of the cases it
decides which rank is at fault, so a neighbor's answers may not fit. Hand it in with your files.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

FILE = Path(__file__).resolve().parent / "ticket.txt"
FEATURES, CLASSES = 8, 3


def ticket() -> int:
    """Your number: CLINIC_TICKET in the environment, otherwise the one in `ticket.txt`, drawn once and kept."""
    given = os.environ.get("CLINIC_TICKET")
    if given:
        return int(given)
    if not FILE.exists():  # Several ranks come here at once: the first whose link succeeds decides.
        draft = FILE.with_name(f".ticket-{os.getpid()}")
        draft.write_text(f"{secrets.randbelow(1_000_000)}\n")
        try:
            os.link(draft, FILE)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return int(FILE.read_text())


def draw(case: str, choices: int) -> int:
    """A number from 0 to `choices - 1`, always the same for your ticket and this case."""
    digest = hashlib.sha256(f"{ticket()}/{case}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % choices


class Records(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`count` made-up measurements: 8 float32 features each, and one of 3 classes that a linear model can learn.

    The same `seed` gives the same records everywhere. `records[i]` is (features of shape (8,), class as int64 scalar).
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, FEATURES, generator=generator)
        rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(2))
        self.classes = (self.features @ rule).argmax(1)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.classes[index]


def settings(case: str, rank: int, world_size: int, usual: Mapping[str, Any], odd: Mapping[str, Any]) -> dict[str, Any]:
    """The settings file of the host that this rank runs on: `usual`; one host's file differs by `odd`."""
    return {**usual, **(odd if rank == draw(case, world_size) else {})}
