// Times what a caller of cudapool waits for: a cached, stream-ordered allocation with its free,
// beside two uncontended lock/unlock pairs of a mutex in the same run. Absolute times say more of
// the machine than of the pool, so the bounds are on the ratios. Fails where a cached pair calls the
// driver; with --gate also where in each of several attempts a ratio is above its bound.
//
//   pairs            the pairs, a few seconds
//   pairs --gate     the same, held to the bounds
//   pairs --growth   how the cost of a call grows with live blocks and with the device
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver.hpp"
#include "table.hpp"
#include "trace.hpp"

namespace {

using Clock = std::chrono::steady_clock;

const double kPairBound = 1.5;  // same-size pairs
const double kMixBound = 5;     // among 1000 live blocks of mixed sizes
const int kAttempts = 5;        // other programs on the machine must not fail a check
const int kRounds = 101;
const int kSteps = 4000;      // of a batch: long enough for the clock, short enough to dodge noise
const int kShortSteps = 100;  // where some steps call the driver: most batches are without these

struct Bench {
  Cuda cuda;
  Pool pool;
  CUstream_st *stream = nullptr;

  void *alloc(uint64_t size) const { return alloc_on(stream, size); }
  void free(void *block) const { free_on(stream, block); }

  void *alloc_on(CUstream_st *on, uint64_t size) const {
    void *block = nullptr;
    if (pool.alloc_async(&block, size, on) != POOL_OK) throw std::runtime_error(pool.error());
    return block;
  }
  void free_on(CUstream_st *on, void *block) const {
    if (pool.free_async(block, on) != POOL_OK) throw std::runtime_error(pool.error());
  }

  // All driver calls so far; with a real driver, those that the pool counts itself.
  uint64_t driver_calls() const {
    if (cuda.call_count != nullptr) return cuda.call_count("*");
    const pool_stats now = pool.stats();
    return now.driver_alloc_calls + now.driver_free_calls + now.driver_map_calls +
           now.driver_unmap_calls + now.driver_sync_calls;
  }
};

// Sizes spread evenly over the orders of magnitude from `least` to `most`.
class Sizes {
 public:
  Sizes(uint64_t least, uint64_t most)
      : exponent_(std::log2(static_cast<double>(least)), std::log2(static_cast<double>(most))) {}

  uint64_t next() { return static_cast<uint64_t>(std::exp2(exponent_(random_))); }
  uint32_t slot(size_t count) { return static_cast<uint32_t>(random_() % count); }

 private:
  std::mt19937_64 random_{20240607};
  std::uniform_real_distribution<double> exponent_;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <class Body>
double nanoseconds(int steps, Body body) {
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < steps; ++i) body(i);
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / steps;
}

// The yardstick: what any allocator with one lock pays for an allocation and a free.
double mutex_pairs(pthread_mutex_t *mutex, int steps) {
  return nanoseconds(steps, [&](int) {
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
  });
}

struct Timing {
  double ns = 0;     // medians over the rounds
  double ratio = 0;  // to the yardstick, taken next to it
  double calls = 0;  // driver calls a thousand steps
};

struct Case {
  std::string name;
  double bound;  // on the ratio; 0: shown only
  bool cached;   // calls the driver never
  std::function<Timing()> measure;
};

// Times a step on this thread, in batches of so many.
template <class Body>
Timing time_steps(const Bench &bench, Body body, int steps = kSteps) {
  const int rounds = kRounds * kSteps / steps;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  nanoseconds(kSteps, body);  // warms up: the pool now has what the steps need
  std::vector<double> times, ratios;
  uint64_t calls = 0;
  for (int round = 0; round < rounds; ++round) {
    const double yardstick = mutex_pairs(&mutex, steps);
    const uint64_t before = bench.driver_calls();
    times.push_back(nanoseconds(steps, body));
    calls += bench.driver_calls() - before;
    ratios.push_back(times.back() / yardstick);
  }
  return {median(times), median(ratios), calls * 1000.0 / steps / rounds};
}

// Times pairs on two threads at once, each with its own stream, or both with the same one. A round
// takes as long as the slower of both, for the yardstick too.
Timing time_two_threads(const Bench &bench, uint64_t size, bool same_stream) {
  struct Round {
    double pairs[2];
    double yardsticks[2];
  };
  std::vector<Round> rounds(kRounds);
  std::string failure[2];
  uint64_t calls = 0;
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, 2);
  CUstream_st *const second = same_stream ? bench.stream : driver::new_stream(bench.cuda);
  const auto work = [&](int which, CUstream_st *stream) {
    driver::use_context(bench.cuda);
    alignas(128) pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    const auto pair = [&](int) {
      void *block = nullptr;
      if (bench.pool.alloc_async(&block, size, stream) != POOL_OK ||
          bench.pool.free_async(block, stream) != POOL_OK) {
        failure[which] = bench.pool.error();
      }
    };
    nanoseconds(kSteps, pair);
    pthread_barrier_wait(&barrier);
    if (which == 0) calls = bench.driver_calls();
    for (Round &round : rounds) {
      pthread_barrier_wait(&barrier);
      round.yardsticks[which] = mutex_pairs(&mutex, kSteps);
      pthread_barrier_wait(&barrier);
      round.pairs[which] = nanoseconds(kSteps, pair);
    }
    pthread_barrier_wait(&barrier);
    if (which == 0) calls = bench.driver_calls() - calls;
  };
  std::thread other(work, 1, second);
  work(0, bench.stream);
  other.join();
  pthread_barrier_destroy(&barrier);
  for (const std::string &text : failure) {
    if (!text.empty()) throw std::runtime_error(text);
  }
  std::vector<double> times, ratios;
  for (const Round &round : rounds) {
    times.push_back(std::max(round.pairs[0], round.pairs[1]));
    ratios.push_back(times.back() / std::max(round.yardsticks[0], round.yardsticks[1]));
  }
  return {median(times), median(ratios), calls * 500.0 / kSteps / kRounds};
}

