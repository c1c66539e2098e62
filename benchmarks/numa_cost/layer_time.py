"""How long a decode step takes, from bandwidths.

Decoding reads the weights of the active experts once, so a layer takes as long as the busiest of the things
that they go through: the roofline argument (Williams, Waterman and Patterson, Communications of the ACM
52(4), 2009), which is the asymptotic bound of a closed queueing network (Denning and Buzen, ACM Computing
Surveys 10(3), 1978). With

    B   bytes of the active experts' weights in a layer
    N   nodes, of which k have workers; w[g] workers on node g, of n in all
    C   bandwidth of a core, M of a node's memory, L of the link from one other node,
    A   of all links of a node together, h links that a byte travels on average

the parts are

    cores    Node g gets through at most w[g] * C.
    links    What node g takes in over the links depends on where pages lie (``Layout``):
             "own"       nothing: every slice is on its own node.
             "even"      (N - 1) / N of what it reads is on other nodes, equally, so it reads at most
                         A / h * N / (N - 1), and N * L. A single reading node has all links to itself: h = 1.
             "one node"  all of a layer's pages are on one node (where one thread wrote them first: that is
                         what Linux does without a memory policy, as long as the node has room). The others
                         read at most L, and A / (k - 1), since that node's links give out A in all.
    memory   "own": B / k from each of k memories. "even": B / N from each of N. "one node": B from one.
    claims   With the split each of the k nodes has B / k to do, and the slowest sets the pace. Without it,
             workers take tasks as they get done, and all nodes' rates add up.

so that

    rate[g]  = min(w[g] * C, what the links let it read)
    reading  = max(B / k / min(rate)  or  B / sum(rate),  memory)

Two things come on top, since nothing is read meanwhile:

    barrier   Whoever arrives adds to a counter, whose cache line goes from core to core; then everybody
              fetches the line that says that all are there: twice n transfers, one after the other, for one
              counter (Mellor-Crummey and Scott, ACM Transactions on Computer Systems 9(1), 1991, on
              centralised barriers). Cores arrive in any order, so a transfer crosses nodes with probability
              (k - 1) / k. With a counter per node: twice as many transfers as the largest node has workers,
              at once on all nodes, and twice k between nodes.
    exchange  Every node copies the activations that the others computed: (k - 1) / k of them, over the links.

A step takes ``outside + layers * (fixed + barriers * barrier + exchange + reading)``.

Not in the model: what a memory does worse when several nodes read from it; traffic of other devices (a GPU's
copies share memory and links); clocks that fall as more cores work; and the wait for the slowest of tasks of
unequal length. All of them make a real step slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numa_cost.box import Box, Engine, Experts

Layout = Literal["own", "even", "one node"]


@dataclass(frozen=True)
class Arm:
    """A way to use the box.

    Attributes:
        name: for people.
        workers: on each node; 0 for a node that only lends its memory.
        split: whether each node has a slice of its own to do.
        layout: where the pages of a layer lie.
    """

    name: str
    workers: tuple[int, ...]
    split: bool
    layout: Layout

    @property
    def num_workers(self) -> int:
        """On all nodes."""
        return sum(self.workers)

    @property
    def active_nodes(self) -> int:
        """Nodes that have workers."""
        return sum(count > 0 for count in self.workers)


@dataclass(frozen=True)
class LayerTime:
    """The parts of a layer's time, in seconds.

    Attributes:
        cores, links, memory: what reading would take if only this limited it.
        reading: what it does take, at least the largest of the three.
        barriers: all barriers of the layer.
        exchange: copying activations between nodes.
        fixed: see :class:`Experts`.
    """

    cores: float
    links: float
    memory: float
    reading: float
    barriers: float
    exchange: float
    fixed: float

    @property
    def total(self) -> float:
        """The layer's time."""
        return self.reading + self.barriers + self.exchange + self.fixed

    @property
    def limit(self) -> str:
        """What reading waits for."""
        parts = {"memory": self.memory, "links": self.links, "cores": self.cores}
        return max(parts, key=lambda name: parts[name])


