"""``patch`` and ``unpatch``: a transformers model's MoE layers into NUMA slices and back, in place."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from torch_numa_moe import runtime
from torch_numa_moe.integrations.checkpoint_files import find_checkpoint_files
from torch_numa_moe.integrations.experts_interface import require_transformers
from torch_numa_moe.integrations.experts_modules import (
    IMPLEMENTATION,
    ExpertsSpec,
    check_experts,
    describe_missing_experts,
    find_experts_modules,
    get_implementation,
    set_implementation,
)
from torch_numa_moe.integrations.module_adapters import Check, find_adapted_modules
from torch_numa_moe.integrations.module_names import summarise_names
from torch_numa_moe.integrations.packed_module import (
    PackableSpec,
    PackedState,
    check_format,
    find_packed,
    pack_module,
    packed_state,
    restore_module,
    slice_bytes_for,
)
from torch_numa_moe.integrations.patch_report import PatchedModule, PatchReport
from torch_numa_moe.integrations.replaced_module import ReplacementSpec, pack_replaced
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError
from torch_numa_moe.integrations.verification import verify_modules
from torch_numa_moe.page_cache import find_file_ranges, release_file_ranges, release_files

logger = logging.getLogger("torch_numa_moe")


def patch(model: nn.Module, format: str = "auto", *, progress: bool = True) -> PatchReport:
    """Packs every MoE layer of a transformers model into NUMA slices, in place, and makes the model use them.

    All layers are checked before any is changed. Each layer's own weights are freed once it is packed, so the
    peak is the model and one layer. The parameters stay on the modules, emptied; while a model is patched its
    ``state_dict()``, ``save_pretrained()`` and ``load_state_dict()`` raise.

    If packing is interrupted or fails midway, the layers packed so far are restored before the exception goes
    on: exactly, or rounded to the format if that is narrower than their dtype (which is then logged).

    Args:
        model: a model of transformers 5 or later, its experts' weights on the CPU.
        format: weight format, see :func:`torch_numa_moe.pack_experts`; ``"auto"``: for each layer the one
            that stores its dtype as it is.
        progress: show a progress bar, if stderr is a terminal.

    Returns:
        What was packed, and where it is. Patching a model that is already patched changes nothing and
        returns the same.

    Raises:
        UnsupportedExpertsError: naming the layers that can't be packed, and why. Nothing was changed.
        ValueError: if there is no such format, or the model is patched with another one.
        TypeError: if model is no ``nn.Module``.
        ImportError: without transformers 5 or later.
        MemoryError: if there is no room.
    """
    _check_model(model)
    check_format(format)
    require_transformers()
    modules = find_experts_modules(model)
    adapted = find_adapted_modules(model, modules.keys())
    if not modules and not adapted:
        raise UnsupportedExpertsError(describe_missing_experts(model))
    everything = {**modules, **{name: module for name, (module, _) in adapted.items()}}
    _check_packed_formats(everything, format)
    specs = _check_all(model, everything, {name: check for name, (_, check) in adapted.items()})
    implementations = {str(get_implementation(module)) for module in modules.values()}

    # Pages of the checkpoint that stay behind in the page cache would push slices off their nodes.
    release_files(find_checkpoint_files(model))
    _check_room(specs, format)
    started: list[nn.Module] = []
    total_bytes = sum(spec.source_bytes for spec in specs)
    try:
        with _progress_bar(total_bytes, progress and bool(specs)) as bar:
            for spec in specs:
                layer_bytes = spec.source_bytes
                started.append(spec.module)
                mapped = find_file_ranges(spec.parameters)
                if isinstance(spec, ExpertsSpec):
                    pack_module(spec, format, verify_placement=False)
                else:
                    pack_replaced(spec, format, verify_placement=False)
                release_file_ranges(mapped)
                bar.update(layer_bytes)
        for module in modules.values():
            set_implementation(module, IMPLEMENTATION)
    except BaseException:
        _roll_back(started)
        raise
    states = find_packed(model)
    for name, state in states.items():
        state.packed.name = name
    verify_modules(states.values())
    entries = [PatchedModule.of(name, state) for name, state in states.items()]
    return PatchReport(tuple(entries), tuple(sorted(implementations - {IMPLEMENTATION})))


def _check_room(specs: Sequence[PackableSpec], format: str) -> None:
    """Warns before anything is allocated if the nodes lack room for all layers."""
    num_slices = len(runtime.ensure_started().nodes)
    share = sum(slice_bytes_for(spec, format, num_slices) for spec in specs)
    runtime.check_room([share] * num_slices)


def unpatch(model: nn.Module) -> None:
    """Restores the parameters of a patched model, and the experts implementation that it had.

    Also undoes what ``experts_implementation="numa_moe"`` packed at the first forward; the implementation is
    then transformers' default. A model that isn't patched is left as it is.

    The weights come back bit for bit, unless the format is narrower than their dtype: then they are rounded
    to it, which is logged once. Their dtype is what the rest of the layer was moved to meanwhile.

    Raises:
        TypeError: if model is no ``nn.Module``.
        MemoryError: if there is no room. What was restored until then stays restored; call it again.
    """
    _check_model(model)
    modules = find_experts_modules(model)
    states = find_packed(model)
    _log_rounded(states.values())
    for name in states:
        restore_module(model.get_submodule(name))
    for name, module in modules.items():
        if get_implementation(module) == IMPLEMENTATION:
            state = states.get(name)
            previous = None if state is None else state.previous_implementation
            set_implementation(module, previous or _default_implementation(model))


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _default_implementation(model: nn.Module) -> str:
    """What transformers takes when nothing is asked for."""
    choose: Any = getattr(model, "get_correct_experts_implementation", None)
    return "eager" if choose is None else str(choose(None))


def _check_packed_formats(modules: dict[str, nn.Module], format: str) -> None:
    for name, module in modules.items():
        state = packed_state(module)
        if state is not None and format not in ("auto", state.packed.format):
            raise ValueError(
                f"{name} is already packed as {state.packed.format}: call torch_numa_moe.unpatch(model) "
                f"before packing as {format}"
            )


def _check_all(
    model: nn.Module, modules: dict[str, nn.Module], checks: dict[str, Check]
) -> list[ExpertsSpec | ReplacementSpec]:
    """How to pack each module that isn't packed yet; raises if one of them can't be."""
    specs: list[ExpertsSpec | ReplacementSpec] = []
    reasons: dict[str, str] = {}
    owners: dict[int, str] = {}  # by id of the parameter
    for name, module in modules.items():
        if packed_state(module) is not None:
            continue
        try:
            spec = checks.get(name, check_experts)(module)
        except UnsupportedExpertsError as error:
            reasons[name] = str(error)
            continue
        if spec is None:
            continue
        shared = {owners[id(one)] for one in spec.parameters if id(one) in owners}
        if shared:
            reasons[name] = f"it shares its weights with {min(shared)}"
            continue
        owners.update((id(parameter), name) for parameter in spec.parameters)
        specs.append(spec)
    if reasons:
        raise UnsupportedExpertsError(_describe_refusal(model, modules, reasons), reasons)
    return specs


def _describe_refusal(model: nn.Module, modules: dict[str, nn.Module], reasons: dict[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    total = f"{len(reasons)} of {len(modules)} experts modules of {type(model).__name__}"
    lines = [f"{total} can't be packed; nothing was changed:"]
    lines += [
        f"  {summarise_names(which)} ({type(modules[which[0]]).__name__}): {reason}"
        for reason, which in names.items()
    ]
    return "\n".join(lines)


def _progress_bar(total_bytes: int, wanted: bool) -> Any:
    from tqdm import tqdm
    from transformers.utils.logging import is_progress_bar_enabled

    return tqdm(
        total=total_bytes,
        desc="Packing experts",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        # None: off unless stderr is a terminal.
        disable=None if wanted and is_progress_bar_enabled() else True,
    )


def _roll_back(modules: Sequence[nn.Module]) -> None:
    states = [(module, state) for module in modules if (state := packed_state(module)) is not None]
    _log_rounded([state for _, state in states])
    for module, state in states:
        restore_module(module)
        if state.previous_implementation is not None:
            set_implementation(module, state.previous_implementation)


def _log_rounded(states: Collection[PackedState]) -> None:
    rounded = [state for state in states if state.is_rounded]
    if rounded:
        logger.warning(
            "the weights of %d of %d MoE layers were packed as %s from %s: what is restored is rounded to it",
            len(rounded),
            len(states),
            rounded[0].packed.format,
            str(rounded[0].source_dtype).removeprefix("torch."),
        )
