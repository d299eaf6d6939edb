/* rungs.c: the rungs of the reclaim ladder one by one, in their order. Each test fails without its rung: a
 * later one would serve the request too, but at a price that the test sees. Rung 8 has wait.c, too, and rung
 * 9 spill.c. */

#include "check.h"
#include "driver.h"
#include "pools.h"

static CUcontext primary;
static int by_malloc, version;

static void finish(pool_t *pool) {
  if (pool != NULL) {
    CHECK_STATUS(POOL_OK, pool_destroy(pool));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* A callback that frees a block, and counts. */
struct cache {
  void *block;
  int calls;
  uint64_t id;
};

static size_t free_cache(void *user, int device, size_t wanted) {
  struct cache *cache = (struct cache *)user;
  size_t freed = cache->block == NULL ? 0 : 1;
  (void)device;
  (void)wanted;
  cache->calls++;
  give(cache->block);
  cache->block = NULL;
  return freed;
}

static void add(struct cache *cache) {
  CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(free_cache, cache, 0, &cache->id));
}

static void remove_cache(struct cache *cache) {
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(cache->id));
}

/* 1: what another stream is finished with, as it lies. */
static void search_moves_and_takes_nothing(void) {
  CUstream one = new_stream(CU_STREAM_NON_BLOCKING), two = new_stream(CU_STREAM_NON_BLOCKING);
  void *keep = take(NULL, MIB), *old = take_on(NULL, 64 * MIB, one), *block;
  pool_stats before, after;
  CHECK_STATUS(POOL_OK, pool_free_async(take_on(NULL, 2 * MIB, two), two));
  CHECK_STATUS(POOL_OK, pool_free_async(old, one));
  CU(CtxSynchronize());
  before = stats_of(0);
  block = take_on(NULL, 60 * MIB, two);
  after = stats_of(0);
  CHECK_EQ(after.driver_alloc_calls, before.driver_alloc_calls);
  CHECK_EQ(after.driver_map_calls, before.driver_map_calls);
  CHECK_EQ(after.driver_free_calls, before.driver_free_calls);
  CHECK_EQ(after.reserved_bytes, before.reserved_bytes);
  give(block);
  give(keep);
  finish(NULL);
  CU(StreamDestroy(one));
  CU(StreamDestroy(two));
}

/* 2: new memory, as long as there is some, leaves idle memory alone up to `max_idle`. */
static void growth_leaves_idle_memory(void) {
  pool_options defaults = default_options(), options = defaults;
  void *live[8], *block;
  pool_stats before, after;
  int i;
  options.max_idle_percent = 10000;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  for (i = 0; i < 8; i++) {
    live[i] = take(NULL, 10 * MIB);
  }
  for (i = 0; i < 8; i += 2) {
    give(live[i]);
  }
  CU(CtxSynchronize());
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, NULL)); /* to see that they are finished with */
  before = stats_of(0);
  block = take(NULL, 50 * MIB);
  after = stats_of(0);
  CHECK(after.reserved_bytes >= before.reserved_bytes + 40 * MIB);
  CHECK(after.cached_bytes + 10 * MIB >= before.cached_bytes);
  CHECK_EQ(after.driver_free_calls, before.driver_free_calls);
  CHECK_EQ(after.oom_recovered_count, before.oom_recovered_count);
  give(block);
  for (i = 1; i < 8; i += 2) {
    give(live[i]);
  }
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  finish(NULL);
}

/* Pieces that are idle between live ones, so that they do not coalesce. */
enum { PIECES = 8 };

static void leave_holes(pool_t *pool, size_t idle, size_t live, void **keep) {
  void *pieces[PIECES];
  int i;
  for (i = 0; i < PIECES; i++) {
    pieces[i] = take(pool, idle);
    keep[i] = take(pool, live);
  }
  for (i = 0; i < PIECES; i++) {
    give(pieces[i]);
  }
  CU(CtxSynchronize());
  CHECK_STATUS(POOL_OK, pool_trim(pool, 0, SIZE_MAX, NULL));
}

static void give_all(void **keep) {
  int i;
  for (i = 0; i < PIECES; i++) {
    give(keep[i]);
  }
}

/* 3: what is idle here, before other pools are disturbed. */
static void own_idle_memory_goes_before_that_of_others(void) {
  pool_options options = default_options();
  pool_t *other = new_pool(NULL), *own;
  void *keep[PIECES], *block;
  options.max_idle_percent = 10000; /* so that growth is tried first */
  own = new_pool(&options);
  idle_on(other, 4, GIB);
  leave_holes(own, 480 * MIB, 8 * MIB, keep);
  block = take(own, 3 * GIB);
  CHECK_EQ(held_by(other), 4 * GIB);
  CHECK(held_by(own) <= 8 * GIB - 4 * GIB);
  CHECK_EQ(pool_stats_of(own, 0).oom_recovered_count, 1);
  give(block);
  give_all(keep);
  CHECK_STATUS(POOL_OK, pool_destroy(own));
  finish(other);
}

/* The same where a limit, not the device, is in the way of more. */
static void own_idle_memory_makes_room_in_the_limit(void) {
  pool_options options = default_options();
  pool_t *limited;
  void *keep[PIECES], *block;
  options.limit_bytes = GIB;
  options.max_idle_percent = 10000;
  limited = new_pool(&options);
  leave_holes(limited, 110 * MIB, 4 * MIB, keep);
  block = take(limited, 800 * MIB);
  CHECK(held_by(limited) <= GIB);
  CHECK_EQ(pool_stats_of(limited, 0).oom_recovered_count, 1);
  give_all(keep);
  give(block);
  finish(limited);
}

/* A small block goes into any gap rather than nowhere, where no chunk is idle. */
static void small_blocks_use_any_gap(void) {
  enum { MOST = 64 };
  void *most = take(NULL, 8 * GIB - 20 * MIB), *rest[MOST], *small;
  int count = 0, i;
  while (count < MOST && take_status(NULL, 512 * KIB, &rest[count]) == POOL_OK) {
    count++;
  }
  if (CHECK(count > 10 && count < MOST)) {
    give(rest[5]);
    small = take(NULL, 100);
    CHECK(small != NULL);
    give(small);
    rest[5] = NULL;
  }
  for (i = 0; i < count; i++) {
    give(rest[i]);
  }
  give(most);
  finish(NULL);
}

/* 5: what is freed and not finished with, before callbacks are asked. */
static void frees_are_waited_for_before_callbacks_are_asked(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  struct cache cache = {NULL, 0, 0};
  int way;
  add(&cache);
  for (way = 0; way < 3; way++) {
    pool_t *other = way == 2 ? new_pool(NULL) : NULL;
    void *old = take_on(other, 5 * GIB, stream);
    busy(stream, 80);
    fill(old, 4 * MIB, 1, stream);
    CHECK_STATUS(POOL_OK, way ? pool_free_async(old, stream) : pool_free(old));
    give(take(NULL, 6 * GIB));
    finish(other);
  }
  CHECK_EQ(cache.calls, 0);
  remove_cache(&cache);
  CU(StreamDestroy(stream));
}

/* 4: what is idle in other pools, before anything is waited for. */
static void other_pools_give_before_anything_is_waited_for(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  pool_t *other;
  void *old, *block;
  double start;
  if (by_malloc || version < 12050) {
    check_skip("cuMemFree waits, and so does a driver before 12.5 for any pending memory");
    CU(StreamDestroy(stream));
    return;
  }
  other = new_pool(NULL);
  idle_on(other, 5, GIB);
  old = take_on(NULL, 2 * GIB, stream);
  busy(stream, 1000);
  CHECK_STATUS(POOL_OK, pool_free_async(old, stream));
  start = now_ms();
  block = take(NULL, 3 * GIB);
  CHECK(now_ms() - start < 600);
  CHECK_EQ(held_by(other), 3 * GIB);
  CU(CtxSynchronize());
  give(block);
  finish(other);
  CU(StreamDestroy(stream));
}

/* 6: other runtimes' caches, before the rest of what is idle is given up. */
static void callbacks_go_before_everything_is_emptied(void) {
  pool_options options = default_options(), defaults = options;
  struct cache cache = {NULL, 0, 0};
  CUcontext second = NULL;
  void *keep, *block;
  uint64_t held;
  /* The limit was lowered below what the pool idles on in the other context. */
  cache.block = take(NULL, 200 * MIB);
  keep = take(NULL, 20 * MIB);
  add(&cache);
  CU(CtxCreate(&second, 0, 0));
  idle_on(NULL, 20, 200 * MIB);
  CU(CtxSetCurrent(primary));
  options.limit_bytes = 512 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  held = held_by(NULL);
  block = take(NULL, 150 * MIB);
  CHECK_EQ(cache.calls, 1);
  CHECK(cache.block == NULL);
  CHECK(held_by(NULL) >= held / 2);
  give(block);
  give(keep);
  remove_cache(&cache);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(CtxDestroy(second));
  CU(CtxSetCurrent(primary));
  finish(NULL);
}

static void without_callbacks_there_would_be_no_memory(void) {
  struct cache cache = {NULL, 0, 0};
  cache.block = take(NULL, 6 * GIB);
  add(&cache);
  give(take(NULL, 5 * GIB));
  CHECK_EQ(cache.calls, 1);
  remove_cache(&cache);
  finish(NULL);
}

