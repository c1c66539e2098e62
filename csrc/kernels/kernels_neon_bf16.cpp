// The bf16 kernels for NEON with the bf16 dot product (FEAT_BF16, Armv8.6): activations stay bf16, and
// each multiply-add takes a pair of k.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "kernels/instruction_sets.h"
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
NUMA_MOE_INLINE Vector dot_bfloat16(Bits weights, Bits x, Vector sum) {
  return {vbfdotq_f32(sum.value, vreinterpretq_bf16_u32(weights.value), vreinterpretq_bf16_u32(x.value))};
}

#include "kernels/kernels.inl"

}  // namespace numa_moe::neon_bf16
NUMA_MOE_TARGET_END

#endif
