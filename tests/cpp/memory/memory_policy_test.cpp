#include "memory/memory_policy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>

namespace numa_moe {
namespace {

TEST(MemoryPolicy, NoRoomOnANodeThatDoesNotExist) {
  EXPECT_FALSE(node_has_room(100000, 0));
  EXPECT_FALSE(node_has_room(100000, 4096));
}

TEST(MemoryPolicy, NoNodeHasRoomForEverything) {
  EXPECT_FALSE(node_has_room(0, std::numeric_limits<std::size_t>::max()));
  EXPECT_FALSE(node_has_room(0, std::size_t{1} << 50));
}

TEST(MemoryPolicy, BadNodeIsAnError) {
  alignas(4096) static char page[4096];
  EXPECT_NE(bind_memory(page, sizeof(page), 100000, true), 0);
  EXPECT_NE(bind_memory(page, sizeof(page), 100000, false), 0);
  EXPECT_EQ(page[0], 0);
}

}  // namespace
}  // namespace numa_moe
