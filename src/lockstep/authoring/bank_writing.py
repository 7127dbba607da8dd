"""Add an edited file to the bank: as the smallest change of a base, in the exercise's TOML file.

Only the entry's own lines are written; other entries and comments keep their text. The new text is parsed and compared
before the file is touched.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from ..course import Course, nearest
from ..course.stubs import SCRIPT
from . import patch
from .bank import FOLDER, SOLUTION, BankError, Entry, Mistake, WrongSubmissions, parse, split_head, with_head

MOST_LINES = 40
"""Of a change. A longer one is another design, which belongs among the right submissions first, without the mistake."""

HEADER = re.compile(r'\[(?:"([^"]+)"|([\w-]+))\]\s*(?:#.*)?')
ABOVE_ALL = """\
# Wrong submissions of {exercise}, each one mistake away from its base: CONTRIBUTING.md, "The bank".
"""


def add(course: Course, exercise: str, file: Path, *, replace: bool = False) -> Entry:
    """Store this file's mistake under the file's name; with `replace`, in place of the entry of that name.

    Raises BankError when the file's head lacks a known diagnosis or the reason, when the name is taken (or there is no
    entry to replace), and when the file equals a base or is too far from all of them.
    """
    suffix = SCRIPT if file.suffix == SCRIPT else ".py"
    wrong = WrongSubmissions(course.root, exercise)
    if not (course.solutions / f"{exercise}{suffix}").is_file():
        raise BankError(f"there is no solutions/{exercise}{suffix}: write the solution first")
    if not re.fullmatch(r"\w+", file.stem) or file.stem == "base":
        raise BankError(f"{file.name} cannot be an entry's name: use letters, digits and _, and not “base”")
    said, text = split_head(file.read_text(encoding="utf-8"))
    mistake = _mistake(course, file.name, said)
    key = file.stem + (SCRIPT if suffix == SCRIPT else "")
    before = wrong.file.read_text(encoding="utf-8") if wrong.file.is_file() else ABOVE_ALL.format(exercise=exercise)
    known = parse(before)
    if (key in known) is not replace:
        remedy = "--replace puts this one in its place" if key in known else "leave --replace out"
        raise BankError(f"there is {'an' if key in known else 'no'} entry {exercise}/{key}: {remedy}")
    default = known.get("base", SOLUTION)
    base, change = _smallest_change(wrong, default, suffix, text if text.endswith("\n") else f"{text}\n")
    after = _placed(before, key, mistake, written(key, mistake, None if base == default else base, change))
    now = parse(after)
    if {name: now[name] for name in now if name != key} != {name: known[name] for name in known if name != key}:
        raise BankError(f"{wrong.file.name} has an unusual form: write [{key}] into it by hand")
    wrong.file.parent.mkdir(parents=True, exist_ok=True)
    wrong.file.write_text(after, encoding="utf-8")
    text = with_head(mistake.head, patch.apply(now[key]["change"], wrong.base(base, suffix)))
    return Entry(exercise, file.stem, suffix == SCRIPT, text, wrong.file, mistake)


def written(key: str, mistake: Mistake, base: str | None, change: str) -> str:
    """An entry as TOML; `base` is None where it is the file's default."""
    lines = [f"[{key}]" if re.fullmatch(r"[\w-]+", key, re.ASCII) else f'["{key}"]']
    lines += [f"diagnosis = {_string(mistake.diagnosis)}"]
    lines += [f"check = {_string(mistake.check)}"] if mistake.check else []
    lines += [f"why = {_string(mistake.why)}"]
    for name, words in (("also", mistake.also), ("needs", mistake.needs)):
        lines += [f"{name} = [{', '.join(map(_string, words))}]"] if words else []
    lines += [f"base = {_string(base)}"] if base else []
    return "\n".join([*lines, f"change = {_block(change)}"]) + "\n"


def _mistake(course: Course, name: str, said: dict[str, str]) -> Mistake:
    lacking = next((key for key in ("diagnosis", "why") if key not in said), None)
    if lacking:
        raise BankError(f"{name} must begin with the lines # diagnosis: ID and # why: …; there is no {lacking}")
    also, needs = (
        tuple(word.strip() for word in said.get(key, "").split(",") if word.strip()) for key in ("also", "needs")
    )
    for id in (said["diagnosis"], *also):
        if id not in course.catalogue:
            near = nearest(id, course.catalogue)
            hint = f"Did you mean {near}?" if near else "Add it first."
            raise BankError(f"the diagnosis {id!r} is not in autograder/diagnoses.toml. {hint}")
    return Mistake(said["diagnosis"], said["why"], said.get("check", ""), also, needs)


def _smallest_change(wrong: WrongSubmissions, default: str, suffix: str, text: str) -> tuple[str, str]:
    """The base that `text` differs least from, and the change. A base other than the default must save two lines."""
    made = []
    for name in wrong.bases(suffix):
        base = wrong.base(name, suffix)
        if base == text:
            raise BankError(f"the file equals the base {name!r} of {wrong.exercise}: there is no mistake in it")
        change = patch.make(base, text)
        made.append((patch.size(change) + (0 if name == default else 2), name, change))
    lines, name, change = min(made)
    if lines > MOST_LINES:
        raise BankError(
            f"the smallest change, of {name!r}, takes {lines} lines: too many for one mistake. "
            f"Put the same design without the mistake into {(FOLDER / 'right' / wrong.exercise).as_posix()} first"
        )
    return name, change


def _placed(text: str, key: str, mistake: Mistake, block: str) -> str:
    """The text with this block in place of the entry `key`, else below the entries of its diagnosis, else last."""
    lines = text.splitlines(keepends=True)
    starts = [(number, match[1] or match[2]) for number, line in enumerate(lines) if (match := HEADER.match(line))]
    spans = {}
    for (start, name), (end, _) in pairwise([*starts, (len(lines), "")]):
        while lines[end - 1].strip() == "" or lines[end - 1].startswith("#"):
            end -= 1  # a comment above the next entry is that one's
        spans[name] = (start, end)
    if key in spans:
        start, end = spans[key]
        return "".join([*lines[:start], block, *lines[end:]])
    known = parse(text)
    alike = [span for name, span in spans.items() if known[name].get("diagnosis") == mistake.diagnosis]
    if alike:
        end = alike[-1][1]
        return "".join([*lines[:end], "\n", block, *lines[end:]])
    return text.rstrip() + "\n\n" + block


def _string(text: str) -> str:
    if '"' in text and "'" not in text and "\\" not in text:
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False)


def _block(text: str) -> str:
    if "'''" not in text and all(character.isprintable() or character in "\n\t" for character in text):
        return f"'''\n{text}'''"
    return json.dumps(text)
