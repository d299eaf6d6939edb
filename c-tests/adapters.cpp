// adapters.cpp: the functions for PyTorch, CuPy and ONNX Runtime, called through the very types that these
// runtimes keep them in: what they hand out, what they answer where memory, device or driver fail, and that
// frees that cannot report an error change nothing and end nothing.

#include "check.h"
#include "driver.h"
#include "thread.h"

#include <sys/mman.h>

#include <cinttypes>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace {

// torch/csrc/cuda/CUDAPluggableAllocator.h; the library's functions get there as integers, through ctypes.
namespace torch {
using Malloc = std::function<void *(size_t, int, CUstream_st *)>;
using Free = std::function<void(void *, size_t, int, CUstream_st *)>;
const Malloc malloc = reinterpret_cast<void *(*)(size_t, int, CUstream_st *)>(
    reinterpret_cast<uintptr_t>(&pool_torch_alloc));
const Free free = reinterpret_cast<void (*)(void *, size_t, int, CUstream_st *)>(
    reinterpret_cast<uintptr_t>(&pool_torch_free));
const std::function<void()> reset =
    reinterpret_cast<void (*)()>(reinterpret_cast<uintptr_t>(&pool_torch_reset));
const std::function<void(double, int)> memory_fraction =
    reinterpret_cast<void (*)(double, int)>(reinterpret_cast<uintptr_t>(&pool_torch_memory_fraction));
const std::function<void(void *, CUstream_st *)> record_stream =
    reinterpret_cast<void (*)(void *, CUstream_st *)>(reinterpret_cast<uintptr_t>(&pool_torch_record_stream));
}  // namespace torch

// cupy/cuda/memory.pyx: the addresses come as integers, and so does `param`.
namespace cupy {
using Malloc = void *(*)(void *, size_t, int);
using Free = void (*)(void *, void *, int);
const Malloc malloc = reinterpret_cast<Malloc>(reinterpret_cast<intptr_t>(&pool_cupy_alloc));
const Free free = reinterpret_cast<Free>(reinterpret_cast<intptr_t>(&pool_cupy_free));
}  // namespace cupy

// onnxruntime/core/providers/cuda/cuda_allocator.h: the addresses come as decimal text.
namespace ort {
using Malloc = void *(*)(size_t);
using Free = void (*)(void *);
using EmptyCache = void (*)();

template <class Function>
Function parse(void *address) {
  const std::string option = std::to_string(reinterpret_cast<uintptr_t>(address));
  return reinterpret_cast<Function>(static_cast<uintptr_t>(std::stoull(option)));
}
const Malloc malloc = parse<Malloc>(reinterpret_cast<void *>(&pool_ort_alloc));
const Free free = parse<Free>(reinterpret_cast<void *>(&pool_ort_free));
const EmptyCache empty_cache = parse<EmptyCache>(reinterpret_cast<void *>(&pool_ort_empty_cache));
}  // namespace ort

// An allocator as its runtime sees it.
struct Runtime {
  const char *owner;
  int order;
  std::function<void *(size_t size, int device)> alloc;
  std::function<void(void *block)> free;
  std::function<void()> empty_cache;
  bool takes_device;
};

CUstream torch_stream;

const std::vector<Runtime> &runtimes() {
  static const std::vector<Runtime> all = {
      {"torch", POOL_ORDER_STREAM,
       [](size_t size, int device) { return torch::malloc(size, device, torch_stream); },
       [](void *block) { torch::free(block, 1, 0, torch_stream); }, torch::reset, true},
      {"cupy", POOL_ORDER_DEVICE,
       [](size_t size, int device) { return cupy::malloc(nullptr, size, device); },
       [](void *block) { cupy::free(nullptr, block, 0); }, torch::reset, true},
      {"onnxruntime", POOL_ORDER_DEVICE, [](size_t size, int) { return ort::malloc(size); }, ort::free,
       ort::empty_cache, false},
  };
  return all;
}

