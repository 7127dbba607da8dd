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
# # Chapter 1. How DDP works inside
#
# Click into the next cell and press Shift+Enter: it trains a small network on four processes of this machine, and draws
# what they did.

# %%
# %load_ext lockstep
from lockstep import ranks
from lockstep.notebook.timeline import timeline

run = ranks.run(ranks.Script("four_ranks.py"), world_size=4, timeline=True)
timeline(run)

# %% [markdown]
# This is a measurement, made just now. Four processes, called **ranks**, each with a copy of the network and a batch of
# its own, made two training steps. In each step every rank goes **forward** and **backward**; each small mark under the
# backward is a gradient that became ready; each green bar is an **all-reduce**: all ranks add up a pile of gradients, so
# that everybody has the mean. Run the cell again: the times change, the order does not.

# %%
print(timeline(run))

# %% [markdown]
# The pile is called a **bucket**. In step 0 there is one, and it leaves when all gradients are there. In step 1 there are
# two, and the first leaves while the backward is still busy. Nobody asked for that: it is what PyTorch's
# DistributedDataParallel, **DDP**, does by itself. Here is the whole program.

# %%
from pathlib import Path

print(Path("four_ranks.py").read_text())

# %% [markdown]
# One line of it is DDP. In this chapter you take that line apart, and then write it yourself. After it you can
#
# - say **what is copied between ranks, and when**: at construction, in the forward, in the backward;
# - predict **how many all-reduces** a step makes, how large they are, and which of them can be hidden;
# - carry out a **ring all-reduce** by hand, and say what it costs;
# - say when the mean of the gradients **is** the gradient of the joined batch, and when it is not;
# - name the ways to train **past** DDP without an error;
# - show a DDP of your own whose picture looks like the one above.
#
# About 120 minutes: 45 to read and run, 75 for three exercises. You need PyTorch's training loop, and no GPU.
#
# ### How a cell runs ranks
#
# `%%ranks 4` runs a cell in four fresh processes, the way a launcher would start a program four times. They know nothing
# of each other until `init_process_group` connects them. `gloo` is the library that carries tensors between CPUs.

# %%
# %%ranks 4
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 10.0]) * dist.get_rank()
print("I bring", t.tolist(), end="; ")
dist.all_reduce(t)
print("the sum is", t.tolist())

# %% [markdown]
# Every rank ran the same text, brought something else, and has the same sum. That is all-reduce, and most of DDP.
#
# You cannot break anything here, so try. If the ranks wait for each other in vain, the cell ends after a moment and says
# who waits where. `--expect hang` tells it that this one is meant to.

# %%
# %%ranks 3 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
if dist.get_rank() != 1:  # BUG: rank 1 does not take part
    dist.all_reduce(t)
dist.barrier()

# %% [markdown]
# Two more commands. `%check NAME` grades an exercise: you write the file `exercises/NAME.py`, in the file browser on the
# left, and the check runs it on several ranks, watches what each one sends, and tells you what it saw. `%hint NAME` gives
# the next hint. On a terminal they are `./lockstep check NAME` and `./lockstep hint NAME`.
#
# `--into run` keeps what the ranks did in a variable. `run.collectives[r]` is the list of rank r's communication calls,
# recorded below PyTorch's Python code, so that nothing is missed. This little function prints such a list:

# %%
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz
from lockstep.ranks import Mark

def story(run, rank=0, lines=None):
    """What a rank did, in order: its marks, and indented below them its collectives."""
    report = run.ranks[rank]
    for event in sorted([*report.collectives, *report.marks], key=lambda event: event.number)[:lines]:
        print(event.name if isinstance(event, Mark) else f"    {event.kind}: {event.nbytes} bytes")

# %% [markdown]
# ## Two ways to use several GPUs
#
# PyTorch has two wrappers that spread a batch over devices. `DataParallel` is the older one: **one process, with a thread
# for each GPU**. In every forward it scatters the batch, copies the model to all GPUs, runs the copies in threads, and
# gathers the outputs on the first GPU. There is no GPU here, so let its source speak:

# %%
import inspect, re
import torch

def order_of(function, words):
    """The calls, in the order in which they stand in the function's source."""
    source = inspect.getsource(function)
    return sorted(words, key=lambda word: source.index(f"{word}("))

steps = ["self.gather", "self.parallel_apply", "self.replicate", "self.scatter"]
print(order_of(torch.nn.DataParallel.forward, steps))
assert "threading.Thread(" in inspect.getsource(torch.nn.parallel.parallel_apply)

# %% [markdown]
# Threads share Python's interpreter lock, the first GPU holds all outputs, and the copy is made anew in every step.
# `DistributedDataParallel` starts from the other end: **one process for each GPU**, each with its own interpreter, its
# own copy of the model, its own batch. The copies are made equal once, and stay equal because all of them make the same
# update. DDP refuses to be given several devices:

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 1), device_ids=[0, 1])  # BUG: one process, two GPUs

# %%
# %%ranks 4 --into run
import os
from lockstep.ranks import observe

observe("process", os.getpid())

# %%
print("processes:", len(set(run.observed("process"))))
assert len(set(run.observed("process"))) == 4

