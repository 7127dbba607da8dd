"""Patches without line numbers: what they may say, that they fit or fail loudly, and that made ones are short and true."""

from __future__ import annotations

import random

import pytest

from lockstep.authoring import patch
from lockstep.authoring.patch import PatchError

TEXT = """\
import torch


def first(x):
    y = x + 1
    dist.barrier()
    return y


def second(x):
    z = x * 2
    dist.barrier()
    return z
"""


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        ("-    y = x + 1\n+    y = x\n", "y = x + 1", "y = x"),
        ("     z = x * 2\n-    dist.barrier()\n", "z = x * 2\n    dist.barrier()", "z = x * 2"),
        ("-import torch\n+import numpy\n@@\n-    return z\n", "import torch", "import numpy"),
        ("+import os\n import torch\n", "import torch", "import os\nimport torch"),
        ("     return y\n\n\n+@cached\n def second(x):\n", "def second", "@cached\ndef second"),
        ("-    y = x + 1\n...\n-    return y\n+    pass\n", "y = x + 1\n    dist.barrier()\n    return y", "pass"),
        ("-    y = x + 1\n...\n     return y\n", "    y = x + 1\n    dist.barrier()\n", ""),
        ("     return z\n+\n+    # the end\n", "return z\n", "return z\n\n    # the end\n"),
    ],
)
def test_what_a_change_may_say(change: str, old: str, new: str) -> None:
    expected = TEXT.replace(old, new)
    if "@@" in change:
        expected = expected.replace("    return z\n", "")
    assert patch.apply(change, TEXT) == expected != TEXT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("-    y = x + 2\n", "its change is not in the text:\n    -    y = x + 2\n"),
        ("-    y = x + 2\n", "\n  the nearest place there:\n         y = x + 1"),
        ("-    dist.barrier()\n", "its change fits in 2 places"),
        ("-import torch\n@@\n-    return\n", "hunk 2 of 2 is not in the text"),
        ("-    return z\n@@\n-import torch\n", "hunk 2 of 2 belongs before the hunk above it"),
        ("-    return y\n@@\n-    return y\n", "hunk 2 of 2 belongs before the hunk above it"),
        ("+import os\n", "its change has no context and no removed line,"),
        ("-    y = x + 1\n...\n+    pass\n", "its change has no context and no removed line after ..."),
        ("...\n-    return y\n", "needs a removed line before ..."),
        ("     y = x + 1\n...\n-    return y\n", "needs a removed line before ..."),
        ("     return y\n", "its change changes nothing"),
        ("    return y\n-    y = x + 1\n", "its change is not in the text"),
        ("*    return y\n", "begins with none of"),
        ("", "its change changes nothing"),
        ("-import torch\n@@\n", "hunk 2 of 2 has no context"),
    ],
)
def test_what_does_not_fit_is_said(change: str, said: str) -> None:
    with pytest.raises(PatchError) as error:
        patch.apply(change, TEXT)
    assert said in str(error.value)


def test_a_made_change_is_as_short_as_it_can_be() -> None:
    """A line that is there twice gets one beside it; what is near shares a hunk; a long run is not spelt out."""
    one = TEXT.replace("z = x * 2\n    dist.barrier()", "z = x * 2")
    assert patch.make(TEXT, one) == "     z = x * 2\n-    dist.barrier()\n"
    two = TEXT.replace("y = x + 1", "y = x").replace("return y", "return -y")
    assert patch.make(TEXT, two) == "-    y = x + 1\n+    y = x\n     dist.barrier()\n-    return y\n+    return -y\n"
    long = "".join(f"line {number}\n" for number in range(20))
    assert patch.make(long, "line 0\nline 19\n") == "-line 1\n...\n-line 18\n"
    assert patch.make(long.replace("line 7\n", "line 1\n"), "line 0\nnew\nline 19\n").startswith(
        "-line 1\n-line 2\n...\n"
    )


def test_any_change_of_any_text() -> None:
    """Texts of few different lines, where hardly any is unique: what is made always gives the other text."""
    draw = random.Random(5)
    lines = ["", "a", "b", "    c", "-d", "...", "@@", " e"]
    for _ in range(3000):
        old = [draw.choice(lines) for _ in range(draw.randrange(1, 25))]
        new = list(old)
        for _ in range(draw.randrange(1, 5)):
            at, length = draw.randrange(len(new) + 1), draw.choice((0, 1, 2, 12))
            new[at : at + length] = draw.choices(lines, k=draw.randrange(3))
        text, changed = ("".join(f"{line}\n" for line in one) or "\n" for one in (old, new))
        if text != changed:
            assert patch.apply(patch.make(text, changed), text) == changed
