"""What the chapters' tables of measured numbers say beside a prediction."""

from __future__ import annotations

import pytest
from support import ROOT

from lockstep import ranks


def test_numbers_are_readable_and_a_missing_prediction_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "chapters")
    from measured import measured  # type: ignore[import-not-found]

    body = (
        'import torch, torch.distributed as dist\nfrom lockstep.ranks import mark\ndist.init_process_group("gloo")\n'
        'mark("forward")\ndist.all_reduce(torch.ones(1 << 20))\nmark("end")'
    )
    run = ranks.run(ranks.Source(body), 2, timeline=True)
    monkeypatch.delenv("LOCKSTEP_SUBMISSION", raising=False)
    measured(run, [1, 2500000, None])
    said = capsys.readouterr().out
    assert "replace each None above" in said and "4,194,304" not in said, "no answer before there is a prediction"
    measured(run, [1, 2500000, 0])
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [["1", "1"], ["2,500,000", "4,194,304"], ["0", "0"]]
    monkeypatch.setenv("LOCKSTEP_SUBMISSION", str(ROOT / "solutions"))  # as a chapter is built: its readers see them
    measured(run, [None, None, None])
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [["–", "1"], ["–", "4,194,304"], ["–", "0"]]
