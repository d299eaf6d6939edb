/* scenario_ladder.h: like scenario.h, with everything that the ladder has: two pools beside the default one,
 * a headroom, waiting for frees, host memory, reclaim for others and a callback. */

#ifndef SCENARIO_LADDER_H
#define SCENARIO_LADDER_H

#include "pools.h"
#include "scenario.h"

enum { LADDER_POOLS = 2, LADDER_KEEP = 3 };

struct ladder {
  struct scenario base;
  /* The default pool, and one more. */
  pool_t *pools[LADDER_POOLS];
  uint64_t callback;
};

/* A cache of somebody's, which gives way with a block of a pool. */
static void *ladder_cache;

static size_t ladder_give_way(void *user, int device, size_t wanted) {
  struct ladder *run = (struct ladder *)user;
  void *block = ladder_cache;
  (void)device;
  (void)wanted;
  ladder_cache = NULL;
  if (block == NULL) {
    return 0;
  }
  scenario_free(&run->base, block, 1, NULL);
  return 6 * MIB;
}

static inline void *ladder_take(struct ladder *run, pool_t *pool, size_t size, unsigned flags,
                                CUstream stream) {
  pool_request request = request_of(size);
  void *block = (void *)0x5a5a;
  int status;
  request.pool = pool;
  request.flags = flags;
  request.stream = stream;
  status = pool_alloc_with(&block, &request);
  scenario_allowed(&run->base, status, "pool_alloc_with");
  CHECK((status == POOL_OK) == (block != NULL));
  return block;
}

static inline void ladder_start(struct ladder *run) {
  pool_options options;
  scenario_start(&run->base);
  options = default_options();
  options.settle_ms = 5;
  options.oom_wait_ms = 5;
  options.spill = POOL_SPILL_HOST;
  options.headroom_bytes = 8 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  run->pools[0] = NULL;
  run->pools[1] = new_pool(&options);
  scenario_keep(&run->base);
  CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(ladder_give_way, run, 0, &run->callback));
  ladder_cache = take(run->pools[1], 6 * MIB);
  /* Both pools idle on something, and others have once asked. */
  idle_on(NULL, 3, 5 * MIB);
  idle_on(run->pools[1], 4, 6 * MIB);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 4 * MIB, NULL));
}

/* Only calls of the library, as in scenario_run. */
static inline void ladder_run(struct ladder *run) {
  const unsigned ordered = POOL_REQUEST_STREAM_ORDERED;
  pool_t *other = run->pools[1], *third = (pool_t *)0x5a5a;
  void *one, *two, *large, *host;
  pool_stats stats;
  int status, i;
  /* Own idle memory, then the other pool's, then the headroom. */
  one = ladder_take(run, NULL, 30 * MIB, ordered, run->base.one);
  two = ladder_take(run, other, 40 * MIB, 0, NULL);
  scenario_allowed(&run->base, pool_reclaim(0, 10 * MIB, NULL), "pool_reclaim");
  /* All that is left, or host memory. */
  large = ladder_take(run, NULL, 20 * MIB, 0, NULL);
  host = ladder_take(run, other, 80 * MIB, ordered, run->base.two);
  scenario_free(&run->base, one, 0, run->base.one);
  scenario_free(&run->base, host, 0, run->base.two);
  one = ladder_take(run, other, 35 * MIB, ordered, run->base.two);
  scenario_free(&run->base, two, 1, NULL);
  host = ladder_take(run, NULL, 90 * MIB, 0, NULL);
  scenario_free(&run->base, large, 1, NULL);
  scenario_free(&run->base, host, 1, NULL);
  scenario_free(&run->base, one, 0, run->base.two);
  /* A pool of a short life. */
  status = pool_create(NULL, &third);
  scenario_allowed(&run->base, status, "pool_create");
  CHECK((status == POOL_OK) == (third != NULL));
  if (third != NULL) {
    two = ladder_take(run, third, 10 * MIB, 0, NULL);
    i = run->base.left_count;
    scenario_free(&run->base, two, 1, NULL);
    status = pool_destroy(third);
    if (run->base.left_count == i || status != POOL_ERROR_IN_USE) {
      scenario_allowed(&run->base, status, "pool_destroy");
    }
  }
  for (i = 0; i < LADDER_POOLS; i++) {
    stats.struct_size = sizeof stats;
    scenario_allowed(&run->base, pool_get_stats(run->pools[i], 0, &stats), "pool_get_stats");
    check_identity(&stats, __FILE__, __LINE__);
    scenario_allowed(&run->base, pool_trim(run->pools[i], 0, 2 * MIB, NULL), "pool_trim");
  }
}

static inline void ladder_finish(struct ladder *run) {
  int i;
  CU(CtxSynchronize());
  /* Pools that could not be destroyed are nobody's pools here, so the sum is not checked before. */
  for (i = 0; i < run->base.left_count; i++) {
    CHECK_STATUS(POOL_OK, pool_free(run->base.left[i]));
  }
  run->base.left_count = 0;
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(run->callback));
  CHECK_STATUS(POOL_OK, pool_free(ladder_cache));
  ladder_cache = NULL;
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, NULL));
  CHECK_POOLS(run->pools, LADDER_POOLS, 0);
  CHECK_STATUS(POOL_OK, pool_destroy(run->pools[1]));
  scenario_finish(&run->base);
  CHECK_EQ(pool_stats_of(NULL, 0).spilled_bytes, 0);
}

#endif /* SCENARIO_LADDER_H */
