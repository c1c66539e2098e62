"""Prints measurements as tables and writes them as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from harness import Cell
from summary import Summary

BASELINE_PREFIX = "transformers-"

BF16_BITS = 16

UNSTEADY = 0.15
"""A cell is marked when the bandwidths before and after some visit differ by more than this."""

HEADER = ("arm", "time", "p10", "p90", "rate", "limit", "share", "vs transformers")


def machine_lines(machine: Mapping[str, object]) -> list[str]:
    """A line per fact."""
    width = max(map(len, machine))
    lines = []
    for name, value in machine.items():
        shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        first, *rest = shown.splitlines() or [""]
        lines += [f"{name:<{width}}  {first}", *(f"{'':<{width}}  {line}" for line in rest)]
    return lines


def cell_lines(cell: Cell, summaries: Sequence[Summary]) -> list[str]:
    """The table of one shape and batch."""
    baseline = min(
        (summary.seconds for summary in summaries if summary.arm.startswith(BASELINE_PREFIX)), default=None
    )
    rows = [HEADER, *(_row(summary, baseline) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [f"shape {cell.shape}", _work(cell)]
    for name, *numbers in rows:
        aligned = [f"{text:>{width}}" for text, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([f"  {name:<{widths[0]}}", *aligned]))
    lines += [f"  {arm}: skipped, {reason}" for arm, reason in cell.skipped.items()]
    unsteady = max((summary.probe_disagreement for summary in summaries), default=0.0)
    if unsteady > UNSTEADY:
        lines.append(f"  unsteady: bandwidth probed before and after a visit differs by up to {unsteady:.0%}")
    return lines


def _work(cell: Cell) -> str:
    gflop = cell.shape.flops(cell.num_tokens) / 1e9
    active = [count for visit in cell.visits for count in visit.active_experts]
    if not active:
        return f"batch {cell.num_tokens}: {gflop:.4g} GFLOP"
    experts = statistics.median_low(active)
    megabytes = cell.shape.weight_bytes(experts, BF16_BITS) / 1e6
    return (
        f"batch {cell.num_tokens}: {gflop:.4g} GFLOP, {experts} experts active ({megabytes:.4g} MB in bf16)"
    )


def _row(summary: Summary, baseline: float | None) -> tuple[str, ...]:
    if summary.bound_by_compute and summary.peak is not None:
        rate, limit = f"{summary.gflops:.1f} GFLOP/s", f"{summary.peak:.1f} GFLOP/s"
    else:
        rate, limit = f"{summary.gigabytes_per_second:.1f} GB/s", f"{summary.bandwidth:.1f} GB/s"
    return (
        summary.arm,
        _time(summary.seconds),
        _time(summary.p10),
        _time(summary.p90),
        rate,
        limit,
        f"{summary.share:.0%}",
        "" if baseline is None else f"{baseline / summary.seconds:.2f}x",
    )


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


class JsonLines:
    """Writes records to a file, one JSON object a line, each with its ``record`` kind."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def machine(self, machine: Mapping[str, object]) -> None:
        """What the run ran on."""
        self._write("machine", machine)

    def cell(self, cell: Cell, summaries: Iterable[Summary]) -> None:
        """Every visit with the limits probed around it, what was skipped, and the summaries."""
        where = {"shape": cell.shape.name, "num_tokens": cell.num_tokens}
        for visit in cell.visits:
            self._write("visit", {**where, **dataclasses.asdict(visit)})
        for arm, reason in cell.skipped.items():
            self._write("skipped", {**where, "arm": arm, "reason": reason})
        for summary in summaries:
            derived = {"share": summary.share, "bound_by_compute": summary.bound_by_compute}
            self._write("summary", {**dataclasses.asdict(summary), **derived})

    def _write(self, kind: str, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps({"record": kind, **record}) + "\n")
        self._file.flush()
