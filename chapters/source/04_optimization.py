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
# You use eight GPUs, but training is only four times as fast as on one. Where does the time go? In this chapter you
# find out for one training step of a small GPT on two ranks. You measure the step, read its trace, calculate how fast
# it could be, and change one thing at a time.
#
# Afterwards you can
#
# - **profile** a step and say how much time its communication adds;
# - **predict** whether the network or the processor limits a step;
# - **choose** bucket sizes, and **accumulate** gradients;
# - **train** in mixed precision with scaling and clipping in the right order;
# - **compress** gradients, and compensate for the rounding;
# - **decide** when DDP is no longer enough.
#
# About 170 minutes: 95 to read and run, 75 for four exercises. You need chapters 1 and 2, and no GPU.
#
# **What a CPU cannot show.** Passages marked *GPU* come from documentation and were not run here. Your times will
# differ from those in the stored pictures.

# %%
# %load_ext lockstep
import subprocess, sys
import torch
from lockstep import cluster, ranks
from lockstep.notebook.bars import bars, compared, stacked
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz
from lockstep.notebook.timeline import timeline

# %% tags=["needs-bandwidth"]
missing = cluster.available("bandwidth")
if missing:
    print("Cells with a slow link will not run here:", missing)

# %% [markdown]
# ## One step
#
# The model is a GPT with four transformer layers and 0.9 million parameters. At each of 128 positions, it predicts the
# next character of a text. The text is random, because only the time matters here.

# %%
# %%writefile gpt.py
from torch import nn
from torch.utils.checkpoint import checkpoint

class GPT(nn.Module):
    """Four layers of width 128. `recompute` is for the section "Memory"."""
    def __init__(self, recompute=False):
        super().__init__()
        self.token, self.place = nn.Embedding(256, 128), nn.Embedding(128, 128)
        self.head = nn.Linear(128, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
            for _ in range(4))
        self.recompute = recompute

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(128)  # hides the characters to come
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        return self.head(x)

# %%
# %%writefile gpt_step.py
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from gpt import GPT
from lockstep.ranks import mark

def start(recompute=False, **options):
    """A model, an optimizer, and a batch: two sequences of 129 characters; the last is only a target."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(GPT(recompute), **options)
    return model, torch.optim.AdamW(model.parameters(), fused=True), torch.randint(256, (2, 129))

def loss_of(model, batch):
    scores = model(batch[:, :-1])
    return cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())

def plain_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()

# %% [markdown]
# Four numbers describe a step:
#
# - **tokens/s**, over all ranks; here a token is one character;
# - **MFU**, *model FLOPs utilization*: the operations that the model needs, divided by the step's time and by the
#   hardware's peak. A transformer needs about 6 operations per parameter and token: 2 in forward, 4 in backward. Large
#   GPU runs report about 0.4;
# - **memory**: the most bytes that a rank holds at once;
# - **exposed communication**: the time that communication adds to the step. To find it, measure the step twice, once
#   under `no_sync()`, which turns DDP's communication off, and take the difference. Communication that runs while
#   backward computes is **hidden**.
#
# Other programs can only slow a step down, so `fastest` keeps the shortest time of several runs:

# %%
# %%writefile measuring.py
import time
import torch, torch.distributed as dist
from lockstep.ranks import mark, observe
from step_table import peak_memory

def fastest(steps, repeats):
    """Seconds of each step's fastest run."""
    best = [float("inf")] * len(steps)
    for _ in range(repeats):
        for number, step in enumerate(steps):
            dist.barrier()  # all ranks start together
            began = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)  # the slowest rank counts
            best[number] = min(best[number], took.item())
    return best

# %% [markdown]
# A GPU's peak is in its data sheet: 989 TFLOP/s for an H100 in bfloat16. For your CPU, `measure` (below) times a large
# matrix product. `peak_memory` adds up the tensors that exist at the same time; on a GPU, use
# `torch.cuda.max_memory_allocated()`.

# %%
# %%writefile --append measuring.py

def measure(one_step, model, optimizer, batch, tokens):
    """Measure a step in which this rank trains on `tokens` tokens, and report it."""
    def step():
        one_step(model, optimizer, batch)
    def alone():
        with model.no_sync():  # the replicas diverge, but only the time counts
            step()
    a = torch.ones(1024, 1024)
    def product():
        a @ a
    fastest([step, alone], 1)  # warm-up
    together, without = fastest([step, alone], 8)
    mark("one step")
    step()
    mark("end")
    parameters = sum(p.numel() for p in model.parameters())
    kept = 16 * parameters  # the parameters, Adam's two moments, DDP's buckets: 4 bytes each
    observe("measured", {
        "step": together, "alone": without, "tokens": tokens, "parameters": parameters,
        "peak": 2 * 1024**3 / fastest([product], 20)[0], "memory": kept + peak_memory(alone)})

# %% [markdown]
# On one machine, communication is too fast to matter, so `--bandwidth 1gbit` makes the ranks share one link of 1
# Gbit/s. First, measure DDP with its defaults:

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
from gpt_step import *
from measuring import measure

measure(plain_step, *start(), tokens=2 * 128)

# %% tags=["needs-bandwidth"]
from step_table import StepTable

table = StepTable()
table.add("DDP's defaults", run)

# %% [markdown]
# Each rank sends 3.5 MB of gradients in two all-reduces. The column "exposed" shows how much longer they make the
# step: more than half of it. The bar is the time per token: blue is computing (the step under `no_sync()`), green is
# what communication adds.

# %%
quiz("04_optimization/one_step")

# %% [markdown]
# ## Profile first
#
# When is each gradient ready, and when does each bucket's all-reduce run?

# %%
# %%writefile gpt_trace.py
from gpt_step import *

def announce(model):
    """Mark the moment at which each gradient is ready."""
    for name, parameter in model.named_parameters():
        def ready(_, name=name):
            mark(f"ready {name}")
        parameter.register_post_accumulate_grad_hook(ready)

def traced(steps=8, **options):
    model, optimizer, batch = start(**options)
    announce(model)
    for _ in range(steps):
        optimizer.zero_grad()
        mark("forward")
        loss = loss_of(model, batch)
        mark("backward")
        loss.backward()
        mark("step")
        optimizer.step()
        mark("end")

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --timeline --into defaults --quiet
from gpt_trace import traced

traced()

# %% tags=["needs-bandwidth"]
timeline(defaults, step="fastest") if defaults else None

# %% [markdown]
# The first bucket, about 1 MiB, is launched during backward, so some or all of its all-reduce is hidden. The second
# holds all other gradients. It is launched when the last gradient is ready, so its all-reduce is fully exposed:
# backward only waits for it (hatched).
#
# The picture, like the table, shows the fastest of eight steps. This step is slower than the one in the table, because
# Lockstep records each mark and each collective.
#
# `torch.profiler` records every operation, here of the third step:

# %%
# %%writefile profiled.py
from gpt_step import *
from torch.profiler import ProfilerActivity, profile, schedule

job = start()
plan = schedule(wait=1, warmup=1, active=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan) as prof:
    for _ in range(3):
        plain_step(*job)
        prof.step()
if dist.get_rank() == 0:
    prof.export_chrome_trace("profiled.json")  # open it in ui.perfetto.dev
    wanted = ("gloo:all_reduce", "DistributedDataParallel.forward", "aten::addmm", "Optimizer.step")
    for event in prof.key_averages():
        if event.key.startswith(wanted):
            print(f"{event.key:34} {event.count} times")

# %%
run = ranks.run(ranks.Script("profiled.py"), 2)
print(*[line for line in run.ranks[0].stdout.splitlines() if line.endswith("times")], sep="\n")

# %% [markdown]
# The step has two all-reduces, one for each bucket. With NCCL, look for `nccl:all_reduce` instead. On GPUs, sort
# events by `device_time_total`.
#
# *GPU.* Nsight Systems (`nsys profile`) traces a whole machine. HTA (Holistic Trace Analysis) adds up the time in which
# a GPU only communicates.
#
# ### An all-reduce includes waiting
#
# Rank 1 is half a second late. How long does each rank's all-reduce take?

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
print(f"all-reduce of 4 bytes: about {round(2 * waited) / 2} s")

# %% [markdown]
# Rank 0 waited for rank 1. So compare all ranks' profiles: the *shortest* all-reduce is on the rank that is late.
#
# ### Timing on a GPU
#
# *GPU.* A CUDA call only queues a **kernel** (a program that runs on the GPU) and returns. A clock around the step
# measures only the queuing. Either wait for the GPU before you read the clock, or let the GPU record the times:
#
# ```
# torch.cuda.synchronize()                  # either: call it before each time.perf_counter()
#
# before = torch.cuda.Event(enable_timing=True)  # or: let the GPU record
# after = torch.cuda.Event(enable_timing=True)
# before.record(); step(); after.record()   # the CPU doesn't wait
# after.synchronize()
# milliseconds = before.elapsed_time(after)
# ```
#
# A queue of kernels is a **stream**. NCCL uses a separate stream, so its collectives can overlap with backward.
#
# ### Skip the first steps
#
# Never time the first steps: DDP rebuilds its buckets after the first. And start the clock after `DDP()`, whose first
# call imports PyTorch's compiler:

# %%
program = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = "torch._dynamo" in sys.modules
DDP(torch.nn.Linear(1, 1))
print("compiler imported before DDP():", before, "  after:", "torch._dynamo" in sys.modules, flush=True)
os._exit(0)
"""
print(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)

# %%
quiz("04_optimization/long_all_reduce")

# %% [markdown]
# ## The roofline
#
# How fast could the step be? A **roofline** compares two times. For *P* parameters, *T* tokens per rank and *N* ranks:
#
# - **computing** takes 6·*P*·*T* operations, divided by the processor's speed;
# - **sending** takes 2(*N* − 1)/*N* times the gradients' bytes (chapter 1), divided by the link's speed.
#
# At best, the step takes the longer of the two; without overlap, their sum.
#
# First check the factor 6:

# %%
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gpt import GPT

def operations(model, x):
    """Operations of forward and backward, per parameter."""
    # MATH computes attention with ordinary products, which the counter sees
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x).float().sum().backward()
    return counter.get_total_flops() / sum(p.numel() for p in model.parameters())

image = torch.ones(1, 64, 56, 56, requires_grad=True)
print(f"our GPT, per token:        {operations(GPT(), torch.randint(256, (2, 128))) / 256:8.1f}")
print(f"a convolution, per image:  {operations(torch.nn.Conv2d(64, 64, 3, padding=1), image):8.1f}")

# %% [markdown]
# The GPT needs more than 6, because attention also multiplies activations with each other. A convolution uses each
# weight at every position of the image, here 56 × 56. So 6 holds only if each token uses each weight once, as
# in a transformer. For any other network, count the operations like this.
#
# Links differ by a factor of thousands. The next cell takes bytes per second, in one direction, from data sheets; real
# links are slower:

# %%
links = {"NVLink, H100": 450e9, "PCIe 5, 16 lanes": 64e9, "InfiniBand, 400 Gbit/s": 50e9,
         "Ethernet, 100 Gbit/s": 12.5e9, "Ethernet, 10 Gbit/s": 1.25e9, "ours, 1 Gbit/s": 0.125e9}
print("all-reduce of the gradients of 10⁹ parameters on 8 ranks:")
for name, link in links.items():
    print(f"{name:24}{2 * 7 / 8 * 4e9 / link * 1e3:10.0f} ms")

# %% [markdown]
# NVIDIA's `nccl-tests` measure a link's **bus bandwidth**: the bytes that a rank sends in an all-reduce, divided by the
# time. On our link:

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
import torch
import torch.distributed as dist
from lockstep.ranks import observe
from measuring import fastest

dist.init_process_group("gloo")
found = {}
for kilobytes in (4, 16, 1024, 4096):
    tensor = torch.ones(kilobytes * 256)
    def reduce():
        dist.all_reduce(tensor)
    # 2(N − 1)/N is 1 for two ranks
    found[f"{kilobytes} KiB"] = tensor.nbytes / fastest([reduce], 4)[0] / 1e6
observe("bandwidth", found)

# %% tags=["needs-bandwidth"]
bars(run.observed("bandwidth")[0], unit="MB/s", title="bus bandwidth of an all-reduce") if run else None

# %% [markdown]
# Large tensors reach about half of the link's 125 MB/s, because two ranks share it. Small tensors spend most of
# their time on latency, which is why DDP sends buckets.
#
# Now compare computing and sending on GPUs that reach 400 TFLOP/s, linked by InfiniBand:

# %%
def roofline(parameters, tokens, ranks, flops=4e14, link=50e9):
    """Seconds to compute, and seconds to send: the step takes at least the longer of the two."""
    compute = 6 * parameters * tokens / flops
    send = 2 * (ranks - 1) / ranks * 4 * parameters / link
    return compute, send

print("more tokens per rank, 8 ranks")
for parameters, tokens in ((1e9, 1024), (1e9, 8192), (1e9, 65536), (1e8, 8192)):
    compute, send = roofline(parameters, tokens, 8)
    print(f"{parameters:.0e} parameters{tokens:7} tokens", end="")
    print(f"{compute * 1e3:8.0f} ms{send * 1e3:6.0f} ms {send / compute:6.2f}")
print("one global batch of 262144 tokens, shared by more ranks")
for count in (8, 32, 128):
    compute, send = roofline(1e9, 262144 / count, count)
    print(f"{count:4} ranks{compute * 1e3:21.0f} ms{send * 1e3:9.0f} ms {send / compute:6.2f}")

# %% [markdown]
# The columns are computing, sending, and sending divided by computing. Only backward, two thirds of the computing, can
# hide sending. Below a ratio of 0.67, it can hide nearly all of it. Above 0.67, some stays exposed: send less, or less
# often.
#
# - **Tokens per rank decide the ratio.** A smaller model shrinks both times equally.
# - **With a fixed global batch, more ranks raise the ratio.** With 128 ranks, each rank sends about as many bytes as
#   with 8, but computes only 1/16 as much.
#
# In our step, each rank needs 6 · 875,264 · 256 = 1.3 billion operations. Together, the ranks send 7 MB at 125 MB/s,
# which takes 56 ms:

# %% tags=["needs-bandwidth"]
if table.rows:
    row = table.rows["DDP's defaults"]
    sending = 2 * row["sent"] / 125 * 1e3
    times = {
        "the step, measured": {"computing": row["alone"], "exposed communication": row["exposed"]},
        "predicted without overlap": {"computing": row["alone"], "sending": sending},
        "sending": {"sending": sending},
        "computing, measured": {"computing": row["alone"]},
        "computing at this CPU's peak": {"computing": row["MFU"] * row["step"]}}  # operations / peak
    picture = stacked(times, unit="ms", title="DDP's defaults", timed=True)
picture if table.rows else None

# %% [markdown]
# The step takes longer than sending alone, but less than computing and sending together, because overlap hides part of
# the sending. Sending takes longer than backward (two thirds of the computing), so overlap can't hide all of it.

# %%
quiz("04_optimization/roofline")

# %% [markdown]
# ## Buckets and overlap
#
# In this picture, forward takes 2 units of time and backward 4. Sending each of four buckets takes 0.8, or 1.6 over a
# slower link. Below each timeline, you see how much longer the step takes than its 6 units of computing:
#
# ![Compared with the same step without communication: sending after backward makes it 53 % longer, overlap 13 % longer, and overlap over a link half as fast 57 % longer](pictures/exposed.svg)
#
# Over the slower link, each bucket waits for the one before it, so 3.4 units are left after backward.
#
# **Change 1: start sending earlier.** `bucket_cap_mb=0.5` makes smaller buckets. **Predict**: how many buckets, how
# many bytes, and how many buckets are launched before the last gradient is ready? Replace each `None`.

# %%
guess = [None, None, None]  # all-reduces, bytes in total, launched early

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --timeline --into small --quiet
from gpt_trace import traced

traced(bucket_cap_mb=0.5)

# %% tags=["needs-bandwidth"]
from measured import measured

measured(small, guess)
timeline(defaults, small, titles=("defaults", "buckets of 0.5 MiB"), step="fastest") if small else None

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
from gpt_step import *
from measuring import measure

measure(plain_step, *start(bucket_cap_mb=0.5), tokens=2 * 128)

# %% tags=["needs-bandwidth"]
table.add("buckets of 0.5 MiB", run)

# %% [markdown]
# With the defaults, one bucket of two is launched during backward; with buckets of 0.5 MiB, all but the last are. But
# backward fills the buckets faster than the link can send them: gloo sends two at a time, and the others queue (the
# thin lines). So most of the sending stays exposed.
#
# Each bucket also costs latency, so smaller isn't always better.
#
# The column "vs. first" compares tokens/s with the table's first row. The times vary by a few per cent from run to run,
# so a row is called "fastest" only if it leads by more than 5 %.
#
# ### The default
#
# By default, the first bucket holds only 1 MiB, so that it is launched early. Each later bucket holds 25 MiB. If you
# pass 25 yourself, the first bucket is large, too:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
for cap in (None, 25):
    model = DDP(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]), bucket_cap_mb=cap)
    sizes = []
    def note(state, bucket):  # DDP calls it with each full bucket: see "Compression"
        sizes.append(f"{bucket.buffer().nbytes / 2**20:.1f} MiB")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    model.register_comm_hook(None, note)
    for step in range(3):
        sizes.clear()
        model(torch.ones(1, 512)).sum().backward()
    if dist.get_rank() == 0:
        print(f"bucket_cap_mb={cap}: buckets of", *sizes)

# %%
quiz("04_optimization/bucket_size")

# %% [markdown]
# ## Accumulation
#
# **Change 2: send less often.** Split a step's batch into **micro-batches**, add up their gradients, and synchronize
# once. By default, DDP averages in *every* backward:

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
    """How many gradient all-reduces rank 0 started."""
    return sum(call.inside == "backward" for call in run.collectives[0])

print("every backward:", reductions(plain), "  with no_sync:", reductions(once))

# %% [markdown]
# Only `no_sync` saves traffic. With or without it, divide each loss by the number of micro-batches, and the gradient
# equals that of one big batch:

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
# Two common mistakes:
#
# **Forward runs outside `no_sync`.** DDP decides in forward whether the coming backward communicates:

# %%
# %%ranks 2 --into late --quiet
from accumulated import *

model, micro_batches = start()
for number, x in enumerate(micro_batches):
    loss = model(x).square().mean() / len(micro_batches)  # BUG: outside of no_sync
    with nullcontext() if number == 3 else model.no_sync():
        loss.backward()

# %%
print("no_sync around backward only:", reductions(late), "all-reduces")

# %% [markdown]
# **The last group is incomplete.** With ten micro-batches and a step at each `(i + 1) % 4 == 0`, no step follows the
# last two. Each micro-batch here has gradient ¼, so a correct step prints 1:

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
        if (i + 1) % 4 == 0:  # BUG: the ninth and the tenth are left over
            print(model.module.weight.grad.item(), end=" ")
            optimizer.step()
            optimizer.zero_grad()

# %% [markdown]
# The first step of epoch 1 adds up six micro-batches (1.5), and the last two of the final epoch are lost. An extra
# step for these two is worse. Their gradients were never averaged, so the replicas diverge:

# %%
# %%ranks 2 --watch-replicas
from accumulated import *

model, _ = start()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
micro_batches = torch.randn(10, 4).split(1)
for i, x in enumerate(micro_batches):
    with nullcontext() if (i + 1) % 4 == 0 else model.no_sync():
        (model(x).square().mean() / 4).backward()
    if (i + 1) % 4 == 0 or i == 9:  # BUG: the last two micro-batches were never synchronized
        optimizer.step()
        optimizer.zero_grad()

# %% [markdown]
# The extra step is also too small, because it divides the sum of two micro-batches by four. So synchronize the last
# micro-batch of every step, and weight each micro-batch by its share of the step's samples.
#
# Now train the GPT with four micro-batches per step:

# %%
# %%writefile accumulating.py
from contextlib import nullcontext
from gpt_step import *

def accumulated_step(model, optimizer, batch):
    """One step from four micro-batches."""
    optimizer.zero_grad()
    for number in range(4):
        with nullcontext() if number == 3 else model.no_sync():
            (loss_of(model, batch) / 4).backward()
    optimizer.step()

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
from accumulating import *
from measuring import measure

measure(accumulated_step, *start(bucket_cap_mb=0.5), tokens=4 * 2 * 128)

# %% tags=["needs-bandwidth"]
table.add("0.5 MiB, 4 micro-batches", run)

# %% [markdown]
# A step now trains on four times the tokens for the same bytes. Only the last backward hides communication, so the
# exposed time per step stays about the same, and per token it is a quarter. A larger **global batch** (all ranks'
# samples in a step) changes the training: see "Batch and learning rate".

# %%
quiz("04_optimization/accumulate")

# %% [markdown]
# ## Exercise: implement accumulate
#
# *Medium, 20 minutes.* Open [exercises/accumulate.py](../exercises/accumulate.py).

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
# Read one micro-batch ahead: if none follows, you hold the last.
# </details>
#
# <details><summary>The gradient is wrong if the ranks hold different numbers of samples</summary>
# Weight each micro-batch by its samples, divide by the samples of <em>all</em> ranks, and undo DDP's division.
# </details>
#
# `./lockstep solution accumulate` shows the solution.
#
# ## Mixed precision
#
# Accumulation computes more per byte sent. Can you also compute faster?
#
# **Change 3: compute in fewer bits.** Under **autocast**, PyTorch chooses a type for each operation: 16 bits (float16
# or bfloat16) for matrix products, float32 for losses. Does that shrink communication too?

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
# No: parameters, gradients and DDP's messages stay float32. **Autocast can save time and memory, but not
# communication.**
#
# | property | float16 | bfloat16 |
# |---|---|---|
# | largest number | 65504 | 3.4e38, like float32 |
# | gap between 1 and the next number | 0.001 | 0.008 |
# | smallest positive number | 6e-8 | 9e-41 |
# | needs a loss scaler | yes | no |
# | fast on | NVIDIA GPUs since 2017 (Volta) | NVIDIA GPUs since 2020 (Ampere), recent CPUs |
#
# Measure the GPT's step under autocast:

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
from gpt_step import *
from measuring import measure

def step(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # + forward and loss only
        loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()

measure(step, *start(bucket_cap_mb=0.5), tokens=2 * 128)

# %% tags=["needs-bandwidth"]
table.add("0.5 MiB, autocast", run)

# %% [markdown]
# The step needs less memory. Whether it computes faster depends on the CPU: some multiply bfloat16 fast, others
# slowly. So the next changes compute in float32 again.
#
# *GPU.* **Tensor cores** are a GPU's units for matrix products. In 16 bits, they are many times faster than the other
# units in float32.
#
# ### Scaling and clipping
#
# In float16, small gradients become zero. `GradScaler` multiplies the loss by a large *scale* before backward, and
# divides the gradients by it before the step. If a gradient overflows, the scaler skips the step and lowers its scale.
# The order of these lines matters:
#
# ```
# scaler.scale(loss).backward()
# scaler.unscale_(optimizer)                                   # before anything reads the gradients
# torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
# scaler.step(optimizer)                                       # skips the step after an overflow
# scaler.update()
# ```
#
# By default, the scale starts at 65536. Without `unscale_`, the gradients that you clip to `max_norm` are 65536 times
# too large, and then `scaler.step` divides the clipped gradients by 65536:

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
# Without `unscale_`, the weights hardly move. (With Adam you would hardly notice the mistake, because Adam's steps
# don't depend on the gradients' scale.)
#
# ### One scaler per rank
#
# Each rank has its own scaler. **All make the same decision, because their averaged gradients are equal.** Here rank 1
# overflows, so the average is infinite on every rank:

# %%
# %%ranks 3
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
before = model.module.weight.item()
x = torch.full((1, 1), 1e38 if dist.get_rank() == 1 else 1.0)  # overflows on rank 1
scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
print("weight moved by", model.module.weight.item() - before, "  scale now", scaler.get_scale())
assert scaler.get_scale() == 512

# %% [markdown]
# If the gradients are never averaged, each rank decides alone:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x = torch.full((1, 1), 1e38 if dist.get_rank() == 1 else 1.0)  # overflows on rank 1
with model.no_sync():  # BUG: no backward averages the gradients before the step
    scaler.scale(model(x).sum()).backward()
scaler.step(optimizer)
scaler.update()
print("scale now", scaler.get_scale())

# %% [markdown]
# Only rank 1 skipped the step and lowered its scale. From now on the ranks' weights differ.
#
# ### Other ways to compute less
#
# - *GPU.* **TF32** rounds the inputs of float32 matrix products to 11 significant bits, so that tensor cores can
#   compute them: `torch.set_float32_matmul_precision("high")`.
# - **`torch.compile`** fuses several operations into one kernel ("Compiling", in the appendix).
# - **A fused optimizer** updates all parameters in a few kernels: `AdamW(..., fused=True)`. It works on CPUs, too. Our
#   GPT has 52 parameter tensors. Without `fused`, a CPU updates them one after the other, with about ten operations
#   each:

# %%
from step_table import count_operations

for fused in (False, True):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes its state
    print(f"fused={fused!s:6}{count_operations(optimizer.step):5} operations")

# %% [markdown]
# ### Find the bug
#
# The loss is `4 * weight`, so each printed gradient should be 4. What is missing?

# %%
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (4 * weight).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("gradient", weight.grad.item(), end="   ")

# %% [markdown]
# <details><summary>The bug</summary>
# <code>optimizer.zero_grad()</code>. From the second step on, scaled gradients are added to earlier, unscaled ones.
# </details>

# %%
quiz("04_optimization/amp_bytes")

# %% [markdown]
# ## Exercise: implement mixed_precision
#
# *Medium, 15 minutes.* Open [exercises/mixed_precision.py](../exercises/mixed_precision.py).

# %%
contract("mixed_precision", "train_step")

# %%
# %check mixed_precision

# %% [markdown]
# <details><summary>"unscale_() has already been called"</summary>
# Call it once per optimizer and step. <code>scaler.step</code> calls it if you have not.
# </details>
#
# `./lockstep solution mixed_precision` shows the solution.
#
# ## Compression
#
# **Change 4: send fewer bytes.** A **communication hook** replaces DDP's all-reduce. DDP passes it each full bucket,
# and the hook returns a future (a result that arrives later) with the averaged gradients. PyTorch has a hook that casts
# to float16:

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
print("on the wire:", sent[0].tensor, "=", sent[0].nbytes, "bytes instead of", 4 * (64 * 64 + 64))
assert sent[0].nbytes * 2 == 4 * (64 * 64 + 64)

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from accumulating import *
from measuring import measure

model, optimizer, batch = start(bucket_cap_mb=0.5)
model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # +
measure(accumulated_step, model, optimizer, batch, tokens=4 * 2 * 128)

# %% tags=["needs-bandwidth"]
table.add("4 micro-batches, float16 sent", run)

# %% [markdown]
# Each step sends half the bytes, so less time is exposed. But casting takes time, too: compress only if communication
# is exposed.
#
# ### Writing a hook
#
# Your own hook has to follow three rules:
#
# - **Take the mean.** DDP doesn't divide the bucket for you.
# - **Divide before the cast.** The largest float16 is 65504. A gradient of 80000 overflows when you cast it; two
#   gradients of 40000 overflow when the ranks add them.
# - **Name the second argument `bucket`.** DDP checks the name:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def hook(state, gradients):  # BUG: the second argument is not called "bucket"
    return dist.all_reduce(gradients.buffer(), async_op=True).get_future()

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2)).register_comm_hook(None, hook)

# %% [markdown]
# In the exercise you write a hook for both 16-bit types. PyTorch's own bfloat16 hook doesn't work with gloo:

# %%
# %%ranks 1 --expect raised
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
DDP(torch.nn.Linear(2, 2)).register_comm_hook(None, default_hooks.bf16_compress_hook)

# %% [markdown]
# ### Error feedback
#
# Each cast rounds. If a gradient stays the same, it is rounded in the same direction every time, and the errors add
# up. **Error feedback** keeps what a cast lost, the *residual*, and adds it to the next gradient. Here is 1.001, sent
# a hundred times in bfloat16:

# %%
gradient, residual, plain_sum, fed_sum = 1.001, 0.0, 0.0, 0.0
for _ in range(100):
    plain_sum += torch.tensor(gradient).bfloat16().item()
    cast = torch.tensor(gradient + residual).bfloat16().item()
    residual = gradient + residual - cast
    fed_sum += cast
print(f"exact {100 * gradient:.3f}   cast {plain_sum:.3f}   with error feedback {fed_sum:.3f}")

# %% [markdown]
# A hundred casts lost 0.1 in total. With error feedback, only the latest residual is missing.

# %%
quiz("04_optimization/hook_mean")

# %% [markdown]
# ## Exercise: implement compress_gradients
#
# *Medium, 20 minutes.* Open [exercises/compress_gradients.py](../exercises/compress_gradients.py).

# %%
contract("compress_gradients", "compress_hook", "register")

# %%
# %check compress_gradients

# %% [markdown]
# <details><summary>Error feedback is right at first and wrong from the second step on</summary>
# After the first step, DDP rebuilds its buckets with different sizes, in a different order. Keep residuals per
# parameter.
# </details>
#
# `./lockstep solution compress_gradients` shows the solution.
#
# ## Memory
#
# **Change 5: make room for a larger batch.** With more tokens per rank, a step computes more for the same bytes sent.
# But it also keeps more **activations**, the tensors that backward needs from forward:

# %%
from torch.nn.functional import cross_entropy
from step_table import peak_memory

def training(sequences, parts=1, half=False, recompute=False):
    """The peak memory, in MB, of a step on this many sequences."""
    model = GPT(recompute)
    def step():
        for tokens in torch.randint(256, (sequences, 129)).chunk(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                scores = model(tokens[:, :-1])
            cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return peak_memory(step) / 1e6

# %%
print(f"16 sequences                        {training(16):6.1f} MB")
print(f"4 micro-batches of 4                {training(16, parts=4):6.1f} MB")
print(f"autocast to bfloat16                {training(16, half=True):6.1f} MB")
print(f"layers recomputed in backward       {training(16, recompute=True):6.1f} MB")

# %% [markdown]
# Micro-batches save the most. If even one is too large, use **activation checkpointing** (the last line): forward
# keeps only each layer's input, and backward computes the layer again. This second forward adds a third to the
# operations. Always pass `use_reentrant=False`; the appendix shows why. How much time does it add to our step?

# %% tags=["needs-bandwidth"]
# %%ranks 2 --bandwidth 1gbit --into run --quiet
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from accumulating import *
from measuring import measure

model, optimizer, batch = start(bucket_cap_mb=0.5, recompute=True)  # +
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
measure(accumulated_step, model, optimizer, batch, tokens=4 * 2 * 128)

# %% tags=["needs-bandwidth"]
table.add("the same, recomputed layers", run)

# %% [markdown]
# The step needs less memory, but computing takes about half as long again. Recomputing pays off if you use the freed
# memory for a larger batch. Another saving costs no time: with `gradient_as_bucket_view=True`, the gradients exist
# only once, in DDP's buckets.
#
# *GPU.* `torch.cuda.memory._record_memory_history()` and `_dump_snapshot("memory.pickle")` record every allocation;
# `pytorch.org/memory_viz` draws them.

# %%
quiz("04_optimization/memory")

# %% [markdown]
# ## Predict, then measure
#
# You can predict a step's time from its bytes, its buckets, and its time without communication. Two things can
# limit it:
#
# - **the processor**: all buckets but the last are hidden. The step takes its computing time, plus the time to send the
#   last bucket;
# - **the link**: it is busy from the moment the first bucket is full. The step takes the time until then, plus the time
#   to send all bytes.
#
# The prediction is the longer of the two times. It assumes that all buckets have the same size, and that backward
# takes two thirds of the computing, or three quarters if it computes the layers again. Only the last micro-batch's
# backward can hide communication.

# %%
def predicted(row, micro_batches, recomputed):
    """Milliseconds of a step on two ranks that share 125 MB/s."""
    send = 2 * row["sent"] / 125 * 1e3  # both ranks' bytes pass through the one link
    backward = (3 / 4 if recomputed else 2 / 3) * row["alone"] / micro_batches
    last = send / row["calls"]
    first = row["alone"] - backward * (1 - 1 / row["calls"])
    return max(row["alone"] + last, first + send)

# %% tags=["needs-bandwidth"]
if table.rows:
    both = {}
    for name, row in table.rows.items():
        both[name] = row["step"], predicted(row, round(row["tokens"] / 256), "recomputed" in name)
    picture = compared(both, unit="ms", title="a step, measured and predicted")
picture if table.rows else None

# %% [markdown]
# Steps usually take a few per cent longer than predicted: the prediction leaves out latency, casting, and the
# processor's own work for sending.
#
# Accumulation and float16 send fewer bytes per token. Smaller buckets only start sending sooner: the link still needs
# 56 ms.

# %%
quiz("04_optimization/predict")

# %% [markdown]
# ## Scaling
#
# **Strong scaling** keeps the global batch fixed: do more ranks finish it sooner? **Weak scaling** keeps the batch per
# rank fixed: does each rank keep its speed? Both are measured as **efficiency**: samples per second per rank, relative
# to the run on the fewest ranks.
#
# | seconds per step | 1 rank | 4 ranks | efficiency |
# |---|---|---|---|
# | same global batch (strong) | 1.0 | 0.40 | 1.0 / (4 · 0.40) = 62.5 % |
# | same batch per rank (weak) | 1.0 | 1.25 | 1.0 / 1.25 = 80 % |
#
# **Find the bug.** A benchmark times 100 steps of 32 samples per rank and prints 25 % efficiency instead of 100 %. What
# does its formula, `seconds[1] / seconds[4] / 4`, leave out?

# %%
seconds = {1: 2.0, 4: 2.0}  # for 100 steps of 32 samples per rank: perfect weak scaling
rate = {n: 100 * 32 * n / taken for n, taken in seconds.items()}  # samples per second
print(f"the benchmark: {seconds[1] / seconds[4] / 4:.0%}", end="   ")
print(f"samples per second per rank: {rate[4] / 4 / rate[1]:.0%}")

# %% [markdown]
# It leaves out the samples: four ranks trained on four times as many samples as one.
#
# Distrust figures such as "7.5 times faster on 8 GPUs" or "99 % of bad scaling is configuration" if they name no
# model, batch or network.
#
# ### Unequal machines
#
# Rank 1 takes 0.1 s longer per step, and the process group's timeout is 1 s. Does a job of 15 steps survive?

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
longer = time.perf_counter() - began
print(f"15 steps in more than {int(longer)} s, the fastest one in {min(steps[1:]):.1f} s")

# %% [markdown]
# Yes: the timeout applies to each collective, not to the job. But every rank steps at the pace of the slowest. Give
# the slow device a smaller batch, and weight the losses by samples, as in `accumulate`. Don't make a process group for
# each kind of GPU. Each group would train its own model, like the two groups below:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
kinds = [dist.new_group(members) for members in ([0, 1], [2, 3])]  # every rank creates both groups
ddp = DDP(torch.nn.Linear(1, 1, bias=False), process_group=kinds[dist.get_rank() // 2])
ddp(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
print("my gradient", dist.get_rank(), "  the mean of my group:", ddp.module.weight.grad.item())

# %%
quiz("04_optimization/efficiency")

# %% [markdown]
# ## Exercise: implement measure_step
#
# *Medium, 20 minutes.* Open [exercises/measure_step.py](../exercises/measure_step.py). Write three functions: one
# measures the exposed communication, one compares runs on different numbers of ranks, and one predicts a step's time.

# %%
contract("measure_step", "exposed_communication", "scaling_efficiency", "predict_step")

# %%
# %check measure_step

# %% [markdown]
# <details><summary>"the second kind of step was always measured later"</summary>
# Alternate the two kinds, so that a machine that slows down slows both.
# </details>
#
# <details><summary>The prediction is too short with one bucket</summary>
# A single bucket is full only when backward is over, so nothing is hidden.
# </details>
#
# `./lockstep solution measure_step` shows the solution.

# %% [markdown]
# ## Data loading
#
# Loop over the loader without training. If that takes about as long as an epoch, the loader limits you. Then check
# these points:
#
# - `num_workers` is **per rank**: with 4 ranks and 8 workers each, a node runs 32 workers.
# - `persistent_workers=True` keeps workers from one epoch to the next.
# - *GPU.* With `pin_memory=True` in the loader, `.to(device, non_blocking=True)` doesn't make the CPU wait for the
#   copy. To copy while the GPU computes, use a second stream.
# - *GPU.* `torchrun --numa-binding=node` runs each rank on the CPU cores nearest its GPU.
# - An `IterableDataset` has no sampler. Divide the stream over ranks *and* workers, or every worker delivers
#   everything:

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
    print(f"divided: {share!s:5}  got {len(seen):2} of 12, {len(set(seen))} different")

# %%
quiz("04_optimization/workers")

# %% [markdown]
# ## Batch and learning rate
#
# More ranks or more accumulation mean fewer steps per epoch. Train one epoch of a least-squares problem on one rank,
# on four, and on four with four times the learning rate:

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
# Four ranks with four times the learning rate reach a loss of about 3, as one rank does; with the old rate, they are
# still at 55. This is the **linear scaling rule**: multiply the learning rate by the same factor as the global batch.
# The rule fails for very large batches. Raise the rate over the first steps (**warm-up**), because a large initial
# rate can make training diverge. With Adam, the usual factor is the square root: 2 instead of 4.

# %%
quiz("04_optimization/fewer_steps")

# %% [markdown]
# ## Beyond DDP
#
# If a whole copy of the model doesn't fit on a GPU, each rank keeps only a part, a **shard**. ZeRO (*zero redundancy
# optimizer*) defines three stages. PyTorch offers the first as an optimizer, and the other two as `fully_shard`
# (FSDP2), which gathers a layer's parameters just before they are needed and frees them afterwards. HSDP (hybrid
# sharding) arranges the ranks in a grid, a **device mesh**: one dimension replicates the model, the other shards it.
#
# | stage | parameters | gradients | optimizer state | in PyTorch |
# |---|---|---|---|---|
# | DDP | whole | whole | whole | `DistributedDataParallel` |
# | ZeRO-1 | whole | whole | sharded | `ZeroRedundancyOptimizer` |
# | ZeRO-2 | whole (FSDP2: sharded between steps) | sharded | sharded | `fully_shard(reshard_after_forward=False)` |
# | ZeRO-3 | sharded | sharded | sharded | `fully_shard` |
# | HSDP (hybrid) | sharded within a node, replicated across nodes | like the parameters | like the parameters | `fully_shard` on a mesh of two dimensions |

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
print(f"parameters: {parameters}   Adam's state: {2 * parameters}, on this rank: {state}")

# %% [markdown]
# Each of the two ranks keeps half of Adam's state. Next, shard the parameters too. The next cell trains three layers
# for one step, in four ways:

# %%
# %%ranks 4 --into sharded --quiet
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from lockstep.ranks import mark, observe

dist.init_process_group("gloo")
flat = init_device_mesh("cpu", (4,))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ways = {"ZeRO-3": {"mesh": flat}, "ZeRO-2": {"mesh": flat, "reshard_after_forward": False},
        "HSDP": {"mesh": grid}, "ZeRO-3, bfloat16": {"mesh": flat, "mp_policy": bf16}}
for name, options in ways.items():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters())
    mark(name)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    here = sum(p.to_local().numel() for p in model.parameters())
    observe(name, f"{here:5} of 12480 parameters here, {model[0].weight.dtype}")

# %%
from collections import Counter
from step_table import in_order

sent = {}
for event in in_order(sharded.ranks[0]):
    if hasattr(event, "name"):
        name = event.name
        sent[name] = Counter()
    else:
        kind = event.kind.replace("_into_tensor", "").replace("_tensor", "")
        sent[name][f"{kind} of {event.tensor.split(' × ')[1]}"] += 1
for name, calls in sent.items():
    print(f"{name}: {sharded.observed(name)[0]}")
    print("   ", ", ".join(f"{count} {call}" for call, count in calls.items()))

# %% [markdown]
# ZeRO-3 gathers each layer twice, in forward and in backward; ZeRO-2 gathers it once. HSDP adds an all-reduce per
# layer between replicas. With `MixedPrecisionPolicy`, layers are gathered in bfloat16 and gradients reduced in
# float32; shards stay float32.
#
# In float32, a parameter takes 4 bytes, its gradient 4 and Adam's two moments 8. How much does each rank need?

# %%
def gigabytes(parameters, ranks):
    """GB per rank for parameters, gradients and Adam's state, without buckets and activations."""
    shards = {"DDP": (1, 1, 1), "ZeRO-1": (1, 1, ranks), "ZeRO-3": (ranks, ranks, ranks)}
    return {name: parameters * (4 / p + 4 / g + 8 / s) / 1e9 for name, (p, g, s) in shards.items()}

