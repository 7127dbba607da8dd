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
# # Chapter 4. Optimization
#
# A job that is right can still waste most of the machine. This chapter makes it faster, and above all it *measures*:
# what helps depends on what is slow, and that is seldom what one thinks. On one machine the network is too fast to
# notice. So ranks here can share a slowed link of, say, 2 Gbit/s.
#
# After this chapter you can
#
# - **profile** a step and say which part of the communication is exposed;
# - **choose** bucket sizes by the network you have, and show when it makes no difference;
# - **accumulate** gradients with one synchronisation a step, the ragged tail included;
# - **train** in mixed precision, with scaling and clipping in the right order, and say what it does not shrink;
# - **compress** gradients on the wire, and keep what the cast loses;
# - **predict** a step on another network, and say when DDP is not enough.
#
# About 120 minutes: 45 to read and run, 75 for four exercises. You need chapters 1 and 2. No GPU. Times differ from
# run to run and from machine to machine, so the cells print what can be compared: counts, bytes, and which of two is
# faster by a clear margin.

# %%
# %load_ext lockstep
import os, subprocess, sys
from pathlib import Path
import torch
from lockstep import cluster, ranks
from lockstep.notebook.bars import bars
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

# %% tags=["needs-bandwidth"]
missing = cluster.available("bandwidth")
if missing:
    print("Cells with a slow link will not run here:", missing)

# %% [markdown]
# ## Profile first
#
# Before anything is made faster: where does the time go? `torch.profiler` records every operation of a rank. This
# profiles one step, the third, so that start-up is not in it.

# %%
# %%writefile profiled.py
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 256)
plan = schedule(wait=1, warmup=1, active=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan) as prof:
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        prof.step()
if dist.get_rank() == 0:
    prof.export_chrome_trace("profiled.json")
    wanted = ("gloo:all_reduce", "DistributedDataParallel.forward", "aten::addmm", "Optimizer.step")
    for event in prof.key_averages():
        if event.key.startswith(wanted):
            print(f"{event.key:34} {event.count} times")

# %%
run = ranks.run(ranks.Script("profiled.py"), 2)
print(*[line for line in run.ranks[0].stdout.splitlines() if line.endswith("times")], sep="\n")

# %% [markdown]
# Four names to look for. The forward, its matrix products (backward's are called `aten::mm`), the optimizer, and the
# all-reduces: `gloo:all_reduce` here, `nccl:all_reduce` on GPUs. Their `device_time_total` (on a CPU `cpu_time_total`) says how long they took.
# `cuda_time_total`, which older texts sort by, is deprecated: sorting still takes it, and the averages lack it:

# %%
from torch.autograd.profiler_util import FunctionEventAvg

for name in ("device_time_total", "cpu_time_total", "cuda_time_total"):
    print(f"{name:18} an event has it: {hasattr(FunctionEventAvg(), name)}")

# %% [markdown]
# The trace opens in `ui.perfetto.dev`; older texts say `chrome://tracing`, which reads the same file. On NVIDIA's GPUs, Nsight
# Systems (`nsys profile`) shows the whole machine. `nvprof`, its predecessor, refuses every GPU from Ampere (2020) on
# (from NVIDIA's documentation; not run here).
#
# Leave the beginning out. The first `DDP()` of a process imports torch's compiler, which takes seconds; the second takes
# milliseconds:

# %%
program = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = "torch._dynamo" in sys.modules
DDP(torch.nn.Linear(1, 1))
print("imported before DDP():", before, "  after:", "torch._dynamo" in sys.modules, flush=True)
os._exit(0)
"""
print(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)

# %% [markdown]
# **How long an all-reduce took is not what it costs.** It may run beside the backward, and then it costs nothing. And
# it contains waiting: here rank 1 is half a second late, and rank 0's profile would show a slow network.

# %%
# %%ranks 2
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(0.5)  # this rank computes longer
began = time.perf_counter()
dist.all_reduce(torch.ones(1))
waited = time.perf_counter() - began
if dist.get_rank() == 0:
    print("a number of four bytes took more than 300 ms:", waited > 0.3)

# %% [markdown]
# Rules of thumb such as "computation to communication ten to one" say nothing, then. Only **exposed** communication
# makes a step longer, and there is one honest way to get it: the step with communication, minus the same step
# without. DDP's `no_sync` is that switch. You write that measurement below, in "Scaling".

# %%
quiz("04_optimization/long_all_reduce")

# %% [markdown]
# ## Buckets and overlap
#
# Chapter 1 has shown *that* buckets leave while backward goes on. Is it worth anything? On the loopback of one
# machine bytes cost nearly nothing. So let the ranks share a slow link. `%%ranks 2 --bandwidth 1gbit` puts them into
# a network of their own, whose only interface is throttled by the kernel:

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit
import time
import torch, torch.distributed as dist
from lockstep.cluster import set_bandwidth

dist.init_process_group("gloo")
t = torch.ones(1 << 20)  # 4 MiB
times = {}
for rate in ("1gbit", "200mbit", None):  # None: as fast as it goes
    set_bandwidth(rate)
    times[rate] = 1e9
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(t)
        times[rate] = min(times[rate], time.perf_counter() - began)
if dist.get_rank() == 0:
    print("200 Mbit/s against 1 Gbit/s, about 5 times:", 3.5 < times["200mbit"] / times["1gbit"] < 7)
    print("unthrottled against 1 Gbit/s, faster:", times[None] < times["1gbit"] / 3)

# %% [markdown]
# Both ranks share the one link, in both directions: 2(N − 1) times the tensor's bytes pass through it.
#
# Now the experiment. A model of six wide layers, 14 MB of gradients. Two wrappers around the same layers: one with
# three buckets of 4.7 MB (`bucket_cap_mb=3`: a bucket closes with the gradient that reaches the cap), one with a
# single bucket. Steps alternate between them, and the fastest of nine counts: whatever else the machine does only
# adds time. The rate is chosen from the measured backward, so that communication takes about as long as computation.
# There, overlap can hide most.

# %%
# %%writefile fastest.py
import time
import torch, torch.distributed as dist

def fastest(steps, repeats):
    """The fastest of so many runs of each step, alternating; all ranks begin each together."""
    best = [float("inf")] * len(steps)
    for _ in range(repeats):
        for number, step in enumerate(steps):
            dist.barrier()
            began = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            best[number] = min(best[number], took.item())
    return best

# %%
# %%writefile overlap_lab.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from fastest import fastest
from lockstep.cluster import set_bandwidth
from lockstep.ranks import observe

dist.init_process_group("gloo")
layers = [layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.ReLU())]
x = torch.randn(768, 768)
models = [DDP(nn.Sequential(*layers), bucket_cap_mb=cap) for cap in (3, 1000)]
steps = [lambda model=model: model(x).square().mean().backward() for model in models]

def alone():
    with models[0].no_sync():
        steps[0]()
fastest([*steps, alone], 2)  # the first two steps: one bucket, and then the buckets made anew
backward = fastest([alone], 3)[0] * 2 / 3
bits = sum(p.numel() * 32 for p in models[0].parameters())
megabits = int(2 * bits / backward / 1e6)  # so that sending takes as long as backward
observe("rate", megabits)
for rate in (f"{megabits}mbit", None):
    set_bandwidth(rate)
    observe("slow" if rate else "fast", fastest(steps, 9 if rate else 4))

# %% tags=["needs-bandwidth"]
def throttled(script, world_size=2):
    """Run a script on ranks that share a slow link; None, said aloud, where this machine cannot."""
    try:
        link = cluster.slow_link(None)
        run = ranks.run(ranks.Script(script), world_size, network=link, deadline=55)
    except ranks.NotRun as missing:
        print("not run:", missing)
        return None
    assert run.ok, ranks.text.describe(run)
    return run

def gain(lab):
    """How much faster three buckets are than one on the slow link."""
    three, one = lab.observed("slow")[0]
    return one / three

lab = throttled("overlap_lab.py")
if lab and gain(lab) < 1.15:  # a neighbour may have taken a core: once more, and the better one counts
    lab = max(lab, throttled("overlap_lab.py"), key=gain)
if lab:
    slow, fast = lab.observed("slow")[0], lab.observed("fast")[0]
    print("slow link: three buckets beat one by more than 1.1x:", gain(lab) > 1.1)

# %% tags=["needs-bandwidth"]
if lab:
    sizes = ("three buckets", "one bucket")
    names = [f"{size}, {link} link" for link in ("slow", "fast") for size in sizes]
    title = f"seconds a step; the slow link: {lab.observed('rate')[0]} Mbit/s"
    picture = bars(dict(zip(names, [*slow, *fast])), unit="s", title=title)
picture if lab else None

# %% [markdown]
# On the slow link the buckets earn their keep. On the fast one there is little to hide, and little is won (look
# at the bars). **That contrast is the lesson**: a setting is good *for a network*, and the same change
# that helps there does little here. Try other sizes: `bucket_cap_mb=0.1` makes one bucket of each layer, and an explicit
# 25 makes one of the whole model, which hides nothing. This link is slow and near. On a distant one each message would
# cost latency as well, and few large buckets win (chapter 1, "What it costs").
#
# The default is not `25`. It is `None`, which means 25 MiB with a *first* bucket of 1 MiB, so that something leaves
# early:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
for cap in (None, 25):
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]), bucket_cap_mb=cap)
    sizes = []
    def hook(state, bucket):
        sizes.append(bucket.buffer().numel() * 4)
        # Only the sizes matter here: a real hook divides.
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
    model.register_comm_hook(None, hook)
    for step in range(3):
        sizes.clear()
        model(torch.ones(1, 512)).sum().backward()
    if dist.get_rank() == 0:
        print(f"bucket_cap_mb={cap}: buckets of", sizes, "bytes")

# %%
quiz("04_optimization/bucket_size")

# %% [markdown]
# ## Accumulation
#
# The surest way to communicate less is to communicate less often. Four micro-batches, one step. But DDP averages in
# *every* backward:

# %%
# %%writefile accumulated.py
import torch, torch.distributed as dist
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel as DDP

def start():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    torch.manual_seed(dist.get_rank())
    return model, torch.randn(8, 4).split(2)

def gap(model):
    """The largest difference of a gradient between rank 0 and any rank."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    worst = (flat - first).abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()

# %%
# %%ranks 2 --into plain --quiet
from accumulated import *

model, micro_batches = start()
for x in micro_batches:
    (model(x).square().mean() / len(micro_batches)).backward()

# %%
# %%ranks 2 --into once --quiet
from accumulated import *

model, micro_batches = start()
for number, x in enumerate(micro_batches):
    last = number == len(micro_batches) - 1
    with nullcontext() if last else model.no_sync():  # +
        (model(x).square().mean() / len(micro_batches)).backward()

# %%
def reductions(run):
    """How many gradient all-reduces rank 0 began."""
    return sum(call.inside == "backward" for call in run.collectives[0])

print("every backward:", reductions(plain), "  with no_sync:", reductions(once))

# %% [markdown]
# It is in `backward` that DDP averages, not in `optimizer.step()`. Texts that place it in `optimizer.step()` make
# accumulation alone look like a saving. The gradient is the same either way, that of one big batch, provided that each
# loss is divided by the number of micro-batches:

# %%
# %%ranks 2
from accumulated import *

model, micro_batches = start()
ways = {"one big batch": (1, 1), "no_sync": (4, 4), "every backward": (4, 4), "not divided": (4, 1)}
gradients = {}
for way, (parts, divisor) in ways.items():
    model.zero_grad()
    for number, x in enumerate(torch.cat(micro_batches).chunk(parts)):
        with model.no_sync() if way == "no_sync" and number < 3 else nullcontext():
            (model(x).square().mean() / divisor).backward()
    gradients[way] = torch.cat([p.grad.flatten() for p in model.parameters()])
