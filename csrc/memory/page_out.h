// Giving back memory that a checkpoint's file takes.
#pragma once

#include <cstddef>

namespace numa_moe {

// Asks the kernel to take the whole pages of [address, address + bytes) out of memory (MADV_PAGEOUT): pages
// of a mapped file leave the page cache too, and are read again should anybody look. Contents never change.
// Returns 0 or errno: EINVAL before Linux 5.4.
int page_out(const void* address, std::size_t bytes);

}  // namespace numa_moe
