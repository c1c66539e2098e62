"""The same nodes, more of them."""

from __future__ import annotations

import dataclasses

from numa_cost.box import Box, Engine, Experts
from numa_cost.layer_time import make_arms, tokens_per_second

NODE_COUNTS = (1, 2, 4, 8)

HOPS = {1: 1.0, 2: 1.0, 4: 1.0, 8: 12 / 7}
"""Links that a byte travels on average when a node has three links: all to the one other node, one to each of
three others, or the edges of a cube (three neighbours, three nodes at two links, one at three)."""


def with_nodes(box: Box, nodes: int) -> Box:
    """A box of more or fewer nodes of the same kind, joined by the same number of links for each.

    Raises:
        ValueError: for a number of nodes that isn't in :data:`HOPS`.
    """
    if nodes not in HOPS:
        raise ValueError(f"nodes must be one of {', '.join(map(str, HOPS))}, got {nodes}")
    whole = box.intake
    return dataclasses.replace(
        box,
        nodes=nodes,
        # On a cube the nearest three nodes are a link away, as they are with four nodes.
        link_bandwidth=whole / min(max(nodes - 1, 1), 3),
        all_links_bandwidth=whole,
        hops=HOPS[nodes],
    )


def scale(box: Box, experts: Experts, engine: Engine) -> dict[str, dict[int, float]]:
    """Tokens/s of each arm, by its name, for every number of nodes."""
    found: dict[str, dict[int, float]] = {}
    for nodes in NODE_COUNTS:
        sized = with_nodes(box, nodes)
        for name, arm in make_arms(sized).items():
            found.setdefault(name, {})[nodes] = tokens_per_second(sized, experts, engine, arm)
    return found
