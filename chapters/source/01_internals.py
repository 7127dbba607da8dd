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
# **Where does the time go when four processes train one model?** <span class="in-lab">Click into the next cell and
# press Shift+Enter.</span> The cell trains a small network in four processes and draws what each of them did.

# %%
# %load_ext lockstep
from lockstep import ranks
from lockstep.notebook.timeline import timeline

run = ranks.run(ranks.Script("four_ranks.py"), world_size=4, timeline=True)
timeline(run)

# %% [markdown]
# These are two training steps. Each row is a **rank**: one process with its own copy of the model and its own batch. A
# rank runs **forward**, then **backward**; each small mark is a gradient that is ready. A green bar is an
# **all-reduce**, which here gives every rank the mean of all ranks' gradients.
#
# <span class="in-lab">Run the cell again: the times change, the order doesn't.</span> Here is the order as text:

# %%
print(timeline(run))

# %% [markdown]
# PyTorch collects gradients in **buckets** and sends each bucket with one all-reduce. Step 0 has one bucket, launched
# after backward. Step 1 has two, and the first is launched while backward is still running. What does PyTorch know in
# step 1 that it didn't know in step 0? Write down your guess. Here is the whole program:

# %%
from pathlib import Path

print(Path("four_ranks.py").read_text())

# %% [markdown]
# `twelve_layers.py` holds the network and the training step. All communication comes from `DDP(...)`, PyTorch's
# `DistributedDataParallel`. In this chapter you replace it with your own code, one small step at a time. Afterwards you
# can
#
# - **choose** a collective and say what each rank holds afterwards;
# - **carry out** a ring all-reduce by hand and say what it costs;
# - **predict** a step's all-reduces: how many, how large, and which ones backward hides;
# - **build** a DDP that overlaps communication with backward;
# - **decide** whether DDP's gradient equals that of one large batch;
# - **name** the mistakes that silently bypass DDP.
#
# About 120 minutes: 45 to read and run, 75 for three exercises. You need PyTorch's training loop, but no GPU.
#
# ## Five collectives
#
# An all-reduce is a **collective**: a call that all ranks of a group make together. Here are five of them.
#
# ### How a cell runs ranks
#
# `%%ranks 3` runs a cell in three fresh processes. `init_process_group` connects them into a **process group**; `gloo`
# is the library that carries tensors between CPUs.

# %%
# %%ranks 3
import torch.distributed as dist

dist.init_process_group("gloo")
print("I am rank", dist.get_rank(), "of", dist.get_world_size())

# %% [markdown]
# In the next five cells, rank 0 starts with [1, 2, 3], rank 1 with [10, 20, 30] and rank 2 with [100, 200, 300]. Before
# you run each one, cover the right half of its picture. What will each rank hold?
#
# ### Broadcast: one rank's tensor, everywhere
#
# ![Broadcast: all three ranks end with rank 0's tensor](pictures/broadcast.svg)

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
dist.broadcast(t, src=0)
print(t.tolist())

# %% [markdown]
# ### Reduce: the sum, on one rank
#
# ![Reduce: rank 0 ends with the sum, the other ranks with nothing of use](pictures/reduce.svg)

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
dist.reduce(t, dst=0)
if dist.get_rank() == 0:
    print(t.tolist())

# %% [markdown]
# The content of the other ranks' tensors is now undefined.
#
# ### All-reduce: the sum, everywhere
#
# ![All-reduce: every rank ends with the sum](pictures/sum_everywhere.svg)

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
dist.all_reduce(t)
print(t.tolist())

# %% [markdown]
# DDP averages gradients with this collective. For a different operation, pass `op=dist.ReduceOp.MAX`, `MIN`, `PRODUCT`
# or `AVG`.
#
# ### All-gather: all tensors, everywhere
#
# ![All-gather: every rank ends with the tensors of all ranks](pictures/all_gather.svg)

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
everyone = [torch.empty(3) for _ in range(3)]
dist.all_gather(everyone, t)
print([one.tolist() for one in everyone])

# %% [markdown]
# ### Reduce-scatter: the sum, in pieces
#
# ![Reduce-scatter: rank r ends with piece r of the sum](pictures/reduce_scatter.svg)

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
piece = torch.empty(1)
dist.reduce_scatter(piece, list(t.split(1)))
print("piece:", piece.tolist(), end="  ")
pieces = [torch.empty(1) for _ in range(3)]
dist.all_gather(pieces, piece)
print("gathered:", torch.cat(pieces).tolist())

# %% [markdown]
# The all-gather at the end of the cell puts the pieces together: **an all-reduce is a reduce-scatter followed by an
# all-gather.**
#
# ### Every rank must call it
#
# `dist.barrier()` is a collective without data: it returns when all ranks have called it. If a rank leaves out a
# collective, the others wait for it, and the job **hangs**. Try it; `--expect hang` says that this cell is meant to.

# %%
# %%ranks 3 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
if dist.get_rank() != 1:  # BUG: rank 1 never calls all_reduce
    dist.all_reduce(t)
dist.barrier()

# %% [markdown]
# Ranks 0 and 2 wait in `all_reduce`, rank 1 in `barrier`. Outside this course they would wait for half an hour. Order
# matters too: a rank's first collective is paired with the other ranks' first, its second with their second, and so on.
#
# ### Point to point
#
# `send` and `recv` carry a tensor from one rank to another, and return when it has arrived. `isend` and `irecv` return
# at once with a **handle**; the transfer is complete when `handle.wait()` returns.

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine, from_left = torch.tensor([10.0 * rank]), torch.empty(1)
sending = dist.isend(mine, (rank + 1) % size)  # to the right, and don't wait yet
dist.recv(from_left, (rank - 1) % size)
sending.wait()
print("my left neighbour has", from_left.item())

