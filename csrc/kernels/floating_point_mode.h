// The floating-point mode that kernels assume: IEEE 754 as a process starts with it.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace numa_moe {

// Round to nearest even, subnormals kept, no traps, for as long as this object lives on its thread. Callers
// may have changed that (torch.set_flush_denormal, a library built with -ffast-math), and workers inherit
// the mode of the thread that starts them: then the bits would depend on which thread ran a task.
class StandardFloatingPoint {
 public:
  StandardFloatingPoint() : before_(read()) {
    if (before_ != kStandard) write(kStandard);
  }
  ~StandardFloatingPoint() {
    if (before_ != kStandard) write(before_);
  }
  StandardFloatingPoint(const StandardFloatingPoint&) = delete;
  StandardFloatingPoint& operator=(const StandardFloatingPoint&) = delete;

 private:
#if defined(__x86_64__)
  // All exceptions masked; their sticky flags, which say what happened so far, don't count as a mode.
  static constexpr uint64_t kStandard = 0x1F80;
  static constexpr uint32_t kModeBits = 0xFFC0;
  static uint64_t read() { return _mm_getcsr() & kModeBits; }
  static void write(uint64_t mode) { _mm_setcsr((_mm_getcsr() & ~kModeBits) | static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kStandard = 0;
  static uint64_t read() {
    uint64_t mode = 0;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kStandard = 0;
  static uint64_t read() { return kStandard; }
  static void write(uint64_t) {}
#endif

  uint64_t before_;
};

}  // namespace numa_moe
