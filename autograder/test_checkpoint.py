"""What `checkpoint` has to do.

    save_checkpoint(path, state, keep=3) -> None
    load_latest(path) -> dict | None

The faults are real: processes are killed by SIGKILL before and within every operation on a file, a write fails for want
of room, files are cut and bits changed. How a submission calls its files is its own affair: what it has written is
known from the operations that the ranks traced, and from what changed in the folder.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lockstep.grading import Grader
from lockstep.grading.verdict import Diagnosis
from lockstep.ranks import Run
from lockstep.ranks.explain import names
from lockstep.ranks.text import evidence as told

WORLD = 3
CHECKPOINT_BYTES = 6000  # a file of so many bytes holds a good part of a state of 12 KB
CHUNK = 4096  # the largest write that the tracer lets through at once

SAVE, LOAD = r"def save_checkpoint", r"def load_latest"
WRITE = r"torch\.save\( || \bsave\( || \.write\( || open\( || " + SAVE
RENAME = r"os\.replace || os\.rename || \.replace\((?!\") || \.rename\( || move\( || " + WRITE
SYNC = r"fsync\(.*fileno || fsync || " + RENAME
REMOVE = r"unlink || os\.remove || rmtree || " + SAVE
ORDER = r"sorted\( || \.sort\( || max\( || glob || listdir || iterdir || " + LOAD
READ = r"torch\.load\( || \bload\( || " + LOAD
PREFIX = r"module\. || " + LOAD
AGREE = r"broadcast || all_reduce || all_gather || barrier || " + SAVE

Operation = dict[str, Any]


def read_failure(grader: Grader, run: Run) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    cause = run.cause
    assert cause is not None
    said = cause.headline[0].upper() + cause.headline[1:]
    operations = run.observed("operations")
    if sum(bool(changes(done or [])) for done in operations) > 1:
        return several_writers(grader, [done or [] for done in operations], f" {said}")
    scenario = next((name for name in run.observed("scenario") if name), "")
    if cause.kind == "raised" and scenario == "many" and not any(run.observed("left")) and cause.error is not None:
        return grader.diagnosis(
            "trips-over-foreign-files",
            f"{said.rstrip('.')}. Beside the checkpoints the folder holds {', '.join([*FOREIGN, 'best.pt'])}, which others have put "
            "there.",
            of=cause.ranks,
            at=cause.error.frame or ORDER,
        )
    if cause.kind not in ("hang", "mismatch"):
        return None
    if scenario == "full_disk":
        raised = [rank for rank, error in enumerate(run.observed("error")) if error]
        if raised:
            return grader.diagnosis(
                "raises-on-the-writer-only",
                f"With no room left on the disk, {names(raised)} raised {run.observed('error')[raised[0]]}, and the "
                f"others waited for a word that never came. {said}",
                of=cause.ranks,
                at=AGREE,
            )
    if scenario == "views":
        return grader.diagnosis(
            "ranks-choose-differently",
            f"A rank could not read the checkpoint that the others could, and they no longer went the same way. {said}",
            evidence=told(run),
            of=cause.ranks,
            at=LOAD,
        )
    return grader.diagnosis(
        "rank-conditional-collective", said, evidence=told(run), of=cause.ranks, at=cause.frame or AGREE
    )


def whole(found: dict[str, Any]) -> int | None:
    """The number of the one state that was loaded, and None for a mixture, an error or nothing."""
    loaded = found["loaded"]
    return int(loaded[0]) if isinstance(loaded, list) and len(loaded) == 1 else None


def say(found: dict[str, Any]) -> str:
    """What load_latest did, after its name."""
    if found["error"]:
        return f"raised {brief(found['error'].removesuffix(': '))}"
    if found["loaded"] is None:
        return "returned None"
    if not isinstance(found["loaded"], list):
        return f"returned something that is no such state ({found['loaded']})"
    if len(found["loaded"]) > 1:
        return f"returned a state with numbers of save {' and of save '.join(f'{n:g}' for n in found['loaded'])} in it"
    return f"returned save {found['loaded'][0]:g}"


def changes(operations: list[Operation]) -> list[Operation]:
    """Those that put something into files."""
    return [one for one in operations if one["kind"] in ("open", "write", "rename")]


# Saved and loaded again ----------------------------------------------------------------------------------------------


def draw(grader: Grader) -> dict[str, Any]:
    """A state with everything in it that a checkpoint may hold."""
    generator = torch.Generator().manual_seed(grader.random("state").randrange(1 << 30))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model": {"weight": tensor(4, 5), "bias": tensor(5), "running": {"steps": torch.tensor(7), "mask": tensor(3) > 0}},
        "optimizer": {"state": {"0": {"momentum": tensor(4, 5).double()}}, "lrs": [0.1, 0.01]},
        "rng": [torch.randint(0, 255, (64,), generator=generator, dtype=torch.uint8) for _ in range(WORLD)],
        "epoch": 3, "best": 0.875, "name": "naïve run", "done": False, "nothing": None, "shape": [3, [4, None]],
    }  # fmt: skip


def round_trip(grader: Grader) -> Run:
    """Three ranks look for a checkpoint where there is none, save one, and load it."""
    return grader.run("round_trip", WORLD, state=draw(grader), folder="runs/first")


def test_one_writer(grader: Grader) -> None:
    """one rank writes"""
    operations = round_trip(grader).observed("operations")
    if sum(bool(changes(done)) for done in operations) > 1:
        raise_several(grader, operations)


@pytest.mark.needs("test_one_writer")
def test_round_trip(grader: Grader) -> None:
    """what rank 0 saved comes back on every rank"""
    run = round_trip(grader)
    for what, folder in (("nothing", "a folder that does not exist"), ("empty", "an empty folder")):
        for rank, found in enumerate(run.observed(what)):
            if found["error"] or found["loaded"] is not None:
                grader.fail(
                    "fails-without-checkpoints",
                    f"Given {folder}, load_latest {say(found)} on rank {rank}; a job that has never run has None.",
                    of=[rank],
                    at=ORDER,
                )
    saved = run.observed("own")[0]
    for rank, loaded in enumerate(run.observed("loaded")):
        if not run.observed("is_dict")[rank]:
            grader.fail(
                "state-comes-back-changed",
                f"load_latest returned no dictionary on rank {rank} right after a save.",
                of=[rank],
                at=READ,
            )
        for key, value in saved.items():
            if key.endswith("(where)"):
                if loaded.get(key) != "cpu":
                    grader.fail(
                        "state-comes-back-changed",
                        f"state{bracketed(key)} came back on {loaded.get(key)} on rank {rank}, not on the CPU: all ranks "
                        "of a node would crowd onto the GPU that saved it.",
                        of=[rank],
                        at=r"map_location || " + READ,
                    )
                continue
            if key not in loaded:
                grader.fail(
                    "state-comes-back-changed",
                    f"state{bracketed(key)} was saved and is not there on rank {rank} after load_latest.",
                    of=[rank],
                    at=WRITE,
                )
            if not same(loaded[key], value):
                wrong = f"rank {loaded['/rank'].split()[-1]}'s" if "/rank" in loaded and key == "/rank" else "not that"
                grader.fail(
                    "state-comes-back-changed",
                    f"state{bracketed(key)} was {show(value)} on rank 0, and came back as {show(loaded[key])} on rank "
                    f"{rank}" + (f": it is {wrong} state that was written." if key == "/rank" else "."),
                    of=[rank],
                    at=WRITE,
                )


def bracketed(key: str) -> str:
    """`['model']['weight']`."""
    return "".join(f"[{part!r}]" for part in key.removesuffix(" (where)").split("/")[1:])


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, in value and type."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def show(value: Any) -> str:
    """A value for a message."""
    return f"a tensor of {value.numel()} × {value.dtype}" if isinstance(value, torch.Tensor) else str(value)


def raise_several(grader: Grader, operations: list[list[Operation]]) -> None:
    """Fail with the diagnosis of `several_writers`."""
    found = several_writers(grader, operations, "")
    grader.fail(found.id, found.message, of=found.ranks, at=WRITE)


def several_writers(grader: Grader, operations: list[list[Operation]], more: str) -> Diagnosis:
    """More than one rank has written; into one file, or each into its own."""
    writers = [rank for rank, done in enumerate(operations) if changes(done)]
    opened = [{one["name"] for one in done if one["kind"] in ("open", "write")} for done in operations]
    nbytes = [sum(one.get("bytes", 0) for one in done) for done in operations]
    wrote = ", ".join(f"rank {rank}: {nbytes[rank]} bytes" for rank in writers)
    shared = sorted(set.intersection(*(opened[rank] for rank in writers)))
    if shared:
        return grader.diagnosis(
            "ranks-share-a-temporary-file",
            f"{names(writers).capitalize()} wrote into the same file, {shared[0]}, at the same time ({wrote}).{more}",
            of=writers,
            at=WRITE,
        )
    return grader.diagnosis(
        "every-rank-writes",
        f"{names(writers).capitalize()} all wrote a checkpoint ({wrote}), where one of them is enough.{more}",
        of=writers,
        at=WRITE,
    )


@pytest.mark.needs("test_round_trip")
def test_names(grader: Grader) -> None:
    """a wrapped model's state and a plain one's come back with plain names"""
    generator = torch.Generator().manual_seed(grader.random("names").randrange(1 << 30))
    plain = {
        name: torch.randn(3, generator=generator) for name in ("first.weight", "submodule.bias", "head.module.scale")
    }
    others = {"module.lr": torch.ones(1), "decay": torch.ones(1)}
    run = grader.run("wrapped", 2, plain=plain, others=others)
    for how in ("plain", "wrapped"):
        for rank, found in enumerate(run.observed(how)):
            for key, wanted in (("model", sorted(plain)), ("others", sorted(others))):
                judge_names(grader, rank, how, f"state['{key}']", found[key], wanted)
            averages = run.observed(f"{how} averages")[rank]
            judge_names(grader, rank, how, "state['averages'][0]", averages, sorted(plain))


def judge_names(grader: Grader, rank: int, how: str, where: str, found: list[str], wanted: list[str]) -> None:
    """The keys of one dictionary after loading."""
    if found == wanted:
        return
    kept = [name for name in found if name.startswith("module.") and name not in wanted]
    if kept and how == "wrapped":
        grader.fail(
            "keeps-module-prefix",
            f"{where} came from a DDP wrapper, and has the key {kept[0]!r} after load_latest on rank {rank}; the plain "
            f"model calls it {kept[0].removeprefix('module.')!r}.",
            of=[rank],
            at=PREFIX,
        )
    lost = [name for name in wanted if name not in found]
    grader.fail(
        "strips-too-much",
        f"The key {lost[0] if lost else wanted[0]!r} of {where} is not there after load_latest on rank {rank}; there are "
        f"{', '.join(map(repr, found)) or 'none'}. "
        + (
            "Not every key of it begins with 'module.', so it is no wrapper's."
            if "others" in where
            else "Only the prefix, once, is the wrapper's."
        ),
        of=[rank],
        at=PREFIX,
    )


# Order and rotation --------------------------------------------------------------------------------------------------

SAVES = 12  # past 10, where text and numbers are sorted differently
FOREIGN = {
    "notes.txt": "the learning rate was too high\n",
    "zz-report.json": '{"accuracy": 0.5}\n',
    "old/weights.pt": "from another job\n",
}


def many(grader: Grader, keep: int | None = None) -> Run:
    """Twelve saves in a folder where other people's files lie as well."""
    return grader.run("many", 2, saves=SAVES, keep=keep, foreign=FOREIGN)


