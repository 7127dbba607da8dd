"""On the ranks: `ShardedTraining` is given a model and batches that were drawn. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from lockstep.grading.on_rank import join, mark, observe, rank

State = dict[str, torch.Tensor]
FOLDER = Path("saved")
FROZEN = "layers.1.first.weight"


class Layer(nn.Module):
    """Two linear layers beside a shortcut, and a parameter with fewer rows than there are ranks."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As a transformer's layer: what comes in, and something more."""
        return x + self.gain * self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """The next token from a token. The head shares its weight with the embedding, and one layer's weight is frozen."""

    def __init__(self, state: State) -> None:
        super().__init__()
        (vocabulary, width), hidden = state["embedding.weight"].shape, len(state["layers.0.first.bias"])
        layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight
        self.load_state_dict(state | {"head.weight": state["embedding.weight"]})
        self.get_parameter(FROZEN).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, one row for each token of each sample."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Job:
    """A submission's training, and what is seen of it."""

    def __init__(
        self,
        submission,
        state: State,
        mesh: list[int],
        optimizer: str,
        options: dict[str, Any],
        keywords: dict[str, Any],
        once: bool = False,
    ) -> None:
        """With `once`, the layers can be walked through only once."""
        self.device = join()
        names = ("replicate", "shard")[-len(mesh) :]
        device_mesh = init_device_mesh(self.device.type, tuple(mesh), mesh_dim_names=names)
        self.model = Model(state).to(self.device)
        self.seen: dict[str, list[Any]] = {name: [] for name in ("gradients", "outputs", "losses", "norms", "states")}
        self.made: list[torch.optim.Optimizer] = []
        if "compute_dtype" in keywords:
            keywords = keywords | {"compute_dtype": getattr(torch, keywords["compute_dtype"])}
        layers = iter(self.model.layers) if once else list(self.model.layers)
        self.training = submission.ShardedTraining(
            self.model, layers, device_mesh, self._maker(optimizer, options), **keywords
        )
        self.named = dict(self.model.named_parameters())
        observe("kept", {name: (local(one).numel(), str(one.dtype)) for name, one in self.named.items()})
        observe("part", [round(float(local(one).detach().double().sum()), 9) for one in self.named.values()])
        self.model.register_forward_pre_hook(lambda *_: mark("forward"), prepend=True)
        self.model.register_forward_hook(lambda _, inputs, outputs: self.seen["outputs"].append(str(outputs.dtype)))
        self.seen["states"].append(full(self.model))

    def _maker(self, optimizer: str, options: dict[str, Any]) -> Callable[..., torch.optim.Optimizer]:
        job = self

        class Kept(getattr(torch.optim, optimizer)):
            """The optimizer that was asked for. It says what it is given at each step."""

            def step(self, *args: Any, **kwargs: Any) -> Any:
                """Note the gradients, and do it."""
                mark("optimizer")
                given = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
                job.seen["gradients"].append([(local(one).numel(), str(one.dtype)) for one in given])
                return super().step(*args, **kwargs)

        def make(parameters: Any) -> torch.optim.Optimizer:
            made = Kept(parameters, **options)
            self.made.append(made)
            return made

        return make

    def step(self, batch: list[torch.Tensor], max_norm: float) -> None:
        """One step of the submission's on this rank's batch."""

        def sum_of_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            mark("loss")
            self.seen["outputs"].append(str(outputs.dtype))
            return F.cross_entropy(outputs.float().mT, targets, reduction="sum")

        inputs, targets = (one.to(self.device) for one in batch)
        loss, norm = self.training.step(inputs, targets, sum_of_losses, max_norm)
        mark("end")
        self.seen["losses"].append(loss)
        self.seen["norms"].append(norm)
        self.seen["states"].append(full(self.model))

    def report(self) -> None:
        """Say all that was seen."""
        for name, values in self.seen.items():
            observe(name, values)
        held = {}
        for name, parameter in self.named.items():
            states = [made.state.get(parameter, {}) for made in self.made]
            tensors = [one for state in states for one in state.values() if torch.is_tensor(one) and one.dim()]
            held[name] = [(local(one).numel(), str(one.dtype)) for one in tensors]
        observe("state", held)
        observe("rates", [group["lr"] for made in self.made for group in made.param_groups])


def steps(submission, batches: list[list[torch.Tensor]], norms: list[float], **job: Any) -> None:
    """Some steps. `batches[step]` is this rank's, and `norms[step]` is where its gradient is clipped."""
    played = Job(submission, **job)
    for batch, norm in zip(batches, norms, strict=True):
        played.step(batch, norm)
    played.report()


def saves(submission, batches: list[list[torch.Tensor]], norms: list[float], step: int, **job: Any) -> None:
    """As many steps as `step` says, a save, and the other steps. At the end another save, into a folder that is a str."""
    played = Job(submission, **job)
    for number, (batch, norm) in enumerate(zip(batches, norms, strict=True)):
        if number == step:
            mark("save")
            played.training.save(FOLDER, step)
            mark("saved")
            dist.barrier()
            files = sorted(one for one in FOLDER.rglob("*") if one.is_file()) if FOLDER.is_dir() else []
            observe("files", {str(one): len(one.read_bytes()) for one in files})
            if rank() == 0:
                observe("content", {str(one): torch.frombuffer(bytearray(one.read_bytes() or b" "), dtype=torch.uint8)
                                    for one in files})  # fmt: skip
        played.step(batch, norm)
    played.training.save("later", len(batches))
    played.report()


def loads(submission, content: State, batches: list[list[torch.Tensor]], norms: list[float], **job: Any) -> None:
    """What `saves` wrote, loaded before the first of these steps; then all of this again, with the loading job's rate."""
    played = Job(submission, **job)
    for name, values in content.items() if rank() == 0 else ():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(values.numpy().tobytes())
    dist.barrier()
    returned = []
    for folder in (FOLDER, str(FOLDER)):
        mark("load")
        returned.append(played.training.load(folder))
        mark("loaded")
        played.seen["states"].append(full(played.model))
        for batch, norm in zip(batches, norms, strict=True):
            played.step(batch, norm)
        for group in (group for made in played.made for group in made.param_groups):
            group["lr"] = job["options"]["lr"]
    observe("loaded", returned)
    played.report()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; those of FSDP2 have `to_local`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def full(model: nn.Module) -> State:
    """A copy of all parameters. What is held on one rank alone is that rank's."""
    found = {}
    for name, one in model.named_parameters():
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        found[name] = whole.detach().clone().cpu()
    return found
