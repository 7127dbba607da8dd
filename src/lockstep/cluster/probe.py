"""`python -m lockstep.cluster.probe FEATURE`: try a feature in this process; status 1 and what is missing if not."""

from __future__ import annotations

import sys

from . import hosts, link, namespaces
from .availability import Feature, explain
from .tools import ToolFailed


def main(feature: Feature) -> int:
    """Status 0 when it works; else 1, with what is missing and the remedy on standard output, parted by a tab."""
    try:
        if feature == "bandwidth":
            link.make(1_000_000_000)
        elif feature == "hosts":
            hosts.build(2, 1_000_000_000)
            namespaces.unshare(namespaces.NEWPID)
    except (OSError, ToolFailed) as error:
        missing = explain(feature, error)
        print(f"{missing.what}\t{missing.remedy}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))  # type: ignore[arg-type]
