"""A cluster on one machine: several nodes, links as slow as you like, faults on demand, SLURM.

    from lockstep import cluster, ranks
    run = ranks.run(ranks.Script("train.py"), 2, network=cluster.slow_link("1gbit"))

On a rank of such a run `cluster.set_bandwidth("200mbit")` changes the rate. With `nodes=2, network=cluster.own_hosts()`
each node is a host with a name and an address of its own; `cluster.Nodes` gives such hosts to any command, torchrun
among them, and breaks them on demand; `cluster.Slurm` runs SLURM on them. `cluster.available("bandwidth")`, `"hosts"`
and `"slurm"` say beforehand what is missing on this machine, if something is. Nothing here needs root where user
namespaces are open, and nothing is left when it ends, however it ends: it all lives in Linux's namespaces (see
`namespaces`).
"""

from __future__ import annotations

from .availability import Missing, available
from .hosts import own_hosts
from .link import set_bandwidth, slow_link
from .loopback import loopback
from .nodes import ClusterError, Nodes, Process
from .rate import bits_per_second
from .slurm import Job, Slurm

__all__ = [
    "ClusterError", "Job", "Missing", "Nodes", "Process", "Slurm", "available", "bits_per_second", "loopback",
    "own_hosts", "set_bandwidth", "slow_link",
]  # fmt: skip
