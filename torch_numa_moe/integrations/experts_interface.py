"""The experts implementation ``"numa_moe"`` of transformers."""

from __future__ import annotations

import logging
import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.experts_modules import (
    IMPLEMENTATION,
    check_experts,
)
from torch_numa_moe.integrations.import_hook import call_after_import
from torch_numa_moe.integrations.normalised_experts import run_normalised
from torch_numa_moe.integrations.packed_module import PackedState, pack_module, packed_state
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError

logger = logging.getLogger("torch_numa_moe")

_packing_lock = threading.Lock()
_lazy_packing_logged = False


def register_with_transformers() -> None:
    """Makes ``experts_implementation="numa_moe"`` known to transformers, now or when it is imported."""
    call_after_import("transformers.integrations.moe", _register_experts)
    call_after_import("transformers.integrations.finegrained_fp8", _register_fp8_experts)


def require_transformers() -> None:
    """Imports transformers' experts interface and registers with it.

    Raises:
        ImportError: if transformers isn't there, or is older than version 5.
    """
    needs = "torch_numa_moe.patch needs transformers 5 or later"
    try:
        import transformers
        from transformers.integrations.moe import ExpertsInterface
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise ImportError(f"{needs}, and it isn't installed: pip install 'transformers>=5'") from None
        raise ImportError(f"{needs}, found {transformers.__version__}") from error
    except ImportError as error:
        raise ImportError(f"{needs}, found {transformers.__version__}") from error
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def _register_experts(module: ModuleType) -> None:
    interface = getattr(module, "ExpertsInterface", None)
    if interface is None:
        logger.info("this transformers has no experts interface (it is older than 5): nothing to register")
        return
    interface.register(IMPLEMENTATION, experts_forward)


def _register_fp8_experts(module: ModuleType) -> None:
    interface = getattr(module, "FP8ExpertsInterface", None)
    if interface is not None:
        interface.register(IMPLEMENTATION, fp8_experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """An experts module's forward, as transformers' interface calls it.

    Args:
        self: the experts module.
        hidden_states: ``[num_tokens, hidden_size]``.
        top_k_index: ``[num_tokens, top_k]`` int64; an id >= num_experts adds nothing.
        top_k_weights: ``[num_tokens, top_k]``.

    Returns:
        ``[num_tokens, hidden_size]``, dtype of hidden_states.

    Raises:
        RuntimeError: in training, or under torch.compile if the module isn't packed yet.
        UnsupportedExpertsError: if the module isn't packed yet and can't be.
    """
    if self.training and torch.is_grad_enabled() and hidden_states.requires_grad:
        raise RuntimeError(
            'experts_implementation="numa_moe" is for inference: it has no backward. Call model.eval(), or '
            "run under torch.no_grad(); to train, use another experts implementation."
        )
    state = packed_state(self)
    if state is None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "experts that aren't packed yet can't be compiled: call torch_numa_moe.patch(model) before "
                "torch.compile."
            )
        # Not as a decorator: that would import the compiler along with this package, which takes seconds.
        state = torch.compiler.disable(_pack_at_first_forward)(self)
    if top_k_weights.shape[1] > top_k_index.shape[1]:
        # Some routers of transformers 5.0 return a column per expert, of which eager reads the first ones.
        top_k_weights = top_k_weights[:, : top_k_index.shape[1]]
    if getattr(self, "has_post_expert_norm", False):
        norm: Any = self.post_expert_norm
        return run_normalised(state.packed, norm, hidden_states, top_k_index, top_k_weights)
    return state.packed(hidden_states, top_k_index, top_k_weights)


def _pack_at_first_forward(module: nn.Module) -> PackedState:
    global _lazy_packing_logged
    with _packing_lock:
        state = packed_state(module)  # another thread may have been first
        if state is not None:
            return state
        if not _lazy_packing_logged:
            _lazy_packing_logged = True
            logger.info(
                "packing experts at their first forward, as they are asked for; torch_numa_moe.patch(model) "
                "packs all of them before, and reports"
            )
        try:
            spec = check_experts(module)
        except UnsupportedExpertsError as error:
            raise UnsupportedExpertsError(
                f'experts_implementation="numa_moe" can\'t run {type(module).__name__}: {error}. '
                "Use another experts implementation."
            ) from None
        state = pack_module(spec, "auto")
        logger.debug("packed %s: %r", type(module).__name__, state.packed)
        return state


def fp8_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any
) -> Tensor:
    """Refuses: FP8 experts are behind an interface of their own, and no format stores them yet.

    Raises:
        UnsupportedExpertsError: always.
    """
    raise UnsupportedExpertsError(
        'experts_implementation="numa_moe" can\'t run FP8 experts yet. Load the checkpoint dequantised '
        "(FineGrainedFP8Config(dequantize=True)), or use another experts implementation."
    )
