// Codes as bf16 numbers, which all of them are: by looking them up. Needs VBMI for codes of 8 bits.
//   pairs(word, out)  a line of codes as kLineK / 2 vectors of pairs

template <class Codes>
struct BfloatCodes;

NUMA_MOE_INLINE uint16_t bfloat16_bits(float value) {  // of a bf16 number
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

template <>
struct BfloatCodes<FourBitCodes> {
  __m512i table;  // a lookup takes 5 bits: those of the next code don't matter where both halves are the same

  NUMA_MOE_INLINE_MEMBER explicit BfloatCodes(const Quantization& quantization) {
    uint16_t values[32];
    for (int i = 0; i < 32; ++i) values[i] = bfloat16_bits(quantization.values[i % 16]);
    table = _mm512_loadu_si512(values);
  }
  // Codes of uint4 minus a zero point of 0 to 16 in every 16 bits, -16 to 15: as many as the table has
  // entries.
  NUMA_MOE_INLINE_MEMBER void use_differences() {
    uint16_t values[32];
    for (int i = 0; i < 32; ++i) values[i] = bfloat16_bits(static_cast<float>(i < 16 ? i : i - 32));
    table = _mm512_loadu_si512(values);
  }
  NUMA_MOE_INLINE_MEMBER void differences(Bits word, Bits zero_points, Bits (&out)[4]) const {
    const Bits code = broadcast_bits(0x000f000fu);
    const Bits shifted[4] = {word, shift_right<4>(word), shift_right<8>(word), shift_right<12>(word)};
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const __m512i index = _mm512_sub_epi16(bit_and(shifted[pair], code).value, zero_points.value);
      out[pair] = {_mm512_permutexvar_epi16(index, table)};
    }
  }
  NUMA_MOE_INLINE_MEMBER void pairs(Bits word, Bits (&out)[4]) const {
    out[0] = {_mm512_permutexvar_epi16(word.value, table)};
    out[1] = {_mm512_permutexvar_epi16(shift_right<4>(word).value, table)};
    out[2] = {_mm512_permutexvar_epi16(shift_right<8>(word).value, table)};
    out[3] = {_mm512_permutexvar_epi16(shift_right<12>(word).value, table)};
  }
};

// The bf16 numbers of 128 codes, lower and higher bytes apart.
struct ByteTable {
  __m512i low[2], high[2];

  NUMA_MOE_INLINE_MEMBER void load(const uint16_t* values) {
    uint8_t low_bytes[128], high_bytes[128];
    for (int i = 0; i < 128; ++i) {
      low_bytes[i] = static_cast<uint8_t>(values[i]);
      high_bytes[i] = static_cast<uint8_t>(values[i] >> 8);
    }
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_loadu_si512(low_bytes + 64 * half);
      high[half] = _mm512_loadu_si512(high_bytes + 64 * half);
    }
  }
  // Of the lowest 7 bits.
  NUMA_MOE_INLINE_MEMBER __m512i low_bytes(__m512i codes) const {
    return _mm512_permutex2var_epi8(low[0], codes, low[1]);
  }
  NUMA_MOE_INLINE_MEMBER __m512i high_bytes(__m512i codes) const {
    return _mm512_permutex2var_epi8(high[0], codes, high[1]);
  }
};

// Codes so that interleaving low and high bytes gives pairs: in each 128 bits the first two of all columns
// come before the last two.
NUMA_MOE_INLINE __m512i two_by_two(__m512i codes) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  return _mm512_shuffle_epi8(codes, order);
}

NUMA_MOE_INLINE void interleave(__m512i low, __m512i high, Bits (&out)[2]) {
  out[0] = {_mm512_unpacklo_epi8(low, high)};
  out[1] = {_mm512_unpackhi_epi8(low, high)};
}

template <>
struct BfloatCodes<Float8Codes> {
  ByteTable table;

  NUMA_MOE_INLINE_MEMBER explicit BfloatCodes(const Quantization& /*quantization*/) {
    static const auto kValues = [] {
      struct {
        uint16_t values[128];
      } result;
      for (uint32_t code = 0; code < 128; ++code) {
        const uint32_t shifted = code << 20;
        float value;
        __builtin_memcpy(&value, &shifted, sizeof(value));
        result.values[code] = bfloat16_bits(value * 0x1p120f);
      }
      return result;
    }();
    table.load(kValues.values);
  }
  NUMA_MOE_INLINE_MEMBER void pairs(Bits word, Bits (&out)[2]) const {
    const __m512i codes = two_by_two(word.value);
    const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80)));
    interleave(table.low_bytes(codes), _mm512_or_si512(table.high_bytes(codes), sign), out);
  }
};

template <>
struct BfloatCodes<Int8Codes> {
  ByteTable positive, negative;

  NUMA_MOE_INLINE_MEMBER explicit BfloatCodes(const Quantization& /*quantization*/) {
    static const auto kValues = [] {
      struct {
        uint16_t values[256];
      } result;
      for (int code = 0; code < 256; ++code) {
        result.values[code] = bfloat16_bits(static_cast<float>(code < 128 ? code : code - 256));
      }
      return result;
    }();
    positive.load(kValues.values);
    negative.load(kValues.values + 128);
  }
  NUMA_MOE_INLINE_MEMBER void pairs(Bits word, Bits (&out)[2]) const {
    const __m512i codes = two_by_two(word.value);
    const __mmask64 is_negative = _mm512_movepi8_mask(codes);
    interleave(_mm512_mask_blend_epi8(is_negative, positive.low_bytes(codes), negative.low_bytes(codes)),
               _mm512_mask_blend_epi8(is_negative, positive.high_bytes(codes), negative.high_bytes(codes)),
               out);
  }
};
