// The adapter to a brgemm, with a stand-in for the one that libtorch ships: no AMX is needed.
#include "kernels/amx.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/guarded_memory.h"
#include "kernels/instruction_sets.h"
#include "kernels/reference.h"

#if defined(__x86_64__)

namespace numa_moe::test {
namespace {

struct Call {
  int64_t m, n, k;
};
std::vector<Call> calls;
int releases = 0;

// What the documentation of brgemm says, in plain C++.
void stand_in(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add_c,
              const uint16_t* a, const uint16_t* b, float* c, bool is_vnni) {
  EXPECT_TRUE(is_vnni);
  EXPECT_EQ(k % 2, 0);
  calls.push_back({m, n, k});
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      double sum = add_c ? c[row * ld_c + column] : 0.0;
      for (int64_t i = 0; i < k; ++i) {
        sum += bfloat16_value(a[row * ld_a + i]) * bfloat16_value(b[(i / 2 * ld_b + column) * 2 + i % 2]);
      }
      c[row * ld_c + column] = static_cast<float>(sum);
    }
  }
}

void release() { ++releases; }

class AmxTest : public testing::Test {
 protected:
  void SetUp() override {
    calls.clear();
    releases = 0;
    set_bf16_brgemm(stand_in, release);
  }
  void TearDown() override { set_bf16_brgemm(nullptr, nullptr); }
};

TEST_F(AmxTest, MultipliesOurPanels) {
  std::mt19937 random(11);
  const KernelTable& amx = *amx::find_table(WeightFormat::kBfloat16);
  // Staged by another table: the amx table's own stage_row needs AVX-512.
  for (const int64_t rows : {1, 5, 16, 31, 64, 100, 130}) {
    for (const int64_t k : {1, 2, 33, 64}) {
      SCOPED_TRACE("rows " + std::to_string(rows) + ", k " + std::to_string(k));
      const Problem problem = random_problem(WeightFormat::kBfloat16, rows, k, 3, random);
      const int64_t x_stride = padded_k(problem) + 6, out_stride = problem.columns + 5;
      std::vector<uint16_t> x(static_cast<size_t>(rows * x_stride), 0);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < k; ++i) {
          x[static_cast<size_t>(row * x_stride + i)] =
              nearest_bfloat16(problem.x[static_cast<size_t>(row * k + i)]);
        }
      }
      const int64_t panel_stride = panel_bytes(problem) + 64;
      std::vector<char> weights(static_cast<size_t>(3 * panel_stride));
      pack_weights(problem, panel_stride, weights.data());
      std::vector<float> out(static_cast<size_t>(rows * out_stride), -7.0f);
      calls.clear();
      releases = 0;
      amx.gemm({x.data(), x_stride, rows, k, weights.data(), panel_stride, 3, out.data(), out_stride});
      const DoubleProduct exact = double_product(problem);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < out_stride; ++column) {
          const float value = out[static_cast<size_t>(row * out_stride + column)];
          if (column >= problem.columns) {
            ASSERT_EQ(value, -7.0f);
          } else {
            const auto i = static_cast<size_t>(row * problem.columns + column);
            ASSERT_NEAR(value, exact.value[i], 1e-6 * exact.magnitude[i]);
          }
        }
      }
      EXPECT_EQ(releases, 1);
    }
  }
}

// brgemm compiles code for every number of rows that it meets.
TEST_F(AmxTest, MeetsFewDifferentNumbersOfRows) {
  std::mt19937 random(12);
  const KernelTable& amx = *amx::find_table(WeightFormat::kBfloat16);
  const Problem problem = random_problem(WeightFormat::kBfloat16, 300, 2, 1, random);
  std::vector<uint16_t> x(600, 0);
  std::vector<char> weights(static_cast<size_t>(panel_bytes(problem)));
  std::vector<float> out(300 * kPanelWidth);
  std::vector<int64_t> heights;
  for (int64_t rows = 0; rows <= 300; ++rows) {
    calls.clear();
    amx.gemm({x.data(), 2, rows, 2, weights.data(), panel_bytes(problem), 1, out.data(), kPanelWidth});
    int64_t total = 0;
    for (const Call& call : calls) {
      total += call.m;
      heights.push_back(call.m);
    }
    EXPECT_EQ(total, rows);
  }
  std::sort(heights.begin(), heights.end());
  heights.erase(std::unique(heights.begin(), heights.end()), heights.end());
  EXPECT_LE(heights.size(), 18u);
}

TEST_F(AmxTest, IsListedOnlyWithABrgemm) {
  set_bf16_brgemm(nullptr, nullptr);
  const auto supported = supported_instruction_sets();
  EXPECT_EQ(std::find(supported.begin(), supported.end(), InstructionSet::kAmx), supported.end());
}

TEST_F(AmxTest, HasBfloat16Only) {
  EXPECT_EQ(amx::find_table(WeightFormat::kFloat16), nullptr);
  EXPECT_EQ(amx::find_table(WeightFormat::kFloat32), nullptr);
  EXPECT_EQ(amx::find_table(WeightFormat::kBfloat16)->activation_bytes, 2);
}

}  // namespace
}  // namespace numa_moe::test

#endif
