/* pools_life.c: pools beside what can happen to a process: threads, lost contexts, stream captures, forks. */

#define CHECK_HOST_TIME /* its threads race */
#include "check.h"
#include "driver.h"
#include "pools.h"

static CUcontext primary;

static void destroy(pool_t *pool) {
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
}

/* ---- threads ---- */

static int stop;

/* What happens to requests of a pool that another thread may be destroying. */
static int may_be_gone(int status) {
  return status == POOL_OK || status == POOL_ERROR_INVALID_ARGUMENT;
}

static void *make_and_end_pools(void *number) {
  uint64_t chance = 41 + (uint64_t)(uintptr_t)number;
  int i, j;
  CU(CtxSetCurrent(primary));
  for (i = 0; i < 150; i++) {
    pool_t *pool = new_pool(NULL);
    void *blocks[6];
    for (j = 0; j < 6; j++) {
      size_t size = random_size(&chance, 10 * MIB);
      blocks[j] = j % 2 ? take(pool, size) : take_on(pool, size, CU_STREAM_PER_THREAD);
      fill(blocks[j], size < 4096 ? size & ~(size_t)3 : 4096, (unsigned)i * 16 + (unsigned)j,
           CU_STREAM_PER_THREAD);
    }
    CHECK_STATUS(POOL_ERROR_IN_USE, pool_destroy(pool));
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    for (j = 0; j < 6; j++) {
      size_t size = info_of(blocks[j]).requested_size;
      CHECK(info_of(blocks[j]).pool == pool);
      CHECK(holds(blocks[j], size < 4096 ? size & ~(size_t)3 : 4096, (unsigned)i * 16 + (unsigned)j));
      CHECK_STATUS(POOL_OK, j % 3 ? pool_free(blocks[j]) : pool_free_async(blocks[j], CU_STREAM_PER_THREAD));
    }
    destroy(pool);
  }
  return NULL;
}

static void *use_the_default_pool(void *unused) {
  uint64_t chance = 7;
  (void)unused;
  CU(CtxSetCurrent(primary));
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    void *block = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&block, random_size(&chance, 20 * MIB), CU_STREAM_PER_THREAD));
    CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_PER_THREAD));
    block = take(NULL, random_size(&chance, 60 * MIB));
    give(block);
    if (random_below(&chance, 16) == 0) {
      CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    }
  }
  return NULL;
}

