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
# # Chapter 2. Setting up: from one process to many
#
# In chapter 1, `%%ranks` started the processes and told each one its rank. Outside the notebook, you launch them
# yourself. You start with a program that trains a small network in one process, and change it line by line until it
# trains on four ranks. On the way you make the usual mistakes on purpose, and see what each of them does. After this
# chapter you can
#
# - **start** a program on N ranks, and tell which rank is which;
# - **connect** the ranks with the right backend;
# - **shard** a data set, in a new order every epoch;
# - **report** the loss over all ranks;
# - **leave** the process group, whether training succeeds or fails;
# - **launch** ranks from Python, and on several nodes.
#
# About 125 minutes: 70 to read and run, 55 for three exercises; take a break before "Global metrics". You need chapter
# 1, but no GPU: gloo connects ranks on your CPU. What the text says about GPUs and NCCL comes from PyTorch's
# documentation and source, and was not run here.

# %%
# %load_ext lockstep
import os, subprocess, sys
from pathlib import Path
import torch
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

# %% [markdown]
# ## Where we start
#
# The data are scikit-learn's digits: 1797 images of 8×8 pixels. Write them to a file once, before any rank starts;
# otherwise every rank would prepare them again.

# %%
import numpy
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
numpy.savez("digits.npz", images=images.astype("uint8"), labels=labels)
print(images.shape, labels[:10])

# %% [markdown]
# `digits.py` holds the data, the network and one epoch. **None of its lines will change.**

# %%
print(Path("digits.py").read_text())

# %% [markdown]
# Here is the program, still in one process:

# %%
# %%ranks 1
import torch
from torch.utils.data import DataLoader
from digits import load, net, train_epoch

torch.manual_seed(0)
train, test = load()
loader = DataLoader(train, batch_size=32, shuffle=True)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(3):
    total, count = train_epoch(model, loader, optimizer)
    print(f"epoch {epoch}: loss {total / count:.2f} over {count:.0f} samples, {len(loader)} steps")

# %%
quiz("02_setup/sum_and_count")

# %% [markdown]
# ## Launchers and the environment
#
# A distributed program is one file, started N times by a **launcher**. The copies differ only in a few environment
# variables, which the launcher sets. PyTorch's launcher is `torchrun`:
#
# ```
# torchrun --nproc-per-node=4 train.py
# ```
#
# `%%ranks 4` does the same with a cell:

# %%
# %%ranks 4
import os
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"):
    print(f"{name}={os.environ[name]}", end="  ")

# %% [markdown]
# A **node** is one machine of a cluster; here you have one.
#
# | variable | meaning |
# |---|---|
# | `RANK` | this process's number, 0 to `WORLD_SIZE` − 1, over all nodes |
# | `WORLD_SIZE` | the number of ranks |
# | `LOCAL_RANK` | this process's number on its node; use it as the number of its GPU |
# | `LOCAL_WORLD_SIZE` | the number of ranks on this node |
# | `GROUP_RANK` | this node's number (to torchrun, a node's ranks are a *worker group*) |
# | `MASTER_ADDR`, `MASTER_PORT` | the address of the **store**, a small key-value server through which the ranks find each other |
# | `TORCHELASTIC_USE_AGENT_STORE` | `True` if the launcher runs the store; otherwise rank 0 runs it |
#
# On one node, `RANK` and `LOCAL_RANK` are equal. On two nodes they differ:

# %%
# %%ranks 4 --nodes 2
import os
rank, local_rank, node = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
print(f"RANK {rank} is LOCAL_RANK {local_rank} on node {node}")

# %% [markdown]
# Rank 2 is the first process on the second node, so it uses GPU 0 there. `torch.device("cuda", rank)` would ask for
# GPU 2, which that node may not have.

# %%
quiz("02_setup/local_rank")

# %% [markdown]
# ### Without a launcher
#
# Plain `python` sets none of these variables. The *rendezvous*, in which the processes find each other, then fails
# and names the first missing variable:

# %%
# %%ranks 2 --expect raised
import os
import torch.distributed as dist

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]  # as when plain python starts the program
dist.init_process_group("gloo")

# %% [markdown]
# Use the launcher even for one process: `torchrun --nproc-per-node=1 train.py`. When you read one of these variables,
# don't give a default value. Here `LOCAL_RANK` is missing, and the default hides that:

# %%
# %%ranks 4
import os

os.environ.pop("LOCAL_RANK")  # some launchers don't set it
local_rank = int(os.environ.get("LOCAL_RANK", 0))  # BUG: the default hides that it is missing
print(f"my device is cuda:{local_rank}")

# %% [markdown]
# All four ranks chose GPU 0. The job would fail only later, when GPU 0 runs out of memory or NCCL refuses two ranks on
# one GPU. `os.environ["LOCAL_RANK"]` would raise an error at once.
#
# ### When the numbers are wrong
#
# Here are three mistakes. **Predict**: which of them raise an error?

# %%
# %%ranks 2 --expect anything
import os
import torch.distributed as dist

os.environ["WORLD_SIZE"] = "3"  # BUG: two were started
dist.init_process_group("gloo")

# %%
# %%ranks 3 --expect anything
import os
import torch.distributed as dist

if os.environ["RANK"] == "2":
    raise SystemExit  # BUG: rank 2 leaves before it joins, for instance because its data are missing
dist.init_process_group("gloo")

# %%
# %%ranks 2 --expect anything
import os
import torch.distributed as dist

