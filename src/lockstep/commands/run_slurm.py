"""`lockstep run` as a task of SLURM's srun: what the command line does not say of the nodes, SLURM knows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from .run_options import are_elsewhere


def fill_in(options: argparse.Namespace, slurm: Mapping[str, str]) -> str:
    """Complete --nnodes, --node-rank, --rdzv-endpoint and --rdzv-id from a task's variables; what to tell the user.

    Raises ValueError if srun starts more than one task on a node: each would start ranks of its own.
    """
    nodes, tasks = slurm.get("SLURM_STEP_NUM_NODES", "1"), slurm.get("SLURM_STEP_NUM_TASKS", "1")
    alone = options.standalone or options.spawns or options.hosts or options.nnodes not in (None, nodes)
    if alone or tasks == "1":
        return ""
    if tasks != nodes:
        raise ValueError(
            f"srun starts {tasks} tasks on {nodes} node{'' if nodes == '1' else 's'}, and each starts -n ranks: "
            "give srun --ntasks-per-node=1, or lockstep run --standalone if each task is a job of its own"
        )
    options.nnodes = nodes
    if are_elsewhere(options):
        return ""
    node, job, step = slurm["SLURM_NODEID"], slurm["SLURM_JOB_ID"], slurm["SLURM_STEP_ID"]
    place = f"{_first(slurm['SLURM_STEP_NODELIST'])}:{20_000 + (int(job) + 97 * int(step)) % 10_000}"
    options.node_rank, options.rdzv_endpoint, options.rdzv_id = node, place, options.rdzv_id or job
    return f"SLURM: node {node} of {nodes}; they meet at {place}. With --standalone, each has its own job."


def _first(hosts: str) -> str:
    """Of `gpu[08-11,13],login2`, `gpu08`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)[0])  # type: ignore[index]
