"""Grades in the forms that others read. Each writer is a pure function of `verdict.Report` objects.

Whatever a submission printed, raised or was called is in these objects as text; each writer makes it harmless for the
program that opens its output.
"""

from __future__ import annotations

import unicodedata


def visible(text: str, keep: str = "") -> str:
    """The text with control, direction and undecodable characters escaped, but for those in `keep`."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(
        c if c in keep or unicodedata.category(c) not in hidden else c.encode("unicode_escape").decode() for c in text
    )
