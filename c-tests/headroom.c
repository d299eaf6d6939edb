/* headroom.c: the headroom. Once somebody beside the pools has asked for memory, some is left free for the
 * next time: as much as was asked for, capped, fading, and never at the price of an own request. What others
 * once wanted is remembered as long as the process lives, so each test has one of its own. */

#include "check.h"
#include "driver.h"
#include "pools.h"

static int by_malloc;
static pool_options defaults;

/* The default pool keeps up to so much for others. */
static void start(uint64_t most) {
  pool_options options;
  driver_start(0);
  if (!on_sim()) { /* the sizes are made for its device of 8 GiB */
    exit(EXIT_SKIPPED);
  }
  defaults = options = default_options();
  by_malloc = options.backend == POOL_BACKEND_MALLOC;
  options.headroom_bytes = most;
  options.headroom_percent = 0;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
}

static uint64_t headroom_of(pool_t *pool) {
  return pool_stats_of(pool, 0).headroom_bytes;
}

static size_t device_free(void) {
  size_t available = 0, total = 0;
  CU(MemGetInfo(&available, &total));
  return available;
}

/* What is there after a little while of a test: no more, and not much less. */
#define CHECK_NEARLY(bytes, whole) CHECK((bytes) <= (whole) && (bytes) >= (whole) / 100 * 96)

static int the_next_foreign_allocation_does_not_fail(void) {
  CUdeviceptr foreign[3] = {0, 0, 0};
  size_t released = 0;
  int i;
  start(GIB);
  idle_on(NULL, 16, GIB / 2);
  CHECK_EQ(headroom_of(NULL), 0);
  CHECK_EQ(cu.MemAlloc(&foreign[0], GIB), 2);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  CHECK_NEARLY(headroom_of(NULL), GIB);
  /* What was wanted, and the headroom for the next one; not much more. */
  CHECK(released >= 2 * GIB - 100 * MIB && released <= 2 * GIB + (by_malloc ? GIB / 2 : 200 * MIB));
  CHECK_EQ(released, device_free());
  CU(MemAlloc(&foreign[0], GIB));
  CU(MemAlloc(&foreign[1], GIB / 100 * 95));
  /* The headroom was for that; now the pool's next growth, or the next to ask, has it filled up. */
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  CU(MemAlloc(&foreign[2], GIB));
  CHECK(device_free() >= GIB / 100 * 90);
  for (i = 0; i < 3; i++) {
    CU(MemFree(foreign[i]));
  }
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}

static int capped_and_switched_off(void) {
  pool_options options;
  pool_t *small, *none, *percent;
  size_t released = 0;
  start(GIB);
  options = defaults;
  options.headroom_percent = 0;
  options.headroom_bytes = 100 * MIB;
  small = new_pool(&options);
  options.headroom_bytes = 0;
  none = new_pool(&options);
  options.headroom_percent = 10;
  percent = new_pool(&options);
  take(NULL, 100);
  take(small, 100);
  take(none, 100);
  take(percent, 100);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 0, &released)); /* nobody wants anything */
  CHECK_EQ(headroom_of(NULL), 0);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 50 * MIB, &released));
  CHECK_NEARLY(headroom_of(NULL), 50 * MIB);
  CHECK_NEARLY(headroom_of(small), 50 * MIB);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, SIZE_MAX, &released));
  CHECK_EQ(headroom_of(NULL), GIB);
  CHECK_EQ(headroom_of(small), 100 * MIB);
  CHECK_EQ(headroom_of(none), 0);
  CHECK_EQ(headroom_of(percent), 8 * GIB / 10);
  /* Who wants less next time does not make the others' need less. */
  CHECK_STATUS(POOL_OK, pool_reclaim(0, MIB, &released));
  CHECK_EQ(headroom_of(NULL), GIB);
  /* The options of the moment count. */
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_EQ(headroom_of(NULL), 8 * GIB * 5 / 100);
  return driver_result();
}

/* Half of it in thirty seconds, in a straight line until then. */
static int fades(void) {
  uint64_t before, after;
  double start_ms;
  size_t released;
  start(4 * GIB);
  take(NULL, 100);
  start_ms = now_ms();
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  before = headroom_of(NULL);
  CHECK_NEARLY(before, GIB);
  sleep_ms(700);
  after = headroom_of(NULL);
  CHECK(after <= GIB - (uint64_t)((double)GIB * 690 / 60000));
  CHECK(after >= GIB - (uint64_t)((double)GIB * (now_ms() - start_ms + 2) / 60000));
  CHECK(after < before);
  /* Asked again, it is whole again. */
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  CHECK_NEARLY(headroom_of(NULL), GIB);
  CHECK(headroom_of(NULL) > after);
  return driver_result();
}

/* Growth moves what is idle, and leaves the headroom. */
static int own_idle_memory_goes_first(void) {
  void *live[8], *pieces[8], *block;
  int i;
  start(GIB);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, NULL));
  for (i = 0; i < 8; i++) { /* 6.5 of 8 GiB; nothing coalesces */
    pieces[i] = take(NULL, 640 * MIB);
    live[i] = take(NULL, 192 * MIB);
  }
  CHECK(device_free() >= GIB);
  for (i = 0; i < 8; i++) {
    give(pieces[i]);
  }
  CU(CtxSynchronize());
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, NULL));
  block = take(NULL, 3 * GIB);
  CHECK(device_free() >= GIB / 100 * 97);
  CHECK_STATS(0);
  give(block);
  for (i = 0; i < 8; i++) {
    give(live[i]);
  }
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}

