// What the kernels are measured against: scalar code in double precision, or with explicit std::fma where
// bits are compared. Shares nothing with csrc/kernels but the enumerations.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace numa_moe::test {

inline constexpr WeightFormat kFormats[] = {WeightFormat::kBfloat16, WeightFormat::kFloat16,
                                            WeightFormat::kFloat32};
std::string format_name(WeightFormat format);

// The tables of a format on all instruction sets of this machine, each once.
std::vector<const KernelTable*> tables(WeightFormat format);
std::string table_name(const KernelTable& table);

// Values of 16-bit floats, by their definition.
double bfloat16_value(uint16_t bits);
double float16_value(uint16_t bits);
bool bfloat16_is_nan(uint16_t bits);
bool float16_is_nan(uint16_t bits);
// Nearest even; by search among the neighbours, infinity where the definition's next power of two is nearer.
uint16_t nearest_bfloat16(double value);
uint16_t nearest_float16(double value);

// A value rounded to what the format can hold as a weight, or what its kernels keep of an activation.
float round_to_weight(WeightFormat format, float value);
float round_to_activation(WeightFormat format, float value);

// Distance of got from the exact value, in units of the last place that a float of that size has.
double ulp_error(float got, double exact);

// x and weights of a gemm as plain matrices, already rounded to what the format holds.
struct Problem {
  WeightFormat format;
  int64_t rows, k, columns;    // columns: a multiple of kPanelWidth
  std::vector<float> x;        // [rows, k]
  std::vector<float> weights;  // [columns, k]
};
Problem random_problem(WeightFormat format, int64_t rows, int64_t k, int64_t panels, std::mt19937& random);

int64_t padded_k(const Problem& problem);
int64_t panel_bytes(const Problem& problem);
// Writes the panels, zeros from k on.
void pack_weights(const Problem& problem, int64_t panel_stride, void* panels);
// Writes x as the table wants it, by the table's stage_row.
void stage_rows(const KernelTable& table, const Problem& problem, int64_t x_stride, void* x);

// x * weights^T with each element summed in double precision, and the sum of the products' magnitudes,
// which bounds the error that any order of fp32 sums may have.
struct DoubleProduct {
  std::vector<double> value, magnitude;  // [rows, columns]
};
DoubleProduct double_product(const Problem& problem);
// The same with one fp32 accumulator, fused multiply-adds in ascending k.
std::vector<float> ascending_product(const Problem& problem);

}  // namespace numa_moe::test
