"""Which functions of torch a rank waits in, and what they are called: for stacks taken within a rank or from outside."""

from __future__ import annotations

import os

CALLS = {
    "_engine_run_backward": "backward",
    "_verify_param_shape_across_processes": "DDP()",
    "_create_c10d_store": "init_process_group",
}
"""Functions that users know by another name."""


def inside_of(filename: str, name: str) -> str:
    """The part of DDP, or the backward pass, that this function is; empty for any other."""
    if name == "_engine_run_backward":
        return "backward"
    if filename.endswith(os.path.join("nn", "parallel", "distributed.py")):
        if name == "__init__":
            return "DDP()"
        if name in ("_pre_forward", "_sync_buffers"):
            return "forward"
    return ""
