#include "kernels/guarded_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace numa_moe::test {

GuardedMemory::GuardedMemory(size_t bytes, Flush flush) : size_(bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inside = (bytes + page - 1) / page * page;
  mapping_bytes_ = inside + 2 * page;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(mapping);
  if (inside > 0 && mprotect(mapping_ + page, inside, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  data_ = mapping_ + page + (flush == Flush::kToEnd ? inside - bytes : 0);
}

GuardedMemory::~GuardedMemory() { munmap(mapping_, mapping_bytes_); }

}  // namespace numa_moe::test
