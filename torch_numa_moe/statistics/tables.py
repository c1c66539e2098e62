"""Statistics as text."""

from __future__ import annotations

from collections.abc import Sequence

from torch_numa_moe.statistics.durations import Durations
from torch_numa_moe.statistics.snapshot import Statistics, WorkerStatistics

MOST_LAYERS = 12
"""So many layers are shown, those that took longest; the heat map shows all."""


def lines(statistics: Statistics) -> list[str]:
    """What happened in all, then a table of the workers and one of the layers."""
    if not statistics.workers:
        return ["no pool is running"]
    calls = statistics.counters.get("dispatches", 0)
    seconds = statistics.seconds
    rate = f", {calls / seconds:.4g} a second" if seconds > 0 else ""
    late = statistics.counters.get("late_tasks_won", 0)
    return [
        f"{calls} calls in {seconds:.4g} s{rate}; {late} tasks run again by another worker, and earlier",
        "",
        *_worker_table(statistics),
        "",
        *_layer_table(statistics),
    ]


def _worker_table(statistics: Statistics) -> list[str]:
    tasks = sum(worker.total.tasks for worker in statistics.workers)
    rows = [_worker_row(worker, tasks, statistics.seconds) for worker in statistics.workers]
    header = ("worker", "node", "CPU", "tasks", "us each", "late", "busy", "wait us: p50", "p99", "max")
    return aligned([(*header, "no CPU", "preempted"), *rows])


def _worker_row(worker: WorkerStatistics, all_tasks: int, seconds: float) -> tuple[str, ...]:
    total = worker.total
    delay, preempted = worker.run_delay_seconds, worker.preempted
    return (
        worker.name,
        "" if worker.node is None else str(worker.node),
        "" if worker.cpu is None else str(worker.cpu),
        f"{total.tasks / all_tasks:.1%}" if all_tasks else "",
        f"{total.task_us:.4g}",
        str(total.late_tasks),
        f"{total.busy_seconds / seconds:.1%}" if seconds > 0 else "",
        *_three(total.waits),
        f"{delay / seconds:.1%}" if delay is not None and seconds > 0 else "",
        "" if preempted is None else str(preempted),
    )


def _layer_table(statistics: Statistics) -> list[str]:
    called = {name: times for name, times in statistics.layers.items() if times.count}
    slowest = sorted(called, key=lambda name: -called[name].percentile_us(50))
    shown = [name for name in called if name in slowest[:MOST_LAYERS]]
    header = ("layer", "calls", "us: p50", "p99", "max", "slowest worker (time of its tasks)")
    rows = [
        (name, str(called[name].count), *_three(called[name]), _slow_worker(statistics, name))
        for name in shown
    ]
    table = aligned([header, *rows])
    if len(called) > len(shown):
        table.append(f"... and {len(called) - len(shown)} layers that took less")
    return table


def _three(durations: Durations) -> tuple[str, str, str]:
    numbers = (durations.percentile_us(50), durations.percentile_us(99), durations.max_us)
    p50, p99, longest = (f"{number:.4g}" for number in numbers)
    return p50, p99, longest


def _slow_worker(statistics: Statistics, layer: str) -> str:
    """Who took longest for a task there, and how much longer than all did."""
    slowness = statistics.slowness(layer)
    if len(slowness) < 2:
        return ""
    name = max(slowness, key=lambda name: slowness[name])
    return f"{name} ({slowness[name]:.2f} x)"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equally many texts in columns; the first and the last to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column == 0 or not _is_number(rows, column) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(not row[column] or row[column][0].isdigit() for row in rows[1:])
