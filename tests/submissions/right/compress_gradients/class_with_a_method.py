# style: an object whose bound method is the hook, and which has the residuals of its registration by parameter
import torch
import torch.distributed as dist


class Compressor:
    """Halves what DDP sends."""

    def __init__(self, group, dtype, feedback):
        self.group, self.dtype, self.feedback = group, dtype, feedback
        self.owed = {}

    def __call__(self, state, bucket):
        raise TypeError("register the method")

    def hook(self, state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        buffer = bucket.buffer().mul_(1.0 / self.group.size())
        if self.feedback:
            for parameter, gradient in zip(parameters, gradients):
                gradient += self.owed.get(parameter, 0.0)
        wire = buffer.to(self.dtype)
        if self.feedback:
            position = 0
            for parameter, gradient in zip(parameters, gradients):
                sent = wire[position : position + gradient.numel()].view_as(gradient)
                position += gradient.numel()
                residual = gradient - sent
                residual[~torch.isfinite(residual)] = 0
                self.owed[parameter] = residual
        return dist.all_reduce(wire, group=self.group, async_op=True).get_future().then(self.unpack)

    def unpack(self, future):
        (wire,) = future.value()
        return wire.to(torch.float32)


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    ddp_model.register_comm_hook(None, Compressor(ddp_model.process_group, dtype, error_feedback).hook)
