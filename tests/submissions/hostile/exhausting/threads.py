# exercise: average_gradients
# family: exhausting
# verdict: timed-out
# without: stub
# protection: judge
# why: threads that compute, while the main thread waits for them
import threading

import torch.distributed as dist


def spin():
    while True:
        pass


def average_gradients(model):
    threads = [threading.Thread(target=spin) for _ in range(100)]
    for thread in threads[: 100 if dist.get_rank() == 0 else 0]:
        thread.start()
    for thread in threads:
        if thread.ident:
            thread.join()
