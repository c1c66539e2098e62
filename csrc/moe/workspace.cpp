#include "moe/workspace.h"

#include <algorithm>

namespace numa_moe {

char* ScratchBuffer::reserve(int64_t bytes) {
  if (region_ == nullptr || capacity() < bytes) {
    // Half as much again, so that slowly growing batches don't map anew every time.
    const int64_t grown = std::max({bytes, capacity() + capacity() / 2, int64_t{4096}});
    region_.reset();
    region_ = std::make_unique<PlacedRegion>(static_cast<std::size_t>(grown), std::vector<int>{node_},
                                             HugePages::kTransparent);
  }
  return region_->data();
}

int64_t ScratchBuffer::capacity() const {
  return region_ == nullptr ? 0 : static_cast<int64_t>(region_->slice_bytes());
}

int64_t ThreadScratch::bytes() const {
  return rows.capacity() + tile.capacity() + panels.capacity() + accumulator.capacity() + result.capacity();
}

Workspace::Workspace(const std::vector<int>& node_per_group) {
  for (const int node : node_per_group) groups_.push_back(std::make_unique<GroupScratch>(node));
}

int64_t Workspace::bytes() const {
  int64_t total = hidden_states_.capacity();
  for (const auto& group : groups_) {
    total += group->staged.capacity() + group->intermediate.capacity() + group->gathered.capacity();
  }
  return total;
}

}  // namespace numa_moe
