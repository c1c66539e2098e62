"""CPU quota and memory limit of this process's control groups, version 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch_numa_moe.sysfs import read_number, read_text

UNLIMITED_BYTES = 1 << 60
"""Memory limits from here on mean none: version 1 writes the largest multiple of the page size below 2^63."""


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits on the way from the process's group up to the root of its hierarchy.

    Attributes:
        cpu_quota: CPU time per time, such as 1.5 (CPUs), or None.
        cpu_quota_source: the file that says so, or "".
        memory_bytes: most memory, or None.
        memory_source: the file that says so, or "".
        memory_left_bytes: what may still be allocated, page cache that can be given up included, or None. It
            may be another group's limit that leaves the least.
    """

    cpu_quota: float | None = None
    cpu_quota_source: str = ""
    memory_bytes: int | None = None
    memory_source: str = ""
    memory_left_bytes: int | None = None


class _Mount(NamedTuple):
    root: str  # the group that is mounted
    point: str  # where
    controllers: frozenset[str] | None  # None: version 2


def read_cgroup_limits(root: str | Path = "/sys", proc: str | Path = "/proc") -> CgroupLimits:
    """Reads the limits. Never raises: what can't be read is no limit.

    Args:
        root: where sysfs is, which control groups are usually mounted below.
        proc: where procfs is.
    """
    quotas: list[tuple[float, str]] = []
    limits: list[tuple[int, str]] = []
    left: list[int] = []
    groups = _groups_of_process(Path(proc))
    for mount in _mounts(Path(proc)):
        for folder in _folders(mount, groups, Path(root)):
            _read_folder(folder, mount.controllers, quotas, limits, left)
    quota, quota_source = min(quotas, default=(None, ""))
    limit, limit_source = min(limits, default=(None, ""))
    return CgroupLimits(quota, quota_source, limit, limit_source, min(left, default=None))


def _read_folder(
    folder: Path,
    controllers: frozenset[str] | None,
    quotas: list[tuple[float, str]],
    limits: list[tuple[int, str]],
    left: list[int],
) -> None:
    if controllers is None:
        words = (read_text(folder / "cpu.max") or "").split()
        # "max 100000" or "150000 100000", microseconds; the period may be left out.
        if words and words[0].isdecimal():
            period = int(words[1]) if len(words) > 1 and words[1].isdecimal() else 100_000
            if period > 0:
                quotas.append((int(words[0]) / period, str(folder / "cpu.max")))
        limit = read_number(folder / "memory.max")
        if limit is not None:
            limits.append((limit, str(folder / "memory.max")))
            left.append(_memory_left(folder, limit, "memory.current", ("active_file", "inactive_file")))
        return
    if "cpu" in controllers:
        quota = read_number(folder / "cpu.cfs_quota_us")
        period = read_number(folder / "cpu.cfs_period_us") or 0
        if quota is not None and quota > 0 and period > 0:
            quotas.append((quota / period, str(folder / "cpu.cfs_quota_us")))
    if "memory" in controllers:
        limit = read_number(folder / "memory.limit_in_bytes")
        if limit is not None and 0 <= limit < UNLIMITED_BYTES:
            limits.append((limit, str(folder / "memory.limit_in_bytes")))
            files = ("total_active_file", "total_inactive_file")
            left.append(_memory_left(folder, limit, "memory.usage_in_bytes", files))


def _memory_left(folder: Path, limit: int, usage: str, files: tuple[str, ...]) -> int:
    """What a group's limit leaves: page cache of files counts as its memory, but is given up on demand."""
    used = read_number(folder / usage) or 0
    for line in (read_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in files and value.isdecimal():
            used -= int(value)
    return max(0, limit - max(0, used))


def _groups_of_process(proc: Path) -> dict[str | None, str]:
    """The path of the process's group by controller; None: in version 2."""
    groups: dict[str | None, str] = {}
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        # "0::/user.slice" or "4:cpu,cpuacct:/docker/1234"; a path may hold colons.
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        for controller in controllers.split(",") if controllers else (None,):
            groups[controller] = path
    return groups


def _mounts(proc: Path) -> list[_Mount]:
    mounts = []
    for line in (read_text(proc / "self/mountinfo") or "").splitlines():
        # "31 23 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu": see proc_pid_mountinfo(5).
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            mounts.append(_Mount(fields[3], fields[4], None))
        elif kind[0] == "cgroup":
            mounts.append(_Mount(fields[3], fields[4], frozenset(kind[2].split(","))))
    return mounts


def _folders(mount: _Mount, groups: dict[str | None, str], root: Path) -> list[Path]:
    """The folders from the process's group up to the mount point."""
    keys = [None] if mount.controllers is None else sorted(mount.controllers & groups.keys())
    path = next((groups[key] for key in keys if key in groups), None)
    if path is None:
        return []
    # A container that shows its own group as the root of the mount still has the host's path in
    # /proc/self/cgroup, and one with its own cgroup namespace may see a path that leads out of it.
    relative = "/"
    above = mount.root.rstrip("/")
    if path == above or path.startswith(above + "/"):
        relative = path[len(above) :]
    names = [name for name in relative.split("/") if name]
    if ".." in names:
        names = []
    point = Path(mount.point)
    if point.is_relative_to("/sys"):
        point = root / point.relative_to("/sys")
    return [point.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
