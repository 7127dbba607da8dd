# exercise: average_gradients
# family: presenting
# verdict: raised
# without: stub
# protection: judge
# why: the frames of its error lie in files and functions whose names are markup, escape sequences and formulas
NAMES = ("=cmd|' /C calc'!A0", "</code><script>x</script>", "\x1b]0;x\x07.py", "::error file=x::", "../../../etc/passwd", "\ud800.py", "a\0b", "[x](javascript:y)")


def average_gradients(model):
    def fall(names):
        if not names:
            raise ValueError("at the end")
        scope = {"fall": fall}
        name = names[0].replace("\0", "")
        code = compile("def f(names):\n    fall(names[1:])\n", name.encode("utf-8", "replace").decode(), "exec")
        exec(code, scope)
        scope["f"].__code__ = scope["f"].__code__.replace(co_name=name.encode("utf-8", "replace").decode())
        scope["f"](names)

    fall(NAMES)
