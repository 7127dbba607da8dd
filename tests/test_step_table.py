"""Chapter 4's table: what it counts, and that its text has no times."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

FILE = Path(__file__).resolve().parents[1] / "chapters" / "step_table.py"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_table", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_peak_is_what_is_there_at_one_time(table: ModuleType) -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(1000)

    def all_at_once() -> None:
        kept = [torch.ones(1000) for _ in range(3)]
        assert len(kept) == 3

    assert table.peak_memory(all_at_once) == 12000
    assert 4000 <= table.peak_memory(one_after_the_other) <= 8000  # the next one comes before the last one is gone


def test_operations_are_counted(table: ModuleType) -> None:
    numbers = torch.ones(4)

    def three() -> None:
        numbers.add_(1).mul_(2).neg_()

    assert table.count_operations(three) == 3


def run(seconds: float) -> SimpleNamespace:
    """A run as `measure` leaves it: one gradient all-reduce in the marked step, one before it, one of another kind."""
    seen = {"step": seconds, "alone": seconds / 2, "tokens": 256, "parameters": 1000, "peak": 1e9, "memory": 5_000_000}
    report = SimpleNamespace(marks=[SimpleNamespace(name="one step", number=5), SimpleNamespace(name="end", number=9)])
    calls = [(4, "backward"), (6, "backward"), (7, "")]
    sent = [SimpleNamespace(number=number, inside=inside, nbytes=2_000_000) for number, inside in calls]
    return SimpleNamespace(observed=lambda name: [seen, seen], ranks=[report, report], collectives=[sent, sent])


def test_its_text_has_counts_and_its_picture_has_times(table: ModuleType) -> None:
    slow, fast = table.StepTable().add("defaults", run(0.25)), table.StepTable().add("defaults", run(0.125))
    assert repr(slow) == repr(fast)
    assert "2.0 MB" in repr(slow) and repr(slow).endswith(" 1")
    assert "5.0 MB" in slow._repr_html_() and "250 ms" in slow._repr_html_() and "125 ms" in fast._repr_html_()
    assert 'data-measured=""' in slow._repr_html_()


def test_the_fastest_row_is_marked_and_each_says_how_it_differs_from_the_first(table: ModuleType) -> None:
    rows = table.StepTable().add("defaults", run(0.25))
    assert "fastest" not in rows._repr_html_() and "vs. first" not in rows._repr_html_()
    html = rows.add("twice", run(0.125)).add("slower", run(0.5))._repr_html_()
    lines = re.findall(r"<tr.*?</tr>", html)
    assert ["fastest" in line for line in lines] == ["ls-best" in line for line in lines] == [False, False, True, False]
    assert re.findall(r'<td data-name="vs. first">(.*?)</td>', html) == ["+100%", "-50%"]


def test_a_lead_that_may_be_noise_is_not_called_fastest(table: ModuleType) -> None:
    rows = table.StepTable().add("defaults", run(0.25)).add("a little", run(0.24))
    assert "fastest" not in rows._repr_html_()
    assert "fastest" in rows.add("clearly", run(0.22))._repr_html_()


def test_the_bars_are_times_per_token_and_the_slowest_fills_the_place(table: ModuleType) -> None:
    """Each run computes for half of its step. Eight times the tokens in twice the time take a quarter per token."""
    more = run(0.5)
    (seen, _) = more.observed("measured")
    more.observed = lambda name: [seen | {"tokens": 2048, "alone": 0.3}] * 2
    html = table.StepTable().add("defaults", run(0.25)).add("more", more).add("fast", run(0.2))._repr_html_()
    wide = [float(one) for one in re.findall(r"<i style=.width: ([\d.]+)%", html)]
    assert wide == [50, 50, 15, 10, 40, 40]


def test_all_rows_are_compared_with_the_first_rows_peak(table: ModuleType) -> None:
    """Each run measures another peak. With those, equally fast steps would have another MFU, or one that later rows change."""
    first, later = run(0.25), run(0.125)
    (seen, _) = first.observed("measured")
    first.observed = lambda name: [seen | {"peak": 5e8}, seen | {"peak": 4e8}]
    rows = table.StepTable().add("first", first).add("later", later).rows
    assert rows["first"]["MFU"] == pytest.approx(6 * 1000 * 256 / 0.25 / 5e8)
    assert rows["later"]["MFU"] == pytest.approx(2 * rows["first"]["MFU"])


def test_a_machine_without_a_link_adds_no_row(table: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.StepTable().add("defaults", None).rows == {}
    assert "not measured" in capsys.readouterr().out
