"""What the visits of an arm come to: times, rates and their shares of the limits probed around them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from arms import Arm
from harness import Cell, Visit
from probes import mean_limits


@dataclass(frozen=True)
class Summary:
    """One arm at one shape and batch, over all counted calls.

    Attributes:
        seconds, p10, p90: median and percentiles of a call's time.
        gigabytes_per_second: median of (bytes of the active experts' weights / time).
        gflops: median of (operations / time), in 1e9 per second.
        bandwidth, peak: medians of the limits probed around the calls; peak None if there is no probe.
        memory_share, compute_share: medians of the rates' shares of the limits probed around each call.
        probe_disagreement: largest relative difference of the bandwidths before and after a visit.
    """

    arm: str
    shape: str
    num_tokens: int
    calls: int
    seconds: float
    p10: float
    p90: float
    gigabytes_per_second: float
    gflops: float
    bandwidth: float
    peak: float | None
    memory_share: float
    compute_share: float | None
    probe_disagreement: float

    @property
    def bound_by_compute(self) -> bool:
        """Whether the compute peak, not the bandwidth, is the nearer limit."""
        return self.compute_share is not None and self.compute_share > self.memory_share

    @property
    def share(self) -> float:
        """Share of the nearer limit: the time that the limits allow over the time taken."""
        return max(self.memory_share, self.compute_share or 0.0)


def summarize(cell: Cell, arm: Arm) -> Summary | None:
    """Puts an arm's visits together; None if it has none."""
    visits = [visit for visit in cell.visits if visit.arm == arm.name]
    if not visits:
        return None
    flops = cell.shape.flops(cell.num_tokens)
    seconds: list[float] = []
    rates: list[float] = []
    memory_shares: list[float] = []
    compute_shares: list[float] = []
    peaks: list[float] = []
    for visit in visits:
        limits = mean_limits(visit.before, visit.after)
        peak = None if arm.peak_kind is None else limits.peaks[arm.peak_kind]
        if peak is not None:
            peaks.append(peak)
        for call, active in zip(visit.seconds, visit.active_experts, strict=True):
            rate = cell.shape.weight_bytes(active, arm.bits_per_weight) / call / 1e9
            seconds.append(call)
            rates.append(rate)
            memory_shares.append(rate / limits.bandwidth)
            if peak is not None:
                compute_shares.append(flops / call / 1e9 / peak)
    p10, median, p90 = percentiles(seconds)
    return Summary(
        arm=arm.name,
        shape=cell.shape.name,
        num_tokens=cell.num_tokens,
        calls=len(seconds),
        seconds=median,
        p10=p10,
        p90=p90,
        gigabytes_per_second=statistics.median(rates),
        gflops=flops / median / 1e9,
        bandwidth=statistics.median(mean_limits(visit.before, visit.after).bandwidth for visit in visits),
        peak=statistics.median(peaks) if peaks else None,
        memory_share=statistics.median(memory_shares),
        compute_share=statistics.median(compute_shares) if compute_shares else None,
        probe_disagreement=max(_disagreement(visit) for visit in visits),
    )


def _disagreement(visit: Visit) -> float:
    before, after = visit.before.bandwidth, visit.after.bandwidth
    return abs(before - after) / ((before + after) / 2)


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 10th, 50th and 90th percentile, interpolated."""
    p10, p50, p90 = (
        torch.tensor(values, dtype=torch.float64)
        .quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
        .tolist()
    )
    return p10, p50, p90


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent are not above."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
