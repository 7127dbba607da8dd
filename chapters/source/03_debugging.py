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
# A single program that fails says where. Four programs that fail together say four things, most of them about each
# other, and often nothing at all. This chapter is about looking at such a job and naming *what* happened, on *which
# rank*, at *which line*. You write three small tools for it and keep them. Then comes the clinic: broken jobs to
# diagnose and mend.
#
# After this chapter you can
#
# - **shrink** a broken job to two ranks and a few steps, and tell a hang from a failure from a lie;
# - **read** a failed launch: the root cause, its echoes, and the messages that blame the wrong neighbour;
# - **locate** a hang with a stack of every rank, a monitored barrier, the flight recorder;
# - **find** the first step and the tensor where replicas part, though nothing has complained;
# - **check** devices, environment and network before a long run, not after it;
# - **test** the tests: several debugging helpers that circulate on the web do not work, and you will see why.
#
# About 125 minutes: 50 to read and run, 75 for three exercises and your first cases. You need chapter 2. No GPU: where a
# statement is about GPUs or NCCL, it says so, and says that it was not run here.

# %%
# %load_ext lockstep
import os, subprocess, sys
from pathlib import Path
import torch
import torch.distributed as dist
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

# %% [markdown]
# ## The method
#
# Distributed jobs fail in three ways, and each is looked at differently:
#
# | it | you see | you ask |
# |---|---|---|
# | **fails** | an error, or many | which rank was first? |
# | **hangs** | nothing | where does each rank stand? |
# | **lies** | a loss that goes down | are the replicas still equal? are the numbers everybody's? |
#
# Whichever it is, first make it small: few ranks, a toy model, a few steps, CPU. Almost every mistake in this chapter
# survives that. What hardly any of them survives is *one* rank, which is where debugging usually begins. Here is a
# job; nine records are dealt out to the ranks.

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
    print(f"rank {rank} is through")
    dist.barrier()

main()

# %% [markdown]
# `./lockstep run` takes torchrun's options and explains what goes wrong. One rank:

# %%
import contextlib, io
from lockstep import running

def lockstep_run(*arguments):
    """Print what `lockstep run arguments ...` says. (From a kernel it starts faster.)"""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        running.main(arguments)
    said = [line for line in error.getvalue().splitlines() if not line.startswith("As torchrun")]
    print(*sorted(out.getvalue().splitlines()), "\n".join(said).strip(), sep="\n")

lockstep_run("-n", "1", "suspect.py")

# %% [markdown]
# And two:

# %%
lockstep_run("-n", "2", "suspect.py")

# %% [markdown]
# A single process has nobody to wait for. **A job that works on one rank is a job whose arithmetic works**, and
# nothing is known of its communication. Two ranks on a laptop show most of the rest. Try three as well: with two, a 2 that
# should be N comes out right by accident. Neither number is enough alone: nine records go evenly into three ranks, and this
# job runs with three.
#
# From there on, halve. Half the steps: does it still happen? Without the data loader, with random tensors of the same
# shapes? Without the optimizer? Each answer takes a second, and at the end ten lines are left that you can read. The
# few lines of `main` above are what is left of a data set whose last shard was short.

# %%
quiz("03_debugging/one_rank")

# %% [markdown]
# ## Reading failures
#
# Rank 2 meets a bad record, and the others lose their connection to it:

# %%
# %%ranks 4 --expect raised
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
record = [1.0, 2.0, None, 4.0][dist.get_rank()]
t = torch.tensor(record)
dist.all_reduce(t)

# %% [markdown]
# Lockstep shows the cause and leaves out the echoes. torchrun does not know the cause; it knows which process ended
# first. Here is a smaller job of the same kind under torchrun, on two ranks, and the end of what it prints, shortened:

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
import re

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

def torchrun(*arguments):
    """Run torchrun and print what its closing summary says of the root cause."""
    job = subprocess.run([*TORCHRUN, *arguments], capture_output=True, text=True, timeout=55)
    summary = job.stderr[job.stderr.find("Root Cause") :]
    for name in ("rank", "exitcode"):
        print(name, ":", re.search(rf"{name} +: (-?\d+)", summary).group(1))
    print("traceback :", *re.findall(r"^ *(?:\w+Error:|To enable).*", summary, re.MULTILINE)[-1:])
    return job

job = torchrun("--nproc-per-node=2", "bad_record.py")