static void pools_come_and_go_beside_the_default_one(void) {
  CUdeviceptr foreign = 0;
  struct check_thread makers[2], user;
  uintptr_t i;
  stop = 0;
  /* So little is left that pools get into each other's ladders. */
  if (on_sim()) {
    CU(MemAlloc(&foreign, 8 * GIB - 350 * MIB));
  }
  start_thread(&user, use_the_default_pool, NULL);
  for (i = 0; i < 2; i++) {
    start_thread(&makers[i], make_and_end_pools, (void *)i);
  }
  for (i = 0; i < 2; i++) {
    join_thread(&makers[i]);
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  join_thread(&user);
  if (on_sim()) {
    CU(MemFree(foreign));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* One thread destroys the pool as soon as it can, others request until it is gone, and nothing gets lost. */
static void *use_until_gone(void *pool) {
  uint64_t chance = 3 + (uint64_t)(uintptr_t)pool;
  int status = POOL_OK;
  CU(CtxSetCurrent(primary));
  while (status == POOL_OK) {
    void *block = NULL;
    status = take_status((pool_t *)pool, random_size(&chance, 3 * MIB), &block);
    CHECK(may_be_gone(status));
    CHECK((status == POOL_OK) == (block != NULL));
    give(block);
  }
  return NULL;
}

static void a_pool_ends_under_requests(void) {
  enum { THREADS = 2 };
  int i, j;
  for (i = 0; i < 100; i++) {
    pool_t *pool = new_pool(NULL);
    struct check_thread threads[THREADS];
    int status = POOL_ERROR_IN_USE;
    double start = now_ms();
    for (j = 0; j < THREADS; j++) {
      start_thread(&threads[j], use_until_gone, pool);
    }
    while (status == POOL_ERROR_IN_USE && now_ms() - start < 1e3 * CHILD_SECONDS) {
      status = pool_destroy(pool);
    }
    CHECK_STATUS(POOL_OK, status);
    for (j = 0; j < THREADS; j++) {
      join_thread(&threads[j]);
    }
    CU(CtxSynchronize());
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    if (on_sim() && !CHECK_EQ(sim.used_bytes(0), 0)) {
      break;
    }
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* ---- contexts ---- */

/* How many ways to lose a context: before 12.0 nothing tells that the primary one was reset and is back. */
static int ways_to_lose(void) {
  int version = 0;
  CU(DriverGetVersion(&version));
  return version < 12000 ? 1 : 2;
}

/* The primary context is reset, another one destroyed; the primary one is current then. */
static void lose(CUcontext context) {
  if (context == primary) {
    CU(DevicePrimaryCtxReset(0));
    CU(DevicePrimaryCtxRetain(&primary, 0));
  } else {
    CU(CtxDestroy(context));
  }
  CU(CtxSetCurrent(primary));
}

static void blocks_go_with_their_context(void) {
  int reset;
  for (reset = 0; reset < ways_to_lose(); reset++) {
    pool_t *pool = new_pool(NULL), *other = new_pool(NULL), *pools[3] = {NULL, NULL, NULL};
    CUcontext context = primary;
    void *lost, *large, *kept = NULL, *block;
    pools[1] = pool;
    pools[2] = other;
    if (!reset) {
      kept = take(pool, 5 * MIB);
      CU(CtxCreate(&context, 0, 0));
    }
    lost = take(pool, 1000);
    large = take_on(other, 20 * MIB, CU_STREAM_PER_THREAD);
    idle_on(other, 2, 10 * MIB);
    lose(context);
    CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(lost));
    CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(large));
    /* The pools go on, in the context's next life or another one. */
    block = take(other, 30 * MIB);
    fill(block, 30 * MIB, 0x77, NULL);
    CHECK(holds(block, 30 * MIB, 0x77));
    give(block);
    CHECK_POOLS(pools, 3, 0);
    if (!reset) {
      CHECK_STATUS(POOL_ERROR_IN_USE, pool_destroy(pool));
      give(kept);
    }
    /* Blocks that went with their context are not live. */
    destroy(pool);
    destroy(other);
    CHECK(pool_free(lost) != POOL_OK);
    CHECK_TRIMS_TO_ZERO(0);
  }
}

/* Nobody notices the loss before the pool is destroyed. */
static void a_pool_ends_after_its_context(void) {
  int reset;
  for (reset = 0; reset < ways_to_lose(); reset++) {
    pool_t *pool = new_pool(NULL);
    CUcontext context = primary;
    if (!reset) {
      CU(CtxCreate(&context, 0, 0));
    }
    take(pool, 1000);
    take(pool, 40 * MIB);
    idle_on(pool, 2, 10 * MIB);
    lose(context);
    destroy(pool);
    CHECK_TRIMS_TO_ZERO(0);
  }
}

/* What pools held in a context that is gone is held no more: in what they say, and when memory runs out. */
static void memory_of_lost_contexts_serves_others(void) {
  int how;
  if (!needs_sim()) {
    return;
  }
  for (how = 0; how < 4; how++) {
    pool_t *pool = how % 2 ? NULL : new_pool(NULL), *limited;
    CUcontext context = NULL;
    CUdeviceptr foreign = 0;
    size_t released = 0;
    CU(CtxCreate(&context, 0, 0));
    take(pool, 5 * GIB);
    idle_on(pool, 1, GIB);
    CU(CtxDestroy(context));
    CU(CtxSetCurrent(primary));
    if (how / 2) {
      give(take(NULL, 6 * GIB));
    } else {
      CHECK_STATUS(POOL_OK, pool_reclaim(0, 4 * GIB, &released));
      CU(MemAlloc(&foreign, 4 * GIB));
      CU(MemFree(foreign));
    }
    CHECK_TRIMS_TO_ZERO(0);
    if (pool != NULL) {
      destroy(pool);
    }
    /* And it is no matter of a limit. */
    limited = pool_with_limit(GIB);
    CU(CtxCreate(&context, 0, 0));
    take(limited, GIB - 20 * MIB);
    CHECK(pool_stats_of(limited, 0).live_bytes > 0);
    CU(CtxDestroy(context));
    CU(CtxSetCurrent(primary));
    give(take(limited, GIB - 20 * MIB));
    CU(CtxCreate(&context, 0, 0));
    take(limited, GIB - 20 * MIB);
    CU(CtxDestroy(context));
    CU(CtxSetCurrent(primary));
    /* Counting does not ask the driver, this does. */
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, NULL));
    CHECK_EQ(pool_stats_of(limited, 0).live_bytes, 0);
    destroy(limited);
    CHECK_TRIMS_TO_ZERO(0);
  }
}

/* A thousand pools in a thousand contexts are too many; pools in lost contexts and destroyed ones are not. */
static void contexts_and_pools_come_and_go(void) {
  int i;
  for (i = 0; i < 60; i++) {
    pool_t *pool = new_pool(NULL);
    CUcontext context = NULL;
    CU(CtxCreate(&context, 0, 0));
    give(take(pool, 3 * MIB));
    give(take(NULL, 3 * MIB));
    if (i % 2) {
      destroy(pool);
    }
    CU(CtxDestroy(context));
    CU(CtxSetCurrent(primary));
    if (i % 2 == 0) {
      destroy(pool);
    }
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* ---- captures ---- */

/* One pool is told of the capture; what another pool of the context does must not break it. */
static void a_capture_is_every_pools_matter(void) {
  int mode, told;
  if (cu.StreamBeginCapture == NULL || cu.StreamEndCapture == NULL || cu.GraphDestroy == NULL) {
    check_skip("the driver has no stream capture");
    return;
  }
  for (mode = CU_STREAM_CAPTURE_MODE_GLOBAL; mode <= CU_STREAM_CAPTURE_MODE_RELAXED; mode++) {
    for (told = 0; told < 2; told++) {
      CUstream captured = new_stream(told ? CU_STREAM_NON_BLOCKING : 0);
      CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
      pool_options options = default_options();
      pool_t *one, *two;
      void *block = NULL, *inside, *before;
      CUgraph graph = NULL;
      int status;
      options.limit_bytes = 64 * MIB;
      options.settle_ms = 100;
      one = new_pool(&options);
      two = new_pool(&options);
      before = take_on(two, 30 * MIB, other);
      inside = take_on(one, 3 * MIB, captured);
      give(take(two, 20 * MIB));
      CU(StreamBeginCapture(captured, mode));
      /* A blocking stream's capture can be seen; of another one's it is told. */
      if (told) {
        CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, captured));
      }
      CHECK_STATUS(POOL_OK, pool_free_async(take_on(one, 5 * MIB, captured), captured));
      /* The other pool settles, remaps, releases, waits, reclaims, and comes to its end. */
      CHECK_STATUS(POOL_OK, pool_free_async(before, other));
      give(take(two, 9 * MIB));
      status = take_status(two, 60 * MIB, &block);
      CHECK(status == POOL_OK || status == POOL_ERROR_OUT_OF_MEMORY);
      give(block);
      status = take_status(NULL, 60 * MIB, &block);
      CHECK(status == POOL_OK || status == POOL_ERROR_OUT_OF_MEMORY);
      give(block);
      CHECK_STATUS(POOL_OK, pool_trim(two, 0, 0, NULL));
      CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, NULL));
      destroy(two);
      CHECK_EQ(cu.StreamEndCapture(captured, &graph), 0);
      if (CHECK(graph != NULL)) {
        CU(GraphDestroy(graph));
      }
      CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, captured));
      CHECK_STATUS(POOL_OK, pool_free_async(inside, captured));
      destroy(one);
      CHECK_TRIMS_TO_ZERO(0);
      CU(StreamDestroy(captured));
      CU(StreamDestroy(other));
    }
  }
}

