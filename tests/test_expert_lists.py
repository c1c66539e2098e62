"""Experts that are modules in a list, in blocks such as models with code of their own have them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torch_numa_moe
from torch_numa_moe.integrations.packed_module import find_packed

pytest.importorskip("transformers", minversion="5")

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 20, 6, 2


class GatedExpert(nn.Module):
    """gate_proj, up_proj, down_proj."""

    def __init__(self, intermediate_size: int = INTERMEDIATE, activation: Any = functional.silu) -> None:
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, intermediate_size, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, HIDDEN, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class NumberedExpert(nn.Module):
    """w1, w2, w3, as in Mixtral, with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.w2 = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.act_fn, self.dropout = nn.GELU(), nn.Dropout(0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.dropout(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)))


class PlainExpert(nn.Module):
    """Two layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class SquareExpert(nn.Module):
    """As wide inside as outside: shapes don't tell which layer is which."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * functional.relu(self.c(x)))


class LoopBlock(nn.Module):
    """Calls one expert after the other, by the softmax of a linear router."""

    def __init__(self, make_expert: Any, *, normalised: bool = True, shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(EXPERTS))
        self.top_k, self.normalised = TOP_K, normalised
        if shared:
            self.shared_expert = GatedExpert(24)
            self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, HIDDEN)
        logits = self.gate(rows)
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.top_k)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(rows.dtype)
        output = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, route = torch.where(ids == index)
            output.index_add_(0, token, expert(rows[token]) * weights[token, route, None])
        if hasattr(self, "shared_expert"):
            output = output + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return output.view(hidden_states.shape), logits


class ScaledInputBlock(nn.Module):
    """The router's weight is on the input, which no block that is understood does."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.local_experts = nn.ModuleDict({f"expert_{index}": GatedExpert() for index in range(EXPERTS)})

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores, ids = self.router(hidden_states).sigmoid().max(dim=-1)
        output = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.local_experts.values()):
            chosen = ids == index
            output[chosen] = expert(hidden_states[chosen] * scores[chosen][:, None])
        return output


class InferBlock(nn.Module):
    """A router of its own, and moe_infer, as in DeepSeek's code."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(GatedExpert() for _ in range(EXPERTS))
        self.shared_experts = GatedExpert(24)
        self.scale = scale

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, HIDDEN)
        weights, ids = self.router(rows).sigmoid().topk(TOP_K)
        output = self.moe_infer(rows, ids, weights)
        return (output + self.shared_experts(rows)).view(hidden_states.shape)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, route = torch.where(topk_ids == index)
            if token.numel():
                output.index_add_(0, token, expert(x[token]) * topk_weight[token, route, None])
        return output * self.scale


BLOCKS: dict[str, Any] = {
    "gated": lambda: LoopBlock(GatedExpert),
    "numbered": lambda: LoopBlock(NumberedExpert, normalised=False),
    "plain": lambda: LoopBlock(PlainExpert),
    "square": lambda: LoopBlock(SquareExpert),
    "shared": lambda: LoopBlock(GatedExpert, normalised=False, shared=True),
    "scaled-input": ScaledInputBlock,
    "infer": InferBlock,
    "infer-scaled": lambda: InferBlock(2.5),
}
ACTIVATIONS = {"numbered": "gelu", "plain": "gelu_tanh", "square": "relu"}
FUSED = {"gated", "numbered", "plain", "square", "shared", "infer"}


def build(make: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.LayerNorm(HIDDEN)).eval()
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            parameter.mul_(2 if "bias" in name else 4)
    return model.to(dtype)


