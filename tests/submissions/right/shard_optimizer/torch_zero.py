# style: torch's own ZeroRedundancyOptimizer
from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **defaults):
        self._zero = ZeroRedundancyOptimizer(list(params), optimizer_class=optimizer_class, **defaults)

    @property
    def param_groups(self):
        return self._zero.param_groups

    def step(self):
        self._zero.step()

    def zero_grad(self):
        self._zero.zero_grad(set_to_none=True)