static size_t count_calls(void *user, int device, size_t wanted) {
  (void)device;
  (void)wanted;
  ++*(int *)user;
  return 0;
}

/* With nothing idle an own request has the headroom: nobody is asked, nothing is waited for, and it is not
 * out of memory. */
static int own_requests_come_first(void) {
  CUstream stream;
  void *live, *old, *block;
  pool_stats before, after;
  uint64_t id;
  double start_ms;
  int calls = 0;
  start(2 * GIB);
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 2 * GIB, NULL));
  CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(count_calls, &calls, 0, &id));
  live = take(NULL, 5 * GIB);
  old = take_on(NULL, GIB, stream);
  give(take(NULL, 100));
  busy(stream, 1000);
  CHECK_STATUS(POOL_OK, pool_free_async(old, stream));
  before = stats_of(0);
  start_ms = now_ms();
  block = take_on(NULL, GIB + GIB / 2, CU_STREAM_PER_THREAD);
  CHECK(now_ms() - start_ms < 600);
  CHECK_EQ(calls, 0);
  after = stats_of(0);
  CHECK_EQ(after.oom_count, before.oom_count);
  /* No memory was refused. */
  CHECK_EQ(after.oom_recovered_count, before.oom_recovered_count);
  CHECK_STATS(0);
  /* Beyond the headroom it is as ever. */
  CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_PER_THREAD));
  give(live);
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(id));
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
  return driver_result();
}

/* A captured stream's request may not move anything, so it has the headroom at once. */
static int captured_requests_have_it(void) {
  CUstream stream;
  CUgraph graph = NULL;
  void *live, *block = NULL;
  start(2 * GIB);
  if (cu.StreamBeginCapture == NULL || cu.StreamEndCapture == NULL || cu.GraphDestroy == NULL) {
    return EXIT_SKIPPED;
  }
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 2 * GIB, NULL));
  live = take(NULL, 6 * GIB);
  CU(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, stream));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, GIB, stream));
  CHECK_EQ(cu.StreamEndCapture(stream, &graph), 0);
  CU(GraphDestroy(graph));
  CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, stream));
  give(block);
  give(live);
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
  return driver_result();
}

/* Each pool leaves as much as its own option says. */
static int pools_have_caps_of_their_own(void) {
  pool_options options;
  pool_t *generous, *greedy, *idle, *pools[4] = {NULL, NULL, NULL, NULL};
  void *one, *two;
  start(GIB);
  options = defaults;
  options.headroom_percent = 0;
  options.headroom_bytes = 2 * GIB;
  pools[1] = generous = new_pool(&options);
  options.headroom_bytes = 256 * MIB;
  pools[2] = greedy = new_pool(&options);
  pools[3] = idle = new_pool(&options);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 2 * GIB, NULL));
  give(take(generous, 100));
  give(take(greedy, 100));
  idle_on(idle, 8, GIB / 2);
  CHECK_NEARLY(headroom_of(generous), 2 * GIB);
  CHECK_EQ(headroom_of(greedy), 256 * MIB);
  /* 4 GiB are free. The first one stops at 2, and takes of what is idle then. */
  one = take(generous, 3 * GIB);
  CHECK(device_free() >= 2 * GIB / 100 * 97);
  CHECK(held_by(idle) <= 3 * GIB + 200 * MIB && held_by(idle) >= 5 * GIB / 2);
  /* The second one goes on to 256 MiB. */
  two = take(greedy, device_free() - 300 * MIB);
  CHECK(held_by(idle) >= 5 * GIB / 2);
  CHECK_POOLS(pools, 4, 0);
  give(two);
  two = take(greedy, 2 * GIB);
  CHECK(device_free() >= 250 * MIB);
  CHECK_POOLS(pools, 4, 0);
  give(one);
  give(two);
  CHECK_STATUS(POOL_OK, pool_destroy(generous));
  CHECK_STATUS(POOL_OK, pool_destroy(greedy));
  CHECK_STATUS(POOL_OK, pool_destroy(idle));
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}

#define RUN_ALONE(test)                                                     \
  do {                                                                      \
    int code;                                                               \
    check_running = #test;                                                  \
    check_failures_before = check_failures;                                 \
    code = in_child(test);                                                  \
    if (code == EXIT_SKIPPED) {                                             \
      check_skip("needs the simulated driver, or one with stream capture"); \
    } else {                                                                \
      CHECK_EQ(code, 0);                                                    \
    }                                                                       \
  } while (0)

int main(void) {
  driver_open();
  RUN_ALONE(the_next_foreign_allocation_does_not_fail);
  RUN_ALONE(capped_and_switched_off);
  RUN_ALONE(fades);
  RUN_ALONE(own_idle_memory_goes_first);
  RUN_ALONE(own_requests_come_first);
  RUN_ALONE(captured_requests_have_it);
  RUN_ALONE(pools_have_caps_of_their_own);
  return check_result();
}
