/*
 * The CUDA driver's declarations that this project's C and C++ programs use: types, constants, functions.
 * Written for this project from CUDA's public documentation of the driver API, so that nothing here needs a
 * toolkit. Names, values and layouts are CUDA's: a program could include cuda.h instead.
 *
 * The functions are one table, CUDA_DRIVER_FUNCTIONS. From it come their declarations, for programs that are
 * linked with the driver and for `__typeof__` and `decltype`; `struct cuda_driver`, a pointer to each; and
 * cuda_driver_open, which finds them in a library that was opened at run time. C99, and C++ from C++11.
 */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- handles ---- */

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUarray_st *CUarray;
typedef struct CUmipmappedArray_st *CUmipmappedArray;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUmodule_st *CUmodule;
typedef struct CUmemPoolHandle_st *CUmemoryPool;

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

/* ---- constants: those that are used ---- */

typedef enum cudaError_enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef enum CUstream_flags_enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 } CUstream_flags;

typedef enum CUevent_flags_enum { CU_EVENT_DEFAULT = 0, CU_EVENT_DISABLE_TIMING = 2 } CUevent_flags;

typedef enum CUmemAttach_flags_enum { CU_MEM_ATTACH_GLOBAL = 1 } CUmemAttach_flags;

typedef enum CUarray_format_enum { CU_AD_FORMAT_FLOAT = 0x20 } CUarray_format;

typedef enum CUmemorytype_enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 } CUmemorytype;

