"""Durations that were counted by size, as the pool's threads do (csrc/pool/duration_histogram.h)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from torch_numa_moe import _C


@lru_cache(maxsize=1)
def _begins() -> tuple[int, ...]:
    return tuple(_C.duration_buckets())


def _bounds(bucket: int) -> tuple[int, int]:
    """From and below, in nanoseconds; the last bucket holds all that is longer too."""
    return _begins()[bucket], _begins()[bucket + 1]


@dataclass(frozen=True)
class Durations:
    """How often durations came up, in eight buckets to each doubling.

    Attributes:
        counts: by bucket, of those that have any.
        max_ns: the longest, in nanoseconds; 0 if there is none.
    """

    counts: dict[int, int] = field(default_factory=dict)
    max_ns: int = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def percentile_us(self, percent: float) -> float:
        """What so many percent are not above, in microseconds, within 6 %; 0 if there is none."""
        left = self.count * percent / 100
        for bucket, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                begin, end = _bounds(bucket)
                return min((begin + end) / 2, self.max_ns) / 1000
        return self.max_us

    @property
    def max_us(self) -> float:
        """The longest, in microseconds."""
        return self.max_ns / 1000

    def since(self, earlier: Durations) -> Durations:
        """Those that came later than ``earlier`` was read.

        Of the longest only its bucket is known, unless it is the longest of all.
        """
        rest = {bucket: count - earlier.counts.get(bucket, 0) for bucket, count in self.counts.items()}
        counts = {bucket: count for bucket, count in rest.items() if count}
        if not counts or self.max_ns != earlier.max_ns:
            return Durations(counts, self.max_ns if counts else 0)
        return Durations(counts, min(_bounds(max(counts))[1], self.max_ns))

    @staticmethod
    def together(parts: Iterable[Durations]) -> Durations:
        """All of them in one."""
        counts: Counter[int] = Counter()
        longest = 0
        for part in parts:
            counts.update(part.counts)
            longest = max(longest, part.max_ns)
        return Durations(dict(counts), longest)
