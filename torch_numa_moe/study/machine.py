"""The machine in a few lines, for whoever reads the table."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from torch_numa_moe._version import __version__
from torch_numa_moe.cores import find_sites, usable_cores
from torch_numa_moe.limits import ProcessLimits
from torch_numa_moe.sizes import size_text
from torch_numa_moe.sysfs import format_list, read_text
from torch_numa_moe.topology import Topology


def describe_machine(
    topology: Topology, limits: ProcessLimits, *, root: str | Path = "/sys", proc: str | Path = "/proc"
) -> dict[str, str]:
    """What decides the figures, by name.

    Args:
        topology: the machine.
        limits: what this process may use of it.
        root: where sysfs is.
        proc: where procfs is.
    """
    cores, _ = usable_cores(topology, limits)
    sites, _ = find_sites(topology, limits, cores)
    cores_of = {site.node: len(site.cores) for site in sites}
    nodes = []
    for node in topology.nodes:
        memory = "memory unknown" if node.memory_bytes is None else size_text(node.memory_bytes)
        distances = ", ".join(str(distance) for distance in node.distances.values())
        usable = f"{cores_of.get(node.id, 0)} usable cores, CPUs {format_list(node.cpus)}"
        apart = f", distances {distances}" if len(node.distances) > 1 else ""
        nodes.append(f"node {node.id}: {usable}, {memory}{apart}")
    set_variables = {name: value for name, value in os.environ.items() if name.startswith("NUMA_MOE_")}
    described = {
        "CPU": _cpu_model(Path(proc)) or platform.machine(),
        "nodes": "; ".join(nodes),
        "kernel": platform.release(),
        "transparent huge pages": read_text(Path(root) / "kernel/mm/transparent_hugepage/enabled")
        or "unknown",
        "automatic NUMA balancing": read_text(Path(proc) / "sys/kernel/numa_balancing")
        or "not in this kernel",
        "torch": torch.__version__,
        "torch_numa_moe": __version__,
    }
    if limits.cpu_quota is not None:
        described["CPU quota"] = f"{limits.cpu_quota:g}"
    if set_variables:
        described["environment"] = " ".join(
            f"{name}={value}" for name, value in sorted(set_variables.items())
        )
    return described


def _cpu_model(proc: Path) -> str:
    for line in (read_text(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""