os.environ["RANK"] = "0"  # BUG: both are rank 0
dist.init_process_group("gloo")

# %% [markdown]
# None raises an error: all three hang. The notebook ends such a cell at once; in a terminal, PyTorch waits for 30
# minutes before it raises an error.
#
# If a job hangs before its first step, print `RANK` and `WORLD_SIZE` on each rank *before* `init_process_group`.
#
# ### Never overwrite what the launcher set
#
# Many examples set `MASTER_ADDR` and `MASTER_PORT` themselves. Under torchrun, they hang:

# %%
# %%ranks 2 --expect hang
import os
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "12355"  # BUG: torchrun's store is at another port
dist.init_process_group("gloo")

# %% [markdown]
# Nothing listens at port 12355. Rank 0 doesn't start a store there, because `TORCHELASTIC_USE_AGENT_STORE` says that
# the launcher runs it.

# %%
quiz("02_setup/environment")

# %% [markdown]
# ## The process group
#
# With gloo, `init_process_group` returns when all ranks have joined. They find each other through the store. You can
# use the store yourself:

# %%
# %%ranks 3
import os
import torch.distributed as dist

rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"note from {rank}", f"rank {rank} was here")
print(store.get(f"note from {(rank + 1) % 3}").decode())  # get waits until the key exists

# %% [markdown]
# gloo uses the store in the same way: each rank writes its own address and reads the other ranks' addresses. After
# that, tensors go directly from rank to rank. `init_process_group` does all this in one line:

# %%
# %%ranks 4
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor(dist.get_rank())
dist.all_reduce(t)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, sum of the ranks {t}")
assert t == sum(range(dist.get_world_size()))

# %% [markdown]
# On a new cluster, run these lines first, under torchrun. (With NCCL, put `t` on the GPU.)
#
# ### Without the variables
#
# A test may run without a launcher. Then pass `rank=` and `world_size=`, and PyTorch ignores `RANK` and `WORLD_SIZE`.
# Several ranks still need the address of the store. A single rank doesn't: give it a `HashStore`, a store in its own
# memory:

# %%
# %%ranks 1
import os
import torch.distributed as dist

for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
os.environ["RANK"] = "7"  # contradicts rank=0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("rank", dist.get_rank(), "of", dist.get_world_size())

# %% [markdown]
# PyTorch ignored `RANK=7`. In your own code, raise an error if a variable contradicts an argument.
#
# ### How long ranks wait
#
# One timeout applies to `init_process_group` and to each collective: by default 30 minutes with gloo, 10 with NCCL.
# Set it in `init_process_group`; `DDP` takes no timeout:

# %%
import inspect
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

print("gloo:", dist.default_pg_timeout)
assert "10 minutes for NCCL" in " ".join(dist.init_process_group.__doc__.split())  # its documentation
assert "timeout" not in inspect.signature(DDP).parameters

# %% [markdown]
# Shorten the timeout while you try things out. Here ranks 0 and 1 wait 300 ms for a rank 2 that doesn't exist:

# %%
# %%ranks 2 --expect raised --quiet
import os
from datetime import timedelta
import torch.distributed as dist

os.environ["WORLD_SIZE"] = "3"  # BUG: two were started
dist.init_process_group("gloo", timeout=timedelta(milliseconds=300))

# %% [markdown]
# The key in the error ends in `/2`: the ranks waited for the address that rank 2 never wrote. If rank 0 prepares the
# data while the others wait, make the timeout longer than the preparation.

# %%
quiz("02_setup/missing_rank")

# %% [markdown]
# ### Four programs side by side
#
# Now run the first program on four ranks, each with its own seed. Lines marked `+` are new. **Predict**: how many
# samples does each rank train on?

# %%
# %%ranks 4
import torch
import torch.distributed as dist  # +
from torch.utils.data import DataLoader
from digits import load, net, train_epoch

dist.init_process_group("gloo")  # +
torch.manual_seed(dist.get_rank())  # + each rank draws its own weights
train, test = load()
loader = DataLoader(train, batch_size=32, shuffle=True)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    total, count = train_epoch(model, loader, optimizer)
    print(f"epoch {epoch}: loss {total / count:.3f} over {count:.0f} samples, {len(loader)} steps")

# %% [markdown]
# Each rank trains on all 1500 samples: these are four separate training runs. A process group alone synchronizes
# nothing. The ranks still have to divide the data, and DDP has to average the gradients.
#
# ## Backends and devices
#
# The **backend** is the library behind the collectives. Choose it by where the tensors are:
#
# | backend | tensors on CPU | tensors on NVIDIA GPUs |
# |---|---|---|
# | `gloo` | yes | some collectives, slowly |
# | `nccl` | no | yes, from GPU to GPU |
# | `cpu:gloo,cuda:nccl` | yes, by gloo | yes, by NCCL |
#
# `dist.get_backend()` names a group's backend, and `dist.is_nccl_available()` says whether your PyTorch has NCCL. A
# PyTorch built without GPU support doesn't have it:

# %% ignored_because="the message depends on whether this torch was built with CUDA" tags=["nbval-ignore-output"]
# %%ranks 1 --expect raised --quiet
import torch.distributed as dist

dist.init_process_group("nccl")

# %% [markdown]
# NCCL refuses two ranks of one group on the same GPU. So `device.py` chooses `nccl` only if this node has a GPU for
# each of its ranks:

# %%
print(Path("device.py").read_text())

# %% [markdown]
# If a node has fewer GPUs than ranks, `local_device` uses the CPU, so that the course runs on a laptop. (It warns only
# if there is at least one GPU.) On a cluster, raise an error instead: a node with one broken GPU would choose gloo,
# and the other nodes NCCL.
#
# Call `local_device` on your machine as it is, and then as if each of two nodes had two GPUs:

# %%
# %%ranks 4 --nodes 2
import torch
import torch.distributed as dist
from device import local_device

def two():
    return 2

def report(index):
    print(f"set_device({index})")

print("here:", *local_device())
torch.cuda.device_count = two
torch.cuda.set_device = report
print("with two GPUs per node:", *local_device())

# %% [markdown]
# Three rules for GPUs:
#
# - **`set_device` first, then `init_process_group`.** Before `set_device`, a plain `"cuda"` means GPU 0, on every
#   rank. The reverse order often works, because NCCL connects only at the first collective, but don't rely on that.
# - **Tell the group its device**: `init_process_group("nccl", device_id=torch.device("cuda", local_rank))`. Then NCCL
#   connects in this call and waits for all ranks; otherwise you notice a missing rank only at the first collective.
#   Calls without a tensor, such as `barrier`, use this device too. You still need `set_device`, because `device_id`
#   doesn't change what a plain `"cuda"` means.
# - **Move inputs and targets too**, as `train_epoch` does.

# %%
quiz("02_setup/device_of")

# %% [markdown]
# ## Exercise: implement setup_ddp
#
# *Medium, 15 minutes.* Open [exercises/setup_ddp.py](../exercises/setup_ddp.py).
#
# You write two functions that the next exercises use. `setup_ddp` chooses device and backend and joins the group. If
# neither `LOCAL_RANK` nor `LOCAL_WORLD_SIZE` is set, assume that all ranks run on this node. If there are fewer GPUs
# than ranks, `device.py` uses the CPU; your function uses gloo and lets the ranks share GPUs.
#
# `cleanup_ddp` leaves the group with `dist.destroy_process_group()`, which raises an error if there is no group. Ask
# `dist.is_initialized()` first.

# %%
contract("setup_ddp", "setup_ddp", "cleanup_ddp")

# %%
# %check setup_ddp

# %% [markdown]
# `./lockstep solution setup_ddp` shows the solution.
#
# ## Sharding
#
# The ranks are connected, but each would still train on the whole data set. Each should see its own part.
# `DistributedSampler` deals the indices like cards. Given the number of ranks and the rank, it needs no process
# group:

# %%
from torch.utils.data import DistributedSampler

def deal(samples, ranks, epoch=0, **options):
    """The indices that each rank gets."""
    samplers = [DistributedSampler(range(samples), ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]

def together(dealt):
    """What all ranks got, in one list."""
    return [sample for shard in dealt for sample in shard]

deal(10, 4, shuffle=False)

# %% [markdown]
# Rank r gets the samples r, r + 4 and so on. All ranks must take the same number of steps, but 4 doesn't divide 10. So
# the sampler **pads**: samples 0 and 1 are dealt twice. `drop_last=True` leaves samples out instead:
#
# ![Ten samples dealt to four ranks in rounds: padded, samples 0 and 1 come twice; with drop_last, 8 and 9 are left out](pictures/deal.svg)

# %%
dealt = deal(10, 4, shuffle=False)
assert len(together(dealt)) == 12 and set(together(dealt)) == set(range(10))
print("drop_last: ", deal(10, 4, shuffle=False, drop_last=True))
print("3 samples: ", deal(3, 4, shuffle=False), deal(3, 4, shuffle=False, drop_last=True))

# %% [markdown]
# With 3 samples for 4 ranks, `drop_last=True` leaves every rank without samples. With 1000 samples for 4 ranks, no
# sample is repeated or left out. But the *loader* has a `drop_last` too, which discards a rank's last batch if it is
# short:

# %%
from torch.utils.data import DataLoader

dealt = deal(1000, 4)
sizes = [len(shard) for shard in dealt]
print("samples of each rank:", *sizes, "  dealt twice:", 1000 - len(set(together(dealt))))
for drop_last in (False, True):
    sizes = [len(batch) for batch in DataLoader(range(1000), 32, sampler=dealt[0], drop_last=drop_last)]
    print(f"the loader with drop_last={drop_last}: {len(sizes)} batches, the last of {sizes[-1]}")

# %% [markdown]
# ### Shuffling, and set_epoch
#
# By default the sampler shuffles. Each rank computes the same permutation from `seed + epoch` and takes its part; the
# ranks send no messages. You tell the sampler the epoch with `set_epoch`. Compare rank 0's samples without this call
# and with it:

# %%
for epoch in range(3):
    print(f"epoch {epoch}:  without {deal(10, 2)[0]}   with set_epoch({epoch}) {deal(10, 2, epoch)[0]}")

# %% [markdown]
# ![Three epochs on two ranks: new batches with set_epoch(epoch), the same batches without](pictures/set_epoch.svg)
#
# Would you notice a missing `set_epoch`? **Predict** whether the loss still falls in every epoch.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from digits import load, net, train_epoch
from lockstep.ranks import observe

dist.init_process_group("gloo")
for name in ("without", "with set_epoch"):
    torch.manual_seed(0)
    data, model = load()[0], DDP(net())
    sampler, losses = DistributedSampler(data), []
    loader = DataLoader(data, 32, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(6):
        if name == "with set_epoch":
            sampler.set_epoch(epoch)
        total = train_epoch(model, loader, optimizer)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    observe(name, losses)

# %%
for name in ("without", "with set_epoch"):
    losses = run.observed(name)[0]
    print(name.rjust(14), *(f"{loss:.2f}" for loss in losses))
    assert losses == sorted(losses, reverse=True)  # it improves in every epoch, with and without

# %% [markdown]
# The losses agree to two decimals, so they don't reveal a missing `set_epoch`. But without `set_epoch`, every epoch
# repeats the same batches, and you lose the benefit of shuffling. (In one process, `shuffle=True` makes new batches in
# every epoch.) To catch the mistake, print each epoch's first indices.

# %%
quiz("02_setup/set_epoch")

# %% [markdown]
# ### Three ways to get it wrong
#
# **Unequal seeds.** If the samplers have different seeds, their shards don't fit together:

# %%
dealt = [list(DistributedSampler(range(10), 2, r, seed=r)) for r in range(2)]  # BUG: two seeds
print(dealt)
print("dealt twice:", sorted(set(dealt[0]) & set(dealt[1])))
print("never dealt:", sorted(set(range(10)) - set(together(dealt))))

# %% [markdown]
# **Both sampler and shuffle.** This mistake raises an error:

# %%
try:
    torch.utils.data.DataLoader(range(10), sampler=DistributedSampler(range(10), 2, 0), shuffle=True)
except ValueError as error:
    print(error)

# %% [markdown]
# **No sampler.** Each rank goes through the whole data set:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = range(8)
for name, seed in {"equal seeds": 0, "own seeds  ": dist.get_rank()}.items():
    torch.manual_seed(seed)
    loader = DataLoader(data, batch_size=4, shuffle=True)  # BUG: every rank gets all samples
    print(f"{name}: {[batch.tolist() for batch in loader]}")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
print("sampler    :", [batch.tolist() for batch in loader])

# %% [markdown]
# With equal seeds, both ranks compute the same gradient. With different seeds, an "epoch" is two passes over the data.
# Neither mistake raises an error, but `len(loader)` reveals both: on N ranks it should be 1/N of its value in one
# process.
#
# ### Worker processes
#
# With `num_workers=4`, four ranks start 16 workers. On Linux, Python up to 3.13 *forks* them: each worker starts as a
# copy of its rank. DDP's documentation warns that such workers may hang with NCCL. So use `forkserver`, which starts
# them from a clean process. Starting a worker in this way takes longer, so keep the workers for all epochs
# (`persistent_workers=True`):

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = torch.arange(8)
loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False), num_workers=1,
                    multiprocessing_context="forkserver", persistent_workers=True)
