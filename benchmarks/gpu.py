"""Everything that can be shown on this machine's GPUs, in one command and within nine minutes.

    python benchmarks/gpu.py --out DIR                  # all rows that this machine's GPUs allow
    python benchmarks/gpu.py --out DIR --only hang,trace
    python benchmarks/gpu.py --out DIR --device cpu     # a rehearsal without a GPU

Each row is a command with a deadline. A row that fails doesn't stop the next one. DIR then holds `NAME.txt` (what the
command printed) for each row, `trace.json.gz` (for Perfetto or chrome://tracing), `rows.json`, and `table.md`: lines for
the tables of `benchmarks/gpu.md`. The exit code is 0 if every row that ran did what it should.

It needs torch 2.8 or later and the packages of `./lockstep check` (pytest, pytest-xdist, msgspec, rich, typer). Jupyter isn't needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
HANG = """\
import os, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
own = cuda and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl" if own else "gloo")
tensor = torch.ones(1 << 20, device="cuda" if cuda else "cpu")
if dist.get_rank() == 0:
    dist.all_reduce(tensor)  # BUG: rank 0 only
print("sum:", tensor.sum().item())
dist.barrier()
"""
HEALTHY = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
a = torch.randn(2048, 2048, device="cuda" if torch.cuda.is_available() else "cpu")
end = time.monotonic() + 20
while time.monotonic() < end:  # one rank computes for 20 s, and the other waits for it
    if dist.get_rank() == 0:
        break
    a = torch.nn.functional.normalize(a @ a)
    a.sum().item()
dist.barrier()
print("went on")
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Row:
    """A command, and how it should end. `shows` must be found in what it prints."""

    name: str
    what: str
    command: tuple[str, ...]
    seconds: int
    gpus: int = 1
    code: int | None = 0  # None: any
    shows: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a row: `said` is the reason if it failed or did not run, else its line of result."""

    name: str
    what: str
    command: str
    result: str  # "as it should", "failed" or "not run"
    said: str
    seconds: float


def rows(out: Path, checkpoints: str, device: str) -> list[Row]:
    """All rows. The longest of those for one GPU comes after the others, so that it can't take their time.

    Training keeps its `checkpoints` elsewhere: they are large.
    """
    lockstep = (sys.executable, "-m", "lockstep")
    check = (*lockstep, "check", "--device", device)
    run = (*lockstep, "run", "--device", device)
    references = (sys.executable, "-m", "pytest", "autograder", "-q", "--submission", "solutions", "--device", device,
                  "-n", "6", "--dist", "loadfile")  # fmt: skip
    hang, healthy = out / "hang.py", out / "healthy.py"
    hang.write_text(HANG, encoding="utf-8")
    healthy.write_text(HEALTHY, encoding="utf-8")
    task = ("--task", "gpt", "--batch-size", "256", "--amp") if device == "cuda" else ("--task", "digits")
    train = (str(ROOT / "solutions/train.py"), *task, "--epochs", "1")
    throughput = (sys.executable, str(ROOT / "benchmarks/train_throughput.py"))
    throughput += ("--device", device) if device == "cuda" else ("--device", "cpu", "--no-compile", "--model", "tiny")
    return [
        Row("doctor", "the machine as Lockstep sees it", (*lockstep, "doctor"), 60, 1, None,
            "GPU: \\d" if device == "cuda" else "gloo"),
        Row("hang", "two ranks share a GPU, and a hang is explained", (*run, "-n", "2", str(hang)), 60, 1, 1,
            r"[Rr]ank 1 .*barrier|all_reduce"),
        Row("healthy", "a rank that waits 20 s for another's GPU work isn't ended",
            (*run, "-n", "2", str(healthy)), 90, 1, 0, "went on"),
        *(Row(f"wrong-{entry.replace('/', '-')}", f"{entry} still fails for its own reason",
              (*check, entry.partition("/")[0], "--submission", entry), 60, 1, 1, diagnosis)
          for entry, diagnosis in (("train_ddp/missing_set_epoch", "missing-set-epoch"),
                                   ("mixed_precision/never_unscales", "clips-scaled-gradients"),
                                   ("mixed_precision/default_dtype", "dtype-hard-coded"))),
        Row("throughput", "training throughput: course, plain, accelerate, Lightning", throughput, 180, 1, 0, "tokens/s"),
        Row("trace", "a Kineto trace of two compiled steps",
            (sys.executable, __file__, "--trace", str(out / "trace.json.gz"), "--device", device), 150, 1, 0, r"\d+ kernels"),
        Row("capstone", "train.py under torchrun, the GPT on a GPU",
            (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *train, "--folder",
             checkpoints), 120),
        Row("references", "all references pass; ranks share the GPU over gloo", references, 240),
        Row("nccl-references", "all references pass with a GPU for every rank, over nccl", references, 240, 4),
        Row("nccl-hang", "a hang under nccl is explained", (*run, "-n", "2", str(hang)), 60, 2, 1, "all_reduce"),
        Row("nccl-setup", "a script on all GPUs", (*run, "-n", "gpu", str(ROOT / "solutions/setup_ddp.py")), 60, 2),
        Row("nccl-throughput", "throughput with DDP over nccl", (*throughput, "--ranks", "2"), 180, 2, 0, "tokens/s"),
    ]  # fmt: skip


