"""A browser for the tests that look at pages: Debian's Chromium, driven by Playwright. Both may be missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> Iterator[Any]:
    """A started browser. Skips the test, with the reason, where there is none."""
    if CHROMIUM is None:
        pytest.skip("not run: no chromium here")
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: no playwright here")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def faults(page: Any) -> list[str]:
    """A list that grows by each error in the page's console, and by each that no script caught."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    return found


# Relative luminance and contrast as WCAG 2 defines them; the background is that of the nearest element that has one.
CONTRASTS = """(top) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => { const [r, g, b] = rgb.slice(0, 3).map((v) => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const ground = (at) => { for (; at; at = at.parentElement) { const rgb = parse(getComputedStyle(at).backgroundColor);
    if (rgb.length === 3 || rgb[3] === 1) return rgb } return [255, 255, 255] };
  const worst = {};
  const walker = document.createTreeWalker(top || document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || /SCRIPT|STYLE/.test(parent.tagName) || !parent.offsetParent) continue;
    if (getComputedStyle(parent).opacity === "0") continue;
    const fore = parse(getComputedStyle(parent).color), back = ground(parent);
    const [a, b] = [light(fore), light(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const name = parent.tagName.toLowerCase() + "." + parent.className + " " + fore.join() + " on " + back.join();
    if (ratio < 4.5) worst[name] = Math.round(ratio * 100) / 100;
  }
  return worst;
}"""
