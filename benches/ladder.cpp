// Times the reclaim ladder: what a request costs that can only be served by giving up idle memory,
// beside 10, 1,000 and 100,000 idle blocks on a device of one size. The time must not grow faster
// than the number of chunks that are moved or given back (or of frees that are retired); fails
// where it does.
//
// Always on the simulated driver, which times its own calls, so that what is compared is the pool's
// own share of the processor time. A row that fails is measured again, and the least counts.
//
//   ladder [row]   up to 100,000 idle blocks, half a minute
//     --short      up to 30,000
//     --gate       held to a narrow bound
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "driver.hpp"
#include "table.hpp"
#include "trace.hpp"

namespace {

const uint64_t kDevice = 1ULL << 40;
const uint64_t kKiB = 1ULL << 10;
const uint64_t kMiB = 1ULL << 20;

// From one row to the next the time may grow so many times faster than the work: more records are
// in the machine's caches where there are fewer of them. Linear where it should be constant, or
// quadratic where it should be linear, would be ten times and more.
const double kTolerance = 4;
// The same without --gate: beside other programs the caches tell little. From 1,000 blocks to 30,000 what
// should be constant and is linear, or should be linear and is quadratic, is 30 times.
const double kWideTolerance = 15;
// What may be added, because scans have limits that few blocks do not reach.
const double kFloorNs = 100e3;
const int kAttempts = 3;

// What one climb took.
struct Climb {
  double own_ns = 0;     // in the pool
  double driver_ns = 0;  // in the driver, on this thread
  double calls = 0;      // of the driver
  double chunks = 0;     // moved, or given back
  double work = 0;       // the same, and frees retired
};

struct Piece {
  uint64_t size;
  bool idle;
};
using Pattern = std::vector<Piece>;

uint64_t bytes_of(const Pattern &pattern) {
  uint64_t sum = 0;
  for (const Piece &piece : pattern) sum += piece.size;
  return sum;
}

class Bench {
 public:
  Bench() : cuda(driver::open_cuda()), pool(driver::open_pool()) {
    stream = driver::new_stream(cuda);
    pool_options options{};
    options.struct_size = sizeof options;
    pool.options_init(&options);
    // Idle memory is moved only once the driver has refused more.
    options.max_idle_percent = 10000;
    check(pool.configure(&options));
    malloc_ = options.backend == POOL_BACKEND_MALLOC;
    cuda.time_calls(1);
    measure_clock();
    warm_up();
  }

  Cuda cuda;
  Pool pool;
  CUstream_st *stream = nullptr;

  bool by_malloc() const { return malloc_; }
  // What lies in a chunk of its own on either backend.
  uint64_t chunk() const { return malloc_ ? 4 * kMiB : 2 * kMiB; }

  void check(pool_status status) const {
    if (status != POOL_OK) throw std::runtime_error(pool.error());
  }
  void *alloc(uint64_t size) const {
    void *block = nullptr;
    check(pool.alloc_async(&block, size, stream));
    return block;
  }
  void free(void *block) const { check(pool.free_async(block, stream)); }

  // Live blocks in this pattern, over and over, side by side in the address space until `idle` of
  // them are such as will be freed, which are returned. The memory comes in steps of `step`,
  // which decides the size of chunks: a 64th.
  std::vector<void *> lay_out(const Pattern &pattern, uint64_t idle, uint64_t step = 128 * kMiB) const {
    const uint64_t times = step / bytes_of(pattern);
    std::vector<void *> found;
    found.reserve(idle);
    while (found.size() < idle) {
      // Chunks of cuMemAlloc need no such help, and nothing coalesces across them.
      if (!malloc_) free(alloc(step));
      for (uint64_t i = 0; i < times && (!malloc_ || found.size() < idle); ++i) {
        for (const Piece &piece : pattern) {
          void *block = alloc(piece.size);
          if (piece.idle && found.size() < idle) found.push_back(block);
        }
      }
    }
    return found;
  }

  void free_all(const std::vector<void *> &blocks) const {
    for (void *block : blocks) free(block);
    wait_for_work();
  }
  // Everything freed is finished with.
  void wait_for_work() const {
    size_t released = 0;
    check(pool.trim(nullptr, 0, SIZE_MAX, &released));
  }
  // Everything idle is the driver's.
  void give_back() const {
    size_t released = 0;
    check(pool.trim(nullptr, 0, 0, &released));
  }
  // Somebody else takes the rest of the device.
  void fill() const {
    size_t free = 0, total = 0;
    driver::check(cuda.memory_info(&free, &total), "cuMemGetInfo");
    CUdeviceptr block = 0;
    if (free > 0) driver::check(cuda.alloc(&block, free), "cuMemAlloc");
  }

