"""`lockstep book --slides`: each chapter as slides for a lecture, in one HTML file that loads nothing.

Nothing is written for the slides: titles, sentences, pictures, code and outputs are the chapter's own, taken from the
book's pages. An answer is on the slide after its question, so that a printed deck keeps them apart too. What is too
long for a slide is cut, with a remark. Rows are only estimated here; the page's script makes a slide that is still too
full a little smaller.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, dropwhile, pairwise, takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup, Tag
from markupsafe import Markup

from ..course import Course
from ..course.outline import EFFORT, Outline, Section
from ..course.quizzes import Question, rich
from ..ranks.timeline_picture import AXIS, AXIS_LINE, GAP, TITLE_LINE
from .book import PAGES, SHOWN_FILE, Rendered, render, rendered, style, title_of

ROOM, TEXT, CODE = 26.0, 1.9, 1.3  # rem: the height below a title, of a line of text and of a line of code
LEAST = 10.0  # rem: what is left of an output that is cut
FEW = 4  # lines of a cell that only shows what an earlier one made
TALL = 400  # units: a timeline that is higher becomes a slide for each rank, or its words would be too small to read
TIGHT = 1.05  # a slide may be this much too full, and is made smaller
WHOLE = 1.15  # ... or this much, with a cell and what it printed, or what has no other place
DIVIDED = 1.25  # a cell is divided only if it is this much too high
LARGER = 1.3  # by so much one of text alone grows; code has one size in all slides
THIN = 9.0  # rem: what is lower goes with its neighbor, on a slide that may be as full as with a whole cell
LEAD = 210  # letters of the text above a cell
ANSWER = re.compile(r"(?:Yes|No)\b")
LONG = 7.0  # rem: a higher question has a slide before its code
EXPLAINED = re.compile(r"(?:HANG|MISMATCH|CRASH|ERROR|ENDED EARLY|NO END)\b")
MOST_EXPLAINED = 8  # lines of an explanation on one slide
ALONE = re.compile(r"data-alone")  # what has a slide of its own
QUIZ = re.compile(r'<ol class="choices">|<p class="right">')
SHORT = 3  # lines of a cell that stays with what it printed
BELOW = re.compile(r"\b[Bb]elow,|\b(?:function|hook|script|class) below\b|\bnext (?:\w+ )?cells?\b")
LEADS_ON = re.compile(rf"<strong>|.*\?$|.*(?:{BELOW.pattern})", re.DOTALL)  # a sentence about what comes next
REFERS = re.compile(
    r"\(|(?:It|They|This|These|Both|Its|Their|So|But|And|Then|That|Give|(?:\w+ ){1,2}(?:it|them))\b"
)  # to what is before it
TEXT_WIDTH, CODE_WIDTH, WIDE_WIDTH = 76, 96, 104  # characters on a line at 16:9; there are more lines at 4:3
NARROW_WIDTH = 84  # of code at 4:3
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z<`“\"(])")
NOT_SHOWN = re.compile(r"^%(?:check|hint|load_ext|solution|course)\b|\b(?:contract|course_map)\(", re.MULTILINE)
ASIDE = re.compile(r"\s*\(<code[^>]*>--[^()]*\)")  # of options of `%%ranks`, whose line a slide says in words
BEFORE_AFTER = re.compile(rb'viewBox="0 0 (\d+) .*>before<.*?x="(\d+)"[^>]*>after', re.DOTALL)
RANK_LINE = 19  # units from the top of a rank's rows to its name
BEFORE = Markup('<p class="runs">Output of the cell before</p>')
IMPORT = re.compile(r"(?:import|from|%load_ext) .*|\s*")
OPENING = re.compile(rf"{IMPORT.pattern}|\"\"\".*\"\"\"")
PLUMBING = re.compile(
    r"\b(?:redirect_stdout|subprocess\.run)\("
)  # how a command is called in a cell: only its call is shown


@dataclass(frozen=True)
class Slide:
    """One slide. `title` and `body` are HTML, `above` is the title of its section, `anchor` a place in the book; for
    `part`, see `Block`.
    """

    title: str
    body: Markup
    anchor: str
    kind: str = ""
    above: str = ""
    part: str = ""

    @property
    def grow(self) -> float:
        """By how much a slide of text alone is made larger."""
        alone = not BeautifulSoup(self.body, "html.parser").select("pre:not(.command), img, svg, table, .ls-card")
        return LARGER if alone and _height(self.body, LARGER) <= ROOM else 1.0


class Block(NamedTuple):
    """What is on a slide below its title; `part` is "1 of 2" where code goes on."""

    kind: str
    body: Markup
    part: str = ""


def write_slides(course: Course, out: Path, chapters: list[Rendered] | None = None) -> dict[Path, int]:
    """Write each chapter's slides into the folder `out` of a book: the files, and how many slides each has.

    Rendered `chapters` are changed for it: the book, if it is to be written too, comes first.
    """
    chapters = rendered(course) if chapters is None else chapters
    looks = {"style": Markup(style() + _read("slides.css")), "script": Markup(_read("slides.js"))}
    made = {}
    out.mkdir(parents=True, exist_ok=True)
    for one in chapters:
        name = one.outline.name
        _make_whole(one.body, course.root / "chapters", name)
        slides = list(_Deck(one.outline, one.questions).slides(one.body))
        told = [other.outline for other in chapters]
        text = render("slides.html.j2", told, name, chapter=one.outline, slides=slides, **looks)
        (out / f"{name}.html").write_text(text, encoding="utf-8")
        made[out / f"{name}.html"] = len(slides) + 2  # the title and the plan
    return made


def _read(page: str) -> str:
    return (PAGES / page).read_text(encoding="utf-8")


def _make_whole(body: BeautifulSoup, folder: Path, name: str) -> None:
    """Pictures go into the page, links lead into the book beside it, headings lose their own links, texts what is said
    of what no slide has: options, pictures that move, where to read on.
    """
    for gone in [
        *body.find_all(class_="on-screen"),
        *body.find_all("source"),  # a phone's pictures
        *(one for card in body.find_all(class_="ls-card") for one in card("p") if one.get_text().startswith("Read: ")),
    ]:
        gone.decompose()
    for plain in body.find_all("pre", recursive=False):
        longest = max(map(len, plain.get_text().split("\n")))
        plain["class"] = "wide" * (longest > CODE_WIDTH) + " broad" * (longest > NARROW_WIDTH)
    for text in body.find_all("p", recursive=False):
        if ASIDE.search(said := text.decode_contents()):
            text.clear()
            text.append(BeautifulSoup(ASIDE.sub("", said), "html.parser"))
    for image in body.find_all("img", src=re.compile(r"\.svg$")):
        picture = (folder / str(image["src"])).read_bytes()
        if turns := BEFORE_AFTER.search(picture):
            image["class"], image["style"] = "turns", f"--after: {int(turns[2]) / int(turns[1]):.0%}"
        data = base64.b64encode(picture).decode()
        image["src"] = f"data:image/svg+xml;base64,{data}"
    for link in body.find_all("a", href=True):
        if link.get("class") == ["anchor-link"]:
            link.decompose()
        elif "://" not in (to := str(link["href"])):
            link["href"] = f"../{name}.html{to}" if to.startswith("#") else f"../{to}"


@dataclass
class _Deck:
    """The slides of a chapter, made from its cells in reading order. No sentence is on two slides, except questions and
    what is said of a picture that takes several slides.
    """

    chapter: Outline
    questions: dict[str, Question]
    said: set[str] = field(default_factory=set)
    question: str = ""  # the last that the text has asked: of pictures that follow, one below the other

    def slides(self, body: BeautifulSoup) -> Iterator[Slide]:
        sections = {section.plain: section for section in self.chapter.sections}
        section, above = Section(""), ""
        (first, introduction), *parts = _parts(body)
        for number, node in enumerate(introduction):
            for drawn in node.select(".output > .html > .lockstep-timeline"):
                told = next((one for one in introduction[number:] if one.name == "p"), None)
                last = self.fitting(_sentences(told)[::-1], 140)[::-1] if told else []
                shown = Markup(str(drawn.parent)) + self.paragraph(last, "taken")
                yield Slide(first.decode_contents(), shown, str(first["id"]), "picture")
        for number, (heading, nodes) in enumerate(parts):
            title, anchor = heading.decode_contents(), str(heading["id"])
            main = heading.name == "h2"
            if main:
                section, above = sections[title_of(heading)], title
            elif heading.name == "h1":
                above = ""
            opened: Slide | None = None
            effort = next((node for node in nodes if node.em and EFFORT.match(f"*{node.em.get_text()}*")), None)
            if effort or (main and section.exercises and not section.effort):
                task = effort or nodes[0]
                asked = self.exercise(section, task)
                nodes = [node for node in nodes if node is not effort and node.name != "details"]
                if effort and nodes and nodes[0].name == "pre":  # what it looks like
                    asked += self.last(task) + Markup(str(nodes.pop(0)))
                opened = Slide(title, asked, anchor, "exercise", "" if main else above)
            elif heading.name != "h3" and not (nodes and nodes[0].name == "ul"):
                below = [
                    one.decode_contents() for one, _ in takewhile(lambda one: one[0].name == "h3", parts[number + 1 :])
                ]
                listed = Markup(
                    f'<ul class="below">{"".join(f"<li>{one}</li>" for one in below)}</ul>' if below else ""
                )
                opened = Slide(title, self.paragraph(self.first(nodes, 260)) or listed, anchor, "section")
            made = list(_together(self.blocks(nodes)))
            if main and not effort and nodes and nodes[0].name == "ul":
                made[0] = made[0]._replace(kind="section")
            if opened and made and made[0].kind == "text" and _height(made[0].body) < THIN + 4 * bool(effort):
                opened = replace(opened, body=opened.body + made.pop(0).body)
            if opened:
                yield opened
            if not made and heading.name == "h3" and not effort:
                made = [Block("text", self.paragraph(self.first(nodes, 420)))]
            for kind, shown, part in made:
                ends = above and QUIZ.search(shown)  # a section: the question is about any part of it
                about = above if ends else title
                said = _unanswered(about) if kind == "ask" else about
                yield Slide(said, shown, anchor, kind, "" if main or ends else above, part)

    def exercise(self, section: Section, task: Tag) -> Markup:
        """Its name, its minutes, its command, and the first sentences of what to do."""
        names, group = section.exercises, section.exercises[0].partition("/")
        if len(names) > 1 and group[1]:
            what, command = f"{group[0]}: {len(names)} exercises", f"{group[0]}/NAME"
        else:
            what, command = ", ".join(names), " ".join(names)
        rest = [one for one in _sentences(task) if not one.startswith(("<em>", "Open "))]
        self.said.update(one for one in _sentences(task) if one not in rest)  # on each exercise's slide in other words
        facts = (
            f'<p class="facts"><b>{what}</b> {section.effort}</p><pre class="command">./lockstep check {command}</pre>'
        )
        return Markup(facts) + self.paragraph(self.fitting(rest, 330))

    def blocks(self, nodes: list[Tag]) -> Iterator[Block]:
        """Kind and content of each slide below a heading."""
        lead: Tag | None = None
        asked, rest = Markup(), list(nodes)
        while rest:
            node = rest.pop(0)
            if node.name == "p" and not node.img:
                lead, asked = node, Markup(node.decode()) if _predicts(node) else Markup()
                self.question = next((one for one in _sentences(node)[::-1] if one.endswith("?")), self.question)
            elif node.name == "p" or (node.name == "details" and node.img):
                assert node.img is not None
                before = self.last(lead)
                turns = node.img.get("class") == "turns"
                if turns:  # what comes out is to be guessed first
                    before += Markup() if "?" in before else self.paragraph([self.question])
                    covered = str(node.img).replace('class="turns"', 'class="covered"')
                    yield Block("ask", before + Markup(covered))
                yield Block("answer" if turns else "picture", before + Markup(str(node.img)) + self.taken(rest))
            elif node.name == "details":
                before = Markup(str(lead)) if lead else self.paragraph([self.question] if self.question else [], "lead")
                hidden = Markup("".join(str(one) for one in node.contents if getattr(one, "name", "") != "summary"))
                hidden = (
                    hidden if node.find(["p", "pre", "ul", "ol", "table"]) else Markup(f'<p class="key">{hidden}</p>')
                )
                yield from (
                    [Block("ask", before), Block("answer", hidden)] if lead else [Block("answer", before + hidden)]
                )
            elif _is("quiz", node):
                question = self.questions[str(node["data-key"])]
                yield from (Block("ask", _choices(question)), Block("answer", _answer(question)))
            elif _is("cell", node):
                cells = [node, *takewhile(partial(_is, "cell"), rest)]
                rest = rest[len(cells) - 1 :]
                if asked:  # The first output answers; what comes after it is told afterwards.
                    answers = (number for number, cell in enumerate(cells) if cell.select(".output > *"))
                    until = next(answers, len(cells) - 1) + 1
                    cells, rest = cells[:until], [*cells[until:], *rest]
                shown = [cell for cell in cells if not NOT_SHOWN.search(_source(cell))]
                if asked and shown:
                    first, ran = shown[0], shown[-2:][0]  # the last only shows what the one before it has made
                    told = [cell for cell in shown if cell is first or cell is ran or _own_lines(cell) >= FEW]
                    high = _height(asked)
                    least = high if high <= LONG + TEXT else 3
                    code = []
                    for cell in told:
                        beside = sum(_height(_code(one)[0]) for one in told if one is not cell and _is_short(one))
                        code += _code(cell, DIVIDED * ROOM - least - beside - 1)
                    yield from _packed("ask", asked, code, _asking(asked))
                    outputs = [one for cell in shown for one in _outputs(cell)]
                    told_later = (
                        rest and _is("cell", rest[0]) and not any("lockstep-timeline" in one for one in outputs)
                    )
                    after = [] if told_later else [*dropwhile(partial(_is, "cell"), rest)]
                    made = _joined(outputs, self.taken(after, outputs))
                    ends = [_end(cell) for cell in shown for _ in _outputs(cell)]
                    yield from _packed("answer", _asking(asked), made, _asking(asked), ends)
                else:
                    held = Markup()
                    for cell in shown:
                        before, lead = held + self.last(lead), None
                        if cell is not shown[-1] and _is_short(cell) and not cell.select(".output > *"):
                            held = before + _code(cell)[0]  # on the next one's slide
                        else:
                            yield from self.run(cell, before, rest if cell is cells[-1] else [])
                            held = Markup()
                lead, asked = None, Markup()
            elif asked:
                asked += Markup(node.decode())
            else:
                before = self.last(lead)
                yield from (Block("text", before + part) for part in _pieces(node, ROOM - _height(before)))
                lead = None

    def run(self, cell: Tag, lead: Markup, rest: list[Tag]) -> Iterator[Block]:
        """A cell with what it printed, on one slide if there is room; nothing for imports."""
        outputs, source = _outputs(cell), _source(cell)
        if not SHOWN_FILE.match(source) and any(
            "more lines in the book" in one for one in outputs
        ):  # what is cut has room below its cell
            left = WHOLE * ROOM - _height(lead + Markup().join(_code(cell))) - 8
            outputs = _outputs(cell, left) if left >= LEAST else outputs
        if SHOWN_FILE.match(source):
            yield Block("code", lead + outputs[0] + self.taken(rest))
        elif outputs or not all(IMPORT.fullmatch(line) for line in source.splitlines()):
            taken = self.taken(rest, outputs)
            beside = Markup() if outputs else taken
            code = _code(cell, DIVIDED * ROOM - _height(lead + beside))
            code[-1] += beside
            made = _joined(outputs, taken)
            together = lead + Markup().join([*code, *made[:1]])
            if made and len(code) == 1 and not ALONE.search(made[0]) and _height(together) <= WHOLE * ROOM:
                ends = [Markup(), *[_end(cell)] * len(made[1:])]
                yield from _packed("code", Markup(), [together, *made[1:]], ends=ends)
            else:
                ends = [Markup()] * len(code) + [_end(cell)] * len(made)
                yield from _packed("code", lead, [*code, *made], self.asked_by(lead), ends)

    def taken(self, rest: list[Tag], outputs: Iterable[Markup] = ()) -> Markup:
        """What the text says first about an output: the sentence or two after it, up to one that leads on.

        A timeline among the `outputs` has one in any case.
        """
        if not rest or rest[0].name != "p" or rest[0].img or _predicts(rest[0]):
            return Markup()
        said, drawn = _sentences(rest[0]), any("lockstep-timeline" in one for one in outputs)
        leads = said[-1].endswith((":", "?")) and len(_plain(" ".join(said))) <= LEAD and not ANSWER.match(said[0])
        if leads and not drawn and not (rest[1:] and NOT_SHOWN.search(_source(rest[1]))):
            return Markup()  # all of it is above the next cell
        about = [*takewhile(lambda one: not LEADS_ON.match(_marked(one)), said)]
        if not drawn and not self.said.isdisjoint(about):  # on a slide of one of the cell's pictures
            return Markup()
        return self.paragraph(self.fitting(about or said[:drawn], 190), "taken")

    def asked_by(self, lead: Markup) -> Markup:
        """The question above a cell again, above what it printed: the text after it answers."""
        text = BeautifulSoup(lead, "html.parser").p
        found = [one for one in _sentences(text) if one.endswith("?")] if text else []
        return self.paragraph(found, "lead")

    def first(self, nodes: list[Tag], letters: int) -> list[str]:
        """The first sentences of the first paragraph; a question to predict has a slide of its own."""
        text = next((node for node in nodes if node.name == "p" and not node.img), None)
        here = [one for one in _sentences(text) if not BELOW.search(_plain(one))] if text else []
        return [] if text is None or _predicts(text) else self.fitting(here, letters)

    def last(self, lead: Tag | None) -> Markup:
        """The last sentences before a cell or picture that no slide has yet; a last question in any case."""
        every = _sentences(lead) if lead else []
        left = [one for one in every if one not in self.said]
        if not left:  # a question is asked again
            return self.paragraph([one for one in every[-1:] if one.endswith("?")], "lead")
        kept = self.fitting(left[::-1], LEAD, leads=True)[::-1]
        while REFERS.match(_plain(kept[0])) and len(kept) < len(left) and sum(map(len, map(_plain, kept))) < 240:
            kept = left[-len(kept) - 1 :]
        return self.paragraph([*dropwhile(lambda one: one.startswith("("), kept)], "lead")

    def fitting(self, sentences: list[str], letters: int, leads: bool = False) -> list[str]:
        """As many sentences as have room, the first in any case; one that ends with a colon only leads to something."""
        kept: list[str] = []
        for one in sentences:
            room = letters - sum(len(_plain(done)) for done in kept)
            if (one.endswith(":") and not leads) or (kept and len(_plain(one)) > room):
                break
            kept.append(one)
        return kept

    def paragraph(self, sentences: list[str], kind: str = "key") -> Markup:
        self.said.update(sentences)
        return Markup(f'<p class="{kind}">{" ".join(sentences)}</p>') if sentences else Markup()


def _together(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks below a heading, those that follow one another on one slide if they have room on it. A question is not
    asked on two slides, and is below what it is about.
    """
    last: Block | None = None
    for one in blocks:
        if last and one.kind == "ask" and _plain(one.body) in _plain(last.body):
            continue
        about = last and last.kind == "text" and "<pre" in last.body and one.kind == "ask" and "<ol" not in one.body
        kinds = {last.kind, one.kind} if last else {"ask"}
        if last and (about or not kinds & {"ask", "answer"}) and not last.part and not one.part:
            body = last.body + one.body
            thin = min(_height(last.body), _height(one.body)) < THIN
            thin = thin and not one.body.startswith('<p class="lead"><strong>')  # which opens a topic
            if not ALONE.search(body) and _height(body) <= (TIGHT if about else WHOLE if thin else 1) * ROOM:
                last = Block(next(kind for kind in ("ask", "picture", "code", "text") if kind in kinds), body)
                continue
        if last:
            yield last
        last = one
    if last:
        yield last


