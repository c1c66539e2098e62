// Kernels in plain C++, for any CPU, and the reference for the bits of the others.
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/instruction_sets.h"
#include "kernels/quantization.h"
#include "kernels/target.h"

namespace numa_moe::portable {

static constexpr InstructionSet kInstructionSet = InstructionSet::kPortable;

// clang-format off: the vector type first
#include "kernels/vector_portable.inl"
#include "kernels/kernels.inl"
// clang-format on

}  // namespace numa_moe::portable
