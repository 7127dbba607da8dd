"""Exercise preflight: is this job able to start? Asked on every rank, before anything expensive happens.

Chapter 3, “Preflight”. It is a program as well, and leaves with status 1 when there is a problem:

    torchrun --nproc-per-node=2 exercises/preflight.py
"""

import os
import sys

import torch
import torch.distributed as dist


def preflight(timeout: float = 10.0, backend: str | None = None) -> list[str]:
    """Look for what will keep this job from training. Called on every rank at the start, with the same arguments.

    Returns one line a problem; each names the variable, the port or the rank, and says what to do. An empty list means
    that all is well. It never raises, and comes back within about `timeout` seconds, whatever is broken. Ranks that can
    still talk to each other tell each other: what one of them sees is in the list of all.

    Looked at, in this order:

    - The variables that torchrun sets, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: set, integers where
      they should be, and possible (rank below world size, port 1 to 65535; with CUDA, local rank below the number of
      GPUs). They are read, and not changed.
    - The backend: "nccl" where there are GPUs and "gloo" elsewhere, unless told; is it there?
    - MASTER_ADDR resolves. At MASTER_PORT a store answers (torchrun's agent hosts it; without TORCHELASTIC_USE_AGENT_STORE
      rank 0 does, and the port has to be free). A port where some other program listens is a problem too.
    - Every rank arrives, and each only once. Missing ranks are named by all that are there: `init_process_group` would only
      say that it has waited, so a roll is called in the store first. WORLD_SIZE, torch's version and the backend are the
      same everywhere.
    - The group forms. `monitored_barrier` passes, which only gloo has: with nccl through a gloo group beside it.
    - The all-reduce of all RANKs is 0 + 1 + … + (WORLD_SIZE - 1), exactly.

    Leaves no process group behind. When there is one already, that one is tried, the variables may be missing, and it
    stays. Where rank 0 hosts the store it goes on doing so, for the job that begins next at the same port.

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
    # gloo's threads now and then abort a finished process while the interpreter shuts down: leave without that.
    os._exit(1 if problems else 0)