# %% [markdown]
# The price of separate processes is that nothing is shared. Whatever two ranks are to agree on has to be sent. How much
# faster DDP is depends on model, machine and batch; factors that you find quoted without a source are worth what they
# cost. DataParallel is discouraged in the documentation but not deprecated: it gives no warning.

# %%
quiz("01_internals/dp_or_ddp")

# %% [markdown]
# ## What is copied when
#
# Each rank builds its model with random weights of its own. What makes them equal?

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
for init_sync in (True, False):
    torch.manual_seed(dist.get_rank())  # different on purpose
    model = torch.nn.Linear(3, 1)
    before = spread(model.parameters())
    ddp = DDP(model, init_sync=init_sync)
    observe(f"init_sync={init_sync}", [before, spread(model.parameters())])

# %%
for name in ("init_sync=True", "init_sync=False"):
    before, after = run.observed(name)[0]
    print(f"{name:<16} apart before DDP(): {before:.3f}   after: {after:.3f}")
assert run.observed("init_sync=True")[0][1] == 0.0 < run.observed("init_sync=False")[0][1]

# %% [markdown]
# `spread`, from `spread.py`, tells how far the ranks are apart: the largest difference between two of them. The
# **constructor** sends rank 0's parameters to all. Seeding every rank alike, which many programs do as a ritual, is not
# needed for this. With `init_sync=False` nobody sends anything, and nothing later repairs it: gradients are averaged,
# parameters never again.
#
# What travels at construction, and what in the steps after it? This model has a buffer as well: BatchNorm keeps running
# statistics.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.BatchNorm1d(5))
mark(f"DDP(), {sum(p.numel() for p in model.parameters())} parameters of 4 bytes")
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(3):
    mark(f"step {step}: forward")
    loss = ddp(torch.randn(8, 10)).square().sum()
    mark(f"step {step}: backward")
    loss.backward()
    mark(f"step {step}: optimizer.step")
    optimizer.step()

# %%
story(run)

# %% [markdown]
# Read it from the top.
#
# - **At construction**: a comparison of counts and shapes (8 and 80 bytes), then rank 0's values: 260 bytes of parameters
#   and 40 of statistics together, and a counter.
# - **In each forward**: rank 0's buffers, the running mean and variance (5 × 4 bytes each) and a counter of 8. Nobody
#   averages buffers. Rank 0's win.
# - **In the forward of step 1 only**: a list of numbers. More about it in "Hooks and buckets".
# - **In each backward**: the gradients, 65 × 4 bytes. **In `optimizer.step`: nothing.**
#
# So each rank normalises with its own batch and updates its own statistics, until the next forward overwrites them. It is
# often said that the models diverge because of this. Look:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    ddp(torch.randn(8, 10) + 3 * rank).square().mean().backward()  # the ranks' data differ much
    optimizer.step()
observe("parameters", spread(ddp.parameters()))
observe("running mean", spread([ddp.module[1].running_mean]))
ddp.eval()
ddp(torch.randn(8, 10))
observe("running mean, one forward later", spread([ddp.module[1].running_mean]))

# %%
apart = {name: value for name, value in run.ranks[0].observations.items()}
for name, value in apart.items():
    print(f"{name:<32} {'equal to the bit' if value == 0 else 'apart'}")
assert apart["parameters"] == 0 == apart["running mean, one forward later"] < apart["running mean"]

# %% [markdown]
# The parameters are equal to the bit after 20 steps: the same mean gradient, the same update. Only the statistics differ,
# between forwards. Nodes, the machines of a cluster, make no difference. Four ranks that are told they are on two of them:

# %%
# %%ranks 4 --nodes 2
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    ddp(torch.randn(8, 10) + dist.get_rank()).square().mean().backward()
    optimizer.step()
apart = spread(ddp.parameters()) > 0, spread([ddp.module[1].running_mean]) > 0
print("node", os.environ["GROUP_RANK"], " parameters apart: {}  running mean apart: {}".format(*apart))

# %% [markdown]
# ### SyncBatchNorm
#
# It takes mean and variance over the batches of all ranks. The price is communication in every such layer, in both
# directions; its source says which:

# %%
from torch.nn import SyncBatchNorm
from torch.nn.modules._functions import SyncBatchNorm as inside

def called(function):
    """The collectives that a function's source calls."""
    source = inspect.getsource(function)
    return [name for name in ("all_gather", "all_reduce") if re.search(rf"dist\w*\.{name}\(", source)]

print("forward:", *called(inside.forward), "  backward:", *called(inside.backward))
for order in ("convert, then move", "move, then convert"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    for what in order.split(", then "):
        model = SyncBatchNorm.convert_sync_batchnorm(model) if what == "convert" else model.to("meta")
    print(f"{order}: {type(model[1]).__name__} on {model[1].weight.device}")

# %% [markdown]
# `convert_sync_batchnorm` replaces all BatchNorm layers and leaves them where they are, so it may come before or after
# `.to(device)` (`meta`, a device without values, stands in for a GPU). It has to come before `DDP(...)`, like every change
# to a model. And it runs on GPUs only:

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))  # BUG: on a CPU