for epoch in range(2):
    print(f"epoch {epoch}:", *[batch.tolist() for batch in loader], end="  ")

# %%
quiz("02_setup/sampler_seed")

# %% [markdown]
# ### The program, with shards

# %%
# %%ranks 4
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler  # +
from digits import load, net, train_epoch

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
train, test = load()
sampler = DistributedSampler(train)  # + rank and size come from the process group
loader = DataLoader(train, batch_size=32, sampler=sampler)  # + instead of shuffle=True
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)  # +
    total, count = train_epoch(model, loader, optimizer)
    print(f"epoch {epoch}: loss {total / count:.3f} over {count:.0f} samples, {len(loader)} steps")

# %% [markdown]
# Each rank takes 12 steps per epoch instead of 47, so the loss falls more slowly. The ranks still train four separate
# models.
#
# ## Wrapping
#
# `DDP(model)` copies rank 0's parameters to every rank and averages gradients in backward (chapter 1). So the ranks'
# weights may differ at the start:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # different on purpose
model = torch.nn.Linear(3, 1)
print("before:", [round(w, 3) for w in model.weight.flatten().tolist()])
ddp = DDP(model)
print("after: ", [round(w, 3) for w in model.weight.flatten().tolist()])
assert ddp.module is model  # wrapped, not copied: the same parameters

# %% [markdown]
# But the *architecture* must be the same: the parameters, their shapes, and the order in which they are registered.
# DDP compares shapes:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
labels = [4, 5][dist.get_rank()]  # BUG: each rank counted the classes in its own shard
DDP(torch.nn.Linear(4, labels))

# %% [markdown]
# DDP doesn't compare names. **Predict** what rank 1 prints if it registers two parameters of the same shape in a
# different order:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]  # BUG: for example, the names came from a set
model = torch.nn.Module()
for number, name in enumerate(names):
    model.register_parameter(name, torch.nn.Parameter(torch.tensor([1.0 + number])))
DDP(model)
print({name: parameter.item() for name, parameter in sorted(model.named_parameters())})

# %% [markdown]
# On rank 1 the two weights are swapped, without an error. Register parameters in a fixed order, never in that of a
# set.

# %%
quiz("02_setup/when_synchronized")

# %% [markdown]
# ### The program, wrapped

# %%
# %%ranks 4 --into run
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # +
from torch.utils.data import DataLoader, DistributedSampler
from digits import load, net, train_epoch
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
train, test = load()
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
model = DDP(net())  # +
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    total, count = train_epoch(model, loader, optimizer)
    print(f"epoch {epoch}: loss {total / count:.3f} over {count:.0f} samples, {len(loader)} steps")
