/* pools.c: pools beside the default one. Their handles, options, limits, counters, blocks and ends. */

#include "check.h"
#include "driver.h"
#include "pools.h"

#include <stddef.h>

static void destroy(pool_t *pool) {
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
}

/* Nothing of any pool is left. */
static void check_all_gone(void) {
  CHECK_TRIMS_TO_ZERO(0);
}

static void options_are_the_pools_own(void) {
  pool_options options = default_options(), defaults = options;
  struct {
    pool_options options;
    uint64_t tail;
  } newer;
  pool_t *plain, *limited, *early, *bad = (pool_t *)0x5a5a;
  void *block;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_create(NULL, NULL));
  options.settle_ms = UINT32_MAX;
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_create(&options, &bad));
  CHECK(bad == NULL);
  options = defaults;
  options.spill = 7;
  bad = (pool_t *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_create(&options, &bad));
  CHECK(bad == NULL);
  options = defaults;
  options.struct_size = 3;
  bad = (pool_t *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_create(&options, &bad));
  CHECK(bad == NULL);
  newer.options = defaults;
  newer.options.struct_size = sizeof newer;
  newer.tail = 1;
  bad = (pool_t *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_create(&newer.options, &bad));
  CHECK(bad == NULL);

  /* NULL: as the default pool is then; later changes of that are not the pool's. */
  early = new_pool(NULL);
  options = defaults;
  options.limit_bytes = 64 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  plain = new_pool(NULL);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  limited = new_pool(&options);
  refuse(plain, 100 * MIB);
  refuse(limited, 100 * MIB);
  block = take(early, 100 * MIB);
  give(block);
  give(take(NULL, 100 * MIB));
  /* An older caller's struct ends before the newer options. */
  options = defaults;
  options.struct_size = offsetof(pool_options, limit_percent);
  options.limit_bytes = 32 * MIB;
  destroy(limited);
  limited = new_pool(&options);
  refuse(limited, 40 * MIB);
  give(take(limited, 20 * MIB));
  destroy(plain);
  destroy(limited);
  destroy(early);
  check_all_gone();
}

static void blocks_are_of_their_pool(void) {
  CUstream one = new_stream(CU_STREAM_NON_BLOCKING), two = new_stream(CU_STREAM_NON_BLOCKING);
  pool_t *pools[3] = {NULL, NULL, NULL};
  CUcontext context = NULL, other = NULL;
  int way, i;
  CU(CtxGetCurrent(&context));
  pools[1] = new_pool(NULL);
  pools[2] = new_pool(NULL);
  CHECK(pools[1] != pools[2]);
  CU(CtxCreate(&other, 0, 0));
  CU(CtxSetCurrent(context));
  for (way = 0; way < 5; way++) {
    void *small[3], *large[3], *ordered[3];
    for (i = 0; i < 3; i++) {
      small[i] = take(pools[i], 1000);
      large[i] = take(pools[i], 9 * MIB);
      ordered[i] = take_on(pools[i], 3 * MIB, one);
      CHECK(info_of(small[i]).pool == pools[i]);
      CHECK(info_of((char *)large[i] + 5 * MIB).pool == pools[i]);
      CHECK(info_of(ordered[i]).pool == pools[i]);
      CHECK_EQ(pool_stats_of(pools[i], 0).live_blocks, 3);
      CHECK_EQ(pool_stats_of(pools[i], 0).requested_bytes, 1000 + 12 * MIB);
    }
    CHECK_POOLS(pools, 3, 0);
    for (i = 0; i < 3; i++) {
      CU(CtxSetCurrent(way == 3 ? NULL : way == 4 ? other : context));
      give(small[i]);
      CHECK_STATUS(POOL_OK, way == 0 ? pool_free(large[i]) : pool_free_async(large[i], way == 1 ? one : two));
      CHECK_STATUS(POOL_OK,
                   way == 0 ? pool_free(ordered[i]) : pool_free_async(ordered[i], way == 1 ? one : two));
      CHECK_EQ(pool_stats_of(pools[i], 0).live_blocks, 0);
      CHECK_EQ(pool_stats_of(pools[i], 0).live_bytes, 0);
    }
    CU(CtxSetCurrent(context));
    CHECK_POOLS(pools, 3, 0);
  }
  for (i = 0; i < 3; i++) {
    size_t released = 0;
    uint64_t held = held_by(pools[i]);
    CU(CtxSynchronize());
    /* A trim is one pool's. */
    CHECK_STATUS(POOL_OK, pool_trim(pools[i], 0, 0, &released));
    CHECK_EQ(released, held);
    CHECK_EQ(held_by(pools[i]), 0);
    CHECK(i == 2 || held_by(pools[i + 1]) > 0);
  }
  destroy(pools[1]);
  destroy(pools[2]);
  CU(StreamDestroy(one));
  CU(StreamDestroy(two));
  CU(CtxDestroy(other));
  CU(CtxSetCurrent(context));
  check_all_gone();
}

