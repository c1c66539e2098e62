// Which instruction sets this CPU has, and the table that serves a format on one of them.
#include <stdexcept>

#include "kernels/instruction_sets.h"
#include "kernels/kernels.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace numa_moe {
namespace {

struct Candidate {
  InstructionSet instruction_set;
  bool (*is_supported)();
  const KernelTable* (*find_table)(WeightFormat format);
};

bool always() { return true; }

#if defined(__x86_64__)
// By cpuid: clang 14 doesn't know the name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
// The compiler's run-time library also asks whether the kernel saves the wider registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#if defined(NUMA_MOE_EMULATE_X86)
bool has_avx512() { return has_avx2(); }
bool has_avx512bf16() { return has_avx2(); }
#else
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
// All but Cooper Lake have both.
bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif
bool has_amx() { return has_avx512bf16() && amx::is_available(); }
#elif defined(__aarch64__)
bool has_neon_bf16() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#endif

// In ascending order of preference.
constexpr Candidate kCandidates[] = {
    {InstructionSet::kPortable, always, portable::find_table},
#if defined(__x86_64__)
    {InstructionSet::kAvx2, has_avx2, avx2::find_table},
    {InstructionSet::kAvx512, has_avx512, avx512::find_table},
    {InstructionSet::kAvx512Bf16, has_avx512bf16, avx512bf16::find_table},
    {InstructionSet::kAmx, has_amx, amx::find_table},
#elif defined(__aarch64__)
    {InstructionSet::kNeon, always, neon::find_table},
    {InstructionSet::kNeonBf16, has_neon_bf16, neon_bf16::find_table},
#endif
};

// From this many rows on AMX is used. Below, weights are needed no faster than memory brings them, and
// tiles of 16 rows would be mostly empty. A round number: to be measured on a machine with AMX.
constexpr int64_t kFewestRowsForAmx = 16;

}  // namespace

std::vector<InstructionSet> supported_instruction_sets() {
  std::vector<InstructionSet> result;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.is_supported()) result.push_back(candidate.instruction_set);
  }
  return result;
}

const KernelTable& kernel_table(WeightFormat format, InstructionSet instruction_set) {
  const KernelTable* best = nullptr;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.instruction_set > instruction_set) break;
    const KernelTable* table = candidate.find_table(format);
    if (table != nullptr) best = table;
  }
  if (best == nullptr) throw std::invalid_argument("unknown weight format");
  return *best;
}

const KernelTable& kernel_table_for_rows(WeightFormat format, InstructionSet instruction_set, int64_t rows) {
  const bool too_few = instruction_set == InstructionSet::kAmx && rows < kFewestRowsForAmx;
  return kernel_table(format, too_few ? InstructionSet::kAvx512Bf16 : instruction_set);
}

}  // namespace numa_moe
