"""pack_experts: layouts, round trips, refusals, memory."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_numa_moe
from reference import moe_ffn, random_layer, random_routing, relative_error
from torch_numa_moe import pack_experts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def panels(packed: torch.Tensor) -> torch.Tensor:
    """[..., k, 16, group] to [..., 16, k * group]: back to rows, by torch's own view operations."""
    *outer, k, width, group = packed.shape
    return packed.movedim(-2, -3).reshape(*outer, width, k * group)


@pytest.mark.parametrize("packed_format", DTYPES)
@pytest.mark.parametrize("split", ["0", "test", "test:3"])
def test_layout_is_the_documented_one(packed_format: str, split: str, fresh_runtime: None) -> None:
    torch_numa_moe.configure(split=split)
    experts, hidden_size, intermediate = 3, 50, 70
    layer = random_layer(experts, hidden_size, intermediate, dtype=DTYPES[packed_format])
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format=packed_format)
    gate_up = panels(packed.gate_up_proj)  # [slice, expert, block, gate/up, 16, k]
    down = panels(packed.down_proj)  # [slice, expert, block, 16, k]
    slices = packed.num_slices
    assert slices == {"0": 1, "test": 2, "test:3": 3}[split]
    blocks = (intermediate + 15) // 16
    seen = 0
    for index in range(slices):
        first, last = blocks * index // slices, blocks * (index + 1) // slices
        for place, block in enumerate(range(first, last)):
            channels = range(16 * block, min(16 * block + 16, intermediate))
            for half in (0, 1):
                rows = layer.gate_up_proj[
                    :, half * intermediate + channels.start : half * intermediate + channels.stop
                ]
                assert torch.equal(gate_up[index, :, place, half, : len(channels), :hidden_size], rows)
            assert not gate_up[index, :, place, :, len(channels) :].any()
            seen += len(channels)
    assert seen == intermediate
    hidden_blocks = (hidden_size + 15) // 16
    for index in range(slices):
        first, last = hidden_blocks * index // slices, hidden_blocks * (index + 1) // slices
        for place, block in enumerate(range(first, last)):
            rows = layer.down_proj[:, 16 * block : 16 * block + 16]
            assert torch.equal(down[index, :, place, : rows.shape[1], :intermediate], rows)
            assert not down[index, :, place, :, intermediate:].any()