@pytest.mark.needs("test_round_trip")
def test_newest(grader: Grader) -> None:
    """the newest is the one that was saved last, whatever it is called and how old its file is"""
    run = many(grader)
    gone = [name for name, text in (run.observed("foreign")[0] or {}).items() if text != FOREIGN[name]]
    if gone or any("best.pt" not in left for left in run.observed("left")[0]):
        grader.fail(
            "deletes-foreign-files",
            f"{(gone or ['best.pt'])[0]} lay in the folder before the first save, and a save has removed or changed it.",
            of=[0],
            at=REMOVE,
        )
    for saves, observed in ((5, "loaded early"), (SAVES, "loaded")):
        for rank, found in enumerate(run.observed(observed)):
            if whole(found) == saves:
                continue
            what = f"After {saves} saves load_latest {say(found)} on rank {rank}."
            if found["error"] or not isinstance(found["loaded"], list):
                others = ", ".join([*FOREIGN, "best.pt"])
                grader.fail(
                    "trips-over-foreign-files",
                    f"{what} Beside the checkpoints the folder holds {others}, which others have put there.",
                    of=[rank],
                    at=ORDER,
                )
            if saves == SAVES:
                grader.fail(
                    "sorts-numbers-as-text",
                    f"{what} After 5 saves it had been right: sorted as text, 9 comes after 10, 11 and 12.",
                    of=[rank],
                    at=ORDER,
                )
            grader.fail("not-the-newest", what, of=[rank], at=ORDER)
    for rank, found in enumerate(run.observed("loaded again")):
        if whole(found) != SAVES:
            grader.fail(
                "newest-by-file-time",
                f"The files' times were turned around, as a copy of the folder may do, and load_latest {say(found)} on "
                f"rank {rank} instead of save {SAVES}.",
                of=[rank],
                at=r"mtime || ctime || " + ORDER,
            )


