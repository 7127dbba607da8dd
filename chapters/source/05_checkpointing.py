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
# # Chapter 5. Checkpointing and elastic training
#
# Long jobs rarely finish in one go. A disk fills up, a node dies, or the cluster's scheduler, such as SLURM,
# **preempts** the job: it gives the nodes to a more urgent job. In this chapter you break jobs on purpose, and make
# them continue as if nothing had happened.
#
# After this chapter you can
#
# - **list** the parts of a job's state, and say what happens if you forget one;
# - **save** so that a kill at any instant leaves a complete checkpoint;
# - **resume** in the middle of an epoch, bit for bit, and say when that is impossible;
# - **choose** how to save: one file, safetensors, shards, in the background;
# - **restart** a job under torchrun, even with fewer nodes, and stop it when a scheduler asks;
# - **rehearse** all of this before the long run.
#
# About 245 minutes: 95 to read and run, 150 for three exercises and the capstone. You need chapters 2 and 3, and
# chapter 4 for the capstone, but no GPU. What this chapter says about GPUs, NCCL, power failures and network file
# systems was not run here.

# %%
# %load_ext lockstep
import os, re, shutil, subprocess, sys
from pathlib import Path
import torch
from lockstep import cluster, ranks
from lockstep.notebook.bars import bars
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

shutil.rmtree("saved", ignore_errors=True)
os.mkdir("saved")  # for everything that this chapter saves

# %% [markdown]
# # Part 1: Checkpoint and resume
#
# ## What a job's state is
#
# A checkpoint holds what a new process needs to continue. Below, you forget one part at a time. First, the job:

# %%
# %%writefile small_job.py
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Job:
    """48 samples. On two ranks, with batches of 4, an epoch has six steps."""
    def __init__(self, seed=0):
        torch.manual_seed(seed + dist.get_rank())
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
        self.ddp = DDP(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.1)
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, (x[:, 0] > 0).long())
        self.sampler = DistributedSampler(self.data)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        for x, y in DataLoader(self.data, 4, sampler=self.sampler):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(x), y).backward()
            self.optimizer.step()
        self.scheduler.step()

# %% [markdown]
# The job trains for six epochs and saves its state after two. Only rank 0 writes. But each rank has its own random
# generator for dropout, so the ranks first gather the generators' states (`all_gather_object` is an all-gather for
# Python objects):

# %%
# %%ranks 2
from small_job import *

dist.init_process_group("gloo")
job = Job()
for epoch in range(6):
    if epoch == 2:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        state = {"finished": 2, "model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(),
                 "scheduler": job.scheduler.state_dict(), "rng": states}
        if dist.get_rank() == 0:
            torch.save(state, "saved/epoch2.pt")
    job.epoch(epoch)
if dist.get_rank() == 0:
    torch.save(job.model.state_dict(), "saved/through.pt")  # the final weights, uninterrupted

# %% [markdown]
# New processes load this file and train the other four epochs, once correctly and six times with one mistake. How far
# are the final weights from those of the uninterrupted run?

# %%
# %%ranks 2
from small_job import *

dist.init_process_group("gloo")
rank, saved, through = dist.get_rank(), torch.load("saved/epoch2.pt"), torch.load("saved/through.pt")
for mistake in ("none", "no optimizer", "no scheduler", "no set_epoch", "no random states",
                "rank 0's states", "epoch 1 again"):
    job, rates = Job(), []
    job.model.load_state_dict(saved["model"])
    if mistake != "no optimizer":
        job.optimizer.load_state_dict(saved["optimizer"])
    if mistake != "no scheduler":
        job.scheduler.load_state_dict(saved["scheduler"])
    if mistake != "no random states":
        torch.set_rng_state(saved["rng"][0 if mistake == "rank 0's states" else rank])
    for epoch in range(saved["finished"] - (mistake == "epoch 1 again"), 6):
        rates.append(f"{job.optimizer.param_groups[0]['lr']:g}")
        job.epoch(0 if mistake == "no set_epoch" else epoch)
    drift = max((w - through[name]).abs().max().item() for name, w in job.model.state_dict().items())
    job.model.eval()
    loss = nn.functional.cross_entropy(job.model(job.data.tensors[0]), job.data.tensors[1]).item()
    if rank == 0:
        print(f"{mistake:17} off by {drift:7.1e}   loss {loss:.2f}   learning rates {' '.join(rates)}")

# %% [markdown]
# Without a mistake, the weights are the same, bit for bit. Each mistake moves some weight by 0.1 to 0.2. The training
# loss gives no warning: with most mistakes it is even lower.
#
# Without `set_epoch`, every epoch has the order of epoch 0. With "rank 0's states", both ranks drop the same units.
# The last line shows what happens if you save the number of the current epoch, 1, instead of the number of *finished*
# epochs, 2: epoch 1 is trained twice.
#
# | part | where it is | if you forget it |
# |---|---|---|
# | parameters and buffers | `model.state_dict()` | with `parameters()` alone, BatchNorm's statistics restart |
# | optimizer | `optimizer.state_dict()` | its moments restart at zero |
# | scheduler | `scheduler.state_dict()` | the learning rate decays late |
# | gradient scaler | `scaler.state_dict()` | the first steps are skipped |
# | position | the number of finished steps | samples repeat or are missed |
# | random states, **of every rank** | `torch`, `random`, `numpy`, CUDA | dropout repeats the masks of the first epochs |
# | your own variables | best score, early stopping | the wrong model is kept |
#
# A model's state_dict holds its buffers too:

# %%
model = torch.nn.BatchNorm1d(4)
print("parameters():", [name for name, _ in model.named_parameters()])
print("state_dict():", list(model.state_dict()))

# %% [markdown]
# The gradient scaler starts with a scale of 65536. After each overflow it halves the scale and skips the step:

# %%
from torch.amp import GradScaler

def train(scaler, steps=10):
    """Ten steps in half precision. Returns how many of them were skipped."""
    weight = torch.ones(1, requires_grad=True)
    optimizer, skipped = torch.optim.SGD([weight], lr=1e-3), 0
    for _ in range(steps):
        before = weight.item()
        optimizer.zero_grad()
        scaler.scale((weight.half() * 100).sum()).backward()  # a gradient of 100, times the scale
        scaler.step(optimizer)
        scaler.update()
        skipped += weight.item() == before
    return skipped

scaler, resumed = GradScaler("cpu"), GradScaler("cpu")
print("a new scaler skips", train(scaler), "steps of 10, and ends with scale", scaler.get_scale())
resumed.load_state_dict(scaler.state_dict())
print("restored, it skips", train(resumed))

# %% [markdown]
# How large is the whole state?

# %%
saved = torch.load("saved/epoch2.pt")

