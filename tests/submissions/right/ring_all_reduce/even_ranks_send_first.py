# style: blocking send and recv, rank 0 receives before it sends; the ring turns to the left; buffer padded
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    world = dist.get_world_size()
    rank = dist.get_rank()
    if world == 1:
        return
    length = -(-tensor.numel() // world)
    padded = torch.zeros(world, length, dtype=tensor.dtype, device=tensor.device)
    padded.view(-1)[: tensor.numel()] = tensor.reshape(-1)

    def shift(row: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(row)
        if rank == 0:
            dist.recv(received, src=(rank + 1) % world)
            dist.send(row, dst=(rank - 1) % world)
        else:
            dist.send(row, dst=(rank - 1) % world)
            dist.recv(received, src=(rank + 1) % world)
        return received

    if length:
        for step in range(1, world):
            padded[(rank + step) % world] += shift(padded[(rank + step - 1) % world])
        for step in range(world - 1):
            padded[(rank + step) % world] = shift(padded[(rank + step - 1) % world])
    tensor.copy_(padded.view(-1)[: tensor.numel()].view(tensor.shape))
