"""A small language model trained as single-file GPTs are: accumulation, a schedule, evaluation by the master, resuming."""

import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block, vocabulary, width, accumulate, steps, eval_every = 8, 20, 16, 2, 6, 3
out_dir = os.environ["OUT"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for layer in self.attention:
            x = x + layer(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split):
    start = torch.randint(0, 1000, (4, 1))
    text = (start + torch.arange(block + 1)) % vocabulary
    return text[:, :-1], text[:, 1:]


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = torch.stack([model(*get_batch("val"))[1] for _ in range(2)])
    model.train()
    return losses.mean().item()


def learning_rate(step):
    return 1e-2 * 0.5 * (1 + math.cos(math.pi * step / steps))


dist.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = rank == 0
torch.manual_seed(1337 + rank)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first_step = 0
checkpoint = os.path.join(out_dir, "ckpt.pt")
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    first_step = saved["step"]
model = DDP(model)
raw = model.module
began = time.time()
for step in range(first_step, steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % eval_every == 0 and master:
        print(f"step {step}: {estimate_loss(raw):.3f}")
        torch.save({"model": raw.state_dict(), "step": step}, checkpoint + ".new")
    for micro in range(accumulate):
        model.require_backward_grad_sync = micro == accumulate - 1
        _, loss = model(*get_batch("train"))
        (loss / accumulate).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
total = loss.detach()
dist.all_reduce(total)
if master:
    print(f"{total.item() / size:.3f}")
dist.destroy_process_group()
