# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: sandbox
# why: leaves files in /dev/shm, in /tmp and at home
import os


def average_gradients(model):
    for folder in ("/dev/shm", "/tmp", "/var/tmp", os.path.expanduser("~")):
        try:
            with open(os.path.join(folder, "lockstep-hostile-left"), "wb") as file:
                file.write(bytes(1 << 20))
        except OSError:
            pass