@pytest.mark.parametrize("packed_format", DTYPES)
@pytest.mark.parametrize("split", ["0", "test:3"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_unpack_gives_the_originals_back(
    packed_format: str, split: str, transposed: bool, interleaved: bool, fresh_runtime: None
) -> None:
    torch_numa_moe.configure(split=split)
    layer = random_layer(3, 37, 41, dtype=DTYPES[packed_format], bias=True)
    layer.gate_up_proj[1, 2, 3] = float("nan")
    gate_up, down = layer.gate_up_proj, layer.down_proj
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    packed = pack_experts(
        gate_up, down, format=packed_format, gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias,
        transposed=transposed, interleaved=interleaved,
    )  # fmt: skip
    back = packed.unpack()
    for name, original in (
        ("gate_up_proj", gate_up), ("down_proj", down),
        ("gate_up_bias", layer.gate_up_bias), ("down_bias", layer.down_bias),
    ):  # fmt: skip
        restored = getattr(back, name)
        assert restored.dtype == original.dtype and restored.is_contiguous()
        assert torch.equal(restored.view(torch.uint8), original.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("source", DTYPES.values())
@pytest.mark.parametrize("packed_format", DTYPES)
def test_conversion_rounds_like_torch(source: torch.dtype, packed_format: str, fresh_runtime: None) -> None:
    torch_numa_moe.configure(split="0")  # all rows in one slice, to look at
    values = torch.cat([torch.randn(2000), torch.randn(2000) * 1e-6, torch.randn(90) * 1e5]).to(source)
    special = torch.tensor(
        [0.0, -0.0, 6e-8, 5.9e-8, 65519.0, 65520.0, float("inf"), -float("inf"), float("nan"), 1e-40]
    )
    values = torch.cat([special.to(source), values])[: 16 * 256].view(1, 16, 256)
    down = torch.zeros(1, 256, 8, dtype=source)
    packed = pack_experts(values, down, format=packed_format)
    back = panels(packed.gate_up_proj)[0, 0, 0, :, :8].reshape(16, 256)  # 8 gate rows, 8 up rows
    expected = values[0].to(DTYPES[packed_format])
    assert torch.equal(back.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(back.isnan(), expected.isnan())


def test_interleaved_and_transposed_compute_the_same() -> None:
    """gpt-oss's layout of the same weights gives the same bits."""
    layer = random_layer(4, 32, 24, bias=True)
    plain = pack_experts(
        layer.gate_up_proj, layer.down_proj, gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias
    )
    order = torch.arange(48).view(2, 24).t().reshape(-1)  # gate 0, up 0, gate 1, up 1, …
    other = pack_experts(
        layer.gate_up_proj[:, order].transpose(1, 2).contiguous(),
        layer.down_proj.transpose(1, 2).contiguous(),
        gate_up_bias=layer.gate_up_bias[:, order],
        down_bias=layer.down_bias,
        interleaved=True,
        transposed=True,
    )
    hidden = torch.randn(5, 32)
    ids, weights = random_routing(5, 2, 4)
    assert torch.equal(plain(hidden, ids, weights), other(hidden, ids, weights))


def test_packing_expert_by_expert() -> None:
    """How a checkpoint is streamed: one expert's tensors at a time."""
    layer = random_layer(5, 48, 40)
    whole = pack_experts(layer.gate_up_proj, layer.down_proj)
    packed = torch_numa_moe.PackedExperts(
        num_experts=5, hidden_size=48, intermediate_size=40, format="bf16", activation="silu", alpha=None,
        limit=None, gated=True, gate_up_bias=False, down_bias=False,
    )  # fmt: skip
    for expert in (3, 0, 4, 2, 1):
        gate, up = layer.gate_up_proj[expert : expert + 1].chunk(2, dim=1)
        packed.pack_gate_up(expert, gate, up)
        packed.pack_down(expert, layer.down_proj[expert : expert + 1])
    hidden = torch.randn(6, 48)
    ids, weights = random_routing(6, 2, 5)
    assert torch.equal(packed(hidden, ids, weights), whole(hidden, ids, weights))
    with pytest.raises(ValueError, match="first_expert must leave room for 1 experts in 5, got 5"):
        packed.pack_down(5, layer.down_proj[:1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(format="int3"), ValueError, "format must be one of bf16, fp16, fp32, .*got 'int3'"),
        (dict(activation="swish"), ValueError, "activation must be one of silu"),
        (
            dict(gated=False, activation="swiglu_oai", down_proj=torch.zeros(4, 32, 96)),
            ValueError,
            "needs gated=True",
        ),
        (dict(gated=False, interleaved=True), ValueError, "needs gated=True"),
        (dict(limit=-1.0), ValueError, "limit must be > 0"),
        (
            dict(down_proj=torch.zeros(4, 32, 49)),
            ValueError,
            r"down_proj must be .*\[4, 32, 48\].*got \[4, 32, 49\]",
        ),
        (dict(down_proj=torch.zeros(3, 32, 48)), ValueError, "down_proj must be"),
        (dict(down_proj=torch.zeros(32, 48)), ValueError, "down_proj must be .*got shape"),
        (dict(gate_up_proj=torch.zeros(4, 97, 32)), ValueError, "even number of rows"),
        (
            dict(gate_up_proj=torch.zeros(4, 96, 32, dtype=torch.int8)),
            ValueError,
            "gate_up_proj must be float32",
        ),
        (dict(gate_up_proj=torch.zeros(4, 96, 32, device="meta")), ValueError, "must be on the cpu"),
        (dict(gate_up_proj=[[1.0]]), TypeError, "gate_up_proj must be a tensor"),
        (
            dict(gate_up_proj=torch.zeros(0, 96, 32), down_proj=torch.zeros(0, 32, 48)),
            ValueError,
            "num_experts",
        ),
        (dict(gate_up_bias=torch.zeros(4, 95)), ValueError, r"gate_up_bias must be \[4, 96\]"),
        (dict(down_bias=torch.zeros(4)), ValueError, "down_bias must be"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = (
        dict(gate_up_proj=torch.zeros(4, 96, 32), down_proj=torch.zeros(4, 32, 48)) | change
    )
    with pytest.raises(error, match=message):
        pack_experts(**given)


def test_deepcopy_computes_the_same_and_pickling_says_what_to_do() -> None:
    layer = random_layer(4, 32, 48, bias=True)
    packed = pack_experts(
        layer.gate_up_proj, layer.down_proj, gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias
    )
    twin = copy.deepcopy(packed)
    assert twin.gate_up_proj.data_ptr() != packed.gate_up_proj.data_ptr()
    hidden = torch.randn(3, 32)
    ids, weights = random_routing(3, 2, 4)
    expected = packed(hidden, ids, weights)
    del packed
    gc.collect()
    assert torch.equal(twin(hidden, ids, weights), expected)
    with pytest.raises(TypeError, match="unpatch"):
        pickle.dumps(twin)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_memory_goes_back_when_the_experts_are_deleted() -> None:
    layer = random_layer(8, 512, 1024)  # 25 MB in bf16
    for _ in range(2):  # the second round shows that the first left nothing
        before = resident_bytes()
        packed = pack_experts(layer.gate_up_proj, layer.down_proj)
        held = resident_bytes() - before
        assert 0.9 * packed.nbytes < held < 1.2 * packed.nbytes + 4e6
        del packed
        gc.collect()
        assert resident_bytes() - before < 0.1 * held


def test_a_view_keeps_the_memory_alive() -> None:
    layer = random_layer(4, 32, 48)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    view, expected = packed.down_proj[0, 1], packed.down_proj[0, 1].clone()
    del packed
    gc.collect()
    assert torch.equal(view, expected)


def test_packed_weights_are_no_parameters() -> None:
    """A module that holds PackedExperts can be moved, cast and saved without touching them."""
    module = torch.nn.Linear(2, 2)
    layer = random_layer(4, 32, 48)
    module.packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    pointer = module.packed.gate_up_proj.data_ptr()
    module.half().to("meta")
    assert module.packed.gate_up_proj.dtype == torch.bfloat16
    assert module.packed.gate_up_proj.data_ptr() == pointer
    assert set(module.state_dict()) == {"weight", "bias"}


def test_fp32_source_packed_in_bf16_computes_with_rounded_weights() -> None:
    layer = random_layer(4, 64, 48, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="bf16")
    layer.gate_up_proj, layer.down_proj = layer.gate_up_proj.bfloat16(), layer.down_proj.bfloat16()
    hidden = torch.randn(3, 64)
    ids, weights = random_routing(3, 2, 4)
    expected = moe_ffn(hidden, ids, weights, layer, activation_dtype=torch.bfloat16)
    assert relative_error(packed(hidden, ids, weights), expected) < 1e-3


@pytest.mark.parametrize("mode", ["meta", "bfloat16", "float64"])
def test_torchs_defaults_change_nothing(mode: str) -> None:
    """A default device or dtype, as models are built under."""
    layer = random_layer(4, 32, 48, bias=True)
    ids, weights = random_routing(3, 2, 4)
    hidden_states = torch.randn(3, 32)

    def pack() -> torch_numa_moe.PackedExperts:
        return pack_experts(
            layer.gate_up_proj,
            layer.down_proj,
            format="fp32",
            gate_up_bias=layer.gate_up_bias,
            down_bias=layer.down_bias,
        )

    expected = pack()(hidden_states, ids, weights)
    if mode == "meta":
        with torch.device("meta"):
            packed = pack()
            restored = packed.unpack()
    else:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, mode))
        try:
            packed = pack()
            restored = packed.unpack()
        finally:
            torch.set_default_dtype(before)
    assert torch.equal(packed(hidden_states, ids, weights), expected)
    assert restored.gate_up_bias is not None and layer.gate_up_bias is not None
    assert torch.equal(restored.gate_up_proj, layer.gate_up_proj)
    assert torch.equal(restored.down_proj, layer.down_proj)
    assert torch.equal(restored.gate_up_bias, layer.gate_up_bias)


def test_experts_beyond_the_last_are_refused() -> None:
    packed = pack_experts(torch.randn(4, 96, 32), torch.randn(4, 32, 48))
    one = torch.randn(1, 48, 32)
    for first in (4, 2**63 - 1, -1):
        with pytest.raises(ValueError, match="first_expert must leave room for 1 experts in 4"):
            packed.pack_gate_up(first, one, one)
        with pytest.raises(ValueError, match="first_expert must leave room for 1 experts in 4"):
            packed.pack_down(first, torch.randn(1, 32, 48))
        with pytest.raises(ValueError, match="first_expert must leave room for 1 experts in 4"):
            torch.ops.numa_moe.unpack_down(packed.down_proj, torch.randn(1, 32, 48), first)


def test_biases_of_other_shapes_are_refused() -> None:
    layer = random_layer(4, 32, 48, bias=True)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, gate_up_bias=layer.gate_up_bias)
    right, narrow, one = torch.ones(4, 48), torch.ones(4, 3), torch.ones(1, 48)
    for gate, up, name in ((narrow, right, "gate"), (right, narrow, "up"), (one, right, "gate")):
        with pytest.raises(ValueError, match=rf"{name} must be \[4, 48\], got "):
            packed.pack_gate_up_bias(gate, up)
    with pytest.raises(ValueError, match="up must be given"):
        packed.pack_gate_up_bias(right, None)
    with pytest.raises(ValueError, match="made without down_bias"):
        packed.pack_down_bias(torch.ones(4, 32))


@pytest.mark.parametrize("limit", ["7", True])
def test_limits_that_are_no_numbers_are_refused(limit: Any) -> None:
    with pytest.raises(TypeError, match="limit must be a number or None"):
        pack_experts(torch.randn(2, 16, 8), torch.randn(2, 8, 8), limit=limit)


def test_a_limit_that_vanishes_in_fp32_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be > 0 in fp32, got 1e-300"):
        pack_experts(torch.randn(2, 16, 8), torch.randn(2, 8, 8), limit=1e-300)
