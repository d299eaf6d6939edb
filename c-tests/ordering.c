/* ordering.c: when freed memory may be used again. Each test has work in flight that writes late; a block
 * handed out too early shows as data overwritten. ordering_random.c does the same at random. */

#include "check.h"
#include "driver.h"

enum { BUSY_MS = 12 };
enum { OLD = 0x0badf00d, NEW = 0x600dda7a };

static const size_t sizes[] = {256, 3000, 60000, 1 << 20, 3 << 20, 20 << 20};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static uint64_t memory_calls(void) {
  return calls_of("cuMemCreate") + calls_of("cuMemAlloc") + calls_of("cuMemMap") + calls_of("cuMemUnmap") +
         calls_of("cuMemSetAccess") + calls_of("cuMemRelease") + calls_of("cuMemFree");
}

/* ---- the same stream ---- */

/* Must run before any other stream is seen: then no free needs to record anything. */
static void only_stream_reuses_at_once_without_a_driver_call(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  int i, round;
  for (i = 0; i < SIZES; i++) {
    void *first = NULL, *again = NULL;
    uint64_t calls;
    double start;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&first, sizes[i], stream));
    busy(stream, 10 * BUSY_MS);
    fill(first, sizes[i] & ~(size_t)3, OLD, stream);
    CHECK_STATUS(POOL_OK, pool_free_async(first, stream));
    calls = calls_of("*");
    start = now_ms();
    for (round = 0; round < 100; round++) {
      CHECK_STATUS(POOL_OK, pool_alloc_async(&again, sizes[i], stream));
      CHECK(again == first);
      CHECK_STATUS(POOL_OK, pool_free_async(again, stream));
    }
    CHECK(now_ms() - start < 8 * BUSY_MS);
    CHECK_EQ(calls_of("*") - calls, 0);
    CHECK_STATS(0);
    CU(StreamSynchronize(stream));
  }
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
}

static void every_stream_reuses_its_own_at_once(void) {
  CUstream streams[4];
  int i, s, round;
  streams[0] = new_stream(0);
  streams[1] = new_stream(CU_STREAM_NON_BLOCKING);
  streams[2] = CU_STREAM_LEGACY;
  streams[3] = CU_STREAM_PER_THREAD;
  for (i = 0; i < SIZES; i++) {
    for (s = 0; s < 4; s++) {
      void *first = NULL, *again = NULL;
      uint64_t memory, all, syncs;
      CHECK_STATUS(POOL_OK, pool_alloc_async(&first, sizes[i], streams[s]));
      busy(streams[s], 3);
      CHECK_STATUS(POOL_OK, pool_free_async(first, streams[s]));
      memory = memory_calls();
      all = calls_of("*");
      syncs = stats_of(0).driver_sync_calls;
      for (round = 0; round < 50; round++) {
        CHECK_STATUS(POOL_OK, pool_alloc_async(&again, sizes[i], streams[s]));
        CHECK(again == first);
        CHECK_STATUS(POOL_OK, pool_free_async(again, streams[s]));
      }
      CHECK_EQ(memory_calls() - memory, 0);
      CHECK_EQ(stats_of(0).driver_sync_calls - syncs, 0);
      /* Large blocks record an event when they are freed; small ones stay with their stream. */
      if (sizes[i] <= 60000) {
        CHECK_EQ(calls_of("*") - all, 0);
      }
      CU(CtxSynchronize());
    }
  }
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(streams[0]));
  CU(StreamDestroy(streams[1]));
}

/* The legacy default stream has two handles. */
static void legacy_stream_is_one_stream(void) {
  int i;
  for (i = 0; i < SIZES; i++) {
    void *zero = NULL, *one = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&zero, sizes[i], NULL));
    CHECK_STATUS(POOL_OK, pool_free_async(zero, CU_STREAM_LEGACY));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&one, sizes[i], CU_STREAM_LEGACY));
    CHECK(one == zero);
    CHECK_STATUS(POOL_OK, pool_free_async(one, NULL));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&zero, sizes[i], NULL));
    CHECK(one == zero);
    CHECK_STATUS(POOL_OK, pool_free_async(zero, NULL));
    CHECK_TRIMS_TO_ZERO(0);
  }
}

