# ---
# jupyter:
#   jupytext:
#     comment_magics: true
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 3. Debugging: a clinic of broken jobs
#
# When one process fails, its traceback tells you where. When four fail together, you get four errors, and usually only
# one of them is the cause. When four hang, you get no error.
#
# This chapter follows one broken job from its symptom to a test that keeps it fixed. Then it shows tools for each kind
# of failure. You write three such tools yourself. Afterwards you can
#
# - **shrink** a broken job to two ranks and a few steps;
# - **read** what a failed job prints, and find the root cause among the errors;
# - **locate** a hang: which call each rank is in, and which rank is missing;
# - **find** the step and the tensor at which the ranks' models silently diverge;
# - **check** devices, environment and network before a long run;
# - **test** a fix, and check that the test fails without it.
#
# About 275 minutes: 80 to read and run, 195 for three exercises and your first broken jobs in the clinic. You need
# chapter 2, but no GPU: what this chapter says about NCCL and GPUs comes from source code and documentation, and was
# not run here.

# %%
# %load_ext lockstep
import os, subprocess, sys
from pathlib import Path
import torch
import torch.distributed as dist
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

# %% [markdown]
# ## One hang, from symptom to test
#
# A colleague writes: *"It trains fine on one GPU. On the cluster it trains for a while and then never returns. No
# error."* Here is the job, already cut down to a linear layer and nine records:

