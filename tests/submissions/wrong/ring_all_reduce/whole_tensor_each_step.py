# diagnosis: moves-whole-tensor
# why: whole tensors go round, and every rank adds up what passes
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    passing = tensor.clone(memory_format=torch.contiguous_format)
    total = tensor.clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(passing)
        work = dist.isend(passing, (r + 1) % n)
        dist.recv(incoming, (r - 1) % n)
        work.wait()
        total += incoming
        passing = incoming
    tensor.copy_(total)