observe("weights", torch.cat([parameter.flatten() for parameter in model.parameters()]))

# %%
weights = [torch.as_tensor(one) for one in run.observed("weights")]
assert all(torch.equal(one, weights[0]) for one in weights)  # exactly equal, not nearly
print(f"{len(weights)} ranks, {len(weights[0])} parameters each, all equal")

# %% [markdown]
# One line turns four models into one, which learns from all 1500 samples. The losses differ, because each rank prints
# the loss over its own samples. The losses fall as slowly as before, because an epoch still has only 12 steps.
#
# ### Move first, wrap last
#
# DDP attaches its hooks when you wrap the model. A later change of dtype or device silently removes them (chapter 1,
# "What DDP never notices"). If you freeze a parameter after wrapping, DDP still waits for its gradient: one more step
# runs, and the next forward raises an error.
#
# So wrap last. DDP refuses a model that is only partly moved:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
model[1].to("meta")  # BUG: half of the model moved ("meta" stands in for a GPU)
DDP(model)

# %% [markdown]
# On a GPU you may add `device_ids=[local_rank]`. Then DDP also moves the inputs of `forward` to that GPU, but not the
# targets, which never pass through DDP. On a CPU, leave `device_ids` out:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 1), device_ids=[0])  # BUG: the model is on the CPU

# %% [markdown]
# Older programs also pass `output_device`, which DDP's forward ignores:

# %%
import inspect
from torch.nn.parallel import DistributedDataParallel as DDP

methods = DDP.forward, DDP._pre_forward, DDP._post_forward, DDP._run_ddp_forward
source = "".join(inspect.getsource(method) for method in methods)
for name in ("device_ids", "output_device"):
    print(f"{name}: {source.count(name)} mentions in the code of DDP's forward")

# %% [markdown]
# ### Seeds
#
# DDP doesn't need equal seeds. Are equal seeds harmless? Look at dropout:

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dropout, x = torch.nn.Dropout(0.5), torch.ones(12)
torch.manual_seed(0)  # BUG for training: the same on all ranks
print("same seed:  ", dropout(x).int().tolist())
torch.manual_seed(0 + dist.get_rank())
print("seed + rank:", dropout(x).int().tolist())

# %% [markdown]
# With equal seeds, all ranks drop the same units and augment samples in the same way. Pass `seed + rank` to
# `torch.manual_seed`. Only the sampler's `seed` must be equal on all ranks.

# %%
quiz("02_setup/same_seed")

# %% [markdown]
# ## Global metrics
#
# How far can rank 0's loss be from the loss over all ranks? Four ranks evaluate the same model. The test samples are
# sorted by class, as in many files, and the last rank gets most of them:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from digits import load, net, train_epoch

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same model on all ranks
(train, test), model = load(), net()
train_epoch(model, DataLoader(train, 32), torch.optim.SGD(model.parameters(), 0.2))
x, y = test.tensors
parts = y.argsort(stable=True).tensor_split([10, 20, 30])  # 10, 10, 10 and 267 samples
mine = parts[dist.get_rank()]  # sorted by class: rank 0 has only zeros
losses = cross_entropy(model(x[mine]), y[mine], reduction="none").detach()
print(f"mine {losses.mean():.2f} over {len(losses):3}", end="   ")
sums = torch.tensor([losses.sum(), len(losses), losses.mean()])
dist.all_reduce(sums)
total, count, means = sums
print(f"all {total / count:.2f} over {count:.0f}   mean of means {means / 4:.2f}")
torch.testing.assert_close(total / count, cross_entropy(model(x), y).detach())

# %% [markdown]
# Over all samples the loss is 1.55, but rank 0, which saw only zeros, would report 1.43. The mean of the four means,
# 1.41, is wrong too: it gives 10 samples the same weight as 267. So **reduce the sum and the count, and divide at the
# end.**
#
# Don't evaluate with `DistributedSampler`: it pads, so some samples count twice. Instead, let rank r of N take
# samples r, r + N, r + 2N and so on:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler, Subset
from digits import load

dist.init_process_group("gloo")
test = load()[1]
mine = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))  # give it to a loader
counts = torch.tensor([len(mine), len(DistributedSampler(test))])
dist.all_reduce(counts)
print(f"{len(test)} samples; counted by range: {counts[0]}, by sampler: {counts[1]}")

# %% [markdown]
# If the model has buffers, the DDP wrapper's forward may broadcast them (chapter 1). So evaluate the wrapper's
# `.module`: then ranks with different numbers of batches don't hang, because their only collective is the all-reduce
# at the end.
#
# ### Every rank calls, rank 0 prints
#
# It is easy to put both the all-reduce and the print under one `if`:

# %%
# %%ranks 3 --expect hang
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(2)
if dist.get_rank() == 0:
    dist.all_reduce(total)  # BUG: only rank 0 calls it
    print(f"loss {total[0] / total[1]:.2f}")
dist.barrier()

# %% [markdown]
# A hang at least reveals the mistake. It is worse if the other ranks' next collective reduces a tensor of the same
# size, such as a gradient. **Predict** what rank 1 prints:

# %%
# %%ranks 2 --expect anything
import torch, torch.distributed as dist

dist.init_process_group("gloo")
loss, gradient = torch.tensor([1.0]), torch.tensor([100.0])
if dist.get_rank() == 0:
    dist.all_reduce(loss)  # BUG: only rank 0 calls it
    print("loss", loss.item())
