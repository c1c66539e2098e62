"""Weights that are codes: what they stand for, how they are chosen, and the op on them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy
import pytest
import torch

import torch_numa_moe
from reference import Layer, moe_ffn, random_layer, random_routing, relative_error
from torch_numa_moe import _C, pack_experts
from torch_numa_moe.formats import CODE_VALUES, FORMATS, find_format
from torch_numa_moe.quantization import QuantizedWeight, from_gguf, quantize

QUANTIZABLE = ("int8", "int8_g64", "int4", "int4_g128", "int4_zp_fp16", "fp8", "fp8_row", "mxfp4", "nvfp4")
GGUF = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")

EXACT = 4e-3
"""Bound of the relative error with few rows: an activation may round to the other neighbour in bf16."""

DEQUANTIZED = 1e-2
"""The same with many rows on an instruction set with bf16 dot products, where weights are rounded to bf16."""


def gguf_blocks(block_type: str, num_experts: int, rows: int, columns: int) -> torch.Tensor:
    """Random blocks with scales of an ordinary size."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[block_type]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = torch.randint(0, 256, (num_experts, rows, columns // weights, size), dtype=torch.uint8)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "MXFP4": ()}[
        block_type
    ]
    for at in halves:
        scales = (torch.rand(num_experts, rows, columns // weights, 1) * 0.01).half()
        blocks[..., at : at + 2] = scales.view(torch.uint8)
    if block_type == "MXFP4":
        blocks[..., 0] = torch.randint(115, 125, blocks.shape[:3], dtype=torch.uint8)
    return blocks.flatten(2)


def gguf_values(blocks: torch.Tensor, block_type: str) -> torch.Tensor:
    """What the gguf package makes of them."""
    gguf = pytest.importorskip("gguf")
    found = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[block_type])
    return torch.from_numpy(numpy.ascontiguousarray(found))


@pytest.mark.parametrize("block_type", GGUF)
def test_gguf_blocks_stand_for_what_gguf_says(block_type: str) -> None:
    """Bit for bit, before packing and after unpacking."""
    gate_up, down = gguf_blocks(block_type, 3, 2 * 256, 256), gguf_blocks(block_type, 3, 256, 256)
    weight = from_gguf(gate_up.numpy(), block_type)
    expected = gguf_values(gate_up, block_type)
    assert torch.equal(weight.dequantize(), expected)
    packed = pack_experts(weight, from_gguf(down, block_type.lower()))
    unpacked = packed.unpack()
    assert torch.equal(unpacked.gate_up_proj, expected)
    assert torch.equal(unpacked.down_proj, gguf_values(down, block_type))
    assert packed.unpack_quantized("down").dequantize().equal(gguf_values(down, block_type))


@pytest.mark.parametrize("block_type", GGUF)
def test_experts_of_a_gguf_file(block_type: str) -> None:
    gate_up, down = gguf_blocks(block_type, 4, 2 * 256, 512), gguf_blocks(block_type, 4, 512, 256)
    packed = pack_experts(from_gguf(gate_up, block_type), from_gguf(down, block_type))
    layer = Layer(gguf_values(gate_up, block_type), gguf_values(down, block_type))
    hidden = torch.randn(3, 512)
    ids, weights = random_routing(3, 2, 4)
    expected = moe_ffn(hidden, ids, weights, layer, activation_dtype=torch.bfloat16)
    assert relative_error(packed(hidden, ids, weights), expected) < EXACT


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q8_0", "Q4_0"), ("IQ4_XS", "Q8_0")])
def test_projections_of_different_types(types: tuple[str, str], fresh_runtime: None) -> None:
    """As files of mixed types (Q4_K_M) have them, with few rows and with many, on every instruction set."""
    gate_up, down = gguf_blocks(types[0], 4, 2 * 256, 512), gguf_blocks(types[1], 4, 512, 256)
    layer = Layer(gguf_values(gate_up, types[0]), gguf_values(down, types[1]))
    for instruction_set, rounds in every_instruction_set():
        packed = pack_experts(from_gguf(gate_up, types[0]), from_gguf(down, types[1]))
        assert (packed.format, packed.down_format) == (types[0].lower(), types[1].lower())
        assert torch.equal(packed.unpack().down_proj, layer.down_proj)
        for tokens in (2, 40):
            hidden = torch.randn(tokens, 512)
            ids, weights = random_routing(tokens, 2, 4)
            expected = moe_ffn(hidden, ids, weights, layer, activation_dtype=torch.bfloat16)
            error = relative_error(packed(hidden, ids, weights), expected)
            assert error < (DEQUANTIZED if rounds and tokens == 40 else EXACT), (instruction_set, tokens)


def test_another_format_of_down_needs_codes_in_both() -> None:
    with pytest.raises(ValueError, match="down_format may differ from format where both have codes"):
        torch_numa_moe.PackedExperts(
            num_experts=1, hidden_size=16, intermediate_size=16, format="bf16", activation="silu", alpha=None,
            limit=None, gated=True, gate_up_bias=False, down_bias=False, down_format="int4",
        )  # fmt: skip


def test_gguf_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_type must be one of Q8_0, .*, got 'Q2_K'"):
        from_gguf(torch.zeros(1, 1, 34, dtype=torch.uint8), "Q2_K")
    with pytest.raises(TypeError, match="blocks must be a tensor or a numpy array, got bytes"):
        from_gguf(b"", "Q8_0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"whole blocks of 34 bytes for Q8_0; got \[1, 1, 35\]"):
        from_gguf(torch.zeros(1, 1, 35, dtype=torch.uint8), "q8_0")


def every_instruction_set() -> Iterator[tuple[str, bool]]:
    """Each, and whether it rounds dequantized weights to bf16."""
    for name in _C.supported_instruction_sets():
        torch_numa_moe.configure(isa=name)
        yield name, name in ("avx512bf16", "amx")


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_op_multiplies_what_the_codes_stand_for(name: str, fresh_runtime: None) -> None:
    """On every instruction set, for sizes that are no multiples of anything, with few rows and with many."""
    for hidden_size, intermediate_size in ((64, 48), (130, 34), (257, 300)):
        layer = random_layer(4, hidden_size, intermediate_size, dtype=torch.float32, bias=True)
        gate, up = layer.gate_up_proj.chunk(2, dim=1)
        exact = Layer(
            torch.cat([quantize(part, name).dequantize() for part in (gate, up)], dim=1),
            quantize(layer.down_proj, name).dequantize(),
            layer.gate_up_bias,
            layer.down_bias,
        )
        for instruction_set, rounds in every_instruction_set():
            packed = pack_experts(
                layer.gate_up_proj, layer.down_proj, format=name, gate_up_bias=layer.gate_up_bias,
                down_bias=layer.down_bias,
            )  # fmt: skip
            unpacked = packed.unpack()
            # One expert at a time, as it was packed.
            for expert in range(4):
                one = slice(expert, expert + 1)
                parts = [quantize(part[one], name).dequantize() for part in (gate, up)]
                assert torch.equal(unpacked.gate_up_proj[one], torch.cat(parts, dim=1))
            for tokens in (1, 2, 5, 40):
                hidden = torch.randn(tokens, hidden_size)
                ids, weights = random_routing(tokens, 2, 4)
                expected = moe_ffn(hidden, ids, weights, exact, activation_dtype=torch.bfloat16)
                bound = DEQUANTIZED if rounds and tokens == 40 else EXACT
                error = relative_error(packed(hidden, ids, weights), expected)
                assert error < bound, (instruction_set, hidden_size, tokens)


@pytest.mark.parametrize("name", ["int8", "int4_zp", "fp8", "nvfp4"])
def test_same_bits_for_any_workers_and_slices(name: str, fresh_runtime: None) -> None:
    layer = random_layer(5, 130, 77, dtype=torch.float32)
    for tokens in (1, 7, 60):
        hidden = torch.randn(tokens, 130)
        ids, weights = random_routing(tokens, 3, 5)
        results = []
        for split, workers in (("0", 1), ("0", 2), ("test", 2), ("test:3", 3), ("test:7", 2)):
            torch_numa_moe.configure(split=split, workers=workers)
            results.append(
                pack_experts(layer.gate_up_proj, layer.down_proj, format=name)(hidden, ids, weights)
            )
        assert all(torch.equal(result, results[0]) for result in results[1:]), tokens


@pytest.mark.parametrize("name", ["int8", "int4_zp", "fp8", "mxfp4"])
def test_instruction_sets_in_fp32_agree_to_the_bit(name: str, fresh_runtime: None) -> None:
    """With few rows and with many: dequantizing first changes nothing."""
    layer = random_layer(3, 100, 64, dtype=torch.float32)
    hidden = torch.randn(60, 100)
    ids, weights = random_routing(60, 2, 3)
    expected = None
    for _, rounds in every_instruction_set():
        if rounds:
            continue
        packed = pack_experts(layer.gate_up_proj, layer.down_proj, format=name)
        whole = packed(hidden, ids, weights)
        pieces = [
            packed(hidden[at : at + 4], ids[at : at + 4], weights[at : at + 4]) for at in range(0, 60, 4)
        ]
        assert torch.equal(torch.cat(pieces), whole)
        expected = whole if expected is None else expected
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("codes", ["int8", "fp8", *CODE_VALUES])
def test_every_code(codes: str, fresh_runtime: None) -> None:
    """As a weight of its own, against torch's (or the standard's) value of it."""
    name = {"int8": "int8", "fp8": "fp8_row", "int4": "int4", "e2m1": "mxfp4", "iq4": "iq4_xs"}.get(codes)
    if name is None:
        name = "int4_zp"
    count = 16 if codes in CODE_VALUES else 256
    stored = torch.arange(count, dtype=torch.uint8)
    if codes == "fp8":
        stored = stored[(stored & 0x7F) != 0x7F]
        values = stored.view(torch.float8_e4m3fn).double()
    elif codes == "int8":
        values = stored.view(torch.int8).double()
    else:
        values = torch.tensor(CODE_VALUES[codes], dtype=torch.float64)
    rows = stored.numel()
    for _, _rounds in every_instruction_set():
        down = QuantizedWeight.empty(name, 1, rows, 256)
        for tensor in down.tensors.values():
            tensor.view(torch.uint8).zero_()
        down.codes[0, :, 5] = stored
        if name == "int4_zp":
            assert down.offsets is not None
            down.offsets.fill_(0)
        down.scales.copy_(torch.ones(down.scales.shape))
        if down.outer_scales is not None:
            down.outer_scales.fill_(1)
        gate = QuantizedWeight.empty(name, 1, 256, rows)
        for tensor in gate.tensors.values():
            tensor.view(torch.uint8).zero_()
        packed = torch_numa_moe.PackedExperts(
            num_experts=1, hidden_size=rows, intermediate_size=256, format=name, activation="relu",
            alpha=None, limit=None, gated=False, gate_up_bias=True, down_bias=False,
        )  # fmt: skip
        packed.pack_quantized("gate", 0, gate)
        packed.pack_quantized("down", 0, down)
        only_fifth = torch.zeros(1, 256)
        only_fifth[0, 5] = 1
        packed.pack_gate_up_bias(only_fifth, None)
        out = packed(torch.zeros(1, rows), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        # Codes of value 0 aren't 0 in every table: the other columns are multiplied by an activation of 0.
        assert torch.equal(out[0].double(), values + 0.0), codes


def test_codes_that_are_nan_reach_the_output_and_only_their_row() -> None:
    layer = random_layer(2, 64, 32, dtype=torch.float32)
    gate_up, down = quantize(layer.gate_up_proj, "fp8_row"), quantize(layer.down_proj, "fp8_row")
    down.codes[1, 3, 7] = 0x7F
    packed = pack_experts(gate_up, down)
    hidden = torch.randn(2, 64)
    out = packed(hidden, torch.tensor([[0], [1]]), torch.ones(2, 1))
    assert out[0].isfinite().all()
    assert out[1, 3].isnan()
    assert out[1, [index for index in range(64) if index != 3]].isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int4", "int4_g64_fp32", "fp8_row", "mxfp4"])
def test_codes_are_the_nearest(name: str) -> None:
    """No other code of the format is nearer to the weight, under the scale that was chosen."""
    weight = torch.randn(2, 6, 64)
    found = quantize(weight, name)
    quantization = found.quantization
    stored = torch.arange(256 if quantization.code_bits == 8 else 16, dtype=torch.uint8)
    candidates = torch_numa_moe.quantization.weight.code_values(quantization.codes, stored)
    candidates = candidates[candidates.isfinite() & (candidates >= -candidates[candidates.isfinite()].max())]
    scale = found.scales.float().repeat_interleave(quantization.group or 64, dim=2)
    distance = (scale.unsqueeze(-1) * candidates - weight.unsqueeze(-1)).abs().amin(dim=-1)
    error = (found.dequantize() - weight).abs()
    assert bool((error <= distance * (1 + 1e-5) + 1e-7).all())


@pytest.mark.parametrize(
    ("name", "bound"),
    [("int8", 0.0085), ("int8_g128", 0.007), ("int4", 0.1), ("int4_g128", 0.122), ("int4_zp", 0.085),
     ("fp8", 0.028), ("fp8_row", 0.028), ("mxfp4", 0.12), ("nvfp4", 0.1)],
)  # fmt: skip
def test_error_against_the_weights(name: str, bound: float) -> None:
    """On normally distributed weights: the figures of docs/formats.md."""
    weight = torch.randn(1, 256, 1024)
    assert relative_error(quantize(weight, name).dequantize(), weight.double()) < bound


def test_definitions_of_the_scales() -> None:
    weight = torch.zeros(1, 256, 256)
    weight[0, 0, 0], weight[0, 130, 3], weight[0, 5, 200] = 448.0, -896.0, 44.8
    fp8 = quantize(weight, "fp8")  # blocks of 128 x 128
    assert fp8.scales[0, :128, 0].eq(1).all()
    assert fp8.scales[0, 128:, 0].eq(2).all()
    assert torch.allclose(fp8.scales[0, :128, 1], torch.tensor(0.1))
    mxfp4 = quantize(weight, "mxfp4")
    assert mxfp4.scales[0, 0, 0].float() == 2.0 ** (math.floor(math.log2(448)) - 2)
    nvfp4 = quantize(weight, "nvfp4")
    assert nvfp4.outer_scales is not None
    assert torch.allclose(nvfp4.outer_scales, torch.tensor(896.0 / (448 * 6)))


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_zeros_stay_zeros(name: str) -> None:
    weight = torch.zeros(2, 20, 40)
    weight[1, 3, :] = 1e-30
    found = quantize(weight, name).dequantize()
    assert found[0].eq(0).all()
    assert found.isfinite().all()


def test_what_can_not_be_quantized_is_refused() -> None:
    weight = torch.randn(1, 8, 32)
    with pytest.raises(ValueError, match="format 'bf16' stores weights as they are"):
        quantize(weight, "bf16")
    with pytest.raises(ValueError, match="format 'q4_k' is taken as it is from a GGUF file"):
        quantize(weight, "q4_k")
    weight[0, 0, 0] = math.inf
    with pytest.raises(ValueError, match="weight holds NaN or infinity, which format 'int4' can't store"):
        quantize(weight, "int4")


@pytest.mark.parametrize(
    "name",
    ["int5", "int8_zp", "int8_g4294967296", "int4_g٣٢", "int4_g20", "int4_g8", "int4_fp8", "INT4", None, 4],
)
def test_unknown_formats_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="format must be one of bf16"):
        find_format(name)  # type: ignore[arg-type]


def test_quantized_weights_are_checked() -> None:
    weight = quantize(torch.randn(2, 32, 64), "int4")
    with pytest.raises(
        ValueError, match=r"scales must be \[2, 32, 2\] torch.bfloat16 for format 'int4', got None"
    ):
        QuantizedWeight("int4", weight.codes, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offsets must be None: format 'int4' has none"):
        QuantizedWeight("int4", weight.codes, weight.scales, weight.codes)
    with pytest.raises(ValueError, match=r"codes must be \[num_experts, rows, columns\] uint8"):
        QuantizedWeight("int4", weight.codes.float(), weight.scales)
    down = quantize(torch.randn(2, 64, 16), "int8")
    with pytest.raises(TypeError, match="must both be quantized, or neither"):
        pack_experts(weight, torch.randn(2, 64, 16))
    same = quantize(torch.randn(2, 64, 16), "int4")
    with pytest.raises(ValueError, match="gate_up_proj is in format 'int4', which can't be changed to 'fp8'"):
        pack_experts(weight, same, format="fp8")
    with pytest.raises(ValueError, match="transposed=True is for plain weights"):
        pack_experts(weight, same, transposed=True)
    packed = pack_experts(weight, same)
    with pytest.raises(ValueError, match="weight must be in the format of these experts, 'int4'"):
        packed.pack_quantized("down", 0, down)
    with pytest.raises(ValueError, match=r"weight must be \[n, 64, 16\], got \[2, 32, 64\]"):
        packed.pack_quantized("down", 0, weight)
    with pytest.raises(ValueError, match="projection must be one of gate, up, down, got 'side'"):
        packed.pack_quantized("side", 0, weight)
    with pytest.raises(ValueError, match="first_expert must leave room for 2 experts in 2, got 1"):
        packed.pack_quantized("down", 1, same)


def test_the_op_checks_format_against_the_tensors() -> None:
    layer = random_layer(2, 64, 32, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="int4")
    arguments = (torch.randn(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))

    def call(gate_up: torch.Tensor, down: torch.Tensor, format: str | None) -> torch.Tensor:
        return torch.ops.numa_moe.experts(*arguments, gate_up, down, format=format)

    text = find_format("int4").quantization.text  # type: ignore[union-attr]
    call(packed.gate_up_proj, packed.down_proj, text)
    with pytest.raises(ValueError, match=r"gate_up_proj must be \[num_slices, .*16, k group\]"):
        call(packed.gate_up_proj, packed.down_proj, None)
    with pytest.raises(ValueError, match='no codes are called "int3"'):
        call(packed.gate_up_proj, packed.down_proj, "codes=int3")
    with pytest.raises(ValueError, match=r"gate_up_proj must be|was packed for|must have shape"):
        call(packed.gate_up_proj, packed.down_proj, "codes=int8 scale=fp32")
    with pytest.raises(ValueError, match=r"\(uint8\), got .*torch.int8"):
        call(packed.gate_up_proj.view(torch.int8), packed.down_proj, text)
    with pytest.raises(ValueError, match=r"gate_up_proj must be \[num_slices"):
        call(packed.gate_up_proj, packed.down_proj[..., :-1].contiguous(), text)
    with pytest.raises(
        ValueError, match="hidden_states has hidden_size 72, but gate_up_proj was packed for 64"
    ):
        torch.ops.numa_moe.experts(
            torch.randn(1, 72), *arguments[1:], packed.gate_up_proj, packed.down_proj, format=text
        )


def test_opcheck_and_compile() -> None:
    layer = random_layer(3, 64, 32, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="int4_zp")
    ids, weights = random_routing(4, 2, 3)
    hidden = torch.randn(4, 64)
    torch.library.opcheck(
        torch.ops.numa_moe.experts.default,
        (hidden, ids, weights, packed.gate_up_proj, packed.down_proj),
        {"format": find_format("int4_zp").quantization.text},  # type: ignore[union-attr]
    )
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden, ids, weights), packed(hidden, ids, weights))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_the_format(name: str) -> None:
    """Packed bytes are what bits_per_weight says, within a per cent for scales of whole rows and padding."""
    quantization = find_format(name).quantization
    packed = torch_numa_moe.PackedExperts(
        num_experts=2, hidden_size=1024, intermediate_size=512, format=name, activation="silu", alpha=None,
        limit=None, gated=True, gate_up_bias=False, down_bias=False,
    )  # fmt: skip
    bits = packed.nbytes * 8 / (2 * 3 * 1024 * 512)
    assert bits == pytest.approx(find_format(name).bits_per_weight, rel=0.02 if quantization else 0)
    assert packed.nbytes == sum(
        packed_bytes.numel() * packed_bytes.element_size()
        for packed_bytes in (packed.gate_up_proj, packed.down_proj)
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4", "switch_transformers"])
def test_patching_a_model_with_quantized_experts(name: str) -> None:
    """Each layer is near what it was, and unpatching restores what the codes stand for."""
    pytest.importorskip("transformers")
    from build_or_skip import build_or_skip
    from tiny_architectures import ARCHITECTURES, run_architecture

    model = build_or_skip(next(one for one in ARCHITECTURES if one.name == name))
    original = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        report = torch_numa_moe.patch(model, format="int8", progress=False)
        assert {module.format for module in report.modules} == {"int8"}
        assert run_architecture(model).isfinite().all()
        torch_numa_moe.unpatch(model)
    changed = 0
    for key, value in model.state_dict().items():
        error = relative_error(value, original[key].double()) if value.is_floating_point() else 0.0
        assert error < 0.012, key
        changed += error > 0
    assert changed >= 2, "nothing was quantized"


@pytest.mark.parametrize("name", ["codes", "scales", "offsets"])
def test_storages_that_were_resized_are_refused(name: str) -> None:
    weight = quantize(torch.randn(1, 64, 32), "int4_zp")
    packed = pack_experts(quantize(torch.randn(1, 64, 64), "int4_zp"), weight)
    weight.tensors[name].untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match=r"must have its memory|not allocated"):
        packed.pack_quantized("down", 0, weight)
    with pytest.raises(ValueError, match=f"{name} must have its memory, but its storage holds 0 of"):
        torch.ops.numa_moe.pack_quantized(
            packed.down_proj, weight.quantization.text, 0, 0, weight.codes, weight.scales, weight.offsets,
            None, None,
        )  # fmt: skip


def test_values_that_are_none_of_the_format_are_refused() -> None:
    four_bits = quantize(torch.randn(1, 64, 64), "int4_zp")
    packed = pack_experts(four_bits, quantize(torch.randn(1, 64, 32), "int4_zp"))
    four_bits.codes[0, 1, 2] = 16
    with pytest.raises(ValueError, match="codes of format 'int4_zp' must be 0 to 15, got 16"):
        packed.pack_quantized("gate", 0, four_bits.take_rows(torch.arange(32)))
    zero_points = quantize(torch.randn(1, 64, 32), "int4_zp")
    assert zero_points.offsets is not None
    zero_points.offsets[0, 0, 0] = 17
    with pytest.raises(ValueError, match=r"zero points \(offsets\) must be 0 to 16, got 17"):
        packed.pack_quantized("down", 0, zero_points)
    for name in ("nvfp4", "mxfp4"):
        bad = quantize(torch.randn(1, 64, 32), name)
        bad.scales.view(torch.uint8)[0, 0, 0] = 0xFF
        with pytest.raises(ValueError, match=f"scales hold NaN, which is none of format '{name}'"):
            pack_experts(quantize(torch.randn(1, 64, 64), name), bad)


def test_zero_points_of_sixteen(fresh_runtime: None) -> None:
    """Older GPTQ checkpoints store one less than the zero point, so 16 occurs."""
    gate_up, down = quantize(torch.randn(1, 64, 64), "int4_zp"), quantize(torch.randn(1, 64, 32), "int4_zp")
    assert gate_up.offsets is not None
    gate_up.offsets.fill_(16)
    hidden, ids, weights = torch.randn(2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    layer = Layer(gate_up.dequantize(), down.dequantize())
    expected = moe_ffn(hidden, ids, weights, layer, activation_dtype=torch.bfloat16)
    for name, _ in every_instruction_set():
        error = relative_error(pack_experts(gate_up, down)(hidden, ids, weights), expected)
        assert error < EXACT, name


@pytest.mark.parametrize(("name", "factor"), [("q4_0", 1e6), ("int4_zp_fp16", 1e7), ("q8_0", 1e7)])
def test_weights_too_large_for_the_scales_are_refused(name: str, factor: float) -> None:
    with pytest.raises(ValueError, match=f"weight is too large for format '{name}': a scale would be .*fp16"):
        quantize(torch.randn(1, 4, 64) * factor, name)


@pytest.mark.parametrize("name", ["bf16", "fp32", "int4", "int4_zp", "fp8_row"])
def test_channels_that_pad_never_count(name: str, fresh_runtime: None) -> None:
    """Where a hidden state is infinite, 0 times it isn't 0; relu of the channels that there are is."""
    hidden = torch.ones(1, 16)
    hidden[0, 3] = math.inf
    ids, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for split in ("0", "test:3"):
        torch_numa_moe.configure(split=split)
        for instruction_set, _ in every_instruction_set():
            packed = pack_experts(
                torch.full((1, 35, 16), -1.0), torch.ones(1, 16, 35), format=name, activation="relu",
                gated=False,
            )  # fmt: skip
            assert torch.equal(packed(hidden, ids, one), torch.zeros(1, 16)), instruction_set


@pytest.mark.parametrize("name", ["int4", "mxfp4", "int4_zp", "nvfp4"])
def test_the_default_device_and_dtype_change_nothing(name: str) -> None:
    layer = random_layer(2, 64, 32, dtype=torch.float32)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format=name)
    expected = packed.unpack()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again = pack_experts(layer.gate_up_proj, layer.down_proj, format=name).unpack()
            weight = quantize(layer.down_proj, name).dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again.gate_up_proj, expected.gate_up_proj)
    assert torch.equal(again.down_proj, expected.down_proj)
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"


