#include "moe/experts_ffn.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/floating_point_mode.h"
#include "moe/task_plan.h"

namespace numa_moe {
namespace {

// Scratch that one group may use for the activations of a chunk of tokens. It bounds memory, not speed:
// a chunk this large has thousands of rows, and results don't depend on where chunks end.
constexpr int64_t kChunkBytes = int64_t{256} << 20;

// One expert's rows, gathered in a worker's scratch, are read once per block of weights: they should
// stay in a share of the last-level cache.
constexpr int64_t kGatheredBytes = int64_t{4} << 20;
constexpr int64_t kFewestGatheredRows = 64;
constexpr int64_t kMostGatheredRows = 512;

// A down task keeps fp32 sums for its tokens and blocks in the second-level cache.
constexpr int64_t kMostDownTokens = 512;

// Panels that a gemm call gets at once when there are few rows (enough loads in flight to stream
// weights), and when there are many (the tile of results should stay in the first-level cache).
constexpr int64_t kPanelsForFewRows = 16;
constexpr int64_t kPanelsForManyRows = 4;
constexpr int64_t kFewRows = 16;

// From so many rows of an expert on it is faster to dequantize its weights first.
constexpr int64_t kFewestRowsToDequantize = 16;

// With up to so many tokens, tasks can be run again when their thread has lost its CPU. With more, a call
// takes so long that a scheduler's time slice hardly matters, and copying every result costs more.
constexpr int64_t kMostRepeatableTokens = 64;

// Tokens that one staging task converts, and rows that one gathering task copies.
constexpr int64_t kBytesPerCopyTask = 64 << 10;

constexpr int64_t kCacheLine = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Elements between rows: whole cache lines, and no multiple of 1 KiB, so that the same column of
// successive rows doesn't fall into one set of the first-level cache.
int64_t row_stride(int64_t elements, int64_t element_bytes) {
  int64_t bytes = round_up(elements * element_bytes, kCacheLine);
  if (bytes % 1024 == 0) bytes += kCacheLine;
  return bytes / element_bytes;
}

// What multiplies a projection's weights. Both projections' have one type of activations.
struct ProjectionKernels {
  const KernelTable& table;
  const KernelTable* plain;  // multiplies dequantized weights; null to multiply them as they are
};

// The phases of one layer, over one chunk of tokens.
class FfnJob final : public Job {
 public:
  FfnJob(Runtime& runtime, const FfnArgs& args, const ProjectionKernels& gate_up,
         const ProjectionKernels& down, std::shared_ptr<Workspace> workspace);

  const std::vector<Phase>& phases() const override { return phases_; }
  int site() const override { return site_; }
  void run_task(const Task& task) override;
  void commit_task(const Task& task) override;

 private:
  enum class Step : uint8_t { kStage, kGateUp, kGather, kDown };

  void add_phase(Step step, std::vector<int32_t> tasks_per_group, Barrier barrier, bool repeatable = false);
  void stage(const Task& task);
  void gate_up(const Task& task);
  void gather(const Task& task);
  void commit_gate_up(const Task& task);
  void down(const Task& task);
  void commit_down(const Task& task);

  const GateUpTask& gate_up_work(const Task& task) const {
    return gate_up_tasks_[static_cast<size_t>(task.group)][static_cast<size_t>(task.index)];
  }
  const DownTask& down_work(const Task& task) const {
    return down_tasks_[static_cast<size_t>(task.group)][static_cast<size_t>(task.index)];
  }
  // Where a task writes: at once to where it is wanted, or where it waits for the commit.
  struct Target {
    char* data;
    int64_t stride;  // bytes between rows
  };
  Target gate_up_target(const GateUpTask& work) const;
  Target down_target(const DownTask& work) const;
  void clear_padding(const GateUpTask& work, Target target) const;
  int64_t gate_up_row_bytes(const GateUpTask& work) const {
    return (work.block_end - work.block_begin) * kPanelWidth * activation_bytes_;
  }
  int64_t down_row_bytes(const DownTask& work) const;
  Target pending_result(int thread, int64_t rows, int64_t row_bytes);
  void commit_rows(int thread, int64_t rows, int64_t row_bytes, Target target);

