// The vector type on AVX2, FMA and F16C: 8 lanes, two vectors to a panel. See vector_portable.inl for
// what each function means.

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr int kMostRows = 6;            // 6 x 2 accumulators, 2 weights, 1 activation: 15 of 16 registers
constexpr int kMostAccumulators = 12;
constexpr int kPanelsPerTile = 1;       // when there are many rows

struct Vector {
  __m256 value;
};
struct Bits {
  __m256i value;
};
struct Mask {
  __m256 value;
};

NUMA_MOE_INLINE Vector zero() { return {_mm256_setzero_ps()}; }
NUMA_MOE_INLINE Vector broadcast(float value) { return {_mm256_set1_ps(value)}; }
NUMA_MOE_INLINE Vector load(const float* from) { return {_mm256_loadu_ps(from)}; }
NUMA_MOE_INLINE void store(float* to, Vector a) { _mm256_storeu_ps(to, a.value); }

NUMA_MOE_INLINE Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector subtract(Vector a, Vector b) { return {_mm256_sub_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector multiply(Vector a, Vector b) { return {_mm256_mul_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector divide(Vector a, Vector b) { return {_mm256_div_ps(a.value, b.value)}; }
NUMA_MOE_INLINE Vector fused_multiply_add(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.value, b.value, c.value)};
}
// In assembly, because Gxx would let the sum move to another register with every call.
NUMA_MOE_INLINE Vector accumulate(Vector a, Vector b, Vector sum) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.value) : "x"(a.value), "x"(b.value));
  return sum;
}

NUMA_MOE_INLINE Mask less(Vector a, Vector b) { return {_mm256_cmp_ps(a.value, b.value, _CMP_LT_OQ)}; }
NUMA_MOE_INLINE Mask is_nan(Vector a) { return {_mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q)}; }
NUMA_MOE_INLINE Vector select(Mask mask, Vector yes, Vector no) {
  return {_mm256_blendv_ps(no.value, yes.value, mask.value)};
}

NUMA_MOE_INLINE Bits to_bits(Vector a) { return {_mm256_castps_si256(a.value)}; }
NUMA_MOE_INLINE Vector from_bits(Bits a) { return {_mm256_castsi256_ps(a.value)}; }
NUMA_MOE_INLINE Bits broadcast_bits(uint32_t bits) { return {_mm256_set1_epi32(static_cast<int>(bits))}; }
NUMA_MOE_INLINE Bits add(Bits a, Bits b) { return {_mm256_add_epi32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits subtract(Bits a, Bits b) { return {_mm256_sub_epi32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits bit_and(Bits a, Bits b) { return {_mm256_and_si256(a.value, b.value)}; }
NUMA_MOE_INLINE Bits bit_or(Bits a, Bits b) { return {_mm256_or_si256(a.value, b.value)}; }
template <int kCount>
NUMA_MOE_INLINE Bits shift_left(Bits a) {
  return {_mm256_slli_epi32(a.value, kCount)};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right(Bits a) {
  return {_mm256_srli_epi32(a.value, kCount)};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right_signed(Bits a) {
  return {_mm256_srai_epi32(a.value, kCount)};
}

alignas(32) static constexpr uint32_t kHighHalves[kLanes] = {
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
// In assembly, because GCC would give the mask a register that accumulators need.
NUMA_MOE_INLINE Bits high_halves(Bits a) {
  asm("vpand %1, %0, %0" : "+x"(a.value) : "m"(kHighHalves));
  return a;
}

NUMA_MOE_INLINE Bits load_bits(const void* from) {
  return {_mm256_loadu_si256(static_cast<const __m256i*>(from))};
}
NUMA_MOE_INLINE Bits load_halves(const void* from) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))};
}
NUMA_MOE_INLINE void store_halves(void* to, Bits a) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.value, a.value), 0b1000);
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
NUMA_MOE_INLINE Vector load_float16(const void* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)))};
}
NUMA_MOE_INLINE void store_float16(void* to, Vector a) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT));
}

NUMA_MOE_INLINE Bits load_bytes(const void* from) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)))};
}

NUMA_MOE_INLINE Vector to_float(Bits a) { return {_mm256_cvtepi32_ps(a.value)}; }

struct Table {
  __m256 low;
  __m256 high;
};
NUMA_MOE_INLINE Table load_table(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
NUMA_MOE_INLINE Vector look_up(const Table& table, Bits index) {
  // A permutation looks at 3 bits, a blend at the highest.
  const __m256 high_half = _mm256_castsi256_ps(_mm256_slli_epi32(index.value, 28));
  return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index.value),
                           _mm256_permutevar8x32_ps(table.high, index.value), high_half)};
}
