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
# press Shift+Enter.</span> The cell trains a small network and draws what each process did.

# %%
# %load_ext lockstep
from lockstep import ranks
from lockstep.notebook.timeline import timeline

program = ranks.Script("four_ranks.py")
run = ranks.run(program, 4, timeline=True)
timeline(run)

# %% [markdown]
# The picture shows two training steps. Each row is a **rank**: one process with its own copy of the model and its own
# batch. A rank runs **forward**, then **backward**. A green bar is an **all-reduce**, which adds up the gradients of
# all ranks. While the rank also computes, its green bar is translucent. A solid green bar means that the rank only
# waits; its backward is hatched meanwhile.
#
# The last rank to launch an all-reduce has the shortest green bar. The others launched it earlier and wait for that
# rank. (On a machine with fewer cores than ranks, as where this picture was drawn, ranks also wait for a core, so some
# compute longer than others.)
#
# PyTorch collects gradients in **buckets** and sends each bucket with one all-reduce. Step 0 has one bucket; its
# all-reduce starts after the last gradient is ready. Step 1 has two buckets; the first all-reduce starts while
# backward is still running. (On one machine this saves hardly any time; "Overlap" shows when it does.) The purple bars
# are messages: rank 0 tells the other ranks which gradient goes into which bucket.
#
# What does PyTorch know in step 1 that it didn't know in step 0? "DDP's buckets" answers this. Here is the program:

# %%
from pathlib import Path

print(Path("four_ranks.py").read_text())

# %% [markdown]
# `DDP(...)`, short for `DistributedDataParallel`, does all the communication. In this chapter you replace it with your
# own code. Afterwards you can
#
# - **carry out** an all-reduce by hand, and say what it costs;
# - **predict** a step's all-reduces: how many, how large, and which overlap with backward;
# - **build** a DDP that communicates during backward;
# - **decide** whether DDP's gradient equals that of one large batch;
# - **find** mistakes that silently stop DDP from averaging.
#
# About 160 minutes: 85 to read and run, 75 for three exercises. You need to know PyTorch's training loop. No GPU is
# needed.
#
# ## Five collectives
#
# An all-reduce is a **collective**: a call that all ranks make together. Five collectives explain everything that DDP
# sends.
#
# ### How a cell runs ranks
#
# `%%ranks 3` runs a cell in three new processes, so each such cell imports what it needs. `init_process_group`
# connects the processes into a **process group**. `gloo` is a library that sends tensors between CPUs. On NVIDIA GPUs,
# use *NCCL*.

# %%
# %%ranks 3
import torch.distributed as dist

dist.init_process_group("gloo")
print("I am rank", dist.get_rank(), "of", dist.get_world_size())

# %% [markdown]
# In the next five cells, rank 0 starts with [1, 2, 3], rank 1 with [10, 20, 30] and rank 2 with [100, 200, 300]. Each
# picture shows the start, then the result. First look only at the start. What will each rank hold?
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
# ![Reduce: rank 0 ends with the sum; on the other ranks the values are undefined](pictures/reduce.svg)

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([1.0, 2.0, 3.0]) * 10 ** dist.get_rank()
dist.reduce(t, dst=0)
print(t.tolist())

# %% [markdown]
# Only rank 0 has the sum. The other ranks' values are undefined: here, gloo left partial sums.
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
# DDP averages gradients with this collective. For a different operation, pass `op=dist.ReduceOp.MIN`, `MAX` or `AVG`.
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
# The all-gather at the end puts the pieces together: **an all-reduce is a reduce-scatter followed by an all-gather.**
#
# ### Every rank must call it
#
# `dist.barrier()` returns when all ranks have called it. If a rank skips a collective, the others wait for it, and the
# job **hangs**. This cell is meant to hang (`--expect hang`):

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
# Ranks 0 and 2 wait in `all_reduce`, rank 1 in `barrier`. Lockstep, this notebook's extension, ended them. Order
# matters too: each rank's first collective is paired with the first collective of every other rank, the second with
# the second, and so on. ("One order on all ranks" shows what happens otherwise.)
#
# ### Point to point
#
# `send` and `recv` carry a tensor from one rank to another; with gloo, both wait until it has arrived. `isend` and
# `irecv` return at once with a **handle**. Until `handle.wait()` returns, don't read or change the tensor.

# %%
# %%ranks 3
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine, from_left = torch.tensor([10.0 * rank]), torch.empty(1)
sending = dist.isend(mine, (rank + 1) % size)  # to the right, and don't wait yet
dist.recv(from_left, (rank - 1) % size)
sending.wait()
print("my left neighbor has", from_left.item())

# %% [markdown]
# Why `isend`? **Predict** what happens if every rank calls `send` first.

# %%
# %%ranks 3 --expect anything
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine, from_left = torch.ones(1000), torch.empty(1000)
dist.send(mine, (rank + 1) % size)
dist.recv(from_left, (rank - 1) % size)

# %% [markdown]
# Every rank waits in `send`, so none reaches `recv`. With NCCL, start a send and a receive together: pass both, as a
# list of `dist.P2POp`s, to `dist.batch_isend_irecv`.
#
# ### async_op: start now, wait later
#
# With `async_op=True`, a collective returns a handle too. Below, rank 0 starts an all-reduce, then sends a message.
# Rank 1 receives the message, then joins the all-reduce.

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
# Without `async_op`, rank 0 would never reach `send`, and both ranks would hang.