/* A pool's limit, in bytes and in percent, is met by its own idle memory only: others keep theirs. */
static void limits_are_kept_with_own_memory(void) {
  size_t limit = 256 * MIB;
  int percent;
  for (percent = 0; percent < 2; percent++) {
    pool_options options = default_options();
    pool_t *pools[3] = {NULL, NULL, NULL};
    void *block;
    if (percent) {
      size_t total = 0, available = 0;
      CU(MemGetInfo(&available, &total));
      options.limit_percent = 3;
      limit = total * 3 / 100;
    } else {
      options.limit_bytes = limit;
    }
    pools[1] = new_pool(&options);
    pools[2] = new_pool(NULL);
    idle_on(NULL, 2, 300 * MIB);
    idle_on(pools[2], 2, 300 * MIB);
    /* Idle pieces of the wrong size make way for one that nearly fills the limit. */
    idle_on(pools[1], 8, limit / 8 - 4 * MIB);
    block = take(pools[1], limit - 10 * MIB);
    CHECK(held_by(pools[1]) <= limit);
    CHECK_EQ(held_by(NULL), 600 * MIB);
    CHECK_EQ(held_by(pools[2]), 600 * MIB);
    refuse(pools[1], 20 * MIB);
    CHECK_EQ(oom_info().advice, POOL_ADVICE_RAISE_LIMIT);
    CHECK_EQ(oom_info().limit_bytes, limit);
    CHECK_EQ(held_by(NULL), 600 * MIB);
    CHECK_EQ(held_by(pools[2]), 600 * MIB);
    CHECK_EQ(pool_stats_of(pools[1], 0).oom_count, 1);
    CHECK_EQ(pool_stats_of(pools[2], 0).oom_count, 0);
    /* The others have no limit. */
    give(take(pools[2], GIB));
    CHECK_POOLS(pools, 3, 0);
    give(block);
    destroy(pools[1]);
    destroy(pools[2]);
    check_all_gone();
  }
}

/* The same where the idle memory is in another context of the device: the limit is one for all of them. */
static void limits_hold_for_all_contexts(void) {
  pool_t *pool = pool_with_limit(256 * MIB), *other = new_pool(NULL), *pools[3] = {NULL, NULL, NULL};
  CUcontext first = NULL, second = NULL;
  void *block;
  pools[1] = pool;
  pools[2] = other;
  CU(CtxGetCurrent(&first));
  CU(CtxCreate(&second, 0, 0));
  idle_on(pool, 1, 200 * MIB);
  idle_on(other, 1, 200 * MIB);
  CU(CtxSetCurrent(first));
  idle_on(other, 1, 200 * MIB);
  block = take(pool, 250 * MIB);
  CHECK(held_by(pool) <= 256 * MIB);
  CHECK_EQ(held_by(other), 400 * MIB);
  CU(CtxSetCurrent(second));
  refuse(pool, 20 * MIB);
  give(block);
  CU(CtxSetCurrent(first));
  CU(CtxSynchronize());
  CU(CtxSetCurrent(second));
  block = take(pool, 250 * MIB);
  CHECK(held_by(pool) <= 256 * MIB);
  CHECK_EQ(held_by(other), 400 * MIB);
  CHECK_POOLS(pools, 3, 0);
  give(block);
  destroy(pool);
  destroy(other);
  CU(CtxDestroy(second));
  CU(CtxSetCurrent(first));
  check_all_gone();
}

/* ---- the end of a pool ---- */

static void no_function_takes(pool_t *pool) {
  pool_stats stats;
  size_t released = 77;
  void *block = NULL;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, take_status(pool, 1000, &block));
  CHECK(block == NULL);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, take_status(pool, 0, &block));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_trim(pool, 0, 0, &released));
  CHECK_EQ(released, 0);
  memset(&stats, 0xA5, sizeof stats);
  stats.struct_size = sizeof stats;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_get_stats(pool, 0, &stats));
  CHECK_EQ(stats.reserved_bytes, 0);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_destroy(pool));
}

