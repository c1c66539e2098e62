#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/guarded_memory.h"
#include "kernels/reference.h"

namespace numa_moe::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The product as the table computes it, [rows, columns]. Strides beyond what is needed are of no effect.
std::vector<float> multiply(const KernelTable& table, const Problem& problem, int64_t extra_x = 0,
                            int64_t extra_panel = 0, int64_t extra_out = 0) {
  const int64_t x_stride = padded_k(problem) + extra_x;
  const int64_t panel_stride = panel_bytes(problem) + extra_panel;
  const int64_t out_stride = problem.columns + extra_out;
  const int64_t panels = problem.columns / kPanelWidth;
  // Just as much as the contract lets the kernel read: up to k of the last row, and of the last panel.
  const auto x_bytes = static_cast<size_t>(
      problem.rows > 0 ? ((problem.rows - 1) * x_stride + padded_k(problem)) * table.activation_bytes : 0);
  const GuardedMemory x(x_bytes, Flush::kToEnd);
  const GuardedMemory weights(static_cast<size_t>((panels - 1) * panel_stride + panel_bytes(problem)),
                              Flush::kToEnd);
  stage_rows(table, problem, x_stride, x.data());
  pack_weights(problem, panel_stride, weights.data());

  constexpr float kUntouched = -12345.0f;
  std::vector<float> out(static_cast<size_t>(problem.rows * out_stride + 16), kUntouched);
  table.gemm({x.data(), x_stride, problem.rows, problem.k, weights.data(), panel_stride, panels, out.data(),
              out_stride});
  std::vector<float> result;
  for (int64_t row = 0; row < problem.rows; ++row) {
    for (int64_t column = 0; column < out_stride; ++column) {
      const float value = out[static_cast<size_t>(row * out_stride + column)];
      if (column < problem.columns) {
        result.push_back(value);
      } else {
        EXPECT_EQ(value, kUntouched) << "written beyond the columns, row " << row;
      }
    }
  }
  for (size_t i = static_cast<size_t>(problem.rows * out_stride); i < out.size(); ++i) {
    EXPECT_EQ(out[i], kUntouched) << "written beyond the rows";
  }
  return result;
}

void expect_same_bits(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(expected[i]))
        << got[i] << " instead of " << expected[i] << " at " << i;
  }
}

Problem rows_of(const Problem& problem, int64_t first, int64_t count) {
  Problem part = problem;
  part.rows = count;
  part.x.assign(problem.x.begin() + first * problem.k, problem.x.begin() + (first + count) * problem.k);
  return part;
}

Problem panels_of(const Problem& problem, int64_t first, int64_t count) {
  Problem part = problem;
  part.columns = count * kPanelWidth;
  part.weights.assign(problem.weights.begin() + first * kPanelWidth * problem.k,
                      problem.weights.begin() + (first + count) * kPanelWidth * problem.k);
  return part;
}

class GemmTest : public testing::TestWithParam<WeightFormat> {
 protected:
  std::mt19937 random_{12345};

  int64_t random_between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
};

