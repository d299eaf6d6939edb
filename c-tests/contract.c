/* contract.c: what every function promises on its good paths: results, out-parameters, struct sizes,
 * counters, the last error. Bad input is bad_input.c's. */

#include "check.h"
#include "driver.h"

static void *const GARBAGE = (void *)0x5a5a;

static void plain_blocks(void) {
  static const size_t sizes[] = {1, 2, 511, 512, 513, 4096, 65537, 1 << 20, (1 << 20) + 1, 3 << 20, 64 << 20};
  void *blocks[sizeof sizes / sizeof sizes[0]];
  size_t count = sizeof sizes / sizeof sizes[0], i;

  for (i = 0; i < count; i++) {
    pool_block_info info;
    blocks[i] = GARBAGE;
    CHECK_STATUS(POOL_OK, pool_alloc(&blocks[i], sizes[i]));
    CHECK(blocks[i] != NULL && blocks[i] != GARBAGE);
    CHECK_EQ((uintptr_t)blocks[i] % POOL_DEFAULT_ALIGNMENT, 0);
    info = info_of(blocks[i]);
    CHECK(info.base == blocks[i]);
    CHECK_EQ(info.struct_size, sizeof info);
    CHECK_EQ(info.requested_size, sizes[i]);
    CHECK(info.usable_size >= sizes[i]);
    CHECK_EQ(info.device, 0);
    CHECK_EQ(info.order, POOL_ORDER_DEVICE);
    CHECK(info.stream == NULL);
    CHECK_EQ(info.owner[0], 0);
    CHECK_STATS(0);
    /* The usable size really is usable. */
    fill(blocks[i], info.usable_size & ~(size_t)3, (unsigned)i + 1, NULL);
  }
  CU(CtxSynchronize());
  for (i = 0; i < count; i++) {
    CHECK(holds(blocks[i], sizes[i] & ~(size_t)3, (unsigned)i + 1));
  }
  for (i = 0; i < count; i++) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
    CHECK_STATS(0);
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void nothing_is_a_block(void) {
  pool_request request = request_of(0);
  pool_stats before = stats_of(0), after;
  void *out = GARBAGE;
  CHECK_STATUS(POOL_OK, pool_alloc(&out, 0));
  CHECK(out == NULL);
  out = GARBAGE;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&out, 0, NULL));
  CHECK(out == NULL);
  out = GARBAGE;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&out, &request));
  CHECK(out == NULL);
  CHECK_STATUS(POOL_OK, pool_free(NULL));
  CHECK_STATUS(POOL_OK, pool_free_async(NULL, NULL));
  after = stats_of(0);
  CHECK_EQ(after.alloc_count, before.alloc_count);
  CHECK_EQ(after.free_count, before.free_count);
}

static void stream_blocks(void) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  pool_block_info info;
  void *block = GARBAGE;
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 1000, stream));
  info = info_of(block);
  CHECK_EQ(info.order, POOL_ORDER_STREAM);
  CHECK(info.stream == stream);
  CHECK_EQ(info.requested_size, 1000);
  CHECK_STATUS(POOL_OK, pool_use_on_stream(block, CU_STREAM_LEGACY));
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  CHECK_STATS(0);

  /* Both kinds of free take both kinds of block. */
  CHECK_STATUS(POOL_OK, pool_alloc_async(&block, 5 * MIB, stream));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * MIB));
  CHECK_STATUS(POOL_OK, pool_free_async(block, stream));
  CU(StreamSynchronize(stream));
  CHECK_TRIMS_TO_ZERO(0);
  CU(StreamDestroy(stream));
}

static void explicit_requests(void) {
  pool_request request = request_of(100);
  size_t alignment;
  pool_block_info info;
  void *block = GARBAGE;

  /* A tag longer than the field is cut; the caller's copy is not needed any more. */
  char owner[] = "a tag of more than thirty-one characters";
  request.owner = owner;
  request.device = 0;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
  memset(owner, 'x', sizeof owner - 1);
  info = info_of(block);
  CHECK(strcmp(info.owner, "a tag of more than thirty-one c") == 0);
  CHECK_EQ(info.order, POOL_ORDER_DEVICE);
  CHECK_STATUS(POOL_OK, pool_free(block));

  request = request_of(100);
  request.flags = POOL_REQUEST_STREAM_ORDERED;
  request.stream = CU_STREAM_LEGACY;
  request.owner = "";
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
  info = info_of(block);
  CHECK_EQ(info.order, POOL_ORDER_STREAM);
  CHECK_EQ(info.owner[0], 0);
  CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_LEGACY));

  /* Without the flag the stream is not looked at. */
  request = request_of(100);
  request.stream = (CUstream)GARBAGE;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
  CHECK_STATUS(POOL_OK, pool_free(block));

  for (alignment = 1; alignment <= 256 * MIB; alignment *= 2) {
    request = request_of(3 * alignment / 2 + 1);
    request.alignment = alignment;
    CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
    CHECK_EQ((uintptr_t)block % alignment, 0);
    CHECK_EQ((uintptr_t)block % POOL_DEFAULT_ALIGNMENT, 0);
    CHECK_STATS(0);
    CHECK_STATUS(POOL_OK, pool_free(block));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void own_allocations(void) {
  pool_request request = request_of(70000);
  void *one = NULL, *two = NULL;
  request.flags = POOL_REQUEST_OWN_ALLOCATION;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&one, &request));
  CHECK_STATUS(POOL_OK, pool_alloc_with(&two, &request));
  CHECK(one != two);
  if (on_sim()) {
    CHECK_EQ(sim.live_allocations(), 2);
  }
  CHECK_STATS(0);
  fill(one, 70000, 1, NULL);
  fill(two, 70000, 2, NULL);
  CU(CtxSynchronize());
  CHECK(holds(one, 70000, 1) && holds(two, 70000, 2));
  CHECK_STATUS(POOL_OK, pool_free(one));
  CHECK_STATUS(POOL_OK, pool_free(two));
  CHECK_TRIMS_TO_ZERO(0);
}

