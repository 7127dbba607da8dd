"""Case: neighbors who do not speak.

“A rod in pieces, one per rank; each piece needs the edges of its neighbors. It ran until a host was replaced; the new
host's settings came from the host beside it.”

    ./lockstep run -n 4 exercises/clinic/crossed_sends.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job, so that it
ends whatever a host's settings say. `main()` must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist

CAUSE = "?"
RANK = "?"  # its number, or "all"

LENGTH, STEPS = 6, 5


def exchange(mine: torch.Tensor, neighbor: int, speaks_first: bool) -> torch.Tensor:
    """Give the neighbor my edge, a tensor of one value, and return its edge."""
    theirs = torch.empty_like(mine)
    if speaks_first:
        dist.send(mine, neighbor)
        dist.recv(theirs, neighbor)
    else:
        dist.recv(theirs, neighbor)
        dist.send(mine, neighbor)
    return theirs


def main() -> dict[str, object]:
    """Let the heat spread for five steps. Returns this rank's piece of the rod: 6 temperatures, float32."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    even = rank % 2 == 0
    options = clinic_data.settings("crossed_sends", rank, world_size, usual={"first": even}, odd={"first": not even})
    dist.init_process_group("gloo")
    piece = torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        left = exchange(piece[:1], rank - 1, options["first"]) if rank > 0 else piece[:1]
        right = exchange(piece[-1:], rank + 1, options["first"]) if rank < world_size - 1 else piece[-1:]
        whole = torch.cat([left, piece, right])
        piece = (whole[:-2] + whole[1:-1] + whole[2:]) / 3
    dist.barrier()
    dist.destroy_process_group()
    return {"piece": piece}


if __name__ == "__main__":
    main()
