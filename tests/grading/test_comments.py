"""A teacher's comment is Markdown; whatever stands in it, nothing acts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.hostile_texts import HOSTILE

from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.exports.class_page import class_page
from lockstep.grading.exports.gradebooks import moodle_csv
from lockstep.grading.exports.html_report import html_report
from lockstep.grading.exports.markdown import rendered
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Accommodation, Mark, Policy, Rounding, apply
from lockstep.grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report

DONE = ExerciseResult("train_ddp", (CheckResult("a", "test_a", CheckOutcome.PASSED),))
TAGS = r"</?(?:p|ul|li|strong|em|code)>|<pre tabindex=\"0\">|</pre>|<a href=\"https?://[^\s<>\"']+\" rel=\"noreferrer\">|</a>"
MORE = [
    "[x](javascript:alert(1))", "[x](data:text/html,<b>)", "[x](JaVaScRiPt:alert(1))", "[x](https://a\"onclick=y)", "[x](https://a' onclick='y)",
    "[<img src=x>](https://a.example/<script>)", "![x](https://evil.example/pixel.png)", "<a href=javascript:x>y</a>", "**<svg/onload=x>**",
    "`</code><script>x</script>`", "```\n</pre><script>x</script>\n```", "```html\nnever closed <script>", "- <b>\n- [x](vbscript:y)",
    "[a]: javascript:x\n[a]", "<https://evil.example>", "&#106;avascript:x", "*" * 10_000, "_a" * 5_000, "[" * 10_000, "`" * 9_999, "** a" * 2_500, "- " * 5_000,
    "[x](" * 2_500, "**_`*" * 2_000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Good.", "<p>Good.</p>"),
        ("a\nb\n\nc", "<p>a b</p><p>c</p>"),
        ("**Good** idea, *but* `x < 1`", "<p><strong>Good</strong> idea, <em>but</em> <code>x &lt; 1</code></p>"),
        ("see setup_ddp and train_ddp: 2 * 3 * 4", "<p>see setup_ddp and train_ddp: 2 * 3 * 4</p>"),
        ("_so_ **with `code` _in_ it**", "<p><em>so</em> <strong>with <code>code</code> <em>in</em> it</strong></p>"),
        ("two:\n- one\n  more\n* two", "<p>two:</p><ul><li>one more</li><li>two</li></ul>"),
        ("so\n```python\nif x:\n    y\n```\nnot", '<p>so</p><pre tabindex="0">if x:&#10;    y</pre><p>not</p>'),
        ("[docs](https://a.example/b?c=d&e)", '<p><a href="https://a.example/b?c=d&amp;e" rel="noreferrer">docs</a></p>'),
    ],
)  # fmt: skip
def test_markdown(text: str, shown: str) -> None:
    assert rendered(text) == shown


@pytest.mark.parametrize("text", [*HOSTILE, *MORE], ids=range(len(HOSTILE) + len(MORE)))
def test_nothing_in_a_comment_acts(text: str) -> None:
    """What is left without our own tags holds no markup; and it is one line, for a cell of a gradebook."""
    shown = str(rendered(text))
    assert not re.search(r"[<>\"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", re.sub(TAGS, "", shown))
    assert "\n" not in shown
    assert set(re.findall(r'href="(.{7})', shown)) <= {"https:/", "http://"}


def test_where_a_comment_is_read() -> None:
    handed = Handed("ada", "Ada", Path("/nowhere"), (), account="moodle 11")
    graded = ClassResult(7, ("train_ddp",), (Learner(handed, Report(7, (DONE,)), 7),), max_scores={"train_ddp": 1})
    own = Accommodation(comment="*On* all <i>", marks={"train_ddp": Mark(comment="**Good**", points=None)})
    grades = apply(Policy(learners={"ada": own}), graded)
    page = html_report(graded.learners[0], grades["ada"])
    assert "<strong>Good</strong>" in page and "<em>On</em> all &lt;i&gt;" in page and "From your teacher" in page
    overview = class_page(graded, grades=grades)
    assert "Entered by hand: 1" in overview and "<strong>Good</strong>" in overview and "<i>" not in overview
    assert "<strong>Good</strong>" in moodle_csv(graded, grades, Rounding())
    assert "by hand" not in class_page(graded, grades=apply(Policy(), graded))
