#include "moe/routing.h"

#include <algorithm>

#include "moe/element_types.h"

namespace numa_moe {
namespace {

float weight_at(const TopK& top_k, int64_t position) {
  if (top_k.weights_type == DataType::kFloat32) return static_cast<const float*>(top_k.weights)[position];
  if (top_k.weights_type == DataType::kBfloat16) {
    return to_float(static_cast<const Bfloat16*>(top_k.weights)[position]);
  }
  return to_float(static_cast<const Float16*>(top_k.weights)[position]);
}

}  // namespace

int64_t id_at(const TopK& top_k, int64_t position) {
  return top_k.ids_type == IndexType::kInt32 ? static_cast<const int32_t*>(top_k.ids)[position]
                                             : static_cast<const int64_t*>(top_k.ids)[position];
}

int64_t first_negative_id(const TopK& top_k) {
  const int64_t count = top_k.num_tokens * top_k.top_k;
  for (int64_t i = 0; i < count; ++i) {
    if (id_at(top_k, i) < 0) return i;
  }
  return -1;
}

Routing::Routing(const TopK& top_k, int64_t num_experts) {
  const int64_t count = top_k.num_tokens * top_k.top_k;
  // A counting sort; it is stable, so rows of one expert stay in token order.
  std::vector<int64_t> next(static_cast<size_t>(num_experts) + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = id_at(top_k, i);
    if (id < num_experts) ++next[static_cast<size_t>(id) + 1];
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t rows = next[static_cast<size_t>(expert) + 1];
    next[static_cast<size_t>(expert) + 1] += next[static_cast<size_t>(expert)];
    if (rows == 0) continue;
    experts_.push_back(expert);
    begins_.push_back(next[static_cast<size_t>(expert)]);
  }
  const int64_t num_rows = next[static_cast<size_t>(num_experts)];
  begins_.push_back(num_rows);
  tokens_.resize(static_cast<size_t>(num_rows));
  weights_.resize(static_cast<size_t>(num_rows));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = id_at(top_k, i);
    if (id >= num_experts) continue;
    const auto row = static_cast<size_t>(next[static_cast<size_t>(id)]++);
    tokens_[row] = static_cast<int32_t>(i / top_k.top_k);
    weights_[row] = weight_at(top_k, i);
  }
}

int64_t Routing::first_row_of_token(int64_t active, int64_t token) const {
  const auto begin = tokens_.begin() + row_begin(active);
  const auto end = tokens_.begin() + row_end(active);
  return std::lower_bound(begin, end, token) - tokens_.begin();
}

}  // namespace numa_moe
