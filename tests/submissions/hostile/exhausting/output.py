# exercise: average_gradients
# family: exhausting
# verdict: too-much-output
# without: stub
# protection: judge
# why: prints without end
def average_gradients(model):
    while True:
        print("x" * 10_000)
