"""Workers and layers as heat maps."""

from __future__ import annotations

from math import isnan, nan
from pathlib import Path
from typing import Any

from torch_numa_moe.statistics.snapshot import Statistics


def draw(statistics: Statistics, file: Path) -> None:
    """Two maps, worker by layer: the time of a task against the layer's mean, and the wait at its worst.

    A core that straggles is a line of slow tasks in the first, and of short waits in the second.
    """
    from matplotlib.figure import Figure

    layers = [name for name, times in statistics.layers.items() if times.count]
    workers = [worker.name for worker in statistics.workers]
    figure = Figure(
        figsize=(4 + 0.2 * max(len(layers), 20), 2.5 + 0.5 * max(len(workers), 4)), layout="constrained"
    )
    axes = figure.subplots(2, 1, sharex=True)
    by_layer = [statistics.slowness(layer) for layer in layers]
    slowness = [[ratios.get(worker, nan) for ratios in by_layer] for worker in workers]
    waits = [
        [worker.layers[layer].waits.percentile_us(99) if layer in worker.layers else nan for layer in layers]
        for worker in statistics.workers
    ]
    spread = max([1.5, *(value for row in slowness for value in row if not isnan(value))])
    maps: list[tuple[list[list[float]], str, dict[str, Any]]] = [
        (
            slowness,
            "time of a task / mean of the layer",
            {"cmap": "coolwarm", "vmin": 2 - spread, "vmax": spread},
        ),
        (waits, "wait in a call, 99th percentile, us", {"cmap": "viridis"}),
    ]
    for axis, (values, title, options) in zip(axes, maps, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(workers)), workers, fontsize=8)
        if layers:
            image = axis.imshow(values, aspect="auto", interpolation="nearest", **options)
            figure.colorbar(image, ax=axis)
    step = max(1, len(layers) // 40)
    axes[-1].set_xticks(range(0, len(layers), step), layers[::step], fontsize=7, rotation=90)
    figure.savefig(file)