  static void multiply(const ProjectionKernels& kernels, const StoredWeights& weights, ThreadScratch& scratch,
                       GemmArgs gemm);
  const char* staged_row(int64_t group, int64_t token) const;
  // Contiguous rows for a gate/up task: in place if they are, else copied to the worker's scratch.
  const char* contiguous_rows(const Task& task, const GateUpTask& work);
  // Where a slice's activations of a row begin.
  char* intermediate(int64_t slice, int64_t row) const;

  const FfnArgs args_;
  const PackedWeights& weights_;
  const ExpertLayout& layout_;
  Runtime& runtime_;
  const std::shared_ptr<Workspace> workspace_owner_;
  Workspace& workspace_;
  const ProjectionKernels gate_up_kernels_;
  const ProjectionKernels down_kernels_;
  const KernelTable& kernels_;  // for all but products
  const Routing routing_;
  const int site_;
  const int64_t num_groups_;
  const int64_t activation_bytes_;
  const bool repeatable_;

  std::vector<Phase> phases_;
  std::vector<Step> steps_;

  bool staging_ = false;  // hidden states must be converted, padded or brought to the group's node
  int64_t hidden_stride_ = 0;  // elements between rows of staged hidden states
  int64_t tokens_per_stage_task_ = 1;
  std::vector<char*> staging_areas_;     // per group, when staging
  std::vector<const char*> staged_;      // per group: where to read

  bool gathering_ = false;  // several groups: each copies all activations to its node
  int64_t intermediate_stride_ = 0;  // elements between rows of whole activations
  int64_t rows_per_gather_task_ = 1;
  struct Part {
    char* data;
    int64_t stride;  // elements
    BlockRange blocks;
  };
  std::vector<Part> parts_;  // per slice
  std::vector<char*> whole_;  // per group

