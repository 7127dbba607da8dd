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
# Long jobs do not end, they are ended: by a full disk, a dead node, a time limit, somebody's urgent job. This chapter
# is about coming back. Everything that goes wrong in it goes wrong in the cells: ranks are killed in the middle of a
# save, files are torn and altered, a job is thrown out of a SLURM cluster. Each time you look at what is left on the
# disk.
#
# After this chapter you can
#
# - **list** what a job's state consists of, and say what forgetting each part costs;
# - **save** so that a kill at any instant leaves a whole checkpoint, and all ranks load the same one;
# - **resume** in the middle of an epoch, bit for bit, and say when bits cannot be had;
# - **choose** a format: one file, safetensors, shards, and saving beside the training;
# - **restart** a job under torchrun, and stop it in good order when a scheduler asks;
# - **rehearse** all of this before the long run.
#
# About 215 minutes: 65 to read and run, 150 for three exercises and the capstone. You need chapters 2 and 3, and for
# the capstone chapter 4. No GPU: where a statement is about GPUs it says so, and says that it was not run here.

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
# ## What a job's state is
#
# A checkpoint holds what the next process cannot compute by itself. To find out what that is, take a job with
# everything that has a state, and forget the parts one by one.

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
# It trains for six epochs, and saves its state after two. The random generators (for dropout) differ from rank to rank,
# and each rank knows only its own, so their states are gathered.

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
    torch.save(job.model.state_dict(), "saved/through.pt")  # what an undisturbed run ends with

# %% [markdown]
# Those processes are gone. New ones load the file and train the four epochs that are left, seven times: once with
# everything, then each time without one thing. How far do the weights end from the undisturbed run's?

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
    if forgotten == "set_epoch":
        job.sampler.set_epoch = lambda number: None
    if forgotten != "random states":
        torch.set_rng_state(saved["rng"][0 if forgotten == "rank 1's rng" else rank])
    for epoch in range(1 if forgotten == "epoch + 1" else 2, 6):
        rates.append(f"{job.optimizer.param_groups[0]['lr']:g}")
        job.epoch(epoch)
    drift = max((w - through[name]).abs().max().item() for name, w in job.model.state_dict().items())
    if rank == 0:
        print(f"without {forgotten:14}{drift:9.1e}   learning rates {' '.join(rates)}")

# %% [markdown]
# The first row is zero, and means it: not nearly equal, the same bits. Every other run went on without an error or a
# warning. That is why a resume is tested by comparing bits, not by looking at a curve.
#
# Two of the rows are about the job's position rather than a file's contents. The sampler shuffles with seed + epoch, so
# a new sampler must be told the epoch. And `epoch` in the file counts what is *done*: whoever saves the number of the
# epoch that has just ended and starts there trains it twice. The scheduler's row shows in the rates: its own count
# begins at zero, so the drop comes two epochs late.
#
# A common recipe saves epoch, model, optimizer and loss: no scheduler, no scaler, no random state. The whole list:
#
# | part | where it is | forgotten, it |
# |---|---|---|
# | parameters and buffers | `model.state_dict()` | begins anew; `parameters()` alone lacks BatchNorm's statistics |
# | optimizer | `optimizer.state_dict()` | restarts Adam's moments, momentum |
# | scheduler | `scheduler.state_dict()` | decays late, or warms up again |
# | gradient scaler | `scaler.state_dict()` | skips the first steps (below) |
# | position | the number of finished steps | repeats or drops samples |
# | random states, **of every rank** | `torch`, `random`, `numpy`, CUDA | repeats masks and augmentations |
# | your own | a best score, early stopping, an average of weights | stops, or keeps, the wrong thing |
#
# The sampler needs no entry: `set_epoch` and the position say all. Mode is not saved either: a model that was loaded
# after evaluating stays in `eval()` until somebody calls `train()`.

# %%
model = torch.nn.BatchNorm1d(4)
print("parameters():", [name for name, _ in model.named_parameters()])
print("state_dict():", list(model.state_dict()))
assert "training" not in model.state_dict()

# %% [markdown]
# And the scaler of mixed precision? Its scale is found by trial. It begins at 65536 and is halved each time a gradient
# overflows; a step that overflows is skipped.

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
# How large is all this?

# %%
saved = torch.load("saved/epoch2.pt")

