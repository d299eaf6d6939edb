/* check.h: what every C test shares: checks that count instead of stopping, the statuses' names in what they
 * print, helpers around `pool_get_stats`. Compile with _GNU_SOURCE. With CHECK_WITHOUT_LIBRARY nothing in it
 * calls the library. */

#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cudapool.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

/* The runner counts a program that exits with this as skipped. */
#define EXIT_SKIPPED 77

static int check_failures;
static const char *check_running = "main";
static int check_failures_before;

/* At most this many failures of one test are printed; the rest says nothing new. */
enum { CHECK_PRINTED = 12 };

static inline int check_fail(const char *file, int line) {
  int count = __atomic_add_fetch(&check_failures, 1, __ATOMIC_SEQ_CST) - check_failures_before;
  if (count <= CHECK_PRINTED) {
    fprintf(stderr, "%s:%d: %s: ", file, line, check_running);
  }
  return count <= CHECK_PRINTED;
}

static inline int check_that(int good, const char *text, const char *file, int line) {
  if (!good && check_fail(file, line)) {
    fprintf(stderr, "not so: %s\n", text);
  }
  return good;
}

static inline int check_equal(uint64_t got, uint64_t want, const char *text, const char *file, int line) {
  if (got != want && check_fail(file, line)) {
    fprintf(stderr, "%s: %llu (0x%llx)\n", text, (unsigned long long)got, (unsigned long long)got);
  }
  return got == want;
}

#ifndef CHECK_WITHOUT_LIBRARY
static inline int check_status(int got, int want, const char *text, const char *file, int line) {
  if (got != want && check_fail(file, line)) {
    char why[400] = "";
    pool_last_error(why, sizeof why);
    fprintf(stderr, "%s answered %s, not %s (last error: %s)\n", text, pool_status_name(got),
            pool_status_name(want), why);
  }
  return got == want;
}
#endif

