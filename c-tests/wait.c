/* wait.c: rung 8. Requests that find no memory wait in turn for what others free (option `oom_wait_ms`). */

#include "check.h"
#include "driver.h"

static CUcontext context;
/* Until a started thread waits; after how long who waits looks for what nobody tells it; until who was told
 * answers. */
enum { START_MS = 60, LOOK_AGAIN_MS = 50, TELL_MS = 4 };

static void set_wait(unsigned milliseconds) {
  pool_options options = default_options();
  options.oom_wait_ms = milliseconds;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
}

static pool_oom_info last_oom(void) {
  pool_oom_info info;
  memset(&info, 0xA5, sizeof info);
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_OK, pool_get_oom_info(&info));
  return info;
}

/* A thread that asks once. */
struct asker {
  pool_t *pool;
  size_t size;
  struct check_thread thread;
  int status;
  void *block;
  double took_ms;
  int order;
  int hold_ms; /* frees the block itself after that, if not 0 */
};
static int served;

static void *ask(void *data) {
  struct asker *asker = (struct asker *)data;
  pool_request request = request_of(asker->size);
  double start;
  CU(CtxSetCurrent(context));
  request.pool = asker->pool;
  start = now_ms();
  asker->status = pool_alloc_with(&asker->block, &request);
  asker->took_ms = now_ms() - start;
  asker->order = __atomic_add_fetch(&served, 1, __ATOMIC_SEQ_CST);
  if (asker->status == POOL_OK && asker->hold_ms > 0) {
    sleep_ms(asker->hold_ms);
    CHECK_STATUS(POOL_OK, pool_free(asker->block));
  }
  return NULL;
}

static void start(struct asker *asker, pool_t *pool, size_t size, int hold_ms) {
  memset(asker, 0, sizeof *asker);
  asker->pool = pool;
  asker->size = size;
  asker->hold_ms = hold_ms;
  start_thread(&asker->thread, ask, asker);
  sleep_ms(START_MS); /* until it waits */
}

static void finish(struct asker *asker) {
  join_thread(&asker->thread);
}

static void nobody_waits_unless_told_to(void) {
  void *block = NULL, *more = NULL;
  double begin;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  begin = now_ms();
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&more, 6 * GIB));
  CHECK_TOOK(now_ms() - begin, 0);
  CHECK_EQ(last_oom().rungs_tried >> 8, 0);
  set_wait(300);
  begin = now_ms();
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&more, 6 * GIB));
  CHECK_TOOK(now_ms() - begin, 300);
  CHECK_EQ(last_oom().rungs_tried >> 8, 1);
  CHECK_TOOK((double)last_oom().rung_micros[8] / 1000, 300);
  CHECK_EQ(stats_of(0).oom_wait_count, 1);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

static void a_free_serves_who_waits(void) {
  struct asker asker;
  void *block = NULL;
  uint64_t recovered = stats_of(0).oom_recovered_count;
  set_wait(20000);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  start(&asker, NULL, 5 * GIB, 0);
  CHECK_STATUS(POOL_OK, pool_free(block));
  finish(&asker);
  CHECK_STATUS(POOL_OK, asker.status);
  CHECK_TOOK(asker.took_ms, START_MS);
  CHECK_EQ(stats_of(0).oom_recovered_count - recovered, 1);
  CHECK_STATUS(POOL_OK, pool_free(asker.block));
  /* Freed, but the device is still at it: the one that waits gets it when that is over, and not before. */
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 6 * GIB, NULL));
  start(&asker, NULL, 5 * GIB, 0);
  busy(NULL, 300);
  fill(block, MIB, 7, NULL);
  CHECK_STATUS(POOL_OK, pool_free_async(block, NULL));
  finish(&asker);
  CHECK_STATUS(POOL_OK, asker.status);
  CHECK_TOOK(asker.took_ms, START_MS + 300);
  CHECK_EQ(cu.StreamQuery(NULL), 0);
  CHECK_STATUS(POOL_OK, pool_free(asker.block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Nobody tells of memory that a foreign allocation gives back; who waits looks for it. */
static void a_foreign_free_is_noticed(void) {
  struct asker asker;
  CUdeviceptr foreign = 0;
  set_wait(20000);
  CU(MemAlloc(&foreign, 6 * GIB));
  start(&asker, NULL, 5 * GIB, 0);
  CU(MemFree(foreign));
  finish(&asker);
  CHECK_STATUS(POOL_OK, asker.status);
  CHECK(asker.took_ms >= START_MS && asker.took_ms < START_MS + LOOK_AGAIN_MS + 2);
  CHECK_STATUS(POOL_OK, pool_free(asker.block));
  CHECK_TRIMS_TO_ZERO(0);
}

static void first_come_first_served(void) {
  enum { ASKERS = 6 };
  struct asker askers[ASKERS];
  void *block = NULL;
  int i, place;
  set_wait(60000);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  served = 0;
  for (i = 0; i < ASKERS; i++) {
    start(&askers[i], NULL, (size_t)(5 + i % 2) * GIB, 10);
  }
  CHECK_STATUS(POOL_OK, pool_free(block));
  /* One that comes now is the last, although memory may be idle at this moment. */
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * GIB));
  place = __atomic_load_n(&served, __ATOMIC_SEQ_CST);
  CHECK_EQ(place, ASKERS);
  for (i = 0; i < ASKERS; i++) {
    finish(&askers[i]);
    CHECK_STATUS(POOL_OK, askers[i].status);
    CHECK_EQ(askers[i].order, i + 1);
  }
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

static int stop;

/* Never gives the memory up for longer than a moment, on the fast path. */
static void *hog(void *data) {
  CUstream stream;
  CU(CtxSetCurrent(context));
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    void *block = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 5 * GIB, stream));
    CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  }
  return data;
}

