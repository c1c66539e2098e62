// How fast threads multiply and add in registers: the limit of prefill.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace numa_moe {

// Multiplications and additions (two operations a pair) per second, in 1e9, of num_threads threads, thread i
// on cpus[i] (cpus empty: unpinned): the median of five repeats of a loop over registers. Kinds:
//   "fp32"  fused multiply-add: AVX-512, AVX2+FMA, NEON; where there is none, multiply and add of SSE2
//   "bf16"  dot product with fp32 sums: AVX512-BF16 (vdpbf16ps), NEON BF16 (bfmmla)
//   "int8"  dot product with int32 sums: AVX512-VNNI and AVX-VNNI (vpdpbusd), NEON (smmla, else sdot)
// nullopt when this CPU has no such instruction. The tile unit of AMX is not among them.
//
// Throws std::invalid_argument naming the argument that doesn't fit, or std::system_error when a thread can't
// be started or pinned.
std::optional<double> compute_peak(const std::string& kind, int num_threads, const std::vector<int>& cpus);

}  // namespace numa_moe
