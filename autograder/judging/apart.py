"""How a run is read whose ranks did not call the same collectives."""

from __future__ import annotations

from lockstep.grading import Diagnosis, Frame, Grader, Run, ending, evidence


def read_apart(grader: Grader, run: Run, id: str, said: str, at: Frame | str) -> Diagnosis | None:
    """The diagnosis if the ranks hang, call different things, or one is killed in a collective: gloo ends a process to
    which another size is sent. `said` is a sentence of what the ranks had. None for any other end.
    """
    cause = run.cause
    if cause is None or not (cause.kind in ("hang", "mismatch") or (cause.kind == "crashed" and any(run.collectives))):
        return None
    return grader.diagnosis(id, f"{said}{ending(cause)}", evidence=evidence(run), of=cause.ranks, at=at)
