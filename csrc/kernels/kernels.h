// The arithmetic of the mixture-of-experts FFN, one table of functions per weight format and
// instruction set. Kernels know nothing of threads, NUMA nodes or torch.
//
// Weights come in panels: kPanelWidth output rows ("columns" of the product), k-major, so that one
// vector load brings the same k of all columns:
//   bf16        [k / 2][kPanelWidth][2]   (pairs of k, what the bf16 dot product instructions take)
//   fp16, fp32  [k][kPanelWidth]
//   codes       see kernels/quantization.h
// Every output element is summed over k in ascending order in one fp32 accumulator, whatever the tile
// it falls in (with bf16 dot products, codes of one scale are summed first). Hence for a given instruction
// set the bits of a result depend on its row of x and its column of weights only: not on the number of rows,
// on tiling, on threads or on NUMA slices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace numa_moe {

inline constexpr int kPanelWidth = 16;

enum class DataType : uint8_t { kFloat32, kBfloat16, kFloat16 };
// The last three are codes, which scales turn into weights: kernels/quantization.h.
enum class WeightFormat : uint8_t { kBfloat16, kFloat16, kFloat32, kInt8, kFloat8, kFourBit };

// In ascending order of preference on one architecture; NUMA_MOE_ISA caps the choice downwards.
enum class InstructionSet : uint8_t { kPortable, kNeon, kNeonBf16, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// g is the gate, u the up projection, both with their bias; sigmoid(z) = 1 / (1 + e^-z). Computed in fp32
// from IEEE operations only, so that every instruction set gives the same bits. Relative error: at most 4
// units in the last place for silu, 7 for gelu; elsewhere the rounding of the sigmoid's argument z adds
// up to 2.5 |z|, and a result below 2^-126 |g| is off by up to 2^-149 |g| more. NaN in g or u gives NaN, also
// where there is a limit; at g = -infinity a sigmoid times g is -0.
enum class Activation : uint8_t {
  kSilu,  // silu(gate) * up
  kGelu,  // gelu(gate) * up, erf form
  kGeluTanh,  // gelu(gate) * up, tanh form
  kRelu,  // relu(gate) * up
  kReluSquared,  // relu(gate)^2 * up
  kSwigluOai,  // g = min(gate, limit), u = clamp(up, -limit, limit): (u + 1) * g * sigmoid(alpha * g)
  kSiluClampInput,  // silu(min(gate, limit)) * clamp(up, -limit, limit)
  kSiluClampOutput,  // min(silu(gate), limit) * clamp(up, -limit, limit)
};

struct Quantization;

struct GemmArgs {
  const void* x;  // [rows, x_stride] activations, in the table's activation type
  int64_t x_stride;  // elements between rows, >= k rounded up to the format's k group
  int64_t rows;  // >= 0
  int64_t k;  // >= 1; x and weights hold zeros from k up to the k group
  const void* weights;  // the first panel
  int64_t panel_stride;  // bytes between panels
  int64_t num_panels;  // >= 1
  float* out;  // [rows, out_stride], num_panels * kPanelWidth columns are overwritten
  int64_t out_stride;  // elements
  const Quantization* quantization = nullptr;  // of the weights; null if they aren't codes
};

struct ActivateArgs {
  Activation activation;
  bool gated;  // false: the function of the gate alone, no up columns
  float alpha;
  float limit;
  const float* gate_up;  // [rows, gate_up_stride]: per block kPanelWidth gates, then as many ups if gated
  int64_t gate_up_stride;  // elements
  const float* bias;  // same columns as one row of gate_up, or null
  int64_t rows;
  int64_t num_blocks;  // blocks of kPanelWidth intermediate channels
  void* out;  // [rows, out_stride] in the table's activation type
  int64_t out_stride;  // elements
};

struct KernelTable {
  InstructionSet instruction_set;
  WeightFormat format;
  int activation_bytes;  // 2: activations are bf16; 4: fp32 (holding bf16 values when the format is bf16)
  // One row of hidden states to the activation type; the elements from count to padded_count are zeroed.
  void (*stage_row)(const void* source, DataType source_type, int64_t count, int64_t padded_count, void* out);
  void (*gemm)(const GemmArgs& args);
  void (*activate)(const ActivateArgs& args);
  // accumulator[i] = fma(weight, row[i] + bias[i], accumulator[i]); bias may be null.
  void (*accumulate_row)(float weight, const float* row, const float* bias, int64_t count,
                         float* accumulator);
  // Panels of codes to panels of plain_format, one after the other; null if the weights aren't codes.
  void (*dequantize)(const GemmArgs& args, void* panels);
  WeightFormat plain_format;  // format itself if the weights aren't codes
  // fp32 to out_type, round to nearest even; NaN stays NaN.
  void (*store_row)(const float* row, int64_t count, DataType out_type, void* out);
};

// k elements that one lane holds side by side in a panel: 2 for bf16, 8 for codes of 4 and 8 bits, else 1.
int k_group(WeightFormat format);
int group_bytes(WeightFormat format);  // of one such group of all columns, without scales
bool is_quantized(WeightFormat format);
int data_type_bytes(DataType type);

// What this CPU can run, best last; always holds kPortable.
std::vector<InstructionSet> supported_instruction_sets();
// The table for a format on an instruction set that supported_instruction_sets() lists. Where a set has
// nothing of its own for a format (fp16 on kAvx512Bf16) the table of the next lower one is returned.
const KernelTable& kernel_table(WeightFormat format, InstructionSet instruction_set);
// The same for a call whose experts have so many rows on average: with few rows kAmx gives way to
// kAvx512Bf16, whose bits differ. Ask once per call, with a number that no thread count enters, and use
// that one table throughout, so that results don't depend on how rows are cut into tasks.
const KernelTable& kernel_table_for_rows(WeightFormat format, InstructionSet instruction_set, int64_t rows);

const char* instruction_set_name(InstructionSet instruction_set);  // "portable", "avx2", "avx512bf16"...
bool parse_instruction_set(const std::string& name, InstructionSet* result);
bool parse_activation(const std::string& name, Activation* result);  // "silu", "gelu_tanh", "swiglu_oai"...
const char* activation_name(Activation activation);
std::vector<std::string> activation_names();

}  // namespace numa_moe
