"""The pages that people read: whole, well nested, and harmless whatever a submission, a name or a download put into them."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from support.hostile_texts import HOSTILE

from lockstep.authoring.bank import find
from lockstep.course import Course
from lockstep.grading.classroom import NOT_HANDED_IN, ClassResult, Learner
from lockstep.grading.exports.class_page import class_page
from lockstep.grading.exports.html_report import html_report, in_the_book
from lockstep.grading.exports.pages import MOST_CHARACTERS, cut
from lockstep.grading.intake import Handed
from lockstep.grading.policy import Policy, apply
from lockstep.grading.policy_file import parse
from lockstep.grading.request import GradeRequest
from lockstep.grading.similar import LineRange, Pair
from lockstep.grading.verdict import UNWRITTEN, CheckOutcome, CheckResult, Diagnosis, ExerciseResult, Report
from lockstep.grading.worker import Worker
from lockstep.grading.writers import write_all
from lockstep.ranks.text import CodeLine, Row

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = Path("/usr/bin/chromium")
VOID = {"meta", "br", "rect", "line"}
MORE = ["</title><script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "{{ 7 * 7 }}{% include 'x' %}", "</pre></details></section>",
        "<!--", "]]>", "&#x3c;script&#x3e;", "javascript:alert(1)", "\u2066\u202e\u2069", "' onclick='x", '" style="x', "<svg/onload=alert(1)>", "\x1b]8;;http://x\x07"]  # fmt: skip
WEEK = datetime(2026, 11, 20, 17, 3, tzinfo=timezone.utc)


def failed(text: str, evidence: str = "proof") -> CheckResult:
    found = Diagnosis(
        text, f"{text}\n{text}", evidence, (1,), text, 3, text, text, text, (Row("0", text),), (CodeLine(3, text),)
    )
    return CheckResult(text, "test_x", CheckOutcome.FAILED, found, "", text, 0.25)


PASSED = CheckResult("it passes", "test_a", CheckOutcome.PASSED, output="[rank 0] hello\n")
SKIPPED = CheckResult("needs a GPU", "test_b", CheckOutcome.NOT_RUN, reason="there is no GPU")
ABSENT = CheckResult("it runs", "test_c", CheckOutcome.NOT_RUN, reason=NOT_HANDED_IN)


def learner(
    text: str = "Ada", *checks: CheckResult, id: str = "ada", faults: tuple[str, ...] = (), **more: Any
) -> Learner:
    exercises = (
        ExerciseResult("train_ddp", checks or (PASSED, failed(text), SKIPPED), 1.5),
        ExerciseResult("mini_ddp", (ABSENT,)),
    )
    handed = Handed(
        id,
        text,
        Path("/scratch/ada"),
        ("train_ddp.py",),
        more.pop("when", WEEK),
        more.pop("marked", False),
        (text,),
        (text,),
    )
    return Learner(handed, more.pop("report", Report(7, exercises, faults=faults, versions={"torch": text})), 7, seconds=3.0, isolation=text,
                   attempts=1, missing=("mini_ddp",))  # fmt: skip


def whole_class(text: str = "Ada") -> ClassResult:
    people = (
        learner(text),
        learner(text, id="bob", report=None),
        learner(text, id="eve", faults=(text or "broke",)),
        learner(text, PASSED, id="joe"),
    )
    return ClassResult(
        11, ("train_ddp", "mini_ddp"), people, {"torch": text}, text, max_scores={"train_ddp": 3, "mini_ddp": 1}
    )


def pages(text: str) -> list[str]:
    """Every page with this text in each place where one can come from outside."""
    graded = whole_class(text)
    grades = apply(
        parse("[late]\ndeadline = 2026-11-19T00:00:00Z\npercent_a_day = 10\n[learner.x]\nlate = false", ("train_ddp",)),
        graded,
    )
    pairs = [Pair("train_ddp", "ada", "joe", 0.75, LineRange(1, 9), LineRange(3, 11), text)]
    page = class_page(graded, grades, similar=pairs, tickets=[(text or "1", ("ada", "joe"))], titles={text: text})
    return [*(html_report(one, grades[one.id]) for one in graded.learners), report_page(graded.learners[0]), page]


def report_page(one: Learner) -> str:
    """A learner's page without a policy."""
    alone = ClassResult(1, tuple(result.name for result in one.exercises), (one,))
    return html_report(one, apply(Policy(), alone)[one.id])


