#include "moe/packing.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "kernels/floating_point_mode.h"
#include "moe/element_types.h"
#include "moe/task_plan.h"

namespace numa_moe {
namespace {

template <typename Visit>
void with_element_type(DataType type, Visit&& visit) {
  switch (type) {
    case DataType::kFloat32: return visit(float{});
    case DataType::kBfloat16: return visit(Bfloat16{});
    case DataType::kFloat16: return visit(Float16{});
  }
}

DataType element_type(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBfloat16: return DataType::kBfloat16;
    case WeightFormat::kFloat16: return DataType::kFloat16;
    case WeightFormat::kFloat32: return DataType::kFloat32;
    default: break;  // codes: quantized_packing.cpp
  }
  throw std::invalid_argument("unknown weight format");
}

template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;  // bit for bit, NaN payloads included
  } else {
    return from_float<To>(to_float(value));
  }
}

// A panel is [k / group][kPanelWidth][group]. Rows of the view from first_row on are its columns; rows
// and columns beyond the view are padding.
template <typename Element, typename Source>
void pack_panel(const WeightView& view, int64_t expert, int64_t first_row, int64_t k_groups, int64_t group,
                Element* panel) {
  const auto* base = static_cast<const Source*>(view.data) + expert * view.expert_stride;
  const int64_t rows = std::clamp<int64_t>(view.rows - first_row, 0, kPanelWidth);
  for (int64_t k = 0; k < k_groups * group; ++k) {
    Element* out = panel + k / group * kPanelWidth * group + k % group;
    if (k >= view.columns) {
      for (int64_t column = 0; column < kPanelWidth; ++column) out[column * group] = Element{};
      continue;
    }
    const Source* source = base + first_row * view.row_stride + k * view.column_stride;
    for (int64_t column = 0; column < rows; ++column) {
      out[column * group] = convert<Element>(source[column * view.row_stride]);
    }
    for (int64_t column = rows; column < kPanelWidth; ++column) out[column * group] = Element{};
  }
}

template <typename Element, typename Target>
void unpack_panel(const WeightView& view, int64_t expert, int64_t first_row, int64_t group,
                  const Element* panel) {
  auto* base = static_cast<Target*>(view.data) + expert * view.expert_stride;
  const int64_t rows = std::clamp<int64_t>(view.rows - first_row, 0, kPanelWidth);
  for (int64_t k = 0; k < view.columns; ++k) {
    const Element* in = panel + k / group * kPanelWidth * group + k % group;
    Target* target = base + first_row * view.row_stride + k * view.column_stride;
    for (int64_t column = 0; column < rows; ++column) {
      target[column * view.row_stride] = convert<Target>(in[column * group]);
    }
  }
}

// One task per slice and expert, run by the group that owns the slice.
class PackingJob final : public Job {
 public:
  // views: gate and up, or one; they alternate panel by panel.
  PackingJob(const PackedProjection& packed, std::vector<WeightView> views, int64_t first_expert,
             int64_t num_blocks, int64_t panel_bytes, bool unpack, int num_groups)
      : packed_(packed),
        views_(std::move(views)),
        first_expert_(first_expert),
        num_blocks_(num_blocks),
        panel_bytes_(panel_bytes),
        unpack_(unpack),
        tasks_(static_cast<size_t>(num_groups)) {
    std::vector<int32_t> counts;
    for (int64_t slice = 0; slice < packed.layout.num_slices; ++slice) {
      for (int64_t expert = 0; expert < views_[0].num_experts; ++expert) {
        tasks_[static_cast<size_t>(group_of_slice(slice, num_groups))].push_back({slice, expert});
      }
    }
    for (const auto& tasks : tasks_) counts.push_back(static_cast<int32_t>(tasks.size()));
    phases_.push_back({counts, Barrier::kPool});
  }

  const std::vector<Phase>& phases() const override { return phases_; }

  void run_task(const Task& task) override {
    const StandardFloatingPoint mode;
    const SliceOfExpert& work = tasks_[static_cast<size_t>(task.group)][static_cast<size_t>(task.index)];
    const ExpertLayout& layout = packed_.layout;
    const BlockRange blocks = slice_blocks(num_blocks_, layout.num_slices, work.slice);
    const int64_t blocks_per_slice = (num_blocks_ + layout.num_slices - 1) / layout.num_slices;
    const auto num_views = static_cast<int64_t>(views_.size());
    char* panel = packed_.data + work.slice * packed_.slice_stride +
                  (first_expert_ + work.expert) * blocks_per_slice * num_views * panel_bytes_;
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      for (const WeightView& view : views_) {
        move_panel(view, work.expert, block * kPanelWidth, panel);
        panel += panel_bytes_;
      }
    }
  }

 private:
  struct SliceOfExpert {
    int64_t slice;
    int64_t expert;
  };

  void move_panel(const WeightView& view, int64_t expert, int64_t first_row, char* panel) const {
    const int64_t group = k_group(packed_.stored.format);
    with_element_type(element_type(packed_.stored.format), [&](auto element) {
      using Element = decltype(element);
      with_element_type(view.type, [&](auto other) {
        using Other = decltype(other);
        auto* elements = reinterpret_cast<Element*>(panel);
        if (unpack_) {
          unpack_panel<Element, Other>(view, expert, first_row, group, elements);
        } else {
          const int64_t k_groups =
              panel_bytes_ / (kPanelWidth * group * static_cast<int64_t>(sizeof(Element)));
          pack_panel<Element, Other>(view, expert, first_row, k_groups, group, elements);
        }
      });
    });
  }

  const PackedProjection& packed_;
  const std::vector<WeightView> views_;
  const int64_t first_expert_;
  const int64_t num_blocks_;
  const int64_t panel_bytes_;
  const bool unpack_;
  std::vector<std::vector<SliceOfExpert>> tasks_;
  std::vector<Phase> phases_;
};

void run_gate_up(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                 const WeightView& gate, const WeightView* up, bool unpack) {
  std::vector<WeightView> views{gate};
  if (up != nullptr) views.push_back(*up);
  PackingJob job(packed, std::move(views), first_expert, packed.layout.intermediate_blocks(),
                 packed.layout.gate_up_panel_bytes(), unpack, runtime.pool().num_groups());
  runtime.pool().run(job);
}

void run_down(Runtime& runtime, const PackedProjection& packed, int64_t first_expert, const WeightView& down,
              bool unpack) {
  PackingJob job(packed, {down}, first_expert, packed.layout.hidden_blocks(),
                 packed.layout.down_panel_bytes(), unpack, runtime.pool().num_groups());
  runtime.pool().run(job);
}

}  // namespace

void pack_gate_up(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                  const WeightView& gate, const WeightView* up) {
  run_gate_up(runtime, packed, first_expert, gate, up, /*unpack=*/false);
}

void pack_down(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
               const WeightView& down) {
  run_down(runtime, packed, first_expert, down, /*unpack=*/false);
}

void unpack_gate_up(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                    const WeightView& gate, const WeightView* up) {
  run_gate_up(runtime, packed, first_expert, gate, up, /*unpack=*/true);
}

void unpack_down(Runtime& runtime, const PackedProjection& packed, int64_t first_expert,
                 const WeightView& down) {
  run_down(runtime, packed, first_expert, down, /*unpack=*/true);
}

}  // namespace numa_moe
