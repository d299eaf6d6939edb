/* scenario.h: one run through the library's functions while something goes wrong, for faults.c (the driver
 * fails) and hostoom.c (the host's memory fails). Whatever is answered: live blocks keep their contents, the
 * counters stay true, no block is lost, and after the trouble everything works and all memory goes back. */

#ifndef SCENARIO_H
#define SCENARIO_H

#include "check.h"
#include "driver.h"

enum { SCENARIO_DEVICE_MIB = 96, SCENARIO_MOST = 32 };

/* What goes wrong: the nth call of a function, or the nth allocation; with `sticky`, all from there on. */
struct trouble {
  const char *name;
  int nth, sticky, code;
};

/* A child's exit code where there is no nth call any more. */
enum { EXIT_BEYOND = 42 };

enum { SCENARIO_MOST_CALLS = 20000, SCENARIO_MOST_BROKEN = 2 };

typedef int scenario_child(const struct trouble *trouble);

/* Runs `child` with one trouble, in a process of its own, so that what it leaves behind is not another's.
 * This process must not have used the driver. Whether there was an nth call. */
static inline int scenario_once(scenario_child *child, const struct trouble *trouble, int *broken) {
  int result;
  pid_t pid = fork();
  if (pid == 0) {
    check_start_child();
    alarm(CHILD_SECONDS);
    _exit(child(trouble));
  }
  result = wait_for_exit(pid);
  if (result == EXIT_SKIPPED) {
    printf("skipped: needs the simulated driver\n");
    exit(EXIT_SKIPPED);
  }
  if (result != 0 && result != EXIT_BEYOND) {
    ++*broken;
    __atomic_add_fetch(&check_failures, 1, __ATOMIC_SEQ_CST);
    fprintf(stderr, "  ... child ended with %d: %s fails %s call %d with %d\n", result, trouble->name,
            trouble->sticky ? "from" : "in", trouble->nth, trouble->code);
  }
  return result != EXIT_BEYOND;
}

/* With CTEST_THOROUGH, the seconds that the program may take for it: each nth, and not a spread. */
static struct {
  time_t until; /* 0: not asked for */
  int kinds, cut;
} scenario_thorough;

static inline void scenario_say_cut(void) {
  if (scenario_thorough.cut > 0) {
    printf("skipped: no time was left: %d of %d kinds of trouble struck a spread of calls, not each\n",
           scenario_thorough.cut, scenario_thorough.kinds);
  }
}

static inline void scenario_set_until(void) {
  const char *seconds = getenv("CTEST_THOROUGH");
  if (seconds != NULL && scenario_thorough.until == 0) {
    scenario_thorough.until = time(NULL) + atoi(seconds);
    atexit(scenario_say_cut);
  }
}

/* Each nth, in passes that all go from the first to the last, until a share of the time is up. */
static inline void scenario_each_nth(scenario_child *child, struct trouble trouble, int *broken) {
  enum { PASSES = 32, SHARE = 32 };
  time_t now = time(NULL), end = now + (scenario_thorough.until - now) / SHARE;
  int first;
  scenario_thorough.kinds++;
  for (first = 1; first <= PASSES; first++) {
    trouble.nth = first;
    while (trouble.nth < SCENARIO_MOST_CALLS && *broken < SCENARIO_MOST_BROKEN &&
           scenario_once(child, &trouble, broken)) {
      now = time(NULL);
      if (now > end || now >= scenario_thorough.until) {
        scenario_thorough.cut++;
        return;
      }
      trouble.nth += PASSES;
    }
  }
}

/* Runs `child` with an nth, from 1 on until there is no nth call any more: a spread, all of the first
 * `density`, and then ever fewer, some `density` until twice as far; then each, where that is asked for. */
static inline void scenario_each(scenario_child *child, struct trouble trouble, int density) {
  int broken = 0;
  scenario_set_until();
  trouble.nth = 1;
  while (trouble.nth < SCENARIO_MOST_CALLS && broken < SCENARIO_MOST_BROKEN &&
         scenario_once(child, &trouble, &broken)) {
    trouble.nth += 1 + trouble.nth / density;
  }
  CHECK(broken > 0 || trouble.nth < SCENARIO_MOST_CALLS);
  if (scenario_thorough.until != 0) {
    scenario_each_nth(child, trouble, &broken);
  }
}

struct scenario {
  /* What may be answered while there is trouble: by frees, and by everything else. */
  int (*free_may)(int status);
  int (*may)(int status);
  CUstream one, two;
  /* Blocks from before the trouble. */
  void *keep[3];
  size_t keep_size[3];
  /* Blocks that the run got and could not free. */
  void *left[SCENARIO_MOST];
  int left_count;
};

/* Driver, a small device, streams. The rest of the struct is the caller's. */
static inline void scenario_start(struct scenario *run) {
  pool_options options;
  driver_start(0);
  require_sim("needs the simulated driver");
  /* Where trouble keeps memory from settling, the wait for it need not be long. */
  options = default_options();
  options.settle_ms = 30;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  sim.set_memory(0, SCENARIO_DEVICE_MIB * MIB);
  run->one = new_stream(CU_STREAM_NON_BLOCKING);
  run->two = new_stream(CU_STREAM_NON_BLOCKING);
}

