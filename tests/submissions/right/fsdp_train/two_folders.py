# style: model and optimizer in folders of their own, and the step in a file of rank 0's
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class ShardedTraining:
    def __init__(self, model, layers, mesh, make_optimizer, *, compute_dtype=None, reshard_after_forward=True):
        options = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
        inner, outer = {}, {}
        if compute_dtype is not None:
            inner["mp_policy"] = MixedPrecisionPolicy(compute_dtype, torch.float32)
            outer["mp_policy"] = MixedPrecisionPolicy(compute_dtype, torch.float32, output_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, **options, **inner)
        self.model = fully_shard(model, **options, **outer)
        self.optimizer = make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def step(self, inputs, targets, sum_of_losses, max_norm):
        sums = torch.tensor([0.0, len(targets)])
        dist.all_reduce(sums)
        samples = sums[1].item()
        loss = sum_of_losses(self.model(inputs), targets)
        loss.mul(dist.get_world_size() / samples).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).full_tensor()
        self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        sums[0] = loss.detach()
        dist.all_reduce(sums)
        return (sums[0] / samples).item(), norm.item()

    def save(self, folder, step):
        folder = Path(folder)
        dcp.save(states.get_model_state_dict(self.model), checkpoint_id=folder / "model")
        dcp.save(states.get_optimizer_state_dict(self.model, self.optimizer), checkpoint_id=folder / "optimizer")
        if dist.get_rank() == 0:
            (folder / "step.json").write_text(json.dumps({"step": step}))
        dist.barrier()

    def load(self, folder):
        folder = Path(folder)
        model = states.get_model_state_dict(self.model)
        dcp.load(model, checkpoint_id=folder / "model")
        states.set_model_state_dict(self.model, model)
        optimizer = states.get_optimizer_state_dict(self.model, self.optimizer)
        dcp.load(optimizer, checkpoint_id=folder / "optimizer")
        states.set_optimizer_state_dict(self.model, self.optimizer, optimizer)
        return json.loads((folder / "step.json").read_text())["step"]
