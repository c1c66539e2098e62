"""transformers models through patch(), unpatch() and experts_implementation="numa_moe"."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_numa_moe
from torch_numa_moe import PackedExperts, pack_experts
from torch_numa_moe.integrations import experts_interface, packed_module
from torch_numa_moe.integrations.packed_module import find_packed, packed_state

transformers = pytest.importorskip("transformers", minversion="5")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from tiny_models import (  # noqa: E402
    FAMILIES,
    NUM_EXPERTS,
    NUM_LAYERS,
    build_model,
    experts_modules,
    token_ids,
)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def largest_relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def packed_experts(model: nn.Module) -> list[PackedExperts]:
    """Of each layer that is packed."""
    states = [packed_state(module) for module in experts_modules(model).values()]
    return [state.packed for state in states if state is not None]


def implementations(model: Any) -> set[str]:
    return {module.config._experts_implementation for module in experts_modules(model).values()}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_parameters(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter, expected[name]), name


# The six families: values


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_eager_in_fp32(family: str) -> None:
    model = build_model(family)
    expected = logits(model, token_ids())
    report = torch_numa_moe.patch(model, progress=False)
    assert len(report.modules) == NUM_LAYERS
    assert implementations(model) == {"numa_moe"}
    assert largest_relative_difference(logits(model, token_ids()), expected) <= 1e-5

    # The comparison can tell: one wrong expert row in one layer moves the logits by far more.
    packed_experts(model)[1].down_proj[0, :, 0].mul_(-1)
    assert largest_relative_difference(logits(model, token_ids()), expected) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_near_to_fp32_as_eagers(family: str) -> None:
    # With all experts chosen, rounding can't flip a choice of expert: what differs is arithmetic.
    model = build_model(family, dtype=torch.bfloat16, num_experts_per_tok=NUM_EXPERTS)
    reference = build_model(family, num_experts_per_tok=NUM_EXPERTS)
    reference.load_state_dict(model.state_dict())
    expected = logits(reference, token_ids())
    eager_error = largest_relative_difference(logits(model, token_ids()), expected)
    report = torch_numa_moe.patch(model, progress=False)
    assert {module.format for module in report.modules} == {"bf16"}
    error = largest_relative_difference(logits(model, token_ids()), expected)
    assert error <= 1.25 * eager_error
    assert eager_error < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_layer_is_nearer_to_fp32_than_eager(family: str) -> None:
    model = build_model(family, dtype=torch.bfloat16)
    name, layer = next(iter(experts_modules(model).items()))
    reference = build_model(family).get_submodule(name)
    reference.load_state_dict(layer.state_dict())
    hidden = torch.randn(17, 64).bfloat16()
    weights, ids = torch.rand(17, NUM_EXPERTS).topk(2)
    with torch.no_grad():
        expected = reference(hidden.float(), ids, weights)
        eager = largest_relative_difference(layer(hidden, ids, weights.bfloat16()).float(), expected)
        torch_numa_moe.patch(model, progress=False)
        error = largest_relative_difference(layer(hidden, ids, weights).float(), expected)
    assert error <= eager
    assert error < 0.02


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_gives_eagers_tokens(family: str, cache: str) -> None:
    model = build_model(family)

    def generate() -> torch.Tensor:
        return model.generate(
            token_ids(),
            attention_mask=torch.ones_like(token_ids()),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            cache_implementation=cache,
        )

    expected = generate()
    assert len(set(expected[:, token_ids().shape[1] :].flatten().tolist())) > 4
    torch_numa_moe.patch(model, progress=False)
    assert generate().tolist() == expected.tolist()


def test_gpt_oss_clamp_is_reached() -> None:
    """The family's test above says nothing about the limit unless activations go past it."""
    model = build_model("gpt_oss")
    for module in experts_modules(model).values():
        module.gate_up_proj.data.mul_(8)
    expected = logits(model, token_ids())
    report = torch_numa_moe.patch(model, progress=False)
    assert {module.activation for module in report.modules} == {"swiglu_oai(alpha=1.702, limit=7)"}
    assert largest_relative_difference(logits(model, token_ids()), expected) <= 1e-5
    for packed in packed_experts(model):
        packed.limit = 1e9
    assert largest_relative_difference(logits(model, token_ids()), expected) > 1e-2


