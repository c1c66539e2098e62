// Scales and offsets of a panel, brought to fp32.

// kLanes of them, from `at` on.
NUMA_MOE_INLINE Vector load_scales(ScaleType type, const char* base, int64_t at) {
  switch (type) {
    case ScaleType::kNone: return broadcast(1.0f);
    case ScaleType::kFloat32: return from_bits(load_bits(base + at * 4));
    case ScaleType::kFloat16: return load_float16(base + at * 2);
    case ScaleType::kBfloat16: return from_bits(shift_left<16>(load_halves(base + at * 2)));
    case ScaleType::kFloat8: return float8_in_highest_byte(shift_left<24>(load_bytes(base + at)));
    case ScaleType::kPowerOfTwo: {
      // 2^(code - 127); of code 0 that is subnormal, of 255 infinite here and NaN by the standard.
      const Vector power = from_bits(shift_left<23>(load_bytes(base + at)));
      return select(less(power, broadcast(0x1p-126f)), broadcast(0x1p-127f), power);
    }
    case ScaleType::kInt8: return to_float(shift_right_signed<24>(shift_left<24>(load_bytes(base + at))));
    case ScaleType::kUint8: return to_float(load_bytes(base + at));
  }
  __builtin_unreachable();
}

struct PanelScales {
  const Quantization& quantization;
  const QuantizedPanel& layout;

  NUMA_MOE_INLINE_MEMBER Vector outer(const char* section, int64_t group, int vector) const {
    const int64_t outer_group = layout.outer_groups == 1 ? 0 : group * layout.group / layout.outer_group;
    return load_scales(quantization.outer, section, outer_group * kPanelWidth + vector * kLanes);
  }
  // Of columns [vector * kLanes, (vector + 1) * kLanes).
  NUMA_MOE_INLINE_MEMBER Vector scale(const char* panel, int64_t group, int vector) const {
    const Vector inner =
        load_scales(quantization.scale, panel + layout.scales, group * kPanelWidth + vector * kLanes);
    if (quantization.outer == ScaleType::kNone) return inner;
    return multiply(outer(panel + layout.outer_scales, group, vector), inner);
  }
  // The zero point, or the minimum.
  template <Offset kOffset>
  NUMA_MOE_INLINE_MEMBER Vector offset(const char* panel, int64_t group, int vector) const {
    const Vector inner = to_float(load_bytes(panel + layout.offsets + group * kPanelWidth + vector * kLanes));
    if constexpr (kOffset == Offset::kZeroPoint) return inner;
    return multiply(outer(panel + layout.outer_minima, group, vector), inner);
  }
};
