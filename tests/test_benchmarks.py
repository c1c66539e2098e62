"""The benchmarks' problem set, probes, bookkeeping and command lines. Nothing here asserts on speed."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_numa_moe import _C

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import harness  # noqa: E402
import probes  # noqa: E402
import report  # noqa: E402
import summary  # noqa: E402
from arms.base import Arm  # noqa: E402
from problem_set import (  # noqa: E402
    SHAPES,
    Shape,
    Weights,
    make_hidden_states,
    make_routing,
    make_weights,
    reference,
)

TINY = Shape("tiny", "test", hidden_size=24, intermediate_size=40, num_experts=6, top_k=2)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_routing_differs_on_every_call(shape: Shape) -> None:
    one_token = [make_routing(shape, 1, call) for call in range(200)]
    sets = [frozenset(routing.topk_ids[0].tolist()) for routing in one_token]
    assert all(first != second for first, second in itertools.pairwise(sets))
    many_tokens = [make_routing(shape, 16, call).topk_ids for call in range(200)]
    assert len({tuple(ids.flatten().tolist()) for ids in many_tokens}) == len(many_tokens)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("num_tokens", [1, 128])
def test_routing_is_valid_and_seeded(shape: Shape, num_tokens: int) -> None:
    routing = make_routing(shape, num_tokens, call=3, seed=7)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (num_tokens, shape.top_k)
    for row in routing.topk_ids.tolist():
        assert len(set(row)) == shape.top_k
        assert all(0 <= expert < shape.num_experts for expert in row)
    assert bool((routing.topk_weights > 0).all())
    torch.testing.assert_close(
        routing.topk_weights.float().sum(-1), torch.ones(num_tokens), rtol=0, atol=shape.top_k * 2**-9
    )
    torch.testing.assert_close(make_routing(shape, num_tokens, 3, 7).topk_ids, routing.topk_ids)
    assert not torch.equal(make_routing(shape, num_tokens, 3, seed=8).topk_ids, routing.topk_ids)


def test_every_expert_is_drawn_equally_often() -> None:
    drawn = torch.stack([make_routing(TINY, 64, call).topk_ids for call in range(50)]).flatten()
    share = torch.bincount(drawn, minlength=TINY.num_experts) / drawn.numel()
    # 6400 draws: the standard deviation of a share is below 0.005.
    torch.testing.assert_close(share, torch.full((TINY.num_experts,), 1 / 6), rtol=0, atol=0.03)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("num_tokens", [1, 4, 128])
def test_bytes_and_flops_by_an_independent_count(shape: Shape, num_tokens: int) -> None:
    routing = make_routing(shape, num_tokens, call=0)
    # What a naive implementation would touch: every element of the three matrices of each expert, once.
    touched = set()
    operations = 0
    for row in routing.topk_ids.tolist():
        for expert in row:
            touched.add(expert)
            for rows, columns in (
                (shape.intermediate_size, shape.hidden_size),  # gate
                (shape.intermediate_size, shape.hidden_size),  # up
                (shape.hidden_size, shape.intermediate_size),  # down
            ):
                operations += rows * columns * 2
    per_expert = 2 * shape.intermediate_size * shape.hidden_size + shape.hidden_size * shape.intermediate_size
    assert routing.active_experts == len(touched)
    assert shape.weight_bytes(routing.active_experts, 16) == len(touched) * per_expert * 2
    assert shape.weight_bytes(routing.active_experts, 4.5) == len(touched) * per_expert * 4.5 / 8
    assert shape.flops(num_tokens) == operations


def test_weights_differ_between_experts_and_have_the_stated_spread() -> None:
    weights = make_weights(TINY)
    assert weights.gate_up_proj.shape == (6, 80, 24)
    assert weights.down_proj.shape == (6, 24, 40)
    for tensor in (weights.gate_up_proj, weights.down_proj):
        for first, second in itertools.combinations(range(6), 2):
            assert not torch.equal(tensor[first], tensor[second])
        assert float(tensor.float().std()) == pytest.approx(0.02, rel=0.1)


def test_reference_is_the_formula() -> None:
    weights = make_weights(TINY)
    hidden = make_hidden_states(TINY, 3)
    routing = make_routing(TINY, 3, 0)
    expected = torch.zeros(3, TINY.hidden_size, dtype=torch.float64)
    for token, slot in itertools.product(range(3), range(TINY.top_k)):
        expert = int(routing.topk_ids[token, slot])
        both = weights.gate_up_proj[expert].double() @ hidden[token].double()
        gate, up = both[:40], both[40:]
        inner = gate / (1 + torch.exp(-gate)) * up
        expected[token] += routing.topk_weights[token, slot].double() * (
            weights.down_proj[expert].double() @ inner
        )
    actual = reference(weights, hidden, routing.topk_ids, routing.topk_weights)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


CPUS = sorted(os.sched_getaffinity(0))
PROBED_BYTES = 32 << 20


def test_read_bandwidth_is_plausible_and_leaves_the_caller_alone() -> None:
    # Seen to fail when the calling thread did the first thread's part, pinned like it.
    before = os.sched_getaffinity(0)
    measured = _C.read_bandwidth(len(CPUS[:2]), PROBED_BYTES, CPUS[:2])
    # Slower than any memory, and faster than any cache of any core.
    assert 0.01 < measured < 1e4 * len(CPUS)
    assert os.sched_getaffinity(0) == before


def test_compute_peaks_are_plausible() -> None:
    before = os.sched_getaffinity(0)
    peaks = {kind: _C.compute_peak(kind, 1, CPUS[:1]) for kind in probes.PEAK_KINDS}
    assert peaks["fp32"] is not None
    for peak in peaks.values():
        assert peak is None or 0.01 < peak < 1e5
    flags = Path("/proc/cpuinfo").read_text().split()
    if os.uname().machine == "x86_64":
        assert (peaks["bf16"] is not None) == ("avx512_bf16" in flags)
        assert (peaks["int8"] is not None) == ("avx512_vnni" in flags or "avx_vnni" in flags)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _C.read_bandwidth(0, PROBED_BYTES, []), ValueError, "num_threads must be at least 1, got 0"),
        (lambda: _C.read_bandwidth(2, 1000, []), ValueError, "bytes must be at least"),
        (lambda: _C.read_bandwidth(2, PROBED_BYTES, [0]), ValueError, "cpus must be empty or name one CPU"),
        (lambda: _C.read_bandwidth(1, PROBED_BYTES, [1 << 20]), RuntimeError, "cpus: can't pin a thread"),
        (lambda: _C.compute_peak("fp64", 1, []), ValueError, "kind must be fp32, bf16 or int8, got fp64"),
        (lambda: _C.compute_peak("fp32", 0, []), ValueError, "num_threads must be at least 1, got 0"),
    ],
)
def test_probes_name_what_does_not_fit(call: object, error: type[Exception], message: str) -> None:
    assert callable(call)
    with pytest.raises(error, match=message):
        call()


def test_one_thread_that_cannot_be_pinned_does_not_hang_the_others() -> None:
    # Seen to hang when a thread that fails didn't tell the others (StartLine::give_up left out).
    with pytest.raises(RuntimeError, match="can't pin a thread to CPU"):
        _C.compute_peak("fp32", 2, [CPUS[0], 1 << 20])


def test_probes_go_unpinned_where_pinning_is_refused() -> None:
    refused = probes.Probes([1 << 20], probed_bytes=PROBED_BYTES)
    assert "can't pin" in refused.note
    assert refused.cpus == []
    assert refused.measure(["fp32"]).bandwidth > 0


def test_last_level_cache_counts_each_cache_once(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, size, shared) in enumerate(
            [(1, "32K", str(cpu)), (2, "512K", str(cpu)), (3, "16M", "0-1" if cpu < 2 else "2-3")]
        ):
            directory = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            directory.mkdir(parents=True)
            (directory / "level").write_text(f"{level}\n")
            (directory / "size").write_text(f"{size}\n")
            (directory / "shared_cpu_list").write_text(f"{shared}\n")
    assert probes.last_level_cache_bytes(tmp_path) == 2 * 16 << 20
    assert probes.last_level_cache_bytes(tmp_path / "none") == 0


class ReferenceArm(Arm):
    """The reference itself, or something wrong."""

    name = "reference"
    bits_per_weight = 16.0
    peak_kind = "fp32"

    def __init__(self, weights: Weights, scale: float = 1.0) -> None:
        """Multiplies the right result by ``scale``."""
        self.weights = weights
        self.scale = scale
        self.seen: list[torch.Tensor] = []

    def run(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`Arm.run`."""
        self.seen.append(topk_ids)
        output = self.scale * reference(self.weights, hidden_states, topk_ids, topk_weights)
        return output.to(hidden_states.dtype)


