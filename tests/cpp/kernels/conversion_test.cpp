// Conversions on the way in (stage_row), on the way out (store_row) and of activations (activate).
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

std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> halves;
  for (uint32_t bits = 0; bits < 65536; ++bits) halves.push_back(static_cast<uint16_t>(bits));
  return halves;
}

// Every 16-bit float, the points half way between neighbours, and the floats next to those: all places
// where rounding changes its mind. Then special values and random bits.
std::vector<float> rounding_cases(double (*value_of)(uint16_t), bool (*is_nan)(uint16_t)) {
  std::vector<float> cases;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (is_nan(half)) continue;
    const auto value = static_cast<float>(value_of(half));
    cases.push_back(value);
    if (is_nan(static_cast<uint16_t>(bits + 1)) || std::isinf(value)) continue;
    const double next = value_of(static_cast<uint16_t>(bits + 1));
    const double step = std::isinf(next) ? value - value_of(static_cast<uint16_t>(bits - 1)) : next - value;
    const auto middle = static_cast<float>(value + step / 2);
    cases.insert(cases.end(), {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 2 * middle)});
  }
  for (const float special :
       {0.0f, -0.0f, std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
        std::numeric_limits<float>::denorm_min(), 1e-30f, 70000.0f, -70000.0f}) {
    cases.push_back(special);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(value)) cases.push_back(value);
  }
  return cases;
}

std::vector<float> nan_cases() {
  std::vector<float> cases;
  for (const uint32_t bits : {0x7f800001u, 0x7f80ffffu, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu,
                              0x7f801000u, 0xffbfffffu}) {
    cases.push_back(std::bit_cast<float>(bits));
  }
  return cases;
}

TEST(ConversionTest, Every16BitFloatIsReadExactly) {
  const std::vector<uint16_t> halves = all_halves();
  const auto count = static_cast<int64_t>(halves.size());
  for (const KernelTable* table : tables(WeightFormat::kFloat32)) {
    std::vector<float> from_bfloat16(halves.size()), from_float16(halves.size());
    table->stage_row(halves.data(), DataType::kBfloat16, count, count, from_bfloat16.data());
    table->stage_row(halves.data(), DataType::kFloat16, count, count, from_float16.data());
    for (size_t i = 0; i < halves.size(); ++i) {
      SCOPED_TRACE(table_name(*table) + ", bits " + std::to_string(i));
      if (bfloat16_is_nan(halves[i])) {
        ASSERT_TRUE(std::isnan(from_bfloat16[i]));
      } else {
        ASSERT_EQ(from_bfloat16[i], bfloat16_value(halves[i]));
        ASSERT_EQ(std::signbit(from_bfloat16[i]), halves[i] >> 15 == 1);
      }
      if (float16_is_nan(halves[i])) {
        ASSERT_TRUE(std::isnan(from_float16[i]));
      } else {
        ASSERT_EQ(from_float16[i], float16_value(halves[i]));
        ASSERT_EQ(std::signbit(from_float16[i]), halves[i] >> 15 == 1);
      }
    }
  }
}

void expect_rounds(const KernelTable& table, DataType type, const std::vector<float>& cases,
                   uint16_t (*nearest)(double), bool (*is_nan)(uint16_t)) {
  std::vector<uint16_t> stored(cases.size());
  table.store_row(cases.data(), static_cast<int64_t>(cases.size()), type, stored.data());
  for (size_t i = 0; i < cases.size(); ++i) {
    if (std::isnan(cases[i])) {
      ASSERT_TRUE(is_nan(stored[i])) << std::bit_cast<uint32_t>(cases[i]) << " became " << stored[i];
    } else {
      ASSERT_EQ(stored[i], nearest(cases[i])) << cases[i];
    }
  }
}

