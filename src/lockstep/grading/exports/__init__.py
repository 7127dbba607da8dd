"""Grades in the forms that others read. Each writer is a pure function of `verdict.Report` objects.

Whatever a submission printed, raised or was called is in these objects as text; each writer makes it harmless for the
program that opens its output.
"""

from __future__ import annotations

from ..text import visible

__all__ = ["visible"]
