/* oom_info.c: out of memory explained in numbers that add up, in each situation that gives other advice. */

#include "check.h"
#include "driver.h"

static pool_oom_info info_now(void) {
  pool_oom_info info;
  memset(&info, 0x5a, sizeof info);
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_OK, pool_get_oom_info(&info));
  return info;
}

static pool_oom_info numbers_add_up(void) {
  pool_oom_info info = info_now();
  CHECK_EQ(info.reserved_bytes,
           info.live_bytes + info.cached_bytes + info.pending_bytes + info.overhead_bytes);
  CHECK_EQ(info.device_total_bytes, info.device_free_bytes + info.pools_bytes + info.foreign_bytes);
  return info;
}

/* The identities, and agreement with the statistics and the driver. */
static pool_oom_info explained(uint64_t requested, int advice) {
  pool_oom_info info = numbers_add_up();
  pool_stats stats = stats_of(0);
  size_t free_bytes = 0, total_bytes = 0;
  char text[2048], number[32];
  CU(MemGetInfo(&free_bytes, &total_bytes));
  CHECK_EQ(info.requested_bytes, requested);
  CHECK_EQ(info.device, 0);
  CHECK_EQ(info.advice, advice);
  CHECK_EQ(info.reserved_bytes, stats.reserved_bytes);
  CHECK_EQ(info.live_bytes, stats.live_bytes);
  CHECK_EQ(info.device_total_bytes, total_bytes);
  CHECK_EQ(info.device_free_bytes, free_bytes);
  CHECK(info.rungs_tried & 2); /* at least a search */
  CHECK_EQ(info.rungs_tried & 1, 0);
  CHECK_EQ(info.rung_bytes[0], 0);
  pool_last_error(text, sizeof text);
  snprintf(number, sizeof number, "%llu bytes", (unsigned long long)requested);
  CHECK(strstr(text, number) != NULL);
  return info;
}

static void *take(size_t size, const char *owner) {
  pool_request request = request_of(size);
  void *block = NULL;
  request.owner = owner;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
  return block;
}

static void nothing_has_happened(void) {
  pool_oom_info info = info_now();
  CHECK_EQ(info.requested_bytes, 0);
  CHECK_EQ(info.advice, POOL_ADVICE_NONE);
  CHECK_EQ(info.rungs_tried, 0);
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_get_oom_info(NULL));
}

static void the_program_holds_too_much(void) {
  void *weights = take(4 * GIB, "weights"), *cache = take(2 * GIB, "kv cache"), *rest = take(GIB, NULL);
  void *block = NULL;
  pool_oom_info info;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 2 * GIB));
  info = explained(2 * GIB, POOL_ADVICE_USE_LESS);
  CHECK_EQ(strcmp(info.owners[0], "weights"), 0);
  CHECK_EQ(info.owner_bytes[0], 4 * GIB);
  CHECK_EQ(strcmp(info.owners[1], "kv cache"), 0);
  CHECK_EQ(info.owner_bytes[1], 2 * GIB);
  CHECK_EQ(info.owners[2][0], 0);
  CHECK_EQ(info.limit_bytes, 0);
  CHECK_EQ(info.foreign_bytes, 0);
  /* All rungs but the callbacks, of which there are none. */
  CHECK_EQ(info.rungs_tried, (1 << 1) + (1 << 2) + (1 << 3) + (1 << 4) + (1 << 5) + (1 << 7));
  CHECK_STATUS(POOL_OK, pool_free(weights));
  CHECK_STATUS(POOL_OK, pool_free(cache));
  CHECK_STATUS(POOL_OK, pool_free(rest));
  /* A success does not clear it. */
  CHECK_EQ(info_now().requested_bytes, 2 * GIB);
  CHECK_TRIMS_TO_ZERO(0);
}

static void somebody_else_holds_the_memory(void) {
  CUdeviceptr foreign = 0;
  void *block = NULL;
  pool_oom_info info;
  CU(MemAlloc(&foreign, 5 * GIB));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 4 * GIB));
  info = explained(4 * GIB, POOL_ADVICE_FREE_FOREIGN);
  CHECK_EQ(info.foreign_bytes, 5 * GIB);
  CU(MemFree(foreign));
  CHECK_TRIMS_TO_ZERO(0);
}

static void the_limit_is_in_the_way(void) {
  pool_options defaults = default_options(), options = defaults;
  void *held = NULL, *block = NULL;
  pool_oom_info info;
  options.limit_bytes = GIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  held = take(GIB / 2, "held");
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 600 * MIB));
  info = explained(600 * MIB, POOL_ADVICE_RAISE_LIMIT);
  CHECK_EQ(info.limit_bytes, GIB);
  CHECK_STATUS(POOL_OK, pool_free(held));
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Neither the limit nor the program is to blame where others hold what it keeps back, or the device is not
 * done yet. */
