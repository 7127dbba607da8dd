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
# You start with a program that trains a small network on handwritten digits, in one process. At the end the same
# program trains on four ranks, on one machine or on several, and you know what each added line is for, because you
# will have seen what happens without it.
#
# After this chapter you can
#
# - **start** the same program on N ranks, and read off which rank is which and where it lives;
# - **connect** the ranks to a process group with the backend that fits their devices;
# - **shard** a data set so that every epoch deals each sample to one rank, in a new order;
# - **wrap** a model, and say when its gradients are averaged and what makes that stop without an error;
# - **report** a loss that is true for all ranks, and **leave** the group in good order;
# - **launch** the ranks from Python, and over several nodes.
#
# About 105 minutes: 50 to read and run, 55 for three exercises. You need PyTorch's training loop, and from chapter 1
# what an all-reduce is. No GPU: ranks here are processes on your CPU, and the backend is gloo. Where a statement is
# about GPUs it says so, and says that it was not run here.

# %%
# %load_ext lockstep
import os, re, subprocess, sys
from pathlib import Path
import torch
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

# %% [markdown]
# ## Where we start
#
# The data are scikit-learn's digits: 1797 images of 8×8 pixels. One process writes them to a file, before any rank
# exists. That is a habit worth having: what four ranks download or unpack at once, they do four times, into the same
# place.

# %%
import numpy
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
numpy.savez("digits.npz", images=images.astype("uint8"), labels=labels)
print(images.shape, labels[:10])

# %% [markdown]
# `digits.py` holds what has nothing to do with ranks: the data, the network, one epoch. **None of its lines will change
# in this chapter.** Look at `train_epoch`: it returns a sum and a count, not a mean. You will see why.

# %%
print(Path("digits.py").read_text())

# %% [markdown]
# And the program around it. `%%ranks 1` runs a cell in one fresh process, the way `python train.py` would.

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
# A distributed program is one file, started N times. The copies do the same until something tells them apart, and that
# something is the environment: a **launcher** starts the processes and sets a few variables for each. PyTorch's own
# launcher is `torchrun`. On a terminal:
#
# ```
# torchrun --nproc-per-node=4 train.py
# ```
#
# `%%ranks 4` does the same to a cell. It sets what torchrun sets, but forks the ranks from a process that has imported
# torch already, so they are there in a tenth of a second.

# %%
# %%ranks 4
import os
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"):
    print(f"{name}={os.environ[name]}", end="  ")

# %% [markdown]
# This is what a program learns from its launcher:
#
# | variable | what it says |
# |---|---|
# | `RANK` | which process this is, 0 to `WORLD_SIZE` − 1, over all nodes (machines) |
# | `WORLD_SIZE` | how many there are |
# | `LOCAL_RANK` | which process this is on its own node: the number of its GPU |
# | `LOCAL_WORLD_SIZE` | how many run on this node |
# | `GROUP_RANK` | which node this is |
# | `MASTER_ADDR`, `MASTER_PORT` | where the **store** is, at which the ranks meet |
# | `TORCHELASTIC_USE_AGENT_STORE` | `True`: the launcher hosts the store. Without it, rank 0 does |
# | `TORCHELASTIC_RESTART_COUNT` | how often the launcher has restarted this job (chapter 5) |
#
# torchrun also sets `OMP_NUM_THREADS=1` unless you have set it, so that N ranks do not each start a thread for every
# core. On one node, `RANK` and `LOCAL_RANK` are the same number, and a program that confuses them works. Spread the
# ranks over two nodes and they part:

# %%
# %%ranks 4 --nodes 2
import os
print("RANK {RANK} is LOCAL_RANK {LOCAL_RANK} on node {GROUP_RANK}".format(**os.environ))

# %% [markdown]
# Rank 2 is the first process of the second node, and its GPU is GPU 0 of that node. `torch.device("cuda", rank)` would
# ask for a third GPU where there may be two.

# %%
quiz("02_setup/local_rank")

# %% [markdown]
# ### Without a launcher
#
# Start such a program with plain `python` and the variables are missing. Read the error: it names the first one that
# was looked for.

# %%
# %%ranks 2 --expect raised
import os
import torch.distributed as dist

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]  # as it is when the program is started with plain python
dist.init_process_group("gloo")

# %% [markdown]
# **What this tells you.** The program is fine, the way it was started is not. To try it with a single process, still
# use the launcher: `torchrun --nproc-per-node=1 train.py`. Some programs avoid the error with a default, and turn it
# into something worse:

# %%
# %%ranks 4
import os

os.environ.pop("LOCAL_RANK")  # a launcher that does not set it, such as a hand-written one
local_rank = int(os.environ.get("LOCAL_RANK", 0))  # BUG: the default hides that it is missing
print("my device is cuda:%d" % local_rank)

# %% [markdown]
# Four ranks, one GPU, no error here. On a machine with GPUs the job would fail later and elsewhere: out of memory on GPU
# 0, or nccl, the backend for GPUs, refusing two ranks on one device. `os.environ["LOCAL_RANK"]` fails where the fault is.
#
# ### When the numbers are wrong
#
# Three mistakes in the numbers, and how each shows under torchrun. In all three nothing raises before a timeout: the
# ranks wait for a meeting that cannot be complete. `--expect hang` says that the cell is meant to end this way.

# %%
# %%ranks 2 --expect hang
import os
import torch.distributed as dist

os.environ["WORLD_SIZE"] = "3"  # BUG: two were started
dist.init_process_group("gloo")

# %%
# %%ranks 3 --expect hang
import os
import torch.distributed as dist

if os.environ["RANK"] == "2":
    raise SystemExit  # BUG: rank 2 leaves before the meeting, say because its data are not there
dist.init_process_group("gloo")

# %%
# %%ranks 2 --expect hang
import os
import torch.distributed as dist

os.environ["RANK"] = "0"  # BUG: both are rank 0
dist.init_process_group("gloo")

