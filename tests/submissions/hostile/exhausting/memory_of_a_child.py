# exercise: average_gradients
# family: exhausting
# verdict: out-of-memory
# without: stub
# protection: judge
# why: the same in a child, whose memory is not the rank's
import os
import time


def average_gradients(model):
    if os.fork() == 0:
        held = []
        while len(held) < 80:
            held.append(bytearray(b"x") * (64 << 20))
        time.sleep(60)
    os.wait()
