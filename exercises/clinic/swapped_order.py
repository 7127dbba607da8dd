"""Case: two numbers that can't be reproduced.

“The evaluation reports a loss and an accuracy over all ranks. It finishes, and the numbers look plausible. With the same
model and the same records, one process computes something else.”

    ./lockstep run -n 3 exercises/clinic/swapped_order.py

Say what is wrong, in CAUSE and RANK below (exercises/clinic/README.md lists the causes). Then fix the job. `main()`
must still return the same things.
"""

import os

import clinic_data
import torch
import torch.distributed as dist
from torch import nn

CAUSE = "?"
RANK = "?"  # its number, or "all"

COUNT = 48


def classify(features: torch.Tensor) -> torch.Tensor:
    """(N, 8) float32 to scores, (N, 3). A stand-in for the trained model."""
    weights = (
        torch.linspace(-1, 1, clinic_data.FEATURES * clinic_data.CLASSES)
        .reshape(clinic_data.FEATURES, clinic_data.CLASSES)
        .sin()
    )
    return features @ weights


def evaluate(part: clinic_data.Records, numbers: range) -> dict[str, torch.Tensor]:
    """The mean loss over these records, and the share that is classified correctly, as float32 scalars."""
    scores, classes = classify(part.features[numbers]), part.classes[numbers]
    loss = nn.functional.cross_entropy(scores, classes)
    return {"loss": loss, "accuracy": (scores.argmax(1) == classes).float().mean()}


def main() -> dict[str, object]:
    """Evaluate on all ranks. Returns the loss and the accuracy over all records."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    usual = {"report": ["loss", "accuracy"]}
    options = clinic_data.settings("swapped_order", rank, world_size, usual, odd={"report": ["accuracy", "loss"]})
    means = evaluate(clinic_data.Records(COUNT), range(rank, COUNT, world_size))
    for name in options["report"]:
        dist.all_reduce(means[name])
        means[name] /= world_size
        print(f"rank {rank}: {name} {means[name].item():.3f}")
    dist.destroy_process_group()
    return {"loss": means["loss"].item(), "accuracy": means["accuracy"].item()}


if __name__ == "__main__":
    main()
