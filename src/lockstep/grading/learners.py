"""Whose file is it? How Moodle, Canvas, Gradescope and GitHub Classroom name what is in their downloads.

- Moodle: a folder `Fullname_ID_assignsubmission_file_` for each learner, or files with that prefix; `Participant 12` in
  place of the name when marking is blind. With groups, the group comes before the name.
- Canvas (`lib/content_zipper.rb`): flat files `NAME[_LATE]_USER_ATTACHMENT_FILE`. NAME is the sortable name in lower
  case, word characters only; when grading is anonymous, `[LATE_]anon_ID` replaces NAME and USER. A later upload of the
  same name gets `-1`, `-2` before its suffix; attachment numbers grow.
- Gradescope: folders `submission_NUMBER`, and `submission_metadata.yml`, with Ruby's symbols for keys.
- GitHub Classroom: `ASSIGNMENT-submissions/ASSIGNMENT-LOGIN`.
- Anything else: for each learner a folder, an archive, or files `LEARNER_EXERCISE.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timezone

from .archives import SUFFIXES, printable

METADATA = "submission_metadata.yml"
_MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d{1,20})_assignsubmission_(?:file|onlinetext)_?(?P<rest>.*)", re.DOTALL)
_MOODLE_FOLDER = re.compile(
    r"(?P<name>.+)_(?P<id>\d{1,20})_assignsubmission_(?:file|onlinetext)_?(?P<rest>)", re.DOTALL
)
_CANVAS_USER = r"(?:(?P<name>(?!LATE_)\w{1,200}?)_)?(?:(?P<late>LATE)_)?(?P<user>\d{1,20}|anon_[A-Za-z0-9]{1,20})_"
_CANVAS = re.compile(_CANVAS_USER + r"(?P<upload>\d{1,20})_(?P<rest>[^_].*)", re.DOTALL)
_CANVAS_TEXT = re.compile(_CANVAS_USER + r"(?P<rest>text|link)\.html")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(?![a-z0-9])")


@dataclass(frozen=True)
class Owner:
    """A learner as the download names them. `key` is the same for everything that one learner handed in. `account` is
    the LMS and its number of them (`moodle 123`), as far as that is known.
    """

    key: str
    shown: str
    id: str
    late: bool = False
    handed_in: datetime | None = None
    account: str = ""


@dataclass(frozen=True)
class Claim:
    """A path's owner, the path within that learner's work, and the upload's number (0 when there is none)."""

    owner: Owner
    rest: tuple[str, ...]
    upload: int = 0


def safe_id(name: str, number: str = "") -> str:
    """A learner's id: lower case letters, digits and dashes, no name that a system reserves, at most 60 characters.

    A name that had to be changed gets a mark of its original, so that no two names share an id: the LMS's own number,
    if there is one, else a hash.
    """
    ascii_only = unicodedata.normalize("NFKD", name[:200].casefold()).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", ascii_only).strip("-")[:40].strip("-")
    if number:
        return f"{slug or 'learner'}-{number}"
    if slug == name and not _RESERVED.match(slug):
        return slug
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{'learner-' if not slug or _RESERVED.match(slug) else ''}{slug}{'-' if slug else ''}{mark}"


def claim(parts: tuple[str, ...], is_file: bool, leaves: tuple[str, ...], container: str = "") -> Claim | None:
    """Whose this path is; None when it is no learner's.

    `leaves` are the stems of the exercises' files, `container` is the folder around everything.
    """
    first, rest = parts[0], parts[1:]
    alone = is_file and not rest
    # Learners choose their names in an LMS. A folder's number is the last one in it, and whoever has another's number
    # in their own name is still somebody else.
    if moodle := (_MOODLE if alone else _MOODLE_FOLDER).fullmatch(first) or _MOODLE.fullmatch(first):
        name, number = moodle["name"], moodle["id"]
        owner = Owner(f"moodle {number} {name}", printable(name), safe_id(name, number), account=f"moodle {number}")
        return Claim(owner, (moodle["rest"], *rest) if moodle["rest"] else rest)
    if alone and (canvas := _CANVAS.fullmatch(first) or _CANVAS_TEXT.fullmatch(first)):
        user, name = canvas["user"], canvas["name"] or canvas["user"]
        # An anonymous id is case-sensitive: keep its mark.
        ident = safe_id(name, user) if user.isdigit() else safe_id(user)
        owner = Owner(
            f"canvas {user} {name}", printable(name), ident, canvas["late"] is not None, account=f"canvas {user}"
        )
        return Claim(owner, (canvas["rest"],), int(canvas.groupdict().get("upload", 0)))
    if not alone:
        name = first
        if container.endswith("-submissions"):
            name = name.removeprefix(f"{container.removesuffix('-submissions')}-") or name
        return Claim(_plain(name), rest)
    lowered = first.lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if lowered.endswith(suffix) and len(first) > len(suffix):
            return Claim(_plain(first[: -len(suffix)]), parts)
    return _by_exercise(first, leaves)