def make_arms(box: Box) -> dict[str, Arm]:
    """The arms of the study for a box.

    One core is left to the calling thread and, with workers on several nodes, another one free, as
    ``torch_numa_moe.plan()`` does it. "few workers" are as many as one node has cores.
    """
    nodes = box.nodes
    one = max(1, box.cores - 1)
    everywhere = _deal(max(nodes, nodes * box.cores - 2), nodes) if nodes > 1 else (one,)
    few = _deal(max(nodes, box.cores // nodes * nodes), nodes) if nodes > 1 else (one,)
    return {
        "one socket": Arm("one socket", (one, *(0,) * (nodes - 1)), False, "even"),
        "all cores, no split": Arm("all cores, no split, pages spread evenly", everywhere, False, "even"),
        "all cores, one node's memory": Arm(
            "all cores, no split, a layer's pages on one node", everywhere, False, "one node"
        ),
        "split, few workers": Arm("split, few workers", few, True, "own"),
        "split, pages spread": Arm("split, not placed, pages spread evenly", everywhere, True, "even"),
        "split, one node's memory": Arm(
            "split, not placed, a layer's pages on one node", everywhere, True, "one node"
        ),
        "split": Arm("split, placed", everywhere, True, "own"),
    }


def _deal(count: int, nodes: int) -> tuple[int, ...]:
    return tuple(count // nodes + (node < count % nodes) for node in range(nodes))


def layer_time(box: Box, experts: Experts, engine: Engine, arm: Arm) -> LayerTime:
    """The time of one layer.

    Args:
        box: the machine.
        experts: what a step reads.
        engine: how workers are kept in step.
        arm: how the box is used; ``len(arm.workers)`` must be ``box.nodes``.

    Raises:
        ValueError: if the arm doesn't fit the box.
    """
    if len(arm.workers) != box.nodes or arm.num_workers < 1 or min(arm.workers) < 0:
        raise ValueError(f"arm must have workers for {box.nodes} nodes, at least one, got {arm.workers}")
    gigabytes = experts.layer_bytes / 1e9
    active = [node for node, count in enumerate(arm.workers) if count]
    by_cores = {node: arm.workers[node] * box.core_bandwidth for node in active}
    by_links = {node: _link_rate(box, arm, node) for node in active}
    both = {node: min(by_cores[node], by_links[node]) for node in active}

    def claim(rates: dict[int, float]) -> float:
        if arm.split:
            return gigabytes / len(active) / min(rates.values())
        return gigabytes / sum(rates.values())

    sources = {"own": len(active), "even": box.nodes, "one node": 1}[arm.layout]
    memory = gigabytes / sources / box.memory_bandwidth
    exchange = 0.0
    if arm.split and len(active) > 1:
        share = (len(active) - 1) / len(active)
        exchange = share * experts.exchange_bytes / 1e9 / (box.intake / box.hops)
    return LayerTime(
        cores=claim(by_cores),
        links=claim(by_links),
        memory=memory,
        reading=max(claim(both), memory),
        barriers=engine.barriers * barrier_time(box, engine, arm),
        exchange=exchange,
        fixed=experts.fixed_us / 1e6,
    )


def _link_rate(box: Box, arm: Arm, node: int) -> float:
    """GB/s that a node can read, if only the links limit it."""
    if box.nodes == 1 or arm.layout == "own":
        return float("inf")
    if arm.layout == "one node":
        if node == 0:
            return float("inf")
        return min(box.link_bandwidth, box.intake / max(1, arm.active_nodes - 1))
    hops = box.hops if arm.active_nodes > 1 else 1.0
    return min(box.intake / hops * box.nodes / (box.nodes - 1), box.nodes * box.link_bandwidth)


def barrier_time(box: Box, engine: Engine, arm: Arm) -> float:
    """Seconds that all workers take to find out that all have arrived, once they have."""
    active = arm.active_nodes
    workers = arm.num_workers
    if arm.split and engine.barrier == "per node":
        inside = 2 * max(arm.workers) * box.line_ns
        return (inside + (2 * active * box.remote_line_ns if active > 1 else 0.0)) / 1e9
    crossing = (active - 1) / active
    return 2 * workers * ((1 - crossing) * box.line_ns + crossing * box.remote_line_ns) / 1e9


def step_seconds(box: Box, experts: Experts, engine: Engine, arm: Arm) -> float:
    """The time of a decode step."""
    return experts.outside_ms / 1e3 + experts.layers * layer_time(box, experts, engine, arm).total


def tokens_per_second(box: Box, experts: Experts, engine: Engine, arm: Arm) -> float:
    """Tokens that steps yield in a second."""
    return experts.tokens / step_seconds(box, experts, engine, arm)
