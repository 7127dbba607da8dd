"""How far `predict_step` of the course is from what a step then takes, on a link of known bandwidth.

Two ranks train a 25 MB model over a throttled link, with one bucket and with several, at some rates. For each of these
`exposed_communication` measures a step with synchronization and one without, in turn within one run; the latter, the
bandwidth and the latency of an empty all-reduce are all that `predict_step` is told. Printed are the measured and the
predicted step and the error. Needs what a slow link needs: see `./lockstep doctor`.

    python benchmarks/predict_step.py [--repeats N] [--batch B] [--rates RATE ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import cluster, ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WORLD, WIDTH, LAYERS = 2, 1024, 6
CAPS = {"one bucket": 1000.0, "several buckets": 4.0}  # MiB
TARGET = 0.15  # the error that the chapter states; see main()


def set_rate(rate: str) -> None:
    """The link's bandwidth from now on, on all ranks alike."""
    dist.barrier()
    if dist.get_rank() == 0:
        cluster.set_bandwidth(rate)
    dist.barrier()


def empty_round(repeats: int) -> float:
    """Seconds of one round of an all-reduce that carries next to nothing: the smallest of some."""
    number, seconds = torch.zeros(1), []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(number)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / (2 * (WORLD - 1))


def measure(rates: list[str], repeats: int, batch: int) -> None:
    """On a rank: a step over each rate, with one bucket and with several."""
    from solutions.measure_step import exposed_communication  # by its folder: other files have the exercise's name

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(batch, WIDTH)
    found = []
    ranks.observe("latency", empty_round(50))
    for name, cap in CAPS.items():
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap)

        def step(model: nn.Module = model) -> None:
            model(inputs).square().mean().backward()

        exposed_communication(step, model, repeats=1)
        for rate in rates:
            set_rate(rate)
            ranks.mark(f"{name} at {rate}")
            seconds = exposed_communication(step, model, repeats)
            ranks.mark("end")
            found.append({"name": name, "rate": rate, "step": seconds.step, "alone": seconds.alone})
    ranks.observe("found", found)


def buckets_of(run: ranks.Run, title: str, steps: int) -> int:
    """How many large all-reduces there were in each of so many steps."""
    report = run.ranks[0]
    begin = next(mark.number for mark in report.marks if mark.name == title)
    end = min(mark.number for mark in report.marks if mark.name == "end" and mark.number > begin)
    large = [call for call in report.collectives if begin < call.number < end and call.nbytes > 1 << 16]
    assert len(large) % steps == 0, f"{len(large)} all-reduces in {steps} steps"
    return len(large) // steps


def main() -> None:
    """Measure, predict and print."""
    from solutions.measure_step import WARM_UP, predict_step

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rates", nargs="+", default=["500mbit", "1gbit", "2gbit"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kwargs = {"rates": arguments.rates, "repeats": arguments.repeats, "batch": arguments.batch}
    target = ranks.Function(__file__, "measure", kwargs)
    try:
        run = ranks.run(target, WORLD, network=cluster.slow_link(arguments.rates[0]), deadline=600)
    except ranks.NotRun as missing:
        raise SystemExit(f"not run: {missing}") from None
    if run.cause is not None:
        raise SystemExit(run.cause.headline)
    count = LAYERS * WIDTH * (WIDTH + 1)
    latency = max(run.observed("latency"))
    rows = []
    for one in run.observed("found")[0]:
        buckets = buckets_of(run, f"{one['name']} at {one['rate']}", WARM_UP + arguments.repeats)
        # All ranks share the one link, both ways: each has its part of it.
        bandwidth = cluster.bits_per_second(one["rate"]) / 8 / WORLD
        predicted = predict_step(count, WORLD, bandwidth, latency, one["alone"], buckets)
        error = predicted / one["step"] - 1
        rows.append({**one, "buckets": buckets, "predicted": predicted, "error": error})
    if arguments.json:
        print(json.dumps({"latency": latency, "rows": rows}))
        return
    print(f"{count * 4 / 2**20:.1f} MiB of gradients, {WORLD} ranks, latency {latency * 1e6:.0f} µs")
    print("rate        buckets   computing   measured   predicted    error")
    for row in rows:
        times = "   ".join(f"{row[key] * 1e3:6.1f} ms" for key in ("alone", "step", "predicted"))
        print(f"{row['rate']:<10}  {row['buckets']:>7}   {times}   {row['error']:+6.1%}")
    print(
        f"largest error {max(abs(row['error']) for row in rows):.1%} (target: at most {TARGET:.0%} on a quiet machine)"
    )


if __name__ == "__main__":
    main()
