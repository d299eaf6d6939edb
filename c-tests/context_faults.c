/* context_faults.c: a question about a context that the driver fails to answer is no answer. No living
 * context is taken for a lost one because of it, and no call for one that works on another device. Needs the
 * simulated driver. */

#include "check.h"
#include "driver.h"
#include "pools.h"

enum { CODE_UNKNOWN = 999 };

static CUcontext primary;

/* The next question fails at its `nth` time. Whether it came so far is told by the answer. */
static int alloc_while_failing(pool_t *pool, void **block, const char *question, uint64_t nth) {
  pool_request request = request_of(MIB);
  int status;
  request.pool = pool;
  CHECK_EQ(sim.fail(question, nth, 0, CODE_UNKNOWN), 0);
  status = pool_alloc_with(block, &request);
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  return status;
}

/* What a new pool asks of the context that others work in already. */
static void a_new_pool_asks_in_vain(void) {
  static const char *const questions[] = {"cuCtxGetId",         "cuCtxGetCurrent", "cuCtxGetDevice",
                                          "cuCtxGetApiVersion", "cuDevicePrimaryCtxRetain",
                                          "cuDevicePrimaryCtxGetState"};
  void *kept = take(NULL, 3 * MIB);
  int failures = 0;
  size_t i;
  uint64_t nth;
  for (i = 0; i < sizeof questions / sizeof questions[0]; i++) {
    for (nth = 1; nth <= 3; nth++) {
      pool_t *pool = new_pool(NULL);
      void *block = NULL;
      int status = alloc_while_failing(pool, &block, questions[i], nth);
      CHECK(status == POOL_OK || (status == POOL_ERROR_DRIVER && block == NULL));
      failures += status != POOL_OK;
      CHECK(info_of(kept).base == kept);
      CHECK_EQ(pool_stats_of(NULL, 0).live_blocks, 1);
      CHECK_STATUS(POOL_OK, pool_free(block));
      /* The pool works when the driver does. */
      CHECK_STATUS(POOL_OK, pool_free(take(pool, 2 * MIB)));
      CHECK_STATUS(POOL_OK, pool_destroy(pool));
      /* Neither that one's context nor any other is another life of this one. */
      CHECK(info_of(kept).base == kept);
    }
  }
  CHECK(failures >= 3);
  CHECK_STATUS(POOL_OK, pool_free(kept));
  CHECK_TRIMS_TO_ZERO(0);
}

/* A thread whose context is not known is not one without a context, which would get memory of device 0. */
static void an_unknown_context_is_not_device_0(void) {
  CUcontext second = NULL;
  void *first, *block = NULL;
  uint64_t nth;
  CU(DevicePrimaryCtxRetain(&second, 1));
  CU(CtxSetCurrent(second));
  first = take(NULL, MIB);
  CHECK_EQ(info_of(first).device, 1);
  for (nth = 1; nth <= 3; nth++) {
    int status = alloc_while_failing(NULL, &block, "cuCtxGetCurrent", nth);
    CHECK(status == POOL_OK || (status == POOL_ERROR_DRIVER && block == NULL));
    CHECK(nth > 1 || status != POOL_OK);
    if (block != NULL) {
      CHECK_EQ(info_of(block).device, 1);
    }
    CHECK_STATUS(POOL_OK, pool_free(block));
  }
  CHECK_STATUS(POOL_OK, pool_free(first));
  CHECK_TRIMS_TO_ZERO(1);
  CU(CtxSetCurrent(primary));
}

/* A stream whose context is not known is not one of the current context. */
static void an_unknown_streams_memory_is_refused(void) {
  CUcontext second = NULL;
  CUstream stream;
  void *block = (void *)0x5a5a;
  int status;
  CU(DevicePrimaryCtxRetain(&second, 1));
  CU(CtxSetCurrent(second));
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  CU(CtxSetCurrent(primary));
  CHECK_EQ(sim.fail("cuStreamGetCtx", 1, 0, CODE_UNKNOWN), 0);
  status = (int)pool_alloc_async(&block, MIB, stream);
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  CHECK_STATUS(POOL_ERROR_DRIVER, status);
  CHECK(block == NULL);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, MIB, stream));
  CHECK_EQ(info_of(block).device, 1);
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  CHECK_TRIMS_TO_ZERO(1);
  CU(StreamDestroy(stream));
}

/* The default stream is the current context's: with that unknown, the device must have done all work. */
static void a_free_on_an_unknown_stream_waits(void) {
  CUcontext second = NULL;
  void *block, *again = NULL;
  CU(DevicePrimaryCtxRetain(&second, 1));
  block = take(NULL, 8 * MIB);
  CU(CtxSetCurrent(second));
  CHECK_EQ(sim.fail("cuCtxGetCurrent", 1, 0, CODE_UNKNOWN), 0);
  CHECK_STATUS(POOL_OK, pool_free_async(block, NULL));
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  CU(CtxSetCurrent(primary));
  CHECK_EQ(pool_stats_of(NULL, 0).live_blocks, 0);
  CHECK_STATUS(POOL_OK, pool_alloc(&again, 8 * MIB));
  CHECK_STATUS(POOL_OK, pool_free(again));
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  setenv("CUDASIM_DEVICES", "2", 1);
  primary = driver_start(0);
  if (!on_sim()) {
    printf("skipped: needs the simulated driver\n");
    return EXIT_SKIPPED;
  }
  RUN(a_new_pool_asks_in_vain);
  RUN(an_unknown_context_is_not_device_0);
  RUN(an_unknown_streams_memory_is_refused);
  RUN(a_free_on_an_unknown_stream_waits);
  return driver_result();
}
