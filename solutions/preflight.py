"""Exercise preflight: can this job start? Every rank asks, before anything expensive happens.

Chapter 3, "Preflight". It is also a program, and exits with status 1 if there is a problem:

    torchrun --nproc-per-node=2 exercises/preflight.py
"""

import datetime  # solution-only
import itertools  # solution-only
import json  # solution-only
import os
import socket  # solution-only
import sys
import threading  # solution-only
import time  # solution-only
from collections import Counter  # solution-only
from collections.abc import Callable  # solution-only
from typing import Any  # solution-only

import torch
import torch.distributed as dist


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    """Look for what will keep this job from training. Every rank calls it once, at the start, with the same arguments.

    Returns one line for each problem, and an empty list if all is well. A line names the variable, the port or the
    rank. preflight never raises, and returns within about `timeout` seconds, whatever is broken. Once the ranks are
    connected, by the store or a group, they share all problems: a problem that one rank sees is in every rank's list.

    What to look at:

    - The variables that torchrun sets, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: set, integers where
      they should be, and possible (rank below world size, port 1 to 65535; with nccl, local rank below the number of
      GPUs). Read them; never change them.
    - The backend: "nccl" if there are GPUs and "gloo" otherwise, unless the caller names one. Is it available?
    - MASTER_ADDR resolves, and at MASTER_PORT a store answers. Torchrun's agent hosts it if TORCHELASTIC_USE_AGENT_STORE
      is "True"; otherwise preflight on rank 0 does, and the port has to be free. Another program at that port is a
      problem too. When torchrun restarts the ranks, the agent's store still holds what they wrote before the restart;
      TORCHELASTIC_RESTART_COUNT tells the attempts apart.
    - Every rank arrives. Each rank that has arrived names all that are missing. If two processes have the same RANK, another
      RANK is missing: the lines name both. `init_process_group` would only say that it timed out. So let each
      rank write its number into the store first, and see which numbers are missing.
    - WORLD_SIZE, torch's version and the backend are the same on every rank.
    - `init_process_group` forms the group, and `monitored_barrier` passes. (Only gloo has it: with nccl, make a gloo group
      as well.)
    - The all-reduce of all RANKs is 0 + 1 + … + (WORLD_SIZE - 1), exactly.

    preflight leaves no process group behind. If a group exists already, it tests and keeps that group. RANK and the
    other variables may then all be missing; each rank contributes RANK to the all-reduce, or its rank in the group if
    RANK isn't set, and WORLD_SIZE is the size of the group. If rank 0 hosts the store, the store outlives the
    call, and the training that follows can use it at the same port.

    Args:
        timeout: seconds for all of it.
        backend: "gloo" or "nccl".
    """
    # --- solution: look at the environment, call the roll, try a collective ---
    deadline = time.monotonic() + timeout
    given = dist.is_initialized()
    settings, problems = _environment(given)
    backend = backend or (dist.get_backend() if given else "nccl" if torch.cuda.is_available() else "gloo")
    problems += _device_problems(backend, settings)
    fact = {
        "rank": dist.get_rank() if given else settings.get("RANK"),
        "world size": dist.get_world_size() if given else settings.get("WORLD_SIZE"),
        "process": f"{socket.gethostname()}, LOCAL_RANK {settings.get('LOCAL_RANK', '?')}, process {os.getpid()}",
        "torch": str(torch.__version__),
        "backend": backend,
        "problems": problems,
    }
    try:
        store, hosts = _store(settings, given, deadline - 0.2 * timeout)
        return _talk(store, hosts, fact, settings, given, timeout, deadline)
    except _Unreachable as error:
        return [f"{_name(fact)}: {problem}" for problem in [*problems, str(error)]]
    except Exception as error:
        said = f"it lost its connection to the store ({_first_line(error)}): look for a rank or a node that has died"
        return [f"{_name(fact)}: {problem}" for problem in [*problems, said]]
    # --- end ---


# --- solution-only ---
Fact = dict[str, Any]
_rounds = itertools.count()
_hosted: list[dist.Store] = []  # the store that rank 0 hosts must not go while others may still talk to it


class _Unreachable(Exception):
    """There is no store to talk through; the message says why, and what to do."""