# %%
from lockstep.notebook.quiz import quiz

quiz("01_internals/collectives")

# %% [markdown]
# ## The mean
#
# The ranks' weights stay equal if they start equal and every rank applies the same gradient. DDP gives every rank the
# mean of all ranks' gradients. With a mean loss and equal batch sizes, this mean usually equals the gradient of one
# large batch. The simplest way to compute it: **after backward, one all-reduce for each parameter.**
#
# The network has 12 layers, each with 256 × 256 weights and 256 biases; every number takes 4 bytes. **Predict** for
# one rank and one step: how many all-reduces, how many bytes in total, and how many of the all-reduces start
# **early**, before the last gradient is ready. Replace each `None`; the results then appear beside your numbers.
# (`--timeline` records times; `--into` keeps the record in a variable.)

# %%
predicted = [None, None, None]  # all-reduces, bytes in total, launched early

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
# All 24 bars come after backward, and during each of them the rank only waits.
#
# `spread` returns the largest difference between any two ranks. Use it in your own jobs, too. For each element it
# allocates 24 bytes of memory, so pass a large model layer by layer.

# %%
import inspect
from rank_spread import spread

print(inspect.getsource(spread))

# %% [markdown]
# ### Scale first, then sum
#
# On N ranks, `average` multiplies by 1/N and *then* sums. Does this order matter? The largest float16 number is 65504.
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
# DDP scales first, so its sum doesn't overflow. Does it multiply by 1/N, divide by N, or use `ReduceOp.AVG`? These
# three round differently. Compare them on three ranks, for a gradient of 100,000 elements. A fourth variant sends the
# tensor in two halves. (`observe` hands a value from a rank to the notebook.)

# %%
# %%ranks 3 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
mine = torch.rand(1, 100_000)
ddp = DDP(torch.nn.Linear(100_000, 1, bias=False))
ddp(mine).sum().backward()  # the weight's gradient is `mine`; DDP averages it over the ranks
ways = {"mine * (1 / 3)": mine * (1 / 3), "mine / 3": mine / 3, "ReduceOp.AVG": mine.clone()}
ways["mine * (1 / 3), in halves"] = mine * (1 / 3)
for name, mean in ways.items():
    op = dist.ReduceOp.AVG if name == "ReduceOp.AVG" else dist.ReduceOp.SUM
    for part in mean.view(-1).split(50_000 if "halves" in name else 100_000):
        dist.all_reduce(part, op=op)
    observe(name, (mean != ddp.module.weight.grad).float().mean().item())

# %%
for name, share in run.ranks[0].observations.items():
    print(f"{name:<25} differs from DDP in {share:.0%} of the elements")

# %% [markdown]
# Only `mine * (1 / 3)`, sent whole, agrees with DDP (0%). So DDP multiplies by 1/N. The other variants differ only by
# harmless rounding errors. The halves differ because the order in which gloo adds the ranks' values depends on an
# element's place in the message. On two ranks all variants agree, because halving is exact and a + b = b + a.
#
# ### A gradient that only some ranks have
#
# A parameter that a batch doesn't use has `grad = None`. In a model with branches, rank 0 may use a parameter that rank
# 1 doesn't. Can rank 1 skip this parameter's all-reduce?

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
    if parameter.grad is not None:  # BUG: rank 1 skips side's all-reduces
        dist.all_reduce(parameter.grad)
dist.barrier()

# %% [markdown]
# No: rank 0 hangs in `all_reduce`, rank 1 in `barrier`. The rules:
#
# - If *some* rank has a gradient, every rank joins the all-reduce. A rank without a gradient contributes zeros.
# - If *no* rank has a gradient, leave `None` everywhere: with zeros, momentum would still move the parameter.
# - Every rank skips frozen parameters (`requires_grad=False`).

# %%
quiz("01_internals/mean")

# %% [markdown]
# ## Exercise: implement average_gradients
#
# *Easy, 15 minutes.* Open [exercises/average_gradients.py](../exercises/average_gradients.py). Start from the loop in
# "The mean" and add the rule for missing gradients. Which collective tells all ranks which gradients exist?
#
# `%check average_gradients` runs your saved file on several ranks and grades it. `%hint average_gradients` shows the
# next hint. In a terminal, `./lockstep solution average_gradients` shows the solution.

# %%
from lockstep.notebook.contract import contract

contract("average_gradients")

# %% [markdown]
# <span class="in-lab">Run the cell to grade your file. Until then, it shows the result of the course's solution.</span>

# %%
# %check average_gradients

# %% [markdown]
# ## All-reduce by hand
#
# To see what an all-reduce costs, build one from messages. In the picture, each row is a rank, and each box is a piece
# of its tensor. <span class="on-screen">Step with the buttons.</span>

# %%
from lockstep.notebook.stepper import Stepper

Stepper(ranks=4, length=8)