def _parts(body: BeautifulSoup) -> Iterator[tuple[Tag, list[Tag]]]:
    """Each heading with what is below it, the chapter's own first, of which only pictures are shown."""
    found: list[tuple[Tag, list[Tag]]] = []
    for node in body.find_all(True, recursive=False):
        if node.name in ("h1", "h2", "h3"):
            found.append((node, []))
        elif found:
            found[-1][1].append(node)
    yield from found


def _is(name: str, node: Tag) -> bool:
    return name in node.get_attribute_list("class")


def _predicts(paragraph: Tag) -> bool:
    return any(one.get_text().startswith("Predict") for one in paragraph.find_all("strong"))


def _unanswered(title: str) -> str:
    """A question's title: "All-gather" of "All-gather: all tensors, everywhere"."""
    return title.partition(":")[0]


def _marked(sentence: str) -> str:
    """A sentence without its HTML, but for a `<strong>` at its start, which names a topic."""
    return ("<strong>" if sentence.startswith("<strong>") else "") + _plain(sentence)


def _own_lines(cell: Tag) -> int:
    return sum(not IMPORT.fullmatch(line) for line in _source(cell).split("\n"))


def _is_short(cell: Tag) -> bool:
    return sum(bool(line.strip()) and not line.startswith("%%") for line in _source(cell).split("\n")) <= SHORT


