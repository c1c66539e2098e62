#include "ops/checks.h"

#include <stdexcept>
#include <utility>
#include <vector>

namespace numa_moe {
namespace {

using torch::headeronly::ScalarType;

const char* type_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "torch.float32";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::Bool: return "torch.bool";
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    default: return "a dtype that no argument takes";
  }
}

std::vector<int64_t> shape_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

constexpr const char* kGateUpShape =
    "[num_slices, num_experts, blocks, 2 (gate, up) or 1, k of hidden_size, 16, k group]";
constexpr const char* kQuantizedGateUpShape =
    "[num_slices, num_experts, blocks, 2 (gate, up) or 1, bytes of a panel]";
constexpr const char* kQuantizedDownShape = "[num_slices, num_experts, blocks, bytes of a panel]";
constexpr const char* kDownShape = "[num_slices, num_experts, blocks, k of intermediate_size, 16, k group]";

}  // namespace

void fail(const std::string& message) { throw std::invalid_argument("numa_moe: " + message); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::string describe(const Tensor& tensor) {
  return "shape " + shape_text(shape_of(tensor)) + ", " + type_name(tensor.scalar_type()) +
         (tensor.is_cpu() ? ", cpu" : ", not on the cpu");
}

void check_cpu(const char* argument, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(std::string(argument) + " must be a CPU tensor, got " + describe(tensor));
  // A storage can be resized under its tensors, to nothing too (torch.UntypedStorage.resize_).
  if (tensor.numel() == 0) return;
  int64_t end = tensor.storage_offset() + 1;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    end += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  }
  const int64_t needed = end * static_cast<int64_t>(tensor.element_size());
  int64_t held = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &held));
  if (held < needed) {
    fail(std::string(argument) + " must have its memory, but its storage holds " + std::to_string(held) +
         " of " + std::to_string(needed) + " bytes (" + describe(tensor) + ")");
  }
}

void check_dimensions(const char* argument, const Tensor& tensor, int64_t dimensions, const char* accepted) {
  if (tensor.dim() != dimensions) {
    fail(std::string(argument) + " must be " + accepted + ", got " + describe(tensor));
  }
}

void check_shape(const char* argument, const Tensor& tensor, const std::vector<int64_t>& shape,
                 const char* accepted) {
  if (shape_of(tensor) != shape) {
    fail(std::string(argument) + " must have shape " + shape_text(shape) + " (" + accepted + "), got " +
         describe(tensor));
  }
}

DataType check_float_type(const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DataType::kFloat32;
    case ScalarType::BFloat16: return DataType::kBfloat16;
    case ScalarType::Half: return DataType::kFloat16;
    default: fail(std::string(argument) + " must be float32, bfloat16 or float16, got " + describe(tensor));
  }
}

WeightFormat check_packed_format(const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return WeightFormat::kFloat32;
    case ScalarType::BFloat16: return WeightFormat::kBfloat16;
    case ScalarType::Half: return WeightFormat::kFloat16;
    default:
      fail(std::string(argument) +
           " must be packed by pack_experts (float32, bfloat16 or float16; uint8 needs format), got " +
           describe(tensor));
  }
}

int64_t check_packed_strides(const char* argument, const Tensor& tensor) {
  int64_t expected = 1;
  for (int64_t dimension = tensor.dim() - 1; dimension > 0; --dimension) {
    if (tensor.size(dimension) != 1 && tensor.stride(dimension) != expected) {
      fail(std::string(argument) + " must be dense within each slice, got stride " +
           std::to_string(tensor.stride(dimension)) + " in dimension " + std::to_string(dimension) +
           " where " + std::to_string(expected) + " is needed (" + describe(tensor) + ")");
    }
    expected *= tensor.size(dimension);
  }
  if (tensor.size(0) > 1 && tensor.stride(0) < expected) {
    fail(std::string(argument) + " has overlapping slices (" + describe(tensor) + ")");
  }
  return (tensor.size(0) > 1 ? tensor.stride(0) : expected) * static_cast<int64_t>(tensor.element_size());
}

