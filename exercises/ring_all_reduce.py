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
    raise NotImplementedError("ring_all_reduce: sum round the ring")


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
