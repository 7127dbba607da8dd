"""The chapters' still pictures, drawn from what they are about: a sampler's indices, two replicas' weights, torn files.

    python -m lockstep.authoring.pictures chapters/pictures

They take their colors from the system, light or dark, and have their own ground, so they read in print as well.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ..course import all_reduce as reducing

WIDTH = 700
PHONE = 366  # as wide as a phone's page: shown as large as drawn
LIGHT = (
    "text { font: 13px sans-serif; fill: #1b1f24 } .n { text-anchor: middle } .e { text-anchor: end }"
    " .b { font-weight: 600 } .q { fill: #57606a } .bg { fill: #fff } .no { fill: #eef1f4 } .r0 { fill: #d6e6f8 }"
    " .r1 { fill: #fbe3b5 } .r2 { fill: #e4d9f5 } .r3 { fill: #cfe9e4 } .good { fill: #bfe6c8 } .bad { fill: #f6cfca }"
    " .wait { fill: #fcebe9 } .l { fill: none; stroke: #57606a; stroke-width: 1.5 } .dash { stroke-dasharray: 4 3 }"
    " .red { stroke: #b42318 } .c0 { fill: none; stroke: #0b62c4; stroke-width: 2.5 }"
    " .c1 { fill: none; stroke: #b26a00; stroke-width: 2.5 } .h { fill: #57606a } .says { fill: #b42318 }"
)
DARK = (
    "text { fill: #e6edf3 } .q { fill: #9da7b1 } .bg { fill: #111417 } .no { fill: #2b3036 } .r0 { fill: #24507d }"
    " .r1 { fill: #6b4e0f } .r2 { fill: #4a3a78 } .r3 { fill: #1d5552 } .good { fill: #1d5b30 } .bad { fill: #7a2b25 }"
    " .wait { fill: #3a1d1b } .l { stroke: #9da7b1 } .red { stroke: #ff8d82 } .c0 { stroke: #6cb6ff }"
    " .c1 { stroke: #e0a13a } .h { fill: #9da7b1 } .says { fill: #ff8d82 }"
)


class Drawing:
    """An SVG picture, from left to right and top to bottom."""

    def __init__(self, height: int, label: str, width: int = WIDTH) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(label)}">',
            f"<style>{LIGHT} @media screen and (prefers-color-scheme: dark) {{ {DARK} }}</style>",
            '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            '<path class="h" d="M0 0L9 4L0 8z"/></marker></defs>',
            f'<rect class="bg" width="{width}" height="{height}"/>',
        ]

    def text(self, x: float, y: float, said: object, kind: str = "") -> None:
        """A line of text, from x on, or around it with the kind `n`."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(str(said))}</text>')

    def box(self, x: float, y: float, width: float, kind: str, said: object = "", height: float = 26) -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        if said != "":
            self.text(x + width / 2, y + height / 2 + 5, said, "n")

    def line(self, path: str, kind: str = "l", arrow: bool = False) -> None:
        self.parts.append(
            f'<path class="{kind}" d="{path}"{" marker-end=" + chr(34) + "url(#tip)" + chr(34) if arrow else ""}/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


# Chapter 1 ------------------------------------------------------------------------------------------------------------


def all_reduce(ranks: int = 4, length: int = 8) -> str:
    """All steps of the ring side by side: what each rank holds, and what has just arrived."""
    schedule = reducing.ring(ranks)
    values = reducing.states(schedule, reducing.brought(ranks, length))
    held = reducing.states(schedule, [[1] * ranks for _ in range(ranks)])  # how many ranks' numbers each chunk holds
    ends = reducing.bounds(length, ranks)
    cell, row, columns = 24, 28, 4
    wide, high = length * cell + 44, ranks * row + 46
    bottom = -(-len(values) // columns) * high + 62
    label = f"Ring all-reduce of {length} numbers among {ranks} ranks, step by step"
    drawing = Drawing(bottom, label, columns * (wide + 14) + 14)
    for index, state in enumerate(values):
        left, top = 14 + index % columns * (wide + 14), 8 + index // columns * high
        moves = schedule.steps[index - 1].moves if index else ()
        title = f"{index}: {schedule.steps[index - 1].phase}" if index else "what each rank brought"
        drawing.text(left, top + 16, title, "b")
        for rank in range(ranks):
            y = top + 24 + rank * row
            drawing.text(left, y + 17, f"rank {rank}", "q")
            for chunk, (start, end) in enumerate(pairwise(ends)):
                x, width = left + 46 + start * cell, (end - start) * cell - 3
                count = held[index][rank][chunk]
                drawing.box(x, y, width, "no" if count == 1 else "good" if count == ranks else "r1", height=row - 5)
                if any((move.receiver, move.chunk) == (rank, chunk) for move in moves):
                    drawing.line(f"M{x} {y}h{width}v{row - 5}h-{width}z", "c0")
                for place in range(start, end):
                    drawing.text(x + (place - start + 0.5) * cell - 1, y + 16, state[rank][place], "n")
    total, whole = reducing.bytes_sent(schedule, length)[0], length * reducing.NUMBER_BYTES
    line = f"Grey: what the rank brought. Yellow: a partial sum. Green: the sum over all {ranks}."
    cost = f"{len(schedule.steps)} steps. Each rank sends {total} bytes, {total / whole:g} times its tensor of {whole}."
    everybody = reducing.bytes_sent(reducing.naive(ranks), length)[0]
    drawing.text(14, bottom - 30, f"{line} Framed: arrived in this step.")
    drawing.text(14, bottom - 10, f"{cost} If everybody sent everything to everybody: {everybody} bytes.")
    return drawing.svg()


# Chapter 2 ------------------------------------------------------------------------------------------------------------


def dealt(samples: int, ranks: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """The indices that PyTorch's sampler gives each rank."""
    from torch.utils.data import DistributedSampler

    data: Any = range(samples)
    samplers: list[Any] = [DistributedSampler(data, ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def deal() -> str:
    """Ten samples for four ranks: like cards, one round after the other."""
    drawing = Drawing(228, "Ten samples dealt to four ranks; two of them are dealt twice, or two are left out")
    for left, title, options in (
        (14, "Padded: samples 0 and 1 come twice", {}),
        (364, "drop_last=True: 8 and 9 are left out", {"drop_last": True}),
    ):
        drawing.text(left, 24, title, "b")
        hands = dealt(10, 4, shuffle=False, **options)
        once = set()
        for turn in range(len(hands[0])):
            drawing.text(left + 90 + 74 * turn, 52, f"round {turn + 1}", "q n")
            for rank, hand in enumerate(hands):
                again, y = hand[turn] in once, 62 + 36 * rank
                drawing.box(left + 62 + 74 * turn, y, 56, f"r{rank}" + (" l dash" if again else ""), hand[turn])
                once.add(hand[turn])
        for rank in range(4):
            drawing.text(left, 80 + 36 * rank, f"rank {rank}", "q")
    drawing.text(
        14, 220, "Dashed: a sample that another rank has as well. All ranks take the same number of steps.", "q"
    )
    return drawing.svg()


def set_epoch() -> str:
    """Three epochs with and without the call: which of eight samples each of two ranks gets, in order."""
    drawing = Drawing(
        206, "With set_epoch(epoch) each epoch has its own order; without it all epochs have the first one's"
    )
    for left, title, of in (
        (84, "set_epoch(epoch)", int),
        (394, "without: every epoch counts as epoch 0", lambda _: 0),
    ):
        drawing.text(left, 24, title, "b")
        for epoch in range(3):
            for rank, hand in enumerate(dealt(8, 2, of(epoch))):
                for place, sample in enumerate(hand):
                    drawing.box(left + 147 * rank + 34 * place, 58 + 40 * epoch, 31, f"r{rank}", sample)
        for rank in range(2):
            drawing.text(left + 147 * rank, 48, f"rank {rank}", "q")
    for epoch in range(3):
        drawing.text(14, 76 + 40 * epoch, f"epoch {epoch}", "q")
    drawing.text(
        14, 196, "Numbers are samples. Left: a new order in each epoch. Right: the same batches again and again.", "q"
    )
    return drawing.svg()


# Chapter 3 ------------------------------------------------------------------------------------------------------------


def hang() -> str:
    """One rank takes another branch: two wait in one call, one in another, and nobody moves."""
    drawing = Drawing(216, "Ranks 0 and 1 wait in all_reduce for rank 2, which waits in barrier for them", PHONE)
    drawing.text(138, 22, "if best > 0.8", "b n")
    drawing.line("M138 30V148", "l dash")
    for rank, (best, call, whom) in enumerate(
        (("0.7", "all_reduce", "rank 2"), ("0.7", "all_reduce", "rank 2"), ("0.9", "barrier", "0 and 1"))
    ):
        y = 38 + 38 * rank
        drawing.text(8, y + 18, f"rank {rank}", "q")
        drawing.box(54, y, 76, "no", f"best = {best}")
        drawing.box(146, y, 212, "r1" if call == "barrier" else "r0", f"in {call}: waits for {whom}")
    drawing.line("M54 162H358", arrow=True)
    drawing.text(54, 184, "time: no rank prints anything until")
    drawing.text(54, 202, "the timeout, 30 minutes with gloo")
    return drawing.svg()


def replicas(steps: int = 10, changed: int = 4) -> tuple[list[float], list[float]]:
    """A weight on two ranks, whose gradients are averaged in each step; from one step on rank 1 has its own rate."""
    weights, history = [2.0, 2.0], ([2.0], [2.0])
    for step in range(steps):
        gradient = sum(0.2 * (weight - target) for weight, target in zip(weights, (0.0, 1.0), strict=True)) / 2
        for rank in (0, 1):
            weights[rank] -= (1.0 if rank == 0 or step < changed else 2.0) * gradient
            history[rank].append(weights[rank])
    return history


def drift() -> str:
    """The same weight on two ranks, step by step: equal, until one rank's learning rate is another."""
    ours, changed = replicas(), 4
    drawing = Drawing(
        250, "A weight on two ranks: equal for four steps, then rank 1's drifts away from rank 0's", PHONE
    )
    x, y = (lambda step: 20 + 25 * step), (lambda weight: 200 - 160 * (weight - 0.4) / 1.6)
    drawing.line("M20 34V208H272")
    drawing.line(f"M{x(changed)} 74V208", "l dash red")
    drawing.text(x(changed) + 8, 44, "rank 1: twice the learning rate,", "says")
    drawing.text(x(changed) + 8, 62, "with the same averaged gradient", "q")
    for rank in (1, 0):
        path = "L".join(f"{x(step):g} {y(weight):.1f}" for step, weight in enumerate(ours[rank]))
        drawing.line(f"M{path}", f"c{rank}" + (" dash" if rank else ""))
        drawing.text(x(10) + 10, y(ours[rank][-1]) + 5, f"rank {rank}: {ours[rank][-1]:.2f}")
    for step in range(0, 11, 2):
        drawing.text(x(step), 226, step, "n q")
    drawing.text(x(5), 244, "step", "n q")
    drawing.text(8, 24, "a weight", "q")
    drawing.text(x(0) + 6, y(0.62), "equal, bit for bit")
    return drawing.svg()


def uneven() -> str:
    """Five batches on rank 0, three on rank 1: the hang, the three ways out, and what each costs."""
    drawing = Drawing(
        328, "Rank 0 has five batches and rank 1 three: rank 0 waits; padding, dropping and join end that", PHONE
    )
    ways: tuple[tuple[str, str, tuple[tuple[str, str, int], ...], tuple[tuple[str, str, int], ...]], ...] = (
        ("as it is", "hangs in step 4", (("4: waits for rank 1", "bad", 2),), ()),
        ("pad", "5 steps, batches 1 and 2 count twice", (("4", "r0", 1), ("5", "r0", 1)),
         (("1 again", "r1", 1), ("2 again", "r1", 1))),
        ("drop", "3 steps, batches 4 and 5 are not used", (("not used", "l dash", 1), ("not used", "l dash", 1)), ()),
        ("join", "5 steps, other collectives don't match", (("4", "r0", 1), ("5", "r0", 1)),
         (("sends zeros", "no", 2),)),
    )  # fmt: skip
    for number, (name, price, *last) in enumerate(ways):
        y = 8 + 80 * number
        drawing.text(8, y + 14, name, "b")
        drawing.text(64, y + 14, price, "says" if price.startswith("hangs") else "")
        for rank, steps in enumerate(last):
            drawing.text(8, y + 40 + 28 * rank, f"rank {rank}", "q")
            for batch in (1, 2, 3):
                drawing.box(16 + 48 * batch, y + 22 + 28 * rank, 44, f"r{rank}", batch, 24)
            x = 208
            for said, kind, wide in steps:
                drawing.box(x, y + 22 + 28 * rank, 77 * wide - 4, kind, said, 24)
                x += 77 * wide
    return drawing.svg()


# Chapter 4 ------------------------------------------------------------------------------------------------------------


def sent(ready: list[float], takes: float) -> list[tuple[float, float]]:
    """When each bucket is sent, one after the other, each when it is full and the link is free."""
    ends = list(accumulate(ready, lambda end, full: max(end, full) + takes, initial=0.0))[1:]
    return [(end - takes, end) for end in ends]


def exposed() -> str:
    """A step whose four buckets leave at the end, during backward, and over a link that is too slow."""
    drawing = Drawing(
        378, "A step without overlap, with it, and over a slower link: what backward hides, and what it cannot", PHONE
    )
    scale, forward, backward = 25, 2.0, 4.0
    done = forward + backward
    late, early = [done] * 4, [forward + backward * n / 4 for n in (1, 2, 3, 4)]
    ways = [
        ("Without overlap", late, 0.8),
        ("With overlap", early, 0.8),
        ("With overlap, over a link half as fast", early, 1.6),
    ]
    for number, (title, ready, takes) in enumerate(ways):
        y, at = 14 + 104 * number, lambda t: 74 + scale * t
        end = sent(ready, takes)[-1][1]
        drawing.text(74, y + 10, title, "b")
        drawing.text(8, y + 34, "computes", "q")
        drawing.text(8, y + 62, "sends", "q")
        drawing.box(at(0), y + 18, scale * forward - 2, "r0", "forward", 24)
        drawing.box(at(forward), y + 18, scale * backward, "r1", "backward", 24)
        for bucket, (start, stop) in enumerate(sent(ready, takes), 1):
            hidden = max(0.0, min(stop, done) - start)
            if hidden:
                drawing.box(at(start), y + 46, scale * hidden - 1, "good", "", 24)
            if stop > done:
                drawing.box(at(max(start, done)), y + 46, scale * (stop - max(start, done)) - 1, "bad", "", 24)
            drawing.text(at((start + stop) / 2), y + 63, bucket, "n")
        drawing.line(f"M{at(done)} {y + 16}V{y + 72}", "l dash")
        drawing.text(at(0), y + 87, f"{100 * (end / done - 1):.0f} % longer than computing alone", "says")
    for number, said in enumerate(
        ("Green: hidden behind backward.", "Red: exposed, which makes the step longer.", "The numbers are buckets.")
    ):
        drawing.text(8, 333 + 18 * number, said, "q")
    return drawing.svg()


# Chapter 5 ------------------------------------------------------------------------------------------------------------


def torn(way: Callable[[Path, bytes, int], None], instants: int = 10) -> list[str]:
    """Which of two checkpoints can be loaded after the save of the second was killed: at ten instants, and never."""
    import torch

    def checkpoint(step: int) -> bytes:
        buffer = io.BytesIO()
        torch.save({"step": step, "weights": torch.ones(2000)}, buffer)
        return buffer.getvalue()

    found = []
    new = checkpoint(2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "newest.pt"
        for instant in [len(new) * part // instants for part in range(instants)] + [len(new)]:
            file.write_bytes(checkpoint(1))
            way(file, new, instant)
            try:
                found.append(str(torch.load(file)["step"]))
            except Exception:
                found.append("–")
    return found


def in_place(file: Path, new: bytes, written: int) -> None:
    """Opening empties the old file; a kill leaves what was written by then."""
    file.write_bytes(new[:written])


def replace(file: Path, new: bytes, written: int) -> None:
    """The new bytes go beside it, and get its name at the end."""
    beside = file.with_suffix(".tmp")
    beside.write_bytes(new[:written])
    if written == len(new):
        beside.replace(file)


def kill() -> str:
    """What can be loaded after a kill, at each instant of a save."""
    drawing = Drawing(
        232, "A save that is killed: written in place nothing can be loaded, with replace always the old or new"
    )
    for number, (title, what, way) in enumerate(
        (
            ("torch.save(state, name)", "opening the file empties checkpoint 1", in_place),
            ("torch.save under another name, os.replace", "checkpoint 1 keeps its name until 2 is complete", replace),
        )
    ):
        y = 14 + 96 * number
        drawing.text(14, y + 10, title, "b")
        drawing.text(WIDTH - 14, y + 10, what, "q e")
        for place, step in enumerate(torn(way)):
            drawing.box(14 + 61 * place, y + 22, 57, "bad" if step == "–" else "good", step, 34)
    drawing.line("M14 206H686", arrow=True)
    drawing.text(14, 224, "killed when the save begins, and ever later …", "q")
    drawing.text(686, 224, "not killed", "q e")
    drawing.text(14, 192, "In each box: the checkpoint that can be loaded afterwards; “–” is none.", "q")
    return drawing.svg()


def requeue() -> str:
    """From SLURM's signal to the job that goes on: who tells whom."""
    drawing = Drawing(
        282, "SLURM signals the script, the script torchrun, torchrun the ranks; they save, the job is requeued"
    )
    lanes = ("SLURM", "batch script", "torchrun", "ranks")
    for number, name in enumerate(lanes):
        drawing.text(14, 46 + 60 * number, name, "b")
        drawing.line(f"M110 {41 + 60 * number}H690", "l dash")
    for x, lane, width, said, kind in (
        (110, 3, 126, "train", "r0"),
        (116, 0, 118, "60 s are left", "no"),
        (244, 1, 70, "trap", "r1"),
        (322, 2, 70, "passes on", "r1"),
        (400, 3, 66, "agree", "r2"),
        (470, 3, 56, "save", "good"),
        (536, 1, 70, "requeue", "r1"),
        (612, 0, 78, "starts again", "no"),
        (612, 3, 78, "load, go on", "r0"),
    ):
        drawing.box(x, 28 + 60 * lane, width, kind, said)
    for path, said, at, y in (
        ("M236 41H276V85", "SIGUSR1", 284, 70),
        ("M314 101H357V145", "SIGTERM", 365, 130),
        ("M392 161H434V205", "SIGTERM", 442, 190),
        ("M526 221H571V118", "all have exited", 470, 150),
        ("M606 101H650V57", "scontrol requeue", 536, 78),
        ("M651 57V205", "", 0, 0),
    ):
        drawing.line(path, arrow=True)
        if said:
            drawing.text(at, y, said, "q")
    drawing.text(110, 272, "time: the same job number, the next start, the step after the last one saved", "q")
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (all_reduce, deal, set_epoch, hang, drift, uneven, exposed, kill, requeue)
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(sys.argv[1]) / f"{name}.svg").write_text(draw(), encoding="utf-8")
