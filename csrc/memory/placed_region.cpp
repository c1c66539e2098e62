#include "memory/placed_region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <stdexcept>
#include <system_error>

#include "memory/memory_policy.h"

// Older C libraries lack these; the numbers are the kernel's (linux/mman.h, linux/hugetlb_encode.h).
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif

namespace numa_moe {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t round_up(std::size_t value, std::size_t multiple) {
  if (value > std::numeric_limits<std::size_t>::max() - (multiple - 1)) throw std::bad_alloc();
  return (value + multiple - 1) / multiple * multiple;
}

std::size_t multiply(std::size_t left, std::size_t right) {
  if (right != 0 && left > std::numeric_limits<std::size_t>::max() / right) throw std::bad_alloc();
  return left * right;
}

[[noreturn]] void throw_errno(const char* what) {
  if (errno == ENOMEM) throw std::bad_alloc();
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

// What is chosen here, and why:
//
// Strict or preferred. MPOL_PREFERRED goes to another node as soon as the slice's node is out of free
// pages, even if most of it is page cache (that of the very files that the weights are read from);
// MPOL_BIND reclaims the cache first. But where the node has no room at all MPOL_BIND calls the OOM
// killer, so it is used only where the slice fits. Both keep automatic NUMA balancing off these pages.
//
// Explicit huge pages. mmap reserves them from the sum over all nodes, so a node that has too few is only
// found out at the first touch, by SIGBUS. MADV_POPULATE_WRITE (Linux 5.14) fails instead. They are mapped
// shared: after a fork, a copy-on-write that finds the pool empty would kill the child.
PlacedRegion::PlacedRegion(std::size_t slice_bytes, const std::vector<int>& nodes, HugePages huge_pages,
                           std::size_t untouched_bytes)
    : slice_bytes_(slice_bytes) {
  if (slice_bytes == 0) throw std::invalid_argument("slice_bytes must be at least 1");
  if (nodes.empty()) throw std::invalid_argument("nodes must name one node per slice, got none");
  for (const int node : nodes) {
    if (node < -1) {
      throw std::invalid_argument("nodes must be -1 (anywhere) or a node number, got " +
                                  std::to_string(node));
    }
    bindings_.push_back({node, 0, BindingPolicy::kNone});
  }
  const bool large = slice_bytes >= kHugePageBytes;
  slice_stride_ = round_up(slice_bytes, large ? std::max(kHugePageBytes, page_bytes()) : page_bytes());
  reserve_address_space();
  try {
    if (large && huge_pages == HugePages::kExplicit && map_explicit_huge_pages()) return;
    map_pages(large ? huge_pages : HugePages::kNone);
    bind_slices(untouched_bytes);
  } catch (...) {
    munmap(reservation_, reservation_bytes_);
    throw;
  }
}

PlacedRegion::~PlacedRegion() { munmap(reservation_, reservation_bytes_); }

// Slices start at a multiple of 2 MiB, for huge pages. The rest of the reservation stays inaccessible, at
// least a page on each side, so that no mapping of somebody else's becomes one with a slice's in
// /proc/self/numa_maps. Reserved address space costs no memory.
void PlacedRegion::reserve_address_space() {
  const std::size_t alignment = std::max(kHugePageBytes, page_bytes());
  const std::size_t margin = multiply(2, alignment);
  total_bytes_ = multiply(num_slices(), slice_stride_);
  if (total_bytes_ > std::numeric_limits<std::size_t>::max() - margin) throw std::bad_alloc();
  reservation_bytes_ = total_bytes_ + margin;
  reservation_ =
      mmap(nullptr, reservation_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reservation_ == MAP_FAILED) throw_errno("mmap of address space");
  // At least a page and at most alignment past the start, which leaves alignment or more behind the slices.
  const auto begin = reinterpret_cast<uintptr_t>(reservation_) + page_bytes();
  data_ = reinterpret_cast<char*>((begin + alignment - 1) / alignment * alignment);
}

// True when every slice consists of explicit huge pages that are there, on the slice's node if it has one.
bool PlacedRegion::map_explicit_huge_pages() {
  bool complete = true;
  for (std::size_t index = 0; index < num_slices() && complete; ++index) {
    SliceBinding& binding = bindings_[index];
    complete = mmap(slice(index), slice_stride_, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0) != MAP_FAILED;
    if (complete && binding.node >= 0) {
      // Huge pages of the pool are nobody's but ours to take: a strict binding can't call the OOM killer.
      binding.bind_error = bind_memory(slice(index), slice_stride_, binding.node, /*strict=*/true);
      binding.policy = BindingPolicy::kStrict;
      // Unbound, they would be populated on the node of this thread.
      complete = binding.bind_error == 0;
    }
    complete = complete && madvise(slice(index), slice_stride_, MADV_POPULATE_WRITE) == 0;
  }
  if (complete) {
    huge_pages_ = HugePages::kExplicit;
    return true;
  }
  for (SliceBinding& binding : bindings_) binding = {binding.node, 0, BindingPolicy::kNone};
  if (mmap(data_, total_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    throw_errno("mmap in place of huge pages");
  }
  return false;
}

void PlacedRegion::map_pages(HugePages huge_pages) {
  // Mapped anew rather than by mprotect, so that the overcommit limit is asked now and not at a touch.
  if (mmap(data_, total_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    throw_errno("mmap");
  }
  // Without mbind, neighbouring slices would be a single mapping, and the kernel's counts of pages per node
  // (/proc/self/numa_maps) those of both. Every other slice is told apart by a flag that changes nothing
  // for a running process: it is left out of core dumps.
  for (std::size_t index = 1; index < num_slices(); index += 2) {
    static_cast<void>(madvise(slice(index), slice_stride_, MADV_DONTDUMP));
  }
  // Refused by a kernel without transparent huge pages. Where they are set to "never" it succeeds in vain;
  // where they are set to "always", ordinary pages have to be asked for.
  const bool ordinary = huge_pages == HugePages::kNone;
  const int advised = madvise(data_, total_bytes_, ordinary ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  if (!ordinary && advised == 0) huge_pages_ = HugePages::kTransparent;
}

void PlacedRegion::bind_slices(std::size_t untouched_bytes) {
  for (std::size_t index = 0; index < num_slices(); ++index) {
    SliceBinding& binding = bindings_[index];
    if (binding.node < 0) continue;
    // All slices of this region on the same node have to fit there.
    const auto sharing = static_cast<std::size_t>(
        std::count_if(bindings_.begin(), bindings_.end(),
                      [&](const SliceBinding& other) { return other.node == binding.node; }));
    const bool strict = node_has_room(binding.node, multiply(sharing, slice_stride_) + untouched_bytes);
    binding.bind_error = bind_memory(slice(index), slice_stride_, binding.node, strict);
    if (binding.bind_error == 0) binding.policy = strict ? BindingPolicy::kStrict : BindingPolicy::kPrefer;
  }
}

}  // namespace numa_moe
