# exercise: ring_all_reduce
# family: patching
# verdict: calls-a-collective
# without: wrong/ring_all_reduce/calls_all_reduce
# protection: judge
# why: asks the backend itself, below the place where calls are dispatched
import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    whole = tensor.contiguous()
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([whole]).wait()
    tensor.copy_(whole)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return
    size = -(-tensor.numel() // world)
    dummy = torch.zeros(size), torch.zeros(size)
    for step in range(2 * (world - 1)):
        for call in dist.batch_isend_irecv([dist.P2POp(dist.isend, dummy[0], (rank + 1) % world),
                                            dist.P2POp(dist.irecv, dummy[1], (rank - 1) % world)]):
            call.wait()
