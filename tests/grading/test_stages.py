"""An exercise in stages: each stage is passed on its own, and the report names the next one."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from support import ROOT

from lockstep.commands.terminal import show_score
from lockstep.course import Course
from lockstep.course.outline import outlines
from lockstep.grading.grade import grade
from lockstep.grading.request import GradeRequest
from lockstep.grading.text import exercise_text
from lockstep.grading.verdict import CheckOutcome, CheckResult, ExerciseResult, Report
from lockstep.notebook.cards import report_card

COURSE = Course(ROOT)
CHECKS = (ROOT / "autograder/test_mini_ddp.py").read_text(encoding="utf-8")

# mini_ddp as the chapter builds it: each stage is a subclass that adds what its paragraph asks for.
STAGES = (
    '''
    def __init__(self, module, bucket_cap_mb=25):
        nn.Module.__init__(self)
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.set_up(bucket_cap_mb)

    def set_up(self, bucket_cap_mb):
        pass

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)
''',
    '''
    def finish_gradient_synchronization(self):
        for p in self.trainable:
            p.grad *= 1 / dist.get_world_size()
            dist.all_reduce(p.grad)
''',
    '''
    def set_up(self, bucket_cap_mb):
        for p in self.trainable:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        p.grad *= 1 / dist.get_world_size()
        dist.all_reduce(p.grad)

    def finish_gradient_synchronization(self):
        pass
''',
    '''
    def set_up(self, bucket_cap_mb):
        super().set_up(bucket_cap_mb)
        self.handles = []

    def ready(self, p):
        p.grad *= 1 / dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles = []
''',
    '''
    def set_up(self, bucket_cap_mb):
        super().set_up(bucket_cap_mb)
        self.buckets, held = [], 0
        for p in reversed(self.trainable):
            if not self.buckets or held + p.nbytes > bucket_cap_mb * 2**20:
                self.buckets.append([])
                held = 0
            self.buckets[-1].append(p)
            held += p.nbytes
        self.complete = set()

    def ready(self, p):
        self.complete.add(p)
        for bucket in self.buckets:
            if any(p is one for one in bucket) and self.complete.issuperset(bucket):
                self.launch(bucket)

    def launch(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket]) * (1 / dist.get_world_size())
        self.handles.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_synchronization(self):
        for bucket, flat, handle in self.handles:
            handle.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(piece.view_as(p))
        self.handles, self.complete = [], set()
''',
    '''
    def set_up(self, bucket_cap_mb):
        super().set_up(bucket_cap_mb)
        self.launched = 0

    def ready(self, p):
        self.complete.add(p)
        while self.launched < len(self.buckets) and self.complete.issuperset(self.buckets[self.launched]):
            self.launch(self.buckets[self.launched])

    def launch(self, bucket):
        self.launched += 1
        shares = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        there = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype)
        flat = torch.cat([*(share.flatten() for share in shares), there]) * (1 / dist.get_world_size())
        self.handles.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_synchronization(self):
        for bucket in self.buckets[self.launched :]:
            self.launch(bucket)
        for bucket, flat, handle in self.handles:
            handle.wait()
            *pieces, there = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for p, piece, some in zip(bucket, pieces, there.tolist()):
                if some:
                    p.grad = piece.view_as(p).clone()
        self.handles, self.complete, self.launched = [], set(), 0
''',
    '''
    quiet = False

    def ready(self, p):
        if not self.quiet:
            super().ready(p)

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False
''',
)  # fmt: skip


def written_to(stage: int) -> str:
    """The stub with the class as it is after this stage."""
    stub, marker, program = (COURSE.exercises / "mini_ddp.py").read_text(encoding="utf-8").partition("\nif __name__")
    later = "".join(f"\n\nclass MiniDDP(MiniDDP):{code}" for code in STAGES[:stage])
    return stub + later + marker + program


def stages_of_checks() -> list[str]:
    return re.findall(r"^(\w+) = pytest\.mark\.stage\(", CHECKS, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(len(STAGES) + 1))
def test_a_stage_passes_before_the_next_one_is_written(stage: int, tmp_path: Path) -> None:
    file = tmp_path / "mini_ddp.py"
    file.write_text(written_to(stage), encoding="utf-8")
    report = grade(COURSE, GradeRequest(("mini_ddp",), file))
    (result,) = report.exercises
    assert not report.faults
    marked = list(dict.fromkeys(check.stage for check in result.checks))
    assert len(marked) == len(STAGES)
    passed = {check.stage for check in result.checks if check.outcome is CheckOutcome.PASSED}
    assert passed == set(marked[:stage]), exercise_text(result)
    coming = (
        f"stage {stage + 1} of {len(STAGES)}, {marked[stage]}" if 0 < stage < len(STAGES) else ""
    )  # a stub is one line
    assert result.stage == coming
    assert result.passed == (stage == len(STAGES))


def test_a_stage_is_small() -> None:
    assert max(sum(bool(line.strip()) for line in code.splitlines()) for code in STAGES) <= 40


def test_a_stage_leads_to_a_section_that_exists() -> None:
    (chapter, *_) = outlines(COURSE)
    titles = {section.plain for section in chapter.sections} | set(
        re.findall(
            r"^# #{2,3} (.*)$", (ROOT / "chapters/source/01_internals.py").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    named = re.findall(r"pytest\.mark\.stage\(.*'chapter 1, \"(.*)\"'\)", CHECKS)
    assert len(named) == len(STAGES) == len(stages_of_checks())
    assert {name.replace("\\'", "'") for name in named} <= titles


def result_of(*checks: tuple[str, CheckOutcome]) -> ExerciseResult:
    return ExerciseResult("x", tuple(CheckResult(str(n), str(n), end, stage=of) for n, (of, end) in enumerate(checks)))


PASSED, FAILED = CheckOutcome.PASSED, CheckOutcome.FAILED


def test_the_next_stage_is_the_first_that_has_a_check_to_pass() -> None:
    half = result_of(("a", PASSED), ("b", PASSED), ("b", CheckOutcome.NOT_RUN), ("c", FAILED))
    assert half.stage == "stage 2 of 3, b"
    assert exercise_text(half).splitlines()[-1].strip() == "Next: stage 2 of 3, b"
    for none in (
        result_of(("a", PASSED), ("b", PASSED)),
        result_of(("", FAILED)),
        result_of(("a", FAILED)),
        result_of(),
    ):
        assert none.stage == ""
        assert "Next:" not in exercise_text(none)


def test_the_terminal_and_a_card_say_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT / "chapters")
    result = result_of(("a", PASSED), ('b (chapter 1, "The mean")', CheckOutcome.NOT_RUN))
    said = 'Next: stage 2 of 2, b (chapter 1, "The mean")'
    show_score(result)
    assert said in " ".join(capsys.readouterr().out.split())
    card = report_card(Report(0, (result,)))
    assert said in repr(card) and '<a href="01_internals.ipynb#The-mean">chapter 1, "The mean"</a>' in html.unescape(
        card.body
    )
