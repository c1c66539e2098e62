#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "arm.h"
#include "pool/affinity.h"

void pin_calling_thread_to(int cpu) {
  if (const int error = numa_moe::pin_calling_thread(cpu); error != 0) {
    std::fprintf(stderr, "CPU %d: %s\n", cpu, std::strerror(error));
    std::exit(1);
  }
}