def overview(graded: ClassResult, **found: Any) -> str:
    """The class's page without a policy."""
    return class_page(graded, apply(Policy(), graded), **found)


class Tree(HTMLParser):
    """Checks that what is opened is closed in order, and keeps tags, attributes and the text outside of them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page.replace("<wbr>", ""))  # where a long name may go on in the next line
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        assert len({key for key, _ in attrs}) == len(attrs), f"an attribute twice in <{tag}>"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data[:80]}")

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


ALLOWED = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "h1", "h2", "h3", "p", "ul", "ol", "li", "span", "div",
           "b", "bdi", "code", "pre", "a", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "dl", "dt", "dd", "br", "svg", "rect", "line",
           "text", "tspan", "figure", "figcaption"}  # fmt: skip


@pytest.mark.parametrize("text", [*HOSTILE, *MORE, "", "x" * 300, "日本 é"])
def test_nothing_of_others_is_markup(text: str) -> None:
    """The pages have the same tags and attributes, whatever they are about."""
    for page, ours in zip(pages(text), pages("Ada"), strict=True):
        theirs = Tree(page)
        assert set(theirs.tags) <= ALLOWED
        if text:
            assert theirs.tags == Tree(ours).tags
            assert [(tag, key) for tag, key, _ in theirs.attributes] == [
                (tag, key) for tag, key, _ in Tree(ours).attributes
            ]
        assert not [
            key
            for _, key, _ in theirs.attributes
            if key.startswith("on") or key in ("src", "srcdoc", "style", "action")
        ]
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
        for _, key, value in theirs.attributes:
            assert key != "href" or re.fullmatch(r"#e\d+|reports/[a-z0-9%-]+\.html", value or "")
        page.encode()


def test_the_policy_of_the_page_allows_its_own_style_alone() -> None:
    for page in pages("Ada"):
        [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
        [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        allowed = policy.replace("&#39;", "'")
        assert allowed == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        assert "url(" not in style and "@import" not in style
        assert not re.search(r"https?://", page)


def test_a_learner_reads_everything_that_was_found() -> None:
    found = Diagnosis("rank-local-loss", "Rank 0 printed 0.091.\nThe mean was 0.433.", "  rank  waits in /scratch/ada/train_ddp.py\n  0     barrier", (0,),
                      "/scratch/ada/train_ddp.py", 55, 'chapter 2, "Sharding"', "Because it is rank 0's.", "print(f'{total:.3f}')")  # fmt: skip
    check = CheckResult("the loss is the mean", "test_l", CheckOutcome.FAILED, found, "", "[rank 0] epoch 0: 0.091\n")
    text = Tree(report_page(learner("Ada Lovelace", PASSED, check, SKIPPED))).text
    for part in ("Ada Lovelace", "1 of 4 points", "✓ passed, ✗ failed, – not run", "rank-local-loss", "Rank 0 printed 0.091.", "The mean was 0.433.",
                 "exercises/train_ddp.py", "55", "print(f'{total:.3f}')", "  rank  waits in exercises/train_ddp.py\n  0     barrier", "Because it is rank 0's.",
                 'Read: chapter 2, "Sharding"', "./lockstep hint train_ddp", "[rank 0] epoch 0: 0.091", "not run: there is no GPU", "not handed in",
                 "./lockstep check train_ddp --seed 7", "2026-11-20 17:03 UTC"):  # fmt: skip
        assert part in text, part
    assert "/scratch" not in text, "a learner's file lies with the learner"
    assert "checks passed" not in text, "as many as points"
    page = report_page(learner("Ada", PASSED, check))
    assert (
        page.index("Rank 0 printed 0.091.")
        < page.index("0     barrier")
        < page.index("Because it is")
        < page.index("epoch 0: 0.091")
    )
    assert "<details open" not in page


def test_faults_of_ours_are_called_ours_and_give_no_points() -> None:
    text = Tree(report_page(learner("Ada", faults=("Traceback …\nthe server went away",)))).text
    assert "our fault, not yours" in text and "costs no points" in text and "the server went away" in text
    assert "of 4 points" not in text and "✗" not in text and "--seed" not in text
    nothing = Tree(report_page(learner("no file was found", report=None))).text
    assert (
        "There was nothing to grade" in nothing and nothing.count("no file was found") >= 2 and "points" not in nothing
    )


def test_where_to_read_on_is_a_link_to_the_teachers_book() -> None:
    """Quotes of an address cannot end the attribute, and a chapter that there isn't is text."""
    linked = in_the_book('https://x.org/a?"<b', ["01_a", "02_b"])
    assert linked('chapter 2, "Uneven numbers of batches"') == (
        '<a href="https://x.org/a?&#34;&lt;b/02_b.html#uneven-numbers-of-batches">'
        "chapter 2, &#34;Uneven numbers of batches&#34;</a>"
    )
    assert linked('chapter 3, "<i>"') == "chapter 3, &#34;&lt;i&gt;&#34;" and linked("") == ""
    assert in_the_book("", ["01_a"])('chapter 1, "A"') == 'chapter 1, "A"'
    check = replace(failed("x", "y"), diagnosis=Diagnosis("hang", "m", read='chapter 1, "A b"'))
    one = learner("Ada", check)
    alone = ClassResult(1, tuple(result.name for result in one.exercises), (one,))
    page = Tree(html_report(one, apply(Policy(), alone)[one.id], in_the_book("https://x.org", ["01_a"])))
    assert ("a", "href", "https://x.org/01_a.html#a-b") in page.attributes