bool is_same(const pool_stats &one, const pool_stats &two) { return memcmp(&one, &two, sizeof one) == 0; }

// ---- what holds for all of them ----

void hands_out_blocks() {
  for (const Runtime &runtime : runtimes()) {
    void *block = runtime.alloc(3 * MIB + 5, 0);
    CHECK(block != nullptr);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block) % POOL_DEFAULT_ALIGNMENT, 0);
    const pool_block_info info = info_of(static_cast<char *>(block) + 77);
    CHECK(info.base == block && info.requested_size == 3 * MIB + 5 && info.device == 0);
    CHECK_EQ(info.order, runtime.order);
    CHECK(strcmp(info.owner, runtime.owner) == 0);
    fill(block, 3 * MIB, 0xABCD, torch_stream);
    CU(StreamSynchronize(torch_stream));
    CHECK(holds(block, 3 * MIB, 0xABCD));
    runtime.free(block);
    CHECK_EQ(stats_of(0).live_blocks, 0);
    runtime.empty_cache();
    CHECK_TRIMS_TO_ZERO(0);
  }
}

void takes_size_0_and_null() {
  for (const Runtime &runtime : runtimes()) {
    const pool_stats before = stats_of(0);
    CHECK(runtime.alloc(0, 0) == nullptr);
    runtime.free(nullptr);
    CHECK(is_same(before, stats_of(0)));
  }
}

void answers_null_for_what_cannot_be() {
  for (const Runtime &runtime : runtimes()) {
    for (size_t size : {SIZE_MAX, SIZE_MAX - 511, SIZE_MAX / 2, static_cast<size_t>(1) << 50}) {
      CHECK(runtime.alloc(size, 0) == nullptr);
      CHECK_EQ(pool_last_status(), POOL_ERROR_OUT_OF_MEMORY);
    }
    if (!runtime.takes_device) continue;
    CHECK(runtime.alloc(100, 64) == nullptr);
    CHECK_EQ(pool_last_status(), POOL_ERROR_NO_DEVICE);
    CHECK(runtime.alloc(100, -2) == nullptr);
    CHECK_EQ(pool_last_status(), POOL_ERROR_INVALID_ARGUMENT);
  }
  CHECK_EQ(stats_of(0).live_blocks, 0);
}

void answers_null_out_of_memory() {
  if (!needs_sim()) return;
  for (const Runtime &runtime : runtimes()) {
    std::vector<void *> blocks;
    sim.set_memory(0, 64 * MIB);
    while (void *block = runtime.alloc(5 * MIB, 0)) {
      fill(block, 5 * MIB, static_cast<unsigned>(blocks.size()), torch_stream);
      blocks.push_back(block);
    }
    CHECK_EQ(pool_last_status(), POOL_ERROR_OUT_OF_MEMORY);
    CHECK(blocks.size() >= 10);
    pool_oom_info info;
    info.struct_size = sizeof info;
    CHECK_STATUS(POOL_OK, pool_get_oom_info(&info));
    CHECK_EQ(info.requested_bytes, 5 * MIB);
    CHECK(strcmp(info.owners[0], runtime.owner) == 0);
    CU(StreamSynchronize(torch_stream));
    for (size_t i = 0; i < blocks.size(); ++i) CHECK(holds(blocks[i], 5 * MIB, static_cast<unsigned>(i)));
    // A block that goes makes room for the next one.
    runtime.free(blocks.back());
    CHECK((blocks.back() = runtime.alloc(5 * MIB, 0)) != nullptr);
    for (void *block : blocks) runtime.free(block);
    sim.set_memory(0, 8 * GIB);
    CHECK_TRIMS_TO_ZERO(0);
  }
}

void answers_null_where_the_driver_fails() {
  if (!needs_sim()) return;
  for (const Runtime &runtime : runtimes()) {
    for (int code : {2, 999}) {
      CHECK_EQ(sim.fail("cuMemCreate", 1, 1, code), 0);
      CHECK_EQ(sim.fail("cuMemAlloc", 1, 1, code), 0);
      CHECK(runtime.alloc(9 * MIB, 0) == nullptr);
      CHECK_EQ(pool_last_status(), code == 2 ? POOL_ERROR_OUT_OF_MEMORY : POOL_ERROR_DRIVER);
      CHECK_EQ(sim.fail("cuMemCreate", 0, 0, 0), 0);
      CHECK_EQ(sim.fail("cuMemAlloc", 0, 0, 0), 0);
    }
    void *block = runtime.alloc(9 * MIB, 0);
    CHECK(block != nullptr);
    runtime.free(block);
    CHECK_TRIMS_TO_ZERO(0);
  }
}

// What `run` writes to stderr, with the log at `error`.
std::string logged(const std::function<void()> &run) {
  pool_options options = default_options();
  options.log = POOL_LOG_ERROR;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  FILE *file = fdopen(memfd_create("log", 0), "w+");  // where there is no /tmp, too
  if (!CHECK(file != nullptr)) return "";
  const int saved = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  run();
  dup2(saved, STDERR_FILENO);
  close(saved);
  options.log = POOL_LOG_OFF;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  std::string text(4096, '\0');
  rewind(file);
  text.resize(fread(&text[0], 1, text.size(), file));
  fclose(file);
  return text;
}

void wrong_frees_change_nothing() {
  static const char *const names[] = {"pool_torch_free: ", "pool_cupy_free: ", "pool_ort_free: "};
  size_t at = 0;
  for (const Runtime &runtime : runtimes()) {
    char *block = static_cast<char *>(runtime.alloc(MIB, 0));
    void *dead = runtime.alloc(MIB, 0);
    int local = 0;
    runtime.free(dead);
    const pool_stats before = stats_of(0);
    for (void *wrong : {static_cast<void *>(&local), static_cast<void *>(block + 512), dead}) {
      const std::string text = logged([&] { runtime.free(wrong); });
      if (!CHECK(text.find(names[at]) != std::string::npos)) fprintf(stderr, "logged: %s\n", text.c_str());
      CHECK(pool_last_status() == POOL_ERROR_INVALID_POINTER || pool_last_status() == POOL_ERROR_DOUBLE_FREE);
    }
    CHECK(is_same(before, stats_of(0)));
    CHECK(logged([&] { runtime.free(block); }).empty());
    CHECK_TRIMS_TO_ZERO(0);
    ++at;
  }
}

void works_on_many_threads() {
  std::vector<Thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      CUcontext context = driver_start(0);
      CHECK(context != nullptr);
      const CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
      uint64_t state = 77 + static_cast<uint64_t>(i);
      std::vector<void *> blocks;
      for (int round = 0; round < 300; ++round) {
        const size_t size = random_size(&state, 2 * MIB);
        void *block = round % 3 == 0   ? torch::malloc(size, 0, stream)
                      : round % 3 == 1 ? cupy::malloc(nullptr, size, 0)
                                       : ort::malloc(size);
        CHECK(block != nullptr);
        blocks.push_back(block);
        if (blocks.size() < 20) continue;
        for (void *old : blocks) {
          if (random_below(&state, 2) == 0) torch::free(old, 0, 0, stream);
          else ort::free(old);
        }
        blocks.clear();
      }
      for (void *old : blocks) cupy::free(nullptr, old, 0);
      CU(StreamSynchronize(stream));
      CU(StreamDestroy(stream));
    });
  }
  for (Thread &thread : threads) thread.join();
  CHECK_TRIMS_TO_ZERO(0);
}

// ---- PyTorch ----

void torch_reuses_on_its_stream() {
  void *block = torch::malloc(8 * MIB, 0, torch_stream);
  busy(torch_stream, 100);
  torch::free(block, 12345, 9, torch_stream);
  void *again = torch::malloc(8 * MIB, 0, torch_stream);
  CHECK(again == block);
  torch::free(again, 8 * MIB, 0, torch_stream);
  CHECK_TRIMS_TO_ZERO(0);
}

void torch_records_streams() {
  if (!needs_sim()) return;
  const CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  for (const bool recorded : {false, true}) {
    void *block = torch::malloc(8 * MIB, 0, torch_stream);
    busy(other, 200);
    if (recorded) torch::record_stream(block, other);
    torch::free(block, 8 * MIB, 0, torch_stream);
    void *next = torch::malloc(8 * MIB, 0, torch_stream);
    // A driver without events of the context can only wait for the other stream before it reuses the block.
    const bool other_is_done = cu.StreamQuery(other) == 0;
    if (recorded) CHECK(next != block || other_is_done);
    else CHECK(next == block && !other_is_done);
    torch::free(next, 8 * MIB, 0, torch_stream);
    CHECK_TRIMS_TO_ZERO(0);
  }
  // Memory that is not the pool's is none of its business.
  int local = 0;
  torch::record_stream(&local, other);
  CHECK_EQ(pool_last_status(), POOL_ERROR_INVALID_POINTER);
  torch::record_stream(nullptr, other);
  CU(StreamDestroy(other));
}

void torch_sets_the_fraction() {
  size_t total = 0;
  CU(DeviceTotalMem(&total, 0));
  // On a device that others use too there may be less than half: then only the refusal can be seen.
  const size_t more_than_a_tenth = total / 8;
  torch::memory_fraction(0.10, 0);
  CHECK(torch::malloc(more_than_a_tenth, 0, torch_stream) == nullptr);
  CHECK_EQ(pool_last_status(), POOL_ERROR_OUT_OF_MEMORY);
  pool_oom_info info;
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_OK, pool_get_oom_info(&info));
  CHECK_EQ(info.limit_bytes, total / 10);
  CHECK_EQ(info.advice, POOL_ADVICE_RAISE_LIMIT);
  for (double wrong : {-0.5, 1.5, std::numeric_limits<double>::quiet_NaN(),
                       std::numeric_limits<double>::infinity()}) {
    torch::memory_fraction(wrong, 0);
    CHECK_EQ(pool_last_status(), POOL_ERROR_INVALID_ARGUMENT);
  }
  CHECK(torch::malloc(more_than_a_tenth, 0, torch_stream) == nullptr);
  torch::memory_fraction(0.001, 0);
  CHECK(torch::malloc(total / 50, 0, torch_stream) == nullptr);
  void *little = torch::malloc(total / 400, 0, torch_stream);
  CHECK(little != nullptr);
  torch::free(little, 0, 0, torch_stream);
  torch::memory_fraction(1.0, 0);
  void *much = torch::malloc(more_than_a_tenth, 0, torch_stream);
  CHECK(much != nullptr);
  torch::free(much, 0, 0, torch_stream);
  CHECK_TRIMS_TO_ZERO(0);
}

// ---- CuPy ----

void cupy_refuses_what_is_no_pool() {
  int local = 0;
  CHECK(cupy::malloc(&local, 100, 0) == nullptr);
  CHECK_EQ(pool_last_status(), POOL_ERROR_INVALID_ARGUMENT);
}

// ---- several devices ----

