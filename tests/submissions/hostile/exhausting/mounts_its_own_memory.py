# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: sandbox
# why: a user namespace inside the sandbox mounts memory that no limit counts; were it allowed, the run would crash
import ctypes
import os

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000


def average_gradients(model):
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()  # a process with one thread may
    if not child:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None):
            os._exit(0)
        with open("/tmp/big", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        os._exit(1)
    if os.waitpid(child, 0)[1]:
        os.abort()  # seen in the verdict
