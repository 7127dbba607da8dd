"""Reading and checking `policy.toml`: whatever is wrong in it is one line that says where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..course import Course, CourseError, nearest
from ..course.toml import tomllib
from .policy import Accommodation, Classroom50, Half, Late, Mark, Policy, Rounding, Team

FILE = "policy.toml"
MOST_COMMENT = 10_000  # characters
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")  # a learner's, as `learners.safe_id` makes them
SLUG = re.compile(r"[a-z0-9][a-z0-9-]{1,99}")  # what Classroom 50 takes for a short name


class PolicyError(CourseError):
    """The policy cannot be used. The message says where it is wrong and what to write."""


def load(course: Course, path: Path | None = None) -> Policy:
    """The policy of a course, or the one in `path`. Without a file: one point a check, and nothing taken off.

    Raises PolicyError with one line.
    """
    place = path or course.autograder / FILE
    try:
        text = place.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path is None:
            return Policy()
        raise PolicyError(f"there is no {place}: copy autograder/{FILE} and change it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{place} cannot be read: {error}") from None
    return parse(text, course.names, place.name)


def parse(text: str, exercises: Sequence[str], name: str = FILE) -> Policy:
    """A policy from its text. `exercises` are the course's; errors call the file `name`. Raises PolicyError."""
    try:
        raw = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{name}: {error}") from None
    except RecursionError:
        raise PolicyError(f"{name}: has tables or lists too deep in each other") from None
    reader = _Reader(text, tuple(exercises), name)
    reader.only((), raw, ("points", "partial", "late", "rounding", "learner", "group", "classroom50", "canvas", "book"))
    points = {
        key: reader.number(("points", key), value, "0 or more points")
        for key, value in reader.table(raw, "points").items()
        if reader.exercise(("points", key), key)
    }
    partial = {key: reader.yes(("partial", key), value) for key, value in reader.table(raw, "partial").items()}
    default = partial.pop("default", True)
    for key in partial:
        reader.exercise(("partial", key), key)
    learners = {key: reader.accommodation(key, value) for key, value in reader.table(raw, "learner").items()}
    rest = (
        reader.late(raw),
        reader.rounding(raw),
        learners,
        reader.classroom50(raw),
        reader.canvas(raw),
        reader.teams(raw),
        reader.book(raw),
    )
    return Policy(points, partial, default, *rest)


