"""What an arm is: one implementation of the layer, with weights of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class ArmUnavailableError(Exception):
    """An arm can't run here; the message says why."""


class Arm(ABC):
    """One implementation of the layer.

    The constructor takes a ``Shape`` and ``Weights``, and raises :class:`ArmUnavailableError` where the arm
    can't run.

    Attributes:
        name: as in ``arms.ARMS``.
        bits_per_weight: storage, scales included; sets the bytes that a call has to read.
        peak_kind: the kind of instruction that limits many tokens, a key of ``probes.Limits.peaks``; None
            when there is no probe for it.
        most_relative_error: what the output may differ from the fp32 reference by, norm of the difference
            over norm. The default is four times what bf16 activations and bf16 sums come to (0.005).
        most_tokens: batches above are skipped, because the arm isn't meant for them; None: no bound.
    """

    name: str
    bits_per_weight: float
    peak_kind: str | None
    most_relative_error: float = 0.02
    most_tokens: int | None = None

    @abstractmethod
    def run(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output ``[num_tokens, hidden_size]``."""
