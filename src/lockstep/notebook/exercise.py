"""`%check`, `%hint`, `%solution` and `%course`: the grader in a cell, and where the learner stands."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import Markdown, display

from ..course import Course, CourseError, find, hints, progress
from ..course.standing import next_up
from ..grading.request import GradeRequest
from ..grading.untouched import untouched, with_stubs
from ..grading.worker import Worker
from ..ranks import RanksError
from .cards import hint_card, report_card
from .checking import Checking, are_solutions, is_compared

_worker = Worker()


@magics_class
class ExerciseMagics(Magics):
    @line_magic
    def check(self, line: str) -> None:
        """Grade exercises: `%check train_ddp`."""
        course, names = _asked(line, "%check")
        try:
            with Checking(course, names) as output:
                request = GradeRequest(tuple(names))
                stubs = untouched(course, request)
                report = with_stubs(request, stubs, lambda rest: _worker.grade(course, rest, output), output)
        except CourseError as error:
            raise UsageError(str(error)) from None
        except RanksError as error:
            raise UsageError(
                f"Lockstep could not run this check: {error}. ./lockstep doctor looks at this machine."
            ) from None
        onward: list[str] = []
        if not is_compared():
            for result in [one for one in report.exercises if one.name not in stubs]:
                progress.record(course, result.name, result.score, result.max_score, result.wrong)
            if report.passed:
                coming = next_up(course, names[-1])
                onward = [coming.said("%check") if coming else "", hints.to_compare(course, names, "%solution")]
        output.end(report_card(report, list(filter(None, onward)), are_solutions(course)))

    @line_magic
    def hint(self, line: str) -> None:
        """Show the next hint: `%hint train_ddp`."""
        course, names = _asked(line, "%hint")
        display(hint_card(names[0], *hints.take_hint(course, names[0])))

    @line_magic
    def solution(self, line: str) -> None:
        """Show the code of the course's own solution of an exercise that has passed: `%solution train_ddp`."""
        course, (name, *_) = _asked(line, "%solution")
        if not progress.of(course, name).passed:
            raise UsageError(
                f"{name} has not passed yet. In a terminal, ./lockstep solution {name} shows it all the same."
            )
        try:
            parts = {suffix: hints.solution(course, name, suffix) for suffix in hints.suffixes(course, name)}
        except CourseError as error:
            raise UsageError(str(error)) from None
        said = [
            f"```python\n{hints.code_of(code)}```" if suffix == ".py" else f"```bash\n{code}```"
            for suffix, code in parts.items()
        ]
        whole = (
            f"Without the contract and the example. In a terminal, `./lockstep solution {name}` shows the whole file."
        )
        display(Markdown("\n\n".join(filter(None, [*said, whole, hints.write_up(course, name)]))))

    @line_magic
    def course(self, line: str) -> Any:
        """Show where you are in the course: `%course`; with a chapter's sections: `%course 2` or `%course 02_setup`."""
        from .course_map import course_map

        asked = line.strip()
        try:
            chapters = {str(number): one.name for number, one in enumerate(find().chapters, 1)}
            return course_map("" if asked == "map" else chapters.get(asked, asked))
        except CourseError as error:
            raise UsageError(str(error)) from None


def _asked(line: str, magic: str) -> tuple[Course, list[str]]:
    try:
        course = find()
        names = course.require(line.split())
    except CourseError as error:
        raise UsageError(str(error)) from None
    if not names:
        raise UsageError(f"{magic} which exercise? {', '.join(course.names)}")
    return course, names
