"""What the training of `train_ddp` should come to, and what each known mistake would give.

The whole training is computed again in one process, on the batches that the ranks have shown. Each rank's model is a
little different in each step, in a way that the rank alone is told, after it has shown its batch and its weights (its
sharpness): its gradient can only come from it, and what follows from all gradients only after all have shown theirs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.grading import Collective, Grader, Hypothesis, Run, Tolerance, Where, difference, factor_of, names, parse

EPOCHS = 3
SMALL = 64  # bytes: a collective this small carries no gradients
LOSS_LINE = re.compile(r"^epoch (\d+): loss (-?\d+\.\d{4})$")
SAME, CLOSE = Tolerance(0.0, 1e-6), Tolerance(1e-5, 1e-5)
FUNCTION = r"def train_ddp"
LOOP = r"for epoch in || for .* in range\( || " + FUNCTION
PRINT = r"print\( || " + FUNCTION
WRAP = r"= *(\w+\.)*(DDP|DistributedDataParallel)\( || " + FUNCTION
BACKWARD = r"\.backward\( || " + LOOP
SCALED_RATE = r"\blr\b[^*]*\*.*\b(world|size|n)|\b(world|size|n)\w*(\(\))? *\* *\w*lr\b"

State = dict[str, torch.Tensor]
When = Literal["step", "epoch", "never"]


@dataclass
class Training:
    """One training as the ranks reported it."""

    run: Run
    x: torch.Tensor
    y: torch.Tensor
    rate: float

    @property
    def world(self) -> int:
        """How many ranks trained."""
        return len(self.run.ranks)

    @property
    def batches(self) -> list[list[list[int]]]:
        """batches[rank][step] is the list of sample numbers of that batch."""
        return [[one["batch"] for one in shown] for shown in self.run.shown]

    def sharpness(self, rank: int, step: int) -> float:
        """What the rank's logits were multiplied by in that step."""
        return 0.5 + self.run.drawn(rank, step)

    @property
    def steps(self) -> list[int]:
        """How many batches each rank's model was shown."""
        return [len(batches) for batches in self.batches]

    @property
    def sizes(self) -> list[int]:
        """The batches' sizes, each once."""
        return sorted({len(batch) for batches in self.batches for batch in batches})

    @cached_property
    def orders(self) -> list[list[list[int]]]:
        """orders[rank][epoch] is the order in which the rank saw its samples."""
        flat = [[sample for batch in batches for sample in batch] for batches in self.batches]
        each = [len(samples) // EPOCHS for samples in flat]
        return [[all[n * e : (n + 1) * e] for n in range(EPOCHS)] for all, e in zip(flat, each, strict=True)]

    def batch_sets(self, epoch: int) -> set[frozenset[int]]:
        """The batches of all ranks in this epoch, whatever their order and the order in them."""
        found: set[frozenset[int]] = set()
        for batches in self.batches:
            each = len(batches) // EPOCHS
            found |= {frozenset(batch) for batch in batches[each * epoch : each * (epoch + 1)]}
        return found

    def owners(self, epoch: int) -> dict[int, list[int]]:
        """The ranks that saw a sample in this epoch, for each sample in order."""
        seen = [set(order[epoch]) for order in self.orders]
        ranks = {sample: [rank for rank, own in enumerate(seen) if sample in own] for sample in range(len(self.x))}
        return {sample: own for sample, own in ranks.items() if own}

    @property
    def printed(self) -> list[tuple[int, float]]:
        """Epoch and loss in each of rank 0's lines that have the right form."""
        found = (LOSS_LINE.match(line.strip()) for line in self.run.ranks[0].stdout.splitlines())
        return [(int(match[1]), float(match[2])) for match in found if match]

    def drifted(self) -> tuple[int, Where] | None:
        """The first rank whose weights are not those of rank 0, and where they differ most."""
        states = self.run.observed("state")
        return next(((n, apart) for n, own in enumerate(states) if (apart := difference(own, states[0], SAME))), None)


def dataset(grader: Grader, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbered samples of a task that a small net can learn; drawn for every seed."""
    generator = grader.generator("data")
    features = torch.randn(count, 6, generator=generator)
    labels = (features @ torch.randn(6, 3, generator=generator)).argmax(1)
    return torch.cat([torch.arange(count).float()[:, None], features], 1), labels


def as_given(x: torch.Tensor) -> torch.Tensor:
    """These inputs in a type and a shape that careless code changes."""
    return x.double()[:, None, None]


def train(grader: Grader, world: int, count: int, nodes: int = 1, told: bool = True, **options: Any) -> Training:
    """Run the submission on `world` ranks, which are told that they are spread over so many nodes. If not `told`,
    the environment has only MASTER_ADDR and MASTER_PORT.
    """
    x, y = dataset(grader, count)
    drawn = grader.random(f"ranks of {world}")
    each = [{"own": {"seed": drawn.randrange(1 << 30)}} for _ in range(world)]
    given = {"x": as_given(x), "y": y, "epochs": EPOCHS, "options": options, "told": told}
    run = grader.run("trains", world, nodes=nodes, each=each, **given)
    return Training(run, x, y, options.get("lr", 0.1))


# What the ranks did ------------------------------------------------------------------------------------------------


def reduced_in_backward(run: Run) -> list[int]:
    """By rank, how many all-reduces there were in backward passes."""
    return [sum(c.kind == "all_reduce" and c.inside == "backward" for c in calls) for calls in run.collectives]


def carriers(calls: list[Collective]) -> list[Collective]:
    """The all-reduces that carry gradients, not a loss."""
    return [c for c in calls if c.kind in ("all_reduce", "all_reduce_coalesced") and c.nbytes > SMALL]


def wraps(run: Run) -> bool:
    """Whether a DDP wrapper was made."""
    return any(c.inside == "DDP()" for c in run.collectives[0])


def moved_after_wrapping(run: Run) -> list[int]:
    """The ranks that moved or cast the model between the wrapping and the first backward pass."""
    found = []
    for report in run.ranks:
        wrapped = next((c.number for c in report.collectives if c.inside == "DDP()"), 1 << 30)
        trained = next((c.number for c in report.collectives if c.inside == "backward"), 1 << 30)
        if any(wrapped < mark.number < trained and mark.name == "model moved" for mark in report.marks):
            found.append(report.rank)
    return found


def under_rank_condition(source: str, line: int) -> bool:
    """Whether the line lies in the body of an `if` that looks at the rank."""
    found = []
    tree = parse(source)
    for node in ast.walk(tree) if tree is not None else ():
        condition = " ".join(words(node.test)) if isinstance(node, ast.If) else ""
        if "rank" in condition and "world_size" not in condition:
            found += [part.lineno <= line <= (part.end_lineno or part.lineno) for part in node.body]
    return any(found)


def words(expression: ast.expr) -> list[str]:
    """The names, attributes and texts in it."""
    found = []
    for node in ast.walk(expression):
        own = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None)
        found += [own] if isinstance(own, str) else []
    return found


# How that is judged -------------------------------------------------------------------------------------------------


def judge_repeats(grader: Grader, training: Training) -> None:
    """Whether an epoch deals out the batches of an earlier one: in another order, from another rank, or permuted in
    themselves. A permutation of all samples repeats next to none.
    """
    for earlier, epoch in ((0, 1), (1, 2), (0, 2)):
        before, now = training.batch_sets(earlier), training.batch_sets(epoch)
        if 2 * len(before & now) > len(now):
            said = f"{len(before & now)} of the {len(now)} batches of epoch {epoch} hold the same samples as in epoch {earlier}. "
            said += "At most their order, or the order within them, is new, so the gradients are the same. Permute all samples in each epoch."
            grader.fail("missing-set-epoch", said, of=range(training.world), at=LOOP)


def judge_global_state(grader: Grader, run: Run, at: str) -> None:
    """Whether two jobs of the same global random state dealt the same, and a third with another dealt differently."""
    jobs = (run.shown[job : job + 2] for job in (0, 2, 4))
    one, same, other = ([sample for own in job for seen in own for sample in seen["batch"]] for job in jobs)
    moved = sum(a != b for a, b in zip(one, other, strict=False))
    said = f"With a different global random state (`torch.manual_seed`, `random.seed`), the same call of train_ddp dealt {moved} of {len(one)} samples differently."
    said += " An epoch repeats one sample, and which one must not depend on it either." if moved <= EPOCHS else ""
    of, at = [0] * (one == same and one != other), r"random\.\w+\( || seed|rand || " + at
    grader.fail_on(of, "order-from-global-state", said, at=at)


def judge_cleanup(grader: Grader, run: Run) -> None:
    """Whether a rank on which the model had raised called a collective before it left train_ddp."""
    for report in run.ranks:
        broke, out = ([m.number for m in report.marks if m.name == name] for name in ("broke", "out"))
        late = [c for c in report.collectives if broke and out and broke[0] < c.number < out[0]]
        said = f"The model raised on rank {report.rank}, which then called {late[0].kind if late else ''} before the error came out. If only one rank fails, the others never make this call, and this rank hangs."
        grader.fail_on([report.rank] * bool(late), "cleanup-waits", said, at=late[0].frame if late else FUNCTION)


def judge_output(grader: Grader, training: Training) -> None:
    """Nothing but rank 0's lines, where the shares had to be filled up."""
    for report in training.run.ranks:
        lines = [line for line in report.stdout.splitlines() if line.strip()]
        odd = [line for line in lines if report.rank or not LOSS_LINE.match(line.strip())]
        said = f"With {len(training.x)} samples on {training.world} ranks, rank {report.rank} printed {odd[0] if odd else ''!r}. "
        said += "Rank 0's line after each epoch is all that may be printed."
        id = "every-rank-speaks" if report.rank else "prints-more"
        grader.fail_on([report.rank] * bool(odd), id, said, at=PRINT)


def judge_each_step(grader: Grader, training: Training, right: Replayed) -> None:
    """Whether every rank had the right weights before each step, not only in the end."""
    for step, weights in enumerate(right.steps):
        shown = [own[step]["weights"] for own in training.run.shown]
        what = f"In the end the weights are right, but before step {step} the model was not trained that far: a weight"
        grader.explain(what, shown, weights, otherwise="different-weights", at=BACKWARD, tolerance=CLOSE)


def judge_bytes(grader: Grader, training: Training) -> None:
    """Whether the gradients can have come over the network, by the operating system's count."""
    crossed, world = training.run.wire, training.world
    if crossed is None or training.run.device != "cpu" or world == 1:
        return
    step = sum(4 * value.numel() for value in training.run.shown[0][0]["weights"].values())
    for rank, sent in enumerate(map(sum, crossed)):
        made = step * training.steps[rank]
        least = made * (world - 1) // world  # all of a gradient but one chunk, as in a ring's first half
        said = f"The weights are right, but rank {rank} sent {sent:,} bytes to the other ranks. "
        said += f"Its gradients of {training.steps[rank]} steps are {made:,} bytes, of which at least {least:,} have to be sent."
        grader.fail_on([rank] * (sent < least), "no-communication", said, at=BACKWARD)


def judge_drift(grader: Grader, training: Training) -> None:
    """Whether the ranks have the same weights; where not, what became of the gradients tells why."""
    drifted, run = training.drifted(), training.run
    if drifted is None:
        return
    rank, where = drifted
    reduced, moved, wrapped = reduced_in_backward(run), moved_after_wrapping(run), wraps(run)
    apart, both = say_apart(rank, where), (0, rank)
    plain = f"{apart}: no gradients were exchanged, so each rank trained its own model."
    lost = f"{apart}: {names(moved)} moved or cast the model after it was wrapped, and DDP's hooks were lost without any message."
    past = f"{apart}: the model was wrapped, but no backward pass exchanged a gradient. Was the forward pass called on the wrapper?"
    first = next(
        (gap for own in run.shown if (gap := difference(own[0]["weights"], run.shown[0][0]["weights"], SAME))), None
    )
    began = f"{first.path if first else ''} differed between the ranks before the first step: each rank started with different weights. Give all ranks rank 0's."
    averaged = f"{apart}, although the gradients were averaged {reduced[0]} times"
    never = wrapped and not any(reduced)
    frozen = f"{apart}. It is a frozen parameter (requires_grad is False), and rank {rank} was never given rank 0's."
    for applies, id, said, of, at in (
        (not wrapped and not carriers(run.collectives[0]), "not-wrapped", plain, both, r"model_class\( || " + FUNCTION),
        (never and moved, "cast-after-wrapping", lost, moved, WRAP),
        (never, "bypasses-ddp", past, both, r"\.module\( || " + BACKWARD),
        (first is not None, "drift", began, both, r"model_class\( || " + FUNCTION),
        (where.path == "scale", "drift", frozen, both, r"requires_grad || broadcast || " + FUNCTION),
        (
            all(reduced),
            "different-learning-rate-per-rank",
            f"{averaged}: the ranks did not apply the same update.",
            both,
            r"optim\. || SGD\(",
        ),
        (True, "drift", f"{apart}.", both, BACKWARD),
    ):
        grader.fail_on(of if applies else (), id, said, at=at)


def say_apart(rank: int, where: Where) -> str:
    """How far two ranks are apart."""
    return f"{where.path or 'the state_dict'} differs between rank 0 and rank {rank} by {where.distance:.2g}"


# One process on the joined batches, right and wrong ----------------------------------------------------------------


class Net(nn.Module):
    """The scenario's classifier, for one process."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.first = nn.Linear(*reversed(state["first.weight"].shape))
        self.second = nn.Linear(*reversed(state["second.weight"].shape))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.load_state_dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 7) → (B, 3)."""
        return self.second(torch.tanh(self.first(x[:, 1:]))) * self.scale


@dataclass(frozen=True)
class Replayed:
    """The weights in the end and before each step, and each rank's loss before and after each step, of shape
    (epochs, steps, ranks).
    """

    state: State
    steps: list[State]
    losses: torch.Tensor
    after: torch.Tensor


def replay(
    training: Training,
    *,
    factor: float = 1.0,
    rate: float | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    reduction: str = "mean",
    final: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    nominal: bool = False,
    clears: When = "step",
    updates: When = "step",
) -> Replayed:
    """Train in one process on the batches that the ranks reported: rightly, or with what the options say.

    The mean gradient is taken `factor` times; `final` comes behind the last layer; `nominal` divides each batch's sum by the
    size of a whole one. Gradients are cleared at each step's or epoch's beginning, and the weights updated at its end.
    """
    net, steps = Net(training.run.observed("initial")[0]), min(training.steps)
    optimize, an_epoch = optimizer(net.parameters(), lr=rate or training.rate), max(1, steps // EPOCHS)

    def of_ranks(step: int) -> torch.Tensor:
        losses = []
        for rank, batches in enumerate(training.batches):
            logits = final(net(training.x[batches[step]]) * training.sharpness(rank, step))
            loss = F.cross_entropy(logits, training.y[batches[step]], reduction=reduction)
            losses.append(loss * len(batches[step]) / max(map(len, batches)) if nominal else loss)
        return torch.stack(losses)

    before, after, weights = [], [], []
    for step in range(steps):
        weights.append({name: value.detach().clone() for name, value in net.named_parameters() if value.requires_grad})
        if clears == "step" or (clears == "epoch" and step % an_epoch == 0):
            optimize.zero_grad()
        before.append(of_ranks(step))
        (before[-1].mean() * factor).backward()
        if updates == "step" or (updates == "epoch" and (step + 1) % an_epoch == 0):
            optimize.step()
        after.append(of_ranks(step).detach())
    shape = (-1, an_epoch, training.world)
    full = steps // an_epoch * an_epoch
    before, after = (torch.stack(some)[:full].detach().view(shape) for some in (before, after))
    return Replayed({name: value.detach() for name, value in net.state_dict().items()}, weights, before, after)


def momentum(training: Training, right: Replayed) -> float:
    """With which momentum rank 0 went its second step, if that is all that was wrong with it; 0 where none explains it."""
    shown = [one["weights"] for one in training.run.shown[0][:3]]
    if len(shown) < 3 or len(right.steps) < 3:
        return 0.0
    too_far = [right.steps[2][name] - weights for name, weights in shown[2].items()]
    before = [weights - shown[1][name] for name, weights in shown[0].items()]
    return round(factor_of(too_far, before, CLOSE) or 0.0, 3)


def weight_mistakes(training: Training, right: Replayed, scales_rate: bool) -> list[Hypothesis]:
    """The weights in the end. With `scales_rate` the code has lr · world_size, which gives what a sum would."""

    def gives(**how: Any) -> Callable[[], State]:
        return lambda: replay(training, **how).state

    world, sgd, adam = training.world, r"optim\.|SGD\(", r"optim\.Adam || Adam"
    summed = gives(factor=world)
    wise = "It is what lr · world_size gives. That can be wise, but it is the caller's choice."
    scaled = Hypothesis("scales-lr", wise, summed, SCALED_RATE)
    keeps = momentum(training, right)
    heavy = gives(optimizer=lambda values, lr: torch.optim.SGD(values, lr, momentum=max(0.0, keeps)))
    twice = r"/ *=? *(world_size|dist\.get_world_size) || " + BACKWARD
    still = (
        "No weight changed: the optimizer does not hold the parameters of the model that was trained, or never stepped."
    )
    decays = [
        Hypothesis("wrong-optimizer", f"It is what a weight decay of {decay} gives; plain SGD has none.",
                   gives(optimizer=lambda values, lr, decay=decay: torch.optim.SGD(values, lr, weight_decay=decay)),
                   r"weight_decay || SGD\(")
        for decay in (1e-4, 5e-4, 1e-3, 1e-2)
    ]  # fmt: skip
    softmax = (
        "It is what cross-entropy of a softmax gives; cross-entropy applies softmax itself, so pass it the logits."
    )
    return [
        *[scaled][: int(scales_rate)],
        Hypothesis("gradients-summed", "It is what the sum of the gradients gives; DDP's mean divides by the number of ranks.", summed, r"all_reduce || " + BACKWARD),
        Hypothesis("double-averaging", "It is what dividing the averaged gradient by the world size once more gives.", gives(factor=1 / world), twice),
        Hypothesis("missing-zero-grad", "It is what comes out when each step's gradient is added to those before it.", gives(clears="never"), BACKWARD),
        Hypothesis("ignores-lr", f"It is what lr=0.1 gives; lr={training.rate} was asked for.", gives(rate=0.1), r"SGD\( || lr"),
        Hypothesis("wrong-optimizer", "It is what Adam gives; plain SGD was asked for.", gives(optimizer=torch.optim.Adam), adam),
        Hypothesis("wrong-optimizer", "It is what AdamW gives; plain SGD was asked for.", gives(optimizer=torch.optim.AdamW), adam),
        Hypothesis("wrong-optimizer", f"It is what SGD with momentum {keeps:g} gives; plain SGD was asked for.", heavy, r"momentum || SGD\("),
        *decays,
        Hypothesis("optimizer-on-stale-parameters", still, gives(updates="never"), sgd),
        Hypothesis("sum-not-mean-loss", "It is what the sum of the samples' losses gives instead of their mean.", gives(reduction="sum"), r"reduction || CrossEntropy|cross_entropy"),
        Hypothesis("different-weights", softmax, gives(final=lambda logits: logits.softmax(1)), r"[Ss]oftmax"),
        Hypothesis("missing-zero-grad", "It is what clearing the gradients once an epoch gives, instead of in each step.", gives(clears="epoch"), r"zero_grad || " + BACKWARD),
        Hypothesis("steps-once-an-epoch", "It is what one update an epoch gives.", gives(updates="epoch"), r"\.step\("),
    ]  # fmt: skip


def by_epoch(losses: torch.Tensor) -> dict[str, float]:
    """The losses of all epochs, as rank 0 prints them."""
    return {f"epoch {epoch}": round(loss, 4) for epoch, loss in enumerate(losses.tolist())}


def loss_mistakes(replayed: Replayed) -> list[Hypothesis]:
    """What rank 0 prints where all batches are of one size."""
    losses, after = replayed.losses, replayed.after.mean((1, 2))
    mean, (_, batches, world) = losses.mean((1, 2)), losses.shape
    table = [
        ("rank-local-loss", "It is rank 0's own mean, without the other ranks' samples.", losses[:, :, 0].mean(1)),
        ("last-batch-loss", "It is the last batch's loss, not the epoch's mean.", losses[:, -1, 0]),
        ("last-batch-loss", "It is the last step's loss, not the epoch's mean.", losses[:, -1].mean(1)),
        ("sum-not-mean-loss", "It is the sum over the ranks: all_reduce adds, and no rank divided.", mean * world),
        ("sum-not-mean-loss", "It is a sum over the batches, not their mean.", mean * batches),
        ("sum-not-mean-loss", "It is the sum over rank 0's batches, not their mean.", losses[:, :, 0].sum(1)),
        ("sum-not-mean-loss", "It is the sum over all ranks and batches, not their mean.", losses.sum((1, 2))),
        ("double-averaging-loss", "It is the mean divided by the world size once more.", mean / world),
        ("loss-after-update", "It is computed after each step instead of before it.", after),
    ]
    return [Hypothesis(id, says, by_epoch(gives)) for id, says, gives in table]


def uneven_loss_mistakes(training: Training, replayed: Replayed) -> tuple[torch.Tensor, list[Hypothesis]]:
    """The right losses where the last batch of an epoch is smaller, and what rank 0 prints instead."""
    losses, samples = replayed.losses, len(training.x)
    sizes = torch.tensor([len(batch) for batch in training.batches[0][: losses.shape[1]]])[None, :, None]
    dealt = int(sizes.sum()) * training.world
    right = (losses * sizes).sum((1, 2)) / dealt
    smaller = f"The last batch is of size {sizes.flatten()[-1]} and the others of {sizes.max()}: a mean of the batches' means counts its samples too much."
    by_data = f"{dealt} samples were dealt, and the sum was divided by len(data), {samples}."
    return right, [
        Hypothesis("batch-means-loss", by_data, by_epoch(right * dealt / samples)),
        Hypothesis("batch-means-loss", smaller, by_epoch(losses.mean((1, 2)))),
    ]
