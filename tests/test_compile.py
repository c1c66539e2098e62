"""The op under torch.library's checks, torch.compile, export and autograd."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing

from reference import random_layer, random_routing
from torch_numa_moe import pack_experts
from torch_numa_moe.packing import PackedExperts


def make(experts: int = 4, bias: bool = False, **keywords) -> PackedExperts:
    layer = random_layer(experts, 32, 48, bias=bias)
    return pack_experts(
        layer.gate_up_proj,
        layer.down_proj,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        **keywords,
    )


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32])
def test_opcheck(tokens: int, hidden_dtype: torch.dtype) -> None:
    packed = make(bias=True, activation="swiglu_oai", limit=7.0)
    ids, weights = random_routing(tokens, 2, 4)
    torch.library.opcheck(
        torch.ops.numa_moe.experts.default,
        (torch.randn(tokens, 32).to(hidden_dtype), ids, weights, packed.gate_up_proj, packed.down_proj),
        dict(
            gate_up_bias=packed.gate_up_bias, down_bias=packed.down_bias, activation="swiglu_oai",
            alpha=1.702, limit=7.0,
        ),
    )  # fmt: skip


def test_opcheck_of_packing() -> None:
    packed = make()
    gate, up = torch.randn(2, 48, 32), torch.randn(2, 48, 32)
    down = torch.randn(2, 32, 48)
    torch.library.opcheck(torch.ops.numa_moe.pack_gate_up.default, (packed.gate_up_proj, gate, up, 1))
    torch.library.opcheck(torch.ops.numa_moe.pack_down.default, (packed.down_proj, down, 1))
    torch.library.opcheck(torch.ops.numa_moe.unpack_gate_up.default, (packed.gate_up_proj, gate, up, 1))
    torch.library.opcheck(torch.ops.numa_moe.unpack_down.default, (packed.down_proj, down, 1))


def test_the_fake_kernel_refuses_mismatched_rows() -> None:
    packed = make()
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="row per token"),
    ):
        torch.ops.numa_moe.experts(
            torch.empty(3, 32), torch.empty(2, 2, dtype=torch.int64), torch.empty(2, 2), packed.gate_up_proj,
            packed.down_proj,
        )  # fmt: skip


class Layer(torch.nn.Module):
    """A router and packed experts, as a model would hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(32, 4)
        self.packed = make()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(hidden).softmax(-1).topk(2, dim=-1)
        return hidden + self.packed(hidden, ids, weights)


@torch.no_grad()
def test_compile_full_graph_with_dynamic_tokens() -> None:
    model = torch.nn.Sequential(*[Layer() for _ in range(3)])
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 16, 3, 33):
        hidden = torch.randn(tokens, 32)
        torch.testing.assert_close(compiled(hidden), model(hidden))
    assert counter.frame_count == 1


@torch.no_grad()
def test_layers_share_one_compiled_graph() -> None:
    """Regional compilation: twelve layers, one graph, no recompile because of us."""
    layers = [Layer() for _ in range(12)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    hidden = torch.randn(5, 32)
    expected = hidden
    for layer in layers:
        expected = layer(expected)
    torch._dynamo.reset()
    actual = hidden
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
        actual = layer(actual)
    torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 1


@torch.no_grad()
def test_export_runs() -> None:
    model = Layer()
    hidden = torch.randn(5, 32)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(model, (hidden,), dynamic_shapes=({0: tokens},))
    assert any("numa_moe.experts" in str(node.target) for node in program.graph.nodes)
    for count in (5, 9):
        hidden = torch.randn(count, 32)
        torch.testing.assert_close(program.module()(hidden), model(hidden))


def test_backward_raises_a_sentence() -> None:
    packed = make()
    ids, weights = random_routing(3, 2, 4)
    out = packed(torch.randn(3, 32, requires_grad=True), ids, weights)
    with pytest.raises(NotImplementedError, match="numa_moe::experts has no backward: it is for inference"):
        out.sum().backward()


def test_inference_mode_and_no_grad() -> None:
    packed = make()
    ids, weights = random_routing(3, 2, 4)
    hidden = torch.randn(3, 32, requires_grad=True)
    with torch.no_grad():
        expected = packed(hidden, ids, weights)
    with torch.inference_mode():
        assert torch.equal(packed(hidden, ids, weights), expected)
    assert not expected.requires_grad


def test_runs_in_a_fresh_process_without_pack_experts(tmp_path) -> None:
    """The op starts the pool by itself: a compiled package needs nothing of ours but the import."""
    packed = make()
    ids, weights = random_routing(3, 2, 4)
    hidden = torch.randn(3, 32)
    torch.save(
        (
            hidden,
            ids,
            weights,
            packed.gate_up_proj.clone(),
            packed.down_proj.clone(),
            packed(hidden, ids, weights),
        ),
        tmp_path / "call.pt",
    )
    script = (
        "import torch, torch_numa_moe, sys\n"
        "*given, expected = torch.load(sys.argv[1])\n"
        "assert torch.equal(torch.ops.numa_moe.experts(*given), expected)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "call.pt")], check=True, timeout=120)
