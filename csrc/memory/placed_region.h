// Anonymous memory cut into slices, each bound to its own NUMA node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace numa_moe {

enum class HugePages : uint8_t {
  kNone,         // ordinary pages, even where the kernel would give transparent huge pages unasked
  kTransparent,  // madvise(MADV_HUGEPAGE); what the kernel grants is a matter of luck
  kExplicit,     // MAP_HUGETLB pages that the administrator reserved; kTransparent if there are too few
};

// How a slice's memory was bound, argued in placed_region.cpp.
enum class BindingPolicy : uint8_t {
  kNone,    // no node was asked for, or mbind failed: first touch decides
  kStrict,  // MPOL_BIND: the node reclaims page cache rather than letting a page go elsewhere
  kPrefer,  // MPOL_PREFERRED: the node lacks room, and a strict binding would end in the OOM killer
};

// One slice of a region, as it came to be.
struct SliceBinding {
  int node;              // the node asked for, or -1: anywhere
  int bind_error;        // errno of mbind, 0 when it succeeded or none was asked for
  BindingPolicy policy;  // what is in force
};

class PlacedRegion {
 public:
  // Maps nodes.size() slices of slice_bytes each. slice_stride() is slice_bytes rounded up to the page
  // size (to 2 MiB when a slice is at least that large). Ordinary and transparent huge pages are not
  // touched: the first write to a page decides where it lands, within the policy set here. A node counts as
  // having room if it has for untouched_bytes more: what the caller has mapped, or is about to map, for the
  // same slice and not written yet (other regions). Explicit huge
  // pages are populated here, on the slice's node, because one that is missing later would be a SIGBUS.
  //
  // Slices below 2 MiB get ordinary pages whatever was asked for. Explicit huge pages fall back to
  // transparent ones when the pool, or that of one slice's node, is short, when mbind is refused for a
  // slice with a node, and before Linux 5.14.
  //
  // Throws std::invalid_argument (no bytes, no nodes, a node below -1), std::bad_alloc (the address space
  // or the overcommit limit is exhausted) or std::system_error. That a node can't be had (no such node,
  // not allowed, no permission, no mempolicy in this kernel) is no exception: see bindings().
  PlacedRegion(std::size_t slice_bytes, const std::vector<int>& nodes, HugePages huge_pages,
               std::size_t untouched_bytes = 0);
  ~PlacedRegion();  // unmaps
  PlacedRegion(const PlacedRegion&) = delete;
  PlacedRegion& operator=(const PlacedRegion&) = delete;

  char* data() const { return data_; }
  char* slice(std::size_t index) const { return data_ + index * slice_stride_; }
  std::size_t num_slices() const { return bindings_.size(); }
  std::size_t slice_bytes() const { return slice_bytes_; }
  std::size_t slice_stride() const { return slice_stride_; }
  std::size_t total_bytes() const { return total_bytes_; }  // num_slices() * slice_stride()
  const std::vector<SliceBinding>& bindings() const { return bindings_; }
  HugePages huge_pages() const { return huge_pages_; }  // kExplicit only when all slices have them

 private:
  void reserve_address_space();
  bool map_explicit_huge_pages();
  void map_pages(HugePages huge_pages);
  void bind_slices(std::size_t untouched_bytes);

  std::size_t slice_bytes_;
  std::size_t slice_stride_ = 0;
  std::size_t total_bytes_ = 0;
  std::vector<SliceBinding> bindings_;
  HugePages huge_pages_ = HugePages::kNone;
  void* reservation_ = nullptr;  // address space around the slices, its margins inaccessible
  std::size_t reservation_bytes_ = 0;
  char* data_ = nullptr;
};

}  // namespace numa_moe