# %% [markdown]
# <details><summary>The same, as a still picture</summary>
#
# ![Ring all-reduce of 8 numbers among 4 ranks, all six steps](pictures/all_reduce.svg)
# </details>
#
# **The ring.** The ranks form a circle, and each cuts its tensor into N chunks. In every step, each rank sends *one
# chunk* to its right neighbor.
#
# 1. **Reduce-scatter, N − 1 steps.** The receiver adds the chunk to its own, and passes the result on in the next step.
#    At the end each rank holds one chunk of the sum.
# 2. **All-gather, N − 1 steps.** The chunks of the sum travel around the ring until every rank has all of them.
#
# Now choose "every rank sends everything" above the picture. The next cell sends in this way, with a tensor of 4000
# bytes on each rank. **Predict** how many bytes rank 0 sends, and how many it would send in a ring.

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
print("every rank sends everything, recorded:", sent, "bytes from rank 0")
print("a ring, counted in the picture:       ", bytes_sent(ring(4), 1000)[0], "bytes")

# %% [markdown]
# Rank 0 sent three times its tensor's size; in a ring, it would send 1.5 times that size. With N ranks, the factors are
# N − 1 and 2(N − 1)/N.

# %%
quiz("01_internals/ring")

# %% [markdown]
# ## Exercise: implement ring_all_reduce
#
# *Medium, 25 minutes.* Open [exercises/ring_all_reduce.py](../exercises/ring_all_reduce.py) and build the ring from
# sends and receives.

# %%
contract("ring_all_reduce")

# %%
# %check ring_all_reduce

# %% [markdown]
# ## What it costs
#
# A message takes a fixed time, the **latency**, plus its size divided by the **bandwidth**. A ring takes 2(N − 1)
# steps. In each step, a rank sends 1/N of its tensor:
#
# > time = 2(N − 1) · latency + 2(N − 1)/N · bytes / bandwidth
#
# Count the steps and bytes for rings of 2 to 8 ranks:

# %%
print(" N  steps  bytes sent by a rank / bytes of the tensor")
for n in (2, 3, 4, 6, 8):
    plan = ring(n)
    factor = bytes_sent(plan, 840)[0] / (840 * 4)
    print(f"{n:>2} {len(plan.steps):>5}   {factor:.3f}")
    assert len(plan.steps) == 2 * (n - 1) and abs(factor - 2 * (n - 1) / n) < 1e-12

# %% [markdown]
# The bytes stay below twice the tensor's size. But the number of steps grows with N, and every step pays the latency.
#
# Should DDP send large messages or small ones? Suppose that eight ranks all-reduce 100 MB of gradients in 1, 10 or 1000
# parts, one part after the other. All parts but the last can be sent during backward; the last contains the last
# gradient. **Predict** which split takes the least time in total, and which has the shortest *last* part.

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
        print(f"{name}: in {parts:>4} parts {total:>6.0f} ms, the last part {last:>6.2f} ms")

# %% [markdown]
# Every part pays the latency again, so one part takes the least time in total. But if all other parts are sent during
# backward, a rank only waits for the last: on the slow network, 24.5 ms with ten parts, 182 ms with one. With 1000
# parts the last takes only 7 ms, but together they take 7 s, too long to hide.

# %%
quiz("01_internals/cost")

# %% [markdown]
# ## Hooks and buckets
#
# In "The mean", all 24 all-reduces start after backward, but most gradients are ready long before. A **hook** is a
# function that PyTorch calls at a certain moment, here when a gradient is ready:

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
# ### An all-reduce in each hook
#
# Gradients become ready from the last layer to the first. The next cell moves the two lines of `average` into a hook.
# **Predict** the three numbers again. Will backward take longer? (`mark` adds a line to a rank's record; `story`
# prints the record.)

# %%
predicted = [None, None, None]  # all-reduces, bytes in total, launched early

# %%
# %%ranks 2 --timeline --into in_hooks
import torch.distributed as dist
from lockstep.ranks import mark
from twelve_layers import network, train_step

def average(parameter):
    parameter.grad *= 1 / dist.get_world_size()
    dist.all_reduce(parameter.grad)
    mark("all-reduce done")

dist.init_process_group("gloo")
model = network()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average)
train_step(model)

# %%
from measured import measured, story

measured(in_hooks, predicted)
story(in_hooks, first=8)
timeline(in_hooks)

# %% [markdown]
# 23 of the 24 all-reduces are launched early, yet none overlaps: `average` **waits inside the hook** (hatched), so
# backward takes longer.
#
# ### Launch in the hook, wait after backward
#
# Now each hook only launches its all-reduce, with `async_op`. The rank waits for all handles after backward.
# **Predict** where "all-reduce done" moves in the record.

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
        mark("all-reduce done")

dist.init_process_group("gloo")
model = network()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(launch)
train_step(model, wait)

# %%
story(with_handles, first=6, last=4)
timeline(with_handles)

# %% [markdown]
# All 24 waits now come after backward, and gradients become ready while all-reduces run: this is **overlap**. (gloo
# runs two at a time; the others are queued.) But half of the 24 messages carry only 1 KiB, and each message pays the
# full latency.
#
# ### One flat buffer
#
# To pay the latency only once, the next cell copies all gradients into one flat tensor and all-reduces that.
# **Predict** the three numbers.

