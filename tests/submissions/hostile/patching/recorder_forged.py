# exercise: ring_all_reduce
# family: patching
# verdict: calls-a-collective
# without: wrong/ring_all_reduce/calls_all_reduce
# protection: not defended
# why: a collective that the recorder is kept from seeing, and the events of a ring in its place
import time

import torch.distributed as dist

from lockstep.ranks import recorder


def ring_all_reduce(tensor):
    mine, recorder._current = recorder._current, None
    whole = tensor.contiguous()
    dist.all_reduce(whole)
    tensor.copy_(whole)
    recorder._current = mine
    rank, world = dist.get_rank(), dist.get_world_size()
    size = -(-tensor.numel() // world)
    for step in range(2 * (world - 1)):
        for kind, peer in (("send", (rank + 1) % world), ("recv", (rank - 1) % world)):
            mine._number += 1
            mine.send({"event": "begin", "number": mine._number, "kind": kind, "group": "0", "members": list(range(world)),
                       "group_number": step + 1, "of_kind": step + 1, "nbytes": 4 * size, "shape": [size], "dtype": "float32",
                       "time": time.monotonic_ns(), "inside": "", "reduce_op": "", "peer": peer, "frame": None})