# %% [markdown]
# `@record`, the decorator, is what put the error into the summary. Without it the last line reads `To enable
# traceback see …`, and you search the interleaved outputs for it. Put it on every `main`.
#
# In that summary, **read "Root Cause (first observed failure)" and nothing else at first.** The other ranks are
# listed as failures too. With `exitcode : -15` they were ended by torchrun itself, which stops everybody when one has
# failed.
#
# | exit code | means |
# |---|---|
# | 1 | an exception; its text is in the output of that rank, or in the summary with `@record` |
# | −15 | SIGTERM: torchrun stopped this rank because another had failed. An echo |
# | −9 | SIGKILL: somebody killed it; on a cluster most often the kernel, because memory was out |
# | −11 | SIGSEGV: a crash in compiled code |
# | −6 | SIGABRT: compiled code gave up, for instance gloo on a size mismatch (below), or the interpreter's teardown after good work (chapter 2, "Cleanup") |
#
# ### The echo
#
# A rank that dies takes its connections with it, and the neighbours notice before anybody else. Here rank 1 of 4 is
# killed, as the kernel does when memory runs out, and the others go on to their next all-reduce. What they print:

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
    echo = "Connection closed by peer" in said or "Connection reset by peer" in said
    print(f"rank {dist.get_rank()}: {'a connection was closed' if echo else said}", flush=True)
    os._exit(1)

# %%
lockstep_run("-n", "4", "killed.py")

# %% [markdown]
# For a closed connection gloo's text goes on: "This is typically caused by a remote worker crashing. Check the logs
# of the remote worker". It names an address, not a rank. It is right, and it comes from the wrong rank: each survivor
# blames whoever it was connected to, and when one survivor leaves, *its* neighbours blame the survivor. **The loud
# ranks are seldom the guilty one.** The guilty one is the rank that says nothing, or something else.
#
# So, with a log of many ranks before you: sort by time, take the first line that is not about a connection. And where
# nobody says anything but connections, look for the rank that is missing.

# %%
quiz("03_debugging/echo")

# %% [markdown]
# ## Hangs
#
# With gloo, a rank that waits does not use the processor (with nccl the GPU shows 100 %, which looks like work). It
# prints nothing and raises nothing until a timeout that is 30 minutes away with gloo and 10 with nccl. Nearly every
# hang is one sentence: **some ranks wait for a call that another does not make.** So ask each rank where it stands.

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
# Lockstep has looked at the stacks of all ranks and at what each had called so far, and was sure after a second that
# nothing could move any more. You can do that by hand, on any cluster.
#
# ### A stack of every rank
#
# `faulthandler` is in Python's library. One line in the script, and after so many seconds every rank prints where it
# stands, once, and goes on waiting. In a training loop, call it in each step: every call starts the clock anew, so it
# goes off only when a step takes too long:

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
faulthandler.dump_traceback_later(1 + dist.get_rank())  # +  in turn; in a loop: 600, in each step
validate() if dist.get_rank() == 1 else train()

# %%
command = [*TORCHRUN, "--nproc-per-node=2", "stacks.py"]
job = subprocess.run(command, capture_output=True, text=True, timeout=55)
for found in sorted(set(re.findall(r"line \d+ in (?:train|validate)\b", job.stderr))):
    print(found)

# %% [markdown]
# Two ranks, two places: that is the hang. For a job that runs already and has no such line, `py-spy dump --pid N`
# reads the stack of a process from outside, without ending it; it needs the right to trace (usually `sudo`).
#
# ### A short timeout
#
# `init_process_group(..., timeout=timedelta(seconds=20))` turns a hang into an error. Read what the error says, and
# what it does not:

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
# The `RuntimeError` is gloo's own: the time, and a `recv operation`. Not a word about rank 1. A short timeout ends
# the waiting, it does not explain it. It also must be longer than what any rank does alone: while rank 0 writes a
# checkpoint for a minute, 20 seconds are too few.
#
# ### Who is missing: a monitored barrier
#
# `dist.monitored_barrier` is a barrier in which rank 0 keeps a list. gloo has it, nccl does not; a job on GPUs makes
# itself a second group with `dist.new_group(backend="gloo")` for it.

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
# With `wait_all_ranks=True` it names everybody who is missing, without it the first. Rank 0 has the list. Rank 3,
# which was there, raised as well; its message (not shown) only says to look at rank 0's. It costs a round trip to every rank, so it belongs before the
# first step, after each checkpoint, at the end of an epoch; not in the loop.
#
# ### What TORCH_DISTRIBUTED_DEBUG does, and what it does not
#
# With `DETAIL`, every collective is compared between the ranks before it runs:

# %%
# %%ranks 2 --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
try:
    dist.all_reduce(torch.ones(4 + dist.get_rank()))  # BUG: 4 elements on rank 0, 5 on rank 1
except RuntimeError as error:
    first, _, rest = str(error).partition("Rank ")
    print(first + "…", rest[rest.find("Collectives differ") :], sep="\n")

# %% [markdown]
# The full text has the kind, shape and type that each rank brought. It is the best message torch has. Its limits, all
# of torch 2.13:
#
# - A rank that never comes is found only when the timeout is over. But then rank 0 names it: DETAIL puts a monitored
#   barrier before each collective.
# - It compares kind, shape and type. Two tensors of the same shape in swapped order pass (see "Mismatches"), and so
#   does another reduce operation.
# - With gloo and DDP it crashes the process:

# %%
# %%ranks 2 --expect crashed --env TORCH_DISTRIBUTED_DEBUG=DETAIL
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2))

# %% [markdown]
# The way out that is named there avoids the crash only: with the level set afterwards, collectives are not compared.
#
# `INFO` does work with DDP. Beside "Parameter indices which did not receive grad for rank 0: 2 3" it tells the names, which is
# what you want when a layer was not used:

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
# Note *when* it fails: in the second forward, for something that was missing in the first backward. The line of the
# traceback is one step late.
#
# ### The flight recorder
#
# Every rank keeps its latest collectives in a ring buffer, 2000 of them in torch 2.13; `TORCH_FR_BUFFER_SIZE` changes
# how many, and 0 switches it off. With nccl it is written to a file when a collective times out, and a tool
# (`torchfrtrace`) compares the files of all ranks; that was not run here. The buffer itself also works with gloo, and
# answers the decisive question, *how far did each rank get*:

# %%
# %%ranks 3 --env TORCH_FR_BUFFER_SIZE=100
import json
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(2):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() != 1:
    dist.all_reduce(torch.ones(1), async_op=True)  # rank 1 does not come
trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
last = trace["entries"][-1]
print("last was", last["profiling_name"], "number", last["collective_seq_id"], last["input_sizes"])

# %% [markdown]
# Ranks 0 and 2 are in their third, rank 1 has seen two. Only the sequence is to be trusted: with gloo an entry stays
# "scheduled" even after it has completed.
#
# ### The usual causes
#
# 1. The ranks do not have equally many batches (`suspect.py`).
# 2. A collective, a `barrier`, or a forward of the DDP wrapper stands under `if rank == 0`. (That forward may send
#    something itself: buffers, and in the second step the new order of the buckets. The backward after it always does.)
# 3. Each rank decides by itself: to stop early, to skip a batch, to take a branch.
# 4. One rank has died, or does something long alone.
# 5. The ranks have not met at all: chapter 2, "When the numbers are wrong".
# 6. An exception was swallowed on one rank, which then went on elsewhere.
#
# The mends have one thing in common: **whether a collective is called must depend on nothing that differs between the
# ranks.** Where it must, let the ranks agree first, with one small all-reduce:

# %%
# %%ranks 3
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.tensor([0.5, float("nan"), 0.4][dist.get_rank()])
bad = torch.tensor(float(loss.isnan()))
dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # one number, and everybody knows
print("all skip this batch" if bad else "all train on it")

# %% [markdown]
# ### Uneven numbers of batches
#
# The first cause in the list is the commonest. A `barrier` at the end of the epoch does not help: `suspect.py` had one,
# and hung all the same. Three mends. The sampler pads (chapter 2, "Sharding"). Or the ranks agree on the smallest number
# before the loop, and drop the rest:

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
print("through after", steps.item(), "steps")

# %% [markdown]
# Or `ddp.join()`: a rank that is through goes on joining the others' collectives, with nothing. Every sample counts, and
# an argument decides how much. Each gradient here is 4, rank 0 has five batches and rank 1 three:

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
    print(f"divide_by_initial_world_size={initial}:", *gradients, end="   ")

# %% [markdown]
# By default the divisor stays 2 when only one rank is left: a late sample weighs as much as every other, and the step is
# half the size. With `False` it is the mean over those who are still there. And where uneven is a *mistake*, let it be
# one, on all ranks:

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
# The second cause in its commonest form. There is no backward here, so what is there to wait for? The buffers of
# BatchNorm, which a forward of the wrapper sends, in an evaluation too:

# %%
# %%ranks 2 --expect hang
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
ddp(torch.randn(4, 2)).sum().backward()
ddp.eval()
if dist.get_rank() == 0:
    with torch.no_grad():  # as in an evaluation; else this forward would also rebuild the buckets
        ddp(torch.randn(4, 2))  # BUG: with buffers, a forward is a collective
dist.barrier()

# %% [markdown]
# `ddp.module(...)` is the plain model and sends nothing:

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
print("through")

# %%
quiz("03_debugging/never_joined")

# %% [markdown]
# ## Mismatches
#
# All ranks come, and bring different things. What happens then depends on the sizes. Different sizes: gloo ends the
# process. No Python error, no traceback, exit code −6.

# %%
# %%ranks 2 --expect mismatch --quiet
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones([4, 8][dist.get_rank()]))  # BUG: the last batch of rank 0 is smaller

# %% [markdown]
# Equal sizes: **nothing at all.** Two tensors change places on one rank, and the job goes on with sums of the wrong
# things. `DETAIL` is on, and silent.

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
# gloo does not look at types either. Four bytes are four bytes: rank 1 receives into an integer tensor, and reads the
# *bits* of rank 0's 1.0.

