"""Draws the comparison with the published study, and how arms scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from numa_cost.layer_time import Arm
from numa_cost.published import Comparison
from numa_cost.scaling import NODE_COUNTS


def draw(
    comparisons: Sequence[Comparison],
    scaled: Mapping[str, Mapping[int, float]],
    arms: Mapping[str, Arm],
    title: str,
    file: Path,
) -> None:
    """Writes the figure; the file's suffix chooses its format.

    Args:
        comparisons: published and predicted, for the left panel.
        scaled: tokens/s by arm and number of nodes, for the right one.
        arms: by the same names.
        title: of the right panel.
        file: to write.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same file from the same numbers.
    mpl.rcParams["svg.hashsalt"] = "numa_model"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 4.6))
    checked = [comparison for comparison in comparisons if not comparison.cell.calibrates]
    for place, comparison in enumerate(reversed(checked)):
        cell = comparison.cell
        left.plot([cell.lowest, cell.highest], [place + 0.13] * 2, color="C0", linewidth=5, alpha=0.5)
        if cell.median is not None:
            left.plot([cell.median], [place + 0.13], "o", color="C0")
        ends = [comparison.lowest, comparison.highest]
        color = "C2" if comparison.within else "C3"
        left.plot(ends, [place - 0.13] * 2, "D-", color=color, markersize=5)
    left.set_yticks(range(len(checked)))
    left.set_yticklabels([f"{one.cell.name}, {one.cell.column}" for one in reversed(checked)])
    left.set_xlabel("tokens/s")
    left.set_title("published (blue) and predicted (green: within, red: missed)", fontsize=10)
    left.grid(alpha=0.3)
    for index, (name, by_nodes) in enumerate(scaled.items()):
        ratios = [by_nodes[nodes] / by_nodes[1] for nodes in NODE_COUNTS]
        right.plot(NODE_COUNTS, ratios, "o-", color=f"C{index}", label=arms[name].name)
    right.plot(NODE_COUNTS, NODE_COUNTS, ":", color="gray", label="as many times as nodes")
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xticks(NODE_COUNTS)
    right.set_xticklabels([str(nodes) for nodes in NODE_COUNTS])
    ticks = (0.5, 1, 2, 4, 8)
    right.set_yticks(ticks)
    right.set_yticklabels([f"{tick:g}x" for tick in ticks])
    right.set_xlabel("nodes")
    right.set_ylabel("speed over one node")
    right.set_title(title, fontsize=10)
    right.grid(alpha=0.3)
    right.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
