// Regions of code compiled for an instruction set that the build doesn't assume: a file of kernels opens
// one after all its #includes and closes it at its end, so that no function of a header is compiled for it.
//
// NUMA_MOE_EMULATE_X86 is for tests only: SIMDe then stands in for the intrinsics, and nothing is
// compiled for an instruction set that the machine may lack.
#pragma once

#define NUMA_MOE_PRAGMA(...) _Pragma(#__VA_ARGS__)

#if defined(NUMA_MOE_EMULATE_X86)
#define NUMA_MOE_TARGET_BEGIN(features)
#define NUMA_MOE_TARGET_END
#elif defined(__clang__)
#define NUMA_MOE_TARGET_BEGIN(features) \
  NUMA_MOE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NUMA_MOE_TARGET_END NUMA_MOE_PRAGMA(clang attribute pop)
#else
#define NUMA_MOE_TARGET_BEGIN(features) \
  NUMA_MOE_PRAGMA(GCC push_options)     \
  NUMA_MOE_PRAGMA(GCC target(features))
#define NUMA_MOE_TARGET_END NUMA_MOE_PRAGMA(GCC pop_options)
#endif

// Everything in a kernel file is private to it; inlining is forced because a call would put the
// accumulators in memory.
#define NUMA_MOE_INLINE_MEMBER inline __attribute__((always_inline))
#define NUMA_MOE_INLINE static NUMA_MOE_INLINE_MEMBER
#define NUMA_MOE_INLINE_LAMBDA __attribute__((always_inline))
