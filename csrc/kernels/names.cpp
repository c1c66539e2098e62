// Names and sizes of what kernels.h enumerates.
#include <stdexcept>

#include "kernels/kernels.h"

namespace numa_moe {
namespace {

template <typename T>
struct Name {
  T value;
  const char* name;
};

constexpr Name<InstructionSet> kInstructionSetNames[] = {
    {InstructionSet::kPortable, "portable"}, {InstructionSet::kNeon, "neon"},
    {InstructionSet::kNeonBf16, "neonbf16"}, {InstructionSet::kAvx2, "avx2"},
    {InstructionSet::kAvx512, "avx512"},     {InstructionSet::kAvx512Bf16, "avx512bf16"},
    {InstructionSet::kAmx, "amx"},
};

constexpr Name<Activation> kActivationNames[] = {
    {Activation::kSilu, "silu"},
    {Activation::kGelu, "gelu"},
    {Activation::kGeluTanh, "gelu_tanh"},
    {Activation::kRelu, "relu"},
    {Activation::kReluSquared, "relu2"},
    {Activation::kSwigluOai, "swiglu_oai"},
    {Activation::kSiluClampInput, "silu_clamp_input"},
    {Activation::kSiluClampOutput, "silu_clamp_output"},
};

template <typename T, size_t kCount>
const char* find_name(const Name<T> (&names)[kCount], T value) {
  for (const auto& entry : names) {
    if (entry.value == value) return entry.name;
  }
  return "unknown";
}

template <typename T, size_t kCount>
bool find_value(const Name<T> (&names)[kCount], const std::string& name, T* result) {
  for (const auto& entry : names) {
    if (name == entry.name) {
      *result = entry.value;
      return true;
    }
  }
  return false;
}

}  // namespace

const char* instruction_set_name(InstructionSet instruction_set) {
  return find_name(kInstructionSetNames, instruction_set);
}

bool parse_instruction_set(const std::string& name, InstructionSet* result) {
  return find_value(kInstructionSetNames, name, result);
}

const char* activation_name(Activation activation) { return find_name(kActivationNames, activation); }

bool parse_activation(const std::string& name, Activation* result) {
  return find_value(kActivationNames, name, result);
}

std::vector<std::string> activation_names() {
  std::vector<std::string> result;
  for (const auto& entry : kActivationNames) result.emplace_back(entry.name);
  return result;
}

int k_group(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBfloat16: return 2;
    case WeightFormat::kFloat16:
    case WeightFormat::kFloat32: return 1;
    case WeightFormat::kInt8:
    case WeightFormat::kFloat8:
    case WeightFormat::kFourBit: return 8;
  }
  throw std::invalid_argument("unknown weight format");
}

int group_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBfloat16:
    case WeightFormat::kFloat32:
    case WeightFormat::kFourBit: return kPanelWidth * 4;
    case WeightFormat::kFloat16: return kPanelWidth * 2;
    case WeightFormat::kInt8:
    case WeightFormat::kFloat8: return kPanelWidth * 8;
  }
  throw std::invalid_argument("unknown weight format");
}

bool is_quantized(WeightFormat format) {
  return format == WeightFormat::kInt8 || format == WeightFormat::kFloat8 || format == WeightFormat::kFourBit;
}

int data_type_bytes(DataType type) {
  switch (type) {
    case DataType::kBfloat16:
    case DataType::kFloat16: return 2;
    case DataType::kFloat32: return 4;
  }
  throw std::invalid_argument("unknown data type");
}

}  // namespace numa_moe
