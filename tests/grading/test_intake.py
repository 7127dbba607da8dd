"""What is taken of a download, and that nothing hostile in it does harm, is believed or stops the others."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import socket
import stat
import struct
import tarfile
import tracemalloc
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest

from lockstep.course import Course
from lockstep.grading.archives import Budget, Refused, members, printable
from lockstep.grading.intake import Handed, IntakeError, take_in
from lockstep.grading.learners import metadata, safe_id

GOOD = b"def train_ddp():\n    return 1\n"
TakeIn = Callable[[Path], dict[str, Handed]]


@pytest.fixture
def take(tmp_path: Path, course: Course) -> Iterator[TakeIn]:
    """Take in; afterwards the scratch folder must hold what was told and nothing else, and nothing lies outside of it."""
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    scratch = tmp_path / "scratch" / "inner"

    def call(source: Path) -> dict[str, Handed]:
        shutil.rmtree(scratch, ignore_errors=True)
        before = {path for path in tmp_path.rglob("*") if scratch not in path.parents}
        found = take_in(source, scratch, course)
        assert before | {scratch, scratch.parent} == {p for p in tmp_path.rglob("*") if scratch not in p.parents} | {
            scratch,
            scratch.parent,
        }
        told = {one.folder / file for one in found for file in one.files}
        there = {path for path in scratch.rglob("*") if not path.is_dir() or path.is_symlink()}
        assert there == told
        for path in there:
            assert stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size <= 1 << 20
        ids = [one.id for one in found]
        assert ids == sorted(ids) and len({one.lower() for one in ids}) == len(ids)
        for one in found:
            assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,69}", one.id), one.id
            assert one.folder == scratch / one.id
            assert bool(one.files) or one.refused, "nothing to grade, and nobody is told why"
            for line in (one.shown, *one.refused, *one.notes):
                assert line and len(line) < 700
                assert not [c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        assert take_in(source, scratch, course) == found
        return {one.id: one for one in found}

    yield call
    assert canary.read_text() == "untouched"


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(*headers: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, data in headers:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def header(
    name: str, data: bytes = GOOD, kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def raw_zip(entries: list[tuple[bytes, bytes]], flags: int = 0, size: int | None = None, mode: int = 0) -> bytes:
    """A zip written byte by byte: any name, any flags, a size that lies."""
    body, directory = b"", b""
    for name, data in entries:
        packed = zlib.compress(data, 9)[2:-4]
        common = struct.pack("<HHHHHIIIHH", 20, flags, 8, 0, 0x21, zlib.crc32(data), len(packed),
                             len(data) if size is None else size, len(name), 0)  # fmt: skip
        directory += (
            b"PK\1\2" + struct.pack("<H", 0x314) + common + struct.pack("<HHHII", 0, 0, 0, mode << 16, len(body)) + name
        )
        body += b"PK\3\4" + common + name + packed
    end = struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(directory), len(body), 0)
    return body + directory + b"PK\5\6" + end


def put(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def beside_bob(tmp_path: Path, archive: bytes, name: str = "mallory.zip") -> Path:
    """A class of two: mallory's archive and bob's, who has done nothing."""
    return put(tmp_path / "class", {name: archive, "bob.zip": zipped({"train_ddp.py": GOOD})})


@contextmanager
def at_most(bytes_held: int) -> Iterator[None]:
    """What runs in here allocates no more than this at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < bytes_held
    finally:
        tracemalloc.stop()


def only_bob(found: dict[str, Handed]) -> Handed:
    """Bob's work is taken and mallory's is not; mallory's."""
    assert set(found) == {"bob", "mallory"}
    assert found["bob"].files == ("train_ddp.py",) and not found["bob"].refused
    assert not found["mallory"].files
    return found["mallory"]


# What the downloads look like


def test_folder_of_folders(tmp_path: Path, take: TakeIn) -> None:
    ticket = b"rank: 1\n"
    found = take(put(tmp_path / "class", {
        "alice/train_ddp.py": GOOD, "alice/exercises/clinic/short_shard.py": b"1", "alice/clinic/ticket.txt": ticket,
        "bob/deep/er/mini_ddp.py": b"2", "bob/nan_batch.py": b"3", "bob/ticket.txt": ticket,
    }))  # fmt: skip
    assert found["alice"].files == ("train_ddp.py", "clinic/short_shard.py", "clinic/ticket.txt")
    assert found["bob"].files == ("mini_ddp.py", "clinic/nan_batch.py", "clinic/ticket.txt")
    assert (found["bob"].folder / "clinic" / "nan_batch.py").read_bytes() == b"3"
    assert not found["alice"].refused + found["alice"].notes


def test_folder_of_single_files(tmp_path: Path, take: TakeIn) -> None:
    found = take(put(tmp_path / "class", {"alice_train_ddp.py": GOOD, "alice_setup_ddp.py": b"1", "mini_ddp-bob.py": b"2",
                                          "carol.pdf": b"%PDF", "grades.csv": b"x"}))  # fmt: skip
    assert {one.id: one.files for one in found.values()} == {
        "alice": ("setup_ddp.py", "train_ddp.py"), "bob": ("mini_ddp.py",), "carol": (),
    }  # fmt: skip


def test_one_learners_own_folder_and_archive(tmp_path: Path, take: TakeIn) -> None:
    assert take(put(tmp_path / "mine", {"train_ddp.py": GOOD, "clinic/nan_batch.py": b"1"}))["mine"].files == (
        "train_ddp.py",
        "clinic/nan_batch.py",
    )
    put(tmp_path, {"dora.zip": zipped({"exercises/train_ddp.py": GOOD})})
    assert take(tmp_path / "dora.zip")["dora"].files == ("train_ddp.py",)