# %% [markdown]
# Why `isend`? **Predict** what happens if every rank calls `send` first.

# %%
# %%ranks 3 --expect hang
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine, from_left = torch.ones(1000), torch.empty(1000)
dist.send(mine, (rank + 1) % size)  # BUG: every rank sends, so no rank receives
dist.recv(from_left, (rank - 1) % size)

# %% [markdown]
# *NCCL*, the library for NVIDIA GPUs, starts both transfers together if you pass them to one call:
# `dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, from_left, left)])`.
#
# ### async_op: start now, wait later
#
# With `async_op=True`, collectives return a handle too. Below, rank 0 starts an all-reduce and then sends a message.
# Rank 1 waits for that message before it joins the all-reduce.

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t, message = torch.ones(3), torch.zeros(1)
if dist.get_rank() == 0:
    handle = dist.all_reduce(t, async_op=True)
    print("started; finished:", handle.is_completed(), end="  ")
    dist.send(message, 1)
else:
    dist.recv(message, 0)
    handle = dist.all_reduce(t, async_op=True)
handle.wait()
print("after wait:", t.tolist())

# %% [markdown]
# Without `async_op`, rank 0 would never reach `send`, and both ranks would hang. Until `wait()` returns, the tensor's
# content is undefined: leave it alone. (On a GPU, `wait()` holds back later GPU work, not the CPU: chapter 4.)

# %%
from lockstep.notebook.quiz import quiz

quiz("01_internals/collectives")

# %% [markdown]
# ## The mean
#
# Now build DDP. If all ranks start with equal weights and apply equal gradients, the weights stay equal. So every
# gradient has to become its mean over all ranks before `optimizer.step()`. The simplest way: **after backward, one
# all-reduce for each parameter.**
#
# Use the network from the first picture: 12 layers, each with 256 × 256 weights and 256 biases of 4 bytes. **Predict**
# how many all-reduces there are, how many bytes they carry in all, and how many are launched **early**, before the last
# gradient is ready. Replace each `None`.

# %%
predicted = [None, None, None]  # all-reduces, bytes in all, launched before the last gradient

# %%
# %%ranks 2 --timeline --into after_backward
import torch.distributed as dist
from rank_spread import spread
from twelve_layers import network, train_step

def average():
    for parameter in model.parameters():
        parameter.grad *= 1 / dist.get_world_size()
        dist.all_reduce(parameter.grad)

dist.init_process_group("gloo")
model = network()
train_step(model, average)  # forward, backward, then average()
print("largest difference between the ranks:", spread(p.grad for p in model.parameters()))

# %%
from measured import measured

measured(after_backward, predicted)
timeline(after_backward)

# %% [markdown]
# `spread` returns the largest difference between any two ranks: 0.0, so all gradients agree. In the picture all 24 bars
# lie in the grey part after backward. While a bar lasts, the rank computes nothing.
#
# ### Scale first, then sum
#
# `average` multiplies by 1/N (for N ranks) and *then* sums. Does the order matter? The largest float16 number is 65504.
# Below, the gradient is 40000 on both ranks:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1, bias=False).half()
ddp = DDP(model)
(ddp(torch.ones(1, 1).half()) * 40000).sum().backward()
summed = torch.full((1,), 40000.0, dtype=torch.float16)
dist.all_reduce(summed)
print("DDP:", model.weight.grad.item(), "  sum:", summed.item(), "  sum / 2:", (summed / 2).item())

# %% [markdown]
# DDP scales first, so its sum doesn't overflow. And it multiplies by 1/N. Dividing by N, or `ReduceOp.AVG`, is
# mathematically the same. How many of 100,000 gradients differ from DDP's on three ranks? (`observe` hands a value to
# the notebook.)

# %%
# %%ranks 3 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
mine = torch.rand(1, 100_000)
ddp = DDP(torch.nn.Linear(100_000, 1, bias=False))
ddp(mine).sum().backward()  # w's gradient is `mine`; DDP makes it the mean of all ranks'
multiplied, divided, averaged = mine * (1 / 3), mine / 3, mine.clone()
dist.all_reduce(multiplied)
dist.all_reduce(divided)
dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
for name, mean in (("mine * (1 / 3)", multiplied), ("mine / 3", divided), ("ReduceOp.AVG", averaged)):
    observe(name, (mean != ddp.module.weight.grad).float().mean().item())

# %%
for name, share in run.ranks[0].observations.items():
    print(f"{name:<15} differs from DDP in {share:.0%} of the elements")

# %% [markdown]
# These are rounding differences, and harmless. To reproduce DDP's gradients exactly, multiply by `1 / N`, then sum. On
# two or four ranks nothing differs: halves and quarters are exact.
#
# ### A gradient that only some ranks have
#
# A parameter that a batch doesn't use has `grad = None`. In a model with branches, that can happen on some ranks only.
# Can those ranks skip the parameter?

# %%
# %%ranks 2 --expect hang
import torch, torch.distributed as dist

dist.init_process_group("gloo")
trunk, side = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
x = torch.ones(1, 4)
out = trunk(x)
if dist.get_rank() == 0:  # rank 1 doesn't use side
    out = out + side(x)
out.sum().backward()
for parameter in [*trunk.parameters(), *side.parameters()]:
    if parameter.grad is not None:  # BUG: rank 1 skips what rank 0 doesn't
        dist.all_reduce(parameter.grad)
dist.barrier()

