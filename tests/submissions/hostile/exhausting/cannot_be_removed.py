# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: judge
# why: folders without permissions within folders without permissions, and a file that is always written to again
import os
import time


def average_gradients(model):
    where = f"closed{os.getpid()}"
    os.makedirs(os.path.join(where, "a", "b", "c"))
    for inner in ("a/b/c", "a/b", "a", ""):
        os.chmod(os.path.join(where, inner), 0)
    if os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                os.makedirs("again/and/again", exist_ok=True)
                open("again/and/again/x", "w").close()
            except OSError:
                pass
        os._exit(0)
