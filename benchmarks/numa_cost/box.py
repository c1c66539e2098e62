"""What the cost model is told: the box, the model's experts, and how the engine keeps its workers in step."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BARRIERS = ("per node", "central")

FILL_BUFFERS = 12
CACHE_LINE_BYTES = 64
MEMORY_LATENCY_NS = 81.2
DEFAULT_CORE_BANDWIDTH = FILL_BUFFERS * CACHE_LINE_BYTES / MEMORY_LATENCY_NS
"""GB/s that a core gets through if nothing better is known: a core of a Skylake or Cascade Lake server has 12
line fill buffers (Intel's optimization manual), each of which waits 81.2 ns for a line of its own node's
memory (Memory Latency Checker, on the testbed that published.py names). Prefetching makes it more, a format
that is hard to unpack less."""

ACTIVATION_BYTES = 4
"""Of an intermediate activation: this project keeps them in fp32 between the phases."""


@dataclass(frozen=True)
class Box:
    """A machine.

    Bandwidths are of reads, sustained, in GB/s (1e9 bytes). Intel's Memory Latency Checker prints them as its
    bandwidth matrix, ``benchmarks/moe_layer.py`` that of memory as its limit.

    Attributes:
        nodes: NUMA nodes, all alike.
        cores: of a node.
        memory_bandwidth: what a node's memory gives to all its readers together.
        link_bandwidth: what a node's cores can read of one other node's memory.
        core_bandwidth: packed weights that one core gets through, whatever memory gives.
        all_links_bandwidth: what a node can take in from (or give out to) all others together; None:
            ``link_bandwidth`` from each.
        hops: links that a byte travels between two nodes, on average; when every node reads from every
            other, it uses up the bandwidth of that many.
        line_ns: time for a cache line to go from one core to another of its node, in ns.
        remote_line_ns: the same to a core of another node.
    """

    nodes: int
    cores: int
    memory_bandwidth: float
    link_bandwidth: float
    core_bandwidth: float = DEFAULT_CORE_BANDWIDTH
    all_links_bandwidth: float | None = None
    hops: float = 1.0
    line_ns: float = 55.6
    remote_line_ns: float = 147.0

    def __post_init__(self) -> None:
        _check(self, "nodes", 1, whole=True)
        _check(self, "cores", 1, whole=True)
        for name in ("memory_bandwidth", "link_bandwidth", "core_bandwidth"):
            _check(self, name, 0, above=True)
        if self.all_links_bandwidth is not None:
            _check(self, "all_links_bandwidth", 0, above=True)
        _check(self, "hops", 1)
        _check(self, "line_ns", 0)
        _check(self, "remote_line_ns", 0)

    @property
    def intake(self) -> float:
        """GB/s that a node can take in from all others together, when it is the only one that reads."""
        if self.all_links_bandwidth is None:
            return self.link_bandwidth * max(1, self.nodes - 1)
        return self.all_links_bandwidth


@dataclass(frozen=True)
class Experts:
    """What one decode step asks of the experts.

    Attributes:
        layers: MoE layers.
        layer_bytes: weights of a layer's active experts, in bytes as they are stored.
        outside_ms: time of a step that CPU experts have no part in, in ms.
        fixed_us: time of each layer that no number of cores shortens, in microseconds: handing the layer
            over and taking its result back, waking up, what one thread does alone.
        exchange_bytes: intermediate activations of a layer, of which every node needs those of all others.
        tokens: what a step yields.
    """

    layers: int
    layer_bytes: float
    outside_ms: float = 0.0
    fixed_us: float = 0.0
    exchange_bytes: float = 0.0
    tokens: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "layers", 1, whole=True)
        _check(self, "layer_bytes", 0, above=True)
        _check(self, "tokens", 0, above=True)
        for name in ("outside_ms", "fixed_us", "exchange_bytes"):
            _check(self, name, 0)

    @classmethod
    def of_shape(
        cls,
        *,
        layers: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        bits_per_weight: float = 16.0,
        outside_ms: float = 0.0,
        fixed_us: float = 0.0,
    ) -> Experts:
        """One token of a model with gated experts: gate, up and down of top_k of them are read once.

        Raises:
            ValueError: naming the argument that isn't above 0.
        """
        sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "top_k": top_k,
            "bits_per_weight": bits_per_weight,
        }
        for name, size in sizes.items():
            if not size > 0:
                raise ValueError(f"{name} must be a number above 0, got {size}")
        return cls(
            layers=layers,
            layer_bytes=3 * top_k * hidden_size * intermediate_size * bits_per_weight / 8,
            outside_ms=outside_ms,
            fixed_us=fixed_us,
            exchange_bytes=top_k * intermediate_size * ACTIVATION_BYTES,
        )


@dataclass(frozen=True)
class Engine:
    """How workers are kept in step.

    Attributes:
        barriers: times that all workers wait for each other in a layer. This project's phases end with one
            each: stage, gate and up, gather, down.
        barrier: ``"central"``: one counter for all; ``"per node"``: with the split, a counter for each node,
            and one for the nodes, as this project does it.
    """

    barriers: int = 4
    barrier: str = "per node"

    def __post_init__(self) -> None:
        _check(self, "barriers", 0, whole=True)
        if self.barrier not in BARRIERS:
            raise ValueError(f"barrier must be one of {', '.join(BARRIERS)}, got {self.barrier!r}")


def _check(owner: Any, name: str, lowest: float, *, whole: bool = False, above: bool = False) -> None:
    value = getattr(owner, name)
    accepted = f"{'a whole number' if whole else 'a number'} {'above' if above else 'from'} {lowest}"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{name} must be {accepted}, got {value!r}")
    # An infinite bandwidth is a limit worth asking for.
    if math.isnan(value) or value < lowest or (above and value == lowest):
        raise ValueError(f"{name} must be {accepted}, got {value}")


def read_description(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The sections ``box``, ``experts`` and ``engine`` of a JSON file.

    Raises:
        ValueError: naming what doesn't fit.
        OSError: if it can't be read.
    """
    try:
        described: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: isn't JSON ({error})") from None
    sections = ("box", "experts", "engine")
    if not isinstance(described, dict) or not all(
        name in sections and isinstance(section, dict) for name, section in described.items()
    ):
        raise ValueError(f"{file}: must have the sections box, experts and engine and nothing else")
    kinds: tuple[tuple[type[Any], set[str]], ...] = (
        (Box, set()),
        (Experts, {"hidden_size", "intermediate_size", "top_k", "bits_per_weight"}),
        (Engine, set()),
    )
    found = []
    for name, (kind, more) in zip(sections, kinds, strict=True):
        section = described.get(name, {})
        known = {field.name for field in dataclasses.fields(kind)} | more
        unknown = sorted(section.keys() - known)
        if unknown:
            raise ValueError(
                f"{file}: [{name}] has {', '.join(unknown)}; it takes {', '.join(sorted(known))}"
            )
        found.append(section)
    return found[0], found[1], found[2]
