// Replays a trace through cudapool or through plain cuMemAlloc/cuMemFree, checks the allocator
// while doing so, and measures what it costs. Each replay has a process of its own, because the
// simulated device reads its size and its latencies from the environment at its start.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "driver.hpp"
#include "trace.hpp"

namespace replay {

// What to replay, and on which device.
struct Setup {
  std::string trace;
  bool pooled = true;     // cudapool, or else plain cuMemAlloc/cuMemFree
  uint64_t memory = 0;    // bytes of the device; 0: more than any trace needs
  std::string latencies;  // CUDASIM_LATENCY
};

// What came of it. The numbers travel as text from the replaying process to the one that asked.
struct Result {
  std::map<std::string, double> numbers;
  std::string failure;  // empty: the trace went through, and all checks with it

  bool finished() const { return failure.empty(); }
  double operator[](const std::string &name) const {
    const auto found = numbers.find(name);
    return found == numbers.end() ? 0 : found->second;
  }
};

// Memory by cuMemAlloc and cuMemFree, as a program without a pool takes it.
struct PlainAllocator {
  const Cuda &cuda;

  bool alloc(void **out, uint64_t size, CUstream_st *) {
    CUdeviceptr pointer = 0;
    if (size > 0 && cuda.alloc(&pointer, size) != 0) return false;
    *out = reinterpret_cast<void *>(pointer);
    return true;
  }
  void free(void *block, CUstream_st *) {
    driver::check(cuda.free(reinterpret_cast<CUdeviceptr>(block)), "cuMemFree");
  }
  std::string error() const { return "cuMemAlloc found no memory"; }
};

// Memory by the stream-ordered calls of cudapool.
struct PoolAllocator {
  const Pool &pool;

  bool alloc(void **out, uint64_t size, CUstream_st *stream) {
    return pool.alloc_async(out, size, stream) == POOL_OK;
  }
  void free(void *block, CUstream_st *stream) {
    if (pool.free_async(block, stream) != POOL_OK) throw std::runtime_error(pool.error());
  }
  std::string error() const { return pool.error(); }
};

// What the replay holds and has done, by its own count.
struct Held {
  uint64_t bytes = 0;
  uint64_t blocks = 0;
  uint64_t allocs = 0;
  uint64_t frees = 0;
};

// Plays the events of a trace in order, all from one thread.
template <class Allocator>
class Player {
 public:
  Player(const trace::Trace &trace, std::vector<CUstream_st *> streams, Allocator &allocator)
      : trace_(trace),
        streams_(std::move(streams)),
        allocator_(allocator),
        blocks_(trace.slots),
        holders_(trace.slots) {
    addresses_.reserve(trace.blocks);
  }

  // Plays until the end or until the allocator has no memory (false). `between` runs untimed, after
  // every few events.
  template <class Between>
  bool play(Between between) {
    using Clock = std::chrono::steady_clock;
    const size_t stride = 61;  // a prime does not march in step with a trace's own period
    bool full = false;
    while (at_ < trace_.events.size() && !full) {
      const size_t begin = at_;
      const size_t end = std::min(begin + stride, trace_.events.size());
      const Clock::time_point start = Clock::now();
      for (; at_ < end; ++at_) {
        const trace::Event &event = trace_.events[at_];
        void *&block = blocks_[event.block];
        if (event.is_free) {
          allocator_.free(block, streams_[event.stream]);
        } else if (allocator_.alloc(&block, event.size, streams_[event.stream])) {
          addresses_.push_back(reinterpret_cast<uint64_t>(block));
        } else {
          full = true;
          break;
        }
      }
      seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
      for (size_t i = begin; i < at_; ++i) count(trace_.events[i]);
      between();
    }
    return !full;
  }

  // Throws unless all blocks that were live at once lay apart from each other, and aligned.
  void check_placement() const {
    std::map<uint64_t, uint64_t> live;  // start to end
    std::vector<uint64_t> starts(trace_.slots);
    size_t next = 0;
    for (size_t i = 0; i < at_; ++i) {
      const trace::Event &event = trace_.events[i];
      if (event.is_free) {
        live.erase(starts[event.block]);
        continue;
      }
      const uint64_t start = addresses_[next++];
      starts[event.block] = start;
      if (event.size == 0) continue;
      if (start % POOL_DEFAULT_ALIGNMENT != 0) throw std::runtime_error("a block is not aligned");
      const auto after = live.lower_bound(start);
      const bool clash = (after != live.end() && after->first < start + event.size) ||
                         (after != live.begin() && std::prev(after)->second > start);
      if (clash) throw std::runtime_error("two live blocks overlap");
      live.emplace_hint(after, start, start + event.size);
    }
  }

  // Frees what the trace leaves live.
  void drain() {
    for (uint32_t slot = 0; slot < trace_.slots; ++slot) {
      const trace::Event *holder = holders_[slot];
      if (holder == nullptr) continue;
      allocator_.free(blocks_[slot], streams_[holder->stream]);
      count({holder->size, slot, holder->stream, true});
    }
  }

