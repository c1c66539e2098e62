"""torch.ops.numa_moe.experts against a float64 reference, and everything it must refuse."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_numa_moe
from reference import Layer, moe_ffn, random_layer, random_routing, relative_error
from torch_numa_moe import pack_experts
from torch_numa_moe.formats import find_format

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "silu_clamp_input", "silu_clamp_output",
)  # fmt: skip

# Norm-wise relative error. bf16 rounds each intermediate activation (2^-9 of it at most, rounding the
# other way where fp32 sums differ in the last bit); the output dtype adds its own rounding.
FORMAT_ERROR = {"bf16": 1e-3, "fp16": 2e-6, "fp32": 2e-6}
OUTPUT_ERROR = {torch.bfloat16: 2.5e-3, torch.float16: 3e-4, torch.float32: 0.0}


def check(
    packed_format: str,
    hidden_dtype: torch.dtype,
    layer: Layer,
    *,
    tokens: int,
    top_k: int,
    ids_dtype: torch.dtype = torch.int64,
    weights_dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = math.inf,
) -> None:
    hidden = torch.randn(tokens, layer.gate_up_proj.shape[2]).to(hidden_dtype)
    ids, weights = random_routing(tokens, top_k, layer.num_experts, ids_dtype=ids_dtype)
    weights = weights.to(weights_dtype)
    packed = pack_experts(
        layer.gate_up_proj, layer.down_proj, format=packed_format, gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias, activation=activation, gated=layer.gated, alpha=alpha, limit=limit,
    )  # fmt: skip
    out = packed(hidden, ids, weights)
    assert out.dtype == hidden_dtype and out.shape == hidden.shape
    rounding = torch.bfloat16 if packed_format == "bf16" else None
    expected = moe_ffn(
        hidden,
        ids,
        weights,
        layer,
        activation=activation,
        alpha=alpha,
        limit=limit,
        activation_dtype=rounding,
    )
    assert relative_error(out, expected) <= FORMAT_ERROR[packed_format] + OUTPUT_ERROR[hidden_dtype]


@pytest.mark.parametrize("packed_format", DTYPES)
@pytest.mark.parametrize("hidden_dtype", DTYPES.values())
@pytest.mark.parametrize("tokens", [1, 7])
def test_formats_and_dtypes(packed_format: str, hidden_dtype: torch.dtype, tokens: int) -> None:
    layer = random_layer(8, 64, 48, dtype=DTYPES[packed_format])
    check(packed_format, hidden_dtype, layer, tokens=tokens, top_k=3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed_format", ["bf16", "fp32"])
def test_activations(activation: str, packed_format: str) -> None:
    layer = random_layer(4, 64, 48, dtype=DTYPES[packed_format], bias=True)
    check(packed_format, torch.float32, layer, tokens=9, top_k=2, activation=activation, alpha=1.3, limit=0.8)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_not_gated(activation: str) -> None:
    layer = random_layer(4, 40, 56, dtype=torch.float32, gated=False, bias=True)
    check("fp32", torch.float32, layer, tokens=5, top_k=2, activation=activation)


# Sizes that are multiples of nothing, one expert, more experts than tokens, top_k up to all experts.
@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "tokens", "top_k"),
    [
        (1, 1, 1, 1, 1), (1, 64, 33, 3, 1), (3, 65, 1, 2, 2), (5, 257, 176, 4, 3), (2, 17, 320, 6, 2),
        (7, 100, 352, 5, 4), (4, 64, 704, 2, 2), (1024, 16, 16, 9, 8), (128, 48, 31, 3, 128),
        (80, 32, 16, 2, 65), (4, 130, 1408, 1, 1), (6, 33, 95, 50, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed_format", ["bf16", "fp32"])
def test_odd_sizes(
    packed_format: str, experts: int, hidden: int, intermediate: int, tokens: int, top_k: int
) -> None:
    layer = random_layer(
        experts, hidden, intermediate, dtype=DTYPES[packed_format], bias=intermediate % 2 == 1
    )
    check(packed_format, torch.float32, layer, tokens=tokens, top_k=top_k)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", DTYPES.values())
def test_routing_dtypes(ids_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    layer = random_layer(6, 32, 32, dtype=torch.float32)
    check("fp32", torch.float32, layer, tokens=5, top_k=2, ids_dtype=ids_dtype, weights_dtype=weights_dtype)


@pytest.mark.parametrize("split", ["0", "test", "test:3"])
def test_prefill_then_decode_and_back(split: str, fresh_runtime: None) -> None:
    """Case decode-then-prefill: scratch grows and is used again by batches of very different sizes."""
    torch_numa_moe.configure(split=split)
    layer = random_layer(4, 32, 24, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="fp32")
    for tokens in (1, 900, 1, 3, 2500, 1):
        hidden = torch.randn(tokens, 32)
        ids, weights = random_routing(tokens, 2, 4)
        expected = dense_reference(hidden, ids, weights, layer)
        assert relative_error(packed(hidden, ids, weights), expected) < 2e-6


def dense_reference(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Layer
) -> torch.Tensor:
    """Batched float64 reference for many tokens (silu, no bias)."""
    gate_up, down = layer.gate_up_proj.double(), layer.down_proj.double()
    out = torch.zeros(hidden.shape[0], down.shape[1], dtype=torch.float64)
    for expert in range(layer.num_experts):
        share = (weights.double() * (ids == expert)).sum(-1, keepdim=True)
        gate, up = (hidden.double() @ gate_up[expert].T).chunk(2, -1)
        out += share * ((gate * torch.sigmoid(gate) * up) @ down[expert].T)
    return out


def test_chunks_of_long_inputs_do_not_change_bits(bits_of_any_batch: None) -> None:
    """20,000 tokens are computed in several chunks; each token's bits are those it has alone."""
    layer = random_layer(2, 2048, 512, dtype=torch.bfloat16)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    tokens = 12_000
    hidden = torch.randn(tokens, 2048).to(torch.bfloat16)
    ids = torch.randint(0, 2, (tokens, 8))
    weights = torch.rand(tokens, 8)
    out = packed(hidden, ids, weights)
    for token in (0, 5_000, tokens - 1):
        alone = packed(hidden[token : token + 1], ids[token : token + 1], weights[token : token + 1])
        assert torch.equal(out[token : token + 1], alone)