# %%
# %%writefile suspect.py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)  # every rank draws the same nine records
    records = torch.randn(9, 4)[rank::world_size]
    for batch in records.split(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    print(f"rank {rank} has finished")
    dist.barrier()

main()

# %% [markdown]
# ### 1. Make it small
#
# Simplify your own job step by step, and keep a change only if the job still fails: fewer steps, random tensors instead
# of the loader's batches, one layer instead of the model, fewer ranks. `./lockstep run` takes torchrun's options and
# explains what goes wrong. The function below calls it in the notebook. Start with one rank:

# %%
import contextlib, io, os
from lockstep.commands.project import run_script as run_command

os.environ["COLUMNS"] = "76"  # so that the output fits into a cell

def lockstep_run(*arguments):
    """Print what `./lockstep run arguments ...` says."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        run_command(arguments)
    said = [line for line in error.getvalue().splitlines() if not line.startswith("As torchrun")]
    print(*sorted(out.getvalue().splitlines()), "\n".join(said).strip(), sep="\n")

lockstep_run("-n", "1", "suspect.py")

# %% [markdown]
# The job finishes, because a single process never waits for another.
#
# ### 2. Ask every rank where it is
#
# Now two ranks:

# %%
lockstep_run("-n", "2", "suspect.py")

# %% [markdown]
# Below the headline you see where each rank waits, and for how long. Rank 0 is still in the loop; rank 1 has left it.
# When no rank can continue, Lockstep stops the job.
#
# ### 3. Test a hypothesis with a number
#
# Perhaps rank 1 left the loop first because it had fewer batches. Count them:

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
records = torch.zeros(9, 4)[dist.get_rank() :: dist.get_world_size()]
print(len(records), "records make", len(records.split(2)), "batches")

# %% [markdown]
# So in its third step, rank 0 calls an all-reduce that rank 1 never calls. If that is the cause, three ranks should
# finish: each has three records, which make two batches.

# %%
lockstep_run("-n", "3", "suspect.py")

# %% [markdown]
# All three finish, as the hypothesis predicts.
#
# ### 4. Fix the cause
#
# DDP has a context manager for uneven data, `model.join()`. Inside it, a rank without batches keeps calling DDP's
# collectives until every rank has finished; then all ranks receive the model of one that finished last:

# %%
# %%writefile fixed.py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    records = torch.randn(9, 4)[rank::world_size]
    with model.join():  # +  a rank without batches calls DDP's collectives
        for batch in records.split(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    print(f"rank {rank} has finished")
    dist.barrier()

main()

# %% [markdown]
# ### 5. Keep a test that fails without the fix
#
# `lockstep run` returns 0 only if every rank succeeds, so the test reads its exit status. It must fail on `suspect.py`
# and pass on `fixed.py`. Are two ranks enough? Not for the next job: with two ranks, a rank's left and right neighbor
# are the same rank:

# %%
# %%writefile ring.py
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
right = (rank + 1) % world_size
left = (rank + 1) % world_size  # BUG: the left neighbor is rank - 1
sending = dist.isend(torch.ones(1), right) if world_size > 1 else None
if sending:
    dist.recv(torch.empty(1), left)
    sending.wait()

# %%
def statuses(script):
    """The exit status on 1, 2 and 3 ranks."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [run_command(["-n", number, script]) for number in ("1", "2", "3")]

print("suspect.py:", statuses("suspect.py"))
print("fixed.py:  ", statuses("fixed.py"))
print("ring.py:   ", statuses("ring.py"))

# %% [markdown]
# Three ranks don't show the bug in `suspect.py`, and two don't show the bug in `ring.py`: test on two *and* three. In
# your own project, write a pytest test with a deadline:
#
# ```
# @pytest.mark.parametrize("ranks", [1, 2, 3])
# def test_every_rank_finishes(ranks):
#     command = ["timeout", "60", "torchrun", f"--nproc-per-node={ranks}", "train.py", "--steps=5"]
#     assert subprocess.run(command).returncode == 0
# ```
#
# After 60 seconds, `timeout` ends torchrun, and torchrun ends its ranks. `subprocess.run(command, timeout=60)` would
# kill only torchrun; the ranks would continue to hang.
#
# The symptom tells you what to ask:
#
# | the job | you ask | section |
# |---|---|---|
# | **fails** | Which rank failed first? | "Reading failures" |
# | **hangs** | In which call is each rank? | "Hangs", "Mismatches", "NCCL on a cluster" |
# | **lies**: it finishes with a wrong result | Do all ranks hold the same model? Which samples did each rank use? | "Silent divergence" |
# | **doesn't start** | Can the ranks reach each other? | "The network", "Preflight" |

# %%
quiz("03_debugging/one_rank")

# %% [markdown]
# ## Reading failures
#
# Rank 2 reads a bad record, raises an exception and exits. When a process exits, the other ranks lose their
# connections to it, and raise errors too. Which errors does Lockstep print?

# %%
# %%ranks 4 --expect raised
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
record = [1.0, 2.0, None, 4.0][dist.get_rank()]
t = torch.tensor(record)
dist.all_reduce(t)

# %% [markdown]
# Lockstep prints the **root cause** and says where the other ranks waited. Errors that follow from the root cause on
# other ranks are **echoes**. torchrun prints both, and may mistake an echo for the cause. In the next job, rank 1 has
# a bad record:

# %%
# %%writefile bad_record.py
import atexit, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record  # +
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(1 - time.time() % 1)  # so that both ranks fail in the same second
        atexit.register(time.sleep, 2)  # and rank 1 exits slowly
    try:
        t = torch.tensor([1.0, None][rank])
        dist.all_reduce(t)
    finally:
        dist.destroy_process_group()

main()

# %% [markdown]
# The next cell prints torchrun's closing summary; `…` replaces what differs between runs. <span class="on-screen">You
# needn't read its code.</span> Which rank does torchrun blame?

# %%
import re

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENTRY = r"  (time|host|rank|exitcode|error_file|traceback) *:|  RuntimeError|    File.*bad_record"
VARIES = {
    r"time( +): .*": r"time\1: …",
    r"host( +): .*": r"host\1: …",
    r"pid: \d+": "pid: …",
    r'(error_file: |")/.*/': r"\1…/",
    r"\[/.*?\] .*Connection \w+ by peer.*": "[…/pair.cc] … Connection … by peer …",
}

def torchrun(*arguments):
    """Run torchrun and print its closing summary."""
    job = subprocess.run([*TORCHRUN, *arguments], capture_output=True, text=True, timeout=200)
    for line in job.stderr.partition("ChildFailedError: \n")[2].splitlines():
        for pattern, shown in VARIES.items():
            line = re.sub(pattern, shown, line)
        if re.match(ENTRY, line) or line.startswith(("[", "-", "=", "bad", "Failures", "Root")):
            print(line.rstrip())

torchrun("--nproc-per-node=2", "bad_record.py")

# %% [markdown]
# torchrun blames rank 0. But rank 0's error is about a connection, so it is an echo. The cause is listed above it: rank
# 1 could not make a tensor from `None`.
#
# torchrun blames the rank with the earliest error, but compares only whole seconds. Here both errors fall in the same
# second, so it blames rank 0, which exited first. Read all entries, and look for an error that is not about a
# connection.
#
# `@record` writes a rank's exception to a file, from which torchrun reads it. Put it on every `main`: without it, the
# summary has exit codes, but no errors. With `torchrun --tee 3`, each line of the log starts with its local rank, as
# in `[default1]:`. The exit codes mean:
#
# | exit code | meaning |
# |---|---|
# | 1 | The rank raised an exception. |
# | −15 | SIGTERM: torchrun ended the rank after another rank had failed. If the scheduler ends torchrun itself, there is no summary; the log ends with `SignalException`. |
# | −9 | SIGKILL: usually from the kernel, because memory ran out. |
# | −11 | SIGSEGV: compiled code crashed. |
# | −6 | SIGABRT: with NCCL, usually a timeout ("NCCL on a cluster"). With gloo, tensors of different sizes ("Mismatches"), or an abort after the job's last line (chapter 2). |
#
# ### The echo
#
# Below, rank 1 of 4 is killed, as if memory had run out. What do the others print?

# %%
# %%writefile killed.py
import os, re, signal
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(t)
except RuntimeError as error:
    peer = re.search(r"\[[\d.]+\]:", str(error))[0]
    print(f"rank {dist.get_rank()}: lost its connection to {peer}PORT", flush=True)
    os._exit(1)

# %%
lockstep_run("-n", "4", "killed.py")

# %% [markdown]
# When a rank dies, its connections close. Every other rank raises an error such as `Connection closed by peer
# [127.0.0.1]:13028`, which names an address and a port, but no rank. If every error in a log is about a connection,
# look for the rank that printed nothing.

# %%
quiz("03_debugging/echo")

# %% [markdown]
# ## Hangs
#
# A waiting rank prints nothing and raises nothing until the timeout, by default 30 minutes with gloo and 10 with NCCL
# (chapter 2). In `nvidia-smi`, a GPU that waits in NCCL shows 100 % utilization; only its low power draw gives it
# away. Most hangs have the same cause: **some ranks wait for a call that another rank never makes.**

# %%
# %%ranks 3 --expect hang
import torch
import torch.distributed as dist

def validate():
    dist.barrier()

def train():
    t = torch.ones(2)
    dist.all_reduce(t)

dist.init_process_group("gloo")
best = [0.7, 0.7, 0.9][dist.get_rank()]  # every rank's own validation score
if best > 0.8:  # BUG: only one rank takes this branch
    validate()
else:
    train()

# %% [markdown]
# ![Ranks 0 and 1 take one branch and wait in all_reduce; rank 2 takes the other and waits in barrier](pictures/hang.svg)
#
# Lockstep found this by reading every rank's stack. You can read the stacks yourself.
#
# ### A stack of every rank
#
# Python's `faulthandler` can write the stack to a file after a number of seconds, while the process continues. Call
# `dump_traceback_later` in every step: each call restarts the clock, so only a slow step writes a stack. After the
# loop, call `cancel_dump_traceback_later`. Give each rank its own file:

# %%
# %%writefile stacks.py
import faulthandler
from datetime import timedelta
import torch, torch.distributed as dist

def validate():
    dist.barrier()

def train():
    dist.all_reduce(torch.ones(2))

dist.init_process_group("gloo", timeout=timedelta(seconds=6))  # so that this example ends
rank = dist.get_rank()
stack_file = open(f"stack_{rank}.txt", "w")  # opened once, before the loop
for step in range(3):
    faulthandler.dump_traceback_later(2, file=stack_file)  # +  must be shorter than the group's timeout
    if step == 2 and rank == 1:
        validate()
    else:
        train()

# %%
command = [*TORCHRUN, "--nproc-per-node=2", "stacks.py"]
job = subprocess.run(command, capture_output=True, text=True, timeout=200)
for rank in range(2):
    stack = Path(f"stack_{rank}.txt").read_text().splitlines()
    own = [line.split(", ")[1] for line in stack if "stacks.py" in line]
    print(f"rank {rank}:", own[0])

# %% [markdown]
# A stack shows the line, but not the step: two ranks at the same line may be in different steps. Lockstep's numbers
# (`all_reduce #3`) tell the calls apart.
#
# ### A job that already hangs
#
# `py-spy dump --pid N` reads the stack of a running process. (With SLURM, `srun --overlap --jobid=J` runs it on the
# nodes of job J.) `./lockstep attach` compares all ranks on this machine. Both usually need `sudo`. While `stacks.py`
# hangs, `attach` prints:
#
# ```
# HANG: rank 0 in all_reduce at stacks.py:9; rank 1 in barrier at stacks.py:6: the ranks wait for each other.
#
#   rank   waits in     at
#   0      all_reduce   stacks.py:9   dist.all_reduce(torch.ones(2))
#   1      barrier      stacks.py:6   dist.barrier()
# ```
#
# ### A short timeout
#
# `init_process_group(..., timeout=timedelta(seconds=20))` turns a hang into an error. Below, rank 1 is late. Does
# gloo's `RuntimeError` name rank 1?

# %%
# %%ranks 2 --expect hang
import time
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
if dist.get_rank() == 1:
    time.sleep(6)  # busy elsewhere
dist.all_reduce(torch.ones(1))

# %% [markdown]
# No: only Lockstep's report names rank 1. A short timeout ends the wait but doesn't explain it. Keep the timeout longer
# than anything that one rank does alone, such as writing a checkpoint.
#
# ### Who is missing: a monitored barrier
#
# In `dist.monitored_barrier`, every rank sends rank 0 a message. With `wait_all_ranks=True`, rank 0 names every rank
# whose message is missing, not only the first. Only gloo has this barrier. With NCCL, create a second group for it:
# `dist.new_group(backend="gloo")`.

# %%
# %%ranks 4 --expect hang --quiet
import time
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() in (1, 2):
    time.sleep(6)  # busy elsewhere
dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)

