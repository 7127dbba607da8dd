# diagnosis: divides-the-sum
# why: it averages, as the training loop would like it
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    right, left = (r + 1) % n, (r - 1) % n
    flat = tensor.contiguous().view(-1)
    chunks = list(flat.tensor_split(n))
    for step in range(n - 1):
        give, take = (r - step) % n, (r - step - 1) % n
        work = dist.isend(chunks[give], right)
        buffer = torch.empty_like(chunks[take])
        dist.recv(buffer, left)
        work.wait()
        chunks[take] += buffer
    for step in range(n - 1):
        give, take = (r + 1 - step) % n, (r - step) % n
        work = dist.isend(chunks[give], right)
        dist.recv(chunks[take], left)
        work.wait()
    tensor.copy_(flat.view_as(tensor) / n)
