#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference.h"

namespace numa_moe::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr Activation kActivations[] = {Activation::kSilu,           Activation::kGelu,
                                       Activation::kGeluTanh,       Activation::kRelu,
                                       Activation::kReluSquared,    Activation::kSwigluOai,
                                       Activation::kSiluClampInput, Activation::kSiluClampOutput};

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

double gelu_tanh_argument(double g) { return 2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g); }

// By the definitions in kernels.h, in double precision.
double exact_gate(Activation activation, double g, double alpha, double limit) {
  switch (activation) {
    case Activation::kSilu: return g * sigmoid(g);
    case Activation::kGelu: return g * std::erfc(-g / std::sqrt(2.0)) / 2;
    case Activation::kGeluTanh: return g * sigmoid(gelu_tanh_argument(g));
    case Activation::kRelu: return std::max(g, 0.0);
    case Activation::kReluSquared: return std::max(g, 0.0) * std::max(g, 0.0);
    case Activation::kSwigluOai: return std::min(g, limit) * sigmoid(alpha * std::min(g, limit));
    case Activation::kSiluClampInput: return std::min(g, limit) * sigmoid(std::min(g, limit));
    case Activation::kSiluClampOutput: return std::min(g * sigmoid(g), limit);
  }
  return kNan;
}

double exact_up(Activation activation, double u, double limit) {
  const double clamped = std::min(std::max(u, -limit), limit);
  switch (activation) {
    case Activation::kSwigluOai: return clamped + 1;
    case Activation::kSiluClampInput:
    case Activation::kSiluClampOutput: return clamped;
    default: return u;
  }
}

// The bound that kernels.h gives.
double allowed_error(Activation activation, float g, float alpha, double exact) {
  double argument = 0;
  if (activation == Activation::kGeluTanh) argument = gelu_tanh_argument(g);
  if (activation == Activation::kSwigluOai) argument = double{alpha} * g;
  const double units = (activation == Activation::kGelu ? 7 : 4) + 2.5 * std::fabs(std::min(argument, 0.0));
  const double unit = std::ldexp(1.0, std::max(-126, exact == 0 ? -126 : std::ilogb(exact)) - 23);
  return units * unit + std::fabs(g) * 0x1p-149;
}

// activate() on columns of gates, and of ups if there are any; fp32 activations only.
std::vector<float> activate(const KernelTable& table, Activation activation, const std::vector<float>& gates,
                            const std::vector<float>& ups, float alpha, float limit) {
  const auto blocks = static_cast<int64_t>(gates.size()) / kPanelWidth;
  const bool gated = !ups.empty();
  std::vector<float> gate_up, out(gates.size());
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kPanelWidth;
    gate_up.insert(gate_up.end(), gates.begin() + first, gates.begin() + first + kPanelWidth);
    if (gated) gate_up.insert(gate_up.end(), ups.begin() + first, ups.begin() + first + kPanelWidth);
  }
  table.activate({activation, gated, alpha, limit, gate_up.data(), static_cast<int64_t>(gate_up.size()),
                  nullptr, 1, blocks, out.data(), static_cast<int64_t>(out.size())});
  return out;
}

// Floats of all exponents and signs, those of interest more densely.
std::vector<float> gates_of_all_sizes() {
  std::vector<float> gates;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 90001) {
    const auto gate = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isfinite(gate)) gates.push_back(gate);
  }
  for (float gate = -110.0f; gate < 20.0f; gate += 0.00317f) gates.push_back(gate);
  while (gates.size() % kPanelWidth != 0) gates.push_back(0.0f);
  return gates;
}

class ActivationTest : public testing::TestWithParam<Activation> {};

TEST_P(ActivationTest, IsTheFunctionWithinTheStatedError) {
  const std::vector<float> gates = gates_of_all_sizes();
  for (const KernelTable* table : tables(WeightFormat::kFloat32)) {
    SCOPED_TRACE(table_name(*table));
    for (const auto& [alpha, limit] : {std::pair{1.702f, 7.0f}, {0.01f, 1e30f}, {1.0f, kInfinity}}) {
      const std::vector<float> out = activate(*table, GetParam(), gates, {}, alpha, limit);
      for (size_t i = 0; i < gates.size(); ++i) {
        double exact = exact_gate(GetParam(), gates[i], alpha, limit);
        if (std::isnan(exact)) exact = gates[i] < 0 ? 0.0 : gates[i];  // the double reference overflowed
        if (std::isinf(static_cast<float>(exact)) || std::isinf(out[i])) {
          ASSERT_EQ(out[i], static_cast<float>(exact)) << "at " << gates[i];
        } else {
          ASSERT_NEAR(out[i], exact, allowed_error(GetParam(), gates[i], alpha, exact))
              << "at " << gates[i] << ", alpha " << alpha << ", limit " << limit;
        }
      }
    }
  }
}