# %% [markdown]
# When is it worth it? "Below 16 samples a GPU", one reads, "and never from 32 on". What a small batch does to its
# statistics has no such edge:

# %%
torch.manual_seed(0)
for samples in (4, 16, 64, 256):
    means = torch.randn(2000, samples).mean(1)
    print(f"{samples:>3} samples: the batch's mean is off by {means.std():.2f} standard deviations")

# %% [markdown]
# Four times the samples, half of the error, each time. Where it stops mattering depends on your task.
#
# ### Exactly when buffers are sent
#
# "In each forward" is nearly right. Rank 1 writes a 2 into its buffer before each forward, rank 0 a 1. A 1 on rank 1 has
# come from rank 0:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
layer = torch.nn.Linear(2, 1)
layer.register_buffer("note", torch.zeros(1))
ddp = DDP(layer)

def forwards(kind, times):
    for _ in range(times):
        layer.note.fill_(1.0 + dist.get_rank())
        with torch.set_grad_enabled(kind != "no_grad"):
            loss = ddp(torch.ones(1, 2)).sum()
        if kind != "no_grad":
            loss.backward()
        print(f"{kind} {layer.note.item():.0f}", end="  ")

forwards("train", 2)
with ddp.no_sync():
    forwards("no_sync", 2)
forwards("train", 2)
forwards("no_grad", 2)

# %% [markdown]
# A forward sends buffers when the forward *before it* was one whose gradients are synchronised. So the first of several
# forwards under `no_sync` or `no_grad` still does, the others do not, and the first training step after them does not
# either. `eval()` changes nothing (chapter 3, "An evaluation on rank 0"): what counts is whether gradients are wanted.
#
# Two arguments switch it off. They differ, and one of them is on its way out:

# %%
# %%ranks 2
import warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
for options in ({}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}):
    layer = torch.nn.Linear(2, 1)
    layer.register_buffer("note", torch.ones(1) + dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DDP(layer, **options)
    made = layer.note.item()
    layer.note.fill_(1.0 + dist.get_rank())
    ddp(torch.ones(1, 2))
    said = [str(one.message).split(".")[0] for one in caught if one.category is FutureWarning]
    print(options or "default", "after DDP():", made, " after a forward:", layer.note.item(), *said)

# %% [markdown]
# `broadcast_buffers=False`, the deprecated one, also skips the copy at construction: rank 1 keeps its 2. With
# `forward_sync_buffers=False` the ranks begin alike and then keep their own. Some programs want that, for the time
# it saves; the checkpoint of rank 0 then holds rank 0's statistics, as it would otherwise too.
#
# What has no buffer is not sent. Dropout draws its mask from each process's random numbers:

# %%
print("buffers of BatchNorm1d:", [name for name, _ in torch.nn.BatchNorm1d(5).named_buffers()])
print("buffers of Dropout:    ", [name for name, _ in torch.nn.Dropout().named_buffers()])

# %%
quiz("01_internals/buffers")

# %% [markdown]
# ## Hooks and buckets
#
# How does DDP know that a gradient is ready? It asks autograd, with a **hook** on each parameter. You can do the same.
# One process, three layers, and a hook that prints:

# %%
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: print("ready:", name))
model(torch.randn(2, 4)).sum().backward()
print("backward returns")

# %% [markdown]
# The last layer first. A gradient is ready long before `backward` returns, and that time can be used: what is ready can
# be sent while the rest is computed. The simplest use of it is already a DDP, in two lines:

# %%
# %%ranks 2 --timeline --into hooks
import torch, torch.distributed as dist
from spread import spread
from lockstep.ranks import mark, observe

def average(parameter):
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
    mark("the sum is there")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: mark(f"ready {name}"))
    parameter.register_post_accumulate_grad_hook(average)
mark("forward")
loss = model(torch.randn(64, 256) + dist.get_rank()).square().mean()
mark("backward")
loss.backward()
mark("end")
observe("apart", spread(parameter.grad for parameter in model.parameters()))

# %%
sent = [one.nbytes for one in hooks.collectives[0] if one.dtype == "float32"]  # spread() sends float64
print(len(sent), "all-reduces:", sent[:4], "…")
assert hooks.observed("apart") == [0.0, 0.0] and len(sent) == 24
story(hooks, lines=9)

# %% [markdown]
# Right gradients on all ranks, by 24 all-reduces for 24 parameters. Two things are wrong with it. Every message has a
# price of its own, however small it is (here half of them carry a bias of 1 KiB). And `average` **waits inside the
# hook**: the next gradient is computed only when the sum of this one is there. DDP mends both. It collects gradients in
# **buckets**, and starts their all-reduce without waiting for it.
#
# The same network, wrapped. What is sent in three steps?

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]))
for step in range(3):
    mark(f"step {step}")
    ddp(torch.randn(64, 256)).square().mean().backward()

# %%
story(run)

