"""Exercise preflight: can this job start? Every rank asks, before anything expensive happens.

Chapter 3, "Preflight". It is also a program, and exits with status 1 if there is a problem:

    torchrun --nproc-per-node=2 exercises/preflight.py
"""

import os
import sys

import torch
import torch.distributed as dist


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    """Look for what will keep this job from training. Every rank calls it once, at the start, with the same arguments.

    Returns one line for each problem, and an empty list if all is well. A line names the variable, the port or the
    rank. preflight never raises, and returns within about `timeout` seconds, whatever is broken. Once the ranks are
    connected, by the store or a group, they share all problems: a problem that one rank sees is in every rank's list.

    What to look at:

    - The variables that torchrun sets, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: set, integers where
      they should be, and possible (rank below world size, port 1 to 65535; with nccl, local rank below the number of
      GPUs). Read them; never change them.
    - The backend: "nccl" if there are GPUs and "gloo" otherwise, unless the caller names one. Is it available?
    - MASTER_ADDR resolves, and at MASTER_PORT a store answers. Torchrun's agent hosts it if TORCHELASTIC_USE_AGENT_STORE
      is "True"; otherwise preflight on rank 0 does, and the port has to be free. Another program at that port is a
      problem too. When torchrun restarts the ranks, the agent's store still holds what they wrote before the restart;
      TORCHELASTIC_RESTART_COUNT tells the attempts apart.
    - Every rank arrives. Each rank that has arrived names all that are missing. If two processes have the same RANK, another
      RANK is missing: the lines name both. `init_process_group` would only say that it timed out. So let each
      rank write its number into the store first, and see which numbers are missing.
    - WORLD_SIZE, torch's version and the backend are the same on every rank.
    - `init_process_group` forms the group, and `monitored_barrier` passes. (Only gloo has it: with nccl, make a gloo group
      as well.)
    - The all-reduce of all RANKs is 0 + 1 + … + (WORLD_SIZE - 1), exactly.

    preflight leaves no process group behind. If a group exists already, it tests and keeps that group. RANK and the
    other variables may then all be missing; each rank contributes RANK to the all-reduce, or its rank in the group if
    RANK isn't set, and WORLD_SIZE is the size of the group. If rank 0 hosts the store, the store outlives the
    call, and the training that follows can use it at the same port.

    Args:
        timeout: seconds for all of it.
        backend: "gloo" or "nccl".
    """
    raise NotImplementedError("preflight: look at the environment, call the roll, try a collective")


if __name__ == "__main__":
    problems = preflight()
    rank = os.environ.get("RANK", "?")
    for line in problems:
        print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
    if not problems and rank == "0":
        print(f"preflight: all is well on {os.environ['WORLD_SIZE']} ranks", flush=True)
    # gloo's threads sometimes abort a finished process while the interpreter shuts down; os._exit skips the shutdown.
    os._exit(1 if problems else 0)