def test_meta_tensors_are_refused_where_something_is_to_be_packed() -> None:
    weight = quantize(torch.randn(1, 64, 64), "int4")
    packed = pack_experts(weight, quantize(torch.randn(1, 64, 32), "int4"))
    arguments = (packed.gate_up_proj, weight.quantization.text, 0, 0)
    with pytest.raises(RuntimeError, match="codes must be a CPU tensor, got meta"):
        torch.ops.numa_moe.pack_quantized(
            *arguments, weight.codes.to("meta"), weight.scales, None, None, None
        )
    with pytest.raises(RuntimeError, match="packed must be a CPU tensor, got meta"):
        torch.ops.numa_moe.pack_down(packed.down_proj.to("meta"), torch.randn(1, 64, 32), 0)


def test_projections_of_other_sizes_are_refused() -> None:
    """Of which some experts are packed or unpacked."""
    packed = pack_experts(torch.randn(2, 64, 48), torch.randn(2, 48, 32), format="int4")
    gate, down = torch.randn(2, 32, 48), torch.randn(2, 48, 32)
    with pytest.raises(ValueError, match=r"up must be \[2, 32, 48\], got shape \[1, 32, 48\]"):
        packed.pack_gate_up(0, gate, gate[:1])
    with pytest.raises(ValueError, match="up must be given: gated=True"):
        packed.pack_gate_up(0, gate, None)
    with pytest.raises(ValueError, match="up must be given: gated=True"):
        packed.unpack_experts(0, gate, None, down)
    with pytest.raises(ValueError, match=r"down must be \[n, 48, 32\], got shape \[2, 32, 48\]"):
        packed.pack_down(0, gate)
    with pytest.raises(ValueError, match=r"gate must be float32, bfloat16 or float16, got torch.int8"):
        packed.unpack_experts(0, gate.to(torch.int8), gate, down)
    for bad, error in ((True, TypeError), (1.5, TypeError), (2**62, ValueError), (0, ValueError)):
        with pytest.raises(error, match="num_experts must be"):
            torch_numa_moe.PackedExperts(
                num_experts=bad, hidden_size=16, intermediate_size=16, format="int4", activation="silu",  # type: ignore[arg-type]
                alpha=None, limit=None, gated=True, gate_up_bias=False, down_bias=False,
            )  # fmt: skip
