"""Which functions of torch a rank waits in, and what they are called: for stacks taken within a rank or from outside."""

from __future__ import annotations

import os

CALLS = {
    "_engine_run_backward": "backward",
    "_verify_param_shape_across_processes": "DDP()",
    "_create_c10d_store": "init_process_group",
}
"""Functions that users know by another name."""
LIBRARIES = {"fsdp": "FSDP", "tensor": "DTensor", "pipelining": "the pipeline"}
"""Folders of torch.distributed that communicate for the user's code, and what to call them."""


def inside_of(filename: str, name: str) -> str:
    """The part of DDP, the library or the backward pass, that this function is of; empty for any other."""
    if name == "_engine_run_backward":
        return "backward"
    if filename.endswith(os.path.join("nn", "parallel", "distributed.py")):
        if name == "__init__":
            return "DDP()"
        if name in ("_pre_forward", "_sync_buffers"):
            return "forward"
    _, found, path = filename.rpartition(os.path.join("torch", "distributed", ""))
    return LIBRARIES.get(path.partition(os.sep)[0], "") if found else ""


def around(inner: str, outer: str) -> str:
    """Where a call comes from: `inner` is what its inner functions are of, `outer` the next one that `inside_of` knows."""
    if inner in LIBRARIES.values():
        return f"{inner}'s backward" if outer == "backward" else inner
    return outer or inner


WRAPPERS = ("typing_extensions", "wrapt", "decorator")  # Libraries that only wrap a function of another library


def library_of(module: str) -> str:
    """`torch.distributed.fsdp` or `accelerate`, for a module of a library that communicates; empty for PyTorch's plumbing."""
    first, *rest = module.split(".")
    if first != "torch":
        return "" if first in WRAPPERS else first
    return f"torch.distributed.{rest[1]}" if rest[0:1] == ["distributed"] and len(rest) > 2 else ""