# %% [markdown]
# **What this tells you.** When a job stands still before its first step, look for a `WORLD_SIZE` that is too large, a rank
# that did not come, and two ranks of one number. (Without a launcher's store the last one is loud: the second rank 0 wants to open the store as well, and
# raises `EADDRINUSE`.) Count the processes, and print `RANK` and `WORLD_SIZE` on each *before* `init_process_group`:
# after it is too late to see anything.
#
# ### Never overwrite what the launcher set
#
# Many examples on the web begin with two lines that set `MASTER_ADDR` and `MASTER_PORT`. They come from programs that
# start their own ranks (we get there in "Launching from Python"). Under torchrun they break the job:

# %%
# %%ranks 2 --expect hang
import os
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "12355"  # BUG: torchrun's store is at another port
dist.init_process_group("gloo")

# %% [markdown]
# Rank 0 does not open port 12355 either. `TORCHELASTIC_USE_AGENT_STORE` has told it that somebody hosts the store
# already, so all ranks knock at a door behind which nobody lives.

# %%
quiz("02_setup/environment")

# %% [markdown]
# ## The process group
#
# The ranks have numbers but do not know each other. `init_process_group` makes them a **process group**: it returns when
# all of them have come. They find each other through the store, a small server of keys and values at
# `MASTER_ADDR:MASTER_PORT`. You can use it yourself:

# %%
# %%ranks 3
import os
import torch.distributed as dist

rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"note from {rank}", f"rank {rank} was here")
print(store.get(f"note from {(rank + 1) % 3}").decode())  # get waits until the key is there

# %% [markdown]
# gloo does the same with addresses: each rank writes its own to the store, reads the others', and connects to them. From
# then on tensors go from rank to rank, not through the store. Usually all of this is one line. Without further
# arguments it takes everything from the environment, which is called `env://` and is the default:

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
# That assert is a good first line for a new cluster: if the sum of the ranks comes out right, everybody is there, with
# the right number, and can reach the others.
#
# ### How long it waits
#
# Waiting has an end, and the default is long: 30 minutes with gloo. With nccl it is 10, as the documentation of
# `init_process_group` says.

# %%
import torch.distributed as dist

print("gloo:", dist.default_pg_timeout)
assert "10 minutes for NCCL" in " ".join(dist.init_process_group.__doc__.split())

# %% [markdown]
# The timeout holds for `init_process_group` and then for each collective. Shorten it while you try things out. Here it
# is a third of a second, so that you see the error which otherwise takes half an hour to come:

# %%
# %%ranks 2 --expect raised --quiet
import os
from datetime import timedelta
import torch.distributed as dist

os.environ["WORLD_SIZE"] = "3"  # BUG: two were started
dist.init_process_group("gloo", timeout=timedelta(milliseconds=300))

# %% [markdown]
# **What this tells you.** The key that was waited for ends in `/2`: the address of rank 2, which nobody has written.
# Every rank that *came* raises the error, and the one that did not come says nothing.
#
# A long timeout has its place all the same. While rank 0 does something alone for twenty minutes, the others wait in
# their next collective, and nccl's ten minutes would be too few. The timeout is an argument of `init_process_group`;
# `DDP(...)` has none.

# %%
# %%ranks 1 --expect raised
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 1), timeout=60)  # BUG: not DDP's argument

# %%
quiz("02_setup/missing_rank")

# %% [markdown]
# ### Groups within the group
#
# A collective can be restricted to some of the ranks. `new_group` makes such a group, with a timeout of its own. The
# documentation asks **every** rank to call it, in the same order, also those who will not be members. Here two halves of
# two ranks each:

# %%
# %%ranks 4
from datetime import timedelta
import torch, torch.distributed as dist

