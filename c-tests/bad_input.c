/* bad_input.c: what callers must not do, and what they get for it: the status of the contract, out-parameters
 * in their failure value, nothing changed, and for impossible sizes not even a driver call. */

#include "check.h"
#include "driver.h"

static void *const GARBAGE = (void *)0x5a5a;

/* What every refused call must leave as it was. */
static pool_stats before;

static void remember(void) {
  before = stats_of(0);
}

static void check_unchanged(const char *file, int line) {
  pool_stats now = stats_of(0);
  check_identity(&now, file, line);
  check_equal(now.live_bytes, before.live_bytes, "live bytes changed to", file, line);
  check_equal(now.live_blocks, before.live_blocks, "live blocks changed to", file, line);
  check_equal(now.requested_bytes, before.requested_bytes, "requested bytes changed to", file, line);
  check_equal(now.reserved_bytes, before.reserved_bytes, "reserved bytes changed to", file, line);
  check_equal(now.alloc_count, before.alloc_count, "allocations changed to", file, line);
  check_equal(now.free_count, before.free_count, "frees changed to", file, line);
}
#define CHECK_UNCHANGED() check_unchanged(__FILE__, __LINE__)

/* A refused allocation: its status, and NULL. */
#define CHECK_REFUSED(status, out, call) \
  do {                                   \
    (out) = GARBAGE;                     \
    CHECK_STATUS(status, call);          \
    CHECK((out) == NULL);                \
  } while (0)

static void no_place_for_the_result(void) {
  pool_request request = request_of(100);
  remember();
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc(NULL, 100));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc(NULL, 0));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc(NULL, SIZE_MAX));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc_async(NULL, 100, NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc_with(NULL, &request));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_alloc_with(NULL, NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_query(&request, NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_get_stats(NULL, 0, NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_options_init(NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_configure(NULL));
  CHECK_UNCHANGED();
}

static void bad_requests(void) {
  static const size_t alignments[] = {3, 5, 6, 511, 513, 768, 1000, SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 31,
                                      (size_t)1 << 63};
  pool_request request = request_of(100);
  void *out;
  size_t i;
  int bit;
  remember();
  CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, NULL));
  for (i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
    request = request_of(100);
    request.alignment = alignments[i];
    CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
    /* A bad argument stays one when there is nothing to allocate. */
    request.size = 0;
    CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
  }
  for (bit = 2; bit < 64; bit++) {
    request = request_of(100);
    request.flags = UINT64_C(1) << bit;
    CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
    request.flags |= POOL_REQUEST_STREAM_ORDERED;
    CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
  }
  for (bit = 0; bit < 32; bit++) {
    request = request_of(100);
    request.reserved = (int32_t)(UINT32_C(1) << bit);
    CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
  }
  for (i = 0; i < sizeof(size_t); i++) {
    request = request_of(100);
    request.struct_size = i;
    CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
  }
  /* No other pools can be had yet, so this is none. */
  request = request_of(100);
  request.pool = (pool_t *)GARBAGE;
  CHECK_REFUSED(POOL_ERROR_INVALID_ARGUMENT, out, pool_alloc_with(&out, &request));
  CHECK_UNCHANGED();
}

static void bad_devices_and_pools(void) {
  static const int devices[] = {1000, INT32_MAX, -2, INT32_MIN};
  size_t i;
  remember();
  for (i = 0; i < sizeof devices / sizeof devices[0]; i++) {
    pool_request request = request_of(100);
    pool_stats stats;
    size_t released = 12345;
    /* The driver sees no such device; a negative number may be called what it is. */
    int status, good;
    void *out = GARBAGE;
    request.device = devices[i];
    status = pool_alloc_with(&out, &request);
    good = status == POOL_ERROR_NO_DEVICE || (devices[i] < 0 && status == POOL_ERROR_INVALID_ARGUMENT);
    CHECK(good);
    CHECK(out == NULL);
    CHECK_STATUS(status, pool_trim(NULL, devices[i], 0, &released));
    CHECK_EQ(released, 0);
    memset(&stats, 0xA5, sizeof stats);
    stats.struct_size = sizeof stats;
    CHECK_STATUS(status, pool_get_stats(NULL, devices[i], &stats));
    CHECK(stats.live_bytes == 0 && stats.headroom_bytes == 0);
  }
  {
    pool_stats stats;
    size_t released = 12345;
    stats.struct_size = sizeof stats;
    CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_get_stats((pool_t *)GARBAGE, 0, &stats));
    CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_trim((pool_t *)GARBAGE, 0, 0, &released));
    CHECK_EQ(released, 0);
  }
  CHECK_UNCHANGED();
}

