"""What axe-core finds on a page, the rules of WCAG 2 and its own best practices."""

from __future__ import annotations

from typing import Any

import pytest

OPTIONS = {"resultTypes": ["violations"], "iframes": False}


def violations(page: Any, within: str | None = None) -> list[str]:
    """Each violation with the element that has it, in the page or below a selector, and in each of the page's frames.

    Skips the test, with the reason, where there is no axe.
    """
    playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="not run: no axe-core here")
    axe, found = playwright.Axe(), []
    for frame in page.frames:
        context = within if frame is page.main_frame else None
        results = axe.run(frame, context, OPTIONS).response
        assert results["passes"], "axe has looked at nothing"
        for one in results["violations"]:
            found += [f"{one['id']}: {node['html'][:200]}" for node in one["nodes"]]
    return found