for way, gradient in gradients.items():
    print(f"{way}: {(gradient / gradients['one big batch']).mean():.2f}", end="   ")

# %% [markdown]
# `no_sync` has two traps. **The forward belongs inside.** DDP decides in forward whether the coming backward will
# communicate; a `no_sync` around the backward alone changes nothing:

# %%
# %%ranks 2 --into late --quiet
from accumulated import *

model, micro_batches = start()
for number, x in enumerate(micro_batches):
    loss = model(x).square().mean() / len(micro_batches)  # BUG: outside of no_sync
    with nullcontext() if number == 3 else model.no_sync():
        loss.backward()

# %%
print("no_sync around backward only:", reductions(late))

# %% [markdown]
# **And somebody has to be the last.** The usual condition is `(i + 1) % 4 == 0`. With ten batches it is never true
# for the ninth and the tenth. Their gradients stay where they are, and leak into the first step of the next epoch. Here
# each micro-batch brings a quarter:

# %%
# %%ranks 2
from accumulated import *

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    print(f"epoch {epoch}:", end=" ")
    for i in range(10):
        with nullcontext() if (i + 1) % 4 == 0 else model.no_sync():
            (model(torch.ones(1, 1)) / 4).sum().backward()
        if (i + 1) % 4 == 0:  # BUG: the ninth and the tenth wait
            print(model.module.weight.grad.item(), end=" ")
            optimizer.step()
            optimizer.zero_grad()

# %% [markdown]
# The first step of epoch 1 is made of six micro-batches, of two epochs; the last two of the training are lost. And if a
# step is taken with such leftovers, the replicas drift apart, silently:

# %%
# %%ranks 2 --watch-replicas
from accumulated import *

model, _ = start()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
micro_batches = torch.randn(10, 4).split(1)
for i, x in enumerate(micro_batches):
    with nullcontext() if (i + 1) % 4 == 0 else model.no_sync():
        (model(x).square().mean() / 4).backward()
    if (i + 1) % 4 == 0 or i == 9:  # BUG: the last group has two, and was never synchronised
        optimizer.step()
        optimizer.zero_grad()

# %% [markdown]
# The scale is wrong there as well: that group has two micro-batches and was divided by four. Divide by the *samples*
# of the group, not by a number that is true for full groups only.

# %%
quiz("04_optimization/accumulate")

# %% [markdown]
# ## Exercise: implement accumulate
#
# *Medium, 20 minutes.* Open `exercises/accumulate.py`.
#
# One step from any number of micro-batches, of any sizes, with one synchronisation; and the gradient is that of one
# big batch, also when the ranks do not hold equally much.

# %%
contract("accumulate", "train_step")

# %%
# %check accumulate

# %% [markdown]
# <details><summary>"… gradient all-reduces instead of 1"</summary>
# Forward and backward of all micro-batches but the last belong inside <code>no_sync()</code>.
# </details>
#
# <details><summary>An iterator has no length</summary>
# You know that a micro-batch was the last when you have asked for the next and there was none. Read one ahead.
# </details>
#
# <details><summary>The gradient is right with equal ranks and wrong with unequal ones</summary>
# DDP's mean divides by the number of ranks. Weigh each micro-batch by its samples, divide by the samples of
# <em>all</em> ranks, and undo DDP's division.
# </details>
#
# The solution is `solutions/accumulate.py`.
#
# ## Mixed precision
#
# Under autocast the layers that gain from it compute in half precision. What does it do to communication?

# %%
# %%ranks 2 --into mixed --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
with torch.autocast("cpu", dtype=torch.bfloat16):
    output = model(torch.ones(2, 64))
    loss = output.float().square().mean()
loss.backward()
observe("types", [str(t.dtype) for t in (output, model.module.weight, model.module.weight.grad)])

# %%
print("output, weight, gradient:", *mixed.observed("types")[0])
sent = [call for call in mixed.collectives[0] if call.inside == "backward"]
print("on the wire:", sent[0].tensor, "=", sent[0].nbytes, "bytes")
assert sent[0].nbytes == 4 * (64 * 64 + 64)

# %% [markdown]
# The output is bfloat16. The parameters are float32, so are their gradients, and so is what is sent: **autocast saves
# computing and activations, not communication.** That is the next section's business.
#
# Which of the two half precisions?
#
# | | float16 | bfloat16 |
# |---|---|---|
# | largest number | 65504 | 3.4e38, as float32 |
# | smallest step from 1 | 0.001 | 0.008 |
# | smallest above zero | 6e-8 | 9e-41 |
# | needs a loss scaler | yes | no |
# | where | NVIDIA GPUs from 2017 (Volta) on | from 2020 (Ampere) on, recent CPUs |
#
# With float16 small gradients fall below what it can hold. The `GradScaler` multiplies the loss by a large number
# before backward, divides the gradients by it before the step, and skips a step in which something overflowed. The
# order of four lines decides whether that works:
#
# ```
# scaler.scale(loss).backward()
# scaler.unscale_(optimizer)                                   # before anybody looks at gradients
# torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
# scaler.step(optimizer)                                       # skips when there is an inf or a NaN
# scaler.update()
# ```
#
# Leave out `unscale_` and the clipping sees gradients 65536 times too large. It shrinks all of them to `max_norm`,
# then the scaler divides by 65536:

# %%
# %%ranks 1
import torch

