// AVX-512 by SIMDe, so that the AVX-512 kernels can be tested on any x86-64 CPU with AVX2 and FMA. What
// SIMDe lacks is written out lane by lane here.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#pragma GCC diagnostic pop

#include <cmath>
#include <cstdint>
#include <cstring>

using __m512 = simde__m512;
using __m512i = simde__m512i;
using __mmask16 = simde__mmask16;

namespace emulated {

template <class Result, class Element, class From, class Function>
inline Result map16(const From& from, Function function) {
  Element in[16];
  static_assert(sizeof(in) == sizeof(from));
  std::memcpy(in, &from, sizeof(from));
  decltype(function(in[0])) out[16];
  static_assert(sizeof(out) == sizeof(Result));
  for (int i = 0; i < 16; ++i) out[i] = function(in[i]);
  Result result;
  std::memcpy(&result, out, sizeof(out));
  return result;
}

inline simde__m512i cvtepu16_epi32(__m256i a) {
  return map16<simde__m512i, uint16_t>(a, [](uint16_t lane) { return uint32_t{lane}; });
}
inline __m256i cvtepi32_epi16(simde__m512i a) {
  return map16<__m256i, uint32_t>(a, [](uint32_t lane) { return static_cast<uint16_t>(lane); });
}
inline simde__m512i srai_epi32(simde__m512i a, int count) {
  return map16<simde__m512i, int32_t>(a, [count](int32_t lane) { return lane >> count; });
}
inline simde__m512i cvtepu8_epi32(__m128i a) {
  uint8_t in[16];
  std::memcpy(in, &a, sizeof(in));
  uint32_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  simde__m512i result;
  std::memcpy(&result, out, sizeof(result));
  return result;
}
inline simde__m512 cvtepi32_ps(simde__m512i a) {
  return map16<simde__m512, int32_t>(a, [](int32_t lane) { return static_cast<float>(lane); });
}

// A lookup of elements in a table of one or two vectors, by the lowest bits of each index.
template <class Element, int kEntries>
inline simde__m512i look_up(const simde__m512i& index, const void* first, const void* second) {
  constexpr int kLanes = 64 / sizeof(Element);
  Element indices[kLanes], out[kLanes], table[2 * kLanes];
  std::memcpy(indices, &index, 64);
  std::memcpy(table, first, 64);
  std::memcpy(table + kLanes, second, 64);
  for (int i = 0; i < kLanes; ++i) out[i] = table[indices[i] % kEntries];
  simde__m512i result;
  std::memcpy(&result, out, 64);
  return result;
}
inline simde__m512 permutexvar_ps(simde__m512i index, simde__m512 table) {
  const simde__m512i result = look_up<uint32_t, 16>(index, &table, &table);
  simde__m512 floats;
  std::memcpy(&floats, &result, 64);
  return floats;
}
inline simde__m512i permutexvar_epi16(simde__m512i index, simde__m512i table) {
  return look_up<uint16_t, 32>(index, &table, &table);
}
inline simde__m512i permutex2var_epi8(simde__m512i first, simde__m512i index, simde__m512i second) {
  return look_up<uint8_t, 128>(index, &first, &second);
}

inline simde__m512 cvtph_ps(__m256i a) {
  simde__m512 result;
  auto* out = reinterpret_cast<float*>(&result);
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
  _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
  return result;
}
inline __m256i cvtps_ph(simde__m512 a) {
  const auto* in = reinterpret_cast<const float*>(&a);
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  return _mm256_set_m128i(_mm256_cvtps_ph(_mm256_loadu_ps(in + 8), kNearest),
                          _mm256_cvtps_ph(_mm256_loadu_ps(in), kNearest));
}

// vdpbf16ps as Intel's manual has it: subnormal inputs and results are zero, the products of the high
// halves are added first, each addition and product is rounded once as a fused operation.
inline float flush(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

inline float half_of_pair(uint32_t pair, bool high) {
  const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return flush(value);
}

inline simde__m512 dpbf16_ps(simde__m512 sum, simde__m512i a, simde__m512i b) {
  float lanes[16];
  uint32_t left[16], right[16];
  std::memcpy(lanes, &sum, sizeof(lanes));
  std::memcpy(left, &a, sizeof(left));
  std::memcpy(right, &b, sizeof(right));
  for (int i = 0; i < 16; ++i) {
    for (const bool high : {true, false}) {
      lanes[i] = flush(std::fma(half_of_pair(left[i], high), half_of_pair(right[i], high), flush(lanes[i])));
    }
  }
  simde__m512 result;
  std::memcpy(&result, lanes, sizeof(lanes));
  return result;
}

}  // namespace emulated

#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_srai_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_permutexvar_ps
#undef _mm512_permutexvar_epi16
#undef _mm512_permutex2var_epi8
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtepu16_epi32(a) emulated::cvtepu16_epi32(a)
#define _mm512_cvtepi32_epi16(a) emulated::cvtepi32_epi16(a)
#define _mm512_srai_epi32(a, count) emulated::srai_epi32(a, count)
#define _mm512_cvtph_ps(a) emulated::cvtph_ps(a)
#define _mm512_cvtps_ph(a, rounding) emulated::cvtps_ph(a)
#define _mm512_cvtepu8_epi32(a) emulated::cvtepu8_epi32(a)
#define _mm512_cvtepi32_ps(a) emulated::cvtepi32_ps(a)
#define _mm512_permutexvar_ps(index, table) emulated::permutexvar_ps(index, table)
#define _mm512_permutexvar_epi16(index, table) emulated::permutexvar_epi16(index, table)
#define _mm512_permutex2var_epi8(first, index, second) emulated::permutex2var_epi8(first, index, second)
