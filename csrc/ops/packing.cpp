// torch.ops.numa_moe.pack_* and unpack_*: checks, then one call into the packing jobs.
#include "moe/packing.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "moe/quantized_packing.h"
#include "ops/checks.h"
#include "ops/exit_guard.h"

namespace numa_moe {
namespace {

WeightView check_view(const char* argument, const Tensor& tensor, const char* accepted) {
  check_cpu(argument, tensor);
  check_dimensions(argument, tensor, 3, accepted);
  const DataType type = check_float_type(argument, tensor);
  return {tensor.data_ptr(), type,
          tensor.size(0),    tensor.size(1),
          tensor.size(2),    tensor.stride(0),
          tensor.stride(1),  tensor.stride(2)};
}

void check_expert_range(int64_t first_expert, int64_t count, int64_t num_experts) {
  if (first_expert < 0 || first_expert > num_experts - count) {
    fail("first_expert must leave room for " + std::to_string(count) + " experts in " +
         std::to_string(num_experts) + ", got " + std::to_string(first_expert));
  }
}

PackedProjection check_projection(const Tensor& packed, int64_t dimensions, ExpertLayout layout) {
  check_cpu("packed", packed);
  PackedProjection projection{layout,
                              {check_packed_format("packed", packed)},
                              static_cast<char*>(packed.data_ptr()),
                              check_packed_strides("packed", packed)};
  projection.layout.gate_up = projection.layout.down = projection.stored;
  projection.layout.num_slices = packed.size(0);
  projection.layout.num_experts = packed.size(1);
  if (packed.dim() != dimensions || packed.size(dimensions - 2) != kPanelWidth ||
      packed.size(dimensions - 1) != k_group(projection.stored.format)) {
    fail("packed must come from pack_experts, got " + describe(packed));
  }
  return projection;
}

struct GateUp {
  PackedProjection packed;
  WeightView gate;
  std::optional<WeightView> up;
  const WeightView* up_or_null() const { return up.has_value() ? &*up : nullptr; }
};

GateUp check_gate_up(const Tensor& packed, const Tensor& gate, const std::optional<Tensor>& up,
                     int64_t first_expert) {
  constexpr const char* kAccepted = "[n, intermediate_size, hidden_size]";
  GateUp checked{};
  checked.gate = check_view("gate", gate, kAccepted);
  if (up.has_value()) {
    checked.up = check_view("up", *up, kAccepted);
    check_shape("up", *up, {gate.size(0), gate.size(1), gate.size(2)}, "the shape of gate");
    if (checked.up->type != checked.gate.type) {
      fail("gate and up must have one dtype, got " + describe(gate) + " and " + describe(*up));
    }
  }
  check_dimensions("packed", packed, 7, "a packed gate_up_proj");
  ExpertLayout layout{};
  layout.hidden_size = gate.size(2);
  layout.intermediate_size = gate.size(1);
  layout.gated = up.has_value();
  checked.packed = check_projection(packed, 7, layout);
  const ExpertLayout& full = checked.packed.layout;
  const int64_t group = k_group(checked.packed.stored.format);
  check_shape("packed", packed,
              {full.num_slices, full.num_experts, full.gate_up_blocks_per_slice(),
               full.panels_per_gate_up_block(), (full.hidden_size + group - 1) / group, kPanelWidth, group},
              "for gate and up of this size");
  check_expert_range(first_expert, gate.size(0), full.num_experts);
  return checked;
}

struct Down {
  PackedProjection packed;
  WeightView down;
};

Down check_down(const Tensor& packed, const Tensor& down, int64_t first_expert) {
  Down checked{};
  checked.down = check_view("down", down, "[n, hidden_size, intermediate_size]");
  check_dimensions("packed", packed, 6, "a packed down_proj");
  ExpertLayout layout{};
  layout.hidden_size = down.size(1);
  layout.intermediate_size = down.size(2);
  checked.packed = check_projection(packed, 6, layout);
  const ExpertLayout& full = checked.packed.layout;
  const int64_t group = k_group(checked.packed.stored.format);
  check_shape("packed", packed,
              {full.num_slices, full.num_experts, full.down_blocks_per_slice(),
               (full.intermediate_size + group - 1) / group, kPanelWidth, group},
              "for down of this size");
  check_expert_range(first_expert, down.size(0), full.num_experts);
  return checked;
}

struct Quantized {
  PackedProjection packed;
  Projection projection;
  QuantizedMatrix matrix;
};

// null if the format has none.
void* check_scales(const char* argument, const std::optional<Tensor>& tensor, int64_t bytes,
                   const std::vector<int64_t>& shape) {
  if (tensor.has_value() != (bytes > 0)) {
    fail(std::string(argument) +
         (bytes > 0 ? " must be given: the format has them" : " must be None: the format has none"));
  }
  if (!tensor.has_value()) return nullptr;
  check_cpu(argument, *tensor);
  check_shape(argument, *tensor, shape, "for codes of this size and format");
  if (static_cast<int64_t>(tensor->element_size()) != bytes || !tensor->is_contiguous()) {
    fail(std::string(argument) + " must be contiguous, with elements of " + std::to_string(bytes) +
         " bytes, got " + describe(*tensor));
  }
  return tensor->data_ptr();
}

Quantized check_quantized_projection(const Tensor& packed, const std::string& format, int64_t projection,
                                     int64_t first_expert, const Tensor& codes, const Tensor& scales,
                                     const std::optional<Tensor>& offsets,
                                     const std::optional<Tensor>& outer_scales,
                                     const std::optional<Tensor>& outer_minima) {
  Quantized checked{};
  ExpertLayout& layout = checked.packed.layout;
  StoredWeights& stored = checked.packed.stored;
  parse_quantization(format, &stored.format, &stored.quantization);
  layout.gate_up = layout.down = stored;
  check_cpu("packed", packed);
  check_quantized("packed", packed);
  check_cpu("codes", codes);
  check_dimensions("codes", codes, 3, "[n, rows, columns]");
  if (codes.scalar_type() != torch::headeronly::ScalarType::Byte || !codes.is_contiguous()) {
    fail("codes must be contiguous uint8, got " + describe(codes));
  }
  const bool is_down = packed.dim() == 4;
  if (!is_down && packed.dim() != 5) fail("packed must come from pack_experts, got " + describe(packed));
  layout.num_slices = packed.size(0);
  layout.num_experts = packed.size(1);
  const int64_t rows = codes.size(1), columns = codes.size(2);
  if (rows < 1 || columns < 1 || layout.num_slices < 1) {
    fail("codes must have rows and columns, got " + describe(codes));
  }
  layout.hidden_size = is_down ? rows : columns;
  layout.intermediate_size = is_down ? columns : rows;
  layout.gated = !is_down && packed.size(3) == 2;
  check_shape("packed", packed, is_down ? down_shape(layout) : gate_up_shape(layout),
              "for codes of this size");
  checked.projection = {projection, is_down ? 1 : layout.panels_per_gate_up_block(),
                        is_down ? layout.hidden_blocks() : layout.intermediate_blocks()};
  if (projection < 0 || projection >= checked.projection.count) {
    fail("projection must be 0" + std::string(checked.projection.count == 2 ? " or 1" : "") + ", got " +
         std::to_string(projection));
  }
  check_expert_range(first_expert, codes.size(0), layout.num_experts);
  const Quantization& quantization = stored.quantization;
  const QuantizedPanel panel(stored.format, quantization, columns);
  const std::vector<int64_t> per_group{codes.size(0), rows, panel.groups};
  const std::vector<int64_t> per_outer_group{codes.size(0), rows, panel.outer_groups};
  const int64_t outer_bytes = scale_bytes(quantization.outer);
  checked.matrix = {
      codes.size(0),
      rows,
      columns,
      static_cast<uint8_t*>(codes.data_ptr()),
      static_cast<char*>(check_scales("scales", scales, scale_bytes(quantization.scale), per_group)),
      static_cast<uint8_t*>(
          check_scales("offsets", offsets, quantization.offset == Offset::kNone ? 0 : 1, per_group)),
      static_cast<char*>(check_scales("outer_scales", outer_scales, outer_bytes, per_outer_group)),
      static_cast<char*>(check_scales("outer_minima", outer_minima,
                                      quantization.offset == Offset::kMinimum ? outer_bytes : 0,
                                      per_outer_group)),
  };
  checked.packed.data = static_cast<char*>(packed.data_ptr());
  checked.packed.slice_stride = check_packed_strides("packed", packed);
  return checked;
}

void pack_quantized_op(Tensor packed, std::string format, int64_t projection, int64_t first_expert,
                       const Tensor& codes, const Tensor& scales, std::optional<Tensor> offsets,
                       std::optional<Tensor> outer_scales, std::optional<Tensor> outer_minima) {
  const ExitGuard exit_guard;
  const Quantized checked = check_quantized_projection(packed, format, projection, first_expert, codes,
                                                       scales, offsets, outer_scales, outer_minima);
  pack_quantized(*current_runtime(), checked.packed, checked.projection, first_expert, checked.matrix);
}

void unpack_quantized_op(const Tensor& packed, std::string format, int64_t projection, int64_t first_expert,
                         Tensor codes, Tensor scales, std::optional<Tensor> offsets,
                         std::optional<Tensor> outer_scales, std::optional<Tensor> outer_minima) {
  const ExitGuard exit_guard;
  const Quantized checked = check_quantized_projection(packed, format, projection, first_expert, codes,
                                                       scales, offsets, outer_scales, outer_minima);
  unpack_quantized(*current_runtime(), checked.packed, checked.projection, first_expert, checked.matrix);
}

void pack_gate_up_op(Tensor packed, const Tensor& gate, std::optional<Tensor> up, int64_t first_expert) {
  const ExitGuard exit_guard;
  const GateUp checked = check_gate_up(packed, gate, up, first_expert);
  pack_gate_up(*current_runtime(), checked.packed, first_expert, checked.gate, checked.up_or_null());
}

void pack_down_op(Tensor packed, const Tensor& down, int64_t first_expert) {
  const ExitGuard exit_guard;
  const Down checked = check_down(packed, down, first_expert);
  pack_down(*current_runtime(), checked.packed, first_expert, checked.down);
}

void unpack_gate_up_op(const Tensor& packed, Tensor gate, std::optional<Tensor> up, int64_t first_expert) {
  const ExitGuard exit_guard;
  const GateUp checked = check_gate_up(packed, gate, up, first_expert);
  unpack_gate_up(*current_runtime(), checked.packed, first_expert, checked.gate, checked.up_or_null());
}

void unpack_down_op(const Tensor& packed, Tensor down, int64_t first_expert) {
  const ExitGuard exit_guard;
  const Down checked = check_down(packed, down, first_expert);
  unpack_down(*current_runtime(), checked.packed, first_expert, checked.down);
}

}  // namespace
}  // namespace numa_moe

STABLE_TORCH_LIBRARY_IMPL(numa_moe, CPU, library) {
  library.impl("pack_gate_up", TORCH_BOX(&numa_moe::pack_gate_up_op));
  library.impl("pack_down", TORCH_BOX(&numa_moe::pack_down_op));
  library.impl("unpack_gate_up", TORCH_BOX(&numa_moe::unpack_gate_up_op));
  library.impl("unpack_down", TORCH_BOX(&numa_moe::unpack_down_op));
  library.impl("pack_quantized", TORCH_BOX(&numa_moe::pack_quantized_op));
  library.impl("unpack_quantized", TORCH_BOX(&numa_moe::unpack_quantized_op));
}