// A set of live blocks of which a step frees one and allocates another in its place.
class Crowd {
 public:
  Crowd(const Bench &bench, size_t count, uint64_t least, uint64_t most)
      : bench_(bench), blocks_(count) {
    Sizes sizes(least, most);
    for (size_t i = 0; i < std::max<size_t>(count, 1 << 16); ++i) {
      plan_.push_back({sizes.next(), sizes.slot(count)});
    }
    const uint64_t calls = bench.driver_calls();
    fill_ns_ = nanoseconds(static_cast<int>(count), [&](int i) {
      blocks_[static_cast<size_t>(i)] = bench.alloc(plan_[static_cast<size_t>(i)].size);
    });
    fill_calls_ = static_cast<double>(bench.driver_calls() - calls) / static_cast<double>(count);
  }
  ~Crowd() {
    for (void *block : blocks_) bench_.pool.free_async(block, bench_.stream);
  }
  Crowd(const Crowd &) = delete;
  Crowd &operator=(const Crowd &) = delete;

  void replace_one() {
    const Step &step = next();
    bench_.free(blocks_[step.slot]);
    blocks_[step.slot] = bench_.alloc(step.size);
  }
  void pair() { bench_.free(bench_.alloc(next().size)); }

  // What the first allocations took, for each.
  double fill_ns() const { return fill_ns_; }
  double fill_calls() const { return fill_calls_; }

 private:
  struct Step {
    uint64_t size;
    uint32_t slot;
  };
  const Step &next() { return plan_[at_++ % plan_.size()]; }

  const Bench &bench_;
  std::vector<void *> blocks_;
  std::vector<Step> plan_;
  size_t at_ = 0;
  double fill_ns_ = 0;
  double fill_calls_ = 0;
};

std::vector<Case> all_cases(const Bench &bench) {
  std::vector<Case> cases;
  for (const uint64_t size : {512ULL, 4ULL << 10, 1ULL << 20, 64ULL << 20}) {
    cases.push_back({"pair of " + table::bytes(static_cast<double>(size)), kPairBound, true,
                     [&bench, size] {
                       return time_steps(bench, [&](int) { bench.free(bench.alloc(size)); });
                     }});
  }
  cases.push_back({"pair of 4 KiB, in bursts of 100", 0, true, [&bench] {
                     std::vector<void *> burst(100);
                     const Timing half = time_steps(bench, [&](int i) {
                       void *&block = burst[static_cast<size_t>(i % 100)];
                       if (i % 200 < 100) block = bench.alloc(4096);
                       else bench.free(block);
                     });
                     return Timing{half.ns * 2, half.ratio * 2, half.calls * 2};
                   }});
  const uint64_t most = 64ULL << 20;
  cases.push_back({"pair of mixed size beside 1000 live", kMixBound, true, [&bench, most] {
                     Crowd crowd(bench, 1000, 512, most);
                     return time_steps(bench, [&](int) { crowd.pair(); });
                   }});
  // No bound: a block of another size than the one freed need not be cached, so this is no cached pair.
  cases.push_back({"one of 1000 live replaced", 0, false, [&bench, most] {
                     Crowd crowd(bench, 1000, 512, most);
                     // The free space takes its final shape first.
                     for (int i = 0; i < 200000; ++i) crowd.replace_one();
                     return time_steps(bench, [&](int) { crowd.replace_one(); }, kShortSteps);
                   }});
  cases.push_back({"device-ordered pair of 4 KiB", 0, false, [&bench] {
                     return time_steps(bench, [&](int) {
                       void *block = nullptr;
                       if (bench.pool.alloc(&block, 4096) != POOL_OK ||
                           bench.pool.free(block) != POOL_OK) {
                         throw std::runtime_error(bench.pool.error());
                       }
                     });
                   }});
  // No bound with two threads: how often they meet at the arena's one lock is the machine's doing.
  cases.push_back({"pair of 4 KiB, two threads", 0, true,
                   [&bench] { return time_two_threads(bench, 4 << 10, false); }});
  cases.push_back({"pair of 4 KiB, two threads on one stream", 0, true,
                   [&bench] { return time_two_threads(bench, 4 << 10, true); }});
  // Once there are several streams, the free of a large block records an event.
  cases.push_back({"pair of 1 MiB, two threads", 0, false,
                   [&bench] { return time_two_threads(bench, 1 << 20, false); }});
  return cases;
}

bool good(const Case &one, const Timing &timing, bool gate) {
  const bool fast = one.bound == 0 || timing.ratio <= one.bound;
  return (fast || !gate) && (!one.cached || timing.calls == 0);
}

int check_pairs(const Bench &bench, bool gate) {
  printf("%-40s %8s %16s %7s %20s\n", "a step is an allocation and a free", "ns",
         "two mutex pairs", "bound", "driver calls / 1000");
  int status = 0;
  for (const Case &one : all_cases(bench)) {
    Timing timing = one.measure();
    for (int i = 1; i < kAttempts && !good(one, timing, gate); ++i) timing = one.measure();
    const bool passed = good(one, timing, gate);
    printf("%-40s %8.1f %14.2f x %7s %20.2f%s\n", one.name.c_str(), timing.ns, timing.ratio,
           one.bound == 0 ? "-" : table::number(one.bound, 1).c_str(), timing.calls,
           passed ? "" : "  FAILED");
    fflush(stdout);
    if (!passed) status = 1;
  }
  return status;
}

void print_growth(const std::string &label, const Bench &bench, size_t count, uint64_t least,
                  uint64_t most) {
  Crowd crowd(bench, count, least, most);
  // Let the replacing settle first.
  for (int i = 0; i < 100000; ++i) crowd.replace_one();
  const Timing timing = time_steps(bench, [&](int) { crowd.replace_one(); });
  printf("%-36s %14.1f %14.2f %12.1f %10.2f x %12.2f\n", label.c_str(),
         crowd.fill_ns(), crowd.fill_calls() * 1000, timing.ns, timing.ratio, timing.calls);
  fflush(stdout);
}

Bench open_bench() {
  Bench bench{driver::open_cuda(), driver::open_pool(), nullptr};
  bench.stream = driver::new_stream(bench.cuda);
  return bench;
}

// Live blocks that fill three quarters of the device, whatever its size.
int print_device_row(uint64_t memory) {
  const Bench bench = open_bench();
  const std::string label = "1,000 live, " + table::bytes(static_cast<double>(memory)) + " device";
  print_growth(label, bench, 1000, memory / 2000, memory / 1000);
  return 0;
}

int print_growths(const Bench &bench) {
  printf("%-36s %14s %14s %12s %12s %12s\n", "", "first alloc ns", "its calls/1000", "replace ns",
         "mutex pairs", "calls/1000");
  for (const size_t count : {100u, 1000u, 10000u, 100000u, 1000000u}) {
    const std::string label = table::count(static_cast<double>(count)) + " live of 512 B to ";
    print_growth(label + "16 KiB", bench, count, 512, 16 << 10);
  }
  for (const size_t count : {100u, 1000u, 10000u, 100000u}) {
    const std::string label = table::count(static_cast<double>(count)) + " live of 512 B to ";
    print_growth(label + "4 MiB", bench, count, 512, 4 << 20);
  }
  if (!bench.cuda.simulated()) return 0;
  for (const uint64_t memory : {1ULL << 30, 32ULL << 30, 1ULL << 40}) {
    const std::string bytes = std::to_string(memory);
    setenv("CUDASIM_MEMORY", bytes.c_str(), 1);
    std::string row;
    trace::output_of({"/proc/self/exe", "--device", bytes}, &row);
    fputs(row.c_str(), stdout);
  }
  return 0;
}

// glibc drops the atomic operations of its mutexes while a process has a single thread, which no
// process with a GPU has: the driver starts its own.
void become_multithreaded() {
  std::thread([] { pause(); }).detach();
}

}  // namespace

int main(int argc, char **argv) {
  try {
    const bool growth = argc == 2 && strcmp(argv[1], "--growth") == 0;
    const bool gate = argc == 2 && strcmp(argv[1], "--gate") == 0;
    const bool device = argc == 3 && strcmp(argv[1], "--device") == 0;
    if (argc != 1 && !growth && !gate && !device) {
      fprintf(stderr, "usage: %s [--gate | --growth]\n", argv[0]);
      return 2;
    }
    const std::string memory = std::to_string((growth ? 1024ULL : 141ULL) << 30);
    if (!device) setenv("CUDASIM_MEMORY", memory.c_str(), 1);
    driver::choose(argv);
    become_multithreaded();
    if (device) return print_device_row(strtoull(argv[2], nullptr, 10));
    const Bench bench = open_bench();
    return growth ? print_growths(bench) : check_pairs(bench, gate);
  } catch (const std::exception &error) {
    fprintf(stderr, "pairs: %s\n", error.what());
    return 1;
  }
}
