#include "pool/affinity.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <memory>

namespace numa_moe {
namespace {

// A kernel refuses to write its mask to a shorter one, and CPU numbers may be sparse: masks start with
// room for what cpu_set_t holds and grow. No Linux port is configured for as many as the limit.
constexpr int kFirstMaskCpus = 1024;
constexpr int kMostMaskCpus = 1 << 16;

struct FreeMask {
  void operator()(cpu_set_t* mask) const { CPU_FREE(mask); }
};
using Mask = std::unique_ptr<cpu_set_t, FreeMask>;

Mask empty_mask(int num_cpus) {
  Mask mask(CPU_ALLOC(num_cpus));
  if (mask != nullptr) CPU_ZERO_S(CPU_ALLOC_SIZE(num_cpus), mask.get());
  return mask;
}

}  // namespace

int pin_calling_thread(int cpu) noexcept {
  if (cpu < 0 || cpu >= kMostMaskCpus) return EINVAL;
  const int num_cpus = cpu < kFirstMaskCpus ? kFirstMaskCpus : cpu + 1;
  const Mask mask = empty_mask(num_cpus);
  if (mask == nullptr) return ENOMEM;
  const std::size_t size = CPU_ALLOC_SIZE(num_cpus);
  CPU_SET_S(static_cast<std::size_t>(cpu), size, mask.get());
  return sched_setaffinity(0, size, mask.get()) == 0 ? 0 : errno;
}

std::vector<int> allowed_cpus(pid_t thread_id) {
  for (int num_cpus = kFirstMaskCpus; num_cpus <= kMostMaskCpus; num_cpus *= 2) {
    const Mask mask = empty_mask(num_cpus);
    if (mask == nullptr) return {};
    const std::size_t size = CPU_ALLOC_SIZE(num_cpus);
    if (sched_getaffinity(thread_id, size, mask.get()) == 0) {
      std::vector<int> cpus;
      for (int cpu = 0; cpu < num_cpus; ++cpu) {
        if (CPU_ISSET_S(static_cast<std::size_t>(cpu), size, mask.get())) cpus.push_back(cpu);
      }
      return cpus;
    }
    if (errno != EINVAL) return {};  // EINVAL: the mask is shorter than the kernel's
  }
  return {};
}

pid_t calling_thread_id() noexcept { return static_cast<pid_t>(syscall(SYS_gettid)); }

}  // namespace numa_moe