@pytest.mark.parametrize("trailing", ["_", ""])
def test_moodle(tmp_path: Path, take: TakeIn, trailing: str) -> None:
    one, two = f"Ada Lovelace_12345_assignsubmission_file{trailing}", f"Participant 9_9_assignsubmission_file{trailing}"
    files = {f"{one}/work.zip": zipped({"ddp/train_ddp.py": GOOD}), f"{two}/train_ddp.py": b"9",
             "Ada Lovelace_12345_assignsubmission_onlinetext_/onlinetext.html": b"<p>"}  # fmt: skip
    put(tmp_path, {"moodle.zip": zipped(files)})
    for source in (tmp_path / "moodle.zip", put(tmp_path / "unpacked", files)):
        found = take(source)
        assert found["ada-lovelace-12345"].shown == "Ada Lovelace"
        assert found["ada-lovelace-12345"].files == found["participant-9-9"].files == ("train_ddp.py",)


def test_moodle_without_folders_and_a_file_that_names_somebody_else(tmp_path: Path, take: TakeIn) -> None:
    put(tmp_path, {"moodle.zip": zipped({
        "Bob_13_assignsubmission_file_train_ddp.py": GOOD,
        "Mallory_12_assignsubmission_file_Bob_13_assignsubmission_file_train_ddp.py": b"evil",
    })})  # fmt: skip
    found = take(tmp_path / "moodle.zip")
    assert (found["bob-13"].folder / "train_ddp.py").read_bytes() == GOOD
    assert found["mallory-12"].files == ()


def test_what_an_lms_names_is_a_learner_also_alone(tmp_path: Path, take: TakeIn) -> None:
    """One learner's folder is no folder around a class; a file beside learners' files makes them nobody's own work."""
    name = "Ada Lovelace_12345_assignsubmission_file_"
    found = take(put(tmp_path / "one", {f"{name}/part1/train_ddp.py": GOOD, f"{name}/part2/setup_ddp.py": b"2"}))
    assert {id: one.files for id, one in found.items()} == {"ada-lovelace-12345": ("setup_ddp.py", "train_ddp.py")}
    found = take(put(tmp_path / "class", {"train_ddp.py": b"1", "lovelaceada_123_500_setup_ddp.py": GOOD}))
    assert found["lovelaceada-123"].files == ("setup_ddp.py",)


def test_canvas(tmp_path: Path, take: TakeIn) -> None:
    put(tmp_path, {"submissions.zip": zipped({
        "lovelaceada_LATE_123_500_train_ddp-1.py": b"1", "lovelaceada_LATE_123_502_train_ddp-2.py": b"2",
        "lovelaceada_LATE_123_501_train_ddp.py": b"0", "van_der_berg_77_504_mini_ddp.py": b"3",
        "anon_x7Qz_505_train_ddp.py": b"4", "LATE_anon_x7qZ_506_train_ddp.py": b"5", "euler_88_text.html": b"<p>",
        "smith_9_507_jones_77_508_mini_ddp.py": b"evil",
    })})  # fmt: skip
    found = take(tmp_path / "submissions.zip")
    ada = found["lovelaceada-123"]
    assert ada.marked_late and (ada.folder / "train_ddp.py").read_bytes() == b"2"
    assert any("train_ddp-2.py was taken, the newest by its number" in note for note in ada.notes)
    berg = found["van-der-berg-77"]
    assert not berg.marked_late and (berg.folder / "mini_ddp.py").read_bytes() == b"3"
    anonymous = [one for ident, one in found.items() if ident.startswith("anon-")]
    assert len(anonymous) == 2 and {one.marked_late for one in anonymous} == {True, False}
    assert "nothing to grade" in found["euler-88"].refused[0] and not found["smith-9"].files


def test_canvas_upload_number_decides(tmp_path: Path, take: TakeIn) -> None:
    for order in ((8, 9), (9, 8)):
        put(tmp_path, {"s.zip": zipped({f"ada_1_{n}_train_ddp.py": b"%d" % n for n in order})})
        assert (take(tmp_path / "s.zip")["ada-1"].folder / "train_ddp.py").read_bytes() == b"9"


METADATA = b"""submission_101:
  :submitters:
  - :name: "Ada \\u202e L"
    :sid: '007'
  - :name: Bob
    :email: b@x
  :created_at: 2026-04-26 17:34:00.861687000 Z
  :score: 2.0
  :results:
    output: |-
      :created_at: 1999-01-01 00:00:00 Z
submission_666:
      :submitters:
  :history:
  - :id: 1
    :created_at: 1999-01-01 00:00:00 Z
    :submitters:
    - :name: nobody
"""


def test_gradescope(tmp_path: Path, take: TakeIn) -> None:
    root = "assignment_5_export"
    put(tmp_path, {"export.zip": zipped({
        f"{root}/submission_metadata.yml": METADATA, f"{root}/submission_101/train_ddp.py": GOOD,
        f"{root}/submission_102/hw.tar.gz": gzip.compress(tarred(header("train_ddp.py"))),
    })})  # fmt: skip
    found = take(tmp_path / "export.zip")
    assert found["submission-101"].shown == "Ada \\u202e L (007), Bob"
    assert found["submission-101"].handed_in == datetime(2026, 4, 26, 17, 34, 0, 861687, timezone.utc)
    assert found["submission-102"].files == ("train_ddp.py",) and found["submission-102"].handed_in is None


def test_metadata_reads_only_its_own_lines() -> None:
    assert metadata(METADATA.decode())["submission_666"] == ("", None)
    assert metadata("submission_1:\n  :created_at: 2026-99-99 00:00:00 Z\n")["submission_1"] == ("", None)
    assert metadata("submission_1:\n  :created_at: 2026-01-01 00:00:00.5 CET\n")["submission_1"][1] is None
    late = metadata("submission_1:\n  :created_at: 2026-01-01 20:00:00.5-07:00\n")["submission_1"][1]
    assert late == datetime(2026, 1, 2, 3, 0, 0, 500000, timezone.utc)


def test_github_classroom(tmp_path: Path, take: TakeIn) -> None:
    root = "ddp-submissions"
    tree = {f"{root}/ddp-ada/exercises/train_ddp.py": GOOD, f"{root}/ddp-ada/autograder/scenarios/mini_ddp.py": b"not theirs",
            f"{root}/ddp-ada/.git/train_ddp.py": b"x", f"{root}/ddp-ada/.lockstep/backups/setup_ddp.py": b"x",
            f"{root}/ddp-bob/exercises/mini_ddp.py": b"1"}  # fmt: skip
    for source in (put(tmp_path / "clone", tree) / root, tmp_path / "clone"):
        found = take(source)
        assert {one.id: one.files for one in found.values()} == {"ada": ("train_ddp.py",), "bob": ("mini_ddp.py",)}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.xz"])
