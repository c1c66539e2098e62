// What each file of kernels offers to dispatch.cpp: its table for a format, or null if it has nothing of
// its own for it. Calling a table's functions on a CPU without the instruction set is the caller's fault.
#pragma once

#include "kernels/kernels.h"

namespace numa_moe {

namespace portable {
const KernelTable* find_table(WeightFormat format);
}

#if defined(__x86_64__)
namespace avx2 {
const KernelTable* find_table(WeightFormat format);
}
namespace avx512 {
const KernelTable* find_table(WeightFormat format);
}
namespace avx512bf16 {
const KernelTable* find_table(WeightFormat format);
}
namespace amx {
const KernelTable* find_table(WeightFormat format);
bool is_available();  // the CPU and the kernel have AMX-BF16, and a brgemm was set
}  // namespace amx
#elif defined(__aarch64__)
namespace neon {
const KernelTable* find_table(WeightFormat format);
}
namespace neon_bf16 {
const KernelTable* find_table(WeightFormat format);
}
#endif

}  // namespace numa_moe
