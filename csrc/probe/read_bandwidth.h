// How fast threads read memory: the limit of decoding, where every weight is read once per call.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace numa_moe {

// Reads about `bytes` bytes with num_threads threads, thread i on cpus[i] (cpus empty: unpinned), and returns
// the median of five repeats in GB/s (1e9 bytes per second). Each thread reads a part of its own, which it
// wrote first and which thus lies on its NUMA node, in huge pages where the kernel grants them. `bytes`
// should be several times the last-level caches, else it is their speed that is returned.
//
// The buffer is kept for the next call with the same arguments, and replaced by a call with others. Calls
// from several threads run one after the other.
//
// Throws std::invalid_argument naming the argument that doesn't fit, std::bad_alloc, or std::system_error
// when a thread can't be started or pinned.
double read_bandwidth(int num_threads, std::size_t bytes, const std::vector<int>& cpus);

// What the loads are: "avx512", "avx2", "neon" or "portable", the widest that this CPU has.
std::string read_bandwidth_loads();

}  // namespace numa_moe
