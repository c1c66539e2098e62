// Durations counted by size: eight buckets to each doubling, so that a bucket's middle is within 6 % of what
// is in it. The idea of HdrHistogram (hdrhistogram.org): constant time to add, constant memory whatever
// comes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace numa_moe {

inline constexpr int kSmallestPower = 8;   // below 256 ns all are one
inline constexpr int kLargestPower = 36;   // from 69 s on too
inline constexpr int kBucketBits = 3;
inline constexpr int kDurationBuckets = ((kLargestPower - kSmallestPower) << kBucketBits) + 1;

// Which bucket a duration in nanoseconds belongs to.
constexpr int duration_bucket(int64_t ns) {
  if (ns < (int64_t{1} << kSmallestPower)) return 0;
  const auto value = static_cast<uint64_t>(std::min(ns, (int64_t{1} << kLargestPower) - 1));
  const int power = std::bit_width(value) - 1;
  const auto within = static_cast<int>((value >> (power - kBucketBits)) & ((1U << kBucketBits) - 1));
  return ((power - kSmallestPower) << kBucketBits) + within + 1;
}

// The least duration that belongs to a bucket; of one past the last too.
constexpr int64_t duration_bucket_begin(int bucket) {
  if (bucket == 0) return 0;
  const int power = ((bucket - 1) >> kBucketBits) + kSmallestPower;
  const int64_t within = (bucket - 1) & ((1 << kBucketBits) - 1);
  return (int64_t{1} << power) + (within << (power - kBucketBits));
}

// Written by one thread at a time, read by any. Relaxed throughout: the numbers say nothing about other
// memory, and who reads meanwhile may see some of them older than others.
class DurationHistogram {
 public:
  void add(int64_t ns) {
    increase(counts_[static_cast<std::size_t>(duration_bucket(ns))], 1);
    if (ns > max_.load(std::memory_order_relaxed)) max_.store(ns, std::memory_order_relaxed);
  }
  uint64_t count(int bucket) const {
    return counts_[static_cast<std::size_t>(bucket)].load(std::memory_order_relaxed);
  }
  int64_t max() const { return max_.load(std::memory_order_relaxed); }

 private:
  static void increase(std::atomic<uint32_t>& count, uint32_t amount) {
    count.store(count.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }

  std::array<std::atomic<uint32_t>, kDurationBuckets> counts_{};
  std::atomic<int64_t> max_{0};
};

}  // namespace numa_moe
