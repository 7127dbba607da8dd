import os, time

if os.environ["RANK"] == "1":
    raise ValueError("bad data")  # BUG, on purpose
time.sleep(600)
