#include "stalls.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "pool/affinity.h"
#include "pool/spin.h"

namespace numa_moe {
namespace {

enum class State { kFree, kPreparing, kWaiting, kHolding, kReleased };

// What pool threads look at. Static, because they may come by at any time.
struct Slot {
  std::atomic<State> state{State::kFree};
  std::atomic<int> visitors{0};
  std::atomic<StallPoint> point{};
  std::atomic<int> only{0};     // 0: anyone
  std::atomic<int> all_but{0};  // 0: nobody excluded

  void visit(StallPoint here) {
    visitors += 1;
    if (state == State::kWaiting && here == point) {
      const int thread = calling_thread_id();
      State expected = State::kWaiting;
      if ((only == 0 || only == thread) && all_but != thread &&
          state.compare_exchange_strong(expected, State::kHolding)) {
        while (state != State::kReleased) std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
    visitors -= 1;
  }
};

Slot slots[HeldThread::kMostHeld];

int prepare(StallPoint point, int only, int all_but) {
  for (int index = 0; index < HeldThread::kMostHeld; ++index) {
    Slot& slot = slots[index];
    State expected = State::kFree;
    if (!slot.state.compare_exchange_strong(expected, State::kPreparing)) continue;
    slot.point = point;
    slot.only = only;
    slot.all_but = all_but;
    slot.state = State::kWaiting;
    return index;
  }
  std::abort();  // more than kMostHeld
}

std::atomic<uint32_t> random_rarity{0};
std::atomic<uint64_t> random_seed{0};

uint32_t next_random() {
  // Marsaglia's xorshift64, one sequence per thread.
  static std::atomic<uint64_t> threads{0};
  thread_local uint64_t state = 0;
  if (state == 0) state = (random_seed + ++threads) * 0x9E3779B97F4A7C15u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<uint32_t>(state >> 32);
}

void stall_at_random(uint32_t rarity) {
  if (next_random() % rarity != 0) return;
  switch (next_random() % 4) {
    case 0:
      for (uint32_t pauses = next_random() % 200; pauses > 0; --pauses) cpu_relax();
      break;
    case 1:
    case 2: sched_yield(); break;
    default: std::this_thread::sleep_for(std::chrono::microseconds(next_random() % 30)); break;
  }
}

}  // namespace

void stall(StallPoint point) {
  for (Slot& slot : slots) {
    if (slot.state != State::kFree) slot.visit(point);
  }
  if (const uint32_t rarity = random_rarity.load(std::memory_order_relaxed); rarity != 0)
    stall_at_random(rarity);
}

HeldThread::HeldThread(StallPoint point, Anyone) : slot_(prepare(point, 0, 0)) {}
HeldThread::HeldThread(StallPoint point, Only who) : slot_(prepare(point, who.thread_id, 0)) {}
HeldThread::HeldThread(StallPoint point, AllBut who) : slot_(prepare(point, 0, who.thread_id)) {}

HeldThread::~HeldThread() {
  release();
  while (slots[slot_].visitors != 0) std::this_thread::yield();
  slots[slot_].state = State::kFree;
}

bool HeldThread::holds() const { return slots[slot_].state == State::kHolding; }
void HeldThread::release() { slots[slot_].state = State::kReleased; }

RandomStalls::RandomStalls(uint64_t seed, uint32_t rarity) {
  random_seed = seed;
  random_rarity = rarity;
}
RandomStalls::~RandomStalls() { random_rarity = 0; }

}  // namespace numa_moe
