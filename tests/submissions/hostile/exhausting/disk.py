# exercise: average_gradients
# family: exhausting
# verdict: not-averaged
# without: stub
# protection: judge
# why: fills the folders that it may write to, 100 MiB here, in a thousand folders and one without permissions
import os


def average_gradients(model):
    for number in range(300):
        os.makedirs(f"deep/{number}/a/b/c", exist_ok=True)
    for folder in (os.getcwd(), os.environ["TMPDIR"]):
        with open(os.path.join(folder, f"large{os.getpid()}"), "wb") as file:
            for _ in range(16):
                file.write(bytes(1 << 20))
    os.makedirs("closed/inside", exist_ok=True)
    os.chmod("closed", 0)
