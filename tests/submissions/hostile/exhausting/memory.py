# exercise: average_gradients
# family: exhausting
# verdict: out-of-memory
# without: stub
# protection: judge
# why: takes memory until somebody stops it
def average_gradients(model):
    held = []
    while len(held) < 80:
        held.append(bytearray(b"x") * (64 << 20))
