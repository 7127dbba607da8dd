"""Rates of links: `1gbit`, `200mbit`, or a number of bits a second."""

from __future__ import annotations

import re

SLOWEST = 1_000_000
"""Bits a second. A packet on the loopback interface is up to 64 KiB; on a slower link nothing would move for so long
that a run could be taken for one that hangs."""
FASTEST = 100_000_000_000
_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}

Rate = str | int | float


def bits_per_second(rate: Rate) -> int:
    """`"1gbit"`, `"2.5 Gbit/s"`, `"200mbit"` or a number of bits a second as a number of bits a second.

    As on network hardware, units are decimal and count bits: 1gbit is 125,000,000 bytes a second. Raises ValueError for
    anything else, and outside of 1mbit to 100gbit.
    """
    if isinstance(rate, str):
        found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(kbit|mbit|gbit)(/s)?", rate.strip().lower())
        if found is None:
            raise ValueError(f"the bandwidth is {rate!r}; write it like 1gbit or 200mbit (bits a second)")
        bits = float(found[1]) * _UNITS[found[2]]
    else:
        bits = float(rate)
    if not SLOWEST <= bits <= FASTEST:
        raise ValueError(f"the bandwidth is {rate}; it must be from 1mbit to 100gbit")
    return round(bits)