typedef enum CUstreamCaptureMode_enum {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;

typedef enum CUstreamCaptureStatus_enum {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;

typedef enum CUdevice_attribute_enum {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
  CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
  CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
  CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
  CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
  CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145
} CUdevice_attribute;

typedef enum CUpointer_attribute_enum {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
  CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
  CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
  CU_POINTER_ATTRIBUTE_MAPPED = 13,
  CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
  CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
  CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
  CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19
} CUpointer_attribute;

typedef enum CUmemPool_attribute_enum {
  CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
  CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6
} CUmemPool_attribute;

typedef enum CUdriverProcAddress_flags_enum {
  CU_GET_PROC_ADDRESS_DEFAULT = 0,
  CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1,
  CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2
} CUdriverProcAddress_flags;

typedef enum CUdriverProcAddressQueryResult_enum {
  CU_GET_PROC_ADDRESS_SUCCESS = 0,
  CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
  CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2
} CUdriverProcAddressQueryResult;

typedef enum CUmemAllocationType_enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;

typedef enum CUmemAllocationHandleType_enum { CU_MEM_HANDLE_TYPE_NONE = 0 } CUmemAllocationHandleType;

typedef enum CUmemLocationType_enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;

typedef enum CUmemAccess_flags_enum { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 } CUmemAccess_flags;

typedef enum CUmemAllocationGranularity_flags_enum {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
} CUmemAllocationGranularity_flags;

/* ---- structures ---- */

typedef struct CUmemLocation_st {
  CUmemLocationType type;
  int id;
} CUmemLocation;

typedef struct CUmemAllocationProp_st {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc_st {
  CUmemLocation location;
  CUmemAccess_flags flags;
} CUmemAccessDesc;

typedef struct CUDA_ARRAY_DESCRIPTOR_st {
  size_t Width, Height;
  CUarray_format Format;
  unsigned NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct CUDA_ARRAY3D_DESCRIPTOR_st {
  size_t Width, Height, Depth;
  CUarray_format Format;
  unsigned NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

typedef struct CUipcMemHandle_st {
  char reserved[64];
} CUipcMemHandle;

typedef void (*CUhostFn)(void *userData);

/* ---- functions ---- */

/*
 * F(name without "cu", exported symbol, parameters), each answering a CUresult. The symbol is the form that
 * the name means to a program built with CUDA 12; where another form is used too, its number is in the name.
 */
#define CUDA_DRIVER_FUNCTIONS(F)                                                                            \
  F(Init, cuInit, (unsigned flags))                                                                         \
  F(DriverGetVersion, cuDriverGetVersion, (int *version))                                                   \
  F(GetProcAddress, cuGetProcAddress_v2,                                                                    \
    (const char *symbol, void **function, int version, cuuint64_t flags,                                    \
     CUdriverProcAddressQueryResult *status))                                                               \
  F(GetProcAddress_v1, cuGetProcAddress,                                                                    \
    (const char *symbol, void **function, int version, cuuint64_t flags))                                   \
  F(DeviceGetCount, cuDeviceGetCount, (int *count))                                                         \
  F(DeviceGetAttribute, cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice device))  \
  F(DeviceGetName, cuDeviceGetName, (char *name, int length, CUdevice device))                              \
  F(DeviceTotalMem, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device))                                  \
  F(DeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (CUmemoryPool *pool, CUdevice device))              \
  F(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device))                \
  F(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                               \
  F(DevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (CUdevice device))                                   \
  F(DevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active))  \
  F(CtxCreate, cuCtxCreate_v2, (CUcontext *context, unsigned flags, CUdevice device))                       \
  F(CtxDestroy, cuCtxDestroy_v2, (CUcontext context))                                                       \
  F(CtxGetCurrent, cuCtxGetCurrent, (CUcontext *context))                                                   \
  F(CtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                                                    \
  F(CtxSynchronize, cuCtxSynchronize, (void))                                                               \
  F(CtxGetApiVersion, cuCtxGetApiVersion, (CUcontext context, unsigned *version))                           \
  F(CtxGetId, cuCtxGetId, (CUcontext context, unsigned long long *id))                                      \
  F(CtxRecordEvent, cuCtxRecordEvent, (CUcontext context, CUevent event))                                   \
  F(ModuleLoadData, cuModuleLoadData, (CUmodule *module, const void *image))                                \
  F(MemAlloc, cuMemAlloc_v2, (CUdeviceptr *ptr, size_t bytes))                                              \
  F(MemAllocPitch, cuMemAllocPitch_v2,                                                                      \
    (CUdeviceptr *ptr, size_t *pitch, size_t width, size_t height, unsigned element))                       \
  F(MemAllocManaged, cuMemAllocManaged, (CUdeviceptr *ptr, size_t bytes, unsigned flags))                   \
  F(MemFree, cuMemFree_v2, (CUdeviceptr ptr))                                                               \
  F(MemGetInfo, cuMemGetInfo_v2, (size_t *available, size_t *total))                                        \
  F(MemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *bytes, CUdeviceptr ptr))       \
  F(MemcpyDtoH, cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes))                                \
  F(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                                  \
    (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                                      \
  F(MemsetD32, cuMemsetD32_v2, (CUdeviceptr ptr, unsigned value, size_t count))                             \
  F(MemsetD32Async, cuMemsetD32Async, (CUdeviceptr ptr, unsigned value, size_t count, CUstream stream))     \
  F(MemAllocAsync, cuMemAllocAsync, (CUdeviceptr *ptr, size_t bytes, CUstream stream))                      \
  F(MemAllocFromPoolAsync, cuMemAllocFromPoolAsync,                                                         \
    (CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream))                                   \
  F(MemFreeAsync, cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream))                                       \
  F(MemPoolTrimTo, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep))                                       \
  F(MemPoolSetAttribute, cuMemPoolSetAttribute,                                                             \
    (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                                        \
  F(MemPoolGetAttribute, cuMemPoolGetAttribute,                                                             \
    (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                                        \
  F(MemGetAllocationGranularity, cuMemGetAllocationGranularity,                                             \
    (size_t *bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option))              \
  F(MemAddressReserve, cuMemAddressReserve,                                                                 \
    (CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))         \
  F(MemAddressFree, cuMemAddressFree, (CUdeviceptr ptr, size_t bytes))                                      \
  F(MemCreate, cuMemCreate,                                                                                 \
    (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,                   \
     unsigned long long flags))                                                                             \
  F(MemRelease, cuMemRelease, (CUmemGenericAllocationHandle handle))                                        \
  F(MemMap, cuMemMap,                                                                                       \
    (CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,                     \
     unsigned long long flags))                                                                             \
  F(MemSetAccess, cuMemSetAccess,                                                                           \
    (CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *access, size_t count))                           \
  F(MemUnmap, cuMemUnmap, (CUdeviceptr ptr, size_t bytes))                                                  \
  F(MemRetainAllocationHandle, cuMemRetainAllocationHandle,                                                 \
    (CUmemGenericAllocationHandle *handle, void *ptr))                                                      \
  F(IpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle *handle, CUdeviceptr ptr))                          \
  F(PointerGetAttribute, cuPointerGetAttribute,                                                             \
    (void *data, CUpointer_attribute attribute, CUdeviceptr ptr))                                           \
  F(PointerGetAttributes, cuPointerGetAttributes,                                                           \
    (unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr))                        \
  F(ArrayCreate, cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *shape))                    \
  F(ArrayDestroy, cuArrayDestroy, (CUarray array))                                                          \
  F(Array3DCreate, cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape))              \
  F(MipmappedArrayCreate, cuMipmappedArrayCreate,                                                           \
    (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels))                       \
  F(MipmappedArrayDestroy, cuMipmappedArrayDestroy, (CUmipmappedArray array))                               \
  F(StreamCreate, cuStreamCreate, (CUstream *stream, unsigned flags))                                       \
  F(StreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                                   \
  F(StreamSynchronize, cuStreamSynchronize, (CUstream stream))                                              \
  F(StreamQuery, cuStreamQuery, (CUstream stream))                                                          \
  F(StreamGetCtx, cuStreamGetCtx, (CUstream stream, CUcontext *context))                                    \
  F(LaunchHostFunc, cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data))                     \
  F(EventCreate, cuEventCreate, (CUevent *event, unsigned flags))                                           \
  F(EventDestroy, cuEventDestroy_v2, (CUevent event))                                                       \
  F(EventRecord, cuEventRecord, (CUevent event, CUstream stream))                                           \
  F(EventQuery, cuEventQuery, (CUevent event))                                                              \
  F(EventSynchronize, cuEventSynchronize, (CUevent event))                                                  \
  F(StreamBeginCapture, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode))               \
  F(StreamEndCapture, cuStreamEndCapture, (CUstream stream, CUgraph *graph))                                \
  F(StreamIsCapturing, cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status))               \
  F(ThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode))        \
  F(GraphInstantiateWithFlags, cuGraphInstantiateWithFlags,                                                 \
    (CUgraphExec *executable, CUgraph graph, unsigned long long flags))                                     \
  F(GraphLaunch, cuGraphLaunch, (CUgraphExec executable, CUstream stream))                                  \
  F(GraphExecDestroy, cuGraphExecDestroy, (CUgraphExec executable))                                         \
  F(GraphDestroy, cuGraphDestroy, (CUgraph graph))

#define CUDA_DRIVER_DECLARATION(name, symbol, parameters) CUresult symbol parameters;
CUDA_DRIVER_FUNCTIONS(CUDA_DRIVER_DECLARATION)

/* A pointer to each: `driver.MemAlloc` is cuMemAlloc. */
struct cuda_driver {
#define CUDA_DRIVER_FIELD(name, symbol, parameters) CUresult(*name) parameters;
  CUDA_DRIVER_FUNCTIONS(CUDA_DRIVER_FIELD)
};

/* Finds one symbol. ISO C has no cast from `void *` to a function pointer; a copy of the bytes it has. */
static inline void cuda_driver_symbol(void *library, const char *symbol, void *place) {
  void *found = dlsym(library, symbol);
  memcpy(place, &found, sizeof found);
}

/* Finds all functions; what the library lacks is NULL. */
static inline void cuda_driver_open(struct cuda_driver *driver, void *library) {
#define CUDA_DRIVER_FIND(name, symbol, parameters) cuda_driver_symbol(library, #symbol, &driver->name);
  CUDA_DRIVER_FUNCTIONS(CUDA_DRIVER_FIND)
}

#ifdef __cplusplus
}
#endif

#endif /* CUDA_DRIVER_H */
