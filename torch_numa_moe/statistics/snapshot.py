"""What the pool has done up to a moment, by worker and by layer."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_numa_moe.statistics.durations import Durations

FORMAT = 1
"""Of the JSON text; another one is refused."""


@dataclass(frozen=True)
class Share:
    """What a worker has done in a layer, or in all.

    Attributes:
        tasks: tasks that it has run.
        late_tasks: of those, the ones that another worker ran again and finished earlier.
        busy_seconds: time that they took.
        waits: per call of the layer, the part of its time in which the worker had nothing to do: mostly it
            waited for others at a barrier. The worker that waits least is the one that the others wait for.
    """

    tasks: int = 0
    late_tasks: int = 0
    busy_seconds: float = 0.0
    waits: Durations = field(default_factory=Durations)

    @property
    def task_us(self) -> float:
        """Mean time of a task, in microseconds; 0 without tasks."""
        return 1e6 * self.busy_seconds / self.tasks if self.tasks else 0.0

    def since(self, earlier: Share) -> Share:
        """What was added later."""
        return Share(
            self.tasks - earlier.tasks,
            self.late_tasks - earlier.late_tasks,
            self.busy_seconds - earlier.busy_seconds,
            self.waits.since(earlier.waits),
        )


@dataclass(frozen=True)
class WorkerStatistics:
    """One worker, or the calling thread where it computes too.

    Attributes:
        name: ``"numa_moe/0.1"``, the thread's name, or ``"calling thread"``.
        node: its NUMA node, or None if memory may lie anywhere.
        cpu: the CPU that it is pinned to, or None.
        thread_id: the kernel's number, or None for the calling thread.
        layers: what it has done, by name of the layer.
        run_delay_seconds: time that it was ready to run, but another thread had its CPU; None if the kernel
            doesn't tell.
        preempted: how often another thread took its CPU away; None if the kernel doesn't tell.
    """

    name: str
    node: int | None
    cpu: int | None
    thread_id: int | None
    layers: dict[str, Share]
    run_delay_seconds: float | None = None
    preempted: int | None = None

    @property
    def total(self) -> Share:
        """Of all layers."""
        shares = self.layers.values()
        return Share(
            sum(share.tasks for share in shares),
            sum(share.late_tasks for share in shares),
            sum(share.busy_seconds for share in shares),
            Durations.together(share.waits for share in shares),
        )


@dataclass(frozen=True)
class Statistics:
    """Everything at one moment; made by :func:`torch_numa_moe.stats`.

    Attributes:
        seconds: how long it was counted, in seconds: since the pool started, or between two moments.
        workers: in the order of the pool's threads.
        layers: how long each call of a layer took, by name, in the order of the first calls. Layers of
            transformers models have their module's name; beyond 511 all share the last, ``"others"``.
        counters: the pool's, see docs/statistics.md.
    """

    seconds: float
    workers: tuple[WorkerStatistics, ...] = ()
    layers: dict[str, Durations] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def slowness(self, layer: str) -> dict[str, float]:
        """How much longer than all did each worker took for a task there, by name of those that had some."""
        shares = {worker.name: worker.layers[layer] for worker in self.workers if layer in worker.layers}
        busy = sum(share.busy_seconds for share in shares.values())
        if busy <= 0:
            return {}
        mean_us = 1e6 * busy / sum(share.tasks for share in shares.values())
        return {name: share.task_us / mean_us for name, share in shares.items() if share.tasks}

    def since(self, earlier: Statistics) -> Statistics:
        """What came later than ``earlier``: all of it, if another pool has been started meanwhile."""
        if self.seconds < earlier.seconds or [worker.thread_id for worker in self.workers] != [
            worker.thread_id for worker in earlier.workers
        ]:
            return self
        return Statistics(
            self.seconds - earlier.seconds,
            tuple(map(_worker_since, self.workers, earlier.workers)),
            {
                name: durations.since(earlier.layers.get(name, Durations()))
                for name, durations in self.layers.items()
            },
            {name: value - earlier.counters.get(name, 0) for name, value in self.counters.items()},
        )

    def to_json(self) -> str:
        """As text, for :meth:`from_json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})

    @staticmethod
    def from_json(text: str) -> Statistics:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError: if it is of another version.
        """
        read = json.loads(text)
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            raise ValueError("these statistics were written by another version of torch_numa_moe")
        return Statistics(
            read["seconds"],
            tuple(_read_worker(worker) for worker in read["workers"]),
            {name: _read_durations(durations) for name, durations in read["layers"].items()},
            read["counters"],
        )

    def prometheus(self) -> str:
        """In the text format that Prometheus scrapes (its "exposition format", version 0.0.4)."""
        from torch_numa_moe.statistics.prometheus import exposition

        return exposition(self)

    def plot(self, file: str | Path) -> None:
        """Draws workers and layers as heat maps: a core that straggles is a line of its own.

        Args:
            file: what to write; the ending says what (``.svg``, ``.png``, ``.pdf``).

        Raises:
            ImportError: without matplotlib.
        """
        from torch_numa_moe.statistics.heat_map import draw

        draw(self, Path(file))

    def __str__(self) -> str:
        """Tables of the workers and of the layers."""
        from torch_numa_moe.statistics.tables import lines

        return "\n".join(lines(self))


def _worker_since(now: WorkerStatistics, earlier: WorkerStatistics) -> WorkerStatistics:
    def difference(after: Any, before: Any) -> Any:
        return None if after is None or before is None else after - before

    return dataclasses.replace(
        now,
        layers={name: share.since(earlier.layers.get(name, Share())) for name, share in now.layers.items()},
        run_delay_seconds=difference(now.run_delay_seconds, earlier.run_delay_seconds),
        preempted=difference(now.preempted, earlier.preempted),
    )


def _read_durations(read: dict[str, Any]) -> Durations:
    # JSON has only texts as names.
    return Durations({int(bucket): count for bucket, count in read["counts"].items()}, read["max_ns"])


def _read_worker(read: dict[str, Any]) -> WorkerStatistics:
    shares = {
        name: Share(**{**share, "waits": _read_durations(share["waits"])})
        for name, share in read["layers"].items()
    }
    return WorkerStatistics(**{**read, "layers": shares})
