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
# When one process fails, its traceback tells you where. When four fail together, you get four errors, and most of them
# blame the wrong process. When they hang, you get none. This chapter follows one broken job from its symptom to a test
# that keeps it fixed, then shows the tools for each kind of failure; you write three of them. At the end, 28 broken
# jobs wait for you in a clinic. Afterwards you can
#
# - **shrink** a broken job to two ranks and a few steps;
# - **read** a failed launch: the root cause, the errors that only follow from it, and an NCCL timeout;
# - **locate** a hang: which call is each rank in, and which rank is missing;
# - **find** the step and the tensor at which the ranks' models silently diverge;
# - **check** devices, environment and network before a long run;
# - **test** a fix, and test the test.
#
# About 240 minutes: 45 to read and run, 195 for three exercises and your first cases. You need chapter 2, but no GPU:
# what the chapter says about NCCL and GPUs comes from source code and documentation, and was not run here.

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
    torch.manual_seed(0)  # the same nine records on every rank
    records = torch.randn(9, 4)[rank::world_size]
    for batch in records.split(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    print(f"rank {rank} has finished")
    dist.barrier()

main()

# %% [markdown]
# ### 1. Make it small, but not too small
#
# `./lockstep run` takes torchrun's options and explains what goes wrong. Start with one rank:

# %%
import contextlib, io
from lockstep.commands.project import run_script as run_command

def lockstep_run(*arguments):
    """Print what `./lockstep run arguments ...` says."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        run_command(arguments)
    said = [line for line in error.getvalue().splitlines() if not line.startswith("As torchrun")]
    print(*sorted(out.getvalue().splitlines()), "\n".join(said).strip(), sep="\n")

lockstep_run("-n", "1", "suspect.py")

# %% [markdown]
# It works, but a single process never waits for another. **One rank tests the arithmetic; two test the communication.**

# %%
lockstep_run("-n", "2", "suspect.py")

# %% [markdown]
# ### 2. Ask every rank where it is
#
# Read the table. Rank 0 is in backward, in its third gradient all-reduce. Rank 1 has left the loop and waits in the
# barrier. Neither call can complete without the other rank.
#
# ### 3. Form a hypothesis, and let a number decide
#
# Why did rank 1 leave the loop first? Perhaps it had fewer batches. Count them:

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
records = torch.zeros(9, 4)[dist.get_rank() :: dist.get_world_size()]
print(len(records), "records make", len(records.split(2)), "batches")

# %% [markdown]
# So rank 0's third all-reduce has no partner. A good hypothesis also predicts something new: with three ranks, each
# rank has three records, so the job should finish.

# %%
lockstep_run("-n", "3", "suspect.py")

# %% [markdown]
# It does. Three ranks hide this bug, so always test with two ranks *and* with three.
#
# ### 4. Fix the cause
#
# A longer timeout would only prolong the wait. DDP has a context manager for this case: inside `model.join()`, a rank
# that has run out of batches still answers the collectives of the others:

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
    with model.join():  # +  a rank without batches answers the others
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
# Run the job on one, two and three ranks. `lockstep run` returns 0 only if every rank succeeds. Run the test on the
# broken version too: a test that you have never seen fail proves nothing.

# %%
def statuses(script):
    """The exit status on 1, 2 and 3 ranks."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [run_command(["-n", number, script]) for number in ("1", "2", "3")]

print("suspect.py:", statuses("suspect.py"))
print("fixed.py:  ", statuses("fixed.py"))

# %% [markdown]
# The 1 is the hang on two ranks. In your own project, write a pytest test with a deadline:
#
# ```
# @pytest.mark.parametrize("ranks", [1, 2, 3])
# def test_every_rank_finishes(ranks):
#     command = ["torchrun", f"--nproc-per-node={ranks}", "train.py", "--steps=5"]
#     assert subprocess.run(command, timeout=60).returncode == 0
# ```
#
# To make your own job small, halve the steps, feed random tensors instead of the loader's, drop the optimizer. Then ask
# the question that fits the symptom:
#
# | the job | you ask | section |
# |---|---|---|
# | **fails** | which rank failed first? | Reading failures |
# | **hangs** | in which call is each rank? | Hangs, Mismatches, NCCL on a cluster |
# | **lies**: it finishes with a wrong result | do all ranks hold the same model? which samples are behind each number? | Silent divergence |
# | **doesn't start** | can the ranks reach each other? | The network, Preflight |

# %%
quiz("03_debugging/one_rank")

# %% [markdown]
# ## Reading failures
#
# Rank 2 reads a bad record and raises. The others lose their connection to it:

# %%
# %%ranks 4 --expect raised
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
record = [1.0, 2.0, None, 4.0][dist.get_rank()]
t = torch.tensor(record)
dist.all_reduce(t)

# %% [markdown]
# Lockstep shows the cause and leaves out its **echoes**, the errors that only follow from it. torchrun can't tell them
# apart; it reports the process that ended first. Here is a similar job, and what torchrun's closing summary says about
# it:

# %%
# %%writefile bad_record.py
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record  # +
def main():
    dist.init_process_group("gloo")
    t = torch.tensor([None, 1.0][dist.get_rank()])
    dist.all_reduce(t)

main()

# %%
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

def torchrun(*arguments):
    """Run torchrun and print what its closing summary says of the root cause."""
    job = subprocess.run([*TORCHRUN, *arguments], capture_output=True, text=True, timeout=200)
    summary = job.stderr.partition("Root Cause")[2]
    for line in summary.splitlines():
        if line.strip().startswith(("rank ", "exitcode ", "RuntimeError")):
            print(line.partition("(")[0].strip())

torchrun("--nproc-per-node=2", "bad_record.py")

# %% [markdown]
# `@record` copies the error into the summary, so put it on every `main`; without it, you search the interleaved output
# of all ranks. (`torchrun --log-dir=logs --tee=3` also writes each rank's output to a separate file.)
#
# **Read "Root Cause (first observed failure)" first.** After that failure torchrun ended the other ranks, and it lists
# them as failures too, usually with exit code −15.
#
# | exit code | means |
# |---|---|
# | 1 | an exception; its text is in that rank's output, or in the summary with `@record` |
# | −15 | SIGTERM, from torchrun: an echo |
# | −9 | SIGKILL: on a cluster, usually sent by the kernel because memory ran out |
# | −11 | SIGSEGV: a crash in compiled code |
# | −6 | SIGABRT: on GPUs, usually NCCL's *watchdog* after a timeout ("NCCL on a cluster"); with gloo, a size mismatch ("Mismatches") or an abort at exit (chapter 2) |
#
# ### The echo
#
# Here rank 1 of 4 is killed, as if memory had run out. What do the other three print?

# %%
# %%writefile killed.py
import os, signal
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(t)
except RuntimeError as error:
    said = str(error)
    if "Connection closed by peer" in said or "Connection reset by peer" in said:
        print(f"rank {dist.get_rank()}: my connection was closed", flush=True)
    os._exit(1)

# %%
lockstep_run("-n", "4", "killed.py")

# %% [markdown]
# When a rank dies, its connections close, and every survivor complains. gloo's message names an address, not a rank. So
# in a log of many ranks, find the earliest line that is not about a connection. If there is none, look for the rank
# that printed nothing.

# %%
quiz("03_debugging/echo")

# %% [markdown]
# ## Hangs
#
# A waiting rank prints nothing and raises nothing until the timeout, 30 minutes with gloo and 10 with NCCL. A GPU that
# waits in NCCL shows 100 % utilization; a low power draw gives it away. Nearly every hang has the same cause: **some
# ranks wait for a call that another rank never makes.**

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
if best > 0.8:  # BUG: a decision that only one rank takes
    validate()
else:
    train()

# %% [markdown]
# Here is the same hang, drawn over time:
#
# ![Ranks 0 and 1 take one branch and wait in all_reduce; rank 2 takes the other and waits in barrier](pictures/hang.svg)
#
# Lockstep read every rank's stack and counted its calls. Each of the next tools does part of that without Lockstep.
#
# ### A stack of every rank
#
# Python's own `faulthandler` can print the stack after a number of seconds, while the process continues. Call it in
# every training step: each call restarts the clock, so it prints only if a step takes too long.

# %%
# %%writefile stacks.py
import faulthandler
from datetime import timedelta
import torch, torch.distributed as dist

def validate():
    dist.barrier()

def train():
    dist.all_reduce(torch.ones(2))

dist.init_process_group("gloo", timeout=timedelta(seconds=4))  # so that this example ends
rank = dist.get_rank()
faulthandler.dump_traceback_later(1, file=open(f"stack_{rank}.txt", "w"))  # +  in a loop: 600
if rank == 1:
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
# Rank 0 is in `train`, rank 1 in `validate`. Give each rank its own file; on a shared stderr the stacks would
# interleave.
#
# ### A job that already hangs
#
# If you prepared nothing, `py-spy dump --pid N` reads the stack of one running process. `./lockstep attach` reads all
# ranks on this machine and compares them. (Both usually need `sudo`.) For `stacks.py` without its timeout, it said:
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
# `init_process_group(..., timeout=timedelta(seconds=20))` turns a hang into an error. What does the error not tell you?

# %%
# %%ranks 2 --expect hang
import time
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
if dist.get_rank() == 1:
    time.sleep(6)  # elsewhere
dist.all_reduce(torch.ones(1))

# %% [markdown]
# gloo's `RuntimeError` doesn't mention rank 1: a short timeout ends the wait but doesn't explain it. And it must be
# longer than anything a rank does alone, such as writing a checkpoint.
#
# ### Who is missing: a monitored barrier
#
# In `dist.monitored_barrier`, rank 0 checks off every rank. It needs gloo. In a job with NCCL, create a second group
# for it: `dist.new_group(backend="gloo")`.

# %%
# %%ranks 4 --expect hang --quiet
import time
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() in (1, 2):
    time.sleep(6)  # elsewhere
dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)

