"""What `checkpoint` has to do.

    save_checkpoint(path, state, keep=3) -> None
    load_latest(path) -> dict | None

The faults are real: processes are killed by SIGKILL before and within every operation on a file, a write fails for want
of room, files are cut and bits changed. How a submission calls its files is its own affair: what it has written is
known from the operations that the ranks traced, and from what changed in the folder.
"""

from __future__ import annotations

import pytest
import torch
from judging.checkpoint import (
    BESIDE,
    ERROR,
    FOREIGN,
    MIXTURE,
    NO_STATE,
    all_raised,
    brief,
    changes,
    draw,
    inventory,
    judge_durable,
    judge_older,
    judge_same,
    judge_writers,
    loads,
    outcome,
    say,
    several_writers,
    unsafe,
    way,
)  # fmt: skip

from lockstep.grading import EXACT, Cause, Diagnosis, Grader, Hypothesis, Run, ending, evidence, names, sentence

WORLD = 3
CHECKPOINT_BYTES = 6000  # a file of so many bytes holds a good part of a state of 12 KB
CHUNK = 4096  # the largest write that the tracer lets through at once
SAVES = 12  # past 10, where text and numbers are sorted differently

SAVE, LOAD = r"def save_checkpoint", r"def load_latest"
WRITE = r"torch\.save\( || \bsave\( || \.write\( || open\( || " + SAVE
RENAME = r"os\.replace || os\.rename || \.replace\((?!\") || \.rename\( || move\( || " + WRITE
SYNC = r"fsync\(.*fileno || fsync || " + RENAME
REMOVE = r"unlink || os\.remove || rmtree || " + SAVE
ORDER = r"sorted\( || \.sort\( || max\( || glob || listdir || iterdir || " + LOAD
READ = r"torch\.load\( || \bload\( || " + LOAD
DEVICE = r"map_location || " + READ
PREFIX = r"module\. || " + LOAD
KEEP = r"\[[^\]]*keep || " + REMOVE
AGREE = r"broadcast || all_reduce || all_gather || barrier || " + SAVE
RAISE = r"\braise\b || " + AGREE

NEVER_RUN = Hypothesis("fails-without-checkpoints", "A job that has never run has no checkpoint.", None, ORDER)
CHANGED, MISSING = "state-comes-back-changed", "missing"
CAME_BACK = [
    Hypothesis(CHANGED, "It was saved, and is not there.", MISSING),
    Hypothesis(CHANGED, "All ranks of a node would crowd onto the GPU that saved it.", "cuda", DEVICE),
]
PRESENT = f"Beside the checkpoints the folder holds {', '.join(BESIDE)}, which are not checkpoints."
TRIPPED = [Hypothesis("trips-over-foreign-files", PRESENT, came, ORDER) for came in (ERROR, None, NO_STATE)]
TURNED = "the files' times were turned around, as a copy of the folder may do, and"
AS_TEXT = Hypothesis("sorts-numbers-as-text", "5 saves were in order: as text, 9 comes after 10.", None, ORDER)
TIME = r"mtime || ctime || "
BY_TIME = Hypothesis("newest-by-file-time", "", None, TIME + ORDER)
BEHIND = "Saves 5 and 6 were made by a process whose clock was a day behind."
IN_MEMORY = "If the files' numbers are counted in memory, a process does not know of other processes' saves."
EARLIEST = f"Save {SAVES} was removed: its file's time was the earliest."
KEPT = [
    Hypothesis("newest-by-file-time", EARLIEST, SAVES - 2, TIME + REMOVE),
    Hypothesis("keeps-old-ones", f"Save {SAVES} was to be kept.", None, REMOVE),
]
FOREVER = list(range(1, SAVES + 1))

DAMAGE = {
    "cut short": "was cut to half its length", "empty": "was emptied", "text": "was replaced by text",
    "one bit": "had one bit of a tensor changed", "one digit": "had one bit of a text changed, in a digit",
}  # fmt: skip
TORN = [
    Hypothesis("mixes-two-checkpoints", "", MIXTURE, READ),
    Hypothesis("gives-up-at-a-torn-file", "The older one lay beside it, whole.", None, READ),
    Hypothesis("trusts-the-newest", "The older one lay beside it, whole.", ERROR, READ),
]
AS_IT_IS = "A state has the numbers of one save: this one was loaded as it is."
FLIPPED = [Hypothesis("bit-flip-unnoticed", AS_IT_IS, MIXTURE, READ), TORN[-1]]

