"""Compare what ranks saw with what is right, and with what each known mistake would give.

A check that compares numbers has three parts: what was seen, what is right, and a table of hypotheses. Each hypothesis
predicts what its mistake gives. The first one whose prediction equals what was seen is the diagnosis.

    grader.explain(
        "The gradient",
        run.observed("gradient"),
        mean,
        [
            Hypothesis("gradients-summed", "That is the sum over the ranks: nobody divided.", mean * world),
            Hypothesis("gradients-not-averaged", "That is the rank's own gradient.", Each(own)),
        ],
        otherwise="wrong-gradient",
        at=r"all_reduce",
    )

Values are numbers, strings, tensors, and lists, tuples and dicts of them. Numbers are equal within a tolerance, and NaN
equals NaN; everything else is equal as Python says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

SHOWN = 6


@dataclass(frozen=True)
class Tolerance:
    """Two numbers are equal when they are no further apart than `absolute + relative * abs(right)`.

    Two tensors are equal also when the norm of their difference is at most `norm` times the norm of the right one: the
    measure for gradients, whose small numbers have large relative errors.
    """

    relative: float = 1e-5
    absolute: float = 1e-6
    norm: float = 0.0


ROUNDING = Tolerance()
EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Each:
    """One value for each rank, `values[rank]`, where a bare value is meant for every rank."""

    values: Sequence[Any]


Predicted = Any
"""A value for every rank, `Each`, or a function without arguments that returns one of these (called only if needed)."""


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that would explain what was seen.

    `id` is a key of the catalogue, `says` a sentence for the learner that follows the numbers, `predicts` what the
    mistake gives, and `at` the patterns of the line to show (`Submission.line`).
    """

    id: str
    says: str
    predicts: Predicted
    at: str = ""


@dataclass(frozen=True)
class Where:
    """Where two values differ most: its path (`first.weight[2, 0]`), both values there, and their distance.

    `distance` is infinite where the values cannot be compared: another shape, another length, another type.
    """

    path: str
    seen: Any
    right: Any
    distance: float

    def __str__(self) -> str:
        place = f" at {self.path}" if self.path else ""
        seen, right = show(self.seen), show(self.right)
        if seen == right and _is_number(self.seen) and _is_number(self.right):
            seen, right = repr(self.seen), repr(self.right)
        return f"{seen}{place}; expected {right}"


def equal(seen: Any, right: Any, tolerance: Tolerance = ROUNDING) -> bool:
    """Whether the two are the same in structure and shape, and their numbers are equal within the tolerance."""
    return difference(seen, right, tolerance) is None


def difference(seen: Any, right: Any, tolerance: Tolerance = EXACT, path: str = "") -> Where | None:
    """Where the two differ most; None where they are equal within the tolerance."""
    if isinstance(right, torch.Tensor):
        return _between_tensors(seen, right, tolerance, path)
    if isinstance(right, Mapping):
        if not isinstance(seen, Mapping) or set(seen) != set(right):
            return Where(path, seen, right, float("inf"))
        inside = f"{path}." if path else ""
        return _largest(difference(seen[key], right[key], tolerance, f"{inside}{key}") for key in right)
    if isinstance(right, list | tuple):
        if not isinstance(seen, list | tuple) or len(seen) != len(right):
            return Where(path, seen, right, float("inf"))
        pairs = enumerate(zip(seen, right, strict=True))
        return _largest(difference(a, b, tolerance, f"{path}[{index}]") for index, (a, b) in pairs)
    if _is_number(right) and _is_number(seen):
        found = _between_tensors(_number(seen), _number(right), tolerance, path)
        return found and Where(path, seen, right, found.distance)
    return None if type(seen) is type(right) and seen == right else Where(path, seen, right, float("inf"))


