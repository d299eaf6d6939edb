/* pools.h: pools beside the default one, for the C tests. A NULL pool is the default one everywhere. Include
 * after driver.h. */

#ifndef POOLS_H
#define POOLS_H

/* A pool with the options of the default one, or with `options`. */
static inline pool_t *new_pool(const pool_options *options) {
  pool_t *pool = (pool_t *)0x5a5a;
  CHECK_STATUS(POOL_OK, pool_create(options, &pool));
  CHECK(pool != NULL);
  return pool;
}

static inline pool_t *pool_with_limit(uint64_t bytes) {
  pool_options options = default_options();
  options.limit_bytes = bytes;
  return new_pool(&options);
}

static inline int take_status(pool_t *pool, size_t size, void **out) {
  pool_request request = request_of(size);
  request.pool = pool;
  *out = (void *)0x5a5a;
  return (int)pool_alloc_with(out, &request);
}

/* A device-ordered block that must be had. */
static inline void *take(pool_t *pool, size_t size) {
  void *block = NULL;
  CHECK_STATUS(POOL_OK, take_status(pool, size, &block));
  return block;
}

static inline void refuse(pool_t *pool, size_t size) {
  void *block = NULL;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, take_status(pool, size, &block));
  CHECK(block == NULL);
}

static inline void *take_on(pool_t *pool, size_t size, CUstream stream) {
  pool_request request = request_of(size);
  void *block = NULL;
  request.pool = pool;
  request.stream = stream;
  request.flags = POOL_REQUEST_STREAM_ORDERED;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
  return block;
}

static inline void give(void *block) {
  CHECK_STATUS(POOL_OK, pool_free(block));
}

/* Makes the pool idle on `count` pieces of that size, all finished with. */
static inline void idle_on(pool_t *pool, int count, size_t size) {
  enum { MOST = 64 };
  void *pieces[MOST];
  int i;
  for (i = 0; i < count && i < MOST; i++) {
    pieces[i] = take(pool, size);
  }
  for (i = 0; i < count && i < MOST; i++) {
    give(pieces[i]);
  }
  CU(CtxSynchronize());
  /* Gives nothing back, but sees that. */
  CHECK_STATUS(POOL_OK, pool_trim(pool, POOL_DEVICE_CURRENT, SIZE_MAX, NULL));
}

static inline pool_stats pool_stats_of(pool_t *pool, int device) {
  pool_stats stats;
  memset(&stats, 0xA5, sizeof stats);
  stats.struct_size = sizeof stats;
  CHECK_STATUS(POOL_OK, pool_get_stats(pool, device, &stats));
  return stats;
}

static inline uint64_t held_by(pool_t *pool) {
  return pool_stats_of(pool, 0).reserved_bytes;
}

static inline pool_oom_info oom_info(void) {
  pool_oom_info info;
  memset(&info, 0x5a, sizeof info);
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_OK, pool_get_oom_info(&info));
  return info;
}

/* All pools of the program, the default one among them, and what others hold on the device: each identity,
 * and the sum against the driver. Host memory is in the counters, but not on the device. */
static inline void check_pools(pool_t *const *pools, int count, uint64_t foreign, const char *file,
                               int line) {
  uint64_t sum = foreign;
  int i;
  for (i = 0; i < count; i++) {
    pool_stats stats = pool_stats_of(pools[i], 0);
    check_identity(&stats, file, line);
    check_that(stats.spilled_bytes <= stats.reserved_bytes, "spilled <= reserved", file, line);
    sum += stats.reserved_bytes - stats.spilled_bytes;
  }
  if (on_sim()) {
    check_equal(sum, (uint64_t)sim.used_bytes(0),
                "what the pools hold is not what the driver says but", file, line);
  }
}

#define CHECK_POOLS(pools, count, foreign) check_pools((pools), (count), (foreign), __FILE__, __LINE__)

#endif /* POOLS_H */