# %% [markdown]
# - **Step 0 has one bucket** with everything in it: 12 layers of 257 × 256 numbers, 3158016 bytes. (So it is
#   whatever the cap, unless `find_unused_parameters=True`, in the version of PyTorch that this course pins.)
# - Before step 1, DDP has seen in which order the gradients really became ready. It **rebuilds** the buckets in that
#   order, once. Rank 0 tells the others what it chose: the two small broadcasts.
# - **From step 1 on there are two**, and the first is small: it is closed by the gradient that brings it to 1 MiB
#   (1048576 bytes), here with the fourth layer. Later buckets are closed at 25 MiB. A small first bucket gets the network
#   busy early.
#
# To see that it is the real order, take a model that registers its layers in another order than it calls them. A
# **communication hook** takes the place of DDP's all-reduce, so it can say what lies in each bucket:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle = [torch.nn.Linear(512, 512, bias=False) for _ in range(3)]
    def forward(self, x):
        return self.last(self.middle(self.first(x)))

def hook(state, bucket):
    print(*[names[id(parameter)] for parameter in bucket.parameters()], end="; ")
    mean = bucket.buffer().div_(dist.get_world_size())  # in a hook nobody has divided yet
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])

dist.init_process_group("gloo")
ddp = DDP(Net(), bucket_cap_mb=0.9)
names = {id(p): name.split(".")[0] for name, p in ddp.module.named_parameters()}
ddp.register_comm_hook(None, hook)
for step in range(2):
    print(f"step {step}:", end=" ")
    ddp(torch.randn(2, 512)).sum().backward()

# %% [markdown]
# Backward meets the last layer first, wherever it was registered.
#
# Which parameter belongs to which bucket is fixed from then on. A bucket leaves when the last of *its* gradients is ready,
# and buckets leave in their order, or the ranks would add up different things.
#
# ### What bucket_cap_mb does

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
for cap in (None, 25, 1, 0.5):
    ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]), bucket_cap_mb=cap)
    for name in ("first step", f"bucket_cap_mb={cap}"):
        loss = ddp(torch.randn(64, 256)).square().mean()
        mark(name)
        loss.backward()

# %%
report, sizes = run.ranks[0], {}
for event in sorted([*report.collectives, *report.marks], key=lambda event: event.number):
    if isinstance(event, Mark):
        sizes[event.name] = current = []
    elif event.inside == "backward":
        current.append(event.nbytes)
for name, sent in sizes.items():
    if name != "first step":
        print(f"{name:<19}", *sent)
assert len(sizes["bucket_cap_mb=None"]) == 2 and len(sizes["bucket_cap_mb=25"]) == 1

# %% [markdown]
# The documentation gives 25 as the default size, and still **`bucket_cap_mb=25` is not the default**. The default is
# `None`: 25 MiB, with a first bucket of 1 MiB. A number of your own holds for the first bucket too. This network of 3 MiB
# has one bucket with 25, which leaves when all is computed.

# %%
quiz("01_internals/buckets")

# %% [markdown]
# ## Overlap
#
# The same program with three settings, as pictures. It marks where it is, and `timeline=True` records not only when each
# all-reduce began, but when it was over.

# %%
# %%writefile overlap.py
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

cap = {"None": None, "25": 25, "0.5": 0.5}[sys.argv[1]]
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]), bucket_cap_mb=cap)
for name, parameter in ddp.module.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: mark(f"ready {name}"))
batch = torch.randn(256, 256)
for step in range(3):
    mark("forward")
    loss = ddp(batch).square().mean()
    mark("backward")
    loss.backward()
    mark("end")

# %%
caps = ("None", "25", "0.5")
runs = [ranks.run(ranks.Script("overlap.py", (cap,)), world_size=2, timeline=True) for cap in caps]
pictures = timeline(*runs, titles=tuple(f"bucket_cap_mb={cap}" for cap in caps), step=-1)
pictures

# %%
print(pictures)

# %% [markdown]
# Whether a bucket can overlap is a matter of **order, not of time**: was it launched, and not waited for, while
# gradients were still missing? With one bucket, none. With two, one. With six, five. In every row the **last bucket is launched after the last gradient**:
# nothing is left to be computed behind which it could hide. So:
#
# - The first step of a training hides nothing (one bucket).
# - A model that fits into one bucket hides nothing.
# - The last bucket is never hidden. Its time is the least that communication costs you.
#
# Communication that is not hidden is called **exposed**. Only that part makes a step longer. And a long green bar need
# not mean a slow network: an all-reduce lasts until the *slowest* rank has joined, so it contains waiting too.
#
# And the two-line DDP from above? 23 of its 24 all-reduces are launched early, and none of them overlaps: the hook waits,
# so no gradient becomes ready between a launch and its sum. In DDP's picture, gradients go on becoming ready above a
# green bar.

# %%
timeline(hooks)

# %% [markdown]
# Want to look closer? `save_trace` writes a file that `ui.perfetto.dev` and `chrome://tracing` open. Nothing is uploaded:
# Perfetto works in your browser.

# %%
import json

pictures.save_trace("trace.json")
events = json.loads(Path("trace.json").read_text())["traceEvents"]
print("kinds of events:", *sorted({event["ph"] for event in events}))
print("processes:", len({event["pid"] for event in events}), "for three runs of two ranks")

# %%
quiz("01_internals/overlap")

