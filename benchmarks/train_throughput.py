"""How many tokens a second the course's way of training makes, against a plain loop, `accelerate` and Lightning.

All train the same GPT (real attention, from the same seed, on the same random tokens, same batch, same device), in one
process, by turns: a round is one block of steps of each, and every round begins with another one, so that whatever else
the machine does falls on all alike.

- `course`: autocast, torch.compile, fused AdamW, clipped gradients, DDP where there are several ranks.
- `plain`: the same loop in fp32, not compiled, AdamW as it comes.
- `accelerate`, `lightning`: the precision, compilation, optimizer and clipping of `course`, written their way. Where one
  cannot be imported, its line says so and nothing is counted for it.

Printed are tokens a second in the fastest block, how many times the throughput of `course` that is (in brackets the median
of the rounds' own ratios: where the two differ, other work was in the way, and neither should be believed to more digits
than they share), and the share of the device's matrix rate: the fastest of products of large square matrices in the
variant's own dtype, measured in the same rounds. A step is taken to need 6·N + 12·layers·width·length floating-point operations a
token, backward included: Chowdhery et al. 2022 (PaLM), appendix B. N leaves out the position embedding, which is only
looked up; the token embedding counts, since it is the output matrix too. The second term counts every pair of
positions, as is the custom, although causal attention needs only half of them.

    python benchmarks/train_throughput.py                       # GPT-2 with 124 M parameters on a GPU, a small one on a CPU
    python benchmarks/train_throughput.py --ranks 4             # one process a GPU; the same under torchrun
    python benchmarks/train_throughput.py --no-compile --json

torch (2.8 or later) is all that it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 3e-4
LARGEST_NORM = 1.0  # of the gradients, before they are clipped
BATCHES = 8  # made once and taken in turn, so that no time goes into data
SEED = 1


@dataclass(frozen=True)
class Shape:
    """How large the model and its batch are."""

    layers: int
    heads: int
    width: int
    length: int
    vocabulary: int
    batch: int  # sequences a rank takes in one step

    @property
    def tokens(self) -> int:
        """Tokens that a rank trains on in one step."""
        return self.batch * self.length


SHAPES = {
    # GPT-2's smallest (Radford et al. 2019). Its vocabulary of 50257 is rounded up to a multiple of 64.
    "gpt2": Shape(layers=12, heads=12, width=768, length=1024, vocabulary=50304, batch=16),
    "small": Shape(layers=4, heads=4, width=256, length=128, vocabulary=1024, batch=8),
    "tiny": Shape(layers=2, heads=2, width=32, length=16, vocabulary=64, batch=4),
}


@dataclass(frozen=True)
class Setting:
    """What all variants have in common."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype  # what autocast computes in; float32 means no autocast
    compiled: bool
    ranks: int

    @property
    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The forward pass of every variant but `plain` runs in it."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


class Block(nn.Module):
    """Attention and two linear layers, each added to what came in; normalized first, as in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.to_qkv = nn.Linear(shape.width, 3 * shape.width)
        self.from_heads = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """x and what is returned: (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2 without dropout, so that equal seeds give equal losses. Its forward pass returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(self._start)
        self.output.weight = self.tokens.weight

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (batch, length) of int64. Returns the mean cross-entropy, without dimensions."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        scores = self.output(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def fresh_model(setting: Setting) -> GPT:
    """The same weights for every variant and rank."""
    torch.manual_seed(SEED)
    return GPT(setting.shape).to(setting.device)


def operations_per_token(shape: Shape) -> int:
    """Floating-point operations of forward and backward for one token; see the top of this file for the formula."""
    with torch.device("meta"):
        model = GPT(shape)
    counted = sum(parameter.numel() for parameter in model.parameters()) - model.positions.weight.numel()
    return 6 * counted + 12 * shape.layers * shape.width * shape.length


class Data:
    """This rank's batches: random tokens, and as targets the token that follows."""

    def __init__(self, setting: Setting) -> None:
        shape = setting.shape
        rank = dist.get_rank() if setting.ranks > 1 else 0
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        drawn = torch.randint(shape.vocabulary, (BATCHES, shape.batch, shape.length + 1), generator=generator)
        drawn = drawn.to(setting.device)
        self.batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in drawn]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end."""
        while True:
            yield from self.batches


def replicated(model: nn.Module, setting: Setting) -> nn.Module:
    """`model` under DDP where there are several ranks."""
    if setting.ranks == 1:
        return model
    return DistributedDataParallel(model, device_ids=[setting.device] if setting.device.type == "cuda" else None)


class Course:
    """The course's way. After `block(n)`, n more losses stand in `losses`."""

    def __init__(self, setting: Setting, data: Data) -> None:
        self.losses: list[Tensor] = []
        self.batches = iter(data)
        self.autocast = setting.autocast
        self.model = replicated(fresh_model(setting), setting)
        if setting.compiled:
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def block(self, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            tokens, targets = next(self.batches)
            with self.autocast:
                loss = self.model(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())

    def end(self) -> None:
        """Nothing is left running."""


class Plain(Course):
    """The loop that one writes first: all in fp32, nothing compiled or fused."""

    def __init__(self, setting: Setting, data: Data) -> None:
        self.losses = []
        self.batches = iter(data)
        self.autocast = contextlib.nullcontext()
        self.model = replicated(fresh_model(setting), setting)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)


