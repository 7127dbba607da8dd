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
# # Chapter 6. When the model does not fit
#
# Under DDP, every rank holds the whole model, all its gradients and the whole optimizer state. If that is too much for
# one rank, **shard** it: divide it among all ranks. For each way of sharding, you predict the bytes that a rank holds
# and sends, then measure them.
#
# After this chapter you can
#
# - **measure** a training step's memory by kind: parameters, gradients, optimizer state, activations;
# - **write** an optimizer whose state is divided among the ranks (ZeRO, the *zero redundancy optimizer*, stage 1);
# - **write** a layer whose weights are divided and gathered only while it computes (FSDP);
# - **train** a model under PyTorch's `fully_shard` (FSDP2) with the same result as one process;
# - **predict** memory and traffic for N ranks, and check both against a run;
# - **choose** between sharding, replicas and tensor parallelism, within a node and across nodes;
# - **resume** a sharded checkpoint on a different number of ranks.
#
# About 160 minutes: 45 to read and run, 115 for three exercises. You need chapters 1, 4 and 5, and no GPU.
#
# **What a CPU shows here.** Everything below runs over gloo, with the same collectives of the same sizes as under
# NCCL. Not run here: gathering the next layer *while* a layer computes, which needs a GPU, and real links between
# GPUs.

# %%
# %load_ext lockstep
import shutil
import torch
from lockstep import ranks
from lockstep.notebook.bars import stacked
from lockstep.notebook.contract import contract
from lockstep.notebook.quiz import quiz

shutil.rmtree("saved/beyond", ignore_errors=True)  # left by an earlier run

# %% [markdown]
# ## What fills the memory
#
# The model is chapter 4's small GPT.

# %%
# %%writefile small_gpt.py
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class GPT(nn.Module):
    """Four layers of width 128, for sequences of 128 characters."""
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, 128), nn.Embedding(128, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
            for _ in range(4))
        self.head = nn.Linear(128, 256)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(128))
        mask = nn.Transformer.generate_square_subsequent_mask(128)  # hides the characters to come
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x.flatten(0, 1))

def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]).float(), batch[:, 1:].flatten())

# %% [markdown]
# A training step needs four kinds of memory: the parameters, their gradients, the optimizer's state, and the
# **activations**, which forward keeps for backward. PyTorch has no list of activations, but `saved_tensors_hooks`
# calls your function with each tensor that forward keeps. Here `keep` records their sizes:

# %%
# %%writefile kinds.py
import torch
from small_gpt import loss_of