def size(value):
    """Bytes in all tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(size(part) for part in value)
    return 0

for part in ("model", "optimizer", "rng"):
    times = size(saved[part]) / size(saved["model"])
    print(f"{part:10}{size(saved[part]):6} bytes, {times:.1f} times the model")

# %% [markdown]
# Adam's **moments** (running means of the gradient and of its square) take twice the model's bytes. torch's random
# state takes 5 kB for each rank, whatever the model. So a checkpoint of 7 billion float32 parameters with Adam takes
# 84 GB: 28 for the parameters, 56 for the moments.

# %%
quiz("05_checkpointing/forgotten")

# %% [markdown]
# ## Who writes, who reads
#
# Under DDP all ranks hold the same weights, so one rank can write them. What happens if every rank writes the same
# temporary file and then renames it?

# %%
# %%ranks 2 --expect raised
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
torch.save({"step": 1}, "saved/unfinished.tmp")  # BUG: on every rank
dist.barrier()
for turn in range(dist.get_world_size()):  # one rank after the other
    if dist.get_rank() == turn:
        os.replace("saved/unfinished.tmp", "saved/newest.pt")
    dist.barrier()

# %% [markdown]
# Rank 0 renamed the file first, so rank 1 found nothing to rename. Now both write to the final name. A save starts by
# opening its file; here rank 1 opens it after rank 0 has finished:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({"step": 1}, "saved/neighbor.pt")
    torch.save({"step": 1}, "saved/both.pt")
dist.barrier()
if dist.get_rank() == 1:
    file = open("saved/both.pt", "wb")  # BUG: both ranks, one name
dist.barrier()
print("the file beside it:", torch.load("saved/neighbor.pt"))
torch.load("saved/both.pt")

# %% [markdown]
# When rank 1 opened `both.pt` for writing, it emptied rank 0's checkpoint. (The file beside it is intact.) Until rank
# 1 has written everything, there is no checkpoint.
#
# ### A barrier between save and load
#
# Now only rank 0 writes, and rank 1 reads when half of the file is written:

# %%
# %%ranks 2 --expect raised
import io
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    whole = io.BytesIO()
    torch.save({"weights": torch.ones(100_000)}, whole)
    with open("saved/slow.pt", "wb", buffering=0) as file:
        file.write(whole.getvalue()[:200_000])
        dist.barrier()  # half of it is written
        dist.barrier()
        file.write(whole.getvalue()[200_000:])
else:
    dist.barrier()
    torch.load("saved/slow.pt")  # BUG: it exists, and is incomplete

# %% [markdown]
# `failed finding central directory` means that the file is incomplete: `torch.save` writes a zip archive, with its
# directory at the end. A `barrier` after the save fixes this:

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({"weights": torch.ones(100_000)}, "saved/slow.pt")
dist.barrier()  # +
print(len(torch.load("saved/slow.pt")["weights"]), "weights")

# %% [markdown]
# If the save takes longer than the process group's timeout, the waiting ranks fail (chapter 3, "A short timeout").
#
# ### When the save fails
#
# The disk is full (simulated by a limit on the file size), and rank 0 catches the error:

# %%
# %%ranks 2 --expect hang
import resource
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
        torch.save({"weights": torch.ones(100_000)}, "saved/full.pt")
        dist.barrier()  # BUG: skipped after an error
    except (RuntimeError, OSError) as error:
        print(f"not saved ({type(error).__name__}), training continues")
else:
    dist.barrier()
dist.all_reduce(torch.ones(1))  # the next step

# %% [markdown]
# Rank 0 skipped the barrier and continued with the next step. (Catch every `Exception`: a save can also raise a
# `PicklingError`.)
#
# **All ranks must learn the outcome of the save.** So rank 0 broadcasts it, even after an error.
# (`broadcast_object_list` is a broadcast for Python objects.) The other ranks wait for this broadcast, so it replaces
# the barrier:

# %%
# %%ranks 2
import resource
import torch, torch.distributed as dist

dist.init_process_group("gloo")
problem = [None]
if dist.get_rank() == 0:
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
        torch.save({"weights": torch.ones(100_000)}, "saved/full.pt")
    except Exception as error:
        problem = [type(error).__name__]
dist.broadcast_object_list(problem, src=0)  # +
print("rank 0 could not save:", problem[0])

# %% [markdown]
# ### Which file is the newest?
#
# Checkpoints 9 and 10 were copied from a different disk, 10 first. Rank 1's node does not see checkpoint 10 yet, as
# can happen on a network file system. Which rule finds checkpoint 10: greatest name, latest time or greatest number?

# %%
# %%ranks 2
import os
import torch, torch.distributed as dist

def number(name):
    return int(name.removeprefix("step-").removesuffix(".pt"))

def written(name):
    return os.path.getmtime("saved/folder/" + name)

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    os.makedirs("saved/folder", exist_ok=True)
    for step, time in ((10, 1_000_000), (9, 1_000_001)):  # the copy wrote 10 first
        torch.save({"step": step}, f"saved/folder/step-{step}.pt")
        os.utime(f"saved/folder/step-{step}.pt", (time, time))
dist.barrier()
seen = os.listdir("saved/folder")
if dist.get_rank() == 1:
    seen.remove("step-10.pt")  # this node does not see it yet
print("by name:", max(seen), " by time:", max(seen, key=written), " by number:", max(seen, key=number))
chosen = [max(seen, key=number)]
dist.broadcast_object_list(chosen, src=0)  # one rank decides
print("rank 0 chose", chosen[0])

# %% [markdown]
# Only the number leads to checkpoint 10, and only on rank 0. So let rank 0 choose by number and broadcast its choice.
# (As text, "9" comes after "10". A copy may change a file's time.)
#
# To free space, **rotation** deletes all but the newest few checkpoints.
#
# ### Loading: where, and on which ranks
#
# When DDP wraps the model, it copies rank 0's weights to all ranks. May rank 0 alone load a checkpoint after that?

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
for when in ("before", "after"):
    model = nn.Linear(4, 4)
    if when == "after":
        ddp = DDP(model)
    if dist.get_rank() == 0:
        model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    if when == "before":
        ddp = DDP(model)
    ddp(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    norms = [None] * 2
    dist.all_gather_object(norms, sum(p.sum().item() for p in model.parameters()))
    same = "equal" if norms[0] == norms[1] else "different"
    print(f"loaded on rank 0 {when} wrapping: after one step the ranks are {same}")

# %% [markdown]
# No: DDP copies the weights only once, and it never copies the optimizer's state. So **let every rank load
# everything.**
#
# A file records the device of each tensor. This cell fakes a file that was saved on GPU 0, and loads it without a GPU:

# %%
# %%ranks 1
import torch

def first_gpu(storage):
    """Saving: every tensor claims to be on GPU 0."""
    return "cuda:0"

def leave(storage, place):
    """Loading: leave it to PyTorch."""

torch.serialization.register_package(0, first_gpu, leave)
torch.save(torch.ones(2), "saved/from_gpu.pt")
try:
    torch.load("saved/from_gpu.pt")
except RuntimeError as error:
    print(str(error).split(" If ")[0])
print(torch.load("saved/from_gpu.pt", map_location="cpu"))

# %% [markdown]
# *GPU.* Without `map_location`, every rank would load rank 0's checkpoint onto GPU 0. Load it to the CPU:
# `load_state_dict` then copies the values to each parameter's device.
#
# ### The prefix `module.`
#
# Which models can load the state_dict of a DDP wrapper?

# %%
# %%ranks 1
import torch, torch.distributed as dist
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as consume
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ddp, plain = DDP(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
state = ddp.state_dict()  # BUG: the wrapper's
try:
    plain.load_state_dict(state)
except RuntimeError as error:
    print(*str(error).splitlines()[1:], sep="\n")
print("into another DDP:", DDP(torch.nn.Linear(2, 2)).load_state_dict(state))
consume(state, "module.")
print("prefix consumed: ", plain.load_state_dict(state))
print("saved by .module:", plain.load_state_dict(ddp.module.state_dict()))
print("by str.replace:  ", "module.submodule.weight".replace("module.", ""))

# %% [markdown]
# Only another wrapper can load the wrapper's state_dict unchanged, because each wrapper adds the prefix (chapter 1).
# Save `ddp.module.state_dict()` instead. Remove the prefix from older files with
# `consume_prefix_in_state_dict_if_present`; `str.replace` would damage the names of submodules.

# %%
quiz("05_checkpointing/barrier")

# %% [markdown]
# ## Atomic and durable
#
# What if rank 0 is killed while it saves? A `Doomed` file kills its process after a given number of bytes. `in_place`
# writes to the final name; `replace` writes to a temporary name and renames the file:

# %%
# %%writefile saving.py
import io, os, signal, torch

class Doomed(io.FileIO):
    """A file that kills its process once `left` bytes are written."""
    left = 10**9
    def write(self, data):
        part = bytes(data)[: Doomed.left]
        super().write(part)
        Doomed.left -= len(part)
        if Doomed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(part)

def in_place(state, name):
    with Doomed(name, "wb") as file:
        torch.save(state, file)

def replace(state, name):
    in_place(state, name + ".tmp")
    os.replace(name + ".tmp", name)

# %% [markdown]
# Save checkpoint 1. Then save checkpoint 2 in place, but kill rank 0 halfway:

# %%
torch.save({"step": 1}, "saved/newest.pt")

# %%
# %%ranks 1 --expect crashed
from saving import *

Doomed.left = 200_000
in_place({"step": 2, "weights": torch.ones(100_000)}, "saved/newest.pt")

# %%
print("left:", os.path.getsize("saved/newest.pt"), "bytes")
torn = Path("saved/newest.pt").read_bytes()
for length in (0, 3, 20, 2000, 20_000, 200_000):
    Path("saved/torn.pt").write_bytes(torn[:length])
    try:
        torch.load("saved/torn.pt")
    except Exception as error:
        print(f"{length:7} bytes: {type(error).__name__:15}", (str(error) or "-").split(". ")[0])

# %% [markdown]
# Checkpoint 2 is **torn**, that is, cut short, and checkpoint 1 is gone. The error depends on where the file was cut,
# so catch every `Exception`, and then load an older checkpoint.
#
# Now each function saves eleven times. A kill interrupts the first ten saves, each at a different byte. Which
# checkpoint can be loaded afterwards?

# %%
def survivor(way, instant):
    """Save 1, get killed while saving 2. Which one can be loaded afterwards?"""
    torch.save({"step": 1}, "saved/newest.pt")
    ranks.run(ranks.Source(
        f"from saving import *\nDoomed.left = {instant}\n"
        f"{way}({{'step': 2, 'weights': torch.ones(5000)}}, 'saved/newest.pt')\n"), 1)
    try:
        return str(torch.load("saved/newest.pt")["step"])
    except Exception:
        return "-"

for way in ("in_place", "replace"):
    print(f"{way:9}", *[survivor(way, instant) for instant in [*range(1, 20_000, 2000), 10**9]])

# %% [markdown]
# After a kill, `in_place` left nothing to load (`-`). `replace` always left a complete checkpoint, because
# `os.replace` is **atomic**: at every instant, the name refers either to the old file or to the new one. `os.replace`
# works only within one file system, so put the temporary file in the same folder, not in `/tmp`. Delete older
# checkpoints only after the rename.
#
# ![A save killed at ten instants: in place, nothing can be loaded; with replace, always checkpoint 1](pictures/kill.svg)

# %%
quiz("05_checkpointing/two_files")

# %% [markdown]
# ### Durable: power failures
#
# A kill loses nothing that the process has already written: the kernel holds the bytes and writes them to the disk
# later. In a power failure the kernel stops too, and the disk may have the new name without the contents. `os.fsync`
# returns once the contents are on the disk. Call it twice: for the file before the rename, and for the folder, which
# holds the names, after the rename:

# %%
def durable(state, name):
    with open(name + ".tmp", "wb") as file:
        torch.save(state, file)
        file.flush()  # from Python to the kernel
        os.fsync(file.fileno())  # the bytes to the disk, before the rename
    os.replace(name + ".tmp", name)
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY)
    os.fsync(folder)  # the name to the disk, before you delete an older one
    os.close(folder)

durable({"step": 3}, "saved/newest.pt")
print(torch.load("saved/newest.pt"))

# %% [markdown]
# ### What file systems promise
#
# Shared file systems, where checkpoints usually go, promise less than a local disk:
#
# | file system | what to know |
# |---|---|
# | local disk | Files are lost with the node, so copy them elsewhere |
# | NFS | A node that *opens* a file after the writer has closed it sees the whole file. Listings may be a minute old. Quota errors may come only at `fsync` or `close` |
# | Lustre, GPFS | Opening files is slow, so write few large ones |
# | object storage, mounted as a folder | Rename may fail or copy the file. Upload a marker file last, and trust only checkpoints that have one |
#
# ### A changed bit
#
# A bad disk or copy can flip a bit. Does `torch.load` notice?

# %%
import hashlib, zipfile

def digest(name):
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]

torch.save({"weights": torch.ones(1000)}, "saved/flipped.pt")
before, data = digest("saved/flipped.pt"), bytearray(Path("saved/flipped.pt").read_bytes())
place = data.find(torch.ones(1000).numpy().tobytes())
data[place + 3] ^= 64  # one bit of the first weight
Path("saved/flipped.pt").write_bytes(data)
print("torch.load:", torch.load("saved/flipped.pt")["weights"][:3].tolist())
print("checksum:", "unchanged" if digest("saved/flipped.pt") == before else "changed")
print("zipfile finds:", zipfile.ZipFile("saved/flipped.pt").testzip())

# %% [markdown]
# No: a weight of 1 has silently become infinite. So check before you load. `testzip` compares each entry of the
# archive with its CRC, a short checksum. Or put your own checksum into the file's name.
#
# If the newest file is damaged, print a warning and load the one before it. An error would end an unattended job.
# Starting again at step 0 is worse: after a few saves, rotation deletes the last intact checkpoint.
#
# ### weights_only
#
# The archive contains a pickle, and a pickle is a program: its author decides what runs when you load it.

# %%
class Surprise:
    def __reduce__(self):
        return print, ("any command could have run here",)

torch.save({"weights": Surprise()}, "saved/surprise.pt")
torch.load("saved/surprise.pt", weights_only=False)
try:
    torch.load("saved/surprise.pt")  # weights_only=True is the default since torch 2.6
except Exception as error:
    print(type(error).__name__, "-", str(error).split(".")[0])

# %% [markdown]
# `weights_only=True` loads only types that PyTorch knows to be harmless. Which of these are among them?

# %%
import argparse, numpy, random

candidates = {
    "tensors, numbers, text, None": [torch.ones(1), 1, 0.5, "a", None],
    "torch.get_rng_state()": torch.get_rng_state(), "random.getstate()": random.getstate(),
    "numpy's random state": numpy.random.get_state(), "a NumPy number": numpy.float64(0.9),
    "argparse.Namespace": argparse.Namespace(lr=0.1), "a module": torch.nn.Linear(1, 1),
    "pathlib.Path": Path("data"),
}
for name, value in candidates.items():
    torch.save(value, "saved/candidate.pt")
    try:
        torch.load("saved/candidate.pt")
        print("loaded  ", name)
    except Exception:
        print("refused ", name)

# %% [markdown]
# `torch.save` accepted all eight. Only when you resume do you learn that `torch.load` refuses five of them. Save
# `vars(arguments)`, `float(score)` and `str(path)` instead, and convert the array in NumPy's state to a list. If you
# trust a file that holds objects of your own class, call `torch.serialization.add_safe_globals([MyClass])` before you
# load it.

# %%
quiz("05_checkpointing/rename")

# %% [markdown]
# ## Exercise: implement checkpoint
#
# *Hard, 35 minutes.* Open [exercises/checkpoint.py](../exercises/checkpoint.py). Number the files yourself, because
# `state` need not contain a step.

# %%
contract("checkpoint", "save_checkpoint", "load_latest")

# %%
# %check checkpoint

# %% [markdown]
# <details><summary>After a kill in the middle, no good checkpoint is left</summary>
# The temporary file belongs in the final file's folder. Rename it before you delete an older checkpoint.
# </details>
#
# <details><summary>"… may not be on the disk"</summary>
# Keep this order: flush and fsync the open file, rename it, fsync the folder.
# </details>
#
# `./lockstep solution checkpoint` shows the solution.
#
# ## Formats
#
# Is one file enough for your job?
#
# | when | how to save |
# |---|---|
# | one rank can write the state in seconds | **one file** |
# | you publish the weights | **safetensors** |
# | the model is sharded, or one rank is too slow | **shards** |
# | training would wait too long | **in the background** |
#
# **One file**: `torch.save` writes a zip archive. A pickle describes the objects; each tensor's bytes are an entry:

# %%
torch.save({"a": torch.ones(3), "step": 7}, "saved/one.pt")
for entry in zipfile.ZipFile("saved/one.pt").infolist():
    print(entry.filename, entry.file_size)

# %% [markdown]
# If every rank loads the file, a node holds one copy per rank. With `mmap=True`, `torch.load` maps the file into memory
# instead. Each rank loads two tensors of 16 MB and uses one. How much of the file is in memory?

# %%
# %%ranks 2
import re, torch, torch.distributed as dist
from pathlib import Path

def megabytes(kind):
    """Megabytes of the file in this process's memory (Rss), or this process's share of them (Pss)."""
    maps = Path("/proc/self/smaps").read_text()
    return round(sum(int(kb) for kb in re.findall(rf"large\.pt\n(?:.+\n)*?{kind}: +(\d+)", maps)) / 1000)

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({name: torch.ones(4_000_000) for name in ("a", "b")}, "saved/large.pt")
dist.barrier()
state = torch.load("saved/large.pt", mmap=True)
print("loaded:", megabytes("Rss"), "MB in memory")
state["a"].sum()
dist.barrier()
print("used a:", megabytes("Rss"), "MB in memory, shared by the ranks:", megabytes("Pss"), "MB each")
dist.barrier()

# %% [markdown]
# Only the tensor in use was read, and the ranks share one copy. Never write to a mapped file in place: the loaded
# weights change too, or SIGBUS kills the process. `os.replace` is safe, because the old contents stay on disk until no
# process maps them.
#
# **safetensors** has no pickle, so loading runs no code. A header says where each tensor is; the bytes follow:

# %%
from safetensors.torch import load_file, save_file

save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, "saved/one.safetensors")
whole = Path("saved/one.safetensors").read_bytes()
length = int.from_bytes(whole[:8], "little")  # of the header
print(whole[8 : 8 + length].decode())
print(load_file("saved/one.safetensors"))

# %% [markdown]
# The file holds only named tensors, so an optimizer's nested state does not fit.
#
# ### Shards
#
# If a model is sharded, as with FSDP2 (chapter 4, "Beyond DDP"), no rank has all of it. With
# `torch.distributed.checkpoint`, **DCP**, each rank writes its own part into one folder. `dcp.load` reads into
# existing tensors, so the function `load` below first gets them from `get_state_dict`:

# %%
# %%writefile sharded.py
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

def make(wrap):
    """A model and its optimizer, under DDP or sharded."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(torch.nn.Linear(256, 256))
    return model, torch.optim.AdamW(model.parameters())

