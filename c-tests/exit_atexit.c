/* exit_atexit.c: exit handlers that run before and after the library's own. Frees succeed and touch no
 * driver; allocations say that the process is going. Silent when all is well; the runner checks that. */

#include "check.h"
#include "driver.h"

static void *for_early, *for_late[3], *of_pool;
static pool_t *pool;

/* Registered before the library was used: runs when the library and the driver have had their turn. */
static void late(void) {
  pool_request request = request_of(100);
  uint64_t calls = calls_of("*");
  pool_t *another = (pool_t *)0x5a5a;
  void *out = (void *)0x5a5a;
  check_running = "handler after the library's";
  CHECK_STATUS(POOL_OK, pool_free(for_late[0]));
  CHECK_STATUS(POOL_OK, pool_free_async(for_late[1], NULL));
  CHECK_STATUS(POOL_OK, pool_free_async(for_late[2], CU_STREAM_PER_THREAD));
  CHECK_STATUS(POOL_OK, pool_free(NULL));
  /* Live blocks or not: nobody is there any more who would mind. */
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
  CHECK_STATUS(POOL_OK, pool_free(of_pool));
  CHECK_STATUS(POOL_OK, pool_destroy(pool));
  CHECK_STATUS(POOL_ERROR_SHUTTING_DOWN, pool_create(NULL, &another));
  CHECK(another == NULL);
  request.pool = pool;
  CHECK_STATUS(POOL_ERROR_SHUTTING_DOWN, pool_alloc_with(&out, &request));
  request.pool = NULL;
  CHECK_STATUS(POOL_ERROR_SHUTTING_DOWN, pool_alloc(&out, 100));
  CHECK(out == NULL);
  out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_SHUTTING_DOWN, pool_alloc_async(&out, 100, NULL));
  CHECK(out == NULL);
  out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_SHUTTING_DOWN, pool_alloc_with(&out, &request));
  CHECK(out == NULL);
  CHECK(strcmp(pool_status_name(POOL_ERROR_SHUTTING_DOWN), "POOL_ERROR_SHUTTING_DOWN") == 0);
  CHECK_EQ(calls_of("*") - calls, 0);
  if (check_result() != EXIT_SUCCESS) {
    _exit(EXIT_FAILURE);
  }
}

/* Registered after the first use: runs first, when the driver still works. */
static void early(void) {
  void *out = NULL;
  int status;
  check_running = "handler before the library's";
  CHECK_STATUS(POOL_OK, pool_free(for_early));
  status = pool_alloc(&out, 100);
  CHECK(status == POOL_OK || status == POOL_ERROR_SHUTTING_DOWN);
  CHECK_STATUS(POOL_OK, pool_free(out));
}

int main(void) {
  pool_request request = request_of(3 * MIB);
  int i;
  driver_open();
  atexit(late);
  CHECK_STATUS(POOL_OK, pool_alloc(&for_early, 5 * MIB));
  for (i = 0; i < 3; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&for_late[i], i == 0 ? 1000 : 5 * MIB));
  }
  CHECK_STATUS(POOL_OK, pool_create(NULL, &pool));
  request.pool = pool;
  CHECK_STATUS(POOL_OK, pool_alloc_with(&of_pool, &request));
  atexit(early);
  /* And blocks that nobody ever frees, with work in flight. */
  CHECK_STATUS(POOL_OK, pool_alloc(&for_early, MIB));
  return check_result();
}