  // Runs a climb, in the middle of which `retired` frees are found to be complete.
  Climb time(const std::function<void()> &body, uint64_t retired = 0) const {
    sort_host_memory();
    const pool_stats before = pool.stats();
    cuda.reset_counts();
    const double start = thread_ns();
    body();
    const double spent = thread_ns() - start;
    Climb climb;
    climb.driver_ns = static_cast<double>(cuda.call_time("*"));
    climb.calls = static_cast<double>(cuda.call_count("*"));
    climb.own_ns = std::max(0.0, spent - climb.driver_ns - climb.calls * clock_ns_);
    const pool_stats after = pool.stats();
    climb.chunks = static_cast<double>(after.driver_map_calls - before.driver_map_calls +
                                       after.driver_free_calls - before.driver_free_calls);
    climb.work = climb.chunks + static_cast<double>(retired);
    return climb;
  }

 private:
  static double thread_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
  }

  // What the simulated driver gave back to the host's allocator is sorted now (some of it in each
  // large request), not by the pool's next call.
  static void sort_host_memory() {
    malloc_trim(0);
    std::vector<std::vector<char>> large(64);
    for (std::vector<char> &block : large) block.reserve(100 << 10);
  }

  // The first time that code runs is no measure of it.
  void warm_up() const {
    for (int i = 0; i < 3; ++i) {
      free_all({alloc(64 * kMiB), alloc(8 * kKiB), alloc(4 * kKiB)});
      give_back();
    }
  }

  // That the driver looks at the clock costs time outside of what it sees.
  void measure_clock() {
    const int steps = 10000;
    int count = 0;
    cuda.reset_counts();
    const double start = thread_ns();
    for (int i = 0; i < steps; ++i) cuda.device_count(&count);
    const double spent = thread_ns() - start;
    clock_ns_ = (spent - static_cast<double>(cuda.call_time("*"))) / steps;
  }

  bool malloc_ = false;
  double clock_ns_ = 0;
};

// How many climbs of one kind there is idle memory for.
uint64_t climbs_for(uint64_t idle) { return std::clamp<uint64_t>(idle / 20, 1, 5); }

const uint64_t kWanted = 16 * kMiB;

std::vector<Climb> repeat(const Bench &bench, uint64_t idle, const std::function<void()> &body) {
  std::vector<Climb> climbs;
  for (uint64_t i = 0; i < climbs_for(idle); ++i) climbs.push_back(bench.time(body));
  return climbs;
}

Pattern alternating(const Bench &bench) {
  return {{bench.chunk(), true}, {bench.chunk(), false}};
}

// One whole idle chunk, and small idle blocks that are trapped between live ones.
Pattern mixed(const Bench &bench) {
  Pattern pattern{{bench.chunk(), true}};
  for (int i = 0; i < 4; ++i) {
    pattern.push_back({256 * kKiB, true});
    pattern.push_back({256 * kKiB, false});
  }
  return pattern;
}

void expect_oom(const Bench &bench, uint64_t size) {
  void *block = nullptr;
  if (bench.pool.alloc_async(&block, size, bench.stream) != POOL_ERROR_OUT_OF_MEMORY) {
    throw std::runtime_error("a request was served that nothing can serve");
  }
}

std::vector<Climb> remap_some(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out(alternating(bench), idle));
  bench.fill();
  return repeat(bench, idle, [&] { bench.alloc(kWanted); });
}

std::vector<Climb> remap_all(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out(mixed(bench), idle));
  bench.fill();
  return {bench.time([&] { bench.alloc(idle / 5 * bench.chunk()); })};
}

std::vector<Climb> release_some(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out(alternating(bench), idle));
  bench.fill();
  // Only once: after that the pool keeps some memory free for others.
  return {bench.time([&] {
    size_t released = 0;
    bench.check(bench.pool.reclaim(0, kWanted, &released));
    CUdeviceptr block = 0;
    driver::check(bench.cuda.alloc(&block, kWanted), "cuMemAlloc");
  })};
}

std::vector<Climb> release_all(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out(mixed(bench), idle));
  bench.fill();
  return {bench.time([&] {
    size_t released = 0;
    bench.check(bench.pool.reclaim(0, kDevice, &released));
    CUdeviceptr block = 0;
    driver::check(bench.cuda.alloc(&block, released), "cuMemAlloc");
  })};
}

std::vector<Climb> retire_all(const Bench &bench, uint64_t idle) {
  const std::vector<void *> blocks = bench.lay_out(alternating(bench), idle);
  bench.fill();
  bench.cuda.spin(bench.stream, 2000 + idle);
  for (void *block : blocks) bench.check(bench.pool.free(block));
  return {bench.time([&] { bench.alloc(kWanted); }, idle)};
}

// Idle memory of a busy stream comes first by age, and cannot be had yet.
std::vector<Climb> beside_busy(const Bench &bench, uint64_t idle) {
  const uint64_t ready = 5 * kWanted / bench.chunk();
  std::vector<void *> blocks = bench.lay_out(alternating(bench), idle + ready);
  bench.fill();
  CUstream_st *const busy = driver::new_stream(bench.cuda);
  bench.cuda.spin(busy, 300000 + 10 * idle);  // longer than all of this takes
  for (uint64_t i = 0; i < idle; ++i) bench.check(bench.pool.free_async(blocks[i], busy));
  for (uint64_t i = 0; i < ready; ++i) bench.free(blocks[idle + i]);
  std::vector<Climb> climbs;
  for (int i = 0; i < 5; ++i) climbs.push_back(bench.time([&] { bench.alloc(kWanted); }));
  return climbs;
}

// Chunks of 4 MiB: one fits, the next would be too large for the rest.
std::vector<Climb> too_large(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out({{4 * kMiB, true}, {4 * kMiB, false}}, idle, 256 * kMiB));
  bench.fill();
  // Only once: what it gives back serves the next.
  return {bench.time([&] { bench.alloc(6 * kMiB); })};
}

std::vector<Climb> own_allocation(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out(alternating(bench), idle));
  bench.fill();
  pool_request request{};
  request.struct_size = sizeof request;
  request.size = kWanted;
  request.flags = POOL_REQUEST_OWN_ALLOCATION | POOL_REQUEST_STREAM_ORDERED;
  request.stream = bench.stream;
  request.device = -1;
  return repeat(bench, idle, [&] {
    void *block = nullptr;
    bench.check(bench.pool.alloc_with(&block, &request));
  });
}

std::vector<Climb> beside_unmapped(const Bench &bench, uint64_t idle) {
  bench.free_all(bench.lay_out(alternating(bench), idle));
  bench.give_back();
  // Only once: what serves it is found at once from then on.
  return {bench.time([&] { bench.alloc(4 * kMiB); })};
}

std::vector<Climb> refused(const Bench &bench, uint64_t idle, const Pattern &pattern) {
  bench.free_all(bench.lay_out(pattern, idle));
  bench.fill();
  return repeat(bench, 100, [&] { expect_oom(bench, kWanted); });
}

// Blocks of a page and more, none of which covers a chunk.
std::vector<Climb> refused_large(const Bench &bench, uint64_t idle) {
  return refused(bench, idle, {{kMiB, false}, {2 * kMiB, true}, {kMiB, false}});
}
std::vector<Climb> refused_small(const Bench &bench, uint64_t idle) {
  return refused(bench, idle, {{8 * kKiB, false}, {8 * kKiB, true}});
}
// Every idle block is in a slab of its own, so that each slab has room.
std::vector<Climb> refused_slabs(const Bench &bench, uint64_t idle) {
  Pattern slab(16, {4 * kKiB, false});
  slab[0].idle = true;
  return refused(bench, idle, slab);
}

struct Row {
  const char *name;
  const char *label;
  std::vector<Climb> (*run)(const Bench &bench, uint64_t idle);
  bool moves;     // nothing to see where chunks cannot be moved
  uint64_t most;  // idle blocks; 0: no limit
};

// The simulated driver needs two of the host's mappings for each unmapped extent, and hosts allow 65,530.
const uint64_t kMostUnmapped = 30000;

const Row kRows[] = {
    {"remap-some", "served by moving 16 MiB of it", remap_some, false, 0},
    {"remap-all", "served by moving all that can be", remap_all, true, 0},
    {"release-some", "pool_reclaim of 16 MiB, cuMemAlloc", release_some, false, 0},
    {"release-all", "pool_reclaim of all, cuMemAlloc", release_all, false, 0},
    {"retire", "frees retired, 16 MiB moved", retire_all, false, 0},
    {"busy", "freed on a busy stream, 16 MiB moved", beside_busy, false, 0},
    {"too-large", "chunks too large to be moved", too_large, true, 0},
    {"own", "served by a driver allocation", own_allocation, false, 0},
    {"unmapped", "all released, then grown by 4 MiB", beside_unmapped, true, kMostUnmapped},
    {"oom-large", "refused: 2 MiB between live ones", refused_large, true, 0},
    {"oom-small", "refused: 8 KiB between live ones", refused_small, false, 0},
    {"oom-slabs", "refused: 4 KiB in slabs", refused_slabs, false, 0},
};

// In a process of its own, so that each row begins with an empty pool.
int run_row(const std::string &name, uint64_t idle) {
  for (const Row &row : kRows) {
    if (name != row.name) continue;
    const Bench bench;
    if (row.moves && bench.by_malloc()) return 0;
    for (const Climb &climb : row.run(bench, idle)) {
      printf("%.0f %.0f %.0f %.0f %.0f\n", climb.own_ns, climb.driver_ns, climb.calls, climb.chunks,
             climb.work);
    }
    return 0;
  }
  return 2;
}

