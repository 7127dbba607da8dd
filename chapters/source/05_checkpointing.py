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
# Long jobs rarely finish in one go. A disk fills up, a node dies, or SLURM **preempts** the job: it takes the nodes
# back for an urgent job. You build a job that recovers: you kill ranks while they save, cut files short, let SLURM
# preempt, and look at what is left on the disk.
#
# The chapter has two parts. **Part 1** saves and resumes, **Part 2** keeps a job running and ends with the capstone.
# Take a break between them.
#
# After this chapter you can
#
# - **list** the parts of a job's state, and say what happens if you forget one;
# - **save** so that a kill at any instant leaves a complete checkpoint;
# - **resume** in the middle of an epoch, bit for bit, and say when that is impossible;
# - **choose** how to save: one file, safetensors, shards, asynchronously;
# - **restart** a job under torchrun, even with fewer nodes, and stop it cleanly when a scheduler asks;
# - **rehearse** all of this before the long run.
#
# About 210 minutes: 60 to read and run, 150 for three exercises and the capstone. You need chapters 2 and 3, and for
# the capstone chapter 4, but no GPU. What the chapter says about GPUs, NCCL, power failures and network file systems
# was not run here.

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
# A checkpoint holds what the next process cannot compute itself. To find out what that is, take a job with dropout,
# AdamW, a learning rate schedule and a shuffling sampler, and forget one part at a time.

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
# The job trains for six epochs and saves its state after two. Only rank 0 writes. But each rank draws dropout masks
# from its own random generator, so the ranks first gather the generators' states:

# %%
# %%ranks 2
from small_job import *

dist.init_process_group("gloo")
job = Job()
for epoch in range(6):
    if epoch == 2:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        state = {"epoch": 2, "model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(),
                 "scheduler": job.scheduler.state_dict(), "rng": states}
        if dist.get_rank() == 0:
            torch.save(state, "saved/epoch2.pt")
    job.epoch(epoch)
if dist.get_rank() == 0:
    torch.save(job.model.state_dict(), "saved/through.pt")  # the final weights, uninterrupted

# %% [markdown]
# New processes load the file and train the other four epochs, once with everything and six times with one part
# forgotten. How far are the final weights from the uninterrupted run's?

# %%
# %%ranks 2
from small_job import *

dist.init_process_group("gloo")
rank, saved, through = dist.get_rank(), torch.load("saved/epoch2.pt"), torch.load("saved/through.pt")
parts = "nothing", "optimizer", "scheduler", "set_epoch", "random states", "rank 1's rng", "epoch + 1"
for forgotten in parts:
    job, rates = Job(), []
    job.model.load_state_dict(saved["model"])
    if forgotten != "optimizer":
        job.optimizer.load_state_dict(saved["optimizer"])
    if forgotten != "scheduler":
        job.scheduler.load_state_dict(saved["scheduler"])
    if forgotten != "random states":
        torch.set_rng_state(saved["rng"][0 if forgotten == "rank 1's rng" else rank])
    for epoch in range(1 if forgotten == "epoch + 1" else 2, 6):
        rates.append(f"{job.optimizer.param_groups[0]['lr']:g}")
        job.epoch(0 if forgotten == "set_epoch" else epoch)
    drift = max((w - through[name]).abs().max().item() for name, w in job.model.state_dict().items())
    if rank == 0:
        print(f"without {forgotten:14}{drift:9.1e}   learning rates {' '.join(rates)}")

# %% [markdown]
# With nothing forgotten, the weights are the same, bit for bit. The other runs are off by 0.1 to 0.2, without an error
# or a warning. So test a resume by comparing bits, not loss curves.
#
# Two of these mistakes lose the position in the data. The sampler shuffles with seed + epoch, so call `set_epoch` on
# the new one. And save the number of *finished* epochs, or the last one is trained twice.
#
# | part | where it is | if you forget it |
# |---|---|---|
# | parameters and buffers | `model.state_dict()` | training starts over; `parameters()` alone lacks BatchNorm's statistics |
# | optimizer | `optimizer.state_dict()` | Adam's moments and momentum restart |
# | scheduler | `scheduler.state_dict()` | the learning rate decays late, or warms up again |
# | gradient scaler | `scaler.state_dict()` | the first steps are skipped (below) |
# | position | the number of finished steps | samples repeat or are dropped |
# | random states, **of every rank** | `torch`, `random`, `numpy`, CUDA | dropout masks and augmentations repeat |
# | your own | best score, early stopping, averaged weights | training stops too early, or the wrong model is kept |
#
# The mode, `train()` or `eval()`, is not in a model's state_dict:

# %%
model = torch.nn.BatchNorm1d(4)
print("parameters():", [name for name, _ in model.named_parameters()])
print("state_dict():", list(model.state_dict()))
assert "training" not in model.state_dict()

# %% [markdown]
# The gradient scaler finds its scale by trial. It starts at 65536, and each overflow halves it and skips the step:

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
# Adam's two moments take twice the model's bytes, and the random states 5 kB per rank. So a checkpoint of 7 billion
# float32 parameters takes 84 GB, and only a third of it is weights.

# %%
quiz("05_checkpointing/forgotten")

# %% [markdown]
# ## Who writes, who reads
#
# Under DDP all ranks hold the same weights, so one of them writes. What happens if all of them write to one temporary
# file, and rename it when it is complete?

