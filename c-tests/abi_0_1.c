/* abi_0_1.c: a program of the time of 0.1: built with the header of that version (abi/0.1/cudapool.h), run
 * on the present library. It hands over every struct in the size it had then, with bytes behind it that must
 * stay, and calls every function of that header but the adapters, which adapters.cpp keeps to their runtimes'
 * prototypes. */

/* Its helpers would be those of the present header. */
#define CHECK_WITHOUT_LIBRARY
#include "check.h"

#include "layout.h"

#define ABI_STRUCT(type, size) ABI_CHECK(sizeof(type) == (size))
ABI_0_1_LAYOUT(ABI_STRUCT, ABI_FIELD)
ABI_0_1_CONSTANTS(ABI_CONSTANT)

#define OK(call) CHECK_EQ((int)(call), POOL_OK)

/* The legacy default stream by its own handle; what NULL means is up to the caller. */
#define STREAM ((CUstream_st *)1)

enum { GUARD = 0x5a, GUARDS = 64 };

/* A struct as large as it was in 0.1, and what is the caller's behind it. */
#define GUARDED(type, name) \
  struct {                  \
    type it;                \
    unsigned char guards[GUARDS]; \
  } name;                   \
  memset(&name, GUARD, sizeof name); \
  name.it.struct_size = sizeof name.it

#define CHECK_GUARDS(name) CHECK(guards_stand(name.guards))

static int guards_stand(const unsigned char *guards) {
  int i;
  for (i = 0; i < GUARDS; i++) {
    if (guards[i] != GUARD) {
      return 0;
    }
  }
  return 1;
}

static void versions_are_compatible(void) {
  /* The same soname may not mean another major version, nor, before 1.0, another minor one. */
  CHECK_EQ(pool_version() / 1000, POOL_VERSION_MAJOR * 1000 + POOL_VERSION_MINOR);
}

static void options_go_both_ways(void) {
  pool_t *pool = NULL;
  GUARDED(pool_options, options);
  OK(pool_options_init(&options.it));
  CHECK_GUARDS(options);
  CHECK_EQ(options.it.struct_size, sizeof(pool_options));
  CHECK_EQ(options.it.reserved, 0);
  options.it.limit_bytes = 256 * MIB;
  options.it.backend = POOL_BACKEND_MALLOC;
  options.it.order = POOL_ORDER_STREAM;
  options.it.settle_ms = 100;
  options.it.reserve_bytes = 16 * MIB;
  options.it.spill = POOL_SPILL_OFF;
  OK(pool_configure(&options.it));
  OK(pool_create(&options.it, &pool));
  CHECK(pool != NULL);
  CHECK_GUARDS(options);
  OK(pool_destroy(pool));
  /* A value that reads back only if the field is where it was. */
  options.it.spill = 77;
  CHECK_EQ(pool_configure(&options.it), POOL_ERROR_INVALID_OPTION);
}

static void requests_and_answers_keep_their_size(void) {
  void *block = NULL;
  int owned = 0;
  char text[200];
  GUARDED(pool_request, request);
  GUARDED(pool_block_info, info);
  memset(&request.it, 0, sizeof request.it);
  request.it.struct_size = sizeof request.it;
  request.it.size = 3 * MIB;
  request.it.alignment = 4 * KIB;
  request.it.device = 0;
  request.it.flags = POOL_REQUEST_STREAM_ORDERED | POOL_REQUEST_OWN_ALLOCATION;
  request.it.stream = STREAM;
  request.it.owner = "of 0.1";
  OK(pool_alloc_with(&block, &request.it));
  CHECK((uintptr_t)block % (4 * KIB) == 0);
  OK(pool_query(block, &info.it));
  CHECK_GUARDS(info);
  CHECK(info.it.base == block && info.it.requested_size == 3 * MIB && info.it.usable_size >= 3 * MIB);
  CHECK_EQ(info.it.device, 0);
  CHECK_EQ(info.it.order, POOL_ORDER_STREAM);
  CHECK(info.it.stream == STREAM);
  CHECK(info.it.pool == NULL && strcmp(info.it.owner, "of 0.1") == 0);
  OK(pool_owns(block, &owned));
  CHECK_EQ(owned, 1);
  OK(pool_use_on_stream(block, STREAM));
  OK(pool_free_async(block, STREAM));
  CHECK_EQ(pool_free(block), POOL_ERROR_DOUBLE_FREE);
  CHECK_EQ(pool_last_status(), POOL_ERROR_DOUBLE_FREE);
  CHECK(pool_last_error(text, sizeof text) > 0);
  CHECK(strcmp(pool_status_name(POOL_ERROR_DOUBLE_FREE), "POOL_ERROR_DOUBLE_FREE") == 0);
  CHECK(strlen(pool_status_message(POOL_ERROR_DOUBLE_FREE)) > 0);
}

