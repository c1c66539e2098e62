// What /proc/self tells about the mappings of this process, for where system calls are refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <map>
#include <vector>

namespace numa_moe {

// The pages of the mappings that a range fills.
struct MappingPages {
  bool found = false;  // false: not readable, or a mapping reaches far beyond the range
  std::map<int, uint64_t> bytes_on_node;  // node -> bytes of pages there
};

// Counts a range's pages per node from /proc/self/numa_maps. The kernel counts whole mappings, so a range
// counts as found only if the mappings it overlaps reach at most 2 MiB beyond it on either side, as the
// slices of a PlacedRegion do. The kernel walks all pages of the process for it: seconds, for hundreds of
// GiB in 4 KiB pages.
MappingPages count_mapping_pages(uintptr_t address, std::size_t bytes);

// The same from given texts of /proc/<pid>/maps and /proc/<pid>/numa_maps.
MappingPages count_mapping_pages(std::istream& maps, std::istream& numa_maps, uintptr_t address,
                                 std::size_t bytes);

// Bytes of the mappings that a range fills that are in memory, and those of them in huge pages.
struct HugePageUse {
  bool found = false;  // as in MappingPages
  uint64_t resident_bytes = 0;
  uint64_t huge_bytes = 0;  // transparent or explicit
};

struct MemoryRange {
  uintptr_t address;
  std::size_t bytes;
};

// Per range, from one look at /proc/self/smaps, with the same rule for what counts as found and the same
// cost.
std::vector<HugePageUse> count_huge_pages(const std::vector<MemoryRange>& ranges);

// The same from a given text of /proc/<pid>/smaps.
std::vector<HugePageUse> count_huge_pages(std::istream& smaps, const std::vector<MemoryRange>& ranges);

}  // namespace numa_moe