@pytest.mark.needs("test_newest")
def test_keep(grader: Grader) -> None:
    """the newest `keep` are kept, and nothing else that a save has written"""
    foreign = {*FOREIGN, "best.pt"}
    for keep in (None, 1):
        lefts = many(grader, keep).observed("left")[0]
        wanted = keep or 3
        said = f"keep={keep}" if keep else "the default, keep=3,"
        for number, left in enumerate(lefts, 1):
            own = {name: size for name, size in left.items() if name not in foreign}
            count = sum(size > CHECKPOINT_BYTES for size in own.values())
            plural = "s" if count != 1 else ""
            there = f"With {said} the folder held {count} checkpoint{plural} after save {number}: {inventory(own)}."
            temporary = [name for name in own if any(mark in name.lower() for mark in ("tmp", "temp", "partial"))]
            if temporary:
                grader.fail(
                    "leaves-temporary-files",
                    f"{temporary[0]} ({own[temporary[0]]} bytes) was still there after save {number}.",
                    of=[0],
                    at=WRITE,
                )
            if count == number > wanted and number == SAVES:
                grader.fail("keeps-forever", there, of=[0], at=r"keep || " + SAVE)
            if count != min(number, wanted) and not (count == number and number < SAVES):
                grader.fail("keeps-the-wrong-number", there, of=[0], at=r"\[[^\]]*keep || " + REMOVE)