# %% [markdown]
# No: rank 0 waits in an all-reduce that rank 1 never calls. This rule works:
#
# - If *some* rank has a gradient, every rank joins the all-reduce. A rank without one contributes zeros and receives
#   the mean.
# - If *no* rank has one, leave `None` everywhere. An optimizer skips `None`; with zeros, momentum and weight decay
#   would still move the parameter.
# - Every rank skips frozen parameters (`requires_grad=False`).

# %%
quiz("01_internals/mean")

# %% [markdown]
# ## Exercise: implement average_gradients
#
# *Easy, 15 minutes.* Open [`exercises/average_gradients.py`](../exercises/average_gradients.py). Start from the loop in
# "The mean" and add the rule for missing gradients. How can all ranks learn, with one collective, which gradients
# exist?
#
# `%check average_gradients` runs your file on several ranks and grades it; `%hint average_gradients` shows the next
# hint. In a terminal, type `./lockstep check average_gradients`.

# %%
from lockstep.notebook.contract import contract

contract("average_gradients")

# %% [markdown]
# <span class="in-lab">(The stored output is the reference solution's. Run the cell to see yours.)</span>

# %%
# %check average_gradients

# %% [markdown]
# The solution is `solutions/average_gradients.py`.
#
# ## All-reduce by hand
#
# Your DDP works, with 24 all-reduces. What does one cost? In the picture, a row is a rank and a box a piece of its
# tensor. Click it and step with the arrow keys or the buttons.

# %%
from lockstep.notebook.stepper import Stepper

Stepper(ranks=4, length=8)

# %% [markdown]
# <details><summary>The same as a still picture</summary>
#
# ![Ring all-reduce of 8 numbers among 4 ranks, all six steps](pictures/all_reduce.svg)
# </details>
#
# **The ring.** The ranks form a circle, and each cuts its tensor into N chunks. In every step, each rank sends *one
# chunk* to its right neighbor.
#
# 1. **Reduce-scatter, N − 1 steps.** The receiver adds the chunk to its own. At the end each rank holds the full sum of
#    one chunk.
# 2. **All-gather, N − 1 steps.** The full sums travel round the ring until every rank has all of them.
#
# Now choose "everybody sends everything" above the picture: each rank sends its whole tensor to every other. The next
# cell does that on four ranks with 4000 bytes. **Predict** how many bytes rank 0 sends, and how many it would send in a
# ring.

# %%
# %%ranks 4 --into run
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.ones(1000) * (rank + 1)
total, buffer = mine.clone(), torch.empty_like(mine)
for distance in range(1, size):
    sending = dist.isend(mine, (rank + distance) % size)
    dist.recv(buffer, (rank - distance) % size)
    total += buffer
    sending.wait()
print("every element is", total.unique().item())

# %%
from lockstep.notebook.stepper import bytes_sent, ring

sent = sum(one.nbytes for one in run.collectives[0] if one.kind == "send")
print("everybody to everybody, recorded:", sent, "bytes from rank 0")
print("a ring, by its schedule:         ", bytes_sent(ring(4), 1000)[0], "bytes")

# %% [markdown]
# Rank 0 sent 3 times its tensor; in a ring it would send 1.5 times. With N ranks that is N − 1 against 2(N − 1)/N,
# which stays below two.

# %%
quiz("01_internals/ring")

# %% [markdown]
# ## Exercise: implement ring_all_reduce
#
# *Medium, 25 minutes.* Open [`exercises/ring_all_reduce.py`](../exercises/ring_all_reduce.py). The check counts your
# messages and bytes: a ring that sends the whole tensor in every step gets the right sum and still fails.

# %%
contract("ring_all_reduce")

# %%
# %check ring_all_reduce

# %% [markdown]
# The solution is `solutions/ring_all_reduce.py`.
#
# ## What it costs
#
# A message takes a fixed **latency** α, plus its size divided by the **bandwidth** β. A ring takes 2(N − 1) steps, each
# with 1/N of the tensor's P bytes:
#
# > time = 2(N − 1) · α + 2(N − 1)/N · P/β
#
# The next cell counts both in the rings of the picture:

# %%
print(" N  steps  bytes sent by a rank / bytes of the tensor")
for n in (2, 3, 4, 6, 8):
    plan = ring(n)
    factor = bytes_sent(plan, 840)[0] / (840 * 4)
    print(f"{n:>2} {len(plan.steps):>5}   {factor:.3f}")
    assert len(plan.steps) == 2 * (n - 1) and abs(factor - 2 * (n - 1) / n) < 1e-12

# %% [markdown]
# The bytes stay below twice the tensor, but the steps grow with N, and with them the latency. (NCCL can also use trees,
# and picks what it expects to be faster.)
#
# Should DDP send large messages or small ones? Take 100 MB of gradients on eight ranks, in 1, 10 or 1000 parts.
# **Predict** which takes the least time in total, and which has the shortest *last* part.

# %%
def ring_time(nbytes, ranks, latency, bandwidth):
    """Seconds for one ring all-reduce; latency in seconds, bandwidth in bytes a second."""
    steps = 2 * (ranks - 1)
    return steps * latency + steps / ranks * nbytes / bandwidth

networks = {"fast, 10 µs and 20 GB/s": (1e-5, 2e10), "slow, 500 µs and 1 GB/s": (5e-4, 1e9)}
for name, (latency, bandwidth) in networks.items():
    for parts in (1, 10, 1000):
        each = ring_time(1e8 / parts, 8, latency, bandwidth)
        total, last = parts * each * 1e3, each * 1e3
        print(f"{name}: in {parts:>4} parts {total:>6.0f} ms, the last alone {last:>6.2f} ms")

# %% [markdown]
# Every part pays the latency again: on the slow network, a thousand parts take about forty times as long as one. But
# one large part can't start before all gradients are computed. Small parts can be sent while backward computes, and at
# best you wait only for the last. In ten parts, the slow network's wait falls from 182 to 24.5 ms. This trade-off
# decides the size of a bucket.

