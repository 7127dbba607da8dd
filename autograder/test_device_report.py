"""What `device_report` has to do.

    device_report(model, *batch, loss=None, device=None) -> DeviceReport

It is shown models, losses and batches whose tensors are on two devices: the CPU, and a GPU or, without one, "meta".
What counts is what its report holds, tensor by tensor, and the first line of the report as text.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from lockstep.grading import Cause, Diagnosis, Grader, Run

FUNCTION = r"def device_report"
WALK = r"named_parameters || parameters\( || " + FUNCTION
BUFFERS = r"named_buffers || buffers\( || state_dict || " + WALK
NEST = (
    r"data_ptr\( || isinstance\(.*Mapping || isinstance\(.*dict || register\( || isinstance\(.*(list|tuple) || "
    + FUNCTION
)
HELD = r"named_modules|\.modules\( || vars\(\w+\)|__dict__ || " + FUNCTION
LOSS = r"isinstance\(loss || loss is || loss\. || " + FUNCTION
UNWRAP = r"DistributedDataParallel\) || \.module\b || " + WALK
EXPECTED = r"device is None || device = || next\( || " + FUNCTION
TEXT = r"def __str__"
REMEDY = r"\.to\( || " + TEXT

CALL = r"(?<!def )\bmodel\( || " + FUNCTION
CALLED = "The model was called. A report only looks: a forward pass takes time, draws random numbers and changes BatchNorm's statistics."

HERE, THERE = "cpu", "other"
TWO_NAMES = "model.mean", "model.also_mean"  # of one tensor
SECOND = {"batch[1].image": "batch[0].left", "loss.head": "model.weight"}  # of one tensor, and where it comes first
REGISTERED = {
    "model.encoder.weight": ("parameter", "float32"),
    "model.frozen": ("parameter", "float32"),
    "model.half.weight": ("parameter", "bfloat16"),
    "model.norm.weight": ("parameter", "float32"),
    "model.norm.bias": ("parameter", "float32"),
    "model.norm.running_mean": ("buffer", "float32"),
    "model.norm.running_var": ("buffer", "float32"),
    "model.norm.num_batches_tracked": ("buffer", "int64"),
    "model.mask": ("buffer", "bool"),
    "model.norm.table": ("buffer", "float32"),
}
LSTM = {f"model.lstm.{name}_l0": ("parameter", "float32") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
ATTRIBUTES = {
    "model.mean": "float32",
    "model.anchors[0]": "float32",
    'model.anchors[1][0]["wide"]': "float64",
    "model.norm._extra": "float32",
    "model.adapters[0].weight": "float32",
    "model.adapters[0].steps": "int64",
    "model.adapters[0].inner.weight": "float32",
    "model.prompts[0]": "float32",
}
FOCAL = {
    "loss.scale": ("parameter", HERE, "float32"),
    "loss.weight": ("buffer", HERE, "float32"),
    "loss.gamma": ("attribute", HERE, "float32"),
}
LINEAR = {"model.weight": ("parameter", "float32"), "model.bias": ("parameter", "float32")}
BATCHES = {
    "flat": "three tensors",
    "dictionary": "a dictionary with a list, a tuple, None, a text and a number in it",
    "records": "a named tuple and a dataclass",
}
PLAIN = {"plain": "nn.CrossEntropyLoss()", "function": "the function F.cross_entropy"}
WHAT = {
    "prompts": " It is an nn.Parameter in a plain list: named_parameters() doesn't give it, and .to() doesn't move it.",
    "batch[2]": " It is batch[1].detach(), a tensor of its own in the same memory: .to() on one doesn't move the other.",
}

Tensors = dict[str, tuple[str, str, str]]
"""Path: kind, device (HERE or THERE), type."""


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    if run.observed("forward_called")[0]:
        return grader.diagnosis("report-acts", CALLED, at=CALL)
    error, case = cause.error, run.observed("case")[0]
    if error is None or error.type in ("NotImplementedError", "ImportError", "SyntaxError") or not error.frames:
        return None
    if case in BATCHES:
        said = f"The batch was {BATCHES[case]}, and device_report raised {error}."
        return grader.diagnosis("trips-over-batch", said, at=error.frame)
    if case in PLAIN:
        said = f"The loss was {PLAIN[case]}, which holds no tensor, and device_report raised {error}."
        return grader.diagnosis("accuses-plain-loss", said, at=error.frame)
    return None


def found(run: Run, label: str) -> dict[str, Any]:
    """What one call observed, the second device under its name here, and a tensor of two names under the first."""
    seen: dict[str, Any] = run.observed(label)[0]
    other = run.observed("other")[0]
    first, second = TWO_NAMES
    names = {second: first} if first not in [path for _, path, *_ in seen["tensors"]] else {}
    tensors: list[tuple[str, ...]] = []
    for kind, path, device, dtype in seen["tensors"]:
        place = THERE if device == other else device
        tensors.append((names.get(path, path), kind, place, dtype.removeprefix("torch.")))
    text = seen["text"].replace(second, first) if names else seen["text"]
    misplaced = [names.get(path, path) for path in seen["misplaced"]]
    return seen | {"tensors": tensors, "text": text, "misplaced": misplaced, "other": other}


def look_at(grader: Grader, seen: dict[str, Any], wanted: Tensors, missing: dict[str, tuple[str, str]]) -> None:
    """Every tensor once, under its path, with its own device and type. `missing` maps a path's pattern to (id, at)."""
    paths = [path for path, *_ in seen["tensors"]]
    gone = [path for path in wanted if path not in paths]
    extra = [path for path in paths if path not in wanted]
    twice = [path for path in paths if paths.count(path) > 1]
    if gone and extra and len(gone) == len(extra):
        said = f"What is found at {gone[0]} was reported as {extra[0]}. A path should be one that the reader can type."
        if extra[0] == gone[0].replace("module.", ""):
            said = f'"module." was cut from the name {gone[0]}: the report says {extra[0]}. Only the "module." of the DDP wrapper has to go.'
        grader.fail("wrong-path", said, at=NEST if gone[0].startswith("batch") else WALK)
    for path in gone:
        id, at = next(value for pattern, value in missing.items() if re.search(pattern, path))
        more = f", and {len(gone) - 1} more {'is' if len(gone) == 2 else 'are'} missing" if len(gone) > 1 else ""
        said = f"{path} is not in the report{more}. It names {len(set(paths))} tensors; there are {len(wanted)}."
        said += next((more for name, more in WHAT.items() if name in path), "")
        grader.fail(id, said, at=at)
    if twice or extra:
        path = (twice or extra)[0]
        how = "twice" if twice else "besides the name that it has already"
        said = f"{path} is in the report {how}: {len(paths)} entries for {len(wanted)} tensors."
        if path in SECOND:
            said = f"{SECOND[path]} and {path} are the same tensor, and the report lists both."
        grader.fail(
            "reported-twice", said, at=r"asdict\( || astuple\( || " + NEST if path.startswith("batch") else HELD
        )
    for path, kind, device, dtype in seen["tensors"]:
        if (device, dtype) != wanted[path][1:]:
            has = f"{wanted[path][2]} on {seen['other'] if wanted[path][1] == THERE else HERE}"
            said = f"{path} is {has}; the report says {dtype} on {seen['other'] if device == THERE else device}."
            grader.fail("wrong-place", said, at=r"\w\.device\b(?!:) || " + FUNCTION)
        if kind != wanted[path][0]:
            said = f"{path} is of the kind {wanted[path][0]!r}; the report says {kind!r}."
            grader.fail("wrong-kind", said, at=rf"{kind}")


