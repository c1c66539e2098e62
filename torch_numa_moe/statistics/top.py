"""``python -m torch_numa_moe top``: the statistics of a running process, live."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from torch_numa_moe.statistics.server import ask
from torch_numa_moe.statistics.snapshot import Statistics

CLEAR = "\033[H\033[2J"

PATIENCE_SECONDS = 0.2
"""Between two attempts while a program that was started here has no pool yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command line."""
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="show the totals since the pool started, and end")
    parser.add_argument(
        "--prometheus", action="store_true", help="the same in Prometheus's text format, and end"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="at the end, draw heat maps of the totals (needs matplotlib)",
    )
    parser.add_argument(
        "target", metavar="PID|COMMAND", help="a process that uses torch_numa_moe, or a program to run"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: of the program, where one was run."""
    if arguments.plot is not None and find_spec("matplotlib") is None:
        print('--plot needs matplotlib: pip install "torch_numa_moe[plot]"', file=sys.stderr)
        return 2
    if not arguments.target.isdecimal():
        return _watch_program(arguments)
    if arguments.arguments:
        print(f"nothing may follow a process number, got {' '.join(arguments.arguments)}", file=sys.stderr)
        return 2
    return _watch_process(int(arguments.target), arguments)


def _watch_process(pid: int, arguments: argparse.Namespace) -> int:
    try:
        latest = Statistics.from_json(ask(pid))
    except (ConnectionError, ValueError) as error:
        print(_why_silent(pid, error), file=sys.stderr)
        return 1
    if arguments.prometheus:
        sys.stdout.write(latest.prometheus())
    elif arguments.once:
        print(latest)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            for shown in _intervals(pid, latest, arguments.interval):
                latest = shown
    if arguments.plot is not None:
        latest.plot(arguments.plot)
    return 0


def _intervals(pid: int, before: Statistics, interval: float) -> Iterator[Statistics]:
    """Shows what came in each interval, and yields the totals, until the process is gone."""
    while True:
        time.sleep(interval)
        now = _ask_if_ready(pid)
        if now is None:
            return
        _show(pid, now.since(before))
        yield now
        before = now


def _show(pid: int, statistics: Statistics) -> None:
    text = f"process {pid}, the last {statistics.seconds:.3g} s: {statistics}"
    # Programs that are run here print to stdout, so this goes to stderr.
    if sys.stderr.isatty():
        height = shutil.get_terminal_size().lines
        text = CLEAR + "\n".join(text.splitlines()[: max(1, height - 1)])
    print(text, file=sys.stderr, flush=True)


def _watch_program(arguments: argparse.Namespace) -> int:
    if arguments.once or arguments.prometheus:
        print("--once and --prometheus take the number of a process that runs", file=sys.stderr)
        return 2
    try:
        process = subprocess.Popen([arguments.target, *arguments.arguments])
    except OSError as error:
        print(f"can't run {arguments.target}: {error.strerror}", file=sys.stderr)
        return 127
    latest: Statistics | None = None
    while process.poll() is None:
        # The program is interrupted as well; it may have something to do before it ends.
        with contextlib.suppress(KeyboardInterrupt):
            before, latest = latest, _ask_if_ready(process.pid) or latest
            if latest is None or latest is before:
                time.sleep(PATIENCE_SECONDS)
                continue
            if before is not None:
                _show(process.pid, latest.since(before))
            time.sleep(arguments.interval)
    if latest is None:
        print(f"process {process.pid} never had a pool that answered", file=sys.stderr)
    else:
        print(f"\nup to the end of process {process.pid}: {latest}", file=sys.stderr)
        if arguments.plot is not None:
            latest.plot(arguments.plot)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _ask_if_ready(pid: int) -> Statistics | None:
    try:
        return Statistics.from_json(ask(pid))
    except (ConnectionError, ValueError):
        return None


def _why_silent(pid: int, error: Exception) -> str:
    if isinstance(error, ValueError):
        return f"process {pid}: {error}"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"there is no process {pid}"
    except PermissionError:
        return f"process {pid} is another user's"
    return (
        f"process {pid} has no pool of torch_numa_moe that answers ({error}): it starts with the first call, "
        "and doesn't answer under NUMA_MOE_WATCH=0 or in another container"
    )