dist.init_process_group("cpu:gloo")
halves = [dist.new_group(members, timeout=timedelta(seconds=20)) for members in ([0, 1], [2, 3])]
mine = halves[dist.get_rank() // 2]
t = torch.tensor(dist.get_rank())
dist.all_reduce(t, group=mine)
print(f"rank {dist.get_rank()}: number {dist.get_rank(mine)} of its half, whose ranks sum to {t}")

# %% [markdown]
# `cpu:gloo` names the backend for a kind of device: gloo, for tensors on the CPU and no others. The next section has the use
# of it.
#
# ### Four programs side by side
#
# Now take the program from the start and run it on four ranks, with the group added, and a seed for each rank. Lines
# marked `+` are new.

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
# Four losses, each over all 1500 samples: four separate trainings that happen to share a machine. A process group alone
# synchronises nothing. Two things are missing: each rank should take its part of the data ("Sharding"), and the gradients
# should be averaged ("Wrapping"). Before them, a word about devices.
#
# ## Backends and devices
#
# The **backend** is the library that carries the collectives. Which one depends on where the tensors are:
#
# | | tensors on CPU | tensors on NVIDIA GPUs |
# |---|---|---|
# | `gloo` | yes | some collectives, slowly |
# | `nccl` | no | yes, from GPU to GPU |
# | `cpu:gloo,cuda:nccl` | gloo | nccl |
#
# Without GPU support nccl is not there at all:

# %% ignored_because="the message depends on whether this torch was built with CUDA" tags=["nbval-ignore-output"]
# %%ranks 1 --expect raised --quiet
import torch.distributed as dist

dist.init_process_group("nccl")

# %% [markdown]
# nccl wants a GPU for each rank. Two ranks of one group on the same GPU are an error by default, so the right
# question is not "is there a GPU?" but "has every rank of this node its own?". `device.py` asks it:

# %%
print(Path("device.py").read_text())

# %% [markdown]
# On this machine's CPUs every rank gets the same answer. To see the other answer without GPUs, pretend: two nodes with
# two GPUs each, and a `set_device` that only says what it was asked.

# %%
# %%ranks 4 --nodes 2
import torch
import torch.distributed as dist
from device import local_device

print("here:", *local_device())
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda index: print(f"set_device({index})")
print("with two GPUs a node:", *local_device())

# %% [markdown]
# Ranks 2 and 3 take GPUs 0 and 1 of their own node, because the device goes by `LOCAL_RANK`. Three rules about GPUs,
# which follow from the documentation and were not run here:
#
# - **`set_device` first, then `init_process_group`.** Until it is called, everything that says just `"cuda"` goes to GPU
#   0, from every rank. The other order often works, since nccl connects at the first collective only, but what runs in
#   between opens a context on GPU 0 for each rank.
# - Newer code also names the device to the group: `init_process_group("nccl", device_id=torch.device("cuda", local_rank))`
#   connects at once and tells collectives such as `barrier` which device is meant. It does not replace `set_device`.
# - Inputs and targets have to be moved as well. `train_epoch` in `digits.py` does it. A loss function needs moving only
#   if it holds tensors of its own:

# %%
plain, weighted = torch.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(weight=torch.ones(10))
print("CrossEntropyLoss():           ", [name for name, _ in plain.named_buffers()])
print("CrossEntropyLoss(weight=...): ", [name for name, _ in weighted.named_buffers()])
assert not list(plain.parameters()) and not list(plain.buffers())  # nothing that .to(device) could move

# %%
quiz("02_setup/device_of")

# %% [markdown]
# ## Exercise: implement setup_ddp
#
# *Medium, 15 minutes.* Open `exercises/setup_ddp.py`.
#
# You write two functions that the next exercises use. `setup_ddp` chooses device and backend and joins the group;
# `cleanup_ddp` leaves it. They have to work under torchrun *and* under a launcher of your own that sets nothing but an
# address and a port, so look at what is there before you decide.
#
# `cleanup_ddp` is short: `dist.destroy_process_group()` raises when there is no group, and this one must not.

# %%
contract("setup_ddp", "setup_ddp", "cleanup_ddp")

# %%
# %check setup_ddp

# %% [markdown]
# This is what it looks like when it works (the stored output is the reference solution's). `%hint setup_ddp` gives the
# next hint.
#
# <details><summary>It hangs under torchrun</summary>
# Something in your function writes to <code>os.environ</code>, or opens a store at an address of its own. Print
# <code>MASTER_PORT</code> at its first and its last line.
# </details>
#
# <details><summary>KeyError: 'LOCAL_RANK'</summary>
# The check also calls it as a launcher built on mp.spawn would, with nothing but an address and a port. What can you
# take instead when there is just one node?
# </details>
#
# <details><summary>"trying to initialize the default process group twice!"</summary>
# There is a group already. The error is right, and the contract wants one. If your own code made that group, it did not
# leave it: see <code>cleanup_ddp</code>.
# </details>
#
# The solution is `solutions/setup_ddp.py`. Read it when yours passes: it solves one problem that yours may have solved
# differently, the second group of the same process.
#
# ## Sharding
#
# Each rank should see its own part of the data. `DistributedSampler` deals the indices like cards. It needs no process
# group when you tell it rank and size, so we can look at it without any ranks:

# %%
from torch.utils.data import DistributedSampler

def deal(samples, ranks, epoch=0, **options):
    """The indices that each rank gets."""
    samplers = [DistributedSampler(range(samples), ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]

deal(10, 4, shuffle=False)

# %% [markdown]
# Rank r gets r, r + 4, r + 8. But 10 does not divide by 4, and all ranks have to make the same number of steps, or one
# would wait in an all-reduce for another that has finished. So the sampler **pads**: samples 0 and 1 are dealt twice.
# Twelve indices for ten samples. In training two repeated samples rarely matter. In an evaluation they do: "Global
# metrics" comes back to that.
#
# `drop_last=True` leaves samples out instead. Which way is better for you depends on whether you would rather count one
# twice or not at all; with fewer samples than ranks it leaves nothing.

# %%
dealt = deal(10, 4, shuffle=False)
assert sum(map(len, dealt)) == 12 and set(sum(dealt, [])) == set(range(10))
print("drop_last: ", deal(10, 4, shuffle=False, drop_last=True))
print("3 samples: ", deal(3, 4, shuffle=False), deal(3, 4, shuffle=False, drop_last=True))

# %% [markdown]
# Where the number does divide, every sample has one owner. The loader has a `drop_last` of its own, which is another
# thing: the ranks have equally many batches without it, and with it all of them leave their last, smaller one out.

# %%
from torch.utils.data import DataLoader

dealt = deal(1000, 4)
print("samples of each rank:", *map(len, dealt), "  dealt twice:", 1000 - len(set(sum(dealt, []))))
for drop_last in (False, True):
    sizes = [len(batch) for batch in DataLoader(range(1000), 32, sampler=dealt[0], drop_last=drop_last)]
    print(f"the loader with drop_last={drop_last}: {len(sizes)} batches, the last of {sizes[-1]}")

# %% [markdown]
# ### Shuffling, and set_epoch
#
# By default the sampler shuffles. All ranks have to shuffle alike, or their parts would not fit together, and they do so
# without talking: each computes the same permutation from `seed + epoch` and takes its own slice. The epoch is a number
# that you tell it. If you do not, it stays 0.

# %%
for epoch in range(3):
    print(f"epoch {epoch}:  set_epoch(0) {deal(10, 2)[0]}   set_epoch({epoch}) {deal(10, 2, epoch)[0]}")

# %% [markdown]
# Left the same order every time, right a new one. How much does forgetting it cost? Often you read that training then
# stops improving after the first epoch. Try it:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from digits import load, net, train_epoch
from lockstep.ranks import observe

dist.init_process_group("gloo")
for told in (False, True):
    torch.manual_seed(0)
    data, model = load()[0], DDP(net())
    sampler, losses = DistributedSampler(data), []
    loader = DataLoader(data, 32, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(6):
        if told:
            sampler.set_epoch(epoch)
        total = train_epoch(model, loader, optimizer)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    observe("with set_epoch" if told else "without", losses)

# %%
for name in ("without", "with set_epoch"):
    losses = run.observed(name)[0]
    print(name.rjust(14), *(f"{loss:.2f}" for loss in losses))
    assert losses == sorted(losses, reverse=True)  # it improves in every epoch, with and without

# %% [markdown]
# It improves all the same. What you lose is the shuffling: the same batches come in the same order every time, and with
# the same neighbours. That is worth one line to avoid, but it is no reason for a loss that stands still. Keep looking.

# %%
quiz("02_setup/set_epoch")

# %% [markdown]
# ### Three ways to get it wrong
#
# **Unequal seeds.** The habit of seeding with `seed + rank` is right for dropout and wrong here:

# %%
dealt = [list(DistributedSampler(range(10), 2, r, seed=r)) for r in range(2)]  # BUG: two seeds
print(dealt)
print("dealt twice:", sorted(set(dealt[0]) & set(dealt[1])))
print("never dealt:", sorted(set(range(10)) - set(sum(dealt, []))))

# %% [markdown]
# **Both sampler and shuffle.** At least this one raises:

# %%
try:
    torch.utils.data.DataLoader(range(10), sampler=DistributedSampler(range(10), 2, 0), shuffle=True)
except ValueError as error:
    print(error)

# %% [markdown]
# **No sampler.** Then each rank walks the whole data set. Whether the ranks see the same batches at the same time
# depends on their random state:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = range(8)
for seed in (0, dist.get_rank()):
    torch.manual_seed(seed)
    loader = DataLoader(data, batch_size=4, shuffle=True)  # BUG: every rank walks all of it
    print(f"seed {seed}: {[batch.tolist() for batch in loader]}")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
print("sampler:", [batch.tolist() for batch in loader])

# %% [markdown]
# With equal seeds both ranks compute the same gradient, and averaging equal gradients changes nothing: twice the work for
# the result of one. With different seeds the batches differ, so the ranks do help each other, but an "epoch" now is two
# passes over the data. Neither raises, and neither shows in the loss. It shows in `len(loader)`: on N ranks it should be
# an Nth of what one process has.
#
# One more thing about loaders: `num_workers` and `pin_memory` work as ever, but each rank starts its own workers. Four
# ranks with four workers each are twenty processes. By default on Linux they are *forked* from the rank, with its open
# connections. gloo over TCP bears that; of nccl, and of gloo over InfiniBand, DDP's documentation warns (not run here):

# %%
words = " ".join(torch.nn.parallel.DistributedDataParallel.__doc__.split())
print(re.search(r"Unfortunately Gloo .*? not fork safe", words).group(0), "…")

# %% [markdown]
# If loaders hang on GPUs, start the workers in another way, and keep them for all epochs:

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
# 375 samples and 12 steps on each rank instead of 1500 and 47. Still four models, and each now knows a quarter of the
# data. The last piece joins them.
#
# ## Wrapping
#
# `DDP(model)` does two things. When it is made, it gives every rank the parameters and buffers of rank 0. And it puts
# hooks on the parameters, so that gradients are averaged while `backward` computes them. The first, seen from outside:

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
# So the ranks need not be seeded alike to start alike. What they do need is the same *architecture*: the same parameters
# with the same shapes, registered in the same order. Number and shapes are compared when the wrapper is made:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
labels = [4, 5][dist.get_rank()]  # BUG: the number of classes, counted in this rank's own shard
DDP(torch.nn.Linear(4, labels))

# %% [markdown]
# The order of equally shaped ones is not compared, because DDP never sees a name:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]  # BUG: such as a set's order
model = torch.nn.Module()
for number, name in enumerate(names):
    model.register_parameter(name, torch.nn.Parameter(torch.tensor([1.0 + number])))
DDP(model)
print({name: parameter.item() for name, parameter in sorted(model.named_parameters())})

# %% [markdown]
# Rank 1 has the two weights of rank 0 the wrong way round, without an error.
#
# ### What is synchronised when
#
# `--into run` keeps a record of every collective. `mark` puts a note between them. Two steps of training:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(10, 10))  # 110 parameters of 4 bytes
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(2):
    mark("forward")
    loss = ddp(torch.randn(4, 10)).sum()
    mark("backward")
    loss.backward()
    mark("optimizer.step")
    optimizer.step()

# %%
from lockstep.ranks import Mark

for event in sorted(run.ranks[0].collectives + run.ranks[0].marks, key=lambda event: event.number):
    print(event.name if isinstance(event, Mark) else f"        {event.kind}, {event.nbytes} bytes")

# %% [markdown]
# Read it from the top. Making the wrapper compares the number of parameters (`all_gather`) and their shapes (the small
# `broadcast`), and copies rank 0's values (440 bytes). Then in each step there is **one all-reduce of 440 bytes, and it is in `backward`**: 110 gradients of 4 bytes. Nothing is
# under `optimizer.step`. The two small broadcasts before the second forward happen once: having seen in which order
# gradients become ready, the ranks agree on how to group them into buckets (chapter 1). A model with buffers would
# broadcast these in its forwards too.
#
# The all-reduce gives everybody the mean: DDP divides by the number of ranks, then sums. If all ranks bring equally many
# samples to a mean loss, that is the gradient of the whole batch (of a model without BatchNorm and the like, whose output
# for one sample depends on the others). If they do not, it is not, and you have to weight the loss.

# %%
quiz("02_setup/when_synchronised")

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
assert all(torch.equal(one, weights[0]) for one in weights)  # to the bit, not nearly
print(f"{len(weights)} ranks, {len(weights[0])} parameters each, all equal")

# %% [markdown]
# One line, and four models are one. The losses still differ, since each rank computes its own over its own samples.
#
# ### Move first, wrap last
#
# The hooks sit on the parameters as they are when the model is wrapped. Whatever changes the parameters afterwards can
# lose them. Here the model is cast to double precision after wrapping. (A move to another device resets the hooks by the
# same line of PyTorch's source; that was not run here.)

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank has its own data
ddp = DDP(torch.nn.Linear(10, 10))
ddp.double()  # BUG: after wrapping
ddp(torch.randn(4, 10, dtype=torch.double)).square().sum().backward()
print("sum of the gradient:", round(ddp.module.weight.grad.sum().item(), 3))

# %%
print("all-reduces:", sum(one.kind == "all_reduce" for one in run.collectives[0]))

# %% [markdown]
# **What this tells you.** No error, no all-reduce, and a gradient for each rank: from here on every rank trains a model
# of its own. Whatever is done to a model (moved, cast, a layer replaced or frozen, SyncBatchNorm put in) is done before
# `DDP(...)`, which comes last.
#
# The usual advice says that you would notice by "Expected all tensors to be on the same device". With gloo you would not.
# (With nccl alone, `DDP(...)` should refuse a model that is still on the CPU; not run here.) You do notice when only a
# part was moved:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
model[1].to("meta")  # BUG: half of the model moved ("meta" stands in for a GPU)
DDP(model)

# %% [markdown]
# `device_ids` belongs to GPUs, and is optional there: `DDP(model, device_ids=[local_rank])`, the local rank and a single
# one. With it, DDP also moves the inputs of `forward` there (targets never pass through it, so they remain yours to
# move). On a CPU, leave it out:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 1), device_ids=[0])  # BUG: the model is on the CPU

# %% [markdown]
# `output_device`, which older examples give as well, dates from the time of several devices in one process. Look who
# uses it: `device_ids` is read before each forward, `output_device` by nothing that a forward runs.

# %%
import inspect
from torch.nn.parallel import DistributedDataParallel as DDP

methods = DDP.forward, DDP._pre_forward, DDP._post_forward, DDP._run_ddp_forward
for name in ("device_ids", "output_device"):
    print(name, "is used by", [one.__name__ for one in methods if name in inspect.getsource(one)])

# %% [markdown]
# ### Call the wrapper
#
# `ddp.module` is your model. Use it to save and to evaluate. To train, call the wrapper: its `forward` is what prepares
# the next `backward`.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DDP(torch.nn.Linear(10, 10))
for name, call in (("ddp.module(x)", ddp.module), ("ddp(x)", ddp)):
    ddp.zero_grad()
    call(torch.randn(4, 10)).square().sum().backward()  # BUG in the first round: past the wrapper
    print(name.ljust(13), "sum of the gradient:", round(ddp.module.weight.grad.sum().item(), 3))

# %% [markdown]
# Past the wrapper the gradients differ, without an error; through it they agree. To find such a thing in a long program,
# compare a checksum of the parameters over the ranks every now and then. Chapter 3 builds that tool.
#
# ### Seeds
#
# If seeding alike is not needed, is it at least harmless? Look at dropout:

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
# With the same seed all ranks drop the same units, and augmentation makes the same choices everywhere. So:
# `torch.manual_seed(seed + rank)`, before or after the model is built, whose weights come from rank 0 in any case. Only
# the sampler's seed is common, and that one is an argument of the sampler.

# %%
quiz("02_setup/same_seed")

# %% [markdown]
# ## Global metrics
#
# What the program prints is each rank's own. Often one sees `if rank == 0: print(loss)`, and the number is taken for
# the loss of the job. Let four ranks evaluate one model on data that are sorted by class, as files often are:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from digits import load, net, train_epoch

dist.init_process_group("gloo")
torch.manual_seed(0)
(train, test), model = load(), net()
train_epoch(model, DataLoader(train, 32), torch.optim.SGD(model.parameters(), 0.2))  # alike everywhere
x, y = test.tensors
mine = y.argsort(stable=True).chunk(4)[dist.get_rank()]  # rank 0: the smallest digits
losses = cross_entropy(model(x[mine]), y[mine], reduction="none").detach()
total = torch.tensor([losses.sum(), len(losses)])
print(f"mine {losses.mean():.2f} over {len(losses)}", end="   ")
dist.all_reduce(total)
print(f"all {total[0] / total[1]:.2f} over {total[1]:.0f}")
torch.testing.assert_close(total[0] / total[1], cross_entropy(model(x), y).detach())

# %% [markdown]
# Rank 0 alone would have told you about its own digits. The last line of the cell compares with what one process would
# say of all the data. The cure is two numbers: **reduce the sum and the count, divide at the end.** Reducing the mean is
# right only while all ranks have equally many samples, and the last rank here has fewer. It is also why `train_epoch`
# returns a sum and a count.
#
# For an evaluation take the parts without a `DistributedSampler`, which pads: it would count some samples twice. Here
# every rank takes each fourth sample, and 297 are 297:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler
from digits import load

dist.init_process_group("gloo")
test = load()[1]
mine = range(dist.get_rank(), len(test), dist.get_world_size())
counts = torch.tensor([len(mine), len(DistributedSampler(test))])
dist.all_reduce(counts)
print(f"{len(test)} samples; counted by range: {counts[0]}, by sampler: {counts[1]}")

# %% [markdown]
# The ranks may have different numbers of samples here, because they meet only once, at the end. So evaluate
# `ddp.module`, not `ddp`: with buffers, a forward of the wrapper can be a meeting too (chapter 1).
#
# ### Everybody calls, one prints
#
# Printing is rank 0's business. Reducing is everybody's. It is easy to put both under one `if`:

# %%
# %%ranks 3 --expect hang
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(2)
if dist.get_rank() == 0:
    dist.all_reduce(total)  # BUG: only rank 0 comes
    print(f"loss {total[0] / total[1]:.2f}")
dist.barrier()

# %% [markdown]
# **What this tells you.** The table says it all: rank 0 waits in an all-reduce, the others in what comes next. It could
# be worse. Let the next call of the others be an all-reduce of the same size, say of a gradient:

# %%
# %%ranks 2 --expect hang
import torch, torch.distributed as dist

dist.init_process_group("gloo")
loss, gradient = torch.tensor([1.0]), torch.tensor([100.0])
if dist.get_rank() == 0:
    dist.all_reduce(loss)  # BUG: only rank 0 comes
    print("loss", loss.item())
dist.all_reduce(gradient)
print("gradient", gradient.item())

# %% [markdown]
# 101 is a loss plus a gradient. gloo pairs calls by their order, and these two fit each other. The hang comes one call
# later, when the numbers are wrong already, and it points at the line of the gradient.

# %%
quiz("02_setup/rank0_loss")

# %%
quiz("02_setup/unequal_shards")

# %% [markdown]
# ## Cleanup
#
# Every rank that joins also leaves, even when something fails in between. So `destroy_process_group` goes into a
# `finally`. Afterwards there is no group:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist

dist.init_process_group("gloo")
try:
    print("in the group:", dist.is_initialized())
    dist.barrier()  # the work; whoever leaves while others still connect breaks their connection
finally:
    dist.destroy_process_group()
print("in the group:", dist.is_initialized())
dist.barrier()  # BUG: after the end

# %% [markdown]
# Two things about the end of a program that no cell can show on demand, because they strike at random. We have met both
# many times with torch 2.13 and gloo, in programs that were right.
#
# **A wrapper that outlives its group can hang the process.** Its destructor waits for gloo's threads while it holds
# Python's interpreter lock, and one of the threads may be waiting for that lock. Let the wrapper go first: `del ddp`
# before `destroy_process_group()`, or keep it in a function that has returned by then. A function that has raised keeps
# it alive, through the error's traceback: `traceback.clear_frames(error.__traceback__)` lets it go. No timeout ends this
# hang.
#
# **A process that used gloo sometimes aborts at its very end**, after everything is done and saved: `terminate called
# without an active exception`, exit status −6. The interpreter is tearing itself down while one of gloo's threads still
# wants it. torchrun sees the status and reports a failed job. `destroy_process_group` makes this rarer but does not rule
# it out. What does is to leave without the teardown: flush the output, then `os._exit(0)`. Until that line, nothing
# about errors changes: an exception still ends the process with status 1 and a traceback.

# %%
quiz("02_setup/exit_status")

# %% [markdown]
# ### The whole program
#
# Here it is. It saves the weights from rank 0: they are equal everywhere, and several writers can spoil one file. It saves
# `model.module`, whose names have no `module.` before them. The learning rate is multiplied by the number of ranks. A
# step now learns from 4 × 32 samples and an epoch has 12 steps instead of 47, so each step may go further. That is a
# rule of thumb and no law; chapter 4 measures it. `--save` writes the cell to a file.

# %% tags=["whole-program"]
# %%ranks 4 --save train.py
import os, sys, traceback
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from device import local_device
from digits import load, net, train_epoch

def main(device, rank, size, epochs=4):
    train, test = load()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
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

device, backend = local_device()
dist.init_process_group(backend)
try:
    main(device, dist.get_rank(), dist.get_world_size())
except BaseException as error:
    traceback.clear_frames(error.__traceback__)  # they would keep the wrapper alive
    raise
finally:
    dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # the work is done and saved: leave without the interpreter's teardown

# %% [markdown]
# And now as any cluster would start it, with the real torchrun. It takes a few seconds where the cell took a fraction of
# one, since four processes import torch. The numbers are the same:

# %%
def terminal(*arguments):
    """Run `python arguments ...` as a terminal would, and print what it says."""
    job = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=55)
    print(job.stdout, end="")
    return job

TORCHRUN = ("-m", "torch.distributed.run")  # what the command torchrun does
job = terminal(*TORCHRUN, "--nproc-per-node=4", "train.py")
print("exit status", job.returncode)

# %%
from digits import load, net

model, weights = net(), torch.load("digits.pt")
print(*weights)  # the names
model.load_state_dict(weights)
x, y = load()[1].tensors
print(f"right on {(model(x).argmax(1) == y).float().mean():.0%} of {len(y)} digits it has not seen")

# %% [markdown]
# ## Exercise: implement train_ddp
#
# *Medium, 25 minutes.* Open `exercises/train_ddp.py`.
#
# Everything from "Sharding" to "Cleanup" in one function, for any model and any data. It joins the group with your
# `setup_ddp`, and returns the trained module itself.
#
# The check looks at what the ranks do: which samples each one sees in which epoch, which collectives it calls, what it
# prints. How you write it is up to you.

# %%
contract("train_ddp")

# %%
# %check train_ddp

# %% [markdown]
# <details><summary>"Rank 0 printed …; the mean over the ranks was …"</summary>
# Reduce two numbers on every rank, the sum of the losses and the number of samples, and let rank 0 print their ratio. A
# mean of batch means is not it: the last batch is smaller.
# </details>
#
# <details><summary>It hangs at the end of an epoch</summary>
# Is there a collective under an <code>if</code> that only some ranks enter?
# </details>
#
# <details><summary>"the returned module's names begin with module."</summary>
# You returned the wrapper. The model is its <code>.module</code>.
# </details>
#
# <details><summary>It leaves the group when training fails, but the next call hangs</summary>
# The wrapper is still alive when the group is destroyed. Delete it first, in the same <code>finally</code>.
# </details>
#
# The solution is `solutions/train_ddp.py`.
#
# ## Launching from Python
#
# torchrun is the usual launcher: it starts the ranks, hosts the store, ends all ranks when one fails, and can restart
# them. Sometimes a program has to start its ranks itself, for instance a function in a library, or a test.
# `torch.multiprocessing.spawn` does that, and leaves to you what torchrun did: address, port, results.

# %%
# %%writefile spawn_digits.py
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, world_size, port, file):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent hosts the store
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    t = torch.tensor([1.0 + rank])
    dist.all_reduce(t)
    if rank == 0:
        torch.save(t, file)  # a rank's memory is gone when it ends: results go through a file
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
    returned = mp.spawn(work, (2, store.port, "sum.pt"), nprocs=2)
    print("mp.spawn returned", returned, "and the file holds", torch.load("sum.pt").item())
    os.remove("sum.pt")

# %%
job = terminal("spawn_digits.py")

# %% [markdown]
# Four things to note.
#
# **It returns `None`.** What the ranks computed is gone with them unless it was sent back. Through a file is safest.
#
# **The function is in a file, and the launch is under `if __name__ == "__main__"`.** Each new process imports the file
# to find the function. Without the guard it would launch again:

# %%
# %%writefile spawn_unguarded.py
import torch.multiprocessing as mp

def work(rank):
    print("rank", rank)

mp.spawn(work, nprocs=1)  # BUG: not under if __name__ == "__main__"

# %%
job = terminal("spawn_unguarded.py")
lines = [line.strip() for line in job.stderr.splitlines()]
start = next(number for number, line in enumerate(lines) if line.startswith("An attempt"))
print(*lines[start : start + 2], sep="\n")

# %% [markdown]
# For the same reason it does not work from a notebook's cell, which is why `%%ranks` exists.
#
# **The port is a free one.** With a fixed one the second job on the machine cannot start:

# %%
first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
try:
    dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)  # BUG: it is taken