def test_tars(tmp_path: Path, take: TakeIn, suffix: str) -> None:
    many = [header(f"learner{n:03d}/train_ddp.py", b"%d" % n * 700) for n in range(90)]
    data = tarred(*many, header("alice/work.tgz", gzip.compress(tarred(header("x/mini_ddp.py")))))
    pack = {"tar": bytes, "tar.gz": gzip.compress, "tgz": lambda d: gzip.compress(d[:5000]) + gzip.compress(d[5000:])}
    put(tmp_path, {f"class.{suffix}": pack.get(suffix, lzma.compress)(data)})
    found = take(tmp_path / f"class.{suffix}")
    assert len(found) == 91 and found["alice"].files == ("mini_ddp.py",)
    assert (found["learner042"].folder / "train_ddp.py").read_bytes() == b"42" * 700


def test_a_zip_in_a_learners_zip_is_opened_and_no_deeper(tmp_path: Path, take: TakeIn) -> None:
    inner = zipped({"train_ddp.py": GOOD})
    assert take(beside_bob(tmp_path, zipped({"a.zip": inner})))["mallory"].files == ("train_ddp.py",)
    mallory = only_bob(take(beside_bob(tmp_path, zipped({"b.zip": zipped({"a.zip": inner})}))))
    assert "too deep in other archives" in mallory.refused[0]


# Hostile archives


@pytest.mark.parametrize("name", ["../train_ddp.py", "/tmp/train_ddp.py", "a/../../train_ddp.py", "..\\train_ddp.py",
                                  "C:\\train_ddp.py", "c:train_ddp.py", "\\\\host\\train_ddp.py", "a/../train_ddp.py"])  # fmt: skip
@pytest.mark.parametrize("form", ["zip", "tar"])
def test_paths_that_point_outside(tmp_path: Path, take: TakeIn, name: str, form: str) -> None:
    files = [("mini_ddp.py", GOOD), (name, GOOD)]
    data = raw_zip([(n.encode(), d) for n, d in files]) if form == "zip" else tarred(*[header(*file) for file in files])
    mallory = only_bob(take(beside_bob(tmp_path, data, f"mallory.{form}")))
    assert "points outside" in mallory.refused[0]


def test_a_path_that_points_outside_of_the_whole_download_costs_only_its_owner(tmp_path: Path, take: TakeIn) -> None:
    put(tmp_path, {"class.zip": raw_zip([(b"mallory/../bob/train_ddp.py", b"evil"), (b"bob/train_ddp.py", GOOD),
                                         (b"mallory/train_ddp.py", GOOD), (b"../canary", b"evil"), (b"/etc/x", b"")])})  # fmt: skip
    found = take(tmp_path / "class.zip")
    assert (found["bob"].folder / "train_ddp.py").read_bytes() == GOOD
    assert not found["mallory"].files and "points outside" in found["mallory"].refused[0]
    assert len(found) == 4 and all("points outside" in one.refused[0] for one in found.values() if one.id != "bob")


def test_a_null_byte_hides_no_name(tmp_path: Path, take: TakeIn) -> None:
    assert "null byte" in only_bob(take(beside_bob(tmp_path, raw_zip([(b"train_ddp.py\0.txt", GOOD)])))).refused[0]


def test_an_entry_without_a_name_stops_nobody(tmp_path: Path, take: TakeIn) -> None:
    """zipfile itself breaks on one."""
    found = take(beside_bob(tmp_path, raw_zip([(b"", GOOD), (b"train_ddp.py", GOOD)])))
    assert found["bob"].files == found["mallory"].files == ("train_ddp.py",)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_tars(tmp_path: Path, take: TakeIn, kind: bytes) -> None:
    data = tarred(header("train_ddp.py", b"", kind, str(tmp_path / "canary")), header("a", b"", kind, "b"))
    mallory = only_bob(take(beside_bob(tmp_path, data, "mallory.tar")))
    what = "link" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else "device or pipe"
    assert mallory.refused[0] == f"mallory.tar/train_ddp.py is a {what}, not a file"
    assert mallory.notes == (f"ignored: mallory.tar/a, a {what}",)


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_links_and_devices_in_zips(tmp_path: Path, take: TakeIn, mode: int) -> None:
    data = raw_zip([(b"train_ddp.py", str(tmp_path / "canary").encode())], mode=mode | 0o777)
    assert "not a file" in only_bob(take(beside_bob(tmp_path, data))).refused[0]


def test_links_pipes_sockets_and_folders_in_folders(tmp_path: Path, take: TakeIn) -> None:
    root = put(tmp_path / "class", {"bob/train_ddp.py": GOOD, "mallory/exercises/mini_ddp.py": b"1"})
    mallory = root / "mallory"
    (mallory / "train_ddp.py").symlink_to(root / "bob" / "train_ddp.py")
    (mallory / "loop").symlink_to(root)
    os.mkfifo(mallory / "setup_ddp.py")
    (mallory / "accumulate.py").hardlink_to(tmp_path / "canary")
    put(mallory, {"checkpoint.py/exact_resume.py": b"1"})
    one = socket.socket(socket.AF_UNIX)
    one.bind(os.path.relpath(mallory / "measure_step.py"))
    one.close()
    (root / "eve").symlink_to(root / "bob")
    found = take(root)
    assert found["mallory"].files == ("mini_ddp.py",) and not found["eve"].files
    said = " / ".join(found["mallory"].refused)
    for name in ("train_ddp.py is a link", "setup_ddp.py is a device or pipe", "accumulate.py is a link",
                 "checkpoint.py is a folder", "measure_step.py is a device or pipe"):  # fmt: skip
        assert name in said
    assert "ignored: loop, a link" in found["mallory"].notes


