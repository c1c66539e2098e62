// All kernels, written once: a file of kernels includes this after its vector type.

// clang-format off: each needs what comes before it
#include "kernels/weights.inl"
#include "kernels/tile.inl"
#include "kernels/gemm.inl"
#include "kernels/math.inl"
#include "kernels/rows.inl"
#include "kernels/activation.inl"
#include "kernels/tables.inl"
// clang-format on