# %%
quiz("01_internals/cost")

# %% [markdown]
# ## Hooks and buckets
#
# Your 24 all-reduces start after backward, but most gradients are ready long before. A **hook** is a function that
# PyTorch calls for you, here when a gradient is ready:

# %%
import torch

def hook(parameter):
    print("ready, shape", tuple(parameter.shape))

model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(hook)
model(torch.randn(1, 2)).sum().backward()
print("backward returns")

# %% [markdown]
# The last layer comes first, because backward runs from the loss to the input.
#
# ### An all-reduce in each hook
#
# Move the two lines of `average` into a hook. **Predict** again: will there be green bars below backward? Will backward
# take longer? (`mark` adds a line to a rank's record; `story` prints the record.)

# %%
predicted = [None, None, None]  # all-reduces, bytes in all, launched before the last gradient

# %%
# %%ranks 2 --timeline --into in_hooks
import torch.distributed as dist
from lockstep.ranks import mark
from twelve_layers import network, train_step

def average(parameter):
    parameter.grad *= 1 / dist.get_world_size()
    dist.all_reduce(parameter.grad)
    mark("the sum is there")

dist.init_process_group("gloo")
model = network()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average)
train_step(model)

# %%
from measured import story

measured(in_hooks, predicted)
story(in_hooks, lines=8)
timeline(in_hooks)

# %% [markdown]
# 23 of the 24 are launched early, yet nothing overlaps. The record shows why: `average` **waits inside the hook**.
# Backward pauses until the sum is there, and only then computes the next gradient.
#
# ### Launch in the hook, wait after backward
#
# Launch with `async_op` in the hook instead, and wait for all handles after backward. **Predict** where "the sum is
# there" moves in the record.

# %%
# %%ranks 2 --timeline --into with_handles
import torch.distributed as dist
from lockstep.ranks import mark
from twelve_layers import network, train_step

handles = []

def launch(parameter):
    parameter.grad *= 1 / dist.get_world_size()
    handles.append(dist.all_reduce(parameter.grad, async_op=True))

def wait():
    for handle in handles:
        handle.wait()
        mark("the sum is there")

dist.init_process_group("gloo")
model = network()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(launch)
train_step(model, wait)

# %%
story(with_handles, lines=8)
timeline(with_handles)

# %% [markdown]
# It is gone from the first eight lines, because all 24 waits now come after backward. In the picture, gradients become
# ready while green bars run: this is **overlap**. But half of the 24 messages carry a bias of 1 KiB, and each pays the
# full latency.
#
# ### One flat buffer
#
# The other extreme is to copy all gradients into one flat tensor and reduce it once. **Predict** the three numbers.

# %%
predicted = [None, None, None]  # all-reduces, bytes in all, launched before the last gradient

# %%
# %%ranks 2 --timeline --into one_flat
import torch, torch.distributed as dist
from twelve_layers import network, train_step

def average():
    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters]) * (1 / dist.get_world_size())
    dist.all_reduce(flat)
    pieces = flat.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))

dist.init_process_group("gloo")
model = network()
train_step(model, average)

# %%
measured(one_flat, predicted)
timeline(one_flat)

# %% [markdown]
# There is one message, and it overlaps nothing. You have now measured both extremes:
#
# | averaged | all-reduces | launched early | overlap | latency paid |
# |---|---|---|---|---|
# | each parameter, after backward | 24 | 0 | no | 24 times |
# | each parameter, waiting in the hook | 24 | 23 | no | 24 times |
# | each parameter, with handles | 24 | 23 | yes | 24 times |
# | one flat buffer | 1 | 0 | no | once |
#
# Buckets lie in between: a few flat buffers, each launched when the last of *its* gradients is ready.
#
# ### DDP's buckets
#
# Wrap the same network in DDP. What does PyTorch send in three steps?

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
# - **Before step 0** the constructor copies the model ("What is copied when").
# - **Step 0 has one bucket** with all 3158016 bytes (in torch 2.13, without `find_unused_parameters=True`, explained
#   below).
# - **Before step 1 DDP rebuilds the buckets**, once, because it now knows in which order gradients become ready. Rank 0
#   sends its choice to the others in the two small broadcasts.
# - **From step 1 on there are two.** The first closes when it reaches 1 MiB (1048576 bytes), later ones at 25 MiB. A
#   small first bucket fills early, so communication starts early.
#
# Which order does DDP use? The next model registers its layers in one order and calls them in a different one. Its
# **communication hook**, which replaces DDP's all-reduce, prints what each bucket holds. (It returns a *future*, a
# handle with a result.)

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
    print(*[names[weight] for weight in bucket.parameters()], end="; ")
    done = torch.futures.Future()
    done.set_result(bucket.buffer())  # nothing is averaged: we only look
    return done

dist.init_process_group("gloo")
model = Net()
names = {layer.weight: name for name, layer in model.named_children()}
ddp = DDP(model, bucket_cap_mb=0.9)
ddp.register_comm_hook(None, hook)
for step in range(2):
    print(f"step {step}:", end=" ")
    ddp(torch.randn(2, 512)).sum().backward()

# %% [markdown]
# Step 0 uses the order of registration, later steps the order in which backward reaches the layers.
#
# ### What bucket_cap_mb does
#
# `DDP(model, bucket_cap_mb=...)` sets the size of a bucket, in MiB. A layer has 263168 bytes, all twelve have 3158016.
# **Predict** how many buckets the third step has with each of these values:

# %%
predicted = {"None": None, "25": None, "1": None, "0.5": None}  # buckets in the third step

