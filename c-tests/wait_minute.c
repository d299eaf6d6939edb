/* wait_minute.c: for a minute, threads hand over the memory of a device that fits one of them: whoever has it frees it, whoever has
 * not waits. No request may end without memory, and no free may go unheard. */

#include "check.h"
#include "driver.h"

enum { SECONDS = 60, THREADS = 2, BUCKETS = 5 };
static const size_t DEVICE = 512 * MIB, BLOCK = 300 * MIB;
/* In milliseconds. A free that is not heard is found after 50. */
static const double bounds[BUCKETS] = {1, 10, 45, 1000, 1e9};

static CUcontext context;
static double begin;
static double freed_at; /* guarded by whoever has the memory */

struct worker {
  pthread_t thread;
  int number;
  uint64_t rounds;
  uint64_t heard_after[BUCKETS];
};

static void *work(void *data) {
  struct worker *worker = (struct worker *)data;
  unsigned mark = (unsigned)worker->number;
  CUstream stream;
  CU(CtxSetCurrent(context));
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  while (now_ms() - begin < SECONDS * 1e3 && check_failures == 0) {
    void *block = NULL;
    double asked = now_ms(), waited;
    int by_stream = worker->rounds % 3 == 0, bucket = 0;
    int status = by_stream ? pool_alloc_async(&block, BLOCK, stream) : pool_alloc(&block, BLOCK);
    if (!CHECK_STATUS(POOL_OK, status)) {
      break;
    }
    waited = now_ms() - (asked > freed_at ? asked : freed_at);
    while (waited > bounds[bucket]) {
      bucket++;
    }
    worker->heard_after[bucket]++;
    mark += THREADS;
    fill(block, 64 * KIB, mark, stream);
    fill((char *)block + BLOCK - 64 * KIB, 64 * KIB, mark, stream);
    if (worker->rounds % 16 == 0) {
      CU(StreamSynchronize(stream));
      CHECK(holds(block, 64 * KIB, mark) && holds((char *)block + BLOCK - 64 * KIB, 64 * KIB, mark));
    }
    worker->rounds++;
    freed_at = now_ms();
    CHECK_STATUS(POOL_OK, by_stream || worker->rounds % 2 ? pool_free_async(block, stream) : pool_free(block));
    if (worker->rounds % 8 == 0) {
      /* Not only in lockstep. */
      sleep_ms((int)(worker->rounds / 8 % 3));
    }
  }
  CU(StreamSynchronize(stream));
  return NULL;
}

int main(void) {
  struct worker workers[THREADS];
  pool_options options;
  uint64_t rounds = 0, late = 0;
  int i, bucket;
  context = driver_start(0);
  if (!on_sim()) {
    printf("skipped: needs the simulated driver\n");
    return EXIT_SKIPPED;
  }
  sim.set_memory(0, DEVICE);
  options = default_options();
  options.oom_wait_ms = 20000;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  memset(workers, 0, sizeof workers);
  begin = now_ms();
  for (i = 0; i < THREADS; i++) {
    workers[i].number = i;
    CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
  }
  for (i = 0; i < THREADS; i++) {
    CHECK_EQ(pthread_join(workers[i].thread, NULL), 0);
    rounds += workers[i].rounds;
    CHECK(workers[i].rounds > 100);
    for (bucket = 2; bucket < BUCKETS; bucket++) {
      late += workers[i].heard_after[bucket];
    }
    printf("thread %d: %llu rounds; heard within 1 ms %llu, 10 ms %llu, 45 ms %llu, 1 s %llu, later %llu\n", i,
           (unsigned long long)workers[i].rounds, (unsigned long long)workers[i].heard_after[0],
           (unsigned long long)workers[i].heard_after[1], (unsigned long long)workers[i].heard_after[2],
           (unsigned long long)workers[i].heard_after[3], (unsigned long long)workers[i].heard_after[4]);
    CHECK_EQ(workers[i].heard_after[4], 0);
  }
  /* The machine may keep a thread from running now and then; an unheard free would come with each round. */
  CHECK(late * 50 <= rounds);
  /* How often they meet is the machine's affair, but they do. */
  CHECK(stats_of(0).oom_wait_count > 100);
  CHECK_EQ(stats_of(0).oom_count, 0);
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}