NO_ROOM = {
    "no room": "There was room for 4096 bytes of a checkpoint of 13 KB",
    "no folder": "A file is in the way of the folder, which cannot be made",
    "no pickle": "The state held a generator, which torch.save cannot write",
}
LOST = Hypothesis("failed-save-loses-older", "", None, REMOVE)
STUMBLED = Hypothesis("stumbles-over-its-own-debris", "", None, WRITE)
WAYS = {"deletes-before-the-new-is-there": REMOVE, "writes-in-place": WRITE, "killed-save-loses-older": RENAME}
TOO_EARLY = Hypothesis("killed-save-loses-older", "", None, LOAD)
ONLY_ONCE = Hypothesis("looks-only-once", "", None, LOAD)


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    said = sentence(cause.headline)
    scenario = next((name for name in run.observed("scenario") if name), "")
    if found := several_writers(grader, run.observed("operations"), WRITE, f" {said}"):
        return found
    early = scenario == "many" and not any(run.observed("left")) and "by a new process" not in cause.headline
    if cause.kind == "raised" and early and cause.error is not None:
        said, at = sentence(cause.headline, PRESENT), cause.error.frame or ORDER
        return grader.diagnosis("trips-over-foreign-files", said, of=cause.ranks, at=at)
    if cause.kind == "raised" and scenario == "waits" and 0 not in cause.ranks and cause.error is not None:
        said = "Only rank 0's state counts. Rank 1 passed an empty dictionary, rank 2 one with a generator in it."
        said, at = f"{said} {sentence(cause.headline)}", cause.error.frame or SAVE
        return grader.diagnosis("reads-what-others-pass", said, of=cause.ranks, at=at)
    if cause.kind not in ("hang", "mismatch"):
        return None
    id, what, at = "rank-conditional-collective", said, cause.frame or AGREE
    raised = [rank for rank, error in enumerate(run.observed("error")) if error]
    if scenario == "full_disk" and raised:
        id, at = "raises-on-the-writer-only", AGREE
        raising = f"{names(raised)} raised {run.observed('error')[raised[0]]}"
        what = f"When a save could not be written, {raising}, and the others waited.{ending(cause)}"
    if scenario == "views":
        id, at = "ranks-choose-differently", LOAD
        what = f"A rank could not read the checkpoint that the others could, and the ranks no longer did the same.{ending(cause)}"
    return grader.diagnosis(id, what, evidence=evidence(run), of=cause.ranks, at=at)


# Saved and loaded again ----------------------------------------------------------------------------------------------


def round_trip(grader: Grader) -> Run:
    """Three ranks look for a checkpoint where there is none, save one, and load it."""
    seed = grader.random("state").randrange(1 << 30)
    return grader.run("round_trip", WORLD, state=draw(seed, WORLD), folder="runs/first")


def test_one_writer(grader: Grader) -> None:
    """one rank writes"""
    judge_writers(grader, round_trip(grader).observed("operations"), WRITE)


@pytest.mark.needs("test_one_writer")
def test_round_trip(grader: Grader) -> None:
    """what rank 0 saved comes back on every rank"""
    run = round_trip(grader)
    loads(grader, "Given a folder that does not exist,", run.observed("nothing"), [None], NEVER_RUN)
    loads(grader, "Given an empty folder,", run.observed("empty"), [None], NEVER_RUN)
    saved, loaded = run.observed("own")[0], run.observed("loaded")
    for key, value in saved.items():
        came = [one.get(key, MISSING) for one in loaded]
        right = "cpu" if key.endswith(" (where)") else value
        what = f"After load_latest state{key}"
        grader.explain(what, came, right, CAME_BACK, otherwise=CHANGED, at=WRITE, tolerance=EXACT)
    for rank, one in enumerate(loaded):
        more = sorted(set(one) - set(saved))
        grader.fail_on([rank] * bool(more), CHANGED, f"On {{ranks}} there is state{more[:1]}, never saved.", at=WRITE)


@pytest.mark.needs("test_round_trip")
def test_names(grader: Grader) -> None:
    """a wrapped model's state and a plain one's come back with plain names"""
    own = ("first.weight", "submodule.bias", "head.module.scale", "module.inner")
    generator = grader.generator("names")
    plain = {name: torch.randn(3, generator=generator) for name in own}
    others = {"module.lr": torch.ones(1), "decay": torch.ones(1)}
    run = grader.run("wrapped", 2, plain=plain, others=others)
    kept = [f"module.{name}" for name in sorted(own)]
    for how in ("wrapped", "plain"):
        for key in ("model", "averages", "pair", "within", "twice", "others"):
            right = sorted({"twice": kept, "others": others}.get(key, own))
            names = [one[key] for one in run.observed(how)]
            mistakes = [Hypothesis("keeps-module-prefix", "All of them have the wrapper's prefix.", kept)]
            mistakes.append(Hypothesis("strips-too-much", "The prefix was removed more than once.", sorted(own)))
            what = f"Among the names in state['{key}'] of a {how} model, one after load_latest"
            grader.explain(what, names, right, mistakes, otherwise="strips-too-much", at=PREFIX)


