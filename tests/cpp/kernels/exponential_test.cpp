// The functions of math.inl by themselves, on the portable vector type. That other instruction sets give
// the same bits is what activation_test.cpp asserts.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/reference.h"
#include "kernels/target.h"

namespace numa_moe::test {
namespace {

// clang-format off: the vector type first
#include "kernels/vector_portable.inl"
#include "kernels/math.inl"
// clang-format on

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float evaluate(Vector (*function)(Vector), float x) {
  float lanes[kLanes];
  store(lanes, function(broadcast(x)));
  return lanes[0];
}
Vector call_exponential(Vector x) { return exponential(x); }
Vector call_sigmoid(Vector x) { return sigmoid(x); }
Vector call_normal_distribution(Vector x) { return normal_distribution(x); }

// Error in units of the last place, results below 2^-126 in units of 2^-149.
double largest_error(Vector (*function)(Vector), double (*exact)(double)) {
  double largest = 0;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 4001) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(x)) continue;
    const double error = ulp_error(evaluate(function, x), exact(x));
    if (error > largest) largest = error;
  }
  return largest;
}

TEST(MathTest, ExponentialIsWithin1Point1Units) {
  EXPECT_LE(largest_error(call_exponential, [](double x) { return std::exp(x); }), 1.1);
}

TEST(MathTest, SigmoidIsWithin2Point5Units) {
  EXPECT_LE(largest_error(call_sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }), 2.5);
}

TEST(MathTest, NormalDistributionIsWithin5Point5Units) {
  EXPECT_LE(
      largest_error(call_normal_distribution, [](double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }),
      5.5);
}

TEST(MathTest, ExponentialAtTheEnds) {
  EXPECT_EQ(evaluate(call_exponential, 0.0f), 1.0f);
  EXPECT_EQ(evaluate(call_exponential, -0.0f), 1.0f);
  EXPECT_EQ(evaluate(call_exponential, kInfinity), kInfinity);
  EXPECT_EQ(evaluate(call_exponential, -kInfinity), 0.0f);
  EXPECT_EQ(evaluate(call_exponential, 1e30f), kInfinity);
  EXPECT_EQ(evaluate(call_exponential, -1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(evaluate(call_exponential, std::numeric_limits<float>::quiet_NaN())));
  // The last finite result, the first infinite one; the last that isn't zero, the first zero.
  EXPECT_TRUE(std::isfinite(evaluate(call_exponential, 0x1.62e42ep6f)));
  EXPECT_EQ(evaluate(call_exponential, 0x1.62e430p6f), kInfinity);
  EXPECT_EQ(evaluate(call_exponential, -0x1.9fe368p6f), 0x1p-149f);
  EXPECT_EQ(evaluate(call_exponential, -0x1.9fe36ap6f), 0.0f);
}

TEST(MathTest, SigmoidAndNormalDistributionAtTheEnds) {
  for (Vector (*function)(Vector) : {call_sigmoid, call_normal_distribution}) {
    EXPECT_EQ(evaluate(function, kInfinity), 1.0f);
    EXPECT_EQ(evaluate(function, -kInfinity), 0.0f);
    EXPECT_EQ(evaluate(function, 1e30f), 1.0f);
    EXPECT_EQ(evaluate(function, -1e30f), 0.0f);
    EXPECT_NEAR(evaluate(function, 0.0f), 0.5f, 0x1p-24);
    EXPECT_TRUE(std::isnan(evaluate(function, std::numeric_limits<float>::quiet_NaN())));
  }
}

}  // namespace
}  // namespace numa_moe::test
