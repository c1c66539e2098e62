// Memory that begins and ends at pages no one may touch, so that reading or writing one byte too many is
// a crash. Prefetching isn't.
#pragma once

#include <cstddef>

namespace numa_moe::test {

enum class Flush : char { kToBegin, kToEnd };  // at which guard page the memory lies

class GuardedMemory {
 public:
  GuardedMemory(size_t bytes, Flush flush);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  template <typename T = char>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  char* mapping_;
  size_t mapping_bytes_;
  char* data_;
  size_t size_;
};

}  // namespace numa_moe::test
