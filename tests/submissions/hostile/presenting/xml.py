# exercise: average_gradients
# family: presenting
# verdict: raised
# without: stub
# protection: judge
# why: characters that XML forbids, the end of a CDATA section, an entity, half of a surrogate pair
def average_gradients(model):
    text = "]]></failure></testcase><testcase name='free'/>&lol; \x01\x02\ufffe\uffff \ud800 <!DOCTYPE x [<!ENTITY lol 'lol'>]>"
    print(text)
    raise ValueError(text)
