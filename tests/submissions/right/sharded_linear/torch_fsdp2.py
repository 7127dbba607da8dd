# style: PyTorch's own FSDP2 does it, with a copy of the layer
import copy

import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = fully_shard(copy.deepcopy(linear), reshard_after_forward=True)

    def forward(self, inputs):
        return self.linear(inputs)

    def full_state_dict(self):
        return {name: tensor.full_tensor() for name, tensor in self.linear.state_dict().items()}
