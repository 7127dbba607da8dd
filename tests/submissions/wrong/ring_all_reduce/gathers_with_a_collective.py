# diagnosis: calls-a-collective
# why: the second half is left to all_gather
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
    if n > 1:
        longest = chunks[0].numel()
        mine = torch.zeros(longest)
        mine[: chunks[(r + 1) % n].numel()] = chunks[(r + 1) % n]
        everyones = [torch.zeros(longest) for _ in range(n)]
        dist.all_gather(everyones, mine)
        for rank, chunk in enumerate(everyones):
            place = chunks[(rank + 1) % n]
            place.copy_(chunk[: place.numel()])
    tensor.copy_(flat.view_as(tensor))