static size_t gives_nothing(void *user, int device, size_t wanted) {
  *(int *)user += device == 0 && wanted > 0;
  return 0;
}

static void running_out_is_explained(void) {
  void *block = NULL, *held = NULL;
  int called = 0;
  uint64_t id = 0, rung;
  GUARDED(pool_oom_info, info);
  GUARDED(pool_stats, stats);
  OK(pool_alloc(&held, 8 * MIB));
  OK(pool_add_reclaim_callback(gives_nothing, &called, 0, &id));
  CHECK_EQ(pool_alloc_async(&block, 512 * MIB, NULL), POOL_ERROR_OUT_OF_MEMORY);
  OK(pool_remove_reclaim_callback(id));
  CHECK(called > 0);
  OK(pool_get_oom_info(&info.it));
  CHECK_GUARDS(info);
  CHECK_EQ(info.it.requested_bytes, 512 * MIB);
  CHECK_EQ(info.it.limit_bytes, 256 * MIB);
  CHECK_EQ(info.it.device, 0);
  /* No rung and no advice that 0.1 does not know. */
  CHECK(info.it.advice >= POOL_ADVICE_NONE && info.it.advice <= POOL_ADVICE_WAIT);
  rung = info.it.rungs_tried >> POOL_OOM_RUNGS;
  CHECK_EQ(rung, 0);
  OK(pool_get_stats(NULL, 0, &stats.it));
  CHECK_GUARDS(stats);
  CHECK_EQ(stats.it.reserved_bytes, stats.it.live_bytes + stats.it.cached_bytes + stats.it.pending_bytes +
                                        stats.it.overhead_bytes);
  CHECK(stats.it.live_bytes >= 8 * MIB && stats.it.live_blocks == 1);
  CHECK_EQ(stats.it.oom_count, 1);
  CHECK(stats.it.spilled_bytes == 0 && stats.it.spill_count == 0 && stats.it.oom_wait_count == 0);
  OK(pool_free(held));
}

static void memory_goes_back(void) {
  size_t released = 0;
  GUARDED(pool_stats, stats);
  OK(pool_reclaim(0, 1, &released));
  OK(pool_trim(NULL, 0, 0, &released));
  OK(pool_get_stats(NULL, 0, &stats.it));
  CHECK_EQ(stats.it.reserved_bytes, 0);
  CHECK(stats.it.driver_alloc_calls > 0 && stats.it.driver_alloc_calls == stats.it.driver_free_calls);
}

int main(void) {
  GUARDED(pool_stats, stats);
  int status = pool_get_stats(NULL, 0, &stats.it);
  if (status == POOL_ERROR_NO_DRIVER || status == POOL_ERROR_NO_DEVICE) {
    printf("skipped: no device: %s\n", pool_status_name(status));
    return EXIT_SKIPPED;
  }
  RUN(versions_are_compatible);
  RUN(options_go_both_ways);
  RUN(requests_and_answers_keep_their_size);
  RUN(running_out_is_explained);
  RUN(memory_goes_back);
  return check_result();
}
