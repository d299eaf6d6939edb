/* pools_share.c: pools of a device help each other. Idle memory of any pool serves any other, only as much as
 * is needed, of the one that was used least recently first. */

#include "check.h"
#include "driver.h"
#include "pools.h"

enum { SOON_MS = 700 };

static int by_malloc;

static void check_all_gone(void) {
  CHECK_TRIMS_TO_ZERO(0);
}

/* ---- any pool's memory serves any other ---- */

static void idle_memory_serves_any_pool(void) {
  CUcontext first = NULL, second = NULL;
  pool_t *pools[3] = {NULL, NULL, NULL};
  int from, to, elsewhere;
  CU(CtxGetCurrent(&first));
  CU(CtxCreate(&second, 0, 0));
  for (from = 0; from < 3; from++) {
    for (to = 0; to < 3; to++) {
      for (elsewhere = 0; elsewhere < 2; elsewhere++) {
        uint64_t refused;
        void *block;
        CU(CtxSetCurrent(first));
        pools[1] = new_pool(NULL);
        pools[2] = new_pool(NULL);
        idle_on(pools[from], 14, GIB / 2);
        CU(CtxSetCurrent(elsewhere ? second : first));
        refused = pool_stats_of(pools[to], 0).oom_count;
        block = take(pools[to], 6 * GIB);
        CHECK(info_of(block).pool == pools[to]);
        CHECK_POOLS(pools, 3, 0);
        CHECK_EQ(pool_stats_of(pools[to], 0).oom_count, refused);
        give(block);
        CHECK_STATUS(POOL_OK, pool_destroy(pools[1]));
        CHECK_STATUS(POOL_OK, pool_destroy(pools[2]));
        CHECK_TRIMS_TO_ZERO(0);
      }
    }
  }
  CU(CtxSetCurrent(second));
  CU(CtxDestroy(second));
  CU(CtxSetCurrent(first));
}

/* Three pools idle; what one request lacks, and no more, comes from the one that was used least recently. */
static void the_least_recently_used_pool_gives_first(void) {
  int order, i;
  for (order = 0; order < 6; order++) {
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    pool_t *pools[4] = {NULL, NULL, NULL, NULL}, **old;
    void *live, *block;
    for (i = 1; i < 4; i++) {
      pools[i] = new_pool(NULL);
    }
    old = &pools[1];
    live = take(NULL, GIB);
    for (i = 0; i < 3; i++) {
      idle_on(old[orders[order][i]], 4, GIB / 2);
    }
    /* 1 GiB is free. */
    block = take(NULL, 2 * GIB);
    CHECK_EQ(held_by(old[orders[order][0]]), GIB);
    CHECK_EQ(held_by(old[orders[order][1]]), 2 * GIB);
    CHECK_EQ(held_by(old[orders[order][2]]), 2 * GIB);
    give(block);
    CU(CtxSynchronize());
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, NULL)); /* to see that it is finished with */
    block = take(NULL, 4 * GIB);
    CHECK_EQ(held_by(old[orders[order][0]]), 0);
    CHECK_EQ(held_by(old[orders[order][1]]), GIB);
    CHECK_EQ(held_by(old[orders[order][2]]), 2 * GIB);
    CHECK_POOLS(pools, 4, 0);
    give(block);
    give(live);
    for (i = 1; i < 4; i++) {
      CHECK_STATUS(POOL_OK, pool_destroy(pools[i]));
    }
    CHECK_TRIMS_TO_ZERO(0);
  }
}

/* The default pool's fast path keeps no time, but counts. */
static void the_fast_path_counts_as_use(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  pool_t *pool = new_pool(NULL);
  void *live, *block;
  int i;
  /* On one stream only, as the fast path wants it. */
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 2 * GIB, stream));
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  CU(CtxSynchronize());
  for (i = 0; i < 2; i++) {
    idle_on(pool, 4, GIB / 2);
  }
  for (i = 0; i < 20; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc_async(&block, GIB, stream));
    CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  }
  CU(CtxSynchronize());
  {
    pool_t *third = new_pool(NULL);
    live = take(third, 5 * GIB);
    CHECK_EQ(held_by(pool), GIB);
    CHECK_EQ(held_by(NULL), 2 * GIB);
    give(live);
    CHECK_STATUS(POOL_OK, pool_destroy(third));
  }
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
  check_all_gone();
  CU(StreamDestroy(stream));
}

/* Live memory of other pools is not touched, whatever is lacking. */
static void only_idle_memory_is_given_up(void) {
  pool_t *pool = new_pool(NULL), *pools[2] = {NULL, NULL};
  void *live[8], *block;
  int i;
  pools[1] = pool;
  for (i = 0; i < 8; i++) {
    live[i] = take(pool, 400 * MIB);
    fill(live[i], 4 * MIB, 0x700u + (unsigned)i, NULL);
  }
  idle_on(pool, 5, GIB / 2);
  block = take(NULL, 4 * GIB);
  refuse(NULL, 2 * GIB);
  CHECK_EQ(oom_info().advice, POOL_ADVICE_USE_LESS);
  CHECK_EQ(oom_info().pools_bytes, held_by(NULL) + held_by(pool));
  CHECK_POOLS(pools, 2, 0);
  for (i = 0; i < 8; i++) {
    CHECK(holds(live[i], 4 * MIB, 0x700u + (unsigned)i));
    give(live[i]);
  }
  give(block);
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
  check_all_gone();
}

/* ---- limits beside other pools ---- */

/* First the pool's own limit is in the way, and when that is met, other pools' memory is. */
static void limit_and_device_are_both_in_the_way(void) {
  int pending;
  for (pending = 0; pending < 2; pending++) {
    pool_t *limited = pool_with_limit(4 * GIB), *other = new_pool(NULL), *pools[3] = {NULL, NULL, NULL};
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    void *old, *block;
    pools[1] = limited;
    pools[2] = other;
    old = take(limited, 3 * GIB);
    idle_on(other, 9, GIB / 2);
    if (pending) {
      busy(stream, 60);
      fill(old, 64 * MIB, 1, stream);
    }
    give(old);
    /* 3 of 4 GiB are the pool's, and 1/2 GiB is free. */
    block = take(limited, 4 * GIB);
    CHECK_POOLS(pools, 3, 0);
    CHECK(held_by(limited) <= 4 * GIB);
    CHECK(held_by(other) >= 4 * GIB - (by_malloc ? GIB : 0));
    give(block);
    CHECK_STATUS(POOL_OK, pool_destroy(limited));
    CHECK_STATUS(POOL_OK, pool_destroy(other));
    CU(StreamDestroy(stream));
    check_all_gone();
  }
}

/* The limit is not what is in the way: other pools' live blocks are. */
static void advice_does_not_take_other_pools_for_the_limit(void) {
  pool_t *limited = pool_with_limit(6 * GIB), *other = new_pool(NULL);
  void *mine = take(limited, GIB), *theirs = take(other, 6 * GIB);
  refuse(limited, 2 * GIB);
  CHECK_EQ(oom_info().advice, POOL_ADVICE_USE_LESS);
  CHECK_EQ(oom_info().limit_bytes, 6 * GIB);
  /* Both are: a higher limit alone would not help. */
  refuse(limited, 5 * GIB + GIB / 2);
  CHECK_EQ(oom_info().advice, POOL_ADVICE_USE_LESS);
  give(theirs);
  refuse(limited, 5 * GIB + GIB / 2);
  CHECK_EQ(oom_info().advice, POOL_ADVICE_RAISE_LIMIT);
  give(mine);
  CHECK_STATUS(POOL_OK, pool_destroy(limited));
  CHECK_STATUS(POOL_OK, pool_destroy(other));
  check_all_gone();
}

/* ---- what is freed, but not finished with ---- */

/* A stream of the pool itself is busy for long; another pool's memory can be had now, and it is not waited
 * for the first. */
