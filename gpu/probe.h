/* probe.h: what the programs probe_*.c share. A probe asks the driver one thing that the library takes for granted, or that the
 * simulated driver imitates, and compares the answer with the simulated one's. Each runs in a process of its own:
 *
 *   probe_NAME --list     the probes of the program, a line each: name, tab, what is taken for granted
 *   probe_NAME PROBE      prints "as simulated" or "differs: ..." lines
 *
 * Exit codes: 0 as simulated, 1 differs, 77 could not be asked. */

#ifndef PROBE_H
#define PROBE_H

#define CHECK_WITHOUT_LIBRARY
#include "check.h"
#include "driver.h"

typedef unsigned long long CUhandle;

struct location {
  int type, id;
};

struct allocation_prop {
  int type, handle_types;
  struct location location;
  void *win32;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};

struct access_desc {
  struct location location;
  int flags;
};

/* As DRIVER_FUNCTIONS of driver.h; NULL where the driver is too old. */
#define PROBE_FUNCTIONS(F)                                                                                       \
  F(GetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                          \
  F(GetName, "cuDeviceGetName", (char *name, int length, CUdevice device))                                       \
  F(GetProcAddress, "cuGetProcAddress_v2", (const char *name, void **out, int version, unsigned long long flags, \
                                            int *status))                                                        \
  F(GetProcAddressOld, "cuGetProcAddress", (const char *name, void **out, int version, unsigned long long flags)) \
  F(CtxApiVersion, "cuCtxGetApiVersion", (CUcontext context, unsigned *version))                                 \
  F(CtxGetId, "cuCtxGetId", (CUcontext context, unsigned long long *id))                                         \
  F(CtxGetDevice, "cuCtxGetDevice", (CUdevice * device))                                                         \
  F(CtxRecordEvent, "cuCtxRecordEvent", (CUcontext context, CUevent event))                                      \
  F(StreamGetCtx, "cuStreamGetCtx", (CUstream stream, CUcontext * context))                                      \
  F(StreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned flags))                      \
  F(EventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                                             \
  F(EventRecord, "cuEventRecord", (CUevent event, CUstream stream))                                              \
  F(EventQuery, "cuEventQuery", (CUevent event))                                                                 \
  F(EventSynchronize, "cuEventSynchronize", (CUevent event))                                                     \
  F(EventDestroy, "cuEventDestroy_v2", (CUevent event))                                                          \
  F(Granularity, "cuMemGetAllocationGranularity", (size_t *bytes, const struct allocation_prop *prop, int option)) \
  F(Reserve, "cuMemAddressReserve", (CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr hint,         \
                                     unsigned long long flags))                                                  \
  F(AddressFree, "cuMemAddressFree", (CUdeviceptr ptr, size_t bytes))                                            \
  F(Create, "cuMemCreate", (CUhandle *handle, size_t bytes, const struct allocation_prop *prop,                  \
                            unsigned long long flags))                                                           \
  F(Map, "cuMemMap", (CUdeviceptr ptr, size_t bytes, size_t offset, CUhandle handle, unsigned long long flags))  \
  F(SetAccess, "cuMemSetAccess", (CUdeviceptr ptr, size_t bytes, const struct access_desc *access, size_t count)) \
  F(Unmap, "cuMemUnmap", (CUdeviceptr ptr, size_t bytes))                                                        \
  F(Release, "cuMemRelease", (CUhandle handle))                                                                  \
  F(AllocAsync, "cuMemAllocAsync", (CUdeviceptr *ptr, size_t bytes, CUstream stream))                            \
  F(FreeAsync, "cuMemFreeAsync", (CUdeviceptr ptr, CUstream stream))                                             \
  F(IpcHandle, "cuIpcGetMemHandle", (void *handle, CUdeviceptr ptr))                                             \
  F(PointerAttribute, "cuPointerGetAttribute", (void *data, int attribute, CUdeviceptr ptr))                     \
  F(AddressRange, "cuMemGetAddressRange_v2", (CUdeviceptr *base, size_t *bytes, CUdeviceptr ptr))                \
  F(SetSync, "cuMemsetD32_v2", (CUdeviceptr ptr, unsigned value, size_t count))

#define PROBE_FIELD(name, symbol, parameters) CUresult(*name) parameters;
static struct {
  PROBE_FUNCTIONS(PROBE_FIELD)
} more;
static void *probe_library;

static inline void probe_open(void) {
  driver_open();
  probe_library = dlopen("libcuda.so.1", RTLD_NOW);
#define PROBE_LOAD(name, symbol, parameters) driver_symbol(probe_library, symbol, &more.name);
  PROBE_FUNCTIONS(PROBE_LOAD)
}

/* ---- answers ---- */

static int probe_differences;

static inline void same(const char *what, long long got, long long simulated) {
  if (got != simulated) {
    printf("differs: %s: %lld, simulated %lld\n", what, got, simulated);
    probe_differences++;
  }
}

static inline void holds_true(const char *what, int condition) {
  if (!condition) {
    printf("differs: not so: %s\n", what);
    probe_differences++;
  }
}

#define SAME(call, simulated) same(#call, (long long)(call), (simulated))
#define TRUE(condition) holds_true(#condition, (condition) ? 1 : 0)

/* What a probe needs before it can ask. */
static inline void cannot_ask(const char *why) {
  printf("skipped: %s\n", why);
  fflush(stdout);
  _exit(EXIT_SKIPPED);
}

static inline void must(CUresult result, const char *what) {
  if (result != 0) {
    printf("skipped: %s answered %d\n", what, result);
    fflush(stdout);
    _exit(EXIT_SKIPPED);
  }
}

#define MUST(call) must((call), #call)
#define NEEDS(function) ((function) == NULL ? cannot_ask("the driver has no " #function) : (void)0)

/* ---- memory through the virtual memory calls, on device 0 ---- */

static inline struct allocation_prop device_memory(void) {
  struct allocation_prop prop;
  memset(&prop, 0, sizeof prop);
  prop.type = 1;          /* pinned */
  prop.location.type = 1; /* device */
  return prop;
}

static inline size_t page_size(void) {
  struct allocation_prop prop = device_memory();
  size_t bytes = 0;
  NEEDS(more.Granularity);
  MUST(more.Granularity(&bytes, &prop, 0));
  return bytes;
}

static inline CUresult create(CUhandle *handle, size_t bytes) {
  struct allocation_prop prop = device_memory();
  return more.Create(handle, bytes, &prop, 0);
}

static inline CUresult give_access(CUdeviceptr ptr, size_t bytes) {
  struct access_desc access;
  memset(&access, 0, sizeof access);
  access.location.type = 1;
  access.flags = 3; /* read and write */
  return more.SetAccess(ptr, bytes, &access, 1);
}

/* A fresh range with one mapped chunk of a page at its start. */
static inline CUdeviceptr mapped_page(size_t range, CUhandle *handle) {
  size_t page = page_size();
  CUdeviceptr base = 0;
  MUST(more.Reserve(&base, range, 0, 0, 0));
  MUST(create(handle, page));
  MUST(more.Map(base, page, 0, *handle, 0));
  MUST(give_access(base, page));
  return base;
}

/* ---- the program ---- */

struct probe {
  const char *name, *assumption;
  void (*ask)(void);
};

/* `probes` ends with a NULL name. */
static inline int probe_main(const struct probe *probes, int argc, char **argv) {
  const struct probe *each;
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (each = probes; each->name != NULL; each++) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
      printf("%s\t%s\n", each->name, each->assumption);
    } else if (argc == 2 && strcmp(argv[1], each->name) == 0) {
      probe_open();
      each->ask();
      if (probe_differences == 0) {
        printf("as simulated\n");
      }
      return probe_differences == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
    }
  }
  return argc == 2 && strcmp(argv[1], "--list") == 0 ? EXIT_SUCCESS : 2;
}

#endif /* PROBE_H */
