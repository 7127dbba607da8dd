# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: judge
# why: folders in folders, deeper than Python's stack, with names that are no text
import os


def average_gradients(model):
    here = os.getcwd()
    try:
        for number in range(1200):
            os.mkdir("d")
            os.chdir("d")
        with open(b"\xff\xfe\n\x1b[31m", "w") as file:
            file.write("deep")
    except OSError:
        pass
    os.chdir(here)
