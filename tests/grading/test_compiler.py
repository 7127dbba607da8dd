"""What stands for torch's compiler in the process that grades."""

from __future__ import annotations

import subprocess
import sys

TRAINS = """
import sys, torch
from lockstep.grading import compiler
compiler.leave_out()
def step(parameter):
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.optim.lr_scheduler.StepLR(optimizer, 1).get_last_lr() + parameter.tolist()
here = step(torch.nn.Parameter(torch.ones(2)))
assert "torch._dynamo.config" not in sys.modules
"""
THEN = """
import torch._dynamo.utils
from torch._dynamo import config
assert torch._dynamo.utils.counters is not None and config.__name__ == "torch._dynamo.config"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
assert step(torch.nn.Parameter(torch.ones(2))) == here
"""


def test_an_optimizer_imports_no_compiler_and_whoever_needs_it_gets_it() -> None:
    said = subprocess.run([sys.executable, "-c", TRAINS + THEN], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
