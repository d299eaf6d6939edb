/* capture.c: allocations while streams are captured into graphs.
 *
 *   capture WAY driver|guard|pool
 *
 * The same checks hold in all modes: what the driver forbids in a capture stays forbidden, what it allows
 * leaves the capture valid. */

#include "client.h"

static int pooled, shimmed;
static CUstream captured, other;

static void begin(CUstreamCaptureMode mode) {
  CU(StreamBeginCapture(captured, mode));
}

/* Ends the capture, which must be valid, and launches what it made. */
static void end_and_launch(void) {
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  CHECK_EQ(cu.StreamEndCapture(captured, &graph), 0);
  CU(StreamIsCapturing(captured, &status));
  CHECK_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
  CU(GraphInstantiateWithFlags(&executable, graph, 0));
  CU(GraphLaunch(executable, captured));
  CU(StreamSynchronize(captured));
  CU(GraphExecDestroy(executable));
  CU(GraphDestroy(graph));
}

static void forbidden_calls_break_the_capture(void) {
  CUdeviceptr block = 0, ptr = 0;
  CUgraph graph = NULL;
  CU(MemAlloc(&block, 100));
  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK_EQ(cu.MemAlloc(&ptr, 100), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK_EQ(cu.StreamEndCapture(captured, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  CHECK_EQ(cu.MemFree(block), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK_EQ(cu.StreamEndCapture(captured, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(graph == NULL);
  /* After that all is as it was. */
  CU(MemFree(block));
  CU(MemAlloc(&block, 100));
  CU(MemFree(block));
}

static void allowed_calls_leave_it_valid(void) {
  CUdeviceptr block = 0, before = 0;
  CU(MemAlloc(&before, 5 * MIB));
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CU(MemsetD32Async(before, 0x11, 100, captured));
  CU(MemAlloc(&block, 3 * MIB));
  CU(MemFree(block));
  CU(MemAlloc(&block, 3 * MIB));
  end_and_launch();
  CU(MemFree(block));
  CU(MemFree(before));
}

static void graph_memory_is_the_graphs(void) {
  CUdeviceptr node = 0, block = 0;
  uint64_t live = shimmed ? stats_of_pool().live_blocks : 0;
  CU(MemAllocAsync(&block, 100, other));
  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  CU(MemAllocAsync(&node, MIB, captured));
  CU(MemsetD32Async(node, 0x22, 100, captured));
  CU(MemFreeAsync(node, captured));
  end_and_launch();
  CU(MemFreeAsync(block, other));
  CHECK_EQ(stats_of_pool().live_blocks, live);
}

static void only_graph_memory_is_freed_in_a_capture(void) {
  CUdeviceptr block = 0, forbidden = 0;
  CUgraph graph = NULL;
  CU(MemAllocAsync(&block, 100, other));
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CHECK_EQ(cu.MemFreeAsync(block, captured), CUDA_ERROR_INVALID_VALUE);
  cu.StreamEndCapture(captured, &graph);
  if (graph != NULL) {
    CU(GraphDestroy(graph));
  }
  /* In one that something has broken, the answer says so. */
  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK_EQ(cu.MemAlloc(&forbidden, 100), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK_EQ(cu.MemFreeAsync(block, captured), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_EQ(cu.StreamEndCapture(captured, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CU(MemFreeAsync(block, other));
}

/* Elsewhere life goes on, even short of memory; nothing that the pool does for it may break the capture. */
static void other_streams_go_on(void) {
  CUdeviceptr blocks[14], target = 0;
  int i, round;
  CU(MemAlloc(&target, 1000));
  for (round = 0; round < 3; round++) {
    for (i = 0; i < 14; i++) {
      CU(MemAllocAsync(&blocks[i], GIB / 2, other));
    }
    begin(CU_STREAM_CAPTURE_MODE_RELAXED);
    CU(MemsetD32Async(target, 0x33, 100, captured));
    for (i = 0; i < 14; i++) {
      CU(MemFreeAsync(blocks[i], other));
    }
    CU(MemAllocAsync(&blocks[0], 3 * GIB, other));
    CU(MemFreeAsync(blocks[0], other));
    end_and_launch();
    CU(StreamSynchronize(other));
  }
  CU(MemFree(target));
}

/* In guard mode the pool of another part of the process holds what is wanted, freed but not finished with. */
static void a_rescue_leaves_it_valid(void) {
  CUdeviceptr block = 0, target = 0;
  void *held = NULL;
  CUresult result;
  CU(MemAlloc(&target, 1000));
  CHECK_EQ(pool.alloc(&held, 6 * GIB), 0);
  CHECK_EQ(sim.spin(other, 20000), 0);
  CHECK_EQ(pool.free(held), 0);
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CU(MemsetD32Async(target, 0x44, 100, captured));
  result = cu.MemAlloc(&block, 5 * GIB);
  CHECK(result == 0 || result == CUDA_ERROR_OUT_OF_MEMORY);
  end_and_launch();
  CU(StreamSynchronize(other));
  if (result == 0) {
    CU(MemFree(block));
  }
  if (shimmed) {
    CU(MemAlloc(&block, 5 * GIB));
    CU(MemFree(block));
  }
  CU(MemFree(target));
  CHECK_EQ(pool.trim(NULL, 0, 0, NULL), 0);
}

int main(int count, char **arguments) {
  int flags;
  if (count != 3) {
    return 2;
  }
  pooled = strcmp(arguments[2], "pool") == 0;
  shimmed = pooled || strcmp(arguments[2], "guard") == 0;
  client_start(arguments[1]);
  helpers_open();
  for (flags = 0; flags < 2; flags++) {
    CU(StreamCreate(&captured, (unsigned)flags));
    CU(StreamCreate(&other, CU_STREAM_NON_BLOCKING));
    RUN(forbidden_calls_break_the_capture);
    RUN(allowed_calls_leave_it_valid);
    RUN(graph_memory_is_the_graphs);
    RUN(only_graph_memory_is_freed_in_a_capture);
    RUN(other_streams_go_on);
    RUN(a_rescue_leaves_it_valid);
    CU(StreamDestroy(captured));
    CU(StreamDestroy(other));
  }
  return client_result();
}