  std::vector<std::vector<GateUpTask>> gate_up_tasks_;
  std::vector<std::vector<DownTask>> down_tasks_;
};

std::vector<int32_t> task_counts(const auto& tasks) {
  std::vector<int32_t> counts;
  for (const auto& group : tasks) counts.push_back(static_cast<int32_t>(group.size()));
  return counts;
}

FfnJob::FfnJob(Runtime& runtime, const FfnArgs& args, const ProjectionKernels& gate_up,
               const ProjectionKernels& down, std::shared_ptr<Workspace> workspace)
    : args_(args),
      weights_(args_.weights),
      layout_(args_.weights.layout),
      runtime_(runtime),
      workspace_owner_(std::move(workspace)),
      workspace_(*workspace_owner_),
      gate_up_kernels_(gate_up),
      down_kernels_(down),
      kernels_(gate_up.table),
      routing_(args.top_k, layout_.num_experts),
      site_(runtime.site_of(weights_.gate_up)),
      num_groups_(runtime.pool().num_groups()),
      activation_bytes_(kernels_.activation_bytes),
      repeatable_(args.top_k.num_tokens <= kMostRepeatableTokens) {
  const ThreadPool& pool = runtime.pool();
  std::vector<int> threads_in_group;
  for (int group = 0; group < pool.num_groups(); ++group) {
    threads_in_group.push_back(std::max(1, pool.threads_in_group(group)));
  }
  const int64_t num_tokens = args.top_k.num_tokens;
  const int64_t hidden_size = layout_.hidden_size;

  // Hidden states can be read where they are when they already have the kernels' type and need no
  // padding, and when there is one group. Otherwise every group gets its own copy, on its own node:
  // read across the link once per node instead of once per thread.
  const bool same_type =
      data_type_bytes(args.hidden_states_type) == activation_bytes_ &&
      (args.hidden_states_type == DataType::kBfloat16 || layout_.gate_up.format == WeightFormat::kFloat32 ||
       layout_.gate_up.format == WeightFormat::kFloat16) &&
      args.hidden_states_type != DataType::kFloat16;
  staging_ = !same_type || num_groups_ > 1 || hidden_size % k_group(layout_.gate_up.format) != 0;
  hidden_stride_ = staging_
                       ? row_stride(round_up(hidden_size, k_group(layout_.gate_up.format)), activation_bytes_)
                       : hidden_size;
  staged_.assign(static_cast<size_t>(num_groups_), static_cast<const char*>(args.hidden_states));
  if (staging_) {
    for (int64_t group = 0; group < num_groups_; ++group) {
      staging_areas_.push_back(
          workspace_.group(group).staged.reserve(num_tokens * hidden_stride_ * activation_bytes_));
      staged_[static_cast<size_t>(group)] = staging_areas_.back();
    }
    tokens_per_stage_task_ = std::max<int64_t>(1, kBytesPerCopyTask / (hidden_stride_ * activation_bytes_));
    add_phase(Step::kStage,
              std::vector<int32_t>(static_cast<size_t>(num_groups_),
                                   static_cast<int32_t>(divide_up(num_tokens, tokens_per_stage_task_))),
              Barrier::kGroup);
  } else if (repeatable_) {
    // Whoever is late may read them when the caller has long gone on.
    const auto bytes = num_tokens * hidden_stride_ * activation_bytes_;
    char* copy = workspace_.hidden_states().reserve(bytes);
    std::memcpy(copy, args.hidden_states, static_cast<size_t>(bytes));
    staged_.assign(static_cast<size_t>(num_groups_), copy);
  }

  const int64_t max_rows = std::clamp(kGatheredBytes / (hidden_stride_ * activation_bytes_),
                                      kFewestGatheredRows, kMostGatheredRows);
  gate_up_tasks_ = plan_gate_up(layout_, routing_, threads_in_group, max_rows);
  add_phase(Step::kGateUp, task_counts(gate_up_tasks_), Barrier::kPool, repeatable_);

  const int64_t num_rows = routing_.num_rows();
  const int64_t channels = layout_.intermediate_blocks() * kPanelWidth;
  intermediate_stride_ = row_stride(channels, activation_bytes_);
  gathering_ = num_groups_ > 1;
  for (int64_t slice = 0; slice < layout_.num_slices; ++slice) {
    parts_.push_back({nullptr, 0, slice_blocks(layout_.intermediate_blocks(), layout_.num_slices, slice)});
  }
  if (gathering_) {
    // Each slice writes a part of its own, on its group's node; its place in the group's buffer follows
    // from the slices before it.
    std::vector<int64_t> bytes(static_cast<size_t>(num_groups_), 0);
    std::vector<int64_t> offset;
    for (int64_t slice = 0; slice < layout_.num_slices; ++slice) {
      Part& part = parts_[static_cast<size_t>(slice)];
      part.stride = row_stride(part.blocks.size() * kPanelWidth, activation_bytes_);
      int64_t& group_bytes = bytes[static_cast<size_t>(group_of_slice(slice, num_groups_))];
      offset.push_back(group_bytes);
      group_bytes += num_rows * part.stride * activation_bytes_;
    }
    for (int64_t group = 0; group < num_groups_; ++group) {
      GroupScratch& scratch = workspace_.group(group);
      scratch.intermediate.reserve(bytes[static_cast<size_t>(group)]);
      whole_.push_back(scratch.gathered.reserve(num_rows * intermediate_stride_ * activation_bytes_));
    }
    for (int64_t slice = 0; slice < layout_.num_slices; ++slice) {
      parts_[static_cast<size_t>(slice)].data =
          workspace_.group(group_of_slice(slice, num_groups_)).intermediate.reserve(0) +
          offset[static_cast<size_t>(slice)];
    }
    rows_per_gather_task_ =
        std::max<int64_t>(1, kBytesPerCopyTask / (intermediate_stride_ * activation_bytes_));
    add_phase(Step::kGather,
              std::vector<int32_t>(static_cast<size_t>(num_groups_),
                                   static_cast<int32_t>(divide_up(num_rows, rows_per_gather_task_))),
              Barrier::kGroup);
  } else {
    // One group: all slices write into the same rows.
    char* whole =
        workspace_.group(0).intermediate.reserve(num_rows * intermediate_stride_ * activation_bytes_);
    whole_.push_back(whole);
    for (Part& part : parts_) {
      part.stride = intermediate_stride_;
      part.data = whole + part.blocks.begin * kPanelWidth * activation_bytes_;
    }
  }

  down_tasks_ = plan_down(layout_, routing_, num_tokens, threads_in_group, kMostDownTokens);
  add_phase(Step::kDown, task_counts(down_tasks_), Barrier::kPool, repeatable_);
}

void FfnJob::add_phase(Step step, std::vector<int32_t> tasks_per_group, Barrier barrier, bool repeatable) {
  steps_.push_back(step);
  phases_.push_back({std::move(tasks_per_group), barrier, repeatable});
}

void FfnJob::run_task(const Task& task) {
  const StandardFloatingPoint mode;
  switch (steps_[static_cast<size_t>(task.phase)]) {
    case Step::kStage: return stage(task);
    case Step::kGateUp: return gate_up(task);
    case Step::kGather: return gather(task);
    case Step::kDown: return down(task);
  }
}

void FfnJob::commit_task(const Task& task) {
  steps_[static_cast<size_t>(task.phase)] == Step::kGateUp ? commit_gate_up(task) : commit_down(task);
}

FfnJob::Target FfnJob::pending_result(int thread, int64_t rows, int64_t row_bytes) {
  return {runtime_.thread_scratch(thread).result.reserve(rows * row_bytes), row_bytes};
}

void FfnJob::commit_rows(int thread, int64_t rows, int64_t row_bytes, Target target) {
  const Target pending = pending_result(thread, rows, row_bytes);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(target.data + row * target.stride, pending.data + row * pending.stride,
                static_cast<size_t>(row_bytes));
  }
}

void FfnJob::multiply(const ProjectionKernels& kernels, const StoredWeights& weights, ThreadScratch& scratch,
                      GemmArgs gemm) {
  if (is_quantized(weights.format)) gemm.quantization = &weights.quantization;
  if (kernels.plain == nullptr) return kernels.table.gemm(gemm);
  const WeightFormat plain = kernels.plain->format;
  const int64_t padded = round_up(gemm.k, k_group(weights.format));
  const int64_t panel_bytes = padded / k_group(plain) * group_bytes(plain);
  char* panels = scratch.panels.reserve(gemm.num_panels * panel_bytes);
  kernels.table.dequantize(gemm, panels);
  gemm.weights = panels;
  gemm.panel_stride = panel_bytes;
  gemm.quantization = nullptr;
  kernels.plain->gemm(gemm);
}

const char* FfnJob::staged_row(int64_t group, int64_t token) const {
  return staged_[static_cast<size_t>(group)] + token * hidden_stride_ * activation_bytes_;
}

char* FfnJob::intermediate(int64_t slice, int64_t row) const {
  const Part& part = parts_[static_cast<size_t>(slice)];
  return part.data + row * part.stride * activation_bytes_;
}

void FfnJob::stage(const Task& task) {
  const int64_t begin = task.index * tokens_per_stage_task_;
  const int64_t end = std::min(begin + tokens_per_stage_task_, args_.top_k.num_tokens);
  const int64_t source_stride = layout_.hidden_size * data_type_bytes(args_.hidden_states_type);
  const int64_t padded = round_up(layout_.hidden_size, k_group(layout_.gate_up.format));
  for (int64_t token = begin; token < end; ++token) {
    kernels_.stage_row(
        static_cast<const char*>(args_.hidden_states) + token * source_stride, args_.hidden_states_type,
        layout_.hidden_size, padded,
        staging_areas_[static_cast<size_t>(task.group)] + token * hidden_stride_ * activation_bytes_);
  }
}

const char* FfnJob::contiguous_rows(const Task& task, const GateUpTask& work) {
  const int64_t rows = work.row_end - work.row_begin;
  const int64_t first_token = routing_.token(work.row_begin);
  // Tokens of an expert ascend, so the ends tell (unless an expert appears twice in one row).
  bool contiguous = routing_.token(work.row_end - 1) - first_token == rows - 1;
  for (int64_t row = work.row_begin; contiguous && row < work.row_end; ++row) {
    contiguous = routing_.token(row) - first_token == row - work.row_begin;
  }
  if (contiguous) return staged_row(task.group, first_token);
  const int64_t row_bytes = hidden_stride_ * activation_bytes_;
  char* rows_copy = runtime_.thread_scratch(task.thread).rows.reserve(rows * row_bytes);
  const int64_t used_bytes =
      round_up(layout_.hidden_size, k_group(layout_.gate_up.format)) * activation_bytes_;
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(rows_copy + row * row_bytes, staged_row(task.group, routing_.token(work.row_begin + row)),
                static_cast<size_t>(used_bytes));
  }
  return rows_copy;
}