# %% [markdown]
# Rank 0 names every missing rank; without `wait_all_ranks=True`, only the first. The barrier costs a round trip to each
# rank, so use it before the first step and between epochs, not in every step.
#
# ### What TORCH_DISTRIBUTED_DEBUG does, and what it does not
#
# With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, torch compares every collective between the ranks before it runs:

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
# - It names a missing rank only when the timeout expires. (It puts a monitored barrier before each collective.)
# - It compares kind, shape and type. If a rank swaps two tensors of equal shape, DETAIL doesn't notice ("Mismatches").
# - With gloo and DDP, it crashes the process:

# %%
# %%ranks 2 --expect crashed --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2))

# %% [markdown]
# You can avoid the crash by setting the level after `init_process_group`, as the message suggests, but then no
# collective is compared.
#
# `INFO` works with DDP. If a layer got no gradient, torch's error lists the numbers of its parameters, and INFO adds
# their names:

# %%
# %%ranks 1 --expect raised --env TORCH_DISTRIBUTED_DEBUG=INFO
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.extra = nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x):
        return self.used(x)  # BUG: extra is never called

dist.init_process_group("gloo")
model = DDP(Net())
for step in range(2):
    model(torch.ones(1, 2)).sum().backward()

# %% [markdown]
# The error comes one step late: the gradient was missing in the first backward, and the second forward fails.
#
# ### The usual causes
#
# 1. The ranks have different numbers of batches (`suspect.py`).
# 2. A collective, or a forward of the DDP wrapper, is inside `if rank == 0`.
# 3. Each rank decides for itself to stop early, skip a batch, or take a branch.
# 4. One rank has died, or works alone for a long time.
# 5. The ranks never connected ("The network").
# 6. One rank caught an exception and continued with other code.
#
# All fixes follow one rule: **whether a rank calls a collective must not depend on anything that differs between
# ranks.** If a rank has to decide, let all ranks agree first, with one small all-reduce:

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
# This is cause 1. Rank 0 has four batches and rank 1 has three. In step 4, rank 0 waits for a rank that has finished:
#
# ![As it is, rank 0 hangs in step 4; with padding or join both ranks take 4 steps, with dropping 3](pictures/uneven.svg)
#
# There are three fixes. `DistributedSampler` pads the shards (chapter 2). Or the ranks agree on the smallest number of
# batches and drop the rest:

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
# Or use `join()`, which trains on every sample. How much should a sample count once other ranks have run out?
# `divide_by_initial_world_size` decides. Below, each gradient is 4; rank 0 has five batches, rank 1 three. **Predict**
# rank 0's last two averages.

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
# By default DDP still divides by 2 when one rank is left, so every sample has the same weight. With `False`, it takes
# the mean over the ranks that still have data. If uneven data is a *mistake*, raise an error on all ranks:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(1, 1))
try:
    with ddp.join(throw_on_early_termination=True):
        for _ in range([5, 3][dist.get_rank()]):
            ddp(torch.ones(1, 1)).sum().backward()
