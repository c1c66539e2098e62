// Kernels for AVX-512 without its bf16 instructions.
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

NUMA_MOE_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace numa_moe::avx512 {

static constexpr InstructionSet kInstructionSet = InstructionSet::kAvx512;

// clang-format off: the vector type first
#include "kernels/vector_avx512.inl"
#include "kernels/kernels.inl"
// clang-format on

}  // namespace numa_moe::avx512
NUMA_MOE_TARGET_END

#endif
