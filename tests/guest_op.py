"""For a guest: the op on real NUMA nodes. Prints a line of JSON."""

from __future__ import annotations

import json

import torch

import torch_numa_moe
from reference import random_layer, random_routing


def main() -> None:
    """Packs and computes with the machine's own plan, then in one slice; both must give the same bits."""
    torch.manual_seed(0)
    layer = random_layer(8, 512, 384)
    hidden = torch.randn(5, 512)
    ids, weights = random_routing(5, 2, 8)
    split = torch_numa_moe.pack_experts(layer.gate_up_proj, layer.down_proj)
    out = split(hidden, ids, weights)
    shares = {placement.node: placement.local_share for placement in split.placement}
    torch_numa_moe.configure(split="0")
    whole = torch_numa_moe.pack_experts(layer.gate_up_proj, layer.down_proj)
    same = torch.equal(out, whole(hidden, ids, weights))
    print(json.dumps({"slices": split.num_slices, "local_shares": shares, "same_bits": same}))


if __name__ == "__main__":
    main()