# %%
# %%ranks 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(1) if dist.get_rank() == 0 else torch.ones(1, dtype=torch.int32)
dist.broadcast(t, src=0)
print(t)

# %% [markdown]
# The same happens without any mistake in the order of your lines, when one rank leaves out a collective: from then on
# its calls pair with later ones of the others. A rank that skips a batch because its loss is NaN averages its third
# gradient with everybody's second. Batch numbers travel along here, so that you can see it:

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
# Every gradient after the skip was wrong, and the only complaint comes at the end, when one rank has nobody left to
# meet. Another all-reduce of one number on both ranks would only have moved the complaint one call further.

# %%
quiz("03_debugging/swapped")

# %% [markdown]
# ## Silent divergence
#
# DDP makes the replicas equal once, in its constructor. Afterwards it averages gradients and sends buffers, and never looks
# at the parameters again. Replicas that start equal and take equal steps stay equal, *bit for bit*. So there is a sharp
# test: if one bit of a parameter differs, something went past DDP.

# %%
# %%writefile drift.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def equal_everywhere(model):
    """True where all ranks have the same checksum: the sum of all parameters, as double."""
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
# Now four ways for replicas to part. None of them raises an error.
#
# **Cast, or moved, after wrapping.** DDP hung its hooks on the parameters as they were. A change of type (or device)
# gives them new places for their gradients, and the hooks hang on the old ones.

# %%
# %%ranks 2
from drift import *

model, optimizer, x = start()
model.double()  # BUG: after DDP(). .to(another device) does the same harm, by PyTorch's source
for number in range(2):
    step(model, optimizer, x)
    print(f"after step {number + 1}: {'equal' if equal_everywhere(model) else 'DIFFERENT'}")

# %% [markdown]
# **The wrapper bypassed, weights loaded on one rank, another learning rate.** The same test finds them all. Your turn
# to predict: which of the three is different *before* the first step?

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
        optimizer.param_groups[0]["lr"] = 0.2  # BUG: another settings file on that host
    before = equal_everywhere(model)
    step(used, optimizer, x)
    print(f"{name:24} equal before: {before!s:5}  equal after: {equal_everywhere(model)}")

# %% [markdown]
# `./lockstep run --watch-replicas` (or `%%ranks --watch-replicas`) does this to any job, without a line in it: it
# takes a fingerprint of every parameter after each `optimizer.step()`, reports the first step, the tensor and the
# ranks, and says what went past DDP before it. No collective is added, so the job keeps its own order. It costs one
# pass over the weights a step; `benchmarks/watch_replicas.py` measures it.

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
# Equal replicas are not yet a true job. All ranks may do the same work, or report what only one of them has seen:
#
# | the lie | the number that gives it away |
# |---|---|
# | every rank reads the same samples | `len(loader)` is that of one process; with equal seeds, all bring the same gradients |
# | the same dropout masks everywhere | compare one mask between ranks; a common seed was not replaced by seed + rank |
# | the order of every epoch is the same | the first indices of two epochs (`set_epoch`) |
# | an accuracy of rank 0's part, sold as that of all | count the samples behind the number |
# | samples counted twice in evaluation | the same: 12 counted, 10 there |
# | running statistics of one rank's data | BatchNorm's buffers differ between ranks after a step |
#
# The watch finds the first of these when the seeds are equal, since all ranks then bring the same gradients:

# %%
# %%ranks 2 --watch-replicas
from drift import *

model, optimizer, x = start()
x = torch.ones(8, 4)  # BUG: no DistributedSampler, the same seed, the same batches
for number in range(4):
    step(model, optimizer, x)

# %% [markdown]
# You know BatchNorm from chapter 1. "Its statistics are per rank, therefore the models diverge." The first half is right.
# What does the watch say of the second? Predict.

# %%
# %%ranks 2 --watch-replicas
from drift import *

model, optimizer, x = start(lambda layer: DDP(nn.Sequential(layer, nn.BatchNorm1d(1))))
x = x + 3 * dist.get_rank()  # very different data on the two ranks
for number in range(20):
    step(model, optimizer, x)
print("parameters", "equal" if equal_everywhere(model) else "DIFFERENT")

# %% [markdown]
# The parameters are equal: all ranks apply the same averaged gradient. The *running* statistics differ after each
# step, and DDP copies rank 0's over the others before the next forward. So what is lost is what the other ranks saw,
# not equality. `SyncBatchNorm` normalizes with the batch of all ranks; it runs on GPUs only.

# %%
quiz("03_debugging/equal_replicas")

# %% [markdown]
# ## Exercise: implement find_divergence
#
# *Medium, 20 minutes.* Open `exercises/find_divergence.py`.
#
# The checksum above says *that* replicas differ. You write the tool that says *which* tensor, on *which* ranks, by
# how much, and since which step: parameters, buffers, gradients and the optimizer's state. It has to be cheap enough
# to run every hundred steps, so while all is well it may send a few bytes a tensor and no more.
#
# A sum is a weak checksum: swap two values and it is the same. The checks do that.

