/* serve.c: what a program may expect of its driver's memory, whoever serves it.
 *
 *   serve WAY driver|pool
 *
 * The same checks hold without the shim and in pool mode; `pool` adds that it was the pool indeed. */

#include "client.h"

static int pooled;
static CUcontext primary;

/* A block of the pool, where there is one. */
static void check_served(uint64_t live_before) {
  if (pooled) {
    CHECK(stats_of_pool().live_blocks > live_before);
  }
}

static void plain_blocks(void) {
  static const size_t sizes[] = {1, 100, 512, 4096, 5000, MIB, 10 * MIB, 100 * MIB};
  CUdeviceptr ptrs[8];
  unsigned word = 0;
  size_t i;
  for (i = 0; i < 8; i++) {
    uint64_t live = pooled ? stats_of_pool().live_blocks : 0;
    CU(MemAlloc(&ptrs[i], sizes[i]));
    check_served(live);
    CHECK_EQ(ptrs[i] % (pooled ? 512 : 256), 0);
    if (sizes[i] >= 4) {
      CU(MemsetD32Async(ptrs[i], 0x1000u + (unsigned)i, sizes[i] / 4, NULL));
    }
  }
  CU(CtxSynchronize());
  for (i = 0; i < 8; i++) {
    if (sizes[i] >= 4) {
      CU(MemcpyDtoH(&word, ptrs[i] + (sizes[i] / 4 - 1) * 4, 4));
      CHECK_EQ(word, 0x1000u + (unsigned)i);
    }
  }
  for (i = 0; i < 8; i++) {
    CU(MemFree(ptrs[i]));
  }
}