# %%
# %%ranks 2 --expect raised
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
torch.save({"step": 1}, "saved/unfinished.tmp")  # BUG: on every rank
dist.barrier()
for turn in range(dist.get_world_size()):
    if dist.get_rank() == turn:
        os.replace("saved/unfinished.tmp", "saved/newest.pt")
    dist.barrier()

# %% [markdown]
# Rank 0 renamed the file first, so rank 1 found nothing to rename. Without the barriers, rank 0 might even rename it
# while rank 1 is still writing. If both write to the final name, they corrupt that file, but no other:

# %%
# %%ranks 2 --expect raised
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.save({"step": 1}, f"saved/neighbour{rank}.pt")
with open("saved/both.pt", "wb", buffering=0) as file:  # BUG: both ranks, one name
    dist.barrier()
    for turn in range(2):
        if rank == turn:
            torch.save({"weights": torch.ones(3000 - 1000 * rank)}, file)
        dist.barrier()
print("the file beside it:", torch.load(f"saved/neighbour{rank}.pt"))
torch.load("saved/both.pt")

# %% [markdown]
# ### A barrier between save and load
#
# Here the disk is slow, and rank 1 reads when only half of the file is written:

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
# `failed finding central directory` means that the file is incomplete: a zip archive ends with its directory. Within
# one job, a `barrier` after the save fixes it:

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({"weights": torch.ones(100_000)}, "saved/slow.pt")
dist.barrier()  # +
print(len(torch.load("saved/slow.pt")["weights"]), "weights")

# %% [markdown]
# If the save takes longer than the process group's timeout, the waiting ranks fail and the job dies (chapter 3, "A
# short timeout").
#
# ### When the save fails
#
# The disk is full, and rank 0 handles the error. (A file size limit stands in for the full disk.)

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
# Rank 0 skipped the barrier and continued to the next step. (`torch.save` reports a full disk as a `RuntimeError`, not
# as an `OSError`.)
#
# **All ranks must learn the outcome of the save**, through one collective that every rank always calls. It replaces the
# barrier, since no rank gets the message before rank 0 has sent it.

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
dist.broadcast_object_list(problem, src=0)  # + instead of the barrier
print("rank 0 could not save:", problem[0])

# %% [markdown]
# ### Which file is the newest?
#
# This folder holds checkpoints 9 and 10, copied from another disk. Rank 1's node does not see checkpoint 10 yet, as on
# a network file system. Which way of choosing finds it on both ranks?

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
print("all load", chosen[0])

# %% [markdown]
# Only the last one does: by number, on rank 0 alone. As text, "9" sorts after "10", and the files' times are those of
# the copy. DDP would not notice that the ranks start at different steps. If any rank cannot read the chosen file, let
# all ranks try the next older one.
#
# **Rotation** deletes all but the newest few checkpoints. Let it delete only names that your code produces, because
# `*.pt` also matches other people's exports.
#
# ### Loading: where, and on which ranks
#
# DDP copies rank 0's weights to all ranks once, when it wraps the model. If only rank 0 loads, does it matter whether
# that is before or after wrapping?

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
# It does matter, and the optimizer's state is never copied. So **let every rank load everything.**
#
# A file records the device of each tensor. The next cell writes a file that says "GPU 0", and loads it on a machine
# without GPUs:

# %%
# %%ranks 1
import torch

def first_gpu(storage):
    return "cuda:0"

def leave(storage, place):
    return None

torch.serialization.register_package(0, first_gpu, leave)
torch.save(torch.ones(2), "saved/from_gpu.pt")
try:
    torch.load("saved/from_gpu.pt")
except RuntimeError as error:
    print(str(error).split(" If ")[0])
print(torch.load("saved/from_gpu.pt", map_location="cpu"))

# %% [markdown]
# *GPU.* With GPUs, every rank would load it onto GPU 0. Pass `map_location="cpu"` to every `torch.load`;
# `load_state_dict` then copies the values to each parameter's device. If host memory cannot hold one copy per rank, add
# `mmap=True` ("Formats").
#
# ### The prefix `module.`
#
# Which models can load the state_dict of a DDP wrapper? (`get_model_state_dict` belongs to DCP, see "Shards".)

# %%
# %%ranks 1
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
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
print("DCP's names:     ", list(get_model_state_dict(ddp)))

# %% [markdown]
# The wrapper holds your model as its attribute `module`, hence the prefix. Save `ddp.module.state_dict()` instead. If a
# file has the prefix, remove it with `consume_prefix_in_state_dict_if_present`: replacing text would also change
# `submodule.weight`.

# %%
quiz("05_checkpointing/barrier")

# %% [markdown]
# ## Atomic and durable
#
# What if rank 0 is killed while it saves? That is common: time limits and hourly saves both fall on the hour. These
# three ways to save write to a `Doomed` file, which kills its process after a given number of bytes:

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

def delete_first(state, name):
    os.remove(name)
    in_place(state, name)

def replace(state, name):
    in_place(state, name + ".tmp")
    os.replace(name + ".tmp", name)

# %% [markdown]
# Checkpoint 1 exists. The save of checkpoint 2 is killed halfway:

# %%
torch.save({"step": 1}, "saved/newest.pt")

