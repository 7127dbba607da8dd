# style: everything in one long tensor, flags at its end
import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained]
    flags = [torch.tensor([p.grad is not None for p in trained], dtype=torch.float32, device=trained[0].device)]
    flat = torch.cat(pieces + flags)
    dist.all_reduce(flat)
    counts = flat[-len(trained) :]
    flat = flat / dist.get_world_size()
    start = 0
    for parameter, count in zip(trained, counts):
        piece = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        if count > 0:
            parameter.grad = piece.to(parameter.dtype).clone()
