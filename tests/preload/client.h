/* client.h: a CUDA program as the shim meets it: it reaches the driver in one of the ways that programs have,
 * and knows nothing of the shim. Way and expectations come by the command line:
 *
 *   client WAY        direct    linked with libcuda.so.1 (built with -DDIRECT)
 *                     dlsym     dlopen and dlsym
 *                     global    dlopen with RTLD_GLOBAL, dlsym of RTLD_DEFAULT
 *                     scope     dlsym of RTLD_DEFAULT alone, where the driver has been opened by linking
 *                     next      the same with RTLD_NEXT
 *                     v1:N, v2:N, v2:N:F
 *                               dlsym of cuGetProcAddress(_v2) alone, the rest by it, at version N, flags F
 *
 * The pool is opened as a second part of the process would, by its name; CUDAPOOL_TEST_LIBRARY names a path
 * instead. */

#ifndef CLIENT_H
#define CLIENT_H

#define CHECK_WITHOUT_LIBRARY
#include "check.h"
#include "cuda_driver.h"
#include "cudasim.h"

/* NULL where the version that is asked for has no such function, but for the old ones. */
static struct cuda_driver cu;

#define OLD_FUNCTIONS(F)                                                                                   \
  F(Init) F(DeviceGetCount)                                                                                \
  F(DevicePrimaryCtxRetain) F(DevicePrimaryCtxRelease)                                                   \
  F(DevicePrimaryCtxReset) F(DevicePrimaryCtxGetState)                                                   \
  F(CtxDestroy) F(CtxSetCurrent) F(CtxGetCurrent) F(CtxSynchronize)                                        \
  F(MemAlloc) F(MemFree) F(MemGetInfo) F(MemGetAddressRange) F(MemAllocPitch) F(MemAllocManaged)           \
  F(ArrayCreate) F(ArrayDestroy) F(Array3DCreate) F(MipmappedArrayCreate) F(MipmappedArrayDestroy)         \
  F(PointerGetAttribute) F(IpcGetMemHandle) F(MemcpyDtoH) F(MemsetD32Async) F(ModuleLoadData)              \
  F(StreamCreate) F(StreamDestroy) F(StreamSynchronize)

/* The functions of the pool that some other part of the process uses. */
static struct {
  __typeof__(&pool_alloc) alloc;
  __typeof__(&pool_alloc_with) alloc_with;
  __typeof__(&pool_free) free;
  __typeof__(&pool_trim) trim;
  __typeof__(&pool_get_stats) get_stats;
} pool;

static struct {
  __typeof__(&cudasim_used_bytes) used_bytes;
  __typeof__(&cudasim_call_count) call_count;
  __typeof__(&cudasim_fail) fail;
  __typeof__(&cudasim_spin) spin;
  __typeof__(&cudasim_misuse_count) misuse_count;
  __typeof__(&cudasim_live_allocations) live_allocations;
  __typeof__(&cudasim_live_handles) live_handles;
} sim;

#define CU(call) CHECK_EQ(cu.call, 0)

static inline void *need(void *found, const char *what) {
  if (found == NULL) {
    const char *why = dlerror();
    fprintf(stderr, "%s: %s\n", what, why != NULL ? why : "not found");
    exit(1);
  }
  return found;
}

static inline void *driver_library(int mode) {
  return need(dlopen("libcuda.so.1", RTLD_NOW | mode), "libcuda.so.1");
}

/* The function by cuGetProcAddress; NULL where it has none. */
static inline void *by_lookup(void *library, int form, int version, unsigned long long flags,
                              const char *base) {
  void *found = NULL;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (form == 1) {
    __typeof__(&cuGetProcAddress) lookup;
    cuda_driver_symbol(library, "cuGetProcAddress", &lookup);
    return lookup(base, &found, version, flags) == CUDA_SUCCESS ? found : NULL;
  } else {
    __typeof__(&cuGetProcAddress_v2) lookup;
    CUresult result;
    cuda_driver_symbol(library, "cuGetProcAddress_v2", &lookup);
    result = lookup(base, &found, version, flags, &status);
    return result == CUDA_SUCCESS && status == CU_GET_PROC_ADDRESS_SUCCESS ? found : NULL;
  }
}

