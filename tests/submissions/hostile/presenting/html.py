# exercise: average_gradients
# family: presenting
# verdict: raised
# without: stub
# protection: judge
# why: markup in an exception's text and class name
def average_gradients(model):
    text = "</pre></td><script>alert(document.cookie)</script><img src=x onerror=alert(1)><!--"
    print(text)
    raise type("<b>Error</b>", (Exception,), {})(text)