def save(model, optimizer, folder):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

def load(model, optimizer, folder):
    weights, moments = get_state_dict(model, optimizer)  # creates a new optimizer's moments, too
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

# %%
# %%ranks 2
import os
from sharded import *

model, optimizer = make(fully_shard)
model(torch.ones(1, 256)).sum().backward()
optimizer.step()
print("weight", tuple(model.weight.shape), "of which here", tuple(model.weight.to_local().shape))
save(model, optimizer, "saved/shards")
if dist.get_rank() == 0:
    for name in sorted(os.listdir("saved/shards")):
        print(f"{name:14}{os.path.getsize(f'saved/shards/{name}') / 1e6:6.1f} MB")

# %% [markdown]
# Each rank wrote half. `.metadata` says which piece is in which file, so any number of ranks can read the folder, even
# under DDP. Let three ranks load it. All gradients were 1, so after one step Adam's first moment must be 1 − 0.9 =
# 0.1:

# %%
# %%ranks 3
from sharded import *

model, optimizer = make(DDP)
load(model, optimizer, "saved/shards")
moments = optimizer.state[model.module.weight]
print(f"step {moments['step']:.0f}, first moment {moments['exp_avg'].mean():.3f}")

# %% [markdown]
# Call `dcp.save` and `dcp.load` on every rank. Rotation, checksums and choosing the newest folder remain your task.
#
# DCP writes `.metadata` last. Here rank 1 fails earlier: first in a new folder, then in one that holds a checkpoint.
# The old values are 1, the new ones 2. What can be loaded?