def test_all_tokens_on_one_expert() -> None:
    layer = random_layer(64, 48, 32, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="fp32")
    hidden = torch.randn(1500, 48)
    ids = torch.full((1500, 2), 5)
    ids[:, 1] = 9
    weights = torch.rand(1500, 2)
    assert relative_error(packed(hidden, ids, weights), dense_reference(hidden, ids, weights, layer)) < 2e-6


def test_duplicate_ids_add_up() -> None:
    layer = random_layer(4, 32, 32, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="fp32")
    hidden, ids = torch.randn(3, 32), torch.tensor([[1, 1, 2], [3, 3, 3], [0, 2, 0]])
    weights = torch.rand(3, 3)
    assert relative_error(packed(hidden, ids, weights), moe_ffn(hidden, ids, weights, layer)) < 2e-6


def test_sentinels_of_expert_parallelism_add_nothing() -> None:
    layer = random_layer(4, 32, 32, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="fp32")
    hidden, weights = torch.randn(3, 32), torch.rand(3, 2)
    ids = torch.tensor([[1, 4], [4, 4], [2**40, 3]])
    out = packed(hidden, ids, weights)
    assert relative_error(out, moe_ffn(hidden, ids, weights, layer)) < 2e-6
    assert torch.equal(out[1], torch.zeros(32))