  const Held &held() const { return held_; }
  size_t events() const { return at_; }
  double seconds() const { return seconds_; }

 private:
  void count(const trace::Event &event) {
    holders_[event.block] = event.is_free ? nullptr : &event;
    if (event.size == 0) return;
    if (event.is_free) {
      held_.bytes -= event.size;
      --held_.blocks;
      ++held_.frees;
    } else {
      held_.bytes += event.size;
      ++held_.blocks;
      ++held_.allocs;
    }
  }

  const trace::Trace &trace_;
  const std::vector<CUstream_st *> streams_;
  Allocator &allocator_;
  std::vector<void *> blocks_;                // by slot
  std::vector<const trace::Event *> holders_; // by slot: the allocation that is live in it
  std::vector<uint64_t> addresses_;           // of all allocations, in order
  Held held_;
  size_t at_ = 0;
  double seconds_ = 0;
};

// Compares the pool's counters with the replay's, with each other, and with the driver's.
inline void check_counters(const Cuda &cuda, const pool_stats &now, const Held &held) {
  const auto same = [](const char *what, uint64_t is, uint64_t should) {
    if (is == should) return;
    throw std::runtime_error(std::string("wrong counter: ") + what + " is " + std::to_string(is) +
                             ", should be " + std::to_string(should));
  };
  same("live + cached + pending + overhead",
       now.live_bytes + now.cached_bytes + now.pending_bytes + now.overhead_bytes,
       now.reserved_bytes);
  same("requested_bytes", now.requested_bytes, held.bytes);
  same("live_blocks", now.live_blocks, held.blocks);
  same("alloc_count", now.alloc_count, held.allocs);
  same("free_count", now.free_count, held.frees);
  if (cuda.simulated()) same("reserved_bytes", now.reserved_bytes, cuda.used_bytes(0));
}

// Compares the pool's peak with the driver's. Where the driver has refused something, it may have
// given more for a moment: a growth that fails half way is undone.
inline void check_peak(const Cuda &cuda, uint64_t reserved_peak) {
  size_t free = 0, total = 0;
  driver::check(cuda.memory_info(&free, &total), "cuMemGetInfo");
  const uint64_t given = cuda.peak_bytes(0);
  const bool plenty = given < total / 2;
  if (plenty ? reserved_peak != given : reserved_peak > given) {
    throw std::runtime_error("reserved_bytes_peak is " + std::to_string(reserved_peak) +
                             ", the driver counted " + std::to_string(given));
  }
}

// Shows how far a replay is, where someone is looking.
class Progress {
 public:
  Progress(const std::string &name, size_t events) : name_(name), events_(events) {}
  ~Progress() {
    if (shown_) fprintf(stderr, "\r\033[K");
  }
  Progress(const Progress &) = delete;
  Progress &operator=(const Progress &) = delete;

  void at(size_t event) {
    const auto now = std::chrono::steady_clock::now();
    if (!seen_ || now - last_ < std::chrono::milliseconds(200)) return;
    last_ = now;
    shown_ = true;
    fprintf(stderr, "\r\033[K%s: %zu %%", name_.c_str(), event * 100 / events_);
  }

 private:
  std::string name_;
  size_t events_;
  bool seen_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// The most memory that the device has given, by the driver's own count. The simulated driver keeps
// the peak; of a real one it is sampled, and other programs on the device count too.
class DevicePeak {
 public:
  explicit DevicePeak(const Cuda &cuda) : cuda_(cuda), before_(free_bytes()), least_(before_) {}

  void sample() {
    if (cuda_.peak_bytes == nullptr) least_ = std::min(least_, free_bytes());
  }
  uint64_t bytes() const {
    return cuda_.peak_bytes != nullptr ? cuda_.peak_bytes(0) : before_ - least_;
  }

 private:
  size_t free_bytes() const {
    size_t free = 0, total = 0;
    driver::check(cuda_.memory_info(&free, &total), "cuMemGetInfo");
    return free;
  }

