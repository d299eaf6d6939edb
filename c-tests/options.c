/* options.c: the one table of options, from both sides: CUDAPOOL_CONF, read at first use and so tried in
 * processes of their own, and pool_configure. Unknown keys and bad values are errors with a reason, never
 * ignored. */

#include "check.h"
#include "driver.h"

#include <fcntl.h>

/* Runs this program again, as `what` for that row of a table; `lines_on_stderr` counts what it printed. */
static int child(const char *conf, const char *what, int row, int *lines_on_stderr) {
  int pipe_ends[2], result;
  pid_t pid;
  char number[16];
  sprintf(number, "%d", row);
  CHECK_EQ(pipe(pipe_ends), 0);
  pid = fork();
  if (pid == 0) {
    alarm(CHILD_SECONDS);
    if (conf != NULL) {
      setenv("CUDAPOOL_CONF", conf, 1);
    } else {
      unsetenv("CUDAPOOL_CONF");
    }
    if (lines_on_stderr != NULL) {
      dup2(pipe_ends[1], STDERR_FILENO);
    }
    execl("/proc/self/exe", "options", what, number, (char *)NULL);
    _exit(98);
  }
  close(pipe_ends[1]);
  if (lines_on_stderr != NULL) {
    char text[4096];
    ssize_t got;
    *lines_on_stderr = 0;
    while ((got = read(pipe_ends[0], text, sizeof text)) > 0) {
      ssize_t i;
      for (i = 0; i < got; i++) {
        *lines_on_stderr += text[i] == '\n';
      }
    }
  }
  close(pipe_ends[0]);
  result = wait_for_exit(pid);
  return result;
}

/* ---- good values ---- */

enum field { NONE, LIMIT_BYTES, LIMIT_PERCENT, MAX_IDLE, BACKEND, ORDER, SETTLE, LOG };

static const struct {
  const char *conf;
  enum field field;
  uint64_t value;
} good[] = {
    {NULL, NONE, 0},
    {"", NONE, 0},
    {"limit:512MiB", LIMIT_BYTES, UINT64_C(512) << 20},
    {"limit:4GiB", LIMIT_BYTES, UINT64_C(4) << 30},
    {"limit:100000000", LIMIT_BYTES, 100000000},
    {"limit:80%", LIMIT_PERCENT, 80},
    {"limit:100%", LIMIT_PERCENT, 100},
    {"max_idle:25%", MAX_IDLE, 25},
    {"max_idle:0%", MAX_IDLE, 0},
    {"backend:auto", BACKEND, POOL_BACKEND_AUTO},
    {"backend:vmm", BACKEND, POOL_BACKEND_VMM},
    {"backend:malloc", BACKEND, POOL_BACKEND_MALLOC},
    {"order:device", ORDER, POOL_ORDER_DEVICE},
    {"order:stream:legacy", ORDER, POOL_ORDER_STREAM},
    {"settle_ms:0", SETTLE, 0},
    {"settle_ms:1234", SETTLE, 1234},
    {"log:off", LOG, POOL_LOG_OFF},
    {"log:error", LOG, POOL_LOG_ERROR},
    {"log:warn", LOG, POOL_LOG_WARN},
    {"log:info", LOG, POOL_LOG_INFO},
    {"log:debug", LOG, POOL_LOG_DEBUG},
    {"limit:1GiB,backend:malloc,log:off", LIMIT_BYTES, UINT64_C(1) << 30},
    {"log:off,order:stream:legacy,backend:malloc", ORDER, POOL_ORDER_STREAM},
    {"order:stream:legacy,settle_ms:7", SETTLE, 7},
};
enum { GOOD = sizeof good / sizeof good[0] };

static uint64_t field_of(const pool_options *options, enum field field) {
  switch (field) {
    case LIMIT_BYTES: return options->limit_bytes;
    case LIMIT_PERCENT: return options->limit_percent;
    case MAX_IDLE: return options->max_idle_percent;
    case BACKEND: return (uint64_t)options->backend;
    case ORDER: return (uint64_t)options->order;
    case SETTLE: return options->settle_ms;
    case LOG: return (uint64_t)options->log;
    case NONE: break;
  }
  return 0;
}

static int good_child(int row) {
  pool_options options = default_options();
  void *block = NULL;
  CHECK_EQ(options.struct_size, sizeof options);
  CHECK_EQ(field_of(&options, good[row].field), good[row].value);
  driver_open();
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5000));
  CHECK_EQ(info_of(block).order, options.order);
  if (on_sim() && options.backend == POOL_BACKEND_MALLOC) {
    CHECK_EQ(calls_of("cuMemCreate"), 0);
  }
  if (on_sim() && options.backend == POOL_BACKEND_VMM) {
    CHECK_EQ(calls_of("cuMemAlloc"), 0);
  }
  CHECK_STATUS(POOL_OK, pool_free(block));
  /* What is in force can be put in force again. */
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  return check_result();
}