def test_bomb_that_nobody_asks_for_is_never_inflated(tmp_path: Path, take: TakeIn) -> None:
    data = zipped({"zeros.bin": bytes(80 << 20), "train_ddp.py": GOOD})
    root = beside_bob(tmp_path, data)
    with at_most(24 << 20):
        assert take(root)["mallory"].files == ("train_ddp.py",)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_tar_bomb(tmp_path: Path, take: TakeIn, pack: Callable[[bytes], bytes]) -> None:
    bomb = pack(tarred(header("zeros", bytes(60 << 20)), header("train_ddp.py")))
    root = beside_bob(tmp_path, bomb, "mallory.tgz")
    with at_most(24 << 20):
        assert "bomb" in only_bob(take(root)).refused[0]


def test_bomb_below_the_ratio_stops_at_the_total(tmp_path: Path, take: TakeIn) -> None:
    noise = random.Random(1).randbytes(1 << 16)
    block = noise + bytes(60 * len(noise))
    mallory = only_bob(take(beside_bob(tmp_path, gzip.compress(tarred(header("a", block * 20))), "mallory.tgz")))
    assert "too many bytes" in mallory.refused[0]


def test_nested_bomb(tmp_path: Path, take: TakeIn) -> None:
    inner = zipped({f"{n}.zip": zipped({"train_ddp.py": bytes(1 << 20)}) for n in range(200)})
    assert "too many bytes" in only_bob(take(beside_bob(tmp_path, inner))).refused[0]
    big = zipped({"a.zip": bytes(20 << 20)})
    assert "bomb" in only_bob(take(beside_bob(tmp_path, big))).refused[0]
    assert "16 MiB" in only_bob(take(beside_bob(tmp_path, random.Random(1).randbytes(17 << 20)))).refused[0]


def test_too_many_members(tmp_path: Path, take: TakeIn) -> None:
    many = raw_zip([(b"%d" % n, b"") for n in range(5_001)] + [(b"train_ddp.py", GOOD)])
    assert "too many files" in only_bob(take(beside_bob(tmp_path, many))).refused[0]
    tar = tarred(header("train_ddp.py"), *[header(str(n), b"") for n in range(5_001)])
    assert "too many files" in only_bob(take(beside_bob(tmp_path / "tar", tar, "mallory.tar"))).refused[0]
    few = raw_zip([(b"%d" % n, b"") for n in range(4_000)] + [(b"train_ddp.py", GOOD)])
    assert take(beside_bob(tmp_path, few))["mallory"].files == ("train_ddp.py",)


def test_too_many_files_in_a_folder(tmp_path: Path, take: TakeIn) -> None:
    root = put(
        tmp_path / "class", {"bob/train_ddp.py": GOOD, "mallory/train_ddp.py": GOOD, "mallory/z/mini_ddp.py": GOOD}
    )
    for number in range(5_001):
        (root / "mallory" / "y").mkdir(exist_ok=True)
        (root / "mallory" / "y" / str(number)).touch()
    assert "too many files" in only_bob(take(root)).refused[0]


def test_a_zips_directory_is_counted_before_it_is_read() -> None:
    many = io.BytesIO(raw_zip([(b"%d" % n, b"") for n in range(30)]))
    assert len(list(members(many, Budget(members=30)))) == 30
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Refused, match="too many files"):
        patch.setattr(zipfile, "ZipFile", lambda file: pytest.fail("the directory was read"))
        list(members(many, Budget(members=29)))


def test_overlapping_members(tmp_path: Path, take: TakeIn) -> None:
    data = bytearray(raw_zip([(b"train_ddp.py", GOOD), (b"trainyddp.py", GOOD), (b"mini_ddp.py", GOOD)]))
    second = [found.start() for found in re.finditer(b"PK\1\2", data)][1]
    data[second + 42 : second + 46] = struct.pack("<I", 0)
    assert "overlap" in only_bob(take(beside_bob(tmp_path, bytes(data)))).refused[0]
    data = bytearray(raw_zip([(b"train_ddp.py", GOOD)]))
    start = data.index(b"PK\1\2")
    data[start + 20 : start + 24] = struct.pack("<I", 60)
    assert "overlap" in only_bob(take(beside_bob(tmp_path, bytes(data)))).refused[0]


def test_the_same_name_twice_in_one_archive(tmp_path: Path, take: TakeIn) -> None:
    twice = raw_zip(
        [(b"train_ddp.py", GOOD), (b"train_ddp.py", b"other"), (b"mini_ddp.py", b"1"), (b"mini_ddp.py", b"1")]
    )
    mallory = take(beside_bob(tmp_path, twice))["mallory"]
    assert mallory.files == ("mini_ddp.py",) and "twice" in mallory.refused[0]


def test_encrypted(tmp_path: Path, take: TakeIn) -> None:
    assert (
        "is encrypted" in only_bob(take(beside_bob(tmp_path, raw_zip([(b"train_ddp.py", GOOD)], flags=1)))).refused[0]
    )


def test_headers_that_lie(tmp_path: Path, take: TakeIn) -> None:
    big = take(beside_bob(tmp_path, raw_zip([(b"train_ddp.py", GOOD)], size=1 << 31)))["mallory"]
    assert (big.folder / "train_ddp.py").read_bytes() == GOOD
    for size in (3, 0, len(GOOD) - 1):
        mallory = only_bob(take(beside_bob(tmp_path, raw_zip([(b"train_ddp.py", GOOD)], size=size))))
        assert "cannot be unpacked" in mallory.refused[0]
    other = raw_zip([(b"train_ddp.py", GOOD)]).replace(b"train_ddp.py", b"conftest1.py", 1)
    assert "cannot be unpacked" in only_bob(take(beside_bob(tmp_path, other))).refused[0]


def test_methods_without_a_bound(tmp_path: Path, take: TakeIn) -> None:
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            archive.writestr("train_ddp.py", GOOD)
        assert "other than deflate" in only_bob(take(beside_bob(tmp_path, buffer.getvalue()))).refused[0]