def local(tensor):
    """What this rank holds of a tensor: with FSDP2, only some of its rows."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def forward(model, batch):
    """The loss, and the MB after forward: activations, and gathered parameters (FSDP2)."""
    own = {local(p).data_ptr() for p in model.parameters()}
    kept = {}
    def keep(tensor):
        # A linear layer keeps a view of its weight.
        original = tensor if tensor._base is None else tensor._base
        if not isinstance(original, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()  # each storage once
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, batch)
    # Once FSDP2 has gathered a parameter, `parameters()` gives the whole copy, not this rank's rows.
    copies = sum(p.nbytes for p in model.parameters() if local(p).data_ptr() not in own)
    return loss, sum(kept.values()) / 1e6, copies / 1e6

# %% [markdown]
# The other kinds can be read from the model and the optimizer:

# %%
# %%writefile --append kinds.py

def megabytes(tensors):
    return sum(local(t).nbytes for t in tensors if torch.is_tensor(t)) / 1e6

def step_by_kind(model, optimizer, batch):
    """One training step. Returns the MB on this rank by kind."""
    loss, activations, copies = forward(model, batch)
    loss.backward()
    gradients = megabytes(p.grad for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer (below) wraps one
    return {
        "parameters": megabytes(model.parameters()), "gradients": gradients,
        "optimizer state": megabytes(t for one in state.values() for t in one.values()),
        "activations": activations, "gathered copies": copies}

# %% [markdown]
# **Predict.** There are 875,264 float32 parameters, and the optimizer is AdamW. How many MB do parameters, gradients
# and state take? Which of the four kinds depends on the batch?

# %%
from kinds import step_by_kind
from small_gpt import GPT

torch.manual_seed(0)
alone = {}
for sequences in (1, 2, 4):
    model = GPT()
    batch = torch.randint(256, (sequences, 129))
    step = step_by_kind(model, torch.optim.AdamW(model.parameters()), batch)
    alone[f"batch of {sequences}"] = {kind: size for kind, size in step.items() if size}
picture = stacked(alone, unit="MB", title="one process")
picture

# %% [markdown]
# Parameters and gradients take 3.5 MB each. AdamW's state takes 7 MB: for each parameter two **moments**, the running
# means of its gradient and of the gradient's square. Together, they take 16 bytes per parameter.
#
# Only the activations grow with the batch. So before you choose a remedy, find out which kind is too large:
#
# | too large | remedy |
# |---|---|
# | activations | smaller micro-batches, bfloat16, activation checkpointing (chapter 4, "Memory") |
# | optimizer state | shard it: ZeRO stage 1 |
# | gradients and parameters | shard them too: FSDP2 |

# %%
quiz("06_beyond_ddp/kind")

# %% [markdown]
# ## Shard the optimizer
#
# Under DDP, every rank has the same gradients, updates the same moments and computes the same new parameters. **ZeRO
# stage 1** divides this work: each parameter has an **owner**. Only the owner keeps the parameter's state. It updates
# the parameter and sends the new values to the other ranks.
#
# Here rank 0 owns the first of two parameters and rank 1 the second:

# %%
# %%ranks 2
import torch, torch.distributed as dist

dist.init_process_group("gloo")
parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
for parameter in parameters:
    parameter.grad = torch.ones(2)  # the same on both ranks, as DDP leaves it
optimizer = torch.optim.SGD([parameters[dist.get_rank()]], lr=0.5, momentum=0.9)  # +

optimizer.step()
print("updated here:", [p.tolist() for p in parameters])
with torch.no_grad():
    for owner, parameter in enumerate(parameters):
        dist.broadcast(parameter, src=owner)  # +
print("after the broadcasts:", [p.tolist() for p in parameters], " states:", len(optimizer.state))

# %% [markdown]
# Each rank has updated its own parameter and keeps a state for this parameter only. Both ranks call both broadcasts:
# the owner sends, the other receives.
#
# The broadcasts come on top of DDP's all-reduce, which is itself a reduce-scatter, then an all-gather (chapter 1).
# ZeRO's **stage 2** needs no broadcasts: it reduce-scatters the gradients to their owners and, after the update,
# all-gathers the *parameters*. Each rank also keeps only its share of the gradients.
#
# FSDP2 can do stage 2 (below). Your exercise does stage 1, with DDP.

# %%
quiz("06_beyond_ddp/zero_grad")

# %% [markdown]
# ## Exercise: implement shard_optimizer
#
# *Medium, 30 minutes.* Open [exercises/shard_optimizer.py](../exercises/shard_optimizer.py). Give each rank about the
# same number of *elements*, not of tensors: an embedding can be larger than all biases together.

# %%
contract("shard_optimizer", "ShardedOptimizer")

# %%
# %check shard_optimizer

# %% [markdown]
# <details><summary>"optimizer got an empty parameter list"</summary>
# There were fewer parameters than ranks. Pass a list of groups: a group may be empty, a list of parameters may not.
# </details>
#
# <details><summary>It hangs in a broadcast</summary>
# Every rank calls every broadcast, in the order of the parameters.
# </details>
#
# `./lockstep solution shard_optimizer` shows the solution. PyTorch's own sharded optimizer is
# `ZeroRedundancyOptimizer`.
#
# ## Shard the parameters
#
# With ZeRO-1, every rank still holds all parameters and gradients. **FSDP** (fully sharded data parallel, ZeRO's
# stage 3) divides them, too: each rank keeps its **shard**, some rows of each weight. But to compute a layer's
# output, a rank needs every row. So the ranks **all-gather** a layer's weight just before the layer computes, and
# free the copy afterwards. For backward, they gather it again.
#
# Try this with a layer that multiplies each of four features by a weight. Rank 0 keeps the first two weights, rank 1
# the others. With a `torch.autograd.Function`, you choose what forward saves and what backward computes:

# %%
# %%writefile sharded_scale.py
import torch, torch.distributed as dist

def gather(shard):
    whole = shard.new_empty(dist.get_world_size() * len(shard))
    dist.all_gather(list(whole.split(len(shard))), shard)  # every rank's part, in order
    return whole

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, shard):
        ctx.save_for_backward(inputs, shard)  # + the shard, not the whole weight
        return inputs * gather(shard)

    @staticmethod
    def backward(ctx, gradient):  # takes the output's gradient, returns the inputs' and the shard's
        inputs, shard = ctx.saved_tensors
        of_inputs = gradient * gather(shard)  # + again
        of_weight = (gradient * inputs).sum(0)  # the whole weight's gradient, from this rank's inputs
        of_shard = torch.empty_like(shard)
        dist.reduce_scatter(of_shard, list(of_weight.split(len(shard))))  # +
        return of_inputs, of_shard / dist.get_world_size()

# %% [markdown]
# The **reduce-scatter** gives each rank the sum of all ranks' gradients for its shard. Divided by the number of ranks,
# this sum is the mean that DDP computes. Rank 0's inputs are all 1, rank 1's all 3, and each rank's loss is the sum of
# its outputs. **Predict** the gradient of each shard:

# %%
# %%ranks 2
from sharded_scale import *

dist.init_process_group("gloo")
rank = dist.get_rank()
shard = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]][rank]))  # two of the four weights
inputs = torch.full((1, 4), [1.0, 3.0][rank], requires_grad=True)

output = Scale.apply(inputs, shard)
print("output:", output[0].tolist(), " saved:", [tuple(t.shape) for t in output.grad_fn.saved_tensors])
output.sum().backward()
print("gradients: shard", shard.grad.tolist(), " inputs", inputs.grad[0].tolist())

# %% [markdown]
# Both shards' gradients are the mean of 1 and 3. The inputs' gradient is the whole weight. It isn't averaged: each
# rank has its own inputs.
#
# Between forward and backward, a rank keeps only the inputs and its shard. A plain `inputs * gather(shard)` would keep
# every layer's whole weight until backward. And the shard would get no gradient: autograd doesn't follow collectives.

# %%
quiz("06_beyond_ddp/shard_gradient")

# %% [markdown]
# ## Exercise: implement sharded_linear
#
# *Hard, 40 minutes.* Open [exercises/sharded_linear.py](../exercises/sharded_linear.py). Unlike `Scale`, your layer
# has a bias, any number of rows, and inputs of any number of dimensions.

# %%
contract("sharded_linear", "ShardedLinear")

# %%
# %check sharded_linear

# %% [markdown]
# <details><summary>"element 0 of tensors does not require grad"</summary>
# Autograd does not see what collectives write. Pass the shard to your Function's <code>apply</code>.
# </details>
#
# <details><summary>"invalid tensor size"</summary>
# <code>all_gather</code> needs equal parts. Pad each shard to the same number of rows, and cut the padding off after
# the gather.
# </details>
#
# <details><summary>The whole layer stays in memory</summary>
# A slice is a view of the whole tensor: <code>clone</code> it. Then check which tensors <code>self</code> and
# <code>ctx</code> refer to.
# </details>
#
# `./lockstep solution sharded_linear` shows the solution.
#
# ## Shard everything: FSDP2
#
# PyTorch's FSDP2 shards the parameters of any module in this way, with one function: `fully_shard`. It divides each
# parameter by rows, and the optimizer sees only this rank's rows.
#
# Each call of `fully_shard` forms one unit, whose parameters are gathered together. If you called it only once, on the
# model, the whole model would be gathered at once. So call it on every layer first. The last call, on the model, then
# forms a unit of the other parameters: embeddings and head.

# %%
# %%writefile ways.py
import torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from small_gpt import GPT

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS = {"FSDP2": {}, "FSDP2, kept": {"reshard_after_forward": False},
           "FSDP2, bfloat16": {"mp_policy": bf16}}
WAYS = ["DDP", "ZeRO-1", *OPTIONS]

def make(way):
    """The same model and AdamW, replicated or sharded."""
    torch.manual_seed(0)
    model = GPT()
    if way in ("DDP", "ZeRO-1"):
        model = DDP(model, gradient_as_bucket_view=True)  # else gradients exist twice
        if way == "ZeRO-1":
            return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    else:
        for layer in model.layers:
            fully_shard(layer, **OPTIONS[way])  # +
        fully_shard(model, **OPTIONS[way])  # +
    return model, torch.optim.AdamW(model.parameters())  # fully_shard made new parameters

# %% [markdown]
# Four ranks train for two steps in each of five ways: DDP, ZeRO-1, and FSDP2 with three settings. What does rank 0 put
# into FSDP2's collectives in the second step?

# %%
# %%ranks 4 --into run --quiet
from kinds import *
from ways import *
from lockstep.ranks import mark, observe

dist.init_process_group("gloo")
for way in WAYS:
    model, optimizer = make(way)
    torch.manual_seed(dist.get_rank())
    batch = torch.randint(256, (2, 129))
    step_by_kind(model, optimizer, batch)  # after the first step DDP rebuilds its buckets
    mark(way)
    observe(way, step_by_kind(model, optimizer, batch))
    mark(f"{way}, end")

# %%
from ways import WAYS

def calls_of(way):
    """What rank 0 put into the collectives of the measured step: kind and bytes, in order."""
    at = {mark.name: mark.number for mark in run.ranks[0].marks}
    between = range(at[way], at[f"{way}, end"])
    return [(call.kind.replace("_into_tensor", "").replace("_tensor", ""), call.nbytes)
            for call in run.collectives[0] if call.number in between]

for kind, nbytes in calls_of("FSDP2"):
    print(f"{kind:15}{nbytes / 1e6:6.2f} MB")

# %% [markdown]
# A rank puts ¼ of a layer (0.20 MB) into an all-gather, and a whole layer into a reduce-scatter. The first five
# all-gathers belong to forward: the model's own parameters (embeddings and head), then four layers. Backward gathers
# the layers again and starts a reduce-scatter as soon as a layer's gradients are ready. Backward always gathers one
# layer ahead (**prefetching**), so two all-gathers come before the first reduce-scatter.
#
# The embeddings and head are gathered only once: `fully_shard` keeps the outermost unit gathered until backward, which
# needs the head first.
#
# **Predict** the memory on four ranks. Without activations and gathered copies, DDP holds 4P, where P = 3.5 MB is the
# size of the parameters. (Without `gradient_as_bucket_view`, DDP's buckets take another P.) How much do ZeRO-1 and
# FSDP2 hold?

# %%
def predicted(way, size, n):
    """MB of parameters, gradients and AdamW's state on one of n ranks, for parameters of this size."""
    state = 2 * size  # two moments
    if way == "DDP":
        return size + size + state
    if way == "ZeRO-1":
        return size + size + state / n
    return (size + size + state) / n

