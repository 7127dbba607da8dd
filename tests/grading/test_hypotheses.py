"""`lockstep.grading.hypotheses`: which values are equal, where others differ, and which mistake predicts them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lockstep.grading import (
    EXACT,
    Each,
    Hypothesis,
    Tolerance,
    difference,
    equal,
    factor_of,
    fitting,
    on_ranks,
    show,
    wrong_ranks,
)

NAN, INF = math.nan, math.inf
T = torch.tensor


@pytest.mark.parametrize(
    ("seen", "right"),
    [
        (1.0, 1.0 + 1e-7),
        (3, 3.0),
        (NAN, NAN),
        (INF, INF),
        ("a", "a"),
        (None, None),
        ([1, (2.0,)], [1, [2.0]]),
        ({"a": T([1.0])}, {"a": T([1.0], dtype=torch.float64)}),
        (T([NAN, INF, -INF]), T([NAN, INF, -INF])),
        (T([]), T([])),
        (T([2]), T([2.0])),
    ],
)
def test_equal(seen: Any, right: Any) -> None:
    assert equal(seen, right)


@pytest.mark.parametrize(
    ("seen", "right"),
    [
        (1.0, 1.001),
        (NAN, 1.0),
        (1.0, NAN),
        (INF, -INF),
        (INF, 1.0),
        (1.0, INF),
        (True, 1),
        (1, True),
        ("1", 1),
        (None, 0.0),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (T([1.0]), T([[1.0]])),
        (1.0, T(1.0)),
        (T(1.0), 1.0),
        (T([1.0, NAN]), T([1.0, 1.0])),
        (T([1.0, INF]), T([1.0, -INF])),
    ],
)
def test_different(seen: Any, right: Any) -> None:
    assert not equal(seen, right)
    assert difference(seen, right) is not None


def test_the_tolerance_is_relative_to_what_is_right_and_has_a_floor() -> None:
    assert equal(101.0, 100.0, Tolerance(0.01, 0.0)) and not equal(101.1, 100.0, Tolerance(0.01, 0.0))
    assert equal(0.5, 0.0, Tolerance(0.0, 0.5)) and not equal(0.6, 0.0, Tolerance(0.0, 0.5))
    assert not equal(1.0, 1.0 + 1e-15, EXACT)


def test_a_norm_bounds_the_whole_tensor_and_nothing_that_is_not_finite() -> None:
    right = torch.tensor([3.0, 4.0])
    by_norm = Tolerance(0.0, 0.0, norm=0.1)
    assert equal(torch.tensor([3.0, 4.5]), right, by_norm) and not equal(torch.tensor([3.0, 4.51]), right, by_norm)
    for value in (torch.nan, torch.inf):
        assert not equal(torch.tensor([3.0, value]), right, by_norm)
        assert not equal(right, torch.tensor([3.0, value]), by_norm)


def test_the_largest_difference_is_found_with_its_path() -> None:
    right = {"first.weight": torch.zeros(2, 3), "losses": [1.0, 2.0]}
    seen = {"first.weight": T([[0.0, 0.0, 0.0], [0.0, -0.5, 0.0]]), "losses": [1.0, 2.25]}
    where = difference(seen, right)
    assert where is not None
    assert (where.path, where.seen, where.right, where.distance) == ("first.weight[1, 1]", -0.5, 0.0, 0.5)
    assert str(where) == "-0.5 at first.weight[1, 1]; expected 0"
    assert str(difference({"losses": [1.0]}, {"losses": [3.0]})) == "1 at losses[0]; expected 3"
    assert str(difference(2.0, 3.0)) == "2; expected 3"
    assert str(difference(1.38052, 1.38052 + 2**-40)) == "1.38052; expected 1.3805200000009095", "digits that differ"
    found = difference(T([1.0]), T([1.0, 2.0]))
    assert found is not None and found.distance == INF


def test_an_infinite_difference_outweighs_a_finite_one() -> None:
    where = difference([100.0, NAN], [0.0, 0.0])
    assert where is not None and where.path == "[1]"


def test_ranks_are_compared_with_their_own_value_or_the_common_one() -> None:
    assert wrong_ranks([1.0, 2.0, 3.0], 2.0) == [0, 2]
    assert wrong_ranks([1.0, 2.0, 4.0], Each([1.0, 2.0, 3.0])) == [2]
    assert wrong_ranks([1.0, 1.0], lambda: Each([1.0, 1.0])) == []
    with pytest.raises(ValueError, match="2 values for 3 ranks"):
        on_ranks(Each([1, 2]), 3)


def test_the_first_hypothesis_that_predicts_all_of_these_ranks_fits() -> None:
    table = [Hypothesis("a", "", 1.0), Hypothesis("b", "", Each([1.0, 2.0])), Hypothesis("c", "", Each([1.0, 2.0]))]
    found = fitting([1.0, 2.0], table)
    assert found is not None and found.id == "b"
    found = fitting([5.0, 1.0], table, of=[1])
    assert found is not None and found.id == "a"
    assert fitting([3.0, 3.0], table) is None


def test_a_prediction_is_computed_only_if_none_before_it_fits() -> None:
    def never() -> Any:
        raise AssertionError("not needed")

    found = fitting([1.0], [Hypothesis("a", "", 1.0), Hypothesis("b", "", never)])
    assert found is not None and found.id == "a"


def test_a_factor_is_found_over_a_whole_structure() -> None:
    right = {"a": T([1.0, -2.0]), "b": [0.0]}
    assert factor_of({"a": T([3.0, -6.0]), "b": [0.0]}, right) == 3.0
    assert factor_of({"a": T([3.0, -6.0]), "b": [1.0]}, right) is None
    assert factor_of(T([1.0]), T([0.0])) is None
    assert factor_of(T([1.0]), T([1.0, 1.0])) is None


def test_values_are_shown_short() -> None:
    assert show(1 / 3) == "0.333333" and show([1, 2.5]) == "[1, 2.5]" and show(("a",)) == "('a')"
    assert show(list(range(9))) == "[0, 1, 2, 3, 4, 5, …]"
    assert show(torch.zeros(2, 4)) == "a tensor of shape (2, 4)" and show(T([1.5, 2])) == "[1.5, 2]"
    assert show({"lr": 0.1}) == "{lr: 0.1}"
