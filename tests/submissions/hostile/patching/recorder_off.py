# exercise: ring_all_reduce
# family: patching
# verdict: no-communication
# without: wrong/ring_all_reduce/calls_all_reduce
# protection: judge
# why: a collective that the recorder is kept from seeing
import torch.distributed as dist

from lockstep.ranks import recorder


def ring_all_reduce(tensor):
    mine, recorder._current = recorder._current, None
    whole = tensor.contiguous()
    dist.all_reduce(whole)
    tensor.copy_(whole)
    recorder._current = mine