# %%
contract("find_divergence")

# %%
# %check find_divergence

# %% [markdown]
# <details><summary>"… was permuted, and nothing was found"</summary>
# Your checksum does not depend on the order of the values. One that looks at the bytes does: a hash, or a sum
# weighted by position.
# </details>
#
# <details><summary>It hangs when a gradient is missing on one rank</summary>
# All ranks must bring tensors of the same size. Give a missing gradient a checksum of its own, such as a fixed
# number.
# </details>
#
# <details><summary>It finds NaN different from NaN</summary>
# Compare bits, not values: <code>nan != nan</code>.
# </details>
#
# The solution is `solutions/find_divergence.py`.
#
# ## Devices
#
# "Expected all tensors to be on the same device" is the commonest error on GPUs. It is loud, and still it takes time,
# because it names two devices, and at best an argument of an inner operation (`mat1`), not your tensor. This machine may
# have no GPU, so the device `meta` takes its place (with other words, which may blame the wrong one of the two): a
# device that every PyTorch has, whose tensors have a shape and no values, and which refuses to mix with the CPU as a
# GPU does.

# %%
from torch import nn

def tried(what, call):
    try:
        call()
        print(f"{what}: fine")
    except (RuntimeError, AttributeError) as error:
        print(f"{what}: {str(error).splitlines()[0]}")

