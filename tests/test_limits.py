"""What the process may use: affinity, memory nodes, control groups of both versions."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from sys_tree import MACHINES, write, write_tree
from torch_numa_moe.cgroup import CgroupLimits, read_cgroup_limits
from torch_numa_moe.limits import read_limits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VERSION_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


def cgroup_limits(tmp_path: Path, mounts: str, groups: str, files: dict[str, str]) -> CgroupLimits:
    root, proc = tmp_path / "sys", tmp_path / "proc"
    write(proc / "self/mountinfo", "23 1 0:21 / / ro - ext4 /dev/root ro\n" + mounts)
    write(proc / "self/cgroup", groups)
    for name, text in files.items():
        write(root / "fs/cgroup" / name, text)
    limits = read_cgroup_limits(root, proc)
    # Names without the made-up part, to compare.
    strip = f"{root}/fs/cgroup/"
    return CgroupLimits(
        limits.cpu_quota,
        limits.cpu_quota_source.removeprefix(strip),
        limits.memory_bytes,
        limits.memory_source.removeprefix(strip),
    )


def test_mask_and_memory_nodes(tmp_path: Path) -> None:
    root, proc = write_tree(MACHINES["memory of one node"], tmp_path)
    limits = read_limits(root, proc, get_affinity=lambda _pid: {5, 1, 3})
    assert limits.cpus == (1, 3, 5)
    assert limits.cpus_source == "sched_getaffinity"
    assert limits.memory_nodes == (0,)
    assert limits.cpu_quota is None
    assert limits.memory_bytes is None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EINVAL, "Invalid argument"),
        OSError(errno.EPERM, "no"),
        OverflowError("too large"),
        MemoryError(),
    ],
)
def test_refused_affinity(error: Exception, tmp_path: Path) -> None:
    """Case mask-too-small: another source, and it is named."""
    root, proc = write_tree(MACHINES["host's /sys"], tmp_path)

    def refuse(_pid: int) -> Iterable[int]:
        raise error

    limits = read_limits(root, proc, get_affinity=refuse)
    assert limits.cpus == (3, 5)
    assert limits.cpus_source.startswith("/proc/self/status, since sched_getaffinity failed (")
    nothing = read_limits(tmp_path / "none", tmp_path / "none", get_affinity=refuse)
    assert nothing.cpus is None
    assert nothing.memory_nodes is None
    assert nothing.cpus_source.startswith("nothing: sched_getaffinity failed (")


def test_this_process() -> None:
    limits = read_limits()
    assert limits.cpus is not None
    assert set(limits.cpus) == os.sched_getaffinity(0)


def test_no_control_groups(tmp_path: Path) -> None:
    assert read_cgroup_limits(tmp_path, tmp_path) == CgroupLimits()
    assert cgroup_limits(tmp_path, "", "", {}) == CgroupLimits()


def test_version_2(tmp_path: Path) -> None:
    files = {"a/cpu.max": "150000 100000", "a/memory.max": "8589934592"}
    expected = CgroupLimits(1.5, "a/cpu.max", 8 << 30, "a/memory.max")
    assert cgroup_limits(tmp_path, VERSION_2, "0::/a", files) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", None),
        ("max", None),
        ("50000", 0.5),
        ("400000 100000", 4),
        ("25000 50000", 0.5),
        ("", None),
        ("-1 100000", None),
        ("100000 0", None),
        ("some 100000", None),
    ],
)
def test_version_2_quota(text: str, expected: float | None, tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path, VERSION_2, "0::/a", {"a/cpu.max": text}).cpu_quota == expected


def test_the_tightest_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "a/cpu.max": "200000 100000",
        "a/b/cpu.max": "800000 100000",
        "a/b/c/cpu.max": "max 100000",
        "a/b/memory.max": "2000",
        "a/b/c/memory.max": "3000",
        "memory.max": "max",
        "a/other/cpu.max": "1000 100000",
    }
    expected = CgroupLimits(2, "a/cpu.max", 2000, "a/b/memory.max")
    assert cgroup_limits(tmp_path, VERSION_2, "0::/a/b/c", files) == expected


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
        "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/m:x/memory.limit_in_bytes": "1073741824",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    groups = "5:memory:/m:x\n4:cpu,cpuacct:/a\n1:name=systemd:/\n0::/"
    expected = CgroupLimits(3, "cpu,cpuacct/a/cpu.cfs_quota_us", 1 << 30, "memory/m:x/memory.limit_in_bytes")
    assert cgroup_limits(tmp_path, CPU + "\n" + MEMORY, groups, files) == expected


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    limits = cgroup_limits(tmp_path, CPU + "\n" + MEMORY, "5:memory:/\n4:cpu,cpuacct:/", files)
    assert limits == CgroupLimits()


def test_container_whose_mount_is_its_own_group(tmp_path: Path) -> None:
    mount = "40 23 0:29 /docker/1234 /sys/fs/cgroup ro - cgroup2 cgroup ro"
    files = {"cpu.max": "100000 100000", "docker/1234/cpu.max": "10 100000"}
    limits = cgroup_limits(tmp_path, mount, "0::/docker/1234", files)
    assert (limits.cpu_quota, limits.cpu_quota_source) == (1, "cpu.max")
    deeper = cgroup_limits(tmp_path, mount, "0::/docker/1234/inner", {"inner/cpu.max": "50000 100000"})
    assert (deeper.cpu_quota, deeper.cpu_quota_source) == (0.5, "inner/cpu.max")


@pytest.mark.parametrize("group", ["0::/../..", "0::/docker/12345", "0::/elsewhere", "0::/"])
def test_path_that_is_not_below_the_mount(group: str, tmp_path: Path) -> None:
    mount = "40 23 0:29 /docker/1234 /sys/fs/cgroup ro - cgroup2 cgroup ro"
    limits = cgroup_limits(tmp_path, mount, group, {"cpu.max": "100000 100000"})
    assert (limits.cpu_quota, limits.cpu_quota_source) == (1, "cpu.max")


def test_both_versions_at_once(tmp_path: Path) -> None:
    mounts = f"{CPU}\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files = {
        "cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
        "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "unified/b/memory.max": "4096",
    }
    limits = cgroup_limits(tmp_path, mounts, "4:cpu,cpuacct:/a\n0::/b", files)
    assert (limits.cpu_quota, limits.memory_bytes) == (3, 4096)


def test_lines_that_make_no_sense(tmp_path: Path) -> None:
    limits = cgroup_limits(
        tmp_path, f"nonsense\n1 2 - cgroup2\n{VERSION_2}", "?\n0::/a\n", {"a/cpu.max": "1 1"}
    )
    assert limits.cpu_quota == 1
