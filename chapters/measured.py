"""What a step sent, beside what you predicted; and what a rank did, in order."""

from collections.abc import Sequence

from lockstep.notebook.checking import is_compared
from lockstep.notebook.timeline import timeline
from lockstep.ranks import Mark, Run

ASKED = """You have not predicted yet: replace each None above,
run that cell, and then this one again.
(0 for each shows the numbers too.)"""  # short lines: in a narrow window JupyterLab breaks longer ones within words
NAMES = ("all-reduces", "bytes in total", "launched before the last gradient was ready")


def measured(run: Run | None, predicted: Sequence[int | None]) -> None:
    """Print what rank 0 sent in its last step, and the prediction before it. Without one, a learner is asked for it.

    `run` is None as long as what it runs is not written.
    """
    if run is None:
        print("Nothing is measured yet. Write it, run the cell above, then this one.")
        return
    if None in predicted and not is_compared():
        print(ASKED)
        return
    sent = timeline(run, step=-1).panels[0].steps[0][0].buckets
    numbers = len(sent), sum(one.nbytes for one in sent), sum(one.early for one in sent)
    print(" predicted     measured")
    for guess, number, name in zip(predicted, numbers, NAMES, strict=True):
        print(f"{'–' if guess is None else f'{guess:,}':>10}   {number:>10,}   {name}")


def story(run: Run, rank: int = 0, first: int | None = None, last: int = 0) -> None:
    """Print what a rank did, in order: its marks and, indented, its communication. `first`: only so many lines, and
    then the `last` ones."""
    report = run.ranks[rank]
    events = sorted([*report.collectives, *report.marks], key=lambda event: event.number)
    lines = [event.name if isinstance(event, Mark) else f"    {event.kind}: {event.nbytes} bytes" for event in events]
    if first is not None:
        lines = [*lines[:first], *(["…", *lines[-last:]] if last else [])]
    print(*lines, sep="\n")
