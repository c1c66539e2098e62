"""Packs the weights of one MoE layer for ``torch.ops.numa_moe.experts``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_numa_moe import _C, runtime
from torch_numa_moe.formats import PANEL_WIDTH, find_format
from torch_numa_moe.page_cache import page_out
from torch_numa_moe.placement import PlacedTensors, SlicePlacement, measure_placements, report_placement
from torch_numa_moe.quantization import QuantizedWeight, quantize
from torch_numa_moe.statistics.collect import remember

__all__ = ["PackedExperts", "UnpackedExperts", "pack_experts"]

_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS_WITH_UP = ("swiglu_oai", "silu_clamp_input", "silu_clamp_output")


class UnpackedExperts(NamedTuple):
    """The weights of a layer in their original layout (see :func:`pack_experts`)."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def _divide_up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def packed_slice_bytes(
    format: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    num_slices: int,
    down_format: str | None = None,
) -> int:
    """Bytes of weights in each slice of a packed layer, padding included."""
    weight_format = find_format(format)
    down = find_format(format if down_format is None else down_format)
    gate_up_blocks, down_blocks = (
        _divide_up(_divide_up(size, PANEL_WIDTH), num_slices) for size in (intermediate_size, hidden_size)
    )
    panel = math.prod(weight_format.panel_shape(hidden_size)) * weight_format.dtype.itemsize
    down_panel = math.prod(down.panel_shape(intermediate_size)) * down.dtype.itemsize
    return num_experts * (gate_up_blocks * (2 if gated else 1) * panel + down_blocks * down_panel)


def _slice_blocks(num_blocks: int, num_slices: int, index: int) -> range:
    """The blocks of one slice; the rule of ``slice_blocks`` in csrc/moe/expert_layout.h."""
    return range(num_blocks * index // num_slices, num_blocks * (index + 1) // num_slices)


_MOST = 1 << 24
"""Bound of each size of a layer: far above any model's, and none of their products overflows."""

_SMALLEST_LIMIT = 2.0**-149
"""The smallest number above 0 in fp32, in which the limit is applied."""


# Whatever torch's default device and dtype are.
def _host_zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float32, device="cpu")


def _host_empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cpu")