for parameters in (1e8, 1e9, 7e9):
    sizes = {name: round(size, 1) for name, size in gigabytes(parameters, 8).items()}
    print(f"{parameters:.0e} parameters on 8 ranks:", sizes)

# %% [markdown]
# With 7 billion parameters, a rank needs 112 GB with DDP, and 14 GB with ZeRO-3. **Use DDP while the model fits, then
# FSDP2.** If one layer is too large for a GPU, split its matrices over GPUs (tensor parallelism). To span nodes with
# slow links, give each node some layers (pipeline parallelism). Chapter 6 measures all of these except pipelines.

# %%
quiz("04_optimization/zero")

# %% [markdown]
# ## Appendix: more options
#
# Skip this on a first reading.
#
# ### Reentrant checkpointing
#
# `use_reentrant=True`, the old form of checkpointing, is still the default. With it, if a checkpointed layer's
# input needs no gradient, the layer's parameters get none, and DDP raises an error in the next step. First, run the new
# form:

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
    torch.manual_seed(0)
    return DDP(Net(reentrant), **options), torch.ones(2, 4)

def show(model):
    gradient = model.module.first.weight.grad
    print("first layer's gradient:", None if gradient is None else f"of norm {gradient.norm():.1f}")

# %%
# %%ranks 1
from checkpointed import *