# %% [markdown]
# The barrier costs a round trip to each rank, so use it before the first step and between epochs, not in every step.
#
# ### What TORCH_DISTRIBUTED_DEBUG does, and what it does not
#
# `TORCH_DISTRIBUTED_DEBUG` is OFF by default; its other levels are INFO and DETAIL. With DETAIL, torch first compares
# the ranks' calls, and then runs the collective:

# %%
# %%ranks 2 --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
try:
    dist.all_reduce(torch.ones(4 + dist.get_rank()))  # BUG: 4 elements on rank 0, 5 on rank 1
except RuntimeError as error:
    message = str(error)
    print(message[message.find("Collectives differ") :])

# %% [markdown]
# In torch 2.13, DETAIL has limits:
#
# - Before each comparison, the ranks wait in a monitored barrier. So rank 0 names a missing rank, but only when the
#   timeout expires.
# - It compares the kind of collective, and the shape and type of the tensors, but it can't tell whether the tensors
#   belong together ("Mismatches").
# - With gloo, DDP's constructor crashes:

# %%
# %%ranks 2 --expect crashed --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2))

# %% [markdown]
# With DDP, use INFO instead: it names the parameters that got no gradient ("Four shortcuts, and what they cost").
#
# ### The usual causes
#
# 1. The ranks have different numbers of batches (`suspect.py`).
# 2. A collective, or a call of the DDP-wrapped model, is inside `if rank == 0`.
# 3. Each rank decides for itself to stop early, skip a batch, or take a branch.
# 4. One rank has died, or is busy with something else.
# 5. The ranks never connected ("The network").
# 6. One rank caught an exception and continued with other code.
#
# Except for causes 4 and 5, all fixes follow one rule: **whether a rank calls a collective must not depend on anything
# that differs between ranks.** Let all ranks agree first, with one small all-reduce:

# %%
# %%ranks 3
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.tensor([0.5, float("nan"), 0.4][dist.get_rank()])
bad = torch.tensor(float(loss.isnan()))
dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # now every rank knows
print("all skip this batch" if bad else "all train on it")

# %% [markdown]
# ### Uneven numbers of batches
#
# For cause 1, there are three fixes: pad, drop or join. Here rank 0 has five batches and rank 1 has three:
#
# ![As it is, rank 0 hangs in step 4. Padding: both ranks take 5 steps. Dropping: 3. Join: rank 0 takes 5, and rank 1 sends zeros in the last 2](pictures/uneven.svg)
#
# `DistributedSampler` pads the shards (chapter 2). To drop batches, the ranks agree on the smallest number:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(1, 1))
steps = torch.tensor([5, 3][dist.get_rank()])
dist.all_reduce(steps, op=dist.ReduceOp.MIN)  # +
for _ in range(steps):
    ddp(torch.ones(1, 1)).sum().backward()
print("took", steps.item(), "steps")

# %% [markdown]
# `join()` trains on every sample. Below, every gradient is 4, and in steps 4 and 5 only rank 0 has a batch. Does DDP
# still divide by 2? `divide_by_initial_world_size` decides. **Predict** rank 0's five averages for both values:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
for initial in (True, False):
    ddp, gradients = DDP(torch.nn.Linear(1, 1, bias=False)), []
    with ddp.join(divide_by_initial_world_size=initial):  # +
        for _ in range([5, 3][dist.get_rank()]):
            ddp.zero_grad()
            (4 * ddp(torch.ones(1, 1))).sum().backward()
            gradients.append(ddp.module.weight.grad.item())
    print(f"divide_by_initial_world_size={initial}:", *gradients)

# %% [markdown]
# By default, DDP still divides by 2, so all batches count equally. With `False`, it divides by the number of ranks that
# still have a batch, so rank 0's last two batches count double.
#
# A rank without batches calls only **DDP's own collectives**. If the loop contains any other collective, for example to
# average the loss, the ranks' calls no longer match:

# %%
# %%ranks 2 --expect hang
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(1, 1))
with ddp.join():
    for _ in range([5, 3][dist.get_rank()]):
        loss = ddp(torch.ones(1, 1)).sum()
        loss.backward()
        dist.all_reduce(loss.detach())  # BUG: a rank without batches doesn't call it

# %% [markdown]
# In each step, rank 0 calls four all-reduces: two that `join` adds, one for the gradients, and the loop's own. In step
# 4, rank 1 skips the loop's all-reduce (#16), so each of its later calls comes one number early. At #18 the sizes
# differ: rank 0 calls `join`'s second all-reduce (one element), rank 1 the one for the two gradients.
#
# In such a loop, use `throw_on_early_termination=True`. When one rank runs out of batches, all ranks raise an error,
# and the remaining batches are dropped:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(1, 1))
try:
    with ddp.join(throw_on_early_termination=True):  # +
        for _ in range([5, 3][dist.get_rank()]):
            loss = ddp(torch.ones(1, 1)).sum()
            loss.backward()
            dist.all_reduce(loss.detach())
except RuntimeError as error:
    print(error)

# %% [markdown]
# ### An evaluation on rank 0
#
# Here rank 0 evaluates the model alone (cause 2). The job hangs, because DDP's forward broadcasts BatchNorm's buffers,
# even in evaluation mode:

# %%
# %%ranks 2 --expect hang
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
ddp(torch.randn(4, 2)).sum().backward()
ddp.eval()
if dist.get_rank() == 0:
    with torch.no_grad():
        ddp(torch.randn(4, 2))  # BUG: with buffers, a forward is a collective
dist.barrier()

# %% [markdown]
# Call the plain model instead, which sends nothing:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
ddp(torch.randn(4, 2)).sum().backward()
ddp.eval()
if dist.get_rank() == 0:
    with torch.no_grad():
        ddp.module(torch.randn(4, 2))  # +
dist.barrier()
print("past the barrier")

# %%
quiz("03_debugging/never_joined")

# %% [markdown]
# ## Mismatches
#
# A hang at least shows that something is wrong. A **mismatch** may not: all ranks call a collective, but with tensors
# of different sizes, types or meanings. What happens depends on the sizes. gloo sends a tensor in pieces. If a piece
# is larger than the receiver expects, gloo ends the process with exit code −6, without a Python error:

# %%
# %%ranks 2 --expect mismatch --quiet
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones([4, 8][dist.get_rank()]))  # BUG: the last batch of rank 0 is smaller

# %% [markdown]
# With 2 and 3 elements, every piece is one element, so no piece is too large. Which rank finishes?

# %%
# %%ranks 2 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones([2, 3][dist.get_rank()])  # BUG: two elements on rank 0, three on rank 1
dist.all_reduce(t)
print("the sum is", t)

# %% [markdown]
# Rank 0 finishes, rank 1 hangs. If both tensors have the same size, **no rank waits at all.** Below, one rank swaps
# two tensors, and the job continues with wrong sums, despite `DETAIL`.

# %%
# %%ranks 2 --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
a, b = torch.tensor(1.0), torch.tensor(10.0)
tensors = [a, b] if dist.get_rank() == 0 else [b, a]  # BUG: a different order
for tensor in tensors:
    dist.all_reduce(tensor)
print(f"a = {a:.0f} (should be 2), b = {b:.0f} (should be 20)")
assert (a, b) == (11, 11)

# %% [markdown]
# If you loop over a **set of strings**, the ranks can get different orders, because each Python process can order the
# set differently. The ranks below share one order, since Lockstep forks them from one process, and the sums are right.
# Under `torchrun`, the orders can differ, and then the two sums are mixed up:

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sums = {"loss": torch.tensor(1.0), "count": torch.tensor(10.0)}
for name in set(sums):  # BUG
    dist.all_reduce(sums[name])
assert sums == {"loss": 2, "count": 20}

# %% [markdown]
# gloo doesn't compare types either. Rank 1's integer tensor receives the *bits* of rank 0's 1.0:

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1) if dist.get_rank() == 0 else torch.ones(1, dtype=torch.int32)
dist.broadcast(t, src=0)
print(t)

# %% [markdown]
# If a rank skips one collective, each of its later calls is paired with the wrong call of the other rank. Below, rank 1
# skips batch 1. Instead of gradients, each rank sends the number of its batch, so `total - batch` is the number of the
# other rank's batch:

# %%
# %%ranks 2 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for batch in range(4):
    if dist.get_rank() == 1 and batch == 1:
        continue  # BUG: "the loss is NaN, skip it", on this rank only
    total = torch.tensor(float(batch))
    dist.all_reduce(total)
    if total != 2 * batch:
        print(f"added my batch {batch} to the other rank's batch {total - batch:.0f}")

# %%
quiz("03_debugging/swapped")

# %% [markdown]
# ## Silent divergence
#
# DDP's constructor makes the **replicas**, the ranks' copies of the model, equal. After that, DDP averages gradients,
# and never compares the parameters.
#
# On processors of the same kind, replicas that start equal and get equal updates stay equal, *bit for bit*. So if a
# single bit differs, the updates differed. In this picture, rank 1's learning rate doubles after step 4, while rank
# 0's learning rate doesn't change:
#
# ![The weight is equal on both ranks until step 4; then rank 1's falls faster than rank 0's](pictures/drift.svg)