# %%
# %%writefile overlap.py
import sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from twelve_layers import network, train_step

dist.init_process_group("gloo")
cap = None if sys.argv[1] == "None" else float(sys.argv[1])
ddp = DDP(network(), bucket_cap_mb=cap)
for _ in range(3):
    train_step(ddp)

# %%
by_cap = {}
for cap, guess in predicted.items():
    by_cap[cap] = ranks.run(ranks.Script("overlap.py", (cap,)), world_size=2, timeline=True)
    picture = timeline(by_cap[cap], step=-1)
    buckets = picture.panels[0].steps[0][0].buckets  # rank 0's, in the last step
    said = f"predicted {'?' if guess is None else guess}, measured {len(buckets)}:"
    print(f"bucket_cap_mb={cap:<5}", said, *[bucket.nbytes for bucket in buckets])

# %% [markdown]
# **`bucket_cap_mb=25` is not the default**, although the documentation names 25. The default, `None`, means 25 MiB with
# a first bucket of 1 MiB. A number that you pass applies to the first bucket too, so with 25 this network has one
# bucket.

# %%
quiz("01_internals/buckets")

# %% [markdown]
# ## Overlap
#
# Communication is **hidden** if it runs while backward computes, otherwise **exposed**. Only exposed communication
# makes a step longer. Here is the last step of three of these runs. Which bucket is never hidden?

# %%
caps = ("None", "25", "0.5")
titles = tuple(f"bucket_cap_mb={cap}" for cap in caps)
pictures = timeline(*[by_cap[cap] for cap in caps], titles=titles, step=-1)
pictures

# %%
print(pictures)

# %% [markdown]
# A bucket can be hidden if DDP launches it before the last gradient is ready and waits for it afterwards. Overlap is a
# matter of **order, not of time**. With six buckets five can overlap, with two buckets one, with one bucket none: **the
# last bucket is launched after the last gradient**, when backward has nothing left to compute. The first step, with its
# single bucket, hides nothing.
#
# A long green bar need not mean a slow network: an all-reduce lasts until the *slowest* rank has joined.
#
# For a closer look, `save_trace` writes a file for `ui.perfetto.dev` or `chrome://tracing`.

# %%
import json

pictures.save_trace("trace.json")
events = json.loads(Path("trace.json").read_text())["traceEvents"]
print(len({event["pid"] for event in events}), "processes: three runs of two ranks")

# %% [markdown]
# ### One order on all ranks
#
# DDP launches buckets in one fixed order, even if a later one is complete first. To see why, let rank 1 launch two
# buckets of the same size in reverse. The sums should be 2 and 20.

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
a, b = torch.tensor([1.0]), torch.tensor([10.0])
order = [a, b] if dist.get_rank() == 0 else [b, a]  # BUG: in this rank's own order
handles = [dist.all_reduce(bucket, async_op=True) for bucket in order]
for handle in handles:
    handle.wait()
print("sum of a:", a.item(), "  sum of b:", b.item())

# %% [markdown]
# Both sums are wrong, and no rank raises an error: calls are paired by their order, never by their content.

# %%
quiz("01_internals/overlap")

# %% [markdown]
# ## What is copied when
#
# Averaging keeps equal weights equal. But what makes them equal in the first place? Wrap a model whose weights differ
# between ranks, with and without `init_sync=False`:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread
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
    print(f"{name:<16} spread before DDP(): {before:.3f}   after: {after:.3f}")

# %% [markdown]
# The **constructor** broadcasts rank 0's parameters, so the ranks don't need equal seeds. With `init_sync=False` the
# weights stay different: DDP never sends parameters again.
#
# What else is sent, and when? This model also has **buffers**: tensors that belong to the model but have no gradient,
# such as BatchNorm's running statistics. **Predict** which phases of a step send something: forward, backward,
# `optimizer.step`?

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
# - **Construction**: the ranks compare the number and shapes of their parameters (8 and 80 bytes). Then rank 0 sends
#   260 bytes of parameters with 40 of running statistics, and a counter of 8.
# - **Each forward**: rank 0's buffers, which replace the other ranks'. (The 20 and 4 bytes in step 1 describe the
#   rebuilt buckets.)
# - **Each backward**: the gradients, 65 × 4 bytes.
# - **`optimizer.step`**: nothing.
#
# Your DDP must handle three more things.
#
# ### no_sync: accumulate first, exchange once
#
# To train on two batches in one optimizer step, call backward twice before `step`. Only the second backward needs to
# exchange gradients:

# %%
# %%ranks 2 --into accumulated
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(10, 5, bias=False))
mark("first batch, in no_sync()")
with ddp.no_sync():
    ddp(torch.randn(8, 10)).sum().backward()
mark("second batch")
ddp(torch.randn(8, 10)).sum().backward()

# %%
story(accumulated)

# %% [markdown]
# One all-reduce of 200 bytes carries the sum of both batches' gradients.
#
# ### A branch that a rank doesn't use
#
# With `find_unused_parameters=True` DDP follows your rule for missing gradients. Below, only rank 0 uses `side`, and no
# rank uses `idle`.

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(1, 1, bias=False)
        self.side = torch.nn.Linear(1, 1, bias=False)
        self.idle = torch.nn.Linear(1, 1, bias=False)
    def forward(self, x, use_side):
        out = self.trunk(x)
        return out + self.side(x) if use_side else out

dist.init_process_group("gloo")
ddp = DDP(Branches(), find_unused_parameters=True)
ddp(torch.ones(1, 1), use_side=dist.get_rank() == 0).sum().backward()
for name, parameter in ddp.module.named_parameters():
    print(name, None if parameter.grad is None else parameter.grad.item(), end="  ")