for unscale in (True, False):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((weight * 10).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    scaler.step(optimizer)
    print(f"unscaled first: {unscale!s:5}  the weights moved by {weight.norm().item():.1e}")

# %% [markdown]
# No error, and training nearly stands still. The scaler is local to each rank; nothing synchronises it. It need not
# be: **the ranks agree because their gradients do.** An overflow on one rank becomes inf in the averaged gradient of
# all, so all skip together, and all lower their scale:

# %%
# %%ranks 3
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
before = model.module.weight.item()
x = torch.full((1, 1), 1e38 if dist.get_rank() == 1 else 1.0)  # too much on rank 1
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
print("skipped:", model.module.weight.item() == before, " scale now", scaler.get_scale())
assert scaler.get_scale() == 512

# %% [markdown]
# What breaks that is to decide alone: `if not loss.isfinite(): continue` on one rank (chapter 3, "Mismatches"). And a
# step whose backward was never synchronised, with each rank's own gradients:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x = torch.full((1, 1), 1e38 if dist.get_rank() == 1 else 1.0)  # too much on rank 1
with model.no_sync():  # BUG: and no backward outside of it before the step
    scaler.scale(model(x).sum()).backward()
before = model.module.weight.item()
scaler.step(optimizer)
scaler.update()
print("stepped:", model.module.weight.item() != before, "  scale now", scaler.get_scale())

# %% [markdown]
# (Where gradients are cut up, as under FairScale's or FSDP's first version, no rank sees them all. `ShardedGradScaler`
# asks the others; not run here.)
#
# Two flaws in examples that circulate. They call `torch.cuda.amp.autocast` and `torch.cuda.amp.GradScaler`, which are
# deprecated; it is `torch.amp` with the device's name now:

# %%
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
    torch.cuda.amp.autocast(enabled=False)
print(*[one.message for one in caught if one.category is FutureWarning], sep="\n")

# %% [markdown]
# And their loop has no `zero_grad`, so that each step also repeats all steps before it. A gradient of 4, three times:

# %%
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.0)
for cleared in (False, True):
    weight.grad, gradients = None, []
    for _ in range(3):
        if cleared:
            optimizer.zero_grad()
        (4 * weight).sum().backward()
        optimizer.step()
        gradients.append(weight.grad.item())
    print("with zero_grad:   " if cleared else "without zero_grad:", *gradients)

# %%
quiz("04_optimization/amp_bytes")

# %% [markdown]
# ## Exercise: implement mixed_precision
#
# *Medium, 15 minutes.* Open `exercises/mixed_precision.py`.

# %%
contract("mixed_precision", "train_step")

# %%
# %check mixed_precision

# %% [markdown]
# <details><summary>"unscale_() has already been called"</summary>
# Once for each optimizer and step. <code>scaler.step</code> does it itself when you have not.
# </details>
#
# <details><summary>bfloat16 and float16 need different lines</summary>
# They do not: a scaler with <code>enabled=False</code> passes everything through.
# </details>
#
# The solution is `solutions/mixed_precision.py`.
#
# ## Compression
#
# A **communication hook** takes the place of DDP's all-reduce. It is given each full bucket, and returns a future of
# what the gradients shall be. torch has one that casts to float16:

# %%
# %%ranks 2 --into compressed --quiet
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
model(torch.ones(2, 64)).square().mean().backward()

# %%
sent = [call for call in compressed.collectives[0] if call.inside == "backward"]
print("on the wire:", sent[0].tensor, "=", sent[0].nbytes, "bytes, were", 4 * (64 * 64 + 64))
assert sent[0].nbytes * 2 == 4 * (64 * 64 + 64)

# %% [markdown]
# Half. Its sister for bfloat16 does not run here, and says why:

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2)).register_comm_hook(None, default_hooks.bf16_compress_hook)

# %% [markdown]
# Nothing in gloo forbids it: a hook of your own that casts to bfloat16 works. That is the exercise. Two things to get
# right that DDP does for you otherwise. In a hook **nothing has been divided yet**, so the mean is your business. And
# the order matters: 40000 on two ranks is 80000, which float16 does not hold. Divide first.
#
# DDP goes by names here, too: the second argument has to be called `bucket`.

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def hook(state, gradients):  # BUG: DDP looks for the name "bucket"
    return dist.all_reduce(gradients.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2)).register_comm_hook(None, hook)

# %% [markdown]
# What does the cast cost in precision? Each step loses a little, always in the same direction if the gradient stays
# the same. **Error feedback** keeps what was lost and adds it next time. A gradient of 1.001, a hundred times, in
# bfloat16:

# %%
gradient, residual, plain_sum, fed_sum = 1.001, 0.0, 0.0, 0.0
for _ in range(100):
    plain_sum += torch.tensor(gradient).bfloat16().item()
    cast = torch.tensor(gradient + residual).bfloat16().item()
    residual = gradient + residual - cast
    fed_sum += cast
print(f"exact {100 * gradient:.3f}   cast {plain_sum:.3f}   with error feedback {fed_sum:.3f}")

# %% [markdown]
# **PowerSGD** goes further: it sends two thin matrices instead of a large one, and needs error feedback to train
# well. It is in `ddp_comm_hooks.powerSGD_hook`. On gloo use it with a single bucket (`bucket_cap_mb` at least the
# model): with several it hung, without any error, in our trials.
#
# **Local SGD** communicates less often instead: each rank trains alone for a few steps, then the *parameters* are
# averaged. `post_localSGD_hook` leaves the gradients to the rank, and a `PeriodicModelAverager` meets every so often:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP
from spread import spread

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
alone, _ = dist.new_subgroups(1)  # gradients are averaged within a subgroup, here of one
state = local.PostLocalSGDState(None, alone, start_localSGD_iter=2)
model.register_comm_hook(state, local.post_localSGD_hook)
averager = PeriodicModelAverager(period=3, warmup_steps=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 4) + dist.get_rank()).square().mean().backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
    print("apart" if spread(model.parameters()) else "equal", end=" ")

# %% [markdown]
# Equal while it warms up, then every third step. That is another algorithm, not a cheaper way to the same numbers.
#
# Is half the bytes half the time? On the slow link, nearly, as long as communication is what you wait for:

# %%
# %%writefile compression_lab.py
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.cluster import set_bandwidth
from fastest import fastest
from lockstep.ranks import observe