  const Cuda &cuda_;
  size_t before_;
  size_t least_;
};

// The part of a replay that is the same for both allocators: play, check, drain. `inspect` runs
// after every few events; `settle` when the trace is over, before what it left live is freed.
template <class Allocator, class Inspect, class Settle>
void play_through(const trace::Trace &trace, const Cuda &cuda, Allocator &allocator,
                  Inspect inspect, Settle settle, Result *result) {
  std::vector<CUstream_st *> streams;
  for (uint32_t i = 0; i < trace.streams; ++i) streams.push_back(driver::new_stream(cuda));
  Player<Allocator> player(trace, streams, allocator);
  DevicePeak peak(cuda);
  {
    Progress progress(trace.name, trace.events.size());
    if (cuda.reset_counts != nullptr) cuda.reset_counts();
    const bool whole = player.play([&] {
      peak.sample();
      inspect(player.held());
      progress.at(player.events());
    });
    if (!whole) result->failure = allocator.error();
  }
  std::map<std::string, double> &numbers = result->numbers;
  if (cuda.call_count != nullptr) numbers["calls"] = static_cast<double>(cuda.call_count("*"));
  numbers["events"] = static_cast<double>(player.events());
  numbers["seconds"] = player.seconds();
  numbers["device_peak"] = static_cast<double>(peak.bytes());
  settle(player.held());
  player.check_placement();
  player.drain();
  inspect(player.held());
}

// Replays a trace in this process.
inline void replay(const std::string &path, bool pooled, uint64_t limit, Result *result) {
  const trace::Trace trace = trace::load(path);
  const Cuda cuda = driver::open_cuda();
  std::map<std::string, double> &numbers = result->numbers;
  if (!pooled) {
    PlainAllocator plain{cuda};
    const auto settle = [&](const Held &held) {
      numbers["create"] = static_cast<double>(held.allocs);
      numbers["release"] = static_cast<double>(held.frees);
      numbers["reserved_peak"] = numbers["device_peak"];
    };
    play_through(trace, cuda, plain, [](const Held &) {}, settle, result);
    return;
  }

  const Pool pool = driver::open_pool();
  if (limit > 0) {
    pool_options options{};
    options.struct_size = sizeof options;
    if (pool.options_init(&options) != POOL_OK) throw std::runtime_error(pool.error());
    options.limit_bytes = limit;
    if (pool.configure(&options) != POOL_OK) throw std::runtime_error(pool.error());
  }
  PoolAllocator pooling{pool};
  const auto inspect = [&](const Held &held) { check_counters(cuda, pool.stats(), held); };
  const auto settle = [&](const Held &) {
    const pool_stats stats = pool.stats();
    numbers["reserved_peak"] = static_cast<double>(stats.reserved_bytes_peak);
    numbers["create"] = static_cast<double>(stats.driver_alloc_calls);
    numbers["release"] = static_cast<double>(stats.driver_free_calls);
    numbers["map"] = static_cast<double>(stats.driver_map_calls);
    numbers["unmap"] = static_cast<double>(stats.driver_unmap_calls);
    numbers["sync"] = static_cast<double>(stats.driver_sync_calls);
    numbers["recovered"] = static_cast<double>(stats.oom_recovered_count);
    if (cuda.peak_bytes != nullptr) check_peak(cuda, stats.reserved_bytes_peak);
  };
  play_through(trace, cuda, pooling, inspect, settle, result);
  size_t released = 0;
  driver::check(cuda.synchronize(), "cuCtxSynchronize");
  if (pool.trim(nullptr, 0, 0, &released) != POOL_OK) throw std::runtime_error(pool.error());
  if (pool.stats().reserved_bytes != 0 || (cuda.simulated() && cuda.used_bytes(0) != 0)) {
    throw std::runtime_error("memory is left after everything was freed and trimmed");
  }
}

// The entry of the replaying process: where the arguments are those that `run` passes, replays and
// prints the result to the standard output, for `run` to read.
inline bool is_child(int argc, char **argv) {
  return argc == 5 && strcmp(argv[1], "--replay") == 0;
}

inline int child(char **argv) {
  Result result;
  try {
    replay(argv[2], strcmp(argv[3], "pool") == 0, strtoull(argv[4], nullptr, 10), &result);
  } catch (const std::exception &error) {
    result.failure = error.what();
  }
  for (const auto &entry : result.numbers) {
    printf("%s %.17g\n", entry.first.c_str(), entry.second);
  }
  if (!result.failure.empty()) printf("failure %s\n", result.failure.c_str());
  return 0;
}

// Replays in a process of its own. The device's memory is bounded by the simulated driver itself,
// or, with a real one, by the pool's option `limit` (plain cuMemAlloc cannot be bounded there).
inline Result run(const Setup &setup, bool simulated) {
  const std::string memory = std::to_string(setup.memory != 0 ? setup.memory : 141ULL << 30);
  setenv("CUDASIM_MEMORY", memory.c_str(), 1);
  setenv("CUDASIM_LATENCY", setup.latencies.c_str(), 1);
  const std::string limit = std::to_string(simulated ? 0 : setup.memory);
  const char *kind = setup.pooled ? "pool" : "plain";
  Result result;
  std::string text;
  try {
    trace::output_of({"/proc/self/exe", "--replay", setup.trace, kind, limit}, &text);
  } catch (const std::exception &error) {
    result.failure = error.what();
  }
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string value = space == std::string::npos ? "" : line.substr(space + 1);
    if (name == "failure") result.failure = value;
    else result.numbers[name] = strtod(value.c_str(), nullptr);
  }
  return result;
}

}  // namespace replay
