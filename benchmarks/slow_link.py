"""An all-reduce over a slow link: measured against what the link's rate allows.

All rates are measured in one process group, one after the other in each round, so that whatever else the machine does
falls on all alike; of the rounds the fastest counts. The ranks share one loopback interface, so a ring all-reduce of S
bytes on W ranks passes 2 (W - 1) S bytes through it: the ideal time is that by 8, divided by the rate. A ratio far
below 1 would mean that bytes go round the link, far above 1 that the throttle costs time of its own; a message that is
small against the bucket of 128 kB may come out somewhat below.

    python benchmarks/slow_link.py [--ranks W] [--megabytes S] [--rates 2gbit,1gbit,200mbit] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys

from lockstep import cluster, ranks

BODY = """\
import json, sys, time
import torch, torch.distributed as dist
from lockstep.cluster import set_bandwidth
from lockstep.ranks import observe

rates, nbytes, rounds = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
tensor = torch.ones(nbytes // 4)
seconds = {rate: [] for rate in ["none", *rates]}
for _ in range(rounds):
    for rate in seconds:
        set_bandwidth(None if rate == "none" else rate)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        dist.barrier()
        seconds[rate].append(time.perf_counter() - began)
observe("seconds", {rate: min(times) for rate, times in seconds.items()})
dist.destroy_process_group()
"""


def main() -> int:
    """Measure and print."""
    options = argparse.ArgumentParser(description="Measured against ideal all-reduce times over a slow link.")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--megabytes", type=float, default=8.0, help="size of the tensor, in 10^6 bytes")
    options.add_argument("--rates", default="2gbit,1gbit,500mbit,200mbit")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    rates = chosen.rates.split(",")
    nbytes = round(chosen.megabytes * 1e6) // 4 * 4
    arguments = (json.dumps(rates), str(nbytes), str(chosen.rounds))
    try:
        run = ranks.run(ranks.Source(BODY, arguments=arguments), chosen.ranks, network=cluster.slow_link(None),
                        deadline=600)  # fmt: skip
    except ranks.NotRun as missing:
        print(f"not run: {missing}")
        return 4
    if run.cause is not None:
        print(run.cause.headline)
        return 1
    measured = {rate: max(report.observations["seconds"][rate] for report in run.ranks) for rate in ["none", *rates]}
    passed = 2 * (chosen.ranks - 1) * nbytes
    ideal = {rate: passed * 8 / cluster.bits_per_second(rate) for rate in rates}
    if chosen.json:
        json.dump({"ranks": chosen.ranks, "nbytes": nbytes, "measured": measured, "ideal": ideal}, sys.stdout)
        return 0
    print(f"all-reduce of {nbytes / 1e6:g} MB on {chosen.ranks} ranks: {passed / 1e6:g} MB pass through the link")
    print(f"{'rate':>10} {'measured':>12} {'ideal':>12} {'measured/ideal':>16} {'× unthrottled':>15}")
    print(f"{'none':>10} {measured['none'] * 1e3:9.1f} ms")
    for rate in rates:
        print(f"{rate:>10} {measured[rate] * 1e3:9.1f} ms {ideal[rate] * 1e3:9.1f} ms "
              f"{measured[rate] / ideal[rate]:16.2f} {measured[rate] / measured['none']:15.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
