// An object in pages that nobody else uses. Linux backs a page with memory of the node whose CPU touches
// it first, so a thread that is pinned to a node can have the object placed there without naming the node.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>

namespace numa_moe {

template <typename T>
class OwnPage {
 public:
  // Throws std::bad_alloc. The object doesn't exist before construct().
  OwnPage() : memory_(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~OwnPage() { munmap(memory_, sizeof(T)); }
  OwnPage(const OwnPage&) = delete;
  OwnPage& operator=(const OwnPage&) = delete;

  // By a thread on the node where the object shall be; any number of times, before construct().
  void touch() { *static_cast<volatile std::byte*>(memory_) = std::byte{0}; }

  void construct() { object_ = new (memory_) T(); }
  T& operator*() { return *object_; }
  T* operator->() { return object_; }

 private:
  static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= 4096 && sizeof(T) <= 4096);

  void* const memory_;
  T* object_ = nullptr;
};

}  // namespace numa_moe