# %%
predicted = [None, None, None]  # all-reduces, bytes in total, launched early

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
# One message pays the latency once. But it can't overlap with backward, because it contains the last gradient. Buckets
# are the compromise: a few flat buffers, each launched when the last of *its* gradients is ready.
#
# ### DDP's buckets
#
# What does PyTorch send in three steps of the same network?

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
# - **Before step 0** the constructor copies the model (see "What is copied when").
# - **Step 0 has one bucket** with all 3,158,016 bytes, so nothing overlaps. DDP notes the order in which gradients become
#   ready.
# - **Before step 1 DDP rebuilds the buckets** in this order, once. Rank 0 sends the order to the others in two small
#   broadcasts.
# - **From step 1 on there are two buckets.** The first is full when it holds at least 1 MiB (1,048,576 bytes; here four
#   layers, 1,052,672 bytes), so that communication starts early. Later buckets are full at 25 MiB.
#
# The DDP that you will write doesn't learn the order. Neither does PyTorch's DDP with `find_unused_parameters=True`, an
# option for models with branches. What do the buckets look like then? The next model registers its layers in the order
# `last`, `first`, `middle`, but calls `first`, `middle`, `last`. A **communication hook** is a function that replaces
# DDP's all-reduce of a full bucket. The hook below sends nothing; it only notes which layers are in the bucket.
# (`--quiet` hides what the ranks print, here a warning.)

# %%
# %%ranks 2 --into run --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle = [torch.nn.Linear(512, 512, bias=False) for _ in range(3)]
    def forward(self, x):
        return self.last(self.middle(self.first(x)))
def hook(names, bucket):
    buckets.append(" ".join(names[weight] for weight in bucket.parameters()))
    done = torch.futures.Future()  # DDP waits for its result
    done.set_result(bucket.buffer())
    return done

dist.init_process_group("gloo")
for find_unused in (False, True):
    ddp = DDP(Net(), bucket_cap_mb=1, find_unused_parameters=find_unused)  # each layer fills a bucket
    ddp.register_comm_hook({layer.weight: name for name, layer in ddp.module.named_children()}, hook)
    for step in range(2):
        buckets = []
        ddp(torch.randn(2, 512)).sum().backward()
        observe(f"find_unused_parameters={find_unused}, step {step}", " | ".join(buckets))

# %%
for when, buckets in run.ranks[0].observations.items():
    print(f"{when:<37} {buckets}")

# %% [markdown]
# By default, step 1's buckets follow backward: `last`, `middle`, `first`. With `find_unused_parameters=True`, DDP has
# three buckets from step 0 on, in reverse order of registration. It never rebuilds them, so register layers in the
# order in which forward calls them.
#
# ### What bucket_cap_mb does
#
# `DDP(model, bucket_cap_mb=...)` sets the size, in MiB, at which a bucket is full. The gradients of one layer take
# 263,168 bytes, those of all twelve 3,158,016. **Predict** how many buckets the third step has with each of these values:

# %%
predicted = {"None": None, "25": None, "1": None, "0.5": None}  # buckets in the third step

# %%
# %%writefile overlap.py
import sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from twelve_layers import network, train_step

dist.init_process_group("gloo")
cap, pause = sys.argv[1:]
ddp = DDP(network(float(pause)), bucket_cap_mb=None if cap == "None" else float(cap))
for _ in range(3):
    train_step(ddp)

# %%
by_cap = {}
for cap, guess in predicted.items():
    by_cap[cap] = ranks.run(ranks.Script("overlap.py", (cap, "0")), 2, timeline=True)
    picture = timeline(by_cap[cap], step=-1)
    buckets = picture.panels[0].steps[0][0].buckets  # rank 0's, in the last step
    said = f"predicted {'nothing yet' if guess is None else guess}, measured {len(buckets)}:"
    print(f"bucket_cap_mb={cap:<5}", said, *[f"{bucket.nbytes:,}" for bucket in buckets])

# %% [markdown]
# **`bucket_cap_mb=25` is not the default.** The default, `None`, gives the first bucket 1 MiB and the others 25. A
# number that you pass applies to the first bucket too.

# %%
quiz("01_internals/buckets")

# %% [markdown]
# ## Overlap
#
# Communication is **hidden** if backward computes at the same time, and **exposed** if the rank only waits for it. On
# one machine, sending is fast, so there is little to hide: a long bar mostly means that another rank is late.
#
# In the next runs, both ranks share a link of 1 Gbit/s, and each layer's backward sleeps 3 ms, as if the layers were
# larger. Here is the last step of each run. Which bucket is never hidden?

# %% tags=["needs-bandwidth"]
from lockstep import cluster

missing = cluster.available("bandwidth")
print(f"The link is not slow here: {missing}" if missing else "The ranks share a link of 1 Gbit/s.")
link = None if missing else cluster.slow_link("1gbit")
caps = ("None", "25", "0.5")
scripts = [ranks.Script("overlap.py", (cap, "0.003")) for cap in caps]
slow = [ranks.run(script, 2, timeline=True, network=link) for script in scripts]
titles = [f"bucket_cap_mb={cap}" for cap in ("None (default)", "25", "0.5")]
pictures = timeline(*slow, titles=titles, step=-1)
pictures.save_trace("trace.json")  # for a closer look in ui.perfetto.dev or chrome://tracing
pictures

# %% [markdown]
# **The last bucket is launched after the last gradient**, when backward has nothing left to compute and only waits
# (hatched). So the last bucket is always exposed: with six buckets, five can be hidden; with one, none.
#
# Each of the two ranks sends every bucket once, so the shared link carries it twice. At 1 Gbit/s, that takes 51 ms for
# the only bucket of `bucket_cap_mb=25`, 34 ms for the second of the default, and 8 ms for the last of six. The slower
# rank waits about that long. The faster rank waits longer, because it also waits for the slower one. (If your link is
# not slow, all ranks wait only briefly, and chance decides which of the three runs has the shortest step.)
#
# ### How much time overlap saves
#
# How do buckets compare with the other ways of sending, on a network with a high latency? The next file simulates such
# a network and a slow computer. Each layer's backward sleeps 20 ms. Each all-reduce sleeps as long as a ring would take
# with 4 ms of latency and 25 MB/s of bandwidth. Hooks, buckets and all-reduces are real.

