"""What saves and loads of `checkpoint` came to: as values to compare, and in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from lockstep.grading import Diagnosis, Failed, Grader, Hypothesis, fitting, names

Operation = dict[str, Any]
FOREIGN = {
    "notes.txt": "the learning rate was too high\n",
    "zz-report.json": '{"accuracy": 0.5}\n',
    "old/weights.pt": "from another job\n",
    "download.tmp": "a data set, half of it\n",
    "upload.partial": "another one\n",
    "tmp_upload.bin": "a third\n",
}
BESIDE = [*FOREIGN, "best.pt"]
MIXTURE, ERROR, NO_STATE = "numbers of two saves", "an error", "no such state"


def outcome(found: dict[str, Any]) -> int | str | None:
    """The number of the one save that was loaded; None for no checkpoint; one of the words above."""
    if found["error"]:
        return ERROR
    if found["loaded"] is None:
        return None
    if not isinstance(found["loaded"], list):
        return NO_STATE
    return int(found["loaded"][0]) if len(found["loaded"]) == 1 else MIXTURE


def say(found: dict[str, Any]) -> str:
    """What load_latest did, after its name."""
    came = outcome(found)
    if came == ERROR:
        return f"raised {brief(found['error'].removesuffix(': '))}"
    if came == NO_STATE:
        return f"returned something that is not a saved state ({found['loaded']})"
    if came == MIXTURE:
        return f"returned a mixture of save {' and save '.join(f'{n:g}' for n in found['loaded'])}"
    return "returned None" if came is None else f"returned save {came}"


def inventory(left: dict[str, int]) -> str:
    """`a.pt (13985 bytes)`, for the first few."""
    told = [f"{brief(name)} ({size} bytes)" for name, size in sorted(left.items())]
    return ", ".join([*told[:4], *([f"{len(told) - 4} more"] if len(told) > 4 else [])]) or "an empty folder"


def brief(text: str) -> str:
    """The same, with long names of files (a checksum in them) cut in the middle."""
    return re.sub(r"[\w.-]{40,}", lambda name: f"{name[0][:18]}…{name[0][-7:]}", text)


def in_order(operations: list[Operation]) -> str:
    """The operations in few words, writes of one file in a row as one."""
    words = [f"{one['kind']} {one.get('name', '')}".strip() for one in operations]
    return brief(" → ".join(word for word, last in zip(words, ["", *words], strict=False) if word != last))


def changes(operations: list[Operation] | None) -> list[Operation]:
    """Those that put something into files."""
    return [one for one in operations or [] if one["kind"] in ("open", "write", "rename")]


DURABLE = {
    "writes-in-place": "was written under the name by which it is found",
    "never-fsyncs": "was written and renamed, and no fsync was called on it",
    "renames-before-fsync": "had its name before all of its contents were known to be on the disk",
    "folder-never-fsynced": "was renamed, and no fsync on the folder followed",
}


def durability(operations: list[Operation], inodes: list[int], folders: Iterable[int]) -> str:
    """What a file lacks to survive a power failure, as a diagnosis; empty when it lacks nothing.

    `inodes` are those of the file and of the folders between it and the checkpoints' own, which is among `folders`.
    """

    def at(kind: str, places: Iterable[int]) -> list[int]:
        return [number for number, one in enumerate(operations) if one["kind"] == kind and one["inode"] in places]

    writes, renames = at("write", inodes[:1]), at("rename", inodes)
    everything = [number for number, one in enumerate(operations) if one["kind"] == "sync"]
    if not writes:
        return ""
    if not renames:
        return "writes-in-place"
    synced = at("fsync", inodes[:1])
    whole = [number for number in synced + everything if number > writes[-1]]
    if not synced + everything:
        return "never-fsyncs"
    if not whole or min(whole) > renames[-1]:
        return "renames-before-fsync"
    around = {operations[renames[-1]]["folder"], *folders}
    if not any(number > renames[-1] for number in at("fsync", around) + everything):
        return "folder-never-fsynced"
    return ""


def unsafe(on_ranks: Sequence[dict[str, Any]]) -> str:
    """A file that the rank that wrote has left without its contents or its name known to be on the disk, or nothing."""
    one = next((one for one in on_ranks if changes(one["operations"])), on_ranks[0])
    files, folders = one["written"]["files"], [one["written"]["folder"]]
    return next((name for name, inodes in files.items() if durability(one["operations"], inodes, folders)), "")


def all_raised(grader: Grader, what: str, errors: list[str], at: str) -> list[int]:
    """If one rank raised an error all must have; if none did, all ranks."""
    silent = [rank for rank, error in enumerate(errors) if not error]
    if any(errors):
        raised = next(f"rank {rank} raised {error}" for rank, error in enumerate(errors) if error)
        said = f"{what}: {raised}, and {{ranks}} returned without an error."
        grader.fail_on(silent, "others-never-learn-of-it", said, at=at)
    return silent


def judge_durable(
    grader: Grader, what: str, operations: list[Operation], inodes: list[int], folder: int, at: str, in_place: str = ""
) -> None:
    """A file survives a power failure; `inodes` are as for `durability`. `in_place` says where to look if it has no other name."""
    if id := durability(operations, inodes, [folder]):
        at = in_place or at if id == "writes-in-place" else at
        grader.fail(id, f"{what} {DURABLE[id]}: {in_order(operations)}.", of=[0], at=at)


def judge_older(grader: Grader, what: str, earlier: list[str], on_ranks: Sequence[dict[str, Any]], at: str) -> None:
    """A save that raised has removed an older checkpoint only if the new one is on the disk."""
    gone = [name for name in earlier if name not in on_ranks[0]["written"]["files"]]
    if gone and (lost := unsafe(on_ranks)):
        said = (
            f"{what}, and save_checkpoint raised. {brief(gone[0])} is gone, and {brief(lost)} may not be on the disk."
        )
        grader.fail("failed-save-loses-older", said, of=[0], at=at)


def way(operations: list[Operation], written: dict[str, Any]) -> str:
    """The mistake on the way of a checkpoint to its name, as a diagnosis; else the one for all other ways."""
    large = [inodes for name, inodes in written["files"].items() if written["sizes"][name] > 1000]
    renamed = [number for number, one in enumerate(operations) if one["kind"] == "rename"]
    moved = {operations[number]["inode"] for number in renamed}
    if any(one["kind"] == "remove" for one in operations[: min(renamed, default=0)]):
        return "deletes-before-the-new-is-there"
    return "killed-save-loses-older" if all(moved & set(inodes) for inodes in large) else "writes-in-place"


def several_writers(grader: Grader, operations: list[Any], at: str, more: str = "") -> Diagnosis | None:
    """More than one rank has written; into one file, or each into its own."""
    writers = [rank for rank, done in enumerate(operations) if changes(done)]
    if len(writers) < 2:
        return None
    opened = [{one["name"] for one in changes(operations[rank]) if one["kind"] != "rename"} for rank in writers]
    nbytes = [sum(one.get("bytes", 0) for one in operations[rank]) for rank in writers]
    wrote = ", ".join(f"rank {rank}: {count} bytes" for rank, count in zip(writers, nbytes, strict=True))
    id, what = "every-rank-writes", f"all wrote a checkpoint ({wrote}), where one of them is enough."
    if shared := sorted(set.intersection(*opened)):
        id, what = "ranks-share-a-temporary-file", f"wrote into the same file, {shared[0]}, at the same time ({wrote})."
    return grader.diagnosis(id, f"{names(writers).capitalize()} {what}{more}", of=writers, at=at)


def judge_writers(grader: Grader, operations: list[Any], at: str) -> None:
    """No more than one rank has written."""
    if found := several_writers(grader, operations, at):
        raise Failed(found)


def judge_same(grader: Grader, why: str, found: Sequence[dict[str, Any]], older: int, at: str) -> None:
    """Every rank has loaded save 3, which some can read, or every rank the save `older`, which all can."""
    came = [outcome(one) for one in found]
    if len(set(came)) == 1 and came[0] in (older, 3):
        return
    each = "; ".join(f"rank {rank}: {say(one)}" for rank, one in enumerate(found))
    id = "mixes-two-checkpoints" if MIXTURE in came else "ranks-choose-differently"
    id = "gives-up-at-a-torn-file" if set(came) == {None} else id
    bad = [rank for rank, one in enumerate(came) if one != came[0]] or range(len(came))
    grader.fail(
        id,
        f"{why}. load_latest did not return save {older} on every rank, or save 3 on every rank: {each}.",
        of=bad,
        at=at,
    )


def loads(
    grader: Grader, what: str, found: Sequence[dict[str, Any]], right: Collection[int | None], *mistakes: Hypothesis
) -> None:
    """Every rank has loaded one of the saves `right`; `what` is told before it.

    Else the diagnosis is the mistake that predicts the outcome on the first wrong rank, or the last one.
    """
    bad = [rank for rank, one in enumerate(found) if outcome(one) not in right]
    if bad:
        first = found[bad[0]]
        why = fitting([outcome(first)], mistakes[:-1]) or mistakes[-1]
        message = f"{what} load_latest {say(first)} on {names(bad)}. {why.says}".rstrip()
        grader.fail(why.id, message, of=bad, at=why.at)


def draw(seed: int, world: int) -> dict[str, Any]:
    """A state with everything in it that a checkpoint may hold."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model": {"weight": tensor(4, 5), "bias": tensor(5), "running": {"steps": torch.tensor(7), "mask": tensor(3) > 0}},
        "optimizer": {"state": {"0": {"momentum": tensor(4, 5).double()}}, "lrs": [0.1, 0.01]},
        "rng": [torch.randint(0, 255, (64,), generator=generator, dtype=torch.uint8) for _ in range(world)],
        "epoch": 3, "best": 0.875, "name": "naïve run", "done": False, "nothing": None, "shape": [3, [4, None]],
    }  # fmt: skip
