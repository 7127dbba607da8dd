# style: tells FSDP2 not to divide, and clips by hand from the local rows
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class ShardedTraining:
    def __init__(self, model, layers, mesh, make_optimizer, *, compute_dtype=None, reshard_after_forward=True):
        precision = {"param_dtype": compute_dtype, "reduce_dtype": torch.float32}
        layers = list(layers)
        for layer in layers:
            fully_shard(
                layer,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(**precision),
            )
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision, output_dtype=torch.float32))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.model, self.shards = model, mesh.get_group(mesh.ndim - 1)
        self.optimizer = make_optimizer(model.parameters())

    def step(self, inputs, targets, sum_of_losses, max_norm):
        total = sum_of_losses(self.model(inputs), targets)
        numbers = torch.stack([total.detach(), total.new_tensor(float(len(targets)))])
        dist.all_reduce(numbers)
        loss, samples = numbers.tolist()
        (total / samples).backward()

        own = [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        square = torch.stack([one.square().sum() for one in own]).sum()
        dist.all_reduce(square, group=self.shards)  # the replicas have the same rows: count each once
        norm = square.sqrt().item()
        if norm > max_norm:
            torch._foreach_mul_(own, max_norm / norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss / samples, norm

    def save(self, folder, step):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "step": torch.tensor(step)}, checkpoint_id=folder)

    def load(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        step = torch.tensor(0)
        dcp.load({"model": model, "optimizer": optimizer, "step": step}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return step.item()
