/* capture.c: allocation and free while streams are captured into graphs. No call of the pool may break a
 * capture, wait, or leave the thread's capture mode or current context changed. Whether memory can be had is
 * the pool's business (success or out of memory), but never another error. */

#include "check.h"
#include "driver.h"

static const size_t sizes[] = {300, 70000, 3 << 20, 40 << 20};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

/* Both kinds of stream are tried: of blocking ones the legacy stream tells whether one is captured. */
static CUstream captured;
static int non_blocking;

/* The pool may not ask about a stream outside a call that carries it, and of a non-blocking one nothing else
 * tells it whether it is captured. */
static void name_the_stream(void) {
  CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, captured));
}

static void begin(CUstreamCaptureMode mode) {
  CU(StreamBeginCapture(captured, mode));
  if (non_blocking) {
    name_the_stream();
  }
}

/* The capture is whole if its end gives a graph. */
static void end(const char *file, int line) {
  CUgraph graph = NULL;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CU(StreamIsCapturing(captured, &status));
  check_equal((uint64_t)status, CU_STREAM_CAPTURE_STATUS_ACTIVE, "the capture is not active but", file, line);
  check_equal((uint64_t)cu.StreamEndCapture(captured, &graph), 0,
              "the end of the capture answers", file, line);
  check_that(graph != NULL, "a graph was captured", file, line);
  if (graph != NULL) {
    CU(GraphDestroy(graph));
  }
}

#define END()                \
  do {                       \
    end(__FILE__, __LINE__); \
    if (non_blocking) {      \
      name_the_stream();     \
    }                        \
  } while (0)

static void check_state(CUstreamCaptureMode mode, CUcontext context) {
  CUcontext current = NULL;
  CUstreamCaptureMode now = CU_STREAM_CAPTURE_MODE_RELAXED;
  CU(CtxGetCurrent(&current));
  CHECK(current == context);
  CU(ThreadExchangeStreamCaptureMode(&now));
  CHECK_EQ(now, mode);
  CU(ThreadExchangeStreamCaptureMode(&now));
}

/* Success, or a plain out of memory. */
static void *try_alloc(size_t size, int device_ordered) {
  void *block = (void *)0x5a5a;
  int status = device_ordered ? pool_alloc(&block, size) : pool_alloc_async(&block, size, captured);
  if (status != POOL_ERROR_OUT_OF_MEMORY) {
    CHECK_STATUS(POOL_OK, status);
  }
  CHECK((status == POOL_OK) == (block != NULL));
  return block;
}

static void use_all_functions_while_capturing(void) {
  CUcontext context = NULL;
  CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  int mode, i, warm;
  CU(CtxGetCurrent(&context));
  for (warm = 0; warm < 2; warm++) {
    for (mode = CU_STREAM_CAPTURE_MODE_GLOBAL; mode <= CU_STREAM_CAPTURE_MODE_RELAXED; mode++) {
      void *before[SIZES], *during[2 * SIZES];
      size_t released = 0;
      if (!warm) {
        CHECK_TRIMS_TO_ZERO(0);
      }
      for (i = 0; i < SIZES; i++) {
        CHECK_STATUS(POOL_OK, pool_alloc_async(&before[i], sizes[i], i % 2 ? captured : other));
      }
      begin(mode);
      for (i = 0; i < 2 * SIZES; i++) {
        during[i] = try_alloc(sizes[i % SIZES], i >= SIZES);
        check_state(CU_STREAM_CAPTURE_MODE_GLOBAL, context);
      }
      for (i = 0; i < SIZES; i++) {
        pool_block_info info = info_of(before[i]);
        CHECK(info.base == before[i]);
        CHECK_STATUS(POOL_OK, pool_use_on_stream(before[i], captured));
        CHECK_STATUS(POOL_OK, i < 2 ? pool_free(before[i]) : pool_free_async(before[i], captured));
        check_state(CU_STREAM_CAPTURE_MODE_GLOBAL, context);
      }
      for (i = 0; i < 2 * SIZES; i += 2) {
        CHECK_STATUS(POOL_OK, pool_free_async(during[i], captured));
      }
      CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, &released));
      check_state(CU_STREAM_CAPTURE_MODE_GLOBAL, context);
      CHECK_STATS(0);
      END();
      for (i = 1; i < 2 * SIZES; i += 2) {
        CHECK_STATUS(POOL_OK, pool_free(during[i]));
      }
      /* Events that were recorded in the capture must not be asked later. */
      for (i = 0; i < SIZES; i++) {
        void *after = NULL;
        CHECK_STATUS(POOL_OK, pool_alloc_async(&after, sizes[i], other));
        fill(after, sizes[i] & ~(size_t)3, 0x1234, other);
        CU(StreamSynchronize(other));
        CHECK(holds(after, sizes[i] & ~(size_t)3, 0x1234));
        CHECK_STATUS(POOL_OK, pool_free_async(after, other));
      }
      CU(CtxSynchronize());
    }
  }
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(other));
}

