#include "moe/quantized_packing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "moe/task_plan.h"

namespace numa_moe {
namespace {

constexpr int64_t kLineBytes = 64;

// One task per slice and expert, run by the group that owns the slice.
class QuantizedPackingJob final : public Job {
 public:
  QuantizedPackingJob(const PackedProjection& packed, const Projection& projection, int64_t first_expert,
                      const QuantizedMatrix& matrix, bool unpack, int num_groups)
      : packed_(packed),
        projection_(projection),
        first_expert_(first_expert),
        matrix_(matrix),
        unpack_(unpack),
        panel_(packed.stored.format, packed.stored.quantization, matrix.columns),
        tasks_(static_cast<size_t>(num_groups)) {
    for (int64_t slice = 0; slice < packed.layout.num_slices; ++slice) {
      for (int64_t expert = 0; expert < matrix.num_experts; ++expert) {
        tasks_[static_cast<size_t>(group_of_slice(slice, num_groups))].push_back({slice, expert});
      }
    }
    std::vector<int32_t> counts;
    for (const auto& tasks : tasks_) counts.push_back(static_cast<int32_t>(tasks.size()));
    phases_.push_back({counts, Barrier::kPool});
  }

  const std::vector<Phase>& phases() const override { return phases_; }

  void run_task(const Task& task) override {
    const SliceOfExpert& work = tasks_[static_cast<size_t>(task.group)][static_cast<size_t>(task.index)];
    const int64_t num_slices = packed_.layout.num_slices;
    const BlockRange blocks = slice_blocks(projection_.num_blocks, num_slices, work.slice);
    const int64_t places = (projection_.num_blocks + num_slices - 1) / num_slices;
    char* first = packed_.data + work.slice * packed_.slice_stride +
                  (first_expert_ + work.expert) * places * projection_.count * panel_.bytes;
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      char* panel = first + ((block - blocks.begin) * projection_.count + projection_.index) * panel_.bytes;
      if (!unpack_) std::memset(panel, 0, static_cast<size_t>(panel_.bytes));
      for (int64_t column = 0; column < kPanelWidth; ++column) {
        const int64_t row = block * kPanelWidth + column;
        if (row < matrix_.rows) move_row(work.expert * matrix_.rows + row, column, panel);
      }
    }
  }

 private:
  struct SliceOfExpert {
    int64_t slice;
    int64_t expert;
  };

  // row: over all experts.
  void move_row(int64_t row, int64_t column, char* panel) const {
    const Quantization& quantization = packed_.stored.quantization;
    if (packed_.stored.format == WeightFormat::kFourBit) {
      move_nibbles(matrix_.codes + row * matrix_.columns, panel + column * 4);
    } else {
      move_bytes(matrix_.codes + row * matrix_.columns, panel + column * 4);
    }
    move_scales(matrix_.scales, row, column, panel_.groups, scale_bytes(quantization.scale),
                panel + panel_.scales);
    move_scales(reinterpret_cast<char*>(matrix_.offsets), row, column, panel_.groups, 1,
                panel + panel_.offsets);
    const int outer_bytes = scale_bytes(quantization.outer);
    move_scales(matrix_.outer_scales, row, column, panel_.outer_groups, outer_bytes,
                panel + panel_.outer_scales);
    move_scales(matrix_.outer_minima, row, column, panel_.outer_groups, outer_bytes,
                panel + panel_.outer_minima);
  }

  void move_bytes(uint8_t* codes, char* words) const {
    for (int64_t k = 0; k < matrix_.columns; k += 4) {
      const auto count = static_cast<size_t>(std::min<int64_t>(4, matrix_.columns - k));
      char* word = words + k / 4 * kLineBytes;
      unpack_ ? std::memcpy(codes + k, word, count) : std::memcpy(word, codes + k, count);
    }
  }

  void move_nibbles(uint8_t* codes, char* words) const {
    for (int64_t k = 0; k < matrix_.columns; k += 8) {
      const int64_t count = std::min<int64_t>(8, matrix_.columns - k);
      char* at = words + k / 8 * kLineBytes;
      uint32_t word = 0;
      if (unpack_) std::memcpy(&word, at, sizeof(word));
      for (int64_t step = 0; step < count; ++step) {
        const int64_t shift = step / 2 * 4 + step % 2 * 16;
        if (unpack_) {
          codes[k + step] = word >> shift & 15u;
        } else {
          word |= (codes[k + step] & 15u) << shift;
        }
      }
      if (!unpack_) std::memcpy(at, &word, sizeof(word));
    }
  }

  void move_scales(char* scales, int64_t row, int64_t column, int64_t groups, int bytes,
                   char* section) const {
    if (scales == nullptr) return;
    for (int64_t group = 0; group < groups; ++group) {
      char* ordinary = scales + (row * groups + group) * bytes;
      char* packed = section + (group * kPanelWidth + column) * bytes;
      std::memcpy(unpack_ ? ordinary : packed, unpack_ ? packed : ordinary, static_cast<size_t>(bytes));
    }
  }

  const PackedProjection& packed_;
  const Projection projection_;
  const int64_t first_expert_;
  const QuantizedMatrix& matrix_;
  const bool unpack_;
  const QuantizedPanel panel_;
  std::vector<std::vector<SliceOfExpert>> tasks_;
  std::vector<Phase> phases_;
};

}  // namespace

void pack_quantized(Runtime& runtime, const PackedProjection& packed, const Projection& projection,
                    int64_t first_expert, const QuantizedMatrix& matrix) {
  QuantizedPackingJob job(packed, projection, first_expert, matrix, /*unpack=*/false,
                          runtime.pool().num_groups());
  runtime.pool().run(job);
}

void unpack_quantized(Runtime& runtime, const PackedProjection& packed, const Projection& projection,
                      int64_t first_expert, const QuantizedMatrix& matrix) {
  QuantizedPackingJob job(packed, projection, first_expert, matrix, /*unpack=*/true,
                          runtime.pool().num_groups());
  runtime.pool().run(job);
}

}  // namespace numa_moe
