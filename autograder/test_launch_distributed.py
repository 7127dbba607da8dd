"""What `launch_distributed` has to do.

    launch_distributed(world_size, model_class, data, epochs) -> dict[str, Tensor]

It is called in a process of its own, as a script or a notebook would. The training that it launches is known, so the
weights that it must return can be computed here, and with them those that the usual mistakes return. Ranks may be started
in any way; who trained, they tell themselves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import pytest
from judging.launch_distributed import BUFFER, dataset, port_was_taken, right_weights

from lockstep.grading import (
    Cause,
    Diagnosis,
    Each,
    Frame,
    Grader,
    Hypothesis,
    Run,
    Tolerance,
    equal,
    evidence,
    parse,
    sentence,
)

IN_TURN = ({"world_size": 3, "epochs": 3}, {"world_size": 1, "epochs": 2})
TOLERANCE = Tolerance(1e-3, 1e-5)
SPAWN = r"spawn\( || Process\( || elastic_launch || start_processes || Popen\(|subprocess || def launch_distributed"
RETURN = r"^\s+return || def launch_distributed"
UNSEEN = r"\.wait\(\)|(?<!path)\.join\( || except || Popen\(|subprocess || " + SPAWN
FILES = r"mkstemp|mkdtemp|gettempdir|Temporary\w+\( || save\( || " + SPAWN
PORT = r"environ.*PORT || MASTER_PORT || [Pp]ort || " + SPAWN
WRITES = r"environ\[.*\] *=[^=]|environ(\.(update|setdefault|pop|clear)| *\|=)|del .*environ"
ECHO = re.compile(r"(?i)gloo|connection (closed|reset)|broken pipe|timed out")
NOT_ITS_OWN = re.compile(r"pytorch-errorfile-|torchinductor_|pymp-|^(journal|launch)-\d+$")
"""torch leaves the first two; Python removes the third when it ends; in the others the scenario notes what happens, and a
rank that ends late writes after they were removed."""

# Launches at once. Rank `rank` fails at the `moment`: while the group forms, in a step, or when its work is done. The rank
# that outlives it does nothing from then on, and notices nothing. A rank that lingers is the last to leave.
ELSEWHERE = {"MASTER_ADDR": "127.0.0.77", "MASTER_PORT": "taken"}  # the number of a port that somebody listens on
FINE = (
    {"world_size": 2, "epochs": 2, "failure": {}, "lingers": 1},
    {"world_size": 2, "epochs": 4, "failure": {}, "environment": ELSEWHERE},
    {"world_size": 1, "epochs": 0, "failure": {}, "rough": True},
)
FAILING = (
    {"world_size": 2, "epochs": 2, "failure": {"rank": 1, "moment": 2, "how": "raise"}},
    {"world_size": 3, "epochs": 1, "failure": {"rank": 2, "moment": "joining", "how": "raise", "outlived_by": 0}},
    {"world_size": 2, "epochs": 2, "failure": {"rank": 0, "moment": 4, "how": "kill", "outlived_by": 1}},
    {"world_size": 2, "epochs": 1, "failure": {"rank": 1, "moment": "leaving", "how": "exit"}, "lingers": 1},
)  # fmt: skip
MOMENTS = {"joining": "while the group was forming", 2: "in its second step", 4: "in its last step",
           "leaving": "after its last step"}  # fmt: skip
HOW = {"raise": "raised ValueError", "exit": "left with exit status 3", "kill": "was killed by SIGKILL"}


def in_turn(grader: Grader) -> tuple[Run, list[dict[str, Any]]]:
    """What came of three ranks, and then of one, in the same process."""
    run = grader.run("in_turn", 1, launcher=True, spoiled=_lost_its_port, launches=list(IN_TURN), **dataset(grader))
    return run, _came(run, IN_TURN)


def at_once(grader: Grader) -> tuple[Run, list[dict[str, Any] | None]]:
    """What came of launches at the same time, those that can succeed and then those with a failing rank."""
    word = f"{grader.random('word').randrange(1 << 32):08x}"
    told = [one | {"failure": one["failure"] | {"word": word}} for one in (*FINE, *FAILING)]
    run = grader.attempt("at_once", 1, launcher=True, spoiled=_lost_its_port, launches=told, **dataset(grader))
    return run, _came(run, told)


def _came(run: Run, asked: Sequence[Any]) -> list[Any]:
    return [run.observed(f"launch {number}")[0] for number in range(len(asked))]


def _lost_its_port(run: Run) -> bool:
    """A free port may be taken by another program between its choice and its use."""
    errors = [
        str(run.cause and run.cause.error),
        *((one or {}).get("error", "") for one in _came(run, (*FINE, *FAILING))),
    ]
    return any(map(port_was_taken, errors))


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    text = str(cause.error or "")
    last = (text.strip().splitlines() or [""])[-1]
    if port_was_taken(text):
        return grader.diagnosis("hard-coded-port", f"The port was taken already: {last}", at=r"\b\d{4,5}\b")
    if cause.kind == "timed out" and re.search(r"\bsend\w*\(|\bput\(", cause.headline):
        said = f"{cause.headline[:1].upper()}{cause.headline[1:]} Its model has 80 KB, and launch_distributed has not read any of it."
        return grader.diagnosis("joins-before-reading", said, of=cause.ranks, at=r"(?<!path)\.join\( || " + SPAWN)
    if "pickle" in text and "local object" in text:
        said = "The function passed to spawn must be importable by name, but it is defined inside another function"
        return grader.diagnosis("raised", f"{said}: {last}", at=SPAWN)
    meeting = cause.kind == "hang" and "init_process_group" in cause.headline
    if meeting and len(run.workers) == 1:
        said = ("launch_distributed started one process and waits for it to end before it starts the next, while that "
                "process waits in init_process_group for the others.")  # fmt: skip
        return grader.diagnosis(
            "sequential-workers", said, evidence=evidence(run), of=[0], at=r"(?<!path)\.join\( || \.wait\( || " + SPAWN
        )
    return None


def trained(launch: dict[str, Any]) -> list[dict[str, Any]]:
    """The processes that trained in a launch."""
    return [one for one in launch["noted"] if one["what"] == "trains"]


def judge_weights(
    grader: Grader, launch: dict[str, Any], world: int, epochs: int, rough: bool, also: list[Hypothesis]
) -> None:
    """What came back is a state_dict, and the right one."""
    kind, weights = launch["type"], launch.get("weights")
    if kind == "NoneType":
        said = (
            "launch_distributed returned None. mp.spawn returns nothing: the weights were in processes that have ended."
        )
        grader.fail("returns-none", said, at=RETURN)
    if not weights or launch["others"]:
        others = f"values that are not CPU tensors: {', '.join(launch['others'])}" if weights else "no CPU tensors"
        grader.fail("wrong-return", f"launch_distributed returned a {kind} with {others}.", at=RETURN)
    if any(name.startswith("module.") for name in weights):
        keys = ", ".join(map(repr, list(weights)[:2]))
        said = f"The keys are {keys}: with the wrapper's prefix a plain model cannot load them."
        grader.fail("prefixed-keys", said, at=r"state_dict || " + RETURN)
    right = right_weights(grader, world, epochs, rough)
    at = r"parameters\( || state_dict || " + RETURN
    missing, more = [name for name in right if name not in weights], [name for name in weights if name not in right]
    if missing and missing[0].replace("module.", "") in more:
        said = (f"{missing[0]!r} came back as {missing[0].replace('module.', '')!r}: \"module.\" was cut out of the middle of "
                "the name. Only DDP's prefix has to go, at the start of a name.")  # fmt: skip
        grader.fail("wrong-return", said, at=r"replace\(|sub\(|split || " + at)
    if missing:
        tied = "a second name of 'submodule.weight'. A state_dict has a shared tensor under each of its names."
        what = {BUFFER: "the model's buffer. A state_dict has the parameters and the buffers.", "tied.weight": tied}
        why = what.get(missing[0], "which the model's state_dict has.")
        grader.fail("wrong-return", f"launch_distributed returned no {missing[0]!r}, {why}", at=at)
    if more:
        what = "a buffer with persistent=False" if more == ["scratch"] else "no name in the model's state_dict"
        said = f"launch_distributed returned {more[0]!r}, {what}. A state_dict leaves that out."
        grader.fail("wrong-return", said, at=r"buffers\( || " + at)
    for name, value in right.items():
        if weights[name].dtype != value.dtype:
            said = f"{name!r} came back as {weights[name].dtype}; in the model's state_dict it is {value.dtype}."
            grader.fail("wrong-return", said, at=r"\.float\(|\.double\(|\.half\(|dtype || tolist\( || " + at)
    asked = f"world_size={world} and epochs={epochs} were asked for, and these are the weights"
    mistakes = [
        Hypothesis("untrained-weights-returned", "These are the initial weights: what the other processes trained did "
                   "not come back.", lambda: right_weights(grader, world, 0, rough), RETURN),
        *also,
        *(Hypothesis("drops-arguments", f"{asked} after {other} epoch{'s' * (other > 1)}.", lambda other=other: right_weights(grader, world, other, rough))
          for other in (*range(1, 12), 20, 50, 100)),
        *(Hypothesis("wrong-world-size", f"{asked} of another world size, {other}.",
                     lambda other=other: right_weights(grader, other, epochs, rough)) for other in range(1, 5)),
    ]  # fmt: skip
    grader.explain(
        "What came back",
        [weights],
        Each([right]),
        mistakes,
        otherwise="different-weights",
        at=SPAWN,
        tolerance=TOLERANCE,
    )


def test_starts_the_ranks(grader: Grader) -> None:
    """starts world_size processes that train together"""
    _, launches = in_turn(grader)
    for asked, launch in zip(IN_TURN, launches, strict=True):
        world, ranks = asked["world_size"], trained(launch)
        if any(one["pid"] == launch["launcher"] for one in ranks):
            said = "The caller's own process trained: launch_distributed must start processes for that."
            grader.fail("parent-trains", said, at=r"train_ddp\( || def launch_distributed")
        sizes = sorted({one["world_size"] for one in ranks})
        if len({one["pid"] for one in ranks}) != world or sizes != [world]:
            came = launch.get("weights")
            if came and not ranks and launch is not launches[0] and equal(came, launches[0].get("weights")):
                said = "A second launch started no processes and returned the first launch's weights."
                grader.fail("returns-stale-file", said, at=r"load\( || " + RETURN)
            of = f", in groups of {', '.join(map(str, sizes))}" if sizes not in ([world], []) else ""
            said = f"world_size={world} was asked for; {len(ranks)} processes trained{of}."
            grader.fail("wrong-world-size", said, at=SPAWN)


@pytest.mark.needs("test_starts_the_ranks")
def test_returns_the_weights(grader: Grader) -> None:
    """returns the trained weights, by the plain model's names"""
    judge_weights(grader, in_turn(grader)[1][0], **_asked(IN_TURN[0]), also=[])


