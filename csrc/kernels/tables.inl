// The tables of an instruction set, one entry per format: how activations are kept, and how weights are
// read. A format without an entry is served by a lower instruction set.

template <class Weights, class Storage>
static constexpr KernelTable make_table(WeightFormat format) {
  return {kInstructionSet,     format,         static_cast<int>(sizeof(typename Storage::Element)),
          &stage_row<Storage>, &gemm<Weights>, &activate<Storage>,
          &accumulate_row,     &store_row};
}

const KernelTable* find_table(WeightFormat format) {
#if defined(NUMA_MOE_BFLOAT16_DOT)
  static constexpr KernelTable kBfloat16 =
      make_table<Bfloat16PairWeights, Bfloat16Storage>(WeightFormat::kBfloat16);
#else
  static constexpr KernelTable kBfloat16 =
      make_table<Bfloat16Weights, RoundedFloat32Storage>(WeightFormat::kBfloat16);
  static constexpr KernelTable kFloat16 = make_table<Float16Weights, Float32Storage>(WeightFormat::kFloat16);
  static constexpr KernelTable kFloat32 = make_table<Float32Weights, Float32Storage>(WeightFormat::kFloat32);
#endif
  switch (format) {
    case WeightFormat::kBfloat16: return &kBfloat16;
#if !defined(NUMA_MOE_BFLOAT16_DOT)
    case WeightFormat::kFloat16: return &kFloat16;
    case WeightFormat::kFloat32: return &kFloat32;
#endif
    default: return nullptr;
  }
}