def test_what_is_taken_off_is_explained() -> None:
    graded = whole_class()
    grades = apply(
        parse("[late]\ndeadline = 2026-11-19T00:00:00Z\npercent_a_day = 10\n[rounding]\nto = 0.1", ("train_ddp",)),
        graded,
    )
    text = Tree(html_report(graded.learners[0], grades["ada"])).text
    assert (
        "0.8 of 4 points" in text
        and "1 of 4 checks passed" in text
        and "2 days late: 20 % of the points taken off (−0.2)" in text
    )


def test_ten_megabytes_stay_a_page() -> None:
    long = "x" * 10_000_000
    check = replace(
        failed(long, long),
        output=f"begin\n{long}\nend",
        diagnosis=Diagnosis("hang", long, long, (), "a.py", 1, "", "", long),
    )
    page = report_page(learner("Ada", *[check] * 5))
    assert len(page) < 5 * 4 * MOST_CHARACTERS + 40_000
    assert "begin" in page and "characters left out" in page and "\nend" in page
    assert len(Tree(page).tags) < 200
    assert cut("abcdef", 4) == "ab\n… 2 characters left out …\nef" and cut("abcd", 4) == "abcd"
    assert len(overview(whole_class(long))) < 1_500_000


def test_the_same_grading_gives_the_same_bytes() -> None:
    assert pages("Ada") == pages("Ada")


