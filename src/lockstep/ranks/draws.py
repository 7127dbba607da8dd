"""The numbers that ranks draw (`ranks.draw`): the supervisor gives them out, and whoever holds the secret knows them all."""

from __future__ import annotations

import random


def drawn(secret: str, rank: int, count: int) -> float:
    """What rank `rank` draws after `count` earlier numbers: between 0 and 1, of its own for each secret."""
    return random.Random(f"{secret}/{rank}/{count}").random()
