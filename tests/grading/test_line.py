"""Which line of a submission a diagnosis points at."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.grading.submission import Submission

SOURCE = '''from rates import rate

def parse(text):
    return text

def rate(step):
    """rate(step) is what returns."""
    return step

class Job:
    def train(self, rate=1):
        # rate(0)
        lr = rate(1)
        return lr
'''


@pytest.mark.parametrize(
    ("patterns", "line"),
    [
        ("return", 4),
        ("in rate: return", 8),
        ("in train: return", 14),
        (r"in train: rate\(", 13),
        (r"in train: step || in rate: step", 8),
        ("in train: rate=1", None),  # the body, not the signature
        ("in nowhere: return", None),
        ("in nowhere: return || return", 4),
    ],
)
def test_line(tmp_path: Path, patterns: str, line: int | None) -> None:
    file = tmp_path / "job.py"
    file.write_text(SOURCE)
    assert Submission("job", file, file, "job.py").line(patterns) == line


def test_a_file_that_is_no_python_has_no_functions(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("def rate(:\n    return 1\n")
    assert Submission("job", file, file, "job.py").line("in rate: return || return") == 2