def test_broken_archives(tmp_path: Path, take: TakeIn) -> None:
    good = zipped({"train_ddp.py": GOOD})
    tar = tarred(header("a", bytes(3000)), header("train_ddp.py", bytes(3000)))
    for name, data in [("mallory.zip", b""), ("mallory.zip", good[:-9]), ("mallory.zip", b"PK\3\4"), ("mallory.tar", tar[:2000]),
                       ("mallory.tgz", gzip.compress(tar)[:20]), ("mallory.tar.xz", lzma.compress(tar)[:60]), ("mallory.zip", b"\xff" * 9000),
                       ("mallory.tar", tar[:5000]), ("mallory.zip", raw_zip([(b"\xff\xfe.py", GOOD)], flags=0x800))]:  # fmt: skip
        root = beside_bob(tmp_path, data, name)
        assert only_bob(take(root)).refused, name
        (root / name).unlink()
    mallory = only_bob(take(beside_bob(tmp_path, tarred(header("train_ddp.py", bytes(3000)))[:2000], "mallory.tar")))
    assert mallory.refused == (
        "what was handed in in mallory.tar: it is no tar or zip that can be read (unexpected end of data)",
    )
    for name, data in [("class.zip", b"PK nothing"), ("class.tar.gz", b"nothing")]:
        put(tmp_path, {name: data})
        with pytest.raises(IntakeError, match=f"{name} .*cannot|{name} is no"):
            take(tmp_path / name)
    with pytest.raises(IntakeError, match="there is no"):
        take(tmp_path / "missing.zip")


def test_every_truncation_and_flipped_byte_is_survived() -> None:
    draw, refused = random.Random(7), 0
    tar = tarred(header("train_ddp.py"), header("b/" * 90 + "mini_ddp.py"))
    for form in (
        zipped({"train_ddp.py": GOOD, "a/mini_ddp.py": b"x" * 999}),
        tar,
        gzip.compress(tar),
        lzma.compress(tar),
    ):
        for _ in range(150):
            data = bytearray(form[: draw.choice([len(form), draw.randrange(len(form))])])
            for _ in range(draw.randrange(3)):
                if data:
                    data[draw.randrange(len(data))] = draw.randrange(256)
            try:
                for member in members(io.BytesIO(bytes(data)), Budget()):
                    assert not member.problem or member.problem.startswith("holds")
                    with suppress(Refused):
                        assert len(member.read(500)) <= 501
            except Refused:
                refused += 1
    assert refused > 100


def test_tar_headers_that_announce_too_much(tmp_path: Path, take: TakeIn) -> None:
    for kind in (b"x", b"g", b"L", b"K", b"X"):
        long = tarfile.TarInfo("x")
        long.type, long.size = kind, 9000
        data = long.tobuf() + b"1" * 9000 + tarred(header("train_ddp.py"))
        assert "unreasonable" in only_bob(take(beside_bob(tmp_path, data, "mallory.tar"))).refused[0]
    bad = tarfile.TarInfo("train_ddp.py")
    data = bytearray(bad.tobuf())
    data[124:136] = b"\xff" * 12  # a size of -1, in base 256
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    assert "negative size" in only_bob(take(beside_bob(tmp_path, bytes(data) + bytes(1024), "mallory.tar"))).refused[0]


def test_xz_that_asks_for_a_dictionary_of_gigabytes(tmp_path: Path, take: TakeIn) -> None:
    data = bytearray(lzma.compress(tarred(header("train_ddp.py"))))
    assert data[14:16] == b"\x21\x01"  # LZMA2, one byte of properties: the dictionary's size
    data[16] = 40
    data[20:24] = struct.pack("<I", zlib.crc32(data[12:20]))
    mallory = only_bob(take(beside_bob(tmp_path, bytes(data), "mallory.tar.xz")))
    assert "Memory usage limit" in mallory.refused[0]


@pytest.mark.parametrize(("size", "why"), [(1 << 20, "not a file"), (1 << 32, "too many bytes")])
def test_sparse_member_is_not_read(tmp_path: Path, take: TakeIn, size: int, why: str) -> None:
    sparse = tarfile.TarInfo("train_ddp.py")
    data = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    data[156:157] = b"S"
    data[386:410] = b"%011o\0%011o\0" % (0, 0)
    data[483:495] = b"%011o\0" % size
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    assert why in only_bob(take(beside_bob(tmp_path, bytes(data) + bytes(1024), "mallory.tar"))).refused[0]


# Odd names


ODD = ["=cmd|' /C calc'!A1", "-rf", "CON", "con", "Con.txt.", "nul", "a\nb", "a\tb", "\u202eecila", "A" * 200, "alice", "Alice", "ALICE",
       "älice", "a\u0301lice", "alice ", " alice", "..alice", "alice-2", "~root", "$(id)", "`id`", "<script>", "%s%n", "|x", "日本", "*", "con-1",
       "\x1b[31mred", "a" * 59 + "-", "unknown", "COM1", "\ufeffx"]  # fmt: skip


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
def test_odd_names_of_learners(tmp_path: Path, take: TakeIn, form: str) -> None:
    files = {f"{name}/train_ddp.py": name.encode() for name in ODD}
    if form == "folder":
        root = put(tmp_path / "class", files)
        os.mkdir(os.fsencode(root) + b"/\xff\xfe")
        Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe/train_ddp.py")).write_bytes(b"bytes")
        found = take(root)
        assert len(found) == len(ODD) + 1
    else:
        data = zipped(files) if form == "zip" else tarred(*[header(*item) for item in files.items()])
        put(tmp_path, {f"class.{form}": data})
        found = take(tmp_path / f"class.{form}")
        assert len(found) == len(ODD)
    assert found["alice"].shown == "alice"
    by_content = {(one.folder / "train_ddp.py").read_bytes(): one for one in found.values()}
    assert {name.encode() for name in ODD} <= set(by_content), "somebody's file was taken for somebody else's"
    assert not {"con", "nul", "com1"} & set(found) and not [
        ident for ident in found if ident.startswith(("con-", "nul-"))
    ]


def test_ids_are_the_same_whoever_else_is_there(tmp_path: Path, take: TakeIn) -> None:
    for name in ("Alice", "älice", "alice"):
        assert safe_id(name) in take(
            put(tmp_path / f"with {name}", {f"{name}/train_ddp.py": GOOD, "zz/train_ddp.py": b""})
        )
    together = set(take(put(tmp_path / "all", {f"{name}/train_ddp.py": GOOD for name in ("Alice", "älice", "alice")})))
    assert together == {safe_id("Alice"), safe_id("älice"), "alice"}


