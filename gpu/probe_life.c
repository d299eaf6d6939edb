/* probe_life.c: contexts that end, and the ends of processes. */

#include "probe.h"

static int primary_is_active(void) {
  unsigned flags = 0;
  int active = -1;
  MUST(cu.DevicePrimaryCtxGetState(0, &flags, &active));
  return active;
}

static void reset_of_the_primary_context(void) {
  CUcontext context = driver_start(0), again = NULL;
  CUdeviceptr ptr = 0;
  unsigned version = 0;
  unsigned long long id = 0, next = 0;
  if (cu.CtxGetId != NULL) {
    MUST(cu.CtxGetId(context, &id));
  }
  SAME(cu.CtxGetApiVersion(context, &version), 0);
  MUST(cu.DevicePrimaryCtxReset(0));
  SAME(primary_is_active(), 0);
  SAME(cu.CtxGetApiVersion(context, &version), 201);
  SAME(cu.MemAlloc(&ptr, 100), 709);
  SAME(cu.DevicePrimaryCtxRetain(&again, 0), 0);
  TRUE(again == context); /* another life of the same handle */
  SAME(primary_is_active(), 1);
  SAME(cu.MemAlloc(&ptr, 100), 0);
  if (cu.CtxGetId != NULL) {
    SAME(cu.CtxGetId(again, &next), 0);
    TRUE(next != id); /* which its number tells */
  }
}

/* What is mapped is the process's, not the context's. */
static void mapped_memory_outlives_a_reset(void) {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base;
  size_t page;
  driver_start(0);
  page = page_size();
  base = mapped_page(4 * page, &handle);
  MUST(cu.DevicePrimaryCtxReset(0));
  SAME(cu.MemUnmap(base, page), 0);
  SAME(cu.MemRelease(handle), 0);
  SAME(cu.MemAddressFree(base, 4 * page), 0);
}

static void classic_memory_goes_with_its_context(void) {
  CUcontext again = NULL;
  CUdeviceptr block = 0;
  driver_start(0);
  MUST(cu.MemAlloc(&block, 4 << 20));
  MUST(cu.DevicePrimaryCtxReset(0));
  MUST(cu.DevicePrimaryCtxRetain(&again, 0));
  SAME(cu.MemFree(block), 1);
}

static void destroyed_contexts(void) {
  CUcontext context = NULL, current = NULL;
  unsigned version = 0;
  driver_start(0);
  MUST(cu.CtxCreate(&context, 0, 0));
  SAME(cu.CtxGetApiVersion(context, &version), 0);
  SAME(cu.CtxDestroy(context), 0);
  SAME(cu.CtxGetApiVersion(context, &version), 201);
  SAME(cu.CtxGetCurrent(&current), 0);
  TRUE(current != context);
}

static void a_forked_child(void) {
  CUdeviceptr ptr = 0;
  pid_t child;
  driver_start(0);
  child = fork();
  if (child == 0) {
    alarm(10);
    SAME(cu.MemAlloc(&ptr, 100), 3);
    SAME(cu.Init(0), 3);
    fflush(stdout);
    _exit(probe_differences);
  }
  same("differences in the child", wait_for_exit(child), 0);
}

/* A child of a process that only loaded the driver. */
static void a_fork_before_the_start(void) {
  pid_t child = fork();
  if (child == 0) {
    alarm(20);
    SAME(cu.Init(0), 0);
    fflush(stdout);
    _exit(probe_differences);
  }
  same("differences in the child", wait_for_exit(child), 0);
  SAME(cu.Init(0), 0);
}

static CUdeviceptr late;

/* Registered before the driver is initialised, so it runs after the driver's own exit handlers. */
static void at_exit(void) {
  CUresult result = cu.MemFree(late);
  if (result != 0 && result != 4) {
    printf("differs: cuMemFree in an exit handler answers %d, simulated 0 or 4\n", result);
    fflush(stdout);
    _exit(EXIT_FAILURE);
  }
}

static void calls_while_exiting(void) {
  atexit(at_exit);
  driver_start(0);
  MUST(cu.MemAlloc(&late, 1 << 20));
}

static void before_the_start(void) {
  CUdeviceptr ptr = 0;
  CUstream stream = NULL;
  int version = 0;
  SAME(cu.MemAlloc(&ptr, 100), 3);
  SAME(cu.StreamCreate(&stream, 0), 3);
  SAME(cu.DriverGetVersion(&version), 0);
  TRUE(version >= 10020);
  SAME(cu.Init(1), 1);
  SAME(cu.Init(0), 0);
  SAME(cu.Init(0), 0);
}

int main(int argc, char **argv) {
  static const struct probe probes[] = {
      {"before_the_start", "calls before cuInit answer 3", before_the_start},
      {"reset", "a reset ends the primary context's life; retaining begins another, with another number",
       reset_of_the_primary_context},
      {"mapped_memory_outlives_a_reset", "handles and mappings are returned after a reset",
       mapped_memory_outlives_a_reset},
      {"classic_memory_goes", "cuMemAlloc memory goes with its context",
       classic_memory_goes_with_its_context},
      {"destroyed_contexts", "a destroyed context is told by cuCtxGetApiVersion", destroyed_contexts},
      {"a_forked_child", "in a forked child every call answers 3", a_forked_child},
      {"a_fork_before_the_start", "a fork before cuInit does no harm", a_fork_before_the_start},
      {"calls_while_exiting", "calls in exit handlers answer 0 or 4", calls_while_exiting},
      {NULL, NULL, NULL},
  };
  return probe_main(probes, argc, argv);
}