# %%
# %%ranks 2 --quiet --into run
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from lockstep.ranks import observe

class Fails(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            raise OSError("no space left")
        return super().write_data(plan, planner)

dist.init_process_group("gloo")
dcp.save({"a": torch.ones(1), "b": torch.ones(1)}, checkpoint_id="saved/used")
for folder in ("new", "used"):
    state = {"a": torch.ones(1) * 2, "b": torch.ones(1) * 2}
    try:
        dcp.save(state, storage_writer=Fails(f"saved/{folder}"))
    except BaseException as error:
        observe("error", f"{type(error).__name__}, an Exception: {isinstance(error, Exception)}")
    try:
        state = {"a": torch.zeros(1), "b": torch.zeros(1)}
        dcp.load(state, checkpoint_id=f"saved/{folder}")
        observe(folder, f"a = {state['a'].item()}, b = {state['b'].item()}")
    except BaseException:
        observe(folder, "cannot be loaded")

# %%
print("the save raised", run.observed("error")[0])
for folder in ("new", "used"):
    print(f"the {folder} folder:", run.observed(folder)[0])

# %% [markdown]
# Without `.metadata`, the new folder is not a checkpoint. The used folder still has the old `.metadata`, so a new `a`
# and an old `b` are loaded without an error. **Save into a new folder each time.** (`except Exception` does not catch
# a `CheckpointException`.)
#
# ### Saving in the background
#
# `async_save` copies the state to memory and returns. A thread writes the copy while training continues. Here each
# write takes half a second longer:

# %%
# %%ranks 2 --into run
import time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from lockstep.ranks import observe

class SlowDisk(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        time.sleep(0.5)
        return super().write_data(plan, planner)

dist.init_process_group("gloo")
own = dist.new_group(backend="gloo")  # for the thread
state = {"weights": torch.ones(1_000_000)}
began = time.perf_counter()
dcp.save(state, storage_writer=SlowDisk("saved/waited"))
waited = time.perf_counter() - began
began = time.perf_counter()
future = dcp.async_save(state, storage_writer=SlowDisk("saved/beside"), process_group=own)
observe("stall", [waited, time.perf_counter() - began])
dist.all_reduce(state["weights"])  # training continues
future.result()  # wait for it before the next save, and before the job ends
again = {"weights": torch.zeros(1_000_000)}
dcp.load(again, checkpoint_id="saved/beside")
print("saved value:", again["weights"][0].item(), "  value now:", state["weights"][0].item())

# %%
waited, stalled = run.observed("stall")[0]
bars({"save": waited, "async_save": stalled}, unit="s", title="how long training waits")

# %% [markdown]
# The file holds 1, the value at the time of the call, although training has changed the weights to 2. The copy takes
# as much host memory as the state. Until the future is done, keep the old checkpoint, and don't start another save.
#
# The thread calls collectives too. If the thread shares the training loop's process group, gloo may mix up their
# calls, and the job hangs or crashes. So give the thread **a separate gloo group**, even if you train with NCCL.

# %%
quiz("05_checkpointing/async")

# %% [markdown]
# ## Resuming mid-epoch
#
# An epoch may take a day, so you usually save in mid-epoch. Here an epoch has six steps: 48 samples on two ranks, in
# batches of 4. The job is interrupted after four steps of epoch 1. Which of four ways to continue neither repeats nor
# misses samples?

# %%
# %%ranks 2
from collections import Counter
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
sampler = DistributedSampler(range(48))
sampler.set_epoch(1)
order = list(sampler)  # this rank's samples in this epoch
before = order[: 4 * 4]  # four steps of four, then the interruption
other = DistributedSampler(range(48))  # a new sampler, at epoch 0
ways = {"start epoch 1 again": order, "continue with epoch 2": [],
        "the rest, no set_epoch": list(other)[16:], "the rest": order[16:]}
for name, after in ways.items():
    seen = [None] * 2
    dist.all_gather_object(seen, before + after)
    count = Counter(sum(seen, []))
    if dist.get_rank() == 0:
        twice = sum(times > 1 for times in count.values())
        print(f"{name:24} seen twice {twice:2}   never {48 - len(count):2}")

# %% [markdown]
# Only "the rest" gives each sample exactly once. It needs one saved number, the number of finished steps:
#
# ```
# epoch, done = divmod(step, steps_an_epoch)
# sampler.set_epoch(epoch)
# rest = list(sampler)[done * batch_size :]
# ```
#
# Then use `DataLoader(data, batch_size, sampler=rest)`, which fetches only the batches that remain. Count a step only
# after its update, or a resume skips it.
#
# ### The loader is ahead of you
#
# Could you save how many samples the sampler has handed out? Try two workers:

# %%
# %%ranks 1
from torch.utils.data import DataLoader

class Counting(list):
    """A sampler that counts what was drawn from it."""
    drawn = 0
    def __iter__(self):
        for index in super().__iter__():
            self.drawn += 1
            yield index

sampler = Counting(range(40))
batches = iter(DataLoader(range(40), batch_size=4, sampler=sampler, num_workers=2))
next(batches)
print("trained on 4 samples; drawn from the sampler:", sampler.drawn)

# %% [markdown]
# No: the sampler has handed out 20 samples: your 4, and two batches of 4 ahead for each worker. So count the batches
# that your loop receives, as torchdata's `StatefulDataLoader` does. If you can index the dataset, you can write such a
# loader yourself:

# %%
# %%writefile stateful.py
from torch.utils.data import DataLoader, DistributedSampler

class StatefulLoader:
    """Its state is the position after the last batch that it has handed out."""
    def __init__(self, data, batch_size, **options):
        self.data, self.batch_size, self.options = data, batch_size, options
        self.sampler, self.epoch, self.given = DistributedSampler(data), 0, 0

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        rest = list(self.sampler)[self.given * self.batch_size :]
        for batch in DataLoader(self.data, self.batch_size, sampler=rest, **self.options):
            self.given += 1
            yield batch
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self):
        """Call it after a step: then every batch that was handed out has updated the weights."""
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state):
        self.epoch, self.given = state["epoch"], state["given"]