except dist.DistNetworkError as error:
    print("EADDRINUSE" in str(error), type(error).__name__)

# %% [markdown]
# The parent opens the store and keeps it, so nobody else can take the port in the meantime. That is also what the
# variable `TORCHELASTIC_USE_AGENT_STORE` in `work` is for: the store is there already, rank 0 joins it like the others.
# torchrun does the same on one node, so two jobs beside each other do not clash:

# %%
# %%writefile which_port.py
import os, sys
sys.stdout.write(os.environ["MASTER_PORT"] + "\n")

# %%
command = [sys.executable, *TORCHRUN, "--nproc-per-node=1", "which_port.py"]
jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
ports = [job.communicate(timeout=55)[0].split()[-1] for job in jobs]
print("two jobs, two ports:", len(set(ports)) == 2)

# %% [markdown]
# **A rank that raises ends the launch**, with its traceback in the parent's exception. The other ranks are ended too:

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

# %% [markdown]
# Rank 0 would have slept for ten minutes. The parent did not wait for it.

# %%
quiz("02_setup/spawn_returns")

# %% [markdown]
# ## Exercise: implement launch_distributed
#
# *Hard, 15 minutes.* Open `exercises/launch_distributed.py`.
#
# A function that starts the ranks, lets each run your `train_ddp`, and returns the trained weights. Nothing may stay
# behind: no process, no file, no variable.
#
# Two launches at the same time have to work, and a rank that fails has to be heard, with its own words, soon.

