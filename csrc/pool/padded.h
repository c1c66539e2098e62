// Distances that keep what different threads write apart in memory.
#pragma once

#include <cstddef>

namespace numa_moe {

// Data that different threads write lies at least this far apart. Two lines of 64 bytes: x86 prefetches
// lines in such pairs (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Spatial
// Prefetcher"), and some ARM cores have lines of 128 bytes.
inline constexpr std::size_t kSharingDistance = 128;

}  // namespace numa_moe
