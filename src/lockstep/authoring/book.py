"""`lockstep book`: the chapters as pages that read well without Jupyter, without a network, on a phone and in print.

nbconvert turns a notebook's cells into HTML with the template in `pages/notebook`. Around them come a table of
contents, links to the neighboring chapters, and a search whose index is a script, since a page opened from a file
may fetch nothing. What needs no kernel is alive: the diagrams, the questions. Nothing is executed here: the outputs
are the stored ones, which `pytest --nbval chapters` compares.
"""

from __future__ import annotations

import base64
import copy
import html
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup, Comment, Tag
from bs4.element import NavigableString, PageElement
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from nbconvert import TemplateExporter
from nbconvert.exporters.html import HTMLExporter
from nbconvert.filters import Highlight2HTML, ansi2html, markdown2html
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from traitlets.config import Config

from ..course import Course, CourseError, unused
from ..course.outline import Outline, outlines, page_anchor, plain
from ..course.quizzes import Question, quiz_file, read, rich
from .references import REFERENCE

PAGES = Path(__file__).with_name("pages")
QUIZ_REPR = re.compile(r"^Quiz\((.+)\)$")
MAP_REPR = re.compile(r"^CourseMap\(.*\)$")  # a page has its own mark, which needs no kernel
NOTEBOOKS = re.compile(r"\.\./|\d\d_\w+\.ipynb#")
ADDRESS = re.compile(r"^(?:[a-z]+\.)+(?:org|com|io)/[\w./#-]*\w$")
SHORT = 28  # characters of code that stay in a line
WHOLE = 24  # lines of a cell and what it printed that stay on a page
WIDE = re.compile(r'viewBox="0 0 (\d+)')
BEFORE_AFTER = re.compile(r'viewBox="0 0 (\d+) (\d+)".*?x="(\d+)"[^>]*>before<.*?x="(\d+)"[^>]*>after', re.DOTALL)
GUTTER = 32  # units between a picture's before and after, which an arrow crosses
NARROW = ".narrow.svg"  # What a phone shows instead of a picture with a before and an after beside each other
PHONE = 500  # A picture that is no wider can be read on a phone without scrolling
COLUMNS = re.compile(r"\S {2,}\S")  # of a table, which would fall apart in lines that go on
SHOWN_FILE = re.compile(r"""^print\(Path\("([^"]+)"\)\.read_text\(\)\)$""")
WRITTEN = re.compile(r"(?:(?:Over)?[Ww]riting|Appending to) \S+")  # what `%%writefile` prints: its first line says it
INLINE = {"a", "b", "code", "em", "i", "kbd", "small", "span", "strong", "sub", "sup", "u", "wbr"}
UNCOVER = "Predicted? Show what happens"
VERDICT = r"^(?:HANG|CRASH|DRIFT|MISMATCH|OUT OF MEMORY|TIMEOUT)\b.*(?:\n.+)*"  # up to an empty line
TINTS = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"^\[rank (\d+)\]", lambda found: f'<span class="rank r{int(found[1]) % 4}">{found[0]}</span>'),
        (VERDICT, lambda found: re.sub(".+", r'<span class="headline">\g<0></span>', found[0])),
        (r"^( *)✓", r'\1<span class="good">✓</span>'),
        (r"^( *)✗", r'\1<span class="bad">✗</span>'),
    )
)


@dataclass(frozen=True)
class Rendered:
    """A chapter, its cells as HTML, the anchors of its headings by their texts, and its questions by their keys."""

    outline: Outline
    body: BeautifulSoup
    anchors: dict[str, str]
    questions: dict[str, Question]