# %%
# %%ranks 2
import torch, torch.distributed as dist
from stateful import StatefulLoader

dist.init_process_group("gloo")
loader = StatefulLoader(range(48), 4)
through = [batch.tolist() for _ in range(2) for batch in loader]
loader, seen, state = StatefulLoader(range(48), 4, num_workers=2), [], None
for _ in range(2):
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 10:
            state = loader.state_dict()
            break
loader = StatefulLoader(range(48), 4)  # a new process would start here
loader.load_state_dict(state)
seen += [batch.tolist() for batch in loader]
same = sum(one == other for one, other in zip(seen, through))
print("interrupted at", state, f"- {same} of {len(through)} batches as without interruption")

# %% [markdown]
# The samples are right. But a worker that augments them draws from its own generator, whose state is in no checkpoint.
# Do the batches still agree with the uninterrupted run?

# %%
# %%ranks 1
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __init__(self, seeded):
        self.seeded = seeded
    def __len__(self):
        return 24
    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index) if self.seeded else None  # None: the worker's
        return index + torch.rand((), generator=own)

def batches(seeded, rest):
    own = torch.Generator().manual_seed(0)
    loader = DataLoader(Noisy(seeded), 4, sampler=rest, num_workers=2, generator=own)
    return [batch.tolist() for batch in loader]

for seeded in (False, True):
    through, resumed = batches(seeded, range(24)), batches(seeded, range(12, 24))
    same = sum(one == other for one, other in zip(through[3:], resumed))
    print(f"a generator for each sample: {seeded!s:6} {same} of 3 batches agree")

# %% [markdown]
# They agree only with a generator for each sample. Here its seed is the sample's index; in a job, compute the seed from
# the job's seed, the epoch and the index. Or use no workers: then augmentation draws from the rank's generators, which
# you save.
#
# ### Restore random states last
#
# What changes torch's generator between loading and the first step?

# %%
from torch.utils.data import DataLoader

def moves(build, *arguments, **options):
    """Does this move torch's generator?"""
    before = torch.get_rng_state()
    build(*arguments, **options)
    return "moves it" if not torch.equal(before, torch.get_rng_state()) else "leaves it"

own = DataLoader(range(4), generator=torch.Generator())
print("a layer:                          ", moves(torch.nn.Linear, 2, 2))
print("iter(DataLoader):                 ", moves(iter, DataLoader(range(4))))
print("iter(DataLoader) with a generator:", moves(iter, own))

# %% [markdown]
# So restore all generators (Python's, NumPy's, torch's, each GPU's) last, just before the first step. But then the
# `for` loop creates the loader's iterator, which draws a number from torch's generator. In the uninterrupted run, the
# iterator existed before the save, so the dropout masks differ. Give the loader its own generator.

# %%
quiz("05_checkpointing/ahead")

# %% [markdown]
# ## Determinism
#
# You can now restore samples and dropout masks. Does a resumed run also end with the same bits? That depends on the
# order in which numbers are added. Both of these sums should be 1:

# %%
a, b, c = torch.tensor([1e8, -1e8, 1.0])
print((a + b) + c, a + (b + c))

# %% [markdown]
# ### Random numbers
#
# Use **seed + rank**, as in chapter 2. With one seed for all, every rank drops the same units:

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for name, seed in (("one seed", 0), ("seed + rank", rank)):
    torch.manual_seed(seed)
    mask = torch.nn.functional.dropout(torch.ones(1000)) > 0
    masks = [torch.zeros(1000, dtype=torch.bool) for _ in range(2)]
    dist.all_gather(masks, mask)
    if rank == 0:
        same = (masks[0] == masks[1]).float().mean().item()
        print(f"{name:12} the masks agree in about {10 * round(10 * same)} % of the places")

# %% [markdown]
# ### Restarts change the bits
#
# Three ranks train two steps. A second run restarts after the first step, with everything restored. Are all 4801
# weights the same, bit for bit?

# %%
# %%ranks 3 --into run --quiet
import copy, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from lockstep.ranks import observe

dist.init_process_group("gloo")
x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))

def step(ddp, batch):
    ddp(batch).square().mean().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    ddp.zero_grad()

for unused in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    again = copy.deepcopy(model)
    ddp = DDP(model, find_unused_parameters=unused)
    step(ddp, x[0])
    again.load_state_dict(model.state_dict())  # the restart
    step(ddp, x[1])
    step(DDP(again, find_unused_parameters=unused), x[1])
    weights = [torch.cat([p.flatten() for p in one.parameters()]) for one in (model, again)]
    observe(f"find_unused_parameters={unused}", weights)

# %%
for flag in ("find_unused_parameters=False", "find_unused_parameters=True"):
    through, restarted = map(torch.as_tensor, run.observed(flag)[0])
    differ = "some" if not torch.equal(through, restarted) else "none"
    print(f"{flag:28} weights with other bits: {differ},"
          f" by more than 1e-6: {int(((through - restarted).abs() > 1e-6).sum())}")

