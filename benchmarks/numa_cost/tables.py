"""What the cost model has to say, as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from numa_cost.box import Box, Engine, Experts
from numa_cost.layer_time import Arm, layer_time, step_seconds, tokens_per_second
from numa_cost.published import INPUTS, LINE_SOURCE, Comparison, StudyModel
from numa_cost.scaling import NODE_COUNTS

_WIDTH = 110

WHY_IT_MISSES = (
    "What the model leaves out and the study doesn't publish: how that engine keeps two sockets in step and "
    "what activations it moves between them (few workers; the split with the link halved, when only such "
    "traffic crosses the link), and where pages lay (no split). The published columns differ among "
    "themselves, too: with translated copies the default is 1.45 tokens/s slower, but no split is 7 faster, "
    "and few workers are as fast as before."
)
"""Printed beneath the comparison when a cell misses."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned lines: the first column to the left, the others to the right."""
    every = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    lines = []
    for first, *others in every:
        aligned = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *aligned]).rstrip())
    return lines


def paragraph(text: str, indent: str = "") -> list[str]:
    """Text in lines of bearable length."""
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def comparison_lines(model: StudyModel, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """The published table beside the model's."""
    yield "A published study of two Xeon Gold 6226, tokens/s"
    yield ""
    yield from table(
        ("arm", "IOMMU", "published", "range", "predicted", "inputs' bounds", "", "missing us"),
        [_comparison_row(comparison) for comparison in comparisons],
    )
    checked = [comparison for comparison in comparisons if not comparison.cell.calibrates]
    missed = [comparison for comparison in checked if not comparison.within]
    yield ""
    yield f"{len(checked) - len(missed)} of {len(checked)} cells within the published spread"
    if missed:
        slower = all(comparison.missing_us > 0 for comparison in missed)
        missing = "Every miss is a step that takes longer" if slower else "Steps take other times"
        yield from paragraph(
            f"{missing} in the study than bandwidths explain; the last column says by how many microseconds "
            f"a layer. {WHY_IT_MISSES}"
        )
    yield ""
    yield "Inputs"
    for name, given in INPUTS.items():
        spread = "" if given.lowest == given.highest else f" ({given.lowest:g} to {given.highest:g})"
        yield f"  {name}: {given.value:g} {given.unit}{spread}"
        yield from paragraph(given.source, "    ")
    yield from paragraph(LINE_SOURCE, "  ")
    experts = model.experts["passthrough"]
    yield "Calibrated on one socket, at both widths of the link"
    yield (
        f"  {experts.layer_bytes * experts.layers / 1e6:.0f} MB of experts a window, "
        f"{experts.fixed_us:.0f} us a layer that no number of cores shortens"
    )


def _comparison_row(comparison: Comparison) -> tuple[str, ...]:
    cell = comparison.cell
    verdict = "calibrated" if cell.calibrates else "within" if comparison.within else "MISSED"
    missing = "" if cell.calibrates or comparison.within else f"{comparison.missing_us:.0f}"
    return (
        cell.name,
        cell.column,
        "" if cell.median is None else f"{cell.median:g}",
        f"{cell.lowest:g}-{cell.highest:g}",
        _span(comparison.lowest, comparison.highest),
        _span(comparison.input_lowest, comparison.input_highest),
        verdict,
        missing,
    )


def _span(lowest: float, highest: float) -> str:
    first, last = f"{lowest:.1f}", f"{highest:.1f}"
    return first if first == last else f"{first}-{last}"


def scaling_lines(
    title: str, scaled: Mapping[str, Mapping[int, float]], arms: Mapping[str, Arm]
) -> Iterator[str]:
    """Tokens/s by number of nodes, and the ratio to one node."""
    yield title
    yield ""
    header = ("tokens/s (over one node)", *(f"{nodes} node{'s' * (nodes > 1)}" for nodes in NODE_COUNTS))
    rows = []
    for name, by_nodes in scaled.items():
        base = by_nodes[1]
        shown = [f"{by_nodes[nodes]:.1f} ({by_nodes[nodes] / base:.2f}x)" for nodes in NODE_COUNTS]
        rows.append((arms[name].name, *shown))
    yield from table(header, rows)


def box_lines(box: Box, experts: Experts, engine: Engine, arms: Mapping[str, Arm]) -> Iterator[str]:
    """One box, all its arms."""
    links = f", {box.intake:g} from all others" if box.nodes > 2 else ""
    yield (
        f"{box.nodes} nodes of {box.cores} cores; GB/s: memory {box.memory_bandwidth:g}, from one other node "
        f"{box.link_bandwidth:g}{links}, a core {box.core_bandwidth:g}"
    )
    yield (
        f"{experts.layers} layers of {experts.layer_bytes / 1e6:.1f} MB; outside of CPU experts "
        f"{experts.outside_ms:g} ms, fixed {experts.fixed_us:g} us a layer; {engine.barriers} barriers a "
        f"layer, {engine.barrier}"
    )
    yield ""
    reference = tokens_per_second(box, experts, engine, next(iter(arms.values())))
    rows = []
    for arm in arms.values():
        layer = layer_time(box, experts, engine, arm)
        rate = tokens_per_second(box, experts, engine, arm)
        rows.append(
            (
                arm.name,
                str(arm.num_workers),
                f"{1e3 * step_seconds(box, experts, engine, arm):.2f}",
                f"{rate:.1f}",
                f"{rate / reference:.2f}x",
                layer.limit,
                f"{1e6 * layer.reading:.0f}",
                f"{1e6 * (layer.barriers + layer.exchange):.1f}",
            )
        )
    yield from table(
        (
            "arm",
            "workers",
            "ms a step",
            "tokens/s",
            "vs one socket",
            "reading waits for",
            "reading, us",
            "in step, us",
        ),
        rows,
    )