# Several ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_one_writer")
def test_everyone_waits(grader: Grader) -> None:
    """no rank returns from a save before the checkpoint is there"""
    run = grader.run("waits", WORLD)
    ended = run.observed("in the end")[0]
    for rank, there in enumerate(run.observed("there")):
        missing = [name for name, size in ended.items() if there.get(name) != size]
        if missing:
            grader.fail(
                "returns-before-the-file",
                f"When save_checkpoint returned on rank {rank}, {brief(missing[0])} had not been written yet: there was "
                f"{inventory(there)}.",
                of=[rank],
                at=r"barrier || " + SAVE,
            )


def judge_mixture(grader: Grader, found: dict[str, Any], why: str, rank: int) -> None:
    """Fail when what was loaded comes from two saves."""
    if isinstance(found["loaded"], list) and len(found["loaded"]) > 1 and max(found["loaded"]) <= SAVES:
        grader.fail("mixes-two-checkpoints", f"{why} On rank {rank} load_latest {say(found)}.", of=[rank], at=READ)


# Damage --------------------------------------------------------------------------------------------------------------


def damaged(grader: Grader) -> Run:
    """Three saves, then four copies of the folder in which the newest file is damaged in four ways."""
    return grader.run("damages", 2, position=grader.random("position").random())


DAMAGE = {
    "cut short": "was cut to half its length", "empty": "was emptied", "text": "was replaced by text",
    "one bit": "had one bit of a tensor changed",
}  # fmt: skip


@pytest.mark.needs("test_keep")
def test_damaged(grader: Grader) -> None:
    """a torn or foreign file is passed over for the next older one"""
    run = damaged(grader)
    for kind in ("cut short", "empty", "text"):
        for rank, found in enumerate(run.observed(kind)):
            if whole(found) == 2:
                continue
            judge_mixture(grader, found, f"The newest file {DAMAGE[kind]}.", rank)
            what = f"The newest of three checkpoints {DAMAGE[kind]}, and load_latest {say(found)} on rank {rank}."
            if found["error"]:
                grader.fail("trusts-the-newest", f"{what} Save 2 lay beside it, whole.", of=[rank], at=READ)
            if found["loaded"] is None:
                grader.fail("gives-up-at-a-torn-file", f"{what} Save 2 lay beside it, whole.", of=[rank], at=READ)
            grader.fail("trusts-the-newest", what, of=[rank], at=READ)