static void wrong_arguments(void) {
  CUdeviceptr ptr = 77;
  CUipcMemHandle handle;
  CHECK_EQ(cu.MemAlloc(NULL, 100), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemAlloc(&ptr, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemAlloc(&ptr, 9 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(cu.MemAlloc(&ptr, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(cu.MemAlloc(&ptr, SIZE_MAX - 511), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(ptr, 77);
  CU(MemFree(0));
  if (cu.MemAllocAsync != NULL) {
    CHECK_EQ(cu.MemAllocAsync(NULL, 100, NULL), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.MemAllocAsync(&ptr, SIZE_MAX, NULL), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(ptr, 77);
    CHECK_EQ(cu.MemFreeAsync(0, NULL), CUDA_ERROR_INVALID_VALUE);
  }
  CHECK_EQ(cu.IpcGetMemHandle(&handle, 0), CUDA_ERROR_INVALID_VALUE);
}

static CUresult range_of(CUdeviceptr ptr, CUdeviceptr *base, size_t *size) {
  *base = 0;
  *size = 0;
  return cu.MemGetAddressRange(base, size, ptr);
}

/* What is no block cannot be freed, and where it is the pool's the driver does not hear of it. */
static void wrong_frees(void) {
  static const size_t sizes[] = {100, 40000, 10 * MIB, 100 * MIB};
  CUdeviceptr block, keep, foreign, managed;
  size_t pitch = 0, i;
  char on_host[64];
  CU(MemAllocPitch(&foreign, &pitch, 1000, 100, 4));
  CU(MemAllocManaged(&managed, 5000, CU_MEM_ATTACH_GLOBAL));
  for (i = 0; i < 4; i++) {
    uint64_t calls;
    CU(MemAlloc(&keep, sizes[i]));
    CU(MemAlloc(&block, sizes[i]));
    calls = sim.call_count("cuMemFree") + sim.call_count("cuMemFreeAsync");
    CHECK_EQ(cu.MemFree(block + 4), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.MemFree(block + sizes[i] - 1), CUDA_ERROR_INVALID_VALUE);
    if (cu.MemFreeAsync != NULL) {
      CHECK_EQ(cu.MemFreeAsync(block + 8, NULL), CUDA_ERROR_INVALID_VALUE);
    }
    CU(MemFree(block));
    CHECK_EQ(cu.MemFree(block), CUDA_ERROR_INVALID_VALUE);
    if (cu.MemFreeAsync != NULL) {
      CHECK_EQ(cu.MemFreeAsync(block, NULL), CUDA_ERROR_INVALID_VALUE);
    }
    CHECK_EQ(cu.MemFree(block + 16), CUDA_ERROR_INVALID_VALUE);
    if (pooled) {
      CHECK_EQ(sim.call_count("cuMemFree") + sim.call_count("cuMemFreeAsync") - calls, 0);
    }
    CU(MemFree(keep));
  }
  CHECK_EQ(cu.MemFree((CUdeviceptr)(uintptr_t)on_host), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemFree(foreign + 4), CUDA_ERROR_INVALID_VALUE);
  CU(MemFree(foreign));
  CU(MemFree(managed));
  CHECK_EQ(cu.MemFree(foreign), CUDA_ERROR_INVALID_VALUE);
}

static void address_ranges(void) {
  static const size_t sizes[] = {100, 513, 40000, 10 * MIB + 4, 100 * MIB};
  CUdeviceptr block, base;
  size_t size, i;
  for (i = 0; i < 5; i++) {
    CU(MemAlloc(&block, sizes[i]));
    CHECK_EQ(range_of(block, &base, &size), 0);
    CHECK_EQ(base, block);
    CHECK_EQ(size, sizes[i]);
    CHECK_EQ(range_of(block + sizes[i] - 1, &base, &size), 0);
    CHECK_EQ(base, block);
    CHECK_EQ(range_of(block + sizes[i], &base, &size), CUDA_ERROR_NOT_FOUND);
    CU(MemGetAddressRange(NULL, &size, block + 1));
    CU(MemGetAddressRange(&base, NULL, block + 1));
    CU(MemGetAddressRange(NULL, NULL, block + 1));
    CU(CtxSetCurrent(NULL));
    CHECK_EQ(range_of(block, &base, &size), CUDA_ERROR_INVALID_CONTEXT);
    CU(CtxSetCurrent(primary));
    CU(MemFree(block));
    CHECK_EQ(range_of(block, &base, &size), CUDA_ERROR_NOT_FOUND);
  }
  CHECK_EQ(range_of(0, &base, &size), CUDA_ERROR_NOT_FOUND);
}

static uint64_t attribute(CUpointer_attribute which, CUdeviceptr ptr) {
  uint64_t value = 0;
  CU(PointerGetAttribute(&value, which, ptr));
  return value;
}

static void attributes(void) {
  static const size_t sizes[] = {100, 40000, 10 * MIB, 100 * MIB};
  CUipcMemHandle handle;
  CUdeviceptr block, other;
  uint64_t value, id;
  size_t i;
  for (i = 0; i < 4; i++) {
    CU(MemAlloc(&block, sizes[i]));
    CU(MemAlloc(&other, sizes[i]));
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_CONTEXT, block), (uintptr_t)primary);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block), CU_MEMORYTYPE_DEVICE);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, block + 3), block + 3);
    CHECK_EQ(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_HOST_POINTER, block),
             CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED, block), 0);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, block), 0);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, block),
             cu.IpcGetMemHandle(&handle, block) == 0);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, block + 99), block);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, block), sizes[i]);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_MAPPED, block), 1);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, block), 0);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, block), 0);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_MAPPING_SIZE, block), sizes[i]);
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, block + 99), block);
    id = attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, block);
    CHECK(id != attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, other));
    CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, block + 50), id);
    CHECK_EQ(cu.PointerGetAttribute(&value, (CUpointer_attribute)999, block), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.PointerGetAttribute(NULL, CU_POINTER_ATTRIBUTE_CONTEXT, block), CUDA_ERROR_INVALID_VALUE);
    if (sizes[i] % 512 != 0) { /* else there may be a neighbour */
      CHECK_EQ(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block + sizes[i]),
               CUDA_ERROR_INVALID_VALUE);
    }
    if (cu.PointerGetAttributes != NULL) {
      CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_CONTEXT,    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                     CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                     CU_POINTER_ATTRIBUTE_BUFFER_ID,  CU_POINTER_ATTRIBUTE_HOST_POINTER};
      uint64_t values[6] = {7, 7, 7, 0, 7, 7};
      void *places[6];
      int at;
      for (at = 0; at < 6; at++) {
        places[at] = &values[at];
      }
      CU(PointerGetAttributes(6, names, places, block + 20));
      CHECK_EQ(values[0], (uintptr_t)primary);
      CHECK_EQ(values[1], block);
      CHECK_EQ(values[2], sizes[i]);
      CHECK_EQ(values[3], 0);
      CHECK_EQ(values[4], id);
      CHECK_EQ(values[5], 0);
      CHECK_EQ(cu.PointerGetAttributes(0, names, places, block), CUDA_ERROR_INVALID_VALUE);
      CU(MemFree(block));
      values[3] = 5;
      CU(PointerGetAttributes(6, names, places, block + 20));
      CHECK_EQ(values[0], 0);
      CHECK_EQ((int)values[3], -2);
      CHECK_EQ(values[4], 0);
      CHECK_EQ(values[5], block + 20);
    } else {
      CU(MemFree(block));
    }
    CHECK_EQ(cu.PointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block),
             CUDA_ERROR_INVALID_VALUE);
    /* Whoever gets the address next is somebody else. */
    CU(CtxSynchronize());
    CU(MemAlloc(&block, sizes[i]));
    CHECK(attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, block) != id);
    CU(MemFree(block));
    CU(MemFree(other));
  }
}

