"""Likeness between submissions: a disguised copy is found, independent solutions are not, and it stays quick."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from lockstep.authoring.bank import entries
from lockstep.course import Course
from lockstep.grading import similar
from lockstep.grading.classroom import ClassResult, Learner
from lockstep.grading.intake import Handed
from lockstep.grading.similar import Pair, groups, in_class, same_tickets

ROOT = Path(__file__).resolve().parents[2]
BANK = ROOT / "tests" / "submissions" / "right"
# The bank's authors wrote these from one another; a person who reads them sees the same helpers, line by line.
WRITTEN_FROM_EACH_OTHER = {
    "checkpoint": {"checksum_in_the_name", "next_save_overwrites"},
    "preflight": {"roll_call_by_keys", "store_waits", "compares_in_the_group"},
    "find_divergence": {"hash_of_bytes", "two_vectors", "broadcast_and_vote"},
    "exact_resume": {"throwaway_step", "buckets_never_rebuilt"},
    "train": {"plain", "one_backward", "every_rank_reads", "two_collectives"},  # from the reference, as it once saved
}
NAMES = [name for name in Course(ROOT).names if len(list((BANK / name).glob("*.py"))) > 1]


def right(name: str) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (BANK / name).glob("*.py")}


def given(name: str) -> list[str]:
    return [(ROOT / folder / f"{name}.py").read_text(encoding="utf-8") for folder in ("exercises", "solutions")]


def pairs(sources: dict[str, str], given: Iterable[str] = (), exercise: str = "") -> tuple[Pair, ...]:
    codes = {learner: similar._Code.of(text) for learner, text in sorted(sources.items())}
    return tuple(similar._pairs(codes, [similar._Code.of(text) for text in given], exercise))


class _Disguise(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self.names.get("." + node.attr, node.attr)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg, node.annotation = self.names.get(node.arg, node.arg), None
        return node


def disguised(text: str) -> str:
    """The same program with other names, comments, docstrings and layout, without annotations."""
    tree = ast.parse(text)
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {"." + node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id == "self"}  # fmt: skip
    tree = _Disguise({name: f"my_{number}" for number, name in enumerate(sorted(own))}).visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body.insert(0, ast.Expr(ast.Constant("I wrote this.")))
            node.returns = None
    lines = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    return "".join(f"{line}\n\n" + ("# my own thought\n" if not line.endswith("\\") else "") for line in lines)


def test_there_is_a_bank_to_be_tried_on() -> None:
    assert len(NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_independent_right_solutions_are_no_pair(name: str) -> None:
    found = {frozenset((pair.one, pair.other)) for pair in pairs(right(name), given(name))}
    assert all(couple <= WRITTEN_FROM_EACH_OTHER.get(name, set()) for couple in found), found


@pytest.mark.parametrize("name", ["average_gradients", "ring_all_reduce", "mini_ddp", "train_ddp", "checkpoint"])
def test_a_disguised_copy_is_found_and_nobody_else(name: str) -> None:
    one_of_each = sorted(WRITTEN_FROM_EACH_OTHER.get(name, ()))[1:]
    everybody = {learner: text for learner, text in right(name).items() if learner not in one_of_each}
    for learner, text in everybody.items():
        found = pairs({**everybody, "zoe": disguised(text)}, given(name), exercise=name)
        assert [(pair.one, pair.other) for pair in found] == [(learner, "zoe")], learner
        assert found[0].share > 0.9 and found[0].exercise == name
        assert len(found[0].passage.splitlines()) >= 4 and found[0].passage.splitlines()[0] in text


def test_half_a_copy_is_found_where_it_lies() -> None:
    everybody = right("ring_all_reduce")
    learner, text = sorted(everybody.items())[0]
    mixed = f"# mine\n\n\n{text}\n\ndef mine(a):\n    return [b * 2 for b in sorted(a) if b not in (1, 2, 3)]\n"
    (pair,) = pairs({**everybody, "zoe": mixed}, given("ring_all_reduce"))
    assert {pair.one, pair.other} == {learner, "zoe"}
    assert pair.other_lines.first == pair.one_lines.first + 3 and pair.other_lines.last == pair.one_lines.last + 3


def test_the_reference_and_the_stub_handed_in_twice_are_no_pair() -> None:
    for text in given("train_ddp"):
        assert pairs({"a": text, "b": disguised(text), "c": text}, given("train_ddp")) == ()
        assert pairs({"a": text, "b": text}, []) != () or "NotImplementedError" in text


def test_what_many_have_counts_for_nothing() -> None:
    """Twelve of forty share a passage: an idiom from the lecture. Two who share another one stand out."""
    idiom = right("mini_ddp")
    taught, secret = (idiom[key] for key in sorted(idiom)[:2])
    others = [
        f"def f_{n}(x):\n" + "".join(f"    x = x.m{n}_{k}({k} + {n}, x[{n}:])\n" for k in range(12)) for n in range(40)
    ]
    sources = {
        f"s{n:02}": own + (taught if n < 12 else "") + (secret if n in (20, 30) else "") for n, own in enumerate(others)
    }
    assert [(pair.one, pair.other) for pair in pairs(sources)] == [("s20", "s30")]


def test_a_line_or_two_that_only_two_have_are_no_pair() -> None:
    """Their whole own part is the same, but it is small: such as one log line that a friend recommended."""
    text = given("train_ddp")[1]
    log = "\n    print('group closed', [one.item() for one in sorted(seen, key=len) if one.numel() > 4][:7], flush=True)\n"
    sources = {"ada": text + log, "bob": text + "# mine" + log}
    own = similar._Code.of(sources["ada"]).fingerprints({mark for _, mark in similar._Code.of(text).grams()})
    assert 0 < len(own) < similar.EVIDENCE
    assert pairs(sources, [text]) == ()


def test_groups() -> None:
    everybody = right("mini_ddp")
    text = everybody[min(everybody)]
    found = pairs({**{f"x{n}": text for n in range(3)}, **everybody})
    assert groups(found) == ((*sorted([min(everybody), "x0", "x1", "x2"]),),)
    assert groups(()) == ()


@pytest.mark.parametrize("text", ["", "def", "\x00", "(" * 5_000, "-" * 50_000 + "1", "x" * 1_000_000, "\ud800 = 1", "é" * 999,
                                  "f(" * 150 + ")" * 150, "a = [\n" + "1,\n" * 100_000 + "]", "# only a comment"])  # fmt: skip
def test_nothing_that_is_handed_in_breaks_it(text: str) -> None:
    found = pairs({"ada": text, "bob": text, **right("mini_ddp")}, given("mini_ddp"))
    assert all({pair.one, pair.other} == {"ada", "bob"} for pair in found)


def test_files_that_python_cannot_read_are_compared_by_their_words() -> None:
    broken = right("train_ddp")[min(right("train_ddp"))] + "\n    def oops(:\n"
    (pair,) = pairs({"ada": broken, "bob": "# other\n" + broken}, [])
    assert pair.share == 1.0 and pair.other_lines.first == pair.one_lines.first + 1


def test_three_hundred_submissions_are_indexed_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pairs that are shown are looked at closely; each file is read once."""
    texts = sorted(entry.text for entry in entries(ROOT) if entry.exercise == "train_ddp")
    own = "\n".join(f"def h{{n}}_{k}(x):\n    return x.at{{n}}(x + {k}, {{n}})[{k} : {{n}}]" for k in range(3))
    sources = {f"s{n:03}": texts[n % len(texts)] + own.format(n=n) for n in range(300)}
    read, grown = [], []
    parse, grow = ast.parse, similar._grow
    monkeypatch.setattr(similar.ast, "parse", lambda text: read.append(text) or parse(text))
    monkeypatch.setattr(similar, "_grow", lambda *places: grown.append(0) or grow(*places))
    found = pairs(sources, given("train_ddp"))
    assert len(read) == 302 and found
    assert len(grown) <= similar.MOST_PAIRS * similar.PASSAGES


