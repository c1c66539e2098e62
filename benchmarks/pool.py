r"""What the thread pool costs, and what it does under pressure; beside other pools.

python benchmarks/pool.py                                         # everything, about six minutes on 2 CPUs
python benchmarks/pool.py --only empty --highway ../highway       # with Highway's pool, from a checkout of it
python benchmarks/pool.py --only wait,intruder --plot pool.svg

empty     round trip of a dispatch with nothing to do, all CPUs, against OpenMP, at::parallel_for, pthreadpool
          (apt install libpthreadpool-dev) and Highway's ThreadPool (--highway)
wait      what a dispatcher costs that waits for its workers: parking after a bounded number of yields, and
          yielding on without bound, by number of workers and time of a shard
intruder  a dispatch of 3 ms beside another process on one CPU, by place and share of that CPU: late tasks run
          again (what the pool does), left alone, shares that are fixed beforehand, and real-time workers

The arms of a comparison live in one process and take turns, visit after visit. Times are microseconds of wall
time per dispatch: the median of all, and the 10th and 90th percentile. User and system time is the whole
process's, per dispatch: the median of the visits. Needs a C++ compiler and CMake.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
from machine import describe_machine
from report import machine_lines
from summary import percentile, percentiles
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "benchmarks"

EMPTY_VISITS, EMPTY_DISPATCHES = 15, 2000
WAIT_VISITS, WAIT_SECONDS = 8, 0.6
SHARDS_US = (0.0, 10.0, 100.0, 1000.0, 7000.0, 10000.0)
INTRUDER_VISITS, INTRUDER_DISPATCHES = 5, 200
PLACES = {"worker": "a worker's CPU", "caller": "the calling thread's CPU", "outside": "outside the pool"}
PERCENTS = (100, 50, 20)


@dataclass
class Measured:
    """All visits of one arm in one comparison; times in microseconds per dispatch."""

    arm: str
    wall: list[float] = field(default_factory=list)
    user: list[float] = field(default_factory=list)
    system: list[float] = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)
    intruder: list[float] = field(default_factory=list)

    @property
    def user_us(self) -> float:
        """Median of the visits."""
        return statistics.median(self.user)

    @property
    def system_us(self) -> float:
        """Mean of the visits: the kernel counts system time in ticks, so a visit may have none."""
        return statistics.fmean(self.system)

    def counter(self, name: str) -> float:
        """Mean of the visits, per dispatch."""
        return statistics.fmean(counters[name] for counters in self.counters)


@dataclass
class Comparison:
    """One run of the program: its arms by name, without and (where there is one) with the intruder."""

    mode: str
    arguments: tuple[str, ...]
    quiet: dict[str, Measured] = field(default_factory=dict)
    disturbed: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Takes in one line that the program has printed."""
        arm = record["arm"]
        if "skipped" in record:
            self.skipped[arm] = record["skipped"]
            return
        arms = self.disturbed if record.get("intruder") else self.quiet
        measured = arms.setdefault(arm, Measured(arm))
        measured.wall += record["wall_us"]
        measured.user.append(record["user_us"])
        measured.system.append(record["system_us"])
        measured.counters.append(record["counters"])
        measured.intruder.append(record["intruder_us"])


