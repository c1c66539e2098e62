// The vector type on AVX-512 (F, BW, DQ, VL): 16 lanes, one vector to a panel. See vector_portable.inl
// for what each function means.

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
constexpr int kMostRows = 12;           // 12 x 2 accumulators, 2 weights, 1 activation: 27 of 32 registers
constexpr int kMostAccumulators = 24;
constexpr int kPanelsPerTile = 2;       // when there are many rows

struct Vector {
  __m512 value;
};
struct Bits {
  __m512i value;
};
struct Mask {
  __mmask16 value;
};

NUMA_MOE_INLINE Vector zero() { return {_mm512_setzero_ps()}; }
NUMA_MOE_INLINE Vector broadcast(float value) { return {_mm512_set1_ps(value)}; }
NUMA_MOE_INLINE Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
NUMA_MOE_INLINE void store(float* to, Vector a) { _mm512_storeu_ps(to, a.value); }

NUMA_MOE_INLINE Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector subtract(Vector a, Vector b) { return {_mm512_sub_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector multiply(Vector a, Vector b) { return {_mm512_mul_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector divide(Vector a, Vector b) { return {_mm512_div_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector fused_multiply_add(Vector a, Vector b, Vector c) {
  return {_mm512_fmadd_ps(a.value, b.value, c.value)};
}
#if defined(NUMA_MOE_EMULATE_X86)
NUMA_MOE_INLINE Vector accumulate(Vector a, Vector b, Vector sum) { return fused_multiply_add(a, b, sum); }
#else
// In assembly, because Gvv would let the sum move to another register with every call.
NUMA_MOE_INLINE Vector accumulate(Vector a, Vector b, Vector sum) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum.value) : "v"(a.value), "v"(b.value));
  return sum;
}
#endif

NUMA_MOE_INLINE Mask less(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a.value, b.value, _CMP_LT_OQ)}; }
NUMA_MOE_INLINE Mask is_nan(Vector a) { return {_mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q)}; }
NUMA_MOE_INLINE Vector select(Mask mask, Vector yes, Vector no) {
  return {_mm512_mask_blend_ps(mask.value, no.value, yes.value)};
}

NUMA_MOE_INLINE Bits to_bits(Vector a) { return {_mm512_castps_si512(a.value)}; }
NUMA_MOE_INLINE Vector from_bits(Bits a) { return {_mm512_castsi512_ps(a.value)}; }
NUMA_MOE_INLINE Bits broadcast_bits(uint32_t bits) { return {_mm512_set1_epi32(static_cast<int>(bits))}; }
NUMA_MOE_INLINE Bits add(Bits a, Bits b) { return {_mm512_add_epi32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits subtract(Bits a, Bits b) { return {_mm512_sub_epi32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits bit_and(Bits a, Bits b) { return {_mm512_and_si512(a.value, b.value)}; }
NUMA_MOE_INLINE Bits bit_or(Bits a, Bits b) { return {_mm512_or_si512(a.value, b.value)}; }
template <int kCount>
NUMA_MOE_INLINE Bits shift_left(Bits a) {
  return {_mm512_slli_epi32(a.value, kCount)};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right(Bits a) {
  return {_mm512_srli_epi32(a.value, kCount)};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right_signed(Bits a) {
  return {_mm512_srai_epi32(a.value, kCount)};
}

NUMA_MOE_INLINE Bits high_halves(Bits a) { return bit_and(a, broadcast_bits(0xffff0000u)); }

NUMA_MOE_INLINE Bits load_bits(const void* from) { return {_mm512_loadu_si512(from)}; }
NUMA_MOE_INLINE Bits load_halves(const void* from) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
NUMA_MOE_INLINE void store_halves(void* to, Bits a) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(a.value));
}
NUMA_MOE_INLINE Vector load_float16(const void* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
NUMA_MOE_INLINE void store_float16(void* to, Vector a) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT));
}

NUMA_MOE_INLINE Bits load_bytes(const void* from) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))};
}

NUMA_MOE_INLINE Vector to_float(Bits a) { return {_mm512_cvtepi32_ps(a.value)}; }

struct Table {
  __m512 values;
};
NUMA_MOE_INLINE Table load_table(const float* from) { return {_mm512_loadu_ps(from)}; }
NUMA_MOE_INLINE Vector look_up(const Table& table, Bits index) {
  return {_mm512_permutexvar_ps(index.value, table.values)};
}
