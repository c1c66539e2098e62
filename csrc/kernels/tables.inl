// The tables of an instruction set, one entry per format: how activations are kept, and how weights are
// read. A format without an entry is served by a lower instruction set.

template <class Storage>
static constexpr KernelTable make_table(WeightFormat format, void (*gemm)(const GemmArgs&)) {
  return {kInstructionSet,     format,  static_cast<int>(sizeof(typename Storage::Element)),
          &stage_row<Storage>, gemm,    &activate<Storage>,
          &accumulate_row,     nullptr, format,
          &store_row};
}

#if !defined(NUMA_MOE_BFLOAT16_DOT) || defined(NUMA_MOE_BFLOAT16_CODES)
#define NUMA_MOE_CODES
template <class Codes>
static constexpr KernelTable make_quantized_table() {
#if defined(NUMA_MOE_BFLOAT16_DOT)
  KernelTable table = make_table<Bfloat16Storage>(Codes::kFormat, &gemm_quantized<Codes>);
  table.plain_format = WeightFormat::kBfloat16;
#else
  KernelTable table = make_table<RoundedFloat32Storage>(Codes::kFormat, &gemm_quantized<Codes>);
  table.plain_format = WeightFormat::kFloat32;
#endif
  table.dequantize = &dequantize<Codes>;
  return table;
}
#endif

const KernelTable* find_table(WeightFormat format) {
#if defined(NUMA_MOE_BFLOAT16_DOT)
  static constexpr KernelTable kBfloat16 =
      make_table<Bfloat16Storage>(WeightFormat::kBfloat16, &gemm<Bfloat16PairWeights>);
#else
  static constexpr KernelTable kBfloat16 =
      make_table<RoundedFloat32Storage>(WeightFormat::kBfloat16, &gemm<Bfloat16Weights>);
  static constexpr KernelTable kFloat16 =
      make_table<Float32Storage>(WeightFormat::kFloat16, &gemm<Float16Weights>);
  static constexpr KernelTable kFloat32 =
      make_table<Float32Storage>(WeightFormat::kFloat32, &gemm<Float32Weights>);
#endif
#if defined(NUMA_MOE_CODES)
  static constexpr KernelTable kInt8 = make_quantized_table<Int8Codes>();
  static constexpr KernelTable kFloat8 = make_quantized_table<Float8Codes>();
  static constexpr KernelTable kFourBit = make_quantized_table<FourBitCodes>();
#endif
  switch (format) {
    case WeightFormat::kBfloat16: return &kBfloat16;
#if !defined(NUMA_MOE_BFLOAT16_DOT)
    case WeightFormat::kFloat16: return &kFloat16;
    case WeightFormat::kFloat32: return &kFloat32;
#endif
#if defined(NUMA_MOE_CODES)
    case WeightFormat::kInt8: return &kInt8;
    case WeightFormat::kFloat8: return &kFloat8;
    case WeightFormat::kFourBit: return &kFourBit;
#endif
    default: return nullptr;
  }
}