/* ---- forks ---- */

static pool_t *parents_pool;
static void *parents_block;

static int child_gets_nothing(void) {
  pool_t *out = (pool_t *)0x5a5a;
  size_t released = 77;
  pool_stats stats;
  void *block = NULL;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_create(NULL, &out));
  CHECK(out == NULL);
  CHECK_STATUS(POOL_ERROR_FORKED, take_status(parents_pool, 1000, &block));
  CHECK(block == NULL);
  CHECK_STATUS(POOL_ERROR_FORKED, pool_trim(parents_pool, 0, 0, &released));
  CHECK_EQ(released, 0);
  stats.struct_size = sizeof stats;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_get_stats(parents_pool, 0, &stats));
  CHECK_STATUS(POOL_ERROR_FORKED, pool_reclaim(0, GIB, &released));
  CHECK_STATUS(POOL_ERROR_FORKED, pool_free(parents_block));
  CHECK_STATUS(POOL_ERROR_FORKED, pool_destroy(parents_pool));
  return check_result();
}

static void *make_pools(void *unused) {
  (void)unused;
  CU(CtxSetCurrent(primary));
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    destroy(new_pool(NULL));
  }
  return NULL;
}

static void a_forked_child_has_no_pools(void) {
  pool_stats before, after;
  struct check_thread threads[2];
  int i;
  parents_pool = new_pool(NULL);
  parents_block = take(parents_pool, 5 * MIB);
  fill(parents_block, 5 * MIB, 0x33, NULL);
  CU(CtxSynchronize());
  before = pool_stats_of(parents_pool, 0);
  CHECK_EQ(in_child(child_gets_nothing), 0);
  /* Whatever the parent's other threads were doing with the table of pools. */
  stop = 0;
  for (i = 0; i < 2; i++) {
    start_thread(&threads[i], make_pools, NULL);
  }
  for (i = 0; i < 40; i++) {
    if (!CHECK_EQ(in_child(child_gets_nothing), 0)) {
      break;
    }
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  for (i = 0; i < 2; i++) {
    join_thread(&threads[i]);
  }
  after = pool_stats_of(parents_pool, 0);
  CHECK(memcmp(&before, &after, sizeof before) == 0);
  CHECK(holds(parents_block, 5 * MIB, 0x33));
  give(parents_block);
  destroy(parents_pool);
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  primary = driver_start(0);
  RUN(pools_come_and_go_beside_the_default_one);
  RUN(a_pool_ends_under_requests);
  RUN(a_capture_is_every_pools_matter);
  RUN(a_forked_child_has_no_pools);
  check_blocks_were_lost = 1;
  RUN(memory_of_lost_contexts_serves_others);
  RUN(a_pool_ends_after_its_context);
  RUN(contexts_and_pools_come_and_go);
  RUN(blocks_go_with_their_context);
  return driver_result();
}