def wrong_ranks(seen: Sequence[Any], right: Predicted, tolerance: Tolerance = ROUNDING) -> list[int]:
    """The ranks whose value, `seen[rank]`, is not the right one."""
    values = on_ranks(right, len(seen))
    return [rank for rank, value in enumerate(seen) if not equal(value, values[rank], tolerance)]


def fitting(
    seen: Sequence[Any],
    hypotheses: Iterable[Hypothesis],
    tolerance: Tolerance = ROUNDING,
    of: Iterable[int] | None = None,
) -> Hypothesis | None:
    """The first hypothesis that predicts what was seen on all ranks, or on the ranks `of`."""
    ranks = list(range(len(seen)) if of is None else of)
    for hypothesis in hypotheses:
        predicted = on_ranks(hypothesis.predicts, len(seen))
        if all(equal(seen[rank], predicted[rank], tolerance) for rank in ranks):
            return hypothesis
    return None


def factor_of(seen: Any, right: Any, tolerance: Tolerance = ROUNDING) -> float | None:
    """The number c for which `seen` is c times `right`; None if there is none, or `right` is zero."""
    ours, theirs = _numbers(seen), _numbers(right)
    if ours.shape != theirs.shape or not theirs.numel() or not theirs.abs().max() > 0:
        return None
    largest = int(theirs.abs().argmax())
    factor = float(ours[largest] / theirs[largest])
    return factor if equal(ours, theirs * factor, tolerance) else None


def on_ranks(predicted: Predicted, world_size: int) -> Sequence[Any]:
    """What is predicted for each rank."""
    value = predicted() if callable(predicted) else predicted
    if not isinstance(value, Each):
        return [value] * world_size
    if len(value.values) != world_size:
        raise ValueError(f"Each has {len(value.values)} values for {world_size} ranks")
    return value.values


def show(value: Any) -> str:
    """A value in a sentence: numbers with up to six digits, long lists cut, a large tensor by its shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() > SHOWN:
            return f"a tensor of shape {tuple(value.shape)}"
        return show(value.tolist())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + _some([f"{key}: {show(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, list | tuple):
        brackets = "()" if isinstance(value, tuple) else "[]"
        return brackets[0] + _some([show(item) for item in value]) + brackets[1]
    return repr(value)


def _some(shown: list[str]) -> str:
    return ", ".join(shown[:SHOWN]) + (", …" if len(shown) > SHOWN else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _between_tensors(seen: Any, right: torch.Tensor, tolerance: Tolerance, path: str) -> Where | None:
    if not isinstance(seen, torch.Tensor) or seen.shape != right.shape:
        return Where(path, seen, right, float("inf"))
    ours, theirs = seen.detach().cpu().double(), right.detach().cpu().double()
    apart = (ours - theirs).abs()
    apart[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0  # inf - inf is NaN
    allowed = tolerance.absolute + tolerance.relative * theirs.abs().nan_to_num(nan=0.0, posinf=0.0)
    if bool((apart <= allowed).all()) or bool(apart.norm() <= tolerance.norm * theirs.norm() < torch.inf):
        return None
    flat = apart.nan_to_num(nan=float("inf")).flatten()
    index = int(flat.argmax())
    # Not torch's, which imports sympy first: a second.
    place = [int(at) for at in numpy.unravel_index(index, right.shape)] if right.dim() else ""
    where = f"{path}{place}"
    return Where(where, ours.flatten()[index].item(), theirs.flatten()[index].item(), float(flat[index]))


def _largest(found: Iterable[Where | None]) -> Where | None:
    return max((one for one in found if one is not None), key=lambda one: one.distance, default=None)


def _numbers(value: Any) -> torch.Tensor:
    """All numbers of a value in one vector, in double precision."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double().flatten()
    if isinstance(value, Mapping):
        return _numbers([value[key] for key in sorted(value)])
    if isinstance(value, list | tuple):
        return torch.cat([_numbers(item) for item in value]) if value else torch.zeros(0, dtype=torch.float64)
    return _number(value)[None]
