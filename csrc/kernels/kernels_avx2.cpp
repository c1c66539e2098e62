// Kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include "kernels/instruction_sets.h"
#include "kernels/quantization.h"
#include "kernels/target.h"

NUMA_MOE_TARGET_BEGIN("avx2,fma,f16c")
namespace numa_moe::avx2 {

static constexpr InstructionSet kInstructionSet = InstructionSet::kAvx2;

// clang-format off: the vector type first
#include "kernels/vector_avx2.inl"
#include "kernels/kernels.inl"
// clang-format on

}  // namespace numa_moe::avx2
NUMA_MOE_TARGET_END

#endif
