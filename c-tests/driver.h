/* driver.h: the CUDA driver for the C tests: opened at run time, so that the tests need no toolkit and see
 * the library as any program does. Works on a real driver and on the simulated one; the simulated one's knobs
 * are in `sim`, all NULL on a real driver. Include after check.h. */

#ifndef DRIVER_H
#define DRIVER_H

#include "cuda_driver.h"
#include "cudasim.h"

/* NULL where the driver has no such function, but for those that every driver the library works with has. */
static struct cuda_driver cu;

#define DRIVER_NEEDED(F)                                                                                 \
  F(Init) F(DriverGetVersion) F(DeviceGetCount) F(DeviceTotalMem)                                        \
  F(DevicePrimaryCtxRetain) F(DevicePrimaryCtxRelease)                                                   \
  F(DevicePrimaryCtxReset) F(DevicePrimaryCtxGetState)                                                   \
  F(CtxCreate) F(CtxDestroy) F(CtxGetCurrent) F(CtxSetCurrent) F(CtxSynchronize)                         \
  F(MemAlloc) F(MemFree) F(MemGetInfo) F(MemcpyDtoH) F(MemcpyDtoDAsync) F(MemsetD32Async)                \
  F(StreamCreate) F(StreamDestroy) F(StreamSynchronize) F(StreamQuery)

/* The knobs of the simulated driver that the tests use. */
#define SIM_FUNCTIONS(F) \
  F(used_bytes)          \
  F(call_count)          \
  F(fail)                \
  F(set_free_waits)      \
  F(set_latency)         \
  F(set_memory)          \
  F(spin)                \
  F(misuse_count)        \
  F(live_handles)        \
  F(live_mappings)       \
  F(live_reservations)   \
  F(live_allocations)    \
  F(use_virtual_clock)   \
  F(clock)               \
  F(now_ns)              \
  F(sleep_ns)            \
  F(thread_expect)       \
  F(thread_enter)

#define SIM_FIELD(name) __typeof__(&cudasim_##name) name;
static struct {
  SIM_FUNCTIONS(SIM_FIELD)
} sim;

#define CU(call) CHECK_EQ(cu.call, 0)

/* The simulated driver keeps virtual time for the tests, so that they do not depend on the machine. Programs
 * that check no times, and whose threads are to race, define CHECK_HOST_TIME: who waits in virtual time does
 * not meet who runs. */
static inline void driver_clock(void) {
#ifndef CHECK_HOST_TIME
  const struct cudasim_clock *clock;
  if (sim.use_virtual_clock == NULL) {
    return;
  }
  CHECK_EQ(sim.use_virtual_clock(), 0);
  clock = sim.clock();
  if (CHECK(clock != NULL)) {
    check_clock.now_ns = sim.now_ns;
    check_clock.sleep_ns = sim.sleep_ns;
    check_clock.thread_expect = sim.thread_expect;
    check_clock.thread_enter = sim.thread_enter;
    check_clock.wait = clock->wait;
    check_clock.wake = clock->wake;
  }
#endif
}

/* Opens the driver without initialising it. Ends the program, as skipped, where there is none. */
static inline void driver_open(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) {
    printf("skipped: %s\n", dlerror());
    exit(EXIT_SKIPPED);
  }
  cuda_driver_open(&cu, library);
#define DRIVER_CHECK(name)                                 \
  if (cu.name == NULL) {                                   \
    fprintf(stderr, "the driver has no cu%s\n", #name);    \
    exit(EXIT_FAILURE);                                    \
  }
  DRIVER_NEEDED(DRIVER_CHECK)
#define SIM_LOAD(name) cuda_driver_symbol(library, "cudasim_" #name, &sim.name);
  SIM_FUNCTIONS(SIM_LOAD)
  driver_clock();
}

/* Opens and initialises it, and makes the primary context of a device current. */
static inline CUcontext driver_start(CUdevice device) {
  CUcontext context = NULL;
  if (cu.Init == NULL) {
    driver_open();
  }
  if (cu.Init(0) != 0) {
    printf("skipped: the driver cannot be initialised\n");
    exit(EXIT_SKIPPED);
  }
  CU(DevicePrimaryCtxRetain(&context, device));
  CU(CtxSetCurrent(context));
  return context;
}

static inline int on_sim(void) {
  return sim.used_bytes != NULL;
}

/* For tests that turn a knob: `if (!needs_sim()) return;` */
static inline int needs_sim(void) {
  if (!on_sim()) {
    check_skip("needs the simulated driver");
  }
  return on_sim();
}

/* For programs all of whose tests need it: ends the program, as skipped, on a real driver. */
static inline void require_sim(const char *why) {
  if (!on_sim()) {
    printf("skipped: %s\n", why);
    exit(EXIT_SKIPPED);
  }
}