@pytest.mark.needs("test_starts_the_ranks", "test_returns_the_weights")
def test_other_sizes(grader: Grader) -> None:
    """works for one rank and for three, one after the other in one process"""
    said = "A launch of 3 ranks preceded this one of 1, and these are its weights."
    before = Hypothesis(
        "returns-stale-file", said, lambda: right_weights(grader, **_asked(IN_TURN[0])), r"load\( || " + RETURN
    )
    judge_weights(grader, in_turn(grader)[1][1], **_asked(IN_TURN[1]), also=[before])


@pytest.mark.needs("test_starts_the_ranks")
def test_refuses_no_ranks(grader: Grader) -> None:
    """refuses a world without ranks, with ValueError"""
    run, _ = in_turn(grader)
    for world, what in run.observed("refused")[0].items():
        if what != "ValueError":
            said = f"Expected a ValueError from world_size={world}; launch_distributed {_raised(what)}."
            grader.fail("no-validation", said, at=r"def launch_distributed")


@pytest.mark.needs("test_starts_the_ranks")
def test_no_fixed_port(grader: Grader) -> None:
    """finds a free port for every launch"""
    ports = [trained(launch)[0]["port"] for launch in in_turn(grader)[1]]
    for port in ports:
        if port and grader.line(rf"\b{port}\b"):
            said = f"Port {port} is written in the source. A second launch at the same time on this machine fails."
            grader.fail("hard-coded-port", f"{said[:-1]} with EADDRINUSE.", at=rf"\b{port}\b")
    if ports[0] and ports[0] == ports[1]:
        grader.fail("hard-coded-port", f"Two launches used the same port, {ports[0]}.", at=r"[Pp]ort || MASTER_PORT")