logits, target = torch.randn(4, 3, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
tried("target left behind", lambda: nn.CrossEntropyLoss()(logits, target.new_zeros(4, device="cpu")))
tried("plain loss, not moved", lambda: nn.CrossEntropyLoss()(logits, target))
tried("weighted loss, not moved", lambda: nn.CrossEntropyLoss(weight=torch.ones(3))(logits, target))

# %% [markdown]
# "Move the loss to the device" is advice you will read everywhere. A plain `CrossEntropyLoss` has nothing to move.
# One with `weight=` has a buffer:

# %%
print([name for name, _ in nn.CrossEntropyLoss().named_buffers()])
print([name for name, _ in nn.CrossEntropyLoss(weight=torch.ones(3)).named_buffers()])

# %% [markdown]
# What `.to(device)` moves is exactly this: parameters and registered buffers, of the module and its children. A
# tensor that is a plain attribute stays where it is, and so does one in a list:

# %%
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.mean = torch.zeros(3)  # BUG: no parameter, no buffer
        self.register_buffer("scale", torch.ones(3))

model = Scaled().to("meta")
print("layer", model.layer.weight.device, " scale", model.scale.device, " mean", model.mean.device)

# %% [markdown]
# And a helper that looks in vain. It circulates in this form: collect the devices of everything, complain when there
# are two. What does it say of a model that was never moved?

# %%
def diagnose(model, data, target):
    devices = {t.device for t in (*model.parameters(), *model.buffers(), data, target)}
    return "all on one device" if len(devices) == 1 else f"MISMATCH: {devices}"

model, x, y = nn.Linear(3, 3), torch.ones(1, 3), torch.ones(1)
print(diagnose(model, x, y))  # everything forgotten on the CPU
tried("a batch as a dictionary", lambda: diagnose(model, {"x": x}, y))

# %% [markdown]
# It never compares with the device that was *wanted*, knows no losses, no attributes, no nested batches. Another one does
# compare, and looks at the first parameter only:

# %%
def verify_device(model, wanted):
    return next(model.parameters()).device == torch.device(wanted)  # BUG: the first of four

half = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
print("right:", verify_device(half, "meta"), "  in truth:", *[p.device for p in half.parameters()])

# %% [markdown]
# Yours will look at everything.

# %%
quiz("03_debugging/what_moves")

# %% [markdown]
# ## Exercise: implement device_report
#
# *Easy, 15 minutes.* Open `exercises/device_report.py`.

# %%
contract("device_report")

# %%
# %check device_report

# %% [markdown]
# <details><summary>"… is not in the report"</summary>
# Batches are nested: dictionaries in lists in dataclasses. Walk them by a function that calls itself, and carry the
# path along.
# </details>
#
# The solution is `solutions/device_report.py`.
#
# ## The network
#
# On one machine the network is the loopback and always there. Between machines it is the first suspect, and there are
# three places where it stops a job.
#
# **The store cannot be reached.** `MASTER_ADDR:MASTER_PORT` does not answer: a firewall, a wrong address, or no
# launcher there (yet). A refused connection is tried again until the timeout, exactly like one that gets no answer.
# So a blocked port looks like a slow start:

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
job = subprocess.run([sys.executable, "blocked.py"], capture_output=True, text=True, timeout=55)
print(job.stdout)

# %% [markdown]
# **The interface is not there, or is the wrong one.** gloo takes the address that the host's own name leads to. NCCL
# (by its source) looks at the cards: first those named `ib…`, then any but docker's and the loopback.
# `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` overrule them. A name that does not exist fails at once, on the ranks
# that have it; the others wait for them:

# %%
# %%ranks 2 --expect raised --quiet
import os
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"  # BUG: no card of this host has that name
dist.init_process_group("gloo")

# %% [markdown]
# **The launchers have met, and the ranks cannot.** 29500 is where the launchers meet. With `--rdzv-backend=c10d`, as here,
# torchrun then opens the ranks' own store at a port that the system chooses (with `--master-port`, at that one), and the
# ranks' connections to each other take more. "Port 29500 is open" is therefore half of
# what a firewall has to allow; the symptom of the other half is a rendezvous that works and a group that does not
# form. Here are two hosts with addresses of their own, made on this machine for the moment, and a firewall on the
# first that lets nothing but port 29500 through:

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
from lockstep import cluster, ranks

command = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
command += ["--rdzv-endpoint=node0:29500", "meet.py"]
try:
    with cluster.Nodes(2) as nodes:
        nodes.block_all_but(0, 29500)
        agents = [nodes.run(number, command) for number in range(2)]
        for agent in agents:
            agent.wait(50)
        everything = "\n".join(agent.output for agent in agents)
        said = re.findall(r"^(?:Dist\w+Error|node) .*", everything, re.MULTILINE)
        print(*sorted(re.sub(r"\d{5}\b", "PORT", line) for line in said), sep="\n")
except ranks.NotRun as missing:
    print("not run:", missing)

# %% [markdown]
# One rank could not reach the ranks' store, at a port that nobody had named. The other waits for the address which
# that rank would have written there. Neither says "firewall".
#
# An error while meeting is an error of all. A helper that catches it, prints, and returns `False` leaves the others
# alone:

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
# Let it raise: then the launcher ends all ranks.
#
# And a connection that breaks later: a peer that is *gone* closes its connections, and the neighbours know within
# milliseconds. A cable that is *pulled*, or a host that is frozen, closes nothing. Then only the timeout speaks. A
# stopped process is the nearest thing to that on one machine:

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

# %% [markdown]
# ### Variables that exist, and some that do not
#
# NCCL is tuned and inspected through variables. It ignores names that it does not know, without a word, so a wrong
# one is worse than none. From NCCL's source; none of this was run here:
#
# | variable | is |
# |---|---|
# | `NCCL_DEBUG=INFO` | the log: versions, interfaces, rings. `WARN` is enough for errors |
# | `NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,NET,ENV` | which parts of it; naming some hides the others, so keep `BOOTSTRAP` and `NET` |
# | `NCCL_DEBUG_FILE=nccl.%h.%p.log` | a file for each host and process. `%r` is **not** a rank: it is taken literally, so all ranks write one file, and `nccl_rank_0.log` never exists |
# | `NCCL_SOCKET_IFNAME=eth0` | a prefix; `=eth0` is exact, `^docker` excludes |
# | `NCCL_IB_DISABLE=1` | no InfiniBand. `=0` is the default and enables nothing |
# | `NCCL_P2P_DISABLE=1` | no direct traffic between GPUs: for a test, it is slow |
# | `NCCL_TIMEOUT` | **does not exist**. The timeout is an argument of `init_process_group` |
# | `TORCH_NCCL_ASYNC_ERROR_HANDLING` | torch's: end the process when a collective fails or times out. On by default |
# | `TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_DUMP_ON_TIMEOUT` | torch's: the flight recorder, and its file |
#
# In the log look for two lines: `Bootstrap: Using …`, with the interface over which the ranks met, and `NET/Socket` or
# `NET/IB`, with the one that carries the data. On a cluster with Ethernet only, NCCL finds that out by itself;
# `NCCL_IB_DISABLE=1` and `NCCL_SOCKET_IFNAME` spell it out.

# %%
quiz("03_debugging/open_port")

# %% [markdown]
# ## Preflight
#
# All of this can be asked before the first step, in a second, instead of being suffered in the third hour. A
# preflight looks at the environment, meets the others with a short timeout, lets `monitored_barrier` name who is
# missing, and runs one collective whose answer is known.

# %%
quiz("03_debugging/preflight")

# %% [markdown]
# ## Exercise: implement preflight
#
# *Medium, 20 minutes.* Open `exercises/preflight.py`. It has to end within its time in every case of failure. A
# preflight that hangs is one more hang.

# %%
contract("preflight")

# %%
# %check preflight

# %% [markdown]
# <details><summary>"… still waited after the time was over"</summary>
# Every wait needs a timeout of its own: the store's, the group's, the barrier's. The default of each is minutes.
# </details>
#
# <details><summary>A rank is missing, and the others do not say which</summary>
# Only rank 0 has the list of <code>monitored_barrier</code>. The others can be told through the store.
# </details>
#
# The solution is `solutions/preflight.py`. Start your next cluster job with it.
#
# ## Debug the debugger
#
# A test is a program, and can be wrong like one. Five helpers and one piece of advice are passed
# around for debugging DDP. Predict what each says of a **correct** job.
#
# **1. "Are the gradients synchronized?"**

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
# The gradients were equal on both ranks. The test overwrites them with the rank's number, and is surprised that
# nobody averaged that. It fails on every correct model (but for the middle rank of an odd number), passes on one
# rank, and has destroyed the gradients for the optimizer. A test must *look* at what DDP did: compare gradients
# between the ranks, with all_gather.
#
# **2. "How much time goes into communication?"** A network is made slow here by a hook which sleeps 50 ms in every
# all-reduce, so we know the answer.

# %%
# %%ranks 2
import time
from drift import *

def slow(state, bucket):
    time.sleep(0.05)
    mean = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])

