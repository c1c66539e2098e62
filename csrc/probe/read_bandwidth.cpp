#include "probe/read_bandwidth.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "kernels/target.h"
#include "memory/placed_region.h"
#include "probe/timed_threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace numa_moe {
namespace {

// A thread reads this many streams in turn, a step of each at a time: hardware prefetchers follow several
// streams, and one alone doesn't keep as many lines in flight. Steps of two or four lines, four or eight
// streams, with or without software prefetch made no difference beyond the noise where this was tuned.
constexpr std::size_t kStreams = 4;
constexpr std::size_t kStepBytes = 256;
constexpr std::size_t kChunkBytes = kStreams * kStepBytes;  // a thread's part is a multiple of this
constexpr int kRepeats = 5;

// Adds up [data, data + bytes): a sum that someone may want keeps the compiler from dropping the loads.
using ReadFunction = uint64_t (*)(const char* data, std::size_t bytes);

uint64_t read_portable(const char* data, std::size_t bytes) {
  const std::size_t stream_bytes = bytes / kStreams;
  uint64_t sums[4] = {};
  for (std::size_t offset = 0; offset < stream_bytes; offset += kStepBytes) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      uint64_t words[kStepBytes / sizeof(uint64_t)];
      std::memcpy(words, data + stream * stream_bytes + offset, kStepBytes);
      for (std::size_t word = 0; word < kStepBytes / sizeof(uint64_t); ++word) sums[word % 4] += words[word];
    }
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

#if defined(__x86_64__)

NUMA_MOE_TARGET_BEGIN("avx2")
static uint64_t read_avx2(const char* data, std::size_t bytes) {
  const std::size_t stream_bytes = bytes / kStreams;
  __m256i sums[4] = {};
  for (std::size_t offset = 0; offset < stream_bytes; offset += kStepBytes) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const auto* step = reinterpret_cast<const __m256i*>(data + stream * stream_bytes + offset);
      for (int load = 0; load < 8; load += 4) {
        sums[0] = _mm256_add_epi64(sums[0], _mm256_load_si256(step + load));
        sums[1] = _mm256_add_epi64(sums[1], _mm256_load_si256(step + load + 1));
        sums[2] = _mm256_add_epi64(sums[2], _mm256_load_si256(step + load + 2));
        sums[3] = _mm256_add_epi64(sums[3], _mm256_load_si256(step + load + 3));
      }
    }
  }
  uint64_t words[4];
  const __m256i sum =
      _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), sum);
  return words[0] + words[1] + words[2] + words[3];
}
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("avx512f")
static uint64_t read_avx512(const char* data, std::size_t bytes) {
  const std::size_t stream_bytes = bytes / kStreams;
  __m512i sums[4] = {};
  for (std::size_t offset = 0; offset < stream_bytes; offset += kStepBytes) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const char* step = data + stream * stream_bytes + offset;
      sums[0] = _mm512_add_epi64(sums[0], _mm512_load_si512(step));
      sums[1] = _mm512_add_epi64(sums[1], _mm512_load_si512(step + 64));
      sums[2] = _mm512_add_epi64(sums[2], _mm512_load_si512(step + 128));
      sums[3] = _mm512_add_epi64(sums[3], _mm512_load_si512(step + 192));
    }
  }
  uint64_t words[8];
  const __m512i sum =
      _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
  _mm512_storeu_si512(words, sum);
  uint64_t total = 0;
  for (const uint64_t word : words) total += word;
  return total;
}
NUMA_MOE_TARGET_END

#elif defined(__aarch64__)

static uint64_t read_neon(const char* data, std::size_t bytes) {
  const std::size_t stream_bytes = bytes / kStreams;
  uint64x2_t sums[4] = {};
  for (std::size_t offset = 0; offset < stream_bytes; offset += kStepBytes) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const auto* step = reinterpret_cast<const uint64_t*>(data + stream * stream_bytes + offset);
      for (int load = 0; load < 16; load += 4) {
        sums[0] = vaddq_u64(sums[0], vld1q_u64(step + 2 * load));
        sums[1] = vaddq_u64(sums[1], vld1q_u64(step + 2 * load + 2));
        sums[2] = vaddq_u64(sums[2], vld1q_u64(step + 2 * load + 4));
        sums[3] = vaddq_u64(sums[3], vld1q_u64(step + 2 * load + 6));
      }
    }
  }
  return vaddvq_u64(vaddq_u64(vaddq_u64(sums[0], sums[1]), vaddq_u64(sums[2], sums[3])));
}

#endif

namespace {

struct Loads {
  const char* name;
  ReadFunction read;
};

Loads widest_loads() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"avx512", read_avx512};
  if (__builtin_cpu_supports("avx2")) return {"avx2", read_avx2};
#elif defined(__aarch64__)
  return {"neon", read_neon};
#endif
  return {"portable", read_portable};
}

// Part i of the buffer belongs to thread i.
class Buffer {
 public:
  Buffer(int num_threads, std::size_t bytes, std::vector<int> cpus)
      : num_threads_(num_threads),
        bytes_(bytes),
        cpus_(std::move(cpus)),
        part_bytes_((bytes / num_threads + kChunkBytes - 1) / kChunkBytes * kChunkBytes),
        // One slice per thread, of its own pages; where they lie is decided by the first write below.
        memory_(part_bytes_, std::vector<int>(num_threads, -1), HugePages::kTransparent) {
    time_threads(num_threads_, cpus_, 1, [this](int thread) {
      // Not zero: the zero page of the kernel could stand in for pages of zeros.
      std::memset(memory_.slice(thread), thread + 1, part_bytes_);
    });
  }

  bool fits(int num_threads, std::size_t bytes, const std::vector<int>& cpus) const {
    return num_threads == num_threads_ && bytes == bytes_ && cpus == cpus_;
  }

  // GB/s
  double measure() const {
    const ReadFunction read = widest_loads().read;
    std::atomic<uint64_t> total{0};
    const std::vector<double> seconds = time_threads(num_threads_, cpus_, kRepeats, [&](int thread) {
      total.fetch_add(read(memory_.slice(thread), part_bytes_), std::memory_order_relaxed);
    });
    return static_cast<double>(part_bytes_) * num_threads_ / median(seconds) / 1e9;
  }

 private:
  int num_threads_;
  std::size_t bytes_;
  std::vector<int> cpus_;
  std::size_t part_bytes_;
  PlacedRegion memory_;
};

}  // namespace

double read_bandwidth(int num_threads, std::size_t bytes, const std::vector<int>& cpus) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads must be at least 1, got " + std::to_string(num_threads));
  }
  if (bytes < kChunkBytes * num_threads) {
    throw std::invalid_argument("bytes must be at least " + std::to_string(kChunkBytes) +
                                " per thread, got " + std::to_string(bytes));
  }
  static std::mutex mutex;
  static std::unique_ptr<Buffer> buffer;
  const std::lock_guard lock(mutex);
  if (buffer == nullptr || !buffer->fits(num_threads, bytes, cpus)) {
    buffer.reset();  // first, so that there is room for the next
    buffer = std::make_unique<Buffer>(num_threads, bytes, cpus);
  }
  return buffer->measure();
}

std::string read_bandwidth_loads() { return widest_loads().name; }

}  // namespace numa_moe