static void stale_and_wild_handles_are_refused(void) {
  pool_t *first = new_pool(NULL), *second;
  uint64_t chance = 99;
  int i;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_destroy(NULL));
  destroy(first); /* never used */
  no_function_takes(first);
  second = new_pool(NULL);
  CHECK(second != first);
  give(take(second, MIB));
  no_function_takes(first);
  for (i = 0; i < 300; i++) {
    uintptr_t wild = i < 200 ? (uintptr_t)second - 100 + (uintptr_t)i : (uintptr_t)random_next(&chance);
    if (wild != 0 && wild != (uintptr_t)second) {
      no_function_takes((pool_t *)wild);
    }
  }
  no_function_takes((pool_t *)&chance);
  no_function_takes((pool_t *)(uintptr_t)UINTPTR_MAX);
  no_function_takes((pool_t *)(UINTPTR_MAX - 15));
  destroy(second);
  no_function_takes(second);
  no_function_takes(second);
  check_all_gone();
}

static void a_pool_with_live_blocks_is_not_destroyed(void) {
  pool_t *pool = new_pool(NULL), *pools[2] = {NULL, NULL};
  void *small, *large;
  pool_stats before, after;
  int i;
  pools[1] = pool;
  idle_on(pool, 3, 20 * MIB);
  small = take(pool, 100);
  large = take(pool, 30 * MIB);
  fill(large, 30 * MIB, 0xabc, NULL);
  CU(CtxSynchronize());
  before = pool_stats_of(pool, 0);
  for (i = 0; i < 2; i++) {
    CHECK_STATUS(POOL_ERROR_IN_USE, pool_destroy(pool));
    after = pool_stats_of(pool, 0);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK(info_of(small).pool == pool);
  }
  CHECK(holds(large, 30 * MIB, 0xabc));
  CHECK_POOLS(pools, 2, 0);
  give(take(pool, MIB));
  give(small);
  CHECK_STATUS(POOL_ERROR_IN_USE, pool_destroy(pool));
  give(large);
  destroy(pool);
  no_function_takes(pool);
  check_all_gone();
}

/* What the device still uses is waited for; what takes too long goes back later, and is not lost. */
static void frees_under_way_outlive_the_pool(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  int way;
  for (way = 0; way < 4; way++) {
    pool_options options = default_options();
    pool_t *pool;
    void *block, *next;
    options.settle_ms = way < 2 ? 10000 : 20;
    pool = new_pool(&options);
    block = take_on(pool, 40 * MIB, stream);
    busy(stream, 150);
    fill(block, 40 * MIB, 0x01d, stream);
    CHECK_STATUS(POOL_OK, way % 2 ? pool_free(block) : pool_free_async(block, stream));
    destroy(pool);
    no_function_takes(pool);
    CHECK_EQ(held_by(NULL), 0);
    if (way < 2 && on_sim()) {
      CHECK_EQ(sim.used_bytes(0), 0);
    }
    /* The next pool in the context gets nothing that is still written to. */
    pool = new_pool(NULL);
    next = take(pool, 40 * MIB);
    fill(next, 40 * MIB, 0x4e3, CU_STREAM_PER_THREAD);
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    CU(StreamSynchronize(stream));
    CHECK(holds(next, 40 * MIB, 0x4e3));
    give(next);
    destroy(pool);
    CHECK_TRIMS_TO_ZERO(0);
  }
  CU(StreamDestroy(stream));
}

/* What is left goes back with a later call, and no pool's end waits for all that others have left, one after
 * the other. */
static void leftovers_go_back_later(void) {
  enum { POOLS = 5, SETTLE_MS = 300 };
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  pool_options options = default_options();
  pool_t *pools[POOLS];
  int version = 0, i;
  double start;
  CU(DriverGetVersion(&version));
  if (!needs_sim() || version < 12050) { /* older ones can only be waited for */
    CU(StreamDestroy(stream));
    return;
  }
  sim.set_free_waits(0);
  options.settle_ms = SETTLE_MS;
  for (i = 0; i < POOLS; i++) {
    pools[i] = new_pool(&options);
    give(take(pools[i], 5 * MIB));
    CHECK_STATUS(POOL_OK, pool_free_async(take_on(pools[i], 5 * MIB, stream), stream));
    if (i == 0) {
      busy(stream, (POOLS + 1) * SETTLE_MS);
    }
  }
  for (i = 0; i < POOLS; i++) {
    start = now_ms();
    destroy(pools[i]);
    CHECK(now_ms() - start < 2 * SETTLE_MS);
  }
  CHECK(sim.used_bytes(0) > 0);
  CHECK_TRIMS_TO_ZERO(0);
  sim.set_free_waits(1);
  CU(StreamDestroy(stream));
}