# Order, rotation, and the others --------------------------------------------------------------------------------------


def many(grader: Grader, keep: int | None = None) -> Run:
    """Twelve saves in a folder where other people's files lie as well."""
    return grader.run("many", 2, saves=SAVES, keep=keep, foreign=FOREIGN)


@pytest.mark.needs("test_round_trip")
def test_newest(grader: Grader) -> None:
    """the newest is the one that was saved last, whatever its name and its file's time"""
    run = many(grader)
    gone = [name for name, text in (run.observed("foreign")[0] or {}).items() if text != FOREIGN[name]]
    gone += ["best.pt"] * any("best.pt" not in left for left in run.observed("left")[0])
    if gone:
        what = f"{gone[0]} lay in the folder before the first save, and a save has removed or changed it."
        grader.fail("deletes-foreign-files", what, of=[0], at=REMOVE)
    why, at = (BEHIND, r"time || now") if any(run.observed("clock")) else (IN_MEMORY, r"count || number")
    cases = (4, why, f"{at} || {SAVE}"), (6, why, f"{at} || {SAVE}"), (None, "", ORDER)
    not_newest = [Hypothesis("not-the-newest", says, came, where) for came, says, where in cases]
    for number, by in ((5, "the last one by a new process"), (7, "5 and 6 by another process")):
        found = run.observed(f"loaded after {number}")
        loads(grader, f"After {number} saves, {by},", found, [number], *TRIPPED, *not_newest)
    loads(grader, f"After {SAVES} saves", run.observed("loaded"), [SAVES], *TRIPPED, AS_TEXT)
    loads(grader, f"After {SAVES} saves {TURNED}", run.observed("loaded again"), [SAVES], BY_TIME)


@pytest.mark.needs("test_newest")
def test_keep(grader: Grader) -> None:
    """keeps the `keep` newest checkpoints, and nothing else that a save has written"""
    for keep in (None, 1):
        lefts = [dict(left) for left in many(grader, keep).observed("left")[0]]
        for number, left in enumerate(lefts, 1):
            marks = ("tmp", "temp", "partial")
            temporary = [name for name in left if name not in BESIDE and any(mark in name.lower() for mark in marks)]
            there = f"{''.join(temporary[:1])} was still there after save {number}."
            grader.fail_on([0] * bool(temporary), "leaves-temporary-files", there, at=WRITE)
        own = [{name: size for name, size in left.items() if name not in BESIDE} for left in lefts]
        counts = [sum(size > CHECKPOINT_BYTES for size in left.values()) for left in own]
        right = [min(number, keep or 3) for number in range(1, SAVES + 1)]
        if wrong := [number for number in range(SAVES) if counts[number] != right[number]]:
            id, why = (
                ("keeps-forever", " None was ever removed.") if counts == FOREVER else ("keeps-the-wrong-number", "")
            )
            what = f"With {f'keep={keep}' if keep else 'the default, keep=3,'} the folder held {counts[wrong[0]]}"
            what = f"{what} checkpoints after save {wrong[0] + 1}, not {right[wrong[0]]}: {inventory(own[wrong[0]])}."
            grader.fail(id, what + why, of=[0], at=KEEP)
    rest = {name: size for name, size in many(grader).observed("left with keep=2")[0].items() if name not in BESIDE}
    if (count := sum(size > CHECKPOINT_BYTES for size in rest.values())) != 2:
        what = f"There were 3 checkpoints. After a save with keep=2 the folder held {count}: {inventory(rest)}."
        grader.fail("keeps-the-wrong-number", what, of=[0], at=KEEP)


@pytest.mark.needs("test_round_trip")
def test_everyone_waits(grader: Grader) -> None:
    """no rank returns from a save before the checkpoint is there"""
    run = grader.run("waits", WORLD)
    ended = run.observed("in the end")[0]
    for rank, there in enumerate(run.observed("there")):
        missing = [name for name, size in ended.items() if there.get(name) != size]
        if missing:
            what = f"When save_checkpoint returned on rank {rank}, {brief(missing[0])} had not been written yet: there was {inventory(there)}."
            grader.fail("returns-before-the-file", what, of=[rank], at=r"barrier || " + SAVE)


# Damage --------------------------------------------------------------------------------------------------------------


