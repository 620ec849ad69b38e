"""``python -m specpool_kernels.aot --report``: compile, judge, print. Needs no GPU.

The exit status is 1 if a compiled kernel has a fault.
"""

from __future__ import annotations

import argparse
import sys

import triton

from specpool_kernels.aot.compile import TARGETS
from specpool_kernels.aot.report import print_report
from specpool_kernels.aot.roofline import H200_BYTES_A_SECOND


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser("python -m specpool_kernels.aot", description=__doc__)
    parser.add_argument(
        "--report",
        action="store_true",
        required=True,
        help="registers, memory, widths, order of compiled kernels, and real models' traffic",
    )
    parser.add_argument(
        "--target", choices=TARGETS, action="append", help="compile for this GPU alone; repeatable"
    )
    parser.add_argument(
        "--all", action="store_true", help="every kernel that can be launched, thousands: hours"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=H200_BYTES_A_SECOND / 1e12,
        metavar="TB/S",
        help="what the GPU copies, read and written together (default: %(default)s, an H200)",
    )
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("compiling needs a process without TRITON_INTERPRET")
    return int(print_report(options.target or TARGETS, options.all, options.rate * 1e12) > 0)


if __name__ == "__main__":
    sys.exit(main())
