#include "memory/process_maps.h"

#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace numa_moe {
namespace {

// How far a mapping may reach beyond the range asked for: the padding of a PlacedRegion's slice.
constexpr uintptr_t kToleranceBytes = uintptr_t{2} << 20;

struct Mapping {
  uintptr_t begin;
  uintptr_t end;
};

template <typename Number>
bool parse_number(std::string_view text, int base, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value, base);
  return error == std::errc() && end == text.data() + text.size();
}

// The first word of a line of maps or of a mapping's first line in smaps: "7f1200000000-7f1200021000".
bool parse_mapping(std::string_view line, Mapping* mapping) {
  const std::string_view word = line.substr(0, line.find(' '));
  const std::size_t dash = word.find('-');
  return dash != std::string_view::npos && parse_number(word.substr(0, dash), 16, &mapping->begin) &&
         parse_number(word.substr(dash + 1), 16, &mapping->end);
}

enum class Overlap { kNone, kFills, kReachesBeyond };

Overlap overlap(const Mapping& mapping, uintptr_t address, std::size_t bytes) {
  const uintptr_t end = address + bytes;
  if (mapping.end <= address || mapping.begin >= end) return Overlap::kNone;
  const bool before = mapping.begin < address && address - mapping.begin > kToleranceBytes;
  const bool after = mapping.end > end && mapping.end - end > kToleranceBytes;
  return before || after ? Overlap::kReachesBeyond : Overlap::kFills;
}

// Adds up one line of numa_maps: "7f1200000000 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4".
void add_numa_maps_line(const std::string& line, MappingPages* pages) {
  std::istringstream words(line);
  std::map<int, uint64_t> count_on_node;
  uint64_t page_kilobytes = 4;
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) continue;
    const std::string_view key = std::string_view(word).substr(0, equals);
    const std::string_view value = std::string_view(word).substr(equals + 1);
    int node = 0;
    uint64_t count = 0;
    if (key == "kernelpagesize_kB") {
      parse_number(value, 10, &page_kilobytes);
    } else if (key.size() > 1 && key[0] == 'N' && parse_number(key.substr(1), 10, &node) &&
               parse_number(value, 10, &count)) {
      count_on_node[node] += count;
    }
  }
  for (const auto& [node, count] : count_on_node) pages->bytes_on_node[node] += count * page_kilobytes << 10;
}

}  // namespace

MappingPages count_mapping_pages(std::istream& maps, std::istream& numa_maps, uintptr_t address,
                                 std::size_t bytes) {
  std::vector<uintptr_t> filled;  // where the mappings in question begin; numa_maps lacks the ends
  for (std::string line; std::getline(maps, line);) {
    Mapping mapping{};
    if (!parse_mapping(line, &mapping)) continue;
    const Overlap kind = overlap(mapping, address, bytes);
    if (kind == Overlap::kReachesBeyond) return {};
    if (kind == Overlap::kFills) filled.push_back(mapping.begin);
  }
  MappingPages pages;
  std::size_t seen = 0;
  for (std::string line; seen < filled.size() && std::getline(numa_maps, line);) {
    uintptr_t begin = 0;
    if (!parse_number(std::string_view(line).substr(0, line.find(' ')), 16, &begin)) continue;
    if (begin != filled[seen]) continue;  // both files are in ascending order
    add_numa_maps_line(line, &pages);
    ++seen;
  }
  if (seen == 0 || seen != filled.size()) return {};
  pages.found = true;
  return pages;
}

MappingPages count_mapping_pages(uintptr_t address, std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  std::ifstream numa_maps("/proc/self/numa_maps");
  if (!maps || !numa_maps) return {};
  return count_mapping_pages(maps, numa_maps, address, bytes);
}

std::vector<HugePageUse> count_huge_pages(std::istream& smaps, const std::vector<MemoryRange>& ranges) {
  std::vector<HugePageUse> uses(ranges.size());
  std::vector<bool> reach_beyond(ranges.size(), false);
  std::vector<std::size_t> inside;  // the ranges that the mapping fills whose lines are being read
  for (std::string line; std::getline(smaps, line);) {
    Mapping mapping{};
    if (parse_mapping(line, &mapping)) {
      inside.clear();
      for (std::size_t index = 0; index < ranges.size(); ++index) {
        const Overlap kind = overlap(mapping, ranges[index].address, ranges[index].bytes);
        if (kind == Overlap::kReachesBeyond) reach_beyond[index] = true;
        if (kind != Overlap::kFills) continue;
        uses[index].found = true;
        inside.push_back(index);
      }
      continue;
    }
    if (inside.empty()) continue;
    std::istringstream words(line);
    std::string key;
    uint64_t kilobytes = 0;
    if (!(words >> key >> kilobytes)) continue;
    const bool is_explicit = key == "Private_Hugetlb:" || key == "Shared_Hugetlb:";
    // Rss includes transparent huge pages, but no explicit ones.
    for (const std::size_t index : inside) {
      if (is_explicit || key == "Rss:") uses[index].resident_bytes += kilobytes << 10;
      if (is_explicit || key == "AnonHugePages:") uses[index].huge_bytes += kilobytes << 10;
    }
  }
  for (std::size_t index = 0; index < ranges.size(); ++index) {
    if (reach_beyond[index]) uses[index] = {};
  }
  return uses;
}

std::vector<HugePageUse> count_huge_pages(const std::vector<MemoryRange>& ranges) {
  std::ifstream smaps("/proc/self/smaps");
  return count_huge_pages(smaps, ranges);
}

}  // namespace numa_moe