static void query_answers_interior_addresses(void) {
  static const size_t sizes[] = {600, 9 << 20};
  size_t i;
  for (i = 0; i < 2; i++) {
    char *block = NULL;
    pool_block_info info;
    CHECK_STATUS(POOL_OK, pool_alloc((void **)&block, sizes[i]));
    info = info_of(block + 1);
    CHECK(info.base == block);
    info = info_of(block + sizes[i] - 1);
    CHECK(info.base == block && info.requested_size == sizes[i]);
    CHECK_STATUS(POOL_OK, pool_free(block));
    /* A free block answers no more, and the answer is zeroed. */
    memset(&info, 0xA5, sizeof info);
    info.struct_size = sizeof info;
    CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_query(block, &info));
    CHECK(info.base == NULL && info.requested_size == 0 && info.usable_size == 0 && info.owner[0] == 0);
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void incoming_structs_may_be_shorter_or_longer(void) {
  struct {
    pool_request request;
    unsigned char later[64];
  } longer;
  pool_request request = request_of(1000);
  void *block = GARBAGE;

  /* An old caller knows `pool` and `size` only; what it does not say is 0: device 0, device-ordered. */
  request.struct_size = offsetof(pool_request, alignment);
  request.alignment = 3;
  request.device = 12345;
  request.flags = ~UINT64_C(0);
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &request));
  CHECK_EQ(info_of(block).requested_size, 1000);
  CHECK_STATUS(POOL_OK, pool_free(block));

  memset(&longer, 0, sizeof longer);
  longer.request = request_of(1000);
  longer.request.struct_size = sizeof longer;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&block, &longer.request));
  CHECK_STATUS(POOL_OK, pool_free(block));
  longer.later[63] = 1;
  block = GARBAGE;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc_with(&block, &longer.request));
  CHECK(block == NULL);
  CHECK_TRIMS_TO_ZERO(0);
}

/* Every outgoing struct, with every size: no byte beyond it is written, those before it are. */
static void outgoing_structs_end_where_the_caller_says(void) {
  union {
    size_t struct_size;
    unsigned char bytes[512];
  } out;
  static const size_t full[] = {sizeof(pool_stats), sizeof(pool_block_info), sizeof(pool_options)};
  size_t which, size, i;
  void *block = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 100));
  for (which = 0; which < 3; which++) {
    for (size = 0; size <= full[which] + 40; size++) {
      int status = 0;
      memset(&out, 0xA5, sizeof out);
      out.struct_size = size;
      switch (which) {
        case 0: status = pool_get_stats(NULL, 0, (pool_stats *)&out); break;
        case 1: status = pool_query(block, (pool_block_info *)&out); break;
        default: status = pool_options_init((pool_options *)&out); break;
      }
      /* In all of them the first field after the size ends at twice the size of a size_t; a struct that ends
       * in it may be refused or not. */
      if (size < sizeof(size_t)) {
        CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, status);
      } else if (size >= 2 * sizeof(size_t)) {
        CHECK_STATUS(POOL_OK, status);
      }
      for (i = size < sizeof(size_t) ? sizeof(size_t) : size; i < sizeof out; i++) {
        if (!CHECK_EQ(out.bytes[i], 0xA5)) {
          fprintf(stderr, "  struct %d of %d bytes, byte %d\n", (int)which, (int)size, (int)i);
          break;
        }
      }
    }
  }
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

static void counters_count(void) {
  pool_stats before = stats_of(0), after;
  void *blocks[10];
  int i;
  for (i = 0; i < 10; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&blocks[i], 100 * (size_t)(i + 1)));
  }
  after = stats_of(0);
  CHECK_EQ(after.live_blocks - before.live_blocks, 10);
  CHECK_EQ(after.alloc_count - before.alloc_count, 10);
  CHECK_EQ(after.requested_bytes - before.requested_bytes, 5500);
  CHECK(after.live_bytes - before.live_bytes >= 5500);
  CHECK(after.live_bytes_peak >= after.live_bytes);
  CHECK(after.driver_alloc_calls > before.driver_alloc_calls);
  CHECK_EQ(after.oom_count, before.oom_count);
  for (i = 0; i < 10; i++) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
  }
  CHECK_TRIMS_TO_ZERO(0);
  after = stats_of(0);
  CHECK_EQ(after.free_count - before.free_count, 10);
  CHECK(after.driver_free_calls > before.driver_free_calls);
  CHECK(after.reserved_bytes_peak > 0);
}