def size(value):
    """Bytes in all tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = value.values()
    return sum(map(size, value)) if not isinstance(value, (int, float, bool, str, type(None))) else 0

for part in ("model", "optimizer", "rng"):
    times = size(saved[part]) / size(saved["model"])
    print(f"{part:10}{size(saved[part]):6} bytes, {times:.1f} times the model")

# %% [markdown]
# Adam's two moments are twice the model. The random states are 5 kB a rank, much in this toy and nothing in a real
# model. So a checkpoint of a model with 7 billion float32 parameters is 84 GB, of which the weights are a third.

# %%
quiz("05_checkpointing/forgotten")

# %% [markdown]
# ## Who writes, who reads
#
# Under DDP all ranks hold the same weights after every step, so one of them writes. Suppose that each does, carefully,
# through a temporary file that is renamed when it is complete:

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
# Rank 0 has taken the file from under rank 1. The barriers fix an order that otherwise falls out one way on most days,
# and another on one of them: rank 0 may also rename a file into which rank 1 is still writing. And two who write to one
# name without any care spoil that file. Some say that they spoil the file system: they do not. The file beside it is well:

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
            torch.save({"weights": torch.ones([3000, 2000][rank])}, file)
        dist.barrier()
print("its neighbour:", torch.load(f"saved/neighbour{rank}.pt"))
torch.load("saved/both.pt")

# %% [markdown]
# ### A barrier between save and load
#
# One writes, the others read later. Here the disk is slow, and rank 1 looks when half of the file is there:

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
        dist.barrier()  # as far as it has come when the others look
        dist.barrier()
        file.write(whole.getvalue()[200_000:])
else:
    dist.barrier()
    torch.load("saved/slow.pt")  # BUG: that it exists does not mean that it is whole

# %% [markdown]
# **What this tells you.** `failed finding central directory` is the message of a file that is not complete: the
# directory of a zip archive stands at its end. Either somebody is still writing it, or somebody was killed while
# writing. In one job, a `barrier` after the save cures it:

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({"weights": torch.ones(100_000)}, "saved/slow.pt")
dist.barrier()  # +
print(len(torch.load("saved/slow.pt")["weights"]), "weights")

# %% [markdown]
# The barrier lasts as long as the save, and it is bounded by the timeout of the process group (chapter 3, "A short
# timeout"). A save that takes longer kills the job.
#
# ### When the save fails
#
# A disk is full. Rank 0 has been written to take it calmly. (The limit on the size of a file stands in for the full
# disk.)

# %%
# %%ranks 2 --expect hang
import resource
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
        torch.save({"weights": torch.ones(100_000)}, "saved/full.pt")
        dist.barrier()  # BUG: an error jumps over it
    except (RuntimeError, OSError) as error:
        print(f"not saved ({type(error).__name__}), the training goes on")
else:
    dist.barrier()
dist.all_reduce(torch.ones(1))  # the next step

# %% [markdown]
# Note the type: `torch.save` reports a full disk as a `RuntimeError`, not as an `OSError`. And note the rule: **how the
# save went has to reach all ranks**, by one collective that everybody calls whatever happens. It is a barrier at the
# same time, because nobody has the word before rank 0 has spoken.

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
# Three ways to be wrong, in one folder. It holds checkpoints 9 and 10 and was copied from another disk; and a network
# file system shows a new file to one node later than to another:

# %%
# %%ranks 2
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    os.makedirs("saved/folder", exist_ok=True)
    for time, number in enumerate((10, 9), 1_000_000):  # the copy wrote 10 first
        torch.save({"step": number}, f"saved/folder/step-{number}.pt")
        os.utime(f"saved/folder/step-{number}.pt", (time, time))
dist.barrier()
seen = os.listdir("saved/folder")
if dist.get_rank() == 1:
    seen.remove("step-10.pt")  # this node does not see it yet
number = lambda name: int(name[5:-3])
written = lambda name: os.path.getmtime("saved/folder/" + name)
print("by name:", max(seen), " by time:", max(seen, key=written), " by number:", max(seen, key=number))
chosen = [max(seen, key=number)]
dist.broadcast_object_list(chosen, src=0)  # one decides
print("all load", chosen[0])

# %% [markdown]
# As text, "9" comes after "10". Times say when a file was written, here by the copy. And two ranks that decide for
# themselves begin at different steps, which DDP does not notice. Give the files numbers, compare them as numbers, let
# rank 0 choose, and agree when somebody cannot read the chosen one. Look only at names that your own code gives: people
# leave notes, exports and copies in such folders, and a rotation that deletes by `*.pt` takes those with it.
#
# ### Loading: where, and on which ranks
#
# DDP copies rank 0's weights to all ranks once, when it wraps. So before wrapping it is enough that rank 0 loads. After
# wrapping it is not:

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
    sums = [None] * 2
    dist.all_gather_object(sums, sum(p.sum().item() for p in model.parameters()))
    print(f"loaded on rank 0 {when} wrapping, then one step: equal on both ranks", sums[0] == sums[1])

# %% [markdown]
# The optimizer's state is copied by nobody, ever. **Let every rank load everything**, and the question does not arise.
#
# A file remembers on which device each tensor was. The next cell writes one that says "GPU 0", as a job on GPUs would
# have, and loads it where there is none:

# %%
# %%ranks 1
import torch

torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, place: None)
torch.save(torch.ones(2), "saved/from_gpu.pt")
try:
    torch.load("saved/from_gpu.pt")
except RuntimeError as error:
    print(str(error).split(" If ")[0])
print(torch.load("saved/from_gpu.pt", map_location="cpu"))

# %% [markdown]
# Where there *are* GPUs the same file does something worse, not run here: it loads, on every rank, onto GPU 0, the one
# that saved it. `map_location="cpu"` (or the rank's own device) belongs in every `torch.load`; `load_state_dict` then
# copies to where the parameters are.
#
# ### The prefix `module.`

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
print("saved rightly:   ", plain.load_state_dict(ddp.module.state_dict()))
print("DCP's names:     ", list(get_model_state_dict(ddp)))

# %% [markdown]
# A wrapper calls its model `module`. Save `ddp.module.state_dict()`, so that the file does not show how the model was
# trained; when you are handed a file with the prefix, take it off where *all* names have it.
# `str.replace("module.", "")` also mutilates `submodule.weight`.

# %%
print("submodule.weight".replace("module.", ""))

# %%
quiz("05_checkpointing/barrier")

# %% [markdown]
# ## Atomic and durable
#
# Now rank 0 is killed while it saves. This is not an exotic case: jobs are preempted on the hour, and save on the hour.
# Three ways to save, on a file whose process dies once a given number of bytes is written:

# %%
# %%writefile saving.py
import io, os, signal, torch

class Doomed(io.FileIO):
    """A file whose process is killed when so many bytes have been written."""
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
# Checkpoint 1 is there. The save of checkpoint 2 is killed half-way:

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
# Checkpoint 2 is torn, and since its file was opened for writing, checkpoint 1 has gone with it. See also how many
# kinds of error a torn file has, by its length: code that falls back to an older checkpoint has to catch `Exception`.
#
# Here are ten instants of dying for each of the three ways, each a real process that is killed, and a save that is not:

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
# The last column is the save that was not killed. With `replace` there is a whole checkpoint after every instant,
# because `os.replace` is one act for everybody who looks: the name means the old file, and then the new one. POSIX
# promises that within one file system; so the temporary file is put into the same folder, not into `/tmp`. Rotation
# follows the same thought: remove the old ones when the new one has its name, never before. (The course's own tests
# kill the reference solution at more than 200 instants, between any two of its writes, renames and fsyncs.)
#
# What a kill leaves behind is a file that nobody wants. One writer needs one temporary name: then the next save writes
# over it.

# %%
torch.save({"step": 1}, "saved/newest.pt")
print(survivor("replace", 5000), sorted(file.name for file in Path("saved").glob("newest*")))

# %%
quiz("05_checkpointing/two_files")

# %% [markdown]
# ### Durable: power failures
#
# A killed process leaves what it has written with the kernel, which brings it to the disk in its own time. If the
# machine loses power before, it is gone, and not in the order of writing: the new name may be there and the bytes not.
# `os.fsync` returns when the disk has them. Two things have to be brought there, the file's bytes and the folder's
# entry, and the order is what counts:

# %%
def durable(state, name):
    with open(name + ".tmp", "wb") as file:
        torch.save(state, file)
        file.flush()  # Python's buffer, to the kernel
        os.fsync(file.fileno())  # the bytes, to the disk: before they get their name
    os.replace(name + ".tmp", name)
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY)
    os.fsync(folder)  # the name, to the disk: before an older checkpoint is removed
    os.close(folder)

durable({"step": 3}, "saved/newest.pt")
print(torch.load("saved/newest.pt"))

# %% [markdown]
# No cell can cut the power, so this was not run here as the kills were. What can be shown is that the calls are made,
# and in which order; the check of the exercise below does that to yours.
#
# ### A changed bit
#
# A disk can flip a bit, and so can a copy. `torch.load` does not look:

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
print("the same checksum:", digest("saved/flipped.pt") == before)
print("zipfile finds:", zipfile.ZipFile("saved/flipped.pt").testzip())

# %% [markdown]
# A weight of 1 has become infinite, silently. The archive holds a CRC of every entry; `zipfile` compares it, `torch.load`
# does not. So compare it, or keep a checksum of your own where it cannot be out of step with the file: in its name, or in
# the same file. Two files cannot be replaced in one instant.
#
# And when the newest file is damaged? Falling back to the one before is right, *with a warning*. To raise stops a job
# at night though a whole checkpoint lies beside; `except: return None` starts at step 0, and the rotation then removes
# the good ones.
#
# ### weights_only
#
# A pickle is a program. Whoever wrote the file decides what runs when it is loaded:

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
# It reads tensors and plain data, and refuses what may run code. That hits some harmless things which a checkpoint
# often holds:

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
# The asymmetry is the trap: saving takes everything, and the refusal comes on the day of the restart. Save
# `vars(arguments)`, `float(score)`, `str(path)` and NumPy's state with its array as a list, and load a checkpoint once
# while the job is young.

# %%
quiz("05_checkpointing/rename")

# %% [markdown]
# ## Exercise: implement checkpoint
#
# *Hard, 35 minutes.* Open `exercises/checkpoint.py`. You write the two functions that everything after this stands on.
# The check kills your save at its writes, renames and fsyncs, fills the disk, tears files, and reads while you write.

# %%
contract("checkpoint", "save_checkpoint", "load_latest")

# %%
# %check checkpoint

# %% [markdown]
# <details><summary>It hangs when the disk is full</summary>
# On rank 0 the error jumps over your barrier. Catch it, tell all ranks how it went in one collective, and raise
# afterwards, on all of them.
# </details>
#
# <details><summary>Killed in the middle, and nothing good is left</summary>
# The temporary name and the final name have to be in the same folder, and an older checkpoint may be removed only when
# the new one has its name.
# </details>
#
# <details><summary>"… may not be on the disk"</summary>
# Three steps in this order: flush and fsync while the file is open, the rename, an fsync of the folder.
# </details>
#
# <details><summary>The ranks load different checkpoints</summary>
# Rank 0 lists the folder. For each name all ranks try, and tell each other whether they could; if one could not, all go
# on to the next.
# </details>
#
# The solution is `solutions/checkpoint.py`.
#
# ## Formats
#
# **One file.** What `torch.save` writes is a zip archive: a pickle that says how the objects are put together, and the
# bytes of every tensor.

# %%
torch.save({"a": torch.ones(3), "step": 7}, "saved/one.pt")
for entry in zipfile.ZipFile("saved/one.pt").infolist():
    print(entry.filename, entry.file_size)

# %% [markdown]
# **safetensors** is what models are handed on in. No pickle, so nothing to run: the length of a header, the header in
# JSON, the bytes. It is so simple that ten lines write it:

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
print(Path("saved/one.safetensors").read_bytes()[8:].split(b"}}")[0].decode())

from safetensors.torch import load_file

print("read by the library:", load_file("saved/one.safetensors"))

# %% [markdown]
# It holds tensors under names and no more: good for weights, while an optimizer's nested state, a scheduler and a
# position need something beside it. And it has no checksum, where the zip archive has one of every entry.
#
# **Shards.** A model that is split over the ranks (FSDP2, ZeRO-3) exists on no rank as a whole, so no single rank can
# write it. `torch.distributed.checkpoint`, DCP, lets each rank write its part into one folder:

# %%
# %%ranks 2
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
state = {"model": get_model_state_dict(model), "step": 7}
weight = state["model"]["weight"]
print("weight", tuple(weight.shape), "of which here", tuple(weight.to_local().shape))
dcp.save(state, checkpoint_id="saved/shards")
if dist.get_rank() == 0:
    for name in sorted(os.listdir("saved/shards")):
        half = os.path.getsize(f"saved/shards/{name}") > 256 * 256 * 4 / 2
        print(f"{name:14} {'half of the weights, and a little' if half else 'what is where'}")

# %% [markdown]
# The metadata knows which piece of which tensor is where, so the folder can be read by another number of ranks, cut
# another way or not at all. Three ranks, each with the whole model:

# %%
# %%ranks 3
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
torch.manual_seed(0)
saved = torch.nn.Linear(256, 256)  # the same seed: what was saved
model = torch.nn.Linear(256, 256)
state = {"model": model.state_dict(), "step": 0}
dcp.load(state, checkpoint_id="saved/shards")  # into the tensors that are there
print("step", state["step"], "weights as saved:", torch.equal(model.weight, saved.weight))

# %% [markdown]
# What is a folder from which the metadata is missing?

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
# No checkpoint, then; and mind that this error is no `Exception`, so `except Exception` lets it pass.
#
# `save` and `load` are collectives: every rank calls them. `load` fills what you give it instead of returning something,
# and what the given state does not name is not read. Rotation, a checksum and "which folder is the newest" remain your
# business. Names from `get_model_state_dict` have no `module.`, also when the model is wrapped ("Who writes, who
# reads").
#
# `ZeroRedundancyOptimizer` takes the older way. Its state is cut, too, and cannot be saved as it is;
# `consolidate_state_dict` collects the shards on one rank, which then saves one file, and needs the memory for all of it:

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
# ### Saving beside the training
#
# While it saves, the job stands still. `async_save` copies the state to memory, returns, and writes in the background.
# Here is a disk that takes half a second more than yours:

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
state["weights"] += 1  # the training goes on
future.result()  # before the next save, and before the end
again = {"weights": torch.zeros(1_000_000)}
dcp.load(again, checkpoint_id="saved/beside")
print("saved is what was there at the call:", again["weights"][0].item() == 1)
observe("stall", [waited, stalled])

# %%
waited, stalled = run.observed("stall")[0]
print("the stall of async_save is less than a third:", stalled < waited / 3)
bars({"save": waited, "async_save": stalled}, unit="s", title="how long the training stands still")

# %% [markdown]
# The copy is what makes it right. A thread of your own that simply calls `torch.save` on the living tensors writes a
# state that never was, because the training changes them meanwhile:

# %%
import io, threading

class Pausing(io.BytesIO):
    """Writes the first tensor, lets the training make a step, writes the second."""
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
    tensor += 1  # a step of the training
stepped.set()
thread.join()
file.seek(0)
print({name: tensor[0].item() for name, tensor in torch.load(file).items()})

# %% [markdown]
# The price of the copy is memory: the whole state once more, on the host. And a save that is under way is no
# checkpoint: keep the last complete one until the future has a result, and let one save end before the next begins. On
# GPUs `async_save` needs a group that can also talk between CPUs, `init_process_group("cpu:gloo,cuda:nccl")`, and says so
# when it has none (from its source; not run here).

# %%
quiz("05_checkpointing/async")

# %% [markdown]
# ## Resuming mid-epoch
#
# An epoch may take a day. The checkpoint then falls into its middle, and "which epoch" is not enough. Two ranks, 48
# samples, batches of 4, so six steps an epoch; interrupted after four steps of epoch 1. Four ways to go on:

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
ways = {"begin epoch 1 again": order, "go on with epoch 2": [],
        "the rest, no set_epoch": list(other)[16:], "the rest": order[16:]}
for name, after in ways.items():
    seen = [None] * 2
    dist.all_gather_object(seen, before + after)
    count = Counter(sum(seen, []))
    if dist.get_rank() == 0:
        twice = sum(times > 1 for times in count.values())
        print(f"{name:24} seen twice {twice:2}   never {48 - len(count):2}")

# %% [markdown]
# The right way needs one number, the finished steps:
#
# ```
# epoch, done = divmod(step, steps_an_epoch)
# sampler.set_epoch(epoch)
# rest = list(sampler)[done * batch_size :]
# ```
#
# and `DataLoader(data, batch_size, sampler=rest)`. Fetching batches only to skip them also works, costs their time, and
# draws random numbers if the data set augments. Count the steps whose update is *in the weights*: a number that is
# saved before it is counted up repeats a step.
#
# ### The loader is ahead of you
#
# Do not ask the sampler how far it is. With workers, batches are fetched in advance:

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
# The position belongs to whoever hands the batches out. That is the idea of `StatefulDataLoader` in the package
# torchdata (not run here): a loader with a `state_dict` that says how many batches it has *given*, with the states of
# its workers. For a data set with indices a few lines do it:

# %%
# %%writefile stateful.py
from torch.utils.data import DataLoader, DistributedSampler

class StatefulLoader:
    """Batches by a DistributedSampler. Its state is the position behind the last batch given."""
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
loader = StatefulLoader(range(48), 4)  # a new process would begin here
loader.load_state_dict(state)
seen += [batch.tolist() for batch in loader]
print("interrupted at", state, "- the same batches:", seen == through)

# %% [markdown]
# An endless stream has no indices. There each rank has to save how far it has read, or the shard and the line.
#
# ### Whatever draws moves the generators
#
# Random states are put back last, just before the first step, because what is built in between draws from them: a model
# draws its weights, and an iterator over a `DataLoader` one number, from which its workers' seeds are made, with or
# without workers.

# %%
from torch.utils.data import DataLoader

def draws(action):
    """Does this move torch's generator?"""
    before = torch.get_rng_state()
    action()
    return not torch.equal(before, torch.get_rng_state())

