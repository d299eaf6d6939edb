// Two pools and a foreign allocator on one device: each trace is replayed in a pool of its own beside
// another trace in a second one, while somebody else takes and returns memory with cuMemAlloc and
// cuMemFree at random and calls pool_reclaim where the device has none. The device is 5 % larger
// than the most that the three ever hold at the same time, which is less than the sum of their
// peaks. Fails where any request does, or a counter is wrong. Needs the simulated driver.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "driver.hpp"
#include "table.hpp"
#include "trace.hpp"

namespace {

const double kHeadroom = 1.05;
// What the foreign allocator holds at most, as a part of the traces' live peaks.
const uint64_t kForeignPart = 8;
// How many times it takes or returns something during a replay.
const size_t kForeignActs = 2000;
const uint64_t kPage = 2 << 20;

// One trace on its way through one pool.
class Program {
 public:
  Program(const trace::Trace &trace, const Cuda &cuda, const Pool &pool, pool_t *own)
      : trace_(trace), pool_(pool), own_(own), blocks_(trace.slots) {
    for (uint32_t i = 0; i < trace.streams; ++i) streams_.push_back(driver::new_stream(cuda));
  }

  size_t left() const { return trace_.events.size() - at_; }

  void step() {
    const trace::Event &event = trace_.events[at_++];
    CUstream_st *stream = streams_[event.stream];
    void *&block = blocks_[event.block];
    if (event.is_free) {
      must(pool_.free_async(block, stream));
      block = nullptr;
      return;
    }
    pool_request request{};
    request.struct_size = sizeof request;
    request.pool = own_;
    request.size = event.size;
    request.device = 0;
    request.flags = POOL_REQUEST_STREAM_ORDERED;
    request.stream = stream;
    must(pool_.alloc_with(&block, &request));
  }

  void drain() {
    for (void *block : blocks_) must(pool_.free(block));
  }

  pool_stats stats() const {
    pool_stats stats{};
    stats.struct_size = sizeof stats;
    must(pool_.get_stats(own_, 0, &stats));
    if (stats.reserved_bytes != stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                                    stats.overhead_bytes) {
      throw std::runtime_error("the counters of a pool do not add up");
    }
    return stats;
  }

 private:
  void must(int status) const {
    if (status != POOL_OK) throw std::runtime_error(trace_.name + ": " + pool_.error());
  }

  const trace::Trace &trace_;
  const Pool &pool_;
  pool_t *own_;
  std::vector<CUstream_st *> streams_;
  std::vector<void *> blocks_;
  size_t at_ = 0;
};

// Takes and returns memory of the device at random; without a driver it only reckons.
class Foreign {
 public:
  Foreign(const Cuda *cuda, const Pool *pool, uint64_t most) : cuda_(cuda), pool_(pool), most_(most) {}

  void act(std::mt19937_64 &random) {
    const uint64_t size = std::max(kPage, random() % (most_ / 2) / kPage * kPage);
    if (!held_.empty() && (held_bytes_ + size > most_ || random() % 3 == 0)) {
      const size_t which = random() % held_.size();
      if (cuda_ != nullptr) driver::check(cuda_->free(held_[which].pointer), "cuMemFree");
      held_bytes_ -= held_[which].size;
      held_[which] = held_.back();
      held_.pop_back();
    } else if (held_bytes_ + size <= most_) {
      Held held{0, size};
      if (cuda_ != nullptr) take(&held);
      held_.push_back(held);
      held_bytes_ += size;
    }
  }

  uint64_t held_bytes() const { return held_bytes_; }

  uint64_t asked = 0;
  uint64_t rescued = 0;

 private:
  struct Held {
    CUdeviceptr pointer;
    uint64_t size;
  };

  void take(Held *held) {
    ++asked;
    if (cuda_->alloc(&held->pointer, held->size) == 0) return;
    ++rescued;
    size_t released = 0;
    if (pool_->reclaim(0, held->size, &released) != POOL_OK) throw std::runtime_error(pool_->error());
    driver::check(cuda_->alloc(&held->pointer, held->size), "cuMemAlloc after pool_reclaim");
  }

  const Cuda *cuda_;
  const Pool *pool_;
  const uint64_t most_;
  std::vector<Held> held_;
  uint64_t held_bytes_ = 0;
};

// Goes through two traces so that both come to their end together: `step(true)` for an event of the
// first, and `act` every now and then.
template <class Step, class Act>
void interleave(const trace::Trace &one, const trace::Trace &two, Step step, Act act) {
  std::mt19937_64 random(20240607);
  size_t left[] = {one.events.size(), two.events.size()};
  const size_t events = left[0] + left[1];
  const size_t stride = std::max<size_t>(1, events / kForeignActs);
  for (size_t done = 0; done < events; ++done) {
    const bool first = random() % (left[0] + left[1]) < left[0];
    --left[first ? 0 : 1];
    step(first);
    if (done % stride == 0) act(random);
  }
}

uint64_t foreign_most(const trace::Trace &one, const trace::Trace &two) {
  return std::max((one.live_peak + two.live_peak) / kForeignPart, 4 * kPage) / kPage * kPage;
}

// The most bytes that both traces and the foreign allocator hold at the same time.
uint64_t joint_peak(const trace::Trace &one, const trace::Trace &two) {
  Foreign foreign(nullptr, nullptr, foreign_most(one, two));
  size_t at[] = {0, 0};
  uint64_t live = 0, peak = 0;
  interleave(
      one, two,
      [&](bool first) {
        const trace::Event &event = (first ? one : two).events[at[first ? 0 : 1]++];
        live = event.is_free ? live - event.size : live + event.size;
        peak = std::max(peak, live + foreign.held_bytes());
      },
      [&](std::mt19937_64 &random) {
        foreign.act(random);
        peak = std::max(peak, live + foreign.held_bytes());
      });
  return peak;
}

// Replays two traces in this process, whose device is as large as the parent has said.
int replay(const std::string &first, const std::string &second) {
  const trace::Trace one = trace::load(first), two = trace::load(second);
  const Cuda cuda = driver::open_cuda();
  const Pool pool = driver::open_pool();
  pool_t *own = nullptr;
  if (pool.create(nullptr, &own) != POOL_OK) throw std::runtime_error(pool.error());
  Program a(one, cuda, pool, nullptr), b(two, cuda, pool, own);
  Foreign foreign(&cuda, &pool, foreign_most(one, two));
  interleave(
      one, two, [&](bool of_first) { (of_first ? a : b).step(); },
      [&](std::mt19937_64 &random) {
        foreign.act(random);
        const uint64_t held = a.stats().reserved_bytes + b.stats().reserved_bytes;
        if (held + foreign.held_bytes() != cuda.used_bytes(0)) {
          throw std::runtime_error("pools and foreign allocations are not what the driver gave");
        }
      });
  const uint64_t recovered = a.stats().oom_recovered_count + b.stats().oom_recovered_count;
  printf("%llu %llu %llu %llu\n", static_cast<unsigned long long>(cuda.peak_bytes(0)),
         static_cast<unsigned long long>(foreign.asked),
         static_cast<unsigned long long>(foreign.rescued),
         static_cast<unsigned long long>(recovered));
  a.drain();
  b.drain();
  driver::check(cuda.synchronize(), "cuCtxSynchronize");
  if (pool.destroy(own) != POOL_OK) throw std::runtime_error(pool.error());
  return 0;
}

bool measure(const std::string &first, const std::string &second, double headroom) {
  const trace::Trace one = trace::load(first), two = trace::load(second);
  const double together = static_cast<double>(joint_peak(one, two));
  const std::string memory = std::to_string(static_cast<uint64_t>(together * headroom));
  setenv("CUDASIM_MEMORY", memory.c_str(), 1);
  std::string text;
  printf("%-30s %-30s %9s ", one.name.c_str(), two.name.c_str(), table::bytes(together).c_str());
  fflush(stdout);
  try {
    trace::output_of({"/proc/self/exe", "--replay", first, second}, &text);
  } catch (const std::exception &) {
    printf("FAILED\n");
    return false;
  }
  double peak = 0, asked = 0, rescued = 0, recovered = 0;
  if (sscanf(text.c_str(), "%lf %lf %lf %lf", &peak, &asked, &rescued, &recovered) != 4) {
    printf("FAILED: no answer\n");
    return false;
  }
  printf("%6s %8s %8s %9s\n", table::number(peak / together, 3).c_str(),
         table::number(asked, 0).c_str(), table::number(rescued, 0).c_str(),
         table::number(recovered, 0).c_str());
  fflush(stdout);
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    setenv("CUDAPOOL_SIM", "1", 0);  // only the simulated device can be made that small
    driver::choose(argv);
    if (argc == 4 && strcmp(argv[1], "--replay") == 0) return replay(argv[2], argv[3]);
    double headroom = kHeadroom;
    const std::vector<std::string> paths = trace::arguments(argc, argv, &headroom);
    if (paths.empty()) return 2;
    printf("%-30s %-30s %9s %6s %17s %9s\n", "", "", "peak", "", "foreign", "OOM");
    printf("%-30s %-30s %9s %6s %8s %8s %9s\n", "trace in the default pool", "trace in another pool",
           "together", "ratio", "allocs", "rescued", "recovered");
    bool good = true;
    for (size_t i = 0; i < paths.size(); ++i) {
      good &= measure(paths[i], paths[(i + 1) % paths.size()], headroom);
    }
    printf(good ? "all served on a device of %.2f times the peak\n"
                : "FAILED on a device of %.2f times the peak\n",
           headroom);
    return good ? 0 : 1;
  } catch (const std::exception &error) {
    fprintf(stderr, "shared: %s\n", error.what());
    return 1;
  }
}