# %% [markdown]
# ## The mean
#
# The mean of N gradients is their sum, divided by N. Or each divided by N, then summed. In exact arithmetic it is the
# same. In float16, whose largest number is 65504, it is not:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1, bias=False).half()
ddp = DDP(model)
(ddp(torch.ones(1, 1).half()) * 40000).sum().backward()  # the gradient is 40000 on both ranks
summed = torch.full((1,), 40000.0, dtype=torch.float16)
dist.all_reduce(summed)
print("DDP:", model.weight.grad.item(), "  sum, then divide:", (summed / 2).item())
assert model.weight.grad.item() == 40000

# %% [markdown]
# **DDP divides first**, then sums. Many texts say it the other way round. Remember the order when you write your own.
# Where nothing overflows all ways to the mean agree up to rounding; here, with 4 ranks and small whole numbers, to the bit
# (dividing by 3 would round). gloo knows the mean as an operation as well:

# %%
# %%ranks 4
import torch, torch.distributed as dist

dist.init_process_group("gloo")
gradient = torch.tensor([1.0, 2.0, 4.0]) * (dist.get_rank() + 1)
every = [torch.empty(3) for _ in range(4)]
dist.all_gather(every, gradient)
summed, averaged = gradient / 4, gradient.clone()
dist.all_reduce(summed)
dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
print("stack and mean", torch.stack(every).mean(0).tolist(), " AVG", averaged.tolist())
assert torch.equal(summed, averaged) and torch.equal(averaged, torch.stack(every).mean(0))

# %% [markdown]
# ### Is it the gradient of the joined batch?
#
# That is what one wants: N ranks with 16 samples each should make the step that one process makes with 16·N. `joined.py`
# compares the two, and returns the relative error of DDP's gradient. This is the function, and below it six cases:

# %%
print("".join(Path("joined.py").read_text().partition("def relative_error")[1:]))

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from joined import relative_error
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same data and model on both ranks
x, y = torch.randn(32, 10) + torch.arange(32).view(32, 1) / 8, torch.randint(0, 5, (32,))
plain = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
normed = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
total = lambda scores, y: cross_entropy(scores, y, reduction="sum")
gaps = torch.where((torch.arange(32) < 16) & (torch.arange(32) % 4 > 0), -100, y)  # 4 of 16 valid
weight = [2 * 26 / 32, 2 * 6 / 32][dist.get_rank()]  # ranks × own samples / all samples
observe("16 + 16, mean loss", relative_error(plain, cross_entropy, x, y, [16, 16]))
observe("26 + 6, mean loss", relative_error(plain, cross_entropy, x, y, [26, 6]))
observe("26 + 6, weighted", relative_error(plain, cross_entropy, x, y, [26, 6], weight))
observe("16 + 16, sum loss", relative_error(plain, total, x, y, [16, 16]))
observe("16 + 16, BatchNorm", relative_error(normed, cross_entropy, x, y, [16, 16]))
observe("16 + 16, ignore_index", relative_error(plain, cross_entropy, x, gaps, [16, 16]))

# %%
for name, error in run.ranks[0].observations.items():
    print(f"{name:<22} relative error {'below 0.00001' if error < 1e-5 else f'{error:.2f}'}")

# %% [markdown]
# True twice, broken four times, and never an error message.
#
# - **Equal parts and a mean loss**: the gradient of the joined batch, up to rounding. Not to the bit: a sum in another
#   order rounds differently, and so does another number of ranks.
# - **26 samples here, 6 there**: the mean of two means is not the mean of all. A rank's 6 samples weigh as much as the
#   other's 26. Multiply each rank's loss by *ranks × own samples / all samples*, and it is right again.
# - **A sum loss**: DDP still divides by N, so the gradient is half (an Nth) of what it should be.
# - **BatchNorm**: a sample's output depends on the others of its batch, and the batch is another one.
# - **`ignore_index`**: looks like equal parts, but the mean is over the *valid* targets, 4 on rank 0 and 16 on rank 1.
#   Language models with padded sequences are in this row. The same weighting helps, counting valid targets instead of
#   samples. Class weights (`cross_entropy(weight=...)`) do the same: their mean is over the sum of the targets' weights.

# %%
quiz("01_internals/joined_batch")

# %% [markdown]
# ## Exercise: implement average_gradients
#
# *Easy, 15 minutes.* Open `exercises/average_gradients.py`.
#
# The mean of every gradient over all ranks, after a backward. It sounds like a loop over the parameters, and the loop is
# short. What makes it an exercise: a parameter can be without a gradient on *some* ranks, because these took another
# branch of the model. All ranks have to make the same calls all the same. And a frozen parameter has no gradient
# anywhere.

# %%
contract("average_gradients")

# %% [markdown]
# (The stored output is the reference solution's. Run the cell to see yours.)

# %%
# %check average_gradients

# %% [markdown]
# <details><summary>It hangs, or the sizes do not fit</summary>
# The ranks made different calls. Do not decide by <code>parameter.grad is None</code> alone whether to take part: on
# another rank it may be there. What do all ranks know alike?
# </details>
#
# <details><summary>The gradients are too large by the number of ranks</summary>
# You summed. Divide, and divide first.
# </details>
#
# The solution is `solutions/average_gradients.py`.
#
# ## All-reduce by hand
#
# What happens inside an all-reduce? Step through it. Each row is a rank, each box a piece of its tensor. Click into the
# picture and use the arrow keys, or the buttons.

