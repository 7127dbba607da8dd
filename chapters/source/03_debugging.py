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
# A program that fails tells you where. Four processes that fail together tell you four things, mostly about each other,
# or nothing at all. This chapter follows one broken job from its symptom to a test that keeps it fixed. Then come the
# tools, one kind of failure at a time; you write three of them. The clinic at the end has 28 broken jobs for you.
#
# After this chapter you can
#
# - **shrink** a broken job to two ranks and a few steps;
# - **read** a failed launch: the root cause, its echoes, and a log of NCCL's watchdog;
# - **locate** a hang with a stack of every rank, a monitored barrier, or the flight recorder;
# - **find** the first step and the tensor at which replicas diverge, though nothing has complained;
# - **check** devices, environment and network before a long run;
# - **test** a fix, and test the test.
#
# About 240 minutes: 45 to read and run, 195 for three exercises and your first cases. You need chapter 2. No GPU is
# needed: what is said of NCCL and of GPUs comes from their source and documentation and was not run here.

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
# error."* The job has already been cut down to a linear layer and nine records, dealt out to the ranks in turn:

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
    """Print what `lockstep run arguments ...` says. (From a kernel it starts faster.)"""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        run_command(arguments)
    said = [line for line in error.getvalue().splitlines() if not line.startswith("As torchrun")]
    print(*sorted(out.getvalue().splitlines()), "\n".join(said).strip(), sep="\n")

lockstep_run("-n", "1", "suspect.py")

# %% [markdown]
# It works, which says little: a single process never waits for another. **One rank tests the arithmetic; two test the
# communication.**

# %%
lockstep_run("-n", "2", "suspect.py")

# %% [markdown]
# ### 2. Ask every rank where it is
#
# You have the hang on your laptop, after two seconds. Read the table: rank 0 is in backward, in its third gradient
# all-reduce. Rank 1 has left the loop and waits in the barrier. Neither call can complete without the other rank.
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
# Rank 0's third all-reduce has no partner. A good hypothesis also predicts something new: nine records divide evenly by
# three, so on three ranks the job should end.

# %%
lockstep_run("-n", "3", "suspect.py")

# %% [markdown]
# It does. So the bug depends on the number of ranks: test with two *and* three.
#
# ### 4. Fix the cause
#
# The final `barrier` did not help, and a longer timeout would only prolong the wait. In DDP's context `join()`, a rank
# that has run out of batches answers the collectives of the others:

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
# Run the job on one, two and three ranks; `lockstep run` returns 0 only if every rank ends well. Run the test on the
# broken version too: a test that you have never seen fail proves nothing.