static void advice_looks_further(void) {
  pool_options defaults = default_options(), options = defaults;
  CUstream slow = new_stream(CU_STREAM_NON_BLOCKING);
  CUdeviceptr foreign = 0;
  void *held = NULL, *block = NULL;
  pool_oom_info info;
  options.limit_bytes = 2 * GIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CU(MemAlloc(&foreign, 7 * GIB));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 3 * GIB));
  explained(3 * GIB, POOL_ADVICE_FREE_FOREIGN);
  CU(MemFree(foreign));
  options = defaults;
  options.settle_ms = 0;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&held, 6 * GIB, slow));
  busy(slow, 500);
  CHECK_STATUS(POOL_OK, pool_free_async(held, slow));
  if (pool_alloc(&block, 4 * GIB) == POOL_OK) {
    /* Drivers before 12.5 are waited for as a whole. */
    CHECK_STATUS(POOL_OK, pool_free(block));
  } else {
    explained(4 * GIB, POOL_ADVICE_WAIT);
  }
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_TRIMS_TO_ZERO(0);
  if (on_sim()) {
    held = take(GIB, "held");
    CHECK_EQ(sim.fail("cuMemGetInfo_v2", 1, 1, 999), 0);
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 8 * GIB));
    info = numbers_add_up();
    CHECK_EQ(info.foreign_bytes, 0);
    CHECK_EQ(info.pools_bytes, GIB);
    CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
    CHECK_STATUS(POOL_OK, pool_free(held));
    CHECK_TRIMS_TO_ZERO(0);
  }
  CU(StreamDestroy(slow));
}

static void what_the_rungs_gain(void) {
  void *pieces[8], *keep = take(3 * GIB, "keep"), *block = NULL;
  pool_oom_info info;
  int i;
  for (i = 0; i < 8; i++) {
    pieces[i] = take(GIB / 4, NULL);
  }
  busy(NULL, 30);
  for (i = 0; i < 8; i++) {
    CHECK_STATUS(POOL_OK, pool_free(pieces[i]));
  }
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 6 * GIB));
  info = explained(6 * GIB, POOL_ADVICE_USE_LESS);
  /* The two GiB were waited for, and given back in vain. */
  CHECK(info.rung_bytes[5] + info.rung_bytes[3] + info.rung_bytes[7] >= 2 * GIB);
  CHECK(info.rung_micros[5] + info.rung_micros[1] > 0);
  CHECK_EQ(info.reserved_bytes, info.live_bytes);
  CHECK_STATUS(POOL_OK, pool_free(keep));
  CHECK_TRIMS_TO_ZERO(0);
}

static void larger_than_any_device(void) {
  void *block = NULL;
  pool_oom_info info;
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, SIZE_MAX - 5));
  info = numbers_add_up();
  CHECK_EQ(info.requested_bytes, SIZE_MAX - 5);
  CHECK_EQ(info.device, -1);
  CHECK_EQ(info.rungs_tried, 0);
}

/* There is a larger one, so the answer is about this one, with its numbers. */
static int on_the_smaller_of_two_devices(void) {
  void *keep = NULL, *block = NULL;
  CUdeviceptr foreign = 0;
  pool_oom_info info;
  setenv("CUDASIM_DEVICES", "2", 1);
  driver_open();
  CHECK_EQ(sim.set_memory(1, 16 * GIB), 0);
  driver_start(0);
  CU(MemAlloc(&foreign, 2 * GIB));
  CHECK_STATUS(POOL_OK, pool_alloc(&keep, GIB));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&block, 10 * GIB));
  info = numbers_add_up();
  CHECK_EQ(info.device, 0);
  CHECK_EQ(info.advice, POOL_ADVICE_USE_LESS);
  CHECK_EQ(info.device_total_bytes, 8 * GIB);
  CHECK_EQ(info.live_bytes, GIB);
  CHECK_EQ(info.foreign_bytes, 2 * GIB);
  CHECK_EQ(stats_of(0).oom_count, 1);
  CHECK_STATUS(POOL_OK, pool_free(keep));
  CU(MemFree(foreign));
  return driver_result();
}

static void larger_than_this_device(void) {
  CHECK_EQ(in_child(on_the_smaller_of_two_devices), 0);
}

/* Others take and give back while the numbers of an answer are read. */
static void *run_out_and_take(void *seed) {
  uint64_t state = (uint64_t)(uintptr_t)seed;
  void *held[4] = {NULL, NULL, NULL, NULL};
  pool_t *pool = NULL;
  int slot, round;
  CHECK_STATUS(POOL_OK, pool_create(NULL, &pool));
  for (round = 0; round < 1500; round++) {
    pool_request request = request_of((size_t)(1 + random_below(&state, 3000)) * MIB);
    slot = (int)random_below(&state, 4);
    request.pool = pool;
    if (held[slot] != NULL) {
      CHECK_STATUS(POOL_OK, pool_free(held[slot]));
      held[slot] = NULL;
    } else if (pool_alloc_with(&held[slot], &request) != POOL_OK) {
      (void)numbers_add_up();
    }
  }
  for (slot = 0; slot < 4; slot++) {
    CHECK_STATUS(POOL_OK, pool_free(held[slot]));
  }
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
  return NULL;
}

static void numbers_read_while_others_take(void) {
  enum { THREADS = 6 };
  struct check_thread threads[THREADS];
  int i;
  for (i = 0; i < THREADS; i++) {
    start_thread(&threads[i], run_out_and_take, (void *)(uintptr_t)(i + 1));
  }
  for (i = 0; i < THREADS; i++) {
    join_thread(&threads[i]);
  }
}

int main(void) {
  RUN(larger_than_this_device);
  driver_start(0);
  require_sim("the sizes are made for a device of 8 GiB");
  RUN(nothing_has_happened);
  RUN(the_program_holds_too_much);
  RUN(somebody_else_holds_the_memory);
  RUN(the_limit_is_in_the_way);
  RUN(advice_looks_further);
  RUN(what_the_rungs_gain);
  RUN(larger_than_any_device);
  RUN(numbers_read_while_others_take);
  return driver_result();
}
