#include "memory/page_placement.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "memory/placed_region.h"
#include "memory/system_call_filter.h"

namespace numa_moe {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

int64_t pages_found(const PagePlacement& placement) {
  int64_t found = 0;
  for (const auto& [node, pages] : placement.pages_on_node) {
    EXPECT_GE(node, 0);
    EXPECT_GT(pages, 0);
    found += pages;
  }
  return found;
}

class PagePlacementTest : public testing::Test {
 protected:
  // 3000 ordinary pages: more than one call to the kernel, and no multiple of one.
  static constexpr std::size_t kPages = 3000;

  PagePlacementTest() : region_(kPages * page_bytes(), {-1}, HugePages::kNone) {}

  void SetUp() override {
    const PagePlacement found = query_page_placement(region_.data(), 1, 1);
    if (found.error != 0) GTEST_SKIP() << "the kernel doesn't tell where pages are, errno " << found.error;
  }

  void touch(std::size_t page) { region_.data()[page * page_bytes()] = 1; }

  PlacedRegion region_;
};

TEST_F(PagePlacementTest, UntouchedIsAbsent) {
  const PagePlacement found = query_page_placement(region_.data(), region_.slice_bytes(), 1 << 20);
  EXPECT_EQ(found.error, 0);
  EXPECT_EQ(found.source, PlacementSource::kMovePages);
  EXPECT_EQ(found.pages_sampled, static_cast<int64_t>(kPages));
  EXPECT_EQ(found.pages_absent, static_cast<int64_t>(kPages));
  EXPECT_TRUE(found.pages_on_node.empty());
}

TEST_F(PagePlacementTest, TouchedIsOnANode) {
  for (std::size_t page = 0; page < kPages; page += 3) touch(page);
  const PagePlacement found = query_page_placement(region_.data(), region_.slice_bytes(), kPages);
  EXPECT_EQ(found.error, 0);
  EXPECT_EQ(found.pages_sampled, static_cast<int64_t>(kPages));
  EXPECT_EQ(pages_found(found), 1000);
  EXPECT_EQ(found.pages_absent, 2000);
}

TEST_F(PagePlacementTest, OnlyReadIsAbsent) {
  // Reading maps the kernel's page of zeros, which is on no node of ours.
  int sum = 0;
  for (std::size_t page = 0; page < kPages; ++page) {
    sum += *static_cast<volatile char*>(region_.data() + page * page_bytes());
  }
  EXPECT_EQ(sum, 0);
  const PagePlacement found = query_page_placement(region_.data(), region_.slice_bytes(), kPages);
  EXPECT_EQ(found.error, 0);
  EXPECT_EQ(found.pages_absent, static_cast<int64_t>(kPages));
}

TEST_F(PagePlacementTest, UnmappedIsAbsent) {
  // The inaccessible margin before the region.
  const PagePlacement found = query_page_placement(region_.data() - page_bytes(), page_bytes(), 10);
  EXPECT_EQ(found.pages_sampled, 1);
  EXPECT_EQ(found.pages_absent, 1);
}

TEST_F(PagePlacementTest, SamplesFirstAndLastAndEvenlyBetween) {
  touch(0);
  touch(kPages - 1);
  for (const int64_t samples : {2, 3, 7, 100, 2999}) {
    const PagePlacement found = query_page_placement(region_.data(), region_.slice_bytes(), samples);
    EXPECT_EQ(found.pages_sampled, samples);
    EXPECT_EQ(pages_found(found), 2) << samples << " samples";
  }
  EXPECT_EQ(pages_found(query_page_placement(region_.data(), region_.slice_bytes(), 1)), 1);
  // The first half touched: half of any sample, to within a page.
  for (std::size_t page = 0; page < kPages / 2; ++page) touch(page);
  for (const int64_t samples : {10, 101, 1024, 1025}) {
    const int64_t found = pages_found(query_page_placement(region_.data(), region_.slice_bytes(), samples));
    EXPECT_LE(std::abs(2 * (found - 1) - samples), 2) << samples << " samples";
  }
}

TEST_F(PagePlacementTest, PagesOfAnUnalignedRange) {
  for (std::size_t page = 0; page < 4; ++page) touch(page);
  char* const data = region_.data();
  const std::size_t page = page_bytes();
  EXPECT_EQ(query_page_placement(data, 1, 100).pages_sampled, 1);
  EXPECT_EQ(query_page_placement(data + page - 1, 1, 100).pages_sampled, 1);
  EXPECT_EQ(query_page_placement(data + page - 1, 2, 100).pages_sampled, 2);
  EXPECT_EQ(query_page_placement(data + 1, page, 100).pages_sampled, 2);
  EXPECT_EQ(query_page_placement(data + 1, 2 * page, 100).pages_sampled, 3);
  EXPECT_EQ(query_page_placement(data, 2 * page, 100).pages_sampled, 2);
  EXPECT_EQ(pages_found(query_page_placement(data + 1, 2 * page, 100)), 3);
}

TEST_F(PagePlacementTest, NothingToAsk) {
  const PagePlacement found = query_page_placement(region_.data(), 0, 10);
  EXPECT_EQ(found.pages_sampled, 0);
  EXPECT_EQ(found.error, 0);
  EXPECT_EQ(found.source, PlacementSource::kNone);
}

TEST_F(PagePlacementTest, RefusesBadArguments) {
  EXPECT_THROW(query_page_placement(region_.data(), 100, 0), std::invalid_argument);
  EXPECT_THROW(query_page_placement(region_.data(), 100, -5), std::invalid_argument);
  EXPECT_THROW(query_page_placement(region_.data(), std::numeric_limits<std::size_t>::max(), 5),
               std::invalid_argument);
}

TEST_F(PagePlacementTest, HugeRangeIsSampledNotEnumerated) {
  const std::size_t bytes = std::size_t{1} << 46;
  void* const reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) GTEST_SKIP() << "no 64 TiB of address space";
  const PagePlacement found = query_page_placement(reserved, bytes, 1000);
  munmap(reserved, bytes);
  EXPECT_EQ(found.pages_sampled, 1000);
  EXPECT_EQ(found.pages_absent, 1000);
}

