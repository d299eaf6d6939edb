/* faults.c: every driver call that the library makes fails once, and from there on, with "out of memory" and with
 * "unknown error". Needs the simulated driver. */

#include "check.h"
#include "driver.h"
#include "scenario.h"

enum { CODE_OUT_OF_MEMORY = 2, CODE_UNKNOWN = 999 };

static int free_may(int status) {
  return status == POOL_OK || status == POOL_ERROR_DRIVER;
}

static int may(int status) {
  return status == POOL_OK || status == POOL_ERROR_OUT_OF_MEMORY || status == POOL_ERROR_DRIVER;
}

/* Names with faults of their own that last; a single failing call is covered by number, whatever its name. */
static const char *const names[] = {
    "cuCtxGetCurrent",   "cuCtxSetCurrent",  "cuCtxPushCurrent",   "cuCtxPopCurrent",    "cuCtxGetDevice",
    "cuCtxGetId",        "cuCtxSynchronize", "cuCtxRecordEvent",   "cuCtxGetApiVersion", "cuStreamGetCtx",
    "cuStreamGetId",     "cuStreamQuery",    "cuStreamWaitEvent",  "cuStreamIsCapturing", "cuStreamSynchronize",
    "cuStreamGetCaptureInfo", "cuEventCreate", "cuEventRecord",    "cuEventQuery",       "cuEventSynchronize",
    "cuEventDestroy",    "cuMemGetInfo",     "cuMemAlloc",         "cuMemFree",          "cuMemAddressReserve",
    "cuMemAddressFree",  "cuMemCreate",      "cuMemRelease",       "cuMemMap",           "cuMemUnmap",
    "cuMemSetAccess",    "cuThreadExchangeStreamCaptureMode", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxGetState", "cuDeviceGetAttribute", "cuMemGetAddressRange", "cuPointerGetAttribute",
};
enum { NAMES = sizeof names / sizeof names[0] };

static struct scenario run;

/* One run with one fault; whether all checks held. */
static void with_fault(const char *name, uint64_t nth, int sticky, int code) {
  int failures = check_failures;
  scenario_keep(&run);
  CHECK_EQ(sim.fail(name, nth, sticky, code), 0);
  scenario_run(&run);
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  scenario_finish(&run);
  if (check_failures != failures) {
    fprintf(stderr, "  ... with %s failing %s call %llu with %d\n", name, sticky ? "from" : "in",
            (unsigned long long)nth, code);
  }
}

static uint64_t calls_in_one_run(const char *name) {
  uint64_t before, after;
  scenario_keep(&run);
  before = calls_of(name);
  scenario_run(&run);
  after = calls_of(name);
  scenario_finish(&run);
  return after - before;
}

/* Some broken runs say it all. */
static int enough(void) {
  return check_failures - check_failures_before > 4 * CHECK_PRINTED;
}

static void each_call_once(void) {
  uint64_t calls = calls_in_one_run("*"), nth;
  CHECK(calls > 20);
  for (nth = 1; nth <= calls && !enough(); nth++) {
    with_fault("*", nth, 0, CODE_OUT_OF_MEMORY);
    with_fault("*", nth, 0, CODE_UNKNOWN);
  }
}

static void all_calls_from_each_on(void) {
  uint64_t calls = calls_in_one_run("*"), nth;
  for (nth = 1; nth <= calls && !enough(); nth += 1 + nth / 16) {
    with_fault("*", nth, 1, CODE_OUT_OF_MEMORY);
    with_fault("*", nth, 1, CODE_UNKNOWN);
  }
}

static void each_function_from_each_call_on(void) {
  int i;
  for (i = 0; i < NAMES; i++) {
    uint64_t calls = calls_in_one_run(names[i]), nth;
    for (nth = 1; nth <= calls && !enough(); nth += 1 + nth / 8) {
      with_fault(names[i], nth, 1, CODE_OUT_OF_MEMORY);
      with_fault(names[i], nth, 1, CODE_UNKNOWN);
    }
  }
}

/* The first use of all, in a process of its own each: it fails, and works when the driver does. */
static int first_use(uint64_t nth, int sticky, int code) {
  void *block = (void *)0x5a5a;
  int status;
  driver_open();
  sim.fail("*", nth, sticky, code);
  status = pool_alloc(&block, 5000);
  CHECK(may(status));
  CHECK((status == POOL_OK) == (block != NULL));
  if (!may(status)) {
    fprintf(stderr, "  ... the first allocation answered %s\n", pool_status_name(status));
  }
  if (calls_of("*") < nth) {
    return 42; /* beyond the last call */
  }
  sim.fail("*", 0, 0, 0);
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5000));
  CHECK(block != NULL);
  CHECK_STATUS(POOL_OK, pool_free(block));
  driver_start(0);
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}

static void first_use_may_fail(void) {
  static const int codes[] = {CODE_OUT_OF_MEMORY, CODE_UNKNOWN};
  int kind;
  for (kind = 0; kind < 4; kind++) {
    uint64_t nth;
    for (nth = 1; nth < 300 && !enough(); nth++) {
      pid_t child = fork();
      int result;
      if (child == 0) {
        check_start_child();
        _exit(first_use(nth, kind % 2, codes[kind / 2]));
      }
      result = wait_for_exit(child);
      if (result == 42) {
        break;
      }
      if (result == EXIT_SKIPPED) {
        return;
      }
      if (!CHECK_EQ(result, 0)) {
        fprintf(stderr, "  ... with the first use failing %s call %d with %d\n", kind % 2 ? "from" : "in", (int)nth,
                codes[kind / 2]);
      }
    }
    CHECK(nth > 5 && nth < 300);
  }
}

int main(void) {
  /* Before this process uses the driver: its children must be able to. */
  RUN(first_use_may_fail);
  driver_start(0);
  if (!needs_sim()) {
    return check_result();
  }
  sim.set_memory(0, SCENARIO_DEVICE_MIB * MIB);
  run.free_may = free_may;
  run.may = may;
  run.one = new_stream(STREAM_NON_BLOCKING);
  run.two = new_stream(STREAM_NON_BLOCKING);
  RUN(each_call_once);
  RUN(all_calls_from_each_on);
  RUN(each_function_from_each_call_on);
  CU(StreamDestroy(run.one));
  CU(StreamDestroy(run.two));
  return driver_result();
}
