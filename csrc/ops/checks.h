// What the ops accept, checked before any work starts. Every message names the argument, what it was
// and what is accepted.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "moe/expert_layout.h"

namespace numa_moe {

using torch::stable::Tensor;

[[noreturn]] void fail(const std::string& message);  // throws std::invalid_argument

std::string describe(const Tensor& tensor);  // "shape [2, 64], torch.float32, cpu"
std::string shape_text(const std::vector<int64_t>& shape);

void check_cpu(const char* argument, const Tensor& tensor);
void check_dimensions(const char* argument, const Tensor& tensor, int64_t dimensions, const char* accepted);
void check_shape(const char* argument, const Tensor& tensor, const std::vector<int64_t>& shape,
                 const char* accepted);
// float32, bfloat16 or float16.
DataType check_float_type(const char* argument, const Tensor& tensor);

// Reads the layout of a pair of packed tensors. hidden_size is what the packed tensors can't say: they
// hold it rounded up to the format's k group and to whole blocks. format: of codes, see
// kernels/quantization.h; without, the dtype tells. down_format: of down_proj, if it is another one.
ExpertLayout check_packed_pair(const Tensor& gate_up_proj, const Tensor& down_proj, int64_t hidden_size,
                               const std::optional<std::string>& format,
                               const std::optional<std::string>& down_format);

std::vector<int64_t> gate_up_shape(const ExpertLayout& layout);
std::vector<int64_t> down_shape(const ExpertLayout& layout);

// The packed tensors as the kernels see them; biases are checked against the layout.
PackedWeights check_packed_weights(const Tensor& gate_up_proj, const Tensor& down_proj,
                                   const std::optional<Tensor>& gate_up_bias,
                                   const std::optional<Tensor>& down_bias, int64_t hidden_size,
                                   const std::optional<std::string>& format,
                                   const std::optional<std::string>& down_format);

// One packed projection: its slices may lie apart, but each must be dense and 64-byte aligned rows don't
// matter. Returns the bytes between slices.
int64_t check_packed_strides(const char* argument, const Tensor& tensor);

WeightFormat check_packed_format(const char* argument, const Tensor& tensor);
void check_quantized(const char* argument, const Tensor& tensor);

}  // namespace numa_moe