def write_book(course: Course, out: Path, slides: bool = False) -> list[Rendered]:
    """Write the book into the folder `out`, replacing an old book there. The same course gives the same bytes.
    With `slides`, its first page links the decks that `write_slides` puts beside it.

    Returns the chapters, for `slides`. Raises CourseError when the folder holds anything but a book, or a chapter
    cannot be read.
    """
    if not outlines(course):
        raise CourseError("there is no chapter to make a book of: chapters/ has no notebook of autograder/course.toml")
    _clear(out)
    chapters = rendered(course)
    told = [chapter.outline for chapter in chapters]
    files: dict[str, str] = {}
    listed = []
    for before, one, after in zip([None, *told], chapters, [*told[1:], None], strict=False):
        outline, sections = one.outline, _sections(one)
        files[f"{outline.name}.html"] = render(
            "chapter.html.j2", told, outline.name, number=outline.number, title=outline.title,
            body=_covering(one.body), sections=sections, previous=before, next=after,
        )  # fmt: skip
        names = [name for section in outline.sections for name in section.exercises]
        exercises, jobs = ([name for name in names if ("/" in name) is of_clinic] for of_clinic in (False, True))
        more = {"quizzes": outline.quizzes, "exercises": exercises, "jobs": jobs, "sections": sections}
        listed.append({**vars(outline), **more})
    files["index.html"] = render("contents.html.j2", listed, "index", slides=slides)
    files["assets/search.js"] = _index([place for chapter in chapters for place in _places(chapter)])
    files["assets/book.js"] = (PAGES / "book.js").read_text(encoding="utf-8")
    files["assets/book.css"] = style()
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    pictures = course.root / "chapters" / "pictures"
    if pictures.is_dir():
        shutil.copytree(pictures, out / "pictures")
    for picture in (out / "pictures").glob("*.svg"):
        if drawn := stacked(picture.read_text(encoding="utf-8")):
            picture.with_suffix(NARROW).write_text(drawn, encoding="utf-8")
    return chapters


def stacked(svg: str) -> str:
    """A picture of a before and an after with the after below, for a phone. Empty for any other picture."""
    found = BEFORE_AFTER.search(svg)
    if found is None:
        return ""
    wide, high, before, after = map(int, found.groups())
    names, end = before - 4, after - GUTTER  # where the ranks' names end, and the before
    width = max(end, names + wide - after + 4)
    parts = [(0, 0, 0, end), (0, high, 0, names), (names, high, after - 4, wide - after + 4)]
    views = "".join(
        f'<svg x="{x}" y="{y}" width="{of}" height="{high}" viewBox="{start} 0 {of} {high}"><use href="#all"/></svg>'
        for x, y, start, of in parts
    )
    head, _, drawn = re.sub(r'<path class="a".*\n', "", svg).partition(">")  # no arrow to the right
    head = re.sub(r' (?:width|height|viewBox)="[^"]*"', "", head)
    size = f'viewBox="0 0 {width} {2 * high}" width="{width}" height="{2 * high}"'
    whole = f'<rect class="bg" width="{width}" height="{2 * high}"/>{views}'
    return f'{head} {size}><defs><g id="all">{drawn.replace("</svg>", f"</g></defs>{whole}</svg>")}'


