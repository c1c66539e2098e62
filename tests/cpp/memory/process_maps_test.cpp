#include "memory/process_maps.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace numa_moe {
namespace {

constexpr uintptr_t kBegin = 0x7f1200000000;
constexpr std::size_t kMiB = std::size_t{1} << 20;

// Two slices of 4 MiB, between mappings of others.
const char* const kMaps =
    "55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]\n"
    "7f11ffe00000-7f1200000000 ---p 00000000 00:00 0 \n"
    "7f1200000000-7f1200400000 rw-p 00000000 00:00 0 \n"
    "7f1200400000-7f1200800000 rw-p 00000000 00:00 0 \n"
    "7f1200800000-7f1200a00000 ---p 00000000 00:00 0 \n"
    "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]\n"
    "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n";
const char* const kNumaMaps =
    "55d000000000 default heap anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n"
    "7f11ffe00000 default\n"
    "7f1200000000 bind=static:0 anon=1024 dirty=1024 N0=1020 N12=4 kernelpagesize_kB=4\n"
    "7f1200400000 bind=static:1 anon=2 dirty=2 N1=2 kernelpagesize_kB=2048\n"
    "7f1200800000 default\n"
    "7ffc00000000 default stack anon=5 dirty=5 N0=5 kernelpagesize_kB=4\n";

MappingPages count(uintptr_t address, std::size_t bytes, const std::string& numa_maps = kNumaMaps) {
  std::istringstream maps(kMaps);
  std::istringstream counts(numa_maps);
  return count_mapping_pages(maps, counts, address, bytes);
}

TEST(ProcessMaps, CountsOneSlice) {
  const MappingPages first = count(kBegin, 4 * kMiB);
  EXPECT_TRUE(first.found);
  EXPECT_EQ(first.bytes_on_node, (std::map<int, uint64_t>{{0, 1020 * 4096}, {12, 4 * 4096}}));
  // Less than the whole slice: the rest is padding.
  const MappingPages second = count(kBegin + 4 * kMiB, 3 * kMiB);
  EXPECT_TRUE(second.found);
  EXPECT_EQ(second.bytes_on_node, (std::map<int, uint64_t>{{1, 2 * 2048 * 1024}}));
}

TEST(ProcessMaps, CountsBothSlices) {
  const MappingPages both = count(kBegin, 8 * kMiB);
  EXPECT_TRUE(both.found);
  EXPECT_EQ(both.bytes_on_node,
            (std::map<int, uint64_t>{{0, 1020 * 4096}, {1, 2 * 2048 * 1024}, {12, 4 * 4096}}));
}

TEST(ProcessMaps, TellsNothingOfAPartOfAMapping) {
  EXPECT_FALSE(count(kBegin, kMiB).found);             // 3 MiB more behind
  EXPECT_FALSE(count(kBegin + 3 * kMiB, kMiB).found);  // 3 MiB more before
  EXPECT_TRUE(count(kBegin, 2 * kMiB).found);
  EXPECT_TRUE(count(kBegin + 2 * kMiB, 2 * kMiB).found);
}

TEST(ProcessMaps, TellsNothingOfWhatIsNotThere) {
  EXPECT_FALSE(count(0x1000, 4096).found);
  EXPECT_FALSE(count(kBegin, 4 * kMiB, "").found);
  // A mapping came or went between the two files.
  EXPECT_FALSE(count(kBegin, 8 * kMiB, "7f1200000000 default anon=1 N0=1 kernelpagesize_kB=4\n").found);
}

TEST(ProcessMaps, SkipsWhatItDoesNotKnow) {
  const MappingPages pages = count(kBegin, 4 * kMiB,
                                   "7f1200000000 default Nonsense=7 N=8 N0x=9 file=/N5=6 N3=2 active=0 "
                                   "kernelpagesize_kB=64\n");
  EXPECT_TRUE(pages.found);
  EXPECT_EQ(pages.bytes_on_node, (std::map<int, uint64_t>{{3, 2 * 64 * 1024}}));
}

const char* const kSmaps =
    "7f11ffe00000-7f1200000000 ---p 00000000 00:00 0 \n"
    "Size:               2048 kB\n"
    "Rss:                   0 kB\n"
    "VmFlags: mr mw me nr sd \n"
    "7f1200000000-7f1200400000 rw-p 00000000 00:00 0 \n"
    "Size:               4096 kB\n"
    "Rss:                3072 kB\n"
    "Pss:                3072 kB\n"
    "AnonHugePages:      2048 kB\n"
    "Shared_Hugetlb:        0 kB\n"
    "Private_Hugetlb:       0 kB\n"
    "VmFlags: rd wr mr mw me ac sd hg \n"
    "7f1200400000-7f1200800000 rw-s 00000000 00:0f 1  /anon_hugepage (deleted)\n"
    "Size:               4096 kB\n"
    "Rss:                   0 kB\n"
    "AnonHugePages:         0 kB\n"
    "Shared_Hugetlb:     1024 kB\n"
    "Private_Hugetlb:    3072 kB\n";

HugePageUse huge_pages(uintptr_t address, std::size_t bytes) {
  std::istringstream smaps(kSmaps);
  return count_huge_pages(smaps, {{address, bytes}}).front();
}

TEST(ProcessMaps, CountsHugePages) {
  const HugePageUse transparent = huge_pages(kBegin, 4 * kMiB);
  EXPECT_TRUE(transparent.found);
  EXPECT_EQ(transparent.resident_bytes, 3 * kMiB);
  EXPECT_EQ(transparent.huge_bytes, 2 * kMiB);
  const HugePageUse reserved = huge_pages(kBegin + 4 * kMiB, 4 * kMiB);
  EXPECT_TRUE(reserved.found);
  EXPECT_EQ(reserved.resident_bytes, 4 * kMiB);
  EXPECT_EQ(reserved.huge_bytes, 4 * kMiB);
  EXPECT_EQ(huge_pages(kBegin, 8 * kMiB).huge_bytes, 6 * kMiB);
  EXPECT_FALSE(huge_pages(kBegin, kMiB).found);
  EXPECT_FALSE(huge_pages(0x1000, 4096).found);
}

TEST(ProcessMaps, CountsHugePagesOfSeveralRangesAtOnce) {
  std::istringstream smaps(kSmaps);
  const std::vector<HugePageUse> uses = count_huge_pages(
      smaps, {{kBegin + 4 * kMiB, 4 * kMiB}, {0x1000, 4096}, {kBegin, kMiB}, {kBegin, 4 * kMiB}});
  ASSERT_EQ(uses.size(), 4u);
  EXPECT_EQ(uses[0].huge_bytes, 4 * kMiB);
  EXPECT_FALSE(uses[1].found);
  EXPECT_FALSE(uses[2].found);
  EXPECT_EQ(uses[2].resident_bytes, 0u);
  EXPECT_EQ(uses[3].huge_bytes, 2 * kMiB);
}

}  // namespace
}  // namespace numa_moe