def _end(cell: Tag) -> Markup:
    """A cell's last lines, above what it printed on another slide."""
    runs = str(cell.select(".input")[0].get("data-runs", "")).partition(" · meant to end")[0]
    lines = [line for line in _lines(cell.select(".input pre")[0])[bool(runs) :] if _plain(line).strip()]
    by = [html.escape(runs)] * bool(runs) + ["the cell's last lines"] * (len(lines) > SHORT)
    return Markup(f'<p class="runs">{" · ".join(by)}</p>' if by else "") + _shown(_level(lines[-SHORT:]), "end")


def _level(lines: list[str]) -> list[str]:
    """Lines from the first on that has the least indent, without this indent."""
    depths = [len(line) - len(line.lstrip()) for line in map(_plain, lines)]
    least = min(depths, default=0)
    kept = lines[depths.index(least) :] if lines else []
    return [line[least:] if line[:least].isspace() else line for line in kept]


def _asking(asked: Markup) -> Markup:
    """Of a paragraph that asks, the sentences that do: a second slide of its code repeats them."""
    text = BeautifulSoup(asked, "html.parser").p
    found = [one for one in _sentences(text) if "Predict" in one or one.endswith("?")] if text else []
    return Markup(f'<p class="lead">{" ".join(found)}</p>') if found else Markup()


