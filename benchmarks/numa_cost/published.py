"""A published study of a dual-socket box, and what the cost model says of it.

The study: an engine of another project, whose CPU pool can split experts across NUMA nodes. Two Xeon Gold
6226 (12 cores each, two nodes), 32 GB of DDR4 a node on 4 of 6 channels, an RTX 3090. An MoE with 48 MoE
layers in IQ4_XS; 71 to 79 % of the routed experts hit the cache in the GPU's memory, the rest run on the CPU.
A decode window (several tokens, speculative) takes about 30 ms, 16.7 to 18.3 ms of it CPU experts.

What the model needs and the study doesn't say:

    bandwidths       from public measurements and specifications (``INPUTS``), none of them fitted.
    bytes a window   calibrated on one arm alone, the default (one socket), at both link widths that the study
    fixed time       has of it: halving the link lengthens only what crosses it. Reading time is proportional
                     to bytes, so two times give two unknowns.
    activations      not published, taken as 0.
    barriers         not published, taken as this project's four, on a central counter.
    where pages lie  without placement: not published. The default is taken to have them evenly on both nodes
                     (were they local, the link's width would not matter to it). For the others, all cores
                     reading, the model gives both ends: evenly, and all of a layer's on one node.
    the IOMMU        of the runs with the link halved: not published, taken as passing through.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numa_cost.box import Box, Engine, Experts
from numa_cost.layer_time import Arm, layer_time, make_arms, tokens_per_second

LAYERS = 48
WINDOW_MS = 30.0
CPU_MS = 17.5  # the middle of 16.7 to 18.3
DEFAULT = "one socket"
HALF_LINK_DEFAULT = 41.9  # tokens/s, the middle of 38.8 to 45.0


@dataclass(frozen=True)
class Input:
    """Something that the study doesn't tell of its box.

    Attributes:
        value: what the model takes.
        lowest, highest: what it might be instead.
        unit: of the numbers.
        source: where it is from.
    """

    value: float
    lowest: float
    highest: float
    unit: str
    source: str


INPUTS: dict[str, Input] = {
    "memory_bandwidth": Input(
        81.4,
        74.0,
        81.4,
        "GB/s",
        "4/6 of the 122.1 GB/s that Memory Latency Checker reads on a Cascade Lake socket with 6 channels of "
        "DDR4-2933 (FD.io CSIT report, calibration data of its Cascade Lake testbed); lowest: the same share "
        "of DDR4-2666's peak",
    ),
    "link_bandwidth": Input(
        51.3,
        34.3,
        51.3,
        "GB/s",
        "of the same testbed, three UPI links of 10.4 GT/s as the Gold 6226 has (WikiChip); lowest: a board "
        "that wires two (VSC documentation, Memory Latency Checker on Skylake)",
    ),
    "core_bandwidth": Input(
        8.6,
        8.6,
        11.7,
        "GB/s",
        "llama.cpp's IQ4_XS with AVX2: 8.15 tokens/s of 4.13 GiB on 2 threads of a Ryzen 7950X "
        "(ik_llama.cpp, discussion 164), 3.17 bytes a cycle at its 5.7 GHz; times the Gold 6226's base "
        "clock, 2.7 GHz; highest: its boost, 3.7 GHz",
    ),
    "cpu_ms": Input(CPU_MS, 16.7, 18.3, "ms", "the study: CPU experts' part of a window; the middle"),
    "half_link": Input(
        HALF_LINK_DEFAULT,
        38.8,
        45.0,
        "tokens/s",
        "the study: the default with the link between sockets at half width; the middle",
    ),
}

LINE_NS = 55.6
REMOTE_LINE_NS = 147.0
LINE_SOURCE = (
    "cache line from core to core: 55.6 ns in a socket; between sockets 115.6 or 178.4 ns, depending on the "
    "line's home, of which the mean is taken (the same testbed)"
)


@dataclass(frozen=True)
class Cell:
    """A published figure.

    Attributes:
        name: arm and column, for people.
        arms: what the model calls it; two where it isn't known where the pages lay.
        column: ``"passthrough"`` or ``"translated"``: how the IOMMU treats the GPU's copies.
        median, lowest, highest: tokens/s. A median that isn't published is None.
        calibrates: whether the model was calibrated on it.
        half_link: whether the link between the sockets was degraded to half its width.
    """

    name: str
    arms: tuple[str, ...]
    column: str
    median: float | None
    lowest: float
    highest: float
    calibrates: bool = False
    half_link: bool = False


_NO_SPLIT = ("all cores, one node's memory", "all cores, no split")
_NOT_PLACED = ("split, one node's memory", "split, pages spread")

CELLS: tuple[Cell, ...] = (
    Cell("one socket, 11 workers", (DEFAULT,), "passthrough", 54.05, 50.7, 54.8, calibrates=True),
    Cell("both sockets, no split, 22", _NO_SPLIT, "passthrough", 43.25, 41.0, 47.4),
    Cell("split, few workers, 6 + 6", ("split, few workers",), "passthrough", 51.45, 50.0, 52.9),
    Cell("split, 22", ("split",), "passthrough", 59.3, 57.1, 61.9),
    Cell("one socket, 11 workers", (DEFAULT,), "translated", 52.6, 51.0, 53.3, calibrates=True),
    Cell("both sockets, no split, 22", _NO_SPLIT, "translated", 50.25, 40.5, 53.2),
    Cell("split, few workers, 6 + 6", ("split, few workers",), "translated", 51.5, 49.9, 54.4),
    Cell("split, 22", ("split",), "translated", 60.0, 57.8, 61.6),
    Cell("split, not placed, 22", _NOT_PLACED, "translated", 51.0, 48.7, 56.8),
    Cell(
        "one socket, link halved",
        (DEFAULT,),
        "passthrough",
        None,
        38.8,
        45.0,
        calibrates=True,
        half_link=True,
    ),
    Cell("split, 22, link halved", ("split",), "passthrough", None, 56.6, 57.4, half_link=True),
)

DEFAULT_TOKENS = {cell.column: cell.median for cell in CELLS if cell.arms == (DEFAULT,) and cell.median}


@dataclass(frozen=True)
class StudyModel:
    """The study's box and load, calibrated.

    Attributes:
        box: with the link at full width.
        experts: per column.
        engine: how workers are taken to be kept in step.
    """

    box: Box
    experts: Mapping[str, Experts]
    engine: Engine

    @property
    def halved(self) -> Box:
        """The box with its link degraded to half width."""
        return halve_link(self.box)

    def arms(self) -> dict[str, Arm]:
        """The study's arms: 11, 6 + 6 and 22 workers."""
        return make_arms(self.box)

    def predict(self, cell: Cell) -> tuple[float, ...]:
        """Tokens/s for each of the cell's arms."""
        box = self.halved if cell.half_link else self.box
        arms = self.arms()
        experts = self.experts[cell.column]
        return tuple(tokens_per_second(box, experts, self.engine, arms[name]) for name in cell.arms)


