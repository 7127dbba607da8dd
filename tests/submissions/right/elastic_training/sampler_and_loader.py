# style: DistributedSampler over the shuffled indices, a DataLoader, the flag waits in an asynchronous all-reduce
import signal
import threading

import torch
import torch.distributed as dist
from checkpoint import load_latest, save_checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def train(folder, make, dataset, *, steps, batch_size, save_every, seed):
    if batch_size % dist.get_world_size() != 0:
        raise ValueError("the batch cannot be dealt out")
    wanted = []
    signal.signal(signal.SIGTERM, lambda number, frame: wanted.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(number))
    assert threading.current_thread() is threading.main_thread()

    model, optimizer = make()
    found = load_latest(folder)
    step = 0
    if found:
        model.load_state_dict(found["weights"])
        optimizer.load_state_dict(found["optim"])
        step = found["step"]
    net = DistributedDataParallel(model, find_unused_parameters=True)
    criterion = nn.CrossEntropyLoss()
    per_epoch = len(dataset) // batch_size
    while step < steps:
        epoch, done = divmod(step, per_epoch)
        # One rank's view first: the epoch's order, without what has been done and what is left over.
        whole = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
        whole.set_epoch(epoch)
        rest = Subset(dataset, list(whole)[done * batch_size : per_epoch * batch_size])
        loader = DataLoader(rest, batch_size // dist.get_world_size(), sampler=DistributedSampler(rest, shuffle=False))
        for x, y in loader:
            flag = torch.tensor([float(len(wanted) > 0)])
            agreed = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
            optimizer.zero_grad(set_to_none=False)
            criterion(net(x), y).backward()
            optimizer.step()
            step += 1
            agreed.wait()
            last = flag.item() > 0 or step == steps
            if last or step % save_every == 0:
                save_checkpoint(folder, {"step": step, "weights": net.state_dict(), "optim": optimizer.state_dict()})
            if last:
                return step
    return step