FfnJob::Target FfnJob::gate_up_target(const GateUpTask& work) const {
  return {intermediate(work.slice, work.row_begin) + work.block_begin * kPanelWidth * activation_bytes_,
          parts_[static_cast<size_t>(work.slice)].stride * activation_bytes_};
}

void FfnJob::commit_gate_up(const Task& task) {
  const GateUpTask& work = gate_up_work(task);
  commit_rows(task.thread, work.row_end - work.row_begin, gate_up_row_bytes(work), gate_up_target(work));
}

void FfnJob::gate_up(const Task& task) {
  const GateUpTask& work = gate_up_work(task);
  const int64_t rows = work.row_end - work.row_begin;
  const int64_t expert = routing_.expert(work.active);
  const int64_t panels_per_block = layout_.panels_per_gate_up_block();
  const int64_t panels_at_once = rows <= kFewRows ? kPanelsForFewRows : kPanelsForManyRows;
  const int64_t blocks_at_once = std::max<int64_t>(1, panels_at_once / panels_per_block);
  const int64_t tile_stride = blocks_at_once * panels_per_block * kPanelWidth;
  const char* x = contiguous_rows(task, work);
  float* tile = runtime_.thread_scratch(task.thread).tile.reserve_elements<float>(rows * tile_stride);
  const Target target =
      repeatable_ ? pending_result(task.thread, rows, gate_up_row_bytes(work)) : gate_up_target(work);

  for (int64_t block = work.block_begin; block < work.block_end; block += blocks_at_once) {
    const int64_t blocks = std::min(blocks_at_once, work.block_end - block);
    GemmArgs gemm{};
    gemm.x = x;
    gemm.x_stride = hidden_stride_;
    gemm.rows = rows;
    gemm.k = layout_.hidden_size;
    gemm.weights = weights_.gate_up_block(work.slice, expert, block);
    gemm.panel_stride = layout_.gate_up_panel_bytes();
    gemm.num_panels = blocks * panels_per_block;
    gemm.out = tile;
    gemm.out_stride = tile_stride;
    multiply(gate_up_kernels_, layout_.gate_up, runtime_.thread_scratch(task.thread), gemm);

    ActivateArgs activate{};
    activate.activation = args_.activation.activation;
    activate.gated = layout_.gated;
    activate.alpha = args_.activation.alpha;
    activate.limit = args_.activation.limit;
    activate.gate_up = tile;
    activate.gate_up_stride = tile_stride;
    activate.bias = weights_.gate_up_bias_block(work.slice, expert, block);
    activate.rows = rows;
    activate.num_blocks = blocks;
    activate.out = target.data + (block - work.block_begin) * kPanelWidth * activation_bytes_;
    activate.out_stride = target.stride / activation_bytes_;
    kernels_.activate(activate);
  }
  clear_padding(work, target);
}

