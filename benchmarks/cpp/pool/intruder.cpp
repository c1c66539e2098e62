#include "intruder.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "arm.h"

namespace {

constexpr int64_t kPeriodNs = 10'000'000;

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

[[noreturn]] void intrude(int cpu, int busy_percent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "intruder");
  pin_calling_thread_to(cpu);
  const int64_t busy_ns = kPeriodNs * busy_percent / 100;
  for (;;) {
    const int64_t end = now_ns() + busy_ns;
    while (now_ns() < end) {
    }
    const timespec rest{0, kPeriodNs - busy_ns};
    if (rest.tv_nsec > 0) nanosleep(&rest, nullptr);
  }
}

}  // namespace

Intruder::Intruder(int cpu, int busy_percent) : process_(fork()) {
  if (process_ < 0) {
    std::perror("fork");
    std::exit(1);
  }
  if (process_ == 0) intrude(cpu, busy_percent);
  stop();
}

Intruder::~Intruder() {
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
}

void Intruder::resume() const { kill(process_, SIGCONT); }
void Intruder::stop() const { kill(process_, SIGSTOP); }

double Intruder::cpu_us() const {
  clockid_t clock{};
  timespec time{};
  if (clock_getcpuclockid(process_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}