TEST_P(ActivationTest, HasTheSameBitsOnEveryInstructionSet) {
  const std::vector<float> gates = gates_of_all_sizes();
  std::vector<float> ups(gates.rbegin(), gates.rend());
  const auto expected = activate(kernel_table(WeightFormat::kFloat32, InstructionSet::kPortable), GetParam(),
                                 gates, ups, 1.702f, 7.0f);
  for (const KernelTable* table : tables(WeightFormat::kFloat32)) {
    SCOPED_TRACE(table_name(*table));
    const std::vector<float> out = activate(*table, GetParam(), gates, ups, 1.702f, 7.0f);
    for (size_t i = 0; i < out.size(); ++i) {
      if (std::isnan(expected[i])) {
        ASSERT_TRUE(std::isnan(out[i]));
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected[i]))
            << "gate " << gates[i] << ", up " << ups[i];
      }
    }
  }
}

TEST_P(ActivationTest, SpecialValues) {
  const std::vector<float> gates = {-kInfinity, kInfinity, kNan, -0.0f, 0.0f, -1e30f, 1e30f, -200.0f,
                                    200.0f,     -kNan,     1.0f, -1.0f, 2.0f, -2.0f,  3.0f,  -3.0f};
  for (const KernelTable* table : tables(WeightFormat::kFloat32)) {
    SCOPED_TRACE(table_name(*table));
    const auto out = activate(*table, GetParam(), gates, {}, 1.702f, 7.0f);
    const bool clamps = GetParam() == Activation::kSwigluOai || GetParam() == Activation::kSiluClampInput ||
                        GetParam() == Activation::kSiluClampOutput;
    EXPECT_EQ(out[0], 0.0f);  // the limit, not infinity * 0
    EXPECT_EQ(out[1],
              clamps ? static_cast<float>(exact_gate(GetParam(), kInfinity, 1.702f, 7.0)) : kInfinity);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], 0.0f);
    EXPECT_EQ(out[4], 0.0f);
    EXPECT_EQ(out[5], 0.0f);
    EXPECT_EQ(out[7], 0.0f);
    EXPECT_TRUE(std::isnan(out[9]));
    for (const size_t i : {6, 8}) {
      const double exact = exact_gate(GetParam(), gates[i], 1.702f, 7.0);
      if (std::isinf(static_cast<float>(exact))) {
        EXPECT_EQ(out[i], kInfinity) << gates[i];
      } else {
        EXPECT_NEAR(out[i], exact, 1e-6 * exact) << gates[i];
      }
    }
  }
}

TEST_P(ActivationTest, UpIsClampedAsDefinedAndNanPasses) {
  const std::vector<float> gates(32, 1.5f);
  std::vector<float> ups;
  for (int i = 0; i < 32; ++i) ups.push_back(static_cast<float>(i) - 15.5f);
  ups[0] = -kInfinity;
  ups[1] = kInfinity;
  ups[2] = kNan;
  for (const KernelTable* table : tables(WeightFormat::kFloat32)) {
    SCOPED_TRACE(table_name(*table));
    const auto out = activate(*table, GetParam(), gates, ups, 1.702f, 7.0f);
    const double gate = exact_gate(GetParam(), 1.5, 1.702f, 7.0);
    for (size_t i = 0; i < ups.size(); ++i) {
      if (std::isnan(ups[i])) {
        EXPECT_TRUE(std::isnan(out[i]));
        continue;
      }
      const double exact = gate * exact_up(GetParam(), ups[i], 7.0);
      if (std::isinf(exact)) {
        EXPECT_EQ(out[i], exact);
      } else {
        EXPECT_NEAR(out[i], exact, 2e-6 * std::fabs(exact)) << ups[i];
      }
    }
  }
}

