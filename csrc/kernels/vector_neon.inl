// The vector type on NEON (every AArch64 CPU): 4 lanes, four vectors to a panel. See vector_portable.inl
// for what each function means.

constexpr int kLanes = 4;
constexpr int kRegisters = 32;
constexpr int kMostRows = 6;            // 6 x 4 accumulators, 4 weights, 1 activation: 29 of 32 registers
constexpr int kMostAccumulators = 24;
constexpr int kPanelsPerTile = 1;       // when there are many rows

struct Vector {
  float32x4_t value;
};
struct Bits {
  uint32x4_t value;
};
struct Mask {
  uint32x4_t value;
};

NUMA_MOE_INLINE Vector zero() { return {vdupq_n_f32(0.0f)}; }
NUMA_MOE_INLINE Vector broadcast(float value) { return {vdupq_n_f32(value)}; }
NUMA_MOE_INLINE Vector load(const float* from) { return {vld1q_f32(from)}; }
NUMA_MOE_INLINE void store(float* to, Vector a) { vst1q_f32(to, a.value); }

NUMA_MOE_INLINE Vector add(Vector a, Vector b) { return {vaddq_f32(a.value, b.value)}; }
NUMA_MOE_INLINE Vector subtract(Vector a, Vector b) { return {vsubq_f32(a.value, b.value)}; }
NUMA_MOE_INLINE Vector multiply(Vector a, Vector b) { return {vmulq_f32(a.value, b.value)}; }
NUMA_MOE_INLINE Vector divide(Vector a, Vector b) { return {vdivq_f32(a.value, b.value)}; }
NUMA_MOE_INLINE Vector fused_multiply_add(Vector a, Vector b, Vector c) {
  return {vfmaq_f32(c.value, a.value, b.value)};
}
// In assembly, because GCC would let the sum move to another register with every call.
NUMA_MOE_INLINE Vector accumulate(Vector a, Vector b, Vector sum) {
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum.value) : "w"(a.value), "w"(b.value));
  return sum;
}

NUMA_MOE_INLINE Mask less(Vector a, Vector b) { return {vcltq_f32(a.value, b.value)}; }
NUMA_MOE_INLINE Mask is_nan(Vector a) { return {vmvnq_u32(vceqq_f32(a.value, a.value))}; }
NUMA_MOE_INLINE Vector select(Mask mask, Vector yes, Vector no) {
  return {vbslq_f32(mask.value, yes.value, no.value)};
}

NUMA_MOE_INLINE Bits to_bits(Vector a) { return {vreinterpretq_u32_f32(a.value)}; }
NUMA_MOE_INLINE Vector from_bits(Bits a) { return {vreinterpretq_f32_u32(a.value)}; }
NUMA_MOE_INLINE Bits broadcast_bits(uint32_t bits) { return {vdupq_n_u32(bits)}; }
NUMA_MOE_INLINE Bits add(Bits a, Bits b) { return {vaddq_u32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits subtract(Bits a, Bits b) { return {vsubq_u32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits bit_and(Bits a, Bits b) { return {vandq_u32(a.value, b.value)}; }
NUMA_MOE_INLINE Bits bit_or(Bits a, Bits b) { return {vorrq_u32(a.value, b.value)}; }
template <int kCount>
NUMA_MOE_INLINE Bits shift_left(Bits a) {
  return {vshlq_n_u32(a.value, kCount)};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right(Bits a) {
  return {vshrq_n_u32(a.value, kCount)};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right_signed(Bits a) {
  return {vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a.value), kCount))};
}

NUMA_MOE_INLINE Bits high_halves(Bits a) { return bit_and(a, broadcast_bits(0xffff0000u)); }

NUMA_MOE_INLINE Bits load_bits(const void* from) {
  return {vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(from)))};
}
NUMA_MOE_INLINE Bits load_halves(const void* from) {
  return {vmovl_u16(vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t*>(from))))};
}
NUMA_MOE_INLINE void store_halves(void* to, Bits a) {
  vst1_u8(static_cast<uint8_t*>(to), vreinterpret_u8_u16(vmovn_u32(a.value)));
}
NUMA_MOE_INLINE Vector load_float16(const void* from) {
  return {vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t*>(from))))};
}
NUMA_MOE_INLINE void store_float16(void* to, Vector a) {
  vst1_u8(static_cast<uint8_t*>(to), vreinterpret_u8_f16(vcvt_f16_f32(a.value)));
}

NUMA_MOE_INLINE Bits load_bytes(const void* from) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  const uint8x8_t all = vreinterpret_u8_u32(vdup_n_u32(bytes));
  return {vmovl_u16(vget_low_u16(vmovl_u8(all)))};
}

NUMA_MOE_INLINE Vector to_float(Bits a) { return {vcvtq_f32_s32(vreinterpretq_s32_u32(a.value))}; }

struct Table {
  uint8x16x4_t values;
};
NUMA_MOE_INLINE Table load_table(const float* from) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(from);
  return {{{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}}};
}
NUMA_MOE_INLINE Vector look_up(const Table& table, Bits index) {
  // The four bytes of entry i are at 4 * i, 4 * i + 1, ...
  const uint32x4_t first = vshlq_n_u32(vandq_u32(index.value, vdupq_n_u32(15)), 2);
  const uint32x4_t all = vmlaq_u32(vdupq_n_u32(0x03020100u), first, vdupq_n_u32(0x01010101u));
  return {vreinterpretq_f32_u8(vqtbl4q_u8(table.values, vreinterpretq_u8_u32(all)))};
}
