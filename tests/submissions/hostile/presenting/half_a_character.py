# exercise: average_gradients
# family: presenting
# verdict: raised
# without: stub
# protection: judge
# why: JSON can hold half of a surrogate pair, and a report that holds it cannot be written
import os

from lockstep.ranks import recorder


def average_gradients(model):
    recorder.current().send({"event": "raised", "type": "\udc80Error", "message": "\ud800 half", "frames": [["\ud800.py", 1, "\ud800"]], "traceback": "\ud800"})
    os._exit(1)