/* Memory that a destroyed pool could not return is the first to serve others. */
static void memory_of_destroyed_pools_serves_others(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  pool_options options = default_options();
  pool_t *pool, *other = new_pool(NULL);
  int version = 0;
  void *block;
  CU(DriverGetVersion(&version));
  if (!needs_sim() || version < 12050) { /* older ones can only be waited for */
    destroy(other);
    return;
  }
  options.settle_ms = 0;
  pool = new_pool(&options);
  block = take_on(pool, 5 * GIB, stream);
  idle_on(other, 2, GIB);
  busy(stream, 100);
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  sim.set_free_waits(0);
  destroy(pool);
  CHECK_EQ(sim.used_bytes(0), 7 * GIB);
  CU(StreamSynchronize(stream));
  block = take(NULL, 4 * GIB);
  CHECK_EQ(held_by(other), 2 * GIB);
  sim.set_free_waits(1);
  give(block);
  destroy(other);
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
}

static void late_pointers_are_told(void) {
  pool_t *pool = new_pool(NULL), *next;
  void *small = take(pool, 1000), *large = take(pool, 20 * MIB), *block;
  pool_block_info info;
  int i;
  give(small);
  give(large);
  CU(CtxSynchronize());
  destroy(pool);
  for (i = 0; i < 2; i++) {
    info.struct_size = sizeof info;
    CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_free(small));
    CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_free_async(large, NULL));
    CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_use_on_stream(large, NULL));
    CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_query((char *)large + MIB, &info));
    /* In the middle of another pool's work, too. */
    if (i == 0) {
      next = new_pool(NULL);
      idle_on(next, 1, 3 * MIB);
      block = take_on(next, 50 * MIB, CU_STREAM_PER_THREAD);
      if (block != large && block != small) {
        CHECK_STATUS(POOL_OK, pool_trim(next, 0, 0, NULL));
        CHECK(pool_free(small) != POOL_OK);
      }
      CHECK_EQ(pool_stats_of(next, 0).live_blocks, 1);
      CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_PER_THREAD));
      destroy(next);
      check_all_gone();
    }
  }
}

/* ---- many ---- */

static void pools_come_and_go(void) {
  enum { TIMES = 5000 };
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  uint64_t chance = 5;
  int i;
  for (i = 0; i < TIMES; i++) {
    pool_options options = default_options();
    pool_t *pool;
    void *one, *two;
    options.limit_bytes = i % 3 == 0 ? 64 * MIB : 0;
    pool = new_pool(&options);
    one = take(pool, random_size(&chance, 8 * MIB));
    two = take_on(pool, random_size(&chance, 8 * MIB), i % 2 ? stream : CU_STREAM_PER_THREAD);
    if (pool == NULL || one == NULL || two == NULL) {
      break;
    }
    CHECK_EQ(pool_stats_of(pool, 0).alloc_count, 2); /* a new pool begins with new counters */
    give(one);
    CHECK_STATUS(POOL_OK, i % 5 ? pool_free_async(two, stream) : pool_free(two));
    if (!CHECK_STATUS(POOL_OK, pool_destroy(pool))) {
      break;
    }
  }
  check_all_gone();
  CU(StreamDestroy(stream));
}

static void so_many_and_no_more(void) {
  enum { MOST = 256 };
  static pool_t *pools[MOST + 1];
  pool_t *more = (pool_t *)0x5a5a;
  void *blocks[MOST];
  int round, i;
  for (round = 0; round < 2; round++) {
    for (i = 0; i < MOST; i++) {
      pools[i] = new_pool(NULL);
      blocks[i] = take(pools[i], 3000 + (size_t)i);
      CHECK(blocks[i] != NULL && info_of(blocks[i]).pool == pools[i]);
    }
    CHECK_STATUS(POOL_ERROR_NOT_SUPPORTED, pool_create(NULL, &more));
    CHECK(more == NULL);
    pools[MOST] = NULL;
    CHECK_POOLS(pools, MOST + 1, 0);
    /* All of them make way for one. */
    if (round == 0 && on_sim()) {
      for (i = 0; i < MOST; i++) {
        give(blocks[i]);
      }
      give(take(NULL, 8 * GIB - 2 * MIB));
      for (i = 0; i < MOST; i++) {
        blocks[i] = take(pools[i], 100);
      }
    }
    for (i = 0; i < MOST; i++) {
      give(blocks[i]);
      destroy(pools[i]);
    }
  }
  check_all_gone();
}

int main(void) {
  driver_start(0);
  RUN(stale_and_wild_handles_are_refused);
  RUN(options_are_the_pools_own);
  RUN(blocks_are_of_their_pool);
  RUN(limits_are_kept_with_own_memory);
  RUN(limits_hold_for_all_contexts);
  RUN(a_pool_with_live_blocks_is_not_destroyed);
  RUN(frees_under_way_outlive_the_pool);
  RUN(leftovers_go_back_later);
  RUN(memory_of_destroyed_pools_serves_others);
  RUN(late_pointers_are_told);
  RUN(pools_come_and_go);
  RUN(so_many_and_no_more);
  return driver_result();
}
