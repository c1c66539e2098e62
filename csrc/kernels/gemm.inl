// gemm(): out = x * weights^T, with few rows at the speed of memory, with many near that of arithmetic.

// Few rows: how far ahead of its use a line of weights is fetched.
#ifndef PFB
#define PFB 1024
#endif
constexpr int64_t kPrefetchBytes = PFB;

// More rows: the weights are taken in blocks, which stay in the first-level cache while all rows pass by:
// this many bytes at the width they are multiplied in. Cutting k stores the fp32 sums and loads them again,
// which changes no bit of them.
constexpr int64_t kBlockBytes = 16 << 10;
// While a block of this many panels is multiplied the next is fetched: processors follow several streams
// better than one.
constexpr int64_t kPanelsPerBlock = 4;
// The rows that pass by stay in the second-level cache from block to block.
constexpr int64_t kRowsPerBlock = 192;
// From this many passes over a panel on, expanding it to fp32 first costs less than converting it in each.
#ifndef FPE
#define FPE 4
#endif
constexpr int64_t kFewestPassesToExpand = FPE;

NUMA_MOE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Panels of a tile when weights come from memory: up to 4 as registers allow, for more loads in flight
// and more independent sums.
constexpr int panels_to_stream(int rows) {
  int panels = 4;
  while (panels > 1 && rows * panels * kVectorsPerPanel > kMostAccumulators) panels /= 2;
  return panels;
}

template <class Format, int kRows, int kPanels>
static void stream_panels(const GemmArgs& args, int64_t panel) {
  const int64_t groups = (args.k + Format::kGroup - 1) / Format::kGroup;
  for (; panel + kPanels <= args.num_panels; panel += kPanels) {
    Tile<Format, kRows, kPanels>::stream(static_cast<const typename Format::Activation*>(args.x), args.x_stride,
                                         static_cast<const char*>(args.weights) + panel * args.panel_stride,
                                         args.panel_stride, groups, kPrefetchBytes,
                                         args.out + panel * kPanelWidth, args.out_stride);
  }
  if constexpr (kPanels > 1) {
    if (panel < args.num_panels) stream_panels<Format, kRows, kPanels / 2>(args, panel);
  }
}

// The rows that are streamed past: as many as leave registers for two panels at once.
constexpr int kMostRowsToStream = [] {
  int rows = 1;
  while (rows < kMostRows && panels_to_stream(rows + 1) > 1) ++rows;
  return rows;
}();

template <class Format, int kRows>
static void stream_rows(const GemmArgs& args) {
  if (args.rows == kRows) return stream_panels<Format, kRows, panels_to_stream(kRows)>(args, 0);
  if constexpr (kRows > 1) stream_rows<Format, kRows - 1>(args);
}

// Rows against kPanelsPerTile panels of a block.
template <class Format>
struct Pass {
  const typename Format::Activation* x;
  int64_t x_stride;
  int64_t rows;
  const char* weights;
  int64_t panel_stride;
  int64_t groups;
  bool resume;
  float* out;
  int64_t out_stride;
};

template <class Format, int kRows, int kPanels>
static void multiply_tile(const Pass<Format>& pass, int64_t begin, int64_t end, const Fetch& fetch) {
  if constexpr (kRows > 1) {
    if (end - begin < kRows) return multiply_tile<Format, kRows - 1, kPanels>(pass, begin, end, fetch);
  }
  Tile<Format, kRows, kPanels>::multiply(pass.x + begin * pass.x_stride, pass.x_stride, pass.weights,
                                         pass.panel_stride, pass.groups, fetch, pass.resume,
                                         pass.out + begin * pass.out_stride, pass.out_stride);
}

NUMA_MOE_INLINE int64_t tiles_of_rows(int64_t rows) { return (rows + kMostRows - 1) / kMostRows; }

// In tiles of nearly equal height. Each fetches fetch_bytes of each of the next panels.
template <class Format, int kPanels>
static void multiply_tiles(const Pass<Format>& pass, Fetch& fetch, int64_t fetch_bytes) {
  const int64_t tiles = tiles_of_rows(pass.rows);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    multiply_tile<Format, kMostRows, kPanels>(pass, pass.rows * tile / tiles, pass.rows * (tile + 1) / tiles,
                                              fetch);
    fetch.next += fetch_bytes;
  }
}