def play(row: Row, out: Path, gpus: int, left: float) -> Outcome:
    """Run a row within the time that is left, and judge it."""
    words = ["python" if word == sys.executable else word.removeprefix(f"{ROOT}/") for word in row.command]
    command = " ".join(words).replace(f"{out}/", "DIR/")

    def outcome(result: str, said: str, seconds: float = 0.0) -> Outcome:
        return Outcome(row.name, row.what, command, result, said, round(seconds, 1))

    if gpus < row.gpus:
        return outcome("not run", f"needs {row.gpus} GPUs, found {gpus}")
    if left < 10:
        return outcome("not run", "no time left")
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LOCKSTEP_WARM": "0"}
    began, deadline = time.monotonic(), min(row.seconds, left)
    with (out / f"{row.name}.txt").open("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            row.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group; what it left running ends too
            process.wait()
        file.seek(0)
        text = file.read()
    seconds = time.monotonic() - began
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    if code is None:
        return outcome("failed", f"did not end within {deadline:.0f} s: {last}", seconds)
    if row.code is not None and code != row.code:
        return outcome("failed", f"exit code {code}, expected {row.code}: {last}", seconds)
    found = next((line for line in lines if re.search(row.shows, line)), None) if row.shows else last
    if found is None:
        return outcome("failed", f"no line with {row.shows!r}: {last}", seconds)
    return outcome("as it should", found, seconds)


def trace(path: str, device: str) -> None:
    """Record two steps of a small compiled model in DDP, communication included."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    store = dist.HashStore()
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    width = 1024 if device == "cuda" else 64
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    step = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, width, device=device)

    def train_step() -> float:
        optimizer.zero_grad()
        loss = step(x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    for _ in range(3):
        train_step()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as recorded:
        for _ in range(2):
            train_step()
    recorded.export_chrome_trace(path)
    events = recorded.events() or []
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    print(f"{len(events)} events, {len(kernels)} kernels, {Path(path).stat().st_size / 1024:.0f} KiB")
    dist.destroy_process_group()


def where(device: str) -> str:
    """Date, device, torch, and driver or Python: the column of the tables."""
    date = datetime.now(timezone.utc).date()
    if device == "cpu":
        return f"{date}, rehearsal on a CPU, torch {torch.__version__}, Python {platform.python_version()}"
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        driver = "unknown"
    name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    return f"{date}, {count} × {name}, torch {torch.__version__}, driver {driver}"


def table(outcomes: list[Outcome], place: str) -> Iterator[str]:
    """Lines of Markdown, as in `benchmarks/gpu.md`."""
    yield "| what | how | date, device, torch, driver | outcome |"
    yield "|---|---|---|---|"
    for one in outcomes:
        said = one.said.replace("|", "\\|")
        yield f"| {one.what} | `{one.command}` | {place if one.result != 'not run' else ''} | {one.result}: {said} |"


def play_all(chosen: list[Row], out: Path, device: str, seconds: float) -> list[Outcome]:
    """One row after the other; what is known is written after each."""
    gpus = torch.cuda.device_count() if device == "cuda" else 1  # the rehearsal plays the rows of one GPU
    end, place = time.monotonic() + seconds, where(device)
    outcomes: list[Outcome] = []
    for row in chosen:
        outcomes.append(play(row, out, gpus, end - time.monotonic()))
        print(f"{row.name:<36} {outcomes[-1].result}, {outcomes[-1].seconds:.0f} s: {outcomes[-1].said}", flush=True)
        found = {"place": place, "rows": [asdict(one) for one in outcomes]}
        (out / "rows.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        (out / "table.md").write_text("\n".join(table(outcomes, place)) + "\n", encoding="utf-8")
    return outcomes


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="a folder for the results; it is created")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses without a GPU")
    options.add_argument("--only", help="rows by name, separated by commas")
    options.add_argument("--minutes", type=float, default=9.0, help="end after this time (default 9)")
    options.add_argument("--trace", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no GPU here. `--device cpu` rehearses without one.")
    if arguments.trace:
        trace(arguments.trace, arguments.device)
        return 0
    if arguments.out is None:
        options.error("--out DIR is needed")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as checkpoints:
        chosen = rows(out, checkpoints, arguments.device)
        if arguments.only:
            names = arguments.only.split(",")
            if unknown := sorted({*names} - {row.name for row in chosen}):
                there = ", ".join(row.name for row in chosen)
                options.error(f"no row is called {', '.join(unknown)}; there are {there}")
            chosen = [row for row in chosen if row.name in names]
        outcomes = play_all(chosen, out, arguments.device, arguments.minutes * 60)
    return int(any(one.result == "failed" for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
