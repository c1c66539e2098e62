// Hands libtorch's bf16 brgemm (oneDNN's microkernel, which drives AMX) to the kernels when the extension
// is loaded.
//
// The function isn't part of the stable ABI, so it is declared here as a weak symbol: null, and AMX unused,
// on a libtorch that no longer has it.
#include <cstdint>

#include "kernels/amx.h"

namespace c10 {
struct BFloat16;
}

namespace at::native::cpublas {
[[gnu::weak]] void brgemm(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c,
                          bool add_c, const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
[[gnu::weak]] void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

namespace numa_moe {
namespace {

// Overloads are told apart by their type, which also fixes the mangled name that is looked up.
using TorchBrgemm = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const c10::BFloat16*,
                             const c10::BFloat16*, float*, bool);

void call_brgemm(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add_c,
                 const uint16_t* a, const uint16_t* b, float* c, bool is_vnni) {
  at::native::cpublas::brgemm(m, n, k, ld_a, ld_b, ld_c, add_c, reinterpret_cast<const c10::BFloat16*>(a),
                              reinterpret_cast<const c10::BFloat16*>(b), c, is_vnni);
}

void call_release() { at::native::cpublas::brgemm_release(/*is_vnni=*/true); }

[[gnu::constructor]] void offer_brgemm() {
  const TorchBrgemm brgemm = &at::native::cpublas::brgemm;
  void (*release)(bool) = &at::native::cpublas::brgemm_release;
  if (brgemm != nullptr && release != nullptr) set_bf16_brgemm(&call_brgemm, &call_release);
}

}  // namespace
}  // namespace numa_moe
