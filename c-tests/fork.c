/* fork.c: processes that fork. CUDA does not work in a child of a process that used it, and the child must
 * learn that from a status, whatever the parent's other threads were doing; everything else about fork goes
 * on working. */

#define CHECK_HOST_TIME /* its threads race */
#include "check.h"
#include "driver.h"

static int use_the_library(void) {
  void *block = NULL;
  driver_start(0);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, MIB));
  fill(block, MIB, 0x99, NULL);
  CHECK(holds(block, MIB, 0x99));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}

static void child_of_a_process_without_cuda(void) {
  CHECK_EQ(in_child(use_the_library), 0);
}

static char *parents_block;

/* Each of these is the child's first call of the library once. */
enum { FIRST_ALLOC, FIRST_ASYNC, FIRST_FREE, FIRST_STATS, FIRST_TRIM, FIRST_CALLS };
static int first_call;

static int first_call_says_forked(void) {
  pool_stats stats;
  int status = POOL_OK;
  void *out = NULL;
  stats.struct_size = sizeof stats;
  switch (first_call) {
    case FIRST_ALLOC: status = pool_alloc(&out, 100); break;
    case FIRST_ASYNC: status = pool_alloc_async(&out, 100, NULL); break;
    case FIRST_FREE: status = pool_free(&stats); break;
    case FIRST_STATS: status = pool_get_stats(NULL, POOL_DEVICE_CURRENT, &stats); break;
    case FIRST_TRIM: status = pool_trim(NULL, POOL_DEVICE_CURRENT, 0, NULL); break;
  }
  CHECK_STATUS(POOL_ERROR_FORKED, status);
  return check_result();
}

/* The application has initialised the driver itself, and nobody has used the library yet. */
static void child_of_a_process_that_never_called_the_library(void) {
  for (first_call = 0; first_call < FIRST_CALLS; first_call++) {
    CHECK_EQ(in_child(first_call_says_forked), 0);
  }
}

static int every_function_says_forked(void) {
  pool_request request = request_of(100);
  pool_block_info info;
  int owned = 7;
  pool_stats stats;
  pool_options options;
  char why[200] = "";
  size_t released = 1;
  int status;
  void *out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_alloc(&out, 100));
  CHECK(out == NULL);
  CHECK(pool_last_error(why, sizeof why) > 0 && strlen(why) > 0);
  out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_alloc_async(&out, 100, NULL));
  CHECK(out == NULL);
  out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_alloc_with(&out, &request));
  CHECK(out == NULL);
  CHECK_STATUS(POOL_ERROR_FORKED, pool_free(parents_block));
  CHECK_STATUS(POOL_ERROR_FORKED, pool_free_async(parents_block, CU_STREAM_PER_THREAD));
  CHECK_STATUS(POOL_ERROR_FORKED, pool_use_on_stream(parents_block, NULL));
  memset(&info, 0xA5, sizeof info);
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_query(parents_block, &info));
  CHECK(info.base == NULL);
  CHECK_STATUS(POOL_ERROR_FORKED, pool_owns(parents_block, &owned));
  CHECK_EQ(owned, 0);
  stats.struct_size = sizeof stats;
  CHECK_STATUS(POOL_ERROR_FORKED, pool_get_stats(NULL, 0, &stats));
  CHECK_STATUS(POOL_ERROR_FORKED, pool_trim(NULL, 0, 0, &released));
  CHECK_EQ(released, 0);
  /* Options are no matter of the device, so that either answer is right; a hang is not. */
  options = default_options();
  status = pool_configure(&options);
  CHECK(status == POOL_OK || status == POOL_ERROR_FORKED);
  CHECK(strcmp(pool_status_name(POOL_ERROR_FORKED), "POOL_ERROR_FORKED") == 0);
  CHECK_EQ(pool_version(), POOL_VERSION_MAJOR * 1000000 + POOL_VERSION_MINOR * 1000 + POOL_VERSION_PATCH);
  return check_result();
}

static int grandchild_too(void) {
  CHECK_EQ(in_child(every_function_says_forked), 0);
  return every_function_says_forked();
}

/* Nothing that an innocent child of the process does may reach the parent's memory. */
static void child_of_a_process_with_cuda(void) {
  pool_stats before, after;
  CHECK_STATUS(POOL_OK, pool_alloc((void **)&parents_block, 6 * MIB));
  fill(parents_block, 6 * MIB, 0xabcd, NULL);
  CU(CtxSynchronize());
  before = stats_of(0);
  CHECK_EQ(in_child(every_function_says_forked), 0);
  CHECK_EQ(in_child(grandchild_too), 0);
  after = stats_of(0);
  CHECK(memcmp(&before, &after, sizeof before) == 0);
  CHECK(holds(parents_block, 6 * MIB, 0xabcd));
  CHECK_STATUS(POOL_OK, pool_free(parents_block));
  CHECK_TRIMS_TO_ZERO(0);
}

static int stop;

static void *keep_busy(void *number) {
  uint64_t chance = 31 + (uint64_t)(uintptr_t)number;
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    void *block = NULL;
    size_t size = random_size(&chance, 20 * MIB);
    if (random_below(&chance, 2) == 0) {
      CHECK_STATUS(POOL_OK, pool_alloc(&block, size));
      CHECK_STATUS(POOL_OK, pool_free(block));
    } else {
      CHECK_STATUS(POOL_OK, pool_alloc_async(&block, size, CU_STREAM_PER_THREAD));
      CHECK_STATUS(POOL_OK, pool_free_async(block, CU_STREAM_PER_THREAD));
    }
    if (random_below(&chance, 100) == 0) {
      CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
    }
  }
  return NULL;
}

/* The other threads are in the middle of something, perhaps with a lock, and do not exist in the child. */
static void child_while_threads_are_busy(void) {
  struct check_thread threads[3];
  uintptr_t i;
  int try;
  CHECK_STATUS(POOL_OK, pool_alloc((void **)&parents_block, 1000));
  for (i = 0; i < 3; i++) {
    start_thread(&threads[i], keep_busy, (void *)i);
  }
  for (try = 0; try < 40; try++) {
    if (!CHECK_EQ(in_child(every_function_says_forked), 0)) {
      break;
    }
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  for (i = 0; i < 3; i++) {
    join_thread(&threads[i]);
  }
  CHECK_STATUS(POOL_OK, pool_free(parents_block));
  CHECK_TRIMS_TO_ZERO(0);
}

static int execute_this_program(void) {
  execl("/proc/self/exe", "fork", "fresh", (char *)NULL);
  return 99;
}

static void child_that_executes_a_program(void) {
  CHECK_EQ(in_child(execute_this_program), 0);
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "fresh") == 0) {
    return use_the_library();
  }
  driver_open();
  RUN(child_of_a_process_without_cuda);
  driver_start(0);
  RUN(child_of_a_process_that_never_called_the_library);
  RUN(child_of_a_process_with_cuda);
  RUN(child_while_threads_are_busy);
  RUN(child_that_executes_a_program);
  return driver_result();
}
