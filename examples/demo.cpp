// The demonstration: replays recorded allocations of real programs through cudapool, on a device
// only 5 % larger than what these programs hold at once, and shows what that costs beside plain
// cuMemAlloc and cuMemFree. It runs on the GPU of the machine, or else on the simulated driver, and
// knows both libraries only by dlopen.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <string>
#include <vector>

#include "replay.hpp"
#include "table.hpp"

namespace {

const double kHeadroom = 1.05;

// Round numbers of the size that driver calls take on data-centre GPUs; they differ by driver, size
// and load. That cuMemFree also waits for the device is left out, which favours plain calls.
const char *const kLatencies =
    "cuMemAlloc=20us,cuMemFree=20us,cuMemCreate=30us,cuMemRelease=25us,"
    "cuMemMap=2us,cuMemSetAccess=40us,cuMemUnmap=35us";

using Cells = std::vector<std::string>;

void print_row(const std::string &label, const Cells &cells) {
  printf("  %-38s", label.c_str());
  for (const std::string &cell : cells) printf("%16s", cell.c_str());
  printf("\n");
}

// One cell for each result, "-" where the trace could not be finished.
template <class Show>
void print_row(const std::string &label, const std::vector<replay::Result> &results, Show show) {
  Cells cells;
  for (const replay::Result &result : results) {
    cells.push_back(result.finished() ? show(result) : std::string("-"));
  }
  print_row(label, cells);
}

// "-" for what an allocator does not do.
std::string count_of(const replay::Result &result, const char *name) {
  return result.numbers.count(name) != 0 ? table::count(result[name]) : "-";
}

double seconds_per_call(const replay::Result &result) {
  return result["seconds"] / result["events"];
}

void print_costs(const std::vector<replay::Result> &results) {
  using replay::Result;
  print_row("time per call", results,
            [](const Result &r) { return table::duration(seconds_per_call(r)); });
  print_row("time in the allocator, whole trace", results,
            [](const Result &r) { return table::duration(r["seconds"]); });
}

// Replays one trace every way and prints its table; false if cudapool could not serve it.
bool show(const std::string &path, bool simulated) {
  using replay::Result;
  const trace::Trace trace = trace::load(path);
  const double peak = static_cast<double>(trace.live_peak);
  replay::Setup setup{path, true, static_cast<uint64_t>(peak * kHeadroom), ""};
  const uint64_t memory = setup.memory;
  printf("%s: %s calls, at most %s live at once\n", trace.name.c_str(),
         table::count(static_cast<double>(trace.events.size())).c_str(),
         table::bytes(peak).c_str());
  printf("%s\n", (simulated ? "on a device of " + table::bytes(static_cast<double>(memory))
                            : "cudapool limited to " + table::bytes(static_cast<double>(memory)))
                     .c_str());

  std::vector<Result> results;
  results.push_back(replay::run(setup, simulated));
  setup.pooled = false;
  results.push_back(replay::run(setup, simulated));

  printf("\n");
  print_row("", {"cudapool", "plain calls"});
  Cells finished;
  for (const Result &r : results) finished.push_back(r.finished() ? "yes" : "NO");
  print_row("served to the end", finished);
  print_row("live, at the peak", results, [&](const Result &) { return table::bytes(peak); });
  print_row("reserved, at the peak", results,
            [](const Result &r) { return table::bytes(r["reserved_peak"]); });
  print_row("reserved / live", results,
            [&](const Result &r) { return table::number(r["reserved_peak"] / peak, 3); });
  print_row("taken: cuMemCreate | cuMemAlloc", results,
            [](const Result &r) { return count_of(r, "create"); });
  print_row("given back: cuMemRelease | cuMemFree", results,
            [](const Result &r) { return count_of(r, "release"); });
  print_row("mapped: cuMemMap", results, [](const Result &r) { return count_of(r, "map"); });
  print_row("unmapped: cuMemUnmap", results, [](const Result &r) { return count_of(r, "unmap"); });
  print_row("waits for the device", results, [](const Result &r) { return count_of(r, "sync"); });
  if (simulated) {
    print_row("driver calls of any kind", results,
              [](const Result &r) { return count_of(r, "calls"); });
  }
  print_row("out-of-memory worked through", results,
            [](const Result &r) { return count_of(r, "recovered"); });
  print_costs(results);

  for (const Result &r : results) {
    if (!r.finished()) printf("  %s\n", r.failure.c_str());
  }
  const bool served = results[0].finished();
  if (simulated) {
    printf("\n  with driver calls that take time, as assumed below:\n");
    results.clear();
    for (const bool pooled : {true, false}) {
      results.push_back(replay::run({path, pooled, memory, kLatencies}, simulated));
    }
    print_costs(results);
  }
  printf("\n");
  return served;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    driver::choose(argv);
    if (replay::is_child(argc, argv)) return replay::child(argv);
    if (argc < 2) {
      fprintf(stderr, "usage: %s TRACE|FOLDER...\n", argv[0]);
      return 2;
    }
    const Cuda cuda = driver::open_cuda();
    char device[128] = "";
    driver::check(cuda.device_name(device, sizeof device, 0), "cuDeviceGetName");
    const uint32_t version = driver::open_pool().version();
    printf("cudapool %u.%u.%u on %s%s\n\n", version / 1000000, version / 1000 % 1000,
           version % 1000, device,
           cuda.simulated() ? " (simulated: this machine has no CUDA driver with a device)" : "");
    fflush(stdout);
    bool served = true;
    for (int i = 1; i < argc; ++i) {
      for (const std::string &path : trace::find(argv[i])) {
        served = show(path, cuda.simulated()) && served;
        fflush(stdout);
      }
    }
    if (cuda.simulated()) printf("assumed latencies: %s\n", kLatencies);
    return served ? 0 : 1;
  } catch (const std::exception &error) {
    fprintf(stderr, "demo: %s\n", error.what());
    return 1;
  }
}
