// The bf16 kernels with gemm on AMX, everything else as on AVX-512 with bf16.
#include <algorithm>
#include <atomic>

#include "kernels/amx.h"
#include "kernels/instruction_sets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace numa_moe {
namespace {

// Set once at start-up; atomic so that a late call is no data race.
std::atomic<Bfloat16Brgemm> bf16_brgemm{nullptr};
std::atomic<BrgemmRelease> brgemm_release{nullptr};

}  // namespace

void set_bf16_brgemm(Bfloat16Brgemm brgemm, BrgemmRelease release) {
  // Release order: a thread that sees the new brgemm sees its release function too.
  brgemm_release.store(release, std::memory_order_relaxed);
  bf16_brgemm.store(brgemm, std::memory_order_release);
}

#if defined(__x86_64__)
namespace amx {
namespace {

// oneDNN makes machine code for each number of rows that it meets (tens of microseconds, on each thread):
// whole blocks, then halves, bound that to a few.
constexpr int64_t kRowBlock = 64;  // four tiles of 16 rows
constexpr int64_t kSmallestRowBlock = 16;

bool cpu_has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) return false;
  uint32_t enabled_low = 0, enabled_high = 0;  // XCR0: register states that the kernel saves
  asm volatile("xgetbv" : "=a"(enabled_low), "=d"(enabled_high) : "c"(0));
  constexpr uint32_t kTileStates = 1u << 17 | 1u << 18;  // XTILECFG, XTILEDATA
  if ((enabled_low & kTileStates) != kTileStates) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & (kAmxBf16 | kAmxTile)) == (kAmxBf16 | kAmxTile);
}

void gemm(const GemmArgs& args) {
  const Bfloat16Brgemm brgemm = bf16_brgemm.load(std::memory_order_acquire);
  const BrgemmRelease release = brgemm_release.load(std::memory_order_relaxed);
  const auto* x = static_cast<const uint16_t*>(args.x);
  const auto* weights = static_cast<const char*>(args.weights);
  const int64_t k = (args.k + 1) / 2 * 2;  // x and weights hold zeros there
  int64_t block = kRowBlock;
  for (int64_t row = 0; row < args.rows; row += block) {
    const int64_t rows_left = args.rows - row;
    while (block > rows_left && block > kSmallestRowBlock) block /= 2;
    block = std::min(block, rows_left);
    for (int64_t panel = 0; panel < args.num_panels; ++panel) {
      brgemm(block, kPanelWidth, k, args.x_stride, kPanelWidth, args.out_stride, /*add_c=*/false,
             x + row * args.x_stride, reinterpret_cast<const uint16_t*>(weights + panel * args.panel_stride),
             args.out + row * args.out_stride + panel * kPanelWidth, /*is_vnni=*/true);
    }
  }
  if (release != nullptr && args.rows > 0) release();
}

}  // namespace

bool is_available() {
  static const bool has_amx = cpu_has_amx();
  return has_amx && bf16_brgemm.load(std::memory_order_acquire) != nullptr;
}

const KernelTable* find_table(WeightFormat format) {
  if (format != WeightFormat::kBfloat16) return nullptr;
  static const KernelTable table = [] {
    KernelTable result = *avx512bf16::find_table(WeightFormat::kBfloat16);
    result.instruction_set = InstructionSet::kAmx;
    result.gemm = &gemm;
    return result;
  }();
  return &table;
}

}  // namespace amx
#endif

}  // namespace numa_moe
