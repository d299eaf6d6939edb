/* reclaim.c: memory given up for others. pool_reclaim for a foreign allocation beside the pool, and callbacks
 * through which other caches of the process give way to the pool. */

#include "check.h"
#include "driver.h"


/* What a callback of the tests does, and what happened to it. */
struct cache {
  void *block;
  size_t claims;
  uint64_t id;
  int calls;
  int order;
  int allocates;
  int removes_itself;
  volatile int slow_ms;
  volatile int inside;
};
static int calls_in_all;

static size_t give_way(void *user, int device, size_t wanted) {
  struct cache *cache = (struct cache *)user;
  size_t freed = cache->claims;
  CHECK_EQ(device, 0);
  CHECK(wanted > 0);
  __atomic_store_n(&cache->inside, 1, __ATOMIC_SEQ_CST);
  cache->calls++;
  cache->order = ++calls_in_all;
  if (cache->allocates) {
    /* A request in here may fail, but must not run callbacks again, nor hang. */
    void *small = NULL;
    int status = pool_alloc(&small, 8 * GIB);
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, status);
    CHECK_STATUS(POOL_OK, pool_free(small));
  }
  if (cache->removes_itself) {
    CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(cache->id));
  }
  if (cache->slow_ms > 0) {
    sleep_ms(cache->slow_ms);
  }
  if (cache->block != NULL) {
    CHECK_STATUS(POOL_OK, pool_free(cache->block));
    cache->block = NULL;
  }
  __atomic_store_n(&cache->inside, 0, __ATOMIC_SEQ_CST);
  return freed;
}

static void add(struct cache *cache, int priority) {
  CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(give_way, cache, priority, &cache->id));
  CHECK(cache->id != 0);
}

/* The case this library started from: half of the device is cached in pieces of the wrong sizes. */
static void cached_pieces_serve_a_large_request(void) {
  void *pieces[12], *block = NULL;
  int i;
  for (i = 0; i < 8; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&pieces[i], GIB / 2));
  }
  for (i = 0; i < 8; i++) {
    CHECK_STATUS(POOL_OK, pool_free(pieces[i]));
  }
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
  /* With 2 GiB live between the pieces the others have to be moved together. */
  for (i = 0; i < 12; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&pieces[i], GIB / 2));
  }
  for (i = 0; i < 12; i++) {
    if (i % 3 != 1) {
      CHECK_STATUS(POOL_OK, pool_free(pieces[i]));
    }
  }
  CHECK_EQ(stats_of(0).live_bytes, 2 * GIB);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * GIB + GIB / 2));
  CHECK_STATUS(POOL_OK, pool_free(block));
  for (i = 1; i < 12; i += 3) {
    CHECK_STATUS(POOL_OK, pool_free(pieces[i]));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* A direct allocation of 4 GiB beside a pool that idles on 7 of 8. */
static void a_foreign_allocation_is_helped(void) {
  CUdeviceptr foreign = 0;
  void *blocks[14];
  size_t released = 0;
  int i;
  for (i = 0; i < 14; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&blocks[i], GIB / 2));
  }
  for (i = 0; i < 14; i++) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
  }
  CHECK_EQ(cu.MemAlloc(&foreign, 4 * GIB), 2);
  CHECK_STATUS(POOL_OK, pool_reclaim(POOL_DEVICE_CURRENT, 4 * GIB, &released));
  CHECK(released >= 4 * GIB);
  CHECK(released <= 5 * GIB); /* only as much as is needed, but for the size of a chunk */
  CHECK_STATS(0);
  CU(MemAlloc(&foreign, 4 * GIB));
  CU(MemFree(foreign));
  /* With work under way on the memory, the pool waits for it first. */
  CHECK_STATUS(POOL_OK, pool_alloc(&blocks[0], 7 * GIB));
  busy(NULL, 50);
  CHECK_STATUS(POOL_OK, pool_free(blocks[0]));
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 7 * GIB, &released));
  CHECK(released >= 7 * GIB);
  CU(MemAlloc(&foreign, 7 * GIB));
  CU(MemFree(foreign));
  CHECK_TRIMS_TO_ZERO(0);
  released = 77;
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  CHECK_EQ(released, 0);
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 0, NULL));
  CHECK_STATUS(POOL_ERROR_NO_DEVICE, pool_reclaim(1000, GIB, &released));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_reclaim(-7, GIB, &released));
}

