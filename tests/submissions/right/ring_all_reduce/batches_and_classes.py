# style: a class that keeps the place in the ring; batch_isend_irecv; empty chunks are not sent
import torch
import torch.distributed as dist


class Ring:
    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.me = dist.get_rank()

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        ops = []
        if out.numel():
            ops.append(dist.P2POp(dist.isend, out, (self.me + 1) % self.size))
        if into.numel():
            ops.append(dist.P2POp(dist.irecv, into, (self.me + self.size - 1) % self.size))
        if ops:
            for request in dist.batch_isend_irecv(ops):
                request.wait()


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    edges = [length * i // parts for i in range(parts + 1)]
    return list(zip(edges, edges[1:]))


@torch.no_grad()
def ring_all_reduce(tensor: torch.Tensor) -> None:
    ring = Ring()
    if ring.size == 1:
        return
    work = tensor.flatten().clone()
    cuts = bounds(work.numel(), ring.size)
    index = ring.me
    for _ in range(ring.size - 1):
        a, b = cuts[index]
        index = (index - 1) % ring.size
        c, d = cuts[index]
        scratch = work.new_empty(d - c)
        ring.exchange(work[a:b], scratch)
        work[c:d].add_(scratch)
    for _ in range(ring.size - 1):
        a, b = cuts[index]
        index = (index - 1) % ring.size
        c, d = cuts[index]
        ring.exchange(work[a:b].clone(), work[c:d])
    tensor.copy_(work.reshape(tensor.shape))
