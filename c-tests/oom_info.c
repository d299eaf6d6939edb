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

/* The identities, and agreement with the statistics and the driver. */
static pool_oom_info explained(uint64_t requested, int advice) {
  pool_oom_info info = info_now();
  pool_stats stats = stats_of(0);
  size_t free_bytes = 0, total_bytes = 0;
  char text[2048], number[32];
  CU(MemGetInfo(&free_bytes, &total_bytes));
  CHECK_EQ(info.requested_bytes, requested);
  CHECK_EQ(info.device, 0);
  CHECK_EQ(info.advice, advice);
  CHECK_EQ(info.reserved_bytes, info.live_bytes + info.cached_bytes + info.pending_bytes + info.overhead_bytes);
  CHECK_EQ(info.device_total_bytes, info.device_free_bytes + info.pools_bytes + info.foreign_bytes);
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
  void *block = NULL, *weights = take(4 * GIB, "weights"), *cache = take(2 * GIB, "kv cache"), *rest = take(GIB, NULL);
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
  info = info_now();
  CHECK_EQ(info.requested_bytes, SIZE_MAX - 5);
  CHECK_EQ(info.device, -1);
  CHECK_EQ(info.rungs_tried, 0);
}

int main(void) {
  driver_start(0);
  require_sim("the sizes are made for a device of 8 GiB");
  RUN(nothing_has_happened);
  RUN(the_program_holds_too_much);
  RUN(somebody_else_holds_the_memory);
  RUN(the_limit_is_in_the_way);
  RUN(what_the_rungs_gain);
  RUN(larger_than_any_device);
  return driver_result();
}