def damaged(grader: Grader) -> Run:
    """Three saves, then four copies of the folder in which the newest file is damaged in four ways."""
    return grader.run("damages", 2, position=grader.random("position").random())


@pytest.mark.needs("test_keep")
def test_damaged(grader: Grader) -> None:
    """skips a torn file and loads the next older checkpoint"""
    for kind in ("cut short", "empty", "text"):
        what = f"The newest of three checkpoints {DAMAGE[kind]}, and"
        loads(grader, what, damaged(grader).observed(kind), [2], *TORN)
    what = f"After {SAVES} saves {TURNED} save {SAVES + 1}, with keep=2, was cut short. Then"
    loads(grader, what, many(grader).observed("loaded older"), [SAVES], *TORN, *KEPT)


@pytest.mark.needs("test_damaged")
def test_changed_bit(grader: Grader) -> None:
    """skips a file in which a single bit has changed"""
    for kind in ("one bit", "one digit"):
        what = f"The newest of three checkpoints {DAMAGE[kind]}, and"
        loads(grader, what, damaged(grader).observed(kind), [2, 3], *FLIPPED)


@pytest.mark.needs("test_damaged")
def test_warning(grader: Grader) -> None:
    """names a skipped file in a warning"""
    run = damaged(grader)
    for kind, name in run.observed("names")[0].items():
        warned = [text for found in run.observed(kind) for text in found["warned"]]
        passed_over = outcome(run.observed(kind)[0]) == 2
        if passed_over and not any(name in text or name.rpartition(".")[0] in text for text in warned):
            heard = f"The warnings were: {brief('; '.join(warned))[:200]}" if warned else "There was no warning"
            what = f"{brief(name)} {DAMAGE[kind]}, load_latest took an older one, and no rank's warning named the file. {heard}."
            grader.fail("falls-back-silently", what, of=range(2), at=r"except || warn || " + READ)


@pytest.mark.needs("test_keep")
def test_same_choice(grader: Grader) -> None:
    """all ranks load the same checkpoint, even when they see different files"""
    late, damaged = 1, 2
    run = grader.run("views", WORLD, late=late, damaged=damaged)
    unseen, unread = f"Rank {late} does not see save 3 yet", f"rank {damaged} gets an error (EIO) when it reads save"
    judge_same(grader, unseen, run.observed("late"), 2, LOAD)
    judge_same(grader, f"R{unread[1:]} 3", run.observed("damaged"), 2, LOAD)
    judge_same(grader, f"{unseen}, and {unread} 2", run.observed("both"), 1, LOAD)


@pytest.mark.needs("test_round_trip")
def test_runs_no_code(grader: Grader) -> None:
    """loading a file runs no code from it"""
    run = grader.run("code", 2)
    what = "A checkpoint with an object that makes a folder when it is unpickled was loaded, and the folder was made. It could have been any command."
    ran = [rank for rank, ran in enumerate(run.observed("ran")) if ran]
    grader.fail_on(ran, "runs-code-from-a-file", what, at=r"weights_only || pickle || " + READ)


# Faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_one_writer", "test_newest")
def test_full_disk(grader: Grader) -> None:
    """a save that cannot be written raises on every rank, and the older checkpoints stay"""
    run = grader.run("full_disk", 2)
    for key, where in NO_ROOM.items():
        silent = all_raised(grader, where, run.observed(key), RAISE)
        what = f"{where}, and save_checkpoint returned on every rank without an error."
        grader.fail_on(silent, "swallows-a-failed-save", what, at=r"except || " + WRITE)
    loads(grader, "A save failed for want of room, and", run.observed("loaded"), [1], LOST)
    loads(grader, "There was room again, save 3 returned, and", run.observed("after"), [3], STUMBLED)
    earlier, left, afterwards = (run.observed(name)[0] for name in ("earlier", "left", "left after"))
    rest = {name: size for name, size in left.items() if name not in earlier and afterwards.get(name) == size}
    what = f"A save failed for want of room, and after the next one the folder still holds {inventory(rest)} of it."
    grader.fail_on([0] * bool(rest), "leaves-temporary-files", what, at=r"except || finally || " + WRITE)
    run = grader.run("breaks", 2)
    safe = not unsafe(run.observed("usual"))  # where no save is, `test_durable` says so
    for on_ranks in zip(*run.observed("seen"), strict=True):
        what = f"An operation of a save failed with EIO ({brief(on_ranks[0]['instant'])})"
        silent = all_raised(grader, what, [found["raised"] for found in on_ranks], RAISE)
        lost = f"{what}. save_checkpoint returned without an error, and load_latest then {say(on_ranks[0])}."
        if silent and outcome(on_ranks[0]) != 2:
            grader.fail("swallows-a-failed-save", lost, of=[0], at=r"except || " + WRITE)
        if silent and safe and (lost := unsafe(on_ranks)):
            lost = f"{what}. save_checkpoint returned without an error, and {brief(lost)} may not be on the disk."
            grader.fail("swallows-a-failed-save", lost, of=[0], at=r"except OSError || except || suppress || " + SYNC)
        judge_older(grader, what, run.observed("earlier")[0] if safe and not silent else [], on_ranks, REMOVE)
        loads(grader, f"{what}, and", on_ranks, [1, 2], Hypothesis("mixes-two-checkpoints", "", MIXTURE, WRITE), LOST)