static void own_slow_frees_do_not_hide_other_pools_memory(void) {
  int way;
  for (way = 0; way < 3; way++) {
    CUstream slow = new_stream(CU_STREAM_NON_BLOCKING), quick = new_stream(CU_STREAM_NON_BLOCKING);
    pool_t *other = new_pool(NULL);
    void *mine = take_on(NULL, GIB, slow), *theirs = take_on(other, 4 * GIB, quick);
    double start;
    /* With one stream only, a pool does not note when that has got how far. */
    CHECK_STATUS(POOL_OK, pool_free_async(take_on(other, 2 * MIB, slow), slow));
    if (by_malloc && sim.set_free_waits != NULL) {
      sim.set_free_waits(0); /* what cuMemFree waits for is not the library's choice */
    }
    busy(slow, 1200);
    CHECK_STATUS(POOL_OK, pool_free_async(mine, slow));
    if (way > 0) {
      busy(quick, 50);
    }
    CHECK_STATUS(POOL_OK, pool_free_async(theirs, quick));
    if (way == 0) {
      CU(StreamSynchronize(quick));
    }
    start = now_ms();
    if (way < 2) {
      give(take(NULL, 5 * GIB));
    } else { /* nor when others ask */
      size_t released = 0;
      CHECK_STATUS(POOL_OK, pool_reclaim(0, 2 * GIB, &released));
      CHECK(released >= 2 * GIB);
    }
    CHECK(now_ms() - start < SOON_MS);
    CU(CtxSynchronize());
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    if (by_malloc && sim.set_free_waits != NULL) {
      sim.set_free_waits(1);
    }
    CHECK_STATUS(POOL_OK, pool_destroy(other));
    check_all_gone();
    CU(StreamDestroy(slow));
    CU(StreamDestroy(quick));
  }
}

/* What callbacks free is another pool's, and not finished with at once. */
static size_t free_a_block(void *user, int device, size_t wanted) {
  void **block = (void **)user;
  size_t freed = *block == NULL ? 0 : info_of(*block).usable_size;
  (void)device;
  (void)wanted;
  give(*block);
  *block = NULL;
  return freed;
}

static void callbacks_may_free_blocks_of_other_pools(void) {
  int busy_ms;
  for (busy_ms = 0; busy_ms < 100; busy_ms += 60) {
    pool_t *other = new_pool(NULL), *pools[2] = {NULL, NULL};
    void *theirs = take(other, 6 * GIB), *kept = take(other, GIB / 2), *block;
    uint64_t id = 0;
    pools[1] = other;
    idle_on(other, 1, GIB / 2);
    CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(free_a_block, &theirs, 0, &id));
    busy(CU_STREAM_PER_THREAD, busy_ms + 1);
    block = take(NULL, 4 * GIB);
    CHECK(theirs == NULL);
    CHECK_POOLS(pools, 2, 0);
    CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(id));
    give(block);
    give(kept);
    CHECK_STATUS(POOL_OK, pool_destroy(other));
    check_all_gone();
  }
}

/* ---- while others go on ---- */

static int stop;
static CUcontext context;

static void *use_a_pool(void *pool) {
  uint64_t chance = 17;
  CU(CtxSetCurrent(context));
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    void *block = NULL;
    if (take_status((pool_t *)pool, random_size(&chance, 4 * MIB), &block) == POOL_OK) {
      give(block);
    }
    if (random_below(&chance, 16) == 0) {
      let_time_pass();
    }
  }
  return NULL;
}

/* Emptying everything comes to an end although other pools are in use all the time, and so become the latest
 * again and again. */
static void pools_in_use_do_not_keep_the_answer(void) {
  enum { THREADS = 3 };
  pool_t *pools[THREADS];
  struct check_thread threads[THREADS];
  void *live = take(NULL, 7 * GIB);
  int i;
  /* Nothing the others hold would do. */
  stop = 0;
  for (i = 0; i < THREADS; i++) {
    pools[i] = new_pool(NULL);
    start_thread(&threads[i], use_a_pool, pools[i]);
  }
  sleep_ms(20);
  for (i = 0; i < 40; i++) {
    double start = now_ms();
    refuse(NULL, GIB + 200 * MIB);
    if (!CHECK(now_ms() - start < SOON_MS)) {
      break;
    }
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  for (i = 0; i < THREADS; i++) {
    join_thread(&threads[i]);
    CHECK_STATUS(POOL_OK, pool_destroy(pools[i]));
  }
  give(live);
  check_all_gone();
}

/* Something that was freed is always under way on one of two streams. */
static void *free_all_the_time(void *pool) {
  CUstream streams[2];
  int i = 0;
  CU(CtxSetCurrent(context));
  streams[0] = new_stream(CU_STREAM_NON_BLOCKING);
  streams[1] = new_stream(CU_STREAM_NON_BLOCKING);
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    void *block = take_on((pool_t *)pool, 2 * MIB, streams[i]);
    busy(streams[i], 10);
    CHECK_STATUS(POOL_OK, pool_free_async(block, streams[i]));
    i = 1 - i;
    CU(StreamSynchronize(streams[i]));
  }
  CU(CtxSynchronize());
  CU(StreamDestroy(streams[0]));
  CU(StreamDestroy(streams[1]));
  return NULL;
}