# %% [markdown]
# Not by default: some weights have different bits. After its first step, DDP sorts the gradients into new buckets
# (chapter 1), but a restarted process has the initial buckets again. So an element is at a different place in its
# bucket, and the order in which gloo adds the ranks' values depends on this place. On two ranks this doesn't matter:
# a + b = b + a.
#
# Equal bits matter when you *test* a resume: "nearly equal" can hide a forgotten part. So test on two ranks, or set
# `find_unused_parameters=True`, which keeps the initial buckets but costs one more all-reduce per step.
#
# ### A different number of ranks
#
# Do 1, 2, 3 and 4 ranks compute the same gradient of the same 24 samples?

# %%
# %%writefile summed.py
import torch, torch.distributed as dist
from lockstep.ranks import observe

dist.init_process_group("gloo")
x = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
mine = x[dist.get_rank() :: dist.get_world_size()]
gradient = (mine * mine.sum(1, keepdim=True)).mean(0) / dist.get_world_size()
dist.all_reduce(gradient)
observe("gradient", gradient)

# %%
alone = None
for world_size in (1, 2, 3, 4):
    run = ranks.run(ranks.Script("summed.py"), world_size)
    gradient = torch.as_tensor(run.observed("gradient")[0])
    alone = gradient if alone is None else alone
    differ = "none" if torch.equal(gradient, alone) else "some"
    print(f"ranks: {world_size}  bits that differ from one rank: {differ};",
          f"elements off by more than 0.0001: {int(((gradient - alone).abs() > 1e-4).sum())}")

# %% [markdown]
# With a different number of ranks, the values are added in a different order, so compare loss curves instead of bits.
# Keep the *global* batch: on fewer ranks, use more samples per rank or more accumulation. Dropout cannot continue
# exactly: samples move to other ranks, which draw other masks.
#
# *GPU.* Some kernels add in an order that varies from run to run. `torch.use_deterministic_algorithms(True)` makes them
# raise an error or use a slower method.

# %%
quiz("05_checkpointing/world_size")

# %% [markdown]
# ## Exercise: implement exact_resume
#
# *Hard, 30 minutes.* Open [exercises/exact_resume.py](../exercises/exact_resume.py). Write `train`, a loop that can
# be stopped after any step and, when resumed, ends with the same bits as an uninterrupted run. `Parts` are a model, an
# optimizer, a scheduler and a scaler.

# %%
contract("exact_resume", "train_step", "train")

# %%
# %check exact_resume

# %% [markdown]
# <details><summary>Samples are repeated or missed</summary>
# Everything follows from the number of finished steps: <code>divmod</code>, <code>set_epoch</code>, a slice.
# </details>
#
# <details><summary>The samples are right, but the weights differ</summary>
# A part was not restored. If the first step already differs, you restored the random states too early.
# </details>
#
# <details><summary>Two ranks agree bit for bit, three do not</summary>
# DDP's new buckets are the cause. "Restarts change the bits" names the fix.
# </details>
#
# `./lockstep solution exact_resume` shows the solution.
#
# # Part 2: Elastic training, SLURM and the capstone
#
# If you have restarted the kernel, run the chapter's first cell again.
#
# ## Elastic restarts
#
# A job is **elastic** if it can restart, even on a different number of nodes. When a rank dies, torchrun ends **all**
# ranks and starts the script again, as often as `--max-restarts` allows. Print the default, and the signals that
# torchrun passes on:

# %%
from torch.distributed.run import get_args_parser

options = get_args_parser()
for name in ("max_restarts", "signals_to_handle"):
    print(f"{name:18} {options.get_default(name)}")

# %% [markdown]
# So by default torchrun never restarts a job. When it does restart one, the script must find its checkpoint. The
# script below saves after every second step. In the first attempt (`TORCHELASTIC_RESTART_COUNT` is 0), rank 1 is
# killed at step 5, or hangs there:

# %%
# %%writefile elastic.py
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from saving import replace

fault, NAME = sys.argv[1], f"saved/{sys.argv[2]}.pt"
dist.init_process_group("gloo", timeout=timedelta(seconds=5 if fault == "hang" else 60))
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = torch.load(NAME) if os.path.exists(NAME) else {"step": 0, "weights": torch.zeros(3)}
if rank == 0:
    print(f"attempt {attempt} starts at step {state['step']}", flush=True)
while state["step"] < 8:
    gradient = state["weights"] - rank - state["step"]
    dist.all_reduce(gradient)
    state = {"step": state["step"] + 1, "weights": state["weights"] - 0.1 * gradient}
    unlucky = attempt == 0 and rank == 1 and state["step"] == 5
    if unlucky and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if unlucky and fault == "hang":
        time.sleep(600)
    if state["step"] % 2 == 0 and rank == 0:
        replace(state, NAME)
    dist.barrier()
os._exit(0)  # see chapter 2, the box on gloo's bugs

# %% [markdown]
# `./lockstep run` takes torchrun's options. First run the job without a fault, then with the fault that kills rank 1:

# %%
import contextlib, io, time
from lockstep.commands.project import run_script as run_command

def lockstep_run(*arguments):
    """Delete an earlier run's checkpoint, run the job, and print its output, errors and restarts."""
    Path(f"saved/{arguments[-1]}.pt").unlink(missing_ok=True)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        run_command(arguments)
    said = [line for line in error.getvalue().splitlines() if re.match("CRASH|ERROR|HANG|Restart", line)]
    print(out.getvalue(), *said, sep="\n")

lockstep_run("-n", "2", "elastic.py", "none", "undisturbed")

# %%
lockstep_run("-n", "2", "--max-restarts", "1", "elastic.py", "kill", "killed")
for name in ("undisturbed", "killed"):
    weights = torch.load(f"saved/{name}.pt")["weights"]
    print(f"{name:12}", *[f"{weight:.6f}" for weight in weights.tolist()])

# %% [markdown]
# Attempt 1 repeats step 5, and the final weights are the same.
#
# **Before you rely on torchrun's restarts, set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`.** By default all attempts share
# one store (chapter 2), so a rank may find a dead rank's address there, and the job ends with `Connection refused`
# (PyTorch issue 135712). Under torchrun, 8 of 18 restarts of this script failed in this way; with the variable, none
# of 16 did. (With `--master-port`, the variable has no effect; use `--rdzv-backend=c10d`.)
#
# ### A hang is not a death
#
# torchrun notices only processes that end. If rank 1 hangs, rank 0 waits until the process group's timeout, here five
# seconds, and then fails, so torchrun restarts both. Which rank does it report?

# %%
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

def torchrun(*arguments):
    """Run torchrun without an old checkpoint. Print the output, and which rank failed."""
    Path(f"saved/{arguments[-1]}.pt").unlink(missing_ok=True)
    job = subprocess.run([*TORCHRUN, *arguments], capture_output=True, text=True, timeout=200)
    print(job.stdout, end="")
    print("failed:", *re.findall(r"failed \(exitcode: \S+\) (local_rank: \d+)", job.stderr))
    print("exit status", job.returncode)

torchrun("--nproc-per-node=2", "--max-restarts=1", "elastic.py", "hang", "hung")

# %% [markdown]
# It reports rank 0, which only waited for rank 1. Chapter 3, "Hangs", shows how to find the rank that hung.
#
# ### When a node is lost
#
# With `--nnodes=1:2`, torchrun asks for two nodes and accepts one. This script keeps its global batch:

# %%
# %%writefile shrinking.py
import os, time
from datetime import timedelta
import torch, torch.distributed as dist
from saving import replace

NAME = "saved/shrinking.pt"
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, world_size = dist.get_rank(), dist.get_world_size()
step = torch.load(NAME)["step"] if os.path.exists(NAME) else 0
if rank == 0:
    print("ranks:", world_size, "  from a checkpoint:", step > 0, flush=True)