model, x = start(reentrant=False)
for step in range(2):
    model(x).sum().backward()
show(model)

# %%
# %%ranks 1 --expect raised --quiet
from checkpointed import *

model, x = start(reentrant=True)  # BUG
for step in range(2):
    model(x).sum().backward()

# %% [markdown]
# The flag that this message recommends silences DDP, but the first layer is never trained:

# %%
# %%ranks 1 --into silenced --quiet
from checkpointed import *

model, x = start(reentrant=True, find_unused_parameters=True)  # BUG: silences DDP
for step in range(2):
    model(x).sum().backward()
show(model)

# %%
print(silenced.ranks[0].stdout, end="")

# %% [markdown]
# If the input *does* need a gradient, DDP with this flag raises an error at once:

# %%
# %%ranks 1 --quiet --expect raised
from checkpointed import *

model, x = start(reentrant=True, find_unused_parameters=True)  # BUG: the flag does not fix it
model(x.requires_grad_()).sum().backward()

# %% [markdown]
# If you must use the old form, leave out the flag, and give the layer an input that needs a gradient:

# %%
# %%ranks 1
from checkpointed import *

model, x = start(reentrant=True)  # and x needs a gradient
for step in range(2):
    model(x.requires_grad_()).sum().backward()
show(model)

# %% [markdown]
# ### A static graph
#
# If every step uses the same parameters, set **`static_graph=True`** instead of `find_unused_parameters`. Below, a
# number is a ready gradient, and brackets are an all-reduce that starts:

# %%
# %%ranks 2 --into orders --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

dist.init_process_group("gloo")
for flag in ("find_unused_parameters", "static_graph"):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])
    for number, layer in enumerate(model):
        def ready(_, number=number):
            mark(f"gradient {number}")
        layer.weight.register_post_accumulate_grad_hook(ready)
    ddp = DDP(model, bucket_cap_mb=0.2, **{flag: True})
    for step in range(3):
        loss = ddp(torch.randn(2, 256)).sum()
        mark(f"{flag}, step {step}:")
        loss.backward()

# %%
def show_order(events):
    """Print gradients as numbers, all-reduces in brackets, and each step on a new line."""
    for event in events:
        name = getattr(event, "name", "")
        if name.startswith("gradient "):
            print(name.removeprefix("gradient "), end=" ")
        elif name:
            print(f"\n{name}", end=" ")
        elif event.inside == "backward":
            print(f"[{event.tensor}]", end=" ")

show_order(in_order(orders.ranks[0]))

# %% [markdown]
# With `find_unused_parameters`, buckets are launched early and never rebuilt (chapter 5, "Determinism"), but every step
# has an extra all-reduce, which counts the ranks that used each parameter. In its first two steps, `static_graph`
# learns the graph and sends after the last gradient; then it works like plain DDP.
#
# If a step uses a layer that was unused before, DDP raises an error, as below. If a step skips a layer that was used
# before, no gradient of that step is averaged, and the next step raises the error.

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
# ### Compiling
#
# With DDP, `torch.compile` cuts the model's graph at bucket boundaries, so that buckets are still launched early. It
# passes each graph to a *backend*; the one below only counts the graphs:

# %%
# %%writefile four_layers.py
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    """Four layers, each with a weight of 1 MiB."""
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x

# %%
# %%writefile compiled.py
from four_layers import *

graphs = []
def count(graph, inputs):
    graphs.append(graph)
    return graph.forward

dist.init_process_group("gloo")
for cap in (1, 1000, 0.5):
    graphs.clear()
    torch._dynamo.reset()
    model = torch.compile(DDP(Net(), bucket_cap_mb=cap), backend=count)
    try:
        model(torch.ones(2, 512)).sum().backward()
        print(f"bucket_cap_mb={cap}: {len(graphs)} graphs")
    except AssertionError as error:
        print(f"bucket_cap_mb={cap}: {error}")

# %%
run = ranks.run(ranks.Script("compiled.py"), 1)
print(run.ranks[0].stdout)

# %% [markdown]
# Four layers of 1 MiB make four buckets and four graphs. With one large bucket there are still two graphs, because the
# compiler assumes a first bucket of 1 MiB. The compiler refuses a smaller limit, such as our `bucket_cap_mb=0.5`.
#
# Does the order of `DDP` and `torch.compile` matter? `aot_eager` compiles without fusing:

# %%
# %%ranks 2 --into compiled --quiet
from four_layers import *
from lockstep.ranks import mark

