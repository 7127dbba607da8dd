"""A term is explained where it is used first, and an exercise comes after the API that it needs."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from support import ROOT

from lockstep.authoring import chapters
from lockstep.course import Course

COURSE = Course(ROOT)
API = re.compile(r"torch\.(distributed|multiprocessing|nn\.parallel|utils\.data\.distributed)\.")
TYPES = {"ProcessGroup", "Store", "Work"}
"""Only named in annotations."""
BEYOND = {
    "PrefixStore": "setup_ddp's reference also serves a second group under torchrun, which nobody asks for",
    "rendezvous": "as PrefixStore",
}


def used(text: str) -> set[str]:
    """The dotted names of the API in a program, whatever it calls them by."""
    tree = ast.parse(text)
    meant: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {one.asname: one.name for one in node.names if one.asname}
            meant |= {one.name.partition(".")[0]: one.name.partition(".")[0] for one in node.names if not one.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            meant |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return meant.get(node.id, "")
        inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""

    names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}
    return {name for name in names if API.match(name)}


def unshown(shown: str, solution: str) -> set[str]:
    """What the solution uses of the API although its last name does not stand in `shown`."""
    names = {name.rpartition(".")[2] for name in used(solution)} - TYPES
    return {name for name in names if not re.search(rf"\b{name}\b", shown)}


def told(name: str) -> str:
    """All that a learner has seen at the check of an exercise: the book up to there, the stub and the hints."""
    book = "".join(chapters.source_path(one, ROOT).read_text(encoding="utf-8") for one in chapters.names())
    before, check, _ = book.partition(f"# %check {name}\n")
    assert check, f"the book has no %check {name}"
    stub, hints = COURSE.exercises / f"{name}.py", COURSE.autograder / "hints" / f"{name}.md"
    return before + stub.read_text(encoding="utf-8") + hints.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in COURSE.names if not name.startswith("clinic/")])
def test_an_exercise_comes_after_what_it_needs(name: str) -> None:
    solution = (COURSE.solutions / f"{name}.py").read_text(encoding="utf-8")
    assert unshown(told(name), solution) - BEYOND.keys() == set()


def test_a_use_is_found_under_any_name() -> None:
    source = "import torch.distributed as d\nfrom torch import distributed as e\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nimport torch\n"
    source += "d.scatter(x)\ne.gather(x)\nDDP(m)\ntorch.distributed.barrier()\ntorch.ones(2)\nmine.scatter()\n"
    assert unshown("scatter, gather_object", source) == {"gather", "DistributedDataParallel", "barrier"}


TERMS = """
    rank, all-reduce, collective, process group, bucket, hook, handle, latency, bandwidth, overlap, exposed, broadcast,
    reduce-scatter, all-gather, joined batch, node, hang, NCCL, activations, FSDP, launcher, store, backend, root cause, echo,
    watchdog, enqueued, flight recorder, preflight, MFU, stream, roofline, bus bandwidth, autocast, communication hook,
    error feedback, device mesh, linear scaling rule, preempts, torn, atomic, grace period, rotation
"""
SPECIAL = {"node": "nodes", "hang": "hangs", "echo": "echoes", "store": "the store"}


@cache
def paragraphs() -> list[tuple[str, str]]:
    """All paragraphs of the book with the heading above each; not the goals at a chapter's beginning, its outlook, or code."""
    found = []
    for name in chapters.names():
        heading = ""
        for cell in re.split(r"(?m)^# %%", chapters.source_path(name, ROOT).read_text(encoding="utf-8")):
            if not cell.startswith(" [markdown]"):
                continue
            text = re.sub(r"(?m)^# ?", "", cell.partition("\n")[2])
            for paragraph in re.split(r"\n\s*\n", text):
                heading = paragraph if paragraph.startswith("#") else heading
                if not heading.startswith("## What to read") and not (
                    heading.startswith("# ") and paragraph.startswith("- ")
                ):
                    found.append((heading, re.sub(r"`[^`]*`|<code>.*?</code>", "", paragraph)))
    return found


def introduced(term: str, heading: str, paragraph: str) -> bool:
    """The paragraph has the term in bold or italics, or it is what the section is about."""
    return bool(re.search(rf"\*[^*]*\b{term}", paragraph, re.I) or re.search(rf"\b{term}", heading, re.I))


@pytest.mark.parametrize("term", [term.strip() for term in TERMS.split(",")])
def test_a_term_is_explained_where_it_is_used_first(term: str) -> None:
    word = SPECIAL.get(term, term)
    heading, paragraph = next(one for one in paragraphs() if re.search(rf"\b{word}\b", one[1], re.I))
    assert introduced(term, heading, paragraph), f"{heading}: {paragraph}"