@pytest.mark.needs("test_damaged")
def test_changed_bit(grader: Grader) -> None:
    """a file in which a single bit has changed is passed over as well"""
    for rank, found in enumerate(damaged(grader).observed("one bit")):
        if whole(found) not in (2, 3):
            unnoticed = isinstance(found["loaded"], list) and not found["error"]
            numbers = (
                f" Its numbers should all be 3; there are {', '.join(f'{n:g}' for n in found['loaded'])}."
                if unnoticed
                else ""
            )
            grader.fail(
                "bit-flip-unnoticed" if unnoticed else "trusts-the-newest",
                f"The newest of three checkpoints {DAMAGE['one bit']}, and load_latest "
                f"{'loaded it on' if unnoticed else say(found) + ' on'} rank {rank}.{numbers}",
                of=[rank],
                at=READ,
            )


@pytest.mark.needs("test_damaged")
def test_warning(grader: Grader) -> None:
    """a file that is passed over is named in a warning"""
    run = damaged(grader)
    named = run.observed("names")[0]
    for kind in ("cut short", "text"):
        warned = [text for found in run.observed(kind) for text in found["warned"]]
        if not any(named[kind] in text or named[kind].rpartition(".")[0] in text for text in warned):
            heard = f"The warnings were: {brief('; '.join(warned))[:200]}" if warned else "There was no warning"
            grader.fail(
                "falls-back-silently",
                f"{brief(named[kind])} {DAMAGE[kind]}, load_latest took an older one, and no rank said so. {heard}.",
                of=range(2),
                at=r"except || warn || " + READ,
            )


@pytest.mark.needs("test_keep")
def test_same_choice(grader: Grader) -> None:
    """all ranks load the same checkpoint, also when they see different files"""
    late, damaged = 1, 2
    run = grader.run("views", WORLD, late=late, damaged=damaged)
    for what, why in (
        ("late", f"Rank {late} does not see the newest file yet"),
        ("damaged", f"Rank {damaged}'s copy of the newest file is cut short"),
    ):
        found = run.observed(what)
        for rank, one in enumerate(found):
            judge_mixture(grader, one, f"{why}.", rank)
        numbers = [whole(one) for one in found]
        if len(set(numbers)) > 1 or any(one["error"] for one in found):
            each = "; ".join(f"rank {rank}: {say(one)}" for rank, one in enumerate(found))
            grader.fail(
                "ranks-choose-differently",
                f"{why}, and load_latest did not give the same state everywhere: {each}.",
                of=[rank for rank, number in enumerate(numbers) if number != numbers[0]],
                at=LOAD,
            )


@pytest.mark.needs("test_damaged")
def test_runs_no_code(grader: Grader) -> None:
    """loading a file runs no code from it"""
    run = grader.run("code", 2)
    if any(run.observed("ran")):
        grader.fail(
            "runs-code-from-a-file",
            "A checkpoint with an object that makes a folder when it is unpickled was loaded, and the folder was made. "
            "It could have been any other command.",
            of=[rank for rank, ran in enumerate(run.observed("ran")) if ran],
            at=r"weights_only || pickle || " + READ,
        )
    for rank, found in enumerate(run.observed("loaded")):
        if whole(found) not in (1, 2):
            grader.fail(
                "gives-up-at-a-torn-file" if found["loaded"] is None and not found["error"] else "trusts-the-newest",
                f"The newest checkpoint held an object that weights_only refuses, and load_latest {say(found)} on rank "
                f"{rank}. Save 1 lay beside it, whole.",
                of=[rank],
                at=READ,
            )


# Faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_one_writer", "test_newest")
def test_full_disk(grader: Grader) -> None:
    """a save that fails for want of room raises on every rank, and the older checkpoints stay"""
    run = grader.run("full_disk", 2)
    errors = run.observed("error")
    silent = [rank for rank, error in enumerate(errors) if not error]
    if len(silent) == len(errors):
        grader.fail(
            "swallows-a-failed-save",
            "There was room for 4096 bytes of a checkpoint of 13 KB, and save_checkpoint returned on every rank as if "
            "all were well.",
            of=silent,
            at=r"except || " + WRITE,
        )
    if silent:
        loud = [rank for rank in range(len(errors)) if rank not in silent]
        grader.fail(
            "others-never-learn-of-it",
            f"With no room left on the disk, {names(loud)} raised {errors[loud[0]]}, and {names(silent)} returned as if "
            "all were well.",
            of=silent,
            at=r"\braise\b || " + AGREE,
        )
    for rank, found in enumerate(run.observed("loaded")):
        if whole(found) != 1:
            grader.fail(
                "failed-save-loses-older",
                f"A save failed for want of room, and load_latest then {say(found)} on rank {rank}, not save 1.",
                of=[rank],
                at=REMOVE,
            )
    earlier, left = run.observed("earlier")[0], run.observed("left")[0]
    rest = [name for name in left if name not in earlier]
    if rest:
        grader.fail(
            "leaves-temporary-files",
            f"After a save that failed for want of room, {rest[0]} still holds {left[rest[0]]} bytes of that room.",
            of=[0],
            at=r"except || finally || " + WRITE,
        )
    for rank, found in enumerate(run.observed("after")):
        if whole(found) != 3:
            grader.fail(
                "stumbles-over-its-own-debris",
                f"There was room again, save 3 returned, and load_latest {say(found)} on rank {rank}.",
                of=[rank],
                at=WRITE,
            )


def killed(grader: Grader) -> Run:
    """A save with keep=1 over one older checkpoint, killed at each of its instants in a process of its own."""
    return grader.run("kills", 1, chunk=CHUNK, most=30)


def way(run: Run) -> str:
    """How the checkpoint reached its name: `in place`, `deleted first`, `several files`, or empty when all is well."""
    operations, written = run.observed("operations")[0], run.observed("written")[0]
    large = [inodes for name, inodes in written["files"].items() if written["sizes"][name] > 1000]
    renamed = [one["inode"] for one in operations if one["kind"] == "rename"]
    if any(not set(inodes) & set(renamed) for inodes in large):
        return "in place"
    first = min((at for at, one in enumerate(operations) if one["kind"] == "rename"), default=0)
    if any(one["kind"] == "remove" for one in operations[:first]):
        return "deleted first"
    return ""


@pytest.mark.needs("test_one_writer", "test_newest")
def test_kills(grader: Grader) -> None:
    """killed at any instant, a save leaves the older checkpoint or the new one, whole"""
    run = killed(grader)
    instants, seen = run.observed("instants")[0], run.observed("seen")[0]
    number = f"{len(seen)} instants"
    bad = [found for found in seen if whole(found) not in (1, 2)]
    if bad:
        found = next((one for one in bad if isinstance(one["loaded"], list)), bad[0])
        where = brief(instants[found["instant"]])
        what = (
            f"Killed by SIGKILL {where}, a save over one older checkpoint left {inventory(found['left'])}, and "
            f"load_latest {say(found)}. So it went at {len(bad)} of {number}."
        )
        if isinstance(found["loaded"], list):
            grader.fail("mixes-two-checkpoints", what, of=[0], at=WRITE)
        if way(run) == "deleted first":
            grader.fail("deletes-before-the-new-is-there", what, of=[0], at=REMOVE)
        if way(run) == "in place":
            grader.fail("writes-in-place", what, of=[0], at=WRITE)
        grader.fail("killed-save-loses-older", what, of=[0], at=RENAME)
    for found in seen:
        where = brief(instants[found["instant"]])
        if found["warned"] and way(run) == "in place":
            grader.fail(
                "writes-in-place",
                f"Killed by SIGKILL {where}, a save left a torn file under a checkpoint's own name: load_latest had to "
                f"warn, “{brief(found['warned'][0])[:160]}”.",
                of=[0],
                at=WRITE,
            )


def inventory(left: dict[str, int]) -> str:
    """`a.pt (13985 bytes)`, for the first few."""
    told = [f"{brief(name)} ({size} bytes)" for name, size in sorted(left.items())]
    return ", ".join([*told[:4], *([f"{len(told) - 4} more"] if len(told) > 4 else [])]) or "an empty folder"


def brief(text: str) -> str:
    """The same, with long names of files (a checksum in them) cut in the middle."""
    return re.sub(r"[\w.-]{40,}", lambda name: f"{name[0][:18]}…{name[0][-7:]}", text)


