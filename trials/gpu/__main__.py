"""Try the connectors' copies on this machine's CUDA device, and print one table.

    python3 -m trials.gpu [--json FILE] [--only SECTION ...] [--fake]

Ends with 1 if a row has failed. Rows come on stderr as they are done.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

from trials.gpu import copies, figures, memory, order
from trials.gpu.machine import Cuda, Fake
from trials.gpu.report import Report

SECTIONS = {"copies": copies, "order": order, "memory": memory, "figures": figures}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m trials.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--fake", action="store_true", help="on the fake accelerator, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there, too")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all, in this order"
    )
    given = parser.parse_args()
    # On the fake accelerator there is no kernel, and each cache would say so.
    logging.basicConfig(level=logging.ERROR if given.fake else logging.WARNING, stream=sys.stderr)
    if not given.fake and not torch.cuda.is_available():
        print("there is no CUDA device here; --fake tries the rest", file=sys.stderr)
        return 1
    machine = Fake() if given.fake else Cuda()
    report = Report(machine.head(), given.json)
    for name in given.only:
        SECTIONS[name].try_all(machine, report)
    print(report.table())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
