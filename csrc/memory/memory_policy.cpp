#include "memory/memory_policy.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace numa_moe {
namespace {

// Left over on a node after a strict binding, for the kernel's own needs there (its watermarks are well
// below) and for whatever else allocates between this look and the last first touch.
constexpr uint64_t kStrictBindingMarginBytes = uint64_t{128} << 20;

}  // namespace

int bind_memory(void* address, std::size_t bytes, int node, bool strict) {
  constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
  const auto bit = static_cast<std::size_t>(node);
  std::vector<unsigned long> mask(bit / kWordBits + 1);
  mask.back() = 1UL << (bit % kWordBits);
  // The kernel takes one off maxnode before it reads the mask.
  const unsigned long maxnode = mask.size() * kWordBits + 1;
  // Static: when the cpuset's memory nodes change, the kernel otherwise renumbers the policy's node by its
  // place in the set. The CPUs that this slice's workers are pinned to don't move along, so neither may it.
  const int mode = (strict ? MPOL_BIND : MPOL_PREFERRED) | MPOL_F_STATIC_NODES;
  if (syscall(SYS_mbind, address, bytes, mode, mask.data(), maxnode, 0U) == 0) return 0;
  return errno;
}

bool node_has_room(int node, std::size_t bytes) {
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
  uint64_t available = 0;
  // Lines such as "Node 0 MemFree:  123456 kB". Cached files can be dropped, and a strict binding makes the
  // kernel do so; tmpfs is not counted among the file pages here.
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string label, id, key;
    uint64_t kilobytes = 0;
    if (!(words >> label >> id >> key >> kilobytes)) continue;
    if (key == "MemFree:" || key == "Active(file):" || key == "Inactive(file):") available += kilobytes << 10;
  }
  return available >= kStrictBindingMarginBytes && available - kStrictBindingMarginBytes >= bytes;
}

}  // namespace numa_moe