# %%
def statuses(script):
    """The exit status on 1, 2 and 3 ranks."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [run_command(["-n", number, script]) for number in ("1", "2", "3")]

print("suspect.py:", statuses("suspect.py"))
print("fixed.py:  ", statuses("fixed.py"))

# %% [markdown]
# The 1 is the hang. In your own project, write it for pytest, with a deadline:
#
# ```
# @pytest.mark.parametrize("ranks", [1, 2, 3])
# def test_every_rank_finishes(ranks):
#     command = ["torchrun", f"--nproc-per-node={ranks}", "train.py", "--steps=5"]
#     assert subprocess.run(command, timeout=60).returncode == 0
# ```
#
# These five steps work for every bug in this chapter. If your job isn't this small yet, halve it: half the steps, random
# tensors instead of the loader, no optimizer. Which tool you need in step 2 depends on the symptom:
#
# | the job | you ask | section |
# |---|---|---|
# | **fails** | which rank failed first? | Reading failures |
# | **hangs** | in which call is each rank? | Hangs, Mismatches, NCCL on a cluster |
# | **lies**: the loss goes down, and is wrong | are the replicas equal? whose samples are in that number? | Silent divergence |
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
# Lockstep shows the cause and leaves out the echoes. torchrun only knows which process ended first. Here is a similar
# job, and what matters in torchrun's closing summary:

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
# The decorator `@record` put the error into the summary. Without it the summary says `To enable traceback see …`, and
# you search the interleaved output of all ranks. Put it on every `main`.
#
# **Read "Root Cause (first observed failure)" first.** The other ranks are listed as failures too, usually with exit
# code −15: torchrun ended them when the first one failed.
#
# | exit code | means |
# |---|---|
# | 1 | an exception; its text is in that rank's output, or in the summary with `@record` |
# | −15 | SIGTERM: torchrun stopped this rank because another had failed. An echo |
# | −9 | SIGKILL: on a cluster most often the kernel, because memory ran out |
# | −11 | SIGSEGV: a crash in compiled code |
# | −6 | SIGABRT: on GPUs most often NCCL's watchdog after a timeout ("NCCL on a cluster"); with gloo a size mismatch ("Mismatches"), or an abort at exit after the work was done (chapter 2) |
#
# ### The echo
#
# A rank that dies takes its connections with it, and its neighbours complain first. Here rank 1 of 4 is killed, as the
# kernel does when memory runs out. What do the other three print?

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
# Each survivor blames whichever process it was connected to, by address, not by rank. When that survivor exits, *its*
# neighbours blame it in turn. So, in a log of many ranks, take the first line in time that is not about a connection. If
# every line is about a connection, look for the rank that printed nothing.

# %%
quiz("03_debugging/echo")

# %% [markdown]
# ## Hangs
#
# A rank that waits prints nothing and raises nothing until the timeout: 30 minutes with gloo, 10 with NCCL. With NCCL
# the GPU even shows 100 % meanwhile, which looks like work. Nearly every hang is one sentence: **some ranks wait for a
# call that another rank never makes.**

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
# Lockstep reads the stacks of all ranks and counts their calls. The next tools do parts of that anywhere.
#
# ### A stack of every rank
#
# Python's own `faulthandler` prints the stack of its process after the given seconds, and the process goes on. Call it in
# each step of a training loop: every call restarts the clock, so it fires only when a step takes too long.

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
# Rank 0 is in `train`, rank 1 in `validate`. One file per rank keeps the stacks apart; on a shared stderr they
# interleave. If the job already runs without this line, `py-spy dump --pid N` reads a stack from outside (usually with
# `sudo`).
#
# ### A short timeout
#
# `init_process_group(..., timeout=timedelta(seconds=20))` turns a hang into an error. What does the error leave out?

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
# gloo's own `RuntimeError` doesn't mention rank 1: a short timeout ends the wait without explaining it. It must also
# exceed the longest thing that one rank does alone, such as writing a checkpoint.
#
# ### Who is missing: a monitored barrier
#
# `dist.monitored_barrier` is a barrier in which rank 0 checks off every rank. It needs gloo; a job on GPUs creates a
# second group for it with `dist.new_group(backend="gloo")`.

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
# It has limits in torch 2.13:
#
# - A rank that never arrives is found only when the timeout expires. But then rank 0 names it: DETAIL puts a monitored
#   barrier before each collective.
# - It compares kind, shape and type. Two tensors of equal shape in swapped order pass ("Mismatches").
# - With gloo and DDP, it crashes the process:

# %%
# %%ranks 2 --expect crashed --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2))

# %% [markdown]
# The way out that the message names avoids the crash, but a level set that late compares no collectives.
#
# `INFO` works with DDP. If a layer got no gradient, torch otherwise gives you parameter numbers; INFO adds their names:

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
# Note *when* it fails: in the second forward, for a gradient missing in the first backward. The traceback is one step
# late.
#
# ### The usual causes
#
# 1. The ranks have different numbers of batches (`suspect.py`).
# 2. A collective, a `barrier`, or a forward of the DDP wrapper is inside `if rank == 0`.
# 3. Each rank decides for itself: to stop early, to skip a batch, to take a branch.
# 4. One rank has died, or does something long alone.
# 5. The ranks never met ("The network").
# 6. One rank swallowed an exception and went on elsewhere.
#
# The fixes have one rule in common: **whether a collective is called must not depend on anything that differs between
# ranks.** If it must, let the ranks agree first, with one small all-reduce:

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
# You have three fixes. `DistributedSampler` pads the shards (chapter 2). Or the ranks agree on the smallest number of
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
# Or `join()`, which uses every sample. Its argument decides how much a late sample counts. Below, each gradient is 4;
# rank 0 has five batches and rank 1 three. Predict rank 0's last two averages.

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
# By default the divisor stays 2 when only one rank is left, so a late sample weighs as much as any other. With `False`,
# the mean is taken over the ranks that still have data. If uneven data is a *mistake* in your job, make it an error on
# all ranks:

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
# This is cause 2 in its most common form. There is no backward, so what could rank 0 wait for? The buffers of BatchNorm:
# the wrapper's forward broadcasts them, in an evaluation too.

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
# The fix is to call `ddp.module(...)`, the plain model, which sends nothing:

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
# Here all ranks make the call, with different tensors. What happens depends on the sizes. If they differ, gloo ends the
# process: no Python error, no traceback, exit code −6.

# %%
# %%ranks 2 --expect mismatch --quiet
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones([4, 8][dist.get_rank()]))  # BUG: the last batch of rank 0 is smaller

# %% [markdown]
# If the sizes are equal, **nothing happens at all.** Below, one rank swaps two tensors, and the job goes on with sums of
# the wrong things. `DETAIL` is on, and silent.

# %%
# %%ranks 2 --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
a, b = torch.tensor(1.0), torch.tensor(10.0)
tensors = [a, b] if dist.get_rank() == 0 else [b, a]  # BUG: another order, say from iterating over a set
for tensor in tensors:
    dist.all_reduce(tensor)
print(f"a = {a:.0f} (should be 2), b = {b:.0f} (should be 20)")
assert (a, b) == (11, 11)

# %% [markdown]
# gloo ignores types as well; four bytes are four bytes. Rank 1 receives into an integer tensor and reads the *bits* of
# rank 0's 1.0:

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1) if dist.get_rank() == 0 else torch.ones(1, dtype=torch.int32)
dist.broadcast(t, src=0)
print(t)

# %% [markdown]
# One skipped collective has the same effect: from then on, a rank's calls pair with later ones of the others. Here rank
# 1 skips a batch whose loss is NaN. The batch number stands in for the gradient, so you can see what is averaged:

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
# After the skip every average was wrong, and the only complaint comes at the end, when rank 0 has no partner left.

# %%
quiz("03_debugging/swapped")

# %% [markdown]
# ## Silent divergence
#
# DDP makes the replicas equal once, in its constructor. From then on it averages gradients and never looks at the
# parameters again. Replicas that start equal and take equal steps stay equal, *bit for bit*. That gives you a sharp
# test: if one bit of a parameter differs, something bypassed DDP.

# %%
# %%writefile drift.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def equal_everywhere(model):
    """True if all ranks have the same checksum: the sum of all parameters, as double."""
    own = sum(parameter.detach().double().sum() for parameter in model.parameters()).reshape(1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return all(torch.equal(one, own) for one in every)

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
    print(f"after step {number + 1}: {'equal' if equal_everywhere(model) else 'DIFFERENT'}")

# %% [markdown]
# Now four ways to break it. None of them raises an error.
#
# **Cast or moved after wrapping.** DDP attached its hooks to the parameters as they were. A change of type or device
# gives each parameter a new place for its gradient, and the hooks stay behind on the old one.

# %%
# %%ranks 2
from drift import *

model, optimizer, x = start()
model.double()  # BUG: after DDP(). By PyTorch's source, .to(another device) does the same harm
for number in range(2):
    step(model, optimizer, x)
    print(f"after step {number + 1}: {'equal' if equal_everywhere(model) else 'DIFFERENT'}")

# %% [markdown]
# **The wrapper bypassed, weights loaded on one rank, a different learning rate.** The same test finds all three. Which
# of them is different *before* the first step?

# %%
# %%ranks 2
from drift import *

model, optimizer, x = start()
for name in ("bypassed", "loaded on rank 0", "learning rate of rank 1"):
    model.module.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
    used = model.module if name == "bypassed" else model  # BUG: DDP's forward is never called
    if name == "loaded on rank 0" and dist.get_rank() == 0:
        nn.init.zeros_(model.module.weight)  # BUG: stands for load_state_dict after DDP(), on one rank
    elif name == "learning rate of rank 1" and dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.2  # BUG: a different settings file on that host
    before = equal_everywhere(model)
    step(used, optimizer, x)
    print(f"{name:24} equal before: {before!s:5}  equal after: {equal_everywhere(model)}")

# %% [markdown]
# `--watch-replicas`, for `%%ranks` and `./lockstep run`, does this to any job without a change to its code. It fingerprints
# every parameter after each `optimizer.step()` and says what bypassed DDP. It adds no collective; it costs one pass over
# the weights per step.

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
# Equal replicas don't yet make a correct job. All ranks may do the same work, or one rank's number may be reported as
# everyone's:
#
# | the lie | what gives it away |
# |---|---|
# | every rank reads the same samples | `len(loader)` is that of one process; with equal seeds, the gradients are equal too |
# | the same dropout masks on every rank | compare one mask between ranks; seed + rank is missing after wrapping |
# | the same order in every epoch | the first indices of two epochs are equal: `set_epoch` is missing |
# | rank 0's accuracy, reported as everyone's | count the samples behind the number |
# | samples counted twice in the evaluation | count again: 12 where there are 10 |
# | running statistics of one rank's data | BatchNorm's buffers differ between ranks after a step |
#
# The watch finds the first of these if the seeds are equal:

# %%
# %%ranks 2 --watch-replicas
from drift import *

model, optimizer, x = start()
x = torch.ones(8, 4)  # BUG: no DistributedSampler, the same seed, the same batches
for number in range(4):
    step(model, optimizer, x)

# %% [markdown]
# BatchNorm computes its statistics from each rank's own batch. Do the models diverge because of it? Predict what the
# watch says.

# %%
# %%ranks 2 --watch-replicas
from drift import *

def with_norm(layer):
    return DDP(nn.Sequential(layer, nn.BatchNorm1d(1)))

model, optimizer, x = start(with_norm)
x = x + 3 * dist.get_rank()  # very different data on the two ranks
for number in range(20):
    step(model, optimizer, x)
print("parameters", "equal" if equal_everywhere(model) else "DIFFERENT")

# %% [markdown]
# The parameters stay equal: every rank applies the same averaged gradient. The *running* statistics differ after each
# step, and DDP overwrites them with rank 0's before the next forward. What you lose is what the other ranks saw.

# %%
quiz("03_debugging/equal_replicas")

# %% [markdown]
# ## Exercise: implement find_divergence
#
# *Medium, 60 minutes.* Open `exercises/find_divergence.py`.
#
# The checksum above says *that* replicas differ. Your tool says *which* tensor, on *which* ranks, by how much and since
# which step. While all is well, it may send only a few bytes per tensor. Beware: a sum stays the same when two values are
# swapped, and the checks swap them.

# %%
contract("find_divergence")

# %%
# %check find_divergence

# %% [markdown]
# <details><summary>"… was permuted, and nothing was found"</summary>
# Your checksum ignores the order of the values. Use the bytes: a hash, or a sum weighted by position.
# </details>
#
# <details><summary>It hangs when a gradient is missing on one rank</summary>
# All ranks must pass tensors of the same size. Give a missing gradient its own checksum, such as a fixed number.
# </details>
#
# <details><summary>It reports that NaN differs from NaN</summary>
# Compare bits, not values: <code>nan != nan</code>.
# </details>
#
# The solution is `solutions/find_divergence.py`.
#
# ## Devices
#
# "Expected all tensors to be on the same device" is the most common error on GPUs. It names two devices, but not your
# tensor. Here the device `meta` stands in for a GPU: its tensors have a shape and no values, and refuse to mix with the
# CPU's. Which of these three calls fail?

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
# A plain `CrossEntropyLoss` holds no tensor, so there is nothing to move. With `weight=` it holds a buffer.
#
# `.to(device)` moves parameters and registered buffers, of the module and its children. A tensor in a plain attribute
# or in a list stays where it is:

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
# **Find the bug in this check.** It is meant to tell you that a model is not on the GPU. What does it print for a model
# that was never moved?

# %%
def diagnose(model, data, target):
    devices = {t.device for t in (*model.parameters(), *model.buffers(), data, target)}
    return "all on one device" if len(devices) == 1 else f"MISMATCH: {devices}"

model, x, y = nn.Linear(3, 3), torch.ones(1, 3), torch.ones(1)
print(diagnose(model, x, y))  # everything forgotten on the CPU

# %% [markdown]
# It never asks which device was *wanted*. The next one does:

# %%
def verify_device(model, wanted):
    return next(model.parameters()).device == torch.device(wanted)  # BUG: the first of four

half = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
print("it says", verify_device(half, "meta"), "of", *[p.device for p in half.parameters()])

# %%
quiz("03_debugging/what_moves")

# %% [markdown]
# ## Exercise: implement device_report
#
# *Easy, 45 minutes.* Open `exercises/device_report.py`. Yours looks at everything.

# %%
contract("device_report")

# %%
# %check device_report

# %% [markdown]
# <details><summary>"… is not in the report"</summary>
# Batches are nested: dictionaries in lists in dataclasses. Walk them with a function that calls itself, and pass the
# path along.
# </details>
#
# The solution is `solutions/device_report.py`.
#
# ## The network
#
# On one machine the network is always there. Between machines it is the first suspect, and it can stop a job in three
# places.
#
# **The store cannot be reached.** The ranks meet at a key-value store at `MASTER_ADDR:MASTER_PORT` (chapter 2). If the
# address is wrong or a firewall blocks the port, torch retries until the timeout, even if the connection is refused. So a
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
# interfaces named `ib…`, then any but docker's and the loopback. `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` override
# both. A name that doesn't exist fails at once on the ranks that have it; the others wait for them:

# %%
# %%ranks 2 --expect raised --quiet
import os
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"  # BUG: this host has no such interface
dist.init_process_group("gloo")

# %% [markdown]
# **The launchers meet, the ranks don't.** The launchers meet at port 29500. torchrun then opens the ranks' own store at
# a port that the system chooses, and the ranks connect to each other at more ports. "Port 29500 is open" is therefore
# half of what a firewall must allow. Here are two hosts, made on this machine for the moment; the first one's firewall
# lets only port 29500 through:

# %%
# %%writefile meet.py
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist

try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    print("node", os.environ["GROUP_RANK"], "is in the group")
except dist.DistError as error:
    print(type(error).__name__, str(error).partition(".\n")[0])
sys.stdout.flush()
os._exit(0)

# %% tags=["needs-hosts"]
import re
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
        print(*sorted(re.sub(r"\d{5}\b", "PORT", line) for line in said), sep="\n")
except ranks.NotRun as missing:
    print("not run:", missing)

# %% [markdown]
# One rank could not reach the ranks' store, at a port that appears in no setting (`--master-port` would choose it). The
# other waits for the address which that rank would have written there. Neither message says "firewall".
#
# **If meeting fails, let it raise.** Then the launcher ends all ranks. This function catches the error instead:

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
        return False  # BUG: this rank goes home, the others wait

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
process_group_is_ready()

# %% [markdown]
# **A connection breaks later.** If a process *dies*, its connections close and the neighbours know within milliseconds.
# If a cable is *pulled* or a host freezes, nothing closes, and only the timeout reports it. A stopped process is the
# nearest thing on one machine:

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
# stuck, so no Python line raises the error. A thread inside torch does, the **watchdog**. It checks every collective that
# was **enqueued** (handed to the GPU). When one takes longer than the group's timeout, the watchdog writes to the log and
# ends the process with SIGABRT, exit code −6.
#
# ### Read this log
#
# Four ranks train with DDP. The log was composed for this chapter with the wording of torch's `ProcessGroupNCCL.cpp`,
# shortened. Ranks 2 and 3 print the same as rank 0.
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
# Which rank do you investigate, and what do you already know about it? Decide before you open the answer.
#
# <details><summary>Answer</summary>
# Rank 1, the only one without its own timeout. Write down last enqueued and last completed for each rank. Ranks 0, 2
# and 3 have 1582 and 1579: #1580 never completed, and they ran ahead by two more. Rank 1 has 1579 and 1579: it completed
# everything it called and never called #1580. So its GPU and the network work. #1580 has 6,553,600 elements, 25 MiB of
# float32: a bucket, so the others are in backward. Rank 1 is elsewhere in Python. Its stack says where.
# </details>
#
# The same two numbers sort every timeout:
#
# | last enqueued, last completed | look at |
# |---|---|
# | one rank enqueued fewer | that rank's Python: data, branch, exception, a slow save |
# | all enqueued #N, none completed it | the arguments of #N on each rank (sizes, order), then network and GPUs |
# | all enqueued #N, some completed it | the others' GPU (`nvidia-smi`, Xid errors of the driver in `dmesg`) and link |
#
# ### The flight recorder
#
# The **flight recorder** knows more: each rank keeps its latest collectives (2000 in torch 2.13) in a ring buffer, with
# sizes, state and stack. When the watchdog fires, every rank writes its buffer to a file, and the tool `torchfrtrace`
# compares the files. With gloo the buffer works too, but you write the file yourself:

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
# All three are at their third collective, and it is not the same one. `torchfrtrace` draws the conclusion:

# %%
command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "trace_", "."]
job = subprocess.run(command, capture_output=True, text=True, timeout=200)
for line in (job.stdout + job.stderr).splitlines():
    if line.startswith(("Collective sequence number", "input sizes", "error msg")):
        print(line)

# %% [markdown]
# It also prints the call's stack (not shown). With gloo, trust the sequence, not the state: an entry stays "scheduled"
# even after it has completed.
#
# ### The variables that matter
#
# NCCL and torch ignore variables they don't know, without a warning, so check the spelling. torch's own:
#
# | variable | what it does |
# |---|---|
# | `TORCH_NCCL_ASYNC_ERROR_HANDLING` | what the watchdog does after a timeout or error. The default, 3, ends the process; 0 leaves it hanging |
# | `TORCH_FR_BUFFER_SIZE` | entries in the flight recorder; 0 switches it off. Formerly `TORCH_NCCL_TRACE_BUFFER_SIZE` |
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1` | write the buffer at a timeout. Newer versions do so by default |
# | `TORCH_FR_DUMP_TEMP_FILE=/shared/trace_` | where to; the rank is appended. Choose a folder that survives the node |
# | `TORCH_NCCL_DESYNC_DEBUG=1` | after a timeout, print which ranks lag behind at which collective |
# | `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` | ends the process if the watchdog itself is stuck, for instance in a CUDA call; 480 by default |
#
# NCCL's own:
#
# | variable | what it does |
# |---|---|
# | `NCCL_DEBUG=INFO` | the log: versions, interfaces, rings. `WARN` is enough for errors |
# | `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV` | which parts of it; naming some hides the others, so keep `BOOTSTRAP` and `NET` |
# | `NCCL_DEBUG_FILE=nccl.%h.%p.log` | a file for each host and process. `%r` is **not** the rank: it is taken literally, so all ranks write one file, and `nccl_rank_0.log` never exists |
# | `NCCL_SOCKET_IFNAME=eth0` | a prefix; `=eth0` is exact, `^docker` excludes |
# | `NCCL_IB_DISABLE=1` | no InfiniBand. `=0` is the default and enables nothing |
# | `NCCL_P2P_DISABLE=1` | no direct traffic between GPUs. Slow: to test whether that is the culprit |
# | `NCCL_TIMEOUT` | **does not exist**. The timeout is an argument of `init_process_group` |
#
# In NCCL's log, `Bootstrap: Using …` names the interface over which the ranks met; `NET/Socket` or `NET/IB` carries the
# data. `NET/Socket` on a cluster with InfiniBand means that you train over sockets. On a cluster with Ethernet only, NCCL
# finds that out by itself; `NCCL_IB_DISABLE=1` and `NCCL_SOCKET_IFNAME` make it explicit.

# %%
quiz("03_debugging/watchdog_log")

# %% [markdown]
# ## Preflight
#
# Most of this can be checked in a second, before the first step. A **preflight** checks the environment, meets the other
# ranks with a short timeout, lets `monitored_barrier` name the missing ones, and runs one collective whose answer is
# known.

# %%
quiz("03_debugging/preflight")

# %% [markdown]
# ## Exercise: implement preflight
#
# *Medium, 75 minutes.* Open `exercises/preflight.py`. Whatever is broken, it must return within its time: a preflight
# that hangs is one more hang.

# %%
contract("preflight")

# %%
# %check preflight

# %% [markdown]
# <details><summary>"… still waited after the time was over"</summary>
# Every wait needs its own timeout: the store's, the group's, the barrier's. The default of each is minutes.
# </details>
#
# <details><summary>A rank is missing, and the others do not say which</summary>
# Only rank 0 gets the list from <code>monitored_barrier</code>. It can tell the others through the store.
# </details>
#
# The solution is `solutions/preflight.py`. Start your next cluster job with it.
#
# ## Find the bug in the check
#
# Tests are programs, so they have bugs too. Each of these five checks has one. Before you run it: what will it say about a
# **correct** job?
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
# The gradients were equal. The check overwrites them *after* backward, when nothing averages them any more. A check must
# only look: gather the gradients and compare.
#
# **2. How much of a step is communication?** So that you know the answer, a communication hook (it replaces DDP's
# all-reduce of a bucket) sleeps 50 ms first.

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
# `backward` contains the communication, so both intervals do, and their difference is zero on any network. Time a step
# against the same step under `no_sync()` instead (chapter 4).
#
# **3. What is the speed-up?** It trains on rank 0 alone, then on all.

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
# **4. Is NCCL there?** The check is `torch.cuda.is_available() and torch.cuda.nccl.is_available()`. On a machine without
# a GPU it raises nothing, because the second call is never made. Make it:

# %%
try:
    torch.cuda.nccl.is_available()
except TypeError as error:
    print(error)
assert isinstance(dist.is_nccl_available(), bool)  # the question to ask: it needs no GPU to answer

# %% [markdown]
# **5. Can the ranks talk?** The sum of the ranks is the right question.

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
# All five have one thing in common: they were never run on a correct job *and* on one that was broken in the way they look
# for. Do both with every check that you write.

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
# Without the flag, the first backward sends everything at once; then DDP rebuilds the buckets, two per step here. With
# the flag the buckets are **never rebuilt**, and every backward adds an all-reduce of **4 bytes per parameter tensor**
# (32 here), in which the ranks agree on what was used. It also walks the whole graph. What share of a step that takes
# depends on the model and the network.
#
# The larger cost: "this layer is never used" is no longer an error. Use the flag only if different steps use different
# layers. Then it works even if the branch depends on the rank:

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
# Each rank's gradient is 1. `left` was used on one of two ranks, so its mean is 0.5. `spare` was used on none and keeps
# no gradient. Without the flag, the second step fails:

# %%
# %%ranks 2 --expect raised --quiet
from branches import *

ddp, branch = start()
for step in range(2):
    ddp(torch.ones(1, 2), branch).sum().backward()  # BUG: each rank leaves out other layers

# %% [markdown]
# **"Out of memory? A smaller batch."** That may help, and hide the cause: ranks that put tensors on GPU 0, through a
# fixed `cuda:0` or a `torch.load` without `map_location`. Look at `nvidia-smi` first: if one GPU is much fuller than the
# others, the batch size is not the cause.
#
# **"It works on one node, so two nodes will work."** Two nodes bring other addresses, other interfaces and a firewall,
# and `LOCAL_RANK` no longer equals `RANK`. Run the preflight on two nodes before the job.
#
# **"It scales badly, so it must be the network."** Or the loader, the batch, or one slow rank that all others wait for: a
# collective's duration includes waiting for the last rank. Measure (chapter 4) before you tune NCCL.

# %%
quiz("03_debugging/unused")

# %% [markdown]
# ## The clinic
#
# `exercises/clinic` holds jobs that colleagues have brought in. Each is a short script with a complaint at the top, and
# each runs on your laptop in a second or two:

# %%
from msgspec import toml

cases = toml.decode(Path("../autograder/clinic/cases.toml").read_text())
for name, case in cases.items():
    print(f"{name:18} {case['ranks']} ranks   {case['title']}")

# %% [markdown]
# For each case: **run** it, **look**, **answer** in the file (`CAUSE`, from the list in `exercises/clinic/README.md`, and
# `RANK`), **fix** it, and run `./lockstep check clinic/NAME`. Both the diagnosis and the fix are graded. A fix that only
# hides the symptom, such as a longer timeout, is rejected, and the check says why.
#
# Which rank is at fault depends on your ticket, a number drawn when you run your first case. Here is one case under
# ticket 1:

# %%
os.environ["CLINIC_TICKET"] = "1"
lockstep_run("-n", "3", "../exercises/clinic/short_shard.py")
del os.environ["CLINIC_TICKET"]  # from here on, yours again

# %% [markdown]
# You know this hang: the cause is `uneven-data`, the rank is 0. But not every fix from "Hangs" is right here. "As many
# steps as the shortest shard" throws away labelled records, and the complaint asks you to keep them. The check notices:

# %%
# %check clinic/short_shard

# %% [markdown]
# Some cases fail loudly; most don't. For those that lie, look at numbers: `--watch-replicas`, your `find_divergence`, the
# recorded collectives (`%%ranks 2 --into run`, then `run.collectives`), the samples that each rank has seen.

# %%
quiz("03_debugging/longer_timeout")

# %% [markdown]
# ## Checklist
#
# - **Before**: a preflight, `@record` on `main`, a timeout longer than anything one rank does alone, `faulthandler` in
#   each step, `TORCH_FR_DUMP_TEMP_FILE` in a shared folder, `find_divergence` every few hundred steps.
# - **It failed**: the first failure that is not about a connection, and its exit code.
# - **It hangs**: a stack of every rank, or last enqueued and last completed. Which rank is elsewhere?
# - **It lies**: replicas equal bit for bit? Samples per rank, all-reduces per step, samples behind each number?
# - **Fixed**: on two ranks and on three? Does the job still compute what was meant? Which test fails on the old version?
#
# ## Take it with you
#
# - One rank tests arithmetic, two test communication. Add a run on three: on two, a 2 that should be N looks right.
# - The loudest rank is rarely at fault. "Connection closed by peer" is an echo.
# - A hang is a difference: find the rank that is elsewhere, and what it did before.
# - NCCL's watchdog gives you two numbers per rank. The rank that enqueued fewer is the one to look at.
# - Parameters are equal bit for bit on all ranks, or something bypassed DDP.
# - Whether a collective is called must not depend on anything that differs between ranks.
# - A check that was never seen to fail is not a check.
#
# In an interview, expect: "Your job hangs after the first epoch. What do you do?" Don't list tools. Say the question
# behind them: which rank is where, and what does it do differently?
#
# ## What to read next
#
# Chapter 4 makes the job fast. On debugging, PyTorch has a section "Debugging torch.distributed applications" in
# `pytorch.org/docs/stable/distributed.html`, its list of `TORCH_NCCL_*` variables
# (`pytorch.org/docs/stable/torch_nccl_environment_variables.html`), and a tutorial on the flight recorder
# (`pytorch.org/tutorials/unstable/flight_recorder_tutorial.html`). NVIDIA's NCCL user guide has "Environment variables"
# and "Troubleshooting".

# %%
from lockstep.notebook.course_map import course_map

course_map("03_debugging")