class _Reader:
    """Takes values out of the tables, and says where one is wrong."""

    def __init__(self, text: str, exercises: tuple[str, ...], name: str) -> None:
        self.text, self.exercises, self.name = text, exercises, name

    def wrong(self, path: tuple[str, ...], what: str) -> PolicyError:
        line = self._line(path)
        return PolicyError(f"{self.name}{f':{line}' if line else ''}: {'.'.join(path)} {what}")

    def _line(self, path: tuple[str, ...]) -> int | None:
        """The line of a key below its table's header, or as near to that as can be found."""
        table, key = ".".join(path[:-1]), path[-1]
        inside, found = not table, None
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                here = re.sub(r"[\"'\s]", "", header[1])
                inside = here == table
                found = number if here in (table, ".".join(path)) else found
            elif inside and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return number
        return found

    def only(self, path: tuple[str, ...], raw: dict[str, Any], keys: tuple[str, ...]) -> None:
        for key in raw:
            if key not in keys:
                near = nearest(key, keys)
                hint = f" (did you mean {near}?)" if near else ""
                raise self.wrong((*path, key), f"is not known{hint}: there are {', '.join(keys)}")

    def table(self, raw: dict[str, Any], *path: str) -> dict[str, Any]:
        found: Any = raw.get(path[-1], {})
        if not isinstance(found, dict):
            raise self.wrong(path, f"is {found!r}: write a table, [{'.'.join(path)}]")
        return found

    def exercise(self, path: tuple[str, ...], key: str) -> bool:
        if key not in self.exercises:
            near = nearest(key, self.exercises)
            raise self.wrong(path, f"names no exercise{f': did you mean {near}?' if near else ' of this course'}")
        return True

    def must(self, right: bool, path: tuple[str, ...], value: Any, wanted: str) -> None:
        """Raise PolicyError for a value that is not right, saying what is wanted."""
        if not right:
            raise self.wrong(path, f"is {_shown(value)}: {wanted}")

    def number(self, path: tuple[str, ...], value: Any, wanted: str, most: int | None = None) -> Decimal:
        right = isinstance(value, int | Decimal) and not isinstance(value, bool)
        number = Decimal(value) if right else Decimal("NaN")
        fits = number.is_finite() and 0 <= number <= (10**6 if most is None else most)
        self.must(fits, path, value, f"give {wanted}")
        return number

    def yes(self, path: tuple[str, ...], value: Any) -> bool:
        self.must(isinstance(value, bool), path, value, "write true or false")
        return bool(value)

    def moment(self, path: tuple[str, ...], value: Any) -> datetime:
        wanted = "write day, time and offset from UTC, as in 2026-11-30T23:59:00+01:00"
        self.must(isinstance(value, datetime) and value.tzinfo is not None, path, value, wanted)
        moment: datetime = value
        return moment

    def late(self, raw: dict[str, Any]) -> Late:
        table = self.table(raw, "late")
        self.only(("late",), table, ("deadline", "grace_minutes", "percent_a_day", "most_percent"))
        deadline = self.moment(("late", "deadline"), table["deadline"]) if "deadline" in table else None
        grace = self.number(("late", "grace_minutes"), table.get("grace_minutes", 15), "minutes, 0 or more")
        rate = self.number(("late", "percent_a_day"), table.get("percent_a_day", 0), "a number from 0 to 100", 100)
        most = self.number(("late", "most_percent"), table.get("most_percent", 50), "a number from 0 to 100", 100)
        if rate and deadline is None:
            raise self.wrong(("late", "percent_a_day"), "takes points off, but there is no late.deadline: write one")
        return Late(deadline, timedelta(minutes=float(grace)), rate, most)

    def rounding(self, raw: dict[str, Any]) -> Rounding:
        table = self.table(raw, "rounding")
        self.only(("rounding",), table, ("to", "half"))
        to = self.number(("rounding", "to"), table.get("to", Decimal("0.01")), "a number such as 1, 0.5 or 0.01", 1000)
        if not to:
            raise self.wrong(("rounding", "to"), "is 0: give a number such as 1, 0.5 or 0.01")
        half = table.get("half", "up")
        known = [one.value for one in Half]
        self.must(half in known, ("rounding", "half"), half, 'write "up", "even" or "down"')
        return Rounding(to, Half(half))

    def classroom50(self, raw: dict[str, Any]) -> Classroom50:
        table = self.table(raw, "classroom50")
        self.only(("classroom50",), table, ("classroom", "assignment"))
        for key, value in table.items():
            wanted = 'write a short name: lower case letters, digits and dashes, as in "cs101-fall"'
            self.must(isinstance(value, str) and bool(SLUG.fullmatch(value)), ("classroom50", key), value, wanted)
        return Classroom50(**table)

    def canvas(self, raw: dict[str, Any]) -> str:
        table = self.table(raw, "canvas")
        self.only(("canvas",), table, ("assignment",))
        title = table.get("assignment", Policy.canvas_assignment)
        if not isinstance(title, str) or not title.strip() or not title.isprintable():
            wanted = "copy the column's heading from Canvas's gradebook export, as in \"Homework 4 (123)\""
            raise self.wrong(("canvas", "assignment"), f"is {_shown(title)}: {wanted}")
        return title.strip()

    def book(self, raw: dict[str, Any]) -> str:
        table = self.table(raw, "book")
        self.only(("book",), table, ("address",))
        address = table.get("address", Policy.book)
        fits = isinstance(address, str) and (not address or re.fullmatch(r"https?://[^\s\"<>]+", address))
        self.must(bool(fits), ("book", "address"), address, 'write where it is, as in "https://example.org/lockstep"')
        return str(address).rstrip("/")

    def teams(self, raw: dict[str, Any]) -> dict[str, Team]:
        found: dict[str, Team] = {}
        for name, value in self.table(raw, "group").items():
            path = ("group", name)
            self.must(isinstance(value, dict), path, value, f"write a table, [group.{name}]")
            self.only(path, value, ("members", "work"))
            members, work = value.get("members"), value.get("work", "")
            several = isinstance(members, list) and len(set(map(str, members))) >= max(2, len(members))
            self.must(several, (*path, "members"), members, "write a list of two ids or more")
            for one in members:
                if not isinstance(one, str) or not ID.fullmatch(one):
                    raise self.wrong((*path, "members"), f"has {_shown(one)}, which is no id as grades.csv has them")
                if other := next((known for known, team in found.items() if one in team.members), ""):
                    raise self.wrong((*path, "members"), f"has {one}, who is in the group {other} as well")
            self.must(not work or work in members, (*path, "work"), work, "name one of the members")
            found[name] = Team(tuple(members), work)
        return found

    def accommodation(self, learner: str, value: Any) -> Accommodation:
        path = ("learner", learner)
        self.must(isinstance(value, dict), path, value, f"write a table, [learner.{learner}]")
        self.only(path, value, ("extra_days", "deadline", "late", "exempt", "late_days", "comment", "mark"))
        extra = self.number((*path, "extra_days"), value.get("extra_days", 0), "days, 0 or more", 3650)
        deadline = self.moment((*path, "deadline"), value["deadline"]) if "deadline" in value else None
        exempt = value.get("exempt", [])
        listed = isinstance(exempt, list) and all(isinstance(one, str) for one in exempt)
        self.must(listed, (*path, "exempt"), exempt, 'write a list of exercises, as in ["mini_ddp"]')
        for one in exempt:
            if one not in self.exercises:
                raise self.wrong((*path, "exempt"), f"names {one!r}, which is no exercise of this course")
        late = self.yes((*path, "late"), value.get("late", True))
        days = value.get("late_days")
        whole = days is None or (isinstance(days, int) and not isinstance(days, bool) and 0 <= days <= 3650)
        self.must(whole, (*path, "late_days"), days, "give whole days, 0 or more")
        marks = {name: self.mark((*path, "mark", name), one) for name, one in self.table(value, *path, "mark").items()}
        comment = self.comment((*path, "comment"), value.get("comment", ""))
        return Accommodation(extra, deadline, late, frozenset(exempt), days, comment, marks)

    def mark(self, path: tuple[str, ...], value: Any) -> Mark:
        self.exercise(path, path[-1])
        self.must(isinstance(value, dict), path, value, f"write a table, [{'.'.join(path)}]")
        self.only(path, value, ("points", "comment", "excuse"))
        points = self.number((*path, "points"), value["points"], "0 or more points") if "points" in value else None
        excused = self.yes((*path, "excuse"), value.get("excuse", False))
        return Mark(points, self.comment((*path, "comment"), value.get("comment", "")), excused)

    def comment(self, path: tuple[str, ...], value: Any) -> str:
        """Markdown, of any number of lines."""
        self.must(isinstance(value, str), path, value, "write a text in quotes")
        if len(value) > MOST_COMMENT:
            raise self.wrong(path, f"has {len(value):,} characters: write {MOST_COMMENT:,} at most")
        return str(value).strip()


def _shown(value: Any) -> str:
    """A value as the file would have it, on one short line."""
    text = str(value) if isinstance(value, Decimal | datetime) else repr(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else f"{text[:57]}…"