def test_ids_of_different_learners_that_meet(tmp_path: Path, take: TakeIn) -> None:
    stolen = safe_id("Alice")
    found = take(put(tmp_path / "class", {"Alice/train_ddp.py": b"1", f"{stolen}/train_ddp.py": b"2"}))
    assert len(found) == 2 and {(one.folder / "train_ddp.py").read_bytes() for one in found.values()} == {b"1", b"2"}


def test_printable_is_short_and_plain() -> None:
    assert printable("a\x00\u202e\n\ud800\u2028b") == "a\\x00\\u202e\\n\\ud800\\u2028b"
    assert len(printable("x" * 10_000)) <= 81 and len(printable("\x00" * 10_000)) <= 81


def test_odd_names_of_files(tmp_path: Path, take: TakeIn) -> None:
    odd = {f"mallory/{name}.py": b"" for name in ODD} | {"mallory/train_ddp.py ": b"", "mallory/Trainn_DDP.py": b""}
    found = take(put(tmp_path / "class", {**odd, "bob/train_ddp.py": GOOD}))
    refused = only_bob(found).refused
    assert (
        "expected average_gradients.py" in refused[0]
        and "nearest found is Trainn_DDP.py (should it be train_ddp.py?)" in refused[0]
    )
    assert found["mallory"].notes[0].startswith("ignored, no exercise in it: ") and "more" in found["mallory"].notes[0]


# Within what was handed in


def test_a_thousand_folders_deep(tmp_path: Path, course: Course) -> None:
    def take_bare(source: Path) -> dict[str, Handed]:
        return {one.id: one for one in take_in(source, tmp_path / "scratch", course)}

    root = put(tmp_path / "class", {"bob/train_ddp.py": GOOD, "mallory/notes.txt": b""})
    here = os.open(root / "mallory", os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d", dir_fd=here)
        here, old = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(old)
    with open(os.open("train_ddp.py", os.O_CREAT | os.O_WRONLY, dir_fd=here), "wb") as file:
        file.write(GOOD)
    os.close(here)
    try:
        assert "nothing to grade" in only_bob(take_bare(root)).refused[0]
    finally:
        _remove_deep(root / "mallory")
    deep = "d/" * 1000
    for name, data in (
        ("mallory.zip", zipped({f"{deep}train_ddp.py": GOOD})),
        ("mallory.tar", tarred(header(f"{deep}train_ddp.py"))),
    ):
        here = beside_bob(tmp_path / name, data, name)
        assert "nothing to grade" in only_bob(take_bare(here)).refused[0]


def _remove_deep(folder: Path) -> None:
    """By hand: a path of a thousand folders is longer than a path may be."""
    stack = [os.open(folder, os.O_RDONLY)]
    while True:
        try:
            stack.append(os.open("d", os.O_RDONLY, dir_fd=stack[-1]))
        except FileNotFoundError:
            break
    os.unlink("train_ddp.py", dir_fd=stack[-1])
    while len(stack) > 1:
        os.close(stack.pop())
        os.rmdir("d", dir_fd=stack[-1])
    os.close(stack.pop())


def test_size_of_a_file(tmp_path: Path, take: TakeIn) -> None:
    noise = random.Random(1).randbytes((1 << 20) + 1)
    for size, taken in ((1 << 20, True), ((1 << 20) + 1, False)):
        for form in ("folder", "zip", "tar"):
            if form == "folder":
                root = put(tmp_path / f"{form}{size}", {"ada/train_ddp.py": noise[:size], "bob/train_ddp.py": GOOD})
            else:
                pack = (
                    zipped({"train_ddp.py": noise[:size]})
                    if form == "zip"
                    else tarred(header("train_ddp.py", noise[:size]))
                )
                root = put(tmp_path / f"{form}{size}", {f"ada.{form}": pack, "bob/train_ddp.py": GOOD})
            ada = take(root)["ada"]
            assert bool(ada.files) is taken and any("more than 1 MiB" in line for line in ada.refused) is not taken


def test_what_lies_beside_is_ignored_and_told(tmp_path: Path, take: TakeIn) -> None:
    names = ["clinic_data.py", "conftest.py", "sitecustomize.py", "torch.py"]
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w')".encode()
    ada = take(put(tmp_path / "class", {f"ada/{name}": evil for name in [*names, "train_ddp.py", "exercises/x.pth"]}))[
        "ada"
    ]
    assert ada.files == ("train_ddp.py",) and not ada.refused and not marker.exists()
    assert ada.notes == ("ignored, no exercise in it: clinic_data.py, conftest.py, sitecustomize.py, torch.py",)


def test_notebooks(tmp_path: Path, take: TakeIn) -> None:
    found = take(
        put(tmp_path / "class", {"ada/train_ddp.ipynb": b"{}", "bob/train_ddp.ipynb": b"{}", "bob/train_ddp.py": GOOD})
    )
    assert found["ada"].refused[0].startswith("nothing to grade: expected")
    assert found["ada"].notes == found["bob"].notes == ("ignored, no exercise in it: train_ddp.ipynb",)
    assert found["bob"].files == ("train_ddp.py",) and not found["bob"].refused


def notebook(*cells: str) -> bytes:
    return json.dumps({"cells": [{"cell_type": "code", "source": one.splitlines(True)} for one in cells]}).encode()


def test_a_notebooks_definitions_are_taken_and_what_it_runs_is_not(tmp_path: Path, take: TakeIn) -> None:
    cells = [
        "%load_ext lockstep.notebook\nimport lockstep\nimport torch\nLR = 0.1\nprint(1)",
        "def setup_ddp(rank): ...\ndef cleanup_ddp(): ...\nsetup_ddp(0)",
        "%%ranks 2\ndef broken(:",
        "@torch.no_grad()\ndef train_ddp():\n    return 1\n",
        "from __future__ import annotations\nfrom setup_ddp import setup_ddp, cleanup_ddp",
        "!pip install x\nmodel = train_ddp()",
        "def train_ddp():\n    return 2  # better",
    ]
    deep = b'{"cells": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    found = take(put(tmp_path / "class", {
        "ada/my work.ipynb": notebook(*cells), "bob/train_ddp.ipynb": notebook(*cells), "bob/train_ddp.py": GOOD,
        "eve/deep.ipynb": deep, "eve/odd.ipynb": b'{"cells": [1, {"cell_type": "code", "source": [2]}]}',
        "fay/half.ipynb": notebook("def setup_ddp(rank): ..."),
    }))  # fmt: skip
    assert found["ada"].files == ("setup_ddp.py", "train_ddp.py") and not found["ada"].refused
    assert (
        "my work.ipynb was taken for train_ddp.py: its imports, functions, classes and constants" in found["ada"].notes
    )
    text = (found["ada"].folder / "train_ddp.py").read_text()
    module: dict = {}
    exec(text.replace("import torch\n", "import torch\nassert 'lockstep' not in dir()\n"), module)
    assert module["train_ddp"]() == 2 and module["LR"] == 0.1 and "model" not in module and "print" not in text
    assert "import setup_ddp" not in text and "def setup_ddp" in text
    assert (
        found["bob"].files == ("setup_ddp.py", "train_ddp.py")
        and (found["bob"].folder / "train_ddp.py").read_bytes() == GOOD
    )
    assert not found["eve"].files and not found["fay"].files
    assert found["fay"].refused[0].endswith("; no such file was found")


