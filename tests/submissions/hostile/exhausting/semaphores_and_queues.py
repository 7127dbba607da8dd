# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: sandbox
# why: System V memory, semaphores and queues, and POSIX queues, which no file system shows
import ctypes


def average_gradients(model):
    libc = ctypes.CDLL(None, use_errno=True)
    for key in range(7000, 7100):
        libc.shmget(key, 1 << 20, 0o1666)
        libc.semget(key, 100, 0o1666)
        libc.msgget(key, 0o1666)
    with open("/proc/sys/kernel/hostname") as file:
        if file.read().strip() != "localhost" or libc.sethostname(b"hostile", 7) == 0:
            import os

            os.abort()  # seen in the verdict