@pytest.mark.needs("test_kills", "test_keep")
def test_after_a_kill(grader: Grader) -> None:
    """the next save works, and removes what a killed one has left"""
    run = killed(grader)
    instants, usual = run.observed("instants")[0], run.observed("usual")[0]
    for found in run.observed("seen")[0]:
        where = brief(instants[found["instant"]])
        if whole(found["again"]) != 3:
            grader.fail(
                "stumbles-over-its-own-debris",
                f"A save was killed {where} and left {inventory(found['left'])}. After the next save load_latest "
                f"{say(found['again'])}, not that save.".replace("load_latest raised", "there was an error: it raised"),
                of=[0],
                at=WRITE,
            )
        rest = found["afterwards"]
        if len(rest) > len(usual):
            kept = sorted(set(rest) & set(found["left"])) or sorted(rest)
            grader.fail(
                "leaves-temporary-files",
                f"A save was killed {where}. After the next one the folder still holds {inventory({n: rest[n] for n in kept})}, "
                f"{len(rest)} files where {len(usual)} is usual.",
                of=[0],
                at=WRITE,
            )


@pytest.mark.needs("test_kills")
def test_durable(grader: Grader) -> None:
    """a checkpoint is on the disk before it has its name, and the name before the save returns"""
    run = round_trip(grader)
    operations = next(done for done in run.observed("operations") if changes(done))
    written = run.observed("written")[0]
    synced = [(at, one["inode"]) for at, one in enumerate(operations) if one["kind"] == "fsync"]
    flushed = [at for at, one in enumerate(operations) if one["kind"] == "sync"]
    order = in_order(operations)
    for name, inodes in written["files"].items():
        renames = [at for at, one in enumerate(operations) if one["kind"] == "rename" and one["inode"] in inodes]
        writes = [at for at, one in enumerate(operations) if one["kind"] == "write" and one["inode"] == inodes[0]]
        if not writes or written["sizes"][name] < 1000:
            continue
        if not renames:
            grader.fail(
                "writes-in-place",
                f"{brief(name)} was written under the name by which it is found: {order}.",
                of=[0],
                at=WRITE,
            )
        named, ready = renames[-1], writes[-1]
        safe = [at for at, inode in synced if inode == inodes[0] and at > ready] + [at for at in flushed if at > ready]
        if not safe:
            early = any(inode == inodes[0] for _, inode in synced)
            grader.fail(
                "renames-before-fsync" if early else "never-fsyncs",
                f"{brief(name)} was written and renamed, "
                + ("but fsync came before its last bytes were written" if early else "and no fsync was called on it")
                + f": {order}.",
                of=[0],
                at=SYNC,
            )
        if min(safe) > named:
            grader.fail(
                "renames-before-fsync",
                f"{brief(name)} had its name before its contents were known to be on the disk: {order}.",
                of=[0],
                at=SYNC,
            )
        folders = {operations[named]["folder"], written["folder"]}
        if not any(inode in folders and at > named for at, inode in synced) and not any(at > named for at in flushed):
            grader.fail(
                "folder-never-fsynced",
                f"{brief(name)} was renamed, and no fsync on the folder followed: {order}.",
                of=[0],
                at=RENAME,
            )


def in_order(operations: list[Operation]) -> str:
    """The operations in few words, writes of one file in a row as one."""
    told: list[str] = []
    for one in operations:
        word = f"{one['kind']} {one.get('name', '')}".strip()
        if not told or told[-1] != word:
            told.append(word)
    return brief(" → ".join(told))


@pytest.mark.needs("test_kills")
def test_reader(grader: Grader) -> None:
    """load_latest in another process, at any moment of a save, gives the older state or the newer one"""
    run = grader.run("reader", 1, chunk=CHUNK)
    for found in run.observed("seen")[0]:
        if whole(found) not in (1, 2):
            grader.fail(
                "killed-save-loses-older",
                f"While another process was saving, {found['instant']}, load_latest {say(found)}.",
                of=[0],
                at=LOAD,
            )
    last, ended = run.observed("last")[0], run.observed("ended")[0]
    if ended != "returned" or last is None or whole(last) != 2:
        grader.fail(
            "reader-disturbs-the-writer",
            f"A process that saved while another one called load_latest ended with “{ended}”, and load_latest then "
            f"{say(last) if last else 'did not answer'}; without a reader the same save works.",
            of=[0],
            at=r"unlink || remove || rmtree || " + LOAD,
        )
