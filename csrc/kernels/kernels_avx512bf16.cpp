// The bf16 kernels for AVX-512 with its bf16 dot product: activations stay bf16, and each multiply-add
// takes a pair of k.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header leaves lanes that it masks off undefined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(NUMA_MOE_EMULATE_X86)
#include "emulated_avx512.h"
#else
#include <immintrin.h>
#endif

#include "kernels/instruction_sets.h"
#include "kernels/quantization.h"
#include "kernels/target.h"

NUMA_MOE_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")
namespace numa_moe::avx512bf16 {

static constexpr InstructionSet kInstructionSet = InstructionSet::kAvx512Bf16;

#include "kernels/vector_avx512.inl"

#define NUMA_MOE_BFLOAT16_DOT
#define NUMA_MOE_BFLOAT16_CODES
// In assembly for the same reason as accumulate().
NUMA_MOE_INLINE Vector dot_bfloat16(Bits weights, Bits x, Vector sum) {
#if defined(NUMA_MOE_EMULATE_X86)
  return {emulated::dpbf16_ps(sum.value, weights.value, x.value)};
#else
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.value) : "v"(weights.value), "v"(x.value));
  return sum;
#endif
}

#include "kernels/kernels.inl"

}  // namespace numa_moe::avx512bf16
NUMA_MOE_TARGET_END

#endif