print("a layer:          ", draws(lambda: torch.nn.Linear(2, 2)))
print("iter(DataLoader): ", draws(lambda: iter(DataLoader(range(4)))))
own = DataLoader(range(4), generator=torch.Generator())
print("with its own:     ", draws(lambda: iter(own)))

# %% [markdown]
# A job that is resumed in mid-epoch makes one iterator more than the undisturbed run. Where the loop makes it after the
# random states are back (`for batch in loader`), its dropout masks are others from there on. So give the loader a
# generator of its own. And remember that there are three generators, Python's,
# NumPy's and torch's, plus one for each GPU.

# %%
quiz("05_checkpointing/ahead")

# %% [markdown]
# ## Exercise: implement exact_resume
#
# *Hard, 30 minutes.* Open `exercises/exact_resume.py`. You write `train`: a loop that may be stopped after any step,
# and ends with the same bits. It uses your `save_checkpoint` and `load_latest`.

# %%
contract("exact_resume", "train")

# %%
# %check exact_resume

# %% [markdown]
# <details><summary>Samples come twice or never</summary>
# Everything follows from the number of finished steps: <code>divmod(step, steps_an_epoch)</code>,
# <code>set_epoch</code>, a slice of the sampler's list.
# </details>
#
# <details><summary>The weights differ, and the samples are right</summary>
# Then it is a random state, or a part that was not restored. Which step is the first that differs? If it is the first,
# the states were put back too early.
# </details>
#
# <details><summary>Two ranks agree to the bit, three do not</summary>
# Read on: "Determinism" has the cause. It is no mistake in your checkpoint.
# </details>
#
# The solution is `solutions/exact_resume.py`.
#
# ## Determinism
#
# "The same" has two meanings: the same mathematics, and the same bits. The bits depend on the order in which numbers
# are added:

