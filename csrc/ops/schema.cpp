// The schemas of all ops, in LibTorch's stable ABI: the binary loads on every torch from the version it
// targets on, CPU-only or CUDA build.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(numa_moe, library) {
  // The mixture-of-experts FFN. out[t] = sum over k of topk_weights[t, k] * FFN of expert topk_ids[t, k].
  //   hidden_states  [num_tokens, hidden_size]  float32, bfloat16 or float16
  //   topk_ids       [num_tokens, top_k]        int32 or int64; >= num_experts: lives elsewhere, adds nothing
  //   topk_weights   [num_tokens, top_k]        float32, bfloat16 or float16
  //   gate_up_proj, down_proj, *_bias           from pack_experts; dimension 0 is the NUMA slice
  //   activation     silu, gelu, gelu_tanh, relu, relu2, swiglu_oai, silu_clamp_input, silu_clamp_output
  //   intermediate_size   without the padding of the packed tensors; None: all of it counts, which only tells
  //                  where a token is so large that 0 times it isn't 0
  //   format         of weights that are codes: see csrc/kernels/quantization.h; None: their dtype tells
  //   down_format    of down_proj, where that is another one
  //   alpha, limit   parameters of the last three; None: 1.702 and no limit
  library.def(
      "experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor gate_up_proj, "
      "Tensor down_proj, Tensor? gate_up_bias=None, Tensor? down_bias=None, *, str activation=\"silu\", "
      "float? alpha=None, float? limit=None, str? format=None, int? intermediate_size=None, "
      "str? down_format=None) -> Tensor");
  // Writes experts first_expert, first_expert + 1, … of a packed tensor, on the workers of the slice's node.
  //   gate, up  [n, intermediate_size, hidden_size] views of any strides; up is None if not gated
  //   down      [n, hidden_size, intermediate_size]
  library.def("pack_gate_up(Tensor(a!) packed, Tensor gate, Tensor? up, int first_expert) -> ()");
  library.def("pack_down(Tensor(a!) packed, Tensor down, int first_expert) -> ()");
  // The same way back: the views are written.
  library.def("unpack_gate_up(Tensor packed, Tensor(a!) gate, Tensor(b!)? up, int first_expert) -> ()");
  library.def("unpack_down(Tensor packed, Tensor(a!) down, int first_expert) -> ()");
  // The same for codes and their scales, of one projection at a time.
  //   projection     0 and 1: gate and up, where packed has both; else 0
  //   codes          [n, rows, columns] uint8, one to a byte
  //   scales         [n, rows, groups] of format's type, as offsets (uint8)
  //   outer_scales   [n, rows, outer groups], as outer_minima
  library.def(
      "pack_quantized(Tensor(a!) packed, str format, int projection, int first_expert, Tensor codes, "
      "Tensor scales, Tensor? offsets, Tensor? outer_scales, Tensor? outer_minima) -> ()");
  library.def(
      "unpack_quantized(Tensor packed, str format, int projection, int first_expert, Tensor(a!) codes, "
      "Tensor(b!) scales, Tensor(c!)? offsets, Tensor(d!)? outer_scales, Tensor(e!)? outer_minima) -> ()");
}
