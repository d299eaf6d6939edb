/* waiting.c: one thread waits in the library for the device, and what the device is doing may need another
 * thread of the program to go on (a collective operation does). So no other thread's call may wait for the
 * first. */

#include "check.h"
#include "driver.h"

enum { SETTLE_MS = 6000 };

static CUcontext context;
static int released;

/* A kernel that ends when another thread has got somewhere; gives up after a while, so that it can fail. */
static void wait_for_release(void *unused) {
  double start = now_ms();
  (void)unused;
  while (!__atomic_load_n(&released, __ATOMIC_SEQ_CST) && now_ms() - start < 2 * SETTLE_MS) {
    sleep_ms(1);
  }
}

static void *waits_in_trim(void *unused) {
  (void)unused;
  CU(CtxSetCurrent(context));
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
  return NULL;
}

static void *waits_in_alloc(void *unused) {
  void *block = NULL;
  (void)unused;
  CU(CtxSetCurrent(context));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 50 * MIB));
  CHECK_STATUS(POOL_OK, pool_free(block));
  return NULL;
}

static void *waits_in_stream_alloc(void *stream) {
  void *block = NULL;
  CU(CtxSetCurrent(context));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 50 * MIB, (CUstream)stream));
  CHECK_STATUS(POOL_OK, pool_free_async(block, (CUstream)stream));
  return NULL;
}

#define CHECK_AT_ONCE(call)                                                      \
  do {                                                                           \
    double start = now_ms();                                                     \
    CHECK_STATUS(POOL_OK, call);                                                 \
    CHECK_TOOK(now_ms() - start, 0);                                             \
  } while (0)

static void others_go_on(void *(*waiter)(void *)) {
  pool_options defaults = default_options(), options = defaults;
  CUstream blocked = new_stream(CU_STREAM_NON_BLOCKING), other = new_stream(CU_STREAM_NON_BLOCKING);
  void *small[32], *old = NULL, *live = NULL, *block = NULL;
  pool_block_info info;
  pool_stats stats;
  struct check_thread thread;
  int i;
  options.settle_ms = SETTLE_MS;
  /* Not enough for the waiter beside the old block, however the chunks of the small ones are rounded. */
  options.limit_bytes = 110 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  /* Room among small blocks, a live block, and a large one that waits for the blocked stream. */
  for (i = 0; i < 32; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc_async(&small[i], 1000, other));
  }
  for (i = 0; i < 32; i += 2) {
    CHECK_STATUS(POOL_OK, pool_free_async(small[i], other));
  }
  CHECK_STATUS(POOL_OK, pool_alloc_async(&live, 4 * MIB, other));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&old, 60 * MIB, blocked));
  __atomic_store_n(&released, 0, __ATOMIC_SEQ_CST);
  CU(LaunchHostFunc(blocked, wait_for_release, NULL));
  CHECK_STATUS(POOL_OK, pool_free_async(old, blocked));
  start_thread(&thread, waiter, other);
  sleep_ms(100);

  info.struct_size = sizeof info;
  stats.struct_size = sizeof stats;
  for (i = 0; i < 20; i++) {
    CHECK_AT_ONCE(pool_alloc_async(&block, 1000, other));
    CHECK_AT_ONCE(pool_query(block, &info));
    CHECK_AT_ONCE(pool_use_on_stream(block, CU_STREAM_PER_THREAD));
    CHECK_AT_ONCE(pool_free_async(block, other));
    CHECK_AT_ONCE(pool_get_stats(NULL, 0, &stats));
    if (check_failures > 0) {
      break;
    }
  }
  CHECK_AT_ONCE(pool_free(live));
  CHECK_AT_ONCE(pool_free(small[1]));
  CHECK(!__atomic_load_n(&released, __ATOMIC_SEQ_CST));
  __atomic_store_n(&released, 1, __ATOMIC_SEQ_CST);
  join_thread(&thread);

  for (i = 3; i < 32; i += 2) {
    CHECK_STATUS(POOL_OK, pool_free_async(small[i], other));
  }
  CHECK_TRIMS_TO_ZERO(0);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(StreamDestroy(blocked));
  CU(StreamDestroy(other));
}

static void while_a_thread_waits_in_trim(void) {
  others_go_on(waits_in_trim);
}