def run(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        output = model[0](rows)  # type: ignore[index]
    return output[0] if isinstance(output, tuple) else output


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_gives_what_it_gave(name: str, dtype: torch.dtype) -> None:
    model = build(BLOCKS[name], dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = run(model, dtype)
    report = torch_numa_moe.patch(model, progress=False)
    assert [module.activation for module in report.modules] == [ACTIVATIONS.get(name, "silu")]
    assert report.modules[0].num_experts == EXPERTS
    actual = run(model, dtype)
    assert actual.dtype == dtype
    assert relative_difference(actual, expected) <= (1e-5 if dtype == torch.float32 else 2e-2)
    with pytest.raises(RuntimeError, match="unpatch"):
        model.state_dict()
    freed = [value for key, value in model.named_parameters() if "expert" in key and "shared" not in key]
    assert sum(parameter.untyped_storage().nbytes() for parameter in freed) == 0

    (state,) = find_packed(model).values()
    state.packed.down_proj.mul_(-1)
    assert relative_difference(run(model, dtype), expected) > 0.1
    state.packed.down_proj.mul_(-1)

    torch_numa_moe.unpatch(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(run(model, dtype), expected)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", BLOCKS)
def test_one_call_for_all_experts_where_routing_is_understood(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(BLOCKS[name])
    torch_numa_moe.patch(model, progress=False)
    calls = []
    original = torch_numa_moe.PackedExperts.__call__

    def counting(self: Any, *args: Tensor) -> Tensor:
        calls.append(args[1].shape)
        return original(self, *args)

    monkeypatch.setattr(torch_numa_moe.PackedExperts, "__call__", counting)
    run(model)
    assert (len(calls) == 1) == (name in FUSED)
    assert len(calls) == 1 or all(shape[1] == 1 for shape in calls)


def test_a_copy_is_independent() -> None:
    model = build(BLOCKS["scaled-input"])
    expected = run(model)
    torch_numa_moe.patch(model, progress=False)
    duplicate = copy.deepcopy(model)
    torch_numa_moe.unpatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert relative_difference(run(duplicate), expected) <= 1e-5
    torch_numa_moe.unpatch(duplicate)
    assert torch.equal(run(duplicate), expected)


def test_patching_in_training_mode_and_twice() -> None:
    model = build(BLOCKS["numbered"]).train()
    random_state = torch.get_rng_state()
    first = torch_numa_moe.patch(model, progress=False)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert torch_numa_moe.patch(model, progress=False).modules == first.modules


def test_a_refused_layer_leaves_the_others_unchanged() -> None:
    model = nn.Sequential(
        LoopBlock(GatedExpert), LoopBlock(lambda: GatedExpert(activation=torch.tanh))
    ).eval()
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError) as raised:
        torch_numa_moe.patch(model, progress=False)
    assert list(raised.value.reasons) == ["1"]
    assert not find_packed(model)
    model.state_dict()


def test_an_interrupt_restores_what_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_numa_moe.integrations import replaced_module

    model = nn.Sequential(LoopBlock(GatedExpert), LoopBlock(GatedExpert)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    calls, original = [], replaced_module.pack_weights

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(replaced_module, "pack_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch_numa_moe.patch(model, progress=False)
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


class NormedExpert(GatedExpert):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class WeightedExpert(GatedExpert):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * weight


class ResidualExpert(GatedExpert):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def mixed_sizes() -> LoopBlock:
    sizes = iter(range(8, 8 + EXPERTS))
    return LoopBlock(lambda: GatedExpert(next(sizes)))


def mixed_activations() -> LoopBlock:
    activations = iter([functional.silu] * (EXPERTS - 1) + [functional.relu])
    return LoopBlock(lambda: GatedExpert(activation=next(activations)))


def mixed_classes() -> LoopBlock:
    block = LoopBlock(GatedExpert)
    block.experts[1] = PlainExpert()
    return block


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: LoopBlock(NormedExpert), "isn't an FFN of two or three linear layers: it has .*norm.weight"),
        (lambda: LoopBlock(WeightedExpert), "isn't down.*missing 1 required positional argument"),
        (lambda: LoopBlock(ResidualExpert), "isn't down"),
        (lambda: LoopBlock(lambda: GatedExpert(activation=functional.mish)), "an activation of the op"),
        (lambda: LoopBlock(lambda: nn.Linear(HIDDEN, HIDDEN)), "each expert is one linear layer"),
        (mixed_sizes, "its experts differ in their shapes"),
        (mixed_activations, "its first and its last expert don't compute the same function"),
        (mixed_classes, "0 is a GatedExpert, 1 a PlainExpert"),
        (lambda: LoopBlock(GatedExpert).double(), "is torch.float64"),
        (lambda: LoopBlock(GatedExpert).to("meta"), "is on meta"),
    ],
    ids=[
        "norm",
        "weight-inside",
        "residual",
        "mish",
        "linear",
        "sizes",
        "activations",
        "classes",
        "double",
        "meta",
    ],
)
def test_refusals(make: Any, reason: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError, match=reason) as raised:
        torch_numa_moe.patch(model, progress=False)
    assert list(raised.value.reasons) == ["0"] or list(raised.value.reasons) == ["0.experts"]
    assert not find_packed(model)


def test_lists_of_other_things_are_left_alone() -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(GatedExpert() for _ in range(3)),
            "shared_experts": nn.ModuleList(GatedExpert() for _ in range(2)),
        }
    )
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError, match="has no experts that can be packed"):
        torch_numa_moe.patch(model, progress=False)
