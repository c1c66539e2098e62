// Codes and scales from their ordinary layout into panels and back, by the workers of the node that will
// read them.
#pragma once

#include <cstdint>

#include "moe/packing.h"

namespace numa_moe {

// One projection of some experts, contiguous; writable only where it is unpacked to.
struct QuantizedMatrix {
  int64_t num_experts;
  int64_t rows;
  int64_t columns;
  uint8_t* codes;  // [num_experts, rows, columns], one to a byte
  char* scales;  // [num_experts, rows, groups], of the quantization's type; so are the others
  uint8_t* offsets;  // [num_experts, rows, groups], or null
  char* outer_scales;  // [num_experts, rows, outer groups], or null
  char* outer_minima;  // the same
};

// Which of the projections that alternate panel by panel: 0 and 1 are gate and up of two.
struct Projection {
  int64_t index;
  int64_t count;
  int64_t num_blocks;  // of kPanelWidth rows, over all slices
};

// Written as experts first_expert, first_expert + 1, ... Padding is zeroed.
void pack_quantized(Runtime& runtime, const PackedProjection& packed, const Projection& projection,
                    int64_t first_expert, const QuantizedMatrix& matrix);
void unpack_quantized(Runtime& runtime, const PackedProjection& packed, const Projection& projection,
                      int64_t first_expert, const QuantizedMatrix& matrix);

}  // namespace numa_moe
