# style: a plain sum goes backward and the gradients are scaled afterwards; a Stateful for DCP; lists of modules
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Everything(Stateful):
    def __init__(self, model, optimizer, step=0):
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]


class ShardedTraining:
    def __init__(self, model, layers, mesh, make_optimizer, *, compute_dtype=None, reshard_after_forward=True):
        low = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=low, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=low, reshard_after_forward=reshard_after_forward)
        self.model, self.mesh = model, mesh
        self.optimizer = make_optimizer(model.parameters())
        if compute_dtype is not None:
            model.register_forward_hook(lambda module, inputs, outputs: outputs.float())

    def step(self, inputs, targets, sum_of_losses, max_norm):
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(targets))
        self.optimizer.zero_grad()
        total = sum_of_losses(self.model(inputs), targets)
        total.backward()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for p in parameters:
            p.grad *= self.mesh.size() / sum(counts)
        norm = get_total_norm([p.grad for p in parameters])
        clip_grads_with_norm_(parameters, max_norm, norm)
        self.optimizer.step()
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, total.item())
        return sum(losses) / sum(counts), norm.full_tensor().item()

    def save(self, folder, step):
        dcp.save({"all": Everything(self.model, self.optimizer, step)}, checkpoint_id=str(folder))

    def load(self, folder):
        everything = Everything(self.model, self.optimizer)
        dcp.load({"all": everything}, checkpoint_id=str(folder))
        return everything.step