# %%
# %%ranks 2 --expect crashed
from saving import *
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
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
# Checkpoint 2 is **torn** (cut short), and checkpoint 1 is gone, because opening the file for writing emptied it. The
# type of error depends on where the file was cut, so catch `Exception` before you fall back to an older checkpoint.
#
# Now save in each of the three ways, ten times with a kill at a different byte, and once without a kill (last column).
# Which step can be loaded afterwards?

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

for way in ("in_place", "delete_first", "replace"):
    print(f"{way:14}", *[survivor(way, instant) for instant in [*range(1, 20_000, 2000), 10**9]])

# %% [markdown]
# Only `replace` always leaves a complete checkpoint, because `os.replace` is **atomic**: at every instant, the name
# belongs either to the old file or to the new one. POSIX promises this within one file system, so put the temporary
# file into the same folder, not into `/tmp`. Delete old checkpoints only after the new one has its name.
#
# ![A save killed at ten instants: in place, nothing can be loaded; with replace, always checkpoint 1](pictures/kill.svg)
#
# A kill leaves a temporary file behind. If you always use the same temporary name, the next save overwrites it.

# %%
torch.save({"step": 1}, "saved/newest.pt")
print(survivor("replace", 5000), sorted(file.name for file in Path("saved").glob("newest*")))

# %%
quiz("05_checkpointing/two_files")

# %% [markdown]
# ### Durable: power failures
#
# After a kill, the kernel still writes what it has received. In a power failure it stops too, and since it doesn't
# write in order, the disk may have the new name without the bytes. `os.fsync` returns when the data are on the disk.
# Call it for the file's bytes first, then for the folder, which holds the name:

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
# Everything above holds on a local disk. Shared file systems, where checkpoints usually go, promise less:
#
# | file system | what to know |
# |---|---|
# | local NVMe | Fast, atomic rename. Lost with the node, so copy checkpoints away |
# | NFS | A file is up to date if you *open* it after its writer has closed it. Nodes may see different listings for up to a minute. A node that has a file open gets `ESTALE` when another replaces it. A full quota may only show in `fsync` or `close` |
# | Lustre, GPFS | All nodes see the same files at once; rename is atomic. Opening and creating files is slow: write few large ones, and stripe them over several servers (`lfs setstripe -c`) |
# | FUSE over object storage | On ordinary buckets, Mountpoint for S3 cannot rename, and gcsfuse copies and deletes instead. Upload the data first and a small marker last, and trust only what has the marker |
#
# ### A changed bit
#
# A bad disk or copy can flip a bit, and `torch.load` does not check:

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
# A weight of 1 has silently become infinite. The archive holds a CRC (a short checksum) of every entry, and `testzip`
# compares it. Do that before you load, or keep your own checksum inside the file or in its name. A second file won't
# do, because two files cannot be replaced in one step.
#
# If the newest file is damaged, load the one before it and print a warning. If you raise, an unattended job dies
# although an intact checkpoint exists. If you return `None`, the job starts at step 0, and rotation deletes the good
# checkpoints.
#
# ### weights_only
#
# `torch.save` writes a pickle, and a pickle is a program: the file's author decides what runs when you load it.

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
# `weights_only=True` reads tensors and plain data, and refuses whatever may run code. That includes some harmless
# things that checkpoints often hold:

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
    torch.save(value, "saved/candidate.pt")  # nothing is refused here
    try:
        torch.load("saved/candidate.pt")
        print("loaded  ", name)
    except Exception:
        print("refused ", name)

# %% [markdown]
# You notice at the restart, because `torch.save` accepts all of them. Save `vars(arguments)`, `float(score)`,
# `str(path)`, and NumPy's state with its array as a list. If a file that you trust holds your own class, use
# `torch.serialization.add_safe_globals([MyClass])`.

# %%
quiz("05_checkpointing/rename")

# %% [markdown]
# ## Exercise: implement checkpoint
#
# *Hard, 35 minutes.* Open [`exercises/checkpoint.py`](../exercises/checkpoint.py). The check kills your save at its
# writes, renames and fsyncs, fills the disk, tears files, and reads while you write.

# %%
contract("checkpoint", "save_checkpoint", "load_latest")

# %%
# %check checkpoint

# %% [markdown]
# <details><summary>After a kill in the middle, no good checkpoint is left</summary>
# The temporary file belongs in the final file's folder. Delete an older checkpoint last.
# </details>
#
# <details><summary>"… may not be on the disk"</summary>
# Keep this order: flush and fsync the open file, rename it, fsync the folder.
# </details>
#
# The solution is `solutions/checkpoint.py`.
#
# ## Formats
#
# **One file.** `torch.save` writes a zip archive: a pickle that describes the objects, and the bytes of every tensor.

# %%
torch.save({"a": torch.ones(3), "step": 7}, "saved/one.pt")
for entry in zipfile.ZipFile("saved/one.pt").infolist():
    print(entry.filename, entry.file_size)

# %% [markdown]
# With `mmap=True`, `torch.load` maps the file into memory and reads a tensor only when you use it. Ranks on one node
# share the pages. How many MB does each way read?

