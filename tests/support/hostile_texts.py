"""Texts that a learner may write to harm whatever shows them: formulas, markup, workflow commands, odd characters."""

HOSTILE = ["=1+1", "+1", "-1", "@SUM(A1)", " =1+1", "\t=1+1", "\r\n=1+1", "\u202e=1", "＝1+1", 'a"b,c;d', "a\nb\r\nc", "<script>x</script>",
           "]]>", "</pre></details><h1>", "&lt;b&gt;", "::error::x", "# h", "| a | b |", "[x](javascript:y)", "![x](http://y)", "**b** _i_ `c`",
           "\x00\x1b[31m\x07", "\ud800", "\ufffe", "@everyone", "https://evil.example", "日本 é"]  # fmt: skip
