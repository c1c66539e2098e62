"""benchmarks/pool.py: what it makes of the program's lines, and a short run of the program itself."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import pool  # noqa: E402


def record(
    arm: str, wall_us: list[float], system_us: float = 1.0, intruder: bool = False
) -> dict[str, object]:
    counters = {"yields": 3.0, "parks": 0.5}
    times = {"wall_us": wall_us, "user_us": 2.0, "system_us": system_us}
    return {"arm": arm, **times, "counters": counters, "intruder": intruder, "intruder_us": 0.0}


def compared(mode: str, *arguments: str, records: list[dict[str, object]]) -> pool.Comparison:
    comparison = pool.Comparison(mode, arguments)
    for made_up in records:
        comparison.add(made_up)
    return comparison


EMPTY = compared(
    "empty", "2", "1", "3",
    records=[record("slow", [3.0, 4.0, 5.0]), record("numa_moe", [2.0]), {"arm": "absent", "skipped": "why"}],
)  # fmt: skip
WAIT = compared(
    "wait", "1", "7000", "1", "2",
    records=[record("parks", [102.0, 102.0], system_us=5.0), record("yields on", [100.0], system_us=100.0)],
)  # fmt: skip
INTRUDER = compared(
    "intruder", "worker", "50", "1", "4",
    records=[record("run again", [1.0, 3.0]), record("run again", [3.0, 3.0, 4.0, 6.0], intruder=True)],
)  # fmt: skip


def test_visits_of_an_arm_are_put_together() -> None:
    comparison = compared("empty", "2", records=[record("a", [1.0, 2.0], 4.0), record("a", [3.0], 8.0)])
    assert comparison.quiet["a"].wall == [1.0, 2.0, 3.0]
    assert comparison.quiet["a"].system_us == 6.0
    assert not comparison.disturbed
    assert EMPTY.skipped == {"absent": "why"}


def test_the_fastest_pool_comes_first_and_is_the_measure() -> None:
    first, second = pool.empty_lines(EMPTY)[2:]
    assert first.split()[0] == "numa_moe"
    assert first.endswith("1.00 x")
    assert second.split()[0] == "slow"
    assert second.endswith("2.00 x")


def test_waiting_is_compared_with_yielding_on() -> None:
    parks, yields_on = pool.wait_lines(WAIT)
    assert parks.endswith("1.020, 1/20")
    assert "yields on" in yields_on


def test_intruder_is_told_in_times_of_the_quiet_mean() -> None:
    (line,) = pool.intruder_lines(INTRUDER)
    assert "a worker's CPU" in line
    assert line.split()[-2:] == ["2.00", "3.00"]


def test_widths_are_powers_of_two_and_all() -> None:
    assert [pool.widths(cpus) for cpus in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_plot_has_a_panel_for_each_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "pool.svg"
    pool.draw([EMPTY, WAIT, INTRUDER], file)
    text = file.read_text()
    for label in ("empty dispatch", "system time of a dispatch", "quiet mean"):
        assert label in text, label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "'speed' is not a list of empty, wait, intruder"),
        (["--rounds", "0"], "'0' is not a number above 0"),
        (["--highway", "/nowhere"], "/nowhere has no folder hwy"),
    ],
)
def test_refuses_what_it_does_not_know(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pool.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("cmake") is None, reason="builds the program with CMake")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an intruder needs one of several CPUs")
def test_program_measures_every_arm() -> None:
    program = pool.build(None)

    def measure(mode: str, *arguments: str) -> pool.Comparison:
        comparison = pool.Comparison(mode, arguments)
        with tqdm(disable=True) as progress:
            pool.run(program, comparison, progress, None)
        walls = [measured.wall for measured in (*comparison.quiet.values(), *comparison.disturbed.values())]
        assert min(min(wall) for wall in walls) > 0
        return comparison

    empty = measure("empty", "2", "1", "50")
    assert {"numa_moe", "at::parallel_for"} <= set(empty.quiet)
    assert len(pool.empty_lines(empty)) == 2 + len(empty.quiet)

    wait = measure("wait", "1", "3000", "1", "20")
    assert wait.quiet["parks"].counter("yields") <= 512  # few, where another program gets the CPU
    assert wait.quiet["yields on"].counter("parks") == 0

    intruder = measure("intruder", "worker", "100", "1", "40")
    assert {"run again", "left alone", "fixed shares"} <= set(intruder.quiet)
    assert min(intruder.disturbed["fixed shares"].intruder) > 0  # it does run
    assert max(intruder.quiet["fixed shares"].intruder) == 0
