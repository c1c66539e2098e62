// Which rows each expert has to compute: the router's choice, sorted by expert.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace numa_moe {

enum class IndexType : uint8_t { kInt32, kInt64 };

// The router's output for a range of tokens.
struct TopK {
  const void* ids;        // [num_tokens, top_k]
  IndexType ids_type;
  const void* weights;    // [num_tokens, top_k]
  DataType weights_type;
  int64_t num_tokens;
  int64_t top_k;
};

// Rows in ascending order of (expert, token, position in top-k). The order is what makes the weighted
// sum of a token the same whatever else is in the batch: its experts are always added in this order.
class Routing {
 public:
  // Ids >= num_experts belong to experts that live elsewhere (expert parallelism) and give no row.
  // Negative ids must have been refused before (first_negative_id).
  Routing(const TopK& top_k, int64_t num_experts);

  int64_t num_active() const { return static_cast<int64_t>(experts_.size()); }  // experts with rows
  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t expert(int64_t active) const { return experts_[static_cast<size_t>(active)]; }
  int64_t row_begin(int64_t active) const { return begins_[static_cast<size_t>(active)]; }
  int64_t row_end(int64_t active) const { return begins_[static_cast<size_t>(active) + 1]; }
  int32_t token(int64_t row) const { return tokens_[static_cast<size_t>(row)]; }
  float weight(int64_t row) const { return weights_[static_cast<size_t>(row)]; }
  // First row of an active expert whose token is >= token (its row_end if there is none).
  int64_t first_row_of_token(int64_t active, int64_t token) const;

 private:
  std::vector<int64_t> experts_;
  std::vector<int64_t> begins_;  // num_active() + 1 entries
  std::vector<int32_t> tokens_;
  std::vector<float> weights_;
};

// Position (in row-major order) of the first negative id, or -1.
int64_t first_negative_id(const TopK& top_k);
int64_t id_at(const TopK& top_k, int64_t position);

}  // namespace numa_moe
