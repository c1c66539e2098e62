#include "moe/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

namespace numa_moe {
namespace {

TopK top_k_of(const std::vector<int64_t>& ids, const std::vector<float>& weights, int64_t top_k) {
  return {ids.data(),
          IndexType::kInt64,
          weights.data(),
          DataType::kFloat32,
          static_cast<int64_t>(ids.size()) / top_k,
          top_k};
}

TEST(Routing, SortsByExpertThenToken) {
  const std::vector<int64_t> ids = {2, 0, 5, 2, 0, 0};
  const std::vector<float> weights = {.1f, .2f, .3f, .4f, .5f, .6f};
  const Routing routing(top_k_of(ids, weights, 2), 4);
  ASSERT_EQ(routing.num_active(), 2);
  ASSERT_EQ(routing.num_rows(), 5);  // 5 lives elsewhere
  EXPECT_EQ(routing.expert(0), 0);
  EXPECT_EQ(routing.expert(1), 2);
  EXPECT_EQ(routing.row_begin(0), 0);
  EXPECT_EQ(routing.row_end(0), 3);
  EXPECT_EQ(routing.row_end(1), 5);
  const std::vector<int32_t> tokens = {0, 2, 2, 0, 1};
  const std::vector<float> sorted = {.2f, .5f, .6f, .1f, .4f};
  for (int64_t row = 0; row < 5; ++row) {
    EXPECT_EQ(routing.token(row), tokens[static_cast<size_t>(row)]);
    EXPECT_EQ(routing.weight(row), sorted[static_cast<size_t>(row)]);
  }
  EXPECT_EQ(routing.first_row_of_token(0, 0), 0);
  EXPECT_EQ(routing.first_row_of_token(0, 1), 1);
  EXPECT_EQ(routing.first_row_of_token(0, 3), 3);
  EXPECT_EQ(routing.first_row_of_token(1, 1), 4);
}

TEST(Routing, MatchesAStableSortOnRandomInputs) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int64_t num_experts = 1 + random() % 40;
    const int64_t top_k = 1 + random() % 9;
    const int64_t tokens = random() % 30;
    std::vector<int64_t> ids;
    std::vector<float> weights;
    std::vector<std::tuple<int64_t, int32_t, float>> expected;
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      ids.push_back(static_cast<int64_t>(random() % static_cast<uint32_t>(num_experts + 2)));
      weights.push_back(static_cast<float>(random()));
      if (ids.back() < num_experts) {
        expected.emplace_back(ids.back(), static_cast<int32_t>(i / top_k), weights.back());
      }
    }
    std::stable_sort(expected.begin(), expected.end(),
                     [](const auto& a, const auto& b) { return std::get<0>(a) < std::get<0>(b); });
    const Routing routing(top_k_of(ids, weights, top_k), num_experts);
    ASSERT_EQ(routing.num_rows(), static_cast<int64_t>(expected.size()));
    for (int64_t active = 0; active < routing.num_active(); ++active) {
      ASSERT_LT(routing.row_begin(active), routing.row_end(active));
      for (int64_t row = routing.row_begin(active); row < routing.row_end(active); ++row) {
        const auto& [expert, token, weight] = expected[static_cast<size_t>(row)];
        ASSERT_EQ(routing.expert(active), expert);
        ASSERT_EQ(routing.token(row), token);
        ASSERT_EQ(routing.weight(row), weight);
      }
    }
  }
}

TEST(Routing, ReadsEveryType) {
  const std::vector<int32_t> ids = {1, 0};
  const std::vector<uint16_t> bf16 = {0x3f80, 0xc000};      // 1, -2
  const std::vector<uint16_t> fp16 = {0x3c00, 0x0001};      // 1, 2^-24
  TopK top_k{ids.data(), IndexType::kInt32, bf16.data(), DataType::kBfloat16, 2, 1};
  const Routing first(top_k, 2);
  EXPECT_EQ(first.weight(0), -2.0f);
  EXPECT_EQ(first.weight(1), 1.0f);
  top_k.weights = fp16.data();
  top_k.weights_type = DataType::kFloat16;
  const Routing second(top_k, 2);
  EXPECT_EQ(second.weight(0), 0x1p-24f);
  EXPECT_EQ(second.weight(1), 1.0f);
}

TEST(Routing, FindsTheFirstNegativeId) {
  const std::vector<int64_t> good = {0, 3, 7};
  const std::vector<int64_t> bad = {0, 3, -7, -1};
  const std::vector<float> weights(4, 1.0f);
  EXPECT_EQ(first_negative_id(top_k_of(good, weights, 1)), -1);
  EXPECT_EQ(first_negative_id(top_k_of(bad, weights, 2)), 2);
  EXPECT_EQ(id_at(top_k_of(bad, weights, 2), 2), -7);
}

}  // namespace
}  // namespace numa_moe