held = {way: run.observed(way)[0] for way in WAYS}
P = 875_264 * 4 / 1e6
for way, kinds in held.items():
    measured = kinds["parameters"] + kinds["gradients"] + kinds["optimizer state"]
    print(f"{way:16} predicted {predicted(way, P, 4):5.2f} MB   measured {measured:5.2f} MB")

# %%
picture = stacked(held, unit="MB", title="each of four ranks")
picture

# %% [markdown]
# With ZeRO-1, rank 0 holds 0.09 MB more than predicted: an owner gets whole parameters, so the shares aren't equal. The
# activations do not shrink, because every rank still has its own batch. In bfloat16 they are about half as large.
#
# The picture shows activations and gathered copies at the end of forward. At this point FSDP2 keeps only embeddings
# and head gathered; in the middle of a step, also one or two layers. **`reshard_after_forward=False`** ("FSDP2, kept")
# keeps all layers gathered until backward, a whole copy of the parameters (ZeRO's stage 2). What do you gain?

# %%
quiz("06_beyond_ddp/reshard")

# %% [markdown]
# ## Count the traffic
#
# In an all-gather or reduce-scatter on N ranks, each rank sends (N−1)/N of the whole tensor. A broadcast costs the
# same, averaged over the ranks; an all-reduce costs twice as much. **Predict** what each of four ranks sends for
# parameters of size P:
#
# - DDP: an all-reduce, 2·¾·P. ZeRO-1 adds broadcasts, ¾·P.
# - FSDP2: two all-gathers and a reduce-scatter, 3·¾·P. If FSDP2 keeps the layers, one all-gather is enough.

