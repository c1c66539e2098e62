"""Every architecture of transformers with routed experts: a tiny random model of it, patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torch_numa_moe
from torch_numa_moe.integrations.packed_module import find_packed

transformers = pytest.importorskip("transformers", minversion="5")

from build_or_skip import OLDER, PAGE, build_or_skip, documented_version, run_or_skip  # noqa: E402
from model_table import INTERFACE, REFUSED, Row, describe, patch_row  # noqa: E402
from tiny_architectures import (  # noqa: E402
    ARCHITECTURES,
    Architecture,
    architectures_behind_the_interface,
    run_architecture,
)

ROWS: dict[str, Row] = {}
"""What the tests of this file found, for the test of the page."""


def documented_way(name: str) -> str:
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    return line.split("|")[3].strip()


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp(min=1e-30))


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_parameters(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert torch.equal(parameter, expected[name]), name


parametrise = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)


@parametrise
def test_fp32_logits(architecture: Architecture) -> None:
    model = build_or_skip(architecture)
    before, expected = snapshot(model), run_architecture(model)
    assert torch.isfinite(expected).all()
    row = ROWS[architecture.name] = patch_row(architecture, model)
    assert OLDER or (row.way == REFUSED) == (documented_way(architecture.name) == REFUSED)
    if row.way == REFUSED:
        assert_same_parameters(model, before)
        assert torch.equal(run_architecture(model), expected)
        return
    assert relative_difference(run_architecture(model), expected) <= 1e-5

    # The comparison can tell: the packed experts are what runs, and they matter.
    for state in find_packed(model).values():
        state.packed.down_proj.mul_(-1)
    assert relative_difference(run_architecture(model), expected) > 1e-2
    for state in find_packed(model).values():
        state.packed.down_proj.mul_(-1)

    torch_numa_moe.unpatch(model)
    assert_same_parameters(model, before)
    assert torch.equal(run_architecture(model), expected)
    model.state_dict()

    if row.way == INTERFACE and not (OLDER and not takes_registered_names(model)):
        model.set_experts_implementation("numa_moe")
        assert relative_difference(run_architecture(model), expected) <= 1e-5
        assert find_packed(model)


def takes_registered_names(model: Any) -> bool:
    try:
        model.get_correct_experts_implementation("numa_moe")
    except ValueError:
        return False
    return True


@parametrise
def test_bf16_layers(architecture: Architecture) -> None:
    """Layer by layer, on what each one gets in an eager run.

    Logits would tell less: where rounding makes a router choose another expert, they differ by far more.
    """
    names = [module.name for module in patched_modules(architecture)]
    model = build_or_skip(architecture).to(torch.bfloat16)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            # Copies: blocks go on in place.
            lambda module, *call, name=name: calls.update({name: copy.deepcopy(call)}),
            with_kwargs=True,
        )
        for name in names
    ]
    run_or_skip(model)
    for handle in handles:
        handle.remove()
    assert calls  # not of all layers: vision experts get no tokens from text
    report = torch_numa_moe.patch(model, progress=False)
    assert {module.format for module in report.modules} <= {"bf16", "fp32"}
    for name, (args, kwargs, expected) in calls.items():
        with torch.no_grad():
            actual = model.get_submodule(name)(*args, **kwargs)
        # A block may return its router's logits too.
        one, other = (pair[0] if isinstance(pair, tuple) else pair for pair in (actual, expected))
        assert one.dtype == other.dtype
        assert relative_difference(one, other) <= 2e-2


def patched_modules(architecture: Architecture) -> tuple[Any, ...]:
    try:
        return torch_numa_moe.patch(build_or_skip(architecture), progress=False).modules
    except torch_numa_moe.UnsupportedExpertsError:
        pytest.skip("refused")


def test_no_architecture_is_missing() -> None:
    assert architectures_behind_the_interface() <= {architecture.name for architecture in ARCHITECTURES}


def test_the_page_says_what_was_found() -> None:
    """Fails after a change: python tests/model_table.py > docs/models.md."""
    if documented_version() != transformers.__version__ or len(ROWS) < len(ARCHITECTURES):
        pytest.skip("another transformers, or not all architectures were run")
    assert PAGE.read_text() == describe(list(ROWS.values()), transformers.__version__)
