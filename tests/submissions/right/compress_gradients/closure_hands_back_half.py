# style: everything in a closure; the reduced tensor is handed back in the small type, and DDP casts it
import torch
import torch.distributed as dist


def register(ddp_model, dtype=torch.float16, error_feedback=False):
    group = ddp_model.process_group
    world = dist.get_world_size(group)
    owed = {}

    def hook(state, bucket):
        share = bucket.buffer() / world
        places = []
        start = 0
        for p in bucket.parameters():
            places.append((id(p), slice(start, start + p.numel())))
            start += p.numel()
        if error_feedback:
            for key, place in places:
                share[place] += owed.get(key, 0.0)
        small = share.to(dtype)
        if error_feedback:
            rest = share - small.float()
            rest = torch.where(rest.isfinite(), rest, torch.zeros_like(rest))
            owed.update({key: rest[place].clone() for key, place in places})
        work = dist.all_reduce(small, group=group, async_op=True)
        return work.get_future().then(lambda f: f.wait()[0])

    ddp_model.register_comm_hook(None, hook)
