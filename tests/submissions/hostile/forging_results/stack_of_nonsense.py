# exercise: average_gradients
# family: forging results
# verdict: order-differs
# without: stub
# protection: judge
# why: it hangs, and answers the supervisor's question for its stack with nonsense of the right types
import torch
import torch.distributed as dist

from lockstep.ranks import recorder

DETAIL = {"call": {"deep": [[[]]]}, "rank": -1, "group": 10**300, "shape": "x", "": None, "seq": [1, {}], "kind": "\x1b[2J"}


def average_gradients(model):
    me = recorder.current()
    usual = me.send

    def send(message, *more):
        if type(message).__name__ == "Sample":
            message = {"event": "sample", "id": message.id, "stack": {
                "frame": ["/etc/passwd", -(10**300), "f" * 1000], "call": "all_reduce\x1b[2J", "operation": -(10**300),
                "pending": [10**300, -1], "threads": 10**300, "detail": DETAIL, "innermost": "\u202e"}}
        return usual(message, *more)

    me.send = send
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.barrier()