# %%
# %%writefile drift.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def verdict(model):
    """Compare the ranks' checksums: the sum of all parameters, in float64."""
    own = sum(parameter.detach().double().sum() for parameter in model.parameters()).reshape(1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return "equal" if all(torch.equal(one, own) for one in every) else "DIFFERENT"

def start(wrap=DDP):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = wrap(nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)

def step(model, optimizer, x):
    optimizer.zero_grad()
    x = x.to(next(model.parameters()).dtype)  # a later cell casts its model to double
    model(x).square().mean().backward()
    optimizer.step()

# %%
# %%ranks 2
from drift import *

model, optimizer, x = start()
for number in range(3):
    step(model, optimizer, x)
    print(f"after step {number + 1}: {verdict(model)}")

# %% [markdown]
# Four mistakes make the replicas differ without an error:
#
# **The model is cast or moved after wrapping.** A change of type or device removes DDP's hooks (chapter 1):

# %%
# %%ranks 2 --into cast
from drift import *

model, optimizer, x = start()
model.double()  # BUG: after DDP(). According to torch's source, .to(another device) has the same effect
for number in range(2):
    step(model, optimizer, x)
    print(f"after step {number + 1}: {verdict(model)}")

# %% [markdown]
# `--into cast` puts Lockstep's record of the run into the variable `cast`. How many gradient all-reduces did rank 0
# call?

# %%
print("all-reduces:", [call.kind for call in cast.collectives[0]].count("all_reduce"))

# %% [markdown]
# None: DDP averages nothing.
#
# **The wrapper is bypassed.** `spread` is the largest difference between the ranks (chapter 1):

# %%
# %%ranks 2
from drift import *
from rank_spread import spread

model, optimizer, x = start()
print(f"spread before the step: {spread(model.parameters()):.2f}")
step(model.module, optimizer, x)  # BUG: DDP's forward is never called
print(f"spread after the step:  {spread(model.parameters()):.2f}")

# %% [markdown]
# **Weights are loaded on one rank, after wrapping.** Does the next step make the replicas equal?

# %%
# %%ranks 2
from drift import *
from rank_spread import spread

model, optimizer, x = start()
if dist.get_rank() == 0:
    nn.init.zeros_(model.module.weight)  # BUG: like load_state_dict on one rank
print(f"after loading:  spread {spread(model.parameters()):.2f}")
step(model, optimizer, x)
print(f"after the step: spread {spread(model.parameters()):.2f}")

# %% [markdown]
# No: DDP averages gradients, not weights.
#
# **The settings differ.** Rank 1's learning rate changes, but when? `--watch-replicas`, an option of `%%ranks` and
# `./lockstep run`, finds the step. After each `optimizer.step()`, every rank sends Lockstep a checksum and a few
# values of each parameter, without a collective.

# %%
# %%ranks 3 --watch-replicas
from drift import *

model, optimizer, x = start()
for number in range(6):
    if number == 3 and dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.2  # BUG: a schedule that counts only this rank's batches
    step(model, optimizer, x)

# %% [markdown]
# ### Wrong results with equal parameters
#
# Even if all parameters are equal, a job can be wrong:
#
# | what is wrong | how you notice |
# |---|---|
# | Every rank reads the same samples. | `len(loader)` is the same as on one process. |
# | All ranks use the same dropout masks. | The masks of two ranks are equal. |
# | Every epoch has the same order. | The first indices of two epochs are equal. |
# | The evaluation uses only rank 0's samples, or repeats some. | The ranks' numbers of samples don't add up to the size of the data set. |
# | BatchNorm's statistics come from one rank's data. | The buffers differ between the ranks after a step. |
#
# If every rank reads the same samples, the gradients are equal even before DDP averages them. `--watch-replicas`
# reports it:

# %%
# %%ranks 2 --watch-replicas
from drift import *

model, optimizer, x = start()
x = torch.ones(8, 4)  # BUG: the same batch on every rank, as without a DistributedSampler
for number in range(4):
    step(model, optimizer, x)

# %% [markdown]
# BatchNorm's running statistics differ between the ranks. **Predict** whether `--watch-replicas` reports drift.

# %%
# %%ranks 2 --watch-replicas
from drift import *

def with_norm(layer):
    return DDP(nn.Sequential(layer, nn.BatchNorm1d(1)))

model, optimizer, x = start(with_norm)
x = x + 3 * dist.get_rank()  # very different data on the two ranks
for number in range(20):
    step(model, optimizer, x)
print("parameters", verdict(model))

# %% [markdown]
# No: `--watch-replicas` reports no drift, because the parameters are equal. It only mentions the running statistics.

# %%
quiz("03_debugging/equal_replicas")

# %% [markdown]
# ## Exercise: implement find_divergence
#
# *Hard, 60 minutes.* Open [exercises/find_divergence.py](../exercises/find_divergence.py).
#
# The checksum above says *that* replicas differ. Your tool also says which value differs, on which ranks and by how
# much. A sum of the values isn't enough: it stays the same if two values swap places.
#
# You also write `DivergenceWatch`, which compares the ranks every few steps and keeps the first difference. After a
# step with a different learning rate on rank 1, `find_divergence` returns:
#
# ```
# [Difference(kind='parameter', name='weight', ranks=(1,), largest=0.04124...),
#  Difference(kind='parameter', name='bias', ranks=(1,), largest=0.01320...),
#  Difference(kind='optimizer', name='param_groups[0].lr', ranks=(1,), largest=0.1)]
# ```

# %%
contract("find_divergence")

# %%
# %check find_divergence

# %% [markdown]
# `./lockstep solution find_divergence` shows the solution.
#
# ## Devices
#
# So far, the ranks disagreed with each other. But one rank can also fail alone: with several devices, a tensor easily
# ends up on the wrong one. torch's error doesn't name that tensor: at best it names an argument of torch's own
# function, such as `mat1`. Below, the device `meta`, whose tensors have no values, stands in for a GPU. Which of the
# three calls fail?

# %%
from torch import nn

def attempt(name, loss_function, logits, target):
    try:
        loss_function(logits, target)
        print(f"{name}: works")
    except RuntimeError as error:
        print(f"{name}: {error}")

plain, weighted = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(3))
logits, target = torch.randn(4, 3, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
attempt("target left behind", plain, logits, torch.zeros(4, dtype=torch.long))
attempt("plain loss, not moved", plain, logits, target)
attempt("weighted loss, not moved", weighted, logits, target)

# %% [markdown]
# Two fail. Move the target, and any loss that holds a tensor, such as class weights, to the device of the logits. A
# plain loss holds none, so you needn't move it.
#
# `.to(device)` moves the parameters and registered buffers of a module and its children. A tensor in a plain attribute
# or a list stays where it is:

# %%
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.mean = torch.zeros(3)  # BUG: neither a parameter nor a buffer
        self.register_buffer("scale", torch.ones(3))

model = Scaled().to("meta")
print("layer", model.layer.weight.device, " scale", model.scale.device, " mean", model.mean.device)

# %% [markdown]
# **Find the bugs.** One model below was never moved, the other only in part. Do the functions notice?

# %%
def diagnose(model):
    devices = {p.device for p in model.parameters()}
    return "all on one device" if len(devices) == 1 else f"MISMATCH: {devices}"

def verify_device(model, wanted):
    return next(model.parameters()).device == torch.device(wanted)  # BUG: checks one parameter

forgotten = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
half = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
print("never moved:", diagnose(forgotten))  # BUG: all on one device, but on the wrong one
print("half moved: ", verify_device(half, "meta"))

# %% [markdown]
# Neither function notices. `diagnose` doesn't know which device you want, and `verify_device` looks at one parameter
# only. Compare the device of every tensor with the device that you want.

# %%
quiz("03_debugging/what_moves")

# %% [markdown]
# ## Exercise: implement device_report
#
# *Medium, 45 minutes.* Open [exercises/device_report.py](../exercises/device_report.py). A report says what to do:
#
# ```
# model.mean is on cpu, and should be on meta: no .to() moves it; use register_buffer ...
# loss.weight is on cpu, and should be on meta: loss.to("meta")
# batch[1] is on cpu, and should be on meta: batch[1] = batch[1].to("meta")
# ```

# %%
contract("device_report")

# %%
# %check device_report

# %% [markdown]
# `./lockstep solution device_report` shows the solution.
#
# ## The network
#
# Until now, the ranks could reach each other. What if they can't?
#
# **The store cannot be reached.** The ranks first connect to the store at `MASTER_ADDR:MASTER_PORT` (chapter 2). If
# the address is wrong or a firewall blocks the port, torch tries again until the timeout, so the job seems to start
# slowly:

# %%
# %%writefile blocked.py
from datetime import timedelta
import torch.distributed as dist

try:
    # Nothing listens on port 1.
    dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=800))
except dist.DistError as error:  # the errors of the store and the network
    print(type(error).__name__, "-", str(error).partition(".\n")[0])

# %%
job = subprocess.run([sys.executable, "blocked.py"], capture_output=True, text=True, timeout=200)
print(job.stdout)

