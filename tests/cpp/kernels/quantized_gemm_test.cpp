// gemm and dequantize of codes, against double sums over weights that are computed here from the definitions
// in kernels/quantization.h.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/guarded_memory.h"
#include "kernels/quantization.h"
#include "kernels/reference.h"

namespace numa_moe::test {
namespace {

float float8_value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return static_cast<float>(code & 0x80 ? -magnitude : magnitude);
}

// A matrix of codes, and the weights that they are.
struct CodedMatrix {
  WeightFormat format{};
  Quantization quantization;
  int64_t k = 0;
  int64_t columns = 0;
  std::vector<char> panels;
  int64_t panel_stride = 0;
  std::vector<float> weights;  // [columns, k]
};

class CodedMatrixMaker {
 public:
  explicit CodedMatrixMaker(uint32_t seed) : random_(seed) {}

  CodedMatrix make(const std::string& text, int64_t k, int64_t num_panels) {
    CodedMatrix matrix;
    parse_quantization(text, &matrix.format, &matrix.quantization);
    matrix.k = k;
    matrix.columns = num_panels * kPanelWidth;
    const QuantizedPanel layout(matrix.format, matrix.quantization, k);
    matrix.panel_stride = layout.bytes;
    matrix.panels.resize(static_cast<size_t>(num_panels * layout.bytes));
    matrix.weights.resize(static_cast<size_t>(matrix.columns * k));
    for (int64_t column = 0; column < matrix.columns; ++column) fill_column(column, layout, &matrix);
    return matrix;
  }

 private:
  // Writes a random scale and returns what it is.
  float write_scale(ScaleType type, char* to) {
    std::uniform_real_distribution<float> uniform(0.01f, 2.0f);
    const float value = uniform(random_);
    switch (type) {
      case ScaleType::kNone: return 1;
      case ScaleType::kFloat32: std::memcpy(to, &value, 4); return value;
      case ScaleType::kFloat16: {
        const uint16_t bits = nearest_float16(value);
        std::memcpy(to, &bits, 2);
        return static_cast<float>(float16_value(bits));
      }
      case ScaleType::kBfloat16: {
        const uint16_t bits = nearest_bfloat16(value);
        std::memcpy(to, &bits, 2);
        return static_cast<float>(bfloat16_value(bits));
      }
      case ScaleType::kFloat8: {
        const auto code = static_cast<uint8_t>(random_() % 0x7f);  // positive, subnormal too
        std::memcpy(to, &code, 1);
        return float8_value(code);
      }
      case ScaleType::kPowerOfTwo: {
        // Codes around 1, and now and then 0: a subnormal.
        const auto code = static_cast<uint8_t>(random_() % 16 == 0 ? 0 : 120 + random_() % 12);
        std::memcpy(to, &code, 1);
        return std::ldexp(1.0f, code - 127);
      }
      case ScaleType::kInt8: {
        const auto code = static_cast<int8_t>(random_() % 256 - 128);
        std::memcpy(to, &code, 1);
        return code;
      }
      case ScaleType::kUint8: {
        const auto code = static_cast<uint8_t>(random_() % 256);
        std::memcpy(to, &code, 1);
        return code;
      }
    }
    return 0;
  }

