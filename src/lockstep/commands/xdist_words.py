"""A plugin for pytest: what pytest-xdist says before the first test. The course's nodes are machines, not processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from .. import authoring  # noqa: F401  before a plugin imports nbformat: it makes that a second shorter


class Words:
    """In the place of "bringing up nodes...": what goes on, and how many tests there are."""

    def __init__(self, processes: int) -> None:
        self.processes, self.tests = processes, 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.tests = len(ids)

    def __call__(self) -> str:
        return f"{self.tests:,} tests in {self.processes} processes" if self.tests else "Collecting the tests ..."


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    words = Words(len(specs))
    config.pluginmanager.register(words)
    config.pluginmanager.getplugin("terminaldistreporter").getstatus = words