// For a child process: 0 when, without move_pages, the counts are those that move_pages gave.
int compare_with_numa_maps(int error) {
  const std::size_t page = page_bytes();
  const PlacedRegion region(5 * page, {-1, -1}, HugePages::kNone);
  std::memset(region.slice(0), 1, 2 * page);
  std::memset(region.slice(1), 1, 4 * page);
  const PagePlacement expected[] = {query_page_placement(region.slice(0), 5 * page, 100),
                                    query_page_placement(region.slice(1), 5 * page, 100)};
  if (!deny_system_calls({SYS_move_pages}, error)) return 0;
  for (const int i : {0, 1}) {
    const PagePlacement found = query_page_placement(region.slice(i), 5 * page, 100);
    if (found.error != 0 || found.source != PlacementSource::kNumaMaps) return 1;
    if (found.pages_on_node != expected[i].pages_on_node) return 2;
    if (found.pages_sampled != 5 || found.pages_absent != (i == 0 ? 3 : 1)) return 3;
  }
  return 0;
}

TEST_F(PagePlacementTest, FallsBackToNumaMaps) {
  if (access("/proc/self/numa_maps", R_OK) != 0) GTEST_SKIP() << "no /proc/self/numa_maps";
  for (const int error : {EPERM, ENOSYS}) {
    EXPECT_EXIT(std::exit(compare_with_numa_maps(error)), testing::ExitedWithCode(0), "");
  }
}

// For a child process: 0 when the refusal is reported, since numa_maps can't tell the share of a range
// that is a small part of a mapping.
int query_part_of_a_mapping() {
  const PlacedRegion region(std::size_t{64} << 20, {-1}, HugePages::kNone);
  std::memset(region.data(), 1, page_bytes());
  if (!deny_system_calls({SYS_move_pages}, EPERM)) return 0;
  const PagePlacement found = query_page_placement(region.data(), page_bytes(), 100);
  if (found.error != EPERM || found.source != PlacementSource::kNone) return 1;
  return found.pages_sampled == 0 && found.pages_on_node.empty() ? 0 : 2;
}

TEST_F(PagePlacementTest, SaysWhyWhenNothingCanTell) {
  EXPECT_EXIT(std::exit(query_part_of_a_mapping()), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace numa_moe
