// gemm() for weights that are codes, with few rows: each line of codes is brought to floats (or bf16) once
// for up to kMostQuantizedRows rows. With many rows, dequantize() and the gemm of plain_format are faster.

#if defined(NUMA_MOE_BFLOAT16_DOT)
constexpr int kMostQuantizedRows = 8;
constexpr int kQuantizedAccumulators = 16;
#else
constexpr int kMostQuantizedRows = 4;
constexpr int kQuantizedAccumulators = kMostAccumulators / 2;  // scales take as many registers
#endif

constexpr int quantized_panels(int rows) {
  int panels = 4;
  while (panels > 1 && rows * panels * kVectorsPerPanel > kQuantizedAccumulators) panels /= 2;
  return panels;
}

constexpr int64_t kDequantizedBytes =
#if defined(NUMA_MOE_BFLOAT16_DOT)
    2;
#else
    4;
#endif

// How far ahead of its use a line of codes is fetched.
constexpr int64_t kCodesAhead = 1024;

template <int kBegin, int kEnd, class Function>
NUMA_MOE_INLINE void for_each_step(const Function& function) {
  if constexpr (kBegin < kEnd) {
    function(std::integral_constant<int, kBegin>());
    for_each_step<kBegin + 1, kEnd>(function);
  }
}

// Weight vectors of one group, scaled.
template <class Codes, Offset kOffset>
struct Dequantizer {
  const Codes& codes;
  Vector scale;
  Vector offset;

  template <int kStep>
  NUMA_MOE_INLINE_MEMBER Vector weight(Bits word) const {
    const Vector value = codes.template value<kStep>(word);
    if constexpr (kOffset == Offset::kZeroPoint) return multiply(scale, subtract(value, offset));
    if constexpr (kOffset == Offset::kMinimum) return subtract(multiply(scale, value), offset);
    return multiply(scale, value);
  }
};

template <class Codes, Offset kOffset>
NUMA_MOE_INLINE Dequantizer<Codes, kOffset> dequantizer(const Codes& codes, const PanelScales& scales,
                                                        const char* panel, int64_t group, int vector) {
  if constexpr (kOffset == Offset::kNone) return {codes, scales.scale(panel, group, vector), zero()};
  return {codes, scales.scale(panel, group, vector), scales.offset<kOffset>(panel, group, vector)};
}

// Rows of a tile beyond those there are repeat the last one; their sums aren't stored.
template <int kRows, typename Activation>
struct TileRows {
  const Activation* x[kRows];

  NUMA_MOE_INLINE_MEMBER TileRows(const GemmArgs& args, int64_t first, int64_t rows) {
    for (int row = 0; row < kRows; ++row) {
      x[row] = static_cast<const Activation*>(args.x) + (first + smaller(row, rows - 1)) * args.x_stride;
    }
  }
};

// The lines of a group: the last group of a row may have fewer.
template <class Codes>
NUMA_MOE_INLINE int64_t lines_of_group(const QuantizedPanel& layout, int64_t group) {
  const int64_t all = layout.scales / kLineBytes;
  const int64_t per_group = layout.group / Codes::kLineK;
  return smaller(per_group, all - group * per_group);
}

#if defined(NUMA_MOE_BFLOAT16_DOT)

