"""What tests of several folders share. Each module says what it is for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""


def one_of(values: Sequence[Any], quick: int = 0) -> list[Any]:
    """Parameters of a test that takes long: `./lockstep test` takes the one at `quick`, with `--all` it takes each."""
    return [
        pytest.param(value, marks=() if at == quick % len(values) else pytest.mark.slow)
        for at, value in enumerate(values)
    ]