while step < 12:
    mine = torch.tensor(24 // world_size)  # the global batch stays 24
    dist.all_reduce(mine)
    step += 1
    if step == 6 and rank == 1:
        time.sleep(60)  # its node is killed meanwhile
    if step == 5 and rank == 0:
        replace({"step": step}, NAME)
if rank == 0:
    print("done after step", step, "  samples per step:", mine.item(), flush=True)
os._exit(0)

# %% [markdown]
# Start it on two nodes with their own addresses, and kill node 1 after the first save:

# %% tags=["needs-hosts"]
import time

def lose_a_node():
    """Run torchrun on two nodes and kill one. Returns what the other one printed."""
    Path("saved/shrinking.pt").unlink(missing_ok=True)
    # Wait 8 s for a second node; a node is lost after 3 s without a sign of life.
    waits = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job",
               "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", f"--rdzv-conf={waits}"]
    with cluster.Nodes(2) as nodes:
        nodes.run(1, [*command, "shrinking.py"])
        time.sleep(1)  # node 1 starts first, so that it is ready when node 0 opens the store
        agent = nodes.run(0, [*command, "shrinking.py"])
        while not Path("saved/shrinking.pt").exists() and agent.poll() is None:
            time.sleep(0.1)
        nodes.kill(1)
        status = agent.wait(120)
        return agent.output, status

if cluster.available("hosts"):
    print("not run:", cluster.available("hosts"))
else:
    printed, status = lose_a_node()
    print(*re.findall(r"^(?:ranks|done).*", printed, re.MULTILINE), f"exit status {status}", sep="\n")

# %% [markdown]
# Node 0's torchrun waited eight seconds for other nodes (`last_call_timeout`), and then started the script with
# `WORLD_SIZE=1`. If node 0 is lost, the job ends, because the store (`--rdzv-endpoint`) is on node 0.
#
# ### What a restart asks of a script
#
# | what the launcher does | what you do |
# |---|---|
# | It starts the script from the top | Look for a checkpoint; finding none is not an error |
# | It may change `RANK` and `WORLD_SIZE` | Read both again |
# | It repeats the setup code | Accept an existing folder, and append to the log |
# | It restarts after every failure | Set a low limit: with `--max-restarts=100`, a bug fails 101 times |
# | It counts exit status 0 as success | Exit with 0 only after success, or if nothing is left to do |
#
# ### How often to save
#
# Each save stops training for *C* hours, and each failure costs half an interval of work on average (and a restart,
# left out here). If the job fails every *M* hours on average, the best interval is about √(2·C·M) (Young, 1974). Ten
# nodes fail ten times as often as one, so *M* falls to a tenth. Here a job of a thousand hours takes 3 minutes per
# save and fails every 20 hours:

# %%
import math, random

def overhead(interval, cost=0.05, mean=20.0, work=1000.0):
    """Extra hours, as a share of the hours of work."""
    generator, spent, done = random.Random(0), 0.0, 0.0
    failure = generator.expovariate(1 / mean)
    while done < work:
        if failure >= interval + cost:  # no failure during the interval and its save
            spent, done = spent + interval + cost, done + interval
            failure -= interval + cost
        else:
            spent, failure = spent + failure, generator.expovariate(1 / mean)
    return spent / done - 1

for hours in (0.1, 0.5, math.sqrt(2 * 0.05 * 20), 4, 10):
    print(f"every {hours:4.1f} h   {overhead(hours):.0%} more time")

# %% [markdown]
# The formula gives 1.4 hours, which costs 7 %. Saving about three times as often costs 11 %, and saving about a third
# as often costs 10 %. So a rough estimate of *M* is enough.

# %%
quiz("05_checkpointing/restart")

# %% [markdown]
# ## Preemption and SLURM
#
# Before a scheduler takes the nodes back, it sends a signal: SIGTERM by default, SIGUSR1 if you ask SLURM for it. A
# signal handler may run in the middle of a step, but saving needs all ranks. So let the handler only set a flag that
# the loop checks. But the signal may reach the ranks at different moments, or reach only one of them:

# %%
# %%ranks 3 --expect hang
import os, signal
import torch, torch.distributed as dist

asked = False
def ask(number, frame):
    global asked
    asked = True

signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
for step in range(10):
    dist.all_reduce(torch.ones(1))  # the work
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGTERM)  # the scheduler, to this rank first
    if asked: break  # BUG: each rank for itself
dist.barrier()  # before the save

# %% [markdown]
# Rank 1 left the loop after step 3, and the others wait for it in step 4. One small all-reduce per step lets all ranks
# decide together:

# %%
# %%ranks 3
import os, signal
import torch, torch.distributed as dist

asked = False
def ask(number, frame):
    global asked
    asked = True

signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
for step in range(10):
    dist.all_reduce(torch.ones(1))  # the work
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    stop = torch.tensor(int(asked))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)  # +
    if stop:
        break
dist.barrier()
print("saves after step", step)

# %% [markdown]
# With `ReduceOp.MAX`, all ranks stop as soon as the signal has reached one of them. With NCCL, `stop` must be on the
# GPU, and `if stop` waits for the GPU. If steps are short, run this all-reduce only after every tenth step, on all
# ranks.
#
# ### Under SLURM
#
# The signal travels from SLURM to your batch script, to torchrun, and to the ranks:
#
# ![SLURM signals the script, the script torchrun, torchrun the ranks; they save, and the job is requeued](pictures/requeue.svg)
#
# This script starts one torchrun on each of two nodes, with the rendezvous on the first:

# %%
script = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive
#SBATCH --requeue --open-mode=append --output=saved/preempted.log
#SBATCH --signal=B:USR1@60
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=50
port=$((20000 + SLURM_JOB_ID % 10000))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun "$PYTHON" -m torch.distributed.run --nnodes="$SLURM_NNODES" --nproc-per-node=1 \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port" preempted.py &
step=$!
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"; wait $step; scontrol requeue "$SLURM_JOB_ID"' USR1
wait $step
"""
Path("preempted.sbatch").write_text(script)
os.environ["PYTHON"] = sys.executable  # on your cluster: python, from the environment that has torch

# %% [markdown]
# - `--signal=B:USR1@60` sends SIGUSR1 to the batch script (`B:`) 60 to 120 seconds before the time limit. At a
#   preemption, SLURM sends SIGUSR1 only if the cluster sets `preempt_send_user_signal`, as the one below does.
# - The `trap` is bash's signal handler. By default torchrun doesn't pass on SIGUSR1, so the trap sends SIGTERM
#   to the torchruns that the first `srun` started (step `.0`). Then it waits until the ranks have saved.
# - `scontrol requeue`, which `--requeue` permits, puts the job back into the queue with the same job id. Don't trap
#   SIGTERM: `scancel` sends it, and the trap would requeue the canceled job.
#
# Why does `srun` run in the background (`&`)?

# %%
import signal

def trapped(work):
    """What a bash script prints, in order, if it is signalled while it does this work."""
    script = f"trap 'echo asked' USR1; {work}; exit"
    job = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
    job.stdout.readline()
    job.send_signal(signal.SIGUSR1)
    return job.communicate(timeout=30)[0].split()

command = "(echo ready; sleep 1; echo slept)"
print("foreground:", trapped(command))
wait_until_it_ends = "while kill -0 $!; do wait $!; done 2>/dev/null"
print("background:", trapped(f"{command} & {wait_until_it_ends}"))

# %% [markdown]
# bash runs a trap only after the foreground command has ended. But a signal ends `wait` at once. So the trap calls
# `wait $step` again; otherwise, the job would be requeued before the ranks have saved. This is the training script:

# %%
# %%writefile preempted.py
import os, signal, time, torch, torch.distributed as dist
from saving import replace

NAME, asked = "saved/preempted.pt", False
def ask(number, frame):
    global asked
    asked = True
signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
rank = dist.get_rank()
step, stop = torch.load(NAME)["step"] if os.path.exists(NAME) else 0, False
if rank == 0:
    print("starts at step", step, flush=True)
while step < 60 and not stop:
    time.sleep(0.1)  # the work
    step += 1
    stop = torch.tensor(int(asked))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if rank == 0 and (stop or step % 10 == 0):
        replace({"step": step}, NAME)
    dist.barrier()  # fails if rank 0 has failed: then no rank exits with 0
if rank == 0:
    print("ends after step", step, flush=True)
os._exit(0)

# %% [markdown]
# Start a real SLURM cluster with two nodes. Submit the job, then an urgent job that takes both nodes:

# %% tags=["needs-slurm"]
missing = cluster.available("slurm")
if missing:
    print("not run:", missing)
else:
    for name in ("preempted.pt", "preempted.log", "train.log"):
        Path("saved", name).unlink(missing_ok=True)
    slurm = cluster.Slurm(2)
    job = slurm.sbatch("preempted.sbatch")
    while not Path("saved/preempted.pt").exists() and not slurm.job(job).ended:
        time.sleep(0.1)
    print("after the first save:", slurm.job(job).state, "on", slurm.job(job).nodes)
    urgent = "#!/bin/bash\necho urgent on $(hostname) >> saved/preempted.log"
    urgent = slurm.sbatch(urgent, "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    print("the urgent job:", slurm.wait(urgent, 50).state)
    print("the first job:", slurm.job(job).state, "- restarts:", slurm.job(job).restarts)

# %% [markdown]
# When the urgent job has left the nodes, the first job starts again:

# %% tags=["needs-slurm"]
if missing:
    print("not run:", missing)
else:
    done = slurm.wait(job, 55, until=["COMPLETED"])
    log = Path("saved/preempted.log").read_text().splitlines()
    story = [line.split() for line in log if line.startswith(("starts", "ends", "urgent"))]
    zero, left, node, resumed, last = [words[-1] for words in story]
    print(done.state, "- restarts:", done.restarts)
    print([words[0] for words in story], "on", node)
    print(f"started at step {zero}, repeated {int(left) - int(resumed)} steps, ended at step {last}")

# %% [markdown]
# No step was repeated. From the signal to the kill, the job has a **grace period** to check the flag and save. How
# long is it?
#
# | who kills | when | where you set it |
# |---|---|---|
# | SLURM, at the time limit | 60 s or more after SIGUSR1 | `--signal=B:USR1@60` |
# | SLURM, at a preemption | here 10 s after SIGUSR1; the default is 0 | `GraceTime` of the cluster's partition |
# | torchrun | here 50 s after SIGTERM; the default is 30 | `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` |

# %%
quiz("05_checkpointing/signal")

# %% [markdown]
# ## Exercise: implement elastic_training
#
# *Medium, 25 minutes.* Open [exercises/elastic_training.py](../exercises/elastic_training.py). Write a loop that
# survives SIGKILL at random steps, a stop signal that may reach only one rank, and a restart on a different number of
# ranks.

# %%
contract("elastic_training", "train")

# %%
# %check elastic_training

# %% [markdown]
# <details><summary>On a different number of ranks, a step has different samples</summary>
# A step's samples must follow from seed and step alone. Take the global batch first, then this rank's part.
# </details>
#
# <details><summary>A finished job keeps training</summary>
# Check the step count before each step, not after it.
# </details>
#
# `./lockstep solution elastic_training` shows the solution.
#
# ## Capstone: implement train
#
# *Hard, 60 minutes, or as long as you like.* Open [exercises/train.py](../exercises/train.py) and
# [exercises/train.sbatch](../exercises/train.sbatch). Put everything from this course into one script for a cluster:
#
# - the loop: sampler, DDP, mixed precision, accumulation, clipping;
# - its reports: metrics of all ranks, each test sample counted once, logging on rank 0;
# - what it survives: checkpoint and resume, a clean stop on a signal.
#
# The check runs `train.py` on up to four ranks and on two nodes, and trains on handwritten digits to 95 % accuracy.
# With SLURM, it also submits `train.sbatch`, preempts it and kills a node. The cell after the check submits your files
# to the cluster above.

# %%
print(Path("../exercises/train.sbatch").read_text())

# %% tags=["needs-slurm"]
# %check train

# %% tags=["needs-slurm"]
if missing:
    print("not run:", missing)
else:
    yours = Path(os.environ.get("LOCKSTEP_SUBMISSION", "../exercises")).absolute()
    here = Path(sys.executable).parent  # where torchrun is
    slurm.environment |= {"PATH": f"{here}:{slurm.environment['PATH']}", "RANKS_PER_NODE": "1"}
    slurm.environment |= {"SCRIPT": str(yours / "train.py"), "FOLDER": "saved/runs"}
    options = "--parsable", "--output=saved/train.log"
    number = slurm.run("sbatch", *options, str(yours / "train.sbatch"), "--epochs=5").strip()
    job = slurm.wait(number, 120)
    said = Path("saved/train.log").read_text()
    if right := re.findall(r"test accuracy ([\d.]+)", said):
        percent = int(10 * float(right[-1])) * 10
        print(job.state, "on", job.nodes, "- digits right: more than", percent, "%")
    else:
        print(job.state, "- nothing trained yet · exercises/train.sbatch · %hint train")
        print(said[-300:])
    slurm.close()

# %% [markdown]
# <details><summary>It works on one node and not on two</summary>
# Does the script confuse rank and local rank? Can every node reach the rendezvous address?
# </details>
#
# `./lockstep solution train` shows the solutions.
#
# ## Before a long run
#
# Rehearse on two ranks, with a small model:
#
# | rehearse | what you should see |
# |---|---|
# | stop after 7 steps and resume to step 12; run 12 without stopping | the same bits in all weights |
# | SIGKILL one rank, during a step and during a save | the job continues from the last save |
# | cut the newest checkpoint in half, or change one bit of it | a warning; the older one is loaded |
# | fill the disk, or the quota | all ranks report it; older checkpoints are still there |
# | SIGTERM to one rank only | all stop after the same step, and save |
# | let a rank sleep | the job fails after the timeout |
# | let SLURM requeue the job | the step count continues |
# | load the checkpoint in a plain process | evaluation gives the same accuracy as in the job |
# | start the finished job again | it exits at once with status 0 |
#
# Write down:
#
# - how long a save takes, which must be less than the timeout and less than the grace period;
# - the total size of the checkpoints that you keep and of the one being written, which must be less than the quota;
# - the number of steps that a kill can cost.

# %%
quiz("05_checkpointing/rehearsal")

# %% [markdown]
# ## What to remember
#
# - **State**: forgetting a part raises no error. Compare bits with an uninterrupted run, on two ranks.
# - **Saving**: temporary name, fsync, `os.replace`, fsync of the folder, rotation.
# - **Loading**: rank 0 chooses by number and skips damaged files; every rank loads everything.
# - **Resuming**: finished steps, `divmod`, `set_epoch`, the rest of the sampler's list; each rank's random states last.
# - **Restarting**: `--max-restarts`, a store for each attempt, a timeout longer than a save; `--signal` and
#   `--requeue`.
# - **Agreeing**: all ranks decide together which file to load, whether a save worked, and when to stop.
#
# In an interview, expect: "Your job was killed while it was writing a checkpoint. What happens?" Say which files exist
# at that instant, and how the ranks agree on one.
#
# ## What to read next
#
# PyTorch's pages on torchrun (`pytorch.org/docs/stable/elastic/run.html`), on `torch.distributed.checkpoint`
# (`pytorch.org/docs/stable/distributed.checkpoint.html`) and on reproducibility
# (`pytorch.org/docs/stable/notes/randomness.html`). SLURM's page on preemption (`slurm.schedmd.com/preempt.html`). On
# files: `man 5 nfs`, and "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).

# %%
from lockstep.notebook.course_map import course_map

course_map("05_checkpointing")