# %%
# Each rank puts only ¼ of the tensor into an all-gather, so its factor is 4.
FACTOR = {"all_reduce": 2, "broadcast": 1, "reduce_scatter": 1, "all_gather": 4}
ROUNDS = {"DDP": 2, "ZeRO-1": 3, "FSDP2": 3, "FSDP2, kept": 2, "FSDP2, bfloat16": 0.5 + 0.5 + 1}

for way in WAYS:
    sent = sum(FACTOR[kind] * nbytes * 3 / 4 for kind, nbytes in calls_of(way)) / 1e6
    print(f"{way:16} predicted {ROUNDS[way] * P * 3 / 4:5.2f} MB   from the calls {sent:5.2f} MB")

# %% [markdown]
# FSDP2 sends slightly less than predicted, because the embeddings and head are gathered only once. If it keeps its
# layers, it sends as much as DDP. If it frees them, it sends about 1.5 times as much, but never holds the whole model.
#
# With `param_dtype=torch.bfloat16`, the gathers send half the bytes: in total, no more than DDP in float32. The
# gradients are still summed in float32, as `reduce_dtype` says.

# %%
quiz("06_beyond_ddp/traffic")

# %% [markdown]
# ## Shard within a node, replicate across
#
# Within a node, GPUs exchange hundreds of gigabytes per second; between nodes, often a tenth of that. If FSDP2 shards
# over all ranks, each gather crosses nodes. **HSDP** (hybrid sharding) gathers only within a node: each node has a
# whole model, divided among its ranks. Between nodes, HSDP only averages gradients, as DDP does.
#
# A **DeviceMesh** arranges the ranks in a grid. Given a grid with two dimensions, `fully_shard` replicates over the
# first and shards over the second. Here ranks 0 and 1 are one node, and ranks 2 and 3 the other:

# %%
# %%ranks 4 --into run --quiet
from kinds import *
from ways import *
from lockstep.ranks import mark, observe
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
meshes = {"FSDP2": init_device_mesh("cpu", (4,)),
          "HSDP": init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "within"))}  # +
for way, mesh in meshes.items():
    torch.manual_seed(0)
    model = GPT()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)  # +
    optimizer = torch.optim.AdamW(model.parameters())
    mark(way)
    observe(way, step_by_kind(model, optimizer, torch.randint(256, (2, 129))))
    mark(f"{way}, end")

# %% [markdown]
# **Predict** what a rank holds, and what one node sends to the other in a step:
#
# - FSDP2: in the ring 0, 1, 2, 3, only one rank per node sends to the other node: ¾·P in each of three collectives.
# - HSDP: each rank all-reduces its half of the gradients with one rank of the other node. In an all-reduce of two ranks,
#   each sends as many bytes as its tensor has: P/2 per rank, P per node.

# %%
def sent(way, across):
    """MB that ranks 0 and 1 send: across nodes, or else within. Rings are in order of rank."""
    total = 0
    for rank in (0, 1):
        at = {mark.name: mark.number for mark in run.ranks[rank].marks}
        between = range(at[way], at[f"{way}, end"])
        for call in run.collectives[rank]:
            if call.number not in between:
                continue
            n = len(call.members)  # in a ring, a rank sends only to the next one
            next_rank = call.members[(call.members.index(rank) + 1) % n]
            kind = call.kind.replace("_into_tensor", "").replace("_tensor", "")
            if (next_rank > 1) == across:
                times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": n}[kind]
                total += times * call.nbytes * (n - 1) / n
    return total / 1e6

for way, here, between in (("FSDP2", 4 * P / 4, 3 * P * 3 / 4), ("HSDP", 4 * P / 2, P)):
    kinds = run.observed(way)[0]
    held = kinds["parameters"] + kinds["gradients"] + kinds["optimizer state"]
    print(f"{way:6} a rank holds {held:4.2f} MB (predicted {here:4.2f})", end="   ")
    print(f"across nodes {sent(way, True):4.2f} MB (predicted {between:4.2f})", end="   ")
    print(f"within {sent(way, False):5.2f} MB")

# %% [markdown]
# HSDP sends less than half as much between nodes, but a third more within a node, and needs twice the memory per
# rank. So use it if one node has room for the model, gradients and optimizer state.
#
# With many nodes, HSDP saves less: each node sends almost 2P under HSDP, and almost 3P under FSDP2.

