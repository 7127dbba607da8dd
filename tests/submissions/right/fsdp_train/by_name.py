# style: no get_state_dict: parameters and moments by name, loaded in place; the optimizer's own state is made first
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class ShardedTraining:
    def __init__(self, model, layers, mesh, make_optimizer, *, compute_dtype=None, reshard_after_forward=True):
        def divide(module, **more):
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, **more)
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

        for layer in layers:
            divide(layer)
        divide(model, output_dtype=torch.float32)
        self.model = model
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.trained.values())

    def step(self, inputs, targets, sum_of_losses, max_norm):
        samples = torch.zeros(dist.get_world_size())
        samples[dist.get_rank()] = len(targets)
        dist.all_reduce(samples)
        total = sum_of_losses(self.model(inputs), targets) / samples.sum()
        self.optimizer.zero_grad()
        (total * len(samples)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), max_norm, foreach=False)
        self.optimizer.step()
        mean = total.detach().clone()
        dist.all_reduce(mean)
        return float(mean), float(norm.full_tensor())

    def content(self):
        found = {f"model.{name}": p.data for name, p in self.model.named_parameters()}
        for name, p in self.trained.items():
            for key, value in self.optimizer.state[p].items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def save(self, folder, step):
        rates = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        dcp.save({**self.content(), "step": step, "groups": rates}, checkpoint_id=folder)

    def load(self, folder):
        for p in self.trained.values():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()  # makes the state; what it does to the parameters is overwritten below
        self.optimizer.zero_grad()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = {**self.content(), "step": 0, "groups": groups}
        dcp.load(state, checkpoint_id=folder)
        for group, saved in zip(self.optimizer.param_groups, state["groups"]):
            group.update(saved)
        return state["step"]
