# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: sandbox
# why: fills /dev/shm; stops at 1.5 GiB if there is no limit, and then crashes
import os


def average_gradients(model):
    from torch import distributed as dist

    if dist.get_rank():
        return
    try:
        with open("/dev/shm/big", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 3 << 29)
            os.abort()  # seen in the verdict
    except OSError:
        pass
