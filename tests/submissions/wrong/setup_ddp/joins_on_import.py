# diagnosis: group-on-import
# why: the group is made at the top of the file, and setup_ddp has nothing left to do but to select the device
import torch
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def setup_ddp(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and {world_size - 1}, got {rank}")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())


def cleanup_ddp() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