class FixedProbes(probes.Probes):
    """Limits that are known: 10 GB/s, then 11, 12..., and a peak of 100."""

    def __init__(self) -> None:
        """Measures nothing."""
        self.probed: list[probes.Limits] = []

    def measure(self, kinds: object = ()) -> probes.Limits:
        """The next limits."""
        del kinds
        self.probed.append(probes.Limits(10.0 + len(self.probed), {"fp32": 100.0}))
        return self.probed[-1]


def _measure(arms: dict[str, ReferenceArm], weights: Weights, num_tokens: int = 3) -> harness.Cell:
    protocol = harness.Protocol(seconds=0.01, rounds=4, patience=1e9)
    return harness.Harness(TINY, arms, weights, FixedProbes(), protocol).measure(num_tokens)


def test_harness_interleaves_arms_between_probes_with_the_same_routings() -> None:
    weights = make_weights(TINY)
    arms = {"first": ReferenceArm(weights), "second": ReferenceArm(weights)}
    cell = _measure(arms, weights)
    assert [visit.arm for visit in cell.visits] == ["first", "second", "second", "first"] * 2
    for index, visit in enumerate(cell.visits):
        assert visit.before.bandwidth == 10.0 + index  # the probe after the visit before
        assert visit.after.bandwidth == 11.0 + index
        assert len(visit.seconds) == len(visit.active_experts) >= 1
    for arm in arms.values():
        for call, ids in enumerate(arm.seen):
            assert torch.equal(ids, make_routing(TINY, 3, call).topk_ids)