# %%
contract("launch_distributed")

# %%
# %check launch_distributed

# %% [markdown]
# <details><summary>"Can't pickle …" or "Can't get attribute …"</summary>
# What mp.spawn runs has to be a function at the top level of a module. A lambda or a nested function cannot be sent.
# </details>
#
# <details><summary>EADDRINUSE, now and then</summary>
# You looked for a free port, closed it, and opened it again later. In between somebody else can take it. Let the parent
# open the store at port 0 and keep it.
# </details>
#
# <details><summary>It works, but reports a crash once in a while</summary>
# Exit status −6 after good work: see "Cleanup". Let the rank leave by <code>os._exit</code> when its result is saved.
# </details>
#
# The solution is `solutions/launch_distributed.py`.
#
# ## Several nodes
#
# The program does not change. The command is started once on each node, and tells the launchers how to find each other:
#
# ```
# # on node 0                                              # on node 1
# torchrun --nnodes=2 --nproc-per-node=4 --node-rank=0 \   torchrun --nnodes=2 --nproc-per-node=4 --node-rank=1 \
#     --master-addr=10.0.0.1 --master-port=29500 train.py      --master-addr=10.0.0.1 --master-port=29500 train.py
# ```
#
# That is the *static* way: you number the nodes, and give the address of node 0 to all. With a *rendezvous*, a
# meeting of the launchers, the nodes get their numbers there and the command is the same everywhere; with `--max-restarts`
# added, the job can begin again after a failure (chapter 5):
#
# ```
# torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 --rdzv-id=job7 train.py
# ```
#
# Two launchers on one machine are as good as two nodes for trying it out. This is the real thing, two launchers
# (torchrun calls them *agents*) with two ranks each:

