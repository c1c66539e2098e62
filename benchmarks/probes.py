"""The limits of the machine as they are at this moment: read bandwidth and compute peaks.

Both change while a benchmark runs (neighbours on the same host, clocks), so every measurement stands between
two probes, and what counts is its share of their mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_numa_moe import _C

LEAST_BYTES = 512 << 20
CACHE_MULTIPLE = 4
"""The probe reads this many times the last-level caches, so that they hold little of it from pass to pass."""

PEAK_KINDS = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class Limits:
    """What was probed at one moment.

    Attributes:
        bandwidth: GB/s (1e9 bytes) read by all threads.
        peaks: billions of multiplications and additions per second by kind of instruction; a kind that the
            CPU lacks is absent.
    """

    bandwidth: float
    peaks: dict[str, float]


def mean_limits(first: Limits, second: Limits) -> Limits:
    """The limits that a measurement between two probes is set against."""
    peaks = {kind: (peak + second.peaks[kind]) / 2 for kind, peak in first.peaks.items()}
    return Limits((first.bandwidth + second.bandwidth) / 2, peaks)


class Probes:
    """Probes with one thread on each of some CPUs.

    Attributes:
        cpus: where the threads are pinned; empty when pinning was refused.
        num_threads: how many there are.
        bytes: how much the bandwidth probe reads.
        note: why threads aren't pinned, or empty.
    """

    def __init__(self, cpus: Sequence[int], probed_bytes: int | None = None) -> None:
        self.cpus = list(cpus)
        self.num_threads = len(self.cpus)
        self.bytes = probed_bytes if probed_bytes is not None else default_bytes()
        self.note = ""
        try:
            _C.compute_peak("fp32", self.num_threads, self.cpus)
        except RuntimeError as error:
            self.note = f"probe threads aren't pinned: {error}"
            self.cpus = []

    def measure(self, kinds: Sequence[str] = PEAK_KINDS) -> Limits:
        """Probes now; takes about a tenth of a second, the first time longer."""
        peaks = {}
        for kind in kinds:
            peak = _C.compute_peak(kind, self.num_threads, self.cpus)
            if peak is not None:
                peaks[kind] = peak
        return Limits(_C.read_bandwidth(self.num_threads, self.bytes, self.cpus), peaks)


def default_bytes() -> int:
    """How much the bandwidth probe should read on this machine; never more than an eighth of its memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(max(LEAST_BYTES, CACHE_MULTIPLE * last_level_cache_bytes()), memory // 8)


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all caches of the highest level together; 0 where the system doesn't tell."""
    sizes: dict[int, dict[str, int]] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            match = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if match:
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
            sizes.setdefault(level, {})[shared] = int(match[1]) * unit
    return sum(sizes[max(sizes)].values()) if sizes else 0