def halve_link(box: Box) -> Box:
    """The box with links of half the width."""
    whole = box.all_links_bandwidth
    return dataclasses.replace(
        box,
        link_bandwidth=box.link_bandwidth / 2,
        all_links_bandwidth=None if whole is None else whole / 2,
    )


def calibrate(
    *,
    memory_bandwidth: float = INPUTS["memory_bandwidth"].value,
    link_bandwidth: float = INPUTS["link_bandwidth"].value,
    core_bandwidth: float = INPUTS["core_bandwidth"].value,
    cpu_ms: float = INPUTS["cpu_ms"].value,
    half_link: float = INPUTS["half_link"].value,
    barrier: str = "central",
) -> StudyModel | None:
    """The study's model for some inputs, calibrated on its default arm.

    With c the window's time in CPU experts, c' the same at half the link's width, and r, r' the time that
    reading a byte takes in each (from the bandwidths), bytes = (c' - c) / (r' - r), and the fixed time is
    what is left of c. "translated" differs by the time outside of CPU experts alone, from its own default.

    Returns:
        None if no bytes and fixed time that aren't negative give the default's two times.
    """
    box = Box(
        nodes=2,
        cores=12,
        memory_bandwidth=memory_bandwidth,
        link_bandwidth=link_bandwidth,
        core_bandwidth=core_bandwidth,
        line_ns=LINE_NS,
        remote_line_ns=REMOTE_LINE_NS,
    )
    engine = Engine(barrier=barrier)
    arm = make_arms(box)[DEFAULT]
    tokens = DEFAULT_TOKENS["passthrough"] * WINDOW_MS / 1e3
    outside = {column: 1e3 * tokens / default - cpu_ms for column, default in DEFAULT_TOKENS.items()}
    half_cpu_ms = 1e3 * tokens / half_link - outside["passthrough"]
    one = Experts(layers=LAYERS, layer_bytes=1e6)
    full = layer_time(box, one, engine, arm)
    half = layer_time(halve_link(box), one, engine, arm)
    slope = 1e3 * LAYERS * (half.reading - full.reading)  # ms a window for each MB a layer
    if slope <= 0:
        return None
    megabytes = (half_cpu_ms - cpu_ms) / slope
    fixed_ms = cpu_ms - 1e3 * LAYERS * (megabytes * full.reading + full.barriers)
    if megabytes <= 0 or fixed_ms < 0:
        return None
    calibrated = dataclasses.replace(
        one, layer_bytes=megabytes * 1e6, fixed_us=1e3 * fixed_ms / LAYERS, tokens=tokens
    )
    experts = {
        column: dataclasses.replace(calibrated, outside_ms=milliseconds)
        for column, milliseconds in outside.items()
    }
    return StudyModel(box, experts, engine)


