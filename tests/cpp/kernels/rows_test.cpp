#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/guarded_memory.h"
#include "kernels/reference.h"

namespace numa_moe::test {
namespace {

TEST(AccumulateRowTest, IsOneFusedMultiplyAddPerElement) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const WeightFormat format : kFormats) {
    for (const KernelTable* table : tables(format)) {
      for (int64_t count = 0; count <= 40; ++count) {
        for (const bool with_bias : {false, true}) {
          SCOPED_TRACE(table_name(*table) + ", count " + std::to_string(count));
          const auto bytes = static_cast<size_t>(count) * sizeof(float);
          const GuardedMemory row(bytes, Flush::kToEnd), bias(bytes, Flush::kToEnd),
              sum(bytes, Flush::kToEnd);
          const float weight = normal(random);
          std::vector<float> expected;
          for (int64_t i = 0; i < count; ++i) {
            row.data<float>()[i] = normal(random);
            bias.data<float>()[i] = normal(random);
            sum.data<float>()[i] = normal(random);
            const float value =
                with_bias ? row.data<float>()[i] + bias.data<float>()[i] : row.data<float>()[i];
            expected.push_back(std::fma(weight, value, sum.data<float>()[i]));
          }
          table->accumulate_row(weight, row.data<float>(), with_bias ? bias.data<float>() : nullptr, count,
                                sum.data<float>());
          for (int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(std::bit_cast<uint32_t>(sum.data<float>()[i]),
                      std::bit_cast<uint32_t>(expected[static_cast<size_t>(i)]));
          }
        }
      }
    }
  }
}

TEST(AccumulateRowTest, NanAndInfinityStayInTheirElement) {
  for (const KernelTable* table : tables(WeightFormat::kBfloat16)) {
    SCOPED_TRACE(table_name(*table));
    std::vector<float> row(37, 1.0f), sum(37, 2.0f);
    row[3] = std::numeric_limits<float>::quiet_NaN();
    row[36] = std::numeric_limits<float>::infinity();
    table->accumulate_row(0.5f, row.data(), nullptr, 37, sum.data());
    for (size_t i = 0; i < sum.size(); ++i) {
      if (i == 3) {
        EXPECT_TRUE(std::isnan(sum[i]));
      } else {
        EXPECT_EQ(sum[i], i == 36 ? std::numeric_limits<float>::infinity() : 2.5f) << i;
      }
    }
  }
}

}  // namespace
}  // namespace numa_moe::test