def learner(folder: Path, name: str, **files: str) -> Learner:
    place = folder / name
    for file, text in files.items():
        path = place / file.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    names = tuple(sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()))
    return Learner(Handed(name, name.title(), place, names), None, 1)


def test_a_class_from_its_folders(tmp_path: Path) -> None:
    everybody = right("mini_ddp")
    text = everybody[min(everybody)]
    people = [learner(tmp_path, "ada", mini_ddpDOTpy=text), learner(tmp_path, "bob", mini_ddpDOTpy=disguised(text)),
              learner(tmp_path, "eve", mini_ddpDOTpy=everybody[max(everybody)]), learner(tmp_path, "nil")]  # fmt: skip
    found = in_class(ClassResult(1, ("mini_ddp", "train_ddp"), tuple(people)), Course(ROOT)).pairs
    assert [(pair.exercise, pair.one, pair.other) for pair in found] == [("mini_ddp", "ada", "bob")]


def test_the_same_ticket_twice(tmp_path: Path) -> None:
    tickets = {"ada": "4711\n", "bob": " 4711", "eve": "4712", "nil": "", "non": " "}
    people = tuple(learner(tmp_path, name, clinic__ticketDOTtxt=text) for name, text in tickets.items())
    assert same_tickets(ClassResult(1, (), people)) == (("4711", ("ada", "bob")),)


def test_whoever_hands_in_the_reference_solution_is_named_and_nobody_else(tmp_path: Path) -> None:
    """In any disguise; of the right solutions that others wrote, none is."""
    course, files = Course(ROOT), {"stub": {}, "copy": {}, "from-a-notebook": {}}
    names = [name for name in course.names if "/" not in name]
    for name in names:
        stub, solution = given(name)
        files["stub"][f"{name}DOTpy"], files["copy"][f"{name}DOTpy"] = stub, disguised(solution)
        files["from-a-notebook"][f"{name}DOTpy"] = solution.partition("\nif __name__")[0]
        for number, text in enumerate(right(name).values()):
            files.setdefault(f"other{number}", {})[f"{name}DOTpy"] = text
    people = tuple(learner(tmp_path, who, **texts) for who, texts in files.items())
    found = in_class(ClassResult(1, tuple(names), people), course).solved
    assert dict(found) == dict.fromkeys(names, ("copy", "from-a-notebook"))