dist.init_process_group("gloo")
layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
models = [DDP(nn.Sequential(*layers), bucket_cap_mb=1000) for _ in range(2)]
models[1].register_comm_hook(None, default_hooks.fp16_compress_hook)
x = torch.randn(64, 512)
steps = [lambda model=model: model(x).square().mean().backward() for model in models]
fastest(steps, 2)
for rate in ("500mbit", None):
    set_bandwidth(rate)
    observe("slow" if rate else "fast", fastest(steps, 7))

# %% tags=["needs-bandwidth"]
lab = throttled("compression_lab.py")
picture = None
if lab:
    slow, fast = lab.observed("slow")[0], lab.observed("fast")[0]
    print("500 Mbit/s: float16 on the wire is faster by more than 1.5x:", slow[0] / slow[1] > 1.5)
    names = [f"{kind}, {link} link" for link in ("slow", "fast") for kind in ("float32", "float16")]
    picture = bars(dict(zip(names, [*slow, *fast])), unit="s", title="seconds a step")
picture

# %% [markdown]
# On the fast link there is nothing to win (look at the bars), and casting is work too. Compress when you wait for the network, and
# not otherwise.

# %%
quiz("04_optimization/hook_mean")

# %% [markdown]
# ## Exercise: implement compress_gradients
#
# *Medium, 20 minutes.* Open `exercises/compress_gradients.py`.

# %%
contract("compress_gradients", "compress_hook", "register")

# %%
# %check compress_gradients

# %% [markdown]
# <details><summary>"KeyError: 'bucket'"</summary>
# DDP looks for an argument of the hook by its name: the second one has to be called <code>bucket</code>.
# </details>
#
# <details><summary>Error feedback is right at first and wrong from the second step on</summary>
# After the first step DDP rebuilds its buckets: another size, another order. Keep what was lost by parameter, not by
# bucket.
# </details>
#
# The solution is `solutions/compress_gradients.py`.
#
# ## Memory
#
# Memory decides the batch, and the batch decides how much computing there is for each byte sent. What fills it beside
# the parameters are the **activations**, which a forward keeps for its backward. autograd tells what it keeps:

# %%
from torch import nn
from torch.utils.checkpoint import checkpoint

layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())])
own = {parameter.data_ptr() for parameter in layers.parameters()}

def kept(batch, half=False, recompute=False):
    """Bytes that a forward keeps for its backward, apart from the parameters."""
    sizes = {}
    def note(tensor):
        if tensor.data_ptr() not in own:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", enabled=half):
            x = torch.randn(batch, 256)
            output = checkpoint(layers, x, use_reentrant=False) if recompute else layers(x)
    return sum(sizes.values())

# %%
print("a batch of 4096:                  ", kept(4096) // 1024, "KiB")
print("four micro-batches, each of 1024: ", kept(1024) // 1024, "KiB")
print("bfloat16 where autocast takes it: ", kept(4096, half=True) // 1024, "KiB")
print("recomputed in backward:           ", kept(4096, recompute=True) // 1024, "KiB")

# %% [markdown]
# So accumulation, mixed precision and *activation* checkpointing (computing again in backward) are the usual cures for
# "out of memory", once it is sure that not all ranks sit on one GPU. More levers, from the cheapest:
#
# **`zero_grad()` frees.** Since torch 2.0 it sets gradients to `None`. `gradient_as_bucket_view=True` saves one copy
# of the gradients (chapter 1, "Memory").
#
# **Activation checkpointing** forgets activations and computes them again in backward. Under DDP use it with
# `use_reentrant=False`. The old form breaks: in it the first layer's parameters never see a gradient, because its
# input needs none, and DDP complains one step later:

# %%
# %%writefile checkpointed.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 1), reentrant
    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))

def start(reentrant, **options):
    dist.init_process_group("gloo")
    return DDP(Net(reentrant), **options), torch.ones(2, 4)

# %%
# %%ranks 2
from checkpointed import start

model, x = start(reentrant=False)
for step in range(2):
    model(x).sum().backward()
print("first layer has a gradient:", model.module.first.weight.grad is not None)

# %%
# %%ranks 1 --expect raised --quiet
from checkpointed import start

model, x = start(reentrant=True)  # BUG, and the default when the argument is left out (with a warning)
for step in range(2):
    model(x).sum().backward()

# %% [markdown]
# Following that message's advice is worse: with `find_unused_parameters=True` DDP is content, and the first layer is
# never trained:

# %%
# %%ranks 1 --into silenced --quiet
from checkpointed import start

model, x = start(reentrant=True, find_unused_parameters=True)  # BUG: silences DDP
for step in range(2):
    model(x).sum().backward()
print("first layer has a gradient:", model.module.first.weight.grad is not None)

# %%
print(silenced.ranks[0].stdout, end="")

# %% [markdown]
# Only when the input does need a gradient is there another error:

# %%
# %%ranks 1 --quiet --expect raised
from checkpointed import start

model, x = start(reentrant=True, find_unused_parameters=True)  # BUG: the flag does not mend it
model(x.requires_grad_()).sum().backward()

# %% [markdown]
# **`static_graph=True`** tells DDP that every step uses the same parameters. It then needs no
# `find_unused_parameters`, and takes the reentrant form without that error. (The gradient itself comes from
# `x.requires_grad_()`; the flag alone would not bring it.)

# %%
# %%ranks 2
from checkpointed import start

model, x = start(reentrant=True, static_graph=True)
for step in range(2):
    model(x.requires_grad_()).sum().backward()
print("first layer has a gradient:", model.module.first.weight.grad is not None)

# %% [markdown]
# What it costs: while it learns the graph it sends at the end of backward, here in the first two steps. The usual DDP,
# for comparison, with the flag that it replaces:

# %%
# %%ranks 2 --into orders --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
for options in ({"find_unused_parameters": True}, {"static_graph": True}):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: mark(f"ready {number}"))
    ddp = DDP(model, bucket_cap_mb=0.2, **options)
    for step in range(3):
        loss = ddp(torch.randn(2, 256)).sum()
        mark(f"{[*options][0]}, step {step}:")
        loss.backward()

# %%
report = orders.ranks[0]
for event in sorted([*report.collectives, *report.marks], key=lambda event: event.number):
    if hasattr(event, "name"):
        print(("\n" if event.name.endswith(":") else "") + event.name, end=" ")
    elif event.inside == "backward" and event.nbytes > 1000:
        print("ALL-REDUCE", end=" ")

# %% [markdown]
# If a layer is used later that was not used at first, DDP says so at once. (The other way round it says so one step late, and that step's gradients were not averaged.)

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x, both):
        return self.a(x) + self.b(x) if both else self.a(x)