def on(place: str, tensors: dict[str, tuple[str, str]]) -> Tensors:
    """These parameters and buffers, all on this device."""
    return {path: (kind, place, dtype) for path, (kind, dtype) in tensors.items()}


def with_attributes(place: str) -> Tensors:
    """What the model holds that has attributes too: those are on the CPU, whatever was moved."""
    return on(place, REGISTERED | LSTM) | {path: ("attribute", HERE, dtype) for path, dtype in ATTRIBUTES.items()}


PARAMETERS = {r".": ("parameters-overlooked", WALK)}
MISSING_REGISTERED = {r"running|num_batches|mask|table": ("buffers-overlooked", BUFFERS)} | PARAMETERS
MISSING_ATTRIBUTES = {r"adapters|prompts|mean|anchors|extra": ("attributes-overlooked", HELD)} | MISSING_REGISTERED
MISSING_BATCH = {r"^batch": ("batch-overlooked", NEST)} | PARAMETERS


def test_registered(grader: Grader) -> None:
    """names every parameter and every buffer of the model, with its device and type"""
    wanted = on(HERE, REGISTERED | {"model.module.weight": ("parameter", "float32")})
    seen = found(grader.run("registered", 1), "registered")
    if [path for path, *_ in seen["tensors"]] == ["model.weight"]:
        said = f"The model, not wrapped in DDP, has a child called module. Only this child was searched: the report names 1 of the model's {len(wanted)} tensors."
        grader.fail("parameters-overlooked", said, at=UNWRAP)
    look_at(grader, seen, wanted, MISSING_REGISTERED)


