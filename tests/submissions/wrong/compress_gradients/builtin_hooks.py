# diagnosis: builtin-hook-refuses
# also: casts-before-dividing
# why: torch's own hooks: that for bfloat16 wants nccl, and both cast before they divide
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    hook = fp16_compress_hook if dtype == torch.float16 else bf16_compress_hook
    ddp_model.register_comm_hook(ddp_model.process_group, hook)
