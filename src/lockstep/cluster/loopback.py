"""A run whose launcher gives this machine another name than 127.0.0.1: code that has that one written into it shows.

Not 127.0.0.2: torch asks for the name of every peer, and where no name server answers, that takes longer than a hang.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ..ranks import Function, Network, NotRun

if TYPE_CHECKING:
    from ..ranks import Job


def loopback(address: str) -> Function:
    """For `ranks.run(network=…)`: the ranks meet at this address, such as `"localhost"`, and MASTER_ADDR says so.

    The run raises `ranks.NotRun` where nothing can listen there.
    """
    return Function("lockstep.cluster.loopback", "enter", {"address": address})


def enter(job: Job, address: str) -> Network:
    """In the supervisor of a run. Raises ranks.NotRun."""
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        raise NotRun(f"nothing can listen at {address} here ({error.strerror})") from None
    network = Network()
    network.address = address
    return network