/* ---- from stream to stream ---- */

enum how { STREAM_ORDER, DEVICE_FREE, DEVICE_ALLOC, DEVICE_ORDER, HOWS };

/* Old blocks with a late write on `from` are freed; new ones, written on `to`, must keep what they got. */
static void hand_over(size_t size, CUstream from, CUstream to, enum how how) {
  enum { BLOCKS = 3 };
  void *old[BLOCKS], *new[BLOCKS];
  size_t bytes = size & ~(size_t)3;
  int i;
  for (i = 0; i < BLOCKS; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc_async(&old[i], size, from));
  }
  busy(from, BUSY_MS);
  for (i = 0; i < BLOCKS; i++) {
    fill(old[i], bytes, OLD, from);
  }
  for (i = 0; i < BLOCKS; i++) {
    int device = how == DEVICE_FREE || how == DEVICE_ORDER;
    CHECK_STATUS(POOL_OK, device ? pool_free(old[i]) : pool_free_async(old[i], from));
  }
  for (i = 0; i < BLOCKS; i++) {
    int device = how == DEVICE_ALLOC || how == DEVICE_ORDER;
    CHECK_STATUS(POOL_OK, device ? pool_alloc(&new[i], size) : pool_alloc_async(&new[i], size, to));
    fill(new[i], bytes, NEW, to);
  }
  CHECK_STATS(0);
  CU(StreamSynchronize(to));
  CU(StreamSynchronize(from));
  for (i = 0; i < BLOCKS; i++) {
    if (!CHECK(holds(new[i], bytes, NEW))) {
      fprintf(stderr, "  ... size %d from %p to %p, kind %d\n", (int)size,
              (void *)from, (void *)to, (int)how);
    }
    CHECK_STATUS(POOL_OK, pool_free_async(new[i], to));
  }
}

static void other_streams_wait(void) {
  CUstream streams[5];
  int i, from, to, how;
  streams[0] = new_stream(CU_STREAM_NON_BLOCKING);
  streams[1] = new_stream(CU_STREAM_NON_BLOCKING);
  streams[2] = new_stream(0);
  streams[3] = CU_STREAM_LEGACY;
  streams[4] = CU_STREAM_PER_THREAD;
  for (how = 0; how < HOWS; how++) {
    for (i = 0; i < SIZES; i++) {
      for (from = 0; from < 5; from++) {
        for (to = 0; to < 5; to++) {
          if (from != to) {
            hand_over(sizes[i], streams[from], streams[to], (enum how)how);
          }
        }
      }
    }
    CHECK_TRIMS_TO_ZERO(0);
  }
  for (i = 0; i < 3; i++) {
    CU(StreamDestroy(streams[i]));
  }
}

/* With nothing else to take, the memory of the busy stream is waited for, and only then handed over. */
static void other_streams_wait_at_the_limit(void) {
  CUstream from = new_stream(CU_STREAM_NON_BLOCKING), to = new_stream(CU_STREAM_NON_BLOCKING);
  pool_options options, defaults;
  int how, i;
  defaults = default_options();
  options = defaults;
  options.settle_ms = 5000;
  for (i = 3; i < SIZES; i++) {
    /* What three blocks take when nothing is in the way. */
    hand_over(sizes[i], from, from, STREAM_ORDER);
    options.limit_bytes = stats_of(0).reserved_bytes;
    CHECK_TRIMS_TO_ZERO(0);
    CHECK_STATUS(POOL_OK, pool_configure(&options));
    for (how = 0; how < HOWS; how++) {
      hand_over(sizes[i], from, to, (enum how)how);
      CHECK_TRIMS_TO_ZERO(0);
    }
    CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  }
  CU(StreamDestroy(from));
  CU(StreamDestroy(to));
}

