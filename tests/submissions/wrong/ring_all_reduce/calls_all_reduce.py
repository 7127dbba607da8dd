# diagnosis: calls-a-collective
# why: the library does the work
import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    data = tensor.contiguous()
    dist.all_reduce(data)
    tensor.copy_(data)
