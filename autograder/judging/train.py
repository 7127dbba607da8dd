"""How `train` is started on the small model, what its training should be made of, and what each known mistake would give."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Run, Tolerance, equal, factor_of, names

from .resumed import Job, Lines, share, together

WORLD = 2
SAMPLES, BATCH, EPOCHS = 40, 12, 3
TESTED = {4: 3}  # by the number of ranks: of four, one has nothing to evaluate; 13 otherwise
SAVE_EVERY, LOG_EVERY, LARGEST = 5, 4, 0.05
AN_EPOCH = SAMPLES // BATCH
TOTAL = AN_EPOCH * EPOCHS

TRAIN = r"def train\("
ORDER = r"def batches || Sampler\( || " + TRAIN
STEP = r"def train_step || \.backward\( || " + TRAIN
EVALUATION = r"def evaluate || " + TRAIN
LOADING = r"= load\( || def load\( || " + TRAIN
STOPPING = r"in train: \bstop\w*\.|\.made\b || in train: StopRequest\(|stop || StopRequest\(|stop || " + TRAIN
RATE = r"in train: \brate\( || (?<!def )\brate\( || \blr\b || " + TRAIN
RESULT = r"return Result || " + TRAIN
LINES = Lines(
    order=ORDER,
    batch=r"batch_size // || " + ORDER,
    loading=LOADING,
    saving=r"save_every || save\( || " + TRAIN,
    counting=r"\bstep \+= || \bstep\b.*= || " + TRAIN,
    stopping=STOPPING,
    handler=STOPPING,
)
SAVE_FAILS = {  # what the scenario noted: where the file was to be, and the line
    "error": ("Where no file can be made", r"except || raise || def save"),
    "error on a full disk": ("On a full disk", r"except || raise || def save"),
}
LOOSE = Tolerance(1e-3, 1e-5)

Pairs = tuple[torch.Tensor, torch.Tensor]


def data(grader: Grader, world_size: int = WORLD) -> dict[str, Any]:
    """Training and test set, drawn for every seed."""
    generator = grader.generator("data")

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)

    return {"train": some(SAMPLES), "test": some(TESTED.get(world_size, 13))}


def drawn_seed(grader: Grader) -> int:
    """What the command line says."""
    return grader.random("seed").randrange(1, 999)


def arguments(grader: Grader, *more: str) -> list[str]:
    """The command line."""
    usual = {"--epochs": EPOCHS, "--batch-size": BATCH, "--save-every": SAVE_EVERY, "--log-every": LOG_EVERY}
    usual |= {"--clip": 1000, "--lr": LARGEST, "--seed": drawn_seed(grader)}
    return [str(word) for pair in usual.items() for word in pair] + list(more)


def job(grader: Grader) -> Job:
    """What there is to know of the job."""
    return Job(grader, TOTAL, AN_EPOCH, BATCH, LINES)


def through(grader: Grader, world_size: int = WORLD, *more: str) -> Run:
    """A start that nobody disturbs."""
    return grader.run("start", world_size, arguments=arguments(grader, *more), **data(grader, world_size))


def start(grader: Grader, *options: str, **more: Any) -> Run:
    """Another start of that job, however it ends."""
    return grader.attempt("start", WORLD, arguments=arguments(grader, *options), **data(grader), **more)


def initial(seed: int) -> torch.Tensor:
    """The small model's weights, built after `torch.manual_seed(seed)`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(6, 10), nn.Linear(10, 3)
    return torch.cat([p.detach().reshape(-1) for layer in layers for p in layer.parameters()])


def prints(text: str, value: torch.Tensor) -> bool:
    """Whether a number of at least three decimals in the text is this one."""
    words = re.findall(r"(?<!\d)\d+\.\d{3,}", text)
    return any(abs(float(word) - value.item()) < 10.0 ** -len(word.partition(".")[2]) for word in words)


def device_mistakes(gpus: int, world: int) -> list[Hypothesis]:
    """Which device each rank takes."""
    everywhere = Each([f"cuda:{rank}" for rank in range(world)])
    return [
        Hypothesis("device-by-global-rank", f"Its node has {gpus} GPUs, one for each of its ranks.", everywhere),
        Hypothesis("no-device", "No device was chosen.", "cpu"),
    ]


