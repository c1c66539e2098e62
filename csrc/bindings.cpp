// torch_numa_moe._C: the control surface (runtime, placement, statistics). The ops themselves are
// registered with torch by csrc/ops when this module is loaded.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>

#include "kernels/kernels.h"
#include "memory/page_out.h"
#include "memory/page_placement.h"
#include "memory/placed_region.h"
#include "memory/process_maps.h"
#include "moe/expert_layout.h"
#include "moe/runtime.h"
#include "ops/exit_guard.h"
#include "pool/duration_histogram.h"
#include "probe/compute_peak.h"
#include "probe/read_bandwidth.h"

namespace py = pybind11;

namespace numa_moe {
namespace {

InstructionSet instruction_set_from_name(const std::string& name) {
  InstructionSet parsed{};
  if (!parse_instruction_set(name, &parsed)) throw std::invalid_argument("unknown instruction set: " + name);
  return parsed;
}

void start_runtime(RuntimeOptions options) {
  const py::gil_scoped_release release;
  install_runtime(std::make_shared<Runtime>(std::move(options)));
}

void stop_runtime() {
  const py::gil_scoped_release release;
  install_runtime(nullptr);
}

void bind_runtime(py::module_& module) {
  py::enum_<Scheduling>(module, "Scheduling")
      .value("NORMAL", Scheduling::kNormal)
      .value("FIFO", Scheduling::kFifo)
      .value("RR", Scheduling::kRoundRobin);
  py::class_<PoolOptions>(module, "PoolOptions")
      .def(py::init<>())
      .def_readwrite("cpus_per_group", &PoolOptions::cpus_per_group)
      .def_readwrite("caller_helps", &PoolOptions::caller_helps)
      .def_readwrite("worker_spin_us", &PoolOptions::worker_spin_us)
      .def_readwrite("dispatcher_spin_us", &PoolOptions::dispatcher_spin_us)
      .def_readwrite("dispatcher_yields", &PoolOptions::dispatcher_yields)
      .def_readwrite("late_after_us", &PoolOptions::late_after_us)
      .def_readwrite("scheduling", &PoolOptions::scheduling)
      .def_readwrite("collect_statistics", &PoolOptions::collect_statistics);
  py::class_<PoolCounters>(module, "PoolCounters")
      .def_readonly("dispatches", &PoolCounters::dispatches)
      .def_readonly("dispatcher_spins", &PoolCounters::dispatcher_spins)
      .def_readonly("dispatcher_yields", &PoolCounters::dispatcher_yields)
      .def_readonly("dispatcher_parks", &PoolCounters::dispatcher_parks)
      .def_readonly("worker_parks", &PoolCounters::worker_parks)
      .def_readonly("wakes_sent", &PoolCounters::wakes_sent)
      .def_readonly("wakes_skipped", &PoolCounters::wakes_skipped)
      .def_readonly("late_tasks", &PoolCounters::late_tasks)
      .def_readonly("late_tasks_won", &PoolCounters::late_tasks_won);
  py::class_<WorkerState>(module, "WorkerState")
      .def_readonly("group", &WorkerState::group)
      .def_readonly("requested_cpu", &WorkerState::requested_cpu)
      .def_readonly("allowed", &WorkerState::allowed)
      .def_readonly("pin_error", &WorkerState::pin_error)
      .def_property_readonly("pinned", &WorkerState::pinned)
      .def_readonly("thread_id", &WorkerState::thread_id)
      .def_readonly("scheduling", &WorkerState::scheduling)
      .def_readonly("scheduling_error", &WorkerState::scheduling_error);
  module.def(
      "start",
      [](const PoolOptions& pool, std::vector<int> node_per_group, const std::string& instruction_set) {
        start_runtime({pool, std::move(node_per_group), instruction_set_from_name(instruction_set)});
      },
      py::arg("pool"), py::arg("node_per_group"), py::arg("instruction_set"));
  module.def("stop", &stop_runtime);
  module.def("is_running", [] { return running_runtime() != nullptr; });
  module.def("set_starter", [](py::function starter) {
    // Leaked with the other globals: at exit the interpreter may be gone before the runtime is.
    auto* held = new py::function(std::move(starter));
    set_runtime_starter([held] {
      const py::gil_scoped_acquire acquire;
      (*held)();
    });
  });
  module.def("begin_process_exit", &begin_process_exit);
  module.def("counters", [] {
    const auto runtime = running_runtime();
    return runtime == nullptr ? PoolCounters{} : runtime->pool().counters();
  });
  module.def("workers", [] {
    const auto runtime = running_runtime();
    return runtime == nullptr ? std::vector<WorkerState>{} : runtime->pool().workers();
  });
  module.def("workspace_bytes", [] {
    // Who holds the lock may be letting go of tensors, for which it needs the interpreter.
    const py::gil_scoped_release release;
    const auto runtime = running_runtime();
    return runtime == nullptr ? int64_t{0} : runtime->workspace_bytes();
  });
  module.def("running_instruction_set", [] {
    const auto runtime = running_runtime();
    return std::string(runtime == nullptr ? "" : instruction_set_name(runtime->instruction_set()));
  });
}

// Few of the buckets hold anything.
std::map<int, uint64_t> filled_buckets(const SiteStatistics& statistics) {
  std::map<int, uint64_t> filled;
  int bucket = 0;
  for (const uint64_t count : statistics.durations.counts) {
    if (count > 0) filled.emplace(bucket, count);
    ++bucket;
  }
  return filled;
}

void bind_statistics(py::module_& module) {
  py::class_<SiteStatistics>(module, "SiteStatistics")
      .def_readonly("site", &SiteStatistics::site)
      .def_readonly("thread", &SiteStatistics::thread)
      .def_readonly("tasks", &SiteStatistics::tasks)
      .def_readonly("late_tasks", &SiteStatistics::late_tasks)
      .def_readonly("busy_ns", &SiteStatistics::busy_ns)
      .def_property_readonly("counts", &filled_buckets)
      .def_property_readonly("max_ns", [](const SiteStatistics& self) { return self.durations.max_ns; });
  module.def("statistics", [] {
    const auto runtime = running_runtime();
    return runtime == nullptr ? std::vector<SiteStatistics>{} : runtime->pool().statistics();
  });
  module.attr("MOST_SITES") = kMostSites;
  // Addresses of the packed gate/up weights, by site.
  module.def("sites", [] {
    const py::gil_scoped_release release;
    const auto runtime = running_runtime();
    std::vector<std::uintptr_t> addresses;
    if (runtime == nullptr) return addresses;
    for (const void* begin : runtime->sites()) addresses.push_back(reinterpret_cast<std::uintptr_t>(begin));
    return addresses;
  });
  // Least nanoseconds of each bucket of SiteStatistics.counts, and where the last one ends.
  module.def("duration_buckets", [] {
    std::vector<int64_t> begins;
    for (int bucket = 0; bucket <= kDurationBuckets; ++bucket) {
      begins.push_back(duration_bucket_begin(bucket));
    }
    return begins;
  });
}

void bind_memory(py::module_& module) {
  py::enum_<HugePages>(module, "HugePages")
      .value("NONE", HugePages::kNone)
      .value("TRANSPARENT", HugePages::kTransparent)
      .value("EXPLICIT", HugePages::kExplicit);
  py::enum_<BindingPolicy>(module, "BindingPolicy")
      .value("NONE", BindingPolicy::kNone)
      .value("STRICT", BindingPolicy::kStrict)
      .value("PREFER", BindingPolicy::kPrefer);
  py::class_<SliceBinding>(module, "SliceBinding")
      .def_readonly("node", &SliceBinding::node)
      .def_readonly("bind_error", &SliceBinding::bind_error)
      .def_readonly("policy", &SliceBinding::policy);
  // A writable buffer, so that torch.frombuffer makes a tensor of it that keeps the region alive.
  py::class_<PlacedRegion>(module, "PlacedRegion", py::buffer_protocol())
      .def(py::init<std::size_t, const std::vector<int>&, HugePages, std::size_t>(), py::arg("slice_bytes"),
           py::arg("nodes"), py::arg("huge_pages"), py::arg("untouched_bytes") = 0)
      .def_property_readonly("slice_bytes", &PlacedRegion::slice_bytes)
      .def_property_readonly("slice_stride", &PlacedRegion::slice_stride)
      .def_property_readonly("total_bytes", &PlacedRegion::total_bytes)
      .def_property_readonly("bindings", &PlacedRegion::bindings)
      .def_property_readonly("huge_pages", &PlacedRegion::huge_pages)
      .def_buffer([](PlacedRegion& region) {
        return py::buffer_info(region.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(region.total_bytes()));
      });
  py::enum_<PlacementSource>(module, "PlacementSource")
      .value("NONE", PlacementSource::kNone)
      .value("MOVE_PAGES", PlacementSource::kMovePages)
      .value("NUMA_MAPS", PlacementSource::kNumaMaps);
  py::class_<PagePlacement>(module, "PagePlacement")
      .def_readonly("pages_sampled", &PagePlacement::pages_sampled)
      .def_readonly("pages_on_node", &PagePlacement::pages_on_node)
      .def_readonly("pages_absent", &PagePlacement::pages_absent)
      .def_readonly("error", &PagePlacement::error)
      .def_readonly("source", &PagePlacement::source);
  module.def(
      "query_page_placement",
      [](std::uintptr_t address, std::size_t bytes, int64_t max_samples) {
        const py::gil_scoped_release release;
        return query_page_placement(reinterpret_cast<const void*>(address), bytes, max_samples);
      },
      py::arg("address"), py::arg("bytes"), py::arg("max_samples"));
}

void bind_pages(py::module_& module) {
  py::class_<HugePageUse>(module, "HugePageUse")
      .def_readonly("found", &HugePageUse::found)
      .def_readonly("resident_bytes", &HugePageUse::resident_bytes)
      .def_readonly("huge_bytes", &HugePageUse::huge_bytes);
  module.def(
      "count_huge_pages",
      [](const std::vector<std::pair<std::uintptr_t, std::size_t>>& spans) {
        std::vector<MemoryRange> ranges;
        for (const auto& [address, bytes] : spans) ranges.push_back({address, bytes});
        const py::gil_scoped_release release;
        return count_huge_pages(ranges);
      },
      py::arg("spans"));
  module.def(
      "page_out",
      [](std::uintptr_t address, std::size_t bytes) {
        const py::gil_scoped_release release;
        return page_out(reinterpret_cast<const void*>(address), bytes);
      },
      py::arg("address"), py::arg("bytes"));
}

void bind_kernels(py::module_& module) {
  module.attr("PANEL_WIDTH") = kPanelWidth;
  module.def("supported_instruction_sets", [] {
    std::vector<std::string> names;
    for (const InstructionSet set : supported_instruction_sets()) {
      names.emplace_back(instruction_set_name(set));
    }
    return names;
  });
  // All of them, in ascending order of preference.
  module.def("instruction_set_names", [] {
    std::vector<std::string> names;
    for (int set = 0; set <= static_cast<int>(InstructionSet::kAmx); ++set) {
      names.emplace_back(instruction_set_name(static_cast<InstructionSet>(set)));
    }
    return names;
  });
  module.def("activation_names", &activation_names);
}

// Limits of the machine that benchmarks compare with; see csrc/probe.
void bind_probes(py::module_& module) {
  module.def("read_bandwidth", &read_bandwidth, py::arg("num_threads"), py::arg("bytes"), py::arg("cpus"),
             py::call_guard<py::gil_scoped_release>());
  module.def("read_bandwidth_loads", &read_bandwidth_loads);
  module.def("compute_peak", &compute_peak, py::arg("kind"), py::arg("num_threads"), py::arg("cpus"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace numa_moe

PYBIND11_MODULE(_C, module) {
  module.attr("__version__") = NUMA_MOE_VERSION;
  numa_moe::bind_runtime(module);
  numa_moe::bind_statistics(module);
  numa_moe::bind_memory(module);
  numa_moe::bind_pages(module);
  numa_moe::bind_kernels(module);
  numa_moe::bind_probes(module);
}
