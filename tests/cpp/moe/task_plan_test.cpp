#include "moe/task_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace numa_moe {
namespace {

struct Scene {
  ExpertLayout layout;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  int64_t tokens;
  int64_t top_k;
  std::vector<int> threads;

  Routing routing() const {
    return Routing({ids.data(), IndexType::kInt64, weights.data(), DataType::kFloat32, tokens, top_k},
                   layout.num_experts);
  }
};

Scene random_scene(std::mt19937& random) {
  Scene scene;
  scene.layout = {{WeightFormat::kBfloat16},
                  {WeightFormat::kBfloat16},
                  1 + static_cast<int64_t>(random() % 4),
                  1 + static_cast<int64_t>(random() % 20),
                  1 + static_cast<int64_t>(random() % 600),
                  2 * (1 + static_cast<int64_t>(random() % 300)),
                  random() % 4 != 0};
  scene.tokens = 1 + static_cast<int64_t>(random() % (random() % 2 ? 4 : 700));
  scene.top_k = 1 + static_cast<int64_t>(random() % 4);
  for (int64_t i = 0; i < scene.tokens * scene.top_k; ++i) {
    scene.ids.push_back(static_cast<int64_t>(random() % static_cast<uint32_t>(scene.layout.num_experts + 1)));
    scene.weights.push_back(1.0f);
  }
  const size_t groups = 1 + random() % 4;
  for (size_t i = 0; i < groups; ++i) scene.threads.push_back(1 + static_cast<int>(random() % 40));
  return scene;
}

// Every (row, slice, block) exactly once, in the slice's group, with no piece larger than allowed.
TEST(TaskPlan, GateUpCoversEverythingOnce) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    const Scene scene = random_scene(random);
    const Routing routing = scene.routing();
    const int64_t max_rows = 1 + static_cast<int64_t>(random() % 100);
    const auto tasks = plan_gate_up(scene.layout, routing, scene.threads, max_rows);
    ASSERT_EQ(tasks.size(), scene.threads.size());
    std::map<std::tuple<int64_t, int64_t>, int64_t> blocks_done;  // (slice, row)
    std::set<std::tuple<int64_t, int64_t, int64_t>> seen;         // (slice, row, first block)
    for (size_t group = 0; group < tasks.size(); ++group) {
      for (const GateUpTask& task : tasks[group]) {
        ASSERT_EQ(group_of_slice(task.slice, static_cast<int64_t>(tasks.size())),
                  static_cast<int64_t>(group));
        ASSERT_LT(task.block_begin, task.block_end);
        ASSERT_LE(
            task.block_end,
            slice_blocks(scene.layout.intermediate_blocks(), scene.layout.num_slices, task.slice).size());
        ASSERT_LT(task.row_begin, task.row_end);
        ASSERT_LE(task.row_end - task.row_begin, max_rows);
        ASSERT_GE(task.row_begin, routing.row_begin(task.active));
        ASSERT_LE(task.row_end, routing.row_end(task.active));
        for (int64_t row = task.row_begin; row < task.row_end; ++row) {
          for (int64_t block = task.block_begin; block < task.block_end; ++block) {
            ASSERT_TRUE(seen.insert({task.slice, row, block}).second);
          }
          blocks_done[{task.slice, row}] += task.block_end - task.block_begin;
        }
      }
    }
    for (int64_t slice = 0; slice < scene.layout.num_slices; ++slice) {
      const int64_t blocks =
          slice_blocks(scene.layout.intermediate_blocks(), scene.layout.num_slices, slice).size();
      for (int64_t row = 0; row < routing.num_rows(); ++row) {
        const auto done = blocks_done.find({slice, row});
        ASSERT_EQ(done == blocks_done.end() ? 0 : done->second, blocks);
      }
    }
  }
}

TEST(TaskPlan, DownCoversEveryTokenAndBlockOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const Scene scene = random_scene(random);
    const Routing routing = scene.routing();
    const int64_t max_tokens = 1 + static_cast<int64_t>(random() % 400);
    const auto tasks = plan_down(scene.layout, routing, scene.tokens, scene.threads, max_tokens);
    std::set<std::tuple<int64_t, int64_t, int64_t>> seen;  // (slice, token, block)
    for (size_t group = 0; group < tasks.size(); ++group) {
      for (const DownTask& task : tasks[group]) {
        ASSERT_EQ(group_of_slice(task.slice, static_cast<int64_t>(tasks.size())),
                  static_cast<int64_t>(group));
        ASSERT_LE(task.token_end - task.token_begin, max_tokens);
        for (int64_t token = task.token_begin; token < task.token_end; ++token) {
          for (int64_t block = task.block_begin; block < task.block_end; ++block) {
            ASSERT_TRUE(seen.insert({task.slice, token, block}).second);
          }
        }
      }
    }
    // Also when no expert of ours was chosen: the output must be written.
    ASSERT_EQ(static_cast<int64_t>(seen.size()), scene.tokens * scene.layout.hidden_blocks());
  }
}

// Case all-to-one: one expert gets all tokens, and there is still work for every thread.
TEST(TaskPlan, OneExpertKeepsAllThreadsBusy) {
  Scene scene;
  scene.layout = {{WeightFormat::kBfloat16}, {WeightFormat::kBfloat16}, 2, 64, 2048, 768, true};
  scene.tokens = 4096;
  scene.top_k = 2;
  scene.ids.assign(static_cast<size_t>(scene.tokens * scene.top_k), 5);
  scene.weights.assign(scene.ids.size(), 1.0f);
  scene.threads = {16, 16};
  const Routing routing = scene.routing();
  for (const auto& group : plan_gate_up(scene.layout, routing, scene.threads, 512))
    EXPECT_GE(group.size(), 48u);
  for (const auto& group : plan_down(scene.layout, routing, scene.tokens, scene.threads, 512)) {
    EXPECT_GE(group.size(), 48u);
  }
}

// The last tasks are small: no thread waits long for another that claimed late.
TEST(TaskPlan, TheLastTasksAreSmall) {
  Scene scene;
  scene.layout = {{WeightFormat::kBfloat16}, {WeightFormat::kBfloat16}, 1, 128, 2048, 768, true};
  scene.tokens = 1;
  scene.top_k = 8;
  for (int64_t i = 0; i < 8; ++i) scene.ids.push_back(3 * i);
  scene.weights.assign(8, 0.125f);
  scene.threads = {8};
  const auto tasks = plan_gate_up(scene.layout, scene.routing(), scene.threads, 512)[0];
  int64_t blocks = 0;
  for (const GateUpTask& task : tasks) blocks += task.block_end - task.block_begin;
  ASSERT_EQ(blocks, 8 * 48);
  for (size_t i = tasks.size() - 8; i < tasks.size(); ++i) {
    EXPECT_LE((tasks[i].block_end - tasks[i].block_begin) * 50, blocks);  // at most 2 % each
  }
  EXPECT_GE(tasks.size(), 16u);
}

}  // namespace
}  // namespace numa_moe