def _environment(given: bool) -> tuple[dict[str, Any], list[str]]:
    """The launcher's variables that can be used, and what is wrong with the others."""
    settings: dict[str, Any] = {}
    problems = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        text = os.environ.get(name, "").strip()
        if not text and not given:
            problems.append(f"{name} is not set: start the job with torchrun, or set it for every process")
        elif name == "MASTER_ADDR" or not text:
            settings |= {name: text} if text else {}
        elif not text.lstrip("-").isdecimal():
            problems.append(f"{name} is {text!r}, not an integer: correct it in the launch script")
        else:
            settings[name] = int(text)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    limits = {
        "WORLD_SIZE": (int(local_size) if local_size.isdecimal() else 1, None),
        "RANK": (0, settings.get("WORLD_SIZE")),
        "LOCAL_RANK": (0, int(local_size) if local_size.isdecimal() else None),
        "MASTER_PORT": (1, 65536),
    }
    for name, (low, high) in limits.items():
        value = settings.get(name, low)
        if value < low or (high is not None and value >= high):
            allowed = f"{low} to {high - 1}" if high is not None else f"at least {low}"
            problems.append(f"{name} is {value}, and has to be {allowed}: correct it in the launch script")
            del settings[name]
    if given and settings.get("RANK", dist.get_rank()) != dist.get_rank():
        problems.append(
            f"RANK is {settings['RANK']}, but this is rank {dist.get_rank()} of its group: one of them is wrong"
        )
    return settings, problems


def _device_problems(backend: str, settings: dict[str, Any]) -> list[str]:
    if "nccl" not in backend:
        return []
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return [
            f"backend {backend} needs a GPU and a build of torch with NCCL, and here is none: use gloo, or mend the driver"
        ]
    gpus, local = torch.cuda.device_count(), settings.get("LOCAL_RANK", 0)
    if local >= gpus:
        return [f"LOCAL_RANK is {local}, and this node has {gpus} GPUs: start at most {gpus} ranks on it, or use gloo"]
    return []


# The store -----------------------------------------------------------------------------------------------------------


def _store(settings: dict[str, Any], given: bool, deadline: float) -> tuple[dist.Store, bool]:
    """The store where the ranks meet, with keys of this call's own, and whether this process hosts it."""
    prefix = f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_rounds)}"
    if given:
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store()), False
    if "MASTER_ADDR" not in settings or "MASTER_PORT" not in settings:
        raise _Unreachable("without MASTER_ADDR and MASTER_PORT it cannot talk to the other ranks: set both")
    address, port = settings["MASTER_ADDR"], settings["MASTER_PORT"]
    try:
        _within(deadline, lambda: socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError, TimeoutError) as error:
        raise _Unreachable(
            f"MASTER_ADDR {address!r} does not resolve on {socket.gethostname()} ({error}): correct it"
        ) from None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = not agent and settings.get("RANK") == 0
    if not hosts:
        _knock(address, port, deadline, "torchrun's agent" if agent else "rank 0")

    def connect() -> dist.Store:
        patience = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
        return dist.TCPStore(address, port, None, hosts, timeout=patience, wait_for_workers=False, multi_tenant=True)

    try:
        store = _within(deadline, connect)
    except (RuntimeError, TimeoutError) as error:
        if hosts:
            why = f"rank 0 cannot open MASTER_PORT {port} ({_first_line(error)}): another program has it, choose a free one"
        else:
            why = f"at {address}, MASTER_PORT {port}, somebody listens who is no store: another program has that port, choose a free one"
        raise _Unreachable(why) from None
    _hosted.extend([store] if hosts else [])
    return dist.PrefixStore(prefix, store), hosts


def _knock(address: str, port: int, deadline: float, host: str) -> None:
    """Return when somebody listens there. It may take a while until the host has come."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + 0.1 > deadline:
                raise _Unreachable(
                    f"nobody answers at {address}, MASTER_PORT {port} ({error}): {host} should; is it running, is the port "
                    "the same on all ranks, does a firewall stand between?"
                ) from None
        time.sleep(0.1)


def _within(deadline: float, call: Callable[[], Any]) -> Any:
    """`call()`, or TimeoutError. In a thread: neither a name server nor TCPStore's first greeting keeps to a deadline."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = call()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(0.1, deadline - time.monotonic()))
    if thread.is_alive():
        raise TimeoutError("no answer in time")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


# What the ranks tell each other --------------------------------------------------------------------------------------


def _talk(
    store: dist.Store, hosts: bool, fact: Fact, settings: dict[str, Any], given: bool, timeout: float, deadline: float
) -> list[str]:
    """Call the roll, try the group, and tell each other what came out."""
    lines = _meet(store, "roll", fact, deadline - 0.3 * timeout, 0.1 * timeout)
    mine = None
    if not lines:
        try:
            tried = fact | {"problems": _try_group(store, fact, settings, given, deadline - 0.1 * timeout)}
            lines = _meet(store, "group", tried, deadline, 0.1 * timeout)
        finally:
            if not given and dist.is_initialized():
                dist.destroy_process_group()
    mine = store.add("left", 1)
    while hosts and mine < (fact["world size"] or 1) and time.monotonic() < deadline:
        time.sleep(0.02)  # who hosts the store goes last
        mine = store.add("left", 0)
    return lines