# %% [markdown]
# ### The names in a checkpoint
#
# The wrapper contains your model as `module`, so every name in its state starts with `module.`. Save the model's own
# state, which loads anywhere:

# %%
# %%ranks 1
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(2, 1))
print("wrapper:", *ddp.state_dict(), "  model:", *ddp.module.state_dict())

# %%
quiz("01_internals/copied")

# %% [markdown]
# ## Build it yourself
#
# ### Exercise: implement mini_ddp
#
# *Hard, 35 minutes.* Open [`exercises/mini_ddp.py`](../exercises/mini_ddp.py) and write the class `MiniDDP(module,
# bucket_cap_mb=25)`. The check compares it with PyTorch's DDP: the same gradients bit for bit, on models chosen to
# break naive versions, and communication that starts as early.
#
# You have seen every part. Put them together in seven stages of at most 40 lines:
#
# 1. **Copy.** The constructor broadcasts parameters and buffers; `forward` calls the module; `state_dict` and
#    `load_state_dict` are the module's own.
# 2. **Average after backward.** Put the loop from "The mean" into `finish_gradient_synchronization`, which the training
#    loop calls after backward.
# 3. **Launch in a hook.** Move the loop's two lines into a hook for each parameter.
# 4. **Wait after backward.** Launch with `async_op=True`; wait in `finish_gradient_synchronization`.
# 5. **Fill buckets.** Use flat buffers of at most `bucket_cap_mb` MiB, the last parameters first. The hook counts down
#    the gradients that its bucket still needs, and launches at zero.
# 6. **Launch what a rank lacks.** Every rank launches every bucket, in one order: `finish_gradient_synchronization`
#    launches those that still lack a gradient.
# 7. **Exchange nothing in `no_sync`.** Inside it, the hooks do nothing.
#
# Each stage has its own checks, and the report names the stage to write next.

# %%
contract("mini_ddp", "MiniDDP")

# %%
# %check mini_ddp

# %% [markdown]
# The solution is `solutions/mini_ddp.py`. From stage 2 on, the next cells draw your class below PyTorch's DDP with
# buckets of the same size. (PyTorch closes a bucket with the gradient that *reaches* the cap; yours holds *at most* the
# cap.) **Predict** at every stage.

# %%
predicted = [None, None, None]  # all-reduces, bytes in all, launched before the last gradient

# %%
# %%ranks 2 --timeline --into mine
import os, sys, torch.distributed as dist
from twelve_layers import network, train_step
sys.path.insert(0, os.environ.get("LOCKSTEP_SUBMISSION", "../exercises"))  # where your file is
from mini_ddp import MiniDDP

dist.init_process_group("gloo")
ddp = MiniDDP(network(), bucket_cap_mb=0.502)  # two layers, 526336 bytes, are just below this
for _ in range(3):
    train_step(ddp, ddp.finish_gradient_synchronization)

# %%
measured(mine, predicted)
timeline(by_cap["0.5"], mine, titles=("PyTorch's DDP", "MiniDDP"), step=-1)

# %% [markdown]
# In both pictures five of six buckets are launched early. PyTorch waits for the last one inside backward; yours waits
# in the grey part after it. (The reference solution sends 96 bytes more: for each of the 24 parameters, a number that
# says whether its gradient exists.)
#
# Train something with your class: `torchrun --nproc-per-node=2 exercises/mini_ddp.py`. And now you can read PyTorch's,
# `torch/csrc/distributed/c10d/reducer.cpp`:
#
# | your class | PyTorch's `Reducer` |
# |---|---|
# | the hook | `autograd_hook` |
# | the countdown | `mark_variable_ready` |
# | the launch | `mark_bucket_ready`, `all_reduce_bucket` |
# | the wait | `finalize_backward` |

# %%
quiz("01_internals/built")

# %% [markdown]
# ## BatchNorm and buffers
#
# BatchNorm normalizes with the mean and variance of *this rank's* batch, and keeps running averages of them in buffers.
# Do the ranks drift apart? Train for twenty steps with very different data on two ranks:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    ddp(torch.randn(8, 10) + 3 * dist.get_rank()).square().mean().backward()
    optimizer.step()
observe("parameters", spread(ddp.parameters()))
observe("running mean", spread([ddp.module[1].running_mean]))
ddp.eval()
ddp(torch.randn(8, 10))
observe("running mean, one forward later", spread([ddp.module[1].running_mean]))

# %%
apart = run.ranks[0].observations
for name, value in apart.items():
    print(f"{name:<32} spread {value:.2f}")
assert apart["parameters"] == 0
assert 0 == apart["running mean, one forward later"] < apart["running mean"]

# %% [markdown]
# The parameters agree exactly, because all ranks apply the same mean gradient. Only the running statistics differ,
# until the next forward overwrites them with rank 0's. Rank 1's data never reach the statistics that you save.
#
# The same holds for several **nodes** (machines of a cluster):

# %%
# %%ranks 4 --nodes 2
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    ddp(torch.randn(8, 10) + dist.get_rank()).square().mean().backward()
    optimizer.step()
parameters, statistics = spread(ddp.parameters()), spread([ddp.module[1].running_mean])
print("node", os.environ["GROUP_RANK"], f" parameters {parameters:.2f}  running mean {statistics:.2f}")

# %% [markdown]
# ### SyncBatchNorm
#
# `SyncBatchNorm` computes mean and variance over the batches of *all* ranks. The price is communication in every such
# layer, forward and backward. Its source shows the collectives:

# %%
import inspect
from torch.nn import SyncBatchNorm
from torch.nn.modules._functions import SyncBatchNorm as Function