@pytest.mark.needs("test_registered")
def test_left_behind(grader: Grader) -> None:
    """shows one buffer that was left on another device"""
    wanted = on(THERE, REGISTERED) | {"model.norm.running_var": ("buffer", HERE, "float32")}
    look_at(grader, found(grader.run("moved", 1), "moved"), wanted, MISSING_REGISTERED)


def test_nested_batches(grader: Grader) -> None:
    """finds the tensors of a batch, however it is nested"""
    run = grader.run("batches", 1)
    cases: dict[str, Tensors] = {
        "flat": {"batch[0]": ("batch", THERE, "float32")} | {f"batch[{n}]": ("batch", HERE, "int64") for n in (1, 2)},
        "dictionary": {
            'batch[0]["ids"]': ("batch", THERE, "int64"),
            'batch[0]["boxes"][0]': ("batch", THERE, "float32"),
            'batch[0]["boxes"][1][0]': ("batch", HERE, "float16"),
            'batch[0][7]["mask"]': ("batch", THERE, "bool"),
        },
        "records": {
            "batch[0].left": ("batch", THERE, "float32"),
            "batch[0].right[0]": ("batch", HERE, "float32"),
            "batch[1].label": ("batch", HERE, "int64"),
        },
    }
    for label, tensors in cases.items():
        look_at(grader, found(run, label), on(THERE, LINEAR) | tensors, MISSING_BATCH)


@pytest.mark.needs("test_registered")
def test_attributes(grader: Grader) -> None:
    """finds what the model holds without having registered it, each once"""
    look_at(grader, found(grader.run("attributes", 1), "attributes"), with_attributes(THERE), MISSING_ATTRIBUTES)


@pytest.mark.needs("test_attributes")
def test_wrapped(grader: Grader) -> None:
    """looks inside a DDP wrapper"""
    seen = found(grader.run("wrapped", 1), "wrapped")
    wrapper = [path for path, *_ in seen["tensors"] if "module." in path]
    if wrapper:
        said = f"The model was wrapped in DDP, and the report names {wrapper[0]}."
        grader.fail("wrapper-in-the-names", said, at=UNWRAP)
    look_at(grader, seen, with_attributes(HERE), MISSING_ATTRIBUTES)


@pytest.mark.needs("test_registered")
def test_losses(grader: Grader) -> None:
    """tells a loss that holds weights from a plain one"""
    run = grader.run("losses", 1)
    model = on(THERE, LINEAR) | {"batch[0]": ("batch", THERE, "float32")}
    missing = {r"^loss": ("loss-overlooked", LOSS)} | MISSING_BATCH
    look_at(grader, found(run, "weighted"), model | {"loss.weight": ("buffer", HERE, "float32")}, missing)
    look_at(grader, found(run, "focal"), model | FOCAL, missing)
    for label, what in PLAIN.items():
        seen = found(run, label)
        accused = [path for path, *_ in seen["tensors"] if path.startswith("loss")]
        first = seen["text"].partition("\n")[0]
        if accused or re.search(r"\bloss\b", first):
            said = (
                f"The loss was {what}, which holds no tensor, and the report says: {accused[0] if accused else first}"
            )
            grader.fail("accuses-plain-loss", said, at=LOSS)
        look_at(grader, seen, model, missing)


@pytest.mark.needs("test_attributes", "test_losses", "test_nested_batches")
def test_order(grader: Grader) -> None:
    """lists the model first, then the loss, then the batch"""
    tensors = found(grader.run("ordered", 1), "ordered")["tensors"]
    for (path, kind, *_), (after, other, *_) in pairwise(tensors):
        if _place(path, kind) > _place(after, other):
            said = f"{path} ({kind}) comes before {after} ({other}). Expected: the model's parameters, buffers and attributes, then the loss's, then the batch."
            grader.fail("other-order", said, at=FUNCTION)