def _meet(store: dist.Store, stage: str, fact: Fact, deadline: float, grace: float) -> list[str]:
    """Everybody shows a fact; whoever has seen enough first writes the verdict, and all the others take that one.

    Enough is: as many as the world is large, or the deadline, or a problem and `grace` seconds for others to show theirs.
    """
    began = time.monotonic()
    number = store.add(f"{stage}/count", 1)
    store.set(f"{stage}/{number}", json.dumps(fact))
    facts: dict[int, Fact] = {}
    while not store.check([f"{stage}/verdict"]):
        for other in range(1, store.add(f"{stage}/count", 0) + 1):
            if other not in facts and store.check([f"{stage}/{other}"]):
                facts[other] = json.loads(store.get(f"{stage}/{other}"))
        shown = list(facts.values())
        late = time.monotonic() > deadline
        hasty = any(one["problems"] for one in shown) and time.monotonic() - began > grace
        if late or hasty or len(shown) >= _world_size(shown, len(shown) + 1):
            verdict = {"numbers": sorted(facts), "lines": _judge(shown, hasty and not late)}
            store.compare_set(f"{stage}/verdict", "", json.dumps(verdict))
        time.sleep(0.01)
    verdict = json.loads(store.get(f"{stage}/verdict"))
    if number in verdict["numbers"]:
        return list(verdict["lines"])
    return [
        *verdict["lines"],
        f"{_name(fact)} came when the others had concluded: was it late, is WORLD_SIZE too small elsewhere?",
    ]


def _world_size(facts: list[Fact], unknown: int) -> int:
    """What most say, the larger where two are equally frequent."""
    sizes = Counter(one["world size"] for one in facts if one["world size"])
    return max(sizes, key=lambda size: (sizes[size], size), default=unknown)


def _judge(facts: list[Fact], hasty: bool) -> list[str]:
    """What is wrong, seen from all facts together; the same on whatever rank it is computed."""
    facts = sorted(facts, key=_name)
    lines = []
    for problem in dict.fromkeys(problem for one in facts for problem in one["problems"]):
        lines.append(f"{', '.join(_name(one) for one in facts if problem in one['problems'])}: {problem}")
    for rank, count in Counter(one["rank"] for one in facts if one["rank"] is not None).items():
        if count > 1:
            who = " and ".join(one["process"] for one in facts if one["rank"] == rank)
            lines.append(f"RANK {rank} was given to {count} processes ({who}): each needs its own")
    for key, what in (("world size", "WORLD_SIZE"), ("torch", "torch's version"), ("backend", "the backend")):
        said: dict[Any, list[str]] = {}
        for one in facts:
            if one[key] is not None:
                said.setdefault(one[key], []).append(_name(one))
        if len(said) > 1:
            who = "; ".join(f"{value} on {', '.join(names)}" for value, names in said.items())
            lines.append(f"{what} is not the same everywhere ({who}): make it so")
    missing = sorted(set(range(_world_size(facts, 0))) - {one["rank"] for one in facts})
    if missing and not hasty:
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        lines.append(
            f"{who} not arrived in time: look at the log and the node, and whether it was started with that RANK"
        )
    return lines


def _try_group(store: dist.Store, fact: Fact, settings: dict[str, Any], given: bool, deadline: float) -> list[str]:
    """Form the group, meet in it, compute something in it."""
    patience = datetime.timedelta(seconds=max(0.5, deadline - time.monotonic()))
    rank, world_size, backend = fact["rank"], fact["world size"], fact["backend"]
    doing = "the process group did not form"
    try:
        if not given:
            # Keys of its own again: what these ranks leave in the store is in nobody's way later.
            place = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=place, rank=rank, world_size=world_size, timeout=patience)
        doing = "monitored_barrier did not pass"
        beside = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=patience)
        dist.monitored_barrier(beside, timeout=patience, wait_all_ranks=True)
        doing = "all_reduce failed"
        device = f"cuda:{settings.get('LOCAL_RANK', 0)}" if "nccl" in backend else "cpu"
        total = torch.tensor([settings.get("RANK", rank)], dtype=torch.int64, device=device)
        dist.all_reduce(total)
        if beside is not None:
            dist.destroy_process_group(beside)
    except Exception as error:
        return [
            f"{doing} ({_first_line(error)}): the ranks reach the store, but not each other; look at firewalls and interfaces"
        ]
    wanted = world_size * (world_size - 1) // 2
    if int(total) != wanted:
        return [
            f"all_reduce of all RANKs gave {int(total)} instead of {wanted}: no result of this job could be trusted"
        ]
    return []


def _name(fact: Fact) -> str:
    return f"rank {fact['rank']}" if fact["rank"] is not None else f"a process without a rank ({fact['process']})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


# --- end ---
if __name__ == "__main__":
    problems = preflight()
    rank = os.environ.get("RANK", "?")
    for line in problems:
        print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
    if not problems and rank == "0":
        print(f"preflight: all is well on {os.environ['WORLD_SIZE']} ranks", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    os._exit(1 if problems else 0)

# lockstep-canary: 487e3e62f61c25fc