static void refuse_size(size_t size) {
  static const size_t alignments[] = {0, 1, 512, 1 << 20, 2 << 20, (2 << 20) * 2, 1 << 30};
  uint64_t calls = calls_of("*");
  size_t i;
  void *out;
  CHECK_REFUSED(POOL_ERROR_OUT_OF_MEMORY, out, pool_alloc(&out, size));
  CHECK_REFUSED(POOL_ERROR_OUT_OF_MEMORY, out, pool_alloc_async(&out, size, NULL));
  CHECK_REFUSED(POOL_ERROR_OUT_OF_MEMORY, out, pool_alloc_async(&out, size, CU_STREAM_PER_THREAD));
  for (i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
    unsigned flags;
    for (flags = 0; flags < 4; flags++) {
      pool_request request = request_of(size);
      request.alignment = alignments[i];
      request.flags = flags;
      CHECK_REFUSED(POOL_ERROR_OUT_OF_MEMORY, out, pool_alloc_with(&out, &request));
    }
  }
  if (!CHECK_EQ(calls_of("*") - calls, 0)) {
    fprintf(stderr, "  ... for the size 0x%llx\n", (unsigned long long)size);
  }
}

static void impossible_sizes(void) {
  static const size_t steps[] = {0, 1, 2, 255, 510, 511, 512, 513, 4095, 4096};
  size_t total = 0, i;
  int bit;
  CU(DeviceTotalMem(&total, 0));
  remember();
  for (i = 0; i < sizeof steps / sizeof steps[0]; i++) {
    refuse_size(SIZE_MAX - steps[i]);
    refuse_size(SIZE_MAX / 2 - steps[i]);
    refuse_size(SIZE_MAX / 2 + 1 + steps[i]);
    refuse_size(total + 1 + steps[i]);
  }
  for (bit = 12; bit <= 31; bit++) {
    refuse_size(SIZE_MAX - ((size_t)1 << bit));
    refuse_size(SIZE_MAX - ((size_t)1 << bit) + 1);
    refuse_size(SIZE_MAX - ((size_t)1 << bit) + 2);
  }
  for (bit = 48; bit <= 63; bit++) {
    refuse_size((size_t)1 << bit);
    refuse_size(((size_t)1 << bit) - 1);
  }
  CHECK_UNCHANGED();
  CHECK(stats_of(0).oom_count > before.oom_count);
}

/* The whole device and a little less: the driver has the last word, and only these two words are right. */
static void borderline_sizes(void) {
  size_t total = 0, back;
  CU(DeviceTotalMem(&total, 0));
  for (back = 0; back <= 4 * MIB; back += MIB - 1) {
    void *out = GARBAGE;
    int status = pool_alloc(&out, total - back);
    CHECK(status == POOL_OK || status == POOL_ERROR_OUT_OF_MEMORY);
    CHECK((status == POOL_OK) == (out != NULL));
    CHECK_STATUS(POOL_OK, pool_free(out));
    CHECK_STATS(0);
  }
  CHECK_TRIMS_TO_ZERO(0);
}

/* Where sizes wrapped at 32 bits, the block would be tiny. */
static void around_four_gibibytes(void) {
  size_t sizes[] = {4 * GIB - 1, 4 * GIB, 4 * GIB + 1};
  size_t total = 0, i;
  CU(DeviceTotalMem(&total, 0));
  if (total < 6 * GIB) {
    check_skip("the device is too small");
    return;
  }
  for (i = 0; i < 3; i++) {
    char *block = NULL;
    CHECK_STATUS(POOL_OK, pool_alloc((void **)&block, sizes[i]));
    if (block != NULL) {
      size_t last = (sizes[i] - 4) & ~(size_t)3;
      CHECK(info_of(block).usable_size >= sizes[i]);
      fill(block, 4, 1, NULL);
      fill(block + last, 4, 2, NULL);
      CU(CtxSynchronize());
      CHECK(holds(block, 4, 1) && holds(block + last, 4, 2));
    }
    CHECK_STATUS(POOL_OK, pool_free(block));
    CHECK_TRIMS_TO_ZERO(0);
  }
}

/* Answers of a free that must not happen. */
static void refuse_free(void *ptr) {
  pool_block_info info;
  int status;
  CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_free(ptr));
  CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_free_async(ptr, NULL));
  CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_use_on_stream(ptr, NULL));
  info.struct_size = sizeof info;
  status = pool_query(ptr, &info);
  CHECK(status == POOL_OK || status == POOL_ERROR_INVALID_POINTER); /* an interior address answers */
}

