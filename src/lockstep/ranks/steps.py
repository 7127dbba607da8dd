"""Inside a rank that is asked to mark its training steps: when forward, backward and the optimizer's step begin.

The marks are those that code can make itself (`lockstep.ranks.mark`), with a prefix: `timeline` uses them for a rank that
has made none. A step begins with the first forward of a module that records gradients and ends with the optimizer's step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .messages import OWN_MARK

if TYPE_CHECKING:
    from .recorder import Recorder


class StepMarks:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.phase = "end"
        self.depth = 0  # How many optimizers are inside their `step`: one may call another's
        self._main = threading.main_thread().ident

    def start(self) -> None:
        """Follow every module, backward and optimizer of this process from now on."""
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        run_backward = torch.autograd.backward

        def lockstep_backward(*args: Any, **kwargs: Any) -> None:
            self._enter("backward")
            run_backward(*args, **kwargs)
            self._enter("after backward")

        torch.autograd.backward = lockstep_backward

    def _enter(self, phase: str) -> None:
        if phase != self.phase and self.depth == 0 and threading.get_ident() == self._main:
            self.phase = phase
            self.recorder.mark(OWN_MARK + phase)

    def _forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self.phase != "backward" and torch.is_grad_enabled():  # in backward: activations are computed a second time
            self._enter("forward")

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._enter("step")
        self.depth += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.depth = max(0, self.depth - 1)
        self._enter("end")