def test_the_teacher_sees_whom_to_look_at() -> None:
    people = tuple(
        learner(f"Name {n}", *([PASSED] * n + [failed("boom")] * (10 - n)), id=f"id-{n:02}") for n in range(11)
    )
    graded = ClassResult(11, ("train_ddp", "mini_ddp"), people, isolation="bubblewrap")
    pair = Pair("train_ddp", "id-01", "id-02", 0.75, LineRange(1, 9), LineRange(4, 4), "loss.backward()")
    page = overview(
        graded,
        similar=[pair, replace(pair, one="id-03", share=0.5)],
        tickets=[("4711", ("id-01", "id-09"))],
        solved=[("mini_ddp", ("id-04", "id-05"))],
        titles={"boom": "It goes boom"},
    )
    text = Tree(page).text
    for part in ("11 learners, 2 exercises", "11 graded", "It goes boom", "Look at these", "No verdict", "75 %", "lines 1 to 9 of the first, line 4 of the second",
                 "4711", "loss.backward()", "Alike among themselves", "share of the class", "bubblewrap"):  # fmt: skip
        assert part in text, part
    solved = page.partition("Almost the course's own solution")[2].partition("</ul>")[0]
    assert "mini_ddp" in solved and re.findall(r"id-\d\d", solved) == ["id-04", "id-05"]
    for part in ("Faults of the grader", "Nothing to grade", "Late:", "policy"):
        assert part not in text, part
    bars = [
        (float(y), float(height))
        for y, height in re.findall(r'class="bar" x="\d+" y="([\d.]+)" width="52" height="([\d.]+)"', page)
    ]
    assert len(bars) == 11 and all(y >= 0 and y + height == 186 for y, height in bars)
    counts = {
        label: count
        for count, label in re.findall(r'class="count"[^>]*>(\d+)</text><text [^>]*>(\d+)<tspan class="wide"> %<', page)
    }
    assert counts == {str(10 * n): "1" for n in range(0, 10)} | {"0": "2"}, (
        "10 checks and one that is missing: 10 of 11 at best"
    )
    full = replace(
        graded,
        learners=tuple(
            replace(one, report=replace(one.report, exercises=one.report.exercises[:1])) for one in people if one.report
        ),
    )
    [shown] = re.findall(r'class="count" x="630" y="19.0" text-anchor="middle">(\d+)<', overview(full))
    assert shown == "1", "all points have a bar of their own"
    assert page.count('href="reports/id-01.html"') >= 4
    assert page.index("Look at these") < page.index("Distribution of points"), "what a teacher acts on is above"
    assert re.findall(r'It goes boom.*?rect class="fill" width="(\d+)"', page) == ["91"], "10 of 11 learners"


@pytest.mark.parametrize(("named", "ids"), [("Ada", ["ada"]), ("", []), ("ada", [])])
def test_an_id_is_shown_where_it_is_not_the_name(named: str, ids: list[str]) -> None:
    page = overview(ClassResult(1, ("a",), (learner(named, id="ada"),)))
    assert re.findall(r'<td class="mono soft wide">(.*?)</td>', page) == ids
    assert (">id</th>" in page) is bool(ids)


def test_many_pairs_are_folded() -> None:
    people = tuple(learner(f"Name {n}", id=f"id-{n}") for n in range(7))
    pairs = [Pair("a", "id-0", one.id, 0.9, LineRange(1, 2), LineRange(1, 2), "") for one in people[1:]]
    folded = [
        "<details><summary>6 pairs of learners</summary>"
        in overview(ClassResult(1, ("a",), people), similar=pairs[:count])
        for count in (5, 6)
    ]
    assert folded == [False, True]


def test_the_teacher_sees_what_broke() -> None:
    whole = whole_class()
    text = Tree(class_page(whole, apply(parse("[learner.zoe]\nlate = false", ()), whole))).text
    assert "Faults of the grader: 1" in text and "Nothing to grade: 1" in text and "who is not in this class" in text


def test_a_group_is_alike_in_one_exercise() -> None:
    """Two pairs that share a learner in different exercises are no group of three."""
    graded = ClassResult(1, ("a", "b"), tuple(learner(id=id) for id in ("ada", "bob", "eve")))
    one, other = (
        Pair(name, "ada", who, 0.9, LineRange(1, 2), LineRange(1, 2), "") for name, who in (("a", "bob"), ("b", "eve"))
    )
    assert "Alike among" not in overview(graded, similar=[one, other])
    assert "Alike among" in overview(graded, similar=[one, replace(other, exercise="a")])