/* What the counters say of driver calls is what the driver saw. */
static void driver_calls_are_counted(void) {
  pool_stats stats = stats_of(0);
  if (!needs_sim()) {
    return;
  }
  CHECK_EQ(stats.driver_map_calls, calls_of("cuMemMap"));
  CHECK_EQ(stats.driver_unmap_calls, calls_of("cuMemUnmap"));
  CHECK_EQ(stats.driver_alloc_calls, calls_of("cuMemCreate") + calls_of("cuMemAlloc"));
  CHECK_EQ(stats.driver_free_calls, calls_of("cuMemRelease") + calls_of("cuMemFree"));
}

static void trim_keeps_what_it_is_told(void) {
  pool_stats before, after;
  void *blocks[8];
  size_t released = 0;
  int i;
  for (i = 0; i < 8; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&blocks[i], 16 * MIB));
  }
  for (i = 0; i < 7; i++) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
  }
  CU(CtxSynchronize());
  fill(blocks[7], 16 * MIB, 0x77, NULL);

  before = stats_of(0);
  CHECK_STATUS(POOL_OK, pool_trim(NULL, POOL_DEVICE_CURRENT, 48 * MIB, &released));
  after = stats_of(0);
  CHECK(after.cached_bytes <= 48 * MIB);
  CHECK_EQ(before.reserved_bytes - after.reserved_bytes, released);
  CHECK(released > 0);
  CHECK_STATS(0);

  /* Nothing to do is nothing done. */
  released = 12345;
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, SIZE_MAX, &released));
  CHECK_EQ(released, 0);
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
  /* What shares a chunk with the live block can not go. */
  CHECK(stats_of(0).cached_bytes <= 16 * MIB);
  CU(CtxSynchronize());
  CHECK(holds(blocks[7], 16 * MIB, 0x77));
  CHECK_STATUS(POOL_OK, pool_free(blocks[7]));
  CHECK_TRIMS_TO_ZERO(0);
}

static void last_error_is_cut_and_terminated(void) {
  char whole[1024], part[1024], before[1024];
  size_t length, size;
  void *out = GARBAGE;

  CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_free(&out));
  length = pool_last_error(NULL, 0);
  if (!CHECK(length > 10 && length < sizeof whole)) {
    return;
  }
  CHECK_EQ(pool_last_error(whole, sizeof whole), length);
  CHECK_EQ(strlen(whole), length);
  for (size = 0; size <= length + 2; size++) {
    size_t kept = size == 0 ? 0 : (size - 1 < length ? size - 1 : length);
    memset(part, 0x5A, sizeof part);
    CHECK_EQ(pool_last_error(part, size), length);
    if (size > 0) {
      CHECK_EQ(part[kept], 0);
      CHECK(memcmp(part, whole, kept) == 0);
    }
    CHECK_EQ((unsigned char)part[size], 0x5A);
  }
  /* A success does not clear it. */
  memcpy(before, whole, sizeof whole);
  CHECK_STATUS(POOL_OK, pool_alloc(&out, 100));
  CHECK_STATUS(POOL_OK, pool_free(out));
  pool_last_error(whole, sizeof whole);
  CHECK(strcmp(whole, before) == 0);
}

static void *another_thread(void *length) {
  *(size_t *)length = pool_last_error(NULL, 0);
  return NULL;
}

static void last_error_is_the_threads_own(void) {
  size_t length = 1;
  struct check_thread thread;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc(NULL, 1));
  start_thread(&thread, another_thread, &length);
  join_thread(&thread);
  CHECK_EQ(length, 0);
}

/* As the runtime API does: a thread without a current context works on device 0, and stays without one. */
static void no_current_context(void) {
  CUcontext before = NULL, now = (CUcontext)GARBAGE;
  void *block = NULL;
  CU(CtxGetCurrent(&before));
  CU(CtxSetCurrent(NULL));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 12345));
  CHECK_EQ(info_of(block).device, 0);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_STATUS(POOL_OK, pool_trim(NULL, POOL_DEVICE_CURRENT, SIZE_MAX, NULL));
  stats_of(POOL_DEVICE_CURRENT);
  CU(CtxGetCurrent(&now));
  CHECK(now == NULL);
  CU(CtxSetCurrent(before));
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  driver_start(0);
  RUN(plain_blocks);
  RUN(nothing_is_a_block);
  RUN(stream_blocks);
  RUN(explicit_requests);
  RUN(own_allocations);
  RUN(query_answers_interior_addresses);
  RUN(incoming_structs_may_be_shorter_or_longer);
  RUN(outgoing_structs_end_where_the_caller_says);
  RUN(counters_count);
  RUN(trim_keeps_what_it_is_told);
  RUN(last_error_is_cut_and_terminated);
  RUN(last_error_is_the_threads_own);
  RUN(no_current_context);
  RUN(driver_calls_are_counted);
  return driver_result();
}
