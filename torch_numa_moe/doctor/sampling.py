"""Two looks at what the machine does, some time apart."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch_numa_moe.doctor.threads import Thread, read_threads
from torch_numa_moe.sysfs import read_text

if TYPE_CHECKING:
    from collections.abc import Callable


DEFAULT_INTERVAL_SECONDS = 1.0
"""How long threads and interrupts are watched: a hundred clock ticks, so that a share is exact to 0.01."""


class CpuTime(NamedTuple):
    """A CPU's time since boot, in clock ticks: spent on threads, and taken by the hypervisor."""

    threads: int
    stolen: int


@dataclass(frozen=True)
class Interrupt:
    """A device's interrupt.

    Attributes:
        number: as in /proc/irq.
        device: what /proc/interrupts says of its chip and device.
        counts: how often it was handled since boot, by CPU.
    """

    number: int
    device: str
    counts: dict[int, int]


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        seconds: when, on a clock that only goes forward.
        threads: all threads, by their number.
        interrupts: of devices, by their number.
        cpu_times: by CPU.
    """

    seconds: float
    threads: dict[int, Thread]
    interrupts: dict[int, Interrupt]
    cpu_times: dict[int, CpuTime]


def take_samples(
    interval_seconds: float,
    *,
    proc: str | Path = "/proc",
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Sample, Sample]:
    """Looks twice. Never raises: what can't be read is left out.

    Args:
        interval_seconds: the time between.
        proc: where procfs is.
        sleep: what waits; it gets the seconds.
        clock: what tells the time in seconds.
    """
    before = _take_sample(Path(proc), clock)
    sleep(interval_seconds)
    return before, _take_sample(Path(proc), clock)


def _take_sample(proc: Path, clock: Callable[[], float]) -> Sample:
    # Threads last: reading them takes longest, and on some CPU.
    interrupts, cpu_times = read_interrupts(proc), read_cpu_times(proc)
    return Sample(clock(), read_threads(proc), interrupts, cpu_times)


def read_interrupts(proc: Path) -> dict[int, Interrupt]:
    """The devices' interrupts (those with a number), by their number."""
    lines = (read_text(proc / "interrupts") or "").splitlines()
    if not lines:
        return {}
    cpus = [int(word[3:]) for word in lines[0].split() if re.fullmatch("CPU[0-9]+", word)]
    found = {}
    for line in lines[1:]:
        name, _, rest = line.partition(":")
        # A name such as "NMI" is an interrupt of the processor's own, which nothing can move.
        words = rest.split(None, len(cpus))
        counts = words[: len(cpus)]
        if not name.strip().isdecimal() or len(counts) < len(cpus) or not all(map(str.isdecimal, counts)):
            continue
        device = re.sub(r"[^ -~]", "?", " ".join(words[len(cpus) :])) or "no device"
        by_cpu = dict(zip(cpus, map(int, counts), strict=True))
        found[int(name)] = Interrupt(int(name), " ".join(device.split()), by_cpu)
    return found


def read_cpu_times(proc: Path) -> dict[int, CpuTime]:
    """What /proc/stat counts by CPU; see proc_stat(5)."""
    found = {}
    for line in (read_text(proc / "stat") or "").splitlines():
        words = line.split()
        if not words or not re.fullmatch("cpu[0-9]+", words[0]) or not all(map(str.isdecimal, words[1:])):
            continue
        user, nice, system, _, _, _, _, stolen = [*map(int, words[1:]), *[0] * 8][:8]
        found[int(words[0][3:])] = CpuTime(user + nice + system, stolen)
    return found
