"""Which samples ranks should read: those that DistributedSampler deals out."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DistributedSampler


def orders(samples: int, world_size: int, epochs: int) -> Iterator[list[list[int]]]:
    """Of each epoch: the indices of each rank, in order. The samplers are told the epoch."""
    dealers: list[DistributedSampler[int]] = [
        DistributedSampler(range(samples), world_size, rank)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    for epoch in range(epochs):
        for dealer in dealers:
            dealer.set_epoch(epoch)
        yield [list(dealer) for dealer in dealers]
