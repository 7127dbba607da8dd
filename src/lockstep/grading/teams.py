"""Groups that hand in one piece of work: it is graded as one learner's, and every member gets the grade.

What a download does with groups differs: Moodle has a copy for each member, Canvas one file of whoever uploaded it. So
the policy says who belongs together. Late days, accommodations and marks by hand stay each member's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .classroom import ClassResult, GradingOutcome, Learner
from .intake import Handed
from .policy import Policy, Team


@dataclass(frozen=True)
class Shared:
    """A class in which all members of a group have its grading; `once` has each piece of work once.

    `lines` say whose work it was, by member; `remarks` are for the teacher.
    """

    graded: ClassResult
    once: ClassResult
    lines: dict[str, str]
    remarks: tuple[str, ...] = ()


def share(policy: Policy, graded: ClassResult) -> Shared:
    """The class as the policy's groups have it. Nobody loses work: of a group with several, none is passed on."""
    known = {learner.id: learner for learner in graded.learners}
    lines: dict[str, str] = {}
    remarks: list[str] = []
    copies: dict[str, Learner] = {}
    for name, team in sorted(policy.teams.items()):
        found = [known[id] for id in team.members if id in known and known[id].outcome is not GradingOutcome.NOTHING]
        source, remark = _source(name, team, found)
        remarks += [remark] if remark else []
        if source is not None:
            absent = ", ".join(id for id in team.members if id not in known)
            remarks += [f"not in the download, graded with their group {name}: {absent}"] if absent else []
            for id in team.members:
                if id != source.id:
                    copies[id] = _copy(source, id, known.get(id))
                    lines[id] = f"handed in by {source.handed.shown}, for the group {name}"
    everybody = sorted((known | copies).values(), key=lambda learner: learner.id)
    own = tuple(learner for learner in graded.learners if learner.id not in copies)
    return Shared(replace(graded, learners=tuple(everybody)), replace(graded, learners=own), lines, tuple(remarks))


def _source(name: str, team: Team, found: Sequence[Learner]) -> tuple[Learner | None, str]:
    """Whose work counts for a group; None and what to do where that cannot be told."""
    ids = ", ".join(learner.id for learner in found)
    if team.work:
        chosen = next((learner for learner in found if learner.id == team.work), None)
        return chosen, "" if chosen else f"the group {name} names the work of {team.work}, who handed in nothing"
    if len({learner.digest for learner in found}) > 1:
        own = "so each has their own grade: say whose counts with work ="
        return None, f"the members of the group {name} handed in different files ({ids}), {own}"
    if not found:
        return None, f"nobody of the group {name} handed in anything that can be graded"
    return min(found, key=lambda learner: (learner.faulty, learner.id)), ""


def _copy(source: Learner, id: str, own: Learner | None) -> Learner:
    """The same grading under a member's name. A member who isn't in the download has their number from the id."""
    system = source.handed.account.partition(" ")[0]
    number = re.search(r"-(\d{1,20})$", id)
    account = own.handed.account if own else f"{system} {number[1]}" if system and number else ""
    handed: Handed = replace(source.handed, id=id, shown=own.handed.shown if own else id, account=account)
    return replace(source, handed=handed, seconds=0.0)
