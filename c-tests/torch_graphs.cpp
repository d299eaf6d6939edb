// torch_graphs.cpp: PyTorch's hooks for CUDA graphs, through the types that PyTorch keeps them in: while a
// graph is captured its memory comes from a pool of its own, which nobody else gets anything of as long as
// the graph can be launched.

#include "check.h"
#include "driver.h"
#include "thread.h"

#include <functional>
#include <utility>
#include <vector>

namespace {

// c10/cuda/CUDAGraphsC10Utils.h and torch/csrc/cuda/CUDAPluggableAllocator.h.
using Id = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(CUstream_st *)>;

template <class Function>
Function *address(uintptr_t number) { return reinterpret_cast<Function *>(number); }

const std::function<void *(size_t, int, CUstream_st *)> torch_alloc = pool_torch_alloc;
const std::function<void(void *, size_t, int, CUstream_st *)> torch_free = pool_torch_free;
const std::function<void(int, Id, Filter)> begin_allocate_to_pool =
    address<void(int, Id, Filter)>(reinterpret_cast<uintptr_t>(&pool_torch_begin_allocate_to_pool));
const std::function<void(int, Id)> end_allocate_to_pool =
    address<void(int, Id)>(reinterpret_cast<uintptr_t>(&pool_torch_end_allocate_to_pool));
const std::function<void(int, Id)> release_pool =
    address<void(int, Id)>(reinterpret_cast<uintptr_t>(&pool_torch_release_pool));

CUstream stream;
const size_t kSize = 6 * MIB;

void begin(Id id) {
  std::vector<int> captured(100, 1);  // so that the filter is more than a pointer
  begin_allocate_to_pool(0, id,
                         [captured](CUstream_st *asked) { return asked == stream && !captured.empty(); });
}

pool_t *pool_of(const void *block) { return info_of(block).pool; }

// A graph that fills two blocks in turn, in the memory of one: what is freed in a capture serves the same
// capture again.
struct Graph {
  Id id;
  CUgraphExec exec = nullptr;
  void *first = nullptr, *second = nullptr;
  pool_t *pool = nullptr;

  explicit Graph(Id name) : id(name) {
    CUgraph graph = nullptr;
    CU(StreamSynchronize(stream));
    begin(id);
    CU(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    first = torch_alloc(kSize, 0, stream);
    CHECK(first != nullptr);
    pool = pool_of(first);
    CHECK(pool != nullptr);
    fill(first, kSize, 0x11, stream);
    torch_free(first, kSize, 0, stream);
    second = torch_alloc(kSize, 0, stream);
    CHECK(second == first);
    fill(second, kSize, 0x22, stream);
    CU(StreamEndCapture(stream, &graph));
    end_allocate_to_pool(0, id);
    CHECK_STATUS(POOL_OK, pool_use_on_stream(nullptr, stream));
    CHECK_EQ(cu.GraphInstantiateWithFlags(&exec, graph, 0), 0);
    CU(GraphDestroy(graph));
  }

  void launch() const {
    CHECK_EQ(cu.GraphLaunch(exec, stream), 0);
    CU(StreamSynchronize(stream));
    CHECK(holds(second, kSize, 0x22));
  }

  void destroy() {
    CHECK_EQ(cu.GraphExecDestroy(exec), 0);
    release_pool(0, id);
  }
};

// All that the device has, in blocks of the default pool.
std::vector<void *> fill_the_device() {
  std::vector<void *> blocks;
  while (void *block = torch_alloc(kSize, 0, stream)) blocks.push_back(block);
  CHECK_EQ(pool_last_status(), POOL_ERROR_OUT_OF_MEMORY);
  return blocks;
}

void free_all(const std::vector<void *> &blocks) {
  for (void *block : blocks) torch_free(block, 0, 0, stream);
}

void keeps_idle_memory_of_a_graph() {
  if (!needs_sim()) return;
  sim.set_memory(0, 64 * MIB);
  Graph graph({1, 7});
  torch_free(graph.second, kSize, 0, stream);
  // Nothing is live in the pool of the graph. Still nobody gets its memory, whatever is tried.
  const std::vector<void *> blocks = fill_the_device();
  size_t released = 1;
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  CHECK_STATUS(POOL_OK, pool_trim(graph.pool, 0, 0, &released));
  CHECK_EQ(released, 0);
  graph.launch();
  for (const void *block : blocks) CHECK(pool_of(block) == nullptr);
  // With the graph gone it serves others at once.
  graph.destroy();
  void *more = torch_alloc(kSize, 0, stream);
  CHECK(more != nullptr);
  torch_free(more, kSize, 0, stream);
  free_all(blocks);
  sim.set_memory(0, 8 * GIB);
  pool_torch_reset();
  CHECK_TRIMS_TO_ZERO(0);
}

void a_pool_lives_as_long_as_a_block_of_it() {
  Graph graph({2, 7});
  graph.launch();
  graph.destroy();
  CHECK(pool_of(graph.second) == graph.pool);
  CHECK(holds(graph.second, kSize, 0x22));
  torch_free(graph.second, kSize, 0, stream);
  pool_torch_reset();
  pool_stats stats;
  stats.struct_size = sizeof stats;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_get_stats(graph.pool, 0, &stats));
  CHECK_TRIMS_TO_ZERO(0);
}

void two_graphs_share_a_pool() {
  if (!needs_sim()) return;
  sim.set_memory(0, 64 * MIB);
  Graph one({3, 7});
  torch_free(one.second, kSize, 0, stream);
  Graph two({3, 7});
  CHECK(one.pool == two.pool && one.first == two.first);
  torch_free(two.second, kSize, 0, stream);
  one.destroy();
  const std::vector<void *> blocks = fill_the_device();
  two.launch();
  two.destroy();
  free_all(blocks);
  sim.set_memory(0, 8 * GIB);
  pool_torch_reset();
  CHECK_TRIMS_TO_ZERO(0);
}

void says_whose_allocations_are_meant() {
  const CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  void *here = nullptr, *there = nullptr, *captured = nullptr, *direct = nullptr;
  CUgraph graph = nullptr;
  begin({4, 7});
  CU(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  here = torch_alloc(kSize, 0, other);
  Thread([&] {
    driver_start(0);
    there = torch_alloc(kSize, 0, other);
    captured = torch_alloc(kSize, 0, stream);
    // Device-ordered frees of others must not break the capture.
    CHECK_STATUS(POOL_OK, pool_alloc(&direct, kSize));
    CHECK_STATUS(POOL_OK, pool_free(direct));
  }).join();
  CU(StreamEndCapture(stream, &graph));
  end_allocate_to_pool(0, {4, 7});
  CHECK_STATUS(POOL_OK, pool_use_on_stream(nullptr, stream));
  void *after = torch_alloc(kSize, 0, stream);
  CHECK(pool_of(here) != nullptr);       // of the thread that began
  CHECK(pool_of(captured) == pool_of(here));  // of a stream that is captured
  CHECK(pool_of(there) == nullptr);
  CHECK(pool_of(after) == nullptr);
  for (void *block : {here, there, captured, after}) torch_free(block, 0, 0, nullptr);
  release_pool(0, {4, 7});
  CU(GraphDestroy(graph));
  CU(CtxSynchronize());
  CU(StreamDestroy(other));
  pool_torch_reset();
  CHECK_TRIMS_TO_ZERO(0);
}

// Python may collect an old graph at any moment: what becomes of its pool must not break a capture that the
// library has not even seen a stream of.
void old_graphs_go_during_a_capture() {
  CUgraph graph = nullptr;
  Graph old({6, 7});
  torch_free(old.second, kSize, 0, stream);
  void *plain = nullptr;
  CHECK_STATUS(POOL_OK, pool_alloc(&plain, kSize));
  CHECK_STATUS(POOL_OK, pool_free(plain));
  const CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  begin({8, 7});
  CU(StreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_GLOBAL));
  old.destroy();
  pool_torch_reset();
  CU(StreamEndCapture(other, &graph));
  CHECK(graph != nullptr);
  end_allocate_to_pool(0, {8, 7});
  release_pool(0, {8, 7});
  if (graph != nullptr) CU(GraphDestroy(graph));
  CU(StreamDestroy(other));
  CHECK_TRIMS_TO_ZERO(0);
}

void takes_what_does_not_fit_together() {
  release_pool(0, {9, 9});
  end_allocate_to_pool(0, {9, 9});
  CHECK_EQ(pool_last_status(), POOL_ERROR_INVALID_ARGUMENT);
  begin_allocate_to_pool(64, {9, 9}, nullptr);
  CHECK_EQ(pool_last_status(), POOL_ERROR_NO_DEVICE);
  end_allocate_to_pool(64, {9, 9});
  // Which device is current may change before the end.
  begin_allocate_to_pool(POOL_DEVICE_CURRENT, {9, 9}, nullptr);
  CHECK_EQ(pool_last_status(), POOL_ERROR_INVALID_ARGUMENT);
  void *block = torch_alloc(kSize, 0, stream);
  CHECK(block != nullptr && pool_of(block) == nullptr);
  torch_free(block, kSize, 0, stream);
}

// Where no pool can be made for a graph its memory must not come from elsewhere.
void has_no_memory_without_a_pool() {
  std::vector<pool_t *> pools;
  pool_t *pool = nullptr;
  while (pool_create(nullptr, &pool) == POOL_OK) pools.push_back(pool);
  begin({5, 7});
  CHECK_EQ(pool_last_status(), POOL_ERROR_NOT_SUPPORTED);
  CHECK(torch_alloc(kSize, 0, stream) == nullptr);
  CHECK_EQ(pool_last_status(), POOL_ERROR_NOT_SUPPORTED);
  end_allocate_to_pool(0, {5, 7});
  release_pool(0, {5, 7});
  for (pool_t *each : pools) CHECK_STATUS(POOL_OK, pool_destroy(each));
  begin({5, 7});
  void *block = torch_alloc(kSize, 0, stream);
  CHECK(block != nullptr && pool_of(block) != nullptr);
  torch_free(block, kSize, 0, stream);
  end_allocate_to_pool(0, {5, 7});
  release_pool(0, {5, 7});
  CHECK_TRIMS_TO_ZERO(0);
}

// pool_query tells the handle of a graph's pool. Destroying it must not give away what the graph works in,
// nor use up the places for pools of graphs.
void a_pool_is_the_graphs_until_it_is_gone() {
  for (unsigned round = 0; round < 300; ++round) {
    begin({10, round});
    void *block = torch_alloc(MIB, 0, stream);
    if (!CHECK(block != nullptr)) return;
    pool_t *pool = pool_of(block);
    torch_free(block, MIB, 0, stream);
    CHECK_STATUS(POOL_ERROR_IN_USE, pool_destroy(pool));
    // A second capture keeps the pool from going by itself when its graph does.
    begin({11, 7});
    end_allocate_to_pool(0, {10, round});
    release_pool(0, {10, round});
    CHECK_STATUS(POOL_OK, pool_destroy(pool));
    end_allocate_to_pool(0, {11, 7});
    release_pool(0, {11, 7});
  }
  CHECK_TRIMS_TO_ZERO(0);
}

// Everything at once and in any order: each request is answered, and the driver gets all its memory back.
void takes_any_order_from_any_thread() {
  std::vector<Thread> threads;
  for (unsigned i = 0; i < 6; ++i) {
    threads.emplace_back([i] {
      driver_start(0);
      const CUstream own = new_stream(CU_STREAM_NON_BLOCKING);
      uint64_t state = 9 + i;
      for (int round = 0; round < 400; ++round) {
        const Id id{12, random_below(&state, 4)};
        switch (random_below(&state, 6)) {
          case 0: begin_allocate_to_pool(0, id, nullptr); break;
          case 1: end_allocate_to_pool(0, id); break;
          case 2: release_pool(0, id); break;
          case 3: pool_torch_reset(); break;
          default: torch_free(torch_alloc(random_size(&state, 4 * MIB), 0, own), 0, 0, own);
        }
      }
      CU(StreamSynchronize(own));
      CU(StreamDestroy(own));
    });
  }
  for (Thread &thread : threads) thread.join();
  for (unsigned long long id = 0; id < 4; ++id) {
    for (int i = 0; i < 6 * 400; ++i) {
      end_allocate_to_pool(0, {12, id});
      release_pool(0, {12, id});
    }
  }
  CU(CtxSynchronize());
  pool_torch_reset();
  CHECK_TRIMS_TO_ZERO(0);
}

bool stop;

int every_hook_says_forked() {
  const Id id{13, 7};
  const std::vector<std::function<void()>> hooks = {
      [&] { begin({13, 7}); },         [&] { end_allocate_to_pool(0, id); },
      [&] { release_pool(0, id); },    [] { pool_torch_reset(); },
      [] { pool_ort_empty_cache(); },  [] { pool_torch_memory_fraction(0.5, 0); },
      [] { pool_cupy_alloc(nullptr, 1, 0); }, [] { pool_ort_alloc(1); },
      [] { pool_torch_alloc(1, 0, nullptr); }, [] { pool_torch_record_stream(&stop, nullptr); },
  };
  for (const auto &hook : hooks) {
    CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc(nullptr, 1));
    hook();
    CHECK_EQ(pool_last_status(), POOL_ERROR_FORKED);
  }
  return check_result();
}

// A thread of the parent is in the middle of something, perhaps with a lock, and does not exist in the child.
void a_child_does_not_wait_for_threads_of_its_parent() {
  std::vector<Thread> threads;
  threads.emplace_back([] {
    driver_start(0);
    while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
      begin({13, 7});
      end_allocate_to_pool(0, {13, 7});
      release_pool(0, {13, 7});
    }
  });
  threads.emplace_back([] {
    driver_start(0);
    while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) pool_torch_memory_fraction(1.0, 0);
  });
  for (int round = 0; round < 100 && CHECK_EQ(in_child(every_hook_says_forked), 0); ++round) {
  }
  __atomic_store_n(&stop, true, __ATOMIC_SEQ_CST);
  for (Thread &thread : threads) thread.join();
}

// Captures come and go: nothing of them adds up.
void pools_come_and_go() {
  for (unsigned round = 0; round < 600; ++round) {
    begin({100, round});
    void *block = torch_alloc(MIB, 0, stream);
    CHECK(block != nullptr);
    end_allocate_to_pool(0, {100, round});
    torch_free(block, MIB, 0, stream);
    release_pool(0, {100, round});
  }
  CHECK_TRIMS_TO_ZERO(0);
}

}  // namespace

int main() {
  driver_start(0);
  if (cu.StreamBeginCapture == nullptr) {
    printf("skipped: the driver has no graphs\n");
    return EXIT_SKIPPED;
  }
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  RUN(keeps_idle_memory_of_a_graph);
  RUN(a_pool_lives_as_long_as_a_block_of_it);
  RUN(two_graphs_share_a_pool);
  RUN(says_whose_allocations_are_meant);
  RUN(old_graphs_go_during_a_capture);
  RUN(takes_what_does_not_fit_together);
  RUN(has_no_memory_without_a_pool);
  RUN(a_pool_is_the_graphs_until_it_is_gone);
  RUN(takes_any_order_from_any_thread);
  RUN(pools_come_and_go);
  RUN(a_child_does_not_wait_for_threads_of_its_parent);
  CU(StreamDestroy(stream));
  return driver_result();
}
