"""`%%ranks N`: run a cell's code on N real ranks.

The kernel itself is never forked: the ranks come from the warm process of `lockstep.ranks`. The same text runs under
torchrun; `--save FILE` writes it to a file and prints the command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from .. import cluster, ranks
from ..ranks import Kind, Run, text
from .cards import mixed_card, run_card, unwritten_card

HOLD_BACK_SECONDS = 0.5
ANYTHING = "anything"  # The answer to a prediction isn't told by the question
EXPECTATIONS = (*(kind.value.replace(" ", "-") for kind in Kind if kind is not Kind.NODE_LOST), ANYTHING)


class RanksFailed(Exception):
    """The run did not end as the cell expected. The explanation has been printed already."""

    def _render_traceback_(self) -> list[str]:
        return [f"RanksFailed: {self}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"%%ranks: {message}. Example: %%ranks 4 --save sum.py")

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        raise UsageError(message or "")


def parser() -> argparse.ArgumentParser:
    """What the first line of a `%%ranks` cell may say."""
    options = _Parser(prog="%%ranks", description="Run this cell on N ranks.", add_help=False)
    options.add_argument("ranks", type=int, nargs="?", default=2, help="how many ranks")
    options.add_argument("--save", metavar="FILE", help="also write the cell to FILE, for torchrun")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the ranks may see")
    options.add_argument(
        "--nodes", type=int, default=1, help="spread the ranks over so many nodes; hosts of their own where possible"
    )
    options.add_argument("--hosts", action="store_true", help="do not run without hosts of their own for the nodes")
    options.add_argument("--bandwidth", metavar="RATE", help="let the ranks share a link this slow, such as 1gbit")
    options.add_argument("--timeout", type=float, default=60.0, help="end a run that takes longer, in seconds")
    options.add_argument("--into", metavar="NAME", help="keep the run's result in this variable; None: nothing ran")
    options.add_argument(
        "--expect",
        choices=EXPECTATIONS,
        help=f"this cell is meant to end so; {ANYTHING}: however it ends, it is no error",
    )
    options.add_argument("--timeline", action="store_true", help="record the end of each collective too")
    options.add_argument(
        "--watch-replicas", action="store_true", help="compare the ranks' models after every optimizer step"
    )
    options.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="set a variable on the ranks")
    options.add_argument("--quiet", action="store_true", help="do not show what the ranks print")
    return options


def _network(options: argparse.Namespace) -> ranks.Function | None:
    """The network of the cell's ranks. Raises ValueError for a malformed bandwidth."""
    wanted = options.hosts or (options.nodes > 1 and options.bandwidth)
    if wanted or (options.nodes > 1 and options.device == "cpu" and cluster.available("hosts") is None):
        return cluster.own_hosts(options.bandwidth)
    return cluster.slow_link(options.bandwidth) if options.bandwidth else None


class Output:
    """Shows what the ranks print, each line with its rank.

    A short run is shown rank by rank when it ends, so that running a cell twice looks the same. A longer one is shown
    as it runs, unless LOCKSTEP_ORDERED is set or a test compares outputs.
    """

    def __init__(self, world_size: int) -> None:
        self.began: float | None = None
        self.ordered = bool(os.environ.get("LOCKSTEP_ORDERED") or os.environ.get("PYTEST_CURRENT_TEST"))
        self.unfinished: dict[tuple[int, str], str] = {}  # The last line of a rank's stream, until its end comes
        self.held: list[list[str]] = [[] for _ in range(world_size)]

    def take(self, rank: int, stream: str, chunk: str) -> None:
        *lines, self.unfinished[rank, stream] = (self.unfinished.get((rank, stream), "") + chunk).split("\n")
        self.held[rank] += lines
        self.began = self.began or time.monotonic()
        if not self.ordered and time.monotonic() - self.began > HOLD_BACK_SECONDS:
            self.show()

    def show(self) -> None:
        """Print what is held back, rank by rank."""
        for rank, lines in enumerate(self.held):
            for line in lines:
                print(f"[rank {rank}] {line}")
            lines.clear()
        sys.stdout.flush()

    def close(self) -> None:
        """Print everything that is left, including unfinished lines."""
        for (rank, _), rest in sorted(self.unfinished.items()):
            self.held[rank] += [rest] if rest else []
        self.show()


@magics_class
class RanksMagic(Magics):
    @cell_magic("ranks")  # type: ignore[arg-type]
    def ranks(self, line: str, cell: str) -> None:
        """Run this cell on N ranks: `%%ranks 4`."""
        try:
            options = parser().parse_args(shlex.split(line))
        except ValueError as error:
            raise UsageError(f"%%ranks: {error}") from None
        if options.save:
            self._save(cell, options)
        output = Output(options.ranks if options.ranks > 0 else 0)
        environment = dict(os.environ) | dict(pair.partition("=")[::2] for pair in options.env)
        try:
            result = ranks.run(
                ranks.Source("\n" + cell),  # so that lines count as in the editor, from the magic on
                options.ranks,
                device=options.device,
                nodes=options.nodes,
                network=_network(options),
                deadline=options.timeout,
                timeline=options.timeline,
                watch_replicas=options.watch_replicas,
                environment=environment,
                on_output=None if options.quiet else output.take,
            )
        except ValueError as error:
            raise UsageError(f"%%ranks: {error}") from None
        except ranks.NotRun as missing:
            print(f"not run: {missing}")
            self._keep(options.into, None)
            return
        except ranks.RanksError as error:
            raise RanksFailed(f"{error}. ./lockstep doctor looks at this machine.") from None
        output.close()
        stub = unwritten_card(result)
        if stub is not None:
            display(stub)
            self._keep(options.into, None)
            return
        self._keep(options.into, result)
        if options.watch_replicas:
            print(text.replicas(result))
        self._conclude(result, (options.expect or "").replace("-", " "))

    def _keep(self, name: str | None, result: Run | None) -> None:
        """Put the run's result into the reader's variable; None means not run, or only to a stub's first line."""
        if name and self.shell is not None:
            self.shell.user_ns[name] = result

    def _save(self, cell: str, options: argparse.Namespace) -> None:
        Path(options.save).write_text(cell, encoding="utf-8")
        print(f"Saved. The same ranks from a terminal: torchrun --nproc-per-node={options.ranks} {options.save}")

    def _conclude(self, result: Run, expected: str) -> None:
        if result.cause is not None:
            display(run_card(result))
        elif (mixed := mixed_card(result)) is not None:
            display(mixed)
        if expected == ANYTHING:
            return
        kind = result.cause.kind.value if result.cause else ""
        if expected and kind != expected:
            raise RanksFailed(f"expected {expected}, and the run {'ended as: ' + kind if kind else 'ended well'}")
        if kind and not expected:
            raise RanksFailed("the card above says why.")