# %%
# %%writefile simulated.py
import time
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist

network = ThreadPoolExecutor(1)  # carries one all-reduce after the other

def slow_backward(layer, inputs, output):
    output.register_hook(lambda gradient: time.sleep(0.020))

def layers():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
    for layer in model:
        layer.register_forward_hook(slow_backward)
    return model

def carry(gradient):
    time.sleep(2 * 0.004 + gradient.nbytes / 25e6)  # a ring of two ranks
    dist.all_reduce(gradient.mul_(0.5))

def hook(state, bucket):
    flat, done = bucket.buffer(), torch.futures.Future()
    network.submit(carry, flat).add_done_callback(lambda _: done.set_result(flat))
    return done

# %% [markdown]
# The next cell sends the gradients one by one after backward, and then in DDP's buckets: 24 tiny ones (as with
# handles), one, two and six. **Predict** the fastest and the slowest.

# %%
# %%ranks 2 --into run
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe
from simulated import carry, hook, layers

def measure(name, model, finish=lambda: None):
    times = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        model(torch.ones(1, 256)).sum().backward()
        finish()
        times.append(1000 * (time.perf_counter() - began))
    observe(name, min(times[1:]))  # without step 0, which has one bucket

dist.init_process_group("gloo")
plain = layers()
measure("no communication", plain)
measure("one by one, after backward", plain, lambda: [carry(p.grad) for p in plain.parameters()])
caps = {"one by one, with handles": 1e-4, "one flat buffer": 25, "two buckets": None, "six buckets": 0.5}
for name, cap in caps.items():
    ddp = DDP(layers(), bucket_cap_mb=cap)
    ddp.register_comm_hook(None, hook)
    measure(name, ddp)

# %%
from lockstep.notebook.bars import stacked

times = run.ranks[0].observations
computing = times["no communication"]
parts = {}
for name, whole in times.items():
    parts[name] = {"computing": computing, "exposed communication": max(0, whole - computing)}
stacked(parts, unit="ms", title="Milliseconds per step, the fastest of three", timed=True)

# %% [markdown]
# Without communication, a step takes 12 × 20 ms and a little more. By the formula, the simulated network adds 318 ms
# for 24 messages without overlap, and 134 ms for one flat buffer.
#
# With handles, sending starts when the first gradient is ready, after 20 ms. The other 220 ms of backward can hide as
# much communication, so at least 98 of the 318 ms are exposed. Buckets do best: only the last is exposed, for 92 ms
# with two buckets, 29 ms with six.
#
# The measured times are longer, because each message is also a real all-reduce. With 24 messages, that adds one or two
# ms each.
#
# ### One order on all ranks
#
# DDP launches buckets in one fixed order, even if a later bucket is complete first. Why? Below, rank 1 launches two
# buckets in reverse. The sums should be 2 and 20.

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
# Rank 0's `a` was added to rank 1's `b`. Both sums are wrong, and no rank raises an error.

# %%
quiz("01_internals/overlap")

# %% [markdown]
# ## What is copied when
#
# What makes the ranks' weights equal at the start? Wrap a model whose weights differ between ranks, with and without
# `init_sync=False`:

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
# weights stay different: DDP never sends parameters later.
#
# The next model also has **buffers**: tensors that belong to the model but have no gradient, such as BatchNorm's
# running statistics. **Predict** what DDP sends in forward, in backward and in `optimizer.step`.

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
# - **Construction**: the ranks compare the number and shapes of their parameters (8 and 80 bytes). Rank 0 then sends
#   its parameters and running statistics (260 + 40 bytes), and BatchNorm's counter of batches (8 bytes).
# - **Each forward**: rank 0's buffers replace those of the other ranks (40 and 8 bytes). The 20 and 4 bytes in step 1
#   describe the rebuilt buckets.
# - **Each backward**: an all-reduce averages the gradients (65 × 4 = 260 bytes).
# - **`optimizer.step`** sends nothing.
#
# ### no_sync: accumulate first, exchange once
#
# If a batch doesn't fit into memory, use two smaller ones. Run the first inside `no_sync()`: only the second backward
# exchanges gradients. Below, the two batches' gradients are 1 and 10 on rank 0, 2 and 20 on rank 1. What does `grad`
# hold after each backward?

# %%
# %%ranks 2 --into accumulated
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(1, 1, bias=False))
x = torch.ones(1, 1) * (dist.get_rank() + 1)
mark("first batch, in no_sync()")
with ddp.no_sync():
    ddp(x).sum().backward()
print("first:", ddp.module.weight.grad.item(), end="  ")
mark("second batch")
ddp(10 * x).sum().backward()
print("second:", ddp.module.weight.grad.item())

# %%
story(accumulated)

