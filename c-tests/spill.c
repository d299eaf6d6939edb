/* spill.c: host memory in place of device memory (option `spill:host`): usable, counted apart from the
 * device's, and given back as soon as the device is finished with it. */

#include "check.h"
#include "driver.h"
#include "pools.h"

static CUcontext primary;
static int version;

/* Whether the driver has such memory at all. */
static int can_spill(void) {
  return version >= 12020;
}

static pool_options spilling(void) {
  pool_options options = default_options();
  options.spill = POOL_SPILL_HOST;
  return options;
}

static pool_t *spilling_pool(void) {
  pool_options options = spilling();
  return new_pool(&options);
}

static uint64_t spilled(pool_t *pool) {
  return pool_stats_of(pool, 0).spilled_bytes;
}

/* A device without room for a GiB. */
static void *fill_device(void) {
  return take(NULL, 7 * GIB + 100 * MIB);
}

static void finish(pool_t *pool) {
  CU(CtxSynchronize());
  if (pool != NULL) {
    CHECK_STATUS(POOL_OK, pool_destroy(pool));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void off_is_the_default(void) {
  void *live = fill_device();
  pool_t *pool = new_pool(NULL);
  CHECK_EQ(default_options().spill, POOL_SPILL_OFF);
  refuse(NULL, GIB);
  refuse(pool, GIB);
  CHECK_EQ(stats_of(0).spill_count, 0);
  give(live);
  finish(pool);
}

static void a_driver_without_host_memory_answers_out_of_memory(void) {
  pool_t *pool = spilling_pool();
  void *live = fill_device();
  refuse(pool, GIB);
  CHECK(oom_info().rungs_tried & (1 << 9));
  CHECK_EQ(pool_stats_of(pool, 0).spill_count, 0);
  CHECK_EQ(spilled(pool), 0);
  give(live);
  finish(pool);
}

/* The device can use it like its own, and it is counted apart. */
static void the_device_uses_host_memory(void) {
  static const size_t sizes[] = {100, 5000, 3 << 20, 128 << 20};
  enum { SIZES = sizeof sizes / sizeof sizes[0] };
  pool_t *pool = spilling_pool(), *pools[2] = {NULL, NULL};
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  CUdeviceptr foreign = 0;
  void *live, *blocks[SIZES];
  uint64_t sum = 0;
  int i;
  pools[1] = pool;
  live = take(NULL, 64 * MIB);
  fill(live, 64 * MIB, 0x111, stream);
  CU(MemAlloc(&foreign, 8 * GIB - 64 * MIB));
  for (i = 0; i < SIZES; i++) {
    blocks[i] = i % 2 ? take_on(pool, sizes[i], stream) : take(pool, sizes[i]);
    sum += sizes[i];
    CHECK_EQ(pool_stats_of(pool, 0).spill_count, i + 1);
    CHECK_EQ(pool_stats_of(pool, 0).oom_recovered_count, i + 1);
    CHECK(spilled(pool) >= sum && spilled(pool) <= sum + (uint64_t)(i + 1) * 2 * MIB);
    CHECK_EQ(pool_stats_of(pool, 0).reserved_bytes, spilled(pool));
    CHECK_EQ(pool_stats_of(pool, 0).requested_bytes, sum);
    CHECK_POOLS(pools, 2, 8 * GIB - 64 * MIB);
    fill(blocks[i], sizes[i] & ~(size_t)3, 0x500u + (unsigned)i, stream);
  }
  CHECK_EQ(stats_of(0).spilled_bytes, 0);
  /* A copy from device to host memory and back. */
  CU(MemcpyDtoDAsync((CUdeviceptr)(uintptr_t)blocks[3], (CUdeviceptr)(uintptr_t)live, 64 * MIB, stream));
  CU(MemcpyDtoDAsync((CUdeviceptr)(uintptr_t)live + 32 * MIB, (CUdeviceptr)(uintptr_t)blocks[2],
                     3 * MIB, stream));
  CU(StreamSynchronize(stream));
  CHECK(holds(blocks[3], 64 * MIB, 0x111));
  CHECK(holds((char *)blocks[3] + 64 * MIB, 4 * MIB, 0x503));
  CHECK(holds((char *)live + 32 * MIB, 3 * MIB, 0x502));
  for (i = 0; i < 3; i++) {
    CHECK(holds(blocks[i], sizes[i] & ~(size_t)3, 0x500u + (unsigned)i));
  }
  for (i = 0; i < SIZES; i++) {
    pool_block_info info = info_of((char *)blocks[i] + sizes[i] - 1);
    CHECK(info.base == blocks[i] && info.pool == pool && info.usable_size >= sizes[i]);
    CHECK_EQ((uintptr_t)blocks[i] % POOL_DEFAULT_ALIGNMENT, 0);
    give(blocks[i]);
    CHECK(pool_free(blocks[i]) != POOL_OK);
  }
  CU(CtxSynchronize());
  CHECK_STATUS(POOL_OK, pool_trim(pool, 0, 0, NULL));
  CHECK_EQ(spilled(pool), 0);
  give(live);
  CU(MemFree(foreign));
  CU(StreamDestroy(stream));
  finish(pool);
}

static void large_alignments_are_kept(void) {
  pool_options defaults = default_options(), options = spilling();
  pool_request request = request_of(5 * MIB);
  void *live = fill_device(), *rest = take(NULL, 900 * MIB), *block = NULL;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  for (request.alignment = 2 * MIB; request.alignment <= GIB; request.alignment *= 8) {
    request.size = 100 * MIB;
    CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
    CHECK_EQ((uintptr_t)block % request.alignment, 0);
    CHECK(spilled(NULL) > 0);
    give(block);
  }
  /* Memory that is one allocation of the driver's is not to be had this way. */
  request.alignment = 0;
  request.flags = POOL_REQUEST_OWN_ALLOCATION;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc_with(&block, &request));
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  give(live);
  give(rest);
  finish(NULL);
}

/* Freed, it goes back with the next request that looks for memory, as soon as the device is finished with it
 * and no sooner, and serves nobody else. */
static void it_goes_back_once_finished_with(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  uint64_t reservations = sim.live_reservations();
  int way;
  for (way = 0; way < 4; way++) {
    pool_t *pool = spilling_pool();
    void *live = fill_device(), *block, *next;
    uint64_t before;
    block = take_on(pool, GIB, stream);
    give(take(pool, 100));
    CHECK(spilled(pool) >= GIB);
    if (way % 2) {
      busy(stream, 150);
      fill(block, 8 * MIB, 0x01d, stream); /* the simulated driver tells if that is unmapped under the work */
    }
    CHECK_STATUS(POOL_OK, way / 2 ? pool_free_async(block, stream) : pool_free(block));
    before = pool_stats_of(pool, 0).spill_count;
    next = take(pool, GIB - 8 * MIB);
    CHECK_EQ(pool_stats_of(pool, 0).spill_count, before + 1);
    fill(next, 8 * MIB, 0x4e3, CU_STREAM_PER_THREAD);
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    CU(StreamSynchronize(stream));
    CHECK(holds(next, 8 * MIB, 0x4e3));
    /* The device has room again: no more host memory, and the old goes back on the way. */
    give(live);
    give(next);
    CU(CtxSynchronize());
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    next = take(pool, 2 * GIB);
    CHECK_EQ(pool_stats_of(pool, 0).spill_count, before + 1);
    give(next);
    give(take(pool, 3 * GIB));
    CHECK_EQ(spilled(pool), 0);
    finish(pool);
  }
  CHECK_EQ(sim.live_reservations(), reservations);
  CU(StreamDestroy(stream));
}

/* The limit is about the device. */
static void limits_do_not_count_host_memory(void) {
  pool_options options = spilling();
  pool_t *pool, *pools[2] = {NULL, NULL};
  void *device, *host, *more;
  options.limit_bytes = GIB;
  pools[1] = pool = new_pool(&options);
  device = take(pool, GIB - 100 * MIB);
  CHECK_EQ(spilled(pool), 0);
  host = take(pool, 2 * GIB);
  CHECK(spilled(pool) >= 2 * GIB);
  CHECK(held_by(pool) - spilled(pool) <= GIB);
  give(device);
  CU(CtxSynchronize());
  CHECK_STATUS(POOL_OK, pool_trim(pool, 0, SIZE_MAX, NULL));
  /* All of the limit can be had while host memory is live. */
  more = take(pool, GIB - 8 * MIB);
  CHECK_EQ(pool_stats_of(pool, 0).spill_count, 1);
  CHECK(held_by(pool) - spilled(pool) >= GIB - 8 * MIB);
  CHECK_POOLS(pools, 2, 0);
  give(more);
  give(host);
  finish(pool);
}

/* The report's numbers are the device's where they say so. */
static void the_report_adds_up(void) {
  pool_options options = spilling();
  pool_request request = request_of(3 * GIB);
  pool_t *pool;
  void *live = take(NULL, 2 * GIB), *host, *block = NULL;
  pool_oom_info info;
  pool_stats stats;
  options.limit_bytes = 5 * GIB;
  pool = new_pool(&options);
  host = take(pool, 6 * GIB);
  stats = pool_stats_of(pool, 0);
  CHECK(stats.spilled_bytes >= 6 * GIB);
  request.pool = pool;
  request.size = 5 * GIB + GIB / 2;
  request.flags = POOL_REQUEST_OWN_ALLOCATION;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc_with(&block, &request));
  info = oom_info();
  CHECK_EQ(info.reserved_bytes,
           info.live_bytes + info.cached_bytes + info.pending_bytes + info.overhead_bytes);
  CHECK_EQ(info.reserved_bytes, stats.reserved_bytes);
  CHECK_EQ(info.device_total_bytes, info.device_free_bytes + info.pools_bytes + info.foreign_bytes);
  CHECK_EQ(info.pools_bytes, held_by(NULL));
  CHECK_EQ(info.foreign_bytes, 0);
  CHECK_EQ(info.device_total_bytes, 8 * GIB);
  CHECK_EQ(info.advice, POOL_ADVICE_RAISE_LIMIT);
  /* Live host memory takes nothing of the limit: the device is in the way of this one. */
  give(live);
  live = take(NULL, 5 * GIB);
  request.size = 4 * GIB;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc_with(&block, &request));
  CHECK_EQ(oom_info().advice, POOL_ADVICE_USE_LESS);
  give(live);
  give(host);
  finish(pool);
}