static void callbacks_give_way_in_order(void) {
  struct cache first = {0}, second = {0}, liar = {0}, last = {0};
  void *block = NULL;
  uint64_t recovered = stats_of(0).oom_recovered_count;
  CHECK_STATUS(POOL_OK, pool_alloc(&first.block, GIB));
  CHECK_STATUS(POOL_OK, pool_alloc(&second.block, 3 * GIB));
  CHECK_STATUS(POOL_OK, pool_alloc(&last.block, GIB));
  liar.claims = SIZE_MAX;
  add(&last, -5);
  add(&first, 10);
  add(&liar, 7);
  add(&second, 3);
  calls_in_all = 0;
  /* 3 GiB are free: the first cache and the liar are not enough, the second is, the last one is spared. */
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  CHECK_EQ(first.order, 1);
  CHECK_EQ(liar.order, 2);
  CHECK_EQ(second.order, 3);
  CHECK_EQ(last.calls, 0);
  CHECK(last.block != NULL);
  CHECK_EQ(stats_of(0).oom_recovered_count - recovered, 1);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(first.id));
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(second.id));
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(last.id));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_remove_reclaim_callback(last.id));
  /* One that never stops to claim progress, without any, does not keep the answer from coming. */
  liar.calls = 0;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 8 * GIB));
  CHECK(liar.calls > 0 && liar.calls < 100);
  CHECK_STATUS(POOL_OK, pool_free(last.block));
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(liar.id));
  CHECK_TRIMS_TO_ZERO(0);
}

static void callbacks_may_use_the_pool_and_remove_themselves(void) {
  struct cache cache = {0};
  void *block = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc(&cache.block, 4 * GIB));
  cache.allocates = 1;
  cache.removes_itself = 1;
  add(&cache, 0);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 6 * GIB));
  CHECK_EQ(cache.calls, 1);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_remove_reclaim_callback(cache.id));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

static void *out_of_memory(void *context) {
  void *block = NULL;
  CU(CtxSetCurrent((CUcontext)context));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 8 * GIB));
  return NULL;
}

/* pool_remove_reclaim_callback returns only when the callback runs nowhere any more. */
static void removal_waits_for_a_call_under_way(void) {
  struct cache cache = {0};
  CUcontext context = NULL;
  struct check_thread thread;
  void *block = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, GIB));
  CU(CtxGetCurrent(&context));
  cache.slow_ms = 200;
  add(&cache, 0);
  start_thread(&thread, out_of_memory, context);
  while (!__atomic_load_n(&cache.inside, __ATOMIC_SEQ_CST)) {
    sleep_ms(1);
  }
  CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(cache.id));
  CHECK_EQ(cache.inside, 0);
  join_thread(&thread);
  CHECK_EQ(cache.calls, 1);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Two threads are in the callback: one removes it, the other one stays in it until that has returned. */
struct meeting {
  uint64_t id;
  int inside;
  int removed;
  int waited_in_vain;
};

/* Whether the count gets that far within ten seconds. */
static int reaches(int *count, int wanted) {
  double start = now_ms();
  while (__atomic_load_n(count, __ATOMIC_SEQ_CST) < wanted && now_ms() - start < 10000) {
    sleep_ms(1);
  }
  return __atomic_load_n(count, __ATOMIC_SEQ_CST) >= wanted;
}

static size_t meet_and_remove(void *user, int device, size_t wanted) {
  struct meeting *meeting = (struct meeting *)user;
  int place = __atomic_add_fetch(&meeting->inside, 1, __ATOMIC_SEQ_CST);
  (void)device;
  (void)wanted;
  CHECK(reaches(&meeting->inside, 2));
  if (place == 1) {
    CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(meeting->id));
    __atomic_store_n(&meeting->removed, 1, __ATOMIC_SEQ_CST);
  } else if (!reaches(&meeting->removed, 1)) {
    meeting->waited_in_vain = 1;
  }
  return 0;
}