/* Neighbours become one free extent: it is finished with only when the later one is. `late` says which of the
 * two is still being written, `first` which one is freed first. */
static void neighbours(CUstream from, CUstream to, int late, int first) {
  const size_t size = 2 * MIB;
  void *pair[2], *guard = NULL, *other = NULL, *new = NULL;
  int i;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&pair[0], size, from));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&pair[1], size, from));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&guard, size, from)); /* so that no growth adjoins the pair */
  for (i = 0; i < 2; i++) {
    int block = i == 0 ? first : 1 - first;
    if (block == late) {
      busy(from, 5 * BUSY_MS);
      fill(pair[block], size, OLD, from);
    }
    CHECK_STATUS(POOL_OK, pool_free_async(pair[block], from));
  }
  /* A size that does not fit: what is kept for requests of the same size coalesces now. */
  CHECK_STATUS(POOL_OK, pool_alloc_async(&other, 5 * MIB, from));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&new, 2 * size, to));
  fill(new, 2 * size, NEW, to);
  CU(StreamSynchronize(to));
  CU(StreamSynchronize(from));
  CHECK(holds(new, 2 * size, NEW));
  CHECK_STATUS(POOL_OK, pool_free_async(new, to));
  CHECK_STATUS(POOL_OK, pool_free_async(other, from));
  CHECK_STATUS(POOL_OK, pool_free_async(guard, from));
  CHECK_TRIMS_TO_ZERO(0);
}

static void neighbours_wait_for_the_later_one(void) {
  CUstream from = new_stream(CU_STREAM_NON_BLOCKING), to = new_stream(CU_STREAM_NON_BLOCKING);
  pool_options defaults = default_options(), options = defaults;
  int way;
  /* Idle memory stays where it is. */
  options.max_idle_percent = 10000;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  /* Both streams are known before anything is freed. */
  hand_over(3000, from, to, STREAM_ORDER);
  for (way = 0; way < 4; way++) {
    neighbours(from, to, way % 2, way / 2);
  }
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(StreamDestroy(from));
  CU(StreamDestroy(to));
}

static void use_on_another_stream_is_waited_for(void) {
  CUstream owner = new_stream(CU_STREAM_NON_BLOCKING), user = new_stream(CU_STREAM_NON_BLOCKING);
  int i, device;
  for (device = 0; device < 2; device++) {
    for (i = 0; i < SIZES; i++) {
      size_t bytes = sizes[i] & ~(size_t)3;
      void *old = NULL, *new = NULL;
      CHECK_STATUS(POOL_OK, pool_alloc_async(&old, sizes[i], owner));
      busy(user, BUSY_MS);
      fill(old, bytes, OLD, user);
      CHECK_STATUS(POOL_OK, pool_use_on_stream(old, user));
      CHECK_STATUS(POOL_OK, pool_use_on_stream(old, user));
      CHECK_STATUS(POOL_OK, device ? pool_free(old) : pool_free_async(old, owner));
      CHECK_STATUS(POOL_OK, pool_alloc_async(&new, sizes[i], owner));
      fill(new, bytes, NEW, owner);
      CU(StreamSynchronize(owner));
      CU(StreamSynchronize(user));
      CHECK(holds(new, bytes, NEW));
      CHECK_STATUS(POOL_OK, pool_free_async(new, owner));
      CHECK_STATS(0);
    }
  }
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(owner));
  CU(StreamDestroy(user));
}

