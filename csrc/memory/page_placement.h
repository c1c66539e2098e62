// Where the pages of a range really are, asked of the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace numa_moe {

enum class PlacementSource : uint8_t {
  kNone,       // the kernel refused to say, or there was nothing to ask
  kMovePages,  // move_pages(2): the sampled pages of exactly this range
  kNumaMaps,   // /proc/self/numa_maps: all pages of the mapping that the range fills (see process_maps.h)
};

struct PagePlacement {
  int64_t pages_sampled = 0;
  std::map<int, int64_t> pages_on_node;  // node -> sampled pages found there
  int64_t pages_absent = 0;              // sampled, but never written, or swapped out
  int error = 0;                         // errno when the kernel refused to say (EPERM in containers)
  PlacementSource source = PlacementSource::kNone;
};

// Samples at most max_samples pages of [address, address + bytes), evenly spread and always with the
// first and last one (the first alone if max_samples is 1), through move_pages(2) with no target nodes,
// which moves nothing. Pages are those of sysconf(_SC_PAGESIZE), huge pages count as many times as they
// are sampled. Where move_pages is refused, /proc/self/numa_maps is read instead, if it can tell.
// Throws std::invalid_argument when max_samples < 1 or the range wraps around.
PagePlacement query_page_placement(const void* address, std::size_t bytes, int64_t max_samples);

}  // namespace numa_moe