# %%
# %%writefile nodes.py
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor(dist.get_rank())
dist.all_reduce(t)
names = ("GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
line = "  ".join(f"{name}={os.environ[name]}" for name in names) + f"  sum of the ranks: {t}"
sys.stdout.write(line + "\n")  # one write a rank, so that lines do not mix
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)

# %%
import socket

with socket.socket() as probe:  # free now: enough for a trial; on a cluster, one the firewall allows
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
agents = []
for node in range(2):
    command = [sys.executable, *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
               "--master-addr=127.0.0.1", f"--master-port={port}", "nodes.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    agents.append(subprocess.Popen(command, **streams))
try:
    said = [agent.communicate(timeout=55)[0] for agent in agents]
finally:
    for agent in agents:
        agent.terminate()  # does nothing when it has ended
print(*sorted("".join(said).splitlines()), sep="\n")

# %% [markdown]
# `GROUP_RANK` is the node. Do not compute it. `rank // torch.cuda.device_count()`, which you will find in examples, is
# wrong as soon as a node runs fewer ranks than it has GPUs, and here:

# %%
# %%ranks 4 --nodes 2 --expect raised
import os
import torch

print("GROUP_RANK:", os.environ["GROUP_RANK"])
print("computed:", int(os.environ["RANK"]) // torch.cuda.device_count())  # BUG: these ranks have no GPU

# %%
quiz("02_setup/node_rank")

# %% [markdown]
# ### When the nodes do not meet
#
# Every node has to reach `MASTER_ADDR:MASTER_PORT`, so `localhost` is no master address for several nodes. And a test
# of the port says something only while the store is up:

# %%
def reach(port):
    with socket.socket() as probe:
        return "connected" if probe.connect_ex(("127.0.0.1", port)) == 0 else "refused"

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
port = store.port
print("while the store is up:", reach(port))
del store
print("when it is gone:      ", reach(port))

# %% [markdown]
# So "connection refused" before the job has started means nothing. That the port is open is not enough either: once the
# ranks have met, they connect to each other directly, at ports the system chooses. A firewall between nodes has to let
# these through as well. On machines with several networks, `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name the
# interface to use.
#
# ### Under SLURM
#
# `srun` starts tasks and sets variables of its own. Either let it start one torchrun for each node, which is the less
# work, or one task for each rank, and translate. Chapter 5 runs the first on a SLURM cluster made for the moment.
#
# | torchrun sets | from SLURM, with one task for each rank |
# |---|---|
# | `RANK` | `SLURM_PROCID` |
# | `LOCAL_RANK` | `SLURM_LOCALID` |
# | `WORLD_SIZE` | `SLURM_NTASKS` |
# | `LOCAL_WORLD_SIZE` | `SLURM_NTASKS_PER_NODE`, where `--ntasks-per-node` was given |
# | `GROUP_RANK` | `SLURM_NODEID` |
# | `MASTER_ADDR` | the first name in `scontrol show hostnames $SLURM_JOB_NODELIST` |
# | `MASTER_PORT` | one that you choose, the same for all, such as 10000 + `SLURM_JOB_ID` % 20000 |
#
# With tasks for ranks there is no agent, so `TORCHELASTIC_USE_AGENT_STORE` stays unset and rank 0 hosts the store.
#
# ## Why not DataParallel
#
# `torch.nn.DataParallel` is the older way to use several GPUs, from a single process:
#
# | | `DataParallel` | `DistributedDataParallel` |
# |---|---|---|
# | processes | one, with a thread for each GPU | one for each rank |
# | Python's interpreter lock | shared by all threads | one for each process |
# | the model | copied to all GPUs in every forward | copied once |
# | outputs | gathered on the first GPU | stay where they are |
# | several nodes | no | yes |
# | GPU 0 | holds more than the others | as the others, if each rank selects its device first |
#
# The documentation advises against it, also on a single machine. It is not deprecated: no warning tells you.

# %%
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.nn.DataParallel(torch.nn.Linear(2, 1))
print("warnings:", len(caught))
assert "recommended to use" in " ".join(torch.nn.DataParallel.__doc__.split())

# %% [markdown]
# How much faster DDP is depends on model, machine and batch. You will find factors quoted without a source; measure
# yours, with chapter 4's tools. The other alternative is FSDP (*fully sharded data parallel*), which keeps no whole model on a
# rank: it cuts parameters, gradients and optimizer state into parts, one for each rank:

# %%
quiz("02_setup/fsdp_or_ddp")

# %% [markdown]
# ## Checklist
#
# From top to bottom, in the order of the program. Each line has its section above.
#
# **Before the group.** Start with torchrun, also for a single process. Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE`; write
# none of what the launcher set. Download and unpack before the launch, or on one rank of each node while the others
# wait.
#
# **The group.** Select the GPU by `LOCAL_RANK`, then `init_process_group`: nccl when every rank of the node has a GPU of
# its own, gloo otherwise. A short `timeout` while you try things out. Check once that the sum of the ranks comes out
# right.
#
# **The model.** Build it, load weights, convert, cast and move it; wrap it last. `device_ids=[local_rank]` on a GPU,
# nothing on a CPU. No common seed for the weights; `seed + rank` for everything drawn in training.
#
# **The data.** `DistributedSampler`, with one seed for all, and no `shuffle` at the loader. `sampler.set_epoch(epoch)`
# at the top of each epoch. Compare `len(loader)` with what one process has.
#
# **The loop.** Call the wrapper, not its `.module`. Move inputs and targets. `zero_grad`, `backward`, `step` as ever:
# the averaging is in `backward`. Every collective is called by every rank, outside of any `if rank == 0`.
#
# **Numbers.** All-reduce sum and count; divide; print on rank 0. Evaluate without padding.
#
# **Files.** Rank 0 writes `model.module.state_dict()`. If others are to read it in the same job, a `barrier` in between
# (chapter 5).
#
# **The end.** The wrapper goes first, then `destroy_process_group` in a `finally`, on every rank. Flush, and `os._exit`
# if the status matters to somebody.
#
# ## Take it with you
#
# - A rank is a process plus a few variables. The launcher sets them, the program reads them.
# - `init_process_group` and every collective are meetings of all ranks. A missing rank makes the others wait. Their
#   error names a neighbour, or a key whose last number is the missing rank; the one at fault says nothing.
# - The device goes by the *local* rank, the part of the data by the *global* rank.
# - DDP makes weights equal once, when it wraps, and averages gradients in `backward`. It never looks at the weights
#   again: what changes them on one rank only goes unnoticed.
# - Most mistakes in setting up are silent. Three numbers give them away: `len(loader)`, the number of all-reduces in a
#   step, and a checksum of the weights over the ranks.
#
# In an interview, expect "what happens between `loss.backward()` and `optimizer.step()`?" You have seen the record:
# nothing. It has happened by then.
#
# ## What to read next
#
# Chapter 3 takes broken jobs apart: hangs, crashes, and models that drift. Chapter 4 makes the step faster, with
# buckets, accumulation and mixed precision. Of PyTorch's own pages, the notes on DDP
# (`pytorch.org/docs/stable/notes/ddp.html`) describe the hooks and buckets, and the pages on torchrun
# (`pytorch.org/docs/stable/elastic/run.html`) its options.

# %%
from lockstep.notebook.course_map import course_map

course_map("02_setup")
