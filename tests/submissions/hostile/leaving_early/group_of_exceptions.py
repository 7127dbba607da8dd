# exercise: average_gradients
# family: leaving early
# verdict: raised
# without: stub
# protection: judge
# why: exceptions within each other, deeper than who prints them can follow, and a chain that ends in itself
def average_gradients(model):
    inner = ValueError("innermost")
    for number in range(20_000):
        inner = ExceptionGroup(str(number), [inner])
    chain = [RuntimeError(str(number)) for number in range(20_000)]
    for one, following in zip(chain, chain[1:]):
        one.__context__ = following
    inner.__cause__ = chain[0]
    raise inner