# %% [markdown]
# One all-reduce averages the sums, 1 + 10 on rank 0 and 2 + 20 on rank 1: (11 + 22) / 2 = 16.5. The *forward* has to
# be inside `no_sync()` too, because it decides whether the next backward exchanges gradients. For the mean of both
# batches, divide each loss by two.
#
# ### A branch that a rank doesn't use
#
# With `find_unused_parameters=True`, DDP follows the rule of "A gradient that only some ranks have". Below, only rank 0
# uses `side`, and no rank uses `idle`.

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
# Rank 1 has a gradient for `side` too: the mean of 1 from rank 0 and 0 from rank 1. `idle` has none on either rank.
#
# ### The names in a checkpoint
#
# The wrapper holds your model as `module`, so every name in its `state_dict` starts with `module.`. Save the model's
# own `state_dict`, which loads with or without DDP:

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
# *Hard, 35 minutes.* Open [exercises/mini_ddp.py](../exercises/mini_ddp.py) and write the class `MiniDDP(module,
# bucket_cap_mb=25)`. On two ranks, its gradients must equal those of PyTorch's DDP bit for bit, and communication must
# start before backward ends. Work in seven stages:
#
# 1. **Copy.** The constructor broadcasts parameters and buffers; `forward` calls the module; `state_dict` and
#    `load_state_dict` are the module's own.
# 2. **Average after backward.** Put the loop from "The mean" into `finish_gradient_synchronization`, which the training
#    loop calls after backward.
# 3. **Launch in a hook.** Move the loop's two lines into a hook on each parameter.
# 4. **Wait after backward.** Launch with `async_op=True`; wait in `finish_gradient_synchronization`.
# 5. **Fill buckets.** Use flat buffers of at most `bucket_cap_mb` MiB, the last parameters first. The hook counts down
#    the gradients that its bucket still needs, and launches at zero.
# 6. **Launch incomplete buckets.** A bucket with a missing gradient never becomes complete.
#    `finish_gradient_synchronization` launches it, and then the buckets after it: all ranks launch all buckets in the
#    same order.
# 7. **Exchange nothing in `no_sync`.** Inside `no_sync()`, the hooks do nothing. (PyTorch's DDP decides this in
#    forward; your class decides it in backward.)
#
# The check's report names the stage to write next.

# %%
contract("mini_ddp", "MiniDDP")

# %%
# %check mini_ddp

# %% [markdown]
# After each stage from 2 on, **predict** the three numbers and run the next cells. The last cell draws a step of your
# class below a step of PyTorch's DDP.

# %%
predicted = [None, None, None]  # all-reduces, bytes in total, launched early

# %%
# %%ranks 2 --timeline --into mine
import os, sys, torch.distributed as dist
from twelve_layers import network, train_step
sys.path.insert(0, os.environ.get("LOCKSTEP_SUBMISSION", "../exercises"))  # where your file is
from mini_ddp import MiniDDP

dist.init_process_group("gloo")
ddp = MiniDDP(network(), bucket_cap_mb=0.502)  # two layers; only DDP may exceed the cap
for _ in range(3):
    train_step(ddp, ddp.finish_gradient_synchronization)

# %%
measured(mine, predicted)
timeline(by_cap["0.5"], mine, titles=("PyTorch's DDP", "MiniDDP"), step=-1)

# %% [markdown]
# PyTorch waits at the end of backward; your class waits after it. On one machine, a long wait mostly means that the
# other rank is late. (The reference solution sends 96 bytes more: one number per parameter says whether its gradient
# exists.) Now you can read PyTorch's class, the `Reducer` in `torch/csrc/distributed/c10d/reducer.cpp`:
#
# | your class | PyTorch's `Reducer` |
# |---|---|
# | the hook | `autograd_hook` |
# | the countdown | `mark_variable_ready` |
# | the launch | `mark_bucket_ready`, `all_reduce_bucket` |
# | the wait | `finalize_backward` |
#
# You have built DDP. Neither class gives BatchNorm the whole batch, weights unequal batches, or catches gradients that
# bypass the hooks. The next sections are about these three gaps.

# %%
quiz("01_internals/built")

# %% [markdown]
# ## BatchNorm and buffers
#
# BatchNorm normalizes with the mean and variance of *this rank's* batch, and keeps running averages of both in
# buffers. Do the ranks drift apart? Below, they train on very different data:

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
# until the next forward overwrites them with rank 0's. So rank 1's data never enter the statistics that rank 0 saves.
#
# ### SyncBatchNorm
#
# `SyncBatchNorm` computes mean and variance over the batches of *all* ranks. The price, for each such layer, is a
# collective in forward and one in backward, as its source shows:

# %%
import re
from torch.nn.modules._functions import SyncBatchNorm as Function

for method in (Function.forward, Function.backward):
    calls = re.findall(r"dist\w*\.(all_\w+)\(", inspect.getsource(method))
    print(f"{method.__name__}:", *sorted(set(calls)))

# %% [markdown]
# (A forward uses one of the two all-gathers.) `convert_sync_batchnorm` replaces every BatchNorm layer. Call it before
# `DDP(...)`; whether the model is already on a GPU doesn't matter. Below, the device `meta`, whose tensors have shapes
# but no values, stands in for the GPU. On a CPU, DDP refuses the converted model.

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn import BatchNorm1d, Linear, Sequential, SyncBatchNorm

dist.init_process_group("gloo")
convert = SyncBatchNorm.convert_sync_batchnorm
convert_then_move = convert(Sequential(Linear(4, 4), BatchNorm1d(4))).to("meta")
move_then_convert = convert(Sequential(Linear(4, 4), BatchNorm1d(4)).to("meta"))
print(convert_then_move[1], move_then_convert[1], sep="\n")
DDP(convert(Sequential(Linear(4, 4), BatchNorm1d(4))))  # BUG: it runs on GPUs only