except RuntimeError as error:
    print(error)

# %% [markdown]
# ### An evaluation on rank 0
#
# This is cause 2. There is no backward, so what does rank 0 wait for? For BatchNorm's buffers: the wrapper's forward
# broadcasts them, even in evaluation mode.

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
# Call `ddp.module(...)` instead, the plain model, which sends nothing:

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
# Now all ranks make the call, but with different tensors. If the sizes differ, gloo ends the process with exit code −6,
# without a Python error.

# %%
# %%ranks 2 --expect mismatch --quiet
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones([4, 8][dist.get_rank()]))  # BUG: the last batch of rank 0 is smaller

# %% [markdown]
# If the sizes are equal, **nothing complains.** Below, one rank swaps two tensors, and the job continues with wrong
# sums, although `DETAIL` is on.

# %%
# %%ranks 2 --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
a, b = torch.tensor(1.0), torch.tensor(10.0)
tensors = [a, b] if dist.get_rank() == 0 else [b, a]  # BUG: a different order, say from a set
for tensor in tensors:
    dist.all_reduce(tensor)
print(f"a = {a:.0f} (should be 2), b = {b:.0f} (should be 20)")
assert (a, b) == (11, 11)

# %% [markdown]
# gloo doesn't compare types either. Rank 1 receives into an integer tensor and gets the *bits* of rank 0's 1.0:

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1) if dist.get_rank() == 0 else torch.ones(1, dtype=torch.int32)
dist.broadcast(t, src=0)
print(t)

