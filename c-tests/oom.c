/* oom.c: when memory runs out. Idle memory is given up, whatever its size and whoever's it was; what is
 * really too much is answered as a code, with a reason, and nothing else changes. Every test runs twice: on a
 * small device, and on a device with room where a limit of the same kind is set. */

#include "check.h"
#include "driver.h"

enum { DEVICE_MIB = 256, LIMIT_MIB = 128, LEAST_SETTLE_MS = 5000 };

/* Bytes there are for the pool, and whether the pool's limit or the device's size says so. */
static size_t capacity;
static int by_limit;
static pool_options defaults;

/* Chunks of `cuMemAlloc` cannot be moved, so what lies between live blocks may be lost to large requests. */
static int can_remap(void) {
  return defaults.backend != POOL_BACKEND_MALLOC && getenv("CUDASIM_NO_VMM") == NULL;
}

static void *must_alloc(size_t size) {
  void *block = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, size));
  CHECK(block != NULL);
  CHECK_STATS(0);
  if (by_limit) {
    CHECK(stats_of(0).reserved_bytes <= capacity);
  }
  return block;
}

static void must_free(void *block) {
  CHECK_STATUS(POOL_OK, pool_free(block));
}

static void mark(void *block, size_t bytes, unsigned value) {
  fill(block, bytes & ~(size_t)3, value, NULL);
  CU(CtxSynchronize());
}

static int is_marked(const void *block, size_t bytes, unsigned value) {
  return holds(block, bytes & ~(size_t)3, value);
}