def _clear(out: Path) -> None:
    """Leave an empty folder, or refuse: only an old book is ever removed."""
    if out.exists() and not out.is_dir():
        raise CourseError(f"{out} is a file: name a folder for the book")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "assets" / "book.css").is_file():
            raise CourseError(f"{out} has something else in it than a book: name a new folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


# A chapter ------------------------------------------------------------------------------------------------------------


def rendered(course: Course) -> list[Rendered]:
    """The chapters as HTML; they refer to one another by links. Raises CourseError when one cannot be read."""
    chapters = []
    for outline in outlines(course):
        file = quiz_file(course.root, outline.name)
        questions = {one.key: one for one in read(file).values()} if file.is_file() else {}
        body = _body(course, outline.name, questions)
        chapters.append(Rendered(outline, body, _headings(body), questions))
    anchors = {one.outline.number: (one.outline.name, one.anchors) for one in chapters}
    for one in chapters:
        _link_references(one, anchors)
    return chapters


def _body(course: Course, name: str, questions: dict[str, Question]) -> BeautifulSoup:
    """The chapter's cells as HTML, with unique anchors, questions that can be answered and tables that scroll."""
    text, _ = _exporter().from_filename(str(course.page(name)))
    soup = BeautifulSoup(text, "html.parser")
    taken: set[str] = set()
    for heading in soup.find_all(re.compile("^h[1-6]$")):
        anchor = unused(page_anchor(heading.get_text().removesuffix("¶")), taken)
        heading["id"] = anchor
        link = heading.find("a", class_="anchor-link")
        if isinstance(link, Tag):
            link["href"], link["aria-label"], link.string = f"#{anchor}", "Link to this section", "#"
    for number, spot in enumerate(soup.find_all(class_="quiz-here"), 1):
        key = str(spot["data-key"])
        if key not in questions:
            raise CourseError(f"chapter {name} asks {key}, which chapters/quizzes/{name}.toml does not have")
        spot.replace_with(BeautifulSoup(_question(questions[key], number), "html.parser"))
    for table in soup.find_all("table"):
        table.wrap(soup.new_tag("div", attrs={"class": "wide"}))
    for image in soup.find_all("img", src=re.compile("^pictures/")):
        if image.parent is None or image.parent.name != "p":
            continue
        drawn = (course.page(name).parent / str(image["src"])).read_text(encoding="utf-8")
        found = WIDE.search(drawn)
        if found and int(found[1]) <= PHONE:
            image["class"] = "small"
        if stacked(drawn):
            narrow = {"media": "(max-width: 30rem)", "srcset": re.sub(r"\.svg$", NARROW, str(image["src"]))}
            image.wrap(soup.new_tag("picture")).insert(0, soup.new_tag("source", attrs=narrow))
    for code in soup.find_all("code"):  # no line ends in the middle of an option or a name
        if len(code.get_text()) <= SHORT and not code.find_parent("pre") and not code.get("class"):
            code["class"] = "keep"
    for cell in soup.find_all(class_="cell", recursive=False):
        for output in cell.find_all(class_="output"):
            printed = output.get_text().strip().split("\n")
            if all(map(WRITTEN.fullmatch, printed)):
                output.decompose()
        lines = sum(len(pre.get_text().strip().split("\n")) for pre in cell("pre"))
        if lines <= WHOLE and not (cell.img or cell.find(class_="html")):
            cell["class"] = ["cell", "short"]  # type: ignore[assignment]
    _own_links(soup)
    for frame in soup.find_all("iframe", class_="lockstep-dark"):
        frame.decompose()
    for frame in soup.find_all("iframe", class_="lockstep-light"):  # here a frame follows the page's theme
        frame["class"] = ["lockstep-picture"]  # type: ignore[assignment]
        # Once: the frame's own style sheet speaks of `data-theme=light`, too.
        frame["srcdoc"] = str(frame["srcdoc"]).replace("data-theme=light", "data-theme=auto", 1)
    return soup


def _own_links(body: BeautifulSoup) -> None:
    """Take out what is for a notebook: its links to sections and exercises, those of cards, keys to press. Addresses
    become links.
    """
    for link in body.find_all("a"):
        if NOTEBOOKS.match(str(link.get("href"))) or link.find_parent(class_="lockstep-said"):
            link.unwrap()
    for spoken in body.find_all(class_="in-lab"):
        spoken.decompose()
    for code in body.find_all("code", string=ADDRESS):
        if not code.find_parent("a"):
            code.wrap(body.new_tag("a", href=f"https://{code.get_text()}"))


def _covering(body: BeautifulSoup) -> Markup:
    """The chapter for a page: what answers a "Predict" is folded, and with it the text below, up to the next heading or
    cell. (Slides show both one step later.)
    """
    page = copy.copy(body)
    for output in page.find_all(class_="covered"):
        output.name = "details"
        output.insert(0, page.new_tag("summary", string=UNCOVER))
        cell = output.find_parent(class_="cell")
        below = [one for one in takewhile(_is_text, cell.next_siblings if cell else ()) if isinstance(one, Tag)]
        if below:
            below[0].insert_before(told := page.new_tag("div", attrs={"class": "told"}))
            told.extend(below)
    return Markup(page.decode())


def _is_text(node: PageElement) -> bool:
    """Neither a heading, nor a cell or a quiz."""
    apart = {"h1", "h2", "h3", "h4", "cell", "quiz"}
    return not isinstance(node, Tag) or apart.isdisjoint({node.name, *node.get_attribute_list("class")})


class _Cells(HTMLExporter):
    """nbconvert's page, but not parsed and printed once more to add what JupyterLab's own pages need."""

    from_notebook_node = TemplateExporter.from_notebook_node


def _exporter() -> TemplateExporter:
    exporter = _Cells(
        config=Config({"TemplateExporter": {"extra_template_basedirs": [str(PAGES)]}}), template_name="notebook"
    )
    exporter.register_filter("quiz_key", _quiz_key)
    exporter.register_filter("is_map", _is_map)
    exporter.register_filter("what_it_runs", what_it_runs)
    exporter.register_filter("one_line", lambda text: " ".join(text.split()))
    exporter.register_filter("base64_text", lambda text: base64.b64encode(text.encode()).decode())
    exporter.register_filter("printed", printed)
    exporter.register_filter("ansi2html", lambda text: _tinted(ansi2html(text)))
    colored = Highlight2HTML(pygments_lexer="ipython3", parent=exporter)
    exporter.register_filter("colored", lambda source: _colored(source, colored))
    return exporter


def _colored(source: str, plain: Callable[[str], str]) -> str:
    """Pygments knows a notebook's Python, but treats what is under a `%%` line as plain text."""
    first, newline, rest = source.partition("\n")
    if not first.startswith("%%"):
        return plain(source)
    shell = first.startswith(("%%bash", "%%sh")) or first.endswith((".sbatch", ".sh"))
    body = highlight(rest, get_lexer_by_name("bash" if shell else "ipython3"), HtmlFormatter())
    return str(body).replace("<span></span>", f'<span class="magic">{html.escape(first)}</span>{newline}', 1)


def printed(text: str, source: str) -> str:
    """What a cell printed. Source code is colored, and its long lines go on under their own beginning."""
    file = SHOWN_FILE.match(source)
    if file is None:
        kind = "text" if COLUMNS.search(text) else "text prose"
        return f'<pre class="{kind}">{_tinted(ansi2html(text))}</pre>'
    lexer = "bash" if file[1].endswith((".sh", ".sbatch")) else "python"
    colored = highlight(text, get_lexer_by_name(lexer, stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")
    lines = [
        f'<span class="line" style="--in:{len(plain) - len(plain.lstrip())}">{line}\n</span>'
        for plain, line in zip(text.rstrip("\n").split("\n"), colored.split("\n"), strict=True)
    ]
    return f'<div class="highlight"><pre class="text source">{"".join(lines)}</pre></div>'


def _is_map(cell: NotebookNode) -> bool:
    return any(MAP_REPR.match(output.get("data", {}).get("text/plain", "")) for output in cell.outputs)


def _quiz_key(cell: NotebookNode) -> str:
    """The question that a cell asks, "" for any other cell."""
    for output in cell.outputs:
        found = QUIZ_REPR.match(output.get("data", {}).get("text/plain", ""))
        if found:
            return found[1]
    return ""


def what_it_runs(source: str) -> str:
    """What the first line of a cell says about where it runs, in words: `%%ranks 4 --expect hang`."""
    first = source.partition("\n")[0]
    words = shlex.split(first) if first.startswith("%%") else [""]
    if words[0] == "%%writefile":
        return f"writes {words[-1]}"
    if words[0] != "%%ranks":
        return ""
    ranks = next((word for word in words[1:] if word.isdigit()), "2")
    said = ["1 rank" if ranks == "1" else f"{ranks} ranks"]
    options = dict(zip(words, [*words[1:], ""], strict=True))
    said += [f"{options['--nodes']} nodes"] if "--nodes" in options else []
    said += [options["--bandwidth"]] if "--bandwidth" in options else []
    expected = options.get("--expect", "anything")
    said += [] if expected == "anything" else [f"meant to end as: {expected.replace('-', ' ')}"]
    return " · ".join(said)


def _tinted(text: str) -> str:
    """An output with its ranks and verdicts marked."""
    for pattern, replacement in TINTS:
        text = pattern.sub(replacement, text)
    return text


def _question(question: Question, number: int) -> str:
    """The question as a list that a script turns into buttons. Its answers are encoded: not in plain sight."""
    answers = json.dumps([[choice.right, rich(choice.why)] for choice in question.choices])
    choices = "".join(f"<li>{rich(choice.text)}</li>" for choice in question.choices)
    return (
        f'<section class="quiz" data-key="{html.escape(question.key)}" aria-label="Question {number}"'
        f' data-sealed="{base64.b64encode(answers.encode()).decode()}">'
        f'<p class="question"><b>Question.</b> {rich(question.text)}</p><ol class="choices">{choices}</ol>'
        '<p class="feedback" role="status"></p></section>'
    )


def _headings(body: BeautifulSoup) -> dict[str, str]:
    """Anchors by the headings' texts; the first of that name."""
    found: dict[str, str] = {}
    for heading in body.find_all(re.compile("^h[1-6]$")):
        found.setdefault(title_of(heading), str(heading["id"]))
    return found


def title_of(heading: Tag) -> str:
    return " ".join(heading.get_text().split()).removesuffix("#").strip()


def _sections(chapter: Rendered) -> list[dict[str, Any]]:
    return [
        {
            "title": section.plain,
            "anchor": chapter.anchors[section.plain],
            "effort": section.effort,
            "exercise": bool(section.exercises),
            "questions": " ".join(section.quizzes),
        }
        for section in chapter.outline.sections
    ]


def _link_references(chapter: Rendered, anchors: dict[int, tuple[str, dict[str, str]]]) -> None:
    """Make links of references such as: chapter 3, "Hangs". In running text, "Hangs" is enough in its own chapter."""
    here: list[Tag] = []
    for text in list(chapter.body.find_all(string=REFERENCE)):
        inside = text.find_parent(["a", "code", "script", "style"]) or text.find_parent(class_="input")
        if inside or isinstance(text, Comment):
            continue
        made, end = BeautifulSoup("", "html.parser"), 0
        for found in REFERENCE.finditer(str(text)):
            if not found["number"] and text.find_parent(class_=["cell", "quiz"]):
                continue
            name, headings = anchors.get(int(found["number"] or chapter.outline.number), ("", {}))
            anchor = headings.get(plain(found["title"]))
            if anchor and _is_here(text, anchor):
                here += [text.parent] if text.parent else []
                continue
            if anchor:
                made.append(NavigableString(text[end : found.start()]))
                link = made.new_tag("a", href=f"{name}.html#{anchor}")
                link.string = found[0]
                made.append(link)
                end = found.end()
        made.append(NavigableString(text[end:]))
        text.replace_with(made)
    for line in here:
        if line.get_text().startswith("Read: ") and not line.a:
            line.decompose()


def _is_here(text: NavigableString, anchor: str) -> bool:
    """Whether the section that a card in it names is its own: then there is nothing to follow."""
    if text.find_parent(class_="ls-card") is None:
        return False
    here = text.find_previous("h2")
    return isinstance(here, Tag) and here.get("id") == anchor


# The pages around them ------------------------------------------------------------------------------------------------


def render(template: str, chapters: Any, name: str, **values: Any) -> str:
    environment = Environment(loader=FileSystemLoader(PAGES), autoescape=True, trim_blocks=True)
    environment.filters["inline"] = _inline
    return environment.get_template(template).render(chapters=chapters, name=name, **values)


def _inline(text: str) -> Markup:
    """A line of Markdown as HTML without a paragraph around it."""
    return Markup(re.sub(r"^<p>|</p>$", "", markdown2html(text).strip()))


def _places(chapter: Rendered) -> Iterator[tuple[str, str, str, str]]:
    """What the search finds: page, anchor and title of each heading, and the text below it up to the next one."""
    page_, anchor, title, lines = chapter.outline.name, "", "", [""]
    for element in (*chapter.body.children, None):
        if element is None or (isinstance(element, Tag) and re.match("^h[1-6]$", element.name)):
            if anchor:
                yield page_, anchor, title, " ".join(" ".join(lines).split())
            if element is not None:
                anchor, title, lines = str(element["id"]), title_of(element), []
        elif isinstance(element, Tag):
            lines.append(_words(element))


def _words(element: Tag) -> str:
    """Its text, with a space where a page has another line, and without timelines, whose words say how to read them."""
    text = copy.copy(element)
    for drawn in text.find_all(class_="lockstep-timeline"):
        drawn.decompose()
    beside = [one for one in text.select("span:not(pre span)") if isinstance(one.next_sibling, Tag)]
    for apart in [*beside, *text.find_all(lambda one: one.name not in INLINE)]:
        apart.insert_before(" ")
        apart.insert_after(" ")
    return text.get_text()


def _index(places: list[tuple[str, str, str, str]]) -> str:
    text = json.dumps(places, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return f"window.lockstepSearch = {text};\n"


def style() -> str:
    """The book's style sheet, with Pygments' colors for light and for dark."""
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    keep = r"(?m)^\.highlight (\.\w+ \{.*)$"
    light_rules = [f".highlight {rule}" for rule in re.findall(keep, light)]
    dark_rules = re.findall(keep, dark)
    by_choice = [f":root[data-theme=dark] .highlight {rule}" for rule in dark_rules]
    by_system = [f":root:not([data-theme=light]) .highlight {rule}" for rule in dark_rules]
    looks = (PAGES / "book.css").read_text(encoding="utf-8")
    return looks + "\n".join(["", "/* Code */", "@media screen {", *light_rules, *by_choice,
                      "@media (prefers-color-scheme: dark) {", *by_system, "}", "}", ""])  # fmt: skip