def _swapped(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return shape[0], shape[2], shape[1]


class _SlicedMemory:
    """A packed tensor whose slices lie on their nodes, each page-aligned."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        nodes: Sequence[int | None],
        layer_slice_bytes: int = 0,
    ) -> None:
        itemsize = dtype.itemsize
        slice_bytes = math.prod(shape[1:]) * itemsize
        region = _C.PlacedRegion(
            slice_bytes=slice_bytes,
            nodes=[-1 if node is None else node for node in nodes],
            huge_pages=runtime.huge_pages(),
            untouched_bytes=max(0, layer_slice_bytes - slice_bytes),
        )
        strides = [1] * len(shape)
        for dimension in range(len(shape) - 2, 0, -1):
            strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
        strides[0] = region.slice_stride // itemsize
        self.tensor = torch.frombuffer(region, dtype=dtype).as_strided(list(shape), strides)
        self.bind_errors = [binding.bind_error for binding in region.bindings]


class PackedExperts:
    """The experts of one MoE layer, packed: call it as the layer's FFN.

    Made by :func:`pack_experts`, or empty, to be filled by the ``pack_*`` methods, some experts at a time. It
    is no ``nn.Module`` and its tensors are no parameters or buffers: ``model.to("cuda")``, ``.half()`` and
    ``state_dict()`` leave them alone, and they stay on their NUMA nodes.

    Attributes:
        gate_up_proj: ``[num_slices, num_experts, blocks, 2 or 1, k, 16, k_group]``, dtype of the format; of
            codes ``[num_slices, num_experts, blocks, 2 or 1, bytes of a panel]`` uint8.
        down_proj: ``[num_slices, num_experts, blocks, k, 16, k_group]``, dtype of the format; of codes
            ``[num_slices, num_experts, blocks, bytes of a panel]`` uint8.
        gate_up_bias: ``[num_slices, num_experts, blocks, 2 or 1, 16]`` fp32, or None.
        down_bias: ``[num_slices, num_experts, blocks, 16]`` fp32, or None.
        num_experts, hidden_size, intermediate_size: sizes of the layer.
        format: name of the weight format.
        down_format: that of down_proj; another one only if both have codes.
        activation, alpha, limit, gated: see :func:`pack_experts`.
        name: what :func:`torch_numa_moe.stats` calls the layer, or "". :func:`torch_numa_moe.patch` sets the
            module's name.
        placement: where each slice is, as read back from the kernel (empty until packed).
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        format: str,
        activation: str,
        alpha: float | None,
        limit: float | None,
        gated: bool,
        gate_up_bias: bool,
        down_bias: bool,
        down_format: str | None = None,
    ) -> None:
        for name, value in (
            ("num_experts", num_experts),
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if not 1 <= value <= _MOST:
                raise ValueError(f"{name} must be at least 1 and at most {_MOST}, got {value}")
        if activation not in _C.activation_names():
            raise ValueError(
                f"activation must be one of {', '.join(_C.activation_names())}, got {activation!r}"
            )
        if activation in _ACTIVATIONS_WITH_UP and not gated:
            raise ValueError(f"activation {activation!r} multiplies gate and up: it needs gated=True")
        for name, number in (("alpha", alpha), ("limit", limit)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise TypeError(f"{name} must be a number or None, got {number!r}")
        if limit is not None and not limit >= _SMALLEST_LIMIT:
            raise ValueError(f"limit must be > 0 in fp32, got {limit}")
        weight_format = find_format(format)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.format = weight_format.name
        down_weight_format = weight_format if down_format is None else find_format(down_format)
        if down_weight_format != weight_format and None in (
            weight_format.quantization,
            down_weight_format.quantization,
        ):
            raise ValueError(
                "down_format may differ from format where both have codes, "
                f"got {down_format!r} and {format!r}"
            )
        self.down_format = down_weight_format.name
        self.activation = activation
        self.alpha = alpha
        self.limit = None if limit is None or math.isinf(limit) else limit
        self.gated = gated
        self.name = ""
        self.placement: tuple[SlicePlacement, ...] = ()
        self._transposed = False
        self._interleaved = False
        plain = torch.float32 if weight_format.quantization is not None else weight_format.dtype
        self._source_dtypes: tuple[torch.dtype, torch.dtype] = (plain, plain)
        self._bias_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)

        nodes = runtime.ensure_started().nodes
        self.nodes: tuple[int | None, ...] = nodes
        slice_bytes = packed_slice_bytes(
            self.format,
            num_experts,
            hidden_size,
            intermediate_size,
            gated,
            len(nodes),
            self.down_format,
        )
        runtime.check_room([slice_bytes] * len(nodes))
        projections = 2 if gated else 1
        gate_up_blocks = _divide_up(self._intermediate_blocks, len(nodes))
        down_blocks = _divide_up(self._hidden_blocks, len(nodes))
        gate_up = _SlicedMemory(
            (
                len(nodes),
                num_experts,
                gate_up_blocks,
                projections,
                *weight_format.panel_shape(hidden_size),
            ),
            weight_format.dtype,
            nodes,
            slice_bytes,
        )
        down = _SlicedMemory(
            (len(nodes), num_experts, down_blocks, *down_weight_format.panel_shape(intermediate_size)),
            down_weight_format.dtype,
            nodes,
            slice_bytes,
        )
        self._format_text = None if weight_format.quantization is None else weight_format.quantization.text
        down_quantization = down_weight_format.quantization
        self._down_format_text: str | None = None
        if down_quantization is not None and down_quantization.text != self._format_text:
            self._down_format_text = down_quantization.text
        self.gate_up_proj = gate_up.tensor
        self.down_proj = down.tensor
        self._bind_errors = tuple(
            first or second for first, second in zip(gate_up.bind_errors, down.bind_errors, strict=True)
        )
        remember(self)
        self.gate_up_bias: torch.Tensor | None = None
        self.down_bias: torch.Tensor | None = None
        if gate_up_bias:
            self.gate_up_bias = _host_zeros(len(nodes), num_experts, gate_up_blocks, projections, PANEL_WIDTH)
        if down_bias:
            self.down_bias = _host_zeros(len(nodes), num_experts, down_blocks, PANEL_WIDTH)

    @property
    def _intermediate_blocks(self) -> int:
        return _divide_up(self.intermediate_size, PANEL_WIDTH)

    @property
    def _hidden_blocks(self) -> int:
        return _divide_up(self.hidden_size, PANEL_WIDTH)

    @property
    def num_slices(self) -> int:
        """NUMA slices that the rows are cut into."""
        return self.gate_up_proj.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors, padding included."""
        tensors = (self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def __call__(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output, one ``torch.ops.numa_moe.experts`` call.

        Args:
            hidden_states: ``[num_tokens, hidden_size]`` fp32, bf16 or fp16.
            topk_ids: ``[num_tokens, top_k]`` int32 or int64; an id >= num_experts adds nothing.
            topk_weights: ``[num_tokens, top_k]`` fp32, bf16 or fp16.

        Returns:
            ``[num_tokens, hidden_size]``, dtype of hidden_states.

        Raises:
            ValueError: naming the argument that doesn't fit, what it was and what is accepted.
        """
        # The op can't tell an odd size from the even one above it, to which the bf16 format pads.
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must be [num_tokens, hidden_size = {self.hidden_size}], "
                f"got {list(hidden_states.shape)}"
            )
        return torch.ops.numa_moe.experts(
            hidden_states,
            topk_ids,
            topk_weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_bias,
            self.down_bias,
            activation=self.activation,
            alpha=self.alpha,
            limit=self.limit,
            format=self._format_text,
            intermediate_size=self.intermediate_size,
            down_format=self._down_format_text,
        )

    def pack_gate_up(self, first_expert: int, gate: torch.Tensor, up: torch.Tensor | None) -> None:
        """Packs some experts' gate and up rows.

        Args:
            first_expert: index of the first expert given.
            gate: ``[n, intermediate_size, hidden_size]`` fp32, bf16 or fp16, any strides. The only
                projection when ``gated`` is False.
            up: the same shape, or None when ``gated`` is False.

        Raises:
            ValueError: on a shape, dtype or expert that doesn't fit.
        """
        if self._format_text is None:
            torch.ops.numa_moe.pack_gate_up(self.gate_up_proj, gate, up, first_expert)
            return
        if (up is not None) != self.gated:
            raise ValueError(f"up must {'be given' if self.gated else 'be None'}: gated={self.gated}")
        self._check_projections(gate, up)
        for expert in range(gate.shape[0]):  # one at a time: quantizing takes memory
            one = slice(expert, expert + 1)
            self.pack_quantized("gate", first_expert + expert, quantize(gate[one], self.format))
            if up is not None:
                self.pack_quantized("up", first_expert + expert, quantize(up[one], self.format))

    def pack_down(self, first_expert: int, down: torch.Tensor) -> None:
        """Packs some experts' down rows: ``[n, hidden_size, intermediate_size]``, as :meth:`pack_gate_up`."""
        if self._format_text is None:
            torch.ops.numa_moe.pack_down(self.down_proj, down, first_expert)
            return
        self._check_projection("down", down, (None, self.hidden_size, self.intermediate_size))
        for expert in range(down.shape[0]):
            one = down[expert : expert + 1]
            self.pack_quantized("down", first_expert + expert, quantize(one, self.down_format))

    def pack_quantized(self, projection: str, first_expert: int, weight: QuantizedWeight) -> None:
        """Packs some experts' weights that are quantized already, as they are.

        Args:
            projection: ``"gate"`` (also the only one when ``gated`` is False), ``"up"`` or ``"down"``.
            first_expert: index of the first expert given.
            weight: ``[n, intermediate_size, hidden_size]``, of down ``[n, hidden_size, intermediate_size]``,
                in a format with the codes, groups and scales of this layer's.

        Raises:
            ValueError: naming what doesn't fit; also codes that aren't of the format, and scales without a
                value (NaN as e4m3 or e8m0).
        """
        packed, index, format = self._projection(projection)
        text = weight.quantization.text
        wanted = find_format(format).quantization
        if wanted is None or text != wanted.text:
            raise ValueError(
                f"weight must be in the format of these experts, {format!r}, got {weight.format!r} ({text})"
            )
        sizes = (self.intermediate_size, self.hidden_size)
        expected = sizes[::-1] if projection == "down" else sizes
        if tuple(weight.shape[1:]) != expected:
            raise ValueError(f"weight must be [n, {expected[0]}, {expected[1]}], got {list(weight.shape)}")
        weight.check_values()
        scales = weight.scales
        if weight.quantization.codes == "fp8":
            # Kernels have no NaN among these codes. A NaN makes its row's sum NaN, and so does its scale.
            groups = weight.quantization.group or weight.shape[2]
            bad = torch.nn.functional.pad((weight.codes & 0x7F) == 0x7F, (0, -weight.shape[2] % groups))
            bad = bad.unflatten(2, (-1, groups)).any(dim=3)
            if bool(bad.any()):
                scales = scales.masked_fill(bad, math.nan)
        torch.ops.numa_moe.pack_quantized(
            packed,
            text,
            index,
            first_expert,
            weight.codes.contiguous(),
            scales.contiguous(),
            *(
                None if tensor is None else tensor.contiguous()
                for tensor in (weight.offsets, weight.outer_scales, weight.outer_minima)
            ),
        )

    def unpack_quantized(
        self, projection: str, first_expert: int = 0, num_experts: int | None = None
    ) -> QuantizedWeight:
        """Experts' codes and scales of a projection, as :meth:`pack_quantized` takes them.

        Args:
            projection: ``"gate"``, ``"up"`` or ``"down"``.
            first_expert: index of the first expert wanted.
            num_experts: how many; None: all from the first on.

        Raises:
            ValueError: if the format has no codes, or projection isn't one of this layer's.
        """
        packed, index, format = self._projection(projection)
        rows, columns = self.intermediate_size, self.hidden_size
        if projection == "down":
            rows, columns = columns, rows
        count = self.num_experts - first_expert if num_experts is None else num_experts
        empty = QuantizedWeight.empty(format, count, rows, columns)
        torch.ops.numa_moe.unpack_quantized(
            packed,
            empty.quantization.text,
            index,
            first_expert,
            empty.codes,
            empty.scales,
            empty.offsets,
            empty.outer_scales,
            empty.outer_minima,
        )
        return empty

    def _check_projections(self, gate: torch.Tensor, up: torch.Tensor | None) -> None:
        if (up is not None) != self.gated:
            raise ValueError(f"up must {'be given' if self.gated else 'be None'}: gated={self.gated}")
        self._check_projection("gate", gate, (None, self.intermediate_size, self.hidden_size))
        if up is not None:
            self._check_projection("up", up, (gate.shape[0], self.intermediate_size, self.hidden_size))

    def _check_projection(self, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
        wanted = "[" + ", ".join("n" if size is None else str(size) for size in shape) + "]"
        _check_source(name, tensor, 3, wanted)
        if any(size not in (None, got) for size, got in zip(shape, tensor.shape, strict=True)):
            raise ValueError(f"{name} must be {wanted}, got shape {list(tensor.shape)}")

    def _projection(self, name: str) -> tuple[torch.Tensor, int, str]:
        """The packed tensor, the place in it, and the format."""
        if self._format_text is None:
            raise ValueError(f"format {self.format!r} stores weights as they are, not as codes")
        known = {"gate": 0, "up": 1, "down": 0} if self.gated else {"gate": 0, "down": 0}
        if name not in known:
            raise ValueError(f"projection must be one of {', '.join(known)}, got {name!r}")
        if name == "down":
            return self.down_proj, 0, self.down_format
        return self.gate_up_proj, known[name], self.format

    def pack_gate_up_bias(self, gate: torch.Tensor, up: torch.Tensor | None) -> None:
        """Sets the biases of all experts: ``[num_experts, intermediate_size]`` each.

        Raises:
            ValueError: naming the argument that doesn't fit.
        """
        if self.gate_up_bias is None:
            raise ValueError("these experts were made without gate_up_bias")
        if (up is not None) != self.gated:
            raise ValueError(f"up must {'be given' if self.gated else 'be None'}: gated={self.gated}")
        self._check_bias("gate", gate, self.intermediate_size)
        if up is not None:
            self._check_bias("up", up, self.intermediate_size)
        self._scatter_rows(self.gate_up_bias[:, :, :, 0], gate, self._intermediate_blocks)
        if up is not None:
            self._scatter_rows(self.gate_up_bias[:, :, :, 1], up, self._intermediate_blocks)

    def pack_down_bias(self, down: torch.Tensor) -> None:
        """Sets the biases of all experts: ``[num_experts, hidden_size]``.

        Raises:
            ValueError: naming the argument that doesn't fit.
        """
        if self.down_bias is None:
            raise ValueError("these experts were made without down_bias")
        self._check_bias("down", down, self.hidden_size)
        self._scatter_rows(self.down_bias, down, self._hidden_blocks)

    def _check_bias(self, name: str, bias: torch.Tensor, width: int) -> None:
        if tuple(bias.shape) != (self.num_experts, width):
            raise ValueError(f"{name} must be [{self.num_experts}, {width}], got {list(bias.shape)}")

    def _scatter_rows(self, packed: torch.Tensor, rows: torch.Tensor, num_blocks: int) -> None:
        padded = _host_zeros(self.num_experts, num_blocks * PANEL_WIDTH)
        padded[:, : rows.shape[1]] = rows
        blocks = padded.view(self.num_experts, num_blocks, PANEL_WIDTH)
        for index in range(self.num_slices):
            span = _slice_blocks(num_blocks, self.num_slices, index)
            packed[index, :, : len(span)] = blocks[:, span.start : span.stop]

    def _gather_rows(self, packed: torch.Tensor, width: int, num_blocks: int) -> torch.Tensor:
        spans = [_slice_blocks(num_blocks, self.num_slices, index) for index in range(self.num_slices)]
        blocks = torch.cat([packed[index, :, : len(span)] for index, span in enumerate(spans)], dim=1)
        return blocks.reshape(self.num_experts, -1)[:, :width]

    def verify_placement(self) -> tuple[SlicePlacement, ...]:
        """Asks the kernel where the slices are now, logs what is wrong, and keeps it in ``placement``."""
        before = self.placement
        (self.placement,) = measure_placements([self.placed_tensors])
        report_placement(self.placement, before, huge_pages_wanted=runtime.huge_pages_wanted())
        return self.placement

    @property
    def placed_tensors(self) -> PlacedTensors:
        """The packed weights and the nodes that they were to be on."""
        return PlacedTensors((self.gate_up_proj, self.down_proj), self.nodes, self._bind_errors)

    def unpack_gate_up_bias(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gate's and up's biases, ``[num_experts, intermediate_size]`` fp32 each, or None."""
        packed = self.gate_up_bias
        if packed is None:
            return None, None
        gate, *up = (
            self._gather_rows(packed[:, :, :, index], self.intermediate_size, self._intermediate_blocks)
            for index in range(2 if self.gated else 1)
        )
        return gate, up[0] if up else None

    def unpack_down_bias(self) -> torch.Tensor | None:
        """Down's biases, ``[num_experts, hidden_size]`` fp32, or None if there are none."""
        if self.down_bias is None:
            return None
        return self._gather_rows(self.down_bias, self.hidden_size, self._hidden_blocks)

    def unpack_experts(
        self, first_expert: int, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor
    ) -> None:
        """Writes some experts' weights, of codes what they stand for, rounded to the tensors' dtype.

        Args:
            first_expert: index of the first expert wanted.
            gate: ``[n, intermediate_size, hidden_size]`` fp32, bf16 or fp16, any strides.
            up: the same, or None when ``gated`` is False.
            down: ``[n, hidden_size, intermediate_size]``.

        Raises:
            ValueError: on a shape, dtype or expert that doesn't fit.
        """
        if self._format_text is None:
            torch.ops.numa_moe.unpack_gate_up(self.gate_up_proj, gate, up, first_expert)
            torch.ops.numa_moe.unpack_down(self.down_proj, down, first_expert)
            return
        self._check_projections(gate, up)
        self._check_projection("down", down, (gate.shape[0], self.hidden_size, self.intermediate_size))
        for expert in range(gate.shape[0]):  # one at a time: codes and fp32 weights take memory
            for projection, rows in (("gate", gate), ("up", up), ("down", down)):
                if rows is not None:
                    found = self.unpack_quantized(projection, first_expert + expert, 1)
                    rows[expert : expert + 1].copy_(found.dequantize())

    def unpack(self) -> UnpackedExperts:
        """The weights in the layout and dtype they were packed from.

        Bit-exact when the format stores that dtype as it is; otherwise rounded as packing rounded them.
        """
        gate_up_dtype, down_dtype = self._source_dtypes
        rows = self.intermediate_size * (2 if self.gated else 1)
        gate_up_shape = (self.num_experts, rows, self.hidden_size)
        down_shape = (self.num_experts, self.hidden_size, self.intermediate_size)
        if self._transposed:
            gate_up = _host_empty(*_swapped(gate_up_shape), dtype=gate_up_dtype).transpose(1, 2)
            down = _host_empty(*_swapped(down_shape), dtype=down_dtype).transpose(1, 2)
        else:
            gate_up = _host_empty(*gate_up_shape, dtype=gate_up_dtype)
            down = _host_empty(*down_shape, dtype=down_dtype)
        gate, up = _gate_and_up(gate_up, self.gated, self._interleaved)
        self.unpack_experts(0, gate, up, down)
        gate_up_bias = None
        gate_rows, up_rows = self.unpack_gate_up_bias()
        if gate_rows is not None:
            gate_up_bias = _host_empty(self.num_experts, rows, dtype=self._bias_dtypes[0])
            gate_bias, up_bias = _gate_and_up(gate_up_bias, self.gated, self._interleaved)
            gate_bias.copy_(gate_rows)
            if up_bias is not None:
                assert up_rows is not None
                up_bias.copy_(up_rows)
        down_bias = self.unpack_down_bias()
        if down_bias is not None:
            down_bias = down_bias.to(self._bias_dtypes[1]).contiguous()
        if self._transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return UnpackedExperts(gate_up, down, gate_up_bias, down_bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        copy = object.__new__(PackedExperts)
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)
        for name in ("gate_up_proj", "down_proj"):
            packed = getattr(self, name)
            # Copied by this thread, so only mbind keeps it on its nodes: verify_placement() tells.
            memory = _SlicedMemory(packed.shape, packed.dtype, self.nodes)
            memory.tensor.copy_(packed)
            setattr(copy, name, memory.tensor)
        for name in ("gate_up_bias", "down_bias"):
            bias = getattr(self, name)
            setattr(copy, name, None if bias is None else bias.clone())
        copy.verify_placement()
        return copy

    def __reduce__(self) -> Any:
        raise TypeError(
            "PackedExperts can't be pickled: packed weights belong to the NUMA nodes of this machine. "
            "Save the original model (torch_numa_moe.unpatch(model), or PackedExperts.unpack()) instead."
        )

    def __repr__(self) -> str:
        return (
            f"PackedExperts({self.num_experts} experts, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, format={self.format!r}, "
            f"activation={self.activation!r}, {self.num_slices} slice(s), {self.nbytes / 2**20:.1f} MiB)"
        )


def _gate_and_up(
    gate_up: torch.Tensor, gated: bool, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the gate and the up rows (dimension 1) of a fused tensor."""
    if not gated:
        return gate_up, None
    if interleaved:
        return gate_up[:, 0::2], gate_up[:, 1::2]
    half = gate_up.shape[1] // 2
    return gate_up[:, :half], gate_up[:, half:]


def _pack_quantized_rows(
    packed: PackedExperts, gate_up: QuantizedWeight, gated: bool, interleaved: bool
) -> None:
    gates, ups = _gate_and_up(torch.arange(gate_up.shape[1], device="cpu").unsqueeze(0), gated, interleaved)
    packed.pack_quantized("gate", 0, gate_up.take_rows(gates[0]))
    if ups is not None:
        packed.pack_quantized("up", 0, gate_up.take_rows(ups[0]))


def _check_source(name: str, tensor: torch.Tensor, dimensions: int, accepted: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {accepted}, got {type(tensor).__name__}")
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must be {accepted}, got shape {list(tensor.shape)}")
    if tensor.dtype not in _SOURCE_DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the cpu, got {tensor.device}")


def pack_experts(
    gate_up_proj: torch.Tensor | QuantizedWeight,
    down_proj: torch.Tensor | QuantizedWeight,
    *,
    format: str | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    verify_placement: bool = True,
) -> PackedExperts:
    """Packs one MoE layer's experts into NUMA slices.

    Rows are cut across the slices (gate and up on intermediate_size, down on hidden_size), each slice is
    bound to its node and written by the workers that will read it. Sizes may be any: odd ones are padded.

    Formats (all sums in fp32):
        ``"bf16"``: 16 bits per weight; hidden states and intermediate activations are rounded to bf16.
        ``"fp16"``: 16 bits per weight; activations are kept in fp32.
        ``"fp32"``: 32 bits per weight; activations are kept in fp32.
        Codes and scales (docs/formats.md; hidden states and intermediate activations are rounded to bf16):
        ``"int8"`` 8 bits, a scale per row; ``"int4"`` 4.5 bits, groups of 32; ``"int4_g64"``,
        ``"int4_g128"``, ``"int4_zp"`` with zero points; ``"fp8"`` 8.25 bits, e4m3 in blocks of 128 x 128;
        ``"fp8_row"``; ``"mxfp4"`` 4.25 bits; ``"nvfp4"`` 4.5 bits; and as GGUF files hold them
        ``"q8_0"``, ``"q4_0"``, ``"q4_k"``, ``"q6_k"``, ``"iq4_xs"``
        (:func:`torch_numa_moe.quantization.from_gguf`).

    Args:
        gate_up_proj: ``[num_experts, 2 * intermediate_size, hidden_size]``: the gate rows, then the up rows
            (transformers' layout); ``[num_experts, intermediate_size, hidden_size]`` if not ``gated``.
            Or a :class:`~torch_numa_moe.quantization.QuantizedWeight` of that shape, whose codes are taken
            as they are.
        down_proj: ``[num_experts, hidden_size, intermediate_size]``, of the same kind; quantized weights may
            be in another format.
        format: the weight format; weights of another dtype are rounded to nearest even. None: bf16, or the
            format of the quantized weights.
        gate_up_bias: ``[num_experts, 2 * intermediate_size]`` in the row order of gate_up_proj, or None.
        down_bias: ``[num_experts, hidden_size]``, or None; it is weighted with the expert's output.
        activation: with g = gate row, u = up row (``u = 1`` if not gated)
            ``"silu"`` silu(g)·u; ``"gelu"`` (erf) and ``"gelu_tanh"`` gelu(g)·u; ``"relu"`` relu(g)·u;
            ``"relu2"`` relu(g)²·u; ``"swiglu_oai"`` (gpt-oss) g = min(g, limit), u = clamp(u, ±limit),
            (u + 1)·g·sigmoid(alpha·g); ``"silu_clamp_input"`` (DeepSeek-V4, GLM)
            silu(min(g, limit))·clamp(u, ±limit); ``"silu_clamp_output"`` (Step)
            min(silu(g), limit)·clamp(u, ±limit).
        gated: whether there are up rows.
        alpha: for ``"swiglu_oai"``; None: 1.702.
        limit: for the clamped activations; None: no limit.
        interleaved: rows of gate_up_proj alternate gate, up, gate, up (gpt-oss).
        transposed: the last two dimensions of both weights are swapped (gpt-oss).
        verify_placement: ask the kernel where the slices are and log what is wrong; if False, that is left to
            :meth:`PackedExperts.verify_placement`.

    Returns:
        The packed experts. The originals are not kept; free them when you like. Originals that are mapped
        from a file are taken out of memory and page cache, and read again should you use them.

    Raises:
        TypeError, ValueError: naming the argument that doesn't fit, what it was and what is accepted.
        MemoryError: if there is no room.
    """
    if isinstance(gate_up_proj, QuantizedWeight) or isinstance(down_proj, QuantizedWeight):
        if not (isinstance(gate_up_proj, QuantizedWeight) and isinstance(down_proj, QuantizedWeight)):
            raise TypeError("gate_up_proj and down_proj must both be quantized, or neither")
        for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            if format is not None and find_format(format).quantization != weight.quantization:
                raise ValueError(
                    f"{name} is in format {weight.format!r}, which can't be changed to {format!r}"
                )
        if transposed:
            raise ValueError(
                "transposed=True is for plain weights: codes have their scales along the last dimension"
            )
        format, down_format = gate_up_proj.format, down_proj.format
    else:
        down_format = None
        format = "bf16" if format is None else format
    swapped = " with the last two dimensions swapped" if transposed else ""
    rows_text = "2 * intermediate_size" if gated else "intermediate_size"
    if not isinstance(gate_up_proj, QuantizedWeight):
        _check_source("gate_up_proj", gate_up_proj, 3, f"[num_experts, {rows_text}, hidden_size]{swapped}")
    if not isinstance(down_proj, QuantizedWeight):
        _check_source("down_proj", down_proj, 3, f"[num_experts, hidden_size, intermediate_size]{swapped}")
    if transposed:
        assert isinstance(gate_up_proj, torch.Tensor) and isinstance(down_proj, torch.Tensor)
        gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
    num_experts, rows, hidden_size = gate_up_proj.shape
    intermediate_size = rows // 2 if gated else rows
    if gated and rows % 2:
        raise ValueError(f"gate_up_proj must have an even number of rows (gate and up), got {rows}")
    if interleaved and not gated:
        raise ValueError("interleaved=True needs gated=True: there is nothing to interleave")
    if down_proj.shape != (num_experts, hidden_size, intermediate_size):
        raise ValueError(
            f"down_proj must be [num_experts, hidden_size, intermediate_size] = "
            f"{[num_experts, hidden_size, intermediate_size]} to go with gate_up_proj, "
            f"got {list(down_proj.shape)}"
        )
    for name, bias, width in (("gate_up_bias", gate_up_bias, rows), ("down_bias", down_bias, hidden_size)):
        if bias is not None:
            _check_source(name, bias, 2, f"[{num_experts}, {width}]")
            if bias.shape != (num_experts, width):
                raise ValueError(f"{name} must be {[num_experts, width]}, got {list(bias.shape)}")
    packed = PackedExperts(
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        format=format,
        activation=activation,
        alpha=alpha,
        limit=limit,
        gated=gated,
        gate_up_bias=gate_up_bias is not None,
        down_bias=down_bias is not None,
        down_format=down_format,
    )
    packed._transposed = transposed
    packed._interleaved = interleaved
    with torch.no_grad():
        if isinstance(gate_up_proj, QuantizedWeight) and isinstance(down_proj, QuantizedWeight):
            _pack_quantized_rows(packed, gate_up_proj, gated, interleaved)
            packed.pack_quantized("down", 0, down_proj)
        else:
            assert isinstance(gate_up_proj, torch.Tensor) and isinstance(down_proj, torch.Tensor)
            packed._source_dtypes = (gate_up_proj.dtype, down_proj.dtype)
            gate, up = _gate_and_up(gate_up_proj.detach(), gated, interleaved)
            packed.pack_gate_up(0, gate, up)
            packed.pack_down(0, down_proj.detach())
        if gate_up_bias is not None:
            gate_bias, up_bias = _gate_and_up(gate_up_bias.detach(), gated, interleaved)
            packed.pack_gate_up_bias(gate_bias, up_bias)
            packed._bias_dtypes = (gate_up_bias.dtype, packed._bias_dtypes[1])
        if down_bias is not None:
            packed.pack_down_bias(down_bias.detach())
            packed._bias_dtypes = (packed._bias_dtypes[0], down_bias.dtype)
    # Of weights that are mapped from a checkpoint: their pages would push the next slices off the node.
    if isinstance(gate_up_proj, torch.Tensor) and isinstance(down_proj, torch.Tensor):
        page_out((gate_up_proj, down_proj))
    if verify_placement:
        packed.verify_placement()
    return packed
