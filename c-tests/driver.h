/* driver.h: the CUDA driver for the C tests: opened at run time, so that the tests need no toolkit and see the
 * library as any program does. Works on a real driver and on the simulated one; the simulated one's knobs are in
 * `sim`, all NULL on a real driver. Include after check.h. */

#ifndef DRIVER_H
#define DRIVER_H

#include <dlfcn.h>

#include "cudasim.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef CUstream_st *CUstream;
typedef struct CUctx_st *CUcontext;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;

#define STREAM_LEGACY ((CUstream)1)
#define STREAM_PER_THREAD ((CUstream)2)
enum { STREAM_NON_BLOCKING = 1 };
enum { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };

/* Field of `cu`, symbol, parameters. All of them are old enough for every driver the library works with. */
#define DRIVER_FUNCTIONS(F)                                                                             \
  F(Init, "cuInit", (unsigned flags))                                                                   \
  F(DriverGetVersion, "cuDriverGetVersion", (int *version))                                             \
  F(DeviceGetCount, "cuDeviceGetCount", (int *count))                                                   \
  F(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, CUdevice device))                            \
  F(PrimaryRetain, "cuDevicePrimaryCtxRetain", (CUcontext *context, CUdevice device))                   \
  F(PrimaryRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                                  \
  F(PrimaryReset, "cuDevicePrimaryCtxReset_v2", (CUdevice device))                                      \
  F(PrimaryState, "cuDevicePrimaryCtxGetState", (CUdevice device, unsigned *flags, int *active))        \
  F(CtxCreate, "cuCtxCreate_v2", (CUcontext *context, unsigned flags, CUdevice device))                 \
  F(CtxDestroy, "cuCtxDestroy_v2", (CUcontext context))                                                 \
  F(CtxGetCurrent, "cuCtxGetCurrent", (CUcontext *context))                                             \
  F(CtxSetCurrent, "cuCtxSetCurrent", (CUcontext context))                                              \
  F(CtxSynchronize, "cuCtxSynchronize", (void))                                                         \
  F(MemAlloc, "cuMemAlloc_v2", (CUdeviceptr *ptr, size_t bytes))                                        \
  F(MemFree, "cuMemFree_v2", (CUdeviceptr ptr))                                                         \
  F(MemGetInfo, "cuMemGetInfo_v2", (size_t *available, size_t *total))                                  \
  F(ToHost, "cuMemcpyDtoH_v2", (void *to, CUdeviceptr from, size_t bytes))                              \
  F(CopyAsync, "cuMemcpyDtoDAsync_v2", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)) \
  F(SetAsync, "cuMemsetD32Async", (CUdeviceptr ptr, unsigned value, size_t count, CUstream stream))     \
  F(StreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))                                \
  F(StreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                             \
  F(StreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                        \
  F(StreamQuery, "cuStreamQuery", (CUstream stream))

/* Those that a driver without graphs lacks: NULL then. */
#define DRIVER_FUNCTIONS_OPTIONAL(F)                                                                    \
  F(LaunchHost, "cuLaunchHostFunc", (CUstream stream, void (*function)(void *), void *data))            \
  F(BeginCapture, "cuStreamBeginCapture_v2", (CUstream stream, int mode))                               \
  F(EndCapture, "cuStreamEndCapture", (CUstream stream, CUgraph * graph))                               \
  F(IsCapturing, "cuStreamIsCapturing", (CUstream stream, int *status))                                 \
  F(ExchangeCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))                              \
  F(GraphDestroy, "cuGraphDestroy", (CUgraph graph))

#define DRIVER_FIELD(name, symbol, parameters) CUresult(*name) parameters;
static struct {
  DRIVER_FUNCTIONS(DRIVER_FIELD)
  DRIVER_FUNCTIONS_OPTIONAL(DRIVER_FIELD)
} cu;

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

/* ISO C has no cast from `void *` to a function pointer; a copy of the bytes it has. */
static inline void driver_symbol(void *library, const char *symbol, void *place) {
  void *found = dlsym(library, symbol);
  memcpy(place, &found, sizeof found);
}

#define CU(call) CHECK_EQ(cu.call, 0)

/* The simulated driver keeps virtual time for the tests, so that they do not depend on the machine. Programs that check
 * no times, and whose threads are to race, define CHECK_HOST_TIME: who waits in virtual time does not meet who runs. */
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
#define DRIVER_FIND(name, symbol, parameters) driver_symbol(library, symbol, &cu.name);
  DRIVER_FUNCTIONS_OPTIONAL(DRIVER_FIND)
#define DRIVER_LOAD(name, symbol, parameters)                          \
  DRIVER_FIND(name, symbol, parameters)                                \
  if (cu.name == NULL) {                                               \
    fprintf(stderr, "the driver has no %s\n", symbol);                 \
    exit(EXIT_FAILURE);                                                \
  }
  DRIVER_FUNCTIONS(DRIVER_LOAD)
#define SIM_LOAD(name) driver_symbol(library, "cudasim_" #name, &sim.name);
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
  CU(PrimaryRetain(&context, device));
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
    CU(LaunchHost(stream, driver_sleep, (void *)(intptr_t)milliseconds));
  }
}

/* Work that writes the block on its stream, some time after the call. */
static inline void fill(void *ptr, size_t bytes, unsigned value, CUstream stream) {
  CU(SetAsync((CUdeviceptr)(uintptr_t)ptr, value, bytes / sizeof value, stream));
}

/* Whether the device memory holds the value now, all of it; says where it does not. The copy is a blocking one on
 * the legacy stream: work of blocking streams is waited for, so synchronise first where that matters. */
static inline int holds(const void *ptr, size_t bytes, unsigned value) {
  static __thread unsigned words[16 * 1024];
  size_t at, i;
  for (at = 0; at < bytes; at += sizeof words) {
    size_t part = bytes - at < sizeof words ? bytes - at : sizeof words;
    if (!CU(ToHost(words, (CUdeviceptr)(uintptr_t)ptr + at, part))) {
      return 0;
    }
    for (i = 0; i < part / sizeof value; i++) {
      if (words[i] != value) {
        fprintf(stderr, "%p + %llu: 0x%x, not 0x%x\n", ptr, (unsigned long long)(at + i * sizeof value), words[i],
                value);
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
    check_equal(stats.reserved_bytes, (uint64_t)sim.used_bytes(device), "`reserved` is not what the driver says but",
                file, line);
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
