#include "memory/page_placement.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/process_maps.h"

namespace numa_moe {
namespace {

// Pages asked of the kernel in one call: it holds the lock on the process's mappings meanwhile.
constexpr std::size_t kPagesPerCall = 1024;

// The sample's pages, ascending: index i of n is page i * (pages - 1) / (n - 1).
std::vector<void*> sample_pages(uintptr_t first_page, uint64_t pages, uint64_t page_bytes, uint64_t samples) {
  samples = std::min(samples, pages);
  std::vector<void*> sampled(samples);
  // Whole steps and remainder apart, since i * (pages - 1) may overflow.
  const uint64_t gaps = samples > 1 ? samples - 1 : 1;
  const uint64_t step = (pages - 1) / gaps;
  const uint64_t remainder = (pages - 1) % gaps;
  for (uint64_t i = 0; i < samples; ++i) {
    const uint64_t page = i * step + i * remainder / gaps;
    sampled[i] = reinterpret_cast<void*>(first_page + page * page_bytes);
  }
  return sampled;
}

// Adds the pages up in the placement. Returns 0 or errno.
int query_move_pages(std::vector<void*>& pages, PagePlacement* placement) {
  std::vector<int> status(std::min(pages.size(), kPagesPerCall));
  for (std::size_t begin = 0; begin < pages.size(); begin += kPagesPerCall) {
    const std::size_t count = std::min(kPagesPerCall, pages.size() - begin);
    // A status that the kernel didn't write counts as refused.
    std::fill(status.begin(), status.end(), -EPERM);
    if (syscall(SYS_move_pages, 0, count, pages.data() + begin, nullptr, status.data(), 0) != 0) return errno;
    for (std::size_t i = 0; i < count; ++i) {
      if (status[i] >= 0) {
        ++placement->pages_on_node[status[i]];
      } else if (status[i] == -ENOENT || status[i] == -EFAULT) {
        // Not there; or EFAULT: only read so far (the shared page of zeros), or not mapped.
        ++placement->pages_absent;
      } else {
        return -status[i];
      }
      ++placement->pages_sampled;
    }
  }
  placement->source = PlacementSource::kMovePages;
  return 0;
}

}  // namespace

PagePlacement query_page_placement(const void* address, std::size_t bytes, int64_t max_samples) {
  if (max_samples < 1) {
    throw std::invalid_argument("max_samples must be at least 1, got " + std::to_string(max_samples));
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (bytes > std::numeric_limits<uintptr_t>::max() - begin) {
    throw std::invalid_argument("bytes must end within the address space, got " + std::to_string(bytes));
  }
  PagePlacement placement;
  if (bytes == 0) return placement;
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first_page = begin / page_bytes * page_bytes;
  const uint64_t pages = (begin + bytes - 1 - first_page) / page_bytes + 1;
  const auto samples = static_cast<uint64_t>(max_samples);
  std::vector<void*> sampled = sample_pages(first_page, pages, page_bytes, samples);
  const int error = query_move_pages(sampled, &placement);
  if (error == 0) return placement;

  placement = PagePlacement{};
  placement.error = error;
  const MappingPages counted = count_mapping_pages(begin, bytes);
  if (!counted.found) return placement;
  placement.error = 0;
  placement.source = PlacementSource::kNumaMaps;
  int64_t present = 0;
  for (const auto& [node, node_bytes] : counted.bytes_on_node) {
    const auto node_pages = static_cast<int64_t>(node_bytes / page_bytes);
    placement.pages_on_node[node] = node_pages;
    present += node_pages;
  }
  placement.pages_sampled = std::max(static_cast<int64_t>(pages), present);
  placement.pages_absent = placement.pages_sampled - present;
  return placement;
}

}  // namespace numa_moe