# %% [markdown]
# Is `SyncBatchNorm` worth two more collectives for each such layer in each step? That depends on how far the mean of
# one rank's batch is from the mean of all data:

# %%
torch.manual_seed(0)
for samples in (4, 16, 64, 256):
    means = torch.randn(2000, samples).mean(1)
    print(f"{samples:>3} samples: the batch's mean is off by {means.std():.2f} standard deviations")

# %% [markdown]
# With 4 samples, the mean is off by half a standard deviation; with 256, by 0.06. So the larger the batch, the less
# `SyncBatchNorm` changes.
#
# ### Exactly when buffers are sent
#
# *Skip this on a first reading.* Which forwards send rank 0's buffers? Before each forward below, rank 0 writes 1 into
# its buffer and rank 1 writes 2. If rank 1 prints 1, the forward sent the buffer.

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
# A forward sends buffers unless the *previous* forward ran under `no_sync` or `no_grad`. Two arguments of DDP switch
# the sending off. What does rank 1 hold after the constructor, and after a forward?

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
# `forward_sync_buffers=False` copies the buffers only at construction. The deprecated `broadcast_buffers=False` never
# copies them.
#
# Dropout has no buffers: each rank draws a mask from its own random numbers. What if all ranks have the same seed?

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dropout = torch.nn.Dropout()
print("buffers of Dropout:", list(dropout.buffers()), end="  ")
for name, seed in (("same seed", 0), ("own seed", dist.get_rank())):
    torch.manual_seed(seed)
    print(f"{name}:", *dropout(torch.ones(8)).int().tolist(), end="  ")

# %% [markdown]
# With the same seed, all ranks drop the same units. Give each rank its own seed.

# %%
quiz("01_internals/buffers")

# %% [markdown]
# ## Is it the gradient of the joined batch?
#
# N ranks with 16 samples each should take the same step as one process with all 16·N samples, the **joined batch** or
# *global batch*. Do they?
#
# `relative_error` compares DDP's gradient with the joined batch's: |DDP − joined| / |joined|. Rank r has `sizes[r]`
# samples, and multiplies its loss by `weight`. **Predict** which of the seven cases below give 0.

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from joined_batch import relative_error
from lockstep.ranks import observe

def compare(name, model, loss, y, sizes, weight=1):
    observe(name, relative_error(model, loss, x, y, sizes, weight))

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same data and models on both ranks
x, y = torch.randn(32, 10) + torch.arange(32).view(32, 1) / 8, torch.randint(0, 5, (32,))
plain = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
normed = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
padded = torch.where(torch.arange(32) < 12, -100, y)  # -100 is ignored: 4 and 16 valid targets
by_samples = [2 * 26 / 32, 2 * 6 / 32][dist.get_rank()]  # ranks × own samples / all samples
by_targets = [2 * 4 / 20, 2 * 16 / 20][dist.get_rank()]  # ranks × own valid targets / all valid targets
compare("16 + 16, mean loss", plain, cross_entropy, y, [16, 16])
compare("26 + 6, mean loss", plain, cross_entropy, y, [26, 6])
compare("26 + 6, weighted", plain, cross_entropy, y, [26, 6], by_samples)
compare("16 + 16, sum loss", plain, lambda s, y: cross_entropy(s, y, reduction="sum"), y, [16, 16])
compare("16 + 16, BatchNorm", normed, cross_entropy, y, [16, 16])
compare("16 + 16, ignore_index", plain, cross_entropy, padded, [16, 16])
compare("the same, weighted", plain, cross_entropy, padded, [16, 16], by_targets)

# %%
for name, error in run.ranks[0].observations.items():
    print(f"{name:<22} relative error {error:.2f}")

# %% [markdown]
# Four cases are wrong, without an error message.
#
# - **26 + 6**: the mean of two means isn't the mean of all samples. Multiply each rank's loss by *ranks × own samples /
#   all samples*.
# - **A sum loss**: DDP divides by N, so the gradient is 1/N of the right one. Multiply the loss by N.
# - **BatchNorm**: a sample's output depends on the whole batch, and each rank sees only its part.
# - **`ignore_index`**: `cross_entropy` ignores targets of −100, such as padding. Each rank's mean is over its *valid*
#   targets, 4 or 16. In the weight, count these instead of samples.

# %%
quiz("01_internals/joined_batch")

# %% [markdown]
# ## What DDP never notices
#
# DDP acts in its constructor, in forward, and in its hooks. A gradient that bypasses them isn't averaged, and usually
# no error is raised. Each `spread` of gradients below should be 0.

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
ddp.module(x).square().sum().backward()  # BUG: bypasses the wrapper
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
# `ddp.module` is the plain model: if you call it, each rank trains on its own. `torch.autograd.grad` never writes
# `.grad`, so no hook runs. Next, change a model *after* you wrapped it:

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
# DDP's hooks sit on **accumulators**, the autograd nodes that write `.grad`. A cast creates new accumulators, without
# hooks; an added layer never had hooks. If you *replace* a layer, DDP still waits for the old layer's gradients. DDP
# raises an error only in the next step:

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
# The message recommends `find_unused_parameters=True`. Does it help if you replace a layer? And if you *freeze* one?