static inline void *look_up(const char *way, const char *base, const char *symbol) {
  int form = 0, version = 0;
  unsigned long long flags = 0;
  if (strcmp(way, "dlsym") == 0) {
    return dlsym(driver_library(RTLD_LOCAL), symbol);
  }
  if (strcmp(way, "global") == 0) {
    driver_library(RTLD_GLOBAL);
    return dlsym(RTLD_DEFAULT, symbol);
  }
  if (strcmp(way, "scope") == 0) {
    return dlsym(RTLD_DEFAULT, symbol);
  }
  if (strcmp(way, "next") == 0) {
    return dlsym(RTLD_NEXT, symbol);
  }
  if (sscanf(way, "v%d:%d:%llu", &form, &version, &flags) >= 2) {
    if (strcmp(base, "cuCtxCreate") == 0 && version >= 11040) {
      version = 11030; /* later forms take other arguments */
    }
    return by_lookup(driver_library(RTLD_LOCAL), form, version, flags, base);
  }
  fprintf(stderr, "no way \"%s\"\n", way);
  exit(2);
}

static inline void client_open(const char *way) {
#define FIND(name, symbol, parameters)                  \
  {                                                     \
    void *found = look_up(way, "cu" #name, #symbol);    \
    memcpy(&cu.name, &found, sizeof found);             \
  }
#define CHECK_FOUND(name) need(*(void **)&cu.name, "cu" #name);
#ifdef DIRECT
#define POINT(name, symbol, parameters) cu.name = symbol;
  if (strcmp(way, "direct") == 0) {
    CUDA_DRIVER_FUNCTIONS(POINT)
  } else
#endif
  {
    CUDA_DRIVER_FUNCTIONS(FIND)
    OLD_FUNCTIONS(CHECK_FOUND)
  }
}

/* The pool's library, for a part of the process that knows it, and the simulated driver's knobs. */
static inline void helpers_open(void) {
  const char *path = getenv("CUDAPOOL_TEST_LIBRARY");
  void *library =
      need(dlopen(path != NULL ? path : "libcudapool.so", RTLD_NOW | RTLD_LOCAL), "libcudapool.so");
  void *driver = driver_library(RTLD_LOCAL);
#define TAKE(name) cuda_driver_symbol(library, "pool_" #name, &pool.name)
  TAKE(alloc), TAKE(alloc_with), TAKE(free), TAKE(trim), TAKE(get_stats);
#define TAKE_SIM(name) cuda_driver_symbol(driver, "cudasim_" #name, &sim.name)
  TAKE_SIM(used_bytes), TAKE_SIM(call_count), TAKE_SIM(fail), TAKE_SIM(spin), TAKE_SIM(misuse_count);
  TAKE_SIM(live_allocations), TAKE_SIM(live_handles);
}

static inline CUcontext client_start(const char *way) {
  CUcontext context = NULL;
  client_open(way);
  CU(Init(0));
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(context));
  return context;
}

static inline pool_stats stats_of_pool(void) {
  pool_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  CHECK_EQ(pool.get_stats(NULL, 0, &stats), 0);
  return stats;
}

/* Another part of the process leaves so much idle in the pool, in pieces. */
static inline void leave_idle_on(int device, size_t bytes) {
  pool_request request;
  void *pieces[64];
  size_t count = bytes / (GIB / 4), i;
  memset(&request, 0, sizeof request);
  request.struct_size = sizeof request;
  request.size = GIB / 4;
  request.device = device;
  for (i = 0; i < count; i++) {
    CHECK_EQ(pool.alloc_with(&pieces[i], &request), 0);
  }
  for (i = 0; i < count; i++) {
    CHECK_EQ(pool.free(pieces[i]), 0);
  }
}

static inline void leave_idle(size_t bytes) {
  leave_idle_on(0, bytes);
  CHECK(stats_of_pool().reserved_bytes >= bytes);
}

static inline int client_result(void) {
  CHECK_EQ(sim.misuse_count(), 0);
  return check_result();
}

#endif /* CLIENT_H */