// fetch_bytes: how much of each of the next panels this pass fetches.
template <class Format>
static void multiply_pass(int64_t panels, const Pass<Format>& pass, Fetch& fetch, int64_t fetch_bytes) {
  static_assert(kPanelsPerTile <= 2);
  const int64_t tiles = tiles_of_rows(pass.rows);
  const int64_t turns = pass.groups * Format::kGroupBytes / (4 * kCacheLine);
  fetch.step = fetch_bytes / (tiles * (turns + 1)) + 1;
  if (panels == kPanelsPerTile) {
    multiply_tiles<Format, kPanelsPerTile>(pass, fetch, fetch_bytes / tiles);
  } else {
    multiply_tiles<Format, 1>(pass, fetch, fetch_bytes / tiles);
  }
}

// Panels as fp32: [panel][k][kPanelWidth].
template <class Format>
static void expand(const char* weights, int64_t panel_stride, int64_t panels, int64_t groups, float* expanded,
                   int64_t expanded_stride) {
  for (int64_t panel = 0; panel < panels; ++panel) {
    const char* from = weights + panel * panel_stride;
    float* to = expanded + panel * expanded_stride;
    for (int64_t group = 0; group < groups; ++group) {
#pragma GCC unroll 4
      for (int step = 0; step < Format::kSteps; ++step) {
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectorsPerPanel; ++vector) {
          store(to, Format::load(from, step, vector));
          to += kLanes;
        }
      }
      from += Format::kGroupBytes;
    }
  }
}

template <class Format>
static void multiply_rows(const GemmArgs& args, int64_t row_begin, int64_t rows) {
  constexpr int64_t kPanelBlockBytes = kBlockBytes / kPanelsPerTile;
  constexpr int64_t kGroupsPerBlock = kPanelBlockBytes / (Format::kSteps * kPanelWidth * 4);
  const auto* x = static_cast<const typename Format::Activation*>(args.x) + row_begin * args.x_stride;
  const auto* weights = static_cast<const char*>(args.weights);
  float* out = args.out + row_begin * args.out_stride;
  const int64_t groups = (args.k + Format::kGroup - 1) / Format::kGroup;
  [[maybe_unused]] const bool expands = Format::kExpand && tiles_of_rows(rows) >= kFewestPassesToExpand;

  for (int64_t group = 0; group < groups; group += kGroupsPerBlock) {
    const int64_t groups_in_block = smaller(groups - group, kGroupsPerBlock);
    const int64_t fetch_bytes = groups_in_block * Format::kGroupBytes * kPanelsPerTile / kPanelsPerBlock;
    for (int64_t block = 0; block < args.num_panels; block += kPanelsPerBlock) {
      const int64_t block_end = smaller(block + kPanelsPerBlock, args.num_panels);
      // The same k of the next panels, or after the last ones the next k of the first.
      Fetch fetch{weights + (block_end < args.num_panels ? block_end * args.panel_stride : 0) +
                      (group + (block_end < args.num_panels ? 0 : groups_in_block)) * Format::kGroupBytes,
                  args.panel_stride, 0};
      for (int64_t panel = block; panel < block_end; panel += kPanelsPerTile) {
        const int64_t panels = smaller(block_end - panel, kPanelsPerTile);
        const char* panel_weights = weights + panel * args.panel_stride + group * Format::kGroupBytes;
        if constexpr (Format::kExpand) {
          if (expands) {
            alignas(kCacheLine) float expanded[kBlockBytes / 4];
            expand<Format>(panel_weights, args.panel_stride, panels, groups_in_block, expanded,
                           kPanelBlockBytes / 4);
            multiply_pass<Float32Weights>(
                panels,
                {x + group * Format::kGroup, args.x_stride, rows, reinterpret_cast<const char*>(expanded),
                 kPanelBlockBytes, groups_in_block * Format::kGroup, group > 0, out + panel * kPanelWidth,
                 args.out_stride},
                fetch, fetch_bytes);
            continue;
          }
        }
        multiply_pass<Format>(panels,
                              {x + group * Format::kGroup, args.x_stride, rows, panel_weights,
                               args.panel_stride, groups_in_block, group > 0, out + panel * kPanelWidth,
                               args.out_stride},
                              fetch, fetch_bytes);
      }
    }
  }
}

template <class Format>
static void gemm(const GemmArgs& args) {
  if (args.rows == 0) return;
  if (args.rows <= kMostRowsToStream) return stream_rows<Format, kMostRowsToStream>(args);
  const int64_t blocks = (args.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = args.rows * block / blocks;
    multiply_rows<Format>(args, begin, args.rows * (block + 1) / blocks - begin);
  }
}
