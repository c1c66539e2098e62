"""Workers that go before other programs on their CPUs: NUMA_MOE_SCHED."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sys_tree import MACHINES, read_machine
from system_call_filter import supported as can_filter
from torch_numa_moe.plan import MAX_REAL_TIME_SPIN_US, Plan, make_plan
from torch_numa_moe.settings import Settings

POLICIES = {"fifo": os.SCHED_FIFO, "rr": os.SCHED_RR, "normal": os.SCHED_OTHER}


def plan_with(folder: Path, settings: Settings, real_time_us: int | None = 950_000) -> Plan:
    topology, limits = read_machine(MACHINES["single socket"], folder)
    return make_plan(topology, replace(limits, real_time_us=real_time_us), settings)


@pytest.mark.parametrize("sched", ["fifo", "rr"])
@pytest.mark.parametrize("real_time_us", [950_000, None])
def test_asked_for(tmp_path: Path, sched: str, real_time_us: int | None) -> None:
    plan = plan_with(tmp_path, Settings(sched=sched, spin_us=500_000), real_time_us)
    assert plan.scheduling == sched
    assert plan.worker_spin_us == MAX_REAL_TIME_SPIN_US
    assert f"workers go before other programs on their CPUs: NUMA_MOE_SCHED={sched}" in plan.reasons


@pytest.mark.parametrize("settings", [Settings(), Settings(sched="normal")])
def test_not_asked_for(tmp_path: Path, settings: Settings) -> None:
    plan = plan_with(tmp_path, replace(settings, spin_us=500_000), real_time_us=-1)
    assert plan.scheduling == "normal"
    assert plan.worker_spin_us == 500_000
    assert not any("SCHED" in text for text in (*plan.reasons, *(line.text for line in plan.log_lines)))


def test_refused_where_the_kernel_sets_no_bound(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, Settings(sched="fifo"), real_time_us=-1)
    assert plan.scheduling == "normal"
    [line] = [line for line in plan.log_lines if "SCHED" in line.text]
    assert line.level == logging.WARNING
    assert line.text.startswith("NUMA_MOE_SCHED=fifo is not done: kernel.sched_rt_runtime_us is -1")
    assert "sysctl -w kernel.sched_rt_runtime_us=950000" in line.text


def test_refused_without_pinned_workers(tmp_path: Path) -> None:
    topology, limits = read_machine(MACHINES["single socket"], tmp_path)
    plan = make_plan(topology, limits, Settings(sched="rr"), unpinnable="a sandbox")
    assert plan.scheduling == "normal"
    assert "NUMA_MOE_SCHED=rr is not done: no worker has a CPU of its own" in plan.reasons


def run(script: str, *prefix: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that logs, with some variables set."""
    preamble = "import logging, os, torch, torch_numa_moe\nlogging.basicConfig(level=logging.INFO)\n"
    return subprocess.run(
        [*prefix, sys.executable, "-c", preamble + textwrap.dedent(script)],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )


def permitted() -> bool:
    """Whether a process here may have real-time threads, and the pool pins workers."""
    script = (
        "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(1)))"
    )
    granted = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    unbounded = Path("/proc/sys/kernel/sched_rt_runtime_us")
    return (
        granted.returncode == 0
        and len(os.sched_getaffinity(0)) > 1
        and not (unbounded.exists() and unbounded.read_text().strip() == "-1")
    )


SHOW = """
    layer = torch_numa_moe.pack_experts(torch.ones(1, 2, 1), torch.ones(1, 1, 1))
    layer(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    from torch_numa_moe import _C
    print([os.sched_getscheduler(worker.thread_id) & ~os.SCHED_RESET_ON_FORK for worker in _C.workers()])
    print([os.sched_getparam(worker.thread_id).sched_priority for worker in _C.workers()])
    print(os.sched_getscheduler(0))
"""


@pytest.mark.parametrize("sched", ["fifo", "rr"])
def test_workers_have_it_and_nobody_else(sched: str) -> None:
    """Read back from the kernel: at the lowest priority; the calling thread stays as it is."""
    if not permitted():
        pytest.skip("real-time scheduling is not permitted here")
    done = run(SHOW, NUMA_MOE_SCHED=sched)
    policies, priorities, own = done.stdout.splitlines()
    assert set(json.loads(policies)) == {POLICIES[sched]}
    assert set(json.loads(priorities)) == {1}
    assert int(own) == os.SCHED_OTHER
    assert f"workers go before other programs on their CPUs (SCHED_{sched.upper()})" in done.stderr


def test_one_line_where_it_is_not_permitted() -> None:
    if not can_filter() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a filter of system calls, and a worker to pin")
    here = Path(__file__).parent / "system_call_filter.py"
    done = run(
        SHOW, sys.executable, str(here), "sched_setscheduler", "--", NUMA_MOE_SCHED="fifo", NUMA_MOE_SPLIT="0"
    )
    assert set(json.loads(done.stdout.splitlines()[0])) == {os.SCHED_OTHER}
    lines = [line for line in done.stderr.splitlines() if "NUMA_MOE_SCHED" in line]
    assert len(lines) == 1, done.stderr
    assert "NUMA_MOE_SCHED=fifo is not permitted (Operation not permitted)" in lines[0]
    assert "CAP_SYS_NICE" in lines[0]
    assert "ulimit -r" in lines[0]


def test_not_on_threads_that_could_not_be_pinned() -> None:
    """One that wanders would keep others off any CPU."""
    if not permitted():
        pytest.skip("real-time scheduling is not permitted here")
    done = run(
        """
        from torch_numa_moe import _C
        options = _C.PoolOptions()
        options.cpus_per_group = [[-1, 4095]]
        options.scheduling = _C.Scheduling.FIFO
        _C.start(options, [-1], "portable")
        print(*[(worker.scheduling.name, worker.scheduling_error) for worker in _C.workers()])
        """
    )
    assert done.stdout == "('NORMAL', 0) ('NORMAL', 0)\n"


def test_the_process_can_be_interrupted() -> None:
    """Workers on every CPU, always busy, before everybody else: SIGINT and SIGTERM still come through."""
    if not permitted():
        pytest.skip("real-time scheduling is not permitted here")
    script = """
        import signal, torch, torch_numa_moe
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        layer = torch_numa_moe.pack_experts(torch.randn(8, 512, 256), torch.randn(8, 256, 256))
        many = torch.randn(2048, 256), torch.randint(0, 8, (2048, 4)), torch.rand(2048, 4)
        layer(*many)
        print("here", flush=True)
        while True:
            layer(*many)
    """
    environment = os.environ | {
        "NUMA_MOE_SCHED": "fifo",
        "NUMA_MOE_WORKERS": str(len(os.sched_getaffinity(0))),
        "NUMA_MOE_SPIN_US": "1000000",
    }
    for number, status in ((signal.SIGINT, {-signal.SIGINT, 1}), (signal.SIGTERM, {-signal.SIGTERM})):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"here\n"
                time.sleep(1)
                process.send_signal(number)
                assert process.wait(timeout=30) in status
            finally:
                process.kill()
