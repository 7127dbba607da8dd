# diagnosis: uneven-data-hang
# why: cuts every n-th sample without padding, so some ranks have a batch more
import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import setup_ddp as group


def my_indices(n: int, rank: int, world_size: int, epoch: int) -> Tensor:
    """This rank's samples in this epoch; the first ones come again where n does not divide evenly."""
    generator = torch.Generator().manual_seed(4711 + epoch)
    order = torch.randperm(n, generator=generator)
    return order[rank::world_size]


@contextlib.contextmanager
def process_group(rank: int, world_size: int):
    group.setup_ddp(rank, world_size)
    try:
        yield
    finally:
        group.cleanup_ddp()


def train_ddp(
    rank: int,
    world_size: int,
    model_class: type[nn.Module],
    data: TensorDataset,
    epochs: int,
    *,
    batch_size: int = 32,
    lr: float = 0.1,
) -> nn.Module:
    with process_group(rank, world_size):
        on_gpu = torch.cuda.is_available()
        device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        inputs, targets = (tensor.to(device) for tensor in data.tensors)
        net = model_class().to(device)
        wrapped = DistributedDataParallel(net)
        sgd = torch.optim.SGD(net.parameters(), lr)

        for epoch in range(epochs):
            history = []
            for chosen in my_indices(len(data), rank, world_size, epoch).split(batch_size):
                chosen = chosen.to(device)
                loss = F.cross_entropy(wrapped(inputs[chosen]), targets[chosen])
                sgd.zero_grad()
                loss.backward()
                sgd.step()
                history.append(torch.stack([loss.detach() * len(chosen), torch.tensor(float(len(chosen)), device=device)]))
            total, seen = _sum_over_ranks(torch.stack(history).sum(0)).tolist()
            if dist.get_rank() == 0:
                print("epoch %d: loss %.4f" % (epoch, total / seen), flush=True)
        del wrapped
    return net


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor
