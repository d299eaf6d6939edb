// The trace table: how much memory cudapool reserves over what callers hold, on every trace, and
// whether it serves the trace on a device 3 % larger than the trace's live peak (or with
// `--headroom FACTOR` another size). Fails where a capped replay fails, a check fails, or the
// geometric mean of the ratios is above the bound.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <cmath>
#include <string>
#include <vector>

#include "replay.hpp"
#include "table.hpp"

namespace {

const double kHeadroom = 1.03;
const double kMeanBound = 1.06;

struct Row {
  std::string name;
  double ratio = 0;  // reserved peak to live peak, on a device that is large
  std::string failure;
};

void print_header(double headroom) {
  const std::string capped = "device of " + table::number(headroom, 3) + " times the live peak";
  printf("%-30s %9s %9s %9s  %-39s  %s\n", "", "", "live", "ns per", "large device",
         capped.c_str());
  printf("%-30s %9s %9s %9s  %6s %6s %6s %6s %6s %4s  %6s %6s %6s %7s\n", "trace", "calls", "peak",
         "call", "ratio", "create", "releas", "map", "unmap", "wait", "ratio", "create", "map",
         "OOM rec");
}

std::string cell(const replay::Result &result, const char *name) {
  return table::number(result[name], 0);
}

Row measure(const std::string &path, double headroom, bool simulated) {
  const trace::Trace trace = trace::load(path);
  const double peak = static_cast<double>(trace.live_peak);
  const replay::Result open = replay::run({path, true, 0, ""}, simulated);
  const uint64_t memory = static_cast<uint64_t>(peak * headroom);
  const replay::Result capped = replay::run({path, true, memory, ""}, simulated);

  Row row{trace.name, open["reserved_peak"] / peak, ""};
  const double ns = open["seconds"] / std::max(1.0, open["events"]) * 1e9;
  printf("%-30s %9zu %9s %9s  %6s %6s %6s %6s %6s %4s  ", trace.name.c_str(), trace.events.size(),
         table::bytes(peak).c_str(), table::number(ns, 0).c_str(),
         table::number(row.ratio, 3).c_str(), cell(open, "create").c_str(),
         cell(open, "release").c_str(), cell(open, "map").c_str(), cell(open, "unmap").c_str(),
         cell(open, "sync").c_str());
  if (capped.finished()) {
    printf("%6s %6s %6s %7s\n", table::number(capped["reserved_peak"] / peak, 3).c_str(),
           cell(capped, "create").c_str(), cell(capped, "map").c_str(),
           cell(capped, "recovered").c_str());
  } else {
    const double share = capped["events"] / static_cast<double>(trace.events.size());
    printf("FAILED after %s %% of the calls\n", table::number(share * 100, 0).c_str());
  }
  fflush(stdout);
  if (!open.finished()) row.failure = "on a large device: " + open.failure;
  else if (!capped.finished()) row.failure = "on the small device: " + capped.failure;
  return row;
}

// Prints what the rows come to; the program's exit status.
int conclude(const std::vector<Row> &rows) {
  double logarithms = 0;
  int status = 0;
  for (const Row &row : rows) {
    logarithms += std::log(row.ratio);
    if (row.failure.empty()) continue;
    printf("FAILED: %s, %s\n", row.name.c_str(), row.failure.c_str());
    status = 1;
  }
  const double mean = std::exp(logarithms / static_cast<double>(rows.size()));
  printf("geometric mean of the ratios over %zu traces: %.4f (bound %.2f)\n", rows.size(), mean,
         kMeanBound);
  if (!(mean <= kMeanBound)) {
    printf("FAILED: the mean is above its bound\n");
    status = 1;
  }
  return status;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    driver::choose(argv);
    if (replay::is_child(argc, argv)) return replay::child(argv);
    double headroom = kHeadroom;
    const std::vector<std::string> paths = trace::arguments(argc, argv, &headroom);
    if (paths.empty()) return 2;
    const bool simulated = driver::open_cuda().simulated();
    print_header(headroom);
    std::vector<Row> rows;
    for (const std::string &path : paths) rows.push_back(measure(path, headroom, simulated));
    return conclude(rows);
  } catch (const std::exception &error) {
    fprintf(stderr, "replay: %s\n", error.what());
    return 1;
  }
}
