# diagnosis: wrong-number-of-steps
# why: each chunk goes in two messages
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * (n - 1)):
        give, take = chunks[(r - step) % n], chunks[(r - step - 1) % n]
        buffer = torch.empty_like(take)
        works = [dist.isend(half, (r + 1) % n) for half in give.tensor_split(2)]
        for half in buffer.tensor_split(2):
            dist.recv(half, (r - 1) % n)
        for work in works:
            work.wait()
        if step < n - 1:
            take += buffer
        else:
            take.copy_(buffer)
    tensor.copy_(flat.view_as(tensor))
