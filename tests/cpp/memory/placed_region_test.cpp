#include "memory/placed_region.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <vector>

#include "memory/page_placement.h"
#include "memory/process_mappings.h"
#include "memory/system_call_filter.h"

namespace numa_moe {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// What is accessible of [begin, end) at the time of the call.
std::size_t accessible_bytes(uintptr_t begin, uintptr_t end) {
  std::size_t bytes = 0;
  for (const ProcessMapping& mapping : process_mappings()) {
    const uintptr_t from = std::max(begin, mapping.begin);
    const uintptr_t to = std::min(end, mapping.end);
    if (from < to && mapping.permissions[0] == 'r') bytes += to - from;
  }
  return bytes;
}

bool is_mapped(uintptr_t begin, uintptr_t end) {
  const auto mappings = process_mappings();
  return std::any_of(mappings.begin(), mappings.end(), [&](const ProcessMapping& mapping) {
    return mapping.begin < end && begin < mapping.end;
  });
}

TEST(PlacedRegion, SizesAndAlignment) {
  struct Case {
    std::size_t slice_bytes;
    std::size_t stride;
    std::size_t alignment;
  };
  const std::size_t page = page_bytes();
  const std::vector<Case> cases = {
      {1, page, page},
      {page, page, page},
      {page + 1, 2 * page, page},
      {2 * kMiB - 1, 2 * kMiB, page},
      {2 * kMiB, 2 * kMiB, 2 * kMiB},
      {2 * kMiB + 1, 4 * kMiB, 2 * kMiB},
      {5 * kMiB, 6 * kMiB, 2 * kMiB},
  };
  for (const Case& expected : cases) {
    for (const std::size_t slices : {1, 2, 3, 8}) {
      SCOPED_TRACE(expected.slice_bytes);
      const PlacedRegion region(expected.slice_bytes, std::vector<int>(slices, -1), HugePages::kTransparent);
      EXPECT_EQ(region.num_slices(), slices);
      EXPECT_EQ(region.slice_bytes(), expected.slice_bytes);
      EXPECT_EQ(region.slice_stride(), expected.stride);
      EXPECT_EQ(region.total_bytes(), slices * expected.stride);
      EXPECT_EQ(region.data(), region.slice(0));
      for (std::size_t i = 0; i < slices; ++i) {
        EXPECT_EQ(number(region.slice(i)), number(region.data()) + i * expected.stride);
        EXPECT_EQ(number(region.slice(i)) % expected.alignment, 0u);
      }
    }
  }
}

TEST(PlacedRegion, EveryByteOfEverySliceIsZeroThenWritable) {
  for (const HugePages pages : {HugePages::kNone, HugePages::kTransparent, HugePages::kExplicit}) {
    for (const std::size_t slice_bytes : {std::size_t{100}, 3 * kMiB}) {
      const PlacedRegion region(slice_bytes, {-1, -1, -1}, pages);
      const char zero = 0;
      for (std::size_t i = 0; i < region.total_bytes(); ++i) ASSERT_EQ(region.data()[i], zero) << i;
      for (std::size_t i = 0; i < 3; ++i) std::memset(region.slice(i), static_cast<int>(i) + 1, slice_bytes);
      for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t j = 0; j < slice_bytes; ++j) {
          ASSERT_EQ(region.slice(i)[j], static_cast<char>(i + 1)) << "slice " << i << " byte " << j;
        }
      }
    }
  }
}

TEST(PlacedRegion, TouchesNothing) {
  for (const HugePages pages : {HugePages::kNone, HugePages::kTransparent}) {
    const PlacedRegion region(4 * kMiB, {-1, 0, -1}, pages);
    const PagePlacement found = query_page_placement(region.data(), region.total_bytes(), 100000);
    if (found.error != 0) GTEST_SKIP() << "the kernel doesn't tell where pages are, errno " << found.error;
    EXPECT_EQ(found.pages_sampled, static_cast<int64_t>(region.total_bytes() / page_bytes()));
    EXPECT_EQ(found.pages_absent, found.pages_sampled);
  }
}

