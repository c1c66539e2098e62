"""What the checks look at: the plan, the pool's CPUs, and where /sys and /proc are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_numa_moe.plan import Plan


@dataclass(frozen=True)
class Inspection:
    """What the checks look at.

    Attributes:
        plan: what the pool is, or would be, started with.
        root: where sysfs is.
        proc: where procfs is.
    """

    plan: Plan
    root: Path = Path("/sys")
    proc: Path = Path("/proc")

    @cached_property
    def worker_cpus(self) -> tuple[int, ...]:
        """CPUs that workers are pinned to, ascending; empty if they aren't pinned."""
        return tuple(sorted(cpu for group in self.plan.groups for cpu in group.worker_cpus if cpu >= 0))

    @cached_property
    def sibling_cpus(self) -> tuple[int, ...]:
        """Further hardware threads of the workers' cores, ascending."""
        workers = set(self.worker_cpus)
        siblings = {
            sibling for cpu in self.plan.topology.cpus if cpu.id in workers for sibling in cpu.siblings
        }
        return tuple(sorted(siblings - workers))

    @cached_property
    def core_cpus(self) -> tuple[int, ...]:
        """All hardware threads of the workers' cores, ascending."""
        return tuple(sorted({*self.worker_cpus, *self.sibling_cpus}))

    @cached_property
    def other_cpus(self) -> tuple[int, ...]:
        """Online CPUs of the machine on whose cores no worker is, ascending."""
        taken = set(self.core_cpus)
        return tuple(cpu.id for cpu in self.plan.topology.cpus if cpu.id not in taken)

    def move_command(self, command: str) -> str:
        """A command with ``{others}`` filled in, or a remark where no CPU is left to others."""
        if not self.other_cpus:
            return f"# {NOTHING_LEFT}: {self.advice_to_leave_a_core}"
        return command.format(others=format_list(self.other_cpus))

    @property
    def advice_to_leave_a_core(self) -> str:
        """How to get a core that has no worker."""
        fewer = self.plan.num_workers - 1
        return f"NUMA_MOE_WORKERS={fewer} leaves one" if fewer > 0 else "this machine has no other core"


NOTHING_LEFT = "there is a worker on every core, so no CPU is left to others"


def shell_numbers(numbers: Iterable[int]) -> str:
    """The numbers for a shell's ``for``: runs of them as ``$(seq FIRST LAST)``."""
    parts = format_list(numbers).split(",")
    return " ".join(f"$(seq {part.replace('-', ' ')})" if "-" in part else part for part in parts)


def hex_mask(cpus: Iterable[int]) -> str:
    """The CPUs as the kernel's masks are written: hexadecimal, a comma every 32 bits."""
    value = sum(1 << cpu for cpu in set(cpus))
    words: list[int] = []
    while value or not words:
        words.append(value & 0xFFFFFFFF)
        value >>= 32
    return ",".join([f"{words[-1]:x}", *(f"{word:08x}" for word in reversed(words[:-1]))])