static void pointers_that_are_no_blocks(void) {
  static int in_data;
  int on_stack = 0;
  void *on_heap = malloc(100);
  uint64_t random = 42;
  CUdeviceptr foreign = 0;
  char *block = NULL;
  int i;

  CHECK_STATUS(POOL_OK, pool_alloc((void **)&block, MIB));
  CU(MemAlloc(&foreign, 4096));
  remember();
  refuse_free(&in_data);
  refuse_free(&on_stack);
  refuse_free(on_heap);
  refuse_free((void *)(uintptr_t)foreign);
  refuse_free((void *)(uintptr_t)&pool_version);
  for (i = 0; i < 64; i++) {
    refuse_free((void *)(uintptr_t)((UINT64_C(1) << i)));
    refuse_free((void *)(uintptr_t)(~UINT64_C(0) << i));
  }
  for (i = 0; i < 20000; i++) {
    uint64_t address = random_next(&random) & (UINT64_MAX >> random_below(&random, 60));
    refuse_free((void *)(uintptr_t)(address | 1)); /* not NULL, and no block starts there */
  }
  /* Inside a block and near it. */
  for (i = 1; i < (int)MIB; i = i * 2 + i % 3) {
    refuse_free(block + i);
  }
  refuse_free(block + MIB - 1);
  refuse_free(block - 1);
  for (i = 0; i < 20000; i++) {
    char *near = block + (int64_t)random_below(&random, 1 << 24) - (1 << 23);
    if (near != block) {
      refuse_free(near);
    }
  }
  CHECK_STATUS(POOL_OK, pool_use_on_stream(NULL, NULL));
  {
    pool_block_info info;
    memset(&info, 0xA5, sizeof info);
    info.struct_size = sizeof info;
    CHECK_STATUS(POOL_ERROR_INVALID_POINTER, pool_query(NULL, &info));
    CHECK(info.base == NULL && info.owner[0] == 0);
  }
  CHECK_UNCHANGED();
  CU(MemFree(foreign));
  free(on_heap);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Memory of the pool that nobody has had yet: nothing there is freed twice. Must run first. */
static void memory_that_never_was_a_block(void) {
  char *small = NULL, *large = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc((void **)&small, 100));
  CHECK_EQ(info_of(small).usable_size, 512);
  remember();
  refuse_free(small + 512);
  refuse_free(small + 64 * KIB);
  refuse_free(small + MIB);
  CHECK_UNCHANGED();
  CHECK_STATUS(POOL_OK, pool_alloc((void **)&large, 3 * MIB));
  remember();
  refuse_free(large + 3 * MIB);
  refuse_free(large + info_of(large).usable_size);
  CHECK_UNCHANGED();
  CHECK_STATUS(POOL_OK, pool_free(small));
  CHECK_STATUS(POOL_OK, pool_free(large));
  CHECK_TRIMS_TO_ZERO(0);
}

/* Interior addresses of small blocks, whose neighbours are blocks too. */
static void interior_pointers_of_small_blocks(void) {
  static const size_t sizes[] = {1, 512, 1000, 2048, 5000, 40000};
  char *blocks[sizeof sizes / sizeof sizes[0]];
  size_t count = sizeof sizes / sizeof sizes[0], i, offset;
  for (i = 0; i < count; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc((void **)&blocks[i], sizes[i]));
  }
  remember();
  for (i = 0; i < count; i++) {
    size_t usable = info_of(blocks[i]).usable_size;
    for (offset = 1; offset < usable; offset += offset < 16 ? 1 : 61) {
      refuse_free(blocks[i] + offset);
    }
    refuse_free(blocks[i] + usable - 1);
  }
  CHECK_UNCHANGED();
  for (i = 0; i < count; i++) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static int is_dead(int status) {
  return status == POOL_ERROR_DOUBLE_FREE || status == POOL_ERROR_INVALID_POINTER;
}