static void removal_from_inside_waits_for_nobody(void) {
  struct meeting meeting = {0, 0, 0, 0};
  CUcontext context = NULL;
  struct check_thread threads[2];
  void *block = NULL;
  int i;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, GIB));
  CU(CtxGetCurrent(&context));
  CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(meet_and_remove, &meeting, 0, &meeting.id));
  for (i = 0; i < 2; i++) {
    start_thread(&threads[i], out_of_memory, context);
  }
  for (i = 0; i < 2; i++) {
    join_thread(&threads[i]);
  }
  CHECK_EQ(meeting.inside, 2);
  CHECK_EQ(meeting.removed, 1);
  CHECK_EQ(meeting.waited_in_vain, 0);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_remove_reclaim_callback(meeting.id));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* ---- how long pool_reclaim waits ---- */

/* What one stream will have finished soon is enough; the other one is busy for long. */
static void reclaim_waits_for_what_is_enough(void) {
  CUstream slow = new_stream(CU_STREAM_NON_BLOCKING), quick = new_stream(CU_STREAM_NON_BLOCKING);
  void *late = NULL, *early = NULL;
  size_t released = 0;
  double start;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&late, 40 * MIB, slow));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&early, 40 * MIB, quick));
  busy(slow, 1500);
  busy(quick, 50);
  CHECK_STATUS(POOL_OK, pool_free_async(late, slow));
  CHECK_STATUS(POOL_OK, pool_free_async(early, quick));
  sim.set_free_waits(0); /* what cuMemFree waits for is not the library's choice */
  start = now_ms();
  CHECK_STATUS(POOL_OK, pool_reclaim(0, 20 * MIB, &released));
  CHECK_TOOK(now_ms() - start, 50);
  CHECK(released >= 20 * MIB);
  sim.set_free_waits(1);
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(slow));
  CU(StreamDestroy(quick));
}

static size_t claim_a_byte(void *user, int device, size_t wanted) {
  (void)device;
  (void)wanted;
  ++*(int *)user;
  return 1;
}

/* Callbacks that claim progress do not each start the wait anew. */
static void reclaim_has_one_deadline(void) {
  enum { CALLBACKS = 8, SETTLE_MS = 150 };
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  pool_options defaults = default_options(), options = defaults;
  uint64_t ids[CALLBACKS];
  void *block = NULL;
  size_t released = 1;
  int calls = 0, i;
  double start;
  options.settle_ms = SETTLE_MS;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  for (i = 0; i < CALLBACKS; i++) {
    CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(claim_a_byte, &calls, 0, &ids[i]));
  }
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 40 * MIB, stream));
  busy(stream, 1500);
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  start = now_ms();
  CHECK_STATUS(POOL_OK, pool_reclaim(0, GIB, &released));
  CHECK_TOOK(now_ms() - start, SETTLE_MS);
  CHECK_EQ(released, 0);
  CHECK(calls > 0);
  for (i = 0; i < CALLBACKS; i++) {
    CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(ids[i]));
  }
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
}

static void bad_arguments(void) {
  uint64_t ids[64], id = 5;
  struct cache cache = {0};
  int i;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_add_reclaim_callback(NULL, NULL, 0, &id));
  CHECK_EQ(id, 0);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_add_reclaim_callback(give_way, NULL, 0, NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_remove_reclaim_callback(0));
  for (i = 0; i < 64; i++) {
    CHECK_STATUS(POOL_OK, pool_add_reclaim_callback(give_way, &cache, i, &ids[i]));
  }
  CHECK_STATUS(POOL_ERROR_NOT_SUPPORTED, pool_add_reclaim_callback(give_way, &cache, 0, &id));
  for (i = 0; i < 64; i++) {
    CHECK_STATUS(POOL_OK, pool_remove_reclaim_callback(ids[i]));
  }
}

int main(void) {
  driver_start(0);
  require_sim("the sizes are made for a device of 8 GiB");
  RUN(bad_arguments);
  RUN(cached_pieces_serve_a_large_request);
  RUN(a_foreign_allocation_is_helped);
  RUN(callbacks_give_way_in_order);
  RUN(callbacks_may_use_the_pool_and_remove_themselves);
  RUN(removal_waits_for_a_call_under_way);
  RUN(removal_from_inside_waits_for_nobody);
  RUN(reclaim_waits_for_what_is_enough);
  RUN(reclaim_has_one_deadline);
  return driver_result();
}