dist.all_reduce(gradient)
print("gradient", gradient.item())

# %% [markdown]
# 101 is a loss plus a gradient: gloo pairs calls by their order, and both tensors have the same size. Rank 0's next
# all-reduce has no partner: it hangs, or fails when rank 1 ends.

# %%
quiz("02_setup/rank0_loss")

# %%
quiz("02_setup/unequal_shards")

# %% [markdown]
# ## Cleanup
#
# When a rank has finished, it leaves the group with `destroy_process_group`. Until its process joins a new group,
# every collective raises an error:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()  # the work
print("in the group:", dist.is_initialized())
dist.destroy_process_group()
print("in the group:", dist.is_initialized())
dist.barrier()  # BUG: after the end

# %% [markdown]
# ### The whole program
#
# Besides the device and the cleanup, three things are new:
#
# - All ranks reduce the loss; rank 0 prints it.
# - A step learns from 4 × 32 samples, so the learning rate is multiplied by the number of ranks (a rule of thumb
#   that chapter 4 tests).
# - Rank 0 alone saves the weights, which are equal everywhere; several writers could corrupt the file. It saves
#   `model.module`, because the wrapper's state dict puts `module.` before every name.
#
# `--save` writes the cell to a file.

# %% tags=["whole-program"]
# %%ranks 4 --save train.py
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from device import local_device
from digits import load, net, train_epoch

def train(device, rank, size, epochs=4):
    data, _ = load()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    torch.manual_seed(rank)
    model = DDP(net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 * size)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = train_epoch(model, loader, optimizer)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.2f} over {total[1]:.0f} samples")
    if rank == 0:
        torch.save(model.module.state_dict(), "digits.pt")

def main():
    device, backend = local_device()
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    train(device, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()

if __name__ == "__main__":
    main()

# %% [markdown]
# Now start the file with torchrun. `quiet_exit.py` runs the program and avoids a gloo bug at exit (see the box
# below):

# %%
def terminal(*arguments):
    """Run `python arguments ...` as a terminal would, and print its output."""
    job = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200)
    print(job.stdout, end="")
    return job  # with the errors in job.stderr

TORCHRUN = ("-m", "torch.distributed.run")  # what the command torchrun does
job = terminal(*TORCHRUN, "--nproc-per-node=4", "quiet_exit.py", "train.py")
print("exit status", job.returncode)

# %%
from digits import load, net

model, weights = net(), torch.load("digits.pt")
print(*weights)  # the names
model.load_state_dict(weights)
x, y = load()[1].tensors
print(f"correct on {(model(x).argmax(1) == y).float().mean():.0%} of the {len(y)} test digits")

# %% [markdown]
# ### Ports and threads
#
# On one node, torchrun picks a free port, so two jobs don't clash. With several processes it also sets
# `OMP_NUM_THREADS=1`; otherwise each of them would start a thread for every core:

# %%
environment = dict(os.environ)
environment.pop("OMP_NUM_THREADS", None)  # as on a fresh machine
show = ["--no-python", "sh", "-c", "echo $MASTER_PORT ${OMP_NUM_THREADS-unset}"]
jobs = []
for size in (1, 2):
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={size}", *show]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    jobs.append(subprocess.Popen(command, env=environment, **streams))
(one, alone), (two, shared, *_) = [job.communicate(timeout=200)[0].split() for job in jobs]
print("two jobs, different ports:", one != two)
print("OMP_NUM_THREADS:", alone, "for one process,", shared, "for two")

# %% [markdown]
# ### When a rank fails
#
# | what fails | what to do |
# |---|---|
# | a **program** under a launcher | nothing: the exception ends its process, and the launcher ends the other ranks |
# | a **function** whose caller continues, in a notebook or a test | leave the group in a `finally`; otherwise the next call finds the old group |
#
# First the program:

# %%
# %%writefile fails.py
import os, time

if os.environ["RANK"] == "1":
    raise ValueError("bad data")  # BUG, on purpose
time.sleep(600)

# %%
job = terminal(*TORCHRUN, "--nproc-per-node=2", "fails.py")
for line in job.stderr.splitlines():
    if line.startswith(("ValueError", "Root Cause", "  rank", "  exitcode")):
        print(line.partition(" (pid")[0])

# %% [markdown]
# torchrun names the rank that failed first, and ends rank 0 with SIGTERM (−15). In such a program, don't call
# `destroy_process_group` in a `finally`: with NCCL, this call can wait for GPU work that needs the other ranks, and
# you see the traceback only after this wait. If the caller continues, use `finally`:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(data_is_bad):
    dist.init_process_group("gloo")
    ddp = None
    try:
        ddp = DDP(torch.nn.Linear(2, 1))
        if data_is_bad:
            raise ValueError("bad data")
    finally:
        del ddp  # the wrapper first, then its group
        dist.destroy_process_group()

try:
    train(data_is_bad=True)
except ValueError as error:
    print("the call failed:", error, end="   ")
print("still in a group:", dist.is_initialized())