static void dead_blocks(void) {
  static const size_t sizes[] = {1, 512, 3000, 100000, 1 << 20, 5 << 20, 100 << 20};
  size_t i;
  int stays, twice;
  for (twice = 0; twice < 2; twice++) {
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
      /* With a live neighbour and without, before and after the memory is given back. */
      for (stays = 0; stays < 2; stays++) {
        void *block = NULL, *other = NULL;
        CHECK_STATUS(POOL_OK, pool_alloc_async(&block, sizes[i], NULL));
        CHECK_STATUS(POOL_OK, stays ? pool_alloc_async(&other, sizes[i], NULL) : POOL_OK);
        CHECK_STATUS(POOL_OK, twice ? pool_free(block) : pool_free_async(block, NULL));
        remember();
        CHECK(is_dead(pool_free(block)));
        CHECK(is_dead(pool_free_async(block, NULL)));
        CHECK(is_dead(pool_free(block)));
        CHECK(is_dead(pool_use_on_stream(block, NULL)));
        CHECK_UNCHANGED();
        CU(CtxSynchronize());
        CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
        remember();
        CHECK(is_dead(pool_free(block)));
        CHECK_UNCHANGED();
        CHECK_STATUS(POOL_OK, pool_free(other));
        CHECK_TRIMS_TO_ZERO(0);
        CHECK(is_dead(pool_free(block)));
      }
    }
  }
}

static int owns(const void *ptr) {
  int owned = 12345;
  CHECK_STATUS(POOL_OK, pool_owns(ptr, &owned));
  CHECK(owned == 0 || owned == 1);
  return owned;
}

/* Whose an address is, whether a block is live there or not; without a driver call. */
static void memory_has_an_owner(void) {
  static const size_t sizes[] = {100, 40000, 10 << 20};
  CUdeviceptr foreign = 0;
  size_t i;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_owns(&foreign, NULL));
  CHECK(!owns(NULL));
  CHECK(!owns(&foreign));
  CHECK(!owns((void *)UINTPTR_MAX));
  CU(MemAlloc(&foreign, MIB));
  CHECK(!owns((void *)(uintptr_t)foreign));
  for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    pool_request request = request_of(sizes[i]);
    void *block = NULL, *own = NULL;
    uint64_t calls;
    request.flags = POOL_REQUEST_OWN_ALLOCATION;
    CHECK_STATUS(POOL_OK, pool_alloc(&block, sizes[i]));
    CHECK_STATUS(POOL_OK, pool_alloc_with(&own, &request));
    calls = calls_of("*");
    CHECK(owns(block) && owns((char *)block + sizes[i] - 1));
    CHECK(owns(own) && owns((char *)own + sizes[i] - 1));
    CHECK(!owns((void *)(uintptr_t)foreign));
    CHECK_EQ(calls_of("*") - calls, 0);
    CHECK_STATUS(POOL_OK, pool_free_async(block, NULL));
    CHECK_STATUS(POOL_OK, pool_free_async(own, NULL));
    CHECK(owns(block) && owns(own));
    CU(CtxSynchronize());
    CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    /* It went back to the driver, which may give the address to anyone. */
    CHECK(!owns(own));
  }
  CU(MemFree(foreign));
  CHECK_TRIMS_TO_ZERO(0);
}

static void *free_in_thread(void *block) {
  return (void *)(intptr_t)pool_free(block);
}

/* Not bad at all, only uncommon: a thread that never saw a context frees. */
static void free_from_another_thread(void) {
  static const size_t sizes[] = {100, 10 << 20};
  size_t i;
  for (i = 0; i < 2; i++) {
    struct check_thread thread;
    void *block = NULL, *status = GARBAGE;
    CHECK_STATUS(POOL_OK, pool_alloc(&block, sizes[i]));
    start_thread(&thread, free_in_thread, block);
    status = join_thread(&thread);
    CHECK_STATUS(POOL_OK, (int)(intptr_t)status);
    CHECK(is_dead(pool_free(block)));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

int main(void) {
  void *first = NULL;
  driver_start(0);
  RUN(memory_that_never_was_a_block);
  /* The first use initialises the pool; driver calls are counted from then on. */
  CHECK_STATUS(POOL_OK, pool_alloc(&first, 1));
  CHECK_STATUS(POOL_OK, pool_free(first));
  CHECK_STATUS(POOL_OK, pool_alloc_async(&first, 1, CU_STREAM_PER_THREAD));
  CHECK_STATUS(POOL_OK, pool_free_async(first, CU_STREAM_PER_THREAD));
  RUN(no_place_for_the_result);
  RUN(bad_requests);
  RUN(bad_devices_and_pools);
  RUN(impossible_sizes);
  CHECK_TRIMS_TO_ZERO(0);
  RUN(borderline_sizes);
  RUN(around_four_gibibytes);
  RUN(pointers_that_are_no_blocks);
  RUN(interior_pointers_of_small_blocks);
  RUN(dead_blocks);
  RUN(memory_has_an_owner);
  RUN(free_from_another_thread);
  return driver_result();
}