# %%
a, b, c = torch.tensor([1e8, -1e8, 1.0])
print((a + b) + c, a + (b + c))

# %% [markdown]
# ### Starting alike
#
# First the random numbers. Seed before anything draws, also before the model is built, and with **seed + rank**: with
# one seed for all, every rank drops the same units, and N samples of the noise are one. Only the sampler's seed has to
# be common.

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
        print(f"{name:12} the masks agree in {'all' if same == 1 else 'about half of the'} places")

# %% [markdown]
# ### Another restart, another sum
#
# Three ranks train two steps. A second run restarts after the first step, with everything restored. It is the same job
# on the same ranks with the same samples:

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
    print(f"{flag:28} the same bits: {torch.equal(through, restarted)!s:6}"
          f" to six digits: {torch.allclose(through, restarted, atol=1e-6)}")

# %% [markdown]
# **What this tells you.** After its first step DDP sorts the gradients into new buckets, in the order in which they
# became ready (chapter 1). A restart begins with the old buckets once more. With three ranks or more, where an element
# stands in its bucket decides in which order its parts are added; two ranks have only one order. With
# `find_unused_parameters=True` the buckets stay as they were made, which costs a walk over the graph in each step. The
# other way is to let DDP make one step that does not count, before anything is restored.
#
# Is it worth it? For the training no: a last bit is not a mistake. For *testing* a resume yes, because "equal" can be
# checked and "nearly equal" hides a forgotten scheduler. Test on two ranks, or with the buckets held.
#
# ### Another number of ranks
#
# The same 24 samples as one global batch, on 1, 2, 3 and 4 ranks:

# %%
results = []
for world_size in (1, 2, 3, 4):
    run = ranks.run(ranks.Source("""
import torch, torch.distributed as dist
from lockstep.ranks import observe
dist.init_process_group("gloo")
x = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
mine = x[dist.get_rank() :: dist.get_world_size()]
gradient = (mine * mine.sum(1, keepdim=True)).mean(0) / dist.get_world_size()
dist.all_reduce(gradient)
observe("gradient", gradient)
"""), world_size)
    results.append(torch.as_tensor(run.observed("gradient")[0]))
    print(world_size, "ranks: the bits of one rank", torch.equal(results[-1], results[0]),
          " nearly", torch.allclose(results[-1], results[0], atol=1e-4))

# %% [markdown]
# The mathematics is the same, the bits are not, and no setting changes that: to have the same bits, the sums would have
# to be made in the same order. So after a restart on fewer nodes, keep the *global* batch (more per rank, or more
# accumulation), and compare loss curves. Dropout cannot go on as it was: with fewer ranks nobody draws the masks of those
# that are gone, and with more there is no random state for the new ones.
#
# On GPUs there is more: some kernels add in an order that differs from run to run.
# `torch.use_deterministic_algorithms(True)` makes them raise or take a slower way, cuDNN's benchmark mode may choose
# another algorithm at each start, and NCCL picks its algorithm by size and topology. None of that was run here.

# %%
quiz("05_checkpointing/world_size")

# %% [markdown]
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
# By default never. Such a restart is all its fault tolerance; what to do with it is the script's affair. This one saves
# every second step, and rank 1 has an accident at step 5:

# %%
# %%writefile elastic.py
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from saving import replace