static void good_values_are_taken(void) {
  int row;
  for (row = 0; row < GOOD; row++) {
    if (!CHECK_EQ(child(good[row].conf, "good", row, NULL), 0)) {
      fprintf(stderr, "  ... with CUDAPOOL_CONF=%s\n", good[row].conf == NULL ? "(unset)" : good[row].conf);
    }
  }
}

static void log_goes_to_stderr_when_asked(void) {
  int row;
  for (row = 0; row < GOOD; row++) {
    int lines = -1;
    if (good[row].field == LOG) {
      CHECK_EQ(child(good[row].conf, "good", row, &lines), 0);
      CHECK(good[row].value == POOL_LOG_OFF ? lines == 0 : good[row].value == POOL_LOG_DEBUG ? lines > 0 : 1);
    }
  }
}

/* ---- bad values ---- */

static const struct {
  const char *conf;
  const char *named; /* what the reason must show */
} bad[] = {
    {"limit", "limit"},
    {"limit:", "limit"},
    {"limit:abc", "abc"},
    {"limit:-1", "-1"},
    {"limit:512XB", "512XB"},
    {"limit:101%", "101%"},
    {"limit:-5%", "-5%"},
    {"limit:%", "%"},
    {"limit:99999999999999999999999", "99999999999999999999999"},
    {"limit:99999999999GiB", "99999999999GiB"},
    {"max_idle:x", "x"},
    {"max_idle:-1%", "-1%"},
    {"max_idle:99999999999%", "99999999999%"},
    {"backend:cuda", "cuda"},
    {"backend:", "backend"},
    {"backend:7", "7"},
    {"order:none", "none"},
    {"order:stream:purple", "purple"},
    {"settle_ms:soon", "soon"},
    {"settle_ms:-5", "-5"},
    {"settle_ms:99999999999999", "99999999999999"},
    {"log:loud", "loud"},
    {"colour:blue", "colour"},
    {"limit:1GiB,bogus:1", "bogus"},
    {"bogus:1,limit:1GiB", "bogus"},
    {"limit:1GiB;log:off", "1GiB;log"},
    {":", ":"},
    {"limit=1GiB", "limit=1GiB"},
    {"backend:malloc,log:loud", "loud"},
};
enum { BAD = sizeof bad / sizeof bad[0] };

static int bad_child(int row) {
  pool_options options;
  pool_request request = request_of(100);
  char why[600] = "";
  void *out = (void *)0x5a5a;
  memset(&options, 0xA5, sizeof options);
  options.struct_size = sizeof options;
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_options_init(&options));
  /* The defaults, not half of what was asked. */
  CHECK(options.limit_bytes == 0 && options.limit_percent == 0 && options.backend == POOL_BACKEND_AUTO);
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_alloc(&out, 100));
  CHECK(out == NULL);
  pool_last_error(why, sizeof why);
  if (!CHECK(strstr(why, bad[row].named) != NULL && strstr(why, "CUDAPOOL_CONF") != NULL)) {
    fprintf(stderr, "  the last error: %s\n", why);
  }
  out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_alloc_async(&out, 100, NULL));
  CHECK(out == NULL);
  out = (void *)0x5a5a;
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_alloc_with(&out, &request));
  CHECK(out == NULL);
  CHECK_STATUS(POOL_OK, pool_free(NULL));
  return check_result();
}

static void bad_values_are_refused(void) {
  int row;
  for (row = 0; row < BAD; row++) {
    int lines = -1;
    if (!CHECK_EQ(child(bad[row].conf, "bad", row, NULL), 0)) {
      fprintf(stderr, "  ... with CUDAPOOL_CONF=%s\n", bad[row].conf);
    }
    /* Said by the status, not printed. */
    if (child(bad[row].conf, "bad", row, &lines) == 0) {
      CHECK_EQ(lines, 0);
    }
  }
}

/* ---- pool_configure ---- */

static void refuse(const pool_options *options) {
  char why[600] = "";
  CHECK_STATUS(POOL_ERROR_INVALID_OPTION, pool_configure(options));
  CHECK(pool_last_error(why, sizeof why) > 0);
}

static void all_or_nothing(void) {
  pool_options defaults = default_options(), options;
  void *block = NULL;
  int i;
  for (i = 0; i < 8; i++) {
    options = defaults;
    options.limit_bytes = 4 * MIB; /* would be seen below */
    switch (i) {
      case 0: options.backend = 3; break;
      case 1: options.backend = -1; break;
      case 2: options.order = 2; break;
      case 3: options.order = -1; break;
      case 4: options.log = 5; break;
      case 5: options.log = -1; break;
      case 6: options.limit_percent = 101; break;
      default: options.limit_percent = UINT32_MAX; break;
    }
    refuse(&options);
    CHECK_STATUS(POOL_OK, pool_alloc(&block, 100 * MIB));
    CHECK_STATUS(POOL_OK, pool_free(block));
  }
  CHECK_TRIMS_TO_ZERO(0);
}

static void struct_sizes(void) {
  struct {
    pool_options options;
    unsigned char later[32];
  } longer;
  pool_options options;
  size_t size;
  for (size = 0; size < sizeof(size_t); size++) {
    options = default_options();
    options.struct_size = size;
    CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_configure(&options));
  }
  memset(&longer, 0, sizeof longer);
  longer.options = default_options();
  longer.options.struct_size = sizeof longer;
  CHECK_STATUS(POOL_OK, pool_configure(&longer.options));
  longer.later[0] = 1;
  CHECK_STATUS(POOL_ERROR_INVALID_ARGUMENT, pool_configure(&longer.options));
}

static void limit_is_kept(void) {
  pool_options defaults = default_options(), options = defaults;
  void *block = NULL, *more = (void *)0x5a5a;
  options.limit_bytes = 64 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 50 * MIB));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&more, 50 * MIB));
  CHECK(more == NULL);
  /* A limit below what is held takes nothing away, and refuses more. */
  options.limit_bytes = 8 * MIB;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&more, 9 * MIB));
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_STATUS(POOL_OK, pool_alloc(&more, 50 * MIB));
  CHECK_STATUS(POOL_OK, pool_free(more));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);

  /* In percent of the device; the smaller of both counts. */
  if (needs_sim()) {
    options = defaults;
    options.limit_percent = 1; /* 82 MiB of 8 GiB, less a little */
    options.limit_bytes = 4 * GIB;
    CHECK_STATUS(POOL_OK, pool_configure(&options));
    CHECK_STATUS(POOL_OK, pool_alloc(&block, 70 * MIB));
    CHECK_STATUS(POOL_ERROR_OUT_OF_MEMORY, pool_alloc(&more, 20 * MIB));
    CHECK_STATUS(POOL_OK, pool_free(block));
    CHECK_STATUS(POOL_OK, pool_configure(&defaults));
    CHECK_TRIMS_TO_ZERO(0);
  }
}

static void plain_calls_can_mean_a_stream(void) {
  pool_options defaults = default_options(), options = defaults;
  void *block = NULL, *again = NULL;
  options.order = POOL_ORDER_STREAM;
  CHECK_STATUS(POOL_OK, pool_configure(&options));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 3 * MIB));
  CHECK_EQ(info_of(block).order, POOL_ORDER_STREAM);
  busy(CU_STREAM_LEGACY, 50);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_STATUS(POOL_OK, pool_alloc(&again, 3 * MIB));
  CHECK(again == block);
  CHECK_STATUS(POOL_OK, pool_free(again));
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_TRIMS_TO_ZERO(0);
}

static void backend_is_fixed_once_memory_is_held(void) {
  pool_options defaults = default_options(), options = defaults;
  void *block = NULL;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 100));
  options.backend = defaults.backend == POOL_BACKEND_MALLOC ? POOL_BACKEND_VMM : POOL_BACKEND_MALLOC;
  options.limit_bytes = MIB;
  refuse(&options);
  CHECK_STATUS(POOL_OK, pool_configure(&defaults));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* ---- devices without virtual memory management ---- */

static int without_vmm_child(int wants_vmm) {
  void *block = (void *)0x5a5a;
  driver_start(0);
  if (wants_vmm) {
    CHECK_STATUS(POOL_ERROR_NOT_SUPPORTED, pool_alloc(&block, 100));
    CHECK(block == NULL);
  } else {
    CHECK_STATUS(POOL_OK, pool_alloc(&block, 100));
    CHECK_STATUS(POOL_OK, pool_free(block));
    CHECK_EQ(calls_of("cuMemCreate"), 0);
    CHECK_TRIMS_TO_ZERO(0);
  }
  return driver_result();
}

static void devices_without_virtual_memory(void) {
  if (!needs_sim()) {
    return;
  }
  setenv("CUDASIM_NO_VMM", "1", 1);
  CHECK_EQ(child("backend:auto", "novmm", 0, NULL), 0);
  CHECK_EQ(child(NULL, "novmm", 0, NULL), 0);
  CHECK_EQ(child("backend:malloc", "novmm", 0, NULL), 0);
  CHECK_EQ(child("backend:vmm", "novmm", 1, NULL), 0);
  unsetenv("CUDASIM_NO_VMM");
}

int main(int argc, char **argv) {
  if (argc == 3) {
    int row = atoi(argv[2]);
    check_running = argv[1];
    return strcmp(argv[1], "good") == 0  ? good_child(row)
           : strcmp(argv[1], "bad") == 0 ? bad_child(row)
                                         : without_vmm_child(row);
  }
  unsetenv("CUDAPOOL_CONF");
  driver_start(0);
  RUN(good_values_are_taken);
  RUN(log_goes_to_stderr_when_asked);
  RUN(bad_values_are_refused);
  RUN(all_or_nothing);
  RUN(struct_sizes);
  RUN(limit_is_kept);
  RUN(plain_calls_can_mean_a_stream);
  RUN(backend_is_fixed_once_memory_is_held);
  RUN(devices_without_virtual_memory);
  return driver_result();
}