# %%
# %%ranks 2 --into run
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread
from lockstep.ranks import observe

def replaced_after_wrapping(model):
    model[1] = torch.nn.Linear(10, 3)
def frozen_after_wrapping(model):
    model[0].requires_grad_(False)

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
for find_unused in (False, True):
    for change in (replaced_after_wrapping, frozen_after_wrapping):
        model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 3))
        ddp = DDP(model, find_unused_parameters=find_unused)
        change(model)
        try:
            for _ in range(2):
                ddp(torch.randn(4, 10)).sum().backward()
            outcome = f"spread {spread(p.grad for p in model.parameters() if p.requires_grad):.1f}"
        except RuntimeError:
            outcome = "RuntimeError in the second step"
        observe(f"{change.__name__}, find_unused={find_unused}", outcome)

# %%
for name, outcome in run.ranks[0].observations.items():
    print(f"{name:<43} {outcome}")

# %% [markdown]
# For a frozen layer, `find_unused_parameters=True` is a fix. For a replaced layer it only removes the error: the new
# layer's gradients aren't averaged. Change the model first, wrap it last.
#
# The last bypass is two forwards followed by two backwards:

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
for loss in [ddp(x).square().sum(), ddp(x + 1).square().sum()]:
    loss.backward()  # BUG: DDP is prepared for only one backward
observe("forward, forward, backward, backward", spread(p.grad for p in ddp.parameters()))
torch.optim.SGD(ddp.parameters(), lr=0.1).step()
observe("its parameters after optimizer.step", spread(ddp.parameters()))

# %%
verdict(run)
assert run.observed("forward, forward, backward") == [0, 0]

# %% [markdown]
# Two forwards in a row prepare DDP for only *one* backward. The second backward adds each rank's own gradients to the
# averaged ones, and the optimizer carries the difference into the parameters. All silent mistakes of this section make
# the parameters differ, so one test finds them: every hundred steps, call `spread(model.parameters())` on every rank,
# and stop if it isn't 0.

# %%
quiz("01_internals/bypass")

# %% [markdown]
# ## Two ways to use several GPUs
#
# Older code often uses `DataParallel`, which runs **one process with a thread for each GPU**. Each forward splits the
# batch, copies the model to every GPU, computes, and gathers the outputs. Here are these lines, and the advice of its
# documentation:

# %%
calls = ("scatter(", "replicate(", "parallel_apply(", "gather(")
for line in inspect.getsource(torch.nn.DataParallel.forward).splitlines():
    if any(call in line for call in calls):
        print(line.strip())
assert "threading.Thread(" in inspect.getsource(torch.nn.parallel.parallel_apply)
advice = " ".join(torch.nn.DataParallel.__doc__.split()).partition(".. warning:: ")[2]
print(advice.partition(" See:")[0])

# %% [markdown]
# | property | `DataParallel` | `DistributedDataParallel` |
# |---|---|---|
# | Python's interpreter lock (one thread runs at a time) | shared by all threads | one for each process |
# | the model | copied to all GPUs in every forward | copied once |
# | several nodes | no | yes |
# | memory of GPU 0 | more than the others | like the others, if each rank calls `torch.cuda.set_device` first |
#
# How much faster DDP is depends on the model, the machine and the batch: measure it (chapter 4).

# %%
quiz("01_internals/dp_or_ddp")

# %% [markdown]
# ### Memory
#
# Under DDP every rank holds everything: parameters, gradients, optimizer state, buckets. The next cell counts the
# bytes of the first three, and how many blocks of memory hold the gradients of eight parameters.
# `gradient_as_bucket_view=True` makes each gradient a view into its bucket.

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
# By default, each gradient has its own block, and the bucket needs one more block. If gradients are views, they all lie
# in the bucket. So a float32 parameter needs 4 bytes, its gradient 4, Adam's state 8, and the bucket 4 more unless
# gradients are views. The *activations*, which forward keeps for backward, need additional memory.
#
# More ranks don't shrink any of this: DDP makes training *faster*; it doesn't make a model *fit*. *FSDP* (fully sharded
# data parallel) cuts parameters, gradients and optimizer state into N parts (chapter 6).

# %%
quiz("01_internals/memory")

# %%
quiz("01_internals/fsdp_or_ddp")

# %% [markdown]
# ## What to remember
#
# - Every rank must issue the same collectives in the same order.
# - DDP sends **parameters once**, at construction; **buffers** also in forward; **gradients** in backward, as a mean.
#   `optimizer.step()` sends nothing.
# - Every message pays the latency: many messages are slow; a single message can't overlap with backward. Buckets are
#   the compromise, and the last bucket is always exposed.
# - The mean equals the joined batch's gradient if every rank has the same number of samples, the loss is a mean over
#   them, and no layer mixes samples.
# - DDP never checks that parameters stay equal. Check it with `spread`.
#
# In an interview, expect "why can't DDP hide all of its communication?". (The last bucket is launched after the last
# gradient, when backward has nothing left to compute.)
#
# ## What to read next
#
# In chapter 2 you launch the processes yourself, split the data, and compute one loss over all ranks. PyTorch
# describes DDP at `pytorch.org/docs/stable/notes/ddp.html`. The paper is Li et al., "PyTorch
# Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020); the ring is from Patarasuk and Yuan,
# "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

# %%
from lockstep.notebook.course_map import course_map

course_map("01_internals")