TEST(ConversionTest, ResultsAreRoundedToNearestEven) {
  const std::vector<float> bfloat16_cases = rounding_cases(bfloat16_value, bfloat16_is_nan);
  const std::vector<float> float16_cases = rounding_cases(float16_value, float16_is_nan);
  for (const WeightFormat format : kFormats) {
    for (const KernelTable* table : tables(format)) {
      SCOPED_TRACE(table_name(*table));
      expect_rounds(*table, DataType::kBfloat16, bfloat16_cases, nearest_bfloat16, bfloat16_is_nan);
      expect_rounds(*table, DataType::kBfloat16, nan_cases(), nearest_bfloat16, bfloat16_is_nan);
      expect_rounds(*table, DataType::kFloat16, float16_cases, nearest_float16, float16_is_nan);
      expect_rounds(*table, DataType::kFloat16, nan_cases(), nearest_float16, float16_is_nan);
    }
  }
}

// What the kernels keep of an activation, as a number.
float staged_value(const KernelTable& table, const char* staged, int64_t i) {
  if (table.activation_bytes == 2) {
    uint16_t bits;
    std::memcpy(&bits, staged + 2 * i, sizeof(bits));
    return static_cast<float>(bfloat16_value(bits));
  }
  float value;
  std::memcpy(&value, staged + 4 * i, sizeof(value));
  return value;
}

TEST(ConversionTest, BfloatFormatRoundsActivationsTheOthersKeepThem) {
  std::vector<float> cases = rounding_cases(bfloat16_value, bfloat16_is_nan);
  const auto count = static_cast<int64_t>(cases.size());
  for (const WeightFormat format : kFormats) {
    for (const KernelTable* table : tables(format)) {
      SCOPED_TRACE(table_name(*table));
      std::vector<char> staged(cases.size() * static_cast<size_t>(table->activation_bytes));
      table->stage_row(cases.data(), DataType::kFloat32, count, count, staged.data());
      for (int64_t i = 0; i < count; ++i) {
        const float value = cases[static_cast<size_t>(i)];
        ASSERT_EQ(staged_value(*table, staged.data(), i), round_to_activation(format, value)) << value;
      }
      for (const float nan : nan_cases()) {
        table->stage_row(&nan, DataType::kFloat32, 1, 1, staged.data());
        ASSERT_TRUE(std::isnan(staged_value(*table, staged.data(), 0)));
      }
    }
  }
}

TEST(ConversionTest, RowsOfAnyLengthAreConvertedPaddedAndNothingElseIsTouched) {
  const DataType types[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};
  for (const WeightFormat format : kFormats) {
    for (const KernelTable* table : tables(format)) {
      for (const DataType type : types) {
        for (int64_t count = 0; count <= 40; ++count) {
          SCOPED_TRACE(table_name(*table) + ", type " + std::to_string(static_cast<int>(type)) + ", count " +
                       std::to_string(count));
          const int64_t padded = count + count % 2;
          const auto source_bytes = static_cast<size_t>(count * data_type_bytes(type));
          const GuardedMemory source(source_bytes, Flush::kToEnd);
          for (int64_t i = 0; i < count; ++i) {
            const auto value = static_cast<float>(i + 1);
            const uint16_t half =
                type == DataType::kBfloat16 ? nearest_bfloat16(value) : nearest_float16(value);
            std::memcpy(source.data() + i * data_type_bytes(type),
                        type == DataType::kFloat32 ? static_cast<const void*>(&value) : &half,
                        static_cast<size_t>(data_type_bytes(type)));
          }
          const GuardedMemory staged(static_cast<size_t>(padded * table->activation_bytes), Flush::kToEnd);
          std::memset(staged.data(), 0x55, staged.size());
          table->stage_row(source.data(), type, count, padded, staged.data());
          for (int64_t i = 0; i < padded; ++i) {
            ASSERT_EQ(staged_value(*table, staged.data(), i), i < count ? static_cast<float>(i + 1) : 0.0f);
          }

          std::vector<float> row(static_cast<size_t>(count));
          for (int64_t i = 0; i < count; ++i) row[static_cast<size_t>(i)] = static_cast<float>(i + 1);
          const GuardedMemory stored(source_bytes, Flush::kToEnd);
          table->store_row(row.data(), count, type, stored.data());
          ASSERT_EQ(std::memcmp(stored.data(), source.data(), source_bytes), 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace numa_moe::test