def test_harness_refuses_an_arm_that_computes_something_else() -> None:
    weights = make_weights(TINY)
    with pytest.raises(
        harness.WrongResultError, match="wrong computes something else at shape tiny, 3 tokens"
    ):
        _measure({"wrong": ReferenceArm(weights, scale=1.05)}, weights)
    with pytest.raises(harness.WrongResultError):
        _measure({"nan": ReferenceArm(weights, scale=math.nan)}, weights)


def test_harness_skips_by_name_what_takes_too_long_or_is_not_meant_for_it() -> None:
    weights = make_weights(TINY)
    arms = {"slow": ReferenceArm(weights), "small": ReferenceArm(weights)}
    arms["small"].most_tokens = 4
    protocol = harness.Protocol(seconds=0.01, rounds=1, most_call_seconds=1e-9)
    measured = harness.Harness(TINY, arms, weights, FixedProbes(), protocol)
    assert measured.measure(1).skipped == {}
    cell = measured.measure(8)
    assert cell.visits == []
    assert "a call would take about" in cell.skipped["slow"]
    assert cell.skipped["small"] == "isn't meant for more than 4 tokens"
    assert any("small: skipped, isn't meant" in line for line in report.cell_lines(cell, []))


def test_summary_sets_every_call_against_the_probes_around_it() -> None:
    weights = make_weights(TINY)
    limits = [probes.Limits(bandwidth, {"fp32": 0.01}) for bandwidth in (0.1, 0.3, 0.2)]
    visits = [
        harness.Visit("reference", 0, [1e-3, 2e-3], [4, 5], limits[0], limits[1]),
        harness.Visit("reference", 1, [4e-3], [6], limits[1], limits[2]),
    ]
    found = summary.summarize(harness.Cell(TINY, 5, visits), ReferenceArm(weights))
    assert found is not None
    expert_bytes = 3 * 24 * 40 * 2
    rates = [4 * expert_bytes / 1e-3 / 1e9, 5 * expert_bytes / 2e-3 / 1e9, 6 * expert_bytes / 4e-3 / 1e9]
    shares = sorted([rates[0] / 0.2, rates[1] / 0.2, rates[2] / 0.25])
    assert found.calls == 3
    assert found.seconds == pytest.approx(2e-3)
    assert found.gigabytes_per_second == pytest.approx(sorted(rates)[1])
    assert found.memory_share == pytest.approx(shares[1])
    assert found.gflops == pytest.approx(2 * 5 * 2 * 3 * 24 * 40 / 2e-3 / 1e9)
    assert found.compute_share == pytest.approx(found.gflops / 0.01)
    assert found.bound_by_compute
    assert found.share == found.compute_share
    assert found.probe_disagreement == pytest.approx(1.0)
    assert summary.summarize(harness.Cell(TINY, 5, []), ReferenceArm(weights)) is None


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, check=False
    )


