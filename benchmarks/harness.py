"""Measures arms in turn, each measurement between two probes of the machine's limits.

Protocol: for one shape and batch, the arms are visited round after round, in an order that rotates. A visit
calls one arm for a slice of its time, each call with a routing of its own. The probe after a visit is the
probe before the next one. Every arm sees the same sequence of routings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from arms import Arm
from probes import Limits, Probes
from problem_set import Routing, Shape, Weights, make_hidden_states, make_routing, reference

CHECKED_TOKENS = 2
"""Tokens of an arm's first output that are compared with the reference."""

SETTLE_SECONDS = 0.01
"""Pause before a probe, in which idle threads of the arm before stop spinning."""

WARM_UP_BELOW_SECONDS = 0.5
"""A visit starts with a call that isn't counted, unless calls take longer than this."""


class WrongResultError(Exception):
    """An arm's output is not the layer's."""


@dataclass(frozen=True)
class Protocol:
    """How to measure.

    Attributes:
        seconds: for one arm at one shape and batch, all rounds together.
        rounds: visits that this is divided into. An arm whose calls are so long that it has used
            ``patience`` times its seconds isn't visited again.
        most_call_seconds: an arm that is expected to need longer for one call is skipped.
        seed: of routings and hidden states.
    """

    seconds: float = 2.0
    rounds: int = 5
    patience: float = 5.0
    most_call_seconds: float = 120.0
    seed: int = 0


@dataclass(frozen=True)
class Visit:
    """The counted calls of one arm between two probes.

    Attributes:
        seconds: of each call.
        active_experts: of each call.
        before: limits probed before the first call.
        after: limits probed after the last one.
    """

    arm: str
    round: int
    seconds: list[float]
    active_experts: list[int]
    before: Limits
    after: Limits


@dataclass
class Cell:
    """All that was measured at one shape and batch.

    Attributes:
        visits: in the order in which they were made.
        skipped: arm -> why it wasn't measured.
    """

    shape: Shape
    num_tokens: int
    visits: list[Visit] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class Harness:
    """Measures the same arms at one batch after the other.

    Args:
        shape: of the layer.
        arms: by name.
        weights: the originals, for the check of results.
        probes: called around every visit.
        protocol: how to measure.
    """

    def __init__(
        self, shape: Shape, arms: Mapping[str, Arm], weights: Weights, probes: Probes, protocol: Protocol
    ) -> None:
        self.shape = shape
        self.arms = dict(arms)
        self.weights = weights
        self.probes = probes
        self.protocol = protocol
        # Median seconds per token at the last batch, to foresee how long a call will take.
        self._seconds_per_token: dict[str, float] = {}

    @property
    def _peak_kinds(self) -> list[str]:
        return sorted({arm.peak_kind for arm in self.arms.values() if arm.peak_kind is not None})

    def measure(self, num_tokens: int, on_visit: Callable[[str], None] = lambda _arm: None) -> Cell:
        """Measures every arm at one batch.

        Args:
            num_tokens: the batch.
            on_visit: called with the arm's name, ``rounds`` times per arm.

        Raises:
            WrongResultError: if an arm's first output isn't that of the reference.
        """
        cell = Cell(self.shape, num_tokens)
        names = [name for name in self.arms if not self._skip(cell, name)]
        visitor = _Visitor(self, num_tokens)
        spent = dict.fromkeys(names, 0.0)
        before = self._probe()
        for index in range(self.protocol.rounds):
            first = index % max(len(names), 1)
            for name in names[first:] + names[:first]:
                if spent[name] < self.protocol.seconds * self.protocol.patience:
                    started = time.perf_counter()
                    seconds, active = visitor.visit(name, self._seconds_per_token.get(name, 0.0) * num_tokens)
                    spent[name] += time.perf_counter() - started
                    after = self._probe()
                    cell.visits.append(Visit(name, index, seconds, active, before, after))
                    before = after
                on_visit(name)
        for name in names:
            times = [second for visit in cell.visits if visit.arm == name for second in visit.seconds]
            self._seconds_per_token[name] = statistics.median(times) / num_tokens
        return cell

    def _skip(self, cell: Cell, name: str) -> bool:
        arm = self.arms[name]
        expected = self._seconds_per_token.get(name, 0.0) * cell.num_tokens
        if arm.most_tokens is not None and cell.num_tokens > arm.most_tokens:
            cell.skipped[name] = f"isn't meant for more than {arm.most_tokens} tokens"
        elif expected > self.protocol.most_call_seconds:
            cell.skipped[name] = f"a call would take about {expected:.0f} s"
        return name in cell.skipped

    def _probe(self) -> Limits:
        time.sleep(SETTLE_SECONDS)
        return self.probes.measure(self._peak_kinds)


class _Visitor:
    """Calls the arms of a harness at one batch; keeps count of the calls, and thus of the routings."""

    def __init__(self, harness: Harness, num_tokens: int) -> None:
        self.harness = harness
        self.num_tokens = num_tokens
        self.hidden_states = make_hidden_states(harness.shape, num_tokens, harness.protocol.seed)
        self.calls = dict.fromkeys(harness.arms, 0)
        few = slice(0, CHECKED_TOKENS)
        routing = self._routing(0)
        self.expected = reference(
            harness.weights, self.hidden_states[few], routing.topk_ids[few], routing.topk_weights[few].float()
        )

    def visit(self, name: str, expected_seconds: float) -> tuple[list[float], list[int]]:
        """Calls an arm for its slice of time.

        Returns:
            seconds and active experts of the calls that count.
        """
        protocol = self.harness.protocol
        seconds: list[float] = []
        active: list[int] = []
        warm_up = expected_seconds < WARM_UP_BELOW_SECONDS
        end = 0.0
        while not seconds or time.perf_counter() < end:
            routing = self._routing(self.calls[name])
            output, elapsed = self._call(name, routing)
            if self.calls[name] == 0:
                self._check(name, output)
            self.calls[name] += 1
            if warm_up:
                warm_up = False
                if elapsed < WARM_UP_BELOW_SECONDS:
                    continue
            if not seconds:
                end = time.perf_counter() + protocol.seconds / protocol.rounds - elapsed
            seconds.append(elapsed)
            active.append(routing.active_experts)
        return seconds, active

    def _routing(self, call: int) -> Routing:
        return make_routing(self.harness.shape, self.num_tokens, call, self.harness.protocol.seed)

    def _call(self, name: str, routing: Routing) -> tuple[torch.Tensor, float]:
        run = self.harness.arms[name].run
        with torch.inference_mode():
            start = time.perf_counter()
            output = run(self.hidden_states, routing.topk_ids, routing.topk_weights)
            elapsed = time.perf_counter() - start
        return output, elapsed

    def _check(self, name: str, output: torch.Tensor) -> None:
        accepted = self.harness.arms[name].most_relative_error
        error = float((output[:CHECKED_TOKENS].float() - self.expected).norm() / self.expected.norm())
        if not error <= accepted:
            raise WrongResultError(
                f"{name} computes something else at shape {self.harness.shape.name}, {self.num_tokens} "
                f"tokens: relative error {error:.3g} against the fp32 reference, accepted {accepted}"
            )
