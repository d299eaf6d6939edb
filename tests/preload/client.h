/* client.h: a CUDA program as the shim meets it: it reaches the driver in one of the ways that programs have, and knows nothing of the
 * shim. Way and expectations come by the command line:
 *
 *   client WAY        direct    linked with libcuda.so.1 (built with -DDIRECT)
 *                     dlsym     dlopen and dlsym
 *                     global    dlopen with RTLD_GLOBAL, dlsym of RTLD_DEFAULT
 *                     scope     dlsym of RTLD_DEFAULT alone, where the driver has been opened by linking
 *                     next      the same with RTLD_NEXT
 *                     v1:N, v2:N, v2:N:F   dlsym of cuGetProcAddress(_v2) alone, the rest by it, at version N, flags F
 *
 * The pool is opened as a second part of the process would, by its name; CUDAPOOL_TEST_LIBRARY names a path instead. */

#ifndef CLIENT_H
#define CLIENT_H

#define CHECK_WITHOUT_LIBRARY
#include <dlfcn.h>

#include "check.h"
#include "cudasim.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef CUstream_st *CUstream;
typedef struct CUctx_st *CUcontext;
typedef struct CUarray_st *CUarray;
typedef struct CUgraph_st *CUgraph;
typedef struct CUmodule_st *CUmodule;

enum { CUDA_OOM = 2, CUDA_NOT_INITIALIZED = 3, CUDA_DEINITIALIZED = 4, CUDA_INVALID_VALUE = 1, CUDA_INVALID_CONTEXT = 201 };
enum { CUDA_NOT_FOUND = 500, CUDA_DESTROYED = 709, CUDA_NOT_SUPPORTED = 801, CUDA_CAPTURE = 900, CUDA_CAPTURE_INVALIDATED = 901 };

typedef struct {
  int type, handle_types, location_type, location_id;
  void *windows;
  unsigned char flags[8];
} allocation_properties;

typedef struct {
  size_t width, height;
  unsigned format, channels;
} array_shape;

typedef struct {
  size_t width, height, depth;
  unsigned format, channels, flags;
} array_shape_3d;

/* Field of `cu`, base name, symbol that the headers of today mean by it, parameters. */
#define FUNCTIONS(F)                                                                                              \
  F(Init, cuInit, cuInit, (unsigned flags))                                                                       \
  F(PrimaryRetain, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))    \
  F(PrimaryRelease, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                   \
  F(PrimaryReset, cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (CUdevice device))                         \
  F(PrimaryState, cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active)) \
  F(DeviceGetCount, cuDeviceGetCount, cuDeviceGetCount, (int *count))                                             \
  F(CtxDestroy, cuCtxDestroy, cuCtxDestroy_v2, (CUcontext context))                                               \
  F(CtxSetCurrent, cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                                         \
  F(CtxGetCurrent, cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext * context))                                       \
  F(MemAlloc, cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * ptr, size_t bytes))                                       \
  F(MemFree, cuMemFree, cuMemFree_v2, (CUdeviceptr ptr))                                                          \
  F(MemGetInfo, cuMemGetInfo, cuMemGetInfo_v2, (size_t * available, size_t *total))                               \
  F(MemGetAddressRange, cuMemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *size, CUdeviceptr ptr)) \
  F(MemAllocPitch, cuMemAllocPitch, cuMemAllocPitch_v2, (CUdeviceptr * ptr, size_t *pitch, size_t width, size_t height, unsigned element)) \
  F(MemAllocManaged, cuMemAllocManaged, cuMemAllocManaged, (CUdeviceptr * ptr, size_t bytes, unsigned flags))     \
  F(ArrayCreate, cuArrayCreate, cuArrayCreate_v2, (CUarray * array, const array_shape *shape))                    \
  F(ArrayDestroy, cuArrayDestroy, cuArrayDestroy, (CUarray array))                                                \
  F(Array3DCreate, cuArray3DCreate, cuArray3DCreate_v2, (CUarray * array, const array_shape_3d *shape))           \
  F(MipmappedCreate, cuMipmappedArrayCreate, cuMipmappedArrayCreate, (CUarray * array, const array_shape_3d *shape, unsigned levels)) \
  F(MipmappedDestroy, cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, (CUarray array))                          \
  F(PointerGetAttribute, cuPointerGetAttribute, cuPointerGetAttribute, (void *data, int which, CUdeviceptr ptr))  \
  F(IpcGetMemHandle, cuIpcGetMemHandle, cuIpcGetMemHandle, (void *handle, CUdeviceptr ptr))                       \
  F(StreamCreate, cuStreamCreate, cuStreamCreate, (CUstream * stream, unsigned flags))                            \
  F(StreamDestroy, cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                        \
  F(StreamSynchronize, cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                               \
  F(CtxSynchronize, cuCtxSynchronize, cuCtxSynchronize, (void))                                                   \
  F(ToHost, cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes))                            \
  F(SetAsync, cuMemsetD32Async, cuMemsetD32Async, (CUdeviceptr ptr, unsigned value, size_t count, CUstream stream)) \
  F(ModuleLoadData, cuModuleLoadData, cuModuleLoadData, (CUmodule * module, const void *image))

/* Newer ones: NULL where the version that is asked for does not have them. */
#define NEWER_FUNCTIONS(F)                                                                                        \
  F(CtxCreate, cuCtxCreate, cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device))               \
  F(MemCreate, cuMemCreate, cuMemCreate, (unsigned long long *handle, size_t bytes, const allocation_properties *properties, unsigned long long flags)) \
  F(MemRelease, cuMemRelease, cuMemRelease, (unsigned long long handle))                                          \
  F(MemRetainHandle, cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, (unsigned long long *handle, CUdeviceptr ptr)) \
  F(PointerGetAttributes, cuPointerGetAttributes, cuPointerGetAttributes, (unsigned count, int *which, void **data, CUdeviceptr ptr)) \
  F(MemAllocAsync, cuMemAllocAsync, cuMemAllocAsync, (CUdeviceptr * ptr, size_t bytes, CUstream stream))          \
  F(MemAllocFromPoolAsync, cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, (CUdeviceptr * ptr, size_t bytes, void *pool, CUstream stream)) \
  F(MemFreeAsync, cuMemFreeAsync, cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream))                             \
  F(GetMemPool, cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (void **pool, CUdevice device))             \
  F(PoolTrim, cuMemPoolTrimTo, cuMemPoolTrimTo, (void *pool, size_t keep))                                        \
  F(BeginCapture, cuStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream stream, int mode))                     \
  F(EndCapture, cuStreamEndCapture, cuStreamEndCapture, (CUstream stream, CUgraph * graph))                       \
  F(IsCapturing, cuStreamIsCapturing, cuStreamIsCapturing, (CUstream stream, int *status))                        \
  F(GraphInstantiate, cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, (void **executable, CUgraph graph, unsigned long long flags)) \
  F(GraphLaunch, cuGraphLaunch, cuGraphLaunch, (void *executable, CUstream stream))                               \
  F(GraphExecDestroy, cuGraphExecDestroy, cuGraphExecDestroy, (void *executable))                                 \
  F(GraphDestroy, cuGraphDestroy, cuGraphDestroy, (CUgraph graph))                                                \
  F(ExchangeMode, cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode))