class WithAccelerate:
    """Hugging Face accelerate, with the same settings."""

    def __init__(self, setting: Setting, data: Data) -> None:
        from accelerate import Accelerator

        self.losses: list[Tensor] = []
        self.batches = iter(data)
        self.accelerator = Accelerator(
            cpu=setting.device.type == "cpu",
            mixed_precision="bf16" if setting.dtype == torch.bfloat16 else "no",
            dynamo_backend="inductor" if setting.compiled else "no",
        )
        model = fresh_model(setting)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def block(self, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            tokens, targets = next(self.batches)
            loss = self.model(tokens, targets)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())

    def end(self) -> None:
        """Nothing is left running."""


class WithLightning:
    """Lightning, with the same settings. Its trainer owns the loop, so it runs in a thread that waits between blocks."""

    def __init__(self, setting: Setting, data: Data) -> None:
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # It tells of every setting.
        losses: list[Tensor] = []
        orders: queue.Queue[int] = queue.Queue()
        finished: queue.Queue[BaseException | None] = queue.Queue()
        self.losses, self._orders, self._finished = losses, orders, finished

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = fresh_model(setting)
                if setting.compiled:
                    self.model.compile()  # before DDP, as Lightning has it; `course` compiles after

            def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
                loss = self.model(*batch)
                losses.append(loss.detach())
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)

            def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
                # Trainer(gradient_clip_val=…) refuses a fused optimizer under mixed precision.
                nn.utils.clip_grad_norm_(self.parameters(), LARGEST_NORM)

        class Turns(lightning.Callback):
            left = 0

            def on_train_start(self, trainer: Any, module: Any) -> None:
                self.left = orders.get()

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                self.left -= 1
                if not self.left:
                    finished.put(None)
                    self.left = orders.get()
                    trainer.should_stop = not self.left

        def fit() -> None:
            try:
                trainer = lightning.Trainer(
                    accelerator="gpu" if setting.device.type == "cuda" else "cpu",
                    # Under torchrun every process finds its own GPU by LOCAL_RANK.
                    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
                    num_nodes=setting.ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
                    strategy="ddp" if setting.ranks > 1 else "auto",
                    precision="bf16-mixed" if setting.dtype == torch.bfloat16 else "32-true",
                    callbacks=[Turns()], max_epochs=1, barebones=True,
                )  # fmt: skip
                trainer.fit(Module(), data)
            except BaseException as error:
                finished.put(error)
            else:
                finished.put(None)

        self._thread = threading.Thread(target=fit, daemon=True)
        self._thread.start()

    def block(self, steps: int) -> None:
        """Train for so many steps."""
        self._orders.put(steps)
        self._settle()

    def end(self) -> None:
        """Let the trainer leave its loop."""
        self._orders.put(0)
        self._settle()
        self._thread.join()

    def _settle(self) -> None:
        error = self._finished.get()
        if error is not None:
            raise error