@pytest.mark.needs("test_starts_the_ranks", "test_no_fixed_port")
def test_failure_reaches_the_caller(grader: Grader) -> None:
    """a failing rank raises in the caller, with its own message"""
    run, launches = at_once(grader)
    for asked, launch in zip(FAILING, launches[len(FINE) :], strict=True):
        failure = asked["failure"]
        rank, raised = failure["rank"], failure["how"] == "raise"
        happened = f"Rank {rank} of {asked['world_size']} {HOW[failure['how']]} {MOMENTS[failure['moment']]}"
        if launch is None:
            headline = run.cause.headline if run.cause is not None else ""
            said = f"{happened}, and launch_distributed never came back. {headline}"
            at = r"(?<!path)\.join\( || \.get\( || \.wait\( || " + SPAWN
            grader.fail("hang-on-failure", said.strip(), evidence=evidence(run), of=[rank], at=at)
        error = launch.get("error")
        if error is None and not any(one["what"] in ("lingers", "fails") for one in launch["noted"]):
            said = f"Rank {rank} of {asked['world_size']} was to fail {MOMENTS[failure['moment']]} of {asked['epochs']} epochs"
            grader.fail("drops-arguments", f"{said}, but it never got that far.", of=[rank], at=SPAWN)
        if error is None:
            said = f"{happened}, but launch_distributed returned as if nothing had happened."
            grader.fail("swallows-failure", said, of=[rank], at=UNSEEN)
        if any(one["what"] == "outlives" for one in launch["noted"]):
            said = f"{happened}. launch_distributed came back only when rank {failure['outlived_by']} had ended by itself, a minute later."
            grader.fail("hang-on-failure", said, of=[rank], at=r"is_alive || exitcode || " + UNSEEN)
        if not launch["is_exception"]:
            said = (
                f"{happened}, and launch_distributed raised {_shortened(error)}: few callers expect that or catch it."
            )
            grader.fail("error-without-message", said, of=[rank], at=r"exit\( || raise")
        word = f"{grader.random('word').randrange(1 << 32):08x}"
        if raised and word not in error:
            said = (f"Rank {rank} raised 'ValueError: rank {rank} ran out of luck ({word})' {MOMENTS[failure['moment']]}; "
                    f"the caller's error doesn't mention it: {_shortened(error)}")  # fmt: skip
            if ECHO.search(error):
                said = f"{happened}. The caller's error is another rank's, which only noticed: {_shortened(error)}"
                grader.fail("reports-the-echo", said, of=[rank], at=r"\.recv\w*\( || (?<!environ)\.get\( || " + UNSEEN)
            grader.fail("error-without-message", said, of=[rank], at=r"raise || exitcode || " + SPAWN)


