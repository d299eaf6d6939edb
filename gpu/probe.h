/* probe.h: what the programs probe_*.c share. A probe asks the driver one thing that the library takes for
 * granted, or that the simulated driver imitates, and compares the answer with the simulated one's. Each runs
 * in a process of its own:
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

static void *probe_library;

static inline void probe_open(void) {
  driver_open();
  probe_library = dlopen("libcuda.so.1", RTLD_NOW);
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

static inline CUmemAllocationProp device_memory(void) {
  CUmemAllocationProp prop;
  memset(&prop, 0, sizeof prop);
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return prop;
}

static inline size_t page_size(void) {
  CUmemAllocationProp prop = device_memory();
  size_t bytes = 0;
  NEEDS(cu.MemGetAllocationGranularity);
  MUST(cu.MemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return bytes;
}

static inline CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes) {
  CUmemAllocationProp prop = device_memory();
  return cu.MemCreate(handle, bytes, &prop, 0);
}

static inline CUresult give_access(CUdeviceptr ptr, size_t bytes) {
  CUmemAccessDesc access;
  memset(&access, 0, sizeof access);
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return cu.MemSetAccess(ptr, bytes, &access, 1);
}

/* A fresh range with one mapped chunk of a page at its start. */
static inline CUdeviceptr mapped_page(size_t range, CUmemGenericAllocationHandle *handle) {
  size_t page = page_size();
  CUdeviceptr base = 0;
  MUST(cu.MemAddressReserve(&base, range, 0, 0, 0));
  MUST(create(handle, page));
  MUST(cu.MemMap(base, page, 0, *handle, 0));
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