# %%
quiz("06_beyond_ddp/hybrid")

# %% [markdown]
# ## Divide a layer's computation
#
# FSDP2 still gathers one whole layer at a time. If one layer or the activations of one sample don't fit, divide the
# *computation*. In **tensor parallelism**, the ranks get the *same* inputs, and each has a part of the weights. Tensor
# parallelism divides linear layers in pairs:
#
# - The first is split along its outputs (`ColwiseParallel`): each rank computes some of the hidden features and applies
#   GELU to them.
# - The second is split along its inputs (`RowwiseParallel`): each rank multiplies its features by the matching
#   weights. An all-reduce sums the ranks' results.
#
# (`nn.Linear` stores one row per output, so `ColwiseParallel` splits rows.)
#
# **Predict** for 16 tokens of width 128 in float32: how many bytes does each rank put into this all-reduce?

# %%
# %%ranks 2 --into run
import copy, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from lockstep.ranks import mark

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and the same inputs on both ranks
pair = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
whole, inputs = copy.deepcopy(pair), torch.randn(16, 128, requires_grad=True)
mesh = init_device_mesh("cpu", (2,))
parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # +

mark("forward")
outputs = pair(inputs)
mark("backward")
outputs.sum().backward()
mark("end")
for name, one in (("first", pair[0].weight), ("second", pair[2].weight)):
    print(name, tuple(one.shape), "of which here", tuple(one.to_local().shape), end="   ")
print("as the whole:", torch.allclose(outputs, whole(inputs), atol=1e-5))

# %%
marks = {mark.number: mark.name for mark in run.ranks[0].marks}
for call in run.collectives[0]:
    phase = [name for number, name in marks.items() if number < call.number]
    if phase and phase[-1] != "end":
        print(f"{phase[-1]:9} {call.kind}  {call.nbytes} bytes, for 16 × 128 × 4 = {16 * 128 * 4}")

# %% [markdown]
# The all-reduce in forward sums the pair's *outputs*; the one in backward sums the gradient of the pair's *inputs*. The
# weights are never sent. Between the two layers, each rank holds only half of a token's 512 hidden features.
#
# The next layer has to wait for forward's all-reduce. A transformer layer has two such pairs (attention and MLP), so
# it needs two all-reduces in forward and two in backward. Because the ranks wait so often, use tensor parallelism only
# **within a node**, where GPUs are linked by NVLink. Across nodes, combine it with FSDP2 on the mesh's other
# dimension:

# %%
# %%ranks 4
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "within"))
pair = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
parallelize_module(pair, mesh["within"], {"0": ColwiseParallel(), "2": RowwiseParallel()})  # +
fully_shard(pair, mesh=mesh["nodes"])  # +

weight = pair[0].weight
print("here", tuple(weight.to_local().shape), "of", tuple(weight.shape))

# %% [markdown]
# Tensor parallelism halves the 512 rows within a node, and FSDP2 halves them again between the nodes.

# %%
quiz("06_beyond_ddp/tensor")

# %% [markdown]
# ## Train with FSDP2
#
# Two mistakes are easy to make. **Each rank takes the mean of its own losses**, but `fully_shard` averages the ranks'
# gradients, as DDP does: if the ranks have different numbers of samples, the samples don't count equally. **Each rank
# clips by the norm of its own rows**, not of all rows.
#
# Here rank 0 has three samples of value 1, and rank 1 has one sample of value 9. The weight has two rows, one on each
# rank. A sample's loss is its first output plus twice its second output. So the first row's gradient should be the
# samples' mean, and the second row's gradient twice this mean. **Predict** both rows' gradients if each rank takes the
# mean of its own losses:

# %%
# %%ranks 2
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
x = [torch.ones(3, 1), torch.tensor([[9.0]])][dist.get_rank()]
world, samples = 2, 4

for way, factor in (("each rank's mean", 1 / len(x)), ("all samples", world / samples)):
    model = fully_shard(torch.nn.Linear(1, 2, bias=False))
    losses = model(x) @ torch.tensor([1.0, 2.0])  # one for each sample
    (losses.sum() * factor).backward()
    row = model.weight.grad.to_local()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=100.0)
    print(f"{way:17} my row {row.item():5.2f}", end="  ")
    print(f"norm of all rows {norm.full_tensor():5.2f}")

