// The speed of gemm(), set against the limits of the machine.
//
// Few rows: weights are streamed from a buffer that no cache holds; the rate is set against a plain read
// of the same amount of the same buffer. Many rows: multiply-adds per second, set against the same
// instruction on registers alone. Each measurement stands between two of its limit, and what is printed
// are medians: of the rate, of the limit and of their ratio.
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/quantization.h"
#include "limits.h"

namespace {

using namespace numa_moe;

constexpr int64_t kK = 2048;
constexpr int64_t kPanelsPerCall = 16;         // of a stream of weights
constexpr int64_t kBytesPerThread = 24 << 20;  // read in one measurement
constexpr int64_t kPrefillRows = 128;
constexpr int64_t kPrefillPanels = 96;

struct Format {
  const char* name;
  WeightFormat format;
  const char* text = nullptr;  // of codes
};

constexpr Format kFormats[] = {
    {"bf16", WeightFormat::kBfloat16},
    {"fp16", WeightFormat::kFloat16},
    {"fp32", WeightFormat::kFloat32},
    {"int8", WeightFormat::kInt8, "codes=int8 scale=fp32"},
    {"fp8", WeightFormat::kFloat8, "codes=fp8 scale=fp32 group=128"},
    {"int4", WeightFormat::kFourBit, "codes=int4 scale=bf16 group=32"},
    {"int4_zp", WeightFormat::kFourBit, "codes=uint4 scale=bf16 group=32 offset=zero_point"},
    {"mxfp4", WeightFormat::kFourBit, "codes=e2m1 scale=e8m0 group=32"},
    {"nvfp4", WeightFormat::kFourBit, "codes=e2m1 scale=fp8 group=16 outer=fp32"},
};

// A format as the kernels take it.
struct Weights {
  explicit Weights(const Format& format) : format(format.format) {
    panel_bytes = kK / k_group(format.format) * group_bytes(format.format);
    if (format.text == nullptr) return;
    parse_quantization(format.text, &this->format, &quantization);
    panel_bytes = QuantizedPanel(format.format, quantization, kK).bytes;
    pointer = &quantization;
  }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  WeightFormat format;
  Quantization quantization;
  const Quantization* pointer = nullptr;
  int64_t panel_bytes;
};

struct Options {
  InstructionSet instruction_set = supported_instruction_sets().back();
  int repetitions = 41;
  int64_t buffer_bytes = int64_t{1} << 30;
  std::string only;  // "few", "many" or both
  std::string format;  // or all
};

// Time that the calling thread ran: others on the machine disturb that less than the time of day.
double running_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void pin_to_cpu(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  sched_setaffinity(0, sizeof(cpus), &cpus);  // unpinned threads only make the figures noisier
}

// Runs work(thread), which returns how much it did, on pinned threads at once; the sum of their rates.
double rate_on_threads(int threads, const std::function<double(int)>& work) {
  std::vector<double> rates(static_cast<size_t>(threads));
  std::barrier start(threads);
  const auto run = [&](int thread) {
    pin_to_cpu(thread);
    start.arrive_and_wait();
    const double begin = running_seconds();
    const double done = work(thread);
    rates[static_cast<size_t>(thread)] = done / (running_seconds() - begin);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

char* make_buffer(int64_t bytes) {
  void* memory =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  // Halves that are small finite numbers in every format.
  auto* halves = static_cast<uint16_t*>(memory);
  std::minstd_rand random(1);
  for (int64_t i = 0; i < bytes / 2; ++i) halves[i] = static_cast<uint16_t>(0x3c00u | (random() & 0x83ffu));
  return static_cast<char*>(memory);
}

struct Medians {
  std::vector<double> rate, limit, ratio;

  void add(double limit_before, double measured, double limit_after) {
    rate.push_back(measured);
    limit.push_back((limit_before + limit_after) / 2);
    ratio.push_back(measured / limit.back());
  }
  void print(const KernelTable& table, const char* format, int threads, int64_t rows,
             const char* unit) const {
    std::printf("%-10s  %-7s  %7d  %4ld  %8.1f %-7s  %8.1f  %5.3f\n",
                instruction_set_name(table.instruction_set), format, threads, static_cast<long>(rows),
                median(rate), unit, median(limit), median(ratio));
    std::fflush(stdout);
  }
};

// Activations for as many rows, all ones.
struct Rows {
  Rows(const KernelTable& table, int64_t rows) : stride(kK + 272) {
    std::vector<float> ones(static_cast<size_t>(kK), 1.0f);
    data.resize(static_cast<size_t>(rows * stride * table.activation_bytes + 64));
    for (int64_t row = 0; row < rows; ++row) {
      table.stage_row(ones.data(), DataType::kFloat32, kK, kK,
                      data.data() + row * stride * table.activation_bytes);
    }
  }
  int64_t stride;
  std::vector<char> data;
};

void measure_few_rows(const Options& options, const char* buffer, const Weights& weights_format,
                      const char* name) {
  const KernelTable& table = kernel_table(weights_format.format, options.instruction_set);
  const int64_t panel_bytes = weights_format.panel_bytes;
  const int64_t call_bytes = kPanelsPerCall * panel_bytes;
  const int64_t calls = kBytesPerThread / call_bytes;
  for (int threads : {1, 2}) {
    // Each measurement reads on where the last one ended.
    int64_t position = 0;
    const auto gigabytes_per_second = [&](const std::function<void(int, const char*)>& read) {
      const double rate = rate_on_threads(threads, [&](int thread) {
        read(thread, buffer + position + thread * kBytesPerThread);
        return static_cast<double>(calls * call_bytes) * 1e-9;
      });
      position += threads * kBytesPerThread;
      if (position + threads * kBytesPerThread > options.buffer_bytes) position = 0;
      return rate;
    };
    const auto probe = [&] {
      return gigabytes_per_second([&](int, const char* begin) { read_memory(begin, calls * call_bytes); });
    };
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 8}) {
      const Rows x(table, rows);
      std::vector<std::vector<float>> out(static_cast<size_t>(threads));
      for (auto& tile : out) tile.resize(static_cast<size_t>(rows * kPanelsPerCall * kPanelWidth));
      Medians medians;
      for (int repetition = 0; repetition < options.repetitions; ++repetition) {
        const double before = probe();
        const double rate = gigabytes_per_second([&](int thread, const char* weights) {
          for (int64_t call = 0; call < calls; ++call) {
            table.gemm({x.data.data(), x.stride, rows, kK, weights + call * call_bytes, panel_bytes,
                        kPanelsPerCall, out[static_cast<size_t>(thread)].data(), kPanelsPerCall * kPanelWidth,
                        weights_format.pointer});
          }
        });
        medians.add(before, rate, probe());
      }
      medians.print(table, name, threads, rows, "GB/s");
    }
  }
}

// Of codes with the time to dequantize them.
void measure_many_rows(const Options& options, const char* buffer, const Weights& weights_format,
                       const char* name) {
  const KernelTable& codes = kernel_table(weights_format.format, options.instruction_set);
  const KernelTable& table = kernel_table(codes.plain_format, options.instruction_set);
  const int64_t panel_bytes = weights_format.panel_bytes;
  constexpr int64_t kPanelsAtOnce = 4;  // as csrc/moe/experts_ffn.cpp has it
  const int64_t plain_bytes = kK / k_group(codes.plain_format) * group_bytes(codes.plain_format);
  std::vector<char> panels(static_cast<size_t>(kPanelsAtOnce * plain_bytes + 64));
  for (int64_t rows : {int64_t{12}, int64_t{16}, int64_t{32}, int64_t{64}, kPrefillRows, 4 * kPrefillRows}) {
    const Rows x(table, rows);
    std::vector<float> out(static_cast<size_t>(rows * kPrefillPanels * kPanelWidth));
    const int64_t multiply_adds = rows * kK * kPrefillPanels * kPanelWidth;
    const auto probe = [&] {
      return rate_on_threads(1, [&](int) {
        return 2e-9 * static_cast<double>(
                          multiply_registers(table.instruction_set, codes.plain_format, multiply_adds));
      });
    };
    Medians medians;
    int64_t expert = 0;
    const int64_t experts = options.buffer_bytes / (kPrefillPanels * panel_bytes);
    for (int repetition = 0; repetition < options.repetitions; ++repetition) {
      const double before = probe();
      const char* weights = buffer + expert++ % experts * kPrefillPanels * panel_bytes;
      const double rate = rate_on_threads(1, [&](int) {
        GemmArgs args{x.data.data(),
                      x.stride,
                      rows,
                      kK,
                      weights,
                      panel_bytes,
                      kPrefillPanels,
                      out.data(),
                      kPrefillPanels * kPanelWidth,
                      weights_format.pointer};
        if (codes.dequantize == nullptr) {
          table.gemm(args);
        } else {
          args.num_panels = kPanelsAtOnce;
          for (int64_t panel = 0; panel < kPrefillPanels; panel += kPanelsAtOnce) {
            args.weights = weights + panel * panel_bytes;
            codes.dequantize(args, panels.data());
            GemmArgs plain = args;
            plain.weights = panels.data();
            plain.panel_stride = plain_bytes;
            plain.quantization = nullptr;
            plain.out = out.data() + panel * kPanelWidth;
            table.gemm(plain);
          }
        }
        return 2e-9 * static_cast<double>(multiply_adds);
      });
      medians.add(before, rate, probe());
    }
    medians.print(table, name, 1, rows, "GFLOP/s");
  }
}

[[noreturn]] void usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--isa NAME] [--repetitions N] [--gib N] [--only few|many] [--format NAME]\n",
               program);
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--isa") {
      const auto supported = supported_instruction_sets();
      if (!parse_instruction_set(argv[i + 1], &options.instruction_set) ||
          std::find(supported.begin(), supported.end(), options.instruction_set) == supported.end()) {
        std::fprintf(stderr, "--isa %s: not on this machine\n", argv[i + 1]);
        std::exit(2);
      }
    } else if (flag == "--repetitions") {
      options.repetitions = std::max(1, std::atoi(argv[i + 1]));
    } else if (flag == "--gib") {
      options.buffer_bytes = std::max<int64_t>(1, std::atoll(argv[i + 1])) << 30;
    } else if (flag == "--only") {
      options.only = argv[i + 1];
    } else if (flag == "--format") {
      options.format = argv[i + 1];
    } else {
      usage(argv[0]);
    }
  }
  if (argc % 2 == 0) usage(argv[0]);
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const char* buffer = make_buffer(options.buffer_bytes);
  std::printf("%-10s  %-7s  %7s  %4s  %8s %-7s  %8s  %5s\n", "kernels", "w", "threads", "rows", "rate", "",
              "limit", "ratio");
  for (const Format& format : kFormats) {
    if (!options.format.empty() && options.format != format.name) continue;
    const Weights weights(format);
    if (options.only != "many") measure_few_rows(options, buffer, weights, format.name);
    if (options.only != "few") measure_many_rows(options, buffer, weights, format.name);
  }
}
