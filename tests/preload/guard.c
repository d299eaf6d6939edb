/* guard.c: allocations of a program that knows nothing of the pool, while the pool idles on 7 of 8 GiB.
 *
 *   guard WAY rescued|refused
 *
 * Everything that takes device memory is tried: with the shim each succeeds, without it each is refused. */

#include "client.h"

static int rescued;

/* The answer to an allocation that does not fit beside what is idle. */
#define CHECK_OUTCOME(call) CHECK_EQ(call, rescued ? 0 : CUDA_ERROR_OUT_OF_MEMORY)

static void refill(void) {
  CHECK_EQ(pool.trim(NULL, 0, 0, NULL), 0);
  leave_idle(7 * GIB);
}

static void plain(void) {
  CUdeviceptr ptr = 0;
  refill();
  CHECK_OUTCOME(cu.MemAlloc(&ptr, 4 * GIB));
  CHECK_EQ(ptr != 0, rescued);
  if (rescued) {
    CU(MemFree(ptr));
  }
}

static void stream_ordered(void) {
  CUdeviceptr ptr = 0;
  CUstream stream = NULL;
  CUmemoryPool mempool = NULL;
  if (cu.MemAllocAsync == NULL) {
    check_skip("this version has no stream-ordered memory");
    return;
  }
  CU(StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(DeviceGetDefaultMemPool(&mempool, 0));
  refill();
  CHECK_OUTCOME(cu.MemAllocAsync(&ptr, 4 * GIB, stream));
  if (rescued) {
    CU(MemFreeAsync(ptr, stream));
    CU(StreamSynchronize(stream));
    CU(MemPoolTrimTo(mempool, 0));
  }
  refill();
  CHECK_OUTCOME(cu.MemAllocFromPoolAsync(&ptr, 4 * GIB, mempool, stream));
  if (rescued) {
    CU(MemFreeAsync(ptr, stream));
    CU(StreamSynchronize(stream));
    CU(MemPoolTrimTo(mempool, 0));
  }
  CU(StreamDestroy(stream));
}

static void pitched_and_managed(void) {
  CUdeviceptr ptr = 0;
  size_t pitch = 0;
  refill();
  CHECK_OUTCOME(cu.MemAllocPitch(&ptr, &pitch, MIB - 100, 4096, 4));
  if (rescued) {
    CHECK_EQ(pitch, MIB);
    CU(MemFree(ptr));
  }
  refill();
  CHECK_OUTCOME(cu.MemAllocManaged(&ptr, 4 * GIB, CU_MEM_ATTACH_GLOBAL));
  if (rescued) {
    CU(MemFree(ptr));
  }
}

static void arrays(void) {
  CUDA_ARRAY_DESCRIPTOR flat = {32768, 8192, CU_AD_FORMAT_FLOAT, 4};
  CUDA_ARRAY3D_DESCRIPTOR deep = {2048, 1024, 128, CU_AD_FORMAT_FLOAT, 4, 0};
  CUDA_ARRAY3D_DESCRIPTOR first_of_many = {1024, 1024, 128, CU_AD_FORMAT_FLOAT, 4, 0};
  CUarray array = NULL;
  CUmipmappedArray mipmapped = NULL;
  refill();
  CHECK_OUTCOME(cu.ArrayCreate(&array, &flat));
  if (rescued) {
    CU(ArrayDestroy(array));
  }
  refill();
  CHECK_OUTCOME(cu.Array3DCreate(&array, &deep));
  if (rescued) {
    CU(ArrayDestroy(array));
  }
  refill();
  CHECK_OUTCOME(cu.MipmappedArrayCreate(&mipmapped, &first_of_many, 5));
  if (rescued) {
    CU(MipmappedArrayDestroy(mipmapped));
  }
}

static CUmemAllocationProp chunks_on(int device) {
  CUmemAllocationProp properties;
  memset(&properties, 0, sizeof properties);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

static void chunks(void) {
  CUmemAllocationProp properties = chunks_on(0);
  CUmemGenericAllocationHandle handle = 0;
  if (cu.MemCreate == NULL) {
    check_skip("this version has no virtual memory calls");
    return;
  }
  refill();
  CHECK_OUTCOME(cu.MemCreate(&handle, 4 * GIB, &properties, 0));
  if (rescued) {
    CU(MemRelease(handle));
  }
}

/* What the driver needs on the way. The simulated one needs nothing, so its refusal is made. */
static void indirect(void) {
  CUmodule module = NULL;
  CUcontext primary = NULL, context = NULL;
  refill();
  CHECK_EQ(sim.fail("cuModuleLoadData", 1, 0, CUDA_ERROR_OUT_OF_MEMORY), 0);
  CHECK_OUTCOME(cu.ModuleLoadData(&module, "no real module"));
  CHECK_EQ(stats_of_pool().reserved_bytes < 7 * GIB, rescued);
  refill();
  CHECK_EQ(sim.fail("cuDevicePrimaryCtxRetain", 1, 0, CUDA_ERROR_OUT_OF_MEMORY), 0);
  CHECK_OUTCOME(cu.DevicePrimaryCtxRetain(&primary, 0));
  if (rescued) {
    CU(DevicePrimaryCtxRelease(0));
  }
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  if (cu.CtxCreate != NULL) {
    CU(CtxGetCurrent(&primary));
    refill();
    CHECK_EQ(sim.fail("cuCtxCreate", 1, 0, CUDA_ERROR_OUT_OF_MEMORY), 0);
    CHECK_OUTCOME(cu.CtxCreate(&context, 0, 0));
    if (rescued) {
      CU(CtxDestroy(context));
      CU(CtxSetCurrent(primary));
    }
    CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  }
  if (cu.StreamBeginCapture != NULL && cu.GraphInstantiateWithFlags != NULL) {
    CUstream stream = NULL;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    CU(StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CU(StreamEndCapture(stream, &graph));
    refill();
    CHECK_EQ(sim.fail("cuGraphInstantiateWithFlags", 1, 0, CUDA_ERROR_OUT_OF_MEMORY), 0);
    CHECK_OUTCOME(cu.GraphInstantiateWithFlags(&executable, graph, 0));
    if (rescued) {
      CU(GraphExecDestroy(executable));
    }
    CU(GraphDestroy(graph));
    CU(StreamDestroy(stream));
    CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  }
}

/* Other failures are the driver's own, as they came, and cost the pool nothing. */
static void other_failures_stay(void) {
  CUdeviceptr ptr = 77;
  CUcontext context = NULL;
  size_t pitch = 0;
  refill();
  CHECK_EQ(cu.MemAlloc(NULL, 100), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemAlloc(&ptr, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemAllocPitch(&ptr, &pitch, 100, 100, 3), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemAllocManaged(&ptr, 100, 9), CUDA_ERROR_INVALID_VALUE);
  /* Larger than the device: nothing is given up for it. */
  CHECK_EQ(cu.MemAlloc(&ptr, 9 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(cu.MemAlloc(&ptr, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(cu.MemAlloc(&ptr, SIZE_MAX - 511), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(stats_of_pool().reserved_bytes >= 7 * GIB);
  /* Not to be had even with all of the pool: the first answer stands. */
  CHECK_EQ(sim.fail("cuMemAlloc", 2, 0, 999), 0);
  CHECK_EQ(cu.MemAlloc(&ptr, 4 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  CHECK_EQ(ptr, 77);
  CU(CtxGetCurrent(&context));
  CU(CtxSetCurrent(NULL));
  CHECK_EQ(cu.MemAlloc(&ptr, 100), CUDA_ERROR_INVALID_CONTEXT);
  CU(CtxSetCurrent(context));
  CHECK_EQ(cu.MemFree(1234567), CUDA_ERROR_INVALID_VALUE);
  CU(MemFree(0));
}

/* The calling thread's own state stays as it is, while the pool waits for its pending frees. */
static void pending_memory_is_waited_for(void) {
  CUdeviceptr ptr = 0;
  CUcontext before = NULL, after = NULL;
  void *block = NULL;
  CHECK_EQ(pool.trim(NULL, 0, 0, NULL), 0);
  CHECK_EQ(pool.alloc(&block, 7 * GIB), 0);
  CHECK_EQ(sim.spin(NULL, 50000), 0);
  CHECK_EQ(pool.free(block), 0);
  CU(CtxGetCurrent(&before));
  CHECK_OUTCOME(cu.MemAlloc(&ptr, 4 * GIB));
  CU(CtxGetCurrent(&after));
  CHECK(before == after);
  if (rescued) {
    CU(MemFree(ptr));
  }
}

/* Memory of a device that is not the current one: the chunk's location and the stream say which. */
static void on_another_device(void) {
  CUmemAllocationProp properties = chunks_on(1);
  CUcontext first = NULL, second = NULL;
  CUstream stream = NULL;
  CUdeviceptr ptr = 0;
  CUmemGenericAllocationHandle handle = 0;
  int devices = 0;
  CU(DeviceGetCount(&devices));
  if (devices < 2 || cu.MemCreate == NULL || cu.MemAllocAsync == NULL) {
    return;
  }
  CU(CtxGetCurrent(&first));
  CU(DevicePrimaryCtxRetain(&second, 1));
  CU(CtxSetCurrent(second));
  CU(StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(CtxSetCurrent(first));
  leave_idle_on(1, 7 * GIB);
  CHECK_OUTCOME(cu.MemCreate(&handle, 4 * GIB, &properties, 0));
  if (rescued) {
    CU(MemRelease(handle));
  }
  CHECK_EQ(pool.trim(NULL, 1, 0, NULL), 0);
  leave_idle_on(1, 7 * GIB);
  CHECK_OUTCOME(cu.MemAllocAsync(&ptr, 4 * GIB, stream));
  if (rescued) {
    CU(MemFreeAsync(ptr, stream));
    CU(StreamSynchronize(stream));
  }
  CU(CtxGetCurrent(&second));
  CHECK(first == second);
  CU(StreamDestroy(stream));
}

int main(int count, char **arguments) {
  if (count != 3) {
    return 2;
  }
  rescued = strcmp(arguments[2], "rescued") == 0;
  client_start(arguments[1]);
  helpers_open();
  RUN(plain);
  RUN(stream_ordered);
  RUN(pitched_and_managed);
  RUN(arrays);
  RUN(chunks);
  RUN(indirect);
  RUN(other_failures_stay);
  RUN(pending_memory_is_waited_for);
  RUN(on_another_device);
  return client_result();
}
