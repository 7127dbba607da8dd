# diagnosis: not-a-ring
# why: each rank sends its chunks straight to those who want them
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    others = [other for other in range(n) if other != r]
    sends = [dist.isend(chunks[other].clone(), other) for other in others]
    for other in others:
        part = torch.empty_like(chunks[r])
        dist.recv(part, other)
        chunks[r].add_(part)
    for send in sends:
        send.wait()
    sends = [dist.isend(chunks[r], other) for other in others]
    for other in others:
        dist.recv(chunks[other], other)
    for send in sends:
        send.wait()
    tensor.copy_(flat.view_as(tensor))