  void fill_column(int64_t column, const QuantizedPanel& layout, CodedMatrix* matrix) {
    char* panel = matrix->panels.data() + column / kPanelWidth * layout.bytes;
    const int64_t lane = column % kPanelWidth;
    const Quantization& quantization = matrix->quantization;
    const int bytes = scale_bytes(quantization.scale), outer_bytes = scale_bytes(quantization.outer);
    std::vector<float> outer, outer_minimum;
    for (int64_t group = 0; group < layout.outer_groups; ++group) {
      const int64_t at = (group * kPanelWidth + lane) * outer_bytes;
      outer.push_back(write_scale(quantization.outer, panel + layout.outer_scales + at));
      outer_minimum.push_back(quantization.offset == Offset::kMinimum
                                  ? write_scale(quantization.outer, panel + layout.outer_minima + at)
                                  : 0);
    }
    for (int64_t group = 0; group < layout.groups; ++group) {
      const float inner =
          write_scale(quantization.scale, panel + layout.scales + (group * kPanelWidth + lane) * bytes);
      const auto outer_group = static_cast<size_t>(group * layout.group / layout.outer_group);
      const float scale = outer[outer_group] * inner;
      float offset = 0;
      if (quantization.offset != Offset::kNone) {
        const auto code = static_cast<uint8_t>(random_() % 17);
        std::memcpy(panel + layout.offsets + group * kPanelWidth + lane, &code, 1);
        offset = code;
      }
      for (int64_t k = group * layout.group; k < std::min(matrix->k, (group + 1) * layout.group); ++k) {
        const float value = write_code(matrix->format, quantization, panel, lane, k);
        matrix->weights[static_cast<size_t>(column * matrix->k + k)] =
            quantization.offset == Offset::kZeroPoint ? scale * (value - offset)
                                                      : scale * value - outer_minimum[outer_group] * offset;
      }
    }
  }

  float write_code(WeightFormat format, const Quantization& quantization, char* panel, int64_t lane,
                   int64_t k) {
    if (format == WeightFormat::kFourBit) {
      const uint32_t code = random_() % 16;
      char* at = panel + k / 8 * 64 + lane * 4;
      uint32_t word;
      std::memcpy(&word, at, 4);
      word |= code << (k % 8 / 2 * 4 + k % 2 * 16);
      std::memcpy(at, &word, 4);
      return quantization.values[code];
    }
    auto code = static_cast<uint8_t>(random_());
    if (format == WeightFormat::kFloat8 && (code & 0x7f) == 0x7f) code = 0;  // NaN isn't a code here
    std::memcpy(panel + k / 4 * 64 + lane * 4 + k % 4, &code, 1);
    return format == WeightFormat::kInt8 ? static_cast<int8_t>(code) : float8_value(code);
  }

  std::mt19937 random_;
};

constexpr const char* kQuantizations[] = {
    "codes=int8 scale=fp32",
    "codes=int8 scale=bf16 group=32",
    "codes=int8 scale=int8 group=16 outer=fp16 outer_group=256",
    "codes=fp8 scale=fp32 group=128",
    "codes=fp8 scale=fp32",
    "codes=int4 scale=fp16 group=32",
    "codes=uint4 scale=bf16 group=64 offset=zero_point",
    "codes=uint4 scale=uint8 group=32 outer=fp16 outer_group=256 offset=minimum",
    "codes=e2m1 scale=e8m0 group=32",
    "codes=e2m1 scale=fp8 group=16 outer=fp32",
    "codes=iq4 scale=int8 group=32 outer=fp16 outer_group=256",
};

class QuantizedGemmTest : public testing::TestWithParam<const char*> {
 protected:
  std::mt19937 random_{54321};
  int64_t random_between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  // [rows, k], values that bf16 holds.
  std::vector<float> random_rows(int64_t rows, int64_t k) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(rows * k));
    for (float& value : x) value = round_to_weight(WeightFormat::kBfloat16, normal(random_));
    return x;
  }

  static std::vector<float> multiply(const KernelTable& table, const CodedMatrix& matrix,
                                     const std::vector<float>& x, int64_t rows) {
    const int64_t padded = (matrix.k + 7) / 8 * 8;
    const int64_t panels = matrix.columns / kPanelWidth;
    const GuardedMemory staged(static_cast<size_t>(rows * padded * table.activation_bytes), Flush::kToEnd);
    const GuardedMemory weights(matrix.panels.size(), Flush::kToEnd);
    std::memcpy(weights.data(), matrix.panels.data(), matrix.panels.size());
    for (int64_t row = 0; row < rows; ++row) {
      table.stage_row(x.data() + row * matrix.k, DataType::kFloat32, matrix.k, padded,
                      static_cast<char*>(staged.data()) + row * padded * table.activation_bytes);
    }
    std::vector<float> out(static_cast<size_t>(rows * matrix.columns), -1.0f);
    table.gemm({staged.data(), padded, rows, matrix.k, weights.data(), matrix.panel_stride, panels,
                out.data(), matrix.columns, &matrix.quantization});
    return out;
  }
};

