// gemm(): out = x * weights^T, with few rows at the speed of memory, with many near that of arithmetic.

// Many rows: the weights are taken in blocks, which stay in the first-level cache while all rows pass by:
// this many bytes at the width they are multiplied in. Cutting k stores the fp32 sums and loads them again,
// which changes no bit of them.
constexpr int64_t kBlockBytes = 16 << 10;
// The rows that pass by, and their sums with so many panels, stay in the second-level cache from block to
// block: 192 KiB each in fp32.
constexpr int64_t kRowsPerBlock = 192;
constexpr int64_t kPanelsPerBlock = 16;

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
    Tile<Format, kRows, kPanels>::stream(
        static_cast<const typename Format::Activation*>(args.x), args.x_stride,
        static_cast<const char*>(args.weights) + panel * args.panel_stride, args.panel_stride, groups,
        args.out + panel * kPanelWidth, args.out_stride);
  }
  if constexpr (kPanels > 1) {
    if (panel < args.num_panels) stream_panels<Format, kRows, kPanels / 2>(args, panel);
  }
}

template <class Format, int kRows>
static void stream_rows(const GemmArgs& args) {
  if (args.rows == kRows) return stream_panels<Format, kRows, panels_to_stream(kRows)>(args, 0);
  if constexpr (kRows > 1) stream_rows<Format, kRows - 1>(args);
}

// Many rows against a block of one tile's panels.
template <class Format>
struct Block {
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
static void multiply_tile(const Block<Format>& block, int64_t begin, int64_t end, const Fetch& fetch) {
  if constexpr (kRows > 1) {
    if (end - begin < kRows) return multiply_tile<Format, kRows - 1, kPanels>(block, begin, end, fetch);
  }
  Tile<Format, kRows, kPanels>::multiply(block.x + begin * block.x_stride, block.x_stride, block.weights,
                                         block.panel_stride, block.groups, fetch, block.resume,
                                         block.out + begin * block.out_stride, block.out_stride);
}

// In tiles of nearly equal height. Meanwhile the block at `next` is fetched, which is as large: each tile
// fetches its share, so that these weights aren't driven from the first-level cache at once.
template <class Format, int kPanels>
static void multiply_block(const Block<Format>& block, const char* next) {
  const int64_t tiles = (block.rows + kMostRows - 1) / kMostRows;
  const int64_t panel_bytes = block.groups * Format::kGroupBytes;
  const int64_t share = panel_bytes * kPanels / tiles;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t offset = tile * share;
    const Fetch fetch{next + offset / panel_bytes * block.panel_stride + offset % panel_bytes,
                      kCacheLine * kPanels / tiles + 1};
    multiply_tile<Format, kMostRows, kPanels>(block, block.rows * tile / tiles,
                                              block.rows * (tile + 1) / tiles, fetch);
  }
}

template <class Format>
static void multiply_rows(const GemmArgs& args, int64_t row_begin, int64_t rows) {
  static_assert(kPanelsPerTile <= 2);
  constexpr int64_t kGroupsPerBlock =
      kBlockBytes / (kPanelsPerTile * Format::kSteps * kPanelWidth * int64_t{sizeof(float)});
  const auto* x = static_cast<const typename Format::Activation*>(args.x) + row_begin * args.x_stride;
  float* out = args.out + row_begin * args.out_stride;
  const int64_t groups = (args.k + Format::kGroup - 1) / Format::kGroup;

  for (int64_t group = 0; group < groups; group += kGroupsPerBlock) {
    const char* weights = static_cast<const char*>(args.weights) + group * Format::kGroupBytes;
    const int64_t groups_in_block = smaller(groups - group, kGroupsPerBlock);
    for (int64_t panel = 0; panel < args.num_panels; panel += kPanelsPerTile) {
      const Block<Format> block{x + group * Format::kGroup,
                                args.x_stride,
                                rows,
                                weights + panel * args.panel_stride,
                                args.panel_stride,
                                groups_in_block,
                                /*resume=*/group > 0,
                                out + panel * kPanelWidth,
                                args.out_stride};
      const int64_t next_panel = panel + kPanelsPerTile;
      // After the last panels come the first ones, with the next k.
      const char* next = next_panel < args.num_panels ? weights + next_panel * args.panel_stride
                                                      : weights + groups_in_block * Format::kGroupBytes;
      if (next_panel <= args.num_panels) {
        multiply_block<Format, kPanelsPerTile>(block, next);
      } else {
        multiply_block<Format, 1>(block, next);
      }
    }
  }
}

template <class Format>
static void gemm(const GemmArgs& args) {
  if (args.rows == 0) return;
  if (args.rows <= kMostRows) return stream_rows<Format, kMostRows>(args);
  const int64_t blocks = (args.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = args.rows * block / blocks;
    const int64_t rows = args.rows * (block + 1) / blocks - begin;
    for (int64_t panel = 0; panel < args.num_panels; panel += kPanelsPerBlock) {
      GemmArgs part = args;
      part.weights = static_cast<const char*>(args.weights) + panel * args.panel_stride;
      part.num_panels = smaller(args.num_panels - panel, kPanelsPerBlock);
      part.out = args.out + panel * kPanelWidth;
      multiply_rows<Format>(part, begin, rows);
    }
  }
}