# %%
def bytes_read():
    """What this process has read so far, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split()[1])

torch.save({name: torch.ones(4_000_000) for name in ("a", "b")}, "saved/large.pt")
for mmap in (False, True):
    before = bytes_read()
    state = torch.load("saved/large.pt", mmap=mmap)
    print(f"mmap={mmap!s:6} read {(bytes_read() - before) / 1e6:5.1f} MB of 32")

# %% [markdown]
# While a file is mapped, nothing may write to it in place. `os.replace` is safe, because the old file lives on until it
# is unmapped.
#
# Models are usually published as **safetensors**, a format without a pickle, so loading runs no code. A file holds a
# header's length, the header in JSON, and the tensors' bytes. Ten lines write one:

# %%
import json, struct

def save_tensors(tensors, name):
    header, data = {}, b""
    for key, tensor in tensors.items():
        start, data = len(data), data + tensor.contiguous().numpy().tobytes()
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    Path(name).write_bytes(struct.pack("<Q", len(text)) + text + data)

save_tensors({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, "saved/one.safetensors")
whole = Path("saved/one.safetensors").read_bytes()
(length,) = struct.unpack("<Q", whole[:8])
print(whole[8 : 8 + length].decode())

from safetensors.torch import load_file

print("read by the library:", load_file("saved/one.safetensors"))

# %% [markdown]
# The format holds only named tensors, without a checksum. It suits published weights, but not an optimizer's nested
# state.
#
# ### Shards
#
# If a model is sharded, as with FSDP2 (chapter 4, "Beyond DDP"), no rank has all of it. With
# `torch.distributed.checkpoint`, **DCP**, each rank writes its part into one folder; under DDP, it divides the writing
# among the ranks. `get_state_dict` and `set_state_dict` handle model and optimizer together:

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
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)  # into the tensors that are there
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
# The weights and two moments are 0.8 MB, and each rank wrote half. `.metadata` says which piece is where. So a
# different number of ranks can read the folder, sharded or not. Here are three ranks under DDP:

# %%
# %%ranks 3
from sharded import *

model, optimizer = make(DDP)
load(model, optimizer, "saved/shards")
moments = optimizer.state[model.module.weight]
print(f"step {moments['step']:.0f}, first moment {moments['exp_avg'].mean():.3f}")

# %% [markdown]
# All three ranks now have Adam's state from the two-rank job. `dcp.save` and `dcp.load` are collectives. `load` fills
# the tensors that you pass and ignores the rest. Rotation, checksums and choosing the newest folder remain your task.
#
# DCP writes `.metadata` last. Without it, the folder is not a checkpoint:

# %%
# %%ranks 1 --quiet --into run
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from lockstep.ranks import observe

dist.init_process_group("gloo")
dcp.save({"step": 1}, checkpoint_id="saved/killed")
os.remove("saved/killed/.metadata")  # as after a kill, since it is written last
try:
    dcp.load({"step": 0}, checkpoint_id="saved/killed")
except BaseException as error:
    observe("error", f"{type(error).__name__}, an Exception: {isinstance(error, Exception)}")

# %%
print(run.observed("error")[0])

# %% [markdown]
# `except Exception` does not catch this `CheckpointException`.
#
# `ZeroRedundancyOptimizer` has a sharded state too. `consolidate_state_dict` collects it on one rank, which needs
# memory for all of it:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
try:
    optimizer.state_dict()
except RuntimeError as error:
    print(str(error).split(".")[0])
optimizer.consolidate_state_dict(to=0)  # a collective
if dist.get_rank() == 0:
    print("Adam's state here, after consolidating:", len(optimizer.state_dict()["state"]), "parameters")

# %% [markdown]
# ### Saving in the background
#
# `async_save` copies the state to memory, returns, and writes while training continues. This cell's disk is half a
# second slower than yours:

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
state = {"weights": torch.ones(1_000_000)}
began = time.perf_counter()
dcp.save(state, storage_writer=SlowDisk("saved/waited"))
waited = time.perf_counter() - began
began = time.perf_counter()
future = dcp.async_save(state, storage_writer=SlowDisk("saved/beside"))
stalled = time.perf_counter() - began
state["weights"] += 1  # training continues
future.result()  # before the next save, and before the end
again = {"weights": torch.zeros(1_000_000)}
dcp.load(again, checkpoint_id="saved/beside")
print("saved value:", again["weights"][0].item(), "  value now:", state["weights"][0].item())
observe("stall", [waited, stalled])

# %%
waited, stalled = run.observed("stall")[0]
bars({"save": waited, "async_save": stalled}, unit="s", title="how long training stands still")

# %% [markdown]
# Because of the copy, the file holds the values at the time of the call. The copy takes as much host memory as the
# state. If your own thread calls `torch.save` without a copy, training changes the tensors while they are written:

# %%
import io, threading

class Pausing(io.BytesIO):
    """Writes the first tensor, lets training take a step, writes the second."""
    def write(self, data):
        if len(data) == 4000 and not written.is_set():
            super().write(data)
            written.set()
            stepped.wait()
            return len(data)
        return super().write(data)

# %%
written, stepped, file = threading.Event(), threading.Event(), Pausing()
state = {"a": torch.ones(1000), "b": torch.ones(1000)}
thread = threading.Thread(target=torch.save, args=(state, file))  # BUG: no copy
thread.start()
written.wait()
for tensor in state.values():
    tensor += 1  # a training step
stepped.set()
thread.join()
file.seek(0)
print({name: tensor[0].item() for name, tensor in torch.load(file).items()})

# %% [markdown]
# `a` is from before the step, `b` from after it.
#
# Until the future is done, keep the old checkpoint, and don't start another save. With NCCL, `async_save` needs a group
# that also works for CPU tensors: `init_process_group("cpu:gloo,cuda:nccl")`.

# %%
quiz("05_checkpointing/async")

# %% [markdown]
# ## Resuming mid-epoch
#
# An epoch may take a day, so most checkpoints fall in the middle of one. Here two ranks share 48 samples in batches of
# 4: six steps per epoch. The job is interrupted after four steps of epoch 1. Which of four ways to continue neither
# repeats nor misses samples?

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
# The last, which needs one number, the finished steps:
#
# ```
# epoch, done = divmod(step, steps_an_epoch)
# sampler.set_epoch(epoch)
# rest = list(sampler)[done * batch_size :]
# ```
#
# Then use `DataLoader(data, batch_size, sampler=rest)`. Fetching the finished batches and dropping them takes longer,
# and draws random numbers if the dataset augments. Count a step only when its update is *in the weights*.
#
# ### The loader is ahead of you
#
# Don't ask the sampler for the position either: workers fetch batches in advance.

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
# Only the code that hands out batches knows the position. torchdata's `StatefulDataLoader` has a `state_dict` with the
# number of batches that it has *given*, and its workers' states. For a dataset with indices, a few lines do the same:

# %%
# %%writefile stateful.py
from torch.utils.data import DataLoader, DistributedSampler

class StatefulLoader:
    """Batches by a DistributedSampler. Its state is the position after the last batch given."""
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
# An endless stream has no indices, so each rank saves the file and line that it has reached.
#
# ### Restore random states last
#
# A new model draws its weights, and each iterator over a `DataLoader` draws a seed for its workers, even if it has
# none. So restore random states just before the first step:

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
# A job that resumes mid-epoch creates one more iterator than the uninterrupted run. Created after the restore, it
# changes all later dropout masks. So give the loader its own generator. Python, NumPy, torch and each GPU have separate
# generators.

# %%
quiz("05_checkpointing/ahead")

# %% [markdown]
# ## Determinism
#
# "The same result" can mean the same mathematics or the same bits. Bits depend on the order in which numbers are added:

# %%
a, b, c = torch.tensor([1e8, -1e8, 1.0])
print((a + b) + c, a + (b + c))

# %% [markdown]
# ### Random numbers
#
# Seed before anything draws random numbers, including the initial weights, and use **seed + rank**. With one seed for
# all, every rank drops the same units. Only the sampler's seed must be the same everywhere.

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
# Three ranks train two steps. A second run restarts after the first step with everything restored, on the same ranks
# and samples. Are all 4801 weights the same, bit for bit?

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
    print(f"{flag:29}weights with other bits: {differ:5}"
          f" by more than 1e-6: {int(((through - restarted).abs() > 1e-6).sum())}")

# %% [markdown]
# After its first step, DDP sorts the gradients into new buckets, in the order in which they became ready (chapter 1). A
# restarted process has the initial buckets again. With three or more ranks, an element's place in its bucket decides in
# which order the ranks' values are added. With two ranks, a + b is b + a.
#
# Equal bits matter when you *test* a resume, because "nearly equal" can hide a forgotten scheduler. So test on two
# ranks, or with `find_unused_parameters=True`: then DDP never rebuilds its buckets, at the price of one more all-reduce
# per step (chapter 4, "A static graph"). Or let DDP take one step right after the restart, and then restore everything,
# which undoes the step.
#
# ### A different number of ranks
#
# Here the same 24 samples are one global batch, on 1, 2, 3 and 4 ranks:

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
    print(f"{world_size} ranks: bits that differ from one rank: {differ};",
          f"elements off by more than 0.0001: {int(((gradient - alone).abs() > 1e-4).sum())}")

# %% [markdown]
# The mathematics agrees; the bits do not, whatever you set. After a restart on fewer nodes, keep the *global* batch
# (more samples per rank, or more accumulation) and compare loss curves. Dropout cannot continue exactly, because a new
# rank has no saved random state.
#
# *GPU.* Some kernels add in an order that varies from run to run. `torch.use_deterministic_algorithms(True)` makes them
# raise, or use a slower method. cuDNN's benchmark mode may choose a different algorithm at each start, and NCCL chooses
# by size and topology.

# %%
quiz("05_checkpointing/world_size")

# %% [markdown]
# ## Exercise: implement exact_resume
#
# *Hard, 30 minutes.* Open [`exercises/exact_resume.py`](../exercises/exact_resume.py). Write `train`, a loop that can
# be stopped after any step and, resumed, ends with the same bits. It uses your `save_checkpoint` and `load_latest`.

# %%
contract("exact_resume", "train")

# %%
# %check exact_resume

# %% [markdown]
# <details><summary>Samples are repeated or missed</summary>
# Everything follows from the number of finished steps: <code>divmod</code>, <code>set_epoch</code>, a slice of the
# sampler's list.
# </details>
#
# <details><summary>The samples are right, but the weights differ</summary>
# A random state or another part was not restored. If the first step already differs, you restored the states too early.
# </details>
#
# <details><summary>Two ranks agree bit for bit, three do not</summary>
# DDP's buckets are the cause ("Restarts change the bits"). Your checkpoint is fine.
# </details>
#
# The solution is `solutions/exact_resume.py`.
#
# ## Checklist: checkpoint and resume
#
# - **The state**: model with buffers, optimizer, scheduler, scaler, finished steps, every rank's random states, your
#   own counters; only types that `weights_only=True` reads.
# - **Saving**: one writer, or DCP. A temporary name in the same folder, fsync, `os.replace`, fsync of the folder, then
#   rotation. All ranks learn the outcome.
# - **Loading**: rank 0 chooses by number and skips damaged files with a warning. Every rank loads everything.
# - **Resuming**: `divmod`, `set_epoch`, the rest of the sampler's list. A separate generator for the loader. Random
#   states last.
#
# # Part 2: Elastic training, SLURM and the capstone
#
# ## Elastic restarts
#
# torchrun watches its ranks. When one dies, it ends **all** of them and starts the script again, as often as
# `--max-restarts` allows:

# %%
from torch.distributed.run import get_args_parser

options = get_args_parser()
for name in ("max_restarts", "signals_to_handle"):
    print(f"{name:18} {options.get_default(name)}")

# %% [markdown]
# By default, never. And the script itself must find its checkpoint. This one saves every second step. At step 5, rank 1
# is killed, or hangs:

# %%
# %%writefile elastic.py
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from saving import replace

accident, NAME = sys.argv[1], f"saved/{sys.argv[2]}.pt"
dist.init_process_group("gloo", timeout=timedelta(seconds=5 if accident == "hang" else 60))
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = torch.load(NAME) if os.path.exists(NAME) else {"step": 0, "weights": torch.zeros(3)}
if rank == 0:
    print(f"attempt {attempt} starts at step {state['step']}", flush=True)
while state["step"] < 8:
    gradient = state["weights"] - rank - state["step"]
    dist.all_reduce(gradient)
    state = {"step": state["step"] + 1, "weights": state["weights"] - 0.1 * gradient}
    unlucky = attempt == 0 and rank == 1 and state["step"] == 5
    if unlucky and accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if unlucky and accident == "hang":
        time.sleep(600)
    if state["step"] % 2 == 0 and rank == 0:
        replace(state, NAME)
    dist.barrier()
os._exit(0)

# %% [markdown]
# `./lockstep run` takes the same options as torchrun, starts faster and says what happened. Here is the job without an
# accident, then with rank 1 killed:

# %%
import contextlib, io, time
from lockstep.commands.project import run_script as run_command

def lockstep_run(*arguments):
    """Delete an earlier run's checkpoint, run the job, and print its output and the headlines."""
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
# Rank 0 was healthy, but was restarted too. Step 5 was done twice, and the final weights are the same.
#
# **torchrun's restarts are reliable only with one variable set.** The ranks leave their addresses in a store, and
# torchrun (2.4 to 2.13) keeps one store for all attempts. So a rank of the second attempt may read a dead rank's
# address, and the job ends with `Connection refused`. With gloo this happened in six of ten restarts of this script.
# With `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which gives each attempt its own store, it happened in none of eight.
# (For NCCL see PyTorch's issues 135712 and 167288.) Why are the old addresses still there?

