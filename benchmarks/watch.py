r"""Whether the watch names intruders in time, keeps quiet otherwise, and what an idle pool costs.

python benchmarks/watch.py                              # twenty intruders, ten quiet minutes, one idle minute
python benchmarks/watch.py --tries 5 --quiet 0 --idle 0

tries  a busy program is started on a worker's CPU while the op is called all the time: how long until a
       warning names its process. Each try has a program of its own.
quiet  no such program; calls for half of the time. Every warning is printed: on a machine that does nothing
       else there should be none.
idle   from one second after the last call: the CPU time of all of the process's threads.

The watch's own CPU time is that of its thread, over everything.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from machine import describe_machine
from report import machine_lines
from tqdm import tqdm

import torch_numa_moe

MOST_SECONDS = 10.0
BETWEEN_TRIES = 2.0
PROGRAM = """
import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
print("here", flush=True)
while True: pass
"""


class Warnings(logging.Handler):
    """What was logged as a warning, and when."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        self.lines.append((time.monotonic(), record.getMessage()))


class Calls:
    """A layer that is small enough to be called thousands of times a second."""

    def __init__(self) -> None:
        gate_up, down = torch.randn(8, 2 * 512, 512) / 23, torch.randn(8, 512, 512) / 23
        self.packed = torch_numa_moe.pack_experts(gate_up, down)
        self.inputs = (torch.randn(1, 512), torch.tensor([[0, 5]]), torch.ones(1, 2))

    def go_on(self, seconds: float) -> None:
        """Calls for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.packed(*self.inputs)


def watch_seconds() -> float:
    """CPU time of the watch's thread so far."""
    for thread in threading.enumerate():
        if thread.name == "numa_moe/watch":
            accounts = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            with contextlib.suppress(OSError):
                return int(accounts.read_text().split()[0]) / 1e9
    return 0.0


def one_try(calls: Calls, warnings: Warnings, cpu: int) -> float | None:
    """Seconds until the program is named, or None."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(cpu)], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()
            begin = time.monotonic()
            while time.monotonic() < begin + MOST_SECONDS:
                calls.go_on(0.02)
                for when, line in warnings.lines:
                    if f"process {program.pid} " in line and f"CPUs {cpu}," in line:
                        return when - begin
            return None
        finally:
            program.kill()


def main(argv: list[str] | None = None) -> int:
    """The command line; returns 1 if a program wasn't named within two seconds, or a warning was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="watch.py"
    )
    parser.add_argument("--tries", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--quiet", type=float, default=10, help="minutes; default: %(default)s")
    parser.add_argument("--idle", type=float, default=60, help="seconds; default: %(default)s")
    arguments = parser.parse_args(argv)
    warnings = Warnings()
    logger = logging.getLogger("torch_numa_moe")
    logger.addHandler(warnings)
    logger.propagate = False
    torch.set_num_threads(1)
    calls = Calls()
    calls.go_on(2)
    workers = [cpu for group in torch_numa_moe.plan().groups for cpu in group.worker_cpus if cpu >= 0]
    if not workers:
        sys.exit("no worker is pinned to a CPU here")
    print("\n".join(machine_lines(describe_machine())))
    begin, used = time.monotonic(), watch_seconds()
    delays: list[float | None] = []
    before = len(warnings.lines)
    for number in tqdm(range(arguments.tries), desc="tries", disable=not sys.stderr.isatty()):
        delays.append(one_try(calls, warnings, workers[number % len(workers)]))
        calls.go_on(BETWEEN_TRIES)
    named = [delay for delay in delays if delay is not None]
    late = sum(delay is None or delay > 2 for delay in delays)
    wrong = max(0, len(warnings.lines) - before - len(named))
    if named:
        print(
            f"tries: {len(named)} of {len(delays)} named, within {statistics.median(named):.2f} s (median), "
            f"{max(named):.2f} s (longest); {wrong} other warnings"
        )
    before = len(warnings.lines)
    end = time.monotonic() + 60 * arguments.quiet
    while time.monotonic() < end:
        calls.go_on(0.5)
        time.sleep(0.5)
    quiet = warnings.lines[before:]
    if arguments.quiet > 0:
        print(f"quiet: {len(quiet)} warnings in {arguments.quiet:g} minutes")
    for _, line in quiet:
        print(f"  {line}")
    if arguments.idle > 0:
        time.sleep(1)
        idle_begin, idle_used = time.monotonic(), time.process_time()
        time.sleep(arguments.idle)
        share = (time.process_time() - idle_used) / (time.monotonic() - idle_begin)
        print(f"idle: {100 * share:.2f} % of one CPU, all threads of the process, over {arguments.idle:g} s")
    share = (watch_seconds() - used) / (time.monotonic() - begin)
    print(f"watch: {100 * share:.3f} % of one CPU, over {time.monotonic() - begin:.0f} s")
    return 1 if late or quiet else 0


if __name__ == "__main__":
    os.environ.setdefault("NUMA_MOE_WATCH", "1")
    sys.exit(main())
