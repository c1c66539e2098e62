// What codes stand for, before scaling: one struct per kind, and this is the place to add one.
//   kLineK             k that a line of 64 bytes holds, for all columns
//   value<step>(word)  the step-th k of a line, as floats

constexpr int kLineBytes = 64;

template <int kCount>
NUMA_MOE_INLINE Bits shift_right_or_none(Bits a) {
  if constexpr (kCount > 0) return shift_right<kCount>(a);
  return a;
}

struct Int8Codes {
  static constexpr WeightFormat kFormat = WeightFormat::kInt8;
  static constexpr int kLineK = 4;

  NUMA_MOE_INLINE_MEMBER explicit Int8Codes(const Quantization& /*quantization*/) {}
  template <int kStep>
  NUMA_MOE_INLINE_MEMBER Vector value(Bits word) const {
    return to_float(shift_right_signed<24>(shift_left<24 - 8 * kStep>(word)));
  }
};

// e4m3 without infinities (OCP 8-bit Floating Point Specification 1.0): 4 bits of exponent with bias 7, 3 of
// mantissa. Moved to the places of fp32 they are 2^120 too small, subnormals too. Its NaN would be 480:
// packing puts NaN into the scale.
NUMA_MOE_INLINE Vector float8_in_highest_byte(Bits a) {
  const Bits magnitude = bit_and(shift_right<4>(a), broadcast_bits(0x07f00000u));
  const Bits sign = bit_and(a, broadcast_bits(0x80000000u));
  return multiply(from_bits(bit_or(sign, magnitude)), broadcast(0x1p120f));
}

struct Float8Codes {
  static constexpr WeightFormat kFormat = WeightFormat::kFloat8;
  static constexpr int kLineK = 4;

  NUMA_MOE_INLINE_MEMBER explicit Float8Codes(const Quantization& /*quantization*/) {}
  template <int kStep>
  NUMA_MOE_INLINE_MEMBER Vector value(Bits word) const {
    return float8_in_highest_byte(shift_left<24 - 8 * kStep>(word));
  }
};

struct FourBitCodes {
  static constexpr WeightFormat kFormat = WeightFormat::kFourBit;
  static constexpr int kLineK = 8;
  const Table table;

  NUMA_MOE_INLINE_MEMBER explicit FourBitCodes(const Quantization& quantization)
      : table(load_table(quantization.values)) {}
  template <int kStep>
  NUMA_MOE_INLINE_MEMBER Vector value(Bits word) const {
    return look_up(table, shift_right_or_none<4 * (kStep / 2) + 16 * (kStep % 2)>(word));
  }
};