# %%
# %%ranks 2
import os
import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
before = store.num_keys()
dist.barrier()
dist.destroy_process_group()
gone = before - store.num_keys()
print("after destroy_process_group,", max(gone, 0), "of the keys are gone")

# %% [markdown]
# A destroyed group leaves its keys in the store.
#
# `TORCHELASTIC_RESTART_COUNT` numbers the attempts, but doesn't say whether a checkpoint exists: a job that SLURM
# starts again is at attempt 0, with a checkpoint on the disk.
#
# ### A hang is not a death
#
# torchrun notices only processes that end. The process group's timeout ends a rank that hangs, here after five seconds:

# %%
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

def torchrun(*arguments):
    """Delete an earlier run's checkpoint, run torchrun, and print the job's output."""
    Path(f"saved/{arguments[-1]}.pt").unlink(missing_ok=True)
    job = subprocess.run([*TORCHRUN, *arguments], capture_output=True, text=True, timeout=200)
    print(job.stdout, end="")
    print("exit status", job.returncode)

torchrun("--nproc-per-node=2", "--max-restarts=1", "elastic.py", "hang", "hung")

# %% [markdown]
# With the default timeout (30 minutes; 10 with NCCL), the machines would have idled that long before the restart.
#
# ### When a node is lost
#
# `--nnodes=1:2` asks for two nodes, and accepts one. The cell runs two hosts with their own addresses, and kills node 1
# after the first save:

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
    print("done after step", step, "  samples a step:", mine.item(), flush=True)
