"""What the judge does with bytes of strangers, on whatever Hypothesis thinks of: sources, archives, what ranks say, texts.

LOCKSTEP_FUZZ=100000 tries so many of each, instead of a few.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import tempfile
import unicodedata
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import ROOT, hostile_sources
from support.one_learner import class_of

from lockstep.grading.archives import Budget, Refused, members, printable
from lockstep.grading.exports import csv_grades, gradescope, junit, summary_md
from lockstep.grading.exports.markdown import rendered
from lockstep.grading.hypotheses import EXACT, Each, difference, show, wrong_ranks
from lockstep.grading.policy import Policy, apply
from lockstep.grading.text import harmless, report_text
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report, from_json
from lockstep.ranks import client, leftovers
from lockstep.ranks.channel import HEADER, Channel, ChannelError, decode, whole
from lockstep.ranks.messages import Begin, End, FromRank, Mark, Observe, Raised, Show, Waited, read
from lockstep.ranks.report import RankReport
from lockstep.ranks.text import Row

pytest.importorskip("hypothesis", reason="pip install --group dev")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

bounded = settings(
    max_examples=int(os.environ.get("LOCKSTEP_FUZZ", "40")), deadline=None, database=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

pieces = st.sampled_from((*hostile_sources.PIECES, *hostile_sources.CORPUS.values()))
sources = st.lists(st.one_of(pieces, st.text(max_size=40)), max_size=12).map(lambda parts: "".join(parts)[: 1 << 18])
texts = st.one_of(
    st.text(max_size=200), st.text(st.characters(categories=["Cc", "Cf", "Cs", "Po", "Sm"]), max_size=60), pieces
)
numbers = st.one_of(st.integers(), st.integers(-(10**400), 10**400), st.floats(allow_nan=True))
trees = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.one_of(st.text(max_size=8), st.sampled_from(("$tensor", "$$tensor", "$"))), inner, max_size=4),
        st.fixed_dictionaries({"$tensor": st.fixed_dictionaries({}, optional={
            "dtype": st.one_of(inner, st.sampled_from(("float32", "int64", "bool", "complex64", "os", "dtype", "bits8", "quint8", "float8_e5m2"))),
            "at": inner, "bytes": inner, "shape": inner,
        })}),
    ),
    max_leaves=20,
)  # fmt: skip
names = st.one_of(
    st.sampled_from(
        ("train_ddp.py", "../x.py", "/etc/x", "C:\\x", "a/b/train_ddp.py", "a\0b", "train_ddp.py/x", "x.zip", ".", "")
    ),
    st.text(max_size=30),
)


@pytest.fixture(scope="module")
def searched() -> set[str]:
    sys.path.insert(0, str(ROOT / "autograder"))
    return hostile_sources.patterns()


@pytest.mark.slow
@bounded
@given(source=sources)
def test_any_source_is_read(source: str, searched: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hostile_sources.read(source.encode("utf-8", "replace").decode(), searched, Path(folder))


def _zip(entries: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name.encode("utf-8", "replace").decode() or "x"), data)
    return file.getvalue()


def _tar(entries: list[tuple[str, bytes]], kind: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{kind}", errors="replace", format=tarfile.PAX_FORMAT) as archive:
        for name, data in entries:
            info = tarfile.TarInfo(name.encode("utf-8", "replace").decode().replace("\0", "0"))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


entries = st.lists(st.tuples(names, st.binary(max_size=300)), max_size=6)
archives = st.one_of(
    entries.map(_zip),
    st.tuples(entries, st.sampled_from(("", "gz", "xz"))).map(lambda drawn: _tar(*drawn)),
    st.tuples(st.sampled_from((b"PK\3\4", b"PK\5\6", b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"")), st.binary(max_size=2000)).map(b"".join),
)  # fmt: skip
changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=8)


@bounded
@given(data=archives, changes=changes, cut=st.integers(0, 1 << 16))
def test_any_archive_is_read_or_refused(data: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    """Within its budget; a name that points outside has a problem, and what is said of it can be shown."""
    changed = bytearray(data)
    for at, byte in changes if data else ():
        changed[at % len(data)] = byte
    limited = bytes(changed)[: cut if cut % 3 == 0 else None]
    budget = Budget(bytes=1 << 20)
    try:
        for member in members(io.BytesIO(limited), budget):
            assert member.problem or (
                not {"..", "", "."} & set(member.parts) and not any("/" in part for part in member.parts)
            )
            try:
                assert len(member.read(1000)) <= 1001
            except Refused as refusal:
                assert str(refusal).isprintable()
    except Refused as refusal:
        assert str(refusal).isprintable() and len(str(refusal)) < 300


@bounded
@given(
    tree=trees,
    blob=st.binary(max_size=64),
    event=st.sampled_from(
        (
            "begin",
            "end",
            "mark",
            "observe",
            "show",
            "raised",
            "exit",
            "returned",
            "waited",
            "hello",
            "sample",
            "replica",
            "nonsense",
        )
    ),
    lie=st.integers(-3, 3),
)
def test_anything_that_a_rank_says_is_read_or_refused(tree: object, blob: bytes, event: str, lie: int) -> None:  # fmt: skip
    fields = tree if isinstance(tree, dict) else {"value": tree}
    message = {
        "number": 1,
        "kind": "send",
        "group": "0",
        "members": [0],
        "group_number": 1,
        "of_kind": 1,
        "nbytes": 4,
        "shape": [1],
        "dtype": "",
        "time": 5,
        "name": "n",
        **fields,
        "event": event,
    }
    try:
        header = json.dumps(message).encode()
    except ValueError:  # more digits than Python writes
        return
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEADER.pack(max(0, len(header) + lie), len(blob)) + header + blob)
        theirs.shutdown(socket.SHUT_WR)
        try:
            heard = Channel(ours).receive() or []
        except ChannelError:
            return
    for said, data in heard:
        try:
            taken = read(FromRank, whole(said))
        except ValueError:
            continue
        _take(taken, data)


def _take(taken: object, blob: bytes) -> None:
    """What the supervisor, the client and a check do with it."""
    if isinstance(taken, (Observe, Show)):
        try:
            value = decode(taken.value, blob)
        except (ChannelError, RecursionError):
            return
        # What a check raises at a strange value is a failed check; what is shown of it has to be short.
        for compare in (lambda: difference(value, 1.0), lambda: wrong_ranks([value, 1], Each([0, value]), EXACT)):
            try:
                compare()
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError):
                continue
        assert len(show(value)) < 100_000
    elif isinstance(taken, Raised):
        cut = leftovers.cut(taken)
        assert len(cut.message) + len(cut.traceback) + len(cut.type) < 300_000
    elif isinstance(taken, (Begin, End, Mark, Waited)):
        report = RankReport(0)
        client._place_events(report, [taken], 0.0)
        assert len(report.collectives) <= 1


@pytest.mark.slow
@bounded
@given(text=texts, other=texts)
def test_any_text_can_be_shown(text: str, other: str) -> None:
    """In every form that a report is handed on in, with no character that acts and no markup of the text's own."""
    found = Diagnosis("raised", text, other, (0,), other, 3, text, other, text, (Row(text, other),))
    check = CheckResult(text, "test_x", CheckOutcome.FAILED, found, "", other)
    report = Report(7, (ExerciseResult("train_ddp", (check,), 1.0, text),), faults=(other,))
    kept = harmless(text)
    assert not {c for c in kept if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"}
    assert report_text(report)
    graded = class_of(report, text, (other,))
    grades = apply(Policy(), graded)
    assert [len(suite) for suite in ElementTree.fromstring(junit.junit(graded).encode())] == [1, 1]
    json.dumps(gradescope.results(replace(report, faults=()))).encode()
    summary = summary_md.class_md(graded, grades)
    assert "<script" not in summary and "\n::" not in summary
    table = csv_grades.grades_csv(graded, grades)
    assert (
        table.count("\r\n") == 2 and '"=' not in table and '"@' not in table and '"+' not in table and '"-' not in table
    )
    assert "<script" not in rendered(text) and "\n" not in rendered(text)
    assert from_json(json.loads(json.dumps(report.to_json()))).seed == 7
    assert not {c for c in printable(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
