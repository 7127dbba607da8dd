# exercise: average_gradients
# family: exhausting
# verdict: timed-out
# without: stub
# protection: judge
# why: a child computes without end, and the rank waits for it
import os


def average_gradients(model):
    if os.fork() == 0:
        while True:
            pass
    os.wait()