# %% [markdown]
# The mean of all four samples is 3, but the mean of the two means is 5. So divide the sum of your losses by the number
# of *all* samples, which costs an all-reduce of one number. Then multiply by the number of ranks: `fully_shard`
# divides by this number.
#
# The rows' norms are 3 and 6; the norm of all rows is 3·√5 = 6.71. The gradients are **DTensors**: tensors that know
# how they are divided. `clip_grad_norm_` adds up the squares of all ranks' norms and takes the root. `full_tensor()`
# returns it as a plain tensor.
#
# With `max_norm=1`, both rows must be divided by 6.71. If each rank clipped by its own row's norm, rank 0's row would
# be divided by 3 and rank 1's by 6, without an error.

# %%
quiz("06_beyond_ddp/clip")

# %% [markdown]
# ## Save, and resume on a different number of ranks
#
# Each rank writes its shards, and `torch.distributed.checkpoint` (**DCP**) records where each one is (chapter 5,
# "Shards"). Four ranks train on one batch and save after the second step:

# %%
# %%writefile resumable.py
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from kinds import *
from ways import *

def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}

def train(model, optimizer):
    """One step on the same four sequences, however many ranks share them. Returns the loss before it."""
    everything = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    loss = loss_of(model, everything.chunk(dist.get_world_size())[dist.get_rank()])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    return f"{loss.item() / dist.get_world_size():.2f}"

def start():
    dist.init_process_group("gloo")
    return make("FSDP2")

# %%
# %%ranks 4
from resumable import *

model, optimizer = start()
before = [train(model, optimizer) for step in range(2)]
dcp.save(state_of(model, optimizer), checkpoint_id="saved/beyond")
print("losses:", *before, " saved ", *[train(model, optimizer) for step in range(3)])

# %% [markdown]
# So far, every rank built the whole model. Build a model that doesn't fit on the **meta device**, where tensors have
# shapes but no values. Shard it there; then `to_empty` allocates only this rank's rows, and the checkpoint fills them.
# (Without a checkpoint, initialize the rows yourself.) Here two ranks load the checkpoint of the four ranks:

# %%
# %%ranks 2
from resumable import *

dist.init_process_group("gloo")
with torch.device("meta"):  # +
    model = GPT()
for module in (*model.layers, model):
    fully_shard(module)
model.to_empty(device="cpu")  # +
optimizer = torch.optim.AdamW(model.parameters())

state = state_of(model, optimizer)
dcp.load(state, checkpoint_id="saved/beyond")  # each rank reads the slices that it owns now
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
print("loaded ", *[train(model, optimizer) for step in range(3)], end="   ")
weight = model.head.weight
print("head.weight", tuple(weight.shape), "of which here", tuple(weight.to_local().shape))

# %% [markdown]
# The two ranks continue with the same losses as the four ranks. The first loss depends on the restored weights, the
# next two on AdamW's restored moments too.
#
# Training doesn't have to wait for the disk: `async_save` copies each rank's slices to host memory and returns, and a
# thread writes them while the next steps run.
#
# Each rank's thread calls collectives too. In the default group, gloo may confuse these with the training loop's
# calls, and the job hangs or crashes. So give the threads a **separate process group**:

# %%
# %%ranks 4
import shutil
from resumable import *

model, optimizer = start()
before = [train(model, optimizer) for step in range(2)]
if dist.get_rank() == 0:
    shutil.rmtree("saved/beside", ignore_errors=True)  # left by an earlier run
own = dist.new_group(backend="gloo")  # +
saving = dcp.async_save(state_of(model, optimizer), checkpoint_id="saved/beside", process_group=own)  # +
after = [train(model, optimizer) for step in range(3)]  # while the slices are written
saving.result()  # before the next save, and before the end
state = state_of(model, optimizer)
dcp.load(state, checkpoint_id="saved/beside")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
print("losses:", *before, " during the save ", *after, " loaded ", train(model, optimizer))

# %% [markdown]
# The loaded model has the loss of step 3 again, because `async_save` copied the state before it returned.

# %%
quiz("06_beyond_ddp/resume")

