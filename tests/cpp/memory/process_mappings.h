// The mappings of the test's own process.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace numa_moe {

struct ProcessMapping {
  uintptr_t begin;
  uintptr_t end;
  std::string permissions;  // such as "rw-p"
};

inline std::vector<ProcessMapping> process_mappings() {
  std::vector<ProcessMapping> mappings;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t dash = line.find('-');
    const std::size_t space = line.find(' ');
    mappings.push_back({std::stoull(line.substr(0, dash), nullptr, 16),
                        std::stoull(line.substr(dash + 1, space - dash - 1), nullptr, 16),
                        line.substr(space + 1, 4)});
  }
  return mappings;
}

}  // namespace numa_moe
