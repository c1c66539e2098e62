// Cuts the work of one layer into tasks for the pool, sized so that no worker starves.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/expert_layout.h"
#include "moe/routing.h"

namespace numa_moe {

// Rows of one expert times blocks of intermediate channels of one slice.
struct GateUpTask {
  int64_t active;       // index into the routing's active experts
  int64_t row_begin;    // rows of the routing
  int64_t row_end;
  int64_t slice;
  int64_t block_begin;  // blocks within the slice
  int64_t block_end;
};

// A range of tokens times blocks of hidden channels of one slice, over all active experts: a task owns
// its part of the output, so that the weighted sum needs no other task.
struct DownTask {
  int64_t token_begin;
  int64_t token_end;
  int64_t slice;
  int64_t block_begin;
  int64_t block_end;
};

// The group whose workers run the tasks of a slice, for pools and tensors with different splits.
// Equal numbers: slice i belongs to group i. Fewer groups: the slices are dealt round robin.
int64_t group_of_slice(int64_t slice, int64_t num_groups);

// Tasks per group. max_rows bounds the rows of one gate/up task (the gathered rows live in a worker's
// cache); max_tokens does the same for down. threads_in_group[g] >= 1.
std::vector<std::vector<GateUpTask>> plan_gate_up(const ExpertLayout& layout, const Routing& routing,
                                                  const std::vector<int>& threads_in_group, int64_t max_rows);
std::vector<std::vector<DownTask>> plan_down(const ExpertLayout& layout, const Routing& routing,
                                             int64_t num_tokens, const std::vector<int>& threads_in_group,
                                             int64_t max_tokens);

}  // namespace numa_moe