// Rows, blocks, strides and bias, on all formats: what is kept of h is rounded to bf16 in the bf16 format.
TEST_P(ActivationTest, FindsItsColumnsAndWritesOnlyThem) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const WeightFormat format : kFormats) {
    for (const KernelTable* table : tables(format)) {
      for (const bool gated : {true, false}) {
        for (const bool with_bias : {true, false}) {
          SCOPED_TRACE(table_name(*table) + (gated ? ", gated" : "") + (with_bias ? ", bias" : ""));
          const int64_t rows = 3, blocks = 5, width = gated ? 2 * kPanelWidth : kPanelWidth;
          const int64_t in_stride = blocks * width + 7, out_stride = blocks * kPanelWidth + 3;
          const float alpha = 1.3f, limit = 1.1f;
          std::vector<float> gate_up(static_cast<size_t>(rows * in_stride));
          std::vector<float> bias(static_cast<size_t>(blocks * width));
          for (float& value : gate_up) value = normal(random);
          for (float& value : bias) value = with_bias ? normal(random) : 0.0f;
          std::vector<char> out(static_cast<size_t>(rows * out_stride * table->activation_bytes), 0x55);
          table->activate({GetParam(), gated, alpha, limit, gate_up.data(), in_stride,
                           with_bias ? bias.data() : nullptr, rows, blocks, out.data(), out_stride});
          for (int64_t i = 0; i < rows * out_stride; ++i) {
            const int64_t row = i / out_stride, column = i % out_stride;
            const char* at = out.data() + i * table->activation_bytes;
            if (column >= blocks * kPanelWidth) {
              for (int byte = 0; byte < table->activation_bytes; ++byte) ASSERT_EQ(at[byte], 0x55) << column;
              continue;
            }
            const int64_t in_column = column / kPanelWidth * width + column % kPanelWidth;
            const float g = gate_up[static_cast<size_t>(row * in_stride + in_column)] +
                            bias[static_cast<size_t>(in_column)];
            double exact = exact_gate(GetParam(), g, alpha, limit);
            if (gated) {
              const float u = gate_up[static_cast<size_t>(row * in_stride + in_column + kPanelWidth)] +
                              bias[static_cast<size_t>(in_column + kPanelWidth)];
              exact *= exact_up(GetParam(), u, limit);
            }
            double got, tolerance = 2e-6 * std::fabs(exact);
            if (table->activation_bytes == 2) {
              uint16_t bits;
              std::memcpy(&bits, at, sizeof(bits));
              got = bfloat16_value(bits);
            } else {
              float value;
              std::memcpy(&value, at, sizeof(value));
              got = value;
            }
            if (format == WeightFormat::kBfloat16) {
              tolerance += 0x1p-8 * std::fabs(exact);  // half a unit of bf16's last place
              ASSERT_EQ(got, bfloat16_value(nearest_bfloat16(got))) << "not a bf16 value";
            }
            ASSERT_NEAR(got, exact, tolerance + 1e-37) << "row " << row << ", column " << column;
          }
        }
      }
    }
  }
}

// bf16 activations are the fp32 ones, rounded once; on all instruction sets alike.
TEST_P(ActivationTest, BfloatFormatRoundsTheFloatResult) {
  std::vector<float> gates = gates_of_all_sizes();
  gates[5] = kNan;
  const auto count = static_cast<int64_t>(gates.size());
  const auto unrounded = activate(kernel_table(WeightFormat::kFloat32, InstructionSet::kPortable), GetParam(),
                                  gates, {}, 1.702f, 7.0f);
  for (const KernelTable* table : tables(WeightFormat::kBfloat16)) {
    SCOPED_TRACE(table_name(*table));
    std::vector<char> out(gates.size() * static_cast<size_t>(table->activation_bytes));
    table->activate({GetParam(), false, 1.702f, 7.0f, gates.data(), count, nullptr, 1, count / kPanelWidth,
                     out.data(), count});
    for (size_t i = 0; i < gates.size(); ++i) {
      float got;
      if (table->activation_bytes == 2) {
        uint16_t bits;
        std::memcpy(&bits, out.data() + 2 * i, sizeof(bits));
        got = static_cast<float>(bfloat16_value(bits));
      } else {
        std::memcpy(&got, out.data() + 4 * i, sizeof(got));
      }
      if (std::isnan(unrounded[i])) {
        ASSERT_TRUE(std::isnan(got));
      } else {
        ASSERT_EQ(got, static_cast<float>(bfloat16_value(nearest_bfloat16(unrounded[i])))) << gates[i];
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Functions, ActivationTest, testing::ValuesIn(kActivations),
                         [](const auto& info) { return std::string(activation_name(info.param)); });

}  // namespace
}  // namespace numa_moe::test