void works_on_the_device_it_is_given() {
  int count = 0;
  CU(DeviceGetCount(&count));
  if (count < 2) return;
  for (const Runtime &runtime : runtimes()) {
    if (!runtime.takes_device) continue;
    // The current context stays that of device 0; the stream that torch names for another is that one's.
    const CUstream saved = torch_stream;
    CUcontext before = nullptr, after = nullptr;
    torch_stream = nullptr;
    CU(CtxGetCurrent(&before));
    void *block = runtime.alloc(MIB, 1);
    CHECK(block != nullptr);
    CHECK_EQ(info_of(block).device, 1);
    CHECK_EQ(stats_of(1).live_blocks, 1);
    CHECK_EQ(stats_of(0).live_blocks, 0);
    runtime.free(block);
    runtime.empty_cache();
    CU(CtxGetCurrent(&after));
    CHECK(before == after);
    CHECK_STATS(1);
    CHECK_EQ(stats_of(1).reserved_bytes, 0);
    torch_stream = saved;
  }
}

// ---- before, beside and after the driver's life; each in a process of its own ----

int before_the_driver() {
  driver_open();
  torch::reset();
  ort::empty_cache();
  if (on_sim()) CHECK_EQ(sim.call_count("cuInit"), 0);
  return check_result();
}

int without_a_device() {
  driver_open();
  if (!on_sim()) return EXIT_SKIPPED;
  CHECK_EQ(sim.fail("cuInit", 1, 1, 100), 0);
  for (const Runtime &runtime : runtimes()) {
    CHECK(runtime.alloc(100, 0) == nullptr);
    CHECK_EQ(pool_last_status(), POOL_ERROR_NO_DEVICE);
    runtime.free(nullptr);
    runtime.empty_cache();
  }
  return check_result();
}

int in_a_fork() {
  driver_start(0);
  static void *block = torch::malloc(MIB, 0, nullptr);
  CHECK(block != nullptr);
  CHECK_EQ(in_child([] {
             for (const Runtime &runtime : runtimes()) {
               CHECK(runtime.alloc(100, 0) == nullptr);
               CHECK_EQ(pool_last_status(), POOL_ERROR_FORKED);
               runtime.free(block);
               runtime.empty_cache();
             }
             torch::record_stream(block, nullptr);
             torch::memory_fraction(0.5, 0);
             return check_result();
           }),
           0);
  torch::free(block, 0, 0, nullptr);
  return check_result();
}

void *late[3];

int while_exiting() {
  // Registered before the driver is initialised, so it runs after the pool's own handler.
  atexit([] {
    for (size_t i = 0; i < runtimes().size(); ++i) {
      runtimes()[i].free(late[i]);
      CHECK(runtimes()[i].alloc(100, 0) == nullptr);
      CHECK_EQ(pool_last_status(), POOL_ERROR_SHUTTING_DOWN);
      runtimes()[i].empty_cache();
    }
    if (check_failures > 0) _exit(EXIT_FAILURE);
  });
  driver_start(0);
  runtimes();
  for (size_t i = 0; i < runtimes().size(); ++i) CHECK((late[i] = runtimes()[i].alloc(MIB, 0)) != nullptr);
  return check_result();
}

void lives_with_the_driver() {
  CHECK_EQ(in_child(before_the_driver), 0);
  const int code = in_child(without_a_device);
  CHECK(code == 0 || code == EXIT_SKIPPED);
  CHECK_EQ(in_child(in_a_fork), 0);
  CHECK_EQ(in_child(while_exiting), 0);
}

}  // namespace

int main() {
  runtimes();
  RUN(lives_with_the_driver);  // first: this process must not have used the driver

  driver_start(0);
  torch_stream = new_stream(CU_STREAM_NON_BLOCKING);
  RUN(hands_out_blocks);
  RUN(takes_size_0_and_null);
  RUN(answers_null_for_what_cannot_be);
  RUN(answers_null_out_of_memory);
  RUN(answers_null_where_the_driver_fails);
  RUN(wrong_frees_change_nothing);
  RUN(works_on_many_threads);
  RUN(torch_reuses_on_its_stream);
  RUN(torch_records_streams);
  RUN(torch_sets_the_fraction);
  RUN(cupy_refuses_what_is_no_pool);
  RUN(works_on_the_device_it_is_given);
  CU(StreamDestroy(torch_stream));
  return driver_result();
}
