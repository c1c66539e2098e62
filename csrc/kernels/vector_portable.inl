// The vector type in portable C++ (with the vector extension of GCC and Clang), and what every other
// instruction set must give bit for bit (NaN payloads excepted): IEEE single precision, round to nearest
// even, multiply-add fused.

constexpr int kLanes = 4;
constexpr int kRegisters = 16;
constexpr int kMostRows = 2;
constexpr int kMostAccumulators = 8;
constexpr int kPanelsPerTile = 1;       // when there are many rows

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using SignedWords = int32_t __attribute__((vector_size(4 * kLanes)));

struct Vector {
  Floats value;
};
struct Bits {
  Words value;
};
struct Mask {
  SignedWords value;
};

NUMA_MOE_INLINE Vector broadcast(float value) { return {Floats{value, value, value, value}}; }
NUMA_MOE_INLINE Vector zero() { return broadcast(0.0f); }
NUMA_MOE_INLINE Vector load(const float* from) {
  Vector result;
  std::memcpy(&result.value, from, sizeof(result.value));
  return result;
}
NUMA_MOE_INLINE void store(float* to, Vector a) { std::memcpy(to, &a.value, sizeof(a.value)); }

NUMA_MOE_INLINE Vector add(Vector a, Vector b) { return {a.value + b.value}; }
NUMA_MOE_INLINE Vector subtract(Vector a, Vector b) { return {a.value - b.value}; }
NUMA_MOE_INLINE Vector multiply(Vector a, Vector b) { return {a.value * b.value}; }
NUMA_MOE_INLINE Vector divide(Vector a, Vector b) { return {a.value / b.value}; }
// a * b + c, rounded once.
NUMA_MOE_INLINE Vector fused_multiply_add(Vector a, Vector b, Vector c) {
  Vector result;
  for (int i = 0; i < kLanes; ++i) result.value[i] = std::fma(a.value[i], b.value[i], c.value[i]);
  return result;
}
// The same, where sum is one of many that should stay in their registers.
NUMA_MOE_INLINE Vector accumulate(Vector a, Vector b, Vector sum) { return fused_multiply_add(a, b, sum); }

NUMA_MOE_INLINE Mask less(Vector a, Vector b) { return {a.value < b.value}; }  // false for NaN
NUMA_MOE_INLINE Mask is_nan(Vector a) { return {a.value != a.value}; }
NUMA_MOE_INLINE Vector select(Mask mask, Vector yes, Vector no) {
  return {mask.value ? yes.value : no.value};
}

// Integer operations are modulo 2^32.
NUMA_MOE_INLINE Bits to_bits(Vector a) { return {(Words)a.value}; }
NUMA_MOE_INLINE Vector from_bits(Bits a) { return {(Floats)a.value}; }
NUMA_MOE_INLINE Bits broadcast_bits(uint32_t bits) { return {Words{bits, bits, bits, bits}}; }
NUMA_MOE_INLINE Bits add(Bits a, Bits b) { return {a.value + b.value}; }
NUMA_MOE_INLINE Bits subtract(Bits a, Bits b) { return {a.value - b.value}; }
NUMA_MOE_INLINE Bits bit_and(Bits a, Bits b) { return {a.value & b.value}; }
NUMA_MOE_INLINE Bits bit_or(Bits a, Bits b) { return {a.value | b.value}; }
template <int kCount>
NUMA_MOE_INLINE Bits shift_left(Bits a) {
  return {a.value << kCount};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right(Bits a) {
  return {a.value >> kCount};
}
template <int kCount>
NUMA_MOE_INLINE Bits shift_right_signed(Bits a) {
  return {(Words)((SignedWords)a.value >> kCount)};
}

NUMA_MOE_INLINE Bits high_halves(Bits a) { return bit_and(a, broadcast_bits(0xffff0000u)); }

// Memory of 32-bit and of 16-bit elements, at any alignment.
NUMA_MOE_INLINE Bits load_bits(const void* from) {
  Bits result;
  std::memcpy(&result.value, from, sizeof(result.value));
  return result;
}
NUMA_MOE_INLINE Bits load_halves(const void* from) {  // to the low halves; the high halves are zero
  uint16_t halves[kLanes];
  std::memcpy(halves, from, sizeof(halves));
  return {Words{halves[0], halves[1], halves[2], halves[3]}};
}
NUMA_MOE_INLINE void store_halves(void* to, Bits a) {  // the high halves must be zero
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(a.value[i]);
  std::memcpy(to, halves, sizeof(halves));
}

static float float16_to_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude > 0x7c00u) return std::bit_cast<float>(sign | 0x7fc00000u | magnitude << 13);
  if (magnitude == 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u);
  if (magnitude >= 0x400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
}

// Round to nearest even; overflow gives infinity; NaN stays NaN.
static uint32_t float_to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | (magnitude >> 13 & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // half way from 65504 to 65536, and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14 results are multiples of 2^-24, the last place of a float in [0.5, 1).
    return sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
}

NUMA_MOE_INLINE Vector load_float16(const void* from) {
  uint16_t halves[kLanes];
  std::memcpy(halves, from, sizeof(halves));
  Vector result;
  for (int i = 0; i < kLanes; ++i) result.value[i] = float16_to_float(halves[i]);
  return result;
}
NUMA_MOE_INLINE void store_float16(void* to, Vector a) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(float_to_float16(a.value[i]));
  std::memcpy(to, halves, sizeof(halves));
}

NUMA_MOE_INLINE Bits load_bytes(const void* from) {  // one to each lane
  uint8_t bytes[kLanes];
  std::memcpy(bytes, from, sizeof(bytes));
  return {Words{bytes[0], bytes[1], bytes[2], bytes[3]}};
}

NUMA_MOE_INLINE Vector to_float(Bits a) {  // of signed integers
  return {__builtin_convertvector((SignedWords)a.value, Floats)};
}

// Sixteen floats, of which the lowest 4 bits of a lane choose one.
struct Table {
  float values[16];
};
NUMA_MOE_INLINE Table load_table(const float* from) {
  Table table;
  std::memcpy(table.values, from, sizeof(table.values));
  return table;
}
NUMA_MOE_INLINE Vector look_up(const Table& table, Bits index) {
  Vector result;
  for (int i = 0; i < kLanes; ++i) result.value[i] = table.values[index.value[i] & 15];
  return result;
}
