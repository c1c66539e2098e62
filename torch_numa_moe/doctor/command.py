"""``python -m torch_numa_moe doctor``."""

from __future__ import annotations

import argparse
import math
import sys

from torch_numa_moe.doctor.sampling import DEFAULT_INTERVAL_SECONDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--fence",
        action="store_true",
        help="print only the lines to paste that keep everything else off the workers' cores",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=DEFAULT_INTERVAL_SECONDS,
        help="how long to watch threads and interrupts (default: %(default)s)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and up to 3600, got {text!r}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis; returns 0 if there is no problem, else 1."""
    import torch_numa_moe
    from torch_numa_moe.doctor.diagnosis import diagnose
    from torch_numa_moe.doctor.fence import fence_lines, fence_refusal
    from torch_numa_moe.doctor.inspection import Inspection
    from torch_numa_moe.doctor.text import to_json, to_text

    if arguments.fence:
        inspection = Inspection(torch_numa_moe.plan())
        print("\n".join(fence_lines(inspection)))
        return 0 if fence_refusal(inspection) is None else 1
    diagnosis = diagnose(interval_seconds=arguments.seconds)
    text = to_json(diagnosis) if arguments.json else to_text(diagnosis)
    # Never fails for a terminal that can't show a character.
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))
    return 0 if diagnosis.healthy else 1