def test_a_notebook_counts_for_every_exercise_of_the_chapters(tmp_path: Path, course: Course) -> None:
    """Also for `accumulate`, whose only function has the name of another exercise's function, with other parameters."""
    names = [name for name in course.names if "/" not in name]
    for name in names:
        cell = (course.solutions / f"{name}.py").read_text("utf-8")
        put(tmp_path / "class", {f"{name}/Untitled.ipynb": notebook(cell)})
    found = {one.shown: one.files for one in take_in(tmp_path / "class", tmp_path / "scratch", course)}
    assert found == {name: (f"{name}.py",) for name in names}


def test_a_learner_is_told_what_a_notebook_lacks(tmp_path: Path, course: Course) -> None:
    put(tmp_path / "class", {"ada/Untitled.ipynb": notebook("def train_step(model, data): ...")})
    ada, *_ = take_in(tmp_path / "class", tmp_path / "scratch", course, ["accumulate"])
    needs = "train_step(ddp_model, micro_batches, loss_fn, optimizer)"
    assert (
        ada.notes[-1] == f"a notebook or another file counts as accumulate.py if it defines {needs}" and not ada.files
    )


def test_a_file_of_any_name_that_defines_an_exercise_is_taken_for_it(tmp_path: Path, take: TakeIn) -> None:
    both = b"def train_ddp(): ...\ndef setup_ddp(): ...\ndef cleanup_ddp(): ...\n"
    found = take(put(tmp_path / "class", {"ada/my file.py": GOOD, "bob/all.py": both,
                                          "cat/half.py": b"def setup_ddp(): ...", "eve/train_ddp.py.txt": GOOD,
                                          "fay/a.py": GOOD, "fay/b.py": GOOD + b"#"}))  # fmt: skip
    assert found["ada"].files == found["eve"].files == ("train_ddp.py",)
    assert found["ada"].notes == ("my file.py was taken for train_ddp.py: its name should be that",)
    assert found["bob"].files == ("setup_ddp.py", "train_ddp.py")
    assert not found["cat"].files and found["cat"].notes == ("ignored, no exercise in it: half.py",)
    assert not found["fay"].files and "a.py and b.py: which of them is train_ddp.py?" in found["fay"].refused[0]


def test_utf_16_becomes_utf_8_with_a_note(tmp_path: Path, take: TakeIn) -> None:
    text = "# é\ndef train_ddp(): ...\n"
    for encoding in ("utf-16", "utf-16-be"):
        mark = b"" if encoding == "utf-16" else b"\xfe\xff"
        ada = take(put(tmp_path / encoding, {"ada/train_ddp.py": mark + text.encode(encoding)}))["ada"]
        assert (ada.folder / "train_ddp.py").read_text("utf-8") == text and "UTF-16" in ada.notes[0]


def test_two_files_for_one_exercise(tmp_path: Path, take: TakeIn) -> None:
    found = take(put(tmp_path / "class", {
        "ada/train_ddp.py": b"0", "ada/train_ddp (2).py": b"2", "ada/train_ddp (10).py": b"10",
        "bob/old/train_ddp.py": b"old", "bob/exercises/train_ddp.py": b"new", "eve/a/train_ddp.py": b"1", "eve/train_ddp.py": b"1",
    }))  # fmt: skip
    assert (found["ada"].folder / "train_ddp.py").read_bytes() == b"10" and "train_ddp (10).py was taken" in found[
        "ada"
    ].notes[-1]
    assert (
        found["bob"].folder / "train_ddp.py"
    ).read_bytes() == b"new" and "exercises/train_ddp.py was taken" in found["bob"].notes[0]
    assert found["eve"].files == ("train_ddp.py",) and not found["eve"].notes


def test_the_slurm_script_where_the_course_has_one(tmp_path: Path, course: Course) -> None:
    root = put(tmp_path / "class", {"ada/train.sbatch": b"#!", "ada/train_ddp.py": GOOD})
    small = put(tmp_path / "course", {"autograder/course.toml": (course.autograder / "course.toml").read_bytes(),
                                      "autograder/test_train_ddp.py": b""})  # fmt: skip
    (without,) = take_in(root, tmp_path / "one", Course(small))
    put(small, {"exercises/train.sbatch": b"#!"})
    (with_it,) = take_in(root, tmp_path / "two", Course(small))
    assert (without.files, with_it.files) == (("train_ddp.py",), ("train_ddp.py", "train.sbatch"))


# Any tree