# %%
from lockstep.notebook.stepper import Stepper

Stepper(ranks=4, length=8)

# %% [markdown]
# <details><summary>The same as a still picture, for where no script runs</summary>
#
# ![Ring all-reduce of 8 numbers among 4 ranks, all six steps](pictures/all_reduce.svg)
# </details>
#
# **The ring.** The ranks stand in a circle and the tensor is cut into N chunks. In each step every rank sends *one chunk*
# to its right neighbour, all at the same time. In the first half, **reduce-scatter**, the receiver adds: a chunk travels
# round and collects, and after N − 1 steps each rank holds the full sum of one chunk. In the second half, **all-gather**,
# these travel round once more and are copied. 2(N − 1) steps, and in each of them every rank sends and receives an Nth.
#
# Now choose "everybody sends everything", and watch the bytes. The same on real ranks, with `isend` and `recv` alone:

# %%
# %%ranks 4 --into run
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.arange(1000.0) * (rank + 1)
total, buffer = mine.clone(), torch.empty_like(mine)
for distance in range(1, size):
    sending = dist.isend(mine, (rank + distance) % size)
    dist.recv(buffer, (rank - distance) % size)
    total += buffer
    sending.wait()
print("right:", torch.equal(total, torch.arange(1000.0) * 10))

# %%
from lockstep.notebook.stepper import bytes_sent, ring

sent = sum(one.nbytes for one in run.collectives[0] if one.kind == "send")
print("everybody to everybody, recorded:", sent, "bytes from rank 0,", sent / 4000, "times the tensor")
print("a ring, by its schedule:         ", bytes_sent(ring(4), 1000)[0], "bytes")
assert sent == 3 * 4000

# %% [markdown]
# `isend` returns at once and gives a handle to wait for. Why not `send`? Because then every rank waits for its neighbour
# to receive, while the neighbour waits for its own:

# %%
# %%ranks 3 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine, buffer = torch.ones(1000), torch.empty(1000)
dist.send(mine, (rank + 1) % size)  # BUG: in a circle, everybody sends and nobody receives
dist.recv(buffer, (rank - 1) % size)

# %%
quiz("01_internals/ring")

# %% [markdown]
# ## Exercise: implement ring_all_reduce
#
# *Medium, 25 minutes.* Open `exercises/ring_all_reduce.py`.
#
# The sum over all ranks, in place, from point-to-point messages alone. Any number of ranks, one as well; any length,
# also one that N does not divide, or that is shorter than N. The check counts your messages and bytes from outside: a ring
# that sends the whole tensor in each step gives the right sum, and fails.

# %%
contract("ring_all_reduce")

# %%
# %check ring_all_reduce

# %% [markdown]
# <details><summary>The sum is right for 2 ranks and wrong for 3</summary>
# Which chunk does a rank send in step s? Step through the picture above with 3 ranks, and write down for rank 0 the chunk
# it sends in each step. The next one to send is always the one that has just arrived.
# </details>
#
# <details><summary>It hangs</summary>
# Everybody sends, nobody receives: see the cell above. Or a rank leaves an empty chunk out which its neighbour waits for.
# </details>
#
# The solution is `solutions/ring_all_reduce.py`.
#
# ## What it costs
#
# A message takes a **latency** α, however short it is, and then its bytes at the **bandwidth** β. A ring makes 2(N − 1)
# steps of an Nth of the P bytes:
#
# > time = 2(N − 1) · α + 2(N − 1)/N · P/β
#
# The two factors, counted from the schedules that the picture above carries out:

# %%
print(" N  steps  bytes sent a rank / bytes of the tensor")
for n in (2, 3, 4, 6, 8):
    plan = ring(n)
    factor = bytes_sent(plan, 840)[0] / (840 * 4)
    print(f"{n:>2} {len(plan.steps):>5}   {factor:.3f}")
    assert len(plan.steps) == 2 * (n - 1) and abs(factor - 2 * (n - 1) / n) < 1e-12

# %% [markdown]
# "A ring costs the same however many ranks there are" is half of the truth. The bytes stop growing at twice the tensor.
# The steps do not: latency grows with N. (NCCL, the library for NVIDIA GPUs, therefore also has trees, and takes what it
# expects to be faster.)
#
# What does the model say about buckets? A hundred megabytes of gradients on eight ranks, in one bucket, in ten, in a
# thousand:

# %%
def ring_time(nbytes, ranks, latency, bandwidth):
    """Seconds for one ring all-reduce; latency in seconds, bandwidth in bytes a second."""
    steps = 2 * (ranks - 1)
    return steps * latency + steps / ranks * nbytes / bandwidth

networks = {"fast, 10 µs and 20 GB/s": (1e-5, 2e10), "slow, 500 µs and 1 GB/s": (5e-4, 1e9)}
for name, (latency, bandwidth) in networks.items():
    for buckets in (1, 10, 1000):
        each = ring_time(1e8 / buckets, 8, latency, bandwidth)
        total, last = buckets * each * 1e3, each * 1e3
        print(f"{name}: {buckets:>4} buckets {total:>6.0f} ms in all, {last:>6.2f} ms the last alone")