TEST(PlacedRegion, UnmapsOnDestruction) {
  // A part of the address space that is far larger than what else comes and goes in this test.
  const std::size_t slice_bytes = 64 * kMiB;
  uintptr_t begin = 0, end = 0;
  {
    const PlacedRegion region(slice_bytes, {-1, -1}, HugePages::kTransparent);
    begin = number(region.data());
    end = begin + region.total_bytes();
    EXPECT_EQ(accessible_bytes(begin, end), region.total_bytes());
    // The margins that keep other mappings apart.
    EXPECT_EQ(accessible_bytes(begin - page_bytes(), begin), 0u);
    EXPECT_EQ(accessible_bytes(end, end + page_bytes()), 0u);
    EXPECT_TRUE(is_mapped(begin - page_bytes(), begin));
    EXPECT_TRUE(is_mapped(end, end + page_bytes()));
  }
  EXPECT_FALSE(is_mapped(begin - page_bytes(), end + page_bytes()));
}

TEST(PlacedRegion, SlicesAreMappingsOfTheirOwn) {
  // What the kernel counts per mapping (/proc/self/numa_maps, smaps) has to be that of one slice, without
  // any mbind and between regions as well.
  const PlacedRegion first(2 * kMiB, {-1, -1, -1}, HugePages::kNone);
  const PlacedRegion second(2 * kMiB, {-1, -1}, HugePages::kNone);
  const auto mappings = process_mappings();
  for (const PlacedRegion* region : {&first, &second}) {
    for (std::size_t i = 0; i < region->num_slices(); ++i) {
      const uintptr_t begin = number(region->slice(i));
      const uintptr_t end = begin + region->slice_stride();
      EXPECT_TRUE(std::any_of(
          mappings.begin(), mappings.end(),
          [&](const ProcessMapping& mapping) { return mapping.begin == begin && mapping.end == end; }))
          << "slice " << i;
    }
  }
}

TEST(PlacedRegion, RefusesBadArguments) {
  EXPECT_THROW(PlacedRegion(0, {-1}, HugePages::kNone), std::invalid_argument);
  EXPECT_THROW(PlacedRegion(4096, {}, HugePages::kNone), std::invalid_argument);
  EXPECT_THROW(PlacedRegion(4096, {0, -2}, HugePages::kNone), std::invalid_argument);
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const HugePages pages : {HugePages::kNone, HugePages::kTransparent, HugePages::kExplicit}) {
    EXPECT_THROW(PlacedRegion(most, {-1}, pages), std::bad_alloc);             // rounding up wraps
    EXPECT_THROW(PlacedRegion(most - 4 * kMiB, {-1}, pages), std::bad_alloc);  // the margins wrap
    EXPECT_THROW(PlacedRegion(most / 2, {-1, -1, -1}, pages), std::bad_alloc);  // the product wraps
    EXPECT_THROW(PlacedRegion(most / 4, {-1}, pages), std::bad_alloc);         // no such address space
  }
}

#ifndef NUMA_MOE_SANITIZED  // they map memory of their own with each exception
TEST(PlacedRegion, FailureLeavesNothingMapped) {
  const std::size_t before = process_mappings().size();
  int failures = 0;
  for (int i = 0; i < 200; ++i) {
    try {
      // The address space is there (32 TiB of 128), the memory is not: the overcommit limit refuses.
      const PlacedRegion region(std::size_t{1} << 45, {-1}, HugePages::kNone);
    } catch (const std::bad_alloc&) {
      ++failures;
    }
  }
  if (failures == 0) GTEST_SKIP() << "this machine grants any amount of memory";
  EXPECT_LE(process_mappings().size(), before + 2);
}
#endif