static void a_hot_thread_starves_nobody(void) {
  struct check_thread thread;
  int i;
  set_wait(20000);
  stop = 0;
  start_thread(&thread, hog, NULL);
  for (i = 0; i < 20; i++) {
    void *block = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
    CHECK_STATUS(POOL_OK, pool_free(block));
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  join_thread(&thread);
  CHECK_TRIMS_TO_ZERO(0);
}

/* Much smaller requests are served meanwhile: whoever holds the memory may need a little more to get done. */
static void small_requests_pass(void) {
  struct asker large, equal;
  void *block = NULL, *small = NULL;
  set_wait(20000);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * GIB));
  start(&large, NULL, 4 * GIB, 0);
  CHECK_STATUS(POOL_OK, pool_alloc(&small, 4 * GIB / 16));
  CHECK_STATUS(POOL_OK, pool_free(small));
  /* One that is not, although it would fit, waits behind the other. */
  start(&equal, NULL, GIB, 0);
  CHECK_EQ(__atomic_load_n(&equal.block, __ATOMIC_SEQ_CST) == NULL, 1);
  CHECK_STATUS(POOL_OK, pool_free(block));
  finish(&large);
  finish(&equal);
  CHECK_STATUS(POOL_OK, large.status);
  CHECK_STATUS(POOL_OK, equal.status);
  CHECK_STATUS(POOL_OK, pool_free(large.block));
  CHECK_STATUS(POOL_OK, pool_free(equal.block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* A request that its own pool's limit keeps waiting is in nobody else's way, and is served by a free in its
 * pool alone. */
static void a_limit_is_its_pools_own_matter(void) {
  pool_options options = default_options();
  struct asker limited, other;
  pool_t *pool = NULL;
  pool_request request = request_of(GIB);
  void *inside = NULL, *outside = NULL;
  set_wait(20000);
  options.limit_bytes = GIB;
  options.oom_wait_ms = 20000;
  CHECK_STATUS(POOL_OK, pool_create(&options, &pool));
  request.pool = pool;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&inside, &request));
  CHECK_STATUS(POOL_OK, pool_alloc(&outside, 2 * GIB));
  start(&limited, pool, GIB, 0);
  start(&other, NULL, 4 * GIB, 0);
  finish(&other);
  CHECK_STATUS(POOL_OK, other.status);
  CHECK_STATUS(POOL_OK, pool_free(other.block));
  CHECK_STATUS(POOL_OK, pool_free(outside));
  CHECK_EQ(__atomic_load_n(&limited.block, __ATOMIC_SEQ_CST) == NULL, 1);
  CHECK_STATUS(POOL_OK, pool_free(inside));
  finish(&limited);
  CHECK_STATUS(POOL_OK, limited.status);
  CHECK_STATUS(POOL_ERROR_IN_USE, pool_destroy(pool));
  CHECK_STATUS(POOL_OK, pool_free(limited.block));
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Who waits looks for memory now and then, and for that moment the pool is in use. */
static void end_pool(pool_t *pool) {
  double begin = now_ms();
  int status = POOL_ERROR_IN_USE;
  while (status == POOL_ERROR_IN_USE && now_ms() - begin < 5000) {
    status = (int)pool_destroy(pool);
    let_time_pass();
  }
  CHECK_STATUS(POOL_OK, status);
}

/* Who waits in a pool without blocks is not in the way of its end, and is told of it at once, whether it is
 * its turn or not. */
static void a_pool_ends_while_its_requests_wait(void) {
  struct asker first, second;
  pool_options options = default_options();
  pool_t *pools[2] = {NULL, NULL};
  void *block = NULL;
  int i;
  options.oom_wait_ms = 20000;
  for (i = 0; i < 2; i++) {
    CHECK_STATUS(POOL_OK, pool_create(&options, &pools[i]));
  }
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 7 * GIB));
  start(&first, pools[0], 4 * GIB, 0);
  start(&second, pools[1], 4 * GIB, 0);
  end_pool(pools[1]);
  finish(&second);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, second.status);
  CHECK(second.block == NULL && second.took_ms <= START_MS + TELL_MS);
  end_pool(pools[0]);
  finish(&first);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, first.status);
  CHECK(first.block == NULL && first.took_ms <= 2 * (START_MS + TELL_MS));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* A request that the limit keeps waiting hears of a new one. */
