// The register tile: kRows rows of x times kPanels panels, one accumulator per element, which takes its
// products in ascending k.

constexpr int kVectorsPerPanel = kPanelWidth / kLanes;
constexpr int kCacheLine = 64;

NUMA_MOE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Keeps the compiler from rewriting a pointer in terms of others, which would take more registers than
// there are.
template <typename T>
NUMA_MOE_INLINE void hide(T*& pointer) {
  asm volatile("" : "+r"(pointer));
}

// Memory that a tile fetches while it multiplies: from next on, step bytes per line of weights.
struct Fetch {
  const char* next;
  int64_t step;
};

template <class Format, int kRows, int kPanels>
struct Tile {
  using Activation = typename Format::Activation;
  using Weight = typename Format::Weight;
  static constexpr int kVectors = kPanels * kVectorsPerPanel;
  static constexpr int kActivationsPerStep = Format::kGroup / Format::kSteps;
  // Groups of a panel in a cache line: one turn of the loops below.
  static constexpr int kGroupsPerLine = kCacheLine / Format::kGroupBytes;
  static_assert(kGroupsPerLine * Format::kGroupBytes == kCacheLine);
  // Rows are addressed as base + {0, 1, 2} * stride, panels as base + {0, 1} * stride.
  static constexpr int kRowBases = (kRows + 2) / 3;
  static constexpr int kPanelBases = (kPanels + 1) / 2;
  // How far ahead of its use a line of weights is fetched. The more instructions a line takes, the fewer
  // lines ahead the processor sees by itself. The factor is the best of 0, 32, 64, 96, 128, 192, 256 for
  // 1 and 2 rows on Zen 3.
  static constexpr int64_t kBytesAhead = 96 * kRows * kVectorsPerPanel * Format::kSteps * kGroupsPerLine;
  // A step holds in registers either the activations of all rows or some weights: of all panels, or where
  // the accumulators leave no room for that, of one panel after the other.
  static constexpr int kFreeRegisters = kRegisters - kRows * kVectors;
  static constexpr bool kHoldActivations = kRows < kVectors && kRows + 2 <= kFreeRegisters;
  static constexpr int kHeldWeights = kVectors + 2 <= kFreeRegisters ? kVectors : kVectorsPerPanel;

  const Activation* x[kRowBases];
  int64_t x_stride;
  const char* weights[kPanelBases];
  int64_t panel_stride;
  Vector sum[kRows][kVectors];

  // Weights come from memory: a line of each panel is fetched some time before its turn. Near the end of
  // these panels it is the first lines of the next ones, which follow them.
  __attribute__((noinline)) static void stream(const Activation* x, int64_t x_stride, const char* weights,
                                               int64_t panel_stride, int64_t groups, float* out,
                                               int64_t out_stride) {
    Tile tile;
    tile.start(x, x_stride, weights, panel_stride);
    tile.clear();
    int64_t lines = groups / kGroupsPerLine;
    int64_t ahead = kBytesAhead;
    const int64_t fetched_before = smaller(lines, ahead / kCacheLine);
    for (; lines > fetched_before; --lines) {
      tile.prefetch_panels(ahead);
      tile.multiply_line();
    }
    ahead += (kPanels - 1) * panel_stride;
    for (; lines > 0; --lines) {
      tile.prefetch_panels(ahead);
      tile.multiply_line();
    }
    tile.multiply_rest(groups % kGroupsPerLine);
    tile.store_sums(out, out_stride);
  }

  // Weights come from a cache. resume: the sums go on from what is in out.
  __attribute__((noinline)) static void multiply(const Activation* x, int64_t x_stride, const char* weights,
                                                 int64_t panel_stride, int64_t groups, Fetch fetch,
                                                 bool resume, float* out, int64_t out_stride) {
    Tile tile;
    tile.start(x, x_stride, weights, panel_stride);
    if (resume) {
      tile.load_sums(out, out_stride);
    } else {
      tile.clear();
    }
    for (int64_t lines = groups / kGroupsPerLine; lines > 0; --lines) {
      __builtin_prefetch(fetch.next);
      fetch.next += fetch.step;
      tile.multiply_line();
    }
    tile.multiply_rest(groups % kGroupsPerLine);
    tile.store_sums(out, out_stride);
  }

