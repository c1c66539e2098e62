"""What the pool's threads have done, by worker and by layer: read, shown, drawn, and told to ``top``."""

from torch_numa_moe.statistics.collect import stats
from torch_numa_moe.statistics.durations import Durations
from torch_numa_moe.statistics.snapshot import Share, Statistics, WorkerStatistics

__all__ = ["Durations", "Share", "Statistics", "WorkerStatistics", "stats"]
