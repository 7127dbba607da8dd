"""Exercise ring_all_reduce: build an all-reduce from messages between neighbors.

Chapter 1, "All-reduce by hand". To see it at work on four ranks:

    torchrun --nproc-per-node=4 exercises/ring_all_reduce.py
"""

import os
import sys

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place. Every rank passes the same shape and dtype; strides may differ.

    The process group already exists. Use only point-to-point calls (`send`, `recv`, `isend`, `irecv`,
    `batch_isend_irecv`). Each rank sends to one neighbor and receives from the other, so the messages travel around a
    ring. With N ranks, cut the tensor into N chunks that are as equal as possible (padding with zeros is fine):

    - reduce-scatter, N - 1 steps: each rank passes a chunk on and adds the chunk that it receives to its own.
      Afterwards each rank holds the full sum of one chunk.
    - all-gather, N - 1 steps: the full sums travel around the ring.

    So each rank sends 2 * (N - 1) messages of about 1/N of the tensor each (empty chunks may be left out). Together that
    is 2 * (N - 1) / N of the tensor: less than two tensors, even with a thousand ranks.

    It works with any number of ranks (one rank has nothing to do) and with any tensor: a length that N doesn't divide,
    fewer elements than ranks, no elements, any number of dimensions, and views whose elements aren't contiguous in
    memory (the memory between them must not change).

    Args:
        tensor: this rank's values; afterwards the sum.
    """
    # --- solution: sum round the ring ---
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1 or tensor.numel() == 0:
        return

    flat = tensor.detach().contiguous().view(-1)  # a view of the tensor, or of a copy where its elements lie apart
    chunks = flat.tensor_split(world_size)  # exactly world_size of them; the first ones may be one element longer
    incoming = torch.empty_like(chunks[0])

    # Chunk c starts on its way at rank c, and is complete when it reaches rank c - 1.
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        mine = chunks[(rank - step - 1) % world_size]
        _pass_on(outgoing, incoming[: len(mine)])
        mine += incoming[: len(mine)]

    for step in range(world_size - 1):
        complete = chunks[(rank - step + 1) % world_size]
        _pass_on(complete, chunks[(rank - step) % world_size])

    tensor.detach().copy_(flat.view_as(tensor))  # of no effect where flat is a view of it
    # --- end ---


# --- solution-only ---
def _pass_on(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the right while receiving from the left."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    # Both are started before either is waited for: a send ends only when it is received, and if every rank waited for
    # its own send first, nobody would ever receive.
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size),
    ])  # fmt: skip
    for work in works:
        work.wait()


# --- end ---


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()
    tensor = torch.arange(6.0) * 10**rank
    print(f"rank {rank} before: {tensor.tolist()}", flush=True)
    ring_all_reduce(tensor)
    print(f"rank {rank} after:  {tensor.tolist()}", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)

# lockstep-canary: 63358c0d214d0427