def killed(grader: Grader) -> Run:
    """A save with keep=1 over one older checkpoint, killed at each of its instants in a process of its own."""
    return grader.run("kills", 1, chunk=CHUNK, most=30)


@pytest.mark.needs("test_one_writer", "test_newest")
def test_kills(grader: Grader) -> None:
    """killed at any instant, a save leaves the older checkpoint or the new one, whole"""
    run = killed(grader)
    instants, seen = run.observed("instants")[0], run.observed("seen")[0]
    id = way(run.observed("operations")[0], run.observed("written")[0])
    bad = [found for found in seen if outcome(found) not in (1, 2)]
    for found in sorted(bad, key=lambda found: outcome(found) != MIXTURE):
        so = f"So it went at {len(bad)} of {len(seen)} instants."
        what = f"Killed by SIGKILL {brief(instants[found['instant']])}, a save over one older checkpoint left"
        mistakes = Hypothesis("mixes-two-checkpoints", so, MIXTURE, WRITE), Hypothesis(id, so, None, WAYS[id])
        loads(grader, f"{what} {inventory(found['left'])}, and", [found], [1, 2], *mistakes)
    for found in seen:
        if found["warned"] and id == "writes-in-place":
            what = f"Killed by SIGKILL {brief(instants[found['instant']])}, a save left a torn file under a checkpoint's own name: "
            what += f"load_latest had to warn, “{brief(found['warned'][0])[:160]}”."
            grader.fail(id, what, of=[0], at=WRITE)


@pytest.mark.needs("test_kills", "test_keep")
def test_after_a_kill(grader: Grader) -> None:
    """the next save works, and removes what a killed one has left"""
    run = killed(grader)
    usual = run.observed("usual")[0]
    for found in run.observed("seen")[0]:
        where = f"A save was killed {brief(run.observed('instants')[0][found['instant']])}"
        left, rest = found["left"], found["afterwards"]
        what = f"{where} and left {inventory(left)}. After another save, which should be found,"
        loads(grader, what, [found["again"]], [3], STUMBLED)
        still = inventory({name: rest[name] for name in sorted(set(rest) & set(left)) or rest})
        what = f"{where}. After the next one the folder still holds {still}, {len(rest)} files where {len(usual)} is usual."
        grader.fail_on([0] * (len(rest) > len(usual)), "leaves-temporary-files", what, at=WRITE)


@pytest.mark.needs("test_kills")
def test_durable(grader: Grader) -> None:
    """a checkpoint is on the disk before it has its name, and the name before the save returns"""
    run = round_trip(grader)
    operations = next(done for done in run.observed("operations") if changes(done))
    written = run.observed("written")[0]
    for name, inodes in written["files"].items():
        judge_durable(grader, brief(name), operations, inodes, written["folder"], SYNC, WRITE)


@pytest.mark.needs("test_kills")
def test_reader(grader: Grader) -> None:
    """load_latest in another process, at any moment of a save, gives the older state or the newer one"""
    run = grader.run("reader", 1, chunk=CHUNK)
    for found in run.observed("seen")[0]:
        what = f"While another process was saving, {found['instant']},"
        loads(grader, what, [found], [1, 2], TOO_EARLY)
    last, ended = run.observed("last")[0], run.observed("ended")[0]
    if ended != "returned" or last is None or outcome(last) != 2:
        then = f"load_latest then {say(last) if last else 'did not answer'}; without a reader the same save works."
        what = f"A process that saved while another one called load_latest ended with “{ended}”, and {then}"
        grader.fail("reader-disturbs-the-writer", what, of=[0], at=r"unlink || remove || rmtree || " + LOAD)
    for found in grader.run("removed", 1, most=3).observed("seen")[0]:
        what = f"load_latest was about to open {brief(found['file'])}, its file number {found['number']}. Another process saved with keep=1, and"
        loads(grader, what, [found], [1, 2], ONLY_ONCE)
