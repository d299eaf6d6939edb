/* contexts.c: a program's memory in contexts that are missing, of others, destroyed, reset and released.
 *
 *   contexts WAY driver|pool
 *
 * The same checks hold without the shim and in pool mode. */

#include "client.h"

static int pooled;

static void before_initialisation(void) {
  CUdeviceptr ptr = 77;
  CHECK_EQ(cu.MemAlloc(&ptr, 100), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemFree(4096), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(ptr, 77);
}

static void without_a_context(void) {
  CUdeviceptr ptr = 77;
  size_t available = 77, total = 77;
  CHECK_EQ(cu.MemAlloc(&ptr, 100), CUDA_ERROR_INVALID_CONTEXT);
  CHECK_EQ(cu.MemAlloc(&ptr, 0), CUDA_ERROR_INVALID_CONTEXT);
  CHECK_EQ(cu.MemGetInfo(&available, &total), CUDA_ERROR_INVALID_CONTEXT);
  if (cu.MemAllocAsync != NULL) {
    CHECK_EQ(cu.MemAllocAsync(&ptr, 100, NULL), CUDA_ERROR_INVALID_CONTEXT);
  }
  CHECK_EQ(ptr, 77);
}

static uint64_t blocks(void) {
  return pooled ? stats_of_pool().live_blocks : sim.live_allocations();
}

static void of_another_context(void) {
  CUcontext first = NULL, second = NULL;
  CUdeviceptr in_first, in_second, base;
  uint64_t value = 0, used;
  size_t size;
  CU(CtxGetCurrent(&first));
  used = sim.used_bytes(0);
  CU(MemAlloc(&in_first, MIB));
  CU(CtxCreate(&second, 0, 0));
  CU(MemAlloc(&in_second, 3 * MIB));
  CU(PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_CONTEXT, in_first));
  CHECK_EQ(value, (uintptr_t)first);
  CU(PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_CONTEXT, in_second));
  CHECK_EQ(value, (uintptr_t)second);
  /* Frees and questions need not come from the block's own context. */
  CU(MemFree(in_first));
  CU(CtxSetCurrent(first));
  CU(MemGetAddressRange(&base, &size, in_second));
  CHECK_EQ(base, in_second);
  CU(MemFree(in_second));
  /* What is left goes with the context. */
  CU(CtxSetCurrent(second));
  CU(MemAlloc(&in_second, 300 * MIB));
  CU(MemAlloc(&in_first, 3 * MIB));
  CU(MemsetD32Async(in_second, 1, 100, NULL));
  CU(CtxSynchronize());
  CU(CtxDestroy(second));
  CHECK_EQ(cu.MemFree(in_second), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemFree(in_first), CUDA_ERROR_INVALID_VALUE);
  CU(CtxSetCurrent(first));
  CHECK_EQ(cu.MemFree(in_second), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemGetAddressRange(&base, &size, in_second), CUDA_ERROR_NOT_FOUND);
  CHECK_EQ(pool.trim(NULL, 0, 0, NULL), 0);
  CHECK_EQ(sim.used_bytes(0), used);
}

/* The memory works: a word goes there and back. */
static void check_usable(CUdeviceptr ptr, unsigned value) {
  unsigned word = 0;
  CU(MemsetD32Async(ptr, value, 16, NULL));
  CU(CtxSynchronize());
  CU(MemcpyDtoH(&word, ptr, 4));
  CHECK_EQ(word, value);
}

static void reset(void) {
  CUdeviceptr old, old_async = 0, again, again_async;
  CUcontext context = NULL;
  CU(MemAlloc(&old, 5 * MIB));
  if (cu.MemAllocAsync != NULL) {
    CU(MemAllocAsync(&old_async, 100, NULL));
    CU(MemFreeAsync(old_async, NULL));
  }
  CU(DevicePrimaryCtxReset(0));
  CHECK_EQ(cu.MemAlloc(&again, 100), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  if (cu.MemAllocAsync != NULL) {
    CHECK(cu.MemAllocAsync(&again, 100, NULL) != 0);
  }
  CHECK_EQ(cu.MemFree(old), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pooled ? sim.live_handles() : 0, 0);
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(context));
  if (cu.MemAllocAsync != NULL) {
    CU(MemAllocAsync(&again_async, 100, NULL));
    check_usable(again_async, 0x55);
    CU(MemFreeAsync(again_async, NULL));
  }
  CU(MemAlloc(&again, 5 * MIB));
  check_usable(again, 0x66);
  CU(MemFree(again));
  CU(DevicePrimaryCtxRelease(0));
}

/* The program's last reference goes, and with it the program's memory, whoever else has references. */
static void last_release(void) {
  CUdeviceptr lost, block;
  CUcontext context = NULL;
  unsigned flags = 0;
  int active = 0;
  CU(MemAlloc(&lost, 50 * MIB));
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(DevicePrimaryCtxRelease(0));
  CU(DevicePrimaryCtxGetState(0, &flags, &active));
  CHECK_EQ(active, 1);
  check_usable(lost, 0x77);
  CU(DevicePrimaryCtxRelease(0));
  CU(DevicePrimaryCtxGetState(0, &flags, &active));
  CHECK_EQ(active, 0);
  CHECK_EQ(cu.MemFree(lost), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.DevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
  if (pooled) {
    CHECK_EQ(sim.used_bytes(0), 0); /* the driver's own pools keep some */
  }
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(context));
  CU(MemAlloc(&block, 50 * MIB));
  check_usable(block, 0x88);
  CU(MemFree(block));
  CU(DevicePrimaryCtxRelease(0));
}

/* A stream names its context, so that none need be current; the last reference takes this one as well. */
static int release_after_a_stream(void) {
  CUdeviceptr block = 0;
  CUcontext context = NULL;
  CUstream stream = NULL;
  unsigned flags = 0;
  int active = 0;
  CU(Init(0));
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(context));
  CU(StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(CtxSetCurrent(NULL));
  CU(MemAllocAsync(&block, 1000, stream));
  CU(DevicePrimaryCtxRelease(0));
  CU(DevicePrimaryCtxGetState(0, &flags, &active));
  CHECK_EQ(active, 0);
  CHECK_EQ(cu.DevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
  return check_failures != 0;
}

int main(int count, char **arguments) {
  CUcontext primary = NULL;
  if (count != 3) {
    return 2;
  }
  pooled = strcmp(arguments[2], "pool") == 0;
  client_open(arguments[1]);
  helpers_open();
  RUN(before_initialisation);
  if (cu.MemAllocAsync != NULL) {
    /* Where the shim does not know the context by other ways. */
    CHECK_EQ(in_child(release_after_a_stream), 0);
  }
  CU(Init(0));
  RUN(without_a_context);
  CU(DevicePrimaryCtxRetain(&primary, 0));
  CU(CtxSetCurrent(primary));
  if (cu.CtxCreate != NULL) {
    RUN(of_another_context);
  }
  RUN(reset);
  RUN(last_release);
  CHECK_EQ(blocks(), 0);
  return client_result();
}
