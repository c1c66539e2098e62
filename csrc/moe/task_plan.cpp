#include "moe/task_plan.h"

#include <algorithm>

namespace numa_moe {
namespace {

// Rows at which computing on a weight takes about as long as reading it from memory. Between 4 (AVX2)
// and 20 (AVX512-BF16) on the machines measured; it only shapes task sizes, never results.
constexpr int64_t kRowsPerWeightRead = 8;

// Guided self-scheduling (Polychronopoulos and Kuck, 1987): each task takes this fraction of what is
// left per thread, so early tasks are large (few claims) and the last ones small (little waiting).
constexpr int64_t kShare = 3;

// Blocks that one pass of the kernels likes to have at once when rows are few.
constexpr int64_t kBlocksAtOnce = 2;

// No task smaller than this many bytes of weights (or the same time in arithmetic): claiming costs
// a fraction of a microsecond, reading 32 KiB at least one.
constexpr int64_t kSmallestTask = 32 << 10;

int64_t cost_per_block(int64_t bytes, int64_t rows) {
  return bytes * std::max(rows, kRowsPerWeightRead) / kRowsPerWeightRead;
}

// Hands out how many blocks the next task gets.
class GuidedCutter {
 public:
  GuidedCutter(int64_t total_cost, int threads) : remaining_(total_cost), threads_(threads) {}

  int64_t take(int64_t cost_of_block, int64_t blocks_left) {
    const int64_t target = std::max(remaining_ / (kShare * threads_), kSmallestTask);
    int64_t blocks = std::max<int64_t>(1, target / cost_of_block);
    if (blocks > kBlocksAtOnce) blocks -= blocks % kBlocksAtOnce;
    blocks = std::min(blocks, blocks_left);
    // Rather one task than a full one and a crumb.
    if (blocks_left - blocks < std::min<int64_t>(blocks / 4 + 1, kBlocksAtOnce)) blocks = blocks_left;
    remaining_ -= blocks * cost_of_block;
    return blocks;
  }

 private:
  int64_t remaining_;
  int64_t threads_;
};

}  // namespace

int64_t group_of_slice(int64_t slice, int64_t num_groups) { return slice % num_groups; }

std::vector<std::vector<GateUpTask>> plan_gate_up(const ExpertLayout& layout, const Routing& routing,
                                                  const std::vector<int>& threads_in_group,
                                                  int64_t max_rows) {
  const auto num_groups = static_cast<int64_t>(threads_in_group.size());
  std::vector<std::vector<GateUpTask>> tasks(threads_in_group.size());
  std::vector<int64_t> total_cost(threads_in_group.size(), 0);

  const auto for_each_piece = [&](auto&& visit) {
    for (int64_t slice = 0; slice < layout.num_slices; ++slice) {
      const int64_t blocks = slice_blocks(layout.intermediate_blocks(), layout.num_slices, slice).size();
      if (blocks == 0) continue;
      for (int64_t active = 0; active < routing.num_active(); ++active) {
        const int64_t rows = routing.row_end(active) - routing.row_begin(active);
        const int64_t pieces = (rows + max_rows - 1) / max_rows;
        for (int64_t piece = 0; piece < pieces; ++piece) {
          visit(slice, active, routing.row_begin(active) + rows * piece / pieces,
                routing.row_begin(active) + rows * (piece + 1) / pieces, blocks);
        }
      }
    }
  };

  for_each_piece([&](int64_t slice, int64_t, int64_t row_begin, int64_t row_end, int64_t blocks) {
    total_cost[static_cast<size_t>(group_of_slice(slice, num_groups))] +=
        blocks * cost_per_block(layout.gate_up_block_bytes(), row_end - row_begin);
  });
  std::vector<GuidedCutter> cutters;
  for (size_t group = 0; group < threads_in_group.size(); ++group) {
    cutters.emplace_back(total_cost[group], threads_in_group[group]);
  }
  for_each_piece([&](int64_t slice, int64_t active, int64_t row_begin, int64_t row_end, int64_t blocks) {
    const auto group = static_cast<size_t>(group_of_slice(slice, num_groups));
    const int64_t cost = cost_per_block(layout.gate_up_block_bytes(), row_end - row_begin);
    for (int64_t begin = 0; begin < blocks;) {
      const int64_t taken = cutters[group].take(cost, blocks - begin);
      tasks[group].push_back({active, row_begin, row_end, slice, begin, begin + taken});
      begin += taken;
    }
  });
  return tasks;
}

std::vector<std::vector<DownTask>> plan_down(const ExpertLayout& layout, const Routing& routing,
                                             int64_t num_tokens, const std::vector<int>& threads_in_group,
                                             int64_t max_tokens) {
  const auto num_groups = static_cast<int64_t>(threads_in_group.size());
  std::vector<std::vector<DownTask>> tasks(threads_in_group.size());
  for (int64_t group = 0; group < num_groups; ++group) {
    const int threads = threads_in_group[static_cast<size_t>(group)];
    int64_t group_blocks = 0;
    for (int64_t slice = group; slice < layout.num_slices; slice += num_groups) {
      group_blocks += slice_blocks(layout.hidden_blocks(), layout.num_slices, slice).size();
    }
    if (group_blocks == 0) continue;
    // Token ranges: as few as fit the scratch, but enough to give every thread some tasks. Cutting by
    // tokens reads the weights again, so it is only done where rows, not bytes, are the work.
    const int64_t rows_per_expert = routing.num_rows() / std::max<int64_t>(1, routing.num_active());
    int64_t ranges = (num_tokens + max_tokens - 1) / max_tokens;
    while (group_blocks * ranges < kShare * threads * kBlocksAtOnce &&
           rows_per_expert / (ranges + 1) >= 4 * kRowsPerWeightRead) {
      ++ranges;
    }
    const auto for_each_piece = [&](auto&& visit) {
      for (int64_t range = 0; range < ranges; ++range) {
        const int64_t token_begin = num_tokens * range / ranges;
        const int64_t token_end = num_tokens * (range + 1) / ranges;
        int64_t cost = 1;
        for (int64_t active = 0; active < routing.num_active(); ++active) {
          const int64_t rows = ranges == 1 ? routing.row_end(active) - routing.row_begin(active)
                                           : routing.first_row_of_token(active, token_end) -
                                                 routing.first_row_of_token(active, token_begin);
          if (rows > 0) cost += cost_per_block(layout.down_panel_bytes(), rows);
        }
        for (int64_t slice = group; slice < layout.num_slices; slice += num_groups) {
          const int64_t blocks = slice_blocks(layout.hidden_blocks(), layout.num_slices, slice).size();
          visit(token_begin, token_end, slice, blocks, cost);
        }
      }
    };
    int64_t total_cost = 0;
    for_each_piece(
        [&](int64_t, int64_t, int64_t, int64_t blocks, int64_t cost) { total_cost += blocks * cost; });
    GuidedCutter cutter(total_cost, threads);
    for_each_piece([&](int64_t token_begin, int64_t token_end, int64_t slice, int64_t blocks, int64_t cost) {
      for (int64_t begin = 0; begin < blocks;) {
        const int64_t taken = cutter.take(cost, blocks - begin);
        tasks[static_cast<size_t>(group)].push_back({token_begin, token_end, slice, begin, begin + taken});
        begin += taken;
      }
    });
  }
  return tasks;
}

}  // namespace numa_moe