static void it_goes_with_its_context(void) {
  pool_options defaults = default_options(), options = spilling();
  CUcontext context = NULL;
  void *live = fill_device(), *lost, *freed, *block;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CU(CtxCreate(&context, 0, 0));
  lost = take(NULL, GIB);
  freed = take(NULL, GIB);
  give(freed);
  check_blocks_were_lost = 1;
  CU(CtxDestroy(context));
  CU(CtxSetCurrent(primary));
  CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(lost));
  CHECK_EQ(spilled(NULL), 0);
  /* In the other context it still serves. */
  block = take(NULL, GIB);
  CHECK(spilled(NULL) >= GIB);
  fill(block, MIB, 0x77, NULL);
  CHECK(holds(block, MIB, 0x77));
  give(block);
  give(live);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  finish(NULL);
}

int main(void) {
  primary = driver_start(0);
  if (!needs_sim()) { /* the sizes are made for its device of 8 GiB */
    return driver_result();
  }
  CU(DriverGetVersion(&version));
  RUN(off_is_the_default);
  if (!can_spill()) {
    RUN(a_driver_without_host_memory_answers_out_of_memory);
    return driver_result();
  }
  RUN(the_device_uses_host_memory);
  RUN(large_alignments_are_kept);
  RUN(it_goes_back_once_finished_with);
  RUN(limits_do_not_count_host_memory);
  RUN(the_report_adds_up);
  RUN(it_goes_with_its_context);
  return driver_result();
}