accident, NAME = sys.argv[1], f"saved/{sys.argv[2]}.pt"
dist.init_process_group("gloo", timeout=timedelta(seconds=3 if accident == "hang" else 60))
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = torch.load(NAME) if os.path.exists(NAME) else {"step": 0, "weights": torch.zeros(3)}
if rank == 0:
    print(f"attempt {attempt} begins at step {state['step']}", flush=True)
while state["step"] < 8:
    gradient = state["weights"] - rank - state["step"]
    dist.all_reduce(gradient)
    state = {"step": state["step"] + 1, "weights": state["weights"] - 0.1 * gradient}
    if (attempt, rank, state["step"], accident) == (0, 1, 5, "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if (attempt, rank, state["step"], accident) == (0, 1, 5, "hang"):
        time.sleep(600)
    if state["step"] % 2 == 0 and rank == 0:
        replace(state, NAME)
    dist.barrier()
os._exit(0)

# %%
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see below

def torchrun(*arguments):
    """Run torchrun, without an earlier run's checkpoint, and print what the job prints."""
    Path(f"saved/{arguments[-1]}.pt").unlink(missing_ok=True)
    job = subprocess.run([*TORCHRUN, *arguments], capture_output=True, text=True, timeout=58)
    print(job.stdout, end="")
    print("exit status", job.returncode)

torchrun("--nproc-per-node=2", "--max-restarts=1", "elastic.py", "kill", "killed")

# %% [markdown]
# A real SIGKILL, and the job ended well. Rank 0 was in good health, and was restarted too. Step 5 was done twice, no
# more. And the result? `./lockstep run` takes the same option, starts faster, and says what happened. First without an
# accident, for comparison:

# %%
import contextlib, io, time
from lockstep import running

def lockstep_run(*arguments):
    """The same with `lockstep run arguments ...`: print what the job prints, and the headlines."""
    Path(f"saved/{arguments[-1]}.pt").unlink(missing_ok=True)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        running.main(arguments)
    said = [line for line in error.getvalue().splitlines() if re.match("CRASH|ERROR|HANG|Restart", line)]
    print(out.getvalue(), *said, sep="\n")

lockstep_run("-n", "2", "elastic.py", "none", "undisturbed")
weights = {name: torch.load(f"saved/{name}.pt")["weights"] for name in ("killed", "undisturbed")}
print("the same bits:", torch.equal(weights["killed"], weights["undisturbed"]))

# %%
lockstep_run("-n", "2", "--max-restarts", "1", "elastic.py", "kill", "again")

# %% [markdown]
# **One variable is needed to make torchrun's restarts reliable.** The ranks leave their addresses in the store.
# torchrun (2.4 and later, 2.13 too) keeps one store for all attempts, so in the second a rank may read the address of
# somebody who died in the first: `Connection refused`, and the job is over. Without
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` that happened in six of ten restarts of this script with gloo, and with it in
# none of eight; with nccl it is reported as PyTorch's issues 135712 and 167288 (not run here). The variable gives every
# attempt a store of its own. That failure is a matter of chance, so it is told, not shown. What can be
# shown is its cause, that a group which is gone leaves its keys in the store:

# %%
# %%ranks 2
import os
import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
before = store.num_keys()
dist.barrier()
dist.destroy_process_group()
print("the group is gone; its keys are still in the store:", store.num_keys() >= before > 0)

# %% [markdown]
# `TORCHELASTIC_RESTART_COUNT` says which attempt this is. Use it for log lines, not to decide whether there is a
# checkpoint: a job that was requeued begins at attempt 0 with a checkpoint on the disk. Look at the disk.
#
# ### A hang is not a death
#
# torchrun sees processes that end. A rank that hangs has not ended. What turns the hang into a death is the timeout of
# the process group, here three seconds:

# %%
torchrun("--nproc-per-node=2", "--max-restarts=1", "elastic.py", "hang", "hung")

# %% [markdown]
# With the default (30 minutes; 10 with nccl) the job would have stood still that long, on all its machines, and then done
# the same.
#
# ### What a restart asks of a script
#
# | the launcher | so the script |
# |---|---|
# | starts it from the top | looks for a checkpoint itself, every time; finding none is no error |
# | ends all ranks at any instant | saves atomically; and often enough |
# | may give other numbers: `RANK`, and with `--nnodes=1:2` (not run here) `WORLD_SIZE` | reads them anew; the state belongs to the job, not to a rank |
# | runs the beginning again | can repeat it: no "make this folder, which must not exist", no log begun anew |
# | restarts after every failure | does not fail in the same way at once: a bug with `--max-restarts=100` fails 101 times |
# | counts an end with status 0 as success | leaves with another status when it has failed, and returns at once when nothing is left to do |
# | waits for processes to end | has a process-group timeout that fits |
#
# ### How often to save
#
# Each save costs time *C*; each failure costs, on average, half of the interval. With a mean time *M* between failures
# the best interval is about √(2·C·M) (Young, 1974). A simulated job of a thousand hours, with saves of 3 minutes and a
# failure every 20 hours on average:

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
# The valley is flat: a third of the best interval, or three times it, costs a few percent more. Six minutes or ten
# hours cost much.

# %%
quiz("05_checkpointing/restart")

# %% [markdown]
# ## Exercise: implement elastic_training
#
# *Hard, 25 minutes.* Open `exercises/elastic_training.py`. A loop that is killed by SIGKILL at random steps, asked to
# stop by a signal that may reach one rank only, and started again on another number of ranks. ("Preemption and SLURM",
# below, has what you need for the signals.)

# %%
contract("elastic_training", "train")

# %%
# %check elastic_training

# %% [markdown]
# <details><summary>It hangs after a signal</summary>
# One rank was asked, and left alone. Whether to stop is decided by all ranks, in one collective, behind the same step.
# </details>
#
# <details><summary>After a restart on another number of ranks it sees other samples</summary>
# The samples of a step have to follow from seed and step alone. Take the global batch first, then this rank's part of
# it.
# </details>
#
# <details><summary>A job that is complete trains on</summary>
# A launcher may start it once more. Look at the step before the loop.
# </details>
#
# The solution is `solutions/elastic_training.py`.
#
# ## Preemption and SLURM
#
# The friendly way to be ended is a signal some time before. SIGTERM comes from torchrun and most schedulers, SIGUSR1
# when you have asked SLURM for it. A handler runs between two lines of Python, in the middle of anything, so it does
# one thing: it sets a flag. The loop looks at the flag between two steps. But signals reach the ranks at different
# moments, or reach only one:

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
# Rank 1 has left the loop and wants to save, the others want to train: a hang in the last minute before the kill. One
# small all-reduce in each step makes it a decision of all:

# %%
# %%ranks 3
import os, signal
import torch, torch.distributed as dist

asked = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda number, frame: asked.fill_(1))
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
# With `ReduceOp.MAX` one that was asked is enough. Where a step is short, do it every tenth step, on all ranks in the
# same ones.
#
# ### Under SLURM
#
# The script below asks for two nodes, starts one torchrun on each, and lets them meet at the first node of the list.
# Three lines are about being ended:
#
# - `--signal=B:USR1@60` has SLURM send SIGUSR1 to the batch script alone (`B:`): 60 seconds before the time limit, not
#   run here, and at preemption where the cluster is set up so, as the one below. There the 60 do not count: how long the
#   job still has is the cluster's `GraceTime`, 10 seconds below, and 0 where nobody has set it.
# - The `trap` passes it on as SIGTERM, which torchrun gives to its ranks, and waits until they have saved. SIGUSR1 is
#   not among the signals that torchrun passes on by default (`signals_to_handle`, above).
# - `--requeue` and `scontrol requeue` put the job back into the queue, under the same number. With `--open-mode=append`
#   the next attempt does not wipe the log.
#
# bash runs a trap only when the command in the foreground has ended. So `srun` goes into the background, and the script
# `wait`s:

# %%
import signal

def trapped(work):
    """A bash script is signalled while it does this. What does it say, in order?"""
    script = f"trap 'echo asked' USR1; {work}; exit"
    job = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
    job.stdout.readline()
    job.send_signal(signal.SIGUSR1)
    return job.communicate(timeout=30)[0].split()

command = "(echo ready; sleep 1; echo slept)"
print("foreground:", trapped(command))
print("background:", trapped(command + " & while kill -0 $!; do wait $!; done 2>/dev/null"))

# %% [markdown]
# A signal ends `wait` too, so that it has to be called again, in a loop or in the trap. Now the script for the job, and
# the job:

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
import os, signal, time
import torch, torch.distributed as dist
from saving import replace

NAME, asked = "saved/preempted.pt", torch.zeros(1)
signal.signal(signal.SIGTERM, lambda number, frame: asked.fill_(1))
dist.init_process_group("gloo")
rank, step = dist.get_rank(), torch.load(NAME)["step"] if os.path.exists(NAME) else 0
if rank == 0:
    print("begins at step", step, flush=True)
while step < 60:
    time.sleep(0.1)  # the work
    step += 1
    stop = asked.clone()
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop or step % 10 == 0:
        if rank == 0:
            replace({"step": step}, NAME)
        dist.barrier()
    if stop:
        break
if rank == 0:
    print("ends after step", step, flush=True)
os._exit(0)

# %% [markdown]
# Now a real SLURM cluster: controller, two nodes with their daemons, up in seconds and gone afterwards. The job begins;
# then somebody's urgent job takes both nodes.

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
# It waits in the queue, under its number. When the nodes are free it begins again:

# %% tags=["needs-slurm"]
if missing:
    print("not run:", missing)
else:
    done = slurm.wait(job, 55, until=["COMPLETED"])
    log = Path("saved/preempted.log").read_text()
    story = re.findall(r"^(begins|ends|urgent) .*?(\w+)$", log, re.MULTILINE)
    (_, zero), (_, left), (_, node), (_, resumed), (_, last) = story
    print(done.state, "- restarts:", done.restarts)
    print([word for word, _ in story], "on", node)
    print("went on where it had left:", left == resumed, " begun at", zero, " ended at", last)

# %% [markdown]
# Preempted, saved, requeued, finished, and no step was done twice: it had been asked in time. Where a signal comes too
# late, or a node just dies, the last periodic checkpoint has to do; you need both.
#
# Numbers to think about: the grace has to be longer than one step plus one save, and you know how long that is only if
# you have measured it. torchrun kills its ranks 30 seconds after SIGTERM, however long SLURM would wait:
# `--shutdown-timeout`, or `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, gives them more (from its source; not run here). Where a
# cluster allows no requeueing, submit several jobs that run one after the other in the same folder: an array with `%1`
# (`--array=1-10%1`; without it the tasks run at once), or the same job several times with one name and
# `--dependency=singleton` (not run here).
#
# Without torchrun, `srun` can start the ranks itself, one task for each; chapter 2, "Under SLURM", has the variables to
# translate. There is no agent then and no `--max-restarts`: SLURM's requeue is what restarts.

# %%
quiz("05_checkpointing/signal")

# %% [markdown]
# ## Capstone: implement train
#
# *Hard, 60 minutes, or as long as you like.* Open `exercises/train.py` and `exercises/train.sbatch`. Everything from
# this course in one script that you can take to a cluster: arguments, sampler, DDP, mixed precision, accumulation,
# clipping, checkpoint and resume, metrics of all ranks, evaluation that counts each sample once, logging on rank 0, a
# clean end on a signal.
#
# The check runs `train.py` on one, two and four ranks and on two hosts, kills a rank, asks one to stop, and trains the
# digits to 95 %. Then, where this machine has SLURM, it submits `train.sbatch`, with ranks of its own in place of yours, as
# a job and as an array; a more urgent job comes, and a node dies. That takes about half a minute. The cell after it submits
# both your files to the cluster from above.

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
    right = re.findall(r"test accuracy ([\d.]+)", Path("saved/train.log").read_text())
    most = bool(right) and float(right[-1]) > 0.9
    print(job.state, "on", job.nodes, "- nine of ten digits right:", most)
    slurm.close()

# %% [markdown]
# <details><summary>The accuracy is printed and is not right</summary>
# Sums and counts over all ranks, then one division; and no padding in the sampler that evaluates.
# </details>
#
# <details><summary>It works on one node and not on two</summary>
# Where does the script use the rank where it means the local rank, or the other way round? And does every node reach
# the address at which they meet?
# </details>
#
# <details><summary>Under SLURM the signal comes, and nothing is saved</summary>
# bash runs a trap when the foreground command has ended. Is <code>srun</code> in the background, and does the script
# wait for it?
# </details>
#
# The solutions are `solutions/train.py` and `solutions/train.sbatch`.
#
# ## Before a long run
#
# A checkpoint that has never been loaded is a hope. Each of these takes minutes while the job is young, on two ranks
# and a small model:
#
# | rehearse | and look at | in this chapter |
# |---|---|---|
# | stop after 7 steps, resume, run to step 12; run 12 without stopping | every bit of the weights | "Resuming mid-epoch" |
# | SIGKILL one rank, during a step and during a save | which step it goes on from | "Elastic restarts", "Atomic and durable" |
# | cut the newest checkpoint in half | a warning, and the older one | "Atomic and durable" |
# | change one bit of it | the same | "Atomic and durable" |
# | a full disk, or a quota | all ranks say so; the older ones are there | "Who writes, who reads" |
# | SIGTERM to one rank only | all stop behind the same step, and save | "Preemption and SLURM" |
# | let a rank sleep | how long until the job notices | "Elastic restarts" |
# | let it requeue | the log is appended to, the step goes on | "Preemption and SLURM" |
# | load the checkpoint in a plain process, with `weights_only=True` | evaluation gives the same number | "Who writes, who reads", "Atomic and durable" |
# | resume on another number of ranks, if you ever will | the loss goes on where it was | "Determinism" |
# | start the finished job again | it says so, and ends with status 0 | "Elastic restarts" |
#
# And three numbers to write down: seconds a save takes (against the timeout of the process group and the grace of the
# scheduler), bytes a save takes, times one more than are kept, since the new one is written first (against the quota),
# and steps that a kill costs at most.

# %%
quiz("05_checkpointing/rehearsal")

# %% [markdown]
# ## Checklist
#
# **The state.** Model with its buffers, optimizer, scheduler, scaler, finished steps, random states of every rank, your
# own counters. Plain types that `weights_only=True` reads.
#
# **Saving.** One writer. A temporary name in the same folder, flush, fsync, `os.replace`, fsync of the folder, then
# rotation. How it went reaches all ranks.
#
# **Loading.** Rank 0 chooses, by number; all agree; damaged files are passed over with a warning. `map_location`. Every
# rank loads everything; names without `module.`.
#
# **Resuming.** `divmod(step, steps_an_epoch)`, `set_epoch`, the rest of the sampler's list. A generator of its own for
# the loader. Random states last.
#
# **Being ended.** A handler that sets a flag; all-reduce with MAX; save; status. `--max-restarts`, a store for each
# attempt, a timeout that fits. `--signal`, `--requeue`, `--open-mode=append`.
#
# ## Take it with you
#
# - What was forgotten in a checkpoint raises no error. Compare bits with a run that was never interrupted.
# - At every instant one whole checkpoint must have a name. `os.replace` gives it, fsync keeps it through a power
#   failure, rotation comes last.
# - A random state belongs to a rank. A position belongs to whoever hands out the batches.
# - Equal bits need equal sums: the same ranks, the same buckets. Another number of ranks is another rounding, and that
#   is no mistake.
# - A restart is the whole script from the top, on all ranks. What survives is on the disk.
# - Whether to stop is a decision of all ranks, like every other.
#
# In an interview, expect: "Your job was killed while it was writing a checkpoint. What happens?" The weak answer is "it
# loads the last one". The strong one says which file has which name at that instant, and what all ranks agree on.
#
# ## What to read next
#
# PyTorch's pages on torchrun (`pytorch.org/docs/stable/elastic/run.html`), on `torch.distributed.checkpoint`
# (`pytorch.org/docs/stable/distributed.checkpoint.html`) and on reproducibility
# (`pytorch.org/docs/stable/notes/randomness.html`). SLURM's page on preemption (`slurm.schedmd.com/preempt.html`) and
# the manual of `sbatch`. On files: the paper "All File Systems Are Not Created Equal" (Pillai and others, OSDI 2014) on
# what survives a crash, and J. W. Young's "A first order approximation to the optimum checkpoint interval" (1974).

# %%
from lockstep.notebook.course_map import course_map

course_map("05_checkpointing")
