# exercise: average_gradients
# family: presenting
# verdict: raised
# without: stub
# protection: judge
# why: what template engines, shells, LaTeX and regular expressions would take for theirs
def average_gradients(model):
    text = "{0.__class__} {self} %s %(x)s %n $(id) `id` ${HOME} {{7*7}} {% raw %} \\1 \\g<0> (?P<x>.*) \\input{/etc/passwd} <%= 1 %> &lt; &#x3C;script&#x3E; %0d%0aSet-Cookie"
    print(text)
    raise ValueError(text)