def test_token_counts_and_sentinels() -> None:
    model = build_model("qwen3_moe")
    layer = next(iter(experts_modules(model).values()))
    cases = []
    for tokens in (0, 1, 3, 130):
        hidden = torch.randn(tokens, 64)
        weights, ids = torch.rand(tokens, NUM_EXPERTS).topk(2)
        ids[tokens // 2 :, 1] = (
            NUM_EXPERTS  # what expert parallelism hands over for an expert of another rank
        )
        weights[tokens // 2 :, 1] = 0
        with torch.no_grad():
            cases.append((hidden, ids, weights, layer(hidden, ids, weights)))
    torch_numa_moe.patch(model, progress=False)
    for hidden, ids, weights, expected in cases:
        with torch.no_grad():
            torch.testing.assert_close(layer(hidden, ids, weights), expected, rtol=1e-5, atol=1e-5)


# patch and unpatch


def test_report() -> None:
    model = build_model("gpt_oss", dtype=torch.bfloat16)
    report = torch_numa_moe.patch(model, progress=False)
    assert [module.name for module in report.modules] == [
        f"model.layers.{layer}.mlp.experts" for layer in range(NUM_LAYERS)
    ]
    for module in report.modules:
        assert (module.num_experts, module.hidden_size, module.intermediate_size) == (NUM_EXPERTS, 64, 40)
        assert (module.format, module.source_dtype) == ("bf16", torch.bfloat16)
        # 3 matrices of 64 x 40 per expert at least, padding and biases on top.
        assert NUM_EXPERTS * 3 * 64 * 40 * 2 <= module.nbytes < 2 * NUM_EXPERTS * 3 * 64 * 40 * 2
        assert module.placement
    assert report.nbytes == sum(module.nbytes for module in report.modules)
    assert sum(placement.bytes for placement in report.placement) == sum(
        placement.bytes for module in report.modules for placement in module.placement
    )
    assert report.previous_implementations == ("eager",)
    text = str(report)
    assert "3 MoE layers" in text
    assert "model.layers.{0-2}.mlp.experts: 8 experts, hidden_size 64, intermediate_size 40" in text
    assert "bf16 from bfloat16" in text
    assert "slice 0" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_unpatch_restores_bit_for_bit(family: str, dtype: torch.dtype, caplog: Any) -> None:
    model = build_model(family, dtype=dtype)
    before, objects = snapshot(model), {name: id(value) for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch_numa_moe.patch(model, progress=False)
    torch_numa_moe.unpatch(model)
    assert_same_parameters(model, before)
    assert {name: id(value) for name, value in model.named_parameters()} == objects
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert implementations(model) == {"eager"}
    assert not caplog.records


def test_unpatch_says_once_that_weights_were_rounded(caplog: Any) -> None:
    model = build_model("mixtral")
    before = snapshot(model)
    report = torch_numa_moe.patch(model, format="bf16", progress=False)
    assert {module.format for module in report.modules} == {"bf16"}
    with caplog.at_level(logging.WARNING, logger="torch_numa_moe"):
        torch_numa_moe.unpatch(model)
    assert len(caplog.records) == 1
    assert "packed as bf16 from float32" in caplog.text
    assert_same_parameters(
        model,
        {name: value.bfloat16().float() if ".experts." in name else value for name, value in before.items()},
    )


def test_a_wider_format_restores_exactly(caplog: Any) -> None:
    model = build_model("olmoe", dtype=torch.bfloat16)
    before = snapshot(model)
    torch_numa_moe.patch(model, format="fp32", progress=False)
    torch_numa_moe.unpatch(model)
    assert_same_parameters(model, before)
    assert not caplog.records


def test_patching_frees_the_original_weights() -> None:
    model = build_model("qwen3_moe")
    parameters = [value for name, value in model.named_parameters() if ".experts." in name]
    assert len(parameters) == 2 * NUM_LAYERS
    torch_numa_moe.patch(model, progress=False)
    assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == 0
    assert all(parameter.shape[0] == 0 and parameter.dim() == 3 for parameter in parameters)


def test_patching_twice_changes_nothing() -> None:
    model = build_model("qwen3_moe")
    first = torch_numa_moe.patch(model, progress=False)
    packed = packed_experts(model)
    second = torch_numa_moe.patch(model, progress=False)
    assert second.modules == first.modules
    again = packed_experts(model)
    assert all(one is other for one, other in zip(packed, again, strict=True))
    with pytest.raises(ValueError, match=r"already packed as fp32: call torch_numa_moe.unpatch\(model\)"):
        torch_numa_moe.patch(model, format="bf16")


def test_unpatch_leaves_an_unpatched_model_alone() -> None:
    model = build_model("qwen3_moe", implementation="grouped_mm")
    before = snapshot(model)
    torch_numa_moe.unpatch(model)
    assert_same_parameters(model, before)
    assert implementations(model) == {"grouped_mm"}


def test_bad_arguments() -> None:
    model = build_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"format must be one of bf16, .*auto.*got 'int3'"):
        torch_numa_moe.patch(model, format="int3")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        torch_numa_moe.patch("Qwen/Qwen3-30B-A3B")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        torch_numa_moe.unpatch("Qwen/Qwen3-30B-A3B")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_as_before_when_packing_is_cut_short(
    error: type[BaseException], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("gpt_oss", dtype=dtype)
    before, expected = snapshot(model), logits(model, token_ids())
    calls = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == NUM_LAYERS:
            raise error
        return pack_experts(*arguments, **options)

    monkeypatch.setattr(packed_module, "pack_experts", interrupted)
    with pytest.raises(error):
        torch_numa_moe.patch(model, progress=False)
    assert len(calls) == NUM_LAYERS
    assert_same_parameters(model, before)
    assert implementations(model) == {"eager"}
    assert torch.equal(logits(model, token_ids()), expected)
    model.state_dict()


def test_an_interrupt_while_parameters_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3_moe")
    before = snapshot(model)
    new_empty, calls = torch.Tensor.new_empty, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first layer's second parameter
            raise KeyboardInterrupt
        return new_empty(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch_numa_moe.patch(model, progress=False)
    assert len(calls) == 2
    assert_same_parameters(model, before)
    model.state_dict()


def test_progress_bar_is_on_stderr_of_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever others set for the process, such as the demo.
    monkeypatch.setattr("transformers.utils.logging.is_progress_bar_enabled", lambda: True)

    class Stream(io.StringIO):
        terminal = False

        def isatty(self) -> bool:
            return self.terminal

    def shown(*, terminal: bool, progress: bool) -> str:
        stream = Stream()
        stream.terminal = terminal
        monkeypatch.setattr(sys, "stderr", stream)
        torch_numa_moe.patch(build_model("qwen3_moe"), progress=progress)
        return stream.getvalue()

    assert "Packing experts: 100%" in shown(terminal=True, progress=True)
    assert shown(terminal=True, progress=False) == ""
    assert shown(terminal=False, progress=True) == ""


# What a patched model can't do, and what it still can


def test_saving_a_patched_model_is_refused(tmp_path: Path) -> None:
    model = build_model("qwen3_moe")
    state = model.state_dict()
    torch_numa_moe.patch(model, progress=False)
    message = r"model.layers.0.mlp.experts is packed .*torch_numa_moe.unpatch\(model\)"
    with pytest.raises(RuntimeError, match=message):
        model.state_dict()
    with pytest.raises(RuntimeError, match=message):
        model.save_pretrained(tmp_path / "packed")
    assert not list((tmp_path / "packed").glob("*.safetensors"))
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    with pytest.raises(TypeError, match="unpatch"):
        pickle.dumps(model)
    torch_numa_moe.unpatch(model)
    model.load_state_dict(state)
    model.save_pretrained(tmp_path / "restored")
    again = type(model).from_pretrained(tmp_path / "restored", experts_implementation="eager")
    assert_same_parameters(again, snapshot(model))


def test_a_copy_is_independent() -> None:
    model = build_model("gpt_oss")
    before, expected = snapshot(model), logits(model, token_ids())
    torch_numa_moe.patch(model, progress=False)
    duplicate = copy.deepcopy(model)
    torch_numa_moe.unpatch(model)
    assert_same_parameters(model, before)
    model.state_dict()
    for module in experts_modules(model).values():
        module.down_proj.data.zero_()
    assert implementations(duplicate) == {"numa_moe"}
    assert largest_relative_difference(logits(duplicate, token_ids()), expected) <= 1e-5
    with pytest.raises(RuntimeError, match="unpatch"):
        duplicate.state_dict()
    torch_numa_moe.unpatch(duplicate)
    assert_same_parameters(duplicate, before)
    duplicate.state_dict()


def test_moving_and_initialising_leave_packed_weights_alone() -> None:
    model = build_model("qwen3_moe")
    before = snapshot(model)
    torch_numa_moe.patch(model, progress=False)
    packed = packed_experts(model)
    weights = [one.gate_up_proj.clone() for one in packed]
    model.half().to(torch.bfloat16).to("cpu")
    for module in experts_modules(model).values():
        model._init_weights(module)
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu"
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    for one, weight in zip(packed, weights, strict=True):
        assert one.gate_up_proj.dtype == torch.float32
        assert torch.equal(one.gate_up_proj, weight)
    assert torch.isfinite(logits(model, token_ids())).all()
    torch_numa_moe.unpatch(model)
    name = "model.layers.0.mlp.experts.down_proj"
    restored = dict(model.named_parameters())[name]
    # The dtype that the layer was moved to, but not by way of fp16.
    assert torch.equal(restored, before[name].bfloat16())


def test_resizing_embeddings_of_a_patched_model() -> None:
    model = build_model("mixtral")
    expected = logits(model, token_ids())
    torch_numa_moe.patch(model, progress=False)
    model.resize_token_embeddings(expected.shape[-1] + 8)
    resized = logits(model, token_ids())[..., : expected.shape[-1]]
    assert largest_relative_difference(resized, expected) <= 1e-5


@pytest.mark.parametrize("other", ["eager", "grouped_mm", "batched_mm"])
def test_another_implementation_on_packed_experts_is_refused(other: str) -> None:
    model = build_model("qwen3_moe")
    torch_numa_moe.patch(model, progress=False)
    model.set_experts_implementation(other)
    with pytest.raises(RuntimeError, match=f"the model is set to '{other}'. Call torch_numa_moe.unpatch"):
        logits(model, token_ids())
    torch_numa_moe.unpatch(model)
    assert implementations(model) == {other}
    logits(model, token_ids())


@pytest.mark.parametrize("by_name", [False, True])
def test_training_is_refused(by_name: bool) -> None:
    model = build_model("qwen3_moe", implementation="numa_moe" if by_name else "eager")
    if not by_name:
        torch_numa_moe.patch(model, progress=False)
    model.train()
    with pytest.raises(RuntimeError, match=r"is for inference.*model.eval\(\)"):
        model(input_ids=token_ids())
    if by_name:
        assert not packed_experts(model)
    logits(model, token_ids())  # training mode without gradients
    model.eval()
    output = model(input_ids=token_ids()).logits
    with pytest.raises(NotImplementedError, match="no backward"):
        output.sum().backward()


# Selected by name


def test_from_pretrained_by_name(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_model("qwen3_moe")
    source.save_pretrained(tmp_path)
    expected = logits(source, token_ids())
    monkeypatch.setattr(experts_interface, "_lazy_packing_logged", False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="numa_moe", dtype=torch.float32
    )
    assert not packed_experts(model)
    with caplog.at_level(logging.INFO, logger="torch_numa_moe"):
        assert largest_relative_difference(logits(model, token_ids()), expected) <= 1e-5
        logits(model, token_ids())
    assert len([record for record in caplog.records if record.name == "torch_numa_moe"]) == 1
    assert "at their first forward" in caplog.text
    for module in experts_modules(model).values():
        assert module.gate_up_proj.shape[0] == 0
    report = torch_numa_moe.patch(model, progress=False)
    assert len(report.modules) == NUM_LAYERS
    torch_numa_moe.unpatch(model)
    assert_same_parameters(model, snapshot(source))
    assert implementations(model) == {"grouped_mm"}, "transformers' default"


def test_set_experts_implementation() -> None:
    model = build_model("gpt_oss")
    expected = logits(model, token_ids())
    model.set_experts_implementation("numa_moe")
    with torch.inference_mode():  # packs here; the packed weights are of use outside too
        model(input_ids=token_ids())
    assert not any(parameter.is_inference() for parameter in model.parameters())
    assert not any(packed.down_proj.is_inference() for packed in packed_experts(model))
    assert largest_relative_difference(logits(model, token_ids()), expected) <= 1e-5
    assert model(input_ids=token_ids()).logits.requires_grad


def test_first_forwards_of_two_threads_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if _pack_at_first_forward doesn't look again once it has the lock, or takes none."""
    model = build_model("qwen3_moe")
    expected = logits(model, token_ids())
    model.set_experts_implementation("numa_moe")
    packed, arrived = [], threading.Barrier(2)

    def counting(*arguments: Any, **options: Any) -> Any:
        packed.append(1)
        result = pack_experts(*arguments, **options)
        threading.Event().wait(0.2)  # the other thread gets to the lock meanwhile
        return result

    monkeypatch.setattr(packed_module, "pack_experts", counting)

    def run(_: int) -> torch.Tensor:
        arrived.wait()
        return logits(model, token_ids())

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, range(2)))
    assert len(packed) == NUM_LAYERS
    for result in results:
        assert largest_relative_difference(result, expected) <= 1e-5


def test_by_name_refusal_names_the_reason() -> None:
    layer = make_experts(gate=lambda rows: torch.tanh(halves(rows)[0]), implementation="numa_moe")
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError, match="can't run Experts: its gate function"):
        run_layer(layer)


# What is refused


class SmallConfig:
    def __init__(self, implementation: str) -> None:
        self._experts_implementation = implementation


def make_experts(implementation: str = "eager", gate: Any = None, **declared: bool) -> Any:
    """A module as @use_experts_implementation makes it, with what a test wants to declare."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 4
            rows = 24 if declared.get("has_gate", True) else 12
            up = "gate_up_proj" if declared.get("has_gate", True) else "up_proj"
            self.register_parameter(up, nn.Parameter(torch.randn(4, rows, 16) / 4))
            self.down_proj = nn.Parameter(torch.randn(4, 16, 12) / 4)
            self.act_fn = nn.SiLU()
            self.limit = 5.0

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            raise AssertionError("not meant to run")

    if gate is not None:
        Experts._apply_gate = lambda self, rows: gate(rows)  # type: ignore[attr-defined]
    return use_experts_implementation(**declared)(Experts)(SmallConfig(implementation))


def run_layer(layer: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return layer(torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.rand(3, 2))


def halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = rows.chunk(2, dim=-1)
    return gate, up


def reason(layer: nn.Module) -> str:
    before = snapshot(layer)
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError) as raised:
        torch_numa_moe.patch(nn.Sequential(layer), progress=False)
    assert_same_parameters(layer, before)
    assert list(raised.value.reasons) == ["0"]
    return raised.value.reasons["0"]


def test_the_module_of_these_tests_can_be_patched() -> None:
    layer = make_experts()
    report = torch_numa_moe.patch(nn.Sequential(layer), progress=False)
    assert report.modules[0].activation == "silu"
    assert run_layer(layer).shape == (3, 16)


def test_a_declared_norm_that_isnt_there_is_refused() -> None:
    assert "has no post_expert_norm" in reason(make_experts(has_post_expert_norm=True))


@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(lambda r: torch.tanh(halves(r)[0]) * halves(r)[1], id="tanh"),
        pytest.param(lambda r: nn.functional.mish(halves(r)[0]) * halves(r)[1], id="mish"),
        pytest.param(
            lambda r: halves(r)[0] * torch.sigmoid(1.702 * halves(r)[0]) * halves(r)[1], id="quick-gelu"
        ),
        pytest.param(lambda r: nn.functional.silu(halves(r)[1]) * halves(r)[0], id="up-before-gate"),
        pytest.param(lambda r: nn.functional.silu(halves(r)[0]) * halves(r)[1] * 1.001, id="scaled"),
        pytest.param(
            lambda r: nn.functional.silu(halves(r)[0].clamp(max=5)) * halves(r)[1], id="gate-clamp-only"
        ),
        pytest.param(
            lambda r: nn.functional.silu(halves(r)[0]) * halves(r)[1].clamp(-5, 5), id="up-clamp-only"
        ),
        pytest.param(
            lambda r: nn.functional.silu(halves(r)[0]) * halves(r)[1].clamp(-9, 5), id="uneven-clamp"
        ),
        pytest.param(lambda r: nn.functional.silu(halves(r)[0]) + halves(r)[1], id="sum"),
        pytest.param(lambda r: halves(r)[0].softmax(-1) * halves(r)[1], id="across-channels"),
        pytest.param(lambda r: torch.zeros_like(halves(r)[0]), id="nothing"),
        pytest.param(lambda r: r * float("nan"), id="wrong-shape-and-nan"),
    ],
)
def test_unknown_gate_functions_are_refused(gate: Any) -> None:
    assert "gate function" in reason(make_experts(gate=gate))


def test_a_gate_function_that_fails_is_refused() -> None:
    def gate(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    assert "can't be probed: RuntimeError: no such kernel" in reason(make_experts(gate=gate))


def test_a_layout_that_contradicts_the_gate_is_refused() -> None:
    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(rows[..., ::2]) * rows[..., 1::2]

    assert "declares its gate and up rows as halves" in reason(make_experts(gate=interleaved))
    assert "declares its gate and up rows as interleaved" in reason(make_experts(is_concatenated=False))


def test_without_a_declared_layout_the_gate_decides() -> None:
    """transformers 5.0 knows no is_concatenated."""

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(rows[..., ::2]) * rows[..., 1::2]

    layers = nn.Sequential(make_experts(gate=interleaved), make_experts())
    for layer in layers:
        del layer.is_concatenated
    torch_numa_moe.patch(layers, progress=False)
    assert [state.packed._interleaved for state in find_packed(layers).values()] == [True, False]


def test_weights_of_more_columns_than_ids() -> None:
    """Routers of transformers 5.0: eager reads the first top_k columns."""
    layer = make_experts()
    torch_numa_moe.patch(nn.Sequential(layer), progress=False)
    hidden, ids, weights = torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.rand(3, 4)
    with torch.no_grad():
        assert torch.equal(layer(hidden, ids, weights), layer(hidden, ids, weights[:, :2].contiguous()))


def test_weights_that_dont_fit_are_refused() -> None:
    layer = make_experts()
    layer.down_proj = nn.Parameter(torch.randn(4, 16, 11))
    assert "down_proj [4, 16, 11] doesn't go with gate_up_proj [4, 24, 16]" in reason(layer)
    layer = make_experts()
    layer.gate_up_proj = nn.Parameter(torch.randn(24, 16))
    assert "gate_up_proj is [24, 16]" in reason(layer)
    layer = make_experts()
    del layer.down_proj
    assert "no parameter down_proj" in reason(layer)
    assert "no parameter gate_up_proj_bias" in reason(make_experts(has_bias=True))
    layer = make_experts()
    layer.num_experts = 3
    assert "num_experts is 3, but gate_up_proj holds 4" in reason(layer)
    layer = make_experts()
    layer.per_expert_scale = nn.Parameter(torch.ones(4))
    assert "weights that the op doesn't know: per_expert_scale" in reason(layer)
    layer = make_experts()
    layer.gate_up_proj = nn.Parameter(torch.randn(4, 24, 16, dtype=torch.float64))
    assert "gate_up_proj is torch.float64" in reason(layer)
    layer = make_experts()
    layer.down_proj = nn.Parameter(torch.randn(4, 16, 12).to(torch.float8_e4m3fn), requires_grad=False)
    assert "down_proj is torch.float8_e4m3fn" in reason(layer)


def test_weights_elsewhere_are_refused() -> None:
    layer = make_experts().to("meta")
    with pytest.raises(
        torch_numa_moe.UnsupportedExpertsError, match="is on meta; experts are packed from the CPU"
    ):
        torch_numa_moe.patch(nn.Sequential(layer))


def test_accelerate_hooks_are_refused() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    layer = make_experts()
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device="cpu"))
    assert "accelerate manages its weights" in reason(layer)


def test_shared_weights_are_refused() -> None:
    first, second = make_experts(), make_experts()
    second.down_proj = first.down_proj
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError) as raised:
        torch_numa_moe.patch(nn.Sequential(first, second), progress=False)
    assert raised.value.reasons == {"1": "it shares its weights with 0"}
    assert first.down_proj.shape[0] == 4


def test_one_refused_layer_leaves_all_others_unchanged() -> None:
    experts = [make_experts(has_post_expert_norm=index == 2) for index in range(4)]
    layers = nn.Sequential(*experts)
    before = snapshot(layers)
    with pytest.raises(torch_numa_moe.UnsupportedExpertsError) as raised:
        torch_numa_moe.patch(layers, progress=False)
    message = str(raised.value)
    assert "1 of 4 experts modules of Sequential can't be packed; nothing was changed" in message
    assert "2 (Experts): it declares has_post_expert_norm" in message
    assert_same_parameters(layers, before)
    assert all(layer.config._experts_implementation == "eager" for layer in experts)


class SomeExperts(nn.Module):
    """Looks like experts by its name alone."""


def test_models_without_experts_are_refused() -> None:
    for model, near in (
        (nn.Sequential(nn.Linear(4, 4)), None),
        (nn.Sequential(SomeExperts(), SomeExperts()), "* (SomeExperts)"),
    ):
        with pytest.raises(torch_numa_moe.UnsupportedExpertsError) as raised:
            torch_numa_moe.patch(model, progress=False)
        message = str(raised.value)
        assert "has no experts that can be packed: looked for modules behind transformers' experts" in message
        assert ("look like experts" in message) == (near is not None)
        assert near is None or near in message
        assert raised.value.reasons == {}


def test_fp8_experts_are_refused() -> None:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    with pytest.raises(torch_numa_moe.UnsupportedExpertsError, match="can't run FP8 experts yet"):
        ALL_FP8_EXPERTS_FUNCTIONS["numa_moe"](nn.Module(), torch.empty(0), torch.empty(0), torch.empty(0))


# Registration


def run_python(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_doesnt_import_transformers() -> None:
    run_python(
        """
        import sys
        import torch_numa_moe
        assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
        assert "torch._dynamo" not in sys.modules  # seconds to import as well
        import transformers.integrations.moe as moe
        assert "numa_moe" in moe.ALL_EXPERTS_FUNCTIONS
        # The module is none the wiser.
        assert type(moe.__loader__).__name__ == "SourceFileLoader"
        assert moe.__spec__.loader is moe.__loader__
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        assert "numa_moe" in ALL_FP8_EXPERTS_FUNCTIONS
        """
    )


def test_transformers_may_be_imported_first() -> None:
    run_python(
        """
        import transformers.integrations.finegrained_fp8 as fp8
        import torch_numa_moe
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        assert "numa_moe" in ALL_EXPERTS_FUNCTIONS and "numa_moe" in fp8.ALL_FP8_EXPERTS_FUNCTIONS
        """
    )


def test_without_transformers_patch_says_what_it_needs() -> None:
    output = run_python(
        """
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "transformers":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Absent())
        import torch, torch_numa_moe
        try:
            torch_numa_moe.patch(torch.nn.Linear(1, 1))
        except ImportError as error:
            print(error)
        """
    )
    assert "needs transformers 5 or later, and it isn't installed: pip install" in output


def test_an_older_transformers_is_named(tmp_path: Path) -> None:
    (tmp_path / "transformers" / "integrations").mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.57.0'\n")
    (tmp_path / "transformers" / "integrations" / "__init__.py").write_text("")
    (tmp_path / "transformers" / "integrations" / "moe.py").write_text("")
    output = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch, torch_numa_moe
        try:
            torch_numa_moe.patch(torch.nn.Linear(1, 1))
        except ImportError as error:
            print(error)
        """
    )
    assert "needs transformers 5 or later, found 4.57.0" in output


def test_a_failed_import_of_transformers_can_be_repeated(tmp_path: Path) -> None:
    """The hook must neither swallow the exception nor forget what it waits for."""
    package = tmp_path / "transformers" / "integrations"
    package.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "moe.py").write_text(
        "import os\n"
        "if not os.environ.get('READY'):\n"
        "    raise RuntimeError('not ready')\n"
        "class ExpertsInterface:\n"
        "    mapping = {}\n"
        "    @classmethod\n"
        "    def register(cls, name, function):\n"
        "        cls.mapping[name] = function\n"
    )
    run_python(
        f"""
        import os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch_numa_moe
        try:
            import transformers.integrations.moe
        except RuntimeError as error:
            assert str(error) == "not ready"
        else:
            raise AssertionError("the import should have failed")
        os.environ["READY"] = "1"
        from transformers.integrations.moe import ExpertsInterface
        assert "numa_moe" in ExpertsInterface.mapping
        """
    )
