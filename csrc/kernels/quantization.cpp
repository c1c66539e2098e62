#include "kernels/quantization.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <stdexcept>

namespace numa_moe {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMostPerGroup = int64_t{1} << 30;

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

struct CodesName {
  const char* name;
  WeightFormat format;
  float values[16];
};

constexpr CodesName kCodes[] = {
    {"int8", WeightFormat::kInt8, {}},
    {"fp8", WeightFormat::kFloat8, {}},
    {"int4", WeightFormat::kFourBit, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}},
    {"uint4", WeightFormat::kFourBit, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}},
    // OCP Microscaling Formats (MX) 1.0, section 5.3.3.
    {"e2m1", WeightFormat::kFourBit, {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6}},
    // The levels of llama.cpp's IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
    {"iq4",
     WeightFormat::kFourBit,
     {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}},
};

struct ScaleName {
  const char* name;
  ScaleType type;
  int bytes;
};

constexpr ScaleName kScales[] = {
    {"none", ScaleType::kNone, 0},     {"fp32", ScaleType::kFloat32, 4}, {"fp16", ScaleType::kFloat16, 2},
    {"bf16", ScaleType::kBfloat16, 2}, {"fp8", ScaleType::kFloat8, 1},   {"e8m0", ScaleType::kPowerOfTwo, 1},
    {"int8", ScaleType::kInt8, 1},     {"uint8", ScaleType::kUint8, 1},
};

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw std::invalid_argument("numa_moe: quantization \"" + text + "\": " + why);
}

ScaleType parse_scale(const std::string& text, const std::string& value) {
  for (const ScaleName& known : kScales) {
    if (value == known.name) return known.type;
  }
  refuse(text, "no scale is called \"" + value + "\"");
}

int64_t parse_group(const std::string& text, const std::string& value) {
  int64_t group = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), group);
  if (error != std::errc() || end != value.data() + value.size() || group < 8 || group % 8 != 0 ||
      group > kMostPerGroup) {
    refuse(text, "a group is a multiple of 8, not \"" + value + "\"");
  }
  return group;
}

}  // namespace

int scale_bytes(ScaleType type) {
  for (const ScaleName& known : kScales) {
    if (known.type == type) return known.bytes;
  }
  throw std::invalid_argument("unknown scale type");
}

QuantizedPanel::QuantizedPanel(WeightFormat format, const Quantization& quantization, int64_t k)
    : QuantizedPanel(quantization, divide_up(k, k_group(format)) * k_group(format),
                     divide_up(k, k_group(format)) * group_bytes(format)) {}

QuantizedPanel::QuantizedPanel(const Quantization& quantization, int64_t padded_k, int64_t code_bytes)
    : group(quantization.group > 0 ? quantization.group : padded_k),
      groups(divide_up(padded_k, group)),
      outer_group(quantization.outer_group > 0 ? quantization.outer_group : group * groups),
      outer_groups(divide_up(padded_k, outer_group)),
      scales(code_bytes),
      offsets(scales + groups * kPanelWidth * scale_bytes(quantization.scale)),
      outer_scales(offsets + (quantization.offset == Offset::kNone ? 0 : groups * kPanelWidth)),
      outer_minima(outer_scales + outer_groups * kPanelWidth * scale_bytes(quantization.outer)),
      bytes(divide_up(
                outer_minima + (quantization.offset == Offset::kMinimum ? outer_minima - outer_scales : 0),
                kCacheLine) *
            kCacheLine) {}

void parse_quantization(const std::string& text, WeightFormat* format, Quantization* quantization) {
  Quantization result;
  std::string codes_name;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) refuse(text, "\"" + word + R"(" has no "=")");
    const std::string name = word.substr(0, equals);
    const std::string value = word.substr(equals + 1);
    if (name == "codes") {
      const auto* known = std::find_if(std::begin(kCodes), std::end(kCodes),
                                       [&](const CodesName& codes) { return value == codes.name; });
      if (known == std::end(kCodes)) refuse(text, "no codes are called \"" + value + "\"");
      *format = known->format;
      std::copy(std::begin(known->values), std::end(known->values), std::begin(result.values));
      codes_name = value;
    } else if (name == "group") {
      result.group = parse_group(text, value);
    } else if (name == "scale") {
      result.scale = parse_scale(text, value);
    } else if (name == "outer_group") {
      result.outer_group = parse_group(text, value);
    } else if (name == "outer") {
      result.outer = parse_scale(text, value);
    } else if (name == "offset" && value == "zero_point") {
      result.offset = Offset::kZeroPoint;
    } else if (name == "offset" && value == "minimum") {
      result.offset = Offset::kMinimum;
    } else {
      refuse(text, "\"" + word + "\" is unknown");
    }
  }
  if (codes_name.empty()) refuse(text, "codes are missing");
  if (result.scale == ScaleType::kNone) refuse(text, "a scale is needed");
  if (result.offset != Offset::kNone && codes_name != "uint4") refuse(text, "an offset needs codes=uint4");
  if (result.outer_group > 0 && (result.group == 0 || result.outer_group % result.group != 0)) {
    refuse(text, "outer_group is no multiple of group");
  }
  if (result.offset == Offset::kMinimum && result.outer == ScaleType::kNone) {
    refuse(text, "a minimum needs an outer scale");
  }
  *quantization = result;
}

}  // namespace numa_moe
