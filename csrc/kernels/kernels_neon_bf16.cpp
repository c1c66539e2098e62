// The bf16 kernels for NEON with the bf16 dot product (FEAT_BF16, Armv8.6): activations stay bf16, and
// each multiply-add takes a pair of k.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "kernels/instruction_sets.h"
#include "kernels/quantization.h"
#include "kernels/target.h"

#if defined(__clang__)
NUMA_MOE_TARGET_BEGIN("bf16")
#else
NUMA_MOE_TARGET_BEGIN("arch=armv8.2-a+bf16")
#endif
namespace numa_moe::neon_bf16 {

static constexpr InstructionSet kInstructionSet = InstructionSet::kNeonBf16;

#include "kernels/vector_neon.inl"

#define NUMA_MOE_BFLOAT16_DOT
// In assembly for the same reason as accumulate().
NUMA_MOE_INLINE Vector dot_bfloat16(Bits weights, Bits x, Vector sum) {
  asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum.value) : "w"(weights.value), "w"(x.value));
  return sum;
}

#include "kernels/kernels.inl"

}  // namespace numa_moe::neon_bf16
NUMA_MOE_TARGET_END

#endif
