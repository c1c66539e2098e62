"""Blocks of the layouts of Llama-4, DBRX, JetMoE and others outside the interface: what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torch_numa_moe
from tiny_architectures import ARCHITECTURES
from torch_numa_moe.integrations.packed_module import find_packed

pytest.importorskip("transformers", minversion="5")

from build_or_skip import build_or_skip

EXPERTS, HIDDEN, INTERMEDIATE = 5, 24, 20


class StackedExperts(nn.Module):
    """Stacked weights of any layout, without the interface."""

    def __init__(
        self, *, transposed: bool, interleaved: bool, power: int = 1, activation: Any = None
    ) -> None:
        super().__init__()
        gate_up, down = (
            torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            torch.randn(EXPERTS, HIDDEN, INTERMEDIATE),
        )
        if transposed:
            gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up / 4), nn.Parameter(down / 4)
        self.transposed, self.interleaved, self.power = transposed, interleaved, power
        self.activation = nn.SiLU() if activation is None else activation

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        return self.activation(gate) * up

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for token in range(ids.shape[0]):
            for route, expert in enumerate(ids[token].tolist()):
                up, down = self.gate_up_proj[expert], self.down_proj[expert]
                if not self.transposed:
                    up, down = up.T, down.T
                row = self._apply_gate(hidden_states[token, None] @ up) @ down
                output[token] += row[0] * weights[token, route] ** self.power
        return output


def routed(model: nn.Module) -> Tensor:
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 1], [4, 2], [3, 3], [2, 0]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, 0.5], [0.0, 1.0]])
    with torch.no_grad():
        return model[0](rows, ids, weights)  # type: ignore[index]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_of_any_layout(transposed: bool, interleaved: bool) -> None:
    model = nn.Sequential(StackedExperts(transposed=transposed, interleaved=interleaved))
    before, expected = {key: value.clone() for key, value in model.state_dict().items()}, routed(model)
    torch_numa_moe.patch(model, progress=False)
    assert float((routed(model) - expected).abs().max() / expected.abs().max()) <= 1e-5
    torch_numa_moe.unpatch(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class WithIdentities(StackedExperts):
    """Two ids more than there are experts; their gate_up_proj is there, and unused."""

    def __init__(self, added: float = 1.0) -> None:
        super().__init__(transposed=False, interleaved=False)
        self.gate_up_proj = nn.Parameter(
            torch.cat((self.gate_up_proj.data, torch.randn(2, 2 * INTERMEDIATE, HIDDEN)))
        )
        self.added = added

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        identity = (weights * (ids >= EXPERTS)).sum(-1, keepdim=True) * hidden_states
        known = super().forward(hidden_states, ids.clamp(max=EXPERTS - 1), weights * (ids < EXPERTS))
        return known + self.added * identity


def test_identity_experts() -> None:
    model = nn.Sequential(WithIdentities())
    ids = torch.tensor([[0, 5], [6, 6], [4, 1], [5, 2]])
    rows, weights = torch.randn(4, HIDDEN), torch.rand(4, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model[0](rows, ids, weights)
        report = torch_numa_moe.patch(model, progress=False)
        assert report.modules[0].num_experts == EXPERTS
        assert float((model[0](rows, ids, weights) - expected).abs().max()) <= 1e-5
    torch_numa_moe.unpatch(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "computes something else" in reason(WithIdentities(added=0.5))


def test_ids_beyond_the_experts_that_do_something_are_refused() -> None:
    experts = WithIdentities()
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data[:EXPERTS])
    assert "does something for ids from 5 on" in reason(experts)


def test_experts_that_do_something_else_with_their_weights_are_refused() -> None:
    assert "computes something else" in reason(StackedExperts(transposed=False, interleaved=False, power=2))
    unknown = StackedExperts(transposed=False, interleaved=False, activation=functional.mish)
    assert "none of those that the op computes" in reason(unknown)
    scaled = StackedExperts(transposed=False, interleaved=False)
    scaled.scale = nn.Parameter(torch.ones(EXPERTS))
    assert "weights that the op doesn't know: scale" in reason(scaled)


def reason(module: nn.Module) -> str:
    model = nn.Sequential(module).eval()
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError) as raised:
        torch_numa_moe.patch(model, progress=False)
    assert not find_packed(model)
    (text,) = set(raised.value.reasons.values())
    return text


def tiny(name: str) -> Any:
    return build_or_skip(next(one for one in ARCHITECTURES if one.name == name))


def first_block(model: nn.Module, ending: str) -> Any:
    return next(module for module in model.modules() if type(module).__name__ == ending)


@pytest.mark.parametrize(
    ("name", "block_class"),
    [("llama4", "Llama4TextMoe"), ("dbrx", "DbrxExperts"), ("jetmoe", "JetMoeMoE")],
)
def test_a_block_whose_forward_was_changed_is_refused(
    name: str, block_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = first_block(tiny(name), block_class)
    original = type(block).forward

    def doubled(self: nn.Module, *args: Tensor) -> Any:
        output = original(self, *args)
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2

    monkeypatch.setattr(type(block), "forward", doubled)
    assert "its forward computes something else than its structure suggests" in reason(block)

    def failing(self: nn.Module, *args: Tensor) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(type(block), "forward", failing)
    assert "its forward can't be tried: RuntimeError: no such kernel" in reason(block)


@pytest.mark.parametrize(("name", "block_class"), [("llama4", "Llama4TextMoe"), ("dbrx", "DbrxFFN")])
def test_a_patched_block_is_one_graph(name: str, block_class: str) -> None:
    model = tiny(name)
    torch_numa_moe.patch(model, progress=False)
    block = first_block(model, block_class)
    rows = torch.randn(1, 5, 64)
    compiled = torch.compile(block, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows), block(rows))


@pytest.mark.parametrize("name", ["llama4", "dbrx", "jetmoe", "switch_transformers"])
def test_weights_that_cant_be_packed_are_refused(name: str) -> None:
    assert "is torch.float64" in reason(tiny(name).double())
    assert "is on meta" in reason(tiny(name).to("meta"))


def test_a_forward_that_somebody_replaced_is_refused() -> None:
    model = tiny("dbrx")
    experts = first_block(model, "DbrxExperts")
    experts.mlp.forward = experts.mlp.forward
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError, match="the forward of mlp has been replaced"):
        torch_numa_moe.patch(model, progress=False)


def test_stacked_experts_in_a_block_that_isnt_known_are_refused() -> None:
    model = tiny("llama4")
    block = first_block(model, "Llama4TextMoe")
    block.second_router = block.router
    del block.router
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError, match="the block around it isn't known"):
        torch_numa_moe.patch(model, progress=False)