# %% [markdown]
# **The interface is missing or wrong.** gloo uses the address that the node's hostname resolves to. NCCL prefers
# InfiniBand, a fast network for clusters (interfaces named `ib…`), and avoids the loopback interface and Docker's.
# `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` override these choices. If one rank's interface doesn't exist, that
# rank fails at once:

# %%
# %%ranks 2 --expect raised --quiet
import os
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"  # BUG: this node has no such interface
dist.init_process_group("gloo")

# %% [markdown]
# **The launchers connect, but the ranks don't.** The `c10d` rendezvous uses two stores. The launchers connect to the
# first, here on port 29500. The ranks connect to the second, on a port that the system chooses.
#
# Below, `cluster.Nodes` starts two nodes on this machine. A firewall on `node0` lets only port 29500 through:

# %%
# %%writefile meet.py
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist

try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    print("node", os.environ["GROUP_RANK"], "is in the group")  # GROUP_RANK: the number of the node
except dist.DistError as error:  # the errors of the store and the network
    said = str(error).partition(".\n")[0]
    print(type(error).__name__, said.replace(os.environ["MASTER_PORT"], "PORT"))
sys.stdout.flush()
os._exit(0)

# %% tags=["needs-hosts"]
from lockstep import cluster, ranks

command = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
command += ["--rdzv-endpoint=node0:29500", "meet.py"]
try:
    with cluster.Nodes(2) as nodes:
        nodes.block_all_but(0, 29500)
        agents = [nodes.run(number, command) for number in range(2)]
        for agent in agents:
            agent.wait(110)
        lines = [line for agent in agents for line in agent.output.splitlines()]
        said = [line for line in lines if line.startswith(("Dist", "node "))]
        print(*sorted(said), sep="\n")
except ranks.NotRun as missing:
    print("not run:", missing)

# %% [markdown]
# The rank on the second node can't reach the ranks' store on `node0`, where the other rank waits for it. Neither error
# says "firewall". Open all ports between the nodes. Choosing the store's port doesn't help: this rendezvous ignores
# `--master-port`, and the ranks' connections to each other need ports too.
#
# **If `init_process_group` fails on a rank, let it raise.** Then the launcher ends the other ranks. If you catch the
# error, as here, the other ranks wait:

# %%
# %%ranks 2 --expect hang
import os
import torch.distributed as dist

def process_group_is_ready():
    try:
        dist.init_process_group("gloo")
        return True
    except Exception as error:
        print("failed:", type(error).__name__)
        return False  # BUG: this rank continues without the group

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
process_group_is_ready()

# %% [markdown]
# **A connection breaks later.** If a process *dies*, its connections close and the other ranks fail at once. If a cable
# is *pulled* or a node freezes, no connection closes, and only the timeout reports it. Here SIGSTOP freezes rank 1:

# %%
# %%ranks 2 --expect hang
import os, signal
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # frozen: alive, connected, and silent
dist.all_reduce(torch.ones(1))

# %%
quiz("03_debugging/open_port")

# %% [markdown]
# ## NCCL on a cluster
#
# With NCCL, a collective runs on the GPU, and the Python call returns at once. If the collective gets stuck, Python has
# already moved on and can't raise an error. A thread inside torch, the **watchdog**, checks every collective that was
# **enqueued** (handed to the GPU). If a collective takes longer than the group's timeout, the watchdog writes to the
# log and ends the process (exit code −6).
#
# ### Read this log
#
# Four ranks train with DDP. The log is shortened and made up; its wording is that of torch's `ProcessGroupNCCL.cpp`.
# Ranks 2 and 3 print the same as rank 0. In the log, a collective is "work", `SeqNum` its number and `NumelIn` its
# number of elements; `PG` is the process group.
#
# ```
# [rank0]: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE,
#          NumelIn=6553600, NumelOut=6553600, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.
# [rank0]: [PG ID 0 PG GUID 0(default_pg) Rank 0] failure detected by watchdog at work sequence id: 1580
#          PG status: last enqueued work: 1582, last completed work: 1579
# [rank1]: [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a collective timeout from rank 0
#          and we will try our best to dump the debug info. Last enqueued NCCL work: 1579,
#          last completed NCCL work: 1579.
# [rank0]: [Rank 0] To avoid data inconsistency, we are taking the entire process down.
# ```
#
# Which rank do you investigate?
#
# <details><summary>Answer</summary>
# Rank 1. All ranks completed #1579. Ranks 0, 2 and 3 wait in #1580, and have already enqueued #1581 and #1582. Rank 1
# never called #1580. Its GPU and its link worked until then, so look at its Python first: get its stack. #1580 is
# probably a bucket of gradients: in float32 it has 25 MiB, DDP's default size.
# </details>
#
# After any timeout, compare the ranks' last enqueued and last completed collectives:
#
# | last enqueued, last completed | look at |
# |---|---|
# | One rank has enqueued fewer collectives. | its Python: data, a branch, an exception, a slow save |
# | All ranks have enqueued #N, and none has completed it. | the arguments of #N on each rank (sizes, order), then the network and the GPUs |
# | All ranks have enqueued #N, and only some have completed it. | the GPUs and links of the ranks that have not: `nvidia-smi`, and the driver's `Xid` errors in `dmesg` |
#
# ### The flight recorder
#
# Each rank keeps its latest 2000 collectives, with their sizes and stacks, in the **flight recorder**. At a timeout,
# the watchdog makes every rank write its recorder to a file, and the command `torchfrtrace` compares the files. gloo's
# collectives are recorded, too, but only a private function of torch reads them:

# %%
# %%writefile recorder.py
import pickle
import torch
import torch.distributed as dist

def write_buffer():
    """Write this rank's flight recorder to a file, as the watchdog does with NCCL."""
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    ranks = str(list(range(dist.get_world_size())))
    trace["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}  # empty with gloo
    with open(f"trace_{dist.get_rank()}", "wb") as file:
        pickle.dump(trace, file)
    last = trace["entries"][-1]
    said = f"rank {dist.get_rank()}: last was #{last['collective_seq_id']}, {last['profiling_name']}"
    print(f"{said}\n", end="", flush=True)  # one write, so that the ranks' lines don't mix

# %%
# %%writefile recorded.py
import os
import torch, torch.distributed as dist
from recorder import write_buffer

dist.init_process_group("gloo")
for _ in range(2):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    dist.barrier(async_op=True)  # BUG: the others call all_reduce
else:
    dist.all_reduce(torch.ones(1), async_op=True)
write_buffer()
os._exit(0)  # exit instead of hanging

# %%
command = [*TORCHRUN, "--nproc-per-node=3", "recorded.py"]
job = subprocess.run(command, capture_output=True, text=True, timeout=200)
print(*sorted(job.stdout.splitlines()), sep="\n")

# %% [markdown]
# `torchfrtrace`, here started as a module, finds the culprit:

# %%
command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "trace_", "."]
job = subprocess.run(command, capture_output=True, text=True, timeout=200)
for line in (job.stdout + job.stderr).splitlines():
    if line.startswith(("Collective sequence number", "input sizes", "error msg")):
        print(line)