dist.init_process_group("gloo")
model = DDP(Branches(), static_graph=True)
for both in (False, True):
    model(torch.ones(1, 2), both).sum().backward()

# %% [markdown]
# **torch.compile** and DDP know of each other: compile `DDP(model)`, and the compiler cuts the graph at bucket
# boundaries, so that buckets still leave early. A backend that only counts shows the cuts:

# %%
# %%writefile compiled.py
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

graphs = []
def count(graph, inputs):
    graphs.append(graph)
    return graph.forward

dist.init_process_group("gloo")
for cap in (1, 1000):
    graphs.clear()
    torch._dynamo.reset()
    torch.compile(DDP(Net(), bucket_cap_mb=cap), backend=count)(torch.ones(2, 512)).sum().backward()
    print(f"bucket_cap_mb={cap}: {len(graphs)} graphs")

# %%
run = ranks.run(ranks.Script("compiled.py"), 1)
print(run.ranks[0].stdout)

# %% [markdown]
# Four layers of 1 MiB each: four buckets, four graphs. With one large bucket there are still two: the compiler always
# counts on a first bucket of 1 MiB, which DDP does not have when you name a size.
#
# ### Arguments that are new
#
# `DDP(...)` of torch 2.13 has arguments that most texts do not know:

# %%
import inspect
from torch.nn.parallel import DistributedDataParallel as DDP

known = ("module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb"
         " find_unused_parameters check_reduction gradient_as_bucket_view static_graph").split()
print(*[name for name in inspect.signature(DDP).parameters if name not in known], sep="\n")

# %% [markdown]
# `forward_sync_buffers` has replaced `broadcast_buffers` (chapter 1, "Exactly when buffers are sent").
# `batched_grad_copy` copies all gradients of a bucket in one go: fewer kernels on a GPU, the same numbers.
# `mixed_precision` keeps parameters in one type and sends gradients in another; `device_mesh` is for use with tensor
# parallelism; `bucket_cap_mb_list` names a size for each bucket; `delay_all_reduce_named_params` takes parameters out of
# the buckets and sends them when `param_to_hook_all_reduce` has its gradient. And `skip_all_reduce_unused_params` does
# not send what is not used. Every rank must leave out the *same* parameters in every step; where they differ, the job
# may hang (from its docstring; only the right use is run here):

# %%
# %%ranks 2 --into skipped --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
for skip in (False, True):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 256, bias=False) for name in "ab"})
    model.forward = lambda x, model=model: model["a"](x)  # b is not used
    options = {"skip_all_reduce_unused_params": skip, "batched_grad_copy": skip}
    ddp = DDP(model, find_unused_parameters=True, bucket_cap_mb=0.2, **options)
    mark(f"skip {skip}")
    ddp(torch.ones(1, 256)).sum().backward()

# %%
report = skipped.ranks[0]
for event in sorted([*report.collectives, *report.marks], key=lambda event: event.number):
    if hasattr(event, "name"):
        print("\n" + event.name, end=":")
    elif event.inside == "backward":
        print(f" {event.nbytes} bytes", end="")

# %% [markdown]
# One bucket less. The 8 bytes belong to `find_unused_parameters`: for each of the two parameters a number that says whether
# some rank has used it.

# %%
quiz("04_optimization/reentrant")

# %% [markdown]
# ## Data loading
#
# A frequent bottleneck is neither the network nor the GPU. If the step gets no shorter with `model` replaced by a
# function that returns zeros, it is the loader. Four things to know with ranks:
#
# - `num_workers` is **per rank**. Count the processes before you choose it, and the cores.
# - `persistent_workers=True` keeps them from being started anew in every epoch; `pin_memory=True` is what makes
#   `non_blocking=True` mean anything.
# - Where torchrun starts more than one rank on a machine, it sets `OMP_NUM_THREADS=1` unless you have set it. Without it
#   every rank starts a thread for every core.
# - An `IterableDataset` knows nothing of samplers. It has to share out by itself, over ranks *and* workers, or every
#   worker of every rank delivers everything:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Stream(IterableDataset):
    def __init__(self, share):
        self.share, self.rank, self.world_size = share, dist.get_rank(), dist.get_world_size()
    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        part, parts = self.rank * workers + worker, self.world_size * workers
        return iter(range(12)[part::parts] if self.share else range(12))

dist.init_process_group("gloo")
for share in (False, True):
    seen = [int(x) for x in DataLoader(Stream(share), batch_size=None, num_workers=2)]
    print(f"shared out: {share!s:5}  got {len(seen):2} of 12, {len(set(seen))} different")

# %% [markdown]
# On a machine with several sockets, a rank whose threads and memory lie beside its GPU's socket loads faster; torchrun
# binds them with `--numa-binding` (in 2.13; needs such a machine, not run here).

# %%
quiz("04_optimization/workers")

# %% [markdown]
# ## Batch and learning rate
#
# With N ranks and the same batch per rank, the global batch is N times as large and an epoch has an Nth of the steps.
# With the same learning rate, that is an Nth of the way. A least-squares problem, 96 steps in one process, 24 on four
# ranks:

# %%
# %%writefile rate.py
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