# %% [markdown]
# Every bucket pays the latency again: on the slow network a thousand buckets cost about forty times what one costs.
# "Small buckets for slow networks", which you will read, is the wrong way round. But a single bucket hides nothing. If
# the backward is long enough to hide all the others, you pay only for the last one, and ten buckets make that short at
# little cost. This is why there is a size to choose, and why the default is neither small nor endless.
#
# ### Memory
#
# Every rank has all of it: parameters, gradients, the optimizer's state, and the buckets. Count, for Adam:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

dist.init_process_group("gloo")
for view in (False, True):
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    ddp = DDP(torch.nn.Sequential(*layers), gradient_as_bucket_view=view)
    optimizer = torch.optim.Adam(ddp.parameters())
    for _ in range(2):
        ddp(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    parameters = list(ddp.parameters())
    state = [t for one in optimizer.state.values() for t in one.values() if t.numel() > 1]
    memories = {p.grad.untyped_storage().data_ptr() for p in parameters}
    gradients = [p.grad for p in parameters]
    counts = [sum(t.nbytes for t in group) for group in (parameters, gradients, state)]
    observe(f"gradient_as_bucket_view={view}", [*counts, len(memories)])

# %%
for name, counts in run.ranks[0].observations.items():
    parameters, gradients, state, memories = counts
    assert parameters == gradients and state == 2 * parameters
    gradients = f"gradients {gradients} in {memories} piece(s) of memory"
    print(f"{name:<30} parameters {parameters}, {gradients}, Adam {state}")

# %% [markdown]
# With four bytes a number: 4 for the parameter, 4 for the gradient, 8 for Adam. And buckets: by default a gradient and
# its place in the bucket are two memories, 4 bytes more. With `gradient_as_bucket_view=True` the eight gradients lie in
# one memory, the bucket itself, and the copy is saved. Activations come on top, and depend on the batch.
#
# None of this shrinks with more ranks. DDP makes training *faster*; it does not make a model *fit*. For that, FSDP
# (*fully sharded data parallel*) cuts parameters, gradients and state into N parts. And mixed precision by autocast (chapter 4) does not shrink what is sent: parameters and gradients stay
# float32.

# %%
quiz("01_internals/memory")

# %% [markdown]
# ## What DDP never notices
#
# DDP acts at three moments: construction, forward, and the hooks in backward. Whatever goes round these is not
# synchronised, and there is no error, because nobody is looking. In the cells below each rank has its own data, and
# `spread` of the gradients should be 0.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
x = torch.randn(4, 10) + dist.get_rank()
ddp = DDP(torch.nn.Linear(10, 3))
ddp(x).square().sum().backward()
observe("as it should be", spread(p.grad for p in ddp.parameters()))
ddp = DDP(torch.nn.Linear(10, 3))
ddp.module(x).square().sum().backward()  # BUG: past the wrapper
observe("ddp.module(x)", spread(p.grad for p in ddp.parameters()))
ddp = DDP(torch.nn.Linear(10, 3))
observe("autograd.grad", spread(torch.autograd.grad(ddp(x).square().sum(), [*ddp.parameters()])))  # BUG

# %%
def verdict(run):
    for name, value in run.ranks[0].observations.items():
        print(f"{name:<40} {'equal on all ranks' if value == 0 else 'DIFFERENT'}")

verdict(run)

# %% [markdown]
# **What this tells you.** `ddp.module` is the plain model: calling it is training alone. `torch.autograd.grad` returns
# gradients instead of accumulating them, and the hooks sit on the accumulation. Next, what happens to a model *after* it
# was wrapped:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
x = torch.randn(4, 10) + dist.get_rank()
ddp = DDP(torch.nn.Linear(10, 3))
ddp.double()  # BUG: cast after wrapping
ddp(x.double()).square().sum().backward()
observe("cast after wrapping", spread(p.grad for p in ddp.parameters()))
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 3)))
ddp.module.append(torch.nn.Linear(3, 3))  # BUG: added after wrapping
ddp(x).square().sum().backward()
observe("added after wrapping: the old layer", spread(p.grad for p in ddp.module[0].parameters()))
observe("added after wrapping: the new layer", spread(p.grad for p in ddp.module[1].parameters()))

# %%
verdict(run)

# %% [markdown]
# A cast makes new accumulators without hooks; a layer that was added never had any, and was not broadcast either. A layer
# that is **replaced** is both an addition and a loss, and what is lost is noticed, one step late:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 3)))
ddp.module[1] = torch.nn.Linear(10, 3)  # BUG: replaced after wrapping
for _ in range(2):
    ddp(torch.randn(4, 10)).sum().backward()

# %% [markdown]
# A layer that is frozen after wrapping ends in the same error, one step late as well:

# %%
# %%ranks 2 --expect raised --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 3)))
ddp.module[0].requires_grad_(False)  # BUG: frozen after wrapping
for _ in range(2):
    ddp(torch.randn(4, 10)).sum().backward()