/* The block's own stream is named too: a free on another stream then waits for both. */
static void use_on_the_own_stream_is_waited_for(void) {
  const size_t size = 4 * MIB;
  CUstream owner = new_stream(CU_STREAM_NON_BLOCKING), other = new_stream(CU_STREAM_NON_BLOCKING);
  void *old = NULL, *new = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&old, size, owner));
  busy(owner, 10 * BUSY_MS);
  fill(old, size, OLD, owner);
  CHECK_STATUS(POOL_OK, pool_use_on_stream(old, owner));
  CHECK_STATUS(POOL_OK, pool_free_async(old, other));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&new, size, other));
  fill(new, size, NEW, other);
  CU(StreamSynchronize(other));
  CU(StreamSynchronize(owner));
  CHECK(holds(new, size, NEW));
  CHECK_STATUS(POOL_OK, pool_free_async(new, other));
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(owner));
  CU(StreamDestroy(other));
}

/* More streams than any fixed table would hold. */
static void use_on_many_streams_is_waited_for(void) {
  enum { STREAMS = 40 };
  CUstream streams[STREAMS];
  int size, i;
  for (i = 0; i < STREAMS; i++) {
    streams[i] = new_stream(CU_STREAM_NON_BLOCKING);
  }
  for (size = 0; size < SIZES; size += 2) {
    size_t bytes = sizes[size] & ~(size_t)3;
    void *old = NULL, *new = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&old, sizes[size], streams[0]));
    for (i = 1; i < STREAMS; i++) {
      busy(streams[i], i == STREAMS / 2 ? 5 * BUSY_MS : 1);
      fill(old, bytes, OLD, streams[i]);
      CHECK_STATUS(POOL_OK, pool_use_on_stream(old, streams[i]));
    }
    CHECK_STATUS(POOL_OK, pool_free_async(old, streams[0]));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&new, sizes[size], streams[0]));
    fill(new, bytes, NEW, streams[0]);
    CU(CtxSynchronize());
    CHECK(holds(new, bytes, NEW));
    CHECK_STATUS(POOL_OK, pool_free_async(new, streams[0]));
  }
  CHECK_TRIMS_TO_ZERO(0);
  for (i = 0; i < STREAMS; i++) {
    CU(StreamDestroy(streams[i]));
  }
}

/* The handle is not touched after the call: the simulated driver ends the program if it is. */
static void stream_may_be_destroyed_after_the_free(void) {
  CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  int i;
  for (i = 0; i < SIZES; i++) {
    size_t bytes = sizes[i] & ~(size_t)3;
    CUstream gone = new_stream(CU_STREAM_NON_BLOCKING);
    void *old = NULL, *new = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&old, sizes[i], gone));
    busy(gone, BUSY_MS);
    fill(old, bytes, OLD, gone);
    CHECK_STATUS(POOL_OK, pool_free_async(old, gone));
    CU(StreamDestroy(gone));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&new, sizes[i], other));
    fill(new, bytes, NEW, other);
    CU(StreamSynchronize(other));
    sleep_ms(2 * BUSY_MS); /* the destroyed stream's work cannot be waited for by handle */
    CHECK(holds(new, bytes, NEW));
    CHECK_STATUS(POOL_OK, pool_free_async(new, other));
    CHECK_TRIMS_TO_ZERO(0);
  }
  CU(StreamDestroy(other));
}

/* ---- nobody waits without need ---- */

static void frees_return_at_once(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  int i;
  for (i = 0; i < SIZES; i++) {
    void *one = NULL, *two = NULL;
    double start;
    CHECK_STATUS(POOL_OK, pool_alloc(&one, sizes[i]));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&two, sizes[i], stream));
    busy(stream, 200);
    start = now_ms();
    CHECK_STATUS(POOL_OK, pool_free(one));
    CHECK_STATUS(POOL_OK, pool_free_async(two, stream));
    CHECK(now_ms() - start < 100);
    CU(StreamSynchronize(stream));
  }
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
}