TEST(PlacedRegion, NodeThatDoesNotExistIsRecorded) {
  // 64 and 1000: a mask of one word, or one cut off there, would have bound node 0 or none.
  for (const int node : {64, 127, 1000, 1023, 5000, 100000, std::numeric_limits<int>::max()}) {
    const PlacedRegion region(2 * kMiB, {node, -1}, HugePages::kTransparent);
    ASSERT_EQ(region.bindings().size(), 2u);
    EXPECT_EQ(region.bindings()[0].node, node);
    EXPECT_NE(region.bindings()[0].bind_error, 0) << node;
    EXPECT_EQ(region.bindings()[0].policy, BindingPolicy::kNone);
    EXPECT_EQ(region.bindings()[1].node, -1);
    EXPECT_EQ(region.bindings()[1].bind_error, 0);
    std::memset(region.data(), 1, region.total_bytes());
  }
}

TEST(PlacedRegion, PolicyInForceIsThatOfTheBinding) {
  const PlacedRegion region(2 * kMiB, {0, -1}, HugePages::kNone);
  if (region.bindings()[0].bind_error != 0)
    GTEST_SKIP() << "mbind: errno " << region.bindings()[0].bind_error;
  int mode = -1;
  unsigned long mask[1024 / (8 * sizeof(unsigned long))] = {};
  if (syscall(SYS_get_mempolicy, &mode, mask, 1024UL, region.slice(0), MPOL_F_ADDR) != 0) {
    GTEST_SKIP() << "get_mempolicy: errno " << errno;
  }
  const bool strict = region.bindings()[0].policy == BindingPolicy::kStrict;
  EXPECT_EQ(mode, (strict ? MPOL_BIND : MPOL_PREFERRED) | MPOL_F_STATIC_NODES);
  EXPECT_EQ(mask[0], 1u);
  ASSERT_EQ(syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, region.slice(1), MPOL_F_ADDR), 0);
  EXPECT_EQ(mode, MPOL_DEFAULT);
  EXPECT_EQ(region.bindings()[1].policy, BindingPolicy::kNone);
}

// For a child process: 0 when the refusal is recorded and the memory can be used.
int map_without_mempolicy(HugePages pages, int error) {
  if (!deny_system_calls({SYS_mbind, SYS_set_mempolicy, SYS_get_mempolicy, SYS_move_pages}, error)) return 0;
  const PlacedRegion region(3 * kMiB, {0, -1}, pages);
  std::memset(region.data(), 1, region.total_bytes());
  const SliceBinding& bound = region.bindings()[0];
  if (bound.bind_error != error || bound.policy != BindingPolicy::kNone) return 1;
  if (region.bindings()[1].bind_error != 0) return 2;
  return region.huge_pages() != HugePages::kExplicit ? 0 : 3;
}

TEST(PlacedRegion, RefusedMempolicyIsRecorded) {
  for (const int error : {EPERM, ENOSYS}) {
    for (const HugePages pages : {HugePages::kNone, HugePages::kTransparent, HugePages::kExplicit}) {
      EXPECT_EXIT(std::exit(map_without_mempolicy(pages, error)), testing::ExitedWithCode(0), "");
    }
  }
}

TEST(PlacedRegion, SmallSlicesGetOrdinaryPages) {
  for (const HugePages pages : {HugePages::kNone, HugePages::kTransparent, HugePages::kExplicit}) {
    EXPECT_EQ(PlacedRegion(kMiB, {-1}, pages).huge_pages(), HugePages::kNone);
  }
  EXPECT_EQ(PlacedRegion(2 * kMiB, {-1}, HugePages::kNone).huge_pages(), HugePages::kNone);
}

TEST(PlacedRegion, ExplicitHugePagesNeverFault) {
  // However many pages are reserved on this machine (usually none): more than that falls back, and every
  // byte can be written.
  const PlacedRegion region(64 * kMiB, {-1, 0}, HugePages::kExplicit);
  std::memset(region.data(), 1, region.total_bytes());
  EXPECT_EQ(region.data()[region.total_bytes() - 1], 1);
}

TEST(PlacedRegion, ChildOfAForkSeesTheData) {
  const PlacedRegion region(2 * kMiB, {-1}, HugePages::kTransparent);
  std::memset(region.data(), 42, region.total_bytes());
  const pid_t child = fork();
  if (child == 0) {
    char* const end = region.data() + region.total_bytes();
    _exit(std::all_of(region.data(), end, [](char byte) { return byte == 42; }) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace numa_moe
