"""For a guest: what a child process finds under some settings, masks and refusals, as lines of JSON.

    python tests/guest_cases.py CASE...

Each case runs in a process of its own, forked once torch is imported, since that takes long in an emulated
machine.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import torch_numa_moe
from reference import Layer, random_layer, random_routing
from system_call_filter import deny_system_calls
from torch_numa_moe import _C, PackedExperts, pack_experts
from torch_numa_moe.page_cache import release_files
from torch_numa_moe.topology import read_topology

SPLITS = ("unset", "0", "1", "test")
MASKS = {"all CPUs": (0, 1, 2, 3), "CPUs 0-1": (0, 1)}
MIB = 1 << 20

_log: list[tuple[int, str]] = []


class _Collector(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log.append((record.levelno, record.getMessage()))


def lines(text: str) -> list[str]:
    """What was logged that holds a text."""
    return [line for _, line in _log if text in line]


def in_child(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case returns, run in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _log.clear()
            found = case()
        except BaseException:  # noqa: BLE001  (whatever it is, the parent is to see it)
            found = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    found = json.loads(text) if text else {"error": "the process ended without a word"}
    return {**found, "status": os.waitstatus_to_exitcode(status)}


def layer_and_input(experts: int = 8) -> tuple[Layer, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The same for every process."""
    torch.manual_seed(0)
    layer = random_layer(experts, 512, 384)
    ids, weights = random_routing(5, 2, experts)
    return layer, (torch.randn(5, 512), ids, weights)


def bits(values: torch.Tensor) -> str:
    """Something short to compare."""
    return values.contiguous().view(torch.uint8).numpy().tobytes().hex()[:4096]


def local_shares(packed: PackedExperts) -> list[list[Any]]:
    """Node and share of each slice."""
    return [[one.node, one.local_share] for one in packed.placement]


def plan_and_run() -> dict[str, Any]:
    """The plan of this process as it is, and what the op does under it."""
    plan = torch_numa_moe.plan()
    layer, inputs = layer_and_input()
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    out = packed(*inputs)
    return {
        "groups": [[group.node, list(group.worker_cpus)] for group in plan.groups],
        "split": plan.split,
        "host": plan.host_cpu,
        "reasons": plan.reasons,
        "log": _log,
        "placement": local_shares(packed),
        "pinned": all(worker.pinned for worker in _C.workers()),
        "bits": bits(out),
    }


def with_split(split: str, mask: tuple[int, ...] = MASKS["all CPUs"]) -> Callable[[], dict[str, Any]]:
    """plan_and_run under a setting and an affinity mask."""

    def case() -> dict[str, Any]:
        if split != "unset":
            os.environ["NUMA_MOE_SPLIT"] = split
        os.sched_setaffinity(0, mask)
        return plan_and_run()

    return case


def table() -> Iterator[dict[str, Any]]:
    """Every setting under every mask."""
    for name, cpus in MASKS.items():
        for split in SPLITS:
            yield {"mask": name, "setting": split, **in_child(with_split(split, cpus))}


def refusals() -> Iterator[dict[str, Any]]:
    """The kernel refuses some system calls, or only seems to do what it is told."""
    memory = ("mbind", "set_mempolicy", "get_mempolicy", "move_pages", "migrate_pages")
    cases = {
        "memory calls EPERM": (memory, errno.EPERM),
        "move_pages EPERM": (("move_pages",), errno.EPERM),
        "everything ENOSYS": ((*memory, "sched_setaffinity"), errno.ENOSYS),
        "affinity EPERM": (("sched_setaffinity",), errno.EPERM),
        "affinity pretends": (("sched_setaffinity",), 0),
    }
    for name, (calls, error) in cases.items():

        def case(calls: tuple[str, ...] = calls, error: int = error) -> dict[str, Any]:
            deny_system_calls(calls, error)
            layer, _ = layer_and_input()
            # Twice: what is said is said once.
            pack_experts(layer.gate_up_proj, layer.down_proj)
            return plan_and_run()

        yield {"case": name, **in_child(case)}


