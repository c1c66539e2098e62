"""Draws what moe_layer.py wrote: share of the nearer limit against the batch, a panel per shape.

Usage: python benchmarks/plot.py results.jsonl figure.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from problem_set import SHAPES
from summary import Summary


def plot(summaries: Sequence[Summary], file: Path) -> None:
    """Writes the figure; the file's suffix chooses its format.

    A filled marker means that the nearer limit is the compute peak, an open one that it is the bandwidth.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shapes = sorted({summary.shape for summary in summaries})
    arms = list(dict.fromkeys(summary.arm for summary in summaries))
    figure, panels = plt.subplots(1, len(shapes), figsize=(5 * len(shapes), 4.5), sharey=True, squeeze=False)
    for shape, panel in zip(shapes, panels[0], strict=True):
        for index, arm in enumerate(arms):
            points = [summary for summary in summaries if (summary.arm, summary.shape) == (arm, shape)]
            points.sort(key=lambda summary: summary.num_tokens)
            color = f"C{index % 10}"
            tokens = [point.num_tokens for point in points]
            panel.plot(tokens, [100 * point.share for point in points], color=color, label=arm)
            panel.scatter(
                tokens,
                [100 * point.share for point in points],
                facecolors=[color if point.bound_by_compute else "white" for point in points],
                edgecolors=color,
                zorder=3,
            )
        panel.set_xscale("log", base=2)
        panel.set_xlabel("tokens per call")
        panel.set_title(f"{shape}: {SHAPES[shape].model}" if shape in SHAPES else shape)
        panel.axhline(100, color="gray", linewidth=0.8)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel(
        "share of the limit probed beside it, %\n(open: read bandwidth, filled: compute peak)"
    )
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def read_summaries(file: Path) -> list[Summary]:
    """The summaries in a file that ``moe_layer.py --json`` wrote."""
    summaries = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if record.pop("record") == "summary":
            del record["share"], record["bound_by_compute"]
            summaries.append(Summary(**record))
    return summaries


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    plot(read_summaries(source), target)
