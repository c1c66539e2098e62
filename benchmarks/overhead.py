"""What one call costs beside its arithmetic: one token of a tiny layer, from Python, and where the time goes.

Each row adds something to the row before, so that differences say what it costs:

    empty call        an empty Python function
    op, no tokens     Python arguments -> dispatcher -> argument checks -> an empty result; no pool
    packed, no tokens the same through PackedExperts
    one number        one token of a layer with 1 expert, hidden 1, intermediate 1: the pool's phases, no work
    layer             one token of the layer that was asked for: its arithmetic
    layer, rested     the same after a pause in which the workers have fallen asleep: waking them

python benchmarks/overhead.py
python benchmarks/overhead.py --hidden-size 64 --top-k 8 --threads 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from machine import describe_machine
from problem_set import Shape, make_hidden_states, make_routing, make_weights
from report import machine_lines
from summary import percentiles
from threads import set_threads
from tqdm import trange

import torch_numa_moe
from torch_numa_moe import _C

COUNTERS = (
    "dispatches",
    "dispatcher_spins",
    "dispatcher_yields",
    "dispatcher_parks",
    "worker_parks",
    "wakes_sent",
    "wakes_skipped",
    "late_tasks",
    "late_tasks_won",
)
CALLS_PER_CHUNK = 100


@dataclass
class Row:
    """Something whose calls are timed.

    Attributes:
        name: what is printed.
        call: what is timed.
        pause: seconds to sleep before each call, not timed; 0: calls follow each other.
        microseconds: per call; the mean of a chunk where calls follow each other.
        counters: totals of the pool's counters over all calls.
        calls: how many calls the counters are over.
    """

    name: str
    call: Callable[[], object]
    pause: float = 0.0
    microseconds: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    calls: int = 0

    def measure(self) -> None:
        """Times one chunk of calls."""
        call = self.call
        for _ in range(CALLS_PER_CHUNK // 10):
            call()
        before = _C.counters()
        if self.pause > 0:
            calls = CALLS_PER_CHUNK // 10
            for _ in range(calls):
                time.sleep(self.pause)
                start = time.perf_counter()
                call()
                self.microseconds.append((time.perf_counter() - start) * 1e6)
        else:
            calls = CALLS_PER_CHUNK
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.microseconds.append((time.perf_counter() - start) * 1e6 / calls)
        after = _C.counters()
        for name in COUNTERS:
            self.counters[name] += getattr(after, name) - getattr(before, name)
        self.calls += calls


def make_rows(shape: Shape, pause: float) -> list[Row]:
    """The rows described at the top of this file."""
    weights = make_weights(shape)
    packed = torch_numa_moe.pack_experts(weights.gate_up_proj, weights.down_proj)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    one_number = torch_numa_moe.pack_experts(torch.ones(1, 2, 1, dtype=torch.bfloat16), one[None])
    token = make_hidden_states(shape, 1)
    routing = make_routing(shape, 1, call=0)
    ids, scales = routing.topk_ids, routing.topk_weights
    first = torch.zeros(1, 1, dtype=torch.int64)
    no_token, no_ids, no_scales = token[:0], ids[:0], scales[:0]
    op = torch.ops.numa_moe.experts
    gate_up, down = packed.gate_up_proj, packed.down_proj
    return [
        Row("empty call", lambda: None),
        Row("op, no tokens", lambda: op(no_token, no_ids, no_scales, gate_up, down)),
        Row("packed, no tokens", lambda: packed(no_token, no_ids, no_scales)),
        Row("one number", lambda: one_number(one, first, one)),
        Row("layer", lambda: packed(token, ids, scales)),
        Row("layer, rested", lambda: packed(token, ids, scales), pause=pause),
    ]


def table_lines(rows: list[Row]) -> list[str]:
    """Microseconds per call, the difference to the row before, and the pool's counters per call."""
    lines = [f"{'microseconds per call':<20}  {'p10':>8}  {'median':>8}  {'p90':>8}  {'adds':>8}"]
    previous = 0.0
    for row in rows:
        p10, median, p90 = percentiles(row.microseconds)
        lines.append(f"  {row.name:<19}  {p10:8.2f}  {median:8.2f}  {p90:8.2f}  {median - previous:8.2f}")
        previous = median
    lines.append("")
    lines.append(f"{'counters per call':<21}  " + "  ".join(COUNTERS))
    for row in rows:
        shares = (f"{row.counters[name] / row.calls:>{len(name)}.2f}" for name in COUNTERS)
        lines.append(f"  {row.name:<19}  " + "  ".join(shares))
    return lines


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--intermediate-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--num-experts", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: what torch_numa_moe plans for this machine")
    parser.add_argument("--chunks", type=int, default=50, help="of 100 calls, per row (default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.01, help="seconds of rest before a call (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    shape = Shape(
        "tiny",
        "overhead",
        arguments.hidden_size,
        arguments.intermediate_size,
        arguments.num_experts,
        arguments.top_k,
    )
    cpus = set_threads(arguments.threads)
    machine = describe_machine() | {
        "threads": len(cpus),
        "instruction_set": _C.running_instruction_set(),
        "plan": str(torch_numa_moe.plan()),
        "layer": str(shape),
    }
    print("\n".join(machine_lines(machine)), flush=True)
    rows = make_rows(shape, arguments.pause)
    with torch.inference_mode():
        for _ in trange(arguments.chunks, unit="chunk", disable=None):
            for row in rows:
                row.measure()
    print("\n" + "\n".join(table_lines(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