def test_all_files_of_a_class(course: Course, tmp_path: Path) -> None:
    """As `lockstep grade` writes them; a second time gives the same, and leaves nothing of the first."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "gone.html").write_text("of an earlier class")
    named = write_all(whole_class(), tmp_path, course)
    files = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert set(files) == {"index.html", "grades.csv", "junit.xml", "summary.md", "classroom50/scores.json", "classroom50/left_out.txt", "checks.csv", "items.csv",
                          *(f"reports/{id}.html" for id in ("ada", "bob", "eve", "joe")), *(f"gradescope/{id}.json" for id in ("ada", "bob", "joe"))}  # fmt: skip
    assert named[0] == tmp_path / "index.html"
    for link in re.findall(r'href="(reports/[^"]+)"', files["index.html"].decode()):
        assert link in files
    assert b"eve: a fault of the grader" in files["classroom50/left_out.txt"]
    write_all(whole_class(), tmp_path, course)
    assert files == {
        path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }


def test_the_isolation_is_said_plainly() -> None:
    text = Tree(report_page(replace(learner(), isolation="none"))).text
    assert "The submission ran as the grader's own user, without a sandbox." in text
    assert "in a sandbox (bubblewrap)" in Tree(overview(replace(whole_class(), isolation="sandbox"))).text
    nothing = Tree(report_page(replace(learner("no file", report=None), isolation="sandbox"))).text
    assert "sandbox" not in nothing, "nothing of it ran"


def test_everybody_has_points_for_each_of_few_exercises() -> None:
    people = tuple(learner(f"Name {n}", *([PASSED] * n + [failed("boom")] * (4 - n)), id=f"id-{n}") for n in (1, 3))
    of_two = overview(ClassResult(11, ("train_ddp", "mini_ddp"), people))
    assert of_two.count('<td class="r num">3 of 4</td><td class="r num">–</td></tr>') == 1
    assert ">train_<wbr>ddp</th>" in of_two.partition("<h2>All learners</h2>")[2].partition("</table>")[0]
    many = overview(ClassResult(11, tuple(f"exercise_{n}" for n in range(7)), people))
    assert "exercise_" not in many.partition("<h2>All learners</h2>")[2].partition("</table>")[0]


def test_a_class_of_nobody_is_a_page_too() -> None:
    text = Tree(overview(ClassResult(1, (), ()))).text
    assert "0 learners, 0 exercises" in text and "Distribution" not in text


def graded_for_real(course: Course, worker: Worker, folder: Path) -> list[Learner]:
    wrong = [
        find(ROOT, label) for label in ("average_gradients/trips_over_none", "ring_all_reduce/everybody_sends_first")
    ]
    files = [(entry.exercise, entry.hand_in(course, folder)) for entry in wrong if entry is not None]
    files.append(("average_gradients", ROOT / "tests/submissions/right/average_gradients/gathers.py"))
    people = []
    for number, (exercise, path) in enumerate(files):
        report = worker.grade(course, GradeRequest((exercise,), path, seed=7))
        handed = Handed(f"id-{number}", path.stem, path.parent, (f"{exercise}.py",))
        people.append(Learner(handed, report, 7, isolation="nothing: the grader's own machine"))
    return people


def test_what_is_not_written_is_three_lines() -> None:
    """However many checks look at it: what, where and how to go on, and the checks folded."""

    def unwritten(name: str, line: int) -> CheckResult:
        text = "Nothing is written here yet.\nTo do: " + "a long story. " * 40
        found = Diagnosis(UNWRITTEN, text, "proof", (), "exercises/train_ddp.py", line, "Read", "Why.", "raise X")
        return CheckResult(name, name, CheckOutcome.FAILED, found)

    waits = CheckResult("again", "again", CheckOutcome.NOT_RUN, reason="needs “it steps”")
    report = learner(
        "Ada", unwritten("it steps", 12), unwritten("it sums", 12), unwritten("it ends", 31), waits, PASSED
    )
    text = Tree(report_page(report)).text
    assert text.count("Nothing is written here yet") == 1 and "long story" not in text and "proof" not in text
    assert (
        "exercises/train_ddp.py:12, 31" in text and text.count("./lockstep hint train_ddp") == 1 and "it passes" in text
    )
    page = report_page(report)
    folded = page[page.index("<summary>4 checks wait for it</summary>") :].partition("</details>")[0]
    assert re.findall(r"<li>([^<]+)", folded) == ["it steps", "it sums", "it ends", "again"]


def test_the_points_say_why_a_check_was_not_run() -> None:
    """At the top, beside the marks, unless they wait for a check that failed: that is said where it failed."""
    waits = replace(SKIPPED, name="again", reason="needs “it passes”")
    page = report_page(learner("Ada", PASSED, SKIPPED, replace(SKIPPED, name="on two"), waits))
    points = page[page.index('<table class="points">') : page.index("</table>")]
    assert re.findall(r"– (\d not run: [^<]+)<", points) == [
        "2 not run: there is no GPU",
    ]
    assert page.count("1 not run: needs “it passes”") == 1 and "<summary>1 not run: needs “it passes”</summary>" in page


def test_a_hint_is_offered_once_for_each_exercise() -> None:
    """... in which a check failed that has hints: none helps with a file that Python cannot read."""
    unread = replace(failed("x"), diagnosis=Diagnosis("syntax-error", "It cannot be read."))
    for checks, times in (((failed("a"), failed("b"), PASSED), 1), ((unread,), 0), ((PASSED,), 0)):
        assert report_page(learner("Ada", *checks)).count("For a hint: <code>./lockstep hint train_<wbr>ddp") == times


@pytest.mark.parametrize(("fails", "said"), [
    ((1,), ["boom 1", "(1)"]), ((1, 1), ["boom 1", "(2)"]), ((1, 2), ["boom 1; boom 2", "(1 each)"]),
    ((1, 2, 3), ["3 checks", "(1 each)"]), ((), [])
])  # fmt: skip
def test_of_checks_that_failed_equally_often_none_is_the_most_often_failed(fails: Any, said: list[str]) -> None:
    people = tuple(learner(f"Name {at}", failed(f"boom {of}"), id=f"id-{at}") for at, of in enumerate(fails))
    page = BeautifulSoup(overview(ClassResult(11, ("train_ddp",), people or (learner("Ada", PASSED),))), "html.parser")
    assert list(page.select("td.last")[0].stripped_strings) == said


def test_an_empty_part_is_no_mistake_and_is_counted_by_exercise() -> None:
    empty = replace(failed("x"), diagnosis=Diagnosis("not-implemented", "Nothing is written here yet."))
    people = (learner("Ada", empty, id="a"), learner("Bo", failed("boom"), id="b"), learner("Cy", empty, id="c"))
    page = BeautifulSoup(overview(ClassResult(11, ("train_ddp",), people)), "html.parser")
    (first, *_) = page.find("h2", string="By exercise").parent.select("tbody tr")
    assert " ".join(first.select("td")[1].get_text().split()) == "3 (2 empty)"
    listed = page.find("h2", string="Most frequent diagnoses").parent
    assert len(listed.select(".chip")) == 1 and "not-implemented" not in listed.get_text()


@pytest.mark.skipif(not CHROMIUM.exists(), reason="not run: no chromium here")
def test_in_a_browser_nothing_runs_nothing_is_fetched_and_it_fits(
    course: Course, worker: Worker, tmp_path: Path
) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: no playwright here")
    people = graded_for_real(course, worker, tmp_path)
    assert [bool(one.report and one.report.passed) for one in people] == [False, False, True]
    table = BeautifulSoup(report_page(people[1]), "html.parser").select_one(".finding .ls-card table")
    assert table is not None, "of a hang"
    assert [one.get_text() for one in table.select("th")] == ["rank", "waits in", "tensor", "for", "at"]
    assert str(tmp_path) not in table.get_text() and "everybody_sends_first.py" in table.get_text()
    hostile = "".join(
        f"<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{text}" for text in MORE
    )
    made = {f"real{n}": report_page(one) for n, one in enumerate(people)} | {
        f"hostile{n}": page for n, page in enumerate(pages(hostile))
    }
    graded = ClassResult(7, ("average_gradients", "ring_all_reduce"), tuple(people))
    made["class"] = overview(graded, titles={key: entry.title for key, entry in course.catalogue.items()})
    for name, page in made.items():
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
    said: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        for width, scheme in ((1000, "light"), (380, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: said.append(request.url) if not request.url.endswith(".html") else None)
            for name in made:
                page.goto(f"file://{tmp_path}/{name}.html")
                assert page.title() != "owned" and page.locator("script, img, iframe").count() == 0
                if name == "class" and width == 1000:
                    tops = """(at) => { const range = document.createRange(); range.selectNodeContents(at);
                      return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size }"""
                    broken = [one.inner_text() for one in page.locator(".scroll td.mono, .scroll th").all()
                              if one.is_visible() and one.evaluate(tops) > 1]  # fmt: skip
                    assert broken == [], "there is room for them"
                assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
                paper, ink = page.evaluate(
                    "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
                )
                assert contrast(paper, ink) > 10 and (brightness(paper) > brightness(ink)) == (scheme == "light")
        browser.close()
    assert said == []


@pytest.mark.skipif(not CHROMIUM.exists(), reason="not run: no chromium here")
def test_names_are_whole_marks_are_large_and_what_goes_on_says_so(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: no playwright here")
    names = ("average_gradients", "ring_all_reduce", "launch_distributed", "find_divergence")
    long = CheckResult("b", "test_b", CheckOutcome.NOT_RUN, reason="it needs two nodes with three GPUs each " * 4)
    exercises = tuple(ExerciseResult(name, (PASSED, failed("boom"), long)) for name in names)
    one = learner(report=Report(7, exercises))
    graded = ClassResult(7, names, (one, replace(one, handed=replace(one.handed, id="bob", shown="Bob"))))
    (tmp_path / "report.html").write_text(report_page(one), encoding="utf-8")
    (tmp_path / "class.html").write_text(overview(graded), encoding="utf-8")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        lines = "(one) => new Set([...one.getClientRects()].map((box) => Math.round(box.top))).size"
        advance = "(one) => { const range = document.createRange(); range.selectNodeContents(one);" \
            " return range.getBoundingClientRect().width / one.textContent.length }"  # fmt: skip
        page.goto(f"file://{tmp_path}/report.html")
        for width in (1440, 700):
            page.set_viewport_size({"width": width, "height": 900})
            assert [link.evaluate(lines) for link in page.locator(".points a").all()] == [1] * len(names)
        color = "(one) => getComputedStyle(one).color"
        seen, *more = [one.evaluate(color) for one in page.locator("#e1 .finding > p").all()]
        assert len(more) == 4 and more[-2:] == [seen, seen], "what to do is as dark as what was seen"
        own = page.locator(".marks .pass").first.bounding_box()["width"]
        page.goto(f"file://{tmp_path}/class.html")
        assert page.locator(".matrix .pass").first.evaluate(advance) == pytest.approx(own, rel=0.15)
        page.set_viewport_size({"width": 240, "height": 844})
        scrolled = page.locator(".scroll").last
        assert scrolled.evaluate("(one) => one.scrollWidth > one.clientWidth")
        assert "local" in scrolled.evaluate("(one) => getComputedStyle(one).backgroundAttachment")
        browser.close()


def test_the_head_says_of_which_course_and_when_it_was_handed_in() -> None:
    course = "Lockstep: distributed training with PyTorch DDP"
    assert f">{course} · report · handed in 2026-11-20<" in report_page(learner())
    assert f">{course} · report<" in report_page(learner(when=None)), "no date is made up"
    days = [learner(id=f"id-{n}", when=when) for n, when in enumerate((WEEK, None, WEEK - timedelta(days=2)))]
    for people, said in ((days, "2026-11-18 to 2026-11-20"), (days[:2], "2026-11-20")):
        page = overview(ClassResult(7, ("train_ddp",), tuple(people)))
        assert f">{course} · class report · handed in {said}<" in page


def brightness(color: str) -> float:
    """Relative luminance (WCAG 2.2) of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The ratio of two colors (WCAG 2.2)."""
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_text_color_can_be_read_on_what_it_stands_on() -> None:
    """WCAG's AA: 4.5 for text, in both schemes."""
    style = re.search(r"<style>(.*?)</style>", report_page(learner()), re.DOTALL)
    assert style
    light, dark = re.findall(r":root \{(.*?)\}", style[1], re.DOTALL)[:2]
    for scheme in (light, dark):
        colors = {
            key: f"rgb({int(h[:2], 16)}, {int(h[2:4], 16)}, {int(h[4:], 16)})"
            for key, h in re.findall(r"--([\w-]+): #([0-9a-f]{6})", scheme)
        }
        for ground in ("paper", "card", "well"):
            for ink in ("ink", "soft", "pass", "fail", "skip", "accent"):
                assert contrast(colors[ground], colors[ink]) >= 4.5, (ink, ground)
        assert contrast(colors["fail-wash"], colors["fail"]) >= 4.5
        assert (
            contrast(colors["warn-wash"], colors["ink"]) >= 4.5
            and contrast(colors["warn-wash"], colors["accent"]) >= 4.5
        )