/* Of the processor, in milliseconds, and the least of some tries: how busy the machine is does not count. */
static double time_of_pairs(void) {
  double least = 1e9;
  int try, i;
  for (try = 0; try < 10; try++) {
    struct timespec start, end;
    CUdeviceptr block;
    double took;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    for (i = 0; i < 500; i++) {
      CU(MemAlloc(&block, 600));
      CU(MemFree(block));
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    took = (double)(end.tv_sec - start.tv_sec) * 1e3 + (double)(end.tv_nsec - start.tv_nsec) / 1e6;
    least = took < least ? took : least;
  }
  return least;
}

/* Blocks that have been asked for their ids do not make the frees of others slow. */
static void many_ids(void) {
  enum { COUNT = 40000 };
  static CUdeviceptr blocks[COUNT];
  double before, after;
  int i;
  for (i = 0; i < COUNT; i++) {
    CU(MemAlloc(&blocks[i], 512));
  }
  before = time_of_pairs();
  for (i = 0; i < COUNT; i++) {
    CHECK(attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, blocks[i]) != 0);
  }
  after = time_of_pairs();
  CHECK(after < 8 * before);
  for (i = 0; i < COUNT; i++) {
    CU(MemFree(blocks[i]));
  }
}

/* For another process: the whole of one driver allocation, or nothing. With memory by cuMemAlloc that is
 * sometimes so by chance. */
static void handles_for_other_processes(void) {
  static const size_t sizes[] = {100, 40000, 100 * MIB, 100 * MIB + 1};
  CUipcMemHandle handle;
  CUmemGenericAllocationHandle chunk = 0;
  CUdeviceptr block;
  size_t i;
  for (i = 0; i < 4; i++) {
    int whole = !pooled || sizes[i] >= 100 * MIB;
    CU(MemAlloc(&block, sizes[i]));
    CHECK_EQ(cu.IpcGetMemHandle(&handle, block), whole ? 0 : CUDA_ERROR_NOT_SUPPORTED);
    CHECK_EQ(cu.IpcGetMemHandle(&handle, block + 5), whole ? 0 : CUDA_ERROR_NOT_SUPPORTED);
    if (cu.MemRetainAllocationHandle != NULL) {
      CHECK_EQ(cu.MemRetainAllocationHandle(&chunk, (void *)(uintptr_t)block), CUDA_ERROR_INVALID_VALUE);
    }
    CU(MemFree(block));
    CHECK_EQ(cu.IpcGetMemHandle(&handle, block), CUDA_ERROR_INVALID_VALUE);
  }
}

static size_t free_memory(void) {
  size_t available = 0, total = 0;
  CU(MemGetInfo(&available, &total));
  CHECK_EQ(total, 8 * GIB);
  CHECK(available <= total);
  return available;
}

static void memory_info(void) {
  static const size_t sizes[] = {100, MIB, 30 * MIB, 100 * MIB, 2 * GIB};
  size_t before = free_memory(), i, value = 0;
  CUdeviceptr block;
  for (i = 0; i < 5; i++) {
    CU(MemAlloc(&block, sizes[i]));
    CHECK(free_memory() <= before - sizes[i]);
    CU(MemFree(block));
    CHECK_EQ(free_memory(), before);
  }
  /* As the driver bears it; the simulated one does not. */
  CHECK_EQ(cu.MemGetInfo(NULL, &value), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemGetInfo(&value, NULL), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(cu.MemGetInfo(NULL, NULL), CUDA_ERROR_INVALID_VALUE);
}

/* Memory that the device still writes must not be anybody else's: the free waits, or the memory does. */
static void freed_under_work(void) {
  static const size_t sizes[] = {4096, 3 * MIB, 100 * MIB};
  size_t i;
  for (i = 0; i < 3; i++) {
    CUstream first, second;
    CUdeviceptr block, again[4];
    unsigned word = 0;
    int at;
    CU(StreamCreate(&first, CU_STREAM_NON_BLOCKING));
    CU(StreamCreate(&second, CU_STREAM_NON_BLOCKING));
    CU(MemAlloc(&block, sizes[i]));
    CHECK_EQ(sim.spin(first, 30000), 0);
    CU(MemsetD32Async(block, 0xAAAAAAAA, sizes[i] / 4, first));
    CU(MemFree(block));
    for (at = 0; at < 4; at++) {
      CU(MemAlloc(&again[at], sizes[i]));
      CU(MemsetD32Async(again[at], 0xBBBBBBBB, sizes[i] / 4, second));
    }
    CU(StreamSynchronize(first));
    CU(StreamSynchronize(second));
    for (at = 0; at < 4; at++) {
      CU(MemcpyDtoH(&word, again[at] + sizes[i] - 4, 4));
      CHECK_EQ(word, 0xBBBBBBBB);
      CU(MemFree(again[at]));
    }
    CU(StreamDestroy(first));
    CU(StreamDestroy(second));
  }
}

static void stream_ordered(void) {
  CUstream stream, other;
  CUdeviceptr block, next, base;
  unsigned word = 0;
  size_t size = 0;
  uint64_t live;
  if (cu.MemAllocAsync == NULL) {
    check_skip("this version has no stream-ordered memory");
    return;
  }
  CU(StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(StreamCreate(&other, CU_STREAM_NON_BLOCKING));
  live = pooled ? stats_of_pool().live_blocks : 0;
  CU(MemAllocAsync(&block, 5 * MIB, stream));
  check_served(live);
  CHECK_EQ(sim.spin(stream, 20000), 0);
  CU(MemsetD32Async(block, 0x77, 5 * MIB / 4, stream));
  CU(MemFreeAsync(block, stream));
  CU(MemAllocAsync(&next, 5 * MIB, other));
  CU(MemsetD32Async(next, 0x88, 5 * MIB / 4, other));
  CU(StreamSynchronize(other));
  CU(StreamSynchronize(stream));
  CU(MemcpyDtoH(&word, next, 4));
  CHECK_EQ(word, 0x88);
  CHECK_EQ(cu.MemGetAddressRange(&base, &size, next + 5), 0);
  CHECK_EQ(base, next);
  CHECK_EQ(size, 5 * MIB);
  CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_CONTEXT, next), 0);
  CHECK_EQ(attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, next), 5 * MIB);
  /* Each kind of memory may be freed the other way. */
  CU(MemFree(next));
  CU(MemAlloc(&block, 100));
  CU(MemFreeAsync(block, stream));
  CHECK_EQ(cu.MemFreeAsync(block, stream), CUDA_ERROR_INVALID_VALUE);
  /* The default streams are the current context's. */
  CU(MemAllocAsync(&block, 100, NULL));
  CU(CtxSetCurrent(NULL));
  CHECK_EQ(cu.MemAllocAsync(&next, 100, NULL), CUDA_ERROR_INVALID_CONTEXT);
  CHECK_EQ(cu.MemFreeAsync(block, NULL), CUDA_ERROR_INVALID_CONTEXT);
  CU(MemAllocAsync(&next, 100, stream));
  CU(MemFreeAsync(next, stream));
  CU(CtxSetCurrent(primary));
  CU(MemFreeAsync(block, CU_STREAM_PER_THREAD));
  CU(StreamSynchronize(stream));
  CU(StreamSynchronize(CU_STREAM_PER_THREAD));
  CU(StreamDestroy(stream));
  CU(StreamDestroy(other));
}

