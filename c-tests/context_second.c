/* context_second.c: a second context on the device, and the primary context that is not the pool's to keep.
 * What the pool knows of contexts lasts as long as the process, so each test has one of its own. */

#include "check.h"
#include "driver.h"

enum { OLD = 0x0badf00d, NEW = 0x600dda7a };

/* A block of the second context, whose first use of the pool this is, is freed with a late write to come; the
 * memory handed out next with the first context current must keep what it gets. */
static int hand_over_from_the_second(int device_ordered) {
  const size_t size = 4 * MIB;
  CUcontext first = driver_start(0), second = NULL;
  CUstream here = new_stream(CU_STREAM_NON_BLOCKING), there;
  void *warm = NULL, *old = NULL, *new = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&warm, MIB, here));
  CU(CtxCreate(&second, 0, 0));
  there = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&old, size, there));
  busy(there, 200);
  fill(old, size, OLD, there);
  CHECK_STATUS(POOL_OK, pool_free_async(old, there));
  CU(CtxSetCurrent(first));
  CHECK_STATUS(POOL_OK, device_ordered ? pool_alloc(&new, size) : pool_alloc_async(&new, size, here));
  fill(new, size, NEW, here);
  CU(StreamSynchronize(here));
  CU(CtxSetCurrent(second));
  CU(CtxSynchronize());
  CU(CtxSetCurrent(first));
  CHECK(holds(new, size, NEW));
  CHECK_STATS(0);
  CHECK_STATUS(POOL_OK, pool_free(new));
  CHECK_STATUS(POOL_OK, pool_free(warm));
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(here));
  CU(CtxSetCurrent(second));
  CU(StreamDestroy(there));
  CU(CtxDestroy(second));
  return driver_result();
}

static int device_ordered(void) {
  return hand_over_from_the_second(1);
}

static int stream_ordered(void) {
  return hand_over_from_the_second(0);
}

static void work_of_the_second_context_is_waited_for(void) {
  CHECK_EQ(in_child(device_ordered), 0);
  CHECK_EQ(in_child(stream_ordered), 0);
}

/* With everything said explicitly, on a stream of the context that is not current: the block is of the
 * stream's context. */
static int ask_for_the_other_context(void) {
  const size_t size = 4 * MIB;
  CUcontext first = driver_start(0), second = NULL;
  CUstream here = new_stream(CU_STREAM_NON_BLOCKING), there;
  pool_request request = request_of(size);
  pool_t *pools[2] = {NULL, NULL};
  int i;
  CU(CtxCreate(&second, 0, 0));
  there = new_stream(CU_STREAM_NON_BLOCKING);
  CU(CtxSetCurrent(first));
  CHECK_STATUS(POOL_OK, pool_create(NULL, &pools[1]));
  request.flags = POOL_REQUEST_STREAM_ORDERED;
  for (i = 0; i < 4; i++) {
    void *old = NULL, *new = NULL;
    request.pool = pools[i % 2];
    request.device = i / 2 ? 0 : POOL_DEVICE_CURRENT;
    request.stream = there;
    CHECK_STATUS(POOL_OK, pool_alloc_with(&old, &request));
    busy(there, 200);
    fill(old, size, OLD, there);
    CHECK_STATUS(POOL_OK, pool_free_async(old, there));
    request.stream = here;
    CHECK_STATUS(POOL_OK, pool_alloc_with(&new, &request));
    fill(new, size, NEW, here);
    CU(StreamSynchronize(here));
    CU(StreamSynchronize(there));
    CHECK(holds(new, size, NEW));
    CHECK_STATUS(POOL_OK, pool_free_async(new, here));
    CU(StreamSynchronize(here));
  }
  request.stream = there;
  request.device = 1;
  if (sim.used_bytes != NULL) {
    void *block = NULL;
    CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc_with(&block, &request));
  }
  CHECK_STATUS(POOL_OK, pool_destroy(pools[1]));
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}

static void a_stream_says_which_context(void) {
  setenv("CUDASIM_DEVICES", "2", 1);
  CHECK_EQ(in_child(ask_for_the_other_context), 0);
  unsetenv("CUDASIM_DEVICES");
}