def rate_mistakes(largest: float, seen: list[float]) -> list[Hypothesis]:
    """The rates of all steps, where these were `seen`."""
    right = rates(largest)
    factor = factor_of(seen, right)
    return [
        Hypothesis("ignores-lr", f"That is the largest rate, --lr {largest}, in every step.", [largest] * TOTAL),
        Hypothesis("ignores-lr", f"That goes up to 0.01, the default; --lr {largest} was asked for.", rates(0.01)),
        *(
            [Hypothesis("ignores-lr", f"Each is {factor:.3g} of what it should be.", [factor * rate for rate in right])]
            if factor is not None
            else []
        ),
        Hypothesis("rate-of-another-step", "That is the rate of the step after it.", [*right[1:], largest * 0.01]),
        Hypothesis("rate-of-another-step", "That is the rate of the step before it.", [right[0], *right[:-1]]),
    ]


def order(seed: int, world: int, shuffle: bool = True) -> list[list[int]]:
    """The samples of each step, of all ranks together."""
    steps: list[list[int]] = [[] for _ in range(TOTAL)]
    for rank in range(world):
        sampler: Any = DistributedSampler(range(SAMPLES), world, rank, shuffle, seed, drop_last=True)  # type: ignore[arg-type]
        for step in range(TOTAL):
            sampler.set_epoch(step // AN_EPOCH)
            at = step % AN_EPOCH * (BATCH // world)
            steps[step] += list(sampler)[at : at + BATCH // world]
    return [sorted(step) for step in steps]


def rates(largest: float) -> list[float]:
    """The learning rate of each step."""
    warm = max(1, TOTAL // 20)
    return [largest * min((n + 1) / warm, 0.5 * (1 + math.cos(math.pi * n / TOTAL)) + 0.01) for n in range(TOTAL)]


def logits(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the small model gives with all its parameters in one vector."""
    first, bias, last, other = weights.split([60, 10, 30, 3])
    return F.relu(x @ first.view(10, 6).T + bias) @ last.view(3, 10).T + other


def loss(weights: torch.Tensor, of: Pairs, samples: list[int]) -> torch.Tensor:
    """The mean over these samples."""
    return F.cross_entropy(logits(weights, of[0][samples]), of[1][samples])


def gradients(run: Run, number: int, of: Pairs, accumulate: int, clip: float) -> tuple[torch.Tensor, list[Hypothesis]]:
    """What the optimizer should be given in a step, and what the mistakes give."""
    steps = run.observed("steps")
    weights = steps[0][number]["weights"].clone().requires_grad_()

    def gradient(samples: list[int]) -> torch.Tensor:
        return torch.autograd.grad(loss(weights, of, samples), weights)[0]

    def clipped(value: torch.Tensor) -> torch.Tensor:
        return value * min(1.0, clip / value.norm().item())

    full = gradient(together(run, number))
    own = [gradient(share(one[number])) for one in steps]
    last = sum(gradient(one[number]["samples"][-1]) for one in steps) / len(steps)
    early = sum(clipped(one) for one in own) / len(own)
    parts = []  # of each rank, what its micro-batches have left when each is clipped, and then the last is averaged
    for one in steps:
        left = torch.zeros_like(full)
        for part in one[number]["samples"][:-1]:
            left = clipped(left + gradient(part) / accumulate)
        parts.append(left + gradient(one[number]["samples"][-1]) / accumulate)
    each = clipped(sum(parts) / len(parts))  # type: ignore[arg-type]
    averaged = r"DDP\(|DistributedDataParallel\( || " + STEP
    scaled, mean = r"backward || " + STEP, "wrong-gradient-of-the-batch"
    return clipped(full), [
        Hypothesis("never-clips", f"That is the gradient before clipping; --clip {clip:g} was asked for.", full, r"clip || " + STEP),
        Hypothesis("never-scales", f"That is the sum over {accumulate} micro-batches, not the mean.", clipped(full * accumulate), scaled),
        Hypothesis("never-scales", f"That is the sum over {accumulate} micro-batches, not the mean.", full * accumulate, scaled),
        Hypothesis("bypasses-ddp", "That is the gradient of its own samples: not averaged over the ranks.",
                   Each([clipped(one) for one in own]), averaged),
        Hypothesis("gradients-summed", "That is the sum over the ranks, not the mean.", clipped(full * len(steps)), averaged),
        Hypothesis(mean, "Each rank clipped its own gradient, before the average.", early, r"clip || " + STEP),
        Hypothesis(mean, "The gradient was clipped after each micro-batch, not once, after the average.", each, r"in train_step: clip_ || in train_step: clip || " + STEP),
        Hypothesis(mean, "That is the gradient of the last micro-batch alone.", clipped(last), scaled),
    ]  # fmt: skip


def optimizers(
    weights: torch.Tensor, gradient: torch.Tensor, rate: float
) -> tuple[torch.Tensor, torch.Tensor, list[Hypothesis]]:
    """The weights after the first step; the same if biases don't decay; and after the first step of other optimizers."""

    def after(kind: Any, **options: Any) -> torch.Tensor:
        value = weights.clone().requires_grad_()
        value.grad = gradient.clone()
        kind([value], lr=rate, **options).step()
        return value.detach()

    others = {
        "Adam": torch.optim.Adam,
        "SGD": torch.optim.SGD,
        "RMSprop": torch.optim.RMSprop,
        "Adagrad": torch.optim.Adagrad,
    }
    at = r"optimizer = || optim\. || " + TRAIN
    named = [
        Hypothesis("wrong-optimizer", f"It is what {name} gives; AdamW was asked for.", after(kind), at)
        for name, kind in others.items()
    ]
    plain = Hypothesis(
        "wrong-optimizer",
        "It is what AdamW gives without weight decay.",
        after(torch.optim.AdamW, weight_decay=0.0),
        at,
    )
    still = Hypothesis("wrong-optimizer", "No weight has moved.", weights, at)
    right, undecayed = after(torch.optim.AdamW), after(torch.optim.AdamW, weight_decay=0.0)
    grouped = right.clone()
    for bias in (slice(60, 70), slice(100, 103)):  # of `initial`'s two layers
        grouped[bias] = undecayed[bias]
    return right, grouped, [*named, plain, still]


def metrics(run: Run, of: Pairs) -> tuple[list[float], str, list[Hypothesis]]:
    """Loss and accuracy on the test set; the diagnosis when neither is explained; and what the mistakes give."""
    weights, everyone = run.observed("weights")[0], list(range(len(of[0])))

    def both(samples: list[int]) -> list[float]:
        if not samples:
            return [math.nan, math.nan]
        right = logits(weights, of[0][samples]).argmax(1) == of[1][samples]
        return [loss(weights, of, samples).item(), right.double().mean().item()]

    shares = [[-1 - n for batch in one for n in batch] for one in run.observed("tested")]
    last = [share[len(share) - len(share) // EPOCHS :] for share in shares]
    looked = sorted(n for share in last for n in share)
    twice = sorted({n for n in looked if looked.count(n) > 1})
    missing = sorted(set(everyone) - set(looked))
    own = [both(share) for share in last]
    mean = [sum(column) / len(own) for column in zip(*own, strict=True)]
    padded = Hypothesis(
        "evaluates-padding", f"The samples {twice} were counted twice.", both(looked) if twice else None
    )
    left_out = Hypothesis(
        "evaluation-misses-samples", f"The samples {missing} were never looked at.", both(looked) if missing else None
    )
    some = twice and len(looked) < 2 * len(everyone)
    return (
        both(everyone),
        padded.id if some else left_out.id if missing else "wrong-metric",
        [
            Hypothesis("metric-of-one-rank", "They are those of its own samples.", Each(own)),
            padded,
            left_out,
            *(
                Hypothesis(
                    "wrong-metric",
                    "A sample has two targets: they were divided by the number of samples.",
                    [n * one for n, one in zip(factors, both(everyone), strict=True)],
                    r"len\(targets || in evaluate: return || " + EVALUATION,
                )
                for factors in ((1, 2), (2, 2))
            ),
            Hypothesis(
                "wrong-metric", "They are the mean of the ranks' means.", mean if not twice and not missing else None
            ),
        ],
    )


# How the steps are judged ----------------------------------------------------------------------------------------------


def counted(grader: Grader, run: Run, what: str, steps: int) -> None:
    """What each rank's Result says of the steps."""
    says = [[result["steps"], result["of"]] for result in run.observed("result")]
    what = f"{what} Steps and of in the Result"
    grader.explain(what, says, [steps, TOTAL], otherwise="wrong-count-returned", at=RESULT)


def judge_samples(grader: Grader, world: int, run: Run | None = None) -> None:
    """What the steps were made of, in this run or in one on one host."""
    run, seed = run or through(grader, world), drawn_seed(grader)
    job(grader).deals(run)
    mistakes = [
        Hypothesis("ignores-seed", "That is the order for seed 0.", order(0, world)),
        Hypothesis("no-shuffle", "Nothing was shuffled.", order(seed, world, shuffle=False)),
    ]
    seen = [[together(run, step) for step in range(TOTAL)]] * world
    what, right = "The list of all ranks' samples in each step", order(seed, world)
    grader.explain(what, seen, right, mistakes, otherwise="loses-its-place", at=ORDER)
    counted(grader, run, f"{TOTAL} steps were made.", TOTAL)


def judge_gradient(grader: Grader, run: Run, accumulate: int = 1, clip: float = 1000.0) -> None:
    """What the optimizer was given, against the gradient of the mean over the whole batch."""
    for number in range(2):
        parts = [len(one[number]["samples"]) for one in run.observed("steps")]
        what = f"With --accumulate {accumulate} the number of parts of step {number + 1}"
        grader.explain(what, parts, accumulate, otherwise="one-big-batch", at=r"accumulate || " + STEP)
        wanted, mistakes = gradients(run, number, data(grader)["train"], accumulate, clip)
        got = [one[number]["gradient"] for one in run.observed("steps")]
        what = f"In step {number + 1} the optimizer's gradient"
        id = "wrong-gradient-of-the-batch"
        grader.explain(what, got, wanted, mistakes, otherwise=id, at=STEP, tolerance=LOOSE)


def judge_known(grader: Grader, got: list[list[float]], right: list[float], tolerance: Tolerance) -> None:
    """Not only rank 0 knows the loss and the accuracy."""
    unknown = [rank for rank, one in enumerate(got) if not equal(one, right, tolerance)]
    here, there = (" and ".join(f"{n:.4f}" if n is not None else "None" for n in one) for one in (right, got[-1]))
    what = f"Only rank 0 knows the result. Loss and accuracy are {here} on rank 0; rank {len(got) - 1} has {there}."
    at = r"in evaluate: \breduce\(|rank == 0 || " + EVALUATION
    alone = len(got) > 1 and unknown == [*range(1, len(got))]
    grader.fail_on(unknown if alone else (), "only-rank-0-knows", what, at=at)


def read_helpers(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Why a run failed in `save` or `evaluate`."""
    error, tested = cause.error, TESTED.get(run.world_size)
    if tested and error is not None and "evaluate" in [frame.function for frame in error.frames]:
        what = f"The test set had {tested} samples for {run.world_size} ranks. {names(cause.ranks).capitalize()} raised in evaluate: {error}"
        return grader.diagnosis("evaluates-nothing", what, of=cause.ranks, at=error.frame or EVALUATION)
    for name, (where, at) in SAVE_FAILS.items():
        if any(told := run.observed(name)) and None in told:
            what = (
                f"{where} save raised {next(filter(None, told))[:90]} on one rank, and the others still waited in it."
            )
            waiting = [rank for rank, error in enumerate(told) if error is None]
            return grader.diagnosis("others-never-learn-of-it", what, of=waiting, at=at)
    return None


def judge_failed_saves(grader: Grader, run: Run) -> None:
    """All ranks learn, by a RuntimeError, that a file could not be written."""
    for name, (where, at) in SAVE_FAILS.items():
        if "disk" in name and not any(run.observed("disk was full")):
            continue  # it doesn't write with torch.save
        errors = run.observed(name)
        silent = [rank for rank, error in enumerate(errors) if not error]
        what = f"{where} save raised {[error for error in errors if error]}, and returned on {{ranks}}."
        id = "others-never-learn-of-it" if any(errors) else "swallows-a-failed-save"
        grader.fail_on(silent, id, what, at=at)
        others = run.observed(f"another {name}")
        what = f"{where} save raised {''.join(others[:1])} on {{ranks}}; a RuntimeError was expected."
        grader.fail_on([rank for rank, other in enumerate(others) if other], "another-error", what, at=at)


def judge_modes(grader: Grader, run: Run) -> None:
    """The model is evaluated in eval mode, and trained in training mode."""
    for kind, what, at in (
        ("evaluate", "On {ranks} evaluate called the model in training mode.", EVALUATION),
        ("train", "On {ranks} steps after an evaluation were made in eval mode.", r"\.eval\( || " + EVALUATION),
    ):
        wrong = [rank for rank, modes in enumerate(run.observed("modes")) if (kind == "evaluate") in modes[kind]]
        grader.fail_on(
            wrong, "evaluates-in-training-mode" if kind == "evaluate" else "trains-in-eval-mode", what, at=at
        )


def judge_complete(grader: Grader, got: list[dict[str, Any]], right: list[dict[str, Any]], what: str) -> None:
    """A job that had been complete says how good the model is, as it did at its end."""
    empty = [rank for rank, result in enumerate(got) if None in (result["loss"], result["accuracy"])]
    none = f"{what} the complete job returned no loss or no accuracy on {{ranks}}."
    grader.fail_on(empty, "complete-job-returns-no-loss", none, at=RESULT)
    at = r"return Result || " + EVALUATION
    grader.explain(f"{what} its Result", got, Each(right), otherwise="wrong-metric", at=at)


def judge_quiet(grader: Grader, run: Run, what: str = "") -> None:
    """No rank but rank 0 has printed anything; `what` tells what happened before."""
    said = {report.rank: report.stdout.strip().partition("\n")[0] for report in run.ranks[1:] if report.stdout.strip()}
    if said:
        first = next(iter(said.values()))
        words = re.escape(re.split(r"\d", first)[0].strip()) or r"print\("
        told = f"{what} {names(said).capitalize()} printed: {first}".strip()
        grader.fail("every-rank-speaks", told, of=said, at=rf"{words} || print\( || {TRAIN}")


def steps_told(grader: Grader, run: Run) -> list[str]:
    """The numbers of the steps, from 1, whose loss over all ranks rank 0 printed."""
    steps, of = run.observed("steps")[0], data(grader)["train"]
    losses = [loss(one["weights"], of, together(run, n)) for n, one in enumerate(steps)]
    return [str(n) for n, one in enumerate(losses, 1) if prints(run.ranks[0].stdout, one)]


def judge_logged(grader: Grader, run: Run, printed: list[str], at: str) -> None:
    """Rank 0 has `printed` the loss over all ranks of every LOG_EVERY-th step, whether it counts from 0 or from 1."""
    of, told = data(grader)["train"], run.ranks[0].stdout
    logged = [set(range(start, TOTAL + 1, LOG_EVERY)) for start in (1, LOG_EVERY)]
    if any(one <= set(map(int, printed)) for one in logged):
        return
    for number in (0, LOG_EVERY - 1):
        step = run.observed("steps")[0][number]
        whole, own = (loss(step["weights"], of, samples) for samples in (together(run, number), share(step)))
        what = f"In step {number + 1} the loss was {whole:.4f} over all ranks; rank 0 printed its own, {own:.4f}."
        mistaken = prints(told, own) and not prints(told, whole)
        grader.fail_on([0] * mistaken, "rank-local-loss", what, at=at)
    which = f"step {', '.join(printed)} only" if printed else "no step"
    what = f"With --log-every {LOG_EVERY}, {{ranks}} printed the loss over all ranks of {which}."
    grader.fail_on([0], "rank-local-loss", what, at=at)