model, _, x = start()
model.register_comm_hook(None, slow)
compute, total = [], []
for number in range(4):
    began = time.perf_counter()
    model(x).square().mean().backward()  # includes the communication
    compute.append(time.perf_counter() - began)
    total.append(time.perf_counter() - began)
print(f"communication: {1 - sum(compute) / sum(total):.0%} of the step")
with model.no_sync():  # the same without communication
    alone = []
    for number in range(5):
        began = time.perf_counter()
        model(x).square().mean().backward()
        alone.append(time.perf_counter() - began)
print("measured against no_sync: more than 80 %:", 1 - min(alone) / min(total) > 0.8)

# %% [markdown]
# Both intervals contain `backward`, and `backward` contains the communication. Their difference is zero whatever the
# network does. Chapter 4 measures it properly.
#
# **3. "Speed-up, measured on rank 0."**

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
# A program that runs on rank 0 alone cannot measure four ranks. And had it run: the same number of steps with the
# same batch per rank takes *the same* time when all is perfect, so "time on one rank / time on four" is 1.0 at best.
# The helper divides that by four and prints 25 % efficiency. Compare samples per second.
#
# **4. "Is NCCL there?"**

# %%
try:
    torch.cuda.nccl.is_available()
except TypeError as error:
    print(error)
print("the question to ask:", type(dist.is_nccl_available()).__name__, "from dist.is_nccl_available()")

# %% [markdown]
# The helper that calls it is written `torch.cuda.is_available() and torch.cuda.nccl.is_available()`: it works on
# every machine without a GPU, and fails on every machine with one.
#
# **5. "First, run it without torchrun."** A program that reads `os.environ["LOCAL_RANK"]` ends there with a
# `KeyError`. The single process that means something is `torchrun --nproc-per-node=1`.
#
# **6. "Can the ranks talk?"** The sum of the ranks is the right question (chapter 2 begins with it). This is how it is
# passed around:

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
# What the six have in common: nobody ever ran them on a job that was broken in the way they look for, *and* on one
# that was not. Do both, with every check that you write.

# %%
quiz("03_debugging/test_the_test")

# %% [markdown]
# ## Trials
#
# Seven sentences that one hears often. Say what will happen before you read on.
#
# **"I'll wrap now and move later."** You have seen it: cast after wrapping, no error, ever-growing difference.
#
# **"find_unused_parameters=True, just in case."** What does it cost when nothing is unused? One more walk over the
# graph in every step, and a line in the log:

# %%
# %%ranks 1 --into flagged --quiet
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2), find_unused_parameters=True)
for step in range(2):
    model(torch.ones(1, 2)).sum().backward()

# %%
print(re.search(r"find_unused_parameters=True was[^.]*\.", flagged.ranks[0].stderr).group(0))

# %% [markdown]
# The walk costs little in a large model and much in a tiny one. The real cost is another: the flag turns "this layer
# is never used" from an error into silence. Use it when different steps use different layers, and nowhere else. There it
# works, even when the branch depends on the rank:

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
    gradient = parameter.grad
    print(name.split(".")[0], None if gradient is None else gradient[0, 0].item(), end="   ")

# %% [markdown]
# Each rank's gradient is 1. `left` was used on one of two ranks, so the mean is 0.5; `spare` was used on none, and keeps
# no gradient at all, which is right. Without the flag the second step fails:

# %%
# %%ranks 2 --expect raised --quiet
from branches import *

ddp, branch = start()
for step in range(2):
    ddp(torch.ones(1, 2), branch).sum().backward()  # BUG: each rank leaves out other layers

# %% [markdown]
# **"I'll skip the sampler for now."** All ranks then walk through all samples:

# %%
# %%ranks 2
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = list(range(10))
without = DataLoader(data, batch_size=1)
shared = DataLoader(data, batch_size=1, sampler=DistributedSampler(data))
print(len(without), "batches without,", len(shared), "with")