def _plain(text: str) -> str:
    return html.unescape(re.sub("<[^>]+>", "", text))


def _sentences(paragraph: Tag) -> list[str]:
    """The sentences as HTML. None ends inside bold, code or a link."""
    found = [""]
    for piece in SENTENCE.split(paragraph.decode_contents().strip()):
        whole = len(re.findall(r"<\w", found[-1])) == len(re.findall("</", found[-1]))
        found = [*found, piece] if whole and found[-1] else [*found[:-1], f"{found[-1]} {piece}".strip()]
    return found


def _rows(lines: Iterable[str], width: int) -> int:
    return sum(max(1, -(-len(line) // width)) for line in lines)


def _height(block: Markup, zoom: float = 1.0) -> float:
    """About how high a block is, in rem, also made larger. Pictures and cards need a slide almost for themselves."""
    text_width, code_width, wide_width = (int(width / zoom) for width in (TEXT_WIDTH, CODE_WIDTH, WIDE_WIDTH))
    drawn, printed, texts = _content(block)
    height = 0.0
    for rows, timeline in drawn:
        height += timeline if timeline else 3 + 1.7 * _rows(rows, text_width) if rows else 13
    for lines, is_wide in printed:
        height += 1 + CODE * _rows(lines, wide_width if is_wide else code_width)
    return zoom * (height + sum(0.6 + TEXT * _rows([text], text_width) if text else 1.6 for text in texts))


@lru_cache(16)
def _content(block: Markup) -> tuple[list[tuple[list[str], float]], list[tuple[list[str], bool]], list[str]]:
    """The lines of its pictures, and how high are timelines; the lines of its code, and which are wide; its texts."""
    soup = BeautifulSoup(block, "html.parser")
    drawn, printed = [], []
    for one in [one.extract() for one in soup.find_all(lambda one: one.name == "img" or _is("html", one))]:
        rows = [line for part in one.select("p, tr, pre, li, .ls-code > div") for line in part.get_text().split("\n")]
        high = [float(n) for box in one.select(".tl-box > svg") for n in str(box["viewbox"]).split()[2:]]
        drawn.append((rows, 4.8 + min(28.6, 60 * high[1] / high[0]) if high else 0.0))
    for pre in [pre.extract() for pre in soup("pre")]:
        printed.append((pre.get_text().rstrip().split("\n"), _is("wide", pre)))
    texts = [
        "" if {"runs", "cut"} & {*one.get_attribute_list("class")} else one.get_text()
        for one in soup(["p", "li", "tr"])
    ]
    return drawn, printed, texts


def _source(cell: Tag) -> str:
    source = cell.find(class_="input")
    return source.get_text().strip("\n") if source else ""


def _lines(pre: Tag) -> list[str]:
    """A `pre` line by line, each as HTML that is whole. Outside a `pre`, BeautifulSoup would take out the indent."""
    lines = [one.decode_contents() for one in pre.find_all(class_="line")]
    return [_whole(line.rstrip()) for line in lines or pre.decode_contents().strip("\n").split("\n")]


def _whole(line: str) -> str:
    """The line, with each of its tags opened and closed in it. Only a line that needs it is parsed: that takes long."""
    depths = [0, *accumulate(-1 if tag.startswith("</") else 1 for tag in re.findall(r"</?\w", line))]
    if min(depths) == depths[-1] == 0:
        return line
    return str(BeautifulSoup(f"<pre>{line}</pre>", "html.parser")).removeprefix("<pre>").removesuffix("</pre>")


def _code(cell: Tag, room: float = DIVIDED * ROOM - 3) -> list[Markup]:
    """A cell's code, if long in parts that have `room` and are about as long as one another. Its `%%ranks` line is
    said in words, but for how it ends.
    """
    runs = str(cell.select(".input")[0].get("data-runs", "")).partition(" · meant to end")[0]
    said = Markup(f'<p class="runs">{html.escape(runs)}</p>' if runs else "")
    lines = _lines(cell.select(".input pre")[0])[bool(runs) :]
    if PLUMBING.search(_source(cell)):
        plain = [_plain(line) for line in lines]
        calls = [n for n in range(1, len(plain)) if not plain[n - 1].strip() and plain[n][:1].strip()]
        lines = lines[calls[-1] :] if calls else lines
    plain = [_plain(line) for line in lines]
    if _rows(plain, CODE_WIDTH) * CODE > room / DIVIDED:
        start = len(list(takewhile(IMPORT.fullmatch, plain)))
        said, lines, plain = said + _remark(start, "lines of imports"), lines[start:], plain[start:]
    room -= _height(said) + 1
    ends, pieces = [0, len(plain)], 1
    while pieces < len(plain) and any(_rows(plain[m:n], CODE_WIDTH) * CODE > room for m, n in pairwise(ends)):
        ends = _joints(plain, pieces := pieces + 1)
    first, *others = [_shown(lines[start:end], "input") for start, end in pairwise(ends)]
    return [said + first, *others]


def _joints(plain: list[str], pieces: int) -> list[int]:
    """Where `pieces` of about the same length begin and end: at blank lines, or where the indent is least."""
    ends = [0]
    for left in range(pieces, 1, -1):
        start, share = ends[-1], (len(plain) - ends[-1]) / left
        near = [n for n in range(start + 1, len(plain)) if abs(n - start - share) <= share / 3]
        depth = {n: len(plain[n]) - len(plain[n].lstrip()) for n in near}
        ends.append(
            min(near, key=lambda n: (plain[n].strip() != "", depth[n], abs(n - start - share)), default=start + 1)
        )
    return [*ends, len(plain)]


def _joined(outputs: list[Markup], taken: Markup) -> list[Markup]:
    """What the text says about the last output stays with it, and with each timeline, which has a slide of its own."""
    if not outputs:
        return []
    *others, last = outputs
    return [*(one + taken if "lockstep-timeline" in one else one for one in others), last + taken]


def _packed(
    kind: str, slide: Markup, parts: list[Markup], again: str = "", ends: Iterable[Markup] = ()
) -> Iterator[Block]:
    """The parts on as few slides as have room for them. From the second slide on, `again` is above them. Each output
    has its cell on its slide, or the cell's last lines from `ends`.
    """
    made: list[Markup] = []
    start = slide
    for part, end in zip_longest(parts, ends, fillvalue=Markup()):
        room = (1 if "ls-card" in part else WHOLE if 'class="highlight input"' in part else TIGHT) * ROOM
        whole = slide != start or (kind == "ask" and not made and _height(slide) > LONG)
        if slide and (ALONE.search(part) or (whole and _height(slide + part) > room)):
            made.append(slide)
            goes_on = kind == "code" and ('class="highlight input"' in part or ALONE.search(part))
            slide = start = Markup("" if goes_on else again)
        shown = 'class="highlight input"' in slide or "ls-code" in part or ALONE.search(part)
        if end and end not in slide and not shown:
            fits = _height(slide + end + part) <= ROOM
            slide += end if fits else BEFORE if kind == "code" and not slide else ""
        slide += part
    made += [slide] if slide else []
    code = [number for number, one in enumerate(made) if 'class="highlight input"' in one]
    for number, one in enumerate(made):
        which = f"{code.index(number) + 1} of {len(code)}" if len(code) > 1 and number in code else ""
        yield Block(kind, one, which)


def _outputs(cell: Tag, room: float = ROOM - 6) -> list[Markup]:
    """What a cell drew, and what it printed, cut with a remark if it is long."""
    made = []
    for output in cell.select(".output > *"):
        if output.name == "img" or _is("html", output):
            made += [] if output.iframe else _card_apart(output) or _runs_apart(output)  # what moves is in the book
            continue
        lines = _lines(output.pre or output)
        for part in _explained_apart(lines):
            start, end = 0, _fitting(part, room)
            if end < len(part) and SHOWN_FILE.match(_source(cell)):  # of a file, neither its docstring nor its imports
                start = len([*takewhile(OPENING.fullmatch, map(_plain, part))])
                end = start + _fitting(part[start:], room)
            made.append(_shown(part[start:end], "printed") + _remark(len(part) - end + start, "more lines"))
    return made


def _card_apart(output: Tag) -> list[Markup]:
    """A card of a hang as two: its headline, the ranks and the line that parted them; then the code and all else."""
    card = output.select_one(".ls-card")
    if card is None or not (card.table and card.select_one(".ls-code")) or _height(Markup(output.decode())) <= ROOM - 2:
        return []
    first, more = (BeautifulSoup(output.decode(), "html.parser") for _ in range(2))
    for gone in first.select(".ls-card > p:not(.ls-red), .ls-card > pre, .ls-code > div:not(.ls-branch)"):
        gone.decompose()
    for gone in [*more.select(".ls-card > .ls-red, .ls-card table"), *first.select(".ls-code:empty")]:
        gone.decompose()
    for whole in more.find_all(True, recursive=False):
        whole["data-alone"] = ""
    return [Markup(first.decode()), Markup(more.decode())]


def _explained_apart(lines: list[str]) -> list[list[str]]:
    """An explanation as text, as a card: its headline and table, and then its notes."""
    plain = [_plain(line) for line in lines]
    blank = [number for number, line in enumerate(plain) if not line.strip()]
    long = any(EXPLAINED.match(line) for line in plain) and len(plain) > MOST_EXPLAINED and len(blank) > 1
    return [lines[: blank[-1]], lines[blank[-1] + 1 :]] if long else [lines]


def _runs_apart(output: Tag) -> list[Markup]:
    """A timeline of several runs as one picture for each, and a tall one as one for each rank. All have the same axis,
    so turning the slide compares them.
    """
    for narrow in output.select(".tl-narrow"):  # for phones
        narrow.decompose()
    drawn = output.select_one(".tl-box > svg")
    titles = drawn.find_all("text", class_="tl-bold", recursive=False) if drawn else []
    if drawn is None or (len(titles) < 2 and float(str(drawn["viewbox"]).split()[3]) <= TALL):
        return [Markup(output.decode())]
    parts = [one for one in drawn.children if isinstance(one, Tag)]
    axis = next(n for n, one in enumerate(parts) if one.get("text-anchor") == "middle")
    grid: Tag | None = None
    if len(titles) > 1:
        starts = [parts.index(title) - 1 for title in titles]
        tops = [float(str(title["y"])) - TITLE_LINE for title in titles]
        told = re.split(r"(?<=\)) (?=Timeline\()", str(drawn["aria-label"]))
    else:
        ranks = [one for one in parts if one.get("x") == "8" and one.get_text().startswith("rank ")]
        starts = [parts.index(one) for one in ranks]
        tops = [0.0, *(float(str(one["y"])) - RANK_LINE for one in ranks[1:])]
        told = [str(drawn["aria-label"])] * len(ranks)
        starts[0] = parts.index(grid := next(one for one in parts if one.name == "path")) + 1
    tops.append(float(str(parts[axis]["y"])) - AXIS_LINE)
    wide, made = str(drawn["viewbox"]).split()[2], []
    for number, (top, below) in enumerate(pairwise(tops)):
        panel = "".join(map(str, parts[starts[number] : [*starts, axis][number + 1]]))
        if grid is not None:
            lines = re.sub(r" [\d.]+V[\d.]+", f" {top + GAP:g}V{below - GAP / 2:g}", str(grid["d"]))
            panel = f'<path class="tl-grid" d="{lines}"/>{panel}'
        ticks = f'<g transform="translate(0 {below - tops[-1]:g})">{"".join(map(str, parts[axis:]))}</g>'
        drawn["viewbox"], drawn["aria-label"] = f"0 {top:g} {wide} {below - top + AXIS:g}", told[number]
        drawn.clear()
        drawn.append(BeautifulSoup(panel + ticks, "html.parser"))
        made.append(Markup(output.decode()))
    return made


def _remark(number: int, what: str) -> Markup:
    return Markup(f'<p class="cut">… {number} {what} in the book</p>' if number else "")


def _fitting(lines: list[str], room: float) -> int:
    """How many lines of an output have room: all, or nearly, or as many as end at a blank line near."""
    plain = [_plain(line) for line in lines]
    if _rows(plain, CODE_WIDTH) * CODE <= TIGHT * room:
        return len(plain)
    end = 1
    while _rows(plain[: end + 1], CODE_WIDTH) * CODE <= room:
        end += 1
    return next((n for n in range(end, end // 2, -1) if not plain[n].strip()), end)


def _shown(lines: list[str], kind: str) -> Markup:
    """Lines that go on under their own beginning. An output that is wider than code is smaller if that
    keeps lines whole.
    """
    plain = [_plain(line) for line in lines]
    wide = kind == "printed" and any(CODE_WIDTH < len(line) <= WIDE_WIDTH for line in plain)
    broad = kind == "printed" and NARROW_WIDTH < max(map(len, plain), default=0) <= WIDE_WIDTH
    inside = "".join(
        f'<span class="line" style="--in:{len(line) - len(line.lstrip())}">{line}\n</span>' for line in lines
    )
    return Markup(
        f'<div class="highlight {kind}"><pre class="source{" wide" * wide}{" broad" * broad}">{inside}</pre></div>'
    )


def _pieces(node: Tag, room: float) -> Iterator[Markup]:
    """A list in parts that have room; anything else as it is."""
    items = node.find_all("li", recursive=False)
    start = end = 0
    while end < len(items):
        end += 1
        if end == len(items) or _height(Markup("".join(map(str, items[start : end + 1])))) > room:
            first = f' start="{start + 1}"' if node.name == "ol" else ""
            yield Markup(f"<{node.name}{first}>{''.join(map(str, items[start:end]))}</{node.name}>")
            start = end
    if not items:
        yield Markup(node.decode())


def _choices(question: Question) -> Markup:
    items = "".join(f"<li>{rich(choice.text)}</li>" for choice in question.choices)
    return Markup(f'<p class="key">{rich(question.text)}</p><ol class="choices">{items}</ol>')


def _answer(question: Question) -> Markup:
    number, right = next((at, one) for at, one in enumerate(question.choices) if one.right)
    said = f'<p class="right"><b>{"ABCDEFGH"[number]}.</b> {rich(right.text)}</p><p class="key">{rich(right.why)}</p>'
    return Markup(f'<p class="lead">{rich(question.text)}</p>{said}')
