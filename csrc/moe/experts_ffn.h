// The mixture-of-experts FFN of one layer on the CPU:
//   out[t] = sum over k of topk_weights[t, k] * down(act(gate(x_t), up(x_t))) of expert topk_ids[t, k]
// A token's experts are added in ascending order of their id in fp32.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/kernels.h"
#include "moe/expert_layout.h"
#include "moe/routing.h"
#include "moe/runtime.h"

namespace numa_moe {

struct ActivationSpec {
  Activation activation;
  float alpha;
  float limit;
};

struct FfnArgs {
  const void* hidden_states;  // [num_tokens, hidden_size], contiguous
  DataType hidden_states_type;
  TopK top_k;
  ActivationSpec activation;
  int64_t num_channels;  // intermediate_size without padding to the format's k group
  PackedWeights weights;
  std::shared_ptr<const void>
      weights_owner;  // keeps them: a late thread of the pool may read them afterwards
  void* output;  // [num_tokens, hidden_size], contiguous, type of hidden_states
};

// Computes on the runtime's pool and returns when the output is written. All arguments must have been
// checked. Throws what allocation throws.
void run_experts_ffn(Runtime& runtime, const FfnArgs& args);

}  // namespace numa_moe