static inline void scenario_keep(struct scenario *run) {
  static const size_t keep_sizes[3] = {700, 100000, 3 << 20};
  int i;
  for (i = 0; i < 3; i++) {
    run->keep_size[i] = keep_sizes[i] & ~(size_t)3;
    CHECK_STATUS(POOL_OK, pool_alloc_async(&run->keep[i], keep_sizes[i], run->one));
    fill(run->keep[i], run->keep_size[i], 0x1000u + (unsigned)i, run->one);
  }
  CU(CtxSynchronize());
  run->left_count = 0;
}

static inline void scenario_allowed(struct scenario *run, int status, const char *what) {
  if (!CHECK(run->may(status))) {
    fprintf(stderr, "  ... %s answered %s\n", what, pool_status_name(status));
  }
}

static inline void *scenario_alloc(struct scenario *run, size_t size, unsigned flags, CUstream stream) {
  pool_request request = request_of(size);
  void *block = (void *)0x5a5a;
  int status;
  request.flags = flags;
  request.stream = stream;
  request.owner = "scenario";
  status = pool_alloc_with(&block, &request);
  scenario_allowed(run, status, "pool_alloc_with");
  CHECK((status == POOL_OK) == (block != NULL));
  return block;
}

/* A free that fails leaves the block as it was: it can be freed later. */
static inline void scenario_free(struct scenario *run, void *block, int device, CUstream stream) {
  int status = device ? pool_free(block) : pool_free_async(block, stream);
  if (!CHECK(run->free_may(status))) {
    fprintf(stderr, "  ... a free answered %s\n", pool_status_name(status));
  }
  if (status != POOL_OK && run->left_count < SCENARIO_MOST) {
    run->left[run->left_count++] = block;
  }
}

/* Only calls of the library in here: the driver calls of the test must not meet the trouble. */
static inline void scenario_run(struct scenario *run) {
  static const size_t sizes[] = {300, 5000, 60000, 1500000, 5 << 20};
  enum { SIZES = sizeof sizes / sizeof sizes[0] };
  const unsigned ordered = POOL_REQUEST_STREAM_ORDERED;
  void *blocks[SIZES], *large, *own;
  pool_block_info info;
  pool_stats stats;
  int round, i;
  for (round = 0; round < 2; round++) {
    for (i = 0; i < SIZES; i++) {
      blocks[i] = scenario_alloc(run, sizes[i], i % 2 ? ordered : 0, run->one);
    }
    if (blocks[SIZES - 1] != NULL) {
      scenario_allowed(run, pool_use_on_stream(blocks[SIZES - 1], run->two), "pool_use_on_stream");
    }
    own = scenario_alloc(run, 100000, POOL_REQUEST_OWN_ALLOCATION, NULL);
    for (i = 0; i < SIZES; i++) {
      scenario_free(run, blocks[i], (i + round) % 2, i % 3 ? run->one : run->two);
    }
    for (i = SIZES - 1; i >= 0; i--) {
      blocks[i] = scenario_alloc(run, sizes[i], ordered, run->two);
    }
    scenario_free(run, own, 1, NULL);
    for (i = 0; i < SIZES; i++) {
      scenario_free(run, blocks[i], i % 2, run->two);
    }
    /* More than the pool and the device have without giving up what is idle. */
    large = scenario_alloc(run, (SCENARIO_DEVICE_MIB - 26) * MIB, round ? ordered : 0, run->one);
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    scenario_allowed(run, pool_query(run->keep[0], &info), "pool_query");
    stats.struct_size = sizeof stats;
    scenario_allowed(run, pool_get_stats(NULL, 0, &stats), "pool_get_stats");
    check_identity(&stats, __FILE__, __LINE__);
    scenario_free(run, large, round, run->one);
    scenario_allowed(run, pool_trim(NULL, 0, round ? 0 : 20 * MIB, NULL), "pool_trim");
  }
}

/* The trouble is over. */
static inline void scenario_finish(struct scenario *run) {
  void *block = NULL;
  const size_t size = 30 * MIB, part = 256 * KIB;
  int i;
  CU(CtxSynchronize());
  CHECK_STATS(0);
  for (i = 0; i < run->left_count; i++) {
    CHECK_STATUS(POOL_OK, pool_free(run->left[i]));
  }
  for (i = 0; i < 3; i++) {
    CHECK(holds(run->keep[i], run->keep_size[i], 0x1000u + (unsigned)i));
    CHECK_EQ(info_of(run->keep[i]).usable_size >= run->keep_size[i], 1);
  }
  CHECK_STATUS(POOL_OK, pool_alloc(&block, size));
  fill(block, part, 0x77, run->one);
  fill((char *)block + size - part, part, 0x78, run->one);
  CU(StreamSynchronize(run->one));
  CHECK(holds(block, part, 0x77) && holds((char *)block + size - part, part, 0x78));
  CHECK_STATUS(POOL_OK, pool_free(block));
  for (i = 0; i < 3; i++) {
    CHECK(holds(run->keep[i], run->keep_size[i], 0x1000u + (unsigned)i));
    CHECK_STATUS(POOL_OK, pool_free_async(run->keep[i], run->one));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

#endif /* SCENARIO_H */