/* Each is an expression: nonzero where the check held. */
#define CHECK(condition) check_that((condition) ? 1 : 0, #condition, __FILE__, __LINE__)
#define CHECK_EQ(got, want) \
  check_equal((uint64_t)(got), (uint64_t)(want), #got " is not " #want " but", __FILE__, __LINE__)
#define CHECK_STATUS(want, call) check_status((int)(call), (want), #call, __FILE__, __LINE__)

/* Runs one test function, its name in front of what fails in it. */
#define RUN(test) (check_running = #test, check_failures_before = check_failures, test())

static inline void check_skip(const char *why) {
  printf("skipped: %s: %s\n", check_running, why);
}

/* The exit code of a program whose checks are done. */
static inline int check_result(void) {
  if (check_failures > 0) {
    fprintf(stderr, "%d checks failed\n", check_failures);
  }
  return check_failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- time and threads ---- */

/* The clock of a driver with virtual time, which driver.h fills in; all NULL: the host's. */
static struct {
  uint64_t (*now_ns)(void);
  void (*sleep_ns)(uint64_t ns);
  void (*thread_expect)(void);
  void (*thread_enter)(void);
  void (*wait)(const uint32_t *word, uint32_t seen, uint64_t until);
  void (*wake)(const uint32_t *word);
} check_clock;

static inline int time_is_virtual(void) {
  return check_clock.wait != NULL;
}

static inline double now_ms(void) {
  struct timespec time;
  if (time_is_virtual()) {
    return (double)check_clock.now_ns() / 1e6;
  }
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static inline void sleep_ms(int milliseconds) {
  struct timespec time;
  if (time_is_virtual()) {
    check_clock.sleep_ns((uint64_t)milliseconds * 1000000);
    return;
  }
  time.tv_sec = milliseconds / 1000;
  time.tv_nsec = (long)(milliseconds % 1000) * 1000000;
  while (nanosleep(&time, &time) != 0 && errno == EINTR) {
  }
}

/* Lets a little time pass, if only those who wait make it pass otherwise: for loops that never wait. */
static inline void let_time_pass(void) {
  if (time_is_virtual()) {
    check_clock.sleep_ns(1000);
  }
}

/* Where time is virtual it is exact, but for what polling takes; elsewhere the machine may be slow. */
static inline int check_took(double took, double want_ms, const char *file, int line) {
  double most = time_is_virtual() ? want_ms + 2 : want_ms * 1.5 + 600;
  int good = took >= want_ms - 2 && took <= most;
  if (!good && check_fail(file, line)) {
    fprintf(stderr, "it took %.3f ms, not %.3f ms\n", took, want_ms);
  }
  return good;
}

/* That something took so long. */
#define CHECK_TOOK(took_ms, want_ms) check_took((took_ms), (want_ms), __FILE__, __LINE__)

/* A count that threads raise, and wait for to be raised. */
static inline void raise_count(uint32_t *count) {
  __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  if (time_is_virtual()) {
    check_clock.wake(count);
  }
}

static inline void await_count(const uint32_t *count, uint32_t least) {
  uint32_t seen;
  while ((seen = __atomic_load_n(count, __ATOMIC_SEQ_CST)) < least) {
    if (time_is_virtual()) {
      check_clock.wait(count, seen, UINT64_MAX);
    } else {
      sleep_ms(1);
    }
  }
}

/* A thread that takes part in the clock from its start on, so that no time passes before it runs. */
struct check_thread {
  pthread_t handle;
  void *(*run)(void *argument);
  void *argument;
  void *result;
  uint32_t is_done;
};

static inline void *check_thread_main(void *data) {
  struct check_thread *thread = (struct check_thread *)data;
  if (time_is_virtual()) {
    check_clock.thread_enter();
  }
  thread->result = thread->run(thread->argument);
  raise_count(&thread->is_done);
  return NULL;
}

static inline void start_thread(struct check_thread *thread, void *(*run)(void *), void *argument) {
  memset(thread, 0, sizeof *thread);
  thread->run = run;
  thread->argument = argument;
  if (time_is_virtual()) {
    check_clock.thread_expect();
  }
  CHECK_EQ(pthread_create(&thread->handle, NULL, check_thread_main, thread), 0);
}

/* What its function answered. The wait is one in the clock: pthread_join would hold time up. */
static inline void *join_thread(struct check_thread *thread) {
  await_count(&thread->is_done, 1);
  CHECK_EQ(pthread_join(thread->handle, NULL), 0);
  return thread->result;
}

/* ---- chance ---- */

/* xorshift64*: the same numbers everywhere, a state per thread. The seed is not 0. */
static inline uint64_t random_next(uint64_t *state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * UINT64_C(2685821657736338717);
}

static inline uint64_t random_below(uint64_t *state, uint64_t bound) {
  return (random_next(state) >> 16) % bound;
}

/* Mostly small sizes, some large ones, as programs have them: log-uniform between 1 and `most`. */
static inline size_t random_size(uint64_t *state, size_t most) {
  size_t top = most >> random_below(state, 16);
  return (size_t)random_below(state, top > 1 ? top : 1) + 1;
}

/* ---- processes ---- */

/* In a child, before its own checks: what failed in the parent is not its business. */
static inline void check_start_child(void) {
  check_failures = 0;
  check_failures_before = 0;
}

/* How a child ended: its exit code, or 1000 plus the signal that killed it. */
static inline int wait_for_exit(pid_t child) {
  int how = 0;
  while (waitpid(child, &how, 0) < 0) {
    if (errno != EINTR) {
      return -1;
    }
  }
  return WIFEXITED(how) ? WEXITSTATUS(how) : 1000 + WTERMSIG(how);
}

/* Only a hang takes so long. */
enum { CHILD_SECONDS = 60 };

/* Runs in a child of this process; a check that fails there, a crash and a hang all show in its exit code. */
static inline int in_child(int (*run)(void)) {
  pid_t child = fork();
  if (child == 0) {
    check_start_child();
    alarm(CHILD_SECONDS);
    exit(run()); /* with all exit handlers */
  }
  return wait_for_exit(child);
}

#ifndef CHECK_WITHOUT_LIBRARY

/* ---- counters ---- */

/* Blocks that went with their context and were never freed. A test that loses some cannot count them. */
static int check_blocks_were_lost;

static inline pool_stats stats_of(int device) {
  pool_stats stats;
  memset(&stats, 0xA5, sizeof stats);
  stats.struct_size = sizeof stats;
  CHECK_STATUS(POOL_OK, pool_get_stats(NULL, device, &stats));
  return stats;
}

/* What holds between the counters at every moment. */
static inline int check_identity(const pool_stats *stats, const char *file, int line) {
  uint64_t parts = stats->live_bytes + stats->cached_bytes + stats->pending_bytes + stats->overhead_bytes;
  int good = check_equal(stats->reserved_bytes, parts,
                         "reserved is not live + cached + pending + overhead but", file, line);
  good &= check_that(stats->requested_bytes <= stats->live_bytes, "requested <= live", file, line);
  good &= check_that(stats->live_bytes <= stats->live_bytes_peak, "live <= its peak", file, line);
  good &= check_that(stats->reserved_bytes <= stats->reserved_bytes_peak, "reserved <= its peak", file, line);
  if (!check_blocks_were_lost) {
    good &= check_equal(stats->live_blocks, stats->alloc_count - stats->free_count,
                        "live blocks are not allocations - frees but", file, line);
  }
  return good;
}

static inline pool_request request_of(size_t size) {
  pool_request request;
  memset(&request, 0, sizeof request);
  request.struct_size = sizeof request;
  request.size = size;
  request.device = POOL_DEVICE_CURRENT;
  return request;
}

static inline pool_block_info info_of(const void *ptr) {
  pool_block_info info;
  memset(&info, 0xA5, sizeof info);
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_OK, pool_query(ptr, &info));
  return info;
}

/* The options in force for a new process, the environment's included. */
static inline pool_options default_options(void) {
  pool_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  CHECK_STATUS(POOL_OK, pool_options_init(&options));
  return options;
}

#endif /* CHECK_WITHOUT_LIBRARY */

#endif /* CHECK_H */
