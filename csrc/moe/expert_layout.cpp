#include "moe/expert_layout.h"

namespace numa_moe {

BlockRange slice_blocks(int64_t num_blocks, int64_t num_slices, int64_t slice) {
  return {num_blocks * slice / num_slices, num_blocks * (slice + 1) / num_slices};
}

}  // namespace numa_moe
