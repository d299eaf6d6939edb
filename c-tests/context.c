/* context.c: the caller's contexts and devices. The current context stays as it is; blocks belong to the
 * context they were allocated in and go with it; devices have counters of their own. Two devices where the
 * driver has them. */

#include "check.h"
#include "driver.h"

static CUcontext primary;
static int devices;

static void use_everything(void) {
  pool_request request = request_of(3000);
  CUstream stream = CU_STREAM_PER_THREAD;
  void *one = NULL, *two = NULL, *three = NULL;
  int device;
  CHECK_STATUS(POOL_OK, pool_alloc(&one, 7 * MIB));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&two, 1000, stream));
  CHECK_STATUS(POOL_OK, pool_use_on_stream(two, CU_STREAM_LEGACY));
  for (device = 0; device < devices; device++) {
    request.device = device;
    CHECK_STATUS(POOL_OK, pool_alloc_with(&three, &request));
    CHECK_EQ(info_of(three).device, device);
    CHECK_STATUS(POOL_OK, pool_free(three));
    stats_of(device);
    CHECK_STATUS(POOL_OK, pool_trim(NULL, device, 0, NULL));
  }
  CHECK_STATUS(POOL_OK, pool_free(one));
  CHECK_STATUS(POOL_OK, pool_free_async(two, stream));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&one, SIZE_MAX));
  CHECK_STATUS(POOL_OK, pool_trim(NULL, POOL_DEVICE_CURRENT, 0, NULL));
}

static void current_context_is_left_alone(void) {
  CUcontext contexts[4] = {NULL, NULL, NULL, NULL}, now;
  int count = 2, i;
  CU(CtxCreate(&contexts[1], 0, 0));
  contexts[0] = primary;
  if (devices > 1) {
    CU(DevicePrimaryCtxRetain(&contexts[count++], 1));
  }
  for (i = 0; i < count; i++) {
    CU(CtxSetCurrent(contexts[i]));
    use_everything();
    now = NULL;
    CU(CtxGetCurrent(&now));
    CHECK(now == contexts[i]);
    CU(CtxSynchronize());
    CHECK_STATUS(POOL_OK, pool_trim(NULL, POOL_DEVICE_CURRENT, 0, NULL));
  }
  CU(CtxDestroy(contexts[1]));
  CU(CtxSetCurrent(primary));
}

/* What is current does not matter to a free. */
static void freed_with_any_context_current(void) {
  static const size_t sizes[] = {100, 50000, 9 << 20};
  CUcontext other = NULL, now;
  int way, i;
  CU(CtxCreate(&other, 0, 0));
  for (way = 0; way < 3; way++) {
    for (i = 0; i < 3; i++) {
      void *block = NULL;
      CU(CtxSetCurrent(primary));
      CHECK_STATUS(POOL_OK, pool_alloc(&block, sizes[i]));
      if (way == 2 && devices > 1) {
        CU(DevicePrimaryCtxRetain(&now, 1));
      } else {
        now = way == 0 ? NULL : other;
      }
      CU(CtxSetCurrent(now));
      CHECK_EQ(info_of(block).device, 0);
      CHECK_STATUS(POOL_OK, pool_free(block));
    }
  }
  CU(CtxSetCurrent(primary));
  CU(CtxDestroy(other));
  CHECK_TRIMS_TO_ZERO(0);
}

static void devices_have_their_own_counters(void) {
  CUcontext second = NULL;
  pool_request request = request_of(10 * MIB);
  void *zero = NULL, *one = NULL, *async = NULL;
  if (devices < 2) {
    check_skip("needs two devices");
    return;
  }
  request.device = 1;
  CHECK_STATUS(POOL_OK, pool_alloc(&zero, 5 * MIB));
  CHECK_STATUS(POOL_OK, pool_alloc_with(&one, &request));
  CHECK_EQ(info_of(zero).device, 0);
  CHECK_EQ(info_of(one).device, 1);
  CHECK_EQ(stats_of(0).requested_bytes, 5 * MIB);
  CHECK_EQ(stats_of(1).requested_bytes, 10 * MIB);
  CHECK_STATS(0);
  CHECK_STATS(1);
  CU(DevicePrimaryCtxRetain(&second, 1));
  CU(CtxSetCurrent(second));
  CHECK_EQ(stats_of(POOL_DEVICE_CURRENT).requested_bytes, 10 * MIB);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&async, 3 * MIB, CU_STREAM_PER_THREAD));
  CHECK_EQ(info_of(async).device, 1);
  fill(async, 3 * MIB, 0xd1, CU_STREAM_PER_THREAD);
  CU(StreamSynchronize(CU_STREAM_PER_THREAD));
  CHECK(holds(async, 3 * MIB, 0xd1));
  CHECK_STATUS(POOL_OK, pool_free_async(async, CU_STREAM_PER_THREAD));
  /* Freed from the wrong device. */
  CHECK_STATUS(POOL_OK, pool_free(zero));
  CHECK_EQ(stats_of(0).live_blocks, 0);
  CU(CtxSetCurrent(primary));
  CHECK_STATUS(POOL_OK, pool_free(one));
  CHECK_EQ(stats_of(1).live_blocks, 0);
  CHECK_TRIMS_TO_ZERO(0);
  CU(CtxSetCurrent(second));
  CHECK_TRIMS_TO_ZERO(1);
  CU(CtxSetCurrent(primary));
}

/* One device's work must be waited for on that device, whatever is current: late writes show it. */
static void each_device_waits_for_its_own_work(void) {
  CUcontext second = NULL;
  CUstream streams[2];
  int device;
  if (devices < 2) {
    check_skip("needs two devices");
    return;
  }
  CU(DevicePrimaryCtxRetain(&second, 1));
  for (device = 0; device < 2; device++) {
    CU(CtxSetCurrent(device ? second : primary));
    streams[device] = new_stream(CU_STREAM_NON_BLOCKING);
  }
  for (device = 0; device < 2; device++) {
    void *old = NULL, *new = NULL;
    CU(CtxSetCurrent(device ? second : primary));
    CHECK_STATUS(POOL_OK, pool_alloc(&old, 8 * MIB));
    busy(streams[device], 60);
    fill(old, 8 * MIB, 0x01d, streams[device]);
    CU(CtxSetCurrent(device ? primary : second));
    CHECK_STATUS(POOL_OK, pool_free(old));
    /* A trim that looks at the wrong device would unmap memory that is being written. */
    CHECK_STATUS(POOL_OK, pool_trim(NULL, device, 0, NULL));
    CU(CtxSetCurrent(device ? second : primary));
    CHECK_STATUS(POOL_OK, pool_alloc(&new, 8 * MIB));
    fill(new, 8 * MIB, 0x4e5, CU_STREAM_PER_THREAD);
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    CU(StreamSynchronize(streams[device]));
    CHECK(holds(new, 8 * MIB, 0x4e5));
    CHECK_STATUS(POOL_OK, pool_free(new));
    CHECK_TRIMS_TO_ZERO(device);
    CU(StreamDestroy(streams[device]));
  }
  CU(CtxSetCurrent(primary));
}

/* ---- contexts that go ---- */

enum { LOST = 5 };
static const size_t lost_sizes[LOST] = {100, 50000, 1 << 20, 9 << 20, 40 << 20};

static void allocate_to_lose(void **blocks) {
  int i;
  for (i = 0; i < LOST; i++) {
    CHECK_STATUS(POOL_OK, i % 2 ? pool_alloc(&blocks[i], lost_sizes[i])
                                : pool_alloc_async(&blocks[i], lost_sizes[i], CU_STREAM_PER_THREAD));
  }
  /* Cached, pending and recorded memory goes too. */
  {
    void *block = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * MIB));
    CHECK_STATUS(POOL_OK, pool_free(block));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 5 * MIB, CU_STREAM_PER_THREAD));
    CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_PER_THREAD));
  }
  check_blocks_were_lost = 1;
}

/* Chunks of `cuMemAlloc` may come back at the address of one that was lost, and then nobody can tell. */
static int addresses_live_again(void) {
  return default_options().backend == POOL_BACKEND_MALLOC;
}

static void check_lost(void **blocks) {
  int i;
  for (i = 0; i < LOST; i++) {
    pool_block_info info;
    memset(&info, 0xA5, sizeof info);
    info.struct_size = sizeof info;
    CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_query(blocks[i], &info));
    CHECK(info.base == NULL);
    CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_use_on_stream(blocks[i], NULL));
    CHECK_STATUS(POOL_ERROR_CONTEXT_LOST,
                 i % 2 ? pool_free(blocks[i]) : pool_free_async(blocks[i], CU_STREAM_PER_THREAD));
  }
}

/* The next generation: works, shares nothing with the old blocks, and goes back whole with the old memory. */
static void check_next_generation(void **old) {
  void *blocks[LOST];
  int i, j, status;
  for (i = 0; i < LOST; i++) {
    size_t bytes = lost_sizes[i] & ~(size_t)3;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&blocks[i], lost_sizes[i], CU_STREAM_PER_THREAD));
    fill(blocks[i], bytes, 0x700u + (unsigned)i, CU_STREAM_PER_THREAD);
  }
  CU(StreamSynchronize(CU_STREAM_PER_THREAD));
  /* Dead blocks stay dead, unless the address lives again. */
  for (i = 0; i < LOST; i++) {
    int again = 0;
    for (j = 0; j < LOST; j++) {
      again |= blocks[j] == old[i];
    }
    if (!again) {
      status = pool_free(old[i]);
      CHECK(status == POOL_ERROR_CONTEXT_LOST || status == POOL_ERROR_INVALID_POINTER ||
            (addresses_live_again() && status == POOL_ERROR_DOUBLE_FREE));
    }
  }
  for (i = 0; i < LOST; i++) {
    CHECK(holds(blocks[i], lost_sizes[i] & ~(size_t)3, 0x700u + (unsigned)i));
    CHECK_STATUS(POOL_OK, pool_free_async(blocks[i], CU_STREAM_PER_THREAD));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void destroyed_context(void) {
  int round;
  for (round = 0; round < 3; round++) {
    void *blocks[LOST];
    CUcontext context = NULL;
    CU(CtxCreate(&context, 0, 0));
    allocate_to_lose(blocks);
    CU(CtxDestroy(context));
    CU(CtxSetCurrent(primary));
    check_lost(blocks);
    check_next_generation(blocks);
  }
}

/* Before anybody has made the context live again, and after. */
static void reset_primary_context(void) {
  int revived;
  for (revived = 0; revived < 2; revived++) {
    void *blocks[LOST];
    allocate_to_lose(blocks);
    CU(DevicePrimaryCtxReset(0));
    if (revived) {
      CU(DevicePrimaryCtxRetain(&primary, 0));
      CU(CtxSetCurrent(primary));
    }
    check_lost(blocks);
    if (!revived) {
      CU(DevicePrimaryCtxRetain(&primary, 0));
      CU(CtxSetCurrent(primary));
    }
    check_next_generation(blocks);
  }
}

/* The first thing after the reset is an allocation, with old blocks still in hand. */
static void allocation_right_after_a_reset(void) {
  void *blocks[LOST], *block = NULL;
  allocate_to_lose(blocks);
  CU(DevicePrimaryCtxReset(0));
  CU(CtxSetCurrent(NULL));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * MIB));
  CU(DevicePrimaryCtxRetain(&primary, 0));
  CU(CtxSetCurrent(primary));
  fill(block, 5 * MIB, 0x55, NULL);
  CHECK(holds(block, 5 * MIB, 0x55));
  CHECK_STATUS(POOL_OK, pool_free(block));
  if (!addresses_live_again()) {
    check_lost(blocks);
  }
  check_next_generation(blocks);
}

int main(void) {
  /* A real driver has the devices it has. */
  setenv("CUDASIM_DEVICES", "2", 0);
  primary = driver_start(0);
  CU(DeviceGetCount(&devices));
  devices = devices > 2 ? 2 : devices;
  RUN(current_context_is_left_alone);
  RUN(freed_with_any_context_current);
  RUN(devices_have_their_own_counters);
  RUN(each_device_waits_for_its_own_work);
  RUN(destroyed_context);
  RUN(reset_primary_context);
  RUN(allocation_right_after_a_reset);
  return driver_result();
}