// One figure of a row.
struct Line {
  uint64_t idle;
  Climb climb;
  bool measured = false;
};

// Measures once more, and keeps the climb that took the pool least.
void measure(const Row &row, Line *line) {
  std::string output;
  trace::output_of({"/proc/self/exe", "--row", row.name, std::to_string(line->idle)}, &output);
  std::istringstream lines(output);
  Climb climb;
  while (lines >> climb.own_ns >> climb.driver_ns >> climb.calls >> climb.chunks >> climb.work) {
    if (!line->measured || climb.own_ns < line->climb.own_ns) line->climb = climb;
    line->measured = true;
  }
}

double work_ratio(const Climb &from, const Climb &to) {
  return std::max(1.0, to.work) / std::max(1.0, from.work);
}

double tolerance = kWideTolerance;

bool grows_too_fast(const Climb &from, const Climb &to) {
  const double work = std::max(1.0, work_ratio(from, to));
  return to.own_ns > kFloorNs + tolerance * work * from.own_ns;
}

bool good(const std::vector<Line> &lines) {
  for (size_t i = 1; i < lines.size(); ++i) {
    if (grows_too_fast(lines[i - 1].climb, lines[i].climb)) return false;
  }
  return true;
}

void print_line(const char *label, const Line &line, const Line *before) {
  const Climb &climb = line.climb;
  std::string grows, work;
  if (before != nullptr) {
    grows = table::number(climb.own_ns / std::max(1.0, before->climb.own_ns), 2) + " x";
    work = table::number(work_ratio(before->climb, climb), 2) + " x";
  }
  const bool failed = before != nullptr && grows_too_fast(before->climb, climb);
  printf("%-37s %9s %7s %9s %10s %10s %9s %9s %9s%s\n", label,
         table::count(static_cast<double>(line.idle)).c_str(), table::count(climb.chunks).c_str(),
         table::duration((climb.own_ns + climb.driver_ns) / 1e9).c_str(),
         table::duration(climb.driver_ns / 1e9).c_str(),
         table::duration(climb.own_ns / 1e9).c_str(),
         climb.work == 0 ? "-" : table::duration(climb.own_ns / climb.work / 1e9).c_str(),
         grows.c_str(), work.c_str(), failed ? "  FAILED" : "");
}

int check_rows(const std::vector<uint64_t> &counts, const std::string &only) {
  printf("%-37s %9s %7s %9s %10s %10s %9s %9s %9s\n", "a request beside idle blocks", "blocks",
         "chunks", "in all", "driver", "pool", "a chunk", "grows", "work");
  int status = 0;
  for (const Row &row : kRows) {
    if (!only.empty() && only != row.name) continue;
    std::vector<Line> lines;
    for (const uint64_t count : counts) {
      lines.push_back({row.most == 0 ? count : std::min(count, row.most), {}, false});
    }
    for (int i = 0; i < kAttempts && (i == 0 || !good(lines)); ++i) {
      for (Line &line : lines) measure(row, &line);
      if (!lines.front().measured) break;  // nothing to see with this backend
    }
    if (!lines.front().measured) continue;
    for (size_t i = 0; i < lines.size(); ++i) {
      print_line(i == 0 ? row.label : "", lines[i], i == 0 ? nullptr : &lines[i - 1]);
    }
    fflush(stdout);
    if (!good(lines)) status = 1;
  }
  return status;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    const bool row = argc == 4 && strcmp(argv[1], "--row") == 0;
    bool short_run = false;
    std::string only;
    for (int i = 1; i < argc && !row; ++i) {
      if (strcmp(argv[i], "--short") == 0) {
        short_run = true;
      } else if (strcmp(argv[i], "--gate") == 0) {
        tolerance = kTolerance;
      } else if (i + 1 == argc && argv[i][0] != '-') {
        only = argv[i];
      } else {
        fprintf(stderr, "usage: %s [--short] [--gate] [row]\n", argv[0]);
        return 2;
      }
    }
    setenv("CUDASIM_MEMORY", std::to_string(kDevice).c_str(), 1);
    // Always the simulated driver; "active" is what it makes of itself.
    const char *state = getenv("CUDAPOOL_SIM");
    if (state == nullptr || strcmp(state, "active") != 0) setenv("CUDAPOOL_SIM", "1", 1);
    driver::choose(argv);
    if (row) return run_row(argv[2], strtoull(argv[3], nullptr, 10));
    return check_rows({10, 1000, short_run ? 30000u : 100000u}, only);
  } catch (const std::exception &error) {
    fprintf(stderr, "ladder: %s\n", error.what());
    return 1;
  }
}