// The sum over the codes of one scale first, in bf16 dot products, then times the scale: every
// code is a bf16 number, and its product with the scale need not be.
template <class Codes, Offset kOffset, int kRows, int kPanels>
static __attribute__((noinline)) void multiply_quantized(const GemmArgs& args, const QuantizedPanel& layout,
                                                         int64_t first_row, int64_t rows, int64_t panel) {
  BfloatCodes<Codes> codes(*args.quantization);
  if constexpr (kOffset == Offset::kZeroPoint) codes.use_differences();
  const PanelScales scales{*args.quantization, layout};
  const TileRows<kRows, uint16_t> tile(args, first_row, rows);
  const char* weights = static_cast<const char*>(args.weights) + panel * args.panel_stride;
  const Bits ones = broadcast_bits(0x3f803f80u);
  int64_t line = 0;
  for (int64_t group = 0; group < layout.groups; ++group) {
    Vector sum[kRows][kPanels];
    Vector sum_of_x[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      sum_of_x[row] = zero();
#pragma GCC unroll 16
      for (int p = 0; p < kPanels; ++p) sum[row][p] = zero();
    }
    Bits zero_points[kPanels];
    if constexpr (kOffset == Offset::kZeroPoint) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const Bits bytes = load_bytes(weights + p * args.panel_stride + layout.offsets + group * kPanelWidth);
        zero_points[p] = bit_or(bytes, shift_left<16>(bytes));
      }
    }
    for (const int64_t end = line + lines_of_group<Codes>(layout, group); line < end; ++line) {
      constexpr int kPairs = Codes::kLineK / 2;
      Bits pairs[kPanels][kPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const char* at = weights + p * args.panel_stride + line * kLineBytes;
        __builtin_prefetch(at + kCodesAhead);
        if constexpr (kOffset == Offset::kZeroPoint) {
          codes.differences(load_bits(at), zero_points[p], pairs[p]);
        } else {
          codes.pairs(load_bits(at), pairs[p]);
        }
      }
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          uint32_t two;
          __builtin_memcpy(&two, tile.x[row] + line * Codes::kLineK + pair * 2, sizeof(two));
          const Bits x = broadcast_bits(two);
          if constexpr (kOffset == Offset::kMinimum) sum_of_x[row] = dot_bfloat16(ones, x, sum_of_x[row]);
#pragma GCC unroll 4
          for (int p = 0; p < kPanels; ++p) sum[row][p] = dot_bfloat16(pairs[p][pair], x, sum[row][p]);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const char* at = weights + p * args.panel_stride;
      const Vector scale = scales.scale(at, group, 0);
      Vector minimum = zero();
      if constexpr (kOffset == Offset::kMinimum) minimum = scales.offset<kOffset>(at, group, 0);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        float* out = args.out + (first_row + row) * args.out_stride + (panel + p) * kPanelWidth;
        const Vector before = group == 0 ? zero() : load(out);
        Vector total = fused_multiply_add(scale, sum[row][p], before);
        if constexpr (kOffset == Offset::kMinimum) {
          total = fused_multiply_add(subtract(zero(), minimum), sum_of_x[row], total);
        }
        store(out, total);
      }
    }
  }
}

#else

// Every weight is scaled, then multiplied: the sum is the chain of fused multiply-adds over ascending k that
// dequantized weights would give.
template <class Codes, Offset kOffset, int kRows, int kPanels>
static __attribute__((noinline)) void multiply_quantized(const GemmArgs& args, const QuantizedPanel& layout,
                                                         int64_t first_row, int64_t rows, int64_t panel) {
  constexpr int kVectors = kPanels * kVectorsPerPanel;
  const Codes codes(*args.quantization);
  const PanelScales scales{*args.quantization, layout};
  const TileRows<kRows, float> tile(args, first_row, rows);
  const char* weights = static_cast<const char*>(args.weights) + panel * args.panel_stride;
  Vector sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) sum[row][vector] = zero();
  }
  int64_t line = 0;
  for (int64_t group = 0; group < layout.groups; ++group) {
    Vector scale[kVectors], offset[kVectors];
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      const char* at = weights + vector / kVectorsPerPanel * args.panel_stride;
      const auto one = dequantizer<Codes, kOffset>(codes, scales, at, group, vector % kVectorsPerPanel);
      scale[vector] = one.scale;
      offset[vector] = one.offset;
    }
    for (const int64_t end = line + lines_of_group<Codes>(layout, group); line < end; ++line) {
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) {
        const char* at = weights + vector / kVectorsPerPanel * args.panel_stride + line * kLineBytes;
        if (vector % kVectorsPerPanel == 0) __builtin_prefetch(at + kCodesAhead);
        const Bits word = load_bits(at + vector % kVectorsPerPanel * kLanes * 4);
        const Dequantizer<Codes, kOffset> one{codes, scale[vector], offset[vector]};
        for_each_step<0, Codes::kLineK>([&](auto step) NUMA_MOE_INLINE_LAMBDA {
          const Vector weight = one.template weight<step()>(word);
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            const Vector x = broadcast(tile.x[row][line * Codes::kLineK + step()]);
            sum[row][vector] = accumulate(weight, x, sum[row][vector]);
          }
        });
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    if (row >= rows) break;
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      store(args.out + (first_row + row) * args.out_stride + panel * kPanelWidth + vector * kLanes,
            sum[row][vector]);
    }
  }
}

#endif

