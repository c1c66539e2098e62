// All kernels, written once: a file of kernels includes this after its vector type.

// clang-format off: each needs what comes before it
#include "kernels/weights.inl"
#include "kernels/tile.inl"
#include "kernels/gemm.inl"
#include "kernels/math.inl"
#include "kernels/rows.inl"
#include "kernels/activation.inl"
#if !defined(NUMA_MOE_BFLOAT16_DOT) || defined(NUMA_MOE_BFLOAT16_CODES)
#include "kernels/codes.inl"
#include "kernels/scales.inl"
#if defined(NUMA_MOE_BFLOAT16_CODES)
#include "kernels/bfloat16_codes_avx512.inl"
#endif
#include "kernels/quantized_gemm.inl"
#endif
#include "kernels/tables.inl"
// clang-format on