@pytest.mark.needs("test_registered", "test_nested_batches")
def test_expected_device(grader: Grader) -> None:
    """judges by where most of the model is, or by the device that it is told"""
    run = grader.run("expectations", 1)
    other = run.observed("other")[0]
    labels = ("most", "frozen", "data", "loss", "said", "said_as_text")
    most, frozen, data, loss, told, text = (found(run, label) for label in labels)
    would = "expects everything on {device}, and would have {moved} moved."
    parameters = f"Two of the model's three parameters and the batch are on {other}, the first parameter was left on the CPU; the report {would}"
    trained = f"Two of the model's three parameters, both frozen, are on {other}; the trained one was left on the CPU. The report {would}"
    buffers = f"Both parameters of the model are on {other}; its three buffers and the batch were left on the CPU. The report {would}"
    of_loss = f"Both parameters of the model are on {other}, the four of the loss on the CPU. They don't count, but the report {would}"
    asked = f"device={other} was asked for, and model and batch are on the CPU. The report expects {{device}}, and says: {{first}}"
    as_text = 'device="cpu" was asked for; the report expects {device}.'
    first = "expects-first-parameter" if most["device"] == HERE else "ignores-expected-device"
    for seen, wrong, id, said in (
        (most, most["device"] != other, first, parameters),
        (frozen, frozen["device"] != other, "expects-trained-parameters", trained),
        (data, data["device"] != other, "expects-device-of-the-data", buffers),
        (loss, loss["device"] != other, "expects-device-of-the-data", of_loss),
        (told, told["device"] != other or len(told["misplaced"]) != 3, "ignores-expected-device", asked),
        (text, text["device"] != HERE or text["misplaced"], "ignores-expected-device", as_text),
    ):
        if wrong:
            moved, line = _some(seen["misplaced"]), seen["text"].partition("\n")[0]
            grader.fail(id, said.format(device=seen["device"], moved=moved, first=line), at=EXPECTED)


@pytest.mark.needs("test_expected_device")
def test_verdict_when_all_is_well(grader: Grader) -> None:
    """says “all” and the device in the first line when nothing is misplaced"""
    seen = found(grader.run("registered", 1), "registered")
    first = seen["text"].partition("\n")[0]
    if not first.lower().startswith("all") or HERE not in first:
        said = f"Everything is on the CPU, and the report's first line is {first[:120]!r}."
        grader.fail("verdict-not-first", said, at=TEXT)
    look_at_table(grader, seen)
    first = grader.run("registered", 1).observed("on a GPU")[0].partition("\n")[0]
    if not first.lower().startswith("all") or "cuda" not in first:
        said = f'Everything is on cuda:1 and should be on "cuda", which stands for any GPU; the report\'s first line is {first[:120]!r}.'
        grader.fail("verdict-not-first", said, at=r"device [!=]= || " + TEXT)
    seen = found(grader.run("empty", 1), "empty")
    first = seen["text"].partition("\n")[0]
    if seen["tensors"] or not first.lower().startswith("all") or HERE not in first:
        what = f'Neither the model nor the batch holds a tensor, device="cpu"; the report\'s first line is {first[:120]!r}.'
        grader.fail("verdict-not-first", what, at=TEXT)


@pytest.mark.needs("test_left_behind", "test_expected_device")
def test_verdict_names_what_is_off(grader: Grader) -> None:
    """names a misplaced tensor, both devices and the remedy in the first line"""
    run = grader.run("moved", 1)
    look_at_verdict(grader, found(run, "moved"), r"model\.to\(")
    if run.observed("numbered")[0]:  # if it raised, test_only_looks says so
        first = run.observed("numbered")[0]["text"].partition("\n")[0]
        other = [name for name in re.findall(r"\.to\([\"'](.*?)[\"']\)", first) if name != "cuda:1"]
        if other:
            said = f'The device should be "cuda:1", and the fix moves the model to "{other[0]}": {first[:120]!r}'
            grader.fail("wrong-remedy", said, at=REMEDY)
        if "cuda:1" not in first:
            said = f'The device should be "cuda:1", which the first line doesn\'t name: {first[:120]!r}'
            grader.fail("verdict-not-first", said, at=TEXT)
    run = grader.run("batches", 1)
    look_at_verdict(grader, found(run, "dictionary"), r'batch\[0\]\["boxes"\]\[1\]\[0\]\.to\(')
    look_at_table(grader, found(run, "dictionary"))


