"""Statistics for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch_numa_moe.statistics.durations import Durations
from torch_numa_moe.statistics.snapshot import Statistics

QUANTILES = (0.5, 0.99, 1.0)


def exposition(statistics: Statistics) -> str:
    """All totals as counters, all durations as summaries, in seconds."""
    lines: list[str] = []

    def family(name: str, kind: str, about: str, samples: Iterable[str]) -> None:
        lines.extend((f"# HELP numa_moe_{name} {about}", f"# TYPE numa_moe_{name} {kind}", *samples))

    for name, value in statistics.counters.items():
        about = f"{name.replace('_', ' ').capitalize()} of the pool."
        family(f"{name}_total", "counter", about, [f"numa_moe_{name}_total {value}"])
    shares = [
        ({"worker": worker.name, "cpu": _text(worker.cpu), "node": _text(worker.node), "layer": layer}, share)
        for worker in statistics.workers
        for layer, share in worker.layers.items()
    ]
    family(
        "tasks_total",
        "counter",
        "Tasks that a worker has run.",
        [f"numa_moe_tasks_total{_labels(where)} {share.tasks}" for where, share in shares],
    )
    family(
        "worker_late_tasks_total",
        "counter",
        "Tasks of a worker that another one ran again and finished earlier.",
        [f"numa_moe_worker_late_tasks_total{_labels(where)} {share.late_tasks}" for where, share in shares],
    )
    family(
        "task_seconds_total",
        "counter",
        "Time that a worker has spent on tasks.",
        [f"numa_moe_task_seconds_total{_labels(where)} {share.busy_seconds:.9f}" for where, share in shares],
    )
    family(
        "wait_seconds",
        "summary",
        "Part of a layer's time in which a worker had nothing to do.",
        (line for where, share in shares for line in _summary("wait_seconds", where, share.waits)),
    )
    family(
        "layer_seconds",
        "summary",
        "Time of a call of a layer.",
        (
            line
            for layer, times in statistics.layers.items()
            for line in _summary("layer_seconds", {"layer": layer}, times)
        ),
    )
    family(
        "run_delay_seconds_total",
        "counter",
        "Time that a worker was ready to run while another thread had its CPU.",
        [
            f"numa_moe_run_delay_seconds_total{_labels({'worker': worker.name, 'cpu': _text(worker.cpu)})} "
            f"{worker.run_delay_seconds:.9f}"
            for worker in statistics.workers
            if worker.run_delay_seconds is not None
        ],
    )
    return "\n".join(lines) + "\n"


def _summary(name: str, where: Mapping[str, str], durations: Durations) -> list[str]:
    lines = [
        f"numa_moe_{name}{_labels({**where, 'quantile': f'{quantile:g}'})} "
        f"{durations.percentile_us(100 * quantile) / 1e6:.9f}"
        for quantile in QUANTILES
    ]
    return [*lines, f"numa_moe_{name}_count{_labels(where)} {durations.count}"]


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
