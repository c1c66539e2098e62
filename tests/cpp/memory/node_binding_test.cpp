// On machines with two or more NUMA nodes with memory; skipped elsewhere. Those that use up a node's
// memory or reserve huge pages run only where NUMA_MOE_GUEST says that the machine is a guest for tests
// (tests/guest.py sets it).
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "memory/page_placement.h"
#include "memory/placed_region.h"
#include "memory/process_maps.h"
#include "memory/system_call_filter.h"

namespace numa_moe {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
const char* const kNodes = "/sys/devices/system/node/";

// "0,2-3" as numbers.
std::vector<int> read_list(const std::string& path) {
  std::vector<int> numbers;
  std::ifstream file(path);
  for (std::string part; std::getline(file, part, ',');) {
    if (part.find_first_of("0123456789") == std::string::npos) continue;
    const std::size_t dash = part.find('-');
    const int first = std::stoi(part);
    const int last = dash == std::string::npos ? first : std::stoi(part.substr(dash + 1));
    for (int number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

std::vector<int> nodes_with_memory() { return read_list(std::string(kNodes) + "has_memory"); }

std::vector<int> cpus_of(int node) {
  return read_list(kNodes + ("node" + std::to_string(node)) + "/cpulist");
}

std::size_t total_bytes_of(int node) {
  std::ifstream file(kNodes + ("node" + std::to_string(node)) + "/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string label, id, key;
    std::size_t kilobytes = 0;
    if (words >> label >> id >> key >> kilobytes && key == "MemTotal:") return kilobytes << 10;
  }
  return 0;
}

bool is_test_guest() { return std::getenv("NUMA_MOE_GUEST") != nullptr; }

class NodeBinding : public testing::Test {
 protected:
  void SetUp() override {
    if (nodes_.size() < 2)
      GTEST_SKIP() << "this machine has " << nodes_.size() << " NUMA node(s) with memory";
  }

  const std::vector<int> nodes_ = nodes_with_memory();
};

// Every page of every slice is on the slice's node.
void expect_all_local(const PlacedRegion& region, const std::vector<int>& nodes) {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const PagePlacement found = query_page_placement(region.slice(i), region.slice_bytes(), 1 << 20);
    ASSERT_EQ(found.error, 0);
    EXPECT_EQ(found.pages_absent, 0);
    const auto pages = static_cast<int64_t>((region.slice_bytes() + page_bytes - 1) / page_bytes);
    EXPECT_EQ(found.pages_on_node, (std::map<int, int64_t>{{nodes[i], pages}})) << "slice " << i;
    // The second witness.
    const MappingPages counted =
        count_mapping_pages(reinterpret_cast<uintptr_t>(region.slice(i)), region.slice_bytes());
    ASSERT_TRUE(counted.found);
    EXPECT_EQ(counted.bytes_on_node.size(), 1u);
    EXPECT_EQ(counted.bytes_on_node.begin()->first, nodes[i]);
  }
}

TEST_F(NodeBinding, TouchedByOneThreadEverySliceIsOnItsNode) {
  for (const HugePages pages : {HugePages::kNone, HugePages::kTransparent}) {
    for (const std::size_t slice_bytes : {std::size_t{5000}, 6 * kMiB + 1}) {
      const PlacedRegion region(slice_bytes, nodes_, pages);
      for (const SliceBinding& binding : region.bindings()) {
        if (binding.bind_error == EPERM) GTEST_SKIP() << "mbind is not permitted";
        EXPECT_EQ(binding.bind_error, 0);
        EXPECT_EQ(binding.policy, BindingPolicy::kStrict) << "node " << binding.node;
      }
      for (std::size_t i = 0; i < nodes_.size(); ++i) std::memset(region.slice(i), 1, slice_bytes);
      expect_all_local(region, nodes_);
    }
  }
}

TEST_F(NodeBinding, SlicesInReverseOrderOfNodes) {
  const std::vector<int> reversed(nodes_.rbegin(), nodes_.rend());
  const PlacedRegion region(3 * kMiB, reversed, HugePages::kTransparent);
  if (region.bindings()[0].bind_error == EPERM) GTEST_SKIP() << "mbind is not permitted";
  std::memset(region.data(), 1, region.total_bytes());
  expect_all_local(region, reversed);
}

// For a child process: 0 when first touch by threads on each node's CPUs placed the slices.
int place_by_first_touch(const std::vector<int>& nodes) {
  if (!deny_system_calls({SYS_mbind, SYS_set_mempolicy, SYS_get_mempolicy, SYS_move_pages}, EPERM)) return 0;
  const PlacedRegion region(6 * kMiB, nodes, HugePages::kTransparent);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    std::thread([&, i] {
      cpu_set_t mask;
      CPU_ZERO(&mask);
      CPU_SET(static_cast<std::size_t>(cpus_of(nodes[i]).front()), &mask);
      if (sched_setaffinity(0, sizeof(mask), &mask) == 0)
        std::memset(region.slice(i), 1, region.slice_bytes());
    }).join();
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (region.bindings()[i].bind_error != EPERM) return 1;
    const PagePlacement found = query_page_placement(region.slice(i), region.slice_bytes(), 1000);
    if (found.error != 0 || found.source != PlacementSource::kNumaMaps) return 2;
    if (found.pages_on_node.size() != 1 || found.pages_on_node.begin()->first != nodes[i]) return 3;
  }
  return 0;
}

TEST_F(NodeBinding, FirstTouchPlacesWithoutMempolicy) {
  std::vector<int> nodes;
  for (const int node : nodes_) {
    if (!cpus_of(node).empty()) nodes.push_back(node);
  }
  if (nodes.size() < 2) GTEST_SKIP() << "this machine has one NUMA node with memory and CPUs";
  EXPECT_EXIT(std::exit(place_by_first_touch(nodes)), testing::ExitedWithCode(0), "");
}

// More than the node has: the binding is not strict, nothing is killed, and the rest is found elsewhere.
TEST_F(NodeBinding, OverfullNodeSpillsInsteadOfCallingTheOomKiller) {
  if (!is_test_guest()) GTEST_SKIP() << "fills a node: only in a guest for tests (NUMA_MOE_GUEST)";
  const int small = total_bytes_of(nodes_[0]) < total_bytes_of(nodes_[1]) ? nodes_[0] : nodes_[1];
  const int large = small == nodes_[0] ? nodes_[1] : nodes_[0];
  const std::size_t slice_bytes = total_bytes_of(small) + 32 * kMiB;
  if (slice_bytes + 512 * kMiB > total_bytes_of(small) + total_bytes_of(large))
    GTEST_SKIP() << "no room at all";
  const PlacedRegion region(slice_bytes, {small}, HugePages::kNone);
  ASSERT_EQ(region.bindings()[0].bind_error, 0);
  EXPECT_EQ(region.bindings()[0].policy, BindingPolicy::kPrefer);
  std::memset(region.data(), 1, slice_bytes);
  const PagePlacement found = query_page_placement(region.data(), slice_bytes, 2000);
  ASSERT_EQ(found.error, 0);
  EXPECT_EQ(found.pages_absent, 0);
  EXPECT_GT(found.pages_on_node.at(small), 0);
  EXPECT_GT(found.pages_on_node.size(), 1u);
}

// Two regions of a layer are mapped before either is written: each has to count the other in, or the one
// bound strictly finds the node filled by the one that wasn't, and the OOM killer is called.
TEST_F(NodeBinding, ARegionCountsInWhatIsMappedButNotWritten) {
  if (!is_test_guest()) GTEST_SKIP() << "fills a node: only in a guest for tests (NUMA_MOE_GUEST)";
  const int small = total_bytes_of(nodes_[0]) < total_bytes_of(nodes_[1]) ? nodes_[0] : nodes_[1];
  const int large = small == nodes_[0] ? nodes_[1] : nodes_[0];
  // The first is too large for the node, the second alone would not be.
  const std::size_t first_bytes = total_bytes_of(small) + 32 * kMiB;
  const std::size_t second_bytes = 64 * kMiB;
  if (first_bytes + second_bytes + 512 * kMiB > total_bytes_of(small) + total_bytes_of(large))
    GTEST_SKIP() << "no room at all";
  const PlacedRegion first(first_bytes, {small}, HugePages::kNone, second_bytes);
  const PlacedRegion second(second_bytes, {small}, HugePages::kNone, first_bytes);
  EXPECT_EQ(second.bindings()[0].policy, BindingPolicy::kPrefer);
  EXPECT_EQ(PlacedRegion(second_bytes, {small}, HugePages::kNone).bindings()[0].policy,
            BindingPolicy::kStrict);
  std::memset(first.data(), 1, first_bytes);
  std::memset(second.data(), 1, second_bytes);
  EXPECT_EQ(query_page_placement(second.data(), second_bytes, 2000).pages_absent, 0);
}

// Sets the number of explicit huge pages on a node; returns how many the kernel made.
int reserve_huge_pages(int node, int pages) {
  const std::string folder = kNodes + ("node" + std::to_string(node)) + "/hugepages/hugepages-2048kB/";
  std::ofstream(folder + "nr_hugepages") << pages;
  int granted = -1;
  std::ifstream(folder + "nr_hugepages") >> granted;
  return granted;
}

int free_huge_pages(int node) {
  const std::string folder = kNodes + ("node" + std::to_string(node)) + "/hugepages/hugepages-2048kB/";
  int pages = -1;
  std::ifstream(folder + "free_hugepages") >> pages;
  return pages;
}

TEST_F(NodeBinding, ExplicitHugePagesOfEachNode) {
  if (!is_test_guest()) GTEST_SKIP() << "reserves huge pages: only in a guest for tests (NUMA_MOE_GUEST)";
  const int first = nodes_[0], second = nodes_[1];
  if (reserve_huge_pages(first, 6) < 6 || reserve_huge_pages(second, 3) < 3) GTEST_SKIP() << "no huge pages";
  {
    const PlacedRegion region(5 * kMiB, {first, second}, HugePages::kExplicit);
    EXPECT_EQ(region.huge_pages(), HugePages::kExplicit);
    EXPECT_EQ(free_huge_pages(first), 3);
    EXPECT_EQ(free_huge_pages(second), 0);
    std::memset(region.data(), 1, region.total_bytes());
    for (std::size_t i = 0; i < 2; ++i) {
      const PagePlacement found = query_page_placement(region.slice(i), 5 * kMiB, 100);
      EXPECT_EQ(found.pages_on_node.size(), 1u);
      EXPECT_EQ(found.pages_on_node.count(nodes_[i]), 1u);
      const HugePageUse use =
          count_huge_pages({{reinterpret_cast<uintptr_t>(region.slice(i)), 5 * kMiB}}).front();
      EXPECT_TRUE(use.found);
      EXPECT_EQ(use.resident_bytes, 6 * kMiB);
      EXPECT_EQ(use.huge_bytes, 6 * kMiB);
    }
  }
  EXPECT_EQ(free_huge_pages(first), 6);
  EXPECT_EQ(free_huge_pages(second), 3);
  {
    // Enough in all (9 pages for 8), too few on the second node: mmap and mbind succeed, and only the first
    // touch would tell, by SIGBUS.
    const PlacedRegion region(8 * kMiB, {first, second}, HugePages::kExplicit);
    EXPECT_EQ(region.huge_pages(), HugePages::kTransparent);
    EXPECT_EQ(region.bindings()[1].bind_error, 0);
    EXPECT_EQ(free_huge_pages(first), 6);
    std::memset(region.data(), 1, region.total_bytes());
    expect_all_local(region, {first, second});
  }
  reserve_huge_pages(first, 0);
  reserve_huge_pages(second, 0);
}

}  // namespace
}  // namespace numa_moe