static void idle_memory_of_other_sizes_is_given_up(void) {
  void *blocks[7], *large;
  int i;
  for (i = 0; i < 7; i++) {
    blocks[i] = must_alloc(capacity / 8);
  }
  for (i = 0; i < 7; i++) {
    must_free(blocks[i]);
  }
  large = must_alloc(capacity / 4 * 3);
  mark(large, capacity / 4 * 3, 0x11);
  CHECK(is_marked(large, capacity / 4 * 3, 0x11));
  must_free(large);
  /* And back to small ones. */
  for (i = 0; i < 7; i++) {
    blocks[i] = must_alloc(capacity / 8);
    mark(blocks[i], capacity / 8, (unsigned)i);
  }
  for (i = 0; i < 7; i++) {
    CHECK(is_marked(blocks[i], capacity / 8, (unsigned)i));
    must_free(blocks[i]);
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* A program whose requests grow a little each time: nothing cached ever fits. */
static void growing_requests(void) {
  size_t size;
  for (size = capacity / 50; size < capacity / 10 * 9; size += size / 40) {
    must_free(must_alloc(size));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void idle_memory_between_live_blocks_is_given_up(void) {
  void *blocks[16], *large = NULL;
  size_t piece = capacity / 16, wanted = capacity / 16 * 7;
  int i, status;
  for (i = 0; i < 15; i++) {
    blocks[i] = must_alloc(piece);
    mark(blocks[i], piece, 0x100u + (unsigned)i);
  }
  for (i = 0; i < 15; i += 2) {
    must_free(blocks[i]);
  }
  status = pool_alloc(&large, wanted);
  if (can_remap() || status != POOL_ERROR_OUT_OF_MEMORY) {
    CHECK_STATUS(POOL_OK, status);
    mark(large, wanted, 0x22);
    CHECK(is_marked(large, wanted, 0x22));
  }
  CHECK_STATS(0);
  for (i = 1; i < 15; i += 2) {
    CHECK(is_marked(blocks[i], piece, 0x100u + (unsigned)i));
    must_free(blocks[i]);
  }
  must_free(large);
  CHECK_TRIMS_TO_ZERO(0);
}

static void pending_frees_are_waited_for(void) {
  CUstream one = new_stream(CU_STREAM_NON_BLOCKING), two = new_stream(CU_STREAM_NON_BLOCKING);
  size_t size = capacity / 10 * 7 / 4 * 4;
  int way;
  for (way = 0; way < 4; way++) {
    void *old = NULL, *new = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&old, size, one));
    busy(one, 60);
    fill(old, size, 0x01d, one);
    CHECK_STATUS(POOL_OK, way % 2 ? pool_free(old) : pool_free_async(old, one));
    CHECK_STATUS(POOL_OK,
                 way / 2 ? pool_alloc(&new, size / 8 * 9 / 4 * 4) : pool_alloc_async(&new, size, two));
    if (new != NULL) {
      fill(new, size, 0x4e5, two);
      CU(StreamSynchronize(two));
      CU(StreamSynchronize(one));
      CHECK(is_marked(new, size, 0x4e5));
    }
    CHECK_STATS(0);
    must_free(new);
    CHECK_TRIMS_TO_ZERO(0);
  }
  CU(StreamDestroy(one));
  CU(StreamDestroy(two));
}

static void too_much_is_answered(void) {
  static const size_t parts[] = {2, 3, 4};
  size_t held = capacity / 10 * 8, i;
  void *keep = must_alloc(held), *out, *small;
  CUstream stream = new_stream(0);
  mark(keep, held, 0x33);
  for (i = 0; i < 3; i++) {
    pool_stats before = stats_of(0), after;
    size_t wanted = capacity / parts[i];
    char why[600] = "", bytes[32], mebibytes[32];
    pool_request request = request_of(wanted);
    out = (void *)0x5a5a;
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&out, wanted));
    CHECK(out == NULL);
    /* The reason has the number that was asked for, one way or the other. */
    pool_last_error(why, sizeof why);
    sprintf(bytes, "%llu", (unsigned long long)wanted);
    sprintf(mebibytes, "%llu", (unsigned long long)(wanted / MIB));
    if (!CHECK(strstr(why, bytes) != NULL || strstr(why, mebibytes) != NULL)) {
      fprintf(stderr, "  the last error: %s\n", why);
    }
    out = (void *)0x5a5a;
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc_async(&out, wanted, stream));
    CHECK(out == NULL);
    request.flags = POOL_REQUEST_OWN_ALLOCATION;
    out = (void *)0x5a5a;
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc_with(&out, &request));
    CHECK(out == NULL);
    after = stats_of(0);
    CHECK_STATS(0);
    CHECK_EQ(after.live_bytes, before.live_bytes);
    CHECK_EQ(after.live_blocks, before.live_blocks);
    CHECK_EQ(after.alloc_count, before.alloc_count);
    CHECK_EQ(after.oom_count - before.oom_count, 3);
    /* Smaller requests go on. */
    small = must_alloc(capacity / 20);
    must_free(small);
  }
  CHECK(is_marked(keep, held, 0x33));
  must_free(keep);
  CU(StreamDestroy(stream));
  must_free(must_alloc(capacity / 10 * 9));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Equal blocks until there is no more: nearly all of the memory must be had, and all of it given back. */
static void nearly_all_memory_can_be_had(void) {
  static const size_t sizes[] = {64 * 1024, 300000, 1 << 20, 3 << 20, 2 << 20, 5000000, 20 << 20};
  enum { MOST = 4096 };
  static void *blocks[MOST];
  size_t i;
  for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    size_t count = 0;
    int status = POOL_OK;
    while (count < MOST && (status = pool_alloc(&blocks[count], sizes[i])) == POOL_OK) {
      count++;
    }
    if (count < MOST) {
      CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, status);
    }
    CHECK_STATS(0);
    if (!CHECK(count * sizes[i] >= capacity / 100 * (can_remap() ? 90 : 70))) {
      fprintf(stderr, "  ... only %d blocks of %d bytes\n", (int)count, (int)sizes[i]);
    }
    while (count > 0) {
      must_free(blocks[--count]);
    }
    /* No trim: the next size finds the memory as this one left it. */
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* One request, not of the pool's making, needs the memory that the pool has idle. */
static void own_allocations_get_idle_memory(void) {
  pool_request request = request_of(capacity / 4 * 3);
  void *blocks[4], *own = NULL;
  int i;
  for (i = 0; i < 4; i++) {
    blocks[i] = must_alloc(capacity / 5);
  }
  for (i = 0; i < 4; i++) {
    must_free(blocks[i]);
  }
  request.flags = POOL_REQUEST_OWN_ALLOCATION;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&own, &request));
  CHECK_STATS(0);
  must_free(own);
  must_free(must_alloc(capacity / 4 * 3));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Half idle in the pool, somebody else takes nearly all of the rest: both halves serve the next request. */