VARIANTS: dict[str, Callable[[Setting, Data], Any]] = {
    "course": Course, "plain": Plain, "accelerate": WithAccelerate, "lightning": WithLightning,
}  # fmt: skip
LIBRARIES = ("accelerate", "lightning")


@dataclass
class Measured:
    """What became of one variant."""

    dtype: str
    seconds: list[float] = field(default_factory=list)  # of each round's block, the slowest rank's
    losses: list[float] = field(default_factory=list)  # of every step from the first on, mean over the ranks
    not_run: str = ""


def wait_for(setting: Setting) -> None:
    """Until the device has done all it was given, on every rank."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    if setting.ranks > 1:
        dist.barrier()


def timed(work: Callable[[], None], setting: Setting) -> float:
    """Seconds that the slowest rank takes for it."""
    wait_for(setting)
    began = time.perf_counter()
    work()
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=setting.device)
    if setting.ranks > 1:
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


class MatrixRate:
    """Products of two square matrices of random numbers: the most that this device gives in practice."""

    def __init__(self, setting: Setting, dtype: torch.dtype, side: int) -> None:
        self.setting, self.repeats = setting, 5
        generator = torch.Generator().manual_seed(SEED)
        self.left, self.right = (
            torch.randn(side, side, generator=generator).to(setting.device, dtype) for _ in range(2)
        )  # fmt: skip
        self.operations = 2 * side**3 * self.repeats

    def measure(self) -> float:
        """Floating-point operations a second on one rank while all ranks do the same."""

        def multiply() -> None:
            for _ in range(self.repeats):
                torch.mm(self.left, self.right)

        return self.operations / timed(multiply, self.setting)


def measure(
    setting: Setting, names: list[str], rounds: int, steps: int, side: int
) -> tuple[dict[str, Measured], dict[str, list[float]]]:
    """Every variant's times and losses, and the device's matrix rate in each dtype, round by round."""
    data = Data(setting)
    found: dict[str, Measured] = {}
    running: dict[str, Any] = {}
    for name in names:
        dtype = torch.float32 if name == "plain" else setting.dtype
        found[name] = Measured(dtype=str(dtype).removeprefix("torch."))
        try:
            running[name] = VARIANTS[name](setting, data)
        except ImportError as error:
            if name not in LIBRARIES:
                raise
            found[name].not_run = f"pip install {name} ({error})"
    dtypes = {found[name].dtype for name in running}
    rates = {dtype: MatrixRate(setting, getattr(torch, dtype), side) for dtype in sorted(dtypes)}
    rated: dict[str, list[float]] = {dtype: [] for dtype in rates}

    for number in range(-1, rounds):  # Round -1 warms up: compiles, meets, fills the allocator.
        order = list(running)
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            torch.set_float32_matmul_precision("highest")  # A library may have set it for the whole process.
            took = timed(lambda name=name: running[name].block(steps), setting)  # type: ignore[misc]
            if number >= 0:
                found[name].seconds.append(took)
        for dtype, rate in rates.items():
            speed = rate.measure()
            if number >= 0:
                rated[dtype].append(speed)
        if number < 0 or not (number + 1) % 5:
            say(f"round {number + 1} of {rounds}" if number >= 0 else "warmed up", setting)

    for name, variant in running.items():
        losses = torch.stack(variant.losses).to(setting.device, torch.float64)
        if setting.ranks > 1:
            dist.all_reduce(losses)
        found[name].losses = (losses / setting.ranks).tolist()
    for variant in running.values():
        variant.end()
    return found, rated


def say(line: str, setting: Setting) -> None:
    """To standard error, from one rank."""
    if setting.ranks == 1 or dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def version_of(name: str) -> str:
    """Of an imported library."""
    return str(getattr(sys.modules.get(name), "__version__", "?"))


def circumstances(setting: Setting) -> dict[str, str]:
    """What the figures hold for."""
    cuda = setting.device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(setting.device) if cuda else f"CPU ({platform.machine()})",
        "ranks": str(setting.ranks),
        "threads": str(torch.get_num_threads()),
        "processors": str(os.cpu_count()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version_of(name) for name in LIBRARIES if name in sys.modules},
    }


def show(setting: Setting, found: dict[str, Measured], rated: dict[str, list[float]], steps: int) -> None:
    """The table."""
    shape = setting.shape
    each = operations_per_token(shape)
    tokens = shape.tokens * setting.ranks * steps  # in one block
    print(", ".join(f"{name} {value}" for name, value in circumstances(setting).items()))
    print(
        f"{shape}, {each / 1e6:.1f} M operations a token, "
        f"{'compiled' if setting.compiled else 'not compiled'}, blocks of {steps} steps"
    )
    for dtype, speeds in rated.items():
        print(f"matrix products in {dtype}: {max(speeds) / 1e12:.3f} TFLOP/s a rank")
    print(f"\n{'':<11} {'tokens/s':>10}  {'times course':>20}  {'of matrix rate':>18}  {'loss':>8}")
    base = found.get("course")
    for name, one in found.items():
        if one.not_run:
            print(f"{name:<11} not run: {one.not_run}")
            continue
        speed = tokens / min(one.seconds)
        ratio = "–"
        if base is not None:
            ratios = [ours / theirs for ours, theirs in zip(base.seconds, one.seconds, strict=True)]
            ratio = f"{min(base.seconds) / min(one.seconds):.2f} ({statistics.median(ratios):.2f})"
        share = speed / setting.ranks * each / max(rated[one.dtype])
        print(f"{name:<11} {speed:10.0f}  {ratio:>20}  {share:8.1%} {one.dtype:>9}  {one.losses[-1]:8.4f}")
    print("\nOf each the fastest block; in brackets the median of the rounds' ratios. The loss is the last step's.")


def launch(count: int) -> int:
    """Start this file again on so many ranks. They meet at a free port."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--ranks":
            next(arguments)
        elif not argument.startswith("--ranks="):
            kept.append(argument)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return subprocess.run([*command, os.path.abspath(__file__), *kept]).returncode