@pytest.mark.parametrize("seed", range(25))
def test_any_tree_gives_the_same_as_folder_zip_and_tar(tmp_path: Path, course: Course, seed: int) -> None:
    """Whatever lies there, only allow-listed names come out with their own bytes, alike from each form of download."""
    draw = random.Random(seed)
    stems = ["train_ddp", "mini_ddp", "short_shard", "ticket", "conftest", "Train_ddp", "x y", "é", "train_ddp-3"]
    folders = ["a", "exercises", "clinic", "autograder", "tests", ".git", "b c", "__MACOSX", "=1+1"]
    files: dict[str, bytes] = {}
    for number in range(draw.randrange(5, 60)):
        learner = draw.choice(["ada", "Bob", "c d", "submission_12", "Eve X_3_assignsubmission_file_"])
        path = [learner, *draw.choices(folders, k=draw.randrange(4))]
        name = draw.choice(stems) + draw.choice([".py", ".py", ".txt", ".ipynb", ".bin"])
        files["/".join([*path, name])] = b"%d" % number
    root = put(tmp_path / "class", files)
    ordered = [
        (path.relative_to(root).as_posix(), path.read_bytes()) for path in sorted(root.rglob("*")) if path.is_file()
    ]
    draw.shuffle(ordered)
    put(
        tmp_path,
        {"class.zip": zipped(dict(ordered)), "class.tgz": gzip.compress(tarred(*[header(*one) for one in ordered]))},
    )
    results = []
    for form in (root, tmp_path / "class.zip", tmp_path / "class.tgz"):
        found = take_in(form, tmp_path / f"out-{form.name}", course)
        results.append([(one.id, one.shown, one.files, [(one.folder / f).read_bytes() for f in one.files], one.refused, sorted(one.notes))
                        for one in found])  # fmt: skip
        for one in found:
            for file in one.files:
                assert file.removesuffix(".py") in course.names or file == "clinic/ticket.txt"
                assert (one.folder / file).read_bytes() in files.values()
    assert results[0] == results[1] == results[2]


# What a week with a class brings


def test_names_in_utf_8_without_the_flag_for_it(tmp_path: Path, take: TakeIn) -> None:
    """As Info-ZIP and macOS write them; a name of the old code page stays one."""
    name = "Finn Ó Néill_7_assignsubmission_file_/train_ddp.py".encode()
    old = "Zoë_8_assignsubmission_file_/train_ddp.py".encode("cp437")
    (tmp_path / "moodle.zip").write_bytes(raw_zip([(name, GOOD), (old, GOOD)]))
    found = take(tmp_path / "moodle.zip")
    assert {one.shown for one in found.values()} == {"Finn Ó Néill", "Zoë"}
    assert all(one.files == ("train_ddp.py",) for one in found.values())


def test_an_empty_archive_is_named_as_such(tmp_path: Path, take: TakeIn) -> None:
    for archive in (zipped({}), zipped({"folder/": b""}), tarred()):
        shutil.rmtree(tmp_path / "class", ignore_errors=True)
        mallory = only_bob(take(beside_bob(tmp_path, archive)))
        assert mallory.refused[0] == "mallory.zip is an empty archive: there is no file in it"


@pytest.mark.parametrize(
    "name", ["Setup_DDP_final.py", "setup-ddp.PY", "setup_ddp_v2.py", "Copy of setup_ddp.py", "setup_ddp - Copy.py"]
)
def test_a_name_that_is_nearly_right_is_taken_and_told(tmp_path: Path, take: TakeIn, name: str) -> None:
    files = {f"ada/{name}": b"1", "ada/train_ddp.py": GOOD, f"bob/{name}": b"1", "bob/setup_ddp.py": b"2"}
    for source in (put(tmp_path / "class", files), tmp_path / "class.zip"):
        (tmp_path / "class.zip").write_bytes(zipped(files))
        found = take(source)
        assert (found["ada"].folder / "setup_ddp.py").read_bytes() == b"1"
        assert found["ada"].notes == (f"{name} was taken for setup_ddp.py: its name should be that",)
        assert (found["bob"].folder / "setup_ddp.py").read_bytes() == b"2"
        assert found["bob"].notes == (f"ignored: {name}, since setup_ddp.py is there",)


def test_of_several_names_that_are_nearly_right_none_is_taken(tmp_path: Path, take: TakeIn) -> None:
    files = {"ada/setup_ddp_final.py": b"1", "ada/setup_ddp_new.py": b"2", "ada/train_ddp.py": GOOD}
    ada = take(put(tmp_path / "class", files))["ada"]
    assert ada.files == ("train_ddp.py",)
    assert ada.refused == (
        "setup_ddp_final.py and setup_ddp_new.py: which of them is setup_ddp.py? Hand in one of that name",
    )


def test_a_name_that_is_like_one_that_is_missing_is_asked_about(tmp_path: Path, course: Course) -> None:
    source = put(tmp_path / "class", {"ada/setupp_ddpp.py": b"1", "ada/train_ddp.py": GOOD, "ada/helper.py": b""})
    (ada,) = take_in(source, tmp_path / "scratch", course, ["setup_ddp", "train_ddp"])
    assert ada.files == ("train_ddp.py",)
    assert ada.notes[-1] == "setupp_ddpp.py was not taken: should it be setup_ddp.py?"


def test_a_number_in_a_name_takes_over_nobodys(tmp_path: Path, take: TakeIn) -> None:
    """Learners choose their names, in folders and in files."""
    bob = "Bob_13_assignsubmission_file_"
    found = take(put(tmp_path / "folders", {
        f"{bob}/train_ddp.py": GOOD,
        f"{bob}x_12_assignsubmission_file_/train_ddp.py": b"evil",  # whose name is "Bob_13_assignsubmission_file_x"
        "Mallory_13_assignsubmission_file_/train_ddp.py": b"evil",
    }))  # fmt: skip
    assert len(found) == 3 and (found["bob-13"].folder / "train_ddp.py").read_bytes() == GOOD
    assert not found["bob-13"].notes + found["bob-13"].refused
    found = take(
        put(tmp_path / "canvas", {"lovelaceada_12_500_train_ddp.py": GOOD, "eve_12_501_train_ddp.py": b"evil"})
    )
    assert (found["lovelaceada-12"].folder / "train_ddp.py").read_bytes() == GOOD
