// Replays one trace through one allocator and prints what it took, a line each (name, tab, value): the pool,
// plain cuMemAlloc and cuMemFree, or cuMemAllocAsync with a release threshold that keeps everything.
//
//   replay_direct pool|plain|async TRACE
//
// Exit code 77 where the driver lacks what is asked for, or the device the memory.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <string>

#include "replay.hpp"
#include "table.hpp"

namespace {

const int kSkipped = 77;

struct AsyncAllocator {
  const cuda_driver &calls;

  bool alloc(void **out, uint64_t size, CUstream_st *stream) {
    CUdeviceptr pointer = 0;
    if (size > 0 && calls.MemAllocAsync(&pointer, size, stream) != 0) return false;
    *out = reinterpret_cast<void *>(pointer);
    return true;
  }
  void free(void *block, CUstream_st *stream) {
    if (block == nullptr) return;
    driver::check(calls.MemFreeAsync(reinterpret_cast<CUdeviceptr>(block), stream), "cuMemFreeAsync");
  }
  std::string error() const { return "cuMemAllocAsync found no memory"; }
};

int replay_async(const Cuda &cuda, const trace::Trace &trace, replay::Result *result) {
  cuda_driver calls;
  CUmemoryPool pool = nullptr;
  cuda_driver_open(&calls, driver::open_driver());
  cuuint64_t everything = UINT64_MAX, reserved = 0;
  if (calls.MemAllocAsync == nullptr || calls.DeviceGetDefaultMemPool == nullptr ||
      calls.DeviceGetDefaultMemPool(&pool, 0) != 0) {
    printf("skipped: the driver has no memory pools\n");
    return kSkipped;
  }
  driver::check(calls.MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &everything),
                "cuMemPoolSetAttribute");
  AsyncAllocator allocator{calls};
  const auto settle = [&](const replay::Held &) {
    driver::check(calls.MemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &reserved),
                  "cuMemPoolGetAttribute");
    result->numbers["reserved_peak"] = static_cast<double>(reserved);
  };
  replay::play_through(trace, cuda, allocator, [](const replay::Held &) {}, settle, result);
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  const std::string kind = argc == 3 ? argv[1] : "";
  if (kind != "pool" && kind != "plain" && kind != "async") {
    fprintf(stderr, "usage: %s pool|plain|async TRACE\n", argv[0]);
    return 2;
  }
  try {
    const trace::Trace trace = trace::load(argv[2]);
    const Cuda cuda = driver::open_cuda();
    size_t free = 0, total = 0;
    driver::check(cuda.memory_info(&free, &total), "cuMemGetInfo");
    if (static_cast<double>(trace.live_peak) * 1.2 > static_cast<double>(free)) {
      printf("skipped: the trace holds up to %s, and %s are free\n",
             table::bytes(static_cast<double>(trace.live_peak)).c_str(),
             table::bytes(static_cast<double>(free)).c_str());
      return kSkipped;
    }
    replay::Result result;
    if (kind == "async") {
      const int code = replay_async(cuda, trace, &result);
      if (code != 0) return code;
    } else {
      replay::replay(argv[2], kind == "pool", 0, &result);
    }
    if (!result.finished()) throw std::runtime_error(result.failure);
    printf("reserved / live\t%.3f\n", result["reserved_peak"] / static_cast<double>(trace.live_peak));
    printf("ns / event\t%.0f\n", result["seconds"] / result["events"] * 1e9);
    printf("events\t%.0f\n", result["events"]);
    return 0;
  } catch (const std::exception &error) {
    printf("FAILED: %s\n", error.what());
    return 1;
  }
}
