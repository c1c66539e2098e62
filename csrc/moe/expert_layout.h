// How the weights of one layer's experts lie in the packed tensors.
//
// A block is kPanelWidth (16) output rows of a projection. The blocks of a projection are dealt to the
// slices in order and as evenly as whole blocks allow; a slice with one block fewer leaves the last
// place of each expert unused. Inside a slice an expert's blocks are contiguous:
//   gate_up  [slice][expert][block][gate, up][k of hidden_size][16]   blocks of intermediate channels
//   down     [slice][expert][block][k of intermediate_size][16]       blocks of hidden channels
// Both rows of a channel (gate and up) are in the same slice, so the activation needs no other slice.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/quantization.h"

namespace numa_moe {

struct BlockRange {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// The blocks that a slice holds, of num_blocks in all.
BlockRange slice_blocks(int64_t num_blocks, int64_t num_slices, int64_t slice);

// How a projection's weights are stored.
struct StoredWeights {
  WeightFormat format;
  Quantization quantization = {};  // if the format is one of codes

  int64_t panel_bytes(int64_t k) const {
    if (is_quantized(format)) return QuantizedPanel(format, quantization, k).bytes;
    const int64_t group = k_group(format);
    return (k + group - 1) / group * group_bytes(format);
  }
};

struct ExpertLayout {
  StoredWeights gate_up;
  StoredWeights down;  // the same, or both are codes
  int64_t num_slices;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t intermediate_size;  // rounded up to the k group of down's format
  bool gated;                 // gate and up rows, or a single (up) projection

  int64_t intermediate_blocks() const { return (intermediate_size + kPanelWidth - 1) / kPanelWidth; }
  int64_t hidden_blocks() const { return (hidden_size + kPanelWidth - 1) / kPanelWidth; }
  int64_t panels_per_gate_up_block() const { return gated ? 2 : 1; }

  // Places for blocks in every slice (the largest slice fills them all).
  int64_t gate_up_blocks_per_slice() const { return (intermediate_blocks() + num_slices - 1) / num_slices; }
  int64_t down_blocks_per_slice() const { return (hidden_blocks() + num_slices - 1) / num_slices; }

  int64_t gate_up_panel_bytes() const { return gate_up.panel_bytes(hidden_size); }
  int64_t down_panel_bytes() const { return down.panel_bytes(intermediate_size); }
  int64_t gate_up_block_bytes() const { return panels_per_gate_up_block() * gate_up_panel_bytes(); }
  int64_t gate_up_slice_bytes() const {
    return num_experts * gate_up_blocks_per_slice() * gate_up_block_bytes();
  }
  int64_t down_slice_bytes() const { return num_experts * down_blocks_per_slice() * down_panel_bytes(); }
};

// One layer's packed weights: where each slice begins, and how it is laid out.
struct PackedWeights {
  ExpertLayout layout;
  const char* gate_up;              // first slice
  int64_t gate_up_slice_stride;     // bytes between slices
  const char* down;
  int64_t down_slice_stride;        // bytes
  const float* gate_up_bias;        // [slice][expert][block][gate, up][16], or null
  const float* down_bias;           // [slice][expert][block][16], or null

  const char* gate_up_block(int64_t slice, int64_t expert, int64_t block_in_slice) const {
    return gate_up + slice * gate_up_slice_stride +
           (expert * layout.gate_up_blocks_per_slice() + block_in_slice) * layout.gate_up_block_bytes();
  }
  const char* down_block(int64_t slice, int64_t expert, int64_t block_in_slice) const {
    return down + slice * down_slice_stride +
           (expert * layout.down_blocks_per_slice() + block_in_slice) * layout.down_panel_bytes();
  }
  const float* gate_up_bias_block(int64_t slice, int64_t expert, int64_t block_in_slice) const {
    if (gate_up_bias == nullptr) return nullptr;
    const int64_t width = layout.panels_per_gate_up_block() * kPanelWidth;
    return gate_up_bias +
           ((slice * layout.num_experts + expert) * layout.gate_up_blocks_per_slice() + block_in_slice) *
               width;
  }
  const float* down_bias_block(int64_t slice, int64_t expert, int64_t block_in_slice) const {
    if (down_bias == nullptr) return nullptr;
    return down_bias +
           ((slice * layout.num_experts + expert) * layout.down_blocks_per_slice() + block_in_slice) *
               kPanelWidth;
  }
};

}  // namespace numa_moe
