#include "limits.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using numa_moe::InstructionSet;
using numa_moe::WeightFormat;

void read_memory(const char* begin, int64_t bytes) {
  using Words = uint64_t __attribute__((vector_size(16)));
  constexpr int64_t kStreams = 4, kChunk = 128;
  const int64_t stream_bytes = bytes / kStreams;
  Words sum[8] = {};
  for (int64_t offset = 0; offset < stream_bytes; offset += kChunk) {
#pragma GCC unroll 4
    for (int64_t stream = 0; stream < kStreams; ++stream) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        Words words;
        std::memcpy(&words, begin + stream * stream_bytes + offset + i * 16, sizeof(words));
        sum[i] ^= words;
      }
    }
  }
  for (Words& part : sum) asm volatile("" : : "r"(&part) : "memory");
}

namespace {

#if defined(__x86_64__)
// Independent chains: twice the latency of four cycles times two units, and more than enough registers.
#define NUMA_MOE_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define NUMA_MOE_CLOBBERS                                                                                  \
  "rcx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
      "xmm14", "xmm15"
#define NUMA_MOE_REPEAT(TURNS, CLEAR, MULTIPLY)                                                         \
  asm volatile("mov %0, %%rcx\n\t" NUMA_MOE_TWELVE(CLEAR) CLEAR(14)                                     \
                   CLEAR(15) "1:\n\t" NUMA_MOE_TWELVE(MULTIPLY) "dec %%rcx\n\tjnz 1b\n\tvzeroupper\n\t" \
               :                                                                                        \
               : "r"(TURNS)                                                                             \
               : NUMA_MOE_CLOBBERS)

#define NUMA_MOE_CLEAR_YMM(i) "vxorps %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n\t"
#define NUMA_MOE_FMA_YMM(i) "vfmadd231ps %%ymm15, %%ymm14, %%ymm" #i "\n\t"
#define NUMA_MOE_CLEAR_ZMM(i) "vpxord %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n\t"
#define NUMA_MOE_FMA_ZMM(i) "vfmadd231ps %%zmm15, %%zmm14, %%zmm" #i "\n\t"
#define NUMA_MOE_DOT_ZMM(i) "vdpbf16ps %%zmm15, %%zmm14, %%zmm" #i "\n\t"

constexpr int64_t kChains = 12;
#endif

}  // namespace

int64_t multiply_registers(InstructionSet instruction_set, WeightFormat format, int64_t multiply_adds) {
#if defined(__x86_64__)
  if (instruction_set < InstructionSet::kAvx2 || instruction_set > InstructionSet::kAvx512Bf16) return 0;
  const bool dot = instruction_set == InstructionSet::kAvx512Bf16 && format == WeightFormat::kBfloat16;
  const int64_t per_turn = kChains * (instruction_set == InstructionSet::kAvx2 ? 8 : dot ? 32 : 16);
  const int64_t turns = multiply_adds / per_turn + 1;
  if (instruction_set == InstructionSet::kAvx2) {
    NUMA_MOE_REPEAT(turns, NUMA_MOE_CLEAR_YMM, NUMA_MOE_FMA_YMM);
  } else if (dot) {
    NUMA_MOE_REPEAT(turns, NUMA_MOE_CLEAR_ZMM, NUMA_MOE_DOT_ZMM);
  } else {
    NUMA_MOE_REPEAT(turns, NUMA_MOE_CLEAR_ZMM, NUMA_MOE_FMA_ZMM);
  }
  return turns * per_turn;
#else
  (void)instruction_set;
  (void)format;
  (void)multiply_adds;
  return 0;
#endif
}