@pytest.mark.needs("test_starts_the_ranks")
def test_leaves_nothing(grader: Grader) -> None:
    """leaves no file, no process and no changed environment behind"""
    run, launches = in_turn(grader)
    files = [name for name in run.left_files if not NOT_ITS_OWN.search(name)]
    if files:
        said = f"{_some(files)} {'was' if len(files) == 1 else 'were'} left behind."
        grader.fail("leaves-files", said, at=FILES)
    for launch in launches:
        if launch["running"]:
            said = f"{launch['running']} of its processes were still running when launch_distributed had returned."
            grader.fail("leaves-processes", said, at=SPAWN)
        if launch["changed"]:
            said = f"The caller's environment was changed: {_some(launch['changed'])}."
            grader.fail("leaves-environment", said, at=_writes(grader, launch["changed"]))
    if run.left_running:
        said = f"{_some(run.left_running)} kept running after the launch, although the ranks had ended."
        grader.fail("leaves-processes", said, at=SPAWN)


@pytest.mark.needs("test_starts_the_ranks", "test_other_sizes", "test_no_fixed_port", "test_leaves_nothing")
def test_launches_at_once(grader: Grader) -> None:
    """any number of launches can run at once, whatever the caller's environment says"""
    run, launches = at_once(grader)
    for number, (asked, launch) in enumerate(zip(FINE, launches, strict=False)):
        what = f"Of {len(FINE) + len(FAILING)} launches at once, launch {number}"
        told = asked.get("environment", {})
        where = "The caller's environment already had another job's MASTER_ADDR and MASTER_PORT." if told else ""
        if launch is None:
            said = f"{what} never came back. {where}"
            grader.fail("launches-interfere", said.strip(), evidence=evidence(run), at=PORT)
        if "unsupported ScalarType BFloat16" in launch.get("error", ""):
            said = "One of the model's buffers is bfloat16, a type that NumPy doesn't have. Bring tensors back, not arrays: "
            grader.fail("wrong-return", said + _shortened(launch["error"]), at=r"numpy\( || " + RETURN)
        if "error" in launch:
            taken = port_was_taken(launch["error"])
            said = f"{what} raised {_shortened(launch['error'])}. {where}"
            grader.fail("hard-coded-port" if taken else "launches-interfere", said.strip(), at=PORT)
        if (noted := [one["what"] for one in launch["noted"]]).count("lingers") > noted.count("leaves"):
            slow = asked["lingers"]
            said = f"launch_distributed returned while rank {slow} of {asked['world_size']} was still running. Wait for all ranks."
            grader.fail("leaves-processes", said, of=[slow], at=r"is_alive || " + UNSEEN)
        also = [
            Hypothesis("launches-interfere", "These are the weights of another launch that ran at the same time.",
                       lambda other=other, rough="rough" in asked: right_weights(grader, **_asked(other) | {"rough": rough}),
                       r"save\( || load\( || " + RETURN)
            for other in (*FINE, *FAILING) if other is not asked
        ]  # fmt: skip
        judge_weights(grader, launch, **_asked(asked), also=also)


