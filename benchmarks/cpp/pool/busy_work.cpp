#include "busy_work.h"

#include <algorithm>
#include <chrono>

void compute(int64_t steps) {
  uint64_t value = 1;
  for (int64_t step = 0; step < steps; ++step) {
    value = value * 6364136223846793005U + 1442695040888963407U;  // Knuth's generator, MMIX
    asm volatile("" : "+r"(value));
  }
}

double steps_per_microsecond() {
  constexpr int64_t kSteps = 1'000'000;
  double best = 0;
  for (int repetition = 0; repetition < 20; ++repetition) {
    const auto begin = std::chrono::steady_clock::now();
    compute(kSteps);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    best = std::max(best, kSteps / time.count());
  }
  return best;
}