static int lose_the_second(void) {
  CUcontext first = driver_start(0), second = NULL;
  CUstream here = new_stream(CU_STREAM_NON_BLOCKING), there;
  void *kept = NULL, *lost = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&kept, MIB, here));
  CU(CtxCreate(&second, 0, 0));
  there = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&lost, 4 * MIB, there));
  CU(CtxSynchronize());
  CU(CtxDestroy(second));
  check_blocks_were_lost = 1;
  CU(CtxSetCurrent(first));
  CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(lost));
  fill(kept, MIB, NEW, here);
  CU(StreamSynchronize(here));
  CHECK(holds(kept, MIB, NEW));
  CHECK_STATUS(POOL_OK, pool_free_async(kept, here));
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(here));
  return driver_result();
}

static void blocks_go_with_the_second_context(void) {
  CHECK_EQ(in_child(lose_the_second), 0);
}

/* ---- options that are about the device ---- */

static int limit_for_both(void) {
  CUcontext first = driver_start(0), second = NULL;
  pool_options defaults = default_options(), options = defaults;
  void *one = NULL, *two = NULL;
  CU(CtxCreate(&second, 0, 0));
  CU(CtxSetCurrent(first));
  options.limit_bytes = 64 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_OK, pool_alloc(&one, 60 * MIB));
  CU(CtxSetCurrent(second));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&two, 60 * MIB));
  CHECK(stats_of(0).reserved_bytes <= 64 * MIB);
  CHECK_STATS(0);
  CU(CtxSetCurrent(first));
  CHECK_STATUS(POOL_OK, pool_free(one));
  CHECK_TRIMS_TO_ZERO(0);
  /* What the first one gave back the second one may have. */
  CU(CtxSetCurrent(second));
  CHECK_STATUS(POOL_OK, pool_alloc(&two, 60 * MIB));
  CHECK_STATUS(POOL_OK, pool_free(two));
  CHECK_TRIMS_TO_ZERO(0);
  /* What may stay after a trim is meant for both together, too. */
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CU(CtxSetCurrent(first));
  CHECK_STATUS(POOL_OK, pool_alloc(&one, 60 * MIB));
  CU(CtxSetCurrent(second));
  CHECK_STATUS(POOL_OK, pool_alloc(&two, 60 * MIB));
  CHECK_STATUS(POOL_OK, pool_free(one));
  CHECK_STATUS(POOL_OK, pool_free(two));
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 60 * MIB, NULL));
  CHECK(stats_of(0).cached_bytes <= 60 * MIB);
  CHECK_TRIMS_TO_ZERO(0);
  CU(CtxDestroy(second));
  return driver_result();
}

static void limit_holds_for_both_contexts_together(void) {
  CHECK_EQ(in_child(limit_for_both), 0);
}

/* ---- references of the primary context ---- */

static int primary_is_active(void) {
  unsigned flags = 0;
  int active = -1;
  CU(DevicePrimaryCtxGetState(0, &flags, &active));
  return active;
}

static void look_often(void) {
  int i;
  for (i = 0; i < 1000; i++) {
    stats_of(POOL_DEVICE_CURRENT);
    CHECK_STATUS(POOL_OK, pool_trim(NULL, POOL_DEVICE_CURRENT, 0, NULL));
  }
}

/* The application's own reference is the only one, as long as it uses the pool in another context. */
static int release_the_unused(void) {
  CUcontext second = NULL;
  void *block = NULL;
  driver_start(0);
  CU(CtxCreate(&second, 0, 0));
  CHECK_EQ(primary_is_active(), 1);
  look_often();
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 100));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CU(DevicePrimaryCtxRelease(0));
  CHECK_EQ(primary_is_active(), 0);
  look_often();
  CHECK_EQ(primary_is_active(), 0);
  CU(CtxDestroy(second));
  return driver_result();
}

/* With it current: looking takes none at all. */
static int release_the_current(void) {
  driver_start(0);
  look_often();
  CU(DevicePrimaryCtxRelease(0));
  CHECK_EQ(primary_is_active(), 0);
  return driver_result();
}

static void looking_takes_no_reference_of_the_primary_context(void) {
  CHECK_EQ(in_child(release_the_unused), 0);
  CHECK_EQ(in_child(release_the_current), 0);
}

int main(void) {
  driver_open();
  require_sim("on a real driver somebody else may hold references and memory");
  RUN(work_of_the_second_context_is_waited_for);
  RUN(a_stream_says_which_context);
  RUN(blocks_go_with_the_second_context);
  RUN(limit_holds_for_both_contexts_together);
  RUN(looking_takes_no_reference_of_the_primary_context);
  return check_result();
}