# %% [markdown]
# **"Out of memory? A smaller batch."** It helps, and it also hides ranks that put a part of their memory on GPU 0, by
# a fixed `cuda:0` or a `torch.load` without `map_location`. Look at `nvidia-smi` first: one GPU much fuller than the others is
# no question of batch size. (Whole ranks that share a GPU are what nccl refuses by default.)
#
# **"It works on one node, so two nodes will work."** Other addresses, other interfaces, a firewall: "The network" is
# new there, and `LOCAL_RANK` is no longer `RANK`. Run the preflight on two nodes before the job.
#
# **"It scales badly, it must be the network."** Or the loader, or the batch, or one slow rank for which all others
# wait: a collective's duration includes waiting for the last to come. Measure (chapter 4) before you tune NCCL.
#
# **"DataParallel is simpler."** Chapter 2, "Why not DataParallel".

# %%
quiz("03_debugging/unused")

# %% [markdown]
# ## The clinic
#
# `exercises/clinic` holds jobs that colleagues have brought. Each is a short script with a complaint at its top. Each
# runs on your laptop in a second or two:

# %%
from lockstep.grading.course import tomllib  # Python 3.10 has none of its own

cases = tomllib.loads(Path("../autograder/clinic/cases.toml").read_text())
for name, case in cases.items():
    print(f"{name:18} {case['ranks']} ranks   {case['title']}")

# %% [markdown]
# For each: **run** it, **look**, **answer** in the file (`CAUSE`, from the list in `exercises/clinic/README.md`, and
# `RANK`), **mend** it, and `./lockstep check clinic/NAME`. Both are graded: the diagnosis, and the mended job by what
# it does. A mend that makes the symptom go away and leaves the cause, such as a longer timeout or a rank left out, is
# told so.
#
# Which rank is the guilty one depends on your ticket, a number that is drawn for you when you run your first case.
# Here is one case, with its explanation under ticket 1:

# %%
os.environ["CLINIC_TICKET"] = "1"
lockstep_run("-n", "3", "../exercises/clinic/short_shard.py")
del os.environ["CLINIC_TICKET"]  # from here on, yours again

# %% [markdown]
# Rank 0 has left the loop and waits in the barrier; ranks 1 and 2 began one more step. The shards are not equally
# long: `uneven-data`, rank 0. And the mend? Not a longer timeout, and not "as many steps as the shortest", which
# throws away what the others have. The checks know both:

# %%
# %check clinic/short_shard

# %% [markdown]
# Some cases fail loudly, most do not. For those that only lie, look at numbers: `--watch-replicas`, your
# `find_divergence`, the record of collectives (`%%ranks 2 --into run`, then `run.collectives`), the samples that each
# rank has seen.

# %%
quiz("03_debugging/longer_timeout")

# %% [markdown]
# ## Checklist
#
# **Before.** A preflight. `@record` on `main`. A process-group timeout that fits the longest thing one rank does
# alone. `faulthandler.dump_traceback_later` in each step, with a generous time. The flight recorder's file on nccl
# (`TORCH_NCCL_DUMP_ON_TIMEOUT`). A comparison of the replicas every few hundred steps.
#
# **It failed.** The first failure in time that is not about a connection. The exit code: 1, −9, −11, −6; −15 is an
# echo. With −9, look for memory.
#
# **It hangs.** A stack of every rank. Who stands elsewhere? How many collectives has each begun? What did that rank
# do differently before: data, branch, exception swallowed?
#
# **It lies.** Replicas equal, bit for bit? Which samples did each rank see? How many all-reduces in a step, of how
# many bytes? How many samples are behind the number that was printed?
#
# **Mended.** Does it still happen with another number of ranks? Is what the job computes still what was meant? Is
# there now a test that fails on the old version?
#
# ## Take it with you
#
# - One rank tests arithmetic. Two ranks test communication. Three tell 2 from N.
# - The loudest rank is seldom the guilty one. "Connection closed by peer" is an echo.
# - A hang is a difference: find the rank that stands elsewhere, and what it did before.
# - Parameters are equal bit for bit on all ranks, or something went past DDP. That is the sharpest test there is, and it is cheap.
# - Whether a collective is called must depend on nothing that differs between the ranks.
# - A check that was never seen to fail is not a check.
#
# In an interview, expect: "Your job hangs after the first epoch. What do you do?" A list of tools is the weak answer.
# The strong one is the question behind them: which rank stands where, and what differs between them.
#
# ## What to read next
#
# Chapter 4 makes the mended job fast. PyTorch's pages on debugging: the section "Debugging torch.distributed
# applications" of `pytorch.org/docs/stable/distributed.html`, and the flight recorder's tutorial
# (`pytorch.org/tutorials/unstable/flight_recorder_tutorial.html`). NCCL's own: "Environment variables" and
# "Troubleshooting" in NVIDIA's user guide.

# %%
from lockstep.notebook.course_map import course_map

course_map("03_debugging")