/* Another thread allocates while this one captures in global mode, which forbids it unsafe calls too. */
static void *allocate_beside_the_capture(void *context) {
  int i, round;
  CU(CtxSetCurrent((CUcontext)context));
  for (round = 0; round < 20; round++) {
    for (i = 0; i < SIZES; i++) {
      void *block = (void *)0x5a5a;
      int status = round % 2 ? pool_alloc(&block, sizes[i])
                             : pool_alloc_async(&block, sizes[i], CU_STREAM_PER_THREAD);
      if (status != POOL_ERROR_OUT_OF_MEMORY) {
        CHECK_STATUS(POOL_OK, status);
      }
      CHECK_STATUS(POOL_OK, round % 3 ? pool_free(block) : pool_free_async(block, CU_STREAM_PER_THREAD));
    }
    if (round % 5 == 4) {
      CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    }
  }
  check_state(CU_STREAM_CAPTURE_MODE_GLOBAL, (CUcontext)context);
  return NULL;
}

static void other_threads_do_not_break_a_capture(void) {
  CUcontext context = NULL;
  int mode;
  CU(CtxGetCurrent(&context));
  for (mode = CU_STREAM_CAPTURE_MODE_GLOBAL; mode <= CU_STREAM_CAPTURE_MODE_RELAXED; mode++) {
    struct check_thread thread;
    begin(mode);
    start_thread(&thread, allocate_beside_the_capture, context);
    join_thread(&thread);
    END();
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* The ladder would release, settle and synchronise here; in a capture the answer must come without that. */
static void out_of_memory_does_not_break_a_capture(void) {
  pool_options defaults = default_options(), options = defaults;
  CUstream other = new_stream(CU_STREAM_NON_BLOCKING);
  void *first = NULL, *second = NULL, *small = NULL;
  int device;
  options.limit_bytes = 64 * MIB;
  options.settle_ms = 2000;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  for (device = 0; device < 2; device++) {
    CHECK_STATUS(POOL_OK, pool_alloc_async(&first, 32 * MIB, other));
    CHECK_STATUS(POOL_OK, pool_alloc_async(&second, 24 * MIB, other));
    busy(other, 300);
    CHECK_STATUS(POOL_OK, pool_free_async(first, other));
    begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(try_alloc(60 * MIB, device) == NULL);
    small = try_alloc(1000, device);
    CHECK_STATUS(POOL_OK, pool_free_async(small, captured));
    END();
    /* After the capture the wait is allowed. */
    CHECK_STATUS(POOL_OK, pool_free(second));
    CHECK_STATUS(POOL_OK, pool_alloc(&first, 60 * MIB));
    CHECK_STATUS(POOL_OK, pool_free(first));
    CHECK_TRIMS_TO_ZERO(0);
  }
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(StreamDestroy(other));
}

/* No memory of the captured stream is used while it is captured, and it is a non-blocking one: no driver call
 * tells of such a capture, so the pool is told, as the header says. */
static void captures_are_not_broken_once_the_pool_is_told(void) {
  CUcontext context = NULL;
  int mode;
  CU(CtxGetCurrent(&context));
  for (mode = CU_STREAM_CAPTURE_MODE_GLOBAL; mode <= CU_STREAM_CAPTURE_MODE_RELAXED; mode++) {
    struct check_thread thread;
    captured = new_stream(CU_STREAM_NON_BLOCKING);
    CU(StreamBeginCapture(captured, mode));
    CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, captured));
    start_thread(&thread, allocate_beside_the_capture, context);
    join_thread(&thread);
    end(__FILE__, __LINE__);
    CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, captured));
    CU(StreamDestroy(captured));
    /* Told of the end too, it is free to wait again. */
    CHECK_TRIMS_TO_ZERO(0);
  }
}

int main(void) {
  driver_start(0);
  if (cu.StreamBeginCapture == NULL || cu.StreamEndCapture == NULL || cu.StreamIsCapturing == NULL ||
      cu.GraphDestroy == NULL || cu.ThreadExchangeStreamCaptureMode == NULL) {
    printf("skipped: the driver has no stream capture\n");
    return EXIT_SKIPPED;
  }
  for (non_blocking = 1; non_blocking >= 0; non_blocking--) {
    captured = new_stream(non_blocking ? CU_STREAM_NON_BLOCKING : 0);
    RUN(use_all_functions_while_capturing);
    RUN(other_threads_do_not_break_a_capture);
    RUN(out_of_memory_does_not_break_a_capture);
    CU(StreamDestroy(captured));
  }
  RUN(captures_are_not_broken_once_the_pool_is_told);
  return driver_result();
}
