r"""What another program on one of the pool's CPUs costs a decode step, and what helps.

python benchmarks/intruder.py                      # a busy program, on and off, on each kind of CPU
python benchmarks/intruder.py --duties 100,20 --plot intruder.svg

The arms: late tasks run again (what the pool does), and left alone; and workers that go before other programs
(NUMA_MOE_SCHED=fifo), where that is permitted.

A program that computes for a share of the time is pinned to a CPU: a worker's, or the one that is left to
the calling thread. It is stopped and continued in turns, each arm in each state, round after round. Fair
sharing of n CPUs with one busy program takes n / (n - 1/2) times as long as n CPUs alone: 1.33 for two. A
pool whose threads have fixed shares takes 2 times as long, whatever n is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from machine import describe_machine
from problem_set import SHAPES, Shape, make_hidden_states, make_routing, make_weights
from report import machine_lines
from summary import percentile
from tqdm import tqdm

import torch_numa_moe
from torch_numa_moe import _C, runtime

ARMS = {
    "run again": (50, _C.Scheduling.NORMAL),
    "left alone": (-1, _C.Scheduling.NORMAL),
    "fifo": (50, _C.Scheduling.FIFO),
}
"""The pool's late_after_us and scheduling."""

ROUTINGS = 64
SETTLE_SECONDS = 0.1

# A period of the scheduler's order, so that a share of the time is not a share of every millisecond.
PROGRAM = """
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
busy, period = float(sys.argv[2]) * 0.01, 0.01
print("here", flush=True)
while True:
    end = time.perf_counter() + busy
    while time.perf_counter() < end: pass
    if busy < period: time.sleep(period - busy)
"""


@dataclass
class Cell:
    """An arm beside a program: ms of each call, with the program stopped and with it running."""

    arm: str
    where: str
    duty: float
    quiet: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    @property
    def mean_ratio(self) -> float:
        return statistics.fmean(self.disturbed) / statistics.fmean(self.quiet)

    @property
    def p99_ratio(self) -> float:
        """Of the disturbed calls, over the mean of the quiet ones."""
        return percentile(self.disturbed, 99) / statistics.fmean(self.quiet)


@contextlib.contextmanager
def stopped_program(cpu: int, duty: float) -> Iterator[subprocess.Popen[bytes]]:
    """The program, pinned and stopped: SIGCONT lets it go on."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(cpu), str(duty)], stdout=subprocess.PIPE
    ) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()
            program.send_signal(signal.SIGSTOP)
            yield program
        finally:
            program.kill()


def start_pool(arm: str) -> bool:
    """The pool of this machine's plan, with the arm's options. Returns whether it has all of them."""
    running = runtime.ensure_started()
    options = runtime.pool_options(running.plan)
    options.late_after_us, options.scheduling = ARMS[arm]
    nodes = [-1 if node is None else node for node in running.nodes]
    _C.start(options, nodes, running.instruction_set)
    return all(worker.scheduling == options.scheduling for worker in _C.workers())


def make_call(shape: Shape, num_tokens: int) -> Callable[[], None]:
    """A layer, with another routing on every call."""
    weights = make_weights(shape)
    packed = torch_numa_moe.pack_experts(weights.gate_up_proj, weights.down_proj)
    hidden_states = make_hidden_states(shape, num_tokens)
    routings = [make_routing(shape, num_tokens, call=call) for call in range(ROUTINGS)]
    calls = 0

    def call() -> None:
        nonlocal calls
        routing = routings[calls % ROUTINGS]
        calls += 1
        packed(hidden_states, routing.topk_ids, routing.topk_weights)

    return call


def measure(call: Callable[[], None], calls: int) -> list[float]:
    """Ms of each of so many calls, after a few that aren't counted."""
    for _ in range(10):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def places(plan: torch_numa_moe.Plan) -> dict[str, int]:
    """A worker's CPU, and the calling thread's, if there are such."""
    found = {}
    pinned = [cpu for group in plan.groups for cpu in group.worker_cpus if cpu >= 0]
    if pinned:
        found["a worker's CPU"] = pinned[-1]
    if plan.host_cpu is not None:
        found["the calling thread's CPU"] = plan.host_cpu
    return found