# %% [markdown]
# If a rank skips one collective, each of its later calls is paired with the wrong one. Here rank 1 skips a batch whose
# loss is NaN. To show the pairs, each rank sends its batch's number instead of a gradient:

# %%
# %%ranks 2 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for batch in range(4):
    if dist.get_rank() == 1 and batch == 1:
        continue  # BUG: "the loss is NaN, skip it", on this rank only
    met = torch.tensor(float(batch))
    dist.all_reduce(met)
    if met != 2 * batch:
        print(f"my batch {batch} met batch {met - batch:.0f}")

# %% [markdown]
# After the skip, every sum is wrong. The only complaint comes at the end, when rank 0 has no partner left.

# %%
quiz("03_debugging/swapped")

# %% [markdown]
# ## Silent divergence
#
# DDP makes the **replicas**, the ranks' copies of the model, equal in its constructor, and never looks at the
# parameters again. Replicas that start equal and take equal steps stay equal, *bit for bit*. So if a single bit
# differs, something bypassed DDP.
#
# In the picture, rank 1's learning rate doubles at step 4. The gradients are still averaged, and nothing raises an
# error:
#
# ![The weight is equal on both ranks until step 4; then rank 1's falls faster than rank 0's](pictures/drift.svg)

# %%
# %%writefile drift.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def verdict(model):
    """Do all ranks have the same checksum, the sum of all parameters as double?"""
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
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()

# %%
# %%ranks 2
from drift import *

model, optimizer, x = start()
for number in range(3):
    step(model, optimizer, x)
    print(f"after step {number + 1}: {verdict(model)}")

# %% [markdown]
# Here are four ways to make them differ. None raises an error.
#
# **Cast or moved after wrapping.** Changing the type or device silently removes DDP's hooks (chapter 1).

# %%
# %%ranks 2
from drift import *

model, optimizer, x = start()
model.double()  # BUG: after DDP(). By PyTorch's source, .to(another device) does the same harm
for number in range(2):
    step(model, optimizer, x)
    print(f"after step {number + 1}: {verdict(model)}")

# %% [markdown]
# **The wrapper bypassed, weights loaded on one rank, a different learning rate.** How far apart are the replicas before
# and after one step?

# %%
# %%ranks 2
from drift import *
from rank_spread import spread

model, optimizer, x = start()
for name in ("bypassed", "loaded on rank 0", "learning rate of rank 1"):
    model.module.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
    used = model.module if name == "bypassed" else model  # BUG: DDP's forward is never called
    if name == "loaded on rank 0" and dist.get_rank() == 0:
        nn.init.zeros_(model.module.weight)  # BUG: stands for load_state_dict after DDP(), on one rank
    elif name == "learning rate of rank 1" and dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.2  # BUG: a different settings file on that host
    before = spread(model.parameters())
    step(used, optimizer, x)
    print(f"{name:24} spread before: {before:.2f}   after: {spread(model.parameters()):.2f}")

# %% [markdown]
# In the second case, the step leaves them exactly as far apart as before: DDP averages gradients, not weights.
#
# `--watch-replicas`, for `%%ranks` and `./lockstep run`, checks any job as it is. It fingerprints every parameter after
# each `optimizer.step()`, without a collective, and says what bypassed DDP.

# %%
# %%ranks 3 --watch-replicas
from drift import *

model, optimizer, x = start()
for number in range(6):
    if number == 3 and dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.2  # BUG: a schedule that counts its own batches
    step(model, optimizer, x)

# %% [markdown]
# ### Lies that keep the replicas equal
#
# Even with equal replicas, a job can be wrong:
#
# | the lie | what gives it away |
# |---|---|
# | every rank reads the same samples | `len(loader)` is the same as on one process; with equal seeds, so are the gradients |
# | the same dropout masks on every rank | two ranks' masks are equal: they drew with the same seed |
# | the same order in every epoch | the first indices of two epochs are equal: `set_epoch` is missing |
# | rank 0's accuracy, reported for the whole job | the number covers only rank 0's samples |
# | samples counted twice in the evaluation | more samples were counted than the data set has |
# | running statistics of one rank's data | BatchNorm's buffers differ between ranks after a step |
#
# `--watch-replicas` finds the first of these if the seeds are equal:

# %%
# %%ranks 2 --watch-replicas
from drift import *

model, optimizer, x = start()
x = torch.ones(8, 4)  # BUG: no DistributedSampler, the same seed, the same batches
for number in range(4):
    step(model, optimizer, x)

# %% [markdown]
# BatchNorm's running statistics differ between ranks. **Predict** whether `--watch-replicas` reports them as drift.

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
# The parameters stay equal. The statistics differ after each step, until DDP overwrites them with rank 0's before the
# next forward (chapter 1).

# %%
quiz("03_debugging/equal_replicas")

# %% [markdown]
# ## Exercise: implement find_divergence
#
# *Medium, 60 minutes.* Open [`exercises/find_divergence.py`](../exercises/find_divergence.py).
#
# The checksum above says *that* replicas differ. Your tool says *which* tensor, on *which* ranks, by how much and since
# which step. While the ranks agree, it may send only a few bytes per tensor. A plain sum isn't enough: it stays the
# same if two values swap places, and the check swaps them.

# %%
contract("find_divergence")

# %%
# %check find_divergence

# %% [markdown]
# The solution is `solutions/find_divergence.py`.
#
# ## Devices
#
# "Expected all tensors to be on the same device" names two devices, but not your tensor. Here the device `meta` stands
# in for a GPU: its tensors have no values, and can't be mixed with CPU tensors. Which of the three calls fail?

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
# A plain `CrossEntropyLoss` holds no tensor, so there is nothing to move. With `weight=` it holds a buffer, which you
# must move.
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
# **Find the bug.** This check should tell you that a model is not on the GPU. What does it print if the model was never
# moved?

# %%
def diagnose(model, data, target):
    devices = {t.device for t in (*model.parameters(), *model.buffers(), data, target)}
    return "all on one device" if len(devices) == 1 else f"MISMATCH: {devices}"

model, x, y = nn.Linear(3, 3), torch.ones(1, 3), torch.ones(1)
print(diagnose(model, x, y))  # everything forgotten on the CPU

# %% [markdown]
# The check never asks which device was *wanted*. This one does, and still has a bug:

# %%
def verify_device(model, wanted):
    return next(model.parameters()).device == torch.device(wanted)  # BUG: looks at one of four

half = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
print("it says", verify_device(half, "meta"), "of", *[p.device for p in half.parameters()])

# %%
quiz("03_debugging/what_moves")

# %% [markdown]
# ## Exercise: implement device_report
#
# *Easy, 45 minutes.* Open [`exercises/device_report.py`](../exercises/device_report.py). Unlike the checks above, yours
# looks at every tensor.

# %%
contract("device_report")

# %%
# %check device_report

# %% [markdown]
# The solution is `solutions/device_report.py`.
#
# ## The network
#
# **The store cannot be reached.** The ranks meet at the store at `MASTER_ADDR:MASTER_PORT` (chapter 2). If the address
# is wrong or a firewall blocks the port, torch retries until the timeout, even if the connection is refused, so a
# blocked port looks like a slow start:

# %%
# %%writefile blocked.py
from datetime import timedelta
import torch.distributed as dist

try:
    # Nobody listens at port 1.
    dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=800))
except dist.DistError as error:
    print(type(error).__name__, "-", str(error).partition(".\n")[0])

# %%
job = subprocess.run([sys.executable, "blocked.py"], capture_output=True, text=True, timeout=200)
print(job.stdout)

# %% [markdown]
# **The interface is missing or wrong.** gloo uses the address that the host's own name resolves to. NCCL prefers
# interfaces named `ib…`, and avoids docker's and the loopback. `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` override
# these choices. A rank whose interface doesn't exist fails at once; the others wait for it:

# %%
# %%ranks 2 --expect raised --quiet
import os
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"  # BUG: this host has no such interface
dist.init_process_group("gloo")

# %% [markdown]
# **The launchers meet, the ranks don't.** The launchers meet at port 29500, but the ranks' own store and their
# connections use ports that the system chooses. Below, a firewall on the first of two hosts lets only port 29500
# through:

# %%
# %%writefile meet.py
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist

try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    print("node", os.environ["GROUP_RANK"], "is in the group")
except dist.DistError as error:
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
# One rank could not reach the ranks' store (`--master-port` sets its port). The other waits for an entry that the first
# would have written there. Neither message says "firewall".
#
# **If `init_process_group` fails, let it raise.** Then the launcher ends all ranks. This function catches the error
# instead:

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
        return False  # BUG: this rank carries on, the others wait

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
process_group_is_ready()

