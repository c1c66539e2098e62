// The kernel's NUMA memory policy calls, by number: libnuma is not needed to build or to run.
#pragma once

#include <cstddef>

namespace numa_moe {

// Binds [address, address + bytes), page-aligned, to one node: strictly (MPOL_BIND) or as far as the node
// has free pages (MPOL_PREFERRED). Pages that were touched before stay where they are. Returns 0 or errno:
// EPERM where a container forbids the call, ENOSYS where the kernel lacks it, EINVAL for a node that
// doesn't exist or that the process may not use. Any node number >= 0 is good.
int bind_memory(void* address, std::size_t bytes, int node, bool strict);

// Whether a node can take this many more bytes without coming near to out of memory: free pages and page
// cache of files, less a margin. False as well when the kernel doesn't say.
bool node_has_room(int node, std::size_t bytes);

}  // namespace numa_moe