# %% [markdown]
# `./lockstep explain trace_0 trace_1 trace_2` also shows every rank's line:

# %%
from lockstep.commands import explain

explained = explain.main([Path("trace_0"), Path("trace_1"), Path("trace_2")], as_json=False)

# %% [markdown]
# ### The variables that matter
#
# NCCL and torch ignore unknown variables, so check the spelling. These are torch's:
#
# | variable | what it does |
# |---|---|
# | `TORCH_FR_BUFFER_SIZE` | sets the number of entries in the flight recorder; 0 switches it off. Formerly `TORCH_NCCL_TRACE_BUFFER_SIZE` |
# | `TORCH_FR_DUMP_TEMP_FILE=/shared/trace_` | says where torch writes the flight recorder at a timeout; torch appends the rank. Choose shared storage, which outlives the node |
#
# And these are NCCL's:
#
# | variable | what it does |
# |---|---|
# | `NCCL_DEBUG=INFO` | writes a log: versions, interfaces, connections. `WARN` is enough for errors |
# | `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV` | limits the log to these parts: naming some hides the others. `BOOTSTRAP` and `NET` show the network |
# | `NCCL_DEBUG_FILE=nccl.%h.%p.log` | writes one log for each host (`%h`) and process (`%p`). There is no code for the rank: with `nccl_rank_%r.log`, the file `nccl_rank_0.log` never exists |
# | `NCCL_SOCKET_IFNAME=eth` | uses only interfaces whose names start with `eth`. `NCCL_SOCKET_IFNAME==eth0`, with two equals signs, means exactly `eth0`. The value `^docker` excludes the interfaces whose names start with `docker` |
# | `NCCL_IB_DISABLE=1` | switches off InfiniBand and RoCE (a fast kind of Ethernet); NCCL then uses the slower sockets. The default is 0, so setting 0 changes nothing |
# | `NCCL_P2P_DISABLE=1` | disables direct traffic between GPUs. This is slow; use it only to test whether direct traffic is at fault |
# | `NCCL_TIMEOUT` | **does not exist**. The timeout is an argument of `init_process_group` |
#
# In NCCL's log, `Bootstrap: Using …` names the interface over which the ranks found each other, and `NET/IB`
# (InfiniBand or RoCE) or `NET/Socket` names what carries the data. With plain Ethernet only, NCCL chooses sockets by
# itself.

# %%
quiz("03_debugging/watchdog_log")

# %% [markdown]
# ## Preflight
#
# Your job waits hours for its nodes. Then it hangs before the first step, because an environment variable is wrong on
# one node. A **preflight** finds such mistakes before training starts: it checks the environment, joins the other
# ranks with a short timeout, lets `monitored_barrier` name missing ranks, and runs a collective whose result is known.

# %%
quiz("03_debugging/preflight")

# %% [markdown]
# ## Exercise: implement preflight
#
# *Hard, 75 minutes.* Open [exercises/preflight.py](../exercises/preflight.py). Whatever is broken, `preflight` must
# return within its time limit. Rank 0 of 2 gets this list if rank 1 doesn't start:
#
# ```
# ['rank 1 has not arrived in time: look at the log and the node, and whether it was started with that RANK']
# ```

# %%
contract("preflight")

# %%
# %check preflight

# %% [markdown]
# `./lockstep solution preflight` shows the solution.
#
# ## Find the bug in the check
#
# Each of these tests and measurements has a bug. Before you run a cell, **predict** its result.
#
# **1. Are the gradients synchronized?**

# %%
# %%ranks 2
from drift import *

def test_gradient_sync(model):
    for parameter in model.parameters():
        parameter.grad.fill_(dist.get_rank())
    expected = sum(range(dist.get_world_size())) / dist.get_world_size()
    return all(abs(parameter.grad.mean().item() - expected) < 1e-5 for parameter in model.parameters())

model, optimizer, x = start()
model(x).square().mean().backward()
print("before:", [f"{p.grad.mean():.3f}" for p in model.parameters()])
print("synchronized:", test_gradient_sync(model))
print("after: ", [f"{p.grad.mean():.3f}" for p in model.parameters()])

# %% [markdown]
# The gradients were equal ("before"), but the check returns `False`: it writes its own values into them *after*
# backward, when DDP no longer averages. Instead, gather the gradients and compare them.
#
# **2. How much of a step is communication?** Here a communication hook makes each all-reduce 50 ms longer, so nearly
# all of the step is communication. What does the measurement say?

# %%
# %%ranks 2
import time
from drift import *
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

def slow(state, bucket):
    time.sleep(0.05)
    return allreduce_hook(state, bucket)

model, _, x = start()
model.register_comm_hook(None, slow)
compute, total = [], []
for number in range(4):
    began = time.perf_counter()
    model(x).square().mean().backward()
    compute.append(time.perf_counter() - began)
    total.append(time.perf_counter() - began)
print(f"communication: {1 - sum(compute) / sum(total):.0%} of the step")
assert min(total) > 0.05  # in fact, every step waits for the hook

# %% [markdown]
# It says 0 %. The communication happens inside `backward`, so `compute` and `total` both contain it. Instead, compare
# a step with the same step under `no_sync()` (chapter 4).
#
# **3. How much faster are two ranks than one?** A benchmark trains on rank 0 alone, and then on all ranks:

# %%
# %%ranks 2 --expect hang
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    model = DDP(torch.nn.Linear(2, 2))  # BUG: constructing DDP is a collective
dist.barrier()

# %% [markdown]
# Rank 0 waits for rank 1, which never constructs DDP. Measure one process in a separate run.
#
# **4. Is NCCL installed, and can the ranks communicate?** Two tests start like this:

# %%
# %%ranks 1
import torch

def test_nccl():
    return torch.cuda.nccl.is_available()  # BUG: this one needs tensors; call dist.is_nccl_available()

def test_communication():
    return torch.device(f"cuda:{os.environ['LOCAL_RANK']}")  # BUG: os is not imported

