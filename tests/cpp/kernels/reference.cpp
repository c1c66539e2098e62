#include "kernels/reference.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace numa_moe::test {
namespace {

// A binary float of 1 + exponent_bits + mantissa_bits bits.
double float_value(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.0 : 1.0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1u << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign *
         std::ldexp((1u << mantissa_bits) + mantissa, static_cast<int>(exponent) - bias - mantissa_bits);
}

// Positive floats are ordered like their bits, so the nearest one is found by bisection.
uint16_t nearest(double value, int exponent_bits, int mantissa_bits) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | 1);
  uint32_t below = 0;  // the largest float <= magnitude
  for (uint32_t step = 1u << 14; step > 0; step /= 2) {
    if (below + step <= infinity && float_value(below + step, exponent_bits, mantissa_bits) <= magnitude) {
      below += step;
    }
  }
  if (below == infinity) return static_cast<uint16_t>(sign | infinity);
  const double low = float_value(below, exponent_bits, mantissa_bits);
  // Above the largest finite float the next one would be a power of two, had the exponent room.
  const double high = below + 1 == infinity ? std::ldexp(1.0, 1 << (exponent_bits - 1))
                                            : float_value(below + 1, exponent_bits, mantissa_bits);
  const double to_low = magnitude - low, to_high = high - magnitude;
  const bool up = to_high < to_low || (to_high == to_low && below % 2 == 1);
  return static_cast<uint16_t>(sign | (below + (up ? 1 : 0)));
}

}  // namespace

std::string format_name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBfloat16: return "bf16";
    case WeightFormat::kFloat16: return "fp16";
    case WeightFormat::kFloat32: return "fp32";
    case WeightFormat::kInt8: return "int8";
    case WeightFormat::kFloat8: return "fp8";
    case WeightFormat::kFourBit: return "four bits";
  }
  throw std::invalid_argument("format");
}

std::vector<const KernelTable*> tables(WeightFormat format) {
  std::vector<const KernelTable*> result;
  for (const InstructionSet instruction_set : supported_instruction_sets()) {
    const KernelTable* table = &kernel_table(format, instruction_set);
    if (result.empty() || result.back() != table) result.push_back(table);
  }
  return result;
}

std::string table_name(const KernelTable& table) {
  return format_name(table.format) + " on " + instruction_set_name(table.instruction_set);
}

double bfloat16_value(uint16_t bits) { return float_value(bits, 8, 7); }
double float16_value(uint16_t bits) { return float_value(bits, 5, 10); }
bool bfloat16_is_nan(uint16_t bits) { return (bits & 0x7fff) > 0x7f80; }
bool float16_is_nan(uint16_t bits) { return (bits & 0x7fff) > 0x7c00; }
uint16_t nearest_bfloat16(double value) { return nearest(value, 8, 7); }
uint16_t nearest_float16(double value) { return nearest(value, 5, 10); }

float round_to_weight(WeightFormat format, float value) {
  switch (format) {
    case WeightFormat::kBfloat16: return static_cast<float>(bfloat16_value(nearest_bfloat16(value)));
    case WeightFormat::kFloat16: return static_cast<float>(float16_value(nearest_float16(value)));
    case WeightFormat::kFloat32: return value;
    default: break;
  }
  throw std::invalid_argument("format");
}

float round_to_activation(WeightFormat format, float value) {
  return format == WeightFormat::kBfloat16 ? round_to_weight(format, value) : value;
}

double ulp_error(float got, double exact) {
  if (std::isnan(exact)) return std::isnan(got) ? 0 : std::numeric_limits<double>::infinity();
  // From half a unit above the largest float on, infinity is the nearest.
  const auto nearest_float = static_cast<float>(exact);
  if (std::isinf(nearest_float) || std::isinf(got)) {
    return got == nearest_float ? 0 : std::numeric_limits<double>::infinity();
  }
  int exponent = -126;
  if (exact != 0) exponent = std::max(exponent, std::ilogb(exact));
  return std::fabs(got - exact) / std::ldexp(1.0, exponent - 23);
}

Problem random_problem(WeightFormat format, int64_t rows, int64_t k, int64_t panels, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Problem problem{format, rows, k, panels * kPanelWidth, {}, {}};
  for (int64_t i = 0; i < rows * k; ++i) problem.x.push_back(round_to_activation(format, normal(random)));
  for (int64_t i = 0; i < problem.columns * k; ++i) {
    problem.weights.push_back(round_to_weight(format, normal(random)));
  }
  return problem;
}

int64_t padded_k(const Problem& problem) {
  const int64_t group = problem.format == WeightFormat::kBfloat16 ? 2 : 1;
  return (problem.k + group - 1) / group * group;
}

int64_t panel_bytes(const Problem& problem) {
  return padded_k(problem) * kPanelWidth * (problem.format == WeightFormat::kFloat32 ? 4 : 2);
}

void pack_weights(const Problem& problem, int64_t panel_stride, void* panels) {
  for (int64_t column = 0; column < problem.columns; ++column) {
    char* panel = static_cast<char*>(panels) + column / kPanelWidth * panel_stride;
    const int64_t lane = column % kPanelWidth;
    for (int64_t k = 0; k < padded_k(problem); ++k) {
      const float weight =
          k < problem.k ? problem.weights[static_cast<size_t>(column * problem.k + k)] : 0.0f;
      if (problem.format == WeightFormat::kFloat32) {
        std::memcpy(panel + (k * kPanelWidth + lane) * 4, &weight, 4);
      } else if (problem.format == WeightFormat::kFloat16) {
        const uint16_t bits = nearest_float16(weight);
        std::memcpy(panel + (k * kPanelWidth + lane) * 2, &bits, 2);
      } else {
        const uint16_t bits = nearest_bfloat16(weight);
        std::memcpy(panel + ((k / 2 * kPanelWidth + lane) * 2 + k % 2) * 2, &bits, 2);
      }
    }
  }
}

void stage_rows(const KernelTable& table, const Problem& problem, int64_t x_stride, void* x) {
  for (int64_t row = 0; row < problem.rows; ++row) {
    table.stage_row(problem.x.data() + row * problem.k, DataType::kFloat32, problem.k, padded_k(problem),
                    static_cast<char*>(x) + row * x_stride * table.activation_bytes);
  }
}

DoubleProduct double_product(const Problem& problem) {
  DoubleProduct result;
  for (int64_t row = 0; row < problem.rows; ++row) {
    for (int64_t column = 0; column < problem.columns; ++column) {
      double value = 0, magnitude = 0;
      for (int64_t k = 0; k < problem.k; ++k) {
        const double product = double{problem.x[static_cast<size_t>(row * problem.k + k)]} *
                               double{problem.weights[static_cast<size_t>(column * problem.k + k)]};
        value += product;
        magnitude += std::fabs(product);
      }
      result.value.push_back(value);
      result.magnitude.push_back(magnitude);
    }
  }
  return result;
}

std::vector<float> ascending_product(const Problem& problem) {
  std::vector<float> result;
  for (int64_t row = 0; row < problem.rows; ++row) {
    for (int64_t column = 0; column < problem.columns; ++column) {
      float sum = 0;
      for (int64_t k = 0; k < problem.k; ++k) {
        sum = std::fma(problem.x[static_cast<size_t>(row * problem.k + k)],
                       problem.weights[static_cast<size_t>(column * problem.k + k)], sum);
      }
      result.push_back(sum);
    }
  }
  return result;
}

}  // namespace numa_moe::test