dist.init_process_group("gloo")
for way in ("eager", "compile(DDP)", "DDP(compile)"):
    net = Net()
    for number, layer in enumerate(net.layers):
        def ready(_, number=number):
            mark(f"gradient {number}")
        layer.weight.register_post_accumulate_grad_hook(ready)
    if way == "DDP(compile)":
        net = torch.compile(net, backend="aot_eager")
    model = DDP(net, bucket_cap_mb=1)
    if way == "compile(DDP)":
        model = torch.compile(model, backend="aot_eager")
    for step in range(2):
        loss = model(torch.ones(2, 512)).sum()
        mark(f"{way}, step {step}:")
        loss.backward()

# %%
show_order(in_order(compiled.ranks[0]))

# %% [markdown]
# No: from the second step on, all three ways send each bucket as soon as it is full.
#
# `torch.compile`'s usual backend, `inductor`, writes C++ for CPUs and Triton for GPUs. Without a C++ compiler, the
# *first call* fails, not `torch.compile` itself:

# %%
# %%ranks 1
import torch
import torch._inductor.config as inductor

@torch.compile
def activation(x):
    return torch.sigmoid(x) * x

inductor.cpp.cxx = ("missing-compiler",)  # as on a machine without one
try:
    activation(torch.ones(8))
except RuntimeError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Only chains of elementwise operations get much faster, not matrix products. `benchmarks/compile_ddp.py` measures the
# gain on your machine.
#
# Each rank compiles its own copy, and compiles again when an input dimension first changes. While one rank compiles,
# the others wait. So keep shapes constant, and set the group's timeout longer than compiling takes.
#
# ### Other hooks
#
# **PowerSGD** sends two thin matrices instead of a large one, with error feedback: `ddp_comm_hooks.powerSGD_hook`.
# With gloo, use a single bucket: with several, ranks can start PowerSGD's all-reduces in different orders, and hang.
#
# **Local SGD** lets each rank train on its own for a few steps and then averages the *parameters*. Below, the ranks
# average gradients in the first two steps. They average parameters in the third step, and then in every third step:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP
from rank_spread import spread  # the largest difference between two ranks

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
# ### New arguments
#
# In torch 2.13, `DDP` has arguments that older tutorials don't mention:
#
# - `forward_sync_buffers` replaces `broadcast_buffers`;
# - `batched_grad_copy` copies a bucket's gradients in one operation;
# - `mixed_precision` sets the types to compute in and to send;
# - `bucket_cap_mb_list` gives each bucket a size;
# - `skip_all_reduce_unused_params` doesn't send gradients of unused parameters. If ranks skip *different* ones, DDP
#   averages gradients of different layers, or fails.
#
# Here one of two layers is unused:

# %%
# %%ranks 2 --into skipped --quiet
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import mark

class OneOfTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(256, 256, bias=False) for _ in range(2))
    def forward(self, x):
        return self.a(x)

dist.init_process_group("gloo")
for skip in (False, True):
    torch.manual_seed(0)
    options = {"skip_all_reduce_unused_params": skip, "batched_grad_copy": skip}
    ddp = DDP(OneOfTwo(), find_unused_parameters=True, bucket_cap_mb=0.2, **options)
    mark(f"skip={skip}")
    ddp(torch.ones(1, 256)).sum().backward()

# %%
for event in in_order(skipped.ranks[0]):
    if hasattr(event, "name"):
        print("\n" + event.name, end=":")
    elif event.inside == "backward":
        print(f" {event.nbytes} bytes", end="")

# %% [markdown]
# With `skip=True`, DDP doesn't send the unused layer's bucket. The 8 bytes are the all-reduce that finds unused
# parameters.
#
# ### NCCL's variables
#
# *GPU.* You can rarely improve on NCCL's choices. Besides chapter 3's variables, there are `NCCL_IB_HCA` (which
# InfiniBand adapter), `NCCL_BUFFSIZE` (4 MiB per channel by default), and for experiments `NCCL_ALGO` and `NCCL_PROTO`.
#
# ### Older names
#
# | in older code | today |
# |---|---|
# | `torch.cuda.amp.GradScaler`, `autocast` | `torch.amp.GradScaler("cuda")`, `torch.autocast("cuda")` |
# | `cuda_time_total` | `device_time_total` |
# | `nvprof`, which refuses every GPU since Ampere | `nsys profile` |
# | FairScale's `OSS` | `ZeroRedundancyOptimizer` |
# | FairScale's `ShardedDDP`, which shards gradients and not parameters (ZeRO-2) | `fully_shard(reshard_after_forward=False)` |

# %%
import warnings
from torch.autograd.profiler_util import FunctionEventAvg

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
    torch.cuda.amp.autocast(enabled=False)
print(*[one.message for one in caught if one.category is FutureWarning], sep="\n")
for name in ("device_time_total", "cuda_time_total"):
    print(f"{name:18}", "exists" if hasattr(FunctionEventAvg(), name) else "is gone")

# %%
quiz("04_optimization/reentrant")

# %% [markdown]
# ## Checklist
#
# - **Measure** after warm-up: tokens/s, MFU, memory, exposed time.
# - **Predict** with the roofline: does computing or sending limit you?
# - **Hide**: buckets small enough to be launched during backward.
# - **Send less often**: `no_sync` around all micro-batches but the last.
# - **Send less**: a hook that divides, casts and keeps the residual.
# - **Compute less**: bfloat16 autocast; float16 with `unscale_` before clipping; fused optimizer.
# - **Fit**: activation checkpointing, `gradient_as_bucket_view`, then ZeRO-1 or FSDP2.
# - **Adapt the learning rate**: scale it with the global batch, and warm up.
#
# ## What to remember
#
# - Before you change anything, find out what limits a step, and change only that.
# - Tokens per rank decide whether the link or the processor limits a step.
# - A compression hook shrinks what is sent; autocast doesn't.
# - After an overflow, all ranks skip the step, because their averaged gradients are equal. Never let one rank decide
#   alone.
# - Efficiency is samples per second per rank, relative to the run on the fewest ranks.
#
# In an interview, expect: "Eight GPUs give you only four times the speed. Why?" What would you measure first?
#
# ## What to read next
#
# Chapter 5 makes the job survive failures. Papers: Li et al., "PyTorch Distributed" (VLDB 2020), on buckets; Goyal et
# al., "Accurate, Large Minibatch SGD" (2017); Vogels et al., "PowerSGD" (NeurIPS 2019); Rajbhandari et al., "ZeRO" (SC
# 2020). PyTorch's pages on DDP communication hooks (`pytorch.org/docs/stable/ddp_comm_hooks.html`) and FSDP2
# (`pytorch.org/docs/stable/distributed.fsdp.fully_shard.html`).

# %%
from lockstep.notebook.course_map import course_map

course_map("04_optimization")
