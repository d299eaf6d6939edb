/* threads.c: many threads use every function at random, and pass blocks on to each other. Blocks carry marks
 * that only their owner may have written; the counters are sampled all the while and must be one consistent
 * snapshot. */

#define CHECK_HOST_TIME /* its threads race */
#include "check.h"
#include "driver.h"

enum { THREADS = 8, ROUNDS = 3000, OWN = 24, SLOTS = 64 };
static const size_t LARGEST = 2 << 20;

struct block {
  void *ptr;
  size_t bytes;
  unsigned mark;
};

/* Where blocks change hands: whoever exchanges a slot owns what he gets. */
static struct block *slots[SLOTS];
static CUcontext context;
static int stop;

static unsigned new_mark(void) {
  static unsigned last;
  return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

/* Head and tail are written and checked: two intervals that overlap have one of these in common. */
enum { MARK_BYTES = 128 };

static void write_mark(struct block *block, CUstream stream) {
  fill(block->ptr, MARK_BYTES, block->mark, stream);
  fill((char *)block->ptr + block->bytes - MARK_BYTES, MARK_BYTES, block->mark, stream);
}

static void check_mark(const struct block *block) {
  CHECK(holds(block->ptr, MARK_BYTES, block->mark));
  CHECK(holds((char *)block->ptr + block->bytes - MARK_BYTES, MARK_BYTES, block->mark));
}

static struct block *obtain(uint64_t *chance, CUstream stream) {
  struct block *block = (struct block *)calloc(1, sizeof *block);
  int status;
  block->bytes = (random_size(chance, LARGEST) + 2 * MARK_BYTES) & ~(size_t)3;
  block->mark = new_mark();
  if (random_below(chance, 8) == 0) {
    pool_request request = request_of(block->bytes);
    request.alignment = (size_t)512 << random_below(chance, 10);
    request.owner = "thread";
    request.device = 0;
    status = pool_alloc_with(&block->ptr, &request);
    CHECK_EQ((uintptr_t)block->ptr % request.alignment, 0);
  } else if (random_below(chance, 2) == 0) {
    status = pool_alloc(&block->ptr, block->bytes);
  } else {
    status = pool_alloc_async(&block->ptr, block->bytes, stream);
  }
  if (!CHECK_STATUS(POOL_OK, status)) {
    free(block);
    return NULL;
  }
  write_mark(block, stream);
  return block;
}

/* Whatever work on the block there was is done or was submitted to `stream`. */
static void give_back(struct block *block, uint64_t *chance, CUstream stream) {
  if (random_below(chance, 4) == 0) {
    CU(StreamSynchronize(stream));
    check_mark(block);
  }
  CHECK_STATUS(POOL_OK,
               random_below(chance, 3) == 0 ? pool_free(block->ptr) : pool_free_async(block->ptr, stream));
  free(block);
}

static void *work(void *number) {
  uint64_t chance = 1000 + (uint64_t)(uintptr_t)number;
  struct block *own[OWN];
  CUstream stream;
  int round, i;
  memset(own, 0, sizeof own);
  CU(CtxSetCurrent(context));
  stream = (uintptr_t)number % 2 ? CU_STREAM_PER_THREAD : new_stream(CU_STREAM_NON_BLOCKING);
  for (round = 0; round < ROUNDS && check_failures == 0; round++) {
    i = (int)random_below(&chance, OWN);
    if (own[i] == NULL) {
      own[i] = obtain(&chance, stream);
    } else if (random_below(&chance, 3) == 0) {
      /* Pass it on. The next owner's stream does not know this one's work, so finish it. */
      CU(StreamSynchronize(stream));
      own[i] = __atomic_exchange_n(&slots[random_below(&chance, SLOTS)], own[i], __ATOMIC_SEQ_CST);
      if (own[i] != NULL) {
        check_mark(own[i]);
        CHECK_STATUS(POOL_OK, pool_use_on_stream(own[i]->ptr, stream));
        own[i]->mark = new_mark();
        write_mark(own[i], stream);
      }
    } else {
      give_back(own[i], &chance, stream);
      own[i] = NULL;
    }
    if (own[i] != NULL && random_below(&chance, 8) == 0) {
      pool_block_info info = info_of((char *)own[i]->ptr + random_below(&chance, own[i]->bytes));
      CHECK(info.base == own[i]->ptr && info.requested_size == own[i]->bytes);
    }
    if (random_below(&chance, 500) == 0) {
      size_t released = 0;
      CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, (size_t)random_below(&chance, 32 * MIB), &released));
    }
    if (random_below(&chance, 50) == 0) {
      int local;
      CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_free(&local));
    }
  }
  for (i = 0; i < OWN; i++) {
    if (own[i] != NULL) {
      give_back(own[i], &chance, stream);
    }
  }
  CU(StreamSynchronize(stream));
  if (stream != CU_STREAM_PER_THREAD) {
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, NULL));
    CU(StreamDestroy(stream));
  }
  return NULL;
}

