// Weights that are stored as codes of 4 or 8 bits, which scales turn into numbers.
//
//   weight = scale * (value of the code - zero point)              Offset::kNone, kZeroPoint
//   weight = scale * value of the code - minimum                   Offset::kMinimum
//
// in fp32, each operation rounded, as the libraries that define these formats compute them. A scale
// belongs to so many successive k of one output row; it may be the product of an outer scale, of more k, and
// an inner one, and then the minimum is the product of an outer and an inner minimum as well.
//
// A panel holds, one after the other and each [k / its group][kPanelWidth]:
//   codes           lines of 64 bytes, a 32-bit word per column: 4 bytes of ascending k, or 8 codes of 4
//                   bits, of which those of even k are in the low half of the word, lowest bits first
//   scales          of the group
//   offsets         zero points or inner minima, uint8, of the group
//   outer scales, outer minima
// and is padded to whole cache lines.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/kernels.h"

namespace numa_moe {

enum class ScaleType : uint8_t { kNone, kFloat32, kFloat16, kBfloat16, kFloat8, kPowerOfTwo, kInt8, kUint8 };
enum class Offset : uint8_t { kNone, kZeroPoint, kMinimum };

struct Quantization {
  int64_t group = 0;  // k per scale, a multiple of 8; 0: a row has one
  ScaleType scale = ScaleType::kFloat32;
  int64_t outer_group = 0;  // k per outer scale, a multiple of group; 0: a row has one
  ScaleType outer = ScaleType::kNone;
  Offset offset = Offset::kNone;
  float values[16] = {};  // what the codes of kFourBit stand for

  bool operator==(const Quantization&) const = default;
};

// Where the parts of a panel are: bytes from its beginning.
struct QuantizedPanel {
  QuantizedPanel(WeightFormat format, const Quantization& quantization, int64_t k);

  int64_t group;  // k per scale
  int64_t groups;
  int64_t outer_group;
  int64_t outer_groups;
  int64_t scales;
  int64_t offsets;
  int64_t outer_scales;
  int64_t outer_minima;
  int64_t bytes;  // in all

 private:
  QuantizedPanel(const Quantization& quantization, int64_t padded_k, int64_t code_bytes);
};

int scale_bytes(ScaleType type);  // 0 for kNone

// Reads "codes=int4 group=32 scale=bf16 offset=zero_point": words in any order, separated by spaces.
//   codes        int8, fp8 (e4m3), int4 (-8 to 7), uint4 (0 to 15), e2m1, iq4
//   scale, outer fp32, fp16, bf16, fp8, e8m0, int8, uint8
//   group, outer_group   k per scale; left out: one for all k
//   offset       zero_point (0 to 16), minimum; of uint4
// Throws std::invalid_argument that says what is wrong.
void parse_quantization(const std::string& text, WeightFormat* format, Quantization* quantization);

}  // namespace numa_moe