/* What an idle stream freed is had although an older free still waits for a busy one. */
static void busy_stream_holds_up_nobody(void) {
  CUstream slow = new_stream(CU_STREAM_NON_BLOCKING), quick = new_stream(CU_STREAM_NON_BLOCKING),
           third = new_stream(CU_STREAM_NON_BLOCKING);
  pool_options options, defaults;
  void *late = NULL, *early = NULL, *again = NULL;
  double start;
  defaults = default_options();
  options = defaults;
  options.limit_bytes = 32 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));

  CHECK_STATUS(POOL_OK, pool_alloc_async(&late, 16 * MIB, slow));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&early, 16 * MIB, quick));
  busy(slow, 400);
  CHECK_STATUS(POOL_OK, pool_free_async(late, slow));
  CHECK_STATUS(POOL_OK, pool_free_async(early, quick));
  CU(StreamSynchronize(quick));
  start = now_ms();
  CHECK_STATUS(POOL_OK, pool_alloc_async(&again, 16 * MIB, third));
  CHECK(now_ms() - start < 200);
  CHECK_STATUS(POOL_OK, pool_free_async(again, third));
  CU(StreamSynchronize(slow));
  CHECK_TRIMS_TO_ZERO(0);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(StreamDestroy(slow));
  CU(StreamDestroy(quick));
  CU(StreamDestroy(third));
}

/* ---- the per-thread default stream: one handle, a stream per thread ---- */

static uint32_t writers_turn, readers_turn;

static void *per_thread_writer(void *context) {
  int i;
  CU(CtxSetCurrent((CUcontext)context));
  for (i = 0; i < SIZES; i++) {
    void *old = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&old, sizes[i], CU_STREAM_PER_THREAD));
    busy(CU_STREAM_PER_THREAD, 3 * BUSY_MS);
    fill(old, sizes[i] & ~(size_t)3, OLD, CU_STREAM_PER_THREAD);
    CHECK_STATUS(POOL_OK, pool_free_async(old, CU_STREAM_PER_THREAD));
    raise_count(&writers_turn); /* the other thread allocates while the write is still to come */
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    raise_count(&writers_turn);
    await_count(&readers_turn, (uint32_t)i + 1);
  }
  return NULL;
}

static void per_thread_streams_are_different_streams(void) {
  CUcontext context = NULL;
  struct check_thread writer;
  int i;
  CU(CtxGetCurrent(&context));
  start_thread(&writer, per_thread_writer, context);
  for (i = 0; i < SIZES; i++) {
    size_t bytes = sizes[i] & ~(size_t)3;
    void *new = NULL;
    await_count(&writers_turn, 2 * (uint32_t)i + 1);
    CHECK_STATUS(POOL_OK, pool_alloc_async(&new, sizes[i], CU_STREAM_PER_THREAD));
    fill(new, bytes, NEW, CU_STREAM_PER_THREAD);
    CU(StreamSynchronize(CU_STREAM_PER_THREAD));
    await_count(&writers_turn, 2 * (uint32_t)i + 2); /* now the write is done, wherever it went */
    CHECK(holds(new, bytes, NEW));
    CHECK_STATUS(POOL_OK, pool_free_async(new, CU_STREAM_PER_THREAD));
    raise_count(&readers_turn);
  }
  join_thread(&writer);
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  driver_start(0);
  RUN(only_stream_reuses_at_once_without_a_driver_call);
  RUN(every_stream_reuses_its_own_at_once);
  RUN(legacy_stream_is_one_stream);
  RUN(other_streams_wait);
  RUN(other_streams_wait_at_the_limit);
  RUN(neighbours_wait_for_the_later_one);
  RUN(use_on_another_stream_is_waited_for);
  RUN(use_on_the_own_stream_is_waited_for);
  RUN(use_on_many_streams_is_waited_for);
  RUN(stream_may_be_destroyed_after_the_free);
  RUN(frees_return_at_once);
  RUN(busy_stream_holds_up_nobody);
  RUN(per_thread_streams_are_different_streams);
  return driver_result();
}