static void *sample(void *unused) {
  (void)unused;
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    pool_stats stats = stats_of(0);
    if (!check_identity(&stats, __FILE__, __LINE__)) {
      break;
    }
  }
  return NULL;
}

/* Nothing but the fast path, so that threads meet in it as often as they can. */
static void *hammer(void *number) {
  static const size_t sizes[] = {512, 2000, 40000, 3 << 20};
  uint64_t chance = 5000 + (uint64_t)(uintptr_t)number;
  void *own[16];
  int round, i;
  memset(own, 0, sizeof own);
  CU(CtxSetCurrent(context));
  for (round = 0; round < 40000 && check_failures == 0; round++) {
    i = (int)random_below(&chance, 16);
    if (own[i] != NULL) {
      CHECK_STATUS(POOL_OK, pool_free_async(own[i], CU_STREAM_LEGACY));
      own[i] = NULL;
    } else {
      CHECK_STATUS(POOL_OK, pool_alloc_async(&own[i], sizes[random_below(&chance, 4)], CU_STREAM_LEGACY));
    }
  }
  for (i = 0; i < 16; i++) {
    CHECK_STATUS(POOL_OK, pool_free_async(own[i], CU_STREAM_LEGACY));
  }
  return NULL;
}

static void run_threads(void *(*function)(void *)) {
  struct check_thread threads[THREADS], sampler;
  uintptr_t i;
  stop = 0;
  start_thread(&sampler, sample, NULL);
  for (i = 0; i < THREADS; i++) {
    start_thread(&threads[i], function, (void *)i);
  }
  for (i = 0; i < THREADS; i++) {
    join_thread(&threads[i]);
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  join_thread(&sampler);
}

static void everything_at_random(void) {
  int i;
  run_threads(work);
  for (i = 0; i < SLOTS; i++) {
    if (slots[i] != NULL) {
      check_mark(slots[i]);
      CHECK_STATUS(POOL_OK, pool_free(slots[i]->ptr));
      free(slots[i]);
    }
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void fast_path_on_one_stream(void) {
  run_threads(hammer);
  CHECK_TRIMS_TO_ZERO(0);
}

/* Threads come and go: what they cached and recorded must not stay behind. */
static void *short_life(void *unused) {
  void *block = NULL;
  (void)unused;
  CU(CtxSetCurrent(context));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 100000, CU_STREAM_PER_THREAD));
  CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_PER_THREAD));
  return NULL;
}

static void threads_come_and_go(void) {
  uint64_t most = 0;
  int round, i;
  for (round = 0; round < 100; round++) {
    struct check_thread threads[4];
    for (i = 0; i < 4; i++) {
      start_thread(&threads[i], short_life, NULL);
    }
    for (i = 0; i < 4; i++) {
      join_thread(&threads[i]);
    }
    if (round == 10) {
      most = stats_of(0).reserved_bytes;
    }
  }
  CHECK(stats_of(0).reserved_bytes <= most + 64 * MIB);
  CHECK_TRIMS_TO_ZERO(0);
}

static void *query_own_blocks(void *number) {
  uint64_t chance = 77 + (uint64_t)(uintptr_t)number;
  CU(CtxSetCurrent(context));
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    void *block = NULL;
    int status = pool_alloc(&block, (size_t)random_below(&chance, 5000000) + 1);
    if (status == POOL_ERROR_OUT_OF_MEMORY) {
      continue; /* what the others freed a moment ago may be pending for a while */
    }
    CHECK_STATUS(POOL_OK, status);
    CHECK(info_of(block).base == block);
    CHECK_STATUS(POOL_OK, pool_free(block));
  }
  return NULL;
}

/* Chunks come and go all the while: at no moment is a block of others not to be found. */
static void blocks_are_found_while_memory_goes_back(void) {
  enum { TRIMS = 3000 };
  struct check_thread threads[4];
  size_t total = 0;
  int round;
  uintptr_t i;
  CU(DeviceTotalMem(&total, 0));
  if (on_sim()) { /* a small device, so that requests give memory back too */
    CHECK_EQ(sim.set_memory(0, 128 * MIB), 0);
  }
  __atomic_store_n(&stop, 0, __ATOMIC_SEQ_CST);
  for (i = 0; i < 4; i++) {
    start_thread(&threads[i], query_own_blocks, (void *)i);
  }
  for (round = 0; round < TRIMS; round++) {
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  for (i = 0; i < 4; i++) {
    join_thread(&threads[i]);
  }
  if (on_sim()) {
    CHECK_EQ(sim.set_memory(0, total), 0);
  }
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  context = driver_start(0);
  RUN(everything_at_random);
  RUN(fast_path_on_one_stream);
  RUN(threads_come_and_go);
  RUN(blocks_are_found_while_memory_goes_back);
  return driver_result();
}
