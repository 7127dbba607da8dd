"""What Lockstep itself says of the clinic's broken jobs: cause, rank and line in the first line, or the first step that drifts.

Each case says in `autograder/clinic/cases.toml` what a run of it shows. Those that show `nothing` are beyond a look from
outside (a metric of one rank is a number like another); they count as not explained. The share is printed at the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from clinic.case import Case, cases

from lockstep import ranks
from lockstep.course.stubs import make_stub
from lockstep.ranks import text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
TICKETS = (1, 4)
LOUD = ("hang", "raised", "crashed", "mismatch", "exited")
explained: dict[str, bool] = {}


@pytest.fixture(scope="module", autouse=True)
def share() -> Iterator[None]:
    """Print how many of the cases that ran were explained."""
    yield
    silent = [name for name, was in explained.items() if not was]
    print(
        f"\nclinic: {len(explained) - len(silent)} of {len(explained)} cases explained by lockstep run; not: {', '.join(silent)}"
    )


@pytest.mark.parametrize("case", cases().values(), ids=lambda case: case.name)
def test_case_is_explained(case: Case, tmp_path: Path) -> None:
    solution = ROOT / "solutions" / "clinic" / f"{case.name}.py"
    broken = tmp_path / f"{case.name}.py"
    broken.write_text(make_stub(solution.read_text(encoding="utf-8"), case.name), encoding="utf-8")
    (tmp_path / "clinic_data.py").write_bytes(
        (ROOT / "autograder" / "clinic" / "support" / "clinic_data.py").read_bytes()
    )
    explained[case.name] = case.shows != "nothing"
    for ticket in TICKETS:
        run = ranks.run(
            ranks.Script(broken), case.ranks, directory=tmp_path, watch_replicas=True,
            environment=dict(os.environ) | {"CLINIC_TICKET": str(ticket)},
        )  # fmt: skip
        said = text.headline(run) if run.cause else text.replicas(run).replace("\n", " ")
        told = f"ticket {ticket}: {said}"
        guilty = case.rank(ticket)
        if case.shows in LOUD:
            assert run.cause is not None and run.cause.kind == case.shows, told
            assert re.search(rf"\bat {case.name}\.py:\d+", said), f"no line: {told}"
            if isinstance(guilty, int):
                # "rank 3", one of "ranks 0, 2 and 3", or the file of rank 3 by its name.
                named = re.search(rf"(?<![\d.:]){guilty}(?!\d)", said.partition(":")[2])
                assert named, f"not the guilty rank {guilty}: {told}"
            continue
        assert run.cause is None, text.describe(run)
        drift = run.replicas.drift if run.replicas else None
        if case.shows == "drift":
            assert drift is not None and f"({case.name}.py:" in said and drift.tensor in said, told
            if isinstance(guilty, int):
                assert drift.ranks == (guilty,) or re.search(rf"\brank {guilty}\b", drift.reason), told
        elif case.shows == "same-data":
            assert drift is None and said.startswith("SAME WORK"), told
        else:
            assert case.shows == "nothing" and drift is None and said.startswith(("Replicas: equal", "No optimizer")), (
                told
            )