os._exit(0)

# %% tags=["needs-hosts"]
import time

def lose_a_node():
    """Run torchrun on two hosts and kill one. Returns what the other one printed."""
    Path("saved/shrinking.pt").unlink(missing_ok=True)
    waits = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job",
               "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", f"--rdzv-conf={waits}"]
    with cluster.Nodes(2) as nodes:
        nodes.run(1, [*command, "shrinking.py"])
        time.sleep(1)  # node 0 has the store, and starts the clock: be there when it opens
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
# The torchrun on node 0 waited eight seconds for other nodes (`last_call_timeout`, 30 by default). Then it started the
# script with `WORLD_SIZE=1`, and the script kept the global batch of 24. If the node returns, torchrun restarts the job
# on two. The node in `--rdzv-endpoint` holds the store: if it dies, the job ends. With the package `torchft`, healthy
# replicas continue without a restart.
#
# ### What a restart asks of a script
#
# | the launcher | so the script |
# |---|---|
# | starts it from the top | looks for a checkpoint every time; finding none is no error |
# | ends all ranks at any instant | saves atomically, and often enough |
# | may change `RANK` and `WORLD_SIZE` | reads them again; state belongs to the job, not to a rank |
# | runs the set-up code again | makes it repeatable: an existing folder is fine, and the log is not truncated |
# | restarts after every failure | sets a low limit: with `--max-restarts=100`, a bug fails 101 times |
# | counts exit status 0 as success | exits with a nonzero status on failure, and returns at once if nothing is left to do |
# | restarts only after a process ends | sets a timeout, so that a hang ends |
#
# ### How often to save
#
# Each save costs time *C*, and each failure half an interval on average. With a mean time *M* between failures, the
# best interval is about √(2·C·M) (Young, 1974). The cell simulates a job of a thousand hours, with saves of 3 minutes
# and a failure every 20 hours on average:

# %%
import math

def overhead(interval, cost=0.05, mean=20.0, work=1000.0):
    """Hours spent beyond the work, as a share of it."""
    generator, spent, done = random.Random(0), 0.0, 0.0
    failure = generator.expovariate(1 / mean)
    while done < work:
        if failure >= interval + cost:  # the interval and its save are survived
            spent, done = spent + interval + cost, done + interval
            failure -= interval + cost
        else:
            spent, failure = spent + failure, generator.expovariate(1 / mean)
    return spent / done - 1

for hours in (0.1, 0.5, math.sqrt(2 * 0.05 * 20), 4, 10):
    print(f"every {hours:4.1f} h   {overhead(hours):.0%} more time")

# %% [markdown]
# The formula gives 1.4 hours. It needn't be exact: a third of that interval, or three times it, costs only 3 to 4
# percentage points more.

# %%
quiz("05_checkpointing/restart")

# %% [markdown]
# ## Preemption and SLURM
#
# Before it takes the nodes back, a scheduler sends a signal: SIGTERM by default, SIGUSR1 if you ask SLURM for it. A
# handler may run between any two lines of Python, so let it only set a flag, which the loop checks between steps. But
# the signal reaches ranks at different moments, or only one of them:

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
# Rank 1 wants to save, the others keep training, and the job hangs in its last minute. One small all-reduce per step
# lets them decide together:

# %%
# %%ranks 3
import os, signal
import torch, torch.distributed as dist

asked = torch.zeros(1)
def ask(number, frame):
    asked.fill_(1)

signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
for step in range(10):
    dist.all_reduce(torch.ones(1))  # the work
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    stop = asked.clone()
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)  # +
    if stop:
        break
dist.barrier()
print("saves after step", step)

# %% [markdown]
# With `ReduceOp.MAX`, one rank with the signal is enough. If steps are short, ask only every tenth step, on all ranks.
#
# ### Under SLURM
#
# The script below requests two nodes and starts one torchrun on each, with the rendezvous on the first. Three parts
# prepare for the end:
#
# - `--signal=B:USR1@60` sends SIGUSR1 to the batch script alone (`B:`), 60 seconds before the time limit. At
#   preemption, SLURM sends it only if the cluster sets `preempt_send_user_signal`, as this one does. Then you have the
#   partition's `GraceTime` instead of 60 seconds: 10 here, 0 by default.
# - The `trap`, bash's signal handler, sends SIGTERM to torchrun and waits until the ranks have saved. torchrun passes
#   on SIGTERM, but not SIGUSR1 by default (`signals_to_handle`, above).
# - `--requeue` and `scontrol requeue` put the job back into the queue under its number. Requeue on USR1 only: if the
#   trap also caught SIGTERM, `scancel` would restart the job. `--open-mode=append` keeps the log.
#
# ![SLURM signals the script, the script torchrun, torchrun the ranks; they save, and the job is requeued](pictures/requeue.svg)
#
# bash runs a trap only after the foreground command has ended. So `srun` has to run in the background while the script
# waits for it:

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
print("background:", trapped(command + " & while kill -0 $!; do wait $!; done 2>/dev/null"))

# %% [markdown]
# The signal also ends `wait`. So the script has to wait again, in a loop as above, or in the trap as below:

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

# %%
# %%writefile preempted.py
import os, signal, time, torch, torch.distributed as dist
from saving import replace

NAME, asked = "saved/preempted.pt", torch.zeros(1)
def ask(number, frame):
    asked.fill_(1)
signal.signal(signal.SIGTERM, ask)
dist.init_process_group("gloo")
rank = dist.get_rank()
step = torch.load(NAME)["step"] if os.path.exists(NAME) else 0
if rank == 0:
    print("starts at step", step, flush=True)
while step < 60:
    time.sleep(0.1)  # the work
    step += 1
    stop = asked.clone()
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if rank == 0 and (stop or step % 10 == 0):
        replace({"step": step}, NAME)
    if stop:
        break