def _plain(name: str) -> Owner:
    number = re.fullmatch(r"submission_(\d{1,20})", name)
    if number:  # Gradescope's folder
        return Owner(f"plain {name}", printable(name), f"submission-{number[1]}")
    return Owner(f"plain {name}", printable(name), safe_id(name))


def _by_exercise(name: str, leaves: tuple[str, ...]) -> Claim | None:
    """`alice_train_ddp.py` and `train_ddp-alice.py` name both the learner and the exercise."""
    stem, dot, suffix = name.rpartition(".")
    if suffix.lower() in ("csv", "yml", "yaml", "json", "md", "readme", "license"):  # a teacher's own
        return None
    if not dot or not stem:
        return Claim(_plain(name), (name,))
    for leaf in sorted(leaves, key=len, reverse=True):
        if stem == leaf:
            break
        for found in (
            re.fullmatch(rf"(.+)[-_. ]{re.escape(leaf)}", stem),
            re.fullmatch(rf"{re.escape(leaf)}[-_. ](.+)", stem),
        ):
            if found:
                return Claim(_plain(found[1]), (f"{leaf}.{suffix}",))
    return Claim(_plain(stem), (name,))


def is_named_by_an_lms(name: str) -> bool:
    """True for names that only a learner's folder or file in a download has."""
    return any(form.fullmatch(name) for form in (_MOODLE, _CANVAS, _CANVAS_TEXT, re.compile(r"submission_\d+")))


def metadata(text: str) -> dict[str, tuple[str, datetime | None]]:
    """Gradescope's `submission_metadata.yml`: by folder, who handed in and when.

    The file holds every learner's output too, many megabytes for a class. Only the three keys that are needed are read,
    by their indentation, instead of parsing all of it as YAML: that takes an eighth of the time of libyaml, and neither
    a tag of Ruby's nor what a learner printed can make the file unreadable.
    """
    found: dict[str, tuple[list[str], datetime | None]] = {}
    folder, section = "", ""
    for line in text.splitlines():
        if top := re.fullmatch(r"(\S.{0,200}?):\s*", line):
            folder, section = _scalar(top[1]), ""
            found[folder] = ([], None)
        elif folder and (key := re.fullmatch(r"  :(\w+):\s?(.*)", line)):
            section = key[1]
            if section == "created_at":
                found[folder] = (found[folder][0], _moment(_scalar(key[2])))
        elif folder and section == "submitters" and (item := re.fullmatch(r"  (?:- |  ):(name|sid):\s?(.*)", line)):
            value = _scalar(item[2])
            if item[1] == "name":
                found[folder][0].append(printable(value))
            elif value and found[folder][0]:
                found[folder][0][-1] += f" ({printable(value, 30)})"
    return {folder: (", ".join(names), moment) for folder, (names, moment) in found.items()}


def _scalar(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text[1:-1]
    return text


def _moment(text: str) -> datetime | None:
    """Ruby's `2026-04-26 17:34:00.861687000 Z`, or with `-07:00`; None for anything else."""
    form = r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,6})?\d*\s*(Z|[+-]\d\d:\d\d)"
    if not (found := re.fullmatch(form, text)):
        return None
    zone = "+00:00" if found[4] == "Z" else found[4]
    fraction = (found[3] or ".0").ljust(7, "0")
    try:
        return datetime.fromisoformat(f"{found[1]}T{found[2]}{fraction}{zone}").astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