// Sums of n products in fp32, in any order, are off by at most n units of rounding of the sum of
// magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
TEST_P(GemmTest, IsTheProductWhateverTheShapeAndTheStrides) {
  for (int trial = 0; trial < 120; ++trial) {
    const Problem problem = random_problem(GetParam(), random_between(0, 40), random_between(1, 300),
                                           random_between(1, 9), random_);
    const DoubleProduct exact = double_product(problem);
    const int64_t extra_x = random_between(0, 3) * 2, extra_panel = random_between(0, 2) * 64,
                  extra_out = random_between(0, 20);
    for (const KernelTable* table : tables(GetParam())) {
      SCOPED_TRACE(table_name(*table) + ", rows " + std::to_string(problem.rows) + ", k " +
                   std::to_string(problem.k) + ", columns " + std::to_string(problem.columns));
      const std::vector<float> out = multiply(*table, problem, extra_x, extra_panel, extra_out);
      ASSERT_EQ(out.size(), exact.value.size());
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_NEAR(out[i], exact.value[i],
                    static_cast<double>(problem.k) * 0x1p-24 * exact.magnitude[i] + 0x1p-120)
            << i;
      }
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// k around the blocks that it is cut into where there are many rows; rows around the tiles and blocks.
TEST_P(GemmTest, IsOneChainOfFusedMultiplyAddsWhereActivationsAreFloats) {
  for (const int64_t k : {1, 2, 3, 127, 128, 129, 255, 256, 257, 511, 513, 700}) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 25}) {
      const Problem problem = random_problem(GetParam(), rows, k, 5, random_);
      const std::vector<float> expected = ascending_product(problem);
      for (const KernelTable* table : tables(GetParam())) {
        if (table->activation_bytes != 4) continue;  // bf16 dot products round elsewhere
        SCOPED_TRACE(table_name(*table) + ", rows " + std::to_string(rows) + ", k " + std::to_string(k));
        expect_same_bits(multiply(*table, problem), expected);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(GemmTest, ARowAloneHasTheBitsThatItHasAmongOthers) {
  const Problem problem = random_problem(GetParam(), 400, 333, 3, random_);
  for (const KernelTable* table : tables(GetParam())) {
    SCOPED_TRACE(table_name(*table));
    const std::vector<float> all = multiply(*table, problem);
    for (int trial = 0; trial < 60; ++trial) {
      const int64_t count = trial % 30 + 1;
      const int64_t first = random_between(0, problem.rows - count);
      SCOPED_TRACE("rows " + std::to_string(first) + " to " + std::to_string(first + count));
      const std::vector<float> expected(all.begin() + first * problem.columns,
                                        all.begin() + (first + count) * problem.columns);
      expect_same_bits(multiply(*table, rows_of(problem, first, count)), expected);
      if (HasFatalFailure()) return;
    }
  }
}

// More rows and more panels than are taken at once.
TEST_P(GemmTest, BlocksOfRowsAndPanelsMeetWithoutSeams) {
  const Problem problem = random_problem(GetParam(), 200, 260, 35, random_);
  const std::vector<float> expected = ascending_product(problem);
  for (const KernelTable* table : tables(GetParam())) {
    SCOPED_TRACE(table_name(*table));
    const std::vector<float> all = multiply(*table, problem);
    if (table->activation_bytes == 4) expect_same_bits(all, expected);
    for (const int64_t row : {0, 1, 95, 99, 100, 101, 198, 199}) {
      const std::vector<float> alone(all.begin() + row * problem.columns,
                                     all.begin() + (row + 1) * problem.columns);
      expect_same_bits(multiply(*table, rows_of(problem, row, 1)), alone);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(GemmTest, APanelAloneHasTheBitsThatItHasAmongOthers) {
  for (const int64_t rows : {1, 2, 3, 6, 11, 30}) {
    const Problem problem = random_problem(GetParam(), rows, 190, 9, random_);
    for (const KernelTable* table : tables(GetParam())) {
      SCOPED_TRACE(table_name(*table) + ", rows " + std::to_string(rows));
      const std::vector<float> all = multiply(*table, problem);
      for (int64_t first = 0; first < 9; ++first) {
        const int64_t count = random_between(1, 9 - first);
        std::vector<float> expected;
        for (int64_t row = 0; row < rows; ++row) {
          const auto begin = all.begin() + row * problem.columns + first * kPanelWidth;
          expected.insert(expected.end(), begin, begin + count * kPanelWidth);
        }
        expect_same_bits(multiply(*table, panels_of(problem, first, count)), expected);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(GemmTest, ReadsNothingBeforeTheFirstRowAndPanel) {
  const Problem problem = random_problem(GetParam(), 9, 65, 3, random_);
  for (const KernelTable* table : tables(GetParam())) {
    SCOPED_TRACE(table_name(*table));
    const int64_t x_stride = padded_k(problem);
    const GuardedMemory x(static_cast<size_t>(9 * x_stride * table->activation_bytes), Flush::kToBegin);
    const GuardedMemory weights(static_cast<size_t>(3 * panel_bytes(problem)), Flush::kToBegin);
    stage_rows(*table, problem, x_stride, x.data());
    pack_weights(problem, panel_bytes(problem), weights.data());
    for (const int64_t rows : {1, 2, 3, 9}) {
      const GuardedMemory out(static_cast<size_t>(rows * problem.columns) * sizeof(float), Flush::kToBegin);
      table->gemm({x.data(), x_stride, rows, problem.k, weights.data(), panel_bytes(problem), 3,
                   out.data<float>(), problem.columns});
      const std::vector<float> got(out.data<float>(), out.data<float>() + rows * problem.columns);
      expect_same_bits(got, multiply(*table, rows_of(problem, 0, rows)));
    }
  }
}

TEST_P(GemmTest, NanAndInfinityReachTheirOwnRowAndColumnOnly) {
  for (const int64_t rows : {3, 20}) {
    Problem problem = random_problem(GetParam(), rows, 70, 2, random_);
    const std::vector<double> clean = double_product(problem).value;
    problem.x[static_cast<size_t>(1 * problem.k + 33)] = kNan;
    problem.x[static_cast<size_t>(2 * problem.k + 69)] = kInfinity;
    problem.weights[static_cast<size_t>(5 * problem.k + 68)] = kNan;
    problem.weights[static_cast<size_t>(20 * problem.k + 69)] = 0.0f;  // infinity * 0 is NaN
    for (const KernelTable* table : tables(GetParam())) {
      SCOPED_TRACE(table_name(*table) + ", rows " + std::to_string(rows));
      const std::vector<float> out = multiply(*table, problem);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < problem.columns; ++column) {
          const auto i = static_cast<size_t>(row * problem.columns + column);
          if (row == 1 || column == 5 || (row == 2 && column == 20)) {
            ASSERT_TRUE(std::isnan(out[i])) << row << " " << column;
          } else if (row == 2) {
            const float weight = problem.weights[static_cast<size_t>(column * problem.k + 69)];
            ASSERT_EQ(out[i], weight > 0 ? kInfinity : -kInfinity) << column;
          } else if (column != 20) {
            ASSERT_NEAR(out[i], clean[i], 1e-3) << row << " " << column;
          }
        }
      }
    }
  }
}

TEST_P(GemmTest, NoRowsWriteNothing) {
  const Problem problem = random_problem(GetParam(), 0, 16, 1, random_);
  for (const KernelTable* table : tables(GetParam())) {
    EXPECT_TRUE(multiply(*table, problem).empty()) << table_name(*table);  // multiply() looks at the output
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GemmTest, testing::ValuesIn(kFormats),
                         [](const auto& info) { return format_name(info.param); });

}  // namespace
}  // namespace numa_moe::test
