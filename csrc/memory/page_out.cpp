#include "memory/page_out.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

// Older C libraries lack it; the number is the kernel's (asm-generic/mman-common.h).
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

namespace numa_moe {

int page_out(const void* address, std::size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(address);
  const uintptr_t begin = (first + page - 1) / page * page;
  const uintptr_t end = (first + bytes) / page * page;
  if (end <= begin) return 0;
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT) == 0 ? 0 : errno;
}

}  // namespace numa_moe
