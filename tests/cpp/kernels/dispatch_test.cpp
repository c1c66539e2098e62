#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "kernels/reference.h"

namespace numa_moe::test {
namespace {

constexpr InstructionSet kAllInstructionSets[] = {
    InstructionSet::kPortable, InstructionSet::kNeon,       InstructionSet::kNeonBf16, InstructionSet::kAvx2,
    InstructionSet::kAvx512,   InstructionSet::kAvx512Bf16, InstructionSet::kAmx};

TEST(DispatchTest, SupportedSetsAscendAndBeginWithPortable) {
  const auto supported = supported_instruction_sets();
  ASSERT_FALSE(supported.empty());
  EXPECT_EQ(supported.front(), InstructionSet::kPortable);
  EXPECT_TRUE(std::is_sorted(supported.begin(), supported.end()));
  EXPECT_EQ(std::set<InstructionSet>(supported.begin(), supported.end()).size(), supported.size());
  // Nothing of the other architecture.
  for (const InstructionSet set : supported) {
#if defined(__x86_64__)
    EXPECT_TRUE(set != InstructionSet::kNeon && set != InstructionSet::kNeonBf16);
#elif defined(__aarch64__)
    EXPECT_LT(set, InstructionSet::kAvx2);
#endif
  }
#if defined(__aarch64__)
  EXPECT_NE(std::find(supported.begin(), supported.end(), InstructionSet::kNeon), supported.end());
#endif
}

TEST(DispatchTest, TablesSayWhatTheyAreAndAreComplete) {
  for (const InstructionSet set : supported_instruction_sets()) {
    for (const WeightFormat format : kFormats) {
      const KernelTable& table = kernel_table(format, set);
      SCOPED_TRACE(table_name(table));
      EXPECT_EQ(table.format, format);
      EXPECT_LE(table.instruction_set, set);
      EXPECT_TRUE(table.stage_row && table.gemm && table.activate && table.accumulate_row && table.store_row);
      const bool has_pairs = table.instruction_set == InstructionSet::kNeonBf16 ||
                             table.instruction_set >= InstructionSet::kAvx512Bf16;
      EXPECT_EQ(table.activation_bytes, has_pairs ? 2 : 4);
    }
  }
}

TEST(DispatchTest, ASetWithoutAFormatLeavesItToTheNextLowerOne) {
#if defined(__x86_64__)
  for (const WeightFormat format : {WeightFormat::kFloat16, WeightFormat::kFloat32}) {
    EXPECT_EQ(kernel_table(format, InstructionSet::kAvx512Bf16).instruction_set, InstructionSet::kAvx512);
    EXPECT_EQ(kernel_table(format, InstructionSet::kAmx).instruction_set, InstructionSet::kAvx512);
    EXPECT_EQ(kernel_table(format, InstructionSet::kAvx2).instruction_set, InstructionSet::kAvx2);
  }
  EXPECT_EQ(kernel_table(WeightFormat::kBfloat16, InstructionSet::kAmx).instruction_set,
            InstructionSet::kAmx);
#elif defined(__aarch64__)
  EXPECT_EQ(kernel_table(WeightFormat::kFloat16, InstructionSet::kNeonBf16).instruction_set,
            InstructionSet::kNeon);
  EXPECT_EQ(kernel_table(WeightFormat::kBfloat16, InstructionSet::kNeonBf16).instruction_set,
            InstructionSet::kNeonBf16);
#endif
  EXPECT_EQ(kernel_table(WeightFormat::kBfloat16, InstructionSet::kPortable).instruction_set,
            InstructionSet::kPortable);
}

TEST(DispatchTest, FewRowsTakeAmxAway) {
#if defined(__x86_64__)
  const auto chosen = [](int64_t rows) {
    return kernel_table_for_rows(WeightFormat::kBfloat16, InstructionSet::kAmx, rows).instruction_set;
  };
  EXPECT_EQ(chosen(1), InstructionSet::kAvx512Bf16);
  EXPECT_EQ(chosen(1000), InstructionSet::kAmx);
#endif
  for (const InstructionSet set : supported_instruction_sets()) {
    if (set == InstructionSet::kAmx) continue;
    EXPECT_EQ(&kernel_table_for_rows(WeightFormat::kBfloat16, set, 1),
              &kernel_table(WeightFormat::kBfloat16, set));
  }
}

TEST(DispatchTest, NamesAreReadBackAndOthersAreNot) {
  std::set<std::string> names;
  for (const InstructionSet set : kAllInstructionSets) {
    InstructionSet parsed{};
    ASSERT_TRUE(parse_instruction_set(instruction_set_name(set), &parsed)) << instruction_set_name(set);
    EXPECT_EQ(parsed, set);
    names.insert(instruction_set_name(set));
  }
  EXPECT_EQ(names.size(), std::size(kAllInstructionSets));
  InstructionSet set = InstructionSet::kNeon;
  EXPECT_FALSE(parse_instruction_set("AVX2", &set));
  EXPECT_FALSE(parse_instruction_set("", &set));
  EXPECT_EQ(set, InstructionSet::kNeon);

  ASSERT_EQ(activation_names().size(), 8u);
  for (const std::string& name : activation_names()) {
    Activation activation{};
    ASSERT_TRUE(parse_activation(name, &activation)) << name;
    EXPECT_EQ(activation_name(activation), name);
  }
  Activation activation = Activation::kRelu;
  EXPECT_FALSE(parse_activation("swish", &activation));
  EXPECT_EQ(activation, Activation::kRelu);
}

TEST(DispatchTest, SizesOfFormatsAndTypes) {
  EXPECT_EQ(k_group(WeightFormat::kBfloat16), 2);
  EXPECT_EQ(k_group(WeightFormat::kFloat16), 1);
  EXPECT_EQ(k_group(WeightFormat::kFloat32), 1);
  EXPECT_EQ(k_group(WeightFormat::kFourBit), 8);
  EXPECT_EQ(group_bytes(WeightFormat::kBfloat16), 64);
  EXPECT_EQ(group_bytes(WeightFormat::kFloat16), 32);
  EXPECT_EQ(group_bytes(WeightFormat::kFloat32), 64);
  EXPECT_EQ(group_bytes(WeightFormat::kInt8), 128);
  EXPECT_EQ(group_bytes(WeightFormat::kFourBit), 64);
  EXPECT_EQ(data_type_bytes(DataType::kBfloat16), 2);
  EXPECT_EQ(data_type_bytes(DataType::kFloat16), 2);
  EXPECT_EQ(data_type_bytes(DataType::kFloat32), 4);
}

}  // namespace
}  // namespace numa_moe::test