# %% [markdown]
# The advice in these messages, `find_unused_parameters=True`, silences them. It does not mend the replaced layer: nobody
# averages the new one. Change first, wrap last.
#
# One more, without touching the model at all. Two forwards before one backward are fine. Two forwards, then two
# backwards, are not:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
x = torch.randn(4, 10) + dist.get_rank()
ddp = DDP(torch.nn.Linear(10, 3))
(ddp(x).square().sum() + ddp(x + 1).square().sum()).backward()
observe("forward, forward, backward", spread(p.grad for p in ddp.parameters()))
ddp = DDP(torch.nn.Linear(10, 3))
first, second = ddp(x).square().sum(), ddp(x + 1).square().sum()
first.backward()
second.backward()  # BUG: DDP prepared one backward
observe("forward, forward, backward, backward", spread(p.grad for p in ddp.parameters()))

# %%
verdict(run)
assert run.observed("forward, forward, backward") == [0, 0]

# %% [markdown]
# A forward prepares *one* backward; the second one adds its own gradients on top of the averaged ones, on each rank
# alone. One test finds all of these: call `spread(model.parameters())` on every rank every hundred steps, and stop when
# it is not zero. It is the cheapest test in this course.

# %%
quiz("01_internals/bypass")

# %% [markdown]
# ## Build it yourself
#
# You have seen all parts: a broadcast at construction, hooks, buckets in reverse order, a division, an all-reduce that is
# launched and not waited for, and at the end of the backward a wait for all of them.
#
# ### Exercise: implement mini_ddp
#
# *Hard, 35 minutes.* Open `exercises/mini_ddp.py`.
#
# A class `MiniDDP(module, bucket_cap_mb=25)`. It is graded against PyTorch's: the same gradients to the bit over several
# steps, on models that are chosen to break naive versions (a frozen parameter, two that are tied, one that some steps do
# not use, a buffer, one that is larger than a bucket). And on what it does: buckets instead of a call for each parameter,
# the first of them launched before the last gradient is ready, by the order of events and not by the clock.
#
# A hook of yours is not told that the backward is over, so the training loop says so:
# `finish_gradient_synchronization()` after `backward()`, before `step()`.

# %%
contract("mini_ddp", "MiniDDP")

# %%
# %check mini_ddp

# %% [markdown]
# <details><summary>It hangs after a few steps</summary>
# The ranks launched their buckets in different orders, or one rank launched a bucket that another did not, because a
# parameter got no gradient there. Launch in one order that all ranks know, and all buckets in every step.
# </details>
#
# <details><summary>"launched after backward"</summary>
# Your hook only collects. Count down the gradients that a bucket still waits for, and launch at zero, from the hook, with
# <code>async_op=True</code>.
# </details>
#
# <details><summary>Right, and not to the bit</summary>
# Divide first, then sum, as DDP does.
# </details>
#
# The solution is `solutions/mini_ddp.py`. When yours passes, look at it: the same training as in "Overlap", with your
# class, beneath PyTorch's with buckets of the same size. (PyTorch closes a bucket with the gradient that *reaches* the
# cap; yours holds *at most* so much.)

# %%
# %%ranks 2 --timeline --into mine
import os, sys, torch, torch.distributed as dist
from lockstep.ranks import mark
sys.path.insert(0, os.environ.get("LOCKSTEP_SUBMISSION", "../exercises"))
from mini_ddp import MiniDDP

dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
for name, one in model.named_parameters():
    one.register_post_accumulate_grad_hook(lambda _, name=name: mark(f"ready {name}"))
ddp = MiniDDP(model, bucket_cap_mb=0.502)  # two layers, 526336 bytes, fit below this
batch = torch.randn(256, 256)
for step in range(3):
    mark("forward")
    loss = ddp(batch).square().mean()
    mark("backward")
    loss.backward()
    ddp.finish_gradient_synchronization()
    mark("end")

# %%
both = timeline(runs[2], mine, titles=("PyTorch's DDP", "MiniDDP"), step=-1)
print(both)
both

# %%
quiz("01_internals/built")

# %% [markdown]
# ## Take it with you
#
# - DDP copies **values once**, at construction, from rank 0; **buffers** in the forwards, from rank 0; **gradients** in the
#   backward, as a mean. Nothing in `optimizer.step()`.
# - One bucket in the first step, rebuilt before the second; 1 MiB, then 25 MiB. An explicit size drops the small first
#   one.
# - Overlap is a matter of order. The last bucket is always exposed.
# - Divide first, then sum. The mean is the joined batch's gradient for equal counts, a mean loss, and no BatchNorm.
# - A ring sends 2(N − 1)/N of the tensor from each rank, in 2(N − 1) steps: bytes stay, latency grows.
# - DDP never compares parameters. You can.
#
# In an interview, expect "why is the last bucket special?" and "when does averaging gradients give the wrong gradient?".
# You have measured both.
#
# ## What to read next
#
# Chapter 2 sets a training up: launchers, process groups, samplers. Chapter 4 takes the buckets up again, to make the step
# faster. PyTorch's own description of the hooks and buckets is at `pytorch.org/docs/stable/notes/ddp.html`. The paper:
# Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020). The ring: Patarasuk
# and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

# %%
from lockstep.notebook.course_map import course_map

course_map("01_internals")