def test_overhead_prints_every_row() -> None:
    result = _run("overhead.py", "--chunks", "1", "--pause", "0.001")
    assert result.returncode == 0, result.stderr
    for row in ("empty call", "op, no tokens", "packed, no tokens", "one number", "layer", "layer, rested"):
        assert f"  {row} " in result.stdout


def test_intruder_prints_every_arm_and_place(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is no worker with a CPU of its own")
    pytest.importorskip("matplotlib")
    plot = tmp_path / "intruder.svg"
    done = _run("intruder.py", "--duties", "100", "--calls", "5", "--rounds", "1", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    skipped = [line for line in done.stdout.splitlines() if line.startswith("skipped: ")]
    assert all(line.startswith("skipped: fifo (real-time scheduling takes CAP_SYS_NICE") for line in skipped)
    rows = [line for line in done.stdout.splitlines() if line.startswith("a worker's CPU ")]
    arms = ["run again", "left alone", *([] if skipped else ["fifo"])]
    assert [arm for row in rows for arm in arms if f"  {arm} " in row] == arms
    for row in rows:
        quiet, p99, mean, median, worst, ratio, worst_ratio = map(float, row.split()[-7:])
        assert 0 < quiet <= p99 * 1.01
        assert 0 < median <= worst
        assert ratio == pytest.approx(mean / quiet, rel=0.1)
        assert worst_ratio == pytest.approx(worst / quiet, rel=0.1)
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "D"], "'D' is none of A, B, C"),
        (["--batches", "0"], "0 is less than 1"),
        (["--arms", "eager"], "'eager' is none of numa_moe-bf16"),
    ],
)
def test_moe_layer_refuses_what_it_does_not_know(arguments: list[str], message: str) -> None:
    result = _run("moe_layer.py", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_json_lines_and_plot_agree(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from plot import plot, read_summaries

    weights = make_weights(TINY)
    arm = ReferenceArm(weights)
    cell = _measure({"reference": arm}, weights)
    found = summary.summarize(cell, arm)
    assert found is not None
    file = tmp_path / "results.jsonl"
    with file.open("w") as stream:
        lines = report.JsonLines(stream)
        lines.machine({"cpu": "test"})
        lines.cell(cell, [found])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["record"] for record in records] == ["machine", *["visit"] * len(cell.visits), "summary"]
    assert read_summaries(file) == [found]
    figure = tmp_path / "figure.png"
    plot([found], figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