for test in (test_nccl, test_communication):
    try:
        test()
    except (TypeError, NameError) as error:
        print(f"{test.__name__}: {error}")

# %% [markdown]
# Both tests raise an error before they test anything. Run every check on a correct job *and* on a job with the fault
# that the check looks for.

# %%
quiz("03_debugging/test_the_test")

# %% [markdown]
# ## Four shortcuts, and what they cost
#
# **"I set `find_unused_parameters=True`, just in case."** What does the flag cost if every parameter is used? Train the
# same model with and without the flag, and compare what rank 0 sends:

# %%
# %%writefile flag.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(flag):
    dist.init_process_group("gloo")
    layers = [nn.Linear(64, 64) for _ in range(4)]  # 8 parameter tensors
    ddp = DDP(nn.Sequential(*layers), find_unused_parameters=flag)
    for step in range(3):
        ddp(torch.ones(1, 64)).sum().backward()

# %%
# %%ranks 2 --into plain
from flag import train

train(flag=False)

# %%
# %%ranks 2 --into flagged --quiet
from flag import train

train(flag=True)

# %%
for name, run in (("without", plain), ("with", flagged)):
    sent = [call for call in run.collectives[0] if call.kind == "all_reduce"]
    print(f"{name:8}{len(sent):2} all-reduces of", *[call.nbytes for call in sent], "bytes")

# %% [markdown]
# The flag adds one all-reduce to every backward, with **4 bytes for each parameter tensor** (32 here). In this
# all-reduce, the ranks agree on which parameters were used. DDP also searches the autograd graph in every forward.
# What both cost depends on the model and the network. If every parameter was used, torch warns that you don't need the
# flag (`--quiet` hides the warning here).
#
# The flag also hides mistakes: without it, a layer that is never used raises an error. So set the flag only if
# different steps use different layers. The flag works even if each rank uses a different layer:

# %%
# %%writefile branches.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(2, 1, bias=False) for _ in range(4)]
        self.trunk, self.left, self.right, self.spare = layers
    def forward(self, x, branch):
        return self.trunk(x) + getattr(self, branch)(x)

def start(**options):
    dist.init_process_group("gloo")
    return DDP(Net(), **options), ["left", "right"][dist.get_rank()]

# %%
# %%ranks 2
from branches import *

ddp, branch = start(find_unused_parameters=True)
for step in range(2):
    ddp.zero_grad()
    ddp(torch.ones(1, 2), branch).sum().backward()
for name, parameter in ddp.module.named_parameters():
    print(name, parameter.grad)

# %% [markdown]
# `left` has a gradient of 1 on rank 0 only, so the mean is 0.5. Without the flag, DDP still waits for gradients after
# the first backward, and the next forward raises an error. PyTorch's message gives only the numbers of the parameters
# without a gradient, unless `TORCH_DISTRIBUTED_DEBUG=INFO` is set. Lockstep looks up their names:

# %%
# %%ranks 2 --expect raised --quiet
from branches import *

ddp, branch = start()
for step in range(2):
    ddp(torch.ones(1, 2), branch).sum().backward()  # BUG: each rank leaves out a different layer

# %% [markdown]
# **"Out of memory, so a smaller batch."** All ranks have the same batch size. So if one GPU is much fuller than the
# others, the batch size is not the cause. Look for ranks that put tensors on GPU 0 because they never selected their
# own (chapter 2).
#
# **"It works on one node, so it works on two."** Two nodes mean new addresses, new interfaces and a firewall, and on
# the second node `LOCAL_RANK` no longer equals `RANK`. Run the preflight first.
#
# **"It scales badly, so it must be the network."** A slow loader, a small batch or one slow rank has the same effect.
# Measure (chapter 4) before you tune NCCL.

# %%
quiz("03_debugging/unused")

# %% [markdown]
# ## The clinic
#
# `exercises/clinic` holds your colleagues' broken jobs, each a short script with a complaint at the top:

# %%
from msgspec import toml

cases = toml.decode(Path("../autograder/clinic/cases.toml").read_text())
for name, case in cases.items():
    print(f"{name:18} {case['ranks']} ranks   {case['title']}")

# %% [markdown]
# 1. **Run** a job and **look** at what Lockstep reports. If the job finishes with a wrong result, add
#    `--watch-replicas`.
# 2. **Answer** in the file: `CAUSE`, from the list in `exercises/clinic/README.md`, and `RANK`, the rank at fault or
#    `"all"`.
# 3. **Fix** the job, and run `./lockstep check clinic/NAME`.
#
# The check grades the answer and the fix. A fix that only hides the symptom, such as a longer timeout, is rejected, and
# the check says why.
#
# The first run draws your **ticket**, a random number. In half of the cases it decides which rank is at fault, so
# another learner's answer may be wrong for your job. Below, `short_shard` runs with ticket 1:

# %%
os.environ["CLINIC_TICKET"] = "1"
lockstep_run("-n", "3", "../exercises/clinic/short_shard.py")
del os.environ["CLINIC_TICKET"]  # back to your own ticket

# %% [markdown]
# The cause is `uneven-data`, and the rank is 0. A fix that stops every rank at the shortest shard fails the check,
# because the complaint also asks you to keep all records. After a complete fix, the check prints:

# %%
# %check clinic/short_shard

# %%
quiz("03_debugging/longer_timeout")

# %% [markdown]
# ## What to remember
#
# - **Before a long run**: run a preflight. Put `@record` on `main` and `faulthandler` in each step, and call
#   `find_divergence` every few hundred steps; if the ranks agree, it takes two small collectives.
# - **The job failed**: find the first error that is not about a connection. torchrun's root cause may be an echo.
# - **The job hangs**: get a stack of every rank, or with NCCL its last enqueued collective. Whether a rank calls a
#   collective must not depend on what differs between ranks.
# - **The job lies**: compare the replicas bit for bit. Count each rank's samples and all-reduces.
# - **You fixed it**: run it on two ranks and on three. Trust a check only after you have seen it fail on a broken job.
#
# In an interview, expect: "Your job hangs after the first epoch. What do you do?"
#
# ## What to read next
#
# Chapter 4 makes the job fast. PyTorch documents "Debugging torch.distributed applications"
# (`pytorch.org/docs/stable/distributed.html`), its `TORCH_NCCL_*` variables
# (`pytorch.org/docs/stable/torch_nccl_environment_variables.html`) and the flight recorder
# (`pytorch.org/tutorials/unstable/flight_recorder_tutorial.html`).

# %%
from lockstep.notebook.course_map import course_map

course_map("03_debugging")
