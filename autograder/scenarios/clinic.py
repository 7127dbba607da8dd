"""The clinic's one scenario: run a case's `main()` on every rank and report what it returned and how it went about it."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.grading.on_rank import observe

timeouts: list[float] = []
wrapped: list[dict[str, Any]] = []
samples: list[list[int]] = []
linear_calls: list[bool] = []
started: list[dist.Work] = []
ended: set[int] = set()
LAUNCHERS = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
OPTIONS = ("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_cap_mb")


def before() -> None:
    """Note where the launcher says to meet; from the first import on note timeouts, DDP's options, the samples read, and
    the sends and receives that are started and never waited for.
    """
    observe("launchers_address", LAUNCHERS)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _noting_timeout(getattr(dist, name)))
        setattr(sys.modules["torch.distributed.distributed_c10d"], name, getattr(dist, name))
    construct = DistributedDataParallel.__init__

    def constructed(self: Any, *args: Any, **options: Any) -> None:
        wrapped.append({key: options[key] for key in OPTIONS if key in options})
        construct(self, *args, **options)

    DistributedDataParallel.__init__ = constructed  # type: ignore[method-assign]
    _note_works()
    import clinic_data

    read = clinic_data.Records.__getitem__

    def noted(self: Any, index: int) -> Any:
        samples.append([int(self.seed), int(index)])
        return read(self, index)

    clinic_data.Records.__getitem__ = noted
    if "CLINIC_ODD" in os.environ:
        _let_odd_host_say(clinic_data, json.loads(os.environ["CLINIC_ODD"]))


def _let_odd_host_say(clinic_data: ModuleType, odd: dict[str, Any]) -> None:
    """Whatever the job says, the odd host's settings differ from the others' by `odd`."""
    ask = clinic_data.settings

    def settings(case: str, rank: int, world_size: int, usual: Any, odd_in_file: Any = None, **_: Any) -> Any:
        return ask(case, rank, world_size, usual, odd)

    clinic_data.settings = settings


class Unordered(set[Any]):
    """A set of texts has one order on all ranks here, or, as each process has its own, another on each second rank."""

    own = False

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        if any(isinstance(item, str) for item in items):
            items.sort(key=repr, reverse=self.own and int(os.environ["RANK"]) % 2 == 1)
        return iter(items)


for name in ("copy", "union", "intersection", "difference", "__or__", "__and__", "__sub__", "__xor__"):

    def _unordered(self: Unordered, *others: Any, name: str = name) -> Any:
        return Unordered(getattr(set, name)(self, *others))

    setattr(Unordered, name, _unordered)


class _Sets(ast.NodeTransformer):
    """`{a, b}` and `{a for …}` become calls of `set`."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return self._call(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        return self._call(node)

    def _call(self, node: ast.Set | ast.SetComp) -> ast.expr:
        inner = self.generic_visit(node)
        return ast.copy_location(ast.Call(ast.Name("set", ast.Load()), [inner], []), node)  # type: ignore[list-item]


def _more_records(times: int) -> None:
    """Every set of records is so many times as long."""
    import clinic_data

    construct = clinic_data.Records.__init__

    def constructed(self: Any, count: int, *args: Any, **options: Any) -> None:
        construct(self, count * times, *args, **options)

    clinic_data.Records.__init__ = constructed


def _order_sets(module: ModuleType, own: bool) -> None:
    """If the job makes sets, import it again, with `Unordered` for them."""
    file = str(module.__file__)
    with open(file, encoding="utf-8") as source:
        tree = _Sets().visit(ast.parse(source.read()))
    if not any(isinstance(node, ast.Name) and node.id == "set" for node in ast.walk(tree)):
        return
    ast.fix_missing_locations(tree)
    Unordered.own = own
    vars(module)["set"] = Unordered
    exec(compile(tree, file, "exec", dont_inherit=True), vars(module))


class SlowFile(io.BufferedWriter):
    """A file on a slow disk: whoever writes it out has to wait."""

    delay, job = 1.5, ""

    def flush(self) -> None:
        if self.delay and not self.closed:
            if sys._getframe(1).f_globals.get("__name__") == self.job:
                observe("writes_out", True)
            time.sleep(self.delay)
            self.delay = 0.0
        super().flush()


