/* faults.c: every driver call that the library makes fails once, and from there on, with "out of memory" and
 * with "unknown error". Needs the simulated driver. */

#include "check.h"
#include "driver.h"
#include "scenario_ladder.h"

enum { CODE_OUT_OF_MEMORY = 2, CODE_UNKNOWN = 999 };

static int free_may(int status) {
  return status == POOL_OK || status == POOL_ERROR_DRIVER;
}

static int may(int status) {
  return status == POOL_OK || status == POOL_ERROR_OUT_OF_MEMORY || status == POOL_ERROR_DRIVER;
}

/* The functions that fail: those that a run of the scenario calls, and more that it may call one day. */
static const char *const names[] = {
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetDevice",
    "cuCtxGetId", "cuCtxSynchronize", "cuCtxRecordEvent", "cuCtxGetApiVersion", "cuStreamGetCtx",
    "cuStreamGetId", "cuStreamQuery", "cuStreamWaitEvent", "cuStreamIsCapturing", "cuStreamSynchronize",
    "cuStreamGetCaptureInfo", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize",
    "cuEventDestroy", "cuMemGetInfo", "cuMemAlloc", "cuMemFree", "cuMemAddressReserve", "cuMemAddressFree",
    "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
    "cuThreadExchangeStreamCaptureMode", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxGetState",
    "cuDeviceGetAttribute", "cuMemGetAddressRange", "cuPointerGetAttribute", "cuGetErrorName",
};
enum { NAMES = sizeof names / sizeof names[0] };

static void start(struct scenario *run) {
  run->free_may = free_may;
  run->may = may;
  scenario_start(run);
  scenario_keep(run);
}

/* A pool in use meets the fault. */
static int later_use(const struct trouble *fault) {
  struct scenario run;
  uint64_t calls;
  start(&run);
  CHECK_EQ(sim.fail(fault->name, (uint64_t)fault->nth, fault->sticky, fault->code), 0);
  calls = calls_of(fault->name);
  scenario_run(&run);
  calls = calls_of(fault->name) - calls;
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  scenario_finish(&run);
  return check_failures == 0 && calls < (uint64_t)fault->nth ? EXIT_BEYOND : driver_result();
}

/* The ladder meets it, with all that it has. */
static int in_the_ladder(const struct trouble *fault) {
  struct ladder run;
  uint64_t calls;
  run.base.free_may = free_may;
  run.base.may = may;
  ladder_start(&run);
  CHECK_EQ(sim.fail(fault->name, (uint64_t)fault->nth, fault->sticky, fault->code), 0);
  calls = calls_of(fault->name);
  ladder_run(&run);
  calls = calls_of(fault->name) - calls;
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  ladder_finish(&run);
  return check_failures == 0 && calls < (uint64_t)fault->nth ? EXIT_BEYOND : driver_result();
}

/* The very first call meets it; the next one works when the driver does. */
static int first_use(const struct trouble *fault) {
  void *block = (void *)0x5a5a;
  uint64_t calls;
  int status;
  driver_open();
  if (!on_sim()) {
    return EXIT_SKIPPED;
  }
  CHECK_EQ(sim.fail(fault->name, (uint64_t)fault->nth, fault->sticky, fault->code), 0);
  status = pool_alloc(&block, 5000);
  calls = calls_of(fault->name);
  CHECK_EQ(sim.fail("*", 0, 0, 0), 0);
  if (!CHECK(may(status))) {
    fprintf(stderr, "  the first allocation answered %s\n", pool_status_name(status));
  }
  CHECK((status == POOL_OK) == (block != NULL));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5000));
  CHECK(block != NULL);
  CHECK_STATUS(POOL_OK, pool_free(block));
  driver_start(0);
  CHECK_TRIMS_TO_ZERO(0);
  return check_failures == 0 && calls < (uint64_t)fault->nth ? EXIT_BEYOND : driver_result();
}

static void with_both_codes(int (*child)(const struct trouble *), const char *name, int sticky, int density) {
  struct trouble fault;
  fault.name = name;
  fault.nth = 0;
  fault.sticky = sticky;
  fault.code = CODE_OUT_OF_MEMORY;
  scenario_each(child, fault, density);
  fault.code = CODE_UNKNOWN;
  scenario_each(child, fault, density);
}

static void first_use_may_fail(void) {
  with_both_codes(first_use, "*", 0, 8);
  with_both_codes(first_use, "*", 1, 8);
}

static void each_call_once(void) {
  int i;
  for (i = 0; i < NAMES; i++) {
    with_both_codes(later_use, names[i], 0, 3);
  }
}

static void each_function_from_each_call_on(void) {
  int i;
  for (i = 0; i < NAMES; i++) {
    with_both_codes(later_use, names[i], 1, 3);
  }
}

static void all_calls_from_each_on(void) {
  with_both_codes(later_use, "*", 1, 8);
}

/* The calls that the ladder is made of. */
static void ladder_calls(void) {
  static const char *const calls[] = {"cuMemCreate",      "cuMemRelease",        "cuMemMap",
                                      "cuMemUnmap",       "cuMemSetAccess",      "cuMemAlloc",
                                      "cuMemFree",        "cuMemGetInfo",        "cuEventQuery",
                                      "cuCtxRecordEvent", "cuMemAddressReserve", "cuMemAddressFree"};
  size_t i;
  for (i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    with_both_codes(in_the_ladder, calls[i], 0, 2);
    with_both_codes(in_the_ladder, calls[i], 1, 1);
  }
}

static void all_calls_from_each_on_in_the_ladder(void) {
  with_both_codes(in_the_ladder, "*", 1, 4);
}

/* A call that the table lacks would never fail here. Runs last: from here on this process uses the driver. */
static void table_names_all_calls(void) {
  struct scenario run;
  uint64_t all, named = 0;
  int i;
  start(&run);
  all = calls_of("*");
  for (i = 0; i < NAMES; i++) {
    named += calls_of(names[i]);
  }
  scenario_run(&run);
  all = calls_of("*") - all;
  for (i = 0; i < NAMES; i++) {
    named -= calls_of(names[i]);
  }
  scenario_finish(&run);
  CHECK(all > 20);
  CHECK_EQ(all + named, 0);
}

int main(void) {
  RUN(first_use_may_fail);
  RUN(each_call_once);
  RUN(each_function_from_each_call_on);
  RUN(all_calls_from_each_on);
  RUN(ladder_calls);
  RUN(all_calls_from_each_on_in_the_ladder);
  RUN(table_names_all_calls);
  return driver_result();
}