 private:
  NUMA_MOE_INLINE_MEMBER void start(const Activation* first_x, int64_t stride_of_x, const char* first_panel,
                                    int64_t stride_of_panels) {
    x_stride = stride_of_x;
    panel_stride = stride_of_panels;
#pragma GCC unroll 4
    for (int base = 0; base < kRowBases; ++base) x[base] = first_x + 3 * base * x_stride;
#pragma GCC unroll 4
    for (int base = 0; base < kPanelBases; ++base) weights[base] = first_panel + 2 * base * panel_stride;
    advance(0);
  }

  NUMA_MOE_INLINE_MEMBER void clear() {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) sum[row][vector] = zero();
    }
  }

  NUMA_MOE_INLINE_MEMBER void load_sums(const float* out, int64_t out_stride) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) {
        sum[row][vector] = load(out + row * out_stride + vector * kLanes);
      }
    }
  }

  NUMA_MOE_INLINE_MEMBER void store_sums(float* out, int64_t out_stride) const {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) {
        store(out + row * out_stride + vector * kLanes, sum[row][vector]);
      }
    }
  }

  NUMA_MOE_INLINE_MEMBER void prefetch_panels(int64_t ahead) const {
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      __builtin_prefetch(weights[panel / 2] + (panel % 2) * panel_stride + ahead);
    }
  }

  NUMA_MOE_INLINE_MEMBER void multiply_line() {
#pragma GCC unroll 8
    for (int group = 0; group < kGroupsPerLine; ++group) multiply_group(group);
    advance(kGroupsPerLine);
  }

  NUMA_MOE_INLINE_MEMBER void multiply_rest(int64_t groups) {
#pragma GCC unroll 1
    for (; groups > 0; --groups) {
      multiply_group(0);
      advance(1);
    }
  }

  NUMA_MOE_INLINE_MEMBER void advance(int groups) {
#pragma GCC unroll 4
    for (int base = 0; base < kRowBases; ++base) {
      x[base] += groups * Format::kGroup;
      hide(x[base]);
    }
#pragma GCC unroll 4
    for (int base = 0; base < kPanelBases; ++base) {
      weights[base] += groups * Format::kGroupBytes;
      hide(weights[base]);
    }
  }

  // Keeps the compiler from loading ahead, or holding on to what it loaded: there are no registers for it.
  NUMA_MOE_INLINE_MEMBER void forget_loads() const { asm volatile("" : : : "memory"); }

  NUMA_MOE_INLINE_MEMBER Weight load_weight(int group, int step, int vector) const {
    const int panel = vector / kVectorsPerPanel;
    return Format::load(weights[panel / 2] + (panel % 2) * panel_stride + group * Format::kGroupBytes, step,
                        vector % kVectorsPerPanel);
  }

  NUMA_MOE_INLINE_MEMBER Weight load_activation(int group, int step, int row) const {
    return Format::load_activation(x[row / 3] + (row % 3) * x_stride + group * Format::kGroup +
                                   step * kActivationsPerStep);
  }

  NUMA_MOE_INLINE_MEMBER void multiply_group(int group) {
#pragma GCC unroll 4
    for (int step = 0; step < Format::kSteps; ++step) {
      if constexpr (kHoldActivations) {
        Weight activation[kRows];
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) activation[row] = load_activation(group, step, row);
#pragma GCC unroll 16
        for (int vector = 0; vector < kVectors; ++vector) {
          const Weight weight = load_weight(group, step, vector);
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            sum[row][vector] = Format::multiply_add(weight, activation[row], sum[row][vector]);
          }
          if ((vector + 1) % kVectorsPerPanel == 0) forget_loads();
        }
      } else {
#pragma GCC unroll 4
        for (int first = 0; first < kVectors; first += kHeldWeights) {
          Weight weight[kHeldWeights];
#pragma GCC unroll 16
          for (int held = 0; held < kHeldWeights; ++held)
            weight[held] = load_weight(group, step, first + held);
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            const Weight activation = load_activation(group, step, row);
#pragma GCC unroll 16
            for (int held = 0; held < kHeldWeights; ++held) {
              sum[row][first + held] = Format::multiply_add(weight[held], activation, sum[row][first + held]);
            }
          }
          forget_loads();
        }
      }
    }
  }
};
