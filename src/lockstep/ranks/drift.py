"""From what the replicas were to why they parted: reads what `comparison` has kept.

Pure functions. Copies of a model that start equal and take the same averaged gradients stay equal bit for bit, so the
first step at which they differ stands next to the cause: no averaging before it, other settings, another order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .comparison import titles
from .messages import Compared, Replica
from .report import Blowup, Drift, Frame, RankReport, Replicas
from .words import at, names, one_or_more


def read(found: Compared, reports: list[RankReport]) -> Replicas:
    """The findings of a watched run."""
    return Replicas(
        compared=found.compared,
        steps=tuple(found.steps),
        same_work=found.same_work,
        statistics=tuple(found.statistics),
        drift=_drift(found, found.first, reports) if found.first else None,
        blowup=_blowup(found) if found.not_finite else None,
    )


def _blowup(found: Compared) -> Blowup:
    step = min(word.step for _, word in found.not_finite)
    words = {rank: word for rank, word in found.not_finite if word.step == step}
    first = next(iter(words.values()))
    brought = tuple(rank for rank, word in words.items() if word.brought)
    averaged = any(word.averaged for word in words.values())
    return Blowup(
        step,
        first.parameter,
        first.value,
        tuple(words),
        first.gradient,
        brought if averaged else None,
        Frame.of(first.frame),
    )


def _drift(found: Compared, words: list[Replica], reports: list[RankReport]) -> Drift:
    called = _called(found, words)
    every = [dict(zip(called[rank], word.parameters, strict=True)) for rank, word in enumerate(words)]
    differing = [title for title in called[0] if len({one.get(title) for one in every}) > 1] or called[0][:1]
    tensor = differing[0]
    odd = _odd([one.get(tensor) for one in every])
    step = words[0].step
    return Drift(
        step=step,
        tensor=tensor,
        tensors=len(differing),
        of=len(called[0]),
        ranks=tuple(odd),
        amount=_amount(found, words, tensor),
        reason=_reason(found, words, differing, step, reports),
        frame=Frame.of(words[odd[0]].frame),
    )


def _called(found: Compared, words: list[Replica]) -> list[list[str]]:
    return [titles(found.names[rank], word) for rank, word in enumerate(words)]


def _odd(values: list[Any]) -> list[int]:
    """The ranks that do not have what most have; without a majority, all."""
    value, count = Counter(values).most_common(1)[0]
    if count * 2 <= len(values):
        return list(range(len(values)))
    return [rank for rank, own in enumerate(values) if own != value]


def _amount(found: Compared, words: list[Replica], tensor: str) -> float | None:
    """The largest difference among the sampled values of the tensor; None before the first step."""
    samples = []
    for word, called in zip(words, _called(found, words), strict=True):
        if not word.sampled or tensor not in called:
            return None
        samples.append(word.sampled[called.index(tensor)])
    return max((abs(a - b) for own in samples for a, b in zip(own, samples[0], strict=False)), default=None)


def _reason(found: Compared, words: list[Replica], differing: list[str], step: int, reports: list[RankReport]) -> str:
    orders = [tuple(order) for order in found.names]
    if len(set(orders)) > 1 and len({tuple(sorted(order)) for order in orders}) == 1:
        other = _odd(list(orders))
        return (
            f"{names(other)} registered {one_or_more(other, 'its', 'their')} layers in another order, and DDP pairs "
            "parameters and gradients by that order, not by name"
        )
    if step == 0:
        wrapped = [call for report in reports for call in report.collectives if call.inside == "DDP()"]
        after = f", though DDP() had made all ranks equal{at(wrapped[0].frame)}" if wrapped else ""
        return f"they differed before the first step{after}"
    if between := _between_steps(found, words, differing[0], step):
        return between
    settings = [repr(word.settings) for word in words]
    if len(set(settings)) > 1 and _equal_gradients(words):
        return _other_settings(words, settings)
    reduced = [sum(nbytes for _, nbytes in word.brought) for word in words]
    if not any(reduced):
        through = any(word.wrapped_forward for word in words)
        return "no rank averaged a gradient before that step" + _without(reports, through)
    if 0 in reduced:
        without = [rank for rank, count in enumerate(reduced) if not count]
        return f"{names(without)} averaged no gradient before that step, the others did"
    if _equal_gradients(words):
        return "all ranks used the same gradients, and their optimizers made something else of them (other state?)"
    every = enumerate(_called(found, words)[0])
    own = [one for number, one in every if len({word.gradients[number] for word in words}) > 1]
    if len(own) < len(words[0].gradients):
        return (
            f"{_listed(own)} had gradients of each rank's own, those of {len(words[0].gradients) - len(own)} others were "
            "averaged: layers made or replaced after DDP(), or gradients changed after backward"
        )
    return (
        "their gradients differed, though DDP had averaged some: changed after it, or averaged over a part of the ranks"
    )


def _between_steps(found: Compared, words: list[Replica], tensor: str, step: int) -> str:
    """Who changed the parameter after the step before, if somebody did."""
    called = _called(found, words)
    changed = [any(called[rank][number] == tensor for number in word.changed) for rank, word in enumerate(words)]
    ranks = [rank for rank, did in enumerate(changed) if did]
    if not ranks:
        return ""
    who = "every rank" if all(changed) else names(ranks)
    return (
        f"{who} changed it between step {step - 1} and step {step}, outside of the optimizer (clamped, loaded, reset?)"
    )


def _listed(titles: list[str]) -> str:
    more = f" and {len(titles) - 2} more" if len(titles) > 3 else ""
    shown = titles[:2] if more else titles
    return (", ".join(shown[:-1]) + (", " if more else " and ") + shown[-1] if len(shown) > 1 else shown[0]) + more


def _equal_gradients(words: list[Replica]) -> bool:
    return all(word.gradients == words[0].gradients for word in words)


def _other_settings(words: list[Replica], settings: list[str]) -> str:
    other = _odd(list(settings))
    usual = next((rank for rank in range(len(words)) if rank not in other), 0)
    odd = next((rank for rank in other if rank != usual), other[0])
    for mine, theirs in zip(words[odd].settings, words[usual].settings, strict=False):
        for key in mine:
            if mine[key] != theirs.get(key):
                return f"{key} is {mine[key]} on rank {odd} and {theirs.get(key)} on rank {usual}"
    return f"{names(other)} {one_or_more(other, 'has', 'have')} another number of parameter groups"


def _without(reports: list[RankReport], through: bool) -> str:
    """What DDP had to do with a step in which it averaged nothing; `through` tells that its forward ran."""
    if not any(call.inside == "DDP()" for call in reports[0].collectives):
        return " (no model is wrapped in DDP)"
    if through:
        return (
            ": DDP's forward ran and its hooks stayed silent, so the model was under no_sync, or was cast, moved or "
            "replaced after DDP()"
        )
    return ": DDP() wrapped a model, and the forward did not go through it"