factor = float(sys.argv[1])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(768, 8)
y = x @ torch.arange(8.0)
model = DDP(torch.nn.Linear(8, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * factor)
batches = x[rank::world_size].split(8), y[rank::world_size].split(8)
for bx, by in zip(*batches):
    optimizer.zero_grad()
    (model(bx).squeeze(1) - by).square().mean().backward()
    optimizer.step()
if rank == 0:
    loss = (model.module(x).squeeze(1) - y).square().mean()
    print(f"{len(batches[0])} steps, learning rate {0.01 * factor:.2f}: loss {loss:.2f}")

# %%
for world_size, factor in ((1, 1), (4, 1), (4, 4)):
    run = ranks.run(ranks.Script("rate.py", (str(factor),)), world_size)
    print(f"{world_size} ranks:", run.ranks[0].stdout.strip())

# %% [markdown]
# The same epoch on four ranks ends far from where one process ends. With the learning rate times four it gets there.
# That is the **linear scaling rule**; it holds while the batch is not too large, and the first steps want a warm-up,
# because they are the ones a large rate can ruin. With Adam, people often take the square root of N instead. Neither
# is a law: a larger batch is another optimization problem. So when you compare runs on different numbers of ranks,
# say whether the *global* batch was the same.

# %%
quiz("04_optimization/fewer_steps")

# %% [markdown]
# ## Scaling
#
# Two questions go by the name of scaling. **Strong**: the same global batch on more ranks; is it done sooner?
# **Weak**: the same batch per rank; does each rank keep its speed? In both, *efficiency* is samples per second per
# rank, against the smallest run.
#
# | seconds a step | 1 rank | 4 ranks | efficiency |
# |---|---|---|---|
# | same global batch (strong) | 1.0 | 0.25 | 100 % |
# | same global batch (strong) | 1.0 | 0.40 | 62 % |
# | same batch per rank (weak) | 1.0 | 1.0 | 100 % |
# | same batch per rank (weak) | 1.0 | 1.25 | 80 % |
#
# A snippet that circulates divides the time of N steps on one GPU by that of N steps on four, and then by four. With
# the same batch per GPU, perfection gets 25 %. (It also deadlocks: chapter 3, "Debug the debugger".)

# %%
seconds = {1: 2.0, 4: 2.0}  # for 100 steps of 32 samples a rank: perfect weak scaling
rate = {n: 100 * 32 * n / taken for n, taken in seconds.items()}  # samples per second
print(f"the snippet: {seconds[1] / seconds[4] / 4:.0%}", end="   ")
print(f"samples per second per rank: {rate[4] / 4 / rate[1]:.0%}")

# %% [markdown]
# Tables of "realistic speed-ups" (7.5 on 8 GPUs, 15 on 16) come without a model, a batch and a network, and mean nothing
# for yours. Nor does "99 % of bad scaling is configuration".
#
# "Large models scale well, small ones badly" is folklore too. Both computing and communication grow with the number
# of parameters; **what decides is how many samples each rank computes for each time it sends**. In
# numbers: a sample costs about 6 operations a parameter, 2 in forward and 4 in backward; by chapter 1, in a step each rank
# sends 2(N − 1)/N times the gradient, in float32 8(N − 1)/N bytes a parameter.
# (Latency is left out; for tiny models it decides.)

# %%
def ratio(batch, ranks=8, flops=1e14, bandwidth=2.5e10):
    """Seconds of communication, hidden or not, over those of computation (bandwidth in bytes/s)."""
    compute = 6 * batch / flops
    communication = 8 * (ranks - 1) / ranks / bandwidth
    return communication / compute

for batch in (64, 512, 4096, 32768):
    print(f"{batch:>6} samples (or tokens) a rank: communication / computation = {ratio(batch):7.2f}")

# %% [markdown]
# Change `flops` and `bandwidth` (bytes a second, not bits) to your machine's. It also says what helps: a larger batch per rank, accumulation,
# compression, a faster link.
#
# ### Unequal machines
#
# Two kinds of GPU in one job. Does it need a longer timeout, as is sometimes advised? Rank 1 is slower here by a tenth
# of a second in each step, and the timeout is one second:

# %%
# %%ranks 2
import time
from datetime import timedelta
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=1))
began, steps = time.perf_counter(), []
for step in range(15):
    started = time.perf_counter()
    time.sleep([0.0, 0.1][dist.get_rank()])  # rank 1's device is slower
    dist.all_reduce(torch.ones(1))
    steps.append(time.perf_counter() - started)
longer = time.perf_counter() - began > 1
print("longer than the timeout:", longer, "  every step at the pace of rank 1:", min(steps[1:]) > 0.09)

# %% [markdown]
# No. Each call has its own timeout; the job has none. What the slow one does cost is everybody's time: all
# step at its pace, and its memory limits the batch if all have the same. Give it a smaller batch, then, and weigh the
# losses by samples (chapter 1, "Is it the gradient of the joined batch?": 26 + 6). Groups of equal machines are no way
# out, because what is not in the group is not averaged with:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
kinds = [dist.new_group(members) for members in ([0, 1], [2, 3])]  # everybody makes both
ddp = DDP(torch.nn.Linear(1, 1, bias=False), process_group=kinds[dist.get_rank() // 2])
ddp(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
print("my gradient", dist.get_rank(), "  the mean of my group:", ddp.module.weight.grad.item())

# %% [markdown]
# That is two trainings. (With pipelines, or several models, such groups make sense.)
#
# ### NCCL's levers
#
# On GPUs NCCL chooses its own rings and trees, and is seldom improved by hand. Known names, none of which was run
# here: `NCCL_SOCKET_IFNAME` (which card), `NCCL_IB_HCA` (which InfiniBand adapter), `NCCL_BUFFSIZE` (default 4 MiB a
# channel), `NCCL_ALGO` and `NCCL_PROTO` (force a choice, for a test). Measure the raw collective first (NVIDIA's
# `nccl-tests`), then the step. And change one thing at a time.
#
# ### Predict, then measure
#
# A model is worth something when it predicts a run that was not used to make it. You write one, and
# `benchmarks/predict_step.py` holds it against steps on a throttled link.

# %%
quiz("04_optimization/efficiency")

# %% [markdown]
# ## Exercise: implement measure_step
#
# *Hard, 20 minutes.* Open `exercises/measure_step.py`. Three functions: measure what communication really costs,
# compare runs on different numbers of ranks, predict a step.

# %%
contract("measure_step", "exposed_communication", "scaling_efficiency", "predict_step")

# %%
# %check measure_step

# %% [markdown]
# <details><summary>"the second kind of step was always measured later"</summary>
# Alternate. A machine that gets slower in between must do so for both.
# </details>
#
# <details><summary>The prediction is too short with one bucket</summary>
# One bucket is complete when backward is over: nothing is hidden.
# </details>
#
# The solution is `solutions/measure_step.py`.
#
# ## Beyond DDP
#
# DDP keeps everything on every rank. When that does not fit, cut it up. ZeRO (*zero redundancy optimizer*) counts how far: 1
# cuts the optimizer's state, 2 the gradients too, 3 the parameters too. FSDP2 is torch's ZeRO-3; HSDP, the *hybrid*, cuts
# within a node and copies between nodes. In the order in which one should try:
#
# | | parameters | gradients | optimizer state | in torch |
# |---|---|---|---|---|
# | DDP | whole | whole | whole | `DistributedDataParallel` |
# | ZeRO-1 | whole | whole | cut | `ZeroRedundancyOptimizer` |
# | ZeRO-3, FSDP2 | cut | cut | cut | `fully_shard` |
# | HSDP | cut within a node, whole over nodes | the same | the same | `fully_shard` with a 2-D mesh |
#
# FairScale, which older texts name, is no longer developed; its ideas are these. (Its `ShardedDDP` cut gradients, not
# parameters, as is often said: ZeRO-2. By its documentation; not run here.) Here are torch's
# `ZeroRedundancyOptimizer` and `fully_shard`, which run on CPU and gloo as well:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(2)]))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
state = sum(t.numel() for one in optimizer.optim.state.values() for t in one.values() if t.numel() > 1)
parameters = sum(p.numel() for p in model.parameters())
print(f"parameters: {parameters}   Adam's state: {2 * parameters}, of it on this rank: {state}")

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(2)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
model(torch.ones(2, 64)).sum().backward()
whole = sum(p.numel() for p in model.parameters())
here = sum(p.to_local().numel() for p in model.parameters())
print("parameters:", whole, " on this rank:", here)

# %% [markdown]
# How much each needs, to change as you like. Sixteen bytes a parameter: 4 for it, 4 for its gradient, 8 for Adam.
# (For DDP and ZeRO-1 the buckets are 4 more, unless `gradient_as_bucket_view=True`.)

# %%
def gigabytes(parameters, ranks):
    """GB on each rank for parameters, gradients and Adam's state in float32, without activations."""
    cut = {"DDP": (1, 1, 1), "ZeRO-1": (1, 1, ranks), "FSDP2": (ranks, ranks, ranks)}
    return {name: parameters * (4 / p + 4 / g + 8 / s) / 1e9 for name, (p, g, s) in cut.items()}

for parameters in (1e8, 1e9, 7e9):
    sizes = {name: round(size, 1) for name, size in gigabytes(parameters, 8).items()}
    print(f"{parameters:.0e} parameters on 8 ranks:", sizes)

# %% [markdown]
# ZeRO-1 does not help when the parameters themselves do not fit. FSDP communicates more: it gathers parameters in
# forward and again in backward. So: **DDP while it fits, then FSDP2; tensor parallelism when a single layer is too large
# for a GPU, pipelines when the model has to span nodes.** The number of GPUs is no criterion, memory is.

# %%
quiz("04_optimization/zero")

# %% [markdown]
# ## Checklist
#
# **Measure.** The step with and without communication, alternating, warm, the fastest of nine. The loader alone. One
# number before, one after, each change by itself.
#
# **Communicate less often.** Accumulate, with forward and backward inside `no_sync`, and the last one outside,
# whatever the count.
#
# **Communicate less.** float16 or bfloat16 on the wire; divide first; keep the residual.
#
# **Hide it.** Several buckets, if the network is slow enough for it to matter; the last is never hidden.
#
# **Compute less.** bfloat16 autocast; float16 with a scaler: `unscale_` before clipping. `torch.compile` around DDP.
#
# **Fit.** Activation checkpointing with `use_reentrant=False`; `gradient_as_bucket_view`; then ZeRO-1, FSDP2.
#
# **Learn the same.** A larger global batch wants another learning rate and a warm-up. Say which batch you compare.
#
# ## Take it with you
#
# - Only exposed communication costs time, and only a measurement against `no_sync` shows it.
# - A setting is good for a network. The same change wins on one link and does little on another.
# - Autocast does not shrink what is sent. A hook does.
# - Ranks agree on skipping a step because their averaged gradients agree. Never let one decide alone.
# - Efficiency is samples per second per rank, against the smallest run; 100 % is perfect in both kinds of scaling.
#
# In an interview, expect: "Eight GPUs give you four times the speed. Why?" Do not list causes. Say what you would
# measure first, and what each outcome would tell you.
#
# ## What to read next
#
# Chapter 5 makes the job survive. Papers: Li et al., "PyTorch Distributed" (VLDB 2020), on buckets and overlap; Goyal
# et al., "Accurate, Large Minibatch SGD" (2017), on the scaling rule; Vogels et al., "PowerSGD" (NeurIPS 2019);
# Rajbhandari et al., "ZeRO" (SC 2020). PyTorch's pages on DDP communication hooks
# (`pytorch.org/docs/stable/ddp_comm_hooks.html`) and FSDP2
# (`pytorch.org/docs/stable/distributed.fsdp.fully_shard.html`).

# %%
from lockstep.notebook.course_map import course_map

course_map("04_optimization")