namespace {

// The dimensions of one panel of k.
std::vector<int64_t> panel_shape(const StoredWeights& weights, int64_t k) {
  if (is_quantized(weights.format)) return {weights.panel_bytes(k)};
  const int64_t group = k_group(weights.format);
  return {(k + group - 1) / group, kPanelWidth, group};
}

std::vector<int64_t> concatenate(std::vector<int64_t> first, const std::vector<int64_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The k that a panel was packed for, rounded up to the format's k group; 0 if there is none. More k never
// take fewer bytes: a k group alone is a cache line or more.
int64_t k_of_panel(const StoredWeights& weights, const Tensor& tensor, int64_t dimension) {
  const int64_t group = k_group(weights.format);
  if (!is_quantized(weights.format)) return tensor.size(dimension) * group;
  const int64_t bytes = tensor.size(dimension);
  int64_t low = 0, high = bytes / group_bytes(weights.format);
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (weights.panel_bytes(middle * group) <= bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const bool exact = low > 0 && weights.panel_bytes(low * group) == bytes;
  return exact ? low * group : 0;
}

}  // namespace

void check_quantized(const char* argument, const Tensor& tensor) {
  if (tensor.scalar_type() != ScalarType::Byte) {
    fail(std::string(argument) + " must be packed by pack_experts in the format that is given (uint8), got " +
         describe(tensor));
  }
}

std::vector<int64_t> gate_up_shape(const ExpertLayout& layout) {
  return concatenate({layout.num_slices, layout.num_experts, layout.gate_up_blocks_per_slice(),
                      layout.panels_per_gate_up_block()},
                     panel_shape(layout.gate_up, layout.hidden_size));
}

std::vector<int64_t> down_shape(const ExpertLayout& layout) {
  return concatenate({layout.num_slices, layout.num_experts, layout.down_blocks_per_slice()},
                     panel_shape(layout.down, layout.intermediate_size));
}

ExpertLayout check_packed_pair(const Tensor& gate_up_proj, const Tensor& down_proj, int64_t hidden_size,
                               const std::optional<std::string>& format,
                               const std::optional<std::string>& down_format) {
  check_cpu("gate_up_proj", gate_up_proj);
  check_cpu("down_proj", down_proj);
  ExpertLayout layout{};
  if (format.has_value()) {
    parse_quantization(*format, &layout.gate_up.format, &layout.gate_up.quantization);
    parse_quantization(down_format.value_or(*format), &layout.down.format, &layout.down.quantization);
    check_quantized("gate_up_proj", gate_up_proj);
    check_quantized("down_proj", down_proj);
    check_dimensions("gate_up_proj", gate_up_proj, 5, kQuantizedGateUpShape);
    check_dimensions("down_proj", down_proj, 4, kQuantizedDownShape);
  } else {
    check_dimensions("gate_up_proj", gate_up_proj, 7, kGateUpShape);
    check_dimensions("down_proj", down_proj, 6, kDownShape);
    if (down_format.has_value()) fail("down_format must be None where format is");
    layout.gate_up.format = check_packed_format("gate_up_proj", gate_up_proj);
    layout.down.format = layout.gate_up.format;
    if (check_packed_format("down_proj", down_proj) != layout.down.format) {
      fail("gate_up_proj and down_proj must be packed in one format, got " + describe(gate_up_proj) +
           " and " + describe(down_proj));
    }
  }
  layout.num_slices = gate_up_proj.size(0);
  layout.num_experts = gate_up_proj.size(1);
  layout.hidden_size = hidden_size;
  layout.intermediate_size = k_of_panel(layout.down, down_proj, 3);
  layout.gated = gate_up_proj.size(3) == 2;
  if (layout.num_slices < 1 || layout.num_experts < 1 || layout.intermediate_size < 1 ||
      (gate_up_proj.size(3) != 1 && gate_up_proj.size(3) != 2)) {
    fail(std::string("gate_up_proj must be ") + (format.has_value() ? kQuantizedGateUpShape : kGateUpShape) +
         " and down_proj " + (format.has_value() ? kQuantizedDownShape : kDownShape) + ", got " +
         describe(gate_up_proj) + " and " + describe(down_proj));
  }
  if (gate_up_proj.size(4) != panel_shape(layout.gate_up, hidden_size)[0]) {
    fail("hidden_states has hidden_size " + std::to_string(hidden_size) +
         ", but gate_up_proj was packed for " + std::to_string(k_of_panel(layout.gate_up, gate_up_proj, 4)) +
         " (" + describe(gate_up_proj) + ")");
  }
  check_shape("gate_up_proj", gate_up_proj, gate_up_shape(layout),
              "to go with down_proj's intermediate_size");
  check_shape("down_proj", down_proj, down_shape(layout), "to go with gate_up_proj and hidden_size");
  return layout;
}

PackedWeights check_packed_weights(const Tensor& gate_up_proj, const Tensor& down_proj,
                                   const std::optional<Tensor>& gate_up_bias,
                                   const std::optional<Tensor>& down_bias, int64_t hidden_size,
                                   const std::optional<std::string>& format,
                                   const std::optional<std::string>& down_format) {
  PackedWeights weights{};
  weights.layout = check_packed_pair(gate_up_proj, down_proj, hidden_size, format, down_format);
  const ExpertLayout& layout = weights.layout;
  weights.gate_up = static_cast<const char*>(gate_up_proj.data_ptr());
  weights.gate_up_slice_stride = check_packed_strides("gate_up_proj", gate_up_proj);
  weights.down = static_cast<const char*>(down_proj.data_ptr());
  weights.down_slice_stride = check_packed_strides("down_proj", down_proj);
  const auto bias_pointer = [](const char* argument, const Tensor& bias, const std::vector<int64_t>& shape) {
    check_cpu(argument, bias);
    check_shape(argument, bias, shape, "packed by pack_experts");
    if (bias.scalar_type() != ScalarType::Float || !bias.is_contiguous()) {
      fail(std::string(argument) + " must be contiguous float32, got " + describe(bias));
    }
    return static_cast<const float*>(bias.data_ptr());
  };
  if (gate_up_bias.has_value()) {
    weights.gate_up_bias =
        bias_pointer("gate_up_bias", *gate_up_bias,
                     {layout.num_slices, layout.num_experts, layout.gate_up_blocks_per_slice(),
                      layout.panels_per_gate_up_block(), kPanelWidth});
  }
  if (down_bias.has_value()) {
    weights.down_bias =
        bias_pointer("down_bias", *down_bias,
                     {layout.num_slices, layout.num_experts, layout.down_blocks_per_slice(), kPanelWidth});
  }
  return weights;
}

}  // namespace numa_moe