# %% [markdown]
# **A connection breaks later.** If a process *dies*, its connections close and the neighbors know at once. If a cable
# is *pulled* or a host freezes, nothing closes, and only the timeout reports it. A stopped process shows that on one
# machine:

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
# With NCCL a collective runs on the GPU. The call returns at once, and Python may be far ahead when the collective gets
# stuck. So the error doesn't come from your code, but from a thread inside torch, the **watchdog**. It checks every
# collective that was **enqueued** (handed to the GPU). If one takes longer than the group's timeout, the watchdog
# writes to the log and ends the process with SIGABRT, exit code −6.
#
# ### Read this log
#
# Four ranks train with DDP. The log is an example, shortened, in the wording of torch's `ProcessGroupNCCL.cpp`; ranks 2
# and 3 print the same as rank 0.
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
# Which rank do you investigate, and what do you already know about it?
#
# <details><summary>Answer</summary>
# Rank 1. Ranks 0, 2 and 3 have completed #1579 and enqueued up to #1582: #1580 is stuck, and Python ran ahead by two
# more. Rank 1 has completed everything that it enqueued, so its GPU and the network work, but it never called #1580.
# That call has 6,553,600 elements, 25 MiB of float32: a bucket, so the others are in backward. Rank 1 is elsewhere in
# Python, and its stack says where.
# </details>
#
# These two numbers tell you where to look after any timeout:
#
# | last enqueued, last completed | look at |
# |---|---|
# | one rank enqueued fewer | that rank's Python: data, branch, exception, a slow save |
# | all enqueued #N, none completed it | the arguments of #N on each rank (sizes, order), then network and GPUs |
# | all enqueued #N, some completed it | GPU and link of the ranks that did not (`nvidia-smi`, the driver's Xid errors in `dmesg`) |
#
# ### The flight recorder
#
# Each rank keeps its latest collectives (2000 in torch 2.13), with sizes, state and stack, in a ring buffer, the
# **flight recorder**. When the watchdog fires, every rank writes its buffer to a file, and `torchfrtrace` compares the
# files. The buffer works with gloo too, but you have to write the file yourself:

# %%
# %%writefile recorder.py
import pickle
import torch
import torch.distributed as dist

def write_buffer():
    """Write this rank's buffer to a file, as the watchdog does with NCCL."""
    trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    ranks = str(list(range(dist.get_world_size())))
    trace["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}  # empty with gloo
    with open(f"trace_{dist.get_rank()}", "wb") as file:
        pickle.dump(trace, file)
    last = trace["entries"][-1]
    said = f"rank {dist.get_rank()}: last was #{last['collective_seq_id']}, {last['profiling_name']}"
    print(said, flush=True)

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
os._exit(0)  # do not wait for the hang

# %%
command = [*TORCHRUN, "--nproc-per-node=3", "recorded.py"]
job = subprocess.run(command, capture_output=True, text=True, timeout=200)
print(*sorted(job.stdout.splitlines()), sep="\n")

# %% [markdown]
# All three ranks are at their third collective, but not at the same one. `torchfrtrace` finds that out:

# %%
command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "trace_", "."]
job = subprocess.run(command, capture_output=True, text=True, timeout=200)
for line in (job.stdout + job.stderr).splitlines():
    if line.startswith(("Collective sequence number", "input sizes", "error msg")):
        print(line)

# %% [markdown]
# It also prints the call's stack (not shown). With gloo, trust the sequence but not the state: an entry stays
# "scheduled" even after it has completed.
#
# `./lockstep explain trace_0 trace_1 trace_2` reads the same files and shows every rank's line. From Python:

# %%
from lockstep.commands import explain

explained = explain.main([Path("trace_0"), Path("trace_1"), Path("trace_2")], as_json=False)