# %% [markdown]
# ## Exercise: implement fsdp_train
#
# *Hard, 45 minutes.* Open [exercises/fsdp_train.py](../exercises/fsdp_train.py). Write a class that trains like one
# process on the joined batch. It works on a mesh of one or two dimensions, and resumes on a different number of ranks.

# %%
contract("fsdp_train", "ShardedTraining")

# %%
# %check fsdp_train

# %% [markdown]
# <details><summary>No step changes the model</summary>
# You made the optimizer before <code>fully_shard</code>, which replaces the parameters.
# </details>
#
# <details><summary>"mat1 and mat2 must have the same dtype"</summary>
# Only the model should have a policy with <code>output_dtype</code>, not its layers.
# </details>
#
# <details><summary>It hangs with an empty batch</summary>
# Every rank calls forward, backward and clipping, even without samples: they contain collectives. The sum of no losses
# is 0.
# </details>
#
# `./lockstep solution fsdp_train` shows the solution.

# %% [markdown]
# ## Which way
#
# For larger models in float32 with AdamW, each of 8 ranks needs:

# %%
for parameters in (125e6, 1.5e9, 13e9):
    ways = ("DDP", "ZeRO-1", "FSDP2")
    row = [f"{way} {predicted(way, parameters * 4 / 1e9, 8):6.1f} GB" for way in ways]
    print(f"{parameters / 1e9:6.3f} billion parameters:  " + "   ".join(row))

# %% [markdown]
# To these numbers, add the activations, and for FSDP2 the gathered layers. A GPU of 80 GB holds the first two models in
# any of the three ways, and the last one only with FSDP2. So use:
#
# - **DDP** while it fits. It is the simplest, and in float32 no way of sharding sends fewer bytes in total.
# - **ZeRO-1** if only the optimizer's state is too large, and either you want to keep DDP or your optimizer looks at
#   whole parameters. Otherwise use FSDP2: it needs less memory and no more traffic.
# - **FSDP2** if parameters or gradients are too large. If a rank has room for one whole copy of the parameters, set
#   `reshard_after_forward=False`: it sends no more than DDP.
# - **HSDP** if one node has room for all shards of the model and the network between nodes is slow.
# - **Tensor parallelism**, within a node, if one layer is too large for a GPU.
# - **Pipeline parallelism** if even FSDP2 sends too much. Each node has some of the layers and sends only activations
#   and their gradients.

# %%
quiz("06_beyond_ddp/which")

# %% [markdown]
# ## Checklist
#
# - **Measure by kind** before you shard.
# - **Predict** 16 bytes per parameter in float32 with AdamW, each kind divided by N if it is sharded.
# - **Shard the layers first, then the model**, and make the optimizer afterwards.
# - **Divide the sum of the losses by the number of samples on all ranks**, and clip by the norm of all ranks' rows.
# - **Call forward, step and save on every rank.**
# - **Save with DCP**, and test once that a different number of ranks can load it.
#
# ## What to remember
#
# - Activations grow with the batch, and sharding does not divide them. Tensor parallelism divides them inside a pair
#   of layers, at the cost of two all-reduces per pair and step.
# - ZeRO-1: the owner updates a parameter and sends it to the others.
# - FSDP gathers a layer just before it computes, frees it afterwards, and reduce-scatters its gradient.
# - An all-reduce is a reduce-scatter and an all-gather. ZeRO's stage 2 updates between the two, so it shards
#   gradients and state without extra traffic.
# - If the next layer waits for a collective, keep it within a node.
#
# In an interview, expect: "Your model needs 100 GB to train and your eight GPUs have 80 GB each. What do you do?" Ask
# what fills the memory. Then say how many bytes your choice sends, compared with DDP.
#
# ## What to read next
#
# PyTorch's pages on `fully_shard` (`pytorch.org/docs/stable/distributed.fsdp.fully_shard.html`) and its tutorial on
# FSDP2 (`pytorch.org/tutorials/intermediate/FSDP_tutorial.html`). Papers: Rajbhandari et al., "ZeRO" (SC 2020); Zhao et
# al., "PyTorch FSDP" (VLDB 2023). torchtitan puts FSDP2, tensor parallelism and pipelines together in one training
# loop.

# %%
from lockstep.notebook.course_map import course_map

course_map("06_beyond_ddp")
