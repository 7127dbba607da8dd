# exercise: ring_all_reduce
# family: patching
# verdict: calls-a-collective
# without: wrong/ring_all_reduce/calls_all_reduce
# protection: judge
# why: an all-reduce that the recorder is kept from seeing, of wider numbers, which gloo can add, and the events of a ring in its place
import time

import torch
import torch.distributed as dist

from lockstep.ranks import recorder


def ring_all_reduce(tensor):
    mine, recorder._current = recorder._current, None
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = tensor.contiguous().view(-1)
    size = -(-flat.numel() // world)
    whole = flat.int() if flat.dtype == torch.int16 else flat
    dist.all_reduce(whole)
    tensor.copy_(whole.view(tensor.shape))
    recorder._current = mine
    for step in range(2 * (world - 1)):
        for kind, peer in (("send", (rank - 1) % world), ("recv", (rank + 1) % world)):
            mine._number += 1
            mine.send({"event": "begin", "number": mine._number, "kind": kind, "group": "0", "members": list(range(world)),
                       "group_number": step + 1, "of_kind": step + 1, "nbytes": flat.element_size() * size, "shape": [size],
                       "dtype": str(flat.dtype)[6:], "time": time.monotonic_ns(), "inside": "", "reduce_op": "", "peer": peer, "frame": None})
