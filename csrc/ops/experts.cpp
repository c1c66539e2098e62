// torch.ops.numa_moe.experts on CPU tensors: checks, then one call into the FFN.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "moe/experts_ffn.h"
#include "ops/checks.h"
#include "ops/exit_guard.h"

namespace numa_moe {
namespace {

using torch::headeronly::ScalarType;

// gpt-oss's constant, the approximation of gelu by a sigmoid (Hendrycks and Gimpel, 2016).
constexpr double kDefaultAlpha = 1.702;

IndexType check_index_type(const Tensor& topk_ids) {
  switch (topk_ids.scalar_type()) {
    case ScalarType::Int: return IndexType::kInt32;
    case ScalarType::Long: return IndexType::kInt64;
    default: fail("topk_ids must be int32 or int64, got " + describe(topk_ids));
  }
}

ActivationSpec check_activation(const std::string& name, std::optional<double> alpha,
                                std::optional<double> limit) {
  ActivationSpec spec{};
  if (!parse_activation(name, &spec.activation)) {
    std::string accepted;
    for (const std::string& known : activation_names()) accepted += (accepted.empty() ? "" : ", ") + known;
    fail("activation must be one of " + accepted + ", got \"" + name + "\"");
  }
  spec.alpha = static_cast<float>(alpha.value_or(kDefaultAlpha));
  spec.limit = limit.has_value() ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity();
  if (!(spec.limit > 0)) fail("limit must be > 0, got " + std::to_string(spec.limit));
  return spec;
}

bool needs_up(Activation activation) {
  return activation == Activation::kSwigluOai || activation == Activation::kSiluClampInput ||
         activation == Activation::kSiluClampOutput;
}

Tensor experts(const Tensor& hidden_states, const Tensor& topk_ids, const Tensor& topk_weights,
               const Tensor& gate_up_proj, const Tensor& down_proj, std::optional<Tensor> gate_up_bias,
               std::optional<Tensor> down_bias, std::string activation, std::optional<double> alpha,
               std::optional<double> limit, std::optional<std::string> format,
               std::optional<int64_t> intermediate_size, std::optional<std::string> down_format) {
  const ExitGuard exit_guard;
  check_cpu("hidden_states", hidden_states);
  check_dimensions("hidden_states", hidden_states, 2, "[num_tokens, hidden_size]");
  const DataType hidden_type = check_float_type("hidden_states", hidden_states);
  const int64_t num_tokens = hidden_states.size(0);
  const int64_t hidden_size = hidden_states.size(1);
  if (hidden_size < 1) fail("hidden_states must have hidden_size >= 1, got " + describe(hidden_states));
  check_cpu("topk_ids", topk_ids);
  check_cpu("topk_weights", topk_weights);
  check_dimensions("topk_ids", topk_ids, 2, "[num_tokens, top_k]");
  check_shape("topk_ids", topk_ids, {num_tokens, topk_ids.size(1)}, "[num_tokens, top_k]");
  check_shape("topk_weights", topk_weights, {num_tokens, topk_ids.size(1)}, "the shape of topk_ids");
  const IndexType index_type = check_index_type(topk_ids);
  const DataType weights_type = check_float_type("topk_weights", topk_weights);
  const PackedWeights weights = check_packed_weights(gate_up_proj, down_proj, gate_up_bias, down_bias,
                                                     hidden_size, format, down_format);
  const int64_t group = k_group(weights.layout.down.format);
  const int64_t channels = intermediate_size.value_or(weights.layout.intermediate_size);
  if (channels > weights.layout.intermediate_size || channels <= weights.layout.intermediate_size - group) {
    fail("intermediate_size must be above " + std::to_string(weights.layout.intermediate_size - group) +
         " and up to " + std::to_string(weights.layout.intermediate_size) +
         ", what down_proj was packed for, got " + std::to_string(channels));
  }
  const ActivationSpec spec = check_activation(activation, alpha, limit);
  if (needs_up(spec.activation) && !weights.layout.gated) {
    fail("activation \"" + activation +
         "\" multiplies gate and up, but gate_up_proj was packed without a gate");
  }

  const Tensor hidden = torch::stable::contiguous(hidden_states);
  const Tensor ids = torch::stable::contiguous(topk_ids);
  const Tensor scales = torch::stable::contiguous(topk_weights);
  Tensor output = torch::stable::new_empty(hidden, {num_tokens, hidden_size});
  if (num_tokens == 0) return output;

  FfnArgs args{};
  args.hidden_states = hidden.const_data_ptr();
  args.hidden_states_type = hidden_type;
  args.top_k = {ids.const_data_ptr(), index_type, scales.const_data_ptr(),
                weights_type,         num_tokens, ids.size(1)};
  args.activation = spec;
  args.num_channels = channels;
  args.weights = weights;
  args.weights_owner = std::make_shared<const std::array<std::optional<Tensor>, 4>>(
      std::array<std::optional<Tensor>, 4>{gate_up_proj, down_proj, gate_up_bias, down_bias});
  args.output = output.mutable_data_ptr();

  const int64_t negative = first_negative_id(args.top_k);
  if (negative >= 0) {
    fail("topk_ids must be >= 0, got " + std::to_string(id_at(args.top_k, negative)) + " at [" +
         std::to_string(negative / ids.size(1)) + ", " + std::to_string(negative % ids.size(1)) +
         "] (ids >= num_experts = " + std::to_string(weights.layout.num_experts) +
         " mark experts that live elsewhere)");
  }
  run_experts_ffn(*current_runtime(), args);
  return output;
}

}  // namespace
}  // namespace numa_moe

STABLE_TORCH_LIBRARY_IMPL(numa_moe, CPU, library) { library.impl("experts", TORCH_BOX(&numa_moe::experts)); }