TEST_P(QuantizedGemmTest, IsTheProductOfTheWeightsThatCodesAndScalesAre) {
  CodedMatrixMaker maker(7);
  for (int trial = 0; trial < 40; ++trial) {
    const int64_t k = random_between(1, 600), rows = random_between(0, 20), panels = random_between(1, 7);
    const CodedMatrix matrix = maker.make(GetParam(), k, panels);
    const std::vector<float> x = random_rows(rows, k);
    for (const KernelTable* table : tables(matrix.format)) {
      SCOPED_TRACE(std::string(instruction_set_name(table->instruction_set)) + ", rows " +
                   std::to_string(rows) + ", k " + std::to_string(k) + ", panels " + std::to_string(panels));
      const std::vector<float> out = multiply(*table, matrix, x, rows);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < matrix.columns; ++column) {
          double exact = 0, magnitude = 0;
          for (int64_t i = 0; i < k; ++i) {
            const double product = double{x[static_cast<size_t>(row * k + i)]} *
                                   double{matrix.weights[static_cast<size_t>(column * k + i)]};
            exact += product;
            magnitude += std::fabs(product);
          }
          // Minima are subtracted after the sum, which can be larger than the difference.
          const double offsets = matrix.quantization.offset == Offset::kMinimum ? 16 : 1;
          ASSERT_NEAR(out[static_cast<size_t>(row * matrix.columns + column)], exact,
                      static_cast<double>(k + 4) * 0x1p-24 * (magnitude + 1) * offsets)
              << "row " << row << ", column " << column;
        }
      }
    }
  }
}

// Where activations are floats, every instruction set computes the same chain as on dequantized weights.
TEST_P(QuantizedGemmTest, HasTheBitsOfDequantizedWeights) {
  CodedMatrixMaker maker(8);
  for (const int64_t k : {1, 8, 31, 256, 520}) {
    const CodedMatrix matrix = maker.make(GetParam(), k, 5);
    for (const int64_t rows : {1, 2, 3, 4, 7}) {
      const std::vector<float> x = random_rows(rows, k);
      for (const KernelTable* table : tables(matrix.format)) {
        if (table->activation_bytes != 4) continue;
        const std::vector<float> out = multiply(*table, matrix, x, rows);
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t column = 0; column < matrix.columns; ++column) {
            float sum = 0;
            for (int64_t i = 0; i < k; ++i) {
              sum = std::fma(matrix.weights[static_cast<size_t>(column * k + i)],
                             x[static_cast<size_t>(row * k + i)], sum);
            }
            ASSERT_EQ(std::bit_cast<uint32_t>(out[static_cast<size_t>(row * matrix.columns + column)]),
                      std::bit_cast<uint32_t>(sum))
                << instruction_set_name(table->instruction_set) << ", k " << k << ", row " << row;
          }
        }
      }
    }
  }
}

