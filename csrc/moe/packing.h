// Weights from their ordinary layout into panels and back, by the workers of the node that will read
// them: the first write to a page is what puts it on a node where mbind isn't permitted.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "moe/expert_layout.h"
#include "moe/runtime.h"

namespace numa_moe {

// A [num_experts, rows, columns] view with any strides (in elements). Transposed and interleaved
// checkpoints are views.
struct WeightView {
  void* data;
  DataType type;
  int64_t num_experts;
  int64_t rows;
  int64_t columns;
  int64_t expert_stride;
  int64_t row_stride;
  int64_t column_stride;
};

// Packed tensor of one projection, writable.
struct PackedProjection {
  ExpertLayout layout;
  StoredWeights stored;  // this projection's, as in layout
  char* data;
  int64_t slice_stride;  // bytes
};

// gate (and up, or null if not gated): [n, intermediate_size, hidden_size], written as the experts
// first_expert … first_expert + n - 1. Values are rounded to the format (nearest even). Padding is zeroed.
void pack_gate_up(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                  const WeightView& gate, const WeightView* up);
// down: [n, hidden_size, intermediate_size].
void pack_down(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
               const WeightView& down);

// The same way back; the views are written. Exact when their type can hold the format's values.
void unpack_gate_up(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                    const WeightView& gate, const WeightView* up);
void unpack_down(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                 const WeightView& down);

}  // namespace numa_moe