// Activations of channels that only pad k. Their weights are 0, but 0 times infinity or NaN isn't.
void FfnJob::clear_padding(const GateUpTask& work, Target target) const {
  const int64_t first = parts_[static_cast<size_t>(work.slice)].blocks.begin + work.block_begin;
  const int64_t end = first + work.block_end - work.block_begin;
  if (end * kPanelWidth <= args_.num_channels) return;
  const int64_t begin = std::max(args_.num_channels - first * kPanelWidth, int64_t{0});
  const int64_t channels = (end - first) * kPanelWidth - begin;
  for (int64_t row = 0; row < work.row_end - work.row_begin; ++row) {
    std::memset(target.data + row * target.stride + begin * activation_bytes_, 0,
                static_cast<size_t>(channels * activation_bytes_));
  }
}

void FfnJob::gather(const Task& task) {
  const int64_t begin = task.index * rows_per_gather_task_;
  const int64_t end = std::min(begin + rows_per_gather_task_, routing_.num_rows());
  for (int64_t row = begin; row < end; ++row) {
    char* whole = whole_[static_cast<size_t>(task.group)] + row * intermediate_stride_ * activation_bytes_;
    for (int64_t slice = 0; slice < layout_.num_slices; ++slice) {
      const BlockRange blocks = parts_[static_cast<size_t>(slice)].blocks;
      std::memcpy(whole + blocks.begin * kPanelWidth * activation_bytes_, intermediate(slice, row),
                  static_cast<size_t>(blocks.size() * kPanelWidth * activation_bytes_));
    }
  }
}

