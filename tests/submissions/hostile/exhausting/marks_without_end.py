# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: stub
# protection: judge
# why: small events, each as large as an honest one, as many as the socket takes
import json
import struct

import torch.distributed as dist

from lockstep.ranks import recorder


def average_gradients(model):
    if dist.get_rank():
        return
    header = json.dumps({"event": "mark", "number": 1, "name": "m" * 3000, "time": 1}).encode()
    many = (struct.pack("!II", len(header), 0) + header) * 300
    while True:
        recorder.current().channel.socket.sendall(many)