static void a_higher_limit_is_told(void) {
  pool_options options = default_options();
  uint64_t limit = options.limit_bytes;
  struct asker asker;
  options.oom_wait_ms = 20000;
  options.limit_bytes = GIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  start(&asker, NULL, 2 * GIB, 0);
  options.limit_bytes = limit;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  finish(&asker);
  CHECK_STATUS(POOL_OK, asker.status);
  CHECK(asker.took_ms <= START_MS + TELL_MS);
  CHECK_STATUS(POOL_OK, pool_free(asker.block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* A context that goes ends the waits in it, as soon as anybody notices. */
static void a_lost_context_is_told(void) {
  struct asker asker;
  CUcontext kept = context;
  void *block = NULL;
  set_wait(20000);
  CU(CtxCreate(&context, 0, 0));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  start(&asker, NULL, 6 * GIB, 0);
  CU(CtxDestroy(context));
  check_blocks_were_lost = 1;
  context = kept;
  CU(CtxSetCurrent(kept));
  CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(block));
  finish(&asker);
  CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, asker.status);
  CHECK(asker.block == NULL && asker.took_ms <= START_MS + TELL_MS);
  CHECK_TRIMS_TO_ZERO(0);
}

static size_t ask_inside(void *user, int device, size_t wanted) {
  void *block = NULL;
  (void)device;
  (void)wanted;
  *(int *)user = pool_alloc(&block, 7 * GIB);
  CHECK_STATUS(POOL_OK, pool_free(block));
  return 0;
}

/* Where waiting would stop others or break a capture, there is none. */
static void no_wait_in_captures_and_callbacks(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  CUgraph graph = NULL;
  uint64_t id = 0;
  void *block = NULL, *more = NULL;
  int inside = POOL_OK;
  double begin;
  set_wait(400);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 6 * GIB, stream));
  CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(ask_inside, &inside, 0, &id));
  begin = now_ms();
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&more, 6 * GIB));
  CHECK_EQ(inside, POOL_ERROR_OUT_OF_MEMORY);
  CHECK_TOOK(now_ms() - begin, 400);
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(id));
  CU(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  begin = now_ms();
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc_async(&more, 6 * GIB, stream));
  CHECK_TOOK(now_ms() - begin, 0);
  CU(StreamEndCapture(stream, &graph));
  CU(GraphDestroy(graph));
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  CU(StreamSynchronize(stream));
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  context = driver_start(0);
  if (!on_sim()) {
    printf("skipped: needs a device of 8 GiB\n");
    return EXIT_SKIPPED;
  }
  RUN(nobody_waits_unless_told_to);
  RUN(a_free_serves_who_waits);
  RUN(a_foreign_free_is_noticed);
  RUN(first_come_first_served);
  RUN(a_hot_thread_starves_nobody);
  RUN(small_requests_pass);
  RUN(a_limit_is_its_pools_own_matter);
  RUN(a_pool_ends_while_its_requests_wait);
  RUN(a_higher_limit_is_told);
  RUN(no_wait_in_captures_and_callbacks);
  RUN(a_lost_context_is_told);
  return driver_result();
}
