# exercise: average_gradients
# family: forging results
# verdict: not-averaged
# without: stub
# protection: judge
# why: the supervisor's own last word, from a rank; and what a rank may say, of wrong types
from lockstep.ranks import recorder


def average_gradients(model):
    send = recorder.current().send
    send({"event": "end", "members": [], "reason": "", "seconds": 0, "began": 0})
    send({"event": "events", "member": 0, "events": [{"event": "begin"}]})
    send({"event": "output", "rank": 0, "stream": "stdout", "text": "passed"})
    send({"event": "rank", "rank": {"a": 1}})
    send({"event": "watcher", "thread": "none"})
    send({"event": "replica", "optimizer": 0, "step": [], "names": 3})
    send({"event": "begin", "number": "one", "time": None})
    send({"event": "mark", "number": 1 << 70, "name": {}, "time": "now"})
    send({"event": "observe", "name": ["a"], "value": {"$tensor": 3}})
    send({"event": "sample", "id": 1, "stack": []})
    send({"event": "exit", "code": "zero", "frames": 7})
    send({"event": 5})
    send({})