template <class Codes, Offset kOffset, int kRows, int kPanels>
static void multiply_panels(const GemmArgs& args, const QuantizedPanel& layout, int64_t first_row,
                            int64_t rows, int64_t panel) {
  for (; panel + kPanels <= args.num_panels; panel += kPanels) {
    multiply_quantized<Codes, kOffset, kRows, kPanels>(args, layout, first_row, rows, panel);
  }
  if constexpr (kPanels > 1) {
    if (panel < args.num_panels) {
      multiply_panels<Codes, kOffset, kRows, kPanels / 2>(args, layout, first_row, rows, panel);
    }
  }
}

template <class Codes, Offset kOffset, int kRows>
static void multiply_rows(const GemmArgs& args, const QuantizedPanel& layout, int64_t first_row,
                          int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows <= kRows / 2) {
      return multiply_rows<Codes, kOffset, kRows / 2>(args, layout, first_row, rows);
    }
  }
  multiply_panels<Codes, kOffset, kRows, quantized_panels(kRows)>(args, layout, first_row, rows, 0);
}

template <class Codes, Offset kOffset>
static void gemm_with_offset(const GemmArgs& args) {
  const QuantizedPanel layout(Codes::kFormat, *args.quantization, args.k);
  for (int64_t row = 0; row < args.rows; row += kMostQuantizedRows) {
    multiply_rows<Codes, kOffset, kMostQuantizedRows>(args, layout, row,
                                                      smaller(args.rows - row, kMostQuantizedRows));
  }
}

// Only codes of 4 bits have offsets: parse_quantization() sees to it.
template <class Codes>
static void gemm_quantized(const GemmArgs& args) {
  if constexpr (Codes::kFormat == WeightFormat::kFourBit) {
    if (args.quantization->offset == Offset::kZeroPoint) {
      return gemm_with_offset<Codes, Offset::kZeroPoint>(args);
    }
    if (args.quantization->offset == Offset::kMinimum) {
      return gemm_with_offset<Codes, Offset::kMinimum>(args);
    }
  }
  gemm_with_offset<Codes, Offset::kNone>(args);
}

template <class Codes, Offset kOffset>
static void dequantize_with_offset(const GemmArgs& args, void* panels) {
  const QuantizedPanel layout(Codes::kFormat, *args.quantization, args.k);
  const Codes codes(*args.quantization);
  const PanelScales scales{*args.quantization, layout};
  const int64_t lines = layout.scales / kLineBytes;
  for (int64_t panel = 0; panel < args.num_panels; ++panel) {
    const char* weights = static_cast<const char*>(args.weights) + panel * args.panel_stride;
    float* out = static_cast<float*>(panels) +
                 panel * lines * Codes::kLineK * kPanelWidth * kDequantizedBytes / int64_t{sizeof(float)};
    for (int64_t group = 0; group < layout.groups; ++group) {
      const int64_t first = group * layout.group / Codes::kLineK;
      const int64_t end = first + lines_of_group<Codes>(layout, group);
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectorsPerPanel; ++vector) {
        const auto one = dequantizer<Codes, kOffset>(codes, scales, weights, group, vector);
        for (int64_t line = first; line < end; ++line) {
          const Bits word = load_bits(weights + line * kLineBytes + vector * kLanes * 4);
          float* to = out + line * Codes::kLineK * kPanelWidth * kDequantizedBytes / int64_t{sizeof(float)} +
                      vector * kLanes;
          for_each_step<0, Codes::kLineK / 2>([&](auto pair) NUMA_MOE_INLINE_LAMBDA {
            const Vector even = one.template weight<2 * pair()>(word);
            const Vector odd = one.template weight<2 * pair() + 1>(word);
#if defined(NUMA_MOE_BFLOAT16_DOT)
            const Bits halves = bit_or(to_bfloat16(even), shift_left<16>(to_bfloat16(odd)));
            store(to + pair() * kPanelWidth, from_bits(halves));
#else
            store(to + 2 * pair() * kPanelWidth, even);
            store(to + (2 * pair() + 1) * kPanelWidth, odd);
#endif
          });
        }
      }
    }
  }
}

template <class Codes>
static void dequantize(const GemmArgs& args, void* panels) {
  if constexpr (Codes::kFormat == WeightFormat::kFourBit) {
    if (args.quantization->offset == Offset::kZeroPoint) {
      return dequantize_with_offset<Codes, Offset::kZeroPoint>(args, panels);
    }
    if (args.quantization->offset == Offset::kMinimum) {
      return dequantize_with_offset<Codes, Offset::kMinimum>(args, panels);
    }
  }
  dequantize_with_offset<Codes, Offset::kNone>(args, panels);
}
