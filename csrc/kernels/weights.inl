// How gemm.inl reads a weight format: one struct per format, and this is the place to add one.
//
// A panel is a sequence of groups, each with kGroup consecutive k of all kPanelWidth columns. A group is
// multiplied in kSteps steps; a step takes one Activation (one k of fp32, or a pair of bf16) of a row and
// one Weight vector per kLanes columns:
//   load(group, step, vector)        columns [vector * kLanes, (vector + 1) * kLanes) of the step
//   load_activation(x)               the Activation at x in every lane
//   multiply_add(weight, x, sum)     sum + weight * x

struct Float32Weights {
  using Activation = float;
  using Weight = Vector;
  static constexpr int kGroup = 1;
  static constexpr int kSteps = 1;
  static constexpr int kGroupBytes = kPanelWidth * 4;

  NUMA_MOE_INLINE Vector load(const char* group, int /*step*/, int vector) {
    return from_bits(load_bits(group + vector * kLanes * 4));
  }
  NUMA_MOE_INLINE Vector load_activation(const float* x) { return broadcast(*x); }
  NUMA_MOE_INLINE Vector multiply_add(Vector weight, Vector x, Vector sum) {
    return accumulate(weight, x, sum);
  }
};

struct Float16Weights : Float32Weights {
  static constexpr int kGroupBytes = kPanelWidth * 2;

  NUMA_MOE_INLINE Vector load(const char* group, int /*step*/, int vector) {
    return load_float16(group + vector * kLanes * 2);
  }
};

// Pairs of k, each lane a 32-bit word: the first k in its low half.
struct Bfloat16Weights : Float32Weights {
  static constexpr int kGroup = 2;
  static constexpr int kSteps = 2;
  static constexpr int kGroupBytes = kPanelWidth * 4;

  NUMA_MOE_INLINE Vector load(const char* group, int step, int vector) {
    const Bits pairs = load_bits(group + vector * kLanes * 4);
    return from_bits(step == 0 ? shift_left<16>(pairs) : high_halves(pairs));
  }
};

#if defined(NUMA_MOE_BFLOAT16_DOT)
// The same panels on an instruction set with dot_bfloat16(weights, x, sum), which adds the products of
// both bf16 pairs to each lane.
struct Bfloat16PairWeights {
  using Activation = uint16_t;
  using Weight = Bits;
  static constexpr int kGroup = 2;
  static constexpr int kSteps = 1;
  static constexpr int kGroupBytes = kPanelWidth * 4;

  NUMA_MOE_INLINE Bits load(const char* group, int /*step*/, int vector) {
    return load_bits(group + vector * kLanes * 4);
  }
  NUMA_MOE_INLINE Bits load_activation(const uint16_t* x) {
    uint32_t pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return broadcast_bits(pair);
  }
  NUMA_MOE_INLINE Vector multiply_add(Bits weight, Bits x, Vector sum) {
    return dot_bfloat16(weight, x, sum);
  }
};
#endif