# %% [markdown]
# `explain` also reads torchrun's `error.json` and the output of `py-spy dump`.
#
# ### The variables that matter
#
# NCCL and torch silently ignore variables they don't know, so check the spelling. These are torch's:
#
# | variable | what it does |
# |---|---|
# | `TORCH_NCCL_ASYNC_ERROR_HANDLING` | what the watchdog does after a timeout or error. The default, 3, ends the process; 0 leaves it hanging |
# | `TORCH_FR_BUFFER_SIZE` | entries in the flight recorder; 0 switches it off. Formerly `TORCH_NCCL_TRACE_BUFFER_SIZE` |
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1` | write the buffer at a timeout. Newer versions do so by default |
# | `TORCH_FR_DUMP_TEMP_FILE=/shared/trace_` | where to write it; the rank is appended. Choose a folder that survives the node |
# | `TORCH_NCCL_DESYNC_DEBUG=1` | after a timeout, print which ranks lag behind at which collective |
# | `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` | ends the process if the watchdog itself is stuck, for instance in a CUDA call; 480 by default |
#
# And these are NCCL's:
#
# | variable | what it does |
# |---|---|
# | `NCCL_DEBUG=INFO` | the log: versions, interfaces, rings. `WARN` is enough for errors |
# | `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV` | which parts of it; naming some hides the others, so keep `BOOTSTRAP` and `NET` |
# | `NCCL_DEBUG_FILE=nccl.%h.%p.log` | a file for each host and process. `%r` is **not** the rank: it is taken literally, so all ranks write one file, and `nccl_rank_0.log` never exists |
# | `NCCL_SOCKET_IFNAME=eth0` | a prefix; `=eth0` is exact, `^docker` excludes |
# | `NCCL_IB_DISABLE=1` | no InfiniBand. `=0` is the default and enables nothing |
# | `NCCL_P2P_DISABLE=1` | no direct traffic between GPUs. Slow; only to test whether that traffic is at fault |
# | `NCCL_TIMEOUT` | **does not exist**. The timeout is an argument of `init_process_group` |
#
# In NCCL's log, `Bootstrap: Using …` names the interface over which the ranks met; `NET/Socket` or `NET/IB` names what
# carries the data. `NET/Socket` on a cluster with InfiniBand means that InfiniBand is not used. On a cluster with
# Ethernet only, NCCL chooses sockets by itself; `NCCL_IB_DISABLE=1` and `NCCL_SOCKET_IFNAME` make it explicit.

# %%
quiz("03_debugging/watchdog_log")

# %% [markdown]
# ## Preflight
#
# Before the first step, a **preflight** checks the environment, joins the other ranks with a short timeout, lets
# `monitored_barrier` name missing ranks, and runs one collective whose answer is known.

# %%
quiz("03_debugging/preflight")

# %% [markdown]
# ## Exercise: implement preflight
#
# *Medium, 75 minutes.* Open [`exercises/preflight.py`](../exercises/preflight.py). Whatever is broken, `preflight` must
# return within its time limit.

# %%
contract("preflight")

# %%
# %check preflight

# %% [markdown]
# The solution is `solutions/preflight.py`. Start your next cluster job with it.
#
# ## Find the bug in the check
#
# Each of these five checks has a bug. Before you run one: what will it say about a **correct** job?
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
# The gradients were equal. The check overwrites them *after* backward, when nothing averages them any more. A check
# must not change what it checks: gather the gradients and compare them.
#
# **2. How much of a step is communication?** To know the answer, let a communication hook sleep for 50 ms before every
# all-reduce:

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
assert min(total) > 0.05  # in truth every step waits for the hook

# %% [markdown]
# Communication happens inside `backward`, so both times contain it, and the check reports 0 % on any network. Compare a
# step with the same step under `no_sync()` instead (chapter 4).
#
# **3. What is the speed-up?** This benchmark trains on rank 0 alone, then on all ranks.

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
# Measure one process in a separate run, and compare samples per second.
#
# **4. Is NCCL there?** The check is `torch.cuda.is_available() and torch.cuda.nccl.is_available()`. Without a GPU,
# Python stops after the first call. The second one can't work:

# %%
try:
    torch.cuda.nccl.is_available()
except TypeError as error:
    print(error)
assert isinstance(dist.is_nccl_available(), bool)  # the question to ask: it needs no GPU to answer

# %% [markdown]
# **5. Can the ranks talk?** Adding up the ranks is the right test, but this one never gets that far:

# %%
# %%ranks 2 --expect raised
import torch
import torch.distributed as dist

def test_communication():
    device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}")  # BUG: nobody imported os
    t = torch.ones(1).to(device) * dist.get_rank()
    dist.all_reduce(t)
    return t.item() == sum(range(dist.get_world_size()))

dist.init_process_group("gloo")
test_communication()

# %% [markdown]
# You find all five bugs by running the check on a correct job *and* on one with the fault that it looks for. Do both
# with every check that you write.

# %%
quiz("03_debugging/test_the_test")

# %% [markdown]
# ## Four shortcuts, and what they cost
#
# **"`find_unused_parameters=True`, just in case."** What does the flag cost if every parameter is used? Train the same
# model with and without it, in small buckets, and compare what rank 0 sends.

# %%
# %%writefile flag.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(flag):
    dist.init_process_group("gloo")
    layers = [nn.Linear(64, 64) for _ in range(4)]  # 8 parameter tensors
    ddp = DDP(nn.Sequential(*layers), find_unused_parameters=flag, bucket_cap_mb=0.02)
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
# Without the flag, DDP rebuilds its one bucket into two after the first backward. With the flag it **never rebuilds**
# them, and every backward adds an all-reduce of **4 bytes per parameter tensor** (32 here), by which the ranks agree on
# what was used. DDP also walks the whole graph. What this costs in time depends on the model and the network.
#
# Worse, a layer that is never used no longer raises an error. Use the flag only if different steps use different
# layers. It works even if the choice depends on the rank:

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
# `left` has a gradient of 1 on one of two ranks, so its mean is 0.5. `spare` has none anywhere and keeps `None`.
# Without the flag, the second step fails:

# %%
# %%ranks 2 --expect raised --quiet
from branches import *

ddp, branch = start()
for step in range(2):
    ddp(torch.ones(1, 2), branch).sum().backward()  # BUG: each rank leaves out other layers

# %% [markdown]
# **"Out of memory? A smaller batch."** Several ranks may be putting tensors on GPU 0, through a fixed `cuda:0` or a
# `torch.load` without `map_location`. If `nvidia-smi` shows one GPU much fuller than the others, the batch size is not
# the cause.
#
# **"It works on one node, so two nodes will work."** The second brings new addresses, interfaces and a firewall, and
# `LOCAL_RANK` no longer equals `RANK`. Run the preflight on two nodes first.
#
# **"It scales badly, so it must be the network."** Or the loader, a small batch, or one slow rank: a collective lasts
# until the last rank has joined. Measure (chapter 4) before you tune NCCL.

# %%
quiz("03_debugging/unused")

# %% [markdown]
# ## The clinic
#
# `exercises/clinic` holds your colleagues' broken jobs. Each is a short script with a complaint at the top, and runs on
# your laptop in a second or two:

# %%
from msgspec import toml

cases = toml.decode(Path("../autograder/clinic/cases.toml").read_text())
for name, case in cases.items():
    print(f"{name:18} {case['ranks']} ranks   {case['title']}")

# %% [markdown]
# For each case: **run** it, **look**, **answer** in the file (`CAUSE`, from the list in `exercises/clinic/README.md`,
# and `RANK`), **fix** it, and run `./lockstep check clinic/NAME`. Diagnosis and fix are both graded. A fix that only
# hides the symptom, such as a longer timeout, is rejected, and the check says why.
#
# Your ticket, a number drawn when you run your first case, decides which rank is at fault. Here is a case under ticket
# 1:

# %%
os.environ["CLINIC_TICKET"] = "1"
lockstep_run("-n", "3", "../exercises/clinic/short_shard.py")
del os.environ["CLINIC_TICKET"]  # from here on, yours again

# %% [markdown]
# You know this hang: the cause is `uneven-data`, the rank is 0. But the complaint asks you to keep all labelled
# records, so don't stop at the shortest shard. The check has a line for that:

# %%
# %check clinic/short_shard

# %% [markdown]
# For cases that finish with a wrong result, compare numbers: what `--watch-replicas` and your `find_divergence` report,
# the recorded collectives (`%%ranks 2 --into run`, then `run.collectives`), and the samples that each rank has seen.

# %%
quiz("03_debugging/longer_timeout")

# %% [markdown]
# ## Checklist
#
# - **Before**: a preflight, `@record` on `main`, a timeout longer than anything one rank does alone, `faulthandler` in
#   each step, `TORCH_FR_DUMP_TEMP_FILE` in a shared folder, `find_divergence` every few hundred steps.
# - **It failed**: the first failure that is not about a connection, and its exit code.
# - **It hangs**: a stack of every rank, or with NCCL its last enqueued and last completed. Look at the rank that is
#   elsewhere or enqueued fewer.
# - **It lies**: replicas equal bit for bit? Samples per rank, all-reduces per step, samples behind each number?
# - **Fixed**: on two ranks and on three? Is the result still right? Which test fails on the old version?
#
# ## Take it with you
#
# - One rank tests arithmetic, two test communication, three expose what two hide.
# - The loudest rank is rarely at fault. "Connection closed by peer" is an echo.
# - If parameters aren't equal bit for bit on all ranks, something bypassed DDP.
# - Whether a rank calls a collective must not depend on anything that differs between ranks.
# - Don't trust a check that you have never seen fail.
#
# In an interview, expect: "Your job hangs after the first epoch. What do you do?" Start with a question, not with a
# tool: where is each rank?
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