/* Waits are for what had been freed when they began: they end, although others go on. */
static void waits_end_while_others_go_on(void) {
  enum { SETTLE_MS = 8000, LONG_MS = 4000 };
  pool_options defaults = default_options(), options = defaults;
  int own;
  options.settle_ms = SETTLE_MS;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  sim.set_free_waits(0); /* what cuMemFree waits for is not the library's choice */
  for (own = 0; own < 2; own++) {
    pool_t *pool = own ? NULL : new_pool(&options);
    void *live = take(NULL, 7 * GIB);
    struct check_thread thread;
    double start;
    stop = 0;
    start_thread(&thread, free_all_the_time, pool);
    sleep_ms(50);
    start = now_ms();
    refuse(NULL, GIB + 200 * MIB);
    CHECK(now_ms() - start < LONG_MS);
    start = now_ms();
    CHECK_STATUS(POOL_OK, pool_trim(pool, 0, 0, NULL));
    CHECK(now_ms() - start < LONG_MS);
    start = now_ms();
    CHECK_STATUS(POOL_OK, pool_reclaim(0, 4 * GIB, NULL));
    CHECK(now_ms() - start < LONG_MS);
    __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
    join_thread(&thread);
    give(live);
    if (pool != NULL) {
      CHECK_STATUS(POOL_OK, pool_destroy(pool));
    }
    check_all_gone();
  }
  sim.set_free_waits(1);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
}

/* Threads of three pools whose largest blocks fit side by side: nobody may be refused, although each has to
 * take what another pool has just become idle on, and all are in the ladder at once. */
static void *take_turns(void *pool) {
  uint64_t chance = 3 + (uint64_t)(uintptr_t)pool;
  int i;
  CU(CtxSetCurrent(context));
  for (i = 0; i < 100; i++) {
    unsigned value = (unsigned)random_next(&chance);
    void *block = NULL;
    CHECK_STATUS(POOL_OK, take_status((pool_t *)pool, GIB + (size_t)random_below(&chance, GIB), &block));
    if (block == NULL) {
      break;
    }
    fill(block, 4096, value, CU_STREAM_PER_THREAD);
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    CHECK(holds(block, 4096, value));
    CHECK_STATUS(POOL_OK, i % 2 ? pool_free(block) : pool_free_async(block, CU_STREAM_PER_THREAD));
  }
  return NULL;
}

static void pools_share_what_there_is(void) {
  enum { THREADS = 3 };
  pool_t *pools[THREADS] = {NULL, NULL, NULL};
  struct check_thread threads[THREADS];
  int i;
  for (i = 0; i < THREADS; i++) {
    pools[i] = i > 0 ? new_pool(NULL) : NULL;
    start_thread(&threads[i], take_turns, pools[i]);
  }
  for (i = 0; i < THREADS; i++) {
    join_thread(&threads[i]);
  }
  CHECK_POOLS(pools, THREADS, 0);
  CHECK_STATUS(POOL_OK, pool_destroy(pools[1]));
  CHECK_STATUS(POOL_OK, pool_destroy(pools[2]));
  check_all_gone();
}

int main(void) {
  context = driver_start(0);
  if (!needs_sim()) { /* the sizes are made for its device of 8 GiB */
    return driver_result();
  }
  by_malloc = default_options().backend == POOL_BACKEND_MALLOC;
  /* First, while the process has shown one context. */
  RUN(the_fast_path_counts_as_use);
  RUN(the_least_recently_used_pool_gives_first);
  RUN(only_idle_memory_is_given_up);
  RUN(limit_and_device_are_both_in_the_way);
  RUN(advice_does_not_take_other_pools_for_the_limit);
  RUN(own_slow_frees_do_not_hide_other_pools_memory);
  RUN(callbacks_may_free_blocks_of_other_pools);
  RUN(pools_in_use_do_not_keep_the_answer);
  RUN(waits_end_while_others_go_on);
  RUN(pools_share_what_there_is);
  RUN(idle_memory_serves_any_pool);
  return driver_result();
}