def build(highway: Path | None) -> Path:
    """Builds the program and returns it; exits with what failed."""
    if shutil.which("cmake") is None:
        sys.exit("no cmake: pip install cmake, or apt install cmake")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-DNUMA_MOE_TORCH={Path(torch.__file__).parent}"]
    options.append(f"-DNUMA_MOE_HIGHWAY={'' if highway is None else highway.resolve()}")
    for command in (
        ["cmake", *generator, "-S", str(HERE / "cpp"), "-B", str(BUILD), *options],
        ["cmake", "--build", str(BUILD), "--parallel", "--target", "pool_speed"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return BUILD / "pool_speed"


def run(program: Path, comparison: Comparison, progress: tqdm[Any], records: TextIO | None) -> None:
    """Runs one comparison and takes in what it prints."""
    command = [str(program), comparison.mode, *comparison.arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            record = json.loads(line)
            comparison.add(record)
            progress.update()
            if records is not None:
                where = {"mode": comparison.mode, "arguments": comparison.arguments}
                records.write(json.dumps({**where, **record}) + "\n")
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {process.returncode}")


def comparisons(only: Sequence[str], rounds: float) -> Iterator[Comparison]:
    """What to run; rounds: factor on the number of visits."""

    def visits(count: int) -> str:
        return str(max(1, round(count * rounds)))

    cpus = len(os.sched_getaffinity(0))
    if "empty" in only:
        yield Comparison("empty", (str(cpus), visits(EMPTY_VISITS), str(EMPTY_DISPATCHES)))
    if "wait" in only:
        for workers in widths(cpus):
            for shard_us in SHARDS_US:
                dispatches = min(2000, max(20, round(WAIT_SECONDS * 1e6 / max(shard_us, 1.0))))
                yield Comparison(
                    "wait", (str(workers), f"{shard_us:g}", visits(WAIT_VISITS), str(dispatches))
                )
    if "intruder" in only:
        for place in PLACES:
            for percent in PERCENTS:
                yield Comparison(
                    "intruder", (place, str(percent), visits(INTRUDER_VISITS), str(INTRUDER_DISPATCHES))
                )


def widths(cpus: int) -> list[int]:
    """Numbers of workers: powers of two, and all CPUs."""
    powers = [1 << power for power in range(cpus.bit_length()) if 1 << power < cpus]
    return [*powers, cpus]


def empty_lines(comparison: Comparison) -> list[str]:
    """One line per pool, the fastest first."""
    lines = [f"empty dispatch, {comparison.arguments[0]} threads"]
    lines.append(f"  {'pool':<30} {'us: p10':>8} {'median':>8} {'p90':>8} {'of the fastest':>15}")
    rows = sorted(comparison.quiet.values(), key=lambda measured: statistics.median(measured.wall))
    fastest = statistics.median(rows[0].wall)
    for measured in rows:
        p10, median, p90 = percentiles(measured.wall)
        ratio = f"{median / fastest:.2f} x"
        lines.append(f"  {measured.arm:<30} {p10:>8.2f} {median:>8.2f} {p90:>8.2f} {ratio:>15}")
    return lines


WAIT_HEADER = (
    f"  {'workers':>7} {'shard':>9}  {'dispatcher':<10} {'wall us: p10':>12} {'median':>9} {'p90':>9} "
    f"{'user us':>9} {'system us':>9} {'all CPU':>9} {'yields':>8} {'parks':>6}   "
    "wall, system: parks / yields on"
)


def wait_lines(comparison: Comparison) -> list[str]:
    """Both arms, and their ratio."""
    workers, shard_us = comparison.arguments[:2]
    parks, yields_on = comparison.quiet["parks"], comparison.quiet["yields on"]
    lines = []
    for measured in (parks, yields_on):
        p10, median, p90 = percentiles(measured.wall)
        all_us = measured.user_us + measured.system_us
        line = (
            f"  {workers:>7} {float(shard_us):>6.0f} us  {measured.arm:<10} "
            f"{p10:>12.1f} {median:>9.1f} {p90:>9.1f} "
            f"{measured.user_us:>9.1f} {measured.system_us:>9.2f} {all_us:>9.1f} "
            f"{measured.counter('yields'):>8.1f} {measured.counter('parks'):>6.2f}"
        )
        if measured is parks:
            wall = median / statistics.median(yields_on.wall)
            system = f"1/{yields_on.system_us / parks.system_us:.0f}" if parks.system_us > 0 else "none"
            line += f"   {wall:.3f}, {system}"
        lines.append(line)
    return lines


INTRUDER_HEADER = (
    f"  {'intruder on':<25} {'busy':>5}  {'arm':<12} {'quiet us: mean':>14} {'p99':>8}   "
    f"{'disturbed: mean':>15} {'p50':>8} {'p99':>8}   {'mean':>5} {'p99':>5} (times the quiet mean)"
)


def intruder_lines(comparison: Comparison) -> list[str]:
    """One line per arm."""
    place, percent = comparison.arguments[:2]
    lines = []
    for arm, quiet in comparison.quiet.items():
        disturbed = comparison.disturbed[arm]
        mean = statistics.fmean(quiet.wall)
        lines.append(
            f"  {PLACES[place]:<25} {percent:>4}%  {arm:<12} {mean:>14.0f} "
            f"{percentile(quiet.wall, 99):>8.0f}   {statistics.fmean(disturbed.wall):>15.0f} "
            f"{statistics.median(disturbed.wall):>8.0f} {percentile(disturbed.wall, 99):>8.0f}   "
            f"{statistics.fmean(disturbed.wall) / mean:>5.2f} "
            f"{percentile(disturbed.wall, 99) / mean:>5.2f}"
        )
    return lines


def draw(done: Sequence[Comparison], file: Path) -> None:
    """A panel for each kind of comparison that was made."""
    from matplotlib.figure import Figure

    panels = {"empty": _draw_empty, "wait": _draw_wait, "intruder": _draw_intruder}
    modes = [mode for mode in panels if any(comparison.mode == mode for comparison in done)]
    figure = Figure(figsize=(9, 4.5 * len(modes)), layout="constrained")
    for position, mode in enumerate(modes, 1):
        axes = figure.add_subplot(len(modes), 1, position)
        panels[mode](axes, [comparison for comparison in done if comparison.mode == mode])
    figure.savefig(file)


def _draw_empty(axes: Any, done: Sequence[Comparison]) -> None:
    rows = sorted(done[0].quiet.values(), key=lambda measured: -statistics.median(measured.wall))
    spread = [percentiles(measured.wall) for measured in rows]
    errors = [[p50 - p10 for p10, p50, _ in spread], [p90 - p50 for _, p50, p90 in spread]]
    colors = ["tab:blue" if measured.arm.startswith("numa_moe") else "tab:gray" for measured in rows]
    medians = [p50 for _, p50, _ in spread]
    axes.barh([measured.arm for measured in rows], medians, xerr=errors, color=colors)
    axes.set_xlabel("us per empty dispatch: median, 10th to 90th percentile")


def _draw_wait(axes: Any, done: Sequence[Comparison]) -> None:
    for arm, color in (("parks", "tab:blue"), ("yields on", "tab:gray")):
        for workers in dict.fromkeys(comparison.arguments[0] for comparison in done):
            points = [
                (float(comparison.arguments[1]), comparison.quiet[arm].system_us)
                for comparison in done
                if comparison.arguments[0] == workers
            ]
            width = 1 + 0.5 * widths(int(done[-1].arguments[0])).index(int(workers))
            axes.plot(
                *zip(*points, strict=True), "o-", color=color, lw=width, label=f"{arm}, {workers} worker(s)"
            )
    axes.set_xscale("symlog", linthresh=10)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("us per shard")
    axes.set_ylabel("system time of a dispatch, us")
    axes.legend(fontsize=8)


def _draw_intruder(axes: Any, done: Sequence[Comparison]) -> None:
    shades = {
        "run again": "tab:blue",
        "left alone": "tab:cyan",
        "fixed shares": "tab:gray",
        "fifo": "tab:green",
    }
    position = 0.0
    ticks: list[tuple[float, str]] = []
    for comparison in done:
        place, percent = comparison.arguments[:2]
        begin = position
        for arm, quiet in comparison.quiet.items():
            mean, wall = statistics.fmean(quiet.wall), comparison.disturbed[arm].wall
            label = arm if comparison is done[0] else None
            axes.bar(position, statistics.fmean(wall) / mean, color=shades[arm], label=label)
            axes.plot(position, percentile(wall, 99) / mean, "k_", markersize=8)
            position += 1
        ticks.append(((begin + position - 1) / 2, f"{PLACES[place]}\n{percent} %"))
        position += 1
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=7, rotation=30)
    axes.axhline(1.0, color="black", linewidth=0.5)
    axes.set_ylabel("time / quiet mean\n(bars: mean, marks: 99th percentile)")
    axes.legend(fontsize=8)


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if not set(modes) <= {"empty", "wait", "intruder"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of empty, wait, intruder")
    return modes


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below 1000")
    return value


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=_modes, default=["empty", "wait", "intruder"], help="a list of: empty,wait,intruder"
    )
    parser.add_argument("--rounds", type=_positive, default=1.0, help="factor on the visits (default: 1)")
    parser.add_argument("--highway", type=Path, metavar="FOLDER", help="a checkout of google/highway")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every visit, one JSON object a line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if arguments.highway is not None and not (arguments.highway / "hwy").is_dir():
        parser.error(f"--highway: {arguments.highway} has no folder hwy")
    plan = list(comparisons(arguments.only, arguments.rounds))
    if len(os.sched_getaffinity(0)) < 2:
        print("one CPU: no intruder can be set on one of several", file=sys.stderr)
        plan = [comparison for comparison in plan if comparison.mode != "intruder"]
    program = build(arguments.highway)
    print("\n".join(machine_lines(describe_machine())), flush=True)
    total = sum(len(_arms(comparison)) * int(comparison.arguments[-2]) for comparison in plan)
    records = None if arguments.json is None else arguments.json.open("w")
    headers = {"wait": WAIT_HEADER, "intruder": INTRUDER_HEADER}
    table = {"empty": empty_lines, "wait": wait_lines, "intruder": intruder_lines}
    with tqdm(total=total, unit="visit", disable=None) as progress:
        for comparison in plan:
            run(program, comparison, progress, records)
            header = headers.pop(comparison.mode, None)
            lines = [] if header is None else ["", header]
            lines += [f"  skipped: {arm}, {why}" for arm, why in comparison.skipped.items()]
            with tqdm.external_write_mode(file=sys.stdout):
                print("\n".join([*lines, *table[comparison.mode](comparison)]), flush=True)
    if records is not None:
        records.close()
    if arguments.plot is not None:
        draw(plan, arguments.plot)
    return 0


def _arms(comparison: Comparison) -> range:
    """As many as the comparison has lines per visit, at most."""
    return range({"empty": 8, "wait": 2, "intruder": 8}[comparison.mode])


if __name__ == "__main__":
    sys.exit(main())