#ifdef DIRECT
#define DECLARE(name, base, symbol, parameters) CUresult symbol parameters;
FUNCTIONS(DECLARE)
NEWER_FUNCTIONS(DECLARE)
#endif

#define FIELD(name, base, symbol, parameters) CUresult(*name) parameters;
static struct {
  FUNCTIONS(FIELD)
  NEWER_FUNCTIONS(FIELD)
} cu;

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

static inline void take(void *library, const char *symbol, void *place) {
  void *found = dlsym(library, symbol);
  memcpy(place, &found, sizeof found);
}

static inline void *need(void *found, const char *what) {
  if (found == NULL) {
    const char *why = dlerror();
    fprintf(stderr, "%s: %s\n", what, why != NULL ? why : "not found");
    exit(1);
  }
  return found;
}

typedef CUresult (*lookup_v1)(const char *name, void **function, int version, unsigned long long flags);
typedef CUresult (*lookup_v2)(const char *name, void **function, int version, unsigned long long flags, int *status);

static inline void *driver_library(int mode) {
  return need(dlopen("libcuda.so.1", RTLD_NOW | mode), "libcuda.so.1");
}

/* The function by cuGetProcAddress; NULL where it has none. */
static inline void *by_lookup(void *library, int form, int version, unsigned long long flags, const char *base) {
  void *found = NULL;
  int status = 77;
  if (form == 1) {
    lookup_v1 lookup;
    take(library, "cuGetProcAddress", &lookup);
    return lookup(base, &found, version, flags) == 0 ? found : NULL;
  } else {
    lookup_v2 lookup;
    take(library, "cuGetProcAddress_v2", &lookup);
    return lookup(base, &found, version, flags, &status) == 0 && status == 0 ? found : NULL;
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
#define FIND(name, base, symbol, parameters)            \
  {                                                     \
    void *found = look_up(way, #base, #symbol);         \
    memcpy(&cu.name, &found, sizeof found);             \
  }
#define FIND_NEEDED(name, base, symbol, parameters) \
  FIND(name, base, symbol, parameters)              \
  need(*(void **)&cu.name, #symbol);
#ifdef DIRECT
#define POINT(name, base, symbol, parameters) cu.name = symbol;
  if (strcmp(way, "direct") == 0) {
    FUNCTIONS(POINT)
    NEWER_FUNCTIONS(POINT)
  } else
#endif
  {
    FUNCTIONS(FIND_NEEDED)
    NEWER_FUNCTIONS(FIND)
  }
}

/* The pool's library, for a part of the process that knows it, and the simulated driver's knobs. */
static inline void helpers_open(void) {
  const char *path = getenv("CUDAPOOL_TEST_LIBRARY");
  void *library = need(dlopen(path != NULL ? path : "libcudapool.so", RTLD_NOW | RTLD_LOCAL), "libcudapool.so");
  void *driver = driver_library(RTLD_LOCAL);
#define TAKE(name) take(library, "pool_" #name, &pool.name)
  TAKE(alloc), TAKE(alloc_with), TAKE(free), TAKE(trim), TAKE(get_stats);
#define TAKE_SIM(name) take(driver, "cudasim_" #name, &sim.name)
  TAKE_SIM(used_bytes), TAKE_SIM(call_count), TAKE_SIM(fail), TAKE_SIM(spin), TAKE_SIM(misuse_count);
  TAKE_SIM(live_allocations), TAKE_SIM(live_handles);
}

static inline CUcontext client_start(const char *way) {
  CUcontext context = NULL;
  client_open(way);
  CU(Init(0));
  CU(PrimaryRetain(&context, 0));
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
