/* wait_minute.c: threads hand over the memory of a device that fits one of them: whoever has it frees it,
 * whoever has not waits. No request may end without memory, and every free is heard at once. Usage:
 *
 *   wait_minute [SECONDS]
 *
 * Without an argument each thread takes a fixed number of turns; with one, as many as there is time for. */

#include "check.h"
#include "driver.h"

enum { TURNS = 2000, THREADS = 2 };
static const size_t DEVICE = 512 * MIB, BLOCK = 300 * MIB;

static CUcontext context;
static time_t end;      /* 0: each thread takes TURNS */
static double freed_at; /* guarded by whoever has the memory */

struct worker {
  struct check_thread thread;
  int number;
  uint64_t turns;
  double latest; /* the longest that a free went unheard, in milliseconds */
};

static int goes_on(const struct worker *worker) {
  return check_failures == 0 && (end != 0 ? time(NULL) < end : worker->turns < TURNS);
}

static void *work(void *data) {
  struct worker *worker = (struct worker *)data;
  unsigned mark = (unsigned)worker->number;
  CUstream stream;
  CU(CtxSetCurrent(context));
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  while (goes_on(worker)) {
    void *block = NULL;
    double asked = now_ms(), unheard;
    int by_stream = worker->turns % 3 == 0;
    int status = by_stream ? pool_alloc_async(&block, BLOCK, stream) : pool_alloc(&block, BLOCK);
    if (!CHECK_STATUS(POOL_OK, status)) {
      break;
    }
    unheard = now_ms() - (asked > freed_at ? asked : freed_at);
    worker->latest = unheard > worker->latest ? unheard : worker->latest;
    mark += THREADS;
    fill(block, 64 * KIB, mark, stream);
    fill((char *)block + BLOCK - 64 * KIB, 64 * KIB, mark, stream);
    if (worker->turns % 16 == 0) {
      CU(StreamSynchronize(stream));
      CHECK(holds(block, 64 * KIB, mark) && holds((char *)block + BLOCK - 64 * KIB, 64 * KIB, mark));
    }
    if (worker->turns % 4 == 0) {
      sleep_ms(1); /* so that the other one waits */
    }
    worker->turns++;
    freed_at = now_ms();
    CHECK_STATUS(POOL_OK, by_stream || worker->turns % 2 ? pool_free_async(block, stream) : pool_free(block));
    if (worker->turns % 8 == 0) {
      /* Not only in lockstep. */
      sleep_ms((int)(worker->turns / 8 % 3));
    }
  }
  CU(StreamSynchronize(stream));
  return NULL;
}

int main(int count, char **arguments) {
  struct worker workers[THREADS];
  pool_options options;
  int i;
  context = driver_start(0);
  require_sim("needs the simulated driver");
  end = count > 1 ? time(NULL) + atoi(arguments[1]) : 0;
  sim.set_memory(0, DEVICE);
  options = default_options();
  options.oom_wait_ms = 20000;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  memset(workers, 0, sizeof workers);
  for (i = 0; i < THREADS; i++) {
    workers[i].number = i;
    start_thread(&workers[i].thread, work, &workers[i]);
  }
  for (i = 0; i < THREADS; i++) {
    join_thread(&workers[i].thread);
    printf("thread %d: %llu turns; no free went unheard for more than %.3f ms\n", i,
           (unsigned long long)workers[i].turns, workers[i].latest);
    /* One that is not heard is found after 50 ms; what the device still does is looked at every 2 ms. */
    CHECK(workers[i].latest <= 2);
  }
  printf("%llu waits\n", (unsigned long long)stats_of(0).oom_wait_count);
  CHECK(stats_of(0).oom_wait_count > TURNS / 8);
  CHECK_EQ(stats_of(0).oom_count, 0);
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}