def options() -> argparse.Namespace:
    """The command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--model", choices=tuple(SHAPES), help="default: gpt2 on a GPU, small on a CPU")
    parser.add_argument("--batch", type=int, help="sequences a rank takes in one step")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of all but plain")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, help="in a block (default: 10, on a CPU 2)")
    parser.add_argument(
        "--side", type=int, help="of the matrices that measure the device (default: 8192, on a CPU 1024)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine; under torchrun, its own count")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of them, such as course,plain")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.variants = given.variants.split(",")
    if unknown := set(given.variants) - set(VARIANTS):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    given.steps = given.steps if given.steps is not None else 10 if given.device == "cuda" else 2
    if min(given.rounds, given.steps, given.ranks) < 1:
        parser.error("--rounds, --steps and --ranks must be at least 1")
    if given.device == "cuda" and not cuda:
        parser.error("--device cuda, and torch finds no GPU here")
    return given


def main() -> int:
    """Measure and print."""
    given = options()
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    if given.ranks > 1 and not ranks:
        return launch(given.ranks)
    ranks = ranks or 1
    device = torch.device(given.device, int(os.environ.get("LOCAL_RANK", 0)) if given.device == "cuda" else None)
    if given.device == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        cuda = given.device == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    shape = SHAPES[given.model or ("gpt2" if given.device == "cuda" else "small")]
    if given.batch:
        shape = Shape(**{**asdict(shape), "batch": given.batch})
    setting = Setting(
        shape=shape, device=device, dtype=torch.bfloat16 if given.precision == "bf16" else torch.float32,
        compiled=not given.no_compile, ranks=ranks,
    )  # fmt: skip
    warnings.filterwarnings("ignore", module="lightning")  # advice on settings that are chosen here on purpose
    side = given.side or (8192 if given.device == "cuda" else 1024)
    found, rated = measure(setting, given.variants, given.rounds, given.steps, side)
    if ranks == 1 or dist.get_rank() == 0:
        if given.json:
            variants = {name: asdict(one) for name, one in found.items()}
            print(json.dumps({**circumstances(setting), "variants": variants, "rates": rated}))
        else:
            show(setting, found, rated, given.steps)
    if ranks > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # An orderly end of the interpreter aborts now and then after gloo (claim X02).
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