# %% [markdown]
# ### Box: gloo at the exit
#
# > Two bugs in gloo (torch 2.13) appear at random, so no cell shows them.
# >
# > **A wrapper that outlives its group can hang the process.** No timeout ends this hang. Before you leave the group,
# > delete the wrapper (as above) or return from the function that holds it (as `train` does in `train.py`). An
# > exception's traceback keeps the wrapper alive too; `traceback.clear_frames(error.__traceback__)` releases it.
# >
# > **A process that used gloo sometimes aborts at its very end**, after everything has been saved (see
# > [pull request 179291](https://github.com/pytorch/pytorch/pull/179291)). You see
# > `terminate called without an active exception` and exit status −6, and torchrun reports a failed job.
# >
# > The only reliable fix is to flush the output and call `os._exit(0)`, as `quiet_exit.py` does. `os._exit` skips
# > `atexit` handlers, so close loggers and wait for background saves first. Here the handler's line is never printed:

# %%
job = terminal("-c", """
import atexit, os
atexit.register(print, "the log is closed")
print("work is done", flush=True)
os._exit(0)
""")

# %%
quiz("02_setup/exit_status")

# %% [markdown]
# ## Exercise: implement train_ddp
#
# *Medium, 25 minutes.* Open [exercises/train_ddp.py](../exercises/train_ddp.py).
#
# Write everything from "Sharding" to "Cleanup" in one function, for any model and any data. Use `lr` as it is given,
# without scaling it. On GPUs, `torch.cuda.current_device()` returns the device that `setup_ddp` selected.

# %%
contract("train_ddp")

# %%
# %check train_ddp

# %% [markdown]
# `./lockstep solution train_ddp` shows the solution.
#
# ## Launching from Python
#
# A library or a test may have to start its own ranks, with `torch.multiprocessing.spawn` (`mp.spawn`). Then you
# supply the address and the port, and collect the results:

# %%
# %%writefile spawn_digits.py
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, world_size, port, file):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent runs the store
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    t = torch.tensor([1.0 + rank])
    dist.all_reduce(t)
    if rank == 0:
        torch.save(t, file)  # a rank's memory is gone when it ends: results go through a file
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see the box “gloo at the exit”

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
    returned = mp.spawn(work, (2, store.port, "sum.pt"), nprocs=2)
    print("mp.spawn returned", returned, "and the file holds", torch.load("sum.pt").item())
    os.remove("sum.pt")

# %%
job = terminal("spawn_digits.py")

# %% [markdown]
# **`mp.spawn` returns `None`.** A rank's results are lost when it ends, unless it passes them on. Here rank 0 writes
# its result to a file.
#
# **The function is in a file, and the launch is under `if __name__ == "__main__"`.** Each new process imports the file
# to find the function. Without the guard, that import would launch ranks again. Python prevents this with an error:

# %%
# %%writefile spawn_unguarded.py
import torch.multiprocessing as mp

def work(rank):
    print("rank", rank)

mp.spawn(work, nprocs=1)  # BUG: not under if __name__ == "__main__"

# %%
job = terminal("spawn_unguarded.py")
for line in job.stderr.splitlines():
    if "An attempt" in line or "current process has finished" in line:
        print(line.strip())

# %% [markdown]
# `mp.spawn` can't run a function that you define in a notebook, because no file contains it.
#
# **The system picks a free port.** With a fixed port, a second job on the same machine can't start:

# %%
first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
try:
    dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)  # BUG: it is taken
except dist.DistNetworkError as error:
    assert "EADDRINUSE" in str(error)  # "address already in use"
    print(type(error).__name__, "with EADDRINUSE")

# %% [markdown]
# The parent keeps its store open, so no other program can take the port. `TORCHELASTIC_USE_AGENT_STORE` tells rank 0
# to use that store. In `work`, you can call your `setup_ddp` instead of `init_process_group`.
#
# **If one rank raises an error, `mp.spawn` ends the others** and raises an exception that contains the rank's
# traceback. (For a rank that is killed, `mp.spawn` raises `ProcessExitedException`, without a traceback.) Here rank 0
# would sleep for ten minutes, but `mp.spawn` ends it as soon as rank 1 fails:

# %%
# %%writefile spawn_error.py
import time
import torch.multiprocessing as mp

def work(rank):
    if rank == 1:
        raise ValueError("no data on this rank")  # BUG, on purpose
    time.sleep(600)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)

# %%
job = terminal("spawn_error.py")
for line in job.stderr.splitlines():
    if line.startswith(("torch.", "-- Process", "ValueError")):
        print(line)

# %%
quiz("02_setup/spawn_returns")

# %% [markdown]
# ## Exercise: implement launch_distributed
#
# *Medium, 15 minutes.* Open [exercises/launch_distributed.py](../exercises/launch_distributed.py).
#
# Start the ranks, have each run your `train_ddp`, and return the trained weights.

# %%
contract("launch_distributed")

# %%
# %check launch_distributed

# %% [markdown]
# If the check sometimes reports exit status −6, call `os._exit` on each rank after saving its result (see the box in
# "Cleanup"). `./lockstep solution launch_distributed` shows the solution.
#
# ## Several nodes
#
# Messages between nodes are slower than within a node, so use all GPUs of one node before you add a second. The program
# doesn't change. On each node, start torchrun once. This torchrun process is the node's *agent*:
#
# ![Two nodes, a launcher and two ranks on each, and one store](pictures/two_nodes.svg)
#
# ```
# # on node 0
# torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 \
#     --master-addr=10.0.0.1 --master-port=29500 train.py
# # on node 1
# torchrun --nnodes=2 --nproc-per-node=2 --node-rank=1 \
#     --master-addr=10.0.0.1 --master-port=29500 train.py
# ```
#
# Here you number the nodes, with `--node-rank`. With `--rdzv-backend=c10d`, the agents agree on the numbers, and the
# command is the same on every node:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \
#     --rdzv-endpoint=10.0.0.1:29500 --rdzv-id=job7 train.py
# ```
#
# Try two agents on one machine:

# %%
# %%writefile nodes.py
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor(dist.get_rank())
dist.all_reduce(t)
names = ("GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
line = "  ".join(f"{name}={os.environ[name]}" for name in names) + f"  sum of the ranks: {t}"
sys.stdout.write(line + "\n")  # one write per rank, so that lines do not mix
dist.destroy_process_group()

# %%
import socket

with socket.socket() as probe:  # free now; on a cluster, choose one that the firewall allows
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
agents = []
for node in range(2):
    command = [sys.executable, *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
               "--master-addr=127.0.0.1", f"--master-port={port}", "quiet_exit.py", "nodes.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    agents.append(subprocess.Popen(command, **streams))
try:
    said = [agent.communicate(timeout=200)[0] for agent in agents]
finally:
    for agent in agents:
        agent.terminate()  # does nothing when it has ended
print(*sorted("".join(said).splitlines()), sep="\n")

# %% [markdown]
# If you need the node's number, for example to name a log, read `GROUP_RANK`. Don't divide `RANK` by the number of
# GPUs. If some GPUs have no rank, the result is wrong:

# %%
# %%ranks 4 --nodes 2
import os

gpus = 4  # on each node, but each node has only two ranks
computed = int(os.environ["RANK"]) // gpus  # BUG: counts GPUs, not ranks
print("GROUP_RANK:", os.environ["GROUP_RANK"], "  computed:", computed)

# %%
quiz("02_setup/node_rank")

# %% [markdown]
# ### When nodes can't reach each other
#
# Every node must reach `MASTER_ADDR:MASTER_PORT`, so `localhost` doesn't work. While the job starts, call
# `reach(MASTER_ADDR, MASTER_PORT)` on each node:

# %%
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "no answer"
    return "connected"

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
port = store.port
print("while the store is up:", reach("127.0.0.1", port))
del store
print("when it is gone:      ", reach("127.0.0.1", port))

# %% [markdown]
# "Refused" usually means that nothing listens at this port. "No answer" points to a firewall or a wrong route. One
# open port isn't enough: the ranks also connect to each other, at ports that the system chooses. If a machine has
# several network interfaces, `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` select one.
#
# ### Under SLURM
#
# SLURM is the scheduler of many clusters: it decides which job runs on which nodes. Its command `srun` starts
# processes, called tasks, and sets its own variables. The simplest way is to start one task per node, and let it run
# torchrun (chapter 5). With one task per rank, translate the variables:
#
# | torchrun sets | from SLURM, with one task per rank |
# |---|---|
# | `RANK` | `SLURM_PROCID` |
# | `LOCAL_RANK` | `SLURM_LOCALID` |
# | `WORLD_SIZE` | `SLURM_NTASKS` |
# | `LOCAL_WORLD_SIZE` | `SLURM_NTASKS_PER_NODE`, if `--ntasks-per-node` was given |
# | `GROUP_RANK` | `SLURM_NODEID` |
# | `MASTER_ADDR` | the first name in `scontrol show hostnames $SLURM_JOB_NODELIST` |
# | `MASTER_PORT` | any free port, the same for all ranks, such as 10000 + `SLURM_JOB_ID` % 20000 |
#
# SLURM doesn't set `TORCHELASTIC_USE_AGENT_STORE`, so rank 0 runs the store.
#
# ## Checklist
#
# - **Before the group.** Prepare the data. Start even a single process with torchrun.
# - **The group.** Call `set_device` with `LOCAL_RANK`, then `init_process_group`. Check the sum of the ranks once.
# - **The model.** Build it, load its weights, convert BatchNorm (`SyncBatchNorm`, chapter 1), set the dtype, move
#   it; wrap it last. Pass `device_ids` only on a GPU.
# - **Seeds.** Use `seed + rank` for training, and one seed for all samplers.
# - **The data.** Use `DistributedSampler`, no `shuffle` in the loader, and `set_epoch`. Move inputs and targets.
# - **The loop.** Call the wrapper, not its `.module`. Call no collective under `if rank == 0`.
# - **Numbers.** All-reduce sum and count, then divide. Evaluate `.module`, without padding.
# - **Files.** Rank 0 writes `model.module.state_dict()`. Call `barrier` before other ranks read it (chapter 5).
# - **The end.** Delete the wrapper, then call `destroy_process_group`; in a function, use `finally`.
#
# ## What to remember
#
# - The launcher sets a rank's variables; the program reads them.
# - If one rank is missing, the others wait.
# - The *local* rank selects the device, the *global* rank the shard.
# - DDP attaches its hooks once, so wrap last.
# - Some mistakes are silent. Check that `len(loader)` is 1/N of its value in one process, and that all ranks have
#   equal weights.
#
# In an interview, expect "what does DDP send between `loss.backward()` and `optimizer.step()`?" (Nothing: backward has
# already averaged the gradients, chapter 1.)
#
# ## What to read next
#
# Chapter 3 diagnoses broken jobs. PyTorch's pages describe DDP (`pytorch.org/docs/stable/notes/ddp.html`) and
# torchrun's options (`pytorch.org/docs/stable/elastic/run.html`).

# %%
from lockstep.notebook.course_map import course_map

course_map("02_setup")
