#include "probe/compute_peak.h"

#include <cstdint>
#include <stdexcept>

#include "kernels/target.h"
#include "probe/timed_threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#define NUMA_MOE_UNROLL _Pragma("unroll")
#else
#define NUMA_MOE_UNROLL _Pragma("GCC unroll 24")
#endif

// A loop of `num_sums` independent sums, enough to hide the latency of `step`, which adds to `sum`. The empty
// asm keeps every sum in a register, and keeps the compiler from computing equal sums only once.
#define NUMA_MOE_PEAK_LOOP(name, Vector, num_sums, register_class, step) \
  static void name(int64_t iterations) {                                 \
    Vector sums[num_sums] = {};                                          \
    for (int64_t iteration = 0; iteration < iterations; ++iteration) {   \
      NUMA_MOE_UNROLL                                                    \
      for (int index = 0; index < (num_sums); ++index) {                 \
        Vector sum = sums[index];                                        \
        sum = step;                                                      \
        __asm__ volatile("" : "+" register_class(sum));                  \
        sums[index] = sum;                                               \
      }                                                                  \
    }                                                                    \
  }

namespace numa_moe {

constexpr int kFewSums = 12;  // of 16 registers, two of which hold the factors
constexpr int kManySums = 24;  // of 32 registers

#if defined(__x86_64__)

// SSE2, which every x86-64 CPU has: a * b + sum in two instructions. Factors below 1 keep sums finite.
NUMA_MOE_PEAK_LOOP(fp32_sse2, __m128, kFewSums, "x",
                   _mm_add_ps(_mm_mul_ps(sum, _mm_set1_ps(0.5f)), _mm_set1_ps(1.0f)))

NUMA_MOE_TARGET_BEGIN("avx2,fma")
NUMA_MOE_PEAK_LOOP(fp32_avx2, __m256, kFewSums, "x",
                   _mm256_fmadd_ps(_mm256_set1_ps(0.5f), _mm256_set1_ps(0.25f), sum))
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("avx512f")
NUMA_MOE_PEAK_LOOP(fp32_avx512, __m512, kManySums, "v",
                   _mm512_fmadd_ps(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f), sum))
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512bf16")
NUMA_MOE_PEAK_LOOP(bf16_avx512, __m512, kManySums, "v",
                   _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi16(0x3f00),  // 0.5
                                    (__m512bh)_mm512_set1_epi16(0x3e80)))  // 0.25
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("avx512f,avx512vnni")
NUMA_MOE_PEAK_LOOP(int8_avx512, __m512i, kManySums, "v",
                   _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(0x03030303), _mm512_set1_epi32(0x05050505)))
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("avx2,avxvnni")
NUMA_MOE_PEAK_LOOP(int8_avx, __m256i, kFewSums, "x",
                   _mm256_dpbusd_avx_epi32(sum, _mm256_set1_epi32(0x03030303), _mm256_set1_epi32(0x05050505)))
NUMA_MOE_TARGET_END

#elif defined(__aarch64__)

NUMA_MOE_PEAK_LOOP(fp32_neon, float32x4_t, kManySums, "w",
                   vfmaq_f32(sum, vdupq_n_f32(0.5f), vdupq_n_f32(0.25f)))

// About 0.5 and 0.25: for those themselves g++ 12 writes an instruction that takes another extension.
NUMA_MOE_TARGET_BEGIN("arch=armv8.2-a+bf16")
NUMA_MOE_PEAK_LOOP(bf16_neon, float32x4_t, kManySums, "w",
                   vbfmmlaq_f32(sum, vreinterpretq_bf16_u16(vdupq_n_u16(0x3f01)),
                                vreinterpretq_bf16_u16(vdupq_n_u16(0x3e81))))
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("arch=armv8.2-a+dotprod")
NUMA_MOE_PEAK_LOOP(int8_neon_dot, int32x4_t, kManySums, "w", vdotq_s32(sum, vdupq_n_s8(3), vdupq_n_s8(5)))
NUMA_MOE_TARGET_END

NUMA_MOE_TARGET_BEGIN("arch=armv8.2-a+i8mm")
NUMA_MOE_PEAK_LOOP(int8_neon_matrix, int32x4_t, kManySums, "w", vmmlaq_s32(sum, vdupq_n_s8(3), vdupq_n_s8(5)))
NUMA_MOE_TARGET_END

#else

NUMA_MOE_PEAK_LOOP(fp32_scalar, float, kFewSums, "r", sum * 0.5f + 1.0f)

#endif

namespace {

constexpr int64_t kIterations = 2'000'000;  // milliseconds: far above what starting the threads takes
constexpr int kRepeats = 5;

struct PeakLoop {
  void (*run)(int64_t iterations);
  int operations_per_iteration;
};

#if defined(__x86_64__)

bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  // CPUID leaf 7, subleaf 1, EAX bit 4; that the kernel saves the registers is part of the "avx2" check.
  return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

PeakLoop find_loop(const std::string& kind) {
  if (kind == "fp32") {
    if (__builtin_cpu_supports("avx512f")) return {fp32_avx512, kManySums * 16 * 2};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {fp32_avx2, kFewSums * 8 * 2};
    return {fp32_sse2, kFewSums * 4 * 2};
  }
  if (kind == "bf16") {
    if (__builtin_cpu_supports("avx512bf16")) return {bf16_avx512, kManySums * 32 * 2};
    return {nullptr, 0};
  }
  if (__builtin_cpu_supports("avx512vnni")) return {int8_avx512, kManySums * 64 * 2};
  if (has_avx_vnni()) return {int8_avx, kFewSums * 32 * 2};
  return {nullptr, 0};
}

#elif defined(__aarch64__)

// Bits of asm/hwcap.h that older C libraries lack.
constexpr unsigned long kHwcapDotProduct = 1UL << 20;   // HWCAP_ASIMDDP
constexpr unsigned long kHwcap2Int8Matrix = 1UL << 13;  // HWCAP2_I8MM
constexpr unsigned long kHwcap2Bf16 = 1UL << 14;        // HWCAP2_BF16

PeakLoop find_loop(const std::string& kind) {
  if (kind == "fp32") return {fp32_neon, kManySums * 4 * 2};
  if (kind == "bf16") {
    // A 2 x 4 by 4 x 2 product.
    if (getauxval(AT_HWCAP2) & kHwcap2Bf16) return {bf16_neon, kManySums * 16 * 2};
    return {nullptr, 0};
  }
  if (getauxval(AT_HWCAP2) & kHwcap2Int8Matrix) return {int8_neon_matrix, kManySums * 32 * 2};
  if (getauxval(AT_HWCAP) & kHwcapDotProduct) return {int8_neon_dot, kManySums * 16 * 2};
  return {nullptr, 0};
}

#else

PeakLoop find_loop(const std::string& kind) {
  if (kind == "fp32") return {fp32_scalar, kFewSums * 2};
  return {nullptr, 0};
}

#endif

}  // namespace

std::optional<double> compute_peak(const std::string& kind, int num_threads, const std::vector<int>& cpus) {
  if (kind != "fp32" && kind != "bf16" && kind != "int8") {
    throw std::invalid_argument("kind must be fp32, bf16 or int8, got " + kind);
  }
  const PeakLoop loop = find_loop(kind);
  if (loop.run == nullptr) return std::nullopt;
  const std::vector<double> seconds =
      time_threads(num_threads, cpus, kRepeats, [&](int) { loop.run(kIterations); });
  const double operations = static_cast<double>(kIterations) * loop.operations_per_iteration * num_threads;
  return operations / median(seconds) / 1e9;
}

}  // namespace numa_moe