@contextmanager
def cached_file(node: int, size: int) -> Iterator[Path]:
    """A file of which size bytes are in the page cache, on a node."""
    cpus = next(found.cpus for found in read_topology().nodes if found.id == node)
    before = os.sched_getaffinity(0)
    with tempfile.NamedTemporaryFile(dir=disk()) as file:
        block = os.urandom(MIB)
        for _ in range(size // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        release_files([file.name])
        os.sched_setaffinity(0, cpus)  # page cache comes from the node of the thread that reads
        try:
            with Path(file.name).open("rb", buffering=0) as reader:
                while reader.read(MIB):
                    pass
        finally:
            os.sched_setaffinity(0, before)
        yield Path(file.name)


def disk() -> Path:
    """A folder on the guest's disk: its other files are in its memory, and not in a page cache."""
    folder = Path("/mnt")
    if not folder.is_mount():
        subprocess.run(["/sbin/modprobe", "-a", "virtio_blk", "ext4"], check=True)
        subprocess.run(["/sbin/mkfs.ext4", "-q", "-F", "/dev/vda"], check=True)
        subprocess.run(["/bin/mount", "-t", "ext4", "/dev/vda", folder], check=True)
    return folder


def node_memory(node: int) -> tuple[int, int]:
    """Free and cached bytes of a node."""
    found = next(one for one in read_topology().nodes if one.id == node)
    return found.free_bytes or 0, found.cached_bytes or 0


def large_layer(slice_mib: int, slices: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer whose bf16 slices take so many MiB each; its originals take next to no memory."""
    hidden, intermediate = 1024, 512
    experts = slice_mib * slices // 3  # 3 MiB an expert
    # Views of one expert, as often as there are experts.
    gate_up = (torch.randn(1, 2 * intermediate, hidden) / 32).bfloat16().expand(experts, -1, -1)
    down = (torch.randn(1, hidden, intermediate) / 32).bfloat16().expand(experts, -1, -1)
    return gate_up, down


def tight() -> Iterator[dict[str, Any]]:
    """Node 1 has little memory: what is said before, what is found after, and what releasing a file mends."""
    share = node_memory(1)[0] // MIB * 6 // 10

    def fits() -> dict[str, Any]:
        packed = pack_experts(*large_layer(share))
        return {"placement": local_shares(packed), "log": _log}

    def overfull() -> dict[str, Any]:
        packed = pack_experts(*large_layer(2 * share))
        out = packed(torch.ones(2, 1024), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
        return {"placement": local_shares(packed), "log": _log, "finite": bool(out.isfinite().all())}

    def beside_page_cache(release: bool) -> Callable[[], dict[str, Any]]:
        def case() -> dict[str, Any]:
            with cached_file(1, node_memory(1)[0] * 7 // 10) as file:
                free, cached = node_memory(1)
                # Without mbind the kernel takes another node's free memory rather than drop a cached page.
                deny_system_calls(("mbind",))
                if release:
                    release_files([file])
                packed = pack_experts(*large_layer(share))
                return {"placement": local_shares(packed), "log": _log, "free": free, "cached": cached}

        return case

    yield {"case": "fits", "share": share, **in_child(fits)}
    yield {"case": "overfull", **in_child(overfull)}
    yield {"case": "page cache", **in_child(beside_page_cache(release=False))}
    yield {"case": "page cache released", **in_child(beside_page_cache(release=True))}


def memory_returns() -> Iterator[dict[str, Any]]:
    """Every node's free memory before, with and after packed experts."""

    def case() -> dict[str, Any]:
        nodes = [node.id for node in read_topology().nodes if node.has_memory]
        warm = pack_experts(*large_layer(6, len(nodes)))
        warm(torch.ones(2, 1024), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
        gc.collect()  # gives this forked process its own copies of all objects
        before = {node: node_memory(node)[0] for node in nodes}
        packed = pack_experts(*large_layer(240, len(nodes)))
        packed(torch.ones(2, 1024), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
        size = packed.nbytes
        during = {node: node_memory(node)[0] for node in nodes}
        placement = local_shares(packed)
        del packed
        gc.collect()
        # Freed pages sit in lists of each CPU, which aren't counted as free, until the kernel drains them.
        for _ in range(20):
            Path("/proc/sys/vm/compact_memory").write_text("1")
            after = {node: node_memory(node)[0] for node in nodes}
            if all(abs(before[node] - after[node]) < 0.02 * size for node in nodes):
                break
            time.sleep(1)
        return {"bytes": size, "before": before, "during": during, "after": after, "placement": placement}

    yield in_child(case)


def hotplug() -> Iterator[dict[str, Any]]:
    """A worker's CPU is taken offline while calls run, and comes back."""

    def case() -> dict[str, Any]:
        layer, inputs = layer_and_input()
        packed = pack_experts(layer.gate_up_proj, layer.down_proj)
        expected = packed(*inputs)
        cpu = torch_numa_moe.plan().groups[-1].worker_cpus[-1]
        stop = threading.Event()
        wrong = calls = 0

        def call() -> None:
            nonlocal wrong, calls
            while not stop.is_set():
                wrong += not torch.equal(packed(*inputs), expected)
                calls += 1

        caller = threading.Thread(target=call)
        caller.start()
        switch = Path(f"/sys/devices/system/cpu/cpu{cpu}/online")
        counts = []
        for state in ("0", "1"):
            before = calls
            switch.write_text(state)
            time.sleep(3)
            counts.append(calls - before)
        stop.set()
        caller.join(60)
        torch_numa_moe.stop()
        again = torch.equal(packed(*inputs), expected)  # a pool started anew
        return {"cpu": cpu, "wrong": wrong, "calls": counts, "hangs": caller.is_alive(), "again": again}

    yield in_child(case)


def memory_limit() -> Iterator[dict[str, Any]]:
    """A memory control group that leaves less than the weights need."""

    def case() -> dict[str, Any]:
        group = Path("/sys/fs/cgroup/numa-moe-test")
        parent = group.parent
        (parent / "cgroup.subtree_control").write_text("+memory")
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(str(2048 * MIB))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        plenty = pack_experts(*large_layer(60))
        quiet = list(_log)
        del plenty
        held = torch.ones(1500 * MIB // 4)
        # More than is left; what is packed then is less, or the kernel would end the process.
        torch_numa_moe.runtime.check_room([400 * MIB] * torch_numa_moe.plan().num_slices)
        packed = pack_experts(*large_layer(60))
        out = packed(torch.ones(2, 1024), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
        return {"quiet": quiet, "log": _log, "finite": bool(out.isfinite().all()), "held": held.numel()}

    yield in_child(case)


def no_huge_pages() -> Iterator[dict[str, Any]]:
    """Transparent huge pages off, and a memory lock limit of nothing."""

    def case() -> dict[str, Any]:
        import resource

        Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("never")
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        found = plan_and_run()
        packed = pack_experts(*large_layer(60))
        pack_experts(*large_layer(60))
        return {**found, "log": _log, "huge": [one.huge_page_share for one in packed.placement]}

    yield in_child(case)


CASES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    case.__name__: case
    for case in (table, refusals, tight, memory_returns, hotplug, memory_limit, no_huge_pages)
}


def main() -> None:
    """Prints a line of JSON per process that a case ran."""
    torch_numa_moe.placement.logger.addHandler(_Collector())
    torch_numa_moe.placement.logger.setLevel(logging.INFO)
    for name in sys.argv[1:]:
        for found in CASES[name]():
            print(json.dumps({"cases": name, **found}), flush=True)


if __name__ == "__main__":
    main()