/* The exit code of a program that used the driver: its own checks, and no misuse that the simulation saw. */
static inline int driver_result(void) {
  if (on_sim()) {
    CHECK_EQ(sim.misuse_count(), 0);
  }
  return check_result();
}

/* ---- work for streams ---- */

static inline CUstream new_stream(unsigned flags) {
  CUstream stream = NULL;
  CU(StreamCreate(&stream, flags));
  return stream;
}

static inline void driver_sleep(void *milliseconds) {
  sleep_ms((int)(intptr_t)milliseconds);
}

/* Keeps a stream busy, as a long kernel does: what is submitted to it after this runs late. */
static inline void busy(CUstream stream, int milliseconds) {
  if (on_sim()) {
    CHECK_EQ(sim.spin(stream, (uint64_t)milliseconds * 1000), 0);
  } else {
    CU(LaunchHostFunc(stream, driver_sleep, (void *)(intptr_t)milliseconds));
  }
}

/* Work that writes the block on its stream, some time after the call. */
static inline void fill(void *ptr, size_t bytes, unsigned value, CUstream stream) {
  CU(MemsetD32Async((CUdeviceptr)(uintptr_t)ptr, value, bytes / sizeof value, stream));
}

/* Whether the device memory holds the value now, all of it; says where it does not. The copy is a blocking
 * one on the legacy stream: work of blocking streams is waited for, so synchronise first if that matters. */
static inline int holds(const void *ptr, size_t bytes, unsigned value) {
  static __thread unsigned words[16 * 1024];
  size_t at, i;
  for (at = 0; at < bytes; at += sizeof words) {
    size_t part = bytes - at < sizeof words ? bytes - at : sizeof words;
    if (!CU(MemcpyDtoH(words, (CUdeviceptr)(uintptr_t)ptr + at, part))) {
      return 0;
    }
    for (i = 0; i < part / sizeof value; i++) {
      if (words[i] != value) {
        fprintf(stderr, "%p + %llu: 0x%x, not 0x%x\n", ptr, (unsigned long long)(at + i * sizeof value),
                words[i], value);
        return 0;
      }
    }
  }
  return 1;
}

/* Driver calls so far by name ("*": all); 0 on a real driver, so that differences are 0 too. */
static inline uint64_t calls_of(const char *name) {
  return on_sim() ? (uint64_t)sim.call_count(name) : 0;
}

#ifndef CHECK_WITHOUT_LIBRARY

/* ---- the pool against the driver ---- */

/* Identity of the counters, and the driver's own figure beside the pool's (where nobody else allocates). */
static inline void check_stats_at(int device, int expect_idle, const char *file, int line) {
  pool_stats stats = stats_of(device);
  check_identity(&stats, file, line);
  if (on_sim()) {
    check_equal(stats.reserved_bytes, (uint64_t)sim.used_bytes(device),
                "`reserved` is not what the driver says but", file, line);
  }
  if (expect_idle) {
    check_equal(stats.live_blocks, 0, "live blocks are not 0 but", file, line);
    check_equal(stats.live_bytes, 0, "live bytes are not 0 but", file, line);
    check_equal(stats.requested_bytes, 0, "requested bytes are not 0 but", file, line);
    if (!check_equal(stats.reserved_bytes, 0, "reserved bytes are not 0 but", file, line)) {
      fprintf(stderr, "  cached %llu, pending %llu, overhead %llu\n", (unsigned long long)stats.cached_bytes,
              (unsigned long long)stats.pending_bytes, (unsigned long long)stats.overhead_bytes);
    }
    /* These count for all devices. */
    if (on_sim() && sim.used_bytes(0) + sim.used_bytes(1) == 0) {
      check_equal(sim.live_handles(), 0, "chunks' handles are not 0 but", file, line);
      check_equal(sim.live_mappings(), 0, "mappings are not 0 but", file, line);
      check_equal(sim.live_allocations(), 0, "driver allocations are not 0 but", file, line);
    }
  }
}

#define CHECK_STATS(device) check_stats_at((device), 0, __FILE__, __LINE__)

/* All blocks are freed: after the device is done and a trim, nothing is left, here or in the driver. */
#define CHECK_TRIMS_TO_ZERO(device)                                      \
  do {                                                                   \
    CU(CtxSynchronize());                                                \
    CHECK_STATUS(POOL_OK, pool_trim(NULL, (device), 0, NULL));           \
    check_stats_at((device), 1, __FILE__, __LINE__);                     \
  } while (0)

#endif /* CHECK_WITHOUT_LIBRARY */

#endif /* DRIVER_H */
