/* exit_threads.c: main returns while threads are still allocating, freeing, and waiting for the device. The
 * process must end with main's exit code, soon, and without a word. Tried often, as the moment differs. */

#define CHECK_HOST_TIME /* its threads race */
#include "check.h"
#include "driver.h"

enum { TRIES = 25, THREADS = 4, EXIT_CODE = 17, EXIT_BAD_STATUS = 3 };

static void expect(int status) {
  if (status != POOL_OK && status != POOL_ERROR_SHUTTING_DOWN) {
    fprintf(stderr, "a thread got %s\n", pool_status_name(status));
    _exit(EXIT_BAD_STATUS);
  }
}

static void *never_ends(void *number) {
  static const size_t sizes[] = {100, 50000, 3 << 20, 17 << 20};
  uint64_t chance = 1 + (uint64_t)(uintptr_t)number;
  for (;;) {
    size_t size = sizes[random_below(&chance, 4)];
    void *one = NULL, *two = NULL;
    expect(pool_alloc(&one, size));
    expect(pool_alloc_async(&two, size, CU_STREAM_PER_THREAD));
    expect(pool_free_async(two, CU_STREAM_PER_THREAD));
    expect(pool_free(one));
    if (random_below(&chance, 64) == 0) {
      expect(pool_trim(NULL, 0, 0, NULL));
    }
  }
  return NULL;
}

static int use_and_leave(int try) {
  void *block = NULL;
  uintptr_t i;
  driver_start(0);
  expect(pool_alloc(&block, MIB));
  for (i = 0; i < THREADS; i++) {
    pthread_t thread;
    pthread_create(&thread, NULL, never_ends, (void *)i);
  }
  sleep_ms(1 + try * 2);
  return EXIT_CODE;
}

int main(void) {
  int try;
  /* This process does not use the driver, so its children may. */
  for (try = 0; try < TRIES; try++) {
    pid_t child = fork();
    int result;
    if (child == 0) {
      check_start_child();
      alarm(CHILD_SECONDS); /* a process that hangs at exit is killed */
      exit(use_and_leave(try));
    }
    result = wait_for_exit(child);
    if (result == EXIT_SKIPPED) {
      return EXIT_SKIPPED;
    }
    if (!CHECK_EQ(result, EXIT_CODE)) {
      break;
    }
  }
  return check_result();
}
