// Memory that the layers of a process share while they compute: per group (on the group's node), of one layer
// at a time, and per thread. It grows to the largest need so far and is kept; callers bound that need by
// cutting long inputs into chunks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/placed_region.h"

namespace numa_moe {

// One growing buffer, 64-byte aligned, contents not kept when it grows.
class ScratchBuffer {
 public:
  explicit ScratchBuffer(int node = -1) : node_(node) {}
  // At least bytes, on the buffer's node. Throws std::bad_alloc.
  char* reserve(int64_t bytes);
  template <typename T>
  T* reserve_elements(int64_t count) {
    return reinterpret_cast<T*>(reserve(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t capacity() const;

 private:
  int node_;
  std::unique_ptr<PlacedRegion> region_;
};

struct GroupScratch {
  explicit GroupScratch(int node) : staged(node), intermediate(node), gathered(node) {}
  ScratchBuffer staged;  // hidden states in the kernels' activation type
  ScratchBuffer intermediate;  // activations that this group's slices computed
  ScratchBuffer gathered;  // all slices' activations, when there are several groups
};

// Grown only by the thread itself, inside a task.
struct ThreadScratch {
  ScratchBuffer rows;  // one expert's rows of hidden states, contiguous
  ScratchBuffer tile;  // fp32 output of a gemm
  ScratchBuffer accumulator;  // fp32 weighted sums
  ScratchBuffer panels;  // dequantized weights
  ScratchBuffer result;  // of a task that isn't committed yet
  int64_t bytes() const;
};

class Workspace {
 public:
  // node_per_group: a NUMA node, or -1 for anywhere.
  explicit Workspace(const std::vector<int>& node_per_group);
  GroupScratch& group(int64_t index) { return *groups_[static_cast<size_t>(index)]; }
  ScratchBuffer& hidden_states() { return hidden_states_; }  // a copy of the input
  int64_t bytes() const;

 private:
  std::vector<std::unique_ptr<GroupScratch>> groups_;
  ScratchBuffer hidden_states_;
};

}  // namespace numa_moe