/* 7: everything, where as much as the request is not enough; before any wait for what others have. */
static void everything_idle_is_emptied_in_the_end(void) {
  pool_options options = default_options(), defaults = options;
  CUcontext second = NULL;
  void *block;
  double start;
  CU(CtxCreate(&second, 0, 0));
  idle_on(NULL, 20, 200 * MIB);
  CU(CtxSetCurrent(primary));
  options.limit_bytes = 512 * MIB;
  options.oom_wait_ms = 3000;
  options.spill = POOL_SPILL_HOST;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  start = now_ms();
  block = take(NULL, 150 * MIB);
  CHECK(now_ms() - start < 2000);
  CHECK_EQ(stats_of(0).oom_wait_count, 0);
  CHECK_EQ(stats_of(0).spill_count, 0);
  CHECK(held_by(NULL) <= 512 * MIB);
  give(block);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(CtxDestroy(second));
  CU(CtxSetCurrent(primary));
  finish(NULL);
}

/* 8: another thread's free, before host memory. */
static void *free_late(void *block) {
  CU(CtxSetCurrent(primary));
  sleep_ms(100);
  give(block);
  return NULL;
}

static void frees_of_others_go_before_host_memory(void) {
  pool_options options = default_options(), defaults = options;
  void *live = take(NULL, 6 * GIB), *block;
  struct check_thread thread;
  options.oom_wait_ms = 5000;
  options.spill = POOL_SPILL_HOST;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  start_thread(&thread, free_late, live);
  block = take(NULL, 4 * GIB);
  CHECK_EQ(stats_of(0).spill_count, 0);
  CHECK_EQ(stats_of(0).oom_wait_count, 1);
  join_thread(&thread);
  give(block);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  finish(NULL);
}

/* 9, and 10: host memory, or the answer. */
static void host_memory_is_the_last_resort(void) {
  pool_options options = default_options();
  void *live = take(NULL, 7 * GIB), *block = NULL;
  pool_t *spilling;
  int status;
  options.spill = POOL_SPILL_HOST;
  spilling = new_pool(&options);
  status = take_status(spilling, 2 * GIB, &block);
  if (version < 12020) {
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, status);
  } else {
    CHECK_STATUS(POOL_OK, status);
    CHECK_EQ(pool_stats_of(spilling, 0).spill_count, 1);
    give(block);
  }
  refuse(NULL, 2 * GIB);
  give(live);
  CU(CtxSynchronize());
  finish(spilling);
}

/* 4, again: what other pools idle on is given up before the headroom. Last, as a headroom fades slowly. */
static void other_pools_give_before_the_headroom_does(void) {
  pool_options options = default_options(), defaults = options;
  CUstream streams[2];
  int noticed, i;
  options.headroom_bytes = GIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, NULL));
  for (i = 0; i < 2; i++) {
    streams[i] = new_stream(CU_STREAM_NON_BLOCKING);
  }
  for (noticed = 0; noticed < 2; noticed++) {
    pool_t *other = new_pool(NULL);
    void *blocks[6], *block;
    if (noticed) {
      idle_on(other, 6, GIB);
    } else { /* finished with, but nobody has looked yet */
      for (i = 0; i < 6; i++) {
        blocks[i] = take_on(other, GIB, streams[i % 2]);
      }
      for (i = 0; i < 6; i++) {
        CHECK_STATUS(POOL_OK, pool_free_async(blocks[i], streams[i % 2]));
      }
      CU(CtxSynchronize());
    }
    block = take(NULL, 2 * GIB);
    /* 2 GiB were free, 1 of which, or nearly so, is the headroom. */
    CHECK(sim.used_bytes(0) <= 7 * GIB + 100 * MIB);
    CHECK_EQ(held_by(other), 5 * GIB);
    give(block);
    finish(other);
  }
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  for (i = 0; i < 2; i++) {
    CU(StreamDestroy(streams[i]));
  }
}

int main(void) {
  primary = driver_start(0);
  if (!needs_sim()) { /* the sizes are made for its device of 8 GiB */
    return driver_result();
  }
  CU(DriverGetVersion(&version));
  by_malloc = default_options().backend == POOL_BACKEND_MALLOC;
  RUN(search_moves_and_takes_nothing);
  RUN(growth_leaves_idle_memory);
  RUN(own_idle_memory_goes_before_that_of_others);
  RUN(own_idle_memory_makes_room_in_the_limit);
  RUN(small_blocks_use_any_gap);
  RUN(other_pools_give_before_anything_is_waited_for);
  RUN(frees_are_waited_for_before_callbacks_are_asked);
  RUN(without_callbacks_there_would_be_no_memory);
  RUN(callbacks_go_before_everything_is_emptied);
  RUN(everything_idle_is_emptied_in_the_end);
  RUN(frees_of_others_go_before_host_memory);
  RUN(host_memory_is_the_last_resort);
  RUN(other_pools_give_before_the_headroom_does);
  return driver_result();
}