def test_no_tokens_gives_an_empty_tensor() -> None:
    layer = random_layer(4, 32, 32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    out = packed(
        torch.empty(0, 32, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    )
    assert out.shape == (0, 32) and out.dtype == torch.bfloat16


def test_top_k_zero_gives_zeros() -> None:
    layer = random_layer(4, 32, 32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    out = packed(torch.randn(2, 32), torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0))
    assert torch.equal(out, torch.zeros(2, 32))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unused_experts_never_leak(poison: float) -> None:
    layer = random_layer(8, 32, 32)
    clean = pack_experts(layer.gate_up_proj, layer.down_proj)
    layer.gate_up_proj[7], layer.down_proj[7] = poison, poison
    poisoned = pack_experts(layer.gate_up_proj, layer.down_proj)
    hidden = torch.randn(6, 32)
    ids, weights = random_routing(6, 3, 7)
    assert torch.equal(poisoned(hidden, ids, weights), clean(hidden, ids, weights))


def test_nan_in_a_used_expert_shows_even_with_weight_zero() -> None:
    """A routed expert is computed whatever its weight: 0 * NaN is NaN, as in eager torch."""
    layer = random_layer(4, 32, 32)
    layer.down_proj[2] = math.nan
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    out = packed(torch.randn(2, 32), torch.tensor([[1, 2], [0, 1]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e3, 3e4])
def test_overflow_gives_inf_where_the_reference_does(dtype: torch.dtype, scale: float) -> None:
    packed_format = "bf16" if dtype == torch.bfloat16 else "fp16"
    layer = random_layer(3, 32, 32, dtype=dtype)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format=packed_format)
    hidden = (torch.randn(4, 32) * scale).clamp(-6e4, 6e4).to(dtype)
    ids, weights = random_routing(4, 2, 3)
    out = packed(hidden, ids, weights)
    rounding = torch.bfloat16 if dtype == torch.bfloat16 else None
    expected = moe_ffn(hidden, ids, weights, layer, activation_dtype=rounding).to(dtype)
    sure = (expected.double().abs() < 0.98 * torch.finfo(dtype).max) | expected.isinf()
    assert torch.equal(out.isinf()[sure], expected.isinf()[sure])
    assert not out.isnan().any()


def test_largest_bf16_values_overflow_to_inf_or_nan_only_where_fp32_does() -> None:
    layer = random_layer(2, 32, 32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    out = packed(torch.full((1, 32), 3e38, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1))
    assert not out.isfinite().all()
    assert packed(torch.full((1, 32), math.nan), torch.tensor([[0]]), torch.ones(1, 1)).isnan().all()


def test_non_contiguous_inputs() -> None:
    layer = random_layer(4, 32, 32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    hidden = torch.randn(32, 6).t()
    ids, weights = random_routing(6, 2, 4)
    strided_ids = ids.t().contiguous().t()
    strided_weights = torch.stack([weights, weights], -1)[..., 0]
    assert (
        not hidden.is_contiguous() and not strided_ids.is_contiguous() and not strided_weights.is_contiguous()
    )
    out = packed(hidden, strided_ids, strided_weights)
    assert torch.equal(out, packed(hidden.contiguous(), ids, weights))


def test_copied_weights_still_compute() -> None:
    """Tensors that lost their placement (clone, contiguous, a compiled package's constants) are accepted."""
    layer = random_layer(4, 32, 32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    hidden = torch.randn(3, 32)
    ids, weights = random_routing(3, 2, 4)
    copied = torch.ops.numa_moe.experts(
        hidden, ids, weights, packed.gate_up_proj.contiguous().clone(), packed.down_proj.contiguous().clone()
    )
    assert torch.equal(copied, packed(hidden, ids, weights))


def arguments() -> dict[str, Any]:
    layer = random_layer(4, 32, 48, bias=True)
    packed = pack_experts(
        layer.gate_up_proj, layer.down_proj, gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias
    )
    ids, weights = random_routing(3, 2, 4)
    positional = dict(
        hidden_states=torch.randn(3, 32), topk_ids=ids, topk_weights=weights,
        gate_up_proj=packed.gate_up_proj, down_proj=packed.down_proj,
    )  # fmt: skip
    return positional | dict(gate_up_bias=packed.gate_up_bias, down_bias=packed.down_bias)


# argument, what it is replaced by, what the message must say
REFUSED: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("hidden_states", lambda t: t.double(), r"hidden_states must be float32, bfloat16 or float16.*float64"),
    ("hidden_states", lambda t: t[0], r"hidden_states must be \[num_tokens, hidden_size\], got shape \[32\]"),
    ("hidden_states", lambda t: t[:, :30], r"hidden_size 30.*packed for 32"),
    ("hidden_states", lambda t: t[:, :0], r"hidden_size >= 1"),
    ("hidden_states", lambda t: t[:2], r"topk_ids must have shape \[2, 2\]"),
    ("topk_ids", lambda t: t.float(), r"topk_ids must be int32 or int64.*float32"),
    ("topk_ids", lambda t: t[0], r"topk_ids must be \[num_tokens, top_k\]"),
    ("topk_ids", lambda t: -t - 1, r"topk_ids must be >= 0, got -\d+ at \[0, 0\].*num_experts = 4"),
    ("topk_weights", lambda t: t.long(), r"topk_weights must be float32, bfloat16 or float16.*int64"),
    ("topk_weights", lambda t: t[:, :1], r"topk_weights must have shape \[3, 2\]"),
    ("gate_up_proj", lambda t: t.to(torch.int8), r"gate_up_proj must be packed by pack_experts.*int8"),
    ("gate_up_proj", lambda t: t.float(), r"packed in one format"),
    ("gate_up_proj", lambda t: t[0], r"gate_up_proj must be \[num_slices"),
    ("gate_up_proj", lambda t: t[:, :3], r"down_proj must have shape"),
    ("gate_up_proj", lambda t: torch.cat([t, t], 2), r"gate_up_proj must have shape"),
    (
        "gate_up_proj",
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        r"dense within each slice",
    ),
    ("down_proj", lambda t: torch.cat([t, t], 2), r"down_proj must have shape"),
    ("down_proj", lambda t: t[..., :8, :], r"(gate_up_proj|down_proj) must have shape"),
    ("gate_up_bias", lambda t: t[:, :1], r"gate_up_bias must have shape"),
    ("gate_up_bias", lambda t: t.double(), r"gate_up_bias must be contiguous float32"),
    ("down_bias", lambda t: t[0], r"down_bias must have shape"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_bad_arguments_are_refused(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    given = arguments()
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        torch.ops.numa_moe.experts(**given)


@pytest.mark.parametrize("name", ["topk_ids", "topk_weights", "down_proj"])
def test_tensors_on_other_devices_are_refused(name: str) -> None:
    given = arguments()
    given[name] = given[name].to("meta")
    with pytest.raises((RuntimeError, ValueError), match=f"{name} must be .*got meta"):
        torch.ops.numa_moe.experts(**given)


def test_packed_experts_know_their_hidden_size() -> None:
    """Odd sizes are padded: only the object knows whether 31 channels were meant or 32."""
    layer = random_layer(4, 32, 32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    with pytest.raises(ValueError, match=r"hidden_size = 32\], got \[1, 31\]"):
        packed(torch.randn(1, 31), torch.tensor([[0]]), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(activation="swish"), r'activation must be one of silu, .*got "swish"'),
        (dict(limit=0.0), "limit must be > 0"),
        (dict(limit=math.nan), "limit must be > 0"),
    ],
)
def test_bad_keywords_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.ops.numa_moe.experts(**arguments(), **keywords)


def test_messages_hold_no_build_path() -> None:
    given = arguments()
    given["hidden_states"] = given["hidden_states"].double()
    with pytest.raises(ValueError, match=r"^numa_moe: hidden_states must be"):
        torch.ops.numa_moe.experts(**given)


def test_several_python_threads_at_once() -> None:
    layer = random_layer(8, 64, 64)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    inputs = [(torch.randn(tokens, 64), *random_routing(tokens, 2, 8)) for tokens in (1, 3, 17, 40)]
    expected = [packed(*given) for given in inputs]
    wrong: list[int] = []

    def loop(index: int) -> None:
        results = [packed(*inputs[index]) for _ in range(200)]
        wrong.extend(index for result in results if not torch.equal(result, expected[index]))

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_gil_is_released() -> None:
    """A counting thread goes on while an op runs (case gil-held)."""
    layer = random_layer(4, 1024, 1024)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    hidden = torch.randn(3000, 1024)
    ids, weights = random_routing(3000, 4, 4)
    ticks: list[float] = []
    stopped = threading.Event()

    def count() -> None:
        while not stopped.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    begin = time.perf_counter()
    packed(hidden, ids, weights)
    end = time.perf_counter()
    stopped.set()
    counter.join()
    during = sum(begin < tick < end for tick in ticks)
    assert during >= 3, f"{during} ticks in {end - begin:.3f} s"


@pytest.mark.parametrize("packed_format", ["bf16", "int4_zp"])
@pytest.mark.parametrize("argument", range(7))
def test_storages_that_were_resized_are_refused(argument: int, packed_format: str) -> None:
    """Instead of reading memory that isn't there."""
    layer = random_layer(2, 64, 32, bias=True)
    packed = pack_experts(
        layer.gate_up_proj, layer.down_proj, format=packed_format, gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )  # fmt: skip
    ids, weights = random_routing(3, 2, 2)
    # The packed tensors' own storages can't be resized.
    arguments = [torch.randn(3, 64), ids, weights, packed.gate_up_proj.clone(), packed.down_proj.clone(),
                 packed.gate_up_bias, packed.down_bias]  # fmt: skip
    names = [
        "hidden_states",
        "topk_ids",
        "topk_weights",
        "gate_up_proj",
        "down_proj",
        "gate_up_bias",
        "down_bias",
    ]
    resized = arguments[argument]
    assert resized is not None
    resized.untyped_storage().resize_(resized.nbytes - 1 if argument % 2 else 0)
    quantization = find_format(packed_format).quantization
    with pytest.raises(ValueError, match=f"{names[argument]} must have its memory, but its storage holds"):
        torch.ops.numa_moe.experts(*arguments, format=None if quantization is None else quantization.text)