static void while_a_thread_waits_in_alloc(void) {
  others_go_on(waits_in_alloc);
}

static void while_a_thread_waits_in_stream_alloc(void) {
  others_go_on(waits_in_stream_alloc);
}

/* Memory that the device is finished with serves a request, moved together, although other memory is still
 * waited for. */
static void what_is_finished_serves_first(void) {
  enum { LONG_MS = 3000 };
  CUstream quick = new_stream(CU_STREAM_NON_BLOCKING), slow = new_stream(CU_STREAM_NON_BLOCKING);
  CUstream third = new_stream(CU_STREAM_NON_BLOCKING);
  void *soon[4], *kept[4], *late = NULL, *block = NULL;
  int i, version = 0;
  double start;
  CU(DriverGetVersion(&version));
  if (version < 12050) {
    check_skip("a driver before 12.5 can only be waited for as a whole");
    return;
  }
  if (default_options().backend == POOL_BACKEND_MALLOC) {
    check_skip("cuMemFree itself waits for the whole device");
    return;
  }
  for (i = 0; i < 4; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc_async(&soon[i], GIB, quick));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&kept[i], GIB / 4, quick));
  }
  CHECK_STATUS(POOL_OK, pool_alloc_async(&late, 2 * GIB, slow));
  busy(slow, LONG_MS);
  CHECK_STATUS(POOL_OK, pool_free_async(late, slow));
  busy(quick, 100);
  for (i = 0; i < 4; i++) {
    CHECK_STATUS(POOL_OK, pool_free_async(soon[i], quick));
  }
  start = now_ms();
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 4 * GIB, third));
  CHECK_TOOK(now_ms() - start, 100);
  CHECK_STATUS(POOL_OK, pool_free_async(block, third));
  /* So does what others get by pool_reclaim. */
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 3 * GIB, NULL));
  CHECK_TOOK(now_ms() - start, 100);
  CHECK(cu.StreamQuery(slow) != 0);
  for (i = 0; i < 4; i++) {
    CHECK_STATUS(POOL_OK, pool_free(kept[i]));
  }
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(quick));
  CU(StreamDestroy(slow));
  CU(StreamDestroy(third));
}

/* The wait has an end of its own: then the answer is out of memory, and the block can be had later. */
static void wait_is_bounded(int device_ordered) {
  pool_options defaults = default_options(), options = defaults;
  CUstream blocked = new_stream(CU_STREAM_NON_BLOCKING);
  void *old = NULL, *block = NULL;
  double start;
  options.settle_ms = 200;
  options.limit_bytes = 64 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&old, 60 * MIB, blocked));
  __atomic_store_n(&released, 0, __ATOMIC_SEQ_CST);
  CU(LaunchHostFunc(blocked, wait_for_release, NULL));
  CHECK_STATUS(POOL_OK, device_ordered ? pool_free(old) : pool_free_async(old, blocked));
  start = now_ms();
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 50 * MIB));
  CHECK_TOOK(now_ms() - start, 200);
  CHECK_STATUS(POOL_OK, pool_free(block));
  start = now_ms();
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
  CHECK_TOOK(now_ms() - start, 200);
  CHECK_STATS(0);
  __atomic_store_n(&released, 1, __ATOMIC_SEQ_CST);
  CU(StreamSynchronize(blocked));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 50 * MIB));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(StreamDestroy(blocked));
}

static void wait_for_a_stream_is_bounded(void) {
  wait_is_bounded(0);
}

static void wait_for_the_device_is_bounded(void) {
  int version = 0;
  CU(DriverGetVersion(&version));
  if (version < 12050) {
    check_skip("a driver before 12.5 can only be waited for as a whole, which has no bound");
    return;
  }
  wait_is_bounded(1);
}

int main(void) {
  context = driver_start(0);
  if (cu.LaunchHostFunc == NULL) {
    printf("skipped: the driver cannot run host functions\n");
    return EXIT_SKIPPED;
  }
  RUN(what_is_finished_serves_first);
  RUN(while_a_thread_waits_in_trim);
  RUN(while_a_thread_waits_in_alloc);
  RUN(while_a_thread_waits_in_stream_alloc);
  RUN(wait_for_a_stream_is_bounded);
  RUN(wait_for_the_device_is_bounded);
  return driver_result();
}
