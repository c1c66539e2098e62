"""Patched transformers models under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_numa_moe

transformers = pytest.importorskip("transformers", minversion="5")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from tiny_models import FAMILIES, NUM_LAYERS, build_model, experts_modules, token_ids  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def op_calls(graph_module: torch.fx.GraphModule) -> int:
    op = torch.ops.numa_moe.experts
    return sum(node.target in (op, op.default) for node in graph_module.graph.nodes)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_with_one_op_call_per_layer(family: str) -> None:
    model = build_model(family)
    lengths = (11, 5, 24, 40)
    with torch.no_grad():
        expected = [model(input_ids=token_ids(length=length)).logits for length in lengths]
        torch_numa_moe.patch(model, progress=False)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for length, eager in zip(lengths, expected, strict=True):
            logits = compiled(input_ids=token_ids(length=length)).logits
            assert (logits - eager).abs().max() <= 1e-5 * eager.abs().max()
    assert counter.frame_count == 1, "one graph for all lengths"
    assert [op_calls(graph) for graph in counter.graphs] == [NUM_LAYERS]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_share_one_compiled_graph(family: str) -> None:
    """Compiled by the layer, as large models are: a handle in the graph would recompile it every time."""
    model = build_model(family, num_hidden_layers=10)  # more than torch's limit of recompilations
    with torch.no_grad():
        expected = [model(input_ids=token_ids(length=length)).logits for length in (11, 5)]
        torch_numa_moe.patch(model, progress=False)
        counter = CompileCounterWithBackend("eager")
        modules = experts_modules(model)
        assert len(modules) == 10
        for name in modules:
            block = model.get_submodule(name.rpartition(".")[0])
            block.compile(fullgraph=True, dynamic=True, backend=counter)
        for length, eager in zip((11, 5), expected, strict=True):
            logits = model(input_ids=token_ids(length=length)).logits
            assert (logits - eager).abs().max() <= 1e-5 * eager.abs().max()
    assert counter.frame_count == 1
    assert op_calls(counter.graphs[0]) == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_inductor(family: str) -> None:
    model = build_model(family, num_hidden_layers=1)
    with torch.no_grad():
        expected = model(input_ids=token_ids()).logits
        torch_numa_moe.patch(model, progress=False)
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        logits = compiled(input_ids=token_ids()).logits
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_generation_with_a_compiled_decode_step() -> None:
    model = build_model("qwen3_moe", num_hidden_layers=2)
    compile_config = transformers.CompileConfig(mode="default", fullgraph=True)
    compile_config._compile_all_devices = True  # without it generate() compiles on accelerators only

    def generate(**options: Any) -> list[list[int]]:
        return model.generate(
            token_ids(),
            attention_mask=torch.ones_like(token_ids()),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            cache_implementation="static",
            **options,
        ).tolist()

    expected = generate(disable_compile=True)
    torch_numa_moe.patch(model, progress=False)
    assert generate(compile_config=compile_config) == expected
    assert hasattr(model, "_compiled_call"), "nothing was compiled"


def test_unpacked_experts_in_a_full_graph_are_told_to_patch() -> None:
    model = build_model("qwen3_moe", implementation="numa_moe")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"call torch_numa_moe.patch\(model\) before torch.compile"),
    ):
        compiled(input_ids=token_ids())


def test_unpacked_experts_without_full_graph_pack_and_then_compile() -> None:
    model = build_model("qwen3_moe")
    with torch.no_grad():
        expected = model(input_ids=token_ids()).logits
        model.set_experts_implementation("numa_moe")
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            logits = compiled(input_ids=token_ids()).logits
            assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert all(module.gate_up_proj.shape[0] == 0 for module in experts_modules(model).values())


def test_unpatching_a_compiled_model() -> None:
    """The graph with the op must not be used once the packed weights are gone."""
    model = build_model("qwen3_moe", implementation="grouped_mm", num_hidden_layers=1)
    with torch.no_grad():
        expected = model(input_ids=token_ids()).logits
        torch_numa_moe.patch(model, progress=False)
        compiled = torch.compile(model, backend="eager")
        compiled(input_ids=token_ids())
        torch_numa_moe.unpatch(model)
        for module in experts_modules(model).values():
            module.down_proj.data.mul_(-1)
        eager = model(input_ids=token_ids()).logits
        assert (eager - expected).abs().max() > 1e-2
        assert (compiled(input_ids=token_ids()).logits - eager).abs().max() <= 1e-5 * eager.abs().max()