static void foreign_memory_leaves_the_rest(void) {
  CUdeviceptr foreign = 0;
  void *large = NULL;
  if (by_limit || !needs_sim()) {
    return;
  }
  must_free(must_alloc(capacity / 4));
  must_free(must_alloc(capacity / 2));
  CU(CtxSynchronize());
  CU(MemAlloc(&foreign, capacity / 4));
  CHECK_STATUS(POOL_OK, pool_alloc(&large, capacity / 8 * 5));
  CHECK_STATUS(POOL_OK, pool_free(large));
  CU(CtxSynchronize());
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
  CHECK_EQ(sim.used_bytes(0), capacity / 4);
  CU(MemFree(foreign));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Four threads whose largest blocks fit side by side: nobody may ever be refused, although each has to take
 * the memory that another one has just given up, and all are in the ladder at once. */
static void *take_and_give(void *number) {
  uint64_t random = 77 + (uint64_t)(uintptr_t)number;
  CUcontext context = NULL;
  int i;
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(context));
  for (i = 0; i < 150; i++) {
    size_t size = capacity / 16 + (size_t)random_below(&random, capacity / 8);
    unsigned value = (unsigned)random_next(&random);
    void *block = NULL;
    int async = (int)random_below(&random, 2);
    CHECK_STATUS(POOL_OK,
                 async ? pool_alloc_async(&block, size, CU_STREAM_PER_THREAD) : pool_alloc(&block, size));
    if (block == NULL) {
      break;
    }
    fill(block, 4096, value, CU_STREAM_PER_THREAD);
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    CHECK(is_marked(block, 4096, value));
    CHECK_STATUS(POOL_OK, async ? pool_free_async(block, CU_STREAM_PER_THREAD) : pool_free(block));
  }
  return NULL;
}

static void threads_share_what_there_is(void) {
  struct check_thread threads[4];
  uintptr_t i;
  for (i = 0; i < 4; i++) {
    start_thread(&threads[i], take_and_give, (void *)i);
  }
  for (i = 0; i < 4; i++) {
    join_thread(&threads[i]);
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void run_all(void) {
  RUN(idle_memory_of_other_sizes_is_given_up);
  RUN(growing_requests);
  RUN(idle_memory_between_live_blocks_is_given_up);
  RUN(pending_frees_are_waited_for);
  RUN(too_much_is_answered);
  RUN(nearly_all_memory_can_be_had);
  RUN(own_allocations_get_idle_memory);
  RUN(foreign_memory_leaves_the_rest);
  RUN(threads_share_what_there_is);
}

int main(void) {
  pool_options options;
  driver_start(0);
  defaults = default_options();
  options = defaults;
  /* A slow machine must not turn a wait into a refusal. */
  options.settle_ms = LEAST_SETTLE_MS;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  if (on_sim()) {
    sim.set_memory(0, DEVICE_MIB * MIB);
    capacity = DEVICE_MIB * MIB;
    run_all();
    sim.set_memory(0, 8 * GIB);
  }
  by_limit = 1;
  capacity = LIMIT_MIB * MIB;
  options.limit_bytes = capacity;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  run_all();
  return driver_result();
}