for method in (Function.forward, Function.backward):
    for line in inspect.getsource(method).splitlines():
        is_comment = line.strip().startswith("#")
        if not is_comment and ("all_gather" in line or "all_reduce(" in line):
            print(f"{method.__name__}: {line.strip()}")

# %% [markdown]
# `convert_sync_batchnorm` replaces every BatchNorm layer, before or after `.to(device)`, but before `DDP(...)`.
# (`meta`, a device without values, stands in for a GPU.) On a CPU, DDP refuses the result.

# %%
def small_net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

convert_then_move = SyncBatchNorm.convert_sync_batchnorm(small_net()).to("meta")
move_then_convert = SyncBatchNorm.convert_sync_batchnorm(small_net().to("meta"))
for model in (convert_then_move, move_then_convert):
    print(type(model[1]).__name__, "on", model[1].weight.device)

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))  # BUG: it runs on GPUs only

# %% [markdown]
# Is it worth the price? That depends on how well one batch estimates the mean:

# %%
torch.manual_seed(0)
for samples in (4, 16, 64, 256):
    means = torch.randn(2000, samples).mean(1)
    print(f"{samples:>3} samples: the batch's mean is off by {means.std():.2f} standard deviations")

# %% [markdown]
# Four times the samples halve the error. How much is too much depends on your task.
#
# ### Exactly when buffers are sent
#
# Not quite every forward sends rank 0's buffers. Before each forward below, rank 0 writes a 1 into its buffer and rank
# 1 a 2. If rank 1 then prints 1, the buffer was sent.

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
# A forward sends buffers unless the *previous* one ran under `no_sync` or `no_grad`. So rank 1 keeps its 2 in the
# second `no_sync` forward, and in the training step after it. `eval()` makes no difference: this section's first cell
# ended with a forward in evaluation mode, which sent the buffers.
#
# Two arguments switch this off; one is deprecated. Again rank 0 has a 1 and rank 1 a 2. What does rank 1 hold after the
# constructor, and after a forward?

# %%
# %%ranks 2 --into run
import warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

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
    observe(str(options), [made, layer.note.item(), len(caught)])

# %%
for options, (made, later, warned) in run.ranks[1].observations.items():
    print(f"{options:<32} after DDP(): {made:.0f}  after a forward: {later:.0f}  warnings: {warned:.0f}")

# %% [markdown]
# `forward_sync_buffers=False` copies the buffers only at construction. The deprecated `broadcast_buffers=False` doesn't
# copy them even then.
#
# Dropout has no buffers, so DDP sends nothing for it, and each rank draws its own mask:

# %%
print("buffers of BatchNorm1d:", [name for name, _ in torch.nn.BatchNorm1d(5).named_buffers()])
print("buffers of Dropout:    ", [name for name, _ in torch.nn.Dropout().named_buffers()])

# %%
quiz("01_internals/buffers")

# %% [markdown]
# ## Is it the gradient of the joined batch?
#
# N ranks with 16 samples each should take the same step as one process with all 16·N samples, the **joined batch** or
# *global batch*. Do they? `relative_error` compares the two gradients: |DDP − joined| / |joined|. **Predict** which of
# six cases give 0.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from joined_batch import relative_error
from lockstep.ranks import observe

def total(scores, y):
    return cross_entropy(scores, y, reduction="sum")

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same data and models on both ranks
x, y = torch.randn(32, 10) + torch.arange(32).view(32, 1) / 8, torch.randint(0, 5, (32,))
plain = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
normed = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
padded = y.clone()
padded[:12] = -100  # ignore_index: rank 0 has 4 valid targets, rank 1 has 16
weight = [2 * 26 / 32, 2 * 6 / 32][dist.get_rank()]  # ranks × own samples / all samples
observe("16 + 16, mean loss", relative_error(plain, cross_entropy, x, y, [16, 16]))
observe("26 + 6, mean loss", relative_error(plain, cross_entropy, x, y, [26, 6]))
observe("26 + 6, weighted", relative_error(plain, cross_entropy, x, y, [26, 6], weight))
observe("16 + 16, sum loss", relative_error(plain, total, x, y, [16, 16]))
observe("16 + 16, BatchNorm", relative_error(normed, cross_entropy, x, y, [16, 16]))
observe("16 + 16, ignore_index", relative_error(plain, cross_entropy, x, padded, [16, 16]))

# %%
for name, error in run.ranks[0].observations.items():
    print(f"{name:<22} relative error {error:.2f}")

# %% [markdown]
# Four cases are wrong, without an error message.
#
# - **26 + 6**: the mean of two means isn't the mean of all samples. Multiply each rank's loss by *ranks × own samples /
#   all samples*, as in the third row.
# - **A sum loss**: DDP divides by N, so the gradient is 1/N of what it should be.
# - **BatchNorm**: a sample's output depends on the whole batch, and each rank sees only its part.
# - **`ignore_index`**: the mean is over *valid* targets, 4 on rank 0 and 16 on rank 1. Weight by valid targets. Padding
#   in language models and class weights cause the same problem.

# %%
quiz("01_internals/joined_batch")

# %% [markdown]
# ## What DDP never notices
#
# DDP acts in its constructor, in forward, and in its hooks. Code that bypasses these isn't synchronized, usually
# without an error. The `spread` of the gradients below should be 0.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(4, 10) + dist.get_rank()
ddp = DDP(torch.nn.Linear(10, 3))
ddp(x).square().sum().backward()
observe("ddp(x), as it should be", spread(p.grad for p in ddp.parameters()))
ddp = DDP(torch.nn.Linear(10, 3))
ddp.module(x).square().sum().backward()  # BUG: past the wrapper
observe("ddp.module(x)", spread(p.grad for p in ddp.parameters()))
ddp = DDP(torch.nn.Linear(10, 3))
gradients = torch.autograd.grad(ddp(x).square().sum(), list(ddp.parameters()))  # BUG: no hook runs
observe("autograd.grad", spread(gradients))