if rank == 0:
    print("ends after step", step, flush=True)
os._exit(0)

# %% [markdown]
# The next cell starts a real SLURM cluster on this machine, with a controller and two nodes. It submits the job, then
# an urgent job that takes both nodes:

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
# When the nodes are free, the job starts again under its number:

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
# No step was done twice. Save periodically too, because the signal may come too late, or a node may just die.
#
# The **grace period**, from the signal to the kill, has to cover one step plus one save. Measure both. torchrun kills
# its ranks 30 seconds after SIGTERM, unless `--shutdown-timeout` or `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` gives them more.
# If you may not requeue, submit an array whose tasks run one after another (`--array=1-10%1`), or the same job several
# times with `--dependency=singleton`.

# %%
quiz("05_checkpointing/signal")

# %% [markdown]
# ## Exercise: implement elastic_training
#
# *Hard, 25 minutes.* Open [`exercises/elastic_training.py`](../exercises/elastic_training.py). Write a loop that survives SIGKILL at random steps, a signal
# to stop that may reach only one rank, and a restart on a different number of ranks.

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
# Check the step before the loop.
# </details>
#
# The solution is `solutions/elastic_training.py`.
#
# ## Capstone: implement train
#
# *Hard, 60 minutes, or as long as you like.* Open [`exercises/train.py`](../exercises/train.py) and
# [`exercises/train.sbatch`](../exercises/train.sbatch). Put everything from this course into one script for a cluster:
#
# - the loop: arguments, sampler, DDP, mixed precision, accumulation, clipping;
# - what it reports: metrics of all ranks, evaluation that counts each sample once, logging on rank 0;
# - what it survives: checkpoint and resume, and a clean stop on a signal.
#
# The check runs `train.py` on one, two and four ranks and on two hosts, kills a rank, asks one to stop, and trains the
# digits to 95 %. If this machine has SLURM, it also submits `train.sbatch`, preempts it and kills a node, in about half
# a minute. The last cell submits your files to the cluster from above.

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
    job = slurm.wait(number, 55)
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
# The solutions are `solutions/train.py` and `solutions/train.sbatch`.
#
# ## Before a long run
#
# Rehearse first, on two ranks and with a small model. Each of these takes minutes:
#
# | rehearse | and look at | section |
# |---|---|---|
# | stop after 7 steps and resume to step 12; run 12 without stopping | every bit of the weights | "Resuming mid-epoch" |
# | SIGKILL one rank, during a step and during a save | the step from which the job continues | "Elastic restarts", "Atomic and durable" |
# | cut the newest checkpoint in half, or change one bit of it | a warning, and the older one is loaded | "Atomic and durable" |
# | fill the disk, or the quota | all ranks report it; older checkpoints are there | "Who writes, who reads" |
# | SIGTERM to one rank only | all stop after the same step, and save | "Preemption and SLURM" |
# | let a rank sleep | how long until the job notices | "Elastic restarts" |
# | let SLURM requeue the job | the log is appended to, the step count continues | "Preemption and SLURM" |
# | load the checkpoint in a plain process with `weights_only=True` | evaluation gives the same number | "Atomic and durable" |
# | resume on a different number of ranks, if you ever will | the loss curve continues | "Determinism" |
# | start the finished job again | it exits at once with status 0 | "Elastic restarts" |
#
# Write down three numbers:
#
# - the seconds per save: less than the timeout and the grace period;
# - the bytes of all checkpoints that you keep, plus one: less than the quota;
# - the steps that a kill costs at most.

# %%
quiz("05_checkpointing/rehearsal")

# %% [markdown]
# ## Checklist
#
# For saving and resuming, see "Checklist: checkpoint and resume".
#
# - **Stopping**: a handler that sets a flag; an all-reduce with MAX; save; exit status.
# - **Restarting**: `--max-restarts`, a store for each attempt, a timeout that fits.
# - **Under SLURM**: `--signal`, `--requeue`, `--open-mode=append`; a grace period for a step and a save.
#
# ## Take it with you
#
# - Forgetting a part of the state raises no error. Compare bits with an uninterrupted run.
# - At every instant, one complete checkpoint must have its final name.
# - Random states belong to ranks. The position belongs to the code that hands out batches.
# - Equal bits need the same number of ranks and the same buckets.
# - Only what is on the disk survives a restart. The script runs from the top, on all ranks.
# - All ranks decide together when to stop.
#
# In an interview, expect: "Your job was killed while it was writing a checkpoint. What happens?" Say which file has
# which name at that instant, and how the ranks agree on one.
#
# ## What to read next
#
# PyTorch's pages on torchrun (`pytorch.org/docs/stable/elastic/run.html`), on `torch.distributed.checkpoint`
# (`pytorch.org/docs/stable/distributed.checkpoint.html`) and on reproducibility
# (`pytorch.org/docs/stable/notes/randomness.html`). SLURM's page on preemption (`slurm.schedmd.com/preempt.html`) and
# the manual of `sbatch`. On files: `man 5 nfs` on what NFS caches, the paper "All File Systems Are Not Created Equal"
# (Pillai et al., OSDI 2014), and J. W. Young's "A first order approximation to the optimum checkpoint interval" (1974).

# %%
from lockstep.notebook.course_map import course_map

course_map("05_checkpointing")