/* 7 of 8 GiB lie idle in pieces, and then 4 are asked for. */
static void pieces_give_way(void) {
  enum { PIECES = 448 };
  static CUdeviceptr pieces[PIECES];
  CUdeviceptr large = 0;
  int i;
  for (i = 0; i < PIECES; i++) {
    CU(MemAlloc(&pieces[i], 16 * MIB));
  }
  CHECK_EQ(cu.MemAlloc(&large, 4 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
  for (i = 0; i < PIECES; i++) {
    CU(MemFree(pieces[i]));
  }
  if (pooled) {
    CHECK(stats_of_pool().reserved_bytes >= 7 * GIB);
  }
  CU(MemAlloc(&large, 4 * GIB));
  CU(MemFree(large));
  CU(MemAlloc(&pieces[0], 16 * MIB));
  CU(MemFree(pieces[0]));
  /* What the pool does not serve has its memory too. */
  CU(MemAllocManaged(&large, 7 * GIB, CU_MEM_ATTACH_GLOBAL));
  CU(MemFree(large));
}

static void *free_there(void *ptr) {
  CHECK_EQ(cu.MemFree((CUdeviceptr)(uintptr_t)ptr), 0);
  return NULL;
}

static void freed_by_a_thread_without_context(void) {
  pthread_t thread;
  CUdeviceptr block;
  CU(MemAlloc(&block, 100000));
  CHECK_EQ(pthread_create(&thread, NULL, free_there, (void *)(uintptr_t)block), 0);
  pthread_join(thread, NULL);
  CHECK_EQ(cu.MemFree(block), CUDA_ERROR_INVALID_VALUE);
}

static void *churn(void *seed) {
  uint64_t state = (uintptr_t)seed;
  CUdeviceptr blocks[16] = {0};
  int step;
  CHECK_EQ(cu.CtxSetCurrent(primary), 0);
  for (step = 0; step < 2000; step++) {
    size_t at = random_below(&state, 16);
    if (blocks[at] != 0) {
      CHECK_EQ(cu.MemFree(blocks[at]), 0);
    }
    CHECK_EQ(cu.MemAlloc(&blocks[at], random_size(&state, 20 * MIB)), 0);
  }
  for (step = 0; step < 16; step++) {
    CHECK_EQ(cu.MemFree(blocks[step]), 0);
  }
  return NULL;
}

static void threads(void) {
  pthread_t thread[4];
  size_t before = free_memory();
  uintptr_t i;
  for (i = 0; i < 4; i++) {
    CHECK_EQ(pthread_create(&thread[i], NULL, churn, (void *)(i + 1)), 0);
  }
  for (i = 0; i < 4; i++) {
    pthread_join(thread[i], NULL);
  }
  CU(CtxSynchronize());
  CHECK_EQ(free_memory(), before);
}

int main(int count, char **arguments) {
  if (count != 3) {
    return 2;
  }
  pooled = strcmp(arguments[2], "pool") == 0;
  primary = client_start(arguments[1]);
  helpers_open();
  RUN(plain_blocks);
  RUN(wrong_arguments);
  RUN(wrong_frees);
  RUN(address_ranges);
  RUN(attributes);
  if (pooled) {
    RUN(many_ids); /* the simulated driver's own blocks are not made for so many */
  }
  RUN(handles_for_other_processes);
  RUN(memory_info);
  RUN(freed_under_work);
  RUN(stream_ordered);
  RUN(pieces_give_way);
  RUN(freed_by_a_thread_without_context);
  RUN(threads);
  if (pooled) {
    CHECK_EQ(stats_of_pool().live_blocks, 0);
  }
  return client_result();
}