@pytest.mark.needs("test_losses", "test_verdict_names_what_is_off")
def test_loss_verdict(grader: Grader) -> None:
    """moves a loss that holds weights, and not the model"""
    look_at_verdict(grader, found(grader.run("losses", 1), "weighted"), r"loss\.to\(")


@pytest.mark.needs("test_attributes", "test_verdict_names_what_is_off")
def test_attribute_remedy(grader: Grader) -> None:
    """says of an attribute that it has to be registered"""
    look_at_verdict(grader, found(grader.run("attributes", 1), "attributes"), r"register_buffer|ModuleList")


def look_at_verdict(grader: Grader, seen: dict[str, Any], remedy: str) -> None:
    """The first line, when something is misplaced."""
    first = seen["text"].partition("\n")[0]
    off = [path for path, _, device, _ in seen["tensors"] if device == HERE]
    named = off[0] in first
    if not named or not re.search(rf"\b{HERE}\b", first) or not re.search(rf"\b{seen['other']}\b", first):
        lacks = "both devices" if named else "this tensor"
        said = f"{off[0]} is on the CPU, the model on {seen['other']}. The report's first line does not name {lacks}: {first[:120]!r}"
        grader.fail("verdict-not-first", said, at=TEXT)
    if not re.search(remedy, first):
        kind = next(kind for path, kind, *_ in seen["tensors"] if path == off[0])
        shown = re.sub(r"\\|\($", "", remedy.replace("|", " or ").replace(r"\(", "(…)"))
        says = re.search(r"[\w\]\[\".]*\.to\(.*?\)", first[:500])
        if says or kind == "attribute":
            advice = says.group(0) if says else first[:100]
            said = f"{off[0]} ({kind}) is on the CPU, and the first line advises {advice!r}, which does not move it. Look for {shown}."
            grader.fail("wrong-remedy", said, at=REMEDY)
        said = f"The first line says what is wrong, not what to write: {first[:120]!r}"
        grader.fail("verdict-without-remedy", said, at=TEXT)


def look_at_table(grader: Grader, seen: dict[str, Any]) -> None:
    """Under the verdict there is a line for every tensor."""
    rest = seen["text"].splitlines()[1:]
    for path, _, device, dtype in seen["tensors"]:
        place = seen["other"] if device == THERE else device
        if not any(path in line and place in line and dtype in line for line in rest):
            said = f"Under the verdict no line says that {path} is on {place} and of type {dtype}."
            grader.fail("table-incomplete", said, at=TEXT)


@pytest.mark.needs("test_attributes", "test_nested_batches")
def test_only_looks(grader: Grader) -> None:
    """moves, changes and computes nothing"""
    played = ("moved", ["moved"]), ("batches", BATCHES), ("losses", ["weighted"]), ("attributes", ["attributes"])
    for scenario, labels in played:
        run = grader.run(scenario, 1)
        if run.observed("forward_called")[0]:
            grader.fail("report-acts", CALLED, at=CALL)
        for label in labels:
            seen = found(run, label)
            if seen["became"]:
                name, was, now = seen["became"][0]
                said = f"{name} was of the type {was}, and is " + (f"a {now} now." if now else "gone.")
                said = said if was else f"It has {name} now, a {now}."
                grader.fail("report-acts", f"device_report changed the model. {said}", at=FUNCTION)
            if seen["changed"]:
                said = (
                    f"The call changed {len(seen['changed'])} of the tensors that it was given ({seen['changed'][0]})."
                )
                grader.fail("report-acts", said, at=r"^[^'\"]*\.to\( || " + FUNCTION)
            if seen["drew"] or not seen["mode"]:
                what = "random numbers were drawn" if seen["drew"] else "the model was in eval mode"
                grader.fail("report-acts", f"After the call {what}.", at=FUNCTION)
    raised = grader.run("moved", 1).observed("raised")[0]
    if raised:
        said = (
            f'device was "cuda:1", and device_report raised {raised}. It needs no such GPU: it only compares devices.'
        )
        grader.fail("report-acts", said, at=r"device is None || device = || " + FUNCTION)


def _place(path: str, kind: str) -> tuple[int, int]:
    """Where a tensor of this path and kind stands in the report."""
    roots, kinds = ["model", "loss", "batch"], ["parameter", "buffer", "attribute", "batch"]
    return roots.index(re.split(r"\W", path)[0]), kinds.index(kind)


def _some(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