FfnJob::Target FfnJob::down_target(const DownTask& work) const {
  const int64_t element_bytes = data_type_bytes(args_.hidden_states_type);
  const int64_t channel =
      (slice_blocks(layout_.hidden_blocks(), layout_.num_slices, work.slice).begin + work.block_begin) *
      kPanelWidth;
  return {
      static_cast<char*>(args_.output) + (work.token_begin * layout_.hidden_size + channel) * element_bytes,
      layout_.hidden_size * element_bytes};
}

// The last block of all may reach beyond hidden_size.
int64_t FfnJob::down_row_bytes(const DownTask& work) const {
  const int64_t first = slice_blocks(layout_.hidden_blocks(), layout_.num_slices, work.slice).begin;
  const int64_t end = std::min((first + work.block_end) * kPanelWidth, layout_.hidden_size);
  return (end - (first + work.block_begin) * kPanelWidth) * data_type_bytes(args_.hidden_states_type);
}

void FfnJob::commit_down(const Task& task) {
  const DownTask& work = down_work(task);
  commit_rows(task.thread, work.token_end - work.token_begin, down_row_bytes(work), down_target(work));
}

void FfnJob::down(const Task& task) {
  const DownTask& work = down_work(task);
  ThreadScratch& scratch = runtime_.thread_scratch(task.thread);
  const int64_t tokens = work.token_end - work.token_begin;
  const bool all_tokens = tokens == args_.top_k.num_tokens;
  const int64_t blocks_at_once = tokens <= kFewRows ? kPanelsForFewRows : kPanelsForManyRows;
  const int64_t stride = blocks_at_once * kPanelWidth;
  const int64_t first_channel =
      slice_blocks(layout_.hidden_blocks(), layout_.num_slices, work.slice).begin * kPanelWidth;
  const int64_t element_bytes = data_type_bytes(args_.hidden_states_type);
  float* sums = scratch.accumulator.reserve_elements<float>(tokens * stride);
  const Target target =
      repeatable_ ? pending_result(task.thread, tokens, down_row_bytes(work)) : down_target(work);

  for (int64_t block = work.block_begin; block < work.block_end; block += blocks_at_once) {
    const int64_t blocks = std::min(blocks_at_once, work.block_end - block);
    const int64_t width = blocks * kPanelWidth;
    std::memset(sums, 0, static_cast<size_t>(tokens * stride) * sizeof(float));
    for (int64_t active = 0; active < routing_.num_active(); ++active) {
      const int64_t row_begin =
          all_tokens ? routing_.row_begin(active) : routing_.first_row_of_token(active, work.token_begin);
      const int64_t row_end =
          all_tokens ? routing_.row_end(active) : routing_.first_row_of_token(active, work.token_end);
      const int64_t rows = row_end - row_begin;
      if (rows == 0) continue;
      const int64_t expert = routing_.expert(active);
      float* tile = scratch.tile.reserve_elements<float>(rows * stride);
      GemmArgs gemm{};
      gemm.x = whole_[static_cast<size_t>(task.group)] + row_begin * intermediate_stride_ * activation_bytes_;
      gemm.x_stride = intermediate_stride_;
      gemm.rows = rows;
      gemm.k = layout_.intermediate_size;
      gemm.weights = weights_.down_block(work.slice, expert, block);
      gemm.panel_stride = layout_.down_panel_bytes();
      gemm.num_panels = blocks;
      gemm.out = tile;
      gemm.out_stride = stride;
      multiply(down_kernels_, layout_.down, scratch, gemm);
      const float* bias = weights_.down_bias_block(work.slice, expert, block);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t token = routing_.token(row_begin + row) - work.token_begin;
        kernels_.accumulate_row(routing_.weight(row_begin + row), tile + row * stride, bias, width,
                                sums + token * stride);
      }
    }
    const int64_t channel = first_channel + block * kPanelWidth;
    const int64_t channels = std::min(width, layout_.hidden_size - channel);
    for (int64_t token = 0; token < tokens; ++token) {
      char* out =
          target.data + token * target.stride + (block - work.block_begin) * kPanelWidth * element_bytes;
      kernels_.store_row(sums + token * stride, channels, args_.hidden_states_type, out);
    }
  }
}

