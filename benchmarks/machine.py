"""Describes the machine and the software that a benchmark ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import torch_numa_moe

# What decides which instructions the arms and the probes use.
TELLING_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"),
)


def describe_machine() -> dict[str, object]:
    """CPU, cores, NUMA nodes, memory and versions, for people and for records."""
    cpuinfo = _read(Path("/proc/cpuinfo"))
    flags = set(_field(cpuinfo, "flags").split()) | set(_field(cpuinfo, "Features").split())
    usable = os.sched_getaffinity(0)
    return {
        "cpu": _field(cpuinfo, "model name") or platform.machine(),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags],
        "usable_cpus": len(usable),
        "usable_cores": len({_read(_core_file(cpu)) or str(cpu) for cpu in usable}),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "torch_numa_moe": torch_numa_moe.__version__,
    }


def version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _core_file(cpu: int) -> Path:
    return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