def table_lines(cells: list[Cell]) -> list[str]:
    """One line per arm, place and share."""
    header = (
        f"{'program on':<25} {'busy':>5}  {'arm':<11} {'quiet ms: mean':>14} {'p99':>6}   "
        f"{'disturbed: mean':>15} {'p50':>6} {'p99':>6}   {'mean':>5} {'p99':>5} (times the quiet mean)"
    )
    rows = [
        f"{cell.where:<25} {cell.duty:>5.0%}  {cell.arm:<11} {statistics.fmean(cell.quiet):>14.2f} "
        f"{percentile(cell.quiet, 99):>6.2f}   {statistics.fmean(cell.disturbed):>15.2f} "
        f"{statistics.median(cell.disturbed):>6.2f} {percentile(cell.disturbed, 99):>6.2f}   "
        f"{cell.mean_ratio:>5.2f} {cell.p99_ratio:>5.2f}"
        for cell in cells
    ]
    return [header, *rows]


def draw(cells: list[Cell], file: Path) -> None:
    """Bars of the means over the quiet ones, with the 99th percentile above."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{cell.where}\n{cell.duty:.0%}, {cell.arm}" for cell in cells]
    shades = {"run again": "tab:blue", "left alone": "tab:gray", "fifo": "tab:green"}
    colors = [shades[cell.arm] for cell in cells]
    axes.bar(labels, [cell.mean_ratio for cell in cells], color=colors)
    axes.plot(labels, [cell.p99_ratio for cell in cells], "k_", markersize=20, label="99th percentile")
    axes.axhline(1.0, color="black", linewidth=0.5)
    axes.set_ylabel("time of a call / quiet mean")
    axes.tick_params(axis="x", labelrotation=45, labelsize=7)
    axes.legend()
    figure.savefig(file)


def _duties(text: str) -> list[float]:
    try:
        duties = [int(part) / 100 for part in text.split(",")]
    except ValueError:
        duties = []
    if not duties or not all(0 < duty <= 1 for duty in duties):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of percentages from 1 to 100, such as 100,20"
        )
    return duties


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="A", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=1, help="per call (default: %(default)s)")
    parser.add_argument(
        "--duties", type=_duties, default=[1.0, 0.5, 0.2], metavar="PERCENT", help="default: 100,50,20"
    )
    parser.add_argument("--calls", type=int, default=300, help="per state and round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    os.environ["NUMA_MOE_WATCH"] = "0"  # nobody has to be told of this intruder
    torch.set_num_threads(1)
    plan = runtime.ensure_started().plan
    where = places(plan)
    if not where:
        print("no thread of the pool has a CPU of its own here: nothing to measure", file=sys.stderr)
        return 1
    machine = describe_machine() | {
        "plan": str(plan),
        "layer": f"{SHAPES[arguments.shape]}, {arguments.tokens} token(s)",
    }
    print("\n".join(machine_lines(machine)), flush=True)
    call = make_call(SHAPES[arguments.shape], arguments.tokens)
    arms = [arm for arm in ARMS if start_pool(arm)]
    for arm in ARMS.keys() - set(arms):
        print(f"skipped: {arm} (real-time scheduling takes CAP_SYS_NICE, or ulimit -r 1)")
    cells = [Cell(arm, place, duty) for place in where for duty in arguments.duties for arm in arms]
    with (
        torch.inference_mode(),
        tqdm(total=arguments.rounds * len(cells), unit="cell", disable=None) as progress,
    ):
        for _ in range(arguments.rounds):
            for cell in cells:
                start_pool(cell.arm)
                with stopped_program(where[cell.where], cell.duty) as program:
                    time.sleep(SETTLE_SECONDS)
                    cell.quiet += measure(call, arguments.calls)
                    program.send_signal(signal.SIGCONT)
                    time.sleep(SETTLE_SECONDS)
                    cell.disturbed += measure(call, arguments.calls)
                progress.update()
    print("\n" + "\n".join(table_lines(cells)))
    if arguments.plot is not None:
        draw(cells, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