TEST_P(QuantizedGemmTest, DequantizesToThePlainFormat) {
  CodedMatrixMaker maker(9);
  for (const int64_t k : {1, 9, 64, 300}) {
    const CodedMatrix matrix = maker.make(GetParam(), k, 3);
    const int64_t padded = (k + 7) / 8 * 8;
    for (const KernelTable* table : tables(matrix.format)) {
      SCOPED_TRACE(instruction_set_name(table->instruction_set));
      const bool bfloat16 = table->plain_format == WeightFormat::kBfloat16;
      const GuardedMemory out(static_cast<size_t>(matrix.columns * padded * (bfloat16 ? 2 : 4)),
                              Flush::kToEnd);
      GemmArgs args{};
      args.k = k;
      args.weights = matrix.panels.data();
      args.panel_stride = matrix.panel_stride;
      args.num_panels = matrix.columns / kPanelWidth;
      args.quantization = &matrix.quantization;
      table->dequantize(args, out.data());
      for (int64_t column = 0; column < matrix.columns; ++column) {
        const int64_t panel = column / kPanelWidth, lane = column % kPanelWidth;
        for (int64_t i = 0; i < k; ++i) {
          const float weight = matrix.weights[static_cast<size_t>(column * k + i)];
          if (bfloat16) {
            uint16_t got;
            std::memcpy(&got,
                        static_cast<char*>(out.data()) +
                            2 * (panel * padded * kPanelWidth + (i / 2 * kPanelWidth + lane) * 2 + i % 2),
                        2);
            ASSERT_EQ(bfloat16_value(got), bfloat16_value(nearest_bfloat16(weight))) << column << ", " << i;
          } else {
            float got;
            std::memcpy(&got,
                        static_cast<char*>(out.data()) + 4 * ((panel * padded + i) * kPanelWidth + lane), 4);
            ASSERT_EQ(got, weight) << column << ", " << i;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, QuantizedGemmTest, testing::ValuesIn(kQuantizations), [](const auto& info) {
  std::string name = info.param;
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  }
  return name;
});

// A row's sum doesn't depend on the rows and panels that are computed with it.
TEST(QuantizedGemm, BitsDependOnRowAndColumnOnly) {
  CodedMatrixMaker maker(10);
  const CodedMatrix matrix = maker.make("codes=uint4 scale=bf16 group=32 offset=zero_point", 200, 7);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(17 * 200);
  for (float& value : x) value = round_to_weight(WeightFormat::kBfloat16, normal(random));
  for (const KernelTable* table : tables(matrix.format)) {
    const auto product = [&](int64_t first, int64_t rows, int64_t panel, int64_t panels) {
      std::vector<char> staged(static_cast<size_t>(rows * 200 * table->activation_bytes));
      for (int64_t row = 0; row < rows; ++row) {
        table->stage_row(x.data() + (first + row) * 200, DataType::kFloat32, 200, 200,
                         staged.data() + row * 200 * table->activation_bytes);
      }
      std::vector<float> out(static_cast<size_t>(rows * panels * kPanelWidth));
      table->gemm({staged.data(), 200, rows, 200, matrix.panels.data() + panel * matrix.panel_stride,
                   matrix.panel_stride, panels, out.data(), panels * kPanelWidth, &matrix.quantization});
      return out;
    };
    const std::vector<float> whole = product(0, 17, 0, 7);
    for (int64_t row = 0; row < 17; ++row) {
      for (int64_t panel = 0; panel < 7; ++panel) {
        const std::vector<float> part = product(row, 1, panel, 1);
        for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
          ASSERT_EQ(part[static_cast<size_t>(lane)],
                    whole[static_cast<size_t>((row * 7 + panel) * kPanelWidth + lane)])
              << instruction_set_name(table->instruction_set);
        }
      }
    }
  }
}

TEST(ParseQuantization, SaysWhatIsWrong) {
  const auto why = [](const std::string& text) -> std::string {
    WeightFormat format{};
    Quantization quantization;
    try {
      parse_quantization(text, &format, &quantization);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(why("codes=int4 scale=fp32 group=32"), "");
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "codes are missing"},
           {"codes", "has no \"=\""},
           {"codes=int5", "no codes are called \"int5\""},
           {"codes=int4 scale=fp64", "no scale is called \"fp64\""},
           {"codes=int4 scale=none", "a scale is needed"},
           {"codes=int4 group=12", "a group is a multiple of 8, not \"12\""},
           {"codes=int4 group=-8", "not \"-8\""},
           {"codes=int4 group=99999999999999999999", "a group is a multiple of 8"},
           {"codes=int4 group=32 outer=fp16 outer_group=40", "outer_group is no multiple of group"},
           {"codes=int4 offset=zero_point", "an offset needs codes=uint4"},
           {"codes=uint4 offset=minimum", "a minimum needs an outer scale"},
           {"codes=int4 offset=maximum", "\"offset=maximum\" is unknown"},
           {"codes=int4 colour=red", "\"colour=red\" is unknown"}}) {
    EXPECT_NE(why(text).find(part), std::string::npos) << text << ": " << why(text);
  }
}

}  // namespace
}  // namespace numa_moe::test