// Tokens per chunk, so that a group's scratch stays near kChunkBytes.
int64_t tokens_per_chunk(const FfnArgs& args) {
  const ExpertLayout& layout = args.weights.layout;
  const int64_t bytes_per_token =
      4 * (layout.hidden_size + 2 * args.top_k.top_k * layout.intermediate_blocks() * kPanelWidth);
  return std::max<int64_t>(kFewRows, kChunkBytes / bytes_per_token);
}

const void* advance(const void* base, int64_t elements, int64_t element_bytes) {
  return static_cast<const char*>(base) + elements * element_bytes;
}

}  // namespace

void run_experts_ffn(Runtime& runtime, const FfnArgs& args) {
  const StandardFloatingPoint mode;
  const int64_t num_tokens = args.top_k.num_tokens;
  const int64_t chunk = tokens_per_chunk(args);
  const int64_t hidden_size = args.weights.layout.hidden_size;
  const int64_t element_bytes = data_type_bytes(args.hidden_states_type);
  // Chosen once for all chunks, by what doesn't depend on where they are cut.
  const ExpertLayout& layout = args.weights.layout;
  const int64_t rows_per_expert = num_tokens * args.top_k.top_k / layout.num_experts;
  const auto choose = [&](const StoredWeights& weights) -> ProjectionKernels {
    const InstructionSet best = runtime.instruction_set();
    const KernelTable& table = kernel_table_for_rows(weights.format, best, rows_per_expert);
    if (table.dequantize == nullptr || rows_per_expert < kFewestRowsToDequantize) return {table, nullptr};
    return {table, &kernel_table_for_rows(table.plain_format, best, rows_per_expert)};
  };
  const ProjectionKernels gate_up = choose(layout.gate_up), down = choose(layout.down);
  const std::lock_guard lock(runtime.workspace_mutex());
  for (int64_t begin = 0; begin < num_tokens; begin += chunk) {
    FfnArgs part = args;
    const int64_t position = begin * args.top_k.top_k;
    part.top_k.num_tokens = std::min(chunk, num_tokens - begin);
    part.top_k.ids = advance(args.top_k.ids, position, args.top_k.ids_type == IndexType::kInt32 ? 4 : 8);
    part.top_k.weights = advance(args.top_k.weights, position, data_type_bytes(args.top_k.weights_type));
    part.hidden_states = advance(args.hidden_states, begin * hidden_size, element_bytes);
    part.output = static_cast<char*>(args.output) + begin * hidden_size * element_bytes;
    runtime.pool().run(std::make_shared<FfnJob>(runtime, part, gate_up, down, runtime.workspace()));
  }
}

}  // namespace numa_moe