@pytest.mark.needs("test_failure_reaches_the_caller", "test_leaves_nothing")
def test_leaves_nothing_after_a_failure(grader: Grader) -> None:
    """nor after a failure, or where the caller has such variables already"""
    run, launches = at_once(grader)
    for asked, launch in zip((*FINE, *FAILING), launches, strict=True):
        if launch is None:
            continue
        failure = asked["failure"]
        after = f"When rank {failure['rank']} had failed {MOMENTS[failure['moment']]}, " if failure else ""
        if left := launch["running"] or launch["early"]:
            others = "another rank was" if left == 1 else f"{left} other ranks were"
            said = (
                f"{after}{others} still running after launch_distributed had raised. Wait for those that you end, too."
            )
            grader.fail("leaves-processes", said, at=r"terminate|kill || raise (?!Value) || " + UNSEEN)
        if launch["changed"]:
            said = f"{after}the caller's environment was changed: {_some(launch['changed'])}."
            grader.fail("leaves-environment", sentence(said), at=_writes(grader, launch["changed"]))
    files = [name for name in run.left_files if not NOT_ITS_OWN.search(name)]
    if files:
        said = (
            f"After launches in which ranks failed, {_some(files)} {'was' if len(files) == 1 else 'were'} left behind."
        )
        grader.fail("leaves-files", said, at=r"rmtree\(|cleanup\(|unlink\(|remove\( || " + FILES)


def _writes(grader: Grader, changed: list[str]) -> Frame | str:
    """The line of launch_distributed itself that changes the environment, before any in a function that a rank runs."""
    tree, lines = parse(grader.submission.text), grader.submission.text.splitlines()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == "launch_distributed":
            for pattern in (*(f"environ.*{re.escape(name)}" for name in changed), WRITES, "environ"):
                for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1):
                    if re.search(pattern, lines[line - 1].split("#")[0]):
                        return Frame(str(grader.submission.file), line, node.name)
    return r"environ || " + SPAWN


def _asked(launch: dict[str, Any]) -> dict[str, int]:
    return {"world": launch["world_size"], "epochs": launch["epochs"], "rough": launch.get("rough", False)}


def _raised(what: str) -> str:
    return what if what.startswith("returned") else f"raised {what}"


def _shortened(error: str) -> str:
    """The first line; of mp.spawn's, which says nothing, the last."""
    first, *more = error.strip().splitlines() or [""]
    first = first.replace("Traceback (most recent call last):", "").strip()
    return f"{first} {more[-1]}"[:160] if more and first.endswith(":") else first[:160]


def _some(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
