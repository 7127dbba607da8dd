"""Where a run's processes stand: in this machine's own network, or in one that a floor above has made for the run.

`run(network=Function("module", "name", {…}))` names a function that the supervisor calls in its own process, alone and
single-threaded, before it opens the rendezvous store and starts a rank. The function makes what it wants to make
(namespaces, links) and returns a `Network`. What has been made lives as long as the processes in it and needs no
tidying: the supervisor has nothing to undo, however it ends. So this floor knows that there are networks, and nothing
of how one is made.
"""

from __future__ import annotations

import importlib

from .job import Job

LOOPBACK = "127.0.0.1"


class NotRun(Exception):
    """This machine lacks what the run asked for, so nothing was run. The text is one line: what is missing, and how to
    get it. Neither the ranks' fault nor Lockstep's, and never a success."""


class Network:
    """This machine's own network. Others override what they change."""

    address = LOOPBACK  # Where the rendezvous store listens, and what the ranks get as MASTER_ADDR

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that a rank gets unless the run's own environment sets them."""
        return {}

    def join(self, rank: int) -> None:
        """Called in the process that becomes this rank, before it does anything."""


def enter(job: Job) -> Network:
    """Make the network that a job asks for and put this process into it. Raises NotRun where that cannot be done."""
    if job.network is None:
        return Network()
    make = getattr(importlib.import_module(job.network.module), job.network.name)
    network = make(job, **job.network.kwargs)
    assert isinstance(network, Network)
    return network