def _slow_open(path: Any, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
    if mode != "wb" or buffering == 0:
        return open(path, mode, buffering, **more)
    return SlowFile(io.FileIO(path, "w"), buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)


def _note_works() -> None:
    """Keep each work of `isend` and `irecv`, and note which of them are waited for, or asked for until they are done."""

    def noting(original: Any) -> Any:
        @functools.wraps(original)
        def noted(*args: Any, **options: Any) -> Any:
            work = original(*args, **options)
            if work is not None:
                started.append(work)
            return work

        return noted

    def awaiting(original: Any) -> Any:
        def awaited(self: dist.Work, *args: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("lockstep."):
                ended.add(id(self))
            return original(self, *args)

        return awaited

    for name in ("isend", "irecv"):
        setattr(dist, name, noting(getattr(dist, name)))
        setattr(sys.modules["torch.distributed.distributed_c10d"], name, getattr(dist, name))
    for name in ("wait", "is_completed"):
        setattr(dist.Work, name, awaiting(getattr(dist.Work, name)))


def _noting_timeout(original: Any) -> Any:
    def noted(*args: Any, **options: Any) -> Any:
        timeout = options.get("timeout")
        if timeout is not None:
            timeouts.append(timeout.total_seconds())
            observe("timeouts", timeouts)
        if original.__name__ == "init_process_group":
            observe("init_method", options.get("init_method", args[1] if len(args) > 1 else None))
        result = original(*args, **options)
        observe("meeting", _meeting())
        observe("group_size", dist.get_world_size())
        return result

    return noted


def _meeting() -> str:
    """Where the ranks have met: host:port of the group's store, or the kind of store that it is."""
    store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else type(store).__name__


def _count_linear(layer: torch.nn.Module, *_: Any) -> None:
    linear_calls.append(isinstance(layer, torch.nn.Linear))


def treat(
    module: ModuleType,
    count_linear: bool = False,
    evaluate: bool = False,
    own_orders: bool = False,
    one_word: bool = False,
    slow_disk: bool = False,
    times: int = 1,
) -> None:
    """Run the job. Its result is a dictionary; models in it are reported as their state.

    `count_linear` counts the forwards of linear layers, those that a backward pass repeats included. With `evaluate`
    the returned model then scores records that no case trains on. Ranks go through sets of texts in one order, with
    `own_orders` each second one in another. With `one_word` each rank's `words` are one. With `slow_disk` it takes a
    while until what was gathered is on the disk. Sets of records are `times` as long.
    """
    _order_sets(module, own_orders)
    if one_word:
        vars(module)["words"] = lambda rank: [f"word{rank}"]
    if times > 1:
        _more_records(times)
    if slow_disk:
        SlowFile.job, vars(module)["open"] = module.__name__, _slow_open
    if count_linear:
        torch.nn.modules.module.register_module_forward_hook(_count_linear)
    try:
        result = module.main()
    finally:
        observe("timeouts", timeouts)
        observe("wrapped", wrapped)
        observe("samples", samples)
        observe("linear_calls", sum(linear_calls))
        observe("never_waited", sum(id(work) not in ended for work in started))
    if hasattr(module, "found_on_disk"):
        observe("on_disk", _on_disk(module))
    given = result if isinstance(result, dict) else {}
    observe(
        "returned_wrapped", [str(key) for key, value in given.items() if isinstance(value, DistributedDataParallel)]
    )
    if evaluate:
        observe("scores", _scores(given.get("model")))
    observe("result", {str(key): _plain(value) for key, value in result.items()} if isinstance(result, dict) else None)


def _on_disk(module: ModuleType) -> bool:
    """Whether the job, where it looks on a disk for weights, finds some on this rank's."""
    try:
        return module.found_on_disk(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) is not None
    except Exception:  # a function that communicates
        return False


def _scores(model: Any) -> torch.Tensor | None:
    """What the model says in evaluation mode; None where it can't be called with features alone."""
    import clinic_data

    try:
        with torch.no_grad():
            return model.eval()(clinic_data.Records(16, seed=1).features).detach().clone()
    except Exception:  # whatever the model wants
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return {name: tensor.detach().clone() for name, tensor in value.state_dict().items()}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value
