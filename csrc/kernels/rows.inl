// Rows of elements: conversions between types on the way in and out, and the weighted sum.

// The bits of a bf16 in the low halves: round to nearest even, NaN made quiet. The sum can't carry out of
// the exponent of a finite number except into infinity, which is the right result.
NUMA_MOE_INLINE Bits to_bfloat16(Vector x) {
  const Bits bits = to_bits(x);
  const Bits high = shift_right<16>(bits);
  const Bits odd = bit_and(high, broadcast_bits(1));
  const Bits rounded = shift_right<16>(add(add(bits, broadcast_bits(0x7fff)), odd));
  const Bits quiet = bit_or(high, broadcast_bits(0x40));
  return to_bits(select(is_nan(x), from_bits(quiet), from_bits(rounded)));
}

NUMA_MOE_INLINE Vector from_bfloat16(Bits halves) { return from_bits(shift_left<16>(halves)); }

// How a row is kept in memory: Element, its width, and reading and writing kLanes of them.
struct Float32Storage {
  using Element = float;
  NUMA_MOE_INLINE Vector read(const void* from) { return from_bits(load_bits(from)); }
  NUMA_MOE_INLINE void write(void* to, Vector x) { store(static_cast<float*>(to), x); }
};

struct Float16Storage {
  using Element = uint16_t;
  NUMA_MOE_INLINE Vector read(const void* from) { return load_float16(from); }
  NUMA_MOE_INLINE void write(void* to, Vector x) { store_float16(to, x); }
};

struct Bfloat16Storage {
  using Element = uint16_t;
  NUMA_MOE_INLINE Vector read(const void* from) { return from_bfloat16(load_halves(from)); }
  NUMA_MOE_INLINE void write(void* to, Vector x) { store_halves(to, to_bfloat16(x)); }
};

// fp32 that holds bf16 values.
struct RoundedFloat32Storage : Float32Storage {
  NUMA_MOE_INLINE void write(void* to, Vector x) {
    store(static_cast<float*>(to), from_bfloat16(to_bfloat16(x)));
  }
};

template <class From, class To>
static void convert_row(const void* from, int64_t count, void* to) {
  const auto* source = static_cast<const typename From::Element*>(from);
  auto* target = static_cast<typename To::Element*>(to);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) To::write(target + i, From::read(source + i));
  if (i < count) {
    typename From::Element last_source[kLanes] = {};
    typename To::Element last_target[kLanes];
    const auto rest = static_cast<size_t>(count - i);
    __builtin_memcpy(last_source, source + i, rest * sizeof(last_source[0]));
    To::write(last_target, From::read(last_source));
    __builtin_memcpy(target + i, last_target, rest * sizeof(last_target[0]));
  }
}

template <class Storage>
static void stage_row(const void* source, DataType source_type, int64_t count, int64_t padded_count,
                      void* out) {
  switch (source_type) {
    case DataType::kFloat32: convert_row<Float32Storage, Storage>(source, count, out); break;
    case DataType::kBfloat16: convert_row<Bfloat16Storage, Storage>(source, count, out); break;
    case DataType::kFloat16: convert_row<Float16Storage, Storage>(source, count, out); break;
  }
  auto* target = static_cast<typename Storage::Element*>(out);
  for (int64_t i = count; i < padded_count; ++i) target[i] = 0;
}

static void store_row(const float* row, int64_t count, DataType out_type, void* out) {
  switch (out_type) {
    case DataType::kFloat32: return convert_row<Float32Storage, Float32Storage>(row, count, out);
    case DataType::kBfloat16: return convert_row<Float32Storage, Bfloat16Storage>(row, count, out);
    case DataType::kFloat16: return convert_row<Float32Storage, Float16Storage>(row, count, out);
  }
}

static void accumulate_row(float weight, const float* row, const float* bias, int64_t count,
                           float* accumulator) {
  const Vector weights = broadcast(weight);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vector x = load(row + i);
    if (bias != nullptr) x = add(x, load(bias + i));
    store(accumulator + i, fused_multiply_add(weights, x, load(accumulator + i)));
  }
  for (; i < count; ++i) {
    const float x = bias != nullptr ? row[i] + bias[i] : row[i];
    accumulator[i] = __builtin_fmaf(weight, x, accumulator[i]);
  }
}
