# diagnosis: through-one-rank
# why: rank 0 collects, adds and sends the sum to all
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    total = tensor.clone(memory_format=torch.contiguous_format)
    if r == 0:
        for other in range(1, n):
            part = torch.empty_like(total)
            dist.recv(part, other)
            total += part
        for other in range(1, n):
            dist.send(total, other)
    else:
        dist.send(total, 0)
        dist.recv(total, 0)
    tensor.copy_(total)