@dataclass(frozen=True)
class Comparison:
    """A cell beside its prediction.

    Attributes:
        cell: what is published.
        lowest, highest: predicted tokens/s: one number, or both ends where it isn't known where pages lay.
        input_lowest, input_highest: the same over all that the inputs might be instead.
        missing_us: time that a layer takes in the study beyond the nearest prediction, in microseconds, by
            the median (or the middle of the range).
    """

    cell: Cell
    lowest: float
    highest: float
    input_lowest: float
    input_highest: float
    missing_us: float

    @property
    def within(self) -> bool:
        """One number: whether it is in the published range. Two: whether the published median is between."""
        if self.lowest == self.highest:
            return self.cell.lowest <= self.lowest <= self.cell.highest
        assert self.cell.median is not None, "only published medians are compared with two ends"
        return self.lowest <= self.cell.median <= self.highest


def compare(model: StudyModel, others: Sequence[StudyModel] = ()) -> list[Comparison]:
    """Every cell beside its prediction.

    Args:
        model: with the inputs that are taken.
        others: with what they might be instead.
    """
    comparisons = []
    for cell in CELLS:
        predicted = model.predict(cell)
        spread = [value for other in (model, *others) for value in other.predict(cell)]
        published = cell.median if cell.median is not None else (cell.lowest + cell.highest) / 2
        nearest = min(max(published, min(predicted)), max(predicted))
        experts = model.experts[cell.column]
        missing = experts.tokens * (1 / published - 1 / nearest) / experts.layers
        comparisons.append(
            Comparison(cell, min(predicted), max(predicted), min(spread), max(spread), 1e6 * missing)
        )
    return comparisons


def other_models() -> list[StudyModel]:
    """The model at every combination of the inputs' bounds that the default arm allows."""
    bounds = [sorted({given.lowest, given.highest}) for given in INPUTS.values()]
    models = []
    for values in itertools.product(*bounds):
        for barrier in ("central", "per node"):
            chosen = dict(zip(INPUTS, values, strict=True))
            found = calibrate(**chosen, barrier=barrier)
            if found is not None:
                models.append(found)
    return models
