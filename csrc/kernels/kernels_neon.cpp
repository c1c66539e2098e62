// Kernels for NEON, which every AArch64 CPU has.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "kernels/instruction_sets.h"
#include "kernels/quantization.h"
#include "kernels/target.h"

namespace numa_moe::neon {

static constexpr InstructionSet kInstructionSet = InstructionSet::kNeon;

// clang-format off: the vector type first
#include "kernels/vector_neon.inl"
#include "kernels/kernels.inl"
// clang-format on

}  // namespace numa_moe::neon

#endif
