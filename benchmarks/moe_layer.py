"""One MoE layer, our arms beside those of transformers, against the limits probed in the same run.

python benchmarks/moe_layer.py                                   # everything
python benchmarks/moe_layer.py --shapes A --batches 1,16 --seconds 0.5
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from arms import ARMS, Arm, ArmUnavailableError
from harness import Harness, Protocol
from machine import describe_machine
from plot import plot
from probes import Probes
from problem_set import BATCHES, SHAPES, Shape, Weights, make_weights
from report import JsonLines, cell_lines, machine_lines
from summary import Summary, summarize
from threads import set_threads
from tqdm import tqdm

import torch_numa_moe
from torch_numa_moe import _C

DEFAULT_ARMS = (
    *(f"numa_moe-{name}" for name in ("bf16", "fp16", "fp32", "int8", "fp8", "int4", "mxfp4", "nvfp4")),
    "transformers-eager",
    "transformers-grouped_mm",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; every list is checked before anything runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    protocol = Protocol()
    parser.add_argument("--shapes", type=_list_of(str, SHAPES), default=list(SHAPES), help="default: A,B,C")
    parser.add_argument(
        "--batches",
        type=_list_of(_positive),
        default=list(BATCHES),
        help=f"default: {','.join(map(str, BATCHES))}",
    )
    parser.add_argument(
        "--arms", type=_list_of(str, ARMS), default=list(DEFAULT_ARMS), help=f"of {', '.join(ARMS)}"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=protocol.seconds,
        help="per arm, shape and batch (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=protocol.rounds,
        help="that --seconds is divided into (%(default)s)",
    )
    parser.add_argument(
        "--most-call-seconds",
        type=float,
        default=protocol.most_call_seconds,
        help="skip an arm that would need longer for one call (%(default)s)",
    )
    parser.add_argument(
        "--threads", type=_positive, help="default: what torch_numa_moe plans for this machine"
    )
    parser.add_argument("--seed", type=int, default=protocol.seed, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement as JSON lines")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw shares of the limit (needs matplotlib)"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _list_of(
    item: Callable[[str], object], known: Mapping[str, object] | None = None
) -> Callable[[str], list[object]]:
    def parse(text: str) -> list[object]:
        values = [item(part) for part in text.split(",")]
        for value in values:
            if known is not None and value not in known:
                raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(known)}")
        return values

    return parse


def build_arms(names: list[str], shape: Shape, weights: Weights) -> dict[str, Arm]:
    """The arms that can run here; says which can't, and why."""
    arms = {name: _build_arm(name, shape, weights) for name in names}
    return {name: arm for name, arm in arms.items() if arm is not None}


def _build_arm(name: str, shape: Shape, weights: Weights) -> Arm | None:
    try:
        return ARMS[name](shape, weights)
    except ArmUnavailableError as error:
        tqdm.write(f"{name}: skipped, {error}", file=sys.stdout)
        return None


def describe_run(cpus: list[int], probes: Probes) -> dict[str, object]:
    """The machine, and how this run uses it."""
    limits = probes.measure()
    peaks = ", ".join(f"{kind} {peak:.0f}" for kind, peak in limits.peaks.items())
    described = describe_machine() | {
        "threads": len(cpus),
        "instruction_set": _C.running_instruction_set(),
        "plan": str(torch_numa_moe.plan()),
        "bandwidth": f"{limits.bandwidth:.1f} GB/s, {probes.num_threads} threads on {probes.bytes >> 20} MiB",
        "peaks": f"{peaks} billion multiplications and additions per second",
    }
    return described | {"note": probes.note} if probes.note else described


class Run:
    """Measures shape after shape; prints and records each cell as soon as it is there."""

    def __init__(self, arguments: argparse.Namespace, probes: Probes, records: JsonLines | None) -> None:
        self.arguments = arguments
        self.probes = probes
        self.records = records
        self.protocol = Protocol(
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            most_call_seconds=arguments.most_call_seconds,
            seed=arguments.seed,
        )
        self.summaries: list[Summary] = []

    def measure(self) -> list[Summary]:
        """Everything that was asked for."""
        visits_per_shape = len(self.arguments.batches) * len(self.arguments.arms) * self.protocol.rounds
        with tqdm(
            total=visits_per_shape * len(self.arguments.shapes), unit="visit", disable=None
        ) as progress:
            for index, name in enumerate(self.arguments.shapes):
                self._measure_shape(SHAPES[name], progress)
                progress.update((index + 1) * visits_per_shape - progress.n)  # visits that were skipped
                gc.collect()  # before the next shape's weights are made
        return self.summaries

    def _measure_shape(self, shape: Shape, progress: tqdm[NoReturn]) -> None:
        progress.set_description(f"shape {shape.name}, packing")
        weights = make_weights(shape, self.protocol.seed)
        arms = build_arms(self.arguments.arms, shape, weights)
        harness = Harness(shape, arms, weights, self.probes, self.protocol)
        for num_tokens in self.arguments.batches:
            progress.set_description(f"shape {shape.name}, batch {num_tokens}")
            cell = harness.measure(num_tokens, lambda _arm: progress.update())
            found = [summarize(cell, arm) for arm in arms.values()]
            measured = [summary for summary in found if summary is not None]
            tqdm.write("\n" + "\n".join(cell_lines(cell, measured)), file=sys.stdout)
            if self.records is not None:
                self.records.cell(cell, measured)
            self.summaries += measured


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parse_arguments(argv)
    if arguments.plot is not None and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    cpus = set_threads(arguments.threads)
    probes = Probes(cpus)
    described = describe_run(cpus, probes)
    print("\n".join(machine_lines(described)), flush=True)
    with ExitStack() as stack:
        records = None
        if arguments.json is not None:
            records = JsonLines(stack.enter_context(arguments.json.open("w")))
            records.machine(described)
        summaries = Run(arguments, probes, records).measure()
    if arguments.plot is not None:
        plot(summaries, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