# %%
def verdict(run):
    for name, value in run.ranks[0].observations.items():
        print(f"{name:<40} spread {value:.1f}")

verdict(run)

# %% [markdown]
# `ddp.module` is the plain model: if you call it, each rank trains alone. `torch.autograd.grad` never writes `.grad`,
# so no hook runs. Next, a model that changes *after* it was wrapped:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
x = torch.randn(4, 10)
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
# DDP's hooks sit on **accumulators**, autograd's objects that write `.grad`. A cast creates new accumulators, without
# hooks; an added layer never had hooks. If you *replace* a layer, DDP doesn't know the new one and still waits for the
# old one. It notices one step late:

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
# Freezing a layer after wrapping raises the same error, also one step late:

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
# Both messages recommend `find_unused_parameters=True`, which only silences them: the new layer still isn't averaged.
# Change the model first, wrap it last.
#
# The last bypass doesn't change the model. It is two forwards followed by two backwards:

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(0)
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
# A forward prepares DDP for *one* backward. The second backward adds each rank's own gradients to the averaged ones.
#
# One test finds all of these: every hundred steps, call `spread(model.parameters())` on every rank and stop if it isn't
# 0.

# %%
quiz("01_internals/bypass")

# %% [markdown]
# ## Two ways to use several GPUs
#
# PyTorch's older wrapper, `DataParallel`, uses **one process, with a thread for each GPU**. Its `forward` does this in
# every step:

# %%
calls = ("scatter(", "replicate(", "parallel_apply(", "gather(")
for line in inspect.getsource(torch.nn.DataParallel.forward).splitlines():
    if any(call in line for call in calls):
        print(line.strip())
assert "threading.Thread(" in inspect.getsource(torch.nn.parallel.parallel_apply)

# %% [markdown]
# | property | `DataParallel` | `DistributedDataParallel` |
# |---|---|---|
# | processes | one, with a thread for each GPU | one for each GPU |
# | Python's interpreter lock | shared by all threads | one for each process |
# | the model | copied to all GPUs in every forward | copied once |
# | outputs | gathered on the first GPU | stay where they are |
# | several nodes | no | yes |
# | GPU 0 | holds more than the others | like the others, if each rank selects its device first |
#
# The documentation advises against `DataParallel`, but constructing one gives no warning. How much faster DDP is
# depends on model, machine and batch: measure yours (chapter 4).

# %%
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.nn.DataParallel(torch.nn.Linear(2, 1))
print("warnings:", len(caught))

# %% [markdown]
# DDP accepts only one device for each process:

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 1), device_ids=[0, 1])  # BUG: one process, two GPUs

# %%
quiz("01_internals/dp_or_ddp")

# %% [markdown]
# ### Memory
#
# Under DDP every rank holds everything: parameters, gradients, optimizer state, buckets. The next cell counts the bytes
# for Adam and eight parameter tensors. `gradient_as_bucket_view=True` makes each gradient a view into its bucket.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)

dist.init_process_group("gloo")
for view in (False, True):
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    ddp = DDP(torch.nn.Sequential(*layers), gradient_as_bucket_view=view)
    optimizer = torch.optim.Adam(ddp.parameters())
    for _ in range(2):
        ddp(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    parameters = list(ddp.parameters())
    gradients = [p.grad for p in parameters]
    state = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
    blocks = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    numbers = nbytes(parameters), nbytes(gradients), nbytes(state), len(blocks)
    observe(f"gradient_as_bucket_view={view}", list(numbers))

# %%
for name, (parameters, gradients, state, blocks) in run.ranks[0].observations.items():
    assert parameters == gradients and state == 2 * parameters
    print(f"{name:<30} parameters {parameters}, gradients {gradients}, Adam {state}, blocks {blocks}")

# %% [markdown]
# By default the eight gradients are eight blocks of memory, besides the bucket; as views they all lie in the bucket's
# block. So a float32 parameter needs 4 bytes, its gradient 4, Adam's state 8, and the bucket 4 more unless gradients
# are views. The *activations*, which forward keeps for backward, come on top.
#
# More ranks don't shrink any of this: DDP makes training *faster*; it doesn't make a model *fit*. *FSDP* (fully sharded
# data parallel) cuts parameters, gradients and optimizer state into N parts (chapter 6).

# %%
quiz("01_internals/memory")

# %%
quiz("01_internals/fsdp_or_ddp")

# %% [markdown]
# ## Take it with you
#
# - Every rank must issue the same collectives in the same order: calls are paired by order alone.
# - DDP sends **parameters once**, at construction; **buffers** in forward; **gradients** in backward, as a mean.
#   `optimizer.step()` sends nothing.
# - Many small messages pay latency; one large message can't overlap. Buckets are the compromise, and the last is always
#   exposed.
# - Multiply by 1/N first, then sum. The mean is the joined batch's gradient if the counts are equal, the loss is a
#   mean, and there is no BatchNorm.
# - DDP never checks that parameters stay equal. You can, with `spread`.
#
# In an interview, expect "why is the last bucket special?" and "when does averaging gradients give the wrong
# gradient?".
#
# ## What to read next
#
# Chapter 2 sets up training: launchers, process groups, samplers. PyTorch describes DDP's hooks and buckets at
# `pytorch.org/docs/stable/notes/ddp.html`. The paper is Li et al., "PyTorch Distributed: Experiences on Accelerating
# Data Parallel Training" (VLDB 2020); the ring is from Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations" (2009).

# %%
from lockstep.notebook.course_map import course_map

course_map("01_internals")
