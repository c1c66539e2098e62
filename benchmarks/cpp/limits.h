// What the machine can do at best, to set measurements against.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

// Reads bytes (a multiple of 512) from begin on, and does nothing else with them. In four streams: on Zen 3
// a single one reaches four fifths of the bandwidth.
void read_memory(const char* begin, int64_t bytes);

// Multiply-adds on registers alone, with the instruction that the format's kernels use: about
// `multiply_adds` of them, the exact number is returned. 0: there is no probe for this instruction set.
int64_t multiply_registers(numa_moe::InstructionSet instruction_set, numa_moe::WeightFormat format,
                           int64_t multiply_adds);
